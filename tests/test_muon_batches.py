"""How braze.optim.Muon puts matrices of different shapes into batches, and takes them out again."""

import functools
import math
from collections import Counter

import pytest
import torch
from optim_common import gradient, parameters, train
from test_muon import exact

import braze
from benchmarks.optimizers import resnet18_convolutions
from braze._ops.muon import muon_momentum_, muon_normalize_, muon_unpad_, squares_for
from braze.optim import muon
from braze.optim.muon import grouped
from braze.testing import WAYS, mover
from common import assert_by_rule
from fake_cuda import FakeCuda

# Rows of every alignment, of several parts, of parts of one column; nothing.
SHAPES = [(3, 5), (1, 1), (7, 1), (4, 3, 3, 3), (64, 147), (9, 64), (5, 40000), (20000, 1), (0, 4)]
SHAPES += [(3, 0), (130, 200)]


def batch_shape(shape, way):
    """Extents of what a matrix is written into."""
    rows, columns = shape[0], math.prod(shape[1:])
    if way == "exact":
        return rows, columns
    if way == "odd":
        return rows + 1, columns + 3
    return -(-rows // 8) * 8 + 8, -(-columns // 8) * 8 + 16


def filled(shape, device, value=math.nan):
    return torch.full(shape, value, device=device, dtype=torch.bfloat16)


def in_layout(values, layout):
    if layout == "channels_last":
        return [
            v.to(memory_format=torch.channels_last) if v.dim() == 4 and v.numel() else v
            for v in values
        ]
    if layout == "unaligned":
        return [torch.empty(v.numel() + 1).to(v)[1:].view(v.shape).copy_(v) for v in values]
    return values


def in_memory(t):
    """The matrix that the rows of a tensor are in memory."""
    return (t.permute(0, 2, 3, 1) if t.dim() == 4 else t).flatten(1)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "unaligned"])
@pytest.mark.parametrize("way", ["exact", "odd", "aligned"])
def test_normalized(device, dtype, way, layout):
    values = in_layout(parameters(device, dtype, SHAPES), layout)
    outputs = [filled(batch_shape(v.shape, way), device) for v in values]
    versions = [o._version for o in outputs]
    muon_normalize_(outputs, values, 1e-7)
    assert [o._version for o in outputs] == [v + 1 for v in versions]
    accumulated = dtype if dtype == torch.float64 else torch.float32
    for v, output in zip(values, outputs, strict=True):
        matrix = in_memory(v) if layout == "channels_last" else v.flatten(1)
        rows, columns = matrix.shape
        stock, reference = (
            matrix.to(kind) / torch.linalg.vector_norm(matrix, dtype=kind).clamp(min=1e-7)
            for kind in (accumulated, torch.float64)
        )
        inside = output[:rows, :columns]
        assert_by_rule(inside, stock.to(torch.bfloat16), reference)
        # Not one part is left out of the norm, of which that rule would not see one in a hundred.
        if matrix.numel():
            assert inside.double().norm().item() == pytest.approx(1, abs=2**-9)
        around = output.clone()
        around[:rows, :columns] = 0
        assert torch.equal(around, torch.zeros_like(around))


def test_every_part_counts(device, dtype):
    """Where all that there is stands in the first part and in the last one."""
    values = [torch.zeros(s, device=device, dtype=dtype) for s in [(3, 40000), (40000, 3)]]
    for v in values:
        v[0, 0], v[-1, -1] = 3, -4
    outputs = [filled((3, 40008), device), filled((40000, 8), device)]
    muon_normalize_(outputs, values, 1e-7)
    for v, output in zip(values, outputs, strict=True):
        expected = torch.zeros_like(output)
        expected[: v.shape[0], : v.shape[1]] = v / 5
        torch.testing.assert_close(output, expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("layout", ["contiguous", "unaligned"])
def test_norms_that_the_momentum_leaves(device, dtype, layout):
    """The pass that makes the matrices sums up their squares, of as many tensors as there are: what
    is divided then is divided by the same."""
    values = in_layout(parameters(device, dtype, SHAPES * 12), layout)
    updates = [torch.empty_like(v) for v in values]
    squares = squares_for(updates).fill_(math.nan)
    buffers = [torch.zeros_like(v) for v in values]
    scale = None, None, None, 0.0
    muon_momentum_(updates, values, buffers, [], [], 0.5, False, *scale, squares)
    expected, outputs = (
        [filled(batch_shape(v.shape, "aligned"), device) for v in values] for _ in range(2)
    )
    muon_normalize_(expected, updates, 1e-7)
    muon_normalize_(outputs, updates, 1e-7, squares)
    for update, value in zip(updates, values, strict=True):
        assert torch.equal(update, value * 0.5)
    for output, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, other, rtol=2**-7, atol=0)
        assert (output == other).float().mean() > 0.99 or not output.numel()
    sums = [(u.double() ** 2).sum() for u in updates]
    torch.testing.assert_close(squares.sum(), torch.stack(sums).sum(), rtol=1e-6, atol=0)


