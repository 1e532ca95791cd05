"""The tuned choices: which kernel was measured to be the fastest for which matrix product.

The built-in table, ``tuned/<device>.json``, comes with the package. The user's cache holds what
:func:`braze.tune` measured here, and goes first. Both are read when braze (for GPUs: CUDA) starts,
into the tables of csrc/ops/tuned.h, which ``backend="auto"`` asks before its rules.
"""

import fcntl
import json
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import platformdirs

from braze import _lib

BUILT_IN = Path(__file__).parent / "tuned"
_FORMAT = 1
# More than a file of ours ever has: larger ones are not read.
_MOST_BYTES = 16 << 20
#: csrc/launchers/common/types.h has them in this order
_DTYPES = ["float64", "float32", "bfloat16", "float16"]

#: counts the changes of the tables: what was captured in a CUDA graph before one is out of date
version = 0


class Product(NamedTuple):
    """What the choice of a kernel depends on: ``braze::Product``, but for the device.

    C (`batch` of `m` x `n`) = A (`m` x `k`) times B (`k` x `n`). `dtype` is torch's name or "tf32".
    `column_major`, `shared` (one matrix for the whole batch) and `aligned` (addresses and strides
    of multiples of 16 bytes) are how A and B lie in memory.
    """

    dtype: str
    batch: int
    m: int
    n: int
    k: int
    a_column_major: bool = False
    a_shared: bool = True
    a_aligned: bool = True
    b_column_major: bool = False
    b_shared: bool = True
    b_aligned: bool = True
    bias: bool = False
    relu: bool = False

    @classmethod
    def from_words(cls, words):
        """(index of the device, -1 for the CPU; the product) of a ``braze::Product``."""
        device, dtype, tf32, *rest = words
        extents, flags = rest[:4], map(bool, rest[4:])
        return device, cls("tf32" if tf32 else _DTYPES[dtype], *extents, *flags)

    def words(self, device):
        tf32 = self.dtype == "tf32"
        dtype = "float32" if tf32 else self.dtype
        return [device, _DTYPES.index(dtype), int(tf32), *map(int, self[1:])]

    def __str__(self):
        layout = "nt"[self.a_column_major] + "nt"[self.b_column_major]
        words = [f"{self.m}x{self.n}x{self.k}", layout]
        if self.batch > 1:
            shared = {(True, False): ", one A", (False, True): ", one B"}
            words.append(f"batch {self.batch}{shared.get((self.a_shared, self.b_shared), '')}")
        odd = "".join(name for name in "AB" if not getattr(self, f"{name.lower()}_aligned"))
        words += [f"{odd} unaligned"] if odd else []
        return " ".join(words + ["bias"] * self.bias + ["relu"] * self.relu)


class Place(NamedTuple):
    """Where choices hold: a device by its name, the library whose candidates they number, braze."""

    index: int  # -1: the CPU
    device: str
    library: str
    braze: str

    def slug(self):
        """The device's name, as file names have it."""
        return ("cpu-" if self.index < 0 else "") + _slug(self.device)

    def user_file(self):
        """The cache's file."""
        name = f"{self.slug()}_{_slug(self.library)}_braze-{_slug(self.braze)}.json"
        return user_folder() / name


def _slug(text):
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def user_folder():
    return platformdirs.user_cache_path("braze") / "tuned"


def library_of(index):
    return _lib.ops_library if index < 0 else _lib.cuda_library


def place_of(index):
    """The :class:`Place` of a GPU, or of the CPU (-1)."""
    from braze import __version__

    if index < 0:
        from braze.info import _cpu

        return Place(index, _cpu()["name"], _lib.cpu_isa, __version__)
    import torch

    cublas = _lib.cuda_library.vendor()["cublas"]["version"] or "none"
    return Place(index, torch.cuda.get_device_name(index), f"cublas {cublas}", __version__)


# --- files ---


