"""Programs as the library keeps them, and long ones as several, one after the other."""

import collections
import math
import threading
import weakref

import torch

from braze._ops._common import below_autograd, register
from braze._programs.encode import encode
from braze._programs.record import Register

_ops = torch.ops.braze
#: What programs return, by device type and number: the layout of each result.
_results = {}
#: By device type, the numbers of programs that nobody will run any more; the next definition drops
#: them.
_dropped = collections.defaultdict(list)
_lock = threading.Lock()


class Defined:
    """A program that the library keeps as long as this lives.

    Args:
        layouts: by register.
        inputs: tensors like those in the first registers, which are read, and like the buffers in
            those behind them.
        results: the registers to return.
    """

    def __init__(self, instructions, layouts, inputs, results):
        tensors, _ = inputs
        text = encode(instructions, len(layouts), len(tensors), results)
        device = tensors[0].device.type
        queue = _dropped[device]
        with _lock:
            dropped = queue[:]
            del queue[: len(dropped)]  # others may come meanwhile
        for number in dropped:
            del _results[device, number]
        with below_autograd():
            self.number = _ops.define_program.default(*inputs, text, dropped)
        _results[device, self.number] = [layouts[r] for r in results]
        weakref.finalize(self, _drop, device, self.number).atexit = False


class Part(Defined):
    """One of programs that run one after the other, on values by their numbers.

    Args:
        layouts: by number, of all.
        reads: the numbers of what it is given.
        makes: of what it returns.
        last: of what nothing behind it reads.
        device: of the tensors.
    """

    def __init__(self, instructions, layouts, reads, makes, last, device):
        self.reads, self.makes, self.last = reads, makes, last
        registers = {number: Register(i) for i, number in enumerate(reads)}
        for instruction in instructions:
            for number in instruction.results:
                registers.setdefault(number, Register(len(registers)))
        own = [i.mapped(registers.__getitem__) for i in instructions]
        given = [layouts[number].empty(device) for number in reads]
        results = [registers[number] for number in makes]
        super().__init__(own, [layouts[number] for number in registers], (given, []), results)

    def of(self, values):
        """What it is given."""
        return [values[number] for number in self.reads]

    def leave(self, values, found):
        """Adds what it has returned to the values, and takes those out that have been read."""
        values.update(zip(self.makes, found, strict=True))
        for number in self.last:
            del values[number]


def parts(instructions, ends, recorder, part_bytes):
    """Instructions as programs to run one after the other, and the numbers of what they return.

    They are cut where about `part_bytes` of what they are given have been read for the last time.
    What is given has the first numbers; a single part makes what is to be returned in its order.

    Args:
        ends: the registers of what is given, and of what is to be returned.
    """
    given, results = ends
    numbers = {r: Register(i) for i, r in enumerate(given)}
    for instruction in instructions:
        for r in instruction.results:
            numbers.setdefault(r, Register(len(numbers)))
    instructions = [i.mapped(numbers.__getitem__) for i in instructions]
    results = [numbers[r] for r in results]
    layouts = [recorder.layouts[r] for r in numbers]
    device = recorder.grad.device
    groups = _cut(instructions, layouts, len(given), part_bytes)
    if len(groups) == 1:
        return [Part(instructions, layouts, [*range(len(given))], results, [], device)], results
    found, final = [], set(results)
    for at, group in enumerate(groups):
        made = {r for i in group for r in i.results}
        read = dict.fromkeys(r for i in group for r in i.registers())
        later = final.union(r for g in groups[at + 1 :] for i in g for r in i.registers())
        reads = [r for r in read if r not in made]
        makes = [r for r in numbers.values() if r in made and r in later]
        if makes:
            last = [r for r in reads if r not in later]
            found.append(Part(group, layouts, reads, makes, last, device))
    return found, results


def _cut(instructions, layouts, given, part_bytes):
    last = {r: at for at, i in enumerate(instructions) for r in i.registers()}
    groups, bytes_read = [[]], 0
    for at, instruction in enumerate(instructions):
        if bytes_read >= part_bytes:
            groups.append([])
            bytes_read = 0
        groups[-1].append(instruction)
        bytes_read += sum(
            math.prod(layouts[r].shape) * layouts[r].dtype.itemsize
            for r in set(instruction.registers())
            if r < given and last[r] == at
        )
    return groups


def _drop(device, number):
    _dropped[device].append(number)


def _fake_run(inputs, buffers, program):
    device = inputs[0].device
    return [layout.empty(device) for layout in _results[device.type, program]]


def _fake_define(inputs, buffers, text, dropped):
    raise RuntimeError("braze::define_program keeps its program in memory: it cannot be traced")


register("define_program", fake=_fake_define)
register("run_program", fake=_fake_run)
