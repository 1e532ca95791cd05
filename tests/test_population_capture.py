"""What a captured step of a braze.Population gives the GPU, on one that is none."""

import pytest
import torch
from population_common import SEEDS, N, alone, loaders, make, maker

import braze
from braze import _multiprocessors
from braze._step_scope import current
from braze.population import branches
from fake_cuda import FakeCuda
from step_common import assert_same, batches, entries, loss_fn

pytestmark = pytest.mark.usefixtures("deterministic")
STREAMS = 2


@pytest.fixture(autouse=True)
def _few_streams(monkeypatch):
    monkeypatch.setattr(branches, "STREAMS", STREAMS)


@pytest.fixture
def fake():
    with FakeCuda() as fake:
        yield fake


def plain():
    """Without random numbers."""
    return torch.nn.Sequential(torch.nn.Flatten(), braze.nn.Linear(16, 5)).to("cuda")


class Casting(torch.nn.Module):
    """Asks for its weight in bfloat16, as braze's ops do under autocast. (On the GPU that is none
    layers call torch's functions.)"""

    def __init__(self, reads_early=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5, 16) / 4)
        self.reads_early = reads_early

    def forward(self, x):
        weight = current.scope.cast_of(self.weight, torch.bfloat16)
        weight = self.weight.to(torch.bfloat16) if weight is None else weight
        y = torch.nn.functional.linear(x.flatten(1).to(torch.bfloat16), weight).float()
        return y + self.weight.sum() if self.reads_early else y


def captured(events):
    """The events of the last capture."""
    begin = max(i for i, event in enumerate(events) if event[0] == "capture_begin")
    end = next(i for i in range(begin, len(events)) if events[i][0] == "capture_end")
    return events[begin + 1 : end]


def members_streams(step):
    return [stream.number for stream in step._body._chains.streams]


def reaches(events, start):
    """Streams whose latest work what is given to `start` now has waited for, directly or not: a
    set for each event, before it."""
    waits, found = {}, []
    for event in events:
        found.append({**waits})
        if event[0] == "wait":
            waits[event[1]] = waits.get(event[1], set()) | {event[2]} | waits.get(event[2], set())
    found.append(waits)
    return [w.get(start, set()) | {start} for w in found]


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_one_graph_at_the_third_call(fake, autocast, bound):
    step, _ = make("cuda", autocast=autocast, max_grad_norm=0.5)
    if bound:
        step.bind(loaders("cuda", drop_last=True))
        calls = (loss for _ in range(3) for loss in step.epoch())
    else:
        calls = (step(*batch) for batch in batches("cuda"))
    next(calls), next(calls)
    assert not [event for event in fake.events if event[0] == "capture_begin"]
    next(calls)
    kinds = [event[0] for event in fake.events]
    assert kinds.count("capture_begin") == kinds.count("capture_end") == 1
    assert kinds.count("replay") == 1
    before = len(fake.events)
    later = len(list(calls))
    assert later
    kinds = [event[0] for event in fake.events[before:]]
    assert kinds.count("replay") == later
    assert "capture_begin" not in kinds
    assert len(entries(step)) == 1


@pytest.mark.parametrize("bound", [False, True])
def test_forks_and_joins(fake, bound):
    """Each member's kernels are on its stream, which begins behind the main one; at the end the
    main stream has waited for all."""
    step, _ = make("cuda", make_model=lambda: Casting().to("cuda"))
    calls = step.bind(loaders("cuda")).epoch() if bound else (step(*b) for b in batches("cuda"))
    for _ in range(3):
        next(calls)
    events, main = captured(fake.events), step._graphs._stream.number
    streams = {event[1] for event in fake.events if event[0] == "stream"}
    ops = [e for e in events if e[0].startswith(("aten", "braze")) and "side_stream" not in e[0]]
    used = {event[1] for event in ops} & streams
    members = set(members_streams(step))
    assert members < used
    others = used - members - {main}
    assert len(others) == (2 if bound else 1)  # losses; the next batch
    reached = reaches(events, main)
    assert reached[-1] >= used
    for stream in used - {main}:
        first = next(i for i, event in enumerate(events) if event[1:2] == (stream,))
        assert events[first] == ("wait", stream, main) or events[first][2] in members
    # A fork for each stream and wave of casts, and nothing that waits for members before the end.
    forks = [event for event in events if event[0] == "wait" and event[1] in members]
    assert forks == [("wait", members_streams(step)[i % STREAMS], main) for i in range(N)]
    joins = [i for i, e in enumerate(events) if e[0] == "wait" and e[1] == main]
    last_op = max(i for i, e in enumerate(events) if e[0].startswith("aten") and e[1] in members)
    assert all(i > last_op for i in joins)


