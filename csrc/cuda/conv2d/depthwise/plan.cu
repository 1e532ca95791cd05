#include "plan.h"

#include <algorithm>
#include <atomic>
#include <climits>

#include "strip.cuh"
#include "cuda/common/launch.cuh"

namespace braze::cuda::depthwise {
namespace {

constexpr int kSharedLimit = 220 << 10;  // bytes on a multiprocessor, less what blocks need besides

// The compile-time figures of strip.cuh.
struct Steps {
  int rows;    // of `in` read per step
  int turns;   // steps until a row of results is complete
  int window;  // columns that a strip reads
  int reach;   // rows that a row of results reads
};

template <int R>
Steps steps_for(const Kernel& kernel) {
  if (kernel.task == Task::kSpread) {
    return {1, Spread<R>::kTurns, Spread<R>::kWindow, Spread<R>::kTurns};
  }
  if (kernel.stride == 1) return {1, Walk<R, 1>::kTurns, Walk<R, 1>::kWindow, R};
  return {2, Walk<R, 2>::kTurns, Walk<R, 2>::kWindow, R};
}

Steps steps_of(const Kernel& kernel) {
  return kernel.taps == 3   ? steps_for<3>(kernel)
         : kernel.taps == 5 ? steps_for<5>(kernel)
                            : steps_for<7>(kernel);
}

int round_up(int value, int step) { return static_cast<int>(ceil_div(value, step)) * step; }

// Bytes that copies of a slab of pixels can have: what addresses and extents are multiples of.
int vector_of(const Image& image, int channels, int64_t size) {
  uint64_t all = reinterpret_cast<uintptr_t>(image.data) |
                 static_cast<uint64_t>((image.n | image.h | image.w | channels) * size);
  int vector = 16;
  while (all % vector != 0) vector /= 2;
  return vector;
}

// How many blocks of the plan a multiprocessor has at a time.
int blocks_of(const Kernel& kernel, const Args& a) {
  // cudaOccupancyMaxActiveBlocksPerMultiprocessor's arithmetic, without a call for every launch.
  static std::atomic<int> known[256] = {};
  std::atomic<int>& entry =
      known[((static_cast<int>(kernel.task) * 4 + static_cast<int>(kernel.dtype)) * 4 +
             kernel.taps / 2) *
                4 +
            kernel.stride * 2 - 2 + kernel.channels_last];
  int registers = entry.load(std::memory_order_relaxed);
  if (registers == 0) {
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, function_of(kernel)) != cudaSuccess) cudaGetLastError();
    registers = std::max(32, attributes.numRegs);
    // The first one stays, also for other devices: workspace and launch have to agree.
    int expected = 0;
    if (!entry.compare_exchange_strong(expected, registers)) registers = expected;
  }
  const int by_registers = 65536 / (round_up(registers, 8) * a.threads);
  const int by_shared = kSharedLimit / (a.shared_bytes + 1024);
  return std::max(1, std::min({by_registers, by_shared, 2048 / a.threads}));
}

int most_workers(const Kernel& kernel, const Args& a) {
  return std::max(1, sm_count() * blocks_of(kernel, a) / a.slabs);
}

// Shares the rows of all images out over as many blocks as run at a time: whole images, unless
// their number makes the blocks' shares so uneven that a tile's first rows, which then have to be
// read again, cost less.
void share_rows(const Kernel& kernel, Args* a) {
  const int images = a->batch * a->column_tiles, most = most_workers(kernel, *a);
  const int64_t each = ceil_div(images, most);
  if (each * a->rows <= int64_t{images} * a->rows / most + kernel.taps - 1) {
    a->piece = a->rows, a->items = images;
    a->workers = std::max<int>(1, static_cast<int>(ceil_div(images, each)));
  } else {
    a->piece = 1, a->items = images * a->rows;
    a->workers = std::max(1, std::min(most, a->items / std::min(a->rows, 4)));
  }
}

