// All gradients of a linear layer of few rows in one launch, whose start would otherwise take
// longer than the work: blocks of the first product, of the second, and of the bias gradient lie
// side by side in the grid. The gradient of a ReLU after the layer is taken while dy is read.
#include "gemm_plan.cuh"
#include "linear_gradient_columns.cuh"
#include "cuda/common/gemm_mma.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

// Beyond, splitting the sums over blocks pays for the launches it takes, and so do kernels that
// copy large weights faster.
constexpr int64_t kMostRows = 128, kMostOutputs = 512, kMostWeights = 1 << 20;
constexpr int kColumns = 8;  // of the bias gradient, for one block

// Sums of columns [first, first + kColumns) of dy.
template <int kThreads, typename T>
__device__ __forceinline__ void sum_columns(const MaskedOperand<T>& dy, int first, T* out) {
  order_earlier_kernels();
  constexpr int kRows = kThreads / kColumns, kWarps = kThreads / 32;
  __shared__ float sums[kWarps][kColumns];
  const int column = first + threadIdx.x % kColumns;
  const int rows = dy.depth_extent, columns = dy.outer_extent;
  float sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (int row = threadIdx.x / kColumns; row < rows; row += kRows) {
      const T* const from = dy.data + row * dy.depth_stride + column * dy.outer_stride;
      sum += convert<float>(dy.mask != 0 ? dy.template behind_relu<1>(from, dy.result_at(from)).v[0]
                                         : *from);
    }
  }
#pragma unroll
  for (int lanes = 16; lanes >= kColumns; lanes /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  }
  if (threadIdx.x % 32 < kColumns) sums[threadIdx.x / 32][threadIdx.x % 32] = sum;
  __syncthreads();
  if (threadIdx.x >= kColumns || column >= columns) return;
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) sum += sums[warp][threadIdx.x];
  out[column] = convert<T>(sum);
}

template <typename Input, typename Weight, typename Problem, typename T>
__global__ void __launch_bounds__(Input::kThreads, Input::kThreads > 128 ? 2 : 3)
    linear_gradients_kernel(const __grid_constant__ Problem input,
                            const __grid_constant__ Problem weight, unsigned bias_block, T* bias) {
  if (blockIdx.x < weight.first_block) {
    Input::run(input);
  } else if (blockIdx.x < bias_block) {
    Weight::run(weight);
  } else {
    const int first = static_cast<int>(blockIdx.x - bias_block) * kColumns;
    sum_columns<Input::kThreads>(weight.a, first, bias);
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
  return problem;
}

template <typename T, typename Input, typename Weight>
void launch(Stream stream, const LinearGradArgs& args) {
  static_assert(Input::kThreads == Weight::kThreads && Input::kOrders == Weight::kOrders);
  Problem<T> input = masked_problem<T>(args.input, args.result);
  Problem<T> weight = masked_problem<T>(args.weight, args.result);
  weight.first_block = input.template set_tiles<Input::kTileM, Input::kTileN, Input::kDepth>(1);
  input.early_b = may_read_early(stream, span_of(input.b));
  const unsigned bias_block =
      weight.first_block +
      weight.template set_tiles<Weight::kTileM, Weight::kTileN, Weight::kDepth>(1);
  const unsigned bias_blocks =
      args.bias ? static_cast<unsigned>(ceil_div(args.weight.m, kColumns)) : 0;
  constexpr int kShared = std::max(Input::kSharedBytes, Weight::kSharedBytes);
  const auto kernel = linear_gradients_kernel<Input, Weight, Problem<T>, T>;
  static std::atomic<uint64_t> done{0};
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kShared, done);
  launch_early(kernel, bias_block + bias_blocks, Input::kThreads, kShared, stream, input, weight,
               bias_block, static_cast<T*>(args.bias));
  check_launch("linear_gradients");
  if (!Input::kOrders) return;
  note_ordering_kernel(stream, {input.written(),
                                weight.written(),
                                {args.bias, args.weight.m * static_cast<int64_t>(sizeof(T))}});
}

