// Layer norm's backward pass over rows: dx in one read of dy and x, while each thread sums what its
// columns contribute to the parameters' gradients; the sums of a block are partial results in the
// workspace, [block][weight's and bias' columns], which launch_ordered_sum adds up. No atomics:
// bitwise repeatable. See row.cuh.
#include "cuda/common/ordered_sum.cuh"
#include "row.cuh"

namespace braze::cuda {
namespace {

// Of a block, one on a multiprocessor: as many as leave each the registers for `elements` of both
// sums, and of dy and x of a row and of the next one.
constexpr int block_threads(int elements) { return elements >= 24 ? 384 : kMaxTeamThreads; }

// Of dynamic shared memory, that a kernel gets beside its own arrays without asking for more.
constexpr int kUnaskedBytes = 47 << 10;
constexpr int kColumnThreads = 256;  // of column_sums_kernel
constexpr int kMostBlocksPerSm = 8;  // of dx alone

template <typename In, typename Out>
struct BackwardArgs {
  using A = acc_t<In>;

  const Out* dy;
  const In* x;
  In* dx;  // nullptr: not wanted
  const void* weight;
  bool wide_parameters;  // float32 beside a 16-bit In
  const A* mean;
  const A* rstd;
  A* dweight;  // partial results of the first block; nullptr: not wanted
  A* dbias;
  int64_t pitch;  // from a block's to the next one's
};

// dy, x and xhat of a vector.
template <int N, typename In, typename Out>
struct GradVector {
  using A = acc_t<In>;
  A g[N], xhat[N];

  __device__ __forceinline__ GradVector(const Packed<Out, N>& dy, const Packed<In, N>& x, A mean,
                                        A rstd) {
    unpack(dy, g);
    unpack(x, xhat);
#pragma unroll
    for (int k = 0; k < N; ++k) xhat[k] = (xhat[k] - mean) * rstd;
  }
};

// Adds up what the block's teams have for their columns, and stores it as the block's partial
// result. shared: of blockDim.x * kHeld * N values, where there is more than one team.
template <Team kTeam, int N, int kHeld, typename A>
__device__ void store_column_sums(A (&sums)[kHeld][N], int width, int size, A* shared, A* result) {
  const int rank = static_cast<int>(threadIdx.x) % width;
  int slot = static_cast<int>(threadIdx.x) / width, slots = static_cast<int>(blockDim.x) / width;
  bool stores = true;
  if constexpr (kTeam == Team::kLanes) {
    // Teams of the warp first.
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        for (int offset = width; offset < 32; offset *= 2) {
          sums[u][k] += __shfl_xor_sync(0xffffffffu, sums[u][k], offset);
        }
      }
    }
    stores = static_cast<int>(threadIdx.x) % 32 < width;
    slot = static_cast<int>(threadIdx.x) / 32;
    slots = static_cast<int>(blockDim.x) / 32;
  }
  A* const to = slots == 1 ? result : shared + slot * size;
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    const int c = (u * width + rank) * N;
    if (stores && c < size) store_acc<N>(to + c, sums[u]);
  }
  if (slots == 1) return;
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < size; c += static_cast<int>(blockDim.x)) {
    A sum = shared[c];
    for (int s = 1; s < slots; ++s) sum += shared[s * size + c];
    result[c] = sum;
  }
  __syncthreads();  // the next sums take the same memory
}

template <Team kTeam, int N, int kHeld, typename In, typename Out>
__global__ void __launch_bounds__(block_threads(kHeld* N))
    layer_norm_backward_kernel(RowShape shape, int width, BackwardArgs<In, Out> args) {
  using A = acc_t<In>;
  extern __shared__ __align__(16) unsigned char shared[];
  wait_for_earlier_kernels();
  const A by_size = A(1) / static_cast<A>(shape.size);
  constexpr bool kAhead = kHeld * N < 32;  // else the registers do not suffice
  A dweight[kHeld][N] = {}, dbias[kHeld][N] = {};
  Packed<In, N> next_x[kHeld];
  Packed<Out, N> next_dy[kHeld];
  A next_mean = 0, next_rstd = 0;
  const auto ask = [&](const RowPart& part) {
    for_each_held<N, kHeld>(part, [&](int c, int u) {
      next_x[u].load(args.x + part.base + c);
      next_dy[u].load(args.dy + part.base + c);
    });
    if (part.size > 0) next_mean = args.mean[part.row], next_rstd = args.rstd[part.row];
  };
  const auto start = [&](const RowPart& part) {
    if (kAhead) ask(part);
  };
  for_each_row_ahead(shape, width, start, [&](const RowPart& part, const RowPart& next) {
    if (!kAhead) ask(part);
    Packed<In, N> x[kHeld];
    Packed<Out, N> dy[kHeld];
#pragma unroll
    for (int u = 0; u < kHeld; ++u) x[u] = next_x[u], dy[u] = next_dy[u];
    const A mean = next_mean, rstd = next_rstd;
    if (kAhead) ask(next);
    const auto each = [&](const auto& f) { for_each_held<N, kHeld>(part, f); };
    Pair<A> total{0, 0};
    each([&](int c, int u) {
      const GradVector<N, In, Out> v(dy[u], x[u], mean, rstd);
      A w[N];
      load_parameters<N, In>(args.weight, args.wide_parameters, c, A(1), w);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A g = v.g[k] * w[k];
        total.first += g;
        total.second += g * v.xhat[k];
        dweight[u][k] += v.g[k] * v.xhat[k];
        dbias[u][k] += v.g[k];
      }
    });
    if (!args.dx) return;
    total = team_reduce<kTeam>(total, part.width, AddPairs{});
    total = {total.first * by_size, total.second * by_size};
    each([&](int c, int u) {
      const GradVector<N, In, Out> v(dy[u], x[u], mean, rstd);
      A w[N], result[N];
      load_parameters<N, In>(args.weight, args.wide_parameters, c, A(1), w);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        result[k] = (v.g[k] * w[k] - total.first - v.xhat[k] * total.second) * rstd;
      }
      store_acc<N>(args.dx + part.base + c, result);
    });
  });
  const int size = static_cast<int>(shape.size);
  const int64_t block = blockIdx.x * args.pitch;
  A* const sums = reinterpret_cast<A*>(shared);
  if (args.dweight) {
    store_column_sums<kTeam, N, kHeld, A>(dweight, width, size, sums, args.dweight + block);
  }
  if (args.dbias) {
    store_column_sums<kTeam, N, kHeld, A>(dbias, width, size, sums, args.dbias + block);
  }
}

