// Collectives on tensors in a random sequence, on the world, on its ranks in another order, and on
// two groups that share the ranks, with results that are read much later, under the race checker.
// Some sequences end with a call that one rank makes otherwise, or leaves out: every rank is told.
#include "tessera/distributed/collectives.hpp"

#include <atomic>
#include <cstring>
#include <numeric>

#include "tessera/comm/world.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/random_users/draw.hpp"
#include "tests/random_users/users.hpp"
#include "tests/schedules/shuffled.hpp"

namespace tessera::testing {
namespace {

using Values = std::vector<double>;

struct Call {
  enum Kind { all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send_recv } kind;
  int group;
  Shape shape;
  DType dtype;
  ReduceOp reduce;
  int root, target;  // modulo the ranks of the group
  std::uint64_t key;

  // Of a rank: whole numbers, of which every dtype holds the sums exactly.
  Values values(int rank) const {
    Draw draw(key * 8 + static_cast<std::uint64_t>(rank));
    Values out(static_cast<std::size_t>(shape.numel()));
    for (double& v : out)
      v = static_cast<double>(dtype == boolean ? draw.number(0, 1) : draw.number(-9, 9));
    return out;
  }
  int root_of(const RankGroup& on) const { return root % on.size(); }
  int target_of(const RankGroup& on) const { return target % on.size(); }
  bool receives(const RankGroup& on) const {
    return kind != send_recv || on.rank() == target_of(on);
  }
  Tensor run(const Tensor& x, const RankGroup& on) const {
    if (kind == all_reduce) return dist::all_reduce(x, on, reduce);
    if (kind == all_gather) return dist::all_gather(x, on);
    if (kind == reduce_scatter) return dist::reduce_scatter(x, on, reduce);
    if (kind == broadcast) return dist::broadcast(x, root_of(on), on);
    if (kind == send_recv) return dist::send_recv(x, root_of(on), target_of(on), on);
    return dist::all_to_all(x, on);
  }
  std::string to_string() const {
    constexpr const char* kNames[] = {"all_reduce", "all_gather", "reduce_scatter",
                                      "broadcast",  "all_to_all", "send_recv"};
    return concat(kNames[kind], ' ', dtype, ' ', shape, ' ',
                  reduce == ReduceOp::max ? "max" : "sum", " root ", root, " target ", target,
                  " on group ", group);
  }
};

struct Sequence {
  explicit Sequence(std::uint64_t seed) {
    Draw draw(seed);
    ranks = draw.number(1, 4);
    order.resize(static_cast<std::size_t>(ranks));
    std::iota(order.begin(), order.end(), 0);
    draw.shuffle(order);
    cut = draw.number(0, ranks);
    is_shuffled = draw.chance(0.2);
    constexpr DType kDtypes[] = {f32, bf16, f16, f64, i32, i64, boolean};
    for (int i = draw.number(1, 12); i > 0; --i) {
      Call call{static_cast<Call::Kind>(draw.number(0, 5)),
                draw.number(0, 2),
                draw.shape(0, 3),
                draw.one_of(kDtypes),
                draw.chance(0.5) ? ReduceOp::sum : ReduceOp::max,
                draw.number(0, 3),
                draw.number(0, 3),
                draw.bits()};
      if (call.kind == Call::reduce_scatter || call.kind == Call::all_to_all) {
        if (call.shape.ndim() == 0) call.shape.push_back(1);
        call.shape[0] = 12 * draw.whole(0, 2);  // of any number of ranks here
      }
      calls.push_back(call);
    }
    if (ranks > 1 && draw.chance(0.2)) {
      odd = draw.number(0, ranks - 1);
      mistake = draw.number(0, 3);
      Call last = calls.back();
      last.group = 0;
      if (last.shape.ndim() == 0) last.shape.push_back(12);
      calls.push_back(last);
    }
  }
  // The group of a call on a rank of the world: ranks in the group's order.
  std::vector<int> members(int group, int rank) const {
    std::vector<int> all = order;
    if (group == 0) std::ranges::sort(all);
    if (group < 2) return all;
    const auto middle = all.begin() + cut;
    const bool is_first = std::find(all.begin(), middle, rank) != middle;
    return is_first ? std::vector(all.begin(), middle) : std::vector(middle, all.end());
  }

