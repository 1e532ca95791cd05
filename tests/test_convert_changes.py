"""What changes in a model after it was converted: noticed, undone, freed."""

import copy
import pickle
import weakref

import pytest
import torch
from convert_common import Block, assert_same, call
from torch import nn

import braze
from convert_models import ops_run


def untie(m):
    m.layers[0].weight = nn.Parameter(m.layers[0].weight.detach() * 2)


CHANGES = {
    "padding_mode": lambda m: setattr(m.conv, "padding_mode", "circular"),
    "return_indices": lambda m: setattr(m.pool, "return_indices", True),
    "no affine": lambda m: (setattr(m.bn, "weight", None), setattr(m.bn, "bias", None)),
    "no statistics": lambda m: (setattr(m.bn, "running_mean", None),
                                setattr(m.bn, "running_var", None)),
    "no weight": lambda m: setattr(m.conv, "weight", None),
    "no layer": lambda m: setattr(m, "bn", None),
    "deleted": lambda m: delattr(m, "bn"),
    "append": lambda m: m.layers.append(nn.Conv2d(4, 4, 1, bias=False).requires_grad_(False)),
    "slice": lambda m: setattr(m, "layers", m.layers[:2]),
    "delete": lambda m: m.layers.__delitem__(1),
    "untie": untie,
    "hook": lambda m: m.bn.register_forward_hook(lambda _, args, y: y + args[0]),
    "replaces the next layer": lambda m: m.conv.register_forward_hook(
        lambda *_: setattr(m, "bn", nn.Identity())
    ),
    "momentum": lambda m: setattr(m.bn, "momentum", None),
    "forward of an instance": lambda m: setattr(m, "forward", lambda x: x * 3),
    "method of an instance": lambda m: setattr(m, "front", lambda x: m.conv(x) * 3),
    "forward of a layer": lambda m: setattr(m.bn, "forward", lambda x: x * 3),
    "eval": lambda m: m.eval(),
    "float64": lambda m: m.double(),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name):
    original = Block()
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(2, 1, 8, 8)
    assert_same(model(x), original(x))
    for m in (model, original):
        torch.manual_seed(0)
        CHANGES[name](m)
    x = x.to(next(p for p in original.parameters() if p is not None).dtype)
    for _ in range(2):
        ours, theirs = call(model, x)[0], call(original, x)[0]
        if isinstance(theirs, tuple) and isinstance(theirs[0], type):
            assert ours[0] is theirs[0]
        else:
            assert_same(ours, theirs)
    assert_same(list(model.buffers()), list(original.buffers()))


def test_another_forward_of_the_class_is_noticed():
    class Net(Block):
        def forward(self, x):
            return self.front(x)

    original, model = Net(), braze.convert(Net())
    model.load_state_dict(original.state_dict())
    x = torch.randn(2, 1, 8, 8)
    Net.front = lambda self, x: self.conv(x) * 2
    assert_same(model(x), original(x))
    Net.forward.__defaults__ = (x,)
    assert_same(model(), original())
    Net.forward.__code__ = (lambda self, x: self.conv(x) * 5).__code__
    assert_same(model(x), original(x))
    Net.forward = lambda self, x: self.conv(x) * 7
    assert_same(model(x), original(x))


def test_a_child_replaced_on_the_way_through_a_sequential():
    class Replaces(nn.Module):
        def forward(self, x):
            self.owner[0][2] = nn.Tanh()
            return x

    original = nn.Sequential(Replaces(), nn.Linear(4, 4), nn.ReLU())
    original[0].owner = [original]
    model = copy.deepcopy(original)
    braze.convert(model)
    x = torch.randn(3, 4)
    assert_same(model(x), original(x))


# Back again, and what else is done with a model.


def test_unconvert():
    original = nn.Sequential(Block(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2), nn.ReLU())
    kinds = [type(m) for m in original.modules()]
    model = braze.convert(copy.deepcopy(original))
    assert [type(m) for m in model.modules()] != kinds
    assert braze.unconvert(model) is model
    assert [type(m) for m in model.modules()] == kinds
    assert b"braze" not in pickle.dumps(model.state_dict())
    x = torch.randn(2, 1, 8, 8)
    assert_same(model(x), original(x))
    assert braze.unconvert(model) is model
    with pytest.raises(TypeError, match=r"unconvert\(\): model must be a torch.nn.Module, not int"):
        braze.unconvert(3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_of_an_unconverted_model():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2)).eval()
    x = torch.randn(2, 1, 8, 8)
    y = braze.convert(model)(x)
    scripted = torch.jit.script(braze.unconvert(model))
    torch.testing.assert_close(scripted(x), y)


def test_a_hook_removed_before_converting_again():
    original = Block()
    model = copy.deepcopy(original)
    hook = model.bn.register_forward_hook(lambda *_: None)
    assert len(braze.convert_report(braze.convert(model)).fused) == 1
    hook.remove()
    report = braze.convert_report(braze.convert(model))
    assert {e.name for e in report.fused} == {"conv, bn, relu()", "layers.0, layers.1, layers.2"}
    x = torch.randn(2, 1, 8, 8)
    assert ops_run(lambda: model(x)).count("conv_bn_relu2d") == 2
    assert_same(model(x), (original(x), original(x))[1])


def test_a_replaced_layer_is_freed():
    model = braze.convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Block()))
    alive = [weakref.ref(model[0].weight), weakref.ref(model[2].conv)]
    model[0], model[2].conv = nn.Linear(4, 4), nn.Conv2d(1, 4, 1)
    assert [a() for a in alive] == [None, None]
