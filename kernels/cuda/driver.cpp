// The driver table over the CUDA runtime: devices, streams, events, memory, copies, NVTX ranges.
//
// The runtime is linked statically and opens libcuda itself; of libcuda's own calls, mapping and
// batches of copies need a few, which the runtime hands out (libcuda_calls.hpp). Nothing here
// throws, prints or reads the environment. Streams do not synchronise with the legacy default
// stream, events carry no time, and a host that blocks on one sleeps instead of spinning: several
// ranks share the processors.
#include "tessera/detail/device/driver.hpp"

#include <cublasLt.h>
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <nvtx3/nvToolsExt.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "built_for.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/driver_errors.hpp"
#include "kernels/cuda/grid.hpp"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/libcuda_calls.hpp"
#include "kernels/cuda/mapping.hpp"

namespace tessera::kernels::cuda {

namespace {

// 0 where it is refused: the launch that follows says it.
int attribute_of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess)
    cudaGetLastError();
  return value;
}

}  // namespace

int multiprocessors() { return std::max(attribute_of_device(cudaDevAttrMultiProcessorCount), 1); }
std::size_t most_shared_bytes() {
  const int bytes = attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return std::max(static_cast<std::size_t>(bytes), kSharedBytes);
}

bool has_warpgroup_products() {
  if (std::string_view(kArchitectures).find("sm_90") == std::string_view::npos) return false;
  return attribute_of_device(cudaDevAttrComputeCapabilityMajor) == 9;
}

const void* image_probe();                                                // image.cu
cudaError_t launch_delay(std::int64_t duration_ns, cudaStream_t stream);  // delay.cu

