// Backward of conv_bn_relu2d.h: partial sums of g and of g * (z - mean) at the windows' maxima, and
// one pass that begins by merging them in float64, which gives the parameters' gradients and what
// dz is made with, and then makes dz.
#include "bn_pool.cuh"
#include "bn_pool_sums.h"
#include "cuda/batch_norm/planes.cuh"
#include "pixels.cuh"

namespace braze::cuda {
namespace {

constexpr int kUnroll = 2;  // vectors of a plane that a thread has in flight, of each tensor

// Threads of the kernels over pixels: as many as a multiprocessor has registers for, or, where
// small blocks take all there is in one round, so many.
constexpr int kSumThreads = kRowThreads, kSpreadThreads = 512, kFewPixelsThreads = 256;
constexpr int kMergeLanes = 8;  // that merge a channel's partial sums

// How pixels are shared out. rows.rows: pixels.
struct PixelPlan {
  RowShape rows;
  int threads, tiles;

  dim3 grid() const {
    return dim3(static_cast<unsigned>(rows.splits), static_cast<unsigned>(tiles));
  }
};

// most_threads: of a block where there is much to do. Then its tile is wide, for the memory's sake;
// where there is little, 64 bytes, since a block merges the partial sums of its tile.
template <typename T, int N>
PixelPlan plan_pixels(int64_t pixels, int64_t c, int most_threads) {
  const int64_t vectors = c / N, sms = sm_count();
  const auto plan = [&](int threads, int tile, int64_t most_blocks) {
    const int64_t tiles = ceil_div(vectors, tile);
    const int64_t rounds = ceil_div(pixels, threads / row_pitch(vectors, tile));
    // No more than the workspace has room for.
    const int64_t most = std::min(sms, std::max<int64_t>(1, most_blocks / tiles));
    const int64_t splits = std::min(rounds, most);
    return std::pair(
        PixelPlan{{pixels, c, static_cast<int>(splits), tile}, threads, static_cast<int>(tiles)},
        splits == rounds);
  };
  const auto [few, fits] = plan(kFewPixelsThreads, 64 / (N * sizeof(T)), 2 * sms);
  return fits ? few : plan(most_threads, kRowTile, sms).first;
}

// A block per part of a channel, as in plane_grad_sums_kernel.
template <typename T, int V, bool kVector>
__global__ void __launch_bounds__(kPlaneThreads)
    pooled_plane_sums_kernel(const T* dy, const T* z, const uint32_t* codes, const acc_t<T>* mean,
                             int64_t steps, int splits, BnPoolSplit split, BnPoolGeometry geometry,
                             GradPartial<acc_t<T>>* __restrict__ partials) {
  wait_for_earlier_kernels();
  using A = acc_t<T>;
  __shared__ A shared[kPlaneThreads / 32];
  const A center = mean[blockIdx.x];
  const int64_t end = split_begin(steps, blockIdx.y + 1, splits);
  int64_t at = split_begin(steps, blockIdx.y, splits) + threadIdx.x;
  A sum = 0, dot = 0;
  for (; at < end; at += kPlaneThreads * kUnroll) {
    Vec<T, V> g[kUnroll];
    Vec<T, 2 * V> top[kUnroll], bottom[kUnroll];
    uint32_t bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t step = at + u * kPlaneThreads;
      if (step >= end) break;
      int64_t image;
      int row, column, group;
      split(step, &image, &row, &column, &group);
      const int64_t plane = image * geometry.c + blockIdx.x;
      const int64_t pooled = geometry.pooled(plane, row, V * column);
      const T* corner = z + geometry.input(plane, 2 * row, 2 * V * column);
      g[u] = load_vec<V>(dy + pooled);
      bits[u] = load_codes<V>(codes, pooled);
      top[u] = load_pairs<V, kVector>(corner, true);
      bottom[u] = load_pairs<V, kVector>(corner + geometry.w, true);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kPlaneThreads >= end) break;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const uint32_t code = bits[u] >> (4 * v) & 7;
        if (code == kStopped) continue;
        const A grad = convert<A>(g[u].v[v]);
        sum += grad;
        dot += grad * (convert<A>(coded(code, top[u].v[2 * v], top[u].v[2 * v + 1],
                                        bottom[u].v[2 * v], bottom[u].v[2 * v + 1])) -
                       center);
      }
    }
  }
  sum = plane_block_sum(sum, shared);
  dot = plane_block_sum(dot, shared);
  if (threadIdx.x == 0) partials[int64_t{blockIdx.x} * splits + blockIdx.y] = {sum, dot};
}

