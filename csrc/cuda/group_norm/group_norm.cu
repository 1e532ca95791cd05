// Group norm of [n, c, inner], and instance norm, whose groups are channels. A group in an image is
// a row of neighbouring elements, so that the forward pass is layer norm's with other parameters
// (csrc/cuda/layer_norm/normalise.cuh). Backward, a block has a group's dy and x in shared memory,
// whose planes, a channel in an image each, its warps sum. Where shared memory does not hold a
// group, each plane is summed by a team of threads; a small kernel merges a group's planes, and a
// pass over the planes makes y or dx. launch_ordered_sum adds up a channel's planes. Channels_last
// images have kernels of their own (channels_last.cuh). No atomics: bitwise repeatable.
//
// Bytes per element of a 16-bit tensor: forward 4 (x, y), else 6; backward 6 (dy, x, dx), else 10.
#include "launchers/group_norm.h"

#include "channels_last.h"
#include "cuda/common/fast_div.cuh"
#include "cuda/common/ordered_sum.cuh"
#include "cuda/layer_norm/normalise.cuh"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"group_norm", "planes", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "a group in registers or shared memory, else plane by plane"});

constexpr int kGroupThreads = 128;  // of kernels with a warp per group

// A weight and a bias for each plane of at least N elements, so that a vector has those of two at
// most, and of one where not kAcross.
template <typename T, bool kAcross>
struct PlaneParameters {
  using A = acc_t<T>;
  static constexpr bool kFixed = false;
  static constexpr int kWidest = 32;
  static constexpr bool kLong = false;

  template <int N>
  struct Held {
    A weight[1 + kAcross], bias[1 + kAcross];
    int here;  // elements of the first plane
  };

  const void* weight;
  const void* bias;
  bool wide;  // float32 beside a 16-bit T
  int groups, channels;
  FastDiv inner;

  __device__ __forceinline__ int64_t first(int64_t row) const { return row % groups * channels; }
  template <int N>
  __device__ __forceinline__ void hold(int64_t first, int64_t c, Held<N>& held) const {
    int in_plane;
    const int64_t channel = first + inner.div(static_cast<int>(c), in_plane);
    held.here = inner.divisor() - in_plane;
    held.weight[0] = parameter_of<T>(weight, wide, channel, A(1));
    held.bias[0] = parameter_of<T>(bias, wide, channel, A(0));
    if constexpr (kAcross) {
      const int64_t other = channel + (held.here < N);
      held.weight[1] = parameter_of<T>(weight, wide, other, A(1));
      held.bias[1] = parameter_of<T>(bias, wide, other, A(0));
    }
  }
  template <int N>
  static __device__ __forceinline__ void get(const Held<N>& held, A (&w)[N], A (&b)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const bool other = kAcross && k >= held.here;
      w[k] = other ? held.weight[kAcross] : held.weight[0];
      b[k] = other ? held.bias[kAcross] : held.bias[0];
    }
  }
};

// Of a plane: deviations from the pivot are summed, so that a mean that is much larger than they
// are costs none of their accuracy.
template <typename A>
struct PlaneMoments {
  A pivot, sum;
  A squares;  // of the deviations from the mean
};

// The forward pass over planes.
template <typename T>
struct PlaneNormArgs {
  using A = acc_t<T>;

  const T* x;
  T* y;
  const void* weight;
  const void* bias;
  bool wide;
  A eps;
  PlaneMoments<A>* moments;
  A* mean;  // of groups, as rstd and shift
  A* rstd;
  A* shift;  // what rounding has taken from the mean, as in NormRow
  int64_t c, channels;
};

template <Team kTeam, int N, typename T>
__global__ void __launch_bounds__(kMaxTeamThreads)
    plane_moments_kernel(RowShape planes, int lanes, PlaneNormArgs<T> args) {
  using A = acc_t<T>;
  wait_for_earlier_kernels();
  for_each_row<kTeam>(planes, lanes, [&](const RowPart& part) {
    A pivot;
    const Pair<A> total = sum_about_first<kTeam, N>(part, args.x, pivot);
    if (part.rank != 0 || part.size == 0) return;
    const A squares = total.second - total.first * total.first / static_cast<A>(part.size);
    args.moments[part.row] = {pivot, total.first, squares < A(0) ? A(0) : squares};  // NaN stays
  });
}

