// What goes over the wire between a store and its ranks, one shape for all: pure functions of
// bytes, so that a test can hand in any. All numbers are little-endian.
//
//   bytes  4       1     4   8       4         key bytes  the rest
//          length  kind  id  number  key size  key        value
//
// The length counts what follows it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/store/store.hpp"

namespace tessera {
struct ProcessSeat;
}

namespace tessera::detail {

enum class MessageKind : std::uint8_t {
  // The store's.
  greeting,  // first of all; key: the job, number: whether the store takes seats
  seated,    // the answer to hello
  refused,   // as well; value: why, for good, number: 1 where rank 0 gives up for all
  later,     // as well: the store is ending, another one may come
  full,      // all ranks are here
  answer,    // id: of the question; number or value
  denied,    // as well; value: why
  departed,  // number: the rank, id: a Departure; value: why
  pulse,     // the answer to a beat
  // A rank's.
  hello,       // first of all; key: the job, value: host and process, number: the rank
  set,         // key, value
  get,         // key
  add,         // key, number
  forget,      // id: of a get whose time is over
  missing,     // who has not come
  watch,       // number: the silence in ms
  last_words,  // value
  beat,        // I am alive
  leave
};
inline constexpr auto kLastKind = MessageKind::leave;

struct Message {
  MessageKind kind = MessageKind::beat;
  std::uint32_t id = 0;
  std::int64_t number = 0;
  std::string key = {}, value = {};

  bool operator==(const Message&) const = default;
};

inline constexpr std::size_t kLengthBytes = 4, kHeadBytes = 17;
// The largest length of a message: of a rank with a seat, and of who has none yet.
inline constexpr std::size_t kMostMessageBytes = kHeadBytes + kMostKeyBytes + kMostValueBytes,
                             kMostStrangerBytes = 4096;

// Requires: key and value are not larger than what the receiver takes.
std::string encode(const Message& message);
// The length that the first kLengthBytes of a message say; nothing where it is less than a head, or
// more than `most`.
std::optional<std::size_t> length_of(std::string_view begin, std::size_t most);
// What follows the length; nothing where it is no message.
std::optional<Message> decode(std::string_view body);

// How a store and its ranks name the job to each other, and what people call it.
std::string identity(const StoreAddress& job);
std::string describe_job(std::string_view identity);
// As this process was told of them: "MASTER_ADDR=a", "MASTER_PORT=1", and with run id and size.
std::string given_host(const StoreAddress& job);
std::string given_port(const StoreAddress& job);
std::string describe_own(const StoreAddress& job);
// Where the job of a seat meets.
StoreAddress address_of(const ProcessSeat& seat);
// "host gpu3, process 12", and which attempt of it, if not the first.
std::string describe_process(const StoreAddress& job);

// "1, 4-6 and 9", of at most a dozen parts.  Requires: increasing.
std::string describe_ranks(const std::vector<int>& ranks);

}  // namespace tessera::detail
