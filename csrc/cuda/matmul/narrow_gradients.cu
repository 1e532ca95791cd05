// The gradients of a linear layer of few outputs from one pass over its rows. A thread keeps two
// columns of the weight and of its gradient in registers, and walks down the rows: x is read once
// for both products, which as products of their own would start later than they work. Blocks leave
// parts of the weight's and the bias' gradients, which a second launch adds up in a fixed order.
// Multiply-adds in fp32.
#include "launchers/narrow_linear.h"
#include "cuda/common/ordered_sum.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

constexpr int kMostOutputs = 16;
constexpr int kThreads = 256, kWidth = 2;                  // columns of a thread
constexpr int kColumns = 128, kLanes = kColumns / kWidth;  // of a block; threads to a row
constexpr int kGroups = kThreads / kLanes;                 // rows at a time
constexpr int kRows = 64, kAhead = 4;  // rows of dy in shared memory; of x in flight in a thread

struct Layer {
  int rows, columns, outputs;
  int rows_of_block;
};

template <typename T, int kOutputs>
__global__ void __launch_bounds__(kThreads)
    narrow_gradients_kernel(const __grid_constant__ Layer layer, const T* x, const T* dy,
                            const T* w, T* __restrict__ dx, float* __restrict__ partial) {
  __shared__ __align__(16) float grads[kRows][kOutputs];
  __shared__ float sums[kGroups - 1][kOutputs][kColumns];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int column = static_cast<int>(blockIdx.y) * kColumns + lane * kWidth;
  const bool inside = column < layer.columns;  // both: their number is even
  const int begin = static_cast<int>(blockIdx.x) * layer.rows_of_block;
  const int end = min(begin + layer.rows_of_block, layer.rows);
  wait_for_earlier_kernels();

  float weight[kOutputs][kWidth], sum[kOutputs][kWidth] = {}, bias = 0;
#pragma unroll
  for (int f = 0; f < kOutputs; ++f) {
    Vec<T, kWidth> v{};
    if (inside && f < layer.outputs) {
      v = *reinterpret_cast<const Vec<T, kWidth>*>(w + f * layer.columns + column);
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) weight[f][k] = convert<float>(v.v[k]);
  }
  for (int first = begin; first < end; first += kRows) {
    const int rows = min(kRows, end - first);
    for (int i = threadIdx.x; i < rows * kOutputs; i += kThreads) {
      const int row = i / kOutputs, f = i % kOutputs;
      grads[row][f] =
          f < layer.outputs ? convert<float>(dy[int64_t{first + row} * layer.outputs + f]) : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x < kOutputs) {
      for (int row = 0; row < rows; ++row) bias += grads[row][threadIdx.x];
    }
    const int64_t offset = int64_t{first} * layer.columns + column;
    for (int from = group; inside && from < rows; from += kAhead * kGroups) {
      Vec<T, kWidth> values[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int row = from + a * kGroups;
        if (row >= rows) break;
        values[a] =
            *reinterpret_cast<const Vec<T, kWidth>*>(x + offset + int64_t{row} * layer.columns);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int row = from + a * kGroups;
        if (row >= rows) break;
        float through[kWidth] = {};
#pragma unroll
        for (int f = 0; f < kOutputs; ++f) {
          const float grad = grads[row][f];
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            through[k] = fmaf(grad, weight[f][k], through[k]);
            sum[f][k] = fmaf(grad, convert<float>(values[a].v[k]), sum[f][k]);
          }
        }
        Vec<T, kWidth> result;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) result.v[k] = convert<T>(through[k]);
        *reinterpret_cast<Vec<T, kWidth>*>(dx + offset + int64_t{row} * layer.columns) = result;
      }
    }
    __syncthreads();  // the next rows take their place
  }

  if (group > 0) {
#pragma unroll
    for (int f = 0; f < kOutputs; ++f) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sums[group - 1][f][lane * kWidth + k] = sum[f][k];
    }
  }
  __syncthreads();
  const int64_t weights = int64_t{layer.outputs} * layer.columns;
  partial += blockIdx.x * (weights + layer.outputs);
  if (group == 0 && inside) {
#pragma unroll
    for (int f = 0; f < kOutputs; ++f) {
      if (f >= layer.outputs) break;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        float total = sum[f][k];
        for (int other = 0; other < kGroups - 1; ++other) {
          total += sums[other][f][lane * kWidth + k];
        }
        partial[int64_t{f} * layer.columns + column + k] = total;
      }
    }
  }
  if (blockIdx.y == 0 && threadIdx.x < layer.outputs) partial[weights + threadIdx.x] = bias;
}

