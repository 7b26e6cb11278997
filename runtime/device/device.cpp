#include "tessera/device/device_context.hpp"

#include <chrono>
#include <exception>

#include "runtime/device/tell_observers.hpp"
#include "runtime/device/testing.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/detail/base/text.hpp"
#include "tessera/detail/device/driver.hpp"

namespace tessera {

// ---- Stream

Event Stream::record() const { return context_->record(id_); }
void Stream::wait(const Event& event) const { context_->wait(id_, event); }
const Clock& Stream::clock() const { return context_->clock(id_); }
void Stream::submit(const Op& op, const Body& body, CollectiveBarrier* barrier) const {
  context_->submit(id_, op, body, barrier);
}

// ---- Device

DeviceKind Device::kind() const noexcept {
  if (!context_) return DeviceKind::meta;
  return is_host() ? DeviceKind::cpu : context_->kind();
}
Device Device::host() const {
  context();  // throws on meta
  return on(StreamId::offload);
}
int Device::rank() const noexcept { return context_ ? context_->rank() : 0; }
bool Device::runs_bodies() const noexcept { return context_ && context_->executor().runs_bodies(); }

Stream Device::stream(StreamId id) const { return Stream(context(), id); }
const Clock& Device::clock() const { return context().host_clock(); }
void Device::block(const Event& event) const { context().block(event); }
void Device::synchronize() const { context().synchronize(); }

std::uint64_t Device::recoveries() const noexcept { return context_ ? context_->recoveries() : 0; }

DeviceContext& Device::context() const {
  TESSERA_EXPECT(
      context_ != nullptr,
      "Device: the meta device has no streams and no memory; materialize on Device::cpu() "
      "or another real device first");
  return *context_;
}

// ---- DeviceContext

namespace {

// Whether this is the edge that a test removes; `mutator` is null but in tests.
bool is_mutated(Mutator* mutator, Mutation::Kind kind) { return mutator && mutator->hits(kind); }

// The event that a record before the stream's last operation would have made.
Event one_earlier(Event event) {
  event.clock[event.stream] = --event.tick;
  return event;
}

}  // namespace

DeviceContext::DeviceContext(DeviceKind kind, int rank, const ExecutorOptions& options,
                             CudaMemory cuda_memory, bool tf32, bool deterministic)
    : kind_(kind),
      rank_(rank),
      driver_(options.driver),
      device_index_(options.device_index),
      cuda_memory_(cuda_memory),
      tf32_(tf32),
      deterministic_(deterministic),
      executor_(make_executor(options, observers_)) {
  for (const StreamId s : kStreams) last_events_[index(s)].stream = s;
}

// Waits for all work, then lets the memory go while clocks and executor still stand.
DeviceContext::~DeviceContext() {
  const bool told = failure_told_;
  std::string failure;
  for (const StreamId s : kStreams) {
    try {
      if (const Tick last = clock(s)[s]; last > host_[s]) block(event_covering(s, last));
    } catch (...) {
      failure = describe_exception();
    }
  }
  if (!told && !failure.empty())
    log(LogLevel::error, concat("Device: rank ", rank_, " ended with a failure: ", failure));
  drop_kept();
  memory.reset();
  for (Observer* o : observers_) o->ended();
}

void DeviceContext::submit(StreamId stream, const Op& op, const Body& body,
                           CollectiveBarrier* barrier) {
  submit_held();
  const Tick tick = clocks_[index(stream)][stream] + 1;
  tell_observers(observers_, [stream, tick, &op](Observer& o) { o.launched(stream, tick, op); });
  executor_->submit(stream, tick, op, body, barrier);
  // Only now, because either may refuse: a tick that nobody completes is waited for in vain.
  clocks_[index(stream)][stream] = tick;
  for (const Access& access : op.accesses) access.use->touched[stream] = tick;
  ++launches_;
}

Event DeviceContext::record(StreamId stream) { return mark(stream, true); }

Event DeviceContext::mark(StreamId stream, bool by_program) {
  submit_held();
  const Clock& clock = clocks_[index(stream)];
  Event event{.stream = stream, .tick = clock[stream], .clock = clock, .number = ++records_};
  if (by_program && event.tick > 0 && is_mutated(mutator_.get(), Mutation::Kind::early_record))
    event = one_earlier(event);
  executor_->record(event);
  last_events_[index(stream)] = event;
  tell_observers(observers_, [&event](Observer& o) { o.recorded(event); });
  return event;
}

void DeviceContext::wait(StreamId stream, const Event& event) {
  submit_held();
  expect_reached(event, "Stream::wait");
  Clock& clock = clocks_[index(stream)];
  // The whole clock, not the tick alone: between two events of one tick the stream may have waited
  // for more.
  if (clock.covers(event.clock) || is_mutated(mutator_.get(), Mutation::Kind::forget_wait)) return;
  tell_observers(observers_, [stream, &event](Observer& o) { o.waited(stream, event); });
  if (!is_mutated(mutator_.get(), Mutation::Kind::drop_wait)) executor_->wait(stream, event);
  clock.merge(event.clock);
}

void DeviceContext::block(const Event& event) {
  submit_held();
  expect_reached(event, "Device::block");
  try {
    if (host_.covers(event.clock)) {  // only to hear of a failure
      executor_->block(event);
      if (on_block_) on_block_();
      return rethrow_late();
    }
    if (is_mutated(mutator_.get(), Mutation::Kind::forget_wait)) return;
    TESSERA_EXPECT(!is_capturing(),
                   "captured step: the host waits for the device inside the step, perhaps to read "
                   "a value; return the tensor and read it afterwards");
    tell_observers(observers_, [&event](Observer& o) { o.blocked(event); });
    const auto start = std::chrono::steady_clock::now();
    if (!is_mutated(mutator_.get(), Mutation::Kind::drop_wait)) executor_->block(event);
    if (on_block_) on_block_();
    rethrow_late();
    blocked_seconds_ +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  } catch (...) {
    failure_told_ = true;
    throw;
  }
  // What the host submits from here on comes after `event`, on every stream.
  host_.merge(event.clock);
  for (Clock& clock : clocks_) clock.merge(host_);
  if (!kept_.empty()) drop_done();
}

Clock DeviceContext::submitted() const {
  Clock all;
  for (const StreamId s : kStreams) all[s] = clock(s)[s];
  return all;
}

void DeviceContext::block_on(const Clock& ticks) {
  for (const StreamId s : kStreams)
    if (ticks[s] > host_[s]) block(event_covering(s, ticks[s]));
}

void DeviceContext::synchronize() {
  block(Event{});  // to hear of a failure, and to submit what is held
  block_on(submitted());
}

const Driver& DeviceContext::acting_driver() const noexcept {
  driver_->use(device_index_);  // a failure shows in the call that follows
  return *driver_;
}

const Event& DeviceContext::event_covering(StreamId stream, Tick tick) {
  TESSERA_EXPECT(tick <= clock(stream)[stream], "event_covering: stream ", name(stream),
                 " has not reached tick ", tick, ", only ", clock(stream)[stream],
                 "; is it a tick of another device?");
  if (last_events_[index(stream)].tick < tick) mark(stream, false);
  return last_events_[index(stream)];
}

Event DeviceContext::event_of_free(StreamId stream, Tick tick) noexcept try {
  if (!is_mutated(mutator_.get(), Mutation::Kind::early_free)) return event_covering(stream, tick);
  Event event =
      one_earlier({.stream = stream, .tick = tick, .clock = clock(stream), .number = ++records_});
  executor_->record(event);
  return event;
} catch (...) {
  fail_late();
  if (const Event& last = last_events_[index(stream)]; last.tick >= tick) return last;
  return {.stream = stream, .tick = tick, .clock = clock(stream)};
}

// What goes may keep something else.
void DeviceContext::drop_done() {
  std::vector<std::shared_ptr<void>> done;
  std::erase_if(kept_, [&](Kept& kept) {
    if (!host_.covers(kept.until)) return false;
    done.push_back(std::move(kept.what));
    return true;
  });
}

void DeviceContext::keep(std::shared_ptr<void> what) {
  drop_done();
  const Clock now = submitted();
  if (!host_.covers(now)) kept_.push_back({now, std::move(what)});
}

void DeviceContext::add_observer(std::shared_ptr<Observer> observer) {
  observers_.push_back(observer.get());
  owned_observers_.push_back(std::move(observer));
}

void DeviceContext::remove_observer(Observer& observer) { std::erase(observers_, &observer); }

void DeviceContext::expect_reached(const Event& event, const char* function) const {
  TESSERA_EXPECT(event.tick <= clock(event.stream)[event.stream], function, ": event ", event.tick,
                 " of stream ", name(event.stream), " is not of this device: rank ", rank_,
                 " has submitted only ", clock(event.stream)[event.stream],
                 " operations there; events order work within one device, collectives between "
                 "ranks");
}

}  // namespace tessera
