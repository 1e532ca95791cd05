#include "pack.cuh"

namespace braze::cuda {
namespace {

// A dimension of `groups` groups, each padded from `real` to `padded`.
struct Padded {
  int64_t groups, real, padded;
  int64_t total() const { return groups * padded; }
};

// images x channels x height x width
struct PackShape {
  Padded n, c;
  int64_t h, w;
};

struct Shapes {
  PackShape gathered, other, out;
};

Shapes pack_shapes(const Conv2dArgs& a) {
  const Conv2dShape& p = a.shape;
  const int64_t width = 16 / size_of(p.dtype);
  // Padded are the channels that are gathered in vectors.
  const auto padded = [&](int64_t channels, bool pad) {
    const int64_t real = channels / p.groups;
    return Padded{p.groups, real, pad ? ceil_div(real, width) * width : real};
  };
  const Padded c = padded(p.c, a.pass != Conv2dPass::kDgrad);
  const Padded k = padded(p.k, a.pass != Conv2dPass::kFprop);
  const Padded images{1, p.n, p.n}, group_c{1, c.real, c.padded};
  const PackShape x{images, c, p.h, p.w}, w{k, group_c, p.r, p.s}, y{images, k, p.p, p.q};
  switch (a.pass) {
    case Conv2dPass::kFprop: return {x, w, y};
    case Conv2dPass::kDgrad: return {y, w, x};
    case Conv2dPass::kWgrad: break;
  }
  return {x, y, w};
}

bool is_padded(const PackShape& s) { return s.n.real != s.n.padded || s.c.real != s.c.padded; }

bool has_vectors(const PackShape& s, const Tensor4dRef& t, DType dtype) {
  const int64_t width = 16 / size_of(dtype);
  return !is_padded(s) && t.c == 1 && t.n % width == 0 && t.h % width == 0 && t.w % width == 0 &&
         s.c.real % width == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

Tensor4dRef packed_ref(const PackShape& s, void* data) {
  const int64_t c = s.c.total();
  return {data, s.h * s.w * c, 1, s.w * c, c};
}

constexpr int kThreads = 256, kPixels = 64, kChannels = 32;

struct PackParams {
  const void* from;
  void* to;
  Axis<int64_t> pixels;  // image, row, column of the packed tensor; the image's step is not used
  int64_t image_step, channel_step;
  FastDiv image_padded, channel_padded, pixels_per_image;
  int image_real, channel_real, channels;
};

// A tile of kPixels x kChannels goes through shared memory: read along the pixels, written along
// the channels. Bits is an unsigned integer as wide as an element.
template <typename Bits>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackParams p) {
  constexpr int kWidth = 16 / sizeof(Bits);
  constexpr int kPad = 4 / sizeof(Bits);  // one bank
  __shared__ Bits tile[kChannels][kPixels + kPad];
  const int channel_tiles = (p.channels - 1) / kChannels + 1;
  const int c0 = static_cast<int>(blockIdx.x % channel_tiles) * kChannels;
  const int64_t pixel0 = int64_t{blockIdx.x / channel_tiles} * kPixels;

  const int64_t pixel = pixel0 + threadIdx.x % kPixels;
  const Bits* from = nullptr;
  if (pixel < p.pixels.extent) {
    int in_group;
    const int image = p.pixels_per_image.div(static_cast<int>(pixel));
    const int group = p.image_padded.div(image, in_group);
    if (in_group < p.image_real) {
      from = static_cast<const Bits*>(p.from) + p.pixels.at(static_cast<int>(pixel)).offset +
             (int64_t{group} * p.image_real + in_group) * p.image_step;
    }
  }
#pragma unroll
  for (int i = 0; i < kChannels / (kThreads / kPixels); ++i) {
    const int row = threadIdx.x / kPixels + i * (kThreads / kPixels);
    Bits v = 0;
    if (from && c0 + row < p.channels) {
      int in_group;
      const int group = p.channel_padded.div(c0 + row, in_group);
      if (in_group < p.channel_real) {
        v = from[(int64_t{group} * p.channel_real + in_group) * p.channel_step];
      }
    }
    tile[row][threadIdx.x % kPixels] = v;
  }
  __syncthreads();
  constexpr int kVectors = kChannels / kWidth;  // of a pixel
  for (int i = threadIdx.x; i < kPixels * kVectors; i += kThreads) {
    const int channel = i % kVectors * kWidth, column = i / kVectors;
    if (pixel0 + column >= p.pixels.extent || c0 + channel >= p.channels) continue;
    Bits* const to = static_cast<Bits*>(p.to) + (pixel0 + column) * p.channels + c0 + channel;
    if (p.channels % kWidth == 0) {
      Vec<Bits, kWidth> v;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v.v[j] = tile[channel + j][column];
      *reinterpret_cast<Vec<Bits, kWidth>*>(to) = v;
    } else {
      for (int j = 0; j < min(kWidth, p.channels - c0 - channel); ++j) {
        to[j] = tile[channel + j][column];
      }
    }
  }
}

template <typename Bits>
void launch_pack(Stream stream, const PackShape& s, const Tensor4dRef& from, void* to) {
  PackParams p{};
  p.from = from.data;
  p.to = to;
  const int64_t images = s.n.total();
  p.pixels = pixel_axis<int64_t>(images, s.h, s.w, from);
  p.pixels.offset_step[0] = 0;
  p.image_step = from.n;
  p.channel_step = from.c;
  p.image_padded = FastDiv(s.n.padded);
  p.channel_padded = FastDiv(s.c.padded);
  p.pixels_per_image = FastDiv(s.h * s.w);
  p.image_real = static_cast<int>(s.n.real);
  p.channel_real = static_cast<int>(s.c.real);
  p.channels = static_cast<int>(s.c.total());
  const int64_t blocks = ceil_div(p.pixels.extent, kPixels) * ceil_div(p.channels, kChannels);
  if (blocks == 0) return;
  if (blocks > INT_MAX) throw std::runtime_error("conv2d: pack: more than 2^31 - 1 tiles");
  pack_kernel<Bits><<<static_cast<unsigned>(blocks), kThreads, 0, as_cuda(stream)>>>(p);
  check_launch("conv2d pack");
}

// The filters' gradient is small: one thread an element.
template <typename Bits>
__global__ void unpack_kernel(const Bits* __restrict__ from, Tensor4dRef from_ref, Padded n,
                              Tensor4dRef to_ref, int64_t c, int64_t h, int64_t w) {
  Bits* const to = static_cast<Bits*>(const_cast<void*>(to_ref.data));
  const int64_t total = n.groups * n.real * c * h * w, stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total; i += stride) {
    const int64_t column = i % w, row = i / w % h, channel = i / (w * h) % c,
                  image = i / (w * h * c);
    const int64_t padded = image / n.real * n.padded + image % n.real;
    to[image * to_ref.n + channel * to_ref.c + row * to_ref.h + column * to_ref.w] =
        from[padded * from_ref.n + channel * from_ref.c + row * from_ref.h + column * from_ref.w];
  }
}

void pack(Stream stream, DType dtype, const PackShape& s, const Tensor4dRef& from, void* to) {
  if (size_of(dtype) == 2) {
    launch_pack<uint16_t>(stream, s, from, to);
  } else {
    launch_pack<uint32_t>(stream, s, from, to);
  }
}

}  // namespace

