"""Drop-in functions: the names, argument order and defaults of ``torch.nn.functional``."""

from braze._ops.batch_norm import batch_norm
from braze._ops.pool import avg_pool2d, max_pool2d
from braze._ops.relu import relu

__all__ = ["avg_pool2d", "batch_norm", "max_pool2d", "relu"]
