#include "runtime/shard/root.hpp"

#include <algorithm>
#include <utility>

#include "runtime/shard/streamed_parameter.hpp"
#include "runtime/shard/unit.hpp"
#include "runtime/shard/unit_agreement.hpp"
#include "runtime/shard/unit_region.hpp"
#include "tessera/detail/device/captured_work.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {
namespace {

using NamedUnits = std::vector<std::pair<std::string, std::shared_ptr<Unit>>>;

// In order of the module tree; of a list its names.
NamedUnits units_below(nn::Module& root) {
  NamedUnits units;
  for (const auto& [name, module] : root.named_modules()) {
    const auto unit = std::dynamic_pointer_cast<Unit>(module->hook());
    if (!unit) continue;
    const auto known = std::ranges::find(units, unit, &NamedUnits::value_type::second);
    if (known == units.end())
      units.emplace_back(name.empty() ? "(root)" : name, unit);
    else if (unit->calls().is_list())
      known->first += ", " + name;
  }
  return units;
}

// The innermost module around a parameter that is a unit; the root is one.
std::string unit_around(nn::Module& root, const std::string& parameter) {
  std::string around;
  for (const auto& [name, module] : root.named_modules())
    if (name.size() > around.size() && module->hook() && parameter.starts_with(name + ".") &&
        std::dynamic_pointer_cast<Unit>(module->hook()))
      around = name;
  return around.empty() ? "the root" : concat("'", around, "'");
}

// Nobody would reduce what is in no unit.
void expect_claimed(nn::Module& root) {
  for (const auto& [name, p] : root.named_parameters())
    TESSERA_EXPECT(p.unit() || state_of(p)->is_ignored, "fully_shard: parameter '", name,
                   "' was registered after fully_shard and lies in no unit; call fully_shard on ",
                   unit_around(root, name),
                   " again to take it in, or give it in ShardOptions::ignored");
}

std::string some_names(const UnitShards& shards) {
  constexpr std::size_t kShown = 5;
  std::string names;
  std::size_t n = 0;
  for (const auto& part : {shards.parameters(), shards.streamed()})
    for (const auto& p : part)
      if (++n <= kShown) names += concat(n > 1 ? ", '" : "'", p->name, "'");
  return n > kShown ? concat(names, " and ", n - kShown, " more") : names;
}

void expect_memory(const UnitShards& shards, const std::string& unit) {
  TESSERA_EXPECT(shards.is_materialized() || shards.is_empty(), "unit '", unit,
                 "' has no memory yet for ", some_names(shards),
                 "; call materialize on the model first");
}

void check_under_root(const UnitShards& unit, const std::string& name, const UnitShards& root) {
  expect_memory(unit, name.empty() ? "(root)" : name);
  expect_one_mesh(name, unit.options().mesh, root.options().mesh);
  TESSERA_EXPECT(unit.options().offload == root.options().offload, "fully_shard: unit '", name,
                 "' has its shards on the ", unit.is_offloaded() ? "host" : "device",
                 ", its root on the ", unit.is_offloaded() ? "device" : "host",
                 "; give all units of a model one ShardOptions::offload");
}

bool is_below(const std::string& name, const std::string& around) {
  return around.empty() || name == around || name.starts_with(around + '.');
}

}  // namespace

// --- which units it has ---

std::vector<std::weak_ptr<Root>>& Root::all() {
  static thread_local std::vector<std::weak_ptr<Root>> instance;
  return instance;
}

void Root::build(nn::Module& module, const ShardCounters& counted) {
  const NamedUnits units = units_below(module);  // they join when all have passed
  const UnitShards& around = units.front().second->shards();
  TESSERA_EXPECT(!units.front().second->calls().is_list(), "unit '", around.name(),
                 "' is a list of modules and can't be the root; call fully_shard on a module "
                 "around them too, and run that module first");
  expect_claimed(module);                     // sets the names that errors use
  std::vector<std::shared_ptr<Root>> before;  // of roots that are below this one
  for (const auto& [name, unit] : units) {
    if (const auto above = unit->root()) {
      const auto of = above->unit(0);  // null: it is gone
      TESSERA_EXPECT(
          !of || std::ranges::find(units, of, &NamedUnits::value_type::second) != units.end(),
          "fully_shard: unit '", name,
          "' already lies under another root, which has run; call fully_shard on a module that "
          "holds both, and run that module");
      if (std::ranges::find(before, above) == before.end()) before.push_back(above);
    }
    check_under_root(unit->shards(), name, around);
  }
  for (const auto& above : before)
    above->expect_covered(concat("units below '", around.name(), "' have changed"));
  for (const auto& above : before) above->dismiss();
  decisions().count += before.size();  // a captured step has their slots
  const std::shared_ptr<Root> root(new Root());
  for (const auto& [name, unit] : units) root->units_.push_back(unit);
  root->counters_ = counted;
  root->registrations_ = nn::Module::registrations();
  root->group_ = &root->mesh().shard_group();
  root->device_ = root->group_->device();
  root->take_number();
  for (std::size_t i = 0; i < units.size(); ++i)
    units[i].second->join_root(root, units[i].first, static_cast<int>(i));
  root->modules_ = root->units_.size();
  root->rounds_.reserve(root->modules_);
  root->forwards_ahead_ = around.options().forwards_ahead;
  root->lay_out(module);
}

