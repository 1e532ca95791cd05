// matmul, linear (with ReLU or without) and its backward: from torch's shapes and strides to
// batches of matrices.
#include "ops/matmul.h"

#include <algorithm>

#include "launchers/narrow_linear.h"
#include "ops/branch.h"
#include "ops/matmul_decision.h"

namespace braze {
namespace {

// One stride that walks all the dimensions in row-major order, if there is one. Dimensions of
// size 1 do not matter; the stride of none at all is 0, and that where there is nothing to walk.
std::optional<int64_t> common_stride(const Sizes& sizes, const Sizes& strides) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;
  int64_t innermost = 0, expected = -1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] == 1) continue;
    if (expected < 0) {
      innermost = strides[i];
    } else if (strides[i] != expected) {
      return std::nullopt;
    }
    expected = strides[i] * sizes[i];
  }
  return innermost;
}

int64_t product(const Sizes& sizes) {
  int64_t n = 1;
  for (const int64_t size : sizes) n *= size;
  return n;
}

// Strides of dimensions with one element are arbitrary in torch; here they are those of a matrix
// without gaps, which every kernel and library takes.
MatrixRef normalized(const Tensor& t, int64_t batch, int64_t rows, int64_t row, int64_t cols,
                     int64_t col) {
  if (cols == 1) col = 1;
  if (rows == 1) row = cols * col;
  return {t.const_data_ptr(), batch, row, col};
}

// The last two dimensions are the matrix, the others, broadcast to `batch`, the batch. A vector is
// a row (or a column). Copies only where strides of a MatrixRef cannot express the tensor.
Matrices matrices_of(const Tensor& t, const Sizes& batch, bool vector_is_column) {
  const int64_t dim = t.dim();
  int64_t rows = 1, cols = 1, row = 1, col = 1;
  if (dim == 1) {
    (vector_is_column ? rows : cols) = t.size(0);
    (vector_is_column ? row : col) = t.stride(0);
  } else {
    rows = t.size(dim - 2), row = t.stride(dim - 2);
    cols = t.size(dim - 1), col = t.stride(dim - 1);
  }
  Sizes strides(batch.size(), 0);
  for (int64_t i = dim - 3, j = static_cast<int64_t>(batch.size()) - 1; i >= 0; --i, --j) {
    if (t.size(i) != 1) strides[j] = t.stride(i);
  }
  const std::optional<int64_t> stride = common_stride(batch, strides);
  const bool expanded = (rows > 1 && row == 0) || (cols > 1 && col == 0);
  if (stride && !expanded) return {t, rows, cols, normalized(t, *stride, rows, row, cols, col)};
  Sizes sizes(stride ? Sizes{} : batch);
  if (stride) {
    for (int64_t i = 0; i < dim - 2; ++i) sizes.push_back(t.size(i));
  }
  if (dim == 1) {
    sizes.push_back(t.size(0));
  } else {
    sizes.insert(sizes.end(), {rows, cols});
  }
  Tensor dense = empty(sizes, t);
  torch::stable::copy_(dense, t);
  return matrices_of(dense, batch, vector_is_column);
}

MatmulArgs arguments(DType dtype, const Matrices& a, const Matrices& b, void* out,
                     const Settings& settings) {
  return {dtype,
          1,
          a.rows,
          b.cols,
          a.cols,
          a.ref,
          b.ref,
          out,
          nullptr,
          false,
          settings.allow_tf32,
          settings.deterministic};
}

Sizes broadcast_batch(const Tensor& a, const Tensor& b) {
  const int64_t dim = std::max<int64_t>(0, std::max(a.dim(), b.dim()) - 2);
  Sizes batch(dim, 1);
  for (int64_t i = 0; i < dim; ++i) {
    const int64_t ai = a.dim() - 2 - dim + i, bi = b.dim() - 2 - dim + i;
    const int64_t a_size = ai < 0 ? 1 : a.size(ai), b_size = bi < 0 ? 1 : b.size(bi);
    BRAZE_CHECK(a_size == b_size || a_size == 1 || b_size == 1, "The size of tensor a (", a_size,
                ") must match the size of tensor b (", b_size, ") at non-singleton dimension ", i);
    batch[i] = a_size == 1 ? b_size : a_size;
  }
  return batch;
}

}  // namespace

Matrices rows_of(const Tensor& t) {
  Sizes sizes, strides;
  for (int64_t i = 0; i < t.dim() - 1; ++i) {
    sizes.push_back(t.size(i));
    strides.push_back(t.stride(i));
  }
  const int64_t rows = product(sizes), cols = t.size(t.dim() - 1), col = t.stride(t.dim() - 1);
  const std::optional<int64_t> row = common_stride(sizes, strides);
  if (row && (rows == 1 || *row > 0) && (cols == 1 || col > 0)) {
    return {t, rows, cols, normalized(t, 0, rows, *row, cols, col)};
  }
  const Tensor dense = as_contiguous(t);
  return {dense, rows, cols, {dense.const_data_ptr(), 0, cols, 1}};
}

