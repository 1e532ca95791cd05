"""Fused blocks: public functions; autograd Function and fake kernels of the block of few inputs per
output (csrc/launchers/conv_bn_relu_max_pool2d.h). Those of every other one are in bn_relu.py."""

import torch

from braze import _config, _lib
from braze._ops import bn_relu
from braze._ops._common import (
    autocast_dtype,
    below_autograd,
    cast_to,
    eager,
    eager_backward,
    empty_image,
    empty_weight_gradient,
    is_channels_last,
    overwrite,
    plain,
    register,
    with_derivatives_of,
)
from braze._ops.batch_norm import batch_norm_counting, check_settings, count, kernels_count
from braze._ops.batch_norm import gradients as batch_norm_gradients
from braze._ops.conv2d import conv2d, conv2d_backward_flops, conv2d_flops
from braze._ops.conv2d import geometry as conv2d_geometry
from braze._ops.conv2d import gradients as conv2d_gradients
from braze._ops.conv_bn_act import conv_bn_act
from braze._ops.pool import max_pool2d
from braze._ops.relu import relu
from braze._step_scope import current

_ops = torch.ops.braze
# Height, width and input channels of the filters that the kernels have.
_FILTERS = tuple(_lib.limits["patch_filters"])
_MOST_TILES = _lib.limits["pool_tiles"]
# Whose weights fit the shared memory that every block has, in float64 too.
_MOST_FILTERS = 128


def _run(*args):
    buffers, training = args[5:8], args[9]
    return overwrite(buffers if training else (), _ops.conv_bn_relu_max_pool2d.default, *args)


class ConvBnReLUMaxPool2d(torch.autograd.Function):
    """Returns the result and what the backward needs of the forward: where each window's maximum
    was, and the moments of the input patches."""

    @staticmethod
    def forward(
        ctx, input, weight, bias, bn_weight, bn_bias, mean, var, batches, padding, training,
        momentum, eps, moments=None, allow_tf32=False
    ):  # fmt: skip
        if ctx.needs_input_grad[0]:
            raise RuntimeError(
                "braze::conv_bn_relu_max_pool2d has no gradient for its input; "
                "braze.nn.functional.conv_bn_relu_max_pool2d has"
            )
        with below_autograd():
            output, codes, saved = _run(
                input, weight, bias, bn_weight, bn_bias, mean, var, batches, padding, training,
                momentum, eps, moments, allow_tf32
            )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(codes, saved)
        ctx.save_for_backward(input, weight, bn_weight, codes, saved)
        ctx.conv_bias = bias
        ctx.settings = padding, training, None if bn_bias is None else bn_bias.dtype, allow_tf32
        return output, codes, saved

    @staticmethod
    def backward(ctx, grad_output, *_):
        wanted = ctx.needs_input_grad
        if grad_output is None:
            return (None,) * len(wanted)
        grads = _backward(ctx.conv_bias, grad_output, *ctx.saved_tensors, *ctx.settings)
        grads = (None, *grads, *(None,) * (len(wanted) - 5))
        return tuple(g if need else None for g, need in zip(grads, wanted, strict=True))


def _unpack(codes, shape):
    """The codes that bn_relu.unpool() takes, of a pooled result of this shape."""
    n, k, p, q = shape
    if codes.is_cuda:
        # A bit of the code in each of three bytes, the first filter in the highest bit; the third
        # byte says whether ReLU lets the gradient through: small_k.cuh.
        words = codes.unsqueeze(-1) >> torch.arange(7, -1, -1, device=codes.device)
        codes = (words & 1) + (words >> 7 & 2) + 4 * (1 - (words >> 16 & 1))
    else:
        codes = bn_relu.unpack(codes)
    return codes.view(n, p, q, -1)[..., :k].permute(0, 3, 1, 2)


