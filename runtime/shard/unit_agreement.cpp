// Whether all ranks have made the same units: looked at before anything else of them is collective.
// And how far a rank has come that submits a collective, by which they tell who calls another one.
#include <algorithm>
#include <utility>

#include "runtime/comm/ends_of.hpp"
#include "runtime/shard/unit.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/param/gather_transform.hpp"

namespace tessera::shard {
namespace {

// What a unit was made of, one line for each thing that may differ; last what a program may decide
// later.
using Facts = std::vector<std::pair<const char*, std::string>>;
constexpr std::size_t kDecided = 3;

constexpr const char* kSameModel = "; the step makes the same model, with the same options";

Facts facts_of(const Unit& unit) {
  const UnitShards& shards = unit.shards();
  const ShardOptions& o = shards.options;
  const auto or_unset = [](const std::optional<DType>& d) { return d ? concat(*d) : "unset"; };
  std::string parameters;
  for (const auto& part : {shards.parameters, shards.streamed})
    for (const auto& p : part)
      parameters +=
          concat(parameters.empty() ? "" : ", ", p->name, ' ', p->shape,
                 p->trainable ? "" : " frozen", p->dtype == f32 ? "" : concat(" as ", p->dtype),
                 p->transform ? concat(" by ", p->transform->name()) : "",
                 p->block_rows > 0 ? concat(" in blocks of ", p->block_rows, " rows") : "",
                 p->spec.dim > 0 ? concat(" along dimension ", p->spec.dim) : "");
  return {{"the name", unit.name()},
          {"precision.param", or_unset(o.precision.param)},
          {"precision.reduce", or_unset(o.precision.reduce)},
          {"precision.output", or_unset(o.precision.output)},
          {"precision.cast_forward_inputs", o.precision.cast_forward_inputs ? "true" : "false"},
          {"prefetch_depth", concat(o.prefetch_depth)},
          {"forwards_ahead", concat(o.forwards_ahead)},
          {"slice_bytes", concat(o.slice_bytes)},
          {"slices_wait", o.slices_wait ? "true" : "false"},
          {"piece_bytes", concat(o.piece_bytes)},
          {"packed_bytes", concat(o.packed_bytes)},
          {"offload", o.offload == Offload::cpu ? "cpu" : "none"},
          {"parameters", parameters},  // behind what says how they are cut and ordered
          {"reshard_after_forward", o.reshard_after_forward.to_string()},
          {"reductions_in_flight", concat(o.reductions_in_flight)},
          {"what was decided", shards.decisions.empty() ? "nothing" : shards.decisions.substr(1)}};
}

std::string text_of(const Facts& facts) {
  std::string text;
  for (const auto& [what, value] : facts) text += value + '\n';
  return text;
}

// Compares over a mesh, where it is collective: all ranks get the same answer. `name` is what a
// rank hears of that peers compare, while it does something else.
class Agreement {
 public:
  Agreement(const DeviceMesh& mesh, const char* name) : mesh_(mesh), name_(name) {}

  // The least and the most of all ranks' values.
  std::pair<double, double> ends_of(double value) const {
    return comm::ends_of({&mesh_.shard_group(), mesh_.replicate_group()}, value, name_);
  }
  bool is_alike(std::string_view text) const {
    const auto [least, most] = ends_of(comm::number_of(text));
    return least == most;
  }

