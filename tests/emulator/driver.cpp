// The driver table over the host: device memory is the host's, a stream is a queue with a thread.
//
// There can be several devices (Control::devices; TESSERA_EMULATED_GPUS=4 in the environment, or
// "4 apart" for devices that do not reach each other). Their memory is apart in the books, and what
// is queued is looked at for addresses of the wrong one: see `refusal`.
#include "tessera/detail/device/driver.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "kernels/cuda/device.hpp"
#include "kernels/cuda/kernels.hpp"
#include "tests/emulator/control.hpp"
#include "tests/emulator/gpu_thread.hpp"
#include "tests/emulator/graph.hpp"
#include "tests/emulator/stream.hpp"

namespace tessera::kernels::cuda {

int multiprocessors() { return 1; }
std::size_t most_shared_bytes() { return 163 * 1024; }  // as on an A100

namespace emulator {
namespace {

constexpr std::int64_t kMemoryBytes = std::int64_t{1} << 34;
constexpr std::int64_t kPageBytes = std::int64_t{2} << 20;  // as on an H200

constexpr int kMostDevices = 16, kHost = -1;

thread_local int g_device = 0;  // the calling thread's

// Where memory lies, and who may use it beside its device: bit d for device d.
struct Piece {
  std::int64_t bytes;
  int device;
  bool is_mapped;
  std::uint32_t readers;
};

// Every member is shared by all host threads of the process.
struct State {
  std::atomic<std::int64_t> streams{0}, events{0}, records{0}, waits{0}, blocks{0}, allocations{0},
      host_allocations{0}, mappings{0}, copies{0}, batches{0}, fills{0}, ranges{0}, popped{0},
      kernels{0};
  std::atomic<const char*> failure{nullptr};
  std::atomic<int> devices{1};
  std::atomic<bool> reach{true}, warpgroups{true};
  std::mutex mutex;  // of what follows
  std::map<const std::byte*, Piece> pieces;
  std::array<std::uint32_t, kMostDevices> readers{};  // of what each device allocates
  std::array<std::int64_t, kMostDevices + 1> used{};  // the last is the host's
  std::int64_t limit = 0;

