// Depthwise convolution, channels last. A block has a slab of channels and works on tiles, whole
// columns of the image or parts of them: rows of pixels stream through shared memory, asked for two
// stages ahead across the ends of tiles, and each thread takes every pixel of its strip from there
// once (strip.cuh). So shared memory is a queue, not a tile with a halo: however tall an
// image, a row is read once.
#pragma once

#include "args.h"
#include "strip.cuh"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/launch.cuh"

namespace braze::cuda::depthwise {
namespace {

extern __shared__ __align__(16) char shared_memory[];

template <int kBytes>
__device__ __forceinline__ void copy_vector(char* to, const char* from, bool inside) {
  if constexpr (kBytes >= 4) {
    cp_async<kBytes>(to, from, inside);
  } else {
    *reinterpret_cast<uint16_t*>(to) = inside ? *reinterpret_cast<const uint16_t*>(from) : 0;
  }
}

// A slab of channels of rows x columns pixels into shared memory, zeros for what is outside of
// the image. A row of shared memory has the
// first granule of every pixel, then the second of every pixel, and so on: a thread's pixels are
// at distances that the compiler knows.
template <typename T, int kBytes>
__device__ __forceinline__ void load_pixels(const Args& a, const Image& from, char* to, int pitch,
                                            int64_t n, int channel, int row, int rows, int column,
                                            int columns) {
  constexpr int kWidth = kBytes / sizeof(T);
  const int row_bytes = a.slab * static_cast<int>(sizeof(T)) * pitch;
  const T* const image = static_cast<const T*>(from.data) + n * from.n + channel;
  for (int i = threadIdx.x; i < columns * a.by_vectors.divisor(); i += blockDim.x) {
    int part;
    const int at = a.by_vectors.div(i, part), byte = part * kBytes;
    const bool inside = static_cast<unsigned>(column + at) < static_cast<unsigned>(from.width) &&
                        channel + part * kWidth < a.channels;
    const T* source = image + row * from.h + (column + at) * from.w + part * kWidth;
    char* target = to + (byte / kGranule * pitch + at) * kGranule + byte % kGranule;
#pragma unroll 1
    for (int r = row; r < row + rows; ++r, source += from.h, target += row_bytes) {
      const bool exists = inside && static_cast<unsigned>(r) < static_cast<unsigned>(from.height);
      copy_vector<kBytes>(target, reinterpret_cast<const char*>(source), exists);
    }
  }
}

template <typename T, typename... Rest>
__device__ __forceinline__ void load_pixels(const Args& a, Rest... rest) {
  if (a.vector == 16) return load_pixels<T, 16>(a, rest...);
  if (a.vector == 8) return load_pixels<T, 8>(a, rest...);
  if (a.vector == 4) return load_pixels<T, 4>(a, rest...);
  if constexpr (sizeof(T) == 2) load_pixels<T, 2>(a, rest...);
}

// A block's share of the rows of results of all images and column tiles, one below the other: tile
// by tile, a tile being what it has of one image.
struct Share {
  int at, end;  // of the rows that are left
  int64_t n;    // of the tile
  int row, column, rows;
  int first;  // step: the ones before it read nothing but padding

