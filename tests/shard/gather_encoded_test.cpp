// Gather transforms: parameters that travel in another form. What is decoded is the same on every
// mesh, and training is that of what is decoded; its memory is planned.
#include <algorithm>
#include <bit>
#include <stdexcept>

#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/shard/gathered.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

Tensor flattened(const Tensor& x) { return raw::reshape(x, {x.numel()}); }

// The upper 16 bits of each f32, and what is left of it: together they are it, exactly.
struct InTwo final : GatherTransform {
  const char* name() const noexcept override { return "in two"; }
  std::vector<Part> parts(const ShardSpec& spec) const override {
    return {{bf16, spec.chunk_numel()}, {f32, spec.chunk_numel()}};
  }
  void encode(std::span<const Tensor> parts, const Tensor& chunk) const override {
    const Tensor high = raw::cast(flattened(chunk), bf16);
    raw::copy_into(parts[0], high);
    raw::copy_into(parts[1], raw::binary(raw::Binary::sub, flattened(chunk), raw::cast(high, f32)));
  }
  void decode(const Tensor& full, std::span<const Tensor> parts) const override {
    raw::copy_into(flattened(full), flattened(raw::add(raw::cast(parts[0], f32), parts[1])));
  }
};

// Values in bf16, whatever the dtype of compute is. Says of which world it was asked.
struct InBf16 final : GatherTransform {
  const char* name() const noexcept override { return "in bf16"; }
  std::vector<Part> parts(const ShardSpec& spec) const override {
    TESSERA_EXPECT(spec.world == world || spec.world == 1, "parts over ", spec.world, " ranks");
    return {{bf16, spec.chunk_numel()}};
  }
  void encode(std::span<const Tensor> parts, const Tensor& chunk) const override {
    raw::copy_into(parts[0], flattened(chunk));
  }
  void decode(const Tensor& full, std::span<const Tensor> parts) const override {
    raw::copy_into(flattened(full), flattened(parts[0]));
  }
  int world = 1;
};

}  // namespace

TEST_CASE("a transform of two arrays that loses nothing trains with the bits of none",
          "[threads][fsdp2-103]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const Reshard reshard :
       {Reshard::automatic, Reshard::always, Reshard::never, Reshard::to(2)})
    for (const auto& [ranks, replicas] :
         {std::pair(1, 1), std::pair(2, 1), std::pair(4, 1), std::pair(4, 2), std::pair(8, 1)}) {
      if (reshard.is_partial() && (ranks < 4 || replicas > 1)) continue;
      CAPTURE(reshard, ranks, replicas);
      const auto run = [&, ranks = ranks, replicas = replicas](
                           const std::shared_ptr<const GatherTransform>& transform,
                           const WorldOptions& world_options = {.threads = 1},
                           Offload offload = Offload::none) {
        return on_ranks(ranks, world_options, [&](World& world) {
          Gathered job(world, transform,
                       {.mesh = mesh_of(world, replicas),
                        .reshard_after_forward = reshard,
                        .offload = offload});
          return train_gathered(job, 10);
        });
      };
      const WorldOptions shuffled{.executor = testing::shuffled(seed), .threads = 1};
      const auto in_two = std::make_shared<InTwo>();
      const auto plain = run(nullptr);
      for (const auto& encoded :
           {run(in_two), run(in_two, shuffled), run(in_two, {.threads = 1}, Offload::cpu),
            run(in_two, shuffled, Offload::cpu)})
        for (std::size_t rank = 0; rank < plain.size(); ++rank)
          CHECK(is_same_run(plain[rank], encoded[rank]));
    }
}

TEST_CASE("a transform of 16 bits trains a narrow stack on more ranks than rows, also in replicas",
          "[threads][fsdp2-105]") {
  for (const auto& [ranks, replicas] : {std::pair(8, 1), std::pair(8, 2), std::pair(1, 1)}) {
    CAPTURE(ranks, replicas);
    const auto seen = on_ranks(ranks, [&, ranks = ranks, replicas = replicas](World& world) {
      const auto transform = std::make_shared<InBf16>();
      transform->world = ranks / replicas;  // not those of all replicas
      Gathered job(world, transform, {.mesh = mesh_of(world, replicas)});
      const GatheredRun run = train_gathered(job, 6);
      bool is_rounded = true;
      Values stored = full_values(job.stack);
      look_at_matrices(job.stack, [&](const std::string& name, const Tensor& full) {
        const auto values = full.to_vector<float>();
        for (std::size_t i = 0; i < values.size(); ++i)
          is_rounded = is_rounded && values[i] == float{BFloat16(stored.at(name)[i])};
      });
      return std::pair(run, is_rounded);
    });
    for (const auto& [run, is_rounded] : seen) {
      CHECK(is_rounded);
      CHECK(testing::same_bits(run.parameters, seen[0].first.parameters));
      for (const float loss : run.losses) CHECK(std::isfinite(loss));
    }
  }
}

