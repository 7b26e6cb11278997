// Parameters that a program or an optimizer writes, in units: the next call has the new values, and
// a backward whose forward had the old ones says so.
#include <iostream>

#include "tessera/autograd/recompute.hpp"
#include "tests/shard/pair.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

struct Edited {
  Reshard reshard = Reshard::automatic;
  DType param = f32;
  bool tied = false, streams = false, recomputes = false, is_whole = false;
};

std::ostream& operator<<(std::ostream& out, const Edited& c) {
  return out << "reshard " << c.reshard << ", " << c.param << ", tied " << c.tied << ", streamed "
             << c.streams << ", recomputed " << c.recomputes << ", whole " << c.is_whole;
}

class Speaker {
 public:
  Speaker(World& world, const Edited& c)
      : world_(world),
        model(small_llama(2, c.recomputes ? nn::Recompute::blocks : nn::Recompute::none, c.tied)) {
    const ShardOptions options{.mesh = DeviceMesh::flat(world),
                               .precision = {.param = c.param},
                               .reshard_after_forward = c.reshard,
                               .slice_bytes = c.streams ? 1 : 1 << 30};
    if (!c.is_whole) {
      shard_parts(model, options);
    }
    model.materialize(world.device());
  }
  Tensor loss() {
    const auto tokens = [&](int shift) {
      std::vector<std::int32_t> all;
      for (int i = 0; i < kSmallLength; ++i)
        all.push_back(static_cast<std::int32_t>((3 * i + 5 * world_.rank() + shift) % kSmallWords));
      return Tensor::from(all, {1, kSmallLength}, world_.device());
    };
    return model.loss(tokens(0), tokens(1));
  }
  // What a step leaves, bit by bit: of one rank's tokens the loss, and its rows of the gradients.
  Values step() {
    for (const auto& part : parts_of(model.parameters())) part.group->gradient = {};
    const Tensor value = loss();
    value.backward();
    Values seen = shard_gradients(model);
    seen["loss"] = value.to_vector<float>();
    return seen;
  }

 private:
  World& world_;

 public:
  nn::Llama model;
};

// Another initialisation's values.
void edit_all(nn::Module& model) {
  for (const Parameter& p : model.parameters())
    p.edit([&](const Tensor& rows) {
      raw::axpby(rows, Tensor::ones(rows.shape(), f32, rows.device()), 0.01, 0.5);
    });
}

std::vector<Edited> all_cases() {
  std::vector<Edited> cases;
  for (const Reshard reshard : kReshards) {
    cases.push_back({.reshard = reshard});
    cases.push_back({.reshard = reshard, .param = bf16});
    cases.push_back({.reshard = reshard, .tied = true, .streams = true});
    cases.push_back({.reshard = reshard, .recomputes = true});
  }
  return cases;
}

}  // namespace

TEST_CASE("a forward behind an edit has the new values, on any number of ranks and schedule",
          "[fsdp2-037]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  GridShare share;
  for (const Edited& c : all_cases())
    for (const int ranks : {1, 2}) {
      if (!share.takes()) continue;
      INFO(c << ", " << ranks << " ranks");
      const auto run = [&](const WorldOptions& options, bool edits) {
        return on_ranks(ranks, options, [&](World& world) {
          Speaker speaker(world, c);
          nn::init(speaker.model, {3});
          if (edits) {  // once where nothing was gathered, then behind all that a program does
            speaker.step();
            edit_all(speaker.model);
            {
              const NoGradGuard no_gradient;
              speaker.loss();
            }
            edit_all(speaker.model);
            speaker.loss();  // whose backward never comes
            skip_backward(speaker.model);
          } else {
            edit_all(speaker.model);
            edit_all(speaker.model);
          }
          edit_all(speaker.model);
          Values seen = speaker.step();
          for (const auto& [name, values] : full_values(speaker.model))
            seen["value of " + name] = values;
          return seen;
        });
      };
      const auto expected = run({.executor = ExecutorKind::inlined, .threads = 1}, false);
      for (const ExecutorChoice& executor : testing::threaded_and_shuffled(seed)) {
        const auto got = run({.executor = executor, .threads = 1}, true);
        for (std::size_t rank = 0; rank < got.size(); ++rank)
          CHECK(same_bits(expected[rank], got[rank]));
      }
    }
}

