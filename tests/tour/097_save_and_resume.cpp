// Lesson 97: save a training and go on, on another number of ranks.
//
//   2 ranks   step 1 ── step 2 ── step 3 ── copy ── step 4 ── step 5 ── step 6
//                                             └ write ┐
//   2 ranks                                           ├─ load ── step 4 ── ...   the same bits
//   3 ranks                                           ├─ load ── step 4 ── ...   the same losses
//   1 rank                                            └─ load ── step 4 ── ...
//
// Every rank writes the rows that it has, of the weights and of what AdamW keeps, and nobody
// gathers anything. A Saver copies them and trains on while they are written; checkpoint::save does
// the same, and is there when it returns. A rank of another world reads its own rows, wherever they
// lie. The folder appears in one step when all is written; a file that has changed is refused by
// its checksum. Where rank 0 alone has the values, as whole tensors, it sends them one at a time.
//
// PyTorch: torch.distributed.checkpoint.async_save and load with a HuggingFaceStorageWriter, which
// has no checksums and no such step; broadcast_from_rank0=True for values of rank 0.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/saver.hpp"
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
  std::vector<double> steps_to(int end, ts::checkpoint::Saver* saver = nullptr) {
    std::vector<double> losses;
    while (optimizer.steps() < end) {
      losses.push_back(step());
      if (saver) saver->poll();  // 8 bytes, after which its thread goes on
    }
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

  std::vector<double> straight;  // the losses after the save, of the run that goes on
  ts::StateDict held_weights, held_adamw;
  ts::run_local(2, {}, [&](ts::World& world) {
    Training t(world);
    t.net.materialize(world.device());
    ts::nn::init(t.net, {.value = 5});
    t.steps_to(kSaved);
    ts::checkpoint::Saver saver(folder, world);
    saver.save(
        kSaved,
        {ts::checkpoint::part(t.net, world), ts::checkpoint::part(t.optimizer, t.net, world)},
        {{"samples", std::int64_t{kSaved * kRows}}});
    const ts::StateDictOptions on_rank_0{ts::StateForm::full, ts::StateRanks::rank_0,
                                         ts::StateMemory::host};
    ts::StateDict whole = t.net.state_dict(on_rank_0),
                  kept = t.optimizer.state_dict(t.net, on_rank_0);
    const ts::DistributedTensor moment = t.optimizer.distributed_moments(t.net.layers[0].weight)[0];
    const std::vector<double> losses = t.steps_to(kSteps, &saver);
    saver.wait();  // it is on the disk
    CHECK(saver.saved() == kSaved);
    if (world.rank() > 0) return;
    straight = losses;
    std::cout << "1. A handle on exp_avg of 0.weight: " << moment << '\n';
    CHECK(moment.to_string() == "f32 [7, 7], Shard(0) over dp_shard 2; rows 0 to 3 here");
    held_weights = std::move(whole);
    held_adamw = std::move(kept);
  });

  const ts::checkpoint::Checkpoint saved(folder, kSaved);
  std::cout << "2. Step " << saved.step() << " of " << saved.ranks() << " ranks, behind "
            << saved.integer("samples") << " samples, has\n";
  const auto optimizer = saved.part("optimizer");
  for (const std::string& name : optimizer->names())
    if (name.starts_with("0.weight") || name.find('.') == name.npos)
      std::cout << "   " << name << ' ' << optimizer->entry(name).dtype << '\n';
  CHECK(optimizer->has("0.weight.exp_avg") && optimizer->has("steps"));

  // Numbers of ranks sum rows in another order: an AdamW step of 0.02 is off by few roundings of
  // its direction, 1e-6 of it, unless a gradient is next to nothing.
  constexpr double kTolerance = 1e-5;
  for (const int ranks : {2, 1, 3}) {
    std::vector<double> from_files, from_rank_0, without_adamw;
    ts::run_local(ranks, {}, [&](ts::World& world) {
      const auto keep = [&](std::vector<double>& to, std::vector<double> losses) {
        if (world.rank() == 0) to = std::move(losses);
      };
      Training files(world);
      files.net.materialize(world.device());
      files.net.load(*saved.part("model"));  // each rank reads its rows
      files.optimizer.load(files.net, *saved.part("optimizer"));
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
    CHECK(ranks == 2 ? from_files == straight : farthest(from_files, straight) < kTolerance);
    CHECK(from_rank_0 == from_files);
    CHECK(farthest(without_adamw, straight) > 100 * kTolerance);
  }

  // One bit of one file changes on the disk.
  const auto file = folder / "step-3" / "model" / "shard-00002-model-00001-of-00001.safetensors";
  std::fstream(file, std::ios::in | std::ios::out).seekp(-1, std::ios::end).put('x');
  std::string refusal;
  ts::run_local(1, {}, [&](ts::World& world) {
    Training t(world);
    t.net.materialize(world.device());
    try {
      t.net.load(*saved.part("model"));
    } catch (const ts::DataError& error) {
      refusal = error.what();
    }
  });
  std::cout << "4. " << refusal << '\n';
  CHECK(refusal.find("has other bytes than were saved") != refusal.npos);
  std::filesystem::remove_all(folder);
}
