"""Converted models where torch's own layers and functions have to run: methods that are replaced on
a layer, functions and classes of torch's that are, and what records torch's functions."""

import contextlib
import copy

import numpy
import pytest
import torch
import torch.nn.functional as stock
from convert_common import assert_same, call, replaced
from torch import nn
from torch.overrides import TorchFunctionMode

import braze
from braze import _stock
from braze.convert import kinds, runs
from convert_models import ops_run


class Calls(nn.Module):
    """Layers, functions and methods, in runs of every kind."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.tail = nn.Sequential(nn.Flatten(), nn.Linear(4 * 9, 4), nn.ReLU())

    def forward(self, x):
        x = self.bn(self.conv(x))
        x = stock.relu(x, inplace=True)
        x = self.block(torch.relu(x - 0.1)) + self.act(x).relu()
        return stock.log_softmax(self.tail(stock.max_pool2d(x, 2)), dim=1)


def images():
    return torch.randn(2, 1, 8, 8)


def compare(model, original, x, when=contextlib.nullcontext):
    for _ in range(2):
        with when():
            ours = call(model, x.clone())
        with when():
            theirs = call(original, x.clone())
        assert_same(ours, theirs, rtol=1e-4, atol=1e-4)
        assert_same(list(model.buffers()), list(original.buffers()))


# Methods of one layer.

METHODS = {
    "forward": ("bn", lambda x: (print("mine"), x * 3)[1]),
    "_check_input_dim": ("bn", lambda x: print("checked", x.dim())),
    "_conv_forward": ("conv", lambda x, w, b: (print("mine"), stock.conv2d(x, 2 * w, b))[1]),
    "_call_impl": ("bn", lambda x: (print("mine"), x * 3)[1]),
    "_compiled_call_impl": ("bn", lambda x: (print("mine"), x * 3)[1]),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", METHODS)
def test_methods_replaced_on_a_layer(name, when):
    layer, method = METHODS[name]
    assert name in kinds.METHODS_OF_LAYERS
    original = Calls()
    model = copy.deepcopy(original)
    if when == "after":
        braze.convert(model)
    for m in (model, original):
        setattr(getattr(m, layer), name, method)
    if when == "before":
        report = braze.convert_report(braze.convert(model))
        reasons = {e.name: e.reason for e in report.left_alone}
        assert reasons[layer] == f"its {name} has been replaced"
    x = images()
    printed = [call(m, x)[1] for m in (model, original)]
    assert printed[0] == printed[1] != ""
    compare(model, original, x)


def test_a_compiled_layer():
    """``module.compile()`` of a layer: its compiled call is what runs."""
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    torch._dynamo.reset()
    model = braze.convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model[1].compile(backend=backend)
    model(torch.randn(2, 4))
    assert len(seen) == 1


# Functions and classes of torch's.


def doubled(function):
    def replacement(*args, **kwargs):
        print("mine")
        return function(*args, **kwargs) * 2

    return replacement


PLACES = [
    *((kind, "forward") for kind in (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Linear)),
    *((nn.modules.batchnorm._BatchNorm, "forward"), (nn.Sequential, "forward")),
    *((nn.Conv2d, "_conv_forward"), (nn.Module, "__call__"), (nn.Module, "_call_impl")),
    *((stock, name) for name in ("conv2d", "batch_norm", "relu", "linear")),
    *((stock, name) for name in ("max_pool2d", "log_softmax")),
    *((torch, name) for name in ("relu", "relu_", "batch_norm", "max_pool2d")),
    *((torch.Tensor, "relu"), (nn.ReLU, "__call__"), (nn.Conv2d, "__call__")),
]


def printing(owner, name):
    return replaced(owner, name, doubled(getattr(owner, name)))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", PLACES, ids=lambda p: f"{p[0].__name__}.{p[1]}")
def test_functions_that_others_replace(place, when):
    original = Calls()
    model = copy.deepcopy(original)
    with printing(*place) if when == "before" else contextlib.nullcontext():
        braze.convert(model)
    x = images()
    with printing(*place):
        assert "mine" in call(copy.deepcopy(original), x)[1]
    compare(model, original, x, lambda: printing(*place))
    compare(model, original, x)


def test_functions_of_the_layers_that_stand_alone():
    layers = [nn.AvgPool2d(2), nn.MaxPool2d(2), nn.Softmax(1), nn.Sigmoid(), nn.Tanh(), nn.GELU()]
    layers += [nn.ELU(), nn.CELU(), nn.SiLU(), nn.Mish(), nn.Hardtanh(), nn.ReLU6(), nn.Hardswish()]
    layers += [nn.LeakyReLU(), nn.Hardsigmoid(), nn.LogSoftmax(1), nn.ConvTranspose2d(1, 2, 2)]
    x = images()
    layers += [nn.LayerNorm(x.shape[-1]), nn.GroupNorm(1, x.shape[1])]
    for layer in layers:
        kind = type(layer)
        model = braze.convert(copy.deepcopy(layer))
        assert not model._gives_way()
        with printing(kind, "forward"):
            assert_same(call(model, x), call(layer, x))
        (owner, name), *_ = [p for p in type(model)._places if p[0] is stock]
        if kind not in (nn.Sigmoid, nn.Tanh):  # which call torch's function of the name
            with printing(owner, name):
                ours, theirs = call(model, x), call(layer, x)
                assert ours[1] == "mine\n"
                assert_same(ours, theirs)


def test_what_is_watched_is_what_torch_came_with():
    """Nothing is taken for replaced where nothing is, or all would run as it did before."""
    assert not _stock.observed()
    assert not any(kind._gives_way() for kind in kinds.KINDS if hasattr(kind, "_gives_way"))
    assert not any(r.gives_way() for r in [*kinds.FUNCTIONS.values(), *kinds.METHODS.values()])
    model = braze.convert(Calls())
    ran = ops_run(lambda: model(images()))
    assert "conv_bn_relu2d" in ran
    assert not any(torchs() for _, torchs, _ in runs._RUNNERS.values())
    assert not _stock.is_torchs(doubled(stock.relu))
    assert _stock.is_torchs(stock.relu)
    assert _stock.gives_way((nn.ReLU, "forward"))() is False
    with printing(nn.ReLU, "forward"):
        assert _stock.gives_way((nn.ReLU, "forward"))()


def test_a_run_that_is_first_met_while_a_function_is_replaced(monkeypatch):
    """It runs as one once the function is back."""
    monkeypatch.setattr(runs, "_RUNNERS", {})
    model = braze.convert(Calls())
    with printing(nn.Module, "__call__"), printing(stock, "relu"):
        assert not [op for op in ops_run(lambda: model(images())) if "_relu" in op]
    assert "conv_bn_relu2d" in ops_run(lambda: model(images()))


# What records torch's functions.


class Records(TorchFunctionMode):
    """The functions that are called, and how."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append((function, len(args), kwargs))
        return function(*args, **(kwargs or {}))


