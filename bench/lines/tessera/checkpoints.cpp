// Model, optimizer and data position saved and resumed: bit by bit what the unbroken run gives.
#include <cstdio>
#include <filesystem>
#include <tessera/tessera.hpp>

namespace ts = tessera;
using ts::Tensor;

struct Net : ts::nn::Module {
  Net() {
    register_module("up", up);
    register_module("down", down);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] { return down(ts::tanh(up(x))); });
  }
  ts::nn::Linear up{2, 32}, down{32, 1};
};

constexpr int kPoints = 100, kSteps = 200, kSaved = 87;  // 12 steps an epoch, in the eighth

struct Training {
  explicit Training(const ts::World& on) : world(on) {
    ts::fully_shard(net.up, {.mesh = ts::DeviceMesh::flat(world)});
    ts::fully_shard(net.down, {.mesh = ts::DeviceMesh::flat(world)});
    ts::fully_shard(net, {.mesh = ts::DeviceMesh::flat(world)});
    net.materialize(world.device());
    ts::nn::init(net, {.value = 1});
  }
  double train_to(int end) {  // the last loss
    double last = 0;
    while (optimizer.steps() < end) {
      const Tensor rows = Tensor::from(plan.indices(optimizer.steps()), {4}, world.device());
      const Tensor loss = mse_loss(net(index_select(x, 0, rows)), index_select(y, 0, rows));
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      last = world.sum(loss.item()) / world.size();
    }
    return last;
  }
  void save(const std::string& folder) {
    ts::checkpoint::save_weights(folder + "/model.safetensors", net, world);
    ts::checkpoint::save_state(folder + "/optimizer.safetensors",
                               optimizer.state_dict(net, {.form = ts::StateForm::view}), world);
  }
  void load(const std::string& folder) {
    net.load(folder + "/model.safetensors");
    optimizer.load(net, ts::checkpoint::WeightFiles(folder + "/optimizer.safetensors"));
    world.barrier();
  }

  const ts::World& world;
  Net net;
  ts::optim::AdamW optimizer{net.parameters(), {.lr = 0.02}};
  Tensor x = Tensor::uniform({kPoints, 2}, -1, 1, 1, ts::f32, world.device());
  Tensor y = square(slice(x, 1, 0, 1)) - slice(x, 1, 1, 2);
  ts::data::SamplePlan plan{
      kPoints, {.batch_size = 4, .seed = 1, .rank = world.rank(), .world = world.size()}};
};

int main() {
  return ts::run({.program = "checkpoints", .ranks = 2}, [](ts::World& world) {
    const std::string folder = "checkpoint";
    std::filesystem::create_directory(folder);
    Training unbroken(world), first(world);
    const double loss = unbroken.train_to(kSteps);
    const double before = first.train_to(kSaved);
    first.save(folder);

    Training resumed(world);
    resumed.load(folder);
    const double again = resumed.train_to(kSteps);
    bool same = loss == again;
    const ts::StateDict a = unbroken.net.state_dict(), b = resumed.net.state_dict();
    for (const auto& [name, entry] : a)
      same &= entry.values.to_vector<float>() == b.at(name).values.to_vector<float>();
    if (world.rank() == 0) std::printf("loss %.5f, then %.5f, resumed %.5f\n", before, loss, again);
    if (!same || loss > 0.1) throw std::runtime_error("the resumed run differs");
  });
}
