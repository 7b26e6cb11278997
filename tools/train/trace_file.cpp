#include "tools/train/trace_file.hpp"

#include "tessera/base/error.hpp"
#include "tessera/base/file.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera::train {

void TraceFile::add(const std::string& events) {
  const std::lock_guard lock(mutex_);
  events_ += (events_.empty() ? "" : ",\n") + events;
}

void TraceFile::write() const {
  try {
    write_whole(path_, "{\"traceEvents\": [\n" + events_ + "\n]}\n", {.flush = false});
  } catch (const DeviceError& error) {
    throw DeviceError(concat("--trace: ", error.what()));
  }
}

StepTrace::StepTrace(TraceFile* file, const World& world, Of of) : file_(file), world_(world) {
  if (file == nullptr) return;
  const bool plans = of == Of::plan;
  trace_ = std::make_shared<Trace>(
      world.device().context(),
      TraceOptions{.process = concat("rank ", world.rank(), plans ? ", planned" : ""),
                   .process_id = 2 * world.rank() + (plans ? 2 : 1)});
  world.device().context().add_observer(trace_);
  Memory& memory = Memory::of(world.device());
  trace_->add_counter("memory live, bytes",
                      [&memory] { return static_cast<double>(memory.ledger().live_bytes()); });
  trace_->add_counter("memory reserved, bytes",
                      [&memory] { return static_cast<double>(memory.reserved_bytes()); });
}

void StepTrace::finish() {
  if (!trace_) return;
  double origin = trace_->origin_seconds();
  // Ranks of one process share a clock, and its origin.
  if (world_.kind() == WorldKind::local) origin = -world_.max(-origin);
  file_->add(trace_->json(origin));
  world_.device().context().remove_observer(*trace_);
  trace_.reset();
}

}  // namespace tessera::train
