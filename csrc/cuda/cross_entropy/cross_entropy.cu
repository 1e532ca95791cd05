// cross_entropy: one kernel finds a row's maximum and sum of exponentials online, its loss, and the
// block's sum of losses; backward recomputes the probabilities from the saved pair, so that nothing
// of the input's size is kept. nll_loss: the same sum over gathered elements.
#include "launchers/common/registry.h"
#include "loss.cuh"

namespace braze::cuda {
namespace {

// Weight of class c in the target of a row, without a label's own part.
template <typename T, bool kProbability>
__device__ acc_t<T> target_part(const LossArgs& args, int64_t c, int64_t offset) {
  using A = acc_t<T>;
  const A smoothing = static_cast<A>(args.label_smoothing);
  A q = smoothing / static_cast<A>(args.shape.size);
  if constexpr (kProbability) {
    q += (1 - smoothing) * convert<A>(static_cast<const T*>(args.target)[offset]);
  }
  return class_weight<A>(args, c) * q;
}

// What the gradient of a row's logits follows from, beside the logits.
template <typename A>
struct RowStats {
  A maximum, sum;  // of exp(x - maximum)
  A target_sum;
  Label label;  // if the target is one
};

template <bool kProbability, typename A>
__device__ bool whole_row(const LossArgs& args) {
  return kProbability || args.label_smoothing > 0;
}

// The gradients of this thread's part of a row; `grad` is the one that reaches the row's loss.
template <int N, bool kProbability, typename T>
__device__ void row_gradients(const LossArgs& args, const RowPart& part,
                              const RowStats<acc_t<T>>& row, acc_t<T> grad, T* grad_input,
                              T* grad_target) {
  using A = acc_t<T>;
  const T* x = static_cast<const T*>(args.input);
  const A kept = 1 - static_cast<A>(args.label_smoothing);
  const A scale = A(1) / row.sum, log_sum = kProbability && grad_target ? log(row.sum) : A(0);
  // Not 0 / 0 where every row is ignored.
  if (!kProbability && row.label.state != LabelState::kCounted) grad = A(0);
  part.template for_each<N>([&](int64_t c, int64_t offset) {
    A v[N], dt[N];
    load_acc<N>(x + offset, v);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const A shifted = v[k] - row.maximum;
      A q = whole_row<kProbability, A>(args) ? target_part<T, kProbability>(args, c + k, offset + k)
                                             : A(0);
      if (!kProbability && c + k == row.label.value) q += kept * class_weight<A>(args, c + k);
      v[k] = grad * (row.target_sum * (exp(shifted) * scale) - q);
      dt[k] = grad * kept * class_weight<A>(args, c + k) * (log_sum - shifted);
    }
    store_acc<N>(grad_input + offset, v);
    if (kProbability && grad_target != nullptr) store_acc<N>(grad_target + offset, dt);
  });
}

// unit_grad: null, or the gradient of the logits where that of the reduced loss is 1; the blocks
// finish the reduction themselves then, and every thread has one row.
template <Team kTeam, int N, bool kProbability, typename T>
__global__ void __launch_bounds__(kMaxTeamThreads)
    cross_entropy_kernel(LossArgs args, Meeting meeting, int lanes, void* loss, void* stats,
                         void* total_weight, Pair<double>* partials, T* unit_grad) {
  __shared__ LossMail mail;
  if (meeting == Meeting::kCluster) {
    const bool receives = blockIdx.x == 0 || unit_grad;
    if (receives && threadIdx.x == 0 && threadIdx.y == 0) mail.expect(static_cast<int>(gridDim.x));
    cluster_meet();
  }
  wait_for_earlier_kernels();
  using A = acc_t<T>;
  const T* x = static_cast<const T*>(args.input);
  A* stat = static_cast<A*>(stats);
  const int64_t rows = args.shape.rows();
  Pair<double> mine{0, 0};
  RowPart my_part{};
  RowStats<A> my_row{};
  for_each_row<kTeam>(args.shape, lanes, [&](const RowPart& part) {
    const bool exists = part.row < rows;
    Label label{-1, LabelState::kCounted};
    if (!kProbability && exists) label = read_label(args, part.row);
    Pair<A> state = OnlineSum<A>::identity();
    part.template for_each<N>([&](int64_t, int64_t offset) {
      A v[N];
      load_acc<N>(x + offset, v);
      OnlineSum<A>::template add<N>(state, v);
    });
    state = team_reduce<kTeam>(state, part.width, OnlineSum<A>{});
    const A maximum = state.first, log_sum = log(state.second);
    Pair<A> row{A(0), A(0)};  // loss, sum of the target
    if (whole_row<kProbability, A>(args)) {
      part.template for_each<N>([&](int64_t c, int64_t offset) {
        A v[N];
        load_acc<N>(x + offset, v);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const A q = target_part<T, kProbability>(args, c + k, offset + k);
          row.first += q * (log_sum - (v[k] - maximum));
          row.second += q;
        }
      });
      row = team_reduce<kTeam>(row, part.width, AddPairs{});
    }
    if (!exists) return;
    A row_weight = A(1);
    if constexpr (!kProbability) {
      if (label.state == LabelState::kCounted) {
        row_weight = class_weight<A>(args, label.value);
        const A q = (1 - static_cast<A>(args.label_smoothing)) * row_weight;
        const A logit = convert<A>(x[part.base + label.value * part.stride]);
        row.first += q * (log_sum - (logit - maximum));
        row.second += q;
      } else {
        const bool invalid = label.state == LabelState::kInvalid;
        if (invalid && part.rank == 0) report_label(label.value);
        row = {invalid ? A(NAN) : A(0), A(0)};
        row_weight = A(0);
      }
    }
    my_part = part;
    my_row = {maximum, state.second, row.second, label};
    if (part.rank != 0) return;
    stat[part.row] = maximum;
    stat[rows + part.row] = state.second;
    stat[2 * rows + part.row] = row.second;
    if (args.reduction == Reduction::kNone) store_loss<T>(args, loss, part.row, row.first);
    mine = AddPairs{}(mine, Pair<double>{row.first, row_weight});
  });
  __shared__ A divisor;
  reduce_rows<T>(args, meeting, mine, loss, total_weight, partials, &mail,
                 unit_grad ? &divisor : nullptr);
  if (unit_grad == nullptr) return;
  row_gradients<N, kProbability, T>(args, my_part, my_row, A(1) / divisor, unit_grad, nullptr);
}

