// Loss scaling over ranks: what one finds in its shard all of them heed. The rules of one rank are
// the matter of tests/optim/grad_scaler_test.
#include <stdexcept>

#include "tessera/optim/clip.hpp"
#include "tessera/optim/grad_scaler.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// A model in training, with a scaler or without. The optimizer is older than the units.
struct ScaledJob {
  explicit ScaledJob(const World& world, const optim::GradScalerOptions& options = {})
      : ScaledJob(world, DeviceMesh::flat(world), options) {}
  ScaledJob(const World& world, const DeviceMesh& mesh, const optim::GradScalerOptions& options)
      : world(world), optimizer(stack.parameters()), scaler(world.device(), options) {
    stack.shard({.mesh = mesh});
    nn::init(stack, {3}, world.device());
  }
  Tensor loss(int k) {
    const auto step = static_cast<std::uint64_t>(k);
    return mean_square(stack(rows_of(step, 2 * world.rank(), 2, 4, world.device())));
  }
  void plain_step(int k) {
    loss(k).backward();
    optim::clip_grad_norm(stack.parameters(), 0.5);
    optimizer.step();
    optimizer.zero_grad();
  }
  // `poisoned`: the rank one of whose gradients becomes infinite; -1: none. Returns found_inf.
  bool scaled_step(int k, int poisoned = -1) {
    scaler.scale(loss(k)).backward();
    if (poisoned == world.rank()) spoil_gradient(stack, INFINITY);
    scaler.unscale(optimizer);
    optim::clip_grad_norm(stack.parameters(), 0.5);
    scaler.step(optimizer);
    const bool found = scaler.found_inf(optimizer).item() != 0;
    scaler.update();
    optimizer.zero_grad();
    return found;
  }
  Values moments() const {
    Values all;
    for (const auto& [name, p] : stack.named_parameters())
      for (const Tensor& rows : optimizer.moments(p)) {
        const std::vector<float> values = rows.to_vector<float>();
        all[name].insert(all[name].end(), values.begin(), values.end());
      }
    return all;
  }
  double scale() const { return scaler.current_scale().item(); }

  const World& world;
  Stack stack{{4, 5, 3}};
  optim::AdamW optimizer;
  optim::GradScaler scaler;
};

}  // namespace

TEST_CASE("an inf in one rank's shard skips the step on all ranks, and lowers the scale",
          "[fsdp2-102][threads]") {
  struct Seen {
    std::vector<bool> found;
    std::vector<double> scales;
    bool stayed = false, is_plain = false;
    std::int64_t steps = 0;
  };
  for (const bool is_shuffled : {false, true})
    for (const auto& [ranks, replicas] : {std::pair(1, 1), {2, 1}, {3, 1}, {4, 2}})
      for (int poisoned = 0; poisoned < ranks; ++poisoned) {
        const ExecutorChoice executor =
            is_shuffled ? testing::shuffled(fresh_seed()) : ExecutorKind::threaded;
        INFO(ranks << " ranks, replicas " << replicas << ", an inf on " << poisoned << ", executor "
                   << name(executor));
        const WorldOptions options{.executor = executor, .threads = 1};
        const auto seen = on_ranks(ranks, options, [&, replicas = replicas](World& world) {
          const DeviceMesh mesh = mesh_of(world, replicas);
          ScaledJob with(world, mesh, {.init_scale = 1024, .growth_interval = 2}),
              without(world, mesh, {});
          Seen out;
          const auto step = [&](int k, int on) {
            out.found.push_back(with.scaled_step(k, on));
            out.scales.push_back(with.scale());
          };
          step(0, -1);
          const Values before = full_values(with.stack), moments = with.moments();
          step(1, poisoned);
          out.stayed =
              same_bits(before, full_values(with.stack)) && same_bits(moments, with.moments());
          step(2, -1);
          step(3, -1);
          for (const int k : {0, 2, 3}) without.plain_step(k);
          out.is_plain = same_bits(full_values(without.stack), full_values(with.stack)) &&
                         same_bits(without.moments(), with.moments());
          out.steps = with.optimizer.steps();
          return out;
        });
        for (const Seen& s : seen) {
          CHECK(s.found == std::vector<bool>{false, true, false, false});
          CHECK(s.scales == std::vector<double>{1024, 512, 512, 1024});
          CHECK(s.stayed);
          CHECK(s.is_plain);  // a power of two changes no bit of f32
          CHECK(s.steps == 3);
        }
      }
}

TEST_CASE("an inf in a unit of one mesh skips the step of those of another, too", "[threads]") {
  // Ranks 0, 1 and 2, 3 shard the one model; 0, 2 and 1, 3 the other.
  for (int poisoned = 0; poisoned < 4; ++poisoned)
    for (const bool is_skipped : on_ranks(4, [&](World& world) {
           const DeviceMesh mesh = DeviceMesh::grid(world, {{"a", 2}, {"b", 2}});
           nn::Linear first(4, 6), second(4, 6);
           fully_shard(first, {.mesh = mesh["b"]});
           fully_shard(second, {.mesh = mesh["a"]});
           std::vector<Parameter> all = first.parameters();
           for (nn::Linear* model : {&first, &second}) nn::init(*model, {3}, world.device());
           for (const Parameter& p : second.parameters()) all.push_back(p);
           optim::AdamW optimizer(all);
           optim::GradScaler scaler(world.device(), {.init_scale = 2});
           const Tensor x = rows_of(1, 0, 2, 4, world.device());
           for (nn::Linear* model : {&first, &second})
             scaler.scale(mean_square((*model)(x))).backward();
           if (world.rank() == poisoned) spoil_gradient(first, INFINITY);
           scaler.step(optimizer);
           scaler.update();
           return optimizer.steps() == 0 && scaler.current_scale().item() == 1;
         }))
      CHECK(is_skipped);
}

