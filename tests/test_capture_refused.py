"""What braze.capture notices, and what it refuses: with the reason, and without consequence."""

import copy
import random
import warnings

import pytest
import torch
from torch.nn import functional as F

import braze
from braze.step.surroundings import Surroundings, SurroundingsState
from test_capture import batches, check, copied, graphs, make_model, one_model

pytestmark = pytest.mark.usefixtures("deterministic")


class Counter:
    """Trains, and does what a graph cannot repeat."""

    def __init__(self, device):
        self.model = make_model(device)
        self.model[3] = torch.nn.Identity()
        self.optimizer = braze.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.calls, self.log, self.last = 0, [], torch.zeros((), device=device)
        self.scale, self.on = torch.ones((), device=device), False

    def train(self, x, y):
        loss = F.cross_entropy(self.model(x), y) * self.scale
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def waits(self, x, y):
        loss = self.train(x, y)
        return loss if loss.item() < 1e9 else loss * 2

    def counts(self, x, y):
        self.calls += 1
        return self.train(x, y)

    def appends(self, x, y):
        self.log.append(1)
        return self.train(x, y)

    def replaces(self, x, y):
        loss = self.train(x, y)
        self.last = 0.9 * self.last + loss.detach()
        return loss

    def toggles(self, x, y):
        self.on = not self.on
        return self.train(x, y)

    def schedules(self, x, y):
        loss = self.train(x, y)
        self.scheduler.step()
        return loss

    def momentum(self, x, y):
        for group in self.optimizer.param_groups:
            group["momentum"] = random.random()
        return self.train(x, y)

    def returns_a_number(self, x, y):
        self.train(x, y)
        return random.random()

    def returns_of_the_host(self, x, y):
        self.train(x, y)
        return torch.zeros(3)

    def replaces_a_buffer(self, x, y):
        self.model[1].running_mean = self.model[1].running_mean * 1
        return self.train(x, y)

    def fails(self, x, y):
        loss = self.train(x, y)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise KeyError("user")
        return loss


CULPRITS = {
    "waits": (RuntimeError, "operation not permitted when stream is capturing", 2),
    "counts": (RuntimeError, r"Python code in it changes self\.calls", 2),
    "appends": (RuntimeError, "changes the length of a list", 2),
    "replaces": (RuntimeError, r"Python code in it changes self\.last", 2),
    "toggles": (RuntimeError, r"Python code in it changes self\.on", 2),
    "schedules": (RuntimeError, "a learning rate of SGD is changed within it", 2),
    "momentum": (RuntimeError, "'momentum' of SGD is changed by Python code", None),
    "returns_a_number": (RuntimeError, "it returned 0.* once and 0.* now", 2),
    "returns_of_the_host": (RuntimeError, "it returns a tensor on cpu", 2),
    "replaces_a_buffer": (RuntimeError, "BatchNorm1d replaces its buffer 'running_mean'", 2),
    "fails": (KeyError, "user", 2),
}


def state_of(counter):
    return copied([
        counter.model.state_dict(), counter.optimizer.state_dict()["state"], counter.calls,
        counter.log, counter.last, counter.on, counter.scheduler.last_epoch,
        [group["lr"] for group in counter.optimizer.param_groups],
        [p.grad for p in counter.model.parameters()],
    ])  # fmt: skip


