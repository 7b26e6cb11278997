// Processes of one machine come together in memory that all of them map, by names in /dev/shm. Who
// has found whom first is processes.cpp's matter: a board, of which each rank has made its part.
//
//   exchange   rank 0   post ─┐ all have   ┌─ take ─┐ all have
//              rank 1   ─ post┘ posted     └─ take ─┘ taken
//   share      each makes its part, all map all parts, the names go: nothing is left behind
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/comm/processes/bootstrap.hpp"
#include "runtime/comm/processes/process_id.hpp"

namespace tessera::comm {

// One rank's part of a board. Lies in shared memory, which is all zero at first.
struct BoardPart {
  static constexpr std::size_t kBytes = 512;

  alignas(64) std::atomic<std::uint64_t> token{0};  // of the job: the part is there
  ProcessId process;                                // of that of all ranks
  std::atomic<std::uint64_t> posted{0}, taken{0};   // how many exchanges have come so far
  alignas(64) std::byte data[kBytes];
};

// The processes of a job, by rank.
class Peers {
 public:
  explicit Peers(std::span<BoardPart* const> parts);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // Whether it has ended; false, too, where that can't be seen.
  bool has_ended(int rank) const noexcept;
  int pid(int rank) const { return ids_[static_cast<std::size_t>(rank)].pid; }

 private:
  std::vector<ProcessId> ids_;
  std::vector<int> pidfds_;
};

class SharedBootstrap final : public Bootstrap {
 public:
  // All ranks of a job, whose parts are `board`. A rank waits `timeout` for another, or until its
  // process has ended.
  static std::unique_ptr<SharedBootstrap> world(std::unique_ptr<SharedMemory> board, int rank,
                                                std::uint64_t token,
                                                std::chrono::duration<double> timeout);

  using Bootstrap::exchange;
  void meet() override { exchange(std::span<const std::byte>(), nullptr); }
  void exchange(std::span<const std::byte> own, std::byte* all) override;
  std::unique_ptr<Bootstrap> split(int number, int order) override;
  std::unique_ptr<SharedMemory> share(std::int64_t bytes) override;
  void set_look(const std::function<void()>& look) override;
  void free() noexcept override { board_->free(); }

 private:
  // What all bootstraps of a job in this process share.
  struct Job {
    std::uint64_t token;
    std::chrono::duration<double> timeout;
    std::function<void()> look;
    Peers peers;
  };

  // `members` are its ranks as the job counts them.
  SharedBootstrap(std::shared_ptr<Job> job, std::unique_ptr<SharedMemory> board, std::string name,
                  std::vector<int> members, int rank);

  void exchange_piece(std::span<const std::byte> own, std::byte* all, std::size_t stride);
  void await(const std::atomic<std::uint64_t> BoardPart::* count, int rank) const;
  std::vector<int> late(const std::atomic<std::uint64_t> BoardPart::* count) const;
  void expect_none_ended(const std::atomic<std::uint64_t> BoardPart::* count) const;
  void expect_no_error(const std::string& error);
  std::unique_ptr<SharedMemory> share_among(const std::vector<int>& ranks, int own,
                                            const std::string& name, std::int64_t bytes);

  const std::shared_ptr<Job> job_;
  const std::unique_ptr<SharedMemory> board_;
  const std::vector<BoardPart*> parts_;
  const std::string name_;  // begins those of all its memory
  const std::vector<int> members_;
  std::uint64_t exchanges_ = 0, shares_ = 0;
};

}  // namespace tessera::comm
