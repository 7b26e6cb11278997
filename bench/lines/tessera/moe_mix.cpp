// A convolution and an LSTM cell as compositions, and a top-2 mixture of experts.
#include <cstdio>
#include <tessera/tessera.hpp>

namespace ts = tessera;
namespace nn = ts::nn;
using ts::Tensor;

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
      const Tensor time = Tensor::arange(x.size(1), ts::i64, x.device());
      const Tensor taps = unsqueeze(time, 1) + slice(time, 0, 0, 3);
      const Tensor patches = index(pad(x, {0, 0, 1, 1}), {ts::Range{}, taps});  // [B, T, 3, 1]
      const Tensor features = relu(conv(flatten(patches, 2)));
      Tensor h = Tensor::zeros({x.size(0), 32}, ts::f32, x.device()), c = h;
      for (std::int64_t t = 0; t < x.size(1); ++t) {
        const auto g = chunk(lstm(ts::cat({select(features, 1, t), h}, 1)), 4, 1);
        c = sigmoid(g[1]) * c + sigmoid(g[0]) * ts::tanh(g[2]);
        h = sigmoid(g[3]) * ts::tanh(c);
      }
      return head(mixture(h));
    });
  }
  nn::Linear conv{3, 16}, lstm{16 + 32, 4 * 32};
  Mixture mixture{32, 4, 48};
  nn::Linear head{32, 3};
};

int main() {
  const ts::Device device = ts::Device::cpu();
  Model model;
  nn::init(model, {1}, device);
  ts::optim::AdamW optimizer(model.parameters(), {.lr = 3e-3, .weight_decay = 0.01});

  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {  // which of three frequencies is it?
    const Tensor y = ts::randint(0, 3, {64}, 3 * step, ts::i64, device);
    const Tensor phase = Tensor::uniform({64, 1}, 0, 6, 3 * step + 1, ts::f32, device);
    const Tensor time = Tensor::arange(16, ts::f32, device);
    const Tensor noise = Tensor::normal({64, 16}, 0, 0.1, 3 * step + 2, ts::f32, device);
    const Tensor x = sin(unsqueeze(cast(y + 1, ts::f32), 1) * 0.5 * time + phase) + noise;
    const Tensor loss = cross_entropy(model(unsqueeze(x, 2)), y);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item();
    if (step == 0) first = last;
  }
  std::printf("loss %.3f -> %.3f\n", first, last);
  if (last > 0.3 * first) throw std::runtime_error("it did not learn");
}
