// A file in the form of the public GPT-2 gives the logits that tests/golden/make_gpt2_file.py
// computed, on any number of ranks and through an index too.
//
// Tolerance. Values on the way to a logit are at most 8, and some 200 operations lie on it, each of
// which rounds by at most 8 * 2^-24: 1e-4 in all. Wrong names, a matrix the wrong way round or a
// missing mask change logits by 0.01 and more.
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/checkpoint/model.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

const std::string kFolder = GOLDEN_FOLDER;

struct GoldenLogits {
  nn::Gpt2Config config;
  std::vector<std::int32_t> tokens;
  std::vector<double> logits;

  GoldenLogits() {
    std::ifstream file(kFolder + "/gpt2_logits.json");
    REQUIRE(file);
    const nlohmann::json golden = nlohmann::json::parse(file);
    const auto size = [&](const char* name) { return golden["config"][name].get<std::int64_t>(); };
    config = {.dim = size("dim"),
              .n_layers = size("n_layers"),
              .n_heads = size("n_heads"),
              .vocab_size = size("vocab_size"),
              .max_seq_len = size("max_seq_len")};
    tokens = golden["tokens"].get<std::vector<std::int32_t>>();
    for (const auto& row : golden["logits"])
      for (const double logit : row) logits.push_back(logit);
  }
};

// The largest difference of any logit on any of `ranks`.
double worst_logit(const std::string& path, int ranks) {
  const GoldenLogits golden;
  const auto errors = on_ranks(ranks, [&](World& world) {
    nn::Gpt2 model(golden.config);
    const ShardOptions options{.mesh = DeviceMesh::flat(world)};
    for (nn::Module* part : model.parts()) fully_shard(*part, options);
    fully_shard(model, options);
    model.materialize(world.device());
    model.load(path);
    model.eval();
    const auto length = static_cast<std::int64_t>(golden.tokens.size());
    world.barrier();
    const auto got =
        model(Tensor::from(golden.tokens, {1, length}, world.device())).detach().to_vector<float>();
    double worst = got.size() == golden.logits.size() ? 0 : 1e9;
    for (std::size_t i = 0; i < std::min(got.size(), golden.logits.size()); ++i)
      worst = std::max(worst, std::abs(static_cast<double>(got[i]) - golden.logits[i]));
    return worst;
  });
  return *std::max_element(errors.begin(), errors.end());
}

}  // namespace

TEST_CASE("a file like the public GPT-2 loads as it is and gives its logits", "[parity]") {
  for (const int ranks : {1, 2, 4}) {
    INFO(ranks << " ranks");
    CHECK(worst_logit(kFolder + "/gpt2.safetensors", ranks) < 1e-4);
  }
}

TEST_CASE("saved again, with its names, in 16 bits, it gives the same logits", "[parity]") {
  const TemporaryFolder folder;
  const GoldenLogits golden;
  run_checked(2, {.threads = 1}, [&](World& world) {
    nn::Gpt2 model(golden.config);
    fully_shard(model, {.mesh = DeviceMesh::flat(world)});
    model.materialize(world.device());
    model.load(kFolder + "/gpt2.safetensors");
    checkpoint::save_weights(folder / "full", model, world);
    // All values of the file are exact in bf16, and f16 has as many bits and more.
    checkpoint::save_weights(folder / "bf16", model, world, {.dtype = bf16});
    checkpoint::save_weights(folder / "f16", model, world, {.dtype = f16});
  });
  for (const char* const name : {"full", "bf16", "f16"})
    CHECK(worst_logit(folder / name, 1) < 1e-4);
  CHECK(folder.read("full").size() > 1.5 * static_cast<double>(folder.read("bf16").size()));
}
