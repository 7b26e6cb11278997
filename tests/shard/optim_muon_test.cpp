// Muon over ranks: any number of them takes the steps of one. Gradients are exact: eighths of small
// whole numbers, summed and never divided, so that what differs is not the gradient; and each
// matrix is orthogonalised whole, on one rank. Bits are compared.
#include "tessera/optim/muon.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>

#include "tessera/distributed/state.hpp"
#include "tessera/optim/grad_scaler.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/executors.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// A whole number from -8 to 8 that depends on what is given only.
float drawn(std::uint64_t seed, std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  std::uint64_t x =
      seed ^ (a * 0x9E3779B97F4A7C15u + b * 0xC2B2AE3D27D4EB4Fu + c * 0x165667B19E3779F9u);
  x = (x ^ (x >> 31)) * 0x7FB5D329728EA185u;
  x = (x ^ (x >> 27)) * 0x81DADEF4BC2DD44Du;
  return static_cast<float>((x >> 33) % 17) - 8;
}

// Parameters whose gradients are given: the loss is the sum of p g.
struct GivenLayer : nn::Module {
  explicit GivenLayer(const std::vector<Shape>& shapes) {
    for (const Shape& shape : shapes) {
      items.emplace_back(shape, Initializer::normal(0, 0.5));
      register_parameter(std::to_string(items.size() - 1), items.back());
    }
  }
  // `gradient(i)`: of the i-th parameter, undefined for none.
  template <class F>
  Tensor operator()(const F& gradient) {
    return call([&] {
      Tensor loss;
      for (std::size_t i = 0; i < items.size(); ++i) {
        const Tensor g = gradient(i);
        if (!g.defined()) continue;
        const Tensor part = sum(items[i].value() * g);
        loss = loss.defined() ? loss + part : part;
      }
      return loss;
    });
  }
  std::vector<Parameter> items;
};

// Three units. Over four ranks the rows of {5, 7} are uneven, {2, 6} and {1, 9} leave ranks without
// any, and {3, 4} is never used.
struct GivenModel : nn::Module {
  GivenModel() {
    layers.emplace_back(std::vector<Shape>{{5, 7}, {7}, {8, 3}, {3, 4}});
    layers.emplace_back(std::vector<Shape>{{2, 6}, {}, {12, 12}});
    layers.emplace_back(std::vector<Shape>{{1, 9}, {4, 4}, {9, 2}, {9}});
    register_module("layers", layers);
  }
  // The loss of this rank at a step: ranks give parts of one gradient.
  Tensor loss(int step, int rank, int ranks, std::uint64_t seed, const Device& device) {
    return call([&] {
      Tensor total;
      for (std::size_t l = 0; l < layers.size(); ++l) {
        const auto gradient = [&](std::size_t i) {
          const bool is_used = layers[l].items[i].trainable() && !(l == 0 && i == 3);
          // One rank alone has used this one.
          const bool is_lone = l == 2 && i == 1;
          if (!is_used || (is_lone && rank != ranks - 1)) return Tensor();
          const Shape& shape = layers[l].items[i].shape();
          std::vector<float> g;
          for (std::int64_t e = 0; e < shape.numel(); ++e) {
            const auto at = static_cast<std::uint64_t>(e) * 64 + static_cast<std::uint64_t>(step);
            const auto draw = [&](int part) {
              return drawn(seed, l * 16 + i, at, static_cast<std::uint64_t>(part));
            };
            float value = draw(0);  // of all ranks together
            if (!is_lone && rank + 1 < ranks) value = draw(rank + 1);
            if (!is_lone && rank + 1 == ranks)
              for (int other = 0; other + 1 < ranks; ++other) value -= draw(other + 1);
            g.push_back(value / 8);
          }
          return Tensor::from(g, shape, device);
        };
        const Tensor part = layers[l](gradient);
        total = total.defined() ? total + part : part;
      }
      return total;
    });
  }
  nn::ModuleList<GivenLayer> layers;
};

// How matrices are sharded: by blocks of rows, as far as they have so many, or along dimension 1
// where `columns_of` ranks divide it.
struct Cut {
  std::int64_t block_rows = 0;
  int columns_of = 0;
};

