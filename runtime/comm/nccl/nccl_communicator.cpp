// A communicator over NCCL: opens its role at the first call, and has each call watched.
#include <optional>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/nccl/nccl_exchange.hpp"
#include "runtime/comm/nccl/nccl_footprint.hpp"
#include "runtime/comm/nccl/nccl_group.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::comm {
namespace {

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(DeviceContext& context, NcclGroup& group, NcclRole& role, const GroupSeat& seat,
                   std::string_view name, StreamId stream)
      : Communicator(context, group.recorder(), seat, name, stream),
        group_(group),
        world_(group.world()),
        role_(role),
        exchange_(context, world_, role.comm, seat,
                  name != "control" && !world_.options().nccl.ordered_sums) {}

 private:
  struct Part {
    NcclCommunicator* self;
    GroupCall call;
    void operator()(Exec& exec) const { self->run(call, exec); }
  };

  void launch(const Op& op, const GroupCall& call) override {
    world_.expect_fine();                    // the communicator is gone then
    std::optional<NcclFootprint> footprint;  // with what NCCL connects in its first group
    if (!role_.comm.native) {
      TESSERA_EXPECT(!context_.is_capturing(), "captured step: '", op.name, "' is the first call ",
                     "on communicator '", role(), "'; make one step before the captured one");
      static_cast<void>(context_.acting_driver());
      footprint.emplace(context_);
      group_.open(role_);
      is_first_ = true;
    }
    Stream(context_, stream()).launch_collective(op, nullptr, Part{this, call});
  }

  void will_replay(std::uint64_t seq) override { group_.replays().add(seq); }

  // Events of a capture would say nothing, and may not be asked: events around each replay do.
  void run(const GroupCall& call, Exec& exec) {
    const bool is_captured = context_.is_capturing();
    if (is_captured)
      will_replay(call.seq);
    else
      role_.begin(call.seq, exec.native_stream);
    exchange_.run(call, exec, is_first_);
    is_first_ = false;
    if (!is_captured) role_.end(exec.native_stream);
  }

  NcclGroup& group_;
  NcclWorld& world_;
  NcclRole& role_;
  NcclExchange exchange_;
  bool is_first_ = false;  // peers may still be on their way
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(DeviceContext& context, NcclGroup& group,
                                                     NcclRole& role, const GroupSeat& seat,
                                                     std::string_view name, StreamId stream) {
  return std::make_unique<NcclCommunicator>(context, group, role, seat, name, stream);
}

}  // namespace tessera::comm
