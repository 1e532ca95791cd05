"""The tests' names for the tolerance rule and the checks built on it (braze/testing.py), and what
several of them share."""

import contextlib
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braze._lib import build_info
from braze.testing import DTYPES, assert_by_rule, check_against_stock, layouts
from conftest import cuda_only

__all__ = ["DTYPES", "assert_by_rule", "check_against_stock", "fuzzed", "layouts"]


def runs_hopper_kernels(device="cuda"):
    """Whether the kernels for sm_90a run: this GPU is one, and the library has their code."""
    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        return False
    return "9.0a" in build_info()["cuda_archs"]


def hopper_only(device):
    if not runs_hopper_kernels(device):
        pytest.skip("the kernel needs a GPU of compute capability 9.0, and code made for sm_90a")


def cuda_kernels_of(function):
    """The names of all that runs on the GPU, joined."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    gpu = torch.autograd.DeviceType.CUDA
    return " ".join(e.key for e in profile.key_averages() if e.device_type == gpu)


@contextlib.contextmanager
def gpu_memory_left(count):
    """No more than so many bytes within. What earlier tests' tensors have left between them, which
    torch's allocator may not give back, is taken."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    taken, size = [], 1 << 30
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        while size >= 1 << 20:
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + count) / total)
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def assert_same_layer(ours, theirs, x):
    """That two modules with the same parameters give the same of `x`, by the rule."""
    assert_by_rule(ours(x), theirs(x), copy.deepcopy(theirs).double()(x.double()))


def compile(function):
    """Compiled but for the last stage: of inductor's code, which takes seconds to build, the tests
    that look at strides and mutations run enough."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def fuzzed(check):
    """Two tests that call check(data, device) with hypothesis' data: on the CPU, and on a GPU."""

    def on(device):
        @settings(max_examples=25, deadline=None)
        @given(data=st.data())
        def test(data):
            check(data, device)

        return cuda_only(test) if device == "cuda" else test

    return on("cpu"), on("cuda")
