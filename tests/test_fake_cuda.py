"""The GPU that is none, and on it what surrounds the kernels of a captured braze.TrainStep."""

import copy

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import braze
from fake_cuda import FakeCuda
from step_common import (
    OPTIONS,
    batches,
    check,
    check_bound,
    entries,
    loss_fn,
    make,
    make_plain,
)

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture
def fake():
    with FakeCuda() as fake:
        yield fake


def recorded(work):
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=torch.cuda.graph_pool_handle())
    try:
        result = work()
    finally:
        graph.capture_end()
    return graph, result


def test_where_tensors_are(fake):
    x, y = torch.ones(3, device="cuda"), torch.ones(3)
    assert x.is_cuda
    assert x.device == torch.device("cuda", 0)
    assert not y.is_cuda
    for on_gpu in (x + 1, x[:2], x.clone(), y.to("cuda"), y.cuda(), torch.zeros_like(x)):
        assert on_gpu.device.type == "cuda"
    for on_host in (x.cpu(), x.to("cpu"), y * 2):
        assert on_host.device.type == "cpu"
    assert torch.nn.Linear(2, 2).to("cuda").weight.device.type == "cuda"
    y.to("cuda").add_(1)
    assert y.sum() == 3


def test_a_capture_leaves_no_trace_and_replays_do_it(fake):
    x, seen = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    state = torch.get_rng_state()

    def work():
        drawn = torch.nn.functional.dropout(x * 2, 0.5)
        seen.add_(drawn)
        return drawn

    graph, drawn = recorded(work)
    assert torch.equal(seen, torch.zeros(3, device="cuda"))
    assert torch.equal(torch.get_rng_state(), state)
    total = torch.zeros(3, device="cuda")
    for _ in range(3):
        graph.replay()
        total += drawn
        x.add_(1)
    assert torch.equal(seen, total)
    torch.set_rng_state(state)
    again = torch.zeros(3, device="cuda")
    for value in (1.0, 2.0, 3.0):
        again += torch.nn.functional.dropout(torch.full((3,), 2 * value, device="cuda"), 0.5)
    assert torch.equal(again, total)


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: bool(x.any()),
        lambda x: torch.ones(3).to("cuda"),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_what_waits_is_refused_in_a_capture(fake, waits):
    x = torch.ones(3, device="cuda")
    waits(x)
    with pytest.raises(RuntimeError, match="failed due to a previous error during capture"):
        recorded(lambda: waits(x))
    assert fake.graph is None


@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_equals_the_plain_loop(fake, options):
    settings = OPTIONS[options]
    step = check("cuda", batches("cuda", 4 * settings.get("accumulate", 1) + 2), **settings)
    assert len(entries(step)) == settings.get("accumulate", 1)


def test_a_bound_step_equals_the_plain_loop(fake):
    step = check_bound("cuda", make)
    assert [entry.kept.prefetch is not None for entry in entries(step)] == [True, True]


def test_no_second_set_of_gradients(fake):
    """Neither in an eager call nor while one is captured are those of the call before in memory;
    a replay leaves its own where it has been."""
    model, optimizer = make_plain("cuda")
    before, alive = [], []

    def loss_of(x, y):
        alive.append(sum(not storage.expired() for storage in before))
        return loss_fn(x, y)

    step = braze.TrainStep(model, loss_of, optimizer)
    for x, y in batches("cuda", 3):
        step(x, y)
        before = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters()]
    assert alive == [0, 0, 0]
    kept = [p.grad for p in model.parameters()]
    step(x, y)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True))


def test_gradients_after_a_refused_capture(fake):
    """There are none, as at the beginning of every call, so that the plain loop may go on."""
    model, optimizer = make_plain("cuda")
    waits = lambda x, y: loss_fn(x, y) * float(x.sum() * 0 + 1)  # noqa: E731
    step, (x, y) = braze.TrainStep(model, waits, optimizer), batches("cuda", 1)[0]
    for _ in range(2):
        step(x, y)
        assert all(p.grad is not None for p in model.parameters())
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="cannot be captured"):
        step(x, y)
    assert all(p.grad is None for p in model.parameters())
    for p, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(p, weight)


def test_what_the_gpu_is_given(fake):
    """Two eager calls on the step's stream, behind the caller's and before it, with the copies of
    their batches; then a capture on that stream; then of each call the copies of its batch, and one
    launch."""
    model, optimizer = make_plain("cuda")
    step, given = braze.TrainStep(model, loss_fn, optimizer), []
    for x, y in batches("cuda", 5):
        fake.events.clear()
        step(x, y)
        given.append([event for event in fake.events if event[0] != "aten.alias.default"])
    caller, own = 1, 2
    for eager in given[:2]:
        streams = {event[1] for event in eager if "aten" in event[0] or "braze" in event[0]}
        assert streams == {own}
        waits = [event[1:] for event in eager if event[0] == "wait"]
        assert waits == [(own, caller), (caller, own)]
        assert ("replay",) not in eager
    names = [event[0] for event in given[2]]
    assert names.index("synchronize") < names.index("capture_begin") < names.index("capture_end")
    assert names.index("capture_end") < names.index("replay")
    for replayed in given[3:]:
        names = [event[0] for event in replayed]
        assert names.count("replay") == 1
        assert set(names[: names.index("replay")]) <= {"aten.copy_.default"}
        assert names[names.index("replay") + 1 :] == ["aten.select.int"]  # the loss's place


def test_copies_of_a_loader_do_not_share_its_stream(fake):
    """Of one that has drawn the next order ahead."""
    images, labels = torch.zeros(20, 2, 2, dtype=torch.uint8), torch.arange(20)
    loader = braze.data.DeviceLoader(images, labels, 4, seed=1, device="cuda")
    streams = fake._streams
    loader.draw()
    assert fake._streams == streams + 1
    twin = copy.copy(loader)
    assert twin._ahead is None
    assert twin._stream is None
    expected = [loader.draw().tolist() for _ in range(3)]
    assert [twin.draw().tolist() for _ in range(3)] == expected
    assert fake._streams == streams + 2
