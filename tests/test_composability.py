"""Each op under what people combine ops with: compile, export, graphs, streams, threads, DDP,
autocast, pickling. A new op is one line in OPS, a new layer one in LAYERS."""

import contextlib
import copy
import functools
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import braze
import braze.nn.functional as F
from braze import nn
from common import assert_by_rule, check_against_stock

pytestmark = pytest.mark.usefixtures("own_norms")
OURS = SimpleNamespace(**{name: getattr(F, name) for name in F.__all__}, matmul=braze.matmul)
STOCK = SimpleNamespace(
    **vars(torch.nn.functional),
    matmul=torch.matmul,
    channel_scale=torch.mul,
    squeeze_excite=lambda x, gate: x * gate(x.mean((2, 3), keepdim=True)),
)


def rand(*shape):
    return torch.randn(shape, requires_grad=True)


# op -> (call on OURS or STOCK, arguments)
OPS = {
    "matmul": (lambda f, a, b: f.matmul(a, b), lambda: [rand(2, 3, 4), rand(4, 5)]),
    "linear": (lambda f, x, w, b: f.linear(x, w, b), lambda: [rand(3, 4), rand(5, 4), rand(5)]),
    "conv2d": (
        lambda f, x, w, b: f.conv2d(x, w, b, padding=1),
        lambda: [rand(2, 3, 6, 6), rand(4, 3, 3, 3), rand(4)],
    ),
    "conv_transpose2d": (
        lambda f, x, w, b: f.conv_transpose2d(x, w, b, 2, 1, 1),
        lambda: [rand(2, 4, 3, 3), rand(4, 3, 3, 3), rand(3)],
    ),
    "batch_norm": (
        lambda f, x, w, b: f.batch_norm(x, None, None, w, b, True),
        lambda: [rand(4, 3, 2, 2), rand(3), rand(3)],
    ),
    "channel_scale": (
        lambda f, x, s: f.channel_scale(x, s),
        lambda: [rand(2, 3, 4, 4), rand(2, 3, 1, 1)],
    ),
    "squeeze_excite": (
        lambda f, x, s: f.squeeze_excite(x, lambda mean: mean * 0 + s),  # whatever sums torch takes
        lambda: [rand(2, 3, 4, 4), rand(2, 3, 1, 1)],
    ),
    "group_norm": (
        lambda f, x, w, b: f.group_norm(x, 2, w, b),
        lambda: [rand(3, 4, 5), rand(4), rand(4)],
    ),
    "instance_norm": (lambda f, x: f.instance_norm(x), lambda: [rand(3, 4, 5)]),
    "layer_norm": (
        lambda f, x, w, b: f.layer_norm(x, (4, 5), w, b),
        lambda: [rand(3, 4, 5), rand(4, 5), rand(4, 5)],
    ),
    "relu": (lambda f, x: f.relu(x), lambda: [rand(3, 4)]),
    "tanh": (lambda f, x: f.tanh(x), lambda: [rand(3, 4)]),
    "max_pool2d": (lambda f, x: f.max_pool2d(x, 2), lambda: [rand(2, 3, 6, 6)]),
    "avg_pool2d": (lambda f, x: f.avg_pool2d(x, 2), lambda: [rand(2, 3, 6, 6)]),
    "adaptive_avg_pool2d": (
        lambda f, x: f.adaptive_avg_pool2d(x, 2),
        lambda: [rand(2, 3, 6, 6)],
    ),
    "interpolate": (
        lambda f, x: f.interpolate(x, scale_factor=2),
        lambda: [rand(2, 3, 4, 5)],
    ),
    "softmax": (lambda f, x: f.softmax(x, 1), lambda: [rand(3, 4)]),
    "log_softmax": (lambda f, x: f.log_softmax(x, 1), lambda: [rand(3, 4)]),
    "nll_loss": (lambda f, x, y: f.nll_loss(x, y), lambda: [rand(3, 4), torch.tensor([0, 3, 1])]),
    "cross_entropy": (
        lambda f, x, y: f.cross_entropy(x, y),
        lambda: [rand(3, 4), torch.tensor([0, 3, 1])],
    ),
}
LAYERS = [
    lambda n: n.Linear(4, 3),
    lambda n: n.Conv2d(2, 4, 3, padding=1, bias=False),
    lambda n: n.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1),
    lambda n: n.BatchNorm2d(3),
    lambda n: n.BatchNorm2d(3, affine=False, track_running_stats=False),
    lambda n: n.BatchNorm1d(3),
    lambda n: n.BatchNorm3d(3, affine=False),
    lambda n: n.GroupNorm(2, 4),
    lambda n: n.InstanceNorm2d(4, affine=True),
    lambda n: n.LayerNorm((3, 4), elementwise_affine=False),
    lambda n: n.LayerNorm(4, bias=False),
    lambda n: n.ReLU(inplace=True),
    lambda n: n.GELU(approximate="tanh"),
    lambda n: n.ReLU6(inplace=True),
    lambda n: n.MaxPool2d(2, padding=1),
    lambda n: n.AvgPool2d(2, ceil_mode=True),
    lambda n: n.AdaptiveAvgPool2d(1),
    lambda n: n.Upsample(scale_factor=2),
    lambda n: n.Softmax(1),
    lambda n: n.LogSoftmax(1),
    lambda n: n.NLLLoss(torch.ones(3)),
    lambda n: n.CrossEntropyLoss(label_smoothing=0.1),
    lambda n: n.Flatten(),
    lambda n: n.Sequential(n.Conv2d(1, 2, 3), n.BatchNorm2d(2), n.ReLU()),
]
every_op = pytest.mark.parametrize("op", OPS)
every_layer = pytest.mark.parametrize("make", LAYERS, ids=lambda m: repr(m(torch.nn)).split("(")[0])


