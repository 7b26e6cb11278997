// Two streams that write and read the same floats, with the event between them or without it. Under
// ThreadSanitizer the second must be reported, whatever the schedule: the shuffled executor runs
// one body at a time, so only what our own edges say can order them.
//
//   forgotten_event            ends with the sanitizer's report
//   forgotten_event ordered    ends with exit code 0
#include <cstdio>
#include <string_view>
#include <vector>

#include "tessera/memory/memory.hpp"
#include "tests/schedules/shuffled.hpp"

using namespace tessera;

namespace {

constexpr int kFloats = 64;

float sum_on_gather(std::uint64_t seed, bool is_ordered) {
  const Device device = Device::cpu({.executor = testing::shuffled(seed)});
  Buffer buffer = Memory::of(device).allocate(kFloats * sizeof(float), StreamId::compute);
  auto* const data = reinterpret_cast<float*>(buffer.data());
  float sum = 0;
  float* const out = &sum;
  const Access writes[] = {{&buffer.use(), data, data + kFloats, AccessMode::write}};
  device.compute().launch({.name = "write", .accesses = writes}, [data](Exec&) {
    for (int i = 0; i < kFloats; ++i) data[i] = 1;
  });
  if (is_ordered) device.gather().wait(device.compute().record());
  const Access reads[] = {{&buffer.use(), data, data + kFloats, AccessMode::read}};
  device.gather().launch({.name = "read", .accesses = reads}, [data, out](Exec&) {
    for (int i = 0; i < kFloats; ++i) *out += data[i];
  });
  device.synchronize();
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_ordered = argc > 1 && std::string_view(argv[1]) == "ordered";
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const float sum = sum_on_gather(seed, is_ordered);
    if (is_ordered && sum != kFloats) {
      std::printf("seed %llu: the sum is %g\n", static_cast<unsigned long long>(seed), sum);
      return 1;
    }
  }
  return 0;
}
