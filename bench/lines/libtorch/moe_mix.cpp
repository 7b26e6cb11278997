// A convolution, an LSTM cell and a top-2 mixture of experts.
#include <torch/torch.h>

#include <cstdio>

namespace nn = torch::nn;
using torch::Tensor;

// Each token goes to its two best experts.
struct MixtureImpl : nn::Module {
  MixtureImpl(int dim, int count) : router(register_module("router", nn::Linear(dim, count))) {
    for (int e = 0; e < count; ++e)
      experts->push_back(
          nn::Sequential(nn::Linear(dim, 2 * dim), nn::GELU(), nn::Linear(2 * dim, dim)));
  }
  Tensor forward(const Tensor& x) {
    const auto [best, chosen] = router(x).topk(2);
    const Tensor gates = best.softmax(1);
    Tensor y = x;
    for (std::size_t e = 0; e < experts->size(); ++e) {
      const Tensor at = (chosen == static_cast<std::int64_t>(e)).nonzero();
      const Tensor rows = at.select(1, 0), gate = gates.index({rows, at.select(1, 1)});
      const Tensor out = experts[e]->as<nn::SequentialImpl>()->forward(x.index_select(0, rows));
      y = y.index_add(0, rows, out * gate.unsqueeze(1));
    }
    return y;
  }
  nn::Linear router;
  nn::ModuleList experts{register_module("experts", nn::ModuleList())};
};
TORCH_MODULE(Mixture);

struct Model : nn::Module {
  Tensor forward(const Tensor& x) {  // [B, T]
    const Tensor features = relu(conv(x.unsqueeze(1)));
    Tensor h = torch::zeros({x.size(0), 32}), c = h;
    for (std::int64_t t = 0; t < x.size(1); ++t)
      std::tie(h, c) = cell(features.select(2, t), std::tuple(h, c));
    return head(mixture(h));
  }
  nn::Conv1d conv{register_module("conv", nn::Conv1d(nn::Conv1dOptions(1, 16, 3).padding(1)))};
  nn::LSTMCell cell{register_module("cell", nn::LSTMCell(16, 32))};
  Mixture mixture{register_module("mixture", Mixture(32, 4))};
  nn::Linear head{register_module("head", nn::Linear(32, 3))};
};

int main() {
  torch::manual_seed(1);
  Model model;
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(3e-3));

  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {  // which of three frequencies is it?
    const Tensor y = torch::randint(3, {64}, torch::kLong), phase = torch::rand({64, 1}) * 6;
    const Tensor x =
        sin((y + 1).unsqueeze(1) * 0.5 * torch::arange(16) + phase) + torch::randn({64, 16}) * 0.1;
    const Tensor loss = nn::functional::cross_entropy(model.forward(x), y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("loss %.3f -> %.3f\n", first, last);
  if (last > 0.3 * first) throw std::runtime_error("it did not learn");
}
