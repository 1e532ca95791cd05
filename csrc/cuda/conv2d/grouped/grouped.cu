// What the kernels take, and how they run.
#include "grouped.h"

#include "plan.cuh"
#include "cuda/common/ordered_sum.cuh"

namespace braze::cuda::grouped {
namespace {

constexpr int kMaxExtent = 1 << 24, kMaxTaps = 64;

bool is_wgrad(const Conv2dArgs& args) { return args.pass == Conv2dPass::kWgrad; }

std::optional<Tile> tile_for(const Conv2dArgs& args) {
  return is_wgrad(args) ? wgrad_tile(args) : product_tile(args);
}

// From a filter's first element to the last, in elements.
int64_t last_of(const Tensor4dRef& w, const Conv2dShape& s) {
  return (s.k - 1) * w.n + (s.c / s.groups - 1) * w.c + narrow::last_tap(w, s);
}

}  // namespace

const char* obstacle(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (s.dtype == DType::kFloat64) return "it takes float32, bfloat16 and float16";
  if (s.groups == 1) return "it takes several groups";
  const Tensor4dRef& other = is_wgrad(args) ? args.other : args.out;
  if (args.gathered.c != 1 || other.c != 1) return "it takes channels-last tensors";
  const bool strided = s.stride_h > 1 || s.stride_w > 1;
  if (args.pass == Conv2dPass::kDgrad && strided) {
    const bool dilated = s.dilation_h > 1 || s.dilation_w > 1;
    if (dilated || s.stride_h * s.stride_w > kMaxClasses) {
      return "it has input gradients of strides of up to 2, without dilation if not of 1";
    }
  }
  const bool small =
      std::max({s.r, s.s, s.stride_h, s.stride_w, s.dilation_h, s.dilation_w}) <= kMaxTaps &&
      std::max({s.n, s.h, s.w, s.p, s.q, s.pad_h, s.pad_w, s.c, s.k}) < kMaxExtent;
  if (!small) return "it takes filters, strides and dilations of up to 64";
  const Tensor4dRef& w = is_wgrad(args) ? args.out : args.other;
  if (last_of(w, s) >= INT_MAX / 2) return "it addresses filters with 31 bits";
  if (is_wgrad(args) && last_of(w, s) != s.k * (s.c / s.groups) * s.r * s.s - 1) {
    return "it writes a dense gradient";
  }
  return tile_for(args) ? nullptr : "its tiles do not fit shared memory";
}

void plan(const Conv2dArgs& args, Conv2dPlan* plan) {
  const Tile tile = *tile_for(args);
  plan->tiling.set(tile);
  if (is_wgrad(args)) {
    const Conv2dShape& s = args.shape;
    plan->workspace_bytes = int64_t{tile.blocks} * s.k * (s.c / s.groups) * s.r * s.s * 4;
  }
}

void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace) {
  const Tile& tile = plan.tiling.get<Tile>();
  if (!is_wgrad(args)) return launch_product(stream, args, tile);
  float* const partial = static_cast<float*>(workspace);
  launch_wgrad(stream, args, tile, partial);
  const Conv2dShape& s = args.shape;
  dispatch(s.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      launch_ordered_sum(stream, static_cast<const float*>(partial), tile.blocks,
                         s.k * (s.c / s.groups) * s.r * s.s,
                         static_cast<T*>(const_cast<void*>(args.out.data)));
    }
  });
}

}  // namespace braze::cuda::grouped
