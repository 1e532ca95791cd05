// What a kernel decides when it is planned and needs when it runs: tile shapes, splits, offsets
// into the workspace. Launchers pass it on; only the kernel knows its type.
#pragma once

#include <cstring>
#include <type_traits>

namespace braze {

class Tiling {
 public:
  template <typename T>
  void set(const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(bytes_));
    std::memcpy(bytes_, &value, sizeof(T));
  }
  // As it was set.
  template <typename T>
  const T& get() const {
    return *reinterpret_cast<const T*>(bytes_);
  }

 private:
  alignas(16) unsigned char bytes_[320];
};

}  // namespace braze
