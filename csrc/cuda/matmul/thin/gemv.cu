// Matrix times vector: products with one row or one column. Every element of the matrix is used
// once, so that only its way from memory counts: threads ask for several vectors of it together,
// and their sums meet in a fixed order. After a small product's start, fetching the kernel's own
// instructions is what takes longest: the code is short.
#include <climits>

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/predicated.cuh"
#include "cuda/matmul/obstacles.h"
#include "cuda/matmul/kernels.h"

namespace braze::cuda {
namespace {

constexpr int kMostThreads = 1024, kMostWarps = kMostThreads / 32;
constexpr int kMostColumns = 64;  // of a block of gemv_columns_kernel, 128 bytes

// Vectors of V elements that a thread has on their way together.
template <int V>
constexpr int kInFlight = V == 1 ? 8 : 4;

// y[o] = epilogue(sum over d of x[o, d] * v[d]), or a batch of them.
struct Gemv {
  const void *x, *v, *bias;
  void* y;
  int64_t x_batch, x_outer, x_depth, v_batch, v_step;
  int outputs, depth, bias_step;
  bool relu;
  FastDiv blocks;  // of one product
  int shift;       // log2 of the lanes that share an output, or a row of outputs
  int step_shift;  // log2 of the depth between a thread's loads
  int rounds;      // of loads, one after the other
};

template <typename T>
__device__ __forceinline__ T load_bias(const Gemv& p, int output, bool inside) {
  const T* const bias = static_cast<const T*>(p.bias);
  return load_inside<1>(bias + output * p.bias_step, inside && bias).v[0];
}

// Steps of a thread whose first load is at `start` of the depth.
__device__ __forceinline__ int steps_from(int start, const Gemv& p) {
  return start < p.depth ? ((p.depth - 1 - start) >> p.step_shift) + 1 : 0;
}

template <typename T>
__device__ __forceinline__ void store_output(const Gemv& p, int batch, int output, acc_t<T> sum,
                                             T bias) {
  sum += convert<acc_t<T>>(bias);
  if (p.relu && sum < acc_t<T>(0)) sum = 0;  // NaN stays NaN
  static_cast<T*>(p.y)[int64_t{batch} * p.outputs + output] = convert<T>(sum);
}

// A matrix that lies along the depth: 1 to 1024 lanes form the dot product of an output.
template <typename T, int V>
__global__ void __launch_bounds__(kMostThreads, 1) gemv_dot_kernel(const __grid_constant__ Gemv p) {
  using Acc = acc_t<T>;
  __shared__ Acc parts[256];  // of 32 lanes, or as many as an output has
  const int lanes = 1 << p.shift;
  const int outputs = blockDim.x >> p.shift;  // of the block
  int first;
  const int batch = p.blocks.div(blockIdx.x, first);
  first *= outputs;
  const int mine = first + threadIdx.x;  // to be stored
  const bool stores = threadIdx.x < outputs && mine < p.outputs;
  wait_for_earlier_kernels();
  const T bias = load_bias<T>(p, mine, stores);
  const int start = (threadIdx.x & (lanes - 1)) * V, output = first + (threadIdx.x >> p.shift);
  int left = output < p.outputs ? steps_from(start, p) : 0;
  const int64_t x_depth = V > 1 ? 1 : p.x_depth, v_depth = V > 1 ? 1 : p.v_step;
  const int64_t x_step = x_depth << p.step_shift, v_step = v_depth << p.step_shift;
  const T* x =
      static_cast<const T*>(p.x) + batch * p.x_batch + output * p.x_outer + start * x_depth;
  const T* v = static_cast<const T*>(p.v) + batch * p.v_batch + start * v_depth;
  Acc sum = 0;
#pragma unroll 1
  for (int round = 0; round < p.rounds; ++round, left -= kInFlight<V>) {
    Vec<T, V> xs[kInFlight<V>], vs[kInFlight<V>];
#pragma unroll
    for (int i = 0; i < kInFlight<V>; ++i) {
      xs[i] = load_inside<V>(x, i < left);
      vs[i] = load_inside<V>(v, i < left);
      x = advanced(x, x_step), v = advanced(v, v_step);
    }
#pragma unroll
    for (int i = 0; i < kInFlight<V>; ++i) {
#pragma unroll
      for (int j = 0; j < V; ++j) sum += convert<Acc>(xs[i].v[j]) * convert<Acc>(vs[i].v[j]);
    }
  }
  const int shift = min(p.shift, 5);
#pragma unroll 1
  for (int other = (1 << shift) / 2; other > 0; other /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, other);
  }
  if ((threadIdx.x & ((1 << shift) - 1)) == 0) parts[threadIdx.x >> shift] = sum;
  __syncthreads();
  if (!stores) return;
  const int count = lanes >> shift;
  sum = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) sum += parts[threadIdx.x * count + i];
  store_output(p, batch, mine, sum, bias);
}

