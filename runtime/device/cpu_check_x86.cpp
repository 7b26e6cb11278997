#include "runtime/device/cpu_check.hpp"

namespace tessera {

std::string missing_cpu_feature(std::string_view arch) {
  const bool v4 = arch == "x86-64-v4", v3 = v4 || arch == "x86-64-v3",
             v2 = v3 || arch == "x86-64-v2";
  __builtin_cpu_init();
  // Every processor with these has the rest of its level (F16C, LZCNT, MOVBE), which not all
  // compilers can ask for.
  if (v2 && !__builtin_cpu_supports("sse4.2")) return "SSE4.2";
  if (v2 && !__builtin_cpu_supports("popcnt")) return "POPCNT";
  if (v3 && !__builtin_cpu_supports("avx")) return "AVX";
  if (v3 && !__builtin_cpu_supports("avx2")) return "AVX2";
  if (v3 && !__builtin_cpu_supports("bmi")) return "BMI1";
  if (v3 && !__builtin_cpu_supports("bmi2")) return "BMI2";
  if (v3 && !__builtin_cpu_supports("fma")) return "FMA";
  if (v4 && !__builtin_cpu_supports("avx512f")) return "AVX-512F";
  if (v4 && !__builtin_cpu_supports("avx512bw")) return "AVX-512BW";
  if (v4 && !__builtin_cpu_supports("avx512vl")) return "AVX-512VL";
  return {};
}

std::string_view kernel_arch() { return TESSERA_KERNEL_ARCH; }

}  // namespace tessera
