// A step that a GPU runs again without the host program has the bits of one that the host submits:
// losses, weights, counts, draws; also where other work comes between its calls. What can't be
// captured is refused in one line.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <random>

#include "tessera/device/observe/race_checker.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/nn/sequential.hpp"
#include "tessera/optim/grad_scaler.hpp"
#include "tests/cuda/captured_job.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/share.hpp"
#include "tests/support/thrown.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Outcome {
  std::vector<float> losses, norms, values;
  std::int64_t steps = 0, replays = 0;
  std::uint64_t draws = 0;
};

bool same_bits(const Outcome& a, const Outcome& b) {
  return a.losses == b.losses && a.norms == b.norms && a.values == b.values && a.steps == b.steps &&
         a.draws == b.draws;
}

// `disturbs(i)`: whether the model is evaluated before step i.
Outcome train(const Setting& setting, std::uint64_t seed, int steps, bool captures,
              const std::function<bool(int)>& disturbs = {}, WorldOptions options = on_gpu()) {
  World world =
      setting.ranks == 1 ? World::single(options) : World::emulated(0, setting.ranks, options);
  Job job(world, setting, seed);
  CapturedStep captured(job.device,
                        [&](const std::vector<Tensor>& batch) { return job.step(batch); });
  Outcome outcome;
  for (int i = 0; i < steps; ++i) {
    if (disturbs && disturbs(i)) outcome.losses.push_back(job.evaluate(seed + 1000));
    job.optimizer->set_lr(0.01 * (1 + std::cos(0.03 * i)));
    const auto batch = job.batch(seed + static_cast<std::uint64_t>(i % 4));
    const std::vector<Tensor> out = captures ? captured(batch) : job.step(batch);
    outcome.losses.push_back(out[0].to_vector<float>()[0]);
    outcome.norms.push_back(out[1].to_vector<float>()[0]);
  }
  outcome.values = job.values();
  outcome.steps = job.optimizer->steps();
  outcome.draws = autograd::random_state().draws;
  outcome.replays = captured.replays();
  return outcome;
}

}  // namespace

TEST_CASE("a hundred replays have the bits of a hundred steps", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  GridShare share;
  for (const Setting& setting :
       {Setting{}, Setting{.recomputes = true, .ranks = 4}, Setting{.micro_batches = 3},
        Setting{.rule = Rule::muon, .param = bf16},
        Setting{.reshard = Reshard::never, .param = bf16, .ranks = 2},
        Setting{.recomputes = true, .reshard = Reshard::always}}) {
    if (!share.takes()) continue;
    INFO("rule " << static_cast<int>(setting.rule) << ", recompute " << setting.recomputes
                 << ", micro-batches " << setting.micro_batches << ", ranks " << setting.ranks
                 << ", param " << name(setting.param) << ", seed " << seed);
    const Outcome eager = train(setting, seed, 104, false);
    const Delays delays(seed, 20);
    const Outcome captured = train(setting, seed, 104, true);
    CHECK(captured.replays >= 100);
    CHECK(eager.steps == 104);
    if (setting.ranks == 1) CHECK(eager.losses.back() < eager.losses.front());
    CHECK(same_bits(eager, captured));
  }
}

TEST_CASE("what happens between the calls does not change a captured step", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto disturbs = [&](int i) { return (seed >> (i % 60) & 7) == 0; };
  const Setting setting{.recomputes = true};
  const Outcome eager = train(setting, seed, 30, false, disturbs),
                captured = train(setting, seed, 30, true, disturbs);
  CHECK(same_bits(eager, captured));
  CHECK(captured.replays > 0);
}

