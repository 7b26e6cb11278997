// Worlds under the race checker: a race anywhere in them fails the test case.
//
//   run_checked(2, {.threads = 1}, [](World& world) { ... });   // as run_local
//   const RaceCheck check;
//   World world = World::single(check({}));                     // any other world
#pragma once

#include <functional>
#include <memory>

#include "tessera/comm/world.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tests/support/catch.hpp"

namespace tessera::testing {

// Outlives the worlds that it checks. Asserts at its end, on the test's thread.
class RaceCheck {
 public:
  RaceCheck() = default;
  ~RaceCheck() {
    for (const Race& race : checker_->races()) UNSCOPED_INFO(race.to_string());
    CHECK(checker_->race_count() == 0);
  }
  RaceCheck(const RaceCheck&) = delete;
  RaceCheck& operator=(const RaceCheck&) = delete;

  WorldOptions operator()(WorldOptions options) const {
    options.race_checker = checker_;
    return options;
  }

 private:
  std::shared_ptr<RaceChecker> checker_ = RaceChecker::make();
};

inline void run_checked(int ranks, const WorldOptions& options,
                        const std::function<void(World&)>& body) {
  const RaceCheck check;
  run_local(ranks, check(options), body);
}

}  // namespace tessera::testing
