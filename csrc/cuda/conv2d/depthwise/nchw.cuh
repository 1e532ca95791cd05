// Depthwise convolution, contiguous. A tile is several whole planes, or some rows of a plane: a
// contiguous piece of memory either way, which is copied to shared memory as it is, 16 bytes at a
// time wherever it begins, while the tile before it is computed. Padding is not stored: threads
// know which of their columns and rows exist. Results are put together in shared memory too, so
// that they leave in vectors.
#pragma once

#include "args.h"
#include "strip.cuh"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/launch.cuh"

namespace braze::cuda::depthwise {
namespace {

extern __shared__ __align__(16) char shared_memory[];

template <typename T>
__device__ __forceinline__ int misalignment(const T* p) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16);
}

// Behind the last element of a contiguous tensor.
template <typename T>
__device__ __forceinline__ const char* end_of(const Image& t, const Args& a) {
  const int64_t elements = (a.batch - 1) * t.n + int64_t{a.channels} * t.height * t.width;
  return static_cast<const char*>(t.data) + elements * static_cast<int>(sizeof(T));
}

// Copies `count` elements to `to` + misalignment(from), from where planes are `pad` bytes further
// apart than in memory; pad is 0 unless planes are whole vectors. Reads whole vectors, but none
// that reaches beyond `end`.
template <typename T>
__device__ __forceinline__ void load_piece(char* to, const T* from, int count, int pad,
                                           const FastDiv& by_plane, const char* end) {
  const int shift = misalignment(from), bytes = shift + count * static_cast<int>(sizeof(T));
  const char* const piece = reinterpret_cast<const char*>(from) - shift;
  for (int i = threadIdx.x; 16 * i < bytes; i += blockDim.x) {
    char* const target = to + 16 * i + (pad ? by_plane.div(i) * pad : 0);
    const char* const source = piece + 16 * i;
    if (end - source >= 16) {
      cp_async<16>(target, source, true);
    } else {
      for (int b = max(0, shift - 16 * i); b < bytes - 16 * i; b += sizeof(T)) {
        *reinterpret_cast<T*>(target + b) = *reinterpret_cast<const T*>(source + b);
      }
    }
  }
}

// The way back, from `from` + misalignment(to).
template <typename T>
__device__ __forceinline__ void store_piece(T* to, const char* from, int count, int pad,
                                            const FastDiv& by_plane) {
  const int shift = misalignment(to), bytes = shift + count * static_cast<int>(sizeof(T));
  char* const target = reinterpret_cast<char*>(to) - shift;
  for (int i = threadIdx.x; 16 * i < bytes; i += blockDim.x) {
    const char* const source = from + 16 * i + (pad ? by_plane.div(i) * pad : 0);
    if (16 * i >= shift && 16 * i + 16 <= bytes) {
      *reinterpret_cast<uint4*>(target + 16 * i) = *reinterpret_cast<const uint4*>(source);
    } else {
      for (int b = max(0, shift - 16 * i); b < min(16, bytes - 16 * i); b += sizeof(T)) {
        *reinterpret_cast<T*>(target + 16 * i + b) = *reinterpret_cast<const T*>(source + b);
      }
    }
  }
}

// A row's columns from `column` on, zeros for those outside of the image; at most R of them are
// left of it.
template <int R, int kCount, typename T>
__device__ __forceinline__ void load_columns(const T* row, int column, int width,
                                             float (&x)[kCount][1]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool inside = i < width - column && (i >= R || i >= -column);
    x[i][0] = inside ? convert<float>(row[column + i]) : 0.f;
  }
}

// What a thread works on.
struct Place {
  int strip, group, plane;
  bool active;
};

__device__ __forceinline__ Place place_of(const Args& a, int planes) {
  const int rest = threadIdx.x / a.strips, plane = rest / a.groups;
  return {static_cast<int>(threadIdx.x) - rest * a.strips, rest - plane * a.groups, plane,
          plane < planes};
}

