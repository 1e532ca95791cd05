"""Training of many models of one architecture in one step.

User page: docs/population.md.

- `models`: the public :class:`Population`; `random_states` are its members' random numbers.
- `train_step`: the public :class:`PopulationStep`.
- `parts`: what it consists of; `loaders`: the members' loaders as one.
- `work`: the step as work for the graphs of :mod:`braze.step`; `body`: the step itself, whose
  members' steps are those of a :class:`braze.TrainStep`; `branches` has what they share.
"""

from braze.population.models import Population
from braze.population.train_step import PopulationStep

__all__ = ["Population", "PopulationStep"]