// The columns of a row in shared memory, a few more than there are, such that a warp's threads read
// from different banks; `step` columns of it are between strips.
int pitch_of(int columns, int step, int units, int unit_bytes) {
  int best = columns, least = INT_MAX;
  for (int pitch = columns; pitch < columns + 8; ++pitch) {
    int counts[32] = {}, most = 0;
    for (int lane = 0; lane < 32; ++lane) {
      const int byte = lane % units * unit_bytes;
      const int at = (byte / kGranule * pitch + lane / units * step) * kGranule + byte % kGranule;
      if (at % 4 == 0) most = std::max(most, ++counts[at / 4 % 32]);
    }
    if (most < least) least = most, best = pitch;
  }
  return best;
}

bool plan_nhwc(const Kernel& kernel, const Tuning& tuning, Args* a) {
  const Steps steps = steps_of(kernel);
  const int size = static_cast<int>(size_of(kernel.dtype));
  const int per_thread = channels_per_thread(size, kernel.taps);
  const bool is_weights = kernel.task == Task::kWeights;
  a->vector = vector_of(a->in, a->channels, size);
  if (is_weights) a->vector = std::min(a->vector, vector_of(a->dy, a->channels, size));
  const int strips = static_cast<int>(ceil_div(a->columns, kStrip));
  const int grain = kGranule / size;
  const int channels = round_up(a->channels, grain);
  // Whole rows of memory sectors rather than whole rows of the image.
  const int wanted = std::min(channels, 64 / size);
  const int most_strips = std::max(1, tuning.threads * per_thread / wanted);
  a->column_tiles = static_cast<int>(ceil_div(strips, most_strips));
  a->strips = static_cast<int>(ceil_div(strips, a->column_tiles));
  int most = std::max(1, tuning.threads / a->strips * per_thread / grain) * grain;
  for (;; most -= grain) {
    a->slabs = static_cast<int>(ceil_div(channels, most));
    a->slab = round_up(static_cast<int>(ceil_div(channels, a->slabs)), grain);
    a->slabs = static_cast<int>(ceil_div(channels, a->slab));
    a->threads = round_up(a->strips * a->slab / per_thread, 32);
    a->by_vectors = FastDiv(a->slab * size / a->vector);
    const int units = a->slab / per_thread;
    a->pitch = pitch_of((a->strips - 1) * kStrip * steps.rows + steps.window, kStrip * steps.rows,
                        units, per_thread * size);
    a->dy_pitch = is_weights ? pitch_of(a->strips * kStrip, kStrip, units, per_thread * size) : 0;
    const int row = a->pitch * a->slab * size, dy_row = a->dy_pitch * a->slab * size;
    const int step_bytes = steps.rows * row + dy_row;
    a->steps = std::clamp(tuning.stage_bytes / step_bytes, 1, a->rows + steps.turns - 1);
    a->dy_offset = a->steps * steps.rows * row;
    a->stage_bytes = a->dy_offset + a->steps * dy_row;
    // A stage has the weights at the start.
    a->stage_bytes =
        std::max(a->stage_bytes, round_up(kernel.taps * kernel.taps * a->slab * size, 16));
    a->shared_bytes = kStages * a->stage_bytes;
    if (is_weights) {  // the sum over strips
      a->shared_bytes =
          std::max(a->shared_bytes, (a->strips + 1) / 2 * kernel.taps * kernel.taps * a->slab * 4);
    }
    if (a->shared_bytes <= tuning.shared_bytes || most == grain) break;
  }
  share_rows(kernel, a);
  return a->shared_bytes <= most_shared_memory();
}

// Vectors of kTileChannels in a block of tiles.cuh: all, if they are few; else whole memory sectors
// of each pixel, and as little as can be beyond the last channel.
int tile_units(int channels, int grain) {
  constexpr int kFew = 20;
  const int step = grain / kTileChannels;
  const int needed = round_up(static_cast<int>(ceil_div(channels, kTileChannels)), step);
  if (needed <= kFew) return needed;
  int best = 0, least = INT_MAX;
  for (const int units : {8, 12, 16}) {
    const int all = round_up(needed, units);
    if (all < least) least = all, best = units;
  }
  return best;
}