// The pooled gradient where it is in NCHW order, of a block's channels and of one chunk of pixels
// after the other, on its way through shared memory: lanes beside each other read pixels beside
// each other there. (A lane with eight channels of a pixel reads eight lines.)
template <typename T, int N>
class TurnedChunks {
 public:
  // A place for each of the block's vectors, and one for each channel.
  static constexpr int kElements = (kSumThreads + kRowTile) * N;

  __device__ TurnedChunks(const T* dy, T* shared, const RowPlace<N>& place,
                          const BnPoolSplit& split, const BnPoolGeometry& geometry)
      : dy_(dy),
        shared_(shared),
        place_(place),
        split_(split),
        geometry_(geometry),
        pitch_(place.height | 1),
        runs_((place.height + 31) / 32),
        warps_(blockDim.x / 32) {}

  // Starts the loads of the chunk from pixel `first` on.
  __device__ __forceinline__ void load(int64_t first) {
    first_ = first;
    load(0, values_);
  }
  // The chunk, to shared memory.
  __device__ __forceinline__ void store() const {
    store(0, values_);
    // There are more tasks than warps where lines are no whole number of warps long.
    for (int t = 1; t * warps_ < runs_ * place_.width; ++t) {
      T values[N];
      load(t, values);
      store(t, values);
    }
  }
  // The vector of a thread's column of pixel `pixel` of the chunk.
  __device__ __forceinline__ Vec<T, N> at(int pixel) const {
    Vec<T, N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.v[k] = shared_[(place_.column * N + k) * pitch_ + pixel];
    return v;
  }

 private:
  // 32 pixels of a vector are a warp's task. Its task t: this lane's pixel; false without one.
  __device__ __forceinline__ bool locate(int t, int* vector, int* pixel) const {
    const int task = threadIdx.x / 32 + t * warps_;
    *vector = task / runs_;
    *pixel = (task - *vector * runs_) * 32 + threadIdx.x % 32;
    return *vector < place_.width && *pixel < place_.height;
  }
  __device__ __forceinline__ void load(int t, T (&values)[N]) const {
    int vector, pixel;
    if (!locate(t, &vector, &pixel) || first_ + pixel >= place_.end) return;
    int64_t image;
    int row, column, group;
    split_(first_ + pixel, &image, &row, &column, &group);
    const T* const from =
        dy_ + geometry_.turned_offset(image, row, column, place_.tile_begin + vector * N);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = from[k * geometry_.p * geometry_.q];
  }
  __device__ __forceinline__ void store(int t, const T (&values)[N]) const {
    int vector, pixel;
    if (!locate(t, &vector, &pixel)) return;
    T* const to = shared_ + vector * N * pitch_ + pixel;
#pragma unroll
    for (int k = 0; k < N; ++k) to[k * pitch_] = values[k];
  }

  const T* const dy_;
  T* const shared_;
  const RowPlace<N>& place_;
  const BnPoolSplit& split_;
  const BnPoolGeometry& geometry_;
  const int pitch_;  // pixels; odd, so that vectors beside each other are in other banks
  const int runs_, warps_;
  int64_t first_ = 0;
  T values_[N];
};

