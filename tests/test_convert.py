"""braze.convert: the same results, state dicts, optimizers and copies."""

import copy
import gc
import inspect
import io
import pathlib
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as stock
from torch import nn

import braze
import braze.nn.functional as F
import convert_models
from braze.convert import blocks
from common import assert_by_rule
from convert_models import BLOCK, MODELS, FunctionalBlock, LeNet, Switchable, images, ops_run


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


@pytest.fixture(params=MODELS)
def model(request, device):
    return MODELS[request.param]().to(device)


def run(model, x):
    """The result, the gradients of the parameters, and the buffers afterwards."""
    torch.manual_seed(3)
    y = model(x)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(y, list(model.parameters()), weight.to(y))
    return y, grads, list(model.buffers())


def assert_same_as_stock(converted, original, x):
    wide = copy.deepcopy(original).double()
    ours, theirs, reference = run(converted, x), run(original, x), run(wide, x.double())
    assert_by_rule(ours[0], theirs[0], reference[0], ulps=16)
    names = [name for name, _ in original.named_parameters()]
    for name, a, b, c in zip(names, ours[1], theirs[1], reference[1], strict=True):
        assert_by_rule(a, b, c, ulps=64, what=name)
    for a, b, c in zip(ours[2], theirs[2], reference[2], strict=True):
        if a.is_floating_point():
            assert_by_rule(a, b, c, ulps=16, what="buffer")
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("training", [True, False])
def test_results_gradients_and_buffers(model, device, training):
    # Dropout draws its mask in another order in float64, so that the modes of dropout differ.
    if isinstance(model, LeNet):
        model.p = 0.0
    original = copy.deepcopy(model).train(training)
    converted = braze.convert(model)
    assert converted is model
    converted.train(training)
    for _ in range(2):
        assert_same_as_stock(converted, original, images(device))


def test_comparison_rejects_a_wrong_model(device):
    original = convert_models.mnist().to(device)
    wrong = braze.convert(copy.deepcopy(original))
    wrong[0].padding = (0, 0)
    wrong[4].padding = (2, 2)
    with pytest.raises(AssertionError):
        assert_same_as_stock(wrong, original, images(device))


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("mnist", 2),
        ("LeNet", 2),
        ("FunctionalBlock", 1),
        ("Inherits", 1),
        ("ResNet", 3),
        ("VGG", 2),
    ],
)
def test_what_runs(name, blocks):
    model = braze.convert(MODELS[name](), strict=True)
    assert len(braze.convert_report(model).fused) == blocks
    with torch.no_grad():
        ran = ops_run(lambda: model(images("cpu")))
    # A first block of 2x2 pooling has an op of its own. Other poolings follow the block.
    small_k = name in ("mnist", "VGG")
    assert ran.count(BLOCK) == (1 if small_k else 0)
    general = "conv2d_relu" if name == "LeNet" else "conv_bn_relu2d"  # which has no batch norm
    assert ran.count(general) == (blocks - 1 if small_k else blocks)
    assert ("max_pool2d" in ran) == (not small_k)
    assert "batch_norm" not in ran or name == "ResNet"


def test_transposed_convolutions():
    model = braze.convert(MODELS["UNet"](), strict=True)
    swapped = {(e.name, e.after) for e in braze.convert_report(model).swapped}
    assert ("up", "braze.nn.ConvTranspose2d") in swapped
    assert ("", "braze.nn.functional.conv_transpose2d") in swapped
    with torch.no_grad():
        assert ops_run(lambda: model(images("cpu"))).count("conv_transpose2d") == 2


