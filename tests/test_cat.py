"""Concatenation along channels: bit for bit what torch's is, in values, gradients and strides."""

import pytest
import torch
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.export import Dim, export

import braze
import braze.nn.functional as F
from braze._ops import cat as ops
from braze.testing import DTYPES
from common import compile, fuzzed
from convert_models import ops_run

CHANNELS_LAST = torch.channels_last
raw, raw_backward = torch.ops.braze.cat_channels, torch.ops.braze.cat_channels_backward


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


@pytest.fixture
def everywhere(monkeypatch):
    """F.cat is the op wherever it can be."""
    monkeypatch.setattr(ops, "CAT_ON", ("cpu", "cuda"))
    monkeypatch.setattr(ops, "CAT_BYTES", 0)


def images(channels, device, dtype=torch.float32, n=2, h=5, w=6, memory_format=CHANNELS_LAST):
    """Tensors that require grad, of so many channels each."""
    tensors = (torch.randn(n, c, h, w, device=device).to(dtype) for c in channels)
    return [t.to(memory_format=memory_format).requires_grad_() for t in tensors]


def same(a, b):
    """Whether two tensors hold the same, NaN included."""
    return torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0))


def check(tensors, function=raw, strides=True, memory_format=CHANNELS_LAST):
    """Result and gradients of the function against torch.cat's."""
    y, expected = function(tensors), torch.cat(tensors, 1)
    assert y.dtype == expected.dtype
    assert same(y, expected)
    assert not strides or y.stride() == expected.stride()
    wanted = [t for t in tensors if t.requires_grad]
    if wanted:
        grad = torch.randn_like(expected).to(memory_format=memory_format)
        found = torch.autograd.grad(y, wanted, grad)
        for a, b in zip(found, torch.autograd.grad(expected, wanted, grad), strict=True):
            assert a.shape == b.shape
            assert torch.equal(a, b)
            assert a.numel() == 0 or a.is_contiguous(memory_format=CHANNELS_LAST)
    return y


#: Channels that are copied by 16, 8, 4 and 2 bytes in bfloat16, and by more in wider ones.
CHANNELS = [(64, 128), (8, 16, 32, 8), (4, 12), (2, 6, 10), (1, 3), (37, 1, 64), (24,), (1, 1)]


@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize(("h", "w"), [(5, 6), (1, 7), (16, 16)], ids=str)
def test_matches_stock(device, dtype, channels, h, w):
    check(images(channels, device, dtype, h=h, w=w))


def test_many_tensors(device, dtype):
    """More than one launch takes, of different sizes."""
    check(images([1 + i % 3 for i in range(70)], device, dtype))
    check(images([8] * 130, device, dtype, n=1, h=3, w=3))


def test_more_vectors_than_threads(device):
    check(images([700_000, 900_000], device, torch.float64, n=1, h=1, w=2))


def test_many_pixels(device):
    check(images([2, 8], device, torch.bfloat16, n=4, h=300, w=501))


def test_a_tensor_twice(device, dtype):
    (x,) = images([8], device, dtype)
    check([x, x])


def test_empty(device, dtype):
    check(images([8, 0, 16], device, dtype), strides=False)  # torch's is contiguous
    check(images([0, 0], device, dtype), strides=False)
    check(images([8, 8], device, dtype, n=0), strides=False)
    check(images([8, 8], device, dtype, h=0), strides=False)


def test_special_values(device, dtype):
    x, y = images([8, 8], device, dtype)
    with torch.no_grad():
        for i, value in enumerate([float("inf"), -float("inf"), float("nan"), -0.0, 1e-45]):
            x[0, i], y[1, i] = value, value
    z = check([x, y])
    assert torch.equal(torch.signbit(z), torch.signbit(torch.cat([x, y], 1)))


@pytest.mark.parametrize("wanted", [(0,), (2,), (0, 3), (1, 2)], ids=str)
def test_gradients_of_some(device, dtype, wanted):
    tensors = [t.requires_grad_(i in wanted) for i, t in enumerate(images([8, 3, 16, 4], device))]
    tensors = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in tensors]
    check(tensors)
    grad = torch.randn(2, 31, 5, 6, device=device).to(dtype).to(memory_format=CHANNELS_LAST)
    grads = raw_backward(grad, [8, 3, 16, 4], [i in wanted for i in range(4)])
    assert [g.numel() > 0 for g in grads] == [i in wanted for i in range(4)]