def assert_unchanged(a, b):
    flat = [torch.utils._pytree.tree_leaves(x) for x in (a, b)]
    for x, y in zip(*flat, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("culprit", CULPRITS)
def test_what_cannot_be_captured(gpu_or_fake, culprit):
    """The plain function goes on from there, and so does another captured one."""
    error, message, at = CULPRITS[culprit]
    counter, plain = Counter(gpu_or_fake), Counter(gpu_or_fake)
    function, data = braze.capture(getattr(counter, culprit)), batches(gpu_or_fake)
    if at is None:  # of ever another kind, until a kind comes again
        random.seed(5)
        for x, y in data[:2]:
            counter.optimizer.param_groups[0]["momentum"] = 0.5
            function(x, y)
        counter.optimizer.param_groups[0]["momentum"] = 0.5
    else:
        for x, y in data[:at]:
            assert torch.equal(
                torch.as_tensor(function(x, y)), torch.as_tensor(getattr(plain, culprit)(x, y))
            ) or culprit in ("returns_a_number", "momentum")
    for _ in range(2):
        before, drawn = state_of(counter), torch.get_rng_state()
        with pytest.raises(error, match=message):
            function(*data[2])
        assert_unchanged(before, state_of(counter))
        assert torch.equal(drawn, torch.get_rng_state())
    rest = [copied(counter.train(x, y)) for x, y in data[2:]]
    if at is not None:
        assert_unchanged(rest, [copied(plain.train(x, y)) for x, y in data[2:]])
    other = braze.capture(counter.train)
    for x, y in data[:4]:
        assert other(x, y).isfinite()
    assert graphs(other)[0][0] == 2


def test_on_the_cpu_all_of_it_runs():
    for culprit in CULPRITS:
        random.seed(3)
        counter, plain = Counter("cpu"), Counter("cpu")
        function = braze.capture(getattr(counter, culprit))
        state = random.getstate()
        mine = [copied(function(x, y)) for x, y in batches("cpu")]
        random.setstate(state)
        theirs = [copied(getattr(plain, culprit)(x, y)) for x, y in batches("cpu")]
        assert_unchanged(mine, theirs)
        assert_unchanged(state_of(counter), state_of(plain))


def test_optimizers_that_count_on_the_cpu(gpu_or_fake):
    model = make_model(gpu_or_fake)
    for make, message in (
        (torch.optim.Adam, "Adam with capturable=False"),
        (torch.optim.Adagrad, "Adagrad cannot be captured"),
        (torch.optim.LBFGS, "LBFGS calls the model by itself"),
    ):
        optimizer = make(model.parameters())
        function = braze.capture(lambda x, optimizer=optimizer: optimizer.step())
        with pytest.raises(ValueError, match=message):
            function(torch.ones(2, device=gpu_or_fake))


def replace_a_layer(model, optimizer):
    torch.manual_seed(5)
    model[4] = torch.nn.Linear(8, 3).to(model[0].weight.device)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def insert_a_layer(model, optimizer):
    model[2] = torch.nn.Tanh()


def add_a_group(model, optimizer):
    layer = model[4]
    layer.bias = torch.nn.Parameter(torch.full_like(layer.bias, 0.25))
    optimizer.add_param_group({"params": [layer.bias], "lr": 0.3})


def replace_a_buffer(model, optimizer):
    model[1].running_mean = torch.full_like(model[1].running_mean, 0.5)


def move_the_weights(model, optimizer):
    for p in model.parameters():
        p.data = p.data.clone()


def reload_the_optimizer(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for held in state["state"].values():
        held["momentum_buffer"] *= 2
    optimizer.load_state_dict(state)


def another_momentum(model, optimizer):
    optimizer.param_groups[0]["momentum"] = 0.5


def freeze(model, optimizer):
    model[0].requires_grad_(False)


def evaluate(model, optimizer):
    model[3].train(not model[3].training)


CHANGES = [
    replace_a_layer, insert_a_layer, add_a_group, replace_a_buffer, move_the_weights,
    reload_the_optimizer, another_momentum, freeze, evaluate,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_are_noticed(any_device, change):
    made = []

    def build(device):
        model = make_model(device)
        optimizer = braze.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        made[:] = model, optimizer

        def train(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return train, model.state_dict

    def calls(i, function, batch):
        if i in (2, 6):
            change(*made)
            torch.manual_seed(2)
        return function(*batch)

    check(any_device, build, calls, batches(any_device, 11))


def test_global_values_and_replaced_tensors_are_noticed(any_device):
    """A value that changes is another kind of call; a tensor, another memory to read."""
    scope = {"scale": torch.full((), 2.0, device=any_device), "rate": 0.5}
    exec("def function(x): return (x * scale * rate).sum()", scope)  # globals of its own
    function, x = braze.capture(scope["function"]), torch.ones(4, device=any_device)
    results = []
    for i in range(18):
        if i == 6:
            scope["rate"] = 0.25
        if i == 12:
            scope["scale"] = torch.full((), 3.0, device=any_device)
        results.append(float(function(x)))
    assert results == [4.0] * 6 + [2.0] * 6 + [3.0] * 6


def test_arguments_that_do_not_fit(any_device):
    model = make_model(any_device)
    function = braze.capture(lambda x, **_: model(x))
    x = torch.ones(2, 4, device=any_device)
    for arguments, error, message in (
        ((x.clone().requires_grad_(),), ValueError, "an argument requires grad"),
        ((x.to_sparse(),), ValueError, "expected dense arguments"),
        ((model,), TypeError, r"give modules=\[...\]"),
        (({1, 2},), TypeError, "tensors and hashable values as arguments, but got set"),
    ):
        with pytest.raises(error, match=message):
            function(*arguments)
    with pytest.raises(TypeError, match="expected a callable, but got Tensor"):
        braze.capture(x)
    with pytest.raises(TypeError, match="expected Modules, but got Tensor"):
        braze.capture(model, modules=[x])
    model.register_buffer("elsewhere", torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match=r"on one device, but found c.*, meta"):
        braze.capture(lambda x: model(x))(x)


def test_inside_another_capture(gpu_or_fake):
    inner = braze.capture(lambda x: x.sum())
    outer = braze.capture(lambda x: inner(x) * 2)
    x = torch.ones(4, device=gpu_or_fake)
    assert [float(outer(x)) for _ in range(2)] == [8.0, 8.0]
    with pytest.raises(RuntimeError, match="called inside another CUDA graph's capture"):
        outer(x)


def test_ever_other_kinds_of_call_are_warned_of(gpu_or_fake):
    model = make_model(gpu_or_fake)
    function = braze.capture(lambda x, step: model(x).sum() * step)
    x = torch.ones(2, 4, device=gpu_or_fake)
    for step in range(19):
        function(x, step)
    with pytest.warns(UserWarning, match="values of the arguments"):
        function(x, 19)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5):
            function(x, step)


SCALE = 2.0


def test_what_is_found_in_the_code():
    settings, hidden = torch.nn.Module(), torch.nn.Linear(2, 2)
    settings.rate, settings.unread = 0.5, 1
    averages, deep = [torch.zeros(2)], {"model": torch.nn.Linear(2, 2), "steps": 3}

    def helper(x, bias=torch.ones(2)):  # noqa: B008
        return deep["model"](x) * SCALE + bias

    def function(x):
        (lambda: averages[0].add_(settings.rate))()
        return helper(x)

    found = Surroundings(function)
    assert set(found.modules) == {settings, deep["model"]}
    assert hidden not in found.modules
    assert len(found.tensors) == 2
    assert sorted(found.names())[0] == "SCALE"
    assert "settings.rate" in found.names()
    assert "settings.unread" not in found.names()
    before, state = found.key(), SurroundingsState(found)
    deep["steps"] = settings.rate = 7
    assert found.changes() == {"settings.rate", "an item of deep"}
    with pytest.raises(RuntimeError, match=r"changes an item of deep, settings\.rate"):
        state.verify()
    assert found.follow()
    assert found.key() != before
    state.restore()
    assert (settings.rate, deep["steps"]) == (0.5, 3)
    deep["model"] = hidden
    assert not found.follow()
    found.scan()
    assert hidden in found.modules


def test_one_model_without_a_gpu_needs_nothing():
    """What is on the CPU is called as it is, also where a graph could not have it."""
    train, _ = one_model()("cpu")
    function = braze.capture(train)
    for x, y in batches("cpu", 3):
        assert set(function(x, y)) == {"loss", "norm", "rows", "n"}
    assert graphs(function) == []
