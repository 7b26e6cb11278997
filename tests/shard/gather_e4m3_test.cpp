// Gathers in e4m3: what is decoded is the same on every mesh, within its bound, and trains.
#include <algorithm>
#include <bit>

#include "kernels/e4m3_rows.hpp"
#include "tests/shard/gathered.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("rows gathered in e4m3 are the same on any mesh, within a rounding of what is stored",
          "[threads][fsdp2-104]") {
  for (const DType param : {f32, bf16, f16})
    for (const auto& [ranks, replicas] :
         {std::pair(1, 1), std::pair(2, 1), std::pair(3, 1), std::pair(4, 2), std::pair(8, 1)})
      for (const When when : {When::before_sharding, When::after_sharding}) {
        CAPTURE(param, ranks, replicas, static_cast<int>(when));
        struct Seen {
          Values stored, decoded;
        };
        const auto seen = on_ranks(ranks, [&, replicas = replicas](World& world) {
          Gathered job(world, gather_in_e4m3(),
                       {.mesh = mesh_of(world, replicas), .precision = {.param = param}}, when);
          Seen all;
          for (int k = 0; k < 3; ++k) {
            Values stored = full_values(job.stack);
            look_at_matrices(job.stack, [&](const std::string& name, const Tensor& full) {
              TESSERA_EXPECT(full.dtype() == param, "gathered in ", full.dtype());
              const std::string at = concat(name, " at ", k);
              all.decoded[at] = raw::cast(full, f32).to_vector<float>();
              all.stored[at] = stored.at(name);
            });
            // Each step gathers what the last one wrote: the same on every mesh.
            for (const Parameter& p : job.stack.parameters())
              p.edit([&](const Tensor& rows) {
                raw::copy_into(rows, raw::binary(raw::Binary::mul, rows, -1.25));
              });
          }
          return all;
        });
        std::size_t checked = 0;
        for (const auto& [at, stored] : seen[0].stored) {
          const std::int64_t cols = at[7] == '0' ? 4 : at[7] == '1' ? 5 : 7;
          std::vector<float> expected;
          double worst = 0;  // of what the bound allows
          for (std::size_t row = 0; row < stored.size() / static_cast<std::size_t>(cols); ++row) {
            const float* const x = stored.data() + row * static_cast<std::size_t>(cols);
            float most = 0;
            for (std::int64_t i = 0; i < cols; ++i) most = std::max(most, std::abs(x[i]));
            const float scale = kernels::float8_scale<Float8E4M3>(most);
            CHECK(448 * scale >= most);
            CHECK(224 * scale < most);
            for (std::int64_t i = 0; i < cols; ++i) {
              const float value = float{Float8E4M3(x[i] / scale)} * scale;
              expected.push_back(value);  // exact in bf16 and f16, too: 4 bits
              const double bound = std::max(0x1p-4 * std::abs(x[i]), 0x1p-10 * scale);
              worst = std::max(worst, std::abs(double{value} - x[i]) / bound);
              ++checked;
            }
          }
          CHECK(worst <= 1);
          CHECK(worst > 0.1);
          for (const Seen& each : seen) CHECK(testing::same_bits(each.decoded.at(at), expected));
        }
        CHECK(checked == 3 * (20 + 35 + 21));
      }
}

TEST_CASE("training with gathers in e4m3 goes down, alike on any number of ranks",
          "[threads][fsdp2-104]") {
  const auto run = [](int ranks, Offload offload = Offload::none) {
    return on_ranks(ranks, [&](World& world) {
      Gathered job(world, gather_in_e4m3(), {.mesh = DeviceMesh::flat(world), .offload = offload});
      optim::SGD optimizer(job.stack.parameters(), {.lr = 0.05});
      // Every rank has the same rows: the same loss on all meshes.
      return train_gathered(job, 8, optimizer, [&](int) {
        return mean_square(job.stack(rows_of(1, 0, 4, 4, world.device())));
      });
    })[0];
  };
  const GatheredRun one = run(1);
  CHECK(one.losses.back() < 0.9f * one.losses.front());
  for (const int ranks : {1, 2, 4}) {
    INFO(ranks << " ranks");
    // The mean of 2 or 4 equal gradients is one of them, bit by bit: x + (3 x, rounded) rounds to
    // 4 x, ties included. Of 8 it may not be.
    CHECK(is_same_run(run(ranks), one));
    CHECK(is_same_run(run(ranks, Offload::cpu), one));  // encoded on the host
  }
}

TEST_CASE("tables are streamed in e4m3, too", "[threads]") {
  const auto loss_on = [](int ranks, Offload offload = Offload::none) {
    return on_ranks(ranks, [&](World& world) {
      nn::Llama model(small_llama(1));
      for (const Parameter& p : model.parameters())
        if (p.shape().ndim() > 1) p.set_gather_transform(gather_in_e4m3());
      const ShardOptions options{
          .mesh = DeviceMesh::flat(world), .slice_bytes = 1, .offload = offload};
      shard_parts(model, options);
      nn::init(model, {5}, world.device());
      const std::vector<std::int32_t> ids = {3, 1, 4, 10, 5};
      const Tensor all = Tensor::from(ids, {1, 5}, world.device());
      const Tensor loss = model.loss(raw::slice(all, 1, 0, 4), raw::slice(all, 1, 1, 5));
      loss.backward();
      return static_cast<float>(loss.item());
    })[0];
  };
  const float one = loss_on(1);
  // The tables have other slices on other meshes, whose sums over a vocabulary go in other orders.
  for (const int ranks : {2, 3}) {
    const float many = loss_on(ranks);
    CHECK(std::abs(many - one) < 1e-5f * one);
    CHECK(loss_on(ranks, Offload::cpu) == many);
  }
}