  State() {
    if (const char* text = std::getenv("TESSERA_EMULATED_GPUS")) {
      devices = std::clamp(std::atoi(text), 1, kMostDevices);
      reach = !std::strstr(text, "apart");
    }
  }
  std::int64_t& used_of(int device) {
    return used[static_cast<std::size_t>(device == kHost ? kMostDevices : device)];
  }
  bool take(int device, std::int64_t bytes) {
    const std::lock_guard lock(mutex);
    if (used_of(device) + bytes > (limit ? limit : kMemoryBytes)) return false;
    used_of(device) += bytes;
    return true;
  }
  // What `at` lies in; null where it is nobody's, and so the host's.
  const Piece* piece_at(const std::byte* at) {
    const auto next = pieces.upper_bound(at);
    if (next == pieces.begin()) return nullptr;
    const auto& [begin, piece] = *std::prev(next);
    return at < begin + piece.bytes ? &piece : nullptr;
  }
  // Whether `device` may use what lies at `at`.
  bool reaches(int device, const std::byte* at) {
    const Piece* const p = piece_at(at);
    if (!p || p->device == kHost || p->device == device) return true;
    const std::uint32_t others =
        p->is_mapped ? p->readers : readers[static_cast<std::size_t>(p->device)];
    return (others >> device & 1) != 0;
  }
};
State& state() {
  static State all;
  return all;
}

// ---- devices

DriverError count(std::int32_t* devices) {
  *devices = state().devices;
  return nullptr;
}
DriverError use(std::int32_t device) {
  if (device < 0 || device >= state().devices) return "there is no such emulated GPU";
  g_device = device;
  return nullptr;
}
DriverError reach(std::int32_t device, std::int32_t peer, bool* reaches) {
  *reaches = state().reach;
  const std::lock_guard lock(state().mutex);
  if (*reaches) state().readers[static_cast<std::size_t>(peer)] |= 1u << device;
  return use(device);
}
DriverError describe(std::int32_t device, DriverDevice* out) {
  *out = {
      "the host, emulating a GPU", 0, 0, multiprocessors(), kMemoryBytes, 0, "emulator", "", 13000};
  char host[32] = "";
  gethostname(host, sizeof host - 1);  // each host has GPUs of its own
  std::snprintf(out->uuid, sizeof out->uuid, "GPU-emulated-%d-%s", device, host);
  return device < state().devices ? nullptr : "there is no such emulated GPU";
}

// ---- streams and events

DriverError make_stream(std::int32_t, void** stream) {
  ++state().streams;
  *stream = new Stream(g_device);
  return nullptr;
}
DriverError end_stream(void* stream) {
  delete static_cast<Stream*>(stream);
  return nullptr;
}
DriverError make_event(void** event) {
  ++state().events;
  *event = new Event(g_device);
  return nullptr;
}
DriverError end_event(void* event) {
  delete static_cast<Event*>(event);
  return nullptr;
}
DriverError record_counted(void* event, void* stream) {
  ++state().records;
  return record(event, stream);
}
DriverError wait_counted(void* stream, void* event) {
  ++state().waits;
  return wait(stream, event);
}
DriverError block_counted(void* event) {
  ++state().blocks;
  return block(event);
}
DriverError failure() { return state().failure.exchange(nullptr); }

// ---- memory. Fresh memory is NaN, where that takes no time worth counting.

DriverError allocate_from(std::atomic<std::int64_t>& counter, int device, std::int64_t bytes,
                          void** data) {
  State& s = state();
  ++counter;
  const std::int64_t rounded = (bytes + 255) / 256 * 256;
  *data = s.take(device, rounded) ? std::aligned_alloc(256, static_cast<std::size_t>(rounded))
                                  : nullptr;
  if (!*data) return nullptr;
  std::memset(*data, 0xff, static_cast<std::size_t>(std::min<std::int64_t>(rounded, 1 << 20)));
  const std::lock_guard lock(s.mutex);
  s.pieces[static_cast<std::byte*>(*data)] = {rounded, device, false, 0};
  return nullptr;
}
DriverError allocate(std::int64_t bytes, void** data) {
  return allocate_from(state().allocations, g_device, bytes, data);
}
DriverError allocate_host(std::int64_t bytes, void** data) {
  return allocate_from(state().host_allocations, kHost, bytes, data);
}
DriverError release(void* data) {
  State& s = state();
  {
    const std::lock_guard lock(s.mutex);
    const auto found = s.pieces.find(static_cast<std::byte*>(data));
    if (found == s.pieces.end() || found->second.is_mapped)
      return "this memory is not the device's";
    s.used_of(found->second.device) -= found->second.bytes;
    s.pieces.erase(found);
  }
  std::free(data);
  return nullptr;
}

DriverError granularity(std::int64_t* bytes) {
  *bytes = kPageBytes;
  return nullptr;
}
DriverError reserve(std::int64_t bytes, void** range) {
  void* const data = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *range = data == MAP_FAILED ? nullptr : data;
  return *range ? nullptr : "the host has no such range of addresses";
}
DriverError free_range(void* range, std::int64_t bytes) {
  return munmap(range, static_cast<std::size_t>(bytes)) == 0 ? nullptr : "no such range";
}
DriverError map(void* at, std::int64_t bytes, bool* mapped) {
  ++state().mappings;
  if (bytes % kPageBytes != 0) return "a size that the granularity does not divide";
  *mapped = state().take(g_device, bytes);
  if (*mapped && mprotect(at, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE) != 0)
    return "no such range";
  const std::lock_guard lock(state().mutex);
  if (*mapped)
    state().pieces[static_cast<std::byte*>(at)] = {
        bytes, g_device, true, state().readers[static_cast<std::size_t>(g_device)]};
  return nullptr;
}
// Takes the pieces of a range out of the books; false where it holds a part of one, or a hole.
bool take_pieces(std::byte* at, std::int64_t bytes) {
  const std::lock_guard lock(state().mutex);
  while (bytes > 0) {
    const auto found = state().pieces.find(at);
    if (found == state().pieces.end()) return false;
    const Piece piece = found->second;
    if (!piece.is_mapped || piece.bytes > bytes) return false;
    at += piece.bytes;
    bytes -= piece.bytes;
    state().used_of(piece.device) -= piece.bytes;
    state().pieces.erase(found);
  }
  return true;
}
DriverError unmap(void* at, std::int64_t bytes) {
  if (!take_pieces(static_cast<std::byte*>(at), bytes)) return "a part of what was mapped at once";
  return mmap(at, static_cast<std::size_t>(bytes), PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == at
             ? nullptr
             : "no such range";
}
DriverError memory_info(std::int64_t* free_bytes, std::int64_t* total_bytes) {
  const std::lock_guard lock(state().mutex);
  *total_bytes = state().limit ? state().limit : kMemoryBytes;
  *free_bytes = *total_bytes - state().used_of(g_device);
  return nullptr;
}

// ---- queued

DriverError copy(void* to, const void* from, std::int64_t bytes, void* stream) {
  ++state().copies;
  if (const char* const refused = refusal(stream, nullptr, 0)) return refused;
  enqueue(stream, [=] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
  return nullptr;
}
DriverError copy_all(const DriverCopy* copies, std::int32_t count, void* stream) {
  ++state().batches;
  state().copies += count;
  if (const char* const refused = refusal(stream, nullptr, 0)) return refused;
  enqueue(stream, [list = std::vector<DriverCopy>(copies, copies + count)] {
    for (const DriverCopy& c : list) std::memcpy(c.to, c.from, static_cast<std::size_t>(c.bytes));
  });
  return nullptr;
}
DriverError fill(void* to, std::uint8_t byte, std::int64_t bytes, void* stream) {
  ++state().fills;
  if (const char* const refused = refusal(stream, static_cast<const void*>(&to), sizeof to))
    return refused;
  enqueue(stream, [=] { std::memset(to, byte, static_cast<std::size_t>(bytes)); });
  return nullptr;
}

// ---- for tests

void limit_memory(std::int64_t bytes) {
  const std::lock_guard lock(state().mutex);
  state().limit = bytes;
}
void counts(Counts* out) {
  const State& s = state();
  *out = {s.streams,     s.events,           s.records,           s.waits,  s.blocks,
          s.allocations, s.host_allocations, s.mappings,          s.copies, s.batches,
          s.fills,       s.ranges,           s.ranges - s.popped, s.kernels};
}

void set_devices(std::int32_t count, bool reach) {
  State& s = state();
  s.devices = std::min(count, kMostDevices);
  s.reach = reach;
  const std::lock_guard lock(s.mutex);
  s.readers = {};
}
std::int32_t holder_of(const void* memory) {
  const std::lock_guard lock(state().mutex);
  const Piece* const piece = state().piece_at(static_cast<const std::byte*>(memory));
  return piece ? piece->device : kHost;
}
std::int64_t used(std::int32_t device) {
  const std::lock_guard lock(state().mutex);
  return state().used_of(device);
}

constinit const Control kControl = {
    .delay = Stream::delay,
    .devices = set_devices,
    .used = used,
    .limit_memory = limit_memory,
    .fail = [](const char* line) { state().failure = line; },
    .counts = counts,
    .warpgroups = [](bool are_there) { state().warpgroups = are_there; },
    .queue = queue,
    .is_captured = [](void* stream) { return static_cast<Stream*>(stream)->capture() != nullptr; },
    .device_of = [](void* s) { return s ? static_cast<Stream*>(s)->device() : g_device; },
    .holder_of = holder_of};

constinit const Driver kDriver = {
    .version = kDriverVersion,
    .driver_bytes = sizeof(Driver),
    .kernels_layout = kKernelsLayout,
    .architectures = "the host",
    .kernels = &kKernels,
    .count = count,
    .describe = describe,
    .use = use,
    .reach = reach,
    .make_stream = make_stream,
    .end_stream = end_stream,
    .make_event = make_event,
    .end_event = end_event,
    .record = record_counted,
    .wait = wait_counted,
    .block = block_counted,
    .query = query,
    .failure = failure,
    .allocate = allocate,
    .release = release,
    .allocate_host = allocate_host,
    .release_host = release,
    .granularity = granularity,
    .reserve = reserve,
    .free_range = free_range,
    .map = map,
    .unmap = unmap,
    .memory_info = memory_info,
    .copy = copy,
    .copy_all = copy_all,
    .fill = fill,
    .call_host = call_host,
    .begin_capture = begin_capture,
    .end_capture = end_capture,
    .launch_graph = launch_graph,
    .end_graph = end_graph,
    .make_timer = make_event,
    .elapsed = elapsed,
    .delay = delay,
    .push_range = [](const char*) { ++state().ranges; },
    .pop_range = [] { ++state().popped; },
};

}  // namespace

const char* refusal(void* native_stream, const void* args, std::size_t bytes) {
  State& s = state();
  if (!native_stream || s.devices == 1) return nullptr;
  const int device = static_cast<Stream*>(native_stream)->device();
  if (device != g_device) return "a stream of another device than the calling thread's";
  const std::lock_guard lock(s.mutex);
  for (std::size_t at = 0; at + sizeof(void*) <= bytes; at += sizeof(void*)) {
    const std::byte* word = nullptr;
    std::memcpy(static_cast<void*>(&word), static_cast<const std::byte*>(args) + at, sizeof word);
    if (word && !s.reaches(device, word)) return "memory of a device that this one does not reach";
  }
  return nullptr;
}

void enqueue_kernel(void* native_stream, std::function<void()> work) {
  ++state().kernels;
  enqueue(native_stream, std::move(work));
}

}  // namespace emulator

bool has_warpgroup_products() { return emulator::state().warpgroups; }

}  // namespace tessera::kernels::cuda

extern "C" [[gnu::visibility("default")]] const tessera::Driver* tessera_driver(
    std::uint32_t version) {
  using tessera::kernels::cuda::emulator::kDriver;
  return version == kDriver.version ? &kDriver : nullptr;
}

extern "C" [[gnu::visibility("default")]] const tessera::kernels::cuda::emulator::Control*
tessera_emulator() {
  return &tessera::kernels::cuda::emulator::kControl;
}
