// FSDP2's tests of mixed precision that unit_precision_test has not: where a unit casts, what a
// norm computes in 16 bits, and how many bits a gradient keeps.
#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/norm.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("each module of a list casts what goes into it, also what comes from another",
          "[fsdp2-059]") {
  // The value between the two is f32.
  struct Two final : nn::Module {
    Two() { register_modules("a", a, "b", b); }
    Tensor operator()(const Tensor& x) {
      return call([&] { return b(cast(a(x), f32) * 1.5); });
    }
    nn::Linear a{4, 4}, b{4, 3};
  } model;
  const World world = World::single();
  const ShardOptions options{.mesh = DeviceMesh::flat(world)};
  fully_shard({&model.a, &model.b}, {.mesh = options.mesh, .precision = {.param = bf16}});
  fully_shard(model, options);
  nn::init(model, {1}, world.device());
  const Tensor y = model(rows_of(1, 0, 2, 4, world.device()));
  CHECK(y.dtype() == bf16);
  mean(cast(y, f32)).backward();
  CHECK(model.a.weight.grad().dtype() == f32);
}

TEST_CASE("norms in 16 bits are those of rounded weights and inputs, and train",
          "[threads][fsdp2-093]") {
  struct Norms final : nn::Module {
    Norms() {
      for (const Parameter& p : {layer.weight, layer.bias, rms.weight})
        p.set_initializer(Initializer::normal(1, 0.3));
      register_modules("layer", layer, "rms", rms);
    }
    Tensor operator()(const Tensor& x) {
      return call([&](const Tensor& in) { return rms(layer(in)); }, x);
    }
    nn::LayerNorm layer{6, 1e-5};
    nn::RMSNorm rms{6, 1e-5};
  };
  for (const DType dtype : {bf16, f16})
    for (const int ranks : {1, 2, 4})
      for (const auto& [ours, by_hand, gradients] : on_ranks(ranks, [&](World& world) {
             const Tensor x = rows_of(1, world.rank() * 4, 4, 6, world.device());
             const auto rounded = [&](const auto& t) { return cast(Tensor(t), dtype); };
             Norms model, plain;
             fully_shard(model, {.mesh = DeviceMesh::flat(world), .precision = {.param = dtype}});
             for (Norms* const norms : {&model, &plain}) nn::init(*norms, {1}, world.device());
             const Tensor y = model(x);
             mean_square(cast(y, f32)).backward();
             const Tensor reference = rms_norm(layer_norm(rounded(x), rounded(plain.layer.weight),
                                                          rounded(plain.layer.bias), 1e-5),
                                               rounded(plain.rms.weight), 1e-5);
             const auto values = [](const Tensor& t) {
               return raw::cast(t.detach(), f32).to_vector<float>();
             };
             return std::tuple(values(y), values(reference), shard_gradients(model));
           })) {
        CHECK(same_bits(ours, by_hand));
        CHECK(gradients.size() == 3);
        for (const auto& [name, g] : gradients)
          for (const float v : g) CHECK((std::isfinite(v) && v != 0));
      }
}

TEST_CASE("what was frozen in its first forward is reduced in f32 when it is thawed",
          "[threads][fsdp2-087]") {
  const auto run = [](bool begins_frozen) {
    return on_ranks(2, [&](World& world) {
      Stack model({5, 4, 3});
      model.shard({.mesh = DeviceMesh::flat(world), .precision = {.param = bf16}});
      nn::init(model, {1}, world.device());
      const Tensor x = rows_of(1, world.rank() * 4, 4, 5, world.device(), bf16);
      if (begins_frozen) {
        model.freeze();
        {
          const NoGradGuard no_gradient;
          model(x);
        }
        model.set_trainable(true);
      }
      mean_square(model(x)).backward();
      return shard_gradients(model);
    });
  };
  const auto thawed = run(true), ever = run(false);
  for (std::size_t rank = 0; rank < ever.size(); ++rank) {
    CHECK(ever[rank].size() == 6);
    CHECK(same_bits(thawed[rank], ever[rank]));
  }
}

TEST_CASE("gradients of bf16 products keep the bits of f32, over micro-batches and ranks",
          "[threads][fsdp2-085][fsdp2-088][fsdp2-095]") {
  // Each gradient is 255 + 2 = 257, which bf16 has not, nor its halves; one rank reduces nothing.
  struct Counted final : nn::Module {
    Counted() { register_modules("layer", layer, "unused", unused); }
    Tensor operator()(const Tensor& x, bool recomputes) {
      const auto body = [this](const Tensor& in) { return layer(in); };
      return call([&](const Tensor& in) { return recomputes ? recompute(body, in) : body(in); }, x);
    }
    nn::Linear layer{3, 4, nn::LinearOptions{.bias = false}},
        unused{3, 4, nn::LinearOptions{.bias = false}};
  };
  struct Row {
    int ranks, replicas;
    bool reduces_last;
  };
  for (const DType reduce : {f32, bf16})
    for (const bool recomputes : {false, true})
      for (const auto& [ranks, replicas, reduces_last] :
           {Row{1, 1, false}, {2, 1, false}, {2, 1, true}, {4, 2, false}, {4, 2, true}}) {
        INFO("reduced in " << reduce << (reduces_last ? " behind the last" : "") << ", recomputes "
                           << recomputes << ", " << ranks << " ranks, replicas " << replicas);
        for (const Values& gradients :
             on_ranks(ranks, [&, replicas = replicas, reduces_last = reduces_last](World& world) {
               Counted model;
               fully_shard(model, {.mesh = mesh_of(world, replicas),
                                   .precision = {.param = bf16, .reduce = reduce}});
               nn::init(model, {1}, world.device());
               const Tensor x =
                   Tensor::from(std::vector<float>{255, 255, 255, 2, 2, 2}, {2, 3}, world.device());
               for (int micro = 0; micro < 4; ++micro) {
                 if (reduces_last) set_requires_gradient_sync(model, micro == 3);
                 sum(cast(model(x, recomputes), f32)).backward();
               }
               return shard_gradients(model);
             })) {
          for (const float g : gradients.at("layer.weight"))
            CHECK((g == 4 * 257) == (reduce == f32 || ranks == 1));
          for (const float g : gradients.at("unused.weight")) CHECK(g == 0);
        }
      }
}
