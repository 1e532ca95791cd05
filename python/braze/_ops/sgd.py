"""The SGD update op; used by braze.optim.SGD, and by Muon, whose steps are in bfloat16 also where
parameters are in float32 (`grads_in_16_bits`). Kernels: csrc/cuda/sgd/."""

from braze._ops._update import update_op

sgd_ = update_op("sgd_", states=1, averages=11)