TEST_CASE("ranks whose scales differ skip the step, and go on from the smallest", "[threads]") {
  for (const HybridSizes sizes :
       {HybridSizes{.shard = 3}, HybridSizes{.replicate = 3}, HybridSizes{2, 2}})
    for (int other = 0; other < sizes.replicate * sizes.shard; ++other)
      for (const double scale : on_ranks(sizes.replicate * sizes.shard, [&](World& world) {
             ScaledJob job(world, DeviceMesh::hybrid(world, sizes),
                           {.init_scale = world.rank() == other ? 512.0 : 1024.0});
             const bool found = job.scaled_step(0);
             return found && job.optimizer.steps() == 0 && !job.scaled_step(0) ? job.scale() : -1;
           }))
        CHECK(scale == 256);
}

TEST_CASE("the loop that fully_shard documents recovers where steps may be skipped", "[threads]") {
  constexpr std::int64_t kSteps = 4;
  for (const bool is_last : {false, true}) {
    const auto seen = on_ranks(3, [&](World& world) {
      ScaledJob job(world, {.init_scale = 64});
      int failures = 0, resets = 0;
      for (bool is_done = false; !is_done;) try {
          while (job.optimizer.steps() < kSteps) {
            const std::int64_t k = job.optimizer.steps();
            job.scaler.scale(job.loss(static_cast<int>(k))).backward();
            if (world.rank() == 1 && k == (is_last ? kSteps - 1 : 1) && failures++ == 0)
              throw std::runtime_error("no luck");
            job.scaler.step(job.optimizer);
            job.scaler.update();
            job.optimizer.zero_grad();
          }
          world.barrier();
          is_done = true;
        } catch (const std::exception&) {
          if (++resets > 1 || !reset(job.stack).parameters_are_consistent) throw;
        }
      return std::pair(job.optimizer.steps(), resets);
    });
    for (const auto& [steps, resets] : seen) {
      CHECK(steps == kSteps);
      CHECK(resets == 1);
    }
  }
}

TEST_CASE("a reset forgets what a failed step has begun, and still counts what was skipped",
          "[threads]") {
  struct Seen {
    bool was_whole = false, found = true;
    std::int64_t steps = -1, after = -1;
    double scale = 0;
  };
  const auto seen = on_ranks(2, [](World& world) {
    ScaledJob job(world, {.init_scale = 1024});
    job.scaled_step(0);
    job.scaled_step(1, 0);  // skipped, which no host has asked for yet
    Seen out;
    try {
      job.scaler.scale(job.loss(2)).backward();
      job.scaler.unscale(job.optimizer);
      world.barrier();
      if (world.rank() == 1) throw std::runtime_error("no luck");
      world.barrier();
    } catch (const std::exception&) {
      out.was_whole = reset(job.stack).parameters_are_consistent;
    }
    out.steps = job.optimizer.steps();
    out.found = job.scaled_step(2);
    out.after = job.optimizer.steps();
    out.scale = job.scale();
    return out;
  });
  for (const Seen& s : seen) {
    CHECK(s.was_whole);
    CHECK(s.steps == 1);
    CHECK(!s.found);
    CHECK(s.after == 2);
    CHECK(s.scale == 512);
  }
}

TEST_CASE("rank 0 sends the scaler's state to ranks that have none", "[threads]") {
  for (const double scale : on_ranks(3, [](World& world) {
         optim::GradScaler saved(world.device(), {.init_scale = 32});
         StateDict state;
         if (world.rank() == 0) state = saved.state_dict();
         optim::GradScaler loaded(world.device());
         loaded.load(state, {.from_rank_0 = &world});
         return loaded.current_scale().item();
       }))
    CHECK(scale == 32);
}

TEST_CASE("an f16 model whose gradients are too small for f16 trains with a scaler only",
          "[threads]") {
  struct Losses {
    double first = 0, last = 0;
  };
  // The loss is the mean of y^2 times 2^-30: d loss / d y is below 2^-25 for y below 16, and such
  // an f16 is 0. Gradient descent on the mean over 4 rows of 3 with inputs in (0, 1) has curvature
  // of at most 2 / 12 * 4 rows * 5 inputs, the bias's one of them: 3.4, so that a rate of 0.5 only
  // goes down.
  constexpr double kTiny = 0x1p-30;
  const auto train = [&](bool scales) {
    return on_ranks(2, [&](World& world) {
      nn::Linear model(4, 3);
      fully_shard(model, {.mesh = DeviceMesh::flat(world), .precision = {.param = f16}});
      nn::init(model, {3}, world.device());
      optim::SGD optimizer(model.parameters(), {.lr = 0.5 / kTiny});
      optim::GradScaler scaler(world.device());
      const Tensor x = positive_rows(1, 2 * world.rank(), 2, 4, world.device(), f16);
      Losses losses;
      for (int k = 0; k < 30; ++k) {
        const Tensor loss = mean_square(cast(model(x), f32) - 1.0) * kTiny;
        (scales ? scaler.scale(loss) : loss).backward();
        losses.last = world.sum(loss.item());
        if (k == 0) losses.first = losses.last;
        scales ? scaler.step(optimizer) : optimizer.step();
        if (scales) scaler.update();
        optimizer.zero_grad();
      }
      return losses;
    });
  };
  for (const Losses& l : train(false)) CHECK(l.last == l.first);
  for (const Losses& l : train(true)) CHECK(l.last < l.first / 4);
}
