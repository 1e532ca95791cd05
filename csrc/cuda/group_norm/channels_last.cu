// Launches channels_last.cuh.
//
// Bytes per element of a 16-bit tensor: forward 6 (x twice, y), backward 10 (dy and x twice, dx),
// of a float32 result 8 and 14; the second time they come from the L2 cache as far as it holds
// them.
#include "channels_last.h"

#include "channels_last.cuh"
#include "launchers/common/registry.h"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"group_norm", "channels_last", "float64 float32 bfloat16 float16",
                          "sm_80+", true, "sums of the channels of parts of each image"});

RowPlan sums_plan(const GroupNormShape& shape, int width) {
  return with_parts_of_images(plan_row_sums(shape.n * shape.inner, shape.c / width), shape.n);
}
RowPlan pass_plan(const GroupNormShape& shape, int width) {
  return with_parts_of_images(plan_row_pass(shape.n * shape.inner, shape.c / width), shape.n);
}

ImageGroups groups_of(const GroupNormShape& shape, const RowPlan& plan) {
  return {shape.c, static_cast<int>(shape.groups), FastDiv(plan.parts / shape.n),
          FastDiv(shape.channels())};
}

// f(integral constant kLanes): threads that merge `items`.
template <typename F>
void with_team(int64_t items, const F& f) {
  if (items <= 16) {
    f(std::integral_constant<int, 4>{});
  } else if (items <= 512) {
    f(std::integral_constant<int, 32>{});
  } else {
    f(std::integral_constant<int, 512>{});
  }
}

template <int kLanes, typename... Params, typename... Args>
void launch_teams(Stream stream, int64_t groups, void (*kernel)(Params...), const Args&... args) {
  constexpr int kThreads = std::max(kLanes, kImageTeamThreads);
  launch_early(kernel, static_cast<unsigned>(ceil_div(groups * kLanes, kThreads)), kThreads, 0,
               stream, args...);
}

// The parts of the workspace.
template <typename Partial, typename A>
struct ImageMemory {
  Partial* partials;
  A* of_channels;  // of all images
  A* of_groups;

  ImageMemory(void* workspace, const GroupNormShape& shape, int parts)
      : partials(static_cast<Partial*>(workspace)),
        of_channels(reinterpret_cast<A*>(partials + aligned(shape.c * parts))),
        of_groups(of_channels + aligned(2 * shape.planes())) {}

  static int64_t bytes(const GroupNormShape& shape, int parts) {
    return aligned(shape.c * parts) * int64_t{sizeof(Partial)} +
           (aligned(2 * shape.planes()) + 2 * shape.rows()) * int64_t{sizeof(A)};
  }
  static int64_t aligned(int64_t count) { return ceil_div(count, int64_t{8}) * 8; }
};

// f(tag of the result's type, whether there is an activation, its code), for elements T in vectors
// of N.
template <typename T, int N, typename F>
void with_result_and_code(const GroupNormShape& shape, const F& f) {
  constexpr auto kNone = std::integral_constant<ActivationCode, ActivationCode::kClamp>{};
  if constexpr (sizeof(T) == 2) {
    if (shape.result == DType::kFloat32) return f(TypeTag<float>{}, std::false_type{}, kNone);
  }
  if (shape.activation.identity()) return f(TypeTag<T>{}, std::false_type{}, kNone);
  with_activation_code<T, N>(shape.activation,
                             [&](auto code) { f(TypeTag<T>{}, std::true_type{}, code); });
}

// f(T, integral constant N) for the vectors of a pixel's channels.
template <typename F>
void with_type_and_width(const GroupNormShape& shape, const F& f) {
  dispatch(shape.dtype, [&](auto tag) {
    with_vectors<typename decltype(tag)::type>(shape.c, [&](auto width) { f(tag, width); });
  });
}

}  // namespace

int64_t images_forward_workspace_bytes(const GroupNormShape& shape) {
  int64_t bytes = 0;
  with_type_and_width(shape, [&](auto tag, auto width) {
    using A = acc_t<typename decltype(tag)::type>;
    bytes = ImageMemory<MomentsPartial, A>::bytes(shape, sums_plan(shape, width).parts);
  });
  return bytes;
}

