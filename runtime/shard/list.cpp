// Several modules as one unit: what fully_shard does with a list, and rounds of its calls.
#include <algorithm>
#include <iterator>
#include <unordered_set>

#include "runtime/shard/unit.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {
namespace {

// Those that lie inside of no other.
std::vector<nn::Module*> outermost(const std::vector<nn::Module*>& modules) {
  TESSERA_EXPECT(!modules.empty(), "fully_shard: the list of modules is empty; give one or more");
  std::unordered_set<const nn::Module*> listed, inside;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    nn::Module* const module = modules[i];
    TESSERA_EXPECT(module != nullptr, "fully_shard: module ", i,
                   " of the list is a null pointer; give the addresses of modules");
    TESSERA_EXPECT(listed.insert(module).second, "fully_shard: module ", i, " of the list, ",
                   shard::called(*module), ", is there already; give each once");
    TESSERA_EXPECT(module->hook() == nullptr, "fully_shard: module ", i, " of the list, ",
                   shard::called(*module), ", is a unit already; call it once on each module");
    for (const auto& [name, below] : module->named_modules())
      if (below != module) inside.insert(below);
  }
  std::vector<nn::Module*> out;
  std::copy_if(modules.begin(), modules.end(), std::back_inserter(out),
               [&](const nn::Module* module) { return !inside.contains(module); });
  return out;
}

}  // namespace

void fully_shard(const std::vector<nn::Module*>& modules, const ShardOptions& options, Caller at) {
  const CallSite site(at);
  shard::make_unit(outermost(modules), options);
}

}  // namespace tessera

namespace tessera::shard {

void Context::begin_round(int unit) {
  if (std::find(rounds_.begin(), rounds_.end(), unit) == rounds_.end()) rounds_.push_back(unit);
}

// While a list waits for modules its slot is taken, and backward will come to other calls. Ranks
// that have called other modules of it would take other slots from here on: the name tells.
const char* Context::name_of_gather(const UnitShards& of) const {
  std::string waiting;
  for (const int number : rounds_)
    if (const std::shared_ptr<Unit> list = unit(number);
        list && number != of.number && list->calls().is_in_round())
      waiting += concat(waiting.empty() ? "" : ", ", list->name());
  if (waiting.empty()) return of.gather_name;
  return device().context().intern(concat(of.gather_name, " (in a round of ", waiting, ")"));
}

void Context::end_rounds() {
  while (!rounds_.empty()) {
    const std::shared_ptr<Unit> unit = this->unit(rounds_.back());
    rounds_.pop_back();
    if (unit && unit->calls().is_in_round()) unit->end_round();
  }
}

void Context::abandon_rounds() noexcept {
  for (const int number : rounds_)
    if (const std::shared_ptr<Unit> unit = this->unit(number); unit && unit->calls().is_in_round())
      unit->abandon_round();
  rounds_.clear();
}

}  // namespace tessera::shard
