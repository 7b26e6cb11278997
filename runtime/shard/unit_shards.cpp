#include "runtime/shard/unit_shards.hpp"

#include <algorithm>
#include <exception>
#include <map>

#include "runtime/shard/encoded_parameters.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {

namespace {

UnitLayout layout_of(const UnitShards& shards) {
  std::vector<ShardSpec> specs;
  std::vector<bool> is_trainable;
  std::vector<std::int64_t> gathered_bytes;
  SmallChunks small{.gathered = {}, .reduced = {}, .dtype = shards.param_dtype()};
  for (const auto& p : shards.parameters) {
    specs.push_back(p->spec);
    is_trainable.push_back(p->trainable);
    gathered_bytes.push_back(
        checked_add(UnitLayout::bytes_of(p->spec, p->compute_dtype), encoded_bytes(*p)));
    small.reduced.push_back(shards.is_small(*p));
    small.gathered.push_back(small.reduced.back() && !p->transform &&
                             p->compute_dtype == small.dtype);
  }
  return UnitLayout::make(specs, is_trainable, gathered_bytes, shards.reduce_dtype(),
                          shards.options.piece_bytes, small);
}

}  // namespace

UnitShards::UnitShards(std::vector<std::shared_ptr<ParameterState>> claimed,
                       const ShardOptions& options)
    : options(options), divide_factor(ranks()) {
  const auto mesh = std::make_shared<const DeviceMesh>(options.mesh);
  name = concat("(with ", claimed.empty() ? "no parameters" : claimed[0]->name, ')');
  std::int64_t dealt = 0;  // blocks of ragged ones
  for (auto& p : claimed) {
    p->unit = &name;
    p->mesh = mesh;
    p->spec = {.shape = p->shape,
               .world = mesh->shard_size(),
               .rank = mesh->shard_rank(),
               .block_rows = p->block_rows,
               .dim = p->spec.dim};
    p->spec.extra_from = static_cast<int>(dealt % p->spec.world);
    if (p->spec.is_ragged()) dealt += p->spec.blocks();
    p->compute_dtype = gathered_as(p->dtype);
    p->is_streamed = p->may_be_streamed();
    (p->is_streamed ? streamed : parameters).push_back(std::move(p));
  }
  // What is no piece of its own comes last in backward, whenever its gradients come: they fill one
  // together. The very last is what travels packed.
  std::ranges::stable_sort(parameters, {}, [&](const auto& p) {
    return is_small(*p) ? 0 : fills_piece(*p) ? 2 : 1;
  });
  layout = layout_of(*this);
}

void UnitShards::materialize(const Device& on) {
  TESSERA_EXPECT(!is_materialized(), "materialize: unit '", name, "' already has memory");
  TESSERA_EXPECT(on == options.mesh.world().device(), "materialize: unit '", name,
                 "' is sharded over a mesh whose world has another device; give world.device()");
  device = on;
  std::vector<std::shared_ptr<ParameterState>> states = parameters;
  states.insert(states.end(), streamed.begin(), streamed.end());
  if (states.empty()) return;
  std::map<DType, std::vector<std::shared_ptr<ParameterState>>> by_dtype;  // f32 comes first
  for (const auto& p : states) {
    p->compute_dtype = gathered_as(p->dtype);  // it may have been set since
    by_dtype[p->dtype].push_back(p);
  }
  for (const auto& [dtype, of] : by_dtype)
    groups.push_back(FlatGroup::make(name, of, is_offloaded() ? device.host() : device));
  group = groups[0];
  const auto control_of = [&](const RankGroup& ranks) {
    return std::shared_ptr<Communicator>(options.mesh.world().share(), &ranks.control());
  };
  for (const auto& of : groups) {
    if (size > 1) of->sums = control_of(options.mesh.shard_group());
    if (const RankGroup* const same = options.mesh.replicate_group())
      of->replicas = control_of(*same);
  }
  for (const auto& p : streamed) {  // not as it was in a module that had memory before
    p->window = Storage::window(device, p->shape.numel() * 4, name);
    p->sinks = nullptr;
  }
  lay_out();
}

void UnitShards::lay_out() {
  if (!group->is_laid_out) group->lay_out_gradient();
  layout = layout_of(*this);
  is_encoded = std::ranges::any_of(parameters, [](const auto& p) { return !!p->transform; });
  parameter_of.clear();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (entry_of(i).trainable >= 0) parameter_of.push_back(i);  // entries lie in this order
  first_trainable = parameter_of.empty() ? 0 : entry_of(parameter_of[0]).trainable;
}

bool UnitShards::fills_piece(const ParameterState& p) const {
  return p.spec.padded_numel() >=
         options.piece_bytes / static_cast<std::int64_t>(size_bytes(reduce_dtype()));
}

bool UnitShards::is_small(const ParameterState& p) const {
  return size > 1 && !is_slice && !p.spec.is_ragged() && !fills_piece(p) &&
         p.spec.chunk_numel() > 0 && p.spec.chunk_numel() <= options.packed_bytes / 4;
}

UnitShards::ValueRange UnitShards::values(const FlatGroup& of) const {
  ValueRange range{};
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i]->group.get() != &of) continue;
    if (range.numel() == 0) range.begin = offset_of(i);
    range.end = offset_of(i) + parameters[i]->spec.chunk_numel();
  }
  return range;
}

void UnitShards::set_name(std::string to) {
  name = std::move(to);
  DeviceContext& context = options.mesh.world().device().context();
  const std::string called = root > 1 ? concat("of root ", root, ": ", name) : name;
  gather_name = context.intern("all_gather " + called + decisions);
  const std::string hooked =
      hook ? " before a hook" + (hook_stream ? concat(" on ", tessera::name(*hook_stream)) : "")
           : "";
  reduce_name = context.intern("reduce_scatter " + called + hooked);
  all_reduce_name = context.intern("all_reduce " + called + hooked + decisions);
  for (const auto& of : groups) of->name = name;
}

void UnitShards::give_back(const Slot& slot, bool ends_forward) const noexcept {
  try {
    slots->give_back(slot, ends_forward);
  } catch (const std::exception& error) {
    log_kept_slot(error);
  }
}

Tensor table_of(const std::vector<std::int64_t>& rows, const Device& device) {
  const OwnerGuard owner(device, "tables");
  return Tensor::from(rows, {static_cast<std::int64_t>(rows.size()) / 3, 3}, device);
}

void pack(const char* name, Stream stream, const Tensor& table, std::int64_t numel,
          const Tensor& values, const Slot& slot, DType dtype) {
  const Device& device = values.device();
  const kernels::PackArgs args{slot.data,
                               values.data(),
                               reinterpret_cast<const kernels::PackEntry*>(table.data()),
                               static_cast<std::int32_t>(table.size(0)),
                               dtype,
                               values.dtype()};
  const Access accesses[] = {values.access(AccessMode::read), table.access(AccessMode::read),
                             slot.access(AccessMode::write)};
  const auto bytes = static_cast<double>(numel) *
                     static_cast<double>(size_bytes(values.dtype()) + size_bytes(dtype));
  stream.launch({.name = name, .cost = {.bytes = bytes}, .accesses = accesses},
                kernels::Call<kernels::PackArgs>{detail::table(device).pack, args});
}

}  // namespace tessera::shard
