"""Drop-in functions: the names, argument order and defaults of ``torch.nn.functional``."""

from braze._ops.cross_entropy import cross_entropy
from braze._ops.nll_loss import nll_loss
from braze._ops.relu import relu
from braze._ops.softmax import log_softmax, softmax

__all__ = ["cross_entropy", "log_softmax", "nll_loss", "relu", "softmax"]
