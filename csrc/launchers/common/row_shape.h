#pragma once

#include <cstdint>

namespace braze {

// A dense tensor cut into rows along one dimension: element c of row (o, i) lies at
// (o * size + c) * inner + i. inner = 1 where the dimension is the innermost in memory.
struct RowShape {
  int64_t outer;
  int64_t size;
  int64_t inner;
  constexpr int64_t rows() const { return outer * inner; }
};

}  // namespace braze
