"""Converted models of torchvision: the same values and gradients, and how many runs are fused.

BRAZE_ZOO=all takes every classification and segmentation model instead of a dozen.
"""

import copy
import os

import pytest
import torch

import braze

torchvision = pytest.importorskip("torchvision", exc_type=ImportError)

#: The least number of fused runs.
FUSED = {
    "alexnet": 7,
    "convnext_tiny": 0,
    "deeplabv3_resnet50": 39,
    "densenet121": 1,
    "efficientnet_b0": 0,
    "googlenet": 61,
    "inception_v3": 96,
    "mnasnet0_5": 35,
    "mobilenet_v2": 0,
    "mobilenet_v3_large": 11,
    "regnet_y_400mf": 33,
    "resnet18": 9,
    "resnet50": 33,
    "shufflenet_v2_x0_5": 37,
    "squeezenet1_1": 26,
    "swin_t": 0,
    "vgg16_bn": 15,
}


def names():
    if os.environ.get("BRAZE_ZOO") != "all":
        return list(FUSED)
    models = torchvision.models
    kinds = (models, models.segmentation)
    return sorted({n for kind in kinds for n in models.list_models(module=kind)})


def make(name):
    segmentation = torchvision.models.list_models(module=torchvision.models.segmentation)
    options = {"weights_backbone": None} if name in segmentation else {}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    model = torchvision.models.get_model(name, weights=None, num_classes=7, **options)
    for module in model.modules():
        if isinstance(getattr(module, "p", None), float):  # dropout, stochastic depth
            module.p = 0.0
    return model


def run(model, x):
    y = model(x)
    outputs = y.values() if isinstance(y, dict) else y if isinstance(y, tuple) else (y,)
    outputs = [y for y in outputs if y is not None]
    loss = sum((y * torch.arange(y.numel()).view_as(y).to(y)).mean() for y in outputs)
    return outputs, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("name", names())
def test_values_and_gradients(name, device):
    torch.manual_seed(0)
    original = make(name).to(device, torch.float64)
    model = copy.deepcopy(original)
    report = braze.convert_report(model)
    assert len(report.fused) >= FUSED.get(name, 0)
    braze.convert(model)
    assert str(braze.convert_report(model)) == str(report)
    size = 224 if name.startswith(("vit", "swin", "maxvit")) else 96
    size = 299 if name == "inception_v3" else size  # what its auxiliary classifier takes
    # In float64 whatever is not the same computation differs by much more than by rounding. (On a
    # GPU torch's float64 hardswish takes 1/6 in fp32, which costs mobilenet_v3_large 5e-7.)
    x = torch.randn(2, 3, size, size, device=device, dtype=torch.float64)
    for result, expected in zip(run(model, x), run(original, x), strict=True):
        for a, b in zip(result, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:  # gradients that batch norm cancels are rounding alone
                assert (a - b).norm() <= 1e-6 * b.norm() + 1e-9
    for a, b in zip(model.buffers(), original.buffers(), strict=True):
        torch.testing.assert_close(a, b)
