"""What the choice of a kernel depends on: the keys of the tables in csrc/ops/tuned.h."""

from typing import NamedTuple

#: csrc/launchers/common/types.h has them in this order
DTYPES = ["float64", "float32", "bfloat16", "float16"]
#: csrc/launchers/conv2d.h
PASSES = ["fprop", "dgrad", "wgrad"]


def _dtype_of(number, tf32):
    return "tf32" if tf32 else DTYPES[number]


def _dtype_words(dtype):
    tf32 = dtype == "tf32"
    return [DTYPES.index("float32" if tf32 else dtype), int(tf32)]


class Product(NamedTuple):
    """A matrix product: ``braze::Product``, but for the device.

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

    op = "matmul"
    may_be_zero = ()

    @classmethod
    def from_words(cls, words):
        """(index of the device, -1 for the CPU; the product) of a ``braze::Product``."""
        device, dtype, tf32, *rest = words
        extents, flags = rest[:4], map(bool, rest[4:])
        return device, cls(_dtype_of(dtype, tf32), *extents, *flags)

    def words(self, device):
        return [device, *_dtype_words(self.dtype), *map(int, self[1:])]

    def __str__(self):
        layout = "nt"[self.a_column_major] + "nt"[self.b_column_major]
        words = [f"{self.m}x{self.n}x{self.k}", layout]
        if self.batch > 1:
            shared = {(True, False): ", one A", (False, True): ", one B"}
            words.append(f"batch {self.batch}{shared.get((self.a_shared, self.b_shared), '')}")
        odd = "".join(name for name in "AB" if not getattr(self, f"{name.lower()}_aligned"))
        words += [f"{odd} unaligned"] if odd else []
        return " ".join(words + ["bias"] * self.bias + ["relu"] * self.relu)


class Convolution(NamedTuple):
    """A pass of a convolution: ``braze::ConvolutionPass``, but for the device.

    `pass_name` is "fprop", "dgrad" or "wgrad". Extents as in the literature: input N C H W, K
    filters of C / groups x R x S. All tensors are dense in one memory format and aligned to 16
    bytes; `bias` is fprop's.
    """

    dtype: str
    pass_name: str
    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride_h: int = 1
    stride_w: int = 1
    pad_h: int = 0
    pad_w: int = 0
    dilation_h: int = 1
    dilation_w: int = 1
    groups: int = 1
    channels_last: bool = False
    bias: bool = False

    op = "conv2d"
    may_be_zero = ("pad_h", "pad_w")

    @classmethod
    def from_words(cls, words):
        """(index of the device, -1 for the CPU; the pass) of a ``braze::ConvolutionPass``."""
        device, dtype, tf32, pass_number, *rest = words
        extents, flags = rest[:14], map(bool, rest[14:])
        return device, cls(_dtype_of(dtype, tf32), PASSES[pass_number], *extents, *flags)

    def words(self, device):
        pass_number = PASSES.index(self.pass_name)
        return [device, *_dtype_words(self.dtype), pass_number, *map(int, self[2:])]

    @property
    def geometry(self):
        """stride, padding and dilation."""
        return (
            [self.stride_h, self.stride_w],
            [self.pad_h, self.pad_w],
            [self.dilation_h, self.dilation_w],
        )

    @property
    def out_size(self):
        """Height and width of the result."""
        sizes = zip((self.h, self.w), (self.r, self.s), *self.geometry, strict=True)
        return [
            (size + 2 * pad - d * (taps - 1) - 1) // step + 1 for size, taps, step, pad, d in sizes
        ]

    def __str__(self):
        def pair(a, b):
            return str(a) if a == b else f"{a},{b}"

        stride, padding, dilation = (pair(*both) for both in self.geometry)
        words = [self.pass_name, f"{self.n}x{self.c}x{self.h}x{self.w}", "to"]
        words += [f"{self.k},", f"{self.r}x{self.s}/{stride}"]
        words += [f"pad {padding}"] if padding != "0" else []
        words += [f"dilation {dilation}"] if dilation != "1" else []
        words += [f"groups {self.groups}"] if self.groups > 1 else []
        words.append("channels_last" if self.channels_last else "contiguous")
        return " ".join(words + ["bias"] * self.bias)


#: what tables, files and records hold
KINDS = (Product, Convolution)
