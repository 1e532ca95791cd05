"""Converted models under threads, export, compile and torch.func, and what converting touches."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as stock
from convert_common import Block, assert_same
from torch import nn

import braze


def test_other_threads_run_models_meanwhile():
    stock_model, model = nn.Sequential(Block(), nn.ReLU()), braze.convert(Block())
    x, stop, errors = torch.randn(2, 1, 8, 8), threading.Event(), []

    def work():
        while not stop.is_set():
            try:
                stock_model(x)
                nn.Linear(2, 2).register_buffer("b", x)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        copy.deepcopy(model)
        braze.convert_report(stock_model)
        braze.convert(copy.deepcopy(stock_model))
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors


def test_converting_patches_and_executes_nothing(monkeypatch):
    """Not even an attribute of a module is read through its class."""
    model = Unread()
    monkeypatch.setattr(Unread, "__getattribute__", Unread.forbidden)
    before = dict(vars(nn.Module)), torch.get_rng_state()
    report = braze.convert_report(model)
    monkeypatch.undo()
    assert dict(vars(nn.Module)) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert any(e.name == "inner.0, inner.1" for e in report.fused)


class Unread(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    @property
    def late(self):
        raise AssertionError("executed")

    def forward(self, x):
        return stock.relu(self.inner(x)) * self.late

    def forbidden(self, name):
        if name in ("__dict__", "__class__"):
            return object.__getattribute__(self, name)
        raise AssertionError(name)


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_a_dynamic_batch(strict):
    torch.backends.cudnn.allow_tf32 = False  # export reads the older flag
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    original = nn.Sequential(*layers, nn.Linear(4 * 9, 5), nn.ReLU()).eval()
    model = braze.convert(copy.deepcopy(original))
    batch = torch.export.Dim("batch", min=1, max=4096)
    x = torch.randn(8, 1, 8, 8)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict)
    for n in (1, 3, 8, 100):
        x = torch.randn(n, 1, 8, 8)
        assert_same(exported.module()(x), original(x))


def test_compile_of_spliced_forwards():
    torch._dynamo.reset()
    original = Block()
    model = braze.convert(copy.deepcopy(original))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for n in (2, 3, 4):
        x = torch.randn(n, 1, 8, 8)
        assert_same(compiled(x), original(x))


def test_gradient_penalty():
    """A second derivative through every kind of run."""
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), Tail()]
    original = nn.Sequential(*layers).double()
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    grads = []
    for m in (model, original):
        (grad,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        penalty = (grad.square().sum((1, 2, 3)).sqrt() - 1).square().sum()
        grads.append(torch.autograd.grad(penalty, list(m.parameters()), allow_unused=True))
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 9, 3)

    def forward(self, x):
        x = stock.relu(self.bn(self.conv(x)))
        return stock.relu(self.fc(x.flatten(1)))


def test_functional_transforms():
    original = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(5, 4, dtype=torch.float64)
    results = []
    for m in (model, original):
        parameters = dict(m.named_parameters())

        def loss(p, x, m=m):
            return torch.func.functional_call(m, p, (x,)).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        jacobian = torch.func.jacrev(lambda x, m=m: m(x))(x[0])
        forward = torch.func.jvp(m, (x,), (torch.ones_like(x),))
        results.append((per_sample, jacobian, forward))
    assert_same(*results, rtol=1e-9, atol=1e-12)
