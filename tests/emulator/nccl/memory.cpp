// Memory that NCCL allocates, and windows over it.
#include <dlfcn.h>

#include <utility>

#include "tessera/detail/device/driver.hpp"
#include "tests/emulator/nccl/state.hpp"
#include "tests/emulator/nccl/steps.hpp"

namespace tessera::nccl_double {
namespace {

constexpr std::size_t kAlignment = NCCL_WIN_REQUIRED_ALIGNMENT;

std::mutex pieces_mutex;  // of both
std::map<const std::byte*, std::size_t>& pieces() {
  static std::map<const std::byte*, std::size_t> all;
  return all;
}
struct Window {
  const Comm* comm;
  const std::byte* memory;
  std::size_t bytes;
  std::uint64_t number;  // of those of its communicator
};
std::map<ncclWindow_t, Window>& windows() {
  static std::map<ncclWindow_t, Window> all;
  return all;
}

// A hash of which windows of the communicator are there: where NCCL maps the next one depends on
// that, and has to be the same on all ranks.
int left_of(const Comm& comm) {
  const std::lock_guard lock(pieces_mutex);
  std::uint64_t hash = 0;
  for (const auto& [window, of] : windows())
    if (of.comm == &comm) hash += (of.number + 1) * 0x9e3779b97f4a7c15u;
  return static_cast<int>(hash >> 33);
}

const Driver* driver() {
  void* const module = emulated_module();
  if (!module) return nullptr;
  const auto entry = reinterpret_cast<DriverEntry>(dlsym(module, kDriverSymbol));
  return entry ? entry(kDriverVersion) : nullptr;
}

// Whether all of it lies in one piece of ncclMemAlloc.
bool is_ours(const void* memory, std::size_t bytes) {
  const std::lock_guard lock(pieces_mutex);
  const auto* const at = static_cast<const std::byte*>(memory);
  const auto next = pieces().upper_bound(at);
  if (next == pieces().begin()) return false;
  const auto& [begin, size] = *std::prev(next);
  return at + bytes <= begin + size;
}

}  // namespace

ncclResult_t take_memory(Comm& comm) {
  const Driver* const gpu = driver();
  const std::int64_t bytes = comm.ctas * kBytesOfCta;
  gpu->use(comm.device);
  const char* const error = gpu->allocate(bytes, &comm.memory);
  if (error || !comm.memory)
    return fail(ncclUnhandledCudaError, std::string("a communicator has no memory: ") +
                                            (error ? error : "the GPU has no more"));
  totals().held += bytes;
  return ncclSuccess;
}

void give_memory(Comm& comm) {
  if (!comm.memory) return;
  driver()->release(std::exchange(comm.memory, nullptr));
  totals().held -= comm.ctas * kBytesOfCta;
}

void end_windows(const Comm& comm) {
  const std::lock_guard lock(pieces_mutex);
  totals().windows -= static_cast<long long>(
      std::erase_if(windows(), [&](const auto& one) { return one.second.comm == &comm; }));
}

std::uint64_t place_of(const Call& call, const Comm& comm, std::size_t element_bytes) {
  const bool gathers = call.kind == Kind::all_gather, scatters = call.kind == Kind::reduce_scatter;
  if (!gathers && !scatters && call.kind != Kind::all_reduce) return 0;
  const std::size_t bytes = call.count * element_bytes,
                    all = bytes * static_cast<std::size_t>(comm.ranks);
  const std::lock_guard lock(pieces_mutex);
  const auto place = [&](const void* memory, std::size_t size, bool is_of_peers) {
    const auto* const at = static_cast<const std::byte*>(memory);
    for (const auto& [window, of] : windows())
      if (of.comm == &comm && of.memory <= at && at + size <= of.memory + of.bytes)
        return (of.number + 1) << 40 |
               (is_of_peers ? static_cast<std::uint64_t>(at - of.memory) : 0);
    return std::uint64_t{0};
  };
  const std::uint64_t from = place(call.send, scatters ? all : bytes, !gathers),
                      to = place(call.recv, gathers ? all : bytes, !scatters);
  return from && to ? from * 0x9e3779b97f4a7c15u + to : 0;
}

}  // namespace tessera::nccl_double

using namespace tessera::nccl_double;

