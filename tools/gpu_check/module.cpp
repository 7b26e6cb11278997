#include "tools/gpu_check/module.hpp"

#include <dlfcn.h>

#include "kernels/kernel_table.hpp"
#include "tessera/base/error.hpp"

namespace tessera::gpu_check {

void expect(DriverError error, const char* what) {
  if (error) throw DeviceError(concat(what, ": ", error));
}

kernel_test::Target open_module(const std::string& path, int device) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw DeviceError(dlerror());
  const auto entry = reinterpret_cast<DriverEntry>(dlsym(library, kDriverSymbol));
  if (!entry) throw DeviceError(concat("'", path, "' is no driver module"));
  const Driver* const driver = entry(kDriverVersion);
  if (!driver || driver->driver_bytes != sizeof(Driver) ||
      driver->kernels_layout != kernels::kKernelsLayout)
    throw DeviceError(concat("'", path, "' was built from another version; build it again"));
  kernel_test::Target target{.driver = driver, .workspace_bytes = std::int64_t{32} << 20};
  std::int32_t count = 0;
  DriverDevice described{};
  expect(driver->count(&count), "devices");
  expect(driver->describe(device, &described), "device");
  expect(driver->use(device), "device");
  expect(driver->make_stream(0, &target.stream), "stream");
  expect(driver->allocate(target.workspace_bytes, &target.workspace), "workspace");
  if (!target.workspace) throw OutOfMemory("the device has no 32 MiB for a workspace");
  return target;
}

}  // namespace tessera::gpu_check
