#include "tessera/optim/clip.hpp"

#include <algorithm>
#include <cmath>

#include "runtime/tensor/launch.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::optim {
namespace {

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

// The sum of squares of the gradients whose other shards are reached through `comm`. Padding and
// missing gradients are zeros.
Tensor sum_of_squares(const std::vector<GroupPart>& parts, Communicator* comm,
                      const Device& device) {
  const Tensor sum = Tensor::empty({}, f64, device);
  auto accumulate = raw::Accumulate::no;
  for (const GroupPart& part : parts) {
    if (part.group->sums.get() != comm || !part.group->gradient.defined()) continue;
    for (const GroupPart::Stretch& stretch : part.stretches) {
      raw::sumsq_into(sum, part.gradient(stretch), accumulate);
      accumulate = raw::Accumulate::yes;
    }
  }
  if (accumulate == raw::Accumulate::no) raw::fill(sum, 0);
  if (comm != nullptr && comm->size() > 1) all_reduce(sum, *comm);
  return sum;
}

}  // namespace

Tensor clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm) {
  TESSERA_EXPECT(!parameters.empty(), "clip_grad_norm: no parameters given");
  TESSERA_EXPECT(!std::isnan(max_norm), "clip_grad_norm: max_norm is NaN");
  const std::vector<GroupPart> parts = parts_of(parameters);
  const Device& device = parts[0].group->device;
  const OwnerGuard owner(device, "scalars");

  std::vector<Communicator*> comms;  // in order of first mention, the same on every rank
  for (const GroupPart& part : parts)
    if (std::ranges::find(comms, part.group->sums.get()) == comms.end())
      comms.push_back(part.group->sums.get());
  Tensor sum;
  for (Communicator* const comm : comms) {
    const Tensor squares = sum_of_squares(parts, comm, device);
    sum = sum.defined() ? raw::add(sum, squares) : squares;
  }

  const bool clips = max_norm > 0 && std::isfinite(max_norm);
  const Tensor norm = Tensor::empty({}, f32, device);
  const Tensor factor = clips ? Tensor::empty({}, f32, device) : Tensor();
  const auto& kernels = detail::table(device);
  const auto floats = [](const Tensor& t) {
    return t.defined() ? reinterpret_cast<float*>(t.data()) : nullptr;
  };
  detail::launch("clip", device, kernels.clip,
                 kernels::ClipArgs{floats(factor), floats(norm), sum.data(), max_norm, f64},
                 {detail::reads(sum), detail::writes(norm), detail::writes(factor)});
  if (!clips) return norm;
  for (const GroupPart& part : parts) {
    if (!part.group->gradient.defined()) continue;
    for (const GroupPart::Stretch& stretch : part.stretches) {
      const Tensor gradient = part.gradient(stretch);
      const kernels::ScaleFlatArgs args{floats(gradient), floats(factor), gradient.numel()};
      detail::launch("scale_gradient", device, kernels.scale_flat, args,
                     {detail::reads(factor), detail::updates(gradient)});
    }
  }
  return norm;
}

}  // namespace tessera::optim
