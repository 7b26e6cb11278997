#include "runtime/shard/unit_shards.hpp"

#include <algorithm>
#include <exception>
#include <map>

#include "runtime/shard/encoded_parameters.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/base/log.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::shard {

namespace {

UnitLayout layout_of(const UnitShards& shards) {
  std::vector<ShardSpec> specs;
  std::vector<bool> is_trainable;
  std::vector<std::int64_t> gathered_bytes;
  SmallChunks small{.gathered = {}, .reduced = {}, .dtype = shards.param_dtype()};
  for (const auto& p : shards.parameters()) {
    specs.push_back(p->spec);
    is_trainable.push_back(p->trainable);
    gathered_bytes.push_back(checked_add(UnitLayout::bytes_of(p->spec, p->compute_dtype),
                                         p->transform ? encoded_bytes(*p) : std::int64_t{0}));
    small.reduced.push_back(shards.is_small(*p));
    small.gathered.push_back(small.reduced.back() && !p->transform &&
                             p->compute_dtype == small.dtype);
  }
  return UnitLayout::make(specs, is_trainable, gathered_bytes, shards.reduce_dtype(),
                          shards.options().piece_bytes, small);
}

}  // namespace

UnitShards::UnitShards(std::vector<std::shared_ptr<ParameterState>> claimed,
                       const ShardOptions& options)
    : options_(options) {
  reductions_.divide_factor = ranks();
  const auto mesh = std::make_shared<const DeviceMesh>(options_.mesh);
  name_ = concat("(with ", claimed.empty() ? "no parameters" : claimed[0]->name, ')');
  std::int64_t dealt = 0;  // blocks of ragged ones
  for (auto& p : claimed) {
    p->unit = &name_;
    p->mesh = mesh;
    p->spec = {.shape = p->shape,
               .world = mesh->shard_size(),
               .rank = mesh->shard_rank(),
               .block_rows = p->block_rows,
               .dim = p->spec.dim};
    p->spec.extra_from = static_cast<int>(dealt % p->spec.world);
    if (p->spec.is_ragged()) dealt += p->spec.blocks();
    p->compute_dtype = gathered_as(*p);
    p->is_streamed = p->may_be_streamed();
    (p->is_streamed ? streamed_ : parameters_).push_back(std::move(p));
  }
  // What is no piece of its own comes last in backward, whenever its gradients come: they fill one
  // together. The very last is what travels packed.
  std::ranges::stable_sort(parameters_, {}, [&](const auto& p) {
    return is_small(*p) ? 0 : fills_piece(*p) ? 2 : 1;
  });
  layout_ = layout_of(*this);
}

UnitShards::UnitShards(const UnitShards& unit, std::shared_ptr<ParameterState> slice)
    : options_(unit.options_),
      reductions_(unit.reductions_),
      parameters_{std::move(slice)},
      is_slice_(true),
      device_(unit.device_),
      groups_{parameters_[0]->group},
      group_(groups_[0]) {
  if (!options_.slices_wait) reductions_.reduces = reductions_.all_reduces = true;
  parameters_[0]->unit = &name_;
  lay_out();
}

void UnitShards::materialize(const Device& on) {
  TESSERA_EXPECT(!is_materialized(), "materialize: unit '", name_,
                 "' already has memory on another device; give the device that it has");
  TESSERA_EXPECT(on == options_.mesh.world().device(), "materialize: unit '", name_,
                 "' is sharded over a mesh whose world has another device; give world.device()");
  device_ = on;
  std::vector<std::shared_ptr<ParameterState>> states = parameters_;
  states.insert(states.end(), streamed_.begin(), streamed_.end());
  if (states.empty()) return;
  std::map<DType, std::vector<std::shared_ptr<ParameterState>>> by_dtype;  // f32 comes first
  for (const auto& p : states) {
    p->compute_dtype = gathered_as(*p);  // its own may have been set since
    by_dtype[p->dtype].push_back(p);
  }
  for (const auto& [dtype, of] : by_dtype)
    groups_.push_back(FlatGroup::make(name_, of, is_offloaded() ? device_.host() : device_));
  group_ = groups_[0];
  const auto control_of = [&](const RankGroup& ranks) {
    return std::shared_ptr<Communicator>(options_.mesh.world().share(), &ranks.control());
  };
  for (const auto& of : groups_) {
    if (size_ > 1) of->sums = control_of(options_.mesh.shard_group());
    if (const RankGroup* const same = options_.mesh.replicate_group())
      of->replicas = control_of(*same);
  }
  for (const auto& p : streamed_) {  // not as it was in a module that had memory before
    p->window = Storage::window(device_, p->shape.numel() * 4, name_);
    p->sinks = nullptr;
  }
  lay_out();
}

void UnitShards::lay_out() {
  if (!group_->is_laid_out) group_->lay_out_gradient();
  layout_ = layout_of(*this);
  is_encoded_ = std::ranges::any_of(parameters_, [](const auto& p) { return !!p->transform; });
  const bool is_cast =
      std::ranges::any_of(parameters_, [](const auto& p) { return p->compute_dtype != p->dtype; });
  needs_slot_ = size_ > 1 || param_dtype() != f32 || is_cast || is_offloaded() || is_encoded_;
  parameter_of_.clear();
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (entry_of(i).trainable >= 0) parameter_of_.push_back(i);  // entries lie in this order
  first_trainable_ = parameter_of_.empty() ? 0 : entry_of(parameter_of_[0]).trainable;
}

