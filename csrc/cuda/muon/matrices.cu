// Muon's matrices on their way into batches and out of them, many in one launch: divided by their
// norms, and zeros around them, so that matrices of different shapes share a batch.
#include "cuda/common/launch.cuh"
#include "cuda/common/numeric.cuh"
#include "cuda/common/ordered_sum.cuh"
#include "cuda/common/tensor_list.cuh"
#include "launchers/common/registry.h"
#include "launchers/muon.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kElements = 8192;  // of a block

const KernelEntry kNormalize({"muon_normalize", "multi_tensor", "float64 float32 bfloat16 float16",
                              "sm_80+", true,
                              "all matrices in one launch, pointers as kernel parameters"});
const KernelEntry kUnpad({"muon_unpad", "multi_tensor", "bfloat16 float16", "sm_80+", true,
                          "all matrices in one launch, pointers as kernel parameters"});

template <int kMatrices>
using MatrixList = TensorList<MuonMatrix, kMatrices, kElements>;
// What is cheap to launch, and what there is: see cuda/common/multi_tensor.cuh.
constexpr int kFew = 53, kMany = 430;
static_assert(sizeof(MatrixList<kFew>) + 8 <= 4096 && sizeof(MatrixList<kMany>) + 8 <= 32764,
              "parameters");

// Elements [begin, end) of m.to, N at a time, which are of one row.
template <int N, typename T, typename Out>
__device__ __forceinline__ void write_matrix(const MuonMatrix& m, acc_t<T> norm, int64_t begin,
                                             int64_t end) {
  using A = acc_t<T>;
  const T* const values = static_cast<const T*>(m.from);
  Out* const to = static_cast<Out*>(m.to) + begin;
  const bool aligned = (reinterpret_cast<uintptr_t>(values) | m.from_pitch * sizeof(T)) % 16 == 0;
  // In 32 bits: there are fewer than 2^31 columns.
  const auto pitch = static_cast<unsigned>(m.to_pitch), count = static_cast<unsigned>(end - begin);
  const int64_t first_row = begin / m.to_pitch;
  const auto first_column = static_cast<unsigned>(begin - first_row * m.to_pitch);
  for (unsigned i = threadIdx.x * N; i < count; i += kThreads * N) {
    const unsigned down = (first_column + i) / pitch;
    const int64_t row = first_row + down, column = first_column + i - down * pitch;
    const T* const from = values + row * m.from_pitch + column;
    Vec<Out, N> result;
    if (aligned && row < m.rows && column + N <= m.columns) {
      const Vec<T, N> loaded = load_vec<N>(from);
#pragma unroll
      for (int k = 0; k < N; ++k) result.v[k] = convert<Out>(convert<A>(loaded.v[k]) / norm);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const bool inside = row < m.rows && column + k < m.columns;
        result.v[k] = convert<Out>(inside ? convert<A>(from[k]) / norm : A(0));
      }
    }
    store_vec(to + i, result);
  }
}

template <typename T, typename Out, typename List>
__global__ void __launch_bounds__(kThreads)
    matrices_kernel(const __grid_constant__ List list, double eps) {
  using A = acc_t<T>;
  int64_t begin, end;
  const MuonMatrix& m = list.of_block(blockIdx.x, &begin, &end);
  wait_for_earlier_kernels();
  A norm = 1;
  if (m.squares != nullptr) {
    __shared__ A shared;
    double sum = 0;
    for (int64_t i = threadIdx.x; i < m.parts; i += kThreads) sum += m.squares[i];
    sum = block_sum<kThreads>(sum);
    if (threadIdx.x == 0) {
      const A found = static_cast<A>(sqrt(sum)), least = static_cast<A>(eps);
      shared = found < least ? least : found;  // NaN stays
    }
    __syncthreads();
    norm = shared;
  }
  constexpr int N = kVecWidth<Out>;
  if (m.to_pitch % N == 0 && reinterpret_cast<uintptr_t>(m.to) % 16 == 0) {
    write_matrix<N, T, Out>(m, norm, begin, end);
  } else {
    write_matrix<1, T, Out>(m, norm, begin, end);
  }
}

template <typename T, typename Out, int kMatrices>
void launch_list(const char* name, Stream stream, const MuonMatrix* matrices, int64_t count,
                 double eps) {
  MatrixList<kMatrices> list;
  list.for_each_launch(matrices, count, [&] {
    launch_early(matrices_kernel<T, Out, MatrixList<kMatrices>>, list.blocks(), kThreads, 0, stream,
                 list, eps);
    check_launch(name);
  });
}

template <typename T, typename Out>
void launch(const char* name, Stream stream, const MuonMatrix* matrices, int64_t count,
            double eps) {
  if (count <= kFew) {
    launch_list<T, Out, kFew>(name, stream, matrices, count, eps);
  } else {
    launch_list<T, Out, kMany>(name, stream, matrices, count, eps);
  }
}

}  // namespace

void muon_normalize(Stream stream, DType dtype, DType to, const MuonMatrix* matrices, int64_t count,
                    double eps) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = to == DType::kBFloat16 ? launch<T, __nv_bfloat16> : launch<T, __half>;
    run("muon_normalize", stream, matrices, count, eps);
  });
}

void muon_unpad(Stream stream, DType dtype, const MuonMatrix* matrices, int64_t count) {
  const auto run =
      dtype == DType::kBFloat16 ? launch<__nv_bfloat16, __nv_bfloat16> : launch<__half, __half>;
  run("muon_unpad", stream, matrices, count, 0);
}

}  // namespace braze::cuda
