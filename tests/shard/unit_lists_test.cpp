// Lists of modules that are one unit: rounds of calls, in whatever order, at whatever depth.
#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/embedding.hpp"
#include "tests/shard/trained.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// Layers of which the first two are a list, and the others units; what is done with them is given.
struct ListedPair final : nn::Module {
  using Use = std::function<Tensor(ListedPair&, const Tensor&)>;
  explicit ListedPair(Use use) : use(std::move(use)) {
    register_modules("a", a, "b", b, "c", c);
    for (const Parameter& p : parameters()) p.set_initializer(Initializer::normal(0, 0.5));
  }
  void shard(const ShardOptions& options) {
    fully_shard({&a, &b}, options);
    shard_each({&c, this}, options);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] { return use(*this, x); });
  }
  Use use;
  nn::Linear a{4, 4}, b{4, 4}, c{4, 4};
};

struct CountedStep {
  std::uint64_t forward = 0, backward = 0, reductions = 0;
  bool operator==(const CountedStep&) const = default;
};
std::ostream& operator<<(std::ostream& out, const CountedStep& c) {
  return out << c.forward << " and " << c.backward << " gathers, " << c.reductions << " reductions";
}
// Of a step with Reshard::always, the root apart, which has nothing.
CountedStep counted_step(const ListedPair::Use& use,
                         const std::function<void(ListedPair&)>& prepare = {}) {
  const auto all = on_ranks(2, [&](World& world) {
    ListedPair model(use);
    start(model, world, 1, Reshard::always);
    if (prepare) prepare(model);
    const ShardCounters none = shard_counters(model);
    const Tensor loss = mean_square(model(rows_of(1, world.rank(), 2, 4, world.device())));
    const ShardCounters before = shard_counters(model);
    loss.backward();
    const ShardCounters after = shard_counters(model);
    return CountedStep{before.gathers - none.gathers, after.gathers - before.gathers,
                       after.reductions - none.reductions};
  });
  CHECK(all[0] == all[1]);
  return all[0];
}

Tensor calls_in_turn(ListedPair& m, const Tensor& x) { return m.b(tanh(m.c(tanh(m.a(x))))); }

}  // namespace

TEST_CASE("a list is gathered once in forward, once in backward, and reduced once", "[threads]") {
  const CountedStep once{2, 2, 2};  // c's and the list's
  CHECK(counted_step(calls_in_turn) == once);
  CHECK(counted_step([](ListedPair& m, const Tensor& x) { return m.a(tanh(m.c(tanh(m.b(x))))); }) ==
        once);
  CHECK(counted_step([](ListedPair& m, const Tensor& x) { return m.c(tanh(m.a(x))); }) == once);
  CHECK(counted_step([](ListedPair& m, const Tensor& x) { return m.c(tanh(m.b(x))); }) == once);
  CHECK(counted_step(
            [](ListedPair& m, const Tensor& x) {  // one of them inside of another unit's call
              return m.c.call([&] { return m.b(tanh(linear(m.a(x), m.c.weight, m.c.bias))); });
            }) == once);
  CHECK(counted_step([](ListedPair& m, const Tensor& x) {  // and one in the other's
          return m.c(m.a.call([&] { return m.b(tanh(linear(x, m.a.weight, m.a.bias))); }));
        }) == once);
  CHECK(counted_step([](ListedPair& m, const Tensor& x) {  // one twice, before the other
          return m.b(tanh(m.c(tanh(m.a(tanh(m.a(x)))))));
        }) == once);
  CHECK(counted_step([](ListedPair& m, const Tensor& x) {
          return recompute([&m](const Tensor& h) { return calls_in_turn(m, h); }, x);
        }) == once);
  CHECK(counted_step([](ListedPair& m, const Tensor& x) {  // run again apart from each other
          const Tensor h = recompute([&m](const Tensor& in) { return tanh(m.a(in)); }, x);
          return recompute([&m](const Tensor& in) { return m.b(in); }, tanh(m.c(h)));
        }) == once);
  CHECK(
      counted_step([](ListedPair& m, const Tensor& x) {  // the second round of a is one of its own
        return m.a(tanh(calls_in_turn(m, x)));
      }) == CountedStep{3, 3, 3});
  CHECK(counted_step([](ListedPair& m, const Tensor& x) {  // two rounds that run again together
          return recompute([&m](const Tensor& h) { return m.a(tanh(m.b(tanh(m.a(h))))); }, x);
        }) == CountedStep{2, 1, 1});
  CHECK(counted_step([](ListedPair& m, const Tensor& x) {
          const NoGradGuard none;
          m.a(m.b(x));
          const autograd::GradModeGuard some(true);
          return m.c(x);
        }) == CountedStep{2, 1, 1});
  CHECK(counted_step(
            [](ListedPair& m, const Tensor& x) {  // of a round, the first call has no gradient
              Tensor h = x;
              {
                const NoGradGuard none;
                h = m.a(x);
              }
              return m.c(tanh(m.b(h)));
            }) == once);
  CHECK(counted_step(calls_in_turn, [](ListedPair& m) { m.a.freeze(), m.b.freeze(); }) ==
        CountedStep{2, 2, 1});
  CHECK(counted_step(calls_in_turn, [](ListedPair& m) { m.a.freeze(); }) == once);
  CHECK(counted_step(calls_in_turn, [](ListedPair& m) { set_requires_gradient_sync(m, false); }) ==
        CountedStep{2, 2, 0});
  CHECK(counted_step(calls_in_turn, [](ListedPair& m) {
          set_reshard_after_forward(m.b, Reshard::never);
        }) == CountedStep{2, 1, 2});
  CHECK(counted_step(calls_in_turn,
                     [](ListedPair& m) { set_modules_to_backward_prefetch(m.b, {&m.c}); }) == once);
}

