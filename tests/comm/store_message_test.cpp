// What goes over a store's wire: every message comes back, and nothing else is one.
#include "runtime/comm/store/message.hpp"

#include <random>

#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera::detail;

namespace {

std::string bytes(std::mt19937_64& random, std::size_t size) {
  std::string text(size, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

}  // namespace

TEST_CASE("a store's message is read as it was written, whatever bytes it holds") {
  const std::uint64_t seed = tessera::testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (int kind = 0; kind <= static_cast<int>(kLastKind); ++kind) {
    const Message message{.kind = static_cast<MessageKind>(kind),
                          .id = static_cast<std::uint32_t>(random()),
                          .number = static_cast<std::int64_t>(random()),
                          .key = bytes(random, random() % 40),
                          .value = bytes(random, random() % 4000)};
    const std::string wire = encode(message);
    const auto length = length_of(wire, kMostMessageBytes);
    REQUIRE(length);
    CHECK(*length == wire.size() - kLengthBytes);
    const auto read = decode(std::string_view(wire).substr(kLengthBytes));
    REQUIRE(read);
    CHECK(*read == message);
  }
}

TEST_CASE("a length that no message has is refused before anything is allocated") {
  for (const std::uint32_t length : {0u, 1u, 16u, 4097u, 0x20544547u, 0xffffffffu}) {
    INFO("length " << length);
    std::string begin(kLengthBytes, '\0');
    for (std::size_t i = 0; i < begin.size(); ++i) begin[i] = static_cast<char>(length >> (8 * i));
    CHECK_FALSE(length_of(begin, kMostStrangerBytes));
  }
}

TEST_CASE("bytes that are no message are none, and never read beyond their end") {
  CHECK_FALSE(decode(""));
  CHECK_FALSE(decode(std::string(kHeadBytes - 1, '\0')));
  std::string no_kind(kHeadBytes, '\0');
  no_kind[0] = static_cast<char>(static_cast<int>(kLastKind) + 1);
  CHECK_FALSE(decode(no_kind));
  std::string long_key(kHeadBytes + 3, '\0');
  long_key[13] = 4;  // of the 3 bytes that are there
  CHECK_FALSE(decode(long_key));
  long_key[13] = 3;
  CHECK(decode(long_key));
  std::string large(kHeadBytes + kMostValueBytes + 1, '\0');
  CHECK_FALSE(decode(large));
  large.pop_back();
  CHECK(decode(large));
}

TEST_CASE("ranks are listed as ranges, and a long list is cut") {
  CHECK(describe_ranks({}).empty());
  CHECK(describe_ranks({4}) == "4");
  CHECK(describe_ranks({0, 1, 2, 7, 9, 10}) == "0-2, 7, 9-10");
  std::vector<int> odd;
  for (int r = 1; r < 2000; r += 2) odd.push_back(r);
  CHECK(describe_ranks(odd) == "1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23 and 988 more");
}

TEST_CASE("a job is its address, run id and world size together, and restarts are none of it") {
  const StoreAddress job{.host = "a", .port = 1, .run_id = "x", .world_size = 2};
  StoreAddress other = job;
  other.restart_count = 3;
  CHECK(identity(other) == identity(job));
  for (auto change :
       {+[](StoreAddress& a) { a.host = "b"; }, +[](StoreAddress& a) { a.port = 2; },
        +[](StoreAddress& a) { a.run_id = "y"; }, +[](StoreAddress& a) { a.world_size = 3; }}) {
    other = job;
    change(other);
    CHECK(identity(other) != identity(job));
  }
  CHECK(describe_job(identity(job)) == "host a, port 1, run id x, 2 ranks");
  CHECK(describe_job("anything else") == "anything else");
}

TEST_CASE("a job is named by what gave its address, and by the address where nobody says") {
  StoreAddress job{.host = "a", .port = 1, .run_id = "x", .world_size = 2};
  CHECK(describe_own(job) == "host a, port 1, run id x, 2 ranks");
  const std::string told = identity(job);
  job.host_from = "MASTER_ADDR=a";
  job.port_from = "MASTER_PORT=1";
  CHECK(describe_own(job) == "MASTER_ADDR=a, MASTER_PORT=1, run id x, 2 ranks");
  job.host_from = job.port_from = "TESSERA_STORE=a:1";
  CHECK(describe_own(job) == "TESSERA_STORE=a:1, run id x, 2 ranks");
  CHECK(identity(job) == told);  // ranks of one job may have been told in different ways
}
