"""DeviceLoader: epochs, values, batches for captured steps."""

import copy
import pickle

import pytest
import torch

from braze.data import DeviceLoader


def numbered(count, *shape):
    """Images that hold their own number, which is their label too."""
    labels = torch.arange(count)
    images = labels.to(torch.uint8).reshape(-1, *[1] * len(shape)).expand(-1, *shape)
    return images, labels


def epoch(loader):
    return [label for _, labels in loader for label in labels.tolist()]


@pytest.mark.parametrize(("count", "batch"), [(10, 3), (12, 3), (5, 8), (1, 1), (0, 4), (200, 64)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_image_once_an_epoch(device, count, batch, drop_last):
    loader = DeviceLoader(
        *numbered(count, 4, 5), batch, drop_last=drop_last, device=device, std=1 / 255
    )
    for _ in range(2):
        sizes, seen = [], []
        for images, labels in loader:
            assert images.shape == (len(labels), 1, 4, 5)
            assert images.device.type == labels.device.type == device
            assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
            assert torch.equal(images[:, 0, 3, 4].round().long(), labels)
            sizes.append(len(labels))
            seen += labels.tolist()
        full, rest = divmod(count, batch)
        assert sizes == [batch] * full + [rest] * (rest > 0 and not drop_last)
        assert len(loader) == len(sizes)
        assert len(set(seen)) == len(seen) == sum(sizes)
        assert set(seen) <= set(range(count))


def test_order(device):
    data = numbered(100, 2, 2)
    loader = DeviceLoader(*data, 7, seed=3, device=device)
    first, second = epoch(loader), epoch(loader)
    assert sorted(first) == sorted(second) == list(range(100))
    assert len({tuple(range(100)), tuple(first), tuple(second)}) == 3
    again = DeviceLoader(*data, 7, seed=3, device=device)
    torch.rand(5, device=device)  # the loader's generator is its own
    assert [epoch(again), epoch(again)] == [first, second]
    assert epoch(DeviceLoader(*data, 7, seed=4, device=device)) != first
    again.restart(3)
    assert epoch(again) == first
    still = DeviceLoader(*data, 7, shuffle=False, device=device)
    assert epoch(still) == epoch(still) == list(range(100))


@pytest.mark.parametrize("count", [24, 25, 2, 0])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_each_step(device, count, drop_last):
    """A step's images, of all ranks together, are those of one process; as torch's
    DistributedSampler has it, all ranks have as many."""
    data, ranks, batch = numbered(count, 1, 1), 3, 4
    options = {"drop_last": drop_last, "device": device, "seed": 1}
    whole = DeviceLoader(*data, batch * ranks, **options)
    parts = [
        DeviceLoader(*data, batch, num_replicas=ranks, rank=rank, **options)
        for rank in range(ranks)
    ]
    for _ in range(2):
        order = whole.draw().tolist()
        shares = [epoch(part) for part in parts]
        own = count // ranks if drop_last else -(-count // ranks)
        own = own // batch * batch if drop_last else own
        assert [len(share) for share in shares] == [own] * ranks
        repeated = (order * ranks)[: own * ranks]
        assert shares == [repeated[rank::ranks] for rank in range(ranks)]
        full, rest = divmod(own, batch)
        assert parts[0].batch_sizes() == [batch] * full + [rest] * (rest > 0)
    again = copy.copy(parts[1])
    parts[1].start_epoch()
    captured = []
    for size in parts[1].batch_sizes():
        captured += parts[1].next_batch(size)[1].tolist()
    assert captured == epoch(again)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_replicas": 2, "rank": 2}, ValueError, "rank 2 of 2"),
        ({"num_replicas": 2, "rank": -1}, ValueError, "rank -1 of 2"),
        ({"num_replicas": 0}, ValueError, "rank 0 of 0"),
        ({"num_replicas": 2.0}, TypeError, "num_replicas to be an int"),
        ({"rank": True}, TypeError, "rank to be an int"),
    ],
)
def test_bad_ranks(options, error, message):
    with pytest.raises(error, match=message):
        DeviceLoader(*numbered(4, 1, 1), 2, **options)