TEST_CASE("a loss inside of the root's call goes backward along a part of a round", "[threads]") {
  CHECK(counted_step([](ListedPair& m, const Tensor& x) {
          mean_square(m.a(x)).backward();
          return m.c(m.b(x));  // of the same round: reduced where the pass ends
        }) == CountedStep{3, 2, 3});
  CHECK(counted_step([](ListedPair& m, const Tensor& x) {
          mean_square(m.a(x)).backward();
          const Tensor y = m.b(x);
          return m.c(m.b.weight.spec().rank == 0 ? y : x);  // on all ranks, whoever uses it
        }) == CountedStep{3, 2, 3});
}

TEST_CASE("a list has the bits of units of their own where each module is called once",
          "[threads]") {
  for (const Reshard way : kReshards)
    for (const int ranks : {1, 2, 3}) {
      const auto same = on_ranks(ranks, [&](World& world) {
        const ShardOptions options{.mesh = DeviceMesh::flat(world), .reshard_after_forward = way};
        ListedPair listed(calls_in_turn), apart(calls_in_turn);
        listed.shard(options);
        for (nn::Linear* const layer : {&apart.a, &apart.b, &apart.c}) fully_shard(*layer, options);
        fully_shard(apart, options);
        for (ListedPair* const model : {&listed, &apart}) {
          nn::init(*model, {1}, world.device());
          optim::SGD optimizer(model->parameters(), {.lr = 0.1});
          for (std::uint64_t k = 0; k < 3; ++k) {
            mean_square((*model)(rows_of(k, world.rank(), 2, 4, world.device()))).backward();
            optimizer.step();
            optimizer.zero_grad();
          }
        }
        return same_bits(full_values(listed), full_values(apart));
      });
      for (const bool is_same : same) CHECK(is_same);
    }
}

namespace {

template <class First>
void check_tied_list(const std::function<Tensor(const Device&)>& input) {
  for (const Reshard way : kReshards)
    for (const int ranks : {1, 2, 3})
      for (const bool is_same : on_ranks(ranks, [&](World& world) {
             const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                        .reshard_after_forward = way};
             Tied<First> listed, around;
             fully_shard({&listed.first, &listed.head}, options);
             for (Tied<First>* const model : {&listed, &around}) {
               shard_each({&model->middle, model}, options);
               nn::init(*model, {1}, world.device());
               optim::SGD optimizer(model->parameters(), {.lr = 0.1});
               for (int k = 0; k < 3; ++k) {
                 mean_square((*model)(input(world.device()))).backward();
                 optimizer.step();
                 optimizer.zero_grad();
               }
             }
             return same_bits(full_values(listed), full_values(around));
           }))
        CHECK(is_same);
}

}  // namespace

