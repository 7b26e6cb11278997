// A group of processes of one machine: the memory that its ranks share, and their communicators.
// Where ranks are on several hosts another class adds what goes between them (mpi_group.hpp).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/processes/bootstrap.hpp"
#include "runtime/comm/processes/shm.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

class ProcessGroup : public World::Backend::Group {
 public:
  // `all` are the group's ranks, which are on `hosts`. Collective over it.
  ProcessGroup(std::unique_ptr<Bootstrap> all, std::string name, std::span<const int> hosts,
               ShmWorld& world);
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  std::unique_ptr<Communicator> make(DeviceContext& context, const GroupSeat& seat,
                                     std::string_view role, StreamId stream) final {
    return make_communicator(context, made_++, seat, role, stream);
  }
  std::shared_ptr<SymmetricMemory> allocate(DeviceContext& context, std::int64_t bytes,
                                            std::string_view purpose) final;
  FlightRecorder& recorder() noexcept final { return shm_->recorder(shm_->rank()); }

  // All ranks, before they enter the bootstrap, where nothing wakes them; `why` is for messages.
  // Throws: CommError once the world is aborted.
  virtual void meet(const char* why) { shm_->meet_to_allocate(why); }
  void commit() const noexcept { shm_->commit(); }
  // Of ranks that have made other numbers of steps of optimizers; empty for none. Collective.
  std::string parting() const;
  bool is_held() const;          // memory, by a model of this rank
  virtual void free() noexcept;  // collective

 protected:
  // Of the role that is made as number `number`.
  virtual std::unique_ptr<Communicator> make_communicator(DeviceContext& context, int number,
                                                          const GroupSeat& seat,
                                                          std::string_view role, StreamId stream);
  // All ranks have agreed on `bytes`.
  virtual std::shared_ptr<SymmetricMemory> make_memory(DeviceContext& context, std::int64_t bytes);

  Bootstrap& all() const noexcept { return *all_; }
  Bootstrap& host() const noexcept { return *host_; }  // those on this host
  ShmGroup& shm() const noexcept { return *shm_; }

 private:
  struct Held {
    std::unique_ptr<SharedMemory> memory;
    std::uint64_t number;
    std::shared_ptr<bool> let_go;
  };

  void free_let_go();

  std::unique_ptr<Bootstrap> all_, host_;
  const std::string name_;
  std::unique_ptr<SharedMemory> segments_;
  std::unique_ptr<ShmGroup> shm_;  // the ranks of this host
  std::vector<Held> held_;
  std::uint64_t allocations_ = 0;
  int made_ = 0;
};

}  // namespace tessera::comm
