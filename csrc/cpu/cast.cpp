#include "launchers/cast.h"

#include <cstring>

#include "cpu/common/convert_all.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

const KernelEntry kEntry({"cast", "simd", "float64 float32 bfloat16 float16", "cpu", true,
                          "vectorised"});

}  // namespace

void cast(Stream, DType from, DType to, const CastTensor* tensors, int64_t count) {
  if (from == to) {
    for (const CastTensor* t = tensors; t != tensors + count; ++t) {
      const char* const in = static_cast<const char*>(t->from);
      char* const out = static_cast<char*>(t->to);
      parallel_for(0, t->numel * size_of(from), int64_t{1} << 17, [&](int64_t begin, int64_t end) {
        std::memmove(out + begin, in + begin, end - begin);
      });
    }
    return;
  }
  convert_all(from, to, tensors, count, [](const CastTensor& t, auto of_type) {
    using From = decltype(of_type);
    const From* const in = static_cast<const From*>(t.from);
    return [in](int64_t j) { return acc_t<From>(in[j]); };
  });
}

}  // namespace braze::cpu
