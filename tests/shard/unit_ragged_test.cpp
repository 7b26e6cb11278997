// Ragged shards: rows dealt by blocks, which no rank cuts, gathered and reduced by counts.
#include "tessera/autograd/recompute.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/distributed/state.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/scaled_training.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// 7 and 5 rows of matrices in blocks of 2 and 3, a table in single rows that only some ranks have,
// and biases that are cut evenly beside them.
struct RaggedNet final : Scaled {
  RaggedNet() : Scaled(6, 7, {2, 5}) {
    up.weight.set_block_rows(2);
    down.weight.set_block_rows(3);
    extra.set_block_rows(1);
  }
};

// Weights after three steps, and what each rank has of the ragged ones.
struct RaggedRun {
  Values weights;
  std::vector<std::int64_t> rows;
};

RaggedRun train_ragged(const World& world, const ScaledWay& way, std::uint64_t seed) {
  RaggedNet net;
  train_scaled(net, world, way, seed);
  return {full_values(net),
          {net.up.weight.spec().owned().size(), net.down.weight.spec().owned().size(),
           net.extra.spec().owned().size()}};
}

}  // namespace

TEST_CASE("blocks are dealt in rank order, whole, and as evenly as blocks go", "[ragged]") {
  for (int world = 1; world <= 5; ++world)
    for (std::int64_t rows = 1; rows <= 14; ++rows)
      for (std::int64_t block = 1; block <= rows; ++block)
        for (int from = 0; from < world; ++from) {
          INFO(rows << " rows in blocks of " << block << " over " << world << " from " << from);
          std::vector<std::int64_t> blocks;
          std::int64_t at = 0;
          for (int rank = 0; rank < world; ++rank) {
            ShardSpec spec{{rows, 3}, world, rank};
            spec.block_rows = block;
            spec.extra_from = from;
            const RowRange own = spec.owned();
            REQUIRE(own.begin == at);
            REQUIRE(spec.chunk_begin() == 3 * at);
            REQUIRE(spec.chunk_numel() == 3 * own.size());
            REQUIRE(spec.padded_numel() == 3 * rows);
            REQUIRE((own.end % block == 0 || own.end == rows));
            REQUIRE(own.size() <= spec.most_rows());
            at = own.end;
            blocks.push_back(ceil_div(own.size(), block));
          }
          REQUIRE(at == rows);
          // Those with one more than the others are from `from` on, around.
          const std::int64_t all = ceil_div(rows, block), extra = all % world;
          for (int i = 0; i < world; ++i)
            REQUIRE(blocks[static_cast<std::size_t>((from + i) % world)] ==
                    all / world + (i < extra ? 1 : 0));
        }
}

TEST_CASE("a unit deals blocks on where its previous parameter ended", "[ragged]") {
  struct Three final : nn::Module {
    Three() {
      register_parameter("a", a);
      register_parameter("b", b);
      register_parameter("c", c);
      a.set_block_rows(1);
      b.set_block_rows(2);
      c.set_block_rows(1);
    }
    Parameter a{{5, 3}, Initializer::constant(1)}, b{{9, 3}, Initializer::constant(1)},
        c{{6, 3}, Initializer::constant(1)};
  };
  for (const int ranks : {2, 3, 4, 5, 7}) {
    std::vector<std::int64_t> blocks;  // of each rank
    for (int rank = 0; rank < ranks; ++rank) {
      const World world = World::emulated(rank, ranks);
      Three three;
      fully_shard(three, {.mesh = DeviceMesh::flat(world)});
      blocks.push_back(0);
      for (const Parameter& p : three.parameters())
        blocks.back() += ceil_div(p.spec().owned().size(), p.spec().block_rows);
    }
    INFO(ranks << " ranks");
    const auto [least, most] = std::ranges::minmax_element(blocks);
    CHECK(*most - *least <= 1);
  }
}

