"""What a graph has frozen, and that it is seen when it changes, whatever ran last: the functions in
C by themselves, and captured functions and steps on a GPU that is none (fake_cuda.py)."""

import contextlib
import sys
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

import braze
from braze import _C
from fake_cuda import FakeCuda
from step_common import loss_fn

pytestmark = pytest.mark.usefixtures("deterministic")

# ---- in C ----


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )


def pointers(tensors):
    return b"".join(t.data_ptr().to_bytes(8, sys.byteorder) for t in tensors)


def test_state_is_what_the_attributes_say():
    model = small_model()
    params, modules = list(model.parameters()), list(model.modules())
    params[1].requires_grad_(False)
    model[1].eval()
    key, buffers = _C.state(params, modules)
    flags = [bytes([p.requires_grad]) for p in params]
    assert key == b"".join(map(bytes.__add__, map(pointers, zip(params)), flags)) + bytes(
        m.training for m in modules
    )
    assert buffers == pointers(model.buffers())
    assert _C.addresses(params) == pointers(params)
    assert _C.addresses([]) == b""


def test_addresses_of_what_has_none_and_of_what_is_asked_by_its_method():
    class Other:
        def data_ptr(self):
            return 1 << 63  # above the signed range

    assert _C.addresses([Other()]) == (1 << 63).to_bytes(8, sys.byteorder)
    assert _C.addresses([torch.empty(0), torch.empty(3, device="meta")]) == bytes(16)
    assert _C.addresses([torch.nn.Parameter(torch.ones(3))[1:].detach()]) != bytes(8)
    with pytest.raises(AttributeError, match="data_ptr"):
        _C.addresses([torch.ones(1), None])


class Odd(torch.Tensor):
    """One whose class has its own way to these attributes."""

    requires_grad = property(lambda self: True)
    grad = property(lambda self: 5)


class Asked(torch.Tensor):
    def __getattribute__(self, name):
        return True if name == "requires_grad" else super().__getattribute__(name)


def test_attributes_of_tensors_of_several_classes():
    plain = torch.zeros(2)
    mixed = [plain, plain.as_subclass(Odd), plain, plain.as_subclass(Asked), plain]
    flags = _C.state(mixed, [])[0][8::9]
    assert list(flags) == [False, True, False, True, False]
    assert _C.have_gradients([(plain, None), (mixed[1], 5), (plain, None)])
    assert not _C.have_gradients([(plain, None), (mixed[1], None)])


def test_modes_that_modules_have_in_other_ways():
    class Fixed(torch.nn.Module):
        training = property(lambda self: self.mode, lambda self, value: None)
        mode = True

    fixed, plain = Fixed(), torch.nn.ReLU()
    before = _C.state([], [fixed, plain])
    fixed.mode = False
    assert _C.state([], [fixed, plain]) == (bytes([False, True]), b"") != before
    del plain.training
    with pytest.raises(AttributeError, match="training"):
        _C.state([], [plain])


def test_holds_compares_objects_and_their_number():
    model, names = small_model(), ("_modules", "_parameters")
    modules = list(model.modules())
    values = _C.held(modules, names)
    assert values[:4] == list(model)
    assert _C.holds(modules, names, values)
    assert not _C.holds(modules, names, values[:-1])
    assert not _C.holds(modules, names, [*values, None])
    assert not _C.holds(modules, names, [*values[:-1], torch.nn.Parameter(torch.ones(1))])
    assert _C.holds([], names, [])
    assert not _C.holds([], names, values)
    model[3].extra = None
    model[3].register_parameter("none", None)
    assert not _C.holds(modules, names, values)
    assert _C.holds(modules, names, [*values, None])
    with pytest.raises(AttributeError, match="_nothing"):
        _C.holds(modules, ("_nothing",), values)


def test_have_gradients_compares_objects():
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    assert _C.have_gradients([(p, None), (q, None)])
    q.grad = torch.zeros(2)
    assert not _C.have_gradients([(p, None), (q, None)])
    assert _C.have_gradients([(p, None), (q, q.grad)])
    assert not _C.have_gradients([(p, None), (q, torch.zeros(2))])
    assert _C.have_gradients([])


MISSING = object()


