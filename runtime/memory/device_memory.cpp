// Memory of a GPU, from the driver: the pool's segments, and what lies outside the pool.
#include <new>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/detail/device/driver.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera {
namespace {

// True where nothing failed. The caller can't throw: what failed is in the log.
bool fine(DriverError error) {
  if (error) log(LogLevel::error, concat("cuda: memory: ", error));
  return error == nullptr;
}

using Allocate = DriverError (*)(std::int64_t bytes, void** data);
using Release = DriverError (*)(void* data);

// Of the device, or pinned.
class DriverPieces final : public Upstream {
 public:
  DriverPieces(const DeviceContext& context, Allocate Driver::* allocate, Release Driver::* release)
      : context_(context), allocate_(allocate), release_(release) {}

  std::byte* allocate(std::int64_t bytes) noexcept override {
    void* data = nullptr;
    fine((context_.acting_driver().*allocate_)(bytes, &data));
    return static_cast<std::byte*>(data);
  }
  void release(std::byte* data, std::int64_t) noexcept override {
    fine((context_.acting_driver().*release_)(data));
  }
  bool resize(std::byte*, std::int64_t, std::int64_t) noexcept override { return false; }

 private:
  const DeviceContext& context_;
  Allocate Driver::* const allocate_;
  Release Driver::* const release_;
};

// A range of addresses for each segment; memory is mapped behind its beginning, in pieces of one
// size, for only whole pieces can be given back.
class DeviceRanges final : public Upstream {
 public:
  explicit DeviceRanges(const DeviceContext& context) : context_(context) {
    std::int64_t granularity = 0;
    const DriverError error = context.acting_driver().granularity(&granularity);
    if (error || kSegmentBytes % granularity != 0)
      throw DeviceError(
          concat("cuda: memory can't be mapped: ",
                 error ? std::string(error) : concat("its pages are ", granularity, " bytes"),
                 "; use CudaMemory::pieces"));
  }

  std::byte* allocate(std::int64_t bytes) noexcept override {
    const Driver& driver = context_.acting_driver();
    void* range = nullptr;
    if (!fine(driver.reserve(range_bytes(bytes), &range))) return nullptr;
    auto* const data = static_cast<std::byte*>(range);
    if (resize(data, 0, bytes)) return data;
    fine(driver.free_range(range, range_bytes(bytes)));
    return nullptr;
  }
  void release(std::byte* data, std::int64_t bytes) noexcept override {
    const Driver& driver = context_.acting_driver();
    fine(driver.unmap(data, bytes));
    fine(driver.free_range(data, range_bytes(bytes)));
  }
  bool resize(std::byte* data, std::int64_t bytes, std::int64_t new_bytes) noexcept override {
    if (bytes > 0 && range_bytes(bytes) != range_bytes(new_bytes)) return false;
    const Driver& driver = context_.acting_driver();
    if (new_bytes < bytes) return fine(driver.unmap(data + new_bytes, bytes - new_bytes));
    for (std::int64_t at = bytes; at < new_bytes; at += kSegmentBytes) {
      bool mapped = false;
      if (fine(driver.map(data + at, kSegmentBytes, &mapped)) && mapped) continue;
      if (at > bytes) fine(driver.unmap(data + bytes, at - bytes));
      return false;
    }
    return true;
  }

 private:
  const DeviceContext& context_;
};

std::shared_ptr<std::byte> outside_pool(const DeviceContext& context, std::int64_t bytes,
                                        Allocate Driver::* allocate, Release Driver::* release,
                                        const char* where) {
  const Driver* const driver = context.driver();
  if (!driver) {
    std::shared_ptr<std::byte[]> plain(new (std::nothrow)
                                           std::byte[static_cast<std::size_t>(bytes)]);
    if (!plain)
      throw OutOfMemory(
          concat("the system has no ", bytes, " bytes; make the batch or the model smaller"));
    return {plain, plain.get()};
  }
  void* data = nullptr;
  const DriverError error = (context.acting_driver().*allocate)(bytes, &data);
  if (!data)
    throw OutOfMemory(concat("cuda: ", where, " has no ", bytes, " bytes",
                             error ? concat(": ", error) : std::string(),
                             "; end what else uses it, or make the batch or the model smaller"));
  return {static_cast<std::byte*>(data),
          [driver, release](std::byte* p) { fine((driver->*release)(p)); }};
}

}  // namespace

std::unique_ptr<Upstream> device_memory(const DeviceContext& context, CudaMemory kind) {
  if (kind == CudaMemory::mapped) return std::make_unique<DeviceRanges>(context);
  return std::make_unique<DriverPieces>(context, &Driver::allocate, &Driver::release);
}
std::unique_ptr<Upstream> pinned_memory(const DeviceContext& context) {
  return std::make_unique<DriverPieces>(context, &Driver::allocate_host, &Driver::release_host);
}

std::shared_ptr<std::byte> host_memory(const DeviceContext& context, std::int64_t bytes) {
  return outside_pool(context, bytes, &Driver::allocate_host, &Driver::release_host, "the host");
}

std::shared_ptr<std::byte> plain_memory(const DeviceContext& context, std::int64_t bytes) {
  return outside_pool(context, bytes, &Driver::allocate, &Driver::release, "the device");
}

}  // namespace tessera
