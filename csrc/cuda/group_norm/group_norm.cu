// Group norm of [n, c, inner], and instance norm, whose groups are channels. A group in an image is
// a row of neighbouring elements, so that the forward pass is layer norm's with other parameters
// (csrc/cuda/layer_norm/normalise.cuh). Where a row is too long to be held, and backward, each
// plane, a channel in an image, is summed by a team of threads; a small kernel merges a group's
// planes, launch_ordered_sum a channel's, and a pass over the planes makes y or dx. No atomics:
// bitwise repeatable.
//
// Bytes per element of a 16-bit tensor: forward 4 (x, y), 6 where a row is too long to be held;
// backward 10: dy, x for the sums; dy, x, dx.
#include "launchers/group_norm.h"

#include "cuda/common/ordered_sum.cuh"
#include "cuda/layer_norm/normalise.cuh"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"group_norm", "planes", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "rows held in registers; backward, sums of planes"});

constexpr int kGroupThreads = 128;  // of kernels with a warp per group

// A channel's parameter, of T or, where `wide`, of acc_t<T>; `absent` where there is none.
template <typename T>
__device__ __forceinline__ acc_t<T> parameter_of(const void* values, bool wide, int64_t channel,
                                                 acc_t<T> absent) {
  acc_t<T> p[1];
  load_parameters<1, T>(values, wide, channel, absent, p);
  return p[0];
}

// A weight and a bias for each plane of at least N elements, so that a vector has those of two at
// most.
template <typename T>
struct PlaneParameters {
  using A = acc_t<T>;

  const void* weight;
  const void* bias;
  bool wide;  // float32 beside a 16-bit T
  int64_t groups, channels, inner;

  template <int N>
  __device__ __forceinline__ void load(int64_t row, int64_t c, A (&w)[N], A (&b)[N]) const {
    // In 32 bits where they do: a division of 64 bits takes a hundred instructions.
    const int64_t in_group =
        (c | inner) >> 31 ? c / inner : static_cast<int>(c) / static_cast<int>(inner);
    const int64_t channel = row % groups * channels + in_group;
    fill(w, b, channel, 0);
    const int64_t rest = (in_group + 1) * inner - c;  // of this plane, from c on
    if (rest < N) fill(w, b, channel + 1, static_cast<int>(rest));
  }

 private:
  template <int N>
  __device__ __forceinline__ void fill(A (&w)[N], A (&b)[N], int64_t channel, int from) const {
    const A weight_here = parameter_of<T>(weight, wide, channel, A(1));
    const A bias_here = parameter_of<T>(bias, wide, channel, A(0));
#pragma unroll
    for (int k = 0; k < N; ++k) {
      w[k] = k < from ? w[k] : weight_here;
      b[k] = k < from ? b[k] : bias_here;
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

// Whether the forward pass goes over planes: no team holds a group, even in vectors.
template <typename T>
bool is_too_long(const GroupNormShape& shape) {
  constexpr int kWidth = kVecWidth<T>;
  return plan_row<kWidth, T>(ceil_div(shape.size(), kWidth) * kWidth).team == Team::kBlock;
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

}  // namespace

int64_t group_norm_forward_workspace_bytes(const GroupNormShape& shape) {
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
    const PlaneParameters<T> parameters{affine.weight, affine.bias,      wide,
                                        shape.groups,  shape.channels(), shape.inner};
    const bool two_planes_at_most = shape.inner >= kVecWidth<T>;
    with_row_vectors<T>(shape.size(), aligned && two_planes_at_most, [&](auto width) {
      launch_rows<decltype(width)::value>(as_cuda(stream), shape.rows(), shape.size(), args,
                                          parameters);
    });
  });
  check_launch("group_norm");
}

int64_t group_norm_workspace_bytes(const GroupNormShape& shape) {
  const int64_t element = shape.dtype == DType::kFloat64 ? 8 : 4;
  return 2 * (shape.planes() + shape.rows()) * element;
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
    const PlaneArgs<T> args{static_cast<const T*>(dy),
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
    with_plane_teams<T>(shape, aligned, [&](auto team, auto width, auto planes, auto launch) {
      constexpr Team kTeam = decltype(team)::value;
      constexpr int N = decltype(width)::value;
      plane_sums_kernel<kTeam, N><<<launch.grid, launch.block, 0, s>>>(planes, launch.lanes, args);
      check_launch("group_norm_backward");
      if (!gradients.x) return;
      const auto blocks = static_cast<unsigned>(ceil_div(shape.rows(), kGroupThreads / 32));
      merge_planes_kernel<<<blocks, kGroupThreads, 0, s>>>(args, shape.rows(), 1.0 / shape.size());
      check_launch("group_norm_backward");
      input_grad_kernel<kTeam, N><<<launch.grid, launch.block, 0, s>>>(planes, launch.lanes, args);
      check_launch("group_norm_backward");
    });
    dispatch(gradients.parameter_dtype, [&](auto parameter_tag) {
      using P = typename decltype(parameter_tag)::type;
      if constexpr (std::is_same_v<acc_t<P>, A>) {
        const int images = static_cast<int>(shape.n);
        const auto sum = [&](const A* from, void* to) {
          if (to) launch_ordered_sum<P>(stream, from, images, shape.c, static_cast<P*>(to));
        };
        sum(args.dot, gradients.weight);
        sum(args.sum, gradients.bias);
      }
    });
  });
}

}  // namespace braze::cuda