bool UnitShards::fills_piece(const ParameterState& p) const {
  return p.spec.padded_numel() >=
         options_.piece_bytes / static_cast<std::int64_t>(size_bytes(reduce_dtype()));
}

bool UnitShards::is_small(const ParameterState& p) const {
  return size_ > 1 && !is_slice_ && !p.spec.is_ragged() && !fills_piece(p) &&
         p.spec.chunk_numel() > 0 && p.spec.chunk_numel() <= options_.packed_bytes / 4;
}

UnitShards::ValueRange UnitShards::values(const FlatGroup& of) const {
  ValueRange range{};
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i]->group.get() != &of) continue;
    if (range.numel() == 0) range.begin = offset_of(i);
    range.end = offset_of(i) + parameters_[i]->spec.chunk_numel();
  }
  return range;
}

void UnitShards::join_root(int root, std::string name, int number) {
  root_ = root;
  name_ = std::move(name);
  number_ = number;
  name_collectives();
}

void UnitShards::set_decisions(std::string decisions) {
  if (decisions == decisions_) return;
  decisions_ = std::move(decisions);
  name_collectives();
}

void UnitShards::name_collectives() {
  DeviceContext& context = options_.mesh.world().device().context();
  const std::string called = root_ > 1 ? concat("of root ", root_, ": ", name_) : name_;
  gather_name_ = context.intern("all_gather " + called + decisions_);
  const auto& [reduces, all_reduces, factor, hook, stream] = reductions_;
  const std::string hooked =
      hook ? " before a hook" + (stream ? concat(" on ", tessera::name(*stream)) : "") : "";
  reduce_name_ = context.intern("reduce_scatter " + called + hooked);
  all_reduce_name_ = context.intern("all_reduce " + called + hooked + decisions_);
  for (const auto& of : groups_) of->name = name_;
}

void UnitShards::give_back(const Slot& slot, bool ends_forward) const noexcept {
  try {
    slots_->give_back(slot, ends_forward);
  } catch (const std::exception& error) {
    log_kept_slot(error);
  }
}

Tensor kernel_table(const std::vector<std::int64_t>& rows, const Device& device) {
  const OwnerGuard owner(device, "tables");
  return Tensor::from(rows, {static_cast<std::int64_t>(rows.size()) / 3, 3}, device);
}

std::vector<ShardCopy> shard_copies(const UnitShards& shards, FlatGroup& group,
                                    const UnitShards::ValueRange& own, std::int64_t first) {
  const PackedLayout& packed = shards.layout().packed;
  std::vector<ShardCopy> copies;
  std::vector<std::vector<std::int64_t>> rows;  // of each
  for (std::size_t i = 0; i < shards.parameters().size(); ++i) {
    const ParameterState& p = *shards.parameters()[i];
    const std::int64_t chunk = p.spec.chunk_numel();
    if (chunk == 0 || p.group.get() != &group || p.transform) continue;
    if (const std::int64_t at = shards.offset_of(i); at < own.begin || at >= own.end) continue;
    const auto found = std::ranges::find(copies, p.compute_dtype, &ShardCopy::dtype);
    const auto k = static_cast<std::size_t>(found - copies.begin());
    if (found == copies.end()) {
      copies.push_back({&group, own, p.compute_dtype, {}, 0});
      rows.emplace_back();
    }
    copies[k].numel += chunk;
    const auto element = static_cast<std::int64_t>(size_bytes(p.compute_dtype));
    const auto at = packed.place_of(i);
    const std::int64_t to =
        at ? packed.offset_bytes + (p.spec.rank * packed.numel + *at) * element
           : shards.layout().gather_offset_bytes[i] + p.spec.chunk_begin() * element;
    rows[k].insert(rows[k].end(), {shards.offset_of(i) - first, to, chunk});
  }
  for (std::size_t k = 0; k < copies.size(); ++k)
    copies[k].table = kernel_table(rows[k], shards.device());
  return copies;
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

std::int64_t UnitShards::slice_numel() const {
  std::int64_t largest = 0;
  for (const PieceLayout& piece : layout_.pieces)
    largest = std::max(largest, piece.bytes - piece.packed.bytes);
  return largest / static_cast<std::int64_t>(size_bytes(reduce_dtype()));
}

void UnitShards::expect_gradients() const {
  if (!group_ || group_->is_laid_out) return;
  for (const auto& part : {parameters_, streamed_})
    for (const auto& p : part)
      TESSERA_EXPECT(!p->trainable || p->has_gradient(), "unit '", name_, "': parameter '", p->name,
                     "' was thawed since the root's last call, so it has no room for a gradient "
                     "yet; call the root before the unit");
}

Progress UnitShards::at_gather() const {
  std::uint64_t steps = 0, of_each = 0;
  for (const auto& of : groups_) {
    steps += of->steps();
    of_each += of->steps_of_each();
  }
  return {.backward_of = static_cast<std::uint32_t>(autograd::forward_of_step()),
          .steps = static_cast<std::uint32_t>(steps),
          .steps_of_each = static_cast<std::uint32_t>(of_each)};
}

Progress UnitShards::at_reduction() const {
  Progress progress = at_gather();
  progress.divided_by = static_cast<float>(reductions_.divide_factor);
  progress.steps += static_cast<std::uint32_t>(slots_->steps());
  return progress;
}

void UnitShards::log_kept_slot(const std::exception& error) const noexcept {
  if (std::uncaught_exceptions() > 0) return;  // that one will be heard of
  log(LogLevel::error, concat("unit '", name_, "': could not give its slot back: ", error.what()));
}

}  // namespace tessera::shard
