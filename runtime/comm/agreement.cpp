#include "runtime/comm/agreement.hpp"

#include <algorithm>
#include <cstring>

#include "tessera/base/error.hpp"

namespace tessera::comm {
namespace {

// "'unit 3' (2 items; item 1: all_gather of 512 x bf16)", with the item that tells it from another
// operation.
std::string describe(const Published& p, int item) {
  std::string text = concat("'", p.name, "' (", p.n_items, p.n_items == 1 ? " item" : " items");
  if (item < std::min(p.n_items, kShownItems)) {
    const Published::Item& i = p.items[item];
    text += concat("; item ", item, ": ", name(i.kind));
    if (i.kind != CollectiveKind::barrier) text += concat(" of ", i.count, " x ", i.dtype);
    if (i.kind == CollectiveKind::broadcast) text += concat(" from rank ", i.root);
  }
  return text + ")";
}

int first_difference(const Published& a, const Published& b) {
  const int common = std::min({a.n_items, b.n_items, kShownItems});
  for (int i = 0; i < common; ++i)
    if (a.items[i] != b.items[i]) return i;
  return a.n_items == b.n_items ? 0 : common;
}

}  // namespace

void publish(Published& out, const GroupCall& call, std::uint64_t place) {
  out.sequence = call.sequence;
  out.fingerprint = call.fingerprint;
  out.place = place;
  out.n_items = static_cast<std::int32_t>(call.n_items);
  const std::size_t length = std::min(std::strlen(call.name), sizeof(out.name) - 1);
  std::memcpy(out.name, call.name, length);
  out.name[length] = '\0';
  const auto items = call.items();
  for (int i = 0; i < std::min(out.n_items, kShownItems); ++i) {
    const Collective& c = items[static_cast<std::size_t>(i)];
    out.items[i] = {.count = c.count, .kind = c.kind, .dtype = c.dtype, .root = c.root};
  }
}

void check_agreement(std::span<const Published* const> ranks, const std::string& role) {
  const Published& first = *ranks[0];
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const Published& other = *ranks[r];
    if (other.fingerprint != first.fingerprint || other.sequence != first.sequence) {
      const int item = first_difference(first, other);
      throw CommError(
          concat("communicator '", role, "', call ", first.sequence, ": rank 0 submitted ",
                 describe(first, item), ", but rank ", r, " submitted ", describe(other, item),
                 "; every rank must submit the same collectives in the same order (name, kinds, "
                 "counts, dtypes and roots)"));
    }
    if (other.place != first.place)
      throw CommError(concat("communicator '", role, "', call ", first.sequence, ": ",
                             describe(first, 0), " of rank 0 and ", describe(other, 0), " of rank ",
                             r,
                             " send from different offsets of their symmetric memory; every rank "
                             "must use the same layout"));
  }
}

}  // namespace tessera::comm
