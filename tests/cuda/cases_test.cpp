// Every case that holds kernels to double precision, on the emulated GPU's: a share of them where
// all suites run, and under sanitizers, where they take minutes, a fifth of it, others each time.
#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/emulator/control.hpp"
#include "tests/kernels/case.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/share.hpp"

extern "C" const tessera::Driver* tessera_driver(std::uint32_t version);
extern "C" const tessera::kernels::cuda::emulator::Control* tessera_emulator();

using namespace kernel_test;

TEST_CASE("the CUDA kernels, emulated, are within rounding of double precision", "[cuda]") {
  const Driver* driver = tessera_driver(kDriverVersion);
  REQUIRE(driver);
  Target target{.driver = driver};
  REQUIRE(driver->make_stream(0, &target.stream) == nullptr);
  target.workspace_bytes = 1 << 20;
  REQUIRE(driver->allocate(target.workspace_bytes, &target.workspace) == nullptr);
  const unsigned seed = tessera::testing::fresh_seed();
  // Attention multiplies by warpgroups where a GPU has them, by warps elsewhere. cuDNN is asked for
  // short sequences where it has none.
#ifdef TESSERA_HOST_CUDNN
  constexpr bool kHasWarpgroups = false;
#else
  constexpr bool kHasWarpgroups = true;
#endif
  std::vector<std::pair<NamedCase, bool>> cases;
  for (const NamedCase& named : all_cases()) {
    cases.emplace_back(named, kHasWarpgroups);
    if (kHasWarpgroups && std::string_view(named.op).starts_with("attention"))
      cases.emplace_back(named, false);
  }
  tessera::testing::GridShare share;
  const std::uint64_t one_in = std::max<std::uint64_t>(1, tessera::testing::stride() / 40);
  for (std::uint64_t i = tessera::testing::first_place(one_in) - 1; i < cases.size(); i += one_in) {
    if (!share.takes()) continue;
    const auto& [named, by_warpgroups] = cases[i];
    DYNAMIC_SECTION(named.op << ": " << named.name << (by_warpgroups ? "" : ", by warps")) {
      tessera_emulator()->warpgroups(by_warpgroups);
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
  tessera_emulator()->warpgroups(true);
  REQUIRE(driver->end_stream(target.stream) == nullptr);
  REQUIRE(driver->release(target.workspace) == nullptr);
}