// Of tiles.cuh: large tiles where they fill the device twice, else small ones.
bool plan_tiles(const Kernel& kernel, Args* a) {
  constexpr int kMostStrips = 8, kLeastRows = 4, kFewUnits = 4;
  const int size = static_cast<int>(size_of(kernel.dtype)), grain = kGranule / size;
  const int columns = tile_columns(kernel.stride), all_units = tile_units(a->channels, grain);
  const int strips = static_cast<int>(ceil_div(a->columns, columns));
  const int multiprocessors = sm_count();
  int units = all_units;
  for (int threads = kTileThreads; threads >= 32; threads /= 2) {
    const bool large = threads == kTileThreads;
    units = large ? all_units : std::min(all_units, kFewUnits);
    a->slab = units * kTileChannels;
    a->slabs = static_cast<int>(ceil_div(a->channels, a->slab));
    const int most = large ? std::min(kMostStrips, threads / (units * kLeastRows)) : kMostStrips;
    a->column_tiles = static_cast<int>(ceil_div(strips, most));
    a->strips = static_cast<int>(ceil_div(strips, a->column_tiles));
    const int rows = std::clamp(threads / (units * a->strips), 1, a->rows);
    a->row_tiles = static_cast<int>(ceil_div(a->rows, rows));
    a->tile_rows = static_cast<int>(ceil_div(a->rows, a->row_tiles));
    a->workers = a->batch * a->row_tiles * a->column_tiles;
    if (int64_t{a->workers} * a->slabs >= (large ? 2 : 1) * multiprocessors) break;
  }
  a->groups = a->tile_rows * a->strips;
  a->threads = round_up(a->groups * units, 32);
  const int read = (a->strips * columns - 1) * kernel.stride + kernel.taps;
  a->by_vectors = FastDiv(a->slab / grain), a->by_dy_vectors = FastDiv(read);
  a->pitch = a->slab * size + kGranule;  // strips begin in different banks
  const int rows = (a->tile_rows - 1) * kernel.stride + kernel.taps;
  a->shared_bytes = kernel.taps * kernel.taps * a->slab * 4 + rows * read * a->pitch;
  return a->shared_bytes <= most_shared_memory();
}

// Planes in shared memory are kept from beginning in the same banks where they are whole vectors.
int pad_of(const Image& image, int planes, int size) {
  const bool aligned = reinterpret_cast<uintptr_t>(image.data) % 16 == 0 &&
                       image.n * size % 16 == 0 && image.c * size % 16 == 0;
  return planes > 1 && aligned ? 16 : 0;
}

