"""braze.optim.Muon against torch.optim.Muon; errors of both against float64."""

import copy
import functools
import importlib
import math
from pathlib import Path

import pytest
import torch
from optim_common import captured_steps, gradient, parameters, steps_with_rates, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import braze
from braze.optim import muon
from braze.optim._branches import shared_out
from braze.testing import WAYS, mover
from common import assert_by_rule
from conftest import cuda_only
from fake_cuda import FakeCuda
from step_common import assert_same, batches, loss_fn, plain_loop

# Wide, tall, square, several of one shape, a vector, and nothing.
SHAPES = [(16, 50), (50, 16), (33, 33), (16, 50), (1, 7), (16, 50), (7, 1), (0, 4), (3, 0)]
OPTIONS = [
    {},
    {"nesterov": False, "weight_decay": 0.0, "momentum": 0.5},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"adjust_lr_fn": "original", "ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
]


def exact(values, steps=5, lr=0.1, move=torch.clone, **options):
    """Parameters and momentum as train() leaves them, in float64, nothing rounded to bfloat16."""
    options = {"weight_decay": 0.1, "momentum": 0.95, "ns_steps": 5, "eps": 1e-7} | options
    a, b, c = options.get("ns_coefficients", (3.4445, -4.7750, 2.0315))
    momentum = options["momentum"]
    params = [move(v.double()) for v in values]
    buffers = [torch.zeros_like(p) for p in params]
    generator = torch.Generator().manual_seed(4 + torch.initial_seed())
    for _ in range(steps):
        for p, v, buffer in zip(params, values, buffers, strict=True):
            grad = move(gradient(v, generator).to(p))
            buffer.mul_(momentum).add_(grad, alpha=1 - momentum)
            x = (1 - momentum) * grad + momentum * buffer
            x = (x if options.get("nesterov", True) else buffer).flatten(1)
            x = x / x.norm().clamp(min=options["eps"])
            for _ in range(options["ns_steps"]):
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            rows, columns = x.shape
            ratio = math.sqrt(max(1, rows / columns)) if columns else 1
            if options.get("adjust_lr_fn") == "match_rms_adamw":
                ratio = 0.2 * math.sqrt(max(rows, columns))
            p.mul_(1 - lr * options["weight_decay"]).sub_(lr * ratio * x.view_as(p))
    return params, buffers


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_matches_stock(device, dtype, options):
    # torch divides by the number of columns
    values = parameters(device, dtype, SHAPES if "adjust_lr_fn" in options else SHAPES[:-1])
    if options.get("adjust_lr_fn") == "original":
        values = values[:-1]
    ours, optimizer = train(braze.optim.Muon, values, **options)
    stock, other = train(torch.optim.Muon, values, **options)

    @functools.cache
    def moved():
        return [exact(values, move=mover(way), **options)[0] for way in WAYS]

    for i, (a, s, r, m) in enumerate(zip(ours, stock, *exact(values, **options), strict=True)):
        others = functools.partial(lambda i: [params[i] for params in moved()], i)
        assert_by_rule(a, s, r, moved=others, arithmetic=torch.bfloat16)
        mine, theirs = (o.state[p] for o, p in ((optimizer, a), (other, s)))
        assert list(mine) == list(theirs)
        buffer = mine["momentum_buffer"]
        assert_by_rule(buffer, theirs["momentum_buffer"], m, what="momentum", terms=50)
        if dtype == torch.bfloat16 and not options.get("nesterov", True):
            # torch divides the buffer itself by its norm there, and is far off.
            torch.testing.assert_close(buffer, m.to(dtype), atol=0.02, rtol=0.02)
    assert optimizer.state_dict()["param_groups"] == other.state_dict()["param_groups"]


