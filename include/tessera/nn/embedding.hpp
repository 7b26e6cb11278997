// A table of vectors, looked up by id: tokens and learned positions.
#pragma once

#include "tessera/autograd/ops.hpp"
#include "tessera/autograd/rows_in_8_bits.hpp"
#include "tessera/autograd/sliced.hpp"
#include "tessera/nn/fp8.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::nn {

class Embedding : public Module {
 public:
  Embedding(std::int64_t count, std::int64_t dim, const Device& device = Device::meta())
      : weight({count, dim}, Initializer::normal(0, kInitialDeviation)) {
    TESSERA_EXPECT(count > 0 && dim > 0, "Embedding: ", count, " vectors of ", dim,
                   " elements; expected at least one of each");
    register_parameter("weight", weight);
    stream_parameter(weight);
    if (!device.is_meta()) materialize(device);
  }

  // ids [...] in [0, count), i32 or i64 -> [..., dim] of the weight's dtype; of what is stored in 8
  // bits, f32 or the unit's dtype of compute. Any other id gives a row of NaN.
  Tensor operator()(const Tensor& ids, Caller at = Caller::current()) {
    const CallSite site(at);
    const auto look_up = [&](const Tensor& in) {
      SlicedEmbedding rows(in);
      weight.for_each_slice([&](const Tensor& slice, const SliceRows& of) { rows.add(slice, of); },
                            reads_parameters_in_backward());
      return weight_scale.defined() ? decoded(rows.finish(), in) : rows.finish();
    };
    return call(look_up, ids);
  }

  // Freezes the table, and stores it in e4m3 with a scale a row, as Linear::store_in_8_bits does.
  // Only the rows that are looked up are decoded. Call it before the table has memory and belongs
  // to a unit.  Throws: as store_rows_in_8_bits of nn/fp8.hpp.
  void store_in_8_bits() {
    if (!weight_scale.defined()) weight_scale = store_rows_in_8_bits(*this, weight);
  }

  // x [..., n, dim] + the first n rows: learned positions. If the table is one slice and the module
  // has no hook, the rows are added where they lie, without a look-up. Throws: ContractError for
  // another shape.
  Tensor add_positions(const Tensor& x, Caller at = Caller::current()) {
    const CallSite site(at);
    TESSERA_EXPECT(
        x.ndim() >= 2 && x.size(-1) == weight.shape()[1] && x.size(-2) <= weight.shape()[0],
        "Embedding: x is ", x.shape(), ", the table of positions ", weight.shape(),
        "; expected [..., n, dim] and at least n rows of dim");
    const std::int64_t n = x.size(-2);
    if (is_hooked() || weight_scale.defined() || weight.slices() > 1)
      return x + (*this)(Tensor::arange(n, i32, x.device()));
    Tensor sum;
    weight.for_each_slice(
        [&](const Tensor& rows, const SliceRows&) {
          sum = x + (n == rows.size(0) ? rows : slice(rows, 0, 0, n));
        },
        reads_parameters_in_backward());
    return sum;
  }

  // False: the gradient of a row goes to its id, and no row is read.
  bool reads_parameters_in_backward() const override { return false; }

  Parameter weight;        // [count, dim], normal
  Parameter weight_scale;  // [count, 1], of a table in 8 bits; undefined without

 private:
  // codes [..., dim] of the rows of these ids.
  Tensor decoded(const Tensor& codes, const Tensor& ids) const {
    const Tensor scales = tessera::embedding(weight_scale, ids);
    return raw::reshape(decode_rows(raw::reshape(codes, {ids.numel(), weight.shape()[1]}),
                                    raw::reshape(scales, {ids.numel(), 1}), scales.dtype()),
                        codes.shape());
  }
};

}  // namespace tessera::nn
