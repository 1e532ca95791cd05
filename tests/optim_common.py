"""What the tests of optimizers share: parameters, and steps of fixed gradients."""

import functools

import torch

from braze.testing import WAYS, assert_by_rule, mover

SHAPES = [(5,), (), (0,), (64, 33), (3, 4, 5), (4097,), (1,)]


def parameters(device, dtype, shapes=SHAPES):
    generator = torch.Generator().manual_seed(3 + torch.initial_seed())
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes
    ]


def gradient(value, generator):
    """A random one for this parameter, of its dtype."""
    grad = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    if value.dtype == torch.float16:  # in which the squares of small ones vanish
        grad += 0.5 * grad.sign()
    return grad.to(value.dtype)


def train(optimizer_class, values, steps=5, dtype=None, lr=0.1, clip=None, move=None, **options):
    """The parameters after `steps` steps of fixed random gradients, and the optimizer.

    Args:
        clip: the norm that torch clips the gradients to.
        move: of braze.testing: what values and gradients go through.
    """
    move = move or torch.clone
    params = [torch.nn.Parameter(move(v.to(dtype or v.dtype))) for v in values]
    optimizer = optimizer_class(params, lr=lr, **options)
    generator = torch.Generator().manual_seed(4 + torch.initial_seed())
    for _ in range(steps):
        for p, v in zip(params, values, strict=True):
            p.grad = move(gradient(v, generator).to(p))
        if clip:
            torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
    return params, optimizer


def moved_trainings(optimizer_class, values, **options):
    """For assert_by_rule's `moved`: a function that gives, and makes once, what train() does in
    float64 with values and gradients a rounding off."""

    @functools.cache
    def trainings():
        return [
            train(optimizer_class, values, dtype=torch.float64, move=mover(way), **options)
            for way in WAYS
        ]

    return trainings


def compare_by_rule(ours, stock, reference, terms, moved=None):
    """Parameters and states of three trainings, each (parameters, optimizer).

    Args:
        terms: of assert_by_rule.
        moved: of moved_trainings().
    """
    trainings = (ours, stock, reference)

    def compare(of, what):
        others = moved and (lambda: [of(*training) for training in moved()])
        results = [of(*training) for training in trainings]
        # Each step rounds parameters and states to their dtype.
        assert_by_rule(*results, 4, what, terms, others, results[0].dtype)

    for i, p in enumerate(ours[0]):
        compare(lambda params, _, i=i: params[i], "parameter")
        state, other = ours[1].state[p], stock[1].state[stock[0][i]]
        assert list(state) == list(other)
        for key, value in state.items():
            if value is None:
                assert other[key] is None
            elif key != "step":
                compare(lambda params, o, i=i, key=key: o.state[params[i]][key], key)
            elif isinstance(value, torch.Tensor):
                assert value.dtype == torch.float32
                assert value.device == p.device
                assert value == other[key]


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
