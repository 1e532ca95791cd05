// The second rung: im2col. The inputs that each result meets, its patch, are written down as a row
// of a matrix, after K. Chellapilla, S. Puri and P. Simard, "High performance convolutional neural
// networks for document processing" (2006); the three passes are then products, which a fast kernel
// exists for. Over the rung below this wins what blocked products win over plain loops. What it
// costs is memory: a matrix R * S times as large as the input is written and read back, which the
// shipped kernel (implicit_gemm) does not: it finds the same values in a padded copy of a part of
// the image.
#include <algorithm>

#include "cpu/common/numeric.h"
#include "cpu/common/parallel.h"
#include "cpu/conv2d/kernels.h"

namespace braze::cpu {
namespace {

// The matrices of one group: patches (pixels x weights of a filter), results (pixels x filters).
struct Im2col {
  explicit Im2col(const Conv2dProblem& problem)
      : problem(problem),
        pixels(problem.shape.n * problem.shape.p * problem.shape.q),
        channels(problem.shape.c / problem.shape.groups),
        filters(problem.shape.k / problem.shape.groups),
        taps(channels * problem.shape.r * problem.shape.s),
        patch_bytes(round_up_64(pixels * taps * size_of(problem.shape.dtype))),
        result_bytes(round_up_64(pixels * filters * size_of(problem.shape.dtype))) {}
  static int64_t round_up_64(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

  // The product of a pass, whose operands begin at those addresses.
  MatmulArgs product(const void* patches, const void* results, const void* weight,
                     const void* bias) const {
    MatmulArgs args{};
    args.dtype = problem.shape.dtype;
    args.batch = 1;
    args.bias = bias;
    const MatrixRef of_patches{patches, 0, taps, 1}, of_results{results, 0, filters, 1};
    switch (problem.pass) {
      case Conv2dPass::kFprop:  // results = patches * weight'
        args.m = pixels, args.n = filters, args.k = taps;
        args.a = of_patches, args.b = {weight, 0, 1, taps};
        args.c = const_cast<void*>(results);
        break;
      case Conv2dPass::kDgrad:  // patches = results * weight
        args.m = pixels, args.n = taps, args.k = filters;
        args.a = of_results, args.b = {weight, 0, taps, 1};
        args.c = const_cast<void*>(patches);
        break;
      case Conv2dPass::kWgrad:  // weight = results' * patches
        args.m = filters, args.n = taps, args.k = pixels;
        args.a = {results, 0, 1, filters}, args.b = of_patches;
        args.c = const_cast<void*>(weight);
        break;
    }
    return args;
  }

  const Conv2dProblem& problem;
  int64_t pixels, channels, filters, taps;
  int64_t patch_bytes, result_bytes;
};

// Calls f(column of the patch, offset into the image) for each tap of a pixel's patch that lies
// within the image. A weight's place in memory says which column is its own.
template <typename F>
void for_each_tap(const Conv2dProblem& problem, int64_t p, int64_t q, const F& f) {
  const Conv2dShape& s = problem.shape;
  for (int64_t r = 0; r < s.r; ++r) {
    const int64_t h = p * s.stride_h - s.pad_h + r * s.dilation_h;
    for (int64_t v = 0; v < s.s && h >= 0 && h < s.h; ++v) {
      const int64_t w = q * s.stride_w - s.pad_w + v * s.dilation_w;
      if (w < 0 || w >= s.w) continue;
      for (int64_t c = 0; c < s.c / s.groups; ++c) {
        f(c * problem.w.c + r * problem.w.h + v * problem.w.w,
          c * problem.x.c + h * problem.x.h + w * problem.x.w);
      }
    }
  }
}

// Calls f(n, p, q, number of the pixel) for all of them; an image is one task.
template <typename F>
void for_each_pixel(const Conv2dShape& s, const F& f) {
  parallel_for(0, s.n, 1, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) {
      for (int64_t p = 0; p < s.p; ++p) {
        for (int64_t q = 0; q < s.q; ++q) f(n, p, q, (n * s.p + p) * s.q + q);
      }
    }
  });
}

template <typename T>
T* data_of(const Tensor4dRef& t) {
  return static_cast<T*>(const_cast<void*>(t.data));
}

template <typename T>
void write_patches(const Im2col& m, int64_t group, T* patches) {
  const Tensor4dRef& x = m.problem.x;
  for_each_pixel(m.problem.shape, [&](int64_t n, int64_t p, int64_t q, int64_t pixel) {
    const T* const image = data_of<T>(x) + n * x.n + group * m.channels * x.c;
    T* const patch = patches + pixel * m.taps;
    std::fill_n(patch, m.taps, T(0));
    for_each_tap(m.problem, p, q,
                 [&](int64_t column, int64_t offset) { patch[column] = image[offset]; });
  });
}

// The way back, of a gradient: sums of all patches that an input is in.
template <typename T>
void add_patches(const Im2col& m, int64_t group, const T* patches, acc_t<T>* sums, const T* bias) {
  const auto& [pass, s, x, w, y] = m.problem;
  // One image after the other, its pixels in order: the sums are always the same.
  for (int64_t n = 0; n < s.n; ++n) {
    T* const image = data_of<T>(x) + n * x.n + group * m.channels * x.c;
    const auto for_each_input = [&, &s = s, &x = x](const auto& f) {
      for (int64_t c = 0; c < m.channels; ++c) {
        for (int64_t h = 0; h < s.h; ++h) {
          for (int64_t v = 0; v < s.w; ++v) f(c * x.c + h * x.h + v * x.w, c);
        }
      }
    };
    for_each_input([&](int64_t offset, int64_t) { sums[offset] = 0; });
    for (int64_t p = 0; p < s.p; ++p) {
      for (int64_t q = 0; q < s.q; ++q) {
        const T* const patch = patches + ((n * s.p + p) * s.q + q) * m.taps;
        for_each_tap(m.problem, p, q, [&](int64_t column, int64_t offset) {
          sums[offset] += static_cast<acc_t<T>>(patch[column]);
        });
      }
    }
    for_each_input([&](int64_t offset, int64_t c) {
      const acc_t<T> shift = bias ? acc_t<T>(bias[group * m.channels + c]) : acc_t<T>(0);
      image[offset] = T(sums[offset] + shift);
    });
  }
}

// Copies y to pixels x filters, or back.
template <typename T>
void copy_results(const Im2col& m, int64_t group, T* results, bool back) {
  const Tensor4dRef& y = m.problem.y;
  for_each_pixel(m.problem.shape, [&](int64_t n, int64_t p, int64_t q, int64_t pixel) {
    T* const from = data_of<T>(y) + n * y.n + group * m.filters * y.c + p * y.h + q * y.w;
    T* const row = results + pixel * m.filters;
    for (int64_t k = 0; k < m.filters; ++k) {
      if (back) {
        from[k * y.c] = row[k];
      } else {
        row[k] = from[k * y.c];
      }
    }
  });
}

// Elements that the sums of an image's gradient span.
int64_t image_extent(const Conv2dProblem& problem) {
  const auto& [pass, s, x, w, y] = problem;
  return (s.c / s.groups - 1) * x.c + (s.h - 1) * x.h + (s.w - 1) * x.w + 1;
}

int64_t sum_bytes(const Conv2dProblem& problem) {
  if (problem.pass != Conv2dPass::kDgrad) return 0;
  return Im2col::round_up_64(image_extent(problem) *
                             (problem.shape.dtype == DType::kFloat64 ? 8 : 4));
}

}  // namespace

