#include "runtime/comm/nccl/nccl_group.hpp"

#include "runtime/comm/agreement.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::comm {
namespace {

constexpr std::chrono::hours kForEver{24 * 365};  // a lost rank ends it earlier

}  // namespace

// A group of one rank has no communicator of its own.
void NcclGroup::open(NcclGroup* whole) {
  if (world_.size() == 1) return;
  if (!whole) return world_.join(base_);
  world_.split(whole->base_, seat_.size() > 1 ? seat_.ranks[0] : -1, seat_.rank, 0, base_);
}

// One block of threads is enough for `control`, whose calls are small.
void NcclGroup::open(NcclRole& role, bool is_control) {
  world_.split(base_, 0, seat_.rank, is_control ? 1 : 0, role.comm);
}

std::unique_ptr<Communicator> NcclGroup::make(DeviceContext& context, const GroupSeat& seat,
                                              std::string_view role, StreamId stream) {
  roles_.push_back(std::make_unique<NcclRole>(*context.driver(), recorder_, stream));
  return make_nccl_communicator(context, *this, *roles_.back(), seat, role, stream);
}

std::shared_ptr<SymmetricMemory> NcclGroup::allocate(DeviceContext& context, std::int64_t bytes,
                                                     std::string_view purpose) {
  const int call = ++allocations_;
  const std::string own = concat(bytes, " for ", purpose);
  const std::vector<std::string> all =
      tell_all(concat("allocation ", call), own, world_.init_timeout());
  for (std::size_t r = 1; r < all.size(); ++r)
    TESSERA_EXPECT(std::stoll(all[r]) == std::stoll(all[0]), "allocate_symmetric: in call ", call,
                   " rank ", seat_.ranks[0], " asks for bytes: ", all[0], ", rank ", seat_.ranks[r],
                   " for ", all[r], "; every rank must ask for the same");
  return arena_.allocate(context, bytes);
}

void NcclGroup::look() const {
  for (const auto& role : roles_) role->look();
}

std::string NcclGroup::late() const {
  const double timeout_s = world_.options().timeout_seconds;
  for (int s = 0; s < kMaxStreams; ++s) {
    FlightEntry call;
    if (recorder_.find(recorder_.running(static_cast<StreamId>(s)), call) && call.started_ns != 0 &&
        static_cast<double>(monotonic_ns() - call.started_ns) > timeout_s * 1e9)
      return concat("call ", call.seq, ", ", call.to_string(), ", has taken ", timeout_s, " s; ",
                    position());
  }
  return "";
}

std::string NcclGroup::position() const {
  const std::string where = recorder_.position(world_.rank());
  return seat_.group == kWorldGroup ? where : concat(where, " in '", seat_.group, "'");
}

void NcclGroup::forget() {
  for (const auto& role : roles_) role->forget();
  recorder_.restart();
  allocations_ = 0;
}

std::string NcclGroup::parting() const {
  if (seat_.size() < 2) return "";
  const auto all = tell_all("steps", std::to_string(recorder_.steps()), kForEver);
  for (const std::string& steps : all)
    if (steps != all[0])
      return describe_steps(seat_.group, std::stoull(all[0]), std::stoull(steps));
  return "";
}

}  // namespace tessera::comm