namespace {

// Memory that is not there is no error: *data stays null.
DriverError memory_or_none(const char* call, cudaError_t code, void** data) {
  if (code == cudaSuccess) return nullptr;
  *data = nullptr;
  if (code != cudaErrorMemoryAllocation) return said(call, code);
  cudaGetLastError();
  return nullptr;
}

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

// --- devices

DriverError count(std::int32_t* devices) {
  int n = 0;
  const DriverError error = said("cudaGetDeviceCount", cudaGetDeviceCount(&n));
  *devices = error ? 0 : n;
  return error;
}

// Of the kernel module, which is what users install: "580.65.06".
void driver_release(char* out, std::size_t size_bytes) {
  std::snprintf(out, size_bytes, "?");
  if (std::FILE* file = std::fopen("/sys/module/nvidia/version", "r")) {
    if (std::fgets(out, static_cast<int>(size_bytes), file)) out[std::strcspn(out, "\n")] = 0;
    std::fclose(file);
  }
}

thread_local std::int32_t g_device = -1;  // the calling thread's, once it has used one

DriverError use(std::int32_t device) {
  if (device == g_device) return nullptr;
  const DriverError error = said("cudaSetDevice", cudaSetDevice(device));
  g_device = error ? -1 : device;
  return error;
}

// A thread that has used no device stays on this one: to go back to GPU 0, where threads begin,
// would make a context there.
DriverError has_kernels(std::int32_t device, const cudaDeviceProp& properties) {
  const std::int32_t before = g_device;
  cudaFuncAttributes attributes{};
  if (const DriverError error = use(device)) return error;
  const cudaError_t loaded = cudaFuncGetAttributes(&attributes, image_probe());
  if (before >= 0)
    if (const DriverError error = use(before)) return error;
  if (loaded == cudaErrorNoKernelImageForDevice || loaded == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    return line(
        "%s has compute capability %d.%d, the CUDA module was built for %s; build the module with "
        "-Dgpu_archs=sm_%d%d",
        properties.name, properties.major, properties.minor, kArchitectures, properties.major,
        properties.minor);
  }
  return said("cudaFuncGetAttributes", loaded);
}

DriverError describe(std::int32_t device, DriverDevice* out) {
  cudaDeviceProp properties{};
  if (const DriverError error =
          said("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, device)))
    return error;
  int clock_khz = 0, bus_bits = 0, driver = 0;
  cudaDeviceGetAttribute(&clock_khz, cudaDevAttrMemoryClockRate, device);
  cudaDeviceGetAttribute(&bus_bits, cudaDevAttrGlobalMemoryBusWidth, device);
  cudaDriverGetVersion(&driver);
  *out = {};
  std::snprintf(out->name, sizeof out->name, "%.95s", properties.name);
  out->major = properties.major;
  out->minor = properties.minor;
  out->multiprocessors = properties.multiProcessorCount;
  out->memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  out->bytes_per_second = 2e3 * clock_khz * bus_bits / 8;  // two transfers a cycle
  char release[32];
  driver_release(release, sizeof release);
  const auto* const id = reinterpret_cast<const unsigned char*>(properties.uuid.bytes);
  char* at = out->uuid + std::snprintf(out->uuid, sizeof out->uuid, "GPU-");
  for (int i = 0; i < 16; ++i) at += std::snprintf(at, 3, "%02x", id[i]);
  out->cuda_version = driver;
  const std::size_t blas = cublasLtGetVersion();
  std::snprintf(out->versions, sizeof out->versions,
                "driver %s (CUDA %d.%d), runtime %d.%d, cuBLASLt %zu.%zu.%zu", release,
                driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
                CUDART_VERSION % 1000 / 10, blas / 10000, blas / 100 % 100, blas % 100);
  return has_kernels(device, properties);
}

DriverError reach(std::int32_t device, std::int32_t peer, bool* reaches) {
  *reaches = false;
  if (std::max(device, peer) >= kMostDevices) return nullptr;
  int can = 0;
  if (const DriverError error =
          said("cudaDeviceCanAccessPeer", cudaDeviceCanAccessPeer(&can, device, peer)))
    return error;
  if (!can) return nullptr;
  if (const DriverError error = use(device)) return error;
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(peer, 0);
  *reaches = enabled == cudaSuccess || enabled == cudaErrorPeerAccessAlreadyEnabled;
  if (*reaches) note_reader(device, peer);
  if (*reaches || enabled == cudaErrorTooManyPeers) {
    cudaGetLastError();
    return nullptr;
  }
  return said("cudaDeviceEnablePeerAccess", enabled);
}

// --- streams and events

DriverError make_stream(std::int32_t priority, void** stream) {
  int least = 0, greatest = 0;  // CUDA's numbers fall with urgency
  if (const DriverError error = said("cudaDeviceGetStreamPriorityRange",
                                     cudaDeviceGetStreamPriorityRange(&least, &greatest)))
    return error;
  cudaStream_t made = nullptr;
  const DriverError error =
      said("cudaStreamCreate", cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking,
                                                            std::min(greatest + priority, least)));
  *stream = made;
  return error;
}
DriverError end_stream(void* stream) {
  return said("cudaStreamDestroy", cudaStreamDestroy(stream_of(stream)));
}

DriverError make_event(void** event) {
  cudaEvent_t made = nullptr;
  const DriverError error =
      said("cudaEventCreate",
           cudaEventCreateWithFlags(&made, cudaEventDisableTiming | cudaEventBlockingSync));
  *event = made;
  return error;
}
DriverError end_event(void* event) {
  return said("cudaEventDestroy", cudaEventDestroy(event_of(event)));
}
DriverError record(void* event, void* stream) {
  return said("cudaEventRecord", cudaEventRecord(event_of(event), stream_of(stream)));
}
DriverError wait(void* stream, void* event) {
  return said("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_of(stream), event_of(event), 0));
}
DriverError block(void* event) {
  return said("cudaEventSynchronize", cudaEventSynchronize(event_of(event)));
}
DriverError query(void* event, bool* is_reached) {
  const cudaError_t state = cudaEventQuery(event_of(event));
  *is_reached = state == cudaSuccess;
  return state == cudaErrorNotReady ? nullptr : said("cudaEventQuery", state);
}
DriverError failure() { return said("a CUDA kernel", cudaGetLastError()); }

// --- memory

DriverError allocate(std::int64_t bytes, void** data) {
  return memory_or_none("cudaMalloc", cudaMalloc(data, static_cast<std::size_t>(bytes)), data);
}
DriverError release(void* data) { return said("cudaFree", cudaFree(data)); }
DriverError allocate_host(std::int64_t bytes, void** data) {
  return memory_or_none("cudaHostAlloc",
                        cudaHostAlloc(data, static_cast<std::size_t>(bytes), cudaHostAllocPortable),
                        data);
}
DriverError release_host(void* data) { return said("cudaFreeHost", cudaFreeHost(data)); }

DriverError memory_info(std::int64_t* free_bytes, std::int64_t* total_bytes) {
  std::size_t unused = 0, total = 0;
  const DriverError error = said("cudaMemGetInfo", cudaMemGetInfo(&unused, &total));
  *free_bytes = static_cast<std::int64_t>(unused);
  *total_bytes = static_cast<std::int64_t>(total);
  return error;
}

// --- queued on a stream

DriverError copy(void* to, const void* from, std::int64_t bytes, void* stream) {
  return said("cudaMemcpyAsync", cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes),
                                                 cudaMemcpyDefault, stream_of(stream)));
}

// The driver's copies of a batch in one call, from 12.8 on; null where it has none.
PFN_cuMemcpyBatchAsync_v12080 batch_call() {
  static const PFN_cuMemcpyBatchAsync_v12080 found = [] {
    PFN_cuMemcpyBatchAsync_v12080 call = nullptr;
    find_call("cuMemcpyBatchAsync", 12080, &call);
    return call;
  }();
  return found;
}

// A batch can't be captured.
bool is_captured(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream_of(stream), &status) != cudaSuccess ||
         status != cudaStreamCaptureStatusNone;
}

