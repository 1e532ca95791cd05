// Windows that lie side by side share no pixel: the images are matrices of patches, in the order of
// a filter's weights, once their elements are moved there. A pass writes them to the workspace (or,
// for an input gradient, from there), the rest is a 1 x 1 convolution of as many channels as a
// filter has weights. Rows of patches and of weights are padded to what TMA can address. Images of
// a single patch may be that matrix as they are.
//
// Bytes beside the product's: an image's, twice.
#include "patches.h"

#include <algorithm>
#include <climits>

#include "cuda/common/fast_div.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/matmul/hopper/plan.cuh"
#include "launchers/conv2d_patches.h"
#include "launchers/transpose.h"
#include "pointwise.h"
#include "strided.cuh"

namespace braze::cuda::patches {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kAlignment = 16;  // of a row, bytes

// How patches lie in a tensor, in units of a few bytes. A line has patches side by side, each of
// outer x middle x inner units; in the matrix a patch is a row, and lines follow each other.
struct Grid {
  FastDiv row, middle, inner;  // of a row with its padding, within a patch
  int units;                   // of a patch
  int patches;                 // of a line
  FastDiv lines;               // of an image
  int64_t image, line, patch;  // strides in the tensor
  int64_t outer_stride, middle_stride, inner_stride;
};

// To the matrix, zeros into the padding, or from there.
template <typename Unit, bool kToMatrix>
__global__ void __launch_bounds__(kThreads)
    move_patches_kernel(const __grid_constant__ Grid g, int lines, Unit* tensor, Unit* matrix) {
  wait_for_earlier_kernels();
  const int of_line = g.patches * g.row.divisor();
  for (int line = blockIdx.y; line < lines; line += gridDim.y) {
    int in_image;
    const int image = g.lines.div(line, in_image);
    Unit* const from = tensor + image * g.image + in_image * g.line;
    Unit* const to = matrix + int64_t{line} * of_line;
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < of_line; i += gridDim.x * kThreads) {
      int unit, inner, middle;
      const int patch = g.row.div(i, unit);
      const int outer = g.middle.div(g.inner.div(unit, inner), middle);
      const int64_t at = patch * g.patch + outer * g.outer_stride + middle * g.middle_stride +
                         inner * g.inner_stride;
      if constexpr (kToMatrix) {
        to[i] = unit < g.units ? from[at] : Unit{};
      } else {
        if (unit < g.units) from[at] = to[i];
      }
    }
  }
}

template <typename Unit>
void launch(Stream stream, const Grid& g, int64_t lines, const void* tensor, const void* matrix,
            bool to_matrix) {
  const int64_t blocks = ceil_div(int64_t{g.patches} * g.row.divisor(), kThreads);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(blocks, sm_count() * 8)),
                  static_cast<unsigned>(std::clamp<int64_t>(lines, 1, 65535)));
  const auto kernel =
      to_matrix ? move_patches_kernel<Unit, true> : move_patches_kernel<Unit, false>;
  launch_early(kernel, grid, kThreads, 0, stream, g, static_cast<int>(lines),
               static_cast<Unit*>(const_cast<void*>(tensor)),
               static_cast<Unit*>(const_cast<void*>(matrix)));
  check_launch("conv2d patches");
}

const Tensor4dRef& input_of(const Conv2dArgs& args) {
  return args.pass == Conv2dPass::kDgrad ? args.out : args.gathered;
}
const Tensor4dRef& weights_of(const Conv2dArgs& args) {
  return args.pass == Conv2dPass::kWgrad ? args.out : args.other;
}

// Elements of a row.
int64_t padded(const Conv2dShape& s) {
  const int64_t width = kAlignment / size_of(s.dtype);
  return ceil_div(weights_of_filter(s), width) * width;
}

// How many lines of how many patches images have, and strides between these, in elements.
struct Lines {
  int64_t images, lines, patches;
  int64_t image, line, patch;
};

void move(Stream stream, const Conv2dShape& s, const void* tensor, const void* matrix,
          const Lines& l, const PatchExtents& extents, bool to_matrix) {
  auto [outer, middle, inner] = extents;
  const int64_t size = size_of(s.dtype);
  int64_t bytes = size;
  if (inner.stride == 1) {
    bytes = pointwise::unit_bytes(
        size, inner.count, {l.image, l.line, l.patch, outer.stride, middle.stride, padded(s)},
        tensor, matrix);
  }
  const int64_t each = bytes / size;
  Grid g{};
  inner.count /= each;
  g.row = FastDiv(padded(s) / each);
  g.middle = FastDiv(middle.count), g.inner = FastDiv(inner.count);
  g.units = static_cast<int>(outer.count * middle.count * inner.count);
  g.patches = static_cast<int>(l.patches);
  g.lines = FastDiv(l.lines);
  g.image = l.image / each, g.line = l.line / each, g.patch = l.patch / each;
  g.outer_stride = outer.stride / each, g.middle_stride = middle.stride / each;
  g.inner_stride = inner.stride;
  const int64_t all = l.images * l.lines;
  switch (bytes) {
    case 2: return launch<uint16_t>(stream, g, all, tensor, matrix, to_matrix);
    case 4: return launch<uint32_t>(stream, g, all, tensor, matrix, to_matrix);
    case 8: return launch<uint2>(stream, g, all, tensor, matrix, to_matrix);
    default: return launch<uint4>(stream, g, all, tensor, matrix, to_matrix);
  }
}

