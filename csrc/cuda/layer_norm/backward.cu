// Layer norm's backward pass over rows: dx in one read of dy and x, while each thread sums what its
// columns contribute to the parameters' gradients; the sums of a block are partial results in the
// workspace, [block][weight's and bias' columns], which launch_ordered_sum adds up. No atomics:
// bitwise repeatable. See row.cuh.
#include "ahead.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/ordered_sum.cuh"

namespace braze::cuda {
namespace {

// A thread has `words` registers' worth of a row, 16, 24 or 32, and twice as many sums. With 16
// there is room for the weight too, and two rows of 16 bits are on their way; else the weight is in
// shared memory, from where dy and x are read again after the reduction. Threads of a block, of
// which a multiprocessor has one:
constexpr int backward_threads(int words) { return words == 24 ? 640 : 512; }
// bytes: of an element of dy and x
constexpr int rows_ahead(int words, int bytes) { return words <= 16 && bytes <= 4 ? 2 : 1; }
constexpr bool has_weight(int words) { return words <= 16; }
template <typename A>
constexpr int words_of(int elements) {
  return elements * static_cast<int>(sizeof(A)) / 4;
}

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

// dy of a vector, and xhat or another line of x.
template <int N, typename In, typename Out>
struct GradVector {
  using A = acc_t<In>;
  A g[N], of_x[N];

  __device__ __forceinline__ GradVector(const Packed<Out, N>& dy, const Packed<In, N>& x,
                                        const Line<In>& line) {
    unpack(dy, g);
    unpack(x, of_x);
#pragma unroll
    for (int k = 0; k < N; ++k) of_x[k] = line(of_x[k]);
  }
};

// How a row's columns are shared out: where a cluster of kBlocks blocks has a row, equal parts
// each.
template <int kWidth, int N, int kVectors, int kBlocks, typename In, typename Out>
struct BackwardLayout {
  using X = Slots<In, N, kVectors>;
  using Dy = Slots<Out, N, kVectors>;
  static constexpr int kWords = words_of<acc_t<In>>(kVectors * N);
  static constexpr int kAhead = rows_ahead(kWords, sizeof(In) + sizeof(Out));
  static constexpr int kStage = X::kBytes + Dy::kBytes;  // a warp's

  static constexpr int slots_bytes(int threads) { return threads / 32 * (kAhead + 1) * kStage; }
};

// Weight's elements from `first` on, as they are, in shared memory, and ones where there are none.
template <int N, typename W>
__device__ __forceinline__ void bring_weight(const void* weight, int first, int count, int size,
                                             unsigned char* to) {
  for (int c = static_cast<int>(threadIdx.x) * N; c < count;
       c += static_cast<int>(blockDim.x) * N) {
    Vec<W, N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.v[k] = convert<W>(1.0f);
    if (weight && first + c < size) v = load_vec<N>(static_cast<const W*>(weight) + first + c);
    store_vec<N>(reinterpret_cast<W*>(to) + c, v);
  }
}

// The same sums in all blocks of a cluster.
template <int kBlocks, typename A>
__device__ __forceinline__ void add_other_blocks(A (&v)[2], int part, int& turn) {
  __shared__ Pair<A> all[2][kBlocks];
  if (threadIdx.x < kBlocks) {
    *const_cast<Pair<A>*>(in_cluster(&all[turn][part], threadIdx.x)) = {v[0], v[1]};
  }
  cluster_sync();
  v[0] = all[turn][0].first, v[1] = all[turn][0].second;
#pragma unroll
  for (int i = 1; i < kBlocks; ++i) v[0] += all[turn][i].first, v[1] += all[turn][i].second;
  turn ^= 1;
}

// Adds up what the block's teams have for their columns, and stores it as the block's partial
// results, nullptr where they are not wanted. shared: of a weight's and a bias' columns for each
// team, or each warp of smaller teams.
template <int kWidth, int N, int kVectors, typename A>
__device__ __forceinline__ void store_column_sums(A (&dweight)[kVectors][N],
                                                  A (&dbias)[kVectors][N],
                                                  const TeamPlace<kWidth>& place, int column,
                                                  int size, A* shared, A* weight, A* bias) {
  int slot = place.team(), slots = place.teams();
  bool stores = true;
  if constexpr (kWidth <= 32) {
    // Teams of the warp first.
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        for (int offset = place.width; offset < 32; offset *= 2) {
          dweight[u][k] += __shfl_xor_sync(0xffffffffu, dweight[u][k], offset);
          dbias[u][k] += __shfl_xor_sync(0xffffffffu, dbias[u][k], offset);
        }
      }
    }
    stores = place.lane() < place.width;
    slot = place.warp();
    slots = static_cast<int>(blockDim.x) / 32;
  }
  __syncthreads();  // the slots of rows are free
  const bool direct = slots == 1;
  A* const to_weight = direct ? weight : shared + slot * 2 * size;
  A* const to_bias = direct ? bias : shared + slot * 2 * size + size;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int c = column + u * place.lanes * N;
    if (stores && c < size) {
      if (to_weight) store_acc<N>(to_weight + c, dweight[u]);
      if (to_bias) store_acc<N>(to_bias + c, dbias[u]);
    }
  }
  if (direct) return;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < 2 * size; i += static_cast<int>(blockDim.x)) {
    A sum = shared[i];
#pragma unroll 4
    for (int s = 1; s < slots; ++s) sum += shared[s * 2 * size + i];
    A* const to = i < size ? weight : bias;
    if (to) to[i < size ? i : i - size] = sum;
  }
}

