// Where the processes of a job find each other before anything else connects them: rank 0 serves
// keys and values over TCP, every rank has one connection to it. Also how a rank hears that another
// one has gone, and why. README.md says who can join, and what goes over the wire.
//
//   rank 0   serve ─ join ─┐ all      ┌─ set, get, add ─ ... ─ leave, and wait until all have left
//   rank 1        ─ join ──┤ here     ├─ set, get, add ─ ... ─ leave
//   rank 2     ─── join ───┘          └─ set, get, add ─ ... ─ leave
//
// Called by the worlds of processes. It moves bytes of kilobytes, never tensors.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::detail {

// A job: stores whose host, port, run id and world size are the same are one.
struct StoreAddress {
  std::string host;    // a name or an address of rank 0's machine, the same text on every rank
  int port = 0;        // the first of kStorePorts that rank 0 may serve on
  std::string run_id;  // "none" where the launcher gives none
  int world_size = 1;
  int restart_count = 0;  // differs between the hosts of a job, so it is only told in messages
  // What gave host and port: "MASTER_ADDR=node1". For messages; empty: the caller.
  std::string host_from{}, port_from{};
};

// Rank 0 takes the first free one of so many ports from StoreAddress::port on, since torchrun's own
// store often holds that one; the others look at all of them.
inline constexpr int kStorePorts = 17;
constexpr int last_port(int first) { return std::min(first + kStorePorts - 1, 65535); }
inline constexpr std::size_t kMostKeyBytes = 1024, kMostValueBytes = std::size_t{1} << 20;

// How a rank went.
enum class Departure : std::uint8_t {
  left,    // in order
  failed,  // with last words
  lost     // its process has died or has stopped, or its machine can't be reached
};

// One connection of one rank. All its calls may come from any thread.
class Store {
 public:
  // Hears of a rank that has gone, with a sentence that names it. Called on the store's thread, and
  // must not call the store or block.
  using Hear = std::function<void(int rank, Departure how, const std::string& why)>;

  // Collective: returns once all ranks of the job are here; on rank 0 it also begins to serve. Name
  // lookup and refused connections are tried again until the time is over. `timeout` holds for all
  // calls up to `watch`, to half a second.
  // Throws: JoinError, which names the ranks that never came, or what else was found on these
  // ports; or that says who has this rank's seat already. It has rank 0 where rank 0 throws it too.
  static std::unique_ptr<Store> join(const StoreAddress& address, int rank,
                                     std::chrono::milliseconds timeout);
  // Leaves. Rank 0 waits until all have left, for at most kParting, and then logs who had not.
  // Before `watch` it waits no longer than `timeout`.
  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Gives `key` a value; one that was there is replaced.
  virtual void set(std::string_view key, std::string_view value) = 0;
  // The value of `key`, once somebody has set it.
  virtual std::string get(std::string_view key, std::chrono::milliseconds timeout) = 0;
  // Adds `n` to the counter `key`, which begins at 0, and returns the sum. Its value is text.
  virtual std::int64_t add(std::string_view key, std::int64_t n) = 0;
  // All three throw CommError, before `watch` JoinError: where rank 0 can't be reached, and `get`
  // when the time is over; LostRank where `get` waits and a rank has failed or is lost; DataError
  // for keys and values that are too large, or more of them than a store holds.

  // From here on `hear` is told of each rank that goes, once, of those that have gone already too.
  // A rank that shows no life for `silence` is lost; 0: never. All ranks give the same.
  virtual void watch(std::chrono::milliseconds silence, Hear hear) = 0;
  // This rank gives up: the others hear `why`, after its name. It still has to leave.
  virtual void last_words(std::string_view why) = 0;

 protected:
  Store() = default;
};

inline constexpr std::chrono::seconds kParting{10};

}  // namespace tessera::detail