// A warp merges the planes of each group, in float64.
template <typename T>
__global__ void __launch_bounds__(kGroupThreads)
    merge_moments_kernel(PlaneNormArgs<T> args, int64_t groups, double inner) {
  using A = acc_t<T>;
  wait_for_earlier_kernels();
  const int64_t group = (blockIdx.x * int64_t{kGroupThreads} + threadIdx.x) / 32;
  if (group >= groups) return;
  const PlaneMoments<A>* const planes = args.moments + group * args.channels;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto summed = [&](const auto& f) {
    Pair<double> total{0, 0};
    for (int64_t c = lane; c < args.channels; c += 32) total.first += f(planes[c]);
    return team_reduce<Team::kLanes>(total, 32, AddPairs{}).first;
  };
  const auto mean_of = [&](const PlaneMoments<A>& p) { return p.pivot + p.sum / inner; };
  const double count = static_cast<double>(args.channels);
  const double mean = summed(mean_of) / count;
  const double squares = summed([&](const PlaneMoments<A>& p) {
    const double d = mean_of(p) - mean;
    return p.squares + inner * d * d;
  });
  if (lane != 0) return;
  const double rstd = rsqrt(squares / (count * inner) + static_cast<double>(args.eps));
  args.mean[group] = static_cast<A>(mean);
  args.rstd[group] = static_cast<A>(rstd);
  args.shift[group] = static_cast<A>((args.mean[group] - mean) * rstd);
}

template <Team kTeam, int N, typename T>
__global__ void __launch_bounds__(kMaxTeamThreads)
    normalise_planes_kernel(RowShape planes, int lanes, PlaneNormArgs<T> args) {
  using A = acc_t<T>;
  wait_for_earlier_kernels();
  for_each_row<kTeam>(planes, lanes, [&](const RowPart& part) {
    if (part.size == 0) return;
    const int64_t group = part.row / args.channels;
    const A mean = args.mean[group], rstd = args.rstd[group], shift = args.shift[group];
    const int64_t channel = part.row % args.c;
    const A w = parameter_of<T>(args.weight, args.wide, channel, A(1));
    const A b = parameter_of<T>(args.bias, args.wide, channel, A(0));
    part.template for_each<N>([&](int64_t, int64_t offset) {
      A v[N];
      load_acc<N>(args.x + offset, v);
#pragma unroll
      for (int k = 0; k < N; ++k) v[k] = ((v[k] - mean) * rstd + shift) * w + b;
      store_acc<N>(args.y + offset, v);
    });
  });
}

template <typename T>
struct PlaneArgs {
  using A = acc_t<T>;

  const T* dy;
  const T* x;
  T* dx;
  const void* weight;
  bool wide;
  const A* mean;  // of groups, as rstd and merged
  const A* rstd;
  A* sum;           // of planes: of dy
  A* dot;           // of dy xhat
  Pair<A>* merged;  // sum(g) / size and sum(g xhat) / size
  int64_t c, channels;

  __device__ __forceinline__ A weight_of(int64_t plane) const {
    return parameter_of<T>(weight, wide, plane % c, A(1));
  }

  // f(offset, dy, xhat) for the vectors of a plane.
  template <int N, typename F>
  __device__ __forceinline__ void each(const RowPart& part, A mean, A rstd, const F& f) const {
    part.template for_each<N>([&](int64_t, int64_t offset) {
      A g[N], xhat[N];
      load_acc<N>(dy + offset, g);
      load_acc<N>(x + offset, xhat);
#pragma unroll
      for (int k = 0; k < N; ++k) xhat[k] = (xhat[k] - mean) * rstd;
      f(offset, g, xhat);
    });
  }
};

