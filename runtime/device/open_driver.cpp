#include "runtime/device/open_driver.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <filesystem>
#include <vector>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

constexpr const char* kModule = "libtessera-cuda.so";
constexpr const char* kOrCpu = "or stay on the CPU (--device=cpu)";

// Where this code lies: the shared library, or the program that it is linked into.
std::filesystem::path own_folder() {
  Dl_info info{};
  std::error_code ignored;
  std::filesystem::path file;
  if (dladdr(reinterpret_cast<const void*>(&find_module), &info) != 0 && info.dli_fname)
    file = std::filesystem::canonical(info.dli_fname, ignored);
  if (file.empty()) file = std::filesystem::read_symlink("/proc/self/exe", ignored);
  return file.parent_path();
}

}  // namespace

std::string find_module(const std::string& name, const std::string& build_folder,
                        std::string& looked) {
  const std::filesystem::path folder = own_folder();
  std::vector<std::filesystem::path> subs = {".", "../lib", "../lib64", build_folder,
                                             "../" + build_folder};
  std::error_code ignored;  // Debian installs libraries into lib/x86_64-linux-gnu and its like
  for (const auto& entry : std::filesystem::directory_iterator(folder / "../lib", ignored))
    if (entry.path().filename().string().ends_with("-linux-gnu")) subs.push_back(entry.path());
  for (const std::filesystem::path& sub : subs) {
    const std::filesystem::path file = (folder / sub / name).lexically_normal();
    if (std::filesystem::exists(file, ignored)) return file.string();
    looked += concat(looked.empty() ? "" : ", ", file.parent_path().string());
  }
  return name;
}

namespace {

void* load(const std::string& module) {
  std::string looked;
  const std::string file = module.empty() ? find_module(kModule, "kernels/cuda", looked) : module;
  dlerror();
  if (void* const handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE))
    return handle;
  const char* const why = dlerror();
  const bool absent =
      module.empty() ? !looked.empty() && file == kModule : access(file.c_str(), F_OK) != 0;
  if (absent && !module.empty())
    throw DeviceError(concat("Device::cuda: there is no driver module '", file,
                             "'; give the path of ", kModule, ", ", kOrCpu));
  if (absent)
    throw DeviceError(concat("Device::cuda: there is no ", kModule, " in ", looked,
                             " nor where the system looks (", why ? why : "no reason given",
                             "); build Tessera where nvcc is, ", kOrCpu));
  throw DeviceError(concat("Device::cuda: the driver module '", file,
                           "' cannot be loaded: ", why ? why : "no reason given",
                           "; install what it names, or build it anew, ", kOrCpu));
}

const Driver& checked_table(void* handle, const std::string& module, std::uint64_t kernels_layout) {
  const std::string file = module.empty() ? kModule : module;
  const auto entry = reinterpret_cast<DriverEntry>(dlsym(handle, kDriverSymbol));
  if (!entry)
    throw DeviceError(concat("Device::cuda: '", file, "' is no driver module: it has no symbol '",
                             kDriverSymbol, "'; give the path of ", kModule));
  const Driver* const driver = entry(kDriverVersion);
  if (!driver || driver->version != kDriverVersion || driver->driver_bytes != sizeof(Driver) ||
      driver->kernels_layout != kernels_layout)
    throw DeviceError(concat("Device::cuda: '", file,
                             "' was built from another version of Tessera (",
                             "this one wants driver table ", kDriverVersion,
                             "); build library and module together, ", kOrCpu));
  return *driver;
}

// The module's own words have a remedy.
void check(DriverError error) {
  if (error) throw DeviceError(concat("Device::cuda: ", error, ", ", kOrCpu));
}

}  // namespace

const Driver& open_driver(const std::string& module, std::uint64_t kernels_layout) {
  return checked_table(load(module), module, kernels_layout);
}

const Driver& open_driver(const std::string& module, std::uint64_t kernels_layout, int index) {
  const Driver& driver = open_driver(module, kernels_layout);
  std::int32_t devices = 0;
  check(driver.count(&devices));
  if (index >= devices)
    throw DeviceError(
        concat("Device::cuda: index ", index, ", but there ",
               devices == 1 ? "is 1 device" : concat("are ", devices, " devices"),
               devices > 0 ? concat(" (the last is cuda:", devices - 1, ")") : std::string(),
               "; give a smaller index, ", kOrCpu));
  DriverDevice device{};
  check(driver.describe(index, &device));
  check(driver.use(index));
  return driver;
}

}  // namespace tessera