// Weights of a step of SGD are positive ones less a thousandth of gradients that are as near as
// kRounding, so they are nearer.
TEST_CASE("ragged shards are trained as on one rank", "[threads][ragged]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const MixedPrecision bf16_wire{.param = bf16, .reduce = bf16};
  const ScaledWay ways[] = {{},
                            {.reshard = Reshard::always, .is_recomputed = true},
                            {.reshard = Reshard::never, .accumulates = true},
                            {.offload = Offload::cpu, .accumulates = true}};
  for (const ScaledWay& way : ways) {
    const Values one =
        on_ranks(1, [&](World& world) { return train_ragged(world, way, seed); })[0].weights;
    for (const int ranks : {2, 3, 4}) {
      INFO(ranks << " ranks, reshard " << way.reshard);
      const auto all =
          on_ranks(ranks, [&](World& world) { return train_ragged(world, way, seed); });
      for (const RaggedRun& rank : all) CHECK(distance(one, rank.weights) < kRounding);
      for (std::size_t p = 0; p < 3; ++p) {
        std::int64_t rows = 0;
        for (const RaggedRun& rank : all) rows += rank.rows[p];
        CHECK(rows == std::vector<std::int64_t>{7, 5, 2}[p]);
      }
    }
  }
  // Replicas; and in 16 bits, whose sums tests/promises bounds, the same bits on every rank each
  // time.
  ScaledWay hybrid{.replicas = 2};
  const Values one =
      on_ranks(1, [&](World& world) { return train_ragged(world, {}, seed); })[0].weights;
  for (const RaggedRun& rank :
       on_ranks(4, [&](World& world) { return train_ragged(world, hybrid, seed); }))
    CHECK(distance(one, rank.weights) < kRounding);
  const ScaledWay narrow{.precision = bf16_wire};
  const auto first = on_ranks(3, [&](World& world) { return train_ragged(world, narrow, seed); });
  const auto second = on_ranks(3, [&](World& world) { return train_ragged(world, narrow, seed); });
  for (std::size_t rank = 0; rank < 3; ++rank)
    CHECK(same_bits(first[0].weights, second[rank].weights));
}

TEST_CASE("what ragged shards move and hold has no padding", "[ragged]") {
  struct Table : nn::Module {
    Table() : rows({9, 64}, Initializer::constant(1)) {
      register_parameter("rows", rows);
      rows.set_block_rows(4);  // 4, 4 and 1
    }
    Parameter rows;
  };
  struct Seen final : Observer {
    void launched(StreamId, Tick, const Op& op) override {
      if (op.cost.wire_bytes > 0) wire[op.name] += op.cost.wire_bytes;
    }
    std::map<std::string, double> wire;
  };
  for (const int rank : {0, 1, 2, 3}) {
    const World world = World::emulated(rank, 4, {.executor = ExecutorKind::virtual_});
    Table table;
    fully_shard(table, {.mesh = DeviceMesh::flat(world), .reshard_after_forward = Reshard::always});
    nn::init(table, {1}, world.device());
    CHECK(table.rows.shard().shape() == Shape{std::vector<std::int64_t>{4, 4, 1, 0}[rank], 64});
    const ShardPlan plan = shard_plan(table);
    CHECK(plan.units[0].shard_numel == 64 * table.rows.spec().owned().size());
    Seen seen;
    world.device().context().add_observer(seen);
    table.call([&] { return sum(table.rows.value()); }).backward();
    world.device().context().remove_observer(seen);
    // Of the whole, three quarters are a peer's on the average, and as much is sent.
    CHECK(seen.wire.at("all_gather (root)") == 2 * 2 * 0.75 * 9 * 64 * 4);
    CHECK(seen.wire.at("reduce_scatter (root)") == 2 * 0.75 * (9 * 64 * 4 + 4 * 4));
  }
}

TEST_CASE("handles and state of ragged shards say their rows, and go to other cuts and back",
          "[threads][ragged]") {
  struct Found {
    std::string printed, refused;
    std::vector<float> full, even, back;
  };
  const auto found = on_ranks(3, [](World& world) {
    const DeviceMesh mesh = DeviceMesh::flat(world);
    RaggedNet net;
    net.shard({.mesh = mesh});
    nn::init(net, {5}, world.device());
    const DistributedTensor weight = net.down.weight.distributed();
    Found f;
    f.printed = weight.to_string();
    f.full = weight.full().to_vector<float>();
    const DistributedTensor even = weight.redistribute({Shard{}});
    f.even = even.local().to_vector<float>();
    f.back = even.redistribute(weight.placements()).local().to_vector<float>();
    RaggedNet other;
    other.down.weight.set_block_rows(1);
    other.shard({.mesh = mesh});
    nn::init(other, {6}, world.device());
    f.refused = thrown_by([&] { other.load(net.state_dict({.form = StateForm::view})); });
    other.load(net.state_dict({.form = StateForm::full}));
    if (!same_bits(full_values(net), full_values(other))) f.printed = "not loaded";
    return f;
  });
  CHECK(found[0].printed ==
        "f32 [5, 7], RaggedShard(0, blocks of 3) over dp_shard 3; rows 0 to 2 here");
  CHECK(found[1].printed ==
        "f32 [5, 7], RaggedShard(0, blocks of 3) over dp_shard 3; rows 3 to 4 here");
  CHECK(found[2].printed == "f32 [5, 7], RaggedShard(0, blocks of 3) over dp_shard 3; no row here");
  const std::vector<float>& full = found[0].full;
  const auto rows = [&](std::ptrdiff_t begin, std::ptrdiff_t end) {
    return std::vector<float>(full.begin() + 7 * begin, full.begin() + 7 * end);
  };
  CHECK(found[1].full == full);
  CHECK(found[0].even == rows(0, 2));
  CHECK(found[2].even == rows(4, 5));
  CHECK(found[0].back == rows(0, 3));
  CHECK(found[1].back == rows(3, 5));
  CHECK(found[2].back.empty());
  CHECK_THAT(found[1].refused, Contains("down.weight") && Contains("other blocks"));
}