template <int kWidth, int N, int kVectors, int kBlocks, typename In, typename Out>
__global__ void __launch_bounds__(backward_threads(words_of<acc_t<In>>(kVectors* N)))
    layer_norm_backward_kernel(RowShape shape, int width, BackwardArgs<In, Out> args) {
  using A = acc_t<In>;
  using Layout = BackwardLayout<kWidth, N, kVectors, kBlocks, In, Out>;
  extern __shared__ __align__(16) unsigned char shared[];
  const TeamPlace<kWidth> place(width);
  unsigned char* const slots = shared + place.warp() * (Layout::kAhead + 1) * Layout::kStage;
  unsigned char* const weights = shared + Layout::slots_bytes(static_cast<int>(blockDim.x));
  const int size = static_cast<int>(shape.size), step = place.lanes * N;
  const int part = static_cast<int>(blockIdx.x) % kBlocks;
  const int own = place.template first_vector<kVectors>() * N;  // of the block's columns
  const int columns = kVectors * place.width * N;
  const int column = part * columns + own;
  const int64_t block = blockIdx.x / kBlocks, stride = int64_t{gridDim.x / kBlocks} * place.teams();
  wait_for_earlier_kernels();
  const int64_t first_row = block * place.teams(), row_step = stride * size;
  int64_t offset = (first_row + place.team()) * size + column, asked = offset;
  const auto ask = [&](int64_t row, int stage) {
    const int left = row < shape.outer ? size - column : 0;
    unsigned char* const to = slots + stage * Layout::kStage;
    const typename Layout::X x(to);
    const typename Layout::Dy dy(to + Layout::X::kBytes);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      x.ask(u, args.x + asked + u * step, u * step < left);
      dy.ask(u, args.dy + asked + u * step, u * step < left);
    }
    asked += row_step;
  };
  A next_mean = 0, next_rstd = 0;
  const auto ask_statistics = [&](int64_t row) {
    next_mean = next_rstd = 0;
    if (row < shape.outer) next_mean = args.mean[row], next_rstd = args.rstd[row];
  };
  constexpr bool kHasWeight = has_weight(Layout::kWords);
  A own_weight[kHasWeight ? kVectors : 1][N];
  const auto start = [&] {
    ask_statistics(first_row + place.team());
    if constexpr (kHasWeight) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const bool inside = column + u * step < size;
        load_parameters<N, In>(inside ? args.weight : nullptr, args.wide_parameters,
                               column + u * step, A(1), own_weight[u]);
      }
    } else {
      if (sizeof(In) == 2 && args.wide_parameters) {
        bring_weight<N, A>(args.weight, part * columns, columns, size, weights);
      } else {
        bring_weight<N, In>(args.weight, part * columns, columns, size, weights);
      }
      __syncthreads();
    }
    if constexpr (kBlocks > 1) cluster_meet();
  };
  const auto weight_of = [&](int u, A(&w)[N]) {
    if constexpr (kHasWeight) {
#pragma unroll
      for (int k = 0; k < N; ++k) w[k] = own_weight[u][k];
    } else if (sizeof(In) == 2 && args.wide_parameters) {
      load_acc<N>(reinterpret_cast<const A*>(weights) + own + u * step, w);
    } else {
      Packed<In, N> v;
      v.load(reinterpret_cast<const In*>(weights) + own + u * step);
      unpack(v, w);
    }
  };
  const A by_size = A(1) / static_cast<A>(size);
  A dweight[kVectors][N] = {}, dbias[kVectors][N] = {};
  int turn = 0, block_turn = 0;
  for_each_row_in_slots<Layout::kAhead>(
      shape.outer, first_row, stride, place.team(), ask, start, [&](int64_t row, int stage) {
        unsigned char* const from = slots + stage * Layout::kStage;
        const typename Layout::X x(from);
        const typename Layout::Dy dy(from + Layout::X::kBytes);
        const A rstd = next_rstd;
        const Line<In> line(next_mean, rstd, 0);
        ask_statistics(row + stride);
        // Past a row's end, and of rows past the last one, all are zeros.
        A total[2] = {};
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          const GradVector<N, In, Out> v(dy[u], x[u], line);
          A w[N];
          weight_of(u, w);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            const A g = v.g[k] * w[k];
            total[0] += g;
            total[1] += g * v.of_x[k];
            dweight[u][k] += v.g[k] * v.of_x[k];
            dbias[u][k] += v.g[k];
          }
        }
        if (!args.dx) return;
        team_sums(total, place, turn);
        if constexpr (kBlocks > 1) add_other_blocks<kBlocks>(total, part, block_turn);
        const Line<In> taken = line.scaled(total[1] * by_size * rstd, total[0] * by_size * rstd);
        const int left = row < shape.outer ? size - column : 0;
        In* const to = args.dx + offset;
        offset += row_step;
        constexpr bool kAgain = !kHasWeight;
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          const GradVector<N, In, Out> v(kAgain ? dy.again(u) : dy[u], kAgain ? x.again(u) : x[u],
                                         taken);
          A w[N], result[N];
          weight_of(u, w);