def test_no_gradient_wanted(device):
    x, y = (t.detach() for t in images([8, 4], device))
    assert not raw([x, y]).requires_grad
    grads = raw_backward(raw([x, y]), [8, 4], [False, False])
    assert [g.shape for g in grads] == [(0,), (0,)]


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_unaligned_storage_offset(device, dtype, offset):
    tensors = []
    for _ in range(2):
        memory = torch.randn(2 * 5 * 6 * 16 + offset, device=device).to(dtype)[offset:]
        tensors.append(memory.view(2, 5, 6, 16).permute(0, 3, 1, 2).detach().requires_grad_())
    check(tensors)


@pytest.mark.parametrize("part", [16, 6, 1])
def test_channels_of_another_tensor(device, dtype, part):
    """As of ``chunk``, read where they are."""
    (whole,) = images([32], device, dtype)
    one, other = whole.detach()[:, :part], whole.detach()[:, 32 - part :]
    check([one.requires_grad_(), *images([8], device, dtype), other.requires_grad_()])


def test_other_layouts(device, dtype):
    (x,) = images([8], device, dtype)
    (plain,) = images([4], device, dtype, memory_format=torch.contiguous_format)
    expanded = torch.randn(2, 8, 1, 1, device=device).to(dtype).expand(2, 8, 5, 6)
    rows = torch.randn(2, 8, 5, 12, device=device).to(dtype)[..., ::2]
    reversed_channels = x.detach().permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    for other in (plain, expanded, rows, reversed_channels):
        other = other.detach().requires_grad_()
        y = check([x, other], strides=False)
        assert y.is_contiguous(memory_format=CHANNELS_LAST)
        check([other, x], strides=False)


@pytest.mark.parametrize(
    "extents", [(1, 5, 6), (2, 1, 1), (1, 1, 1), (2, 5, 1), (3, 1, 4)], ids=str
)
def test_extents_of_one(device, dtype, extents):
    n, h, w = extents
    for channels in ((8, 16), (1, 1), (1, 2)):
        check(images(channels, device, dtype, n=n, h=h, w=w), strides=False)


def test_other_gradients(device, dtype):
    """Contiguous, expanded, and some channels of another gradient."""
    tensors = images([8, 16], device, dtype)
    check(tensors, memory_format=torch.contiguous_format)
    for a, b in zip(
        torch.autograd.grad(raw(tensors).sum(), tensors),
        torch.autograd.grad(torch.cat(tensors, 1).sum(), tensors),
        strict=True,
    ):
        assert torch.equal(a, b)
    (wide,) = images([32], device, dtype)
    grad = wide.detach()[:, 3:27]
    grads = raw_backward(grad, [8, 16], [True, True])
    for a, b in zip(grads, grad.split([8, 16], 1), strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous(memory_format=CHANNELS_LAST)


def _check_fuzzed(data, device):
    extent = st.integers(1, 9)
    channels = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    n, h, w = data.draw(st.tuples(extent, extent, extent))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensors = images(channels, device, dtype, n, h, w)
    for i, t in enumerate(tensors):
        t.requires_grad_(data.draw(st.booleans()))
        if data.draw(st.booleans()):
            tensors[i] = t.detach().contiguous().requires_grad_(t.requires_grad)
    check(tensors, strides=False)


test_fuzzed_on_cpu, test_fuzzed_on_cuda = fuzzed(_check_fuzzed)


def test_derivatives(device):
    tensors = images([2, 1, 3], device, torch.float64, h=2, w=2)
    assert torch.autograd.gradcheck(lambda *t: raw(t), tensors)
    assert torch.autograd.gradgradcheck(lambda *t: raw(t), tensors)
    tensors[1].requires_grad_(False)
    assert torch.autograd.gradgradcheck(lambda *t: raw([t[0], tensors[1], t[1]]), tensors[::2])
    y = torch.autograd.grad(raw(tensors).square().sum(), tensors[0], create_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y.sum(), tensors[0])[0], torch.full_like(y, 2.0))


def test_opcheck(device, dtype):
    for channels in ((8, 16), (3, 1, 0)):
        tensors = images(channels, device, dtype)
        torch.library.opcheck(raw.default, (tensors,))
        grad = torch.randn(2, sum(channels), 5, 6, device=device).to(dtype).requires_grad_()
        mask = [i != 1 for i in range(len(channels))]
        for g in (grad, grad.detach().to(memory_format=CHANNELS_LAST)):
            torch.library.opcheck(raw_backward.default, (g, list(channels), mask))


@pytest.mark.usefixtures("everywhere")
def test_compiles(device):
    tensors = images([8, 16], device)
    y = check(tensors, compile(lambda t: F.cat(t, 1)))
    assert y.stride() == F.cat(tensors, 1).stride()


