#include "runtime/distributed/gatherer.hpp"

#include <algorithm>
#include <utility>

#include "runtime/comm/least_and_most.hpp"
#include "runtime/param/parameter_state.hpp"
#include "tessera/detail/base/checked.hpp"
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
      comm::least_and_most({&group}, static_cast<double>(steps),
                           group.device().context().intern(concat("compare steps for ", function)));
  TESSERA_EXPECT(least == most, function,
                 ": optimizers have made different numbers of steps, over all parameters ", steps,
                 " here, ", least, " on one rank and ", most,
                 " on another; every rank must make the same calls of step, set_steps and load");
}

double number_of_bits(const Tensor& tensor) {
  std::string bits(static_cast<std::size_t>(tensor.numel()) * size_bytes(tensor.dtype()), '\0');
  if (tensor.device().runs_bodies()) tensor.to_bytes(std::as_writable_bytes(std::span(bits)));
  return comm::number_of(bits);
}

std::optional<std::size_t> first_unlike(
    std::initializer_list<const RankGroup*> groups,
    const std::vector<std::pair<std::string, Tensor>>& tensors) {
  const auto counts = [](const RankGroup* group) { return group && group->size() > 1; };
  if (std::ranges::none_of(groups, counts)) return {};
  const char* const what = "compare parameters that lie in no unit";
  std::string which;
  for (const auto& [name, tensor] : tensors)
    which += concat(name, ' ', tensor.shape(), ' ', tensor.dtype(), '\n');
  const auto [least, most] = comm::least_and_most(groups, comm::number_of(which), what);
  if (tensors.empty() || least != most) return {};
  const auto are_alike = [&](double number) {
    const auto ends = comm::least_and_most(groups, number, what);
    return ends.first == ends.second;
  };
  std::vector<double> numbers;
  std::uint64_t all = fnv1a("");
  for (const auto& [name, tensor] : tensors) {
    numbers.push_back(number_of_bits(tensor));
    all = fnv1a(static_cast<std::uint64_t>(numbers.back()), all);
  }
  if (are_alike(static_cast<double>(all >> 11))) return {};
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (!are_alike(numbers[i])) return i;
  return {};
}

void expect_same_values(std::string_view function, std::initializer_list<const RankGroup*> groups,
                        const std::vector<std::pair<std::string, Tensor>>& tensors) {
  const auto unlike = first_unlike(groups, tensors);
  TESSERA_EXPECT(!unlike, function, ": parameter '", tensors[*unlike].first,
                 "' lies in no unit and has other values on other ranks, but only rank 0's would "
                 "be kept; make the values alike, or leave the parameter out of the module");
}

Gatherer::Gatherer(const RankGroup& group, std::int64_t bytes, std::string_view purpose)
    : group_(&group) {
  if (group.size() > 1)
    memory_ = group.allocate_symmetric(std::max<std::int64_t>(bytes, 8), purpose);
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
