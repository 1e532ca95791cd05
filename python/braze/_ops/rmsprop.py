"""The RMSprop update op; used by braze.optim.RMSprop. Kernels: csrc/cuda/rmsprop/."""

from braze._ops._update import update_op

rmsprop_ = update_op("rmsprop_", states=4, averages=10)
