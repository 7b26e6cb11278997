#include "tessera/optim/clip.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "runtime/optim/gradients.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::optim {
namespace {

// The sum of squares of so many gradients, of so many elements together or fewer. A GPU sums parts
// of some as they are given, and the parts behind the last: it may still be reduced until then.
class SumOfSquares {
 public:
  SumOfSquares(std::int64_t gradients, std::int64_t elements, const Device& device)
      : left_(gradients), part_(kernels::sumsq_part(elements)) {
    if (gradients == 0) return;
    sum = Tensor::empty({}, f64, device);
    if (device.kind() == DeviceKind::cuda)
      parts_ = Tensor::empty({gradients + elements / part_}, f64, device);
  }
  void add(const Tensor& gradient) {
    given_[given_count_++] = gradient;
    --left_;
    if (left_ > 0 && given_count_ < given_.size()) return;
    kernels::SumsqFlatArgs args{
        .out = sum.data(),
        .in = {},
        .count = {},
        .arrays = static_cast<std::int32_t>(given_count_),
        .out_dtype = f64,
        .accumulate = before_ > 0,
        .is_last = left_ == 0,
        .parts = parts_.defined() ? reinterpret_cast<double*>(parts_.data()) : nullptr,
        .part = part_,
        .parts_before = before_};
    for (std::size_t i = 0; i < given_count_; ++i) {
      args.in[i] = reinterpret_cast<const float*>(given_[i].data());
      args.count[i] = given_[i].numel();
    }
    before_ += kernels::parts_of(args);
    using detail::reads;
    static_assert(kernels::kSumsqArrays == 5, "as many are declared");
    detail::launch("sumsq", sum.device(), detail::table(sum.device()).sumsq_flat, args,
                   {reads(given_[0]), reads(given_[1]), reads(given_[2]), reads(given_[3]),
                    reads(given_[4]), detail::writes(sum), detail::writes(parts_)});
    given_ = {};
    given_count_ = 0;
  }

  Tensor sum;  // f64 [], undefined of none

 private:
  std::array<Tensor, kernels::kSumsqArrays> given_;  // that the next launch has
  std::size_t given_count_ = 0;
  Tensor parts_;
  std::int64_t left_, part_, before_ = 0;
};

// Joins the norm of a gradient, l1 or inf, with what `total` has: in pieces, since a copy in f64
// takes twice the gradient's memory.
Tensor joined(const Tensor& total, const Tensor& gradient, NormType type) {
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
  const auto for_each_gradient = [&](const auto& f) {
    for (const GroupPart& part : parts) {
      if (part.group->sums.get() != comm || !part.group->gradient.defined()) continue;
      for (const GroupPart::Stretch& stretch : part.stretches) f(part, stretch);
    }
  };
  std::int64_t gradients = 0, elements = 0;
  for_each_gradient([&](const GroupPart& part, const GroupPart::Stretch&) {
    ++gradients;
    elements += part.group->gradient_numel;
  });
  Tensor total;
  SumOfSquares squares(type == NormType::l2 ? gradients : 0, elements, device);
  for_each_gradient([&](const GroupPart& part, const GroupPart::Stretch& stretch) {
    const Tensor gradient = part.gradient(stretch);
    if (type == NormType::l2)
      squares.add(gradient);
    else
      total = joined(total, gradient, type);
  });
  if (type == NormType::l2) total = squares.sum;
  if (!total.defined()) total = Tensor::zeros({}, f64, device);
  all_reduce("grad_norm", total, comm, type == NormType::inf ? ReduceOp::max : ReduceOp::sum);
  return total;
}

// What is to be clipped, which lies on one device. Throws: ContractError, see clip.hpp.
std::vector<GroupPart> checked_parts(const char* function, const std::vector<Parameter>& parameters,
                                     double max_norm) {
  TESSERA_EXPECT(!parameters.empty(), function, ": no parameters given");
  TESSERA_EXPECT(!std::isnan(max_norm), function, ": max_norm is NaN");
  std::vector<GroupPart> parts = parts_of(parameters);
  for (const GroupPart& part : parts) part.expect_reduced(function);
  const Device& device = parts[0].group->device;
  for (const GroupPart& part : parts)
    TESSERA_EXPECT(part.group->device == device, function, ": unit '", part.group->name,
                   "' has its gradients on another device than '", parts[0].group->name,
                   "'; clip the gradients of each device alone");
  return parts;
}

// Scales by the norm whose square is given, f64 [], and returns it, f32 [].
Tensor scale(const std::vector<GroupPart>& parts, const Tensor& square, double max_norm, Clip how) {
  const Device& device = square.device();
  const bool clips = max_norm > 0 && std::isfinite(max_norm);
  const Tensor norm = Tensor::empty({}, f32, device);
  const Tensor factor = clips ? Tensor::empty({}, f32, device) : Tensor();
  const auto floats = [](const Tensor& t) {
    return t.defined() ? reinterpret_cast<float*>(t.data()) : nullptr;
  };
  detail::launch("clip", device, detail::table(device).clip,
                 kernels::ClipArgs{floats(factor), floats(norm), square.data(), max_norm, f64},
                 {detail::reads(square), detail::writes(norm), detail::writes(factor)});
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

}  // namespace

Tensor clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm, NormType type,
                      Clip how) {
  const std::vector<GroupPart> parts = checked_parts("clip_grad_norm", parameters, max_norm);
  const Device& device = parts[0].group->device;
  const OwnerGuard owner(device, "scalars");
  Tensor sum;
  for (Communicator* const comm : communicators_of(parts, &FlatGroup::sums)) {
    const Tensor own = norm_over(comm, parts, device, type);
    sum = !sum.defined()
              ? own
              : raw::binary(type == NormType::inf ? raw::Binary::max : raw::Binary::add, sum, own);
  }
  if (type != NormType::l2) sum = raw::mul(sum, sum);  // the kernel takes the root
  return scale(parts, sum, max_norm, how);
}

void clip_grads_with_norm(const std::vector<Parameter>& parameters, double max_norm,
                          const Tensor& norm, Clip how) {
  constexpr const char* kFunction = "clip_grads_with_norm";
  const std::vector<GroupPart> parts = checked_parts(kFunction, parameters, max_norm);
  const Device& device = parts[0].group->device;
  TESSERA_EXPECT(norm.defined() && norm.numel() == 1 && norm.dtype() == f32, kFunction,
                 ": the norm is ",
                 norm.defined() ? concat(norm.dtype(), " of ", norm.shape()) : "undefined",
                 "; expected one f32, as clip_grad_norm returns it");
  TESSERA_EXPECT(norm.device() == device, kFunction,
                 ": the norm lies on another device than the gradients; move it");
  const OwnerGuard owner(device, "scalars");
  const Tensor wide = raw::cast(norm, f64);
  scale(parts, raw::mul(wide, wide), max_norm, how);
}

}  // namespace tessera::optim