def test_open_batch(device):
    torch.backends.cudnn.allow_tf32 = False  # as in test_dynamic_batch.py

    class Model(torch.nn.Module):
        def forward(self, x):
            return raw([x, x.relu(), x[:, :3]])

    (x,) = images([8], device)
    x = x.detach()
    program = export(Model(), (x,), dynamic_shapes=({0: Dim("batch")},))
    assert any("cat_channels" in str(node.target) for node in program.graph.nodes)
    for n in (2, 3, 7):
        (other,) = images([8], device, n=n)
        assert torch.equal(program.module()(other), Model()(other))


@pytest.mark.usefixtures("everywhere")
def test_open_batch_of_the_function(device):
    """Whether it is the op then does not restrict the batch."""
    torch.backends.cudnn.allow_tf32 = False

    class Model(torch.nn.Module):
        def forward(self, x):
            return F.cat([x, x.relu()], 1)

    (x,) = images([8], device)
    program = export(Model(), (x.detach(),), dynamic_shapes=({0: Dim("batch")},))
    for n in (2, 3, 7):
        (other,) = images([8], device, n=n)
        assert torch.equal(program.module()(other), Model()(other))


def taken(tensors, dim=1):
    """Whether F.cat is the op; its result is torch's in any case, strides included."""
    found = "cat_channels" in ops_run(lambda: F.cat(tensors, dim))
    y, expected = F.cat(tensors, dim), torch.cat(tensors, dim)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    assert y.requires_grad == expected.requires_grad
    return found


@pytest.mark.usefixtures("everywhere")
def test_what_is_taken(device, dtype):
    tensors = images([8, 16], device, dtype)
    assert taken(tensors)
    assert taken(tuple(tensors), -3)
    assert taken([t.detach() for t in tensors])
    assert taken([torch.nn.Parameter(tensors[0]), tensors[1]])
    (whole,) = images([32], device, dtype)
    assert taken(whole.chunk(2, 1))
    for extents in ((1, 5, 6), (2, 1, 6), (2, 5, 1), (2, 1, 1)):
        n, h, w = extents
        assert taken(images([8, 16], device, dtype, n=n, h=h, w=w))
    check(tensors, lambda t: F.cat(t, 1))


@pytest.mark.usefixtures("everywhere")
def test_what_goes_to_torch(device):
    x, y = images([8, 16], device)
    (same_size,) = images([8], device)
    assert not taken([x, same_size], 0)
    assert not taken([x, same_size], -1)
    assert not taken([x])
    assert not taken([x, y.detach().double()])
    assert not taken([x, y.detach().contiguous()])
    assert not taken([x.detach().contiguous(), y.detach().contiguous()])
    assert not taken([t.detach().half() for t in images([8, 3], device)])  # 6 bytes
    assert not taken([x, torch.empty(0, device=device)])  # skipped
    assert not taken([x, *images([0], device)])
    assert not taken(images([8, 16], device, n=0))
    assert not taken([t[0].detach() for t in (x, x)], 0)  # 3-D
    assert not taken([t.detach().to(torch.int32) for t in (x, y)])
    out = torch.empty(0, device=device)
    assert F.cat([x.detach(), y.detach()], 1, out=out) is out
    assert torch.equal(out, torch.cat([x, y], 1))


@pytest.mark.usefixtures("everywhere")
def test_strides_of_extents_of_one_are_torchs(device):
    """Of a batch of one whose stride is no batch's, torch makes a contiguous result."""
    one = torch.randn(5, 6, 8, device=device).permute(2, 0, 1)[None]
    assert one.is_contiguous(memory_format=CHANNELS_LAST)
    for step in (8, 240, 999):
        x = one.as_strided(one.shape, (step, *one.stride()[1:]))
        taken([x, x])
    for shape in ((2, 8, 1, 1), (2, 1, 3, 3), (1, 1, 1, 1), (2, 8, 1, 4)):
        for memory_format in (torch.contiguous_format, CHANNELS_LAST):
            x = torch.randn(shape, device=device).to(memory_format=memory_format)
            taken([x, x])


def test_small_results_and_other_devices(device):
    small, large = images([8, 8], device), images([128, 128], device, n=4, h=16, w=16)
    on = device in ops.CAT_ON
    assert taken(small) is False
    assert taken(large) is on


