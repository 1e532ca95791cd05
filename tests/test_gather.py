"""The ops behind DeviceLoader: a batch gathered, normalised, cast and laid out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import braze
from braze._ops.gather import empty_batch, gather_images, gather_next
from common import assert_by_rule

# [C, H, W]: whole vectors of 16 bytes, channels that end inside one, odd, prime, 1, none
SHAPES = [(1, 28, 28), (3, 32, 32), (8, 1, 1), (4, 3, 5), (3, 5, 7), (2, 1, 2), (1, 1, 1)]
SHAPES += [(16, 2, 3), (0, 3, 3), (3, 0, 5)]
NAN = float("nan")


def data_set(shape, device, dtype, count=11):
    """images, labels, scale, shift"""
    generator = torch.Generator().manual_seed(4)
    images = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    scale = torch.rand(shape[0], dtype=acc, generator=generator) / 64
    shift = torch.randn(shape[0], dtype=acc, generator=generator)
    return [t.to(device) for t in (images, labels, scale, shift)]


def draw(images, labels, order, position, batch, scale, shift, dtype, channels_last, filters=()):
    """Images, labels and moments as gather_next() writes them."""
    into = empty_batch(images, labels, batch, dtype, channels_last, filters)
    for t in into:
        if t is not None:
            t.fill_(-77)
    assert gather_next(images, labels, order, position, scale, shift, into, filters) is None
    return into


def stock(images, labels, indices, scale, shift, dtype, channels_last, acc=None):
    """What the op computes, by torch's ops, in the dtype of `scale` or in `acc`."""
    acc = acc or scale.dtype
    gathered = images.index_select(0, indices).to(acc)
    gathered = torch.addcmul(shift.to(acc).view(-1, 1, 1), gathered, scale.to(acc).view(-1, 1, 1))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    batch = torch.empty_like(gathered, dtype=dtype, memory_format=layout).copy_(gathered)
    return batch, labels.index_select(0, indices)


