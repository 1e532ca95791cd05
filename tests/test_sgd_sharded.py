"""braze.optim.SGD on DTensor parameters, in two processes, against torch.optim.SGD there."""

import pytest
import torch
from processes import start

import sharded_workers

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch without gloo",
)


def test_matches_stock(device):
    """In one pair of processes, whose start takes longer than the checks."""
    start(sharded_workers.RANKS, device, sharded_workers.everything)