Workspace multiply(const DeviceContext& context, DType dtype, int64_t batch, const Matrices& a,
                   const Matrices& b, Tensor& out, const Epilogue& epilogue,
                   const Settings& settings, Branch* branch) {
  MatmulArgs args = arguments(dtype, a, b, out.mutable_data_ptr(), settings);
  args.batch = batch;
  args.bias = epilogue.bias;
  args.relu = epilogue.relu;
  args.residual = epilogue.residual;
  args.relu_result = epilogue.relu_result;
  args.column_sums = epilogue.column_sums;
  args.row_sums = epilogue.row_sums;
  if (batch == 1) args.a.batch = args.b.batch = 0;
  if (args.b.batch == 0 && batch > 1 && args.a.batch != 0 &&
      (args.m == 1 || args.a.batch == args.m * args.a.row)) {
    // One B for a batch of A without gaps: a single product.
    if (args.m == 1) args.a.row = args.a.batch;
    args.m *= batch;
    args.a.batch = 0;
    args.batch = 1;
  }
  const Wish wish = wish_of("matmul", settings.backend, dev::matmul_kernel, "cublas");
  if (tuned_products.recording && wish.kind == Wish::kAuto && !args.has_full_epilogue()) {
    if (const auto found = product_of(args, out.get_device_index())) tuned_products.record(*found);
  }
  const Decision decision = decided(args, out, wish);
  if (out.numel() == 0) return {};
  const int64_t bytes = decision.workspace_bytes;
  Workspace workspace = branch ? branch->workspace(bytes, out) : Workspace(bytes, out);
  // Not before: deterministic algorithms fill what is allocated, on the main stream.
  const Stream stream = branch ? branch->begin() : context.stream();
#ifdef BRAZE_CUDA
  if (decision.library >= 0) {
    vendor::cublas_matmul(stream, args, workspace.data(), decision.library);
    return workspace;
  }
#endif
  dev::run_matmul(stream, args, decision.plan, workspace.data());
  return workspace;
}

Sizes with_last(const Tensor& input, int64_t last) {
  Sizes sizes;
  for (int64_t i = 0; i < input.dim() - 1; ++i) sizes.push_back(input.size(i));
  sizes.push_back(last);
  return sizes;
}

void check_like(const char* op, const char* arg, const Tensor& t, const Sizes& sizes,
                const char* what, const Tensor& input) {
  check_same_device(op, arg, t, "input", input);
  check_same_dtype(op, arg, t, "input", input);
  std::string expected;
  for (const int64_t size : sizes)
    expected += (expected.empty() ? "" : ", ") + std::to_string(size);
  BRAZE_CHECK(same_sizes(t, sizes), op, ": expected ", arg, " to have the shape of ", what, ", [",
              expected, "], but got ", shape_string(t));
}

namespace {

void check_linear(const char* op, const Tensor& input, const Tensor& weight,
                  const char* weight_arg = "weight") {
  check_same_device(op, weight_arg, weight, "input", input);
  check_same_dtype(op, weight_arg, weight, "input", input);
  BRAZE_CHECK(input.dim() > 0, op, ": expected input to be at least 1D, but got 0D");
  BRAZE_CHECK(weight.dim() == 2, op, ": expected ", weight_arg, " to be 2D, but got ", weight.dim(),
              "D");
  const int64_t k = input.size(input.dim() - 1);
  BRAZE_CHECK(k == weight.size(1), "mat1 and mat2 shapes cannot be multiplied (",
              input.numel() / std::max<int64_t>(1, k), "x", k, " and ", weight.size(1), "x",
              weight.size(0), ")");
}

}  // namespace

Tensor linear_forward(const char* op, const Tensor& input, const char* weight_arg,
                      const Tensor& weight, const char* bias_arg, const std::optional<Tensor>& bias,
                      bool relu, const Settings& settings) {
  const DType dtype = dtype_of(op, "input", input);
  check_linear(op, input, weight, weight_arg);
  std::optional<Tensor> dense_bias;
  if (bias) {
    check_same_device(op, bias_arg, *bias, "input", input);
    check_same_dtype(op, bias_arg, *bias, "input", input);
    BRAZE_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op, ": expected ", bias_arg,
                " to have shape [", weight.size(0), "], but got ", shape_string(*bias));
    dense_bias = as_contiguous(*bias);
  }
  const DeviceContext context(input);
  Tensor out = empty(with_last(input, weight.size(0)), input);
  multiply(context, dtype, 1, rows_of(input), rows_of(weight).transposed(), out,
           {dense_bias ? dense_bias->const_data_ptr() : nullptr, relu}, settings);
  return out;
}

