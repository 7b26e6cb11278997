// Two optimizers over one unit, and a norm of some of its parameters: each acts on exactly those
// that it was given, as it does without shards.
#include "tessera/optim/clip.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Every second parameter has AdamW and a norm of its own; the others have SGD, and gradients that
// two steps add up. Positive rows and weights keep sums away from zero.
Values train_shares(const World& world, int shares) {
  Stack stack{{4, 5, 3}};
  stack.shard({.mesh = DeviceMesh::flat(world), .piece_bytes = 64});
  nn::init(stack, {3}, world.device());
  std::vector<Parameter> some, others;
  for (const Parameter& p : stack.parameters())
    (some.size() > others.size() ? others : some).push_back(p);
  optim::AdamW first(some, {.lr = 0.01});
  optim::SGD second(others, {.lr = 0.05, .momentum = 0.5});
  for (std::uint64_t k = 0; k < 4; ++k) {
    const int rows = 6 / shares;
    const Tensor x = positive_rows(k, rows * world.rank(), rows, 4, world.device());
    mean_square(stack(x)).backward();
    optim::clip_grad_norm(some, 0.01);
    first.step();
    first.zero_grad();
    if (k % 2 == 0) continue;
    second.step();
    second.zero_grad();
  }
  return full_values(stack);
}

}  // namespace

// Sums of a few dozen terms in another order, 2^-24 each; an update follows its gradient with a
// slope of at most lr / eps of AdamW where that is tiny, which these are not, so that four steps
// keep 1e-5.
TEST_CASE("optimizers and norms of some parameters of a unit leave the others alone", "[threads]") {
  const Values one = on_ranks(1, [](World& world) { return train_shares(world, 1); })[0];
  for (const int ranks : {2, 3}) {
    INFO(ranks << " ranks");
    const auto all = on_ranks(ranks, [&](World& world) { return train_shares(world, ranks); });
    CHECK(same_bits(all[0], all[1]));
    CHECK(distance(one, all[0]) < 1e-5);
  }
}