def _gradients(
    conv_bias, grad_output, input, weight, bn_weight, codes, moments, padding, training, bn_dtype,
    allow_tf32=False
):  # fmt: skip
    """The backward in torch's ops, to be differentiated by them: of all parameters."""
    k, dtype = weight.shape[0], weight.dtype
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    mean, rstd = moments[-2 * k :].to(acc).view(2, k)
    x, w = input.to(acc), weight.to(acc)
    # The statistics are those of the convolution without its bias.
    z = torch.nn.functional.conv2d(x, w, padding=padding)
    if conv_bias is not None and not training:
        zero = torch.zeros_like(conv_bias, dtype=acc)
        z = z + with_derivatives_of(zero, conv_bias).to(acc).view(-1, 1, 1)
    g = bn_relu.unpool(grad_output, _unpack(codes, grad_output.shape), *z.shape[2:])
    dz, d_weight, d_bias = batch_norm_gradients(g, z, bn_weight, mean, rstd, training)
    _, dw, _ = conv2d_gradients(dz, x, w, (1, 1), padding, (1, 1), 1, (False, True, False))
    d_conv_bias = bn_relu.conv_bias_gradient(dz, training)
    parameters = bn_dtype or (dtype if bn_weight is None else bn_weight.dtype)
    return dw.to(dtype), d_conv_bias.to(dtype), d_weight.to(parameters), d_bias.to(parameters)


def _run_backward(conv_bias, *args):
    return _ops.conv_bn_relu_max_pool2d_backward.default(*args)


_forward = eager(ConvBnReLUMaxPool2d, _run, tensors=8)
# The convolution's bias is for the second derivative only.
_backward = eager_backward(ConvBnReLUMaxPool2d, _run_backward, 7, formula=_gradients)


