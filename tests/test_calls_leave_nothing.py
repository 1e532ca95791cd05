"""An op's call gives back all memory that it takes for its arguments."""

import ctypes
import platform

import pytest
import torch

import braze  # noqa: F401


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def used_bytes():
    """What glibc counts as allocated."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    return mallinfo2().uordblks


def left_behind(call, calls=2000):
    """Bytes for each call."""
    for _ in range(200):
        call()
    before = used_bytes()
    for _ in range(calls):
        call()
    return (used_bytes() - before) / calls


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="counted by glibc from 2.33 on",
)
@pytest.mark.parametrize("backend", ["auto", "braze", "torch"])
def test_of_arguments_of_all_kinds(backend):
    """Tensors, lists, None, strings."""
    kept = []
    if left_behind(lambda: kept.append(bytes(600))) < 600:
        pytest.skip("another allocator, which glibc does not count")
    x, w = torch.randn(2, 4, 7, 7), torch.randn(6, 4, 3, 3)
    dy = torch.randn(2, 6, 7, 7)
    geometry = [1, 1], [1, 1], [1, 1], 1
    ops = torch.ops.braze
    assert left_behind(lambda: ops.conv2d(x, w, None, *geometry, False, False, backend)) < 8
    backward = dy, x, w, *geometry, [True, True, False], False, False, backend
    assert left_behind(lambda: ops.conv2d_backward(*backward)) < 8
