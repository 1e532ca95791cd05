"""Batch norm + ReLU (+ 2x2 max pool), alone and behind a convolution: autograd Functions, fake
kernels. Front end: csrc/ops/conv_bn_relu2d.cpp."""

import torch

from braze._ops._bilinear import masked
from braze._ops._common import (
    below_autograd,
    eager,
    eager_backward,
    empty_image,
    forking,
    is_channels_last,
    overwrite,
    plain,
    register,
    statistics_dtype,
    with_derivatives_of,
)
from braze._ops.activation import activation as activation_of
from braze._ops.again import again_of
from braze._ops.batch_norm import empty_like_input, fake_parameter_gradients
from braze._ops.batch_norm import gradients as batch_norm_gradients
from braze._ops.conv2d import conv2d_backward_flops, conv2d_flops, fake_conv2d, fake_conv2d_backward
from braze._ops.conv2d import gradients as conv2d_gradients
from braze._ops.norm_grads import (
    conv2d_backward_for,
    norm_backward_of,
    norm_before,
    offer_norm,
    sums_of,
)

_ops = torch.ops.braze
_RELU = activation_of("relu")


def _run_bn_relu2d(*args):
    buffers, training = args[3:6], args[6]
    return overwrite(buffers if training else (), _ops.bn_relu2d.default, *args)


class BnReLU2d(torch.autograd.Function):
    """Returns the result and what the backward needs of the forward, which is not differentiable:
    where each window's maximum was, and what the input was normalised with."""

    @staticmethod
    def forward(
        ctx, input, weight, bias, mean, var, batches, training, momentum, eps, max_pool
    ):  # fmt: skip
        with below_autograd():
            output, codes, statistics = _run_bn_relu2d(
                input, weight, bias, mean, var, batches, training, momentum, eps, max_pool
            )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(codes, statistics)
        ctx.save_for_backward(input, weight, bias, codes, statistics)
        ctx.settings = training, max_pool
        return output, codes, statistics

    @staticmethod
    def backward(ctx, grad_output, *_):
        if grad_output is None:
            return (None,) * 10
        mask = ctx.needs_input_grad[:3]
        grads = _bn_relu2d_backward(grad_output, *ctx.saved_tensors, *ctx.settings, mask)
        return *masked(grads, mask), *(None,) * 7


def _run_conv_bn_relu2d(*args):
    buffers, training = args[5:8], args[12]
    return overwrite(buffers if training else (), _ops.conv_bn_relu2d.default, *args)


