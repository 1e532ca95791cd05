"""How many of a GPU's multiprocessors kernels count on, where other work runs beside them."""

import contextlib

from braze import _lib

_count = None


def current():
    """The latest :func:`multiprocessors`' number, or None."""
    return _count


def _set(count):
    global _count
    if _lib.cuda_library is not None:
        _lib.cuda_library.set_multiprocessors(count or 0)
    _count = count


@contextlib.contextmanager
def multiprocessors(count):
    """Within this block kernels count on `count` of a GPU's multiprocessors, with None on all.

    For several things that run at once: a kernel of fewer blocks takes longer, but leaves
    multiprocessors to what runs beside it, and spends less of its blocks' time on their beginning
    and end. Kernels and tiles are chosen for that number. Sums are taken in another order then, so
    that last bits differ. It is a hint: kernels of torch and of the vendor's libraries take what
    they find, and so do those of ours whose grids follow from the problem alone. What a
    :class:`braze.TrainStep` captures here keeps it. On a CPU nothing changes.

    It holds for the process, as torch's precision settings do.

    Args:
        count: a positive number, or None.

    Raises:
        ValueError: another number.
    """
    if count is not None and not (isinstance(count, int) and 0 < count < 1 << 16):
        raise ValueError(f"multiprocessors: expected a positive number or None, but got {count!r}")
    before = _count
    _set(count)
    try:
        yield
    finally:
        _set(before)