class Doubles(TorchFunctionMode):
    """What relu returns."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function in (stock.relu, torch.relu) else result


def test_function_modes_see_torchs_functions():
    original = Calls()
    model = braze.convert(copy.deepcopy(original))
    x = images()
    seen = []
    for m in (model, original):
        with Records() as mode:
            call(m, x)
        seen.append(mode.seen)
    assert stock.batch_norm in [function for function, *_ in seen[0]]
    assert [s[:2] for s in seen[0]] == [s[:2] for s in seen[1]]
    assert [list(s[2] or ()) for s in seen[0]] == [list(s[2] or ()) for s in seen[1]]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_modes_of_torchs_own_do_not_count(device):
    model = braze.convert(Calls())
    with torch.device(device) if device else contextlib.nullcontext():
        assert "conv_bn_relu2d" in ops_run(lambda: model(images()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_records_torchs_functions():
    original = Calls().eval()
    model = braze.convert(copy.deepcopy(original))
    x = images()
    traced = torch.jit.trace(model, x)
    assert "braze::" not in str(traced.inlined_graph)
    assert_same(traced(x), original(x), rtol=1e-4, atol=1e-5)


def test_onnx_records_torchs_functions(monkeypatch):
    """``torch.onnx.export`` exports by torch.export, whose graphs have braze's ops otherwise."""
    torch.backends.cudnn.allow_tf32 = False  # export reads the older flag
    model, x = braze.convert(Calls()).eval(), images()

    def targets():
        exported = torch.export.export(model, (x,), strict=False)
        return {str(n.target) for n in exported.graph.nodes}

    assert any("braze" in t for t in targets())
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    assert not any("braze" in t for t in targets())


class Subclass(torch.Tensor):
    seen = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if cls.seen is not None:
            cls.seen.append((function, len(args), list(kwargs or ())))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_subclasses_of_tensors(monkeypatch):
    original = Calls()
    model = braze.convert(copy.deepcopy(original))
    x, results = images(), []
    for m in (model, original):
        monkeypatch.setattr(Subclass, "seen", [])
        y = m(x.as_subclass(Subclass))
        results.append((Subclass.seen, type(y)))
        monkeypatch.setattr(Subclass, "seen", None)
    assert results[0] == results[1]
    assert (stock.batch_norm, 1, []) not in results[0]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(layout):
    original = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Softmax(-1))
    model = braze.convert(copy.deepcopy(original))
    x = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], layout=layout)
    for a, b in zip(model(x).unbind(), original(x).unbind(), strict=True):
        assert_same(a, b)


def test_compiled_code_notices_too():
    original = Calls().eval()
    model = braze.convert(copy.deepcopy(original))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = images()
    assert_same(compiled(x), original(x), rtol=1e-4, atol=1e-5)
    before = stock.relu
    stock.relu = lambda x, inplace=False: x * 2
    try:
        assert_same(compiled(x), original(x), rtol=1e-4, atol=1e-4)
    finally:
        stock.relu = before
    plain = compiled(x)
    stock_compiled = torch.compile(original, fullgraph=True, backend="eager")
    with Doubles():
        assert_same(compiled(x), stock_compiled(x), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(compiled(x), plain)


class NormAct(nn.BatchNorm2d):
    def __init__(self):
        super().__init__(4)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


class Checks(NormAct):
    def _check_input_dim(self, x):
        print("checked")


def test_checks_of_batch_norms_with_more_behind_them():
    for kind, change in (
        (Checks, lambda m: None),
        (NormAct, lambda m: setattr(m[1], "_check_input_dim", lambda x: print("checked"))),
    ):
        original = nn.Sequential(nn.Conv2d(1, 4, 3), kind())
        model = braze.convert(copy.deepcopy(original))
        for m in (model, original):
            change(m)
        compare(model, original, torch.randn(2, 1, 6, 6))


def test_a_momentum_of_numpys():
    original = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=numpy.float32(0.3)))
    compare(braze.convert(copy.deepcopy(original)), original, torch.randn(2, 1, 6, 6))
