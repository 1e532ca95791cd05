#include "launchers/transpose.h"

#include "ops/backend.h"

namespace braze {
namespace {

Tensor transpose_copy(const Tensor& input, const std::string& backend) {
  const DType dtype = dtype_of("transpose_copy", "input", input);
  BRAZE_CHECK(input.dim() >= 2, "transpose_copy: expected input of 2 or more dimensions, but got ",
              input.dim());
  const int64_t rows = input.size(input.dim() - 2), cols = input.size(input.dim() - 1);
  std::vector<int64_t> sizes;
  int64_t batch = 1;
  for (int64_t d = 0; d < input.dim() - 2; ++d) {
    sizes.push_back(input.size(d));
    batch *= input.size(d);
  }
  sizes.push_back(cols);
  sizes.push_back(rows);
  const Wish wish = wish_of("transpose_copy", backend, dev::transpose_kernel);
  const DeviceContext context(input);
  Tensor out = empty(sizes, input);
  const Tensor x = as_contiguous(input);
  dev::transpose_copy(context.stream(), dtype, x.const_data_ptr(), out.mutable_data_ptr(), batch,
                      rows, cols, wish.kernel());
  return out;
}

}  // namespace

BRAZE_IMPL(m) { m.impl("transpose_copy", TORCH_BOX(&transpose_copy)); }

}  // namespace braze