// The rows of a tensor that a tile reads or writes.
struct Rows {
  int begin, end;
};
__device__ __forceinline__ Rows clip(int begin, int end, int height) {
  return {max(0, begin), min(height, end)};
}

template <typename T, int R>
__device__ __forceinline__ void load_weights(const Args& a, int channel, float (&w)[R * R][1]) {
  const T* const from = static_cast<const T*>(a.w) + int64_t{channel} * (R * R);
#pragma unroll
  for (int i = 0; i < R * R; ++i) {
    w[i][0] = convert<float>(from[a.turned ? R * R - 1 - i : i]);
  }
}

template <typename T, int R, int kStride, bool kSpread, int kWindow>
__global__ void __launch_bounds__(kMostThreads) nchw_kernel(const __grid_constant__ Args a) {
  constexpr int kRows = kSpread ? 1 : kStride;
  constexpr int kTurns = kSpread ? Spread<R>::kTurns : Walk<R, kStride>::kTurns;
  constexpr int kReach = kSpread ? kTurns : R;  // rows that a row of results reads
  wait_for_earlier_kernels();
  const int channel = blockIdx.y * a.slab, planes = min(a.slab, a.channels - channel);
  const Place at = place_of(a, planes);
  const int in_pitch = a.in.height * a.in.width + a.plane_pad / static_cast<int>(sizeof(T));
  const int out_pitch = a.out.height * a.out.width + a.dy_pad / static_cast<int>(sizeof(T));
  char* const results = shared_memory + a.dy_offset;

  // planes == 1 where a tile has not all rows
  const auto input_rows = [&](int row, int rows) {
    const int begin = a.first_row + row * kRows;
    return a.row_tiles == 1 ? Rows{0, a.in.height}
                            : clip(begin, begin + (rows - 1) * kRows + kReach, a.in.height);
  };
  const auto piece = [&](int item, int& row, int& rows, Rows& input) {
    const int64_t n = item / a.row_tiles;
    row = (item - static_cast<int>(n) * a.row_tiles) * a.tile_rows;
    rows = min(a.tile_rows, a.rows - row);
    input = input_rows(row, rows);
    return static_cast<const T*>(a.in.data) + n * a.in.n + channel * a.in.c +
           int64_t{input.begin} * a.in.width;
  };
  const auto load = [&](int item, int stage) {
    if (item < a.items) {
      int row, rows;
      Rows input;
      const T* const from = piece(item, row, rows, input);
      load_piece(shared_memory + stage * a.stage_bytes, from,
                 max(0, planes * (input.end - input.begin) * a.in.width), a.plane_pad, a.by_vectors,
                 end_of<T>(a.in, a));
    }
    cp_async_commit();
  };
  load(blockIdx.x, 0);
  float w[R * R][1], bias[1] = {};
  load_weights<T, R>(a, channel + (at.active ? at.plane : 0), w);
  if (a.bias && at.active)
    bias[0] = convert<float>(static_cast<const T*>(a.bias)[channel + at.plane]);

  int stage = 0;
  for (int item = blockIdx.x; item < a.items; item += gridDim.x, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    load(item + gridDim.x, stage ^ 1);
    int tile_row, tile_rows;
    Rows input;
    const int shift = misalignment(piece(item, tile_row, tile_rows, input));
    const Rows output = kSpread ? clip(2 * tile_row + a.shift_row,
                                       2 * (tile_row + tile_rows) + a.shift_row, a.out.height)
                                : Rows{tile_row, tile_row + tile_rows};
    T* const target = static_cast<T*>(a.out.data) + item / a.row_tiles * a.out.n +
                      channel * a.out.c + int64_t{output.begin} * a.out.width;
    if (at.active) {
      const T* const image =
          reinterpret_cast<const T*>(shared_memory + stage * a.stage_bytes + shift) +
          at.plane * in_pitch;
      T* const out = reinterpret_cast<T*>(results + misalignment(target)) + at.plane * out_pitch;
      const int first = tile_row + at.group * a.group_rows;  // row of results
      const int end = min(first + a.group_rows, tile_row + tile_rows);
      const int column = a.first_column + at.strip * kStrip * kRows;
      float sum[kSpread ? 1 : kTurns][kStrip][1];
#pragma unroll
      for (int i = 0; i < (kSpread ? 1 : kTurns); ++i) fill_row(sum[i], bias);
      float dy[kSpread ? kTurns : 1][kWindow][1] = {};
      // The first steps of a tile at the top read nothing but padding.
      const int padding = max(0, -(a.first_row + tile_row * kRows)) / kRows;
#pragma unroll 1
      for (int step = a.groups == 1 ? padding : 0; step < a.group_rows + kTurns - 1; ++step) {
        if constexpr (kSpread) move_rows(dy);
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          const int h = a.first_row + (first + step) * kRows + j;
          // No column of a row of padding exists.
          const int width = h >= input.begin && h < input.end ? a.in.width : column;
          const T* const row = image + (h - input.begin) * a.in.width;
          if constexpr (kSpread) {
            load_columns<R>(row, column, width, dy[0]);
          } else {
            float x[kWindow][1];
            load_columns<R>(row, column, width, x);
            add_row<R, kStride>(sum, x, w, bias, j);
          }
        }
        const int done = first + step - (kTurns - 1);
        if (done < first || done >= end) continue;
        if constexpr (kSpread) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const int h = 2 * done + odd + a.shift_row;
            if (h < output.begin || h >= output.end) continue;
            float dx[2 * kStrip][1] = {};
            spread_row<R>(dx, dy, w, odd);
            const int c = 2 * at.strip * kStrip + a.shift_column;
            T* const to = out + (h - output.begin) * a.out.width + c;
#pragma unroll
            for (int q = 0; q < 2 * kStrip; ++q) {
              if (static_cast<unsigned>(c + q) < static_cast<unsigned>(a.out.width)) {
                to[q] = convert<T>(dx[q][0]);
              }
            }
          }
        } else {
          T* const to = out + (done - tile_row) * a.out.width + at.strip * kStrip;
#pragma unroll
          for (int q = 0; q < kStrip; ++q) {
            if (at.strip * kStrip + q < a.columns) to[q] = convert<T>(sum[kTurns - 1][q][0]);
          }
        }
      }
    }
    __syncthreads();
    store_piece(target, results, planes * (output.end - output.begin) * a.out.width, a.dy_pad,
                a.by_dy_vectors);
  }
}

