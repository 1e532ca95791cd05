"""Settings that pick a kernel: backend, precision, determinism.

They are read once, in an op's forward, and passed on as op arguments (backward runs on another
thread, often after a `with` block has ended).
"""

import re

import torch

from braze import _lib, _multiprocessors, _tuned

_AUTO = "auto"
#: op -> chosen backend or kernel name
_backends = dict.fromkeys(
    (
        "matmul",
        "conv2d",
        "transpose_copy",
        "vector_add",
        "softmax",
        "batch_norm",
        "layer_norm",
        "group_norm",
    ),
    _AUTO,
)


def kernels(op=None):
    """Every kernel that is loaded, as a list of dicts.

    Args:
        op: only this op's kernels, for example ``"matmul"``.

    Returns:
        A list of dicts with ``op``, ``name`` (what :class:`backend` takes), ``dtypes``
        (space-separated), ``arch`` (``"cpu"``, ``"sm_80+"``, ``"sm_90a"``), ``shipped`` (False for
        ladder rungs) and ``note``.
    """
    libraries = [lib for lib in (_lib.ops_library, _lib.cuda_library) if lib is not None]
    return [k for lib in libraries for k in lib.kernels() if op is None or k["op"] == op]


def _choices(op):
    rungs = sorted({k["name"] for k in kernels(op)})
    measured = ["benchmark"] if op == "conv2d" else []
    return [
        _AUTO,
        "braze",
        *backend._VENDORS.get(op, ()),
        *backend._ON_CPUS.get(op, ()),
        *measured,
        *rungs,
    ]


def is_choice(op, choice):
    """Whether `op` has such a backend or kernel, on any device."""
    candidates = [rf"{vendor}:\d\d?" for vendor in backend._VENDORS.get(op, ())]
    numbered = isinstance(choice, str) and any(re.fullmatch(c, choice) for c in candidates)
    return numbered or choice in _choices(op)


def check_choice(caller, op, choice):
    """Raises ValueError, which lists what exists, where `op` has no such backend or kernel."""
    if not is_choice(op, choice):
        raise ValueError(
            f"{caller}: expected {op} to be one of {', '.join(_choices(op))}, but got {choice!r}"
        )


class backend:
    """Chooses the kernels of an op; setter and context manager in one. matmul's are linear's too.

    ``braze.backend(matmul="cublas")`` sets it from here on; ``with braze.backend(conv2d="braze"):``
    restores the previous choice at the end. The choice is global to the process, as torch's own
    precision settings are.

    Args:
        matmul: ``"auto"``, ``"braze"``, ``"cublas"`` or the name of one matmul kernel.
        conv2d: ``"auto"``, ``"braze"``, ``"cudnn"`` (on a CPU ``"torch"``, its own convolution) or
            the name of one conv2d kernel;
            ``"benchmark"`` measures them at the first call of a problem, as ``"auto"`` does under
            ``torch.backends.cudnn.benchmark = True``. It is conv_transpose2d's too.
            ``"cublas:3"`` and ``"cudnn:3"`` are the libraries' fourth algorithm for the problem.
        transpose_copy, vector_add: ``"auto"``, ``"braze"`` or the name of one of the op's kernels.
        softmax, batch_norm: the same, for the forward pass, batch_norm's in training. Backward and
            evaluation have one kernel for each layout, which runs whatever was chosen.
        layer_norm, group_norm: ``"auto"``, which is torch's function wherever ours has not been
            measured to be faster (``braze/_norm_rules.py``), ``"braze"`` or the name of one of our
            kernels. group_norm's is instance_norm's too.

    Raises:
        ValueError: no such op, or no such backend or kernel for it; the message lists what exists.
    """

    _VENDORS = {"matmul": ("cublas",), "conv2d": ("cudnn",)}  # noqa: RUF012
    _ON_CPUS = {"conv2d": ["torch"]}  # noqa: RUF012

    def __init__(self, **choices):
        for op, choice in choices.items():
            if op not in _backends:
                raise ValueError(f"backend: expected one of {', '.join(_backends)}, but got {op!r}")
            check_choice("backend", op, choice)
        self._choices, self._previous, self._entered = choices, [dict(_backends)], False
        _backends.update(choices)

    def __enter__(self):
        if self._entered:  # again: what was set by the constructor has been taken back
            self._previous.append(dict(_backends))
            _backends.update(self._choices)
        self._entered = True
        return self

    def __exit__(self, *exc):
        _backends.update(self._previous.pop())

    def __repr__(self):
        return f"braze.backend({', '.join(f'{k}={v!r}' for k, v in _backends.items())})"


def chosen_backend(op):
    """The backend string that `op` passes to its kernels."""
    return _backends[op]


def allow_tf32(op, tensor):
    """Whether torch's settings let fp32 `tensor` use TF32 in `op` ("matmul" or "conv2d")."""
    if tensor.dtype != torch.float32 or not tensor.is_cuda:
        return False
    return _tf32_setting(op)


# Dynamo cannot trace the fp32_precision properties, and the older allow_tf32 raises once they are
# set: compiled code keeps the setting that it was compiled under.
@torch.compiler.assume_constant_result
def _tf32_setting(op):
    # torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision: read for
    # every op, and slow through these names.
    name = "matmul" if op == "matmul" else "conv"
    return torch._C._get_fp32_precision_getter("cuda", name) == "tf32"


def deterministic():
    """Whether `torch.use_deterministic_algorithms(True)` is in force."""
    return torch.are_deterministic_algorithms_enabled()


# torch.backends.cudnn.benchmark and .deterministic. Dynamo cannot trace them: constants of what it
# compiles.
@torch.compiler.assume_constant_result
def _cudnn_benchmark():
    return torch._C._get_cudnn_benchmark()


@torch.compiler.assume_constant_result
def _cudnn_deterministic():
    return torch._C._get_cudnn_deterministic()


def conv2d_settings(tensor):
    """What the user sets for a whole scope, as the op's arguments: (allow_tf32, deterministic,
    backend).

    On CUDA torch.backends.cudnn counts as for torch's own: under `deterministic` cuDNN's engines
    have to be repeatable, and under `benchmark` the choice that is left to braze is measured.
    """
    backend, wants_same = _backends["conv2d"], deterministic()
    if tensor.is_cuda:
        wants_same = wants_same or _cudnn_deterministic()
        if backend == _AUTO and _cudnn_benchmark():
            backend = "benchmark"
    return allow_tf32("conv2d", tensor), wants_same, backend


def settings(device_type):
    """Everything global that decides what a step computes: part of what a captured step froze."""
    return (
        torch._C._get_deterministic_algorithms(),
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        # torch.backends.cuda.matmul.fp32_precision and torch.backends.cudnn.conv's
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
        torch._C._get_fp32_precision_getter("cuda", "conv"),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        *_backends.values(),
        _tuned.version,
        _multiprocessors.current(),
    )
