// What does a buffer cost the host?
//
//   bench-allocator [BYTES]      default 1048576
//
// One sample is the time of a pair of allocate and free, the mean over many pairs, of
//   pool       our allocator in steady state: the block freed last fits
//   touched    the same with a launch between, as every real buffer has one (its cost is printed
//              too and has to be taken off)
//   gated      another stream touches the buffer, so each reuse costs an event and a wait
//   malloc     the C library's, of the same size, its first byte written
// Samples of the four take turns, so that a machine that slows down slows all of them; medians of
// 41 samples are printed, and the ratio to malloc is the median of the ratios of neighbours.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tessera/memory/memory.hpp"

namespace {

using namespace tessera;

constexpr int kSamples = 41, kPairs = 20'000, kGatedPairs = 2'000;

template <class F>
double nanoseconds(int pairs, F&& pair) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < pairs; ++i) pair();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start)
             .count() /
         pairs;
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + kSamples / 2, v.end());
  return v[kSamples / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const long long bytes = argc > 1 ? std::atoll(argv[1]) : 1 << 20;
  if (bytes <= 0) {
    std::fprintf(stderr, "bench-allocator: '%s' is no number of bytes; give a positive one\n",
                 argv[1]);
    return 2;
  }
  // Planning: bodies are dropped, memory is counted; what is left is the host's own work.
  const Device device = Device::cpu({.executor = ExecutorKind::virtual_});
  Memory& memory = Memory::of(device);
  const auto touch = [&](LastUse& use, StreamId stream) {
    const Access accesses[] = {{&use, nullptr, nullptr, AccessMode::write}};
    device.stream(stream).launch({.name = "touch", .accesses = accesses}, [](Exec&) {});
  };
  LastUse other;
  std::vector<double> pool, touched, launch, gated, system, ratio;
  for (int sample = 0; sample < kSamples; ++sample) {
    pool.push_back(nanoseconds(
        kPairs, [&] { const Buffer buffer = memory.allocate(bytes, StreamId::compute); }));
    system.push_back(nanoseconds(kPairs, [&] {
      auto* const p = static_cast<volatile char*>(std::malloc(static_cast<std::size_t>(bytes)));
      *p = 1;
      std::free(const_cast<char*>(p));
    }));
    ratio.push_back(pool.back() / system.back());
    touched.push_back(nanoseconds(kPairs, [&] {
      const Buffer buffer = memory.allocate(bytes, StreamId::compute);
      touch(buffer.use(), StreamId::compute);
    }));
    launch.push_back(nanoseconds(kPairs, [&] { touch(other, StreamId::compute); }));
    gated.push_back(nanoseconds(kGatedPairs, [&] {
      const Buffer buffer = memory.allocate(bytes, StreamId::compute);
      touch(buffer.use(), StreamId::gather);
    }));
  }
  std::printf("allocate and free of %lld bytes, medians of %d samples\n", bytes, kSamples);
  std::printf(
      "  pool      %8.1f ns\n  touched   %8.1f ns, of which the launch %.1f ns\n"
      "  gated     %8.1f ns\n  malloc    %8.1f ns\n",
      median(pool), median(touched), median(launch), median(gated), median(system));
  std::printf("pool / malloc %.2f; %llu segments taken, %llu gates fired\n", median(ratio),
              static_cast<unsigned long long>(memory.pool().segments_taken()),
              static_cast<unsigned long long>(memory.pool().gates_fired()));
}
