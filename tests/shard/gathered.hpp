// A stack whose matrices travel in another form, in training.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/param/gather_transform.hpp"
#include "tests/shard/support.hpp"

namespace tessera::testing {

enum class When : std::uint8_t { never, before_sharding, after_sharding };

// Matrices of 5, 7 and 3 rows, so that ranks have parts of them and none.
struct Gathered {
  Gathered(const World& world, const std::shared_ptr<const GatherTransform>& transform,
           const ShardOptions& options, When when = When::before_sharding)
      : world(world) {
    const auto give = [&] {
      for (const Parameter& p : stack.parameters())
        if (p.shape().ndim() > 1) p.set_gather_transform(transform);
    };
    if (when == When::before_sharding) give();
    stack.shard(options);
    if (when == When::after_sharding) give();
    nn::init(stack, {3}, world.device());
  }
  Tensor loss(int k) {
    const Tensor x = rows_of(static_cast<std::uint64_t>(k), 2 * world.rank(), 2, 4, world.device());
    return mean_square(cast(stack(x), f32));
  }

  const World& world;
  Stack stack{{4, 5, 7, 3}};
};

struct GatheredRun {
  std::vector<float> losses;
  Values parameters;
};

inline GatheredRun train_gathered(Gathered& job, int steps, optim::Optimizer& optimizer,
                                  const std::function<Tensor(int)>& loss_of) {
  GatheredRun run;
  for (int k = 0; k < steps; ++k) {
    const Tensor loss = loss_of(k);
    loss.backward();
    run.losses.push_back(static_cast<float>(loss.item()));
    optimizer.step();
    optimizer.zero_grad();
  }
  run.parameters = full_values(job.stack);
  return run;
}

inline GatheredRun train_gathered(Gathered& job, int steps) {
  optim::AdamW optimizer(job.stack.parameters(), {.lr = 0.05});
  return train_gathered(job, steps, optimizer, [&](int k) { return job.loss(k); });
}

inline bool is_same_run(const GatheredRun& a, const GatheredRun& b) {
  return testing::same_bits(a.losses, b.losses) && testing::same_bits(a.parameters, b.parameters);
}

// Calls f(weight in its unit's call, name) for each matrix.
inline void look_at_matrices(Stack& stack,
                             const std::function<void(const std::string&, const Tensor&)>& f) {
  static_cast<void>(shard_plan(stack));  // makes the stack the root
  for (std::size_t i = 0; i < stack.layers.size(); ++i)
    stack.layers[i].call([&] {
      f(concat("layers.", i, ".weight"), stack.layers[i].weight.value().detach());
      return Tensor::ones({}, f32, stack.layers[i].weight.device());
    });
}

}  // namespace tessera::testing
