"""Finds, downloads and checks MNIST; scikit-learn's digits where there is no network."""

import hashlib
import os
import tempfile
import urllib.request
import warnings
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import numpy as np
import platformdirs
import torch

from braze.data.idx import parse_idx, read_bytes, unzip

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
# file -> md5 of its uncompressed content
FILES = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
_TIMEOUT_SECONDS = 15
_LARGEST_DOWNLOAD = 32 << 20


class Digits(NamedTuple):
    """Images and labels of digits, on the CPU.

    ``*_images`` are uint8 ``[count, 28, 28]``, 0 for paper and 255 for ink; ``*_labels`` are uint8
    ``[count]``, 0 to 9. ``source`` names the data set, ``directory`` is where its files lie (None
    for scikit-learn's).
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    source: str
    directory: Path | None = None


def load_mnist(root=None, download=True):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits.

    Looks for the four IDX files (plain or ``.gz``) in `root`, else in ``$BRAZE_DATA``, else in the
    user's cache; else downloads them there from one of two public mirrors, checking their md5.
    Files that are there already are checked for consistency only, so that look-alikes such as
    Fashion-MNIST can be given. Without a network it warns and returns :func:`load_digits`.

    Args:
        root: directory with the files. It, and ``$BRAZE_DATA``, are never written to.
        download: False raises where the files are not on this machine.

    Returns:
        :class:`Digits`.

    Raises:
        FileNotFoundError: `root` or ``$BRAZE_DATA`` lacks a file, or `download` is False and the
            cache does.
        ValueError: a file is truncated, corrupt, empty, no IDX file, or does not fit the others;
            the message names the file and the fault. Or what the mirrors hold has another md5.
        OSError: there is neither a network nor scikit-learn.
    """
    named = root if root is not None else os.environ.get("BRAZE_DATA")
    if named:
        return _read(Path(named).expanduser())
    cache = platformdirs.user_cache_path("braze") / "mnist"
    missing = [name for name in FILES if _find(cache, name) is None]
    if missing and download:
        try:
            _download(cache, missing)
        except OSError as error:
            return _digits_instead(error)
    return _read(cache)


def load_digits():
    """1,797 real handwritten digits that scikit-learn ships, enlarged from 8x8 to 28x28.

    The UCI "Optical Recognition of Handwritten Digits" test set; every fifth image is kept for
    testing. Deterministic.

    Returns:
        :class:`Digits`.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits as sklearn_digits

    digits = sklearn_digits()
    images = torch.from_numpy(digits.images).float()[:, None] * (255 / 16)
    # MNIST's own geometry: the digit in a 20x20 box, with a margin of 4 pixels.
    images = torch.nn.functional.interpolate(images, size=(20, 20), mode="bilinear")
    images = torch.nn.functional.pad(images, (4, 4, 4, 4)).squeeze(1).round().to(torch.uint8)
    labels = torch.from_numpy(digits.target.astype(np.uint8))
    test = torch.arange(len(images), device="cpu") % 5 == 4  # whatever the default device is
    return Digits(
        images[~test],
        labels[~test],
        images[test],
        labels[test],
        "scikit-learn's load_digits, enlarged to 28x28 (not MNIST)",
    )


def _digits_instead(error):
    try:
        digits = load_digits()
    except ImportError:
        raise OSError(
            f"MNIST could not be downloaded ({error}). Put its four files into a directory and "
            "name it in BRAZE_DATA, or `pip install scikit-learn` for the digits that it ships."
        ) from error
    warnings.warn(
        f"MNIST could not be downloaded ({error}): using {digits.source}, "
        f"{len(digits.train_images)} training and {len(digits.test_images)} test images, instead",
        stacklevel=3,
    )
    return digits


def _find(root, name):
    """The file of that name, plain or gzipped, or None."""
    return next((p for p in (root / name, root / f"{name}.gz") if p.is_file()), None)


def _read(root):
    paths = {name: _find(root, name) for name in FILES}
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        raise FileNotFoundError(f"{root}: expected {', '.join(missing)} (plain or .gz) there")
    train_images, train_labels, test_images, test_labels = paths.values()
    return Digits(
        *_read_pair(train_images, train_labels),
        *_read_pair(test_images, test_labels),
        "MNIST",
        root,
    )


def _read_pair(images_path, labels_path):
    images = parse_idx(read_bytes(images_path), 3, images_path)
    labels = parse_idx(read_bytes(labels_path), 1, labels_path)
    if images.shape[1:] != (28, 28):
        raise ValueError(f"{images_path}: expected images of 28x28, got {images.shape[1:]}")
    if len(images) != len(labels):
        raise ValueError(
            f"{labels_path}: {len(labels)} labels, but {images_path} has {len(images)} images"
        )
    if not len(labels):
        raise ValueError(f"{images_path}: expected images, but it has none")
    if labels.max() > 9:
        raise ValueError(f"{labels_path}: expected labels from 0 to 9, but got {labels.max()}")
    return torch.from_numpy(images), torch.from_numpy(labels)


def _download(directory, names):
    """Fetches the files as .gz, each whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        data = _fetch(name)
        with tempfile.TemporaryDirectory(dir=directory) as unfinished:
            file = Path(unfinished) / name
            file.write_bytes(data)
            os.replace(file, directory / f"{name}.gz")


def _fetch(name):
    """The gzipped bytes of a file from the first mirror that has it right.

    Raises OSError where no mirror can be reached (or something else answers in its place, as the
    login page of a network does), ValueError where one holds another file; both name every fault.
    """
    faults, kind = [], OSError
    for mirror in MIRRORS:
        url = f"{mirror}{name}.gz"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
                data = response.read(_LARGEST_DOWNLOAD)
            digest = hashlib.md5(unzip(data, url), usedforsecurity=False).hexdigest()
        except (OSError, HTTPException, ValueError) as error:
            faults.append(f"{url}: {error}")
            continue
        if digest == FILES[name]:
            return data
        faults.append(f"{url}: md5 {digest}, expected {FILES[name]}")
        kind = ValueError
    raise kind("; ".join(faults))
