// Lesson 97: save a training and go on, on another number of ranks.
//
//   2 ranks   step 1 ── step 2 ── save ── step 3 ── step 4     weights and what AdamW keeps
//                                  │
//   3 ranks                        └─ load ── step 3 ── step 4     the same losses
//   1 rank                         └─ load ── step 3 ── step 4
//
// A state dict has this rank's rows, without communication. A file has whole tensors, gathered one
// at a time; each rank of another world takes its rows, or rank 0 sends them, one at a time again.
//
// PyTorch: torch.distributed.checkpoint.state_dict, get_optimizer_state_dict with
// StateDictOptions(full_state_dict=True, cpu_offload=True) and set_model_state_dict with
// broadcast_from_rank0=True. A handle on a sharded tensor is a DTensor there.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/nn/module_list.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

constexpr int kSteps = 6, kSaved = 3, kRows = 12, kWidth = 7;

struct Net : ts::nn::Module {
  Net() {
    for (int i = 0; i < 2; ++i)
      register_module(std::to_string(i), layers.emplace_back(kWidth, kWidth));
  }
  ts::Tensor operator()(const ts::Tensor& x) {
    return call([&](const ts::Tensor& in) { return layers[1](ts::tanh(layers[0](in))); }, x);
  }
  ts::nn::ModuleList<ts::nn::Linear> layers;
};

struct Training {
  explicit Training(const ts::World& on) : world(on) {
    for (ts::nn::Linear& layer : net.layers)
      ts::fully_shard(layer, {.mesh = ts::DeviceMesh::flat(on)});
    ts::fully_shard(net, {.mesh = ts::DeviceMesh::flat(on)});
  }
  // The mean loss of all rows, of which each rank takes its part.
  double step() {
    const auto number = static_cast<std::uint64_t>(optimizer.steps());
    const int mine = kRows / world.size();
    const auto rows = [&](std::uint64_t key) {
      const ts::Tensor all =
          ts::Tensor::normal({kRows, kWidth}, 0, 1, key, ts::f32, world.device());
      return ts::slice(all, 0, world.rank() * mine, (world.rank() + 1) * mine);
    };
    const ts::Tensor error = net(rows(2 * number)) - ts::tanh(rows(2 * number) * 2);
    const ts::Tensor loss = ts::mean(error * error);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return world.sum(loss.item()) / world.size();
  }
  std::vector<double> steps_to(int end) {
    std::vector<double> losses;
    while (optimizer.steps() < end) losses.push_back(step());
    return losses;
  }

  const ts::World& world;
  Net net;
  ts::optim::AdamW optimizer{net.parameters(), {.lr = 0.02}};
};

static double farthest(const std::vector<double>& a, const std::vector<double>& b) {
  CHECK(a.size() == b.size());
  double far = 0;
  for (std::size_t i = 0; i < a.size(); ++i) far = std::max(far, std::abs(a[i] - b[i]));
  return far;
}

int main() {
  const auto folder =
      std::filesystem::temp_directory_path() / ("tessera-lesson-97-" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  const std::string weights = folder / "weights.safetensors", adamw = folder / "adamw.safetensors";

  std::vector<double> straight;  // the losses after the save, of the run that goes on
  ts::StateDict held_weights, held_adamw;
  ts::run_local(2, {}, [&](ts::World& world) {
    Training t(world);
    t.net.materialize(world.device());
    ts::nn::init(t.net, {.value = 5});
    t.steps_to(kSaved);
    ts::checkpoint::save_weights(weights, t.net, world);
    ts::checkpoint::save_state(adamw, t.optimizer.state_dict(t.net, {.form = ts::StateForm::view}),
                               world);
    const ts::StateDictOptions on_rank_0{ts::StateForm::full, ts::StateRanks::rank_0,
                                         ts::StateMemory::host};
    ts::StateDict whole = t.net.state_dict(on_rank_0),
                  kept = t.optimizer.state_dict(t.net, on_rank_0);
    const ts::DistributedTensor moment = t.optimizer.distributed_moments(t.net.layers[0].weight)[0];
    const ts::Tensor full = moment.full();
    const std::vector<double> losses = t.steps_to(kSteps);
    if (world.rank() > 0) {
      CHECK(whole.empty() && kept.empty());
      return;
    }
    straight = losses;
    std::cout << "1. After " << kSaved << " steps rank 0 of 2 has " << whole.size()
              << " tensors of the model and " << kept.size() << " of AdamW, among them";
    for (const auto& [name, entry] : kept)
      if (name.starts_with("0.weight") || name.find('.') == name.npos) std::cout << ' ' << name;
    std::cout << "\n2. A handle on exp_avg of 0.weight: " << moment << '\n';
    CHECK(moment.to_string() == "f32 [7, 7], Shard(0) over dp_shard 2; rows 0 to 3 here");
    CHECK(kept.at("steps").values.item() == kSaved);
    CHECK(full.to_vector<float>() == kept.at("0.weight.exp_avg").values.to_vector<float>());
    held_weights = std::move(whole);
    held_adamw = std::move(kept);
  });

  // Numbers of ranks sum rows in another order: an AdamW step of 0.02 is off by few roundings of
  // its direction, 1e-6 of it, unless a gradient is next to nothing.
  constexpr double kTolerance = 1e-5;
  for (const int ranks : {1, 3}) {
    std::vector<double> from_files, from_rank_0, without_adamw;
    ts::run_local(ranks, {}, [&](ts::World& world) {
      const auto keep = [&](std::vector<double>& to, std::vector<double> losses) {
        if (world.rank() == 0) to = std::move(losses);
      };
      Training files(world);
      files.net.materialize(world.device());
      files.net.load(weights);  // each rank reads its rows
      files.optimizer.load(files.net, ts::checkpoint::WeightFiles(adamw));
      world.barrier();
      keep(from_files, files.steps_to(kSteps));

      Training sent(world);  // on meta; the others have nothing to load
      const bool has = world.rank() == 0;
      const ts::LoadOptions options{.from_rank_0 = &world};
      sent.net.load(has ? held_weights : ts::StateDict(), options);
      sent.optimizer.load(sent.net, has ? held_adamw : ts::StateDict(), options);
      keep(from_rank_0, sent.steps_to(kSteps));

      Training forgetful(world);
      forgetful.net.load(has ? held_weights : ts::StateDict(), options);
      forgetful.optimizer.set_steps(kSaved);
      keep(without_adamw, forgetful.steps_to(kSteps));
    });
    std::cout << "3. On " << ranks << " rank" << (ranks > 1 ? "s" : "") << " the losses differ by "
              << farthest(from_files, straight) << "; without the moments they do by "
              << farthest(without_adamw, straight) << '\n';
    CHECK(farthest(from_files, straight) < kTolerance);
    CHECK(from_rank_0 == from_files);
    CHECK(farthest(without_adamw, straight) > 100 * kTolerance);
  }
  std::filesystem::remove_all(folder);
}
