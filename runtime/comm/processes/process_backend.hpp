// A world of processes of one machine: who they are, what they share, how the world ends. Where
// ranks are on several hosts another class adds what goes between them (mpi.cpp).
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/comm/processes/bootstrap.hpp"
#include "runtime/comm/processes/peer_monitor.hpp"
#include "runtime/comm/processes/process_group.hpp"
#include "runtime/comm/processes/shm.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::comm {

// Throws: ContractError, in the name of `world`, for options that processes can't have.
void expect_process_options(const char* world, const WorldOptions& options);

class ProcessBackend : public World::Backend {
 public:
  // `hosts` are, for each rank, the first rank on its host. Collective over `all`. Who makes one
  // calls `watch` next.
  ProcessBackend(std::unique_ptr<Bootstrap> all, std::vector<int> hosts,
                 const WorldOptions& options);
  ~ProcessBackend() override;
  ProcessBackend(const ProcessBackend&) = delete;
  ProcessBackend& operator=(const ProcessBackend&) = delete;

  // From here on peers are looked after. `look_beyond` looks after what is on other hosts, every
  // 100 ms.
  void watch(const WorldOptions& options, std::function<void()> look_beyond = [] {});

  int rank() const noexcept { return all_->rank(); }
  int size() const noexcept { return all_->size(); }
  int ranks_on_my_cores() const;  // of this host, whose affinity mask is this rank's. Collective

  Group* group(DeviceContext& context, const GroupSeat& seat) final;
  void commit() noexcept final {
    for (const auto& group : groups_) group->commit();
  }
  void fail(const std::string& reason) noexcept override { world_->halt(reason); }
  void abandon(const std::string& reason) noexcept final { world_->abort(reason); }
  std::string reason() const final { return world_->reason(); }
  void rejoin(DeviceContext&, std::span<double> largest) override {
    world_->rejoin(largest, [this] { drain(); });
  }
  std::string leave() noexcept final;

 protected:
  virtual std::unique_ptr<ProcessGroup> make_group(std::unique_ptr<Bootstrap> members,
                                                   std::string name, std::span<const int> hosts) {
    return std::make_unique<ProcessGroup>(std::move(members), std::move(name), hosts, *world_);
  }
  // All ranks of this host are idle, behind a failure or at the end of the world: nothing of it is
  // to be on its way any more.
  virtual void drain() {}
  // At the end, when this host's ranks have met. False: other hosts do not come, because of `why`
  // the world has failed, so all that is shared stays.
  virtual bool meet_other_hosts(const std::string& /*why*/) { return true; }
  virtual void end_alone() noexcept {}  // without the peers

  void stop_watching() noexcept { monitor_.reset(); }
  bool has_several_hosts() const { return world_->size() != size(); }
  Bootstrap& all() const noexcept { return *all_; }
  ShmWorld& world() const noexcept { return *world_; }
  const std::vector<int>& hosts() const noexcept { return hosts_; }

 private:
  void free_all() noexcept;  // collective

  std::unique_ptr<Bootstrap> all_;  // first: it may be what keeps MPI running
  const std::vector<int> hosts_;
  std::unique_ptr<Bootstrap> host_;
  std::unique_ptr<SharedMemory> segments_;
  std::unique_ptr<ShmWorld> world_;  // the ranks of this host
  bool is_held_ = false;             // memory, by a model of some rank at the end of the world
  // In the order of making, that of all ranks first.
  std::vector<std::unique_ptr<ProcessGroup>> groups_;
  std::unique_ptr<PeerMonitor> monitor_;  // last: its thread uses the rest
};

}  // namespace tessera::comm
