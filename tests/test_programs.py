"""Programs of runs of layers: what they compute is what the same ops compute one by one, and nobody
can tell that they are there."""

import copy
import gc
import threading

import pytest
import torch
import torch.nn.functional as stock
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import braze
from braze import _programs
from braze._norm_rules import FASTER, Faster
from braze._programs import program
from braze._programs.defined import _results
from braze._programs.program import Program
from braze.convert import blocks as convert_blocks
from convert_models import Permute, ops_run

_NODE = "ProgramFunctionBackward"


class Functional(nn.Module):
    """Nested calls, statements, functions."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 9, 12), nn.Linear(12, 5)

    def forward(self, x):
        x = stock.max_pool2d(stock.relu(self.conv1(x)), 2)
        x = torch.tanh(self.conv2(x))
        x = torch.flatten(x, 1)
        return self.fc2(stock.relu(self.fc1(x)))


class Residual(nn.Module):
    """A bottleneck with a shortcut."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.shortcut = nn.Conv2d(3, 6, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class Block(nn.Module):
    """What a residual network is made of: the shortcut is the input itself."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        identity = x
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += identity
        return self.relu(x)


def blocks():
    return nn.Sequential(nn.Conv2d(3, 8, 3), *(Block(8) for _ in range(3)))


def layers():
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8, momentum=None), nn.SiLU()),
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 5)),
    )


def convolutions():
    """Without batch norm, so that nothing is a fused run."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 6, 3, stride=2), nn.ELU())


class ConvNormAct(nn.Sequential):
    """As torchvision groups its layers."""

    def __init__(self, channels_in, channels, activation=nn.SiLU, **settings):
        conv = nn.Conv2d(channels_in, channels, bias=False, **settings)
        super().__init__(conv, nn.BatchNorm2d(channels), activation())


class SqueezeExcitation(nn.Module):
    def __init__(self, channels, inner):
        super().__init__()
        self.pool, self.gate = nn.AdaptiveAvgPool2d(1), nn.Sigmoid()
        self.fc1, self.fc2 = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x):
        scale = self.fc2(self.act(self.fc1(self.pool(x))))
        return x * self.gate(scale)


def inverted_residual(channels=4):
    """An inverted residual without its shortcut: layers in containers, and a squeeze among them."""
    return nn.Sequential(
        ConvNormAct(3, 8, kernel_size=1),
        ConvNormAct(8, 8, kernel_size=3, padding=1, groups=8),
        SqueezeExcitation(8, 2),
        ConvNormAct(8, channels, nn.Identity, kernel_size=1),
    )


class InvertedResidual(nn.Module):
    """With its shortcut, behind what hands on its input."""

    def __init__(self):
        super().__init__()
        self.block, self.drop = inverted_residual(3), nn.Dropout(0.0)

    def forward(self, x):
        result = self.block(x)
        result = self.drop(result)
        result += x
        return result


class LayerScaled(nn.Module):
    """As torchvision's ConvNeXt has them."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(
            *(nn.Conv2d(3, 3, 3, padding=1, groups=3), Permute([0, 2, 3, 1])),
            *(nn.LayerNorm(3), nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 3)),
            Permute([0, 3, 1, 2]),
        )
        self.scale, self.drop = nn.Parameter(torch.full((3, 1, 1), 0.5)), nn.Dropout(0.0)

    def forward(self, x):
        result = self.scale * self.block(x)
        result = self.drop(result)
        result += x
        return result


def pixelwise():
    """Linear layers along the channels of each pixel."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, groups=3), Permute([0, 2, 3, 1]), nn.Linear(6, 8), nn.GELU()),
        *(nn.Linear(8, 6), Permute((0, -1, 1, 2))),
    )


MODELS = [
    layers,
    convolutions,
    Functional,
    Residual,
    inverted_residual,
    InvertedResidual,
    pixelwise,
]


def on(device, make):
    torch.manual_seed(0)
    return braze.convert(make()).to(device)


def images(device, n=4, **kwargs):
    return torch.randn(n, 3, 10, 10, device=device, **kwargs)


