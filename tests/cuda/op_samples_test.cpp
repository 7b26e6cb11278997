// Samples of PyTorch's own database of operations (tests/parity/op_samples.py) on an emulated GPU
// whose kernels run thread by thread: compositions, too, have PyTorch's values there.
#include <fstream>

#include "tests/cuda/support.hpp"
#include "tests/parity/op_calls.hpp"
#include "tests/support/catch.hpp"

TEST_CASE("operations agree with PyTorch over samples of its database on an emulated GPU") {
  std::ifstream file(GOLDEN_FOLDER "/op_samples.jsonl");
  const auto device = tessera::Device::cuda({.module = TESSERA_EMULATED_MODULE});
  int agreed = 0;
  for (std::string line; std::getline(file, line);) {
    const op_samples::Outcome outcome = op_samples::call(line, device);
    agreed += outcome.verdict == op_samples::Verdict::agreed;
    if (outcome.verdict != op_samples::Verdict::differed) continue;
    INFO(outcome.theirs << ": " << outcome.why << "\n" << line);
    CHECK(false);
  }
  CHECK(agreed > 800);  // what is refused by design must not become the rule
}