// Blocks for every multiprocessor, each of a few rows at least.
Layer plan(const NarrowLinearGradArgs& args) {
  constexpr int64_t kFewestRows = 2 * kGroups;
  const int64_t tiles = ceil_div(args.columns, kColumns);
  const int64_t wanted = std::max<int64_t>(1, sm_count() / tiles);
  const int64_t rows = std::max(ceil_div(args.rows, wanted), kFewestRows);
  return {static_cast<int>(args.rows), static_cast<int>(args.columns),
          static_cast<int>(args.outputs), static_cast<int>(rows)};
}
int blocks_of(const Layer& layer) {
  return static_cast<int>(ceil_div(layer.rows, layer.rows_of_block));
}

template <typename F>
void dispatch_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBFloat16: return f(TypeTag<__nv_bfloat16>{});
    case DType::kFloat16: return f(TypeTag<__half>{});
    default: return f(TypeTag<float>{});
  }
}

const KernelEntry kEntry({"linear_backward", "narrow", "float32 bfloat16 float16", "sm_80+", true,
                          "all gradients of few outputs from one pass over the rows"});

}  // namespace

bool narrow_linear_gradients_pay(const NarrowLinearGradArgs& args) {
  constexpr int64_t kMostColumns = 1 << 14;
  // Measured on an H100, beside our kernels one after the other: up to here it takes 0.3 to 0.9 of
  // their time (130 to 32768 rows, 128 to 4096 columns, 1 to 10 outputs), beyond as much or, in 16
  // bits, where theirs are faster, more.
  const int64_t most_products = int64_t{1} << (size_of(args.dtype) == 2 ? 25 : 26);
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 8 == 0; };
  return args.dtype != DType::kFloat64 && args.outputs > 0 && args.outputs <= kMostOutputs &&
         args.rows > 0 && args.rows <= INT_MAX / kRows && args.columns > 0 &&
         args.columns <= kMostColumns && args.columns % kWidth == 0 &&
         args.rows * args.columns * args.outputs < most_products && aligned(args.x) &&
         aligned(args.w) && aligned(args.dx);
}

int64_t narrow_linear_gradients_workspace_bytes(const NarrowLinearGradArgs& args) {
  return blocks_of(plan(args)) * (args.outputs * (args.columns + 1)) * int64_t{sizeof(float)};
}

void narrow_linear_gradients(Stream stream, const NarrowLinearGradArgs& args, void* workspace) {
  const Layer layer = plan(args);
  const dim3 grid(blocks_of(layer), static_cast<unsigned>(ceil_div(args.columns, kColumns)));
  dispatch_float(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto kernel) {
      launch_early(kernel, grid, kThreads, 0, stream, layer, static_cast<const T*>(args.x),
                   static_cast<const T*>(args.dy), static_cast<const T*>(args.w),
                   static_cast<T*>(args.dx), static_cast<float*>(workspace));
    };
    if (args.outputs <= 4) {
      launch(narrow_gradients_kernel<T, 4>);
    } else if (args.outputs <= 10) {
      launch(narrow_gradients_kernel<T, 10>);
    } else {
      launch(narrow_gradients_kernel<T, kMostOutputs>);
    }
  });
  check_launch("linear_backward narrow");
}

void finish_narrow_linear_gradients(Stream stream, const NarrowLinearGradArgs& args,
                                    void* workspace) {
  const int splits = blocks_of(plan(args));
  const auto* const parts = static_cast<const float*>(workspace);
  dispatch_float(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_ordered_sum(stream, parts, splits, args.outputs * args.columns, static_cast<T*>(args.dw),
                       args.outputs, static_cast<T*>(args.bias));
  });
}

}  // namespace braze::cuda
