"""braze.optim.LAMB against its paper's formulas in torch's ops, judged against float64."""

import copy
import math

import pytest
import torch
from optim_common import (
    captured_steps,
    compare_by_rule,
    moved_trainings,
    parameters,
    scaled_steps,
    steps_with_rates,
    train,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import braze
from common import assert_by_rule
from conftest import cuda_only

OPTIONS = [
    {},
    {"weight_decay": 0.0, "betas": (0.3, 0.6), "eps": 1e-3},
    {"norm_bounds": (0.5, 10.0), "maximize": True},
    {"norm_bounds": (20.0, 20.0), "weight_decay": 0.5},
]
TERMS = 100


class Formulas(torch.optim.Optimizer):
    """You et al. (2020), algorithm 2, line by line."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=1e-2,
        norm_bounds=(0.0, math.inf),
        maximize=False,
    ):
        super().__init__(params, {"lr": lr})
        self.settings = betas, eps, weight_decay, norm_bounds, maximize

    @torch.no_grad()
    def step(self):
        (beta1, beta2), eps, weight_decay, bounds, maximize = self.settings
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            g, m, v, t = -p.grad if maximize else p.grad, *map(state.get, (
                "exp_avg", "exp_avg_sq", "step"
            ))  # fmt: skip
            m.mul_(beta1).add_((1 - beta1) * g)
            v.mul_(beta2).add_((1 - beta2) * g**2)
            r = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
            u = r + weight_decay * p
            norm, length = p.norm(), u.norm()
            ratio = norm.clamp(*bounds) / length
            ratio = torch.where((norm == 0) | (length == 0), torch.ones_like(ratio), ratio)
            p.sub_(self.param_groups[0]["lr"] * ratio * u)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_matches_the_formulas(device, dtype, options):
    values = parameters(device, dtype)
    if dtype != torch.float16:  # whose stored squares underflow beside a vanishing weight
        values.append(torch.zeros(40, device=device, dtype=dtype))
    trained = [
        train(braze.optim.LAMB, values, lr=0.01, **options),
        train(Formulas, values, lr=0.01, **options),
        train(Formulas, values, lr=0.01, dtype=torch.float64, **options),
    ]
    moved = moved_trainings(Formulas, values, lr=0.01, **options)
    compare_by_rule(*trained, TERMS, moved)
    assert all(state["step"] == 5 for state in trained[0][1].state.values())


def test_many_parameters(device):
    """More tensors than one launch takes, of many sizes."""
    values = parameters(device, torch.float32, [(n % 97 * 43 + 1,) for n in range(500)])
    a, optimizer = train(braze.optim.LAMB, values, steps=3, lr=0.01)
    s, _ = train(Formulas, values, steps=3, lr=0.01)
    torch.testing.assert_close(a, s)
    again, _ = train(braze.optim.LAMB, values, steps=3, lr=0.01)
    assert all(map(torch.equal, a, again))
    copied = copy.deepcopy(optimizer)
    optimizer.load_state_dict(copied.state_dict())


def test_clipping_and_rate_tensors(device):
    values = parameters(device, torch.float32)
    expected, _ = train(Formulas, values, lr=0.125, clip=0.5)
    for lr in (0.125, torch.tensor(0.125, device=device)):
        actual, optimizer = train(braze.optim.LAMB, values, lr=lr, max_grad_norm=0.5)
        torch.testing.assert_close(actual, expected)
        assert optimizer.grad_norm > 10


INF = float("inf")


@pytest.mark.parametrize("values", [(INF, 2, 3), (2, INF, 3)], ids=str)
def test_grad_scaler(device, values):
    p, optimizer = scaled_steps(braze.optim.LAMB, device, values)
    q, _ = scaled_steps(Formulas, device, values)
    torch.testing.assert_close(p, q)
    assert optimizer.state[p]["step"] == 2


def test_opcheck(device, dtype):
    lists = [parameters(device, dtype, [(4, 3), (5,)]) for _ in range(3)]
    lists.append([t.abs() for t in lists.pop()])
    steps = [torch.zeros((), device=device) for _ in range(2)]
    tickets = torch.zeros(1024, dtype=torch.int32, device=device)
    arguments = (
        *lists,
        [t.abs() for t in lists[0]],
        steps,
        [],
        [],
        0.1,
        0.9,
        0.99,
        1e-6,
        0.1,
        0.0,
        9.0,
    )
    torch.library.opcheck(torch.ops.braze.lamb_.default, arguments, {"tickets": tickets})


def test_bad_input(device):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    for options in (
        {"lr": -1.0},
        {"betas": (1.0, 0.5)},
        {"eps": -1.0},
        {"weight_decay": -1.0},
        {"norm_bounds": (2.0, 1.0)},
        {"norm_bounds": (-1.0, 1.0)},
        {"max_grad_norm": -1.0},
    ):
        with pytest.raises(ValueError, match=r"Invalid|max_grad_norm above 0"):
            braze.optim.LAMB([p], **options)
    p.grad = torch.ones(3, device=device).to_sparse()
    with pytest.raises(RuntimeError, match=r"optim\.LAMB does not support sparse gradients"):
        braze.optim.LAMB([p]).step()


@cuda_only
def test_captured_graph_follows_rate_and_step(device):
    values = parameters(device, torch.float32, [(3,), (10000,)])
    params, _ = captured_steps(braze.optim.LAMB, values, (0.1, 0.2))
    torch.testing.assert_close(params, steps_with_rates(Formulas, values, (0.1, 0.2)))


def test_the_tests_reject_a_wrong_update(device):
    """Weight decay left out of the norm, by a bound that never holds, and plain AdamW."""
    values = parameters(device, torch.float32, [(400,)])
    stock, _ = train(Formulas, values, lr=0.01)
    reference, _ = train(Formulas, values, lr=0.01, dtype=torch.float64)
    for wrong, options in (
        (braze.optim.AdamW, {"eps": 1e-6}),
        (braze.optim.LAMB, {"norm_bounds": (0.0, 10.0)}),
    ):
        mine, _ = train(wrong, values, lr=0.01, **options)
        with pytest.raises(AssertionError, match="error"):
            assert_by_rule(mine[0], stock[0], reference[0])


def test_average(device):
    """Beside torch's, which follows the same optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 40, device=device)
    optimizer = braze.optim.LAMB(model.parameters(), lr=0.1)
    average = braze.optim.EMA(model, optimizer, 0.5)
    stock = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    for factor in (1.0, INF, 2.0, 3.0):
        optimizer.zero_grad()
        scaler.scale((model(torch.ones(2, 30, device=device)) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        stock.update_parameters(model)
    torch.testing.assert_close(list(average.parameters()), list(stock.parameters()))
    assert average.n_averaged == 4
