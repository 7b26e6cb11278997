// What the parts of a checkpoint are made of: a model's tensors, an optimizer's, a program's own.
// An optimizer's state may have other shapes than its parameter: it is transposed as the parameter
// where it has its shape, and in row parts where it has its rows.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/distributed/gatherer.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::checkpoint {
namespace {

PartTensor tensor_of(const nn::Module& model, const std::string& name, const Parameter& parameter,
                     StateTensor state, const World& world, std::string_view prefix,
                     std::string_view suffix) {
  PartTensor tensor{
      .is_transposed = state.spec.shape == parameter.shape() && model.saves_transposed(name),
      .state = std::move(state)};
  const Shape& shape = tensor.state.spec.shape;
  if (has_rows_of(shape, parameter))
    for (const auto& [part, rows] : named_row_parts(name, parameter))
      tensor.names.push_back({concat(prefix, part, suffix), rows});
  else
    tensor.names.push_back({concat(prefix, name, suffix), shape.ndim() > 0 ? shape[0] : 1});
  if (const auto mesh = parameter.mesh()) {
    tensor.copies = mesh->replicas();
    tensor.copy = mesh->replicate_group() ? mesh->replicate_group()->rank() : 0;
    if (tensor.state.spec.world == 1) {  // whole on all of them
      tensor.copies *= mesh->shard_size();
      tensor.copy = tensor.copy * mesh->shard_size() + mesh->shard_rank();
    }
  } else {
    tensor.copies = world.size();
    tensor.copy = world.rank();
  }
  return tensor;
}

void add_buffers(Part& part, const nn::Module& model, const World& world) {
  if (world.rank() != 0) return;
  for (const auto& [name, buffer] : model.named_buffers(nn::Persistent::yes)) {
    const Tensor value = buffer.value();
    part.tensors.push_back(
        {.names = {{name, value.shape().ndim() > 0 ? value.shape()[0] : 1}}, .state = value});
  }
}

Part made(const nn::Module& model, const World& world) {
  Part part{.name = "model"};
  for (const auto& [name, parameter] : model.named_parameters())
    part.tensors.push_back(
        tensor_of(model, name, parameter,
                  {parameter.shard(), parameter.spec(), parameter.mesh(), updates_of(parameter)},
                  world, "", ""));
  add_buffers(part, model, world);
  return part;
}

Part made(optim::Optimizer& optimizer, const nn::Module& model, const World& world) {
  Part part{.name = "optimizer", .prefix = "state."};
  const NamedParameters named = model.named_parameters();
  const StateDict state = optimizer.state_dict(named, {.form = StateForm::view});
  const auto steps = static_cast<float>(optimizer.steps());
  std::map<std::string_view, const NamedParameters::value_type*> by_name;
  for (const auto& one : named) by_name.emplace(one.first, &one);
  for (const auto& [name, entry] : state) {
    // The last dot stands before what the optimizer calls it; what is of all has none.
    const std::size_t dot = name.rfind('.');
    const auto found = dot == name.npos ? by_name.end() : by_name.find(name.substr(0, dot));
    const auto* const own = found == by_name.end() ? nullptr : found->second;
    const bool is_integer = entry.values.dtype() == i64;
    if (is_integer || entry.values.dtype() == f64) {
      const double value = entry.values.item(0.0);  // a plan has none
      const auto keep = [&](const std::string& under) {
        is_integer ? part.scalars.emplace(under, static_cast<std::int64_t>(value))
                   : part.scalars.emplace(under, value);
      };
      if (!own)
        keep(name);
      else
        for (const auto& [of, rows] : named_row_parts(own->first, own->second))
          keep(of + name.substr(own->first.size()));
    } else {
      part.tensors.push_back(tensor_of(model, own->first, own->second, entry, world, part.prefix,
                                       name.substr(own->first.size())));
    }
  }
  if (world.rank() != 0) return part;
  for (const Parameter& parameter : optimizer.parameters()) {
    const auto own = std::ranges::find(named, parameter, &NamedParameters::value_type::second);
    for (const auto& [name, rows] : named_row_parts(own->first, parameter))
      part.tensors.push_back(
          {.names = {{concat(part.prefix, name, ".step"), 1}},
           .state = StateTensor(Tensor::from(std::vector{steps}, {}, world.device()))});
  }
  return part;
}

std::uint64_t number_of_names(const Part& part) {
  std::uint64_t number = fnv1a("");
  for (const PartTensor& tensor : part.tensors) number = fnv1a(tensor.names[0].name, number);
  return number;
}

// `part`, which `make` makes, so that a save makes it again for the values of then.
template <class Make>
Part refreshed(const Make& make) {
  Part part = make();
  part.refresh = [make, names = number_of_names(part)](Part& old) {
    Part now = make();
    TESSERA_EXPECT(number_of_names(now) == names, "checkpoint::save: part '", old.name,
                   "' was made before other tensors came into it, as by freeze or thaw; call "
                   "checkpoint::part again");
    std::map<std::string_view, StateTensor*> states;
    for (PartTensor& tensor : now.tensors) states.emplace(tensor.names[0].name, &tensor.state);
    for (PartTensor& tensor : old.tensors)
      if (const auto found = states.find(tensor.names[0].name); found != states.end())
        tensor.state = *found->second;
    for (auto& [name, value] : old.scalars)
      if (const auto found = now.scalars.find(name); found != now.scalars.end())
        value = found->second;
  };
  return part;
}

}  // namespace

Part part(const nn::Module& model, const World& world) {
  return refreshed([&model, &world] { return made(model, world); });
}
Part part(optim::Optimizer& optimizer, const nn::Module& model, const World& world) {
  return refreshed([&optimizer, &model, &world] { return made(optimizer, model, world); });
}

Part part(std::string name, const StateDict& state, const World& world) {
  Part part{.name = std::move(name)};
  for (const auto& [of, entry] : state) {
    TESSERA_EXPECT(entry.mesh || entry.spec.world == 1, "checkpoint::part: '", of, "' of part '",
                   part.name, "' is rank ", entry.spec.rank, "'s rows of ", entry.spec.world,
                   ", without a mesh; give the StateTensor its mesh");
    PartTensor tensor{.names = {{of, entry.spec.shape.ndim() > 0 ? entry.spec.shape[0] : 1}},
                      .state = entry};
    if (entry.mesh) {
      tensor.copies = entry.mesh->replicas();
      tensor.copy = entry.mesh->replicate_group() ? entry.mesh->replicate_group()->rank() : 0;
    } else {
      tensor.copies = world.size();
      tensor.copy = world.rank();
    }
    part.tensors.push_back(std::move(tensor));
  }
  return part;
}

}  // namespace tessera::checkpoint