TEST_CASE("modules that share a parameter train as a list as in the unit around both",
          "[threads]") {
  check_tied_list<nn::Embedding>(
      [](const Device& device) { return Tensor::arange(4, i64, device); });
  check_tied_list<nn::Linear>([](const Device& device) { return rows_of(1, 0, 2, 4, device); });
}

TEST_CASE("the plan has a list as one unit, and the first step follows it", "[threads]") {
  for (const Reshard way : kReshards)
    for (const auto& [plan, unplanned, bytes] : on_ranks(2, [&](World& world) {
           ListedPair model(
               [](ListedPair& m, const Tensor& x) { return m.c(tanh(m.b(tanh(m.a(x))))); });
           start(model, world, 1, way);
           const ShardPlan plan = shard_plan(model);
           for (int k = 0; k < 3; ++k)
             mean_square(model(rows_of(1, world.rank(), 2, 4, world.device()))).backward();
           return std::tuple(plan, shard_counters(model).unplanned_slots,
                             shard_plan(model).arena_bytes);
         })) {
      REQUIRE(plan.units.size() == 3);
      CHECK(plan.units[1].name == "a, b");
      CHECK(plan.units[1].parameters == 4);
      CHECK(plan.units[1].gathers_per_call == (way == Reshard::never ? 1 : 2));
      CHECK(plan.units[1].reductions_per_call == 1);
      CHECK(unplanned == 0);
      CHECK(bytes == plan.arena_bytes);
    }
}

TEST_CASE("a list stays open to the end of its round and no longer", "[threads]") {
  for (const auto& [between, whole, partial, after, by_hand] : on_ranks(2, [](World& world) {
         const Tensor x = rows_of(1, world.rank(), 2, 4, world.device());
         std::string between, whole;
         ListedPair model([&](ListedPair& m, const Tensor& in) {
           const Tensor h = m.a(in);
           between = thrown_by([&] { m.b.weight.value(); });
           const Tensor y = m.b(h);
           whole = thrown_by([&] { m.b.weight.value(); });
           return y;
         });
         start(model, world, 1, Reshard::always);
         model(x);
         model.use = [](ListedPair& m, const Tensor& in) { return m.a(in); };
         model(x);
         const std::string partial = thrown_by([&] { model.a.weight.value(); });
         model.use = [](ListedPair& m, const Tensor& in) { return m.b(in); };  // a round of its own
         model(x);
         const std::string after = thrown_by([&] { model.b.weight.value(); });
         unshard(model.a);
         std::string by_hand = thrown_by([&] { model.b.weight.value(); });
         reshard(model.b);
         by_hand += thrown_by([&] { model.a.weight.value(); });
         return std::tuple(between, whole, partial, after, by_hand);
       })) {
    CHECK(between.empty());
    for (const std::string& closed : {whole, partial, after, by_hand})
      CHECK_THAT(closed, Contains("of unit 'a, b'") && Contains("while the unit is closed"));
  }
}

// Where rank 1 leaves a module out its list waits for it, while peers have closed theirs.
TEST_CASE("a module of a list that one rank leaves out is told before another unit is gathered",
          "[threads]") {
  for (const Reshard reshard : {Reshard::always, Reshard::automatic, Reshard::never}) {
    const auto heard = on_ranks(2, [&](World& world) {
      const bool leaves_out = world.rank() == 1;
      ListedPair model([&](ListedPair& m, const Tensor& x) {
        const Tensor h = tanh(m.a(x));
        return m.c(leaves_out ? h : tanh(m.b(h)));
      });
      start(model, world, 1, reshard);
      std::string said;
      try {
        mean_square(model(rows_of(1, world.rank(), 2, 4, world.device()))).backward();
        world.device().synchronize();
      } catch (const CommError& error) {
        said = error.what();
        reset(model);
      }
      return said;
    });
    INFO(reshard);
    for (const std::string& said : heard)
      CHECK_THAT(said, Contains("'all_gather c (in a round of a, b)'") &&
                           Contains("'all_gather c'") &&
                           Contains("comes from calls that all ranks must make, or none"));
  }
}

