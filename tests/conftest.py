"""Fixtures: every op test runs on each device and dtype. BRAZE_REQUIRE_CUDA=1 turns a missing GPU
from a skip into a failure."""

import os

import pytest
import torch

from braze import _tuned

REQUIRE_CUDA = os.environ.get("BRAZE_REQUIRE_CUDA") == "1"


def require_cuda():
    """Skips the test where there is no GPU; fails it under BRAZE_REQUIRE_CUDA=1."""
    if not torch.cuda.is_available():
        if REQUIRE_CUDA:
            pytest.fail("BRAZE_REQUIRE_CUDA=1, but torch sees no GPU")
        pytest.skip("no GPU")


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda":
        require_cuda()
    return request.param


@pytest.fixture(params=["float64", "float32", "bfloat16", "float16"])
def dtype(request):
    return getattr(torch, request.param)


@pytest.fixture(autouse=True)
def _fixed_seed_and_settings():
    """Each test draws the same numbers whichever others run, with TF32 off unless it asks."""
    torch.manual_seed(0)
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