def test_squares_of_another_size(device):
    value, output = torch.ones(4, 3, device=device), filled((8, 8), device)
    squares = torch.zeros(2, dtype=torch.float64, device=device)
    with pytest.raises(RuntimeError, match="squares of 1 float64"):
        muon_normalize_([output], [value], 1e-7, squares)


def test_small_norms_and_values_that_are_not_finite(device, dtype):
    """As torch's norm and division; nothing of it gets into the zeros."""
    tiny = 2.0**-20
    rows = {
        "zeros": ([0.0, 0.0], 1e-3),
        "below eps": ([tiny, tiny], 1e-3),
        "no eps": ([0.0, 0.0], 0.0),
        "infinite": ([math.inf, 1.0], 1e-3),
        "nan": ([math.nan, 1.0], 1e-3),
    }
    for name, (values, eps) in rows.items():
        value = torch.tensor([values], device=device, dtype=dtype)
        output = filled((8, 8), device)
        muon_normalize_([output], [value], eps)
        wide = value.to(dtype if dtype == torch.float64 else torch.float32)
        stock = (wide / wide.norm().clamp(min=eps)).to(torch.bfloat16)
        torch.testing.assert_close(output[:1, :2], stock, rtol=0, atol=0, equal_nan=True, msg=name)
        output[:1, :2] = 0
        assert torch.equal(output, torch.zeros_like(output)), name


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("way", ["exact", "odd", "aligned"])
def test_unpadded(device, way, layout):
    values = in_layout(parameters(device, torch.bfloat16, SHAPES), layout)
    batches = [filled(batch_shape(v.shape, way), device) for v in values]
    outputs = [torch.full_like(v, math.nan) for v in values]
    for v, batch in zip(values, batches, strict=True):
        matrix = in_memory(v) if layout == "channels_last" else v.flatten(1)
        batch[: matrix.shape[0], : matrix.shape[1]] = matrix
    versions = [o._version for o in outputs]
    muon_unpad_(outputs, batches)
    assert [o._version for o in outputs] == [v + 1 for v in versions]
    for v, output in zip(values, outputs, strict=True):
        assert torch.equal(output, v)


@pytest.mark.parametrize("count", [53, 54, 431, 1000])
def test_more_matrices_than_a_launch_takes(device, count):
    shapes = [(1 + i % 5, 3 + i % 4) for i in range(count)]
    values = parameters(device, torch.float32, shapes)
    batches = filled((count, 8, 8), device).unbind()
    muon_normalize_(batches, values, 1e-7)
    outputs = [filled(s, device) for s in shapes]
    muon_unpad_(outputs, batches)
    for v, output in zip(values, outputs, strict=True):
        torch.testing.assert_close(output, (v / v.norm()).bfloat16(), rtol=2**-7, atol=0)


def test_opcheck_of_batches(device, dtype):
    values = parameters(device, dtype, [(4, 3), (5, 2)])
    outputs = [filled((8, 8), device), filled((5, 3), device)]
    ops = torch.ops.braze
    torch.library.opcheck(ops.muon_normalize_.default, (outputs, values, 0.5))
    cropped = [filled((4, 3), device), filled((5, 2), device)]
    batches = [filled((8, 8), device, 1.0), filled((5, 3), device, 1.0)]
    torch.library.opcheck(ops.muon_unpad_.default, (cropped, batches))
    batches = [b.requires_grad_() for b in batches]
    with pytest.raises(RuntimeError, match="not differentiable"):
        ops.muon_unpad_(cropped, batches)


