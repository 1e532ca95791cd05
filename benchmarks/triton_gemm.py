"""A matrix product in Triton, a rival of the ladder's: blocked, grouped for L2, autotuned."""

import functools

import torch
import triton
import triton.language as tl


def config(m, n, k, warps, stages):
    sizes = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    return triton.Config(sizes, num_warps=warps, num_stages=stages)


# Few, because each is compiled for each dtype. Those that want too much shared memory drop out.
CONFIGS = [
    config(128, 256, 64, 8, 3),
    config(128, 256, 32, 8, 3),
    config(128, 128, 32, 4, 4),
    config(64, 64, 32, 4, 4),
]
#: dtype -> values of tl.dot's input_precision to choose from; 16-bit types ignore it. For fp32:
#: three products of TF32 parts on tensor cores, or CUDA cores.
MODES = {
    "float32": ("tf32x3", "ieee"),
    "tf32": ("tf32",),
    "float16": ("tf32",),
    "bfloat16": ("tf32",),
}


def prune(configs, arguments, **named):
    """On CUDA cores a thread's share of a large tile does not fit into its registers."""
    small = configs if (arguments | named)["MODE"] != "ieee" else CONFIGS[-2:]
    return list(small)


# The stride of B's columns tells its transpositions apart.
@triton.autotune(
    configs=CONFIGS,
    key=["m", "n", "k", "b_n", "MODE"],
    prune_configs_by={"early_config_prune": prune},
)
@triton.heuristics({"EVEN_K": lambda args: args["k"] % args["BLOCK_K"] == 0})
@triton.jit
def kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    m,
    n,
    k,
    a_batch,
    a_m,
    a_k,
    b_batch,
    b_k,
    b_n,
    MODE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Eight rows of tiles at a time: their operands stay in L2.
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    first = tile // (8 * tiles_n) * 8
    rows = tl.minimum(tiles_m - first, 8)
    tile_m = first + tile % (8 * tiles_n) % rows
    tile_n = tile % (8 * tiles_n) // rows

    # Rows and columns outside wrap around; they are not stored.
    i = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)) % m
    j = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)) % n
    depth = tl.arange(0, BLOCK_K)
    a = a_ptr + batch * a_batch + i[:, None] * a_m + depth[None, :] * a_k
    b = b_ptr + batch * b_batch + depth[:, None] * b_k + j[None, :] * b_n
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            left, right = tl.load(a), tl.load(b)
        else:
            left = tl.load(a, mask=depth[None, :] < k - start, other=0.0)
            right = tl.load(b, mask=depth[:, None] < k - start, other=0.0)
        total = tl.dot(left, right, total, input_precision=MODE)
        a += BLOCK_K * a_k
        b += BLOCK_K * b_k
    i = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c = c_ptr + batch * m * n + i[:, None] * n + j[None, :]
    inside = (i[:, None] < m) & (j[None, :] < n)
    tl.store(c, total.to(c_ptr.dtype.element_ty), mask=inside)


def matmul(a, b, mode):
    """The product of two matrices, or batches of them."""
    m, k = a.shape[-2:]
    n = b.shape[-1]
    a3, b3 = (t if t.dim() == 3 else t.unsqueeze(0) for t in (a, b))
    out = a.new_empty(*a.shape[:-1], n)

    def grid(sizes):
        tiles = triton.cdiv(m, sizes["BLOCK_M"]) * triton.cdiv(n, sizes["BLOCK_N"])
        return tiles, a3.shape[0]

    with torch.cuda.device(a.device):
        kernel[grid](a3, b3, out, m, n, k, *a3.stride(), *b3.stride(), mode)
    return out


def variants(a, b, dtype_name):
    """name -> function that makes the function to time.

    Raises:
        RuntimeError: a dtype that the kernel does not take.
    """
    if dtype_name not in MODES:
        raise RuntimeError(f"expected one of {', '.join(MODES)}, but got {dtype_name}")
    modes = MODES[dtype_name]
    return {
        mode if len(modes) > 1 else "": functools.partial(functools.partial, matmul, a, b, mode)
        for mode in modes
    }