bool plan_nchw(const Kernel& kernel, const Tuning& tuning, Args* a) {
  const Steps steps = steps_of(kernel);
  const int size = static_cast<int>(size_of(kernel.dtype));
  const bool is_weights = kernel.task == Task::kWeights;
  const Image& other = is_weights ? a->dy : a->out;
  const int64_t plane = int64_t{a->in.height} * a->in.width * size;
  const int64_t other_plane = int64_t{other.height} * other.width * size;
  a->column_tiles = 1;
  a->strips = static_cast<int>(ceil_div(a->columns, kStrip));
  if (a->strips > tuning.threads) return false;
  const int most_groups = std::max(1, tuning.threads / a->strips);
  const int64_t larger = std::max(plane, other_plane);
  const int planes = static_cast<int>(
      std::clamp<int64_t>(tuning.stage_bytes / larger, 1, std::min(most_groups, a->channels)));
  a->slabs = static_cast<int>(ceil_div(a->channels, planes));
  a->slab = static_cast<int>(ceil_div(a->channels, a->slabs));
  a->tile_rows = a->rows, a->row_tiles = 1;
  int64_t bytes = plane, other_bytes = other_plane;
  if (larger > tuning.stage_bytes * 3 / 2) {  // parts of a plane
    // Bytes of the larger one for each row of results.
    const int64_t row = ceil_div(larger, a->rows);
    const int64_t fit = std::max<int64_t>(1, tuning.stage_bytes / row);
    a->row_tiles = static_cast<int>(ceil_div(a->rows, fit));
    a->tile_rows = static_cast<int>(ceil_div(a->rows, a->row_tiles));
    a->row_tiles = static_cast<int>(ceil_div(a->rows, a->tile_rows));
    bytes = ((a->tile_rows - 1) * steps.rows + steps.reach) * int64_t{a->in.width} * size;
    const int per_row = kernel.task == Task::kSpread ? 2 : 1;
    other_bytes = int64_t{a->tile_rows} * per_row * other.width * size;
  }
  a->items = a->batch * a->row_tiles;
  a->groups = std::clamp(tuning.threads / (a->strips * a->slab), 1,
                         static_cast<int>(ceil_div(a->tile_rows, tuning.group_rows)));
  a->group_rows = static_cast<int>(ceil_div(a->tile_rows, a->groups));
  a->groups = static_cast<int>(ceil_div(a->tile_rows, a->group_rows));
  a->threads = round_up(a->strips * a->slab * a->groups, 32);
  a->plane_pad = pad_of(a->in, a->slab, size);
  a->dy_pad = pad_of(other, a->slab, size);
  a->by_vectors = FastDiv(plane / 16);
  a->by_dy_vectors = FastDiv(other_plane / 16);
  const int64_t in_bytes = ceil_div(a->slab * (bytes + a->plane_pad), 16) * 16 + 16;
  const int64_t out_bytes = ceil_div(a->slab * (other_bytes + a->dy_pad), 16) * 16 + 16;
  int64_t shared = 2 * (in_bytes + out_bytes);
  if (is_weights) {
    a->dy_offset = static_cast<int>(in_bytes);
    a->stage_bytes = static_cast<int>(in_bytes + out_bytes);
    shared = std::max<int64_t>(
        shared, (a->strips * a->groups + 1) / 2 * kernel.taps * kernel.taps * a->slab * 4);
  } else {
    a->stage_bytes = static_cast<int>(in_bytes);
    a->dy_offset = static_cast<int>(2 * in_bytes);
    shared -= out_bytes;
  }
  if (shared > most_shared_memory()) return false;
  a->shared_bytes = static_cast<int>(shared);
  const int64_t each = ceil_div(a->items, most_workers(kernel, *a));
  a->workers = std::max(1, static_cast<int>(ceil_div(a->items, std::max<int64_t>(1, each))));
  return true;
}

}  // namespace

Function function_of(const Kernel& k) {
  switch (k.dtype) {
    case DType::kBFloat16:
      return k.tiles ? tiles_bf16(k) : k.channels_last ? nhwc_bf16(k) : nchw_bf16(k);
    case DType::kFloat16:
      return k.tiles ? tiles_fp16(k) : k.channels_last ? nhwc_fp16(k) : nchw_fp16(k);
    default: return k.tiles ? tiles_fp32(k) : k.channels_last ? nhwc_fp32(k) : nchw_fp32(k);
  }
}

namespace {

Image image_of(const Tensor4dRef& t, int64_t h, int64_t w) {
  return {const_cast<void*>(t.data), t.n, t.c, t.h, t.w, static_cast<int>(h), static_cast<int>(w)};
}

}  // namespace

Kernel kernel_of(Conv2dPass pass, const Conv2dShape& s, bool channels_last) {
  const Task task = pass == Conv2dPass::kWgrad                      ? Task::kWeights
                    : pass == Conv2dPass::kDgrad && s.stride_h == 2 ? Task::kSpread
                                                                    : Task::kConvolve;
  return {task, s.dtype, static_cast<int>(s.r), static_cast<int>(s.stride_h), channels_last};
}

