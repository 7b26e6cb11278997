// Gradients that backward was told not to reduce yet: what would lack them is refused, and who
// drops them.
#include <initializer_list>
#include <tuple>

#include "tessera/nn/embedding.hpp"
#include "tessera/optim/clip.hpp"
#include "tessera/optim/grad_scaler.hpp"
#include "tests/shard/micro_batches.hpp"
#include "tests/support/accumulation.hpp"
#include "tests/support/mesh.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// A model of two ranks, or of two replicas, whose last backward has kept its gradients.
struct Unreduced {
  Unreduced(World& world, Accumulation way)
      : model({5, 7, 3}), optimizer(parameters(world), {.lr = 0.1}) {
    begin_micro_batch(model, way, false);
    backward(world);
    begin_micro_batch(model, way, true);
  }
  void backward(const World& world) {
    mean_square(model(positive_rows(3, world.rank(), 1, 5, world.device()))).backward();
  }
  std::vector<Parameter> parameters(const World& world) {
    make_positive(model);
    model.shard({.mesh = mesh_of(world, 2)});
    nn::init(model, {11}, world.device());
    return model.parameters();
  }
  Stack model;
  optim::SGD optimizer;
};

}  // namespace

TEST_CASE("a step and a norm are refused while gradients are kept unreduced", "[threads]") {
  for (const auto& [ranks, way] :
       {std::pair(3, Accumulation::unsharded), {4, Accumulation::in_replicas}}) {
    const auto found = on_ranks(ranks, [&, way = way](World& world) {
      Unreduced kept(world, way);
      Stack& model = kept.model;
      optim::GradScaler scaler(world.device());
      std::vector<std::string> messages;
      for (const auto& f :
           std::vector<std::function<void()>>{[&] { kept.optimizer.step(); },
                                              [&] { optim::clip_grad_norm(model.parameters(), 1); },
                                              [&] { scaler.unscale(kept.optimizer); }})
        messages.push_back(thrown_by(f));
      // Of other parameters nothing is kept once theirs was dropped.
      optim::SGD of_one(model.layers[0].parameters(), {.lr = 0.1});
      of_one.zero_grad();
      messages.push_back(thrown_by([&] { of_one.step(); }));
      messages.push_back(thrown_by([&] { kept.optimizer.step(); }));
      kept.backward(world);
      messages.push_back(thrown_by([&] { kept.optimizer.step(); }));
      return messages;
    });
    for (const auto& messages : found) {
      CAPTURE(ranks);
      const char* const functions[] = {"step: ", "clip_grad_norm: ", "GradScaler::unscale: "};
      for (std::size_t i = 0; i < 3; ++i)
        CHECK_THAT(messages[i], Contains(functions[i]) && Contains("unit '(root)'") &&
                                    Contains("'scale'") && Contains("set_requires_gradient_sync") &&
                                    Contains("zero_grad"));
      CHECK(messages[3].empty());
      CHECK_THAT(messages[4], Contains("unit '(root)'"));
      CHECK(messages[5].empty());
    }
  }
}

TEST_CASE("zero_grad drops what was kept of its parameters, and of no others", "[threads]") {
  for (const auto& [ranks, way] :
       {std::pair(3, Accumulation::unsharded), {4, Accumulation::in_replicas}}) {
    struct Result {
      Values kept, dropped, fresh, both;
      std::int64_t bytes = 0;
    };
    const auto found = on_ranks(ranks, [&, way = way](World& world) {
      const auto gradients = [&](const std::function<void(Unreduced&)>& before) {
        Unreduced kept(world, way);
        before(kept);
        const std::int64_t bytes = unreduced_bytes(world.device());
        kept.backward(world);
        return std::pair(shard_gradients(kept.model), bytes);
      };
      Result result;
      result.both = gradients([](Unreduced&) {}).first;
      std::tie(result.fresh, result.bytes) =
          gradients([](Unreduced& kept) { kept.optimizer.zero_grad(); });
      // All weights, not their biases.
      result.dropped = gradients([](Unreduced& kept) {
                         std::vector<Parameter> weights;
                         for (nn::Linear& layer : kept.model.layers)
                           weights.push_back(layer.weight);
                         optim::SGD(weights, {.lr = 0.1}).zero_grad();
                       }).first;
      return result;
    });
    for (const Result& r : found) {
      CAPTURE(ranks);
      CHECK(r.bytes == 0);
      for (const auto& [name, once] : r.fresh) {
        // The same rows twice: the kept ones are exactly as much again.
        std::vector<float> twice = once;
        for (float& g : twice) g *= 2;
        CHECK(same_bits(r.both.at(name), twice));
        const bool is_weight = name.ends_with("weight");
        CHECK(same_bits(r.dropped.at(name), is_weight ? once : twice));
      }
    }
  }
}

