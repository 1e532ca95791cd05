#include "fork.h"

#include <vector>

#include "launch.cuh"

namespace braze::cuda {
namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("fork: ") + cudaGetErrorString(error));
  }
}

struct Side {
  cudaStream_t stream = nullptr;
  cudaEvent_t forked = nullptr, joined = nullptr;
};

// This thread's for the current device. Never destroyed: the CUDA context may be gone first.
Side& side() {
  thread_local std::vector<Side> sides;
  int device = 0;
  check(cudaGetDevice(&device));
  if (sides.size() <= static_cast<size_t>(device)) sides.resize(device + 1);
  Side& s = sides[device];
  if (s.stream == nullptr) {
    check(cudaEventCreateWithFlags(&s.forked, cudaEventDisableTiming));
    check(cudaEventCreateWithFlags(&s.joined, cudaEventDisableTiming));
    check(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
  }
  return s;
}

}  // namespace

Fork::Fork(Stream main) : main_(main), branch_(main) {
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(as_cuda(main), &status));
  if (status != cudaStreamCaptureStatusActive) return;
  Side& s = side();
  check(cudaEventRecord(s.forked, as_cuda(main)));
  check(cudaStreamWaitEvent(s.stream, s.forked));
  branch_ = s.stream;
}

void Fork::join() {
  if (branch_ == main_) return;
  const Side& s = side();
  branch_ = main_;
  // A capture that has failed meanwhile reports its error when it ends.
  if (cudaEventRecord(s.joined, s.stream) == cudaSuccess) {
    cudaStreamWaitEvent(as_cuda(main_), s.joined);
  }
  cudaGetLastError();
}

}  // namespace braze::cuda