template <Team kTeam, int N, bool kProbability, typename T>
__global__ void __launch_bounds__(kMaxTeamThreads)
    cross_entropy_backward_kernel(LossArgs args, int lanes, const void* grad_output,
                                  const void* stats, const void* total_weight, T* grad_input,
                                  T* grad_target) {
  wait_for_earlier_kernels();
  using A = acc_t<T>;
  const A* stat = static_cast<const A*>(stats);
  const int64_t rows = args.shape.rows();
  for_each_row<kTeam>(args.shape, lanes, [&](const RowPart& part) {
    if (part.size == 0) return;
    RowStats<A> row{stat[part.row], stat[rows + part.row], stat[2 * rows + part.row],
                    Label{-1, LabelState::kCounted}};
    if constexpr (!kProbability) row.label = read_label(args, part.row);
    const A grad = row_gradient<T>(args, grad_output, total_weight, part.row);
    row_gradients<N, kProbability, T>(args, part, row, grad, grad_input, grad_target);
  });
}

template <typename T>
__global__ void __launch_bounds__(kMaxTeamThreads)
    nll_loss_kernel(LossArgs args, Meeting meeting, void* loss, void* total_weight,
                    Pair<double>* partials) {
  using A = acc_t<T>;
  const T* x = static_cast<const T*>(args.input);
  const RowShape shape = args.shape;
  const int64_t rows = shape.rows(), stride = int64_t{gridDim.x} * blockDim.x;
  Pair<double> mine{0, 0};
  for (int64_t row = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; row < rows; row += stride) {
    const Label label = read_label(args, row);
    Pair<A> v{A(0), A(0)};
    if (label.state == LabelState::kCounted) {
      const int64_t outer = row / shape.inner, inner = row % shape.inner;
      const int64_t offset = (outer * shape.size + label.value) * shape.inner + inner;
      v.second = class_weight<A>(args, label.value);
      v.first = -v.second * convert<A>(x[offset]);
    } else if (label.state == LabelState::kInvalid) {
      report_label(label.value);
      v.first = A(NAN);
    }
    if (args.reduction == Reduction::kNone) store_loss<T>(args, loss, row, v.first);
    mine = AddPairs{}(mine, Pair<double>{v.first, v.second});
  }
  reduce_rows<T>(args, meeting, mine, loss, total_weight, partials);
}

