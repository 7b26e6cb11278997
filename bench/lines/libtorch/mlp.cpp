// An MLP classifier with AdamW in one process.
#include <torch/torch.h>

#include <cstdio>

namespace nn = torch::nn;
using torch::Tensor;

int main() {
  torch::manual_seed(1);
  nn::Sequential model(nn::Linear(16, 64), nn::ReLU(), nn::Linear(64, 64), nn::ReLU(),
                       nn::Linear(64, 4));
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));

  const Tensor teacher = torch::randn({16, 4});
  const auto batch = [&] {  // points and their classes
    const Tensor x = torch::randn({256, 16});
    return std::pair(x, matmul(x, teacher).argmax(1));
  };
  double first = 0, last = 0;
  for (int step = 0; step < 300; ++step) {
    const auto [x, y] = batch();
    const Tensor loss = nn::functional::cross_entropy(model->forward(x), y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  const torch::NoGradGuard no_grad;
  const auto [x, y] = batch();
  const double accuracy =
      (model->forward(x).argmax(1) == y).to(torch::kFloat).mean().item<double>();
  std::printf("loss %.3f -> %.3f, accuracy %.3f\n", first, last, accuracy);
  if (last > 0.3 * first || accuracy < 0.85) throw std::runtime_error("it did not learn");
}