TEST_CASE("a reset drops what was kept, and a pass that fails what it has touched", "[threads]") {
  for (const auto& [ranks, way] :
       {std::pair(2, Accumulation::unsharded), {4, Accumulation::in_replicas}}) {
    const auto found = on_ranks(ranks, [&, way = way](World& world) {
      std::vector<Values> gradients;
      for (const bool resets : {false, true}) {
        Unreduced kept(world, way);
        if (resets) {
          world.device().synchronize();
          world.barrier();  // a reset ends what peers still wait for
          reset(kept.model);
        } else {
          kept.optimizer.zero_grad();
        }
        kept.backward(world);
        gradients.push_back(shard_gradients(kept.model));
      }
      // Unreduced gradients of a pass that ends in an exception, on all ranks.
      Unreduced kept(world, way);
      begin_micro_batch(kept.model, way, false);
      const Tensor x = positive_rows(3, world.rank(), 1, 5, world.device());
      const Tensor y = kept.model.call([&] {
        const Tensor h = tanh(kept.model.layers[0](x));
        const Tensor breaks = autograd::record(
            "breaks", {h}, h.detach(),
            [](const Tensor&, autograd::Gradients&) { throw std::runtime_error("in backward"); });
        return kept.model.layers[1](breaks) * kept.model.scale.value();
      });
      try {
        mean_square(y).backward();
      } catch (const std::runtime_error&) {
        world.device().synchronize();
      }
      begin_micro_batch(kept.model, way, true);
      kept.optimizer.zero_grad();
      kept.backward(world);
      gradients.push_back(shard_gradients(kept.model));
      return gradients;
    });
    for (const auto& gradients : found) {
      CAPTURE(ranks);
      CHECK(same_bits(gradients[0], gradients[1]));
      CHECK(same_bits(gradients[0], gradients[2]));
    }
  }
}

TEST_CASE("a parameter that is frozen loses what was kept of it, and others keep theirs",
          "[threads]") {
  for (const auto& [ranks, way] :
       {std::pair(3, Accumulation::unsharded), {4, Accumulation::in_replicas}}) {
    struct Result {
      Values once, frozen, thawed;
      std::int64_t bytes = 0;
    };
    const auto found = on_ranks(ranks, [&, way = way](World& world) {
      Result result;
      Unreduced fresh(world, way);
      fresh.optimizer.zero_grad();
      fresh.backward(world);
      result.once = shard_gradients(fresh.model);
      for (const bool thaws : {false, true}) {
        Unreduced kept(world, way);
        Parameter& weight = kept.model.layers[0].weight;
        weight.freeze();
        if (thaws) weight.set_trainable(true);
        kept.backward(world);
        (thaws ? result.thawed : result.frozen) = shard_gradients(kept.model);
        kept.optimizer.step();
      }
      result.bytes = unreduced_bytes(world.device());
      return result;
    });
    for (const Result& r : found) {
      CAPTURE(ranks);
      CHECK(r.bytes == 0);
      CHECK(!r.frozen.contains("layers.0.weight"));
      for (const auto& [name, once] : r.once) {
        std::vector<float> twice = once;  // the same rows twice: exactly as much again
        for (float& g : twice) g *= 2;
        const bool was_frozen = name == "layers.0.weight";
        if (!was_frozen) CHECK(same_bits(r.frozen.at(name), twice));
        CHECK(same_bits(r.thawed.at(name), was_frozen ? once : twice));
      }
    }
  }
}

