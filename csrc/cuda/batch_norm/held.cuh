// Batch norm's training passes over [n, c, inner] as one kernel each, with one read and one write:
// the blocks of a cluster hold a few channels of all images in shared memory. No barrier for the
// grid is needed, since a cluster has all that its channels' sums are of.
#pragma once

#include "cuda/common/cluster_mail.cuh"
#include "cuda/common/fast_div.cuh"
#include "layout.cuh"
#include "resident_codes.cuh"

namespace braze::cuda {

constexpr int kHeldThreads = 256, kHeldWarps = kHeldThreads / 32;
// Of a multiprocessor: while some wait for their sums, others read and write. And at least.
constexpr int kHeldBlocks = 4, kLeastHeldBlocks = 2;
constexpr int kMostHeldChannels = 8;    // of a cluster: a warp is for one
constexpr int kHeldBytes = 216 * 1024;  // of a multiprocessor
// Bytes of a tensor below which launches one after the other are as fast.
constexpr int64_t kHeldLeastBytes = 1 << 20;
constexpr int kHeldUnroll = 4;  // vectors whose loads from memory a thread has in flight

struct HeldPlan {
  int cluster = 0;       // blocks; 0: too large, one image, or not to be copied in whole 16 bytes
  int channels;          // of a cluster
  int images, of_block;  // in all, and of a block at most
  int run;               // elements of an image's channels, which lie side by side
  int inner;
  int64_t step;       // elements from an image to the next
  FastDiv per_plane;  // vectors of a plane
  unsigned blocks;
  int bytes;
};

// For `tensors` of them, in vectors of so many elements.
template <typename T>
HeldPlan plan_held_planes(const BatchNormShape& shape, int tensors, int vector) {
  HeldPlan plan;
  int channels = 1;
  while (channels < kMostHeldChannels && channels * shape.inner * int64_t{sizeof(T)} % 16 != 0) {
    channels *= 2;
  }
  const int64_t run_bytes = channels * shape.inner * int64_t{sizeof(T)};
  if (run_bytes % 16 != 0 || shape.c % channels != 0 || run_bytes > kHeldBytes) return plan;
  // (A launch without clusters has neither their barriers nor remote memory: at least two blocks.)
  if (shape.n < 2) return plan;
  if (shape.n * shape.c * shape.inner >= int64_t{1} << 40 || shape.n > 1 << 20) return plan;
  const int64_t clusters = shape.c / channels;
  const auto bytes_of = [&](int cluster) {
    return tensors * run_bytes * ceil_div(shape.n, int64_t{cluster});
  };
  const auto is_enough = [&](int cluster) {
    return bytes_of(cluster) <= kHeldBytes / kHeldBlocks &&
           clusters * cluster >= kLeastHeldBlocks * sm_count();
  };
  int cluster = 2;
  while (cluster < kMaxCluster && !is_enough(cluster) && 2 * cluster <= shape.n) cluster *= 2;
  // Alone on a multiprocessor a block would read, wait and write one after the other; of two there
  // have to be many to take turns.
  const int64_t blocks = clusters * cluster, bytes = bytes_of(cluster);
  if (bytes > kHeldBytes / kLeastHeldBlocks || blocks > 1 << 30) return plan;
  if (bytes > kHeldBytes / kHeldBlocks && blocks < 8 * sm_count()) return plan;
  plan.cluster = cluster;
  plan.channels = channels;
  plan.images = static_cast<int>(shape.n);
  plan.of_block = static_cast<int>(ceil_div(shape.n, int64_t{cluster}));
  plan.run = static_cast<int>(channels * shape.inner);
  plan.inner = static_cast<int>(shape.inner);
  plan.step = shape.c * shape.inner;
  plan.per_plane = FastDiv(shape.inner / vector);
  plan.blocks = static_cast<unsigned>(blocks);
  plan.bytes = static_cast<int>(bytes);
  return plan;
}

#if __CUDA_ARCH__ >= 900
// A block's images of its cluster's channels, and a thread's part of them: a warp is for one of the
// channels.
template <int N, typename T>
class HeldPlanes {
 public:
  __device__ __forceinline__ HeldPlanes(const HeldPlan& plan)
      : plan_(plan),
        rank_(static_cast<int>(blockIdx.x) % plan.cluster),
        team_(kHeldWarps / plan.channels),
        local_(static_cast<int>(threadIdx.x) / 32 / team_) {
    images_ = images_of(rank_);
    group_ = static_cast<int>(blockIdx.x) / plan.cluster;
    from_ = rank_ * plan.of_block * plan.step + int64_t{group_} * plan.run;
  }
  // The warp's channel.
  __device__ __forceinline__ int64_t channel() const {
    return int64_t{group_} * plan_.channels + local_;
  }

