"""Adam, AdamW and RMSprop against torch's; what is SGD's alone is in test_sgd.py."""

import copy
import functools
import io
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_common import (
    captured_steps,
    compare_by_rule,
    moved_trainings,
    parameters,
    scaled_steps,
    scheduled,
    steps_with_rates,
    train,
)
from torch.multiprocessing.reductions import StorageWeakRef

import braze
from common import assert_by_rule
from conftest import cuda_only

OPTIONS = {
    "Adam": [
        {},
        {"amsgrad": True, "weight_decay": 0.1},
        {"betas": (0.3, 0.6), "eps": 1e-3, "maximize": True},
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
    ],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.0}],
    "RMSprop": [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"centered": True, "maximize": True},
        {"centered": True, "momentum": 0.9, "alpha": 0.4, "eps": 1e-3},
    ],
}
CASES = [
    pytest.param(name, options, id=f"{name}-{options}")
    for name, cases in OPTIONS.items()
    for options in cases
]
NAMES = list(OPTIONS)
# The case with the most states.
MOST = {
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"centered": True, "momentum": 0.9},
}
# Roundings of a step times steps: the terms of the tolerance rule.
TERMS = 100


def both(name):
    return getattr(braze.optim, name), getattr(torch.optim, name)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_matches_stock(device, dtype, name, options):
    values = parameters(device, dtype)
    ours, stock = both(name)
    compare_by_rule(
        train(ours, values, lr=0.01, **options),
        train(stock, values, lr=0.01, **options),
        train(stock, values, dtype=torch.float64, lr=0.01, **options),
        TERMS,
        moved_trainings(stock, values, lr=0.01, **options),
    )


@pytest.mark.parametrize("name", [*NAMES, "SGD"])
def test_clipping(device, dtype, name):
    """In the update, as torch.nn.utils.clip_grad_norm_ before it; gradients stay as they are."""
    values, (ours, stock) = parameters(device, dtype), both(name)
    for limit in (20.0, 1e6):  # far enough from what float16 flushes to zero, squared
        options = {"momentum": 0.9} if name == "SGD" else {}
        clipped = functools.partial(train, stock, values, clip=limit, **options)
        trained = train(ours, values, max_grad_norm=limit, **options)
        moved = moved_trainings(stock, values, clip=limit, **options)
        compare_by_rule(trained, clipped(), clipped(dtype=torch.float64), TERMS, moved)
        mine, optimizer = trained
        norm = torch.nn.utils.get_total_norm([p.grad for p in mine])
        exact = torch.nn.utils.get_total_norm([p.grad.double() for p in mine])
        assert exact > 40
        assert_by_rule(optimizer.grad_norm.to(norm.dtype), norm, exact)
        assert optimizer.grad_norm.shape == ()


def test_clipping_over_groups_and_dtypes(device):
    """One norm of all gradients, whatever their group, dtype and layout."""
    values = parameters(device, torch.float32, [(300, 7), (5000,), (4, 3)])
    values[1] = values[1].to(torch.bfloat16)
    values[2] = values[2].double()
    trained = []
    for cls, options, dtype in (
        (braze.optim.Adam, {"max_grad_norm": 1.0}, None),
        (torch.optim.Adam, {}, None),
        (torch.optim.Adam, {}, torch.float64),
    ):
        params = [torch.nn.Parameter(v.to(dtype or v.dtype, copy=True)) for v in values]
        optimizer = cls([{"params": params[:1]}, {"params": params[1:], "lr": 0.1}], **options)
        for _ in range(2):
            for p, v in zip(params, values, strict=True):
                p.grad = (v if v.dim() == 1 else v.t().contiguous().t()).to(p, copy=True)
            if not options:
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
        trained.append(params)
    for a, s, r in zip(*trained, strict=True):
        assert_by_rule(a, s, r, terms=TERMS)