struct MuonJob {
  MuonJob(const World& world, const DeviceMesh* mesh, std::uint64_t seed,
          optim::MuonOptions options = {}, const Cut& cut = {})
      : world(world), seed(seed) {
    options.lr = 0.05;
    for (const Parameter& p : model.parameters())
      if (p.shape().ndim() == 2) p.set_block_rows(std::min(cut.block_rows, p.shape()[0]));
    const auto [matrices, others] = optim::split_for_muon(model.parameters());
    optimizer.emplace(matrices, others, options);  // older than the units
    if (mesh) {
      const ShardOptions sharding{.mesh = *mesh, .shard_placement_fn = [&](const Parameter& p) {
                                    const Shape& shape = p.shape();
                                    const bool is_by_columns = cut.columns_of > 0 &&
                                                               shape.ndim() == 2 &&
                                                               shape[1] % cut.columns_of == 0;
                                    return Shard{is_by_columns ? 1 : 0};
                                  }};
      for (GivenLayer& layer : model.layers) fully_shard(layer, sharding);
      fully_shard(model, sharding);
    }
    nn::init(model, {seed}, world.device());
    if (!mesh) return;
    for (GivenLayer& layer : model.layers) set_gradient_divide_factor(layer, 1);
  }
  Tensor loss(int step) {
    return model.loss(step, world.rank(), world.size(), seed, world.device());
  }
  void step(int k) {
    loss(k).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  MuonJob& steps(int first, int end) {
    for (int k = first; k < end; ++k) step(k);
    return *this;
  }
  // Whole values and moments, on every rank.
  Values all() {
    Values values;
    for_each_full(model.state_dict({.form = StateForm::view}),
                  [&](const std::string& name, const Tensor& whole) {
                    values[name] = whole.to_vector<float>();
                  });
    for_each_full(optimizer->state_dict(model, {.form = StateForm::view}),
                  [&](const std::string& name, const Tensor& whole) {
                    if (whole.dtype() == f32) values[name] = whole.to_vector<float>();
                  });
    return values;
  }

  const World& world;
  std::uint64_t seed;
  GivenModel model;
  std::optional<optim::Muon> optimizer;
};

// What one rank without units has after `steps`.
Values of_one_rank(std::uint64_t seed, int steps, const optim::MuonOptions& options = {}) {
  return on_ranks(1, [&](World& world) {
    return MuonJob(world, nullptr, seed, options).steps(0, steps).all();
  })[0];
}

}  // namespace

TEST_CASE("Muon on any number of ranks has the bits of one rank", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  const optim::MuonOptions options[] = {
      {},
      {.nesterov = false, .adjust_lr = optim::MuonRate::match_rms_adamw, .turn_bytes = 1},
      {.ns_steps = 2, .ns_dtype = bf16, .turn_bytes = 2048}};
  for (const optim::MuonOptions& o : options) {
    const Values one = of_one_rank(seed, 5, o);
    CHECK(one.at("layers.0.3") == of_one_rank(seed, 0, o).at("layers.0.3"));  // never used
    CHECK(one.at("layers.0.0") != of_one_rank(seed, 0, o).at("layers.0.0"));
    for (const HybridSizes sizes : {HybridSizes{1, 1}, HybridSizes{1, 2}, HybridSizes{1, 3},
                                    HybridSizes{1, 4}, HybridSizes{2, 2}, HybridSizes{2, 1}})
      for (const ExecutorChoice& executor : testing::threaded_and_shuffled(seed)) {
        INFO("seed " << seed << ", " << sizes.replicate << " replicas of " << sizes.shard
                     << " ranks, turns of " << o.turn_bytes << " bytes, executor "
                     << name(executor));
        const WorldOptions world_options{.executor = executor, .threads = 1};
        const auto found =
            on_ranks(sizes.replicate * sizes.shard, world_options, [&](World& world) {
              const DeviceMesh mesh = DeviceMesh::hybrid(world, sizes);
              return MuonJob(world, &mesh, seed, o).steps(0, 5).all();
            });
        for (const Values& values : found) CHECK(same_bits(values, one));
      }
  }
}

TEST_CASE(
    "Muon on shards that cut no block of rows has the bits of one rank, and its state goes on",
    "[threads][ragged]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const Values two = of_one_rank(seed, 2), four = of_one_rank(seed, 4);
  for (const HybridSizes sizes :
       {HybridSizes{1, 2}, HybridSizes{1, 3}, HybridSizes{1, 4}, HybridSizes{2, 2}})
    for (const std::int64_t block_rows : {1, 2, 3}) {
      INFO(sizes.replicate << " replicas of " << sizes.shard << " ranks, blocks of " << block_rows);
      struct Found {
        Values before, after, again;
      };
      const auto found = on_ranks(sizes.replicate * sizes.shard, [&](World& world) {
        const DeviceMesh mesh = DeviceMesh::hybrid(world, sizes);
        MuonJob job(world, &mesh, seed, {}, {block_rows});
        Found all{.before = job.steps(0, 2).all(), .after = {}, .again = {}};
        // Into a job whose shards are others.
        MuonJob other(world, &mesh, seed, {}, {3 - block_rows});
        other.model.load(job.model.state_dict({.form = StateForm::full}));
        other.optimizer->load(other.model,
                              job.optimizer->state_dict(job.model, {.form = StateForm::full}));
        all.after = job.steps(2, 4).all();
        all.again = other.steps(2, 4).all();
        return all;
      });
      for (const Found& all : found) {
        CHECK(same_bits(all.before, two));
        CHECK(same_bits(all.after, four));
        CHECK(same_bits(all.again, four));
      }
    }
}

