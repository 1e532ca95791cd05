// Forward passes over rows, for layer norm and group norm, whose parameters belong to other
// elements: one read of x, one write of y.
//
// P, the parameters, has
//   int64_t first(int64_t row)                where those of a row begin
//   template <int N> Held                     what is kept of those of N elements
//   hold(int64_t first, int64_t c, Held<N>&)  those from c on of a row
//   get(Held<N>&, A (&weight)[N], A (&bias)[N])
//   kFixed                                    whether they are the same for all rows
//   kWidest                                   team for rows in registers; longer ones are streamed
//   kLong                                     whether a thread has room for those of 64 elements
#pragma once

#include "stream.cuh"

namespace braze::cuda {

// Of a block of teams of up to as many threads, and how many blocks a multiprocessor has.
constexpr int kHeldThreads = 256;
constexpr int kHeldBlocks = 2;
// Rows on their way to each team: 64 KB a multiprocessor.
constexpr int held_ahead(int bytes) { return bytes > 64 ? 1 : 2; }  // bytes: of a thread
constexpr int kLongVectors = 8;  // of the longest rows, which stay in shared memory

constexpr int held_threads(int width) { return width == kTeamOfWarps ? kWidestTeam : kHeldThreads; }

template <int kWidth, int N, int kVectors, typename T, typename P>
__global__ void __launch_bounds__(held_threads(kWidth),
                                  kHeldThreads* kHeldBlocks / held_threads(kWidth))
    held_row_kernel(RowShape shape, int width, NormArgs<T> args, P parameters) {
  using A = acc_t<T>;
  using X = Slots<T, N, kVectors>;
  constexpr int kAhead = held_ahead(kVectors * N * sizeof(T));
  constexpr bool kLong = kVectors * N > 32;
  extern __shared__ __align__(16) unsigned char shared[];
  const TeamPlace<kWidth> place(width);
  unsigned char* const slots = shared + place.warp() * (kAhead + 1) * X::kBytes;
  const int size = static_cast<int>(shape.size), step = place.lanes * N;
  const int column = place.template first_vector<kVectors>() * N;
  const A by_size = A(1) / static_cast<A>(size);
  wait_for_earlier_kernels();
  const int64_t first_row = int64_t{blockIdx.x} * place.teams();
  const int64_t stride = int64_t{gridDim.x} * place.teams(), row_step = stride * size;
  int64_t offset = (first_row + place.team()) * size + column, asked = offset;
  const auto ask = [&](int64_t row, int stage) {
    const int left = row < shape.outer ? size - column : 0;
    const X x(slots + stage * X::kBytes);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) x.ask(u, args.x + asked + u * step, u * step < left);
    asked += row_step;
  };
  typename P::template Held<N> held[kVectors];
  const auto hold = [&](int64_t first) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      held[u] = {};
      if (column + u * step < size) parameters.hold(first, column + u * step, held[u]);
    }
  };
  const auto start = [&] {
    if constexpr (P::kFixed) hold(parameters.first(0));
  };
  int turn = 0;
  for_each_row_in_slots<kAhead>(
      shape.outer, first_row, stride, place.team(), ask, start, [&](int64_t row, int stage) {
        const int left = row < shape.outer ? size - column : 0;
        Packed<T, N> x[kLong ? 1 : kVectors];
        const X from(slots + stage * X::kBytes);
        const auto values = [&](int u, A(&v)[N]) {
          if constexpr (kLong) {
            unpack(from.again(u), v);
          } else {
            unpack(x[u], v);
          }
        };
        if constexpr (!kLong) {
#pragma unroll
          for (int u = 0; u < kVectors; ++u) x[u] = from[u];  // zeros past the row's end
        }
        const auto hold_of_row = [&] {
          if constexpr (!P::kFixed) {
            if (left > 0) hold(parameters.first(row));
          }
        };
        A pivot;
        Pair<A> deviations{0, 0};
        const auto add_all = [&] {
#pragma unroll
          for (int u = 0; u < kVectors; ++u) {
            A v[N];
            values(u, v);
            if (column + u * step < size)
              add_deviations(deviations.first, deviations.second, v, pivot);
          }
        };
        if constexpr (sizeof(T) == 2) {
          pivot = pivot_of<A, N>(values, [&](int u) { return column + u * step < size; });
          pivot = first_of_team(pivot, place);
          add_all();
          hold_of_row();
          A sums[2] = {deviations.first, deviations.second};
          team_moments<kVectors * N * 32>(pivot, sums, size, place, turn);
          deviations = {sums[0], sums[1]};
        } else {
          A total[1] = {};
#pragma unroll
          for (int u = 0; u < kVectors; ++u) {
            A v[N];
            values(u, v);
#pragma unroll
            for (int k = 0; k < N; ++k) total[0] += v[k];
          }
          hold_of_row();
          team_sums(total, place, turn);
          pivot = quotient(total[0], static_cast<A>(size), by_size);
          add_all();
          A sums[2] = {deviations.first, deviations.second};
          team_sums(sums, place, turn);
          deviations = {sums[0], sums[1]};
        }
        const NormRow<A> norm = args.finish(left == size, row, pivot, deviations, by_size);
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          A v[N], w[N], b[N];
          values(u, v);
          P::get(held[u], w, b);
          if (u * step < left) args.store(norm, w, b, offset + u * step, v);
        }
        offset += row_step;
      });
}