// A matrix that lies along the outputs: a block has some columns, a lane V of them, and its rows of
// lanes share out the depth.
template <typename T, int V>
__global__ void __launch_bounds__(kMostThreads, 1)
    gemv_columns_kernel(const __grid_constant__ Gemv p) {
  using Acc = acc_t<T>;
  __shared__ Acc parts[kMostWarps][kMostColumns];
  const int lanes = 1 << p.shift, lane = threadIdx.x & (lanes - 1);
  int first;
  const int batch = p.blocks.div(blockIdx.x, first);
  first *= lanes * V;
  const int mine = first + threadIdx.x;  // to be stored
  const bool stores = threadIdx.x < lanes * V && mine < p.outputs;
  wait_for_earlier_kernels();
  const T bias = load_bias<T>(p, mine, stores);
  const int column = first + lane * V;
  const int start = threadIdx.x >> p.shift;
  int left = column < p.outputs ? steps_from(start, p) : 0;
  const int64_t x_step = p.x_depth << p.step_shift, v_step = p.v_step << p.step_shift;
  const T* x = static_cast<const T*>(p.x) + batch * p.x_batch + column * (V > 1 ? 1 : p.x_outer) +
               start * p.x_depth;
  const T* v = static_cast<const T*>(p.v) + batch * p.v_batch + start * p.v_step;
  Acc sum[V] = {};
#pragma unroll 1
  for (int round = 0; round < p.rounds; ++round, left -= kInFlight<V>) {
    Vec<T, V> xs[kInFlight<V>];
    Vec<T, 1> vs[kInFlight<V>];
#pragma unroll
    for (int i = 0; i < kInFlight<V>; ++i) {
      xs[i] = load_inside<V>(x, i < left);
      vs[i] = load_inside<1>(v, i < left);
      x = advanced(x, x_step), v = advanced(v, v_step);
    }
#pragma unroll
    for (int i = 0; i < kInFlight<V>; ++i) {
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += convert<Acc>(xs[i].v[j]) * convert<Acc>(vs[i].v[0]);
    }
  }
#pragma unroll 1
  for (int other = 16; other >= lanes; other /= 2) {
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += __shfl_xor_sync(0xffffffff, sum[j], other);
  }
  if (threadIdx.x % 32 < lanes) {
#pragma unroll
    for (int j = 0; j < V; ++j) parts[threadIdx.x / 32][lane * V + j] = sum[j];
  }
  __syncthreads();
  if (!stores) return;
  Acc total = 0;
#pragma unroll 4
  for (int warp = 0; warp < blockDim.x / 32; ++warp) total += parts[warp][threadIdx.x];
  store_output(p, batch, mine, total, bias);
}

struct Plan {
  bool dot, vectors;
  int threads, outputs;  // of a block
  int64_t blocks;        // of the batch
  Gemv gemv;
};

int log2_ceil(int64_t n) {
  int log = 0;
  while (int64_t{1} << log < n) ++log;
  return log;
}

void plan_dot(Plan& plan, int64_t batch, int width) {
  Gemv& p = plan.gemv;
  const int64_t vectors = ceil_div(p.depth, width);
  const int in_flight = width == 1 ? kInFlight<1> : kInFlight<2>;
  const auto set = [&](int shift) {
    p.shift = shift;
    plan.threads = std::max(256, 1 << shift);
    plan.outputs = plan.threads >> shift;
    plan.blocks = batch * ceil_div(p.outputs, plan.outputs);
    p.step_shift = shift + log2_ceil(width);
    p.rounds = static_cast<int>(ceil_div(vectors, int64_t{in_flight} << shift));
  };
  // One round of loads, but in large products one warp for an output; and all multiprocessors.
  set(std::min(10, log2_ceil(ceil_div(vectors, in_flight))));
  while (p.shift > 5 && plan.blocks >= int64_t{sm_count()} * 8) set(p.shift - 1);
  while (p.shift < 8 && plan.blocks < sm_count() * 3 / 4 && 1 << p.shift < vectors) {
    set(p.shift + 1);
  }
}

