// What a run leaves open is chosen by memory: the fastest whose plan fits.
#include <algorithm>
#include <cstdint>
#include <regex>
#include <string>

#include "tests/cli/program.hpp"
#include "tests/cli/tiny_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// The most that a rank of a dry run has reserved in any phase.
std::int64_t reserved_bytes(const std::string& out) {
  const std::regex regex(R"(, reserved (\d+) bytes|evaluation: (\d+) bytes|a save: (\d+) bytes\n)");
  std::int64_t most = 0;
  for (std::sregex_iterator i(out.begin(), out.end(), regex), end; i != end; ++i)
    for (const std::size_t group : {1, 2, 3})
      if ((*i)[group].matched) most = std::max<std::int64_t>(most, std::stoll((*i)[group]));
  return most;
}

}  // namespace

TEST_CASE("a limit of memory chooses the fastest order of head and loss that fits") {
  const TemporaryFolder folder;
  for (const int ranks : {1, 3}) {
    INFO(ranks << " ranks");
    // Of two micro-batches: with one, a rank alone has no gradient yet where fast has what it made.
    const std::string of_ranks = " --ranks " + std::to_string(ranks) +
                                 " --training.global_batch_size=" + std::to_string(2 * ranks);
    const auto run = [&](const std::string& options) {
      return run_command(
          "tessera-train --dry-run --model.dim=256 --model.n_layers=1 "
          "--model.n_heads=2 --model.vocab_size=100003 --training.seq_len=2048 "
          "--training.local_batch_size=1" +
              of_ranks + options,
          folder.path().string());
    };
    const auto bytes_of = [&](const std::string& order) {
      const Outcome outcome = run(" --training.loss=" + order);
      INFO(outcome.err);
      REQUIRE(outcome.exit_code == 0);
      return reserved_bytes(outcome.out);
    };
    const std::int64_t lean = bytes_of("lean"), fast = bytes_of("fast");
    REQUIRE(lean > 0);
    REQUIRE(fast > lean);
    const auto limited = [&](std::int64_t limit) {
      return run(" --memory.limit=" + std::to_string(limit));
    };
    const std::string fast_plans = "training.loss=fast reserves " + std::to_string(fast) + " bytes",
                      lean_plans = "training.loss=lean reserves " + std::to_string(lean) + " bytes";
    const Outcome fits = limited(fast), fits_lean = limited(fast - 1), fits_not = limited(lean - 1);
    CHECK_THAT(fits.out, Contains("chosen training.loss=fast within ") && Contains(fast_plans));
    CHECK(reserved_bytes(fits.out) == fast);
    CHECK_THAT(fits_lean.out, Contains("chosen training.loss=lean within ") &&
                                  Contains(fast_plans + "; " + lean_plans));
    CHECK(reserved_bytes(fits_lean.out) == lean);
    CHECK(fits_not.exit_code == 1);
    CHECK_THAT(fits_not.err,
               Contains("memory.limit: nothing fits within ") && Contains(lean_plans));
    CHECK_THAT(run("").out, Contains("training.loss=lean, because without a memory.limit"));
  }
}

TEST_CASE("a plan for a machine is made for its memory, and shown where it has too little") {
  const TemporaryFolder folder;
  const auto run = [&](const std::string& options) {
    const Outcome outcome = run_command(
        "tessera-train --dry-run --device=cuda --machine=h100 --model.n_layers=4 "
        "--model.n_heads=128 --training.seq_len=1024 --training.local_batch_size=1" +
            options,
        folder.path().string());
    INFO(outcome.err);
    REQUIRE(outcome.exit_code == 0);
    return outcome.out;
  };
  CHECK_THAT(run(" --model.dim=512"),
             Contains("chosen training.loss=fast within 80000000000 bytes a rank"));
  const std::string large = run(" --model.dim=16384");
  CHECK_THAT(large, Contains("nothing fits within 80000000000 bytes a rank") &&
                        Contains("predicted, not measured"));
  CHECK(reserved_bytes(large) == reserved_bytes(run(" --model.dim=16384 --training.loss=lean")));
}

TEST_CASE("a fast loss trains as a lean one, and as planned") {
  for (const std::string ranks : {"1", "2"}) {
    const BookFolder folder;
    const auto run = [&](const std::string& options) {
      const Outcome outcome = run_command(
          "tessera-train --model.dim=32 --model.n_layers=1 --model.n_heads=2 "
          "--training.seq_len=32 --training.global_batch_size=12 "
          "--training.local_batch_size=2 --training.steps=3 --data.path=book.txt "
          "--ranks " +
              ranks + options,
          folder.path().string());
      INFO(outcome.err);
      REQUIRE(outcome.exit_code == 0);
      return outcome.out;
    };
    const auto losses_of = [](const std::string& out) {
      const std::regex regex(R"(loss: +[0-9.]+  grad_norm: +[0-9.]+)");
      std::string losses;
      for (std::sregex_iterator i(out.begin(), out.end(), regex), end; i != end; ++i)
        losses += i->str() + "\n";
      return losses;
    };
    const std::string lean = run(" --training.loss=lean"), fast = run(" --memory.limit=1000000000");
    CHECK_THAT(fast, Contains("chosen training.loss=fast"));
    CHECK_THAT(fast, Contains("as planned"));
    CHECK(std::ranges::count(losses_of(lean), '\n') == 3);
    CHECK(losses_of(fast) == losses_of(lean));  // all logits fit in a chunk: the bits are the same
  }
}
