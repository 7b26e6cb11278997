// What reset keeps, what it refuses, and what it says. That it works at every place of a step is
// the matter of tests/promises/.
#include <atomic>
#include <chrono>
#include <thread>

#include "tessera/autograd/random.hpp"
#include "tests/schedules/shuffled.hpp"
#include "tests/shard/cuts.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

struct RecoveredModel {
  explicit RecoveredModel(const World& world, DType param = f32, std::int64_t width = 6)
      : RecoveredModel(world, param, width, DeviceMesh::flat(world)) {}
  RecoveredModel(const World& world, DType param, std::int64_t width, const DeviceMesh& mesh)
      : stack({4, width, 3}), world(world), dtype(param) {
    stack.shard({.mesh = mesh, .precision = {.param = param}});
    nn::init(stack, {1}, world.device());
    optimizer = std::make_unique<optim::AdamW>(stack.parameters());
  }
  Tensor forward() {
    return mean_square(stack(rows_of(7, 2 * world.rank(), 2, 4, world.device(), dtype)));
  }
  double step() {
    Tensor loss = forward();
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    return world.sum(loss.item());
  }
  Stack stack;
  const World& world;
  DType dtype;
  std::unique_ptr<optim::AdamW> optimizer;
};

}  // namespace

TEST_CASE("an update that is cut on one rank makes the next step an error on all, until a load",
          "[shard][threads]") {
  struct Seen {
    bool was_whole = true, trains = false;
    std::string refusal;
  };
  // Inline, so that the first update has run when the second is cut.
  const WorldOptions options{.executor = ExecutorKind::inlined, .threads = 1};
  const auto seen = on_ranks(2, options, [&](World& world) {
    RecoveredModel model(world);
    model.step();
    if (world.rank() == 0)
      world.device().context().add_observer(std::make_shared<Cuts>(2, "adamw"));
    Seen out;
    try {
      model.step();
      model.step();
    } catch (const std::exception&) {
      out.was_whole = reset(model.stack).parameters_are_consistent;
    }
    out.refusal = thrown_by<std::exception>([&] { model.step(); });
    reset(model.stack);
    nn::init(model.stack, {1});
    model.optimizer = std::make_unique<optim::AdamW>(model.stack.parameters());
    RecoveredModel fresh(world);
    out.trains = model.step() == fresh.step() && model.step() == fresh.step();
    return out;
  });
  for (const Seen& s : seen) {
    CHECK(!s.was_whole);
    CHECK_THAT(s.refusal, Contains("left an update of its parameters half done") &&
                              Contains("load parameters"));
    CHECK(s.trains);
  }
}

TEST_CASE("a table that is cut into slices anew is no more consistent than before",
          "[shard][threads]") {
  const WorldOptions options{.executor = ExecutorKind::inlined, .threads = 1};
  const auto refusals = on_ranks(2, options, [&](World& world) {
    nn::Llama model(small_llama(1));
    fully_shard(model, {.mesh = DeviceMesh::flat(world)});  // one unit, and slices
    nn::init(model, {5}, world.device());
    optim::AdamW optimizer(model.parameters());
    const auto step = [&] {
      const std::vector<std::int32_t> ids = {3, 1, 4, 10, 5};
      const Tensor all = Tensor::from(ids, {1, 5}, world.device());
      const auto loss = [&] {
        return model.loss(raw::slice(all, 1, 0, 4), raw::slice(all, 1, 1, 5));
      };
      {
        const NoGradGuard none;  // so that slots are planned anew, and made anew after a reset
        loss();
      }
      loss().backward();
      optimizer.step();
      optimizer.zero_grad();
      world.barrier();
    };
    step();
    step();
    if (world.rank() == 0)  // the update of the other rank has run
      world.device().context().add_observer(std::make_shared<Cuts>(1, "adamw"));
    const std::string cut = thrown_by<std::exception>(step);
    if (cut.empty() || reset(model).parameters_are_consistent) return std::string("not cut");
    return thrown_by<std::exception>(step);
  });
  for (const std::string& refusal : refusals)
    CHECK_THAT(refusal, Contains("left an update of its parameters half done"));
}

