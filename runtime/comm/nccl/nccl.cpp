// World::nccl: one process for each GPU, and NCCL between them.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "kernels/kernel_table.hpp"
#include "runtime/comm/agreement.hpp"
#include "runtime/comm/nccl/nccl_footprint.hpp"
#include "runtime/comm/nccl/nccl_group.hpp"
#include "runtime/comm/poll_thread.hpp"
#include "runtime/comm/world_state.hpp"
#include "runtime/device/open_driver.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {
namespace comm {
namespace {

constexpr std::chrono::milliseconds kCompareEvery{400}, kCompareFor{1200};

class NcclBackend final : public World::Backend {
 public:
  explicit NcclBackend(std::unique_ptr<NcclWorld> world) : world_(std::move(world)) {}
  // Where the world was never whole, or its end has failed, communicators are left.
  ~NcclBackend() override {
    poll_thread_.reset();
    if (context_) {
      context_->set_on_block({});
      context_->set_on_replay({});
      static_cast<void>(context_->acting_driver());
    }
    world_->abandon();
  }
  NcclBackend(const NcclBackend&) = delete;
  NcclBackend& operator=(const NcclBackend&) = delete;

  Group* group(DeviceContext& context, const GroupSeat& seat) override {
    if (groups_.empty()) {
      context_ = &context;
      context.set_on_block([this] { hear(); });
      context.set_on_replay([this](const Event& before, const Event& behind) {
        for (const auto& group : groups_)
          group->replays().launched(*context_->driver(), before, behind);
      });
      world_->set_drop_graphs([this](const std::string& why) { drop_graphs(why); });
    } else {
      context.synchronize();  // nothing may be under way on a communicator that is split
    }
    const std::lock_guard lock(mutex_);
    NcclGroup* const whole = groups_.empty() ? nullptr : groups_[0].get();
    groups_.push_back(
        std::make_unique<NcclGroup>(*world_, static_cast<int>(groups_.size()), seat, arena_));
    {
      const NcclFootprint footprint(context);
      groups_.back()->open(whole);
    }
    if (!poll_thread_ && world_->size() > 1)
      poll_thread_ = std::make_unique<PollThread>(std::vector<int>(), [this](int) { look(); });
    return seat.ranks.empty() ? nullptr : groups_.back().get();
  }

  // A collective ends only when all ranks have come to it: what a rank has committed may be lost,
  // which its device then says.
  void commit() noexcept override {}
  void fail(const std::string& reason) noexcept override { world_->fail(reason); }
  void abandon(const std::string& reason) noexcept override { world_->fail(reason); }
  std::string reason() const override { return world_->reason(); }

  // Its communicators are gone: each group gets a new one, of a new id.
  void rejoin(DeviceContext& context, std::span<double> largest) override {
    const std::lock_guard lock(mutex_);
    world_->abandon();  // the watch thread may be about to
    for (const auto& group : groups_) group->forget();
    world_->begin_attempt(largest);
    Ledger& ledger = Memory::of(context).ledger();
    ledger.add_outside(kMeasuredNccl, -ledger.outside_bytes(kMeasuredNccl));
    const NcclFootprint footprint(context);
    for (const auto& group : groups_) group->open(group == groups_[0] ? nullptr : groups_[0].get());
  }

  std::string leave() noexcept override {
    std::string why = world_->reason();
    try {
      if (why.empty()) {
        world_->store().leaves();
        for (const auto& group : groups_)
          if (const std::string parted = group->parting(); why.empty()) why = parted;
        stop();
        for (const auto& group : groups_) group->leave();
        drop_graphs("its world has ended");
        world_->free_all();
        return why;
      }
    } catch (const std::exception& error) {
      why = concat("rank ", world_->rank(), " ends without its peers: ", error.what());
    }
    stop();
    for (const auto& group : groups_) group->leave();
    world_->abandon();
    world_->store().last_words(why);
    return why;
  }

 private:
  void stop() noexcept {
    poll_thread_.reset();
    context_->set_on_block({});
    context_->set_on_replay({});
  }

  void drop_graphs(const std::string& why) {
    static_cast<void>(context_->acting_driver());
    context_->drop_graphs(why);
  }

  // The watch thread's, whose device is at first GPU 0, as every thread's.
  void look() {
    static_cast<void>(context_->acting_driver());
    const int attempt = world_->attempt();
    std::string late;
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
      for (const auto& group : groups_) {
        if (const std::string error = group->look(); !error.empty()) return world_->fail(error);
        if (late.empty()) late = group->late();
      }
      if (const std::string parted = difference(); !parted.empty()) return world_->fail(parted);
    }
    world_->look(attempt, late, [this] {
      const std::unique_lock lock(mutex_, std::try_to_lock);
      if (!lock.owns_lock()) return concat("rank ", world_->rank(), " makes a group or recovers");
      std::string where;
      for (const auto& group : groups_)
        where += concat(where.empty() ? "" : ", ", group->position());
      return where;
    });
  }

