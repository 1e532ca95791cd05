"""braze.capture against the plain function: the same numbers, bit for bit, whatever it does.

"fake" is a GPU that is none (fake_cuda.py): the same calls, warm-ups, captures and replays.
"""

import itertools

import pytest
import torch
from torch.nn import functional as F

import braze
from braze.step import branches
from braze.step import casts as step_casts
from braze.step.casts import CastsWithoutGradients
from step_common import recorded_ops

pytestmark = pytest.mark.usefixtures("deterministic")
CALLS = 8  # two eager, one captured and replayed, the rest replayed


def make_model(device, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(8, 3),
    ).to(device)


def batches(device, count=CALLS, size=6):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 4, generator=generator).to(device),
            torch.randint(3, (size,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def copied(tree):
    """Of all tensors a copy, since a captured function overwrites those that it returns."""
    tensor = lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x  # noqa: E731
    return torch.utils._pytree.tree_map(tensor, tree)


def assert_equal(a, b):
    flat = [torch.utils._pytree.tree_leaves(x) for x in (a, b)]
    for x, y in zip(*flat, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def check(device, build, calls=None, data=None):
    """Trains by the function itself and captured, and compares. Returns the captured one.

    Args:
        build: ``build(device)`` returns a function and a function that returns, as a tree, all that
            it changes.
        calls: ``calls(i, function, batch)`` instead of ``function(*batch)``.
    """
    results = []
    for captured in (False, True):
        function, state = build(device)
        if captured:
            function = braze.capture(function)
        torch.manual_seed(2)
        returned = []
        for i, batch in enumerate(data or batches(device)):
            result = calls(i, function, batch) if calls else function(*batch)
            returned.append(copied(result))
        results.append((returned, copied(state())))
    assert_equal(*results)
    return function


def graphs(function):
    """(eager calls, replays) of each kind of call."""
    entries = function._graphs._entries.values()
    return [(e.eager_calls, getattr(e.graph, "replays", 0)) for e in entries]


ORDERS = ["zero first", "zero last", "to zeros", "never", "step first", "never, with a graph"]
OPTIMIZERS = {
    "braze SGD": lambda p, cuda: braze.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD": lambda p, cuda: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam fused": lambda p, cuda: torch.optim.Adam(p, 0.01, fused=True, capturable=cuda),
    "AdamW": lambda p, cuda: torch.optim.AdamW(p, 0.01, capturable=cuda),
}


def one_model(order="zero first", maker="braze SGD"):
    """Classification with clipping and an average of the weights."""

    def build(device):
        model = make_model(device)
        optimizer = OPTIMIZERS[maker](model.parameters(), device == "cuda")
        average = [p.detach().clone() for p in model.parameters()]

        def train(x, y):
            if order == "zero first":
                optimizer.zero_grad()
            elif order == "to zeros":
                optimizer.zero_grad(set_to_none=False)
            elif order == "step first":
                optimizer.step()
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward(create_graph="graph" in order)
            if "graph" in order:  # of gradients that autograd has added to out of place
                for p in model.parameters():
                    p.grad = p.grad.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if order != "step first":
                optimizer.step()
            if order == "zero last":
                optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_lerp_(average, list(model.parameters()), 0.1)
            return {"loss": loss, "norm": norm, "rows": [model[4].weight.sum(1)], "n": 3}

        grads = lambda: [p.grad for p in model.parameters() if p.grad is not None]  # noqa: E731
        return train, lambda: [model.state_dict(), average, grads()]

    return build


@pytest.mark.parametrize("maker", OPTIMIZERS)
def test_equals_the_plain_function(any_device, maker):
    function = check(any_device, one_model(maker=maker))
    if any_device == "cuda":
        assert len(graphs(function)) == 1
        assert graphs(function)[0][0] == 2


@pytest.mark.filterwarnings("ignore:Using backward")  # that create_graph makes a cycle
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_of_before_the_call(any_device, order):
    """They may be dropped unread, added to, or what the optimizer reads: seen in an eager call."""
    function = check(any_device, one_model(order))
    if any_device == "cuda":
        assert len(graphs(function)) == (1 if order in ("zero first", "zero last") else 2)


def test_nothing_is_learnt_of_a_call_that_fails(any_device):
    """The first one that finds gradients ends before it shows what it does with them."""

    def build(device):
        train, state = one_model("step first")(device)
        calls = itertools.count()

        def fails_once(x, y):
            if next(calls) == 1:
                raise KeyError("user")
            return train(x, y)

        return fails_once, state

    def calls(i, function, batch):
        if i == 1:
            with pytest.raises(KeyError, match="user"):
                function(*batch)
        return function(*batch)

    check(any_device, build, calls)


def test_two_functions_that_share_gradients(any_device):
    """One gathers, the other updates: an accumulation window in the caller's loop."""
    results = []
    for captured in (False, True):
        model = make_model(any_device)
        optimizer = braze.optim.SGD(model.parameters(), lr=0.1)

        def gather(x, y, model=model):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            return loss

        def update(optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        if captured:
            gather, update = braze.capture(gather), braze.capture(update)
        torch.manual_seed(2)
        losses = []
        for i, (x, y) in enumerate(batches(any_device, 14)):
            losses.append(copied(gather(x, y)))
            if i % 2:
                update()
        results.append((losses, copied(model.state_dict())))
    assert_equal(*results)
    if any_device == "cuda":
        assert all(entry.graph for entry in gather._graphs._entries.values() if entry.kept)


def gan(device):
    """Two models and optimizers, a gradient penalty, gradients that nobody uses."""
    torch.manual_seed(0)
    maker, judge = torch.nn.Linear(2, 4).to(device), make_model(device, 1)
    judge[1] = judge[3] = torch.nn.Identity()
    cuda = device == "cuda"
    optimizers = [
        torch.optim.Adam(m.parameters(), 0.01, betas=(0.5, 0.9), capturable=cuda)
        for m in (maker, judge)
    ]

    def train(real, _):
        made = maker(torch.randn(len(real), 2, device=device))
        share = torch.rand(len(real), 1, device=device)
        between = (share * real + (1 - share) * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        loss = judge(made.detach()).mean() - judge(real).mean() + 10 * penalty
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        maker_loss = -judge(made).mean()
        maker_loss.backward()
        optimizers[0].step()
        return loss, maker_loss, penalty

    return train, lambda: [maker.state_dict(), judge.state_dict()]


def test_several_models_and_optimizers(any_device):
    function = check(any_device, gan)
    if any_device == "cuda":
        assert len(function._parts.optimizers()) == 2


def scaled(device, enabled=True):
    model = make_model(device)
    model[1] = torch.nn.Identity()  # an infinity would stay in its running statistics
    optimizer = braze.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=3, enabled=enabled)

    def train(x, y):
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss.nan_to_num(7.0)

    return train, lambda: [model.state_dict(), scaler.get_scale()]


def test_grad_scaler_skips_infinities(any_device):
    data = batches(any_device, 10)
    data[5] = (data[5][0] * float("inf"), data[5][1])
    check(any_device, scaled, data=data)
    check(any_device, lambda device: scaled(device, enabled=False))


@pytest.mark.parametrize("maker", ["braze SGD", "Adam fused"])
def test_learning_rates_that_change_at_every_step(any_device, maker):
    """They do not recapture: braze's optimizer reads the exact number, torch's one of float32."""
    if maker != "braze SGD":
        torch.use_deterministic_algorithms(False)
    results = []
    for captured in (False, True):
        model = make_model(any_device)
        model[3] = torch.nn.Identity()
        optimizer = OPTIMIZERS[maker](model.parameters(), any_device == "cuda")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

        def train(x, y, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        function = braze.capture(train) if captured else train
        losses = []
        for x, y in batches(any_device):
            losses.append(copied(function(x, y)))
            scheduler.step()
        results.append(torch.stack(losses))
    if maker == "braze SGD" or any_device == "cpu":
        assert torch.equal(*results)
    else:
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    if any_device == "cuda":
        assert len(graphs(function)) == 1


class Agent:
    """State in attributes, a target network, tensors written in place, modes and flags."""

    def __init__(self, device):
        self.net, self.target = make_model(device), make_model(device, 1)
        self.optimizer = braze.optim.SGD(self.net.parameters(), lr=0.1)
        self.seen = torch.zeros((), device=device)
        self.tau = 0.1
        self.updates = 0

    def loss(self, x, y):
        with torch.no_grad():
            goal = self.target(x)
        return F.mse_loss(self.net(x), goal) + F.cross_entropy(self.net(x), y)

    def update(self, x, y, follow=True):
        self.seen += len(x)
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if follow:
            with torch.no_grad():
                for p, q in zip(self.target.parameters(), self.net.parameters(), strict=True):
                    p.lerp_(q, self.tau)
        return loss, self.seen, self.net.training


def test_a_method_with_flags_and_settings_that_change(any_device):
    """Plain values are part of the kind of call, and so are modes and requires_grad; attributes
    that the code does not read are not."""
    agents = []

    def build(device):
        agents.append(Agent(device))
        return agents[-1].update, lambda: [agents[-1].net.state_dict(), agents[-1].seen]

    def calls(i, function, batch):
        agent = agents[-1]
        agent.updates += 1
        if i == 12:
            agent.tau = 0.5
        if i == 16:
            agent.net.eval()
        if i == 20:
            agent.net[0].weight.requires_grad_(False)
        return function(*batch, follow=i % 3 > 0)

    function = check(any_device, build, calls, batches(any_device, 25))
    if any_device == "cuda":
        assert len(graphs(function)) == 8
        assert function._parts.surroundings.names().count("self.tau") == 1


def test_other_shapes_and_nested_arguments(any_device):
    def build(device):
        train, state = one_model()(device)
        return (lambda batch, *, weight: train(batch["x"] * weight, batch["y"])), state

    data = batches(any_device, 8) + batches(any_device, 5, size=3)

    def calls(i, function, batch):
        return function({"x": batch[0], "y": batch[1]}, weight=2.0)

    function = check(any_device, build, calls, data)
    if any_device == "cuda":
        assert len(graphs(function)) == 2


def test_arguments_that_are_written_to(any_device):
    def build(device):
        total = torch.zeros(4, device=device)

        def add(x, y, to):
            to += x.sum(0)
            return to.sum()

        return (lambda x, y, to=None: add(x, y, total)), lambda: total

    check(any_device, build)
    totals = [torch.zeros(4, device=any_device) for _ in range(2)]
    add = braze.capture(lambda x, to: to.add_(x.sum(0)).sum())
    for x, _ in batches(any_device):
        add(x, totals[0])
        totals[1].add_(x.sum(0))
    assert torch.equal(*totals)


def test_scalars_stay_and_other_tensors_are_overwritten(gpu_or_fake, monkeypatch):
    monkeypatch.setattr(branches, "LOSSES", 6)  # three of each replay's two
    model = make_model(gpu_or_fake)
    sums = lambda x: (model[0](x).sum(), model[0](x).detach(), x.sum(), x.long().sum())  # noqa: E731
    function = braze.capture(sums)
    data = [x for x, _ in batches(gpu_or_fake, 11)]
    returned = [function(x) for x in data]
    for x, (a, _, b, c) in zip(data, returned, strict=True):
        assert torch.equal(a, model[0](x).sum())
        assert torch.equal(b, x.sum())
        assert torch.equal(c, x.long().sum())
    assert not any(t.requires_grad for t in returned[0])
    assert torch.equal(returned[-1][1], model[0](data[-1]))
    assert torch.equal(returned[-2][1], returned[-1][1])


def test_autocast_around_the_call(any_device):
    """A weight that it has cast before is not the one that a graph reads."""
    results = []
    for captured in (False, True):
        train, state = one_model()(any_device)
        function = braze.capture(train) if captured else train
        torch.manual_seed(2)
        losses = []
        for x, y in batches(any_device):
            with torch.autocast(any_device, torch.bfloat16):
                losses.append(copied(function(x, y)["loss"]))
        results.append((losses, copied(state())))
    assert_equal(*results)


def test_modules_and_optimizers_that_are_given(any_device):
    """What the code does not show is given by name."""
    results = []
    for captured in (False, True):
        model = make_model(any_device)
        hidden = {"optimizer": braze.optim.SGD(model.parameters(), lr=0.1), "model": model}

        class Hidden:
            get = staticmethod(hidden.__getitem__)

        def train(x, y, hidden=Hidden):
            hidden.get("optimizer").zero_grad()
            loss = F.cross_entropy(hidden.get("model")(x), y)
            loss.backward()
            hidden.get("optimizer").step()
            return loss

        given = {"modules": [model], "optimizers": hidden["optimizer"]}
        function = braze.capture(train, **given) if captured else train
        torch.manual_seed(2)
        losses = []
        for i, (x, y) in enumerate(batches(any_device)):
            hidden["optimizer"].param_groups[0]["lr"] = 0.1 / (i + 1)
            losses.append(copied(function(x, y)))
        results.append((losses, copied(model.state_dict())))
    assert_equal(*results)
    if any_device == "cuda":
        assert len(graphs(function)) == 1


def test_a_wrong_function_is_rejected(any_device):
    def build(device, calls=[]):  # noqa: B006
        train, state = one_model()(device)
        calls.append(1)
        return (lambda x, y: train(x * (1.0001 if len(calls) > 1 else 1.0), y)), state

    with pytest.raises(AssertionError):
        check(any_device, build)


def test_on_another_stream_and_without_modules(gpu_or_fake):
    total = torch.zeros(4, device=gpu_or_fake)

    @braze.capture
    def add(x):
        return total.add_(x.sum(0)).sum()

    data, expected = batches(gpu_or_fake), torch.zeros(4, device=gpu_or_fake)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for i, (x, _) in enumerate(data):
        with torch.cuda.stream(streams[i % 2]):
            add(x)
    torch.cuda.synchronize()
    for x, _ in data:
        expected += x.sum(0)
    assert torch.equal(total, expected)
    assert add.__name__ == "add"
    assert [eager for eager, _ in graphs(add)] == [2]


def test_a_backward_through_weights_of_before_the_call_is_noticed(any_device):
    model = make_model(any_device)
    optimizer = braze.optim.SGD(model.parameters(), lr=0.1)

    @braze.capture
    def train(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    data = batches(any_device)
    for x, y in data[:4]:
        train(x, y)
    x, y = data[4]
    stale = F.cross_entropy(model(x), y)
    train(*data[5])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


class Stacked(torch.nn.Module):
    """Layers that autocast casts the weights of, one of them twice; a buffer that one may be
    written from in between."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = braze.nn.Linear(4, 4), braze.nn.Linear(4, 3)
        self.register_buffer("other", torch.randn(4, 4))

    def forward(self, x, overwrites):
        x = self.twice(x)
        if overwrites:
            self.once.weight.copy_(self.other[:3])
            self.twice.weight.data.copy_(self.other)  # of which the version does not tell
        return self.once(self.twice(x))


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("overwrites", [False, True])
def test_casts_without_gradients(any_device, overwrites, branch, monkeypatch):
    """Of all weights in one launch, as soon as one is wanted; of one written to since anew. With a
    branch: the first weight alone, the others while it is used."""

    if branch:
        monkeypatch.setattr(step_casts, "_FIRST_BYTES", 1)
        monkeypatch.setattr(step_casts, "_LEAST_BYTES", 1)
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = Stacked().to(any_device)

        @torch.no_grad()
        def call(x, model=model):
            with torch.autocast(any_device, torch.bfloat16):
                return model(x, overwrites)

        function = braze.capture(call) if captured else call
        returned = []
        for x, _ in batches(any_device):
            returned.append(copied(function(x)))
            with torch.no_grad():  # what changes between calls is seen
                model.once.weight.mul_(1.5)
        results.append((returned, copied(list(model.parameters()))))
    assert_equal(*results)


def test_casts_of_large_weights_in_parts(gpu):
    """Deep layers whose weights are cast in a branch; one of them is not used each time."""
    layers = torch.nn.ModuleList(braze.nn.Linear(1024, 1024) for _ in range(20)).cuda()

    def run(x, skipped):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            for i, layer in enumerate(layers):
                x = x if i == skipped else layer(x)
            return x

    function, x = braze.capture(run), torch.randn(64, 1024, device="cuda")
    for _ in range(4):
        for skipped in (None, 5):
            assert torch.equal(function(x, skipped), run(x, skipped))
        with torch.no_grad():
            for p in layers.parameters():
                p.mul_(1.25)
    entries = function._graphs._entries.values()
    assert all(entry.graph is not None and entry.casts._branch is not None for entry in entries)


def test_casts_without_gradients_share_a_launch(device):
    weights = [torch.nn.Parameter(torch.randn(3, device=device)) for _ in range(3)]
    plain, image = (torch.randn(3, device=device) for _ in range(2))
    casts, to = CastsWithoutGradients([image]), torch.bfloat16
    for i in range(3):
        with recorded_ops() as ops, torch.no_grad():
            found = [casts.take(t, to) for t in (*weights, plain, image)]
            assert casts.take(weights[0], to) is None  # the second use
            weights[1].add_(1)
            assert casts.take(weights[1], to) is None
        casts.drop()
        if i == 0:
            assert found == [None] * 5
            continue
        assert [name for name, _ in ops].count("cast_") == 1
        assert torch.equal(found[4], image.to(to))
        assert found[3] is None
        assert torch.equal(found[0], weights[0].to(to))