// A block per part of the pooled pixels and tile of channels, as in row_grad_sums_kernel. kMaxima:
// z are its values at the windows' maxima; kTurned: dy is in NCHW order.
template <typename T, int N, bool kMaxima, bool kTurned>
__global__ void __launch_bounds__(kSumThreads)
    pooled_row_sums_kernel(const T* dy, const T* z, const uint32_t* codes, const acc_t<T>* mean,
                           RowShape shape, BnPoolSplit split, BnPoolGeometry geometry,
                           GradPartial<acc_t<T>>* __restrict__ partials) {
  using A = acc_t<T>;
  // Pixels whose loads are in flight together. (What is turned goes through shared memory, a chunk
  // of one pixel for each thread at a time.)
  constexpr int kAtOnce = kMaxima && !kTurned ? 2 : 1;
  constexpr bool kAhead = kMaxima && kTurned;  // while a chunk is waited for, the next one's loads
  using Turned = TurnedChunks<T, N>;
  __shared__ union {
    RowSums<A, N> sums;
    T turned[kTurned ? Turned::kElements : 1];
  } shared;
  const RowPlace<N> place(shape);
  const int64_t channel = place.channel();
  const int64_t right = geometry.depth, down = geometry.w * geometry.depth;
  [[maybe_unused]] Turned turned(dy, shared.turned, place, split, geometry);
  order_earlier_kernels();  // as in batch_norm.cu: so that the next one's blocks spread
  A center[N] = {}, sum[N] = {}, dot[N] = {};
  if (place.works()) {
#pragma unroll
    for (int k = 0; k < N; ++k) center[k] = mean[channel + k];
  }
  struct Loaded {
    Packed<T, N> g, window[kMaxima ? 1 : 4];
    uint32_t bits;
  };
  const auto load = [&](int64_t at, Loaded& to) {
    to.bits = kAllStopped;
    if (!place.works() || at >= place.end) return;
    const int64_t pooled = at * shape.c + channel;
    to.bits = load_codes<N>(codes, pooled);
    if constexpr (!kTurned) to.g.load(dy + pooled);
    if constexpr (kMaxima) {
      to.window[0].load(z + pooled);
    } else {
      int64_t image;
      int row, column, group;
      split(at, &image, &row, &column, &group);
      const T* corner = z + geometry.input(image, 2 * row, 2 * column) + channel;
      to.window[0].load(corner);
      to.window[1].load(corner + right);
      to.window[2].load(corner + down);
      to.window[3].load(corner + down + right);
    }
  };
  const int step = kAtOnce * place.height;
  [[maybe_unused]] Loaded ahead;
  if constexpr (kTurned) turned.load(place.begin);
  if constexpr (kAhead) load(place.begin + place.line, ahead);
  for (int64_t first = place.begin; first < place.end; first += step) {
    Loaded loaded[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if constexpr (kAhead) {
        loaded[u] = ahead;
      } else {
        load(first + place.line + u * place.height, loaded[u]);
      }
    }
    if constexpr (kTurned) {
      turned.store();
      __syncthreads();
      turned.load(first + step);
    }
    if constexpr (kAhead) load(first + step + place.line, ahead);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      Vec<T, N> grads;
      if constexpr (kTurned) {
        grads = turned.at(place.line + u * place.height);
      } else {
        grads = loaded[u].g.unpacked();
      }
      Vec<T, N> values[kMaxima ? 1 : 4];
#pragma unroll
      for (int i = 0; i < (kMaxima ? 1 : 4); ++i) values[i] = loaded[u].window[i].unpacked();
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const uint32_t code = loaded[u].bits >> (4 * k) & 7;
        if (code == kStopped) continue;
        T value = values[0].v[k];
        if constexpr (!kMaxima) {
          value = coded(code, values[0].v[k], values[1].v[k], values[2].v[k], values[3].v[k]);
        }
        const A grad = convert<A>(grads.v[k]);
        sum[k] += grad;
        dot[k] += grad * (convert<A>(value) - center[k]);
      }
    }
    if constexpr (kTurned) __syncthreads();  // the chunk has been read
  }
  row_block_sum(sum, shared.sums, place);
  row_block_sum(dot, shared.sums, place);
  if (place.line == 0 && place.works()) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      partials[(channel + k) * shape.splits + blockIdx.x] = {sum[k], dot[k]};
    }
  }
}

