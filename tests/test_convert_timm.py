"""Converted models of timm: the same values and gradients, and how many runs are fused."""

import copy
import warnings

import pytest
import torch

import braze
from common import assert_by_rule
from convert_models import ops_run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    timm = pytest.importorskip("timm", exc_type=ImportError)

#: The number of fused runs.
FUSED = {
    "cspdarknet53": 67,
    "cspresnet50": 51,
    "densenet121": 121,
    "dla34": 33,
    "efficientnet_b0": 42,
    "ghostnet_100": 34,
    "hrnet_w18_small": 66,
    "mobilenetv2_100": 45,
    "mobilenetv3_small_100": 29,
    "regnety_002": 40,
    "repvgg_a0": 22,
    "resnet18": 17,
    "resnetv2_50": 49,
    "tf_efficientnet_lite0": 42,
}
#: What braze has no layers for.
NO_LAYERS = ("Dropout",)


def make(name, **options):
    return timm.create_model(name, num_classes=7, **options).double()


def run(model, x):
    torch.manual_seed(3)
    y = model(x)
    weight = torch.arange(y.numel()).view_as(y).to(y)
    grads = torch.autograd.grad((y * weight).mean(), list(model.parameters()), allow_unused=True)
    return y, *grads


def assert_same(model, original, x):
    # In float64 whatever is not the same computation differs by much more than by rounding.
    for a, b in zip(run(model, x), run(original, x), strict=True):
        assert (a is None) == (b is None)
        if a is not None:  # gradients that batch norm cancels are rounding alone
            assert (a - b).norm() <= 1e-6 * b.norm() + 1e-9
    for a, b in zip(model.buffers(), original.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", FUSED)
def test_values_and_gradients(name, device):
    torch.manual_seed(0)
    original = make(name).to(device)
    model = copy.deepcopy(original)
    report = braze.convert_report(model)
    assert len(report.fused) >= FUSED[name]
    assert {e.before for e in report.left_alone} <= set(NO_LAYERS)
    braze.convert(model)
    assert str(braze.convert_report(model)) == str(report)
    x = torch.randn(2, 3, 64, 64, device=device, dtype=torch.float64)
    for training in (True, False):
        assert_same(model.train(training), original.train(training), x)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100"])
def test_stochastic_depth(name, device):
    """The same numbers are drawn, and in evaluation the runs go across it."""
    torch.manual_seed(0)
    original = make(name, drop_path_rate=0.3).to(device)
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(4, 3, 64, 64, device=device, dtype=torch.float64)
    assert_same(model.train(), original.train(), x)
    assert_same(model.eval(), original.eval(), x)
    plain = braze.convert(make(name).to(device)).eval()
    runs = [ops_run(lambda m=m: m(x)).count("batch_norm_act") for m in (model, plain)]
    assert runs[0] == runs[1] > 0


def test_by_the_rule(device):
    torch.manual_seed(0)
    wide = make("resnet18").to(device).eval()
    original = copy.deepcopy(wide).float()
    model = braze.convert(copy.deepcopy(original))
    x = torch.randn(2, 3, 64, 64, device=device)
    assert_by_rule(model(x), original(x), wide(x.double()), ulps=64)
