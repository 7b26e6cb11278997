// Lesson 100: your own executor.
//
// A program says what runs and after what; an executor decides when. This one keeps what the host
// submits and runs it when the host blocks, in the order of the program, with a line for each:
//
//   host      launch a ── launch b ── wait ── launch c ── block ───────────────── goes on
//   executor  keep a      keep b        -     keep c      run a, run b, run c
//
// Nothing else changes: tensors and autograd are written against Stream, and no layer above knows
// which executor is at work. It serves one rank; one that serves several brings them together at
// the barriers of their collectives. PyTorch has nothing to compare: a dispatch mode sees operators
// by name, torch.fx records a graph of them, a CUDA graph captures streams; what a stream is and
// when it waits belongs to CUDA.
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/device/device.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;
using Log = std::vector<std::string>;

// See Note [What an executor promises] in device/executor.hpp.
class Deferred final : public ts::Executor {
 public:
  Deferred(const ts::ExecutorOptions& options, const ts::Observers& observers, Log& log)
      : rank_(options.rank), observers_(observers), log_(log) {}

  void submit(ts::StreamId stream, ts::Tick tick, const ts::Op& op, const ts::Body& body,
              ts::CollectiveBarrier* barrier) override {
    if (barrier) throw ts::ContractError("Deferred: peers would wait; use it on one rank");
    for (ts::Observer* o : observers_) o->executor_launched(stream, tick, op, barrier);
    kept_.push_back({stream, tick, op.name, body});  // 128 bytes that own nothing
  }
  void record(ts::Event& event) override {
    for (ts::Observer* o : observers_) o->executor_recorded(event);
  }
  // Nothing to do: what `event` stands for was submitted before, and will run before.
  void wait(ts::StreamId stream, const ts::Event& event) override {
    for (ts::Observer* o : observers_) o->executor_waited(stream, event);
  }
  void block(const ts::Event& event) override {
    for (const Kept& operation : std::exchange(kept_, {})) run(operation);
    for (ts::Observer* o : observers_) o->executor_blocked(event);
    if (failure_) std::rethrow_exception(failure_);
  }
  ts::Lost recover() override {
    failure_ = nullptr;
    return std::exchange(lost_, {});
  }

 private:
  struct Kept {
    ts::StreamId stream;
    ts::Tick tick;
    const char* name;
    ts::Body body;
  };
  void run(const Kept& operation) {
    const auto& [stream, tick, name, body] = operation;
    if (failure_) return lose(lost_.first, operation);  // skipped
    try {
      for (ts::Observer* o : observers_) o->started(stream, tick, name);
      ts::Exec exec{.stream = stream, .rank = rank_};
      body.invoke(body.bytes, exec);
      for (ts::Observer* o : observers_) o->finished(stream, tick, name);
      log_.emplace_back(name);
      std::cout << "   " << ts::name(stream) << ": " << name << '\n';
    } catch (...) {
      failure_ = std::current_exception();
      lose(lost_.first, operation);
      lose(lost_.failed, operation);
    }
  }
  static void lose(ts::Clock& lost, const Kept& operation) {
    if (lost[operation.stream] == 0) lost[operation.stream] = operation.tick;
  }

  const int rank_;
  const ts::Observers& observers_;
  Log& log_;
  std::vector<Kept> kept_;
  std::exception_ptr failure_;
  ts::Lost lost_;
};

// The door: what makes the executor goes into the options of the device.
static ts::Device deferred_device(Log& log) {
  return ts::Device::cpu({.executor = {"deferred", [&log](const ts::ExecutorOptions& options,
                                                          const ts::Observers& observers) {
                                         return std::make_unique<Deferred>(options, observers, log);
                                       }}});
}

static void tensors_run_on_it() {
  Log log;
  const ts::Device device = deferred_device(log);
  ts::Tensor x = ts::Tensor::arange(3, ts::f32, device);
  x.require_grad();
  const ts::Tensor y = sum(x * x);
  y.backward();
  const ts::Tick submitted = device.compute().clock()[ts::StreamId::compute];
  std::cout << "1. Forward and backward are " << submitted << " operations, of which " << log.size()
            << " have run. Now a value is read:\n";
  CHECK(log.empty() && submitted == 8);
  CHECK(x.grad().to_vector<float>() == (std::vector<float>{0, 2, 4}));
  CHECK(log.size() == submitted + 1 && log.front() == "arange" && log.back() == "copy_to_host");
  CHECK(y.item() == 5);
}

// Both orders give the right value here, for the program's own order is kept. The checker looks at
// the edges alone, and so knows what another executor may do with the second program.
static void the_checker_is_not_fooled() {
  for (const bool waits : {true, false}) {
    Log log;
    const auto checker = ts::RaceChecker::make();
    const ts::Device device = deferred_device(log);
    checker->watch(device.context());
    std::cout << "2. Two streams, " << (waits ? "with" : "without") << " an edge between them:\n";
    int value = 0, seen = 0;
    ts::LastUse use;
    const ts::Access write{&use, &value, &value + 1, ts::AccessMode::write};
    const ts::Access read{&use, &value, &value + 1, ts::AccessMode::read};
    device.compute().launch({.name = "write", .accesses = {&write, 1}},
                            [v = &value](ts::Exec&) { *v = 1; });
    if (waits) device.gather().wait(device.compute().record());
    device.gather().launch({.name = "read", .accesses = {&read, 1}},
                           [v = &value, s = &seen](ts::Exec&) { *s = *v; });
    device.synchronize();
    std::cout << "   " << checker->summary() << '\n';
    CHECK(seen == 1 && (log == Log{"write", "read"}));
    CHECK(checker->race_count() == (waits ? 0 : 1));
  }
}

static void failures_come_out_where_the_host_blocks() {
  Log log;
  const ts::Device device = deferred_device(log);
  std::cout << "3. The second of three operations throws:\n";
  device.compute().launch({.name = "good"}, [](ts::Exec&) {});
  device.compute().launch({.name = "bad"}, [](ts::Exec&) { throw std::runtime_error("no"); });
  device.compute().launch({.name = "after"}, [](ts::Exec&) {});  // skipped
  std::string caught;
  try {
    device.synchronize();
  } catch (const std::runtime_error& error) {
    caught = error.what();
  }
  CHECK(caught == "no" && log == Log{"good"});
}

int main() {
  tensors_run_on_it();
  the_checker_is_not_fooled();
  failures_come_out_where_the_host_blocks();
}