def test_streams_do_not_wait_where_nothing_was_cast(fake):
    """A kernel that waits for two others cannot start early."""
    step, _ = make("cuda", make_model=plain)
    for batch in batches("cuda", 3):
        step(*batch)
    waits = [event for event in captured(fake.events) if event[0] == "wait"]
    members = members_streams(step)
    assert [event[1] for event in waits if event[1] in members] == members


def test_ops_make_no_branches_of_their_own(fake):
    step, _ = make("cuda")
    for batch in batches("cuda", 3):
        step(*batch)
    events = captured(fake.events)
    names = [event[0] for event in events if "side_stream" in event[0]]
    assert names == ["braze.open_side_stream.default", "braze.join_side_stream.default"]
    opened = next(i for i, event in enumerate(events) if "open_side_stream" in event[0])
    closed = next(i for i, event in enumerate(events) if "join_side_stream" in event[0])
    members = members_streams(step)
    ops = [i for i, e in enumerate(events) if e[0].startswith("aten") and e[1] in members]
    assert opened < min(ops)
    assert max(ops) < closed


@pytest.mark.parametrize("reads_early", [False, True])
def test_updates_cast_gradients(fake, reads_early):
    """Casts of weights share a launch in each wave, on the main stream; those of gradients are left
    to the members' updates, unless they are summed with others before."""

    def make_model():
        return Casting(reads_early).to("cuda")

    step, _ = make("cuda", make_model=make_model)
    data = batches("cuda")
    losses = [step(*batch) for batch in data]
    casts = [event[1] for event in captured(fake.events) if event[0] == "braze.cast_.default"]
    members, main = members_streams(step), step._graphs._stream.number
    expected = []
    for i in range(N):
        expected += [main] * (i % STREAMS == 0) + [members[i % STREAMS]] * reads_early
    assert casts == expected
    assert len([e for e in fake.events if e[0] == "capture_begin"]) == 1 + reads_early
    for i in range(N):
        lone, _ = alone(i, "cuda", make_model=make_model)
        assert_same(
            step.population[i], [row[i] for row in losses], lone.model, [lone(*b) for b in data]
        )


def test_generators_only_where_members_draw(fake):
    for make_model, expected in ((plain, 0), (maker("cuda"), N)):
        step, _ = make("cuda", make_model=make_model)
        for batch in batches("cuda", 3):
            step(*batch)
        (entry,) = entries(step)
        assert len(entry.graph.generators) == expected
        step.population.eval()  # nothing is dropped: another kind of call, without generators
        for batch in batches("cuda", 3):
            step(*batch)
        assert sorted(len(entry.graph.generators) for entry in entries(step)) == [0, expected]


