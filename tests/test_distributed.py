"""TrainStep in several processes: DistributedDataParallel, fully_shard, their loader's parts."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import distributed_workers
import pytest
import torch
import torch.distributed as dist
from processes import start

from braze.step.ranks import forget_before_groups_end

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch without gloo",
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_same_as_one_process(device, ranks):
    """All in one group of processes, whose start takes longer than the checks."""
    start(ranks, device, distributed_workers.everything)


def test_where_one_fails_none_hangs(device):
    context = start(2, device, distributed_workers.one_fails, join=False)
    for process in context.processes:
        process.join(180)
    # NCCL's watchdog, which finds out on a GPU (after the group's minute, and it takes its time to
    # write down why), ends its process by a signal.
    codes = {1} if device == "cpu" else {1, -signal.SIGABRT}
    assert {process.exitcode for process in context.processes} <= codes


def test_mnist_under_torchrun(tmp_path, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("a GPU for each process")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [
        "--standalone",
        "-m",
        "braze",
        "mnist",
        "--limit",
        "1280",
        "--epochs",
        "2",
        "--lr",
        "0.05",
    ]
    command += ["--steps", "1", "--out", str(tmp_path)] + ["--device", "cpu"] * (device == "cpu")
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("2 processes, 64 images each") == 1  # the first speaks for all
    figures = json.loads((tmp_path / "mnist_ranks.json").read_text())
    assert figures["ranks"] == 2
    assert len(figures["losses"]) == 2 * 1280 // 128
    assert sum(figures["losses"][-5:]) / 5 < figures["losses"][0]


def test_graphs_go_before_their_group(monkeypatch):
    """NCCL would wait for ever for graphs that have its kernels, also where a script has taken
    ``destroy_process_group`` out of its module before."""
    destroy, shutdown, happened = dist.destroy_process_group, dist.ProcessGroup.shutdown, []

    class Graphs:
        def forget(self):
            happened.append("graphs")

    def noted(group):
        happened.append("group")
        return shutdown(group)

    monkeypatch.setattr(dist.ProcessGroup, "shutdown", noted)
    held, dropped = Graphs(), Graphs()
    for graphs in (held, dropped, held):
        forget_before_groups_end(graphs)
    del dropped, graphs
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    destroy()
    assert happened == ["graphs", "group"]


def test_example(tmp_path, device):
    """Two processes, and one that goes on from their checkpoint."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("a GPU for each process")
    path = Path(__file__).parent.parent / "examples" / "ddp_resnet.py"
    settings = ["--depth", "18", "--image", "32", "--lr", "0.01", "--sync"]
    settings += ["--checkpoint", str(tmp_path / "state")]
    env = os.environ if device == "cuda" else os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    losses = []
    for ranks, batch, steps in ((2, 8, 8), (1, 16, 2)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(path), *settings]
        command += ["--batch", str(batch), "--steps", str(steps)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
        assert result.returncode == 0, result.stderr
        losses += map(float, re.search(r"loss (\S+) -> (\S+)", result.stdout).groups())
    assert losses[1] < losses[0]
    assert losses[2] < losses[0]  # it goes on