Tuning tuning_of(const Kernel& kernel) {
  if (kernel.channels_last) return {128, 16 << 10, 76 << 10, 0};
  const int stage = kernel.dtype == DType::kFloat32 && kernel.taps < 7 ? 16 << 10 : 24 << 10;
  return {kernel.taps == 3 ? 256 : 192, stage, 0, 7 * (kernel.taps / 2)};
}

bool fits_tiles(const Kernel& kernel, const Args& a) {
  const int size = static_cast<int>(size_of(kernel.dtype));
  if (kernel.task != Task::kConvolve || !kernel.channels_last) return false;
  // Measured on an H100, 1 to 128 images of 7 x 7 to 112 x 112: the more taps, the more is read
  // twice; the walk over rows is ahead where that is long enough to pay its start.
  constexpr int64_t kMostWith5 = 8 << 20, kMostWith7 = 4 << 20;  // results
  constexpr int kMostChannels = 1 << 19;                         // blocks along a grid's y
  const int64_t results = int64_t{a.batch} * a.rows * a.columns * a.channels;
  if (a.channels > kMostChannels || (kernel.taps == 7 && results > kMostWith7)) return false;
  if (kernel.taps == 5 && size == 2 && kernel.stride == 1 && results > kMostWith5) return false;
  const auto is_aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return vector_of(a.in, a.channels, size) == kGranule &&
         vector_of(a.out, a.channels, size) == kGranule && is_aligned(a.w) && is_aligned(a.bias);
}

bool make_plan(const Kernel& kernel, const Tuning& tuning, Args* args) {
  if (!kernel.channels_last) return plan_nchw(kernel, tuning, args);
  const bool fits = kernel.tiles ? plan_tiles(kernel, args) : plan_nhwc(kernel, tuning, args);
  const int size = static_cast<int>(size_of(kernel.dtype));
  if (fits) {
    args->set_places(kernel.tiles ? kTileChannels : channels_per_thread(size, kernel.taps));
  }
  return fits;
}

Args problem_of(const Kernel& kernel, Conv2dPass pass, const Conv2dShape& s, const Tensor4dRef& x,
                const Tensor4dRef& w, const Tensor4dRef& y, const void* bias, void* workspace) {
  Args a{};
  a.channels = static_cast<int>(s.c), a.batch = static_cast<int>(s.n);
  a.w = w.data, a.bias = bias;
  const Image in = image_of(x, s.h, s.w), out = image_of(y, s.p, s.q);
  const int pad_h = static_cast<int>(s.pad_h), pad_w = static_cast<int>(s.pad_w);
  a.first_row = -pad_h, a.first_column = -pad_w;
  a.rows = out.height, a.columns = out.width;
  if (pass == Conv2dPass::kFprop) {
    a.in = in, a.out = out;
  } else if (pass == Conv2dPass::kWgrad) {
    a.in = in, a.dy = out;
    a.partial = static_cast<float*>(workspace);
  } else if (kernel.task == Task::kConvolve) {
    a.in = out, a.out = in;
    a.turned = true;
    a.first_row = pad_h - (kernel.taps - 1), a.first_column = pad_w - (kernel.taps - 1);
    a.rows = in.height, a.columns = in.width;
  } else {
    a.in = out, a.out = in;
    const Steps steps = steps_of(kernel);
    // Pair i of rows is rows 2 i - pad and 2 i + 1 - pad, and meets row i of dy with its first tap.
    const int first_pair = pad_h / 2;
    a.first_row = first_pair - (steps.turns - 1);
    a.shift_row = 2 * first_pair - pad_h;
    a.rows = (in.height - 1 + pad_h) / 2 - first_pair + 1;
    const int parity = kernel.taps / 2 % 2, first = -((kernel.taps - 1 - parity) / 2);
    const int origin = pad_w % 2 == parity ? pad_w : pad_w - 1;  // plus the pair's first column
    a.first_column = (origin - parity) / 2 + first;
    a.shift_column = origin - pad_w;
    a.columns = static_cast<int>(ceil_div(in.width - a.shift_column, 2));
  }
  return a;
}

}  // namespace braze::cuda::depthwise
