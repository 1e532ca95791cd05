"""torch.backends.cudnn.benchmark, and the backend "benchmark" behind it: what is measured when, and
what then runs."""

import pytest
import torch

import braze
import braze.nn.functional as F
from braze import _config, _lib, _tuned
from braze._problems import Convolution
from common import assert_by_rule, compile, gpu_memory_left
from conftest import cuda_only
from tune_common import index_of

pytestmark = pytest.mark.usefixtures("empty_tables")

# Each test takes a batch of its own: what was measured once is kept by the process.
_batches = iter(range(3, 1000))


def tensors(device, layout="channels_last", dtype=torch.float32, batch=None, size=12):
    form = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    n = batch or next(_batches)
    shapes = (n, 16, size, size), (24, 16, 3, 3), (n, 24, size, size)
    return [torch.randn(shape, device=device).to(dtype, memory_format=form) for shape in shapes]


def passes(x, w, dy, backend, bias=None, deterministic=False):
    where, settings = ([1, 1], [1, 1], [1, 1], 1), (False, deterministic, backend)
    y = torch.ops.braze.conv2d(x, w, bias, *where, *settings)
    dx, dw, _ = torch.ops.braze.conv2d_backward(dy, x, w, *where, [True, True, False], *settings)
    return y, dx, dw


def plans(device):
    return (_lib.ops_library if device == "cpu" else _lib.cuda_library).plans_made()


@pytest.fixture
def benchmark_flag():
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_results_are_right(device, dtype, layout):
    x, w, dy = tensors(device, layout, dtype)
    bias = torch.randn(24, device=device).to(dtype)
    geometry = [1, 1], [1, 1], [1, 1]

    def stock(x, w, dy, bias):
        mask = [True, True, False]
        grads = torch.ops.aten.convolution_backward(
            dy, x, w, None, *geometry, False, [0, 0], 1, mask
        )
        return torch.conv2d(x, w, bias, *geometry), *grads[:2]

    actual = passes(x, w, dy, "benchmark", bias)
    expected = stock(x, w, dy, bias)
    reference = stock(*(t.double() for t in (x, w, dy, bias)))
    terms = 16 * 9 * x.numel()
    for a, s, r in zip(actual, expected, reference, strict=True):
        assert_by_rule(a, s, r, ulps=8, terms=terms)
    again = passes(x, w, dy, "benchmark", bias)
    shapes = [(t.shape, t.stride()) for t in again]
    assert shapes == [(t.shape, t.stride()) for t in passes(x, w, dy, "auto", bias)]


def test_a_pass_is_measured_once(device):
    """Plans are made for what is measured; a second call finds what the first one found."""
    x, w, dy = tensors(device)
    before = plans(device)
    passes(x, w, dy, "benchmark")
    measured = plans(device)
    assert measured > before
    for _ in range(2):
        passes(*(torch.randn_like(t) for t in (x, w, dy)), "benchmark")
    assert plans(device) == measured


def test_what_is_not_measured(device):
    """Determinism, and tensors with gaps: the rules decide, as they do under "auto"."""
    x, w, dy = tensors(device)
    for kwargs in ({"deterministic": True}, {}):
        operands = (x, w, dy) if kwargs else (x[:, :, ::2], w, dy[:, :, ::2].contiguous())
        # The input's gradient reads what has no gaps.
        not_measured = slice(None) if kwargs else slice(0, None, 2)
        actual = passes(*operands, "benchmark", **kwargs)[not_measured]
        expected = passes(*operands, "auto", **kwargs)[not_measured]
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert passes(x[:0], w, dy[:0], "benchmark")[0].shape == (0, 24, 12, 12)


@cuda_only
def test_nothing_is_measured_where_others_share_the_gpu(device):
    x, w, dy = tensors(device)
    with braze.multiprocessors(4):
        actual, expected = passes(x, w, dy, "benchmark"), passes(x, w, dy, "auto")
        made = plans(device)
        passes(x, w, dy, "benchmark")
        assert plans(device) == made
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    passes(x, w, dy, "benchmark")  # but now
    assert plans(device) > made


