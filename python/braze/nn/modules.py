"""The layers. Each takes its constructor and state from torch's layer of the same name."""

import typing

import torch
import torch.distributed as dist

from braze._ops._common import plain
from braze._ops.batch_norm import batch_norm_counting, kernels_count
from braze._ops.conv_bn_act import conv_bn_act as one_conv_bn_act
from braze._ops.fused import as_one_op
from braze._ops.sync_batch_norm import sync_batch_norm
from braze._programs import with_casts
from braze._stock import calls
from braze.nn import functional as F


class BatchNormState(typing.NamedTuple):
    """What a batch norm layer normalises with in its present mode."""

    mean: torch.Tensor | None
    var: torch.Tensor | None
    batches: torch.Tensor | None  # num_batches_tracked, where it is to be counted up
    training: bool  # with the batch's own statistics


def batch_norm_state(bn):
    """The buffers and the mode of a ``torch.nn.BatchNorm2d``, as its own forward chooses them."""
    update = bn.training and bn.track_running_stats
    keep = update or not bn.training
    mean, var = (bn.running_mean, bn.running_var) if keep else (None, None)
    return BatchNormState(
        mean,
        var,
        bn.num_batches_tracked if update else None,
        bn.training or (mean is None and var is None),
    )


def batch_norm_of(input, bn):
    """Batch norm on the parameters, buffers and settings of a layer, which has checked the input's
    dimensions."""
    statistics = batch_norm_state(bn)
    return batch_norm_counting(
        input,
        statistics.mean,
        statistics.var,
        bn.weight,
        bn.bias,
        statistics.training,
        bn.momentum,
        bn.eps,
        statistics.batches,
    )


@calls("adaptive_avg_pool2d")
class AdaptiveAvgPool2d(torch.nn.AdaptiveAvgPool2d):
    """``torch.nn.AdaptiveAvgPool2d`` on :func:`braze.nn.functional.adaptive_avg_pool2d`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.adaptive_avg_pool2d(input, self.output_size)


@calls("avg_pool2d")
class AvgPool2d(torch.nn.AvgPool2d):
    """``torch.nn.AvgPool2d`` on :func:`braze.nn.functional.avg_pool2d`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.avg_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )


