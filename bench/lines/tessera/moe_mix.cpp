// A convolution and an LSTM cell as compositions, and a top-2 mixture of experts, sharded.
#include <cstdio>
#include <tessera/tessera.hpp>

using namespace tessera;

// Each token goes to its two best experts, of which each has room for `room` tokens.
struct Mixture : nn::Module {
  Mixture(int dim, int count, std::int64_t room) : router(dim, count), room(room) {
    for (int e = 0; e < count; ++e) experts.emplace_back(dim, 2 * dim);
    register_modules("router", router, "experts", experts);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      const Tensor logits = router(x);
      const auto [best, chosen] = topk(logits, 2);
      const Tensor gates = scatter(logits * 0, 1, chosen, softmax(best));
      Tensor y = x;
      for (std::size_t e = 0; e < experts.size(); ++e) {
        const auto [gate, rows] = topk(select(gates, 1, e), room);
        y = index_add(y, 0, rows, experts[e](index_select(x, 0, rows)) * unsqueeze(gate, 1));
      }
      return y;
    });
  }
  nn::Linear router;
  nn::ModuleList<nn::GeluMlp> experts;
  std::int64_t room;
};

struct Model : nn::Module {
  Model() { register_modules("conv", conv, "lstm", lstm, "mixture", mixture, "head", head); }
  Tensor operator()(const Tensor& x) {  // [B, T, 1]
    return call([&] {
      const Tensor time = Tensor::arange(x.size(1), i64, x.device());
      const Tensor taps = unsqueeze(time, 1) + slice(time, 0, 0, 3);
      const Tensor patches = index(pad(x, {0, 0, 1, 1}), {Range{}, taps});  // [B, T, 3, 1]
      const Tensor features = relu(conv(flatten(patches, 2)));
      Tensor h = Tensor::zeros({x.size(0), 32}, f32, x.device()), c = h;
      for (std::int64_t t = 0; t < x.size(1); ++t) {
        const auto g = chunk(lstm(cat({select(features, 1, t), h}, 1)), 4, 1);
        c = sigmoid(g[1]) * c + sigmoid(g[0]) * tanh(g[2]);
        h = sigmoid(g[3]) * tanh(c);
      }
      return head(mixture(h));
    });
  }
  nn::Linear conv{3, 16}, lstm{16 + 32, 4 * 32};
  Mixture mixture{32, 4, 48};
  nn::Linear head{32, 3};
};

int main(int argc, char** argv) {
  return tessera::run(argc, argv, [](World& world) {
    Model model;
    for (auto& e : model.mixture.experts) fully_shard(e, {.mesh = DeviceMesh::flat(world)});
    fully_shard(model, {.mesh = DeviceMesh::flat(world)});
    nn::init(model, {1}, world.device());
    optim::AdamW optimizer(model.parameters(), {.lr = 3e-3, .weight_decay = 0.01});

    double first = 0, last = 0;
    for (int step = 0; step < 200; ++step) {  // which of three frequencies is it?
      const std::uint64_t key = 3 * (world.size() * step + world.rank());
      const Tensor y = randint(0, 3, {64}, key, i64, world.device());
      const Tensor phase = Tensor::uniform({64, 1}, 0, 6, key + 1, f32, world.device());
      const Tensor time = Tensor::arange(16, f32, world.device());
      const Tensor x = sin(unsqueeze(cast(y + 1, f32), 1) * 0.5 * time + phase) +
                       0.1 * randn({64, 16}, key + 2, world.device());
      const Tensor loss = cross_entropy(model(unsqueeze(x, 2)), y);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      last = world.sum(loss.item()) / world.size();
      if (step == 0) first = last;
    }
    if (world.rank() == 0) std::printf("loss %.3f -> %.3f\n", first, last);
    if (last > 0.3 * first) throw std::runtime_error("it did not learn");
  });
}
