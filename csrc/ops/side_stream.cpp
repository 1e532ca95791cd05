#include "ops/side_stream.h"

#include <map>
#include <mutex>

namespace braze {
namespace {

// Of a device, since the last join.
struct Record {
  std::vector<Tensor> read, made;
};

std::mutex mutex;  // one thread opens and joins, autograd's launches
std::map<int32_t, Record> records;

#ifdef BRAZE_CUDA
bool open_side_stream(const Tensor& device_of) {
  return dev::open_side_stream(DeviceContext(device_of).stream());
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

void keep_until_join(const std::vector<Tensor>& read, const std::vector<Tensor>& made) {
  const std::lock_guard<std::mutex> lock(mutex);
  Record& record = records[made.at(0).get_device_index()];
  record.read.insert(record.read.end(), read.begin(), read.end());
  for (const Tensor& t : made) {
    // Not the tensor itself, nor what torch knows as a view of it: autograd takes a tensor over
    // where nobody else has it.
    AtenTensorHandle alias;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), t.dim(), t.sizes().data(),
                                                          t.strides().data(), 0, &alias));
    record.made.emplace_back(alias);
  }
}

#ifdef BRAZE_CUDA
BRAZE_IMPL(m) {
  m.impl("open_side_stream", TORCH_BOX(&open_side_stream));
  m.impl("join_side_stream", TORCH_BOX(&join_side_stream));
}
#endif

}  // namespace braze
