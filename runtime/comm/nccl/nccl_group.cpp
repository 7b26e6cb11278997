#include "runtime/comm/nccl/nccl_group.hpp"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "runtime/comm/agreement.hpp"
#include "runtime/comm/planned_nccl.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::comm {
namespace {

constexpr std::chrono::hours kForEver{24 * 365};  // a lost rank ends it earlier

// Of how many texts, numbers and then perhaps something else, each number is one.
std::map<std::int64_t, std::size_t> count_numbers(std::span<const std::string> texts) {
  std::map<std::int64_t, std::size_t> counts;
  for (const std::string& text : texts) {
    std::istringstream numbers(text);
    for (std::int64_t number; numbers >> number;) ++counts[number];
  }
  return counts;
}

}  // namespace

// Ranks of no group, or of one alone, get one too, which nobody uses: NCCL_SPLIT_NOCOLOR ends the
// process where a peer dies meanwhile (ncclCommInitRankFunc fails through a null communicator).
void NcclGroup::open(NcclGroup* whole) {
  // Behind a failure, which the host would hear anew where it frees memory before it is over.
  std::erase_if(memories_, [](const auto& memory) { return memory.use_count() == 1; });
  if (world_.size() == 1) return;
  if (whole)
    world_.split(whole->base_, seat_.size() > 1 ? seat_.ranks[0] : world_.size(), seat_.rank, {},
                 base_, concat("ncclCommSplit for the group '", seat_.group, "'"));
  else
    world_.join(base_);
  keep_ways();
}

void NcclGroup::open(NcclRole& role) {
  world_.split(
      base_, 0, seat_.rank, ways_.shape_of(role.name()), role.comm,
      concat("ncclCommSplit for the first call on '", role.name(), "' of '", seat_.group, "'"));
  role.has_windows = role.name() != "control" && has_windows();
  if (role.has_windows) make_windows(role);
}

// With what NCCL has taken for it.
void NcclGroup::close(NcclRole& role) {
  for (const auto& memory : memories_) memory->end_window(role.comm);
  world_.free(role.comm);
}

void NcclGroup::set_ways(const NcclWays& ways) {
  for (const auto& role : roles_) {
    const bool differs = role->name() == "gather"   ? ways.has_zero_ctas != ways_.has_zero_ctas
                         : role->name() == "reduce" ? ways.reduce_ctas != ways_.reduce_ctas
                                                    : false;
    if (differs && role->comm.native) close(*role);
  }
  ways_ = ways;
}

void NcclGroup::expect_sizes(const RankGroup& ranks, const RankGroup::Sizes& sizes) {
  if (has_measured_ || seat_.size() < 2 || !leaves_ways_open(world_.options().nccl)) return;
  measure_ways(*this, ranks, sizes);
  has_measured_ = true;
}

// A failure may have come while they were measured.
void NcclGroup::keep_ways() {
  if (seat_.size() < 2 || !leaves_ways_open(world_.options().nccl)) return;
  const std::string own =
      has_measured_ ? concat(ways_.has_zero_ctas, ' ', ways_.reduce_ctas) : std::string("none");
  for (const std::string& said : tell_all("ways", own, world_.init_timeout()))
    has_measured_ = has_measured_ && said == own;
  if (!has_measured_) ways_ = given_ways(world_.options().nccl);
}

// Of the memory that all ranks have: a failure may have come between their allocations, or between
// their letting go of it.
void NcclGroup::make_windows(NcclRole& role) {
  std::string own;
  for (const auto& memory : memories_) own += concat(memory->number(), ' ');
  std::map<std::int64_t, std::size_t> ranks_that_have = count_numbers(tell_all(
      concat("windows ", ++role.openings, " of ", role.name()), own, world_.init_timeout()));
  for (const auto& memory : memories_)
    if (ranks_that_have[memory->number()] == seat_.ranks.size()) memory->make_window(role.comm);
}

std::string NcclGroup::dropped() const {
  std::string numbers;
  for (const auto& memory : memories_)
    if (memory.use_count() == 1) numbers += concat(memory->number(), ' ');
  return numbers;
}

void NcclGroup::free_dropped(std::span<const std::string> said) {
  std::map<std::int64_t, std::size_t> ranks_that_drop = count_numbers(said);
  std::erase_if(memories_, [&](const auto& memory) {
    return ranks_that_drop[memory->number()] == seat_.ranks.size();
  });
}

