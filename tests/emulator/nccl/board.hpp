// Where the ranks of one communicator meet: shared memory, for threads and for processes alike.
//
//   head   a bell, and for each rank what it is and how far it has come
//   then   for each rank its wire: what it sends, which its peers read in place
//
// A rank writes its own slot and wire only. All-zero memory is a board that nobody has come to, so
// that who is first makes it and nobody initializes it. Its name is gone once all ranks have come.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace tessera::nccl_double {

inline constexpr int kMostRanks = 32;
inline constexpr std::size_t kWireBytes = std::size_t{1} << 28;

enum class Presence : std::uint32_t { absent, here, aborted, left };

// A call that all ranks make on the host: a split, a registration.
struct Step {
  int kind, color, key, flags;
  std::uint64_t bytes;
};

struct Slot {
  std::atomic<Presence> presence;
  std::uint64_t process;  // these are written before `presence`
  int device, ranks;
  std::atomic<std::uint32_t> running;  // kernels of this communicator
  std::atomic<std::uint64_t> steps;
  Step last_steps[2];                                              // step n lies at n % 2
  std::atomic<std::uint64_t> sent[kMostRanks], taken[kMostRanks];  // messages to and from each peer
};

class Board {
 public:
  // Throws: std::runtime_error.
  static std::shared_ptr<Board> open(const std::string& name);
  explicit Board(const std::string& name);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  const std::string& name() const { return name_; }
  Slot& slot(int rank) { return head_->slots[rank]; }
  std::byte* wire(int rank) const { return wires_ + static_cast<std::size_t>(rank) * kWireBytes; }
  // Whether no other has been here as `rank`. The last of `ranks` takes the name away.
  bool take_seat(int rank, int device, int ranks);
  // Whether so many ranks have come.
  bool is_full(int ranks) const { return head_->came.load() >= static_cast<std::uint32_t>(ranks); }
  // Nobody else comes.
  void drop_name();
  // Whether this rank's process has ended.
  bool is_dead(int rank);
  // Makes sure that there is memory for so many bytes of a wire, or says no.
  bool reserve(int rank, std::size_t bytes);

  void ring();
  // Sleeps until `ready()`, which looks at what others change before they ring.
  template <class Ready>
  void wait(const Ready& ready) {
    for (;;) {
      const std::uint32_t heard = head_->bell.load();
      if (ready()) return;
      sleep(heard);
    }
  }

 private:
  struct Head {
    std::atomic<std::uint32_t> bell, came;
    std::atomic<std::uint32_t> seats[kMostRanks];
    Slot slots[kMostRanks];
  };
  void sleep(std::uint32_t heard);
  const std::string name_;
  int file_ = -1;
  Head* head_ = nullptr;
  std::byte* wires_ = nullptr;
  std::size_t reserved_[kMostRanks] = {};
  std::atomic<bool> has_name_ = true;
};

// Of this process, whatever it has been forked from.
std::uint64_t process_number();

}  // namespace tessera::nccl_double
