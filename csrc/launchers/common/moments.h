#pragma once

namespace braze {

// What batch norm needs of a set of values: count, mean, sum of squared deviations from the mean.
struct Moments {
  float count, mean, m2;
};

// Moments of parts of each channel, [channels][sets], left by the kernel that made the values. sets
// is 0 where it left none.
struct ChannelMoments {
  Moments* data = nullptr;
  int sets = 0;
};

}  // namespace braze
