#include "runtime/shard/unit_agreement.hpp"

#include <algorithm>
#include <utility>

#include "runtime/comm/least_and_most.hpp"
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

constexpr const char* kSameModel = "; the step must make the same model, with the same options";

Facts facts_of(const Unit& unit) {
  const UnitShards& shards = unit.shards();
  const ShardOptions& o = shards.options();
  const auto or_unset = [](const std::optional<DType>& d) { return d ? concat(*d) : "unset"; };
  std::string parameters;
  for (const auto& part : {shards.parameters(), shards.streamed()})
    for (const auto& p : part)
      parameters +=
          concat(parameters.empty() ? "" : ", ", p->name, ' ', p->shape,
                 p->trainable ? "" : " frozen", p->dtype == f32 ? "" : concat(" as ", p->dtype),
                 p->override_dtype ? concat(" gathered as ", *p->override_dtype) : "",
                 p->transform ? concat(" by ", p->transform->name()) : "",
                 p->block_rows > 0 ? concat(" in blocks of ", p->block_rows, " rows") : "",
                 p->spec.dim > 0 ? concat(" along dimension ", p->spec.dim) : "");
  return {
      {"the name", unit.name()},
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
      {"what was decided", shards.decisions().empty() ? "nothing" : shards.decisions().substr(1)}};
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
  std::pair<double, double> least_and_most(double value) const {
    return comm::least_and_most({&mesh_.shard_group(), mesh_.replicate_group()}, value, name_);
  }
  bool is_alike(std::string_view text) const {
    const auto [least, most] = least_and_most(comm::number_of(text));
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
    return unit && !unit->is_inner() && each.shapes == own->shapes &&
           &unit->shards().options().mesh.shard_group() ==
               &root.shards().options().mesh.shard_group();
  };
  return {own->shapes, static_cast<int>(std::count_if(made.begin(), own, is_alike))};
}

}  // namespace

void expect_one_mesh(const std::string& name, const DeviceMesh& mesh, const DeviceMesh& of_root) {
  TESSERA_EXPECT(&mesh.shard_group() == &of_root.shard_group() &&
                     mesh.replicate_group() == of_root.replicate_group(),
                 "fully_shard: unit '", name,
                 "' lies on another mesh than its root; give all units of a model one mesh");
}

// One small collective where all is well; else as many as it takes to say what differs.
void expect_alike(std::span<const std::weak_ptr<Unit>> made, const std::string& changed) {
  const DeviceMesh& mesh = made[0].lock()->shards().options().mesh;
  std::vector<Facts> units;
  std::string all;
  for (const auto& unit : made) {
    units.push_back(facts_of(*unit.lock()));
    all += text_of(units.back());
  }
  const char* const name = changed.empty() ? kFirstCall
                                           : mesh.world().device().context().intern(concat(
                                                 "compare units: '", changed, "' has changed"));
  const Agreement agreement(mesh, name);
  if (agreement.is_alike(all)) return;
  const char* const remedy =
      "; every rank must make the same units, in the same order, with the same options";
  const auto [least, most] = agreement.least_and_most(static_cast<double>(units.size()));
  for (std::size_t i = 0; i < static_cast<std::size_t>(least); ++i)
    TESSERA_EXPECT(agreement.is_alike(units[i][0].second), "fully_shard: unit ", i + 1, " of ",
                   units.size(), " is here '", units[i][0].second,
                   "', and another one on another rank", remedy);
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
                         : "; every rank must make the same calls of shard/runtime_control.hpp");
  }
}

int agree_on_number(const Unit& root, int number) {
  const auto [shapes, place] = among_alike(root);
  const Agreement agreement(root.shards().options().mesh, kFirstCall);
  TESSERA_EXPECT(!agreement.is_alike(shapes) || agreement.is_alike(concat(place)),
                 "fully_shard: of several models alike this rank calls model ", place + 1,
                 ", with root '", root.name(),
                 "', and another rank another model; every rank must make models, and first call "
                 "them, in the same order");
  return static_cast<int>(agreement.least_and_most(number).second);
}

void note_made(const std::shared_ptr<Unit>& unit, const std::vector<nn::Module*>& modules) {
  std::erase_if(made, [](const Made& each) { return each.unit.expired(); });
  Made& each = made.emplace_back(Made{unit, {}});
  for (const nn::Module* const module : modules)
    for (const Parameter& p : module->parameters()) each.shapes += concat(p.shape());
}

void expect_as_planned(std::span<const std::weak_ptr<Unit>> units,
                       std::span<const std::weak_ptr<Unit>> planned) {
  const auto mesh_of = [](std::span<const std::weak_ptr<Unit>> of) -> const DeviceMesh& {
    return of[0].lock()->shards().options().mesh;
  };
  const auto ranks_of = [](const DeviceMesh& mesh) {
    return concat(mesh.shard_size(), mesh.shard_size() == 1 ? " rank" : " ranks", ", in ",
                  mesh.replicas(), mesh.replicas() == 1 ? " replica" : " replicas");
  };
  TESSERA_EXPECT(ranks_of(mesh_of(units)) == ranks_of(mesh_of(planned)),
                 "shard_plan: the model is on ", ranks_of(mesh_of(units)),
                 ", the one of the planned step on ", ranks_of(mesh_of(planned)), kSameModel);
  TESSERA_EXPECT(units.size() == planned.size(), "shard_plan: the model has ", units.size(),
                 " units, the one of the planned step ", planned.size(), kSameModel);
  for (std::size_t i = 0; i < units.size(); ++i) {
    const Facts here = facts_of(*units[i].lock()), there = facts_of(*planned[i].lock());
    for (std::size_t fact = 0; fact + kDecided < here.size(); ++fact)
      TESSERA_EXPECT(here[fact].second == there[fact].second, "shard_plan: ", here[fact].first,
                     " of unit '", here[0].second, "': ", here[fact].second,
                     "; in the planned step: ", there[fact].second, kSameModel);
  }
}

void expect_same_plans(const DeviceMesh& mesh, std::uint64_t fingerprint) {
  TESSERA_EXPECT(
      Agreement(mesh, "compare plans").is_alike(concat(fingerprint)),
      "shard_plan: the ranks have planned different steps; plan the same calls on every rank");
}

}  // namespace tessera::shard
