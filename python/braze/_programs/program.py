"""Programs: a function of tensors that has been recorded, as one op forward and one backward, with
one autograd node."""

import math
import operator

import torch
from torch.autograd import forward_ad

from braze._ops._common import below_autograd, derivatives
from braze._programs.defined import Defined, parts
from braze._programs.record import Instruction, Recorder, Register, Unrecordable

_ops = torch.ops.braze
_run = _ops.run_program.default
_functorch_is_active = torch._C._are_functorch_transforms_active
_version = operator.attrgetter("_version")
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # of autograd.grad(is_grads_batched=True)


class Program:
    """A recorded function of tensors, which returns one.

    Args:
        function: takes the tensors; calls braze's ops, views and copies only. What it does may
            depend on all of the tensors but their values. It is run once, with its backward.
        tensors: what it reads. Those that require gradients are leaves.
        buffers: further tensors, known to the function, that it reads and may write to.
        part_bytes: the backward is cut into parts behind each of which about as many bytes of what
            was saved for it are free again, as they are behind the node of each op.
        fleeting: of which of the tensors nobody has to be expected to keep the memory.

    Raises:
        Unrecordable: the function does something else.
    """

    def __init__(self, function, tensors, buffers, part_bytes, fleeting=()):
        wanted = [t for t in tensors if t.requires_grad]
        self._differentiates = torch.is_grad_enabled() and bool(wanted)
        inputs = [*tensors, *buffers]
        self._constant = len(tensors)
        recorder = Recorder(inputs, len(tensors))
        with recorder:
            output = function(*tensors)
        self._output = recorder.register(output)
        self._forward = tuple(recorder.instructions)
        made_by = {r: i for i in self._forward for r in i.results}
        if _source(self._output, made_by) < len(inputs):
            raise Unrecordable("an input is returned")
        if output.requires_grad != self._differentiates:
            raise Unrecordable("no gradient where one is wanted")
        written = {r for i in self._forward for r in i.writes()}
        self._written = [i for i in range(len(buffers)) if len(tensors) + i in written]
        kept = saved = ()
        if self._differentiates:
            self._like_output = output.shape, output.stride()
            grads, instructions = _record_backward(recorder, output, wanted)
            kept, saved = self._define_backward(
                (recorder, made_by), grads, instructions, tensors, part_bytes
            )
            held = [t for i, t in enumerate(tensors) if any(fleeting[i : i + 1]) and i not in kept]
            if sum(t.numel() * t.element_size() for t in held) > part_bytes:
                raise Unrecordable("inputs that only second derivatives would read")
        results = [self._output, *(r for r in saved if r != self._output)]
        self._kept = kept
        self._saved = [results.index(r) for r in saved]
        self._defined = Defined(self._forward, recorder.layouts, (tensors, buffers), results)
        self._forward = tuple(i._replace(like=None) for i in self._forward)

    def _define_backward(self, recorded, grads, instructions, tensors, part_bytes):
        """Defines the programs of the gradients; which of the inputs and of the forward's registers
        they read beside the output's gradient.

        Args:
            recorded: the recorder, and by registers the instructions of the forward that make them.
        """
        recorder, made_by = recorded
        if any(i.writes() for i in instructions):
            raise Unrecordable("a backward that writes to its inputs")
        grad = recorder.add(recorder.grad)
        found = [g for g in grads if g is not None]
        if len(set(found)) < len(found):
            raise Unrecordable("gradients that are the same tensor")
        made = {r for i in instructions for r in i.results}
        asked = dict.fromkeys(r for i in instructions for r in i.registers())
        asked.update(dict.fromkeys(found))
        # Views are made again: what they show is saved, so that its version is checked. Of a result
        # that is a view it is the other way round, since that is what may be written to.
        source = _source(self._output, made_by)
        needed, views = [], {}
        pending = [r for r in asked if r not in made and r != grad]
        while pending:
            r = pending.pop(0)
            by = made_by.get(r)
            if r == source != self._output:
                views[r] = _alias(recorder.layouts, self._output, r)
                pending.append(self._output)
            elif by is not None and by.form == "alias" and r != self._output:
                views[r] = by
                pending.append(by.args[0])
            elif r not in needed:
                needed.append(r)
        kept = [r for r in needed if r < len(tensors)]
        saved = [r for r in needed if r >= len(tensors)]
        if any(r not in made_by for r in saved):
            raise Unrecordable("a buffer is read in the backward")
        given = [grad, *kept, *saved]
        self._parts, self._found = parts(
            _with_views(instructions, views, found), (given, found), recorder, part_bytes
        )
        wanted = iter(grads)
        self._grads = [t.requires_grad and next(wanted) is not None for t in tensors]
        return kept, saved

    def __call__(self, tensors, buffers):
        """What the function returns of other tensors, or None where they are not like those that it
        was recorded with."""
        with below_autograd():
            results = _run(tensors, buffers, self._defined.number)
        if not results:
            return None
        if self._written:
            torch.autograd.graph.increment_version([buffers[i] for i in self._written])
        if not self._differentiates:
            return results[0]
        return _record(self, buffers, results, *tensors)

    def save(self, ctx, buffers, results, tensors):
        """Keeps in `ctx` what :meth:`gradients` takes from it."""
        ctx.set_materialize_grads(False)
        ctx.program = self
        kept = self._kept
        ctx.save_for_backward(*[tensors[i] for i in kept], *[results[i] for i in self._saved])
        # For second derivatives only, so that what is written to later is an error only there.
        ctx.others = [None if i in kept else t for i, t in enumerate(tensors)]
        ctx.buffers = buffers
        ctx.versions = _versions((*tensors, *buffers))

    def gradients(self, ctx, grad):
        """The gradients of the tensors; None for those that have none."""
        one_by_one = (
            torch.is_grad_enabled()
            or _functorch_is_active()
            or forward_ad._current_level >= 0
            or _is_batched(grad)
        )
        if not one_by_one:
            found = self._by_parts(ctx, grad)
            if found is not None:
                return found
        saved = ctx.saved_tensors
        tensors, buffers = list(ctx.others), ctx.buffers
        unwritten = [None if i in self._written else b for i, b in enumerate(buffers)]
        for tensor, version in zip((*tensors, *unwritten), ctx.versions, strict=True):
            if tensor is not None and _versions((tensor,)) != [version]:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    "inplace operation: with create_graph=True the layers of a program are run "
                    f"again, for which a tensor of shape {list(tensor.shape)} is no longer there"
                )
        for i, tensor in zip(self._kept, saved, strict=False):
            tensors[i] = tensor
        # Those that were written to are read in nothing that has a derivative.
        buffers = [b.clone() if i in self._written else b for i, b in enumerate(buffers)]
        return derivatives(
            lambda *tensors: self.replayed(tensors, buffers), tensors, self._grads, (), [grad]
        )

    def _by_parts(self, ctx, grad):
        """:meth:`gradients` by the programs, or None where they do not take such tensors."""
        first, *others = self._parts
        saved = ctx.saved_tensors
        with below_autograd():
            found = _run([*first.of((grad, *saved))], (), first.number)
            if not found:  # a gradient of other strides
                grad = grad.new_empty_strided(*self._like_output).copy_(grad)
                found = _run([*first.of((grad, *saved))], (), first.number)
            if not found:
                return None
            if others:
                values = dict(enumerate((grad, *saved)))
                del saved
                ctx.maybe_clear_saved_tensors()  # unless the graph is to be kept
                first.leave(values, found)
                for part in others:
                    part.leave(values, _run([*part.of(values)], (), part.number))
                found = [values[r] for r in self._found]
        found = iter(found)
        return [next(found) if has else None for has in self._grads]

    def replayed(self, tensors, buffers):
        """The same, op by op, each with its own node."""
        values = dict(enumerate((*tensors, *buffers)))

        def of(value):
            if type(value) is tuple:
                return tuple(map(of, value))
            return values[value] if type(value) is Register else value

        with torch.autocast(tensors[0].device.type, enabled=False):
            for i in self._forward:
                results = i.op(*of(i.args), **i.kwargs)
                if i.results:
                    results = results if isinstance(results, (tuple, list)) else (results,)
                    values.update(zip(i.results, results, strict=True))
        return values[self._output]


