// What computes a matrix product: decided once for a problem, by matmul.cpp alone.
#pragma once

#include "launchers/matmul.h"
#include "ops/backend.h"
#include "ops/plan_cache.h"
#include "ops/tuned.h"

namespace braze {
namespace {

// What computes a product: an algorithm of cuBLASLt's (library is not negative), or a kernel of
// ours.
struct Decision {
  int library = -1;
  int64_t workspace_bytes = 0;
  MatmulPlan plan;
};

// An algorithm of the library's, if it is there and takes the arguments.
std::optional<Decision> library_decision([[maybe_unused]] const MatmulArgs& args,
                                         [[maybe_unused]] int candidate) {
#ifdef BRAZE_CUDA
  if (const auto bytes = vendor::cublas_plan(args, candidate))
    return Decision{candidate, *bytes, {}};
#endif
  return std::nullopt;
}

Decision own_decision(const MatmulPlan& plan) { return {-1, plan.workspace_bytes, plan}; }

// What tuning found to be the fastest, where it knows the product and that takes it: another
// alignment or version of a library may leave fewer candidates.
std::optional<Decision> tuned_decision(const MatmulArgs& args, const Tensor& out) {
  const std::optional<Product> product = product_of(args, out.get_device_index());
  if (!product) return std::nullopt;
  const std::string choice = tuned_products.choice(*product, args.deterministic);
  if (choice.empty()) return std::nullopt;
  Wish wish;
  try {
    wish = wish_of("matmul", choice, dev::matmul_kernel, "cublas");
  } catch (const std::runtime_error&) {
    return std::nullopt;  // a kernel of another version
  }
  if (wish.leaves_choice()) return std::nullopt;
  if (wish.kind == Wish::kLibrary) return library_decision(args, wish.number);
  const MatmulPlan plan = dev::plan_matmul(args, wish.kernel());
  return plan.obstacle ? std::nullopt : std::optional(own_decision(plan));
}

// "auto" takes what tuning found, else the faster one of our own and cuBLASLt, where that is there
// and takes the arguments; names of kernels and of libraries are obeyed or refused. Tuning knows
// bias and ReLU only.
Decision decide(const MatmulArgs& args, const Tensor& out, const Wish& wish) {
  if (tuned_products.in_use && wish.kind == Wish::kAuto && !args.has_full_epilogue()) {
    if (const auto tuned = tuned_decision(args, out)) return *tuned;
  }
#ifdef BRAZE_CUDA
  if (wish.kind == Wish::kLibrary) {
    const std::string name = "cublas" + (wish.number > 0 ? ":" + std::to_string(wish.number) : "");
    const std::string& missing = vendor::cublas_missing();
    BRAZE_CHECK(missing.empty(), "matmul: backend ", name, " cannot be used: ", missing);
    if (args.k > 0) {  // else there is nothing to multiply
      BRAZE_CHECK(!args.has_more_than_residual(), "matmul: backend ", name,
                  " has no ReLU gradient and no sums in its epilogue");
      const auto decision = library_decision(args, wish.number);
      BRAZE_CHECK(decision, "matmul: backend ", name,
                  " does not take these shapes, strides and dtype");
      return *decision;
    }
  }
#endif
  const MatmulPlan plan = dev::plan_matmul(args, wish.kernel());
  if (wish.kind == Wish::kAuto && args.k > 0 && !plan.beats_library) {
    if (const auto decision = library_decision(args, 0)) return *decision;
  }
  BRAZE_CHECK(!plan.obstacle, "matmul: kernel ", dev::matmul_kernel(plan.kernel)->name,
              " cannot take these arguments: ", plan.obstacle);
  return own_decision(plan);
}

// The same, found again where the product is not new.
Decision decided(const MatmulArgs& args, const Tensor& out, const Wish& wish) {
  using Cache = PlanCache<22, Decision>;
  static auto& cache = *new Cache;  // never destroyed: threads may outlive static objects
  const auto flag = [](bool value, int place) { return static_cast<int64_t>(value) << place; };
  const Cache::Key key{plan_generation,
                       plan_context(out),
                       wish.kind,
                       wish.number,
                       static_cast<int64_t>(args.dtype),
                       args.batch,
                       args.m,
                       args.n,
                       args.k,
                       args.a.batch,
                       args.a.row,
                       args.a.col,
                       alignment_of(args.a.data),
                       args.b.batch,
                       args.b.row,
                       args.b.col,
                       alignment_of(args.b.data),
                       alignment_of(args.c),
                       args.bias ? alignment_of(args.bias) : 0,
                       args.residual ? alignment_of(args.residual) : 0,
                       args.relu_result ? alignment_of(args.relu_result) : 0,
                       flag(args.relu, 0) + flag(args.allow_tf32, 1) + flag(args.deterministic, 2) +
                           flag(args.column_sums, 3) + flag(args.row_sums, 4)};
  return cache.get(key, [&] { return decide(args, out, wish); });
}

}  // namespace
}  // namespace braze
