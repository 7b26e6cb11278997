// An MLP classifier with AdamW, sharded over 4 ranks as threads.
#include <cstdio>
#include <tessera/tessera.hpp>

namespace ts = tessera;
using ts::Tensor;

int main() {
  return ts::run({.program = "mlp", .ranks = 4}, [](ts::World& world) {
    using ts::nn::Linear;
    ts::nn::Sequential model(std::make_unique<Linear>(16, 64), ts::relu,
                             std::make_unique<Linear>(64, 64), ts::relu,
                             std::make_unique<Linear>(64, 4));
    const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world)};
    model.apply<Linear>([&](Linear& layer) { ts::fully_shard(layer, options); });
    ts::fully_shard(model, options);
    ts::nn::init(model, {1}, world.device());
    ts::optim::AdamW optimizer(model.parameters(), {.lr = 3e-3, .weight_decay = 0.01});

    const Tensor teacher = ts::randn({16, 4}, 1, world.device());
    const auto batch = [&](std::uint64_t key) {  // of this rank: 64 points and their classes
      const Tensor x = ts::randn({64, 16}, 4 * key + world.rank() + 2, world.device());
      return std::pair(x, argmax(matmul(x, teacher), 1));
    };
    double first = 0, last = 0;
    for (int step = 0; step < 300; ++step) {
      const auto [x, y] = batch(step);
      const Tensor loss = cross_entropy(model(x), y);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      last = world.sum(loss.item()) / world.size();
      if (step == 0) first = last;
    }
    const ts::NoGradGuard no_grad;
    const auto [x, y] = batch(1000);
    const Tensor hits = mean(cast(argmax(model(x), 1) == y, ts::f32));
    const double accuracy = world.sum(hits.item()) / world.size();
    if (world.rank() == 0) std::printf("loss %.3f -> %.3f, accuracy %.3f\n", first, last, accuracy);
    if (last > 0.3 * first || accuracy < 0.85) throw std::runtime_error("it did not learn");
  });
}
