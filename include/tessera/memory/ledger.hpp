// Who holds how many bytes. Blocks of the pool, slots and host staging are booked under a named
// owner. So a peak can be explained, and a plan compared with a run, number by number. Free slots
// are not booked; they count as reserved. Nor are the 64 KiB that a communicator may stage.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// An index into a ledger's owners.
using OwnerId = std::uint16_t;
// The owner of bytes that nobody else has claimed: results of operations, and their scratch.
inline constexpr OwnerId kActivations = 0;

// Bytes handed out, by owner and in all. Sizes are as rounded by the resource. Threads: the rank's
// host thread.
class Ledger {
 public:
  Ledger() { owner("activations"); }

  // The id of a named owner, which is made at its first mention.
  OwnerId owner(std::string_view name);
  // The owner's name, valid until the next call of owner().
  const std::string& name(OwnerId owner) const { return entries_[owner].name; }

  void add(OwnerId owner, std::int64_t bytes);
  void remove(OwnerId owner, std::int64_t bytes);

  // Bytes of the device that neither the pools nor symmetric memory hold, as a library's own. They
  // are in no other number here, and stand below the sum in `table`.
  void add_outside(std::string_view what, std::int64_t bytes);
  std::int64_t outside_bytes(std::string_view what) const;

  std::int64_t live_bytes() const noexcept { return live_; }
  std::int64_t live_bytes(std::string_view owner) const;
  // The largest value of live_bytes() since the last reset_peak().
  std::int64_t peak_bytes() const noexcept { return peak_; }
  void reset_peak() noexcept;

  struct Line {
    std::string owner;
    std::int64_t live_bytes;
    std::int64_t at_peak_bytes;  // held at the moment of peak_bytes()
  };
  // Owners in the order in which they were first mentioned.
  std::vector<Line> lines() const;
  // The lines as a small table, and what is outside, for error messages and reports.
  std::string table() const;

 private:
  struct Entry {
    std::string name;
    std::int64_t live = 0;
    std::int64_t at_peak = 0;
  };
  void settle() const;

  struct Outside {
    std::string what;
    std::int64_t bytes;
  };

  mutable std::vector<Entry> entries_;
  std::vector<Outside> outside_;
  std::int64_t live_ = 0;
  std::int64_t peak_ = 0;
  mutable bool at_peak_ = false;  // live_ == peak_, and at_peak columns are not yet copied
};

}  // namespace tessera
