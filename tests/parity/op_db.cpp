// Reads samples of PyTorch's database of operations, a line each, and prints for each operation how
// many there were, agreed, and were refused by design. Exit code 1 for any other difference.
// tests/parity/op_samples.py feeds it where PyTorch is.
#include <cstdio>
#include <iostream>
#include <map>

#include "tests/parity/op_calls.hpp"

int main(int argc, char** argv) {
  const bool says_all = argc > 1 && std::string(argv[1]) == "--all";
  struct Counts {
    int samples = 0, refused = 0, differed = 0;
    std::string why;
  };
  std::map<std::string, Counts> table;
  const auto device = tessera::Device::cpu({.executor = tessera::ExecutorKind::inlined});
  for (std::string line; std::getline(std::cin, line);) {
    const op_samples::Outcome outcome = op_samples::call(line, device);
    Counts& counts = table[outcome.theirs];
    ++counts.samples;
    if (outcome.verdict == op_samples::Verdict::refused) ++counts.refused;
    if (outcome.verdict != op_samples::Verdict::differed) continue;
    if (++counts.differed == 1) counts.why = outcome.why;
    if (says_all)
      std::printf("%s: %s\n  %.400s\n", outcome.theirs.c_str(), outcome.why.c_str(), line.c_str());
  }
  Counts all;
  std::printf("%-32s %8s %8s %8s\n", "PyTorch's operation", "samples", "agreed", "refused");
  const auto print = [](const std::string& name, const Counts& c) {
    std::printf("%-32s %8d %8d %8d%s%s\n", name.c_str(), c.samples,
                c.samples - c.refused - c.differed, c.refused, c.differed > 0 ? "  DIFFERED: " : "",
                c.why.c_str());
  };
  for (const auto& [name, counts] : table) {
    print(name, counts);
    all.samples += counts.samples;
    all.refused += counts.refused;
    all.differed += counts.differed;
  }
  print("all", all);
  return all.samples > 0 && all.differed == 0 ? 0 : 1;
}