TEST_CASE("an edit that a failed step has lost is no consistent parameter") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  int lost = 0;
  for (const Offload offload : {Offload::none, Offload::cpu})
    for (int trial = 0; trial < 20; ++trial) {
      struct Found {
        bool is_consistent = false, is_edited = true;
      };
      const auto ranks = on_ranks(
          2,
          {.executor = trial % 2 == 0 ? testing::shuffled(seed + static_cast<std::uint64_t>(trial))
                                      : ExecutorKind::threaded,
           .threads = 1},
          [&](World& world) {
            Stack model({4, 4, 4});
            model.shard({.mesh = DeviceMesh::flat(world), .offload = offload});
            nn::init(model, {1}, world.device());
            const Tensor x = rows_of(1, world.rank(), 2, 4, world.device());
            mean_square(model(x)).backward();
            for (const Parameter& p : model.parameters())
              p.edit([](const Tensor& rows) { raw::fill(rows, 1); });
            Found found;
            try {
              world.barrier();
              if (world.rank() == 0) throw std::runtime_error("rank 0");
              mean_square(model(x)).backward();
              world.barrier();
            } catch (const std::exception&) {
              found.is_consistent = reset(model).parameters_are_consistent;
            }
            for (const Parameter& p : model.parameters())
              for (const float v : p.shard().to_vector<float>())
                found.is_edited = found.is_edited && v == 1;
            return found;
          });
      CHECK(ranks[0].is_consistent == ranks[1].is_consistent);
      for (const Found& found : ranks) {
        CHECK((found.is_edited || !found.is_consistent));
        lost += found.is_edited ? 0 : 1;
      }
    }
  std::cout << "edits that a failed step had lost: on " << lost << " of 80 ranks\n";
}

TEST_CASE("an edit between a forward and its backward is an error") {
  std::vector<Edited> cases = all_cases();
  cases.push_back({.is_whole = true});
  for (const Edited& c : cases)
    for (const int ranks : {1, 2}) {
      if (c.is_whole && ranks > 1) continue;
      INFO(c << ", " << ranks << " ranks");
      const auto said = on_ranks(ranks, [&](World& world) {
        Speaker speaker(world, c);
        nn::init(speaker.model, {3});
        speaker.step();
        const Tensor loss = speaker.loss();
        edit_all(speaker.model);
        world.device().synchronize();  // or reset might find that an edit was lost
        const std::string what = thrown_by([&] { loss.backward(); });
        if (!c.is_whole) reset(speaker.model);
        speaker.step();  // goes on
        return what;
      });
      for (const std::string& what : said)
        CHECK_THAT(what, Contains("updated") || Contains("written by 'Parameter::edit'"));
    }
}

namespace {

// Where it is the only unit, it stays open until its backward.
class Alone final : public nn::Module {
 public:
  Alone() : w({4}, Initializer::constant(2)), unused({4}, Initializer::constant(5)) {
    register_parameter("w", w);
    register_parameter("unused", unused);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] { return sum(x * (uses ? w.value() : x)); });
  }
  Parameter w, unused;
  bool uses = true;
};

}  // namespace

TEST_CASE("a unit that stayed open over an edit refuses the backward, too") {
  for (const int ranks : {1, 2}) {
    const auto said = on_ranks(ranks, [](World& world) {
      Alone model;
      fully_shard(model, {.mesh = DeviceMesh::flat(world)});
      nn::init(model, {1}, world.device());
      Tensor x = Tensor::ones({4}, f32, world.device());
      x.require_grad();
      const Tensor loss = model(x);
      model.w.assign(raw::mul(model.w.shard(), 3));
      return thrown_by([&] { loss.backward(); });
    });
    for (const std::string& what : said) CHECK_THAT(what, Contains("updated"));
  }
}

