"""Convolutions by the name of a kernel, pass by pass, against torch's and the tolerance rule."""

import torch

from braze.testing import WAYS, mover
from common import assert_by_rule

PASSES = ["fprop", "dgrad", "wgrad"]
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
# A case: n, c, h, w, k, (r, s), stride, padding, dilation, groups; its tensors: x, w, b, dy.


def _pair(value):
    return [value, value] if isinstance(value, int) else list(value)


def geometry(case):
    return list(case[6]), list(case[7]), _pair(case[8])


def run(which, case, x, w, b, dy, name, tf32=False):
    settings = tf32, False, name
    if which == "fprop":
        return torch.ops.braze.conv2d(x, w, b, *geometry(case), case[9], *settings)
    mask = [which == "dgrad", which == "wgrad", False]
    grads = torch.ops.braze.conv2d_backward(dy, x, w, *geometry(case), case[9], mask, *settings)
    return grads[PASSES.index(which) - 1]


def reference(which, case, x, w, b, dy):
    if which == "fprop":
        return torch.nn.functional.conv2d(x, w, b, *geometry(case), case[9])
    mask = [which == "dgrad", which == "wgrad", False]
    what = *geometry(case), False, [0, 0], case[9], mask
    return torch.ops.aten.convolution_backward(dy, x, w, None, *what)[PASSES.index(which) - 1]


def check(which, case, tensors, name, tf32=False):
    wide = [t.double() for t in tensors]
    actual = run(which, case, *tensors, name, tf32)
    terms = max(t.numel() for t in (*tensors, actual))

    def moved():
        return [reference(which, case, *map(mover(way), wide)) for way in WAYS]

    exact, stock = reference(which, case, *wide), reference(which, case, *tensors)
    # Stock may run a small convolution in fp32 where TF32 is allowed.
    ulps = 2**13 if tf32 else 4 if which == "fprop" else 8
    assert_by_rule(actual, stock, exact, ulps, f"{name} {which}", terms, moved)
    return actual
