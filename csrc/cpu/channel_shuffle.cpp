#include "launchers/channel_shuffle.h"

#include <algorithm>

#include "cpu/common/parallel.h"
#include "launchers/common/registry.h"

namespace braze::cpu {
namespace {

constexpr int64_t kGrain = 8192;  // elements of a task

const KernelEntry kEntry({"channel_shuffle", "copy", "float64 float32 bfloat16 float16", "cpu",
                          true, "threaded over pixels"});

// Raw: an integer of an element's size.
template <typename Raw>
void shuffle(const ChannelShuffleArgs& args) {
  const int64_t channels = args.channels, groups = args.groups, count = channels / groups;
  const int64_t grain = std::max<int64_t>(1, kGrain / channels);
  parallel_for(0, args.pixels, grain, [&](int64_t first, int64_t last) {
    for (int64_t pixel = first; pixel < last; ++pixel) {
      const Raw* const from = static_cast<const Raw*>(args.input) + pixel * args.step;
      Raw* const to = static_cast<Raw*>(args.result) + pixel * channels;
      for (int64_t i = 0; i < groups; ++i) {
        for (int64_t j = 0; j < count; ++j) to[j * groups + i] = from[i * count + j];
      }
    }
  });
}

}  // namespace

void channel_shuffle(Stream, const ChannelShuffleArgs& args) {
  switch (size_of(args.dtype)) {
    case 2: return shuffle<uint16_t>(args);
    case 4: return shuffle<uint32_t>(args);
    default: return shuffle<uint64_t>(args);
  }
}

}  // namespace braze::cpu
