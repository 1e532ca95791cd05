"""What the tests of braze.Population share: members, and each trained alone."""

import torch

import braze
from braze.data import DeviceLoader
from braze.population import branches
from step_common import MAKERS, Net, assert_same, loss_fn

N = 5
SEEDS = [11, 12, 13, 14, 15]
RATES = [0.1, 0.2, 0.05, 0.02, 0.15]


def maker(device):
    return lambda: Net().to(device)


def optimizer_of(model, i, name, device):
    """With a learning rate of its own."""
    optimizer = MAKERS[name](model.parameters(), device == "cuda")
    for group in optimizer.param_groups:
        group["lr"] *= 10 * RATES[i]
    return optimizer


def scheduler_of(optimizer, i):
    """Another one for each member."""
    if i % 2:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5 + 0.1 * i)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20 + i)


def make(device, name="braze SGD", make_model=None, n=N, **options):
    """A population's step, and its schedulers."""
    population = braze.Population(make_model or maker(device), n, seeds=SEEDS[:n])
    optimizers = [optimizer_of(m, i, name, device) for i, m in enumerate(population)]
    step = population.train_step(loss_fn, optimizers, **options)
    return step, [scheduler_of(optimizer, i) for i, optimizer in enumerate(optimizers)]


def alone(i, device, name="braze SGD", make_model=None, **options):
    """The step of a member by itself, and its scheduler."""
    torch.manual_seed(SEEDS[i])
    model = (make_model or maker(device))()
    optimizer = optimizer_of(model, i, name, device)
    step = braze.TrainStep(model, loss_fn, optimizer, **options)
    return step, scheduler_of(optimizer, i)


def as_member(device, n=N):
    """Kernels count on as many multiprocessors as those of one of `n` small members."""
    chains = -(-n // -(-n // branches.STREAMS))
    return braze.multiprocessors(branches.share_of(torch.device(device), chains))


def train_alone(i, device, data, epochs=None, **options):
    """A member by itself on its batches, or for as many epochs on its loader."""
    with as_member(device):
        return _train_alone(i, device, data, epochs, **options)


def _train_alone(i, device, data, epochs, **options):
    step, scheduler = alone(i, device, **options)
    losses, norms = [], []
    if epochs is not None:
        step.bind(data)
        for _ in range(epochs):
            losses += step.epoch()
            scheduler.step()
        return step, losses, norms
    for batch in data:
        losses.append(step(*batch))
        norms.append(None if step.grad_norm is None else float(step.grad_norm))
        scheduler.step()
    return step, losses, norms


def assert_members(step, losses, trained):
    """trained: of each member what :func:`train_alone` returns."""
    for i, (lone, lone_losses, _) in enumerate(trained):
        assert_same(step.population[i], [row[i] for row in losses], lone.model, lone_losses)
        mine, theirs = step.optimizers[i].state_dict(), lone.optimizer.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        for key, state in mine["state"].items():
            for what, value in state.items():
                other = theirs["state"][key][what]
                assert torch.equal(value, other) if torch.is_tensor(value) else value == other
        for p, q in zip(step.population[i].parameters(), lone.model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)


def data_set(device, seed=3):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (20, 4, 4), dtype=torch.uint8, generator=generator)
    labels = torch.randint(5, (20,), generator=generator)
    return images.to(device), labels.to(device)


def loaders(device, n=N, own_data=False, **options):
    """Of one data set, or of as many as there are members; each with an order of its own."""
    shared = data_set(device)
    options = {"mean": 0.5, "std": 0.25, "batch_size": 6} | options
    return [
        DeviceLoader(
            *(data_set(device, 30 + i) if own_data else shared), device=device, seed=i, **options
        )
        for i in range(n)
    ]