TEST_CASE("what a round has left open is closed after an exception, with and without a reset",
          "[threads]") {
  const auto run = [](int fails_with_reset) {
    return on_ranks(2, [&](World& world) {
      bool fails = false;
      ListedPair model([&](ListedPair& m, const Tensor& x) {
        const Tensor h = tanh(m.a(x));
        if (fails) throw std::runtime_error("between two calls of a round");
        return m.b(tanh(m.c(h)));
      });
      start(model, world, 1);
      optim::SGD optimizer(model.parameters(), {.lr = 0.1});
      std::string closed;
      for (std::uint64_t k = 0; k < 3; ++k) {
        // Anew for each call: a reset drops what was queued for the one that failed.
        const auto x = [&] { return rows_of(k, world.rank(), 2, 4, world.device()); };
        if (k == 1 && fails_with_reset >= 0) {
          fails = true;
          try {
            mean_square(model(x()));
          } catch (const std::exception&) {
            closed = thrown_by([&] { model.b.weight.value(); });
            if (fails_with_reset) reset(model);
          }
          fails = false;
        }
        mean_square(model(x())).backward();
        optimizer.step();
        optimizer.zero_grad();
        world.device().synchronize();  // an update that has not begun would be taken back
        world.barrier();
      }
      return std::pair(closed, full_values(model));
    });
  };
  const auto plain = run(-1);
  for (const int with_reset : {0, 1}) {
    const auto failed = run(with_reset);
    for (std::size_t rank = 0; rank < 2; ++rank) {
      CHECK_THAT(failed[rank].first, Contains("while the unit is closed"));
      CHECK(same_bits(failed[rank].second, plain[rank].second));
    }
  }
}

TEST_CASE("a list is the union of its modules' trees, of which inner ones are left out",
          "[fsdp2-008]") {
  const World world = World::single();
  const ShardOptions options{.mesh = DeviceMesh::flat(world)};
  struct Nested final : nn::Module {
    Nested() { register_modules("outer", outer, "tied", tied, "rest", rest); }
    struct Outer final : nn::Module {
      Outer() { register_modules("inner", inner, "unit", unit); }
      nn::Linear inner{4, 4}, unit{4, 4};
    } outer;
    nn::Linear tied{outer.inner.weight}, rest{4, 4};
  } model;
  fully_shard(model.outer.unit, options);
  fully_shard({&model.outer.inner, &model.tied, &model.outer}, options);
  CHECK(model.outer.inner.hook() == nullptr);
  CHECK(model.outer.hook() == model.tied.hook());
  fully_shard(model, options);
  model.materialize(world.device());
  const ShardPlan plan = shard_plan(model);
  REQUIRE(plan.units.size() == 3);
  CHECK(plan.units[0].parameters == 2);
  CHECK(plan.units[1].name == "outer, tied");
  CHECK(plan.units[1].parameters == 2);  // the tied one once
  CHECK(plan.units[2].name == "outer.unit");
}

TEST_CASE("a list that backward does not read is gathered for a recomputed call inside of its own",
          "[threads]") {
  const auto gradients = [](bool unshards) {
    return on_ranks(2, [&](World& world) {
      ListedPair model([](ListedPair& m, const Tensor& x) {
        const auto b = [&m](const Tensor& in) { return m.b(in); };
        return m.a.call([&] { return m.c(recompute(b, m.c(x))); });
      });
      start(model, world, 1, Reshard::always);
      set_unshard_in_backward(model.a, unshards);
      mean_square(model(rows_of(1, world.rank(), 2, 4, world.device()))).backward();
      return shard_gradients(model);
    });
  };
  const auto read = gradients(true), unread = gradients(false);
  for (std::size_t rank = 0; rank < 2; ++rank) CHECK(same_bits(read[rank], unread[rank]));
}
