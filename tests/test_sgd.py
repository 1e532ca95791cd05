import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_common import (
    compare_by_rule,
    moved_trainings,
    parameters,
    scaled_steps,
    scheduled,
    train,
)

import braze
from common import assert_by_rule
from conftest import cuda_only

OPTIONS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.5, "weight_decay": 0.01, "nesterov": True, "maximize": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_matches_stock(device, dtype, options):
    values = parameters(device, dtype)
    compare_by_rule(
        train(braze.optim.SGD, values, **options),
        train(torch.optim.SGD, values, **options),
        train(torch.optim.SGD, values, dtype=torch.float64, **options),
        50,  # steps, of up to ten roundings
        moved_trainings(torch.optim.SGD, values, **options),
    )


def test_many_parameters(device):
    """More tensors than one launch takes, of many sizes."""
    values = parameters(device, torch.float32, [(n % 97 + 1,) for n in range(230)])
    ours, _ = train(braze.optim.SGD, values, momentum=0.9)
    stock, _ = train(torch.optim.SGD, values, momentum=0.9)
    for a, s in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, s)


def test_mixed_dtypes_layouts_and_missing_gradients(device):
    wide = torch.randn(6, 8, device=device)
    values = [
        torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last),
        torch.randn(4, 3, device=device, dtype=torch.float64).t(),
        wide[:, ::2],
        torch.randn(7, device=device).to(torch.bfloat16)[1:],
    ]
    results = []
    stock_sgd = torch.optim.SGD
    for optimizer_class, dtype in ((braze.optim.SGD, None), (stock_sgd, None), (stock_sgd, float)):
        base = wide.to(dtype or wide.dtype, copy=True)
        params = [torch.nn.Parameter(v.to(dtype or v.dtype, copy=True)) for v in values]
        params[2] = torch.nn.Parameter(base[:, ::2])
        unused = torch.nn.Parameter(torch.ones(3, device=device))
        groups = [{"params": params[:2]}, {"params": [*params[2:], unused], "lr": 0.3}]
        optimizer = optimizer_class(groups, lr=0.1, momentum=0.9)
        torch.manual_seed(1)
        for step in range(3):
            for i, (p, v) in enumerate(zip(params, values, strict=True)):
                grad = torch.randn(p.shape, device=device).to(v.dtype).to(p.dtype)
                # Contiguous gradients for parameters that are not; one arrives a step late.
                p.grad = None if i == 0 and step == 0 else grad
            optimizer.step()
        assert torch.equal(unused, torch.ones_like(unused))
        results.append([*params, base])
    for a, s, r in zip(*results, strict=True):
        assert_by_rule(a, s, r, terms=50)
        assert a.stride() == s.stride()


def test_state_dicts_load_both_ways(device):
    values = parameters(device, torch.float32)
    for first, second in itertools.permutations([braze.optim.SGD, torch.optim.SGD]):
        params, optimizer = train(first, values, steps=2, momentum=0.9, weight_decay=0.1)
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = second(others, lr=1.0)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert other.param_groups[0]["momentum"] == 0.9
        for p, q in zip(params, others, strict=True):
            p.grad = torch.ones_like(p)
            q.grad = torch.ones_like(q)
        optimizer.step()
        other.step()
        for p, q in zip(params, others, strict=True):
            torch.testing.assert_close(p, q)
    assert isinstance(optimizer, torch.optim.SGD)
    copy.deepcopy(other)


def test_learning_rate_tensor_and_scheduler(device):
    values = parameters(device, torch.float32)
    expected, _ = train(torch.optim.SGD, values, momentum=0.9)
    for lr_device, lr_dtype in itertools.product(
        {device, "cpu"}, [torch.float32, torch.float64, torch.bfloat16]
    ):
        lr = torch.tensor(0.125, device=lr_device, dtype=lr_dtype)
        actual, _ = train(braze.optim.SGD, values, lr=lr, momentum=0.9)
        expected, _ = train(torch.optim.SGD, values, lr=0.125, momentum=0.9)
        for a, s in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, s)
    torch.testing.assert_close(
        scheduled(braze.optim.SGD, device), scheduled(torch.optim.SGD, device)
    )


