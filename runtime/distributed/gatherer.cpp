#include "runtime/distributed/gatherer.hpp"

#include <algorithm>
#include <utility>

#include "runtime/comm/ends_of.hpp"
#include "runtime/param/parameter_state.hpp"
#include "tessera/base/checked.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

std::int64_t gathered_bytes(const ShardSpec& spec, DType dtype) {
  return checked_mul(spec.padded_numel(), static_cast<std::int64_t>(size_bytes(dtype)));
}

std::uint64_t updates_of(const Parameter& parameter) {
  const ParameterState& state = *state_of(parameter);
  TESSERA_EXPECT(state.group != nullptr, state.without_memory());
  return state.group->steps();
}

void expect_same_steps(std::string_view function, const RankGroup& group, std::uint64_t steps) {
  const auto [least, most] =
      comm::ends_of({&group}, static_cast<double>(steps), "compare steps of optimizers");
  TESSERA_EXPECT(least == most, function, ": here optimizers have updated parameters ", steps,
                 " times in all, on one rank ", least, ", on another ", most,
                 "; every rank makes the same steps");
}

Gatherer::Gatherer(const RankGroup& group, std::int64_t bytes) : group_(&group) {
  if (group.size() > 1) memory_ = group.allocate_symmetric(std::max<std::int64_t>(bytes, 8));
}

Gatherer::~Gatherer() {
  if (!memory_) return;
  DeviceContext& context = group_->device().context();
  context.keep(memory_);
  context.keep(use_);
}

Tensor Gatherer::all(const Shape& shape, DType dtype) {
  const auto storage =
      Storage::borrowed(group_->device(), memory_->data(), memory_->bytes(), *use_);
  return Tensor::wrap(storage, shape, dtype);
}

void Gatherer::submit(const Collective& collective, const char* name,
                      std::span<const Access> accesses) {
  const Device& device = group_->device();
  const Stream control = device.stream(group_->control().stream());
  control.wait(device.compute().record());
  group_->control().submit(collective, name, accesses);
  device.compute().wait(control.record());
}

Tensor Gatherer::gather(const char* name, const Tensor& rows, const ShardSpec& spec) {
  if (!memory_) return rows;
  const std::int64_t chunk = spec.chunk_numel();
  const Tensor padded = all({spec.padded_numel()}, rows.dtype());
  const Tensor own = padded.view({chunk}, {1}, spec.chunk_begin());
  if (rows.numel() > 0) raw::copy_into(own.view(rows.shape(), spec.strides(rows.shape()), 0), rows);
  const Access access = padded.access(AccessMode::write);
  for (int r = 0; spec.is_ragged() && r < spec.world; ++r) {
    const RowRange of = spec.owned(r);
    if (of.size() == 0) continue;
    std::byte* const at = padded.data() + of.begin * spec.row_numel() *
                                              static_cast<std::int64_t>(size_bytes(rows.dtype()));
    submit({.send = at,
            .recv = at,
            .count = of.size() * spec.row_numel(),
            .kind = CollectiveKind::broadcast,
            .dtype = rows.dtype(),
            .root = r},
           name, {&access, 1});
  }
  if (!spec.is_ragged() && chunk > 0)
    submit({.send = own.data(),
            .recv = padded.data(),
            .count = chunk,
            .kind = CollectiveKind::all_gather,
            .dtype = rows.dtype()},
           name, {&access, 1});
  return padded.view(spec.shape, spec.strides(spec.shape), 0);
}

Tensor Gatherer::broadcast(const char* name, const Tensor& whole, const Shape& shape, DType dtype) {
  if (!memory_) return whole;
  const Tensor to = all(shape, dtype);
  if (shape.numel() == 0) return to;
  if (group_->rank() == 0) raw::copy_into(to, whole);
  const Access access = to.access(AccessMode::write);
  submit({.send = to.data(),
          .recv = to.data(),
          .count = shape.numel(),
          .kind = CollectiveKind::broadcast,
          .dtype = dtype},
         name, {&access, 1});
  return to;
}

Tensor Gatherer::all_reduce(const char* name, const Tensor& term, ReduceOp reduce) {
  if (!memory_) return term;
  const Tensor own = all(term.shape(), term.dtype()),
               out = Tensor::empty(term.shape(), term.dtype(), group_->device());
  raw::copy_into(own, term);
  const Access accesses[] = {own.access(AccessMode::read), out.access(AccessMode::write)};
  submit({.send = own.data(),
          .recv = out.data(),
          .count = term.numel(),
          .kind = CollectiveKind::all_reduce,
          .dtype = term.dtype(),
          .reduce = reduce},
         name, accesses);
  return out;
}

}  // namespace tessera