// dx of rows that are too long to be held, which are read twice.
template <int N, typename In, typename Out>
__global__ void __launch_bounds__(kMaxTeamThreads)
    long_row_backward_kernel(RowShape shape, BackwardArgs<In, Out> args) {
  using A = acc_t<In>;
  wait_for_earlier_kernels();
  const A by_size = A(1) / static_cast<A>(shape.size);
  for_each_row<Team::kBlock>(shape, 1, [&](const RowPart& part) {
    const A mean = args.mean[part.row], rstd = args.rstd[part.row];
    const auto each = [&](const auto& f) {
      part.template for_each<N>([&](int64_t c, int64_t offset) {
        Packed<In, N> x;
        Packed<Out, N> dy;
        x.load(args.x + offset);
        dy.load(args.dy + offset);
        A w[N];
        load_parameters<N, In>(args.weight, args.wide_parameters, c, A(1), w);
        f(offset, GradVector<N, In, Out>(dy, x, mean, rstd), w);
      });
    };
    Pair<A> total{0, 0};
    each([&](int64_t, const GradVector<N, In, Out>& v, const A(&w)[N]) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        total.first += v.g[k] * w[k];
        total.second += v.g[k] * w[k] * v.xhat[k];
      }
    });
    total = team_reduce<Team::kBlock>(total, part.width, AddPairs{});
    total = {total.first * by_size, total.second * by_size};
    each([&](int64_t offset, const GradVector<N, In, Out>& v, const A(&w)[N]) {
      A result[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        result[k] = (v.g[k] * w[k] - total.first - v.xhat[k] * total.second) * rstd;
      }
      store_acc<N>(args.dx + offset, result);
    });
  });
}

// Their parameters' gradients: a thread sums one vector of columns over part of the rows.
template <int N, typename In, typename Out>
__global__ void __launch_bounds__(kColumnThreads)
    column_sums_kernel(RowShape shape, BackwardArgs<In, Out> args) {
  using A = acc_t<In>;
  wait_for_earlier_kernels();
  const int64_t c = (blockIdx.x * int64_t{kColumnThreads} + threadIdx.x) * N;
  if (c >= shape.size) return;
  A dweight[N] = {}, dbias[N] = {};
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < shape.outer; row += gridDim.y) {
    Packed<In, N> x;
    Packed<Out, N> dy;
    x.load(args.x + row * shape.size + c);
    dy.load(args.dy + row * shape.size + c);
    const GradVector<N, In, Out> v(dy, x, args.mean[row], args.rstd[row]);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      dweight[k] += v.g[k] * v.xhat[k];
      dbias[k] += v.g[k];
    }
  }
  const int64_t result = blockIdx.y * args.pitch + c;
  if (args.dweight) store_acc<N>(args.dweight + result, dweight);
  if (args.dbias) store_acc<N>(args.dbias + result, dbias);
}

// How many partial results each column has, at most.
int most_parts(const LayerNormShape& shape) {
  return static_cast<int>(std::min<int64_t>(shape.rows, sm_count()));
}

