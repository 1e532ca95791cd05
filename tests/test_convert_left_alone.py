"""What braze.convert leaves alone, and what it has to notice: layers, runs that are not the block,
unusual forwards."""

import copy
import random

import numpy
import pytest
import torch
from torch import nn

import braze
import convert_models
from convert_models import BLOCK, UNUSUAL, NotInOneRun, Switchable, images, ops_run


def reason(model, name):
    return {e.name: e.reason for e in braze.convert_report(model).left_alone}[name]


def with_hook(register):
    def make():
        layer = nn.Linear(3, 3)
        getattr(layer, register)(lambda *_: None)
        return layer

    return make


class MyLinear(nn.Linear):
    pass


def parametrized():
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))


def replaced():
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (with_hook("register_forward_hook"), "has forward_hooks"),
        (with_hook("register_forward_pre_hook"), "has forward_pre_hooks"),
        (with_hook("register_full_backward_hook"), "has backward_hooks"),
        (with_hook("register_full_backward_pre_hook"), "has backward_pre_hooks"),
        (with_hook("register_state_dict_post_hook"), "has state_dict_hooks"),
        (parametrized, "parametrized"),
        (replaced, "its forward has been replaced"),
        (lambda: MyLinear(3, 3), "a subclass of Linear"),
        (lambda: nn.LazyLinear(3), "lazy: run it once first"),
        (lambda: nn.Linear(3, 3, dtype=torch.complex64), "torch.complex64 is not supported"),
        (lambda: nn.ConvTranspose1d(3, 3, 3), "braze has no such layer"),
        (lambda: torch.ao.nn.quantized.ReLU6(), "quantized"),
    ],
)
def test_left_alone(make, expected):
    model = nn.Sequential(make(), nn.ReLU())
    kind = type(model[0])
    assert reason(model, "0") == expected
    with pytest.raises(RuntimeError, match=f"left alone(?s:.*)0: .*{expected}"):
        braze.convert(model, strict=True)
    assert type(model[1]) is nn.ReLU, "strict has to raise before anything is changed"
    braze.convert(model)
    assert type(model[0]) is kind
    assert type(model[1]) is braze.nn.ReLU


def test_shared_layers_are_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.append(model[0])
    assert reason(model, "0") == "shared: 0, 2"
    braze.convert(model)
    assert type(model[0]) is nn.Linear
    assert type(model[1]) is braze.nn.ReLU


@pytest.mark.parametrize("index", range(4))
def test_hooks_run_and_keep_a_run_from_being_fused(index):
    calls = []
    model = convert_models.mnist()
    model[index].register_forward_hook(lambda *_: calls.append(index))
    braze.convert(model)
    # A run without its pooling, or without its convolution, is a run too.
    first = {0: ["1, 2"], 3: ["0, 1, 2"]}.get(index, [])
    assert [e.name for e in braze.convert_report(model).fused] == [*first, "4, 5, 6, 7"]
    assert not type(model[index]).__module__.startswith("braze")
    model(images("cpu"))
    assert calls == [index]


@pytest.mark.parametrize("index", range(4))
def test_hooks_added_later_run(index):
    calls = []
    model = braze.convert(convert_models.mnist()).eval()
    x = images("cpu")
    y = model(x)
    hook = model[index].register_forward_hook(lambda *_: calls.append(index))
    assert BLOCK not in ops_run(lambda: model(x))
    assert calls == [index]
    torch.testing.assert_close(model(x), y)
    hook.remove()
    assert BLOCK in ops_run(lambda: model(x))


def test_global_hooks_see_every_layer():
    model, seen = braze.convert(convert_models.mnist()), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        model(images("cpu"))
    finally:
        handle.remove()
    assert set(seen) == set(model.modules())