TEST_CASE("what can't be captured is refused in one line, before it runs", "[threads]") {
  World world = World::single(on_gpu());
  Job job(world, {}, 1);
  int calls = 0;
  // What the fourth call or an earlier one threw, and that it has not called the function.
  const auto refusal = [&](const CapturedStep::Function& function) {
    CapturedStep step(job.device, [&](const std::vector<Tensor>& in) {
      ++calls;
      return function(in);
    });
    calls = 0;
    const std::string line = thrown_by<std::exception>([&] {
      for (int i = 0; i < 8; ++i) step(job.batch(1));
    });
    CHECK(line.find('\n') == std::string::npos);
    return line.empty() ? step.why_not() : line;
  };
  CHECK(refusal([&](const std::vector<Tensor>& in) {
          auto out = job.step(in);
          (void)out[0].to_vector<float>();
          return out;
        }).find("return the tensor and read it afterwards") != std::string::npos);
  CHECK(calls <= 6);
  CHECK(refusal([&](const std::vector<Tensor>& in) {
          auto out = job.step(in);
          out[0] = raw::add(out[0], Tensor::from(std::vector<float>{1}, {}, job.device));
          return out;
        }).find("make the tensor an input") != std::string::npos);
  CHECK(calls == 8);  // without its gain
  const CapturedStep::Function whole = [&](const std::vector<Tensor>& in) { return job.step(in); };
  CapturedStep inner(job.device, whole);
  const std::string inside = "captured step: the step runs inside another captured step";
  CHECK(refusal([&](const std::vector<Tensor>& in) { return inner(in); }).find(inside) == 0);
  CHECK(refusal([&](const std::vector<Tensor>& in) {
          return CapturedStep(job.device, whole)(in);
        }).find(inside) == 0);
  CHECK(calls == 1);
  optim::GradScaler scaler(job.device);
  CHECK(refusal([&](const std::vector<Tensor>& in) {
          const Tensor loss = job.model.loss(in[0], in[1]);
          scaler.scale(loss).backward();
          scaler.step(*job.optimizer);
          return std::vector{loss.detach()};
        }).find("train in bf16, without a GradScaler") != std::string::npos);
  CHECK(calls == 1);
  job.optimizer->zero_grad();
  CHECK(refusal(whole).empty());
}

TEST_CASE("what is refused while it is captured leaves a model to reset", "[threads]") {
  World world = World::single(on_gpu());
  Job job(world, {}, 1);
  const auto batch = job.batch(1);
  const auto refusal = [&](const CapturedStep::Function& function) {
    CapturedStep step(job.device, function);
    const std::string line = thrown_by<std::exception>([&] {
      for (int i = 0; i < 4; ++i) step(batch);
    });
    reset(job.model);
    return line;
  };
  int calls = 0;
  CHECK(refusal([&](const std::vector<Tensor>& in) {
          ++calls;
          ++autograd::random_state().seed;
          return job.step(in);
        }).find("set autograd::random_state().seed before the step") != std::string::npos);
  const std::int64_t steps = job.optimizer->steps();
  CHECK(steps == calls - 1);
  CHECK(refusal([&](const std::vector<Tensor>& in) { return job.step(in); }).empty());
  CHECK(job.optimizer->steps() == steps + 4);
}

TEST_CASE("a step that never comes to rest says which operation differs", "[threads]") {
  World world = World::single(on_gpu());
  Job job(world, {}, 1);
  int calls = 0;
  CapturedStep step(job.device, [&](const std::vector<Tensor>& in) {
    auto out = job.step(in);
    if (calls++ % 2 == 0) out[0] = raw::mul(out[0], 2.0);
    return out;
  });
  for (int i = 0; i < 5; ++i) step(job.batch(1));
  CHECK(step.replays() == 0);
  CHECK(step.why_not().find("was another in the call before") != std::string::npos);
}

TEST_CASE("on a CPU a captured step calls its function", "[threads]") {
  const Setting setting{.micro_batches = 2};
  const Outcome eager = train(setting, 7, 5, false, {}, {.threads = 1}),
                captured = train(setting, 7, 5, true, {}, {.threads = 1});
  CHECK(same_bits(eager, captured));
  CHECK(captured.replays == 0);
}

TEST_CASE("a replay asks the driver for little, and the host for no memory", "[threads]") {
  World world = World::single(on_gpu());
  Job job(world, {.recomputes = true}, 3);
  CapturedStep step(job.device, [&](const std::vector<Tensor>& in) { return job.step(in); });
  const auto batch = job.batch(3);
  while (step.replays() < 4) step(batch);
  const std::int64_t reserved = Memory::of(job.device).reserved_bytes();
  const Counts before = counts();
  for (int i = 0; i < 50; ++i) step(batch);
  const Counts after = counts();
  CHECK(step.replays() >= 54);
  CHECK(after.allocations == before.allocations);
  CHECK(after.host_allocations == before.host_allocations);
  CHECK(after.events == before.events);
  // Two inputs and one struct of values; the graph.
  CHECK(after.kernels - before.kernels + after.copies - before.copies <= 50 * 3);
  CHECK(Memory::of(job.device).reserved_bytes() == reserved);
}