// A block per part of a channel, as in plane_input_grad_kernel. Steps go over all tiles, those that
// are cut off included: no window covers them, so that they have no gradient of their own.
template <typename T, int V, bool kVector, bool kTraining>
__global__ void __launch_bounds__(kPlaneThreads)
    spread_planes_kernel(const T* dy, const T* z, const uint32_t* codes, T* __restrict__ dz,
                         int64_t steps, BnPoolSplit split, BnPoolGeometry geometry, int64_t count,
                         const GradPartial<acc_t<T>>* partials, int partial_splits,
                         BackwardArgs args) {
  wait_for_earlier_kernels();
  using A = acc_t<T>;
  __shared__ BackwardCoefficients<A> shared;
  if (threadIdx.x < 32) {
    const BackwardCoefficients<A> result =
        merge_grads<A>(args, partials, partial_splits, count, blockIdx.x, blockIdx.y == 0);
    if (threadIdx.x == 0) shared = result;
  }
  __syncthreads();
  if (!dz) return;
  const BackwardCoefficients<A> k = shared;
  const int64_t end = split_begin(steps, blockIdx.y + 1, gridDim.y);
  int64_t at = split_begin(steps, blockIdx.y, gridDim.y) + threadIdx.x;
  for (; at < end; at += kPlaneThreads * kUnroll) {
    int64_t corner[kUnroll];
    bool right[kUnroll], below[kUnroll];
    Vec<T, V> g[kUnroll];
    uint32_t bits[kUnroll];
    Vec<T, 2 * V> top[kUnroll], bottom[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t step = at + u * kPlaneThreads;
      if (step >= end) break;
      int64_t image;
      int row, column, group;
      split(step, &image, &row, &column, &group);
      const int64_t plane = image * geometry.c + blockIdx.x;
      corner[u] = geometry.input(plane, 2 * row, 2 * V * column);
      right[u] = kVector || column < geometry.q;
      below[u] = row < geometry.p;
      bits[u] = kAllStopped;
      if (right[u] && below[u]) {
        const int64_t pooled = geometry.pooled(plane, row, V * column);
        g[u] = load_vec<V>(dy + pooled);
        bits[u] = load_codes<V>(codes, pooled);
      }
      if constexpr (kTraining) {
        top[u] = load_pairs<V, kVector>(z + corner[u], right[u]);
        if (below[u]) bottom[u] = load_pairs<V, kVector>(z + corner[u] + geometry.w, right[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kPlaneThreads >= end) break;
      const auto grad = [&](int v, int position, T value) {
        A result = 0;
        if ((bits[u] >> (4 * v) & 7) == position) result = convert<A>(g[u].v[v]) * k.by_grad;
        if constexpr (kTraining) result += (convert<A>(value) - k.center) * k.by_input + k.offset;
        return convert<T>(result);
      };
      Vec<T, 2 * V> upper, lower;
#pragma unroll
      for (int i = 0; i < 2 * V; ++i) {
        upper.v[i] = grad(i / 2, i % 2, top[u].v[i]);
        lower.v[i] = grad(i / 2, 2 + i % 2, bottom[u].v[i]);
      }
      store_pairs<V, kVector>(dz + corner[u], right[u], upper);
      if (below[u]) store_pairs<V, kVector>(dz + corner[u] + geometry.w, right[u], lower);
    }
  }
}

// A block per part of the 2x2 tiles of pixels, cut-off ones included, and tile of channels, as in
// row_input_grad_kernel.
template <typename T, int N, bool kTraining>
__global__ void __launch_bounds__(kSpreadThreads)
    spread_pixels_kernel(const T* dy, const T* z, const uint32_t* codes, T* __restrict__ dz,
                         RowShape shape, BnPoolSplit split, BnPoolGeometry geometry, int64_t count,
                         const GradPartial<acc_t<T>>* partials, int partial_splits,
                         BackwardArgs args) {
  using A = acc_t<T>;
  constexpr bool kFolded = sizeof(T) == 2;
  __shared__ BackwardCoefficients<A> shared[kRowTile * N];
  const RowPlace<N> place(shape);
  int64_t tile = place.works() && dz ? place.begin + place.line : place.end;
  wait_for_earlier_kernels();

  const auto position = [&](int i) { return (i / 2 * geometry.w + i % 2) * geometry.depth; };
  struct Window {
    int64_t corner;
    bool right, below;  // whether those positions exist
    uint32_t bits;
    Vec<T, N> g, z[4];

    __device__ bool inside(int i) const { return (i % 2 == 0 || right) && (i / 2 == 0 || below); }
  };
  const auto load = [&](int64_t at) {
    Window window;
    int64_t image;
    int row, column, group;
    split(at, &image, &row, &column, &group);
    window.corner = geometry.input(image, 2 * row, 2 * column) + place.channel();
    window.right = column < geometry.q;
    window.below = row < geometry.p;
    window.bits = kAllStopped;
    if (window.inside(3)) {
      const int64_t pooled = geometry.pooled(image, row, column) + place.channel();
      window.g = geometry.template load_pooled<N>(dy, image, row, column, place.channel());
      window.bits = load_codes<N>(codes, pooled);
    }
    if constexpr (kTraining) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (window.inside(i)) window.z[i] = load_vec<N>(z + window.corner + position(i));
      }
    }
    return window;
  };
  Window next;
  if (tile < place.end) next = load(tile);  // in flight during the merge

  tile_coefficients<kMergeLanes>(shared, place, [&](int64_t c) {
    return merge_grads<A, kMergeLanes>(args, partials, partial_splits, count, c, blockIdx.x == 0);
  });
  if (tile >= place.end) return;
  BackwardCoefficients<A> k[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    k[j] = shared[place.column * N + j];
    // Without a center of their own eight channels fit the registers. What cancels then is less
    // than 16-bit values lose.
    if constexpr (kFolded) k[j].offset -= k[j].center * k[j].by_input;
  }
  while (tile < place.end) {
    Window now = next;
    tile += place.height;
    if (tile < place.end) next = load(tile);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const uint32_t code = now.bits >> (4 * j) & 7;
      const A through = code == kStopped ? A(0) : convert<A>(now.g.v[j]) * k[j].by_grad;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        A grad = code == i ? through : A(0);
        if constexpr (kTraining) {
          const A value = convert<A>(now.z[i].v[j]);
          grad += (kFolded ? value : value - k[j].center) * k[j].by_input + k[j].offset;
        }
        now.z[i].v[j] = convert<T>(grad);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (now.inside(i)) store_vec(dz + now.corner + position(i), now.z[i]);
    }
  }
}

