"""The update op of braze.optim.Adam and AdamW. Kernels: csrc/cuda/adam/."""

from braze._ops._update import update_op

adam_ = update_op("adam_", states=4, averages=11)