template <Team kTeam, int N, typename T>
__global__ void __launch_bounds__(kMaxTeamThreads)
    nll_loss_backward_kernel(LossArgs args, int lanes, const void* grad_output,
                             const void* total_weight, T* grad_input) {
  using A = acc_t<T>;
  for_each_row<kTeam>(args.shape, lanes, [&](const RowPart& part) {
    if (part.size == 0) return;
    const Label label = read_label(args, part.row);
    const bool counted = label.state == LabelState::kCounted;
    const A grad = counted ? -class_weight<A>(args, label.value) *
                                 row_gradient<T>(args, grad_output, total_weight, part.row)
                           : A(0);
    part.template for_each<N>([&](int64_t c, int64_t offset) {
      A v[N];
#pragma unroll
      for (int k = 0; k < N; ++k) v[k] = c + k == label.value ? grad : A(0);
      store_acc<N>(grad_input + offset, v);
    });
  });
}

template <typename T>
void launch_partials(Stream stream, const LossArgs& args, const Pair<double>* partials, int count,
                     void* loss, void* total_weight) {
  launch_early(reduce_partials_kernel<T>, 1, 256, 0, stream, args, partials, count, loss,
               total_weight);
}

// f(team constant, vector width constant).
template <int N, typename F>
void dispatch_rows(Team team, bool vectors, F&& f) {
  dispatch_team(team, [&](auto t) {
    if constexpr (decltype(t)::value != Team::kColumn) {
      if (vectors) return f(t, std::integral_constant<int, N>{});
    }
    f(t, std::integral_constant<int, 1>{});
  });
}

template <typename T>
bool rows_take_vectors(const LossArgs& args, std::initializer_list<const void*> arrays) {
  bool aligned = args.shape.inner == 1 && args.shape.size % kVecWidth<T> == 0;
  for (const void* p : arrays) aligned = aligned && is_vec_aligned(p);
  return aligned;
}

int nll_blocks(const LossArgs& args) {
  return std::max(1, std::min(grid_stride_blocks(args.shape.rows(), 256), kMaxPartials));
}

const KernelEntry kCrossEntropy({"cross_entropy", "online", "float64 float32 bfloat16 float16",
                                 "sm_80+", true, "softmax, loss and reduction in one kernel"});
const KernelEntry kNllLoss({"nll_loss", "gather", "float64 float32 bfloat16 float16", "sm_80+",
                            true, "gather and reduction in one kernel"});

}  // namespace

int64_t loss_workspace_bytes(const LossArgs& args) {
  if (args.reduction == Reduction::kNone) return 0;
  return kMaxPartials * static_cast<int64_t>(sizeof(Pair<double>));
}

void cross_entropy(Stream stream, const LossArgs& args, void* loss, void* stats, void* total_weight,
                   void* unit_grad, void* workspace) {
  if (args.reduction == Reduction::kNone) unit_grad = nullptr;
  bool unit_grad_done = false;
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool vectors = rows_take_vectors<T>(args, {args.input, unit_grad});
    const LossLaunch launch = choose_loss_team(args, vectors ? kVecWidth<T> : 1);
    Pair<double>* const partials =
        launch.meeting == Meeting::kPartials ? static_cast<Pair<double>*>(workspace) : nullptr;
    T* const grad = partials ? nullptr : static_cast<T*>(unit_grad);
    unit_grad_done = grad != nullptr;
    dispatch_rows<kVecWidth<T>>(launch.team, vectors, [&](auto team, auto width) {
      constexpr Team kTeam = decltype(team)::value;
      constexpr int N = decltype(width)::value;
      const auto kernel = args.target_kind == TargetKind::kProbability
                              ? cross_entropy_kernel<kTeam, N, true, T>
                              : cross_entropy_kernel<kTeam, N, false, T>;
      if (launch.meeting == Meeting::kCluster) {
        launch_clusters("cross_entropy", stream, kernel, launch.grid, launch.block, 0, launch.grid,
                        args, launch.meeting, launch.lanes, loss, stats, total_weight, partials,
                        grad);
        return;
      }
      launch_early(kernel, launch.grid, launch.block, 0, stream, args, launch.meeting, launch.lanes,
                   loss, stats, total_weight, partials, grad);
    });
    check_launch("cross_entropy");
    if (partials) launch_partials<T>(stream, args, partials, launch.grid, loss, total_weight);
    check_launch("cross_entropy");
  });
  if (unit_grad && !unit_grad_done) {
    cross_entropy_backward(stream, args, nullptr, stats, total_weight, unit_grad, nullptr);
  }
}

