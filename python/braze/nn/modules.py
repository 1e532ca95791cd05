"""The layers. Each takes its constructor and state from torch's layer of the same name."""

import torch

from braze._ops.batch_norm import batch_norm_counting
from braze.nn import functional as F


class AvgPool2d(torch.nn.AvgPool2d):
    """``torch.nn.AvgPool2d`` on :func:`braze.nn.functional.avg_pool2d`."""

    def forward(self, input):
        return F.avg_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )


class BatchNorm2d(torch.nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` on :func:`braze.nn.functional.batch_norm`.

    The kernels count `num_batches_tracked` too, and with ``momentum=None`` read it on the device:
    neither costs a launch or a synchronisation.
    """

    def forward(self, input):
        self._check_input_dim(input)
        update = self.training and self.track_running_stats
        keep = update or not self.training
        running_mean = self.running_mean if keep else None
        running_var = self.running_var if keep else None
        return batch_norm_counting(
            input,
            running_mean,
            running_var,
            self.weight,
            self.bias,
            self.training or (running_mean is None and running_var is None),
            self.momentum,
            self.eps,
            self.num_batches_tracked if update else None,
        )


class Conv2d(torch.nn.Conv2d):
    """``torch.nn.Conv2d`` on :func:`braze.nn.functional.conv2d`."""

    def _conv_forward(self, input, weight, bias):
        padding = self.padding
        if self.padding_mode != "zeros":
            sides = self._reversed_padding_repeated_twice
            input = torch.nn.functional.pad(input, sides, mode=self.padding_mode)
            padding = 0
        return F.conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` on :func:`braze.nn.functional.cross_entropy`."""

    def forward(self, input, target):
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


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` on :func:`braze.nn.functional.linear`."""

    def forward(self, input):
        return F.linear(input, self.weight, self.bias)


class LogSoftmax(torch.nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` on :func:`braze.nn.functional.log_softmax`."""

    def forward(self, input):
        return F.log_softmax(input, self.dim, _stacklevel=5)


class MaxPool2d(torch.nn.MaxPool2d):
    """``torch.nn.MaxPool2d`` on :func:`braze.nn.functional.max_pool2d`."""

    def forward(self, input):
        return F.max_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
            self.return_indices,
        )


class NLLLoss(torch.nn.NLLLoss):
    """``torch.nn.NLLLoss`` on :func:`braze.nn.functional.nll_loss`."""

    def forward(self, input, target):
        return F.nll_loss(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )


class ReLU(torch.nn.ReLU):
    """``torch.nn.ReLU`` on :func:`braze.nn.functional.relu`."""

    def forward(self, input):
        return F.relu(input, inplace=self.inplace)


class Sequential(torch.nn.Sequential):
    """``torch.nn.Sequential``: a container, with nothing to compute."""


class Softmax(torch.nn.Softmax):
    """``torch.nn.Softmax`` on :func:`braze.nn.functional.softmax`."""

    def forward(self, input):
        return F.softmax(input, self.dim, _stacklevel=5)
