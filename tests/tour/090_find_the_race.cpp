// Lesson 90: find the race.
//
// Layers are prefetched into two buffers, in turn. A stream copies, another computes, and one edge
// is easily forgotten: before a buffer is filled again, its last reader must be done.
//
//   transfer   ── fill A ── fill B ── wait? ── fill A ── wait? ── fill B ──▶
//                   │         │         ▲        │
//                   ▼         ▼         │        ▼
//   compute        wait  use A  wait  use B    wait  use A ...
//
// Without it the sums are right as long as compute is fast enough, which it is on your machine. A
// race checker does not look at values. It asks, for any two operations on the same bytes, one of
// them writing, whether some chain of waits puts one before the other; so it finds the race in a
// run that went well.
//
// PyTorch: CUDA Stream Sanitizer (TORCH_CUDA_SANITIZER=1) asks the same of the operations that go
// through the dispatcher, and forgets a tensor when it is freed. Here every launch declares what it
// touches, and memory that is reused is compared with its former life; TESSERA_CHECK=1 turns the
// checker on in any program that calls `ts::run`.
#include <array>
#include <iostream>
#include <memory>
#include <vector>

#include "tessera/device/device.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;
using ts::AccessMode;

constexpr int kLayers = 6, kElements = 4;

// Memory with its last use.
struct Floats {
  std::array<float, kElements> values{};
  ts::LastUse use;
};

// A device under a checker.
struct Watched {
  explicit Watched(const ts::CpuOptions& options = {}) : device(ts::Device::cpu(options)) {
    checker->watch(device.context());
  }
  ts::Stream compute() const { return device.compute(); }
  ts::Stream transfer() const { return device.stream(ts::StreamId::transfer); }
  ts::Stream reduce() const { return device.reduce(); }
  // What the checker has to say; must be `races` reports.
  void report(std::size_t races) const {
    std::cout << "   " << checker->summary() << '\n';
    for (const ts::Race& race : checker->races()) std::cout << "   " << race.to_string() << '\n';
    CHECK(checker->races().size() == races);
  }

  std::shared_ptr<ts::RaceChecker> checker = ts::RaceChecker::make();
  ts::Device device;
};

template <class Body>
static void launch(ts::Stream stream, const char* name, Floats& f, AccessMode mode, Body body) {
  float* const p = f.values.data();
  const ts::Access access{&f.use, p, p + kElements, mode};
  stream.launch({.name = name, .accesses = {&access, 1}}, [p, body](ts::Exec&) { body(p); });
}
static void touch(ts::Stream stream, const char* name, Floats& f, AccessMode mode) {
  launch(stream, name, f, mode, [](float*) {});
}

// The sum of all layers; layer k is made of k + 1.
static float sum_of_layers(const Watched& on, bool with_the_wait) {
  constexpr const char *kFill[] = {"fill A", "fill B"}, *kUse[] = {"use A", "use B"};
  std::array<Floats, 2> buffers;
  float sum = 0;
  for (int k = 0; k < kLayers; ++k) {
    Floats& buffer = buffers[static_cast<std::size_t>(k % 2)];
    if (with_the_wait && k >= 2) on.transfer().wait(on.compute().record());
    launch(on.transfer(), kFill[k % 2], buffer, AccessMode::write, [k](float* p) {
      for (int i = 0; i < kElements; ++i) p[i] = static_cast<float>(k + 1);
    });
    on.compute().wait(on.transfer().record());
    launch(on.compute(), kUse[k % 2], buffer, AccessMode::read, [s = &sum](const float* p) {
      for (int i = 0; i < kElements; ++i) *s += p[i];
    });
  }
  on.device.synchronize();
  return sum;
}

static void one_wait() {
  constexpr float kRight = kElements * kLayers * (kLayers + 1) / 2;
  for (const bool with_the_wait : {false, true}) {
    // Each operation runs where it is launched: no order can go wrong, so the sum is always right.
    const Watched on({.executor = ts::ExecutorKind::inlined});
    const float sum = sum_of_layers(on, with_the_wait);
    std::cout << (with_the_wait ? "2. With" : "1. Without") << " the wait the sum is " << sum
              << '\n';
    CHECK(sum == kRight);
    on.report(with_the_wait ? 0 : 2);  // one a buffer
  }
  int wrong = 0, wrong_with = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const ts::CpuOptions options{.executor = ts::testing::shuffled(seed)};
    wrong += sum_of_layers(Watched(options), false) != kRight;
    wrong_with += sum_of_layers(Watched(options), true) != kRight;
  }
  std::cout << "3. Of 40 schedules " << wrong << " give a wrong sum without it, " << wrong_with
            << " with it\n";
  CHECK(wrong > 0 && wrong_with == 0);
}

// ---- Three races that reached users, told again. Fifteen are in
// tests/promises/field_bugs_test.cpp.

// PyTorch issue 160481: reduced gradients were summed over replicas on a second stream, and the
// event of completion was recorded on the first. The optimizer waited for it, and read half-made
// sums.
static void the_event_of_the_wrong_stream(bool repaired) {
  const Watched on;
  Floats gradient;
  const ts::Stream replicate = on.device.stream(ts::StreamId::replicate);
  touch(on.reduce(), "reduce_scatter", gradient, AccessMode::write);
  replicate.wait(on.reduce().record());
  touch(replicate, "all_reduce", gradient, AccessMode::write);
  on.compute().wait(repaired ? replicate.record() : on.reduce().record());
  touch(on.compute(), "norm", gradient, AccessMode::read);
  on.report(repaired ? 0 : 1);
}

// PyTorch issue 180666: a hook read pinned memory on the host right after the copy into it had been
// queued. A copy that does not block is done when an event says so, not when its call returns.
static void the_host_reads_too_early(bool repaired) {
  const Watched on;
  Floats pinned;
  touch(on.transfer(), "copy_to_host", pinned, AccessMode::write);
  if (repaired) on.device.block(on.transfer().record());
  on.device.context().host_reads(pinned.values.data(), sizeof pinned.values);
  on.report(repaired ? 0 : 1);
}

// ROCm/pytorch issue 3501: the optimizer waited for the reduction that was expected to come last.
// Then hooks ran in another order, and the one that did come last was waited for by nobody.
static void the_last_is_not_the_expected_one(bool repaired) {
  const Watched on;
  std::array<Floats, 2> layers;
  touch(on.reduce(), "reduce layers.1", layers[1], AccessMode::write);
  ts::Event drained = on.reduce().record();
  touch(on.reduce(), "reduce layers.0", layers[0], AccessMode::write);
  if (repaired) drained = on.reduce().record();
  on.compute().wait(drained);
  for (Floats& layer : layers) touch(on.compute(), "optimizer", layer, AccessMode::write);
  on.report(repaired ? 0 : 1);
}

int main() {
  one_wait();
  for (const bool repaired : {false, true}) {
    std::cout << (repaired ? "5. The same, repaired:\n" : "4. Three field bugs, as they were:\n");
    the_event_of_the_wrong_stream(repaired);
    the_host_reads_too_early(repaired);
    the_last_is_not_the_expected_one(repaired);
  }
}