extern "C" {

ncclResult_t ncclMemAlloc(void** out, std::size_t bytes) {
  if (const ncclResult_t asked = refused("ncclMemAlloc"); asked != ncclSuccess) return asked;
  if (!out || bytes == 0) return fail(ncclInvalidArgument, "ncclMemAlloc: no pointer, or no bytes");
  *out = nullptr;
  const tessera::Driver* const gpu = driver();
  if (!gpu) return fail(ncclUnhandledCudaError, "ncclMemAlloc: no emulated GPU's module is loaded");
  std::int64_t granule = 0;
  gpu->granularity(&granule);
  const std::int64_t whole = (static_cast<std::int64_t>(bytes) + granule - 1) / granule * granule;
  void* range = nullptr;
  bool is_mapped = false;
  if (const char* const error = gpu->reserve(whole, &range))
    return fail(ncclUnhandledCudaError, std::string("ncclMemAlloc: ") + error);
  const char* const error = gpu->map(range, whole, &is_mapped);
  if (error || !is_mapped) {
    gpu->free_range(range, whole);
    return fail(ncclUnhandledCudaError,
                std::string("ncclMemAlloc: ") + (error ? error : "the GPU has no more memory"));
  }
  const std::lock_guard lock(pieces_mutex);
  pieces()[static_cast<std::byte*>(range)] = static_cast<std::size_t>(whole);
  totals().bytes += whole;
  *out = range;
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void* memory) {
  if (const ncclResult_t asked = refused("ncclMemFree"); asked != ncclSuccess) return asked;
  if (!memory) return ncclSuccess;
  const std::lock_guard lock(pieces_mutex);
  const auto found = pieces().find(static_cast<std::byte*>(memory));
  if (found == pieces().end())
    return fail(ncclInvalidArgument,
                "ncclMemFree: this is not the begin of memory of ncclMemAlloc");
  const auto bytes = static_cast<std::int64_t>(found->second);
  for (const auto& [window, of] : windows())
    if (of.memory >= found->first && of.memory < found->first + found->second)
      return fail(ncclInvalidUsage, "ncclMemFree: a window over this memory is still registered");
  driver()->unmap(memory, bytes);
  driver()->free_range(memory, bytes);
  totals().bytes -= bytes;
  pieces().erase(found);
  return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void* memory, std::size_t bytes,
                                    ncclWindow_t* out, int flags) {
  ncclResult_t why = ncclSuccess;
  const std::shared_ptr<Comm> comm = ready(handle, "ncclCommWindowRegister", &why);
  if (!comm) return in_group(why);
  const auto wrong = [&](ncclResult_t result, const char* line) {
    return in_group(fail(result, std::string("ncclCommWindowRegister: ") + line));
  };
  if (settings().version < 22700) return wrong(ncclInvalidUsage, "NCCL has it from 2.27 on");
  if (!out || !memory || bytes == 0)
    return wrong(ncclInvalidArgument, "a null pointer, or no bytes");
  *out = nullptr;
  if (reinterpret_cast<std::uintptr_t>(memory) % kAlignment != 0)
    return wrong(ncclInvalidArgument, "the memory is not aligned to 4096 bytes");
  if (!is_ours(memory, bytes))
    return wrong(ncclInvalidArgument, "the memory is not that of one ncclMemAlloc");
  const auto meeting =
      std::make_shared<Meeting>(*comm, Step{kRegister, left_of(*comm), 0, flags, bytes});
  return submit(comm, [=] {
    const ncclResult_t met = meeting->poll();
    if (met != ncclSuccess || settings().null_windows) return met;
    static std::uintptr_t made = 0;
    const std::lock_guard lock(pieces_mutex);
    *out = reinterpret_cast<ncclWindow_t>(++made << 12 | 0x800);
    windows()[*out] = {comm.get(), static_cast<const std::byte*>(memory), bytes,
                       comm->windows_made++};
    ++totals().windows;
    return ncclSuccess;
  });
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t window) {
  ncclResult_t why = ncclSuccess;
  if (!window) return ncclSuccess;
  const std::shared_ptr<Comm> comm = ready(handle, "ncclCommWindowDeregister", &why);
  if (!comm) return in_group(why);
  const std::lock_guard lock(pieces_mutex);
  const auto found = windows().find(window);
  if (found == windows().end() || found->second.comm != comm.get())
    return in_group(fail(ncclInvalidArgument,
                         "ncclCommWindowDeregister: this is no window of this communicator"));
  windows().erase(found);
  --totals().windows;
  return ncclSuccess;
}

}  // extern "C"
