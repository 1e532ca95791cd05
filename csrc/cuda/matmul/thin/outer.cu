// Products of depth 1: every element of C is one of A times one of B, and what takes time is the
// way to memory and back. Nothing passes through shared memory: a thread asks for its row values
// and its columns' together, and stores.
#include <climits>

#include "cuda/matmul/gemm_plan.cuh"
#include "cuda/common/predicated.cuh"
#include "cuda/matmul/obstacles.h"
#include "cuda/matmul/kernels.h"

namespace braze::cuda {
namespace {

constexpr int kThreads = 128, kRows = 4, kColumns = 4;  // the latter of a thread

template <typename T>
struct Outer {
  const T *a, *b;
  int64_t a_batch, a_stride, b_batch, b_stride;
  Output<T> out;
  int m, n, work;  // work: of a batch, in threads
  FastDiv quads;   // threads side by side
  bool vectors;    // B is read by fours
};

template <typename T>
__global__ void __launch_bounds__(kThreads) outer_kernel(const __grid_constant__ Outer<T> p) {
  using Acc = acc_t<T>;
  const int index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.work) return;
  int quad;
  const int row = p.quads.div(index, quad) * kRows, column = quad * kColumns;
  const T* const a = p.a + blockIdx.y * p.a_batch + row * p.a_stride;
  const T* const b = p.b + blockIdx.y * p.b_batch + column * p.b_stride;
  wait_for_earlier_kernels();
  T left[kRows], right[kColumns], bias[kColumns];
#pragma unroll
  for (int i = 0; i < kRows; ++i) left[i] = load_inside<1>(a + i * p.a_stride, row + i < p.m).v[0];
  if (p.vectors) {
    const Vec<T, kColumns> v = load_inside<kColumns>(b, true);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) right[j] = v.v[j];
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      right[j] = load_inside<1>(b + j * p.b_stride, column + j < p.n).v[0];
    }
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const bool inside = p.out.bias && column + j < p.n;
    bias[j] = load_inside<1>(p.out.bias + column + j, inside).v[0];
  }
  const OutputQuad<T, true> out(p.out, blockIdx.y, column, p.n, bias);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (row + i >= p.m) return;
    Acc product[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) product[j] = convert<Acc>(left[i]) * convert<Acc>(right[j]);
    out.store(product, row + i);
  }
}

int64_t work_of(const MatmulArgs& p) { return ceil_div(p.m, kRows) * ceil_div(p.n, kColumns); }

}  // namespace

const char* outer_obstacle(const MatmulArgs& args) {
  if (args.k != 1) return "it takes a depth of 1";
  if (args.batch > 65535 || work_of(args) > INT_MAX - kThreads) {
    return "it takes 65535 matrices of 2^35 elements";
  }
  return too_large(args);
}

bool prefers_outer(const MatmulArgs& args) {
  // A thread stores fp64 by half sectors, which shows where the result is large.
  return args.dtype != DType::kFloat64 || args.batch * args.m * args.n <= 1 << 20;
}

void outer_matmul(Stream stream, const MatmulArgs& args) {
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    Outer<T> p{};
    p.a = static_cast<const T*>(args.a.data), p.b = static_cast<const T*>(args.b.data);
    p.a_batch = args.a.batch, p.a_stride = args.a.row;
    p.b_batch = args.b.batch, p.b_stride = args.b.col;
    p.out = matmul_output<T>(args);
    p.m = static_cast<int>(args.m), p.n = static_cast<int>(args.n);
    p.work = static_cast<int>(work_of(args));
    p.quads = FastDiv(ceil_div(args.n, kColumns));
    p.vectors = p.b_stride == 1 && p.n % kColumns == 0 && p.b_batch % kColumns == 0 &&
                reinterpret_cast<uintptr_t>(p.b) % alignof(Vec<T, kColumns>) == 0;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.work, kThreads)),
                    static_cast<unsigned>(args.batch));
    launch_early(outer_kernel<T>, grid, kThreads, 0, stream, p);
  });
  check_launch("outer");
}

}  // namespace braze::cuda