template <Team kTeam, int N, typename T>
__global__ void __launch_bounds__(kMaxTeamThreads)
    plane_sums_kernel(RowShape planes, int lanes, PlaneArgs<T> args) {
  using A = acc_t<T>;
  for_each_row<kTeam>(planes, lanes, [&](const RowPart& part) {
    const bool inside = part.size > 0;
    const int64_t group = inside ? part.row / args.channels : 0;
    Pair<A> total{0, 0};
    args.template each<N>(part, args.mean[group], args.rstd[group],
                          [&](int64_t, const A(&g)[N], const A(&xhat)[N]) {
#pragma unroll
                            for (int k = 0; k < N; ++k) {
                              total.first += g[k];
                              total.second += g[k] * xhat[k];
                            }
                          });
    total = team_reduce<kTeam>(total, part.width, AddPairs{});
    if (part.rank != 0 || !inside) return;
    args.sum[part.row] = total.first;
    args.dot[part.row] = total.second;
  });
}

// A warp merges the planes of each group, in float64.
template <typename T>
__global__ void __launch_bounds__(kGroupThreads)
    merge_planes_kernel(PlaneArgs<T> args, int64_t groups, double by_size) {
  using A = acc_t<T>;
  const int64_t group = (blockIdx.x * int64_t{kGroupThreads} + threadIdx.x) / 32;
  if (group >= groups) return;
  Pair<double> total{0, 0};
  for (int64_t c = threadIdx.x % 32; c < args.channels; c += 32) {
    const int64_t plane = group * args.channels + c;
    const double w = args.weight_of(plane);
    total.first += w * args.sum[plane];
    total.second += w * args.dot[plane];
  }
  total = team_reduce<Team::kLanes>(total, 32, AddPairs{});
  if (threadIdx.x % 32 != 0) return;
  args.merged[group] = {static_cast<A>(total.first * by_size),
                        static_cast<A>(total.second * by_size)};
}

template <Team kTeam, int N, typename T>
__global__ void __launch_bounds__(kMaxTeamThreads)
    input_grad_kernel(RowShape planes, int lanes, PlaneArgs<T> args) {
  using A = acc_t<T>;
  for_each_row<kTeam>(planes, lanes, [&](const RowPart& part) {
    if (part.size == 0) return;
    const int64_t group = part.row / args.channels;
    const A w = args.weight_of(part.row), rstd = args.rstd[group];
    const Pair<A> merged = args.merged[group];
    args.template each<N>(
        part, args.mean[group], rstd, [&](int64_t offset, const A(&g)[N], const A(&xhat)[N]) {
          A result[N];
#pragma unroll
          for (int k = 0; k < N; ++k) {
            result[k] = (g[k] * w - merged.first - xhat[k] * merged.second) * rstd;
          }
          store_acc<N>(args.dx + offset, result);
        });
  });
}

// How a group's dy and x, in shared memory, are shared out among a block's warps.
struct HeldGroupPlan {
  int threads = 0;  // 0: too large
  int split;        // parts of a plane, one a warp
  int bytes;
  int blocks;  // of a multiprocessor
};

constexpr int kHeldGroupThreads = 512;  // at most
// Of a multiprocessor's blocks, at most: short vectors leave registers for more.
constexpr int held_group_sm_threads(int vector) { return vector > 4 ? 1024 : 1536; }
// Of a group's dy and x, at least: a block has nothing to do for less.
constexpr int kLeastGroupBytes = 16 << 10;

