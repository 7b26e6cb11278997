#include "tessera/optim/clip.hpp"

#include <algorithm>
#include <cmath>

#include "runtime/tensor/launch.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::optim {
namespace {

// The gradient without its tail of arrival counts. Padding and missing gradients are zeros.
Tensor gradient_of(const FlatGroup& group) {
  return group.await_gradient().view({group.numel}, {1}, 0);
}

// Sums `value` over the ranks of `comm`, in place.
void all_reduce(const Tensor& value, Communicator& comm) {
  const Device& device = value.device();
  const Stream compute = device.compute(), wire = device.stream(comm.stream());
  wire.wait(compute.record());
  const Access accesses[] = {value.access(AccessMode::write)};
  comm.submit(Collective{.send = value.data(),
                         .recv = value.data(),
                         .count = 1,
                         .kind = CollectiveKind::all_reduce,
                         .dtype = f64},
              "grad_norm", accesses);
  compute.wait(wire.record());
}

// The sum of squares of the gradients whose other shards are reached through `comm`.
Tensor sum_of_squares(const std::vector<std::shared_ptr<FlatGroup>>& groups, Communicator* comm,
                      const Device& device) {
  const Tensor sum = Tensor::empty({}, f64, device);
  auto accumulate = raw::Accumulate::no;
  for (const auto& group : groups) {
    if (group->sums.get() != comm || !group->gradient.defined()) continue;
    raw::sumsq_into(sum, gradient_of(*group), accumulate);
    accumulate = raw::Accumulate::yes;
  }
  if (accumulate == raw::Accumulate::no) raw::fill(sum, 0);
  if (comm != nullptr && comm->size() > 1) all_reduce(sum, *comm);
  return sum;
}

}  // namespace

Tensor clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm) {
  TESSERA_EXPECT(!parameters.empty(), "clip_grad_norm: no parameters given");
  TESSERA_EXPECT(!std::isnan(max_norm), "clip_grad_norm: max_norm is NaN");
  const auto groups = groups_of(parameters);
  const Device& device = groups[0]->device;
  const OwnerGuard owner(device, "scalars");

  std::vector<Communicator*> comms;  // in order of first mention, the same on every rank
  for (const auto& group : groups)
    if (std::ranges::find(comms, group->sums.get()) == comms.end())
      comms.push_back(group->sums.get());
  Tensor sum;
  for (Communicator* const comm : comms) {
    const Tensor part = sum_of_squares(groups, comm, device);
    sum = sum.defined() ? raw::add(sum, part) : part;
  }

  const bool clips = max_norm > 0 && std::isfinite(max_norm);
  const Tensor norm = Tensor::empty({}, f32, device);
  const Tensor factor = clips ? Tensor::empty({}, f32, device) : Tensor();
  const auto& kernels = tessera::detail::table(device);
  const auto floats = [](const Tensor& t) {
    return t.defined() ? reinterpret_cast<float*>(t.data()) : nullptr;
  };
  tessera::detail::launch(
      "clip", device, kernels.clip,
      kernels::ClipArgs{floats(factor), floats(norm), sum.data(), max_norm, f64},
      {tessera::detail::reads(sum), tessera::detail::writes(norm),
       tessera::detail::writes(factor)});
  if (!clips) return norm;
  for (const auto& group : groups) {
    if (!group->gradient.defined()) continue;
    const Tensor gradient = gradient_of(*group);
    tessera::detail::launch("scale_gradient", device, kernels.scale_flat,
                            kernels::ScaleFlatArgs{floats(gradient), floats(factor), group->numel},
                            {tessera::detail::reads(factor), tessera::detail::updates(gradient)});
  }
  return norm;
}

}  // namespace tessera::optim