def nodes(tensor):
    """The names of the nodes behind a tensor."""
    seen, pending = [], [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.append(node)
            pending += [n for n, _ in node.next_functions]
    return [node.name() for node in seen]


class OneByOne(torch.utils._python_dispatch.TorchDispatchMode):
    """Under which there are no programs."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **(kwargs or {}))


def trained(model, x, calls, by_programs=True, autocast=False, refused=False):
    """The last call's result and gradients, with what the buffers have become.

    Args:
        refused: its last stretch runs op by op all the same.
    """
    model = copy.deepcopy(model)
    x = x.clone().requires_grad_()
    for _ in range(calls):
        model.zero_grad()
        x.grad = None
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            if by_programs:
                output = model(x)
            else:
                with OneByOne():
                    output = model(x)
        output.float().square().sum().backward()
    used = _NODE in nodes(output)
    assert used == (by_programs and calls > 1 and not refused)
    return [output, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


@pytest.mark.parametrize("autocast", [False, True], ids=["as they are", "autocast"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("make", MODELS)
def test_is_what_its_ops_are(device, make, training, channels_last, autocast):
    model, x = on(device, make).train(training), images(device)
    if channels_last:
        model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))
    found = trained(model, x, 3, autocast=autocast)
    assert_equal(found, trained(model, x, 3, by_programs=False, autocast=autocast))


@pytest.fixture(params=[1, 1000], ids="parts of {} bytes".format)
def in_parts(request, monkeypatch):
    """Programs whose backward is cut into many parts."""
    monkeypatch.setattr(_programs, "PART_BYTES", request.param)
    monkeypatch.setattr(_programs, "_known", {})


@pytest.mark.parametrize("autocast", [False, True], ids=["as they are", "autocast"])
@pytest.mark.parametrize("make", [*MODELS, blocks])
def test_parts_are_what_its_ops_are(device, make, autocast, in_parts):
    model, x = on(device, make), images(device)
    # Behind a mask of the signs only second derivatives would read the shortcut, which is larger
    # than a part; a cast of it is the program's own.
    refused = device == "cuda" and make is Residual and not autocast
    found = trained(model, x, 3, autocast=autocast, refused=refused)
    assert_equal(found, trained(model, x, 3, by_programs=False, autocast=autocast))


def test_parts_free_what_they_have_read(device, in_parts, monkeypatch):
    model, x = on(device, layers), images(device, requires_grad=True)
    for _ in range(3):
        output = model(x)
    left, run = [], program._run

    def watched(inputs, buffers, number):
        if not left:
            left.append([StorageWeakRef(t.untyped_storage()) for t in inputs])
        left.append(sum(not s.expired() for s in saved))
        return run(inputs, buffers, number)

    node = output.grad_fn
    kept = {t.untyped_storage()._cdata for t in model.parameters()}
    saved = [StorageWeakRef(t.untyped_storage()) for t in node.saved_tensors]
    saved = [s for s in saved if s.cdata not in kept]
    del node
    monkeypatch.setattr(program, "_run", watched)
    first = torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert left[-1] == left[1] > 3
    left.clear()
    assert torch.equal(*first, *torch.autograd.grad(output.sum(), x))
    assert left[-1] < left[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_layer_scales(device, dtype, training, monkeypatch):
    """One node where there are kernels for all of it."""
    monkeypatch.setitem(FASTER, ("layer_norm", device), {dtype: Faster(1, 4096)})
    for name in ("ACTIVATION_WITH_BIAS_ON", "SCALE_ADD_ON"):
        monkeypatch.setattr(convert_blocks, name, ("cpu", "cuda"))
    model = on(device, LayerScaled).train(training).to(dtype)
    x = images(device, dtype=dtype).to(memory_format=torch.channels_last)
    found = trained(model, x, 3)
    assert_equal(found, trained(model, x, 3, by_programs=False))
    others = [n for n in nodes(found[0]) if n != "torch::autograd::AccumulateGrad"]
    assert others == [_NODE]
    exact = braze.unconvert(copy.deepcopy(model)).double()
    for ours, theirs in zip(found, trained(exact, x.double(), 1, False), strict=True):
        close = {torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype] * theirs.abs().max()
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=close.item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["as they are", "autocast"])
def test_shortcuts(device, dtype, autocast):
    """A block's input is read twice; its gradient is the sum of two, and so is that of its second
    derivatives."""
    model = on(device, blocks).to(dtype).to(memory_format=torch.channels_last)
    x = images(device, dtype=dtype).to(memory_format=torch.channels_last)
    found = trained(model, x, 3, autocast=autocast)
    assert_equal(found, trained(model, x, 3, by_programs=False, autocast=autocast))
    assert "ConvBnReLU2dBackward" not in nodes(found[0])
    assert nodes(found[0]).count(_NODE) >= 3


LAYERS = {
    "Conv2d": lambda: braze.nn.Conv2d(3, 4, 3),
    "ConvReLU2d": lambda: braze.nn.ConvReLU2d(3, 4, 3, bias=False),
    "ConvTranspose2d": lambda: braze.nn.ConvTranspose2d(3, 4, 2, stride=2),
    "Linear": lambda: braze.nn.Linear(10, 4),
    "LinearReLU": lambda: braze.nn.LinearReLU(10, 4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_their_casts(device, name):
    model, x = on(device, LAYERS[name]), images(device)
    found = trained(model, x, 3, autocast=True)
    assert_equal(found, trained(model, x, 3, by_programs=False, autocast=True))


def test_sizes_of_a_transposed_convolution(device):
    layer, x = on(device, LAYERS["ConvTranspose2d"]), images(device)
    for size in ([20, 20], [21, 20], [20, 21], [21, 20]):
        with torch.autocast(device, torch.bfloat16):
            assert layer(x, output_size=size).shape[2:] == torch.Size(size)


@pytest.mark.parametrize("make", MODELS)
def test_without_gradients(device, make):
    model, x = on(device, make), images(device)
    with torch.no_grad():
        found = [copy.deepcopy(model)(x) for _ in range(3)]
        with OneByOne():
            assert_equal(found, [copy.deepcopy(model)(x) for _ in range(3)])
    assert not found[-1].requires_grad


@pytest.mark.parametrize("make", MODELS)
def test_is_one_node(device, make):
    model, x = on(device, make), images(device)
    names = [nodes(model(x)) for _ in range(3)][-1]
    others = [n for n in names if n != "torch::autograd::AccumulateGrad"]
    assert others.count(_NODE) == 1
    assert len(others) <= 2


def test_runs_of_the_same_settings_share_a_program(device):
    models = [on(device, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(5)]
    x = torch.randn(2, 4, device=device, requires_grad=True)
    for model in models:
        x = model(x)
    assert nodes(x).count(_NODE) == 4  # the first one came for the first time


def test_buffers_change_once_a_call(device):
    model, x = on(device, layers), images(device)
    for count in (1, 2, 3):
        version = model[1].running_mean._version
        model(x)
        assert model[1].num_batches_tracked == model[5].num_batches_tracked == count
        assert model[1].running_mean._version > version


def test_recording_touches_nobodys_gradients_or_hooks(device):
    model, x = on(device, layers), images(device)
    calls = []
    model[0].weight.register_hook(lambda grad: calls.append(grad))
    for _ in range(3):
        model(x)
    assert not calls
    assert all(p.grad is None for p in model.parameters())
    model(x).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("make", [*MODELS, blocks])
def test_second_derivatives(device, make):
    model, x = on(device, make).double(), images(device, dtype=torch.float64).requires_grad_()

    def second(by_programs):
        own = copy.deepcopy(model)
        if by_programs:
            for _ in range(3):
                output = own(x)
            assert _NODE in nodes(output)
            own.load_state_dict(model.state_dict())
            output = own(x)
        else:
            with OneByOne():
                output = own(x)
        inputs = [x, *own.parameters()]
        first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        total = sum(g.square().sum() for g in first)
        return [output, *torch.autograd.grad(total, inputs, allow_unused=True), *own.buffers()]

    for ours, theirs in zip(second(True), second(False), strict=True):
        if theirs is None:
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(ours, torch.zeros_like(ours) + theirs)


def test_a_batch_of_gradients(device):
    model, x = on(device, convolutions), images(device, requires_grad=True)
    for _ in range(3):
        output = model(x)
    grads = torch.randn(2, *output.shape, device=device)
    found = torch.autograd.grad(output, x, grads, is_grads_batched=True, retain_graph=True)[0]
    each = [torch.autograd.grad(output, x, g, retain_graph=True)[0] for g in grads]
    torch.testing.assert_close(found, torch.stack(each))


def test_backward_again(device):
    model, x = on(device, Functional), images(device)
    for _ in range(3):
        output = model(x)
    weight = model.conv1.weight
    first, again = (torch.autograd.grad(output.sum(), weight, retain_graph=i == 0) for i in (0, 1))
    assert torch.equal(*first, *again)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output.sum(), weight)


def test_gradients_of_other_strides(device):
    model, x = on(device, convolutions), images(device)
    for _ in range(3):
        output = model(x)
    grad = torch.randn_like(output)
    weight = model[0].weight
    (expected,) = torch.autograd.grad(output, weight, grad, retain_graph=True)
    for other in (grad.to(memory_format=torch.channels_last), grad.mT.contiguous().mT):
        assert torch.equal(expected, *torch.autograd.grad(output, weight, other, retain_graph=True))
    (zero,) = torch.autograd.grad(output, weight, torch.zeros((), device=device).expand_as(output))
    assert not zero.any()


def test_what_was_saved_may_not_change(device):
    model, x = on(device, Functional), images(device)
    for _ in range(3):
        output = model(x)
    with torch.no_grad():
        model.conv2.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def calls_are_as_op_by_op(model, x):
    """Asserts it of three calls' results and of the buffers; the last result."""
    twin = copy.deepcopy(model)
    for _ in range(3):
        output = model(x)
        with OneByOne():
            expected = twin(x)
        assert_equal([output, *model.buffers()], [expected, *twin.buffers()])
    return output


def changes():
    def frozen(model):
        model[0].weight.requires_grad_(False)

    def evaluation(model):
        model[1].eval()

    def momentum(model):
        model[1].momentum = 0.5

    def padding_mode(model):
        model[0].padding_mode = "circular"

    def other_layer(model):
        model[6] = nn.Tanh()

    def weight(model):
        model[9].weight = nn.Parameter(model[9].weight.detach() * 2)

    def strides(model):
        model[0].to(memory_format=torch.channels_last)

    def dtype(model):
        model.double()

    def inplace(model):
        model[2].inplace = True

    def unhashable(model):
        model[0].stride = [1, 1]

    return [v for v in locals().values() if callable(v)]


@pytest.mark.parametrize("change", changes(), ids=lambda c: c.__name__)
def test_changes_are_noticed(device, change):
    model, x = on(device, layers), images(device)
    for _ in range(3):
        model(x)
    change(model)
    x = x.to(model[0].weight.dtype)
    calls_are_as_op_by_op(model, x)


def test_settings_are_noticed(device):
    model, x = on(device, convolutions), images(device)
    for _ in range(3):
        model(x)
    with braze.backend(conv2d="direct" if device == "cpu" else "braze"):
        with OneByOne():
            expected = model(x)
        for _ in range(3):
            assert torch.equal(model(x), expected)


def test_batches_of_other_sizes(device):
    model = on(device, Functional)
    for n in (4, 4, 4, 3, 1, 0, 4, 3, 3, 0, 0):
        x = images(device, n)
        with OneByOne():
            expected = model(x)
        assert torch.equal(model(x), expected)


def test_hooks_run(device):
    model, x = on(device, layers), images(device)
    for _ in range(3):
        model(x)
    seen = []
    model[4].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    for _ in range(3):
        model(x)
    assert len(seen) == 3


def watched(model):
    """A hook at each place of :func:`inverted_residual` where there may be one."""
    yield from (model[0], model[0][0], model[1][1], model[2], model[2].pool, model[2].fc1)


@pytest.mark.parametrize("place", range(6))
def test_hooks_in_containers_run(device, place):
    model, x = on(device, inverted_residual), images(device)
    for _ in range(3):
        model(x)
    seen = []
    module = list(watched(model))[place]
    module.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    for _ in range(3):
        model(x)
    assert len(seen) == 3


def changes_in_containers():
    def longer(model):
        model[0].append(nn.Tanh())

    def other_norm(model):
        model[1][1] = nn.Identity()

    def gate(model):
        model[2].gate = nn.Hardsigmoid()

    def inner_weight(model):
        model[2].fc1.weight = nn.Parameter(model[2].fc1.weight.detach() * 2)

    def pool(model):
        model[2].pool.output_size = (10, 10)

    def method(model):
        model[2].forward = lambda x: x * 2

    def evaluation(model):
        model[3].eval()

    return [v for v in locals().values() if callable(v)]


@pytest.mark.parametrize("change", changes_in_containers(), ids=lambda c: c.__name__)
def test_changes_in_containers_are_noticed(device, change):
    model, x = on(device, inverted_residual), images(device)
    for _ in range(3):
        model(x)
    before = model(x)
    change(model)
    output = calls_are_as_op_by_op(model, x)
    assert not torch.equal(before, output)


def test_images_of_no_batch(device):
    model = on(
        device, lambda: nn.Sequential(SqueezeExcitation(3, 2), nn.Conv2d(3, 4, 1), nn.ReLU())
    )
    x = torch.randn(3, 5, 5, device=device)
    found = [model(x) for _ in range(3)]
    assert found[0].shape == (4, 5, 5)
    torch.testing.assert_close(found[2], braze.unconvert(copy.deepcopy(model))(x))


def test_dimensions_in_another_order(device):
    model, x = on(device, pixelwise), images(device)
    for _ in range(3):
        model(x)
    model[5].dims = (0, 3, 2, 1)
    with OneByOne():
        expected = model(x)
    for _ in range(3):
        assert_equal([model(x)], [expected])
    model[5].dims = torch.Size((0, 1, 2, 3))
    assert model(x).shape == (4, 8, 8, 6)


def test_modes_see_the_ops(device):
    model, x = on(device, convolutions), images(device)
    for _ in range(3):
        model(x)
    assert ops_run(lambda: model(x)) == ["conv2d", "activation", "conv2d", "activation"]


def test_hooks_of_saved_tensors(device):
    model, x = on(device, layers), images(device)
    for _ in range(3):
        model(x)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        output = model(x)
    assert packed
    assert _NODE not in nodes(output)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(device, use_reentrant):
    model, x = on(device, Functional), images(device, requires_grad=True)
    for _ in range(4):
        model.zero_grad()
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with OneByOne():
        model(x).sum().backward()
    assert_equal(found, [p.grad for p in model.parameters()])


def test_what_it_refuses_it_refuses_as_before(device):
    model = on(device, layers)
    one = torch.randn(1, 3, 6, 6, device=device)  # batch norm's second one gets one value
    for count in (1, 2, 3):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model(one)
        assert model[1].num_batches_tracked == model[5].num_batches_tracked == count


def test_weights_that_are_the_same(device):
    model = on(device, lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Tanh()))
    model[2].weight = model[0].weight
    x = torch.randn(2, 4, device=device)
    for _ in range(3):
        output = model(x)
    assert _NODE in nodes(output)
    (found,) = torch.autograd.grad(output.sum(), model[0].weight)
    with OneByOne():
        assert torch.equal(output, model(x))
        (expected,) = torch.autograd.grad(model(x).sum(), model[0].weight)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.SiLU(inplace=True)], ids=str)
