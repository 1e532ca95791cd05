"""Fixtures: every op test runs on each device and dtype. Without a GPU the tests that need one are
deselected; BRAZE_REQUIRE_CUDA=1 makes them fail instead. BRAZE_TEST_SEED=7 draws other numbers."""

import os

# Threads that spin while they wait slow down the other processes of `pytest -n`.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

from braze import _tuned

REQUIRE_CUDA = os.environ.get("BRAZE_REQUIRE_CUDA") == "1"
WITH_CUDA = REQUIRE_CUDA or torch.cuda.is_available()
DEVICES = ["cpu", "cuda"] if WITH_CUDA else ["cpu"]
#: where random numbers begin, in tests that draw their own too
SEED = int(os.environ.get("BRAZE_TEST_SEED", "0"))


def require_cuda():
    """Fails the test where there is no GPU: under BRAZE_REQUIRE_CUDA=1."""
    if not torch.cuda.is_available():
        pytest.fail("BRAZE_REQUIRE_CUDA=1, but torch sees no GPU")


@pytest.fixture(scope="session")
def gpu():
    """For tests of CUDA alone, which have no twin on the CPU."""
    require_cuda()


cuda_only = pytest.mark.usefixtures("gpu")


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda":
        require_cuda()
    return request.param


@pytest.fixture(params=["float64", "float32", "bfloat16", "float16"])
def dtype(request):
    return getattr(torch, request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)
    if hasattr(config, "workerinput"):
        torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(config, items):
    def runs(item):
        if "gpu" not in getattr(item, "fixturenames", ()):
            return True
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        return WITH_CUDA and parameters.get("device") != "cpu"

    gone = [item for item in items if not runs(item)]
    config.hook.pytest_deselected(items=gone)
    items[:] = filter(runs, items)


def pytest_xdist_auto_num_workers():
    """What `-n auto` means: one process where there is a GPU, which they would have to share."""
    return 0 if WITH_CUDA else min(len(os.sched_getaffinity(0)), 4)


@pytest.fixture(autouse=True)
def _fixed_seed_and_settings():
    """Each test draws the same numbers whichever others run, with TF32 off unless it asks."""
    torch.manual_seed(SEED)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.conv.fp32_precision = "ieee"


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
