// Moments: which parameters have them, when they are made, what keeps and restores them.
#include "runtime/param/parameter_state.hpp"
#include "tests/optim/fixture.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("a parameter without a gradient keeps its value and its moments", "[optim]") {
  Fixture f;
  INFO("seed " << f.draw.seed);
  f.bag.materialize(f.device);
  f.start();
  optim::AdamW adamw(f.bag.parameters());
  give_gradients(f.bag, f.gradients({0, 1, 2, 3, 4}));
  adamw.step();
  adamw.zero_grad();
  const Values kept = get(f.bag.items[2]), changed = get(f.bag.items[4]);
  const Values m = adamw.states()[0].moments[0].to_vector<float>();
  give_gradients(f.bag, f.gradients({0, 4}));
  adamw.step();
  CHECK(get(f.bag.items[2]) == kept);
  CHECK(get(f.bag.items[4]) != changed);
  const Values after = adamw.states()[0].moments[0].to_vector<float>();
  const FlatGroup& group = *state_of(f.bag.items[0])->group;
  for (std::size_t i = 0; i < group.entries.size(); ++i) {
    const auto begin = static_cast<std::ptrdiff_t>(group.entries[i].offset);
    const auto end = begin + static_cast<std::ptrdiff_t>(group.entries[i].numel);
    CHECK(std::equal(m.begin() + begin, m.begin() + end, after.begin() + begin) ==
          (i != 0 && i != 4));
  }
}

TEST_CASE("frozen parameters are left alone and cost no moments", "[optim]") {
  Fixture f;
  INFO("seed " << f.draw.seed);
  f.bag.items[2].freeze();
  f.bag.materialize(f.device);
  f.start();
  const Values kept = get(f.bag.items[2]);
  optim::AdamW optimizer(f.bag.parameters(), {.weight_decay = 0.5});
  optimizer.prepare();
  // [5, 7], [3], [1] and [129], in multiples of 64 elements.
  CHECK(f.ledger().live_bytes("moments") == 8 * (64 + 64 + 64 + 192));
  give_gradients(f.bag, f.gradients({0, 1, 3, 4}));
  optimizer.step();
  CHECK(get(f.bag.items[2]) == kept);
}

TEST_CASE("state exists after prepare, twelve bytes an element, and zero_grad frees the rest",
          "[optim]") {
  Fixture f;
  f.bag.materialize(f.device);
  f.start();
  optim::AdamW optimizer(f.bag.parameters());
  optimizer.prepare();
  const std::int64_t numel = state_of(f.bag.items[0])->group->numel;
  const auto state_bytes = [&] {
    return f.ledger().live_bytes("weights") + f.ledger().live_bytes("moments");
  };
  CHECK(state_bytes() == 12 * numel);
  CHECK(f.ledger().live_bytes("scalars") == 256);  // 32 bytes, as the pool rounds
  const std::int64_t tables = f.ledger().live_bytes("tables");
  CHECK(tables > 0);
  for (int t = 0; t < 3; ++t) {
    give_gradients(f.bag, f.gradients({0, 1, 2, 3, 4}));
    CHECK(f.ledger().live_bytes("gradients") >= 4 * numel);
    optimizer.step();
    optimizer.zero_grad();
    CHECK(f.ledger().live_bytes("gradients") == 0);
    CHECK(!f.bag.items[0].grad().defined());
    CHECK(state_bytes() == 12 * numel);
    CHECK(f.ledger().live_bytes("tables") == tables);
  }
}

TEST_CASE("without any gradient a step changes nothing but the count", "[optim]") {
  Fixture f;
  f.bag.materialize(f.device);
  f.start();
  optim::AdamW optimizer(f.bag.parameters(), {.weight_decay = 0.5});
  const Values before = get(f.bag.items[0]);
  const std::uint64_t version = state_of(f.bag.items[0])->group->version;
  optimizer.step();
  CHECK(get(f.bag.items[0]) == before);
  CHECK(state_of(f.bag.items[0])->group->version == version);
  CHECK(optimizer.steps() == 1);
  give_gradients(f.bag, f.gradients({0}));
  optimizer.step();
  CHECK(state_of(f.bag.items[0])->group->version == version + 1);
}

