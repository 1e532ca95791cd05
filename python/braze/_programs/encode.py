"""Programs as the text that ``torch.ops.braze.define_program`` takes: csrc/ops/program.h."""

import torch

from braze._programs.record import is_register


def encode(instructions, count, constant, results):
    """Instructions, in their order, as a program.

    Args:
        count: how many registers there are; the inputs are the first.
        constant: how many inputs, the first ones, nothing writes to.
        results: the registers to return.
    """
    steps = _with_copies_merged([_Step(i) for i in instructions], constant, set(results))
    lines = [" ".join(map(str, (count, *results)))]
    for step, dead in zip(steps, _dead_after(steps, set(results)), strict=True):
        lines.append(" ".join([*step.words, ">", *map(str, step.results), ";", *map(str, dead)]))
    return "\n".join(lines)


class _Step:
    """A line of the text, before it is known which registers are dead after it."""

    def __init__(self, instruction):
        self.form, self.results = instruction.form, list(instruction.results)
        self.reads = instruction.registers()
        if self.form == "call":
            self.words = [instruction.op._opname, *_arguments(instruction)]
            return
        if self.form in ("add", "add_"):
            self.words = [self.form, *(f"t{r}" for r in self.reads)]
            return
        self.reads, self.dtype = self.reads[:1], instruction.like.dtype
        self.words = [self.form, f"t{self.reads[0]}"]
        if self.form == "copy":
            self.words += [_dtype(self.dtype), *_layout(instruction.like)]
        else:
            self.words += [*_layout(instruction.like), f"i{instruction.ahead}"]


def _with_copies_merged(steps, constant, results):
    """Copies of inputs go first, and those that are results only last, each a step for all of a
    dtype: in a launch or two, where autocast has one for each weight and each gradient."""
    read = {r for step in steps for r in step.reads}
    # What becomes something else later is copied where it stands.
    changing = {step.reads[0] for step in steps if step.form == "add_"}
    first, last, rest = {}, {}, []
    for step in steps:
        if step.form != "copy" or step.reads[0] in changing:
            rest.append(step)
        elif step.reads[0] < constant:
            _merge(first, step)
        elif step.results[0] not in read:
            _merge(last, step)
        else:
            rest.append(step)
    return [*first.values(), *rest, *last.values()]


def _merge(merged, step):
    into = merged.setdefault(step.dtype, step)
    if into is not step:
        into.words += step.words[1:]
        into.reads += step.reads
        into.results += step.results


def _dead_after(steps, results):
    """For each step, the registers that are not needed any more after it."""
    seen, dead = set(results), []
    for step in reversed(steps):
        ours = dict.fromkeys((*step.reads, *step.results))
        dead.append([r for r in ours if r not in seen])
        seen.update(ours)
    return dead[::-1]


def _layout(like):
    return _integers(like.shape), _integers(like.strides)


def _integers(values):
    return "l" + ",".join(str(int(v)) for v in values)


def _dtype(dtype):
    return "k" + str(dtype).removeprefix("torch.")


def _arguments(instruction):
    """The words of all arguments of a call, those that were left out by their defaults."""
    for i, argument in enumerate(instruction.op._schema.arguments):
        if i < len(instruction.args):
            value = instruction.args[i]
        else:
            value = instruction.kwargs.get(argument.name, argument.default_value)
        yield _word(value, str(argument.type))


def _word(value, kind):
    if value is None:
        return "-"
    word = _plain_word(value, kind.removeprefix("Optional[").removesuffix("]"))
    return f"?{word}" if kind.startswith("Optional[") else word


def _plain_word(value, kind):
    if is_register(value):
        return f"t{value}"
    if isinstance(value, torch.dtype):
        return _dtype(value)
    if isinstance(value, (tuple, list)):
        if "Tensor" in kind:
            return "*" + ",".join(map(str, value))
        if "bool" in kind:
            return "m" + "".join("01"[v] for v in value)
        return _integers(value)
    if isinstance(value, str):
        return f"s{value}"
    if kind == "float":
        return f"d{float(value).hex()}"
    if kind == "bool":
        return f"b{value:d}"
    return f"i{int(value)}"
