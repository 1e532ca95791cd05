"""The examples of braze.capture train, captured and not, with the same numbers."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import braze
from conftest import cuda_only
from fake_cuda import FakeCuda

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = ["cifar10_speedrun", "ppo_atari", "unet_dice", "wgan_gp"]
# Enough for the loss to fall, in a few seconds.
STEPS = {"cifar10_speedrun": 16, "ppo_atari": 8, "unet_dice": 12, "wgan_gp": 6}


@pytest.fixture(autouse=True)
def _examples_on_the_path(monkeypatch, deterministic):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delenv("BRAZE_DATA", raising=False)


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_the_plain_loop_does(device, name):
    example, loop, results = importlib.import_module(name), importlib.import_module("loop"), []
    for wrap in (braze.capture, lambda function: function):
        torch.manual_seed(0)
        one = example.build(device, smoke=True)
        results.append(loop.train(one, wrap, STEPS[name]))
    assert results[0] == results[1]
    assert sum(results[0][-3:]) < sum(results[0][:3])


@pytest.mark.parametrize("name", NAMES)
def test_is_captured_on_a_gpu(name, monkeypatch):
    """That is none: the third call is a graph, with the plain loop's numbers."""
    monkeypatch.setattr(torch, "half", torch.float32)  # for which CPUs take a tenth of the time
    example, loop, results = importlib.import_module(name), importlib.import_module("loop"), []
    with FakeCuda() as fake:
        for wrap in (braze.capture, lambda function: function):
            torch.manual_seed(0)
            results.append(loop.train(example.build("cuda", smoke=True), wrap, 4))
    assert results[0] == results[1]
    assert sum(event[0] == "replay" for event in fake.events) == 2


def test_as_a_program():
    command = [sys.executable, EXAMPLES / "ppo_atari.py", "--smoke"]
    paths = os.pathsep.join([str(Path(braze.__file__).parent.parent), *sys.path])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "32 steps in" in result.stdout


def test_a_sweep():
    pytest.importorskip("sklearn")
    command = [sys.executable, EXAMPLES / "population.py", "--digits", "--members", "2"]
    paths = os.pathsep.join([str(Path(braze.__file__).parent.parent), *sys.path])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    command += ["--epochs", "1", "--batch", "256"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "best: member 0, lr 0.001" in result.stdout


@cuda_only
@pytest.mark.parametrize("name", NAMES)
def test_times_both_sides(name, monkeypatch, capsys):
    """--compare, without the compiler, which takes longer than all else."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # as it is to be afterwards
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    torch.use_deterministic_algorithms(False)
    example, loop = importlib.import_module(name), importlib.import_module("loop")
    loop.compare(lambda device, stock=False: example.build(device, True, stock), rounds=1)
    assert capsys.readouterr().out.count("ms a step") == 2


@pytest.mark.parametrize("name", NAMES)
def test_the_rival_trains_too(name, monkeypatch):
    """What --compare times against, without its compiler."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    example, loop = importlib.import_module(name), importlib.import_module("loop")
    torch.manual_seed(0)
    losses = loop.train(example.build("cpu", smoke=True, stock=True), lambda f: f, 4)
    assert all(loss == loss for loss in losses)
