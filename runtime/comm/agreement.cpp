#include "runtime/comm/agreement.hpp"

#include <algorithm>
#include <cstring>

#include "tessera/base/error.hpp"

namespace tessera::comm {
namespace {

constexpr const char* kRemedy = "; every rank must submit the same collectives in the same order";

// "'unit 3' (2 items; item 1: all_gather of 512 x bf16)", with the item that tells it from another
// operation.
std::string describe(const Published& p, int item) {
  std::string text = concat("'", p.name, "' (", p.n_items, p.n_items == 1 ? " item" : " items");
  if (item < std::min(p.n_items, kShownItems)) {
    const Published::Item& i = p.items[item];
    text += concat("; item ", item, ": ", name(i.kind));
    if (i.kind != CollectiveKind::barrier) text += concat(" of ", i.count, " x ", i.dtype);
    if (has_root(i.kind)) text += concat(" from rank ", i.root);
    if (i.kind == CollectiveKind::send_recv) text += concat(" to rank ", i.target);
    if (i.reduce != ReduceOp::sum) text += concat(", ", name(i.reduce));
  }
  return text + to_string(p.progress) + ")";
}

// Of ranks whose calls differ only in what their names close with in parentheses: what a program
// has decided of the same unit.
std::string name_remedy(std::string_view a, std::string_view b) {
  const auto before = [](std::string_view name) { return name.substr(0, name.rfind(" (")); };
  if (a == b || (before(a) != before(b) && before(a) != b && a != before(b))) return "";
  return "; the part in parentheses comes from calls that all ranks must make, or none";
}

// Of ranks whose calls are alike, but come at different points of the order over all groups.
std::string order_remedy(std::uint64_t around, int rank, std::uint64_t other, int other_rank) {
  if (around == other) return "";
  return concat("; before it rank ", rank, " has submitted ", around,
                " calls of the groups around this one, rank ", other_rank, ' ', other);
}

// What tells two calls apart, published or recorded, and what to do about it.
template <class Call>
std::string remedies(const Call& a, int rank_a, const Call& b, int rank_b) {
  return concat(
      order_remedy(a.around, rank_a, b.around, rank_b), kRemedy, name_remedy(a.name, b.name),
      std::string_view(a.name) == b.name && (a.progress.steps != b.progress.steps ||
                                             a.progress.steps_of_each != b.progress.steps_of_each)
          ? "; the ranks differ in steps of an optimizer or of the model; every rank must make, "
            "set and load the same steps"
          : "",
      backward_remedy(a.progress.backward_of, b.progress.backward_of));
}

std::string describe(const FlightEntry& a, int rank_a, const FlightEntry& b, int rank_b) {
  return concat("call ", a.seq, ": rank ", rank_a, " submitted ", a.to_string(), ", but rank ",
                rank_b, " submitted ", b.to_string(), remedies(a, rank_a, b, rank_b));
}

int first_difference(const Published& a, const Published& b) {
  const int common = std::min({a.n_items, b.n_items, kShownItems});
  for (int i = 0; i < common; ++i)
    if (a.items[i] != b.items[i]) return i;
  return a.n_items == b.n_items ? 0 : common;
}

}  // namespace

std::string backward_remedy(std::uint64_t backward_of, std::uint64_t other) {
  if (backward_of == other) return "";
  return concat(
      "; in forward every rank must call the same units; a rank that leaves out the backward of "
      "forward ",
      std::max(backward_of, other),
      " must call skip_backward(model) or skip_backward(loss) instead; all ranks must set "
      "set_requires_gradient_sync and set_requires_all_reduce alike");
}

std::string role_name(const GroupSeat& seat, std::string_view role) {
  return seat.group == kWorldGroup ? std::string(role) : concat(role, " of ", seat.group);
}

void publish(Published& out, const GroupCall& call, std::uint64_t send_layout_hash) {
  out.seq = call.seq;
  out.fingerprint = call.fingerprint;
  out.previous = call.previous;
  out.progress = call.progress;
  out.around = call.around;
  out.send_layout_hash = send_layout_hash;
  out.n_items = static_cast<std::int32_t>(call.n_items);
  const std::size_t length = std::min(std::strlen(call.name), sizeof(out.name) - 1);
  std::memcpy(out.name, call.name, length);
  out.name[length] = '\0';
  const auto items = call.items();
  for (int i = 0; i < std::min(out.n_items, kShownItems); ++i) {
    const Collective& c = items[static_cast<std::size_t>(i)];
    out.items[i] = {.count = c.count,
                    .kind = c.kind,
                    .dtype = c.dtype,
                    .reduce = c.reduce,
                    .root = c.root,
                    .target = c.target};
  }
}

std::string describe_difference(const FlightRecorder& a, int rank_a, const FlightRecorder& b,
                                int rank_b) {
  FlightEntry in_a, in_b;
  return first_difference(a, b, in_a, in_b) ? describe(in_a, rank_a, in_b, rank_b) : "";
}

std::string describe_difference(const FlightRecorder& a, int rank_a, std::span<const FlightEntry> b,
                                int rank_b) {
  for (const FlightEntry& in_b : b)
    if (FlightEntry in_a; a.find(in_b.seq, in_a) && in_a.fingerprint != in_b.fingerprint)
      return describe(in_a, rank_a, in_b, rank_b);
  return "";
}

void check_agreement(std::span<const Published* const> ranks, std::span<const int> names,
                     const std::string& role, std::span<const FlightRecorder* const> recorders) {
  const Published& first = *ranks[0];
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const Published& other = *ranks[r];
    if (other.fingerprint != first.fingerprint || other.seq != first.seq) {
      std::string earlier;
      if (other.previous != first.previous && !recorders.empty())
        earlier = describe_difference(*recorders[0], names[0], *recorders[r], names[r]);
      if (!earlier.empty()) throw CommError(earlier);
      const int item = first_difference(first, other);
      const std::string second = other.seq == first.seq ? "" : concat(" as its call ", other.seq);
      throw CommError(concat("communicator '", role, "', call ", first.seq, ": rank ", names[0],
                             " submitted ", describe(first, item), ", but rank ", names[r],
                             " submitted ", describe(other, item), second,
                             remedies(first, names[0], other, names[r])));
    }
    if (other.send_layout_hash != first.send_layout_hash)
      throw CommError(concat("communicator '", role, "', call ", first.seq, ": ",
                             describe(first, 0), " of rank ", names[0], " and ", describe(other, 0),
                             " of rank ", names[r],
                             " send from different offsets of their symmetric memory; every rank "
                             "must use the same layout"));
  }
}

