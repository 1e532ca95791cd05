"""The layers. Each takes its constructor and state from torch's layer of the same name."""

import torch

from braze.nn import functional as F


class ReLU(torch.nn.ReLU):
    """``torch.nn.ReLU`` on :func:`braze.nn.functional.relu`."""

    def forward(self, input):
        return F.relu(input, inplace=self.inplace)