def test_members_share_the_multiprocessors(fake):
    """And chains are no streams that torch might give out for the step's own."""
    step, _ = make("cuda", make_model=plain)
    seen = []
    for member in step.population:
        member.register_forward_hook(lambda *_: seen.append(_multiprocessors.current()))
    for batch in batches("cuda", 3):
        step(*batch)
    assert set(seen) == {step.multiprocessors} == {132 // STREAMS}
    assert _multiprocessors.current() is None
    chains = step._body._chains.streams
    assert {stream.priority for stream in chains}.isdisjoint({step._graphs._stream.priority})


def test_random_numbers_outside_stay(fake):
    """Dropout of members takes nothing from torch's default generator."""
    step, _ = make("cuda")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for batch in batches("cuda"):
        step(*batch)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "change", ["mode", "momentum", "requires_grad", "memory", "optimizer state", "member"]
)
def test_a_change_is_noticed(fake, change):
    """Two eager calls and another capture follow; of a learning rate only a write."""
    step, _ = make("cuda", make_model=plain)
    lone = [alone(i, "cuda", make_model=plain)[0] for i in range(N)]
    data, losses, expected = batches("cuda"), [], []
    for number, batch in enumerate(data):
        if number == 4:
            before = len(fake.events)
            for one in (step.population[1], lone[1].model):
                weight = one[1].weight
                if change == "mode":
                    one.eval()
                elif change == "requires_grad":
                    weight.requires_grad_(False)
                elif change == "memory":
                    weight.data = weight.data.clone()
            for optimizer in (step.optimizers[1], lone[1].optimizer):
                if change == "momentum":
                    optimizer.param_groups[0]["momentum"] = 0.5
                elif change == "optimizer state":
                    optimizer.load_state_dict(optimizer.state_dict())
            if change == "member":
                torch.manual_seed(9)
                other = plain()
                step.optimizers[1].add_param_group({"params": list(other.parameters())})
                step.population.models[1] = other
                torch.manual_seed(9)
                other = plain()
                lone[1].optimizer.add_param_group({"params": list(other.parameters())})
                lone[1].model = other
        losses.append(step(*batch))
        expected.append([one(*batch) for one in lone])
    for i in range(N):
        assert_same(
            step.population[i],
            [row[i] for row in losses],
            lone[i].model,
            [row[i] for row in expected],
        )
    kinds = [event[0] for event in fake.events[before:]]
    assert kinds.count("capture_begin") >= 1


def test_learning_rates_are_followed_in_the_same_graph(fake):
    step, schedulers = make("cuda", make_model=plain)
    for batch in batches("cuda"):
        step(*batch)
        for scheduler in schedulers:
            scheduler.step()
    assert [event[0] for event in fake.events].count("capture_begin") == 1


class Waits(torch.nn.Module):
    """Reads a value of its input where it is told to."""

    def __init__(self):
        super().__init__()
        self.layer = braze.nn.Linear(16, 5)
        self.waits = False

    def forward(self, x):
        x = self.layer(x.flatten(1))
        return x * (1 if not self.waits or x.sum() > -1e9 else 2)


def test_a_capture_that_fails_changes_nothing(fake):
    step, _ = make("cuda", make_model=lambda: Waits().to("cuda"))
    step.population[3].waits = True
    data = batches("cuda")
    for batch in data[:2]:
        step(*batch)
    weights = [p.clone() for p in step.population.parameters()]
    with pytest.raises(RuntimeError, match=r"Population: this step cannot be captured.*if` on"):
        step(*data[2])
    assert all(map(torch.equal, weights, step.population.parameters()))
    assert torch.cuda.default_generators[0]._held is None
    step.population[3].waits = False
    for _ in range(3):
        losses = step(*data[2])
    assert losses.isfinite().all()
    assert len(entries(step)) == 1


class Fails(torch.nn.Module):
    """Raises where it is told to."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 5)
        self.fails = False

    def forward(self, x):
        if self.fails:
            raise ZeroDivisionError
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("calls", [0, 2])
def test_a_member_that_raises_leaves_all_weights_alone(any_device, calls):
    population = braze.Population(lambda: Fails().to(any_device), N, seeds=SEEDS)
    step = population.train_step(loss_fn, lambda p: braze.optim.SGD(p, lr=0.1))
    data = batches(any_device)
    for batch in data[:calls]:
        step(*batch)
    weights = [p.detach().clone() for p in population.parameters()]
    population[3].fails = True
    with pytest.raises(ZeroDivisionError):
        step(*data[calls])
    assert all(map(torch.equal, weights, population.parameters()))
    population[3].fails = False
    step(*data[calls])
    assert not any(map(torch.equal, weights, population.parameters()))
