"""What the steps that users call have in common: loaders, epochs, and when graphs are made anew."""

import itertools

import torch
from torch.utils import _pytree as pytree

from braze._ops.cross_entropy import check_errors
from braze.step.step_work import StepCall


class Step:
    """A base of :class:`braze.TrainStep` and of the step of a :class:`braze.Population`.

    Args:
        parts: what the step consists of: a :class:`braze.step.watched.Watched` that has `loader`
            and `accumulate`.
        body: runs it, as :class:`braze.step.body.Body` does.
        graphs: its :class:`braze.step.graphs.Graphs`.
    """

    def __init__(self, parts, body, graphs):
        self._parts, self._body, self._graphs = parts, body, graphs
        #: the last update's gradient norm before clipping, on the device; the next call may
        #: overwrite it
        self.grad_norm = None
        self._micro_step = 0  # within the accumulation window
        self._epoch_state, self._position, self._skip = None, 0, 0
        self._inspect()

    @property
    def device(self):
        """Where the model was at the last call."""
        return self._parts.device

    def _inspect(self):
        self._parts.inspect(self.recapture)
        self._body.keep_gradients_of(self._parts.params)
        if self.device.type == "cuda":
            self._graphs.prepare()

    def bind(self, loader):
        """Takes batches from a :class:`braze.data.DeviceLoader`: see :meth:`epoch`.

        Returns:
            The step itself.

        Raises:
            TypeError: another loader.
            ValueError: its data set is not on the model's device.
        """
        caller = self._parts.caller
        if not hasattr(loader, "gather_next"):
            raise TypeError(
                f"{caller}: expected a braze.data.DeviceLoader, but got {type(loader).__name__}"
            )
        if loader.images.device != self.device:
            raise ValueError(
                f"{caller}: the model is on {self.device}, but the loader on {loader.images.device}"
            )
        self.recapture()
        self._parts.loader = loader
        self._body.batches.bind(loader)
        self._epoch_state, self._position, self._skip = None, 0, 0
        return self

    def epoch(self):
        """One epoch over the bound loader, gathering and normalising inside the captured step.

        After :meth:`load_state_dict` the first call goes on within the epoch of the saved state.

        Yields:
            The loss of each step, as a call returns it.

        Raises:
            RuntimeError: no loader has been bound.
        """
        loader = self._parts.loader
        if loader is None:
            raise RuntimeError(f"{self._parts.caller}: call bind(loader) before epoch()")
        self._epoch_state = loader.get_state()
        self._position, self._skip = self._skip, 0
        order, batch_size = loader.draw(), loader.batch_size
        sizes = enumerate(loader.batch_sizes())
        for number, size in itertools.islice(sizes, self._position, None):
            begin = number * batch_size
            loss = self._run((size,), (order, begin))
            self._position += 1
            yield loss
        self._epoch_state, self._position = None, 0

    def check(self):
        """Waits for the GPU and raises IndexError if a braze loss met a label out of range.

        A captured step cannot raise by itself: such a row's loss is NaN and its gradient zero.
        """
        if self.device.type == "cuda":
            check_errors(self.device)

    def recapture(self):
        """Forgets all graphs, after a change that the step cannot see.

        It sees shapes, hyper-parameters, train and eval mode, ``requires_grad``, autocast,
        precision, determinism, backends, replaced submodules, parameters and buffers and their new
        memory, and new parameter groups; not a module's other attributes, nor what Python code in
        the model decides by itself.
        """
        self._graphs.forget()
        self._body.relearn()

    def _run(self, batch, order=None):
        """order: of a batch of the loader: its epoch's order, and where in it the batch begins."""
        parts, body, gather = self._parts, self._body, order is not None
        if not parts.are_the_same():
            self.recapture()
            self._inspect()
        first, last = self._micro_step == 0, self._micro_step >= parts.accumulate - 1
        try:
            if parts.device.type == "cuda":
                leaves, spec = batch, None
                if not gather and not all(isinstance(x, torch.Tensor) for x in batch):
                    leaves, spec = pytree.tree_flatten(batch)
                call = StepCall(leaves, spec, order, first, last)
                loss, norm = self._graphs.run(call)
            else:
                if gather:
                    body.batches.seek(*order)
                loss, norm = body.run([*batch], gather, first, last)
                body.window_grads = parts.gradients()
        except BaseException:
            self._micro_step = 0  # the window starts anew
            body.batches.forget_place()
            body.clean_scaler()
            raise
        if gather:
            body.batches.advance(batch[0])
        if last:
            self.grad_norm = norm
        self._micro_step = 0 if last else self._micro_step + 1
        return loss

    # ---- saving ----

    def _loader_state(self):
        """Where the step is in the loader's epoch; None without a loader."""
        loader = self._parts.loader
        if loader is None:
            return None
        position = max(self._position, self._skip)
        return {
            "generator": loader.get_state() if self._epoch_state is None else self._epoch_state,
            "position": position,
            # Of all ranks together: it may go on with another number of them.
            "images": position * loader.batch_size * loader.num_replicas,
        }

    def _resumption(self, state):
        """A function that goes on within the epoch of a :meth:`_loader_state`.

        Raises:
            ValueError: the loader has fewer batches than the state.
        """
        loader = self._parts.loader
        if loader is None or state is None:
            return lambda: None
        position = _position(self._parts.caller, loader, state)

        def resume():
            # torch.load(map_location="cuda") has moved what belongs on the CPU.
            loader.set_state(pytree.tree_map(lambda t: t.cpu(), state["generator"]))
            self._epoch_state, self._position = None, 0
            self._skip = position

        return resume


def _position(caller, loader, state):
    """The batch of `loader` with which an epoch that was saved as `state` goes on."""
    position, images = state["position"], state.get("images")
    together = loader.batch_size * loader.num_replicas  # images of a step
    if images is not None:
        if images % together:
            raise ValueError(
                f"{caller}: the state is at image {images} of an epoch, but the loader's steps "
                f"are of {together} images; expected a batch size (times the number of ranks) that "
                "divides it"
            )
        position = images // together
    if position > len(loader):
        raise ValueError(
            f"{caller}: the state is at batch {position} of an epoch, but the loader has "
            f"{len(loader)}; expected the loader's settings as saved"
        )
    return position
