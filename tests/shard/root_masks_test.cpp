// Parameters that are frozen and thawed between steps, and optimizers that follow them into units:
// what is trained is what a model without units trains, and memory is there for what is trainable.
#include "tessera/optim/clip.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// A small language model whose table is streamed where it is sharded.
struct Talker {
  Talker(const Device& device, bool tied)
      : device_(device), model(small_llama(2, nn::Recompute::none, tied)) {}
  void shard(const World& world) {
    const ShardOptions options{
        .mesh = DeviceMesh::flat(world), .slice_bytes = 1, .piece_bytes = 1000};
    shard_parts(model, options);
  }
  void start() { nn::init(model, {5}, device_); }
  Tensor loss(int k) {
    const auto tokens = [&](int shift) {
      std::vector<std::int32_t> all;
      for (int i = 0; i < kSmallLength; ++i)
        all.push_back(static_cast<std::int32_t>((3 * i + 5 * k + shift) % kSmallWords));
      return Tensor::from(all, {1, kSmallLength}, device_);
    };
    return model.loss(tokens(0), tokens(1));
  }
  Parameter parameter(const std::string& name) const {
    for (const auto& [known, p] : model.named_parameters())
      if (known == name) return p;
    throw std::out_of_range(name);
  }
  std::int64_t live(const char* owner) const {
    return Memory::of(device_).ledger().live_bytes(owner);
  }

  Device device_;
  nn::Llama model;
};

// Every rank has the same tokens, so that one rank without units has the same gradients.
const std::vector<std::vector<std::string>> kTurns = {
    {"model.layers.0.mlp.up_proj.weight", "model.norm.weight"},
    {"model.embed_tokens.weight"},
    {"model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"},
    {"model.embed_tokens.weight"},
    {}};

// `shards_after`: so many steps are made before it is sharded; -1: it never is.
Values train_talker(const Device& device, const World* world, bool tied, int shards_after) {
  Talker talker(device, tied);
  if (world && shards_after == 0) talker.shard(*world);
  talker.start();
  optim::AdamW optimizer(talker.model.parameters(), {.lr = 0.01});
  if (tied) optimizer.prepare();  // or by the first step
  for (int k = 0; k < static_cast<int>(kTurns.size()); ++k) {
    if (world && shards_after == k && k > 0) talker.shard(*world);
    talker.loss(k).backward();
    optim::clip_grad_norm(talker.model.parameters(), 1);
    optimizer.step();
    optimizer.zero_grad();
    for (const std::string& name : kTurns[static_cast<std::size_t>(k)]) {
      const Parameter p = talker.parameter(name);
      p.set_trainable(!p.trainable());
    }
  }
  Values values;
  for (const auto& [name, p] : talker.model.named_parameters())
    values[name] = p.shard().to_vector<float>();
  return values;
}

}  // namespace

TEST_CASE(
    "what is frozen and thawed between steps trains as without units, before and after it is "
    "sharded",
    "[threads][fsdp2-097]") {
  for (const bool tied : {false, true}) {
    const Values alone = train_talker(Device::cpu({.threads = 1}), nullptr, tied, -1);
    for (const int ranks : {1, 2, 3})
      for (const int shards_after : {0, 2}) {
        INFO("tied " << tied << ", " << ranks << " ranks, sharded after " << shards_after);
        const Values together = assemble(on_ranks(
            ranks, [&](World& w) { return train_talker(w.device(), &w, tied, shards_after); }));
        // Five steps of at most 0.01 each. A gradient differs by the order of its sums, 2^-24 a
        // term, and the norm that it is divided by: for AdamW, which looks at its sign and size
        // against earlier ones, a thousandth of a step is far more.
        for (const auto& [name, values] : alone) {
          INFO(name);
          REQUIRE(together.at(name).size() == values.size());
          for (std::size_t i = 0; i < values.size(); ++i)
            CHECK(std::abs(together.at(name)[i] - values[i]) <= 5 * 0.01f * 1e-3f);
        }
      }
  }
}

