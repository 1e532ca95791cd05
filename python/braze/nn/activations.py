"""The activations beside ReLU. Each takes its constructor from torch's layer of the same name."""

import torch

from braze._stock import calls
from braze.nn import functional as F


@calls("celu")
class CELU(torch.nn.CELU):
    """``torch.nn.CELU`` on :func:`braze.nn.functional.celu`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.celu(input, self.alpha, self.inplace)


@calls("elu")
class ELU(torch.nn.ELU):
    """``torch.nn.ELU`` on :func:`braze.nn.functional.elu`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.elu(input, self.alpha, self.inplace)


@calls("gelu")
class GELU(torch.nn.GELU):
    """``torch.nn.GELU`` on :func:`braze.nn.functional.gelu`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.gelu(input, approximate=self.approximate)


@calls("hardsigmoid")
class Hardsigmoid(torch.nn.Hardsigmoid):
    """``torch.nn.Hardsigmoid`` on :func:`braze.nn.functional.hardsigmoid`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.hardsigmoid(input, self.inplace)


@calls("hardswish")
class Hardswish(torch.nn.Hardswish):
    """``torch.nn.Hardswish`` on :func:`braze.nn.functional.hardswish`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.hardswish(input, self.inplace)


@calls("hardtanh")
class Hardtanh(torch.nn.Hardtanh):
    """``torch.nn.Hardtanh`` on :func:`braze.nn.functional.hardtanh`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.hardtanh(input, self.min_val, self.max_val, self.inplace)


@calls("leaky_relu")
class LeakyReLU(torch.nn.LeakyReLU):
    """``torch.nn.LeakyReLU`` on :func:`braze.nn.functional.leaky_relu`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.leaky_relu(input, self.negative_slope, self.inplace)


@calls("mish")
class Mish(torch.nn.Mish):
    """``torch.nn.Mish`` on :func:`braze.nn.functional.mish`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.mish(input, self.inplace)


@calls("hardtanh")
class ReLU6(torch.nn.ReLU6):
    """``torch.nn.ReLU6`` on :func:`braze.nn.functional.relu6`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.hardtanh(input, self.min_val, self.max_val, self.inplace)


@calls("silu")
class SiLU(torch.nn.SiLU):
    """``torch.nn.SiLU`` on :func:`braze.nn.functional.silu`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.silu(input, self.inplace)


@calls("sigmoid")
class Sigmoid(torch.nn.Sigmoid):
    """``torch.nn.Sigmoid`` on :func:`braze.nn.functional.sigmoid`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.sigmoid(input)


@calls("tanh")
class Tanh(torch.nn.Tanh):
    """``torch.nn.Tanh`` on :func:`braze.nn.functional.tanh`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.tanh(input)