  int ranks, cut;
  std::vector<int> order;
  bool is_shuffled;
  std::vector<Call> calls;
  int odd = -1, mistake = 0;  // the rank that makes the last call otherwise, if any does
};

Values expected(const Call& call, const RankGroup& on) {
  const auto size = static_cast<std::size_t>(on.size());
  std::vector<Values> of;
  for (int rank = 0; rank < on.size(); ++rank) of.push_back(call.values(rank));
  Values reduced = of[0];
  for (std::size_t rank = 1; rank < size; ++rank)
    for (std::size_t i = 0; i < reduced.size(); ++i)
      // A sum of booleans is whether any is true.
      reduced[i] = call.reduce == ReduceOp::max || call.dtype == boolean
                       ? std::max(reduced[i], of[rank][i])
                       : reduced[i] + of[rank][i];
  const std::size_t part = reduced.size() / size;
  const auto rank = static_cast<std::ptrdiff_t>(on.rank());
  const auto piece = [&](const Values& all) {
    const auto begin = all.begin() + rank * static_cast<std::ptrdiff_t>(part);
    return Values(begin, begin + static_cast<std::ptrdiff_t>(part));
  };
  const auto joined = [&](auto&& piece_of) {
    Values out;
    for (const Values& v : of) std::ranges::copy(piece_of(v), std::back_inserter(out));
    return out;
  };
  if (call.kind == Call::all_reduce) return reduced;
  if (call.kind == Call::reduce_scatter) return piece(reduced);
  if (call.kind == Call::broadcast || call.kind == Call::send_recv)
    return of[static_cast<std::size_t>(call.root_of(on))];
  return call.kind == Call::all_gather ? joined([](const Values& v) { return v; }) : joined(piece);
}

// The values in memory that is swapped, or beside others.
Tensor tensor_of(const Call& call, const RankGroup& on, Draw& draw) {
  const Values values = call.values(on.rank());
  Tensor x = raw::cast(Tensor::from(values, call.shape, on.device()), call.dtype);
  const int last = call.shape.ndim() - 1;
  if (last > 0 && draw.chance(0.4))
    return raw::transpose(raw::contiguous(raw::transpose(x, 0, last)), 0, last);
  if (last < 0 || !draw.chance(0.4)) return x;
  const std::int64_t n = call.shape[last];
  return raw::slice(raw::cat(std::vector{x, x}, last), last, n, 2 * n);
}

Values values_of(const Tensor& x) { return raw::cast(x, f64).to_vector<double>(); }

void run_rank(const Sequence& of, std::uint64_t seed, World& world) {
  Draw draw(seed * 8 + static_cast<std::uint64_t>(world.rank()));  // of each rank its own
  std::vector<const RankGroup*> groups{&world};
  for (const int group : {1, 2})
    groups.push_back(world.split(concat("group", group), of.members(group, world.rank())));
  struct Made {
    const Call* call;
    Tensor input, result;
  };
  std::vector<Made> made;
  for (std::size_t i = 0; i < of.calls.size(); ++i) {
    Call call = of.calls[i];
    const RankGroup& on = *groups[static_cast<std::size_t>(call.group)];
    if (of.odd == world.rank() && i + 1 == of.calls.size()) {
      if (of.mistake == 0) break;
      if (of.mistake == 1) call.dtype = call.dtype == f32 ? i32 : f32;
      if (of.mistake == 2) call.shape[0] += 12;
      if (of.mistake == 3)
        call.kind = call.kind == Call::all_reduce ? Call::all_gather : Call::all_reduce;
    }
    const Tensor x = tensor_of(call, on, draw), y = call.run(x, on);
    if (of.odd >= 0 && i + 1 == of.calls.size()) break;
    made.push_back({&of.calls[i], draw.chance(0.3) ? x : Tensor(), y});
    if (draw.chance(0.1)) world.device().synchronize();
  }
  for (const auto& [call, input, result] : made) {
    const RankGroup& on = *groups[static_cast<std::size_t>(call->group)];
    const bool is_right = call->receives(on) ? values_of(result) == expected(*call, on) &&
                                                   result.dtype() == call->dtype
                                             : !result.defined();
    if (!is_right)
      throw std::runtime_error(concat(call->to_string(), " gives rank ", world.rank(), " others"));
    if (input.defined() && values_of(input) != call->values(on.rank()))
      throw std::runtime_error(concat(call->to_string(), " changes its input"));
  }
  if (of.odd >= 0) world.barrier();  // whatever was called has been compared by then
}

}  // namespace

std::string describe_collectives(std::uint64_t seed) {
  const Sequence of(seed);
  std::string out = concat(of.ranks, " ranks, group 1 in the order");
  for (const int rank : of.order) out += concat(' ', rank);
  out += concat(", of which the first ", of.cut, " are one group 2 and the others another\n");
  for (const Call& call : of.calls) out += "  " + call.to_string() + '\n';
  if (of.odd >= 0)
    out += concat("  the last one otherwise on rank ", of.odd, ", mistake ", of.mistake, '\n');
  return out;
}

std::string collectives_complaint(std::uint64_t seed) {
  const Sequence of(seed);
  const auto checker = RaceChecker::make();
  std::atomic<int> told = 0;
  std::string error;
  try {
    run_local(of.ranks,
              {.executor = of.is_shuffled ? testing::shuffled(seed) : ExecutorKind::threaded,
               .threads = 1,
               .race_checker = checker,
               .timeout_seconds = 20},
              [&](World& world) {
                try {
                  run_rank(of, seed, world);
                } catch (const CommError&) {
                  ++told;
                  throw;
                }
              });
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  if (checker->race_count() > 0) return checker->races()[0].to_string();
  if (of.odd < 0) return error;
  return told == of.ranks ? "" : concat(told.load(), " of ", of.ranks, " ranks are told: ", error);
}

}  // namespace tessera::testing