TEST_CASE("what is trained is loaded after a cut update, and a frozen base beside it stays",
          "[shard][threads]") {
  const WorldOptions options{.executor = ExecutorKind::inlined, .threads = 1};
  const auto refusals = on_ranks(2, options, [&](World& world) {
    nn::Llama model(small_llama(1));
    for (const Parameter& p : model.parameters())
      if (p.shape().ndim() > 1) {
        p.freeze();
        p.set_dtype(bf16);
      }
    const ShardOptions sharded{.mesh = DeviceMesh::flat(world), .precision = {.param = bf16}};
    fully_shard(model.blocks[0], sharded);
    fully_shard(model, sharded);  // a norm that is trained, and streamed tables that are not
    nn::init(model, {5}, world.device());
    const auto step = [&](optim::AdamW& optimizer) {
      const std::vector<std::int32_t> ids = {3, 1, 4, 10, 5};
      const Tensor all = Tensor::from(ids, {1, 5}, world.device());
      model.loss(raw::slice(all, 1, 0, 4), raw::slice(all, 1, 1, 5)).backward();
      optimizer.step();
      optimizer.zero_grad();
      world.barrier();
    };
    optim::AdamW first(model.parameters());
    step(first);
    world.device().context().add_observer(std::make_shared<Cuts>(2, "adamw"));  // of two units
    const std::string cut = thrown_by<std::exception>([&] { step(first); });
    if (cut.empty() || reset(model).parameters_are_consistent) return std::string("not cut");
    for (const Parameter& p : model.parameters())
      if (p.trainable()) p.assign(Tensor::ones(p.spec().local_shape(), f32, world.device()));
    optim::AdamW second(model.parameters());
    return thrown_by<std::exception>([&] { step(second); });
  });
  for (const std::string& refusal : refusals) CHECK(refusal == "");
}

// Replicas gather nothing, so that two of three come through their step.
TEST_CASE("moments of a frozen parameter that are gone on some ranks alone are a loss to all",
          "[shard][threads]") {
  for (const bool is_frozen : {false, true}) {
    std::atomic<int> stepped = 0;
    for (const bool is_right : on_ranks(3, [&](World& world) {
           RecoveredModel model(world, f32, 6, DeviceMesh::hybrid(world, {3, 1}));
           model.step();
           if (is_frozen) model.stack.parameters()[0].freeze();
           const std::string why = thrown_by<std::exception>([&] {
             const Tensor loss = model.forward();
             if (world.rank() == 0) {
               while (stepped < 2) std::this_thread::yield();
               throw std::runtime_error("no luck");
             }
             loss.backward();
             model.optimizer->step();
             ++stepped;
             world.barrier();
           });
           const bool said = reset(model.stack).parameters_are_consistent;
           return said == !is_frozen && model.optimizer->steps() == 1 && !why.empty();
         }))
      CHECK(is_right);
  }
}

TEST_CASE("an update that every rank has queued and none has begun is taken back",
          "[shard][threads]") {
  std::atomic<bool> all_submitted = false;
  const auto let_it_fail = [&] {
    all_submitted = true;
    all_submitted.notify_all();
  };
  std::atomic<int> hosts = 0;
  const auto steps = on_ranks(3, [&](World& world) {
    RecoveredModel model(world);
    model.step();
    std::int64_t submitted = 0;
    try {
      // The body fails on one rank, when its host is ahead by two steps.
      if (world.rank() == 1)
        world.device().compute().launch({.name = "unlucky"}, [go = &all_submitted](Exec&) {
          go->wait(false);
          throw std::runtime_error("no luck");
        });
      for (int k = 0; k < 2; ++k) {
        model.forward().backward();
        model.optimizer->step();
        model.optimizer->zero_grad();
      }
      submitted = model.optimizer->steps();
      if (++hosts == world.size()) let_it_fail();
      world.barrier();
    } catch (const std::exception&) {
      let_it_fail();
      if (!reset(model.stack).parameters_are_consistent) return std::int64_t{-1};
    }
    return submitted == 3 ? model.optimizer->steps() : -2;
  });
  for (const std::int64_t s : steps) CHECK(s == 1);
}

