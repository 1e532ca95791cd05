"""Recording: which ops run below autograd when a function of tensors is called and differentiated,
as instructions on registers."""

import typing

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
#: What makes another tensor object of the same elements.
_SAME = frozenset({_aten.detach.default, _aten.alias.default})
#: What a new tensor with the elements of the first argument comes from.
_COPIES = frozenset({_aten._to_copy.default, _aten.clone.default, _aten.contiguous.default})
#: How autograd adds up the gradients of a tensor that was read more than once; the second one where
#: nobody else has the first of them.
_SUMS = {_aten.add.Tensor: "add", _aten.add_.Tensor: "add_"}


class Unrecordable(Exception):
    """What was to be recorded does something that instructions cannot say."""


class Register(int):
    """The number of a tensor, as an argument in the place of the tensor."""


class Layout(typing.NamedTuple):
    """All of a tensor but its elements."""

    shape: tuple
    strides: tuple
    dtype: torch.dtype
    offset: int

    @classmethod
    def of(cls, tensor):
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset())

    def empty(self, device):
        """A tensor of this shape, these strides and this dtype."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class Instruction(typing.NamedTuple):
    """A call of an op.

    Attributes:
        form: "call" of a braze op, "alias" (the result is a view of the first argument), "copy",
            "add", or "add_" (the first argument becomes the result).
        op: the ``OpOverload``.
        args: all positional arguments, with a :class:`Register` for each tensor.
        kwargs: the others.
        results: registers.
        like: the :class:`Layout` of the result as the recording had it, of an alias or a copy.
        ahead: how many elements of its argument's dtype an alias begins behind it.
    """

    form: str
    op: typing.Any
    args: tuple
    kwargs: dict
    results: tuple
    like: Layout | None = None
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
    return _storage(tensor), Layout.of(tensor)


def _storage(tensor):
    return tensor.untyped_storage()._cdata


class Recorder(TorchDispatchMode):
    """While entered, records the ops of this thread, and of the backwards that it starts.

    Of the tensors that there are on the way it keeps none, so that a recording needs no more memory
    than what it records.

    Args:
        inputs: the tensors that the first registers stand for.
        constant: how many of them, the first ones, nothing may write to.
    """

    def __init__(self, inputs, constant):
        super().__init__()
        self.layouts = []  # by register
        self.places = {}
        self.storages = []  # weakly: their memory is given back, their identity is not
        for tensor in inputs:
            if not tensor.numel():
                raise Unrecordable("an input without elements: all such have the same place")
            self.add(tensor)
        if len(self.layouts) < len(inputs):
            raise Unrecordable("inputs that are the same tensor")
        self.inputs = {_storage(t) for t in inputs}
        self.constant = {_storage(t) for t in inputs[:constant]}
        self.instructions = []
        self.in_backward = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._check_writes(func, args, kwargs)
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
        if any(isinstance(v, torch.Tensor) for v in kwargs.values()):
            raise Unrecordable(f"{func} takes tensors by name")
        form = "call" if func.namespace == "braze" else self._form_of(func, args, kwargs, results)
        registers = tuple(self._argument(a) for a in args)
        if form == "add_":
            del self.places[_place(results[0])]  # the sum is another value in the same place
            func = _aten.add.Tensor
        like, ahead = None, 0
        if form == "alias" and _place(results[0]) == _place(args[0]):
            return  # as view_as() of the tensor itself
        if form in ("alias", "copy"):
            like = Layout.of(results[0])
            ahead = like.offset - args[0].storage_offset()
        made = tuple(self.add(r) for r in results)
        self.instructions.append(Instruction(form, func, registers, kwargs, made, like, ahead))

    def _check_writes(self, func, args, kwargs):
        """Before anything is written: what is recorded on is what is to be computed with."""
        by_name = {a.name: a.alias_info for a in func._schema.arguments}
        given = [*zip(by_name.values(), args, strict=False)]
        given += [(by_name[name], value) for name, value in kwargs.items()]
        for alias_info, value in given:
            if alias_info is None or not alias_info.is_write or value is None:
                continue
            if not isinstance(value, torch.Tensor) or _storage(value) in self.constant:
                raise Unrecordable(f"{func} writes to an input")

    def _argument(self, value):
        if isinstance(value, torch.Tensor):
            return self.register(value)
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(v) for v in value)
        return value

    def add(self, tensor):
        """The register of a tensor, a new one where it has none."""
        place = _place(tensor)
        if place not in self.places:
            self.places[place] = Register(len(self.layouts))
            self.layouts.append(place[1])
            self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return self.places[place]

    def _form_of(self, func, args, kwargs, results):
        if len(results) == 1 and args and isinstance(args[0], torch.Tensor):
            if func in _SUMS and self._is_plain_sum(func, args, kwargs, results[0]):
                return _SUMS[func]
            if _storage(results[0]) == _storage(args[0]) and not func._schema.is_mutable:
                return "alias"
            if func in _COPIES:
                return "copy"
        raise Unrecordable(f"{func} is none of braze's")

    def _is_plain_sum(self, func, args, kwargs, result):
        """Whether gradients that are all alike are added up."""
        layouts = {Layout.of(t)[:3] for t in (*args, result) if isinstance(t, torch.Tensor)}
        in_place = _SUMS[func] == "add_"
        return (
            self.in_backward
            and len(args) == 2
            and not kwargs
            and len(layouts) == 1
            and isinstance(args[1], torch.Tensor)
            and not (in_place and _storage(result) in self.inputs)
        )
