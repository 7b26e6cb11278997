#include "tessera/distributed/state.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "runtime/distributed/gatherer.hpp"
#include "runtime/param/encoded_source.hpp"
#include "runtime/param/renamed_source.hpp"
#include "runtime/tensor/lent_tensor.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

const std::string kWholeLender = "for_each_full";

const RankGroup& group_of(const std::string& name, const StateTensor& entry) {
  TESSERA_EXPECT(entry.spec.has_dim(), "for_each_full: '", name, "' has a spec along dimension ",
                 entry.spec.dim, " of ", entry.spec.shape, "; give what a state_dict has made");
  TESSERA_EXPECT(entry.mesh != nullptr, "for_each_full: '", name, "' holds the rows of rank ",
                 entry.spec.rank, " of ", entry.spec.world,
                 " and has no mesh; give what a state_dict has made");
  const RankGroup& group = entry.mesh->shard_group();
  TESSERA_EXPECT(group.size() == entry.spec.world && group.rank() == entry.spec.rank,
                 "for_each_full: '", name, "' holds the rows of rank ", entry.spec.rank, " of ",
                 entry.spec.world, ", but its mesh has rank ", group.rank(), " of ", group.size());
  TESSERA_EXPECT(entry.values.device().is_beside(group.device()), "for_each_full: '", name,
                 "' lies on another device than its mesh, as copies on the host do; give a view, "
                 "or copies with StateMemory::device");
  return group;
}

// A gatherer for each group of a dict, in order of first mention.
std::vector<std::unique_ptr<Gatherer>> gatherers_of(const StateDict& state) {
  struct Needs {
    const RankGroup* group;
    std::int64_t bytes = 0;
    std::uint64_t steps = 0;
  };
  std::vector<Needs> needs;
  for (const auto& [name, entry] : state) {
    if (entry.spec.world == 1) continue;
    const RankGroup& group = group_of(name, entry);
    auto found = std::ranges::find(needs, &group, &Needs::group);
    if (found == needs.end()) found = needs.insert(found, {&group});
    found->bytes = std::max(found->bytes, gathered_bytes(entry.spec, entry.values.dtype()));
    found->steps += entry.steps;
  }
  std::vector<std::unique_ptr<Gatherer>> made;
  for (const auto& [group, bytes, steps] : needs) {
    expect_same_steps("state_dict", *group, steps);  // by name, before what has none
    made.push_back(std::make_unique<Gatherer>(*group, bytes, "for_each_full"));
  }
  return made;
}

// Whether this rank is the first of the mesh of what is sharded, or of its world.
bool is_rank_0(const StateDict& state) {
  for (const auto& [name, entry] : state)
    if (entry.mesh) return entry.mesh->world().rank() == entry.mesh->ranks()[0];
  return state.empty() || state.begin()->second.values.device().rank() == 0;
}

Tensor copy_of(const Tensor& values, const Device& device) {
  const OwnerGuard owner(device, "state dicts");
  if (device.is_beside(values.device())) {
    const Tensor copy = Tensor::empty(values.shape(), values.dtype(), device);
    raw::copy_into(copy, values);
    return copy;
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(values.numel()) *
                               size_bytes(values.dtype()));
  values.device().runs_bodies() ? values.to_bytes(bytes) : values.plan_to_bytes();
  return Tensor::from_bytes(bytes, values.shape(), values.dtype(), device);
}

}  // namespace

void for_each_full(const StateDict& of,
                   const std::function<void(const std::string&, const Tensor&)>& f) {
  const auto gatherers = gatherers_of(of);
  for (const auto& [name, entry] : of) {
    Tensor whole = entry.values;
    if (entry.spec.world > 1) {
      const RankGroup& group = entry.mesh->shard_group();
      const auto own = std::ranges::find_if(
          gatherers, [&](const auto& gatherer) { return &gatherer->group() == &group; });
      whole = (*own)->gather("all_gather_state", whole, entry.spec);
    }
    if (!whole.is_contiguous()) whole = raw::contiguous(whole);
    const LentTensor lent(whole, kWholeLender);
    f(name, lent.tensor().read_only(std::make_shared<const std::string>(name)));
  }
  for (const auto& gatherer : gatherers) gatherer->group().device().synchronize();
}

StateDict make_state_dict(const StateDict& views, const StateDictOptions& options) {
  const bool is_full = options.form == StateForm::full;
  TESSERA_EXPECT(is_full || options.ranks == StateRanks::every_rank,
                 "state_dict: only whole tensors can be for rank 0 alone; use StateForm::full");
  TESSERA_EXPECT(options.form != StateForm::view || options.memory == StateMemory::device,
                 "state_dict: views lie where the model is; use StateForm::sharded for the host");
  if (options.form == StateForm::view) return views;
  const Device host = Device::cpu({.executor = ExecutorKind::inlined});
  StateDict state;
  // Whoever has a dict on the host may read it from several threads.
  const auto on_host = [&] {
    if (options.memory == StateMemory::host) host.synchronize();
    return std::move(state);
  };
  const auto keep = [&](const std::string& name, const Tensor& values, const StateTensor& of) {
    // Where the model is: a whole tensor may have been gathered beside that.
    const Device& device =
        options.memory == StateMemory::host ? host : views.find(name)->second.values.device();
    const Tensor copy = copy_of(values, device);
    state.emplace(name,
                  is_full ? StateTensor(copy) : StateTensor(copy, of.spec, of.mesh, of.steps));
  };
  if (!is_full) {
    for (const auto& [name, view] : views) keep(name, view.values, view);
    return on_host();
  }
  const bool keeps = options.ranks == StateRanks::every_rank || is_rank_0(views);
  for_each_full(views, [&](const std::string& name, const Tensor& whole) {
    if (keeps) keep(name, whole, {});
  });
  return on_host();
}