class ConvBnReLU2d(torch.autograd.Function):
    """Returns the result and, not differentiable, the convolution's output and the rest as
    :class:`BnReLU2d`."""

    @staticmethod
    def forward(
        ctx,
        input,
        weight,
        conv_bias,
        bn_weight,
        bn_bias,
        mean,
        var,
        batches,
        stride,
        padding,
        dilation,
        groups,
        training,
        momentum,
        eps,
        max_pool,
        contiguous,
        allow_tf32=False,
        deterministic=False,
        backend="auto",
    ):
        geometry = stride, padding, dilation, groups
        settings = allow_tf32, deterministic, backend
        with below_autograd():
            output, *saved = _run_conv_bn_relu2d(
                input,
                weight,
                conv_bias,
                bn_weight,
                bn_bias,
                mean,
                var,
                batches,
                *geometry,
                training,
                momentum,
                eps,
                max_pool,
                contiguous,
                *settings,
            )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*saved)
        ctx.again, ctx.before = again_of(input), norm_before(input)
        kept = input if ctx.again is None else None
        ctx.save_for_backward(kept, weight, bn_weight, bn_bias, *saved)
        ctx.conv_bias, ctx.eps = conv_bias, eps
        ctx.geometry = *geometry, training, max_pool
        ctx.settings = settings
        return output, *saved

    @staticmethod
    def saved_of(ctx):
        """What the backward reads."""
        input, *others = ctx.saved_tensors
        return (input if ctx.again is None else ctx.again.tensor()), *others

    @staticmethod
    def may_be_made_again(ctx):
        """Whether the result follows from :meth:`kept_of`: see :mod:`braze._ops.again`."""
        training, max_pool = ctx.geometry[-2:]
        return training and not max_pool

    @staticmethod
    def kept_of(ctx):
        """The convolution's output and the statistics."""
        *_, z, _, statistics = ctx.saved_tensors
        return z, statistics

    @staticmethod
    def made_again(ctx):
        """The result in torch's ops, to be differentiated by them."""
        input, weight, bn_weight, bn_bias, *_ = ConvBnReLU2d.saved_of(ctx)
        z = torch.nn.functional.conv2d(input, weight, ctx.conv_bias, *ctx.geometry[:4])
        normalised = torch.nn.functional.batch_norm(
            z, None, None, bn_weight, bn_bias, True, 0.0, ctx.eps
        )
        return normalised.relu()

    @staticmethod
    def has_norm(ctx):
        """Whether the result's gradient may be taken on to before the ReLU, by :meth:`norm_of`: see
        :mod:`braze._ops.norm_grads`."""
        return ConvBnReLU2d.may_be_made_again(ctx)

    @staticmethod
    def norm_of(ctx):
        """What was normalised, no mask, the statistics, the activation."""
        *_, z, codes, statistics = ctx.saved_tensors
        return z, codes, statistics, *_RELU

    @staticmethod
    def in_parts(ctx, grad_output, added, sums):
        """The backward without derivatives, batch norm's part and the convolution's apart."""
        input, weight, bn_weight, bn_bias, z, codes, statistics = ConvBnReLU2d.saved_of(ctx)
        of_conv, of_norm = ctx.needs_input_grad[:3], ctx.needs_input_grad[3:5]
        *geometry, training, max_pool = ctx.geometry
        asked = any(of_conv[:2]), *of_norm
        norm = z, bn_weight, bn_bias
        with below_autograd():
            if sums is None:
                args = *norm, codes, statistics, training, max_pool, asked
                grads = _ops.bn_relu2d_backward.default(grad_output, *args)
                dz, *dnorm, dbias = *masked(grads, asked), None
                if of_conv[2]:
                    dbias = conv_bias_gradient(dz, training)
            else:
                asked = *asked, of_conv[2]
                dz, *dnorm, dbias = norm_backward_of(sums, grad_output, *norm, statistics, asked)
            mask = *of_conv[:2], False
            args = dz, input, weight, *geometry, mask, *ctx.settings
            dx, dw, _ = masked(conv2d_backward_for(ctx.before, *args, added=added), mask)
        return dx, dw, dbias, *dnorm

    @staticmethod
    def backward(ctx, grad_output, *_, added=None):
        """added: another gradient of the input, or None."""
        if grad_output is None:
            return added, *(None,) * 19
        mask = ctx.needs_input_grad[:5]
        sums = sums_of(ctx, grad_output)
        *_, training, max_pool = ctx.geometry
        leaves_sums = (
            ctx.before is not None
            and mask[0]
            and training
            and not max_pool
            and ctx.before.is_wanted()
        )
        if (sums is not None or leaves_sums) and plain(grad_output, added):
            return *ConvBnReLU2d.in_parts(ctx, grad_output, added, sums), *(None,) * 15
        saved = ConvBnReLU2d.saved_of(ctx)
        args = grad_output, *saved, *ctx.geometry, mask, *ctx.settings
        if added is not None and not torch.is_grad_enabled() and plain(grad_output, added):
            with below_autograd():
                grads = masked(_ops.conv_bn_relu2d_backward.default(*args, added), mask)
        else:
            grads = masked(_conv_bn_relu2d_backward(ctx.conv_bias, *args), mask)
            if added is not None:
                grads = grads[0] + added, *grads[1:]
        return *grads, *(None,) * 15


ForkedConvBnReLU2d = forking(ConvBnReLU2d)


def unpool(grad_output, codes, height, width):
    """The gradient of a 2x2 max pool behind a ReLU, in torch's ops.

    Args:
        codes: by element of `grad_output`, which one of the window was the largest, in reading
            order, or 4 where ReLU stops the gradient.
        height, width: of what was pooled.
    """
    p, q = grad_output.shape[2:]
    windows = torch.stack([grad_output.where(codes == i, 0) for i in range(4)], -1)
    planes = windows.unflatten(-1, (2, 2)).transpose(3, 4).flatten(4).flatten(2, 3)
    return torch.nn.functional.pad(planes, (0, width - 2 * q, 0, height - 2 * p))


