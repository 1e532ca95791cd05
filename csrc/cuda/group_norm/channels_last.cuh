// Group norm of channels_last images, by batch norm's passes over rows of pixels
// (csrc/cuda/batch_norm/rows.cuh): parts of the rows that are of one image each leave their sums of
// each channel, a team of threads merges those of a group in an image, in float64, and a pass makes
// y or dx. A vector may have channels of several groups.
#pragma once

#include "cuda/batch_norm/layout.cuh"
#include "cuda/common/activate.cuh"
#include "cuda/common/fast_div.cuh"
#include "cuda/layer_norm/row.cuh"

namespace braze::cuda {

// Where an image's groups and the parts of its pixels are.
struct ImageGroups {
  int64_t c;
  int groups;        // of an image
  FastDiv parts;     // of an image's pixels
  FastDiv channels;  // of a group

  __device__ __forceinline__ int channels_of_group() const { return channels.divisor(); }
};

// As `plan` has it, but every part is of one image.
inline RowPlan with_parts_of_images(RowPlan plan, int64_t images) {
  const int64_t most = ceil_div(plan.rows / images, plan.height);
  plan.parts = static_cast<int>(images * std::clamp<int64_t>(plan.parts / images, 1, most));
  return plan;
}

// Of values of groups, those of the N channels from `channel` on.
template <int N, typename A>
__device__ __forceinline__ PerElement<A, N, false> of_their_groups(const ImageGroups& g,
                                                                   const A* values, int64_t image,
                                                                   int64_t channel) {
  PerElement<A, N, false> result;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    result.v[k] = values[image * g.groups + g.channels.div(static_cast<int>(channel) + k)];
  }
  return result;
}

template <typename T>
struct ImageNormArgs {
  using A = acc_t<T>;

  const T* x;
  const void* weight;
  const void* bias;
  bool wide;  // float32 parameters beside a 16-bit T
  double eps;
  A* mean;  // of groups, as rstd
  A* rstd;
  A* scale;  // of an image's channels, as shift: y = f((x - mean) scale + shift)
  A* shift;
  ActivationArgs<A> activation;
};

constexpr int kImageTeamThreads = 128;  // of a block of teams

// The sum over a team of kLanes threads, in all of them.
template <int kLanes>
__device__ __forceinline__ double sum_of_team(double v) {
  if constexpr (kLanes <= 32) {
    return team_sum<kLanes>(v);
  } else {
    return block_sum<kLanes>(v);
  }
}

// A thread's place: which group of which image its team has, or beyond the last.
template <int kLanes>
struct ImageTeam {
  int64_t number;  // of the group among all
  int64_t image;
  int channel;  // the group's first
  int lane;

  __device__ __forceinline__ explicit ImageTeam(const ImageGroups& g)
      : number((blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kLanes),
        image(number / g.groups),
        channel(static_cast<int>(number - image * g.groups) * g.channels_of_group()),
        lane(static_cast<int>(threadIdx.x) % kLanes) {}
};

// A team merges the parts of each group's channels: mean and rstd, and what y is made with.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kLanes > kImageTeamThreads ? kLanes : kImageTeamThreads)
    merge_image_moments_kernel(const MomentsPartial* partials, int64_t all_parts, int64_t groups,
                               double count, ImageGroups g, ImageNormArgs<T> args) {
  using A = acc_t<T>;
  wait_for_earlier_kernels();
  const ImageTeam<kLanes> team(g);
  if (team.number >= groups) return;  // whole teams
  const int channels = g.channels_of_group(), items = channels * g.parts.divisor();
  const MomentsPartial* const from =
      partials + team.channel * all_parts + team.image * g.parts.divisor();
  const auto summed = [&](const auto& f) {
    double sum = 0;
#pragma unroll 4
    for (int i = team.lane; i < items; i += kLanes) {
      int part;
      const int channel = g.parts.div(i, part);
      sum += f(from[channel * all_parts + part]);
    }
    return sum_of_team<kLanes>(sum);
  };
  const double mean = summed([](const MomentsPartial& p) { return p.mean * p.count; }) / count;
  const double squares = summed([&](const MomentsPartial& p) {
    const double d = p.mean - mean;
    return p.squares + p.count * d * d;
  });
  const double rstd = rsqrt(squares / count + args.eps);
  const A rounded = static_cast<A>(mean);
  if (team.lane == 0) {
    args.mean[team.number] = rounded;
    args.rstd[team.number] = static_cast<A>(rstd);
  }
  const double lost = (mean - static_cast<double>(rounded)) * rstd;
  for (int i = team.lane; i < channels; i += kLanes) {
    const int channel = team.channel + i;
    const double w = parameter_of<T>(args.weight, args.wide, channel, A(1));
    const double b = parameter_of<T>(args.bias, args.wide, channel, A(0));
    args.scale[team.image * g.c + channel] = static_cast<A>(rstd * w);
    args.shift[team.image * g.c + channel] = static_cast<A>(b - lost * w);
  }
}

// kActs: whether there is an activation, of the code kCode. Out: the result's elements.
template <typename T, typename Out, int N, bool kActs, ActivationCode kCode>
__global__ void __launch_bounds__(kMostRowThreads)
    normalise_images_kernel(RowPlan plan, ImageGroups g, ImageNormArgs<T> args, Out* y) {
  using A = acc_t<T>;
  using Coefficients = PerElement<A, N, false>;
  constexpr int U = kRowLoads;
  wait_for_earlier_kernels();
  const BackwardRowWorker<N> me(plan);
  if (!me.works) return;
  const int64_t image = g.parts.div(me.part);
  const Coefficients center = of_their_groups<N>(g, args.mean, image, me.channel);
  const Coefficients scale(args.scale, image * g.c + me.channel);
  const Coefficients shift(args.shift, image * g.c + me.channel);
  Packed<T, N> x[U];
  each_row_backwards<U>(
      plan, me, [&](int u, int64_t offset) { x[u].load(args.x + offset); },
      [&](int u, int64_t offset) {
        A v[N];
        unpack(x[u], v);
#pragma unroll
        for (int k = 0; k < N; ++k) v[k] = normalized(v[k] - center[k], scale[k], shift[k]);
        if constexpr (kActs) activate<kCode, T>(v, args.activation);
        store_as(y + offset, v);
      });
}

template <typename T>
struct ImageGradArgs {
  using A = acc_t<T>;

