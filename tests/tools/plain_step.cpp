// What tools/rooms runs: three units on two ranks, no option, one step of AdamW.
#include "tessera/autograd/ops.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/shard/fully_shard.hpp"

namespace ts = tessera;

namespace {

// Without biases, and wide enough that nothing is small: what is small travels packed.
class Model : public ts::nn::Module {
 public:
  Model() {
    register_module("first", first);
    register_module("second", second);
    register_module("last", last);
  }
  ts::Tensor operator()(const ts::Tensor& x) {
    return call([&] { return last(ts::tanh(second(ts::tanh(first(x))))); });
  }
  ts::nn::Linear first{128, 128, {.bias = false}}, second{128, 128, {.bias = false}},
      last{128, 128, {.bias = false}};
};

}  // namespace

int main() {
  ts::run_local(2, {}, [](ts::World& world) {
    Model model;
    const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world)};
    ts::fully_shard(model.first, options);
    ts::fully_shard(model.second, options);
    ts::fully_shard(model, options);  // has the parameters of `last`
    model.materialize(world.device());
    ts::nn::init(model, {.value = 7});
    ts::optim::AdamW optimizer(model.parameters(), {});
    const ts::Tensor x = ts::Tensor::full({4, 128}, 0.5, ts::f32, world.device());
    ts::mean(ts::square(model(x))).backward();
    optimizer.step();
    optimizer.zero_grad();
  });
}