TEST_CASE(
    "blocks that a parameter can't have, or that go with nothing else, are refused in one line",
    "[ragged]") {
  const World world = World::emulated(1, 4, {.executor = ExecutorKind::virtual_});
  const DeviceMesh mesh = DeviceMesh::flat(world);
  RaggedNet net;
  CHECK_THAT(thrown_by([&] { net.up.weight.set_block_rows(8); }),
             Contains("blocks of 8 rows for parameter 'weight' of shape [7, 6]; give no more"));
  CHECK_THAT(thrown_by([&] { net.up.weight.set_block_rows(-1); }), Contains("blocks of -1"));
  const Parameter scalar(Shape{}, Initializer::constant(1));
  scalar.set_block_rows(0);
  CHECK_THAT(thrown_by([&] { scalar.set_block_rows(1); }), Contains("parameter of shape []; give"));
  CHECK_THAT(thrown_by([&] {
               fully_shard(net.up, {.mesh = mesh, .reshard_after_forward = Reshard::to(2)});
             }),
             Contains("'weight' is sharded by blocks of 2 rows") && Contains("Reshard::always"));
  CHECK_THAT(thrown_by([&] { net.up.weight.set_gather_transform(gather_in_e4m3()); }),
             Contains("'weight' of shape [7, 6] is sharded by blocks of 2 rows") &&
                 Contains("leave one of the two out"));
  nn::Linear encoded(4, 4);
  encoded.weight.set_gather_transform(gather_in_e4m3());
  CHECK_THAT(thrown_by([&] { encoded.weight.set_block_rows(2); }),
             Contains("parameter 'weight' of shape [4, 4] has a gather transform") &&
                 Contains("leave one of the two out"));
  nn::Embedding table(5, 4);  // streamed
  table.weight.set_block_rows(2);
  CHECK_THAT(thrown_by([&] { fully_shard(table, {.mesh = mesh}); }),
             Contains("the module of 'weight': parameter 'weight' is streamed, in even slices; "
                      "leave set_block_rows(2) out"));
  encoded.weight.set_block_rows(0);
  CHECK_THAT(thrown_by([&] {
               DistributedTensor(Tensor::zeros({2, 3}, f32, world.device()), {8, 3}, mesh,
                                 {RaggedShard{2, 4}});
             }),
             Contains("rank 4") && Contains("0 to 3"));
  fully_shard(net.up, {.mesh = mesh});
  CHECK_THAT(thrown_by([&] { net.up.weight.set_block_rows(1); }),
             Contains("belongs to unit") && Contains("before fully_shard"));
  CHECK_THAT(thrown_by([&] { set_reshard_after_forward(net.up, Reshard::to(2)); }),
             Contains("set_reshard_after_forward") && Contains("'weight'"));
}

TEST_CASE("a rank without rows goes back with its peers from a step that failed",
          "[threads][ragged]") {
  struct Net final : nn::Module {
    Net() {
      register_parameter("p", p);
      p.set_block_rows(4);
    }
    Parameter p{{4}, Initializer::constant(2)};
  };
  struct Found {
    bool is_consistent;
    std::int64_t steps;
  };
  for (const Found& found : on_ranks(2, [](World& world) {
         Net net;
         fully_shard(net, {.mesh = DeviceMesh::flat(world)});
         nn::init(net, {1}, world.device());
         optim::SGD optimizer(net.parameters(), {.lr = 0.1});
         std::string cause;
         try {
           world.barrier();
           net.call([&] {
                if (world.rank() == 0) throw std::runtime_error("stopped");
                return sum(net.p.value());
              })
               .backward();
           optimizer.step();  // of rank 1, which has no row
           world.barrier();
         } catch (const std::exception& error) {
           cause = error.what();
         }
         const bool is_consistent = reset(net, cause).parameters_are_consistent;
         return Found{is_consistent, optimizer.steps()};
       })) {
    CHECK(found.is_consistent);
    CHECK(found.steps == 0);
  }
}
