// A step whose values no host reads, and which fails: the exit code of its program. Ranks are the
// launcher's processes, or threads.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/base/log.hpp"
#include "tessera/run/run.hpp"
#include "tests/promises/traps.hpp"

namespace tessera::testing {

struct UnreadStep {
  std::optional<int> threads{};  // unset: processes
  Trap trap = Trap::none;
  std::uint64_t place = 0;  // of the step
  int trapped = 0;          // the rank
};

// `places`: how many the step has on this process's last rank.
inline int exit_code_of(const UnreadStep& step, std::uint64_t* places = nullptr) {
  const RunOptions options{.program = "a trap of this test",
                           .ranks = step.threads,
                           .world = {.threads = 1, .timeout_seconds = 60}};
  const int code = run(options, [&](World& world) {
    Trapper& trapper = Trapper::on(world);
    Trainee trainee(world, {}, 5);
    trainee.step(0).loss.item();
    trapper.arm(world.rank() == step.trapped ? step.trap : Trap::none, step.place, false);
    trainee.step(1);
    if (places && world.rank() == world.size() - 1) *places = trapper.count(Trap::launch);
  });
  set_log_sink({});
  return code;
}

}  // namespace tessera::testing