// The input's patches, in the order of the weights.
void move_input(Stream stream, const Conv2dArgs& args, const void* matrix) {
  const Conv2dShape& s = args.shape;
  const Tensor4dRef& x = input_of(args);
  move(stream, s, x.data, matrix, {s.n, s.p, s.q, x.n, s.r * x.h, s.s * x.w},
       patch_extents(s, x, weights_of(args)), args.pass != Conv2dPass::kDgrad);
}

// Weights with their padding, as they are without.
void move_weights(Stream stream, const Conv2dArgs& args, const void* matrix, bool to_matrix) {
  const Conv2dShape& s = args.shape;
  const int64_t count = weights_of_filter(s);
  move(stream, s, weights_of(args).data, matrix, {1, s.k, 1, 0, count, 0},
       {{1, 0}, {1, 0}, {count, 1}}, to_matrix);
}

bool pads(const Conv2dShape& s) { return padded(s) != weights_of_filter(s); }

bool is_matrix(const Conv2dArgs& args) {
  return !pads(args.shape) && images_are_patches(args.shape, input_of(args), weights_of(args));
}

// A weight gradient's product takes the result's gradient with its channels last.
bool transposes(const Conv2dArgs& args) {
  return args.pass == Conv2dPass::kWgrad && args.other.c != 1 && args.shape.k > 1;
}

// The parts of the workspace: patches, weights where they are padded, gradients where they are
// transposed, what the product has.
struct Memory {
  char *matrix, *weights, *gradients, *rest;

  Memory(const Conv2dArgs& args, void* workspace) : matrix(static_cast<char*>(workspace)) {
    const Conv2dShape& s = args.shape;
    const int64_t size = size_of(s.dtype), pixels = s.n * s.p * s.q;
    weights = matrix + (is_matrix(args) ? 0 : hopper::aligned(pixels * padded(s) * size));
    gradients = weights + (pads(s) ? hopper::aligned(s.k * padded(s) * size) : 0);
    rest = gradients + (transposes(args) ? hopper::aligned(pixels * s.k * size) : 0);
  }
};

// The 1 x 1 convolution.
Conv2dArgs product_of(const Conv2dArgs& args, const Memory& memory) {
  Conv2dArgs result = args;
  const Conv2dShape& s = args.shape;
  const int64_t row = padded(s);
  result.shape = shape_of_patches(s, row);
  const Tensor4dRef x = patches_at(s, is_matrix(args) ? input_of(args).data : memory.matrix, row);
  (args.pass == Conv2dPass::kDgrad ? result.out : result.gathered) = x;
  const void* const data = pads(s) ? memory.weights : weights_of(args).data;
  (args.pass == Conv2dPass::kWgrad ? result.out : result.other) = {data, row, 1, row, row};
  if (transposes(args)) {
    result.other = {memory.gradients, s.p * s.q * s.k, 1, s.q * s.k, s.k};
  }
  return result;
}

}  // namespace

const char* obstacle(const Conv2dArgs& args) {
  const Conv2dShape& s = args.shape;
  if (const char* why = patches_obstacle(args.pass, s, weights_of(args))) return why;
  const int64_t lines = s.n * s.p, of_line = s.q * padded(s);
  if (std::max({lines, of_line, weights_of_filter(s) * s.k}) > INT_MAX) {
    return "it counts with 31 bits";
  }
  const Tensor4dRef& dy = args.other;
  if (transposes(args) && !(dy.w == 1 && dy.h == s.q && dy.c == s.p * s.q && dy.n == s.k * dy.c)) {
    return "the gradients that its weight gradient takes are dense";
  }
  return pointwise::obstacle(product_of(args, Memory(args, nullptr)));
}

void plan(const Conv2dArgs& args, Conv2dPlan* plan) {
  const Memory memory(args, nullptr);
  pointwise::plan(product_of(args, memory), plan);
  plan->workspace_bytes += memory.rest - memory.matrix;
}

void run(Stream stream, const Conv2dArgs& args, const Conv2dPlan& plan, void* workspace) {
  const Conv2dShape& s = args.shape;
  const Memory memory(args, workspace);
  const bool dgrad = args.pass == Conv2dPass::kDgrad, wgrad = args.pass == Conv2dPass::kWgrad;
  const bool moves = !is_matrix(args);
  if (moves && !dgrad) move_input(stream, args, memory.matrix);
  if (pads(s) && !wgrad) move_weights(stream, args, memory.weights, true);
  if (transposes(args)) {
    transpose_copy(stream, s.dtype, args.other.data, memory.gradients, s.n, s.k, s.p * s.q);
  }
  pointwise::run(stream, product_of(args, memory), plan, memory.rest);
  if (moves && dgrad) move_input(stream, args, memory.matrix);
  if (pads(s) && wgrad) move_weights(stream, args, memory.weights, false);
}

}  // namespace braze::cuda::patches
