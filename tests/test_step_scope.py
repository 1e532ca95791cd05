"""What a step has for the ops, and for whom; steps that are pickled and copied."""

import copy
import pathlib
import pickle
import threading

import pytest
import torch

import braze
from braze._step_scope import StepScope, current
from step_common import assert_same, batches, loss_fn, make, plain_loop

OLD_STEP = pathlib.Path(__file__).parent / "data" / "step_by_0.1.0.pt"


class Watches(torch.nn.Module):
    """Notes the scope of each phase of a step."""

    def __init__(self):
        super().__init__()
        self.linear = braze.nn.Linear(16, 5)
        self.scopes = []

    def forward(self, x):
        self.scopes.append(current.scope)
        return self.linear(x.flatten(1))


def test_a_step_enters_and_leaves_its_scope(device):
    model = Watches().to(device)
    outer = StepScope()
    with outer:
        step = braze.TrainStep(model, loss_fn, braze.optim.SGD(model.parameters(), lr=0.1))
        for x, y in batches(device, 2):
            step(x, y)
            assert current.scope is outer
    assert current.scope is None
    assert len(set(model.scopes)) == 2  # each call has its own
    assert all(isinstance(scope, StepScope) and scope is not outer for scope in model.scopes)


def test_a_scope_ends_with_an_exception(device):
    model = Watches().to(device)
    step = braze.TrainStep(model, loss_fn, braze.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError):
        step(torch.ones(2, 3, device=device), torch.zeros(2, dtype=torch.int64, device=device))
    assert current.scope is None


def test_a_scope_is_its_threads():
    seen = []
    with StepScope():
        thread = threading.Thread(target=lambda: seen.append(current.scope))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_scope_without_anything_offers_nothing():
    x = torch.ones(2)
    scope, optimizer = StepScope(), braze.optim.SGD([x], lr=0.1)
    assert scope.cast_of(x, torch.bfloat16) is None
    assert scope.patch_moments(x, x, (0, 0)) is None
    assert scope.unit_gradient(x.dtype, x.device) is None
    assert StepScope(unit_gradients={}).unit_gradient(x.dtype, x.device) is None
    assert scope.sources_of(optimizer) is None


def test_the_update_takes_its_own_casts_only(device):
    """A gradient that is to be the cast of a tensor is written by its optimizer's launch; another
    optimizer reads it as it is."""
    results = []
    for own in (True, False):
        p = torch.nn.Parameter(torch.zeros(3, device=device))
        p.grad = torch.full((3,), 5.0, device=device)
        source = torch.tensor([1.0, 2.0, 3.0], device=device, dtype=torch.bfloat16)
        optimizers = [braze.optim.SGD([p], lr=1.0) for _ in range(2)]
        sources = {p.grad.data_ptr(): source}
        with StepScope(optimizer=optimizers[0], sources=sources):
            optimizers[0 if own else 1].step()
        results.append((p.detach().tolist(), p.grad.tolist()))
    assert results[0] == ([-1.0, -2.0, -3.0], [1.0, 2.0, 3.0])
    assert results[1] == ([-5.0] * 3, [5.0] * 3)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_a_copy_goes_on_by_itself(how):
    """In the middle of a window, too."""
    data, options = batches("cpu", 6), {"accumulate": 2, "max_grad_norm": 0.5}
    model, optimizer = make("cpu")
    step = braze.TrainStep(model, loss_fn, optimizer, **options)
    for x, y in data[:3]:
        step(x, y)
    other = how(step)
    torch.manual_seed(7)
    losses = [step(x, y) for x, y in data[3:]]
    torch.manual_seed(7)
    assert_same(other.model, [other(x, y) for x, y in data[3:]], model, losses)
    assert other.model is not model
    assert torch.equal(other.grad_norm, step.grad_norm)


def test_a_step_pickled_by_0_1_0_goes_on():
    """It was saved after the first batch of a window of two."""
    saved = torch.load(OLD_STEP, weights_only=False)
    step, batch = saved["step"], saved["batch"]
    other = copy.deepcopy(step)
    losses = [step(*batch) for _ in range(3)]
    settings = {"autocast": torch.bfloat16, "accumulate": 2, "max_grad_norm": 0.5}
    expected = plain_loop(other.model, other.optimizer, [batch] * 4, **settings)
    assert losses == expected[1:]
    for p, q in zip(step.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert step.grad_norm > 0
