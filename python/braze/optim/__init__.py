"""Drop-in optimisers: subclasses of torch's own, whose state dicts load both ways."""

from braze.optim.sgd import SGD

__all__ = ["SGD"]