@calls("batch_norm", also=("_check_input_dim",))
class BatchNorm2d(torch.nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` on :func:`braze.nn.functional.batch_norm`.

    The kernels count `num_batches_tracked` too, and with ``momentum=None`` read it on the device:
    neither costs a launch or a synchronisation.
    """

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        self._check_input_dim(input)
        return batch_norm_of(input, self)


@calls("batch_norm", also=("_check_input_dim",))
class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` on braze's kernels: in training, batch norm over the batches of
    all processes of `process_group`, whose numbers of images may differ.

    Each process makes its channels' moments, all exchange them (24 bytes a channel; backward 16),
    and each merges them in float64 by Chan's formula, so that results are those of one process with
    the whole batch. On CPUs too, where torch has none. Gradients of weight and bias are of the
    process's own part, as DistributedDataParallel expects them. Not differentiable twice.
    """

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        mean, var, batches, training = batch_norm_state(self)
        parameters = self.weight, self.bias
        group = self._group_of_several() if self.training else None
        if group is None:
            settings = training, self.momentum, self.eps, batches
            return batch_norm_counting(input, mean, var, *parameters, *settings)
        if not plain(input, *parameters, mean, var) or not kernels_count(batches):
            return super().forward(input)
        settings = self.momentum, self.eps, batches, group
        return sync_batch_norm(input, mean, var, *parameters, *settings)

    def _group_of_several(self):
        """The processes to exchange with, or None."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None


def batch_norm_act(input, bn, residual=None, activation="identity", settings=()):
    """:func:`braze.nn.functional.batch_norm_act` on the parameters, buffers and settings of a
    layer."""
    statistics = batch_norm_state(bn)
    return F.batch_norm_act(
        input,
        statistics.mean,
        statistics.var,
        bn.weight,
        bn.bias,
        statistics.training,
        bn.momentum,
        bn.eps,
        residual=residual,
        activation=activation,
        settings=settings,
        num_batches_tracked=statistics.batches,
    )


def conv_bn_act(input, conv, bn, residual=None, activation="identity", settings=(), forked=False):
    """:func:`braze._ops.conv_bn_act.conv_bn_act` on the parameters, buffers and settings of two
    layers."""
    statistics = batch_norm_state(bn)
    return one_conv_bn_act(
        input,
        conv.weight,
        conv.bias,
        residual,
        bn.weight,
        bn.bias,
        statistics.mean,
        statistics.var,
        statistics.batches,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        statistics.training,
        bn.momentum,
        bn.eps,
        activation,
        settings,
        forked,
    )


class BatchNormAct2d(BatchNorm2d):
    """Batch norm, an addition and an activation as one op:
    :func:`braze.nn.functional.batch_norm_act`. State is ``torch.nn.BatchNorm2d``'s.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in
            ``torch.nn.BatchNorm2d``.
        activation, settings: as in :func:`braze.nn.functional.batch_norm_act`.
    """

    def __init__(
        self,
        num_features,
        eps=1e-5,
        momentum=0.1,
        affine=True,
        track_running_stats=True,
        device=None,
        dtype=None,
        *,
        activation="relu",
        settings=(),
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.activation, self.settings = activation, settings

    def forward(self, input, residual=None):
        """activation(batch_norm(input) + residual); without a residual nothing is added."""
        self._check_input_dim(input)
        return batch_norm_act(input, self, residual, self.activation, self.settings)

    def extra_repr(self):
        shown = ", ".join(map(repr, (self.activation, *self.settings)))
        return f"{super().extra_repr()}, activation={shown}"


def conv2d_settings(input, conv):
    """The input of a convolution, padded where that pads it with anything but zeros, and what
    follows the bias in :func:`braze.nn.functional.conv2d`."""
    padding = conv.padding
    if conv.padding_mode != "zeros":
        sides = conv._reversed_padding_repeated_twice
        input = torch.nn.functional.pad(input, sides, mode=conv.padding_mode)
        padding = 0
    return input, (conv.stride, padding, conv.dilation, conv.groups)


@calls("conv2d", also=("_conv_forward",))
class Conv2d(torch.nn.Conv2d):
    """``torch.nn.Conv2d`` on :func:`braze.nn.functional.conv2d`."""

    def _conv_forward(self, input, weight, bias):
        if self._gives_way():
            return super()._conv_forward(input, weight, bias)
        input, settings = conv2d_settings(input, self)
        return with_casts(F.conv2d, (input, weight, bias), settings)


def _with_relu(cls, of_kind, relu, settings):
    """The layer of class `cls` made of a module of a kind, whose parameters and attributes
    `settings` it takes, and a ReLU."""
    module, _ = of_kind
    for given, expected in (of_kind, (relu, torch.nn.ReLU)):
        if not isinstance(given, expected):
            raise TypeError(f"expected a torch.nn.{expected.__name__}, not {type(given).__name__}")
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    for name in settings:
        setattr(layer, name, getattr(module, name))
    layer.weight, layer.bias = module.weight, module.bias
    layer.training = module.training
    return layer


class ConvReLU2d(Conv2d):
    """A convolution and ReLU as one op: :func:`braze.nn.functional.conv2d_relu`. Constructor and
    state are ``torch.nn.Conv2d``'s."""

    @classmethod
    def from_modules(cls, conv, relu):
        """The layer made of an existing convolution, torch's or braze's, whose parameters it
        shares, and the ReLU that follows it.

        Raises:
            TypeError: modules of other classes.
        """
        return _with_relu(cls, (conv, torch.nn.Conv2d), relu, _CONV2D_SETTINGS)

    def _conv_forward(self, input, weight, bias):
        input, settings = conv2d_settings(input, self)
        return with_casts(F.conv2d_relu, (input, weight, bias), settings)


#: What a ``torch.nn.Conv2d`` has beside its parameters.
_CONV2D_SETTINGS = (
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"),
    *("transposed", "output_padding", "groups", "padding_mode", "_reversed_padding_repeated_twice"),
)


def _block_arguments(conv, bn):
    """The parameters, buffers and settings of two layers, as the fused functions want them."""
    statistics = batch_norm_state(bn)
    tensors = conv.weight, conv.bias, statistics.mean, statistics.var, bn.weight, bn.bias
    return tensors, {
        "stride": conv.stride,
        "padding": conv.padding,
        "dilation": conv.dilation,
        "groups": conv.groups,
        "training": statistics.training,
        "momentum": bn.momentum,
        "eps": bn.eps,
        "num_batches_tracked": statistics.batches,
    }


def conv_bn_relu2d(input, conv, bn):
    """The fused block on the parameters, buffers and settings of two layers."""
    tensors, settings = _block_arguments(conv, bn)
    return F.conv_bn_relu2d(input, *tensors, **settings)


def conv_bn_relu_as_one(input, conv, bn, max_pool=False, contiguous=False, forked=False):
    """The fused block on two layers, and perhaps 2x2 max pooling, or None where no op takes them
    all.

    Args:
        contiguous: return the pooled result so, whatever the layout of the input.
        forked: without pooling: return an alias of the input beside the result, whose gradient is
            added where the convolution's is made.
    """
    tensors, settings = _block_arguments(conv, bn)
    return as_one_op(max_pool, contiguous, input, *tensors, **settings, forked=forked)


def conv_bn_relu_max_pool2d(input, conv, bn, pool):
    """The fused block on the parameters, buffers and settings of three layers."""
    tensors, settings = _block_arguments(conv, bn)
    return F.conv_bn_relu_max_pool2d(
        input,
        *tensors,
        **settings,
        kernel_size=pool.kernel_size,
        pool_stride=pool.stride,
        pool_padding=pool.padding,
        pool_dilation=pool.dilation,
        ceil_mode=pool.ceil_mode,
    )


class ConvBnReLU2d(torch.nn.Module):
    """Convolution, batch norm and ReLU as one op: :func:`braze.nn.functional.conv_bn_relu2d`.

    Holds the layers as `conv` and `bn`, whose parameters, buffers and settings it uses.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias: as in
            ``torch.nn.Conv2d``.
        eps, momentum, affine, track_running_stats: as in ``torch.nn.BatchNorm2d``.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        bias=True,
        *,
        eps=1e-5,
        momentum=0.1,
        affine=True,
        track_running_stats=True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.conv = Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, **place
        )
        self.bn = BatchNorm2d(out_channels, eps, momentum, affine, track_running_stats, **place)

    @classmethod
    def from_modules(cls, conv, bn):
        """The block made of existing layers, torch's or braze's, whose parameters it shares.

        Raises:
            ValueError: a convolution that pads with anything but zeros, or a batch norm over
                another number of channels.
        """
        if conv.padding_mode != "zeros":
            raise ValueError(f"expected padding_mode='zeros', but got {conv.padding_mode!r}")
        if bn.num_features != conv.out_channels:
            raise ValueError(
                f"expected batch norm over {conv.out_channels} channels, but got {bn.num_features}"
            )
        block = cls.__new__(cls)
        torch.nn.Module.__init__(block)
        block.conv, block.bn = conv, bn
        block.training = conv.training
        return block

    def forward(self, input):
        self.bn._check_input_dim(input)
        return conv_bn_relu2d(input, self.conv, self.bn)


class ConvBnReLUMaxPool2d(ConvBnReLU2d):
    """Convolution, batch norm, ReLU and max pooling as one op:
    :func:`braze.nn.functional.conv_bn_relu_max_pool2d`.

    Holds the layers as `conv`, `bn` and `pool`, whose parameters, buffers and settings it uses.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias: as in
            ``torch.nn.Conv2d``.
        pool_size, pool_stride, pool_padding, pool_dilation, ceil_mode: as in
            ``torch.nn.MaxPool2d``.
        norm: the keyword arguments of :class:`ConvBnReLU2d`: eps, momentum, affine,
            track_running_stats, device, dtype.
    """

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        bias=True,
        *,
        pool_size=2,
        pool_stride=None,
        pool_padding=0,
        pool_dilation=1,
        ceil_mode=False,
        **norm,
    ):
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, **norm
        )
        self.pool = MaxPool2d(
            pool_size, pool_stride, pool_padding, pool_dilation, ceil_mode=ceil_mode
        )

    @classmethod
    def from_modules(cls, conv, bn, pool):
        """The block made of existing layers, torch's or braze's, whose parameters it shares.

        Raises:
            ValueError: as :meth:`ConvBnReLU2d.from_modules`, or a pooling that returns indices.
        """
        if pool.return_indices:
            raise ValueError("expected a max pool with return_indices=False")
        block = super().from_modules(conv, bn)
        block.pool = pool
        return block

    def forward(self, input):
        self.bn._check_input_dim(input)
        return conv_bn_relu_max_pool2d(input, self.conv, self.bn, self.pool)


@calls("conv_transpose2d")
class ConvTranspose2d(torch.nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d`` on :func:`braze.nn.functional.conv_transpose2d`."""

    def forward(self, input, output_size=None):
        if self._gives_way():
            return super().forward(input, output_size)
        if self.padding_mode != "zeros":
            raise ValueError("Only `zeros` padding mode is supported for ConvTranspose2d")
        output_padding = self.output_padding
        if output_size is not None:
            geometry = self.stride, self.padding, self.kernel_size, 2, self.dilation
            output_padding = tuple(self._output_padding(input, output_size, *geometry))
        settings = self.stride, self.padding, output_padding, self.groups, self.dilation
        return with_casts(F.conv_transpose2d, (input, self.weight, self.bias), settings)


@calls("cross_entropy")
class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` on :func:`braze.nn.functional.cross_entropy`."""

    def forward(self, input, target):
        if self._gives_way():
            return super().forward(input, target)
        return F.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class Flatten(torch.nn.Flatten):
    """``torch.nn.Flatten``: a view, with nothing to compute."""


@calls("linear")
class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` on :func:`braze.nn.functional.linear`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return with_casts(F.linear, (input, self.weight, self.bias))


class LinearReLU(Linear):
    """A linear layer and ReLU as one op: :func:`braze.nn.functional.linear_relu`. Constructor and
    state are ``torch.nn.Linear``'s."""

    @classmethod
    def from_modules(cls, linear, relu):
        """The layer made of an existing linear layer, torch's or braze's, whose parameters it
        shares, and the ReLU that follows it.

        Raises:
            TypeError: modules of other classes.
        """
        return _with_relu(cls, (linear, torch.nn.Linear), relu, ("in_features", "out_features"))

    def forward(self, input):
        return with_casts(F.linear_relu, (input, self.weight, self.bias))


@calls("log_softmax")
class LogSoftmax(torch.nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` on :func:`braze.nn.functional.log_softmax`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.log_softmax(input, self.dim, _stacklevel=5)


@calls("max_pool2d")
class MaxPool2d(torch.nn.MaxPool2d):
    """``torch.nn.MaxPool2d`` on :func:`braze.nn.functional.max_pool2d`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.max_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
            self.return_indices,
        )


@calls("nll_loss")
class NLLLoss(torch.nn.NLLLoss):
    """``torch.nn.NLLLoss`` on :func:`braze.nn.functional.nll_loss`."""

    def forward(self, input, target):
        if self._gives_way():
            return super().forward(input, target)
        return F.nll_loss(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )


@calls("relu")
class ReLU(torch.nn.ReLU):
    """``torch.nn.ReLU`` on :func:`braze.nn.functional.relu`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.relu(input, inplace=self.inplace)


class Sequential(torch.nn.Sequential):
    """``torch.nn.Sequential``: a container, with nothing to compute."""


@calls("softmax")
class Softmax(torch.nn.Softmax):
    """``torch.nn.Softmax`` on :func:`braze.nn.functional.softmax`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.softmax(input, self.dim, _stacklevel=5)


@calls("interpolate")
class Upsample(torch.nn.Upsample):
    """``torch.nn.Upsample`` on :func:`braze.nn.functional.interpolate`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.interpolate(
            input,
            self.size,
            self.scale_factor,
            self.mode,
            self.align_corners,
            self.recompute_scale_factor,
        )


@calls("interpolate")
class UpsamplingBilinear2d(torch.nn.UpsamplingBilinear2d, Upsample):
    """``torch.nn.UpsamplingBilinear2d`` on :func:`braze.nn.functional.interpolate`."""


@calls("interpolate")
class UpsamplingNearest2d(torch.nn.UpsamplingNearest2d, Upsample):
    """``torch.nn.UpsamplingNearest2d`` on :func:`braze.nn.functional.interpolate`."""