TEST_CASE("what the program decides between the calls holds in a captured step", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (std::size_t d = 0; d < 2 * std::size(kActs); ++d) {
    const int ranks = 1 + static_cast<int>(d % 2);
    INFO("act " << d / 2 << ", ranks " << ranks);
    const auto run = [&](bool captures) {
      World world = ranks == 1 ? World::single(on_gpu()) : World::emulated(0, ranks, on_gpu());
      Job job(world, {.ranks = ranks}, seed);
      CapturedStep step(job.device, [&](const std::vector<Tensor>& in) { return job.step(in); });
      std::vector<float> all;
      for (int i = 0; i < 20; ++i) {
        if (i == 8 || i == 9) kActs[d / 2](job);
        const auto batch = job.batch(seed + static_cast<std::uint64_t>(i % 3));
        all.push_back((captures ? step(batch) : job.step(batch))[1].to_vector<float>()[0]);
      }
      if (captures) CHECK(step.replays() >= 10);
      for (const float x : job.values()) all.push_back(x);
      return all;
    };
    CHECK(run(false) == run(true));
  }
}

TEST_CASE("random programs around a captured step have the bits of those without it", "[threads]") {
  for (int trial = 0; trial < 12; ++trial) {
    const std::uint64_t seed = fresh_seed();
    std::mt19937_64 dice(seed);
    const Setting setting{.rule = dice() % 3 ? Rule::adamw : Rule::muon,
                          .recomputes = dice() % 2 == 0,
                          .micro_batches = 1 + static_cast<int>(dice() % 2),
                          .reshard = dice() % 2 ? Reshard::always : Reshard::automatic,
                          .param = dice() % 2 ? bf16 : f32,
                          .ranks = 1 + static_cast<int>(dice() % 3)};
    const unsigned rarely = 2 + dice() % 8;
    INFO("seed " << seed);
    const auto run = [&](bool captures) {
      std::mt19937_64 acts(seed);
      World world = setting.ranks == 1 ? World::single(on_gpu())
                                       : World::emulated(0, setting.ranks, on_gpu());
      Job job(world, setting, seed);
      CapturedStep step(job.device, [&](const std::vector<Tensor>& in) { return job.step(in); });
      std::vector<float> all;
      for (int i = 0; i < 30; ++i) {
        for (; acts() % rarely == 0;) kActs[acts() % std::size(kActs)](job);
        const auto batch = job.batch(acts());
        for (const Tensor& t : captures ? step(batch) : job.step(batch))
          all.push_back(t.to_vector<float>()[0]);
      }
      for (const float x : job.values()) all.push_back(x);
      all.push_back(static_cast<float>(job.optimizer->steps()));
      return all;
    };
    const auto eager = run(false);
    CHECK(std::ranges::equal(eager, run(true), [](float a, float b) {
      return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
    }));
  }
}

TEST_CASE("a function that throws has done what it had done, captured or not", "[threads]") {
  const auto run = [&](bool captures) {
    const Device device = queued_gpu();
    nn::Sequential model(std::make_unique<nn::Linear>(6, 10), std::make_unique<nn::Linear>(10, 4));
    nn::init(model, nn::Seed{3}, device);
    optim::AdamW optimizer(model.parameters(), {});
    int calls = 0;
    const int throws[] = {1, 3, 4};  // rehearsed, captured, rehearsed
    const CapturedStep::Function function = [&](const std::vector<Tensor>& in) {
      const Tensor y = model(in[0]);
      mean(y * y).backward();
      if (std::ranges::count(throws, calls)) throw std::runtime_error("of the program's own");
      optimizer.step();
      optimizer.zero_grad();
      return std::vector{y.detach()};
    };
    CapturedStep step(device, function);
    std::vector<float> all;
    for (; calls < 16; ++calls) try {
        const std::vector in{Tensor::full({3, 6}, 0.1 * calls, f32, device)};
        for (const float y : (captures ? step(in) : function(in))[0].to_vector<float>())
          all.push_back(y);
      } catch (const std::runtime_error&) {
        all.push_back(-1);
      }
    for (const Parameter& p : model.parameters())
      for (const float x : p.shard().to_vector<float>()) all.push_back(x);
    return all;
  };
  CHECK(run(false) == run(true));
}

