"""The random numbers of a population's members: those that each would draw alone."""

import contextlib

import torch


class RandomStates:
    """For each member the state of torch's default generator, as it would be without the others.

    On a GPU a state is a generator that takes the default one's place while a member runs; a graph
    keeps count of it as of the default one.

    Args:
        seeds: one for each member.
    """

    def __init__(self, seeds):
        self.seeds = seeds
        self._cpu = [None] * len(seeds)  # states
        self._found = {}  # member -> state that its GPU's generator was in when it was made
        self._generators = {}  # GPU -> a generator for each member
        #: set where a member draws on a GPU, but while a graph is captured
        self.drew = False

    @contextlib.contextmanager
    def making(self, i):
        """Torch's default generators begin with the member's seed within this block. Yields a
        function that is told where the model is, at the end of the block."""
        torch.manual_seed(self.seeds[i])

        def made(device):
            self._cpu[i] = torch.get_rng_state()
            if device.type == "cuda":
                self._found[i] = torch.cuda.get_rng_state(device)

        yield made

    @contextlib.contextmanager
    def of(self, i, device):
        """Within this block torch's default generator of the device is the member's."""
        if device.type != "cuda":
            outer = torch.get_rng_state()
            torch.set_rng_state(self._cpu[i])
            try:
                yield
            finally:
                self._cpu[i] = torch.get_rng_state()
                torch.set_rng_state(outer)
            return
        mine = self.generators(device)[i]
        default = torch.cuda.default_generators[device.index]
        capturing = torch.cuda.is_current_stream_capturing()
        before = None if capturing else mine.get_state()
        outer = default.graphsafe_get_state()
        default.graphsafe_set_state(mine)
        try:
            yield
        finally:
            default.graphsafe_set_state(outer)
            if not capturing and not torch.equal(before, mine.get_state()):
                self.drew = True

    def generators(self, device):
        """The members' generators on a GPU."""
        if device not in self._generators:
            made = []
            for i, seed in enumerate(self.seeds):
                generator = torch.Generator(device).manual_seed(seed)
                if i in self._found:
                    generator.set_state(self._found[i])
                made.append(generator)
            self._generators[device] = made
        return self._generators[device]

    # ---- saving ----

    def state(self, device):
        """A dict for each member, of "cpu" and, on a GPU, "cuda"."""
        states = [{"cpu": state.clone()} for state in self._cpu]
        if device.type == "cuda":
            for state, generator in zip(states, self.generators(device), strict=True):
                state["cuda"] = generator.get_state()
        return states

    def load(self, states, device):
        self._cpu = [state["cpu"].cpu().clone() for state in states]
        if device.type == "cuda":
            for state, generator in zip(states, self.generators(device), strict=True):
                if "cuda" in state:
                    generator.set_state(state["cuda"].cpu())

    def __getstate__(self):
        """For pickle and copy: states in the place of generators."""
        state = dict(vars(self), _generators={})
        for made in self._generators.values():  # of one GPU, but for a population that was moved
            state["_found"] = {i: generator.get_state() for i, generator in enumerate(made)}
        return state


@contextlib.contextmanager
def kept():
    """Torch's default generators are afterwards what they were before."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        elif torch.cuda.is_available():
            # Their seed, in the place of the block's, which may have to wait for CUDA's begin.
            torch.cuda.manual_seed_all(torch.initial_seed())
