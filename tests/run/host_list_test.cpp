// Slurm's lists, written out; what is no list, and what would be too long a one.
#include "runtime/run/host_list.hpp"

#include <random>

#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using Catch::Matchers::Contains;

namespace {

using Names = std::vector<std::string>;

Names hosts(const std::string& list) { return expand_hosts("HOSTS", list); }
std::vector<int> counts(const std::string& list) { return expand_counts("TASKS", list); }

}  // namespace

TEST_CASE("a host list is written out in order, with as many digits as its ranges have") {
  CHECK(hosts("n1") == Names{"n1"});
  CHECK(hosts("n[01-03,12]") == Names{"n01", "n02", "n03", "n12"});
  CHECK(hosts("n[8-11]") == Names{"n8", "n9", "n10", "n11"});
  CHECK(hosts("a,b[1-2]c,d-e.f") == Names{"a", "b1c", "b2c", "d-e.f"});
  CHECK(hosts("r[1-2]n[08-09]") == Names{"r1n08", "r1n09", "r2n08", "r2n09"});
  CHECK(hosts("n[007]") == Names{"n007"});
  CHECK(hosts("n[0-65535]").size() == kMostHosts);
}

TEST_CASE("what is no host list is refused, and names variable, value and form") {
  for (const std::string bad :
       {"", ",", "a,", ",a", "a,,b", "n[", "n[]", "n[1", "n[1-", "n[1-]", "n[-1]", "n]", "n[1]]",
        "n[[1]]", "n[a]", "n[1-2-3]", "n[1,]", "n[1234567890]"}) {
    INFO(bad);
    CHECK_THROWS_AS(hosts(bad), DataError);
    CHECK_THROWS_WITH(hosts(bad), Contains(concat("HOSTS='", bad, "'")) && Contains("n[01-08,12]"));
  }
}

TEST_CASE("a range of hosts that runs backwards is refused, and written the other way round") {
  CHECK_THROWS_WITH(hosts("n[03-01]"),
                    "HOSTS='n[03-01]': the range 03-01 runs backwards; write 01-03");
  CHECK_THROWS_AS(hosts("n[2-1]"), DataError);
}

TEST_CASE("a host list of a few bytes becomes no list of millions") {
  for (const std::string huge : {"n[0-65536]", "n[0-999999999]", "a[0-9999]b[0-9999]c[0-9999]",
                                 "n[0-60000],m[0-60000]", "n[1-40000,1-40000]"}) {
    INFO(huge);
    CHECK_THROWS_WITH(hosts(huge), Contains("more than 65536"));
  }
  CHECK_THROWS_AS(hosts(std::string(300, 'n')), DataError);
  CHECK_THROWS_WITH(counts("1(x999999999)"), Contains("more than 65536"));
}

TEST_CASE("tasks a node are written out") {
  CHECK(counts("2") == std::vector<int>{2});
  CHECK(counts("2(x3),1") == std::vector<int>{2, 2, 2, 1});
  for (const std::string bad :
       {"", ",", "2,", "2(", "2(x", "2(x3", "2(3)", "x", "-1", "2 ", "2(x3)1"}) {
    INFO(bad);
    CHECK_THROWS_AS(counts(bad), DataError);
    CHECK_THROWS_WITH(counts(bad), Contains(concat("TASKS='", bad, "'")));
  }
}

TEST_CASE("bytes of a list's own alphabet are a list or an error, never more") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  constexpr std::string_view kAlphabet = "n019[]-,(x)";
  int lists = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::string text(random() % 14, ' ');
    for (char& c : text) c = kAlphabet[random() % kAlphabet.size()];
    Names names;
    try {
      names = hosts(text);
      ++lists;
    } catch (const DataError&) {
      names.clear();
    }
    CHECK(names.size() <= kMostHosts);
    std::size_t tasks = 0;
    try {
      tasks = counts(text).size();
    } catch (const DataError&) {
      tasks = 0;
    }
    CHECK(tasks <= kMostHosts);
  }
  CHECK(lists > 100);
}
