// Runs the cases of tests/kernels/cases/ over a driver module:
//
//   gpu-check-cases MODULE [--device N] [--seed S] [--first COUNT] [OP...]
//   gpu-check-cases --list
//   gpu-check-cases MODULE [--device N] --describe
//
// `--first` takes only so many cases of each op. `--describe` prints the device and the versions of
// its libraries instead.
// One line a case on stdout, as JSON; exit code 1 when one fails, 2 for bad arguments.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "tessera/detail/base/json.hpp"
#include "tests/kernels/case.hpp"
#include "tests/support/seed.hpp"
#include "tools/gpu_check/module.hpp"

namespace {

using namespace tessera;

struct Options {
  std::string module;
  int device = 0;
  std::uint64_t seed = testing::derived_seed("gpu-check");
  std::size_t first = std::numeric_limits<std::size_t>::max();
  bool list = false;
  bool describe = false;
  std::vector<std::string> ops;
};

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& a = arguments[i];
    const bool takes = a == "--device" || a == "--seed" || a == "--first";
    if (takes && i + 1 == arguments.size()) throw DataError(a + ": wants a number");
    if (a == "--device")
      options.device = std::stoi(arguments[++i]);
    else if (a == "--seed")
      options.seed = std::stoull(arguments[++i]);
    else if (a == "--first")
      options.first = std::stoull(arguments[++i]);
    else if (a == "--describe")
      options.describe = true;
    else if (a == "--list")
      options.list = true;
    else if (a.starts_with("-"))
      throw DataError(a + ": unknown option");
    else if (options.module.empty() && !options.list)
      options.module = a;
    else
      options.ops.push_back(a);
  }
  if (options.module.empty() && !options.list) throw DataError("which module?");
  return options;
}

// Returns whether it passed.
bool run(const kernel_test::NamedCase& named, const kernel_test::Target& target,
         std::uint64_t seed) {
  const auto begin = std::chrono::steady_clock::now();
  kernel_test::Case c(target, seed);
  std::string failure;
  try {
    named.body(c);
    if (c.compared() == 0) failure = "compared nothing";
  } catch (const std::exception& e) {
    failure = e.what();
  }
  for (const std::string& note : c.notes())
    std::fprintf(stderr, "%s: %s\n", named.op, note.c_str());
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf(
      "{\"op\": %s, \"case\": %s, \"passed\": %s, \"failure\": %s, \"compared\": %lld, "
      "\"worst\": %.4g, \"seed\": %llu, \"seconds\": %.3f}\n",
      json::quote(named.op).c_str(), json::quote(named.name).c_str(),
      failure.empty() ? "true" : "false", json::quote(failure).c_str(),
      static_cast<long long>(c.compared()), c.worst(), static_cast<unsigned long long>(seed),
      seconds.count());
  std::fflush(stdout);
  return failure.empty();
}

void describe(const kernel_test::Target& target, int index) {
  DriverDevice device{};
  gpu_check::expect(target.driver->describe(index, &device), "device");
  std::printf(
      "{\"name\": %s, \"capability\": \"%d.%d\", \"memory_bytes\": %lld, \"versions\": %s, "
      "\"built_for\": %s}\n",
      json::quote(device.name).c_str(), device.major, device.minor,
      static_cast<long long>(device.memory_bytes), json::quote(device.versions).c_str(),
      json::quote(target.driver->architectures).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse({argv + 1, argv + argc});
    if (options.list) {
      std::vector<std::string> ops;
      for (const auto& named : kernel_test::all_cases()) ops.emplace_back(named.op);
      std::sort(ops.begin(), ops.end());
      ops.erase(std::unique(ops.begin(), ops.end()), ops.end());
      for (const std::string& op : ops) std::printf("%s\n", op.c_str());
      return 0;
    }
    const kernel_test::Target target = gpu_check::open_module(options.module, options.device);
    if (options.describe) {
      describe(target, options.device);
      return 0;
    }
    bool passed = true;
    std::map<std::string, std::size_t> ran;
    for (const auto& named : kernel_test::all_cases())
      if ((options.ops.empty() ||
           std::find(options.ops.begin(), options.ops.end(), named.op) != options.ops.end()) &&
          ran[named.op]++ < options.first)
        passed = run(named, target, options.seed) && passed;
    return passed ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gpu-check-cases: %s\n", e.what());
    return 2;
  }
}
