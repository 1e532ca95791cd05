// What the rungs share: the images that they work on. What follows from a channel's moments
// (channel.cuh) and, from rung 2 on, how a block walks through its channel (planes.cuh) is the
// shipped kernel's.
#pragma once

#include "cuda/batch_norm/planes.cuh"

namespace braze::cuda::batch_norm_ladder {

// Dense [n, c, inner]: a channel is n runs of `inner` neighbouring elements.
template <typename T>
struct Images {
  const T* x;
  T* y;
  BatchNormShape shape;
  int splits;                // blocks per channel: 1 up to rung 3
  MomentsPartial* partials;  // [c][splits], from rung 4 on
  ForwardArgs args;

  // Elements of a channel.
  __host__ __device__ int64_t count() const { return shape.n * shape.inner; }
  // The block's part, blockIdx.y, of channel blockIdx.x, an element a thread at a time.
  __device__ PlaneCursor<1> part() const {
    return PlaneCursor<1>({shape.n, shape.c, shape.inner, splits}, blockIdx.x, blockIdx.y);
  }
};

// What channel c is normalised with, as batch_coefficients stored it.
template <typename A>
struct Coefficients {
  A center, scale, shift;

  __device__ Coefficients(const BatchNormStatistics& from, int64_t c)
      : center(static_cast<const A*>(from.mean)[c]),
        scale(static_cast<const A*>(from.scale)[c]),
        shift(static_cast<const A*>(from.shift)[c]) {}
  template <typename T>
  __device__ T normalize(T x) const {
    return convert<T>(normalized(convert<A>(x) - center, scale, shift));
  }
};

// The block's part, normalised.
template <typename T>
__device__ void normalize_part(const Images<T>& m) {
  const Coefficients<acc_t<T>> k(m.args.statistics, blockIdx.x);
  for (auto at = m.part(); at.valid(); at.advance()) {
    m.y[at.offset()] = k.normalize(m.x[at.offset()]);
  }
}

}  // namespace braze::cuda::batch_norm_ladder
