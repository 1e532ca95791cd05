// Many tensors in another dtype in one launch: what autocast does to a model's parameters.
#include "cast_list.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

template <typename From, typename To>
__global__ void __launch_bounds__(kCastThreads) cast_kernel(const __grid_constant__ CastList list) {
  wait_for_earlier_kernels();
  cast_block<From, To>(list, blockIdx.x);
}

const KernelEntry kEntry({"cast", "multi_tensor", "float64 float32 bfloat16 float16", "sm_80+",
                          true, "many tensors in one launch, pointers as kernel parameters"});

}  // namespace

void cast(Stream stream, DType from, DType to, const CastTensor* tensors, int64_t count) {
  CastList list{};
  list.for_each_launch(tensors, count, [&] {
    dispatch(from, [&](auto source) {
      dispatch(to, [&](auto target) {
        launch_early(cast_kernel<typename decltype(source)::type, typename decltype(target)::type>,
                     list.blocks(), kCastThreads, 0, stream, list);
      });
    });
    check_launch("cast");
  });
}

}  // namespace braze::cuda