// Returns how many partial results each channel has.
template <typename T>
int launch_sums(cudaStream_t s, const BnPoolShape& shape, const T* dy, const T* z,
                const uint32_t* codes, const acc_t<T>* mean, GradPartial<acc_t<T>>* partials) {
  const BnPoolGeometry geometry(shape);
  int splits = 0;
  if (shape.channels_last) {
    with_channels<T>(shape, {dy, z}, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const PixelPlan plan =
          plan_pixels<T, N>(shape.n * shape.p() * shape.q(), shape.c, kSumThreads);
      splits = plan.rows.splits;
      const T* const maxima = reinterpret_cast<const T*>(codes + bn_pool_maxima_word(shape));
      const auto kernel = shape.turned
                              ? (shape.keeps_maxima ? pooled_row_sums_kernel<T, N, true, true>
                                                    : pooled_row_sums_kernel<T, N, false, true>)
                              : (shape.keeps_maxima ? pooled_row_sums_kernel<T, N, true, false>
                                                    : pooled_row_sums_kernel<T, N, false, false>);
      launch_early(kernel, plan.grid(), plan.threads, 0, s, dy, shape.keeps_maxima ? maxima : z,
                   codes, mean, plan.rows, BnPoolSplit(1, shape.q(), shape.p()), geometry,
                   partials);
    });
  } else {
    with_windows<T>(shape, {z}, {dy}, [&](auto windows, auto vector) {
      constexpr int V = decltype(windows)::value;
      const int64_t steps = shape.n * shape.p() * (shape.q() / V);
      splits = plane_splits(steps, shape.c);
      const dim3 grid(static_cast<unsigned int>(shape.c), splits);
      launch_early(pooled_plane_sums_kernel<T, V, decltype(vector)::value>, grid, kPlaneThreads, 0,
                   s, dy, z, codes, mean, steps, splits, BnPoolSplit(1, shape.q() / V, shape.p()),
                   geometry, partials);
    });
  }
  check_launch("bn_relu2d_backward");
  return splits;
}

