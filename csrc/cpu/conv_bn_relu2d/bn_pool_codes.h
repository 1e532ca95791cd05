// The 4-bit codes of conv_bn_relu2d.h and conv_bn_relu_max_pool2d.h, eight to a word, and one to a
// byte as loops want them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace braze::cpu {

// Eight codes, one to a byte, as the nibbles of a word, and back.
inline uint32_t pack8(const uint8_t* codes) {
  uint64_t x;
  std::memcpy(&x, codes, 8);
  x = (x | x >> 4) & 0x00ff00ff00ff00ff;
  x = (x | x >> 8) & 0x0000ffff0000ffff;
  return static_cast<uint32_t>(x | x >> 16);
}
inline void unpack8(uint32_t word, uint8_t* codes) {
  uint64_t x = word;
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  x = (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
  std::memcpy(codes, &x, 8);
}

// Codes of elements [first, first + count), one to a byte, into words that were zero. Other threads
// may write the other codes of the first and the last word.
inline void pack(const uint8_t* codes, int64_t first, int64_t count, uint32_t* words) {
  for (int64_t i = 0; i < count;) {
    const int64_t e = first + i, in_word = std::min(8 - e % 8, count - i);
    if (in_word == 8) {
      words[e / 8] = pack8(codes + i);
    } else {
      uint32_t word = 0;
      for (int64_t j = 0; j < in_word; ++j) word |= uint32_t{codes[i + j]} << (4 * (e % 8 + j));
      __atomic_fetch_or(&words[e / 8], word, __ATOMIC_RELAXED);
    }
    i += in_word;
  }
}

inline void unpack(const uint32_t* words, int64_t first, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count;) {
    const int64_t e = first + i, in_word = std::min(8 - e % 8, count - i);
    if (in_word == 8) {
      unpack8(words[e / 8], codes + i);
    } else {
      const uint32_t word = words[e / 8] >> (4 * (e % 8));
      for (int64_t j = 0; j < in_word; ++j) codes[i + j] = word >> (4 * j) & 7;
    }
    i += in_word;
  }
}

}  // namespace braze::cpu