def test_norms(device, dtype):
    """Many tensors, one without elements, gaps, unaligned memory, infinities."""
    tensors = parameters(device, dtype, [(n % 613 + 1,) for n in range(400)] + [(50000,), (0,)])
    tensors[3] = parameters(device, dtype, [(101,)])[0][1:]
    tensors[4] = parameters(device, dtype, [(64, 66)])[0][:, ::2]
    tickets = torch.zeros(1024, dtype=torch.int32, device=device)
    scale = torch.tensor(4.0, device=device)

    def norm(*args):
        return torch.ops.braze.grad_norm(*args, tickets=tickets)

    stock = torch.nn.utils.get_total_norm(tensors)
    exact = torch.nn.utils.get_total_norm([t.double() for t in tensors])
    actual = norm(tensors)
    assert actual.dtype == torch.float64
    assert_by_rule(actual.to(dtype), stock, exact)
    assert torch.equal(norm(tensors), actual)
    assert torch.equal(norm(tensors, scale), actual / 4)
    assert norm(tensors[-1:]) == 0
    tensors[0] = torch.full_like(tensors[0], float("-inf"))
    assert norm(tensors).isinf()
    assert not tickets.any()
    with pytest.raises(RuntimeError, match="at least one tensor"):
        norm([])


def test_norms_of_several_dtypes(device):
    tensors = [torch.full((3000,), 2.0, device=device, dtype=d) for d in braze.testing.DTYPES]
    tickets = torch.zeros(1024, dtype=torch.int32, device=device)
    assert torch.ops.braze.grad_norm(tensors, tickets=tickets) == 48000**0.5
    torch.library.opcheck(torch.ops.braze.grad_norm.default, (tensors, None, tickets))


@pytest.mark.parametrize("name", NAMES)
def test_many_parameters(device, name):
    """More tensors than one launch takes, of many sizes."""
    ours, stock = both(name)
    values = parameters(device, torch.float32, [(n % 97 * 43 + 1,) for n in range(500)])
    a, optimizer = train(ours, values, steps=3, lr=0.01, **MOST[name])
    s, _ = train(stock, values, steps=3, lr=0.01, **MOST[name])
    torch.testing.assert_close(a, s)
    assert all(state["step"] == 3 for state in optimizer.state.values())


@pytest.mark.parametrize("name", NAMES)
def test_mixed_dtypes_layouts_and_missing_gradients(device, name):
    wide = torch.randn(6, 8, device=device)
    values = [
        torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last),
        torch.randn(4, 3, device=device, dtype=torch.float64).t(),
        wide[:, ::2],
        torch.randn(7, device=device).to(torch.bfloat16)[1:],
    ]
    trained = []
    ours, stock = both(name)
    for optimizer_class, dtype in ((ours, None), (stock, None), (stock, float)):
        base = wide.to(dtype or wide.dtype, copy=True)
        params = [torch.nn.Parameter(v.to(dtype or v.dtype, copy=True)) for v in values]
        params[2] = torch.nn.Parameter(base[:, ::2])
        unused = torch.nn.Parameter(torch.ones(3, device=device))
        groups = [{"params": params[:2]}, {"params": [*params[2:], unused], "lr": 0.3}]
        optimizer = optimizer_class(groups, lr=0.1, **MOST[name])
        torch.manual_seed(1)
        for step in range(3):
            for i, (p, v) in enumerate(zip(params, values, strict=True)):
                grad = torch.randn(p.shape, device=device).to(v.dtype).to(p.dtype)
                # Contiguous gradients for parameters that are not; one arrives a step late.
                p.grad = None if i == 0 and step == 0 else grad
            optimizer.step()
        assert torch.equal(unused, torch.ones_like(unused))
        assert unused not in optimizer.state
        trained.append((params, optimizer))
    compare_by_rule(*trained, TERMS)
    assert [p.stride() for p in trained[0][0]] == [p.stride() for p in trained[1][0]]


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", [{}, {"capturable": True}, {"fused": True}], ids=str)
def test_state_dicts_load_both_ways_in_mid_training(device, name, how):
    if "fused" in how and name == "RMSprop":
        how = {"foreach": True}
    if "capturable" in how and device == "cpu":
        how = {"foreach": False}
    values = parameters(device, torch.float32)
    expected, _ = train(both(name)[1], values, steps=4, lr=0.01, **MOST[name])
    for first, second in itertools.permutations(both(name)):
        params, optimizer = train(first, values, steps=2, lr=0.01, **MOST[name], **how)
        state = optimizer.state_dict()
        _, stock = train(both(name)[1], values, steps=2, lr=0.01, **MOST[name], **how)
        assert state["param_groups"] == stock.state_dict()["param_groups"]
        for mine, theirs in zip(
            state["state"].values(), stock.state_dict()["state"].values(), strict=True
        ):
            for key, tensor in theirs.items():
                assert mine[key].dtype == tensor.dtype
                assert mine[key].device == tensor.device
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = second(others, lr=1.0)
        other.load_state_dict(through_file(state))
        generator = torch.Generator().manual_seed(4 + torch.initial_seed())
        for step in range(4):
            for p in others:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
            if step >= 2:
                other.step()
        torch.testing.assert_close(others, expected)
    assert isinstance(both(name)[0]([torch.zeros(1)]), both(name)[1])


