"""The layers. Each takes its constructor and state from torch's layer of the same name."""

import torch

from braze.nn import functional as F


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
