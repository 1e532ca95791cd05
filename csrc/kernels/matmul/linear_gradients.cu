// All gradients of a linear layer of few rows in one launch, whose start would otherwise take
// longer than the work: blocks of the first product, of the second, and of the bias gradient lie
// side by side in the grid. The gradient of a ReLU after the layer is taken while dy is read.
#include "gemm_plan.cuh"
#include "kernels/common/gemm_mma.cuh"
#include "kernels/common/gemm_simt.cuh"
#include "kernels/common/registry.h"

namespace braze::cuda {
namespace {

// Beyond, splitting the sums over blocks pays for the launches it takes.
constexpr int64_t kMostRows = 128, kMostOutputs = 512;
constexpr int kColumns = 8;  // of the bias gradient, for one block

// Sums of columns [first, first + kColumns) of dy. `shared` holds an accumulator a thread.
template <int kThreads, typename T>
__device__ __forceinline__ void sum_columns(const MaskedOperand<T>& dy, int first, T* out,
                                            void* shared) {
  using Acc = acc_t<T>;
  constexpr int kRows = kThreads / kColumns;
  const int column = first + threadIdx.x % kColumns;
  const int rows = dy.depth_extent, columns = dy.outer_extent;
  Acc sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (int row = threadIdx.x / kColumns; row < rows; row += kRows) {
      const T* const from = dy.data + row * dy.depth_stride + column * dy.outer_stride;
      sum += convert<Acc>(dy.mask != 0 ? dy.template load<T>(from) : *from);
    }
  }
  Acc* const sums = static_cast<Acc*>(shared);
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= kColumns || column >= columns) return;
  for (int row = 1; row < kRows; ++row) sum += sums[row * kColumns + threadIdx.x];
  out[column] = convert<T>(sum);
}

template <typename Input, typename Weight, typename Problem, typename T>
__global__ void __launch_bounds__(Input::kThreads, 3)
    linear_gradients_kernel(const __grid_constant__ Problem input,
                            const __grid_constant__ Problem weight, unsigned bias_block, T* bias) {
  wait_for_earlier_kernels();
  if (blockIdx.x < weight.first_block) {
    Input::run(input);
  } else if (blockIdx.x < bias_block) {
    Weight::run(weight);
  } else {
    extern __shared__ __align__(16) unsigned char shared[];
    const int first = static_cast<int>(blockIdx.x - bias_block) * kColumns;
    sum_columns<Input::kThreads>(weight.a, first, bias, shared);
  }
}

template <typename T>
using Problem = GemmProblem<MaskedOperand<T>, MatrixOperand<T>>;

template <typename T>
Problem<T> masked_problem(const MatmulArgs& args, const void* result) {
  const auto plain = matmul_problem<T>(args);
  Problem<T> problem{};
  static_cast<MatrixOperand<T>&>(problem.a) = plain.a;
  if (result) {
    problem.a.mask = static_cast<const char*>(result) - static_cast<const char*>(args.a.data);
    problem.a.vectors &= is_vec_aligned(static_cast<const T*>(result));
  }
  problem.b = plain.b;
  problem.out = plain.out;
  problem.batch = 1;
  problem.m = plain.m;
  problem.n = plain.n;
  problem.k = plain.k;
  problem.splits = 1;
  return problem;
}

template <typename T, typename Input, typename Weight>
void launch(Stream stream, const LinearGradArgs& args) {
  static_assert(Input::kThreads == Weight::kThreads);
  const auto blocks = [](const Problem<T>& p) {
    return static_cast<unsigned>(ceil_div(p.m, Input::kTileM) * ceil_div(p.n, Input::kTileN));
  };
  Problem<T> input = masked_problem<T>(args.input, args.result);
  Problem<T> weight = masked_problem<T>(args.weight, args.result);
  input.depth_tiles = static_cast<int>(ceil_div(input.k, Input::kDepth));
  weight.depth_tiles = static_cast<int>(ceil_div(weight.k, Weight::kDepth));
  weight.first_block = blocks(input);
  const unsigned bias_block = weight.first_block + blocks(weight);
  const unsigned bias_blocks =
      args.bias ? static_cast<unsigned>(ceil_div(args.weight.m, kColumns)) : 0;
  constexpr int kShared = std::max(Input::kSharedBytes, Weight::kSharedBytes);
  const auto kernel = linear_gradients_kernel<Input, Weight, Problem<T>, T>;
  static std::atomic<uint64_t> done{0};
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kShared, done);
  launch_early(kernel, bias_block + bias_blocks, Input::kThreads, kShared, stream, input, weight,
               bias_block, static_cast<T*>(args.bias));
  check_launch("linear_gradients");
}

template <typename T, typename Tile>
void launch_mma(Stream stream, const LinearGradArgs& args) {
  using A = MaskedOperand<T>;
  using B = MatrixOperand<T>;
  launch<T, MmaKernel<Tile, true, false, Load::kEither, Load::kEither, A, B>,
         MmaKernel<Tile, false, false, Load::kEither, Load::kEither, A, B>>(stream, args);
}

template <typename Tile>
void launch_simt(Stream stream, const LinearGradArgs& args) {
  using A = MaskedOperand<float>;
  using B = MatrixOperand<float>;
  launch<float, SimtKernel<Tile, true, false, A, B>, SimtKernel<Tile, false, false, A, B>>(stream,
                                                                                           args);
}

int64_t tiles(const MatmulArgs& p, int64_t extent) {
  return ceil_div(p.m, extent) * ceil_div(p.n, extent);
}

const KernelEntry kEntry({"linear_backward", "one_launch", "float32 bfloat16 float16", "sm_80+",
                          true, "both products and the bias gradient side by side, few rows"});

}  // namespace

bool linear_gradients(Stream stream, const LinearGradArgs& args) {
  const MatmulArgs &input = args.input, &weight = args.weight;
  const bool majors = depth_major_a(input) && !depth_major_b(input) && !depth_major_a(weight) &&
                      !depth_major_b(weight);
  constexpr int64_t kMostColumns = int64_t{1} << 24;
  if (!majors || args.result == input.a.data || input.dtype == DType::kFloat64 ||
      input.m > kMostRows || input.m == 0 || input.k > kMostOutputs || input.k == 0 ||
      input.n > kMostColumns || input.n == 0) {
    return false;
  }
  // CUDA cores take single elements, by cp.async; those that pass a ReLU had better be written
  // first.
  const bool simt = input.dtype == DType::kFloat32 && !input.allow_tf32;
  if (simt && args.result) return false;
  const bool small = 4 * (tiles(input, 64) + tiles(weight, 64)) >= 3 * sm_count();
  const auto mma = [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (small) {
      launch_mma<T, MmaTile<64, 64, 32, 32>>(stream, args);
    } else {
      launch_mma<T, MmaTile<32, 32, 16, 16, 4>>(stream, args);
    }
  };
  if (input.dtype == DType::kBFloat16) {
    mma(TypeTag<__nv_bfloat16>{});
  } else if (input.dtype == DType::kFloat16) {
    mma(TypeTag<__half>{});
  } else if (!simt) {
    mma(TypeTag<float>{});
  } else if (small) {
    launch_simt<SimtTile<64, 64, 8, 4>>(stream, args);
  } else {
    launch_simt<SimtTile<32, 32, 4, 4, 3, 2>>(stream, args);
  }
  return true;
}

}  // namespace braze::cuda
