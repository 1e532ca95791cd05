"""Gradients and casts that a captured braze.TrainStep moves: the numbers stay."""

import copy
import itertools

import pytest
import torch

import braze
from braze.step.casts import SharedCasts
from conftest import cuda_only
from step_common import CALLS, assert_same, batches, loss_fn, plain_loop, recorded_ops

pytestmark = pytest.mark.usefixtures("deterministic")


class EarlyReader(torch.nn.Module):
    """A convolution whose weight's gradient is not just what the op made: it is summed, scaled, or
    watched by a hook."""

    def __init__(self, how):
        super().__init__()
        self.conv = braze.nn.Conv2d(4, 4, 3, padding=1)
        self.last = braze.nn.Linear(64, 5)
        self.how = how
        self.forwards = 0  # that were not replays
        if how == "scaled":
            self.scale = torch.nn.Parameter(torch.tensor(0.5))
        if how == "hooked":
            self.conv.weight.register_hook(lambda grad: grad * 2)

    def forward(self, x):
        self.forwards += 1
        x = x.expand(-1, 4, -1, -1).contiguous()
        if self.how == "scaled":
            weight = self.conv.weight * self.scale
            x = braze.nn.functional.conv2d(x, weight, self.conv.bias, padding=1)
        else:
            x = self.conv(x)
        return self.last((self.conv(x) if self.how == "twice" else x).flatten(1))


class EarlyBiasReader(EarlyReader):
    """The same of a bias before a ReLU, whose gradient is a sum over too many pixels for one
    launch."""

    def __init__(self, how):
        super().__init__(how)
        self.conv = braze.nn.ConvReLU2d(8, 8, 3, padding=1)  # whole vectors in 16 bits too
        # Else autograd copies the weight's gradient to that format: another early reader.
        self.conv.to(memory_format=torch.channels_last)
        self.last = braze.nn.Linear(8, 5)
        if how == "hooked":
            self.conv.bias.register_hook(lambda grad: grad * 2)

    def forward(self, x):
        self.forwards += 1
        x = x.expand(-1, 8, -1, -1).repeat(1, 1, 5, 5)
        x = x.contiguous(memory_format=torch.channels_last)
        if self.how == "scaled":
            bias = self.conv.bias * self.scale
            x = braze.nn.functional.conv2d_relu(x, self.conv.weight, bias, padding=1)
        else:
            x = self.conv(x)
        return self.last((self.conv(x) if self.how == "twice" else x).mean((2, 3)))


def capturing(model, optimizer, autocast):
    """:func:`braze.capture` of what TrainStep does."""

    def train(x, y):
        optimizer.zero_grad()
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return braze.capture(train)