@pytest.mark.parametrize("shape", [(8, 6, 3, 3), (64, 2, 3, 3), (8, 4, 5), (6, 4, 1, 1)], ids=str)
def test_convolutions_are_flattened(device, dtype, shape):
    """As torch does the matrices; in either layout, with gradients in either."""
    # Of several matrices, so that it is no matter of luck whose largest error is the largest.
    values = parameters(device, dtype, [shape] * 6)
    flat = [v.flatten(1) for v in values]
    stock, _ = train(torch.optim.Muon, flat)
    reference, _ = exact(flat)
    ours, optimizer = train(braze.optim.Muon, values)
    layouts = [ours]
    if len(shape) == 4:
        last = [v.to(memory_format=torch.channels_last) for v in values]
        layouts.append(train(braze.optim.Muon, last)[0])
        for p in layouts[-1]:
            assert p.is_contiguous(memory_format=torch.channels_last)
    for trained in layouts:
        assert_by_rule(torch.stack(trained).flatten(2), torch.stack(stock), torch.stack(reference))
    assert optimizer.state[ours[0]]["momentum_buffer"].shape == shape


def test_as_in_the_published_speed_run(device, monkeypatch):
    """The class of airbench94_muon.py, whose momentum is 1 / (1 - momentum) times as long."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
    monkeypatch.setattr(torch, "compile", lambda function: function)
    published = importlib.import_module("published_muon").PublishedMuon
    values = parameters(device, torch.float32, [(8, 6, 3, 3)] * 6)
    settings = {"weight_decay": 0, "momentum": 0.6, "ns_steps": 3}
    ours, _ = train(braze.optim.Muon, values, **settings)
    theirs, _ = train(published, values, momentum=0.6)
    reference, _ = exact(values, **settings)
    assert_by_rule(*map(torch.stack, (ours, theirs, reference)))


def test_gradients_and_parameters_of_other_layouts(device):
    values = parameters(device, torch.float32, [(12, 20), (20, 12)])
    expected, _ = train(braze.optim.Muon, values)
    results = []
    for layout in ("parameter", "gradient"):
        params = [torch.nn.Parameter(v.clone()) for v in values]
        if layout == "parameter":
            params = [torch.nn.Parameter(v.t().contiguous().t()) for v in values]
        optimizer = braze.optim.Muon(params, lr=0.1)
        generator = torch.Generator().manual_seed(4 + torch.initial_seed())
        for _ in range(5):
            for p in params:
                grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
                p.grad = grad.t().contiguous().t() if layout == "gradient" else grad
            optimizer.step()
        results.append(params)
    for params in results:
        torch.testing.assert_close(params, expected)


def test_state_dicts_load_both_ways(device):
    values = parameters(device, torch.float32, [(16, 50), (50, 16)])
    expected, _ = train(torch.optim.Muon, values, steps=4)
    for first, second in ((braze, torch), (torch, braze)):
        params, optimizer = train(first.optim.Muon, values, steps=2)
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = second.optim.Muon(others, lr=1.0, momentum=0.5)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        generator = torch.Generator().manual_seed(4 + torch.initial_seed())
        for step in range(4):
            for p in others:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
            if step >= 2:
                other.step()
        # Two roundings to bfloat16 apart: see test_matches_stock for errors.
        torch.testing.assert_close(others, expected, atol=0.01, rtol=0)
    assert isinstance(braze.optim.Muon([torch.zeros(1, 1)]), torch.optim.Muon)


def test_learning_rate_tensors(device):
    values = parameters(device, torch.float32, [(16, 50), (50, 16)])
    expected, _ = train(braze.optim.Muon, values, lr=0.125)
    for lr_device in {device, "cpu"}:
        lr = torch.tensor(0.125, device=lr_device)
        torch.testing.assert_close(train(braze.optim.Muon, values, lr=lr)[0], expected)


def test_clipping_and_scaler(device):
    """All else of the gradients' length is lost; a skipped step leaves everything as it is."""
    values = parameters(device, torch.float32, [(16, 50), (50, 16)])
    clipped, optimizer = train(braze.optim.Muon, values, max_grad_norm=0.1)
    unclipped, _ = train(braze.optim.Muon, [v.clone() for v in values])
    assert optimizer.grad_norm > 10
    buffers = [optimizer.state[p]["momentum_buffer"].norm() for p in clipped]
    assert all(b < 0.1 for b in buffers)
    torch.testing.assert_close(clipped, unclipped, atol=0.1, rtol=0)
    p = torch.nn.Parameter(torch.eye(4, device=device))
    optimizer = braze.optim.Muon([p], lr=0.1)
    optimizer.grad_scale = torch.full((), 4.0, device=device)
    for found, expected in ((1.0, 0.0), (0.0, 0.5)):
        optimizer.found_inf = torch.full((), found, device=device)
        p.grad = torch.full_like(p, 40.0)
        before = p.detach().clone()
        optimizer.step()
        buffer = optimizer.state[p]["momentum_buffer"]
        torch.testing.assert_close(buffer, torch.full_like(buffer, expected))
        assert torch.equal(p, before) == bool(found)


