#pragma once

#include "types.h"

namespace braze {
#ifdef BRAZE_CUDA
namespace cuda {

// A second branch of a CUDA graph, for launches that do not depend on those on the main stream: at
// small batches no kernel fills the GPU, and two run side by side. Where the main stream is not
// being captured the branch is the main stream itself: forking costs more calls than it saves time.
class Fork {
 public:
  explicit Fork(Stream main);
  ~Fork() { join(); }
  Fork(const Fork&) = delete;
  Fork& operator=(const Fork&) = delete;

  Stream branch() const { return branch_; }
  // What the main stream is given from now on waits for the branch.
  void join();

 private:
  Stream main_, branch_;
};

}  // namespace cuda
#else
namespace cpu {

class Fork {
 public:
  explicit Fork(Stream) {}
  Stream branch() const { return nullptr; }
  void join() {}
};

}  // namespace cpu
#endif
}  // namespace braze