  __device__ __forceinline__ Share(const Args& a, int step_rows)
      : at(begin(a, blockIdx.x) * a.piece), end(begin(a, blockIdx.x + 1) * a.piece) {
    find(a, step_rows);
  }
  __device__ __forceinline__ static int begin(const Args& a, int block) {
    return a.share * block + min(block, a.longer);
  }
  __device__ __forceinline__ void find(const Args& a, int step_rows) {
    n = a.by_column_tiles.div(a.by_rows.div(at, row), column);
    column *= a.strips * kStrip;
    rows = min(a.rows - row, end - at);
    first = max(0, -(a.first_row + row * step_rows)) / step_rows;
  }
  __device__ __forceinline__ void advance(const Args& a, int step_rows) {
    at += rows;
    if (at < end) find(a, step_rows);
  }
};

// The filters of a block's slab in a stage that is not in use yet, [tap][channel]; then a thread's
// own in registers.
template <typename T, int R, int V>
__device__ __forceinline__ void load_weights(const Args& a, char* stage, int channel, int own,
                                             float (&w)[R * R][V]) {
  T* const buffer = reinterpret_cast<T*>(stage);
  const T* const from = static_cast<const T*>(a.w) + int64_t{channel} * (R * R);
  const int count = min(a.slab, a.channels - channel) * (R * R);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int c = i / (R * R), tap = i - c * (R * R);
    buffer[(a.turned ? R * R - 1 - tap : tap) * a.slab + c] = from[i];
  }
  __syncthreads();
#pragma unroll
  for (int tap = 0; tap < R * R; ++tap) load_values<V>(buffer + tap * a.slab + own, w[tap]);
}

template <typename T, int R, int kStride, bool kSpread, int kWindow, bool kTail = false>
__global__ void __launch_bounds__(kMostThreads) nhwc_kernel(const __grid_constant__ Args a) {
  constexpr int V = channels_per_thread(sizeof(T), R), kPixel = kGranule / sizeof(T);
  constexpr int kRows = kSpread ? 1 : kStride;  // of `in` per step
  constexpr int kTurns = kSpread ? Spread<R>::kTurns : Walk<R, kStride>::kTurns;
  wait_for_earlier_kernels();
  int unit;
  const int strip = a.by_units.div(threadIdx.x, unit);
  const int own = unit * V, channel = blockIdx.y * a.slab;
  const int left = a.channels - channel - own;  // channels from this thread's on
  const bool active = strip < a.strips && left > 0;
  const int row_size = a.pitch * a.slab, steps = a.steps;

  Share next(a, kRows);
  int next_step = next.first;
  const auto load = [&](int stage) {
    if (next.at < next.end) {
      const int first = next_step;
      load_pixels<T>(a, a.in, shared_memory + stage * a.stage_bytes, a.pitch, next.n, channel,
                     a.first_row + (next.row + first) * kRows,
                     min(steps, next.rows + kTurns - 1 - first) * kRows,
                     a.first_column + next.column * kRows,
                     (a.strips - 1) * kStrip * kRows + kWindow);
      next_step += steps;
      if (next_step >= next.rows + kTurns - 1) {
        next.advance(a, kRows);
        next_step = next.first;
      }
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) load(stage);
  float w[R * R][V], bias[V] = {};
  load_weights<T, R, V>(a, shared_memory + (kStages - 1) * a.stage_bytes, channel, active ? own : 0,
                        w);
  if (a.bias && active) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (v < left) bias[v] = convert<float>(static_cast<const T*>(a.bias)[channel + own + v]);
    }
  }
  [[maybe_unused]] float scale[V], offset[V];
  if constexpr (kTail) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const float2 of = a.tail.coefficients(active && v < left ? channel + own + v : 0);
      scale[v] = of.x, offset[v] = of.y;
    }
  }
  const bool paired = V == 2 && left >= 2 && (a.out.w | a.out.h | a.out.n) % 2 == 0 &&
                      reinterpret_cast<uintptr_t>(a.out.data) % 4 == 0;

  int stage = 0;
  for (Share share(a, kRows); share.at < share.end; share.advance(a, kRows)) {
    // The strip's first column of results, where in the image it ends, and its first row's place.
    const int column = kSpread ? 2 * (share.column + strip * kStrip) + a.shift_column
                               : share.column + strip * kStrip;
    const int top = kSpread ? 2 * share.row + a.shift_row : share.row;
    constexpr int kColumns = kSpread ? 2 * kStrip : kStrip;
    const bool whole = (V == 1 || paired) && column >= 0 && column + kColumns <= a.out.width;
    T* out = static_cast<T*>(a.out.data) + share.n * a.out.n + top * a.out.h + column * a.out.w +
             channel + own;
    const auto store = [&](float(&values)[kColumns][V]) {
      if constexpr (kTail) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          float results[kColumns];
#pragma unroll
          for (int q = 0; q < kColumns; ++q) results[q] = fmaf(values[q][v], scale[v], offset[v]);
          a.tail.activate<T>(results);
#pragma unroll
          for (int q = 0; q < kColumns; ++q) values[q][v] = results[q];
        }
      }
      if (whole) {
#pragma unroll
        for (int q = 0; q < kColumns; ++q) {
          store_values<V>(out + q * a.out.w, values[q], true, V);
        }
      } else {
#pragma unroll
        for (int q = 0; q < kColumns; ++q) {
          if (column + q >= 0 && column + q < a.out.width) {
            store_values<V>(out + q * a.out.w, values[q], false, left);
          }
        }
      }
    };
    float sum[kSpread ? 1 : kTurns][kStrip][V];  // of rows of results
