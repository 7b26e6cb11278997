// Clipping whose coefficient the optimizers apply: over ranks, replicas and shards on the host it
// has the bits of a pass over the gradients. What one rank's program does in between is the matter
// of tests/optim/clip_in_optimizer_test.
#include "tessera/optim/clip.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "tessera/memory/memory.hpp"
#include "tessera/optim/muon.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/shard/offload_job.hpp"
#include "tests/support/launches.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Of the pass that clips in place.
constexpr const char* kPass = "scale_gradient";

struct Case {
  const char* name;
  int ranks, replicas = 1;
  Offload offload = Offload::none;
  DType reduce = f32;
  enum { adamw, muon, nesterov } optimizer = adamw;
  int passes = 0;  // in a step, of those that a coefficient in the optimizer leaves
};

std::unique_ptr<optim::Optimizer> make_optimizer(const Case& of, const Stack& stack) {
  if (of.optimizer == Case::adamw) return std::make_unique<optim::AdamW>(stack.parameters());
  const auto [matrices, others] = optim::split_for_muon(stack.parameters());
  return std::make_unique<optim::Muon>(
      matrices, others, optim::MuonOptions{.lr = 0.1, .nesterov = of.optimizer == Case::nesterov});
}

struct ClippedTraining : OffloadJob {
  ClippedTraining(const World& world, const Case& of, optim::Clip clip)
      : OffloadJob(world, of.offload, of.reduce, of.reduce, of.replicas),
        how(clip),
        optimizer(make_optimizer(of, stack)) {}
  void backward(int k) { loss(k).backward(); }
  void clip(double most) {
    optim::clip_grad_norm(stack.parameters(), most, optim::NormType::l2, how);
  }
  void update() {
    optimizer->step();
    optimizer->zero_grad();
  }

  optim::Clip how;
  std::unique_ptr<optim::Optimizer> optimizer;
};

struct ClippedResult {
  Values parameters, gradients;
  int of_steps = 0, of_accumulation = 0;
};

}  // namespace

TEST_CASE("ranks whose optimizers clip have the bits of ranks that clip their gradients",
          "[threads]") {
  const Case cases[] = {
      {.name = "one rank", .ranks = 1},
      {.name = "three ranks", .ranks = 3},
      {.name = "sums in 16 bits", .ranks = 2, .reduce = bf16},
      {.name = "replicas", .ranks = 4, .replicas = 2},
      {.name = "shards on the host", .ranks = 2, .offload = Offload::cpu},
      {.name = "Muon", .ranks = 2, .optimizer = Case::muon},
      // Of the three units two have a matrix.
      {.name = "Muon with Nesterov's momentum",
       .ranks = 3,
       .optimizer = Case::nesterov,
       .passes = 2},
  };
  for (const bool is_shuffled : {false, true})
    for (const Case& of : cases) {
      const std::uint64_t seed = fresh_seed();
      const ExecutorChoice executor =
          is_shuffled ? testing::shuffled(seed) : ExecutorKind::threaded;
      INFO(of.name << ", executor " << name(executor) << ", seed " << seed);
      const auto train = [&](optim::Clip how) {
        return on_ranks(of.ranks, {.executor = executor, .threads = 1}, [&](World& world) {
          ClippedTraining job(world, of, how);
          ClippedResult out;
          const Device& device = state_of(job.stack.scale)->group->device;
          const Launches launches(device);
          for (int k = 0; k < 3; ++k) {
            job.backward(k);
            job.clip(0.5);
            job.update();
          }
          out.of_steps = static_cast<int>(launches.of(kPass));
          job.backward(3);
          job.clip(0.25);
          job.backward(4);  // adds to what is clipped
          out.of_accumulation = static_cast<int>(launches.of(kPass)) - out.of_steps;
          out.gradients = shard_gradients(job.stack);
          job.clip(0.5);
          job.update();
          out.parameters = full_values(job.stack);
          return out;
        });
      };
      const auto expected = train(optim::Clip::in_place), found = train(optim::Clip::in_optimizer);
      for (std::size_t r = 0; r < found.size(); ++r) {
        CHECK(same_bits(expected[r].parameters, found[r].parameters));
        CHECK(same_bits(expected[r].gradients, found[r].gradients));
        CHECK(expected[r].of_steps == 3 * 3);  // three units
        CHECK(found[r].of_steps == 3 * of.passes);
        CHECK(found[r].of_accumulation == 3);
      }
    }
}

