#include "tests/emulator/graph.hpp"

#include <algorithm>
#include <utility>

#include "tests/emulator/gpu_thread.hpp"

namespace tessera::kernels::cuda::emulator {
namespace {

Stream& stream_of(void* stream) { return *static_cast<Stream*>(stream); }

}  // namespace

// ---- Mark, Event

void Mark::reach() {
  {
    const std::lock_guard lock(mutex_);
    is_reached_ = true;
    when_ = std::chrono::steady_clock::now();
  }
  changed_.notify_all();
}
void Mark::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_reached_; });
}
bool Mark::is_reached() {
  const std::lock_guard lock(mutex_);
  return is_reached_;
}
std::chrono::steady_clock::time_point Mark::when() {
  const std::lock_guard lock(mutex_);
  return when_;
}

std::shared_ptr<Mark> Event::get() {
  const std::lock_guard lock(mutex);
  return last;
}
std::shared_ptr<Mark> Event::renew() {
  const std::lock_guard lock(mutex);
  return last = std::make_shared<Mark>();
}

// ---- Capture, Graph

std::size_t Capture::add_stream(Stream& stream) {
  device_ = stream.device();
  streams_.push_back(&stream);
  counts_.push_back(0);
  for (auto& known : known_) known.push_back(0);
  known_.emplace_back(streams_.size(), 0);
  return streams_.size() - 1;
}

void Capture::add(std::size_t stream, std::function<void()> work) {
  nodes_.push_back({.stream = stream, .work = std::move(work)});
  known_[stream][stream] = ++counts_[stream];
}

Capture::Point Capture::record(std::size_t stream) {
  nodes_.push_back({.stream = stream, .work = {}, .mark = marks_++});
  return {.mark = marks_ - 1, .known = known_[stream]};
}

void Capture::wait(std::size_t stream, const Point& point) {
  nodes_.push_back({.stream = stream, .work = {}, .mark = point.mark, .waits = true});
  for (std::size_t i = 0; i < point.known.size(); ++i)
    known_[stream][i] = std::max(known_[stream][i], point.known[i]);
}

bool Capture::end() {
  has_ended_ = true;
  for (Stream* stream : streams_) stream->set_capture(nullptr, 0);
  return known_[0] == counts_;
}

Graph::Graph(Capture& capture) : nodes_(capture.take_nodes()), marks_(capture.marks()) {
  for (std::size_t i = 0; i < capture.streams(); ++i)
    streams_.push_back(std::make_unique<Stream>(capture.device()));
}

void Graph::run() {
  std::vector<std::shared_ptr<Mark>> marks(marks_);
  for (auto& mark : marks) mark = std::make_shared<Mark>();
  for (const Capture::Node& node : nodes_) {
    Stream& stream = *streams_[node.stream];
    if (node.work)
      stream.push(node.work);
    else if (node.waits)
      stream.push([mark = marks[node.mark]] { mark->wait(); });
    else
      stream.push([mark = marks[node.mark]] { mark->reach(); });
  }
  for (const auto& stream : streams_) stream->drain();
}

// ---- the driver's

const char* record(void* event, void* stream) {
  Event& e = event_of(event);
  if (stream && stream_of(stream).device() != e.device)
    return "an event of another device than the stream's";
  if (stream && stream_of(stream).capture()) {
    e.capture = stream_of(stream).capture();
    e.point = e.capture->record(stream_of(stream).captured_as());
    return nullptr;
  }
  if (e.capture) e.capture.reset();  // else peers may be reading it
  enqueue(stream, [mark = e.renew()] { mark->reach(); });
  return nullptr;
}

const char* wait(void* stream, void* event) {
  const Event& e = event_of(event);
  Stream& s = stream_of(stream);
  if (!e.capture) {
    const auto mark = event_of(event).get();
    if (mark && s.capture()) return "a captured stream waits for what came before its capture";
    if (mark) enqueue(stream, [mark] { mark->wait(); });
    return nullptr;
  }
  if (e.capture->has_ended()) return "an event that was recorded in a capture";
  if (!s.capture()) s.set_capture(e.capture, e.capture->add_stream(s));
  if (s.capture() != e.capture) return "an event of another capture than the stream's";
  e.capture->wait(s.captured_as(), e.point);
  return nullptr;
}

const char* query(void* event, bool* is_reached) {
  if (event_of(event).capture) return "the host asks for an event that was recorded in a capture";
  const auto mark = event_of(event).get();
  *is_reached = !mark || mark->is_reached();
  return nullptr;
}

const char* block(void* event) {
  if (event_of(event).capture) return "the host waits for an event that was recorded in a capture";
  if (const auto mark = event_of(event).get()) mark->wait();
  return nullptr;
}

const char* elapsed(void* from, void* to, double* seconds) {
  const auto when = [](void* event) { return event_of(event).get()->when(); };
  *seconds = std::chrono::duration<double>(when(to) - when(from)).count();
  return nullptr;
}

const char* begin_capture(void* stream) {
  Stream& s = stream_of(stream);
  if (s.capture()) return "the stream is captured already";
  const auto capture = std::make_shared<Capture>();
  s.set_capture(capture, capture->add_stream(s));
  return nullptr;
}

const char* end_capture(void* stream, void** graph) {
  *graph = nullptr;
  const std::shared_ptr<Capture> capture = stream_of(stream).capture();
  if (!capture || stream_of(stream).captured_as() != 0) return "no capture began on this stream";
  if (!capture->end()) {
    capture->take_nodes();  // events that were recorded in it keep the rest
    return "a captured stream that the first has not waited for";
  }
  *graph = new std::shared_ptr<Graph>(std::make_shared<Graph>(*capture));
  return nullptr;
}

const char* launch_graph(void* graph, void* stream) {
  if (stream_of(stream).capture()) return "a graph is launched into a captured stream";
  enqueue(stream, [made = *static_cast<std::shared_ptr<Graph>*>(graph)] { made->run(); });
  return nullptr;
}

const char* end_graph(void* graph) {
  delete static_cast<std::shared_ptr<Graph>*>(graph);
  return nullptr;
}

}  // namespace tessera::kernels::cuda::emulator
