"""When torch's own layers and functions have to run in the place of braze's: where someone watches
their calls, or has put others in their place."""

import types

import torch
from torch._C import _get_function_stack_at as mode_at
from torch._C import _get_tracing_state as tracing
from torch._C import _is_torch_function_mode_enabled as has_mode
from torch._C import _len_torch_function_stack as modes
from torch.utils._device import DeviceContext


def observed():
    """Whether someone records the calls of torch's functions: a ``TorchFunctionMode``, the tracer
    of ``torch.jit.trace``, or ``torch.onnx``, which can write down torch's functions only.

    Modes that are torch's own do not count: ``torch.device(...)`` decides where tensors are made,
    and ``torch.export`` takes braze's ops.
    """
    return tracing() is not None or (has_mode() and records())


def records():
    """Whether one of the modes that there are is such a one."""
    torchs = False
    for at in range(modes()):
        kind = type(mode_at(at))
        if kind.__module__.split(".")[0] != "torch":
            return True
        torchs = torchs or kind is not DeviceContext
    return torchs and torch.onnx.is_in_onnx_export()


#: What was found at places when they were first asked for, by owner and name.
_known = {}


def remember(places):
    """Takes what is at such places now, as :func:`gives_way` does, for what torch came with."""
    for owner, name in places:
        _known.setdefault((owner, name), getattr(owner, name))


def gives_way(*places):
    """A function that tells whether torch's own have to run: any of these is no longer what it was
    when it was remembered, since a profiler or a user has put something in its place, or
    :func:`observed`.

    Args:
        places: pairs of a class or a module of torch's and the name of an attribute of it.
    """
    remember(places)
    scope = {"tracing": tracing, "has_mode": has_mode, "records": records}
    tests = []
    for i, (owner, name) in enumerate(dict.fromkeys(places)):
        scope[f"owner{i}"], scope[f"known{i}"] = owner, _known[owner, name]
        if not is_torchs(scope[f"known{i}"]):
            tests.append("True")
        tests.append(f"owner{i}.{name} is not known{i}")
    tests += ["tracing() is not None", "has_mode() and records()"]
    # As source, since this is asked at each call of a layer: a loop over pairs takes three times as
    # long. torch.compile makes guards of these comparisons.
    return eval(f"lambda: {' or '.join(tests)}", scope)


def is_torchs(function):
    """Whether a function is one of torch's, not what somebody has put in its place already."""
    code = getattr(function, "__code__", None)
    if code is None:
        return isinstance(function, _BUILTIN)
    return code.co_filename.startswith(torch.__path__[0])


_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)


def calls(function, also=()):
    """Class decorator for layers that stand for torch's of the same name: `_gives_way()` of them
    tells whether torch's has to run.

    Args:
        function: the name of ``torch.nn.functional``'s function that torch's layer calls.
        also: names of methods of torch's layer that count, beside `forward`.
    """

    def decorate(kind):
        torchs = getattr(torch.nn, kind.__name__)
        methods = [(torchs, name) for name in ("forward", *also)]
        kind._places = (*methods, (torch.nn.functional, function), *called_by(function))
        kind._gives_way = staticmethod(gives_way(*kind._places))
        if "forward" in vars(kind):  # as Python calls it where the arguments are wrong
            kind.forward.__qualname__ = torchs.forward.__qualname__
        return kind

    return decorate


def called_by(name):
    """The places that a function of ``torch.nn.functional`` calls in turn."""
    if not isinstance(getattr(torch.nn.functional, name), types.FunctionType):
        return []
    owners = torch, torch._C._nn
    return [(o, n) for o in owners for n in (name, f"{name}_") if hasattr(o, n)]