// The root's gather is waited for where its first parameter is used: here nowhere.
TEST_CASE("an edit or a step waits for a gather for which nobody has waited") {
  for (const bool steps : {false, true})
    for (const ExecutorChoice& executor : testing::threaded_and_shuffled()) {
      INFO("an optimizer's step " << steps);
      const auto sums = on_ranks(2, {.executor = executor, .threads = 1}, [&](World& world) {
        Alone model;
        fully_shard(model, {.mesh = DeviceMesh::flat(world)});
        nn::init(model, {1}, world.device());
        optim::SGD optimizer(model.parameters(), {.lr = 0.5, .momentum = 0});
        Tensor x = Tensor::ones({4}, f32, world.device());
        x.require_grad();
        model(x).backward();
        model.uses = false;
        model(x);
        if (steps)
          optimizer.step();  // 2 - 0.5 * 1
        else
          model.w.edit([](const Tensor& rows) { raw::fill(rows, 7); });
        model.uses = true;
        const NoGradGuard no_gradient;
        return model(x).item();
      });
      for (const double sum : sums) CHECK(sum == 4 * (steps ? 1.5 : 7));
    }
}

TEST_CASE("an edit is this rank's rows, also where there are none, and scalars") {
  const auto rows = on_ranks(3, [](World& world) {
    Stack stack({2, 4});  // 4 rows of bias: two, two and none
    start(stack, world, 1);
    std::vector<std::int64_t> sizes;
    for (const Parameter& p : stack.parameters()) {
      p.edit([&](const Tensor& own) {
        sizes.push_back(own.numel());
        raw::fill(own, 3);
      });
      p.assign(raw::mul(p.shard(), 2));
    }
    double total = 0;
    for (const auto& [name, values] : full_values(stack))
      for (const float v : values) total += v;
    return std::pair(sizes, total);
  });
  CHECK(rows[0].first == std::vector<std::int64_t>{2, 1, 4, 2});
  CHECK(rows[2].first == std::vector<std::int64_t>{0, 1, 0, 0});
  for (const auto& [sizes, total] : rows) CHECK(total == 6 * (8 + 4 + 4 + 1));
}

TEST_CASE(
    "a function that reads parameters again in backward finds those of its forward, or says so",
    "[threads]") {
  class Reader final : public nn::Module {
   public:
    Reader() : w({4}, Initializer::constant(1)) { register_parameter("w", w); }
    Tensor operator()(const Tensor& x) {
      return call([&] { return recompute([&](const Tensor& in) { return tanh(in * w); }, x); });
    }
    Parameter w;
  };
  for (const bool is_sharded : {false, true})
    for (const int ranks : {1, 2})
      for (const std::string& said : on_ranks(ranks, [&](World& world) {
             Reader reader;
             if (is_sharded) fully_shard(reader, {.mesh = DeviceMesh::flat(world)});
             nn::init(reader, {1}, world.device());
             const Tensor loss = sum(reader(Tensor::ones({4}, f32, world.device())));
             reader.w.edit([](const Tensor& rows) { raw::fill(rows, 5); });
             return thrown_by([&] { loss.backward(); });
           }))
        CHECK_THAT(said, Contains("updated after the forward that is recomputed"));
}

TEST_CASE("a backward whose parameters were updated since its forward is an error, not wrong") {
  for (const int ranks : {1, 2})
    for (const bool recomputed : {false, true})
      for (const Reshard reshard : kReshards) {
        INFO(ranks << " ranks, recomputed " << recomputed);
        const auto said = on_ranks(ranks, [&](World& world) {
          Pair model([recomputed](Pair& m, const Tensor& x) {
            const auto both = [&m](const Tensor& in) { return m.b(tanh(m.a(in))); };
            return recomputed ? recompute(both, x) : both(x);
          });
          start(model, world, 5, reshard);
          optim::SGD optimizer(model.parameters(), {.lr = 0.5});
          const Tensor x = positive_rows(11, 0, 3, 4, world.device());
          const Tensor first = mean_square(model(x)), second = mean_square(model(x));
          second.backward();
          optimizer.step();
          const std::string what = thrown_by([&] { first.backward(); });
          reset(model);
          go_backward(model, x);  // goes on
          return what;
        });
        for (const std::string& what : said)
          CHECK_THAT(what, Contains("updated") && Contains("backward first"));
      }
}
