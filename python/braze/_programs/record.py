"""Recording: which ops run below autograd when a function of tensors is called and differentiated,
as instructions on registers."""

import typing

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
#: What makes another tensor object of the same elements.
_SAME = frozenset({_aten.detach.default, _aten.alias.default})
#: What a new tensor with the elements of the first argument comes from.
_COPIES = frozenset({_aten._to_copy.default, _aten.clone.default, _aten.contiguous.default})


class Unrecordable(Exception):
    """What was to be recorded does something that instructions cannot say."""


class Register(int):
    """The number of a tensor, as an argument in the place of the tensor."""


class Instruction(typing.NamedTuple):
    """A call of an op.

    Attributes:
        form: "call" of a braze op, "alias" (the result is a view of the first argument) or "copy".
        op: the ``OpOverload``.
        args: all positional arguments, with a :class:`Register` for each tensor.
        kwargs: the others.
        results: registers.
        like: the result as the recording had it, of an alias or a copy.
        ahead: how many elements of its argument's dtype an alias begins behind it.
    """

    form: str
    op: typing.Any
    args: tuple
    kwargs: dict
    results: tuple
    like: torch.Tensor | None = None
    ahead: int = 0

    def registers(self):
        """Those of the arguments."""
        return [r for a in self.args for r in (a if type(a) is tuple else (a,)) if is_register(r)]

    def mapped(self, change):
        """The instruction with `change` of each register in its place."""

        def of(value):
            if type(value) is tuple:
                return tuple(map(of, value))
            return change(value) if is_register(value) else value

        return self._replace(args=of(self.args), results=of(self.results))

    def writes(self):
        """The registers of what the op writes to."""
        pairs = zip(self.op._schema.arguments, self.args, strict=False)
        return [
            value
            for argument, value in pairs
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and is_register(value)
        ]


def is_register(value):
    return type(value) is Register


def _place(tensor):
    """What two tensor objects with the same elements in memory have in common."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _storage(tensor):
    return tensor.untyped_storage()._cdata


class Recorder(TorchDispatchMode):
    """While entered, records the ops of this thread, and of the backwards that it starts.

    Args:
        inputs: the tensors that the first registers stand for.
        constant: how many of them, the first ones, nothing may write to.
        most_bytes: of all that is made; more is refused.
    """

    def __init__(self, inputs, constant, most_bytes):
        super().__init__()
        self.tensors = []  # by register: all that there was, so that no memory is used twice
        self.places = {}
        for tensor in inputs:
            if not tensor.numel():
                raise Unrecordable("an input without elements: all such have the same place")
            self.add(tensor)
        if len(self.tensors) < len(inputs):
            raise Unrecordable("inputs that are the same tensor")
        self.constant = {_storage(t) for t in inputs[:constant] if t.numel()}
        self.instructions = []
        self.bytes_left = most_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _SAME:
            self._record(func, args, kwargs, result)
        return result

    def register(self, tensor):
        """The register that a tensor is in."""
        found = self.places.get(_place(tensor))
        if found is None:
            raise Unrecordable("a tensor from elsewhere")
        return found

    def _record(self, func, args, kwargs, result):
        results = (
            result if isinstance(result, (tuple, list)) else () if result is None else (result,)
        )
        if not all(isinstance(r, torch.Tensor) for r in results):
            raise Unrecordable(f"{func} returns something else than tensors")
        form = "call" if func.namespace == "braze" else _form_of(func, args, results)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            a_buffer = isinstance(value, torch.Tensor) and _storage(value) not in self.constant
            if writes and value is not None and not a_buffer:
                raise Unrecordable(f"{func} writes to an input")
        like, ahead = None, 0
        if form != "call":
            like = results[0]
            ahead = like.storage_offset() - args[0].storage_offset()
        if any(isinstance(v, torch.Tensor) for v in kwargs.values()):
            raise Unrecordable(f"{func} takes tensors by name")
        registers = tuple(self._argument(a) for a in args)
        made = tuple(self._made(r) for r in results)
        self.instructions.append(Instruction(form, func, registers, kwargs, made, like, ahead))

    def _argument(self, value):
        if isinstance(value, torch.Tensor):
            return self.register(value)
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(v) for v in value)
        return value

    def _made(self, tensor):
        self.bytes_left -= tensor.numel() * tensor.element_size()
        if self.bytes_left < 0:
            raise Unrecordable("too large")
        return self.add(tensor)

    def add(self, tensor):
        """The register of a tensor, a new one where it has none."""
        place = _place(tensor)
        if place not in self.places:
            self.places[place] = Register(len(self.tensors))
            self.tensors.append(tensor)
        return self.places[place]


def _form_of(func, args, results):
    if len(results) == 1 and args and isinstance(args[0], torch.Tensor):
        if _storage(results[0]) == _storage(args[0]) and not func._schema.is_mutable:
            return "alias"
        if func in _COPIES:
            return "copy"
    raise Unrecordable(f"{func} is none of braze's")