// One more than any root has that lives on this device, of those that this host thread has made.
void Root::take_number() {
  std::erase_if(all(), [](const auto& weak) { return weak.expired(); });
  for (const auto& weak : all())
    if (const auto root = weak.lock(); root && &root->device().context() == &device().context())
      number_ = std::max(number_, root->number_ + 1);
  number_ = agree_on_number(*unit(0), number_);
  all().push_back(weak_from_this());
}

void Root::expect_alike() const {
  std::string changed;  // the first unit that this rank has changed since they were laid out
  for (const auto& weak : units_) {
    const auto unit = weak.lock();
    const FlatGroup* const group = unit->shards().group().get();
    const bool was_set = slots_ && slots_->to_be_agreed() == unit->shards().number();
    if (changed.empty() && !calls_.empty() && (was_set || (group && !group->is_laid_out)))
      changed = unit->name();
  }
  shard::expect_alike(units_, changed);
}

void Root::follow(nn::Module& module) {
  if (autograd::in_backward()) return;
  if (const std::uint64_t now = nn::Module::registrations(); registrations_ != now) {
    const NamedUnits below = units_below(module);
    if (below.size() != modules_ || !std::equal(below.begin(), below.end(), units_.begin(),
                                                [](const auto& named, const auto& weak) {
                                                  return named.second == weak.lock();
                                                }))
      return build(module, counters_);
    expect_claimed(module);
    registrations_ = now;
  }
  follow_masks(module);
}

void Root::follow_masks(nn::Module& module) {
  const auto is_laid_out = [](const auto& weak) {
    const std::shared_ptr<Unit> unit = weak.lock();
    return !unit || !unit->shards().group() || unit->shards().group()->is_laid_out;
  };
  if (std::all_of(units_.begin(), units_.end(), is_laid_out)) return;
  expect_covered(concat("parameters of '", unit(0)->name(), "' were frozen or thawed"));
  take_down();
  lay_out(module);
}

void Root::expect_covered(const std::string& change) {
  TESSERA_EXPECT(autograd::forget_forwards([this](autograd::Region& region) {
                   const auto* const call = UnitRegion::of(region);
                   const auto called = call ? call->unit() : nullptr;
                   return called && called->root().get() == this;
                 }),
                 change,
                 " while a forward still waits for its backward; run backward first, or drop what "
                 "the forward returned");
}

void Root::take_down() {
  for (const auto& weak : units_)  // what they keep unreduced has no place in what is made anew
    if (const std::shared_ptr<Unit> unit = weak.lock()) unit->bring_in_kept();
  device().synchronize();
  for (std::size_t i = 0; i < units_.size(); ++i)
    if (const std::shared_ptr<Unit> unit = units_[i].lock()) {
      unit->close();
      i < modules_ ? unit->set_slots(nullptr, nullptr, nullptr, nullptr) : unit->leave_root();
    }
  units_.resize(modules_);
  slots_ = nullptr;
  replicas_ = nullptr;
  host_link_ = nullptr;
  gradients_ = nullptr;
}

void Root::dismiss() {
  const std::shared_ptr<Root> alive = shared_from_this();
  take_down();
  for (const auto& weak : units_)
    if (const std::shared_ptr<Unit> unit = weak.lock()) unit->leave_root();
  units_.clear();
  modules_ = 0;
  number_ = 0;
}

int Root::number_of(const Unit& unit) const {
  TESSERA_EXPECT(unit.root().get() == this, "unit '", unit.name(),
                 "' is not under the root that is laid out; make units between steps");
  return unit.shards().number();
}

// --- what they share ---

