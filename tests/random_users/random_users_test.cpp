// Random users find nothing; and they would find what is wrong.
#include <map>
#include <set>

#include "tests/random_users/expression.hpp"
#include "tests/random_users/users.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Complaints of a share of so many users; after a few it is clear that something is wrong.
void check_users(const User& user, std::uint64_t count) {
  constexpr int kMostComplaints = 5;
  const std::uint64_t first = fresh_seed(), share = std::max<std::uint64_t>(1, count / stride());
  int complaints = 0;
  for (std::uint64_t seed = first; seed < first + share && complaints < kMostComplaints; ++seed) {
    const std::string complaint = user.complaint(seed);
    if (complaint.empty()) continue;
    ++complaints;
    FAIL_CHECK("random_users " << user.name << " --seed " << seed << "\n"
                               << complaint << "\n"
                               << user.describe(seed));
  }
  CHECK(complaints == 0);
}

std::string operation_of(const Line& line) { return line.text.substr(0, line.text.find(' ')); }

}  // namespace

// A quick run takes a fortieth of these, about 2 s of computing each.
TEST_CASE("expressions of operations have the values and gradients of double precision",
          "[many_users]") {
  check_users(kUsers[0], 400000);
}
TEST_CASE("state of random modules goes from any number of ranks to any other",
          "[many_users][threads]") {
  check_users(kUsers[1], 8000);
}
TEST_CASE("collectives in any sequence on any groups give what the ranks' tensors make",
          "[many_users][threads]") {
  check_users(kUsers[2], 40000);
}
TEST_CASE("loaders of any size, world and position give each epoch once", "[many_users][threads]") {
  check_users(kUsers[3], 80000);
}

TEST_CASE("a derivative that is an eighth too large is found, of every operation") {
  const std::set<std::string> flat{"sign", "floor", "round"};  // an eighth of 0 is none
  std::set<std::string> seen, found;
  const std::uint64_t first = fresh_seed();
  INFO("first seed " << first);
  // Each operation stands in one of 200 expressions or more.
  for (std::uint64_t seed = first; seed < first + 20000; ++seed) {
    const Expression e = make_expression(seed);
    for (const Line& line : e.lines) {
      const std::string name = operation_of(line);
      if (!line.run || !line.has_gradient || flat.contains(name)) continue;
      seen.insert(name);
      if (!found.contains(name) && !compare(e, seed, name).complaint.empty()) found.insert(name);
    }
    if (seed > first + 2000 && seen == found) break;
  }
  CHECK(seen.size() > 60);
  CHECK(seen == found);
}

TEST_CASE("most values and gradients of expressions are known to one percent") {
  std::int64_t compared = 0, sharp = 0;
  const std::uint64_t first = fresh_seed();
  INFO("first seed " << first);
  for (std::uint64_t seed = first; seed < first + 1000; ++seed) {
    const Comparison comparison = compare(make_expression(seed), seed);
    compared += comparison.compared;
    sharp += comparison.sharp;
  }
  INFO(sharp << " of " << compared);
  CHECK(compared > 30000);
  CHECK(sharp > compared * 9 / 10);  // of f64 and f32 nearly all, of 16 bits those near the leaves
}