// Without dz only the parameters' gradients are made, by one block per channel or tile of them.
template <typename T, bool kTraining>
void launch_spread(cudaStream_t s, const BnPoolShape& shape, const T* dy, const T* z,
                   const uint32_t* codes, T* dz, const GradPartial<acc_t<T>>* partials, int splits,
                   const BackwardArgs& args) {
  const BnPoolGeometry geometry(shape);
  const int64_t rows = (shape.h + 1) / 2, columns = (shape.w + 1) / 2;
  const int64_t count = shape.norm().count();
  if (shape.channels_last) {
    with_channels<T>(shape, {dy, z, dz}, [&](auto width) {
      constexpr int N = decltype(width)::value;
      PixelPlan plan = plan_pixels<T, N>(shape.n * rows * columns, shape.c, kSpreadThreads);
      if (!dz) plan.rows.splits = 1;
      launch_early(spread_pixels_kernel<T, N, kTraining>, plan.grid(), plan.threads, 0, s, dy, z,
                   codes, dz, plan.rows, BnPoolSplit(1, columns, rows), geometry, count, partials,
                   splits, args);
    });
  } else {
    with_windows<T>(shape, {z, dz}, {dy}, [&](auto windows, auto vector) {
      constexpr int V = decltype(windows)::value;
      const int64_t steps = shape.n * rows * (columns / V);
      const dim3 grid(static_cast<unsigned int>(shape.c), dz ? plane_splits(steps, shape.c) : 1);
      launch_early(spread_planes_kernel<T, V, decltype(vector)::value, kTraining>, grid,
                   kPlaneThreads, 0, s, dy, z, codes, dz, steps, BnPoolSplit(1, columns / V, rows),
                   geometry, count, partials, splits, args);
    });
  }
  check_launch("bn_relu2d_backward");
}

}  // namespace

int bn_pool_grad_sums(Stream stream, const BnPoolShape& shape, const void* dy, const void* z,
                      const uint32_t* codes, const void* mean, void* partials) {
  int splits = 0;
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    splits =
        launch_sums<T>(as_cuda(stream), shape, static_cast<const T*>(dy), static_cast<const T*>(z),
                       codes, static_cast<const A*>(mean), static_cast<GradPartial<A>*>(partials));
  });
  return splits;
}

void bn_pool_backward(Stream stream, const BnPoolShape& shape, bool training, const void* dy,
                      const void* z, const uint32_t* codes, const BatchNormAffine& affine,
                      const BatchNormStatistics& statistics, void* dz, void* dweight, void* dbias,
                      void* dconstant, void* workspace) {
  if (!dz && !dweight && !dbias && !dconstant) return;
  const bool has_sums = dweight || dbias || dconstant || training;
  const BackwardArgs args{affine,    statistics,  dweight,  dbias,
                          dconstant, shape.dtype, training, has_sums};
  const cudaStream_t s = as_cuda(stream);
  dispatch(shape.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    const T* grad = static_cast<const T*>(dy);
    const T* in = static_cast<const T*>(z);
    T* out = static_cast<T*>(dz);
    auto* partials = static_cast<GradPartial<A>*>(workspace);
    int splits = 0;
    if (has_sums) {
      splits = launch_sums<T>(s, shape, grad, in, codes, static_cast<const A*>(statistics.mean),
                              partials);
    }
    const auto launch = training ? launch_spread<T, true> : launch_spread<T, false>;
    launch(s, shape, grad, in, codes, out, partials, splits, args);
  });
}

}  // namespace braze::cuda
