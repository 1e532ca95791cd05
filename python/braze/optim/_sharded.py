"""DTensor parameters: an element-wise update works on each rank's part alone."""

import sys


def _class():
    """DTensor, or None: nobody has one without this import, which takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return module and module.DTensor


def is_sharded(tensor):
    """Whether it is a DTensor."""
    kind = _class()
    return kind is not None and isinstance(tensor, kind)


def local(optimizer, param, grad, names, states):
    """This rank's parts of a parameter, its gradient and its states.

    A gradient that is laid out over the mesh in another way (a partial sum, for example) is
    redistributed first, which every rank does.

    Args:
        optimizer: its name, for errors.
        names: of the states.
        states: tensors, or None.

    Raises:
        RuntimeError: the gradient or a state is no DTensor, or on another mesh; a state is laid out
            in another way.
    """
    names = [name.replace("_", " ") for name in names]
    for name, t in zip(("gradient", *names), (grad, *states), strict=True):
        if t is None:
            continue
        if not is_sharded(t):
            raise RuntimeError(
                f"braze.optim.{optimizer}: expected the {name} of a DTensor parameter to be a "
                "DTensor too, but got a plain tensor; distribute it with torch.distributed.tensor."
                "distribute_tensor, or load states by torch.distributed.checkpoint.state_dict"
            )
        if t.device_mesh != param.device_mesh:
            raise RuntimeError(
                f"braze.optim.{optimizer}: expected the {name} of a DTensor parameter on its mesh "
                f"{param.device_mesh}, but got {t.device_mesh}"
            )
    for name, t in zip(names, states, strict=True):
        if t is not None and t.placements != param.placements:
            raise RuntimeError(
                f"braze.optim.{optimizer}: expected the {name} of a DTensor parameter to have its "
                f"placements {param.placements}, but got {t.placements}; redistribute it to them"
            )
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return _local(param), _local(grad), [None if t is None else _local(t) for t in states]


def locals_of(tensors):
    """The list, with DTensors replaced by this rank's parts."""
    kind = _class()
    return tensors if kind is None else [_local(t) if isinstance(t, kind) else t for t in tensors]


def _local(tensor):
    part = tensor.to_local()
    # A collective that runs on its own until somebody reads its result.
    return part.wait() if hasattr(part, "wait") else part