  // The first warp asks for a tensor's part; `full` has to expect `bytes()`.
  __device__ __forceinline__ void ask(uint64_t* full, T* to, const T* tensor) const {
    const uint32_t bytes = plan_.run * static_cast<uint32_t>(sizeof(T));
    for (int i = threadIdx.x; i < images_; i += 32) {
      tma_load_bytes(full, shared_address(to + i * plan_.run), tensor + from_ + i * plan_.step,
                     bytes);
    }
  }
  __device__ __forceinline__ uint32_t bytes() const {
    return static_cast<uint32_t>(images_ * plan_.run) * static_cast<uint32_t>(sizeof(T));
  }

  // f(place, offset) for the thread's vectors: in shared memory, and in the tensor.
  template <typename F>
  __device__ __forceinline__ void each(const F& f) const {
    const int total = images_ * plan_.per_plane.divisor(), stride = 32 * team_;
#pragma unroll 2
    for (int i = first(); i < total; i += stride) {
      const Place place = at(i);
      f(place.held, place.offset);
    }
  }
  // The same of up to kHeldUnroll at a time: load(u, offset) of all of them, then f(u, ...).
  template <typename Load, typename F>
  __device__ __forceinline__ void each_loaded(bool loads, const Load& load, const F& f) const {
    if (!loads) return each([&](int held, int64_t offset) { f(0, held, offset); });
    const int total = images_ * plan_.per_plane.divisor(), stride = 32 * team_;
#pragma unroll 1
    for (int i = first(); i < total; i += kHeldUnroll * stride) {
      Place places[kHeldUnroll];
#pragma unroll
      for (int u = 0; u < kHeldUnroll; ++u) {
        if (i + u * stride >= total) continue;
        places[u] = at(i + u * stride);
        load(u, places[u].offset);
      }
#pragma unroll
      for (int u = 0; u < kHeldUnroll; ++u) {
        if (i + u * stride < total) f(u, places[u].held, places[u].offset);
      }
    }
  }

  // What the cluster's blocks have told each other: of each block's channels two sums and, in w,
  // another number.
  struct Sums {
    float4 warps[kHeldWarps];
    ClusterMail<float4, kMostHeldChannels> blocks;
  };
  // One thread, before the cluster meets.
  __device__ __forceinline__ void expect(Sums& own) const {
    own.blocks.expect(plan_.channels * plan_.cluster);
  }
  // Adds up x and y of the block's warps and tells all blocks of the cluster; w is the first
  // warp's.
  __device__ __forceinline__ void tell(float4 values, Sums& own) const {
    values.x = warp_sum(values.x);
    values.y = warp_sum(values.y);
    if (threadIdx.x % 32 == 0) own.warps[threadIdx.x / 32] = values;
    __syncthreads();
    if (threadIdx.x < plan_.channels * plan_.cluster) {
      const int channel = threadIdx.x % plan_.channels;
      const float4* const from = own.warps + channel * team_;
      float4 sum = from[0];
      for (int i = 1; i < team_; ++i) {
        sum.x += from[i].x;
        sum.y += from[i].y;
      }
      own.blocks.send(sum, rank_, channel, static_cast<int>(threadIdx.x) / plan_.channels);
    }
    own.blocks.wait();
  }
  // f(block, its sums of the warp's channel) for the cluster's blocks, in order.
  template <typename F>
  __device__ __forceinline__ void each_block(const Sums& own, const F& f) const {
    for (int r = 0; r < plan_.cluster; ++r) f(r, own.blocks.values[r][local_]);
  }
  __device__ __forceinline__ int images_of(int block) const {
    return max(0, min(plan_.of_block, plan_.images - block * plan_.of_block));
  }
  // Of the first of the block's images, of one in the middle, of the last: places of the channel.
  __device__ __forceinline__ int place(int third) const {
    const int image = third == 0 ? 0 : third == 1 ? images_ / 2 : images_ - 1;
    const int within = third == 0 ? 0 : third == 1 ? plan_.inner / 2 : plan_.inner - 1;
    return image * plan_.run + local_ * plan_.inner + within;
  }
  __device__ __forceinline__ bool is_empty() const { return images_ == 0; }
  // Whether the thread is the one that finishes its channel.
  __device__ __forceinline__ bool finishes() const {
    return rank_ == 0 && threadIdx.x % (32 * team_) == 0;
  }

