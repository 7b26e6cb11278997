// Tokens of a sharded model: the ones of the whole model, with one gather a unit and token, and
// with other prompts on other ranks.
#include <memory>

#include "tessera/nn/generate.hpp"
#include "tests/shard/modules.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr std::uint64_t kSeed = 5;

nn::LlamaConfig config() {
  nn::LlamaConfig c = small_llama(2);
  c.max_seq_len = 16;
  return c;
}

std::vector<nn::Prompt> prompts_of(int rank) {
  if (rank == 0) return {{{1, 2}}};
  return {{{3, 1, 4, 1, 5}, 7}, {{2}}, {{6, 5}, 1}};
}

std::vector<std::vector<std::int32_t>> tokens_of(const std::vector<nn::Continuation>& all) {
  std::vector<std::vector<std::int32_t>> tokens;
  for (const nn::Continuation& one : all) tokens.push_back(one.tokens);
  return tokens;
}

nn::SampleOptions draws(bool stops) {
  nn::SampleOptions options{.top_k = 6, .seed = 3};
  if (stops) options.stop_tokens = {1, 4};
  return options;
}

// A policy: a language model with a head for values, whose root has the model's last norm.
class Policy : public nn::Module {
 public:
  Policy() : model(config()), value(config().dim, 1) {
    register_module("model", model);
    register_module("value", value);
  }
  void shard(const ShardOptions& options) {
    for (nn::LlamaBlock& block : model.blocks) fully_shard(block, options);
    fully_shard(*this, options);
  }
  Tensor values(const Tensor& tokens) {
    return call([&] { return value(model.hidden(tokens)); });
  }

  nn::Llama model;
  nn::Linear value;
};

}  // namespace

TEST_CASE("ranks with other prompts generate what a whole model does", "[threads]") {
  nn::Llama whole(config());
  nn::init(whole, {kSeed}, Device::cpu());
  for (const bool stops : {false, true}) {
    const nn::SampleOptions options = draws(stops);
    const auto all = on_ranks(2, [&](World& world) {
      nn::Llama model(config());
      shard_parts(model,
                  {.mesh = DeviceMesh::flat(world), .reshard_after_forward = Reshard::always});
      nn::init(model, {kSeed}, world.device());
      nn::SampleOptions mine = options;
      mine.goes_on = [&](bool goes_on) { return world.sum(goes_on) > 0; };
      const std::uint64_t before = shard_counters(model).gathers;
      const auto said = nn::generate(model, prompts_of(world.rank()), 9, mine);
      const std::uint64_t gathers = shard_counters(model).gathers - before;
      std::uint64_t units = 0;
      for (const auto& unit : shard_plan(model).units) units += unit.gather_bytes > 0;
      return std::tuple(tokens_of(said), gathers, units);
    });
    for (int rank = 0; rank < 2; ++rank) {
      const auto& [tokens, gathers, units] = all[static_cast<std::size_t>(rank)];
      CHECK(tokens == tokens_of(nn::generate(whole, prompts_of(rank), 9, options)));
      CHECK(gathers <= 9 * units);
      if (!stops) CHECK(gathers == 9 * units);
    }
  }
}

TEST_CASE("a rank without prompts takes part in the calls of the others", "[threads]") {
  nn::Llama whole(config());
  nn::init(whole, {kSeed}, Device::cpu());
  for (const bool stops : {false, true}) {
    const nn::SampleOptions options = draws(stops);
    const auto all = on_ranks(2, [&](World& world) {
      nn::Llama model(config());
      shard_parts(model, {.mesh = DeviceMesh::flat(world)});
      nn::init(model, {kSeed}, world.device());
      nn::SampleOptions mine = options;
      if (stops) mine.goes_on = [&](bool goes_on) { return world.sum(goes_on) > 0; };
      return tokens_of(nn::generate(
          model, world.rank() == 0 ? std::vector<nn::Prompt>() : prompts_of(1), 9, mine));
    });
    CHECK(all[0].empty());
    CHECK(all[1] == tokens_of(nn::generate(whole, prompts_of(1), 9, options)));
  }
}

TEST_CASE("a model inside of a unit generates by calls of that", "[threads]") {
  for (const auto& [said, is_same, values] : on_ranks(2, [&](World& world) {
         Policy whole, policy;
         nn::init(whole, {kSeed}, world.device());
         policy.shard({.mesh = DeviceMesh::flat(world)});
         nn::init(policy, {kSeed}, world.device());
         const auto prompts = prompts_of(1);
         std::string error;
         try {
           nn::generate(policy.model, prompts, 3);
         } catch (const ContractError& e) {
           error = e.what() + std::string(e.where().file_name());
         }
         reset(policy);
         const auto tokens = tokens_of(nn::generate(policy.model, prompts, 3, {.root = &policy}));
         const Tensor ids =
             Tensor::from(std::vector<std::int32_t>{1, 2, 3}, {1, 3}, world.device());
         return std::tuple(error, tokens == tokens_of(nn::generate(whole.model, prompts, 3)),
                           same_bits(policy.values(ids).to_vector<float>(),
                                     whole.values(ids).to_vector<float>()));
       })) {
    CHECK_THAT(said, Catch::Contains("call([&] { ... })"));
    CHECK_THAT(said, Catch::EndsWith("unit_generate_test.cpp"));
    CHECK(is_same);
    CHECK(values);
  }
}
