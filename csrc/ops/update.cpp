#include "ops/update.h"

namespace braze {

void check_no_overlap(const char* op, const char* arg, const Tensor& t) {
  for (int64_t d = 0; d < t.dim(); ++d) {
    BRAZE_CHECK(t.stride(d) != 0 || t.size(d) <= 1, op,
                ": unsupported operation: more than one element of a tensor in ", arg,
                " refers to a single memory location");
  }
}

const float* scalar_on_device(const char* op, const char* arg, const std::optional<Tensor>& t,
                              const Tensor& like) {
  if (!t) return nullptr;
  check_same_device(op, arg, *t, "params", like);
  BRAZE_CHECK(t->numel() == 1 && t->scalar_type() == ScalarType::Float, op, ": expected ", arg,
              " to be one float32 element, but got ", shape_string(*t), " ",
              scalar_type_name(t->scalar_type()));
  return static_cast<const float*>(t->const_data_ptr());
}

void enter_settings(const char* op, const UpdateSettings& settings, const Tensor& like,
                    UpdateOptions* options) {
  options->lr = settings.lr;
  options->maximize = settings.maximize;
  if (settings.lr_tensor) {
    const Tensor& lr = *settings.lr_tensor;
    check_same_device(op, "lr_tensor", lr, "params", like);
    const ScalarType type = lr.scalar_type();
    BRAZE_CHECK(lr.numel() == 1 && (type == ScalarType::Float || type == ScalarType::Double), op,
                ": expected lr_tensor to be one float32 or float64 element, but got ",
                shape_string(lr), " ", scalar_type_name(type));
    options->lr_tensor = lr.const_data_ptr();
    options->lr_is_double = type == ScalarType::Double;
  }
  options->grad_scale = scalar_on_device(op, "grad_scale", settings.grad_scale, like);
  options->found_inf = scalar_on_device(op, "found_inf", settings.found_inf, like);
  if (settings.grad_norm) {
    const Tensor& norm = *settings.grad_norm;
    check_same_device(op, "grad_norm", norm, "params", like);
    BRAZE_CHECK(norm.numel() == 1 && norm.scalar_type() == ScalarType::Double, op,
                ": expected grad_norm to be one float64 element, but got ", shape_string(norm), " ",
                scalar_type_name(norm.scalar_type()));
    options->grad_norm = static_cast<const double*>(norm.const_data_ptr());
  }
  options->max_grad_norm = settings.max_grad_norm;
  options->average_weight = settings.average_weight;
  if (settings.averaged) {
    Tensor count = *settings.averaged;
    check_same_device(op, "averaged", count, "params", like);
    BRAZE_CHECK(count.numel() == 1 && count.scalar_type() == ScalarType::Long, op,
                ": expected averaged to be one int64 element, but got ", shape_string(count), " ",
                scalar_type_name(count.scalar_type()));
    options->averaged = static_cast<int64_t*>(count.mutable_data_ptr());
  }
  if (settings.tickets) {
    Tensor tickets = *settings.tickets;
    check_same_device(op, "tickets", tickets, "params", like);
    BRAZE_CHECK(tickets.numel() == kTickets && tickets.scalar_type() == ScalarType::Int, op,
                ": expected tickets to be ", kTickets, " int32 elements, but got ",
                shape_string(tickets), " ", scalar_type_name(tickets.scalar_type()));
    options->tickets = static_cast<unsigned*>(tickets.mutable_data_ptr());
  }
}

}  // namespace braze