void cross_entropy_backward(Stream stream, const LossArgs& args, const void* grad_output,
                            const void* stats, const void* total_weight, void* grad_input,
                            void* grad_target) {
  if (args.shape.rows() == 0 || args.shape.size == 0) return;
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool vectors = rows_take_vectors<T>(args, {args.input, grad_input, grad_target});
    const TeamLaunch launch = choose_team(args.shape, vectors ? kVecWidth<T> : 1);
    dispatch_rows<kVecWidth<T>>(launch.team, vectors, [&](auto team, auto width) {
      constexpr Team kTeam = decltype(team)::value;
      constexpr int N = decltype(width)::value;
      const auto kernel = args.target_kind == TargetKind::kProbability
                              ? cross_entropy_backward_kernel<kTeam, N, true, T>
                              : cross_entropy_backward_kernel<kTeam, N, false, T>;
      launch_early(kernel, launch.grid, launch.block, 0, stream, args, launch.lanes, grad_output,
                   stats, total_weight, static_cast<T*>(grad_input), static_cast<T*>(grad_target));
    });
    check_launch("cross_entropy_backward");
  });
}

void nll_loss(Stream stream, const LossArgs& args, void* loss, void* total_weight,
              void* workspace) {
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int blocks = nll_blocks(args);
    const Meeting meeting = meeting_of(args, blocks, false);
    Pair<double>* const partials =
        meeting == Meeting::kPartials ? static_cast<Pair<double>*>(workspace) : nullptr;
    nll_loss_kernel<T>
        <<<blocks, 256, 0, as_cuda(stream)>>>(args, meeting, loss, total_weight, partials);
    check_launch("nll_loss");
    if (partials) launch_partials<T>(stream, args, partials, blocks, loss, total_weight);
    check_launch("nll_loss");
  });
}

void nll_loss_backward(Stream stream, const LossArgs& args, const void* grad_output,
                       const void* total_weight, void* grad_input) {
  if (args.shape.rows() == 0 || args.shape.size == 0) return;
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool vectors = rows_take_vectors<T>(args, {grad_input});
    const TeamLaunch launch = choose_team(args.shape, vectors ? kVecWidth<T> : 1);
    dispatch_rows<kVecWidth<T>>(launch.team, vectors, [&](auto team, auto width) {
      nll_loss_backward_kernel<decltype(team)::value, decltype(width)::value, T>
          <<<launch.grid, launch.block, 0, as_cuda(stream)>>>(
              args, launch.lanes, grad_output, total_weight, static_cast<T*>(grad_input));
    });
    check_launch("nll_loss_backward");
  });
}

LabelError take_label_error() {
  const auto check = [](cudaError_t error) {
    if (error != cudaSuccess) {
      throw std::runtime_error(std::string("check_errors: ") + cudaGetErrorString(error));
    }
  };
  long long found[2];
  check(cudaDeviceSynchronize());
  check(cudaMemcpyFromSymbol(found, label_error, sizeof(found)));
  if (found[0] != 0) {
    const long long none[2] = {0, 0};
    check(cudaMemcpyToSymbol(label_error, none, sizeof(none)));
    check(cudaDeviceSynchronize());
  }
  return {found[0] != 0, found[1]};
}

}  // namespace braze::cuda