// dx and the sums of planes, of dy xhat and of dy, in one read of dy and x. `pitch`: of the sums,
// from an image's to the next one's.
template <int N, typename T>
__global__ void __launch_bounds__(kHeldGroupThreads, held_group_sm_threads(N) / kHeldGroupThreads)
    held_group_kernel(int64_t groups, int in_image, int inner, int64_t pitch, HeldGroupPlan plan,
                      PlaneArgs<T> args) {
  using A = acc_t<T>;
  constexpr int kCopy = kVecWidth<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int channels = static_cast<int>(args.channels), size = channels * inner;
  const int units = channels * plan.split, vectors = inner / N;
  const int per_unit = (vectors + plan.split - 1) / plan.split;
  T* const x = reinterpret_cast<T*>(shared);
  T* const dy = x + size;
  Pair<A>* const sums = reinterpret_cast<Pair<A>*>(dy + size);
  wait_for_earlier_kernels();
  const auto ask = [&](int64_t group) {
    if (group < groups) {
      const T* const from_x = args.x + group * size;
      const T* const from_dy = args.dy + group * size;
#pragma unroll 4
      for (int c = static_cast<int>(threadIdx.x) * kCopy; c < size;
           c += static_cast<int>(blockDim.x) * kCopy) {
        cp_async<16>(x + c, from_x + c, true);
        cp_async<16>(dy + c, from_dy + c, true);
      }
    }
    cp_async_commit();
  };
  A next_mean = 0, next_rstd = 0;
  const auto ask_statistics = [&](int64_t group) {
    if (group < groups) next_mean = args.mean[group], next_rstd = args.rstd[group];
  };
  // f(unit, its plane, first and last vector) for the warp's parts of planes
  const auto each_unit = [&](const auto& f) {
#pragma unroll 1
    for (int unit = warp; unit < units; unit += warps) {
      const int plane = unit / plan.split, first = (unit - plane * plan.split) * per_unit;
      f(unit, plane, first, min(first + per_unit, vectors));
    }
  };
  int64_t group = blockIdx.x;
  ask(group);
  ask_statistics(group);
  for (; group < groups; group += gridDim.x) {
    const A mean = next_mean, rstd = next_rstd;
    ask_statistics(group + gridDim.x);
    cp_async_wait<0>();
    __syncthreads();
    const auto values = [&](int at, A(&g)[N], A(&xhat)[N]) {
      Packed<T, N> v;
      v.load(dy + at);
      unpack(v, g);
      v.load(x + at);
      unpack(v, xhat);
#pragma unroll
      for (int k = 0; k < N; ++k) xhat[k] = (xhat[k] - mean) * rstd;
    };
    each_unit([&](int unit, int plane, int first, int last) {
      Pair<A> total{0, 0};
#pragma unroll 2
      for (int v = first + lane; v < last; v += 32) {
        A g[N], xhat[N];
        values(plane * inner + v * N, g, xhat);
#pragma unroll
        for (int k = 0; k < N; ++k) total.first += g[k], total.second += g[k] * xhat[k];
      }
      total = team_reduce<Team::kLanes>(total, 32, AddPairs{});
      if (lane == 0) sums[unit] = total;
    });
    __syncthreads();
    // Each warp merges the planes, in float64.
    const int image = static_cast<int>(group / in_image);
    const int channel = static_cast<int>(group - int64_t{image} * in_image) * channels;
    const auto weight_of = [&](int plane) {
      return parameter_of<T>(args.weight, args.wide, channel + plane, A(1));
    };
    Pair<double> merged{0, 0};
#pragma unroll 1
    for (int plane = lane; plane < channels; plane += 32) {
      Pair<A> total = sums[plane * plan.split];
#pragma unroll 1
      for (int i = 1; i < plan.split; ++i) {
        total = AddPairs{}(total, sums[plane * plan.split + i]);
      }
      if (warp == 0) {
        const int64_t at = image * pitch + channel + plane;
        if (args.sum) args.sum[at] = total.first;
        if (args.dot) args.dot[at] = total.second;
      }
      const double w = weight_of(plane);
      merged.first += w * total.first;
      merged.second += w * total.second;
    }
    merged = team_reduce<Team::kLanes>(merged, 32, AddPairs{});
    if (args.dx) {
      const A by_size = A(1) / static_cast<A>(size);
      const A first_sum = static_cast<A>(merged.first) * by_size;
      const A second_sum = static_cast<A>(merged.second) * by_size;
      each_unit([&](int, int plane, int first, int last) {
        const A w = weight_of(plane);
        T* const to = args.dx + group * size + plane * inner;
#pragma unroll 2
        for (int v = first + lane; v < last; v += 32) {
          A g[N], xhat[N];
          values(plane * inner + v * N, g, xhat);
#pragma unroll
          for (int k = 0; k < N; ++k) g[k] = (g[k] * w - first_sum - xhat[k] * second_sum) * rstd;
          store_as(to + v * N, g);
        }
      });
    }
    __syncthreads();  // x, dy and the sums are free
    ask(group + gridDim.x);
  }
  cp_async_wait<0>();
}

