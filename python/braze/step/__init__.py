"""Training as CUDA graphs.

User pages: docs/train_step.md, docs/capture.md; how it works: docs/cuda_graph.md.

What both have:

- `watched`: the modules and optimizers that graphs depend on, and whether they are still the same.
- `ranks`: what of them belongs to several processes.
- `graphs`: a graph for each kind of call: found, captured, replayed. `recording` records,
  `host_state` refuses and undoes what a graph would not repeat, `rates` has learning rates on the
  device.

Any function:

- `function`: the public :func:`capture`.
- `surroundings`: what its code reads beside its arguments.
- `function_work`: the function eagerly, recorded and replayed; `gradients` are those that are there
  when it is called.

A whole step, from the outside in:

- `train_step`: the public :class:`TrainStep`; `step` is what other steps have in common with it
  (:mod:`braze.population`).
- `parts`: what a step consists of.
- `step_work`: the step as work for graphs.
- `body`: one step as it runs eagerly and as it is recorded. `casts` casts parameters together,
  `batches` takes them from a loader, `moments` those of a batch's patches.
- `exchange`: the average of several processes' gradients, made beside the backward pass.
- `branches`: what a graph does concurrently with the chain of its kernels: `side_stream` has the
  gradients of parameters, `losses` keeps each replay's loss, `prefetch` gathers the next batch.

What a step has for the ops goes through :mod:`braze._step_scope`; ops import nothing from here.
"""

from braze.step.function import CapturedFunction, capture
from braze.step.train_step import TrainStep

__all__ = ["CapturedFunction", "TrainStep", "capture"]
