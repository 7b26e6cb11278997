// Loops without gradients: units that never reshard stay open from one forward to the next, until
// an update, and a program may say so for a phase of it.
#include <functional>
#include <memory>

#include "tessera/nn/generate.hpp"
#include "tessera/nn/llama.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/shard/trained.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr std::uint64_t kUnits = 4;  // of a TrainedStack

std::vector<float> evaluated(TrainedStack& t, std::uint64_t seed = 1) {
  const NoGradGuard no_gradient;
  return t.loss(seed).to_vector<float>();
}

// Writes shards, and of how many units.
using Write = std::pair<std::function<void(TrainedStack&)>, std::uint64_t>;

}  // namespace

TEST_CASE("forwards without gradients gather once until an update, whatever makes it",
          "[threads]") {
  const std::vector<Write> writes{
      {[](TrainedStack& t) {
         t.loss().backward();
         t.update();
       },
       kUnits},
      {[](TrainedStack& t) { nn::init(t.model, {17}); }, kUnits},
      {[](TrainedStack& t) { t.model.load(t.model.state_dict()); }, kUnits},
      {[](TrainedStack& t) {
         t.layer(1).weight.edit([](const Tensor& rows) { raw::fill(rows, 0.5); });
       },
       1},
      {[](TrainedStack& t) { t.layer(2).bias.assign(t.layer(2).bias.shard()); }, 1},
      {[](TrainedStack& t) { reshard(t.layer(0)); }, 1},
  };
  for (const int ranks : {1, 2, 3})
    for (std::size_t i = 0; i < writes.size(); ++i) {
      const auto& [write, units] = writes[i];
      CAPTURE(ranks, i);
      struct Seen {
        std::vector<std::uint64_t> gathers;
        bool is_same = true;
      };
      for (const Seen& seen : on_ranks(ranks, [&](World& world) {
             TrainedStack t(world, Reshard::never), plain(world, Reshard::always);
             Seen s;
             const auto loop = [&] {
               s.gathers.push_back(t.gathers_of([&] {
                 for (std::uint64_t k = 0; k < 4; ++k)
                   s.is_same = s.is_same && same_bits(evaluated(t, k), evaluated(plain, k));
               }));
             };
             loop();
             loop();
             write(t);
             write(plain);
             loop();
             s.is_same = s.is_same && same_bits(full_values(t.model), full_values(plain.model));
             return s;
           })) {
        const auto times = [&](std::uint64_t n) { return ranks > 1 ? n : 0; };
        CHECK(seen.gathers == std::vector{times(kUnits), times(0), times(units)});
        CHECK(seen.is_same);
      }
    }
}

TEST_CASE("what is open behind a loop without gradients trains without another gather",
          "[threads]") {
  for (const std::uint64_t gathers : on_ranks(2, [](World& world) {
         TrainedStack t(world, Reshard::never);
         evaluated(t);
         return t.gathers_of([&] { t.loss().backward(); });
       }))
    CHECK(gathers == 0);
}

TEST_CASE("a phase of forwards without gradients stays open while the training around it reshards",
          "[threads]") {
  constexpr int kSteps = 12;
  for (const auto& [gathers, is_same, unplanned] : on_ranks(3, [](World& world) {
         TrainedStack t(world, Reshard::always), plain(world, Reshard::always);
         std::vector<std::uint64_t> gathers, unplanned;
         bool is_same = true;
         for (std::uint64_t step = 0; step < kSteps; ++step) {
           set_reshard_after_forward(t.model, Reshard::never);
           gathers.push_back(t.gathers_of([&] {
             for (std::uint64_t k = 0; k < 5; ++k)
               is_same = is_same && same_bits(evaluated(t, k), evaluated(plain, k));
           }));
           set_reshard_after_forward(t.model, Reshard::always);
           for (TrainedStack* const each : {&t, &plain}) {
             each->loss(step).backward();
             each->update();
           }
           unplanned.push_back(shard_counters(t.model).unplanned_slots);
         }
         is_same = is_same && same_bits(full_values(t.model), full_values(plain.model));
         return std::tuple(gathers, is_same, unplanned);
       })) {
    CHECK(gathers == std::vector<std::uint64_t>(kSteps, kUnits));
    CHECK(is_same);
    CHECK(unplanned[kSteps / 2] == unplanned.back());  // each way has come to rest
  }
}

TEST_CASE("tokens are generated with one gather a unit where units never reshard", "[threads]") {
  for (const bool is_trained : {false, true})
    for (const auto& [gathers, units, is_same] : on_ranks(2, [&](World& world) {
           const auto made = [&](Reshard reshard) {
             nn::LlamaConfig config = small_llama(2);
             config.max_seq_len = 8;
             auto model = std::make_unique<nn::Llama>(config);
             const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                        .reshard_after_forward = reshard};
             shard_parts(*model, options);
             nn::init(*model, {5}, world.device());
             if (is_trained) {
               const Tensor ids = reshape(Tensor::arange(3, i64, world.device()), {1, 3});
               model->loss(ids, ids).backward();
             }
             return model;
           };
           const auto open = made(Reshard::never), plain = made(Reshard::always);
           const std::vector<std::int32_t> prompt{1, 2};
           const std::uint64_t before = shard_counters(*open).gathers;
           const auto tokens = nn::generate(*open, prompt, 6);
           const std::uint64_t gathers = shard_counters(*open).gathers - before;
           std::uint64_t units = 0;
           for (const auto& unit : shard_plan(*open).units) units += unit.gather_bytes > 0;
           return std::tuple(gathers, units, tokens == nn::generate(*plain, prompt, 6));
         })) {
      CHECK(gathers == units);
      CHECK(is_same);
    }
}

// The plan of a loop and a step, run without bodies before the first, against what is used.
TEST_CASE("a planned loop without gradients has the bytes of the run", "[threads]") {
  for (const Reshard between : {Reshard::never, Reshard::always})
    for (const auto& [planned, used, unplanned] : on_ranks(2, [&](World& world) {
           const auto rounds = [&](TrainedStack& t, int count) {
             for (int round = 0; round < count; ++round) {
               set_reshard_after_forward(t.model, Reshard::never);
               for (std::uint64_t k = 0; k < 3; ++k) {
                 const NoGradGuard no_gradient;
                 t.loss(k);
               }
               set_reshard_after_forward(t.model, between);
               t.loss().backward();
               t.update();
             }
           };
           TrainedStack t(world, between);
           const std::int64_t planned = shard_plan(t.model, [&](World& counted) {
                                          auto other =
                                              std::make_shared<TrainedStack>(counted, between);
                                          rounds(*other, 4);
                                          return std::shared_ptr<nn::Module>(other, &other->model);
                                        }).arena_bytes;
           rounds(t, 4);
           return std::tuple(planned, shard_plan(t.model).arena_bytes,
                             shard_counters(t.model).unplanned_slots);
         })) {
      CAPTURE(between);
      CHECK(planned == used);
      CHECK(unplanned == 0);
    }
}