std::string describe_steps(std::string_view group, std::uint64_t steps, std::uint64_t other) {
  if (steps == other) return "";
  return concat(
      "the world has ended after different numbers of steps: by groups of parameters, optimizers "
      "of '",
      group, "' have made ", std::min(steps, other), " on one rank and ", std::max(steps, other),
      " on another; every rank must make the same steps");
}

std::string describe_late(const Recorders& recorders, int own, double timeout_s,
                          std::span<const int> names) {
  const auto& mine = *recorders[static_cast<std::size_t>(own)];
  const std::int64_t now = monotonic_ns();
  for (int s = 0; s < kMaxStreams; ++s) {
    FlightEntry call;
    if (!mine.find(mine.running(static_cast<StreamId>(s)), call) || call.started_ns == 0 ||
        static_cast<double>(now - call.started_ns) < timeout_s * 1e9)
      continue;
    std::string absent, inside, where;
    for (std::size_t r = 0; r < recorders.size(); ++r) {
      FlightEntry theirs;
      const bool has_come = recorders[r]->find(call.seq, theirs) && theirs.started_ns != 0;
      if (!has_come)
        absent += concat(absent.empty() ? "" : ", ", names[r]);
      else if (theirs.done_ns == 0)
        inside += concat(inside.empty() ? "" : ", ", names[r]);
      where += concat("; ", recorders[r]->position(names[r]));
    }
    return concat("call ", call.seq, ", ", call.to_string(), ", has taken ", timeout_s, " s",
                  absent.empty()
                      ? concat(": all ranks of this host have come, and still inside are ", inside)
                      : concat(": missing are ranks ", absent),
                  where);
  }
  return "";
}

std::string describe_ended(const Recorders& recorders, int own, int ended,
                           std::span<const int> names) {
  const auto& mine = *recorders[static_cast<std::size_t>(own)];
  const auto& theirs = *recorders[static_cast<std::size_t>(ended)];
  for (int s = 0; s < kMaxStreams; ++s) {
    FlightEntry call;
    if (!mine.find(mine.running(static_cast<StreamId>(s)), call) ||
        call.seq <= theirs.last_submitted())
      continue;
    return concat("rank ", names[static_cast<std::size_t>(ended)], " has ended after ",
                  theirs.last_submitted(), " calls, but rank ",
                  names[static_cast<std::size_t>(own)], " waits in call ", call.seq, ", ",
                  call.to_string(), "; every rank must submit the same collectives",
                  backward_remedy(call.progress.backward_of));
  }
  return "";
}

}  // namespace tessera::comm
