import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as stock
from hypothesis import strategies as st

import braze
import braze.nn.functional as F
from common import (
    assert_by_rule,
    assert_same_layer,
    check_against_stock,
    compile,
    cuda_kernels_of,
    fuzzed,
)
from convert_models import ops_run

# (input, weight, stride, padding, dilation, groups)
CASES = {
    "one pixel": ((1, 1, 1, 1), (1, 1, 1, 1), 1, 0, 1, 1),
    "first layer": ((3, 1, 28, 28), (32, 1, 3, 3), 1, 1, 1, 1),
    "8x8 stride 4": ((2, 4, 20, 20), (32, 4, 8, 8), 4, 0, 1, 1),
    "second layer": ((3, 32, 14, 14), (64, 32, 3, 3), 1, 1, 1, 1),
    "many images": ((70, 16, 9, 9), (40, 16, 3, 3), 1, 0, 1, 1),
    "1x1": ((2, 17, 9, 5), (13, 17, 1, 1), 1, 0, 1, 1),
    "1x1 stride 2": ((2, 16, 8, 8), (8, 16, 1, 1), 2, 0, 1, 1),
    "odd": ((2, 5, 11, 13), (7, 5, 3, 5), (2, 1), (1, 2), (1, 2), 1),
    "groups": ((2, 12, 7, 9), (18, 4, 3, 3), 1, 1, 1, 3),
    "depthwise": ((2, 19, 10, 10), (19, 1, 3, 3), 1, 1, 1, 19),
    "no images": ((0, 3, 8, 8), (4, 3, 3, 3), 1, 1, 1, 1),
}
CHANNELS_LAST = torch.channels_last


def conv2d_relu(*args):
    return stock.conv2d(*args).relu()


def operands(shape, weight, device, dtype, bias=True, channels_last=False):
    """Small integers: no result is near 0 where it is not, so that rounding cannot decide whether
    the gradient passes. Every other filter is negative."""
    g = torch.Generator().manual_seed(sum(shape) + sum(weight) + torch.initial_seed())
    signs = torch.ones(weight[0])
    signs[1::2] = -1
    tensors = [
        torch.randint(1, 4, shape, generator=g),
        torch.randint(1, 4, weight, generator=g) * signs.view(-1, 1, 1, 1),
    ]
    if channels_last:
        tensors = [t.to(memory_format=CHANNELS_LAST) for t in tensors]
    if bias:
        tensors.append(torch.randint(1, 4, weight[:1], generator=g) * signs)
    return [t.to(device, dtype).requires_grad_() for t in tensors]


def call(function, case):
    stride, padding, dilation, groups = CASES[case][2:]
    return lambda x, w, b=None: function(x, w, b, stride, padding, dilation, groups)


def both(case):
    return call(F.conv2d_relu, case), call(conv2d_relu, case)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("case", CASES)
def test_matches_stock(device, dtype, case, channels_last, bias):
    inputs = operands(*CASES[case][:2], device, dtype, bias, channels_last)
    out = call(F.conv2d_relu, case)(*inputs)
    assert out.stride() == call(F.conv2d, case)(*inputs).stride()
    check_against_stock(*both(case), inputs)


