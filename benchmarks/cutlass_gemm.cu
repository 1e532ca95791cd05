// CUTLASS's matrix products behind a C interface, for comparison only: nothing of braze uses them.
// Built by benchmarks/cutlass_gemm.py. C = A B per batch entry; A is row-major, B row-major or
// (b_transposed) column-major, C row-major, all dense.
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/kernel_hardware_info.h>
#include <cutlass/util/packed_stride.hpp>

#include <cstdint>

namespace {

struct Problem {
  int m, n, k, batch;
  const void *a, *b;
  void* c;
  int swizzle;
};

using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;

// CUTLASS 3: TMA and wgmma, warp-specialized, persistent. ElementC is void: C is not read.
template <typename Element, typename LayoutB, typename Tile, typename Schedule,
          typename EpilogueSchedule>
struct Hopper {
  static constexpr int kAlignment = 16 / sizeof(Element);
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, kAlignment,
      Element, RowMajor, kAlignment, EpilogueSchedule>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, kAlignment, Element,
      LayoutB, kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      Schedule>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static typename Gemm::Arguments arguments(const Problem& p) {
    const auto a =
        cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {p.m, p.k, p.batch});
    const auto b =
        cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {p.n, p.k, p.batch});
    const auto c =
        cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {p.m, p.n, p.batch});
    cutlass::KernelHardwareInfo hardware;
    cudaGetDevice(&hardware.device_id);
    hardware.sm_count =
        cutlass::KernelHardwareInfo::query_device_multiprocessor_count(hardware.device_id);
    typename Gemm::Arguments args{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {p.m, p.n, p.k, p.batch},
        {static_cast<const Element*>(p.a), a, static_cast<const Element*>(p.b), b},
        {{1.0f, 0.0f}, nullptr, {}, static_cast<Element*>(p.c), c},
        hardware};
    args.scheduler.max_swizzle_size = p.swizzle;
    return args;
  }
};

template <typename Element, typename LayoutB, int kDepth>
using Cooperative = Hopper<Element, LayoutB, cute::Shape<cute::_128, cute::_256, cute::Int<kDepth>>,
                           cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                           cutlass::epilogue::TmaWarpSpecializedCooperative>;
template <typename Element, typename LayoutB, int kDepth>
using Pingpong =
    Hopper<Element, LayoutB, cute::Shape<cute::_64, cute::_128, cute::Int<kDepth>>,
           cutlass::gemm::KernelTmaWarpSpecializedPingpong, cutlass::epilogue::TmaWarpSpecialized>;

// CUTLASS 2 on CUDA cores: fp32 at its own accuracy, cp.async pipeline.
template <typename LayoutB>
struct Simt {
  using Gemm = cutlass::gemm::device::GemmUniversal<
      float, RowMajor, float, LayoutB, float, RowMajor, float, cutlass::arch::OpClassSimt,
      cutlass::arch::Sm80, cutlass::gemm::GemmShape<128, 128, 8>,
      cutlass::gemm::GemmShape<32, 64, 8>, cutlass::gemm::GemmShape<1, 1, 1>,
      cutlass::epilogue::thread::LinearCombination<float, 1, float, float>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, 5>;

  static typename Gemm::Arguments arguments(const Problem& p) {
    const int64_t m = p.m, n = p.n, k = p.k;
    const bool transposed = std::is_same_v<LayoutB, ColumnMajor>;
    return {cutlass::gemm::GemmUniversalMode::kBatched,
            {p.m, p.n, p.k},
            p.batch,
            {1.0f, 0.0f},
            p.a,
            p.b,
            p.c,
            p.c,
            m * k,
            n * k,
            m * n,
            m * n,
            k,
            transposed ? k : n,
            n,
            n};
  }
};

// Runs the product, or with `workspace_bytes` only says how much workspace it wants.
template <typename Config>
int run(const Problem& p, void* workspace, int64_t* workspace_bytes, cudaStream_t stream) {
  typename Config::Gemm gemm;
  const auto args = Config::arguments(p);
  cutlass::Status status = gemm.can_implement(args);
  if (status != cutlass::Status::kSuccess) return static_cast<int>(status);
  if (workspace_bytes) {
    *workspace_bytes = static_cast<int64_t>(Config::Gemm::get_workspace_size(args));
    return 0;
  }
  status = gemm.initialize(args, workspace, stream);
  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
  return static_cast<int>(status);
}

using Run = int (*)(const Problem&, void*, int64_t*, cudaStream_t);

template <typename LayoutB>
Run find(int dtype, int tile) {
  using Half = cutlass::half_t;
  using BFloat16 = cutlass::bfloat16_t;
  switch (dtype) {
    case 0: return run<Simt<LayoutB>>;
    case 1: return tile ? run<Pingpong<float, LayoutB, 32>> : run<Cooperative<float, LayoutB, 32>>;
    case 2: return tile ? run<Pingpong<Half, LayoutB, 64>> : run<Cooperative<Half, LayoutB, 64>>;
    case 3:
      return tile ? run<Pingpong<BFloat16, LayoutB, 64>> : run<Cooperative<BFloat16, LayoutB, 64>>;
    default: return nullptr;
  }
}

}  // namespace

// dtype: 0 fp32, 1 fp32 rounded to TF32, 2 fp16, 3 bf16. tile: 0 large, 1 small (fp32 has one).
// With `workspace_bytes` only says how much workspace the product wants. Returns a cutlass::Status.
extern "C" int cutlass_gemm(int dtype, int tile, int b_transposed, int m, int n, int k, int batch,
                            const void* a, const void* b, void* c, int swizzle, void* workspace,
                            int64_t* workspace_bytes, void* stream) {
  const Run run = b_transposed ? find<ColumnMajor>(dtype, tile) : find<RowMajor>(dtype, tile);
  if (!run) return static_cast<int>(cutlass::Status::kErrorNotSupported);
  return run({m, n, k, batch, a, b, c, swizzle}, workspace, workspace_bytes,
             static_cast<cudaStream_t>(stream));
}

extern "C" const char* cutlass_gemm_status(int status) {
  return cutlass::cutlassGetStatusString(static_cast<cutlass::Status>(status));
}
