"""Drop-in functions: the names, argument order and defaults of ``torch.nn.functional``."""

from braze._ops.matmul import linear
from braze._ops.relu import relu

__all__ = ["linear", "relu"]
