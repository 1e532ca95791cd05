#include "ops/tuned.h"

#include <algorithm>
#include <mutex>

#include "ops/plan_cache.h"

namespace braze {

template <size_t kWords>
std::string TunedTable<kWords>::choice(const Problem& problem, bool deterministic) {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto found = table_.find(problem);
  if (found == table_.end()) return "";
  const Choices& choices = found->second;
  return deterministic || choices.measured.empty() ? choices.built_in : choices.measured;
}

template <size_t kWords>
void TunedTable<kWords>::set(const Problem& problem, const std::string& choice, bool measured) {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  Choices& choices = table_[problem];
  (measured ? choices.measured : choices.built_in) = choice;
  in_use = true;
  ++plan_generation;
}

template <size_t kWords>
void TunedTable<kWords>::clear() {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  table_.clear();
  in_use = false;
  ++plan_generation;
}

template <size_t kWords>
void TunedTable<kWords>::record(bool on) {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  if (on) recorded_.clear();
  recording = on;
}

template <size_t kWords>
void TunedTable<kWords>::record(const Problem& problem) {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  if (std::find(recorded_.begin(), recorded_.end(), problem) != recorded_.end()) return;
  recorded_.push_back(problem);
}

template <size_t kWords>
void TunedTable<kWords>::for_each_choice(VisitChoice* visit, void* state) {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  for (const auto& [problem, choices] : table_) {
    if (!choices.built_in.empty()) visit(state, problem.data(), choices.built_in.c_str(), 0);
    if (!choices.measured.empty()) visit(state, problem.data(), choices.measured.c_str(), 1);
  }
}

template <size_t kWords>
void TunedTable<kWords>::for_each_recorded(VisitProblem* visit, void* state) {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  for (const Problem& problem : recorded_) visit(state, problem.data());
}

template class TunedTable<std::tuple_size_v<Product>>;
template class TunedTable<std::tuple_size_v<ConvolutionPass>>;

// Never destroyed: other threads may still compute when static objects are.
TunedProducts& tuned_products = *new TunedProducts;
TunedConvolutions& tuned_convolutions = *new TunedConvolutions;

namespace {

struct Layout {
  bool column_major, shared, aligned;
};

// Empty where neither dimension has a stride of 1, or rows overlap. One row or one column counts as
// row-major, however it came about.
std::optional<Layout> layout_of(const MatrixRef& m, int64_t rows, int64_t cols, int64_t batch,
                                int64_t element) {
  const bool row_major = cols == 1 || (m.col == 1 && (rows == 1 || m.row >= cols));
  if (!row_major && (m.row != 1 || rows == 1 || m.col < rows)) return std::nullopt;
  const bool shared = batch == 1 || m.batch == 0;
  const int64_t vectors = row_major ? rows : cols, stride = row_major ? m.row : m.col;
  const auto fits = [&](int64_t elements) { return elements * element % 16 == 0; };
  const bool aligned = reinterpret_cast<uintptr_t>(m.data) % 16 == 0 &&
                       (vectors == 1 || fits(stride)) && (shared || fits(m.batch));
  return Layout{!row_major, shared, aligned};
}

}  // namespace

std::optional<Product> product_of(const MatmulArgs& args, int device) {
  if (args.batch == 0 || args.m == 0 || args.n == 0 || args.k == 0) return std::nullopt;
  const int64_t element = size_of(args.dtype);
  const auto a = layout_of(args.a, args.m, args.k, args.batch, element);
  const auto b = layout_of(args.b, args.k, args.n, args.batch, element);
  if (!a || !b) return std::nullopt;
  // Rows of a batch that share B and have no gaps are a single product: here are gaps, which no
  // product that the tuner makes up would have.
  if (args.batch > 1 && b->shared && !a->shared && !a->column_major) return std::nullopt;
  return Product{device,
                 static_cast<int64_t>(args.dtype),
                 args.dtype == DType::kFloat32 && args.allow_tf32,
                 args.batch,
                 args.m,
                 args.n,
                 args.k,
                 a->column_major,
                 a->shared,
                 a->aligned,
                 b->column_major,
                 b->shared,
                 b->aligned,
                 args.bias != nullptr,
                 args.relu};
}

namespace {

// Whether the strides are those of a dense tensor; that of a dimension of size 1 may be any.
bool is_dense(const Tensor4dRef& t, const std::array<int64_t, 4>& sizes, bool channels_last) {
  const int64_t strides[] = {t.n, t.c, t.h, t.w};
  constexpr int kOrder[2][4] = {{3, 2, 1, 0}, {1, 3, 2, 0}};
  int64_t expected = 1;
  for (const int d : kOrder[channels_last]) {
    if (sizes[d] != 1 && strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

}  // namespace

std::optional<ConvolutionPass> convolution_pass_of(const Conv2dProblem& problem, bool bias,
                                                   int device) {
  const auto& [pass, s, x, w, y] = problem;
  if (s.n * s.c * s.k == 0) return std::nullopt;
  const auto fit = [](int64_t size, int64_t pad, int64_t dilation, int64_t taps, int64_t stride) {
    return (size + 2 * pad - dilation * (taps - 1) - 1) / stride + 1;
  };
  if (s.p != fit(s.h, s.pad_h, s.dilation_h, s.r, s.stride_h) ||
      s.q != fit(s.w, s.pad_w, s.dilation_w, s.s, s.stride_w)) {
    return std::nullopt;
  }
  for (const Tensor4dRef* t : {&x, &w, &y}) {
    if (reinterpret_cast<uintptr_t>(t->data) % 16 != 0) return std::nullopt;
  }
  const auto all_dense = [&, &s = s, &x = x, &w = w, &y = y](bool channels_last) {
    return is_dense(x, {s.n, s.c, s.h, s.w}, channels_last) &&
           is_dense(w, {s.k, s.c / s.groups, s.r, s.s}, channels_last) &&
           is_dense(y, {s.n, s.k, s.p, s.q}, channels_last);
  };
  const bool contiguous = all_dense(false);
  if (!contiguous && !all_dense(true)) return std::nullopt;
  return ConvolutionPass{device,
                         static_cast<int64_t>(s.dtype),
                         s.dtype == DType::kFloat32 && s.allow_tf32,
                         static_cast<int64_t>(pass),
                         s.n,
                         s.c,
                         s.h,
                         s.w,
                         s.k,
                         s.r,
                         s.s,
                         s.stride_h,
                         s.stride_w,
                         s.pad_h,
                         s.pad_w,
                         s.dilation_h,
                         s.dilation_w,
                         s.groups,
                         !contiguous,
                         pass == Conv2dPass::kFprop && bias};
}

}  // namespace braze
