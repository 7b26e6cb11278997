// What an optimizer keeps, by the names of parameters.
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "runtime/distributed/gatherer.hpp"
#include "runtime/param/flat_group.hpp"
#include "runtime/param/update_log.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/device/captured_work.hpp"
#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/distributed/state.hpp"
#include "tessera/optim/optimizer.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::optim {
namespace {

const std::string kSteps = "steps", kLr = "lr", kLrFactor = ".lr_factor",
                  kWeightDecay = ".weight_decay";
const StateHolder kHolder{.what = "optimizer", .article = "an"};

}  // namespace

// The optimizer's parameters under the names that a model gives them.
std::vector<std::pair<std::string, const Optimizer::Own*>> Optimizer::named(
    const char* function, const NamedParameters& names) const {
  std::vector<std::pair<std::string, const Own*>> found;
  for (const auto& [name, parameter] : names)
    if (const auto own = own_of_.find(parameter.id()); own != own_of_.end())
      found.emplace_back(name, &own_[own->second]);
  if (found.size() == own_.size()) return found;
  for (const Own& own : own_)
    TESSERA_EXPECT(
        std::ranges::find(found, &own, [](const auto& f) { return f.second; }) != found.end(),
        "Optimizer::", function, ": parameter '", own.parameter.name(),
        "' of the optimizer is not in the model; give the module that holds all its parameters");
  return found;
}

std::vector<DistributedTensor> Optimizer::distributed_moments(const Parameter& of) const {
  std::vector<DistributedTensor> handles;
  for (const Tensor& rows : moments(of)) {
    TESSERA_EXPECT(of.mesh() != nullptr, "distributed_moments: parameter '", of.name(),
                   "' belongs to no unit and is whole; use moments");
    handles.emplace_back(rows, of.shape(), *of.mesh(), of.distributed().placements());
  }
  return handles;
}

StateDict Optimizer::state_dict(const NamedParameters& names, const StateDictOptions& options) {
  follow(Frozen::stays);
  StateDict views;
  const auto keep = [&](const std::string& name, auto value) {
    views.emplace(name, Tensor::from(std::vector{value}, {}, scalars_.device()));
  };
  keep(kSteps, steps());
  keep(kLr, lr_);
  for (const auto& [name, own] : named("state_dict", names)) {
    keep(name + kLrFactor, own->lr_factor);
    keep(name + kWeightDecay, own->weight_decay);
    const std::vector<Tensor> rows = moments(own->parameter);
    for (std::size_t k = 0; k < rows.size(); ++k)
      views.emplace(
          concat(name, '.', kinds_[own->kind].needs.names[k]),
          StateTensor(rows[k], own->spec, own->parameter.mesh(), updates_of(own->parameter)));
    if (!own->parameter.trainable()) continue;
    for (const Own::Kept& kept : own->kept)
      views.emplace(concat(name, '.', kept.name),
                    kept.spec.world == 1
                        ? StateTensor(kept.values)
                        : StateTensor(kept.values, kept.spec, own->parameter.mesh(),
                                      updates_of(own->parameter)));
  }
  return make_state_dict(views, options);
}

LoadReport Optimizer::load(const NamedParameters& names, const StateDict& state,
                           const LoadOptions& options) {
  return load_from(names, [&] { return std::make_shared<DictSource>(state); }, options, {});
}

LoadReport Optimizer::load(const NamedParameters& names, const StateSource& source,
                           const LoadOptions& options,
                           const std::function<bool(std::string_view)>& is_transposed) {
  const std::shared_ptr<const StateSource> here(std::shared_ptr<void>(), &source);  // not owned
  return load_from(names, [&] { return here; }, options, is_transposed);
}

LoadReport Optimizer::load_from(const NamedParameters& names,
                                const std::function<std::shared_ptr<const StateSource>()>& source,
                                const LoadOptions& options,
                                const std::function<bool(std::string_view)>& is_transposed) {
  prepare();
  // Numbers come first and are checked; they are set when nothing can refuse any more.
  std::vector<std::function<void()>> set;
  std::vector<StateTarget> targets;
  const auto number = [&](const std::vector<std::string>& names, DType dtype, double now,
                          const auto& check, const auto& put) {
    const std::string& name = names[0];
    targets.push_back(number_target(names, dtype, scalars_, [=, &set](const Tensor& value) {
      const double number = value.item(now);
      check(concat("load: '", name, '\'').c_str(), number);
      set.push_back([=] { put(number); });
    }));
  };
  const auto check_steps = [](const char* what, double steps) {
    constexpr double kMost = 0x1p53;  // beyond, a double counts in steps of two
    expect_steps(what, static_cast<std::int64_t>(std::clamp(steps, -1., 2 * kMost)));
  };
  number({kSteps}, i64, static_cast<double>(steps()), check_steps,
         [this](double steps) { set_steps(static_cast<std::int64_t>(steps)); });
  number({kLr}, f64, lr_, expect_rate, [this](double lr) { lr_ = lr; });
  const auto own = named("load", names);
  for (const auto& [name, one] : own) {
    Own& of = own_[static_cast<std::size_t>(one - own_.data())];
    // Files hold row parts apart, and then those of one parameter are the same.
    const auto names_of = [&](const std::string& suffix) {
      std::vector<std::string> names{name + suffix};
      for (const auto& [part, rows] : named_row_parts(name, one->parameter))
        if (part != name) names.push_back(part + suffix);
      return names;
    };
    number(names_of(kLrFactor), f64, of.lr_factor, expect_rate,
           [&of](double factor) { of.lr_factor = factor; });
    number(names_of(kWeightDecay), f64, of.weight_decay, expect_rate,
           [&of](double decay) { of.weight_decay = decay; });
  }
  for (const auto& [name, one] : own) {
    const auto take = [&](const std::string& suffix, std::string_view kind, const ShardSpec& spec,
                          const Tensor& rows) {
      const Parameter& of = one->parameter;
      StateTarget& target = targets.emplace_back();
      target.names = {name + suffix};
      target.kind = kind;
      target.spec = spec;
      target.is_transposed_in_files =
          spec.shape == of.shape() && is_transposed && is_transposed(name);
      if (has_rows_of(spec.shape, of) && !of.row_parts().empty())
        for (const auto& [part, count] : named_row_parts(name, of))
          target.parts_in_files.push_back({part + suffix, count});
      target.held = [rows] { return rows; };
      target.change = [rows](const FillRows& f) { f(rows); };
    };
    const std::vector<Tensor> moments = this->moments(one->parameter);
    for (std::size_t k = 0; k < moments.size(); ++k)
      take(concat('.', kinds_[one->kind].needs.names[k]), "moment", one->spec, moments[k]);
    if (!one->parameter.trainable()) continue;
    for (const Own::Kept& kept : one->kept)
      take(concat('.', kept.name), "state", kept.spec, kept.values);
  }
  const LoadReport report = load_state(targets, source, kHolder, options);
  for (const auto& put : set) put();
  rates_changed_ = true;
  ++decisions().count;
  return report;
}

}  // namespace tessera::optim