def test_tuned_choices_go_first(device):
    x, w, dy = tensors(device)
    problem = Convolution(
        "float32", "fprop", len(x), 16, 12, 12, 24, 3, 3, pad_h=1, pad_w=1, channels_last=True
    )
    _tuned.put(index_of(device), problem, "direct", True)
    assert torch.equal(passes(x, w, dy, "benchmark")[0], passes(x, w, dy, "direct")[0])


def test_the_name(device):
    x, w, _ = tensors(device)
    with braze.backend(conv2d="benchmark"):
        y = F.conv2d(x, w, padding=1)
    assert_by_rule(
        y, torch.conv2d(x, w, padding=1), torch.conv2d(x.double(), w.double(), padding=1)
    )
    with pytest.raises(ValueError, match="expected matmul to be one of"):
        braze.backend(matmul="benchmark")
    with pytest.raises(ValueError, match=r"single kernels.*'benchmark'"):
        braze.tune(lambda: None, candidates=["benchmark"])


def test_the_flag_is_for_gpus(device, benchmark_flag):
    x = tensors(device)[0]
    assert _config.conv2d_settings(x)[2] == ("auto" if device == "cpu" else "benchmark")
    with braze.backend(conv2d="braze"):
        assert _config.conv2d_settings(x)[2] == "braze"
    settings = _config.settings(device)
    torch.backends.cudnn.benchmark = False
    assert _config.conv2d_settings(x)[2] == "auto"
    assert _config.settings(device) != settings  # braze.TrainStep has to capture anew
    torch.backends.cudnn.deterministic = True
    try:
        assert _config.conv2d_settings(x)[1] == (device == "cuda")
    finally:
        torch.backends.cudnn.deterministic = False


def test_under_compile(device, benchmark_flag):
    x, w, _ = tensors(device)
    y = compile(lambda x, w: F.conv2d(x, w, padding=1))(x, w)
    assert_by_rule(
        y, torch.conv2d(x, w, padding=1), torch.conv2d(x.double(), w.double(), padding=1)
    )

    def flags(x):  # the CPU's path does not ask for them
        return x + 2 * _config._cudnn_benchmark() + _config._cudnn_deterministic()

    assert compile(flags)(torch.zeros(1, device=device)).item() == 2


@cuda_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_capture_measures_nothing(dtype, benchmark_flag):
    """A pass that is new within a capture is the rules'; one that was measured before is kept."""
    x, w, dy = tensors("cuda", dtype=dtype)
    expected = passes(x, w, dy, "auto")
    for _ in range(2):
        before, graph = plans("cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = passes(x, w, dy, "benchmark")
        assert plans("cuda") == before
        graph.replay()
        for a, b in zip(captured, expected, strict=True):
            # Engines of cuDNN's may add in another order at each call.
            assert_by_rule(a, b, b.double(), ulps=64)
        expected = passes(x, w, dy, "benchmark")


def kernels_run(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events())


@cuda_only
def test_the_flag_measures_at_the_first_call(benchmark_flag):
    x, w, dy = (t.requires_grad_() for t in tensors("cuda", size=28))

    def step():
        F.conv2d(x, w, padding=1).backward(dy)

    first = kernels_run(step)
    measured = plans("cuda")
    assert first > 4 * kernels_run(step)
    assert plans("cuda") == measured


@cuda_only
@pytest.mark.parametrize("backend", ["auto", "benchmark"])
def test_without_memory_for_a_workspace(backend):
    """What is left is enough for the tensors alone: an engine or a kernel that needs no workspace
    runs, or torch's own error says that there is no memory."""
    x, w, _ = tensors("cuda", "contiguous", torch.bfloat16, batch=256, size=56)
    expected = torch.conv2d(x.double(), w.double(), padding=1)
    stock = torch.conv2d(x, w, padding=1)
    with gpu_memory_left(stock.nbytes + (8 << 20)):
        y = torch.ops.braze.conv2d(x, w, None, [1, 1], [1, 1], [1, 1], 1, False, False, backend)
    assert_by_rule(y, stock, expected, ulps=8)
