"""The classes that converted modules get: subclasses of the same name, whose forward is another."""

import abc
import copyreg
import functools
import inspect
import types

import torch

from braze.convert import kinds, loops, programs, runs, standardized, through
from braze.convert.chains import analyse_children, blocks, module_link
from braze.convert.emit import spliced
from braze.convert.identity import class_methods, why_its_class_counts
from braze.convert.image_norms import OwnConv
from braze.convert.modules import own_class
from braze.convert.parts import PARTS, NormAct, of_subclass
from braze.convert.recognise import kinds_of, part_of
from braze.convert.response_norms import ResponseNorm
from braze.convert.source import Unknown
from braze.convert.splice import analyse
from braze.convert.squeezes import Gate, Squeeze

_SEQUENTIAL_FORWARD = torch.nn.Sequential.forward


class Rewritten:
    """Mixed into a module's class. A module holds nothing of what was done to its forward: its
    class does."""

    def __init_subclass__(cls):
        """Not that of the module's own class, which is for what its author derives from it."""

    def __reduce_ex__(self, protocol):
        # The class is made at run time, so that no pickle can name it.
        make, args, *state = super().__reduce_ex__(max(protocol, 2))
        if make is copyreg.__newobj__:
            return new, (self._class_before_convert, *args[1:]), *state
        if make is copyreg.__newobj_ex__:
            args, kwargs = args[1:]
            return functools.partial(new, self._class_before_convert, *args, **kwargs), (), *state
        return make, args, *state

    def __setstate__(self, state):
        super().__setstate__(state)
        self.__dict__.pop("_braze_plans", None)  # pickles of version 0.1.0 have it
        try:
            kind = class_for(self, functools.partial(kinds_of, kind_of=kinds.kind_of)).made
        except Unknown:
            kind = None
        object.__setattr__(self, "__class__", kind or self._class_before_convert)


def new(kind, *args, **kwargs):
    """An instance of a rewritten `kind` as pickle makes it, before it has its state."""
    made = _subclass(kind, "pending", lambda: kind.forward)
    return made.__new__(made, *args, **kwargs)


class Rewriting:
    """What is to become of a module's forward.

    Attributes:
        made: the class that it gets, or None where there is nothing to change.
        runs: tuples of (kind, name) of the parts of each fused run.
        functions: the names of torch.nn.functional's functions that are replaced.
        whole: the name of braze's function that it is as a whole, or None.
    """

    def __init__(self, made, found_runs, functions=(), whole=None):
        self.made, self.runs, self.functions, self.whole = made, found_runs, functions, whole


def class_for(module, kinds_of):
    """What is to become of a module's forward; nothing is changed.

    Args:
        kinds_of: a function from a module to the kinds of the links that a call of it stands for,
            as recognise.kinds_of() gives them.

    Raises:
        Unknown: why its forward has to stay as it is.
    """
    kind = own_class(module)
    if kind.forward is _SEQUENTIAL_FORWARD:
        found = analyse_children(module, kinds_of)
        together = found or programs.follow_each_other(module, kinds_of)
        made = _subclass(kind, "children", lambda: _run_sequential) if together else None
        return Rewriting(made, found)
    forward = inspect.getattr_static(kind, "forward")
    if not isinstance(forward, types.FunctionType):
        raise Unknown(f"its forward is a {type(forward).__name__}, not a function")
    try:
        splices, found, functions = analyse(module, forward, kinds_of)
        make = functools.partial(spliced, forward, splices)
        part = part_of(kind)

        def as_one(key, run):
            return _subclass(kind, (key, splices), lambda: _in_one_way(run, make()))

        if isinstance(part, NormAct) and kinds_of(module) is not None:
            found = [*blocks([module_link(0, kinds_of(module), (("", module),))]), *found]
            made = as_one("norm", through.norm_and_more)
        elif isinstance(part, (Gate, Squeeze)):
            return Rewriting(as_one("squeeze", part.run), found, functions, "squeeze_excite")
        elif isinstance(part, ResponseNorm):
            made = as_one("response", part.run)
            return Rewriting(made, found, functions, "global_response_norm")
        elif isinstance(part, OwnConv) and part.eps is not None:
            run = functools.partial(standardized.convolve, part.eps, part.same)
            made, functions = as_one("standardized", run), [*functions, standardized.NAME]
        else:
            made = splices and _subclass(kind, splices, make)
    except (MemoryError, RecursionError):  # by version, both mean this
        raise Unknown("its code is nested too deeply") from None
    return Rewriting(made or None, found, functions)


def _run_sequential(self, input):
    for module in loops.fused(self):
        input = module(input)
    return input


def _in_one_way(run, plain):
    """A forward of one input, as one where that may be.

    Args:
        run: a function of the module and its input, which returns None where it may not.
        plain: the forward otherwise.
    """

    @functools.wraps(plain)  # whose code is what it is checked against
    def forward(self, *args, **kwargs):
        if len(args) == 1 and not kwargs:
            output = run(self, *args)
            if output is not None:
                return output
        return plain(self, *args, **kwargs)

    return forward


# As it is called in what Python says about wrong arguments.
_run_sequential.__qualname__ = _SEQUENTIAL_FORWARD.__qualname__


def _subclass(kind, key, make_forward):
    """The subclass of `kind` with a forward that is made for the key; it is made only once."""
    if type(kind).__new__ not in _PLAIN_NEW or type(kind).__init__ is not type.__init__:
        raise Unknown(f"its class is made by {type(kind).__name__}, a metaclass of its own")
    known = kind.forward
    reason = why_its_class_counts(kind)
    if reason:
        raise Unknown(reason)
    key = key, known, getattr(known, "__code__", None)
    for made in type.__subclasses__(kind):
        if vars(made).get("_braze_key") == key:
            PARTS[made] = of_subclass(part_of(kind), made)
            return made
    forward = _checked(kind, known, make_forward())
    attributes = {
        **class_methods(kind),
        "forward": forward,
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "_class_before_convert": kind,
        "_braze_forward": forward,
        "_braze_key": key,
    }
    bases = Rewritten, kind
    made = types.new_class(kind.__name__, bases, exec_body=lambda d: d.update(attributes))
    PARTS[made] = of_subclass(part_of(kind), made)
    return made


_PLAIN_NEW = type.__new__, abc.ABCMeta.__new__


def _checked(kind, known, made):
    """`made` as long as the class's own forward is what it was made of."""
    code = known.__code__ if hasattr(made, "__wrapped__") else None

    def forward(self, /, *args, **kwargs):
        if not torch.compiler.is_compiling() and (
            kind.forward is not known or (code and runs.changed(known, code, made))
        ):
            return kind.forward(self, *args, **kwargs)
        return made(self, *args, **kwargs)

    # torch.compile counts recompilations per code object, so each class has one of its own.
    forward = types.FunctionType(
        forward.__code__.replace(), globals(), "forward", None, forward.__closure__
    )
    return functools.wraps(known)(forward)  # for inspect.signature