TEST_CASE("an optimizer keeps moments of its own parameters, and keeps them as others come and go",
          "[optim]") {
  Fixture f;
  INFO("seed " << f.draw.seed);
  f.bag.materialize(f.device);
  f.start();
  const std::vector<Parameter> some{f.bag.items[3], f.bag.items[4], f.bag.items[1]};
  optim::AdamW optimizer(some), other({f.bag.items[0]});
  optimizer.prepare();
  CHECK(f.ledger().live_bytes("moments") == 8 * (64 + 64 + 192));
  const auto moments = [&](std::size_t i) {
    std::vector<Values> all;
    for (const Tensor& m : optimizer.moments(f.bag.items[i])) all.push_back(m.to_vector<float>());
    return all;
  };
  const auto step = [&] {
    give_gradients(f.bag, f.gradients({1, 3, 4}));
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  const std::vector<Values> kept = moments(4);
  REQUIRE(kept.size() == 2);
  CHECK(kept[0] != Values(129, 0));
  f.bag.items[1].set_trainable(false);
  optimizer.prepare();
  CHECK(f.ledger().live_bytes("moments") == 8 * (64 + 192));
  CHECK(moments(4) == kept);
  CHECK(moments(1).empty());
  const Values frozen = get(f.bag.items[1]);
  give_gradients(f.bag, f.gradients({4}));
  optimizer.step();
  CHECK(moments(4) != kept);
  CHECK(get(f.bag.items[1]) == frozen);
  f.bag.items[1].set_trainable(true);
  f.bag.items[0].value();  // the group follows
  optimizer.prepare();
  CHECK(moments(1) == std::vector<Values>(2, Values(3, 0)));
  CHECK_THROWS_WITH(optimizer.moments(f.bag.items[0]), Contains("is not this optimizer's"));
  CHECK(other.moments(f.bag.items[0]).empty());  // not yet prepared
}

TEST_CASE("a restored optimizer goes on as the first one", "[optim]") {
  Fixture f;
  INFO("seed " << f.draw.seed);
  f.bag.materialize(f.device);
  f.start();
  optim::AdamW first(f.bag.parameters());
  for (int t = 0; t < 3; ++t) {
    give_gradients(f.bag, f.gradients({0, 1, 2, 3, 4}));
    first.step();
    first.zero_grad();
  }
  Bag other(kShapes);
  other.materialize(f.device);
  for (std::size_t i = 0; i < kShapes.size(); ++i) set(other.items[i], get(f.bag.items[i]));
  optim::AdamW second(other.parameters());
  second.prepare();
  second.set_steps(first.steps());
  for (std::size_t k = 0; k < 2; ++k)
    raw::copy_into(second.states()[0].moments[k], first.states()[0].moments[k]);
  const auto gradients = f.gradients({0, 1, 2, 3, 4});
  give_gradients(f.bag, gradients);
  give_gradients(other, gradients);
  first.step();
  second.step();
  for (std::size_t i = 0; i < kShapes.size(); ++i)
    CHECK(get(other.items[i]) == get(f.bag.items[i]));
}

TEST_CASE(
    "what is thawed before the step that would drop its moments keeps them, whatever is read") {
  const auto train = [](bool reads, bool steps) {
    Fixture f;
    f.bag.materialize(f.device);
    nn::init(f.bag, {1});
    optim::AdamW adamw(f.bag.parameters(), {.lr = 0.1});
    const auto gradients = [&] { return f.gradients({0, 1, 2, 3, 4}); };
    give_gradients(f.bag, gradients());
    adamw.step();
    adamw.zero_grad();
    f.bag.items[2].freeze();
    CHECK(adamw.moments(f.bag.items[2]).empty());
    if (reads) CHECK_FALSE(adamw.state_dict(f.bag).contains("2.exp_avg"));
    if (steps) adamw.step();
    f.bag.items[2].set_trainable(true);
    adamw.prepare();
    std::vector<float> moment = adamw.moments(f.bag.items[2])[0].to_vector<float>();
    return std::ranges::any_of(moment, [](float m) { return m != 0; });
  };
  for (const bool reads : {false, true}) {
    CHECK(train(reads, false));
    CHECK_FALSE(train(reads, true));
  }
}
