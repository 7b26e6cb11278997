// Sharded models whose layers multiply in 8-bit floats: the bits of one rank, whatever is gathered
// again and computed again.
#include "tessera/nn/fp8.hpp"
#include "tessera/nn/llama.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Fp8Run {
  std::vector<double> losses;
  Values parameters;
  bool operator==(const Fp8Run&) const = default;
};

// Three steps of two micro-batches, each rank with the same samples: their mean is exactly what one
// rank computes, since gradients are divided by a power of two.
Fp8Run train_in_fp8(int ranks, Fp8Recipe recipe, Reshard way, const nn::Recompute& recompute,
                    int dimension = 0) {
  return on_ranks(ranks, [&](World& world) {
    nn::Llama model({.dim = 32,
                     .n_layers = 2,
                     .n_heads = 2,
                     .n_kv_heads = 1,
                     .ffn_dim = 48,
                     .vocab_size = 19,
                     .max_seq_len = 16,
                     .recompute = recompute});
    TESSERA_EXPECT(nn::set_fp8(model, recipe).size() == 14, "some layers have no products in fp8");
    const ShardOptions options{.mesh = DeviceMesh::flat(world),
                               .precision = {.param = bf16, .reduce = f32},
                               .reshard_after_forward = way,
                               .shard_placement_fn = [&](const Parameter& p) {
                                 const bool is_layer = p.shape().ndim() == 2 && p.shape()[0] != 19;
                                 return Shard{is_layer ? dimension : 0};
                               }};
    shard_parts(model, options);
    nn::init(model, {3}, world.device());
    optim::AdamW optimizer(model.parameters(), {.lr = 0.01});
    Fp8Run run;
    for (int micro = 0; micro < 6; ++micro) {
      std::vector<std::int32_t> ids;
      for (int i = 0; i < 33; ++i) ids.push_back((i * i + micro * 5) % 19);
      const auto tokens = [&](int from) {
        return Tensor::from(std::vector(ids.begin() + from, ids.begin() + from + 32), {2, 16},
                            world.device());
      };
      const Tensor loss = model.loss(tokens(0), tokens(1));
      run.losses.push_back(loss.item());
      loss.backward();
      if (micro % 2 == 0) continue;
      optimizer.step();
      optimizer.zero_grad();
    }
    run.parameters = full_values(model);
    return run;
  })[0];
}

}  // namespace

TEST_CASE("training in fp8 has the bits of one rank on any number of them", "[threads]") {
  for (const Fp8Recipe recipe : {Fp8Recipe::tensorwise, Fp8Recipe::blockwise}) {
    const Fp8Run one = train_in_fp8(1, recipe, Reshard::automatic, nn::Recompute::none);
    CHECK(one.losses.back() < one.losses.front());
    CHECK(one == train_in_fp8(2, recipe, Reshard::always, nn::Recompute::none));
    CHECK(one == train_in_fp8(2, recipe, Reshard::automatic, nn::Recompute::blocks));
    CHECK(one == train_in_fp8(4, recipe, Reshard::never, nn::Recompute::none));
    // Where shards are of columns no product can write a gradient; it is made in f32 all the same.
    CHECK(one == train_in_fp8(2, recipe, Reshard::automatic, nn::Recompute::none, 1));
  }
}
