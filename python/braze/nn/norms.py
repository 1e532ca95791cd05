"""Norms beside the batch norms of images. Each takes its constructor and state from torch's layer
of the same name."""

import torch

from braze._stock import calls
from braze.nn import functional as F


@calls("layer_norm")
class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` on :func:`braze.nn.functional.layer_norm`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
