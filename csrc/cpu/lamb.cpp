#include "launchers/lamb.h"

#include "cpu/common/multi_tensor.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"lamb", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised; all parameters share the threads"});

constexpr int64_t kPart = 256;  // elements that are converted together

// Moments of elements [begin, end); their sums of squares of the parameter and of the update.
template <typename T>
void moments_range(const LambUpdate<acc_t<T>>& update, acc_t<T> factor, const LambTensor& t,
                   int64_t begin, int64_t end, double* sums) {
  using A = acc_t<T>;
  sums[0] = sums[1] = 0;
  A p[kPart], g[kPart], m[kPart], v[kPart];
  for (int64_t at = begin; at < end; at += kPart) {
    const int64_t n = std::min(kPart, end - at);
    convert_range(static_cast<const T*>(t.param) + at, p, n);
    convert_range(static_cast<const T*>(t.grad) + at, g, n);
    convert_range(static_cast<const T*>(t.states[0]) + at, m, n);
    convert_range(static_cast<const T*>(t.states[1]) + at, v, n);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) update.moments(g[i] * factor, m[i], v[i]);
    convert_range(m, static_cast<T*>(t.states[0]) + at, n);
    convert_range(v, static_cast<T*>(t.states[1]) + at, n);
    A of_param = 0, of_update = 0;
#pragma omp simd reduction(+ : of_param, of_update)
    for (int64_t i = 0; i < n; ++i) {
      const A u = update.direction(p[i], A(T(m[i])), A(T(v[i])));
      of_param += p[i] * p[i];
      of_update += u * u;
    }
    sums[0] += of_param;
    sums[1] += of_update;
  }
}

template <typename T>
void apply_range(const LambUpdate<acc_t<T>>& update, double rate, const LambTensor& t,
                 int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const A step_size = static_cast<A>(rate);
  A p[kPart], m[kPart], v[kPart];
  for (int64_t at = begin; at < end; at += kPart) {
    const int64_t n = std::min(kPart, end - at);
    convert_range(static_cast<const T*>(t.param) + at, p, n);
    convert_range(static_cast<const T*>(t.states[0]) + at, m, n);
    convert_range(static_cast<const T*>(t.states[1]) + at, v, n);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) p[i] -= step_size * update.direction(p[i], m[i], v[i]);
    convert_range(p, static_cast<T*>(t.param) + at, n);
  }
}

}  // namespace

int64_t lamb_workspace(const LambTensor* tensors, int64_t count) {
  int64_t parts = 0;
  for (int64_t i = 0; i < count; ++i) parts += ceil_div(tensors[i].numel, kUpdateChunk);
  return parts;
}

void lamb(Stream, DType dtype, const LambTensor* tensors, int64_t count, const LambOptions& o) {
  const bool skip = o.found_inf != nullptr && *o.found_inf != 0.0f;
  const double lr = rate_of(o);
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using U = LambUpdate<acc_t<T>>;
    if (!skip) {
      const acc_t<T> factor = gradient_factor<acc_t<T>>(o);
      for_each_part(tensors, count, [&](int64_t part, int64_t i, int64_t begin, int64_t end) {
        const U update(o, *tensors[i].step + 1.0);
        moments_range<T>(update, factor, tensors[i], begin, end, o.sums + 2 * part);
      });
      const double* sums = o.sums;
      for (int64_t i = 0; i < count; ++i) {
        double of_param = 0, of_update = 0;
        for (int64_t n = lamb_workspace(tensors + i, 1); n > 0; --n, sums += 2) {
          of_param += sums[0];
          of_update += sums[1];
        }
        o.ratios[i] = lamb_ratio(o, of_param, of_update);
      }
    }
    for_each_part(tensors, count, [&](int64_t, int64_t i, int64_t begin, int64_t end) {
      const LambTensor& t = tensors[i];
      if (!skip) apply_range<T>(U(o, *t.step + 1.0), lr * o.ratios[i], t, begin, end);
      if (t.average != nullptr) average_range<T>(t.average, t.param, o.average_weight, begin, end);
    });
  });
  count_update(tensors, count, o, skip);
}

}  // namespace braze::cpu