 private:
  struct Place {
    int held;
    int64_t offset;
  };
  __device__ __forceinline__ int first() const {
    return static_cast<int>(threadIdx.x) - local_ * 32 * team_;
  }
  __device__ __forceinline__ Place at(int i) const {
    int vector;
    const int image = plan_.per_plane.div(i, vector);
    const int within = local_ * plan_.inner + vector * N;
    return {image * plan_.run + within, from_ + image * plan_.step + within};
  }

  const HeldPlan& plan_;
  int rank_, team_, local_, images_, group_;
  int64_t from_;
};
#endif

// A coefficient of the warp's channel.
template <typename A, int N>
__device__ __forceinline__ PerElement<A, N, true> coefficient(A value) {
  PerElement<A, N, true> result;
  result.v[0] = value;
  return result;
}

template <typename T, int N, ActivationCode kCode>
__global__ void __launch_bounds__(kHeldThreads, kHeldBlocks)
    held_forward_kernel(const __grid_constant__ HeldPlan plan, ApplyArgs<T> args,
                        ForwardArgs forward, int64_t* batches) {
#if __CUDA_ARCH__ >= 900
  using Planes = HeldPlanes<N, T>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ uint64_t full;
  __shared__ typename Planes::Sums sums;  // about a pivot, and the pivot
  T* const x = reinterpret_cast<T*>(shared);
  const Planes planes(plan);
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    planes.expect(sums);
  }
  wait_for_earlier_kernels();
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) mbarrier_expect(&full, planes.bytes());
    __syncwarp();
    planes.ask(&full, x, args.x);
  }
  if (batches && blockIdx.x == 0 && threadIdx.x == 0) ++*batches;
  const ChannelParameters loaded(forward, planes.channel());
  cluster_meet();  // the barriers are there
  mbarrier_wait(&full, 0);
  // A median: a far-off element would spoil a mean.
  const float pivot = planes.is_empty() ? 0
                                        : median(convert<float>(x[planes.place(0)]),
                                                 convert<float>(x[planes.place(1)]),
                                                 convert<float>(x[planes.place(2)]));
  float4 about{0, 0, 0, pivot};
  planes.each([&](int held, int64_t) {
    Packed<T, N> packed;
    packed.load(x + held);
    float element[N];
    unpack(packed, element);
    add_deviations(about.x, about.y, element, pivot);
  });
  planes.tell(about, sums);
  ToldMoments moments;
  planes.each_block(sums, [&](int block, const float4& v) {
    moments.add(v, static_cast<double>(planes.images_of(block)) * plan.inner, block == 0);
  });
  const double count = static_cast<double>(plan.images) * plan.inner;
  moments.finish(1 / count);
  const ChannelStatistics<float> statistics(
      moments.mean, rsqrt(moments.squares / count + forward.eps), loaded.weight, loaded.bias);
  if (planes.finishes()) {
    update_running(forward, loaded, count, moments.mean, moments.squares, planes.channel());
    statistics.store(forward.statistics, planes.channel());
  }
  const auto center = coefficient<float, N>(statistics.mean),
             scale = coefficient<float, N>(statistics.scale),
             shift = coefficient<float, N>(statistics.shift);
  Packed<T, N> residual[kHeldUnroll];
  planes.each_loaded(
      args.residual, [&](int u, int64_t at) { residual[u].load(args.residual + at); },
      [&](int u, int held, int64_t at) {
        Packed<T, N> packed;
        packed.load(x + held);
        apply_vector<kCode>(args, at, packed, residual[u], center, scale, shift);
      });
#endif
}