def unpack(codes):
    """The eight 4-bit codes of each word."""
    return (codes.unsqueeze(-1) >> torch.arange(0, 32, 4, device=codes.device)) & 7


def _through_relu(grad_output, input, codes, statistics, max_pool):
    """The gradient of batch norm's result, in torch's ops; `input` as the forward saved it."""
    if max_pool:
        n, c, p, q = grad_output.shape
        channels_last = is_channels_last(input)  # the order of the codes
        codes = unpack(codes[: (grad_output.numel() + 7) // 8]).flatten()[: grad_output.numel()]
        codes = codes.view((n, p, q, c) if channels_last else grad_output.shape)
        codes = codes.permute(0, 3, 1, 2) if channels_last else codes
        return unpool(grad_output, codes, *input.shape[2:])
    mean, _, scale, shift = statistics.view(4, -1, 1, 1).unbind()
    result = (input.detach() - mean) * scale + shift
    return grad_output.where(~(result <= 0), 0)  # NaN lets it through


def _bn_relu2d_gradients(
    grad_output, input, weight, bias, codes, statistics, training, max_pool, mask
):
    """The backward in torch's ops, to be differentiated by them."""
    g = _through_relu(grad_output, input, codes, statistics, max_pool)
    dx, *d = batch_norm_gradients(g, input, weight, *statistics[:2], training)
    if weight is None and bias is not None:
        d = [t.to(bias.dtype) for t in d]
    return dx, *d


def conv_bias_gradient(dz, training):
    """Of a convolution before batch norm, which cancels the bias in training."""
    return dz.new_zeros(dz.shape[1]) if training else dz.sum((0, 2, 3))


def _conv_bn_relu2d_gradients(
    conv_bias, grad_output, input, weight, bn_weight, bn_bias, z, codes, statistics, stride,
    padding, dilation, groups, training, max_pool, mask, *settings
):  # fmt: skip
    """The backward in torch's ops, to be differentiated by them."""
    geometry = stride, padding, dilation, groups
    g = _through_relu(grad_output, z, codes, statistics, max_pool)
    again = torch.nn.functional.conv2d(input, weight, conv_bias, *geometry)
    z = with_derivatives_of(z.detach(), again)
    dz, *d_norm = batch_norm_gradients(g, z, bn_weight, *statistics[:2], training)
    if bn_weight is None and bn_bias is not None:
        d_norm = [t.to(bn_bias.dtype) for t in d_norm]
    dx, dw, _ = conv2d_gradients(dz, input, weight, *geometry, (*mask[:2], False))
    return dx, dw, conv_bias_gradient(dz, training), *d_norm


def _run_conv_bn_relu2d_backward(conv_bias, *args):
    return _ops.conv_bn_relu2d_backward.default(*args)


_bn_relu2d = eager(BnReLU2d, _run_bn_relu2d, tensors=6)
_bn_relu2d_backward = eager_backward(
    BnReLU2d, _ops.bn_relu2d_backward.default, 6, formula=_bn_relu2d_gradients
)
_conv_bn_relu2d = eager(ConvBnReLU2d, _run_conv_bn_relu2d, tensors=8)
# The convolution's bias is for the second derivative only.
_conv_bn_relu2d_backward = eager_backward(
    ConvBnReLU2d, _run_conv_bn_relu2d_backward, 9, formula=_conv_bn_relu2d_gradients
)


def _code_words(input, output, training):
    """bn_pool_code_words() of csrc/launchers/conv_bn_relu2d.h."""
    words = (output.numel() + 7) // 8
    if not (training and input.is_cuda and is_channels_last(input) and input.shape[1] % 32 == 0):
        return words
    return words + output.numel() * output.element_size() // 4


def _fake(input, weight, bias, mean, var, batches, training, momentum, eps, max_pool):
    output = empty_like_input(input)
    if max_pool:
        n, c, h, w = input.shape
        output = empty_image(input, (n, c, h // 2, w // 2), is_channels_last(input))
    words = _code_words(input, output, training) if max_pool else 0
    codes = input.new_empty(words, dtype=torch.int32)
    dtype = statistics_dtype(input)
    return output, codes, input.new_empty((4, input.shape[1]), dtype=dtype)


def _fake_backward(
    grad_output, input, weight, bias, codes, statistics, training, max_pool, output_mask
):
    return (
        empty_like_input(input) if output_mask[0] else input.new_empty(0),
        *fake_parameter_gradients(weight, bias, statistics, output_mask[1:]),
    )


def _leaves_channels_last(weight):
    """As in csrc/ops/conv_bn_relu2d.cpp."""
    return weight.device.type == "cpu" and weight.shape[0] >= 16


def _fake_conv(
    input, weight, conv_bias, bn_weight, bn_bias, mean, var, batches, stride, padding, dilation,
    groups, training, momentum, eps, max_pool, contiguous, *settings
):  # fmt: skip
    z = fake_conv2d(input, weight, conv_bias, stride, padding, dilation, groups)
    output, codes, statistics = _fake(z, *(None,) * 5, training, None, None, max_pool)
    if max_pool and contiguous:
        output = output.contiguous()
    if max_pool and _leaves_channels_last(weight):
        z = z.contiguous(memory_format=torch.channels_last)
    return output, z, codes, statistics


def _fake_conv_backward(
    grad_output, input, weight, bn_weight, bn_bias, conv_output, codes, statistics, stride,
    padding, dilation, groups, training, max_pool, output_mask, *settings
):  # fmt: skip
    geometry = stride, padding, dilation, groups
    conv = fake_conv2d_backward(conv_output, input, weight, *geometry, output_mask[:3])
    return *conv, *fake_parameter_gradients(bn_weight, bn_bias, statistics, output_mask[3:])


def _backward_flops(
    grad_output, input, weight, bn_weight, bn_bias, z, codes, statistics, stride, padding,
    dilation, groups, training, max_pool, output_mask, *settings, out_shape
):  # fmt: skip
    return conv2d_backward_flops(z, input, weight, output_mask)


def _raw_conv_backward(*args):
    """The op of the same name with derivatives; those by `added`, its last argument, are plain."""
    *args, added = args if len(args) > _CONV_BACKWARD_ARGUMENTS else (*args, None)
    dx, *grads = _conv_bn_relu2d_backward(None, *args)
    return dx + added if added is not None and dx.numel() > 0 else dx, *grads


_CONV_BACKWARD_ARGUMENTS = 18  # without `added`


def _again(input, statistics):
    if torch.is_grad_enabled() and any(t.requires_grad for t in (input, statistics)):
        raise RuntimeError(
            "braze::bn_relu2d_again is not differentiable; call it under torch.no_grad()"
        )
    with below_autograd():
        return _ops.bn_relu2d_again.default(input, statistics)


register(
    "bn_relu2d_again",
    fake=lambda input, statistics: empty_like_input(input),
    autograd=_again,
)
register("bn_relu2d", fake=_fake, autograd=_bn_relu2d)
register("bn_relu2d_backward", fake=_fake_backward, autograd=_bn_relu2d_backward)
register(
    "conv_bn_relu2d",
    fake=_fake_conv,
    autograd=_conv_bn_relu2d,
    flops=lambda *args, out_shape: conv2d_flops(*args, out_shape=out_shape[1]),
)
register(
    "conv_bn_relu2d_backward",
    fake=_fake_conv_backward,
    autograd=_raw_conv_backward,
    flops=_backward_flops,
)


def forked_conv_bn_relu2d(*args):
    """The op's result, and an alias of its input for what else reads that; its arguments. Where
    autograd records."""
    result, alias = ForkedConvBnReLU2d.apply(*args)[:2]
    offer_norm(result)
    return result, alias


def conv_bn_relu2d(*args):
    """The op's result; its arguments."""
    if torch.compiler.is_compiling():
        return _ops.conv_bn_relu2d.default(*args)[0]
    result = _conv_bn_relu2d(*args)[0]
    offer_norm(result)
    return result
