// What is used after its owner has gone says so: tensors kept from a callback, and models that
// outlive their world.
#include <memory>
#include <optional>
#include <type_traits>

#include "runtime/param/parameter_state.hpp"
#include "runtime/shard/unit.hpp"
#include "tessera/nn/embedding.hpp"
#include "tests/shard/pair.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;
using Catch::Matchers::EndsWith;

namespace {

struct Kept {
  std::map<std::string, Tensor> tensors;
  std::string read, view, written, thrown;
  Values values;
};

Kept keep_all(World& world) {
  Stack stack({3, 5, 2});
  start(stack, world, 7);
  Kept kept;
  for_each_full_parameter(stack, [&](const std::string& name, const Tensor& full) {
    kept.values[name] = full.to_vector<float>();
    kept.tensors[name] = full;
    kept.written = thrown_by([&] { raw::fill(full, 1); });
  });
  const Tensor& weight = kept.tensors.at("layers.0.weight");
  kept.read = thrown_by([&] { weight.to_vector<float>(); });
  kept.view = thrown_by([&] { raw::mul(raw::transpose(weight, 0, 1), 2.0); });
  Tensor last;
  try {
    for_each_full_parameter(stack, [&](const std::string&, const Tensor& full) {
      last = full;
      throw std::runtime_error("the callback's own");
    });
  } catch (const std::runtime_error&) {
    kept.thrown = thrown_by([&] { last.to_vector<float>(); });
  }
  kept.values["again"] = full_values(stack).at("layers.0.weight");
  return kept;
}

}  // namespace

TEST_CASE("a full parameter that was kept from its callback refuses to be used", "[shard]") {
  for (const int ranks : {1, 2, 3})
    for (const Kept& kept : on_ranks(ranks, keep_all)) {
      INFO(ranks << " ranks");
      for (const std::string& message : {kept.read, kept.view, kept.thrown})
        CHECK_THAT(message,
                   Contains("for_each_full_parameter") && Contains("lent for the callback"));
      CHECK_THAT(kept.written, Contains("is read-only"));
      CHECK(kept.values.at("again") == kept.values.at("layers.0.weight"));
      CHECK(kept.tensors.at("scale").shape() == Shape{2});
    }
}

// What refers to a world would lose it.
static_assert(!std::is_move_constructible_v<World> && !std::is_move_assignable_v<World>);

TEST_CASE("a model that outlives its world keeps its values, and says what is gone", "[shard]") {
  for (const int ranks : {1, 2})
    for (const bool has_run : {true, false}) {
      INFO(ranks << " ranks" << (has_run ? ", after a step" : ""));
      const auto size = static_cast<std::size_t>(ranks);
      std::vector<std::unique_ptr<Stack>> models(size);
      std::vector<std::unique_ptr<optim::SGD>> optimizers(size);
      std::vector<std::optional<DeviceMesh>> meshes(size);
      run_local(ranks, {.threads = 1}, [&](World& world) {
        const auto rank = static_cast<std::size_t>(world.rank());
        meshes[rank] = DeviceMesh::flat(world);
        models[rank] = std::make_unique<Stack>(std::vector<std::int64_t>{3, 5, 2});
        Stack& model = *models[rank];
        model.shard({.mesh = *meshes[rank]});
        nn::init(model, nn::Seed{7}, world.device());
        optimizers[rank] = std::make_unique<optim::SGD>(model.parameters());
        if (has_run) mean_square(model(rows_of(1, world.rank(), 2, 3, world.device()))).backward();
      });
      for (std::size_t rank = 0; rank < size; ++rank) {
        Stack& model = *models[rank];
        const World& ended = meshes[rank]->world();
        CHECK(ended.rank() == static_cast<int>(rank));
        for (const Parameter& p : model.parameters()) p.shard().to_vector<float>();
        CHECK_THAT(thrown_by([&] { ended.sum(1); }), Contains("its World has ended; keep"));
        CHECK_THAT(thrown_by([&] { ended.recover(); }), Contains("its World has ended; keep"));
        if (ranks == 1) continue;
        const auto forward = [&] { model(rows_of(1, 0, 2, 3, ended.device())); };
        CHECK_THAT(thrown_by(forward), Contains("its World has ended; keep"));
        CHECK_THAT(thrown_by([&] { full_values(model); }), Contains("its World has ended; keep"));
      }
      models.clear();
      // The parameters that the optimizers hold outlive their model.
      for (const auto& optimizer : optimizers)
        if (has_run) CHECK_NOTHROW(optimizer->step());
    }
}

TEST_CASE("a parameter that outlives its model keeps neither slices nor slots, and says so",
          "[shard]") {
  struct Seen {
    bool has_slots = true;
    std::string streamed, whole;
  };
  for (const int ranks : {1, 2})
    for (const Seen& seen : on_ranks(ranks, [](World& world) {
           auto table = std::make_unique<nn::Embedding>(8, 2);
           auto stack = std::make_unique<Stack>(std::vector<std::int64_t>{2, 3});
           fully_shard(*table, {.mesh = DeviceMesh::flat(world), .slice_bytes = 1});
           stack->shard({.mesh = DeviceMesh::flat(world)});
           table->materialize(world.device());
           stack->materialize(world.device());
           const optim::SGD optimizer(table->parameters());
           const Parameter streamed = table->weight, whole = stack->scale;
           const Tensor ids = Tensor::arange(8, i32, world.device());
           mean_square((*stack)((*table)(ids))).backward();
           if (!state_of(streamed)->slices) throw std::logic_error("the table is not streamed");
           const std::weak_ptr<shard::Root> root =
               std::dynamic_pointer_cast<shard::Unit>(table->hook())->root();
           table = nullptr;
           stack = nullptr;
           return Seen{!root.expired(), thrown_by([&] { streamed.value(); }),
                       thrown_by([&] { whole.value(); })};
         })) {
      INFO(ranks << " ranks");
      CHECK_FALSE(seen.has_slots);
      CHECK_THAT(seen.streamed,
                 Contains("'weight' of unit '(gone)'") && EndsWith("in a module that streams it"));
      CHECK_THAT(seen.whole, Contains("'scale' of unit '(gone)'"));
    }
}

TEST_CASE("a sharded model may die before its backward", "[threads]") {
  for (const Reshard reshard : kReshards) {
    const auto losses = on_ranks(2, [&](World& world) {
      const auto loss_of_nobody = [&] {
        Pair model([](Pair& m, const Tensor& x) { return m.b(m.a(x)) * m.scale.value(); });
        const ShardOptions options{.mesh = DeviceMesh::flat(world),
                                   .reshard_after_forward = reshard};
        shard_each({&model.a, &model}, options);
        nn::init(model, {5}, world.device());
        return mean_square(model(positive_rows(11, 0, 3, 4, world.device())));
      };
      const Tensor loss = loss_of_nobody();
      loss.backward();
      return loss.item();
    });
    CHECK(losses[0] == losses[1]);
    CHECK(losses[0] > 0);
  }
}

TEST_CASE("a model may die before its backward") {
  const Device device = Device::cpu();
  const auto loss_of_nobody = [&] {
    nn::Linear layer(4, 4, device);
    nn::init(layer, {3});
    return mean_square(layer(Tensor::ones({2, 4}, f32, device)));
  };
  const Tensor loss = loss_of_nobody();
  loss.backward();
  CHECK(loss.item() >= 0);
}
