"""braze.multiprocessors: kernels that count on a part of the GPU."""

import pytest
import torch

import braze
from braze import _lib, _multiprocessors
from conftest import cuda_only
from step_common import batches, entries, loss_fn, make


def test_the_number_holds_within_the_block():
    assert _multiprocessors.current() is None
    with braze.multiprocessors(16):
        assert _multiprocessors.current() == 16
        with braze.multiprocessors(None):
            assert _multiprocessors.current() is None
        with pytest.raises(KeyError), braze.multiprocessors(3):
            raise KeyError
        assert _multiprocessors.current() == 16
    assert _multiprocessors.current() is None


@pytest.mark.parametrize("count", [0, -1, 2.0, "8", 1 << 20])
def test_other_numbers_are_refused(count):
    with (
        pytest.raises(ValueError, match=r"multiprocessors: expected a positive number or None"),
        braze.multiprocessors(count),
    ):
        pass
    assert _multiprocessors.current() is None


def test_a_step_takes_a_graph_for_each_number(any_device):
    model, optimizer = make(any_device)
    step = braze.TrainStep(model, loss_fn, optimizer)
    for count in (None, 4, None, 4):
        with braze.multiprocessors(count):
            for batch in batches(any_device, 3):
                step(*batch)
    if any_device != "cpu":
        assert len(entries(step)) == 2


@pytest.fixture
def network():
    torch.manual_seed(0)
    layers = [
        braze.nn.Conv2d(3, 32, 3, padding=1), braze.nn.BatchNorm2d(32), braze.nn.ReLU(),
        braze.nn.MaxPool2d(2), braze.nn.Conv2d(32, 64, 3, padding=1), braze.nn.BatchNorm2d(64),
        braze.nn.ReLU(), braze.nn.Conv2d(64, 128, 1), braze.nn.Conv2d(128, 128, 3, groups=128),
        braze.nn.GroupNorm(8, 128), braze.nn.Conv2d(128, 256, 3, padding=1),
        braze.nn.Conv2d(256, 96, 3, stride=2), torch.nn.Flatten(), braze.nn.LayerNorm(96 * 9),
        braze.nn.Linear(96 * 9, 2048), braze.nn.LayerNorm(2048), braze.nn.Linear(2048, 10),
    ]  # fmt: skip
    return braze.convert(torch.nn.Sequential(*layers)).to("cuda", memory_format=torch.channels_last)


def gradients(network, images, labels, dtype):
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        loss = braze.nn.CrossEntropyLoss()(network(images), labels)
    return torch.autograd.grad(loss, [*network.parameters()])


@cuda_only
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("count", [1, 2, 5, 64])
@pytest.mark.parametrize("backend", ["auto", "braze"])
def test_results_are_the_same_but_for_the_order_of_sums(network, precision, count, backend):
    if precision == "tf32":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "tf32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    images = torch.randn(16, 3, 18, 18, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(10, (16,), device="cuda")
    with braze.backend(conv2d=backend, matmul=backend, layer_norm=backend, group_norm=backend):
        expected = gradients(network, images, labels, dtype)
        with braze.multiprocessors(count):
            found = gradients(network, images, labels, dtype)
    limit = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}[precision]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= limit * other.norm() + 1e-5


@cuda_only
def test_plans_follow_from_it():
    a = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)

    def plans():
        before = _lib.cuda_library.plans_made()
        with braze.backend(matmul="braze"):
            braze.matmul(a, a.T)
        return _lib.cuda_library.plans_made() - before

    assert [plans(), plans()] == [1, 0]
    with braze.multiprocessors(7):
        assert [plans(), plans()] == [1, 0]
    assert plans() == 0