def linear_model(device):
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), *(braze.nn.Linear(16, n, bias=False) for n in (16, 5))]
    layers.insert(2, braze.nn.ReLU())
    return torch.nn.Sequential(*layers).to(device)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("options", [{}, {"autocast": torch.bfloat16}], ids=str)
def test_in_a_step(any_device, options):
    """With an average, a schedule, and autocast, which the products do not heed."""
    device, results = any_device, []
    for captured in (False, True):
        model = linear_model(device)
        optimizer = braze.optim.Muon(model.parameters(), lr=0.1)
        average = braze.optim.EMA(model, optimizer, 0.9)
        if not captured:  # torch's counts on the CPU
            stock = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            optimizer.register_step_post_hook(lambda *_, s=stock, m=model: s.update_parameters(m))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        step = braze.TrainStep(model, loss_fn, optimizer, **options)
        losses = []
        for batch in batches(device):
            if captured:
                losses.append(step(*batch))
            else:
                losses += plain_loop(model, optimizer, [batch], **options)
            scheduler.step()
        if not captured:
            torch.testing.assert_close(
                list(average.module.parameters()), list(stock.module.parameters())
            )
        results.append((average, losses))
    assert_same(*results[0], *results[1])


def test_shapes_are_shared_out_to_branches():
    small = [(cost, False) for cost in (3.0, 9.0, 4.0, 2.0, 1.0)]
    assert shared_out(small, 8) == [[1], [2], [0], [3], [4]]
    assert shared_out(small, 3) == [[1], [2, 4], [0, 3]]
    # What fills the GPU stays together, and counts.
    assert shared_out([(5.0, True), (2.0, False), (6.0, True), (1.0, False)], 2) == [[0, 2], [1, 3]]
    assert shared_out([(5.0, True)], 8) == [[0]]


def test_branches_of_a_graph(monkeypatch):
    """In a capture alone; the same numbers, every branch forked from the main stream and joined."""
    # Each shape by itself, and without zeros around it.
    monkeypatch.setattr(muon, "_LAUNCH_FLOPS", 0)
    values = parameters("cpu", torch.float32, [(16, 56), (56, 16), (16, 56), (8, 8), (8, 64)])
    with FakeCuda() as fake:
        params, expected = ([torch.nn.Parameter(v.to("cuda")) for v in values] for _ in range(2))
        optimizer = braze.optim.Muon(params, lr=0.1)
        generator = torch.Generator().manual_seed(4 + torch.initial_seed())
        grads = [[gradient(v, generator).to("cuda") for v in values] for _ in range(3)]
        eager = braze.optim.Muon(expected, lr=0.1)
        for step in grads:
            for p, grad in zip(expected, step, strict=True):
                p.grad = grad.clone()
            eager.step()
        for p, grad in zip(params, grads[0], strict=True):
            p.grad = grad.clone()
        optimizer.step()
        assert not any(name == "wait" for name, *_ in fake.events)
        graph, begin = torch.cuda.CUDAGraph(), len(fake.events)
        graph.capture_begin()
        optimizer.step()
        graph.capture_end()
        events, main = fake.events[begin:], fake.stream.number
        for step in grads[1:]:
            for p, grad in zip(params, step, strict=True):
                p.grad.copy_(grad)
            graph.replay()
        for p, e in zip(params, expected, strict=True):
            assert torch.equal(p.to("cpu"), e.to("cpu"))
    products = [event[1] for event in events if event[0] == "braze.matmul.default"]
    assert len(products) == 3 * 18 + 15
    branches = set(products) - {main}
    assert len(branches) == 3
    for branch in branches:
        assert ("wait", branch, main) in events
        used = max(i for i, event in enumerate(events) if event[1:2] == (branch,))
        assert events.index(("wait", main, branch)) >= used
    assert sum(event[0] == "record_stream" for event in events) == 3