// --- from rank 0 ---

namespace {

// Of names, shapes and dtypes, as a double holds it exactly.
double hash_of(const std::vector<StateTarget>& targets) {
  std::uint64_t hash = fnv1a(targets.size(), 0);
  for (const StateTarget& target : targets) {
    hash = fnv1a(target.names[0], hash);
    for (const std::int64_t size : target.spec.shape)
      hash = fnv1a(static_cast<std::uint64_t>(size), hash);
    hash = fnv1a(static_cast<std::uint64_t>(target.dtype), hash);
  }
  return static_cast<double>(hash >> 12);
}

// What rank 0 finds before anything is sent, and all others hear of: why it refuses, or a sign for
// each target that it has or has not, and then the unexpected names, a line each.
struct Found {
  std::shared_ptr<const StateSource> source;
  std::vector<std::vector<std::string>> names;  // of each target in the source; none: it has none
  std::exception_ptr refusal;
  std::string text;
};

Found find(const std::vector<StateTarget>& targets,
           const std::function<std::shared_ptr<const StateSource>()>& source,
           const StateHolder& holder, const LoadOptions& options) {
  Found found;
  try {
    found.source = encoded(renamed(source(), options), targets, holder);
    const StateMatching matching(targets, *found.source, holder, options, true);
    found.names.resize(targets.size());
    for (const auto& [target, names] : matching.matches)
      found.names[static_cast<std::size_t>(target - targets.data())] = names;
    for (const auto& names : found.names) found.text += names.empty() ? '-' : '+';
    for (const std::string& name : matching.report.unexpected) found.text += name + '\n';
  } catch (const std::exception& error) {
    found.refusal = std::current_exception();
    found.text = error.what();
  }
  return found;
}

std::string broadcast_text(Gatherer& to, const std::string& text, std::int64_t bytes) {
  if (bytes == 0 || to.group().size() == 1) return text;
  std::vector<std::int32_t> words(static_cast<std::size_t>(ceil_div(bytes, 4)));
  std::memcpy(words.data(), text.data(), text.size());
  const Shape shape{static_cast<std::int64_t>(words.size())};
  const Tensor own = Tensor::from(words, shape, to.group().device());
  words = to.broadcast("broadcast_load", own, shape, i32).to_vector<std::int32_t>(0);
  return {reinterpret_cast<const char*>(words.data()), static_cast<std::size_t>(bytes)};
}

LoadReport load_from_rank_0(const std::vector<StateTarget>& targets,
                            const std::function<std::shared_ptr<const StateSource>()>& source,
                            const StateHolder& holder, const LoadOptions& options) {
  const RankGroup& group = *options.from_rank_0;
  for (const StateTarget& target : targets)  // before anything is sent
    TESSERA_EXPECT(holder.materialize || target.held().device().is_beside(group.device()),
                   "load: '", target.names[0], "' lies on another device than group '",
                   group.name(), "', which rank 0 sends over");
  Found found;
  if (group.rank() == 0) found = find(targets, source, holder, options);
  const double hash = hash_of(targets);
  double agreed[] = {found.refusal ? 1. : 0., static_cast<double>(found.text.size()), hash, -hash};
  group.max(agreed);
  TESSERA_EXPECT(agreed[2] == -agreed[3], "load: the ", holder.what,
                 "s of the ranks differ in names, shapes or dtypes; build the same on every rank");
  const auto text_bytes = static_cast<std::int64_t>(agreed[1]);
  std::int64_t largest = text_bytes + 4;
  for (const StateTarget& target : targets)
    largest = std::max(largest, gathered_bytes({target.spec.shape, 1, 0}, target.dtype));
  Gatherer sender(group, largest, "load from rank 0");
  const std::string text = broadcast_text(sender, found.text, text_bytes);
  if (found.refusal) std::rethrow_exception(found.refusal);
  TESSERA_EXPECT(agreed[0] == 0, "rank 0 refuses: ", text);
  if (holder.materialize) holder.materialize(group.device());

  LoadReport report;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const StateTarget& target = targets[i];
    if (!text.empty() && text[i] == '-') {  // empty where no rank 0 runs
      report.missing.push_back(target.names[0]);
      continue;
    }
    const ShardSpec whole{target.spec.shape, 1, 0};
    const Tensor own =
        found.source ? found.source->rows(found.names[i], whole,
                                          found.source->is_file() && target.is_transposed_in_files,
                                          target.dtype, group.device())
                     : Tensor();
    const Tensor sent = sender.broadcast("broadcast_load", own, whole.shape, target.dtype);
    target.change([&](const Tensor& rows) { raw::copy_into(rows, rows_of(sent, target.spec)); });
  }
  for (std::size_t at = targets.size(); at < text.size();) {
    const std::size_t end = text.find('\n', at);
    report.unexpected.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return report;
}

}  // namespace

LoadReport load_state(const std::vector<StateTarget>& targets,
                      const std::function<std::shared_ptr<const StateSource>()>& source,
                      const StateHolder& holder, const LoadOptions& options) {
  if (options.from_rank_0) return load_from_rank_0(targets, source, holder, options);
  return load_own_state(targets, *encoded(renamed(source(), options), targets, holder), holder,
                        options);
}

}  // namespace tessera
