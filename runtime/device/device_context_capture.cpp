// The part of DeviceContext that keeps work and submits it again.
#include <utility>

#include "runtime/device/tell_observers.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/device/captured_work.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {

const char* uncapturable(StreamId stream, const CollectiveBarrier* barrier) {
  if (barrier && barrier->size() > 1)
    return "its ranks are threads, which meet on the host; use one rank a process";
  if (stream == StreamId::offload) return "it runs on the host; leave cpu_offload out";
  return nullptr;
}

Decisions& decisions() noexcept {
  thread_local Decisions made;
  return made;
}

// Without work in flight no stream has anything to wait for from before.
void DeviceContext::begin_capture() {
  TESSERA_EXPECT(executor_->captures() && !is_capturing(),
                 "begin_capture: this device can't capture, or already does");
  synchronize();
  auto graph = std::make_shared<CapturedGraph>();
  {
    const std::lock_guard lock(graphs_mutex_);
    std::erase_if(graphs_, [](const auto& held) { return held.expired(); });
    graphs_.push_back(graph);
  }
  executor_->begin_capture();
  capture_ = std::move(graph);
}

// The host has seen everything before begin_capture, and nothing since.
CapturedWork DeviceContext::end_capture() {
  submit_held();
  CapturedWork work;
  for (std::size_t i = 0; i < kMaxStreams; ++i)
    work.count.ticks[i] = clocks_[i].ticks[i] - host_.ticks[i];
  if (!capture_->why_dropped().empty()) {
    work.graph = capture_;
    drop_capture();
    static_cast<void>(work.graph->get());  // throws
  }
  std::shared_ptr<void> graph = executor_->end_capture(false);
  work.graph = std::exchange(capture_, nullptr);
  work.graph->set(std::move(graph));
  return work;
}

void DeviceContext::drop_capture() noexcept try {
  drop_held();
  capture_.reset();
  executor_->end_capture(true);
} catch (...) {
  fail_late();
}

void DeviceContext::replay(const CapturedWork& work, bool is_first) {
  submit_held();
  Clock& compute = clocks_[index(StreamId::compute)];
  if (!is_first)  // nothing was in flight before the capture
    for (const StreamId s : kStreams)
      if (const Tick last = clock(s)[s]; last > compute[s])
        wait(StreamId::compute, event_covering(s, last));
  Clock end = submitted();
  if (!is_first)
    for (std::size_t i = 0; i < kMaxStreams; ++i) end.ticks[i] += work.count.ticks[i];
  const Op op{.name = "captured_step", .cost = work.cost};
  tell_observers(observers_,
                 [&](Observer& o) { o.launched(StreamId::compute, end[StreamId::compute], op); });
  Event before;
  if (on_replay_) before = mark(StreamId::compute, false);
  executor_->replay(work.graph->get().get(), end);
  for (std::size_t i = 0; i < kMaxStreams; ++i) clocks_[i].ticks[i] = end.ticks[i];
  ++launches_;
  compute = end;
  const Event all = replayed_ = mark(StreamId::compute, false);
  for (const StreamId stream : kStreams) {
    if (stream != StreamId::compute) wait(stream, all);
    Event& last = last_events_[index(stream)] = all;
    last.stream = stream;
    last.tick = end[stream];
  }
  if (on_replay_) on_replay_(before, all);
}

void DeviceContext::drop_graphs(const std::string& why) {
  const std::lock_guard lock(graphs_mutex_);
  for (const auto& held : graphs_)
    if (const auto graph = held.lock()) graph->drop(why);
}

void DeviceContext::block_on_replays() {
  if (replayed_.tick > 0 && !host_.covers(replayed_.clock)) block(replayed_);
}

}  // namespace tessera
