// Whether the ranks of a group submit the same calls, though they never meet before one: each tells
// how far it has come, and the first one compares fingerprints.
//
//   rank 1   ── call 7 ── every 400 ms: "7, its fingerprint" ──▶ store
//   rank 0   ── call 9 ── every 400 ms: is that my 7? ◀──────── store
//
// Threads: the watch thread's, but for `forget`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/comm/nccl/nccl_world.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/comm/flight_recorder.hpp"

namespace tessera::comm {

class NcclComparison {
 public:
  // `number`: the group's, of all of the world. All outlive this.
  NcclComparison(NcclWorld& world, int number, const GroupSeat& seat,
                 const FlightRecorder& recorder)
      : world_(world), number_(number), seat_(seat), recorder_(recorder) {}
  NcclComparison(const NcclComparison&) = delete;
  NcclComparison& operator=(const NcclComparison&) = delete;

  // What is wrong, where two differ; empty for nothing.
  std::string compare();
  void show() const;  // the last calls, to a peer that differs
  void forget();      // what the last attempt had under way

 private:
  std::string difference(int rank);

  NcclWorld& world_;
  const int number_;
  const GroupSeat& seat_;
  const FlightRecorder& recorder_;
  // The last call that is told, or of each rank known, and its fingerprint: 32 bits each.
  std::int64_t told_ = 0;
  std::vector<std::int64_t> heard_;
};

}  // namespace tessera::comm
