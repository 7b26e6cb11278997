// Every case that holds kernels to double precision, on the emulated GPU's. Under sanitizers, where
// they take minutes, one in five, others each time.
#include "tests/kernels/case.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/share.hpp"

extern "C" const tessera::Driver* tessera_driver(std::uint32_t version);

using namespace kernel_test;

TEST_CASE("the CUDA kernels, emulated, are within rounding of double precision", "[cuda]") {
  const Driver* driver = tessera_driver(kDriverVersion);
  REQUIRE(driver);
  Target target{.driver = driver};
  REQUIRE(driver->make_stream(0, &target.stream) == nullptr);
  target.workspace_bytes = 1 << 20;
  REQUIRE(driver->allocate(target.workspace_bytes, &target.workspace) == nullptr);
  const unsigned seed = std::random_device{}();
  const std::vector<NamedCase>& cases = all_cases();
  const std::uint64_t one_in = std::max<std::uint64_t>(1, tessera::testing::stride() / 40);
  for (std::uint64_t i = tessera::testing::first_place(one_in) - 1; i < cases.size(); i += one_in) {
    const NamedCase& named = cases[i];
    DYNAMIC_SECTION(named.op << ": " << named.name) {
      Case c(target, seed);
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
  REQUIRE(driver->end_stream(target.stream) == nullptr);
  REQUIRE(driver->release(target.workspace) == nullptr);
}