void plan_columns(Plan& plan, int64_t batch, int width, int bytes) {
  Gemv& p = plan.gemv;
  const int in_flight = width == 1 ? kInFlight<1> : kInFlight<2>;
  const auto set = [&](int shift) {
    p.shift = shift;
    plan.outputs = width << shift;
    plan.blocks = batch * ceil_div(p.outputs, plan.outputs);
    const int rows = log2_ceil(ceil_div(p.depth, in_flight));
    plan.threads = std::clamp(1 << std::min(10, rows + shift), kMostColumns, kMostThreads);
    p.step_shift = log2_ceil(plan.threads) - shift;
    p.rounds = static_cast<int>(ceil_div(p.depth, int64_t{in_flight} << p.step_shift));
  };
  // A cache line of a row, less of it where that leaves multiprocessors idle: down to a sector,
  // and below where rows are too many for one round of loads.
  set(log2_ceil(std::min(32, 128 / (width * bytes))));
  while (p.shift > 0 && plan.blocks < sm_count() * 3 / 4 &&
         (plan.outputs * bytes > 32 || p.rounds > 1)) {
    set(p.shift - 1);
  }
}

Plan make_plan(const MatmulArgs& args) {
  const bool column = args.n == 1;  // of C
  const MatrixRef &x = column ? args.a : args.b, &v = column ? args.b : args.a;
  Plan plan{};
  Gemv& p = plan.gemv;
  p.x = x.data, p.v = v.data, p.bias = args.bias, p.y = args.c;
  p.x_batch = x.batch, p.v_batch = v.batch;
  p.x_outer = column ? x.row : x.col, p.x_depth = column ? x.col : x.row;
  p.v_step = column ? v.row : v.col;
  p.outputs = static_cast<int>(column ? args.m : args.n);
  p.depth = static_cast<int>(args.k);
  p.bias_step = column ? 0 : 1;
  p.relu = args.relu;
  plan.dot = p.outputs == 1 || p.x_depth <= p.x_outer;
  const int bytes = static_cast<int>(size_of(args.dtype)), width = 16 / bytes;
  const auto divides = [&](int64_t stride, int64_t count) {
    return count == 1 || stride % width == 0;
  };
  const auto aligned = [&](const MatrixRef& ref) {
    return is_vec_aligned(ref.data) && divides(ref.batch, args.batch);
  };
  plan.vectors = plan.dot ? p.x_depth == 1 && p.v_step == 1 && p.depth % width == 0 &&
                                divides(p.x_outer, p.outputs) && aligned(x) && aligned(v)
                          : p.x_outer == 1 && p.outputs % width == 0 &&
                                divides(p.x_depth, p.depth) && aligned(x);
  if (plan.dot) {
    plan_dot(plan, args.batch, plan.vectors ? width : 1);
  } else {
    plan_columns(plan, args.batch, plan.vectors ? width : 1, bytes);
  }
  p.blocks = FastDiv(ceil_div(p.outputs, plan.outputs));
  return plan;
}

}  // namespace

const char* gemv_obstacle(const MatmulArgs& args) {
  if (args.m != 1 && args.n != 1) return "it takes one row or one column";
  if (args.k == 0) return "there is nothing to multiply";
  return too_large(args);
}

bool prefers_gemv(const MatmulArgs& args) {
  // Long sums for few outputs leave most of the device idle: others split them over blocks.
  const Plan plan = make_plan(args);
  return plan.gemv.rounds <= 4 || 2 * plan.blocks >= sm_count();
}

void gemv_matmul(Stream stream, const MatmulArgs& args) {
  const Plan plan = make_plan(args);
  if (plan.blocks > INT_MAX) throw std::runtime_error("gemv: more than 2^31 - 1 blocks");
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int V = kVecWidth<T>;
    const auto kernel = plan.dot ? plan.vectors ? gemv_dot_kernel<T, V> : gemv_dot_kernel<T, 1>
                        : plan.vectors ? gemv_columns_kernel<T, V>
                                       : gemv_columns_kernel<T, 1>;
    launch_early(kernel, static_cast<unsigned>(plan.blocks), plan.threads, 0, stream, plan.gemv);
  });
  check_launch("gemv");
}

}  // namespace braze::cuda
