// Layer norm's forward pass: see normalise.cuh and row.cuh, and columns.cuh for strided rows.
#include "columns.cuh"

namespace braze::cuda {
namespace {

const KernelEntry kEntry({"layer_norm", "rows", "float64 float32 bfloat16 float16", "sm_80+", true,
                          "a team of threads per row, which is held in registers"});

// A weight and a bias for each element of a row.
template <typename T>
struct ElementParameters {
  const void* weight;
  const void* bias;
  bool wide;  // float32 beside a 16-bit T

  template <int N>
  __device__ __forceinline__ void load(int64_t, int64_t c, acc_t<T> (&w)[N],
                                       acc_t<T> (&b)[N]) const {
    load_parameters<N, T>(weight, wide, c, acc_t<T>(1), w);
    load_parameters<N, T>(bias, wide, c, acc_t<T>(0), b);
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
    const ElementParameters<T> parameters{affine.weight, affine.bias, affine.dtype != shape.dtype};
    const bool aligned = is_vec_aligned(args.x) && is_vec_aligned(static_cast<const T*>(y)) &&
                         is_vec_aligned(static_cast<const T*>(affine.weight)) &&
                         is_vec_aligned(static_cast<const T*>(affine.bias));
    if (shape.inner > 1) {
      const RowShape columns{shape.rows / shape.inner, shape.size, shape.inner};
      with_row_vectors<T>(shape.inner, is_vec_aligned(args.x), [&](auto width) {
        launch_columns<decltype(width)::value>(as_cuda(stream), columns, args, parameters);
      });
      return;
    }
    with_row_vectors<T>(shape.size, aligned, [&](auto width) {
      launch_rows<decltype(width)::value>(as_cuda(stream), shape.rows, shape.size, args,
                                          parameters);
    });
  });
  check_launch("layer_norm");
}

}  // namespace braze::cuda
