// The exact order in which a host asks for gathers and reductions, in the cases in which FSDP2's
// own tests spell theirs out. Where ours differs it is by design: what is called last stays
// gathered through the turn, and nothing is gathered that backward does not read.
#include <tuple>

#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/embedding.hpp"
#include "tests/shard/submissions.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Of each of `steps` steps of rank 1 of 2: what forward(model, x), which gives a loss, submits, and
// what its backward does.
template <class Model, class F>
std::vector<SubmittedStep> passes(Model&& model, Reshard reshard, int steps, const F& forward,
                                  int prefetch_depth = 1) {
  const RaceCheck check;
  const World world = World::emulated(1, 2, check({.executor = ExecutorKind::virtual_}));
  model.shard({.mesh = DeviceMesh::flat(world),
               .reshard_after_forward = reshard,
               .prefetch_depth = prefetch_depth});
  nn::init(model, {1}, world.device());
  Submissions submitted(world.device());
  std::vector<SubmittedStep> out;
  for (int k = 0; k < steps; ++k) {
    const Tensor loss = forward(model, rows_of(1, 0, 2, 4, world.device()));
    SubmittedStep pass{submitted.take(), {}};
    loss.backward();
    pass.backward = submitted.take();
    out.push_back(pass);
  }
  return out;
}
const std::vector<std::int64_t> kThree{4, 4, 4, 4};  // three layers
const auto kOneForward = [](auto& model, const Tensor& x) { return mean_square(model(x)); };
const auto kTwoForwards = [](auto& model, const Tensor& x) {
  return mean_square(model(x)) + mean_square(model(x));
};

// A table, a layer, and two lists of two layers, of which the last need not be used.
class Groups final : public nn::Module {
 public:
  explicit Groups(std::size_t of_layers) : used(of_layers) {
    for (int i = 0; i < 5; ++i) layers.emplace_back(4, 4);
    register_modules("table", table, "layers", layers);
  }
  Tensor operator()(const Tensor&) {
    return call([&] {
      Tensor h = table(Tensor::zeros({2}, i64, table.weight.shard().device()));
      for (std::size_t i = 0; i < used; ++i) h = tanh(layers[i](h));
      return h;
    });
  }
  void shard(const ShardOptions& options) {
    ShardOptions keeps = options;
    keeps.reshard_after_forward = Reshard::never;
    shard_each({&table, &layers[0]}, options);
    fully_shard({&layers[1], &layers[2]}, options);
    fully_shard({&layers[3], &layers[4]}, keeps);
    fully_shard(*this, options);
  }
  std::size_t used;
  nn::Embedding table{6, 4};
  nn::ModuleList<nn::Linear> layers;
};

// Another policy for the root than for its layers.
class TwoPolicies final : public Stack {
 public:
  explicit TwoPolicies(Reshard of_root) : Stack({4, 4, 4, 4}), root(of_root) {}
  void shard(ShardOptions options) {
    for (nn::Linear& layer : layers) fully_shard(layer, options);
    options.reshard_after_forward = root;
    fully_shard(*this, options);
  }
  Reshard root;
};

}  // namespace

TEST_CASE("gathers come in the order of calls, and backward goes back along it, in every step",
          "[fsdp2-060]") {
  const std::pair<Reshard, SubmittedStep> table[] = {
      {Reshard::automatic, {"root 0 1 2", "1 -2 0 -1 -0 -root"}},
      {Reshard::always, {"root 0 1 2", "2 root 1 -2 0 -1 -0 -root"}},
      {Reshard::never, {"root 0 1 2", "-2 -1 -0 -root"}}};
  for (const auto& [reshard, pass] : table) {
    CHECK(passes(Stack(kThree), reshard, 3, kOneForward) == std::vector<SubmittedStep>(3, pass));
    Stack again(kThree);
    again.recomputes = true;
    CHECK(passes(again, reshard, 3, kOneForward) == std::vector<SubmittedStep>(3, pass));
  }
}

