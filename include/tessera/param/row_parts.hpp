// Parameters that stack the rows of several, as one projection for queries, keys and values does: a
// product with it is one in place of several, narrower ones.
//
//   qkv.set_row_parts({{"q_proj", 8}, {"k_proj", 2}, {"v_proj", 2}});
//
//   "attn.qkv_proj.weight" [12, C]  rows 0 to 7    "attn.q_proj.weight"    in files, for nn::init
//                                        8 and 9   "attn.k_proj.weight"    and for optim::Muon
//                                       10 and 11  "attn.v_proj.weight"
//
// Elsewhere it is one parameter: shards, gathers, gradients, moments, state dicts know its own
// name.
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

// The row parts of a parameter called `name`, each by its whole name; without any it is its own.
std::vector<RowPart> named_row_parts(const std::string& name, const Parameter& parameter);

// Those of `rows` that are in `outer`, counted from its begin; empty where there are none.
constexpr RowRange within(const RowRange& outer, const RowRange& rows) {
  return {std::clamp(rows.begin, outer.begin, outer.end) - outer.begin,
          std::clamp(rows.end, outer.begin, outer.end) - outer.begin};
}
static_assert(within({2, 5}, {4, 9}) == RowRange{2, 3} && within({2, 5}, {6, 9}).size() == 0);

}  // namespace tessera