  const T* x;
  T* dx;  // or nullptr
  const void* weight;
  const void* bias;
  bool wide;
  const A* mean;  // of groups, as rstd
  const A* rstd;
  A* dot;  // of an image's channels: sums of dv xhat, or nullptr
  A* sum;  // of dv, or nullptr
  int64_t pitch;
  A* by_grad;   // of an image's channels: dx = dv by_grad + (x - mean) by_input + constant
  A* by_input;  // of groups, as constant
  A* constant;
  ActivationArgs<A> activation;
};

// What N channels' gradients pass back through: dv of dy, of which v = (x - mean) scale + shift.
template <typename T, int N, bool kActs, ActivationCode kCode>
struct ImageBefore {
  using A = acc_t<T>;
  A scale[kActs ? N : 1], shift[kActs ? N : 1];

  __device__ __forceinline__ ImageBefore(const ImageGroups& g, const ImageGradArgs<T>& args,
                                         int64_t image, int64_t channel) {
    if constexpr (kActs) {
      const auto rstd = of_their_groups<N>(g, args.rstd, image, channel);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        scale[k] = rstd[k] * parameter_of<T>(args.weight, args.wide, channel + k, A(1));
        shift[k] = parameter_of<T>(args.bias, args.wide, channel + k, A(0));
      }
    }
  }
  __device__ __forceinline__ void pass(A (&grad)[N], const A (&deviation)[N],
                                       const ActivationArgs<A>& activation) const {
    if constexpr (kActs) {
      A v[N];
#pragma unroll
      for (int k = 0; k < N; ++k) v[k] = normalized(deviation[k], scale[k], shift[k]);
      pass_back<kCode, T>(grad, v, activation);
    }
  }
};

// Sums of dv and of dv (x - mean) of each channel over a part.
template <typename T, typename Out, int N, bool kActs, ActivationCode kCode>
__global__ void __launch_bounds__(kMostRowThreads)
    image_sums_kernel(RowPlan plan, ImageGroups g, ImageGradArgs<T> args, const Out* of_output,
                      GradPartial<acc_t<T>>* __restrict__ partials) {
  using A = acc_t<T>;
  constexpr int U = kSumLoads / 2;
  __shared__ RowTotals<A, 2, N> shared;
  wait_for_earlier_kernels();
  const RowWorker<N> me(plan, blockIdx.x);
  A v[2][N] = {};
  if (me.works) {
    const int64_t image = g.parts.div(me.part);
    const auto center = of_their_groups<N>(g, args.mean, image, me.channel);
    const ImageBefore<T, N, kActs, kCode> before(g, args, image, me.channel);
    Packed<Out, N> dy[U];
    Packed<T, N> x[U];
    each_row_forwards<U>(
        plan, me,
        [&](int u, int64_t offset) {
          dy[u].load(of_output + offset);
          x[u].load(args.x + offset);
        },
        [&](int u, int64_t) {
          A grad[N], in[N];
          unpack(dy[u], grad);
          unpack(x[u], in);
#pragma unroll
          for (int k = 0; k < N; ++k) in[k] -= center[k];
          before.pass(grad, in, args.activation);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            v[0][k] += grad[k];
            v[1][k] += grad[k] * in[k];
          }
        });
  }
  A totals[2];
  row_totals(v, totals, shared, plan);
  for_my_total<N>(plan, [&](int64_t channel) {
    partials[channel * plan.parts + blockIdx.x] = {totals[0], totals[1]};
  });
}

