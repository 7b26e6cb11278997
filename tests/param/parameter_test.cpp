// Parameters without a unit: one flat group, gradients written into it, arrival counts.
#include "tessera/param/parameter.hpp"
#include "runtime/param/group_part.hpp"
#include "runtime/param/parameter_state.hpp"

#include <stdexcept>

#include "tests/autograd/helpers.hpp"

using namespace tessera;
using autograd::Gradients;

namespace {

struct Model {
  Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Parameter a{{2, 3}, Initializer::constant(0)}, b{{5}, Initializer::constant(0)},
      c{{70}, Initializer::constant(0)};
  std::shared_ptr<FlatGroup> group;

  Model() {
    for (const auto& [p, name] : {std::pair(a, "a"), {b, "b"}, {c, "c"}}) state_of(p)->name = name;
    materialize_whole("model", {a, b, c}, device);
    group = state_of(a)->group;
    for (const Parameter& p : {a, b, c}) p.edit([](const Tensor& rows) { raw::fill(rows, 2); });
  }
  std::vector<float> counts() const {
    return raw::slice(group->counts(), 0, 0, 3).to_vector<float>();
  }
  // The sum over all of the flat gradient but the counts: padding must not show.
  double total() const {
    return sum(raw::slice(group->gradient, 0, 0, group->gradient_numel)).item();
  }
};

std::vector<float> values(const Tensor& x) { return x.to_vector<float>(); }

}  // namespace

TEST_CASE("a parameter is a view of its group, at a multiple of 256 bytes") {
  const Model m;
  REQUIRE(m.group->entries.size() == 3);
  CHECK(m.group->entries[1].offset == 64);
  CHECK(m.group->entries[2].offset == 128);
  CHECK(m.group->numel == 256);
  CHECK(m.b.value().data() == m.group->values.data() + 64 * 4);
  CHECK(m.a.value().shape() == Shape{2, 3});
  CHECK(m.a.value().requires_grad());
  CHECK(m.b.shard().shape() == Shape{5});
  CHECK(sum(m.group->values).item() == 2 * (6 + 5 + 70));  // padding is 0
}

TEST_CASE("gradients arrive in the group, add up over passes, and absent ones count 0") {
  const Model m;
  CHECK_FALSE(m.a.grad().defined());
  sum(m.a.value() * m.a.value()).backward();
  CHECK(values(m.a.grad()) == std::vector<float>(6, 4));
  CHECK(values(m.b.grad()) == std::vector<float>(5, 0));
  CHECK(m.counts() == std::vector<float>{1, 0, 0});
  CHECK(m.total() == 24);
  (sum(m.a.value() * 3.0) + sum(m.c.value())).backward();
  CHECK(values(m.a.grad()) == std::vector<float>(6, 7));
  CHECK(m.total() == 6 * 7 + 70);
  const std::vector<float> counts = m.counts();
  CHECK(counts[0] > 0);
  CHECK(counts[1] == 0);
  CHECK(counts[2] > 0);
}

TEST_CASE("zero_grad of a parameter's tensor is refused, and clears nothing") {
  const Model m;
  sum(m.a.value() * m.a.value()).backward();
  CHECK_THROWS_WITH(m.a.value().zero_grad(),
                    Catch::Contains("parameter 'a' shares the gradient of its flat group") &&
                        Catch::Contains("call zero_grad of its module or of an optimizer"));
  CHECK(values(m.a.grad()) == std::vector<float>(6, 4));
}

TEST_CASE("a frozen parameter has no history and no gradient") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Parameter w({3}, Initializer::constant(0)), frozen({3}, Initializer::constant(0));
  frozen.freeze();
  materialize_whole("model", {w, frozen}, device);
  const FlatGroup& group = *state_of(w)->group;
  CHECK(state_of(frozen)->group.get() == &group);
  CHECK(group.numel == 128);
  CHECK(group.gradient_numel == 64);
  CHECK_FALSE(frozen.value().requires_grad());
  sum(w.value() * frozen.value()).backward();
  CHECK(w.grad().defined());
  CHECK_FALSE(frozen.grad().defined());
}