def test_closure_hooks_and_versions(device):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = braze.optim.SGD([p], lr=0.1, momentum=0.9)
    calls = []
    optimizer.register_step_post_hook(lambda *args: calls.append("hook"))

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    version = p._version
    assert optimizer.step(closure).item() == 3
    assert calls == ["hook"]
    assert p._version == version + 1
    buffer = optimizer.state[p]["momentum_buffer"]
    version = buffer._version
    optimizer.step(closure)
    assert buffer._version == version + 1
    y = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_zero_grad_lets_go_of_the_gradients(device):
    """So the next backward writes them, instead of adding to zeros."""
    p = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = braze.optim.SGD([p], lr=0.1)
    p.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert p.grad is None
    gradient = torch.full((3,), 2.0, device=device)
    p.backward(gradient.clone())
    kept = p.grad
    optimizer.zero_grad(set_to_none=False)
    assert p.grad is kept
    assert not kept.any()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_grad_scaler(device, momentum):
    results = []
    for optimizer_class in (braze.optim.SGD, torch.optim.SGD):
        p = torch.nn.Parameter(torch.ones(5, device=device))
        optimizer = optimizer_class([p], lr=0.1, momentum=momentum)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        for value in (float("inf"), 2.0, float("nan"), 3.0):
            optimizer.zero_grad()
            scaler.scale((p * value).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(p)
    torch.testing.assert_close(*results)


DAMPENED = {"momentum": 0.9, "dampening": 0.5}
INF = float("inf")


@pytest.mark.parametrize("values", [(INF, 2, 3), (INF, INF, 2, 3), (2, INF, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("options", [DAMPENED, {**DAMPENED, "weight_decay": 0.1}], ids=str)
def test_a_skipped_first_step_is_no_first_momentum(device, values, options):
    """Zeros are not what torch has then: nothing."""
    results = [
        scaled_steps(optimizer_class, device, values, **options)
        for optimizer_class in (braze.optim.SGD, torch.optim.SGD)
    ]
    torch.testing.assert_close(results[0][0], results[1][0])
    buffers = [optimizer.state[p]["momentum_buffer"] for p, optimizer in results]
    torch.testing.assert_close(*buffers)


def test_the_launch_reads_whether_the_buffers_are_unwritten(device, dtype):
    """More tensors than one launch takes, of one element and of many."""
    values = [torch.full((1 + 700 * (i % 3),), 2.0) for i in range(90)]
    for unwritten, expected in ((1.0, 3.0), (0.0, 0.5 * 5 + 0.25 * 3)):
        params, grads, buffers = (
            [(v * scale).to(device, dtype) for v in values] for scale in (0.5, 1.5, 2.5)
        )
        flag = torch.tensor(unwritten, device=device)
        torch.ops.braze.sgd_(*(params, grads, buffers, [], [], 1.0, 0.5, 0.75), unwritten=flag)
        for p, b in zip(params, buffers, strict=True):
            assert torch.equal(b, torch.full_like(b, expected))
            assert torch.equal(p, torch.full_like(p, 1 - expected))


@pytest.mark.parametrize("gone", [(1,), (1, 2), (0,), (0, 2)], ids=str)
def test_gradients_that_are_missing_behind_a_skipped_step(device, gone):
    """A parameter's first momentum is that of its own first step."""
    results = []
    for optimizer_class in (braze.optim.SGD, torch.optim.SGD):
        both = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
        optimizer = optimizer_class(both, lr=0.1, **DAMPENED)
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        for step, value in enumerate((INF, 1.0, 2.0, 3.0)):
            optimizer.zero_grad()
            used = both[:1] if step in gone else both
            scaler.scale(sum((p * value).sum() for p in used)).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(both)
    torch.testing.assert_close(*results)


def reloaded_in(optimizer_class):
    """Goes on with the state in a new optimizer of that class."""

    def restart(optimizer):
        (p,) = optimizer.param_groups[0]["params"]
        other = optimizer_class([p], lr=7.0)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return other

    return restart


RESTARTS = {
    "copied": lambda optimizer: copy.deepcopy(optimizer),
    "in torch's": reloaded_in(torch.optim.SGD),
    "in braze's": reloaded_in(braze.optim.SGD),
}


@pytest.mark.parametrize("first", [INF, 2], ids=str)
@pytest.mark.parametrize("how", RESTARTS)
def test_the_state_of_a_skipped_first_step(device, how, first):
    values = (first, 2, 3)
    ours, _ = scaled_steps(braze.optim.SGD, device, values, RESTARTS[how], **DAMPENED)
    stock, _ = scaled_steps(torch.optim.SGD, device, values, **DAMPENED)
    torch.testing.assert_close(ours, stock)
    p = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = braze.optim.SGD([p], lr=0.1, **DAMPENED)
    p.grad = torch.ones_like(p)
    optimizer.grad_scale = torch.ones((), device=device)
    optimizer.found_inf = torch.ones((), device=device)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {0: {}}
    assert "momentum_buffer" in optimizer.state[p]  # where a captured graph finds it
    del optimizer.grad_scale, optimizer.found_inf
    optimizer.step()  # without the scaler
    assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], p.grad)


def test_a_refused_step_changes_nothing(device):
    """Also where another launch would have been fine, and where buffers were still to be made."""

    def refused(*params, groups=None, message, state=()):
        optimizer = braze.optim.SGD(groups or params, lr=0.1, momentum=0.9)
        for p in params:
            p.grad = torch.ones(p.shape, dtype=p.dtype, device=device)
        for p, buffer in state:
            optimizer.state[p]["momentum_buffer"] = buffer
        before = [p.detach().clone() for p in params]
        held = {p: dict(s) for p, s in optimizer.state.items() if s}
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
        assert {p: s for p, s in optimizer.state.items() if s} == held

    def fine():
        return torch.nn.Parameter(torch.ones(3, device=device))

    overlapping = torch.nn.Parameter(torch.ones(1, device=device).expand(3))
    refused(overlapping, message="more than one element")
    a, b = fine(), fine()
    refused(
        a,
        b,
        groups=[{"params": [a]}, {"params": [b]}],
        message="buffers of the parameters' dtype torch.float32, but got torch.float64",
        state=[(b, torch.ones(3, device=device, dtype=torch.float64))],
    )
    with torch.inference_mode():
        inference = torch.ones(3, device=device)
    a, b = fine(), fine()
    groups = [{"params": [a]}, {"params": [b]}]
    refused(a, b, groups=groups, message="inference tensor", state=[(b, inference)])


def test_opcheck(device, dtype):
    params, grads, buffers = (
        [torch.randn(4, 3, device=device).to(dtype), torch.randn(5, device=device).to(dtype)]
        for _ in range(3)
    )
    torch.library.opcheck(torch.ops.braze.sgd_.default, (params, grads, [], [], [], 0.1))
    torch.library.opcheck(torch.ops.braze.sgd_.default, (params, grads, buffers, [], [], 0.1, 0.9))
    if dtype == torch.float32:
        halves = [g.bfloat16() for g in grads]
        torch.library.opcheck(
            torch.ops.braze.sgd_.default,
            (params, halves, [], [], [], 0.1),
            {"grads_in_16_bits": True},
        )


def test_bad_input(device):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    for settings_, error in [
        ({"lr": -1}, ValueError),
        ({"momentum": -1}, ValueError),
        ({"weight_decay": -1}, ValueError),
        ({"nesterov": True}, ValueError),
        ({"lr": torch.ones(2)}, ValueError),
        ({"weight_decay": torch.tensor(0.1)}, ValueError),
        ({"differentiable": True}, RuntimeError),
        ({"foreach": True, "fused": True}, RuntimeError),
    ]:
        with pytest.raises(error):
            braze.optim.SGD([p], **settings_)
    complex_param = torch.nn.Parameter(torch.ones(3, device=device, dtype=torch.complex64))
    optimizer = braze.optim.SGD([p, complex_param], lr=0.1)
    p.grad, complex_param.grad = torch.ones_like(p), torch.ones_like(complex_param)
    with pytest.raises(RuntimeError, match=r"expected parameters of dtype float64.*complex64"):
        optimizer.step()
    assert torch.equal(p, torch.ones_like(p))
    table = torch.nn.Parameter(torch.ones(3, 2, device=device))
    table.grad = torch.ones(3, 2, device=device).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        braze.optim.SGD([table]).step()
    x, y = torch.ones(3, device=device), torch.ones(3, device=device)
    op = torch.ops.braze.sgd_
    for args, words in [
        (([x], [y[:2]], [], [], [], 0.1), "same shape as its parameter"),
        (([x], [y.double()], [], [], [], 0.1), "same dtype"),
        (([x], [], [], [], [], 0.1), "expected 1 grads and 0 momentum_buffers, but got 0 and 0"),
        (([x], [y], [], [], [], 0.1, 0.9), "expected 1 grads and 1 momentum_buffers"),
        (([x[:1].expand(3)], [y], [], [], [], 0.1), "more than one element"),
        (([x.clone().requires_grad_()], [y], [], [], [], 0.1), "not differentiable"),
        (([x], [y], [], [y], [], 0.1), "expected as many outputs as inputs"),
        (([x], [y], [], [y.double()], [y.half()], 0.1), "same dtype"),
        (([], [], [], [y], [y.half()], 0.1), "casts of grads only"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            op(*args)
    with pytest.raises(RuntimeError, match="expected lr_tensor to be one float32"):
        op([x], [y], [], [], [], 0.1, lr_tensor=y)
    with pytest.raises(RuntimeError, match="expected unwritten to be one float32"):
        op([x], [y], [], [], [], 0.1, unwritten=y)
    assert torch.equal(x, torch.ones_like(x))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("found", [None, 0.0, 1.0])
def test_gradients_in_16_bits(device, source, found):
    """As their casts; with momentum and averages, and in another layout than the parameter."""
    generator = torch.Generator().manual_seed(5)
    sizes = [(5000,), (33, 2, 3, 3), (7,), (1,), (4, 8), (0, 3)]
    params = [torch.randn(s, generator=generator).to(device) for s in sizes]
    params[1] = params[1].to(memory_format=torch.channels_last)
    grads = [torch.randn_like(p).to(source) for p in params]
    grads[2] = torch.randn(8, device=device).to(source)[1:]  # not aligned
    grads[4] = torch.randn(8, 4, device=device).to(source).t()
    kept, results = [g.clone() for g in grads], []
    flag = None if found is None else torch.full((), found, device=device)
    op = torch.ops.braze.sgd_
    for taken in ([g.float() for g in grads], grads):
        lists = [[p.clone() for p in params] for _ in range(3)]  # parameters, momentum, averages
        settings = {"found_inf": flag, "averages": lists[2], "average_weight": 0.25}
        op(*(lists[0], taken, lists[1], [], [], 0.1, 0.9), **settings, grads_in_16_bits=True)
        results.append(lists)
    for expected, actual in zip(*results, strict=True):
        assert all(map(torch.equal, actual, expected))
    assert all(map(torch.equal, grads, kept))
    assert torch.equal(results[0][0][0], params[0]) == (found == 1.0)
    other = torch.float16 if source == torch.bfloat16 else torch.bfloat16
    lists = params, grads, [], [], []
    mixed = params, [*grads[:-1], grads[-1].to(other)], [], [], []
    doubles = [p.double() for p in params], *lists[1:]
    for arguments, asked in ((lists, False), (mixed, True), (doubles, True)):
        with pytest.raises(RuntimeError, match="same dtype"):
            op(*arguments, 0.1, grads_in_16_bits=asked)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_casts_in_the_launch(device, dtype, source):
    """Sizes and layouts that the launch casts itself, a gradient without a cast, one of another
    layout than its parameter, and one that no parameter has."""
    generator = torch.Generator().manual_seed(5)
    sizes = [(5000,), (33, 2, 3, 3), (7,), (1,), (4, 8), (16,)]
    params = [torch.randn(s, generator=generator).to(device, dtype) for s in sizes]
    params[1] = params[1].to(memory_format=torch.channels_last)
    sources = [torch.randn_like(p, dtype=torch.float32).to(source) for p in params]
    sources[2] = torch.randn(8, device=device).to(source)[1:]  # not aligned
    sources[4] = torch.randn(8, 4, device=device).to(source).t()
    grads = [torch.full_like(s, 7, dtype=dtype) for s in sources]
    expected = [p.clone() for p in params]
    outputs, inputs = grads[:5], sources[:5]
    cast = [s.to(dtype) for s in sources[:5]] + grads[5:]
    op = torch.ops.braze.sgd_
    op(expected, cast, [], [], [], 0.1, weight_decay=0.01)
    op(params, grads, [], outputs, inputs, 0.1, weight_decay=0.01)
    for p, e, g, c in zip(params, expected, grads, cast, strict=True):
        assert torch.equal(p, e)
        assert torch.equal(g, c)
    found_inf = torch.ones((), device=device)
    before = [p.clone() for p in params]
    for g in grads:
        g.zero_()
    op(params, grads, [], outputs, inputs, 0.1, found_inf=found_inf)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert all(torch.equal(g, c) for g, c in zip(grads[:5], cast[:5], strict=True))


@cuda_only
def test_captured_graph_follows_the_learning_rate(device):
    p = torch.nn.Parameter(torch.zeros(1000, device=device))
    p.grad = torch.ones_like(p)
    lr = torch.tensor(1.0, device=device)
    optimizer = braze.optim.SGD([p], lr=lr, momentum=0.5)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    torch.testing.assert_close(p, torch.full_like(p, -1.0))
    graph.replay()
    torch.testing.assert_close(p, torch.full_like(p, -2.5))
    lr.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(p, torch.full_like(p, -6.0))


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 30), max_size=3), min_size=1, max_size=8),
    options=st.sampled_from(OPTIONS),
)
def test_fuzzed_shapes(sizes, options):
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        values = parameters(device, torch.float32, sizes)
        ours, _ = train(braze.optim.SGD, values, steps=2, **options)
        stock, _ = train(torch.optim.SGD, values, steps=2, **options)
        for a, s in zip(ours, stock, strict=True):
            torch.testing.assert_close(a, s)


def test_the_tests_reject_a_wrong_update(device):
    """Nesterov's step taken as plain momentum, and dampening of the first step."""
    values = parameters(device, torch.float32)
    options = {"momentum": 0.9, "nesterov": True}
    wrong, _ = train(braze.optim.SGD, values, momentum=0.9)
    stock, _ = train(torch.optim.SGD, values, **options)
    reference, _ = train(torch.optim.SGD, values, dtype=torch.float64, **options)
    with pytest.raises(AssertionError, match="error"):
        assert_by_rule(wrong[0], stock[0], reference[0])
