// The driver table over the host: device memory is the host's, a stream is a queue with a thread.
#include "tessera/device/driver.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "kernels/cuda/kernels.hpp"
#include "kernels/emulator/stream.hpp"
#include "kernels/emulator/thread.hpp"

namespace tessera::kernels::cuda::emulator {
namespace {

// Set when the record before it in its stream has been reached.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t recorded = 0, reached = 0;
  std::chrono::steady_clock::time_point when;  // it was reached

  void reach(std::uint64_t number) {
    {
      const std::lock_guard lock(mutex);
      reached = std::max(reached, number);
      when = std::chrono::steady_clock::now();
    }
    changed.notify_all();
  }
  void wait(std::uint64_t number) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return reached >= number; });
  }
};

// ---- devices

DriverError count(std::int32_t* devices) {
  *devices = 1;
  return nullptr;
}
DriverError describe(std::int32_t device, DriverDevice* out) {
  if (device != 0) return "the emulator has one device, number 0";
  *out = {"the host, emulating a GPU", 0, 0, 1, std::int64_t{1} << 34, 0, "emulator"};
  return nullptr;
}
DriverError use(std::int32_t device) {
  return device == 0 ? nullptr : "the emulator has one device, number 0";
}

// ---- streams and events. An event handle is a shared_ptr on the heap: what is queued keeps it.

using Handle = std::shared_ptr<Event>;
Handle& handle(void* event) { return *static_cast<Handle*>(event); }

DriverError make_stream(std::int32_t, void** stream) {
  *stream = new Stream;
  return nullptr;
}
DriverError end_stream(void* stream) {
  delete static_cast<Stream*>(stream);
  return nullptr;
}
DriverError make_event(void** event) {
  *event = new Handle(std::make_shared<Event>());
  return nullptr;
}
DriverError end_event(void* event) {
  delete static_cast<Handle*>(event);
  return nullptr;
}
std::uint64_t last_record(Event& event) {
  const std::lock_guard lock(event.mutex);
  return event.recorded;
}
DriverError record(void* event, void* stream) {
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(handle(event)->mutex);
    number = ++handle(event)->recorded;
  }
  enqueue(stream, [kept = handle(event), number] { kept->reach(number); });
  return nullptr;
}
DriverError wait(void* stream, void* event) {
  enqueue(stream,
          [kept = handle(event), number = last_record(*handle(event))] { kept->wait(number); });
  return nullptr;
}
DriverError block(void* event) {
  handle(event)->wait(last_record(*handle(event)));
  return nullptr;
}
DriverError failure() { return nullptr; }

// ---- memory

DriverError allocate(std::int64_t bytes, void** data) {
  *data = std::aligned_alloc(256, static_cast<std::size_t>((bytes + 255) / 256 * 256));
  return nullptr;
}
DriverError release(void* data) {
  std::free(data);
  return nullptr;
}
DriverError no_mapping() { return "the emulator maps no memory"; }

// ---- queued

DriverError copy(void* to, const void* from, std::int64_t bytes, void* stream) {
  enqueue(stream, [=] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
  return nullptr;
}
DriverError fill(void* to, std::uint8_t byte, std::int64_t bytes, void* stream) {
  enqueue(stream, [=] { std::memset(to, byte, static_cast<std::size_t>(bytes)); });
  return nullptr;
}

// ---- for measurements and tests

DriverError elapsed(void* from, void* to, double* seconds) {
  const auto when = [](Event& event) {
    const std::lock_guard lock(event.mutex);
    return event.when;
  };
  *seconds = std::chrono::duration<double>(when(*handle(to)) - when(*handle(from))).count();
  return nullptr;
}
DriverError delay(std::int64_t nanoseconds, void* stream) {
  enqueue(stream, [=] { std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds)); });
  return nullptr;
}

constinit const Driver kDriver = {
    .version = kDriverVersion,
    .driver_bytes = sizeof(Driver),
    .kernels_bytes = sizeof(Kernels),
    .architectures = "the host",
    .kernels = &kKernels,
    .count = count,
    .describe = describe,
    .use = use,
    .make_stream = make_stream,
    .end_stream = end_stream,
    .make_event = make_event,
    .end_event = end_event,
    .record = record,
    .wait = wait,
    .block = block,
    .failure = failure,
    .allocate = allocate,
    .release = release,
    .allocate_host = allocate,
    .release_host = release,
    .granularity = [](std::int64_t*) { return no_mapping(); },
    .reserve = [](std::int64_t, void**) { return no_mapping(); },
    .free_range = [](void*, std::int64_t) { return no_mapping(); },
    .map = [](void*, std::int64_t, bool*) { return no_mapping(); },
    .unmap = [](void*, std::int64_t) { return no_mapping(); },
    .memory_info = [](std::int64_t* free_bytes, std::int64_t* total_bytes) -> DriverError {
      *free_bytes = *total_bytes = std::int64_t{1} << 34;
      return nullptr;
    },
    .copy = copy,
    .fill = fill,
    .make_timer = make_event,
    .elapsed = elapsed,
    .delay = delay,
    .push_range = [](const char*) {},
    .pop_range = [] {},
};

}  // namespace
}  // namespace tessera::kernels::cuda::emulator

extern "C" [[gnu::visibility("default")]] const tessera::Driver* tessera_driver(
    std::uint32_t version) {
  using tessera::kernels::cuda::emulator::kDriver;
  return version == kDriver.version ? &kDriver : nullptr;
}
