"""braze.optim.SGD on DTensor parameters, in two processes, against torch.optim.SGD there."""

import socket

import pytest
import torch
import torch.multiprocessing as mp

import sharded_workers

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch without gloo",
)


def test_matches_stock(device):
    """In one pair of processes, whose start takes longer than the checks."""
    if device == "cuda" and torch.cuda.device_count() < sharded_workers.RANKS:
        pytest.skip("a GPU for each process")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(sharded_workers.run, (port, device), nprocs=sharded_workers.RANKS)