def arguments_of(op, device):
    return [t.detach().to(device).requires_grad_(t.requires_grad) for t in OPS[op][1]()]


def forward_backward(op, arguments, api=OURS):
    """The result and the gradients of its sum of squares, as a list."""
    result = OPS[op][0](api, *arguments)
    leaves = [t for t in arguments if t.requires_grad]
    return [result, *torch.autograd.grad(result.square().sum(), leaves)]


def assert_equal(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile_all_ops_in_one_graph(device, mode):
    if mode == "reduce-overhead" and device == "cpu":
        return  # CUDA graphs
    arguments = {op: arguments_of(op, device) for op in OPS}

    def model(arguments):
        return [OPS[op][0](OURS, *arguments[op]) for op in OPS]

    compiled = torch.compile(model, fullgraph=True, mode=mode)
    leaves = [t for tensors in arguments.values() for t in tensors if t.requires_grad]
    expected = model(arguments)
    expected_grads = torch.autograd.grad(sum(t.square().sum() for t in expected), leaves)
    for _ in range(3):  # the second call records the CUDA graph, the third replays it
        torch.compiler.cudagraph_mark_step_begin()
        actual = compiled(arguments)
        grads = torch.autograd.grad(sum(t.square().sum() for t in actual), leaves)
        assert_equal(actual, expected)
        assert_equal(grads, expected_grads)


def test_export_all_ops(device):
    # export reads cuDNN's legacy TF32 flag, which torch refuses while the newer flags, one of which
    # the tests' fixture sets, differ from it. This sets them all.
    torch.backends.cudnn.allow_tf32 = False

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            it = iter(tensors)
            return [call(OURS, *(next(it) for _ in make())) for call, make in OPS.values()]

    tensors = tuple(t.detach() for op in OPS for t in arguments_of(op, device))
    program = torch.export.export(Model(), tensors)
    targets = {str(node.target).split(".")[0] for node in program.graph.nodes}
    assert "braze" in targets
    assert_equal(program.module()(*tensors), Model()(*tensors))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_equal(torch.export.load(file).module()(*tensors), Model()(*tensors))


@every_op
def test_cuda_graph(gpu, op):
    arguments = arguments_of(op, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward_backward(op, arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_backward(op, arguments)
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor, other in zip(arguments, arguments_of(op, "cuda"), strict=True):
                tensor.copy_(other)
        graph.replay()
        assert_equal(captured, forward_backward(op, arguments))


@every_op
def test_side_stream(gpu, op):
    """The input is made on a side stream after a long kernel there: an op that launches on another
    stream reads it too early."""
    values = arguments_of(op, "cuda")
    expected = forward_backward(op, values)
    blank = [torch.zeros_like(t).requires_grad_(t.requires_grad) for t in values]
    forward_backward(op, blank)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        with torch.no_grad():
            for tensor, value in zip(blank, values, strict=True):
                tensor.copy_(value)
        actual = forward_backward(op, blank)
    stream.synchronize()
    assert_equal(actual, expected)


@every_op
def test_second_device(gpu, op):
    """Tensors on cuda:1 while cuda:0 is the current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    on_first = arguments_of(op, "cuda:0")
    on_second = [t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in on_first]
    actual = forward_backward(op, on_second)
    assert all(t.device == torch.device("cuda:1") for t in actual)
    assert torch.cuda.current_device() == 0
    assert_equal([t.to("cuda:0") for t in actual], forward_backward(op, on_first))


@every_op
def test_python_threads(device, op):
    arguments = [arguments_of(op, device) for _ in range(16)]
    expected = [forward_backward(op, a) for a in arguments]
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(lambda a: forward_backward(op, a), arguments))
    for a, e in zip(actual, expected, strict=True):
        assert_equal(a, e)


@every_op
def test_inference_mode(device, op):
    arguments = arguments_of(op, device)
    with torch.inference_mode():
        result = OPS[op][0](OURS, *arguments)
    assert not result.requires_grad
    assert torch.equal(result, OPS[op][0](OURS, *arguments))


def _step(param, optimizer=braze.optim.SGD):
    param.grad = torch.ones_like(param)
    optimizer([param], lr=0.1).step()


# What overwrites tensors: name -> f(images, a tensor for each channel, and another one).
WRITERS = {
    "relu": lambda x, mean, var: F.relu(mean, inplace=True),
    "batch_norm": lambda x, mean, var: F.batch_norm(x, mean, var, training=True),
    "conv_bn_relu2d": lambda x, mean, var: F.conv_bn_relu2d(
        x, x.new_ones(2, 2, 3, 3), None, mean, var, training=True
    ),
    "conv_bn_relu_max_pool2d": lambda x, mean, var: F.conv_bn_relu_max_pool2d(
        x, x.new_ones(2, 2, 3, 3), None, mean, var, training=True
    ),
    "SGD": lambda x, mean, var: _step(mean),
    "Adam": lambda x, mean, var: _step(mean, braze.optim.Adam),
    "Muon": lambda x, mean, var: _step(mean[None], braze.optim.Muon),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_inference_tensors_are_overwritten_in_inference_mode_only(device, write):
    x, before = torch.randn(2, 2, 6, 6, device=device), torch.tensor([-1.0, 2], device=device)
    expected = before.clone()
    write(x, expected, before.abs())
    assert not torch.equal(expected, before)
    with torch.inference_mode():
        mean, var = before.clone(), before.abs()
    with pytest.raises(RuntimeError, match="inference tensor outside of inference mode"):
        write(x, mean, var)
    assert torch.equal(mean, before)
    with torch.inference_mode():
        write(x, mean, var)
    assert torch.equal(mean, expected)


# name -> the transform of a function of floating-point tensors
TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda t, *rest: f(t, *rest).square().sum()),
    "vmap": lambda f: lambda *tensors: torch.func.vmap(f)(*(torch.stack([t, -t]) for t in tensors)),
    "jvp": lambda f: lambda *tensors: torch.func.jvp(f, tensors, tensors),
    "jacrev": torch.func.jacrev,
    "hessian": lambda f: torch.func.hessian(lambda t, *rest: f(t, *rest).square().sum()),
}


@every_op
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_torch_func(device, op, transform):
    call, _ = OPS[op]
    arguments = [t.detach() for t in arguments_of(op, device)]
    varied = [t for t in arguments if t.is_floating_point()]
    fixed = arguments[len(varied) :]

    def result(api):
        return transform(lambda *tensors: call(api, *tensors, *fixed))(*varied)

    torch.testing.assert_close(result(OURS), result(STOCK))


@every_op
def test_vmap_over_backward(device, op):
    """Of a graph that was recorded outside."""
    arguments = arguments_of(op, device)
    leaves = [t for t in arguments if t.requires_grad]

    def result(api):
        y = OPS[op][0](api, *arguments)
        grads = torch.stack([torch.ones_like(y), y.detach()])
        return torch.func.vmap(lambda g: torch.autograd.grad(y, leaves, g, retain_graph=True))(
            grads
        ), torch.autograd.grad(y, leaves, grads, is_grads_batched=True)

    torch.testing.assert_close(result(OURS), result(STOCK))


@every_op
def test_forward_mode(device, op):
    """Tangents of the result and of its gradient."""
    call, _ = OPS[op]
    x, *rest = arguments_of(op, device)

    def result(api):
        with forward_ad.dual_level():
            y = call(api, forward_ad.make_dual(x, torch.ones_like(x)), *rest)
            results = [y]
            if op != "group_norm":  # of whose backward torch has no tangents
                results += torch.autograd.grad(y.square().sum(), x)
            return [forward_ad.unpack_dual(t).tangent.detach() for t in results]

    torch.testing.assert_close(result(OURS), result(STOCK))


@every_op
def test_without_recording(device, op):
    """No node where nothing records, and then the same values and gradients."""
    call, _ = OPS[op]
    arguments = arguments_of(op, device)
    recorded = call(OURS, *arguments)
    assert recorded.grad_fn is not None
    with torch.no_grad():
        result = call(OURS, *arguments)
    assert result.grad_fn is None
    assert not result.requires_grad
    assert torch.equal(result, recorded)
    wanted = [t for t in arguments if t.requires_grad]
    graph = torch.autograd.grad(recorded.sum(), wanted, create_graph=True)
    plain = torch.autograd.grad(call(OURS, *arguments).sum(), wanted)
    for p, g in zip(plain, graph, strict=True):
        assert not p.requires_grad
        assert torch.equal(p, g)


@every_op
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, op, low):
    """float32 inputs, and inputs already in the low precision: dtypes and values as in torch."""
    call, _ = OPS[op]
    for input_dtype in (torch.float32, low):
        arguments = arguments_of(op, device)
        arguments[0] = arguments[0].detach().to(input_dtype).requires_grad_()
        exact = [t.detach().double() if t.is_floating_point() else t for t in arguments]
        with torch.autocast(device, dtype=low):
            try:
                stock = call(STOCK, *arguments)
            except RuntimeError:  # without a kernel for the mixture of dtypes
                continue
            actual = call(OURS, *arguments)
        assert actual.dtype == stock.dtype
        # torch rounds the inputs to the low precision; the rule counts that as its error.
        assert_by_rule(actual, stock, call(STOCK, *exact))
        (grad,) = torch.autograd.grad(actual.float().square().sum(), arguments[:1])
        assert grad.dtype == input_dtype


@contextlib.contextmanager
def deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@every_op
def test_deterministic_algorithms(device, op):
    arguments = arguments_of(op, device)
    with deterministic_algorithms():
        first = forward_backward(op, arguments)
        for _ in range(3):
            assert_equal(forward_backward(op, arguments), first)
    call = OPS[op][0]
    check_against_stock(functools.partial(call, OURS), functools.partial(call, STOCK), arguments)


@every_layer
def test_layers_copy_and_pickle(make):
    layer = make(nn)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer)
        assert repr(twin) == repr(layer)
        assert twin.state_dict().keys() == layer.state_dict().keys()
        assert_equal(twin.state_dict().values(), layer.state_dict().values())


@every_layer
def test_layers_are_torchs(make):
    """isinstance, the same repr, and state dicts that load both ways."""
    layer, stock = make(nn), make(torch.nn)
    assert isinstance(layer, type(stock))
    assert repr(layer) == repr(stock)
    for source, target in [(stock, layer), (layer, make(torch.nn))]:
        target.load_state_dict(source.state_dict(), strict=True)
        assert_equal(target.state_dict().values(), source.state_dict().values())


def small_model(n, device):
    model = n.Sequential(
        n.Conv2d(1, 4, 3, padding=1), n.BatchNorm2d(4), n.ReLU(), n.MaxPool2d(2), n.Flatten()
    )
    return torch.nn.Sequential(model, n.Linear(4 * 3 * 3, 5)).to(device)


def test_initial_weights_are_torchs():
    """The same seed gives the same model."""
    torch.manual_seed(7)
    ours = small_model(nn, "cpu")
    torch.manual_seed(7)
    assert_equal(ours.state_dict().values(), small_model(torch.nn, "cpu").state_dict().values())


@pytest.fixture
def process_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_data_parallel(device, process_group):
    model = small_model(nn, device)
    parallel = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    x = torch.randn(8, 1, 6, 6, device=device)
    target = torch.arange(8, device=device) % 5
    for module in (model, parallel):
        optimizer = braze.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(module(x), target).backward()
            optimizer.step()
    assert_equal(parallel.module.state_dict().values(), model.state_dict().values())


def test_optimizer_state_loads_both_ways(device):
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}

    def step(optimizer, parameter):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    start = torch.randn(5, device=device)
    for first, second in [(braze, torch), (torch, braze)]:
        a = torch.nn.Parameter(start.clone())
        optimizer = first.optim.SGD([a], **settings)
        step(optimizer, a)
        b = torch.nn.Parameter(a.detach().clone())
        other = second.optim.SGD([b], **settings)
        other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
        step(copy.deepcopy(optimizer), a)  # a copy owns copies of its parameters: a stays
        step(optimizer, a)
        step(other, b)
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)
