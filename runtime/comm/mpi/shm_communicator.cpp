// Collectives of processes that see each other's memory: they publish, meet, pull and meet again,
// as threads do.
#include <cstring>

#include "runtime/comm/mpi/shm.hpp"
#include "runtime/comm/pull.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::comm {
namespace {

class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(DeviceContext& context, ShmGroup& group, int number, const GroupSeat& seat,
                  std::string_view role, StreamId stream)
      : Communicator(context, group.recorder(group.rank()), seat, role, stream),
        group_(group),
        number_(number),
        inputs_(static_cast<std::size_t>(group.size())) {
    for (int r = 0; r < size(); ++r) published_.push_back(&group.role(r, number).published);
  }

 private:
  struct Part {
    ShmCommunicator* self;
    GroupCall call;
    void operator()(Exec& exec) const { self->run(call, Mover(exec)); }
  };

  // What of an item is at the same offset on every rank, and where in it a rank's send begins: an
  // all_gather in-id sends from the rank's own chunk of recv, everything else from send.
  struct Common {
    const SharedMapping* mapping = nullptr;  // null: no memory that all can read
    std::int64_t offset = 0;
    std::int64_t stride = 0;  // from one rank's send to the next
  };

  struct Peers {
    const ShmCommunicator& self;
    Common at;

    void open(const Collective& c, std::size_t, std::int64_t staged, std::int64_t address) {
      if (staged != StagingPlan::kDirect)
        at = {nullptr, staged, 0};
      else
        at = c.kind == CollectiveKind::send_recv ? self.told(c, address) : self.common(c);
    }
    const std::byte* send(int peer) const {
      const std::byte* base = at.mapping ? at.mapping->bases[static_cast<std::size_t>(peer)]
                                         : self.group_.role(peer, self.number_).staging;
      return base + at.offset + peer * at.stride;
    }
  };

  Common common(const Collective& c) const {
    const auto bytes = static_cast<std::int64_t>(item_bytes(c));
    const auto* begin = static_cast<const std::byte*>(c.send);
    const auto* recv = static_cast<const std::byte*>(c.recv);
    const bool is_own_chunk =
        c.kind == CollectiveKind::all_gather && begin == recv + rank() * bytes;
    if (is_own_chunk) begin = recv;
    const int chunks = is_own_chunk ? size() : send_chunks(c.kind, size());
    Common common{group_.find(begin, bytes * chunks), 0, is_own_chunk ? bytes : 0};
    if (common.mapping)
      common.offset = begin - common.mapping->bases[static_cast<std::size_t>(rank())];
    return common;
  }

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
      const Common at = common(c);
      const Address address{at.mapping->number, at.offset};
      std::memcpy(staging + plan.address(), &address, sizeof address);
    }
  }
  Common told(const Collective& c, std::int64_t at) const {
    Address address;
    std::memcpy(&address, group_.role(c.root, number_).staging + at, sizeof address);
    return {&group_.mapping(address.mapping), address.offset, 0};
  }

  void check_transport(const char* group, std::span<const Collective> items) const override {
    StagingPlan plan(size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      const Collective& c = items[i];
      const bool is_direct = plan.next(c) == StagingPlan::kDirect;
      const bool is_read = c.kind != CollectiveKind::send_recv || c.root == rank();
      TESSERA_EXPECT(!is_direct || !is_read || c.count == 0 || c.kind == CollectiveKind::barrier ||
                         common(c).mapping,
                     name(c.kind), " '", group, "', item ", i, ": send ", c.send,
                     " does not lie in memory of World::allocate_symmetric, which is all that "
                     "other processes can read");
    }
  }

  void launch(const Op& op, const GroupCall& call) override {
    Stream(context_, stream()).launch_collective(op, nullptr, Part{this, call});
  }

  void run(const GroupCall& call, const Mover& mover) {
    recorder_.started(call.seq, stream());
    GroupSegment::Role& mine = group_.role(rank(), number_);
    publish(mine.published, call, send_layout_hash(call.items()));
    stage(mover, mine.staging, call.items(), rank(), size());
    tell_addresses(mine.staging, call.items());
    group_.meet(number_, call.name);
    group_.world().agree([&] { check_agreement(published_, ranks(), role(), group_.recorders()); });
    pull(mover, call.items(), rank(), size(), inputs_, Peers{*this, {}});
    group_.meet(number_, call.name);
    recorder_.done(call.seq, stream());
  }

  std::uint64_t send_layout_hash(std::span<const Collective> items) const {
    StagingPlan plan(size());
    std::uint64_t hash = 0;
    for (const Collective& c : items) {
      if (plan.next(c) != StagingPlan::kDirect || c.count == 0) continue;
      if (c.kind == CollectiveKind::send_recv) continue;  // its root's alone
      const Common at = common(c);
      if (!at.mapping) continue;  // a barrier
      hash = fnv1a(at.mapping->number, hash);
      hash = fnv1a(static_cast<std::uint64_t>(at.offset), hash);
      hash = fnv1a(static_cast<std::uint64_t>(at.stride), hash);
    }
    return hash;
  }

  ShmGroup& group_;
  const int number_;                 // of the role
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
