"""braze: CUDA and CPU kernels for convolutional networks, as torch ops and drop-in layers."""

import sys

from braze import _lib

__version__ = "0.1.0"
__all__ = ["backend", "check_errors", "info", "kernels", "matmul", "nn", "optim", "transpose_copy"]

try:
    _lib.load()
except ImportError:
    # `python -m braze info` is the bug-report page: it has to run when nothing else does.
    if sys.orig_argv[-1] != "info" and "info" not in sys.orig_argv[2:4]:
        raise
else:
    from braze import nn, optim
    from braze._config import backend, kernels
    from braze._ops.cross_entropy import check_errors
    from braze._ops.matmul import matmul
    from braze._ops.transpose import transpose_copy
