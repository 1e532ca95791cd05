"""``braze.convert``: an existing model on braze's kernels, in place."""

import dataclasses

import torch

import braze.nn
from braze.convert.classes import Rewritten, class_for
from braze.convert.kinds import LAYERS, METHODS_OF_LAYERS, hooks
from braze.convert.kinds import kind_of as layer_kind
from braze.convert.modules import own_class, why_unsupported, worth_splicing
from braze.convert.recognise import kinds_of as part_kinds
from braze.convert.runs import BLOCKS
from braze.convert.source import Unknown

_TO = {getattr(torch.nn, name): getattr(braze.nn, name) for name in LAYERS}
_CONVERTED = {to: stock for stock, to in _TO.items()}
#: Modules that compute nothing themselves.
_NOTHING_TO_DO = (
    torch.nn.Flatten,
    torch.nn.Identity,
    torch.nn.ModuleDict,
    torch.nn.ModuleList,
    torch.nn.ParameterDict,
    torch.nn.ParameterList,
    torch.nn.Sequential,
    torch.nn.Unflatten,
)


_FLATTEN = torch.nn.Flatten, braze.nn.Flatten


@dataclasses.dataclass(frozen=True)
class Entry:
    """What happens to one module, one run of modules and functions, or one function call.

    Attributes:
        name: the module's name in the model ("" is the model itself); for a run, the names of its
            parts, joined by commas; for a function call, the name of the module that calls it.
        action: ``"swapped"``, ``"fused"`` or ``"left alone"``.
        before: the class or function there was.
        after: the class or function there is, or None.
        reason: why it is left alone, or None.
    """

    name: str
    action: str
    before: str
    after: str | None = None
    reason: str | None = None

    def __str__(self):
        name = self.name or "(the model)"
        if self.action == "left alone":
            return f"left alone  {name}: {self.before}: {self.reason}"
        return f"{self.action:<10}  {name}: {self.before} -> {self.after}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What :func:`braze.convert` does to a model: prints as one line per entry."""

    entries: tuple[Entry, ...]

    def _with(self, action):
        return tuple(e for e in self.entries if e.action == action)

    @property
    def swapped(self):
        return self._with("swapped")

    @property
    def fused(self):
        return self._with("fused")

    @property
    def left_alone(self):
        return self._with("left alone")

    def __str__(self):
        counts = f"{len(self.swapped)} swapped, {len(self.fused)} fused, "
        return "\n".join([*map(str, self.entries), f"{counts}{len(self.left_alone)} left alone"])


def _names(model):
    """Every module with all of its names, without running any code of its class."""
    names, pending = {}, [("", model, ())]
    while pending:
        name, module, above = pending.pop()
        names.setdefault(module, []).append(name)
        if isinstance(module, torch.jit.ScriptModule) or module in above:
            continue
        prefix = f"{name}." if name else ""
        children = list(module.__dict__["_modules"].items())
        above = *above, module
        pending += [(prefix + n, m, above) for n, m in reversed(children) if m is not None]
    return names


def _stock_layer(module):
    """The class of torch.nn that a module is an instance of and that braze has too, or None."""
    return next((stock for stock in _TO if isinstance(module, stock)), None)


def _reason_to_leave(module, names):
    """Why a layer keeps its class, or None."""
    kind = type(module)
    stock = _stock_layer(module)
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        return "lazy: run it once first"
    if _is_parametrized(module):
        return "parametrized"
    if kind.__module__.startswith(("torch.ao.", "torch.nn.quantized", "torch.nn.qat")):
        return "quantized"
    if stock is None:
        return "braze has no such layer"
    if kind not in _TO and kind not in _CONVERTED:
        return _subclass_reason(module)
    if len(names) > 1:
        return f"shared: {', '.join(names)}"
    if hooks(module):
        return f"has {', '.join(hooks(module))}"
    for method in METHODS_OF_LAYERS:
        if method in module.__dict__:
            return f"its {method} has been replaced"
    return why_unsupported(module)


def _subclass_reason(module):
    stock = _stock_layer(module)
    return stock and f"a subclass of {stock.__name__}"


def _is_parametrized(module):
    return "parametrizations" in module.__dict__["_modules"]