template <typename T, int R, int kStride>
__global__ void __launch_bounds__(kMostThreads) nchw_wgrad_kernel(const __grid_constant__ Args a) {
  constexpr int kTurns = Walk<R, kStride>::kTurns, kWindow = Walk<R, kStride>::kWindow;
  wait_for_earlier_kernels();
  const int channel = blockIdx.y * a.slab, planes = min(a.slab, a.channels - channel);
  const Place at = place_of(a, planes);
  const int x_pitch = a.in.height * a.in.width + a.plane_pad / static_cast<int>(sizeof(T));
  const int dy_pitch = a.dy.height * a.dy.width + a.dy_pad / static_cast<int>(sizeof(T));

  struct Piece {
    const T *x, *dy;
    int row, rows;
    Rows input;
  };
  const auto piece_of = [&](int item) {
    Piece p;
    const int64_t n = item / a.row_tiles;
    p.row = (item - static_cast<int>(n) * a.row_tiles) * a.tile_rows;
    p.rows = min(a.tile_rows, a.rows - p.row);
    const int begin = a.first_row + p.row * kStride;
    p.input = a.row_tiles == 1 ? Rows{0, a.in.height}
                               : clip(begin, begin + (p.rows - 1) * kStride + R, a.in.height);
    p.x = static_cast<const T*>(a.in.data) + n * a.in.n + channel * a.in.c +
          int64_t{p.input.begin} * a.in.width;
    p.dy = static_cast<const T*>(a.dy.data) + n * a.dy.n + channel * a.dy.c +
           int64_t{p.row} * a.dy.width;
    return p;
  };
  const auto load = [&](int item, int stage) {
    if (item < a.items) {
      const Piece p = piece_of(item);
      char* const to = shared_memory + stage * a.stage_bytes;
      load_piece(to, p.x, max(0, planes * (p.input.end - p.input.begin) * a.in.width), a.plane_pad,
                 a.by_vectors, end_of<T>(a.in, a));
      load_piece(to + a.dy_offset, p.dy, planes * p.rows * a.dy.width, a.dy_pad, a.by_dy_vectors,
                 end_of<T>(a.dy, a));
    }
    cp_async_commit();
  };
  load(blockIdx.x, 0);
  float sum[R * R][1] = {};
  int stage = 0;
  for (int item = blockIdx.x; item < a.items; item += gridDim.x, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    load(item + gridDim.x, stage ^ 1);
    if (!at.active) continue;
    const Piece p = piece_of(item);
    const char* const from = shared_memory + stage * a.stage_bytes;
    const T* const image =
        reinterpret_cast<const T*>(from + misalignment(p.x)) + at.plane * x_pitch;
    const T* const gradients = reinterpret_cast<const T*>(from + a.dy_offset + misalignment(p.dy)) +
                               at.plane * dy_pitch + at.strip * kStrip;
    const int first = p.row + at.group * a.group_rows;
    const int rows = min(a.group_rows, p.row + p.rows - first),
              valid = a.columns - at.strip * kStrip;
    const int column = a.first_column + at.strip * kStrip * kStride;
    float dy[kTurns][kStrip][1] = {};
#pragma unroll 1
    for (int step = 0; step < a.group_rows + kTurns - 1; ++step) {
      move_rows(dy);
      if (step < rows) {
        load_columns<0>(gradients + (first - p.row + step) * a.dy.width, 0, valid, dy[0]);
      }
#pragma unroll
      for (int j = 0; j < kStride; ++j) {
        const int h = a.first_row + (first + step) * kStride + j;
        if (h < p.input.begin || h >= p.input.end) continue;
        float x[kWindow][1];
        load_columns<R>(image + (h - p.input.begin) * a.in.width, column, a.in.width, x);
        add_products<R, kStride>(sum, x, dy, j, step, rows, valid);
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();
  float flat[R * R];
#pragma unroll
  for (int i = 0; i < R * R; ++i) flat[i] = sum[i][0];
  const int slices = a.strips * a.groups;
  sum_slices(flat, reinterpret_cast<float*>(shared_memory), min(at.plane, a.slab - 1), a.slab,
             at.active ? at.group * a.strips + at.strip : slices, slices);
  if (!at.active || at.group > 0 || at.strip > 0) return;
  float* const to = a.partial + int64_t{blockIdx.x} * (R * R) * a.channels + channel + at.plane;
#pragma unroll
  for (int i = 0; i < R * R; ++i) to[int64_t{i} * a.channels] = flat[i];
}

template <typename T, int R, int kStride>
Function nchw_function(Task task) {
  if (task == Task::kWeights) return nchw_wgrad_kernel<T, R, kStride>;
  if (kStride == 2 && task == Task::kSpread) {
    return nchw_kernel<T, R, 2, true, Spread<R>::kWindow>;
  }
  return nchw_kernel<T, R, kStride, false, Walk<R, kStride>::kWindow>;
}

template <typename T>
Function nchw_function(const Kernel& k) {
  if (k.taps == 3) {
    return k.stride == 1 ? nchw_function<T, 3, 1>(k.task) : nchw_function<T, 3, 2>(k.task);
  }
  if (k.taps == 5) {
    return k.stride == 1 ? nchw_function<T, 5, 1>(k.task) : nchw_function<T, 5, 2>(k.task);
  }
  return k.stride == 1 ? nchw_function<T, 7, 1>(k.task) : nchw_function<T, 7, 2>(k.task);
}

}  // namespace
}  // namespace braze::cuda::depthwise
