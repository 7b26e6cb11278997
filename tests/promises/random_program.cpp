// What a random program does step by step, and what runs it.
#include "tests/promises/random_program.hpp"

#include <algorithm>

#include "tests/promises/random_parts.hpp"
#include "tests/schedules/shuffled.hpp"

namespace tessera::testing {
namespace {

constexpr int kSteps = 2;

Step make_step(ProgramDice& dice) {
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
    } while (!left.empty() && dice.once_in(2));
    if (!b.retains) open = left;
    step.backwards.push_back(b);
  }
  step.ends_dropped = dice.once_in(6);
  return step;
}

// Who leaves the last backward of a step out may say so of the model, where it is one root.
void vary_skips(ProgramDice& dice, Program& program) {
  if (!program.root.is_unit) return;
  for (Step& step : program.steps)
    if (!step.backwards.empty()) step.backwards.back().skips_model = dice.once_in(2);
}

// Backwards that leave reductions to a later one of their step, in half of the programs.
void postpone_reductions(ProgramDice& dice, Program& program) {
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
void vary_parts(ProgramDice& dice, Program& program) {
  bool is_dropped_before = false;
  for (Step& step : program.steps) {
    for (Step::Backward& b : step.backwards) {
      const bool is_first = &b == &step.backwards[0];
      std::vector<int> parted = b.forwards;
      std::sort(parted.begin(), parted.end());
      parted.pop_back();
      bool is_in_turn = !parted.empty() && !(is_first && is_dropped_before);
      for (int i = 0; is_in_turn && is_first && i < parted.back(); ++i)
        is_in_turn = !step.forwards[static_cast<std::size_t>(i)].is_dropped;
      if (!is_in_turn || dice.once_in(3)) continue;
      b.says = dice.ranks();
      for (const int i : b.forwards)
        step.forwards[static_cast<std::size_t>(i)].in_loss =
            static_cast<Ranks>(dice.below(1 << kMostRanks));
    }
    const auto is_dropped = [](const Step::Forward& f) { return f.is_dropped; };
    if (step.backwards.empty())  // what was dropped waits for one
      is_dropped_before |= std::ranges::any_of(step.forwards, is_dropped);
    else
      is_dropped_before = false;
    is_dropped_before |= step.ends_dropped;
  }
}

// Parameters that are frozen and thawed, in half of the programs.
void turn_parameters(ProgramDice& dice, Program& program) {
  if (dice.once_in(2)) return;
  int parts = 0;
  for_each_part(program.root, [&](PartPlan&) { ++parts; });
  program.steps.push_back(program.steps[0]);  // a step for what was turned twice
  for (Step& step : program.steps) {
    for (int turns = dice.below(4); turns > 0; --turns)
      step.turned.push_back(dice.below(2 * parts));
    step.is_turned_late = dice.once_in(2);
    step.keeps_gradients = dice.once_in(3);
  }
}

// What is decided about units before forwards, in half of the programs. What the root reads later
// stays open after forward; a unit below the root is unsharded by hand once the root has run.
void decide(ProgramDice& dice, Program& program) {
  if (dice.once_in(2)) return;
  std::vector<int> units;
  std::vector<const PartPlan*> parts;
  for_each_part(program.root, [&](const PartPlan& part) {
    if (part.is_unit) units.push_back(static_cast<int>(parts.size()));
    parts.push_back(&part);
  });
  bool is_first = true;
  for (Step& step : program.steps)
    for (Step::Forward& f : step.forwards) {
      for (int n = dice.below(4); n > 0; --n) {
        Decision d{.kind = static_cast<Decision::Kind>(dice.below(8)),
                   .part = dice.of(units),
                   .way = dice.reshard(),
                   .value = dice.below(2)};
        if (program.root.deals_blocks && d.way.is_partial()) d.way = Reshard::always;
        if (d.kind == Decision::reductions_in_flight) d.value = 1 + dice.below(4);
        for (int listed = dice.below(4); listed > 0; --listed) d.list.push_back(dice.of(units));
        const PartPlan& of = *parts[static_cast<std::size_t>(d.part)];
        const bool is_read = std::any_of(
            program.root.read_later.begin(), program.root.read_later.end(),
            [&](int i) { return &program.root.children[static_cast<std::size_t>(i)] == &of; });
        if ((d.kind == Decision::reshard_after_forward && is_read) ||
            (d.kind == Decision::unshard_in_backward && (!of.is_added || of.is_listed)) ||
            (d.kind == Decision::unshard && (is_first || !program.root.is_unit)) ||
            (!program.root.is_unit && !d.list.empty()))  // of units under several roots
          continue;
        f.before.push_back(d);
      }
      is_first = false;
    }
}

// Options that change no sum, and decisions for all units below one. What the root reads later
// stays open.
void vary_options(ProgramDice& dice, Program& program) {
  for_each_part(program.root, [&](PartPlan& part) {
    part.in_flight = 1 + dice.below(3);
    part.ahead = 1 + dice.below(3);
    part.slices_wait = dice.once_in(2);
  });
  for (Step& step : program.steps)
    for (Step::Forward& f : step.forwards)
      for (Decision& d : f.before)
        d.recurses = dice.once_in(2) && (d.kind != Decision::reshard_after_forward || d.part > 0 ||
                                         program.root.read_later.empty());
}

// Most run in an order that the seed chooses: it costs less than threads that hand over by the
// system's leave, and stream and rank fall behind each other as they never would there. Poison
// costs a launch at each allocation and each free.
void choose_executor(ProgramDice& dice, Program& program) {
  const int drawn = dice.below(16);
  program.executor = drawn == 0   ? ExecutorKind::threaded
                     : drawn == 1 ? ExecutorChoice(ExecutorKind::inlined)
                                  : shuffled(program.seed);
  program.is_poisoned = dice.once_in(6);
}

// Muon refuses matrices whose shards lie on the host.
void choose_optimizer(ProgramDice& dice, Program& program) {
  program.rule = dice.of({Rule::sgd, Rule::adamw, Rule::muon});
  if (program.offload == Offload::cpu && program.rule == Rule::muon) program.rule = Rule::adamw;
  program.matrices = dice.once_in(2) ? ~0U : 1 | static_cast<unsigned>(dice.below(1 << 16));
  program.is_in_bf16 = dice.once_in(3);
  program.is_nesterov = dice.once_in(2);
  program.turn_bytes = dice.of({std::int64_t{1}, std::int64_t{100}, std::int64_t{32 << 20}});
}

// Both norms are exact in any order, and what they scale must not be added to.
void clip(ProgramDice& dice, Program& program) {
  const bool keeps = std::any_of(program.steps.begin(), program.steps.end(),
                                 [](const Step& step) { return step.keeps_gradients; });
  if (keeps || program.scales_loss || dice.once_in(2)) return;
  program.max_norm = dice.of({0.01, 0.3, 2.0});
  program.clips_in_optimizer = dice.once_in(2);
  program.clips_by_sum = dice.once_in(2);
}

// Micro-batches that leave out children of the root, in a third of the programs; none whose weight
// the root reads later, nor of several roots the first that is called behind losses: a pass along
// no call of a unit brings in nothing.
void vary_micro_batches(ProgramDice& dice, Program& program) {
  if (!dice.once_in(3)) return;
  unsigned read = 0;
  for (const int i : program.root.read_later) read |= 1U << i;
  const auto is_region = [](const Statement& s) {
    return s.kind == Statement::call && !s.without_gradient;
  };
  const std::vector<Statement>& body = program.root.body;
  const auto is_loss = [](const Statement& s) { return s.kind == Statement::backward; };
  const auto behind = std::find_if(body.rbegin(), body.rend(), is_loss).base(),
             first = std::find_if(behind, body.end(), is_region);
  if (!program.root.is_unit) read |= first == body.end() ? ~0U : 1U << first->callee;
  for (Step& step : program.steps)
    for (Step::Forward& f : step.forwards)
      if (dice.once_in(2)) f.skipped = static_cast<unsigned>(dice.below(8)) & ~read;
}

// In a quarter of the programs, at a step without decisions, which some ranks would have made
// before they hear of the failure, and behind one that leaves no gradients, which a reset drops.
void fail_once(ProgramDice& dice, Program& program) {
  if (!dice.once_in(4)) return;
  Program::Failure f{.step = static_cast<std::size_t>(dice.below(kSteps)),
                     .ranks = dice.ranks(),
                     .at = 1 + dice.below(4)};
  const auto decides = [](const Step::Forward& forward) { return !forward.before.empty(); };
  if (std::ranges::any_of(program.steps[f.step].forwards, decides) ||
      (f.step == 0 && program.is_planned) ||
      (f.step > 0 && program.steps[f.step - 1].keeps_gradients))
    return;
  program.fails = f;
}

// The ranks of a third of the meshes stand in another order than the world's.
void choose_mesh(ProgramDice& dice, Program& program) {
  if (!dice.once_in(3)) return;
  for (int r = 0; r < program.ranks; ++r) program.mesh_ranks.push_back(r);
  for (int r = program.ranks - 1; r > 0; --r)
    std::swap(program.mesh_ranks[static_cast<std::size_t>(r)],
              program.mesh_ranks[static_cast<std::size_t>(dice.below(r + 1))]);
}

// Optimizers that step where no gradients are, or again from the same; a scaler would refuse.
void step_more(ProgramDice& dice, Program& program) {
  if (dice.once_in(2) || program.scales_loss) return;
  bool are_kept = false;
  for (Step& step : program.steps) {
    step.steps_before = dice.once_in(3) && !are_kept;
    step.steps_more = dice.once_in(2) ? 1 + dice.below(2) : 0;
    are_kept = step.keeps_gradients;
  }
}

// A step that some ranks can't make, and that all make again, in a third of the programs. What a
// reset drops, or a first attempt changes for good on some ranks, there is none of: so no moments
// of what the step before has frozen behind its update, which the step may want back.
void fail(ProgramDice& dice, Program& program) {
  const auto at = static_cast<std::size_t>(dice.below(static_cast<int>(program.steps.size())));
  Step::Failure failure{.forward = static_cast<std::size_t>(dice.below(4)),
                        .ranks = static_cast<Ranks>(1 + dice.below((1 << program.ranks) - 1)),
                        .on_device = dice.once_in(2),
                        .exchanges = dice.below(3)};
  bool fails = dice.once_in(3) && !program.scales_loss && (at > 0 || !program.is_planned);
  bool has_units = false;
  for_each_part(program.root, [&](const PartPlan& part) {
    has_units = has_units || part.is_unit;
    fails = fails && !part.has_buffer;
  });
  Step& step = program.steps[at];
  step.exchanges = dice.once_in(2);
  failure.forward = std::min(failure.forward, step.forwards.size());
  fails =
      fails && has_units &&
      (at == 0 ||
       (!program.steps[at - 1].keeps_gradients && !program.steps[at - 1].is_turned_late)) &&
      std::ranges::all_of(step.forwards, [](const Step::Forward& f) { return f.before.empty(); });
  if (fails) step.failure = failure;
}

}  // namespace