// Its forward is one that nothing goes back along any more, so that a pass of any root does.
TEST_CASE("a pass of another root keeps nothing of a parameter that was frozen since forward",
          "[threads]") {
  const bool trains = GENERATE(false, true);
  CAPTURE(trains);
  const auto found = on_ranks(2, [&](World& world) {
    nn::Linear first(5, 4), second(5, 4);
    const auto loss = [&](nn::Linear& of) {
      return mean_square(of(rows_of(1, world.rank(), 1, 5, world.device())));
    };
    for (nn::Linear* const root : {&first, &second}) {
      fully_shard(*root, {.mesh = DeviceMesh::flat(world)});
      nn::init(*root, {1}, world.device());
    }
    optim::SGD of_first(first.parameters()), of_second(second.parameters());
    {
      const Tensor dropped = loss(second);
      loss(second).backward();
    }
    of_second.zero_grad();
    second.bias.freeze();
    set_requires_gradient_sync(second, false);
    loss(first).backward();
    set_requires_gradient_sync(second, true);
    of_first.zero_grad();
    of_second.zero_grad();
    const std::int64_t kept = unreduced_bytes(world.device());
    const std::string heard = thrown_by([&] {
      second.bias.set_trainable(!trains);
      loss(second).backward();
      of_second.step();
    });
    return std::tuple(kept, heard, second.bias.grad().defined());
  });
  for (const auto& [kept, heard, has_gradient] : found) {
    CHECK(kept == 0);
    CHECK(heard.empty());
    CHECK(has_gradient != trains);
  }
}

namespace {

// A part that some micro-batches alone call, with a table that they stream.
class Optional final : public nn::Module {
 public:
  Optional() : always(4, 4), part(4, 4), table(16, 4) {
    register_modules("always", always, "part", part, "table", table);
    make_positive(*this);
  }
  Tensor operator()(const Tensor& x, bool with_part) {
    return call([&] {
      const Tensor h = tanh(always(x));
      if (!with_part) return h;
      const Tensor words = Tensor::from(std::vector<std::int32_t>{1, 2, 2}, {3}, x.device());
      return h + part(h) + table(words);
    });
  }
  nn::Linear always, part;
  nn::Embedding table;
};

}  // namespace

TEST_CASE("what micro-batches have kept is reduced by the last one, which calls other units",
          "[threads]") {
  const auto run = [](int ranks, Accumulation way, bool slices_wait, bool is_other_root) {
    return assemble(on_ranks(ranks, [&](World& world) {
      Optional model;
      nn::Linear other(4, 4);
      make_positive(other);
      const ShardOptions options{
          .mesh = mesh_of(world, 2), .slice_bytes = 1, .slices_wait = slices_wait};
      if (ranks > 1) shard_each({&model.part, &model.table, &model, &other}, options);
      nn::init(model, {3}, world.device());
      nn::init(other, {4}, world.device());
      optim::SGD optimizer(model.parameters(), {.lr = 0.1});
      for (const bool is_last : {false, true})
        for (int rank = 0; rank < 4; ++rank) {
          if (ranks > 1 && rank != world.rank()) continue;
          if (ranks > 1) begin_micro_batch(model, way, is_last);
          const Tensor x = positive_rows(7, rank * 6 + (is_last ? 3 : 0), 3, 4, world.device());
          const Tensor y = is_last && is_other_root ? other(x) : model(x, !is_last);
          (mean_square(y) / (ranks > 1 ? 1 : 4)).backward();
        }
      Values gradients = shard_gradients(model);
      optimizer.step();
      if (ranks > 1) gradients["left"] = {static_cast<float>(unreduced_bytes(world.device()))};
      return gradients;
    }));
  };
  for (const bool is_other_root : {false, true}) {
    const Values expected = run(1, Accumulation::reduced, false, is_other_root);
    for (const Accumulation way : {Accumulation::unsharded, Accumulation::in_replicas})
      for (const bool slices_wait : {false, true}) {
        CAPTURE(is_other_root, static_cast<int>(way), slices_wait);
        // Of two replicas both have each row; a gradient that one rank has none of is left out.
        Values found = run(4, way, slices_wait, is_other_root);
        CHECK(found.at("left") == std::vector<float>(4));
        found.erase("left");
        for (auto& [name, rows] : found) rows.resize(rows.size() / 2);
        CHECK(distance(expected, found) < kRounding);
      }
  }
}

