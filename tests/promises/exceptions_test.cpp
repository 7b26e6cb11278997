// An exception anywhere in a step: at every launch, in every body and in the model's own code, on
// one rank and on all. Nobody hangs, nothing leaks, all ranks hear why, and after a reset the next
// step gives the bits of an undisturbed run.
#include <iostream>
#include <mutex>
#include <set>
#include <utility>

#include "tessera/optim/grad_scaler.hpp"
#include "tests/promises/trials.hpp"
#include "tests/support/executors.hpp"

using namespace tessera;
using namespace tessera::testing;

// An executor's account can't be refused; wherever else an observer is told of a step it throws
// below.
static_assert(noexcept(std::declval<Observer&>().executor_launched({}, {}, std::declval<Op&>(),
                                                                   {})));
static_assert(noexcept(std::declval<Observer&>().executor_recorded({})));
static_assert(noexcept(std::declval<Observer&>().executor_waited({}, {})));
static_assert(noexcept(std::declval<Observer&>().executor_blocked({})));

namespace {

// A stack of units with a trap in every place that is a user's: in forward inside and between
// calls, in backward inside of every region, and between the parts of a step.
class Wired final : public nn::Module {
 public:
  explicit Wired(Trapper& trapper) : first(5, 6), second(6, 6), third(6, 3), trapper_(trapper) {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      Tensor h = wire(x);
      for (nn::Linear* layer : {&first, &second})
        h = layer->call([&] { return wire(tanh(linear(wire(h), layer->weight, layer->bias))); });
      h = autograd::grad_enabled()
              ? recompute([&](const Tensor& y) { return wire(third(wire(y))); }, h)
              : third(h);
      return wire(h);
    });
  }
  Tensor wire(const Tensor& h) {
    trapper_.hook();
    return autograd::record("wire", {h}, h.detach(),
                            [this](const Tensor& g, autograd::Gradients& out) {
                              trapper_.hook();
                              out.set(0, g);
                            });
  }
  nn::Linear first, second, third;

 private:
  Trapper& trapper_;
};

void with_wired(World& world, Trapper& trapper, const std::function<void(Subject&)>& f) {
  Wired model(trapper);
  const ShardOptions options{.mesh = DeviceMesh::flat(world)};
  for (nn::Linear* layer : {&model.first, &model.second, &model.third})
    fully_shard(*layer, options);
  fully_shard(model, options);
  model.materialize(world.device());
  nn::init(model, {1});
  optim::AdamW optimizer(model.parameters(), {.lr = 1e-2});
  optim::GradScaler scaler(world.device(), {.init_scale = 1024});
  const auto step = [&](int k) {
    const Tensor x = rows_of(static_cast<std::uint64_t>(k), world.rank() * 2, 2, 5, world.device());
    trapper.hook();
    const Tensor loss = mean_square(model(x));
    trapper.hook();
    scaler.scale(loss).backward();
    trapper.hook();
    scaler.unscale(optimizer);
    trapper.hook();
    optim::clip_grad_norm(model.parameters(), 1.0);
    trapper.hook();
    scaler.step(optimizer);
    trapper.hook();
    scaler.update();
    trapper.hook();
    optimizer.zero_grad();
    trapper.hook();
    return loss.detach();
  };
  // What ranks have agreed on of the gradients, which a scaler drops when it is next asked.
  Subject subject(world, model, optimizer, trapper, step, kAlignmentBytes);
  f(subject);
}

// Two roots in one world, and one optimizer for both.
class Pair final : public nn::Module {
 public:
  Pair() {
    register_module("encoder", encoder);
    register_module("decoder", decoder);
  }
  nn::Linear encoder{5, 6}, decoder{6, 3};
};

void with_pair(World& world, Trapper& trapper, const std::function<void(Subject&)>& f) {
  Pair pair;
  for (nn::Linear* root : {&pair.encoder, &pair.decoder})
    fully_shard(*root, {.mesh = DeviceMesh::flat(world)});
  pair.materialize(world.device());
  nn::init(pair, {1});
  optim::AdamW optimizer(pair.parameters(), {.lr = 1e-2});
  Subject subject(world, pair, optimizer, trapper, [&](int k) {
    const Tensor x = rows_of(static_cast<std::uint64_t>(k), world.rank() * 2, 2, 5, world.device());
    const Tensor loss = mean_square(pair.decoder(tanh(pair.encoder(x))));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return loss.detach();
  });
  f(subject);
}

}  // namespace

TEST_CASE("an exception in the model's own code: a reset, and training goes on",
          "[promises][exceptions][threads][fsdp2-057]") {
  std::uint64_t tried = 0;
  for (const int ranks : {1, 2, 3})
    for (const ExecutorChoice& executor : executors(fresh_seed()))
      tried += try_all({.ranks = ranks, .options = {.executor = executor}, .trap = Trap::hook},
                       with_wired);
  std::cout << tried << " exceptions in hooks\n";
  CHECK(tried >= at_least(200));
}

TEST_CASE("an exception at every launch and in every body: a reset, and training goes on",
          "[promises][exceptions][threads]") {
  std::uint64_t tried = 0;
  for (const Trap trap : {Trap::launch, Trap::body})
    for (const int ranks : {1, 2, 3})
      for (const ExecutorChoice& executor : executors(fresh_seed()))
        tried +=
            try_all({.ranks = ranks, .options = {.executor = executor}, .trap = trap}, with_wired);
  std::cout << tried << " exceptions at launches and in bodies of the stack\n";
  CHECK(tried >= at_least(500));
}