TEST_CASE("an update that all ranks have made runs to its end when the next step fails behind it",
          "[shard][threads]") {
  const bool fails_in_forward = GENERATE(false, true);
  const auto train = [&](const WorldOptions& options, bool fails) {
    return on_ranks(2, options, [&](World& world) {
      RecoveredModel model(world);
      bool has_failed = !fails, is_right = true;
      while (model.optimizer->steps() < 3) try {
          const bool is_next = world.rank() == 1 && model.optimizer->steps() == 1 && !has_failed;
          if (is_next && !fails_in_forward) throw std::runtime_error("a batch that can't be read");
          const Tensor loss = model.forward();
          if (is_next) throw std::runtime_error("a batch that can't be read");
          loss.backward();
          model.optimizer->step();
          model.optimizer->zero_grad();
          if (model.optimizer->steps() > 1) world.barrier();  // the first step nobody waits for
        } catch (const std::exception&) {
          is_right = is_right && !std::exchange(has_failed, true) &&
                     reset(model.stack).parameters_are_consistent && model.optimizer->steps() == 1;
        }
      return is_right ? full_values(model.stack) : Values();
    });
  };
  const auto calm = train({.threads = 1}, false);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    INFO("seed " << seed);
    const WorldOptions shuffled{.executor = testing::shuffled(seed)};
    const auto failed = train(seed % 4 == 3 ? WorldOptions{.threads = 1} : shuffled, true);
    for (std::size_t rank = 0; rank < 2; ++rank) CHECK(same_bits(failed[rank], calm[rank]));
  }
}

TEST_CASE("a rank that has followed masks into the next step takes a reset with all the others",
          "[shard][threads]") {
  // Rank 1 fails when its peer waits for it in the step after, which trains other parameters: there
  // the arena is another one, and the state of the optimizer lies elsewhere.
  const auto train = [](bool fails) {
    return on_ranks(2, [&](World& world) {
      RecoveredModel model(world, f32, 600);
      const auto set_masks = [&](std::int64_t step) {
        model.stack.set_trainable(step != 1);
        model.stack.layers[1].bias.set_trainable(true);
      };
      bool has_failed = !fails;
      int resets = 0;
      while (model.optimizer->steps() < 3) try {
          const std::int64_t k = model.optimizer->steps();
          if (k == 1 && world.rank() == 1 && !std::exchange(has_failed, true)) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            throw std::runtime_error("no luck");
          }
          set_masks(k);
          model.step();
        } catch (const std::exception&) {
          if (++resets > 1 || !reset(model.stack).parameters_are_consistent) throw;
          set_masks(0);  // as they were in the step before, for a look at the loss
          model.forward();
        }
      return full_values(model.stack);
    });
  };
  const auto failed = train(true), calm = train(false);
  for (std::size_t rank = 0; rank < 2; ++rank) CHECK(same_bits(failed[rank], calm[rank]));
}

TEST_CASE("masks that one rank alone had turned as a step failed may be turned back",
          "[shard][threads]") {
  const auto train = [](bool fails) {
    return on_ranks(2, [&](World& world) {
      RecoveredModel model(world);
      model.step();
      const Parameter& bias = model.stack.layers[1].bias;
      try {
        if (fails && world.rank() == 1) throw std::runtime_error("no luck");
        bias.set_trainable(false);
        world.barrier();
      } catch (const std::exception&) {
        reset(model.stack);
      }
      bias.set_trainable(true);
      for (int step = 0; step < 2; ++step) model.step();
      return full_values(model.stack);
    });
  };
  const auto failed = train(true), calm = train(false);
  for (std::size_t rank = 0; rank < 2; ++rank) CHECK(same_bits(failed[rank], calm[rank]));
}

TEST_CASE("what a step that was reset has left can't go backward", "[shard][threads]") {
  const auto refusals = on_ranks(2, [&](World& world) {
    RecoveredModel model(world);
    const Tensor old = model.forward();
    reset(model.stack, "a test");
    const std::string refusal = thrown_by<std::exception>([&] { old.backward(); });
    model.step();
    return refusal;
  });
  for (const std::string& text : refusals) CHECK_THAT(text, Contains("failed and was reset"));
}

