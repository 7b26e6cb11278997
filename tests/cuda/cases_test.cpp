// Every case that holds kernels to double precision, on the emulated GPU's.
#include "tests/kernels/case.hpp"
#include "tests/support/catch.hpp"

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
  for (const NamedCase& named : all_cases()) {
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