PackedConv2d pack_into(const Conv2dArgs& args, void* workspace) {
  const Shapes shapes = pack_shapes(args);
  const DType dtype = args.shape.dtype;
  PackedConv2d packed{args, !has_vectors(shapes.gathered, args.gathered, dtype),
                      !has_vectors(shapes.other, args.other, dtype),
                      args.pass == Conv2dPass::kWgrad && is_padded(shapes.out), 0};
  const auto place = [&](const PackShape& s, Tensor4dRef& t) {
    t = packed_ref(s, static_cast<char*>(workspace) + packed.bytes);
    const int64_t elements = s.n.total() * s.c.total() * s.h * s.w;
    packed.bytes += ceil_div(elements * size_of(dtype), 256) * 256;
  };
  if (packed.pack_gathered) place(shapes.gathered, packed.args.gathered);
  if (packed.pack_other) place(shapes.other, packed.args.other);
  if (packed.unpack_out) place(shapes.out, packed.args.out);
  const PackShape& filters = args.pass == Conv2dPass::kWgrad ? shapes.out : shapes.other;
  packed.args.shape.k = filters.n.total();
  packed.args.shape.c = filters.c.padded * args.shape.groups;
  return packed;
}

void pack_operands(Stream stream, const Conv2dArgs& args, const PackedConv2d& packed) {
  const Shapes shapes = pack_shapes(args);
  const auto run = [&](bool wanted, const PackShape& s, const Tensor4dRef& from,
                       const Tensor4dRef& to) {
    if (wanted) pack(stream, args.shape.dtype, s, from, const_cast<void*>(to.data));
  };
  run(packed.pack_gathered, shapes.gathered, args.gathered, packed.args.gathered);
  run(packed.pack_other, shapes.other, args.other, packed.args.other);
}

void unpack_result(Stream stream, const Conv2dArgs& args, const PackedConv2d& packed) {
  if (!packed.unpack_out) return;
  const PackShape s = pack_shapes(args).out;
  const Tensor4dRef& from = packed.args.out;
  const int blocks = grid_stride_blocks(s.n.groups * s.n.real * s.c.real * s.h * s.w, kThreads);
  const auto launch = [&](auto bits) {
    using Bits = decltype(bits);
    unpack_kernel<Bits><<<blocks, kThreads, 0, as_cuda(stream)>>>(
        static_cast<const Bits*>(from.data), from, s.n, args.out, s.c.real, s.h, s.w);
  };
  if (size_of(args.shape.dtype) == 2) {
    launch(uint16_t{});
  } else {
    launch(uint32_t{});
  }
  check_launch("conv2d unpack");
}

}  // namespace braze::cuda
