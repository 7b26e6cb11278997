#include "runtime/comm/processes/process_backend.hpp"

#include <sched.h>

#include <algorithm>
#include <new>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::comm {
namespace {

void make_segment(std::byte* at, int rank) {
  auto* const own = new (at) Segment;
  own->rank = rank;
  own->process = ProcessId::own();
}

}  // namespace

void expect_process_options(const char* world, const WorldOptions& options) {
  TESSERA_EXPECT(options.device.kind == DeviceKind::cpu, world,
                 ": processes can't reach a GPU's memory; use ranks as threads (--ranks N), or the "
                 "CPU");
  TESSERA_EXPECT(
      options.executor == ExecutorKind::threaded || options.executor == ExecutorKind::inlined,
      world, ": the ", tessera::name(options.executor),
      " executor does not run over processes; use run_local for schedules and World::emulated for "
      "planning");
}

ProcessBackend::ProcessBackend(std::unique_ptr<Bootstrap> all, std::vector<int> hosts,
                               const WorldOptions& options)
    : all_(std::move(all)),
      hosts_(std::move(hosts)),
      host_(all_->split(hosts_[static_cast<std::size_t>(rank())], rank())),
      segments_(host_->share(static_cast<std::int64_t>(sizeof(Segment)))) {
  make_segment(segments_->bases()[static_cast<std::size_t>(host_->rank())], rank());
  host_->meet();  // all segments stand
  world_ = std::make_unique<ShmWorld>(views<Segment>(*segments_), host_->rank(),
                                      options.timeout_seconds);
  all_->set_look([this] {
    if (world_->has_lost()) world_->expect_fine();  // all others come, also after a failure
  });
}

// Where memory is held, a model that outlived its world, on some rank, is gone by now.
ProcessBackend::~ProcessBackend() {
  stop_watching();
  if (is_held_) free_all();
}

void ProcessBackend::watch(const WorldOptions& options, std::function<void()> look_beyond) {
  monitor_ = std::make_unique<PeerMonitor>(*world_, options, std::move(look_beyond));
}

int ProcessBackend::ranks_on_my_cores() const {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  sched_getaffinity(0, sizeof(mine), &mine);
  int sharing = 0;
  for (const cpu_set_t& mask : host_->exchange(mine)) sharing += CPU_EQUAL(&mask, &mine);
  return sharing;
}

// The ranks meet where a dead peer is noticed before they enter the bootstrap, where it may not be.
World::Backend::Group* ProcessBackend::group(DeviceContext& context, const GroupSeat& seat) {
  if (!groups_.empty()) {
    context.synchronize();
    groups_[0]->meet("a group of ranks");
  }
  const bool is_member = !seat.ranks.empty();
  std::unique_ptr<Bootstrap> members = all_->split(is_member ? seat.ranks[0] : -1, seat.rank);
  if (!is_member) return nullptr;
  std::vector<int> hosts;
  for (const int rank : seat.ranks) hosts.push_back(hosts_[static_cast<std::size_t>(rank)]);
  groups_.push_back(make_group(std::move(members), seat.group, hosts));
  return groups_.back().get();
}

std::string ProcessBackend::leave() noexcept {
  std::string why;
  try {
    world_->leave();
    world_->shut_down();
    why = world_->reason();
    if (!meet_other_hosts(why)) return why;
    drain();
    stop_watching();
    const auto held = static_cast<int>(
        std::ranges::any_of(groups_, [](const auto& group) { return group->is_held(); }));
    is_held_ = std::ranges::max(all_->exchange(held)) != 0;
    for (const auto& group : groups_)
      if (const std::string parted = group->parting(); why.empty()) why = parted;
  } catch (const std::exception& error) {
    end_alone();
    return concat("rank ", rank(), " ends without its peers: ", error.what());
  }
  if (!is_held_) free_all();
  return why;
}

// In the order in which all ranks have made them.
void ProcessBackend::free_all() noexcept {
  for (const auto& group : groups_) group->free();
  segments_->free();
  host_->free();
  all_->free();
}

}  // namespace tessera::comm
