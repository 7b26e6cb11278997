// What does sharding cost the host, with kernels that cost nothing?
//
//   bench-host_overhead               times of the host's thread, medians
//   bench-host_overhead WHAT N        does WHAT N times and prints how many units a step has; made
//                                     to be counted: `tests/build/instructions` and
//                                     `bench/always_on_cost` run it in valgrind
//
// WHAT is pair (allocate and free), gated (a pair that another stream touches), launch, or step: a
// forward and backward of a Llama of 16 blocks, of 9 parameters each, as rank 0 of 8. Steps run on
// `virtual`: bodies are dropped and memory is counted, so that the host's own work is all there is,
// and that of the virtual clock. The wire is emulated, no peer exists; the engine, slots, streams,
// events and submissions of collectives are those of any run.
//
// Or train: whole steps of a tiny Llama on 2 real ranks that run each body where it is submitted,
// with clipping and AdamW; checked is the same under the race checker. some and many are whole
// steps of one unit of 1,000 and of 4,000 parameters, all of them used, as rank 0 of 8 on
// `virtual`.
//
// The time of the hooks is a step with units minus the same step of the same model without any, per
// unit. Both take turns; what is printed is the median of the differences of 21 pairs.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

#include "runtime/param/group_part.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/shard_plan.hpp"

namespace {

using namespace tessera;

constexpr int kSamples = 21, kSteps = 20;

class Model {
 public:
  enum class Sharded : std::uint8_t { no, yes };

  Model(int ranks, Sharded sharded)
      : world_(World::emulated(0, ranks, {.executor = ExecutorKind::virtual_})),
        llama_({.dim = 64, .n_layers = 16, .n_heads = 4, .vocab_size = 256}) {
    const ShardOptions options{.mesh = DeviceMesh::flat(world_)};
    if (sharded == Sharded::yes) {
      for (nn::Module* part : llama_.parts()) fully_shard(*part, options);
      fully_shard(llama_, options);
    }
    llama_.materialize(world_.device());
    parts_ = parts_of(llama_.parameters());
    if (sharded == Sharded::yes)
      for (const ShardPlan::Unit& unit : shard_plan(llama_).units)
        units_ += unit.parameters > 0 ? 1 : 0;
    tokens_ = Tensor::from(std::vector<std::int32_t>(16), {1, 16}, world_.device());
    for (int i = 0; i < 3; ++i) step();
  }

  void step() {
    llama_.loss(tokens_, tokens_).backward();
    for (const GroupPart& part : parts_) part.group->gradient = {};
    world_.device().synchronize();
  }
  // Units with parameters.
  int units() const { return units_; }

 private:
  World world_;
  nn::Llama llama_;
  std::vector<GroupPart> parts_;
  Tensor tokens_;  // i32 [1, 16]
  int units_ = 0;
};

// One unit of many small parameters, of which a step uses all: one operation reads them, and its
// backward writes their gradients, each in one launch. That is the user's; what a step does besides
// is the engine's, for every parameter: value, gather, open, sink, last use, reduce, close, and
// what clipping, the optimizer and zero_grad look up for their launches.
class Wide : public nn::Module {
 public:
  Wide(const World& world, int parameters) : device_(world.device()) {
    for (int i = 0; i < parameters; ++i)
      register_parameter("p" + std::to_string(i),
                         parameters_.emplace_back(Shape{8}, Initializer::constant(1)));
    fully_shard(*this, {.mesh = DeviceMesh::flat(world)});
    materialize(device_);
    nn::init(*this, {1});
    optimizer_.emplace(parameters_);
    for (int i = 0; i < 3; ++i) step();
  }

  void step() {
    call([&] { return read_all(); }).backward();
    optim::clip_grad_norm(Module::parameters(), 1.0);
    optimizer_->step();
    optimizer_->zero_grad();
    device_.synchronize();
  }

