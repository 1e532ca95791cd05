#include "launchers/muon.h"

#include "cpu/common/multi_tensor.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kMomentum({"muon_momentum", "simd", "float64 float32 bfloat16 float16", "cpu",
                             true, "vectorised; all parameters share the threads"});
const KernelEntry kPolynomial({"muon_polynomial", "simd", "float64 float32 bfloat16 float16", "cpu",
                               true, "vectorised, threaded"});

}  // namespace

void muon_momentum(Stream, DType dtype, const MuonTensor* tensors, int64_t count,
                   const MuonOptions& options) {
  multi_tensor_update<MuonUpdate>(dtype, tensors, count, options);
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

}  // namespace braze::cpu