TEST_CASE(
    "one norm over units of two meshes, and beside them, takes one sum of each group of ranks",
    "[threads][fsdp2-101]") {
  struct Found {
    std::vector<double> parts, norm;  // by type, of three models each and of all
    std::vector<std::uint64_t> sums;  // of both groups and the world, of a norm of all
  };
  const auto types = {optim::NormType::l2, optim::NormType::l1, optim::NormType::inf};
  for (const Found& found : on_ranks(4, [&](World& world) {
         // Ranks 0, 1 and 2, 3 shard the first; 0, 2 and 1, 3 the second; each has all of the
         // third.
         const DeviceMesh mesh = DeviceMesh::grid(world, {{"a", 2}, {"b", 2}});
         Stack first({6, 5, 4}), second({6, 5, 4}), third({6, 5, 4});
         first.shard({.mesh = mesh["b"], .piece_bytes = 1});
         second.shard({.mesh = mesh["a"], .precision = {.param = bf16}});
         std::vector<Parameter> all;
         for (Stack* const model : {&first, &second, &third}) {
           nn::init(*model, {3}, world.device());
           mean_square(cast((*model)(rows_of(1, 0, 2, 6, world.device())), f32)).backward();
           for (const Parameter& p : model->parameters()) all.push_back(p);
         }
         const Communicator* const groups[] = {&mesh["a"].shard_group().control(),
                                               &mesh["b"].shard_group().control(),
                                               &world.control()};
         Found out;
         for (const optim::NormType type : types) {
           for (const Stack* const model : {&first, &second, &third})
             out.parts.push_back(optim::clip_grad_norm(model->parameters(), 0, type).item());
           for (const Communicator* const group : groups) out.sums.push_back(group->submitted());
           out.norm.push_back(optim::clip_grad_norm(all, 0, type).item());
           for (std::size_t i = 0; i < 3; ++i) {
             std::uint64_t& before = out.sums[out.sums.size() - 3 + i];
             before = groups[i]->submitted() - before;
           }
         }
         return out;
       })) {
    CHECK(found.sums == std::vector<std::uint64_t>{1, 1, 0, 1, 1, 0, 1, 1, 0});
    const auto& p = found.parts;
    const double expected[] = {std::sqrt(p[0] * p[0] + p[1] * p[1] + p[2] * p[2]),
                               p[3] + p[4] + p[5], std::max({p[6], p[7], p[8]})};
    // Each is a sum in f64, rounded to f32 once.
    for (std::size_t i = 0; i < 3; ++i)
      CHECK(std::abs(found.norm[i] - expected[i]) <= 2 * 0x1p-24 * expected[i]);
    CHECK(p[2] > 0);
  }
}

TEST_CASE("a coefficient that no optimizer has applied goes with a reset", "[threads]") {
  for (const bool is_same : on_ranks(2, [&](World& world) {
         const Case of{.name = "", .ranks = 2};
         ClippedTraining with(world, of, optim::Clip::in_optimizer),
             without(world, of, optim::Clip::in_place);
         with.backward(0);
         with.clip(0.01);
         reset(with.stack);
         const Launches launches(world.device());
         for (ClippedTraining* job : {&with, &without}) {
           job->backward(1);
           job->update();
         }
         return launches.of(kPass) == 0 &&
                same_bits(full_values(with.stack), full_values(without.stack));
       }))
    CHECK(is_same);
}
