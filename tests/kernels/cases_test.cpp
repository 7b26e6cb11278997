// Every case that holds kernels to double precision, on the CPU's: on one thread and on three, with
// the same bits.
#include "tests/kernels/case.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

TEST_CASE("the CPU's kernels are within rounding of double precision", "[kernels]") {
  tessera::WorkerPool workers(3);
  const kernel_test::Target cpu{.driver = nullptr, .workers = &workers};
  const unsigned seed = tessera::testing::fresh_seed();
  for (const kernel_test::NamedCase& named : kernel_test::all_cases()) {
    DYNAMIC_SECTION(named.op << ": " << named.name) {
      kernel_test::Case c(cpu, seed);
      std::string failure;
      try {
        named.body(c);
      } catch (const kernel_test::CaseFailure& e) {
        failure = e.what();
      }
      INFO(failure);
      REQUIRE(failure.empty());
      REQUIRE(c.compared() > 0);
    }
  }
}
