// An optimizer's update of many tensors, which share the threads.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/common/update.h"

namespace braze::cpu {

// Elements of a parameter, its gradient and its states, from which a range begins.
template <typename A, int kStates>
struct UpdateRange {
  A* param;
  const A* grad;
  A* states[kStates];
};

// kHas: which states there are.
template <unsigned kHas, typename Update, typename A>
void update_range(const Update& update, A factor, const UpdateRange<A, Update::kStates>& range,
                  int64_t n) {
  constexpr int kStates = Update::kStates;
  static_assert(kStates <= 3, "which the loop below spells out, so that it vectorises");
  A* const param = range.param;
  const A* const grad = range.grad;
  A* const state0 = range.states[0];
  A* const state1 = range.states[kStates > 1 ? 1 : 0];
  A* const state2 = range.states[kStates > 2 ? 2 : 0];
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    A p = param[i], s[kStates] = {};
    if constexpr ((kHas & 1) != 0) s[0] = state0[i];
    if constexpr ((kHas & 2) != 0) s[1] = state1[i];
    if constexpr ((kHas & 4) != 0) s[2] = state2[i];
    update(p, grad[i] * factor, s, kHas);
    if constexpr ((kHas & 1) != 0) state0[i] = s[0];
    if constexpr ((kHas & 2) != 0) state1[i] = s[1];
    if constexpr ((kHas & 4) != 0) state2[i] = s[2];
    param[i] = p;
  }
}

template <typename To, typename From>
void convert_range(const From* from, To* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = To(from[i]);
}

// Elements [begin, end) of a tensor. 16-bit ones go through float32, some at a time: conversions
// alone vectorise, together with an update they do not.
template <unsigned kHas, typename T, typename Update, typename Tensor>
void update_elements(const Update& update, acc_t<T> factor, const Tensor& t, int64_t begin,
                     int64_t end) {
  using A = acc_t<T>;
  constexpr int kStates = Update::kStates;
  T* const param = static_cast<T*>(t.param);
  const T* const grad = static_cast<const T*>(t.grad);
  if constexpr (std::is_same_v<T, A>) {
    UpdateRange<A, kStates> range{param + begin, grad + begin, {}};
    for (int s = 0; s < kStates; ++s) {
      if (kHas >> s & 1) range.states[s] = static_cast<A*>(t.states[s]) + begin;
    }
    update_range<kHas>(update, factor, range, end - begin);
  } else {
    constexpr int64_t kPart = 256;
    A params[kPart], grads[kPart], states[kStates][kPart];
    UpdateRange<A, kStates> range{params, grads, {}};
    for (int s = 0; s < kStates; ++s) range.states[s] = states[s];
    for (int64_t i = begin; i < end; i += kPart) {
      const int64_t n = std::min(kPart, end - i);
      convert_range(param + i, params, n);
      convert_range(grad + i, grads, n);
      for (int s = 0; s < kStates; ++s) {
        if (kHas >> s & 1) convert_range(static_cast<T*>(t.states[s]) + i, states[s], n);
      }
      update_range<kHas>(update, factor, range, n);
      convert_range(params, param + i, n);
      for (int s = 0; s < kStates; ++s) {
        if (kHas >> s & 1) convert_range(states[s], static_cast<T*>(t.states[s]) + i, n);
      }
    }
  }
}

// f(integral_constant) of the states that there are.
template <typename Update, unsigned kHas = (1u << Update::kStates) - 1, typename F>
void with_states(unsigned has, F&& f) {
  if (has == kHas) return f(std::integral_constant<unsigned, kHas>{});
  // The next smaller choice of optional states.
  constexpr unsigned kAlways = ((1u << Update::kStates) - 1) & ~Update::kOptional;
  if constexpr ((kHas & Update::kOptional) != 0) {
    constexpr unsigned kNext = (((kHas & Update::kOptional) - 1) & Update::kOptional) | kAlways;
    with_states<Update, kNext>(has, f);
  }
}

template <typename T>
void average_range(void* average, const void* param, double weight, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const A w = static_cast<A>(weight);
  T* const to = static_cast<T*>(average);
  const T* const from = static_cast<const T*>(param);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) to[i] = T(averaged_with(A(to[i]), A(from[i]), w));
}

inline double rate_of(const UpdateOptions& o) {
  return o.lr_tensor == nullptr ? o.lr
         : o.lr_is_double       ? *static_cast<const double*>(o.lr_tensor)
                                : *static_cast<const float*>(o.lr_tensor);
}

constexpr int64_t kUpdateChunk = 16384;  // elements of a part

// f(part, tensor, its first element, the one behind its last) for all parts of all tensors, by
// number, on all threads.
template <typename Tensor, typename F>
void for_each_part(const Tensor* tensors, int64_t count, const F& f) {
  std::vector<int64_t> first_chunk(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    first_chunk[i + 1] = first_chunk[i] + ceil_div(tensors[i].numel, kUpdateChunk);
  }
  parallel_for(0, first_chunk[count], 1, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const auto after = std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk);
      const int64_t i = after - first_chunk.begin() - 1;
      const int64_t begin = (chunk - first_chunk[i]) * kUpdateChunk;
      f(chunk, i, begin, std::min(begin + kUpdateChunk, tensors[i].numel));
    }
  });
}

// Of n values, in their order.
template <typename T>
double sum_of_squares(const T* values, int64_t n) {
  using A = acc_t<T>;
  constexpr int64_t kPart = 256;  // summed in T's accumulation type
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kPart) {
    const int64_t end = begin + kPart < n ? begin + kPart : n;
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) {
      const A v = values[i];
      sum += v * v;
    }
    total += sum;
  }
  return total;
}

// What comes with the elements' update: counters.
template <typename Tensor>
void count_update(const Tensor* tensors, int64_t count, const UpdateOptions& o, bool skipped) {
  for (int64_t i = 0; i < count && !skipped; ++i) {
    if (tensors[i].step != nullptr) *tensors[i].step += 1;
  }
  if (o.averaged != nullptr) *o.averaged += 1;
}

template <template <typename> class Update, typename Tensor, typename Options>
void multi_tensor_update(DType dtype, const Tensor* tensors, int64_t count, const Options& o) {
  const bool skip = o.found_inf != nullptr && *o.found_inf != 0.0f;
  const double lr = rate_of(o);
  constexpr int64_t kCached = 2048;  // elements that stay in the cache until they are averaged
  if (!skip || (count > 0 && tensors[0].average != nullptr)) {
    dispatch(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      using U = Update<acc_t<T>>;
      const acc_t<T> factor = gradient_factor<acc_t<T>>(o);
      for_each_part(tensors, count, [&](int64_t, int64_t i, int64_t begin, int64_t end) {
        const Tensor& t = tensors[i];
        U update(o, t.step == nullptr ? 0.0 : *t.step + 1.0);
        update.set_rate(lr);
        const int64_t part = t.average == nullptr ? end - begin : kCached;
        for (int64_t b = begin; b < end; b += part) {
          const int64_t e = std::min(b + part, end);
          if (!skip) {
            with_states<U>(t.has(), [&](auto has) {
              update_elements<decltype(has)::value, T>(update, factor, t, b, e);
            });
          }
          if (t.average != nullptr) average_range<T>(t.average, t.param, o.average_weight, b, e);
        }
      });
    });
  }
  count_update(tensors, count, o, skip);
}

}  // namespace braze::cpu
