// Row parts: one parameter that stacks the rows of several. For example one projection makes
// queries, keys and values, so one wide product takes the place of three narrower ones.
//
//   qkv.set_row_parts({{"q_proj", 8}, {"k_proj", 2}, {"v_proj", 2}});
//
//   "attn.qkv_proj.weight" [12, C]  rows 0 to 7    "attn.q_proj.weight"    in files, for nn::init
//                                        8 and 9   "attn.k_proj.weight"    and for optim::Muon
//                                       10 and 11  "attn.v_proj.weight"
//
// Elsewhere it is one parameter. Shards, gathers, gradients, moments and state dicts know its own
// name only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/param/shard_spec.hpp"

namespace tessera {

class Parameter;

struct RowPart {
  std::string name;  // of the layer whose rows these are, as "q_proj"
  std::int64_t rows = 0;
  bool operator==(const RowPart&) const = default;
};

// The row parts of a parameter called `name`, each by its whole name. Without row parts: one part,
// which is the parameter itself.
std::vector<RowPart> named_row_parts(const std::string& name, const Parameter& parameter);
// Whether state of this shape has the rows of a parameter, so that files may hold it in their
// parts.
bool has_rows_of(const Shape& shape, const Parameter& parameter);

// The part of `rows` that lies in `outer`, counted from the begin of `outer`; empty if none does.
constexpr RowRange within(const RowRange& outer, const RowRange& rows) {
  return {std::clamp(rows.begin, outer.begin, outer.end) - outer.begin,
          std::clamp(rows.end, outer.begin, outer.end) - outer.begin};
}
static_assert(within({2, 5}, {4, 9}) == RowRange{2, 3} && within({2, 5}, {6, 9}).size() == 0);

}  // namespace tessera