// By columns a matrix is held transposed; it is turned before it is orthogonalised, and so its sums
// add up as those of rows.
TEST_CASE("Muon on shards along dimension 1 has the bits of one rank", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const Values two = of_one_rank(seed, 2), three = of_one_rank(seed, 3);
  for (const HybridSizes sizes : {HybridSizes{1, 1}, HybridSizes{1, 2}, HybridSizes{1, 3},
                                  HybridSizes{1, 4}, HybridSizes{2, 2}}) {
    INFO(sizes.replicate << " replicas of " << sizes.shard << " ranks");
    struct Found {
      Values before, after, again;
    };
    const auto steps = [&](World& world) {
      const DeviceMesh mesh = DeviceMesh::hybrid(world, sizes);
      MuonJob job(world, &mesh, seed, {}, {0, sizes.shard});
      Found all{.before = job.steps(0, 2).all(), .after = {}, .again = {}};
      MuonJob other(world, &mesh, seed, {}, {0, sizes.shard});
      other.model.load(job.model.state_dict());
      other.optimizer->load(other.model, job.optimizer->state_dict(job.model));
      all.after = job.steps(2, 3).all();
      all.again = other.steps(2, 3).all();
      return all;
    };
    for (const Found& all : on_ranks(sizes.replicate * sizes.shard, steps)) {
      CHECK(same_bits(all.before, two));
      CHECK(same_bits(all.after, three));
      CHECK(same_bits(all.again, three));
    }
  }
}

TEST_CASE("all ranks agree who orthogonalises a matrix, and share the work", "[threads]") {
  const auto owners = on_ranks(3, [](World& world) {
    const DeviceMesh mesh = DeviceMesh::flat(world);
    MuonJob job(world, &mesh, 1);
    job.optimizer->prepare();
    std::vector<int> found;
    for (GivenLayer& layer : job.model.layers)
      for (const Parameter& p : layer.items)
        if (p.shape().ndim() == 2) found.push_back(job.optimizer->owner_rank(p));
    return found;
  });
  CHECK(owners[0] == owners[1]);
  CHECK(owners[0] == owners[2]);
  // {12, 12} costs 1728 and has a rank for itself; {5, 7} 175, {8, 3} 72, {4, 4} 64, {2, 6} 24,
  // {9, 2} 36, {3, 4} 36 and {1, 9} 9 are shared by the two others.
  REQUIRE(owners[0].size() == 8);
  CHECK(std::ranges::count(owners[0], owners[0][4]) == 1);
  CHECK(std::set<int>(owners[0].begin(), owners[0].end()) == std::set<int>{0, 1, 2});
}

TEST_CASE("a matrix that is frozen and thawed goes on as on one rank", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto train = [&](const World& world, const DeviceMesh* mesh) {
    MuonJob job(world, mesh, seed);
    const Parameter &whole = job.model.layers[1].items[2], &rows = job.model.layers[0].items[2];
    job.steps(0, 2);
    whole.freeze();
    job.steps(2, 4);
    whole.set_trainable(true);
    rows.freeze();
    return job.steps(4, 6).all();
  };
  const Values one = on_ranks(1, [&](World& world) { return train(world, nullptr); })[0];
  CHECK(one.contains("layers.1.2.momentum_buffer"));
  CHECK(!one.contains("layers.0.2.momentum_buffer"));
  for (const int ranks : {2, 3})
    for (const Values& values : on_ranks(ranks, [&](World& world) {
           const DeviceMesh mesh = DeviceMesh::flat(world);
           return train(world, &mesh);
         }))
      CHECK(same_bits(values, one));
}

TEST_CASE("the state of Muon goes on with another number of ranks", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  struct Kept {
    StateDict model, optimizer;
  };
  const StateDictOptions options{StateForm::full, StateRanks::rank_0, StateMemory::host};
  const auto kept = on_ranks(3, [&](World& world) {
    const DeviceMesh mesh = DeviceMesh::flat(world);
    MuonJob job(world, &mesh, seed);
    job.steps(0, 2);
    return Kept{job.model.state_dict(options), job.optimizer->state_dict(job.model, options)};
  });
  CHECK(kept[0].optimizer.at("layers.1.2.momentum_buffer").values.shape() == Shape{12, 12});
  const Values one = of_one_rank(seed, 4);
  for (const int ranks : {1, 2, 4})
    for (const Values& values : on_ranks(ranks, [&](World& world) {
           const DeviceMesh mesh = DeviceMesh::flat(world);
           MuonJob job(world, &mesh, seed);
           job.model.load(kept[0].model);
           job.optimizer->load(job.model, kept[0].optimizer);
           return job.steps(2, 4).all();
         }))
      CHECK(same_bits(values, one));
}