@pytest.mark.parametrize("name", NAMES)
def test_learning_rate_tensor_and_scheduler(device, name):
    ours, stock = both(name)
    values = parameters(device, torch.float32)
    expected, _ = train(stock, values, lr=0.125)
    for lr_device, lr_dtype in itertools.product(
        {device, "cpu"}, [torch.float32, torch.float64, torch.bfloat16]
    ):
        lr = torch.tensor(0.125, device=lr_device, dtype=lr_dtype)
        torch.testing.assert_close(train(ours, values, lr=lr)[0], expected)
    torch.testing.assert_close(scheduled(ours, device), scheduled(stock, device))


def test_tensors_as_betas(device):
    values = parameters(device, torch.float32)
    betas = torch.tensor(0.5), torch.tensor(0.75)
    a, _ = train(braze.optim.Adam, values, betas=betas)
    s, _ = train(torch.optim.Adam, values, betas=(0.5, 0.75))
    torch.testing.assert_close(a, s)


INF = float("inf")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("values", [(INF, 2, 3), (2, INF, 3), (2, 3)], ids=str)
def test_grad_scaler(device, name, values):
    """A skipped step is not counted."""
    ours, stock = both(name)
    results = [scaled_steps(cls, device, values, **MOST[name]) for cls in (ours, stock)]
    (p, optimizer), (q, other) = results
    torch.testing.assert_close(p, q)
    for key, tensor in other.state[q].items():
        torch.testing.assert_close(optimizer.state[p][key].to(tensor.device), tensor)
    clipped = [scaled_steps(ours, device, values, max_grad_norm=m, **MOST[name])[0] for m in (9, 1)]
    if name == "RMSprop":  # the scale of all gradients does not change Adam's steps
        assert not torch.equal(*clipped)
    assert clipped[1].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_what_changes_between_steps(device, name):
    """Gradients that come and go, settings, states and parameters replaced, other dtypes."""
    trained = []
    for cls in both(name):
        params = [torch.nn.Parameter(v) for v in parameters(device, torch.float32, [(9,), (4, 3)])]
        optimizer = cls([{"params": params}], lr=0.01, **MOST[name])

        def step(*without, params=params, optimizer=optimizer):
            for i, p in enumerate(optimizer.param_groups[0]["params"]):
                p.grad = None if i in without else torch.full_like(p, 0.5 + i)
            optimizer.step()

        for without in ((), (), (0,), (), (1,), (), (0, 1), ()):
            step(*without)
        state = optimizer.state[params[0]]
        state["step"] = state["step"] + 5
        step()
        key = next(k for k in state if k != "step")
        state[key] = state[key] * 0.5
        step()
        optimizer.state[params[0]] = dict(state, step=state["step"] * 2)
        step()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.param_groups[0]["weight_decay"] = 0.5
        step()
        optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(params[1].detach() + 1)
        step()
        step()
        trained.append(optimizer.param_groups[0]["params"])
    torch.testing.assert_close(*trained)
    mine = both(name)[0]([torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)])
    for p in mine.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    mine.step()
    (p, _) = mine.param_groups[0]["params"]
    p.data = p.data.double()
    p.grad = p.grad.double()
    with pytest.raises(RuntimeError, match="dtype"):
        mine.step()