template <typename T, bool kSplit, typename Tile>
void launch_tiles(Stream stream, const LinearGradArgs& args) {
  using A = MaskedOperand<T>;
  using B = MatrixOperand<T>;
  constexpr Load kLoad = Load::kEither;
  launch<T, MmaKernel<Tile, true, false, kLoad, kLoad, A, B, kSplit>,
         MmaKernel<Tile, false, false, kLoad, kLoad, A, B, kSplit>>(stream, args);
}

// Whether gradient_columns_kernel takes the problem, of 16-bit elements.
bool takes_columns(const LinearGradArgs& args) {
  using namespace gradient_columns;
  const MatmulArgs &input = args.input, &weight = args.weight;
  const auto dense = [](const MatrixRef& a, int64_t columns) {
    return a.col == 1 && a.row == columns && columns % kVector == 0 && is_vec_aligned(a.data);
  };
  return input.m <= kMostExtent && input.k <= kMostExtent && dense(input.a, input.k) &&
         dense(input.b, input.n) && dense(weight.b, input.n) && is_vec_aligned(args.result) &&
         is_vec_aligned(input.c) && is_vec_aligned(weight.c);
}

template <typename T>
void launch_columns(Stream stream, const LinearGradArgs& args) {
  namespace columns = gradient_columns;
  const MatmulArgs& input = args.input;
  const columns::Problem<T> problem{masked_problem<T>(input, args.result).a,
                                    static_cast<const T*>(args.weight.b.data),
                                    static_cast<const T*>(input.b.data),
                                    static_cast<T*>(input.c),
                                    static_cast<T*>(args.weight.c),
                                    static_cast<T*>(args.bias),
                                    static_cast<int>(input.m),
                                    static_cast<int>(input.k),
                                    input.n};
  const int bytes = problem.shared_bytes();
  const auto blocks = static_cast<unsigned>(ceil_div(input.n, columns::kColumns));
  const auto kernel = input.m <= 64 ? columns::gradient_columns_kernel<T, 1>
                                    : columns::gradient_columns_kernel<T, 2>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  launch_early(kernel, blocks, columns::kThreads, bytes, stream, problem);
  check_launch("linear_gradients");
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
      input.n > kMostColumns || input.n == 0 || input.k * input.n > kMostWeights) {
    return false;
  }
  const auto run = [&](auto tag, auto split) {
    using T = typename decltype(tag)::type;
    constexpr bool kSplit = decltype(split)::value;
    const int64_t large = tiles(input, 64) + tiles(weight, 64);
    // Many to a multiprocessor, as where several share the device: fewer blocks, which read less.
    const bool many = large >= 8 * sm_count();
    if constexpr (sizeof(T) == 2) {
      if (many && takes_columns(args)) return launch_columns<T>(stream, args);
    }
    if (many && !kSplit) {
      launch_tiles<T, kSplit, MmaTile<64, 64, 32, 32, 2, 1>>(stream, args);
    } else if (4 * large >= 3 * sm_count()) {
      launch_tiles<T, kSplit, MmaTile<32, 64, 32, 32, 2, 2>>(stream, args);
    } else {
      launch_tiles<T, kSplit, MmaTile<32, 32, 16, 16, 2, 2>>(stream, args);
    }
  };
  switch (input.dtype) {
    case DType::kBFloat16: run(TypeTag<__nv_bfloat16>{}, std::false_type{}); break;
    case DType::kFloat16: run(TypeTag<__half>{}, std::false_type{}); break;
    default:
      if (input.allow_tf32) {
        run(TypeTag<float>{}, std::false_type{});
      } else {
        run(TypeTag<float>{}, std::true_type{});
      }
  }
  return true;
}

}  // namespace braze::cuda
