#include "launchers/cross_entropy.h"

#include <stdexcept>
#include <string>

#include "cpu/common/row_tiles.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kCrossEntropy({"cross_entropy", "simd", "float64 float32 bfloat16 float16", "cpu",
                                 true, "softmax and loss in one pass over cached rows"});
const KernelEntry kNllLoss({"nll_loss", "gather", "float64 float32 bfloat16 float16", "cpu", true,
                            "gather, threaded"});

// What a row adds to the reduced loss.
struct RowLoss {
  double loss, weight;
};

int64_t label_of(const LossArgs& args, int64_t row) {
  return args.target_kind == TargetKind::kUint8 ? static_cast<const uint8_t*>(args.target)[row]
                                                : static_cast<const int64_t*>(args.target)[row];
}

void check_labels(const char* op, const LossArgs& args) {
  for (int64_t row = 0; row < args.shape.rows(); ++row) {
    const int64_t label = label_of(args, row);
    if (label != args.ignore_index && (label < 0 || label >= args.shape.size)) {
      throw std::runtime_error(std::string(op) + ": Target " + std::to_string(label) +
                               " is out of bounds.");
    }
  }
}

template <typename A>
A class_weight(const LossArgs& args, int64_t c) {
  return args.weight == nullptr ? A(1) : static_cast<const A*>(args.weight)[c];
}

template <typename T>
acc_t<T> load_loss(const LossArgs& args, const void* p, int64_t i) {
  if (args.loss_is_acc) return static_cast<const acc_t<T>*>(p)[i];
  return static_cast<const T*>(p)[i];
}

template <typename T, typename Value>
void store_loss(const LossArgs& args, void* p, int64_t i, Value value) {
  if (args.loss_is_acc) {
    static_cast<acc_t<T>*>(p)[i] = static_cast<acc_t<T>>(value);
  } else {
    static_cast<T*>(p)[i] = T(static_cast<acc_t<T>>(value));
  }
}

template <typename T>
acc_t<T> row_gradient(const LossArgs& args, const void* grad_output, const void* total_weight,
                      int64_t row) {
  if (args.reduction == Reduction::kNone) return load_loss<T>(args, grad_output, row);
  const acc_t<T> grad = grad_output ? load_loss<T>(args, grad_output, 0) : acc_t<T>(1);
  return args.reduction == Reduction::kMean ? grad / *static_cast<const acc_t<T>*>(total_weight)
                                            : grad;
}

// In row order, whichever thread computed a row.
template <typename T>
void reduce_rows(const LossArgs& args, const RowLoss* rows, void* loss, void* total_weight) {
  if (args.reduction == Reduction::kNone) {
    *static_cast<acc_t<T>*>(total_weight) = 1;
    return;
  }
  RowLoss sum{0, 0};
  for (int64_t row = 0; row < args.shape.rows(); ++row) {
    sum.loss += rows[row].loss;
    sum.weight += rows[row].weight;
  }
  const bool mean = args.reduction == Reduction::kMean;
  store_loss<T>(args, loss, 0, mean ? sum.loss / sum.weight : sum.loss);
  *static_cast<acc_t<T>*>(total_weight) = static_cast<acc_t<T>>(mean ? sum.weight : 1.0);
}

// Weight of class c in the target of a row, without a label's own part.
template <typename T>
acc_t<T> target_part(const LossArgs& args, int64_t c, int64_t offset) {
  using A = acc_t<T>;
  const A smoothing = static_cast<A>(args.label_smoothing);
  A q = smoothing / static_cast<A>(args.shape.size);
  if (args.target_kind == TargetKind::kProbability) {
    q += (1 - smoothing) * A(static_cast<const T*>(args.target)[offset]);
  }
  return class_weight<A>(args, c) * q;
}

bool uses_whole_row(const LossArgs& args) {
  return args.target_kind == TargetKind::kProbability || args.label_smoothing > 0;
}