def _has_own_forward(module):
    """Whether a module is one that combines others in Python code, or a layer with code of its own,
    so that its forward counts."""
    kind = own_class(module)
    if isinstance(module, torch.nn.Sequential):
        return True
    stock = _stock_layer(module)
    if kind.forward is torch.nn.Module.forward or (stock and kind.forward is stock.forward):
        return False
    return not kind.__module__.startswith(("torch.", "braze."))


def _why_not_rewritten(module):
    if isinstance(module, torch.fx.GraphModule):
        return "its forward is generated: convert the model before it is traced"
    if "forward" in module.__dict__:
        return "its forward has been replaced"
    if _is_parametrized(module):
        return "parametrized"
    if isinstance(module, Rewritten) and type(module) is own_class(module):
        return "its class was changed after it was converted"
    return None


def _forward_entries(module, name, kinds_of):
    """What becomes of a module's own forward: entries, and the class that it gets or None."""
    try:
        reason = _why_not_rewritten(module)
        if reason:
            raise Unknown(reason)
        rewriting = class_for(module, kinds_of)
    except Unknown as error:
        if not worth_splicing(module, kinds_of):
            return [], None
        kind = type(module).__qualname__
        return [Entry(name, "left alone", f"{kind}.forward", reason=str(error))], None
    entries = []
    if rewriting.whole:
        before, after = type(module).__qualname__, f"braze.nn.functional.{rewriting.whole}"
        entries.append(Entry(name, "fused", before, after))
    for run in rewriting.runs:
        kinds = tuple(kind for kind, _ in run)
        parts = ", ".join(_part_name(name, part) for _, part in run)
        entries.append(Entry(parts, "fused", ", ".join(kinds), BLOCKS[kinds]))
    for function in rewriting.functions:
        before, after = f"functional {function}", f"braze.nn.functional.{function}"
        entries.append(Entry(name, "swapped", before, after))
    return entries, rewriting.made


def _part_name(name, part):
    """The name of a run's part in the model.

    Args:
        part: its name in the module that runs it, "" for that module itself, or ``"relu()"``.
    """
    if part.endswith("()"):
        return part
    return f"{name}{'' if part[:1] in ('', '.') else '.'}{part}".removeprefix(".")


def _once(entries):
    """Entries without the runs within modules that are parts of larger runs of others, or that
    others have found too."""
    parts = [set(e.name.split(", ")) if e.action == "fused" else set() for e in entries]
    having = {}
    for i, names in enumerate(parts):
        for name in names:
            having.setdefault(name, []).append(i)

    def is_in(at, i):
        names, others = parts[at], parts[i]
        if names != others:
            return names < others
        # Those of functions alone may be of several modules.
        return i < at and not all(name.endswith("()") for name in names)

    def has_another(at):
        return any(is_in(at, i) for name in parts[at] for i in having[name])

    return [entry for at, entry in enumerate(entries) if not has_another(at)]


def _check(model, function):
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise TypeError(f"{function}(): model must be a torch.nn.Module, not {kind}")


def _script_name(module):
    return getattr(module, "original_name", type(module).__qualname__)


def _analyse(model):
    """The report, the layers to swap, and the modules whose forward to rewrite."""
    _check(model, "convert")
    names = _names(model)
    entries, swaps, kinds, left = [], [], {}, set()
    for module, all_names in names.items():
        kind = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            reason = "it is compiled: convert the model before it is scripted or traced"
            entries.append(Entry(all_names[0], "left alone", _script_name(module), reason=reason))
            continue
        if kind in _NOTHING_TO_DO or kind in (braze.nn.Flatten, braze.nn.Sequential):
            continue
        if _stock_layer(module) is None and (
            _has_own_forward(module) or module.__dict__["_modules"]
        ):
            continue
        reason = _reason_to_leave(module, all_names)
        if reason == _subclass_reason(module) and _has_own_forward(module):
            continue
        if reason:
            entries.append(Entry(all_names[0], "left alone", kind.__qualname__, reason=reason))
            left.add(module)
            continue
        stock = _CONVERTED.get(kind, kind)
        kinds[module] = stock.__name__
        swaps.append(module)
        before, after = f"torch.nn.{stock.__name__}", f"braze.nn.{stock.__name__}"
        entries.append(Entry(all_names[0], "swapped", before, after))

    def kind_of(module):
        kind = kinds.get(module)
        if kind == "MaxPool2d" and module.return_indices:
            return None
        return kind or (layer_kind(module) if type(module) in _FLATTEN else None)

    known = {}

    def kinds_of(module):
        if module not in known:
            known[module] = part_kinds(module, kind_of)
        return known[module]

    rewrites = []
    for module, all_names in names.items():
        if isinstance(module, torch.jit.ScriptModule) or module in left or module in kinds:
            continue
        if _has_own_forward(module):
            found, made = _forward_entries(module, all_names[0], kinds_of)
            if made is None and _stock_layer(module) is not None:
                kind, reason = type(module).__qualname__, _subclass_reason(module)
                found = [Entry(all_names[0], "left alone", kind, reason=reason)]
            entries += found
            if made is not None:
                rewrites.append((module, made))
    return Report(tuple(_once(entries))), swaps, rewrites


