// What the ranks of World::nccl tell each other through the store, beside NCCL: each in an attempt,
// since keys of the one before are still there.
// Threads: any.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/store/store.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

// So long peers wait for the reason once they know that a rank has failed.
inline constexpr std::chrono::seconds kReasonWithin{5};

class NcclStore {
 public:
  // Throws: CommError that lists who has not come in time.
  NcclStore(const ProcessSeat& seat, std::chrono::milliseconds timeout);
  NcclStore(const NcclStore&) = delete;
  NcclStore& operator=(const NcclStore&) = delete;

  const ProcessSeat& seat() const noexcept { return seat_; }
  int attempt() const noexcept { return attempt_; }  // the same on all ranks
  void begin_attempt() noexcept { ++attempt_; }

  // Each of `ranks`, in their order, hears what all say under `what`, which is used once.
  // Throws: CommError, LostRank.
  std::vector<std::string> tell_all(const std::string& what, std::span<const int> ranks,
                                    const std::string& own,
                                    std::chrono::milliseconds timeout) const;
  std::vector<int> all_ranks() const;
  // Several texts as one.
  static std::string pack(std::span<const std::string> texts);
  static std::vector<std::string> unpack(std::string_view all);
  // What rank 0 says. Throws as above.
  std::string from_first(std::string_view what, std::string_view own,
                         std::chrono::milliseconds timeout) const;
  // A counter; what a peer answers once it looks ("asked" counts the questions), empty where it
  // does not; and such an answer.
  std::int64_t add(const std::string& counter, std::int64_t n) const;
  std::string ask(const std::string& what) const;
  void answer(const std::string& what, const std::string& answer) const;

  // --- failure
  // From here on who is gone is heard of.
  void watch(double heartbeat_timeout_seconds);
  std::string departed() const;  // who is, in words; empty for nobody
  bool is_lost() const;          // has it died or stopped, and not failed with a word
  void expect_nobody_lost() const;
  void leaves() noexcept { is_leaving_ = true; }  // peers may leave from here on, too
  // Peers that wait for this rank at a meeting that it never comes to hear why.
  void last_words(const std::string& why) const { store_->last_words(why); }
  // This rank fails: the first reason of all ranks.
  std::string first_reason(std::string own, bool asks_positions, int attempt);
  // Whether a rank has failed, and why; `position` says where this one is then, for its message.
  bool failure(int attempt, const std::function<std::string()>& position, std::string& why);

 private:
  static std::string key(std::string_view what, int attempt) { return concat(what, ' ', attempt); }
  std::string key(std::string_view what) const { return key(what, attempt_); }

  const ProcessSeat seat_;
  std::atomic<int> attempt_{1};
  std::atomic<bool> is_leaving_{false};
  mutable std::mutex mutex_;
  std::string departed_;
  bool is_lost_ = false;
  std::unique_ptr<detail::Store> store_;  // last: its thread uses the rest
};

}  // namespace tessera::comm
