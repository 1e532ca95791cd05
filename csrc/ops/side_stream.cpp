#include "ops/side_stream.h"

#include <map>
#include <mutex>
#include <utility>

namespace braze {
namespace {

// How much of what a side stream reads may be kept before the main stream waits for a part of it.
// Twice as much, and what one op reads, is kept at most; networks whose backward reads less, such
// as those of MNIST, have no such waits.
constexpr int64_t kMostBytes = int64_t{32} << 20;

struct Kept {
  std::vector<Tensor> tensors;
  int64_t bytes = 0;
};

// Of a device, since the last join.
struct Record {
  // `older` has been read where the side stream has come to its mark.
  Kept older, younger;
  std::vector<Tensor> made;
  // Of the streams that fork_side_stream() has for `main`, by whether they are urgent.
  Stream main = nullptr;
  Tensor workspaces[2];
};

void add(Kept& kept, const Tensor& t) {
  if (!t.defined()) return;
  kept.tensors.push_back(t);
  kept.bytes += t.numel() * static_cast<int64_t>(t.element_size());
}

std::mutex mutex;  // one thread opens and joins, autograd's launches
std::map<int32_t, Record> records;

#ifdef BRAZE_CUDA
bool open_side_stream(const Tensor& device_of) {
  return dev::open_side_stream(DeviceContext(device_of).stream());
}

// stream: the address that CUDA knows it by.
void follow_side_stream(const Tensor& device_of, int64_t stream) {
  dev::follow_side_stream(DeviceContext(device_of).stream(), reinterpret_cast<Stream>(stream));
}

bool capture_mentions(const Tensor& memory) {
  const int64_t bytes = memory.numel() * static_cast<int64_t>(memory.element_size());
  return dev::capture_mentions(DeviceContext(memory).stream(), memory.const_data_ptr(), bytes);
}

std::vector<Tensor> join_side_stream(const Tensor& device_of, bool close) {
  const DeviceContext context(device_of);
  (close ? dev::close_side_stream : dev::join_side_stream)(context.stream());
  Record done;
  const std::lock_guard<std::mutex> lock(mutex);
  std::swap(done, records[device_of.get_device_index()]);
  return done.made;
}
#endif

}  // namespace

Tensor side_stream_workspace(Stream main, bool urgent, int64_t bytes, const Tensor& like) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = records.find(like.get_device_index());
  if (found == records.end() || found->second.main != main) return Tensor();
  const Tensor& memory = found->second.workspaces[urgent];
  return memory.defined() && memory.numel() >= bytes ? memory : Tensor();
}

void keep_workspace(Stream main, bool urgent, const Tensor& memory) {
  if (!memory.defined()) return;
  const std::lock_guard<std::mutex> lock(mutex);
  Record& record = records[memory.get_device_index()];
  record.main = main;
  Tensor& last = record.workspaces[urgent];
  if (last.defined() && last.get() == memory.get()) return;
  add(record.younger, last);
  last = memory;
}

void keep_until_join(const std::vector<Tensor>& read, const std::vector<Tensor>& made) {
  Kept done;  // freed behind the lock
  const std::lock_guard<std::mutex> lock(mutex);
  Record& record = records[made.at(0).get_device_index()];
  for (const Tensor& t : read) add(record.younger, t);
  for (const Tensor& t : made) {
    // Not the tensor itself, nor what torch knows as a view of it: autograd takes a tensor over
    // where nobody else has it.
    AtenTensorHandle alias;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), t.dim(), t.sizes().data(),
                                                          t.strides().data(), 0, &alias));
    record.made.emplace_back(alias);
  }
  if (record.younger.bytes <= kMostBytes) return;
  dev::move_side_stream_mark(DeviceContext(made[0]).stream());
  done = std::exchange(record.older, std::exchange(record.younger, {}));
}

void forget_made(const Tensor& made) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<Tensor>& all = records[made.get_device_index()].made;
  const auto is_it = [&](const Tensor& t) {
    return t.data_ptr() == made.data_ptr() && t.numel() == made.numel() &&
           t.scalar_type() == made.scalar_type();
  };
  all.erase(std::remove_if(all.begin(), all.end(), is_it), all.end());
}

#ifdef BRAZE_CUDA
BRAZE_IMPL(m) {
  m.impl("open_side_stream", TORCH_BOX(&open_side_stream));
  m.impl("join_side_stream", TORCH_BOX(&join_side_stream));
  m.impl("follow_side_stream", TORCH_BOX(&follow_side_stream));
  m.impl("capture_mentions", TORCH_BOX(&capture_mentions));
}
#endif

}  // namespace braze
