#include "tessera/autograd/custom_op.hpp"

#include <string_view>

#include "runtime/tensor/launch.hpp"

namespace tessera {

Tensor CustomOp::prepare(const Shape& shape, std::span<Tensor> inputs) const {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensor& x = inputs[i];
    expect(x.defined(), "input ", i, " is undefined");
    expect(is_floating(x.dtype()) && !is_storage_only(x.dtype()), "input ", i, " is ", x.dtype(),
           ", expected f32, f64, bf16 or f16; cast it first");
    expect(x.dtype() == inputs[0].dtype(), "input 0 is ", inputs[0].dtype(), ", input ", i, " ",
           x.dtype(), "; cast one of them");
    expect(x.device() == inputs[0].device(), "input ", i,
           " lies on another device than input 0; move it there");
    expect(x.device().kind() != DeviceKind::cuda, "input ", i,
           " lies on a GPU, and this body runs on the CPU");
    x = raw::contiguous(x);
  }
  return Tensor::empty(shape, inputs[0].dtype(), inputs[0].device());
}

void CustomOp::expand_all(std::span<Tensor> inputs) const {
  Shape shape;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    expect(inputs[i].defined(), "input ", i, " is undefined");
    try {
      shape = broadcast(shape, inputs[i].shape());
    } catch (const ContractError& error) {
      fail(error.what());
    }
  }
  for (Tensor& x : inputs) x = raw::expand(x, shape);
}

void CustomOp::launch(const Tensor& out, std::span<const Tensor> inputs, const Body& body) const {
  std::array<Tensor, kMostInputs> in;  // undefined ones are skipped
  std::copy(inputs.begin(), inputs.end(), in.begin());
  using detail::reads;
  detail::launch_body(name_, out.device(), body,
                      {reads(in[0]), reads(in[1]), reads(in[2]), reads(in[3]), reads(in[4]),
                       reads(in[5]), detail::writes(out)});
}

void CustomOp::fail(const std::string& what) const {
  const std::string_view path = caller_.file_name();
  throw ContractError(
      concat(name_, ": ", what, " (", path.substr(path.rfind('/') + 1), ":", caller_.line(), ")"),
      caller_);
}

}  // namespace tessera
