#include "runtime/comm/nccl/nccl_comparison.hpp"

#include <cstring>

#include "runtime/comm/agreement.hpp"

namespace tessera::comm {
namespace {

constexpr std::uint64_t kShown = 500;  // calls, to a peer

std::int64_t shown(std::uint64_t seq, std::uint64_t fingerprint) {
  return static_cast<std::int64_t>((seq & 0x7fffffff) << 32 | (fingerprint & 0xffffffff));
}

}  // namespace

// A counter of the store is what can be read without waiting.
std::string NcclComparison::compare() {
  if (seat_.size() < 2) return "";
  const auto key = [&](int rank) { return concat("calls of group ", number_, " from ", rank); };
  if (seat_.rank != 0) {
    const std::uint64_t last = recorder_.last_submitted();
    const std::int64_t now = shown(last, recorder_.fingerprint_after(last));
    if (now != told_)
      world_.store().add(key(seat_.ranks[static_cast<std::size_t>(seat_.rank)]), now - told_);
    told_ = now;
    return "";
  }
  heard_.resize(seat_.ranks.size());
  for (std::size_t r = 1; r < heard_.size(); ++r) {
    const auto seq = [&] { return static_cast<std::uint64_t>(heard_[r]) >> 32; };
    // What is ahead of this rank is compared once it is there.
    if (seq() <= recorder_.last_submitted()) heard_[r] = world_.store().add(key(seat_.ranks[r]), 0);
    const std::uint64_t own = recorder_.fingerprint_after(seq());
    if (seq() == 0 || own == 0 || shown(seq(), own) == heard_[r]) continue;
    return difference(seat_.ranks[r]);
  }
  return "";
}

std::string NcclComparison::difference(int rank) {
  std::vector<FlightEntry> calls;
  const std::string bytes =
      world_.store().ask(concat("calls of group ", number_, " in full from ", rank));
  calls.resize(bytes.size() / sizeof(FlightEntry));
  std::memcpy(static_cast<void*>(calls.data()), bytes.data(), calls.size() * sizeof(FlightEntry));
  std::string why = describe_difference(recorder_, seat_.ranks[0], calls, rank);
  if (!why.empty()) return why;
  return concat("ranks ", seat_.ranks[0], " and ", rank, " have submitted other calls in '",
                seat_.group, "'; every rank must submit the same collectives in the same order");
}

void NcclComparison::show() const {
  if (seat_.size() < 2 || seat_.rank == 0) return;
  const int own = seat_.ranks[static_cast<std::size_t>(seat_.rank)];
  std::string bytes;
  FlightEntry call;
  const std::uint64_t last = recorder_.last_submitted();
  for (std::uint64_t n = last > kShown ? last - kShown : 0; n <= last; ++n)
    if (recorder_.find(n, call)) bytes.append(reinterpret_cast<const char*>(&call), sizeof call);
  world_.store().answer(concat("calls of group ", number_, " in full from ", own), bytes);
}

void NcclComparison::forget() {
  told_ = 0;
  heard_.clear();
}

}  // namespace tessera::comm
