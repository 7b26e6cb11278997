// An MLP classifier with AdamW, sharded by hand over 4 ranks as threads.
#include <torch/torch.h>

#include <cstdio>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace nn = torch::nn;
using torch::Tensor;

constexpr int kRanks = 4;

// The parameters of a module, of which each rank keeps a part of one flat array.
class Unit {
 public:
  Unit(nn::Module& module, c10d::ProcessGroupGloo& group)
      : parameters_(module.parameters()), group_(group) {
    for (const Tensor& p : parameters_) shapes_.push_back(p.sizes().vec());
    const Tensor whole = flatten(parameters_);
    shard = whole.chunk(kRanks)[group.getRank()].clone().set_requires_grad(true);
    free();
  }
  void gather() {
    Tensor whole = torch::empty(shard.numel() * kRanks), mine = shard.detach();
    group_.all_gather_single(whole, mine)->wait();
    std::int64_t at = 0;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const std::int64_t numel = c10::multiply_integers(shapes_[i]);
      parameters_[i].set_data(whole.narrow(0, at, numel).view(shapes_[i]));
      at += numel;
    }
  }
  void reduce() {
    std::vector<Tensor> gradients;
    for (Tensor& p : parameters_)
      gradients.push_back(p.grad().defined() ? p.grad() : torch::zeros_like(p));
    Tensor whole = flatten(gradients) / kRanks, mine = torch::empty_like(shard);
    group_.reduce_scatter_single(mine, whole)->wait();
    shard.mutable_grad() = mine;
    free();
  }

  Tensor shard;

 private:
  static Tensor flatten(const std::vector<Tensor>& parts) {  // padded to a multiple of the ranks
    std::vector<Tensor> flat;
    for (const Tensor& part : parts) flat.push_back(part.detach().flatten());
    const Tensor whole = cat(flat);
    return constant_pad_nd(whole, {0, (kRanks - whole.numel() % kRanks) % kRanks});
  }
  void free() {
    for (Tensor& p : parameters_) {
      p.mutable_grad().reset();
      p.set_data(torch::empty(0));
    }
  }

  std::vector<Tensor> parameters_;
  std::vector<std::vector<std::int64_t>> shapes_;
  c10d::ProcessGroupGloo& group_;
};

void train(int rank, nn::Sequential model, const Tensor& teacher, c10d::ProcessGroupGloo& group) {
  std::vector<Unit> units;
  std::vector<Tensor> shards;
  for (const auto& layer : model->children())
    if (!layer->parameters().empty()) shards.push_back(units.emplace_back(*layer, group).shard);
  torch::optim::AdamW optimizer(shards, torch::optim::AdamWOptions(3e-3));
  const auto mean_over_ranks = [&](const Tensor& x) {
    std::vector<Tensor> sum{x.detach().clone()};
    group.allreduce(sum)->wait();
    return sum[0].item<double>() / kRanks;
  };
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(rank);
  const auto batch = [&] {  // of this rank: 64 points and their classes
    const Tensor x = torch::randn({64, 16}, generator);
    return std::pair(x, matmul(x, teacher).argmax(1));
  };
  double first = 0, last = 0;
  for (int step = 0; step < 300; ++step) {
    const auto [x, y] = batch();
    for (Unit& unit : units) unit.gather();
    const Tensor loss = nn::functional::cross_entropy(model->forward(x), y);
    loss.backward();
    for (Unit& unit : units) unit.reduce();
    optimizer.step();
    last = mean_over_ranks(loss);
    if (step == 0) first = last;
  }
  const torch::NoGradGuard no_grad;
  for (Unit& unit : units) unit.gather();
  const auto [x, y] = batch();
  const double accuracy =
      mean_over_ranks((model->forward(x).argmax(1) == y).to(torch::kFloat).mean());
  if (rank == 0) std::printf("loss %.3f -> %.3f, accuracy %.3f\n", first, last, accuracy);
  if (last > 0.3 * first || accuracy < 0.85) throw std::runtime_error("it did not learn");
}

int main() {
  torch::set_num_threads(1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const Tensor teacher = torch::randn({16, 4});
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    torch::manual_seed(1);
    ranks.emplace_back([&, rank,
                        model = nn::Sequential(nn::Linear(16, 64), nn::ReLU(), nn::Linear(64, 64),
                                               nn::ReLU(), nn::Linear(64, 4))] {
      c10d::ProcessGroupGloo group(store, rank, kRanks,
                                   c10d::ProcessGroupGloo::Options::create_default());
      train(rank, model, teacher, group);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}