// f(integral constant N): as with_row_vectors, or 4 of 16 bits, which divide more images' planes.
template <typename T, typename F>
void with_plane_vectors(int64_t inner, bool aligned, const F& f) {
  if constexpr (kVecWidth<T> == 8) {
    if (aligned && inner % 8 == 4) return f(std::integral_constant<int, 4>{});
  }
  with_row_vectors<T>(inner, aligned, f);
}

// f(team constant, integral constant N, planes, launch): a team of neighbouring elements for each
// plane, in vectors of N.
template <typename T, typename F>
void with_plane_teams(const GroupNormShape& shape, bool aligned, const F& f) {
  with_plane_vectors<T>(shape.inner, aligned, [&](auto width) {
    const RowShape planes{shape.planes(), shape.inner, 1};
    const TeamLaunch launch = choose_team(planes, decltype(width)::value);
    if (launch.team == Team::kLanes) {
      f(std::integral_constant<Team, Team::kLanes>{}, width, planes, launch);
    } else {
      f(std::integral_constant<Team, Team::kBlock>{}, width, planes, launch);
    }
  });
}

// The parts of the workspace: sums, dots, merged.
template <typename A>
struct Memory {
  A* sum;
  A* dot;
  Pair<A>* merged;

  Memory(void* workspace, const GroupNormShape& shape)
      : sum(static_cast<A*>(workspace)),
        dot(sum + shape.planes()),
        merged(reinterpret_cast<Pair<A>*>(dot + shape.planes())) {}
};

// Whether the forward pass goes over planes: neither threads nor blocks hold a group, even in
// vectors.
template <typename T>
bool is_too_long(const GroupNormShape& shape) {
  constexpr int kWidth = kVecWidth<T>;
  const int64_t size = ceil_div(shape.size(), kWidth) * kWidth;
  if (size > INT32_MAX / 2) return true;
  return plan_held<kWidth, T, PlaneParameters<T, false>>(size).width == 0 &&
         plan_stream<kWidth, T>(size).threads == 0;
}

// The threads and parts of planes that leave the fewest lanes idle, and as few parts as may be. As
// many blocks as there is room for: while one waits for its group, others work.
template <typename T>
HeldGroupPlan plan_held_group(const GroupNormShape& shape, int vector, bool aligned) {
  const int64_t most = most_shared_memory() - 1024, of_group = 2 * shape.size() * sizeof(T);
  HeldGroupPlan best;
  if (!aligned || shape.size() % kVecWidth<T> != 0 || of_group > most) return best;
  if (of_group < kLeastGroupBytes) return best;
  double best_share = 0.5;
  const int64_t vectors = shape.inner / vector;
  for (int split = 1; split <= 4; split *= 2) {
    for (int threads = 256; threads <= kHeldGroupThreads; threads += 64) {
      const int64_t units = shape.channels() * split, warps = threads / 32;
      const int64_t steps = ceil_div(units, warps) * ceil_div(ceil_div(vectors, split), 32);
      const double share = static_cast<double>(vectors * shape.channels()) / (steps * warps * 32);
      const int64_t bytes = of_group + units * sizeof(Pair<acc_t<T>>);
      if (share <= best_share || bytes > most) continue;
      best_share = share;
      const int64_t blocks =
          std::min<int64_t>(most / (bytes + 1024), held_group_sm_threads(vector) / threads);
      best = {threads, split, static_cast<int>(bytes),
              static_cast<int>(std::max<int64_t>(blocks, 1))};
    }
  }
  return best;
}

