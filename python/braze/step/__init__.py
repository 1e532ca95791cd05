"""A whole training step as one CUDA graph. User page: docs/train_step.md; how: docs/cuda_graph.md.

From the outside in:

- `train_step`: the public :class:`TrainStep`.
- `parts`: what a step consists of, and whether that is still so; `ranks`: what of it belongs to
  several processes.
- `graphs`: a graph for each kind of call: found, captured, replayed. `capture` records,
  `host_state` refuses and undoes what a graph would not repeat, `rates` has learning rates on the
  device.
- `body`: one step as it runs eagerly and as it is recorded. `casts` casts parameters together,
  `batches` takes them from a loader, `moments` those of a batch's patches.
- `branches`: what a graph does concurrently with the chain of its kernels: `side_stream` has the
  gradients of parameters, `losses` keeps each replay's loss, `prefetch` gathers the next batch.

What a step has for the ops goes through :mod:`braze._step_scope`; ops import nothing from here.
"""

from braze.step.train_step import TrainStep

__all__ = ["TrainStep"]
