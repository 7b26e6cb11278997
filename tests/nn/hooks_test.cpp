// Hooks of users around a module's call: what they see, what they replace, in which order.
#include "tessera/nn/forward_hooks.hpp"

#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/dropout.hpp"
#include "tessera/nn/llama.hpp"
#include "tests/nn/helpers.hpp"
#include "tests/support/launches.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// The input twice over.
struct Twice : nn::Module {
  Tensor operator()(const Tensor& x) {
    return call([&](const Tensor& in) { return in + in; }, x);
  }
};

// The engine's place.
struct LoggingHook : nn::ModuleHook {
  explicit LoggingHook(std::vector<std::string>& to) : log(to) {}
  void before_call(nn::Module&) override { log.push_back("open"); }
  void after_call(nn::Module&) override { log.push_back("close"); }
  void abandon_call(nn::Module&) noexcept override { log.push_back("abandon"); }
  void materialize(const Device&) override {}
  std::vector<std::string>& log;
};

Tensor scalar(double value) { return Tensor::full({}, value, f32, Device::cpu()); }

}  // namespace

TEST_CASE("hooks see and replace what goes into a call and what comes out", "[nn]") {
  Twice twice;
  auto before = twice.register_forward_pre_hook([](nn::Module&, const nn::CallTensors& in) {
    REQUIRE(in.size() == 1);
    in[0] = in[0] + 1.0;
  });
  const Tensor x = scalar(3);
  CHECK(twice(x).item() == 8);
  CHECK(x.item() == 3);  // the caller's stays
  double seen = 0;
  auto after = twice.register_forward_hook(
      [&](nn::Module& module, const nn::CallTensors& in, const nn::CallTensors& out) {
        CHECK(&module == &twice);
        seen = in[0].item();
        out[0] = out[0] * 10.0;
      });
  CHECK(twice(x).item() == 80);
  CHECK(seen == 4);
  before.remove();
  CHECK(twice(x).item() == 60);
  CHECK(seen == 3);
  after.remove();
  after.remove();
  CHECK(twice(x).item() == 6);
}

// Small whole numbers, of which every sum is exact in any order.
TEST_CASE("a layer adds to a residual in its product, where nobody looks at what it gives",
          "[nn]") {
  Draw draw;
  nn::Linear layer(8, 4, draw.device);
  nn::GeluMlp gelu(4, 8, draw.device);
  nn::SwigluMlp swiglu(4, 8, draw.device);
  const auto whole = [&](const Shape& shape) {
    const std::vector<std::int32_t> ids = draw.ids(shape.numel(), 7);
    return Tensor::from(std::vector<float>(ids.begin(), ids.end()), shape, draw.device);
  };
  layer.weight.assign(whole({4, 8}));
  layer.bias.assign(whole({4}));
  const Tensor x = whole({2, 3, 8}), residual = whole({2, 3, 4});
  const auto additions_of = [&](const auto& f) {
    const Launches launches(draw.device);
    f();
    draw.device.synchronize();
    return launches.of("add");
  };
  Tensor sum, seen;
  CHECK(additions_of([&] { sum = layer.product.add_to(residual, x); }) == 0);
  const std::vector<float> expected = (residual + layer(x)).to_vector<float>();
  CHECK(sum.to_vector<float>() == expected);
  CHECK(additions_of([&] { gelu.add_to(residual, residual); }) == 0);
  CHECK(additions_of([&] { swiglu.add_to(residual, residual); }) == 0);

  const auto look = [&](nn::Module& module) {
    return module.register_forward_hook(
        [&](nn::Module&, const nn::CallTensors&, const nn::CallTensors& out) { seen = out[0]; });
  };
  const auto of_layer = look(layer), of_mlp = look(gelu), of_last = look(swiglu.down_proj);
  CHECK(additions_of([&] { sum = layer.product.add_to(residual, x); }) == 1);
  CHECK(sum.to_vector<float>() == expected);
  CHECK(seen.to_vector<float>() == layer(x).to_vector<float>());
  CHECK(additions_of([&] { gelu.add_to(residual, residual); }) == 1);
  CHECK(additions_of([&] { swiglu.add_to(residual, residual); }) == 1);
  CHECK_THROWS_WITH(layer.product.add_to(raw::cast(residual, bf16), x),
                    Catch::Contains("bf16 and f32"));
  nn::Linear alone(8, 4, draw.device);
  CHECK(alone.product.add_to(whole({4}), x).shape() == residual.shape());  // as + broadcasts it
}

TEST_CASE("hooks run in their order, within the scope that the engine opens", "[nn]") {
  std::vector<std::string> log;
  Twice twice;
  const auto note = [&](const char* what) {
    return [&log, what](nn::Module&, const auto&...) { log.push_back(what); };
  };
  twice.register_forward_hook(note("after 1"));
  twice.register_forward_pre_hook(note("before 1"));
  twice.set_hook(std::make_shared<LoggingHook>(log));
  twice.register_forward_pre_hook(note("before 2"));
  twice.register_forward_hook(note("after 2"));
  twice(scalar(1));
  CHECK(log ==
        std::vector<std::string>{"open", "before 1", "before 2", "after 1", "after 2", "close"});
}

