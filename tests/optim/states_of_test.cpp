// State of any shape that an optimizer declares: where it stands, what keeps and restores it, and
// what is refused. Over ranks: tests/shard/optim_states_test; in files: tests/checkpoint/grid_test.
#include "tests/optim/helpers.hpp"
#include "tests/support/adafactor.hpp"
#include "tests/support/thrown.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;
using optim::StateShape;

namespace {

// A matrix and a vector with Adafactor, which is given the same gradients at each step.
struct Factored {
  Factored() { bag.materialize(Device::cpu()); }
  void step() {
    give_gradients(bag, {{0, {1, 2, 3, 4, 5, 6}}, {1, {-1, 1, 2}}});
    adafactor.step();
    adafactor.zero_grad();
  }
  Values values(std::size_t i, const char* name) {
    return adafactor.state(bag.items[i], name).to_vector<float>();
  }
  Bag bag{{{3, 2}, {3}}};
  Adafactor adafactor{bag.parameters(), {.lr = 0.125}};
};

// Says what the test wants.
class Declares final : public optim::Optimizer {
 public:
  Declares(const std::vector<Parameter>& parameters, std::vector<StateShape> states)
      : Optimizer(parameters, 0.1, 0, {.moments = 1, .names = {"momentum"}}),
        states(std::move(states)) {}
  std::vector<StateShape> states;

 private:
  std::vector<StateShape> states_of(const Parameter&) const override { return states; }
  void write_scalars(const Tensor& scalars, std::int64_t) const override {
    put_scalars(scalars, kernels::UpdateScalars{});
  }
  void update(const GroupState&, const Tensor&) const override {}
};

}  // namespace

TEST_CASE("declared state has its shapes, begins as zeros and is written by a step", "[optim]") {
  Factored f;
  CHECK(!f.adafactor.state(f.bag.items[0], "row").defined());  // not yet prepared
  f.adafactor.prepare();
  CHECK(f.adafactor.state(f.bag.items[0], "row").shape() == Shape{3, 1});
  CHECK(f.adafactor.state(f.bag.items[0], "col").shape() == Shape{1, 2});
  CHECK(f.adafactor.state(f.bag.items[1], "variance").shape() == Shape{3});
  CHECK(f.values(0, "row") == Values(3, 0));
  f.step();  // 1 - beta2 is 1 at the first: means of squares
  CHECK(f.values(0, "row") == Values{2.5f, 12.5f, 30.5f});
  CHECK(f.values(1, "variance") == Values{1, 1, 4});
  CHECK(f.values(0, "col")[1] == Approx((4 + 16 + 36) / 3.0).epsilon(4 * 0x1p-24));
  CHECK_THROWS_WITH(f.adafactor.state(f.bag.items[0], "variance"),
                    Contains("keeps no 'variance' of parameter '0'"));
  CHECK(f.adafactor.moments(f.bag.items[0]).empty());
}

TEST_CASE("declared state stands in the state dict, and what loads it goes on as the first",
          "[optim]") {
  Factored first, second;
  first.step();
  first.step();
  const StateDict state = first.adafactor.state_dict(first.bag);
  CHECK(state.at("0.row").spec.shape == Shape{3, 1});
  CHECK(state.at("0.col").values.to_vector<float>() == first.values(0, "col"));
  CHECK(state.contains("1.variance"));
  second.bag.load(first.bag.state_dict());
  CHECK(second.adafactor.load(second.bag, state).missing.empty());
  first.step();
  second.step();
  for (const std::size_t i : {0u, 1u}) CHECK(get(first.bag.items[i]) == get(second.bag.items[i]));
  for (const char* const name : {"row", "col"})
    CHECK(first.values(0, name) == second.values(0, name));
  StateDict wrong = state;
  wrong["0.col"] = Tensor::ones({2}, f32, Device::cpu());
  CHECK_THROWS_WITH(second.adafactor.load(second.bag, wrong),
                    Contains("'0.col' in the state dict is [2] of f32, the optimizer has [1, 2]"));
  wrong.erase("0.col");
  CHECK_THROWS_WITH(second.adafactor.load(second.bag, wrong), Contains("no tensor '0.col'"));
}

TEST_CASE("a step whose condition does not hold leaves declared state as it is", "[optim]") {
  Factored f;
  f.step();
  const Values row = f.values(0, "row"), p = get(f.bag.items[0]);
  give_gradients(f.bag, {{0, {9, 9, 9, 9, 9, 9}}});
  f.adafactor.step_if(Tensor::zeros({}, boolean, f.bag.items[0].device()));
  f.adafactor.zero_grad();
  CHECK(f.adafactor.steps() == 1);
  CHECK(f.values(0, "row") == row);
  CHECK(get(f.bag.items[0]) == p);
  const Values vector = get(f.bag.items[1]);
  give_gradients(f.bag, {{0, {9, 9, 9, 9, 9, 9}}});  // none of the other
  f.adafactor.step();
  CHECK(f.values(0, "row") != row);
  CHECK(get(f.bag.items[0]) != p);
  CHECK(get(f.bag.items[1]) == vector);
}

TEST_CASE("declared state follows what is frozen and thawed as moments do", "[optim]") {
  Factored f;
  f.step();
  const Values col = f.values(0, "col");
  f.bag.items[1].freeze();
  CHECK(!f.adafactor.state(f.bag.items[1], "variance").defined());
  CHECK(!f.adafactor.state_dict(f.bag).contains("1.variance"));
  f.adafactor.prepare();
  CHECK(f.values(0, "col") == col);
  f.bag.items[1].set_trainable(true);
  f.bag.items[0].value();  // the group follows
  f.adafactor.prepare();
  CHECK(f.values(1, "variance") == Values(3, 0));
  CHECK(f.values(0, "col") == col);
}

TEST_CASE("what cannot be an optimizer's state is refused before anything is changed", "[optim]") {
  Bag bag({{3, 2}});
  bag.materialize(Device::cpu());
  Declares optimizer(bag.parameters(), {{"row", {3, 1}}});
  optimizer.prepare();
  raw::fill(optimizer.state(bag.items[0], "row"), 7);
  struct Bad {
    std::vector<StateShape> states;
    const char* said;
  };
  const Bad table[] = {
      {{{"row", {2, 1}}}, "state 'row' of [2, 1] is to be cut as '0' of [3, 2] is"},
      {{{"row", {}}}, "give it as many rows there, or Cut::whole"},
      {{{"row", {3}}, {"row", {3, 1}}}, "a state of '0' is named 'row'; give each a name of its"},
      {{{"", {3}}}, "is named ''"},
      {{{"a.b", {3}}}, "without dots"},
      {{{"momentum", {3}}}, "is named 'momentum'"},
      {{{"lr_factor", {3}}}, "is named 'lr_factor'"},
  };
  for (const Bad& bad : table) {
    optimizer.states = bad.states;
    optimizer.set_lr_factor(bag.parameters(), 1);  // the state is looked at anew
    const std::string said = thrown_by([&] { optimizer.prepare(); });
    INFO(said);
    CHECK(said.find(bad.said) != std::string::npos);
  }
  optimizer.states = {{"row", {3, 1}}, {"other", {5, 4, 2}, StateShape::Cut::whole}};
  optimizer.prepare();
  CHECK(optimizer.state(bag.items[0], "row").to_vector<float>() == Values(3, 7));
  CHECK(optimizer.state(bag.items[0], "other").to_vector<float>() == Values(40, 0));
}