void Root::lay_out(nn::Module& module) {
  try {
    for (const auto& weak : units_)  // of named units now
      if (const auto unit = weak.lock(); unit->has_decisions()) unit->name_decisions();
    expect_alike();
    for (const auto& unit : units_) {
      unit.lock()->check_prefetch_lists(*this);
      unit.lock()->lay_out();
    }
    cut_streamed(unit(0)->shards().options().slice_bytes);
    for (const auto& weak : units_) {
      const std::shared_ptr<Unit> unit = weak.lock();
      unit->set_neighbours(neighbours(unit->shards().options().reshard_after_forward));
    }
    // The tables of slices are made now, not before the first step: were one that fails to skip
    // them, they would be missing in the next.
    device().block(device().compute().record());
    calls_ = assumed_calls(module);
    tell_sizes();
    slots_ = std::make_unique<Slots>(*group_, needs(), calls_);
    make_replicas();
    make_host_link();
    make_gradients();
    for (const auto& unit : units_)
      unit.lock()->set_slots(slots_.get(), replicas_.get(), host_link_.get(), gradients_.get());
    resume();
  } catch (...) {
    dissolve();
    throw;
  }
}

const DeviceMesh& Root::mesh() const { return unit(0)->shards().options().mesh; }

void Root::cut_streamed(std::int64_t bytes) {
  std::int64_t numel = 0;
  for (const auto& unit : units_) numel = std::max(numel, unit.lock()->shards().slice_numel());
  const std::size_t count = units_.size();
  for (std::size_t i = 0; i < count; ++i) {
    const std::shared_ptr<Unit> around = units_[i].lock();
    for (const auto& p : around->shards().streamed()) {
      const auto element = static_cast<std::int64_t>(size_bytes(p->compute_dtype));
      const auto slices =
          std::make_shared<StreamedParameter>(*around, p, bytes > 0 ? bytes : numel * element);
      p->slices = slices;
      for (int slice = 0; slice < slices->count(); ++slice) {
        const std::shared_ptr<Unit>& unit = slices->unit(slice);
        unit->join_root(shared_from_this(), concat(p->name, '[', slice, ']'),
                        static_cast<int>(units_.size()));
        units_.push_back(unit);
      }
    }
  }
}

std::vector<UnitNeeds> Root::needs() const {
  std::vector<UnitNeeds> needs(units_.size());
  for (const AssumedCall& call : calls_)
    if (const std::shared_ptr<Unit> called = unit(call.unit))
      needs[static_cast<std::size_t>(call.unit)] =
          called->needs(call.parent < 0 ? -1 : calls_[static_cast<std::size_t>(call.parent)].unit);
  return needs;
}

// Each module is called once, in the order of the tree, and goes through what it streams.
std::vector<AssumedCall> Root::assumed_calls(nn::Module& module) const {
  std::vector<AssumedCall> calls;
  std::vector<std::pair<std::string, int>> around;  // the units' calls that a module is inside of
  std::vector<int> last(units_.size(), -1);         // of each unit
  for (const auto& [name, below] : module.named_modules()) {
    while (!around.empty() && !is_below(name, around.back().first)) around.pop_back();
    const int parent = around.empty() ? -1 : around.back().second;
    if (const auto unit = std::dynamic_pointer_cast<Unit>(below->hook())) {
      const int number = number_of(*unit),
                before = std::exchange(last[static_cast<std::size_t>(number)],
                                       static_cast<int>(calls.size()));
      if (before >= 0) calls[static_cast<std::size_t>(before)].is_last = false;
      around.emplace_back(name, static_cast<int>(calls.size()));
      calls.push_back({.unit = number,
                       .parent = parent,
                       .is_read_in_backward = unit->is_read_in_backward(),
                       .is_first = before < 0});
    }
    for (const auto& [own, parameter] : below->own_parameters())
      for (int slice = 0; state_of(parameter)->slices && slice < parameter.slices(); ++slice)
        calls.push_back({number_of(*slices_of(*state_of(parameter))->unit(slice)),
                         around.back().second, below->reads_parameters_in_backward()});
  }
  return calls;
}

// Of what is gathered and reduced.
void Root::tell_sizes() const {
  RankGroup::Sizes whole{.reduced_as = unit(0)->shards().reduce_dtype()}, parts = whole;
  for (const auto& weak : units_) {
    const std::shared_ptr<Unit> unit = weak.lock();
    const UnitLayout& layout = unit->shards().layout();
    whole.gathered_bytes = std::max(whole.gathered_bytes, layout.gather_bytes);
    for (const PieceLayout& piece : layout.pieces)
      whole.reduced_bytes = std::max(whole.reduced_bytes, piece.bytes);
    parts.reduced_bytes = std::max(parts.reduced_bytes, unit->most_shard_bytes());
  }
  group_->expect_sizes(whole);
  if (const RankGroup* const replicas = mesh().replicate_group()) replicas->expect_sizes(parts);
}

