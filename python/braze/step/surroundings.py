"""What a function reads beside its arguments, found in its code: closures, globals, attributes."""

import dis
import functools
import inspect
import sys
import types
from typing import NamedTuple

import torch

from braze._C import addresses, read, reads

#: Values that are part of the kind of call; a change is another kind.
PLAIN = (
    int, float, complex, bool, str, bytes, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_PLAIN = frozenset(PLAIN)
# Packages whose functions and objects are not looked into; but objects like argparse.Namespace are.
_FOREIGN = sys.stdlib_module_names - {"argparse", "types", "__main__"}
_FOREIGN |= {"torch", "torchvision", "braze", "numpy"}
_MAX_ITEMS = 4096  # of a list, a tuple or a dict that is looked into
_READS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"))
_HIDDEN = frozenset(("_parameters", "_buffers", "_modules"))  # of modules: looked after elsewhere


NOT_REPEATED = (
    "Python code in it changes {}, which a graph would not repeat; write into a tensor, return the "
    "value, or count outside of it"
)


class _Missing:
    def __repr__(self):
        return "nothing"


_MISSING = _Missing()


def _names(code):
    """The globals and the attributes that a code object reads, functions inside of it included."""
    global_names, attributes = [], []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            global_names.append(instruction.argval)
        elif instruction.opname in _READS:
            attributes.append(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            global_names += inner[0]
            attributes += inner[1]
    return global_names, attributes


def _is_foreign(thing):
    return (getattr(thing, "__module__", None) or "").partition(".")[0] in _FOREIGN


class _Place(NamedTuple):
    """Where values are read from together: in every call, so by what runs in C."""

    source: object  # a function (its cells and defaults), a list, a tuple or a dict
    names: tuple | None  # what is read of a dict; None: all that the source holds
    label: object  # the name of the i-th value
    write: object  # puts such values back


def _item_of(name):
    return lambda _: f"an item of {name}"


class Surroundings:
    """What a function reads beside its arguments, as far as that can be told from its code.

    Looked into are the cells of its closure, the globals that its code names, its defaults, the
    object that it is a method of, and of objects found so the attributes that the code names;
    lists, tuples and dicts; and functions found so that belong to neither torch nor braze, with
    the methods that the code names. Not looked into are attributes of Python modules
    (``settings.rate``), and what a call of a module, ``model(x)``, reads by itself.

    Args:
        function: a callable.
    """

    def __init__(self, function):
        self._function = function
        self.scan()

    def scan(self):
        """Reads everything anew."""
        #: what was found
        self.modules, self.optimizers, self.scalers = [], [], []
        self.schedulers, self.tensors = [], []
        self._places = []
        self._seen = {}  # by id; what is in it cannot be freed, and its id become another's
        self._attributes, self._objects = set(), []
        self._visit(self._function, getattr(self._function, "__name__", "the function"))
        self._hold(read(self._places, _MISSING))

    # ---- finding ----

    def _visit(self, thing, name):
        if type(thing) in _PLAIN or id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, torch.Tensor):
            self.tensors.append(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            self.optimizers.append(thing)
        elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            self.schedulers.append(thing)
        elif isinstance(thing, torch.amp.GradScaler):
            self.scalers.append(thing)
        elif isinstance(thing, torch.nn.Module):
            self.modules.append(thing)
            self._look_into(thing, name)
        elif isinstance(thing, types.MethodType):
            self._visit(thing.__self__, "self")
            self._visit(thing.__func__, name)
        elif isinstance(thing, functools.partial):
            for part in (thing.func, thing.args, thing.keywords):
                self._visit(part, name)
        elif isinstance(thing, types.FunctionType):
            self._visit_function(thing, name)
        elif isinstance(thing, list):
            if len(thing) <= _MAX_ITEMS:
                write = lambda old: thing.__setitem__(slice(None), old)  # noqa: E731
                self._place(thing, _item_of(name), write)
        elif isinstance(thing, tuple):
            if len(thing) <= _MAX_ITEMS:
                self._place(thing, _item_of(name))
        elif isinstance(thing, dict):
            if len(thing) <= _MAX_ITEMS:
                self._visit_dict(thing, name)
        elif not isinstance(thing, (type, types.ModuleType)) and not _is_foreign(type(thing)):
            self._look_into(thing, name)
            call = inspect.getattr_static(thing, "__call__", None)
            if isinstance(call, types.FunctionType):
                self._visit(call, name)

    def _place(self, source, label, write=None, names=None):
        place = _Place(source, names, label, write)
        self._places.append(place)
        for i, value in enumerate(read([place], _MISSING)):
            self._visit(value, label(i))

    def _visit_dict(self, thing, name):
        def write(old):
            half = len(old) // 2
            thing.clear()
            thing.update(zip(old[:half], old[half:], strict=True))

        self._place(thing, _item_of(name), write)

    def _visit_function(self, function, name):
        if hasattr(function, "_torchdynamo_orig_callable"):  # made by torch.compile
            return self._visit(function._torchdynamo_orig_callable, name)
        if _is_foreign(function):
            return None
        global_names, attributes = _names(function.__code__)
        cells, variables = function.__closure__ or (), function.__code__.co_freevars

        def write(old):
            for cell, contents in zip(cells, old, strict=False):  # defaults stand behind them
                if contents is not _MISSING:
                    cell.cell_contents = contents

        def label(i):
            return variables[i] if i < len(variables) else f"one of the defaults of {name}"

        self._place(function, label, write)
        self._named(function.__globals__, global_names, "")
        new = set(attributes) - self._attributes
        self._attributes |= new
        for thing, thing_name in list(self._objects):
            self._read_attributes(thing, thing_name, new)
        return None

    def _named(self, mapping, names, prefix):
        """Of a dict the values of those names that it has."""
        names = tuple(n for n in dict.fromkeys(names) if n in mapping)

        def write(old):
            mapping.update((n, v) for n, v in zip(names, old, strict=True) if v is not _MISSING)

        if names:
            self._place(mapping, lambda i: prefix + names[i], write, names)

    def _look_into(self, thing, name):
        if isinstance(getattr(thing, "__dict__", None), dict):
            self._objects.append((thing, name))
            self._read_attributes(thing, name, self._attributes)

    def _read_attributes(self, thing, name, attributes):
        for attribute in sorted(attributes):
            method = getattr(type(thing), attribute, None)
            if isinstance(method, property):
                method = method.fget
            if isinstance(method, types.FunctionType):
                self._visit(method, f"{name}.{attribute}")
        self._named(vars(thing), sorted(attributes - _HIDDEN), f"{name}.")

    # ---- watching ----

    def _hold(self, values):
        """Takes note of what has been read."""
        self._held = values
        self._plain = tuple([(type(v), v) for v in values if type(v) in _PLAIN])

    def follow(self):
        """Takes note of plain values that have changed; False where other objects have taken the
        places of those found, so that everything has to be read anew."""
        held = self._held
        if reads(self._places, _MISSING, held):
            return True
        now = read(self._places, _MISSING)
        if len(now) != len(held):
            return False
        for a, b in zip(now, held, strict=True):
            if a is not b and not (type(a) in _PLAIN and type(b) in _PLAIN):
                return False
        self._hold(now)
        return True

    def key(self):
        """Of what was found: plain values, and where tensors lie."""
        return self._plain, addresses(self.tensors)

    def names(self):
        """Of the plain values of :meth:`key`, in its order."""
        return [n for n, v in zip(self._labels(), self._held, strict=True) if type(v) in _PLAIN]

    def _labels(self):
        return [
            place.label(i) for place in self._places for i in range(len(read([place], _MISSING)))
        ]

    def changes(self):
        """Names of what differs now from what was read last."""
        now, held = read(self._places, _MISSING), self._held
        if len(now) != len(held):
            return {"the length of a list or a dict"}
        return {
            name
            for name, a, b in zip(self._labels(), now, held, strict=True)
            if a is not b and not (type(a) in _PLAIN and type(a) is type(b) and a == b)
        }


class SurroundingsState:
    """What Python code changes of a :class:`Surroundings` while it is recorded, for
    :class:`braze.step.host_state.HostState`."""

    def __init__(self, surroundings):
        self._surroundings = surroundings
        self._values = [(place, read([place], _MISSING)) for place in surroundings._places]
        self._schedulers = [(one, dict(vars(one))) for one in surroundings.schedulers]
        self._scalers = [
            (scaler, {key: dict(state) for key, state in scaler._per_optimizer_states.items()})
            for scaler in surroundings.scalers
            if scaler.is_enabled()
        ]

    def verify(self):
        changed = self._surroundings.changes()
        if changed:
            raise RuntimeError(NOT_REPEATED.format(", ".join(sorted(changed))))
        if any(one.last_epoch != held["last_epoch"] for one, held in self._schedulers):
            raise RuntimeError(
                "a learning rate scheduler is stepped within it, which a graph would not repeat; "
                "step it between calls"
            )

    def restore(self):
        for place, values in self._values:
            if place.write is not None:
                place.write(values)
        for scheduler, held in self._schedulers:
            vars(scheduler).update(held)
        for scaler, states in self._scalers:
            scaler._per_optimizer_states.clear()
            scaler._per_optimizer_states.update(states)
        for optimizer in self._surroundings.optimizers:
            for name in ("grad_scale", "found_inf"):  # of a scaler's step that was cut short
                optimizer.__dict__.pop(name, None)