template <typename T>
void normalise_planes(Stream stream, const GroupNormShape& shape, const PlaneNormArgs<T>& args,
                      bool aligned) {
  with_plane_teams<T>(shape, aligned, [&](auto team, auto width, auto planes, auto launch) {
    constexpr Team kTeam = decltype(team)::value;
    constexpr int N = decltype(width)::value;
    launch_early(plane_moments_kernel<kTeam, N, T>, launch.grid, launch.block, 0, stream, planes,
                 launch.lanes, args);
    const auto blocks = static_cast<unsigned>(ceil_div(shape.rows(), kGroupThreads / 32));
    launch_early(merge_moments_kernel<T>, blocks, kGroupThreads, 0, stream, args, shape.rows(),
                 static_cast<double>(shape.inner));
    launch_early(normalise_planes_kernel<kTeam, N, T>, launch.grid, launch.block, 0, stream, planes,
                 launch.lanes, args);
  });
  check_launch("group_norm");
}

// Sums of planes, and dx, where shared memory does not hold a group.
template <typename T>
void sum_planes(cudaStream_t stream, const GroupNormShape& shape, const PlaneArgs<T>& args,
                bool aligned) {
  with_plane_teams<T>(shape, aligned, [&](auto team, auto width, auto planes, auto launch) {
    constexpr Team kTeam = decltype(team)::value;
    constexpr int N = decltype(width)::value;
    plane_sums_kernel<kTeam, N>
        <<<launch.grid, launch.block, 0, stream>>>(planes, launch.lanes, args);
    check_launch("group_norm_backward");
    if (!args.dx) return;
    const auto blocks = static_cast<unsigned>(ceil_div(shape.rows(), kGroupThreads / 32));
    merge_planes_kernel<<<blocks, kGroupThreads, 0, stream>>>(args, shape.rows(),
                                                              1.0 / shape.size());
    check_launch("group_norm_backward");
    input_grad_kernel<kTeam, N>
        <<<launch.grid, launch.block, 0, stream>>>(planes, launch.lanes, args);
    check_launch("group_norm_backward");
  });
}

}  // namespace

bool group_norm_takes_channels_last() { return true; }
bool group_norm_takes_activation(const GroupNormShape& shape) { return shape.channels_last; }
bool group_norm_takes_float32(const GroupNormShape& shape) { return shape.channels_last; }

int64_t group_norm_forward_workspace_bytes(const GroupNormShape& shape) {
  if (shape.channels_last) return images_forward_workspace_bytes(shape);
  int64_t bytes = 0;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (is_too_long<T>(shape)) {
      using A = acc_t<T>;
      bytes = shape.planes() * sizeof(PlaneMoments<A>) + shape.rows() * sizeof(A);
    }
  });
  return bytes;
}

void group_norm(Stream stream, const GroupNormShape& shape, const void* x,
                const BatchNormAffine& affine, double eps, void* y, void* mean, void* rstd,
                void* workspace) {
  if (shape.channels_last) {
    return normalise_images(stream, shape, x, affine, eps, y, mean, rstd, workspace);
  }
  const bool wide = affine.dtype != shape.dtype;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* const in = static_cast<const T*>(x);
    const bool aligned = is_vec_aligned(in) && is_vec_aligned(static_cast<const T*>(y));
    if (is_too_long<T>(shape)) {
      auto* const moments = static_cast<PlaneMoments<A>*>(workspace);
      const PlaneNormArgs<T> args{in,
                                  static_cast<T*>(y),
                                  affine.weight,
                                  affine.bias,
                                  wide,
                                  static_cast<A>(eps),
                                  moments,
                                  static_cast<A*>(mean),
                                  static_cast<A*>(rstd),
                                  reinterpret_cast<A*>(moments + shape.planes()),
                                  shape.c,
                                  shape.channels()};
      return normalise_planes(stream, shape, args, aligned);
    }
    const NormArgs<T> args{
        in, y, shape.dtype, static_cast<A>(eps), static_cast<A*>(mean), static_cast<A*>(rstd)};
    const bool two_planes_at_most = shape.inner >= kVecWidth<T>;
    with_row_vectors<T>(shape.size(), aligned && two_planes_at_most, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const auto launch = [&](auto across) {
        const PlaneParameters<T, decltype(across)::value> parameters{
            affine.weight,
            affine.bias,
            wide,
            static_cast<int>(shape.groups),
            static_cast<int>(shape.channels()),
            FastDiv(shape.inner)};
        launch_rows<N>(as_cuda(stream), shape.rows(), shape.size(), args, parameters, parameters);
      };
      if constexpr (N > 1) {
        if (shape.inner % N != 0) return launch(std::true_type{});
      }
      launch(std::false_type{});
    });
  });
  check_launch("group_norm");
}

