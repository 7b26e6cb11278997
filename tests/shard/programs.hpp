// Programs of users that train, on several ranks and with every policy, against the same program on
// one rank and on a model without units.
#pragma once

#include <utility>
#include <vector>

#include "tests/shard/support.hpp"
#include "tests/support/share.hpp"

namespace tessera::testing {

inline constexpr int kTrainedSteps = 4;
// Of a batch, which 1, 2, 3 or 4 ranks share in halves or thirds. With 6 layers at most they round
// less often than the 9 layers and 24 rows of kRounding.
inline constexpr std::int64_t kAllRows = 72;

inline Tensor my_rows(const World& world, std::uint64_t seed, std::int64_t width) {
  const std::int64_t rows = kAllRows / world.size();
  return positive_rows(seed, world.rank() * rows, rows, width, world.device());
}
inline Tensor part_of(const Tensor& x, int part, int parts) {
  const std::int64_t rows = x.shape()[0] / parts;
  return slice(x, 0, part * rows, (part + 1) * rows);
}

// A model and how it is used.
struct Program : nn::Module {
  virtual void shard(const ShardOptions& options) = 0;
  // Forward and backward on this rank's rows; gives the loss.
  virtual Tensor step(const World& world, const Tensor& x, int k) = 0;
  virtual std::int64_t width() const { return 5; }
};

struct Course {
  Values gradients;  // of the first step
  Values values;     // at the end
  Values losses;     // of all steps, averaged over the ranks
};

// Steps of SGD. `options` null: without units.
template <class P>
Course train_program(int ranks, const ShardOptions* options, std::uint64_t seed) {
  const auto all = on_ranks(ranks, [&](World& world) {
    P program;
    make_positive(program);
    if (options) {
      ShardOptions mine = *options;
      mine.mesh = DeviceMesh::flat(world);
      program.shard(mine);
    }
    nn::init(program, {seed}, world.device());
    optim::SGD optimizer(program.parameters(), {.lr = 0.003});
    Course course;
    for (int k = 0; k < kTrainedSteps; ++k) {
      const Tensor x = my_rows(world, seed + static_cast<std::uint64_t>(k), program.width());
      const double loss = program.step(world, x, k).item();
      course.losses["loss"].push_back(static_cast<float>(world.sum(loss) / ranks));
      if (k == 0) course.gradients = shard_gradients(program);
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const auto& [name, p] : program.named_parameters())
      course.values[name] = p.shard().template to_vector<float>();
    return course;
  });
  std::vector<Values> gradients, values;
  for (const Course& course : all) {
    gradients.push_back(course.gradients);
    values.push_back(course.values);
  }
  Course whole{assemble(gradients), assemble(values), all[0].losses};
  // What nobody used is missing, or zeros beside what was used: a model without units has one
  // group.
  std::erase_if(whole.gradients, [](const auto& named) { return largest(named.second) == 0; });
  return whole;
}

// One rank has the bits of a model without units, and others its values: gradients of the first
// step within kRounding. A step moves no parameter by more than a twentieth of it, so none cancels,
// and the relative error of a parameter after four is below 4 / 20 of a gradient's; a gradient and
// a loss take in that of fewer than 20 factors, which is 4 times as much at most.
template <class P>
void check_program() {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const World nowhere = World::single();
  const Course plain = train_program<P>(1, nullptr, seed);
  CHECK(!plain.gradients.empty());
  GridShare share;
  for (const Reshard reshard :
       {Reshard::automatic, Reshard::always, Reshard::never, Reshard::to(2)}) {
    const ShardOptions options{.mesh = DeviceMesh::flat(nowhere), .reshard_after_forward = reshard};
    INFO("reshard " << reshard);
    if (!reshard.is_partial()) {
      const Course one = train_program<P>(1, &options, seed);
      CHECK(same_bits(one.gradients, plain.gradients));
      CHECK(same_bits(one.losses, plain.losses));
      CHECK(same_bits(one.values, plain.values));
    }
    for (const int ranks : {2, 3, 4}) {
      if (reshard.is_partial() && ranks < 4) continue;  // no proper part
      if (!share.takes()) continue;
      INFO(ranks << " ranks");
      const Course many = train_program<P>(ranks, &options, seed);
      CHECK(distance(plain.gradients, many.gradients) < kRounding);
      CHECK(distance(plain.losses, many.losses) < 5 * kRounding);
      CHECK(distance(plain.values, many.values) < 5 * kRounding);
    }
  }
}

}  // namespace tessera::testing
