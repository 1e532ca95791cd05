// Nearest and bilinear upsampling. A thread has a few elements that lie at the same place, so that
// what it finds out of that place serves all of them: a vector of up to 16 bytes along the depth,
// or those of several planes, where an image's elements lie plane by plane.
//
// Backward gathers: the results that an input element is part of lie side by side along each axis,
// so that there are no atomics, and sums are bitwise repeatable.
#include "cuda/pool/window.cuh"
#include "launchers/common/registry.h"
#include "launchers/upsample2d.h"

namespace braze::cuda {
namespace {

// Of results that an input element is part of, from how many on a warp shares them out.
constexpr int64_t kManyResults = 256;
// Columns of results that a thread asks for at once, whose shares it keeps for all rows: to twice
// the size an element is part of 2 nearest ones, and of 4 bilinear ones, or 5 where corners keep
// their places.
constexpr int kNearestColumns = 2, kManyNearestColumns = 8, kBilinearColumns = 6;

template <typename P>
struct Axes {
  UpsampleAxis<P> rows, columns;
  int64_t depth;
  int planes;  // in all, where threads have several
};

// Where a thread's elements lie in the input, or in the result: N neighbours, or those of the next
// N planes as far as there are so many.
template <bool kPlanes, int N>
class Places {
 public:
  __device__ __forceinline__ Places(int rows, int columns, int64_t depth, int planes, int64_t image,
                                    int group)
      : line_(columns * depth), depth_(depth), apart_(int64_t{rows} * columns) {
    if constexpr (kPlanes) {
      first_ = image * N * apart_;
      count_ = min(N, static_cast<int>(planes - image * N));
    } else {
      first_ = image * rows * line_ + group * N;
    }
  }

  template <typename T>
  struct Loaded {
    Packed<T, kPlanes ? 1 : N> packed[kPlanes ? N : 1] = {};

    __device__ __forceinline__ void values(acc_t<T> (&v)[N]) const {
      if constexpr (kPlanes) {
#pragma unroll
        for (int k = 0; k < N; ++k) {
          acc_t<T> one[1];
          unpack(packed[k], one);
          v[k] = one[0];
        }
      } else {
        unpack(packed[0], v);
      }
    }
  };
  template <typename T>
  __device__ __forceinline__ void load(const T* from, int row, int column, Loaded<T>& to) const {
    from += at(row, column);
    if constexpr (kPlanes) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (k < count_) to.packed[k].load(from + k * apart_);
      }
    } else {
      to.packed[0].load(from);
    }
  }
  template <typename T, typename A>
  __device__ __forceinline__ void store(T* to, int row, int column, const A (&v)[N]) const {
    to += at(row, column);
    if constexpr (kPlanes) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (k < count_) to[k * apart_] = convert<T>(v[k]);
      }
    } else {
      store_as(to, v);
    }
  }

 private:
  __device__ __forceinline__ int64_t at(int row, int column) const {
    return first_ + row * line_ + (kPlanes ? column : column * depth_);
  }

  int64_t line_, depth_, apart_, first_;
  int count_ = N;
};

template <bool kBilinear, bool kPlanes, int N, typename T, typename Out, typename Split, typename P>
__global__ void __launch_bounds__(kPoolThreads)
    upsample2d_kernel(const T* __restrict__ x, Out* __restrict__ y, int64_t count, Split split,
                      Axes<P> axes) {
  using A = acc_t<T>;
  using Group = Places<kPlanes, N>;
  const int64_t i = global_thread();
  if (i >= count) return;
  int64_t image;
  int p, q, group;
  split(i, &image, &p, &q, &group);
  const UpsampleAxis<P>&rows = axes.rows, &columns = axes.columns;
  const Group from(rows.in, columns.in, axes.depth, axes.planes, image, group);
  const Group to(rows.out, columns.out, axes.depth, axes.planes, image, group);
  const auto row = rows.source_of(p);
  const auto column = columns.source_of(q);
  A result[N];
  if constexpr (kBilinear) {
    typename Group::template Loaded<T> corners[2][2];
    from.load(x, row.first, column.first, corners[0][0]);
    from.load(x, row.first, column.second, corners[0][1]);
    from.load(x, row.second, column.first, corners[1][0]);
    from.load(x, row.second, column.second, corners[1][1]);
    const A by_row[2] = {A(1) - row.weight, row.weight};
    const A by_column[2] = {A(1) - column.weight, column.weight};
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      A first[N], second[N];
      corners[a][0].values(first);
      corners[a][1].values(second);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A of_row = by_column[0] * first[k] + by_column[1] * second[k];
        result[k] = a == 0 ? by_row[0] * of_row : result[k] + by_row[1] * of_row;
      }
    }
  } else {
    typename Group::template Loaded<T> nearest;
    from.load(x, row.first, column.first, nearest);
    nearest.values(result);
  }
  to.store(y, p, q, result);
}

