// --trace: the timeline of the first steps of each rank of this process, or of each planned rank,
// in one file for ui.perfetto.dev. A run's and a plan's have the same lanes and names.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "tessera/comm/world.hpp"
#include "tessera/device/observe/trace.hpp"

namespace tessera::train {

// Threads: ranks add on their own threads.
class TraceFile {
 public:
  explicit TraceFile(std::string path) : path_(std::move(path)) {}

  void add(const std::string& events);
  // The whole file, under a temporary name and then renamed.  Throws: DeviceError, and leaves
  // nothing.
  void write() const;

 private:
  std::string path_;
  std::mutex mutex_;
  std::string events_;
};

// Watches the steps of one rank. Does nothing without a file.
class StepTrace {
 public:
  enum class Of : std::uint8_t { run, plan };
  static constexpr std::int64_t kSteps = 10;  // the first ones; a file of a whole run has no end

  // After a failure the device, which may still be at work, keeps what watches it.
  StepTrace(TraceFile* file, const World& world, Of of);

  // f(), and what is submitted in it under the name of step `step` (from 0).
  template <class F>
  auto during(std::int64_t step, const F& f) {
    if (trace_) trace_->begin("step " + std::to_string(step + 1));
    auto result = f();
    if (trace_) trace_->end();
    return result;
  }
  // Adds what was watched to the file and watches no more.
  void finish();

 private:
  TraceFile* file_;
  const World& world_;
  std::shared_ptr<Trace> trace_;  // null without a file, and when it is finished
};

}  // namespace tessera::train
