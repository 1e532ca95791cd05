"""The LAMB update op; used by braze.optim.LAMB. Kernels: csrc/cuda/lamb/."""

from braze._ops._update import update_op

lamb_ = update_op("lamb_", states=3, averages=11)