// What the batch refuses goes copy by copy, which says why: a copy may be done twice.
DriverError copy_all(const DriverCopy* copies, std::int32_t count, void* stream) {
  constexpr std::int32_t kAtOnce = 128;
  for (std::int32_t first = 0; first < count; first += kAtOnce) {
    std::array<CUdeviceptr, kAtOnce> to, from;
    std::array<std::size_t, kAtOnce> bytes;
    const std::int32_t n = std::min(kAtOnce, count - first);
    for (std::int32_t i = 0; i < n; ++i) {
      const DriverCopy& c = copies[first + i];
      const auto at = static_cast<std::size_t>(i);
      to[at] = address(c.to), from[at] = address(c.from);
      bytes[at] = static_cast<std::size_t>(c.bytes);
    }
    CUmemcpyAttributes attributes{};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    std::size_t of_first = 0, failed = 0;
    if (n > 1 && batch_call() && !is_captured(stream) &&
        batch_call()(to.data(), from.data(), bytes.data(), static_cast<std::size_t>(n), &attributes,
                     &of_first, 1, &failed, stream_of(stream)) == CUDA_SUCCESS)
      continue;
    for (std::int32_t i = first; i < first + n; ++i)
      if (const DriverError error = copy(copies[i].to, copies[i].from, copies[i].bytes, stream))
        return error;
  }
  return nullptr;
}
DriverError fill(void* to, std::uint8_t byte, std::int64_t bytes, void* stream) {
  return said("cudaMemsetAsync",
              cudaMemsetAsync(to, byte, static_cast<std::size_t>(bytes), stream_of(stream)));
}
DriverError call_host(void (*function)(void* data), void* data, void* stream) {
  return said("cudaLaunchHostFunc", cudaLaunchHostFunc(stream_of(stream), function, data));
}

// --- graphs

// Memory may be taken meanwhile: that is no work of a stream.
DriverError begin_capture(void* stream) {
  return said("cudaStreamBeginCapture",
              cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeRelaxed));
}
DriverError end_capture(void* stream, void** graph) {
  *graph = nullptr;
  cudaGraph_t captured = nullptr;
  if (const DriverError error =
          said("cudaStreamEndCapture", cudaStreamEndCapture(stream_of(stream), &captured)))
    return error;
  cudaGraphExec_t made = nullptr;
  const DriverError error = said("cudaGraphInstantiate", cudaGraphInstantiate(&made, captured, 0));
  cudaGraphDestroy(captured);
  *graph = made;
  return error;
}
DriverError launch_graph(void* graph, void* stream) {
  return said("cudaGraphLaunch",
              cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream)));
}
DriverError end_graph(void* graph) {
  return said("cudaGraphExecDestroy", cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
}

// --- for measurements and tests

DriverError make_timer(void** event) {
  cudaEvent_t made = nullptr;
  const DriverError error =
      said("cudaEventCreate", cudaEventCreateWithFlags(&made, cudaEventBlockingSync));
  *event = made;
  return error;
}
DriverError elapsed(void* from, void* to, double* seconds) {
  float milliseconds = 0;
  const DriverError error = said("cudaEventElapsedTime",
                                 cudaEventElapsedTime(&milliseconds, event_of(from), event_of(to)));
  *seconds = 1e-3 * static_cast<double>(milliseconds);
  return error;
}
DriverError delay(std::int64_t nanoseconds, void* stream) {
  return said("a delay", launch_delay(nanoseconds, stream_of(stream)));
}

void push_range(const char* name) { nvtxRangePushA(name); }
void pop_range() { nvtxRangePop(); }

constexpr Driver kDriver = {
    .version = kDriverVersion,
    .driver_bytes = sizeof(Driver),
    .kernels_layout = kKernelsLayout,
    .architectures = kArchitectures,
    .kernels = &kKernels,
    .count = count,
    .describe = describe,
    .use = use,
    .reach = reach,
    .make_stream = make_stream,
    .end_stream = end_stream,
    .make_event = make_event,
    .end_event = end_event,
    .record = record,
    .wait = wait,
    .block = block,
    .query = query,
    .failure = failure,
    .allocate = allocate,
    .release = release,
    .allocate_host = allocate_host,
    .release_host = release_host,
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
    .make_timer = make_timer,
    .elapsed = elapsed,
    .delay = delay,
    .push_range = push_range,
    .pop_range = pop_range,
};

}  // namespace
}  // namespace tessera::kernels::cuda

extern "C" __attribute__((visibility("default"))) const tessera::Driver* tessera_driver(
    std::uint32_t version) {
  return version == tessera::kDriverVersion ? &tessera::kernels::cuda::kDriver : nullptr;
}
