"""The three passes of a convolution as functions of no arguments, by braze and by torch."""

import torch

PASSES = ("fprop", "dgrad", "wgrad")
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


def own_pass(geometry, groups, pass_name, x, w, dy, tf32, backend="auto"):
    """By braze. The backend is an argument: entering ``with braze.backend`` takes as long as a
    small convolution on a CPU whose caches are cold.

    Args:
        geometry: stride, padding and dilation, two values each.
        x, w, dy: input, filters, and the gradient of the result, which fprop has no use for.
    """
    settings = tf32, False, backend

    def call():
        if pass_name == "fprop":
            return torch.ops.braze.conv2d(x, w, None, *geometry, groups, *settings)
        mask = [pass_name == "dgrad", pass_name == "wgrad", False]
        grads = torch.ops.braze.conv2d_backward(dy, x, w, *geometry, groups, mask, *settings)
        return grads[mask.index(True)]

    return call


def torch_pass(geometry, groups, pass_name, x, w, dy):
    """The same by torch."""
    if pass_name == "fprop":
        return lambda: torch.conv2d(x, w, None, *geometry, groups)
    mask = [pass_name == "dgrad", pass_name == "wgrad", False]
    return lambda: torch.ops.aten.convolution_backward(
        dy, x, w, None, *geometry, False, [0, 0], groups, mask
    )[mask.index(True)]
