#include <cstdlib>
#include <set>
#include <string>

#include "tests/support/catch.hpp"
#include "tests/support/share.hpp"

using namespace tessera::testing;

namespace {

// What the environment has while one lives; what it had before, afterwards.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* const old = std::getenv(name)) old_ = old;
    value ? setenv(name, value, 1) : unsetenv(name);
  }
  ~Variable() { old_.empty() ? unsetenv(name_) : setenv(name_, old_.c_str(), 1); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::string old_;
};

}  // namespace

TEST_CASE("seeds are the same for one base, and others for another") {
  std::set<std::uint64_t> seeds;
  for (const char* const base : {"1", "2", "20261129"}) {
    const Variable variable("SEED_BASE", base);
    for (const char* const name : {"a_test.cpp", "b_test.cpp"})
      for (std::uint64_t n = 0; n < 100; ++n) {
        CHECK(derived_seed(name, n) == derived_seed(name, n));
        CHECK(derived_seed(name, n) >> 32 == 0);
        seeds.insert(derived_seed(name, n));
      }
  }
  CHECK(seeds.size() == 600);
}

TEST_CASE("each call of a file has the next of its seeds, unless one is asked for") {
  const Variable one("SEED", nullptr);
  const std::uint64_t first = fresh_seed(), second = fresh_seed();
  CHECK(first == derived_seed("seed_test.cpp", 0));
  CHECK(second == derived_seed("seed_test.cpp", 1));
  const Variable asked("SEED", "7");
  CHECK(fresh_seed() == 7);
}

TEST_CASE("a share of a grid takes the same cells each time") {
  GridShare a, b;
  std::vector<int> cells;
  for (int i = 0; i < 100; ++i) cells.push_back(i);
  const std::vector<int> taken = a.of(cells);
  CHECK(taken == b.of(cells));
  const std::size_t whole = cells.size() / GridShare::stride();  // and of the rest one, or none
  CHECK((taken.size() == whole || taken.size() == whole + 1));
}