def check(function, images, labels, indices, scale, shift, dtype, channels_last):
    batch, batch_labels = function(images, labels, indices, scale, shift, dtype, channels_last)
    arguments = images, labels, indices, scale, shift, dtype, channels_last
    expected, expected_labels = stock(*arguments)
    reference, _ = stock(*arguments[:5], torch.float64, channels_last, torch.float64)
    assert_by_rule(batch, expected, reference)
    assert batch.stride() == expected.stride()
    assert torch.equal(batch_labels, expected_labels)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_stock(device, dtype, shape, channels_last):
    images, labels, scale, shift = data_set(shape, device, dtype)
    for indices in ([], [10], [3, 3, 0], list(range(10, -1, -1)), [1, 7] * 200):
        indices = torch.tensor(indices, dtype=torch.int64, device=device)
        check(gather_images, images, labels, indices, scale, shift, dtype, channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
def test_other_strides_and_storage_offsets(device, dtype, channels_last):
    images, labels, scale, shift = data_set((3, 4, 6), device, dtype)
    indices = torch.arange(0, 20, 2, device=device)
    for some in (
        images.to(memory_format=torch.channels_last),
        images.transpose(2, 3),
        images[:, :, 1:, ::2],
        images[:1].expand(11, -1, -1, -1),
    ):
        check(gather_images, some, labels, indices[:5], scale, shift, dtype, channels_last)
    flat = torch.randint(256, (11 * 72 + 1,), dtype=torch.uint8, device=device)
    unaligned = flat[1:].view(11, 3, 4, 6)
    check(gather_images, unaligned, labels, indices[:5], scale, shift, dtype, channels_last)
    every_second = torch.arange(10, device=device).repeat(2)[::2]
    scales = torch.stack([scale, scale], 1)[:, 0]
    check(gather_images, images, labels, every_second, scales, shift, dtype, channels_last)


def test_special_values(device, dtype):
    images, labels, scale, shift = data_set((3, 2, 4), device, dtype)
    scale[0], shift[1], shift[2] = float("inf"), NAN, -float("inf")
    images[0, 0] = 0  # 0 * inf
    indices = torch.tensor([0, 5], device=device)
    check(gather_images, images, labels, indices, scale, shift, dtype, False)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    batch=st.integers(0, 40),
    channels_last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape(shape, batch, channels_last, seed):
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        for dtype in (torch.float32, torch.bfloat16):
            images, labels, scale, shift = data_set(shape, device, dtype)
            generator = torch.Generator().manual_seed(seed)
            indices = torch.randint(11, (batch,), generator=generator).to(device)
            check(gather_images, images, labels, indices, scale, shift, dtype, channels_last)


def test_a_large_batch(device):
    """More work than one pass of the grid."""
    images, labels, scale, shift = data_set((1, 28, 28), device, torch.bfloat16)
    indices = torch.arange(3000, device=device) % 11
    for channels_last in (False, True):
        check(gather_images, images, labels, indices, scale, shift, torch.bfloat16, channels_last)
    images, labels, scale, shift = data_set((3, 32, 32), device, torch.float32)
    check(gather_images, images, labels, indices, scale, shift, torch.float32, True)


@pytest.mark.parametrize("channels_last", [False, True])
def test_next(device, dtype, channels_last):
    images, labels, scale, shift = data_set((3, 4, 4), device, dtype)
    order = torch.randperm(11, device=device)
    position = torch.zeros(2, dtype=torch.int64, device=device)
    begin = 0
    for batch in (4, 0, 1, 6):

        def function(images, labels, indices, *rest, batch=batch):
            return draw(images, labels, order, position, batch, *rest)[:2]

        version = position._version
        indices = order[begin : begin + batch]
        check(function, images, labels, indices, scale, shift, dtype, channels_last)
        begin += batch
        assert position.tolist() == [begin, 0]
        assert position._version > version


def test_next_with_many_blocks(device):
    """The position moves on once, after all blocks have read it."""
    images, labels, scale, shift = data_set((1, 28, 28), device, torch.float32)
    order = torch.arange(3000 * 3, device=device) % 11
    position = torch.zeros(2, dtype=torch.int64, device=device)
    for i in range(3):

        def function(images, labels, indices, *rest):
            return draw(images, labels, order, position, 3000, *rest)[:2]

        indices = order[3000 * i : 3000 * (i + 1)]
        check(function, images, labels, indices, scale, shift, torch.float32, False)
        assert position.tolist() == [3000 * (i + 1), 0]


def first_block(batch, weight, padding, moments=None):
    op = torch.ops.braze.conv_bn_relu_max_pool2d
    buffers = None, None, None
    return op(batch, weight, None, None, None, *buffers, padding, True, 0.1, 1e-5, moments)


# Whole vectors and squares: one launch; odd extents, several channels: the block's own launches
@pytest.mark.parametrize(
    ("shape", "filters"),
    [
        ((1, 28, 28), (3, 3, 1, 1)),
        ((1, 28, 28), (5, 5, 2, 2)),
        ((1, 6, 8), (3, 3, 0, 1)),
        ((1, 7, 16), (3, 3, 1, 1)),
        ((1, 5, 5), (5, 5, 2, 2)),
        ((3, 8, 8), (3, 3, 1, 1)),
    ],
    ids=str,
)
def test_next_with_moments(device, dtype, shape, filters):
    """A fused block computes from given moments what it computes from its own, bit for bit."""
    images, labels, scale, shift = data_set(shape, device, dtype)
    order = torch.randperm(11, device=device).repeat(30)
    weight = torch.randn(8, shape[0], *filters[:2], device=device).to(dtype)
    for batch in (9, 300):
        position = torch.tensor([2, 0], device=device)
        arguments = images, labels, order, position, batch, scale, shift, dtype, True
        x, y, none = draw(*arguments)
        assert none is None
        position[0] = 2
        x_beside, y_beside, moments = draw(*arguments, filters)
        assert position.tolist() == [2 + batch, 0]
        assert torch.equal(x, x_beside)
        assert torch.equal(y, y_beside)
        expected = first_block(x, weight, filters[2:])
        given = first_block(x, weight, filters[2:], moments)
        for a, b in zip(given, expected, strict=True):
            assert torch.equal(a, b)
        wrong = first_block(x, weight, filters[2:], moments * 1.001)
        assert not torch.equal(wrong[2], expected[2])


@pytest.mark.parametrize("channels", [1, 3])
def test_next_with_moments_of_groups(device, channels):
    """Parts of a batch have the moments that they would have as batches of their own."""
    dtype, shape, filters, groups, each = torch.float32, (channels, 8, 8), (3, 3, 1, 1), 3, 20
    images, labels, scale, shift = data_set(shape, device, dtype)
    order = torch.randperm(11, device=device).repeat(6)
    position = torch.tensor([2, 0], device=device)
    settings = scale, shift, dtype, True
    x, y, moments = empty_batch(images, labels, groups * each, dtype, True, filters)
    together = moments.new_full((groups, *moments.shape), torch.nan)
    gather_next(images, labels, order, position, scale, shift, (x, y, together), filters)
    assert position.tolist() == [2 + groups * each, 0]
    weight = torch.randn(8, channels, 3, 3, device=device)
    for group in range(groups):
        position = torch.tensor([2 + group * each, 0], device=device)
        own, own_labels, sums = draw(images, labels, order, position, each, *settings, filters)
        part = slice(group * each, (group + 1) * each)
        assert torch.equal(x[part], own)
        assert torch.equal(y[part], own_labels)
        expected = first_block(own, weight, (1, 1), sums)
        for a, b in zip(first_block(own, weight, (1, 1), together[group]), expected, strict=True):
            assert torch.equal(a, b)
        other = first_block(own, weight, (1, 1), together[group - 1])
        assert not torch.equal(other[2], expected[2])
    with pytest.raises(RuntimeError, match=r"a multiple of 3 images .* but got 59"):
        gather_next(
            images, labels, order, position, scale, shift, (x[1:], y[1:], together), filters
        )


def test_moments_of_images_out_of_bounds(device):
    if device == "cpu":
        return  # IndexError
    images, labels, scale, shift = data_set((1, 28, 28), device, torch.float32)
    order = torch.tensor([1, 11, 2], device=device)
    position = torch.zeros(2, dtype=torch.int64, device=device)
    arguments = images, labels, order, position, 3, scale, shift, torch.float32, True
    x, _, moments = draw(*arguments, (3, 3, 1, 1))
    weight = torch.randn(8, 1, 3, 3, device=device)
    assert first_block(x, weight, (1, 1), moments)[2].isnan().any()


@pytest.mark.parametrize("wrong", [11, -1, 2**62, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("channels_last", [False, True])
def test_index_out_of_bounds(device, dtype, wrong, channels_last):
    images, labels, scale, shift = data_set((3, 4, 4), device, dtype)
    indices = torch.tensor([2, wrong, 5], device=device)
    arguments = images, labels, indices, scale, shift, dtype, channels_last
    if device == "cpu":
        with pytest.raises(IndexError, match=rf"index {wrong} is out of bounds for 11 images"):
            gather_images(*arguments)
        return
    batch, batch_labels = gather_images(*arguments)
    kept = indices[::2]
    expected, expected_labels = stock(images, labels, kept, *arguments[3:])
    assert torch.allclose(batch[::2], expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-2)
    assert batch[1].isnan().all()
    assert batch_labels.tolist() == [expected_labels[0].item(), -1, expected_labels[1].item()]


@pytest.mark.parametrize("begin", [9, 12, -1, 2**63 - 1, -(2**63)])
def test_position_out_of_bounds(device, begin):
    images, labels, scale, shift = data_set((1, 4, 4), device, torch.float32)
    order = torch.arange(11, device=device)
    position = torch.tensor([begin, 0], device=device)
    arguments = images, labels, order, position, 4, scale, shift, torch.float32, False
    if device == "cpu":
        with pytest.raises(IndexError, match=rf"batch of 4 from position {begin} is out of bounds"):
            draw(*arguments)
        assert position.tolist() == [begin, 0]
        return
    batch, batch_labels, _ = draw(*arguments)
    for i in range(4):
        inside = 0 <= begin + i < 11
        assert batch[i].isnan().any() == (not inside)
        assert batch_labels[i] == (labels[begin + i] if inside else -1)


def test_labels_of_images_out_of_bounds_reach_the_loss(device):
    if device == "cpu":
        return  # IndexError
    images, labels, scale, shift = data_set((1, 2, 5), device, torch.float32)
    indices = torch.tensor([11], device=device)
    batch, batch_labels = gather_images(images, labels, indices, scale, shift, torch.float32, False)
    braze.nn.functional.cross_entropy(batch.flatten(1), batch_labels)
    with pytest.raises(IndexError, match="Target -1 is out of bounds"):
        braze.check_errors()


@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(device, dtype, channels_last):
    images, labels, scale, shift = data_set((3, 4, 5), device, dtype)
    order = torch.tensor([4, 0, 9, 4], device=device)
    position = torch.tensor([1, 0], device=device)
    tail = scale, shift, dtype, channels_last
    ops = torch.ops.braze
    torch.library.opcheck(ops.gather_images.default, (images, labels, order, *tail))
    filters = [3, 3, 1, 0]
    for wanted in ([], filters):
        into = empty_batch(images, labels, 2, dtype, channels_last, wanted)
        call = images, labels, order, position, scale, shift, *into, wanted
        torch.library.opcheck(ops.gather_next.default, call)


def test_compile(device):
    images, labels, scale, shift = data_set((3, 4, 4), device, torch.float32)
    order = torch.arange(11, device=device)
    position = torch.zeros(2, dtype=torch.int64, device=device)

    def function(position):
        tail = scale, shift, torch.float32, True
        one, _ = gather_images(images, labels, order[:4], *tail)
        two, *_ = draw(images, labels, order, position, 4, *tail)
        three, targets, _ = draw(images, labels, order, position, 4, *tail, (3, 3, 1, 1))
        return one + two, three, targets

    expected = function(position)
    assert position[0] == 8
    position.zero_()
    actual = torch.compile(function, fullgraph=True)(position)
    assert position[0] == 8
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


def test_not_differentiable(device):
    images, labels, scale, shift = data_set((1, 2, 2), device, torch.float32)
    order = torch.arange(4, device=device)
    position = torch.zeros(2, dtype=torch.int64, device=device)
    tail = scale.requires_grad_(), shift, torch.float32, False
    with pytest.raises(RuntimeError, match="braze::gather_images is not differentiable"):
        torch.ops.braze.gather_images(images, labels, order, *tail)
    into = empty_batch(images, labels, 2, *tail[2:])
    with pytest.raises(RuntimeError, match="braze::gather_next is not differentiable"):
        torch.ops.braze.gather_next(images, labels, order, position, *tail[:2], *into)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("images", lambda t: t.float(), r"images of dtype uint8 and shape \[N, C, H, W\].*float32"),
        ("images", lambda t: t[0], r"images of dtype uint8.*uint8 \[3, 4, 4\]"),
        (
            "labels",
            lambda t: t[1:],
            r"labels of dtype int64 and shape \[11\], but got int64 \[10\]",
        ),
        ("labels", lambda t: t.int(), r"labels of dtype int64.*int32 \[11\]"),
        ("indices", lambda t: t.int(), r"indices of dtype int64 and shape \[count\].*int32 \[4\]"),
        ("indices", lambda t: t.view(2, 2), r"indices of dtype int64.*\[2, 2\]"),
        ("scale", lambda t: t.double(), r"scale of dtype float32 and shape \[3\].*float64 \[3\]"),
        ("shift", lambda t: t[:1], r"shift of dtype float32 and shape \[3\].*float32 \[1\]"),
        ("dtype", lambda t: torch.int32, r"dtype of dtype float64.*but got int32"),
    ],
)
def test_bad_input(device, name, change, message):
    images, labels, scale, shift = data_set((3, 4, 4), device, torch.float32)
    arguments = {
        "images": images,
        "labels": labels,
        "indices": torch.arange(4, device=device),
        "scale": scale,
        "shift": shift,
        "dtype": torch.float32,
        "channels_last": False,
    }
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=f"gather_images: expected {message}"):
        gather_images(**arguments)


