"""torch.func's transforms of the fused functions, of converted models and of compiled functions
give what stock's do. Those of single ops are in test_composability.py."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

import braze
import braze.nn.functional as F
from braze._ops.global_response_norm import _formula as response_norm_formula

stock = torch.nn.functional


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def mean_and_var(training):
    return (None, None) if training else (rand(4), rand(4).abs() + 0.1)


def block(training, pool):
    """Ours, stock's, and the arguments."""
    statistics = mean_and_var(training)
    ours = F.conv_bn_relu_max_pool2d if pool else F.conv_bn_relu2d

    def theirs(x, w, b, mean, var, gamma, beta, padding, training):
        z = stock.conv2d(x, w, b, padding=padding)
        y = stock.batch_norm(z, mean, var, gamma, beta, training).relu()
        return stock.max_pool2d(y, 2) if pool else y

    def of(function):
        def call(x, w, b, gamma, beta):
            mean, var = (None if t is None else t.to(x.device) for t in statistics)
            return function(x, w, b, mean, var, gamma, beta, padding=1, training=training)

        return call

    return of(ours), of(theirs), [rand(2, 1, 6, 6), rand(4, 1, 3, 3), rand(4), rand(4), rand(4)]


def mlp():
    def theirs(x, w1, b1, w2, b2):
        return stock.linear(stock.linear(x, w1, b1).relu(), w2, b2)

    return F.linear_relu_linear, theirs, [rand(3, 4), rand(5, 4), rand(5), rand(2, 5), rand(2)]


CASES = {
    **{
        f"block{', pooled' * pool}{', training' * training}": block(training, pool)
        for pool in (False, True)
        for training in (False, True)
    },
    "conv2d_relu": (
        F.conv2d_relu,
        lambda *a: stock.conv2d(*a).relu(),
        [rand(2, 3, 5, 5), rand(4, 3, 3, 3), rand(4)],
    ),
    "linear_relu": (
        F.linear_relu,
        lambda *a: stock.linear(*a).relu(),
        [rand(3, 4), rand(5, 4), rand(5)],
    ),
    "linear_add": (
        F.linear_add,
        lambda x, w, b, r: stock.linear(x, w, b) + r,
        [rand(3, 4), rand(5, 4), rand(5), rand(3, 5)],
    ),
    "linear_relu_linear": mlp(),
    "scale_add": (
        F.scale_add,
        lambda x, s, r: r + s * x,
        [rand(2, 3, 4), rand(4), rand(2, 3, 4)],
    ),
    "bias_activation": (
        F.bias_activation,
        lambda x, b: stock.gelu(x + b),
        [rand(2, 3, 4), rand(4)],
    ),
    "relu_max_pool2d": (
        lambda x, b: F.relu_max_pool2d(x, b, 2),
        lambda x, b: stock.max_pool2d((x + b.view(-1, 1, 1)).relu(), 2),
        [rand(2, 3, 4, 4), rand(3)],
    ),
    "global_response_norm": (
        F.global_response_norm,
        lambda x, w, b: response_norm_formula(x, w, b, 1e-6)[0],
        [rand(2, 3, 4, 5), rand(3), rand(3)],
    ),
    "weight_standardization": (
        lambda w, g: F.weight_standardization(w, g, 0.5),
        lambda w, g: stock.layer_norm(w, w.shape[1:], eps=1e-6) * g.view(-1, 1, 1) * 0.5,
        [rand(3, 4, 5), rand(3)],
    ),
    "transpose_copy": (braze.transpose_copy, lambda x: x.mT.contiguous(), [rand(2, 3, 4)]),
    "vector_add": (braze.vector_add, torch.add, [rand(3), rand(3)]),
}
TRANSFORMS = {
    "grad": lambda f, n: grad(lambda *a: f(*a).square().sum(), argnums=tuple(range(n))),
    "jacrev": lambda f, n: jacrev(f, argnums=n - 1),
    "jvp": lambda f, n: lambda *a: jvp(f, a, a),
    "hessian": lambda f, n: hessian(lambda *a: f(*a).square().sum(), argnums=n - 1),
    "vmap": lambda f, n: lambda *a: vmap(f)(*(torch.stack([t, t + 1]) for t in a)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_functions(device, case, transform):
    ours, theirs, tensors = case
    tensors = [t.to(device) for t in tensors]
    actual, expected = (transform(f, len(tensors))(*tensors) for f in (ours, theirs))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_vmap_over_backward(device, case):
    """Of a graph that was recorded outside, by the kernels."""
    ours, theirs, tensors = case
    tensors = [t.to(device).requires_grad_() for t in tensors]
    results = []
    for f in (ours, theirs):
        y = f(*tensors)
        seeds = torch.stack([torch.ones_like(y), y.detach()])
        results.append(
            vmap(lambda g, y=y: torch.autograd.grad(y, tensors, g, retain_graph=True))(seeds)
        )
    torch.testing.assert_close(*results, atol=1e-10, rtol=1e-7)


@pytest.fixture
def models(device):
    """Stock's, converted, and a batch."""
    n = torch.nn
    model = n.Sequential(
        n.Conv2d(1, 4, 3, padding=1),
        n.BatchNorm2d(4),
        n.ReLU(),
        n.MaxPool2d(2),
        n.Conv2d(4, 6, 3),
        n.BatchNorm2d(6, momentum=None),
        n.ReLU(),
        n.Flatten(),
        n.Linear(24, 5),
        n.ReLU(),
        n.Linear(5, 3),
    ).to(device, torch.float64)
    return model, braze.convert(copy.deepcopy(model)), rand(3, 1, 8, 8).to(device)


def test_converted_model(models):
    *both, x = models

    def results(model):
        parameters = dict(model.eval().named_parameters())

        def result(parameters, x):
            return functional_call(model, parameters, (x,))

        return (
            jacrev(result)(parameters, x),
            vmap(grad(lambda p, one: result(p, one[None]).sum()), (None, 0))(parameters, x),
            hessian(lambda x: result(parameters, x).square().sum())(x),
            jvp(model, (x,), (x,)),
        )

    torch.testing.assert_close(*map(results, both))


def test_converted_model_in_training(models):
    """With its buffers as arguments, as torch wants it."""
    *both, x = models
    results = []
    for model in both:
        parameters = dict(model.named_parameters())
        buffers = {name: t.clone() for name, t in model.named_buffers()}

        def loss(parameters, model=model, buffers=buffers):
            buffers = {name: t.clone() for name, t in buffers.items()}
            return functional_call(model, (parameters, buffers), (x,)).square().sum(), buffers

        results.append(grad(loss, has_aux=True)(parameters))
    torch.testing.assert_close(results[1], results[0])


def test_compiled(device):
    """A transform within a compiled function; without one, the ops are what is compiled."""
    x, w = rand(5, 4).to(device), rand(3, 4).to(device)
    targets = set()

    def record(graph, inputs):
        targets.update(str(node.target) for node in graph.graph.nodes)
        return graph

    for transform in (lambda f: f, grad, vmap):
        torch._dynamo.reset()
        targets.clear()
        function = transform(lambda x: F.relu(F.linear(x, w)).sum())
        compiled = torch.compile(function, fullgraph=True, backend=record)
        torch.testing.assert_close(compiled(x), function(x))
        assert any("braze" in t for t in targets) == (transform not in (grad, vmap))
