// A convolution, an LSTM cell and a top-2 mixture of experts, sharded by hand over 4 ranks as
// threads.
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

// Units are the experts and, for want of a scope around them, all the other layers one by one.
void train(int rank, Model& model, c10d::ProcessGroupGloo& group) {
  std::vector<Unit> units;
  std::vector<Tensor> shards;
  const auto add = [&](nn::Module& m) { shards.push_back(units.emplace_back(m, group).shard); };
  for (const auto& expert : *model.mixture->experts) add(*expert);
  add(*model.mixture->router), add(*model.conv), add(*model.cell), add(*model.head);
  torch::optim::AdamW optimizer(shards, torch::optim::AdamWOptions(3e-3));
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(rank);

  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {  // which of three frequencies is it?
    const Tensor y = torch::randint(3, {64}, generator, torch::kLong);
    const Tensor phase = torch::rand({64, 1}, generator) * 6;
    const Tensor x = sin((y + 1).unsqueeze(1) * 0.5 * torch::arange(16) + phase) +
                     torch::randn({64, 16}, generator) * 0.1;
    for (Unit& unit : units) unit.gather();
    const Tensor loss = nn::functional::cross_entropy(model.forward(x), y);
    loss.backward();
    for (Unit& unit : units) unit.reduce();
    optimizer.step();
    std::vector<Tensor> sum{loss.detach().clone()};
    group.allreduce(sum)->wait();
    last = sum[0].item<double>() / kRanks;
    if (step == 0) first = last;
  }
  if (rank == 0) std::printf("loss %.3f -> %.3f\n", first, last);
  if (last > 0.3 * first) throw std::runtime_error("it did not learn");
}

int main() {
  torch::set_num_threads(1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    torch::manual_seed(1);
    ranks.emplace_back([&, rank, model = std::make_shared<Model>()] {
      c10d::ProcessGroupGloo group(store, rank, kRanks,
                                   c10d::ProcessGroupGloo::Options::create_default());
      train(rank, *model, group);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}
