// Events of the emulated GPU, and graphs: what streams were given while they were captured.
//
// A captured stream keeps its work instead of running it. A launch runs a graph on streams of its
// own, so that what no event orders overlaps, as on a GPU, and a wait that is missing shows.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/emulator/stream.hpp"

namespace tessera::kernels::cuda::emulator {

// A mark of an event in a stream: reached when the stream comes there. Recorded anew, an event
// leaves those who wait for an earlier mark waiting for that.
class Mark {
 public:
  void reach();
  void wait();
  bool is_reached();
  std::chrono::steady_clock::time_point when();  // it was reached

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_reached_ = false;
  std::chrono::steady_clock::time_point when_;
};

// Threads: the host thread of the captured streams.
class Capture {
 public:
  struct Node {
    std::size_t stream;
    std::function<void()> work;  // of a kernel or a copy; empty for a mark's
    std::size_t mark = 0;        // reached here or waited for
    bool waits = false;
  };
  // A mark in a captured stream, and how much of each stream comes before it.
  struct Point {
    std::size_t mark = 0;
    std::vector<std::size_t> known;
  };

  std::size_t add_stream(Stream& stream);
  void add(std::size_t stream, std::function<void()> work);
  Point record(std::size_t stream);
  void wait(std::size_t stream, const Point& point);
  // Whether the first stream has waited for all others. Lets go of the streams.
  bool end();
  bool has_ended() const { return has_ended_; }
  int device() const { return device_; }
  std::size_t streams() const { return streams_.size(); }
  std::size_t marks() const { return marks_; }
  // The graph's alone from here on: events that were recorded in the capture keep the rest of it.
  std::vector<Node> take_nodes() { return std::move(nodes_); }

 private:
  std::vector<Stream*> streams_;
  std::vector<std::vector<std::size_t>> known_;  // of each stream: nodes of each before its next
  std::vector<std::size_t> counts_;              // of each stream: its nodes
  std::vector<Node> nodes_;
  std::size_t marks_ = 0;
  int device_ = 0;
  bool has_ended_ = false;
};

class Graph {
 public:
  explicit Graph(Capture& capture);
  // The caller sleeps until all of it has run.
  void run();

 private:
  const std::vector<Capture::Node> nodes_;
  const std::size_t marks_;
  std::vector<std::unique_ptr<Stream>> streams_;
};

struct Event {
  explicit Event(int device) : device(device) {}
  const int device;
  std::mutex mutex;            // of `last`
  std::shared_ptr<Mark> last;  // null before the first
  // Of a record in a captured stream.
  std::shared_ptr<Capture> capture;
  Capture::Point point;

  std::shared_ptr<Mark> get();
  std::shared_ptr<Mark> renew();
};
inline Event& event_of(void* event) { return *static_cast<Event*>(event); }

// Those of the driver's table; an error is one line.
const char* record(void* event, void* stream);
const char* wait(void* stream, void* event);
const char* query(void* event, bool* is_reached);
const char* block(void* event);
const char* elapsed(void* from, void* to, double* seconds);
const char* begin_capture(void* stream);
const char* end_capture(void* stream, void** graph);
const char* launch_graph(void* graph, void* stream);
const char* end_graph(void* graph);

}  // namespace tessera::kernels::cuda::emulator
