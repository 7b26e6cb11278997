#include "tessera/optim/clip.hpp"

#include <algorithm>
#include <cmath>

#include "runtime/optim/gradients.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::optim {
namespace {

// Adds the squares of a gradient to what `total` has, or joins the norm of another type with it: in
// pieces, since a copy in f64 takes twice the gradient's memory.
Tensor joined(const Tensor& total, const Tensor& gradient, NormType type) {
  if (type == NormType::l2) {
    const Tensor sum = total.defined() ? total : Tensor::empty({}, f64, gradient.device());
    raw::sumsq_into(sum, gradient, total.defined() ? raw::Accumulate::yes : raw::Accumulate::no);
    return sum;
  }
  constexpr std::int64_t kPiece = 1 << 20;
  const bool sums = type == NormType::l1;
  Tensor all = total;
  for (std::int64_t at = 0; at < gradient.numel(); at += kPiece) {
    const Tensor piece = raw::slice(gradient, 0, at, std::min(gradient.numel(), at + kPiece));
    const Tensor norm = raw::reduce_all(sums ? raw::Reduction::sum : raw::Reduction::max,
                                        raw::cast(raw::abs(piece), f64));
    all =
        !all.defined() ? norm : raw::binary(sums ? raw::Binary::add : raw::Binary::max, all, norm);
  }
  return all;
}

// The norm, or for l2 its square, of the gradients whose other shards are reached through `comm`.
// Padding and missing gradients are zeros.
Tensor norm_over(Communicator* comm, const std::vector<GroupPart>& parts, const Device& device,
                 NormType type) {
  Tensor total;
  for (const GroupPart& part : parts) {
    if (part.group->sums.get() != comm || !part.group->gradient.defined()) continue;
    for (const GroupPart::Stretch& stretch : part.stretches)
      total = joined(total, part.gradient(stretch), type);
  }
  if (!total.defined()) total = Tensor::zeros({}, f64, device);
  all_reduce("grad_norm", total, comm, type == NormType::inf ? ReduceOp::max : ReduceOp::sum);
  return total;
}

}  // namespace

Tensor clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm, NormType type,
                      Clip how) {
  TESSERA_EXPECT(!parameters.empty(), "clip_grad_norm: no parameters given");
  TESSERA_EXPECT(!std::isnan(max_norm), "clip_grad_norm: max_norm is NaN");
  const std::vector<GroupPart> parts = parts_of(parameters);
  for (const GroupPart& part : parts) part.expect_reduced("clip_grad_norm");
  const Device& device = parts[0].group->device;
  for (const GroupPart& part : parts)
    TESSERA_EXPECT(part.group->device == device, "clip_grad_norm: unit '", part.group->name,
                   "' has its gradients on another device than '", parts[0].group->name,
                   "'; clip those of each device alone");
  const OwnerGuard owner(device, "scalars");

  Tensor sum;
  for (Communicator* const comm : communicators_of(parts, &FlatGroup::sums)) {
    const Tensor own = norm_over(comm, parts, device, type);
    sum = !sum.defined()
              ? own
              : raw::binary(type == NormType::inf ? raw::Binary::max : raw::Binary::add, sum, own);
  }
  if (type != NormType::l2) sum = raw::mul(sum, sum);  // the kernel takes the root

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
    if (how == Clip::in_optimizer && part.is_whole())
      part.group->factor = factor;
    else
      for (const GroupPart::Stretch& stretch : part.stretches)
        detail::multiply("scale_gradient", part.gradient(stretch), factor);
  }
  return norm;
}

}  // namespace tessera::optim
