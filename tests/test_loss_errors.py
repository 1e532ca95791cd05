"""Bad labels, shapes, dtypes and settings of cross_entropy and nll_loss."""

import pytest
import torch
import torch.nn.functional as stock

import braze
import braze.nn.functional as F
from conftest import cuda_only


def test_label_out_of_range_raises_on_cpu():
    x = torch.randn(3, 5, requires_grad=True)
    for bad in (5, -1, -101):
        target = torch.tensor([0, bad, 1])
        for call in (
            lambda t: F.cross_entropy(x, t),
            lambda t: F.cross_entropy(x, t, label_smoothing=0.1, reduction="none"),
            lambda t: F.nll_loss(x, t, reduction="sum"),
        ):
            with pytest.raises(IndexError, match=f"^Target {bad} is out of bounds.$"):
                call(target)
        with pytest.raises(RuntimeError, match=f"Target {bad} is out of bounds"):
            torch.ops.braze.cross_entropy(x, target)
    braze.check_errors()
    loss = F.cross_entropy(x, target := torch.tensor([0, 1, 2]))
    target[0] = 99
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("shape", [(64, 10), (2000, 10), (4, 10, 6)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@cuda_only
def test_label_out_of_range_on_cuda(device, shape, smoothing):
    braze.check_errors(device)
    x = torch.randn(shape, device=device, requires_grad=True)
    target = torch.randint(10, shape[:1] + shape[2:], device=device)
    bad = target.clone()
    bad[1] = 10
    settings = {"reduction": "none", "label_smoothing": smoothing}
    good_loss, loss = F.cross_entropy(x, target, **settings), F.cross_entropy(x, bad, **settings)
    assert loss[1].isnan().all()
    assert torch.equal(loss[0], good_loss[0])
    assert torch.equal(loss[2:], good_loss[2:])
    (grad,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
    assert torch.equal(grad[1], torch.zeros_like(grad[1]))
    assert F.cross_entropy(x, bad).isnan()
    assert F.nll_loss(x, bad).isnan()
    with pytest.raises(IndexError, match="Target 10 is out of bounds"):
        braze.check_errors()
    braze.check_errors()
    F.nll_loss(x, bad - 20)
    with pytest.raises(IndexError, match="Target -"):
        braze.check_errors(device)
    torch.cuda.synchronize()


def test_bad_input_raises_as_torch_does(device):
    """Same exception type and words; a CUDA torch without device asserts words some differently."""
    x, y = torch.randn(3, 5, device=device), torch.tensor([1, 2, 3], device=device)
    deep = torch.randn(2, 5, 4, device=device)
    cases = [
        ("cross_entropy", (x, y.int()), {}),
        ("cross_entropy", (x, y.float()), {}),
        ("cross_entropy", (x, y[:2]), {}),
        ("cross_entropy", (x, y.sum()), {}),
        ("cross_entropy", (x.sum(), y.sum()), {}),
        ("cross_entropy", (x[0], y[:2]), {}),
        ("cross_entropy", (x, y[:, None]), {}),
        ("cross_entropy", (deep, y[:2, None].expand(2, 3)), {}),
        ("cross_entropy", (deep, y[:2]), {}),
        ("cross_entropy", (x, y, torch.ones(4, device=device)), {}),
        ("cross_entropy", (x, x, torch.ones(4, device=device)), {}),
        ("cross_entropy", (x, x.long()), {}),
        ("cross_entropy", (x, x), {"ignore_index": 2}),
        ("cross_entropy", (x, y), {"label_smoothing": 1.5}),
        ("cross_entropy", (x, y), {"reduction": "average"}),
        ("cross_entropy", (x.sum(), x.sum()), {}),
        ("nll_loss", (x.sum(), y), {}),
        ("nll_loss", (x, y.int()), {}),
        ("nll_loss", (x, x), {}),
    ]
    for function, args, options in cases:
        with pytest.raises((RuntimeError, ValueError, IndexError)) as stock_error:
            getattr(stock, function)(*args, **options)
        with pytest.raises((RuntimeError, ValueError, IndexError)) as error:
            getattr(F, function)(*args, **options)
        assert issubclass(stock_error.type, error.type), (args, options)
        if device == "cpu":
            words = str(stock_error.value).split("\n")[0].replace("Long", "torch.int64", 1)
            ours = str(error.value).replace("int32", "Int").replace("float32", "Float")
            ours = ours.replace("dtype to be Long", "dtype to be torch.int64")
            if words.startswith("expected scalar type"):  # before torch 2.13
                words = "expected target dtype to be torch.int64 or Byte"
            assert words in ours, (words, ours)
    for bad in (x.long(), x.cfloat()):
        with pytest.raises(RuntimeError, match="expected input of dtype float64"):
            torch.ops.braze.cross_entropy(bad, y)
    with pytest.raises(RuntimeError, match="expected scalar type"):
        F.cross_entropy(x, y, torch.ones(5, device=device, dtype=torch.float64))
    raw = torch.ops.braze.cross_entropy_backward
    loss, stats, total = torch.ops.braze.cross_entropy(x, y)
    with pytest.raises(RuntimeError, match="expected stats as the forward op returned it"):
        raw(loss, x, y, None, stats[:, :2], total, 1, -100, 0.0, False)
    with pytest.raises(RuntimeError, match="expected grad_output of the loss's shape"):
        raw(x, x, y, None, stats, total, 1, -100, 0.0, False)
    with pytest.raises(RuntimeError, match="only a probability target"):
        raw(loss, x, y, None, stats, total, 1, -100, 0.0, True)