// A team merges the parts of each group's channels: the sums that the parameters' gradients are
// made of, and what dx is made with. kByParts: its threads share out the parts of a channel, else
// the channels.
template <typename T, int kLanes, bool kByParts>
__global__ void __launch_bounds__(kLanes > kImageTeamThreads ? kLanes : kImageTeamThreads)
    merge_image_sums_kernel(const GradPartial<acc_t<T>>* partials, int64_t all_parts,
                            int64_t groups, double by_size, ImageGroups g, ImageGradArgs<T> args) {
  using A = acc_t<T>;
  wait_for_earlier_kernels();
  const ImageTeam<kLanes> team(g);
  if (team.number >= groups) return;  // whole teams
  const int channels = g.channels_of_group();
  const GradPartial<A>* const from =
      partials + team.channel * all_parts + team.image * g.parts.divisor();
  const double rstd = args.rstd[team.number];
  double gradients = 0, products = 0;  // sums of dv weight, and of these times xhat
  const auto add = [&](int i, double sum, double dot, bool stores) {
    const int channel = team.channel + i;
    const double w = parameter_of<T>(args.weight, args.wide, channel, A(1));
    gradients += w * sum;
    products += w * dot;
    if (!stores) return;
    const int64_t at = team.image * args.pitch + channel;
    if (args.sum) args.sum[at] = static_cast<A>(sum);
    if (args.dot) args.dot[at] = static_cast<A>(dot);
    if (args.dx) args.by_grad[team.image * g.c + channel] = static_cast<A>(rstd * w);
  };
  if constexpr (kByParts) {
    for (int i = 0; i < channels; ++i) {
      double sum = 0, dot = 0;
#pragma unroll 4
      for (int part = team.lane; part < g.parts.divisor(); part += kLanes) {
        const GradPartial<A> p = from[i * all_parts + part];
        sum += p.sum;
        dot += p.dot;
      }
      sum = sum_of_team<kLanes>(sum);
      dot = sum_of_team<kLanes>(dot);
      add(i, sum, dot * rstd, team.lane == 0);
    }
  } else {
    for (int i = team.lane; i < channels; i += kLanes) {
      double sum = 0, dot = 0;
#pragma unroll 4
      for (int part = 0; part < g.parts.divisor(); ++part) {
        const GradPartial<A> p = from[i * all_parts + part];
        sum += p.sum;
        dot += p.dot;
      }
      add(i, sum, dot * rstd, true);
    }
    gradients = sum_of_team<kLanes>(gradients);
    products = sum_of_team<kLanes>(products);
  }
  if (args.dx && team.lane == 0) {
    args.by_input[team.number] = static_cast<A>(-rstd * rstd * products * by_size);
    args.constant[team.number] = static_cast<A>(-rstd * gradients * by_size);
  }
}

template <typename T, typename Out, int N, bool kActs, ActivationCode kCode>
__global__ void __launch_bounds__(kMostRowThreads)
    image_input_grad_kernel(RowPlan plan, ImageGroups g, ImageGradArgs<T> args,
                            const Out* of_output) {
  using A = acc_t<T>;
  using Coefficients = PerElement<A, N, false>;
  constexpr int U = kRowLoads / 2;
  wait_for_earlier_kernels();
  const BackwardRowWorker<N> me(plan);
  if (!me.works) return;
  const int64_t image = g.parts.div(me.part);
  const Coefficients center = of_their_groups<N>(g, args.mean, image, me.channel);
  const Coefficients by_input = of_their_groups<N>(g, args.by_input, image, me.channel);
  const Coefficients constant = of_their_groups<N>(g, args.constant, image, me.channel);
  const Coefficients by_grad(args.by_grad, image * g.c + me.channel);
  const ImageBefore<T, N, kActs, kCode> before(g, args, image, me.channel);
  Packed<Out, N> dy[U];
  Packed<T, N> x[U];
  each_row_backwards<U>(
      plan, me,
      [&](int u, int64_t offset) {
        dy[u].load(of_output + offset);
        x[u].load(args.x + offset);
      },
      [&](int u, int64_t offset) {
        A grad[N], in[N];
        unpack(dy[u], grad);
        unpack(x[u], in);
#pragma unroll
        for (int k = 0; k < N; ++k) in[k] -= center[k];
        before.pass(grad, in, args.activation);
        Vec<T, N> dx;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          dx.v[k] = convert<T>(grad[k] * by_grad[k] + (in[k] * by_input[k] + constant[k]));
        }
        store_vec(args.dx + offset, dx);
      });
}

}  // namespace braze::cuda
