// The grouped collectives that one stream has been given, each reused once the host knows that it
// has run: no memory is allocated for them in a steady step, and their items are looked at once.
#pragma once

#include <memory>
#include <vector>

#include "tessera/comm/communicator.hpp"

namespace tessera::shard {

class PreparedGroups {
 public:
  PreparedGroups(const Device& device, StreamId stream) : device_(device), stream_(stream) {}
  // Queued collectives may still read what was prepared for them, so the device keeps it.
  ~PreparedGroups();
  PreparedGroups(const PreparedGroups&) = delete;
  PreparedGroups& operator=(const PreparedGroups&) = delete;

  // A group for the stream's next launch: without items, or with those of an earlier one.
  CollectiveGroup& next(const char* name);

 private:
  struct Prepared {
    CollectiveGroup group;
    Tick tick = 0;
  };
  const Device& device_;
  StreamId stream_;
  std::vector<std::shared_ptr<Prepared>> prepared_;
};

}  // namespace tessera::shard
