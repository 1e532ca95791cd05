"""Every function and block where the batch size is left open: torch.export with a dynamic batch,
and torch.compile(dynamic=True), each run at other batch sizes than it was traced at."""

import pytest
import torch
from torch.export import Dim, export

import braze
import braze.nn.functional as F
from braze import nn

CHANNELS_LAST = torch.channels_last
MEAN, VAR = torch.tensor([0.1, -0.2, 0.3, 0.0]), torch.tensor([1.0, 2.0, 0.5, 1.5])


def rand(*shape, memory_format=torch.contiguous_format):
    return torch.randn(shape).to(memory_format=memory_format)


def block(function, training=False, **settings):
    """A fused function of images and filters."""

    def call(x, w):
        statistics = () if training else (MEAN.to(x.device), VAR.to(x.device))
        return function(x, w, None, *statistics, padding=1, training=training, **settings)

    return call


CBR, CBRP = F.conv_bn_relu2d, F.conv_bn_relu_max_pool2d
# name -> (function of a batch and parameters, the parameters, the batch)
CASES = {
    "relu": (F.relu, [], rand(4, 3, 6, 6)),
    "relu in place": (lambda x: F.relu(x * 2, inplace=True), [], rand(4, 3, 6, 6)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [], rand(4, 3, 6, 6)),
    "indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[1], [], rand(4, 3, 6, 6)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), [], rand(4, 3, 6, 6, memory_format=CHANNELS_LAST)),
    "adaptive_avg_pool2d": (
        lambda x: F.adaptive_avg_pool2d(x, 1),
        [],
        rand(4, 3, 6, 6, memory_format=CHANNELS_LAST),
    ),
    "softmax": (lambda x: F.softmax(x, 1), [], rand(4, 3)),
    "linear": (F.linear, [rand(3, 5), rand(3)], rand(4, 2, 5)),
    "conv2d_relu": (F.conv2d_relu, [rand(4, 3, 2, 2), rand(4)], rand(4, 3, 6, 6)),
    "linear_relu": (F.linear_relu, [rand(3, 5), rand(3)], rand(4, 5)),
    "linear_add": (lambda x, w, b: F.linear_add(x, w, b, x), [rand(5, 5), rand(5)], rand(4, 5)),
    "linear_relu_linear": (
        F.linear_relu_linear,
        [rand(3, 5), rand(3), rand(2, 3), rand(2)],
        rand(4, 5),
    ),
    "matmul": (braze.matmul, [rand(5, 3)], rand(4, 5)),
    "matmul of batches": (lambda x: braze.matmul(x, x.mT), [], rand(4, 5, 3)),
    "conv2d": (
        lambda x, w: F.conv2d(x, w, padding="same"),
        [rand(4, 3, 2, 2)],
        rand(4, 3, 6, 6, memory_format=CHANNELS_LAST),
    ),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
        [rand(3, 4, 3, 3)],
        rand(4, 3, 6, 6, memory_format=CHANNELS_LAST),
    ),
    "bias_activation": (F.bias_activation, [rand(5)], rand(4, 2, 5)),
    "relu_max_pool2d": (
        lambda x, b: F.relu_max_pool2d(x, b, 2),
        [rand(3)],
        rand(4, 3, 6, 6, memory_format=CHANNELS_LAST),
    ),
    "scale_add": (lambda x, s: F.scale_add(x, s, x), [rand(5)], rand(4, 2, 5)),
    "scale_add of channels": (
        lambda x, s: F.scale_add(x, s, x),
        [rand(3, 1, 1)],
        rand(4, 3, 6, 6, memory_format=CHANNELS_LAST),
    ),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [], rand(4, 4, 6, 6)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [rand(6), rand(6)], rand(4, 4, 6)),
    "layer_norm of the batch": (lambda x: F.layer_norm(x, x.shape), [], rand(4, 6)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [rand(4), rand(4)], rand(4, 4, 6, 6)),
    "instance_norm": (F.instance_norm, [], rand(4, 4, 6, 6, memory_format=CHANNELS_LAST)),
    "block": (block(CBR), [rand(4, 8, 3, 3)], rand(4, 8, 6, 6)),
    "block in training": (block(CBR, True), [rand(4, 8, 3, 3)], rand(4, 8, 6, 6)),
    "pooled block": (
        block(CBRP, memory_format=torch.contiguous_format),
        [rand(4, 8, 3, 3)],
        rand(4, 8, 6, 6, memory_format=CHANNELS_LAST),
    ),
    "pooled block in training": (block(CBRP, True), [rand(4, 8, 3, 3)], rand(4, 8, 6, 6)),
    "block with another pooling": (
        block(CBRP, kernel_size=3, pool_stride=2),
        [rand(4, 8, 3, 3)],
        rand(4, 8, 6, 6),
    ),
    "first block": (block(CBRP), [rand(4, 1, 3, 3)], rand(4, 1, 6, 6)),
    "first block in training": (block(CBRP, True), [rand(4, 1, 3, 3)], rand(4, 1, 6, 6)),
    "nll_loss": (lambda x: F.nll_loss(x, x.argmax(1)), [], rand(4, 3)),
    "cross_entropy": (lambda x: F.cross_entropy(x, x.argmax(1)), [], rand(4, 3)),
    "cross_entropy of probabilities": (
        lambda x: F.cross_entropy(x, x.softmax(1), reduction="none"),
        [],
        rand(4, 3),
    ),
    "transpose_copy": (braze.transpose_copy, [], rand(4, 5, 3)),
}
# Small enough to be 1 or 2 where the code has a special case for that.
SIZES = (2, 3, 7)


