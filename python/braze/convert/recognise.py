"""What modules are that are no layers of torch's, found in the code of their classes without
running it: parts.py says what for."""

import inspect
import types

import torch

import braze.nn
from braze._stock import called_by, gives_way
from braze.convert.code import CALLS
from braze.convert.image_norm_code import ActivationCode, FunctionNormCode, OwnConvCode
from braze.convert.kinds import calls_more, calls_of
from braze.convert.modules import own_class, why_unsupported
from braze.convert.norms import NormCode
from braze.convert.parts import PARTS, TORCHS, NormAct, Pass, Sequence
from braze.convert.passes import PassCode
from braze.convert.permutes import PermuteCode
from braze.convert.pipelines import ChainCode
from braze.convert.response_norm_code import ResponseNormCode
from braze.convert.scale_code import ScaleCode
from braze.convert.source import Unknown
from braze.convert.squeeze_code import GateCode, SqueezeCode


def part_of(kind):
    """What instances of a class are in runs, one of the classes of parts.py, or None."""
    part = PARTS.get(kind)
    if part is None or (kind not in TORCHS and not part.same()):
        part = PARTS[kind] = _recognised(kind)
    return part


def _recognised(kind):
    forward = inspect.getattr_static(kind, "forward", None)
    called = all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in CALLS)
    if not isinstance(forward, types.FunctionType) or not called:
        return None
    if issubclass(kind, torch.nn.Sequential):
        same = _calls_children_in_turn(kind)
        return Sequence(same) if same() else None
    if kind.__module__.startswith(("torch.", "braze.")):
        return None
    try:
        if issubclass(kind, torch.nn.BatchNorm2d):
            code = NormCode(kind, forward)
            names = code.norm_and_more()
            return None if names is None else NormAct(names, code.same())
        if issubclass(kind, (torch.nn.GroupNorm, torch.nn.LayerNorm)):
            return FunctionNormCode(kind, forward).norm()
        if issubclass(kind, torch.nn.Conv2d):
            return OwnConvCode(kind, forward).own_conv()
        if issubclass(kind, _OTHER_LAYERS):
            return None
        return (
            ActivationCode(kind, forward).activates()
            or PassCode(kind, forward).passing()
            or PermuteCode(kind, forward).permutes()
            or ChainCode(kind, forward).chain()
            or SqueezeCode(kind, forward).squeeze()
            or GateCode(kind, forward).gate()
            or ResponseNormCode(kind, forward).response_norm()
            or ScaleCode(kind, forward).scales()
            or FunctionNormCode(kind, forward).norm()
        )
    except Unknown:
        return None


#: Layers of torch's whose subclasses are not looked at here.
_OTHER_LAYERS = tuple(
    kind
    for name, kind in vars(torch.nn).items()
    if isinstance(kind, type) and issubclass(kind, torch.nn.Module) and name != "Module"
)


def _dropped(module):
    p = module.p
    return type(p) in (int, float) and 0 <= p <= 1 and (p == 0 or not module.training)


def _unchanged(*places):
    torchs = gives_way(*places)
    return lambda: not torchs()


_IDENTITY = (torch.nn.Identity, "forward"), *calls_of(torch.nn.Identity)
_DROPOUT = (
    *((torch.nn.Dropout, "forward"), (torch.nn.functional, "dropout"), *called_by("dropout")),
    *calls_of(torch.nn.Dropout),
)
_IN_TURN = (torch.nn.Sequential, "forward"), (torch.nn.Sequential, "__iter__")
_other_in_turn = gives_way(*_IN_TURN)
_other_sequential = gives_way(*_IN_TURN, *calls_of(torch.nn.Sequential))


def _calls_children_in_turn(kind):
    """A function that tells whether a subclass of torch's Sequential has torch's code for that."""
    stock = torch.nn.Sequential

    def same():
        # What torch.export puts in the place of modules' `__call__` meanwhile is torch's own.
        compiling = torch.compiler.is_compiling()
        return not (_other_in_turn() if compiling else _other_sequential()) and (
            kind.forward is stock.forward
            and kind.__iter__ is stock.__iter__
            and kind.__call__ is stock.__call__
            and kind._call_impl is stock._call_impl
            and kind.__getattribute__ is stock.__getattribute__
        )

    return same


PARTS[torch.nn.Sequential] = Sequence(_calls_children_in_turn(torch.nn.Sequential))
PARTS[braze.nn.Sequential] = Sequence(_calls_children_in_turn(braze.nn.Sequential))
PARTS[torch.nn.Identity] = Pass(lambda module: True, (), _unchanged(*_IDENTITY))
PARTS[torch.nn.Dropout] = Pass(_dropped, ("p",), _unchanged(*_DROPOUT))


def kinds_of(module, kind_of, above=()):
    """The kinds of the links that a call of a module stands for, innermost first, or None.

    Args:
        kind_of: a function from a module to the kind of layer that it is or will be, or None.
        above: the modules that it is looked at within; one that holds itself is nothing.
    """
    if module in above:
        return None
    part = part_of(own_class(module))
    if part is None:
        kind = kind_of(module)
        return None if kind is None else (kind,)
    if calls_more(module) or why_unsupported(module):
        return None
    above = *above, module
    return part.kinds(module, lambda child: kinds_of(child, kind_of, above))