namespace {

// Of what every backward pass has in the workspace: Memory.
int64_t memory_bytes(const GroupNormShape& shape) {
  const int64_t element = shape.dtype == DType::kFloat64 ? 8 : 4;
  return ceil_div(2 * (shape.planes() + shape.rows()) * element, int64_t{64}) * 64;
}

}  // namespace

int64_t group_norm_workspace_bytes(const GroupNormShape& shape) {
  return memory_bytes(shape) + (shape.channels_last ? images_backward_workspace_bytes(shape) : 0);
}

void group_norm_backward(Stream stream, const GroupNormShape& shape, const void* dy, const void* x,
                         const BatchNormAffine& affine, const void* mean, const void* rstd,
                         const GroupNormGradients& gradients, void* workspace) {
  if (!(gradients.x || gradients.weight || gradients.bias)) return;
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const Memory<A> memory(workspace, shape);
    PlaneArgs<T> args{static_cast<const T*>(dy),
                      static_cast<const T*>(x),
                      static_cast<T*>(gradients.x),
                      affine.weight,
                      affine.dtype != shape.dtype,
                      static_cast<const A*>(mean),
                      static_cast<const A*>(rstd),
                      memory.sum,
                      memory.dot,
                      memory.merged,
                      shape.c,
                      shape.channels()};
    const bool aligned =
        is_vec_aligned(args.dy) && is_vec_aligned(args.x) && is_vec_aligned(args.dx);
    // What an image leaves of the parameters' gradients that are wanted, side by side.
    const bool both = gradients.weight && gradients.bias;
    const int64_t pitch = shape.c * (1 + both);
    const auto sums_of_images = [&] {
      args.dot = gradients.weight ? memory.sum : nullptr;
      args.sum = gradients.bias ? memory.sum + both * shape.c : nullptr;
    };
    bool side_by_side = false;
    const auto hold_groups = [&](auto width) {
      constexpr int N = decltype(width)::value;
      if constexpr (N > 1) {
        const HeldGroupPlan plan = plan_held_group<T>(shape, N, aligned);
        if (plan.threads == 0) return;
        side_by_side = true;
        sums_of_images();
        const auto kernel = held_group_kernel<N, T>;
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes);
        const auto blocks = static_cast<unsigned>(
            std::min<int64_t>(shape.rows(), int64_t{sm_count()} * plan.blocks));
        launch_early(kernel, blocks, plan.threads, plan.bytes, stream, shape.rows(),
                     static_cast<int>(shape.groups), static_cast<int>(shape.inner), pitch, plan,
                     args);
        check_launch("group_norm_backward");
      }
    };
    if (shape.channels_last) {
      side_by_side = true;
      sums_of_images();
      image_gradients(stream, shape, dy, x, affine, mean, rstd, gradients.x,
                      {args.dot, args.sum, pitch},
                      static_cast<char*>(workspace) + memory_bytes(shape));
    } else {
      with_plane_vectors<T>(shape.inner, aligned, hold_groups);
      if (!side_by_side) sum_planes<T>(s, shape, args, aligned);
    }
    dispatch(gradients.parameter_dtype, [&](auto parameter_tag) {
      using P = typename decltype(parameter_tag)::type;
      if constexpr (std::is_same_v<acc_t<P>, A>) {
        const int images = static_cast<int>(shape.n);
        P* const weight = static_cast<P*>(gradients.weight);
        P* const bias = static_cast<P*>(gradients.bias);
        if (side_by_side && both) {
          launch_ordered_sum<P>(stream, args.dot, images, shape.c, weight, shape.c, bias);
          return;
        }
        if (weight) launch_ordered_sum<P>(stream, args.dot, images, shape.c, weight);
        if (bias) launch_ordered_sum<P>(stream, args.sum, images, shape.c, bias);
      }
    });
  });
}

}  // namespace braze::cuda
