"""Batch norm, an addition and an activation as one op: public function, autograd Function, fake
kernels. Kernels: csrc/cuda/batch_norm/."""

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from braze._nvtx import ranged
from braze._ops._bilinear import masked
from braze._ops._common import (
    below_autograd,
    eager,
    eager_backward,
    is_channels_last,
    overwrite,
    plain,
    register,
    statistics_dtype,
)
from braze._ops.activation import Activation, in_torch, passed_back
from braze._ops.activation import activation as activation_of
from braze._ops.batch_norm import (
    batch_norm_counting,
    check_count,
    check_settings,
    count,
    empty_like_input,
    fake_parameter_gradients,
    gradients,
    kernels_count,
    normalised,
)
from braze._ops.norm_grads import norm_backward_of, offer_norm, sums_of

_ops = torch.ops.braze
CLAMPS = "relu", "hardtanh"  # whose derivative is 0 or 1


def _run(*args):
    buffers, training = args[4:7], args[7]
    return overwrite(buffers if training else (), _ops.batch_norm_act.default, *args)


def may_pass_on(clamped, training, activation):
    """Whether a batch norm's backward may begin where its result's gradient is made: see
    :mod:`braze._ops.norm_grads`.

    Args:
        clamped: whether a clamp's derivative follows from what was normalised, or a mask.
    """
    return training and (activation == "identity" or (activation in CLAMPS and clamped))


class BatchNormAct(torch.autograd.Function):
    """Returns the result and what the backward needs of the forward, which is not differentiable:
    a mask in the place of the residual, and what the input was normalised with."""

    @staticmethod
    def forward(
        ctx, input, residual, weight, bias, mean, var, batches, training, momentum, eps,
        activation, first, second
    ):  # fmt: skip
        act = activation, first, second
        with below_autograd():
            output, mask, statistics = _run(
                input, residual, weight, bias, mean, var, batches, training, momentum, eps, *act
            )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mask, statistics)
        # The gradient does not depend on what an identity or a mask makes up for.
        reads = residual is not None and activation != "identity" and mask.numel() == 0
        kept = residual if reads else None
        ctx.save_for_backward(input, kept, weight, bias, mask, statistics)
        ctx.settings = training, *act
        ctx.clamped = residual is None or mask.numel() > 0  # its derivative is known from these
        return output, mask, statistics

    @staticmethod
    def has_norm(ctx):
        """Whether the result's gradient may be taken on to before the activation, by
        :meth:`norm_of`: see :mod:`braze._ops.norm_grads`."""
        return may_pass_on(ctx.clamped, *ctx.settings[:2])

    @staticmethod
    def norm_of(ctx):
        """What was normalised, the mask, the statistics, the activation."""
        input, *_, mask, statistics = ctx.saved_tensors
        return input, mask, statistics, *ctx.settings[1:]

    @staticmethod
    def backward(ctx, grad_output, *_):
        if grad_output is None:
            return (None,) * 13
        wanted = ctx.needs_input_grad[:4]
        sums = sums_of(ctx, grad_output)
        if sums is not None:
            input, _, weight, bias, _, statistics = ctx.saved_tensors
            asked = wanted[0], *wanted[2:], False
            norm = input, weight, bias, statistics
            dx, *dnorm, _ = norm_backward_of(sums, grad_output, *norm, asked)
            return dx, grad_output if wanted[1] else None, *dnorm, *(None,) * 9
        identity = ctx.settings[1] == "identity"
        asked = (wanted[0], wanted[1] and not identity, *wanted[2:])
        grads = _batch_norm_act_backward(grad_output, *ctx.saved_tensors, *ctx.settings, asked)
        dx, dresidual, dweight, dbias = masked(grads, asked)
        if identity and wanted[1]:
            dresidual = grad_output
        return dx, dresidual, dweight, dbias, *(None,) * 9


def _open(mask, like):
    """The mask's bits as a boolean tensor like `like`; they lie in its order in memory."""
    width = like.numel() // mask.numel()
    bits = mask.unsqueeze(-1) >> torch.arange(width, device=mask.device, dtype=mask.dtype) & 1
    bits = bits.flatten().bool()
    if is_channels_last(like):
        n, c, h, w = like.shape
        return bits.view(n, h, w, c).permute(0, 3, 1, 2)
    return bits.view(like.shape)


def _gradients(
    grad_output, input, residual, weight, bias, mask, statistics, training, activation, first,
    second, output_mask
):  # fmt: skip
    """The backward in torch's ops, to be differentiated by them."""
    act = Activation(activation, first, second)
    mean, rstd = statistics[:2]
    if mask.numel() > 0:
        g = grad_output.where(_open(mask, input), 0)
    else:
        v = normalised(input, weight, bias, mean, rstd, training)
        if residual is not None:
            v = v + residual.to(v.dtype)
        g = passed_back(act, grad_output.to(v.dtype), v).to(grad_output.dtype)
    dx, *d = gradients(g, input, weight, mean, rstd, training)
    if weight is None and bias is not None:
        d = [t.to(bias.dtype) for t in d]
    return dx, g if residual is not None or mask.numel() > 0 else None, *d


_batch_norm_act = eager(BatchNormAct, _run, tensors=7)
_batch_norm_act_backward = eager_backward(
    BatchNormAct, _ops.batch_norm_act_backward.default, 7, formula=_gradients
)


def _mask_bytes(input, residual, activation):
    if residual is None or activation not in CLAMPS or input.device.type != "cuda":
        return 0
    extent = input.shape[1]
    inner = 1
    for size in input.shape[2:]:
        inner = inner * size
    if not is_channels_last(input) and inner != 1:
        extent = inner
    width = 16 // input.element_size()
    while extent % width != 0:
        width //= 2
    return input.numel() // width