@pytest.mark.parametrize("name", [*OPTIONS, "SGD"])
def test_gradients_are_not_kept(device, name):
    """Once they are dropped, their memory is free, however many steps were alike."""
    weights = [torch.nn.Parameter(torch.ones(5, device=device)) for _ in range(2)]
    optimizer = getattr(braze.optim, name)(weights, lr=0.1)
    for _ in range(4):
        for p in weights:
            p.grad = torch.ones_like(p)
        grads = [StorageWeakRef(p.grad.untyped_storage()) for p in weights]
        optimizer.step()
        optimizer.zero_grad()
        assert all(grad.expired() for grad in grads)


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_versions(device, name):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = both(name)[0]([p], lr=0.1, max_grad_norm=2.0, **MOST[name])
    p.grad = torch.ones_like(p)
    optimizer.step()
    tensors = [p, *optimizer.state[p].values()]
    versions = [t._version for t in tensors]
    y = (p * p).sum()
    optimizer.step()
    assert [t._version for t in tensors] == [v + 1 for v in versions]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    other = copy.deepcopy(optimizer)
    assert other.max_grad_norm == 2.0
    (q,) = other.param_groups[0]["params"]
    assert q is not p
    assert torch.equal(q, p)
    q.grad = torch.ones_like(p)
    other.step()
    optimizer.step()
    assert torch.equal(q, p)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(device, dtype, name):
    def tensors():
        return [torch.rand(4, 3, device=device).to(dtype), torch.rand(5, device=device).to(dtype)]

    steps = [torch.zeros((), device=device) for _ in range(2)]
    op = torch.ops.braze.rmsprop_ if name == "RMSprop" else torch.ops.braze.adam_
    switches = {"RMSprop": ("momentum", "centered"), "Adam": ("amsgrad",), "AdamW": ()}[name]
    kept = [tensors() for _ in range(1 + len(switches))] + [tensors()] * (name != "RMSprop")
    kept += [[]] * (3 - len(kept))
    options = {s: (0.5 if s == "momentum" else True) for s in switches}
    if name != "RMSprop":
        options["tickets"] = torch.zeros(1024, dtype=torch.int32, device=device)
    arguments = (tensors(), tensors(), *kept, steps, [], [], 0.1)
    torch.library.opcheck(op.default, arguments, options)


@pytest.mark.parametrize("name", NAMES)
def test_bad_input(device, name):
    ours, stock = both(name)
    p = torch.nn.Parameter(torch.ones(3, device=device))
    wrong = [{"lr": -1.0}, {"weight_decay": -1.0}, {"eps": -1.0}, {"lr": torch.ones(2)}]
    wrong += [{"momentum": -1.0}, {"alpha": -1.0}] if name == "RMSprop" else [{"betas": (1.0, 0.5)}]
    for options in wrong:
        with pytest.raises(ValueError) as expected:  # noqa: PT011 (the message is compared below)
            stock([p], **options)
        with pytest.raises(ValueError) as actual:  # noqa: PT011
            ours([p], **options)
        assert str(actual.value) == str(expected.value)
    with pytest.raises(ValueError, match="weight_decay to be a number"):
        ours([p], weight_decay=torch.tensor(0.1))
    with pytest.raises(ValueError, match="max_grad_norm above 0 or None, but got 0"):
        ours([p], max_grad_norm=0)
    with pytest.raises(RuntimeError, match="does not support differentiable=True"):
        ours([p], differentiable=True)
    table = torch.nn.Parameter(torch.ones(3, 2, device=device))
    table.grad = torch.ones(3, 2, device=device).to_sparse()
    with pytest.raises(RuntimeError, match=f"optim.{name} does not support sparse gradients"):
        ours([table]).step()
    complex_param = torch.nn.Parameter(torch.ones(3, device=device, dtype=torch.complex64))
    p.grad, complex_param.grad = torch.ones_like(p), torch.ones_like(complex_param)
    with pytest.raises(RuntimeError, match=r"expected parameters of dtype float64.*complex64"):
        ours([p, complex_param]).step()
    optimizer = ours([{"params": [torch.nn.Parameter(p.detach().clone())]}, {"params": [p]}])
    optimizer.param_groups[0]["params"][0].grad = p.grad
    optimizer.step()
    before = [q.detach().clone() for g in optimizer.param_groups for q in g["params"]]
    optimizer.state[p][ours._kinds[0]] = torch.zeros(3, device=device, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"dtype torch.float32, but got torch.float64"):
        optimizer.step()
    after = [q for g in optimizer.param_groups for q in g["params"]]
    assert all(map(torch.equal, before, after))


