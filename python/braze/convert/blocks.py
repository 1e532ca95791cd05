"""What runs of layers become: fused ops, where shapes, settings and memory formats are such that an
op computes the same, else one by one. Which run is which: runs.py. Links are as there.
"""

import operator

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from braze._ops._common import TENSORS, autocast_dtype, cast_to, is_channels_last, plain
from braze._ops.activation import fits
from braze._ops.again import offer_again
from braze._ops.conv2d import memory_format
from braze._ops.fused import is_2x2
from braze._ops.layer_norm import layer_norm_for_product
from braze._ops.relu_max_pool2d import pools_behind_relu, takes_bias
from braze._ops.scale_add import scale_add_takes, scaled_dim
from braze._ops.transpose import transpose_copy
from braze._step_scope import takes_ops
from braze.convert.image_norms import group_norm_alone, group_norm_as_one, layer_norm_as_one
from braze.convert.kinds import ACTIVATIONS, Pooling, kind_of
from braze.convert.link_calls import call, one_by_one
from braze.convert.response_norms import response_normed_for_product
from braze.convert.source import NUMBERS
from braze.nn import functional as F
from braze.nn.modules import batch_norm_act, conv2d_settings, conv_bn_act, conv_bn_relu_as_one

_FLAT = (1,), {}  # the arguments of a Flatten that keeps the first dimension

#: The kinds of the links of runs that others begin with, outermost first.
CONV_POOLED = "MaxPool2d", "ReLU", "Conv2d"
CONV = "ReLU", "BatchNorm2d", "Conv2d"
POOLED = "MaxPool2d", *CONV

#: On which devices the gradients of a block's input, by its first convolution and by the shortcut,
#: are one sum on the way out of the former's kernel.
FORKED_ON = ("cuda",)


def forked_block(links, input):
    """The block of convolution, batch norm and ReLU, and an alias of the input for the addition
    behind it, within a TrainStep; or None."""
    conv, norm = links[-1], _norm(links[-2])
    if (
        not takes_ops()
        or type(input) not in TENSORS
        or input.device.type not in FORKED_ON
        or not (torch.is_grad_enabled() and input.requires_grad)
        or autocast_dtype(input) not in (None, input.dtype)
        or isinstance(conv.padding, str)
        or not conv_fits(conv, norm)
    ):
        return None
    return conv_bn_relu_as_one(input, conv, norm, forked=True)


#: On which devices results within a bottleneck are made again in the backward pass, of which
#: dtypes, from how many bytes on. In float32 the pass takes twice as long.
AGAIN_ON, AGAIN_BYTES = ("cuda",), 8 << 20
AGAIN_DTYPES = (torch.bfloat16, torch.float16)


def perhaps_again(result, added):
    """Within a TrainStep, `result` of a block is made again in the backward pass where that costs
    little beside the rest: where what is added behind it has twice its elements and more, as in
    bottlenecks."""
    if (
        takes_ops()
        and torch.is_grad_enabled()
        and type(result) in TENSORS
        and result.device.type in AGAIN_ON
        and result.grad_fn is not None
        and result.dtype in AGAIN_DTYPES
        and result.numel() * result.element_size() >= AGAIN_BYTES
        and type(added) in TENSORS
        and added.numel() >= 2 * result.numel()
    ):
        offer_again(result)


#: On which devices convolutions leave batch norm's statistics, for what follows that.
CONV_BN_ACT_ON = ("cuda",)


def conv_and_norm(links, input, *added):
    """Convolution, batch norm, an addition and an activation where there are any, or None where no
    op takes them all."""
    *rest, norm, conv = links
    norm = _norm(norm)
    if (
        type(input) not in TENSORS
        or input.device.type not in CONV_BN_ACT_ON
        or not conv_fits(conv, norm)
    ):
        return None
    activation, settings = activation_of(rest[0]) if rest else ("identity", ())
    if settings and not fits(activation, settings):
        return None
    # A shortcut, perhaps, beside which others read the input.
    forked = len(links) == 2 and takes_ops()
    return conv_bn_act(
        input, conv, norm, *added, activation=activation, settings=settings, forked=forked
    )


def conv_fits(conv, bn):
    """Whether a convolution and a batch norm have settings that the fused blocks have too."""
    return conv.padding_mode == "zeros" and bn.num_features == conv.out_channels