TEST_CASE("kept gradients of a model that is gone hold up no optimizer", "[threads]") {
  const auto found = on_ranks(2, [](World& world) {
    auto kept = std::make_unique<Unreduced>(world, Accumulation::unsharded);
    optim::SGD optimizer(kept->model.parameters(), {.lr = 0.1});
    kept = nullptr;
    return thrown_by([&] { optimizer.step(); });
  });
  for (const std::string& message : found) CHECK(message.empty());
}

TEST_CASE("slices wait for a backward that reduces where options say so", "[threads]") {
  struct Table final : nn::Module {
    Table() : weight({13, 8}, Initializer::normal(0, 1)) {
      register_parameter("weight", weight);
      stream_parameter(weight);
    }
    // Each slice by itself is squared; no row is used twice.
    Tensor operator()() {
      return call([&] {
        Tensor total;
        weight.for_each_slice([&](const Tensor& slice, const SliceRows&) {
          const Tensor part = sum(slice * slice);
          total = total.defined() ? total + part : part;
        });
        return total;
      });
    }
    Parameter weight;
  };
  for (const auto& [ranks, way] :
       {std::pair(3, Accumulation::unsharded), {4, Accumulation::in_replicas}})
    for (const bool wait : {false, true}) {
      struct Seen {
        std::uint64_t reductions_of_first = 0;
        std::int64_t held = 0, planned = 0, after_drop = 0, after_last = 0;
        std::string refused;
        std::vector<float> weight, gradient;
      };
      const auto found = on_ranks(ranks, [&, way = way](World& world) {
        Table table;
        fully_shard(table, {.mesh = mesh_of(world, 2), .slice_bytes = 1, .slices_wait = wait});
        nn::init(table, {4}, world.device());
        optim::SGD optimizer(table.parameters(), {.lr = 0.1});
        const auto backward = [&](bool is_last) {
          begin_micro_batch(table, way, is_last);
          table().backward();
        };
        const auto held = [&] { return unreduced_bytes(world.device()); };
        Seen seen;
        const ShardPlan plan = shard_plan(table);
        for (const ShardPlan::Unit& unit : plan.units)
          seen.planned += way == Accumulation::unsharded ? unit.unsharded_gradient_bytes
                                                         : unit.postponed_sum_bytes;
        backward(false);
        seen.reductions_of_first =
            shard_counters(table).all_reduces +
            (way == Accumulation::unsharded ? shard_counters(table).reductions : 0);
        seen.held = held();
        seen.refused = thrown_by([&] { optimizer.step(); });
        optimizer.zero_grad();
        seen.after_drop = held();
        backward(false);
        backward(true);
        seen.after_last = held();
        seen.gradient = table.weight.grad().to_vector<float>();
        seen.weight = table.weight.shard().to_vector<float>();
        optimizer.step();
        return seen;
      });
      for (const Seen& seen : found) {
        INFO(ranks << " ranks, slices wait " << wait);
        CHECK((seen.reductions_of_first == 0) == wait);
        CHECK((seen.held > 0) == wait);
        CHECK(seen.held == seen.planned);
        CHECK(seen.refused.empty() != wait);
        CHECK(seen.after_drop == 0);
        CHECK(seen.after_last == 0);
        // Each of two passes gives 2 w on every rank: exact, but for the division by the ranks.
        REQUIRE(seen.gradient.size() == seen.weight.size());
        for (std::size_t i = 0; i < seen.weight.size(); ++i)
          CHECK(std::abs(seen.gradient[i] - 4 * seen.weight[i]) <=
                8 * 0x1p-24f * std::abs(4 * seen.weight[i]));
      }
    }
}
