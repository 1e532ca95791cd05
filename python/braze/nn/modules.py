"""The layers. Each takes its constructor and state from torch's layer of the same name."""

import torch

from braze.nn import functional as F


class LogSoftmax(torch.nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` on :func:`braze.nn.functional.log_softmax`."""

    def forward(self, input):
        return F.log_softmax(input, self.dim, _stacklevel=5)


class ReLU(torch.nn.ReLU):
    """``torch.nn.ReLU`` on :func:`braze.nn.functional.relu`."""

    def forward(self, input):
        return F.relu(input, inplace=self.inplace)


class Softmax(torch.nn.Softmax):
    """``torch.nn.Softmax`` on :func:`braze.nn.functional.softmax`."""

    def forward(self, input):
        return F.softmax(input, self.dim, _stacklevel=5)
