"""The tuned choices: which kernel was measured to be the fastest for which matrix product, and for
which pass of a convolution.

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
from braze._problems import DTYPES, KINDS, PASSES, Convolution, Product

BUILT_IN = Path(__file__).parent / "tuned"
_FORMAT = 1
# More than a file of ours ever has: larger ones are not read.
_MOST_BYTES = 16 << 20
#: counts the changes of the tables: what was captured in a CUDA graph before one is out of date
version = 0


class Place(NamedTuple):
    """Where choices hold: a device by its name, libraries whose candidates they number, braze."""

    index: int  # -1: the CPU
    device: str
    library: str  # of products
    braze: str
    cudnn: str = ""  # of convolutions

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

    vendors = _lib.cuda_library.vendor()
    cublas, cudnn = (vendors[name]["version"] or "none" for name in ("cublas", "cudnn"))
    return Place(index, torch.cuda.get_device_name(index), f"cublas {cublas}", __version__, cudnn)


# --- files ---


def read(path, place, built_in=False):
    """Product or Convolution -> row of a file; {} with a warning where it is damaged or another
    place's.

    A row is a dict with at least ``choice``. Of a built-in table that was made with another version
    of a vendor library, the choices that number its candidates are left out; of a user's table that
    was made with another cuDNN, all convolutions.
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
        products, convolutions = (
            dict(_checked_row(kind, row) for row in found)
            for kind, found in ((Product, content["products"]), (Convolution, _of_cudnn(content)))
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return _ignored(path, error)
    if content["library"] != place.library:
        products = _without_numbers(products)
    if content.get("cudnn", place.cudnn) != place.cudnn:
        convolutions = _without_numbers(convolutions) if built_in else {}
    return {**products, **convolutions}


def _of_cudnn(content):
    """The rows of convolutions, of which files of products alone say nothing."""
    if "convolutions" not in content:
        return []
    if not isinstance(content["cudnn"], str):
        raise TypeError(f"expected cudnn to be a version, but got {content['cudnn']!r:.80}")
    return content["convolutions"]


def _without_numbers(rows):
    return {p: row for p, row in rows.items() if not re.search(r":[1-9]", row["choice"])}


def _checked_row(kind, row):
    row = dict(row)
    types = kind.__annotations__
    problem = kind(*(row.pop(field) for field in kind._fields))
    for field, value in [*problem._asdict().items(), ("choice", row["choice"])]:
        wanted = types.get(field, str)
        if type(value) is not wanted:
            got = f"{value!r:.80}"
            raise TypeError(f"expected {field} to be of type {wanted.__name__}, but got {got}")
        least = 0 if field in kind.may_be_zero else 1
        if wanted is int and not least <= value < 1 << 63:
            raise ValueError(f"expected {field} from {least} to 2**63 - 1")
    if problem.dtype not in (*DTYPES, "tf32"):
        raise ValueError(f"unknown dtype {problem.dtype!r:.80}")
    if kind is Convolution and problem.pass_name not in PASSES:
        raise ValueError(f"unknown pass {problem.pass_name!r:.80}")
    if not re.fullmatch(r"[\w.:+-]{1,80}", row["choice"], re.ASCII):
        raise ValueError(f"expected choice to be a kernel's name, but got {row['choice']!r:.80}")
    return problem, row


def _ignored(path, error):
    warnings.warn(
        f"braze ignores the tuned choices in {path}: {type(error).__name__}: {error}", stacklevel=3
    )
    return {}


def write(path, place, rows):
    """Merges rows (Product or Convolution -> dict with ``choice``, None to remove it) into a file.

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

        def lines(kind):
            rows = sorted(
                (p, r) for p, r in merged.items() if isinstance(p, kind) and r is not None
            )
            return ",\n".join(json.dumps({**problem._asdict(), **row}) for problem, row in rows)

        text = json.dumps(head)[:-1] + ', "products": [\n' + lines(Product) + "\n]"
        if convolutions := lines(Convolution):
            text += f', "cudnn": {json.dumps(place.cudnn)}, "convolutions": [\n{convolutions}\n]'
        text += "}\n"
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


def put(index, problem, choice, measured):
    """Makes a choice effective on a device, at once."""
    global version
    library_of(index).set_tuned(problem.op, problem.words(index), choice, measured)
    version += 1


def entries():
    """Everything that is effective: (index of the device, Product or Convolution, choice,
    measured), sorted."""
    libraries = [library for library in (_lib.ops_library, _lib.cuda_library) if library]
    found = []
    for kind in KINDS:
        of_kind = [
            (*kind.from_words(words), *rest)
            for library in libraries
            for words, *rest in library.tuned(kind.op)
        ]
        found += sorted(of_kind)
    return found


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
    return [(problem, row["choice"]) for problem, row in read(path, place, built_in).items()]


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