@pytest.mark.parametrize("by", ["TrainStep", "capture"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("how", ["plain", "twice", "scaled", "hooked"])
@pytest.mark.parametrize("kind", [EarlyReader, EarlyBiasReader])
def test_gradients_on_a_side_stream(device, kind, how, autocast, by):
    """A weight's gradient may be made on a branch of the graph, and a bias', unless something reads
    it in the backward pass: a hook, which is seen before, or a sum, which has the step captured
    again."""
    if by == "capture" and device == "cpu":
        pytest.skip("runs the function as it is")
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = kind(how).to(device)
        optimizer = braze.optim.SGD(model.parameters(), lr=0.1)
        data = batches(device)
        if captured:
            if by == "TrainStep":
                step = braze.TrainStep(model, loss_fn, optimizer, autocast=autocast)
            else:
                step = capturing(model, optimizer, autocast)
            with recorded_ops() as ops:
                losses = [step(x, y) for x, y in data]
        else:
            losses = plain_loop(model, optimizer, data, autocast=autocast)
        results.append((model, losses))
    assert_same(*results[0], *results[1])
    opened = [name for name, _ in ops].count("open_side_stream")
    if device == "cuda":
        assert opened == (how != "hooked")
        casts = (
            by == "capture" and autocast and how != "hooked"
        )  # a weight at a time: early readers
        assert model.forwards == 2 + 1 + bool(how in ("twice", "scaled") or casts)
    else:
        assert opened == 0
        assert model.forwards == CALLS


@cuda_only
@pytest.mark.parametrize("accumulates", [False, True])
def test_several_backward_passes_in_a_captured_function(accumulates):
    """Each has a side stream; what a second one adds to gradients has the function captured again
    without. torch's own backward is in its place afterwards."""
    results, plain = [], torch.autograd.backward
    for captured in (False, True):
        torch.manual_seed(0)
        models = [EarlyReader("plain").to("cuda") for _ in range(2)]
        optimizers = [braze.optim.SGD(m.parameters(), lr=0.1) for m in models]

        def train(x, y, models=models, optimizers=optimizers):
            losses = []
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                for _ in range(1 + accumulates):
                    losses.append(loss_fn(model(x), y))
                    losses[-1].backward()
                optimizer.step()
            return torch.stack(losses)

        function = braze.capture(train) if captured else train
        with recorded_ops() as ops:
            losses = [function(x, y).clone() for x, y in batches("cuda")]
        results.append((losses, [m.state_dict() for m in models]))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    opened = [name for name, _ in ops].count("open_side_stream")
    assert opened == (4 if accumulates else 2)
    assert models[0].forwards == (2 + 1) * (1 + accumulates) + 2 * accumulates
    assert torch.autograd.backward is plain


@cuda_only
def test_what_a_side_stream_has_read_is_freed():
    """Of many convolutions whose gradients are small: the capture's peak is about an eager call's,
    and memory that has another tensor in it by then changes no number."""
    layers, results, peaks = 32, [], []
    for captured in (False, True):
        torch.manual_seed(0)
        convolutions = [braze.nn.Conv2d(64, 64, 3, padding=1) for _ in range(layers)]
        own = itertools.chain(*((conv, braze.nn.ReLU()) for conv in convolutions))
        last = braze.nn.Linear(64 * 32 * 32, 5)
        model = torch.nn.Sequential(*own, torch.nn.Flatten(), last)
        model = model.to("cuda", memory_format=torch.channels_last)
        optimizer = braze.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(64, 64, 32, 32, device="cuda")  # 8 MiB in bf16
        x = x.to(memory_format=torch.channels_last)
        data = [(x, torch.randint(5, (64,), device="cuda"))] * 5
        if not captured:
            losses = plain_loop(model, optimizer, data, autocast=torch.bfloat16)
        else:
            step = braze.TrainStep(model, loss_fn, optimizer, autocast=torch.bfloat16)
            losses = []
            for batch in data:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                losses.append(step(*batch))
                peaks.append(torch.cuda.max_memory_allocated() - before)
        results.append((model, losses))
    assert_same(*results[0], *results[1])
    assert peaks[2] < 1.5 * peaks[1]  # nearly twice as much, were all kept to the end


def read_gradients(optimizer, *_):
    parameters = optimizer.param_groups[0]["params"]
    optimizer.largest = torch.stack([p.grad.abs().max() for p in parameters]).max()


class ReadingSGD(braze.optim.SGD):
    def step(self):
        read_gradients(self)
        super().step()


class TwoDtypes(EarlyReader):
    """Autocast to one dtype inside autocast to another; and a parameter without elements."""

    def __init__(self):
        super().__init__("plain")
        self.empty = braze.nn.Linear(0, 5)

    def forward(self, x):
        y = self.empty(x.new_empty(len(x), 0))
        with torch.autocast(x.device.type, torch.float16):
            return super().forward(x) + y


@pytest.mark.parametrize("how", ["plain", "two dtypes", "hook", "subclass", "not owned"])
def test_gradients_cast_by_the_update(device, how):
    """Autocast's gradients are cast in the update's launch where nothing reads them before."""
    results, seen = [], []
    for captured in (False, True):
        torch.manual_seed(0)
        model = (TwoDtypes() if how == "two dtypes" else EarlyReader("plain")).to(device)
        owned = model.conv.parameters() if how == "not owned" else model.parameters()
        optimizer = (ReadingSGD if how == "subclass" else braze.optim.SGD)(owned, lr=0.1)
        if how == "hook":
            optimizer.register_step_pre_hook(read_gradients)
        data = batches(device)
        if captured:
            step = braze.TrainStep(model, loss_fn, optimizer, autocast=torch.bfloat16)
            losses = [step(x, y) for x, y in data[:2]]
            with recorded_ops() as ops:
                losses.append(step(*data[2]))  # captures
            losses += [step(x, y) for x, y in data[3:]]
        else:
            losses = plain_loop(model, optimizer, data, autocast=torch.bfloat16)
        results.append((model, losses))
        seen.append([float(getattr(optimizer, "largest", 0))])
        if captured and how != "not owned":
            seen[-1] += [p.grad.abs().sum().item() for p in model.parameters()]
    assert_same(*results[0], *results[1])
    assert seen[0][0] == seen[1][0]
    assert all(value == value for value in seen[1])  # the gradients are there, not NaN
    # For each dtype one launch forward, and one backward; the update takes the casts of one dtype.
    launches = 4 if how == "two dtypes" else 2
    launches -= device == "cuda" and how in ("plain", "two dtypes")
    assert [name for name, _ in ops].count("cast_") == launches


class Tied(torch.nn.Module):
    """A layer used twice, one used once, and one that autocast leaves alone."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = braze.nn.Linear(6, 6), braze.nn.Linear(6, 3)
        self.norm = torch.nn.LayerNorm(6)

    def forward(self, x):
        return self.once(self.norm(self.twice(self.twice(x))))


def test_parameters_are_cast_together(device):
    """Autocast's casts share a launch, and give what separate casts give."""
    torch.manual_seed(0)
    model = Tied().to(device)
    plain = copy.deepcopy(model)
    loss_fn = braze.nn.CrossEntropyLoss()
    step = braze.TrainStep(
        model, loss_fn, braze.optim.SGD(model.parameters(), lr=0.1), autocast=torch.bfloat16
    )
    optimizer = braze.optim.SGD(plain.parameters(), lr=0.1)
    x, target = torch.randn(8, 6, device=device), torch.randint(3, (8,), device=device)
    for _ in range(4):
        with recorded_ops() as ops:
            loss = step(x, target)
        with torch.autocast(device, torch.bfloat16):
            expected = loss_fn(plain(x), target)
        expected.backward()
        assert torch.equal(loss, expected)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        optimizer.step()
        optimizer.zero_grad()
    if device == "cpu":  # a captured step calls nothing
        assert [name for name, _ in ops].count("cast_") == 2


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_of_casts_in_parts(device, apart):
    """Those of the last layer arrive before the first layer's backward pass, if they may."""
    casts, order = SharedCasts(), []
    first, last = (torch.nn.Parameter(torch.randn(4, 4, device=device)) for _ in range(2))
    for name, p in ("first", first), ("last", last):
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    for _ in range(2):  # the first pass learns
        order.clear()
        casts.cast_together(part_of=lambda p: apart and p is last)
        x = torch.randn(3, 4, device=device, dtype=torch.bfloat16)

        def weight(p):
            cast = casts.take(p, torch.bfloat16)
            return p.to(torch.bfloat16) if cast is None else cast

        y = x @ weight(first)
        y.register_hook(lambda _: order.append("layer"))
        (y @ weight(last)).sum().backward()
        casts.drop()
    assert order.index("last") < order.index("layer") if apart else order[0] == "layer"


class TwoInputs(torch.nn.Module):
    """Casts both inputs, one of them twice, and changes the other first where it is to."""

    def __init__(self, writes):
        super().__init__()
        self.left, self.right = braze.nn.Linear(6, 3), braze.nn.Linear(6, 3)
        self.writes = writes

    def forward(self, x, y):
        if self.writes:
            y.mul_(0.5)
        return self.left(x) + self.right(y) + self.right(x)


@pytest.mark.parametrize("writes", [False, True])
def test_inputs_are_cast_with_the_parameters(device, writes):
    torch.manual_seed(0)
    model = TwoInputs(writes).to(device)
    model.left.weight.requires_grad_(False)
    plain = copy.deepcopy(model)
    optimizers = [
        braze.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
        for m in (model, plain)
    ]
    step = braze.TrainStep(model, loss_fn, optimizers[0], autocast=torch.bfloat16)
    for _ in range(5):
        batch = torch.randn(8, 6, device=device), torch.randn(8, 6, device=device)
        target = torch.randint(3, (8,), device=device)
        loss = step(*(t.clone() for t in batch), target)
        with torch.autocast(device, torch.bfloat16):
            expected = loss_fn(plain(*(t.clone() for t in batch)), target)
        expected.backward()
        assert torch.equal(loss, expected)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)
        optimizers[1].step()
        optimizers[1].zero_grad()


def test_casts_of_inputs(device):
    """Each once, behind the first pass, and nobody makes the gradient of one."""
    casts, to = SharedCasts(), torch.bfloat16
    weight, frozen = (torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    frozen.requires_grad_(False)
    for i in range(3):
        x, y, z = (torch.ones(4, device=device) for _ in range(3))
        z.requires_grad_()
        casts.cast_together((x, y, x, z, "other"))
        found = [casts.take(t, to) for t in (weight, frozen, x, z)]
        assert casts.take(x, to) is None  # the second use
        casts.drop()
        if i == 0:
            assert found == [None] * 4
            continue
        assert [f is not None and f.dtype == to for f in found] == [True, True, True, False]
        assert [f.requires_grad for f in found[:3]] == [True, False, False]


class Clamping(torch.nn.Module):
    """Changes a parameter in its forward pass."""

    def __init__(self):
        super().__init__()
        self.linear = braze.nn.Linear(6, 3)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


def test_a_parameter_changed_before_its_cast_is_used(device):
    torch.manual_seed(0)
    model = Clamping().to(device)
    plain = copy.deepcopy(model)
    data = [(torch.randn(8, 6, device=device), torch.randint(3, (8,), device=device))] * 5
    optimizers = [braze.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    step = braze.TrainStep(model, loss_fn, optimizers[0], autocast=torch.bfloat16)
    results = [step(*batch) for batch in data]
    expected = plain_loop(plain, optimizers[1], data, autocast=torch.bfloat16)
    assert_same(model, results, plain, expected)
