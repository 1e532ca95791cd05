"""The MNIST files: format, faults, where they are looked for, download."""

import gzip
import hashlib
import io
import os
import struct
import sys
import urllib.error

import numpy as np
import pytest
import torch

from braze.data import load_digits, load_mnist
from braze.data import mnist as mnist_module
from braze.data.idx import parse_idx, read_bytes

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = mnist_module.FILES


def idx_bytes(array):
    array = np.asarray(array, np.uint8)
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(train=6, test=4):
    """The contents of the four files of a tiny data set."""
    random = np.random.default_rng(train)
    contents = {}
    for images, labels, count in [
        (TRAIN_IMAGES, TRAIN_LABELS, train),
        (TEST_IMAGES, TEST_LABELS, test),
    ]:
        contents[images] = idx_bytes(random.integers(0, 256, (count, 28, 28)))
        contents[labels] = idx_bytes(random.integers(0, 10, count))
    return contents


def write(directory, contents):
    directory.mkdir(exist_ok=True)
    for name, data in contents.items():
        (directory / name).write_bytes(data)
    return directory


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache in an empty directory, and BRAZE_DATA unset."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    monkeypatch.delenv("BRAZE_DATA", raising=False)
    return tmp_path / "cache" / "braze" / "mnist"


class Mirrors:
    """Stands in for the network: answers by URL, and notes what was asked for."""

    def __init__(self, monkeypatch, contents):
        self.zipped = {f"{name}.gz": gzip.compress(data) for name, data in contents.items()}
        self.asked, self.broken, self.replaced = [], {}, {}
        monkeypatch.setattr(mnist_module, "MIRRORS", ("http://one/", "http://two/"))
        md5 = {name: hashlib.md5(data).hexdigest() for name, data in contents.items()}
        monkeypatch.setattr(mnist_module, "FILES", md5)
        monkeypatch.setattr(mnist_module.urllib.request, "urlopen", self.open)

    def open(self, url, timeout):
        assert timeout > 0
        self.asked.append(url)
        mirror, name = url.rsplit("/", 1)
        if mirror in self.broken:
            raise self.broken[mirror]
        return io.BytesIO(self.replaced.get(mirror, self.zipped[name]))


@pytest.fixture
def mirrors(monkeypatch, cache):
    return Mirrors(monkeypatch, idx_files())


NO_NETWORK = urllib.error.URLError("no route to host")


# The file format


@pytest.mark.parametrize("shape", [(5,), (0,), (3, 28, 28), (0, 28, 28), (2, 3, 4)])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx(tmp_path, shape, suffix):
    array = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    data = idx_bytes(array)
    path = tmp_path / f"file{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    read = parse_idx(read_bytes(path), len(shape), path)
    assert read.dtype == np.uint8
    assert read.flags.writeable
    np.testing.assert_array_equal(read, array)


LABELS = idx_bytes([1, 2, 3])


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "truncated: 0 bytes"),
        (LABELS[:3], "truncated: 3 bytes"),
        (LABELS[:7], "truncated in its header .7 of 8 bytes"),
        (LABELS[:-1], "truncated: its header promises 3 = 3 bytes of data, but 2 follow"),
        (LABELS + b"\0", "too long: its header promises 3 = 3 bytes of data, but 4 follow"),
        (b"\x89PNG" + LABELS[4:], "wrong magic number 0x89504e47: not an IDX file"),
        (b"\0\0\x0d\x01" + LABELS[4:], r"expected unsigned bytes \(type code 0x08\), got 0x0d"),
        (idx_bytes([[1, 2], [3, 4]]), "expected 1 dimensions, but the file has 2"),
        # Extents whose product overflows 64 bits.
        (b"\0\0\x08\x01" + b"\xff" * 4, "truncated: its header promises 4294967295 "),
    ],
)
def test_idx_faults(tmp_path, data, fault):
    directory = write(tmp_path / "data", idx_files() | {TEST_LABELS: data})
    with pytest.raises(ValueError, match=f"{directory / TEST_LABELS}: {fault}"):
        load_mnist(directory)


