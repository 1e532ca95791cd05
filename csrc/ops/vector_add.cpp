#include "launchers/vector_add.h"

#include "ops/backend.h"

namespace braze {
namespace {

// Any dense layout of `a` is kept, as in relu.cpp.
Tensor vector_add(const Tensor& a, const Tensor& b, const std::string& backend) {
  const DType dtype = dtype_of("vector_add", "a", a);
  check_same_device("vector_add", "b", b, "a", a);
  check_same_dtype("vector_add", "b", b, "a", a);
  check_same_shape("vector_add", "b", b, "a", a);
  const Wish wish = wish_of("vector_add", backend, dev::vector_add_kernel);
  const DeviceContext context(a);
  Tensor out = dense_like(a);
  const Tensor left = with_layout_of(a, out), right = with_layout_of(b, out);
  dev::vector_add(context.stream(), dtype, left.const_data_ptr(), right.const_data_ptr(),
                  out.mutable_data_ptr(), out.numel(), wish.kernel());
  return out;
}

}  // namespace

BRAZE_IMPL(m) { m.impl("vector_add", TORCH_BOX(&vector_add)); }

}  // namespace braze
