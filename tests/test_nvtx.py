"""NVTX ranges: around each op and step where they are switched on, and nowhere else."""

import pytest
import torch

import braze
from braze import _nvtx


@pytest.fixture
def ranges(monkeypatch):
    """What is pushed and popped; a CPU build of torch has no NVTX of its own."""
    seen = []
    monkeypatch.setattr(_nvtx, "ENABLED", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
    return seen


def test_a_range_around_each_call(ranges):
    double = _nvtx.ranged("double", lambda x: 2 * x)
    assert double(3) == 6
    assert ranges == ["braze::double", "end"]


def test_a_range_ends_with_an_exception(ranges):
    with pytest.raises(ZeroDivisionError):
        _nvtx.ranged("divide", lambda: 1 / 0)()
    assert ranges == ["braze::divide", "end"]


def test_off_by_default():
    def function():
        pass

    assert _nvtx.ENABLED is False
    assert _nvtx.ranged("anything", function) is function
    assert not hasattr(braze.TrainStep._run, "__wrapped__")