def test_bad_input_of_next(device):
    images, labels, scale, shift = data_set((3, 4, 4), device, torch.float32)
    order = torch.arange(4, device=device)
    position = torch.zeros(2, dtype=torch.int64, device=device)
    tail = scale, shift, torch.float32, False
    for bad, batch, message in [
        (position[:1], 2, r"position of dtype int64 and shape \[2\], but got int64 \[1\]"),
        (position.int(), 2, r"position of dtype int64.*int32"),
        (torch.zeros(4, dtype=torch.int64, device=device)[::2], 2, "a contiguous position"),
    ]:
        with pytest.raises(RuntimeError, match=f"gather_next: expected {message}"):
            draw(images, labels, order, bad, batch, *tail)
    into = empty_batch(images, labels, 2, *tail[2:], (3, 3, 1, 1))
    for index, change, message in [
        (
            0,
            lambda t: t[:, :2],
            r"batch_images of shape \[batch, 3, 4, 4\], but got \[2, 2, 4, 4\]",
        ),
        (0, lambda t: t.transpose(2, 3), "contiguous or channels_last batch_images"),
        (0, lambda t: t.int(), "dtype of dtype float64.*but got int32"),
        (1, lambda t: t[:1], r"batch_labels of dtype int64 and shape \[2\], but got int64 \[1\]"),
        (1, lambda t: t.int(), "batch_labels of dtype int64.*int32"),
        (1, lambda t: t.repeat(2)[::2], "contiguous batch_labels"),
        (2, lambda t: t[1:], r"contiguous float64 moments of shape \[512, 405\].*\[511, 405\]"),
        (2, lambda t: t.float(), "contiguous float64 moments.*float32"),
    ]:
        bad = list(into)
        bad[index] = change(bad[index])
        with pytest.raises(RuntimeError, match=f"expected .*{message}"):
            gather_next(images, labels, order, position, scale, shift, bad, (3, 3, 1, 1))
    for filters in ((3, 3), (3, 3, -1, 0), (0, 3, 1, 1), (4, 4, 9, 9), (3, 3, 0, 0, 0)):
        with pytest.raises(RuntimeError, match="filters"):
            draw(images[:, :, :3, :3], labels, order, position, 2, *tail, filters)
    if device == "cuda":
        with pytest.raises(RuntimeError, match="all tensors to be on the same device, but labels"):
            gather_next(images, labels.cpu(), order, position, scale, shift, (*into[:2], None))
    assert position.tolist() == [0, 0]


def test_the_tests_reject_a_wrong_kernel(device, dtype):
    """Another channel's scale; another image's label."""
    images, labels, scale, shift = data_set((3, 4, 4), device, dtype)
    indices = torch.arange(11, device=device)

    def shifted_channel(images, labels, indices, scale, *rest):
        return gather_images(images, labels, indices, scale.roll(1), *rest)

    def wrong_label(images, labels, *rest):
        return gather_images(images, labels.roll(1), *rest)

    for wrong in (shifted_channel, wrong_label):
        with pytest.raises(AssertionError):
            check(wrong, images, labels, indices, scale, shift, dtype, False)