TEST_CASE("an exception of a hook abandons the call", "[nn]") {
  std::vector<std::string> log;
  Twice twice;
  twice.set_hook(std::make_shared<LoggingHook>(log));
  auto hook = twice.register_forward_pre_hook(
      [](nn::Module&, const nn::CallTensors&) { throw ContractError("no"); });
  CHECK_THROWS_WITH(twice(scalar(1)), Catch::Contains("no"));
  CHECK(log == std::vector<std::string>{"open", "abandon"});
  hook.remove();
  CHECK(twice(scalar(1)).item() == 2);
}

TEST_CASE("a hook may add and remove hooks, and call its module", "[nn]") {
  Twice twice;
  int added = 0, calls = 0;
  nn::HookHandle own;
  own = twice.register_forward_pre_hook([&](nn::Module&, const nn::CallTensors&) {
    ++calls;
    own.remove();
    twice.register_forward_pre_hook([&](nn::Module&, const nn::CallTensors&) { ++added; });
    if (calls == 1) CHECK(twice(scalar(2)).item() == 4);  // with the one that it has added
  });
  CHECK(twice(scalar(1)).item() == 2);
  CHECK(calls == 1);
  CHECK(added == 1);
  twice(scalar(1));
  CHECK(added == 2);
}

TEST_CASE("a handle outlives its module", "[nn]") {
  nn::HookHandle handle;
  {
    Twice twice;
    handle = twice.register_forward_pre_hook([](nn::Module&, const nn::CallTensors&) {});
  }
  CHECK_NOTHROW(handle.remove());
  CHECK_NOTHROW(nn::HookHandle().remove());
}

TEST_CASE("tensors are found in pairs, vectors, optionals and the layers' own types",
          "[nn][fsdp2-089]") {
  struct Many : nn::Module {
    auto run(const std::vector<Tensor>& xs, const std::optional<Tensor>& y, int n) {
      return call([](const auto& all, const auto& extra, int) { return std::pair(all[0], extra); },
                  xs, y, n);
    }
  } many;
  std::vector<std::size_t> sizes;
  many.register_forward_hook(
      [&](nn::Module&, const nn::CallTensors& in, const nn::CallTensors& out) {
        sizes = {in.size(), out.size()};
        CHECK_THROWS_WITH(in[9], Catch::Contains("asks for tensor 9, but its call has"));
      });
  many.run({scalar(1), scalar(2)}, scalar(3), 4);
  CHECK(sizes == std::vector<std::size_t>{3, 2});
  many.run({scalar(1)}, std::nullopt, 4);
  CHECK(sizes == std::vector<std::size_t>{1, 1});
  nn::Linear linear(2, 2, Device::cpu());
  std::size_t activated = 0;
  linear.register_forward_hook([&](nn::Module&, const nn::CallTensors&,
                                   const nn::CallTensors& out) { activated = out.size(); });
  linear.product.gelu(Tensor::ones({1, 2}, f32, linear.weight.shard().device()));
  CHECK(activated == 2);
}

TEST_CASE("every layer of a model shows its hooks one input and its output", "[nn]") {
  Draw draw;
  nn::Llama model({.dim = 8, .n_layers = 2, .n_heads = 2, .vocab_size = 7}, draw.device);
  nn::init(model, {1});
  std::map<std::string, int> calls;
  for (const auto& [name, module] : model.named_modules())
    module->register_forward_hook(
        [&, name = name](nn::Module&, const nn::CallTensors& in, const nn::CallTensors& out) {
          // The sum of two and its norm moves what it adds, and shows what comes out.
          CHECK((in.size() == 1 || name.find("post_attention") != std::string::npos));
          CHECK(out.size() >= 1);
          ++calls[name];
        });
  model(draw.tokens({1, 3}, 7));
  std::size_t containers = 0;
  for (const auto& [name, module] : model.named_modules())
    containers += dynamic_cast<nn::ModuleList<nn::LlamaBlock>*>(module) || name == "model";
  CHECK(calls.size() == model.named_modules().size() - containers);
  for (const auto& [name, times] : calls) CHECK(times == 1);
}

TEST_CASE("a hook of dropout sees it in training and in evaluation", "[nn]") {
  nn::Dropout drop(0.5);
  int calls = 0;
  drop.register_forward_hook(
      [&](nn::Module&, const nn::CallTensors&, const nn::CallTensors&) { ++calls; });
  drop(scalar(1));
  drop.eval();
  CHECK(drop(scalar(1)).item() == 1);
  CHECK(calls == 2);
}

TEST_CASE("gradients flow through what a hook has put in place", "[nn]") {
  const Device device = Device::cpu();
  nn::Linear linear(1, 1, {.bias = false}, device);
  set(linear.weight, {3});
  linear.register_forward_hook([](nn::Module&, const nn::CallTensors&, const nn::CallTensors& out) {
    out[0] = out[0] * 5.0;
  });
  linear(Tensor::full({1, 1}, 2, f32, device)).backward();
  CHECK(linear.weight.grad().to_vector<float>() == std::vector<float>{10});
}

TEST_CASE("a call that is recomputed calls its hooks again", "[nn]") {
  const Device device = Device::cpu();
  nn::Linear linear(1, 1, {.bias = false}, device);
  int calls = 0;
  linear.register_forward_pre_hook([&](nn::Module&, const nn::CallTensors&) { ++calls; });
  Tensor x = Tensor::ones({1, 1}, f32, device);
  x.require_grad();
  const Tensor y = recompute([&](const Tensor& in) { return linear(in); }, x);
  CHECK(calls == 1);
  y.backward();
  CHECK(calls == 2);
}