def conv_bn_relu(links, input, then=None):
    """Convolution, batch norm, ReLU and perhaps max pooling as one op.

    Args:
        then: the linear layer that the pooled result is flattened for, and nothing else, or None.
    """
    conv, bn = links[-1], _norm(links[-2])
    if not conv_fits(conv, bn):
        return one_by_one(links, input)
    pool = output = None
    if len(links) > len(CONV):
        pool = _pooling(links[0])
        if is_2x2(pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode):
            contiguous = then is not None and not _weight_is_smaller(input, then)
            output = conv_bn_relu_as_one(input, conv, bn, max_pool=True, contiguous=contiguous)
            if output is not None:
                return output.contiguous() if contiguous else output
    output = conv_bn_relu_as_one(input, conv, bn)
    if output is None:
        return one_by_one(links, input)
    return output if pool is None else call(links[0], output)


def _pooling(link):
    """What has the settings of a max pool."""
    return link if type(link) is not tuple else Pooling(*link[1], **link[2])


def norm_act(links, input, *added):
    """Batch norm, an addition where there is one, and an activation where there is one."""
    if (
        type(input) not in TENSORS
        or input.dim() != 4
        or not all(_goes_with(residual, input) for residual in added)
    ):
        return one_by_one(links, input, *added)
    activation, settings = activation_of(links[0])
    if settings and not fits(activation, settings):
        return one_by_one(links, input, *added)
    norm = _norm(links[-1])
    return batch_norm_act(input, norm, *added, activation=activation, settings=settings)


def _norm(link):
    """The module whose batch norm a link is."""
    return link[1][0] if type(link) is tuple else link


def norm_alone(links, input):
    return call(links[0], input)


def activation_of(link):
    """The name and the settings of an activation; of an addition, the identity's."""
    kind = kind_of(link)
    if kind == "Add":
        return "identity", ()
    name, settings = ACTIVATIONS[kind]
    if type(link) is not tuple:
        return name, tuple([getattr(link, setting) for setting in settings])
    _, args, kwargs = link
    given = {**settings, **dict(zip(settings, args, strict=False)), **kwargs}
    return name, tuple([given[setting] for setting in settings])


def _goes_with(residual, input):
    """Whether an addition to a tensor like `input`, in place or not, gives one just like it."""
    return (
        type(residual) in TENSORS
        and residual.dtype == input.dtype
        and residual.device == input.device
        and residual.dim() == input.dim()
        and is_channels_last(residual) == is_channels_last(input)
        and all(
            a is b or statically_known_true(a == b)
            for a, b in zip(residual.shape, input.shape, strict=True)
        )
    )


def conv_relu(links, input):
    if type(input) not in TENSORS:
        return one_by_one(links, input)
    conv = links[-1]
    input, settings = conv2d_settings(input, conv)
    return F.conv2d_relu(input, conv.weight, conv.bias, *settings)


#: On which devices max pooling takes the bias and the ReLU of the convolution before it, whose
#: backward then is one pass, if tensors are channels_last.
RELU_POOL_ON = ("cuda",)
#: Elements that pooling leaves, at most, in another order than they are in.
_MOST_TURNED = 1 << 20


def conv_relu_pool(links, input, then=None):
    """Convolution, ReLU and max pooling.

    Args:
        then: as in :func:`conv_bn_relu`.
    """
    conv, pool = links[-1], _pooling(links[0])
    if (
        type(input) not in TENSORS
        or input.device.type not in RELU_POOL_ON
        or pool.return_indices
        or not pools_behind_relu(
            pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode
        )
        or not _leaves_channels_last(input, conv)
    ):
        return call(links[0], conv_relu(links[1:], input))
    input, settings = conv2d_settings(input, conv)
    output = F.conv2d(input, conv.weight, None, *settings)
    contiguous = (
        then is not None
        and not _weight_is_smaller(input, then)
        and statically_known_true(output.numel() <= 4 * _MOST_TURNED)
    )
    windows = pool.kernel_size, pool.stride, pool.padding, pool.ceil_mode
    return F.relu_max_pool2d(output, conv.bias, *windows, contiguous)


