#include "launchers/scale_add.h"

#include "cpu/common/channel_grads.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

constexpr int64_t kGrainElements = 8192;  // of a task

const KernelEntry kEntry({"scale_add", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "threaded over rows, forward; over channels, backward"});

// f(tag of x, tag of the result, tag of the scale).
template <typename F>
void dispatch_types(const ScaleAddShape& shape, const F& f) {
  dispatch(shape.dtype, [&](auto in) {
    using T = typename decltype(in)::type;
    dispatch_parameter<T>(shape.result, [&](auto out) {
      dispatch_parameter<T>(shape.scale, [&](auto scale) { f(in, out, scale); });
    });
  });
}

// Calls f(offset, channel, count) for elements that follow each other in memory, of channels that
// do so too (inner = 1) or of one.
template <typename F>
void for_each_line(const ScaleAddShape& shape, const F& f) {
  const bool rows = shape.inner == 1;
  const int64_t line = rows ? shape.channels : shape.inner;
  const int64_t lines = rows ? shape.outer : shape.outer * shape.channels;
  parallel_for(0, lines, ceil_div(kGrainElements, line), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) f(i * line, rows ? 0 : i % shape.channels, line);
  });
}

}  // namespace

void scale_add(Stream, const ScaleAddShape& shape, const void* x, const void* scale,
               const void* residual, void* y) {
  dispatch_types(shape, [&](auto in, auto out, auto parameter) {
    using In = typename decltype(in)::type;
    using Out = typename decltype(out)::type;
    using A = acc_t<In>;
    const auto* scales = static_cast<const typename decltype(parameter)::type*>(scale);
    const int64_t step = shape.inner == 1;
    dispatch_parameter<In>(shape.residual, [&](auto added) {
      const auto* terms = static_cast<const typename decltype(added)::type*>(residual);
      for_each_line(shape, [&](int64_t offset, int64_t channel, int64_t count) {
        const In* from = static_cast<const In*>(x) + offset;
        Out* to = static_cast<Out*>(y) + offset;
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) {
          to[j] = Out(A(terms[offset + j]) + A(scales[channel + j * step]) * A(from[j]));
        }
      });
    });
  });
}

void scale_add_backward(Stream, const ScaleAddShape& shape, const void* dy, const void* x,
                        const void* scale, void* dx, void* dscale, void*) {
  dispatch_types(shape, [&](auto in, auto out, auto parameter) {
    using In = typename decltype(in)::type;
    using Out = typename decltype(out)::type;
    using Scale = typename decltype(parameter)::type;
    using A = acc_t<In>;
    const Out* grads = static_cast<const Out*>(dy);
    const Scale* scales = static_cast<const Scale*>(scale);
    const int64_t step = shape.inner == 1;
    if (dx) {
      for_each_line(shape, [&](int64_t offset, int64_t channel, int64_t count) {
        In* to = static_cast<In*>(dx) + offset;
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) {
          to[j] = In(A(grads[offset + j]) * A(scales[channel + j * step]));
        }
      });
    }
    if (dscale) {
      const In* values = static_cast<const In*>(x);
      channel_sums(
          shape.outer, shape.channels, shape.inner,
          [&](int64_t i) { return A(grads[i]) * A(values[i]); },
          [&](int64_t c, double sum) { static_cast<Scale*>(dscale)[c] = Scale(A(sum)); });
    }
  });
}

int64_t scale_add_workspace_bytes(const ScaleAddShape&) { return 0; }

}  // namespace braze::cpu
