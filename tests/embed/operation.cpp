// A user's test of an operation of his own, with the testing library: every schedule of streams
// gives one result, and an emulated GPU (the first argument: its module) gives that of the CPU.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tests/schedules/shuffled.hpp"

namespace ts = tessera;

// log(1 + e^x), of operations that there are.
static ts::Tensor soft_plus(const ts::Tensor& x) { return log(exp(x) + 1.0); }

static std::vector<float> values_on(const ts::Device& device) {
  const ts::Tensor x = ts::Tensor::arange(64, ts::f32, device) * 0.1;
  return soft_plus(x).to_vector<float>();
}

// Doubled on another stream, which has to wait for what it reads.
static float doubled(std::uint64_t seed, bool waits) {
  const ts::Device device = ts::Device::cpu({.executor = ts::testing::shuffled(seed)});
  float value = 0, twice = 0;
  device.compute().launch({.name = "fill"}, [v = &value](ts::Exec&) { *v = 21; });
  if (waits) device.gather().wait(device.compute().record());
  device.gather().launch({.name = "double"}, [v = &value, t = &twice](ts::Exec&) { *t = 2 * *v; });
  device.synchronize();
  return twice;
}

int main(int count, char** arguments) {
  const std::vector<float> expected = values_on(ts::Device::cpu());
  int found = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    if (values_on(ts::Device::cpu({.executor = ts::testing::shuffled(seed)})) != expected) return 1;
    if (doubled(seed, true) != 42) return 2;
    found += doubled(seed, false) != 42;
  }
  if (found == 0) return 3;
  if (count > 1) {
    const std::vector<float> there = values_on(ts::Device::cuda({.module = arguments[1]}));
    for (std::size_t i = 0; i < there.size(); ++i)
      if (std::abs(there[i] - expected[i]) > 1e-5f * expected[i]) return 4;
  }
  std::printf("20 schedules, of which %d show a wait that is missing%s\n", found,
              count > 1 ? "; an emulated GPU" : "");
}
