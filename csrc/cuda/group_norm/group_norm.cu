// Group norm of [n, c, inner], and instance norm, whose groups are channels. A group in an image is
// a row of neighbouring elements, so that the forward pass is layer norm's with other parameters
// (csrc/cuda/layer_norm/normalise.cuh). Backward each plane, a channel in an image, is summed by a
// team of threads; a small kernel merges a group's planes, launch_ordered_sum a channel's, and a
// pass over the planes makes dx. No atomics: bitwise repeatable.
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

constexpr int kGroupThreads = 128;  // of merge_planes_kernel, a warp per group

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
    A weight_here[1], bias_here[1];
    load_parameters<1, T>(weight, wide, channel, A(1), weight_here);
    load_parameters<1, T>(bias, wide, channel, A(0), bias_here);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      w[k] = k < from ? w[k] : weight_here[0];
      b[k] = k < from ? b[k] : bias_here[0];
    }
  }
};

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
    A w[1];
    load_parameters<1, T>(weight, wide, plane % c, A(1), w);
    return w[0];
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

// f(team constant) for teams of neighbouring elements.
template <typename F>
void with_team(Team team, const F& f) {
  if (team == Team::kLanes) return f(std::integral_constant<Team, Team::kLanes>{});
  f(std::integral_constant<Team, Team::kBlock>{});
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

}  // namespace

void group_norm(Stream stream, const GroupNormShape& shape, const void* x,
                const BatchNormAffine& affine, double eps, void* y, void* mean, void* rstd) {
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const NormArgs<T> args{
        static_cast<const T*>(x), y, shape.dtype, static_cast<A>(eps), static_cast<A*>(mean),
        static_cast<A*>(rstd)};
    const PlaneParameters<T> parameters{
        affine.weight, affine.bias,      affine.dtype != shape.dtype,
        shape.groups,  shape.channels(), shape.inner};
    const bool aligned = is_vec_aligned(args.x) && is_vec_aligned(static_cast<const T*>(y));
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
    with_plane_vectors<T>(shape.inner, aligned, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const RowShape planes{shape.planes(), shape.inner, 1};
      const TeamLaunch launch = choose_team(planes, N);
      with_team(launch.team, [&](auto team) {
        constexpr Team kTeam = decltype(team)::value;
        plane_sums_kernel<kTeam, N>
            <<<launch.grid, launch.block, 0, s>>>(planes, launch.lanes, args);
        check_launch("group_norm_backward");
        if (!gradients.x) return;
        const auto blocks = static_cast<unsigned>(ceil_div(shape.rows(), kGroupThreads / 32));
        merge_planes_kernel<<<blocks, kGroupThreads, 0, s>>>(args, shape.rows(),
                                                             1.0 / shape.size());
        check_launch("group_norm_backward");
        input_grad_kernel<kTeam, N>
            <<<launch.grid, launch.block, 0, s>>>(planes, launch.lanes, args);
        check_launch("group_norm_backward");
      });
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