def test_inputs_that_are_overwritten(device, first):
    model = on(device, lambda: nn.Sequential(copy.deepcopy(first), nn.Tanh()))
    for _ in range(3):
        x = torch.randn(5, device=device)
        expected = first(x.clone())
        model(x)
        torch.testing.assert_close(x, expected)
        assert x._version == 1


class Gate(nn.Module):
    """As torchvision's squeeze-and-excitation has it."""

    def __init__(self, first=None, activation=nn.SiLU):
        super().__init__()
        self.first = nn.Conv2d(3, 2, 1) if first is None else first
        self.activation = activation(inplace=True)
        self.second, self.last = nn.Conv2d(2, 3, 1), nn.Sigmoid()

    def forward(self, x):
        x = self.activation(self.first(x))
        return self.last(self.second(x))


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid])
def test_what_overwrites_what_nobody_sees(device, activation):
    model, x = on(device, lambda: Gate(activation=activation)), images(device)
    found = trained(model, x, 3)
    assert nodes(found[0]).count(_NODE) == 1
    assert_equal(found, trained(model, x, 3, by_programs=False))


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid])
def test_the_same_without_gradients(device, activation):
    model, x = on(device, lambda: Gate(activation=activation)), images(device)
    with torch.no_grad():
        found = [model(x) for _ in range(3)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found.append(model(x))
        with OneByOne():
            assert_equal(found, [model(x) for _ in range(4)])
    ran = [e.name for e in profile.events() if not e.name.startswith("aten::empty")]
    assert ran.count("braze::run_program") == 1
    assert not any(name.startswith("aten::") and name.endswith("_") for name in ran), ran


@pytest.mark.parametrize("first", [nn.Flatten(3), nn.ReLU(inplace=True)], ids=str)
def test_what_overwrites_what_somebody_sees(device, first):
    """Activations that were given the input itself, or a view of it."""
    model = on(device, lambda: Gate(first))
    for _ in range(3):
        x = images(device, 2)[:, :2]
        mine, theirs = x.clone(), x.clone()
        model(mine)
        stock.silu(first(theirs), inplace=True)
        torch.testing.assert_close(mine, theirs)
        assert not torch.equal(mine, x)


def test_functional_call(device):
    model, x = on(device, Functional), images(device)
    for _ in range(3):
        model(x)
    doubled = {k: 2 * v.detach() for k, v in model.named_parameters()}
    twin = copy.deepcopy(model)
    twin.load_state_dict(doubled)
    for _ in range(3):
        assert torch.equal(torch.func.functional_call(model, doubled, x), twin(x))


def test_threads(device):
    model, x = on(device, Functional), images(device)
    expected = trained(model, x, 2)
    found = [None] * 4

    def work(i):
        own, mine = copy.deepcopy(model), x.clone().requires_grad_()
        for _ in range(20):
            own.zero_grad()
            mine.grad = None
            output = own(mine)
            output.square().sum().backward()
        found[i] = [output, mine.grad, *(p.grad for p in own.parameters())]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        assert_equal(one, expected)


def test_raw_ops(device):
    x = torch.randn(3, 4, device=device)
    text = "2 1\nrelu t0 > 1 ; 0"
    number = torch.ops.braze.define_program([x], [], text, [])
    (result,) = torch.ops.braze.run_program([x], [], number)
    assert torch.equal(result, x.relu())
    assert not torch.ops.braze.run_program([x.t()], [], number)
    assert not torch.ops.braze.run_program([x, x], [], number)
    with pytest.raises(RuntimeError, match="no program"):
        torch.ops.braze.run_program([x], [], 10**6)
    with pytest.raises(RuntimeError, match="no op triangle"):
        torch.ops.braze.define_program([x], [], "2 1\ntriangle t0 > 1 ; 0", [])
    other = torch.ops.braze.define_program([x], [], text, [number])
    assert len(torch.ops.braze.run_program([x], [], other)) == 1
    with pytest.raises(RuntimeError, match="no program"):
        torch.ops.braze.run_program([x], [], number)


def test_programs_that_nobody_has_are_dropped(device):
    def define():
        tensors = [torch.randn(3, 4, device=device, requires_grad=True)]
        return Program(torch.ops.braze.relu, tensors, [], 1 << 20)

    first = define()
    numbers = [first._defined.number, *(part.number for part in first._parts)]
    assert all((device, number) in _results for number in numbers)
    del first
    gc.collect()
    kept = define()
    assert not any((device, number) in _results for number in numbers)
    x = torch.randn(3, 4, device=device)
    for number in numbers:
        with pytest.raises(RuntimeError, match="no program"):
            torch.ops.braze.run_program([x, x], [], number)
    assert torch.equal(kept([x.requires_grad_()], []), x.relu())


@pytest.mark.parametrize(
    "text",
    ["1 1\nrelu t0 > 1 ;", "2 1\nrelu t5 > 1 ;", "2 1\nrelu t1 > 1 ;", "3 2\nrelu t0 > 1 ;"],
    ids=["a result too many", "no such register", "not set", "nothing returned"],
)
def test_programs_that_are_wrong(device, text):
    x = torch.randn(3, device=device)
    number = torch.ops.braze.define_program([x], [], text, [])
    with pytest.raises((RuntimeError, IndexError)):
        torch.ops.braze.run_program([x], [], number)


def test_tensors_without_elements(device):
    """All such are in one place: under autocast the cast of one would be taken for another's."""
    model = on(
        device, lambda: nn.Sequential(nn.Linear(0, 5), nn.ReLU(), nn.Linear(5, 0), nn.Tanh())
    )
    for _ in range(3):
        with torch.autocast(device, torch.bfloat16):
            y = model(torch.empty(4, 0, device=device))
        y.sum().backward()
    assert y.shape == (4, 0)
    assert not model[0].bias.grad.any()


@pytest.mark.parametrize("names", [["weight"], ["running_mean", "running_var"]], ids="+".join)
def test_tensors_that_were_set_in_another_order(device, names):
    """As torch.nn.utils.prune.remove() and parametrizations leave them."""
    model, x = on(device, layers), images(device)
    for module in (model[1], model[5]):
        for name in names:
            tensor = getattr(module, name).detach() + torch.rand_like(getattr(module, name))
            delattr(module, name)
            if name == "weight":
                module.weight = nn.Parameter(tensor)
            else:
                module.register_buffer(name, tensor)
    twin = copy.deepcopy(model)
    for _ in range(3):
        output = on(device, layers)(x), model(x)
        with OneByOne():
            assert_equal([output[1], *model.buffers()], [twin(x), *twin.buffers()])


def test_which_tensor_is_absent(device):
    """Batch norm's weight and bias have the same shape."""
    x = images(device)
    for name in ("weight", "bias", "weight"):
        model = on(device, layers)
        nn.init.normal_(model[1].bias)
        setattr(model[1], name, None)
        twin = copy.deepcopy(model)
        for _ in range(3):
            with OneByOne():
                expected = twin(x)
            assert_equal([model(x)], [expected])


@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_plain_attributes_in_the_place_of_tensors(device, name):
    model, x = on(device, layers), images(device)
    for _ in range(2):
        model(x)
    tensor = getattr(model[1], name).detach().clone() + 1
    if name == "weight":
        model[1].__dict__[name] = tensor
    else:
        delattr(model[1], name)
        setattr(model[1], name, tensor)
    twin = copy.deepcopy(model)
    for _ in range(2):
        with OneByOne():
            expected = twin(x)
        assert_equal([model(x), getattr(model[1], name)], [expected, getattr(twin[1], name)])


def test_what_is_read_again_may_not_change(device):
    """A bias, of which nothing is saved, is read for second derivatives."""
    model, x = on(device, Functional), images(device, requires_grad=True)
    for _ in range(3):
        output = model(x)
    with torch.no_grad():
        model.fc1.bias.add_(1)
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output.sum(), x, create_graph=True)