def _fake(
    input, residual, weight, bias, mean, var, batches, training, momentum, eps, activation, *_
):
    mask = input.new_empty(_mask_bytes(input, residual, activation), dtype=torch.uint8)
    dtype = statistics_dtype(input)
    return empty_like_input(input), mask, input.new_empty((4, input.shape[1]), dtype=dtype)


def _fake_backward(
    grad_output, input, residual, weight, bias, mask, statistics, training, activation, first,
    second, output_mask
):  # fmt: skip
    return (
        *(empty_like_input(input) if w else input.new_empty(0) for w in output_mask[:2]),
        *fake_parameter_gradients(weight, bias, statistics, output_mask[2:]),
    )


def _fake_backward_of_sums(grad_output, input, weight, bias, statistics, sums, output_mask):
    return (
        empty_like_input(input) if output_mask[0] else input.new_empty(0),
        *fake_parameter_gradients(weight, bias, statistics, output_mask[1:3]),
        input.new_empty(input.shape[1] if output_mask[3] else 0),
    )


def wants_gradient(*tensors):
    """Whether autograd is to record what is made of these."""
    return torch.is_grad_enabled() and any(
        isinstance(t, torch.Tensor) and t.requires_grad for t in tensors
    )


def _without_gradients(*args):
    with below_autograd():
        return _ops.batch_norm_act_inference.default(*args)


_inference = ranged("BatchNormActInference", _without_gradients)


def _inference_of(*args):
    *tensors, eps, activation, first, second = args
    if not wants_gradient(*tensors[:4]):
        return _inference(*args)
    norm = None, False, 0.0, eps
    return _ops.batch_norm_act.default(*tensors, *norm, activation, first, second)[0]


register("batch_norm_act", fake=_fake, autograd=_batch_norm_act)
register(
    "batch_norm_act_inference",
    fake=lambda input, *args: empty_like_input(input),
    autograd=_inference_of,
)
register("batch_norm_act_backward", fake=_fake_backward, autograd=_batch_norm_act_backward)
register("batch_norm_backward_of_sums", fake=_fake_backward_of_sums)


def _goes_with(residual, input):
    """Whether what is added is a tensor of the result's shape and dtype."""
    if residual is None:
        return True
    return (
        residual.dtype == input.dtype
        and residual.device == input.device
        and residual.dim() == input.dim()
        and all(
            statically_known_true(a == b) for a, b in zip(residual.shape, input.shape, strict=True)
        )
    )


def batch_norm_act(
    input,
    running_mean,
    running_var,
    weight=None,
    bias=None,
    training=False,
    momentum=0.1,
    eps=1e-5,
    *,
    residual=None,
    activation="relu",
    settings=(),
    num_batches_tracked=None,
):
    """``activation(batch_norm(input) + residual)`` as one op.

    Forward, one pass takes the statistics and one does all the rest. Backward, one pass makes the
    sums that the gradients need, and the residual's gradient; one makes the input's. What comes
    before the activation is made again from `input`; where there is a residual, too, ReLU and
    Hardtanh leave a bit per element in its place on a GPU, and the others keep the residual.

    Args:
        input: [N, C, ...]; float64, float32, bfloat16 or float16.
        running_mean, running_var, weight, bias, training, momentum, eps: as in
            :func:`braze.nn.functional.batch_norm`.
        residual: what is added before the activation, or None. Of another shape or dtype than
            `input` it is added by torch.
        activation: by the name of ``torch.nn.functional``'s function: "identity" (no function
            there), "relu", "relu6", "hardtanh", "leaky_relu", "silu", "gelu", "hardswish",
            "hardsigmoid", "sigmoid", "tanh", "elu", "celu", "mish".
        settings: those of the function, in its order: ``("tanh",)`` for gelu's approximation.
        num_batches_tracked: an int64 tensor that training adds one to, or None; with
            ``momentum=None`` the running statistics are the average over that many batches.

    Returns:
        What the functions return, in input's dtype and memory format (contiguous or
        channels_last). Bitwise repeatable. Differentiable with respect to input, residual, weight
        and bias; the second derivative and all further ones are made of torch's ops.

    Raises:
        ValueError: an activation of another name; else as
            :func:`braze.nn.functional.batch_norm`.
        TypeError, RuntimeError: as :func:`braze.nn.functional.batch_norm`.
    """
    act = activation_of(activation, *settings)
    norm = weight, bias, training, momentum, eps, num_batches_tracked
    tensors = residual, weight, bias, running_mean, running_var
    ours = plain(input, *tensors) and kernels_count(num_batches_tracked)
    if not ours or not _goes_with(residual, input):
        output = batch_norm_counting(input, running_mean, running_var, *norm)
        return in_torch(act, output if residual is None else output + residual)
    if momentum is None and num_batches_tracked is None:
        momentum = 0.0
    uncounted = num_batches_tracked if training else None
    if input.numel() == 0:
        count(uncounted)
        uncounted = None
    apply = _ops.batch_norm_act.default if torch.compiler.is_compiling() else _batch_norm_act
    buffers = running_mean, running_var, num_batches_tracked
    try:
        if training:
            check_count(input)
        check_settings(running_mean, running_var, training, eps, momentum)
        if not (
            training
            or torch.compiler.is_compiling()
            or wants_gradient(input, residual, weight, bias)
        ):
            return _inference(input, residual, weight, bias, *buffers[:2], eps, *act)
        how = training, momentum, eps
        output = apply(input, residual, weight, bias, *buffers, *how, *act)[0]
    except Exception:
        count(uncounted)
        raise
    offer_norm(output)
    return output
