"""What each process of test_sgd_sharded.py does."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as sharded_states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import braze

RANKS = 2
OPTIONS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.3, "maximize": True},
]


def everything(device):
    fully_sharded(device)
    other_optimizers(device)
    checkpointed(device)
    any_placement(device)


def model(device, mesh):
    """Whole, then sharded: one bias is shorter than the mesh, so that a rank has nothing of it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.ReLU(), torch.nn.Linear(7, 1))
    net.to(device)
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return net


def batches(device, count=4):
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [torch.randn(5, 6, generator=generator).to(device) for _ in range(count)]


def train(net, optimizer, data, scaler=None, max_norm=None):
    norms = []
    for x in data:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        if max_norm:
            if scaler:
                scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm))
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return norms


def assert_close(ours, stock):
    assert type(ours) is type(stock)
    if isinstance(ours, DTensor):
        assert ours.placements == stock.placements
        ours, stock = ours.full_tensor(), stock.full_tensor()
    torch.testing.assert_close(ours, stock)


def compare(trained):
    """Two pairs of a model and its optimizer, ours and torch's."""
    (net, optimizer), (stock, stock_optimizer) = trained
    for p, q in zip(net.parameters(), stock.parameters(), strict=True):
        assert isinstance(p, DTensor)
        assert_close(p.detach(), q.detach())
        state, stock_state = optimizer.state[p], stock_optimizer.state[q]
        for key, value in stock_state.items():
            assert key == "step" or (state.get(key) is None) == (value is None)
            if value is not None:
                assert_close(state[key], value.to(state[key].device))


def fully_sharded(device):
    mesh = init_device_mesh(device, (RANKS,))
    # Both with and without a scaler and clipping, each with other options.
    for options, scaled, max_norm in zip(
        OPTIONS, (False, True, False, True), (None, None, 0.5, 0.5), strict=True
    ):
        trained, last_norms = [], []
        for optimizer_class in (braze.optim.SGD, torch.optim.SGD):
            net = model(device, mesh)
            optimizer = optimizer_class(net.parameters(), lr=0.1, **options)
            scaler = torch.amp.GradScaler(device, init_scale=64.0) if scaled else None
            data = batches(device)
            if scaled and dist.get_rank() == 1:
                data[0] = data[0] * float("inf")  # the other rank has to skip, too
            last_norms += train(net, optimizer, data, scaler, max_norm)[-1:]
            trained.append((net, optimizer))
            assert all(p.isfinite().full_tensor().all() for p in net.parameters())
        compare(trained)
        if max_norm:
            assert_close(*last_norms)


def other_optimizers(device):
    """Clipped in the update, with a step that is skipped; an average; what is refused."""
    mesh = init_device_mesh(device, (RANKS,))
    data = batches(device)
    data[1] = data[1] * (float("inf") if dist.get_rank() == 1 else 1.0)
    for name, options in (
        ("SGD", {"momentum": 0.9}),
        ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
        ("RMSprop", {"centered": True, "momentum": 0.9}),
    ):
        trained = []
        for namespace, max_norm in ((braze, None), (torch, 0.1)):
            net = model(device, mesh)
            clip = {} if max_norm else {"max_grad_norm": 0.1}
            optimizer = getattr(namespace.optim, name)(net.parameters(), lr=0.1, **options, **clip)
            scaler = torch.amp.GradScaler(device, init_scale=64.0)
            train(net, optimizer, data, scaler, max_norm)
            trained.append((net, optimizer))
        compare(trained)
    whole = torch.arange(12.0, device=device).reshape(4, 3)
    net = torch.nn.ParameterList([distribute_tensor(whole.clone(), mesh, [Shard(0)])])
    optimizer = braze.optim.Adam(net.parameters(), lr=0.1)
    average = braze.optim.EMA(net, optimizer, 0.5)
    stock = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        net[0].grad = distribute_tensor(whole.clone(), mesh, [Shard(0)])
        optimizer.step()
        stock.update_parameters(net)
    assert_close(average.module[0].detach(), stock.module[0].detach())
    for whole in (braze.optim.Muon, braze.optim.LAMB):
        p = torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).to(device))
        p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match="does not support DTensor parameters"):
            whole([p]).step()


def checkpointed(device):
    """States gathered whole, and loaded into the other optimizer's model."""
    mesh = init_device_mesh(device, (RANKS,))
    classes = (braze.optim.SGD, torch.optim.SGD)
    for first in classes:
        net = model(device, mesh)
        optimizer = first(net.parameters(), lr=0.1, momentum=0.9)
        train(net, optimizer, batches(device, 2))
        whole = sharded_states.StateDictOptions(full_state_dict=True)
        states = sharded_states.get_state_dict(net, optimizer, options=whole)
        assert not isinstance(states[1]["state"]["0.weight"]["momentum_buffer"], DTensor)
        trained = []
        for second in classes:
            other = model(device, mesh)
            fresh = second(other.parameters(), lr=1.0, momentum=0.5)
            model_state, optimizer_state = states
            sharded_states.set_state_dict(
                other,
                fresh,
                model_state_dict=model_state,
                optim_state_dict=optimizer_state,
                options=whole,
            )
            train(other, fresh, batches(device, 4)[2:])
            trained.append((other, fresh))
        compare(trained)
        train(net, optimizer, batches(device, 4)[2:])
        compare([(net, optimizer), trained[1]])


def any_placement(device):
    """Gradients laid out as their parameters, and otherwise; versions; what is refused."""
    mesh = init_device_mesh(device, (RANKS,))
    whole = torch.arange(12.0, device=device).reshape(4, 3)
    gradient = torch.full((4, 3), 2.0, device=device)
    for placement in (Shard(0), Shard(1), Replicate()):
        for of_gradient in (Shard(0), Replicate(), Partial()):
            trained = []
            # (foreach, which torch takes on GPUs, refuses DTensors beside others.)
            for make in (braze.optim.SGD, functools.partial(torch.optim.SGD, foreach=False)):
                p = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [placement]))
                plain = torch.nn.Parameter(torch.ones(2, device=device))
                optimizer = make([p, plain], lr=0.1, momentum=0.9, dampening=0.5)
                plain.grad = torch.ones_like(plain)
                for _ in range(2):
                    if isinstance(of_gradient, Partial):
                        local = gradient / RANKS
                        p.grad = DTensor.from_local(local, mesh, [of_gradient])
                    else:
                        p.grad = distribute_tensor(gradient, mesh, [of_gradient])
                    optimizer.step()
                trained.append((p, plain))
            (p, plain), (q, stock_plain) = trained
            assert p.placements == (placement,)
            torch.testing.assert_close(p.full_tensor(), q.full_tensor())
            torch.testing.assert_close(plain, stock_plain)
    p = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    optimizer = braze.optim.SGD([p], lr=0.1, momentum=0.9)
    p.grad = distribute_tensor(gradient, mesh, [Shard(0)])
    for _ in range(2):
        product, version = (p * p).sum(), p._version
        optimizer.step()
        assert p._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    before = p.full_tensor().clone()
    for wrong, message in (
        (
            torch.zeros(4, 3, device=device),
            "momentum buffer of a DTensor parameter to be a DTensor",
        ),
        (distribute_tensor(whole, mesh, [Replicate()]), "momentum buffer .* placements"),
    ):
        optimizer.state[p]["momentum_buffer"] = wrong
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
    assert torch.equal(p.full_tensor(), before)