#pragma unroll
          for (int k = 0; k < N; ++k) result[k] = v.g[k] * w[k] * rstd - v.of_x[k];
          if (u * step < left) store_acc<N>(to + u * step, result);
        }
      });
  const int64_t result = block * args.pitch;
  store_column_sums(dweight, dbias, place, column, size, reinterpret_cast<A*>(shared),
                    args.dweight ? args.dweight + result : nullptr,
                    args.dbias ? args.dbias + result : nullptr);
  if constexpr (kBlocks > 1) cluster_sync();  // other blocks still read
}

// dx of rows that are too long to be held, which are read twice.
template <int N, typename In, typename Out>
__global__ void __launch_bounds__(kMaxTeamThreads)
    long_row_backward_kernel(RowShape shape, BackwardArgs<In, Out> args) {
  using A = acc_t<In>;
  wait_for_earlier_kernels();
  const A by_size = A(1) / static_cast<A>(shape.size);
  for_each_row<Team::kBlock>(shape, 1, [&](const RowPart& part) {
    const A rstd = args.rstd[part.row];
    const Line<In> line(args.mean[part.row], rstd, 0);
    const auto each = [&](const auto& f) {
      part.template for_each<N>([&](int64_t c, int64_t offset) {
        Packed<In, N> x;
        Packed<Out, N> dy;
        x.load(args.x + offset);
        dy.load(args.dy + offset);
        A w[N];
        load_parameters<N, In>(args.weight, args.wide_parameters, c, A(1), w);
        f(offset, GradVector<N, In, Out>(dy, x, line), w);
      });
    };
    Pair<A> total{0, 0};
    each([&](int64_t, const GradVector<N, In, Out>& v, const A(&w)[N]) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        total.first += v.g[k] * w[k];
        total.second += v.g[k] * w[k] * v.of_x[k];
      }
    });
    total = team_reduce<Team::kBlock>(total, part.width, AddPairs{});
    total = {total.first * by_size, total.second * by_size};
    each([&](int64_t offset, const GradVector<N, In, Out>& v, const A(&w)[N]) {
      A result[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        result[k] = (v.g[k] * w[k] - total.first - v.of_x[k] * total.second) * rstd;
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
    const GradVector<N, In, Out> v(dy, x, Line<In>(args.mean[row], args.rstd[row], 0));
#pragma unroll
    for (int k = 0; k < N; ++k) {
      dweight[k] += v.g[k] * v.of_x[k];
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

// dx and the parameters' gradients of rows that are too long for a team, in two passes; returns how
// many partial results there are.
template <typename In, typename Out, int N>
int launch_long_rows(cudaStream_t stream, const RowShape& rows, const BackwardArgs<In, Out>& args,
                     int parts) {
  if (args.dx) {
    const int64_t most = int64_t{sm_count()} * kMostBlocksPerSm;
    launch_early(long_row_backward_kernel<N, In, Out>,
                 static_cast<unsigned>(std::min(rows.outer, most)), kMaxTeamThreads, 0, stream,
                 rows, args);
    check_launch("layer_norm_backward");
  }
  if (args.dweight || args.dbias) {
    const dim3 grid(static_cast<unsigned>(ceil_div(rows.size, kColumnThreads * N)), parts);
    launch_early(column_sums_kernel<N, In, Out>, grid, kColumnThreads, 0, stream, rows, args);
    check_launch("layer_norm_backward");
  }
  return parts;
}

// How `blocks` blocks share a row, if they do, each with as many vectors a thread as `held` lists.
// weight_bytes: of an element of weight.
template <typename In, typename Out, int N>
AheadPlan plan_backward(int64_t size, int blocks, int weight_bytes,
                        std::initializer_list<int> held) {
  using A = acc_t<In>;
  const int64_t columns = ceil_div(size, N * blocks) * N;  // of a block
  const auto words = [](int vectors) { return words_of<A>(vectors * N); };
  return plan_ahead<N>(
      columns / N, kWidestTeam, held, most_shared_memory() - 1024,
      [&](int vectors) { return backward_threads(words(vectors)); },
      [&](int width, int vectors, int threads) -> int64_t {
        const int bytes = sizeof(In) + sizeof(Out);
        const int64_t stage = int64_t{vectors} * N * bytes;
        const int64_t slots = threads * (rows_ahead(words(vectors), bytes) + 1) * stage;
        const int64_t weight = has_weight(words(vectors)) ? 0 : width * vectors * N * weight_bytes;
        const int teams = threads / std::max(width, 32);
        const int64_t sums = teams > 1 ? 2 * teams * size * sizeof(A) : 0;
        return std::max(slots + weight, sums);
      });
}

// Returns how many partial results there are.
template <typename In, typename Out, int N>
int launch_backward(cudaStream_t stream, const LayerNormShape& shape,
                    const BackwardArgs<In, Out>& args) {
  const RowShape rows{shape.rows, shape.size, 1};
  const auto launch = [&](const AheadPlan& plan, auto blocks) {
    constexpr int kBlocks = decltype(blocks)::value;
    const int64_t wanted = ceil_div(shape.rows, plan.threads / plan.width);
    const int at_once = kBlocks > 1 ? clusters_at_once(kBlocks, 1) : sm_count();
    const int parts = static_cast<int>(std::min<int64_t>(wanted, at_once));
    dispatch_ahead<N, kWidestTeam, 2, 3, 4>(plan, [&](auto width, auto vectors) {
      constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
      // The most words are for the widest teams alone, of which shared memory has 16-bit rows, and
      // so are clusters, each thread with as much as it can hold.
      constexpr bool kMost = words_of<acc_t<In>>(kVectors * N) == 32;
      constexpr bool kWidest = kWidth == kTeamOfWarps && (kMost ? sizeof(In) == 2 : kVectors == 4);
      if constexpr ((!kMost && kBlocks == 1) || kWidest) {
        const auto kernel = layer_norm_backward_kernel<kWidth, N, kVectors, kBlocks, In, Out>;
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes);
        launch_early_in_clusters(kernel, parts * kBlocks, plan.threads, plan.bytes, stream, kBlocks,
                                 rows, plan.width, args);
      }
    });
    check_launch("layer_norm_backward");
    return parts;
  };
  const int weight_bytes = args.wide_parameters ? sizeof(acc_t<In>) : sizeof(In);
  const AheadPlan plan = plan_backward<In, Out, N>(shape.size, 1, weight_bytes, {2, 3, 4});
  if (plan.width > 0) return launch(plan, std::integral_constant<int, 1>{});
  if constexpr (sizeof(In) <= 4 && N > 1) {
    constexpr int kHeld = sizeof(In) == 2 ? 4 : 2;
    const AheadPlan of_two = plan_backward<In, Out, N>(shape.size, 2, weight_bytes, {kHeld});
    const AheadPlan of_four = plan_backward<In, Out, N>(shape.size, 4, weight_bytes, {kHeld});
    if (runs_sm90_code()) {
      if (of_two.width == kWidestTeam) return launch(of_two, std::integral_constant<int, 2>{});
      if (of_four.width == kWidestTeam) return launch(of_four, std::integral_constant<int, 4>{});
    }
  }
  return launch_long_rows<In, Out, N>(stream, rows, args, most_parts(shape));
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
