"""What a captured function does with gradients that are there when it is called."""

import torch
from torch.utils import _pytree as pytree

from braze._C import have_gradients

# It reads or writes the gradient; puts another, or None, in its place unread; leaves it alone.
_READS, _DROPS, _KEEPS = "reads", "drops", "keeps"
_MAX_KINDS = 64


class _Noted(torch.Tensor):
    """A gradient that notes whether a function has been given it."""

    touched = False

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, _Noted):
                leaf.touched = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _version(tensor):
    return 0 if tensor.is_inference() else tensor._version


def _note_accumulation(p, noted):
    """A hook: autograd adds to a gradient, out of place with ``create_graph``, by no function that
    the gradient could note."""

    def before_it_adds(_):
        if p.grad is noted:
            noted.touched = True

    return p.register_hook(before_it_adds)


class Known:
    """What calls of one kind do with the gradients of parameters, as far as it has been seen.

    Args:
        params: all of them.
    """

    def __init__(self, params):
        self._params = params
        self.does = {}  # parameter -> what is done with its gradient
        self.learn({})

    def learn(self, does):
        """Takes note of what has been seen now."""
        self.does.update(does)
        self.reads = [p for p, done in self.does.items() if done is _READS]
        #: those that are read, each with its gradient where graphs read it; None: not there yet
        self.brought = None
        self._unknown = [(p, None) for p in self._params if p not in self.does]

    def lacks_one(self):
        """Whether a gradient is there of which nothing is known."""
        return not have_gradients(self._unknown)


class Gradients:
    """Learns in eager calls what the function does with gradients of before the call.

    Most functions drop them unread, by ``zero_grad()`` before the backward pass or at their end.
    What others add to, or update by, has to lie where the graph reads it: in memory that is kept
    here, to which it is copied if it lies elsewhere.

    Args:
        parts: the function's :class:`braze.step.watched.Watched`.
    """

    def __init__(self, parts):
        self._parts = parts
        self._known = {}  # kind of call -> Known
        self._last = None, None  # of these, that of the last call
        self._memory = {}  # parameter -> where a graph reads its gradient

    def forget(self):
        self._known.clear()
        self._last = None, None
        self._memory.clear()

    def known(self, kind):
        """The :class:`Known` of calls of that kind."""
        last, known = self._last
        if kind is not last:
            if kind not in self._known and len(self._known) >= _MAX_KINDS:
                del self._known[next(iter(self._known))]
            known = self._known.setdefault(kind, Known(self._parts.params))
            self._last = kind, known
        return known

    def key(self, known):
        """Which gradients are there, of those that are read."""
        return tuple([p.grad is not None for p in known.reads])

    def bring(self, known):
        """Brings those that are read to where graphs read them."""
        if known.reads and (known.brought is None or not have_gradients(known.brought)):
            self._bring(known)
            known.brought = [(p, p.grad) for p in known.reads]

    @torch.no_grad()
    def _bring(self, known):
        for p in known.reads:
            if p.grad is None or p.grad is self._memory.get(p):
                continue
            memory = self._memory.get(p)
            if memory is None or memory.dtype != p.grad.dtype or memory.shape != p.grad.shape:
                with torch.inference_mode(False):
                    memory = self._memory[p] = torch.empty_like(p.grad)
            p.grad = memory.copy_(p.grad)

    def watch(self, known, run):
        """``run()``; notes what it does with gradients of which nothing is known.

        Nothing is learnt of a run that ends with an exception."""
        watched, learnt = [], {}
        for p in self._parts.params:
            if p.grad is not None and p not in known.does:
                noted = p.grad.detach().as_subclass(_Noted)
                hook = _note_accumulation(p, noted) if p.requires_grad else None
                watched.append((p, p.grad, noted, _version(p.grad), hook))
                p.grad = noted
        try:
            result = run()
        finally:
            for p, grad, noted, version, hook in watched:
                stays = p.grad is noted
                if stays:
                    p.grad = grad
                if hook is not None:
                    hook.remove()
                if noted.touched or _version(grad) != version:
                    learnt[p] = _READS
                else:
                    learnt[p] = _KEEPS if stays else _DROPS
        if learnt:
            known.learn(learnt)
        return result

    def left(self, before):
        """Behind a capture that began with the gradients `before`, which are in place again then:
        what the function has left, as a list of parameters, each with its gradient or None, but
        for those that it leaves alone."""
        left = []
        for p, was in zip(self._parts.params, before, strict=True):
            if was is None or p.grad is not was or was is self._memory.get(p):
                left.append((p, p.grad))
            p.grad = was
        return left

    def leave(self, left, known):
        """Behind a replay: `left`, as the function does it."""
        if have_gradients(left):
            return
        for p, grad in left:
            if p.grad is not grad and not (grad is None and known.does.get(p) is _KEEPS):
                p.grad = grad