TEST_CASE("products of a transform are none that a recomputed function keeps", "[threads]") {
  struct ByProduct final : GatherTransform {  // decodes by a product with 1
    const char* name() const noexcept override { return "by product"; }
    std::vector<Part> parts(const ShardSpec& spec) const override {
      return {{f32, spec.chunk_numel()}};
    }
    void encode(std::span<const Tensor> parts, const Tensor& chunk) const override {
      raw::copy_into(parts[0], flattened(chunk));
    }
    void decode(const Tensor& full, std::span<const Tensor> parts) const override {
      const Tensor column = raw::reshape(parts[0], {parts[0].numel(), 1});
      const Tensor y = matmul(column, Tensor::ones({1, 1}, f32, full.device()));
      raw::copy_into(flattened(full), flattened(y));
    }
  };
  const auto gradients = [](const std::shared_ptr<const GatherTransform>& transform, Keep keep) {
    return on_ranks(2, [&](World& world) {
      Gathered job(world, transform,
                   {.mesh = DeviceMesh::flat(world), .reshard_after_forward = Reshard::always});
      const Tensor x = rows_of(1, 2 * world.rank(), 2, 4, world.device());
      const Tensor y = job.stack.call([&] {
        Tensor h = x;
        for (nn::Linear& layer : job.stack.layers)
          h = recompute([&layer](const Tensor& in) { return tanh(layer(in)); }, h, keep);
        return h * job.stack.scale.value() + job.stack.offset.value();
      });
      mean_square(y).backward();
      return shard_gradients(job.stack);
    });
  };
  const auto plain = gradients(nullptr, {}),
             kept = gradients(std::make_shared<ByProduct>(), {.products = 1});
  for (std::size_t rank = 0; rank < plain.size(); ++rank)
    CHECK(testing::same_bits(plain[rank], kept[rank]));
}

TEST_CASE("slots and bytes of transforms are planned, and what the plan says is gathered",
          "[threads]") {
  const auto phases = [](const World& world, bool is_encoded, Offload offload) {
    Gathered job(world, is_encoded ? gather_in_e4m3() : nullptr,
                 {.mesh = DeviceMesh::flat(world),
                  .precision = {.param = bf16},
                  .packed_bytes = 0,
                  .offload = offload});
    optim::AdamW optimizer(job.stack.parameters());
    Ledger& ledger = Memory::of(world.device()).ledger();
    std::vector<std::int64_t> seen;
    for (int k = 0; k < 3; ++k) {
      ledger.reset_peak();
      job.loss(k).backward();
      optimizer.step();
      optimizer.zero_grad();
      world.device().block(world.device().compute().record());
      seen.insert(seen.end(), {ledger.peak_bytes(), ledger.live_bytes()});
    }
    const ShardPlan plan = shard_plan(job.stack);
    seen.insert(seen.end(),
                {plan.arena_bytes, plan.units[2].gather_bytes, plan.units[2].wire_bytes});
    if (is_encoded && world.size() == 3)
      TESSERA_EXPECT(
          plan.to_string().find("'layers.1' gathers by 'e4m3 by row'") != std::string::npos,
          plan.to_string());
    return seen;
  };
  for (const int ranks : {1, 2, 3})
    for (const auto& [is_encoded, offload] :
         {std::pair(false, Offload::none), {true, Offload::none}, {true, Offload::cpu}}) {
      CAPTURE(ranks, is_encoded, static_cast<int>(offload));
      const auto measured =
          on_ranks(ranks, [&, is_encoded = is_encoded, offload = offload](World& world) {
            return phases(world, is_encoded, offload);
          });
      for (int rank = 0; rank < ranks; ++rank)
        CHECK(phases(World::emulated(rank, ranks, {.executor = ExecutorKind::virtual_}), is_encoded,
                     offload) == measured[static_cast<std::size_t>(rank)]);
      // layers.1: 7 x 5 and a bias of 7; the full matrix, its codes, its scales.
      const std::size_t last = measured[0].size() - 1;
      CHECK(measured[0][last - 1] == (is_encoded ? 4 : 2) * 256);
      CHECK(measured[0][last] == (is_encoded ? 3 : 2) * 256);
    }
}

