// The stream of a weight's gradient.
#pragma once

#include "ops/backend.h"
#include "ops/side_stream.h"

namespace braze {

// Where a weight's gradient is made while the main stream goes on: until join(), or, if it is small
// and a side stream is open, beyond the op. is_urgent: its blocks take turns with the main
// stream's, which otherwise go first.
class Branch {
 public:
  Branch(Stream main, bool is_small, bool is_urgent)
      : main_(main), is_small_(is_small), is_urgent_(is_urgent) {}
  // The branch's stream; it begins with what the main stream has been given so far.
  Stream begin() {
    Stream stream;
    outlasts_ = is_small_ && dev::fork_side_stream(main_, is_urgent_, &stream);
    return outlasts_ ? stream : fork_.emplace(main_).branch();
  }
  bool outlasts() const { return outlasts_; }
  // Whether what is small outlasts the op.
  bool has_side_stream() const { return is_small_ && dev::has_side_stream(main_); }
  // For launches behind begin(), before it: that of the op before on the same side stream, which
  // works in it no longer when they do, or new memory.
  Workspace workspace(int64_t bytes, const Tensor& like) const {
#ifdef BRAZE_CUDA
    const Tensor memory =
        is_small_ && bytes > 0 ? side_stream_workspace(main_, is_urgent_, bytes, like) : Tensor();
    if (memory.defined()) return Workspace(memory);
#endif
    return Workspace(bytes, like);
  }
  // Behind the launches of an op that outlasts it: what they read, work in and make.
  void keep(const std::vector<Tensor>& read, const Workspace& workspace, const Tensor& made) const {
    keep_workspace(main_, is_urgent_, workspace.memory());
    keep_until_join(read, {made});
  }
  // The same for a bias' gradient, or what little is left of it, beyond the op, on a stream that
  // neither the weight's gradient nor the input's waits for; if there is one.
  std::optional<Stream> begin_sums() const {
    Stream stream;
    if (!is_small_ || !dev::fork_side_stream(main_, !is_urgent_, &stream)) return std::nullopt;
    return stream;
  }
  void join() {
    if (fork_) fork_->join();
  }

 private:
  Stream main_;
  bool is_small_, is_urgent_, outlasts_ = false;
  std::optional<dev::Fork> fork_;
};

}  // namespace braze