#pragma unroll
    for (int i = 0; i < (kSpread ? 1 : kTurns); ++i) fill_row(sum[i], bias);
    float dy[kSpread ? kTurns : 1][kWindow][V] = {};  // rows of the gradient
    const int last = share.rows + kTurns - 1;
    for (int begin = share.first; begin < last; begin += steps) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      load(stage == 0 ? kStages - 1 : stage - 1);
      const T* row = reinterpret_cast<const T*>(shared_memory + stage * a.stage_bytes) +
                     (own / kPixel * a.pitch + strip * kStrip * kRows) * kPixel + own % kPixel;
      stage = stage == kStages - 1 ? 0 : stage + 1;
      if (!active) continue;
#pragma unroll 1
      for (int step = begin; step < min(begin + steps, last); ++step) {
        if constexpr (kSpread) move_rows(dy);
#pragma unroll
        for (int j = 0; j < kRows; ++j, row += row_size) {
          if constexpr (kSpread) {
#pragma unroll
            for (int i = 0; i < kWindow; ++i) load_values<V>(row + i * kPixel, dy[0][i]);
          } else {
            float x[kWindow][V];
#pragma unroll
            for (int i = 0; i < kWindow; ++i) load_values<V>(row + i * kPixel, x[i]);
            add_row<R, kStride>(sum, x, w, bias, j);
          }
        }
        const int done = step - (kTurns - 1);  // the row of results that is complete
        if (done < 0) continue;
        if constexpr (kSpread) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const int h = top + 2 * done + odd;
            if (static_cast<unsigned>(h) < static_cast<unsigned>(a.out.height)) {
              float dx[kColumns][V] = {};
              spread_row<R>(dx, dy, w, odd);
              store(dx);
            }
            out += a.out.h;
          }
        } else {
          store(sum[kTurns - 1]);
          out += a.out.h;
        }
      }
    }
  }
}