Program make_program(std::uint64_t seed) {
  ProgramDice dice(seed);
  Program program;
  program.seed = seed;
  program.ranks = 1 << dice.below(3);
  if (dice.once_in(3))
    while (program.replicas < program.ranks && !dice.once_in(3)) program.replicas *= 2;
  choose_executor(dice, program);
  if (dice.once_in(3)) program.offload = Offload::cpu;
  program.doubled_from = dice.of({std::size_t{0}, std::size_t{1}});
  program.root = make_root(dice, program.offload);
  for (int k = 0; k < kSteps; ++k) program.steps.push_back(make_step(dice));
  turn_parameters(dice, program);
  vary_skips(dice, program);
  vary_parts(dice, program);
  postpone_reductions(dice, program);
  decide(dice, program);
  program.is_planned = dice.once_in(4) && program.root.is_unit;
  vary_options(dice, program);
  program.scales_loss =
      dice.once_in(4) && std::none_of(program.steps.begin(), program.steps.end(),
                                      [](const Step& step) { return step.keeps_gradients; });
  choose_optimizer(dice, program);
  vary_outputs(dice, program.root);
  clip(dice, program);
  choose_mesh(dice, program);
  vary_inputs(dice, program.root);
  add_buffers(dice, program.root);
  if (add_losses(dice, program.root)) program.scales_loss = false;
  vary_micro_batches(dice, program);
  vary_captures(dice, program.root);
  if (add_losses_apart(dice, program.root)) program.scales_loss = false;
  fail_once(dice, program);
  step_more(dice, program);
  fail(dice, program);
  return program;
}

}  // namespace tessera::testing