// The loss and the target's sum of one row, given its maximum and log(sum(exp)).
template <typename T>
void finish_row(const LossArgs& args, int64_t row, int64_t base, RowSum<acc_t<T>> state, void* loss,
                acc_t<T>* stats, RowLoss* rows) {
  using A = acc_t<T>;
  const T* x = static_cast<const T*>(args.input) + base;
  const int64_t size = args.shape.size, inner = args.shape.inner;
  const A log_sum = std::log(state.sum);
  double row_loss = 0, target_sum = 0;  // thousands of small terms
  A row_weight = 1;
  if (uses_whole_row(args)) {
#pragma omp simd reduction(+ : row_loss, target_sum)
    for (int64_t c = 0; c < size; ++c) {
      const A q = target_part<T>(args, c, base + c * inner);
      row_loss += q * (log_sum - (A(x[c * inner]) - state.maximum));
      target_sum += q;
    }
  }
  if (args.target_kind != TargetKind::kProbability) {
    const int64_t label = label_of(args, row);
    if (label == args.ignore_index) {
      row_loss = target_sum = 0;
      row_weight = 0;
    } else {
      row_weight = class_weight<A>(args, label);
      const A q = (1 - static_cast<A>(args.label_smoothing)) * row_weight;
      row_loss += q * (log_sum - (A(x[label * inner]) - state.maximum));
      target_sum += q;
    }
  }
  const int64_t count = args.shape.rows();
  stats[row] = state.maximum;
  stats[count + row] = state.sum;
  stats[2 * count + row] = static_cast<A>(target_sum);
  if (args.reduction == Reduction::kNone) {
    store_loss<T>(args, loss, row, row_loss);
  } else {
    rows[row] = {row_loss, static_cast<double>(row_weight)};
  }
}

template <typename T>
void backward_row(const LossArgs& args, int64_t row, int64_t base, acc_t<T> grad,
                  const acc_t<T>* stats, T* grad_input, T* grad_target) {
  using A = acc_t<T>;
  const T* x = static_cast<const T*>(args.input) + base;
  T* dx = grad_input + base;
  const int64_t size = args.shape.size, inner = args.shape.inner, count = args.shape.rows();
  const A maximum = stats[row], sum = stats[count + row], target_sum = stats[2 * count + row];
  const A kept = 1 - static_cast<A>(args.label_smoothing);
  int64_t label = -1;
  if (args.target_kind != TargetKind::kProbability) {
    label = label_of(args, row);
    if (label == args.ignore_index) {
      grad = 0;  // not 0 / 0 where every row is ignored
      label = -1;
    }
  }
  const A scale = target_sum / sum;
  if (!uses_whole_row(args) && inner == 1) {
#pragma omp simd
    for (int64_t c = 0; c < size; ++c) dx[c] = T(grad * (vector_exp(A(x[c]) - maximum) * scale));
  } else {
    for (int64_t c = 0; c < size; ++c) {
      const A p = vector_exp(A(x[c * inner]) - maximum) * scale;
      const A q = uses_whole_row(args) ? target_part<T>(args, c, base + c * inner) : A(0);
      dx[c * inner] = T(grad * (p - q));
    }
  }
  if (label >= 0) {
    A q = kept * class_weight<A>(args, label);
    if (args.label_smoothing > 0) q += target_part<T>(args, label, 0);
    dx[label * inner] = T(grad * (vector_exp(A(x[label * inner]) - maximum) * scale - q));
  }
  if (grad_target != nullptr) {
    const A log_sum = std::log(sum);
    for (int64_t c = 0; c < size; ++c) {
      const A minus_log_p = log_sum - (A(x[c * inner]) - maximum);
      grad_target[base + c * inner] = T(grad * kept * class_weight<A>(args, c) * minus_log_p);
    }
  }
}

}  // namespace

int64_t loss_workspace_bytes(const LossArgs& args) {
  if (args.reduction == Reduction::kNone) return 0;
  return args.shape.rows() * static_cast<int64_t>(sizeof(RowLoss));
}