def test_dropped_images_differ_between_epochs(device):
    loader = DeviceLoader(*numbered(100, 1, 1), 64, drop_last=True, device=device)
    assert set(epoch(loader)) != set(epoch(loader))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_values_dtype_and_layout(device, dtype, memory_format):
    images = torch.randint(256, (9, 3, 5, 4), dtype=torch.uint8)
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 2.0]
    options = {"dtype": dtype, "mean": mean, "std": std, "memory_format": memory_format}
    loader = DeviceLoader(images, torch.arange(9), 9, device=device, **options)
    batch, labels = next(iter(loader))
    assert batch.dtype == dtype
    assert batch.is_contiguous(memory_format=memory_format)
    mean, std = (torch.tensor(x, dtype=torch.float64).reshape(3, 1, 1) for x in (mean, std))
    expected = (images[labels.cpu()].double() / 255 - mean) / std
    # Of images, scale, shift and result only the images are exact; what cancels is below 4.
    error = (batch.cpu().double() - expected).abs().max()
    assert error <= 3 * torch.finfo(dtype).eps * 4


def test_gather_and_index_batches(device):
    loader = DeviceLoader(*numbered(50, 2, 2), 8, seed=1, device=device)
    batches = [loader.gather(indices) for indices in loader.index_batches()]
    loader.restart(1)
    for (images, labels), (same_images, same_labels) in zip(batches, loader, strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)


def next_epoch(loader):
    """An epoch by next_batch(), where epoch() gets one by iterating."""
    loader.start_epoch()
    batches = [loader.next_batch(size) for size in loader.batch_sizes()]
    return torch.cat([labels for _, labels in batches]).tolist()


@pytest.mark.parametrize("shuffle", [False, True])
def test_next_batch_draws_what_iterating_draws(device, shuffle):
    loader = DeviceLoader(*numbered(50, 2, 2), 8, seed=1, device=device, shuffle=shuffle)
    with pytest.raises(RuntimeError, match=r"expected start_epoch\(\) before next_batch"):
        loader.next_batch()
    epochs = [next_epoch(loader), next_epoch(loader)]
    assert loader.batch_sizes() == [8] * 6 + [2]
    loader.restart(1)
    assert [epoch(loader), epoch(loader)] == epochs
    loader.restart(1)
    images, labels = next(iter(loader))
    loader.restart(1)
    loader.start_epoch()
    same_images, same_labels = loader.next_batch()
    assert torch.equal(images, same_images)
    assert torch.equal(labels, same_labels)
    loader.start_epoch()  # an epoch may be left unfinished
    assert sorted(next_epoch(loader)) == list(range(50))


def test_next_batch_in_and_out_of_inference_mode(device):
    loader = DeviceLoader(*numbered(20, 2, 2), 8, device=device)
    with torch.inference_mode():
        assert sorted(next_epoch(loader)) == list(range(20))
    assert sorted(next_epoch(loader)) == list(range(20))


def test_a_copy_shares_the_data_and_draws_by_itself(device):
    loader = DeviceLoader(*numbered(40, 2, 2), 40, seed=1, device=device)
    loader.start_epoch()
    twin = copy.copy(loader)
    assert twin.images is loader.images
    first = twin.next_batch()[1].tolist()
    assert loader.next_batch()[1].tolist() == first
    second = next_epoch(twin)
    assert next_epoch(loader) == second != first
    twin.restart(5)
    assert next_epoch(loader) != next_epoch(twin)


