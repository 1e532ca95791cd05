// Batch norm's ladder: compiles the rungs of the forward pass in training, 01 to 05, one a file,
// and lists them beside the shipped kernels. docs/batch_norm_ladder.md goes through them. The
// shipped path does not come through here.
#include <iterator>
#include <string>

#include "01_thread_per_channel.cuh"
#include "02_block_per_channel.cuh"
#include "03_welford.cuh"
#include "04_split_channels.cuh"
#include "05_shifted_sums.cuh"

namespace braze::cuda {
namespace {

using namespace batch_norm_ladder;

constexpr char kAll[] = "float64 float32 bfloat16 float16", kArch[] = "sm_80+";

constexpr KernelInfo kKernels[] = {
    {"batch_norm", "01_thread_per_channel", kAll, kArch, false,
     "[n, c, inner]: a thread per channel, three passes"},
    {"batch_norm", "02_block_per_channel", kAll, kArch, false,
     "[n, c, inner]: a block per channel, sums as trees in shared memory"},
    {"batch_norm", "03_welford", kAll, kArch, false,
     "[n, c, inner]: mean and squares in one pass, merged"},
    {"batch_norm", "04_split_channels", kAll, kArch, false,
     "[n, c, inner]: several blocks per channel, three launches"},
    {"batch_norm", "05_shifted_sums", kAll, kArch, false,
     "[n, c, inner]: sums about the mean of the first elements"},
    {"batch_norm", "planes", kAll, kArch, true, "[n, c, inner]: several blocks per channel"},
    {"batch_norm", "rows", kAll, kArch, true, "[n, inner, c]: a thread per vector of channels"},
    {"batch_norm", "resident", "float32 bfloat16 float16", "sm_90+", true,
     "[n, inner, c]: one kernel for all, rows kept in shared memory"},
};
constexpr int kThreadPerChannel = kernel_number(kKernels, "01_thread_per_channel"),
              kBlockPerChannel = kernel_number(kKernels, "02_block_per_channel"),
              kWelford = kernel_number(kKernels, "03_welford"),
              kSplitChannels = kernel_number(kKernels, "04_split_channels"),
              kShiftedSums = kernel_number(kKernels, "05_shifted_sums"),
              kPlanes = kernel_number(kKernels, "planes"), kRows = kernel_number(kKernels, "rows"),
              kResident = kernel_number(kKernels, "resident");
const KernelEntries kEntries(kKernels, std::size(kKernels));

template <typename T>
void run(Stream stream, const Images<T>& m, int kernel) {
  switch (kernel) {
    case kThreadPerChannel: return run_thread_per_channel(stream, m);
    case kBlockPerChannel: return run_block_per_channel(stream, m);
    case kWelford: return run_welford(stream, m);
    case kSplitChannels: return run_split_channels(stream, m);
    case kShiftedSums: return run_shifted_sums(stream, m);
  }
}

}  // namespace

const KernelInfo* batch_norm_rung_info(int number) {
  return number < static_cast<int>(std::size(kKernels)) ? &kKernels[number] : nullptr;
}

void batch_norm_rung(Stream stream, const BatchNormShape& shape, const void* x,
                     const BatchNormAffine& affine, const BatchNormBuffers& buffers, double eps,
                     const BatchNormStatistics& statistics, void* y, void* workspace, int kernel) {
  const auto check = [&](bool takes, const char* what) {
    if (takes) return;
    throw std::runtime_error(std::string("batch_norm: kernel ") + kKernels[kernel].name +
                             " cannot take these arguments: it takes " + what);
  };
  if (kernel == kAnyKernel) {
    return batch_norm_train(stream, shape, x, affine, buffers, eps, {}, statistics, y, nullptr,
                            workspace);
  }
  const ForwardArgs args = forward_args(affine, buffers, eps, statistics);
  if (kernel == kResident) {
    return check(
        batch_norm_resident(stream, shape, x, args, {}, y, nullptr, buffers.batches, workspace, 0),
        "channels_last tensors of 32 or 16 bits whose pixels are whole vectors of 16 "
        "bytes, at most 512, on GPUs from sm_90 on");
  }
  if (kernel == kRows) {
    check(shape.channels_last, "channels_last tensors and images of one element");
  } else {
    check(!shape.channels_last, "contiguous images of several elements");
  }
  if (kernel == kPlanes || kernel == kRows) {
    batch_norm_coefficients(stream, shape, true, x, {}, affine, buffers, eps, statistics,
                            workspace);
    return batch_norm_apply(stream, shape, x, {}, statistics, y, nullptr);
  }
  if (buffers.batches) count_batch(as_cuda(stream), buffers.batches);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Images<T> m{static_cast<const T*>(x),
                      static_cast<T*>(y),
                      shape,
                      1,
                      static_cast<MomentsPartial*>(workspace),
                      args};
    run(stream, m, kernel);
  });
  check_launch("batch_norm");
}

}  // namespace braze::cuda
