"""mean_: the means of many pairs of tensors in one launch."""

import pytest
import torch

from common import DTYPES

mean_ = torch.ops.braze.mean_.default


def tensors(device, dtype):
    """More than a launch takes, of all alignments; empty, 0-d, channels_last and long ones."""

    def randn(*shape):  # whose means float32 holds: torch goes through it from float64 to 16 bits
        return torch.randn(shape, device=device).mul(2**11).round() / 2**11

    some = [randn(n) for n in (0, 1, 7, 8, 2048, 2049, 5000)]
    some += [randn(), randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    some += [randn(9)[1:] for _ in range(130)]
    some[3][:4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-40])
    return [t.to(dtype) if t.storage_offset() == 0 else t.repeat(2).to(dtype)[1:] for t in some]


@pytest.mark.parametrize("to", DTYPES, ids=str)
def test_rounded_once(device, dtype, to):
    first, second = tensors(device, dtype), tensors(device, dtype)
    most = torch.finfo(dtype).max
    first[4][:2], second[4][:2] = most, most  # whose sum would overflow
    outputs = [torch.empty_like(t, dtype=to) for t in first]
    mean_(outputs, first, second)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for output, a, b in zip(outputs, first, second, strict=True):
        expected = (a.to(wide) / 2 + b.to(wide) / 2).to(to)
        assert output.dtype == to
        assert torch.equal(output.nan_to_num(7), expected.nan_to_num(7))


def test_pairs_of_several_dtypes(device):
    """A pair's sources have one dtype, which may be another pair's."""
    first, second = [
        [torch.randn(n, device=device).to(d) for n, d in zip((5000, 9, 70), DTYPES, strict=False)]
        for _ in range(2)
    ]
    outputs = [torch.empty_like(t, dtype=torch.float32) for t in first]
    mean_(outputs, first, second)
    for output, *pair in zip(outputs, first, second, strict=True):
        alone = torch.empty_like(output)
        mean_([alone], *([t] for t in pair))
        assert torch.equal(output, alone)
        torch.testing.assert_close(output, sum(t.double() for t in pair).div(2).float())


def test_in_place_of_one(device, dtype):
    first, second = torch.randn(2, 3000, device=device).to(dtype)
    expected = torch.empty_like(first)
    mean_([expected], [first], [second])
    mean_([second], [first], [second])
    assert torch.equal(second, expected)


def test_opcheck_and_version_counter(device):
    first, second = torch.randn(2, 5, device=device).half()
    outputs = [torch.empty(5, device=device)]
    torch.library.opcheck(mean_, (outputs, [first], [second]))
    version = outputs[0]._version
    mean_(outputs, [first], [second])
    assert outputs[0]._version > version


def test_bad_input(device):
    def r(*shape, dtype=torch.float32):
        return torch.zeros(shape, device=device, dtype=dtype)

    for outputs, first, second, message in [
        ([], [r(2)], [r(2)], "as many outputs as pairs, but got 0, 1 and 1"),
        ([r(2)], [r(2)], [], "but got 1, 1 and 0"),
        ([r(2)], [r(2)], [r(3)], "to have the same shape"),
        ([r(3)], [r(2)], [r(2)], "to have the same shape"),
        ([r(2)], [r(2)], [r(2).half()], "to have the same dtype"),
        ([r(2), r(2)], [r(2), r(2).half()], [r(2), r(2)], "to have the same dtype"),
        ([r(2), r(2).half()], [r(2), r(2)], [r(2), r(2)], "to have the same dtype"),
        ([r(2, 3)], [r(2, 3)], [r(3, 2).t()], "outputs with the same strides"),
        ([r(2)], [r(1).expand(2)], [r(2)], "expected dense inputs"),
        ([r(2)], [r(2, dtype=torch.int64)], [r(2, dtype=torch.int64)], "first"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            mean_(outputs, first, second)
    with pytest.raises(RuntimeError, match="not differentiable"):
        mean_([r(2)], [r(2)], [r(2).requires_grad_()])