@pytest.mark.parametrize("case", ["8x8 stride 4", "second layer", "many images", "1x1", "groups"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_every_kernel(device, dtype, case, channels_last):
    """Whether it applies the ReLU itself or leaves it."""
    inputs = operands(*CASES[case][:2], device, dtype, channels_last=channels_last)
    inputs = [t.detach() for t in inputs]
    ours, theirs = both(case)
    expected = theirs(*inputs), theirs(*(t.double() for t in inputs))
    known = {k["name"] for k in braze.kernels("conv2d") if (k["arch"] == "cpu") == on_cpu(device)}
    ran = [name for name in sorted(known) if takes(name, ours, inputs)]
    assert ran
    for name in ran:
        with braze.backend(conv2d=name):
            assert_by_rule(ours(*inputs), *expected, what=name)


# On a GPU: what has the ReLU in it, of (case, format, dtype).
FUSING = {
    "narrow_input": ("8x8 stride 4", CHANNELS_LAST, torch.bfloat16),
    "narrow_input_wgmma": ("8x8 stride 4", CHANNELS_LAST, torch.bfloat16),
    "implicit_gemm_wgmma": ("second layer", CHANNELS_LAST, torch.bfloat16),
    "halo_wgmma": ("second layer", CHANNELS_LAST, torch.float32),
    "pointwise": ("1x1", CHANNELS_LAST, torch.float32),
    "implicit_gemm_simt": ("odd", torch.contiguous_format, torch.float32),
    "direct": ("first layer", torch.contiguous_format, torch.float64),
}


@pytest.mark.parametrize("kernel", FUSING)
def test_launches(device, kernel):
    """No ReLU of its own forward; backward one pass for its gradient and the bias', where a pixel's
    channels are whole vectors."""
    case, form, dtype = FUSING[kernel]
    inputs = operands(*CASES[case][:2], device, dtype, channels_last=form == CHANNELS_LAST)
    ours = call(F.conv2d_relu, case)
    if on_cpu(device) or not takes(kernel, ours, inputs):
        pytest.skip("the kernel is not for this device")
    with braze.backend(conv2d=kernel):
        assert "Relu" not in cuda_kernels_of(lambda: ours(*inputs))
    out = ours(*inputs)
    grad = torch.ones_like(out)
    names = cuda_kernels_of(lambda: torch.autograd.grad(out, inputs, grad))
    together = form == CHANNELS_LAST and out.shape[1] * out.element_size() % 16 == 0
    assert ("Relu" in names) == (not together)
    assert not together or "column_sum" in names


def on_cpu(device):
    return torch.device(device).type == "cpu"


def takes(kernel, function, inputs):
    try:
        with braze.backend(conv2d=kernel):
            function(*inputs)
    except RuntimeError as error:
        return "cannot take these arguments" not in str(error)
    return True


def test_without_channels(device, dtype):
    """Torch's result has no channels then either; ours are the bias."""
    b = torch.tensor([1.0, -1.0, 0.0], device=device).to(dtype)
    x, w = torch.ones(2, 0, 4, 4, device=device).to(dtype), torch.ones(3, 0, 3, 3, device=device)
    out = F.conv2d_relu(x, w.to(dtype), b)
    assert torch.equal(out, b.relu().view(-1, 1, 1).expand(2, 3, 2, 2))


def test_part_of_the_gradients(device, dtype):
    for channels_last, mask in itertools.product((False, True), range(1, 8)):
        inputs = operands((2, 6, 7, 9), (8, 6, 3, 3), device, dtype, channels_last=channels_last)
        some = [t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate(inputs)]
        check_against_stock(F.conv2d_relu, conv2d_relu, some)


@pytest.mark.parametrize("backend", ["auto", "braze"])
@pytest.mark.parametrize("images", [1, 30, 500])
def test_bias_gradient_of_many_pixels(device, dtype, images, backend):
    x, w, b = operands((images, 4, 8, 8), (40, 4, 3, 3), device, dtype, channels_last=True)
    with braze.backend(conv2d=backend):
        check_against_stock(F.conv2d_relu, conv2d_relu, [x.detach(), w.detach(), b])


def test_gradients_in_any_layout(device, dtype):
    for channels_last in (False, True):
        inputs = operands((3, 5, 8, 9), (6, 5, 3, 3), device, dtype, channels_last=channels_last)
        out = F.conv2d_relu(*inputs)
        grads = torch.rand_like(out), torch.rand_like(out[:1, :, :1, :1]).expand_as(out)
        grads += (grads[0].contiguous(), grads[0].contiguous(memory_format=CHANNELS_LAST))
        for g in (*grads, torch.rand_like(out.mT).mT):
            check_against_stock(F.conv2d_relu, conv2d_relu, inputs, grad_output=g)


def test_zero_and_nan_results(device, dtype):
    """No gradient passes where the result is 0; torch lets it pass where it is NaN."""
    for form in (torch.contiguous_format, CHANNELS_LAST):
        x = torch.tensor([0.0, 1.0, -1.0, float("nan")], device=device).to(dtype)
        x = x.view(4, 1, 1, 1).expand(4, 2, 2, 2).contiguous(memory_format=form).requires_grad_()
        w = torch.full((4, 2, 1, 1), 0.5, device=device).to(dtype).requires_grad_()
        b = torch.zeros(4, device=device, dtype=dtype, requires_grad=True)
        out = F.conv2d_relu(x, w, b)
        assert [image.unique().tolist() for image in out[:3]] == [[0], [1], [0]]
        assert out[3].isnan().all()
        dx, db = torch.autograd.grad(out, (x, b), torch.ones_like(out))
        assert [image.unique().tolist() for image in dx] == [[0], [2], [0], [2]]
        assert db.tolist() == [8, 8, 8, 8]


def fuzz(data, device):
    extent = st.integers(1, 12)
    n, c, h, w, k = (data.draw(extent) for _ in range(5))
    r, s = data.draw(st.integers(1, min(h, 5))), data.draw(st.integers(1, min(w, 5)))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    flags = [data.draw(st.booleans()) for _ in range(2)]
    stride = data.draw(st.integers(1, 3))
    with braze.backend(conv2d=data.draw(st.sampled_from(["auto", "braze"]))):
        inputs = operands((n, c, h, w), (k, c, r, s), device, dtype, *flags)
        check_against_stock(
            lambda *t: F.conv2d_relu(*t, stride=stride),
            lambda *t: stock.conv2d(*t, stride=stride).relu(),
            inputs,
        )


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(fuzz)


def test_gradcheck(device):
    for channels_last in (False, True):
        inputs = operands((2, 2, 4, 3), (3, 2, 2, 3), device, torch.float64, True, channels_last)
        assert torch.autograd.gradcheck(F.conv2d_relu, inputs)
        for mask in range(1, 8):
            some = [t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate(inputs)]
            assert torch.autograd.gradgradcheck(F.conv2d_relu, some)
            assert torch.autograd.gradgradcheck(F.conv2d_relu, some[:2]) if mask & 3 else True


def test_opcheck(device, dtype):
    geometry = [1, 1], [1, 1], [1, 1], 1
    for channels_last in (False, True):
        x, w, b = operands((2, 4, 6, 7), (5, 4, 3, 3), device, dtype, True, channels_last)
        torch.library.opcheck(torch.ops.braze.conv2d_relu.default, (x, w, b, *geometry))
        out = F.conv2d(x, w, padding=1)
        g, y = (torch.rand_like(out).detach().requires_grad_() for _ in range(2))
        for mask in ([True, True, True], [False, True, False], [False, False, True]):
            torch.library.opcheck(
                torch.ops.braze.conv2d_relu_backward.default,
                (g, y.detach(), x, w, *geometry, mask),
            )


def test_compile(device):
    inputs = operands((2, 4, 6, 7), (5, 4, 3, 3), device, torch.float32)
    compiled = compile(lambda *t: (F.conv2d_relu(*t) * 2).sum())
    check_against_stock(compiled, lambda *t: (conv2d_relu(*t) * 2).sum(), inputs)


def test_autocast(device):
    inputs = operands((2, 4, 6, 7), (5, 4, 3, 3), device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = F.conv2d_relu(*inputs)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, F.conv2d(*inputs).relu())
    out.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in inputs)


def test_repeatable(device, dtype):
    inputs = operands((40, 8, 9, 9), (33, 8, 3, 3), device, dtype, channels_last=True)

    def grads():
        with braze.backend(conv2d="braze"):
            return torch.autograd.grad(F.conv2d_relu(*inputs).sum(), inputs)

    first = grads()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, grads(), strict=True))


