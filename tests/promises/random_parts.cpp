// What the parts of a random program are, and do.
#include "tests/promises/random_parts.hpp"

#include <algorithm>
#include <utility>

#include "tests/promises/exact_sums.hpp"

namespace tessera::testing {
namespace {

// `number` counts parts; `units` are the finished ones that can be called from anywhere: units that
// use no weight of an outer part, which may be closed there.
PartPlan make_part(ProgramDice& dice, int depth, int& number, std::vector<int>& units) {
  PartPlan part;
  const int own_number = number++;
  const int children = depth == 0                     ? 1 + dice.below(3)
                       : depth < 3 && dice.once_in(2) ? 1 + dice.below(2)
                                                      : 0;
  for (int i = 0; i < children; ++i)
    part.children.push_back(make_part(dice, depth + 1, number, units));
  part.is_unit = depth == 0 || !dice.once_in(4);
  part.reshard = dice.reshard();
  part.prefetch = dice.below(3) + 1;
  const int statements = 1 + dice.below(3) + children;
  for (int i = 0; i < statements; ++i) {
    Statement s;
    s.kind = children > 0 && dice.below(3) > 0 ? Statement::call
             : depth > 0 && dice.once_in(4)    ? Statement::outer
                                               : Statement::own;
    if (!units.empty() && dice.once_in(8)) s.kind = Statement::call_elsewhere;
    if (s.kind == Statement::call || s.kind == Statement::call_elsewhere) {
      s.callee = s.kind == Statement::call ? dice.below(children) : dice.of(units);
      s.without_gradient = dice.once_in(8);
      s.used = dice.ranks();
      s.recomputed = dice.once_in(3);
    }
    part.body.push_back(s);
  }
  const auto is_outer = [](const Statement& s) { return s.kind == Statement::outer; };
  if (part.is_unit && std::none_of(part.body.begin(), part.body.end(), is_outer))
    units.push_back(own_number);
  if (depth == 0) part.body.insert(part.body.begin(), Statement());  // every rank has a graph
  return part;
}

// Several roots: the root is no unit, and all of its children are.
void split_root(PartPlan& root) {
  root.is_unit = false;
  for (PartPlan& child : root.children) child.is_unit = true;
  for_each_part(root, [](PartPlan& part) {
    for (Statement& s : part.body)
      if (s.kind == Statement::call_elsewhere) s = {};
  });
}
// What the root has lies in no unit. What children give all ranks use, since no root around them
// walks through what a rank does not.
void leave_root_alone(PartPlan& root) {
  root.is_ignored = true;
  root.gathered = Gathered::plainly;
  root.block_rows = 0;
  root.table = {.is_ignored = true};
  for (Statement& s : root.body) s.used = kAllRanks;
  for (PartPlan& child : root.children) child.is_listed = false;  // a list is no root
}

// Gradient buffers in pieces, of a parameter or of some.
void cut_gradients(ProgramDice& dice, PartPlan& part) {
  part.piece_bytes = dice.once_in(3) ? 1 << 20 : 1 + dice.below(600);
}

// A third of the parts stream their table.
void add_table(ProgramDice& dice, PartPlan& part) {
  part.slice_bytes = dice.once_in(2) ? 1 : 60;
  for (int uses = dice.once_in(3) ? 1 + dice.below(2) : 0; uses > 0; --uses)
    part.body.insert(part.body.begin() + dice.below(static_cast<int>(part.body.size()) + 1),
                     {.kind = Statement::streamed, .used = dice.ranks()});
  part.table = {.rows = dice.of({7, 7, 2, 1, 0}),
                .is_frozen = dice.once_in(6),
                .is_outer = !part.is_unit && dice.once_in(2),
                .is_streamed = !dice.once_in(6)};
  if (part.table.is_frozen && !part.table.is_outer)
    part.table.stored = dice.of({f32, bf16, f16, e4m3, e5m2});
}

// Units whose weights are added, all of them: backward reads neither these nor, since they are
// streamed, their tables. A recomputed function inside would read them there.
void add_weights(ProgramDice& dice, PartPlan& part, bool is_added = false) {
  part.is_added = part.is_unit ? dice.once_in(4) : is_added;
  if (part.is_added) {
    part.table.rows = std::max(part.table.rows, 1);
    part.table.is_streamed = true;
    for (Statement& s : part.body) s.recomputed = false;
  }
  for (PartPlan& child : part.children) add_weights(dice, child, part.is_added);
}

// A child's weight that the root reads behind its call: one with gradients, the only one, after
// which it stays open.
void read_later(ProgramDice& dice, PartPlan& root) {
  root.reads_later = dice.ranks();
  int number = 1;
  for (int i = 0; i < static_cast<int>(root.children.size()); ++i) {
    PartPlan& child = root.children[static_cast<std::size_t>(i)];
    if (child.is_unit && dice.once_in(6)) {
      root.read_later.push_back(i);
      child.reshard = Reshard::never;
      for_each_part(root, [&](PartPlan& part) {
        for (Statement& s : part.body)
          if (s.kind == Statement::call_elsewhere && s.callee == number) s = {};
      });
      for (Statement& s : root.body)
        if (s.kind == Statement::call && s.callee == i) s = {};
      root.body.insert(root.body.begin() + 1 + dice.below(static_cast<int>(root.body.size())),
                       {.kind = Statement::call, .callee = i, .used = dice.ranks()});
    }
    for_each_part(child, [&](PartPlan&) { ++number; });
  }
}

// What blocks share, and what of recomputed calls is kept.
void vary_recomputation(ProgramDice& dice, PartPlan& part) {
  for (Statement& s : part.body) {
    s.gets_input = s.recomputed && dice.once_in(2);
    s.selectively = s.recomputed && dice.once_in(2);
  }
}

// Units beside each other that become one, a list. Not those whose weights the root reads later:
// when a list closes depends on all of it.
void list_units(ProgramDice& dice, PartPlan& part) {
  std::vector<PartPlan*> listed;
  const bool lists = dice.once_in(2);
  for (std::size_t i = 0; i < part.children.size(); ++i) {
    const auto& later = part.read_later;
    const bool is_read = std::find(later.begin(), later.end(), static_cast<int>(i)) != later.end();
    if (lists && part.children[i].is_unit && !is_read && !dice.once_in(4))
      listed.push_back(&part.children[i]);
  }
  for (PartPlan* const child : listed) child->is_listed = listed.size() > 1;
}

void add_hooks(ProgramDice& dice, PartPlan& part) {
  part.has_hook = dice.once_in(6);
  part.hooked = dice.ranks();
}

void double_gradients(ProgramDice& dice, PartPlan& part) {
  part.is_doubled = dice.once_in(2);
  part.doubled_on = dice.of<std::optional<StreamId>>(
      {std::nullopt, StreamId::compute, StreamId::gather, StreamId::reduce, StreamId::replicate});
}

// How weights and tables travel to the other ranks.
void vary_gathers(ProgramDice& dice, PartPlan& part) {
  if (dice.once_in(2)) part.gathered = Gathered::in_two;
  if (dice.once_in(2) && part.table.stored == f32 && !part.table.is_outer)
    part.table.gathered = dice.of({Gathered::in_two, Gathered::in_e4m3});
}

// Weights and tables that units leave alone, which gathers nothing.
void ignore_some(ProgramDice& dice, PartPlan& part) {
  part.is_ignored = dice.once_in(3);
  if (part.is_ignored) part.gathered = Gathered::plainly;
  part.table.is_ignored = part.table.stored == f32 && !part.table.is_outer && dice.once_in(3);
  if (part.table.is_ignored) part.table.gathered = Gathered::plainly;
}

// Weights, and tables that are there as a whole, are cut by blocks of rows.
void deal_blocks(ProgramDice& dice, PartPlan& part) {
  if (part.reshard.is_partial()) part.reshard = Reshard::always;
  if (part.gathered == Gathered::plainly && !part.is_ignored)
    part.block_rows = dice.below(kWidth + 1);
  PartPlan::Table& table = part.table;
  if (!table.is_streamed && table.gathered == Gathered::plainly && !table.is_ignored)
    table.block_rows = dice.below(table.rows + 1);
}

// Tables that are sharded by columns are not streamed, and their unit is read in backward.
void turn_tables(ProgramDice& dice, PartPlan& part) {
  PartPlan::Table& table = part.table;
  table.by_columns = !part.is_added && table.gathered == Gathered::plainly &&
                     table.block_rows == 0 && !table.is_ignored && !table.is_outer &&
                     dice.once_in(2);
}

}  // namespace

PartPlan make_root(ProgramDice& dice, Offload offload) {
  int number = 0;
  std::vector<int> units;
  PartPlan root = make_part(dice, 0, number, units);
  const bool splits = offload == Offload::none && dice.once_in(6);
  if (splits) split_root(root);
  const auto vary = [&](void (*how)(ProgramDice&, PartPlan&)) {
    for_each_part(root, [&](PartPlan& part) { how(dice, part); });
  };
  if (!splits) read_later(dice, root);
  vary(cut_gradients);
  vary(add_table);
  add_weights(dice, root);
  vary(vary_recomputation);
  vary(list_units);
  vary(add_hooks);
  if (dice.once_in(4)) vary(double_gradients);
  if (dice.once_in(3)) vary(vary_gathers);
  if (offload == Offload::none && dice.once_in(4)) vary(ignore_some);
  root.deals_blocks = dice.once_in(4);
  if (root.deals_blocks) vary(deal_blocks);
  if (dice.once_in(3)) vary(turn_tables);
  if (splits) leave_root_alone(root);
  return root;
}

void vary_outputs(ProgramDice& dice, PartPlan& root) {
  if (!dice.once_in(4)) return;
  for_each_part(root, [&](PartPlan& part) {
    if (part.is_unit && !part.is_listed) part.output = dice.of({f32, bf16, f16});
    const DType of_list = dice.of({f32, bf16, f16});
    for (PartPlan& child : part.children)
      if (child.is_listed) child.output = of_list;
  });
}

void vary_inputs(ProgramDice& dice, PartPlan& root) {
  if (!dice.once_in(3)) return;
  for_each_part(root, [&](PartPlan& part) {
    part.input = dice.of({f32, f32, bf16, f16});
    if (!part.is_listed) part.casts_inputs = dice.once_in(2);
    part.gets_more = dice.once_in(2);
    const bool lists_cast = dice.once_in(2);
    for (PartPlan& child : part.children)
      if (child.is_listed) child.casts_inputs = lists_cast;
  });
}

bool add_losses(ProgramDice& dice, PartPlan& root) {
  if (!dice.once_in(4) || !root.read_later.empty()) return false;  // it would be closed then
  const auto is_own = [](const Statement& s) { return s.kind == Statement::own; };
  const auto behind = std::ranges::find_if(root.body, is_own) + 1;  // from where all have a graph
  const Statement loss{.kind = Statement::backward, .retains = dice.once_in(2)};
  root.body.insert(behind + dice.below(static_cast<int>(root.body.end() - behind) + 1),
                   {loss, Statement()});
  return true;
}

void add_buffers(ProgramDice& dice, PartPlan& root) {
  if (!dice.once_in(4)) return;
  for_each_part(root, [&](PartPlan& part) { part.has_buffer = dice.once_in(2); });
}

// A rank that has dropped what a peer keeps for later would go back along it at once: all use all.
// Of several roots what is retained would be all that a pass behind it goes along, but the last.
bool add_losses_apart(ProgramDice& dice, PartPlan& root) {
  if (!dice.once_in(6) || !root.read_later.empty()) return false;
  const Statement loss{.kind = Statement::backward_apart,
                       .callee = dice.below(static_cast<int>(root.children.size())),
                       .retains = dice.once_in(3) && root.is_unit};
  for (int losses = 1 + dice.below(2); losses > 0; --losses)
    root.body.insert(root.body.end() - dice.below(2), {loss, Statement()});
  for_each_part(root, [](PartPlan& part) {
    for (Statement& s : part.body) s.used = kAllRanks;
  });
  return true;
}

void vary_captures(ProgramDice& dice, PartPlan& root) {
  if (!dice.once_in(3)) return;
  for_each_part(root, [&](PartPlan& part) {
    for (Statement& s : part.body) s.captures = s.gets_input && dice.once_in(2);
  });
}

}  // namespace tessera::testing
