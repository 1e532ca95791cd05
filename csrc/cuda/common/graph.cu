#include "launchers/graph.h"

#include <map>
#include <mutex>
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

  // Never destroyed: the CUDA context may be gone first.
  void create(int priority) {
    if (stream) return;
    check(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
    check(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
  }
};

// This thread's for the current device.
Side& side() {
  thread_local std::vector<Side> sides;
  int device = 0;
  check(cudaGetDevice(&device));
  if (sides.size() <= static_cast<size_t>(device)) sides.resize(device + 1);
  Side& s = sides[device];
  s.create(kBranchPriority);
  return s;
}

// Event on `from`, which `to` waits for. A capture that has failed meanwhile reports its error when
// it ends.
void order(cudaStream_t from, cudaEvent_t event, cudaStream_t to) {
  if (cudaEventRecord(event, from) == cudaSuccess) cudaStreamWaitEvent(to, event);
  cudaGetLastError();
}

struct Aside {
  Side sides[2];  // the second one urgent
  bool unjoined[2] = {};
  Stream main = nullptr;
  bool open = false;
};

// Of the current device: opened by one thread, used by autograd's.
std::mutex aside_mutex;
Aside& aside() {
  static std::map<int, Aside> asides;
  int device = 0;
  check(cudaGetDevice(&device));
  return asides[device];
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
  branch_ = main_;
  order(side().stream, side().joined, as_cuda(main_));
}

bool open_aside(Stream main) {
  const std::lock_guard<std::mutex> lock(aside_mutex);
  Aside& a = aside();
  if (a.open) return false;
  for (int urgent = 0; urgent < 2; ++urgent)
    a.sides[urgent].create(urgent ? kUrgentPriority : kBranchPriority);
  a.main = main;
  a.open = true;
  return true;
}

bool fork_aside(Stream main, bool urgent, Stream* branch) {
  const std::lock_guard<std::mutex> lock(aside_mutex);
  Aside& a = aside();
  if (!a.open || a.main != main) return false;
  const Side& side = a.sides[urgent];
  check(cudaEventRecord(side.forked, as_cuda(main)));
  check(cudaStreamWaitEvent(side.stream, side.forked));
  a.unjoined[urgent] = true;
  *branch = side.stream;
  return true;
}

void join_aside(Stream main) {
  const std::lock_guard<std::mutex> lock(aside_mutex);
  Aside& a = aside();
  if (a.main != main) return;
  for (int urgent = 0; urgent < 2; ++urgent) {
    const Side& side = a.sides[urgent];
    if (a.unjoined[urgent]) order(side.stream, side.joined, as_cuda(main));
    a.unjoined[urgent] = false;
  }
}

void close_aside(Stream main) {
  join_aside(main);
  const std::lock_guard<std::mutex> lock(aside_mutex);
  Aside& a = aside();
  if (a.main == main) a.open = false;
}

}  // namespace braze::cuda