// Returns how many there are.
template <typename In, typename Out, int N>
int launch_backward(cudaStream_t stream, const LayerNormShape& shape,
                    const BackwardArgs<In, Out>& args) {
  using A = acc_t<In>;
  const RowShape rows{shape.rows, shape.size, 1};
  // Beside both sums and the next row a thread has registers for few vectors.
  constexpr int kMost = N == 1 ? kMostScalars : kMostVectors;
  constexpr int kLane = N == 1 ? kMost : 3, kWarps = N == 1 ? kMost : 2;
  const HeldRowPlan plan = plan_held_row(shape.size / N, kLane, kWarps, kMost,
                                         [](int held) { return block_threads(held * N); });
  const bool of_parameters = args.dweight || args.dbias;
  int parts = most_parts(shape);
  if (plan.team == Team::kBlock) {
    if (args.dx) {
      const int64_t most = int64_t{sm_count()} * kMostBlocksPerSm;
      launch_early(long_row_backward_kernel<N, In, Out>,
                   static_cast<unsigned>(std::min(shape.rows, most)), kMaxTeamThreads, 0, stream,
                   rows, args);
      check_launch("layer_norm_backward");
    }
    if (of_parameters) {
      const dim3 grid(static_cast<unsigned>(ceil_div(shape.size, kColumnThreads * N)), parts);
      launch_early(column_sums_kernel<N, In, Out>, grid, kColumnThreads, 0, stream, rows, args);
      check_launch("layer_norm_backward");
    }
    return parts;
  }
  // Blocks as large as can be: each leaves partial results of all columns.
  const int teams = block_threads(plan.held * N) / plan.width;
  const int threads = teams * plan.width;
  const int64_t wanted = ceil_div(shape.rows, teams);
  const int64_t most = of_parameters ? parts : int64_t{sm_count()} * kMostBlocksPerSm;
  parts = static_cast<int>(std::min(wanted, most));
  dispatch_held<N, kMostVectors>(plan, [&](auto team, auto held) {
    const auto kernel =
        layer_norm_backward_kernel<decltype(team)::value, N, decltype(held)::value, In, Out>;
    const int slots = plan.team == Team::kLanes ? threads / 32 : teams;
    const int bytes =
        of_parameters && slots > 1 ? slots * static_cast<int>(shape.size * sizeof(A)) : 0;
    if (bytes > kUnaskedBytes) {
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    }
    launch_early(kernel, parts, threads, bytes, stream, rows, plan.width, args);
  });
  check_launch("layer_norm_backward");
  return parts;
}

// f(input tag, result tag) for the pairs of dtypes that exist.
template <typename F>
void dispatch_pair(const LayerNormShape& shape, F&& f) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (shape.result == DType::kFloat32) return f(tag, TypeTag<float>{});
    } else if constexpr (sizeof(T) == 4) {
      if (shape.result == DType::kBFloat16) return f(tag, TypeTag<__nv_bfloat16>{});
      if (shape.result == DType::kFloat16) return f(tag, TypeTag<__half>{});
    }
    f(tag, tag);
  });
}

}  // namespace

int64_t layer_norm_workspace_bytes(const LayerNormShape& shape) {
  const int64_t element = shape.dtype == DType::kFloat64 ? 8 : 4;
  return 2 * most_parts(shape) * shape.size * element;
}

void layer_norm_backward(Stream stream, const LayerNormShape& shape, const void* dy, const void* x,
                         const BatchNormAffine& affine, const void* mean, const void* rstd,
                         const LayerNormGradients& gradients, void* workspace) {
  if (shape.count() == 0 || !(gradients.x || gradients.weight || gradients.bias)) return;
  dispatch_pair(shape, [&](auto in_tag, auto out_tag) {
    using In = typename decltype(in_tag)::type;
    using Out = typename decltype(out_tag)::type;
    using A = acc_t<In>;
    A* const partials = static_cast<A*>(workspace);
    const bool both = gradients.weight && gradients.bias;
    const BackwardArgs<In, Out> args{static_cast<const Out*>(dy),
                                     static_cast<const In*>(x),
                                     static_cast<In*>(gradients.x),
                                     affine.weight,
                                     affine.dtype != shape.dtype,
                                     static_cast<const A*>(mean),
                                     static_cast<const A*>(rstd),
                                     gradients.weight ? partials : nullptr,
                                     gradients.bias ? partials + both * shape.size : nullptr,
                                     shape.size * (1 + both)};
    const bool aligned = is_vec_aligned(args.dy) && is_vec_aligned(args.x) &&
                         is_vec_aligned(args.dx) &&
                         is_vec_aligned(static_cast<const In*>(affine.weight));
    int parts = 0;
    with_row_vectors<In>(shape.size, aligned, [&](auto width) {
      parts = launch_backward<In, Out, decltype(width)::value>(as_cuda(stream), shape, args);
    });
    dispatch(gradients.parameter_dtype, [&](auto parameter_tag) {
      using P = typename decltype(parameter_tag)::type;
      if constexpr (std::is_same_v<acc_t<P>, A>) {
        P* const weight = static_cast<P*>(gradients.weight);
        P* const bias = static_cast<P*>(gradients.bias);
        if (both) {
          launch_ordered_sum<P>(stream, partials, parts, shape.size, weight, shape.size, bias);
        } else if (weight || bias) {
          launch_ordered_sum<P>(stream, partials, parts, shape.size, weight ? weight : bias);
        }
      }
    });
  });
}

}  // namespace braze::cuda
