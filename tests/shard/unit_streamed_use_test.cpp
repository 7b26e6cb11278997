// Who may use a parameter that is there one slice at a time, and what it is without rows.
#include <string>
#include <vector>

#include "tessera/memory/memory.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;
using Catch::Matchers::EndsWith;

namespace {

// x W^T, slice by slice; W [rows, 4].
class Projection : public nn::Module {
 public:
  explicit Projection(std::int64_t rows) : weight({rows, 4}, Initializer::normal(0, 1)) {
    register_parameter("weight", weight);
    stream_parameter(weight);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      SlicedLinear y(x);
      weight.for_each_slice([&](const Tensor& s, const SliceRows& rows) { y.add(s, rows); });
      return y.finish();
    });
  }
  Parameter weight;
};

}  // namespace

TEST_CASE("a streamed parameter is no tensor, and says so", "[threads]") {
  struct Said {
    std::string before, slices, after;
  };
  for (const Said& said : on_ranks(2, [](World& world) {
         nn::Gpt2 model(
             {.dim = 8, .n_layers = 1, .n_heads = 2, .vocab_size = 29, .max_seq_len = 8});
         fully_shard(model, {.mesh = DeviceMesh::flat(world), .slice_bytes = 64});
         nn::init(model, {1}, world.device());
         const Parameter& table = model.embedding.weight;
         Said result;
         result.before = thrown_by([&] { table.value(); });
         result.slices =
             thrown_by([&] { table.for_each_slice([](const Tensor&, const SliceRows&) {}); });
         shard_plan(model);
         result.after = thrown_by([&] { table.value(); });
         return result;
       }))
    for (const std::string& message : {said.before, said.slices, said.after})
      CHECK_THAT(message,
                 Contains("'transformer.wte.weight' of unit") && Contains("is streamed") &&
                     Contains("call the root first") &&
                     Contains("in a module that streams it: 'transformer.wte', 'lm_head'"));
}

TEST_CASE("reshard closes the slices that a call has left open", "[threads]") {
  struct Seen {
    std::uint64_t first, again, after;  // gathers of a call
    std::int64_t open, closed;          // bytes of slots
  };
  for (const Seen& seen : on_ranks(2, [](World& world) {
         Projection model(8);
         fully_shard(model, {.mesh = DeviceMesh::flat(world),
                             .reshard_after_forward = Reshard::never,
                             .slice_bytes = 32});  // two rows
         nn::init(model, {1}, world.device());
         const auto gathers_of_call = [&] {
           const std::uint64_t before = shard_counters(model).gathers;
           model(Tensor::zeros({2, 4}, f32, world.device()));
           return shard_counters(model).gathers - before;
         };
         const auto slots = [&] {
           return Memory::of(world.device()).ledger().live_bytes("gather slots");
         };
         shard_plan(model);
         Seen s{.first = gathers_of_call(),
                .again = gathers_of_call(),
                .after = 0,
                .open = slots(),
                .closed = 0};
         reshard(model);
         s.closed = slots();
         s.after = gathers_of_call();
         return s;
       })) {
    CHECK(seen.first == 4);
    CHECK(seen.again == 0);
    CHECK(seen.after == 4);
    CHECK(seen.open >= 4 * 32);
    CHECK(seen.closed == 0);
  }
}

TEST_CASE("whether backward gathers slices is what their module says", "[threads]") {
  for (const auto& [agrees, differs] : on_ranks(2, [](World& world) {
         Projection model(8);
         fully_shard(model, {.mesh = DeviceMesh::flat(world), .slice_bytes = 32});
         nn::init(model, {1}, world.device());
         return std::pair(thrown_by([&] { set_unshard_in_backward(model, true); }),
                          thrown_by([&] { set_unshard_in_backward(model, false); }));
       })) {
    CHECK(agrees.empty());
    CHECK_THAT(differs, Contains("only streams 'weight'") && Contains("leave the call out"));
  }
}

