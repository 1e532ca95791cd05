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

struct SideStream {
  cudaStream_t stream = nullptr;
  cudaEvent_t forked = nullptr, joined = nullptr, marked = nullptr;

  // Never destroyed: the CUDA context may be gone first.
  void create(int priority) {
    if (stream) return;
    check(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
    check(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
    check(cudaEventCreateWithFlags(&marked, cudaEventDisableTiming));
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
  }
};

// This thread's for the current device.
SideStream& fork_stream() {
  thread_local std::vector<SideStream> streams;
  int device = 0;
  check(cudaGetDevice(&device));
  if (streams.size() <= static_cast<size_t>(device)) streams.resize(device + 1);
  SideStream& s = streams[device];
  s.create(kBranchPriority);
  return s;
}

// Event on `from`, which `to` waits for. A capture that has failed meanwhile reports its error when
// it ends.
void order(cudaStream_t from, cudaEvent_t event, cudaStream_t to) {
  if (cudaEventRecord(event, from) == cudaSuccess) cudaStreamWaitEvent(to, event);
  cudaGetLastError();
}

struct BackwardStreams {
  SideStream streams[2];  // the second one urgent
  bool pending[2] = {};   // whether it has been given what nobody has joined
  bool marked[2] = {};    // whether there is a mark that `main` has not waited for
  Stream main = nullptr;
  bool open = false;
};

// Of the current device: opened by one thread, used by autograd's.
std::mutex backward_mutex;
BackwardStreams& backward_streams() {
  static std::map<int, BackwardStreams> all;
  int device = 0;
  check(cudaGetDevice(&device));
  return all[device];
}

bool other_stream_has_side_stream(Stream main) {
  const std::lock_guard<std::mutex> lock(backward_mutex);
  const BackwardStreams& b = backward_streams();
  return b.open && b.main != main;
}

}  // namespace

Fork::Fork(Stream main) : main_(main), branch_(main) {
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(as_cuda(main), &status));
  if (status != cudaStreamCaptureStatusActive || other_stream_has_side_stream(main)) return;
  SideStream& s = fork_stream();
  check(cudaEventRecord(s.forked, as_cuda(main)));
  check(cudaStreamWaitEvent(s.stream, s.forked));
  branch_ = s.stream;
}

void Fork::join() {
  if (branch_ == main_) return;
  branch_ = main_;
  order(fork_stream().stream, fork_stream().joined, as_cuda(main_));
}

bool open_side_stream(Stream main) {
  const std::lock_guard<std::mutex> lock(backward_mutex);
  BackwardStreams& b = backward_streams();
  if (b.open) return false;
  for (int urgent = 0; urgent < 2; ++urgent)
    b.streams[urgent].create(urgent ? kUrgentPriority : kBranchPriority);
  b.main = main;
  b.open = true;
  return true;
}

bool fork_side_stream(Stream main, bool urgent, Stream* branch) {
  const std::lock_guard<std::mutex> lock(backward_mutex);
  BackwardStreams& b = backward_streams();
  if (!b.open || b.main != main) return false;
  const SideStream& side = b.streams[urgent];
  check(cudaEventRecord(side.forked, as_cuda(main)));
  check(cudaStreamWaitEvent(side.stream, side.forked));
  b.pending[urgent] = true;
  *branch = side.stream;
  return true;
}

bool has_side_stream(Stream main) {
  const std::lock_guard<std::mutex> lock(backward_mutex);
  const BackwardStreams& b = backward_streams();
  return b.open && b.main == main;
}

void join_side_stream(Stream main) {
  const std::lock_guard<std::mutex> lock(backward_mutex);
  BackwardStreams& b = backward_streams();
  if (b.main != main) return;
  for (int urgent = 0; urgent < 2; ++urgent) {
    const SideStream& side = b.streams[urgent];
    if (b.pending[urgent]) order(side.stream, side.joined, as_cuda(main));
    b.pending[urgent] = b.marked[urgent] = false;
  }
}

void follow_side_stream(Stream main, Stream stream) {
  const std::lock_guard<std::mutex> lock(backward_mutex);
  const BackwardStreams& b = backward_streams();
  if (!b.open || b.main != main) return;
  for (int urgent = 0; urgent < 2; ++urgent) {
    const SideStream& side = b.streams[urgent];
    if (b.pending[urgent]) order(side.stream, side.joined, as_cuda(stream));
  }
}

void move_side_stream_mark(Stream main) {
  const std::lock_guard<std::mutex> lock(backward_mutex);
  BackwardStreams& b = backward_streams();
  if (!b.open || b.main != main) return;
  for (int urgent = 0; urgent < 2; ++urgent) {
    const SideStream& side = b.streams[urgent];
    if (b.marked[urgent]) check(cudaStreamWaitEvent(as_cuda(main), side.marked));
    b.marked[urgent] = b.pending[urgent];
    if (b.pending[urgent]) check(cudaEventRecord(side.marked, side.stream));
  }
}

void close_side_stream(Stream main) {
  join_side_stream(main);
  const std::lock_guard<std::mutex> lock(backward_mutex);
  BackwardStreams& b = backward_streams();
  if (b.main == main) b.open = false;
}

}  // namespace braze::cuda
