"""Functions run by several processes of one group. Their modules import no tests, so that a spawned
process imports nothing else."""

import datetime
import os
import socket
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def start(ranks, device, work, join=True):
    """Calls ``work(device)`` in each of `ranks` processes; on GPUs each has one of its own.

    Args:
        work: a function of a module.
        join: wait for all; else return ``torch.multiprocessing.spawn``'s context.
    """
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip("a GPU for each process")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return mp.spawn(_run, (ranks, port, device, work), nprocs=ranks, join=join)


def _run(rank, ranks, port, device, work):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=1),  # where one fails, the other would wait for it
    )
    # Each process leaves without the end of the interpreter. Meshes that torch caches keep threads
    # of Gloo, these the tensors of their last work: one that lets go of them while the interpreter
    # ends aborts the process (pytorch#179291), one that does so while the reducer of DDP lets go of
    # the group waits for the lock that the reducer holds.
    status = 0
    try:
        work(device)
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
