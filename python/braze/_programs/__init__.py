"""Programs of runs of layers: what eager mode pays for each op, paid once for all of them.

A run is recorded when it comes for the second time under the same circumstances, and from then on
is one op forward and one backward, with one autograd node. docs/eager.md
"""

import operator
import os

import torch
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel

from braze import _config
from braze._nvtx import ENABLED as NVTX
from braze._ops._common import saved_tensors_hook
from braze._programs.program import Program
from braze._programs.record import Unrecordable
from braze._step_scope import takes_ops

#: Of what is saved for its backward: a program frees it, and may hold what is only for second
#: derivatives, to within about as many. To read them takes a GPU longer than the host a program.
PART_BYTES = 64 << 20
#: Circumstances that are remembered, and programs for other strides and dtypes under the same ones.
_MOST_KNOWN, _MOST_VARIANTS = 2048, 4
#: "1": programs; "first": recorded at the first call; "0": none, as under BRAZE_NVTX, which shows
#: ops.
_MODE = os.environ.get("BRAZE_PROGRAMS", "1")
_ON = _MODE != "0" and not NVTX
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
#: By circumstances: a list of programs, None among them for tensors that have none; before that, 1
#: where they came once; None: never to be tried.
_known = {}

_is_nested, _requires_grad, _shape = map(
    operator.attrgetter, ("is_nested", "requires_grad", "shape")
)
_functorch_is_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack


def allowed(input):
    """Whether a run on `input` may be a program: nobody watches its ops or what they save, and
    nothing but torch's plain autograd differentiates it."""
    return (
        _ON
        and type(input) in _TENSORS
        and (input.is_cpu or input.is_cuda)
        and not torch.compiler.is_compiling()
        and not takes_ops()
        and not _dispatch_modes()
        and not _functorch_is_active()
        and forward_ad._current_level < 0
        and saved_tensors_hook(True) is None
        and not torch.is_inference_mode_enabled()
        # It exchanges gradients as they are made, which those of a program are all at once.
        and DistributedDataParallel._active_ddp_module is None
        and not input.is_nested
        and input.layout is torch.strided
    )


def run(name, function, tensors, buffers):
    """The result of a run by its program, or None where there is none.

    Args:
        name: a list: what the run does, as far as the tensors do not decide it. Where something in
            it has no hash, there is no program.
        function: makes, of tensors and buffers like these, the function to record.
        tensors: what it reads; the first one is its input.
        buffers: what it may write to.
    """
    if len(set(map(id, tensors))) < len(tensors):
        tensors, function = _once(tensors, function, name)
    input = tensors[0]
    device = input.device
    if not _TENSORS.issuperset(map(type, tensors)) or any(map(_is_nested, tensors)):
        return None
    key = (
        *name,
        *(torch.is_grad_enabled(), device, input.dtype, input.stride(), len(tensors)),
        *map(_shape, tensors),
        *map(_requires_grad, tensors),
        *_config.settings(device.type),
    )
    try:
        known = _known.get(key, 0)
    except TypeError:
        return None
    if known is None:
        return None
    if known == 0:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[key] = 1
        if _MODE != "first":
            return None
    if known != 1:
        for program in known:
            result = None if program is None else program(tensors, buffers)
            if result is not None:
                return result
        if len(known) >= _MOST_VARIANTS:
            return None
    if input.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    program = _recorded(function, tensors, buffers)
    if known == 1:
        _known[key] = None if program is None else [program]
    else:
        known.append(program)
    return None if program is None else program(tensors, buffers)


def _once(tensors, function, name):
    """Tensors of which some come more than once, each once, and the function of those; where each
    has stood is added to the name."""
    different = {id(t): t for t in tensors}
    at = {key: i for i, key in enumerate(different)}
    order = tuple([at[id(t)] for t in tensors])
    name.append(order)

    def of_different(own, buffers):
        made = function([own[i] for i in order], buffers)
        return lambda *own: made(*[own[i] for i in order])

    return list(different.values()), of_different


def with_casts(function, tensors, settings=()):
    """``function(*tensors, *settings)``; under autocast the op and its casts are one program.

    Args:
        tensors: the arguments that are tensors or None; the first one is the input.
        settings: the others.
    """
    input = tensors[0]
    if not torch._C._is_any_autocast_enabled() or not allowed(input):
        return function(*tensors, *settings)
    given = [t is not None for t in tensors]
    result = run(
        [function, *given, *settings],
        lambda own, buffers: lambda *own: _with_none(function, own, given, settings),
        [t for t in tensors if t is not None],
        (),
    )
    return function(*tensors, *settings) if result is None else result


def _with_none(function, tensors, given, settings):
    tensors = iter(tensors)
    return function(*[next(tensors) if is_given else None for is_given in given], *settings)


def _recorded(function, tensors, buffers):
    """A program, or None where there cannot be one. It is recorded on tensors of its own, so that
    nobody's buffers, gradients and hooks notice."""
    own = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    copies = [b.detach().clone() for b in buffers]
    fleeting = [not t.is_leaf for t in tensors]
    try:
        return Program(function(own, copies), own, copies, PART_BYTES, fleeting)
    except Unrecordable:
        return None
    except Exception:
        # What the run raises it will raise again, op by op, with all that it does before.
        return None
