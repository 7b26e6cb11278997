// A driver module for tests that has nothing to offer: its devices refuse in the words that a test
// gives it, as a real module does where there is no GPU or none for its kernels.
#include "kernels/kernel_table.hpp"
#include "tessera/detail/device/driver.hpp"

namespace tessera {
namespace {

DriverError g_count = nullptr, g_describe = nullptr;

constexpr Driver kDriver = [] {
  Driver driver{};
  driver.version = kDriverVersion;
  driver.driver_bytes = sizeof(Driver);
  driver.kernels_layout = kernels::kKernelsLayout;
  driver.architectures = "none";
  driver.count = [](std::int32_t* devices) {
    *devices = g_count ? 0 : 1;
    return g_count;
  };
  driver.describe = [](std::int32_t, DriverDevice*) { return g_describe; };
  return driver;
}();

}  // namespace
}  // namespace tessera

extern "C" [[gnu::visibility("default")]] const tessera::Driver* tessera_driver(
    std::uint32_t version) {
  return version == tessera::kDriverVersion ? &tessera::kDriver : nullptr;
}

// What `count` and `describe` say from here on: strings that last, or null.
extern "C" [[gnu::visibility("default")]] void tessera_refuse(const char* count,
                                                              const char* describe) {
  tessera::g_count = count;
  tessera::g_describe = describe;
}