def read(path, place, built_in=False):
    """Product -> row of a file; {} with a warning where it is damaged or another place's.

    A row is a dict with at least ``choice``. Of a built-in table that was made with another version
    of the vendor library, the choices that number its candidates are left out.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")  # reading might wait for ever
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # text that is not UTF-8 is a ValueError
        return _ignored(path, error)
    try:
        content = json.loads(text)
        head = [content[key] for key in ("format", "device", "library", "braze")]
        expected = [_FORMAT, place.device, place.library, place.braze]
        compared = 2 if built_in else 4
        if head[:compared] != expected[:compared]:
            raise ValueError(f"it is of {head!s:.200}, expected {expected}")
        rows = dict(map(_checked_row, content["products"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return _ignored(path, error)
    if content["library"] != place.library:
        rows = {p: row for p, row in rows.items() if not re.search(r":[1-9]", row["choice"])}
    return rows


def _checked_row(row):
    row = dict(row)
    types = Product.__annotations__
    product = Product(*(row.pop(field) for field in Product._fields))
    for field, value in [*product._asdict().items(), ("choice", row["choice"])]:
        wanted = types.get(field, str)
        if type(value) is not wanted:
            got = f"{value!r:.80}"
            raise TypeError(f"expected {field} to be of type {wanted.__name__}, but got {got}")
        if wanted is int and not 0 < value < 1 << 63:
            raise ValueError(f"expected {field} from 1 to 2**63 - 1")
    if product.dtype not in (*_DTYPES, "tf32"):
        raise ValueError(f"unknown dtype {product.dtype!r:.80}")
    if not re.fullmatch(r"[\w.:+-]{1,80}", row["choice"], re.ASCII):
        raise ValueError(f"expected choice to be a kernel's name, but got {row['choice']!r:.80}")
    return product, row


def _ignored(path, error):
    warnings.warn(
        f"braze ignores the tuned choices in {path}: {type(error).__name__}: {error}", stacklevel=3
    )
    return {}


def write(path, place, rows):
    """Merges rows (product -> dict with ``choice``, None to remove it) into a file.

    Any number of processes may do so at once: the file is read and replaced under a lock, and is
    whole at any time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged = {**read(path, place), **rows}
        head = {
            "format": _FORMAT,
            "device": place.device,
            "library": place.library,
            "braze": place.braze,
        }
        lines = [
            json.dumps({**product._asdict(), **row})
            for product, row in sorted(merged.items())
            if row is not None
        ]
        text = json.dumps(head)[:-1] + ', "products": [\n' + ",\n".join(lines) + "\n]}\n"
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            os.chmod(temporary, 0o644)  # mkstemp's files are the owner's alone
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


# --- tables ---


def put(index, product, choice, measured):
    """Makes a choice effective on a device, at once."""
    global version
    library_of(index).set_tuned(product.words(index), choice, measured)
    version += 1


def entries():
    """Everything that is effective: (index of the device, product, choice, measured), sorted."""
    libraries = [library for library in (_lib.ops_library, _lib.cuda_library) if library]
    found = [(*Product.from_words(w), *rest) for lib in libraries for w, *rest in lib.tuned()]
    return sorted(found)


def forget():
    """Empties the tables of this process."""
    global version
    for library in (_lib.ops_library, _lib.cuda_library):
        if library is not None:
            library.clear_tuned()
    version += 1


def load(index):
    """Reads both files of a device into its table. Warns at worst."""
    # Finding out names and versions takes milliseconds, which most processes need not spend.
    pattern = "cpu-*.json" if index < 0 else "*.json"
    try:
        if not any(True for folder in (BUILT_IN, user_folder()) for _ in folder.glob(pattern)):
            return
        place = place_of(index)
    except (OSError, RuntimeError) as error:  # importing braze has to go on
        warnings.warn(f"braze reads no tuned choices: {error}", stacklevel=2)
        return
    for row in _rows(BUILT_IN / f"{place.slug()}.json", place, built_in=True):
        put(index, *row, False)
    for row in _rows(place.user_file(), place, built_in=False):
        put(index, *row, True)


def _rows(path, place, built_in):
    return [(product, row["choice"]) for product, row in read(path, place, built_in).items()]


def load_all():
    """Of the CPU now, of the GPUs when CUDA starts, which importing braze must not make it do."""
    load(-1)
    if _lib.cuda_library is None:
        return
    import torch

    def load_gpus():
        for index in range(torch.cuda.device_count()):
            load(index)

    torch.cuda._lazy_call(load_gpus)


def delete_cache():
    """Deletes the user's cache, of all devices and versions; returns the files' paths."""
    files = sorted(user_folder().glob("*.json"))
    for file in files:
        file.unlink()
        file.with_suffix(".lock").unlink(missing_ok=True)
    return files