def test_one_op_each_way(device):
    inputs = operands((2, 4, 6, 7), (5, 4, 3, 3), device, torch.float32)
    out = F.conv2d_relu(*inputs)
    assert ops_run(lambda: F.conv2d_relu(*inputs)) == ["conv2d_relu"]
    g = torch.ones_like(out)
    assert ops_run(lambda: torch.autograd.grad(out, inputs, g)) == ["conv2d_relu_backward"]


def test_result_that_was_overwritten(device):
    inputs = operands((2, 4, 6, 7), (5, 4, 3, 3), device, torch.float32)
    out = F.conv2d_relu(*inputs)
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_unbatched_and_same_padding(device, dtype):
    x, w, b = operands((1, 4, 6, 7), (5, 4, 2, 4), device, dtype)
    check_against_stock(
        lambda *t: F.conv2d_relu(*t, padding="same"),
        lambda *t: stock.conv2d(*t, padding="same").relu(),
        [x.detach()[0].requires_grad_(), w, b],
    )


def test_module(device):
    for settings in ({}, {"stride": 2, "padding": 1, "padding_mode": "reflect", "bias": False}):
        layer = braze.nn.ConvReLU2d(4, 5, 3, **settings, device=device)
        plain = torch.nn.Conv2d(4, 5, 3, **settings, device=device)
        plain.load_state_dict(layer.state_dict())
        x = torch.randn(2, 4, 6, 7, device=device)
        for clone in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert_same_layer(clone, torch.nn.Sequential(plain, torch.nn.ReLU()), x)
        for conv in (plain, braze.nn.Conv2d(4, 5, 3, **settings, device=device)):
            made = braze.nn.ConvReLU2d.from_modules(conv, torch.nn.ReLU())
            assert isinstance(made, torch.nn.Conv2d)
            assert made.weight is conv.weight
            assert made.bias is conv.bias
            assert repr(made) == repr(conv).replace("Conv2d", "ConvReLU2d")
            assert_same_layer(made, torch.nn.Sequential(conv, torch.nn.ReLU()), x)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.ReLU, not Sigmoid"):
        braze.nn.ConvReLU2d.from_modules(plain, torch.nn.Sigmoid())