TEST_CASE("a transform that throws fails the step, and after a reset the next one is possible",
          "[threads]") {
  struct Throws final : GatherTransform {
    // Whether it was 0; -1 stays.
    static bool counts_down(int& left) {
      if (left < 0) return false;
      return left-- == 0;
    }
    const char* name() const noexcept override { return "throws"; }
    std::vector<Part> parts(const ShardSpec& spec) const override { return InTwo().parts(spec); }
    void encode(std::span<const Tensor> parts, const Tensor& chunk) const override {
      if (counts_down(*encodes_left)) throw std::runtime_error("encode");
      InTwo().encode(parts, chunk);
    }
    void decode(const Tensor& full, std::span<const Tensor> parts) const override {
      if (counts_down(*decodes_left)) throw std::runtime_error("decode");
      InTwo().decode(full, parts);
    }
    std::shared_ptr<int> encodes_left = std::make_shared<int>(-1),
                         decodes_left = std::make_shared<int>(-1);
  };
  struct Step {
    std::string threw;
    float loss = 0;
    bool is_consistent = false;
  };
  const Offload offload = GENERATE(Offload::none, Offload::cpu);
  for (const bool encodes : {true, false})
    for (const int left : {0, 2, 4}) {  // in forward and, of three layers, in backward
      CAPTURE(encodes, left, static_cast<int>(offload));
      for (const Step& step : on_ranks(2, [&](World& world) {
             const auto transform = std::make_shared<Throws>();
             Gathered job(world, transform,
                          {.mesh = DeviceMesh::flat(world),
                           .reshard_after_forward = Reshard::always,
                           .offload = offload});
             const auto before = static_cast<float>(job.loss(0).item());
             skip_backward(job.stack);
             if (world.rank() == 1)
               (encodes ? *transform->encodes_left : *transform->decodes_left) = left;
             Step step;
             try {
               job.loss(0).backward();
               world.barrier();
             } catch (const std::exception& error) {
               step.threw = error.what();
             }
             step.is_consistent = reset(job.stack).parameters_are_consistent;
             const Tensor loss = job.loss(0);
             loss.backward();
             step.loss = static_cast<float>(loss.item()) - before;
             return step;
           })) {
        CHECK(!step.threw.empty());
        CHECK(step.is_consistent);
        CHECK(step.loss == 0);
      }
    }
}

TEST_CASE("a transform that cannot take effect is refused") {
  const World world = World::emulated(0, 2, {.threads = 1});
  const auto refused = [](const auto& f) { return thrown_by(f); };
  Stack stack({4, 3});
  stack.named_parameters();
  CHECK_THAT(refused([&] { stack.scale.set_gather_transform(gather_in_e4m3()); }),
             Contains("gather_in_e4m3: a row of [3] is one element"));
  Stack late({4, 3});
  late.named_parameters();
  late.shard({.mesh = DeviceMesh::flat(world)});
  late.materialize(world.device());
  CHECK_THAT(refused([&] { late.layers[0].weight.set_gather_transform(gather_in_e4m3()); }),
             Contains("'layers.0.weight' has memory; call it before materialize"));
  Stack stored({4, 3});
  stored.layers[0].weight.freeze();
  stored.layers[0].weight.set_dtype(bf16);
  CHECK_THAT(refused([&] { stored.layers[0].weight.set_gather_transform(gather_in_e4m3()); }),
             Contains("is stored in bf16, and a transform takes f32 only"));
  // A mesh that it is not made for is refused, and the module is as it was.
  for (const bool has_values : {false, true}) {
    Stack narrow({4, 3});
    const Parameter& weight = narrow.layers[0].weight;
    weight.set_gather_transform(std::make_shared<InBf16>());
    if (has_values) narrow.materialize(world.device());
    const auto shard = [&] { narrow.shard({.mesh = DeviceMesh::flat(world)}); };
    CHECK_THAT(refused(shard), Contains("parts over 2 ranks"));
    CHECK(weight.unit() == nullptr);
    CHECK(weight.device().is_meta() == !has_values);
    CHECK_THAT(refused(shard), Contains("parts over 2 ranks"));
    if (!has_values) weight.set_gather_transform(nullptr);
    if (!has_values) shard();
  }
}

TEST_CASE("ranks that give a parameter other transforms are told so", "[threads]") {
  const auto heard = on_ranks(2, [](World& world) {
    Gathered job(world, world.rank() == 0 ? gather_in_e4m3() : nullptr,
                 {.mesh = DeviceMesh::flat(world)});
    return thrown_by([&] { job.loss(0); });
  });
  CHECK_THAT(heard[0], Contains("layers.0.weight") && Contains("by e4m3 by row"));
}
