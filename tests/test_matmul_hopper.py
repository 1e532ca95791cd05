"""Hopper's matmul kernels: shapes, shared depth, CUDA graphs, and where they run."""

import threading

import pytest
import torch
import torch.nn.functional as stock
from matmul_common import majors

import braze
import braze.nn.functional as F
from common import assert_by_rule, check_against_stock, cuda_kernels_of, hopper_only
from conftest import cuda_only

HOPPER_SHAPES = [
    (1, 512, 512, 512),
    (1, 2048, 1536, 640),
    (1, 1000, 1000, 1000),
    (1, 136, 264, 72),
    (1, 64, 1024, 3136),
    (1, 1024, 8, 256),
    (3, 200, 136, 200),
    (2, 520, 72, 1024),
    (1, 8, 8, 8),
    # Sizes for which the plan takes, in 16 bits, tiles of 128 x 192, of the product and of the
    # transposed one, and of 64 x 192; of 256, 128 and 64 x 144, where A is K-major, else of
    # 128 x 144 for the former two; 128 x 192 with the depth split over clusters of 2 and 4; and
    # 128 x 128 over 2 and 4.
    (2, 2040, 760, 264),
    (1, 3048, 1000, 264),
    (1, 760, 1504, 264),
    (1, 1576, 3000, 264),
    (2, 1576, 760, 264),
    (1, 1576, 768, 3080),
    (1, 1000, 1504, 8200),
    (1, 760, 760, 8200),
    (1, 1576, 600, 8200),
    (1, 392, 600, 8200),
]


@pytest.mark.parametrize(
    "name", ["wgmma", "stream_k", "10_wgmma", "11_warp_specialized", "12_cluster"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", HOPPER_SHAPES, ids=str)
@cuda_only
def test_hopper_kernels(device, dtype, shape, name):
    hopper_only(device)
    if name not in ("wgmma", "stream_k") and dtype == torch.float32:
        pytest.skip("the rungs below are for 16-bit types")
    batch, m, n, k = shape
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    for transposed_a, transposed_b in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        a = majors(batch, m, k, transposed_a, device, dtype)
        b = majors(batch, k, n, transposed_b, device, dtype)
        with braze.backend(matmul=name):
            out = braze.matmul(a, b)
            assert torch.equal(out, braze.matmul(a, b))
        assert_by_rule(out, torch.matmul(a, b), torch.matmul(a.double(), b.double()))
    torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4080, 759, 264), (1576, 3001, 264), (3152, 759, 264)], ids=str)
