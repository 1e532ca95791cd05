"""The layers. Each takes its constructor and state from torch's layer of the same name."""

import torch

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


class ReLU(torch.nn.ReLU):
    """``torch.nn.ReLU`` on :func:`braze.nn.functional.relu`."""

    def forward(self, input):
        return F.relu(input, inplace=self.inplace)
