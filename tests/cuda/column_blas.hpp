// A cuBLASLt for tests: the calls that kernels/cuda/blas.cpp makes, by what cuBLASLt's reference
// says of them, multiplying column by column on the host. It refuses what cuBLASLt does not offer,
// and a call whose operands are not what its algorithm was chosen for.
#pragma once

namespace kernel_test {

// Questions to the heuristic so far.
int heuristic_calls();
// Until it is set back, the heuristic knows no algorithm that ends in a bias or a function: they
// are not supported, or, as cuBLASLt says of some, no valid value.
enum class Epilogues { offered, not_supported, invalid };
void set_epilogues(Epilogues epilogues);

}  // namespace kernel_test