def test_bad_batches(device):
    normalize, unpad = torch.ops.braze.muon_normalize_, torch.ops.braze.muon_unpad_
    output, value = filled((8, 8), device), torch.ones(4, 3, device=device)
    for outputs, inputs, words in (
        ([output], [value, value], "as many outputs as inputs"),
        ([output.float()], [value], "outputs in bfloat16"),
        ([output], [value.long()], "float64, float32, bfloat16 or float16"),
        ([output, output], [value, value.double()], "same dtype"),
        ([output[:, 1:]], [value], "contiguous matrices"),
        ([output[0]], [value], "contiguous matrices"),
        ([output], [value[0]], "two and more dimensions"),
        ([output], [value.t()], "own part of dense memory"),
        ([output], [value[:, ::2]], "own part of dense memory"),
        ([output[:3]], [value], "at least as large"),
    ):
        with pytest.raises(RuntimeError, match=words):
            normalize(outputs, inputs, 1e-7)
    for outputs, inputs, words in (
        ([output[:4, :3]], [output], "own part of dense memory"),
        ([filled((9, 3), device)], [output], "at least as large"),
        ([filled((4, 3), device)], [output.float()], "same dtype"),
        ([filled((4, 3), device)], [output.half()], "same dtype"),
        ([value], [output], "outputs in bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=words):
            unpad(outputs, inputs)
    assert output.isnan().all()


def test_which_shapes_share_a_batch():
    shapes = [(s[0], math.prod(s[1:])) for s in resnet18_convolutions()]
    found = [
        (Counter(shapes[i] for i in members), *extents)
        for members, *extents in grouped(tuple(shapes), 5, muon._LAUNCH_FLOPS, muon._MULTIPLE)
    ]
    small = {(64, 147): 1, (64, 576): 4, (128, 576): 1, (128, 1152): 3}
    expected = [
        (small, 128, 1152),
        ({(256, 1152): 1, (256, 2304): 3}, 256, 2304),
        ({(512, 2304): 1, (512, 4608): 3}, 512, 4608),
        ({(128, 64): 1, (256, 128): 1, (512, 256): 1}, 512, 256),
    ]
    assert sorted(found, key=lambda g: g[1:]) == sorted(expected, key=lambda g: g[1:])


def test_batches_of_all_that_is_given():
    # Whatever launches cost: each matrix is in one batch, which is large enough.
    shapes = ((16, 50), (0, 4), (50, 16), (16, 50), (33, 33), (7, 1), (1, 7), (3, 0), (16, 56))
    for launch_flops in (0, 1e3, 1e6, 1e12):
        batches = grouped(shapes, 5, launch_flops, 8)
        members = [i for batch, _, _ in batches for i in batch]
        assert sorted(members) == [0, 2, 3, 4, 5, 6, 8]
        for batch, rows, columns in batches:
            assert rows % 8 == columns % 8 == 0
            assert all(shapes[i][0] <= rows and shapes[i][1] <= columns for i in batch)
            assert len({shapes[i][0] > shapes[i][1] for i in batch}) == 1
    assert len(batches) == 2  # tall and wide
    assert len(grouped(shapes, 5, 0, 1)) == 6  # on CPUs, equal ones only
    assert grouped((), 5, 1e9, 8) == ()


@pytest.mark.parametrize("launch_flops", [0, 1e12], ids=["by shape", "together"])
def test_trains_as_stock(gpu_or_fake, launch_flops, monkeypatch):
    """Whatever shares a batch: weights of four dimensions in both layouts among them."""
    monkeypatch.setattr(muon, "_LAUNCH_FLOPS", launch_flops)
    shapes = [(16, 50), (50, 16), (33, 33), (16, 50), (8, 40), (9, 2, 3, 3), (5, 4, 3, 3), (40, 9)]
    values = parameters("cpu", torch.float32, [*shapes, (0, 4)])
    move = [torch.clone] * 5 + [functools.partial(torch.clone, memory_format=torch.channels_last)]
    move += [torch.clone] * 3
    params = [torch.nn.Parameter(m(v).to(gpu_or_fake)) for m, v in zip(move, values, strict=True)]
    optimizer = braze.optim.Muon(params, lr=0.1)
    generator = torch.Generator().manual_seed(4 + torch.initial_seed())
    for _ in range(5):
        for p, v in zip(params, values, strict=True):
            p.grad = gradient(v, generator).to(gpu_or_fake)
        optimizer.step()
    flat = [v.flatten(1) for v in values]
    stock, _ = train(torch.optim.Muon, flat)

    @functools.cache
    def moved():
        return [exact(flat, move=mover(way))[0] for way in WAYS]

    for i, (p, s, r) in enumerate(zip(params, stock, exact(flat)[0], strict=True)):
        others = functools.partial(lambda i: [m[i] for m in moved()], i)
        ours = p.detach().to("cpu").flatten(1)
        assert_by_rule(ours, s, r, moved=others, arithmetic=torch.bfloat16)


def test_launches_of_a_step():
    """One for all norms, one for all that was padded with columns; the rest by batch."""
    shapes = [(16, 64), (16, 64), (8, 64), (16, 40), (40, 16)]
    values = parameters("cpu", torch.float32, shapes)
    with FakeCuda() as fake:
        params = [torch.nn.Parameter(v.to("cuda")) for v in values]
        optimizer = braze.optim.Muon(params, lr=0.1)
        for p in params:
            p.grad = torch.ones_like(p)
        begin = len(fake.events)
        optimizer.step()
        events = fake.events[begin:]
    launches = Counter(e[0].removesuffix(".default") for e in events if e[0].startswith("braze."))
    assert launches == {
        "braze.muon_momentum_": 1,
        "braze.muon_normalize_": 1,
        "braze.matmul": 2 * 18,
        "braze.muon_polynomial_": 2 * 5,
        "braze.muon_unpad_": 1,
        "braze.sgd_": 2,
    }
    (unpadded,) = (e for e in events if e[0] == "braze.muon_unpad_.default")
    assert unpadded[2:] == (("float16", 16, 40, 40, 1), ("float16", 16, 64, 64, 1))


def spectrum(name, n):
    """Singular values."""
    if name == "two":
        return torch.tensor([1.0, 0.5, *[1e-3] * (n - 2)], dtype=torch.float64)
    return torch.logspace(0, -float(name), n, dtype=torch.float64)


def whitening_error(run, matrix, expected, dtype):
    """Of the iterations in `dtype`, relative to what they make in float64."""
    found = run((matrix / matrix.norm()).to(dtype).unsqueeze(0), (3.4445, -4.7750, 2.0315), 5)
    return float((found[0].double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("apart", [muon._MOST_APART, 5], ids=["as it is", "never anew"])
@pytest.mark.parametrize("name", ["0", "1", "2", "4", "two"])
def test_error_of_iterations_apart(device, name, apart, monkeypatch):
    """No larger than that of the usual ones in bfloat16; the test notices if A is never made anew
    and few singular values stand out."""
    monkeypatch.setattr(muon, "_MOST_APART", apart)
    n, columns = 96, 320
    u = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(columns, n, dtype=torch.float64))[0]
    matrix = (u * spectrum(name, n)) @ v.T
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    for m, expected in ((matrix, x), (matrix.T, x.T)):
        m, expected = m.contiguous().to(device), expected.to(device)
        usual = whitening_error(muon.orthogonalized, m, expected, torch.bfloat16)
        error = whitening_error(muon.iterated_apart, m, expected, torch.float16)
        if apart < 5:
            assert error <= usual
        elif name == "two":
            assert error > 2 * usual


def test_coefficients_beyond_float16(gpu_or_fake):
    """Go by bfloat16, whose range they do not leave."""
    values = parameters("cpu", torch.float32, [(16, 50)])
    settings = {"ns_coefficients": (40.0, -50.0, 20.0), "ns_steps": 3}
    params = [torch.nn.Parameter(v.to(gpu_or_fake)) for v in values]
    optimizer = braze.optim.Muon(params, lr=1e-4, **settings)
    for p in params:
        p.grad = torch.ones_like(p) + p.detach()
    optimizer.step()
    assert all(p.isfinite().all() for p in params)


def test_nothing_to_orthogonalize(any_device):
    device = any_device
    params = [torch.nn.Parameter(torch.ones(s).to(device)) for s in [(0, 4), (3, 0)]]
    optimizer = braze.optim.Muon(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(optimizer.state[p]["momentum_buffer"].shape == p.shape for p in params)


def test_the_tests_reject_a_wrong_norm(device, dtype):
    """That of the batch in the place of each matrix's own."""
    values = parameters(device, dtype, [(16, 50), (16, 50)])
    output = filled((32, 56), device)
    muon_normalize_([output], [torch.cat(values)], 1e-7)
    reference = values[0].double() / values[0].double().norm()
    with pytest.raises(AssertionError, match="error"):
        assert_by_rule(output[:16, :50], reference.bfloat16(), reference)