// The sums of a row's deviations from `pivot`, which is made the mean of its first elements: close
// to the mean of all, or, where it is far off, so are the first elements, and the sum of squares is
// large enough to hide the cancellation. Every thread of the team calls it and gets them.
template <Team kTeam, int N, typename T>
__device__ Pair<acc_t<T>> sum_about_first(const RowPart& part, const T* x, acc_t<T>& pivot) {
  using A = acc_t<T>;
  A v[N];
  Pair<A> total{0, 0};
  if (part.rank * N < part.size) {
    load_acc<N>(x + part.base + part.rank * N, v);
#pragma unroll
    for (int k = 0; k < N; ++k) total.first += v[k];
    total.second = N;
  }
  total = team_reduce<kTeam>(total, part.width, AddPairs{});
  pivot = total.first / total.second;
  total = {0, 0};
  part.template for_each<N>([&](int64_t, int64_t offset) {
    load_acc<N>(x + offset, v);
    add_deviations(total.first, total.second, v, pivot);
  });
  return team_reduce<kTeam>(total, part.width, AddPairs{});
}

// Rows that shared memory does not hold: a block reads them twice, the second time as far as may be
// from the L2 cache.
template <int N, typename T, typename P>
__global__ void __launch_bounds__(kMaxTeamThreads)
    long_row_kernel(RowShape shape, NormArgs<T> args, P parameters) {
  using A = acc_t<T>;
  const A by_size = A(1) / static_cast<A>(shape.size);
  for_each_row<Team::kBlock>(shape, 1, [&](const RowPart& part) {
    A pivot;
    const Pair<A> total = sum_about_first<Team::kBlock, N>(part, args.x, pivot);
    const NormRow<A> norm = args.finish(part.rank == 0, part.row, pivot, total, by_size);
    const int64_t first = parameters.first(part.row);
    part.template for_each<N>([&](int64_t c, int64_t offset) {
      A v[N], w[N], b[N];
      load_acc<N>(args.x + offset, v);
      typename P::template Held<N> held;
      parameters.hold(first, c, held);
      P::get(held, w, b);
      args.store(norm, w, b, offset, v);
    });
  });
}

constexpr int kLongRowBlocks = 32;  // of a multiprocessor, at most

template <int N, typename T, typename P>
AheadPlan plan_held(int64_t size) {
  const auto plan = [&](std::initializer_list<int> held) {
    return plan_ahead<N>(
        size / N, P::kWidest, held, most_shared_memory() - 1024, [](int) { return kHeldThreads; },
        [](int, int vectors, int threads) {
          const int64_t bytes = int64_t{vectors} * N * sizeof(T);
          return bytes * threads * (held_ahead(static_cast<int>(bytes)) + 1);
        });
  };
  const AheadPlan result = plan({3, 4});
  if constexpr (P::kLong && N > 1) {
    if (result.width == 0) return plan({kLongVectors});
  }
  return result;
}

// long_parameters: the same, for rows that are not held in registers.
template <int N, typename T, typename P, typename Long>
void launch_rows(cudaStream_t stream, int64_t rows, int64_t size, const NormArgs<T>& args,
                 const P& parameters, const Long& long_parameters) {
  const RowShape shape{rows, size, 1};
  const AheadPlan plan = plan_held<N, T, P>(size);
  if (plan.width > 0) {
    const int64_t most = int64_t{sm_count()} * (plan.width > kHeldThreads ? 1 : kHeldBlocks);
    const auto grid =
        static_cast<unsigned>(std::min(ceil_div(rows, plan.threads / plan.width), most));
    return dispatch_ahead<N, P::kWidest, 3, 4, kLongVectors>(plan, [&](auto width, auto vectors) {
      constexpr int kWidth = decltype(width)::value, kVectors = decltype(vectors)::value;
      constexpr bool kLong = kVectors == kLongVectors * kVectorScale<N>;
      if constexpr (!kLong || (P::kLong && kWidth == kTeamOfWarps)) {
        const auto kernel = held_row_kernel<kWidth, N, kVectors, T, P>;
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes);
        launch_early(kernel, grid, plan.threads, plan.bytes, stream, shape, plan.width, args,
                     parameters);
      }
    });
  }
  const StreamPlan streamed = plan_stream<N, T>(size);
  if (streamed.threads > 0) {
    return launch_stream<N>(stream, rows, size, streamed, args, long_parameters);
  }
  if constexpr (P::kFixed || N == 1) {  // of groups in vectors is_too_long() has said so before
    const auto grid = static_cast<unsigned>(std::min(rows, int64_t{sm_count()} * kLongRowBlocks));
    long_row_kernel<N><<<grid, kMaxTeamThreads, 0, stream>>>(shape, args, long_parameters);
  }
}

}  // namespace braze::cuda
