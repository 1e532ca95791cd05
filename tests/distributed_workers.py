"""What each process of test_distributed.py does."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import braze
from braze.data import DeviceLoader
from braze.step.exchange import Exchange
from braze.step.ranks import Ranks, renew_reducer

F = nn.functional
STEPS = 4


def everything(device):
    synchronised(device)
    replicated(device)
    accumulated(device)
    with_buffers(device)
    gathered(device)
    in_16_bits(device)
    without_a_gradient(device)
    sharded(device)
    resumed(device)
    agreement(device)


def network(device, norm=True):
    """In float64, where what differs in order alone is equal. One channel: strides of extents of 1
    are arbitrary."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 5)]
    if norm:
        layers.insert(1, nn.BatchNorm2d(4))
        layers.insert(5, nn.BatchNorm2d(4))
    net = nn.Sequential(*layers)
    return net.to(device, torch.float64, memory_format=torch.channels_last)


def batch(device, step, rank, size=3):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64)
    x = x.to(device, memory_format=torch.channels_last)
    return x, torch.randint(5, (size,), generator=generator).to(device)


def sgd(net):
    return braze.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def assert_same(ours, expected):
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, msg=lambda m, n=name: f"{n}: {m}")


def replicated(device):
    """Against one process that goes through the ranks' parts one by one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = DistributedDataParallel(braze.convert(network(device)))
    step = braze.TrainStep(net, F.cross_entropy, sgd(net), max_grad_norm=0.5)
    alone = network(device)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    parts = [copy.deepcopy(alone) for _ in range(ranks)]  # whose buffers are their own
    count = 14 if device == "cuda" else STEPS  # beyond the eager calls
    for number in range(count):
        if device == "cpu" and number == 2:
            accumulated_on_a_stream(net)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of gradients' strides
            loss = step(*batch(device, number, rank))
        optimizer.zero_grad()
        for other, part in enumerate(parts):
            part.load_state_dict(dict(alone.named_parameters()), strict=False)
            part.zero_grad()
            x, y = batch(device, number, other)
            expected = F.cross_entropy(part(x), y)
            expected.backward()
            if other == rank:
                torch.testing.assert_close(loss, expected.detach())
            for p, q in zip(alone.parameters(), part.parameters(), strict=True):
                p.grad = q.grad / ranks + (0 if p.grad is None else p.grad)
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        torch.testing.assert_close(step.grad_norm, norm)
        optimizer.step()
    assert_same(net.module.state_dict(), dict(alone.named_parameters()))
    assert not step._parts.ranks.read_gradients()  # which braze exchanges
    if rank == 0:  # whose buffers the others get
        assert_same(net.module.state_dict(), dict(parts[rank].named_buffers()))


def with_buffers(device):
    """The first rank's go to all before a forward pass, unless the module is told otherwise."""
    for broadcast in (True, False):
        norm = nn.BatchNorm2d(3).to(device, torch.float64)
        net = DistributedDataParallel(norm, broadcast_buffers=broadcast)
        step = braze.TrainStep(net, lambda y, target: (y - target).square().sum(), sgd(net))
        norm.running_mean.fill_(1.0 + dist.get_rank())
        zeros = torch.zeros(2, 3, 4, 4, device=device, dtype=torch.float64)
        step(zeros, zeros)
        before = 1 if broadcast else 1 + dist.get_rank()
        assert norm.running_mean.tolist() == [0.9 * before] * 3
        assert norm.num_batches_tracked == 1


class Halves(dict):
    """Sources of gradients, which it keeps until the exchange is over: matrices' have been made in
    16 bits."""

    def get(self, address, grad):
        return self.setdefault(address, grad.bfloat16() if grad.dim() > 1 else grad)


def gathered(device):
    """Two processes send matrices' gradients as they were made; any others, sums in float32."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6), nn.Flatten(), nn.Linear(6 * 16, 7)
    alone = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
    net = DistributedDataParallel(copy.deepcopy(alone))
    # All together; a bucket for each parameter, of which a vector's has as many bytes as a sum.
    for most_bytes, gathers, sums in ((1 << 20, 1, 0), (1, 2, 4)):
        exchange = Exchange(net.process_group, most_bytes)
        with pytest.MonkeyPatch.context() as patch:
            gathered = counted(patch, dist, "all_gather_into_tensor")
            summed = counted(patch, Exchange, "_sum")
            for number in range(2):
                check_exchange(exchange, net, alone, device, number)
        counts = (gathers, sums) if ranks == 2 else (0, gathers + sums)
        assert (len(gathered), len(summed)) == tuple(2 * count for count in counts)


def check_exchange(exchange, net, alone, device, number):
    """Of one backward pass, against the means of what all ranks' would make."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, halves = [image(device, number, other) for other in range(ranks)], Halves()
    net.zero_grad()
    with net.no_sync(), torch.enable_grad():
        exchange.begin(net)
        loss = net(images[rank]).square().sum()
        with exchange.active(SimpleNamespace(sources=halves)):
            loss.backward()
        exchange.finish(None)
    halves.clear()
    losses = [alone(x).square().sum() for x in images]
    grads = [torch.autograd.grad(loss, alone.parameters()) for loss in losses]
    for p, *made in zip(net.parameters(), *grads, strict=True):
        mean = sum(Halves().get(0, g).float() / ranks for g in made)
        torch.testing.assert_close(p.grad, mean, rtol=1e-6, atol=1e-8)
        if ranks == 2:
            assert torch.equal(p.grad, mean)


