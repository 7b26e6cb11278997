// How processes come together that do not see each other's memory yet: what a world of them asks of
// whoever started them. A step of training never comes here.
//
//   World::mpi         MpiBootstrap     a communicator of MPI, and its shared windows
//   World::processes   SharedBootstrap  POSIX shared memory alone, once they have found each other
//
// Everything here is collective: all ranks of the bootstrap call it, in the same order. A rank that
// dies meanwhile may leave its peers waiting, so they meet first where that is noticed
// (ShmWorld::barrier), once they can.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <type_traits>
#include <vector>

namespace tessera::comm {

// Memory of all ranks of a bootstrap as this rank has mapped it. What is not freed stays until the
// process ends, because a peer that has failed may never come to free it.
class SharedMemory {
 public:
  virtual ~SharedMemory() = default;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  const std::vector<std::byte*>& bases() const noexcept { return bases_; }  // by rank
  virtual void free() noexcept = 0;                                         // collective

 protected:
  SharedMemory() = default;

  std::vector<std::byte*> bases_;
};

// What each rank has made of its part.
template <class T>
std::vector<T*> views(const SharedMemory& memory) {
  std::vector<T*> all;
  for (std::byte* base : memory.bases()) all.push_back(std::launder(reinterpret_cast<T*>(base)));
  return all;
}

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  // Blocks until all are here.
  virtual void meet() = 0;
  // Each rank gives as many bytes, and gets those of all, by rank.
  virtual void exchange(std::span<const std::byte> own, std::byte* all) = 0;
  template <class T>
  std::vector<T> exchange(const T& own) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<std::size_t>(size_));
    exchange(std::as_bytes(std::span(&own, 1)), reinterpret_cast<std::byte*>(all.data()));
    return all;
  }
  // The ranks that give the same number, by their `order`. Null for who gives a negative one.
  virtual std::unique_ptr<Bootstrap> split(int number, int order) = 0;
  // `bytes` of each rank, all zero, on pages of their own. Requires: all ranks are on one machine.
  virtual std::unique_ptr<SharedMemory> share(std::int64_t bytes) = 0;
  // Called now and then while a rank waits for others, where it can be: what it throws ends the
  // wait. For all that is split off, too.
  virtual void set_look(const std::function<void()>& /*look*/) {}
  virtual void free() noexcept = 0;

 protected:
  Bootstrap(int rank, int size) noexcept : rank_(rank), size_(size) {}

 private:
  const int rank_, size_;
};

}  // namespace tessera::comm