// kLanes: that share out the results of an input element, 1 or a warp's.
template <bool kBilinear, int kAtOnce, int kLanes, bool kPlanes, int N, typename T, typename Out,
          typename Split, typename P>
__global__ void __launch_bounds__(kPoolThreads)
    upsample2d_backward_kernel(const Out* __restrict__ dy, T* __restrict__ dx, int64_t count,
                               Split split, Axes<P> axes) {
  using A = acc_t<T>;
  using Group = Places<kPlanes, N>;
  const int64_t i = global_thread() / kLanes;
  if (i >= count) return;
  int64_t image;
  int h, w, group;
  split(i, &image, &h, &w, &group);
  const UpsampleAxis<P>&rows = axes.rows, &columns = axes.columns;
  const Group from(rows.out, columns.out, axes.depth, axes.planes, image, group);
  const Group to(rows.in, columns.in, axes.depth, axes.planes, image, group);
  const int p_begin = rows.begin_of(h), p_end = rows.end_of(h);
  const int q_begin = columns.begin_of(w), q_end = columns.end_of(w);
  A sum[N] = {};
  const auto add = [&](const typename Group::template Loaded<Out>& loaded, A by) {
    A grad[N];
    loaded.values(grad);
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] += by * grad[k];
  };
  // Nearest elements have their results whole.
  const auto share = [&](const UpsampleAxis<P>& axis, int of, int result) {
    return kBilinear ? A(axis.share_of(of, result)) : A(1);
  };
  if constexpr (kLanes == 1) {
#pragma unroll 1
    for (int first = q_begin; first < q_end; first += kAtOnce) {
      const int here = min(q_end - first, kAtOnce);
      A by_column[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        by_column[j] = j < here ? share(columns, w, first + j) : A(0);
      }
#pragma unroll 1
      for (int p = p_begin; p < p_end; ++p) {
        typename Group::template Loaded<Out> grads[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (j < here) from.load(dy, p, first + j, grads[j]);
        }
        const A by_row = share(rows, h, p);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (j < here) add(grads[j], by_row * by_column[j]);
        }
      }
    }
  } else {
    const int lane = static_cast<int>(threadIdx.x) % kLanes, width = max(q_end - q_begin, 1);
    const int down = kLanes / width, along = kLanes - down * width;
    int p = p_begin + lane / width, q = q_begin + lane % width;
#pragma unroll 4
    while (p < p_end) {
      typename Group::template Loaded<Out> grad;
      from.load(dy, p, q, grad);
      add(grad, share(rows, h, p) * share(columns, w, q));
      p += down;
      q += along;
      if (q >= q_end) q -= width, ++p;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], offset);
      }
    }
    if (lane != 0) return;
  }
  to.store(dx, h, w, sum);
}

const KernelEntry kEntry({"upsample2d", "gather", "float64 float32 bfloat16 float16", "sm_80+",
                          true,
                          "nearest and bilinear; a thread has a vector of channels or the "
                          "same element of several planes"});

// f(input tag, result tag, axes) for the pairs of dtypes that exist, and the types that places are
// found in.
template <typename F>
void dispatch_types(const Upsample2dShape& shape, const F& f) {
  if (shape.images() > INT32_MAX) {
    throw std::runtime_error("upsample2d: expected fewer than 2^31 images and channels");
  }
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto with_places = [&](auto place) {
      using P = typename decltype(place)::type;
      const Axes<P> axes{shape.rows<P>(), shape.columns<P>(), shape.depth(),
                         static_cast<int>(shape.images())};
      if constexpr (sizeof(T) == 2) {
        if (shape.result == DType::kFloat32) return f(tag, TypeTag<float>{}, axes);
      }
      f(tag, tag, axes);
    };
    if constexpr (std::is_same_v<T, double>) {
      if (shape.is_bilinear()) return with_places(TypeTag<double>{});
    }
    with_places(TypeTag<float>{});
  });
}

