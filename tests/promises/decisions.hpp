// What programs do to a Llama beyond options: frozen parts, adapters around a base that is stored
// in few bits, parameters that units leave alone, units within blocks, and decisions by hand. Both
// tiny trainings and the step on the virtual clock take them from here.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tests/promises/average.hpp"
#include "tests/support/double_on_stream.hpp"

namespace tessera::testing {

// A part of a unit, a whole unit, and the embedding, where it is no head.
inline void freeze_parts(nn::Llama& model) {
  const nn::LlamaConfig& config = model.config();
  if (!config.tie_embeddings) model.embedding.weight.freeze();
  nn::SwigluMlp& mlp = model.blocks[0].mlp;
  const bool is_fused = config.projections == nn::Projections::fused;
  (is_fused ? mlp.gate_up_proj : mlp.up_proj).weight.freeze();
  for (Parameter p : model.blocks[1].parameters()) p.freeze();
}

// Behind its parts: makes the model the root around them, or leaves each a root of its own, as the
// norm then is.
inline void shard_around(nn::Llama& model, const ShardOptions& options, bool has_roots) {
  fully_shard(has_roots ? static_cast<nn::Module&>(model.norm) : model, options);
}

// What is called by itself: the model, or where no unit is around them its parts and the norm.
inline std::vector<nn::Module*> roots_of(nn::Llama& model) {
  if (model.hook()) return {&model};
  std::vector<nn::Module*> roots = model.parts();
  roots.push_back(&model.norm);
  return roots;
}

// Behind each block's call y = h + gain * B h, where B is frozen and stored in `stored`. Before
// units are made. Returns the gains, which are trained.
inline std::vector<Parameter> add_bases(nn::Llama& model, DType stored) {
  const std::int64_t dim = model.config().dim;
  std::vector<Parameter> gains;
  for (nn::LlamaBlock& block : model.blocks) {
    const Parameter base({dim, dim}, Initializer::normal(0, 0.1));
    const Parameter& gain = gains.emplace_back(Shape{dim}, Initializer::constant(1));
    base.freeze();
    base.set_dtype(stored);
    block.register_parameter("base", base);
    block.register_parameter("gain", gain);
    const nn::ForwardHook hook = [base, gain](nn::Module&, const nn::CallTensors&,
                                              const nn::CallTensors& out) {
      const Tensor h = out[0];
      out[0] = h + linear(h, cast(base, h.dtype())) * cast(gain, h.dtype());
    };
    block.register_forward_hook(hook);
  }
  return gains;
}

// y = h * gain + shift * scale, given h and {scale}. A training call assigns the buffer `shift`
// anew, to what it was: a step that fails leaves buffers as far as it came.
class Gain final : public nn::Module {
 public:
  explicit Gain(std::int64_t dim)
      : shift_({dim}, Initializer::normal(0, 0.1)), gain_({dim}, Initializer::constant(1)) {
    register_parameter("gain", gain_);
    register_buffer("shift", shift_);
  }
  // `scale` must arrive in the dtype `expected`.
  Tensor operator()(const Tensor& h, const Tensor& scale, DType expected) {
    using Given = std::pair<Tensor, std::vector<Tensor>>;
    return call(
        [&](const Given& given) {
          const auto& [in, scales] = given;
          TESSERA_EXPECT(scales[0].dtype() == expected, "the scale is ", scales[0].dtype());
          if (is_training()) shift_.assign(raw::mul(shift_.value(), 1.));
          const Tensor shift = cast(shift_.value(), in.dtype()) * cast(scales[0], in.dtype());
          return in * cast(gain_, in.dtype()) + shift;
        },
        Given(h, {scale}));
  }

 private:
  nn::Buffer shift_;
  Parameter gain_;
};

// Behind each block's call a Gain, which is a unit within the block's unit; every second one does
// not cast its inputs. Before the blocks are units.
inline void add_inner_units(nn::Llama& model, const ShardOptions& options) {
  bool casts = false;
  for (nn::LlamaBlock& block : model.blocks) {
    const auto gain = std::make_shared<Gain>(model.config().dim);
    const nn::Buffer scale({model.config().dim}, Initializer::constant(0.5));
    block.register_module("inner", *gain);
    block.register_buffer("scale", scale, nn::Persistent::no);
    ShardOptions of_gain = options;
    of_gain.precision.cast_forward_inputs = casts;
    fully_shard(*gain, of_gain);
    const DType expected = casts ? options.precision.param.value_or(f32) : f32;
    block.register_forward_hook(
        [gain, scale, expected](nn::Module&, const nn::CallTensors&, const nn::CallTensors& out) {
          out[0] = (*gain)(out[0], scale.value(), expected);
        });
    casts = !casts;
  }
}

// Matrices that are not streamed are sharded by columns where the ranks divide them.
inline auto by_columns(const DeviceMesh& mesh) {
  return [ranks = mesh.shard_size()](const Parameter& p) {
    const Shape& shape = p.shape();
    return Shard{shape.ndim() == 2 && shape[1] % ranks == 0 && !p.is_streamed() ? 1 : 0};
  };
}

// Decisions that leave all values as they are, once there are units: lists of what runs ahead, a
// block that stays open behind backward, and gradients that are divided by twice the number of
// ranks and doubled by a hook.
inline void decide_by_hand(nn::Llama& model, const World& world) {
  set_modules_to_forward_prefetch(model, {&model.blocks[0]});
  set_modules_to_backward_prefetch(model.blocks[1], {&model.blocks[0]});
  set_reshard_after_backward(model.blocks[0], false);
  if (world.size() == 1) return;
  for (const auto& [name, module] : model.named_modules()) {
    if (!module->hook()) continue;
    set_all_reduce_hook(*module, double_on_stream);
    set_gradient_divide_factor(*module, 2 * world.size());
  }
}
// ... and around each forward: the last block is opened by hand, the first one is closed.
inline void decide_before_forward(nn::Llama& model) {
  shard_plan(model);  // after a reset units are opened by hand once there is a plan again
  unshard(model.blocks[model.blocks.size() - 1]);
}
inline void decide_before_backward(nn::Llama& model) { reshard(model.blocks[0]); }

// What a program changes its mind about before step k: in every second one more is in flight, and
// the second block stays open, so that backward needs no gather for it.
inline void change_before_step(nn::Llama& model, int k) {
  const bool stays_open = k % 2 == 1;
  set_reductions_in_flight(model, stays_open ? 2 : 1);
  set_reshard_after_forward(model.blocks[1], stays_open ? Reshard::never : Reshard::always);
  set_unshard_in_backward(model.blocks[1], !stays_open);
}

}  // namespace tessera::testing