TEST_CASE("frozen parameters have no gradient and no moments, from the next step on", "[threads]") {
  struct Seen {
    std::int64_t numel = 0, gradients = 0, moments = 0, moments_then = 0, gradients_then = 0,
                 moments_again = 0, arena = 0, arena_then = 0, arena_again = 0;
    bool is_kept = false, is_back = false;
  };
  const std::string name = "model.layers.1.mlp.down_proj.weight";
  for (const Seen& seen : on_ranks(2, [&](World& world) {
         Talker talker(world.device(), false);
         talker.shard(world);
         talker.start();
         optim::AdamW optimizer(talker.model.parameters());
         const Parameter p = talker.parameter(name),
                         other = talker.parameter("model.layers.1.mlp.up_proj.weight");
         const auto step = [&](int k) {
           talker.loss(k).backward();
           optimizer.step();
         };
         Seen seen;
         seen.numel = round_up(p.spec().chunk_numel(), kFlatAlign);
         step(0);
         seen.gradients = talker.live("gradients");
         seen.moments = talker.live("moments");
         seen.arena = shard_plan(talker.model).arena_bytes;
         const std::vector<float> kept = optimizer.moments(other)[0].to_vector<float>();
         p.set_trainable(false);
         optimizer.prepare();
         seen.is_kept = optimizer.moments(other)[0].to_vector<float>() == kept;
         step(1);
         seen.gradients_then = talker.live("gradients");
         seen.moments_then = talker.live("moments");
         seen.arena_then = shard_plan(talker.model).arena_bytes;
         p.set_trainable(true);
         seen.is_back = optimizer.state_dict(talker.model).contains(name + ".exp_avg");
         step(2);
         seen.moments_again = talker.live("moments");
         seen.arena_again = shard_plan(talker.model).arena_bytes;
         return seen;
       })) {
    CHECK(seen.gradients_then == seen.gradients - 4 * seen.numel);
    CHECK(seen.moments_then == seen.moments - 8 * seen.numel);
    CHECK(seen.moments_again == seen.moments);
    CHECK(seen.is_kept);
    CHECK(seen.is_back);
    CHECK(seen.arena_then <= seen.arena);
    CHECK(seen.arena_again == seen.arena);
  }
}

TEST_CASE("parameters are frozen while no forward of their root has still to go backward",
          "[threads]") {
  struct Said {
    std::string inside, waiting;
    bool goes_on = false, other_goes_on = false;
  };
  for (const Said& said : on_ranks(2, [](World& world) {
         Talker talker(world.device(), false), other(world.device(), false);
         for (Talker* const one : {&talker, &other}) {
           one->shard(world);
           one->start();
         }
         const Parameter p = talker.parameter("model.norm.weight");
         Said said;
         class Freezes : public nn::Module {
          public:
           explicit Freezes(const Parameter& p) : p(p) {}
           Tensor operator()(const Tensor& x) {
             return call([&] {
               p.set_trainable(false);
               return x;
             });
           }
           Parameter p;
         } freezes(p);
         Parameter own({2}, Initializer::constant(1));
         freezes.register_parameter("own", own);
         fully_shard(freezes, {.mesh = DeviceMesh::flat(world)});
         freezes.materialize(world.device());
         said.inside = thrown_by([&] { freezes(Tensor::ones({2}, f32, world.device())); });
         const Tensor others = other.loss(0);  // of another root: waits as it may
         {
           const Tensor loss = talker.loss(0);
           p.set_trainable(false);
           said.waiting = thrown_by([&] { talker.loss(1); });
         }
         talker.loss(1).backward();
         said.goes_on = !p.grad().defined() && talker.parameter("lm_head.weight").grad().defined();
         others.backward();
         said.other_goes_on = other.parameter("model.norm.weight").grad().defined();
         return said;
       })) {
    CHECK_THAT(said.inside, Contains("parameter 'model.norm.weight' can't be frozen or thawed in a "
                                     "call or a backward pass; do it between steps"));
    CHECK_THAT(said.waiting, Contains("parameters of '(root)' were frozen or thawed while a "
                                      "forward still waits for its backward"));
    CHECK(said.goes_on);
    CHECK(said.other_goes_on);
  }
}

