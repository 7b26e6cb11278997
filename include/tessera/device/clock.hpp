// Stream names, ticks and clocks: the arithmetic behind every ordering decision of the library.
//
//   compute  1 ── 2 ── 3 ─────────── 4        a launch ticks its stream;
//                      │ record               `record` snapshots what the stream knows;
//   gather   1 ────────┴─▶ wait ── 2          `wait` merges the snapshot:
//                                             gather's clock is now {compute: 3, gather: 2}
//
// "A is ordered before B" is then one comparison: does the clock of B's stream cover A's tick?
// Ticks never restart.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tessera {

// The streams of a rank. `compute` is the caller's; values of the program are copied on it, too.
// `gather` and `reduce` are the sharding engine's. `replicate` is for sums along the first
// dimension of a hybrid mesh. `transfer` copies between the device's memory and tensors of the
// host. Bodies on `offload` run on the host's processor, for any device; see Device::host.
enum class StreamId : std::uint8_t { compute, gather, reduce, replicate, transfer, offload };

inline constexpr int kMaxStreams = 6;
inline constexpr StreamId kStreams[kMaxStreams] = {StreamId::compute,  StreamId::gather,
                                                   StreamId::reduce,   StreamId::replicate,
                                                   StreamId::transfer, StreamId::offload};
inline constexpr const char* kStreamNames[kMaxStreams] = {"compute",   "gather",   "reduce",
                                                          "replicate", "transfer", "offload"};

constexpr std::size_t index(StreamId s) { return static_cast<std::size_t>(s); }
constexpr const char* name(StreamId s) { return kStreamNames[index(s)]; }

using Tick = std::uint64_t;

// For each stream, the tick of its newest operation that is ordered before the owner of the clock.
struct Clock {
  std::array<Tick, kMaxStreams> ticks{};

  constexpr Tick operator[](StreamId s) const { return ticks[index(s)]; }
  constexpr Tick& operator[](StreamId s) { return ticks[index(s)]; }

  constexpr void merge(const Clock& other) {
    for (std::size_t i = 0; i < kMaxStreams; ++i)
      if (other.ticks[i] > ticks[i]) ticks[i] = other.ticks[i];
  }
  constexpr bool covers(const Clock& other) const {
    for (std::size_t i = 0; i < kMaxStreams; ++i)
      if (ticks[i] < other.ticks[i]) return false;
    return true;
  }
  bool operator==(const Clock&) const = default;
};

// When each stream last touched an allocation. Every allocation embeds one, and launches update it
// through `Access`.
struct LastUse {
  Clock touched;
};

}  // namespace tessera