TEST_CASE("a step of Muon that overflowed on one rank is skipped on all", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const Values one = of_one_rank(seed, 2);
  for (const Values& values : on_ranks(3, [&](World& world) {
         const DeviceMesh mesh = DeviceMesh::flat(world);
         MuonJob job(world, &mesh, seed);
         optim::GradScaler scaler(world.device(), {.init_scale = 4});
         const auto step = [&](int k, bool spoils) {
           scaler.scale(job.loss(k)).backward();
           if (spoils && world.rank() == 1) spoil_gradient(job.model, INFINITY);
           scaler.step(*job.optimizer);
           scaler.update();
           job.optimizer->zero_grad();
         };
         step(0, false);
         step(7, true);
         step(1, false);
         return job.all();
       }))
    CHECK(same_bits(values, one));
}

TEST_CASE("after a reset Muon goes on as if nothing had failed", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const Values one = of_one_rank(seed, 4);
  struct Recovered {
    Values values;
    int resets = 0;
  };
  for (const Recovered& r : on_ranks(3, [&](World& world) {
         const DeviceMesh mesh = DeviceMesh::flat(world);
         MuonJob job(world, &mesh, seed);
         int failures = 0, resets = 0;
         for (bool is_done = false; !is_done;) try {
             while (job.optimizer->steps() < 4) {
               world.barrier();  // nobody is in an update when a rank fails
               const auto k = static_cast<int>(job.optimizer->steps());
               job.loss(k).backward();
               if (world.rank() == 1 && k == 2 && failures++ == 0)
                 throw std::runtime_error("no luck");
               world.barrier();  // nor has anybody begun the next one
               job.optimizer->step();
               job.optimizer->zero_grad();
             }
             world.barrier();
             is_done = true;
           } catch (const std::exception&) {
             if (++resets > 1 || !reset(job.model).parameters_are_consistent) throw;
           }
         return Recovered{job.all(), resets};
       })) {
    CHECK(same_bits(r.values, one));
    CHECK(r.resets == 1);
  }
}

TEST_CASE("Muon moves units of two meshes, each by the ranks that shard it", "[threads]") {
  // Ranks 0, 1 and 2, 3 shard the one model; 0, 2 and 1, 3 the other. Both have the same values.
  for (const bool is_same : on_ranks(4, [&](World& world) {
         const DeviceMesh mesh = DeviceMesh::grid(world, {{"a", 2}, {"b", 2}});
         nn::Linear first(6, 5), second(6, 5);
         fully_shard(first, {.mesh = mesh["b"]});
         fully_shard(second, {.mesh = mesh["a"]});
         for (nn::Linear* model : {&first, &second}) nn::init(*model, {3}, world.device());
         optim::Muon optimizer({first.weight, second.weight}, {first.bias, second.bias},
                               {.lr = 0.1});
         const Tensor x = rows_of(1, 0, 2, 6, world.device());
         for (int k = 0; k < 3; ++k) {
           for (nn::Linear* model : {&first, &second}) mean_square((*model)(x)).backward();
           optimizer.step();
           optimizer.zero_grad();
         }
         return same_bits(full_values(first), full_values(second));
       }))
    CHECK(is_same);
}

TEST_CASE("of a language model Muon gets what no module streams", "[shard]") {
  for (const auto& names : on_ranks(2, [](World& world) {
         struct Model : nn::Module {
           Model() : first(8, 4), hidden(4, 4), head(4, 8, {.bias = false, .is_streamed = true}) {
             register_module("first", first);
             register_module("hidden", hidden);
             register_module("head", head);
           }
           nn::Linear first, hidden, head;
         } model;
         fully_shard(model, {.mesh = DeviceMesh::flat(world)});
         std::vector<std::string> found;
         const auto [matrices, others] = optim::split_for_muon(model.parameters());
         for (const Parameter& p : matrices) found.push_back(p.name());
         found.emplace_back("|");
         for (const Parameter& p : others) found.push_back(p.name());
         return found;
       }))
    CHECK(names == std::vector<std::string>{"first.weight", "hidden.weight", "|", "first.bias",
                                            "hidden.bias", "head.weight"});
}
