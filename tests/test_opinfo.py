"""Each function over the sample inputs and error inputs of PyTorch's own OpInfo database.

Values, gradients and updated buffers are compared by the tolerance rule. What braze does not
support is in UNSUPPORTED, with the reason; a test fails when an entry there would pass.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

import braze
import braze.nn.functional as F
from braze.testing import WAYS, mover, moving_what_is_kept
from common import DTYPES, assert_by_rule

pytestmark = pytest.mark.usefixtures("own_norms")
# Importing common_utils forbids plain assignments to torch.backends in the whole process.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

# OpInfo's name and variant -> where braze's function is
FUNCTIONS = {
    ("matmul", ""): (braze, "matmul"),
    ("nn.functional.linear", ""): (F, "linear"),
    ("nn.functional.conv2d", ""): (F, "conv2d"),
    ("nn.functional.conv_transpose2d", ""): (F, "conv_transpose2d"),
    ("nn.functional.batch_norm", ""): (F, "batch_norm"),
    ("nn.functional.group_norm", ""): (F, "group_norm"),
    ("nn.functional.instance_norm", ""): (F, "instance_norm"),
    ("nn.functional.layer_norm", ""): (F, "layer_norm"),
    ("nn.functional.relu", ""): (F, "relu"),
    ("nn.functional.max_pool2d", ""): (F, "max_pool2d"),
    ("nn.functional.avg_pool2d", ""): (F, "avg_pool2d"),
    ("nn.functional.adaptive_avg_pool2d", ""): (F, "adaptive_avg_pool2d"),
    ("nn.functional.interpolate", "nearest"): (F, "interpolate"),
    ("nn.functional.interpolate", "bilinear"): (F, "interpolate"),
    ("softmax", ""): (F, "softmax"),
    ("softmax", "with_dtype"): (F, "softmax"),
    ("log_softmax", ""): (F, "log_softmax"),
    ("log_softmax", "with_dtype"): (F, "log_softmax"),
    ("nn.functional.nll_loss", ""): (F, "nll_loss"),
    ("nn.functional.cross_entropy", ""): (F, "cross_entropy"),
}
OPS = {
    (op.name, op.variant_test_name): op
    for op in op_db
    if (op.name, op.variant_test_name) in FUNCTIONS
}
# Of the many samples of an op at most this many per dtype, evenly spread, others for each dtype.
MOST_SAMPLES = 16

# torch's message -> braze's, where it says the same thing in other words
OTHER_MESSAGES = {
    "should be the same": "of dtype|the same dtype|should be the same",  # input, weight and bias
}
NOT_FLOATING_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
)


@dataclasses.dataclass
class Unsupported:
    """Samples of an op that braze refuses with an error where torch computes something."""

    name: str
    reason: str
    matches: Callable = lambda sample: True
    dtypes: tuple = tuple(DTYPES)


UNSUPPORTED = [
    Unsupported(
        "nn.functional.batch_norm",
        "torch takes a 1-D input only where it is empty; braze asks for 2 dimensions",
        lambda sample: sample.input.dim() == 1,
    )
]


def function_of(key):
    module, name = FUNCTIONS[key]
    function = getattr(module, name, None)
    assert function is not None, f"{module.__name__} has no function {name}"
    return function


def samples_of(op, device, dtype, requires_grad=True):
    samples = list(op.sample_inputs(device, dtype, requires_grad=requires_grad))
    step = -(-len(samples) // MOST_SAMPLES)
    offset = DTYPES.index(dtype) % step if dtype in DTYPES else 0
    return samples[offset::step]


def is_unsupported(key, dtype, sample):
    entries = [u for u in UNSUPPORTED if u.name == key[0] and key[1] == ""]
    return any(dtype in u.dtypes and u.matches(sample) for u in entries)


def call(function, sample, dtype=None, nudge=lambda t: t):
    """Runs the function on fresh tensors, the floating-point ones passed through `nudge`; returns
    results, gradients and updated buffers."""

    def fresh(t):
        if not isinstance(t, torch.Tensor):
            return t
        # A tensor without a gradient may be a buffer that the function updates.
        copy = t.detach() if t.requires_grad else t.detach().clone()
        if dtype is not None and t.is_floating_point():
            copy = copy.to(dtype)
        if t.is_floating_point():
            copy = nudge(copy)
        return copy.requires_grad_(t.requires_grad)

    args, kwargs = tree_map(fresh, ((sample.input, *sample.args), sample.kwargs))
    results = function(*args, **kwargs)
    results = list(results) if isinstance(results, tuple) else [results]
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    leaves = [t for t in tensors if t.requires_grad]
    buffers = [t for t in tensors if not t.requires_grad]
    grads = []
    if leaves and results[0].requires_grad:
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(results[0].shape, generator=generator, dtype=torch.float64)
        # Rounded to the sample's dtype first, so that all three runs get the same gradient.
        weight = nudge(weight.to(sample.input.dtype).to(results[0]))
        grads = torch.autograd.grad(results[0], leaves, weight, allow_unused=True)
    return {"output": results, "gradient": list(grads), "argument": buffers}


def assert_same(actual, stock, reference, moved=None):
    """By the tolerance rule; `moved` gives the references for inputs that a mover moved."""
    tensors = [t for group in stock.values() for t in group if t is not None]
    terms = max(t.numel() for t in tensors)
    for what in stock:
        assert len(actual[what]) == len(stock[what]), what
        groups = zip(actual[what], stock[what], reference[what], strict=True)
        for i, (a, s, r) in enumerate(groups):
            if s is None:
                assert a is None, f"{what} {i}"
            elif s.is_floating_point():
                others = moved and (lambda what=what, i=i: [m[what][i] for m in moved()])
                assert_by_rule(a, s, r, what=f"{what} {i}", terms=terms, moved=others)
            elif s.is_complex() and s.is_cuda:  # of cuDNN, which may choose anew at each call
                torch.testing.assert_close(a, s)
            else:
                assert a.dtype == s.dtype, f"{what} {i}"
                assert torch.equal(a, s), f"{what} {i}"


def cancelled(name, sample):
    """How many of the gradients, the first ones, are what cancellation leaves: one value normalises
    to 0, two to -1 and 1."""
    if name == "nn.functional.batch_norm":
        return int(sample.input.numel() == 2 * sample.input.size(1))
    values = 0
    if name == "nn.functional.layer_norm":
        values = math.prod(sample.args[0])
    elif name == "nn.functional.group_norm":
        values = sample.input.shape[1:].numel() // sample.args[0]
    return {1: 2, 2: 1}.get(values, 0)


def identifier(key):
    return "_".join(filter(None, (key[0].removeprefix("nn.functional."), key[1])))


every_op = pytest.mark.parametrize("key", FUNCTIONS, ids=identifier)


def test_every_function_is_in_the_database():
    assert OPS.keys() == FUNCTIONS.keys()


@every_op
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_samples(device, dtype, key):
    op, function = OPS[key], function_of(key)
    assert dtype in op.supported_dtypes(device)
    tested = 0
    for sample in samples_of(op, device, dtype):
        if is_unsupported(key, dtype, sample):
            continue
        try:
            actual = call(function, sample)
            stock = call(op.op, sample)
            reference = call(op.op, sample, torch.float64)

            def moved(op=op.op, sample=sample):
                results = []
                for move in map(mover, WAYS):
                    with moving_what_is_kept(move):
                        results.append(call(op, sample, torch.float64, move))
                return results

            if count := cancelled(key[0], sample):
                for result in (actual, stock, reference):
                    result["gradient"][:count] = [None] * count
            assert_same(actual, stock, reference, moved)
        except Exception as error:
            summary = sample.summary()
            raise AssertionError(f"{summary}: {type(error).__name__}: {error}") from error
        tested += 1
    assert tested


@every_op
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_input_of_any_dtype_where_the_result_has_another(device, key):
    """softmax(x, dtype=...) converts integers too."""
    if key[1] != "with_dtype":
        return
    op, function = OPS[key], function_of(key)
    for dtype in (torch.bool, torch.uint8, torch.int64):
        for sample in samples_of(op, device, dtype, requires_grad=False):
            stock = call(op.op, sample)
            assert_same(call(function, sample), stock, stock)


@every_op
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_dtypes(device, key):
    """Torch's function computes them."""
    op, function = OPS[key], function_of(key)
    for dtype in op.supported_dtypes(device) & set(NOT_FLOATING_DTYPES):
        for sample in itertools.islice(op.sample_inputs(device, dtype, requires_grad=False), 3):
            assert_same(*[call(f, sample) for f in (function, op.op, op.op)])


