// The double of NCCL names the rule that a call breaks.
#include "tests/comm/nccl_ranks.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("the double reports the version that it is told") {
  int version = 0;
  CHECK(ncclGetVersion(&version) == ncclSuccess);
  CHECK(version == NCCL_VERSION_CODE);
  for (const int told : {22604, 22705, 22809}) {
    const Setting setting("version", told, NCCL_VERSION_CODE);
    CHECK(ncclGetVersion(&version) == ncclSuccess);
    CHECK(version == told);
  }
  CHECK_FALSE(tessera_nccl_double_set("no such name", 1));
}
