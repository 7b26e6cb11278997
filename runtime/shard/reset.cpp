// After a step that failed: every rank comes here, from wherever it was, and the next step is
// possible.
//
//   halt     nobody waits any more; what is queued has run or was skipped
//   settle   which updates have run, which never began, which were cut
//   reset    units closed, gradients dropped
//   resume   the ranks meet, and agree on what they have found
#include <algorithm>
#include <array>

#include "runtime/shard/unit.hpp"
#include "tessera/autograd/random.hpp"

namespace tessera {
namespace {

// What ranks tell each other at a reset; each number becomes the largest of all ranks.
enum Agreed : std::size_t { half_done, steps, minus_steps, draws, no_context, kAgreed };
static_assert(kAgreed <= World::kAgreed);

// Takes back the updates that never began. False when one is half done.
bool settle(UpdateLog& log, const Lost& lost, const std::vector<FlatGroup*>& groups) {
  const Tick first = lost.first[StreamId::compute], failed = lost.failed[StreamId::compute];
  bool is_whole = true;
  for (const UpdateLog::Update& update : std::exchange(log.queued, {})) {
    const bool has_run = first == 0 || update.last < first;
    const bool has_begun = has_run || update.first < first || update.first == failed;
    if (!has_begun && update.is_cut)
      for (FlatGroup* const group : groups) group->whole = true;
    else if (!has_begun)
      --log.steps;
    else if (!has_run || update.is_cut)
      is_whole = false;
  }
  if (first == 0 || log.prepared < first) return is_whole;
  log.prepared = 0;  // made anew by the next step, or loaded
  return is_whole && log.steps == 0;
}

}  // namespace

ShardReset reset(nn::Module& root, std::string_view cause) {
  const auto unit = std::dynamic_pointer_cast<shard::Unit>(root.hook());
  TESSERA_EXPECT(unit && (!unit->context() || unit->is_root()),
                 "reset: the module is not the root; give the one of the outermost fully_shard");
  std::vector<shard::Unit*> units;
  for (const auto& [name, module] : root.named_modules())
    if (auto* const below = dynamic_cast<shard::Unit*>(module->hook().get()))
      units.push_back(below);
  TESSERA_EXPECT(
      !autograd::in_backward() &&
          std::none_of(units.begin(), units.end(), [](const auto* u) { return u->is_in_call(); }),
      "reset: a call or a backward pass is running; catch outside of the model");
  const World& world = unit->options().mesh.world();
  world.halt(cause);

  std::array<double, kAgreed> agreed{};
  std::vector<FlatGroup*> groups;
  std::vector<std::shared_ptr<UpdateLog>> logs;
  for (shard::Unit* const below : units) {
    if (!below->trainable()) continue;
    groups.push_back(below->trainable().get());
    for (const auto& log : groups.back()->updates)
      if (std::find(logs.begin(), logs.end(), log) == logs.end()) logs.push_back(log);
  }
  for (const auto& log : logs) {
    if (!settle(*log, world.device().context().lost(), groups)) agreed[half_done] = 1;
    agreed[steps] += static_cast<double>(log->steps);
  }
  for (const FlatGroup* const group : groups)
    if (!group->whole) agreed[half_done] = 1;
  agreed[minus_steps] = -agreed[steps];
  agreed[draws] = static_cast<double>(autograd::random_state().draws);
  const std::shared_ptr<shard::Context> context = unit->shared_context();
  if (context)
    context->reset();
  else
    agreed[no_context] = 1;

  ShardReset done;
  done.cause = world.resume(agreed);
  done.parameters_are_whole = agreed[half_done] == 0 && agreed[steps] == -agreed[minus_steps];
  if (context && agreed[no_context] == 1) context->dissolve();  // made anew by all
  for (shard::Unit* const below : units) below->set_whole(done.parameters_are_whole);
  autograd::random_state().draws = static_cast<std::uint64_t>(agreed[draws]);
  return done;
}

}  // namespace tessera
