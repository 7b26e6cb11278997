#include "tools/train/flight_record_file.hpp"

#include <pthread.h>

#include <csignal>
#include <utility>

#include "runtime/base/held_signals.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/file.hpp"
#include "tessera/base/log.hpp"
#include "tools/train/inputs.hpp"
#include "tools/train/signals.hpp"

namespace tessera::train {

FlightRecordFiles::FlightRecordFiles(std::string path)
    : path_(std::move(path)), thread_([this] { serve_signals(); }) {}

FlightRecordFiles::~FlightRecordFiles() {
  stop_ = true;
  pthread_kill(thread_.native_handle(), kRecordSignal);
  thread_.join();
}

int FlightRecordFiles::during(const World& world, const std::function<int()>& body) {
  const Rank own{world.rank(), world.size(), &world.flight_recorder()};
  const auto leave = [&] {
    const std::lock_guard lock(mutex_);
    std::erase_if(ranks_, [&](const Rank& r) { return r.rank == own.rank; });
  };
  {
    const std::lock_guard lock(mutex_);
    ranks_.push_back(own);
  }
  try {
    const int code = body();
    leave();
    return code;
  } catch (const CommError& error) {
    leave();
    const std::string unwritten = has_cause_ ? "" : write(own, error.what());
    if (unwritten.empty()) throw;
    throw detail::with_rank(CommError(concat(error.what(), "; ", unwritten), error.where()),
                            error.rank());
  } catch (...) {
    leave();
    has_cause_ = true;
    throw;
  }
}

void FlightRecordFiles::write_all(const std::string& failure) {
  const std::lock_guard lock(mutex_);
  for (const Rank& rank : ranks_) static_cast<void>(write(rank, failure));
}

void FlightRecordFiles::serve_signals() {
  const HeldSignals others_take_them;  // those of the run
  sigset_t awaited;
  ::sigemptyset(&awaited);
  ::sigaddset(&awaited, kRecordSignal);
  for (int signal = 0;;) {
    ::sigwait(&awaited, &signal);
    if (stop_) return;
    const std::lock_guard lock(mutex_);
    for (const Rank& rank : ranks_)
      if (const std::string unwritten = write(rank, ""); !unwritten.empty())
        log(LogLevel::warning, unwritten);
  }
}

std::string FlightRecordFiles::write(const Rank& of, const std::string& failure) const {
  try {  // for nobody else's eyes: it names the parts of a model
    write_whole(flight_record_path(path_, of.rank), of.recorder->to_json(of.rank, of.size, failure),
                {.mode = 0600, .flush = false});
    return "";
  } catch (const DeviceError& error) {
    return concat("comm.flight_record: ", error.what());
  }
}

}  // namespace tessera::train