def _forward_fake(input, weight, bias, bn_weight, bn_bias, mean, var, batches, padding, *_):
    n, c, h, w = input.shape
    k, _, r, s = weight.shape
    p, q = (h + 2 * padding[0] - r + 1) // 2, (w + 2 * padding[1] - s + 1) // 2
    channels_last = is_channels_last(input) or is_channels_last(weight)
    output = empty_image(input, (n, k, p, q), channels_last)
    codes = input.new_empty(n * p * q * ((k + 7) // 8), dtype=torch.int32)
    taps = c * r * s
    return output, codes, input.new_empty(taps + taps * taps + 2 * k, dtype=torch.float64)


def _backward_fake(
    grad_output, input, weight, bn_weight, codes, moments, padding, training, dtype, *_
):
    k = weight.shape[0]
    parameters = dtype or (input.dtype if bn_weight is None else bn_weight.dtype)
    return (
        empty_weight_gradient(weight, torch.contiguous_format),
        input.new_empty(k),
        input.new_empty(k, dtype=parameters),
        input.new_empty(k, dtype=parameters),
    )


def _convolved(input, weight, padding):
    """The shape of the convolution's output."""
    extents = (i + 2 * p - f + 1 for i, p, f in zip(input[2:], padding, weight[2:], strict=True))
    return input[0], weight[0], *extents


def _forward_flops(
    input, weight, bias, bn_weight, bn_bias, mean, var, batches, padding, *settings, out_shape
):
    return conv2d_flops(input, weight, out_shape=_convolved(input, weight, padding))


def _backward_flops(
    grad_output, input, weight, bn_weight, codes, moments, padding, *settings, out_shape
):
    z = _convolved(input, weight, padding)
    return conv2d_backward_flops(z, input, weight, (False, True, False))


register("conv_bn_relu_max_pool2d", fake=_forward_fake, autograd=_forward, flops=_forward_flops)
register(
    "conv_bn_relu_max_pool2d_backward",
    fake=_backward_fake,
    autograd=lambda *args: _backward(None, *args),
    flops=_backward_flops,
)


def is_2x2(kernel_size, stride, padding, dilation, ceil_mode):
    """Whether a max pool's windows are 2x2, side by side, none of them cut off."""
    if ceil_mode is not False:
        return False  # torch refuses what equals it; likewise a kernel size of 2.0
    values = (kernel_size, kernel_size if stride is None else stride, padding, dilation)
    if tuple(map(type, values)) == (int, int, int, int):
        return values == (2, 2, 0, 1)
    pairs = [v if isinstance(v, (tuple, list)) else (v, v) for v in values]
    if any(isinstance(v, (bool, float)) for pair in pairs for v in pair):
        return False
    return [tuple(v) * (2 if len(v) == 1 else 1) for v in pairs] == [
        (2, 2), (2, 2), (0, 0), (1, 1)
    ]  # fmt: skip


def _takes_small_k(input, weight, stride, padding, dilation, groups):
    """Whether the fused kernels for few inputs per output take these arguments."""
    k, c, r, s = weight.shape
    return (
        not (torch.is_grad_enabled() and input.requires_grad)
        and (r, s, c) in _FILTERS
        and 0 < k <= _MOST_FILTERS
        and input.shape[0] > 0
        and input.shape[1] == c
        and (stride, dilation, groups) == ((1, 1), (1, 1), 1)
        and input.shape[2] + 2 * padding[0] - r >= 1
        and input.shape[3] + 2 * padding[1] - s >= 1
    )


def _takes(input, weight, stride, padding, dilation, max_pool):
    """Whether there is anything for the general op to normalise, and to pool. Arguments that a
    convolution refuses are for conv2d to refuse."""
    if min(stride) < 1:
        return False
    n, _, *extents = input.shape
    k, _, *filters = weight.shape
    p, q = (
        (extent + 2 * pad - d * (size - 1) - 1) // step + 1
        for extent, size, step, pad, d in zip(
            extents, filters, stride, padding, dilation, strict=True
        )
    )
    if not max_pool:
        return min(p, q) > 0 and n * p * q > 1 and k > 0
    tiles = n * k * ((p + 1) // 2) * ((q + 1) // 2)
    return min(p, q) > 1 and tiles > 0 and not _exceeds(tiles, _MOST_TILES)


def _exceeds(size, limit):
    """Whether a size is over the limit; one that a dynamic shape leaves open is taken not to be, so
    that the shape stays as open as it was."""
    if torch.compiler.is_compiling():
        return torch.fx.experimental.symbolic_shapes.statically_known_true(size > limit)
    return size > limit


def as_one_op(
    max_pool, contiguous, input, weight, bias, running_mean, running_var, bn_weight, bn_bias,
    stride, padding, dilation, groups, training, momentum, eps, num_batches_tracked, forked=False
):  # fmt: skip
    """The block's result where one op makes it, else None.

    Args:
        forked: return an alias of the input beside it, see :class:`bn_relu.ForkedConvBnReLU2d`.
    """
    others = weight, bias, running_mean, running_var, bn_weight, bn_bias
    if weight is None or not plain(input, *others) or not kernels_count(num_batches_tracked):
        return None
    if input.dim() != 4 or weight.dim() != 4:
        return None
    if momentum is None and num_batches_tracked is None:
        momentum = 0.0
    input, stride, padding, dilation = conv2d_geometry(input, weight, stride, padding, dilation)
    if not (training or max_pool or forked) and input.is_cuda:
        geometry = stride, padding, dilation, groups
        norm = bn_weight, bn_bias, running_mean, running_var, num_batches_tracked
        result = conv_bn_act(
            input, weight, bias, None, *norm, *geometry, training, momentum, eps, "relu", ()
        )
        if result is not None:
            return result
    small_k = max_pool and _takes_small_k(input, weight, stride, padding, dilation, groups)
    if not small_k and not _takes(input, weight, stride, padding, dilation, max_pool):
        return None
    try:
        check_settings(running_mean, running_var, training, eps, momentum)
    except (RuntimeError, TypeError, ValueError):
        return None  # batch norm refuses them, after the convolution
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, weight, bias = cast_to(dtype, input, weight, bias)
    tensors = input, weight, bias, bn_weight, bn_bias
    buffers = running_mean, running_var, num_batches_tracked
    norm = training, momentum, eps
    geometry = stride, padding, dilation, groups
    try:
        if small_k:
            return _small_k(tensors, buffers, padding, norm)
        how = max_pool, contiguous, *_config.conv2d_settings(input)
        op = bn_relu.forked_conv_bn_relu2d if forked else bn_relu.conv_bn_relu2d
        return op(*tensors, *buffers, *geometry, *norm, *how)
    except RuntimeError:
        # The convolution would have done its part before batch norm refuses the others.
        of_norm = running_mean, running_var, bn_weight, bn_bias
        if training and any(t is not None and t.shape != weight.shape[:1] for t in of_norm):
            count(num_batches_tracked)
        raise


def _small_k(tensors, buffers, padding, norm):
    op = _ops.conv_bn_relu_max_pool2d.default
    allow_tf32 = _config.allow_tf32("conv2d", tensors[0])
    if torch.compiler.is_compiling():
        return op(*tensors, *buffers, list(padding), *norm, None, allow_tf32)[0]
    moments = None
    # momentum=None counts batches where the moments are summed
    scope = current.scope
    training, momentum, _ = norm
    if scope is not None and training and momentum is not None:
        moments = scope.patch_moments(*tensors[:2], padding)
    return _forward(*tensors, *buffers, list(padding), *norm, moments, allow_tf32)[0]


def conv_bn_relu2d(
    input,
    weight,
    bias=None,
    running_mean=None,
    running_var=None,
    bn_weight=None,
    bn_bias=None,
    *,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    training=False,
    momentum=0.1,
    eps=1e-5,
    num_batches_tracked=None,
):
    """``relu(batch_norm(conv2d(input, weight, bias)))`` as one op.

    The convolution leaves batch norm's statistics where its kernel can (Hopper's tensor-core kernel
    for channels_last tensors, of its results as they are stored); one pass over its output does the
    rest. In the backward pass ReLU's mask is found again from the convolution's output.

    Args:
        input: [N, C, H, W].
        weight, bias, stride, padding, dilation, groups: as in :func:`braze.nn.functional.conv2d`.
        running_mean, running_var, bn_weight, bn_bias, training, momentum, eps: as in
            :func:`braze.nn.functional.batch_norm`.
        num_batches_tracked: an int64 tensor that training adds one to, or None; with
            ``momentum=None`` the running statistics are the average over that many batches.

    Returns:
        What the three functions return. Differentiable with respect to every parameter and the
        input, from the second derivative on by torch's ops; in training the gradient of `bias`,
        which batch norm cancels, is exactly zero. Bitwise repeatable as conv2d is.

    Errors are those of the three functions.
    """
    block = (
        input, weight, bias, running_mean, running_var, bn_weight, bn_bias, stride, padding,
        dilation, groups, training, momentum, eps, num_batches_tracked
    )  # fmt: skip
    output = as_one_op(False, False, *block)
    return relu(_conv_bn(*block)) if output is None else output


def _conv_bn(
    input, weight, bias, running_mean, running_var, bn_weight, bn_bias, stride, padding, dilation,
    groups, training, momentum, eps, num_batches_tracked
):  # fmt: skip
    output = conv2d(input, weight, bias, stride, padding, dilation, groups)
    norm = bn_weight, bn_bias, training, momentum, eps, num_batches_tracked
    return batch_norm_counting(output, running_mean, running_var, *norm)


def conv_bn_relu_max_pool2d(
    input,
    weight,
    bias=None,
    running_mean=None,
    running_var=None,
    bn_weight=None,
    bn_bias=None,
    *,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    training=False,
    momentum=0.1,
    eps=1e-5,
    kernel_size=2,
    pool_stride=None,
    pool_padding=0,
    pool_dilation=1,
    ceil_mode=False,
    num_batches_tracked=None,
    memory_format=None,
):
    """``max_pool2d(relu(batch_norm(conv2d(input, weight, bias))))``; one op if pooling is 2x2.

    With 2x2 pooling, what follows the convolution is one pass over its output, of which the
    normalised form never reaches memory; batch norm's statistics are as in :func:`conv_bn_relu2d`.
    Where the convolution has few inputs per output (3x3 over up to three channels, 5x5 over one;
    stride 1) and the input needs no gradient (a network's first block), the convolution's output
    never reaches memory either: batch norm's statistics and all gradients follow from the first two
    moments of the input patches, summed in float64. With other poolings, :func:`conv_bn_relu2d`
    and :func:`max_pool2d` run.

    Args:
        input: [N, C, H, W].
        weight, bias, stride, padding, dilation, groups: as in :func:`braze.nn.functional.conv2d`.
        running_mean, running_var, bn_weight, bn_bias, training, momentum, eps: as in
            :func:`braze.nn.functional.batch_norm`.
        kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode: as in
            :func:`braze.nn.functional.max_pool2d`.
        num_batches_tracked: as in :func:`conv_bn_relu2d`.
        memory_format: of the result, as a ``torch.memory_format``; None: as the four functions
            have it. A contiguous result of channels_last tensors, which flattens without a copy,
            costs no pass of its own on a GPU where it is small.

    Returns:
        What the four functions return. Differentiable with respect to every parameter and the
        input, from the second derivative on by torch's ops; in training the gradient of `bias`,
        which batch norm cancels, is exactly zero. Bitwise repeatable as conv2d is.

    Errors are those of the four functions.
    """
    block = (
        input, weight, bias, running_mean, running_var, bn_weight, bn_bias, stride, padding,
        dilation, groups, training, momentum, eps, num_batches_tracked
    )  # fmt: skip
    pool = kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode
    contiguous = memory_format == torch.contiguous_format
    output = as_one_op(True, contiguous, *block) if is_2x2(*pool) else None
    if output is None:
        output = as_one_op(False, False, *block)
        output = max_pool2d(relu(_conv_bn(*block)) if output is None else output, *pool)
    return output if memory_format is None else output.contiguous(memory_format=memory_format)