@pytest.mark.parametrize(
    "entry", UNSUPPORTED, ids=lambda u: f"{u.name.removeprefix('nn.functional.')}: {u.reason}"
)
def test_what_is_listed_as_unsupported_is_refused(device, entry):
    """A listed sample that would work belongs out of the list."""
    op, function = OPS[entry.name, ""], function_of((entry.name, ""))
    matched = 0
    for dtype in entry.dtypes:
        if dtype not in op.supported_dtypes(device):
            continue
        samples = filter(entry.matches, op.sample_inputs(device, dtype, requires_grad=False))
        for sample in samples:
            with pytest.raises((RuntimeError, TypeError, ValueError, NotImplementedError)):
                call(function, sample)
            matched += 1
    if op.supported_dtypes(device) & set(entry.dtypes):
        assert matched, "matches no sample"


@pytest.mark.parametrize("key", [k for k in FUNCTIONS if OPS[k].error_inputs_func], ids=identifier)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_error_inputs(device, key):
    op, function = OPS[key], function_of(key)
    for error_input in op.error_inputs(torch.device(device)):
        sample = error_input.sample_input
        arguments = (sample.input, *sample.args)
        with pytest.raises(error_input.error_type):
            op.op(*arguments, **sample.kwargs)
        message = OTHER_MESSAGES.get(error_input.error_regex, error_input.error_regex)
        with pytest.raises(error_input.error_type, match=message):
            function(*arguments, **sample.kwargs)
