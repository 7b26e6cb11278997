// y = x W^T + b, the layer that holds most of a model's parameters.
//
// Like all layers, it may be built on `meta`: its parameters then wait for `materialize` of the
// outermost module. Built on a real device, they get their memory at once. Values are set by
// nn::init or loaded.
#pragma once

#include <vector>

#include "tessera/nn/fp8.hpp"
#include "tessera/nn/product.hpp"

namespace tessera::nn {

struct LinearOptions {
  bool bias = true;
  // Whether a unit gathers the weight slice by slice; see Module::stream_parameter. It is for the
  // large heads of language models, and goes without bias.
  bool is_streamed = false;
  // The layers whose outputs, side by side, are this one's; see param/row_parts.hpp.
  std::vector<RowPart> parts{};
};

class Linear : public Module {
 public:
  // A layer that its module does without: it has no parameters, and to call it is an error.
  Linear() = default;
  Linear(std::int64_t in, std::int64_t out, const Device& device = Device::meta())
      : Linear(in, out, LinearOptions{}, device) {}
  Linear(std::int64_t in, std::int64_t out, const LinearOptions& options,
         const Device& device = Device::meta())
      : weight({out, in}, Initializer::normal(0, kInitialDeviation)) {
    TESSERA_EXPECT(in > 0 && out > 0, "Linear: ", in, " inputs and ", out,
                   " outputs; expected at least one of each");
    TESSERA_EXPECT(
        !options.bias || !options.is_streamed,
        "Linear: a layer of a streamed weight has no bias; leave bias or is_streamed out");
    register_parameter("weight", weight);
    weight.set_row_parts(options.parts);
    if (options.is_streamed) stream_parameter(weight);
    if (options.bias) {
      bias = Parameter({out}, Initializer::constant(0));
      register_parameter("bias", bias);
      bias.set_row_parts(options.parts);
    }
    if (!device.is_meta()) materialize(device);
  }
  // A tied head: it streams the weight [out, in] of another module, and has no bias.
  explicit Linear(const Parameter& shared_weight) : weight(shared_weight) {
    TESSERA_EXPECT(weight.defined() && weight.shape().ndim() == 2,
                   "Linear: the shared weight must be a matrix [out, in]");
    register_parameter("weight", weight);
    stream_parameter(weight);
  }

  // x [..., in] of the weight's dtype -> [..., out]. For a weight in 8 bits x may be of any
  // floating dtype of at most 32 bits.
  Tensor operator()(const Tensor& x, Caller at = Caller::current()) { return product(x, at); }

  // Freezes the weight, and stores it in e4m3 with a scale a row: shards, gathers and files have a
  // quarter of the bytes of f32, and 4 more a row. The layer decodes it for each product, in the
  // dtype of x; see autograd/rows_in_8_bits.hpp. A streamed weight is decoded slice by slice. A
  // loss in chunks of rows keeps the decoded weight until backward, where that is one slice. In a
  // unit that computes in f16 scales travel in f16: a row whose largest value is below 1.3e-5
  // becomes 0. A load from floating values encodes them, of files, state dicts and rank 0; nn::init
  // encodes what it draws. Of a model: nn::store_in_8_bits. Call it before the weight has memory
  // and belongs to a unit. Throws: ContractError for an fp8 recipe, and as store_rows_in_8_bits.
  void store_in_8_bits() {
    TESSERA_EXPECT(weight.defined() && !product.fp8(),
                   "Linear::store_in_8_bits: the layer has no weight, or an fp8 recipe; call it on "
                   "a layer with a weight, and leave set_fp8 out");
    if (!weight_scale.defined()) weight_scale = store_rows_in_8_bits(*this, weight);
  }

  Parameter weight;        // [out, in], normal
  Parameter bias;          // [out], 0; undefined without
  Parameter weight_scale;  // [out, 1], of a weight in 8 bits; undefined without
  Product product{*this, weight, bias, weight_scale};  // how x W^T + b is made
};

}  // namespace tessera::nn
