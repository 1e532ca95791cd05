"""What the tests of optimizers share: parameters, and steps of fixed gradients."""

import torch

SHAPES = [(5,), (), (0,), (64, 33), (3, 4, 5), (4097,), (1,)]


def parameters(device, dtype, shapes=SHAPES):
    generator = torch.Generator().manual_seed(3 + torch.initial_seed())
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes
    ]


def train(optimizer_class, values, steps=5, dtype=None, lr=0.1, clip=None, **options):
    """The parameters after `steps` steps of fixed random gradients, and the optimizer.

    Args:
        clip: the norm that torch clips the gradients to.
    """
    params = [torch.nn.Parameter(v.to(dtype or v.dtype).clone()) for v in values]
    optimizer = optimizer_class(params, lr=lr, **options)
    generator = torch.Generator().manual_seed(4 + torch.initial_seed())
    for _ in range(steps):
        for p, v in zip(params, values, strict=True):
            grad = torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.dtype)
            p.grad = grad.to(p)
        if clip:
            torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
    return params, optimizer


def scaled_steps(optimizer_class, device, values, restart=None, **options):
    """A parameter after scaled steps with these gradients, and its optimizer.

    Args:
        restart: a function of the optimizer, called after the first step; it returns the one to go
            on with.
    """
    p = torch.nn.Parameter(torch.ones(5, device=device))
    optimizer = optimizer_class([p], lr=0.1, **options)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for i, value in enumerate(values):
        optimizer.zero_grad()
        scaler.scale((p * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if i == 0 and restart is not None:
            optimizer = restart(optimizer)
            (p,) = optimizer.param_groups[0]["params"]
    return p, optimizer


def captured_steps(optimizer_class, values, rates, **options):
    """The parameters after steps with gradients of ones, the first eager and the others replays of
    one CUDA graph, which reads the learning rate on the device; and the optimizer."""
    params = [torch.nn.Parameter(v.clone()) for v in values]
    lr = torch.tensor(rates[0], device=values[0].device)
    optimizer = optimizer_class(params, lr=lr, **options)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for rate in rates[1:]:
        lr.fill_(rate)
        graph.replay()
    return params, optimizer


def steps_with_rates(optimizer_class, values, rates, clip=None):
    """The parameters after eager steps with gradients of ones."""
    params = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = optimizer_class(params, lr=rates[0])
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        for p in params:
            p.grad = torch.ones_like(p)
        if clip:
            torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
    return params


def scheduled(optimizer_class, device):
    """A parameter after steps with a learning rate that a scheduler halves."""
    p = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = optimizer_class([p], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
        scheduler.step()
    return p
