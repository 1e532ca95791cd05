#include "kernels/softmax/softmax.h"

#include <algorithm>
#include <limits>

#include "cpu/exp.h"
#include "cpu/numeric.h"
#include "cpu/parallel.h"
#include "cpu/row_tiles.h"
#include "kernels/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"softmax", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised along the row, or across rows where they are strided"});

template <typename In, typename Out>
void softmax_row(bool log_result, const In* x, Out* y, int64_t size) {
  using A = acc_t<In>;
  const RowSum<A> row = sum_of_row(x, size);
  if (log_result) {
    const A log_sum = std::log(row.sum);
    for (int64_t c = 0; c < size; ++c) y[c] = Out((A(x[c]) - row.maximum) - log_sum);
  } else {
    const A scale = A(1) / row.sum;
#pragma omp simd
    for (int64_t c = 0; c < size; ++c) y[c] = Out(vector_exp(A(x[c]) - row.maximum) * scale);
  }
}

template <typename In, typename Out>
void softmax_tile(bool log_result, const In* x, Out* y, int64_t size, int64_t inner, int count) {
  using A = acc_t<In>;
  A maximum[kTileRows], sum[kTileRows];
  sums_of_tile(x, size, inner, count, maximum, sum);
  for (int i = 0; i < count; ++i) sum[i] = log_result ? std::log(sum[i]) : A(1) / sum[i];
  for (int64_t c = 0; c < size; ++c) {
    const In* in = x + c * inner;
    Out* out = y + c * inner;
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      const A shifted = A(in[i]) - maximum[i];
      out[i] = Out(log_result ? shifted - sum[i] : vector_exp(shifted) * sum[i]);
    }
  }
}

template <typename In, typename Out>
void softmax_backward_row(bool log_result, const Out* dy, const Out* y, In* dx, int64_t size) {
  using A = acc_t<In>;
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < size; ++c) sum += log_result ? A(dy[c]) : A(dy[c]) * A(y[c]);
#pragma omp simd
  for (int64_t c = 0; c < size; ++c) {
    const A grad = dy[c], result = y[c];
    dx[c] = In(log_result ? grad - vector_exp(result) * sum : result * (grad - sum));
  }
}

template <typename In, typename Out>
void softmax_backward_tile(bool log_result, const Out* dy, const Out* y, In* dx, int64_t size,
                           int64_t inner, int count) {
  using A = acc_t<In>;
  A sum[kTileRows] = {};
  for (int64_t c = 0; c < size; ++c) {
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      const A grad = dy[c * inner + i];
      sum[i] += log_result ? grad : grad * A(y[c * inner + i]);
    }
  }
  for (int64_t c = 0; c < size; ++c) {
#pragma omp simd
    for (int i = 0; i < count; ++i) {
      const A grad = dy[c * inner + i], result = y[c * inner + i];
      dx[c * inner + i] =
          In(log_result ? grad - vector_exp(result) * sum[i] : result * (grad - sum[i]));
    }
  }
}

// f(input tag, result tag) for the pairs of dtypes that exist.
template <typename F>
void dispatch_pair(DType input, DType result, F&& f) {
  dispatch(input, [&](auto tag) {
    if constexpr (sizeof(typename decltype(tag)::type) == 2) {
      if (result == DType::kFloat32) return f(tag, TypeTag<float>{});
    }
    f(tag, tag);
  });
}

}  // namespace

void softmax(Stream, DType input_dtype, DType result_dtype, bool log, const RowShape& shape,
             const void* x, void* y) {
  dispatch_pair(input_dtype, result_dtype, [&](auto input_tag, auto result_tag) {
    using In = typename decltype(input_tag)::type;
    using Out = typename decltype(result_tag)::type;
    const In* in = static_cast<const In*>(x);
    Out* out = static_cast<Out*>(y);
    for_each_tile(shape, [&](int64_t, int64_t base, int count) {
      if (shape.inner == 1) {
        softmax_row(log, in + base, out + base, shape.size);
      } else {
        softmax_tile(log, in + base, out + base, shape.size, shape.inner, count);
      }
    });
  });
}

void softmax_backward(Stream, DType input_dtype, DType result_dtype, bool log,
                      const RowShape& shape, const void* dy, const void* y, void* dx) {
  dispatch_pair(input_dtype, result_dtype, [&](auto input_tag, auto result_tag) {
    using In = typename decltype(input_tag)::type;
    using Out = typename decltype(result_tag)::type;
    const Out* grad = static_cast<const Out*>(dy);
    const Out* result = static_cast<const Out*>(y);
    In* out = static_cast<In*>(dx);
    for_each_tile(shape, [&](int64_t, int64_t base, int count) {
      if (shape.inner == 1) {
        softmax_backward_row(log, grad + base, result + base, out + base, shape.size);
      } else {
        softmax_backward_tile(log, grad + base, result + base, out + base, shape.size, shape.inner,
                              count);
      }
    });
  });
}

}  // namespace braze::cpu
