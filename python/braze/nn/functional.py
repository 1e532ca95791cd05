"""Drop-in functions: the names, argument order and defaults of ``torch.nn.functional``."""

from braze._ops.relu import relu
from braze._ops.softmax import log_softmax, softmax

__all__ = ["log_softmax", "relu", "softmax"]
