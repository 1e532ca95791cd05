// The hash of the maps that are keyed by a problem's sizes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace braze {

// FNV-1a over whole words.
struct HashWords {
  template <size_t N>
  size_t operator()(const std::array<int64_t, N>& words) const {
    uint64_t hash = 14695981039346656037u;
    for (const int64_t word : words) hash = (hash ^ static_cast<uint64_t>(word)) * 1099511628211u;
    return hash ^ (hash >> 32);
  }
};

}  // namespace braze
