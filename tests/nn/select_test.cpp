// Parameters by patterns of their names.
#include "tessera/nn/select.hpp"

#include "tessera/nn/gpt2.hpp"
#include "tessera/nn/llama.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;

namespace {

std::vector<std::string> names(const std::vector<Parameter>& parameters) {
  std::vector<std::string> all;
  for (const Parameter& p : parameters) all.push_back(p.name());
  return all;
}

}  // namespace

TEST_CASE("parameters are selected by patterns of their names, each once and in order", "[nn]") {
  const nn::Llama model({.dim = 16, .n_layers = 3, .n_heads = 2, .vocab_size = 32});
  using Names = std::vector<std::string>;
  CHECK(names(nn::select(model, {"model.norm.*", "model.layers.[0-1].input_layernorm.weight"})) ==
        Names{"model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight",
              "model.norm.weight"});
  CHECK(nn::select(model, {"*norm*", "model.*norm.weight"}).size() == 7);
  CHECK(nn::select(model, {"*"}).size() == model.parameters().size());
  CHECK(nn::select(model, {"model.layers.?.mlp.up_proj.weight"}).size() == 3);
  CHECK(nn::select(model, {}).empty());
  // A name as a whole, not a part of one.
  CHECK_THROWS_WITH(nn::select(model, {"*", "norm"}),
                    "select: no parameter's name fits 'norm'; one name is 'lm_head.weight'");
  CHECK_THROWS_WITH(nn::select(nn::ModuleList<nn::Llama>(), {"*"}),
                    "select: no parameter's name fits '*'");
  const nn::Gpt2 tied({.dim = 16, .n_layers = 1, .n_heads = 2, .vocab_size = 32});
  CHECK(names(nn::select(tied, {"*wte*"})).size() == 1);
}
