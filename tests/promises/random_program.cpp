#include "tests/promises/random_program.hpp"

#include <algorithm>
#include <array>
#include <random>

namespace tessera::testing {
namespace {

constexpr int kSteps = 2;

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  int below(int n) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(n)); }
  bool once_in(int n) { return below(n) == 0; }
  // A set of ranks: most often all.
  Ranks ranks() { return once_in(3) ? static_cast<Ranks>(below(1 << kMostRanks)) : kAllRanks; }

 private:
  std::mt19937_64 engine_;
};

// `number` counts parts; `units` are the finished ones that can be called from anywhere: units that
// use no weight of an outer part, which may be closed there.
PartPlan make_part(Dice& dice, int depth, int& number, std::vector<int>& units) {
  PartPlan part;
  const int own_number = number++;
  const int children = depth == 0                     ? 1 + dice.below(3)
                       : depth < 3 && dice.once_in(2) ? 1 + dice.below(2)
                                                      : 0;
  for (int i = 0; i < children; ++i)
    part.children.push_back(make_part(dice, depth + 1, number, units));
  part.is_unit = depth == 0 || !dice.once_in(4);
  part.reshard = std::array{Reshard::automatic, Reshard::always, Reshard::never,
                            Reshard::to(2)}[static_cast<std::size_t>(dice.below(4))];
  part.prefetch = dice.below(3) + 1;
  const int statements = 1 + dice.below(3) + children;
  for (int i = 0; i < statements; ++i) {
    Statement s;
    s.kind = children > 0 && dice.below(3) > 0 ? Statement::call
             : depth > 0 && dice.once_in(4)    ? Statement::outer
                                               : Statement::own;
    if (!units.empty() && dice.once_in(8)) s.kind = Statement::call_elsewhere;
    if (s.kind == Statement::call || s.kind == Statement::call_elsewhere) {
      s.callee = s.kind == Statement::call
                     ? dice.below(children)
                     : units[static_cast<std::size_t>(dice.below(static_cast<int>(units.size())))];
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

// Gradient buffers in pieces, of a parameter or of some.
void cut_gradients(Dice& dice, PartPlan& part) {
  part.piece_bytes = dice.once_in(3) ? 1 << 20 : 1 + dice.below(600);
  for (PartPlan& child : part.children) cut_gradients(dice, child);
}

// Tables that are streamed, in a third of the parts.
void add_streamed(Dice& dice, PartPlan& part) {
  part.slice_bytes = dice.once_in(2) ? 1 : 60;
  for (int uses = dice.once_in(3) ? 1 + dice.below(2) : 0; uses > 0; --uses) {
    Statement s;
    s.kind = Statement::streamed;
    s.used = dice.ranks();
    part.body.insert(part.body.begin() + dice.below(static_cast<int>(part.body.size()) + 1), s);
  }
  for (PartPlan& child : part.children) add_streamed(dice, child);
}

void vary_tables(Dice& dice, PartPlan& part) {
  part.table = {.rows = std::array{7, 7, 2, 1, 0}[static_cast<std::size_t>(dice.below(5))],
                .is_frozen = dice.once_in(6),
                .is_outer = !part.is_unit && dice.once_in(2),
                .is_streamed = !dice.once_in(6)};
  for (PartPlan& child : part.children) vary_tables(dice, child);
}

// How weights and tables travel to the other ranks.
void vary_gathers(Dice& dice, PartPlan& part) {
  const auto drawn = [&](std::initializer_list<Gathered> ways) {
    return dice.once_in(2) ? Gathered::plainly
                           : ways.begin()[dice.below(static_cast<int>(ways.size()))];
  };
  part.gathered = drawn({Gathered::in_two});
  if (!part.table.is_outer) part.table.gathered = drawn({Gathered::in_two, Gathered::in_e4m3});
  for (PartPlan& child : part.children) vary_gathers(dice, child);
}

// Weights and tables that units leave alone, which gathers nothing.
void ignore_some(Dice& dice, PartPlan& part) {
  part.is_ignored = dice.once_in(3);
  if (part.is_ignored) part.gathered = Gathered::plainly;
  part.table.is_ignored = !part.table.is_outer && dice.once_in(3);
  if (part.table.is_ignored) part.table.gathered = Gathered::plainly;
  for (PartPlan& child : part.children) ignore_some(dice, child);
}

// Whether `part` or a part of it calls `number`, or calls a part from anywhere.
bool calls_elsewhere(const PartPlan& part) {
  return std::any_of(part.body.begin(), part.body.end(),
                     [](const Statement& s) { return s.kind == Statement::call_elsewhere; }) ||
         std::any_of(part.children.begin(), part.children.end(), calls_elsewhere);
}

// What blocks share, and weights that are read outside of their unit's calls: of children that the
// root calls once, with gradients, and that are open from there on.
void vary_inputs(Dice& dice, PartPlan& root) {
  const auto vary = [&](const auto& self, PartPlan& part) -> void {
    for (Statement& s : part.body) s.gets_input = s.recomputed && dice.once_in(2);
    for (PartPlan& child : part.children) self(self, child);
  };
  vary(vary, root);
  root.reads_later = dice.ranks();
  if (calls_elsewhere(root)) return;
  for (int i = 0; i < static_cast<int>(root.children.size()); ++i) {
    const PartPlan& child = root.children[static_cast<std::size_t>(i)];
    const auto is_call = [&](const Statement& s) {
      return s.kind == Statement::call && s.callee == i;
    };
    const auto call = std::find_if(root.body.begin(), root.body.end(), is_call);
    if (child.is_unit && child.reshard == Reshard::never && call != root.body.end() &&
        std::count_if(root.body.begin(), root.body.end(), is_call) == 1 && !call->recomputed &&
        !call->without_gradient && dice.once_in(2))
      root.read_later.push_back(i);
  }
}

// What of recomputed calls is kept.
void keep_products(Dice& dice, PartPlan& part) {
  for (Statement& s : part.body) s.selectively = s.recomputed && dice.once_in(2);
  for (PartPlan& child : part.children) keep_products(dice, child);
}

// Units beside each other that become one, a list. Not those whose weights the root reads later:
// when a list closes depends on all of it.
void list_units(Dice& dice, PartPlan& part) {
  std::vector<PartPlan*> listed;
  const bool lists = dice.once_in(2);
  for (std::size_t i = 0; i < part.children.size(); ++i) {
    const auto& later = part.read_later;
    const bool is_read = std::find(later.begin(), later.end(), static_cast<int>(i)) != later.end();
    if (lists && part.children[i].is_unit && !is_read && !dice.once_in(4))
      listed.push_back(&part.children[i]);
  }
  for (PartPlan* const child : listed) child->is_listed = listed.size() > 1;
  for (PartPlan& child : part.children) list_units(dice, child);
}

void add_hooks(Dice& dice, PartPlan& part) {
  part.has_hook = dice.once_in(6);
  part.hooked = dice.ranks();
  for (PartPlan& child : part.children) add_hooks(dice, child);
}

// Who leaves the last backward of a step out may say so of the model.
void vary_skips(Dice& dice, Program& program) {
  for (Step& step : program.steps)
    if (!step.backwards.empty()) step.backwards.back().skips_model = dice.once_in(2);
}

// Backwards that leave reductions to a later one of their step, in half of the programs.
void postpone_reductions(Dice& dice, Program& program) {
  if (dice.once_in(2)) return;
  for (Step& step : program.steps)
    for (std::size_t i = 0; i + 1 < step.backwards.size(); ++i) {
      const auto some = [&] {
        return dice.once_in(2) ? ~0U : static_cast<unsigned>(dice.below(64));
      };
      step.backwards[i].unreduced = dice.once_in(3) ? 0 : some();
      step.backwards[i].in_replicas = some();
    }
}

// Ranks that keep an output which is not in their loss skip it by itself. A pass of its own goes
// back along the forwards whose graphs are gone, too, as the first pass of a step finds those that
// it has dropped: that is their place only where they come after all that the ranks part.
void vary_parts(Dice& dice, Program& program) {
  for (Step& step : program.steps)
    for (Step::Backward& b : step.backwards) {
      std::vector<int> parted = b.forwards;
      std::sort(parted.begin(), parted.end());
      parted.pop_back();
      bool is_in_turn = !parted.empty();
      for (int i = 0; is_in_turn && &b == &step.backwards[0] && i < parted.back(); ++i)
        is_in_turn = !step.forwards[static_cast<std::size_t>(i)].is_dropped;
      if (is_in_turn && dice.once_in(2)) b.says = dice.ranks();
    }
}

// Parameters that are frozen and thawed, in half of the programs.
void turn_parameters(Dice& dice, Program& program, int parts) {
  if (dice.once_in(2)) return;
  program.steps.push_back(program.steps[0]);  // a step for what was turned twice
  for (Step& step : program.steps) {
    for (int turns = dice.below(4); turns > 0; --turns)
      step.turned.push_back(dice.below(2 * parts));
    step.is_turned_late = dice.once_in(2);
    step.keeps_gradients = dice.once_in(3);
  }
}

// Most run in an order that the seed chooses: it costs less than threads that hand over by the
// system's leave, and stream and rank fall behind each other as they never would there. Poison
// costs a launch at each allocation and each free.
void choose_executor(Dice& dice, Program& program) {
  const int drawn = dice.below(16);
  program.executor = drawn == 0   ? ExecutorKind::threaded
                     : drawn == 1 ? ExecutorKind::inlined
                                  : ExecutorKind::shuffled;
  program.is_poisoned = dice.once_in(6);
}

}  // namespace

Program make_program(std::uint64_t seed) {
  Dice dice(seed);
  Program program;
  program.seed = seed;
  program.ranks = 1 << dice.below(3);
  int parts = 0;
  std::vector<int> units;
  program.root = make_part(dice, 0, parts, units);
  Dice streamed_dice(seed ^ 0x5eed);  // the rest of a seed's program is as it was without them
  add_streamed(streamed_dice, program.root);
  cut_gradients(streamed_dice, program.root);
  Dice table_dice(seed ^ 0x7ab1e);
  vary_tables(table_dice, program.root);
  for (int k = 0; k < kSteps; ++k) {
    Step step;
    const int forwards = 1 + dice.below(3);
    std::vector<int> open;
    for (int i = 0; i < forwards; ++i) {
      Step::Forward f;
      f.is_evaluation = dice.once_in(6);
      f.is_dropped = !f.is_evaluation && dice.once_in(6);
      f.in_loss = dice.ranks();
      step.forwards.push_back(f);
      if (!f.is_evaluation && !f.is_dropped) open.push_back(i);
    }
    while (!open.empty()) {
      Step::Backward b;
      b.runs = dice.ranks();
      b.retains = dice.once_in(6);
      std::vector<int> left = open;
      do {
        const int at = dice.below(static_cast<int>(left.size()));
        b.forwards.push_back(left[static_cast<std::size_t>(at)]);
        left.erase(left.begin() + at);
      } while (!left.empty() && dice.once_in(3));
      if (!b.retains) open = left;
      step.backwards.push_back(b);
    }
    program.steps.push_back(step);
  }
  Dice input_dice(seed ^ 0x1297);
  vary_inputs(input_dice, program.root);
  vary_skips(input_dice, program);
  Dice turn_dice(seed ^ 0x7042);
  turn_parameters(turn_dice, program, parts);
  Dice reduction_dice(seed ^ 0x54c);
  postpone_reductions(reduction_dice, program);
  Dice mesh_dice(seed ^ 0x3e54);
  if (mesh_dice.once_in(3))
    while (program.replicas < program.ranks && !mesh_dice.once_in(3)) program.replicas *= 2;
  Dice list_dice(seed ^ 0x1157);
  list_units(list_dice, program.root);
  Dice hook_dice(seed ^ 0x400c);
  add_hooks(hook_dice, program.root);
  Dice part_dice(seed ^ 0x9a27);
  vary_parts(part_dice, program);
  Dice executor_dice(seed ^ 0xe8ec);
  choose_executor(executor_dice, program);
  Dice offload_dice(seed ^ 0x0ff10);
  if (offload_dice.once_in(3)) program.offload = Offload::cpu;
  Dice gather_dice(seed ^ 0x6a74e4);
  if (gather_dice.once_in(3)) vary_gathers(gather_dice, program.root);
  Dice ignore_dice(seed ^ 0x19402e);
  if (program.offload == Offload::none && ignore_dice.once_in(4))
    ignore_some(ignore_dice, program.root);
  Dice keep_dice(seed ^ 0x5e1ec);
  keep_products(keep_dice, program.root);
  return program;
}

}  // namespace tessera::testing