def test_idx_extents_beyond_64_bits():
    with pytest.raises(ValueError, match=r"huge: truncated: .* = 79228162458924105385300197375 by"):
        parse_idx(b"\0\0\x08\x03" + b"\xff" * 12, 3, "huge")


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda data: data[: len(data) // 2], "truncated gzip file"),
        (lambda data: b"<html>" + data, "corrupt gzip file"),
        (lambda data: data[:-8] + bytes(4) + data[-4:], "corrupt gzip file .*CRC"),
        (lambda data: data[:20] + b"\xff" * 20 + data[40:], "corrupt gzip file"),
        (lambda data: b"", "truncated"),
    ],
)
def test_gzip_faults(tmp_path, damage, fault):
    contents = idx_files()
    data = damage(gzip.compress(contents.pop(TRAIN_IMAGES)))
    directory = write(tmp_path / "data", contents | {f"{TRAIN_IMAGES}.gz": data})
    with pytest.raises(ValueError, match=f"{directory / TRAIN_IMAGES}.gz: {fault}"):
        load_mnist(directory)


@pytest.mark.parametrize(
    ("name", "array", "fault"),
    [
        (TRAIN_LABELS, np.zeros(5), "5 labels, but .*images-idx3-ubyte has 6 images"),
        (TEST_IMAGES, np.zeros((3, 28, 28)), "4 labels, but .*images-idx3-ubyte has 3 images"),
        (TEST_IMAGES, np.zeros((4, 28, 27)), r"expected images of 28x28, got \(28, 27\)"),
        (TRAIN_LABELS, np.full(6, 10), "expected labels from 0 to 9, but got 10"),
    ],
)
def test_files_that_do_not_fit(tmp_path, name, array, fault):
    directory = write(tmp_path / "data", idx_files() | {name: idx_bytes(array)})
    with pytest.raises(ValueError, match=f"^{directory}.*: {fault}"):
        load_mnist(directory)


def test_an_empty_set_is_refused(tmp_path):
    """Accuracy would be 0 of 0."""
    empty = {TEST_IMAGES: idx_bytes(np.zeros((0, 28, 28))), TEST_LABELS: idx_bytes(np.zeros(0))}
    directory = write(tmp_path / "data", idx_files() | empty)
    with pytest.raises(ValueError, match=f"{TEST_IMAGES}: expected images, but it has none"):
        load_mnist(directory)


# Where the files are looked for


def test_root_then_variable_then_cache_then_download(tmp_path, cache, mirrors, monkeypatch):
    here, named = (
        write(tmp_path / name, idx_files(train)) for name, train in [("here", 7), ("named", 8)]
    )
    downloaded = load_mnist()
    assert (len(downloaded.train_images), downloaded.source) == (6, "MNIST")
    assert downloaded.directory == cache
    assert sorted(path.name for path in cache.iterdir()) == sorted(mirrors.zipped)
    assert len(mirrors.asked) == 4
    assert len(load_mnist(download=False).train_images) == 6
    monkeypatch.setenv("BRAZE_DATA", str(named))
    assert len(load_mnist().train_images) == 8
    assert len(load_mnist(here).train_images) == 7
    assert len(load_mnist(str(here)).train_images) == 7
    assert len(mirrors.asked) == 4
    monkeypatch.setenv("BRAZE_DATA", "")  # as if unset
    assert len(load_mnist().train_images) == 6


def test_types_and_values(tmp_path):
    contents = idx_files()
    digits = load_mnist(write(tmp_path / "data", contents))
    assert [part.dtype for part in digits[:4]] == [torch.uint8] * 4
    assert [part.shape for part in digits[:4]] == [(6, 28, 28), (6,), (4, 28, 28), (4,)]
    assert digits.test_images.numpy().tobytes() == contents[TEST_IMAGES][16:]
    assert digits.train_labels.numpy().tobytes() == contents[TRAIN_LABELS][8:]


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_named_directory_is_never_replaced_by_a_download(
    tmp_path, mirrors, monkeypatch, by_variable
):
    contents = idx_files()
    del contents[TEST_LABELS]
    directory = write(tmp_path / "data", contents)
    if by_variable:
        monkeypatch.setenv("BRAZE_DATA", str(directory))
    with pytest.raises(FileNotFoundError, match=f"^{directory}: expected {TEST_LABELS} "):
        load_mnist(None if by_variable else directory)
    assert mirrors.asked == []


def test_no_download_wanted(cache, mirrors):
    with pytest.raises(FileNotFoundError, match=f"^{cache}: expected train-images"):
        load_mnist(download=False)
    assert mirrors.asked == []
    assert not cache.exists()


def test_only_what_is_missing_is_downloaded(cache, mirrors):
    load_mnist()
    mirrors.asked.clear()
    (cache / f"{TEST_IMAGES}.gz").unlink()
    load_mnist()
    assert mirrors.asked == [f"http://one/{TEST_IMAGES}.gz"]