  // Ranks that submit different calls never meet, or NCCL says that something is wrong: it is
  // looked for at once then. Empty where nothing is found.
  std::string difference() try {
    const auto now = std::chrono::steady_clock::now();
    if (world_->has_failed()) return "";
    const bool is_wrong = !world_->async_error().empty();
    if (!is_wrong && now - compared_ < kCompareEvery) return "";
    compared_ = now;
    std::string parted = compare();
    while (is_wrong && parted.empty() && world_->store().add("failures", 0) == 0 &&
           std::chrono::steady_clock::now() - now < kCompareFor) {
      std::this_thread::sleep_for(kCompareEvery / 8);
      parted = compare();
    }
    return parted;
  } catch (const std::exception&) {  // of the store, which tells it itself
    return "";
  }
  std::string compare() {
    const bool is_asked = world_->store().add("asked", 0) > 0;
    for (const auto& group : groups_) {
      if (is_asked) group->comparison().show();
      if (const std::string parted = group->comparison().compare(); !parted.empty()) return parted;
    }
    return "";
  }

  // The host's, behind each blocking call. Of an abort the device knows nothing.
  void hear() {
    for (const auto& group : groups_)
      if (const std::string error = group->look(); !error.empty()) world_->fail(error);
    if (!world_->has_failed()) return;
    const std::exception_ptr error = world_->error();
    context_->executor().fail_unseen(error);
    std::rethrow_exception(error);
  }

  std::unique_ptr<NcclWorld> world_;
  std::chrono::steady_clock::time_point compared_{};
  DeviceContext* context_ = nullptr;
  PlainArena arena_;
  std::mutex mutex_;                                // of groups_, for the watch thread
  std::vector<std::unique_ptr<NcclGroup>> groups_;  // in the order of making
  std::unique_ptr<PollThread> poll_thread_;         // last: its thread uses the rest
};

// The GPU of this process, and its UUID.
std::string choose_gpu(const ProcessSeat& seat, DeviceChoice& choice) {
  const Driver& driver = open_driver(choice.module, kernels::kKernelsLayout);
  std::int32_t gpus = 0;
  if (const char* const error = driver.count(&gpus)) throw DeviceError(error);
  if (!choice.index) choice.index = gpus == 1 ? 0 : seat.local_rank;
  if (*choice.index >= gpus)
    throw DeviceError(concat("World::nccl: rank ", seat.rank, " is rank ", seat.local_rank,
                             " of its machine, which has ", gpus,
                             " GPUs; start one process for each"));
  DriverDevice device{};
  if (const char* const error = driver.describe(*choice.index, &device)) throw DeviceError(error);
  return device.uuid;
}

}  // namespace
}  // namespace comm

World World::nccl(const ProcessSeat& seat, const WorldOptions& given) {
  TESSERA_EXPECT(given.device.kind == DeviceKind::cuda && given.executor == ExecutorKind::threaded,
                 "World::nccl: ranks are on GPUs; set device.kind to cuda, and no executor");
  TESSERA_EXPECT(seat.size >= 1 && seat.rank >= 0 && seat.rank < seat.size, "World::nccl: rank ",
                 seat.rank, " of ", seat.size, "; give a rank from 0 to size - 1");
  TESSERA_EXPECT(given.nccl.reduce_max_ctas >= NcclOptions::kMeasuredCtas,
                 "NcclOptions: reduce_max_ctas is ", given.nccl.reduce_max_ctas,
                 "; give a number of blocks, 0 for as many as NCCL wants, or kMeasuredCtas");
  TESSERA_EXPECT(
      given.nccl.gather_policy != GatherPolicy::zero || given.nccl.windows,
      "NcclOptions: gather_policy is zero, and copy engines move windows alone; set windows");
  WorldOptions options = given;
  std::string uuid, refused;
  try {
    uuid = comm::choose_gpu(seat, options.device);
  } catch (const DeviceError& error) {  // which peers are to hear of, too
    refused = error.what();
  }
  auto world = std::make_unique<comm::NcclWorld>(seat, options, uuid, refused);
  return World(std::make_unique<State>(WorldKind::nccl, seat.rank, seat.size, options,
                                       threads_per_rank(options, seat.size),
                                       std::make_unique<comm::NcclBackend>(std::move(world))));
}

}  // namespace tessera
