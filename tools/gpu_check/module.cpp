#include "tools/gpu_check/module.hpp"

#include <dlfcn.h>

#include "kernels/table.hpp"
#include "tessera/base/error.hpp"

namespace tessera::gpu_check {

void expect(DriverError error, const char* what) {
  if (error) throw DeviceError(concat(what, ": ", error));
}

Opened open_module(const std::string& path, int device) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw DeviceError(dlerror());
  const auto entry = reinterpret_cast<DriverEntry>(dlsym(library, kDriverSymbol));
  if (!entry) throw DeviceError(concat("'", path, "' is no driver module"));
  Opened opened;
  opened.driver = entry(kDriverVersion);
  if (!opened.driver || opened.driver->driver_bytes != sizeof(Driver) ||
      opened.driver->kernels_bytes != sizeof(kernels::Kernels))
    throw DeviceError(concat("'", path, "' was built from another version; build it again"));
  std::int32_t count = 0;
  expect(opened.driver->count(&count), "devices");
  expect(opened.driver->describe(device, &opened.device), "device");
  expect(opened.driver->use(device), "device");
  expect(opened.driver->make_stream(0, &opened.stream), "stream");
  expect(opened.driver->allocate(opened.workspace_bytes, &opened.workspace), "workspace");
  return opened;
}

void drain(const Opened& opened) {
  void* event = nullptr;
  expect(opened.driver->make_event(&event), "event");
  expect(opened.driver->record(event, opened.stream), "event");
  expect(opened.driver->block(event), "stream");
  expect(opened.driver->end_event(event), "event");
}

}  // namespace tessera::gpu_check
