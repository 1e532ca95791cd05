"""What captured work reads and writes beside its arguments, and whether that is still so."""

import weakref

import torch

from braze._C import held, holds, read, reads, same, state
from braze.optim import MultiTensor
from braze.step.ranks import Ranks
from braze.step.rates import holds_groups

# Hundreds of modules are looked at in every call, so by what runs in C.
_STRUCTURE = "_modules", "_parameters"
# They count their steps on the CPU whatever the settings.
_UNCAPTURABLE = (torch.optim.Adafactor, torch.optim.Adagrad)


class Watched:
    """Modules and optimizers that graphs depend on, as :meth:`inspect` has read them.

    A subclass says which: :meth:`roots`, :meth:`optimizers` and what else has to stay the same,
    :meth:`others`; and of whom errors speak, :attr:`caller`.
    """

    caller = None
    #: see :class:`Ranks`
    exchanges = False
    _found_on = "the modules' and optimizers' parameters and buffers"

    def __init__(self):
        self.device = None
        self.params, self.modules = [], []  # the modules' and the optimizers'; with submodules
        #: where the modules' buffers lay when :meth:`key` was called last
        self.buffers = b""
        self.ranks = Ranks(())
        self._structure, self._beside, self._hooked = [], [], []
        self._wrappers = []  # optimizers that read another's groups
        self._places, self._found = [], []  # of the others' groups, and what was there

    def roots(self):
        """The modules, without those inside of them."""
        raise NotImplementedError

    def optimizers(self):
        raise NotImplementedError

    def others(self):
        """What is compared by identity beside modules, parameters and parameter groups."""
        return []

    def check_capturable(self):
        """Raises ValueError where an optimizer waits for the GPU."""
        for optimizer in self.optimizers():
            name = type(optimizer).__name__
            if isinstance(optimizer, _UNCAPTURABLE):
                raise ValueError(f"{self.caller}: {name} cannot be captured in a CUDA graph")
            counts_on_cpu = not isinstance(optimizer, MultiTensor) and any(
                not group.get("capturable", True) for group in optimizer.param_groups
            )
            if counts_on_cpu:
                raise ValueError(
                    f"{self.caller}: {name} with capturable=False counts its steps on the CPU; "
                    f"expected {name}(..., capturable=True)"
                )

    def inspect(self, on_reload):
        """Reads modules and optimizers: parameters, device; refuses what cannot work.

        Args:
            on_reload: a method, called as long as its object lives when an optimizer has loaded a
                state: its tensors have new memory then, of which graphs know nothing.

        Raises:
            ValueError: nothing has been read then.
        """
        roots, optimizers = self.roots(), self.optimizers()
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise ValueError(
                f"{self.caller}: LBFGS calls the model by itself, several times in a step"
            )
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        owned = [p for group in groups for p in group["params"]]
        params = [p for root in roots for p in root.parameters()]
        params = list(dict.fromkeys([*params, *self.loose_params(), *owned]))
        buffers = [b for root in roots for b in root.buffers()]
        device = self._only_device({t.device for t in (*params, *buffers)})
        if device is not None and device.type == "cuda":
            self.check_capturable()
        self.params, self.device = params, device
        hooked = self._hooked
        self._hooked = list(optimizers)
        for optimizer in optimizers:
            if any(optimizer is known for known in hooked):
                continue
            reloaded = weakref.WeakMethod(on_reload)
            optimizer.register_load_state_dict_post_hook(
                lambda _, reloaded=reloaded: (call := reloaded()) and call()
            )
        self.modules = list(dict.fromkeys(m for root in roots for m in root.modules()))
        self.ranks = Ranks(self.modules, self.exchanges)
        self._structure = held(self.modules, _STRUCTURE)
        self._wrappers = [optimizer for optimizer in optimizers if not holds_groups(optimizer)]
        self._places = [place for optimizer in optimizers for place in _places_of(optimizer)]
        self._found = read(self._places, None)
        self._beside = self._beside_modules()

    def loose_params(self):
        """Parameters that belong to none of the modules."""
        return []

    def _only_device(self, devices):
        if len(devices) != 1:
            found = ", ".join(sorted(map(str, devices))) or "none"
            raise ValueError(
                f"{self.caller}: expected {self._found_on} on one device, but found {found}"
            )
        return next(iter(devices))

    def are_the_same(self):
        """Whether what :meth:`inspect` has read still holds."""
        if self.params and self.params[0].device != self.device:
            return False  # the model has been moved
        # The same objects, compared by identity: the same work. What these lists hold cannot be
        # freed, so that no new object takes an old one's place unseen.
        return (
            same(self._beside_modules(), self._beside)
            and reads(self._places, None, self._found)
            and holds(self.modules, _STRUCTURE, self._structure)
        )

    def _beside_modules(self):
        parts = [*self.others(), *self.optimizers()]
        for optimizer in self._wrappers:
            for group in optimizer.param_groups:
                parts.append(group)
                parts += group["params"]
        return parts

    def key(self):
        """What of it a graph freezes: where parameters lie, ``requires_grad``, modules' modes."""
        key, self.buffers = state(self.params, self.modules)
        return key

    def gradients(self):
        """The parameters that have a gradient, each with it."""
        return [(p, p.grad) for p in self.params if p.grad is not None]

    def host_states(self):
        """What else Python code may change while it is recorded: objects as
        :class:`braze.step.host_state.HostState`."""
        return []


def _places_of(optimizer):
    """Where it has its groups and their parameters, for ``braze._C.read``."""
    if not holds_groups(optimizer):
        return []
    groups = optimizer.param_groups
    places = [(vars(optimizer), ("param_groups",)), (groups, None)]
    for group in groups:
        places += (group, ("params",)), (group["params"], None)
    return places