class Head(nn.Module):
    """Linear and ReLU in every form that fuses, with one ReLU for two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(7, 6, bias=False), nn.Linear(6, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return stock.relu(self.c(self.relu(self.b(self.relu(self.a(x))))))


def test_linear_and_relu(device):
    original = Head().to(device)
    model = braze.convert(copy.deepcopy(original), strict=True)
    report = braze.convert_report(model)
    assert [e.name for e in report.fused] == ["a, relu", "b, relu", "c, relu()"]
    assert {(e.before, e.after) for e in report.fused} == {("Linear, ReLU", "LinearReLU")}
    x = torch.randn(3, 5, device=device)
    assert ops_run(lambda: model(x)) == ["linear"] * 3
    assert_same_as_stock(model, original, x)
    model.b.register_forward_hook(lambda module, args, output: output + 1)
    original.b.register_forward_hook(lambda module, args, output: output + 1)
    assert_same_as_stock(model, original, x)


def test_functions_of_a_forward_run_on_braze():
    model = braze.convert(LeNet().eval())
    ran = ops_run(lambda: model(images("cpu")))
    expected = ["conv2d_relu", "max_pool2d"] * 2 + ["linear", "log_softmax"]
    assert ran == expected
    # The optional argument: the class's own forward.
    warm = model(images("cpu"), temperature=2.0)
    assert warm.shape == (4, 10)


def test_state_dict_both_ways(model, device):
    original = copy.deepcopy(model)
    converted = braze.convert(model)
    assert list(converted.state_dict()) == list(original.state_dict())
    other = copy.deepcopy(original)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p))
    converted.load_state_dict(other.state_dict(), strict=True)
    for key, value in other.state_dict().items():
        assert torch.equal(converted.state_dict()[key], value)
    original.load_state_dict(converted.state_dict(), strict=True)
    for a, b in zip(original.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_parameters_and_optimizer_stay(model, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = list(model.named_modules())
    parameters, buffers = list(model.parameters()), list(model.buffers())
    braze.convert(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert names == list(model.named_modules())
    before = [p.detach().clone() for p in parameters]
    model(images(device)).square().sum().backward()
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_classes_are_subclasses_of_the_same_name(model):
    kinds = [type(m) for m in model.modules()]
    for module, kind in zip(braze.convert(model).modules(), kinds, strict=True):
        assert isinstance(module, kind)
        assert type(module).__name__ == kind.__name__


def copies(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "copy": copy.copy(model),
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "save": torch.load(buffer, weights_only=False),
    }


def test_copies(model, device):
    braze.convert(model).eval()
    x = images(device)
    y, ran = model(x), ops_run(lambda: model(x))
    for how, copied in copies(model).items():
        assert type(copied) is type(model), how
        assert torch.equal(copied(x), y), how
        assert ops_run(lambda copied=copied: copied(x)) == ran, how
        if how == "copy":
            continue
        assert all(a is not b for a, b in zip(model.parameters(), copied.parameters(), strict=True))
        with torch.no_grad():
            for p in copied.parameters():
                p.zero_()
        assert torch.equal(model(x), y), how
        assert not torch.equal(copied(x), y), how


def test_a_copy_has_a_mode_of_its_own():
    model = braze.convert(nn.Sequential(convert_models.mnist()))
    copied = copy.deepcopy(model).eval()
    before = copied[0][1].running_mean.clone()
    copied(images("cpu"))
    assert torch.equal(copied[0][1].running_mean, before)
    model(images("cpu"))
    assert model[0][1].num_batches_tracked == 1
    assert copied[0][1].num_batches_tracked == 0


def test_a_model_is_freed_without_the_garbage_collector():
    model = braze.convert(Switchable())
    model(images("cpu"))
    alive = weakref.ref(model.conv.weight)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_converted_twice(model, device):
    before = str(braze.convert_report(model))
    braze.convert(model)
    kinds = [type(m) for m in model.modules()]
    assert braze.convert(model) is model
    assert kinds == [type(m) for m in model.modules()]
    assert str(braze.convert_report(model)) == before


def test_to_dtype_and_layout(device):
    original = convert_models.mnist()
    model = braze.convert(copy.deepcopy(original))
    x = images(device)
    model.to(device, torch.float64)
    original.to(device, torch.float64)
    torch.testing.assert_close(model(x.double()), original(x.double()))
    model.to(torch.float32, memory_format=torch.channels_last)
    assert model(x.to(memory_format=torch.channels_last)).shape == (4, 10)


def test_compile(model, device):
    braze.convert(model).eval()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    x = images(device)
    torch.testing.assert_close(compiled(x), model(x))
    model.train()
    compiled.train()
    torch.manual_seed(0)
    y = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(x), y)
    y.sum().backward()
    compiled(x).sum().backward()


def test_compile_with_inductor_runs_the_block(device):
    model = braze.convert(FunctionalBlock().to(device))
    x = images(device)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x))


def test_export():
    # export reads cuDNN's legacy TF32 flag, which torch refuses while the newer flags differ.
    torch.backends.cudnn.allow_tf32 = False
    model = braze.convert(convert_models.mnist()).eval()
    x = images("cpu")
    exported = torch.export.export(model, (x,))
    assert any(BLOCK in str(n.target) for n in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), model(x))


def test_dropout_follows_the_mode():
    model = LeNet()
    model.p = 1.0 - 1e-7
    braze.convert(model)
    x = images("cpu")
    expected = stock.log_softmax(model.fc.bias, 0).expand(4, 10)
    torch.testing.assert_close(model(x), expected)
    model.eval()
    assert not torch.allclose(model(x), expected)


def test_signature_and_symbolic_trace():
    model = braze.convert(LeNet())
    assert list(inspect.signature(model.forward).parameters) == ["x", "temperature"]

    class Tracer(torch.fx.Tracer):  # as in docs/convert.md
        def is_leaf_module(self, module, name):
            leaf = type(module).__module__.startswith("braze.")
            return leaf or super().is_leaf_module(module, name)

    graph = Tracer().trace(model.eval())
    assert any(n.target == "conv1" for n in graph.nodes)
    x = images("cpu")
    torch.testing.assert_close(torch.fx.GraphModule(model, graph)(x, 2.0), model(x, 2.0))


def test_the_model_itself_may_be_a_layer():
    model = nn.Linear(3, 4)
    assert type(braze.convert(model, strict=True)) is braze.nn.Linear
    (entry,) = braze.convert_report(model).entries
    assert (entry.action, entry.before, entry.after) == (
        "swapped",
        "torch.nn.Linear",
        "braze.nn.Linear",
    )


def test_report_prints():
    model = nn.Sequential(convert_models.mnist(), nn.Dropout())
    report = braze.convert_report(model)
    text = str(report)
    assert "fused       0.0, 0.1, 0.2, 0.3: Conv2d, BatchNorm2d, ReLU, MaxPool2d -> " in text
    assert "left alone  1: Dropout: braze has no such layer" in text
    assert text.endswith("10 swapped, 2 fused, 1 left alone")
    assert type(model[0][0]) is nn.Conv2d


@pytest.mark.parametrize("function", [braze.convert, braze.convert_report])
def test_not_a_module(function):
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not int"):
        function(3)


class Flattened(torch.nn.Module):
    """A linear layer behind a flattened image; the ways to flatten it."""

    def __init__(self):
        super().__init__()
        self.pool = torch.nn.MaxPool2d(2)
        self.flatten, self.linear = torch.nn.Flatten(), torch.nn.Linear(6 * 3 * 2, 4)


class ByLayer(Flattened):
    def forward(self, x):
        x = self.pool(x)
        x = self.flatten(x)
        return self.linear(x)


class ByFunction(Flattened):
    def forward(self, x):
        x = torch.flatten(self.pool(x), 1)
        x = self.linear(x)
        return x


class ByMethod(Flattened):
    def forward(self, x):
        return self.linear(self.pool(x).flatten(1))


class ByLayerWithReLU(Flattened):
    def forward(self, x):
        flat = self.flatten(self.pool(x))
        y = self.linear(flat)
        return torch.relu(y)


class ByFunctionWithReLU(Flattened):
    def forward(self, x):
        return self.linear(torch.flatten(self.pool(x), 1)).relu()


class ByMethodWithReLU(Flattened):
    def forward(self, x):
        x = self.pool(x)
        x = self.linear(x.flatten(1))
        x = stock.relu(x, inplace=True)
        return x


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", Flattened.__subclasses__())
def test_flatten_before_linear(device, kind, autocast, monkeypatch):
    """A channels_last batch larger than the weight is not copied: the weight is."""
    original = kind().to(device)
    model = braze.convert(copy.deepcopy(original))
    assert len(braze.convert_report(original).fused) == kind.__name__.endswith("ReLU")
    seen = []
    for name in ("linear", "linear_relu"):
        function = getattr(F, name)

        def watched(x, *args, function=function):
            seen.append(x)
            return function(x, *args)

        monkeypatch.setattr(F, name, watched)
    for n, fmt in [
        (9, torch.channels_last),
        (3, torch.channels_last),
        (9, torch.contiguous_format),
    ]:
        x = torch.randn(n, 6, 6, 4, device=device).to(memory_format=fmt)
        seen.clear()
        # Who sees what is saved gets no program, whose ops come from no Python function.
        watching = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with watching, torch.autocast(device, torch.bfloat16, enabled=autocast):
            y, expected = model(x), original(x)
        upstream = torch.randn_like(y)
        grads, expected_grads = (
            torch.autograd.grad(t, m.parameters(), upstream.to(t))
            for t, m in ((y, model), (expected, original))
        )
        tolerance = {"rtol": 0.02, "atol": 0.02} if autocast else {}
        torch.testing.assert_close((y, *grads), (expected, *expected_grads), **tolerance)
        pooled = stock.max_pool2d(x, 2)
        if n > 4 and fmt == torch.channels_last:
            pooled = pooled.permute(0, 2, 3, 1)
        assert (seen[0].float() - pooled.flatten(1)).abs().max() < 0.02


def test_block_before_flatten(device, monkeypatch):
    """What a small batch's block leaves is flat already, where a linear layer and nothing else
    takes it."""
    seen = []
    block = blocks.conv_bn_relu_as_one

    def watched(*args, **kwargs):
        seen.append(block(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(blocks, "conv_bn_relu_as_one", watched)
    layers = [
        torch.nn.Conv2d(16, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 3 * 2, 4),
    ]

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, x):
            for layer in self.layers[:4]:
                x = layer(x)
            return self.layers[5](self.layers[4](x)) + x.sum((1, 2, 3))[:, None]

    for original, n, flat in [
        (torch.nn.Sequential(*layers), 3, True),
        (torch.nn.Sequential(*layers), 9, False),
        (Branches(), 3, False),
    ]:
        model = braze.convert(copy.deepcopy(original).to(device))
        original = copy.deepcopy(original).to(device)
        x = torch.randn(n, 16, 6, 4, device=device).to(memory_format=torch.channels_last)
        seen.clear()
        y, expected = model(x), original(x)
        assert [s.is_contiguous() for s in seen] == [flat]
        upstream = torch.randn_like(y)
        grads, expected_grads = (
            torch.autograd.grad(t, list(m.parameters()), upstream)
            for t, m in ((y, model), (expected, original))
        )
        torch.testing.assert_close((y, *grads), (expected, *expected_grads), rtol=1e-3, atol=1e-3)


def test_a_model_saved_by_version_0_1_0():
    path = pathlib.Path(__file__).parent / "data" / "converted_by_0.1.0.pt"
    model = torch.load(path, weights_only=False)
    assert len(braze.convert_report(model).fused) == 3
    assert not any("_braze_plans" in vars(m) for m in model.modules())
    x = images("cpu")
    for name, make in (("a", convert_models.mnist), ("b", FunctionalBlock)):
        original = make().eval()
        original.load_state_dict(model[name].state_dict())
        torch.testing.assert_close(model[name](x), original(x))
        assert "conv_bn_relu2d" in ops_run(lambda name=name: model[name](x))
