"""The layers. Each takes its constructor and state from torch's layer of the same name."""

import torch

from braze.nn import functional as F


class Conv2d(torch.nn.Conv2d):
    """``torch.nn.Conv2d`` on :func:`braze.nn.functional.conv2d`."""

    def _conv_forward(self, input, weight, bias):
        padding = self.padding
        if self.padding_mode != "zeros":
            sides = self._reversed_padding_repeated_twice
            input = torch.nn.functional.pad(input, sides, mode=self.padding_mode)
            padding = 0
        return F.conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups)


class Flatten(torch.nn.Flatten):
    """``torch.nn.Flatten``: a view, with nothing to compute."""


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` on :func:`braze.nn.functional.linear`."""

    def forward(self, input):
        return F.linear(input, self.weight, self.bias)


class ReLU(torch.nn.ReLU):
    """``torch.nn.ReLU`` on :func:`braze.nn.functional.relu`."""

    def forward(self, input):
        return F.relu(input, inplace=self.inplace)


class Sequential(torch.nn.Sequential):
    """``torch.nn.Sequential``: a container, with nothing to compute."""
