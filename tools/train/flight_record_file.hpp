// The flight records of this process's ranks as JSON files, one a rank: of a run that ends in a
// collective, and of one that still runs whenever SIGUSR2 comes. A run that fails for another
// reason says it in its message, and writes none.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/world.hpp"

namespace tessera::train {

// Ranks are added and removed by their own threads.
class FlightRecordFiles {
 public:
  // `path` as the user named it; see flight_record_path.  Requires: hold_record_signal has
  // been called, so that SIGUSR2 waits for the thread that starts here.
  explicit FlightRecordFiles(std::string path);
  ~FlightRecordFiles();
  FlightRecordFiles(const FlightRecordFiles&) = delete;
  FlightRecordFiles& operator=(const FlightRecordFiles&) = delete;

  // Runs `body`, the rank's run, and returns what it returns. What it throws goes on; a CommError
  // is written first, unless it only echoes what another rank of this process has thrown; where it
  // can't be, the message says so, too.
  int during(const World& world, const std::function<int()>& body);
  // Of the ranks that still run, as far as that can be done: the process is about to end.
  void write_all(const std::string& failure);

 private:
  struct Rank {
    int rank, size;
    const FlightRecorder* recorder;
  };

  void serve_signals();
  // Returns why the file could not be written, which must not hide why it was to be; else "".
  std::string write(const Rank& of, const std::string& failure) const;

  const std::string path_;
  std::mutex mutex_;
  std::vector<Rank> ranks_;
  std::atomic<bool> has_cause_{false};  // a rank has failed outside of a collective
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace tessera::train