 private:
  const DeviceMesh& mesh_;
  const char* name_;
};

constexpr const char* kFirstCall = "compare units (first call)";

// A unit, and the shapes of all parameters of its modules, those of inner units too.
struct Made {
  std::weak_ptr<Unit> unit;
  std::string shapes;
};
// Those that this host thread has made and that live, in order.
thread_local std::vector<Made> made;

// Its shapes, and how many others that have them, and lie in no unit, this thread has made before.
std::pair<std::string, int> among_alike(const Unit& root) {
  const auto own =
      std::ranges::find_if(made, [&](const Made& each) { return each.unit.lock().get() == &root; });
  if (own == made.end()) return {};
  const auto is_alike = [&](const Made& each) {
    const auto unit = each.unit.lock();
    return unit && !unit->control().is_inner() && each.shapes == own->shapes &&
           &unit->shards().options.mesh.shard_group() == &root.shards().options.mesh.shard_group();
  };
  return {own->shapes, static_cast<int>(std::count_if(made.begin(), own, is_alike))};
}

}  // namespace

// By these take_number tells whether peers call the same of several models.
void note_made(const std::shared_ptr<Unit>& unit, const std::vector<nn::Module*>& modules) {
  std::erase_if(made, [](const Made& each) { return each.unit.expired(); });
  Made& each = made.emplace_back(Made{unit, {}});
  for (const nn::Module* const module : modules)
    for (const Parameter& p : module->parameters()) each.shapes += concat(p.shape());
}

// One more than any root has that lives on this device, of those that this host thread has made.
void Context::take_number() {
  const auto [shapes, place] = among_alike(*unit(0));
  const Agreement agreement(mesh(), kFirstCall);
  TESSERA_EXPECT(!agreement.is_alike(shapes) || agreement.is_alike(concat(place)),
                 "fully_shard: unit '", unit(0)->name(), "' is the root of model ", place + 1,
                 " of those alike that this rank has made, and another rank calls another one; "
                 "every rank makes models, and calls them first, in the same order");
  static thread_local std::vector<std::weak_ptr<Context>> roots;
  std::erase_if(roots, [](const auto& weak) { return weak.expired(); });
  for (const auto& weak : roots)
    if (const auto root = weak.lock(); root && &root->device().context() == &device().context())
      number_ = std::max(number_, root->number_ + 1);
  number_ = static_cast<int>(agreement.ends_of(number_).second);
  roots.push_back(weak_from_this());
}

// One small collective where all is well; else as many as it takes to say what differs.
void Context::expect_alike() const {
  std::vector<Facts> units;
  std::string all, changed;  // the first unit that this rank has changed since they were laid out
  for (const auto& weak : units_) {
    const auto unit = weak.lock();
    units.push_back(facts_of(*unit));
    all += text_of(units.back());
    const FlatGroup* const group = unit->shards().group.get();
    const bool was_set = slots_ && slots_->to_be_agreed() == unit->shards().number;
    if (changed.empty() && !calls_.empty() && (was_set || (group && !group->is_laid_out)))
      changed = unit->name();
  }
  const char* const name =
      changed.empty()
          ? kFirstCall
          : device().context().intern(concat("compare units: '", changed, "' has changed"));
  const Agreement agreement(mesh(), name);
  if (agreement.is_alike(all)) return;
  const char* const remedy =
      "; every rank makes the same units, in the same order, with the same options";
  const auto [least, most] = agreement.ends_of(static_cast<double>(units.size()));
  for (std::size_t i = 0; i < static_cast<std::size_t>(least); ++i)
    TESSERA_EXPECT(agreement.is_alike(units[i][0].second), "fully_shard: unit ", i + 1, " of ",
                   units.size(), " is here '", units[i][0].second, "', on another rank another",
                   remedy);
  TESSERA_EXPECT(least == most, "fully_shard: here the model has ", units.size(),
                 units.size() == 1 ? " unit" : " units", ", on one rank ", least, ", on another ",
                 most, "; the last here is '", units.back()[0].second, "'", remedy);
  for (const Facts& facts : units) {
    if (agreement.is_alike(text_of(facts))) continue;
    for (const auto& fact : facts)
      TESSERA_EXPECT(agreement.is_alike(fact.second), "fully_shard: unit '", facts[0].second,
                     "' differs between ranks in ", fact.first, "; here: ", fact.second,
                     &fact != &facts.back()
                         ? remedy
                         : "; every rank makes the same calls of shard/runtime_control.hpp");
  }
}

Progress UnitShards::at_gather() const {
  std::uint64_t steps = 0;
  for (const auto& of : groups) steps += of->steps();
  return {.backward_of = static_cast<std::uint32_t>(autograd::forward_of_step()),
          .steps = static_cast<std::uint32_t>(steps)};
}

Progress UnitShards::at_reduction() const {
  Progress progress = at_gather();
  progress.divided_by = divide_factor;
  progress.steps += static_cast<std::uint32_t>(slots->steps());
  return progress;
}

void Slots::adopt(const Slots& planned) {
  kept_ = planned.kept_;
  next_ = planned.next_;
  is_new_ = planned.is_new_;
  is_assumption_met_ = planned.is_assumption_met_;
  least_bytes_ = planned.least_bytes_;
  wants_resize_ = true;
  resize_if_due();
}

std::uint64_t Slots::fingerprint_of_plans() const {
  std::string all;
  for (const auto& [step, kept] : kept_) {
    all += concat(step, ' ', kept.plan.bytes, ':');
    for (const std::int64_t offset : kept.plan.offsets) all += concat(offset, ' ');
  }
  for (const auto& [after, step] : next_)
    all += concat(after.first, after.second ? '>' : '|', step, ' ');
  return fnv1a(all);
}

void Context::follow_plan(Context& planned) {
  TESSERA_EXPECT(planned.has_run_,
                 "shard_plan: the step has not called the model that it returned");
  const auto ranks_of = [](const DeviceMesh& mesh) {
    return concat(mesh.shard_size(), mesh.shard_size() == 1 ? " rank" : " ranks", ", in ",
                  mesh.replicas(), mesh.replicas() == 1 ? " replica" : " replicas");
  };
  TESSERA_EXPECT(ranks_of(mesh()) == ranks_of(planned.mesh()), "shard_plan: the model is on ",
                 ranks_of(mesh()), ", the one of the planned step on ", ranks_of(planned.mesh()),
                 kSameModel);
  TESSERA_EXPECT(units_.size() == planned.units_.size(), "shard_plan: the model has ",
                 units_.size(), " units, the one of the planned step ", planned.units_.size(),
                 kSameModel);
  for (std::size_t i = 0; i < units_.size(); ++i) {
    const Facts here = facts_of(*units_[i].lock()), there = facts_of(*planned.units_[i].lock());
    for (std::size_t fact = 0; fact + kDecided < here.size(); ++fact)
      TESSERA_EXPECT(here[fact].second == there[fact].second, "shard_plan: ", here[fact].first,
                     " of unit '", here[0].second, "': ", here[fact].second,
                     "; in the planned step: ", there[fact].second, kSameModel);
  }
  planned.slots_->begin_step(true);  // so its last step is over
  TESSERA_EXPECT(
      Agreement(mesh(), "compare plans").is_alike(concat(planned.slots_->fingerprint_of_plans())),
      "shard_plan: ranks have planned other steps; every rank plans the same calls");
  slots_->adopt(*planned.slots_);
  has_run_ = true;
}

}  // namespace tessera::shard
