#include "ops/tuned.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "launchers/common/hash_words.h"
#include "ops/plan_cache.h"

namespace braze {
namespace {

struct Choices {
  std::string built_in, measured;  // empty: none
};

// Never destroyed: other threads may still compute when static objects are.
auto& table = *new std::unordered_map<Product, Choices, HashWords>;
auto& recorded = *new std::vector<Product>;
std::shared_mutex mutex;  // guards the two

void table_changed() {
  tuning_in_use = !table.empty();
  ++plan_generation;
}

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

std::atomic<bool> tuning_in_use{false}, recording_products{false};

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

std::string tuned_choice(const Product& product, bool deterministic) {
  const std::shared_lock<std::shared_mutex> lock(mutex);
  const auto found = table.find(product);
  if (found == table.end()) return "";
  const Choices& choices = found->second;
  return deterministic || choices.measured.empty() ? choices.built_in : choices.measured;
}

void set_tuned_choice(const Product& product, const std::string& choice, bool measured) {
  const std::unique_lock<std::shared_mutex> lock(mutex);
  Choices& choices = table[product];
  (measured ? choices.measured : choices.built_in) = choice;
  table_changed();
}

void clear_tuned_choices() {
  const std::unique_lock<std::shared_mutex> lock(mutex);
  table.clear();
  table_changed();
}

void record_products(bool on) {
  const std::unique_lock<std::shared_mutex> lock(mutex);
  if (on) recorded.clear();
  recording_products = on;
}

void record_product(const Product& product) {
  const std::unique_lock<std::shared_mutex> lock(mutex);
  if (std::find(recorded.begin(), recorded.end(), product) != recorded.end()) return;
  recorded.push_back(product);
}

void for_each_choice(VisitChoice* visit, void* state) {
  const std::shared_lock<std::shared_mutex> lock(mutex);
  for (const auto& [product, choices] : table) {
    if (!choices.built_in.empty()) visit(state, product.data(), choices.built_in.c_str(), 0);
    if (!choices.measured.empty()) visit(state, product.data(), choices.measured.c_str(), 1);
  }
}

void for_each_recorded(VisitProduct* visit, void* state) {
  const std::shared_lock<std::shared_mutex> lock(mutex);
  for (const Product& product : recorded) visit(state, product.data());
}

}  // namespace braze
