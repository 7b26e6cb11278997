#include "tessera/nn/embedding.hpp"

#include "tessera/autograd/ops.hpp"

namespace tessera::nn {

Embedding::Embedding(std::int64_t count, std::int64_t dim, const Device& device)
    : weight({count, dim}, Initializer::normal(0, kInitialDeviation)) {
  TESSERA_EXPECT(count > 0 && dim > 0, "Embedding: ", count, " vectors of ", dim,
                 " elements; expected at least one of each");
  register_parameter("weight", weight);
  stream_parameter(weight);
  if (!device.is_meta()) materialize(device);
}

Tensor Embedding::operator()(const Tensor& ids, Caller at) {
  const CallSite site(at);
  const auto look_up = [&](const Tensor& in) {
    SlicedEmbedding rows(in);
    weight.for_each_slice([&](const Tensor& slice, const SliceRows& of) { rows.add(slice, of); },
                          reads_parameters_in_backward());
    return rows.finish();
  };
  return call(look_up, ids);
}

}  // namespace tessera::nn
