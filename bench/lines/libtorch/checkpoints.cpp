// Model, optimizer and data position saved and resumed: bit by bit what the unbroken run gives.
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>

namespace nn = torch::nn;
using torch::Tensor;

constexpr int kPoints = 100, kBatch = 8, kSteps = 200, kSaved = 87;  // 12 steps an epoch

struct Training {
  Training() {
    const torch::NoGradGuard no_grad;
    torch::manual_seed(1);
    for (Tensor& p : net->parameters()) p.uniform_(-0.5, 0.5);
    x = torch::rand({kPoints, 2}) * 2 - 1;
    y = x.narrow(1, 0, 1).square() - x.narrow(1, 1, 1);
  }
  double train_to(int end) {  // the last loss
    double last = 0;
    for (; step < end; ++step) {
      const int per_epoch = kPoints / kBatch;
      auto generator = torch::make_generator<at::CPUGeneratorImpl>(step / per_epoch);
      const Tensor rows =
          torch::randperm(kPoints, generator).narrow(0, step % per_epoch * kBatch, kBatch);
      const Tensor loss = mse_loss(net->forward(x.index_select(0, rows)), y.index_select(0, rows));
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      last = loss.item<double>();
    }
    return last;
  }
  void save(const std::string& folder) {
    torch::save(net, folder + "/model.pt");
    torch::save(optimizer, folder + "/optimizer.pt");
    torch::save(torch::tensor(step), folder + "/step.pt");
  }
  void load(const std::string& folder) {
    torch::load(net, folder + "/model.pt");
    torch::load(optimizer, folder + "/optimizer.pt");
    Tensor kept;
    torch::load(kept, folder + "/step.pt");
    step = kept.item<int>();
  }

  nn::Sequential net{nn::Linear(2, 32), nn::Tanh(), nn::Linear(32, 1)};
  torch::optim::AdamW optimizer{net->parameters(),
                                torch::optim::AdamWOptions(0.02).weight_decay(0.1)};
  int step = 0;
  Tensor x, y;
};

int main() {
  const std::string folder = "checkpoint";
  std::filesystem::create_directory(folder);
  Training unbroken, first;
  const double loss = unbroken.train_to(kSteps);
  const double before = first.train_to(kSaved);
  first.save(folder);

  Training resumed;
  resumed.load(folder);
  const double again = resumed.train_to(kSteps);
  bool same = loss == again;
  const auto a = unbroken.net->parameters(), b = resumed.net->parameters();
  for (std::size_t i = 0; i < a.size(); ++i) same &= equal(a[i], b[i]);
  std::printf("loss %.5f, then %.5f, resumed %.5f\n", before, loss, again);
  if (!same || loss > 0.1) throw std::runtime_error("the resumed run differs");
}
