// Layer norm's forward pass: see normalise.cuh and row.cuh, and columns.cuh for strided rows.
#include "columns.cuh"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"layer_norm", "rows", "float64 float32 bfloat16 float16", "sm_80+", true,
                          "rows in registers or shared memory, the next ones on their way"});

// A weight and a bias for each element of a row, of W: T, or float32 beside a 16-bit T.
template <typename T, typename W>
struct ElementParameters {
  using A = acc_t<T>;
  static constexpr bool kFixed = true;
  static constexpr int kWidest = kWidestTeam;
  static constexpr bool kLong = sizeof(T) == 2 && sizeof(W) == 2;

  template <int N>
  struct Held {
    Packed<W, N> weight, bias;
  };

  const W* weight;
  const W* bias;

  __device__ __forceinline__ int64_t first(int64_t) const { return 0; }
  template <int N>
  __device__ __forceinline__ void hold(int64_t, int64_t c, Held<N>& held) const {
    load(weight, c, 1, held.weight);
    load(bias, c, 0, held.bias);
  }
  template <int N>
  static __device__ __forceinline__ void get(Held<N>& held, A (&w)[N], A (&b)[N]) {
    hide(held.weight);
    hide(held.bias);
    unpack(held.weight, w);
    unpack(held.bias, b);
  }

 private:
  template <int N>
  static __device__ __forceinline__ void load(const W* values, int64_t c, float absent,
                                              Packed<W, N>& to) {
    if (values) return to.load(values + c);
    Vec<W, N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.v[k] = convert<W>(absent);
    to = *reinterpret_cast<const Packed<W, N>*>(&v);
  }
};

// The same of either type, for kernels that do not keep them.
template <typename T>
struct AnyParameters {
  using A = acc_t<T>;

  template <int N>
  struct Held {
    A weight[N], bias[N];
  };

  const void* weight;
  const void* bias;
  bool wide;  // float32 beside a 16-bit T

  __device__ __forceinline__ int64_t first(int64_t) const { return 0; }
  template <int N>
  __device__ __forceinline__ void hold(int64_t, int64_t c, Held<N>& held) const {
    load_parameters<N, T>(weight, wide, c, A(1), held.weight);
    load_parameters<N, T>(bias, wide, c, A(0), held.bias);
  }
  template <int N>
  static __device__ __forceinline__ void get(const Held<N>& held, A (&w)[N], A (&b)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) w[k] = held.weight[k], b[k] = held.bias[k];
  }
};

}  // namespace

bool layer_norm_takes(const LayerNormShape& shape, int64_t inner) {
  return inner == 1 || column_shared_bytes(shape.size) <= most_shared_memory();
}

void layer_norm(Stream stream, const LayerNormShape& shape, const void* x,
                const BatchNormAffine& affine, double eps, void* y, void* mean, void* rstd) {
  if (shape.count() == 0) return;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const NormArgs<T> args{
        static_cast<const T*>(x), y, shape.result, static_cast<A>(eps), static_cast<A*>(mean),
        static_cast<A*>(rstd)};
    const bool aligned = is_vec_aligned(args.x) && is_vec_aligned(static_cast<const T*>(y)) &&
                         is_vec_aligned(static_cast<const T*>(affine.weight)) &&
                         is_vec_aligned(static_cast<const T*>(affine.bias));
    const AnyParameters<T> any{affine.weight, affine.bias, affine.dtype != shape.dtype};
    if (shape.inner > 1) {
      const RowShape columns{shape.rows / shape.inner, shape.size, shape.inner};
      with_row_vectors<T>(shape.inner, is_vec_aligned(args.x), [&](auto width) {
        launch_columns<decltype(width)::value>(as_cuda(stream), columns, args, any);
      });
      return;
    }
    const auto with_parameters = [&](auto tag) {
      using W = typename decltype(tag)::type;
      const ElementParameters<T, W> parameters{static_cast<const W*>(affine.weight),
                                               static_cast<const W*>(affine.bias)};
      with_row_vectors<T>(shape.size, aligned, [&](auto width) {
        launch_rows<decltype(width)::value>(as_cuda(stream), shape.rows, shape.size, args,
                                            parameters, any);
      });
    };
    if constexpr (sizeof(T) == 2) {
      if (affine.dtype != shape.dtype) return with_parameters(TypeTag<A>{});
    }
    with_parameters(TypeTag<T>{});
  });
  check_launch("layer_norm");
}

}  // namespace braze::cuda
