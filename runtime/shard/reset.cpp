// After a step that failed: every rank comes here, from wherever it was, and the next step is
// possible.
//
//   halt     nobody waits any more; what is queued has run or was skipped
//   settle   which updates have run, which never began, which were cut
//   reset    units closed, gradients dropped
//   resume   the ranks meet, and agree on what they have found
#include <algorithm>
#include <array>

#include "runtime/param/update_log.hpp"
#include "runtime/shard/unit.hpp"
#include "tessera/autograd/random.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/shard/reset.hpp"

namespace tessera {
namespace {

// What ranks tell each other at a reset; each number becomes the largest of all ranks.
enum Agreed : std::size_t { half_done, steps, minus_steps, draws, forwards, no_root, kAgreed };
static_assert(kAgreed <= World::kAgreed);

struct Below {
  std::vector<shard::Unit*> units;
  std::vector<std::shared_ptr<shard::Root>> roots;
};

Below below(nn::Module& tree) {
  Below out;
  for (const auto& [name, module] : tree.named_modules()) {
    auto* const unit = dynamic_cast<shard::Unit*>(module->hook().get());
    if (!unit || std::find(out.units.begin(), out.units.end(), unit) != out.units.end()) continue;
    out.units.push_back(unit);
    if (unit->root() && unit->shards().is_root()) out.roots.push_back(unit->root());
  }
  const auto has_root = [&](const shard::Unit* unit) {
    const auto& known = out.roots;
    return !unit->root() || std::find(known.begin(), known.end(), unit->root()) != known.end();
  };
  TESSERA_EXPECT(!out.units.empty() && std::all_of(out.units.begin(), out.units.end(), has_root),
                 "reset: the module is not the root; give the module of the outermost fully_shard, "
                 "or one that holds all roots of its world");
  for (shard::Unit* const unit : out.units) {
    TESSERA_EXPECT(
        !autograd::in_backward() && !unit->calls().is_running(),
        "reset: a call or a backward pass is running; catch the error outside of the model");
    TESSERA_EXPECT(
        &unit->shards().options().mesh.world() == &out.units[0]->shards().options().mesh.world(),
        "reset: the units below the module lie in several worlds; reset the units of each world "
        "alone");
  }
  return out;
}

bool is_of(const FlatGroup& group, const std::shared_ptr<UpdateLog>& log) {
  return std::ranges::any_of(group.updates, [&](const auto& of) { return of.second == log; });
}

// Takes back the updates that never began or were skipped. False when one is half done, or a GPU
// may have done it, or when moments of what is frozen have gone with one that is taken back: on
// other ranks they may be there.
bool settle(const std::shared_ptr<UpdateLog>& log_of, const Lost& lost,
            const std::vector<FlatGroup*>& groups) {
  UpdateLog& log = *log_of;
  const Tick first = lost.first[log.stream], failed = lost.failed[log.stream];
  bool is_consistent = !std::exchange(log.has_dropped, false);
  for (const UpdateLog::Update& update : std::exchange(log.queued, {})) {
    const bool has_run = first == 0 || update.last < first;
    const bool has_begun = has_run || update.first < first || update.first == failed ||
                           update.first <= lost.unsure[log.stream];
    if (!has_begun && update.is_cut)
      for (FlatGroup* const group : groups)
        group->is_consistent = group->is_consistent || is_of(*group, log_of);
    else if (!has_begun || (has_run && update.was_skipped && update.was_skipped())) {
      log.take_back();
      is_consistent = is_consistent && (has_begun || !update.has_dropped);
    } else if (!has_run || update.is_cut)
      is_consistent = false;
  }
  if (first == 0) return is_consistent;
  if (log.tables >= first) log.tables = 0;  // made anew by the next step
  if (log.prepared < first) return is_consistent;
  log.prepared = 0;  // likewise, or loaded
  return is_consistent && log.steps == 0;
}

}  // namespace

ShardReset reset(nn::Module& tree, std::string_view cause) {
  const auto [units, roots] = below(tree);
  const World& world = units[0]->shards().options().mesh.world();
  std::array<double, kAgreed> agreed{};
  for (const auto& root : roots)
    if (!root->is_valid()) agreed[half_done] = 1;  // what became of its updates is forgotten
  world.halt(cause);

  std::vector<FlatGroup*> groups;
  for (const shard::Unit* const unit : units)
    if (unit->shards().group()) groups.push_back(unit->shards().group().get());
  const std::size_t of_units = groups.size();
  for (const Parameter& p : tree.parameters())  // those that are ignored
    if (FlatGroup* const group = state_of(p)->group.get(); group && !p.unit())
      if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  std::vector<std::shared_ptr<UpdateLog>> logs;
  for (const FlatGroup* const group : groups)
    for (const auto& [entry, log] : group->updates)
      if (std::find(logs.begin(), logs.end(), log) == logs.end()) logs.push_back(log);
  for (const auto& log : logs) {
    if (!settle(log, world.device().context().lost(), groups)) agreed[half_done] = 1;
    agreed[steps] += static_cast<double>(log->steps);
  }
  const Clock& lost = world.device().context().lost().first;
  for (FlatGroup* const group : groups) {
    const Event edited = std::exchange(group->edited, {});
    const bool was_lost = lost[edited.stream] > 0 && edited.tick >= lost[edited.stream];
    if (!group->is_consistent || was_lost) agreed[half_done] = 1;
  }
  agreed[minus_steps] = -agreed[steps];
  agreed[draws] = static_cast<double>(autograd::random_state().draws);
  agreed[forwards] = static_cast<double>(autograd::forwards());
  for (const auto& root : roots) root->reset();
  for (std::size_t i = of_units; i < groups.size(); ++i) groups[i]->drop_gradient();
  for (const shard::Unit* const unit : units) {
    const FlatGroup* const group = unit->shards().group().get();
    if (!unit->root() || !unit->root()->is_as_made() || (group && !group->is_laid_out))
      agreed[no_root] = 1;
  }

  ShardReset done;
  done.cause = world.resume(agreed);
  done.parameters_are_consistent = agreed[half_done] == 0 && agreed[steps] == -agreed[minus_steps];
  for (const auto& root : roots) {
    if (agreed[no_root] == 1) root->dissolve();  // made anew by all
    root->resume();
  }
  for (FlatGroup* const group : groups) group->is_consistent = done.parameters_are_consistent;
  for (const auto& log : logs) log->skipped = log->told = 0;  // counted anew, on every rank
  autograd::random_state().draws = static_cast<std::uint64_t>(agreed[draws]);
  autograd::forwards() = static_cast<std::uint64_t>(agreed[forwards]);
  return done;
}

}  // namespace tessera
