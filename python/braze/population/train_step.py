"""The training step of a population, as its user sees it."""

import torch
from torch.utils import _pytree as pytree

from braze._nvtx import ranged
from braze.population.body import PopulationBody
from braze.population.branches import chain_count, share_of
from braze.population.loaders import Loaders
from braze.population.parts import PopulationParts
from braze.population.work import PopulationWork
from braze.step.graphs import Graphs
from braze.step.step import Step


class PopulationStep(Step):
    """One training step of all members of a :class:`braze.Population`.

    Each call is one step of each member, whose losses, weights, buffers and random numbers are
    those of a :class:`braze.TrainStep` that trains it alone, bit for bit with
    ``torch.use_deterministic_algorithms(True)`` and, on a GPU, within
    ``braze.multiprocessors(step.multiprocessors)``. There all of it is one CUDA graph, in which
    members run side by side, each on its share of the multiprocessors: the first two calls with a
    shape run eagerly, the third is captured, and from then on it is replayed. On the CPU members
    run one after another.

    Learning rates, schedulers, what is noticed and what is not, what cannot be captured: as
    :class:`braze.TrainStep`. `population` and `optimizers` are what it was made of.

    Args:
        population: a :class:`braze.Population`.
        loss_fn, optimizers, autocast, max_grad_norm: see :meth:`braze.Population.train_step`.
    """

    def __init__(self, population, loss_fn, optimizers, *, autocast=None, max_grad_norm=None):
        parts = PopulationParts(population, loss_fn, optimizers, autocast, max_grad_norm)
        body = PopulationBody(parts)
        super().__init__(parts, body, Graphs(parts, PopulationWork(parts, body)))

    @property
    def population(self):
        return self._parts.population

    @property
    def optimizers(self):
        """Of the members, a list."""
        return self._parts.optimizers()

    @property
    def multiprocessors(self):
        """How many multiprocessors of the GPU each member's kernels count on: see
        :func:`braze.multiprocessors`. Of a single member, and on the CPU, whatever is set."""
        return share_of(self.device, chain_count(self.population))

    # ---- calling ----

    def __call__(self, *batch):
        """One step of all members on the same batch.

        Args:
            batch: the models' inputs, then the target: tensors, or tuples, lists and dicts of them.

        Returns:
            The losses, ``[n]`` on the device, which stay as they are. Reading them waits for the
            step.

        Raises:
            RuntimeError: the step cannot be captured, or something writes to what all members
                share. No member has been updated.
            torch.OutOfMemoryError: no memory for the capture; likewise.
        """
        return self._call(batch, False)

    def each(self, *batch):
        """One step of all members, each on a batch of its own.

        Args:
            batch: as for a call, but every tensor has a first dimension of `n`: member ``i`` is
                given ``x[i]``.

        Returns:
            The losses, ``[n]``, as a call does.

        Raises:
            ValueError: a tensor has another first dimension.
        """
        n = len(self.population)
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, torch.Tensor) and leaf.shape[:1] != (n,):
                raise ValueError(
                    f"Population: expected tensors with a first dimension of {n}, one for each "
                    f"member, but got {[*leaf.shape]}"
                )
        return self._call(batch, True)

    def _call(self, batch, each):
        if len(batch) < 2:
            raise TypeError(f"Population: expected inputs and a target, but got {len(batch)}")
        self._body.each = each
        return self._run(batch)

    _run = ranged("PopulationStep", Step._run)

    def bind(self, loaders):
        """Takes batches from the members' loaders: see :meth:`epoch`.

        Args:
            loaders: a :class:`braze.data.DeviceLoader` for each member, in a list, alike but for
                their orders and images. Loaders that share a data set (made of the same tensors on
                the device, or by ``copy.copy(loader)`` and ``restart(seed)``) are gathered from in
                one launch.

        Returns:
            The step itself.

        Raises:
            TypeError, ValueError: other loaders, not one for each member, or loaders that differ in
                batch size, number or shape of images, dtype, memory format or device.
        """
        loaders = Loaders(loaders, len(self.population))
        self._body.each = False
        return super().bind(loaders)

    # ---- saving ----

    def state_dict(self):
        """Everything that training goes on from: also within an epoch of :meth:`epoch`.

        Returns:
            Dict of "population", the models' state; "optimizers", a list; "loader" (None without);
            and "rng", a list with the random number generators of each member.
        """
        return {
            "population": self.population.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "loader": self._loader_state(),
            "rng": self._body.random.state(self.device),
        }

    def load_state_dict(self, state):
        """Goes on from a :meth:`state_dict`, with the same population, optimizers and loaders.

        Raises:
            KeyError: `state` is no such dict; nothing has been loaded.
            ValueError: it is of another number of members, or the loaders have fewer batches than
                it; nothing has been loaded.
            RuntimeError: models or optimizers do not fit, as torch says it.
        """
        missing = {"population", "optimizers", "loader", "rng"}.difference(state)
        if missing:
            raise KeyError(
                "Population: expected a dict of state_dict(), but it has no "
                f"{', '.join(map(repr, sorted(missing)))}"
            )
        n, loader = len(self.population), state["loader"]
        counts = {len(state["optimizers"]), len(state["rng"])}
        if loader is not None and self._parts.loader is not None:
            counts.add(len(loader["generator"]))
        if counts != {n}:
            raise ValueError(
                f"Population: expected the state of {n} members, but got that of "
                f"{len(state['optimizers'])}"
            )
        resume = self._resumption(loader)
        self.population.load_state_dict(state["population"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        resume()
        self._body.random.load(state["rng"], self.device)
        self.recapture()

    def __getstate__(self):
        raise TypeError(
            "Population: a step is neither pickled nor copied; save step.state_dict(), or pickle "
            "the population and its optimizers together"
        )
