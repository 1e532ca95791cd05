#include "launchers/muon.h"

#include "launchers/grad_norm.h"
#include "ops/update.h"

namespace braze {
namespace {

// That `squares` has room for the sums of squares of all `tensors`, one behind the other.
void check_squares(const char* op, const Tensor& squares, const Tensors& tensors) {
  int64_t count = 0;
  for (const Tensor& t : tensors) count += muon_squares(t.numel());
  check_same_device(op, "squares", squares, "the first tensor", tensors[0]);
  BRAZE_CHECK(squares.scalar_type() == ScalarType::Double && squares.is_contiguous() &&
                  squares.numel() == count,
              op, ": expected squares of ", count, " float64 elements, but got shape ",
              shape_string(squares));
}

void muon_momentum_(const Tensors& updates, const Tensors& grads, const Tensors& momentum_buffers,
                    const Tensors& cast_outputs, const Tensors& cast_inputs, double momentum,
                    bool nesterov, std::optional<Tensor> grad_scale,
                    std::optional<Tensor> found_inf, std::optional<Tensor> grad_norm,
                    double max_grad_norm, std::optional<Tensor> squares) {
  const std::optional<Tensor> none;
  const std::optional<Tensors> no_list;
  const UpdateSettings settings{0, none, false,     grad_scale,    found_inf, no_list,
                                0, none, grad_norm, max_grad_norm, none};
  UpdateList<1> list("muon_momentum_", updates, grads,
                     {{"momentum_buffers", momentum_buffers, true}}, nullptr, cast_outputs,
                     cast_inputs, settings);
  if (list.empty()) return;
  MuonOptions options{};
  enter_settings("muon_momentum_", settings, updates[0], &options);
  options.source_dtype = list.source_dtype();
  options.momentum = momentum;
  options.nesterov = nesterov;
  if (squares) {
    check_squares("muon_momentum_", *squares, updates);
    options.squares = static_cast<double*>(squares->mutable_data_ptr());
  }

  const DeviceContext context(updates[0]);
  const auto* tensors = list.lay_out(context);
  dev::muon_momentum(context.stream(), list.dtype(), tensors, list.count(), options);
  list.copy_back();
}

void muon_polynomial_(const Tensor& gram, Tensor square, double a, double b, double c) {
  const DType dtype = dtype_of("muon_polynomial_", "gram", gram);
  check_same_device("muon_polynomial_", "square", square, "gram", gram);
  check_same_dtype("muon_polynomial_", "square", square, "gram", gram);
  check_same_shape("muon_polynomial_", "square", square, "gram", gram);
  BRAZE_CHECK(gram.dim() == 3 && gram.size(1) == gram.size(2) && gram.is_contiguous() &&
                  square.is_contiguous(),
              "muon_polynomial_: expected contiguous batches of square matrices, but got ",
              shape_string(gram));
  if (gram.numel() == 0) return;
  const DeviceContext context(gram);
  dev::muon_polynomial(context.stream(), dtype, gram.const_data_ptr(), square.mutable_data_ptr(),
                       gram.size(0), gram.size(1), a, b, c);
}

bool is_16_bit(const Tensor& t) {
  return t.scalar_type() == ScalarType::BFloat16 || t.scalar_type() == ScalarType::Half;
}

// What muon_normalize_ and muon_unpad_ take: matrices, by themselves and with more rows and columns
// around them. The first are tensors of any more dimensions, flattened to a row for each index of
// the first one, which is why each row has to have its own part of memory, in whatever order.
std::vector<MuonMatrix> matrices_of(const char* op, const Tensors& outputs, const Tensors& inputs,
                                    bool outputs_are_padded) {
  BRAZE_CHECK(outputs.size() == inputs.size(), op, ": expected as many outputs as inputs, but got ",
              outputs.size(), " and ", inputs.size());
  const Tensors& padded = outputs_are_padded ? outputs : inputs;
  const Tensors& others = outputs_are_padded ? inputs : outputs;
  const char* const padded_name = outputs_are_padded ? "outputs" : "inputs";
  const char* const name = outputs_are_padded ? "inputs" : "outputs";
  std::vector<MuonMatrix> matrices;
  matrices.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tensor &around = padded[i], &t = others[i];
    check_same_device(op, padded_name, around, "inputs", inputs[0]);
    check_same_device(op, name, t, "inputs", inputs[0]);
    check_same_dtype(op, "inputs", inputs[i], "inputs", inputs[0]);
    BRAZE_CHECK(around.dim() == 2 && around.is_contiguous() && t.dim() >= 2, op, ": expected ",
                padded_name, " to be contiguous matrices, and ", name,
                " of two and more dimensions, but got ", shape_string(around), " and ",
                shape_string(t));
    const int64_t rows = t.size(0), columns = rows == 0 ? 0 : t.numel() / rows;
    BRAZE_CHECK(t.numel() == 0 || (is_dense(t) && (rows == 1 || t.stride(0) == columns)), op,
                ": expected each row of ", name, " in its own part of dense memory");
    BRAZE_CHECK(around.size(0) >= rows && around.size(1) >= columns, op, ": expected ", padded_name,
                " to be at least as large as ", name, ", but got ", shape_string(around), " for ",
                shape_string(t));
    BRAZE_CHECK(around.size(1) < int64_t{1} << 31, op, ": expected fewer than 2^31 columns");
    Tensor output = outputs[i];
    BRAZE_CHECK(is_16_bit(output), op, ": expected outputs in bfloat16 or float16, but got ",
                scalar_type_name(output.scalar_type()));
    check_same_dtype(op, "outputs", output, "outputs", outputs[0]);
    const int64_t pitch = around.size(1);
    matrices.push_back({inputs[i].const_data_ptr(), output.mutable_data_ptr(), rows, columns,
                        outputs_are_padded ? columns : pitch, outputs_are_padded ? pitch : columns,
                        output.numel(), nullptr, 0});
  }
  return matrices;
}

// The sums of squares of parts of each tensor, where no launch has left them.
Tensor summed_squares(Stream stream, DType dtype, const std::vector<NormTensor>& tensors,
                      const Tensor& like) {
  const auto count = static_cast<int64_t>(tensors.size());
  const int64_t sums = dev::grad_norm_workspace(tensors.data(), count);
  Tensor squares = empty({sums}, like, ScalarType::Double);
  if (sums == 0) return squares;
  auto* const to = static_cast<double*>(squares.mutable_data_ptr());
  dev::grad_norm(stream, dtype, tensors.data(), count, to, to, sums, nullptr, nullptr, nullptr);
  return squares;
}

void muon_normalize_(const Tensors& outputs, const Tensors& inputs, double eps,
                     const std::optional<Tensor>& squares) {
  const char* op = "muon_normalize_";
  std::vector<MuonMatrix> matrices = matrices_of(op, outputs, inputs, true);
  if (matrices.empty()) return;
  if (squares) check_squares(op, *squares, inputs);
  const DType dtype = dtype_of(op, "inputs", inputs[0]);
  std::vector<NormTensor> list;
  list.reserve(matrices.size());
  for (const MuonMatrix& m : matrices) list.push_back({m.from, m.rows * m.columns});

  const DeviceContext context(inputs[0]);
  const Tensor sums = squares ? *squares : summed_squares(context.stream(), dtype, list, inputs[0]);
  const auto* own = static_cast<const double*>(sums.const_data_ptr());
  for (size_t i = 0; i < matrices.size(); ++i) {
    matrices[i].squares = own;
    matrices[i].parts =
        squares ? muon_squares(list[i].numel) : dev::grad_norm_workspace(&list[i], 1);
    own += matrices[i].parts;
  }
  dev::muon_normalize(context.stream(), dtype, dtype_of(op, "outputs", outputs[0]), matrices.data(),
                      static_cast<int64_t>(matrices.size()), eps);
}

void muon_unpad_(const Tensors& outputs, const Tensors& inputs) {
  const std::vector<MuonMatrix> matrices = matrices_of("muon_unpad_", outputs, inputs, false);
  if (matrices.empty()) return;
  check_same_dtype("muon_unpad_", "inputs", inputs[0], "outputs", outputs[0]);
  const DeviceContext context(inputs[0]);
  dev::muon_unpad(context.stream(), dtype_of("muon_unpad_", "outputs", outputs[0]), matrices.data(),
                  static_cast<int64_t>(matrices.size()));
}

}  // namespace

BRAZE_IMPL(m) {
  m.impl("muon_momentum_", TORCH_BOX(&muon_momentum_));
  m.impl("muon_normalize_", TORCH_BOX(&muon_normalize_));
  m.impl("muon_polynomial_", TORCH_BOX(&muon_polynomial_));
  m.impl("muon_unpad_", TORCH_BOX(&muon_unpad_));
}

}  // namespace braze
