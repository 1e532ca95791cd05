"""Drop-in layers: subclasses of torch's own, so that state dicts, ``isinstance``, initialisation,
hooks, ``deepcopy`` and pickling work unchanged; only ``forward`` differs."""

from braze.nn import functional
from braze.nn.modules import (
    AvgPool2d,
    BatchNorm2d,
    BatchNormAct2d,
    Conv2d,
    ConvBnReLU2d,
    ConvBnReLUMaxPool2d,
    CrossEntropyLoss,
    Flatten,
    Linear,
    LinearReLU,
    LogSoftmax,
    MaxPool2d,
    NLLLoss,
    ReLU,
    Sequential,
    Softmax,
)

__all__ = [
    "AvgPool2d",
    "BatchNorm2d",
    "BatchNormAct2d",
    "Conv2d",
    "ConvBnReLU2d",
    "ConvBnReLUMaxPool2d",
    "CrossEntropyLoss",
    "Flatten",
    "Linear",
    "LinearReLU",
    "LogSoftmax",
    "MaxPool2d",
    "NLLLoss",
    "ReLU",
    "Sequential",
    "Softmax",
    "functional",
]
