"""cast_: many tensors in another dtype in one launch."""

import pytest
import torch

from common import DTYPES

cast_ = torch.ops.braze.cast_.default


def tensors(device, dtype):
    """More than a launch takes, of all alignments; empty, 0-d, channels_last and long ones."""
    some = [torch.randn(n, device=device) for n in (0, 1, 7, 8, 2048, 2049, 5000)]
    some += [torch.randn((), device=device), torch.randn(2, 3, 4, 5, device=device)]
    some[-1] = some[-1].to(memory_format=torch.channels_last)
    some += [torch.randn(9, device=device)[1:] for _ in range(130)]
    some[3][:4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-40])
    return [t.to(dtype) if t.storage_offset() == 0 else t.repeat(2).to(dtype)[1:] for t in some]


@pytest.mark.parametrize("to", DTYPES, ids=str)
def test_equals_to(device, dtype, to):
    inputs = tensors(device, dtype)
    outputs = [torch.empty_like(t, dtype=to) for t in inputs]
    cast_(outputs, inputs)
    for output, source in zip(outputs, inputs, strict=True):
        expected = source.to(to)
        assert output.dtype == to
        assert torch.equal(output.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_same_dtype_keeps_bits(device, dtype):
    """Also of what are no numbers: parts of other types are copied under such a name."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device)
    outputs = [torch.empty_like(bits), torch.empty_like(bits)[1:]]
    cast_([t.view(dtype) for t in outputs], [bits.view(dtype), bits.view(dtype)[1:]])
    assert torch.equal(outputs[0], bits)
    assert torch.equal(outputs[1], bits[1:])


def test_opcheck_and_version_counter(device):
    inputs, outputs = [torch.randn(5, device=device)], [torch.empty(5, device=device).half()]
    torch.library.opcheck(cast_, (outputs, inputs))
    version = outputs[0]._version
    cast_(outputs, inputs)
    assert outputs[0]._version > version


def test_bad_input(device):
    def r(*shape, dtype=torch.float32):
        return torch.zeros(shape, device=device, dtype=dtype)

    for outputs, inputs, message in [
        ([], [r(2)], "as many outputs as inputs, but got 0 and 1"),
        ([r(3)], [r(2)], "to have the same shape"),
        ([r(2), r(2).half()], [r(2), r(2)], "to have the same dtype"),
        ([r(2), r(2)], [r(2), r(2).half()], "to have the same dtype"),
        ([r(2, 3)], [r(3, 2).t()], "outputs with the same strides"),
        ([r(2)], [r(1).expand(2)], "expected dense inputs"),
        ([r(2)], [r(2, dtype=torch.int64)], "inputs"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            cast_(outputs, inputs)
    with pytest.raises(RuntimeError, match="not differentiable"):
        cast_([r(2)], [r(2).requires_grad_()])