def test_results_that_are_views(device):
    """What is written to them is noticed where the backward needs what they show."""
    for activation, refused in ((nn.ReLU(), True), (nn.Identity(), False)):
        model = on(device, lambda a=activation: nn.Sequential(nn.Conv2d(3, 4, 3), a, nn.Flatten()))
        x = images(device, requires_grad=True)
        for _ in range(3):
            (expected,) = torch.autograd.grad(model(x).sum(), x)
        output = model(x)
        output.mul_(2)
        if refused:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                output.sum().backward()
        else:
            assert torch.equal(2 * expected, *torch.autograd.grad(output.sum(), x))


@pytest.mark.parametrize("first", [nn.AvgPool2d(2), nn.MaxPool2d(2), nn.ReLU()], ids=str)
def test_inputs_that_nothing_reads_again(device, first):
    """They may be written to before the backward, and come from inference mode."""
    model = on(device, lambda: nn.Sequential(first, nn.Conv2d(3, 4, 3), nn.GELU()))
    x, weight = images(device), model[1].weight
    for _ in range(3):
        (expected,) = torch.autograd.grad(model(x).sum(), weight)
    output = model(x)
    x.zero_()
    assert torch.equal(expected, *torch.autograd.grad(output.sum(), weight))
    with torch.inference_mode():
        x = images(device)
    for _ in range(2):
        model(x).sum().backward()


def test_meta_tensors():
    model = braze.convert(Functional()).to("meta")
    for _ in range(3):
        assert model(images("meta")).shape == (4, 5)
