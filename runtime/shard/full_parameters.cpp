// Full parameters one by one, for files and for comparisons.
#include <algorithm>

#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/lent.hpp"
#include "tessera/base/checked.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

const std::string kLender = "for_each_full_parameter";

}  // namespace

void for_each_full_parameter(
    nn::Module& module, const RankGroup& group,
    const std::function<void(const std::string& name, const Tensor& full)>& f) {
  const auto parameters = module.named_parameters();
  std::int64_t largest = 0;
  for (const auto& [name, p] : parameters)
    largest = std::max(largest, checked_mul(p.spec().padded_numel(), 4));
  const std::shared_ptr<SymmetricMemory> memory =
      group.size() > 1 ? group.allocate_symmetric(std::max<std::int64_t>(largest, 4)) : nullptr;
  const Device& device = group.device();
  // Queued gathers outlive an exception of f.
  struct Keep {
    const std::shared_ptr<SymmetricMemory>& memory;
    DeviceContext& context;
    ~Keep() {
      if (memory) context.keep(memory);
    }
  } keep{memory, device.context()};
  LastUse use;
  for (const auto& [name, p] : parameters) {
    const ParameterState& state = *state_of(p);
    TESSERA_EXPECT(state.group != nullptr, "parameter '", name,
                   "' has no memory yet; call materialize on the model first");
    TESSERA_EXPECT(state.spec.world == 1 || state.spec.world == group.size(), "parameter '", name,
                   "' is sharded over ", state.spec.world, " ranks, but group '", group.name(),
                   "' has ", group.size(), "; give the group of its mesh");
    const FlatEntry& entry = state.group->entries[static_cast<std::size_t>(state.entry)];
    const Tensor& values = state.group->values;
    if (state.spec.world == 1) {
      const Tensor whole = values.view(state.shape, state.shape.strides(), entry.offset);
      f(name, read_only(Lent(whole, kLender).tensor(), state_of(p)));
      continue;
    }
    const auto storage = Storage::borrowed(device, memory->data(), memory->bytes(), use);
    const Tensor all = Tensor::wrap(storage, {state.spec.padded_numel()}, f32);
    if (entry.chunk > 0) {
      const Tensor own = all.view({entry.chunk}, {1}, state.spec.rank * entry.chunk);
      raw::copy_into(own, values.view({entry.chunk}, {1}, entry.offset));
      const Access accesses[] = {all.access(AccessMode::write)};
      group.control().submit(Collective{.send = own.data(),
                                        .recv = all.data(),
                                        .count = entry.chunk,
                                        .kind = CollectiveKind::all_gather,
                                        .dtype = f32},
                             "all_gather_parameter", accesses);
    }
    const Tensor whole = all.view(state.shape, state.shape.strides(), 0);
    f(name, read_only(Lent(whole, kLender).tensor(), state_of(p)));
  }
  device.synchronize();
}

}  // namespace tessera
