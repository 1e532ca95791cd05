"""braze: CUDA and CPU kernels for convolutional networks, as torch ops and drop-in layers."""

from braze import _lib
from braze.info import info

__version__ = "0.1.0"
__all__ = [
    "Population",
    "TrainStep",
    "backend",
    "capture",
    "check_errors",
    "convert",
    "convert_report",
    "data",
    "info",
    "kernels",
    "matmul",
    "multiprocessors",
    "nn",
    "optim",
    "transpose_copy",
    "tune",
    "unconvert",
    "vector_add",
]

_lib.load()
if _lib.load_error is None:
    try:
        from braze import _tuned, data, nn, optim
        from braze._config import backend, kernels
        from braze._multiprocessors import multiprocessors
        from braze._ops.cross_entropy import check_errors
        from braze._ops.matmul import matmul
        from braze._ops.transpose import transpose_copy
        from braze._ops.vector_add import vector_add
        from braze.convert import convert, convert_report, unconvert
        from braze.population import Population
        from braze.step import TrainStep, capture
        from braze.tuning import tune
    except ImportError as error:  # a package that braze depends on is missing, or does not load
        _lib.load_error = error
    else:
        _tuned.load_all()
if _lib.load_error is not None:
    # braze.info(), the bug-report page, has to work when nothing else does.
    def __getattr__(name):
        if name in __all__:
            _lib.require()
        raise AttributeError(f"module 'braze' has no attribute {name!r}")
