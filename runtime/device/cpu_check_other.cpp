// The twin of cpu_check_x86.cpp for processors whose levels this library does not choose by itself.
#include "runtime/device/cpu_check.hpp"

namespace tessera {

std::string missing_cpu_feature(std::string_view) { return {}; }

std::string_view kernel_arch() { return TESSERA_KERNEL_ARCH; }

}  // namespace tessera