def test_layers_changed_after_conversion():
    model = braze.convert(convert_models.mnist()).eval()
    original = convert_models.mnist().eval()
    original.load_state_dict(model.state_dict())
    x = images("cpu")
    for m in (model, original):
        m[1] = nn.Identity()
        m.append(nn.Linear(10, 2))
    original[-1].load_state_dict(model[-1].state_dict())
    torch.testing.assert_close(model(x), original(x))
    torch.testing.assert_close(model[:4](x), original[:4](x))
    for m in (model, original):
        nn.utils.parametrizations.weight_norm(m[0])
    torch.testing.assert_close(model(x), original(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.__setitem__(2, nn.PReLU()),
        lambda m: m.__setitem__(1, nn.SyncBatchNorm(8)),  # it exchanges statistics in between
    ],
    ids=["PReLU", "SyncBatchNorm"],
)
def test_runs_that_are_not_the_block(change):
    model = convert_models.mnist()[:4]
    change(model)
    fused = braze.convert_report(model).fused
    assert all("Conv2d" not in entry.before for entry in fused)
    assert ops_run(lambda: braze.convert(model)(images("cpu")))[0] == "conv2d"
    assert type(model[0]) is braze.nn.Conv2d


def test_a_convolution_that_the_block_has_not():
    model = convert_models.mnist()[:4]
    model[0].padding_mode = "reflect"
    (entry,) = braze.convert_report(model).fused
    assert (entry.name, entry.after) == ("1, 2", "BatchNormAct2d")


@pytest.mark.parametrize("last", [nn.MaxPool2d(2, return_indices=True), nn.AvgPool2d(2), None])
def test_runs_without_a_pooling_that_fits(last):
    model = convert_models.mnist()[:4]
    model = model[:3] if last is None else model
    if last is not None:
        model[3] = last
    original = copy.deepcopy(model)
    (entry,) = braze.convert_report(model).fused
    assert (entry.name, entry.after) == ("0, 1, 2", "ConvBnReLU2d")
    assert entry.before == "Conv2d, BatchNorm2d, ReLU"
    x = images("cpu")
    ran = ops_run(lambda: braze.convert(model)(x))
    assert ran[0] == "conv_bn_relu2d"
    assert "relu" not in ran
    original(x)  # both have counted one batch
    ours, theirs = model(x), original(x)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(model[1].num_batches_tracked, original[1].num_batches_tracked)


def test_layers_called_twice():
    """What is fused is the call whose result is used once, not that layer's other call."""
    model = NotInOneRun()
    (entry,) = braze.convert_report(model).fused
    assert entry.name == "conv, bn, relu()"
    original = copy.deepcopy(model)
    x = images("cpu")
    torch.testing.assert_close(braze.convert(model)(x), original(x))
    assert model.bn.num_batches_tracked == 2
    torch.testing.assert_close(model.bn.running_mean, original.bn.running_mean)


@pytest.mark.parametrize("kind", UNUSUAL, ids=lambda kind: kind.__name__)
def test_unusual_forwards(kind, capsys):
    original = kind()
    model = copy.deepcopy(original)
    state = torch.get_rng_state()
    braze.convert(model, strict=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.__dict__.keys() == original.__dict__.keys()
    x = images("cpu")
    for i in range(4):
        results = []
        for m in (model, original):
            random.seed(i)
            numpy.random.seed(i)  # noqa: NPY002
            results.append((m(x), random.random(), numpy.random.rand()))  # noqa: NPY002
        (y, *ours), (expected, *theirs) = results
        torch.testing.assert_close(y, expected)
        assert ours == theirs
        assert getattr(model, "calls", i + 1) == i + 1
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == (8 if kind.__name__ == "Prints" else 0)


def test_settings_are_watched():
    model = Switchable()
    original = copy.deepcopy(model)
    braze.convert(model)
    x = images("cpu")
    for scale in (2.0, 3.0, 2, True, 0.5):
        model.scale = original.scale = scale
        torch.testing.assert_close(model(x), original(x))
    for m in (model, original):
        m.shift = 5
    torch.testing.assert_close(model(x), original(x))
    for m in (model, original):
        m.tail.append(nn.Identity())
        m.tail[0] = nn.MaxPool2d(2)
    torch.testing.assert_close(model(x), original(x))
    for scale in range(20):  # more than there are plans for
        model.scale = original.scale = scale
        torch.testing.assert_close(model(x), original(x))