@pytest.mark.usefixtures("everywhere")
def test_autocast(device):
    tensors = [t.detach() for t in images([8, 16], device)]
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(device, torch.bfloat16):
            assert taken([t.to(dtype) for t in tensors])
    other = [t.half() for t in tensors]
    results = []
    for f in (F.cat, torch.cat):
        with torch.autocast(device, torch.bfloat16):
            try:
                results.append(f(other, 1).dtype)
            except RuntimeError as error:
                results.append(str(error))
    assert results[0] == results[1]


@pytest.mark.usefixtures("everywhere")
def test_bad_input(device):
    x, y = images([8, 16], device)
    bad = [
        ([x, y[:1].detach()], 1),
        ([x, y[:, :, :2].detach()], 1),
        ([x, y], 0),
        ([x, y], 4),
        ([x, None], 1),
        ([x, 2.0], 1),
        ([x, y.detach().to_sparse()], 1),
        ([], 1),
        (x, 1),
        (None, 1),
        ([x, y], None),
        ([x, y], 1.0),
    ]
    for arguments in bad:
        with pytest.raises(Exception) as expected:  # noqa: PT011 (whatever torch's is)
            torch.cat(*arguments)
        with pytest.raises(type(expected.value)):
            F.cat(*arguments)
    with pytest.raises(RuntimeError, match="non-empty list"):
        raw([])
    with pytest.raises(RuntimeError, match="differ in their channels only"):
        raw([x, y[:1]])
    with pytest.raises(RuntimeError, match="4-D"):
        raw([x[0], y[0]])
    with pytest.raises(RuntimeError, match="same dtype"):
        raw([x, y.double()])
    with pytest.raises(RuntimeError, match="dtype float64"):
        raw([x.int(), y.int()])
    with pytest.raises(RuntimeError, match="expected grad_output of 25 channels"):
        raw_backward(torch.cat([x, y], 1), [8, 17], [True, True])
    with pytest.raises(RuntimeError, match="channels of 0 or more"):
        raw_backward(torch.cat([x, y], 1), [25, -1], [True, True])
    with pytest.raises(RuntimeError, match="output_mask of 2 entries"):
        raw_backward(torch.cat([x, y], 1), [8, 16], [True])


#: Of a function of two tensors.
TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda a, b: f(a, b).square().sum()),
    "vmap": lambda f: lambda a, b: torch.func.vmap(f)(torch.stack([a, -a]), torch.stack([b, -b])),
    "jvp": lambda f: lambda a, b: torch.func.jvp(f, (a, b), (b, a)),
    "hessian": lambda f: torch.func.hessian(lambda a, b: f(a, b).square().sum()),
}


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_torch_func(device, transform):
    tensors = [t.detach() for t in images([4, 4], device, h=2, w=2)]
    ours, theirs = (transform(lambda *t, f=f: f(t, 1))(*tensors) for f in (F.cat, torch.cat))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("everywhere")
def test_vmap_over_backward_and_forward_mode(device):
    tensors = images([4, 8], device)
    found = []
    for f in (F.cat, torch.cat):
        y = f(tensors, 1)
        seeds = torch.stack([torch.ones_like(y), y.detach()])
        grads = torch.func.vmap(
            lambda g, y=y: torch.autograd.grad(y, tensors, g, retain_graph=True)
        )(seeds)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
            tangent = forward_ad.unpack_dual(f([dual, tensors[1]], 1)).tangent
            found.append((grads, tangent.detach()))
    torch.testing.assert_close(*found)


@pytest.mark.usefixtures("everywhere")
def test_subclasses_stay(device):
    class Kept(torch.Tensor):
        pass

    tensors = [t.detach().as_subclass(Kept) for t in images([8, 16], device)]
    assert type(F.cat(tensors, 1)) is Kept
    assert type(F.cat([tensors[0].as_subclass(torch.Tensor), tensors[1]], 1)) is Kept


def test_cuda_graph(gpu):
    tensors = images([8, 16, 3], "cuda", torch.bfloat16)
    grad = torch.randn(2, 27, 5, 6, device="cuda", dtype=torch.bfloat16)
    grad = grad.to(memory_format=CHANNELS_LAST)

    def step():
        y = raw(tensors)
        return [y, *torch.autograd.grad(y, tensors, grad)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in (*tensors, grad):
            t.normal_()
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


def test_the_tests_reject_a_wrong_kernel(device):
    """One that takes each tensor's place for one channel further on."""

    def wrong(tensors):
        return torch.cat(tensors, 1).roll(1, 1)

    with pytest.raises(AssertionError):
        check(images([8, 16], device), wrong)


def test_is_listed(device):
    arch = "cpu" if device == "cpu" else "sm_80+"
    assert arch in [kernel["arch"] for kernel in braze.kernels("cat_channels")]