def test_bad_input_of_the_op(device):
    x = [torch.ones(3, device=device)]
    step = [torch.zeros((), device=device)]
    op = torch.ops.braze.adam_
    tickets = torch.zeros(1024, dtype=torch.int32, device=device)
    for args, options, words in [
        ((x, x, x, x, [], [], [], [], 0.1), {}, "expected 1 steps, but got 0"),
        ((x, x, x, x, x, step, [], [], 0.1), {}, "expected 1 grads and 0 max_exp_avg_sqs"),
        ((x, x, x, [], [], step, [], [], 0.1), {}, "expected 1 grads and 1 exp_avg_sqs"),
        ((x, x, x, x, [], x, [], [], 0.1), {}, "expected steps to be one float32 element"),
        ((x, x, x, [x[0].double()], [], step, [], [], 0.1), {}, "same dtype"),
        ((x, x, x, x, [], step, [], [], 0.1), {"averages": []}, "expected 1 averages, but got 0"),
        ((x, x, x, x, [], step, [], [], 0.1), {"averaged": x[0]}, "averaged to be one int64"),
        ((x, x, x, x, [], step, [], [], 0.1), {"grad_norm": x[0]}, "grad_norm to be one float64"),
        ((x, x, x, x, [], step, [], [], 0.1), {"tickets": x[0]}, "tickets to be 1024 int32"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            op(*args, **{"tickets": tickets} | options)
    assert torch.equal(x[0], torch.ones_like(x[0]))


@cuda_only
@pytest.mark.parametrize("name", NAMES)
def test_captured_graph_follows_rate_and_step(device, name):
    ours, stock = both(name)
    values, rates = parameters(device, torch.float32, [(3,), (10000,)]), (0.1, 0.1, 0.2)
    params, optimizer = captured_steps(ours, values, rates, max_grad_norm=1.0)
    torch.testing.assert_close(params, steps_with_rates(stock, values, rates, clip=1.0))
    assert all(optimizer.state[p]["step"] == 3 for p in params)


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 30), max_size=3), min_size=1, max_size=8),
    case=st.sampled_from([(name, options) for name in NAMES for options in OPTIONS[name]]),
)
def test_fuzzed_shapes(sizes, case):
    name, options = case
    ours, stock = both(name)
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        values = parameters(device, torch.float32, sizes)
        trained = [train(cls, values, steps=2, lr=0.01, **options) for cls in (ours, stock)]
        reference = train(stock, values, steps=2, lr=0.01, dtype=torch.float64, **options)
        compare_by_rule(*trained, reference, TERMS)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Adam", {"betas": (0.9, 0.99)}),
        ("AdamW", {"weight_decay": 0.0}),
        ("RMSprop", {"centered": True}),
    ],
)
def test_the_tests_reject_a_wrong_update(device, name, wrong):
    values, (ours, stock) = parameters(device, torch.float32), both(name)
    trained = [
        train(ours, values, lr=0.01, **wrong),
        train(stock, values, lr=0.01),
        train(stock, values, lr=0.01, dtype=torch.float64),
    ]
    with pytest.raises(AssertionError, match="error"):
        compare_by_rule(*trained, TERMS)
