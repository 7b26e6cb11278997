#include "runtime/comm/store/message.hpp"

#include <unistd.h>

#include "tessera/base/error.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::detail {
namespace {

template <class Int>
void put(std::string& out, Int value) {
  for (std::size_t i = 0; i < sizeof value; ++i)
    out += static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * i) & 0xff);
}

template <class Int>
Int take(std::string_view bytes, std::size_t at) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(Int); ++i)
    value |= std::uint64_t{static_cast<unsigned char>(bytes[at + i])} << (8 * i);
  return static_cast<Int>(value);
}

}  // namespace

std::string encode(const Message& message) {
  std::string out;
  const std::size_t length = kHeadBytes + message.key.size() + message.value.size();
  out.reserve(kLengthBytes + length);
  put(out, static_cast<std::uint32_t>(length));
  put(out, static_cast<std::uint8_t>(message.kind));
  put(out, message.id);
  put(out, message.number);
  put(out, static_cast<std::uint32_t>(message.key.size()));
  out += message.key;
  out += message.value;
  return out;
}

std::optional<std::size_t> length_of(std::string_view begin, std::size_t most) {
  const std::size_t length = take<std::uint32_t>(begin, 0);
  if (length < kHeadBytes || length > most) return std::nullopt;
  return length;
}

std::optional<Message> decode(std::string_view body) {
  if (body.size() < kHeadBytes) return std::nullopt;
  const auto kind = static_cast<std::uint8_t>(body[0]);
  const std::size_t key_bytes = take<std::uint32_t>(body, 13);
  if (kind > static_cast<std::uint8_t>(kLastKind) || key_bytes > kMostKeyBytes ||
      key_bytes > body.size() - kHeadBytes ||
      body.size() - kHeadBytes - key_bytes > kMostValueBytes)
    return std::nullopt;
  return Message{.kind = static_cast<MessageKind>(kind),
                 .id = take<std::uint32_t>(body, 1),
                 .number = take<std::int64_t>(body, 5),
                 .key = std::string(body.substr(kHeadBytes, key_bytes)),
                 .value = std::string(body.substr(kHeadBytes + key_bytes))};
}

std::string identity(const StoreAddress& job) {
  return concat("tessera store 1, host ", job.host, ", port ", job.port, ", run id ", job.run_id,
                ", ", job.world_size, " ranks");
}

std::string describe_job(std::string_view identity) {
  const std::size_t begin = identity.find("host ");
  return std::string(identity.substr(begin == std::string_view::npos ? 0 : begin));
}

std::string given_host(const StoreAddress& job) {
  return job.host_from.empty() ? concat("host ", job.host) : job.host_from;
}

std::string given_port(const StoreAddress& job) {
  return job.port_from.empty() ? concat("port ", job.port) : job.port_from;
}

std::string describe_own(const StoreAddress& job) {
  const std::string host = given_host(job), port = given_port(job);
  return concat(host, host == port ? "" : ", " + port, ", run id ", job.run_id, ", ",
                job.world_size, " ranks");
}

StoreAddress address_of(const ProcessSeat& seat) {
  return {.host = seat.host,
          .port = seat.port,
          .run_id = seat.run_id,
          .world_size = seat.size,
          .host_from = seat.host_from,
          .port_from = seat.port_from};
}

std::string describe_process(const StoreAddress& job) {
  char host[256] = "?";
  ::gethostname(host, sizeof host - 1);
  return concat("host ", host, ", process ", ::getpid(),
                job.restart_count > 0 ? concat(", restart ", job.restart_count) : std::string());
}

std::string describe_ranks(const std::vector<int>& ranks) {
  constexpr std::size_t kMostParts = 12;
  std::string text;
  std::size_t parts = 0, i = 0;
  for (; i < ranks.size() && parts < kMostParts; ++parts) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += concat(i == 0 ? "" : ", ", ranks[i]);
    if (last > i) text += concat("-", ranks[last]);
    i = last + 1;
  }
  if (i < ranks.size()) text += concat(" and ", ranks.size() - i, " more");
  return text;
}

}  // namespace tessera::detail