 private:
  Tensor read_all() const {
    std::vector<Tensor> values;
    values.reserve(parameters_.size());
    for (const Parameter& p : parameters_) values.push_back(p.value());
    launch("read_all", values, AccessMode::read);
    return autograd::record("read_all", values, Tensor::zeros({}, f32, device_),
                            [this](const Tensor&, autograd::Gradients& out) { write_all(out); });
  }
  void write_all(autograd::Gradients& out) const {
    std::vector<Tensor> gradients;
    gradients.reserve(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      gradients.push_back(out.sink(static_cast<int>(i))->tensor);
    launch("write_all", gradients, AccessMode::write);
  }
  void launch(const char* name, const std::vector<Tensor>& tensors, AccessMode mode) const {
    std::vector<Access> accesses;
    accesses.reserve(tensors.size());
    for (const Tensor& t : tensors) accesses.push_back(t.access(mode));
    device_.compute().launch({.name = name, .accesses = accesses}, [](Exec&) {});
  }

  Device device_;
  std::vector<Parameter> parameters_;
  std::optional<optim::AdamW> optimizer_;
};

void touch(const Device& device, LastUse& use, StreamId stream) {
  const Access accesses[] = {{&use, nullptr, nullptr, AccessMode::write}};
  device.stream(stream).launch({.name = "touch", .accesses = accesses}, [](Exec&) {});
}

void train(int steps, const std::shared_ptr<RaceChecker>& checker) {
  const WorldOptions options{
      .executor = ExecutorKind::inlined, .threads = 1, .race_checker = checker};
  run_local(2, options, [steps](World& world) {
    nn::Llama llama({.dim = 32, .n_layers = 2, .n_heads = 2, .vocab_size = 64}, Device::meta());
    const ShardOptions sharded{.mesh = DeviceMesh::flat(world)};
    for (nn::Module* part : llama.parts()) fully_shard(*part, sharded);
    fully_shard(llama, sharded);
    llama.materialize(world.device());
    nn::init(llama, {1});
    optim::AdamW optimizer(llama.parameters());
    const Tensor tokens = Tensor::from(std::vector<std::int32_t>(16), {1, 16}, world.device());
    for (int i = 0; i < steps; ++i) {
      llama.loss(tokens, tokens).backward();
      optim::clip_grad_norm(llama.parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();
      world.device().synchronize();
    }
  });
}

int repeat(const std::string& what, int times) {
  if (what == "train" || what == "checked") {
    const auto checker = what == "checked" ? RaceChecker::make() : nullptr;
    train(times, checker);
    if (checker && checker->race_count() > 0) return 1;
    std::printf("units 1\n");
    return 0;
  }
  if (what == "step") {
    Model model(8, Model::Sharded::yes);
    for (int i = 0; i < times; ++i) model.step();
    std::printf("units %d\n", model.units());
    return 0;
  }
  if (what == "some" || what == "many") {
    const World world = World::emulated(0, 8, {.executor = ExecutorKind::virtual_});
    Wide model(world, what == "some" ? 1000 : 4000);
    for (int i = 0; i < times; ++i) model.step();
    std::printf("units 1\n");
    return 0;
  }
  // Empty bodies, run where they are submitted: `virtual` would add the cost of its clock.
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Memory& memory = Memory::of(device);
  LastUse other;
  if (what == "launch") {
    for (int i = 0; i < times; ++i) touch(device, other, StreamId::compute);
  } else if (what == "pair") {
    for (int i = 0; i < times; ++i) memory.allocate(1 << 20, StreamId::compute);
  } else if (what == "gated") {
    for (int i = 0; i < times; ++i)
      touch(device, memory.allocate(1 << 20, StreamId::compute).use(), StreamId::gather);
  } else {
    std::fprintf(stderr,
                 "bench-host_overhead: '%s' is none of pair, gated, launch, step, train, checked, "
                 "some, many\n",
                 what.c_str());
    return 2;
  }
  std::printf("units 1\n");
  return 0;
}

// Of this thread, which is the host of its rank: what it sleeps for, or is kept waiting by others
// on the machine, does not count.
double microseconds_so_far() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) / 1e3;
}
template <class M>
double microseconds(M& model) {
  const double start = microseconds_so_far();
  for (int i = 0; i < kSteps; ++i) model.step();
  return (microseconds_so_far() - start) / kSteps;
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + kSamples / 2, v.end());
  return v[kSamples / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) return repeat(argv[1], std::atoi(argv[2]));
  std::printf("forward and backward of a Llama of 16 blocks, medians of %d samples\n", kSamples);
  Model whole(1, Model::Sharded::no);
  for (const int ranks : {1, 8}) {
    Model sharded(ranks, Model::Sharded::yes);
    std::vector<double> with, without, hooks;
    for (int sample = 0; sample < kSamples; ++sample) {
      with.push_back(microseconds(sharded));
      without.push_back(microseconds(whole));
      hooks.push_back((with.back() - without.back()) / sharded.units());
    }
    std::printf("  %d ranks: %8.1f us a step, %.1f us without units: %.2f us a unit (%d units)\n",
                ranks, median(with), median(without), median(hooks), sharded.units());
  }
  const auto print_wide = [](const World& world, const char* ranks) {
    for (const int parameters : {1000, 4000}) {
      Wide wide(world, parameters);
      std::vector<double> steps;
      for (int sample = 0; sample < kSamples; ++sample) steps.push_back(microseconds(wide));
      if (world.rank() == 0)
        std::printf("  %s, one unit of %d parameters, all used: %.0f us a whole step, best %.0f\n",
                    ranks, parameters, median(steps), *std::ranges::min_element(steps));
    }
  };
  print_wide(World::emulated(0, 2, {.executor = ExecutorKind::virtual_}), "2 virtual ranks");
  print_wide(World::emulated(0, 8, {.executor = ExecutorKind::virtual_}), "8 virtual ranks");
  run_local(2, {.threads = 1}, [&](World& world) { print_wide(world, "2 ranks, bodies run"); });
}
