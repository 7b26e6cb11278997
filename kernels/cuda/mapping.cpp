#include "kernels/cuda/mapping.hpp"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

#include "kernels/cuda/driver_errors.hpp"
#include "kernels/cuda/libcuda_calls.hpp"

namespace tessera::kernels::cuda {
namespace {

struct Mapping {
  PFN_cuMemGetAllocationGranularity_v10020 granularity;
  PFN_cuMemAddressReserve_v10020 reserve;
  PFN_cuMemAddressFree_v10020 free_range;
  PFN_cuMemCreate_v10020 create;
  PFN_cuMemRelease_v10020 release;
  PFN_cuMemMap_v10020 map;
  PFN_cuMemSetAccess_v10020 set_access;
  PFN_cuMemUnmap_v10020 unmap;
  PFN_cuGetErrorString_v6000 error_string;
  const char* missing;  // the first call that the driver lacks

  Mapping() : missing(nullptr) {
    find("cuMemGetAllocationGranularity", 10020, &granularity);
    find("cuMemAddressReserve", 10020, &reserve);
    find("cuMemAddressFree", 10020, &free_range);
    find("cuMemCreate", 10020, &create);
    find("cuMemRelease", 10020, &release);
    find("cuMemMap", 10020, &map);
    find("cuMemSetAccess", 10020, &set_access);
    find("cuMemUnmap", 10020, &unmap);
    find("cuGetErrorString", 6000, &error_string);
  }

 private:
  template <class F>
  void find(const char* name, unsigned version, F* function) {
    if (!find_call(name, version, function) && !missing) missing = name;
  }
};

// Found at first use; the device's context exists then, since it has been chosen by `use`.
const Mapping& mapping() {
  static const Mapping found;
  return found;
}

using cuda::said;
DriverError said(const char* call, CUresult code) {
  if (code == CUDA_SUCCESS) return nullptr;
  const char* text = nullptr;
  mapping().error_string(code, &text);
  return line("%s: %s", call, text ? text : "unknown error");
}

// Null where this device can map.
DriverError can_map(int* device) {
  if (mapping().missing)
    return line("%s: the NVIDIA driver lacks this function; use memory without mapping",
                mapping().missing);
  return said("cudaGetDevice", cudaGetDevice(device));
}

CUmemAllocationProp on_device(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

// Bit d of [p]: device d reaches memory of device p.
std::array<std::atomic<std::uint64_t>, kMostDevices> g_readers{};

}  // namespace

void note_reader(int device, int peer) {
  g_readers[static_cast<std::size_t>(peer)] |= std::uint64_t{1} << device;
}

DriverError granularity(std::int64_t* bytes) {
  int device = 0;
  if (const DriverError error = can_map(&device)) return error;
  const CUmemAllocationProp properties = on_device(device);
  std::size_t found = 0;
  const DriverError error =
      said("cuMemGetAllocationGranularity",
           mapping().granularity(&found, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  *bytes = static_cast<std::int64_t>(found);
  return error;
}

DriverError reserve(std::int64_t bytes, void** range) {
  int device = 0;
  if (const DriverError error = can_map(&device)) return error;
  CUdeviceptr found = 0;
  const DriverError error = said(
      "cuMemAddressReserve", mapping().reserve(&found, static_cast<std::size_t>(bytes), 0, 0, 0));
  *range = reinterpret_cast<void*>(found);
  return error;
}

DriverError free_range(void* range, std::int64_t bytes) {
  return said("cuMemAddressFree",
              mapping().free_range(address(range), static_cast<std::size_t>(bytes)));
}

// The memory's handle is released at once: it lives as long as it is mapped.
DriverError map(void* at, std::int64_t bytes, bool* mapped) {
  *mapped = false;
  int device = 0;
  if (const DriverError error = can_map(&device)) return error;
  const CUmemAllocationProp properties = on_device(device);
  const auto size = static_cast<std::size_t>(bytes);
  CUmemGenericAllocationHandle memory = 0;
  const CUresult made = mapping().create(&memory, size, &properties, 0);
  if (made == CUDA_ERROR_OUT_OF_MEMORY) return nullptr;
  if (const DriverError error = said("cuMemCreate", made)) return error;
  const CUresult placed = mapping().map(address(at), size, 0, memory, 0);
  mapping().release(memory);
  if (const DriverError error = said("cuMemMap", placed)) return error;
  std::array<CUmemAccessDesc, kMostDevices> access;
  std::size_t devices = 0;
  const std::uint64_t readers =
      device < kMostDevices ? g_readers[static_cast<std::size_t>(device)].load() : 0;
  access[devices++] = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  for (int d = 0; d < kMostDevices; ++d)
    if (d != device && (readers >> d & 1) != 0)
      access[devices++] = {on_device(d).location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const CUresult opened = mapping().set_access(address(at), size, access.data(), devices);
  if (opened != CUDA_SUCCESS) mapping().unmap(address(at), size);
  *mapped = opened == CUDA_SUCCESS;
  return said("cuMemSetAccess", opened);
}

DriverError unmap(void* at, std::int64_t bytes) {
  return said("cuMemUnmap", mapping().unmap(address(at), static_cast<std::size_t>(bytes)));
}

}  // namespace tessera::kernels::cuda