TEST_CASE("a root that was left out of a reset is an error until it is reset and loaded",
          "[shard][threads]") {
  struct Both final : nn::Module {
    Both(RecoveredModel& a, RecoveredModel& b) {
      register_module("a", a.stack);
      register_module("b", b.stack);
    }
  };
  struct Seen {
    bool first_was_whole = false, both_were_whole = true, trains = false;
    std::string refusal, before_load;
  };
  const auto seen = on_ranks(2, [](World& world) {
    RecoveredModel a(world), b(world);
    Both both(a, b);
    a.step(), b.step();
    Seen out;
    out.first_was_whole = reset(a.stack, "a test").parameters_are_consistent;
    a.step();
    out.refusal = thrown_by<std::exception>([&] { b.step(); });
    out.both_were_whole = reset(both).parameters_are_consistent;
    out.before_load = thrown_by<std::exception>([&] { b.step(); });
    reset(both);
    for (RecoveredModel* model : {&a, &b}) {
      nn::init(model->stack, {1});
      model->optimizer = std::make_unique<optim::AdamW>(model->stack.parameters());
    }
    RecoveredModel fresh(world);
    const double expected = fresh.step();
    out.trains = a.step() == expected && b.step() == expected;
    return out;
  });
  for (const Seen& s : seen) {
    CHECK(s.first_was_whole);
    CHECK_THAT(s.refusal, Contains("has recovered from a failure without it"));
    CHECK(!s.both_were_whole);
    CHECK_THAT(s.before_load, Contains("load parameters"));
    CHECK(s.trains);
  }
}

TEST_CASE("reset is for the root, outside of its call", "[shard]") {
  const RaceCheck check;
  World world = World::single(check({.threads = 1}));
  RecoveredModel model(world);
  model.step();
  CHECK_THAT(thrown_by<std::exception>([&] { reset(model.stack.layers[0]); }),
             Contains("not the root"));
  nn::Linear plain(2, 2);
  CHECK_THAT(thrown_by<std::exception>([&] { reset(plain); }), Contains("not the root"));
  CHECK_THAT(thrown_by<std::exception>([&] {
               model.stack.call([&] {
                 reset(model.stack);
                 return 0;
               });
             }),
             Contains("catch the error outside of the model"));
  const ShardReset done = reset(model.stack, "a test");
  CHECK(done.parameters_are_consistent);
  CHECK(done.cause == "rank 0 failed: a test");
}

TEST_CASE("one rank without peers may go on without a reset, or hears why not", "[shard]") {
  const RaceCheck check;
  World world = World::single(check({.threads = 1}));
  const auto make = [&] { return std::make_unique<RecoveredModel>(world, bf16); };
  std::vector<double> expected;
  {
    const auto model = make();
    for (int k = 0; k < 3; ++k) expected.push_back(model->step());
  }
  const auto cuts = std::make_shared<Cuts>(0);
  world.device().context().add_observer(cuts);
  int went_on = 0;
  for (int k = 1;; ++k) {
    const auto model = make();
    CHECK(model->step() == expected[0]);
    cuts->left = k;
    const bool failed = !thrown_by<std::exception>([&] { model->step(); }).empty();
    cuts->left = 0;
    if (!failed) break;
    model->optimizer->zero_grad();
    const auto done = static_cast<std::size_t>(model->optimizer->steps());
    double loss = 0;
    const std::string refusal = thrown_by<std::exception>([&] { loss = model->step(); });
    INFO("launch " << k << ": " << refusal);
    if (refusal.empty()) CHECK(loss == expected[done]);
    if (!refusal.empty())
      CHECK_THAT(refusal, Contains("left an update of its parameters half done"));
    went_on += refusal.empty();
  }
  CHECK(went_on > 20);
}

TEST_CASE("reset drops the gradients of earlier micro-batches, and agrees on the random draws",
          "[shard][threads]") {
  const auto draws = on_ranks(3, [&](World& world) {
    RecoveredModel model(world);
    model.forward().backward();
    autograd::random_state().draws = 10 + static_cast<std::uint64_t>(world.rank());
    reset(model.stack, "a test");
    for (const auto& part : parts_of(model.stack.parameters()))
      if (part.group->gradient.defined()) return std::uint64_t{0};
    return autograd::random_state().draws;
  });
  for (const std::uint64_t d : draws) CHECK(d == 12);
}
