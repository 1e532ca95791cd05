#include "launchers/sgd.h"

#include <algorithm>
#include <vector>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"sgd", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised; all parameters share the threads"});

template <typename T>
void update_range(const SgdTensor& t, const SgdOptions& o, double rate, int64_t begin,
                  int64_t end) {
  using A = acc_t<T>;
  T* param = static_cast<T*>(t.param);
  const T* grad = static_cast<const T*>(t.grad);
  T* velocity = static_cast<T*>(t.momentum);
  const A lr = static_cast<A>(rate), momentum = static_cast<A>(o.momentum);
  const A kept = static_cast<A>(1 - o.dampening), decay = static_cast<A>(o.weight_decay);
  const A unscale = o.grad_scale == nullptr ? A(1) : A(1) / static_cast<A>(*o.grad_scale);
  const bool negate = o.maximize, nesterov = o.nesterov;
  const bool first = o.first_step || (o.unwritten != nullptr && *o.unwritten != 0.0f);
  const auto gradient = [=](A g, A p) {
    g *= unscale;
    if (negate) g = -g;
    return decay != 0 ? g + decay * p : g;
  };
  if (velocity == nullptr) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const A p = param[i];
      param[i] = T(p - lr * gradient(grad[i], p));
    }
    return;
  }
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const A p = param[i];
    const A g = gradient(grad[i], p);
    const A old = first ? A(0) : A(velocity[i]);
    const A m = first ? g : momentum * old + kept * g;
    velocity[i] = T(m);
    param[i] = T(p - lr * (nesterov ? g + momentum * m : m));
  }
}

}  // namespace

void sgd(Stream, DType dtype, const SgdTensor* tensors, int64_t count, const SgdOptions& options) {
  if (options.found_inf != nullptr && *options.found_inf != 0.0f) return;
  const double lr = options.lr_tensor == nullptr ? options.lr
                    : options.lr_is_double       ? *static_cast<const double*>(options.lr_tensor)
                                                 : *static_cast<const float*>(options.lr_tensor);
  constexpr int64_t kChunk = 16384;
  std::vector<int64_t> first_chunk(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    first_chunk[i + 1] = first_chunk[i] + ceil_div(tensors[i].numel, kChunk);
  }
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(0, first_chunk[count], 1, [&](int64_t first, int64_t last) {
      for (int64_t chunk = first; chunk < last; ++chunk) {
        const auto after = std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk);
        const int64_t i = after - first_chunk.begin() - 1;
        const int64_t begin = (chunk - first_chunk[i]) * kChunk;
        update_range<T>(tensors[i], options, lr, begin, std::min(begin + kChunk, tensors[i].numel));
      }
    });
  });
}

bool sgd_takes_sources(DType, DType) { return false; }

}  // namespace braze::cpu
