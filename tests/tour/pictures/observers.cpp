// One small program, call by call: what it does to the clocks, what observers hear of it, and who
// runs the bodies.
#include <atomic>
#include <thread>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/device/device.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/tour/pictures/pictures.hpp"

namespace tessera::pictures {
namespace {

// Writes down both accounts, and what is told of a body.
class Scribe final : public Observer {
 public:
  void launched(StreamId s, Tick t, const Op&) override {
    asked += concat("launched ", name(s), ' ', t);
  }
  void recorded(const Event& e) override {
    asked += concat("recorded ", name(e.stream), ' ', e.tick);
  }
  void waited(StreamId s, const Event& e) override {
    asked += concat("waited ", name(s), " for ", name(e.stream), ' ', e.tick);
  }
  void blocked(const Event& e) override {
    asked += concat("blocked on ", name(e.stream), ' ', e.tick);
  }

  void executor_launched(StreamId, Tick, const Op&, const CollectiveBarrier*) noexcept override {
    queued += "launched";
  }
  void executor_recorded(const Event&) noexcept override { queued += "recorded"; }
  void executor_waited(StreamId, const Event&) noexcept override { queued += "waited"; }
  void executor_blocked(const Event&) noexcept override { queued += "blocked"; }

  void started(StreamId, Tick, const char*) override { body += "started, "; }
  void finished(StreamId, Tick, const char*) override { body += "finished"; }

  std::string asked, queued, body;
};

std::string ticks(const Clock& clock) {
  return concat(clock[StreamId::compute], ' ', clock[StreamId::gather]);
}

class Program {
 public:
  explicit Program(const Device& device) : device_(device) {
    device.context().add_observer(scribe_);
  }
  ~Program() { device_.context().remove_observer(scribe_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // One line of the picture.
  template <class Call>
  void line(const char* source, const Call& call) {
    scribe_.asked = scribe_.queued = scribe_.body = "";
    call();
    const auto said = [](const std::string& text) { return text.empty() ? "·" : text; };
    row(source, ticks(device_.compute().clock()), ticks(device_.gather().clock()),
        ticks(device_.context().host_clock()), said(scribe_.asked), said(scribe_.queued),
        said(scribe_.body));
  }
  void row(const std::string& source, const std::string& compute, const std::string& gather,
           const std::string& host, const std::string& asked, const std::string& queued,
           const std::string& body) {
    drawn += padded(source, 24) + padded(compute, 8) + padded(gather, 7) + padded(host, 5) +
             padded(asked, 28) + padded(queued, 9) + body + '\n';
  }

  std::string drawn;

 private:
  const Device& device_;
  Scribe scribe_;
};

// Which thread runs the bodies, and whether it does so before or after the launches have returned.
std::string who_runs(ExecutorKind kind) {
  const Device device = Device::cpu({.executor = kind});
  std::thread::id here[2];
  std::atomic<bool> has_returned = false, is_late = false;
  for (const auto id : {StreamId::compute, StreamId::gather})
    device.stream(id).launch({.name = "where"}, [at = &here[id == StreamId::gather],
                                                 returned = &has_returned, late = &is_late](Exec&) {
      *at = std::this_thread::get_id();
      *late = returned->load();
    });
  has_returned = true;
  device.synchronize();
  const std::thread::id host = std::this_thread::get_id();
  if (here[0] == std::thread::id()) return "nobody: operations are placed on a clock";
  if (here[0] == host && here[1] == host)
    return is_late ? "the host's thread, where it blocks" : "the host's thread, where it launches";
  return here[0] == here[1] ? "one thread for all streams" : "a thread of its own for each stream";
}

}  // namespace

std::string streams_and_observers() {
  std::string text =
      "              what the host asks for             what is put into a stream\n"
      "Stream ──▶ DeviceContext ─────────────▶ Executor ─────────────▶ queue ──▶ body\n"
      "                │ ticks clocks              │                               │\n"
      "                ▼                           ▼                               ▼\n"
      "             launched, recorded,         executor_launched,            started,\n"
      "Observer     waited, blocked             executor_recorded, ...        finished\n\n";
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Stream compute = device.compute(), gather = device.gather();
  Event written, copied;
  Program program(device);
  program.row("", "ordered after, at", "", "", "observers hear", "", "");
  program.row("the program", "compute", "gather", "host", "asked", "queued", "the body");
  program.line("compute.launch(\"fill\")", [&] { compute.launch({.name = "fill"}, [](Exec&) {}); });
  program.line("e = compute.record()", [&] { written = compute.record(); });
  program.line("gather.wait(e)", [&] { gather.wait(written); });
  program.line("gather.wait(e)", [&] { gather.wait(written); });
  program.line("gather.launch(\"copy\")", [&] { gather.launch({.name = "copy"}, [](Exec&) {}); });
  program.line("f = gather.record()", [&] { copied = gather.record(); });
  program.line("device.block(f)", [&] { device.block(copied); });
  text +=
      program.drawn +
      "\nA clock is two ticks here, of compute and of gather. The second wait is free: the clock "
      "covers it.\n\nWho runs a body:\n";
  for (const auto kind : {ExecutorKind::threaded, ExecutorKind::inlined, ExecutorKind::virtual_})
    text += concat("  ", padded(std::string(name(kind)), 12), who_runs(kind), '\n');
  return text;
}

}  // namespace tessera::pictures