TEST_CASE("an exception in a step of two roots: one reset for both, and training goes on",
          "[promises][exceptions][threads]") {
  std::uint64_t tried = 0;
  for (const Trap trap : {Trap::launch, Trap::body})
    for (const auto executor : {ExecutorKind::threaded, ExecutorKind::inlined})
      for (const int ranks : {1, 2, 3})
        tried +=
            try_all({.ranks = ranks, .options = {.executor = executor, .threads = 1}, .trap = trap},
                    with_pair);
  std::cout << tried << " exceptions with two roots\n";
  CHECK(tried >= at_least(200));
}

TEST_CASE("an exception wherever an observer is told of an event or of memory: a reset, and on",
          "[promises][exceptions][threads]") {
  std::uint64_t tried = 0;
  for (const Trap trap : {Trap::record, Trap::wait, Trap::block, Trap::memory}) {
    for (const int ranks : {1, 2, 3})
      for (const ExecutorChoice& executor : executors(fresh_seed()))
        if (ranks > 1 || trap != Trap::wait)  // a rank alone uses one stream
          tried += try_all({.ranks = ranks, .options = {.executor = executor}, .trap = trap},
                           with_wired);
    tried += try_all({.ranks = 2, .trap = trap}, Cell{.recomputes = true, .param = bf16});
    tried += try_all({.ranks = 2, .trap = trap}, Cell{.param = bf16, .offload = Offload::cpu});
  }
  std::cout << tried << " exceptions at events\n";
  CHECK(tried >= at_least(500));
}

TEST_CASE("an exception at every launch of a language model's step",
          "[promises][exceptions][threads]") {
  std::uint64_t tried = 0;
  int i = 0;
  for (const Cell& cell :
       {Cell{.recomputes = true, .tied = true, .param = bf16, .changes = true},
        Cell{.reshard = Reshard::always, .keeps_gradients = true, .micro_batches = 3},
        Cell{.reshard = Reshard::never, .freezes = true, .param = f16},
        Cell{.by_hand = true, .stored = e4m3, .ignores = true},
        Cell{.micro_batches = 2, .param = bf16, .offload = Offload::cpu}}) {
    const int ranks = 2 + i++ % 2;
    for (const Trap trap : {Trap::launch, Trap::body})
      tried += try_all({.ranks = ranks, .trap = trap}, cell);
  }
  std::cout << tried << " exceptions at launches and in bodies of the language model\n";
  CHECK(tried >= at_least(1500));
}

TEST_CASE("an exception in the first step, before anything of it exists",
          "[promises][exceptions][threads]") {
  std::mutex mutex;
  std::set<std::string> outside;  // of the pool: memory of the system that was found missing
  const auto train = [&](World& world, Trap trap, std::uint64_t place) {
    nn::Llama model(llama_config({}));
    for (nn::Module* part : model.parts()) fully_shard(*part, {.mesh = DeviceMesh::flat(world)});
    fully_shard(model, {.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    nn::init(model, {1});
    auto optimizer = std::make_unique<optim::AdamW>(model.parameters());
    const auto step = [&] {
      const auto id = static_cast<std::int32_t>(world.rank());
      const Tensor tokens = Tensor::from(std::vector{id, 1, 2, 3}, {1, 4}, world.device());
      // Larger than what the host has handed over so far.
      const Tensor batch = Tensor::from(std::vector(5000, 0.5f), {5000}, world.device());
      const Tensor loss = model.loss(tokens, tokens);
      loss.backward();
      optimizer->step();
      optimizer->zero_grad();
      return world.sum(loss.item());
    };
    Trapper& trapper = Trapper::on(world);
    std::vector<double> losses;
    for (int attempt = 0; attempt < 2 && losses.empty(); ++attempt) {
      if (attempt == 0 && place > 0) {
        const bool is_mine = static_cast<int>(place) % world.size() == world.rank();
        trapper.arm(is_mine ? trap : Trap::none, place, false);
      }
      try {
        const double first = step();
        trapper.disarm();
        world.barrier();
        losses = {first, step(), step()};
      } catch (const std::exception& error) {
        trapper.disarm();
        for (const char* const what : {"symmetric memory", "host memory"})
          if (std::string_view(error.what()).find(what) != std::string_view::npos) {
            const std::lock_guard lock(mutex);
            outside.insert(what);
          }
        if (reset(model).parameters_are_consistent && optimizer->steps() == 0) continue;
        nn::init(model, {1});
        optimizer = std::make_unique<optim::AdamW>(model.parameters());
      }
    }
    return losses;
  };
  const auto undisturbed = on_ranks(3, [&](World& world) { return train(world, Trap::none, 0); });
  struct Plan {
    Trap trap;
    std::uint64_t last, stride;
  };
  for (const auto& [trap, last, stride] : {Plan{Trap::launch, 200, 3 * stride()},
                                           {Trap::body, 200, 3 * stride()},
                                           {Trap::allocation, 100, GridShare::stride()}})
    for (std::uint64_t place = first_place(std::min(stride, last - 1)); place < last;
         place += stride) {
      INFO(name(trap) << ' ' << place);
      CHECK(on_ranks(3, [&](World& world) { return train(world, trap, place); }) == undisturbed);
    }
  CHECK((outside == std::set<std::string>{"host memory", "symmetric memory"} ||
         GridShare::stride() > 1));
}
