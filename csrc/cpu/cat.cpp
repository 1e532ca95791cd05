#include "launchers/cat.h"

#include <algorithm>
#include <cstring>

#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

constexpr int64_t kGrainBytes = 32768;  // of a task

const KernelEntry kEntry({"cat_channels", "copy", "float64 float32 bfloat16 float16", "cpu", true,
                          "threaded over pixels"});

// Blocks of kBytes, the last of which overlaps the one before.
template <int64_t kBytes>
void copy_blocks(char* to, const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes - kBytes; i += kBytes) std::memcpy(to + i, from + i, kBytes);
  std::memcpy(to + bytes - kBytes, from + bytes - kBytes, kBytes);
}

// Of a few channels a call of memcpy takes longer than the copy: these are instructions.
void copy_pixel(char* to, const char* from, int64_t bytes) {
  if (bytes >= 64 && bytes <= 2048) return copy_blocks<64>(to, from, bytes);
  if (bytes >= 16 && bytes < 64) return copy_blocks<16>(to, from, bytes);
  std::memcpy(to, from, bytes);
}

}  // namespace

void copy_channels(Stream, int64_t pixels, const ChannelCopy* copies, int64_t count) {
  int64_t bytes = 0;  // of a pixel
  for (int64_t i = 0; i < count; ++i) bytes += copies[i].bytes;
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes));
  parallel_for(0, pixels, grain, [&](int64_t first, int64_t last) {
    for (int64_t pixel = first; pixel < last; ++pixel) {
      for (int64_t i = 0; i < count; ++i) {
        const ChannelCopy& c = copies[i];
        copy_pixel(static_cast<char*>(c.to) + pixel * c.to_stride,
                   static_cast<const char*>(c.from) + pixel * c.from_stride, c.bytes);
      }
    }
  });
}

}  // namespace braze::cpu
