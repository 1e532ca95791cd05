"""The SGD update op; used by braze.optim.SGD. Kernels: csrc/cuda/sgd/."""

from braze._ops._update import update_op

sgd_ = update_op("sgd_", states=1, averages=11)
