#include "launchers/muon.h"

#include <cmath>

#include "cpu/common/multi_tensor.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kMomentum({"muon_momentum", "simd", "float64 float32 bfloat16 float16", "cpu",
                             true, "vectorised; all parameters share the threads"});
const KernelEntry kPolynomial({"muon_polynomial", "simd", "float64 float32 bfloat16 float16", "cpu",
                               true, "vectorised, threaded"});
const KernelEntry kNormalize({"muon_normalize", "simd", "float64 float32 bfloat16 float16", "cpu",
                              true, "vectorised; all matrices share the threads"});
const KernelEntry kUnpad({"muon_unpad", "simd", "bfloat16 float16", "cpu", true,
                          "vectorised; all matrices share the threads"});

// Elements [begin, end) of m.to.
template <typename T, typename Out>
void write_matrix(const MuonMatrix& m, acc_t<T> norm, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  Out* const to = static_cast<Out*>(m.to);
  for (int64_t i = begin; i < end;) {
    const int64_t row = i / m.to_pitch, column = i - row * m.to_pitch;
    const int64_t row_end = std::min(end, (row + 1) * m.to_pitch);
    int64_t values = 0;  // from here on in this row
    if (row < m.rows) values = std::clamp<int64_t>(m.columns - column, 0, row_end - i);
    if (values > 0) {
      const T* const from = static_cast<const T*>(m.from) + row * m.from_pitch + column;
      Out* const out = to + i;
#pragma omp simd
      for (int64_t k = 0; k < values; ++k) {
        out[k] = Out(static_cast<float>(static_cast<A>(from[k]) / norm));
      }
    }
    for (int64_t k = i + values; k < row_end; ++k) to[k] = Out(0.0f);
    i = row_end;
  }
}

}  // namespace

void muon_momentum(Stream, DType dtype, const MuonTensor* tensors, int64_t count,
                   const MuonOptions& options) {
  multi_tensor_update<MuonUpdate>(dtype, tensors, count, options);
  if (options.squares == nullptr) return;
  static_assert(kUpdateChunk % kMuonSquares == 0);
  std::vector<double*> squares(count, options.squares);  // of each tensor
  for (int64_t i = 1; i < count; ++i) {
    squares[i] = squares[i - 1] + muon_squares(tensors[i - 1].numel);
  }
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_part(tensors, count, [&](int64_t, int64_t i, int64_t begin, int64_t end) {
      const T* const values = static_cast<const T*>(tensors[i].param);
      for (int64_t at = begin; at < end; at += kMuonSquares) {
        squares[i][at / kMuonSquares] =
            sum_of_squares(values + at, std::min(kMuonSquares, end - at));
      }
    });
  });
}

void muon_polynomial(Stream, DType dtype, const void* gram, void* square, int64_t batch, int64_t n,
                     double a, double b, double c) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const A of_gram = static_cast<A>(b), of_square = static_cast<A>(c);
    parallel_for(0, batch * n, ceil_div(8192, n), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const T* const from = static_cast<const T*>(gram) + row * n;
        T* const to = static_cast<T*>(square) + row * n;
        const A diagonal =
            static_cast<A>(a) + of_gram * A(from[row % n]) + of_square * A(to[row % n]);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) to[i] = T(of_gram * A(from[i]) + of_square * A(to[i]));
        to[row % n] = T(diagonal);
      }
    });
  });
}

void muon_normalize(Stream, DType dtype, DType to, const MuonMatrix* matrices, int64_t count,
                    double eps) {
  dispatch(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    for_each_part(matrices, count, [&](int64_t, int64_t i, int64_t begin, int64_t end) {
      double sum = 0;
      for (int64_t p = 0; p < matrices[i].parts; ++p) sum += matrices[i].squares[p];
      const A norm = static_cast<A>(std::sqrt(sum)), least = static_cast<A>(eps);
      // A norm that is NaN stays it.
      const auto write = to == DType::kBFloat16 ? write_matrix<T, BFloat16> : write_matrix<T, Half>;
      write(matrices[i], norm < least ? least : norm, begin, end);
    });
  });
}

void muon_unpad(Stream, DType dtype, const MuonMatrix* matrices, int64_t count) {
  const auto write =
      dtype == DType::kBFloat16 ? write_matrix<BFloat16, BFloat16> : write_matrix<Half, Half>;
  for_each_part(matrices, count, [&](int64_t, int64_t i, int64_t begin, int64_t end) {
    write(matrices[i], 1, begin, end);
  });
}

}  // namespace braze::cpu