TEST_CASE("a streamed parameter used elsewhere names the modules that stream it", "[threads]") {
  struct Both final : nn::Module {
    Both() { register_modules("first", first, "second", second, "layer", layer); }
    Projection first{8};
    nn::Linear second{first.weight}, layer{4, 4};
  };
  struct Elsewhere {
    std::string inside, after, alone;
  };
  for (const int ranks : {1, 2})
    for (const Elsewhere& said : on_ranks(ranks, [](World& world) {
           Both model;
           fully_shard(model, {.mesh = DeviceMesh::flat(world), .slice_bytes = 1});
           nn::init(model, {1}, world.device());
           const Parameter& p = model.first.weight;
           Elsewhere result;
           result.inside = thrown_by(
               [&] { model.call([&] { return model.layer.call([&] { return p.value(); }); }); });
           model.first.parameters();  // a part renames nothing
           result.after = thrown_by([&] { p.value(); });
           Projection root(8);
           fully_shard(root, {.mesh = DeviceMesh::flat(world)});
           result.alone = thrown_by([&] { root.weight.value(); });
           return result;
         })) {
      CHECK_THAT(said.inside, EndsWith("in a module that streams it: 'first', 'second'"));
      CHECK_THAT(said.after, EndsWith("in a module that streams it: 'first', 'second'"));
      CHECK_THAT(said.alone, EndsWith("in a module that streams it: '(root)'"));
    }
}

TEST_CASE("a streamed table without rows is used as one that is there whole", "[threads]") {
  for (const int ranks : {1, 2})
    for (const Shape& shape : on_ranks(ranks, [](World& world) {
           Projection none(0);
           fully_shard(none, {.mesh = DeviceMesh::flat(world), .slice_bytes = 64});
           none.materialize(world.device());
           Tensor x = Tensor::ones({3, 4}, f32, world.device());
           const Tensor y = none(x.require_grad());
           sum(y).backward();
           return y.shape();
         }))
      CHECK(shape == Shape{3, 0});
}

TEST_CASE("frozen parameters without rows are gathered beside others", "[threads]") {
  for (const double total : on_ranks(2, [](World& world) {
         class Both : public nn::Module {
          public:
           Both() : weight({2, 4}, Initializer::constant(1)), none({0, 4}, {}) {
             none.freeze();
             register_parameter("weight", weight);
             register_parameter("none", none);
           }
           Parameter weight, none;
         } both;
         fully_shard(both, {.mesh = DeviceMesh::flat(world)});
         nn::init(both, {1}, world.device());
         return both.call([&] { return sum(both.weight.value()) + sum(both.none.value()); }).item();
       }))
    CHECK(total == 8);
}

TEST_CASE("whether a parameter is streamed is settled when it is sharded", "[threads]") {
  class Other : public nn::Module {};
  struct Seen {
    std::string streams;
    bool is_streamed = false;
  };
  for (const Seen& seen : on_ranks(2, [](World& world) {
         Projection p(8);
         fully_shard(p, {.mesh = DeviceMesh::flat(world), .slice_bytes = 1});
         p.materialize(world.device());
         p.stream_parameter(p.weight);  // said before: once more is nothing new
         Other other;
         other.register_parameter("weight", p.weight);
         return Seen{thrown_by([&] { other.stream_parameter(p.weight); }), p.weight.is_streamed()};
       })) {
    CHECK_THAT(seen.streams,
               Contains("'weight' belongs to unit") && Contains("call it before fully_shard"));
    CHECK(seen.is_streamed);
  }
}

TEST_CASE("a slice that is kept is named by what was done with it, if anything was", "[threads]") {
  const auto messages = on_ranks(2, [](World& world) {
    Projection p(8);
    fully_shard(p, {.mesh = DeviceMesh::flat(world), .slice_bytes = 1});
    p.materialize(world.device());
    shard_plan(p);
    return thrown_by([&] {
      std::vector<Tensor> kept;
      p.call([&] {
        p.weight.for_each_slice([&](const Tensor& s, const SliceRows&) { kept.push_back(s); });
        return 0;
      });
    });
  });
  for (const std::string& message : messages)
    CHECK_THAT(message,
               Contains("is still referenced outside its call; copy what leaves the module"));
}
