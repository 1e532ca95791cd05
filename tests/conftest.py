"""Fixtures: every op test runs on each device and dtype. Without a GPU the tests that need one are
deselected; BRAZE_REQUIRE_CUDA=1 makes them fail instead. `--seeds` draws other numbers."""

import os
import tempfile
import zlib

# Threads that spin while they wait slow down the other processes of `pytest -n`.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Graphs that torch.compile has kept of another build of braze know that one's strides.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="braze_compiled_")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name

import hypothesis
import pytest
import torch

import braze
from braze import _tuned

REQUIRE_CUDA = os.environ.get("BRAZE_REQUIRE_CUDA") == "1"
WITH_CUDA = REQUIRE_CUDA or torch.cuda.is_available()
DEVICES = ["cpu", "cuda"] if WITH_CUDA else ["cpu"]


def require_cuda():
    """Fails the test where there is no GPU: under BRAZE_REQUIRE_CUDA=1."""
    if not torch.cuda.is_available():
        pytest.fail("BRAZE_REQUIRE_CUDA=1, but torch sees no GPU")


@pytest.fixture(scope="session")
def gpu():
    """For tests of CUDA alone, which have no twin on the CPU."""
    require_cuda()


@pytest.fixture
def hopper(gpu):
    """For tests of the kernels for sm_90a alone: skips them where these do not run."""
    from common import hopper_only

    hopper_only("cuda")


cuda_only = pytest.mark.usefixtures("gpu")


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda":
        require_cuda()
    return request.param


def _on(name):
    """The device that a test is to use: of "fake" the GPU that is none (fake_cuda.py)."""
    if name == "fake":
        from fake_cuda import FakeCuda

        with FakeCuda():
            yield "cuda"
        return
    if name == "cuda":
        require_cuda()
    yield name


@pytest.fixture(params=[*DEVICES, "fake"])
def any_device(request):
    """For what runs around kernels: on the CPU, on a GPU, and as on a GPU without one."""
    yield from _on(request.param)


@pytest.fixture(params=["fake", *DEVICES[1:]])
def gpu_or_fake(request):
    """As :func:`any_device`, without the CPU."""
    yield from _on(request.param)


@pytest.fixture
def own_norms():
    """Norms by our kernels, which "auto" takes only where they were measured to be faster."""
    with braze.backend(layer_norm="braze", group_norm="braze"):
        yield


@pytest.fixture(params=["float64", "float32", "bfloat16", "float16"])
def dtype(request):
    return getattr(torch, request.param)


def pytest_addoption(parser):
    parser.addoption("--seeds", default="0", help="7, or 0-19 to run every test with each of these")
    parser.addoption("--share", type=float, default=1.0, help="0.1 runs a tenth, others per seed")


def pytest_configure(config):
    # Of the processes of `pytest -n`: two, so that what runs in parallel does so here too.
    if hasattr(config, "workerinput") and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_generate_tests(metafunc):
    first, _, last = metafunc.config.getoption("seeds").partition("-")
    if int(last or first):
        seeds = range(int(first), int(last or first) + 1)
        metafunc.parametrize("random_seed", seeds, indirect=True, ids=lambda n: f"seed{n}")


def pytest_collection_modifyitems(config, items):
    share = config.getoption("share") * (1 << 32)

    def runs(item):
        if zlib.crc32(item.nodeid.encode()) > share:
            return False
        if "gpu" not in getattr(item, "fixturenames", ()):
            return True
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        return WITH_CUDA and parameters.get("device") != "cpu"

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may not be there
def pytest_xdist_auto_num_workers():
    """What `-n auto` means: one process where there is a GPU, which they would have to share."""
    return 0 if WITH_CUDA else min(len(os.sched_getaffinity(0)), 4)


@pytest.fixture
def random_seed(request):
    """Where the numbers of the test begin. Tests with a generator of their own take
    torch.initial_seed()."""
    return getattr(request, "param", 0)


@pytest.fixture(autouse=True)
def _fixed_seed_and_settings(request, random_seed):
    """Each test draws the same numbers whichever others run, with TF32 off and without measuring
    convolutions unless it asks."""
    torch.manual_seed(random_seed)
    if getattr(request.function, "is_hypothesis_test", False):
        hypothesis.seed(random_seed)(request.function)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.cudnn.benchmark = False


@pytest.fixture
def deterministic():
    """Deterministic algorithms within the test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def empty_tables(tmp_path):
    """No tuned choices in effect, and an empty cache of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
        patch.setattr(_tuned, "BUILT_IN", tmp_path / "built_in")
        _tuned.forget()
        yield
        _tuned.forget()
    _tuned.load_all()
