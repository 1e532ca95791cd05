"""Drop-in functions: the names, argument order and defaults of ``torch.nn.functional``.

What braze has no kernels for goes to torch's function of the name (the fused ones become what they
are made of), which computes it or raises its own error: integers, complex numbers, sparse tensors,
subclasses of tensors, and everything within ``torch.func``'s transforms and forward-mode
differentiation.
"""

from braze._ops.activations import (
    celu,
    elu,
    gelu,
    hardsigmoid,
    hardswish,
    hardtanh,
    leaky_relu,
    mish,
    relu6,
    sigmoid,
    silu,
    tanh,
)
from braze._ops.adaptive_avg_pool2d import adaptive_avg_pool2d
from braze._ops.batch_norm import batch_norm
from braze._ops.batch_norm_act import batch_norm_act
from braze._ops.bias_activation import bias_activation
from braze._ops.cat import cat
from braze._ops.channel_scale import channel_scale, squeeze_excite
from braze._ops.channel_shuffle import channel_shuffle
from braze._ops.conv2d import conv2d
from braze._ops.conv2d_relu import conv2d_relu
from braze._ops.conv_transpose2d import conv_transpose2d
from braze._ops.cross_entropy import cross_entropy
from braze._ops.fused import conv_bn_relu2d, conv_bn_relu_max_pool2d
from braze._ops.global_response_norm import global_response_norm
from braze._ops.group_norm import group_norm, instance_norm
from braze._ops.group_norm_act import group_norm_act
from braze._ops.layer_norm import layer_norm
from braze._ops.linear_fused import linear_add, linear_relu_linear
from braze._ops.matmul import linear, linear_relu
from braze._ops.nll_loss import nll_loss
from braze._ops.pool import avg_pool2d, max_pool2d
from braze._ops.relu import relu
from braze._ops.relu_max_pool2d import relu_max_pool2d
from braze._ops.scale_add import scale_add
from braze._ops.softmax import log_softmax, softmax
from braze._ops.upsample2d import interpolate
from braze._ops.weight_standardization import weight_standardization

__all__ = [
    "adaptive_avg_pool2d",
    "avg_pool2d",
    "batch_norm",
    "batch_norm_act",
    "bias_activation",
    "cat",
    "celu",
    "channel_scale",
    "channel_shuffle",
    "conv2d",
    "conv2d_relu",
    "conv_bn_relu2d",
    "conv_bn_relu_max_pool2d",
    "conv_transpose2d",
    "cross_entropy",
    "elu",
    "gelu",
    "global_response_norm",
    "group_norm",
    "group_norm_act",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "instance_norm",
    "interpolate",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_add",
    "linear_relu",
    "linear_relu_linear",
    "log_softmax",
    "max_pool2d",
    "mish",
    "nll_loss",
    "relu",
    "relu6",
    "relu_max_pool2d",
    "scale_add",
    "sigmoid",
    "silu",
    "softmax",
    "squeeze_excite",
    "tanh",
    "weight_standardization",
]
