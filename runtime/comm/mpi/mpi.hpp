// For the files that call MPI, and only for them.
#pragma once

#include <mpi.h>

#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "runtime/comm/processes/shm.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera::comm {

// Throws: CommError with MPI's own words unless `status` is MPI_SUCCESS.
inline void check(int status, const char* call,
                  std::source_location where = std::source_location::current()) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(status, text, &length);
  throw CommError(concat(call, ": ", std::string(text, static_cast<std::size_t>(length))), where);
}

class HostLayout;
class MpiChannel;

// What a communicator of a group works with.
struct MessageSetup {
  ShmGroup& group;  // of this host's ranks
  int number;       // of the role
  const HostLayout& layout;
  MpiChannel& channel;  // used by nobody else
  std::vector<std::byte*>
      exchange;  // of the ranks of the layout's host: the channel's memory, twice
};
// Between hosts by messages, within one through memory, on the stream's thread; no bytes of an item
// move before all ranks have come and agree.
std::unique_ptr<Communicator> make_message_communicator(DeviceContext& context,
                                                        const MessageSetup& setup,
                                                        const GroupSeat& seat,
                                                        std::string_view role, StreamId stream);

}  // namespace tessera::comm
