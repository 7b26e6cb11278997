// Pieces on their way from the program's thread, which reads them from a device, to the one that
// writes them.
//
//   program   read 1 ── read 2 ── waits ─── read 3
//   writer    waits ─── write 1 ─────────── write 2
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <span>
#include <vector>

namespace tessera::checkpoint {

// Two of them at a time. Threads: one that fills, one that takes.
class PieceQueue {
 public:
  // Where the next piece goes; null where none is free after `time`, and once it is closed.
  std::vector<std::byte>* to_fill(std::chrono::steady_clock::duration time);
  void fill();
  // In the place of the next piece: what kept it from being read.
  void fail(std::exception_ptr error);
  // The next one, until the next call; nothing once it is closed.  Throws: what `fail` was given.
  std::span<const std::byte> take();

  // Nobody waits here any more.
  void close();
  bool is_closed() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::array<std::vector<std::byte>, 2> pieces_;
  std::size_t filled_ = 0, taken_ = 0, free_ = 0;  // of all that there have been
  std::exception_ptr error_;
  bool is_closed_ = false;
};

}  // namespace tessera::checkpoint