class Holds(torch.nn.Module):
    def __init__(self, function, parameters):
        super().__init__()
        self.function = function
        self.names = [f"p{i}" for i in range(len(parameters))]
        for name, tensor in zip(self.names, parameters, strict=True):
            self.register_parameter(name, torch.nn.Parameter(tensor))

    def forward(self, x):
        return self.function(x, *[getattr(self, name) for name in self.names])


def of_size(x, n):
    like = torch.randn(n, *x.shape[1:], device=x.device)
    return like if x.is_contiguous() else like.to(memory_format=CHANNELS_LAST)


pytestmark = pytest.mark.usefixtures("own_norms")


@pytest.fixture(autouse=True)
def _no_tf32():
    # export reads cuDNN's legacy TF32 flag, which torch refuses while the newer flags, one of which
    # the tests' fixture sets, differ from it. This sets them all.
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_export(device, case):
    function, parameters, x = case
    model, x = Holds(function, parameters).to(device), x.to(device)
    for strict in (False, True):
        program = export(model, (x,), dynamic_shapes=({0: Dim("batch")},), strict=strict)
        assert any("braze" in str(node.target) for node in program.graph.nodes)
        for n in SIZES:
            other = of_size(x, n)
            torch.testing.assert_close(program.module()(other), model(other))


def layers():
    return torch.nn.Sequential(
        nn.ConvBnReLUMaxPool2d(1, 4, 3, padding=1),
        nn.ConvBnReLUMaxPool2d(4, 6, 3, padding=1),
        nn.ConvBnReLU2d(6, 6, 3, padding=1),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 6, 2, 2),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.LinearReLU(24, 8),
        nn.Linear(8, 5),
        nn.LogSoftmax(1),
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch", [Dim("batch"), Dim.DYNAMIC], ids=["Dim", "DYNAMIC"])
def test_export_layers(device, training, batch):
    model = layers().to(device).train(training)
    x = rand(4, 1, 16, 16).to(device)
    program = export(model, (x,), dynamic_shapes=({0: batch},))
    for n in SIZES:
        other = of_size(x, n)
        torch.testing.assert_close(program.module()(other), model(other))


@pytest.mark.parametrize("training", [False, True])
def test_compile(device, training):
    """Forward and backward at each size, without a graph for each."""
    model = layers().to(device).train(training)
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (4, *SIZES):
            x = torch.randn(n, 1, 16, 16, device=device)
            grads = []
            for f in (compiled, model):
                result = f(x)
                grads.append(torch.autograd.grad(result.square().sum(), model.parameters()))
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