def _leaves_channels_last(input, conv):
    """Whether a convolution's result is channels_last, and its bias may be added by another op."""
    weight, bias = conv.weight, conv.bias
    if weight is None or not plain(input, weight, bias) or input.dim() != 4 or weight.dim() != 4:
        return False
    dtype = autocast_dtype(input)
    return memory_format(input, weight) == torch.channels_last and (
        bias is None
        or (
            bias.shape == weight.shape[:1]
            and bias.device == input.device
            and (bias.dtype == input.dtype if dtype is None else takes_bias(dtype, bias))
        )
    )


def linear_relu(links, input):
    if type(input) not in TENSORS:
        return one_by_one(links, input)
    return F.linear_relu(input, links[-1].weight, links[-1].bias)


def layer_norm_product(links, input):
    """Layer norm, and a linear layer, or two with an activation and perhaps global response norm
    between them."""
    if type(input) not in TENSORS:
        return one_by_one(links, input)
    *rest, norm = links
    if type(norm) is tuple:
        weight, bias, shape, eps = norm[1]
    else:
        weight, bias, shape, eps = norm.weight, norm.bias, norm.normalized_shape, norm.eps
    output = layer_norm_for_product(input, shape, weight, bias, eps)
    if len(rest) > 1:
        output, rest = _linear_activation(rest[-2:], output), rest[:-2]
    return _last_product(rest, output)


def image_norm_product(links, input):
    """A norm of images, and convolutions with an activation and perhaps global response norm
    between them."""
    *rest, norm = links
    output = norm_for_products((norm,), input)
    if output is None:
        return one_by_one(links, input)
    if len(rest) < 2:
        return call(rest[0], output)
    return _last_product(rest[:-2], _conv_act(rest[-2:], output))


def _last_product(links, input):
    return response_norm_product(links, input) if len(links) > 1 else call(links[0], input)


def group_norm_product(links, input):
    """Group norm, perhaps an activation, and a convolution."""
    output = norm_for_products(links[1:], input)
    return one_by_one(links, input) if output is None else call(links[0], output)


def norm_for_products(links, input):
    """A norm of images, and perhaps an activation, whose result convolutions read and nothing else;
    None where torch's functions have to run."""
    *activations, norm = links
    if kind_of(norm) == "LayerNorm2d":
        output = layer_norm_as_one(norm, input)
        return output if output is None else one_by_one(activations, output)
    name, settings = activation_of(activations[0]) if activations else ("identity", ())
    return group_norm_as_one(norm, name, settings, input)


def group_norm_act(links, input):
    """Group norm and an activation."""
    output = group_norm_alone(links[1], *activation_of(links[0]), input)
    return one_by_one(links, input) if output is None else output


def response_norm_product(links, input):
    """Global response norm, and a linear layer or a convolution."""
    product, norm = links
    return call(product, response_normed_for_product(norm, input))


#: On which devices an activation takes the bias of the linear layer before it, so that its backward
#: makes the bias' gradient.
ACTIVATION_WITH_BIAS_ON = ("cuda",)


def _linear_activation(links, input):
    activation, linear = links
    name, settings = activation_of(activation)
    if (
        name == "relu"
        or not _is_whole_bias(linear.bias, linear.weight)
        or input.device.type not in ACTIVATION_WITH_BIAS_ON
        or (settings and not fits(name, settings))
    ):
        return one_by_one(links, input)
    return F.bias_activation(F.linear(input, linear.weight), linear.bias, name, settings)


def _conv_act(links, input):
    """Convolution and an activation. Of a smooth one, the pass backward makes the bias' gradient,
    if the images are channels_last."""
    activation, conv = links
    name, settings = activation_of(activation)
    if name == "relu":
        return conv_relu(links, input)
    if (
        type(input) not in TENSORS
        or input.device.type not in ACTIVATION_WITH_BIAS_ON
        or not torch.is_grad_enabled()
        or conv.bias is None
        or (settings and not fits(name, settings))
        or not _leaves_channels_last(input, conv)
    ):
        return one_by_one(links, input)
    input, how = conv2d_settings(input, conv)
    rows = F.conv2d(input, conv.weight, None, *how).permute(0, 2, 3, 1)
    return F.bias_activation(rows, conv.bias, name, settings).permute(0, 3, 1, 2)


def _is_whole_bias(bias, weight):
    """Whether a linear layer has a bias that only torch's own rules of addition are needed for."""
    return bias is not None and bias.shape == weight.shape[:1] and bias.dtype == weight.dtype