void Root::make_replicas() {
  const RankGroup* const group = mesh().replicate_group();
  std::int64_t bytes = 0;
  for (const auto& unit : units_) bytes = std::max(bytes, unit.lock()->most_shard_bytes());
  if (group && bytes > 0) replicas_ = std::make_unique<Replicas>(*group, bytes);
}

// The sums of a hybrid mesh are those over the replicas.
void Root::make_gradients() {
  if (!unit(0)->shards().has_windows()) return;
  std::vector<const UnitShards*> units;
  for (const auto& weak : units_) units.push_back(&weak.lock()->shards());
  const RankGroup* const replicas = mesh().replicate_group();
  gradients_ = SymmetricGradients::make(replicas ? *replicas : *group_, units);
}

void Root::make_host_link() {
  if (!unit(0)->shards().is_offloaded()) return;
  HostLink::Sizes sizes;
  for (const auto& weak : units_) {
    const std::shared_ptr<Unit> unit = weak.lock();
    sizes.add(unit->shards(), unit->most_shard_bytes());
  }
  host_link_ = std::make_unique<HostLink>(device(), sizes);
}

const RankGroup* Root::neighbours(Reshard reshard) {
  if (!reshard.is_partial()) return nullptr;
  const int k = reshard.ranks(), first = group_->rank() / k * k;
  const RankGroup*& known = neighbours_[k];  // null where a split has failed
  if (!known)
    known = mesh().world().split(
        concat("dp_shard, ", k),
        group_->ranks().subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(k)));
  return known;
}

// --- calls ---

// Where the host learns what has run: what it prepares is used again, and nothing is polled.
void Root::begin_forward(std::vector<Event>& forwards, bool is_root) {
  if (std::ssize(forwards) == forwards_ahead_) {
    if (!device().context().is_capturing()) device().block(forwards.front());
    forwards.erase(forwards.begin());
  }
  if (!is_root) return;
  if (may_hold_units_) close_stale_units();
  if (slots_->to_be_agreed() >= 0) expect_alike();
  slots_->begin_step(autograd::grad_enabled());
  has_run_ = true;
}

void Root::close_stale_units() {
  for (const auto& weak : units_)
    if (const auto unit = weak.lock(); unit && unit->is_stale() && !unit->calls().is_running())
      unit->close();
}

void Root::begin_round(int unit) {
  if (std::find(rounds_.begin(), rounds_.end(), unit) == rounds_.end()) rounds_.push_back(unit);
}

// While a list waits for modules its slot is taken, and backward will come to other calls. Ranks
// that have called other modules of it would take other slots from here on: the name tells.
const char* Root::name_in_rounds(const UnitShards& of) const {
  std::string waiting;
  for (const int number : rounds_)
    if (const std::shared_ptr<Unit> list = unit(number);
        list && number != of.number() && list->calls().is_in_round())
      waiting += concat(waiting.empty() ? "" : ", ", list->name());
  if (waiting.empty()) return of.gather_name();
  return device().context().intern(concat(of.gather_name(), " (in a round of ", waiting, ")"));
}

void Root::end_rounds() {
  while (!rounds_.empty()) {
    const std::shared_ptr<Unit> unit = this->unit(rounds_.back());
    rounds_.pop_back();
    if (unit && unit->calls().is_in_round()) unit->end_round();
  }
}

void Root::abandon_rounds() noexcept {
  for (const int number : rounds_)
    if (const std::shared_ptr<Unit> unit = this->unit(number); unit && unit->calls().is_in_round())
      unit->abandon_round();
  rounds_.clear();
}

// --- after a failure ---

void Root::expect_valid(const std::string& unit) const {
  TESSERA_EXPECT(is_valid(), "unit '", unit,
                 "': its world has recovered from a failure without it; give reset a module that "
                 "holds all roots of the world");
}

void Root::reset() {
  autograd::forget_forwards();
  backward_.reset();
  for (const auto& weak : units_)
    if (const std::shared_ptr<Unit> unit = weak.lock()) unit->reset();
  rounds_.clear();
  slots_->restart();
  if (replicas_) replicas_->restart();
  if (gradients_) gradients_->restart();
}

void Root::dissolve() noexcept {
  for (const auto& weak : units_)
    if (const std::shared_ptr<Unit> unit = weak.lock()) {
      unit->reset();
      unit->leave_root();
    }
}

}  // namespace tessera::shard
