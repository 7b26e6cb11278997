// What slots are planned from before a program has made a step: what each unit needs, and one call
// of each in the order of the module tree.
#include <utility>

#include "runtime/shard/streamed_parameter.hpp"
#include "runtime/shard/unit.hpp"

namespace tessera::shard {
namespace {

bool is_below(const std::string& name, const std::string& around) {
  return around.empty() || name == around || name.starts_with(around + '.');
}

}  // namespace

UnitNeeds Unit::needs(int parent) const {
  std::vector<std::int64_t> pieces;
  if (shards_.has_buffer())
    for (const PieceLayout& piece : shards_.layout.pieces) pieces.push_back(piece.bytes);
  return {.parent = parent,
          .keeps_open = control_.keeps_open(),
          .may_stay = control_.may_stay(),
          .gather_bytes = shards_.gather_bytes(),
          .pieces = pieces,
          .prefetch_depth = shards_.options.prefetch_depth,
          .reductions_in_flight = shards_.options.reductions_in_flight};
}

std::vector<UnitNeeds> Context::needs() const {
  std::vector<UnitNeeds> needs(units_.size());
  for (const AssumedCall& call : calls_)
    if (const std::shared_ptr<Unit> called = unit(call.unit))
      needs[static_cast<std::size_t>(call.unit)] =
          called->needs(call.parent < 0 ? -1 : calls_[static_cast<std::size_t>(call.parent)].unit);
  return needs;
}

// Each module is called once, in the order of the tree, and goes through what it streams.
std::vector<AssumedCall> Context::assumed_calls(nn::Module& root) const {
  std::vector<AssumedCall> calls;
  std::vector<std::pair<std::string, int>> around;  // the units' calls that a module is inside of
  std::vector<int> last(units_.size(), -1);         // of each unit
  for (const auto& [name, module] : root.named_modules()) {
    while (!around.empty() && !is_below(name, around.back().first)) around.pop_back();
    const int parent = around.empty() ? -1 : around.back().second;
    if (const auto unit = std::dynamic_pointer_cast<Unit>(module->hook())) {
      const int number = unit->shards().number,
                before = std::exchange(last[static_cast<std::size_t>(number)],
                                       static_cast<int>(calls.size()));
      if (before >= 0) calls[static_cast<std::size_t>(before)].is_last = false;
      around.emplace_back(name, static_cast<int>(calls.size()));
      calls.push_back({.unit = number,
                       .parent = parent,
                       .is_read_in_backward = unit->control().is_read_in_backward(),
                       .is_first = before < 0});
    }
    for (const auto& [own, parameter] : module->own_parameters())
      for (int slice = 0; state_of(parameter)->slices && slice < parameter.slices(); ++slice)
        calls.push_back({slices_of(*state_of(parameter))->unit(slice)->shards().number,
                         around.back().second, module->reads_parameters_in_backward()});
  }
  return calls;
}

}  // namespace tessera::shard