std::unique_ptr<Communicator> NcclGroup::make(DeviceContext& context, const GroupSeat& seat,
                                              std::string_view role, StreamId stream) {
  auto made = std::make_unique<NcclRole>(*context.driver(), recorder_, role, stream);
  NcclRole& added = *made;
  {
    const std::lock_guard lock(roles_mutex_);
    roles_.push_back(std::move(made));
  }
  return make_nccl_communicator(context, *this, added, seat, role, stream);
}

std::shared_ptr<SymmetricMemory> NcclGroup::allocate(DeviceContext& context, std::int64_t bytes,
                                                     std::string_view purpose) {
  const int call = ++allocations_;
  const std::string own = concat(bytes, " for ", purpose);
  std::vector<std::string> all =
      tell_all(concat("allocation ", call), concat(dropped(), '|', own), world_.init_timeout());
  free_dropped(all);
  for (std::string& said : all) said.erase(0, said.find('|') + 1);
  for (std::size_t r = 1; r < all.size(); ++r)
    TESSERA_EXPECT(std::stoll(all[r]) == std::stoll(all[0]), "allocate_symmetric: in call ", call,
                   " rank ", seat_.ranks[0], " asks for bytes: ", all[0], ", rank ", seat_.ranks[r],
                   " for ", all[r], "; every rank must ask for the same");
  if (!has_windows()) return arena_.allocate(context, bytes);
  const auto memory = std::make_shared<NcclMemory>(world_, context, bytes,
                                                   std::int64_t{world_.attempt()} << 32 | call);
  memories_.push_back(memory);
  for (const auto& role : roles_)
    if (role->has_windows && role->comm.native) memory->make_window(role->comm);
  return memory;
}

std::string NcclGroup::look() {
  const char* error = replays_.look();
  const std::lock_guard lock(roles_mutex_);
  for (const auto& role : roles_)
    if (!error) error = role->look();
  return error ? concat("rank ", world_.rank(), ": its GPU can't be asked: ", error) : "";
}

std::string NcclGroup::late() const {
  const double timeout_s = world_.options().timeout_seconds;
  if (const std::string replay = replays_.late(timeout_s); !replay.empty())
    return concat(replay, "; ", position());
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
  base_.native = nullptr;
  replays_.forget();
  for (const auto& role : roles_) role->forget();
  for (const auto& memory : memories_) memory->forget_windows();
  recorder_.restart();
  allocations_ = 0;
  comparison_.forget();
}

void NcclGroup::leave() noexcept {
  for (const auto& memory : memories_) memory->leave();
  memories_.clear();
}

// The calls since they were last compared are among them.
std::string NcclGroup::parting() const {
  if (seat_.size() < 2) return "";
  const std::uint64_t last = recorder_.last_submitted();
  FlightEntry call;
  const std::string name = recorder_.find(last, call) ? call.to_string() : "none";
  const auto all = tell_all(
      "steps",
      concat(recorder_.steps(), ' ', last, ' ', recorder_.fingerprint_after(last), ' ', name),
      kForEver);
  struct End {
    std::uint64_t steps = 0, calls = 0, fingerprint = 0;
    std::string last{};
  };
  const auto read = [](const std::string& text) {
    End end;
    std::istringstream in(text);
    in >> end.steps >> end.calls >> end.fingerprint >> std::ws;
    std::getline(in, end.last);
    return end;
  };
  const End first = read(all[0]);
  for (std::size_t r = 1; r < all.size(); ++r) {
    const End other = read(all[r]);
    if (other.steps != first.steps) return describe_steps(seat_.group, first.steps, other.steps);
    if (other.calls != first.calls || other.fingerprint != first.fingerprint)
      return concat("ranks ", seat_.ranks[0], " and ", seat_.ranks[r],
                    " have submitted other calls in '", seat_.group, "': the last of rank ",
                    seat_.ranks[0], " is call ", first.calls, ", ", first.last, ", of rank ",
                    seat_.ranks[r], " call ", other.calls, ", ", other.last,
                    "; every rank must submit the same collectives in the same order");
  }
  return "";
}

}  // namespace tessera::comm