TEST_CASE("freezing and thawing keep the gradients of the others") {
  const Model m;
  const auto loss = [&] { return sum(m.a.value() * 3.0 + sum(m.b.value()) * sum(m.c.value())); };
  loss().backward();  // dL/db = 6 sum(c), dL/dc = 6 sum(b)
  CHECK(values(m.c.grad()) == std::vector<float>(70, 60));
  m.b.set_trainable(false);
  CHECK_FALSE(m.b.grad().defined());
  m.b.set_trainable(true);
  CHECK(values(m.b.grad()) == std::vector<float>(5, 0));
  CHECK(m.counts()[1] == 0);
  m.b.set_trainable(false);
  m.a.value();
  CHECK(m.group->gradient_numel == 192);
  CHECK(values(m.a.grad()) == std::vector<float>(6, 3));
  CHECK(values(m.c.grad()) == std::vector<float>(70, 60));
  loss().backward();
  CHECK(values(m.a.grad()) == std::vector<float>(6, 6));
  CHECK(values(m.c.grad()) == std::vector<float>(70, 120));
  m.b.set_trainable(true);
  m.a.value();
  CHECK(m.counts()[1] == 0);  // and none of its own
  CHECK(m.counts()[2] > 0);
  CHECK(m.total() == 6 * 6 + 70 * 120);
  loss().backward();
  CHECK(values(m.b.grad()) == std::vector<float>(5, 840));
  CHECK(values(m.c.grad()) == std::vector<float>(70, 180));
}

TEST_CASE("a parameter is frozen and thawed between steps only") {
  const Model m;
  CHECK_THROWS_WITH(autograd::record("freezes", {m.a.value()}, raw::mul(m.a.value(), 1),
                                     [&](const Tensor&, Gradients&) { m.b.set_trainable(false); })
                        .backward(Tensor::ones({2, 3}, f32, m.device)),
                    Catch::Contains("parameter 'b' can't be frozen or thawed in a call"));
  CHECK(m.b.trainable());
  const Tensor late = sum(m.a.value() * sum(m.b.value()));
  m.a.set_trainable(false);
  m.b.value();
  CHECK_THROWS_WITH(late.backward(), Catch::Contains("parameter 'a' was frozen"));
}

TEST_CASE("after an exception in backward the next pass is whole again") {
  const Model m;
  const auto fails = [](const Tensor& x) {
    return autograd::record("fails", {x}, raw::mul(x, 1),
                            [](const Tensor&, Gradients&) { throw std::runtime_error("no luck"); });
  };
  const Tensor first = sum(fails(m.a.value()));
  const Tensor second = sum(m.b.value() * 5.0);  // newer, so it has arrived when the pass fails
  const Tensor loss = first + second;
  CHECK_THROWS_WITH(loss.backward(), "no luck");
  CHECK_FALSE(m.b.grad().defined());  // half a gradient is none
  sum(m.c.value() * 2.0).backward();
  CHECK(m.counts() == std::vector<float>{0, 0, 1});
  CHECK(m.total() == 140);
  CHECK(values(m.b.grad()) == std::vector<float>(5, 0));
}

TEST_CASE("a parameter without memory says so") {
  const Parameter p({3}, Initializer::constant(0));
  state_of(p)->name = "head.weight";
  CHECK_THROWS_WITH(p.value(), Catch::Contains("'head.weight'") && Catch::Contains("materialize"));
  CHECK_THROWS_WITH(parts_of({p}), Catch::Contains("'head.weight'"));
  CHECK_THROWS_AS(Parameter().value(), ContractError);
  const Model m;
  CHECK_THROWS_WITH(materialize_whole("again", {m.a}, m.device),
                    Catch::Contains("already has memory"));
  CHECK(parts_of({m.a, m.b}).size() == 1);
}

TEST_CASE("an undefined parameter says so, whatever is asked of it") {
  const Parameter none;
  const auto says = Catch::Contains("an undefined parameter was used");
  CHECK_THROWS_WITH(none.shape(), says);
  CHECK_THROWS_WITH(none.name(), says);
  CHECK_THROWS_WITH(none.freeze(), says);
  CHECK_THROWS_WITH(none.set_initializer(Initializer::constant(1)), says);
  CHECK_THROWS_WITH(none.shard(), says);
  CHECK_THROWS_WITH(none.grad(), says);
  CHECK_THROWS_WITH(none.edit([](const Tensor&) {}), says);
  CHECK_FALSE(none.defined());
}
