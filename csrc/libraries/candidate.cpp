#include <cstring>

#include "libraries/libraries.h"

namespace braze::vendor {

int candidate_of(const std::string& backend, const char* vendor) {
  const size_t length = std::strlen(vendor);
  if (backend.compare(0, length, vendor) != 0) return -1;
  if (backend.size() == length) return 0;
  const std::string number = backend.substr(length + 1);
  if (backend[length] != ':' || number.empty() || number.size() > 2 ||
      number.find_first_not_of("0123456789") != std::string::npos) {
    return -1;
  }
  return std::stoi(number);
}

}  // namespace braze::vendor
