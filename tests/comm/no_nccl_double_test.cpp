// A build without NCCL's header has no double of NCCL, and its tests say so.
#include <iostream>

#include "tests/support/catch.hpp"

TEST_CASE("nccl.h is missing, so there is no double of NCCL to test") {
  std::cout << "skipped: no nccl.h (with CUDA's toolkit, or from NVIDIA's packages: libnccl-dev)\n";
  SUCCEED();
}
