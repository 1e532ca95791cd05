"""braze.Population, as its user sees it. User page: docs/population.md."""

import numbers

import torch

from braze.convert import convert
from braze.population.alike import check_alike
from braze.population.random_states import RandomStates, kept
from braze.population.train_step import PopulationStep


class Population(torch.nn.Module):
    """Models of one architecture, each with weights and random numbers of its own.

    They are trained together by :meth:`train_step`, each as it would be alone. A member is what

        torch.manual_seed(seed)
        model = make_model()

    makes, and its dropout goes on from there, as it would in a program that trains it alone.
    Torch's default random number generators are left as they were.

    ``len(population)``, ``population[i]`` and iteration are those of :attr:`models`. As a
    ``torch.nn.Module`` it is moved, saved and set to train or eval mode as a whole.

    Args:
        make_model: a function of no arguments that returns a new ``torch.nn.Module``; parameters
            and buffers of the same names, shapes and dtypes each time.
        n: number of members.
        seeds: `n` ints; by default consecutive ones, the first of which is drawn from torch's
            default generator.

    Raises:
        TypeError: an argument is unfit, or `make_model` returns no module.
        ValueError: `n` below 1, another number of seeds, members that share memory or differ in
            their architecture, or that belong to several processes (``DistributedDataParallel``).

    Example:
        >>> population = braze.Population(make_model, 32).convert()
        >>> optimizers = [braze.optim.SGD(m.parameters(), lr=r) for m, r in zip(population, rates)]
        >>> step = population.train_step(loss_fn, optimizers)
        >>> for images, labels in loader:
        ...     losses = step(images, labels)  # [32]
    """

    def __init__(self, make_model, n, seeds=None):
        super().__init__()
        if not callable(make_model) or isinstance(make_model, torch.nn.Module):
            raise TypeError(
                "Population: expected make_model to be a function that returns a new model, but "
                f"got {type(make_model).__name__}"
            )
        if isinstance(n, bool) or not isinstance(n, numbers.Integral):
            raise TypeError(f"Population: expected n to be an int, but got {n!r}")
        if n < 1:
            raise ValueError(f"Population: expected n of at least 1, but got {n}")
        self._random = RandomStates(_checked(seeds, n))
        models = []
        with kept():
            for i in range(n):
                with self._random.making(i) as made:
                    model = make_model()
                    if not isinstance(model, torch.nn.Module):
                        raise TypeError(
                            "Population: expected make_model() to return a torch.nn.Module, but "
                            f"got {type(model).__name__}"
                        )
                    tensors = [*model.parameters(), *model.buffers()]
                    made(tensors[0].device if tensors else torch.device("cpu"))
                models.append(model)
        check_alike(models)
        #: the members, a ``torch.nn.ModuleList``
        self.models = torch.nn.ModuleList(models)

    @property
    def seeds(self):
        """The members' seeds, a list of ints."""
        return list(self._random.seeds)

    def __len__(self):
        return len(self.models)

    def __getitem__(self, index):
        """A member; of a slice a list of members."""
        if isinstance(index, slice):
            return list(self.models)[index]
        return self.models[index]

    def __iter__(self):
        return iter(self.models)

    def convert(self, **options):
        """:func:`braze.convert` of each member, before optimizers are made.

        Args:
            options: of :func:`braze.convert`.

        Returns:
            The population itself.
        """
        for i, model in enumerate(self.models):
            self.models[i] = convert(model, **options)
        return self

    def train_step(self, loss_fn, optimizers, *, autocast=None, max_grad_norm=None):
        """One training step of all members: forward, loss, backward, clipping, update.

        Args:
            loss_fn: ``loss_fn(model(*inputs), target)``, a scalar; one for all members, which must
                not write to tensors of its own, or a list with one for each.
            optimizers: one for each member, in a list, each with hyper-parameters of its own; or a
                function that makes one of a model's parameters. On a GPU as those of a
                :class:`braze.TrainStep`.
            autocast: a dtype, or a ``torch.autocast``; None leaves autocast as the caller has it.
            max_grad_norm: clips the norm of each member's gradients.

        Returns:
            :class:`PopulationStep`

        Raises:
            TypeError, ValueError: an argument is unfit, the number of optimizers or losses is not
                that of the members, an optimizer has parameters of another member, or two share a
                parameter.
        """
        return PopulationStep(
            self, loss_fn, optimizers, autocast=autocast, max_grad_norm=max_grad_norm
        )


def _checked(seeds, n):
    if seeds is None:
        first = torch.randint(1 << 62, ()).item()
        return [first + i for i in range(n)]
    seeds = list(seeds)
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
            raise TypeError(f"Population: expected seeds to be ints, but got {seed!r}")
    if len(seeds) != n:
        raise ValueError(f"Population: expected {n} seeds, but got {len(seeds)}")
    return [int(seed) for seed in seeds]