#: On which devices a layer scale and the addition behind it are one op.
SCALE_ADD_ON = ("cuda",)


def scale_add(links, input, added):
    """A product with a parameter or a number, and an addition."""
    addition, (_, (scale,), _) = links
    scaled = _scale_added_by_number if type(scale) in NUMBERS else _scale_added
    output = scaled(addition, scale, input, added)
    return one_by_one(links, input, added) if output is None else output


def _scale_added_by_number(addition, number, input, added):
    """By torch's addition, which takes a factor, or None where that is not the same."""
    takes = (
        type(input) in TENSORS
        and type(added) in TENSORS
        and plain(input, added)
        and input.device.type in SCALE_ADD_ON
        and input.device == added.device
        and input.is_floating_point()
        and added.dtype in (input.dtype, torch.float32)
        and input.shape == added.shape
        and input.stride() == added.stride()
        and not (addition[0] is operator.iadd and added.dtype != input.dtype)
    )
    return torch.add(added, input, alpha=number) if takes else None


def scale_permute_add(links, input, added):
    """A product with a parameter, the dimensions in another order, and an addition."""
    addition, permute, (_, (scale,), _) = links
    output = None
    if type(input) in TENSORS and type(scale) in TENSORS and scale.dim() <= input.dim():
        scale = scale[(None,) * (input.dim() - scale.dim())]
        output = _scale_added(addition, call(permute, scale), call(permute, input), added)
    return one_by_one(links, input, added) if output is None else output


def _scale_added(addition, scale, input, added):
    """Both as one, or None where torch's functions have to run."""
    takes = (
        scale is not None
        and scale_add_takes(input, scale, added)
        and input.device.type in SCALE_ADD_ON
        and _keep_format(input, scale, added)
        # Added in place, a float32 residual would be rounded.
        and not (addition[0] is operator.iadd and added.dtype not in (input.dtype, scale.dtype))
    )
    return F.scale_add(input, scale, added) if takes else None


def _keep_format(input, scale, added):
    """Whether the op's result has the memory format of torch's, and channels are innermost, for
    which it is fast."""
    if is_channels_last(input):
        return is_channels_last(added) and scaled_dim(input, scale) == 1
    innermost = scaled_dim(input, scale) == input.dim() - 1
    return innermost and input.is_contiguous() and added.is_contiguous()


def _weight_is_smaller(input, linear):
    """Whether a linear layer's weight is smaller than the flat input, both of as many columns."""
    # False of a dynamic batch that may be either: to compare it would restrict it.
    return statically_known_true(input.shape[0] > linear.out_features)


def flat_linear(links, input):
    """Flatten from dimension 1 on, a linear layer and perhaps ReLU.

    Flattening a channels_last tensor copies it, which is a transposition. Where the weight is the
    smaller of the two, the weight is brought into the tensor's order instead.
    """
    flatten, linear = links[-1], links[-2]
    flat = flatten[1:] if type(flatten) is tuple else ((flatten.start_dim,), {})
    end_dim = -1 if type(flatten) is tuple else flatten.end_dim
    if (
        type(input) not in TENSORS
        or input.is_contiguous()
        or (flat, end_dim) != (_FLAT, -1)
        or not is_channels_last(input)
        or input.shape[1] * input.shape[2] * input.shape[3] != linear.in_features
    ):
        output = call(flatten, input)
        return linear(output) if len(links) < 3 else linear_relu(links[:2], output)
    weight, dtype = linear.weight, autocast_dtype(input)
    if dtype is not None:
        (weight,) = cast_to(dtype, weight)
    output = input.permute(0, 2, 3, 1).flatten(1, 2)  # pixels of channels
    if _weight_is_smaller(input, linear):
        weight = transpose_copy(weight.unflatten(1, (input.shape[1], -1))).flatten(1)
    else:
        output = transpose_copy(output)
    function = F.linear if len(links) < 3 else F.linear_relu
    return function(output.flatten(1), weight, linear.bias)


def pooled_flat_linear(links, input):
    first = len(links) - len(POOLED)
    return flat_linear(links[:first], conv_bn_relu(links[first:], input, then=links[first - 2]))


def conv_relu_pool_flat_linear(links, input):
    first = len(links) - len(CONV_POOLED)
    pooled = conv_relu_pool(links[first:], input, then=links[first - 2])
    return flat_linear(links[:first], pooled)
