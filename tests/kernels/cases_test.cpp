// Every case that holds kernels to double precision, on the CPU's: on one thread and on three, with
// the same bits.
#include "tests/cuda/case.hpp"
#include "tests/support/catch.hpp"

using namespace cuda_test;

TEST_CASE("the CPU's kernels are within rounding of double precision", "[kernels]") {
  WorkerPool workers(3);
  const Target cpu{.driver = nullptr, .workers = &workers};
  const unsigned seed = std::random_device{}();
  for (const NamedCase& named : all_cases()) {
    DYNAMIC_SECTION(named.op << ": " << named.name) {
      Case c(cpu, seed);
      std::string failure;
      try {
        named.body(c);
      } catch (const CaseFailure& e) {
        failure = e.what();
      }
      INFO(failure);
      REQUIRE(failure.empty());
      REQUIRE(c.compared() > 0);
    }
  }
}
