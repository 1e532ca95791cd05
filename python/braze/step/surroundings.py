"""What a function reads beside its arguments, found in its code: closures, globals, attributes."""

import dis
import functools
import inspect
import sys
import types
from typing import NamedTuple

import torch

from braze._C import same

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
    """Where values are read from together."""

    read: object  # returns them, as a list or a tuple
    label: object  # the name of the i-th
    write: object  # puts such values back


def _contents(cell):
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return _MISSING


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
        self._held = self._read()

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
            self._place(lambda: (thing.func, *thing.args, *thing.keywords.values()), name)
        elif isinstance(thing, types.FunctionType):
            self._visit_function(thing, name)
        elif isinstance(thing, list):
            if len(thing) <= _MAX_ITEMS:
                self._place(lambda: thing, name, lambda old: thing.__setitem__(slice(None), old))
        elif isinstance(thing, tuple):
            if len(thing) <= _MAX_ITEMS:
                self._place(lambda: thing, name)
        elif isinstance(thing, dict):
            if len(thing) <= _MAX_ITEMS:
                self._visit_dict(thing, name)
        elif not isinstance(thing, (type, types.ModuleType)) and not _is_foreign(type(thing)):
            self._look_into(thing, name)
            call = inspect.getattr_static(thing, "__call__", None)
            if isinstance(call, types.FunctionType):
                self._visit(call, name)

    def _place(self, read, names, write=None):
        """names: of each value; or one, of what they are items of."""
        label = (lambda i: f"an item of {names}") if isinstance(names, str) else names.__getitem__
        self._places.append(_Place(read, label, write))
        for i, value in enumerate(list(read())):
            self._visit(value, label(i))

    def _visit_dict(self, thing, name):
        def write(old):
            half = len(old) // 2
            thing.clear()
            thing.update(zip(old[:half], old[half:], strict=True))

        self._place(lambda: (*thing.keys(), *thing.values()), name, write)

    def _visit_function(self, function, name):
        if hasattr(function, "_torchdynamo_orig_callable"):  # made by torch.compile
            return self._visit(function._torchdynamo_orig_callable, name)
        if _is_foreign(function):
            return None
        global_names, attributes = _names(function.__code__)
        cells = function.__closure__ or ()

        def write_cells(old):
            for cell, contents in zip(cells, old, strict=True):
                if contents is not _MISSING:
                    cell.cell_contents = contents

        self._place(lambda: list(map(_contents, cells)), function.__code__.co_freevars, write_cells)
        self._place(lambda: function.__defaults__ or (), f"the defaults of {name}")
        self._place(
            lambda: tuple((function.__kwdefaults__ or {}).values()), f"the defaults of {name}"
        )
        self._named(function.__globals__, global_names, "")
        new = set(attributes) - self._attributes
        self._attributes |= new
        for thing, thing_name in list(self._objects):
            self._read_attributes(thing, thing_name, new)
        return None

    def _named(self, mapping, names, prefix):
        """Of a mapping the values of those names that it has."""
        names = [n for n in dict.fromkeys(names) if n in mapping]
        if names:
            self._place(
                lambda: [mapping.get(n, _MISSING) for n in names],
                [prefix + n for n in names],
                lambda old: mapping.update(
                    (n, v) for n, v in zip(names, old, strict=True) if v is not _MISSING
                ),
            )

    def _look_into(self, thing, name):
        if hasattr(thing, "__dict__"):
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

    def _read(self):
        return [value for place in self._places for value in place.read()]

    def follow(self):
        """Takes note of plain values that have changed; False where other objects have taken the
        places of those found, so that everything has to be read anew."""
        now, held = self._read(), self._held
        if len(now) != len(held):
            return False
        if not same(now, held):
            for a, b in zip(now, held, strict=True):
                if a is not b and not (type(a) in _PLAIN and type(b) in _PLAIN):
                    return False
            self._held = now
        return True

    def key(self):
        """Of what was found: plain values, and where tensors lie."""
        plain = tuple([(type(v), v) for v in self._held if type(v) in _PLAIN])
        return plain, tuple([t.data_ptr() for t in self.tensors])

    def names(self):
        """Of the plain values of :meth:`key`, in its order."""
        return [n for n, v in zip(self._labels(), self._held, strict=True) if type(v) in _PLAIN]

    def _labels(self):
        return [place.label(i) for place in self._places for i in range(len(place.read()))]

    def changes(self):
        """Names of what differs now from what was read last."""
        now, held = self._read(), self._held
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
        self._values = [(place, list(place.read())) for place in surroundings._places]
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
