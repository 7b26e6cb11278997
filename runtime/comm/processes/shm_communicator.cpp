// Collectives of processes that see each other's memory: they publish, meet, pull and meet again,
// as threads do.
#include <cstring>

#include "runtime/comm/processes/shared_sends.hpp"
#include "runtime/comm/processes/shm.hpp"
#include "runtime/comm/pull.hpp"

namespace tessera::comm {
namespace {

class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(DeviceContext& context, ShmGroup& group, int number, const GroupSeat& seat,
                  std::string_view role, StreamId stream)
      : Communicator(context, group.recorder(group.rank()), seat, role, stream),
        group_(group),
        number_(number),
        sends_(group, number, rank(), size()),
        inputs_(static_cast<std::size_t>(group.size())) {
    for (int r = 0; r < size(); ++r) published_.push_back(&group.role(r, number).published);
  }

 private:
  struct Part {
    ShmCommunicator* self;
    GroupCall call;
    void operator()(Exec& exec) const { self->run(call, ItemMover(exec)); }
  };

  struct Peers {
    const ShmCommunicator& self;
    SharedSends::Span at;

    void open(const Collective& c, std::size_t, std::int64_t staged, std::int64_t address) {
      const bool is_told = c.kind == CollectiveKind::send_recv && staged == StagingPlan::kDirect;
      at = is_told ? self.told(c, address) : self.sends_.span(c, staged);
    }
    const std::byte* send(int peer) const { return self.sends_.send(at, peer, peer); }
  };

  // Where the send of a send_recv lies, which only its root knows.
  struct Address {
    std::uint64_t mapping;
    std::int64_t offset;
  };
  void tell_addresses(std::byte* staging, std::span<const Collective> items) const {
    StagingPlan plan(size());
    for (const Collective& c : items) {
      if (plan.next(c) != StagingPlan::kDirect || plan.address() == StagingPlan::kDirect ||
          c.root != rank())
        continue;
      const SharedSends::Span at = sends_.direct(c);
      const Address address{at.mapping->number, at.offset};
      std::memcpy(staging + plan.address(), &address, sizeof address);
    }
  }
  SharedSends::Span told(const Collective& c, std::int64_t at) const {
    Address address;
    std::memcpy(&address, group_.role(c.root, number_).staging + at, sizeof address);
    return {&group_.mapping(address.mapping), address.offset, 0};
  }

  void check_transport(const char* group, std::span<const Collective> items) const override {
    sends_.expect_readable(group, items);
  }

  void launch(const Op& op, const GroupCall& call) override {
    Stream(context_, stream()).launch_collective(op, nullptr, Part{this, call});
  }

  void run(const GroupCall& call, const ItemMover& mover) {
    recorder_.started(call.seq, stream());
    GroupSegment::Role& mine = group_.role(rank(), number_);
    publish(mine.published, call, sends_.layout_hash(call.items()));
    stage(mover, mine.staging, call.items(), rank(), size());
    tell_addresses(mine.staging, call.items());
    group_.meet(number_, call.name, call.seq);
    group_.world().agree([&] { check_agreement(published_, ranks(), role(), group_.recorders()); });
    pull(mover, call.items(), rank(), size(), inputs_, Peers{*this, {}});
    group_.meet(number_, call.name, call.seq);
    recorder_.done(call.seq, stream());
  }

  ShmGroup& group_;
  const int number_;  // of the role
  const SharedSends sends_;
  std::vector<const void*> inputs_;  // of one sum; the stream's
  std::vector<const Published*> published_;
};

}  // namespace

std::unique_ptr<Communicator> make_shm_communicator(DeviceContext& context, ShmGroup& group,
                                                    int number, const GroupSeat& seat,
                                                    std::string_view role, StreamId stream) {
  return std::make_unique<ShmCommunicator>(context, group, number, seat, role, stream);
}

}  // namespace tessera::comm
