#include "launchers/softmax.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/common/exp.h"
#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "cpu/common/row_tiles.h"

namespace braze::cpu {
namespace {

constexpr KernelInfo kKernel = {
    "softmax", "simd", "float64 float32 bfloat16 float16",
    "cpu",     true,   "vectorised along the row, or across rows where they are strided"};
const KernelEntry kEntry(kKernel);

// kLog: of the logarithm. A condition inside the loops would have both sides computed.
template <bool kLog, typename In, typename Out>
void softmax_row(const In* x, Out* y, int64_t size) {
  using A = acc_t<In>;
  const RowSum<A> row = sum_of_row(x, size);
  if constexpr (kLog) {
    const A log_sum = std::log(row.sum);
    for (int64_t c = 0; c < size; ++c) y[c] = Out((A(x[c]) - row.maximum) - log_sum);
  } else {
    const A scale = A(1) / row.sum;
#pragma omp simd
    for (int64_t c = 0; c < size; ++c) y[c] = Out(vector_exp(A(x[c]) - row.maximum) * scale);
  }
}

template <bool kLog, typename In, typename Out>
void softmax_tile(const In* x, Out* y, int64_t size, int64_t inner, int count) {
  using A = acc_t<In>;
  A maximum[kTileRows], sum[kTileRows];
  sums_of_tile(x, size, inner, count, maximum, sum);
  for (int i = 0; i < count; ++i) sum[i] = kLog ? std::log(sum[i]) : A(1) / sum[i];
  for (int64_t c = 0; c < size; ++c) {
    const In* in = x + c * inner;
    Out* out = y + c * inner;
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      const A shifted = A(in[i]) - maximum[i];
      if constexpr (kLog) {
        out[i] = Out(shifted - sum[i]);
      } else {
        out[i] = Out(vector_exp(shifted) * sum[i]);
      }
    }
  }
}

// From the results and their gradients.
template <bool kLog, typename In, typename A>
In softmax_gradient(A grad, A result, A sum) {
  if constexpr (kLog) {
    return In(grad - vector_exp(result) * sum);
  } else {
    return In(result * (grad - sum));
  }
}

template <bool kLog, typename In, typename Out>
void softmax_backward_row(const Out* dy, const Out* y, In* dx, int64_t size) {
  using A = acc_t<In>;
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < size; ++c) sum += kLog ? A(dy[c]) : A(dy[c]) * A(y[c]);
#pragma omp simd
  for (int64_t c = 0; c < size; ++c) dx[c] = softmax_gradient<kLog, In, A>(dy[c], y[c], sum);
}

template <bool kLog, typename In, typename Out>
void softmax_backward_tile(const Out* dy, const Out* y, In* dx, int64_t size, int64_t inner,
                           int count) {
  using A = acc_t<In>;
  A sum[kTileRows] = {};
  for (int64_t c = 0; c < size; ++c) {
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      const A grad = dy[c * inner + i];
      sum[i] += kLog ? grad : grad * A(y[c * inner + i]);
    }
  }
  for (int64_t c = 0; c < size; ++c) {
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      const int64_t at = c * inner + i;
      dx[at] = softmax_gradient<kLog, In, A>(dy[at], y[at], sum[i]);
    }
  }
}

// f(input tag, result tag, whether of the logarithm) for the pairs of dtypes that exist.
template <typename F>
void dispatch_pair(DType input, DType result, bool log, F&& f) {
  const auto with_log = [&](auto in, auto out) {
    log ? f(in, out, std::true_type{}) : f(in, out, std::false_type{});
  };
  dispatch(input, [&](auto tag) {
    if constexpr (sizeof(typename decltype(tag)::type) == 2) {
      if (result == DType::kFloat32) return with_log(tag, TypeTag<float>{});
    }
    with_log(tag, tag);
  });
}

}  // namespace

void softmax(Stream, DType input_dtype, DType result_dtype, bool log, const RowShape& shape,
             const void* x, void* y) {
  dispatch_pair(input_dtype, result_dtype, log, [&](auto input_tag, auto result_tag, auto of_log) {
    constexpr bool kLog = decltype(of_log)::value;
    using In = typename decltype(input_tag)::type;
    using Out = typename decltype(result_tag)::type;
    const In* in = static_cast<const In*>(x);
    Out* out = static_cast<Out*>(y);
    for_each_tile(shape, [&](int64_t, int64_t base, int count) {
      if (shape.inner == 1) {
        softmax_row<kLog>(in + base, out + base, shape.size);
      } else {
        softmax_tile<kLog>(in + base, out + base, shape.size, shape.inner, count);
      }
    });
  });
}

const KernelInfo* softmax_rung_info(int number) { return number == 0 ? &kKernel : nullptr; }

void softmax_rung(Stream stream, DType input_dtype, DType result_dtype, const RowShape& shape,
                  const void* x, void* y, int) {
  softmax(stream, input_dtype, result_dtype, false, shape, x, y);
}

void softmax_backward(Stream, DType input_dtype, DType result_dtype, bool log,
                      const RowShape& shape, const void* dy, const void* y, void* dx) {
  dispatch_pair(input_dtype, result_dtype, log, [&](auto input_tag, auto result_tag, auto of_log) {
    constexpr bool kLog = decltype(of_log)::value;
    using In = typename decltype(input_tag)::type;
    using Out = typename decltype(result_tag)::type;
    const Out* grad = static_cast<const Out*>(dy);
    const Out* result = static_cast<const Out*>(y);
    In* out = static_cast<In*>(dx);
    for_each_tile(shape, [&](int64_t, int64_t base, int count) {
      if (shape.inner == 1) {
        softmax_backward_row<kLog>(grad + base, result + base, out + base, shape.size);
      } else {
        softmax_backward_tile<kLog>(grad + base, result + base, out + base, shape.size, shape.inner,
                                    count);
      }
    });
  });
}

}  // namespace braze::cpu
