// Sharded checkpoints: any number of ranks resumes what any other saved, to the bit.
#include "tessera/checkpoint/checkpoint.hpp"

#include <filesystem>

#include "tests/checkpoint/resumable.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::testing;
using checkpoint::Checkpoint;

namespace {

// What `ranks` ranks have after the load of what `savers` have saved, and what that was.
void check_resume(const ResumedLayout& from, int savers, const ResumedLayout& into, int ranks,
                  std::uint64_t seed) {
  const TemporaryFolder folder;
  const Values expected = on_ranks(savers, [&](World& world) {
    Resumable saved = made(from, world, seed);
    save_at(folder.path().string(), 3, saved, world);
    return everything(saved);
  })[0];
  const auto found = on_ranks(ranks, [&](World& world) {
    Resumable resumed = made(into, world, seed + 1);
    resumed.optimizer->set_steps(1);
    load_from(Checkpoint(folder.path().string(), 3), resumed, world);
    return everything(resumed);
  });
  if (from.projections == into.projections) {
    for (const Values& values : found) CHECK(same_bits(values, expected));
    return;
  }
  // The same elements under other names: q, k and v are stacked.
  for (const char* const of : {"", ".0", ".1"}) {
    std::vector<float> stacked;
    for (const char* const name : {"q_proj", "k_proj", "v_proj"})
      for (const float v : expected.at(concat("model.layers.0.self_attn.", name, ".weight", of)))
        stacked.push_back(v);
    CHECK(same_bits(found[0].at(concat("model.layers.0.self_attn.qkv_proj.weight", of)), stacked));
  }
}

}  // namespace

TEST_CASE("any number of ranks resumes a checkpoint of any other, to the bit", "[checkpoint]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const std::vector<ResumedLayout> ways = {{},
                                           {.tied = true},
                                           {.gpt2 = true},
                                           {.projections = nn::Projections::fused},
                                           {.replicas = 2},
                                           {.dim = 1},
                                           {.gpt2 = true, .dim = 1},
                                           {.slice_bytes = 64}};
  for (std::size_t way = 0; way < ways.size(); ++way)
    for (const int savers : {1, 2, 3, 4}) {
      INFO("way " << way << ", " << savers << " ranks save");
      check_resume(ways[way], savers, ways[way], way % 2 == 0 ? 5 - savers : 2, seed);
    }
}

TEST_CASE("a checkpoint resumes under other layouts", "[checkpoint]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  check_resume({}, 3, {.projections = nn::Projections::fused}, 2, seed);
  check_resume({.replicas = 2}, 4, {.dim = 1}, 3, seed);
  check_resume({.dim = 1}, 2, {.slice_bytes = 64}, 4, seed);
  check_resume({.gpt2 = true}, 2, {.gpt2 = true, .replicas = 2}, 4, seed);
}

TEST_CASE("a checkpoint of a wrapped model resumes in the model, by a rule for its names",
          "[checkpoint]") {
  struct Wrapper final : nn::Module {
    explicit Wrapper(nn::Module& model) { register_module("net", model); }
  };
  const TemporaryFolder folder;
  const Values expected = on_ranks(2, [&](World& world) {
    Resumable saved = made({}, world, 3);
    Wrapper wrapper(*saved.model);
    checkpoint::save(
        folder.path().string(), 3,
        {checkpoint::part(wrapper, world), checkpoint::part(*saved.optimizer, wrapper, world)}, {},
        world);
    return everything(saved);
  })[0];
  for (const Values& found : on_ranks(3, [&](World& world) {
         Resumable resumed = made({}, world, 4);
         const Checkpoint from(folder.path().string(), 3);
         const LoadOptions options{.rename = {{"net.*", "*"}}};
         resumed.model->load(*from.part("model"), options);
         resumed.optimizer->load(*resumed.model, *from.part("optimizer"), options);
         world.barrier();
         return everything(resumed);
       }))
    CHECK(same_bits(found, expected));
}

TEST_CASE("a checkpoint keeps what is no tensor, and whole weights are in it", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const Values weights = on_ranks(2, [&](World& world) {
    Resumable saved = made({}, world, 5);
    saved.optimizer->set_lr(0.125);
    save_at(at, 10, saved, world);
    save_at(at, 9, saved, world);
    CHECK(checkpoint::newest(at, world) == 10);
    return full_values(*saved.model);
  })[0];
  CHECK(checkpoint::steps_in(at) == std::vector<std::int64_t>{9, 10});
  const Checkpoint from(at, 10);
  CHECK(from.step() == 10);
  CHECK(from.ranks() == 2);
  CHECK(from.integer("samples") == 6400);
  CHECK(from.number("loss") == 2);
  CHECK(from.text("data") == "book \"1\"");
  CHECK(from.parts() == std::vector<std::string>{"model", "optimizer"});
  CHECK(std::get<std::int64_t>(from.scalars("optimizer").at("steps")) == 7);
  CHECK(std::get<double>(from.scalars("optimizer").at("lr")) == 0.125);
  CHECK_THROWS_WITH(from.integer("loss"), Catch::Contains("'loss' is no integer"));
  CHECK_THROWS_WITH(from.number("none"), Catch::Contains("has no scalar 'none'"));
  CHECK_THROWS_WITH(from.part("none"), Catch::Contains("has no part 'none'"));

  const auto loaded = on_ranks(3, [&](World& world) {
    Resumable other = made({}, world, 6);
    other.model->load(checkpoint::step_folder(at, 10));
    world.barrier();
    return full_values(*other.model);
  });
  CHECK(same_bits(loaded[0], weights));

  // A folder of PyTorch's sharded form is one without a manifest.
  const auto pytorch = on_ranks(2, [&](World& world) {
    Resumable other = made({}, world, 6);
    other.model->load(checkpoint::step_folder(at, 10) + "/model");
    world.barrier();
    return full_values(*other.model);
  });
  CHECK(same_bits(pytorch[0], weights));

  checkpoint::keep_newest(at, 1, 9);
  CHECK(checkpoint::steps_in(at) == std::vector<std::int64_t>{9, 10});
  checkpoint::keep_newest(at, 1);
  CHECK(checkpoint::steps_in(at) == std::vector<std::int64_t>{10});
}

TEST_CASE("what lies in no unit is shared by all ranks that write, and has the same values there",
          "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto heard = on_ranks(3, [&](World& world) {
    nn::Linear layer(5, 7);
    nn::init(layer, {5}, world.device());
    checkpoint::save(at, 1, {checkpoint::part(layer, world)}, {}, world);
    const Values saved = full_values(layer);
    layer.weight.edit([](const Tensor& rows) { raw::fill(rows, 0); });
    layer.load(*Checkpoint(at, 1).part("model"));
    world.barrier();
    const bool is_same = same_bits(full_values(layer), saved);
    layer.weight.edit([&](const Tensor& rows) { raw::fill(rows, world.rank()); });
    return std::pair(is_same, thrown_by<Error>([&] {
                       checkpoint::save(at, 2, {checkpoint::part(layer, world)}, {}, world);
                     }));
  });
  for (const auto& [is_same, said] : heard) {
    CHECK(is_same);
    CHECK(has(said, "checkpoint::save"));
    CHECK(has(said, "'weight'"));
  }
  CHECK(checkpoint::steps_in(at) == std::vector<std::int64_t>{1});
  CHECK(std::distance(std::filesystem::directory_iterator(at), {}) == 1);
}
