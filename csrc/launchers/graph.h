#pragma once

#include "launchers/common/types.h"

namespace braze {

// Blocks of kernels on streams of higher priority (lower numbers) go first: braze.TrainStep's main
// stream; branches for gradients; and, with that of ordinary streams, 0, what no gradient waits
// for.
constexpr int kUrgentPriority = -2, kBranchPriority = -1;

#ifdef BRAZE_CUDA
namespace cuda {

// A second branch of a CUDA graph, for launches that do not depend on those on the main stream: at
// small batches no kernel fills the GPU, and two run side by side. Where the main stream is not
// being captured the branch is the main stream itself: forking costs more calls than it saves time.
// So it is while a side stream is open for another stream: several chains are captured then
// (braze.Population), and those that took turns on a branch would wait for each other.
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

// A branch that lasts for a whole backward pass, on a side stream; one at a time on a device.
// `main` is being captured.
//
// Opens it; false where another capture has one.
bool open_side_stream(Stream main);
// Stores a stream for launches that need what `main` has been given so far; false where none is
// open for `main`. urgent: their blocks take turns with those of braze.TrainStep's main stream,
// which otherwise go first.
bool fork_side_stream(Stream main, bool urgent, Stream* branch);
// Whether one is open for `main`.
bool has_side_stream(Stream main);
// What `main` is given from now on waits for what the side stream has been given.
void join_side_stream(Stream main);
void close_side_stream(Stream main);
// What `stream` is given from now on waits for what the side stream of `main` has been given.
void follow_side_stream(Stream main, Stream stream);
// What `main` is given from now on waits for what the side stream had been given at the last call
// of this since the last join, if any. A wait for what was given long ago is a short one.
void move_side_stream_mark(Stream main);

// Whether anything recorded so far in the capture of `main` is given an address within this memory.
// True where that cannot be told.
bool capture_mentions(Stream main, const void* memory, int64_t bytes);

}  // namespace cuda
#else
namespace cpu {

class Fork {
 public:
  explicit Fork(Stream) {}
  Stream branch() const { return nullptr; }
  void join() {}
};

inline bool fork_side_stream(Stream, bool, Stream*) { return false; }
inline bool has_side_stream(Stream) { return false; }
inline void follow_side_stream(Stream, Stream) {}
inline void move_side_stream_mark(Stream) {}

}  // namespace cpu
#endif
}  // namespace braze
