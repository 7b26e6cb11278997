// Samples of PyTorch's own database of operations, written by tests/parity/op_samples.py.
#include <fstream>

#include "tests/parity/op_calls.hpp"
#include "tests/support/catch.hpp"

TEST_CASE("operations agree with PyTorch over samples of its database") {
  std::ifstream file(GOLDEN_FOLDER "/op_samples.jsonl");
  const auto device = tessera::Device::cpu({.executor = tessera::ExecutorKind::inlined});
  int agreed = 0, refused = 0;
  for (std::string line; std::getline(file, line);) {
    const op_samples::Outcome outcome = op_samples::call(line, device);
    if (outcome.verdict == op_samples::Verdict::refused) ++refused;
    if (outcome.verdict == op_samples::Verdict::agreed) ++agreed;
    if (outcome.verdict != op_samples::Verdict::differed) continue;
    INFO(outcome.theirs << ": " << outcome.why << "\n" << line);
    CHECK(false);
  }
  // What is refused by design, or all of it, must not become the rule.
  CHECK(agreed > 800);
  CHECK(refused * 5 < agreed);
}