@cuda_only
def test_hopper_results_of_odd_rows(device, dtype, shape):
    """Rows of C that TMA cannot store: from registers, of tiles that are swapped and others."""
    hopper_only(device)
    m, n, k = shape
    a, b = majors(1, m, k, False, device, dtype), majors(1, k, n, True, device, dtype)
    with braze.backend(matmul="wgmma"):
        out = braze.matmul(a, b)
    assert_by_rule(out, torch.matmul(a, b), torch.matmul(a.double(), b.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@cuda_only
def test_hopper_kernel_in_linear(device, dtype):
    """Forward with bias and ReLU, and both gradients, of odd and of round sizes."""
    hopper_only(device)
    # The latter three: tiles of 64, 128 and 256 x 144.
    for rows, features, outputs in [
        (512, 768, 1024),
        (200, 264, 136),
        (1024, 3136, 128),
        (1576, 520, 760),
        (3152, 264, 760),
        (1576, 264, 3000),
    ]:
        inputs = [
            torch.randn(s, device=device).to(dtype).requires_grad_()
            for s in [(rows, features), (outputs, features), (outputs,)]
        ]
        with braze.backend(matmul="wgmma"):
            check_against_stock(F.linear, stock.linear, inputs)
            x, w, b = inputs
            out = torch.ops.braze.linear(x, w, b, True, backend="wgmma")
            wide = stock.linear(*(t.double() for t in inputs)).relu()
            assert_by_rule(out, stock.linear(*inputs).relu(), wide)
            nan = torch.full_like(x, float("nan"))
            assert torch.ops.braze.linear(nan, w, b, True, backend="wgmma").isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@cuda_only
def test_stream_k_shares_out_the_depth(device, dtype):
    """Fewer tiles than multiprocessors and more: tiles in many parts, in two, and whole."""
    hopper_only(device)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with braze.backend(matmul="stream_k"):
        for m, n, k in [(64, 72, 5000), (256, 1024, 8200), (2560, 1032, 264), (4096, 3000, 72)]:
            a = torch.randn(m, k, device=device).to(dtype)
            b, bias = torch.randn(n, k, device=device).to(dtype), torch.randn(n, device=device)
            bias = bias.to(dtype)
            out = torch.ops.braze.linear(a, b, bias, True, True, backend="stream_k")
            assert torch.equal(
                out, torch.ops.braze.linear(a, b, bias, True, True, backend="stream_k")
            )
            wide = stock.linear(a.double(), b.double(), bias.double()).relu()
            assert_by_rule(out, stock.linear(a, b, bias).relu(), wide)
            names = cuda_kernels_of(lambda a=a, b=b: braze.matmul(a, b.mT))
            assert "stream_k_kernel" in names
            assert "stream_k_sum_kernel" in names
    torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (64, 64, 20000),  # boxes of columns that are not loaded
        (24, 144, 6001),  # of rows, too, and a last stage that is not full
        (144, 24, 6000),
        (512, 256, 12544),
        (2048, 512, 3136),  # a part of each tile
        (40, 1000, 9000),
        (200, 4096, 2000),
        (1536, 1032, 1000),  # tiles that other tiles' parts go on in
        (8, 16, 70),
    ],
)
@cuda_only
def test_stream_k_across_the_depth(device, dtype, m, n, k):
    """Both operands as a weight gradient's are; small integers, whose products are exact."""
    hopper_only(device)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    a, b = (torch.randint(-2, 3, (k, count), device=device).to(dtype) for count in (m, n))
    with braze.backend(matmul="stream_k"):
        out = braze.matmul(a.mT, b)
        assert torch.equal(out, (a.double().mT @ b.double()).to(dtype))
        wide = braze.matmul(a.repeat(1, 2)[:, m:].mT, b)  # rows that do not begin where a row does
        assert torch.equal(wide, out)
        assert "stream_k_kernel" in cuda_kernels_of(lambda: braze.matmul(a.mT, b))
    torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("wgmma", torch.bfloat16),
        ("stream_k", torch.bfloat16),
        ("wgmma_split", torch.float32),
        ("wgmma_scaled", torch.float32),
        ("simt_tma", torch.float32),
        ("dmma_tma", torch.float64),
    ],
    ids=str,
)
@cuda_only
def test_hopper_kernels_in_a_graph(device, backend, dtype):
    """Captured behind a copy, a fill and another stream, and one product behind the other."""
    hopper_only(device)
    source = torch.randn(512, 512, device=device).to(dtype)
    a, b = torch.empty_like(source), torch.zeros_like(source)
    side = torch.cuda.Stream()

    def step():
        a.copy_(source)
        first = braze.matmul(a, source)
        b.zero_()
        second = braze.matmul(b, first)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            third = braze.matmul(first, source)
        torch.cuda.current_stream().wait_stream(side)
        return first, second, braze.matmul(third, source)

    with braze.backend(matmul=backend):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        source.normal_()
        graph.replay()
        expected = step()
    for actual, wanted in zip(results, expected, strict=True):
        assert torch.equal(actual, wanted)
    assert not results[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@cuda_only
def test_operands_made_in_a_graph(device, dtype):
    """In a graph a product may read its second operand before the kernels ahead of it are done; not
    where the one right before it wrote that operand, or where something else came between."""
    source, x, fixed = (
        torch.randn(s, device=device).to(dtype) for s in [(64, 256), (48, 64), (256, 128)]
    )

    def step():
        made = braze.matmul(source, fixed)
        from_the_last = braze.matmul(x, made)
        behind_another = braze.matmul(x, made)
        twice = braze.matmul(from_the_last.mT, behind_another)
        written = torch.empty_like(twice).copy_(twice)
        behind_a_copy = braze.matmul(twice, written)
        return behind_another, twice, behind_a_copy, braze.matmul(behind_a_copy, fixed.mT)

    with braze.backend(matmul="braze"):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        for _ in range(50):
            source.normal_()
            graph.replay()
            for actual, wanted in zip(results, step(), strict=True):
                assert torch.equal(actual, wanted)


@cuda_only
def test_first_call_of_a_thread(device):
    """Tensor maps are made by the driver, to which a new thread has no device yet."""
    hopper_only(device)
    a = torch.randn(256, 256, device=device, dtype=torch.bfloat16)
    results = []

    def run():
        with braze.backend(matmul="wgmma"):
            results.append(braze.matmul(a, a))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert_by_rule(results[0], a @ a, a.double() @ a.double())


@cuda_only
def test_hopper_kernel_runs_where_expected(device):
    hopper_only(device)

    def names(backend, *operands):
        with braze.backend(matmul=backend):
            braze.matmul(*operands)
            return cuda_kernels_of(lambda: braze.matmul(*operands))

    def randn16(*shape):
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    a, b = randn16(1024, 512), randn16(512, 768)
    for x, y in [(a, b), (a, b.mT.contiguous().mT), (a.mT.contiguous().mT, b)]:
        assert "persistent_kernel" in names("wgmma", x, y)
        assert "persistent_kernel" in names("braze", x, y)
        assert "persistent_kernel" not in names("mma_sync", x, y)
    # A row of 1030 bytes is not a multiple of 16.
    assert "persistent_kernel" not in names("braze", randn16(1024, 515), randn16(515, 768))
    # A large result of short sums: storing it is what takes time.
    assert "persistent_kernel" in names("braze", randn16(8192, 8), randn16(8, 1024))
    assert "persistent_kernel" in names("braze", randn16(2048, 16), randn16(16, 512))
    assert "thin_kernel" in names("braze", randn16(2048, 8), randn16(8, 512))
    assert "persistent_kernel" not in names("braze", randn16(1024, 32, 16), randn16(1024, 16, 32))
    with pytest.raises(RuntimeError, match=r"wgmma cannot take these arguments.*multiples of 16"):
        names("wgmma", randn16(64, 515), randn16(515, 64))
    with pytest.raises(RuntimeError, match="rounded to TF32, which is not allowed"):
        names("wgmma", a.float(), b.float())
    big = randn16(4096, 4096)
    assert "persistent_kernel" in names("braze", big, big)
    assert "simt_tma_kernel" in names("simt_tma", a.float(), b.float())
    # A long sum for a small result is split over clusters.
    assert "cluster_split_kernel" in names("wgmma", randn16(64, 3136), randn16(128, 3136).mT)
    # These sizes stand for tile shapes in HOPPER_SHAPES.
    for (m, n, k), kernel, tile in [
        ((4080, 760, 264), "persistent_kernel", "128, 192"),
        ((3048, 1000, 264), "persistent_kernel", "128, 192, 4, 2, 2, 192>, 1, 0, true"),
        ((760, 1504, 264), "persistent_kernel", "64, 192"),
        ((1576, 3000, 264), "persistent_kernel", "256, 144"),
        ((3152, 760, 264), "persistent_kernel", "128, 144"),
        ((1576, 768, 3080), "persistent_kernel", "64, 144"),
        ((1000, 1504, 8200), "cluster_split_kernel", "128, 192"),
        ((760, 760, 8200), "cluster_split_kernel", "128, 192"),
        ((1576, 600, 8200), "cluster_split_kernel", "128, 128"),
        ((392, 600, 8200), "cluster_split_kernel", "128, 128"),
    ]:
        ran = names("wgmma", randn16(m, k), randn16(k, n))
        assert kernel in ran, ran
        assert tile in ran, ran
    # Of A by columns, which come by 64, a tile of 144 loads 192.
    assert "128, 144, 5, 2, 2, 192" in names("wgmma", randn16(264, 3152).mT, randn16(264, 760))
    # fp32 with TF32 off
    assert "split_scaled_kernel" in names("braze", big[:2048].float(), big.float())
    wide = big[:1024, :1024].float()
    assert "split_scaled_kernel" in names("braze", wide, wide)
    assert "split_scaled_kernel" not in names("braze", wide[:, :128], wide[:128])  # too short sums