void normalise_images(Stream stream, const GroupNormShape& shape, const void* x,
                      const BatchNormAffine& affine, double eps, void* y, void* mean, void* rstd,
                      void* workspace) {
  with_type_and_width(shape, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    constexpr int N = decltype(width)::value;
    const RowPlan sums = sums_plan(shape, N), pass = pass_plan(shape, N);
    const ImageMemory<MomentsPartial, A> memory(workspace, shape, sums.parts);
    const ImageNormArgs<T> args{static_cast<const T*>(x),
                                affine.weight,
                                affine.bias,
                                affine.dtype != shape.dtype,
                                eps,
                                static_cast<A*>(mean),
                                static_cast<A*>(rstd),
                                memory.of_channels,
                                memory.of_channels + shape.planes(),
                                ActivationArgs<A>(shape.activation)};
    row_moments_kernel<T, N>
        <<<sums.grid(), sums.threads, 0, as_cuda(stream)>>>(args.x, sums, memory.partials, nullptr);
    check_launch("group_norm");
    const ImageGroups of_sums = groups_of(shape, sums), of_pass = groups_of(shape, pass);
    with_team(shape.channels() * of_sums.parts.divisor(), [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::value;
      launch_teams<kLanes>(stream, shape.rows(), merge_image_moments_kernel<T, kLanes>,
                           memory.partials, int64_t{sums.parts}, shape.rows(),
                           static_cast<double>(shape.size()), of_sums, args);
    });
    with_result_and_code<T, N>(shape, [&](auto result, auto acts, auto code) {
      using Out = typename decltype(result)::type;
      const auto kernel =
          normalise_images_kernel<T, Out, N, decltype(acts)::value, decltype(code)::value>;
      launch_early(kernel, pass.grid(), pass.threads, 0, stream, pass, of_pass, args,
                   static_cast<Out*>(y));
    });
    check_launch("group_norm");
  });
}

int64_t images_backward_workspace_bytes(const GroupNormShape& shape) {
  int64_t bytes = 0;
  with_type_and_width(shape, [&](auto tag, auto width) {
    using A = acc_t<typename decltype(tag)::type>;
    bytes = ImageMemory<GradPartial<A>, A>::bytes(shape, sums_plan(shape, width).parts);
  });
  return bytes;
}

void image_gradients(Stream stream, const GroupNormShape& shape, const void* dy, const void* x,
                     const BatchNormAffine& affine, const void* mean, const void* rstd, void* dx,
                     const ImageSums& sums_of_images, void* workspace) {
  with_type_and_width(shape, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    constexpr int N = decltype(width)::value;
    const RowPlan sums = sums_plan(shape, N), pass = pass_plan(shape, N);
    const ImageMemory<GradPartial<A>, A> memory(workspace, shape, sums.parts);
    const ImageGradArgs<T> args{static_cast<const T*>(x),
                                static_cast<T*>(dx),
                                affine.weight,
                                affine.bias,
                                affine.dtype != shape.dtype,
                                static_cast<const A*>(mean),
                                static_cast<const A*>(rstd),
                                static_cast<A*>(sums_of_images.dot),
                                static_cast<A*>(sums_of_images.sum),
                                sums_of_images.pitch,
                                memory.of_channels,
                                memory.of_groups,
                                memory.of_groups + shape.rows(),
                                ActivationArgs<A>(shape.activation)};
    const ImageGroups of_sums = groups_of(shape, sums), of_pass = groups_of(shape, pass);
    with_result_and_code<T, N>(shape, [&](auto result, auto acts, auto code) {
      using Out = typename decltype(result)::type;
      const auto kernel =
          image_sums_kernel<T, Out, N, decltype(acts)::value, decltype(code)::value>;
      launch_early(kernel, sums.grid(), sums.threads, 0, stream, sums, of_sums, args,
                   static_cast<const Out*>(dy), memory.partials);
    });
    const double by_size = 1.0 / static_cast<double>(shape.size());
    // (Few channels, whose parts a team shares out.)
    const bool by_parts = shape.channels() < 8;
    with_team(by_parts ? of_sums.parts.divisor() : shape.channels(), [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::value;
      const auto kernel = by_parts ? merge_image_sums_kernel<T, kLanes, true>
                                   : merge_image_sums_kernel<T, kLanes, false>;
      launch_teams<kLanes>(stream, shape.rows(), kernel, memory.partials, int64_t{sums.parts},
                           shape.rows(), by_size, of_sums, args);
    });
    if (dx) {
      with_result_and_code<T, N>(shape, [&](auto result, auto acts, auto code) {
        using Out = typename decltype(result)::type;
        const auto kernel =
            image_input_grad_kernel<T, Out, N, decltype(acts)::value, decltype(code)::value>;
        launch_early(kernel, pass.grid(), pass.threads, 0, stream, pass, of_pass, args,
                     static_cast<const Out*>(dy));
      });
    }
    check_launch("group_norm_backward");
  });
}

}  // namespace braze::cuda
