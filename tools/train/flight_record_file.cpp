#include "tools/train/flight_record_file.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tools/train/inputs.hpp"
#include "tools/train/signals.hpp"

namespace tessera::train {
namespace {

// Whole or not at all, and for nobody else's eyes: it names the parts of a model.
bool write_private(const std::string& path, const std::string& text) {
  const std::string temporary = concat(path, ".tmp-", ::getpid());
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return false;
  std::size_t done = 0;
  for (ssize_t n = 1; n > 0 && done < text.size(); done += static_cast<std::size_t>(n))
    n = std::max<ssize_t>(::write(file, text.data() + done, text.size() - done), 0);
  const bool whole = done == text.size();
  const int reason = errno;
  ::close(file);
  if (whole && std::rename(temporary.c_str(), path.c_str()) == 0) return true;
  const int second = whole ? errno : reason;
  ::unlink(temporary.c_str());
  errno = second;
  return false;
}

}  // namespace

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
  } catch (const DataError&) {
    leave();
    throw;
  } catch (const std::exception& error) {
    leave();
    write(own, error.what());
    throw;
  }
}

void FlightRecordFiles::serve_signals() {
  sigset_t awaited;
  ::sigemptyset(&awaited);
  ::sigaddset(&awaited, kRecordSignal);
  for (int signal = 0;;) {
    ::sigwait(&awaited, &signal);
    if (stop_) return;
    const std::lock_guard lock(mutex_);
    for (const Rank& rank : ranks_) write(rank, "");
  }
}

void FlightRecordFiles::write(const Rank& of, const std::string& failure) const {
  const std::string path = flight_record_path(path_, of.rank);
  if (!write_private(path, of.recorder->to_json(of.rank, of.size, failure)))
    log(LogLevel::warning,
        concat("comm.flight_record: '", path, "' could not be written: ", std::strerror(errno)));
}

}  // namespace tessera::train
