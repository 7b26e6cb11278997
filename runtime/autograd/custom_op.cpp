#include "tessera/autograd/custom_op.hpp"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/autograd/joint_results.hpp"
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
           " lies on a GPU, but this body runs on the CPU; move it there");
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

void CustomOp::prepare(std::span<Operand> operands) const {
  std::optional<Device> device;
  std::size_t input = 0;
  for (Operand& each : operands) {
    Tensor& x = each.tensor;
    if (each.is_out) continue;
    if (x.defined()) {
      expect(x.dtype() == each.dtype, "input ", input, " is ", x.dtype(), ", its body takes ",
             each.dtype, "; cast it first");
      expect(x.device().kind() != DeviceKind::cuda, "input ", input,
             " lies on a GPU, but this body runs on the CPU; move it there");
      if (!device) device = x.device();
      expect(x.device() == *device, "input ", input,
             " lies on another device than those before it; move it there");
      x = raw::contiguous(x);
    }
    ++input;
  }
  expect(device.has_value(),
         "all inputs are undefined; give one, which says on which device the operation runs");
  for (Operand& each : operands)
    if (each.is_out) each.tensor = Tensor::empty(each.shape, each.dtype, *device);
}

Tensor CustomOp::table_of(std::span<std::byte* const> addresses, const Device& device) {
  std::vector<std::int64_t> values;
  for (std::byte* const at : addresses) values.push_back(reinterpret_cast<std::int64_t>(at));
  return Tensor::from(values, {static_cast<std::int64_t>(values.size())}, device);
}

// What others hold back comes first: they have room for as many operands as ours have.
void CustomOp::launch(std::span<const Operand> operands, const Tensor& table,
                      const Body& body) const {
  std::vector<Access> accesses;
  Cost cost;
  const auto add = [&](const Tensor& t, AccessMode mode) {
    if (!t.defined() || t.numel() == 0) return;
    accesses.push_back(t.access(mode));
    (mode == AccessMode::read ? t.storage()->last_op : t.storage()->last_writer) = name_;
    cost.bytes += static_cast<double>(t.numel()) * static_cast<double>(size_bytes(t.dtype()));
  };
  for (const Operand& each : operands)
    add(each.tensor, each.is_out ? AccessMode::write : AccessMode::read);
  add(table, AccessMode::read);
  const auto made = std::ranges::find(operands, true, &Operand::is_out);
  const Device& device = made->tensor.device();
  device.context().submit_held();
  device.compute().launch({.name = name_, .cost = cost, .accesses = accesses}, body);
}

namespace {

// `backward`, held to the shapes of these inputs.
autograd::Backward checked(std::span<const Tensor> inputs, autograd::Backward backward) {
  std::vector<Shape> shapes;
  for (const Tensor& x : inputs) shapes.push_back(x.defined() ? x.shape() : Shape());
  return [shapes = std::move(shapes), backward = std::move(backward)](const Tensor& gradient,
                                                                      autograd::Gradients& to) {
    to.expect_shapes(shapes);
    backward(gradient, to);
  };
}

}  // namespace

Tensor CustomOp::record(std::initializer_list<Tensor> inputs, Tensor out,
                        autograd::Backward backward) const {
  return autograd::record(name_, inputs, std::move(out), checked(inputs, std::move(backward)));
}

void CustomOp::record_all(std::span<const Tensor> inputs, std::span<Tensor> out,
                          BackwardOfAll backward) const {
  struct Result {
    Shape shape;
    DType dtype;
  };
  std::vector<Result> results;
  for (const Tensor& each : out) results.push_back({each.shape(), each.dtype()});
  const auto joint = std::make_shared<autograd::JointResults>();
  const auto run = [joint, results = std::move(results), backward = std::move(backward)](
                       const Tensor& token, autograd::Gradients& to) {
    std::vector<Tensor> gradients = joint->take();
    for (std::size_t i = 0; i < gradients.size(); ++i)
      if (const auto& [shape, dtype] = results[i]; !gradients[i].defined() && is_floating(dtype))
        gradients[i] = Tensor::zeros(shape, dtype, token.device());
    backward(gradients, to);
  };
  const Tensor token = autograd::record(
      name_, inputs, Tensor::empty({0}, f32, out.front().device()), checked(inputs, run));
  if (token.history()) autograd::JointResults::record(joint, name_, token, out);
}

void CustomOp::fail(const std::string& what) const {
  const std::string_view path = caller_.file_name();
  throw ContractError(
      concat(name_, ": ", what, " (", path.substr(path.rfind('/') + 1), ":", caller_.line(), ")"),
      caller_);
}

}  // namespace tessera
