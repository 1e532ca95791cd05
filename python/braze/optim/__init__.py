"""Drop-in optimisers: subclasses of torch's own, whose state dicts load both ways."""

from braze.optim._multi_tensor import MultiTensor as MultiTensor
from braze.optim.adam import Adam, AdamW
from braze.optim.averages import EMA
from braze.optim.lamb import LAMB
from braze.optim.muon import Muon
from braze.optim.rmsprop import RMSprop
from braze.optim.sgd import SGD

__all__ = ["EMA", "LAMB", "SGD", "Adam", "AdamW", "Muon", "RMSprop"]