def test_a_corrupt_file_in_the_cache_is_an_error(cache, mirrors):
    load_mnist()
    (cache / f"{TEST_IMAGES}.gz").write_bytes(mirrors.zipped[f"{TEST_IMAGES}.gz"][:100])
    with pytest.raises(ValueError, match=f"{cache / TEST_IMAGES}.gz: truncated gzip file"):
        load_mnist()


@pytest.mark.parametrize(
    "fault",
    [
        {"broken": {"http://one": NO_NETWORK}},
        {"broken": {"http://one": TimeoutError("timed out")}},
        {"broken": {"http://one": urllib.error.HTTPError("", 503, "busy", {}, None)}},
        {"replaced": {"http://one": b"<html>log in</html>"}},
        {"replaced": {"http://one": gzip.compress(b"something else")}},
        {"replaced": {"http://one": gzip.compress(b"cut off" * 99)[:-9]}},
    ],
    ids=["unreachable", "timeout", "error", "web page", "wrong md5", "truncated"],
)
def test_the_second_mirror_serves_where_the_first_fails(cache, mirrors, fault):
    vars(mirrors).update(fault)
    assert load_mnist().directory == cache
    assert [url for url in mirrors.asked if "two" in url] == [
        f"http://two/{name}.gz" for name in mnist_module.FILES
    ]


def test_wrong_md5_everywhere(cache, mirrors):
    other = gzip.compress(b"other")
    mirrors.replaced = {"http://two": other}
    mirrors.broken = {"http://one": NO_NETWORK}
    md5 = hashlib.md5(b"other").hexdigest()
    expected = mnist_module.FILES[TRAIN_IMAGES]
    with pytest.raises(ValueError, match=f"two/{TRAIN_IMAGES}.gz: md5 {md5}, expected {expected}"):
        load_mnist()
    assert list(cache.iterdir()) == []


def test_nothing_half_written_stays(cache, mirrors, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mnist_module.os, "replace", full)
    monkeypatch.setattr(mnist_module, "_digits_instead", str)
    assert "No space left" in load_mnist()
    assert list(cache.iterdir()) == []


def test_scikit_learn_where_there_is_no_network(cache, mirrors):
    pytest.importorskip("sklearn")
    mirrors.broken = dict.fromkeys(["http://one", "http://two"], NO_NETWORK)
    announced = r"could not be downloaded \(http://one/.*no route to host.*scikit-learn's load_dig"
    with pytest.warns(UserWarning, match=announced) as warned:
        digits = load_mnist()
    assert warned[0].filename == __file__
    assert digits.source == "scikit-learn's load_digits, enlarged to 28x28 (not MNIST)"
    assert digits.directory is None
    assert [len(part) for part in digits[:4]] == [1438, 1438, 359, 359]
    with torch.device("meta"):  # they are on the CPU, whatever the default device is
        again = load_digits()
    for one, two in zip(digits[:4], again[:4], strict=True):
        assert torch.equal(one, two)
    assert digits.train_images.shape[1:] == (28, 28)
    assert digits.train_images.max() > 240
    assert not digits.train_images[:, :4].any()
    assert digits.train_labels.unique().tolist() == list(range(10))


def test_neither_network_nor_scikit_learn(cache, mirrors, monkeypatch):
    mirrors.broken = dict.fromkeys(["http://one", "http://two"], NO_NETWORK)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(OSError, match=r"no route to host.*BRAZE_DATA.*pip install scikit-learn"):
        load_mnist()


@pytest.mark.skipif(not os.environ.get("BRAZE_DATA"), reason="BRAZE_DATA is not set")
def test_real_mnist():
    digits = load_mnist()
    assert digits.train_images.shape == (60000, 28, 28)
    assert digits.test_images.shape == (10000, 28, 28)
    assert digits.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert digits.test_labels.bincount().tolist() == [
        *[980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    ]
    pixels = digits.train_images.double() / 255
    assert abs(pixels.mean() - 0.1307) < 1e-4
    assert abs(pixels.std() - 0.3081) < 1e-4
    for name, images in [(TRAIN_IMAGES, digits.train_images), (TEST_IMAGES, digits.test_images)]:
        data = idx_bytes(images.numpy())
        assert hashlib.md5(data).hexdigest() == mnist_module.FILES[name]