def test_the_polynomial(device, dtype):
    for n in (1, 7, 16, 40):
        gram, square = parameters(device, dtype, [(3, n, n), (3, n, n)])
        expected = [
            2.5 * torch.eye(n, device=device, dtype=kind) - 4 * gram.to(kind) + 3 * square.to(kind)
            for kind in (dtype, torch.float64)
        ]
        version = square._version
        braze._ops.muon.muon_polynomial_(gram, square, 2.5, -4.0, 3.0)
        assert_by_rule(square, *expected)
        assert square._version == version + 1
    torch.library.opcheck(torch.ops.braze.muon_polynomial_.default, (gram, square, 2.5, -4.0, 3.0))
    op = torch.ops.braze.muon_polynomial_
    with pytest.raises(RuntimeError, match="batches of square matrices"):
        op(gram[0], square[0], 1.0, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="same shape as gram"):
        op(gram, square[:1], 1.0, 1.0, 1.0)


def test_opcheck(device, dtype):
    lists = [parameters(device, dtype, [(4, 3), (5, 2)]) for _ in range(3)]
    torch.library.opcheck(torch.ops.braze.muon_momentum_.default, (*lists, [], [], 0.5, True))


def test_bad_input(device):
    p = torch.nn.Parameter(torch.ones(3, 3, device=device))
    for options in (
        {"lr": -1.0},
        {"lr": torch.ones(2)},
        {"momentum": -1.0},
        {"weight_decay": -1.0},
        {"adjust_lr_fn": "other"},
    ):
        with pytest.raises(ValueError) as expected:  # noqa: PT011 (the message is compared below)
            torch.optim.Muon([p], **options)
        with pytest.raises(ValueError) as actual:  # noqa: PT011
            braze.optim.Muon([p], **options)
        assert str(actual.value) == str(expected.value)
    with pytest.raises(ValueError, match=r"2 dimensions and more .* size: torch.Size\(\[3\]\)"):
        braze.optim.Muon([torch.nn.Parameter(torch.ones(3))])
    p.grad = torch.ones_like(p)
    for options, words in (
        ({"ns_steps": 100}, "less than 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "exactly 3 values"),
    ):
        with pytest.raises(ValueError, match=words):
            braze.optim.Muon([p], **options).step()
    assert torch.equal(p, torch.ones_like(p))
    p.grad = torch.ones(3, 3, device=device).to_sparse()
    with pytest.raises(RuntimeError, match=r"optim\.Muon does not support sparse gradients"):
        braze.optim.Muon([p]).step()


@cuda_only
def test_captured_graph_follows_the_learning_rate(device):
    """With branches for the shapes, long ones among them: one that is not joined would show."""
    shapes = [(16, 50), (50, 16), (512, 2304), (256, 1152), (256, 1152), (64, 3, 7, 7), (128, 64)]
    values = parameters(device, torch.float32, [*shapes, *[(8 * n, 1600) for n in range(1, 8)]])
    params, _ = captured_steps(braze.optim.Muon, values, (0.1, 0.2))
    torch.testing.assert_close(params, steps_with_rates(braze.optim.Muon, values, (0.1, 0.2)))


def test_the_tests_reject_a_wrong_update(device):
    """One iteration too few, and a convolution flattened from the other side."""
    values = parameters(device, torch.float32, [(16, 50)])
    stock, _ = train(torch.optim.Muon, values)
    reference, _ = exact(values)
    wrong, _ = train(braze.optim.Muon, values, ns_steps=4)
    with pytest.raises(AssertionError, match="error"):
        assert_by_rule(wrong[0], stock[0], reference[0])
    wrong, _ = train(braze.optim.Muon, [values[0].view(16, 5, 10)])
    assert_by_rule(wrong[0].flatten(1), stock[0], reference[0])
    wrong, _ = train(braze.optim.Muon, [values[0].view(16 * 5, 10)])
    with pytest.raises(AssertionError, match="error"):
        assert_by_rule(wrong[0].view(16, 50), stock[0], reference[0])
