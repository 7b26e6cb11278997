// Whether this processor has what the kernels were built for. Compiled for the baseline, so that
// the answer can be given on a processor that lacks it.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// The first feature of `arch` (a value of -march) that this processor lacks, in words; empty when
// it lacks none that is known here.
std::string missing_cpu_feature(std::string_view arch);

// The -march that kernels/ was built with, empty for the compiler's default.
std::string_view kernel_arch();

}  // namespace tessera
