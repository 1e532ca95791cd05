// softmax and log_softmax, memory-bound: one pass over a row finds its maximum and its sum
// together, a second, served by L1 or L2, writes the result. ladder/ leads up to it.
#include "launchers/softmax.h"

#include "row_team.cuh"

namespace braze::cuda {
namespace {

template <Team kTeam, int N, typename In, typename Out>
__global__ void __launch_bounds__(kMaxTeamThreads)
    softmax_kernel(RowShape shape, int lanes, bool log_result, const In* x, Out* y) {
  using A = acc_t<In>;
  for_each_row<kTeam>(shape, lanes, [&](const RowPart& part) {
    Pair<A> state = OnlineSum<A>::identity();
    part.template for_each<N>([&](int64_t, int64_t offset) {
      A v[N];
      load_acc<N>(x + offset, v);
      OnlineSum<A>::template add<N>(state, v);
    });
    state = team_reduce<kTeam>(state, part.width, OnlineSum<A>{});
    const A maximum = state.first;
    const A log_sum = log_result ? log(state.second) : A(0);
    const A scale = A(1) / state.second;
    part.template for_each<N>([&](int64_t, int64_t offset) {
      A v[N];
      load_acc<N>(x + offset, v);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A shifted = v[k] - maximum;
        v[k] = log_result ? shifted - log_sum : exp(shifted) * scale;
      }
      store_acc<N>(y + offset, v);
    });
  });
}

template <Team kTeam, int N, typename In, typename Out>
__global__ void __launch_bounds__(kMaxTeamThreads)
    softmax_backward_kernel(RowShape shape, int lanes, bool log_result, const Out* dy, const Out* y,
                            In* dx) {
  using A = acc_t<In>;
  for_each_row<kTeam>(shape, lanes, [&](const RowPart& part) {
    Pair<A> state{A(0), A(0)};
    part.template for_each<N>([&](int64_t, int64_t offset) {
      A grad[N], result[N];
      load_acc<N>(dy + offset, grad);
      if (!log_result) load_acc<N>(y + offset, result);
#pragma unroll
      for (int k = 0; k < N; ++k) state.first += log_result ? grad[k] : grad[k] * result[k];
    });
    const A sum = team_reduce<kTeam>(state, part.width, AddPairs{}).first;
    part.template for_each<N>([&](int64_t, int64_t offset) {
      A grad[N], result[N];
      load_acc<N>(dy + offset, grad);
      load_acc<N>(y + offset, result);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        grad[k] = log_result ? grad[k] - exp(result[k]) * sum : result[k] * (grad[k] - sum);
      }
      store_acc<N>(dx + offset, grad);
    });
  });
}

// f(input tag, result tag) for the pairs of dtypes that exist.
template <typename F>
void dispatch_pair(DType input, DType result, F&& f) {
  dispatch(input, [&](auto tag) {
    if constexpr (sizeof(typename decltype(tag)::type) == 2) {
      if (result == DType::kFloat32) return f(tag, TypeTag<float>{});
    }
    f(tag, tag);
  });
}

// f(team constant, vector width constant, launch): the widest vectors that the rows allow.
template <int N, typename F>
void dispatch_rows(const RowShape& shape, bool aligned, F&& f) {
  const bool vectors = aligned && shape.inner == 1 && shape.size % N == 0;
  const TeamLaunch launch = choose_team(shape, vectors ? N : 1);
  dispatch_team(launch.team, [&](auto team) {
    if constexpr (decltype(team)::value != Team::kColumn) {
      if (vectors) return f(team, std::integral_constant<int, N>{}, launch);
    }
    f(team, std::integral_constant<int, 1>{}, launch);
  });
}

template <typename A, typename B>
constexpr int kCommonWidth = kVecWidth<A> < kVecWidth<B> ? kVecWidth<A> : kVecWidth<B>;

}  // namespace

void softmax(Stream stream, DType input_dtype, DType result_dtype, bool log, const RowShape& shape,
             const void* x, void* y) {
  if (shape.rows() == 0 || shape.size == 0) return;
  dispatch_pair(input_dtype, result_dtype, [&](auto input_tag, auto result_tag) {
    using In = typename decltype(input_tag)::type;
    using Out = typename decltype(result_tag)::type;
    const In* in = static_cast<const In*>(x);
    Out* out = static_cast<Out*>(y);
    const bool aligned = is_vec_aligned(in) && is_vec_aligned(out);
    dispatch_rows<kCommonWidth<In, Out>>(
        shape, aligned, [&](auto team, auto width, const TeamLaunch& launch) {
          softmax_kernel<decltype(team)::value, decltype(width)::value>
              <<<launch.grid, launch.block, 0, as_cuda(stream)>>>(shape, launch.lanes, log, in,
                                                                  out);
        });
    check_launch("softmax");
  });
}

void softmax_backward(Stream stream, DType input_dtype, DType result_dtype, bool log,
                      const RowShape& shape, const void* dy, const void* y, void* dx) {
  if (shape.rows() == 0 || shape.size == 0) return;
  dispatch_pair(input_dtype, result_dtype, [&](auto input_tag, auto result_tag) {
    using In = typename decltype(input_tag)::type;
    using Out = typename decltype(result_tag)::type;
    const Out* grad = static_cast<const Out*>(dy);
    const Out* result = static_cast<const Out*>(y);
    In* out = static_cast<In*>(dx);
    const bool aligned = is_vec_aligned(grad) && is_vec_aligned(result) && is_vec_aligned(out);
    dispatch_rows<kCommonWidth<In, Out>>(
        shape, aligned, [&](auto team, auto width, const TeamLaunch& launch) {
          softmax_backward_kernel<decltype(team)::value, decltype(width)::value>
              <<<launch.grid, launch.block, 0, as_cuda(stream)>>>(shape, launch.lanes, log, grad,
                                                                  result, out);
        });
    check_launch("softmax_backward");
  });
}

}  // namespace braze::cuda
