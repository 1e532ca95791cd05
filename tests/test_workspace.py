"""The memory that the CPU's kernels work in: kept from call to call, bounded, one per thread."""

import threading

import pytest
import torch

import braze.nn.functional as F
from braze import _lib

KEPT = 64 << 20  # bytes of a thread, at most


def kept():
    return _lib.ops_library.kept_workspace_bytes()


def in_a_thread(function):
    """What `function` returns in a thread of its own, which keeps nothing yet."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def convolve(channels, size):
    x = torch.randn(1, channels, size, size, requires_grad=True)
    w = torch.randn(channels, channels, 3, 3, requires_grad=True)
    F.conv2d(x, w, padding=1).sum().backward()
    return x, w


def test_is_kept_for_the_next_call():
    def calls():
        before = kept()
        sizes = []
        for _ in range(3):
            convolve(16, 20)
            sizes.append(kept())
        return before, sizes

    before, sizes = in_a_thread(calls)
    assert before == 0
    assert sizes[0] > 0
    assert sizes[1:] == sizes[:1] * 2  # the same memory again


def test_small_calls_use_large_blocks():
    def calls():
        convolve(64, 40)
        large = kept()
        convolve(16, 20)
        return large, kept()

    large, after = in_a_thread(calls)
    assert after == large


def test_is_bounded():
    """A matrix of patches may be larger than what is kept."""

    def calls():
        sizes = []
        for n in (16, 500):
            x, w = torch.randn(1, 512, n, 8), torch.randn(512, 512, 3, 3)
            torch.ops.braze.conv2d(x, w, None, [1, 1], [1, 1], [1, 1], 1, False, False, "im2col")
            sizes.append(kept())
        return sizes

    sizes = in_a_thread(calls)
    assert 0 < sizes[0] <= KEPT
    assert 0 < sizes[1] <= KEPT


def test_both_gradients_have_memory_of_their_own():
    """They are computed while the other's is on loan."""
    x, w = convolve(64, 12)
    dy = torch.ones(1, 64, 12, 12)
    settings = [1, 1], [1, 1], [1, 1], 1, [True, True, False], False, False, "auto"
    both = torch.ops.braze.conv2d_backward(dy, x.detach(), w.detach(), *settings)
    assert torch.equal(x.grad, both[0])
    for i in range(2):
        mask = [i == 0, i == 1, False]
        one = torch.ops.braze.conv2d_backward(
            dy, x.detach(), w.detach(), *settings[:4], mask, *settings[5:]
        )
        assert torch.equal(one[i], both[i])


@pytest.mark.parametrize("threads", [4])
def test_threads_do_not_share(threads):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 32, 16, 16) for _ in range(threads)]
    w = torch.randn(32, 32, 3, 3)
    expected = [F.conv2d(x, w, padding=1) for x in inputs]
    wrong = []

    def work(x, result):
        for _ in range(20):
            if not torch.equal(F.conv2d(x, w, padding=1), result):
                wrong.append(x)

    workers = [
        threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
