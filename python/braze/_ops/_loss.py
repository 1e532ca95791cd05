"""What cross_entropy and nll_loss share: checks in torch's words, shapes, autocast."""

import re

import torch

from braze._ops._common import HALF_DTYPES

#: torch's numbers for reduction="none", "mean" and "sum"
NONE, MEAN, SUM = 0, 1, 2
_REDUCTIONS = {"none": NONE, "mean": MEAN, "sum": SUM}


def refuse_weight_grad(name, weight):
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"The function '{name}' is not differentiable with respect to argument 'weight'. "
            "This input cannot have requires_grad True."
        )


def acc_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_sizes(input):
    return input.shape[:0] if input.dim() == 1 else input.shape[:1] + input.shape[2:]


def fake_gradient(input):
    if input.dim() < 3 or input.is_contiguous() or not input.movedim(1, -1).is_contiguous():
        return input.new_empty(input.shape)
    return torch.empty_like(input)


def to_float32(tensor):
    if tensor is None or tensor.dtype not in HALF_DTYPES:
        return tensor
    return tensor.float()


def name_of(reduction):
    return next(name for name, number in _REDUCTIONS.items() if number == reduction)


def reduction_number(size_average, reduce, reduction):
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    value = _REDUCTIONS.get(reduction)
    if value is None:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return value


def check_labels_fit(input, target):
    """Shapes as torch wants them, in torch's words; the op checks the rest."""
    dims = input.dim()
    if dims == 0:
        raise ValueError("Expected 1 or more dimensions (got 0)")
    if dims == 1:
        if target.dim() == 1 and target.size(0) != 1:
            raise ValueError(
                f"For 1D input, 1D target must have size 1, but got target size: {target.size(0)}"
            )
    else:
        batch = target.size(0) if target.dim() else 0
        if input.size(0) != batch:
            raise ValueError(
                f"Expected input batch_size ({input.size(0)}) to match target batch_size ({batch})."
            )
    if dims <= 2:
        if target.dim() > 1:
            raise RuntimeError("0D or 1D target tensor expected, multi-target not supported")
    elif target.shape != input.shape[:1] + input.shape[2:]:
        expected = [input.size(0), *input.shape[2:]]
        raise RuntimeError(f"Expected target size {expected}, got {list(target.shape)}")


def check_weight_dtype(weight, dtype):
    if weight is not None and weight.dtype != dtype:
        raise RuntimeError(f"expected scalar type {dtype} for weight but found {weight.dtype}")


_OUT_OF_BOUNDS = re.compile(r"Target -?\d+ is out of bounds\.")


def as_index_error(error):
    """IndexError for a label out of range, which the stable ABI can only raise as RuntimeError."""
    found = _OUT_OF_BOUNDS.search(str(error))
    return IndexError(found.group()) if found else error
