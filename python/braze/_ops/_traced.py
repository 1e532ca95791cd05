"""Which op stands in a graph that torch.compile makes.

Autograd is done when AOTAutograd traces its graphs, forward and backward: they run without
gradients. An op of ``torch.ops.braze`` would still go through its formula in Python each time, for
nothing: 7 to 16 us on a CPU of a server, which ResNet-18's compiled step had 68 times. So its place
is taken by the op of the same name in ``torch.ops.braze_kernels``, which has the same kernels and
no formula. Graphs that others make (``make_fx``, ``torch.export``) keep the op: they may be
differentiated.
"""

import torch
from torch._guards import TracingContext
from torch._library.utils import handle_dispatch_mode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from braze import _lib

_library = torch.library.Library("braze_kernels", "IMPL")
_lib.define_missing_cuda_ops(_library)


def register(op, fake):
    """Has the op without a formula take the place of ``torch.ops.braze.<name>``.

    Args:
        op: the op's overload.
        fake: its shape function.

    Returns:
        The op without a formula.
    """
    name = op.name().removeprefix("braze::")
    kernels = _kernels_of(op)
    torch.library.register_fake(kernels.name(), fake, lib=_library)
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")

    def traced(mode, *args, **kwargs):  # the mode is not active here
        if TracingContext.try_get() is None:
            return handle_dispatch_mode(mode, op, *args, **kwargs)
        with mode:
            return kernels(*args, **kwargs)

    op.py_impl(ProxyTorchDispatchMode)(traced)
    return kernels


def within_graph(op):
    """The op to call below autograd, for one that writes to its arguments: what makes the graph
    functional takes that over before anything is traced. (In torch 2.11
    ``torch.compiler.is_compiling()`` is false there.)"""
    if torch.compiler.is_dynamo_compiling():
        return op
    # Asking for the context takes longer than this, and every eager call comes by.
    if not is_in_torch_dispatch_mode() or TracingContext.try_get() is None:
        return op
    return _kernels_of(op)


def _kernels_of(op):
    return getattr(torch.ops.braze_kernels, op.name().removeprefix("braze::")).default