@pytest.mark.parametrize("ranks", [1, 3])
def test_orders_and_the_state_before_each(device, ranks):
    """Those of a generator of the same seed, although a GPU makes the next one ahead."""
    loader = DeviceLoader(
        *numbered(50, 2, 2), 8, seed=3, device=device, num_replicas=ranks, rank=ranks - 1
    )
    generator = torch.Generator(device).manual_seed(3)

    def expected():
        order = torch.randperm(50, generator=generator, device=device).tolist()
        return (order + order)[ranks - 1 :: ranks][: -(-50 // ranks)]

    states, orders = [], []
    for _ in range(4):
        assert torch.equal(loader.get_state(), generator.get_state())
        states.append(loader.get_state())
        orders.append(loader.draw().tolist())
        assert orders[-1] == expected()
    loader.set_state(states[1])
    assert torch.equal(loader.get_state(), states[1])
    assert [loader.draw(out=loader.empty_order()).tolist() for _ in range(3)] == orders[1:]
    loader.shuffle = False
    assert torch.equal(loader.draw(), loader.draw())
    assert torch.equal(loader.get_state(), generator.get_state())
    loader.restart(3)
    loader.shuffle = True
    assert loader.draw().tolist() == orders[0]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_copies_go_on_from_where_it_is(device, copied):
    loader = DeviceLoader(*numbered(30, 2, 2), 8, seed=2, device=device)
    before = copied(loader)
    orders = [loader.draw().tolist() for _ in range(2)]
    behind = copied(loader)
    assert [before.draw().tolist() for _ in range(2)] == orders
    assert behind.draw().tolist() == loader.draw().tolist()


def test_out_of_bounds(device):
    loader = DeviceLoader(*numbered(10, 3, 3), 4, device=device, shuffle=False)
    indices = torch.tensor([1, 10, -1, 2], device=device)
    loader.start_epoch()
    loader.next_batch(8)
    if device == "cpu":
        with pytest.raises(IndexError, match="index 10 is out of bounds for 10 images"):
            loader.gather(indices)
        with pytest.raises(IndexError, match="batch of 4 from position 8 is out of bounds for an"):
            loader.next_batch()
        assert loader.next_batch(2)[1].tolist() == [8, 9]
        return
    for (images, labels), right in [
        (loader.gather(indices), {0: 1, 3: 2}),
        (loader.next_batch(), {0: 8, 1: 9}),
    ]:
        assert labels.tolist() == [right.get(i, -1) for i in range(4)]
        for i in range(4):
            assert images[i].isnan().all() == (i not in right)
            assert images[i].isfinite().all() == (i in right)


def test_every_replay_draws_the_next_batch(device):
    if device == "cpu":
        return  # CUDA graphs
    loader = DeviceLoader(*numbered(100, 4, 4), 16, seed=2, drop_last=True, device=device)
    loader.start_epoch()
    loader.next_batch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images, labels = loader.next_batch()
    loader.restart(2)
    expected = [[batch.tolist() for _, batch in loader] for _ in range(2)]
    loader.restart(2)
    for batches in expected:
        loader.start_epoch()
        for batch in batches:
            graph.replay()
            assert labels.tolist() == batch
            assert torch.equal((images[:, 0, 1, 2] * 255).round().long(), labels)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"images": torch.zeros(4, 2, 2)}, TypeError, "uint8, but got torch.float32"),
        ({"labels": torch.zeros(4)}, TypeError, "integer labels, but got torch.float32"),
        ({"images": torch.zeros(4, 2).byte()}, ValueError, r"\[N, C, H, W\], got \[4, 2\]"),
        ({"labels": torch.arange(3)}, ValueError, r"images \[4, 2, 2\] and labels \[3\]"),
        ({"labels": torch.zeros(4, 1).long()}, ValueError, r"labels \[4, 1\]"),
        ({"images": [[0]]}, TypeError, "images to be a tensor, but got list"),
        ({"labels": [0, 1, 2, 3]}, TypeError, "labels to be a tensor, but got list"),
        ({"batch_size": 0}, ValueError, "batch_size of at least 1, got 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size to be an int, but got 2.0"),
        ({"batch_size": True}, TypeError, "batch_size to be an int, but got True"),
        ({"memory_format": "channels_last"}, ValueError, "but got 'channels_last'"),
        ({"std": float("nan")}, ValueError, "a finite std other than 0"),
        ({"mean": float("inf")}, ValueError, "a finite mean"),
        ({"std": 0.0}, ValueError, "std other than 0"),
        ({"std": [1.0, 0.0]}, ValueError, "std other than 0"),
        ({"std": [1.0, 2.0]}, ValueError, "std to be one number or 1, one per channel, but got 2"),
        ({"mean": [0.0] * 3}, ValueError, "mean to be one number or 1, one per channel, but got 3"),
        ({"dtype": torch.int64}, TypeError, "float16, but got torch.int64"),
    ],
)
def test_bad_arguments(change, error, message):
    images, labels = numbered(4, 2, 2)
    arguments = {"images": images, "labels": labels, "batch_size": 2} | change
    with pytest.raises(error, match=f"DeviceLoader: expected .*{message}"):
        DeviceLoader(**arguments)
