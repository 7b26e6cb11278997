// Parameters that stack several: Muon sees these. Gradients are rank 0's, and divided by nothing,
// so that any number of ranks has the bits of one.
#include "tessera/param/row_parts.hpp"

#include "tessera/distributed/state.hpp"
#include "tessera/optim/muon.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// 12 rows that start as 0.5: one matrix of parts of 5 and 7, or two.
struct Stack12 : nn::Module {
  explicit Stack12(bool is_stacked) {
    const std::vector<std::int64_t> sizes =
        is_stacked ? std::vector<std::int64_t>{12} : std::vector<std::int64_t>{5, 7};
    for (const std::int64_t rows : sizes) {
      items.emplace_back(Shape{rows, 3}, Initializer::constant(0.5));
      register_parameter("w" + std::to_string(items.size()), items.back());
    }
    if (is_stacked) items[0].set_row_parts({{"a", 5}, {"b", 7}});
  }
  // The sum of all elements times those of `g` [12, 3].
  Tensor operator()(const Tensor& g) {
    return call([&] {
      Tensor total;
      std::int64_t first = 0;
      for (const Parameter& p : items) {
        const std::int64_t end = first + p.shape()[0];
        const Tensor part = sum(p.value() * raw::slice(g, 0, first, end));
        total = total.defined() ? total + part : part;
        first = end;
      }
      return total;
    });
  }
  std::vector<Parameter> items;
};

std::vector<float> train(const World& world, bool is_stacked, std::uint64_t seed,
                         optim::MuonRate adjust_lr, int dim = 0) {
  Stack12 model(is_stacked);
  fully_shard(model, {.mesh = DeviceMesh::flat(world),
                      .shard_placement_fn = [&](const Parameter&) { return Shard{dim}; }});
  set_gradient_divide_factor(model, 1);
  nn::init(model, {seed}, world.device());
  optim::Muon optimizer(model.items, {}, {.lr = 0.05, .adjust_lr = adjust_lr});
  for (std::uint64_t k = 0; k < 3; ++k) {
    const double deviation = world.rank() == 0 ? 1 : 0;
    model(Tensor::normal({12, 3}, 0, deviation, seed + k, f32, world.device())).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<float> values;
  for_each_full(model.state_dict({.form = StateForm::view}),
                [&](const std::string&, const Tensor& whole) {
                  for (const float v : whole.to_vector<float>()) values.push_back(v);
                });
  return values;
}

}  // namespace

TEST_CASE("the row parts of a matrix are orthogonalised each alone, on any number of ranks",
          "[threads]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  for (const auto adjust_lr : {optim::MuonRate::original, optim::MuonRate::match_rms_adamw}) {
    const auto of = [&](int ranks, bool is_stacked) {
      return on_ranks(ranks,
                      [&](World& world) { return train(world, is_stacked, seed, adjust_lr); });
    };
    const std::vector<float> apart = of(1, false)[0];
    CHECK(apart[0] != 0.5f);
    for (const int ranks : {1, 2, 3, 4}) {
      INFO(ranks << " ranks");
      for (const std::vector<float>& values : of(ranks, true)) CHECK(values == apart);
    }
  }
  on_ranks(3, [&](World& world) {
    CHECK_THROWS_WITH(train(world, true, seed, optim::MuonRate::original, 1),
                      Catch::Contains("stacks 2 matrices and is cut along dimension 1"));
    return 0;
  });
}
