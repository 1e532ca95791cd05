// Strings among an op's arguments. torch's own conversion of one (in stableivalue_conversions.h, up
// to 2.13 at least) makes a std::string by `new` that nobody deletes: 48 bytes for each call of an
// op that has a backend.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

namespace braze {

// What TORCH_BOX hands to a function that takes a const std::string&.
struct Text : std::string {
  using std::string::string;
};

}  // namespace braze

namespace torch::stable::detail {

template <>
struct UnboxType<std::string> {
  using type = braze::Text;
};

template <>
struct ToImpl<braze::Text> {
  static braze::Text call(StableIValue value, uint64_t, bool) {
    const StringHandle handle = to<StringHandle>(value);
    struct Owner {
      ~Owner() { torch_delete_string(handle); }
      StringHandle handle;
    } const owner{handle};
    size_t length;
    const char* data;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    return braze::Text(data, length);
  }
};

}  // namespace torch::stable::detail