def test_bad_input(device):
    r = lambda *s: torch.randn(s, device=device)  # noqa: E731
    with pytest.raises(TypeError, match="invalid combination of arguments"):
        F.conv2d_relu(r(2, 3, 4, 4), 3)
    with pytest.raises(RuntimeError, match="to have 5 channels, but got 3 channels instead"):
        F.conv2d_relu(r(2, 3, 4, 4), r(4, 5, 1, 1))
    backward = torch.ops.braze.conv2d_relu_backward
    rest = r(2, 3, 4, 4), r(5, 3, 1, 1), [1, 1], [0, 0], [1, 1], 1, [True] * 3
    with pytest.raises(RuntimeError, match="result to have the same shape as grad_output"):
        backward(r(2, 5, 4, 4), r(2, 5, 4, 3), *rest)
    with pytest.raises(RuntimeError, match="expected grad_output of shape"):
        backward(r(2, 5, 4, 3), r(2, 5, 4, 3), *rest)
    with pytest.raises(RuntimeError, match="result to have the same dtype as input"):
        backward(r(2, 5, 4, 4), r(2, 5, 4, 4).double(), *rest)


def test_the_tests_reject_a_wrong_backward(device, dtype):
    """One that lets the gradient pass where the result is zero."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, b):
            ctx.save_for_backward(x, w)
            return torch.ops.braze.conv2d_relu(x, w, b)

        @staticmethod
        def backward(ctx, grad):
            geometry = [1, 1], [0, 0], [1, 1], 1
            return torch.ops.braze.conv2d_backward(grad, *ctx.saved_tensors, *geometry, [True] * 3)

    inputs = operands((2, 4, 6, 7), (5, 4, 3, 3), device, dtype)
    with pytest.raises(AssertionError):
        check_against_stock(Wrong.apply, conv2d_relu, inputs)