def image(device, number, rank):
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(2, 3, 6, 6, generator=generator)
    return x.to(device, memory_format=torch.channels_last)


def in_16_bits(device):
    """Under autocast a captured step gathers; its weights are those of sums, bit for bit."""
    weights = []
    for may_gather in (True, False):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 8)
        net = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
        net = DistributedDataParallel(braze.convert(net))
        step = braze.TrainStep(net, F.cross_entropy, sgd(net), autocast=torch.bfloat16)
        with pytest.MonkeyPatch.context() as patch:
            counts = counted(patch, dist, "all_gather_into_tensor")
            if not may_gather:
                patch.setattr(Exchange, "_gathers", lambda *_: False)
            for number in range(STEPS):
                x = image(device, number, dist.get_rank())
                step(x, torch.arange(2, device=device))
        on_gpu = device == "cuda" and dist.get_world_size() == 2
        assert bool(counts) == (may_gather and on_gpu)
        weights.append([p.detach().clone() for p in net.parameters()])
    for ours, expected in zip(*weights, strict=True):
        assert torch.equal(ours, expected)


def counted(patch, module, name):
    """A list that gets longer with each call of a module's function."""
    calls, function = [], getattr(module, name)

    def call(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    patch.setattr(module, name, call)
    return calls


def without_a_gradient(device):
    """Of a parameter that nobody uses, which the others would wait for."""

    class Unused(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.other = nn.Parameter(torch.ones(3))

    x, target = torch.ones(2, 2, device=device), torch.zeros(2, 2, device=device)
    for allowed in (False, True):
        net = DistributedDataParallel(Unused().to(device), find_unused_parameters=allowed)
        step = braze.TrainStep(net, F.mse_loss, sgd(net))
        if allowed:
            step(x, target)
            continue
        with pytest.raises(RuntimeError, match="a parameter got no gradient"):
            step(x, target)


def accumulated_on_a_stream(net):
    """As captured steps ask for: nodes that accumulate gradients are made anew, once."""
    parameter = next(net.parameters())
    # torch.cuda.stream takes a CPU's stream only where there is no GPU.
    stream = torch.cuda.Stream() if torch.cuda.is_available() else torch.Stream("cpu")

    def node():
        return parameter.expand_as(parameter).grad_fn.next_functions[0][0]

    node().metadata["made"] = "before"
    Ranks([net]).accumulate_on(stream)
    assert "made" not in node().metadata
    node().metadata["made"] = "on the stream"
    Ranks([net]).accumulate_on(stream)
    assert node().metadata["made"] == "on the stream"


def accumulated(device):
    """One exchange in a window, and the numbers of the plain loop, bit for bit."""
    rank, window, exchanges = dist.get_rank(), 2, []
    torch.backends.cudnn.deterministic = True

    def average(_, bucket):
        exchanges.append(bucket.index())
        done = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return done.get_future().then(lambda f: f.value()[0])

    nets = [DistributedDataParallel(braze.convert(network(device))) for _ in range(2)]
    nets[0].register_comm_hook(None, average)
    renew_reducer(nets[0])  # with its hook
    optimizers = [sgd(net) for net in nets]
    step = braze.TrainStep(nets[0], F.cross_entropy, optimizers[0], accumulate=window)
    for number in range(2 * window):
        step(*batch(device, number, rank))
        assert len(exchanges) == (number + 1) // window
    for number in range(2 * window):
        x, y = batch(device, number, rank)
        if number % window == 0:
            optimizers[1].zero_grad()
            with nets[1].no_sync():
                (F.cross_entropy(nets[1](x), y) / window).backward()
        else:
            (F.cross_entropy(nets[1](x), y) / window).backward()
            optimizers[1].step()
    expected = nets[1].state_dict()
    assert step._parts.ranks.read_gradients()  # which the module exchanges, by its hook
    assert all(torch.equal(ours, expected[name]) for name, ours in nets[0].state_dict().items())


def sharded(device):
    """fully_shard: against the loop over torch's own layers."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    nets = [braze.convert(network(device)), network(device)]
    for net in nets:
        net.to(memory_format=torch.contiguous_format)  # fully_shard takes no others
        fully_shard(net[7], mesh=mesh)
        fully_shard(net, mesh=mesh)
    stock = torch.optim.SGD(nets[1].parameters(), lr=0.1, momentum=0.9)
    step = braze.TrainStep(nets[0], F.cross_entropy, sgd(nets[0]), accumulate=2, max_grad_norm=0.5)
    for number in range(STEPS):
        x, y = batch(device, number, dist.get_rank())
        loss = step(x, y)
        expected = F.cross_entropy(nets[1](x), y)
        torch.testing.assert_close(loss, expected.detach())
        (expected / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(nets[1].parameters(), 0.5)
            stock.step()
            stock.zero_grad()
    for ours, expected in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), expected.full_tensor())


def synchronised(device):
    """SyncBatchNorm: against one process that has the whole batch, of which ranks have parts of
    different sizes, one of them none."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for momentum, affine, tracked in ((0.1, True, True), (None, True, True), (0.3, False, False)):
        settings = {"momentum": momentum, "affine": affine, "track_running_stats": tracked}
        norm = nn.SyncBatchNorm(5, **settings).to(device, torch.float64)
        alone = nn.BatchNorm2d(5, **settings).to(device, torch.float64)
        if affine:
            for layer in (norm, alone):
                nn.init.normal_(layer.weight, generator=torch.Generator(device).manual_seed(7))
        norm = braze.convert(norm)
        assert isinstance(norm, nn.SyncBatchNorm)
        assert type(norm) is braze.nn.SyncBatchNorm
        for form in (torch.contiguous_format, torch.channels_last):
            generator = torch.Generator().manual_seed(3)
            sizes = [2 * other for other in range(ranks)]
            x, g = (torch.randn(sum(sizes), 5, 4, 3, generator=generator) + 3 for _ in range(2))
            x, g = (t.to(device, torch.float64, memory_format=form) for t in (x, g))
            mine = x.split(sizes)[rank].clone(memory_format=form).requires_grad_()
            x.requires_grad_()
            y = norm(mine)
            y.backward(g.split(sizes)[rank])
            expected = alone(x)
            expected.backward(g)
            torch.testing.assert_close(y, expected.split(sizes)[rank])
            torch.testing.assert_close(mine.grad, x.grad.split(sizes)[rank])
            for p, q in zip(norm.parameters(), alone.parameters(), strict=True):
                dist.all_reduce(p.grad)  # as DistributedDataParallel would, but for the mean
                torch.testing.assert_close(p.grad, q.grad)
                p.grad = q.grad = None
            assert_same(norm.state_dict(), alone.state_dict())
    norm.eval()
    x = torch.randn(4, 5, 2, 2, device=device, dtype=torch.float64)
    torch.testing.assert_close(norm(x), alone.eval()(x))
    # DistributedDataParallel's mean of the ranks' gradients is that of the whole batch's loss.
    model, whole = network(device), network(device)
    net = DistributedDataParallel(model)  # which on a CPU refuses layers that it finds at first
    braze.convert(nn.SyncBatchNorm.convert_sync_batchnorm(net))
    step = braze.TrainStep(net, F.cross_entropy, sgd(net))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for number in range(STEPS):
        step(*batch(device, number, rank))
        parts = zip(*(batch(device, number, other) for other in range(ranks)), strict=True)
        x, y = (torch.cat(part) for part in parts)
        optimizer.zero_grad()
        F.cross_entropy(whole(x), y).backward()
        optimizer.step()
    assert_same(net.module.state_dict(), whole.state_dict())


def resumed(device):
    """An epoch begun by all ranks and ended by each one alone, with the whole batches."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(256, (16 * ranks, 6, 6), dtype=torch.uint8, generator=generator)
    labels = torch.arange(16 * ranks) % 5

    def bound(net, size, num_replicas, at):
        loader = DeviceLoader(
            images, labels, size, device=device, dtype=torch.float64, std=0.5,
            num_replicas=num_replicas, rank=at,
        )  # fmt: skip
        return braze.TrainStep(net, F.cross_entropy, sgd(net)).bind(loader)

    def bare():
        return braze.convert(network(device, False))

    together = DistributedDataParallel(bare())
    step = bound(together, 4, ranks, rank)
    for number, _ in enumerate(step.epoch()):
        if number == 1:
            state = copy.deepcopy(step.state_dict())
    groups = [dist.new_group([other]) for other in range(ranks)]
    alone = DistributedDataParallel(bare(), process_group=groups[rank])
    unwrapped = bare()
    for net in (alone, unwrapped):
        step = bound(net, 4 * ranks, 1, 0)
        step.load_state_dict(copy.deepcopy(state))  # torch's optimizers keep what they load
        assert len(list(step.epoch())) == 2  # of four batches
    assert_same(alone.state_dict(), together.state_dict())
    assert_same(unwrapped.state_dict(), together.module.state_dict())
    step.load_state_dict(state | {"model": alone.state_dict()})  # with the wrapper's names
    assert_same(unwrapped.state_dict(), together.module.state_dict())


def agreement(device):
    """A capture that fails on one rank fails on all."""
    net = DistributedDataParallel(network(device))
    ranks = Ranks(list(net.modules()))
    assert ranks.agree(True)
    assert not ranks.agree(dist.get_rank() > 0)
    assert not ranks.agree(False)


def one_fails(device):
    """The last rank has a label out of range in its second step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = DistributedDataParallel(braze.convert(network(device)))
    step = braze.TrainStep(net, F.cross_entropy, sgd(net))
    for number in range(STEPS):
        x, y = batch(device, number, rank)
        if rank == ranks - 1 and number == 1:
            y = y + 100
        step(x, y).item()  # else nobody would miss the gradients of the other
