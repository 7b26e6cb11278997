// Dtypes at the border of a unit: of what goes into a call, and of what comes out of it.
#include <utility>
#include <vector>

#include "tessera/autograd/recompute.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

struct TypedRun {
  DType between = f64, out = f64;
  std::vector<float> y;
  Values gradients;  // of the parameters, and of the input
};

// The first layer computes in f16 and gives f32, the second in bf16.
TypedRun run_typed(World& world, bool casts, bool recomputes) {
  const DeviceMesh mesh = DeviceMesh::flat(world);
  const auto precision = [&](DType param) {
    return MixedPrecision{.param = param, .cast_forward_inputs = casts};
  };
  Mlp model({5, 4, 3});
  MixedPrecision first = precision(f16);
  if (casts) first.output = f32;
  fully_shard(model.layers[0], {.mesh = mesh, .precision = first});
  fully_shard(model.layers[1], {.mesh = mesh, .precision = precision(bf16)});
  fully_shard(model, {.mesh = mesh});
  nn::init(model, {7}, world.device());
  Tensor x =
      Tensor::normal({3, 5}, 0, 1, static_cast<std::uint64_t>(world.rank()), f32, world.device());
  x.require_grad();
  TypedRun run;
  const auto forward = [&](const Tensor& in) {
    return model.call(
        [&](const Tensor& given) {
          const Tensor h =
              casts ? model.layers[0](given) : cast(model.layers[0](cast(given, f16)), f32);
          run.between = h.dtype();
          return casts ? model.layers[1](h) : model.layers[1](cast(h, bf16));
        },
        in);
  };
  const Tensor y = recomputes ? recompute(forward, x) : forward(x);
  run.out = y.dtype();
  run.y = cast(y.detach(), f32).to_vector<float>();
  mean(cast(y, f32) * 1.5).backward();
  run.gradients = shard_gradients(model);
  run.gradients["x"] = x.grad().to_vector<float>();
  return run;
}

}  // namespace

TEST_CASE("floating inputs of a unit become its dtype, and its outputs what it says",
          "[threads][fsdp2-090][fsdp2-091][fsdp2-092]") {
  for (const int ranks : {1, 2})
    for (const bool recomputes : {false, true}) {
      INFO(ranks << " ranks, recomputed " << recomputes);
      const auto of = [&](bool casts) {
        return on_ranks(ranks, [&](World& world) { return run_typed(world, casts, recomputes); });
      };
      const std::vector<TypedRun> ours = of(true), by_hand = of(false);
      for (std::size_t rank = 0; rank < ours.size(); ++rank) {
        CHECK(ours[rank].between == f32);
        CHECK(ours[rank].out == bf16);
        CHECK(same_bits(ours[rank].y, by_hand[rank].y));
        CHECK(same_bits(ours[rank].gradients, by_hand[rank].gradients));
      }
    }
}

TEST_CASE("a unit that casts nothing refuses another dtype than its own",
          "[fsdp2-090][fsdp2-091]") {
  const World world = World::single({});
  Mlp model({5, 4, 3});
  fully_shard(model, {.mesh = DeviceMesh::flat(world),
                      .precision = {.param = bf16, .cast_forward_inputs = false}});
  nn::init(model, {7}, world.device());
  CHECK_THAT(thrown_by([&] { model(Tensor::ones({2, 5}, f32, world.device())); }),
             Contains("linear") && Contains("bf16") && Contains("f32"));
  CHECK_THAT(thrown_by([&] {
               Mlp other({5, 4, 3});
               fully_shard(other, {.mesh = DeviceMesh::flat(world), .precision = {.output = i32}});
             }),
             Contains("precision.output is i32"));
}

// A rank's part of the mean is half of the gradient, and f16 has 11 bits down to 2^-14.
TEST_CASE("a wire of f16 keeps the bits of what is above 6e-5 times the number of ranks",
          "[threads]") {
  constexpr float kLeast = 0x1p-13f * (1 + 0x1p-10f);
  for (const DType reduce : {f16, f32})
    for (const float gradient : {kLeast, kLeast / 2})
      for (const float found : on_ranks(2, [&](World& world) {
             nn::Linear layer(1, 2, {.bias = false});
             fully_shard(layer, {.mesh = DeviceMesh::flat(world),
                                 .precision = {.param = f16, .reduce = reduce}});
             nn::init(layer, {1}, world.device());
             sum(layer(Tensor::full({1, 1}, gradient, f16, world.device()))).backward();
             return layer.weight.grad().to_vector<float>()[0];
           }))
        CHECK((found == gradient) == (reduce == f32 || gradient == kLeast));
}

TEST_CASE("casts reach what a call passes on in pairs and vectors, and floating tensors alone",
          "[fsdp2-089]") {
  struct Mixed : nn::Module {
    Mixed() { register_parameter("p", p); }
    Parameter p{{2}, Initializer::constant(1)};
  } model;
  const World world = World::single({});
  fully_shard(model, {.mesh = DeviceMesh::flat(world), .precision = {.param = f16, .output = f32}});
  nn::init(model, {1}, world.device());
  const Device& device = world.device();
  const Tensor ids = Tensor::arange(2, i64, device), half = Tensor::ones({2}, f16, device),
               wide = Tensor::ones({2}, f64, device);
  using Inputs = std::pair<Tensor, std::vector<Tensor>>;
  const auto [sum, kept] = model.call(
      [&](const Inputs& given, const Tensor& same, int count) {
        CHECK(given.first.dtype() == i64);
        CHECK(given.second.at(0).dtype() == f16);
        CHECK(given.second.at(1).dtype() == f16);
        return std::pair(given.second.at(0) * count + same * model.p, given.first);
      },
      Inputs(ids, {wide, half}), half, 3);
  CHECK(sum.dtype() == f32);
  CHECK(sum.to_vector<float>() == std::vector<float>{4, 4});
  CHECK(kept.dtype() == i64);
  CHECK(wide.dtype() == f64);  // the caller's stays

  // Nothing holds an input that is of the dtype already, so that it can be given away.
  model.call(
      [&](const Tensor& given) {
        CHECK(&given == &half);
        return given;
      },
      half);
}
