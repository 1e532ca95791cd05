// Every schema of torch.ops.braze in one place. Linked into libbraze_ops_*, which is loaded first;
// CPU and CUDA kernels, fake kernels and autograd formulas register themselves against these.
//
// torch.ops.braze_kernels has the same ops without autograd formulas: for graphs that torch.compile
// has made, where a formula in Python would only cost time (python/braze/_ops/_traced.py).
#include <torch/csrc/stable/library.h>

static void define(torch::stable::detail::StableLibrary& m) {
  // activation: what the settings are depends on the name
  m.def("activation(Tensor input, str name, float first, float second) -> Tensor");
  m.def(
      "activation_backward(Tensor grad_output, Tensor input, str name, float first, "
      "float second) -> Tensor");

  // batch_norm
  m.def(
      "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, bool training, float? momentum, "
      "float eps) -> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "batch_norm_rung(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps, "
      "str backend=\"auto\") -> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "batch_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, "
      "Tensor rstd, bool training, bool[] output_mask) -> (Tensor, Tensor, Tensor)");

  // batch_norm_act: activation(batch_norm(input) + residual); what the settings are depends on the
  // activation. The backward takes the residual where the forward left no mask
  m.def(
      "batch_norm_act(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
      "bool training, float? momentum, float eps, str activation, float first, float second) "
      "-> (Tensor output, Tensor mask, Tensor statistics)");
  m.def(
      "batch_norm_act_backward(Tensor grad_output, Tensor input, Tensor? residual, "
      "Tensor? weight, Tensor? bias, Tensor mask, Tensor statistics, bool training, "
      "str activation, float first, float second, bool[4] output_mask) "
      "-> (Tensor, Tensor, Tensor, Tensor)");

  // batch_norm_backward_of_sums: the backward in training, of the gradient before the activation
  // and of its sums as conv2d_norm_backward leaves them
  m.def(
      "batch_norm_backward_of_sums(Tensor grad_output, Tensor input, Tensor? weight, "
      "Tensor? bias, Tensor statistics, Tensor sums, bool[4] output_mask) "
      "-> (Tensor, Tensor, Tensor, Tensor)");

  // batch_norm_act_inference: its result in evaluation mode, by one kernel where there is one
  m.def(
      "batch_norm_act_inference(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, "
      "Tensor? running_mean, Tensor? running_var, float eps, str activation, float first, "
      "float second) -> Tensor");

  // conv_bn_act: batch_norm_act of conv2d's result, whose gradients are those of the two
  m.def(
      "conv_bn_act(Tensor input, Tensor weight, Tensor? conv_bias, Tensor? residual, "
      "Tensor? bn_weight, Tensor? bn_bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? num_batches_tracked, int[2] stride, int[2] padding, int[2] dilation, "
      "int groups, bool training, float? momentum, float eps, str activation, float first, "
      "float second, bool allow_tf32=False, bool deterministic=False, str backend=\"auto\") "
      "-> (Tensor output, Tensor conv_output, Tensor mask, Tensor statistics)");

  // conv_bn_act_inference: its result in evaluation mode, by one kernel where there is one
  m.def(
      "conv_bn_act_inference(Tensor input, Tensor weight, Tensor? conv_bias, Tensor? residual, "
      "Tensor? bn_weight, Tensor? bn_bias, Tensor? running_mean, Tensor? running_var, "
      "int[2] stride, int[2] padding, int[2] dilation, int groups, float eps, str activation, "
      "float first, float second, bool allow_tf32=False, bool deterministic=False, "
      "str backend=\"auto\") -> Tensor");

  // bias_activation: activation(input + bias), the bias along the last dimension
  m.def(
      "bias_activation(Tensor input, Tensor bias, str activation, float first, float second) "
      "-> Tensor");
  m.def(
      "bias_activation_backward(Tensor grad_output, Tensor input, Tensor bias, str activation, "
      "float first, float second, bool[2] output_mask) -> (Tensor, Tensor)");

  // cast, mean (of pairs): all of a list in one launch; outputs have their inputs' strides
  m.def("cast_(Tensor(a!)[] outputs, Tensor[] inputs) -> ()");
  m.def("mean_(Tensor(a!)[] outputs, Tensor[] first, Tensor[] second) -> ()");

  // cat_channels: channels_last whatever the tensors are; the backward returns an empty tensor for
  // a gradient that is not wanted
  m.def("cat_channels(Tensor[] tensors) -> Tensor");
  m.def(
      "cat_channels_backward(Tensor grad_output, SymInt[] channels, bool[] output_mask) "
      "-> Tensor[]");

  // channel_shuffle: channels_last whatever the input is
  m.def("channel_shuffle(Tensor input, SymInt groups) -> Tensor");

  // conv2d
  m.def(
      "conv2d(Tensor input, Tensor weight, Tensor? bias=None, int[2] stride=1, int[2] padding=0, "
      "int[2] dilation=1, int groups=1, bool allow_tf32=False, bool deterministic=False, "
      "str backend=\"auto\") -> Tensor");
  m.def(
      "conv2d_backward(Tensor grad_output, Tensor input, Tensor weight, int[2] stride, "
      "int[2] padding, int[2] dilation, int groups, bool[3] output_mask, bool allow_tf32=False, "
      "bool deterministic=False, str backend=\"auto\", Tensor? added=None) "
      "-> (Tensor, Tensor, Tensor)");
  // conv2d_norm_backward: of a convolution whose input is batch_norm_act's result: where there are
  // sums, the input's gradient is that before the activation, and these are its sums for
  // batch_norm_backward_of_sums; else the sums are of no sets, and it is conv2d_backward
  m.def(
      "conv2d_norm_backward(Tensor grad_output, Tensor input, Tensor weight, int[2] stride, "
      "int[2] padding, int[2] dilation, int groups, bool[3] output_mask, bool allow_tf32, "
      "bool deterministic, str backend, Tensor? added, Tensor norm_input, Tensor mask, "
      "Tensor statistics, str activation, float first, float second) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "conv2d_relu(Tensor input, Tensor weight, Tensor? bias=None, int[2] stride=1, "
      "int[2] padding=0, int[2] dilation=1, int groups=1, bool allow_tf32=False, "
      "bool deterministic=False, str backend=\"auto\") -> Tensor");
  m.def(
      "conv2d_relu_backward(Tensor grad_output, Tensor result, Tensor input, Tensor weight, "
      "int[2] stride, int[2] padding, int[2] dilation, int groups, bool[3] output_mask, "
      "bool allow_tf32=False, bool deterministic=False, str backend=\"auto\") "
      "-> (Tensor, Tensor, Tensor)");

  // conv_transpose2d: the same passes, the gradient of the input being the result
  m.def(
      "conv_transpose2d(Tensor input, Tensor weight, Tensor? bias=None, int[2] stride=1, "
      "int[2] padding=0, SymInt[2] output_padding=0, int groups=1, int[2] dilation=1, "
      "bool allow_tf32=False, bool deterministic=False, str backend=\"auto\") -> Tensor");
  m.def(
      "conv_transpose2d_backward(Tensor grad_output, Tensor input, Tensor weight, int[2] stride, "
      "int[2] padding, SymInt[2] output_padding, int groups, int[2] dilation, "
      "bool[3] output_mask, bool allow_tf32=False, bool deterministic=False, "
      "str backend=\"auto\") -> (Tensor, Tensor, Tensor)");

  // cross_entropy
  m.def(
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
      "int ignore_index=-100, float label_smoothing=0.0, ScalarType? dtype=None) "
      "-> (Tensor loss, Tensor stats, Tensor total_weight)");
  m.def(
      "cross_entropy_with_grad(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
      "int ignore_index=-100, float label_smoothing=0.0, ScalarType? dtype=None) "
      "-> (Tensor loss, Tensor stats, Tensor total_weight, Tensor unit_grad)");
  m.def(
      "cross_entropy_backward(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
      "Tensor stats, Tensor total_weight, int reduction, int ignore_index, float label_smoothing, "
      "bool target_grad) -> (Tensor grad_input, Tensor grad_target)");
  m.def(
      "nll_loss(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
      "int ignore_index=-100) -> (Tensor loss, Tensor total_weight)");
  m.def(
      "nll_loss_backward(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
      "Tensor total_weight, int reduction, int ignore_index) -> Tensor");
  m.def("take_label_error(Tensor device_of) -> (bool, int)");

  // fused
  m.def(
      "bn_relu2d(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, bool training, float? momentum, "
      "float eps, bool max_pool) -> (Tensor output, Tensor codes, Tensor statistics)");
  m.def(
      "bn_relu2d_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor? bias, "
      "Tensor codes, Tensor statistics, bool training, bool max_pool, bool[3] output_mask) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "conv_bn_relu2d(Tensor input, Tensor weight, Tensor? conv_bias, Tensor? bn_weight, "
      "Tensor? bn_bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? num_batches_tracked, int[2] stride, int[2] padding, int[2] dilation, "
      "int groups, bool training, float? momentum, float eps, bool max_pool, bool contiguous, "
      "bool allow_tf32=False, bool deterministic=False, str backend=\"auto\") "
      "-> (Tensor output, Tensor conv_output, Tensor codes, Tensor statistics)");
  m.def("bn_relu2d_again(Tensor input, Tensor statistics) -> Tensor");
  m.def(
      "conv_bn_relu2d_backward(Tensor grad_output, Tensor input, Tensor weight, "
      "Tensor? bn_weight, Tensor? bn_bias, Tensor conv_output, Tensor codes, Tensor statistics, "
      "int[2] stride, int[2] padding, int[2] dilation, int groups, bool training, bool max_pool, "
      "bool[5] output_mask, bool allow_tf32=False, bool deterministic=False, "
      "str backend=\"auto\", Tensor? added=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "conv_bn_relu_max_pool2d(Tensor input, Tensor weight, Tensor? conv_bias, Tensor? bn_weight, "
      "Tensor? bn_bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? num_batches_tracked, int[2] padding, bool training, float? momentum, float eps, "
      "Tensor? moments=None, bool allow_tf32=False) -> (Tensor, Tensor, Tensor)");
  m.def(
      "conv_bn_relu_max_pool2d_backward(Tensor grad_output, Tensor input, Tensor weight, "
      "Tensor? bn_weight, Tensor codes, Tensor saved, int[2] padding, bool training, "
      "ScalarType? bn_dtype, bool allow_tf32=False) -> (Tensor, Tensor, Tensor, Tensor)");

  // gather
  m.def(
      "gather_images(Tensor images, Tensor labels, Tensor indices, Tensor scale, Tensor shift, "
      "ScalarType dtype, bool channels_last) -> (Tensor images, Tensor labels)");
  m.def(
      "gather_next(Tensor images, Tensor labels, Tensor order, Tensor(a!) position, Tensor scale, "
      "Tensor shift, Tensor(b!) batch_images, Tensor(c!) batch_labels, Tensor(d!)? moments=None, "
      "int[] filters=[]) -> ()");

  // channel_scale: scale and spread are [N, C, 1, 1], as the results of the others are
  m.def("channel_scale(Tensor input, Tensor scale, Tensor? spread) -> Tensor");
  m.def("channel_dot(Tensor input, Tensor other) -> Tensor");
  m.def("channel_mean(Tensor input) -> Tensor");

  // global_response_norm: norms are [N, C], scales [N]; the backward's output_mask is for the input
  // and for both parameters
  m.def(
      "global_response_norm(Tensor input, Tensor weight, Tensor bias, float eps) "
      "-> (Tensor output, Tensor norms, Tensor scales)");
  m.def(
      "global_response_norm_backward(Tensor grad_output, Tensor input, Tensor weight, "
      "Tensor norms, Tensor scales, bool[] output_mask) -> (Tensor, Tensor, Tensor)");

  // group_norm: mean and rstd are [N, num_groups]; dtype may be float32 for a 16-bit input
  m.def(
      "group_norm(Tensor input, Tensor? weight, Tensor? bias, int num_groups, float eps, "
      "ScalarType? dtype=None) -> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "group_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, "
      "Tensor rstd, int num_groups, bool[] output_mask) -> (Tensor, Tensor, Tensor)");

  // group_norm_act: activation(group_norm(input)); what the settings are depends on the activation
  m.def(
      "group_norm_act(Tensor input, Tensor? weight, Tensor? bias, int num_groups, float eps, "
      "str activation, float first, float second) -> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "group_norm_act_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor? bias, "
      "Tensor mean, Tensor rstd, int num_groups, float eps, str activation, float first, "
      "float second, bool[] output_mask) -> (Tensor, Tensor, Tensor)");

  // lamb
  m.def(
      "lamb_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, Tensor(e!)[] cast_outputs, "
      "Tensor[] cast_inputs, float lr, float beta1, float beta2, float eps, float weight_decay, "
      "float min_norm, float max_norm, bool maximize=False, "
      "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None, "
      "Tensor(f!)[]? averages=None, float average_weight=0.0, Tensor(g!)? averaged=None, "
      "Tensor? grad_norm=None, float max_grad_norm=0.0, Tensor(h!)? tickets=None) -> ()");

  // layer_norm: mean and rstd have the input's shape with extents of 1 where it is normalised;
  // dtype is the result's, the input's own or float32 for a 16-bit one
  m.def(
      "layer_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt[] normalized_shape, float "
      "eps, "
      "ScalarType? dtype=None) -> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, "
      "Tensor rstd, SymInt[] normalized_shape, bool[] output_mask) -> (Tensor, Tensor, Tensor)");

  // matmul, linear
  m.def(
      "matmul(Tensor input, Tensor other, bool allow_tf32=False, bool deterministic=False, "
      "str backend=\"auto\") -> Tensor");
  m.def(
      "linear(Tensor input, Tensor weight, Tensor? bias=None, bool relu=False, "
      "bool allow_tf32=False, bool deterministic=False, str backend=\"auto\") -> Tensor");
  m.def(
      "linear_backward(Tensor grad_output, Tensor input, Tensor weight, bool[3] output_mask, "
      "bool allow_tf32=False, bool deterministic=False, str backend=\"auto\") "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_relu_backward(Tensor grad_output, Tensor result, Tensor input, Tensor weight, "
      "bool[3] output_mask, bool allow_tf32=False, bool deterministic=False, "
      "str backend=\"auto\") -> (Tensor, Tensor, Tensor)");
  m.def(
      "matmul_epilogue(Tensor input, Tensor other, Tensor? bias=None, Tensor? residual=None, "
      "Tensor? relu_result=None, bool relu=False, bool column_sums=False, bool row_sums=False, "
      "bool allow_tf32=False, bool deterministic=False, str backend=\"auto\") "
      "-> (Tensor output, Tensor column_sums, Tensor row_sums)");
  m.def(
      "linear_relu_linear(Tensor input, Tensor weight1, Tensor? bias1, Tensor weight2, "
      "Tensor? bias2=None, bool allow_tf32=False, bool deterministic=False, "
      "str backend=\"auto\") -> (Tensor output, Tensor hidden)");

  // muon: momentum; matrices divided by their norms, with zeros around them, in bfloat16;
  // square = a I + b gram + c square; the matrices without the zeros
  m.def(
      "muon_momentum_(Tensor(a!)[] updates, Tensor[] grads, Tensor(b!)[] momentum_buffers, "
      "Tensor(c!)[] cast_outputs, Tensor[] cast_inputs, float momentum=0.95, bool nesterov=True, "
      "Tensor? grad_scale=None, Tensor? found_inf=None, Tensor? grad_norm=None, "
      "float max_grad_norm=0.0, Tensor(d!)? squares=None) -> ()");
  m.def(
      "muon_normalize_(Tensor(a!)[] outputs, Tensor[] inputs, float eps, Tensor? squares=None) "
      "-> ()");
  m.def("muon_polynomial_(Tensor gram, Tensor(a!) square, float a, float b, float c) -> ()");
  m.def("muon_unpad_(Tensor(a!)[] outputs, Tensor[] inputs) -> ()");

  // pool
  m.def(
      "max_pool2d(Tensor input, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
      "bool ceil_mode) -> (Tensor output, Tensor taps)");
  m.def(
      "max_pool2d_backward(Tensor grad_output, Tensor taps, SymInt[] input_size, "
      "int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode, "
      "bool channels_last) -> Tensor");
  m.def(
      "max_pool2d_indices(Tensor taps, SymInt[] input_size, int[] kernel_size, int[] stride, "
      "int[] padding, int[] dilation, bool ceil_mode) -> Tensor");
  // relu_max_pool2d: max_pool2d(relu(input + bias)) for windows of up to 3 x 3, stride 2
  m.def(
      "relu_max_pool2d(Tensor input, Tensor? bias, int[] kernel_size, int[] stride, "
      "int[] padding, bool ceil_mode, bool contiguous=False) -> (Tensor output, Tensor taps)");
  m.def(
      "relu_max_pool2d_backward(Tensor grad_output, Tensor taps, SymInt[] input_size, "
      "int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, ScalarType? bias_dtype) "
      "-> (Tensor, Tensor)");
  m.def(
      "avg_pool2d(Tensor input, int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, "
      "bool count_include_pad, int? divisor_override) -> Tensor");
  m.def(
      "avg_pool2d_backward(Tensor grad_output, SymInt[] input_size, int[] kernel_size, "
      "int[] stride, int[] padding, bool ceil_mode, bool count_include_pad, "
      "int? divisor_override, bool channels_last) -> Tensor");

  // upsample2d: images; mode: nearest, nearest-exact or bilinear; scales: the factors of size, as
  // interpolate() got them
  m.def(
      "upsample2d(Tensor input, SymInt[] output_size, str mode, bool align_corners, "
      "float? scale_h, float? scale_w, ScalarType? dtype=None) -> Tensor");
  m.def(
      "upsample2d_backward(Tensor grad_output, SymInt[] input_size, str mode, bool align_corners, "
      "float? scale_h, float? scale_w, bool channels_last, ScalarType? dtype=None) -> Tensor");

  // program: what a run of ops does below autograd, of tensors like these (csrc/ops/program.h);
  // run_program returns nothing where its tensors are others
  m.def("define_program(Tensor[] inputs, Tensor[] buffers, str text, int[] dropped) -> int");
  m.def("run_program(Tensor[] inputs, Tensor(a!)[] buffers, int program) -> Tensor[]");

  // relu
  m.def("relu(Tensor input) -> Tensor");
  m.def("relu_(Tensor(a!) input) -> ()");
  m.def("relu_backward(Tensor grad_output, Tensor result) -> Tensor");

  // adam, rmsprop
  m.def(
      "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] steps, "
      "Tensor(f!)[] cast_outputs, Tensor[] cast_inputs, float lr, float beta1=0.9, "
      "float beta2=0.999, float eps=1e-8, float weight_decay=0.0, "
      "bool decoupled_weight_decay=False, bool amsgrad=False, "
      "bool maximize=False, Tensor? lr_tensor=None, Tensor? grad_scale=None, "
      "Tensor? found_inf=None, Tensor(g!)[]? averages=None, float average_weight=0.0, "
      "Tensor(h!)? averaged=None, Tensor? grad_norm=None, float max_grad_norm=0.0, "
      "Tensor(i!)? tickets=None) -> ()");
  m.def(
      "rmsprop_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] square_avgs, "
      "Tensor(c!)[] momentum_buffers, Tensor(d!)[] grad_avgs, Tensor(e!)[] steps, "
      "Tensor(f!)[] cast_outputs, Tensor[] cast_inputs, float lr, float alpha=0.99, "
      "float eps=1e-8, float weight_decay=0.0, float momentum=0.0, bool centered=False, "
      "bool maximize=False, Tensor? lr_tensor=None, Tensor? grad_scale=None, "
      "Tensor? found_inf=None, Tensor(g!)[]? averages=None, float average_weight=0.0, "
      "Tensor(h!)? averaged=None, Tensor? grad_norm=None, float max_grad_norm=0.0) -> ()");

  // grad_norm: of all tensors together, float64
  m.def("grad_norm(Tensor[] grads, Tensor? grad_scale=None, Tensor? tickets=None) -> Tensor");

  // scale_add: residual + scale * input, the scale along one dimension
  m.def("scale_add(Tensor input, Tensor scale, Tensor residual) -> Tensor");
  m.def(
      "scale_add_backward(Tensor grad_output, Tensor input, Tensor scale, bool[2] output_mask) "
      "-> (Tensor, Tensor)");

  // sgd
  m.def(
      "sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, "
      "Tensor(c!)[] cast_outputs, Tensor[] cast_inputs, float lr, "
      "float momentum=0.0, float dampening=0.0, float weight_decay=0.0, bool nesterov=False, "
      "bool maximize=False, bool first_step=False, Tensor? lr_tensor=None, "
      "Tensor? grad_scale=None, Tensor? found_inf=None, Tensor? unwritten=None, "
      "Tensor(d!)[]? averages=None, float average_weight=0.0, Tensor(e!)? averaged=None, "
      "Tensor? grad_norm=None, float max_grad_norm=0.0, bool grads_in_16_bits=False) -> ()");

  // side_stream: gradients of parameters made concurrently with the rest of a backward pass, during
  // a capture of the current stream. join_side_stream returns aliases of what was made since the
  // last join
  m.def("open_side_stream(Tensor device_of) -> bool");
  m.def("join_side_stream(Tensor device_of, bool close) -> Tensor[]");
  // has a stream, by its address, wait for what that of the current one has been given
  m.def("follow_side_stream(Tensor device_of, int stream) -> ()");
  // whether what has been recorded in the capture of the current stream is given an address within
  // the memory of a dense tensor
  m.def("capture_mentions(Tensor memory) -> bool");

  // softmax
  m.def("softmax(Tensor input, int dim, ScalarType? dtype=None) -> Tensor");
  m.def(
      "softmax_rung(Tensor input, int dim, ScalarType? dtype=None, str backend=\"auto\") "
      "-> Tensor");
  m.def("log_softmax(Tensor input, int dim, ScalarType? dtype=None) -> Tensor");
  m.def(
      "softmax_backward(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) "
      "-> Tensor");
  m.def(
      "log_softmax_backward(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) "
      "-> Tensor");

  // sync_batch_norm: of several processes, which exchange moments ([C, 3], then [C, processes, 3])
  // and sums ([C, 2])
  m.def("sync_batch_norm_moments(Tensor input) -> Tensor");
  m.def(
      "sync_batch_norm(Tensor input, Tensor moments, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
      "float? momentum, float eps) -> (Tensor output, Tensor statistics, Tensor total)");
  m.def(
      "sync_batch_norm_sums(Tensor grad_output, Tensor input, Tensor? weight, Tensor statistics) "
      "-> (Tensor sums, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "sync_batch_norm_input_grad(Tensor grad_output, Tensor input, Tensor? weight, "
      "Tensor statistics, Tensor sums, Tensor total) -> Tensor");

  // transpose
  m.def("transpose_copy(Tensor input, str backend=\"auto\") -> Tensor");

  // vector_add
  m.def("vector_add(Tensor a, Tensor b, str backend=\"auto\") -> Tensor");

  // weight_standardization: mean and rstd are one for each filter; dtype is the result's, the
  // weight's own or of 16 bits for float32. as_made: nobody has written to grad_output, or seen it
  m.def(
      "weight_standardization(Tensor weight, Tensor? gain, float scale, float eps, "
      "ScalarType? dtype=None) -> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "weight_standardization_backward(Tensor grad_output, Tensor weight, Tensor? gain, "
      "Tensor mean, Tensor rstd, float scale, bool[] output_mask, bool as_made=False) "
      "-> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY(braze, m) { define(m); }
STABLE_TORCH_LIBRARY(braze_kernels, m) { define(m); }