TEST_CASE("a captured step is made anew where the model is planned anew", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto run = [&](bool captures) {
    World world = World::single(on_gpu());
    Job job(world, {}, seed);
    CapturedStep step(job.device, [&](const std::vector<Tensor>& in) { return job.step(in); });
    std::vector<float> losses;
    for (int i = 0; i < 24; ++i) {
      if (i == 8) job.model.parameters()[2].set_trainable(false);
      if (i == 16) job.model.parameters()[2].set_trainable(true);
      const auto batch = job.batch(seed);
      losses.push_back((captures ? step(batch) : job.step(batch))[0].to_vector<float>()[0]);
    }
    if (captures) CHECK(step.replays() >= 6);
    return losses;
  };
  CHECK(run(false) == run(true));
}

TEST_CASE("gradients may be left by one captured step for another call", "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto run = [&](bool captures) {
    World world = World::single(on_gpu());
    Job job(world, {}, seed);
    const CapturedStep::Function accumulate = [&](const std::vector<Tensor>& in) {
      const Tensor loss = job.model.loss(in[0], in[1]);
      loss.backward();
      return std::vector{loss.detach()};
    };
    CapturedStep step(job.device, accumulate);
    std::vector<float> losses;
    for (int i = 0; i < 40; ++i) {
      const auto batch = job.batch(seed + static_cast<std::uint64_t>(i % 3));
      losses.push_back((captures ? step(batch) : accumulate(batch))[0].to_vector<float>()[0]);
      if (i % 8 != 7) continue;
      job.optimizer->step();
      job.optimizer->zero_grad();
    }
    if (captures) CHECK(step.replays() > 8);
    for (const float x : job.values()) losses.push_back(x);
    return losses;
  };
  CHECK(run(false) == run(true));
}

TEST_CASE("the race checker finds nothing in a captured step", "[threads]") {
  WorldOptions options = on_gpu();
  options.race_checker = RaceChecker::make();
  const Outcome watched = train({.recomputes = true}, 5, 12, true, {}, options);
  CHECK(watched.replays > 5);
  CHECK(options.race_checker->races().empty());
}

TEST_CASE("ranks that are threads can't capture, and say so", "[threads]") {
  const auto refused = on_ranks(2, on_gpu(), [&](World& world) {
    Job job(world, {}, 1);
    CapturedStep step(job.device, [&](const std::vector<Tensor>& in) { return job.step(in); });
    return thrown_by<std::exception>([&] {
      for (int i = 0; i < 6; ++i) step(job.batch(1));
    });
  });
  for (const std::string& line : refused)
    CHECK(line.find("one rank a process") != std::string::npos);
}

TEST_CASE("outputs and gradients of two captured units", "[threads][fsdp2-053]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const auto run = [&](bool captures, Reshard reshard) {
    World world = World::emulated(1, 2, on_gpu());
    const Device device = world.device();
    nn::Sequential model(
        std::make_unique<nn::Linear>(6, 10), [](const Tensor& x) { return tanh(x); },
        std::make_unique<nn::Linear>(10, 4));
    const ShardOptions options{.mesh = DeviceMesh::flat(world), .reshard_after_forward = reshard};
    model.apply<nn::Linear>([&](nn::Linear& layer) { fully_shard(layer, options); });
    fully_shard(model, options);
    model.materialize(device);
    nn::init(model, nn::Seed{seed});
    optim::AdamW optimizer(model.parameters(), {});
    const CapturedStep::Function function = [&](const std::vector<Tensor>& in) {
      const Tensor y = model(in[0]);
      mean(y * y).backward();
      std::vector out{y.detach()};
      for (const Parameter& p : model.parameters()) out.push_back(p.grad());
      optimizer.zero_grad();
      return out;
    };
    CapturedStep step(device, function);
    std::vector<float> all;
    std::mt19937_64 draw(seed);
    for (int i = 0; i < 8; ++i) {
      std::vector<float> x(18);
      for (float& value : x) value = static_cast<float>(draw() % 1024) / 512 - 1;
      const std::vector in{Tensor::from(x, {3, 6}, device)};
      for (const Tensor& t : captures ? step(in) : function(in))
        for (const float value : t.to_vector<float>()) all.push_back(value);
    }
    if (captures) CHECK(step.replays() >= 4);
    return all;
  };
  for (const Reshard reshard : {Reshard::always, Reshard::never})
    CHECK(run(false, reshard) == run(true, reshard));
}
