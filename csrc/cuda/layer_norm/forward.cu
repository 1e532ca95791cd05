// Layer norm's forward pass over rows: one read of x, one write of y. See row.cuh.
#include "long.cuh"
#include "row.cuh"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"layer_norm", "rows", "float64 float32 bfloat16 float16", "sm_80+", true,
                          "a team of threads per row, which is held in registers"});

template <typename T>
constexpr int kMostHeld = sizeof(T) == 4 ? 16 : 8;

constexpr int kLaneThreads = 256;  // of a block of teams of lanes
constexpr int kBlocksPerSm = 32;   // at most, so that a block's start is paid for by several rows

// The mean is pivot + rest: rounded to the type alone it would take away from the deviations where
// it is large beside them. The deviations from the pivot are exact then.
template <Team kTeam, int N, int kHeld, typename T>
__global__ void __launch_bounds__(kMaxTeamThreads)
    layer_norm_kernel(RowShape shape, int width, const T* x, NormArgs<T> args) {
  using A = acc_t<T>;
  const A count = static_cast<A>(shape.size);
  for_each_row<kTeam>(shape, width, [&](const RowPart& part) {
    Packed<T, N> held[kHeld];
    const int size = static_cast<int>(part.size);
    const auto each = [&](const auto& f) {
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        const int c = (u * part.width + part.rank) * N;
        if (c < size) f(c, held[u]);
      }
    };
    const T* const from = x + part.base;
    each([&](int c, Packed<T, N>& v) { v.load(from + c); });
    Pair<A> total{0, 0};
    each([&](int, const Packed<T, N>& packed) {
      A v[N];
      unpack(packed, v);
#pragma unroll
      for (int k = 0; k < N; ++k) total.first += v[k];
    });
    const A pivot = team_reduce<kTeam>(total, part.width, AddPairs{}).first / count;
    total = {0, 0};
    each([&](int, const Packed<T, N>& packed) {
      A v[N];
      unpack(packed, v);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A d = v[k] - pivot;
        total.first += d;
        total.second += d * d;
      }
    });
    total = team_reduce<kTeam>(total, part.width, AddPairs{});
    const NormRow<A> row = args.finish(part, pivot, total, count);
    each([&](int c, const Packed<T, N>& packed) {
      A v[N];
      unpack(packed, v);
      args.template store<N>(row, part.base, c, v);
    });
  });
}

template <typename T, int N>
void launch_forward(cudaStream_t stream, const LayerNormShape& shape, const T* x,
                    const NormArgs<T>& args) {
  const RowShape rows{shape.rows, shape.size, 1};
  const HeldRowPlan plan =
      plan_held_row(shape.size / N, N == 1, N == 1 ? kMostScalars : kMostHeld<T>, kMaxTeamThreads);
  const int64_t most = int64_t{sm_count()} * kBlocksPerSm;
  if (plan.team == Team::kBlock) {
    const int grid = static_cast<int>(std::min(shape.rows, most));
    long_row_kernel<N, T><<<grid, kMaxTeamThreads, 0, stream>>>(rows, x, args);
    return;
  }
  const int threads = plan.team == Team::kLanes ? kLaneThreads : plan.width;
  const int grid = static_cast<int>(std::min(ceil_div(shape.rows, threads / plan.width), most));
  dispatch_held<N, kMostHeld<T>>(plan, [&](auto team, auto held) {
    layer_norm_kernel<decltype(team)::value, N, decltype(held)::value, T>
        <<<grid, threads, 0, stream>>>(rows, plan.width, x, args);
  });
}

}  // namespace

void layer_norm(Stream stream, const LayerNormShape& shape, const void* x,
                const BatchNormAffine& affine, double eps, void* y, void* mean, void* rstd) {
  if (shape.count() == 0) return;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* const in = static_cast<const T*>(x);
    const NormArgs<T> args{affine.weight,
                           affine.bias,
                           affine.dtype != shape.dtype,
                           y,
                           shape.result != shape.dtype,
                           static_cast<A>(eps),
                           static_cast<A*>(mean),
                           static_cast<A*>(rstd)};
    const bool aligned = is_vec_aligned(in) && is_vec_aligned(static_cast<const T*>(y)) &&
                         is_vec_aligned(static_cast<const T*>(affine.weight)) &&
                         is_vec_aligned(static_cast<const T*>(affine.bias));
    with_row_vectors<T>(shape.size, aligned, [&](auto width) {
      launch_forward<T, decltype(width)::value>(as_cuda(stream), shape, in, args);
    });
  });
  check_launch("layer_norm");
}

}  // namespace braze::cuda