// f(whether a thread has elements of several planes, of how many elements, how many such groups
// there are, how many of a pixel) for a tensor of so many rows and columns.
template <typename T, typename F>
void with_groups(const Upsample2dShape& shape, int64_t rows, int64_t columns, bool aligned,
                 const F& f) {
  if (shape.depth() == 1) {
    constexpr int N = sizeof(T) == 8 ? 4 : 8;
    return f(std::true_type{}, std::integral_constant<int, N>{},
             ceil_div(shape.images(), N) * rows * columns, int64_t{1});
  }
  const auto along_depth = [&](auto width) {
    const int64_t groups = shape.depth() / decltype(width)::value;
    f(std::false_type{}, width, shape.images() * rows * columns * groups, groups);
  };
  constexpr int N = kVecWidth<T>;
  if (aligned && shape.depth() % N == 0) return along_depth(std::integral_constant<int, N>{});
  if constexpr (N > 2) {
    if (aligned && shape.depth() % (N / 2) == 0) {
      return along_depth(std::integral_constant<int, N / 2>{});
    }
  }
  if constexpr (N > 4) {
    if (aligned && shape.depth() % 2 == 0) return along_depth(std::integral_constant<int, 2>{});
  }
  along_depth(std::integral_constant<int, 1>{});
}

// f(small, large, whether a thread has elements of several planes, of how many elements, how many
// such groups there are, how to split their numbers, axes), where each has a place among so many
// rows and columns; small and large: the input, or its gradient, and the result's.
template <typename F>
void with_launch(const Upsample2dShape& shape, const void* small, const void* large, int64_t rows,
                 int64_t columns, const F& f) {
  dispatch_types(shape, [&](auto tag, auto result, const auto& axes) {
    using T = typename decltype(tag)::type;
    using Out = typename decltype(result)::type;
    const T* const of_input = static_cast<const T*>(small);
    const Out* const of_result = static_cast<const Out*>(large);
    const bool aligned = is_vec_aligned(of_input) && is_vec_aligned(of_result);
    with_groups<T>(shape, rows, columns, aligned,
                   [&](auto planes, auto width, int64_t count, int64_t groups) {
                     with_split(count, groups, columns, rows, [&](auto split) {
                       f(of_input, of_result, planes, width, count, split, axes);
                     });
                   });
  });
}

}  // namespace

void upsample2d(Stream stream, const Upsample2dShape& shape, const void* x, void* y) {
  if (shape.output_count() == 0) return;
  with_launch(shape, x, y, shape.p, shape.q,
              [&](auto* in, auto* result, auto planes, auto width, int64_t count, auto split,
                  const auto& axes) {
                using Out = std::remove_const_t<std::remove_pointer_t<decltype(result)>>;
                const auto launch = [&](auto bilinear) {
                  upsample2d_kernel<decltype(bilinear)::value, decltype(planes)::value,
                                    decltype(width)::value>
                      <<<pool_blocks(count), kPoolThreads, 0, as_cuda(stream)>>>(
                          in, static_cast<Out*>(y), count, split, axes);
                };
                shape.is_bilinear() ? launch(std::true_type{}) : launch(std::false_type{});
              });
  check_launch("upsample2d");
}

void upsample2d_backward(Stream stream, const Upsample2dShape& shape, const void* dy, void* dx) {
  if (shape.input_count() == 0) return;
  with_launch(
      shape, dx, dy, shape.h, shape.w,
      [&](auto* input, auto* grad, auto planes, auto width, int64_t count, auto split,
          const auto& axes) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(input)>>;
        const auto launch = [&](auto bilinear, auto at_once, auto lanes) {
          constexpr int kLanes = decltype(lanes)::value;
          upsample2d_backward_kernel<decltype(bilinear)::value, decltype(at_once)::value, kLanes,
                                     decltype(planes)::value, decltype(width)::value>
              <<<pool_blocks(count * kLanes), kPoolThreads, 0, as_cuda(stream)>>>(
                  grad, static_cast<T*>(dx), count, split, axes);
        };
        const auto launch_with = [&](auto bilinear, auto at_once) {
          // Each result of bilinear upsampling has four parts.
          const int64_t parts = shape.p * shape.q * (decltype(bilinear)::value ? 4 : 1);
          if (parts >= kManyResults * shape.h * shape.w) {
            return launch(bilinear, std::integral_constant<int, 1>{},
                          std::integral_constant<int, 32>{});
          }
          launch(bilinear, at_once, std::integral_constant<int, 1>{});
        };
        if (shape.is_bilinear()) {
          launch_with(std::true_type{}, std::integral_constant<int, kBilinearColumns>{});
        } else if (shape.q <= kNearestColumns * shape.w) {
          launch_with(std::false_type{}, std::integral_constant<int, kNearestColumns>{});
        } else {
          launch_with(std::false_type{}, std::integral_constant<int, kManyNearestColumns>{});
        }
      });
  check_launch("upsample2d_backward");
}

}  // namespace braze::cuda
