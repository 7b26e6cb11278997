// Fused projections beside separate ones: the same function, the same start, other parameters.
#include <map>

#include "tessera/nn/llama.hpp"
#include "tests/nn/helpers.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Layers = std::initializer_list<const nn::Linear*>;

std::vector<float> gradient(const Parameter& p) { return p.grad().to_vector<float>(); }

// What `of` gives of the weights, one below the other.
std::vector<float> stacked(const Layers& layers, std::vector<float> (*of)(const Parameter&)) {
  std::vector<float> rows;
  for (const nn::Linear* layer : layers)
    for (const float v : of(layer->weight)) rows.push_back(v);
  return rows;
}

// One step of both, whose values are the same.
template <class Layer>
void check_same_layer(Layer& separate, Layer& fused, const Layers& parts, const nn::Linear& stack,
                      const Shape& shape, Draw& draw) {
  const Tensor x = draw.tensor(shape), g = draw.tensor(shape);
  const Tensor y = separate(x), y_fused = fused(x);
  CHECK(y_fused.template to_vector<float>() == y.template to_vector<float>());
  y.backward(g), y_fused.backward(g);
  CHECK(gradient(stack.weight) == stacked(parts, gradient));
  fused.zero_grad();
  check_slope(fused, [&](const Tensor& t) { return fused(t); }, x.to_vector<float>(), shape, draw);
}

}  // namespace

// An element of a product, or of the gradient of a weight, does not depend on how many others there
// are, so bits are the same but in the gradient of x, whose sum has another order: check_slope.
TEST_CASE("fused projections are the separate ones in one parameter", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const auto rotary = std::make_shared<nn::Rotary>(9, 6, 100.0);
  const nn::AttentionOptions options{.dim = 10, .n_heads = 4, .n_kv_heads = 2, .head_dim = 6};
  nn::AttentionOptions fused_options = options;
  fused_options.projections = nn::Projections::fused;
  for (const auto& positions : {rotary, std::shared_ptr<nn::Rotary>()}) {
    nn::GroupedQueryAttention separate(options, positions, draw.device),
        fused(fused_options, positions, draw.device);
    CHECK(fused.qkv_proj.weight.shape() == Shape{48, 10});
    CHECK(fused.named_parameters().size() == 2);
    CHECK_FALSE(fused.q_proj.weight.defined());
    CHECK_FALSE(separate.qkv_proj.weight.defined());
    randomize(separate, draw);
    set(fused.qkv_proj.weight,
        stacked({&separate.q_proj, &separate.k_proj, &separate.v_proj}, values));
    set(fused.o_proj.weight, values(separate.o_proj.weight));
    check_same_layer(separate, fused, {&separate.q_proj, &separate.k_proj, &separate.v_proj},
                     fused.qkv_proj, {2, 7, 10}, draw);
  }
  nn::SwigluMlp separate(10, 9, draw.device), fused(10, 9, nn::Projections::fused, draw.device);
  CHECK(fused.gate_up_proj.weight.shape() == Shape{18, 10});
  CHECK(fused.named_parameters().size() == 2);
  CHECK_FALSE(fused.up_proj.weight.defined());
  randomize(separate, draw);
  set(fused.gate_up_proj.weight, stacked({&separate.gate_proj, &separate.up_proj}, values));
  set(fused.down_proj.weight, values(separate.down_proj.weight));
  check_same_layer(separate, fused, {&separate.gate_proj, &separate.up_proj}, fused.gate_up_proj,
                   {2, 7, 10}, draw);
  CHECK_THROWS_AS(nn::Linear()(draw.tensor({2, 3})), ContractError);
  const std::vector<RowPart> parts{{"a", 1}, {"b", 3}};
  const nn::Linear with_bias(2, 4, {.parts = parts});
  CHECK(with_bias.weight.row_parts() == parts);
  CHECK(with_bias.bias.row_parts() == parts);
}

// Every sum of the forward has the same order, so that the first loss has the same bits.
TEST_CASE("with fused projections a Llama starts as with separate ones", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  nn::LlamaConfig config{
      .dim = 16, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .vocab_size = 19, .max_seq_len = 12};
  nn::Llama separate(config, draw.device);
  config.projections = nn::Projections::fused;
  nn::Llama fused(config, draw.device);
  const std::string layer = "model.layers.1.";
  CHECK(fused.get_parameter(layer + "self_attn.qkv_proj.weight").shape() == Shape{32, 16});
  CHECK(fused.get_parameter(layer + "mlp.gate_up_proj.weight").shape() == Shape{128, 16});
  CHECK(fused.numel() == separate.numel());
  CHECK(separate.parameters().size() - fused.parameters().size() == 2 * 3);
  const auto start = [&](nn::Llama& model) {
    nn::init(model, {draw.seed});
    std::map<std::string, std::vector<float>> rows;  // by the names that files have
    for (const auto& [name, parameter] : model.named_parameters()) {
      const std::vector<float> all = values(parameter);
      const std::int64_t row = parameter.shape().numel() / parameter.shape()[0];
      auto next = all.begin();
      for (const auto& [part, count] : named_row_parts(name, parameter)) {
        rows[part].assign(next, next + count * row);
        next += count * row;
      }
    }
    return rows;
  };
  CHECK(start(fused) == start(separate));
  const Tensor tokens = draw.tokens({3, 7}, 19), targets = draw.tokens({3, 7}, 19);
  CHECK(fused.loss(tokens, targets).item() == separate.loss(tokens, targets).item());
  const auto by_rows = Initializer::kaiming_normal(1, Fan::out);
  for (nn::Llama* model : {&separate, &fused})
    for (const Parameter& p : model->blocks[1].parameters())
      if (p.shape().ndim() == 2) p.set_initializer(by_rows);
  CHECK(start(fused) == start(separate));  // each part has its own fan
}

TEST_CASE("row parts are all rows of a parameter, each with a name", "[nn]") {
  const Parameter p({5, 2}, Initializer::constant(0));
  CHECK_THROWS_AS(p.set_row_parts({{"a", 2}, {"b", 2}}), ContractError);
  CHECK_THROWS_AS(p.set_row_parts({{"a", 5}, {"b", 0}}), ContractError);
  CHECK_THROWS_AS(p.set_row_parts({{"", 5}}), ContractError);
  CHECK_THROWS_AS(Parameter({}, Initializer::constant(0)).set_row_parts({{"a", 1}}), ContractError);
  CHECK(named_row_parts("b.a.weight", p) == std::vector<RowPart>{{"b.a.weight", 5}});
  p.set_row_parts({{"x", 2}, {"y", 3}});
  CHECK(named_row_parts("b.a.weight", p) ==
        std::vector<RowPart>{{"b.x.weight", 2}, {"b.y.weight", 3}});
  CHECK(named_row_parts("a.weight", p) == std::vector<RowPart>{{"x.weight", 2}, {"y.weight", 3}});
  CHECK(named_row_parts("weight", p) == std::vector<RowPart>{{"x.weight", 2}, {"y.weight", 3}});
}