namespace {

Tensor matmul(const Tensor& input, const Tensor& other, bool allow_tf32, bool deterministic,
              const std::string& backend) {
  const DType dtype = dtype_of("matmul", "input", input);
  check_same_device("matmul", "other", other, "input", input);
  check_same_dtype("matmul", "other", other, "input", input);
  BRAZE_CHECK(input.dim() > 0 && other.dim() > 0,
              "both arguments to matmul need to be at least 1D, but they are ", input.dim(),
              "D and ", other.dim(), "D");
  const int64_t m = input.dim() == 1 ? 1 : input.size(input.dim() - 2);
  const int64_t n = other.dim() == 1 ? 1 : other.size(other.dim() - 1);
  const int64_t k = input.size(input.dim() - 1);
  const int64_t other_k = other.size(std::max<int64_t>(0, other.dim() - 2));
  BRAZE_CHECK(k == other_k, "mat1 and mat2 shapes cannot be multiplied (", m, "x", k, " and ",
              other_k, "x", n, ")");
  const Sizes batch = broadcast_batch(input, other);
  Sizes sizes = batch;
  if (input.dim() > 1) sizes.push_back(m);
  if (other.dim() > 1) sizes.push_back(n);

  const DeviceContext context(input);
  Tensor out = empty(sizes, input);
  multiply(context, dtype, product(batch), matrices_of(input, batch, false),
           matrices_of(other, batch, true), out, {}, {allow_tf32, deterministic, backend});
  return out;
}

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
              bool relu, bool allow_tf32, bool deterministic, const std::string& backend) {
  return linear_forward("linear", input, "weight", weight, "bias", bias, relu,
                        {allow_tf32, deterministic, backend});
}

void check_of_output_shape(const char* op, const char* arg, const Tensor& t, const Tensor& input,
                           const Tensor& weight) {
  check_same_device(op, arg, t, "input", input);
  check_same_dtype(op, arg, t, "input", input);
  BRAZE_CHECK(same_sizes(t, with_last(input, weight.size(0))), op, ": expected ", arg,
              " of the forward's output shape, but got ", shape_string(t), " for input ",
              shape_string(input), " and weight ", shape_string(weight));
}

// All gradients of a layer of few outputs from one pass over its rows, on a GPU; false where there
// is no kernel for that, or a faster way.
bool from_one_pass([[maybe_unused]] const DeviceContext& context, [[maybe_unused]] DType dtype,
                   [[maybe_unused]] const Tensor& dy, [[maybe_unused]] const Tensor& input,
                   [[maybe_unused]] const Tensor& weight, [[maybe_unused]] Tensor& grad_input,
                   [[maybe_unused]] Tensor& grad_weight, [[maybe_unused]] Tensor& grad_bias) {
#ifdef BRAZE_CUDA
  if (!input.is_contiguous() || !weight.is_contiguous() || input.numel() == 0) return false;
  const NarrowLinearGradArgs args{dtype,
                                  input.numel() / weight.size(1),
                                  weight.size(1),
                                  weight.size(0),
                                  input.const_data_ptr(),
                                  dy.const_data_ptr(),
                                  weight.const_data_ptr(),
                                  grad_input.mutable_data_ptr(),
                                  grad_weight.mutable_data_ptr(),
                                  grad_bias.mutable_data_ptr()};
  if (!dev::narrow_linear_gradients_pay(args)) return false;
  const Stream stream = context.stream();
  const Workspace workspace(dev::narrow_linear_gradients_workspace_bytes(args), input);
  dev::narrow_linear_gradients(stream, args, workspace.data());
  // Nobody needs the parameters' before the update.
  const std::optional<Stream> aside = Branch(stream, true, true).begin_sums();
  dev::finish_narrow_linear_gradients(aside.value_or(stream), args, workspace.data());
  if (aside) keep_until_join({workspace.memory()}, {grad_weight, grad_bias});
  return true;
#else
  return false;
#endif
}

