// y = x W^T + b, the layer that holds most of a model's parameters.
//
// As for all layers: built on `meta` its parameters wait for `materialize` on the outermost module;
// built on a real device they get their memory at once. Values are set by nn::init or loaded.
#pragma once

#include <optional>

#include "tessera/autograd/fp8.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/nn/module.hpp"

namespace tessera {

// So that hooks see both.
template <class F>
void for_each_tensor(Activated& x, const F& f) {
  f(x.before);
  f(x.value);
}

}  // namespace tessera

namespace tessera::nn {

// Of every weight matrix, as GPT-2 and Llama start.
inline constexpr double kInitialDeviation = 0.02;

// Of projections that read one input, as those to queries, keys and values: a parameter each, or
// one that stacks their rows. Then there are fewer and wider products, forward and backward. Files
// and initial values are the same; the names of parameters, state dicts and what can be frozen
// alone are not. See param/row_parts.hpp.
enum class Projections : std::uint8_t { separate, fused };

struct LinearOptions {
  bool bias = true;
  // A unit gathers the weight slice by slice; see Module::stream_parameter. For the large heads of
  // language models; without bias.
  bool is_streamed = false;
  // Which layers' outputs, side by side, these are; see param/row_parts.hpp.
  std::vector<RowPart> parts{};
};

class Linear : public Module {
 public:
  // One that its module does without: no parameters, and to call it is an error.
  Linear() = default;
  Linear(std::int64_t in, std::int64_t out, const Device& device = Device::meta());
  Linear(std::int64_t in, std::int64_t out, const LinearOptions& options,
         const Device& device = Device::meta());
  // Without bias, and with the weight [out, in] of another module, streamed: a tied head.
  explicit Linear(const Parameter& shared_weight);

  // x [..., in] of the weight's dtype -> [..., out].
  Tensor operator()(const Tensor& x, Caller at = Caller::current());
  // The same with its GELU, in one product, for the layer that follows.
  Activated gelu(const Tensor& x, Caller at = Caller::current());
  Tensor operator()(const Activated& x, Caller at = Caller::current());
  // residual [..., out] + this layer of x, as `+` adds, which broadcasts; in the layer's product
  // where that is one, nobody looks at what the layer alone gives, and shapes are equal.
  Tensor add_to(const Tensor& residual, const Tensor& x, Caller at = Caller::current());
  Tensor add_to(const Tensor& residual, const Activated& x, Caller at = Caller::current());
  // The mean cross-entropy of these outputs with targets [N], in nats, without ever having them
  // all: at most `most_logits`, or 256 columns of one row. They are made once more in backward.
  // `gradient`: that of this loss, known beforehand; then they are made once, see
  // linear_cross_entropy, and of a weight that is there in several slices all of them are kept.
  Tensor cross_entropy(const Tensor& x, const Tensor& targets, std::int64_t most_logits,
                       std::optional<double> gradient = {}, Caller at = Caller::current());

  // From the next call on, products in 8-bit floats, or none; of all layers of a model: nn/fp8.hpp.
  // Throws: ContractError for a streamed weight and for sizes that 16 does not divide.
  void set_fp8(std::optional<Fp8Recipe> recipe);
  const std::optional<Fp8Recipe>& fp8() const noexcept { return fp8_; }
  // By which recipe the layer before may round what this one reads, and write nothing else (see
  // SharedFp8Input): none where this one multiplies otherwise, where somebody looks at its input,
  // and where the weight is frozen, which would need one form of it alone. It knows nothing of
  // modules around this one: what passes x on asks is_hooked() of itself, too.
  std::optional<Fp8Recipe> takes_rounded() const;

  Parameter weight;  // [out, in], normal
  Parameter bias;    // [out], 0; undefined without

 private:
  Tensor multiply(const Tensor& x);
  Tensor bias_value() const { return bias.defined() ? bias.value() : Tensor(); }
  bool adds_to(const Tensor& residual, const Tensor& x) const;  // in its own product

  std::optional<Fp8Recipe> fp8_;
};

// By which recipe all of them take it.
template <class... Layers>
std::optional<Fp8Recipe> all_take_rounded(const Linear& first, const Layers&... others) {
  const std::optional<Fp8Recipe> recipe = first.takes_rounded();
  return ((others.takes_rounded() == recipe) && ...) ? recipe : std::nullopt;
}

}  // namespace tessera::nn
