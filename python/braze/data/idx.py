"""The IDX file format of MNIST: 0, 0, type code, rank; the extents as big-endian uint32; the data.
http://yann.lecun.com/exdb/mnist/ describes it."""

import gzip
import zlib

import numpy as np

_UINT8 = 0x08


def read_bytes(path):
    """The bytes of a file, unzipped where its name ends in .gz.

    Raises:
        ValueError: the gzip data is truncated or corrupt; the message names the file.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    return unzip(data, path) if path.suffix == ".gz" else data


def unzip(data, name):
    try:
        return gzip.decompress(data)
    except EOFError:
        raise ValueError(f"{name}: truncated gzip file ({len(data)} bytes)") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name}: corrupt gzip file ({error})") from None


def parse_idx(data, rank, name):
    """The uint8 array of `rank` dimensions that the bytes of an IDX file hold.

    Raises:
        ValueError: `data` is not such a file; the message starts with `name` and names the fault.
    """
    header = 4 + 4 * rank
    if len(data) < 4:
        raise ValueError(f"{name}: truncated: {len(data)} bytes, but the magic number alone has 4")
    if data[:2] != b"\0\0":
        raise ValueError(f"{name}: wrong magic number 0x{data[:4].hex()}: not an IDX file")
    if data[2] != _UINT8:
        raise ValueError(f"{name}: expected unsigned bytes (type code 0x08), got 0x{data[2]:02x}")
    if data[3] != rank:
        raise ValueError(f"{name}: expected {rank} dimensions, but the file has {data[3]}")
    if len(data) < header:
        raise ValueError(f"{name}: truncated in its header ({len(data)} of {header} bytes)")
    shape = [int(extent) for extent in np.frombuffer(data, ">u4", rank, offset=4)]
    expected = int(np.prod(shape, dtype=object))
    if len(data) - header != expected:
        fault = "truncated" if len(data) - header < expected else "too long"
        raise ValueError(
            f"{name}: {fault}: its header promises {' x '.join(map(str, shape))} = {expected} "
            f"bytes of data, but {len(data) - header} follow"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape).copy()