def convert_report(model):
    """What :func:`convert` does to a model, or has done: the report is the same before and after.

    Args:
        model: a ``torch.nn.Module``. It is not changed.

    Returns:
        A :class:`Report` that prints as a list. Its `entries`, `swapped`, `fused` and `left_alone`
        are tuples of entries with `name`, `action`, `before`, `after` and `reason`.
    """
    return _analyse(model)[0]


def convert(model, *, strict=False):
    """Puts an existing model on braze's kernels, in place, and returns it.

    Layers of torch.nn become braze.nn's of the same name by changing their class, so that
    parameters, buffers, optimizers, state dicts and names stay what they are. Runs of Conv2d,
    BatchNorm2d, ReLU and, if it follows, MaxPool2d (layers, or functions in the forward of a
    module) become one fused op, and functions of ``torch.nn.functional`` that a forward calls
    become braze's: the module that runs them, a ``Sequential`` or one with a forward of its own,
    gets a rewritten `forward` by way of a subclass of the same name; its children stay.

    A rewritten forward is the user's own code, compiled again from its source, in which calls that
    follow each other are spliced into one; nothing of it is executed here, and all that it does, it
    goes on doing. Whether layers are still what they were is asked at every call: of those that
    have gained hooks, other settings or another class, runs go layer by layer. A run is found
    within one forward; modules in it that hand on their input, that hand it through a few children
    only, or that are batch norms with an activation inside, stand for what they compute. Forwards
    whose source is not to be found, or that ask for their own local variables, stay as they are,
    with their layers swapped.

    Left alone are layers with hooks, parametrizations, another `forward`, more than one name in
    the model, dtypes other than float64, float32, bfloat16 and float16, subclasses of torch's
    layers in whose forward there is nothing to replace, and scripted modules with all that is in
    them.

    Args:
        model: a ``torch.nn.Module``.
        strict: raise if anything would be left alone. Modules that compute nothing (``Flatten``,
            ``Identity``, containers) do not count; layers that braze does not have do.

    Returns:
        `model`. Converting a converted model changes nothing.

    Raises:
        TypeError: `model` is not a module.
        RuntimeError: under `strict`, with the list of what would be left alone. Nothing has been
            changed then.
    """
    report, swaps, rewrites = _analyse(model)
    if strict and report.left_alone:
        lines = "\n".join(f"  {e}" for e in report.left_alone)
        raise RuntimeError(f"convert(strict=True): these would be left alone:\n{lines}")
    _set_classes([*((m, _TO.get(type(m), type(m))) for m in swaps), *rewrites])
    return model


def unconvert(model):
    """Gives the modules of a converted model their own classes back, in place, and returns it.

    For what wants torch's classes: ``torch.jit.script``, exporters, pickles that load without
    braze. Layers that were made as ``braze.nn``'s become ``torch.nn``'s of the same name too. What
    got another class since, by a parametrization for example, is left alone.

    Args:
        model: a ``torch.nn.Module``.

    Raises:
        TypeError: `model` is not a module.
    """
    _check(model, "unconvert")
    modules = _names(model)
    _set_classes([(m, _CONVERTED.get(type(m)) or own_class(m)) for m in modules])
    return model


def _set_classes(changes):
    """Changes modules' classes, all of them or none."""
    done = []
    try:
        for module, kind in changes:
            if type(module) is not kind:
                before = type(module)
                object.__setattr__(module, "__class__", kind)
                done.append((module, before))
    except BaseException:
        for module, before in done:
            object.__setattr__(module, "__class__", before)
        raise
