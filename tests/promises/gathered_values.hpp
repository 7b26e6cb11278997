// The gather transforms of random programs, and what a parameter that has one is on one rank
// without units, where nothing is gathered.
#pragma once

#include "tessera/autograd/custom_op.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tessera/param/parameter.hpp"

namespace tessera::testing {

// x + bf16(x), each term an array of its own: what has not travelled, or is not decoded, shows.
struct InTwo final : GatherTransform {
  const char* name() const noexcept override { return "in two"; }
  std::vector<Part> parts(const ShardSpec& spec) const override {
    return {{bf16, spec.chunk_numel()}, {f32, spec.chunk_numel()}};
  }
  void encode(std::span<const Tensor> parts, const Tensor& chunk) const override {
    for (const Tensor& part : parts) raw::copy_into(part, raw::reshape(chunk, {chunk.numel()}));
  }
  void decode(const Tensor& full, std::span<const Tensor> parts) const override {
    const Tensor sum = raw::add(raw::cast(parts[0], f32), parts[1]);
    raw::copy_into(full, raw::reshape(sum, full.shape()));
  }
};

// `value` of `p`, whole, as its unit would have decoded it; itself where there is nothing to do.
// Gradients are those of `p`.
inline Tensor as_gathered(const Parameter& p, const Tensor& value,
                          const GatherTransform* transform) {
  if (!transform || p.unit() || value.numel() == 0) return value;
  const CustomOp op("as_gathered");
  std::vector<Tensor> own, all;
  for (const GatherTransform::Part& part : transform->parts(p.spec())) {
    all.push_back(Tensor::empty({1, part.numel}, part.dtype, value.device()));
    own.push_back(raw::reshape(all.back(), {part.numel}));
  }
  const Tensor full = Tensor::empty(value.shape(), f32, value.device());
  {
    const NoGradGuard no_gradient;
    transform->encode(own, value.detach());
    transform->decode(full, all);
  }
  return op.record({value}, full, [](const Tensor& g, autograd::Gradients& out) { out.set(0, g); });
}

}  // namespace tessera::testing
