// Steps of optimizers that ranks make, leave out, set or load otherwise are told to every rank.
#include "tessera/optim/muon.hpp"
#include "tests/shard/heard.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("a step of the optimizer that one rank leaves out, or makes twice, is told to every rank",
          "[threads]") {
  const int odd_steps = GENERATE(0, 2);
  const auto heard = heard_of_models(1, [&](auto& models, World& world, const Tensor& x) {
    optim::SGD optimizer(models.parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      mean_square(models[0](x)).backward();
      for (int i = 0; i < (step == 1 && world.rank() == 1 ? odd_steps : 1); ++i) optimizer.step();
      optimizer.zero_grad();
    }
  });
  for (const std::string& said : heard)
    CHECK_THAT(said, Contains("all_gather (root)") && Contains("steps: 2)") &&
                         Contains(concat("steps: ", 1 + odd_steps, ')')) &&
                         Contains("; the ranks differ in steps of an optimizer or of the model"));
}

TEST_CASE("steps of two optimizers of one unit that each rank makes with another one are told",
          "[threads]") {
  const auto heard = heard_of_models(1, [&](auto& models, World& world, const Tensor& x) {
    optim::SGD first({models[0].scale}, {.lr = 0.1}), last({models[0].offset}, {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      mean_square(models[0](x)).backward();
      if (step != 1 || world.rank() == 0) first.step();
      if (step != 1 || world.rank() == 1) last.step();
      first.zero_grad();
      last.zero_grad();
    }
  });
  for (const std::string& said : heard)
    CHECK_THAT(said, Contains("; the ranks differ in steps of an optimizer or of the model"));
}

namespace {

// What rank 1 alone does to an optimizer after two steps of all.
struct OfOneRank {
  const char* what;
  std::function<void(Stack&, optim::AdamW&, World&)> act;
};

std::ostream& operator<<(std::ostream& out, const OfOneRank& alone) { return out << alone.what; }

std::vector<std::string> heard_after(const OfOneRank& alone) {
  return heard_of_models(1, [&](auto& models, World& world, const Tensor& x) {
    Stack& model = models[0];
    optim::AdamW optimizer(model.parameters(), {.lr = 0.1});
    for (int step = 0; step < 4; ++step) {
      mean_square(model(x)).backward();
      optimizer.step_if(sum(x) > (step == 1 ? INFINITY : -INFINITY));
      optimizer.zero_grad();
      if (step == 1 && world.rank() == 1) alone.act(model, optimizer, world);
    }
  });
}

}  // namespace

TEST_CASE("a number of the step that one rank alone sets, loads or makes is told to every rank",
          "[threads]") {
  const OfOneRank alone =
      GENERATE(OfOneRank{"steps without gradients", [](auto&, auto& o, auto&) { o.step(); }},
               OfOneRank{"sets", [](auto&, auto& o, auto&) { o.set_steps(10); }},
               OfOneRank{"loads",
                         [](auto& m, auto& o, auto& world) {
                           StateDict state = o.state_dict(m);
                           state.at("steps").values =
                               Tensor::from(std::vector<std::int64_t>{10}, {}, world.device());
                           o.load(m, state);
                         }},
               OfOneRank{"adds", [](auto& m, auto&, auto&) {
                           optim::AdamW another({m.layers[0].bias}, {.lr = 0.1});
                           another.step();
                         }});
  INFO(alone);
  for (const std::string& said : heard_after(alone))
    CHECK_THAT(said, Contains("steps: ") &&
                         Contains("; the ranks differ in steps of an optimizer or of the model; "
                                  "every rank must make, set and load the same steps"));
}

TEST_CASE("a number of the step that one rank alone reads, or sets to what it is, is told to none",
          "[threads]") {
  const OfOneRank alone = GENERATE(
      OfOneRank{"asks which of them count", [](auto&, auto& o, auto&) { CHECK(o.steps() == 1); }},
      OfOneRank{"sets", [](auto&, auto& o, auto&) { o.set_steps(1); }},
      OfOneRank{"reads, and loads that",
                [](auto& m, auto& o, auto&) { o.load(m, o.state_dict(m)); }});
  INFO(alone);
  for (const std::string& said : heard_after(alone)) CHECK(said == "");
}

TEST_CASE("a step that one rank alone makes behind the last collective fails the run") {
  const auto run = [] {
    run_local(2, {.threads = 1}, [](World& world) {
      Stack model({5, 7, 5});
      start(model, world, 5);
      optim::SGD optimizer(model.parameters(), {.lr = 0.1});
      mean_square(model(rows_of(1, 0, 2, 5, world.device()))).backward();
      optimizer.step();
      if (world.rank() == 1) optimizer.step();
    });
  };
  CHECK_THROWS_WITH(run(),
                    Contains("optimizers of 'world' have made 3 on one rank and 6 on another"));
}

TEST_CASE("a helper that one rank alone calls is told by its name") {
  for (const std::string& said : heard_of_models(1, [](auto& models, World& world, const Tensor&) {
         if (world.rank() == 0)
           for_each_full_parameter(models[0], [](const auto&, const Tensor&) {});
         else
           world.sum(1);
       }))
    CHECK_THAT(said, Contains("'compare steps for for_each_full_parameter'") && Contains("'sum'"));
}

TEST_CASE("a step before the first backward that one rank alone makes is told to every rank") {
  for (const std::string& said :
       heard_of_models(1, [&](auto& models, World& world, const Tensor& x) {
         optim::SGD optimizer(models[0].parameters(), {.lr = 0.1});
         if (world.rank() == 0) optimizer.step();
         mean_square(models[0](x)).backward();
       }))
    CHECK_THAT(said, Contains("the ranks differ in steps"));
}

TEST_CASE("matrices that one rank gives Muon in another order are told to every rank") {
  for (const std::string& said : on_ranks(2, [](World& world) {
         Stack model({5, 5, 5});
         start(model, world, 5);
         const Parameter &first = model.layers[0].weight, &second = model.layers[1].weight;
         optim::Muon optimizer(
             world.rank() == 0 ? std::vector{first, second} : std::vector{second, first},
             {model.layers[0].bias, model.layers[1].bias});
         mean_square(model(rows_of(1, 0, 2, 5, world.device()))).backward();
         return thrown_by([&] { optimizer.step(); });
       }))
    CHECK_THAT(said, Contains("Muon: the ranks have different matrices; this one has 2") &&
                         Contains("'layers.0.weight'") &&
                         Contains("give every rank the same, in the same order"));
}
