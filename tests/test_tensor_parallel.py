"""Two processes: tensor-parallel layers (DTensor) and FSDP2's, against stock's on one process."""

import copy
import functools

import pytest
import torch
from processes import start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import braze
import braze.nn.functional as F
from braze import nn


def check_parallel_layers(mesh):
    stock = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    for parallel in (
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)),
        braze.convert(copy.deepcopy(stock)),
    ):
        parallel.load_state_dict(stock.state_dict())
        parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = torch.randn(5, 6)
        actual, expected = parallel(x), stock(x)
        torch.testing.assert_close(actual, expected)
        stock.zero_grad()
        expected.square().sum().backward()
        actual.square().sum().backward()
        for p, q in zip(parallel.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


# function of ours and of stock -> its arguments
FUNCTIONS = [
    (F.conv2d_relu, lambda *a: torch.nn.functional.conv2d(*a).relu(), [(4, 3, 5, 5), (2, 3, 1, 1)]),
    (F.linear_relu, lambda *a: torch.nn.functional.linear(*a).relu(), [(4, 6), (8, 6), (8,)]),
    (braze.matmul, torch.matmul, [(4, 6), (6, 2)]),
    (F.relu, torch.relu, [(4, 6)]),
    (F.softmax, torch.nn.functional.softmax, [(4, 6)]),
]


def check_functions(mesh):
    for ours, stock, shapes in FUNCTIONS:
        tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
        places = [Shard(0), *[Replicate()] * (len(tensors) - 1)]
        shards = [
            distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
            for t, p in zip(tensors, places, strict=True)
        ]
        settings = {"dim": 1} if ours is F.softmax else {}
        actual, expected = ours(*shards, **settings), stock(*tensors, **settings)
        torch.testing.assert_close(actual.full_tensor(), expected)
        wanted = torch.autograd.grad(expected.square().sum(), tensors)
        for g, w in zip(torch.autograd.grad(actual.square().sum(), shards), wanted, strict=True):
            torch.testing.assert_close(g.full_tensor(), w)


def check_fsdp(mesh):
    def model(n):
        return n.Sequential(
            n.Conv2d(1, 4, 3, padding=1),
            n.BatchNorm2d(4),
            n.ReLU(),
            n.MaxPool2d(2),
            n.Flatten(),
            n.Linear(36, 5),
        )

    stock = model(torch.nn)
    for sharded in (model(nn), braze.convert(copy.deepcopy(stock))):
        reference = copy.deepcopy(stock)
        sharded.load_state_dict(stock.state_dict())
        for layer in (sharded[0], sharded[5], sharded):
            fully_shard(layer, mesh=mesh)
        x = torch.randn(8, 1, 6, 6)  # the same on both, so that the mean of gradients is each one's
        sharded(x).square().sum().backward()
        reference(x).square().sum().backward()
        for p, q in zip(sharded.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sharded[1].running_var, reference[1].running_var)


def on_a_mesh(check, device):
    torch.manual_seed(0)
    check(init_device_mesh(device, (2,)))


@pytest.mark.parametrize("check", [check_parallel_layers, check_functions, check_fsdp])
def test_on_two_processes(check):
    start(2, "cpu", functools.partial(on_a_mesh, check))
