"""What a population's training step consists of."""

import torch

from braze.population.alike import check_alike
from braze.step.parts import StepParts
from braze.step.watched import Watched


class MemberParts(StepParts):
    """What a member's step consists of."""

    caller = "Population"


class PopulationParts(Watched):
    """The arguments of a :class:`braze.population.PopulationStep`, and what :meth:`inspect` reads
    of them and of the population.

    Raises:
        TypeError, ValueError: an argument is unfit.
    """

    caller = "Population"
    _found_on = "the members' parameters and buffers and the optimizers' parameters"
    accumulate = 1

    def __init__(self, population, loss_fn, optimizers, autocast, max_grad_norm):
        super().__init__()
        self.population, self.loader = population, None
        models, n = list(population.models), len(population)
        losses = _one_each("loss_fn", loss_fn, n)
        if callable(optimizers):
            optimizers = [optimizers(model.parameters()) for model in models]
        #: a member's parts, for each
        self.members = [
            MemberParts(model, loss, optimizer, autocast, None, 1, max_grad_norm)
            for model, loss, optimizer in zip(
                models, losses, _one_each("optimizers", optimizers, n), strict=True
            )
        ]
        self.max_grad_norm = self.members[0].max_grad_norm
        #: whether all members have one and the same
        self.shares_loss = callable(loss_fn)

    def roots(self):
        return list(self.population.models)

    def optimizers(self):
        return [member.optimizer for member in self.members]

    def others(self):
        parts = [*self.population.models, *[member.loss_fn for member in self.members]]
        if self.loader is not None:
            parts += self.loader.dtype, self.loader.memory_format
        return parts

    def inspect(self, on_reload):
        models = self.roots()
        if len(models) != len(self.members):
            raise ValueError(
                f"Population: the step was made for {len(self.members)} members, but there are "
                f"{len(models)} now"
            )
        check_alike(models)
        self._check_owners(models)
        super().inspect(on_reload)
        for member, model in zip(self.members, models, strict=True):
            member.model = model
            member.inspect(on_reload)

    def _check_owners(self, models):
        owners = {p: i for i, model in enumerate(models) for p in model.parameters()}
        for i, member in enumerate(self.members):
            for group in member.optimizer.param_groups:
                for p in group["params"]:
                    owner = owners.setdefault(p, i)
                    if owner != i:
                        raise ValueError(
                            f"Population: expected optimizers in the order of the members, but "
                            f"number {i} has a parameter {[*p.shape]} of member {owner}"
                        )

    def update_takes_casts(self):
        """Of each member."""
        return [member.update_takes_casts() for member in self.members]

    def tensors_of_loss(self):
        """Tensors of the loss function that all members share."""
        loss = self.members[0].loss_fn
        if not self.shares_loss:
            return []
        owned = [*loss.parameters(), *loss.buffers()] if isinstance(loss, torch.nn.Module) else []
        return owned + [t for t in getattr(loss, "__dict__", {}).values() if _is_tensor(t)]


def _one_each(name, given, n):
    """`given` as a list with an item for each member."""
    if name == "loss_fn" and callable(given):
        return [given] * n
    if not isinstance(given, (list, tuple)):
        wanted = "callable or a list of callables" if name == "loss_fn" else "a list of optimizers"
        raise TypeError(
            f"Population: expected {name} to be {wanted}, but got {type(given).__name__}"
        )
    if len(given) != n:
        raise ValueError(f"Population: expected {n} in {name}, but got {len(given)}")
    return list(given)


def _is_tensor(thing):
    return isinstance(thing, torch.Tensor)