// The gradients of linear, or with the result of a ReLU given, of both: one pass over grad_output
// makes the gradient that passes the ReLU, and the bias's.
std::tuple<Tensor, Tensor, Tensor> gradients(const char* op, const Tensor& grad_output,
                                             const Tensor* result, const Tensor& input,
                                             const Tensor& weight,
                                             const std::vector<bool>& output_mask,
                                             const Settings& settings) {
  const DType dtype = dtype_of(op, "input", input);
  check_linear(op, input, weight);
  check_of_output_shape(op, "grad_output", grad_output, input, weight);
  if (result) check_of_output_shape(op, "result", *result, input, weight);

  const DeviceContext context(input);
  // An empty tensor for what is not wanted: results of an op must not alias.
  Sizes input_sizes = with_last(input, weight.size(1));
  Tensor grad_input = empty(output_mask[0] ? input_sizes : Sizes{0}, input);
  Tensor grad_weight =
      empty(output_mask[1] ? Sizes{weight.size(0), weight.size(1)} : Sizes{0}, input);
  Tensor grad_bias = empty({output_mask[2] ? weight.size(0) : 0}, input);
  Tensor passed = result || output_mask[2] ? as_contiguous(grad_output) : grad_output;
  const Tensor dense_result = result ? as_contiguous(*result) : passed;
  // Few rows: both products, and the rest as far as it is still to be done, in one launch.
  const bool own = leaves_choice(settings.backend);
  const auto in_one_launch = [&](const Tensor& dy_tensor, const void* relu_result, void* bias) {
    if (!own || !output_mask[0] || !output_mask[1]) return false;
    const Matrices dy = rows_of(dy_tensor), x = rows_of(input), w = rows_of(weight);
    return dev::linear_gradients(
        context.stream(),
        {arguments(dtype, dy, w, grad_input.mutable_data_ptr(), settings),
         arguments(dtype, dy.transposed(), x, grad_weight.mutable_data_ptr(), settings),
         relu_result, bias});
  };
  void* const bias_data = output_mask[2] ? grad_bias.mutable_data_ptr() : nullptr;
  const void* const result_data = result ? dense_result.const_data_ptr() : nullptr;
  if (in_one_launch(passed, result_data, bias_data)) return {grad_input, grad_weight, grad_bias};
  if (own && !result && output_mask[0] && output_mask[1] && output_mask[2] &&
      from_one_pass(context, dtype, passed, input, weight, grad_input, grad_weight, grad_bias)) {
    return {grad_input, grad_weight, grad_bias};
  }
  // Nobody needs the parameters' before the update. Large ones would fill the device.
  constexpr double kMostOperations = 2e9;
  const bool is_small = 2.0 * passed.numel() * weight.size(1) <= kMostOperations;
  Branch branch(context.stream(), is_small, size_of(dtype) == 2);
  if (passed.numel() == 0) {
    if (output_mask[2]) TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(grad_bias.get()));
  } else if (result || output_mask[2]) {
    const Tensor dense = passed;
    if (result) passed = empty(with_last(input, weight.size(0)), input);
    const ColumnSumArgs sum{dtype,          dense.numel() / weight.size(0),
                            weight.size(0), dense.const_data_ptr(),
                            result_data,    result ? passed.mutable_data_ptr() : nullptr,
                            bias_data};
    Workspace workspace(dev::column_sum_workspace_bytes(sum), input);
    const std::optional<Stream> aside = result ? std::nullopt : branch.begin_sums();
    dev::column_sum(aside.value_or(context.stream()), sum, workspace.data());
    if (aside) keep_until_join({dense, workspace.memory()}, {grad_bias});
    if (in_one_launch(passed, nullptr, nullptr)) return {grad_input, grad_weight, grad_bias};
  }
  const Matrices dy = rows_of(passed);
  Matrices x{};
  Workspace kept;
  if (output_mask[1]) {
    x = rows_of(input);
    kept = multiply(context, dtype, 1, dy.transposed(), x, grad_weight, {}, settings,
                    is_small ? &branch : nullptr);
    if (branch.outlasts()) branch.keep({x.tensor, dy.tensor}, kept, grad_weight);
  }
  if (output_mask[0]) {
    multiply(context, dtype, 1, dy, rows_of(weight), grad_input, {}, settings);
  }
  branch.join();
  return {grad_input, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& grad_output, const Tensor& input,
                                                   const Tensor& weight,
                                                   const std::vector<bool>& output_mask,
                                                   bool allow_tf32, bool deterministic,
                                                   const std::string& backend) {
  return gradients("linear_backward", grad_output, nullptr, input, weight, output_mask,
                   {allow_tf32, deterministic, backend});
}

std::tuple<Tensor, Tensor, Tensor> linear_relu_backward(const Tensor& grad_output,
                                                        const Tensor& result, const Tensor& input,
                                                        const Tensor& weight,
                                                        const std::vector<bool>& output_mask,
                                                        bool allow_tf32, bool deterministic,
                                                        const std::string& backend) {
  return gradients("linear_relu_backward", grad_output, &result, input, weight, output_mask,
                   {allow_tf32, deterministic, backend});
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("matmul", TORCH_BOX(&matmul));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
  m.impl("linear_relu_backward", TORCH_BOX(&linear_relu_backward));
}

}  // namespace braze