const char* im2col_obstacle(const Conv2dProblem& problem) {
  const Conv2dShape& s = problem.shape;
  return problem.w.n == s.c / s.groups * s.r * s.s ? nullptr : "im2col takes dense filters";
}

void plan_im2col(const Conv2dProblem& problem, Conv2dPlan* plan) {
  const Im2col m(problem);
  plan->product = plan_matmul(m.product(nullptr, nullptr, nullptr, nullptr), kAnyKernel);
  plan->workspace_bytes =
      m.patch_bytes + m.result_bytes + sum_bytes(problem) + plan->product.workspace_bytes;
}

void run_im2col(const Conv2dProblem& problem, const Conv2dPlan& plan, const void* bias,
                void* workspace) {
  dispatch(problem.shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Im2col m(problem);
    char* memory = static_cast<char*>(workspace);
    T* const patches = reinterpret_cast<T*>(memory);
    T* const results = reinterpret_cast<T*>(memory += m.patch_bytes);
    auto* const sums = reinterpret_cast<acc_t<T>*>(memory += m.result_bytes);
    memory += sum_bytes(problem);
    for (int64_t group = 0; group < problem.shape.groups; ++group) {
      const T* const weight = data_of<T>(problem.w) + group * m.filters * problem.w.n;
      const T* const shift = static_cast<const T*>(bias);
      const bool is_fprop = problem.pass == Conv2dPass::kFprop;
      if (problem.pass != Conv2dPass::kDgrad) write_patches(m, group, patches);
      if (!is_fprop) copy_results(m, group, results, false);
      const T* const row = is_fprop && bias ? shift + group * m.filters : nullptr;
      run_matmul(nullptr, m.product(patches, results, weight, row), plan.product, memory);
      if (is_fprop) copy_results(m, group, results, true);
      if (problem.pass == Conv2dPass::kDgrad) add_patches(m, group, patches, sums, shift);
    }
  });
}

}  // namespace braze::cpu
