// Model, optimizer and data position saved and resumed: bit by bit what the unbroken run gives;
// sharded by hand over 2 ranks.
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace nn = torch::nn;
using torch::Tensor;

constexpr int kRanks = 2, kPoints = 100, kBatch = 8, kSteps = 200,
              kSaved = 87;  // 12 steps an epoch

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

struct Training {
  Training(int rank, c10d::ProcessGroupGloo& group) : rank(rank), group(group) {
    const torch::NoGradGuard no_grad;
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(1);
    for (Tensor& p : net->parameters()) p.uniform_(-0.5, 0.5, generator);
    x = torch::rand({kPoints, 2}, generator) * 2 - 1;
    y = x.narrow(1, 0, 1).square() - x.narrow(1, 1, 1);
    for (const auto& layer : net->children())
      if (!layer->parameters().empty()) shards.push_back(units.emplace_back(*layer, group).shard);
    optimizer = std::make_unique<torch::optim::AdamW>(
        shards, torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  }
  double train_to(int end) {  // the last loss
    double last = 0;
    for (; step < end; ++step) {
      const int per_epoch = kPoints / kBatch, mine = kBatch / kRanks;
      auto generator = torch::make_generator<at::CPUGeneratorImpl>(step / per_epoch);
      const Tensor rows = torch::randperm(kPoints, generator)
                              .narrow(0, step % per_epoch * kBatch + rank * mine, mine);
      for (Unit& unit : units) unit.gather();
      const Tensor loss = mse_loss(net->forward(x.index_select(0, rows)), y.index_select(0, rows));
      loss.backward();
      for (Unit& unit : units) unit.reduce();
      optimizer->step();
      std::vector<Tensor> sum{loss.detach().clone()};
      group.allreduce(sum)->wait();
      last = sum[0].item<double>() / kRanks;
    }
    return last;
  }
  void save(const std::string& folder) {
    const std::string prefix = folder + "/" + std::to_string(rank);
    torch::save(shards, prefix + "_model.pt");
    torch::save(*optimizer, prefix + "_optimizer.pt");
    torch::save(torch::tensor(step), prefix + "_step.pt");
  }
  void load(const std::string& folder) {
    const std::string prefix = folder + "/" + std::to_string(rank);
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> kept;
    Tensor kept_step;
    torch::load(kept, prefix + "_model.pt");
    for (std::size_t i = 0; i < shards.size(); ++i) shards[i].copy_(kept[i]);
    torch::load(*optimizer, prefix + "_optimizer.pt");
    torch::load(kept_step, prefix + "_step.pt");
    step = kept_step.item<int>();
  }

  int rank;
  c10d::ProcessGroupGloo& group;
  nn::Sequential net{nn::Linear(2, 32), nn::Tanh(), nn::Linear(32, 1)};
  std::vector<Unit> units;
  std::vector<Tensor> shards;
  std::unique_ptr<torch::optim::AdamW> optimizer;
  int step = 0;
  Tensor x, y;
};

void train(int rank, c10d::ProcessGroupGloo& group) {
  const std::string folder = "checkpoint_sharded";
  std::filesystem::create_directory(folder);
  Training unbroken(rank, group), first(rank, group);
  const double loss = unbroken.train_to(kSteps);
  const double before = first.train_to(kSaved);
  first.save(folder);

  Training resumed(rank, group);
  resumed.load(folder);
  const double again = resumed.train_to(kSteps);
  bool same = loss == again;
  for (std::size_t i = 0; i < unbroken.shards.size(); ++i)
    same &= equal(unbroken.shards[i], resumed.shards[i]);
  if (rank == 0) std::printf("loss %.5f, then %.5f, resumed %.5f\n", before, loss, again);
  if (!same || loss > 0.1) throw std::runtime_error("the resumed run differs");
}

int main() {
  torch::set_num_threads(1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank)
    ranks.emplace_back([&store, rank] {
      c10d::ProcessGroupGloo group(store, rank, kRanks,
                                   c10d::ProcessGroupGloo::Options::create_default());
      train(rank, group);
    });
  for (std::thread& rank : ranks) rank.join();
}