def places_of_each_kind():
    """A list of places, and what is read there."""
    late = 1
    value, items, table = object(), [object(), None], {"b": object(), "a": 1}

    def function(x, y=value, *, z=items):
        return late, unset

    if late is None:
        unset = 1
    where = [(function, None), (items, None), ((value,), None), (table, None)]
    where.append((table, ("a", "none", "b")))
    contents = [late, MISSING, value, items, *items, value, "b", "a", table["b"], 1]
    return where, [*contents, 1, MISSING, table["b"]]


def test_places_are_read_in_order():
    places, contents = places_of_each_kind()
    assert _C.read(places, MISSING) == contents
    assert _C.reads(places, MISSING, contents)
    for i in range(len(contents)):
        assert not _C.reads(places, MISSING, [*contents[:i], object(), *contents[i + 1 :]])
        assert not _C.reads(places, MISSING, contents[:i])
    assert not _C.reads(places, MISSING, [*contents, None])
    assert _C.read([], MISSING) == []


def test_containers_with_an_order_of_their_own():
    class Backwards(list):
        def __iter__(self):
            return reversed(list(super().__iter__()))

    ordered = OrderedDict(a=1, b=2)
    places = [(ordered, None), (Backwards([1, 2]), None)]
    before = _C.read(places, MISSING)
    assert before == ["a", "b", 1, 2, 2, 1]
    ordered.move_to_end("a")
    assert not _C.reads(places, MISSING, before)


def test_wrong_arguments_are_refused_in_c():
    wrong = [
        lambda: _C.state([], ()),
        lambda: _C.state([]),
        lambda: _C.addresses(()),
        lambda: _C.holds([], [], []),
        lambda: _C.have_gradients(()),
        lambda: _C.have_gradients([(1,)]),
        lambda: _C.have_gradients([1]),
        lambda: _C.read((), None),
        lambda: _C.read([1], None),
        lambda: _C.read([(1,)], None),
        lambda: _C.read([(1, None)], None),
        lambda: _C.read([([], ("a",))], None),
        lambda: _C.reads([({}, ("a",))], None),
        lambda: _C.reads([({}, ["a"])], None, []),
        lambda: _C.read([({}, ([],))], None),  # a name that cannot be hashed
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call()
    with pytest.raises(AttributeError, match="grad"):
        _C.have_gradients([(1, None)])


def test_references_are_given_back():
    model = small_model()
    params, modules = list(model.parameters()), list(model.modules())
    names = ("_modules", "_parameters")
    values, (places, contents) = _C.held(modules, names), places_of_each_kind()
    pairs = [(p, None) for p in params]
    watched = [*params, *modules, *values, *contents, MISSING, *model.buffers()]
    before = [sys.getrefcount(x) for x in watched]
    for _ in range(100):
        _C.state(params, modules)
        _C.addresses(params)
        _C.holds(modules, names, values)
        _C.held(modules, names)
        _C.have_gradients(pairs)
        _C.read(places, MISSING)
        _C.reads(places, MISSING, contents)
        _C.reads(places, MISSING, contents[:3])
    after = [sys.getrefcount(x) for x in watched]
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) < 10


# ---- in a captured function ----

SCALE = 1.0


def subject(device):
    """A captured function that has been replayed, and all that it reads."""
    model = small_model().to(device)
    optimizer = braze.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    factors, options, nested = [1.0, 2.0], {"a": 1.0, "b": 2.0}, ({"deep": [1.0]},)
    thing, offset, rate = SimpleNamespace(bias=0.5), torch.zeros(3, device=device), 1.0

    def set_rate(value):
        nonlocal rate
        rate = value

    def set_offset(value):
        nonlocal offset
        offset = value

    def helper(out, power=1.0, *, shift=0.0):
        return out * power + shift

    def train(x, value=1.0):
        optimizer.zero_grad()
        out = helper(model(x)) * SCALE * rate * factors[0] * nested[0]["deep"][0] * value
        out = out + sum(options.values()) + thing.bias + offset
        out.float().sum().backward()
        optimizer.step()
        return out.float().sum()

    x = torch.ones(6, 4, device=device)
    found = SimpleNamespace(**{k: v for k, v in locals().items() if k != "device"})
    found.function, found.args, found.kwargs = braze.capture(train), (x,), {}
    found.around = contextlib.nullcontext()
    return found


