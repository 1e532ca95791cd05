"""A problem is planned once: the front ends find it again (csrc/ops/plan_cache.h)."""

import threading

import pytest
import torch

import braze
import braze.nn.functional as F
from braze import _lib


def library(device):
    return _lib.ops_library if device == "cpu" else _lib.cuda_library


@pytest.fixture
def plans(device):
    """plans(f): how many plans calling f makes."""

    def count(f):
        before = library(device).plans_made()
        f()
        return library(device).plans_made() - before

    return count


def products(device, *shape, dtype=torch.float32):
    return [torch.randn(n, m, device=device, dtype=dtype) for n, m in (shape[:2], shape[1:])]


def test_a_product_is_planned_once(device, plans):
    a, b = products(device, 37, 41, 43)
    assert plans(lambda: braze.matmul(a, b)) == 1
    assert plans(lambda: braze.matmul(a, b)) == 0
    assert plans(lambda: braze.matmul(torch.randn_like(a), b)) == 0  # other memory, aligned alike
    assert plans(lambda: braze.matmul(a[:-1], b)) == 1
    odd = torch.randn(37 * 41 + 1, device=device)[1:].view(37, 41)
    assert plans(lambda: braze.matmul(odd, b)) == 1


def test_settings_have_plans_of_their_own(device, plans):
    a, b = products(device, 31, 29, 23)
    assert plans(lambda: braze.matmul(a, b)) == 1
    with braze.backend(matmul="01_naive"):
        assert plans(lambda: braze.matmul(a, b)) == 1
        assert plans(lambda: braze.matmul(a, b)) == 0
    assert plans(lambda: torch.ops.braze.matmul(a, b, True, False, "auto")) == 1
    assert plans(lambda: torch.ops.braze.matmul(a, b, True, True, "auto")) == 1
    assert plans(lambda: braze.matmul(a, b)) == 0


def test_each_pass_of_a_convolution_is_planned_once(device, plans):
    x = torch.randn(3, 5, 11, 13, device=device, requires_grad=True)
    w = torch.randn(7, 5, 3, 3, device=device, requires_grad=True)

    def forward_and_backward():
        F.conv2d(x, w, padding=1).sum().backward()

    assert plans(forward_and_backward) >= 3
    assert plans(forward_and_backward) == 0


def test_a_refusal_is_not_kept(device):
    a, b = products(device, 8, 8, 8, dtype=torch.float64)
    name = "amx" if device == "cpu" else "simt"
    if name not in {k["name"] for k in braze.kernels("matmul")}:
        pytest.skip("this processor has no AMX")
    for _ in range(2):
        with braze.backend(matmul=name), pytest.raises(RuntimeError, match="cannot take these"):
            braze.matmul(a, b)


def test_tuning_empties_the_cache(device, plans):
    a, b = products(device, 19, 17, 21)
    assert plans(lambda: braze.matmul(a, b)) == 1
    entries = {op: library(device).tuned(op) for op in ("matmul", "conv2d")}
    library(device).clear_tuned()
    try:
        assert plans(lambda: braze.matmul(a, b)) == 1
        assert plans(lambda: braze.matmul(a, b)) == 0
    finally:
        for op, found in entries.items():
            for problem, choice, measured in found:
                library(device).set_tuned(op, problem, choice, measured)
    if entries["matmul"]:
        assert plans(lambda: braze.matmul(a, b)) == 1


def test_each_number_of_threads_has_plans_of_its_own():
    a, b = products("cpu", 61, 59, 53)
    before = torch.get_num_threads()
    count = _lib.ops_library.plans_made
    braze.matmul(a, b)
    try:
        torch.set_num_threads(before + 1)
        made = count()
        assert torch.equal(braze.matmul(a, b), braze.matmul(a, b))
        assert count() == made + 1
    finally:
        torch.set_num_threads(before)


def test_the_cache_is_bounded(device, plans):
    """As many problems as it has room for drive the first ones out."""
    a, b = products(device, 1, 3, 5)
    braze.matmul(a, b)

    def many():
        for n in range(1, 1500):
            braze.matmul(a, torch.zeros(3, n, device=device))

    assert plans(many) >= 1400
    assert plans(many) >= 1400 - 512


def test_from_many_threads(device):
    """Threads that plan at once get the right plans."""
    cases = [products(device, 5 + n, 7, 9) for n in range(40)]
    expected = [a @ b for a, b in cases]
    wrong = []

    def work():
        for _ in range(20):
            for (a, b), right in zip(cases, expected, strict=True):
                if not torch.allclose(braze.matmul(a, b), right, atol=1e-4):
                    wrong.append(a.shape)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