void cross_entropy(Stream stream, const LossArgs& args, void* loss, void* stats, void* total_weight,
                   void* unit_grad, void* workspace) {
  if (args.target_kind != TargetKind::kProbability) check_labels("cross_entropy", args);
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* x = static_cast<const T*>(args.input);
    RowLoss* rows = static_cast<RowLoss*>(workspace);
    const RowShape& shape = args.shape;
    for_each_tile(shape, [&](int64_t row, int64_t base, int count) {
      A maximum[kTileRows], sum[kTileRows];
      if (shape.inner == 1) {
        const RowSum<A> state = sum_of_row(x + base, shape.size);
        maximum[0] = state.maximum;
        sum[0] = state.sum;
      } else {
        sums_of_tile(x + base, shape.size, shape.inner, count, maximum, sum);
      }
      for (int i = 0; i < count; ++i) {
        finish_row<T>(args, row + i, base + i, {maximum[i], sum[i]}, loss, static_cast<A*>(stats),
                      rows);
      }
    });
    reduce_rows<T>(args, rows, loss, total_weight);
  });
  if (unit_grad && args.reduction != Reduction::kNone) {
    cross_entropy_backward(stream, args, nullptr, stats, total_weight, unit_grad, nullptr);
  }
}

void cross_entropy_backward(Stream, const LossArgs& args, const void* grad_output,
                            const void* stats, const void* total_weight, void* grad_input,
                            void* grad_target) {
  if (args.target_kind != TargetKind::kProbability) check_labels("cross_entropy_backward", args);
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    for_each_tile(args.shape, [&](int64_t row, int64_t base, int count) {
      for (int i = 0; i < count; ++i) {
        backward_row<T>(args, row + i, base + i,
                        row_gradient<T>(args, grad_output, total_weight, row + i),
                        static_cast<const A*>(stats), static_cast<T*>(grad_input),
                        static_cast<T*>(grad_target));
      }
    });
  });
}

void nll_loss(Stream, const LossArgs& args, void* loss, void* total_weight, void* workspace) {
  check_labels("nll_loss", args);
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* x = static_cast<const T*>(args.input);
    RowLoss* rows = static_cast<RowLoss*>(workspace);
    const int64_t size = args.shape.size, inner = args.shape.inner;
    constexpr int64_t kGrain = 4096;
    parallel_for(0, args.shape.rows(), kGrain, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const int64_t label = label_of(args, row);
        A row_loss = 0, row_weight = 0;
        if (label != args.ignore_index) {
          row_weight = class_weight<A>(args, label);
          row_loss = -row_weight * A(x[(row / inner * size + label) * inner + row % inner]);
        }
        if (args.reduction == Reduction::kNone) {
          store_loss<T>(args, loss, row, row_loss);
        } else {
          rows[row] = {static_cast<double>(row_loss), static_cast<double>(row_weight)};
        }
      }
    });
    reduce_rows<T>(args, rows, loss, total_weight);
  });
}

void nll_loss_backward(Stream, const LossArgs& args, const void* grad_output,
                       const void* total_weight, void* grad_input) {
  check_labels("nll_loss_backward", args);
  dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    T* dx = static_cast<T*>(grad_input);
    const int64_t size = args.shape.size, inner = args.shape.inner;
    for_each_tile(args.shape, [&](int64_t first, int64_t base, int count) {
      for (int64_t c = 0; c < size; ++c) {
        for (int i = 0; i < count; ++i) dx[base + c * inner + i] = T(A(0));
      }
      for (int i = 0; i < count; ++i) {
        const int64_t label = label_of(args, first + i);
        if (label == args.ignore_index) continue;
        const A grad = row_gradient<T>(args, grad_output, total_weight, first + i);
        dx[base + label * inner + i] = T(-class_weight<A>(args, label) * grad);
      }
    });
  });
}

LabelError take_label_error() { return {false, 0}; }

}  // namespace braze::cpu