def call(found):
    with found.around:
        found.function(*found.args, **found.kwargs)
    graphs = found.function._graphs
    return graphs._entry, graphs._entry.graph


def swap(target, name, value):
    """Puts `value` there; returns what undoes it."""
    if isinstance(target, (dict, list)):
        old, target[name] = target[name], value
        return lambda: target.__setitem__(name, old)
    old = getattr(target, name)
    setattr(target, name, value)
    return lambda: setattr(target, name, old)


def reorder(options):
    options["a"] = options.pop("a")  # both values are one kind of object, in another order

    def undo():
        options["b"] = options.pop("b")

    return undo


def elsewhere(tensor):
    """The same tensor, its contents in other memory."""
    return swap(tensor, "data", tensor.data.clone())


def calling(setter, value, old):
    setter(value)
    return lambda: setter(old)


def other_backend():
    chosen = braze.backend(matmul="braze")
    return lambda: chosen.__exit__(None, None, None)


def group(found):
    return found.optimizer.param_groups[0]


#: A change, after which the call is of another kind; undone, it is of the first one again.
OTHER_KINDS = {
    "shape": lambda f: swap(f, "args", (f.x[:3],)),
    "stride": lambda f: swap(f, "args", (f.x.t().contiguous().t(),)),
    "type of an argument": lambda f: swap(f, "args", (f.x, 1)),
    "value of an argument": lambda f: swap(f, "args", (f.x, 2.0)),
    "keyword": lambda f: swap(f, "kwargs", {"value": 2.0}),
    "closure": lambda f: calling(f.set_rate, 2.0, 1.0),
    "type of a value": lambda f: calling(f.set_rate, 1, 1.0),
    "global": lambda f: swap(sys.modules[__name__], "SCALE", 2.0),
    "list": lambda f: swap(f.factors, 0, 3.0),
    "dict": lambda f: swap(f.options, "b", 3.0),
    "order of a dict": lambda f: reorder(f.options),
    "nested": lambda f: swap(f.nested[0]["deep"], 0, 3.0),
    "attribute": lambda f: swap(f.thing, "bias", 3.0),
    "default": lambda f: swap(f.helper, "__defaults__", (2.0,)),
    "keyword default": lambda f: swap(f.helper, "__kwdefaults__", {"shift": 2.0}),
    "hyper-parameter": lambda f: swap(group(f), "momentum", 0.5),
    "new hyper-parameter": lambda f: calling(
        lambda value: group(f).update(new=1) if value else group(f).pop("new"), True, False
    ),
    "eval mode": lambda f: calling(f.model.train, False, True),
    "eval mode of one": lambda f: calling(f.model[1].train, False, True),
    "requires_grad": lambda f: calling(f.model[0].weight.requires_grad_, False, True),
    "autocast": lambda f: swap(f, "around", torch.autocast("cuda", torch.bfloat16)),
    "determinism": lambda f: calling(torch.use_deterministic_algorithms, False, True),
    "cudnn.deterministic": lambda f: swap(torch.backends.cudnn, "deterministic", True),
    "cudnn.benchmark": lambda f: swap(torch.backends.cudnn, "benchmark", True),
    "precision": lambda f: swap(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "backend": lambda f: other_backend(),
    "parameter's memory": lambda f: elsewhere(f.model[0].weight),
    "last parameter's memory": lambda f: elsewhere(f.model[3].bias),
    "tensor's memory": lambda f: elsewhere(f.offset),
}


def parameter_replaced(found):
    found.model[3].bias = torch.nn.Parameter(torch.zeros(3, device="cuda"))


def module_replaced(found):
    found.model[2] = torch.nn.Tanh()


def module_added(found):
    found.model.append(torch.nn.Tanh())


def group_added(found):
    new = torch.nn.Parameter(torch.zeros(3, device="cuda"))
    found.optimizer.add_param_group({"params": [new]})


def group_replaced(found):
    found.optimizer.param_groups[0] = dict(found.optimizer.param_groups[0])


def parameter_of_the_optimizer_dropped(found):
    found.optimizer.param_groups[0]["params"].pop()


#: A change, after which nothing of before is kept.
ANEW = {
    "parameter": parameter_replaced,
    "module": module_replaced,
    "one module more": module_added,
    "group": group_added,
    "another group": group_replaced,
    "one parameter less": parameter_of_the_optimizer_dropped,
    "tensor": lambda f: f.set_offset(torch.zeros(3, device="cuda")),
    "list grows": lambda f: f.factors.append(1.0),
    "dict grows": lambda f: f.options.update(c=1.0),
    "value becomes a tensor": lambda f: f.set_rate(torch.ones((), device="cuda")),
    "load_state_dict": lambda f: f.optimizer.load_state_dict(f.optimizer.state_dict()),
}


def buffer_replaced(found):
    found.model[1].running_var = found.model[1].running_var.clone()


#: A change of memory that the kind of call does not name: its graph is made anew.
CAPTURED_AGAIN = {
    "buffer's memory": lambda f: elsewhere(f.model[1].running_mean),
    "buffer": buffer_replaced,
}


@pytest.fixture
def replayed():
    """A captured function, the entry of its calls and that one's graph."""
    with FakeCuda():
        found = subject("cuda")
        for _ in range(5):
            entry, graph = call(found)
        assert graph.replays == 3
        assert call(found) == (entry, graph)
        yield found, entry, graph


@pytest.mark.parametrize("change", OTHER_KINDS)
def test_another_kind_of_call_is_seen(replayed, change):
    found, entry, graph = replayed
    for _ in range(2):  # the second time the other kind is known too
        undo = OTHER_KINDS[change](found)
        try:
            other, _ = call(found)
            assert other is not entry
            assert call(found)[0] is other
        finally:
            undo()
        assert call(found) == (entry, graph)


@pytest.mark.parametrize("change", ANEW)
def test_other_objects_are_seen(replayed, change):
    found, entry, _ = replayed
    ANEW[change](found)
    other, graph = call(found)
    assert other is not entry
    assert graph is None
    assert list(found.function._graphs._entries.values()) == [other]


@pytest.mark.parametrize("change", CAPTURED_AGAIN)
def test_other_memory_of_buffers_is_seen(replayed, change):
    found, entry, graph = replayed
    CAPTURED_AGAIN[change](found)
    same_entry, other = call(found)
    assert same_entry is entry
    assert other is not graph
    assert call(found) == (entry, other)


def test_a_learning_rate_is_followed_in_the_same_graph(replayed):
    found, entry, graph = replayed
    before = found.model[3].bias.detach().clone()
    group(found)["lr"] = 0.0
    group(found)["initial_lr"] = 5.0  # as schedulers keep it there: nothing reads it in a step
    assert call(found) == (entry, graph)
    assert torch.equal(found.model[3].bias, before)
    group(found)["lr"] = torch.tensor(0.1)
    assert call(found)[0] is not entry


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_modes_are_seen(mode):
    with FakeCuda():
        model, x = small_model().to("cuda").eval(), torch.ones(2, 4, device="cuda")
        function = braze.capture(lambda x: model(x))
        for _ in range(4):
            function(x)
        entry = function._graphs._entry
        with mode():
            function(x)
        assert function._graphs._entry is not entry
        function(x)
        assert function._graphs._entry is entry


def test_gradients_that_are_read_are_seen():
    """Whether one is there is part of the kind of call; where it lies is not."""
    with FakeCuda():
        model, x = small_model().to("cuda").eval(), torch.ones(2, 4, device="cuda")
        parameters = list(model.parameters())
        function = braze.capture(lambda x: model(x).sum().backward())

        def total():
            function(x)
            return [p.grad.clone() for p in parameters], function._graphs._entry

        model.zero_grad()
        one, _ = total()  # none there
        for _ in range(6):
            two, entry = total()
        assert entry.graph is not None
        for p in parameters:
            p.grad = torch.zeros_like(p.grad)  # in other memory
        again, same_entry = total()
        assert same_entry is entry
        for a, b in zip(one, again, strict=True):
            torch.testing.assert_close(a, b)
        parameters[-1].grad = None
        without, other = total()
        assert other is not entry
        torch.testing.assert_close(without[-1], one[-1])
        torch.testing.assert_close(without[0], 2 * one[0])
        assert not torch.equal(two[0], one[0])


def test_a_first_gradient_is_seen_by_a_function_that_had_none():
    """A function that was replayed without gradients runs eagerly when one is there, since nobody
    knows what it does with it."""
    with FakeCuda():
        model, x = small_model().to("cuda").eval(), torch.ones(2, 4, device="cuda")
        function = braze.capture(lambda x: model(x).sum())
        for _ in range(4):
            function(x)
        entry = function._graphs._entry
        assert entry.eager_calls == 2
        model[3].bias.grad = torch.ones(3, device="cuda")
        function(x)
        assert entry.eager_calls == 3
        function(x)
        assert entry.eager_calls == 3


def test_the_longest_unused_graph_goes_first(monkeypatch):
    monkeypatch.setattr("braze.step.graphs._MAX_ENTRIES", 2)
    with FakeCuda():
        model, x = small_model().to("cuda").eval(), torch.ones(2, 4, device="cuda")
        function = braze.capture(lambda x, factor: model(x) * factor)

        def entry(factor):
            function(x, factor)
            return function._graphs._entry

        first, second = entry(1), entry(2)
        assert entry(1) is first
        assert entry(1) is first
        entry(3)  # in the place of the second
        assert entry(1) is first
        assert entry(2) is not second
        function.recapture()
        assert entry(2).eager_calls == 1


# ---- in a step ----

STEP_CHANGES = {
    "shape": lambda f: swap(f, "args", (f.args[0][:3], f.args[1][:3])),
    "dtype of the target": lambda f: swap(f, "args", (f.args[0], f.args[1].int())),
    "hyper-parameter": lambda f: swap(group(f), "momentum", 0.5),
    "eval mode of one": lambda f: calling(f.model[1].train, False, True),
    "requires_grad": lambda f: calling(f.model[0].weight.requires_grad_, False, True),
    "determinism": lambda f: calling(torch.use_deterministic_algorithms, False, True),
    "precision": lambda f: swap(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "clipping": lambda f: swap(f.function, "max_grad_norm", 0.5),
    "average's weight": lambda f: swap(f.optimizer, "max_grad_norm", 0.5),
    "parameter's memory": lambda f: elsewhere(f.model[3].bias),
}


@pytest.fixture
def replayed_step():
    with FakeCuda():
        model = small_model().to("cuda")
        optimizer = braze.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        args = torch.ones(6, 4, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")
        found = SimpleNamespace(
            model=model, optimizer=optimizer, args=args, kwargs={}, around=contextlib.nullcontext()
        )
        found.function = braze.TrainStep(model, lambda out, y: loss_fn(out, y.long()), optimizer)
        for _ in range(5):
            entry, graph = call(found)
        assert graph.replays == 3
        yield found, entry, graph


@pytest.mark.parametrize("change", STEP_CHANGES)
def test_another_kind_of_step_is_seen(replayed_step, change):
    found, entry, graph = replayed_step
    undo = STEP_CHANGES[change](found)
    try:
        assert call(found)[0] is not entry
    finally:
        undo()
    assert call(found) == (entry, graph)


@pytest.mark.parametrize("change", [c for c in ANEW if "tensor" not in c and "grows" not in c])
def test_other_objects_of_a_step_are_seen(replayed_step, change):
    found, entry, _ = replayed_step
    ANEW[change](found)
    assert call(found)[0] is not entry
    assert len(found.function._graphs._entries) == 1


@pytest.mark.parametrize("change", CAPTURED_AGAIN)
def test_other_memory_of_a_step_s_buffers_is_seen(replayed_step, change):
    found, entry, graph = replayed_step
    CAPTURED_AGAIN[change](found)
    assert call(found)[0] is entry
    assert entry.graph is not graph


def test_a_step_puts_its_gradients_back(replayed_step):
    found, entry, graph = replayed_step
    kept = [p.grad for p in found.model.parameters()]
    for i in range(len(kept)):
        list(found.model.parameters())[i].grad = None if i % 2 else torch.ones_like(kept[i])
        assert call(found) == (entry, graph)
        assert all(p.grad is g for p, g in zip(found.model.parameters(), kept, strict=True))