TEST_CASE("gradients of micro-batches add up through a change of what is trainable", "[threads]") {
  for (const int ranks : {1, 2, 3})
    for (const bool thaws : {false, true}) {
      INFO(ranks << " ranks, thawed " << thaws);
      for (const auto& [before, after] : on_ranks(ranks, [&](World& world) {
             Talker talker(world.device(), true);
             talker.shard(world);
             talker.start();
             const Parameter p = talker.parameter("model.layers.0.mlp.up_proj.weight"),
                             other = talker.parameter("model.layers.0.mlp.down_proj.weight");
             p.set_trainable(!thaws);
             talker.loss(0).backward();
             const std::vector<float> once = other.grad().to_vector<float>();
             p.set_trainable(thaws);
             talker.loss(0).backward();
             return std::pair(once, other.grad().to_vector<float>());
           }))
        for (std::size_t i = 0; i < before.size(); ++i)
          CHECK(after[i] == 2 * before[i]);  // the same sum twice: exact
    }
}

TEST_CASE("what is frozen, cleared and thawed has no gradient left", "[threads]") {
  for (const int ranks : {1, 2})
    for (const bool is_left : on_ranks(ranks, [](World& world) {
           Talker talker(world.device(), false);
           talker.shard(world);
           talker.start();
           optim::SGD optimizer(talker.model.parameters());
           const Parameter p = talker.parameter("model.norm.weight");
           talker.loss(0).backward();
           p.set_trainable(false);
           optimizer.zero_grad();
           p.set_trainable(true);
           const std::vector<float> before = p.shard().to_vector<float>();
           optimizer.step();
           return p.shard().to_vector<float>() != before;
         }))
      CHECK_FALSE(is_left);
}

TEST_CASE("a pass that does not reach a unit leaves the gradient that it had, frozen parts or not",
          "[threads]") {
  class Branch final : public nn::Module {
   public:
    Branch() {
      register_parameter("first", first);
      register_parameter("second", second);
    }
    Tensor operator()(const Tensor& x) {
      return call([&] { return sum(x) * (sum(first.value()) + sum(second.value())); });
    }
    Parameter first{{2}, Initializer::constant(1)}, second{{40}, Initializer::constant(1)};
  };
  class Root final : public nn::Module {
   public:
    Root() {
      register_parameter("own", own);
      register_module("branch", branch);
    }
    Tensor operator()(const Tensor& x, bool uses_branch) {
      return call([&] {
        const Tensor y = branch(x), z = sum(x * own.value());
        return uses_branch ? z + y : z;
      });
    }
    Parameter own{{3}, Initializer::constant(1)};
    Branch branch;
  };
  for (const int ranks : {1, 2})
    for (const std::vector<float>& left : on_ranks(ranks, [](World& world) {
           Root root;
           const ShardOptions options{.mesh = DeviceMesh::flat(world)};
           shard_each({&root.branch, &root}, options);
           nn::init(root, {1}, world.device());
           const Tensor x = Tensor::ones({3}, f32, world.device());
           root(x, true).backward();
           root.branch.first.set_trainable(false);
           root(x, false).backward();
           return root.branch.second.grad().to_vector<float>();
         }))
      CHECK(left == std::vector<float>(left.size(), 3));
}

TEST_CASE("what was thawed is not trained by a unit that is called by itself before its root") {
  const auto said = on_ranks(2, [](World& world) {
    Stack model({4, 4, 4});
    start(model, world, 1);
    const Tensor x = rows_of(1, world.rank(), 2, 4, world.device());
    nn::Linear& layer = model.layers[0];
    layer.weight.freeze();
    mean_square(model(x)).backward();
    layer.weight.set_trainable(true);
    const std::string line = thrown_by([&] { layer(x); });
    mean_square(model(x)).backward();  // goes on, and makes room
    mean_square(layer(x)).backward();
    return std::pair(line, layer.weight.grad().defined());
  });
  for (const auto& [line, is_trained] : said) {
    CHECK_THAT(line, Contains("unit 'layers.0': parameter 'layers.0.weight' was thawed since") &&
                         Contains("call the root before the unit"));
    CHECK(is_trained);
  }
}
