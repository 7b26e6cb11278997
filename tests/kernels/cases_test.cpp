// Every case that holds kernels to double precision, on the CPU's: on one thread and on three, with
// the same bits.
#include <map>
#include <set>
#include <string>

#include "tests/kernels/case.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

namespace {

// The CPU's kernels, which say that they were called.
std::set<std::string> called;
template <class Args, tessera::kernels::Kernel<Args> tessera::kernels::Kernels::* kernel>
struct Noted {
  static inline const char* name = nullptr;
  static void call(const Args& args, tessera::Exec& exec) {
    called.insert(name);
    (tessera::kernels::kernels_of(nullptr).*kernel)(args, exec);
  }
};
tessera::kernels::Kernels noted_kernels() {
  using namespace tessera::kernels;
  Kernels table{};
#define TESSERA_KERNEL(kernel, Args)             \
  Noted<Args, &Kernels::kernel>::name = #kernel; \
  table.kernel = &Noted<Args, &Kernels::kernel>::call;
#include "kernels/kernels.def"
  return table;
}

}  // namespace

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

// So that tools/gpu-check may look at four of each through the compute sanitizers, which take
// long.
TEST_CASE("the first three cases of an op call all of its kernels", "[kernels]") {
  const tessera::kernels::Kernels table = noted_kernels();
  tessera::WorkerPool workers(3);
  const kernel_test::Target cpu{.driver = nullptr, .table = &table, .workers = &workers};
  const unsigned seed = tessera::testing::fresh_seed();
  std::map<std::string, int> cases;
  std::map<std::string, std::set<std::string>> of_first, of_all;
  for (const kernel_test::NamedCase& named : kernel_test::all_cases()) {
    called.clear();
    kernel_test::Case c(cpu, seed);
    named.body(c);
    of_all[named.op].insert(called.begin(), called.end());
    if (++cases[named.op] <= 4) of_first[named.op].insert(called.begin(), called.end());
  }
  for (const auto& [op, kernels] : of_all) {
    if (op == "elementwise" || op == "gemm") continue;
    CAPTURE(op);
    CHECK(of_first[op] == kernels);
    CHECK_FALSE(kernels.empty());
  }
}
