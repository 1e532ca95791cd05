"""A callback for Lightning. User page: docs/integrations.md."""

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

import braze


class ConvertCallback(Callback):
    """Converts the LightningModule in place (:func:`braze.convert`) for as long as the trainer uses
    it: before ``configure_optimizers``, until the end of ``fit``, ``validate``, ``test`` or
    ``predict``, which gives every module its own class back (:func:`braze.unconvert`).

    Parameters and state dicts stay what they are, so that checkpoints load with and without the
    callback. Loop, optimizers and precision are Lightning's: steps run eagerly, without
    :class:`braze.TrainStep`. Layers that ``configure_model`` makes are not there yet, and stay as
    they are.

    Args:
        strict: raises RuntimeError where a layer would be left alone, as `braze.convert` does.

    Attributes:
        report: what was done to the module, a :class:`braze.convert.Report`; None before.
    """

    def __init__(self, strict=False):
        self.strict = strict
        self.report = None

    def setup(self, trainer, pl_module, stage):
        braze.convert(pl_module, strict=self.strict)
        self.report = braze.convert_report(pl_module)
        rank_zero_info(f"braze: {str(self.report).splitlines()[-1]}")

    def teardown(self, trainer, pl_module, stage):
        braze.unconvert(pl_module)