TEST_CASE("a second forward gathers what is closed, and one backward goes back along both",
          "[fsdp2-061]") {
  const std::string back = "2 root 1 -2 0 -1 -0 -root";
  CHECK(passes(Stack(kThree), Reshard::always, 2, kTwoForwards) ==
        std::vector<SubmittedStep>(2, {"root 0 1 2 root 0 1 2", back + " " + back}));
  // What the first half has closed is gathered for the second.
  CHECK(passes(Stack(kThree), Reshard::never, 2, kTwoForwards) ==
        std::vector<SubmittedStep>(2, {"root 0 1 2", "-2 -1 -0 -root root 2 -2 1 -1 0 -0 -root"}));
  // The root stays, and 2 behind one of the forwards, by the plan that the first one follows.
  const std::string rest = "1 -2 0 -1 -0 -root 2 root 1 -2 0 -1 -0 -root";
  for (const SubmittedStep& pass : passes(Stack(kThree), Reshard::automatic, 6, kTwoForwards)) {
    const bool stays_first = pass.backward == "2 " + rest;
    CHECK((stays_first || pass.backward == rest));
    CHECK(pass.forward == (stays_first ? "root 0 1 2 0 1" : "root 0 1 2 0 1 2"));
  }
}

// The second first, with the graph retained: each pass goes back along all that was called.
TEST_CASE("branches that go backward one by one are gathered and reduced by each pass",
          "[fsdp2-062]") {
  const auto branches = [](auto& model, const Tensor& x) {
    const std::vector<Tensor> y =
        model.call([&] { return std::vector<Tensor>{model.layers[0](x), model.layers[1](x)}; });
    mean_square(y[1]).backward({}, true);
    return mean_square(y[0]);
  };
  const std::tuple<Reshard, const char*, const char*> table[] = {
      {Reshard::always, "1 root 0 -1 -0 -root", "1 root 0 -1 -0 -root"},
      {Reshard::automatic, "0 -1 -0 -root", "1 root 0 -1 -0 -root"},
      {Reshard::never, "-1 -0 -root", "root 1 -1 0 -0 -root"}};
  for (const auto& [reshard, second, first] : table)
    CHECK(passes(Stack({4, 4, 4}), reshard, 2, branches) ==
          std::vector<SubmittedStep>(2, {concat("root 0 1 ", second), first}));
}

TEST_CASE("backward asks for as many gathers ahead as prefetch_depth, and forward for none",
          "[fsdp2-063][fsdp2-064]") {
  const char* const backward[] = {"2 -3 1 -2 0 -1 -0 -root", "2 1 -3 0 -2 -1 -0 -root",
                                  "2 1 0 -3 -2 -1 -0 -root"};
  for (const int depth : {1, 2, 3})
    CHECK(passes(Stack({4, 4, 4, 4, 4}), Reshard::automatic, 2, kOneForward, depth) ==
          std::vector<SubmittedStep>(2, {"root 0 1 2 3", backward[depth - 1]}));
}

TEST_CASE("a unit inside a block that runs again is gathered where it would be without that",
          "[fsdp2-065]") {
  const std::pair<Reshard, const char*> table[] = {
      {Reshard::automatic, "1.inner 0 -1.inner -1 0.inner -0.inner -0"},
      {Reshard::always, "1 1.inner 0 -1.inner -1 0.inner -0.inner -0"},
      {Reshard::never, "-1.inner -1 -0.inner -0"}};
  for (const auto& [reshard, backward] : table)
    for (const bool recomputes : {false, true})
      CHECK(passes(NestedBlocks(2, 4, recomputes), reshard, 2, kOneForward) ==
            std::vector<SubmittedStep>(2, {"0 0.inner 1 1.inner", backward}));
}

TEST_CASE("lists of layers are gathered and reduced as one, also where one is not used",
          "[fsdp2-066][fsdp2-067]") {
  for (const std::size_t used : {5, 4})
    for (const Reshard reshard : {Reshard::automatic, Reshard::always})
      CHECK(passes(Groups(used), reshard, 2, kOneForward) ==
            std::vector<SubmittedStep>(
                2, {"table.weight[0] 0 1,2 3,4", "1,2 -3,4 0 -1,2 -0 -table.weight[0]"}));
}

TEST_CASE("root and blocks may differ in whether they are gathered for backward", "[fsdp2-071]") {
  struct Row {
    Reshard blocks, root;
    const char* backward;
  };
  const Row table[] = {{Reshard::always, Reshard::never, "2 1 -2 0 -1 -0 -root"},
                       {Reshard::always, Reshard::automatic, "2 1 -2 0 -1 -0 -root"},
                       {Reshard::automatic, Reshard::always, "root 1 -2 0 -1 -0 -root"},
                       {Reshard::never, Reshard::always, "root -2 -1 -0 -root"},
                       {Reshard::never, Reshard::automatic, "-2 -1 -0 -root"}};
  for (const Row& row : table)
    CHECK(passes(TwoPolicies(row.root), row.blocks, 2, kOneForward) ==
          std::vector<SubmittedStep>(2, {"root 0 1 2", row.backward}));
}