// The weights' gradients, from the rows of x and of dy that go through the queue together. A block
// leaves one sum for each weight of its slab.
template <typename T, int R, int kStride>
__global__ void __launch_bounds__(kMostThreads) nhwc_wgrad_kernel(const __grid_constant__ Args a) {
  constexpr int V = channels_per_thread(sizeof(T), R), kPixel = kGranule / sizeof(T);
  constexpr int kTurns = Walk<R, kStride>::kTurns, kWindow = Walk<R, kStride>::kWindow;
  wait_for_earlier_kernels();
  int unit;
  const int units = a.by_units.divisor(), strip = a.by_units.div(threadIdx.x, unit);
  const int own = unit * V, channel = blockIdx.y * a.slab;
  const bool active = strip < a.strips && channel + own < a.channels;
  const int row_size = a.pitch * a.slab, dy_row_size = a.dy_pitch * a.slab;
  const int steps = a.steps;

  Share next(a, kStride);
  int next_step = 0;
  const auto load = [&](int stage) {
    if (next.at < next.end) {
      char* const to = shared_memory + stage * a.stage_bytes;
      const int first = next_step;
      load_pixels<T>(
          a, a.in, to, a.pitch, next.n, channel, a.first_row + (next.row + first) * kStride,
          min(steps, next.rows + kTurns - 1 - first) * kStride,
          a.first_column + next.column * kStride, (a.strips - 1) * kStrip * kStride + kWindow);
      load_pixels<T>(a, a.dy, to + a.dy_offset, a.dy_pitch, next.n, channel, next.row + first,
                     min(steps, next.rows - first), next.column, a.strips * kStrip);
      next_step += steps;
      if (next_step >= next.rows + kTurns - 1) {
        next.advance(a, kStride);
        next_step = 0;
      }
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) load(stage);
  float sum[R * R][V] = {};
  int stage = 0;
  for (Share share(a, kStride); share.at < share.end; share.advance(a, kStride)) {
    const int first_row = a.first_row + share.row * kStride;
    const int valid = a.columns - share.column - strip * kStrip;
    float dy[kTurns][kStrip][V] = {};
    const int last = share.rows + kTurns - 1;
    for (int begin = 0; begin < last; begin += steps) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      load(stage == 0 ? kStages - 1 : stage - 1);
      const char* const from = shared_memory + stage * a.stage_bytes;
      const int granule = own / kPixel, within = own % kPixel;
      const T* row = reinterpret_cast<const T*>(from) +
                     (granule * a.pitch + strip * kStrip * kStride) * kPixel + within;
      const T* gradient = reinterpret_cast<const T*>(from + a.dy_offset) +
                          (granule * a.dy_pitch + strip * kStrip) * kPixel + within;
      stage = stage == kStages - 1 ? 0 : stage + 1;
      if (!active) continue;
#pragma unroll 1
      for (int step = begin; step < min(begin + steps, last); ++step, gradient += dy_row_size) {
        move_rows(dy);
        if (step < share.rows) {
#pragma unroll
          for (int q = 0; q < kStrip; ++q) load_values<V>(gradient + q * kPixel, dy[0][q]);
        }
#pragma unroll
        for (int j = 0; j < kStride; ++j, row += row_size) {
          const int h = first_row + step * kStride + j;
          if (static_cast<unsigned>(h) >= static_cast<unsigned>(a.in.height)) continue;
          float x[kWindow][V];
#pragma unroll
          for (int i = 0; i < kWindow; ++i) load_values<V>(row + i * kPixel, x[i]);
          add_products<R, kStride>(sum, x, dy, j, step, share.rows, valid);
        }
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();
  float* const shared = reinterpret_cast<float*>(shared_memory);
  float flat[R * R * V];
#pragma unroll
  for (int i = 0; i < R * R * V; ++i) flat[i] = sum[i / V][i % V];
  sum_slices(flat, shared, unit, units, strip, a.strips);
  if (!active || strip > 0) return;
  float* const to = a.partial + int64_t{blockIdx.x} * (R * R) * a.channels + channel + own;
#pragma unroll
  for (int i = 0; i < R * R * V; ++i) {
    if (channel + own + i % V < a.channels) to[int64_t{i / V} * a.channels + i % V] = flat[i];
  }
}

template <typename T, int R, int kStride>
Function nhwc_function_of(const Kernel& k) {
  constexpr int kWindow = Walk<R, kStride>::kWindow;
  if (k.task == Task::kWeights) return nhwc_wgrad_kernel<T, R, kStride>;
  if (kStride == 2 && k.task == Task::kSpread) {
    return nhwc_kernel<T, R, 2, true, Spread<R>::kWindow>;
  }
  if (k.tail) return nhwc_kernel<T, R, kStride, false, kWindow, true>;
  return nhwc_kernel<T, R, kStride, false, kWindow>;
}

template <typename T>
Function nhwc_function(const Kernel& k) {
  if (k.taps == 3) {
    return k.stride == 1 ? nhwc_function_of<T, 3, 1>(k) : nhwc_function_of<T, 3, 2>(k);
  }
  if (k.taps == 5) {
    return k.stride == 1 ? nhwc_function_of<T, 5, 1>(k) : nhwc_function_of<T, 5, 2>(k);
  }
  return k.stride == 1 ? nhwc_function_of<T, 7, 1>(k) : nhwc_function_of<T, 7, 2>(k);
}

}  // namespace
}  // namespace braze::cuda::depthwise