template <typename T, int N, ActivationCode kCode>
__global__ void __launch_bounds__(kHeldThreads, kHeldBlocks)
    held_backward_kernel(const __grid_constant__ HeldPlan plan, GradSumsArgs<T> args,
                         InputGradArgs<T> grads, BackwardArgs backward) {
#if __CUDA_ARCH__ >= 900
  using Planes = HeldPlanes<N, T>;
  using Coefficients = PerElement<float, N, true>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ uint64_t full;
  __shared__ typename Planes::Sums sums;
  const Planes planes(plan);
  T* const x = reinterpret_cast<T*>(shared);
  T* const dy = x + plan.of_block * plan.run;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    planes.expect(sums);
  }
  wait_for_earlier_kernels();
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) mbarrier_expect(&full, 2 * planes.bytes());
    __syncwarp();
    planes.ask(&full, x, args.x);
    planes.ask(&full, dy, args.dy);
  }
  const int64_t channel = planes.channel();
  const GradParameters<float> loaded(backward, channel);
  const Coefficients center(args.statistics.mean, channel), scale(args.statistics.scale, channel),
      shift(args.statistics.shift, channel);
  cluster_meet();  // the barriers are there
  mbarrier_wait(&full, 0);
  float4 v{0, 0, 0, 0};
  {
    Packed<T, N> residual[kHeldUnroll];
    uint8_t open[kHeldUnroll];
    planes.each_loaded(
        args.residual || args.mask,
        [&](int u, int64_t at) {
          if (args.residual) residual[u].load(args.residual + at);
          if (args.mask) open[u] = args.mask[at / N];
        },
        [&](int u, int held, int64_t at) {
          Packed<T, N> packed_dy, packed_x;
          packed_dy.load(dy + held);
          packed_x.load(x + held);
          sum_vector<kCode>(
              args, packed_dy, packed_x, residual[u], open[u], center, scale, shift,
              [&](const Vec<T, N>& kept) {
                store_vec(args.dresidual + at, kept);
                store_vec(dy + held, kept);
              },
              [&](int, float g, float product) {
                v.x += g;
                v.y += product;
              });
        });
  }
  planes.tell(v, sums);
  double sum = 0, dot = 0;
  planes.each_block(sums, [&](int, const float4& of_block) {
    sum += of_block.x;
    dot += of_block.y;
  });
  const int64_t count = int64_t{plan.images} * plan.inner;
  const auto found =
      grad_coefficients<float>(backward, loaded, sum, dot, count, channel, planes.finishes());
  // As the forward pass rounded it, where the value before the activation is made with it again.
  const auto by_grad = args.statistics.scale ? scale : coefficient<float, N>(found.by_grad),
             by_input = coefficient<float, N>(found.by_input),
             constant = coefficient<float, N>(found.offset);
  planes.each([&](int held, int64_t at) {
    Packed<T, N> packed_dy, packed_x;
    packed_dy.load(dy + held);
    packed_x.load(x + held);
    kept_input_grad_vector<kCode>(args.dresidual, grads, at, packed_dy, packed_x, center, by_grad,
                                  shift, by_input, constant);
  });
#endif
}

template <typename... Params, typename... Args>
void launch_held(cudaStream_t stream, const HeldPlan& plan, void (*kernel)(Params...),
                 const Args&... args) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       kHeldBytes / kLeastHeldBlocks);
  launch_early_in_clusters(kernel, plan.blocks, kHeldThreads, plan.bytes, stream, plan.cluster,
                           plan, args...);
}

// f(plan, integral constant N, integral constant code) where the kernels take a shape, and returns
// whether they do. Not with vectors of 16 bytes where reads_more: with a mask or a residual to read
// as well, kernels for each pass were up to 1.2 times as fast backward (H200).
template <typename T, typename F>
bool with_held_planes(const BatchNormShape& shape, const Activation& activation, int tensors,
                      bool reads_more, const F& f) {
  if (shape.channels_last || !runs_sm90_code()) return false;
  if (shape.count() * shape.c * int64_t{sizeof(T)} < kHeldLeastBytes) return false;
  bool done = false;
  with_vectors<T>(shape.inner, [&](auto width) {
    if (reads_more && decltype(width)::value == kVecWidth<T>) return;
    const HeldPlan plan = plan_held_planes<T>(shape, tensors, decltype(width)::value);
    if (plan.cluster == 0) return;
    done = with_resident_code(activation, [&](auto code) { f(plan, width, code); });
  });
  return done;
}

}  // namespace braze::cuda
