"""The layers. Each takes its constructor and state from torch's layer of the same name."""

import torch

from braze.nn import functional as F


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


class LogSoftmax(torch.nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` on :func:`braze.nn.functional.log_softmax`."""

    def forward(self, input):
        return F.log_softmax(input, self.dim, _stacklevel=5)


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


class Softmax(torch.nn.Softmax):
    """``torch.nn.Softmax`` on :func:`braze.nn.functional.softmax`."""

    def forward(self, input):
        return F.softmax(input, self.dim, _stacklevel=5)
