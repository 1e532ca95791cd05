"""Norms beside the batch norms of images. Each takes its constructor and state from torch's layer
of the same name."""

import torch

from braze._stock import calls
from braze.nn import functional as F
from braze.nn.modules import batch_norm_of


@calls("batch_norm", also=("_check_input_dim",))
class BatchNorm1d(torch.nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` on :func:`braze.nn.functional.batch_norm`, as BatchNorm2d."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        self._check_input_dim(input)
        return batch_norm_of(input, self)


@calls("batch_norm", also=("_check_input_dim",))
class BatchNorm3d(torch.nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` on :func:`braze.nn.functional.batch_norm`, as BatchNorm2d.
    channels_last_3d stays."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        self._check_input_dim(input)
        # Images, which the kernels know in both formats: to join two dimensions is free in either.
        depth_and_height = input.shape[2:4]
        return batch_norm_of(input.flatten(2, 3), self).unflatten(2, depth_and_height)


@calls("group_norm")
class GroupNorm(torch.nn.GroupNorm):
    """``torch.nn.GroupNorm`` on :func:`braze.nn.functional.group_norm`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


@calls("instance_norm", also=("_check_input_dim", "_apply_instance_norm"))
class InstanceNorm2d(torch.nn.InstanceNorm2d):
    """``torch.nn.InstanceNorm2d`` on :func:`braze.nn.functional.instance_norm`."""

    def _apply_instance_norm(self, input):
        if self._gives_way():
            return super()._apply_instance_norm(input)
        return F.instance_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            self.momentum if self.momentum is not None else 0.0,
            self.eps,
        )


@calls("layer_norm")
class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` on :func:`braze.nn.functional.layer_norm`."""

    def forward(self, input):
        if self._gives_way():
            return super().forward(input)
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