class ProgramFunction(torch.autograd.Function):
    """The node of a program that has been run."""

    @staticmethod
    def forward(ctx, program, buffers, results, *tensors):
        program.save(ctx, buffers, results, tensors)
        return results[0]

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, None, *ctx.program.gradients(ctx, grad)


_record = super(torch.autograd.Function, ProgramFunction).apply


def _versions(tensors):
    """How often tensors have been written to; None for those of which torch does not count that."""
    try:
        return [*map(_version, tensors)]
    except RuntimeError:
        return [None if t.is_inference() else t._version for t in tensors]


def _alias(layouts, register, of):
    """The instruction that makes, of the tensor in a register, a view that is like another one."""
    own, like = layouts[register], layouts[of]
    if math.prod(own.shape) != math.prod(like.shape):
        raise Unrecordable("a result that shows a part of what the backward needs")
    ahead = like.offset - own.offset
    return Instruction("alias", None, (register,), {}, (of,), like, ahead)


def _with_views(instructions, views, results):
    """Instructions and those that make views, by register, each where it is read first."""
    left, found = dict(views), []

    def make(register):
        view = left.pop(register, None)
        if view is not None:
            make(view.args[0])
            found.append(view)

    for instruction in instructions:
        for register in instruction.registers():
            make(register)
        found.append(instruction)
    for register in results:
        make(register)
    return found


def _source(register, made_by):
    """The register of the tensor that one is a view of, or itself."""
    while register in made_by and made_by[register].form == "alias":
        register = made_by[register].args[0]
    return register


def _record_backward(recorder, output, wanted):
    """The registers of the gradients of the wanted tensors, and the instructions that make them."""
    first = len(recorder.instructions)
    recorder.grad = torch.ones_like(output)
    recorder.add(recorder.grad)
    recorder.in_backward = True
    with recorder, torch.autocast(output.device.type, enabled=False):
        found = torch.autograd.grad(output, wanted, recorder.grad, allow_unused=True)
    grads = [None if g is None else recorder.register(g) for g in found]
    return grads, recorder.instructions[first:]
