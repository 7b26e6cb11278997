// Full parameters are there inside of their unit's call, to be read: what leaves it, or is used
// outside, is an error that names the parameter, the unit and who used it.
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("a parameter used outside its unit's call is an error that names both",
          "[threads][fsdp2-028]") {
  const auto messages = on_ranks(2, [](World& world) {
    Stack model({5, 7, 1, 3});
    start(model, world, 1);
    shard_plan(model);
    return thrown_by([&] { model.layers[1].weight.value(); });
  });
  for (const std::string& message : messages)
    CHECK_THAT(message, Contains("'layers.1.weight'") && Contains("unit 'layers.1'") &&
                            Contains("inside a call of the module"));
}

TEST_CASE("a full parameter that leaves its unit's call is named with the operation that used it",
          "[threads]") {
  class Leaky final : public nn::Module {
   public:
    Leaky() : layer(4, 4) { register_module("layer", layer); }
    Tensor operator()(const Tensor& x, bool leaks) {
      return call([&] {
        if (leaks) kept = weight_of_layer();
        return layer(x);
      });
    }
    Tensor weight_of_layer() {
      return layer.call([&] {
        Tensor whole = layer.weight.value();
        tanh(whole);
        return whole;
      });
    }
    nn::Linear layer;
    Tensor kept;
  };
  struct Result {
    std::string message, later;
    bool works_again = false;
  };
  const auto results = on_ranks(2, [](World& world) {
    Leaky model;
    shard_each({&model.layer, &model}, {.mesh = DeviceMesh::flat(world)});
    nn::init(model, {1}, world.device());
    const Tensor x = rows_of(1, 0, 2, 4, world.device());
    Result result;
    result.message = thrown_by([&] { model(x, true); });
    model.kept = {};
    const Tensor y = model(x, false);
    y.backward(Tensor::ones(y.shape(), f32, world.device()));
    result.works_again = model.layer.weight.grad().defined();
    return result;
  });
  for (const Result& result : results) {
    CHECK_THAT(result.message,
               Contains("unit 'layer'") && Contains("'layer.weight'") && Contains("'tanh'"));
    CHECK(result.works_again);
  }
}

TEST_CASE("a full parameter in the closure of a custom operation is an error that says Saved",
          "[threads]") {
  // x * weight, of one element each.
  class Product final : public nn::Module {
   public:
    explicit Product(bool saves) : saves_(saves) { register_parameter("weight", weight); }
    Tensor operator()(const Tensor& x) {
      return call([&] {
        const Tensor w = weight.value(), y = raw::mul(x, w);
        if (saves_)
          return autograd::record(
              "product", {x}, y,
              [w = autograd::Saved(w)](const Tensor& g, autograd::Gradients& out) {
                out.set(0, raw::mul(g, w.get()));
              });
        return autograd::record("product", {x}, y, [w](const Tensor& g, autograd::Gradients& out) {
          out.set(0, raw::mul(g, w));
        });
      });
    }
    Parameter weight{{1}, Initializer::constant(3)};

   private:
    bool saves_;
  };
  for (const int ranks : {1, 2})
    for (const bool saves : {false, true})
      for (const auto& [message, gradient] : on_ranks(ranks, [&](World& world) {
             Product model(saves);
             fully_shard(model, {.mesh = DeviceMesh::flat(world),
                                 .reshard_after_forward = Reshard::always});
             nn::init(model, {1}, world.device());
             Tensor x = Tensor::ones({1}, f32, world.device());
             x.require_grad();
             const std::string what = thrown_by([&] { sum(model(x)).backward(); });
             return std::pair(what, x.grad().defined() ? x.grad().item() : 0);
           })) {
        INFO(ranks << " ranks");
        CHECK(gradient == (saves ? 3 : 0));
        if (saves) CHECK(message.empty());
        if (!saves)
          CHECK_THAT(message, Contains("'weight' is still referenced outside its call") &&
                                  Contains("let a custom operation hold it in an autograd::Saved"));
      }
}

TEST_CASE("who uses a shared parameter outside of its unit hears that it is shared") {
  for (const std::string& said : on_ranks(2, [](World& world) {
         Tied<nn::Linear> model;
         shard_each({&model.first, &model}, {.mesh = DeviceMesh::flat(world)});
         nn::init(model, {1}, world.device());
         return thrown_by([&] { model(Tensor::zeros({2, 4}, f32, world.device())); });
       }))
    CHECK_THAT(said, Contains("'first.weight' of unit 'first' was used while the unit is closed") &&
                         Contains("or make one unit around all modules that share it"));
}

TEST_CASE("a full parameter can't be written inside its call") {
  const auto said = on_ranks(2, [](World& world) {
    nn::Linear layer(4, 4);
    fully_shard(layer, {.mesh = DeviceMesh::flat(world)});
    layer.materialize(world.device());
    return thrown_by(
        [&] { layer.call([&] { return raw::fill(layer.weight.value(), 1), Tensor(); }); });
  });
  for (const std::string& what : said) CHECK_THAT(what, Contains("'weight' is read-only"));
}
