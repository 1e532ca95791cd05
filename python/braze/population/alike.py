"""Whether models can be the members of one population."""

import torch

from braze.step.ranks import Ranks


def check_alike(models):
    """Raises where models differ in names, shapes, dtypes or devices of parameters and buffers,
    share memory, or belong to several processes.

    Raises:
        ValueError
    """
    first, owners = _tensors(models[0]), {}
    for i, model in enumerate(models):
        if Ranks(list(model.modules())).are_several():
            raise ValueError(
                "Population: expected models of this process alone, but a member is in "
                "DistributedDataParallel or fully_shard; let each process train its own members"
            )
        tensors = _tensors(model)
        for kind, mine, wanted in zip(("parameters", "buffers"), tensors, first, strict=True):
            if mine.keys() != wanted.keys():
                names = sorted(mine.keys() ^ wanted.keys()) or ["their order"]
                raise ValueError(
                    f"Population: expected members of one architecture, but {kind} of member {i} "
                    f"differ from member 0's: {', '.join(names[:4])}"
                )
            for name, tensor in mine.items():
                if _described(tensor) != _described(wanted[name]):
                    raise ValueError(
                        f"Population: expected members of one architecture, but {name!r} is "
                        f"{_shown(wanted[name])} of member 0 and {_shown(tensor)} of member {i}"
                    )
                other = owners.setdefault(_place(tensor), i)
                if other != i:
                    raise ValueError(
                        f"Population: expected members with tensors of their own, but {name!r} of "
                        f"member {i} is memory of member {other}; make_model has to make a new "
                        "model each time"
                    )


def _tensors(model):
    return dict(model.named_parameters()), dict(model.named_buffers())


def _described(tensor):
    return tensor.shape, tensor.dtype, tensor.device


def _shown(tensor):
    return f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]} on {tensor.device}"


def _place(tensor):
    lies = not isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin) and tensor.numel()
    return tensor.data_ptr() if lies else id(tensor)
