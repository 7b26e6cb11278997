// Llama and GPT-2 as wholes: names, initial values, tying, loss, recomputation, scopes.
#include <algorithm>
#include <cmath>
#include <map>

#include "runtime/param/parameter_state.hpp"
#include "tessera/autograd/random.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tessera/nn/llama.hpp"
#include "tests/nn/helpers.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::testing;
using nn::Recompute;

namespace {

nn::LlamaConfig small_llama() {
  return {
      .dim = 16, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .vocab_size = 19, .max_seq_len = 12};
}
nn::Gpt2Config small_gpt2() {
  return {.dim = 16, .n_layers = 2, .n_heads = 4, .vocab_size = 19, .max_seq_len = 12};
}

std::vector<std::string> names(nn::Module& module) {
  std::vector<std::string> out;
  for (const auto& [name, parameter] : module.named_parameters()) out.push_back(name);
  return out;
}
std::map<std::string, std::vector<float>> all_values(nn::Module& module) {
  std::map<std::string, std::vector<float>> out;
  for (const auto& [name, parameter] : module.named_parameters()) out[name] = values(parameter);
  return out;
}
std::map<std::string, std::vector<float>> all_gradients(nn::Module& module) {
  std::map<std::string, std::vector<float>> out;
  for (const auto& [name, parameter] : module.named_parameters())
    out[name] = parameter.grad().to_vector<float>();
  return out;
}

// The mean of -log softmax(logits)[target] in f64.
double cross_entropy_of(const std::vector<float>& logits,
                        const std::vector<std::int32_t>& targets) {
  const std::size_t vocab = logits.size() / targets.size();
  double sum = 0;
  for (std::size_t r = 0; r < targets.size(); ++r) {
    double total = 0;
    for (std::size_t c = 0; c < vocab; ++c)
      total += std::exp(static_cast<double>(logits[r * vocab + c]));
    sum += std::log(total) - logits[r * vocab + static_cast<std::size_t>(targets[r])];
  }
  return sum / static_cast<double>(targets.size());
}

// Counts the calls of a module and records their order.
struct CallRecorder final : nn::ModuleHook {
  CallRecorder(std::string n, std::vector<std::string>& l) : name(std::move(n)), log(l) {}
  void before_call(nn::Module&) override { log.push_back("+" + name); }
  void after_call(nn::Module&) override { log.push_back("-" + name); }
  void abandon_call(nn::Module&) noexcept override { abandoned = true; }
  void materialize(const Device&) override {}
  std::string name;
  std::vector<std::string>& log;
  bool abandoned = false;
};

}  // namespace

TEST_CASE("parameters bear Hugging Face's names", "[nn]") {
  nn::LlamaConfig llama = small_llama();
  llama.n_layers = 1;
  nn::Llama model(llama);
  const std::string layer = "model.layers.0.";
  CHECK(names(model) == std::vector<std::string>{
                            "model.embed_tokens.weight", layer + "self_attn.q_proj.weight",
                            layer + "self_attn.k_proj.weight", layer + "self_attn.v_proj.weight",
                            layer + "self_attn.o_proj.weight", layer + "mlp.gate_proj.weight",
                            layer + "mlp.up_proj.weight", layer + "mlp.down_proj.weight",
                            layer + "input_layernorm.weight",
                            layer + "post_attention_layernorm.weight", "model.norm.weight",
                            "lm_head.weight"});
  CHECK(model.blocks[0].mlp.up_proj.weight.shape() == Shape{64, 16});  // 8/3 of 16, rounded up
  CHECK(!model.saves_transposed("model.layers.0.mlp.up_proj.weight"));

  nn::Gpt2Config gpt2 = small_gpt2();
  gpt2.n_layers = 1;
  nn::Gpt2 other(gpt2);
  std::vector<std::string> expected{"transformer.wte.weight", "transformer.wpe.weight"};
  for (const char* part : {"ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"})
    for (const char* kind : {".weight", ".bias"})
      expected.push_back("transformer.h.0." + std::string(part) + kind);
  expected.insert(expected.end(), {"transformer.ln_f.weight", "transformer.ln_f.bias"});
  CHECK(names(other) == expected);
  std::vector<std::string> transposed;
  for (const std::string& name : expected)
    if (other.saves_transposed(name)) transposed.push_back(name);
  CHECK(transposed == std::vector<std::string>{"transformer.h.0.attn.c_attn.weight",
                                               "transformer.h.0.attn.c_proj.weight",
                                               "transformer.h.0.mlp.c_fc.weight",
                                               "transformer.h.0.mlp.c_proj.weight"});
}

TEST_CASE("the parts of a model are its embedding, blocks and head, but not when tied", "[nn]") {
  nn::LlamaConfig config = small_llama();
  nn::Llama open(config);
  CHECK(open.parts() ==
        std::vector<nn::Module*>{&open.embedding, &open.blocks[0], &open.blocks[1], &open.head});
  config.tie_embeddings = true;
  nn::Llama tied(config);
  CHECK(tied.parts() == std::vector<nn::Module*>{&tied.blocks[0], &tied.blocks[1]});
  CHECK(tied.head.weight == tied.embedding.weight);
  CHECK(open.numel() - tied.numel() == 19 * 16);
  nn::Gpt2 gpt2(small_gpt2());
  CHECK(gpt2.parts() == std::vector<nn::Module*>{&gpt2.blocks[0], &gpt2.blocks[1]});
}

TEST_CASE("initial values depend on seed and name, not on the rest of the model", "[nn]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const Device device = Device::cpu();
  nn::LlamaConfig config = small_llama();
  nn::Llama small(config, device);
  config.n_layers = 3;
  nn::Llama large(config);
  large.materialize(device);
  nn::init(small, {seed});
  nn::init(large, {seed});
  const auto in_small = all_values(small), in_large = all_values(large);
  for (const auto& [name, v] : in_small) {
    INFO(name);
    CHECK(in_large.at(name) == v);
    if (name.find("norm") != std::string::npos)
      CHECK(std::all_of(v.begin(), v.end(), [](float x) { return x == 1; }));
  }
  CHECK(in_small.at("model.layers.0.self_attn.q_proj.weight") !=
        in_small.at("model.layers.1.self_attn.q_proj.weight"));
  nn::init(small, {seed + 1});
  CHECK(all_values(small).at("lm_head.weight") != in_small.at("lm_head.weight"));

  // n = 19456 values of deviation 0.02: their mean lies within 6 * 0.02 / sqrt(n) = 8.6e-4 of 0 and
  // their root mean square within 6 / sqrt(2 n) = 3.1 % of 0.02, but for one seed in 5e8.
  nn::Embedding embedding(19, 1024, device);
  nn::init(embedding, {seed});
  double sum = 0, squares = 0;
  for (const float v : values(embedding.weight)) sum += v, squares += static_cast<double>(v) * v;
  const double n = 19 * 1024;
  CHECK(std::abs(sum / n) < 8.6e-4);
  CHECK(std::abs(std::sqrt(squares / n) / 0.02 - 1) < 0.031);
}

TEST_CASE("the loss is the mean cross-entropy of the logits, near log V at the start", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  const std::vector<std::int32_t> targets = draw.ids(3 * 7, 19);
  const Tensor tokens = draw.tokens({3, 7}, 19),
               target = Tensor::from(targets, {3, 7}, draw.device);
  nn::Llama llama(small_llama(), draw.device);
  nn::Gpt2 gpt2(small_gpt2(), draw.device);
  for (nn::LanguageModel* model : std::initializer_list<nn::LanguageModel*>{&llama, &gpt2}) {
    nn::init(*model, {draw.seed});
    const Tensor logits = (*model)(tokens), loss = model->loss(tokens, target);
    CHECK(logits.shape() == Shape{3, 7, 19});
    CHECK(loss.shape() == Shape{});
    CHECK(loss.dtype() == f32);
    // In roundings in f32: a row's sum of 19 exponentials has 22, which its logarithm makes
    // absolute, and logarithm, maximum and target 3 of about 3; the mean of 21 rows 22 of about 3.
    // 97 in all.
    CHECK(std::abs(loss.item() - cross_entropy_of(logits.to_vector<float>(), targets)) <
          110 * 0x1p-24);
    // Logits are sums of 16 products of normed activations and weights of 0.02: deviation 0.08, of
    // the mean over 21 targets 0.08 / sqrt(21), eleven of which are allowed.
    CHECK(std::abs(loss.item() - std::log(19)) < 0.2);
  }
}

TEST_CASE("a loss in chunks of logits has the same value and nearly the same gradients", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  nn::LlamaConfig config = small_llama();
  config.tie_embeddings = true;
  nn::Llama llama(config, draw.device);
  nn::Gpt2 gpt2(small_gpt2(), draw.device);
  const Tensor tokens = draw.tokens({3, 7}, 19), targets = draw.tokens({3, 7}, 19);
  for (nn::LanguageModel* model : std::initializer_list<nn::LanguageModel*>{&llama, &gpt2}) {
    nn::init(*model, {draw.seed});
    const auto step = [&](std::int64_t chunk) {
      model->set_loss_chunk(chunk);
      model->zero_grad();
      const Tensor loss = model->loss(tokens, targets);
      loss.backward();
      return std::pair(loss.item(), all_gradients(*model));
    };
    const auto [whole, expected] = step(nn::kLossChunk);
    for (const std::int64_t chunk : {1, 20, 5 * 19, 21 * 19 - 1, 21 * 19}) {
      INFO("chunks of " << chunk << " elements");
      const auto [loss, gradients] = step(chunk);
      CHECK(loss == whole);
      for (const auto& [name, values] : gradients) {
        INFO(name);
        // The head's weight, which is the embedding, is the one whose sum has another order: of 21
        // rows, each at most |x| <= sqrt(16) times a gradient of at most 1 / 21, and of what the
        // embedding adds. 23 additions, in either order, of no more than 4 and that.
        const bool is_head = name.find("embed_tokens") != name.npos || name.ends_with("wte.weight");
        double worst = 0;
        for (std::size_t i = 0; i < values.size(); ++i)
          worst = std::max(worst, std::abs(static_cast<double>(values[i]) - expected.at(name)[i]));
        CHECK(worst <= (is_head ? 2 * 23 * 0x1p-24 * 5 : 0));
      }
    }
  }
}

TEST_CASE("a model's loss ignores targets of -100, however many logits there are", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  nn::Llama llama(small_llama(), draw.device);
  nn::Gpt2 gpt2(small_gpt2(), draw.device);
  const Tensor tokens = draw.tokens({2, 4}, 19);
  std::vector<std::int32_t> ids = draw.ids(8, 19), masked = ids;
  for (const std::size_t i : {0, 3, 4}) masked[i] = -100;
  const Tensor targets = Tensor::from(masked, {2, 4}, draw.device),
               none = Tensor::from(std::vector<std::int32_t>(8, -100), {2, 4}, draw.device);
  for (nn::LanguageModel* model : std::initializer_list<nn::LanguageModel*>{&llama, &gpt2}) {
    nn::init(*model, {draw.seed});
    const std::vector<float> logits = (*model)(tokens).to_vector<float>();
    std::vector<float> kept_logits;
    std::vector<std::int32_t> kept;
    for (std::size_t r = 0; r < 8; ++r)
      if (masked[r] >= 0) {
        kept.push_back(ids[r]);
        kept_logits.insert(kept_logits.end(), logits.begin() + 19 * r,
                           logits.begin() + 19 * (r + 1));
      }
    const double expected = cross_entropy_of(kept_logits, kept);
    for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{40}, nn::kLossChunk})
      for (const std::optional<double> gradient : {std::optional<double>(), {1.0}}) {
        model->set_loss_chunk(chunk);
        // 8 terms of f32, each below 8 with a few roundings of a sum of 19.
        CHECK(std::abs(model->loss(tokens, targets, {.gradient = gradient}).item() - expected) <
              8 * 64 * 0x1p-24);
        model->zero_grad();
        const Tensor loss = model->loss(tokens, none, {.gradient = gradient});
        loss.backward();
        CHECK(loss.item() == 0);
        for (const auto& [name, values] : all_gradients(*model))
          CHECK(std::all_of(values.begin(), values.end(), [](float v) { return v == 0; }));
      }
  }
}

TEST_CASE("a tied weight gets the gradients of both of its uses", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  nn::LlamaConfig config = small_llama();
  nn::Llama open(config, draw.device);
  config.tie_embeddings = true;
  nn::Llama tied(config, draw.device);
  nn::init(tied, {draw.seed});
  const auto start = all_values(tied);
  for (const auto& [name, parameter] : open.named_parameters())
    set(parameter, start.at(name == "lm_head.weight" ? "model.embed_tokens.weight" : name));
  const Tensor tokens = draw.tokens({2, 6}, 19), targets = draw.tokens({2, 6}, 19);
  open.loss(tokens, targets).backward();
  tied.loss(tokens, targets).backward();
  const auto both = all_gradients(tied), single = all_gradients(open);
  double largest = 0, worst = 0;
  for (std::size_t i = 0; i < both.at("model.embed_tokens.weight").size(); ++i) {
    const double sum = static_cast<double>(single.at("model.embed_tokens.weight")[i]) +
                       single.at("lm_head.weight")[i];
    largest = std::max(largest, std::abs(sum));
    worst = std::max(worst, std::abs(sum - both.at("model.embed_tokens.weight")[i]));
  }
  CHECK(largest > 0);
  // A row adds the gradients of 12 positions at most to the head's, here in one order, there in
  // another: 13 roundings on either side, of sums of 13 gradients, each about the largest row's.
  CHECK(worst <= 2 * 13 * 13 * 0x1p-24 * largest);
  CHECK(both.at("model.norm.weight") == single.at("model.norm.weight"));
}

TEST_CASE("recomputing blocks changes no bit and keeps less", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  nn::Gpt2Config config = small_gpt2();
  config.dropout = 0.3;
  config.n_layers = 6;
  const Tensor tokens = draw.tokens({4, 12}, 19), targets = draw.tokens({4, 12}, 19);
  Ledger& ledger = Memory::of(draw.device).ledger();
  const auto step = [&](const Recompute& recompute) {
    config.recompute = recompute;
    nn::Gpt2 model(config, draw.device);
    nn::init(model, {draw.seed});
    const autograd::RandomStateGuard random({.seed = draw.seed});
    const std::int64_t before = ledger.live_bytes("activations");
    const Tensor loss = model.loss(tokens, targets);
    const std::int64_t kept = ledger.live_bytes("activations") - before;
    loss.backward();
    return std::tuple(loss.item(), all_gradients(model), kept);
  };
  const auto [loss, gradients, kept] = step(Recompute::none);
  const auto [again, repeated, kept_less] = step(Recompute::blocks);
  CHECK(loss == again);
  CHECK(gradients == repeated);
  INFO("kept " << kept << " and " << kept_less << " bytes");
  CHECK(kept_less * 3 < kept);

  // Of 6 blocks 3, 2 and 1 run again.
  for (const std::int64_t every : {2, 3, 4}) {
    const auto [same_loss, same_gradients, between] = step({.every = every});
    INFO("every " << every << " keeps " << between << " bytes");
    CHECK(same_loss == loss);
    CHECK(same_gradients == gradients);
    CHECK(6 * (kept - between) == 6 / every * (kept - kept_less));
  }
  const auto [same_loss, same_gradients, by_operation] =
      step({.every = 1, .keep = {.products = 1, .attention = true}});
  INFO("by operation keeps " << by_operation << " bytes");
  CHECK(same_loss == loss);
  CHECK(same_gradients == gradients);
  CHECK(kept_less < by_operation);
  CHECK(by_operation < kept);
  CHECK_THROWS_AS(step({.every = -1}), ContractError);
  CHECK_THROWS_AS(step({.keep = {.products = 1}}), ContractError);
  CHECK_THROWS_WITH(
      step({.every = 7}),
      Catch::Matchers::Contains("recompute.every is 7, the model has 6 blocks; choose"));
}

TEST_CASE("every public call of a model opens its scope once, and the blocks' inside it", "[nn]") {
  Draw draw;
  nn::LlamaConfig config = small_llama();
  nn::Llama model(config, draw.device);
  std::vector<std::string> log;
  const auto root = std::make_shared<CallRecorder>("model", log);
  model.set_hook(root);
  for (nn::Module* part : model.parts()) {
    const std::string name = part == &model.embedding ? "embedding"
                             : part == &model.head    ? "head"
                                                      : "block";
    part->set_hook(std::make_shared<CallRecorder>(name, log));
  }
  const std::vector<std::string> expected{"+model", "+embedding", "-embedding", "+block", "-block",
                                          "+block", "-block",     "+head",      "-head",  "-model"};
  const Tensor tokens = draw.tokens({1, 4}, 19);
  model(tokens);
  CHECK(log == expected);
  log.clear();
  model.loss(tokens, tokens);
  CHECK(log == expected);
  log.clear();
  model.set_loss_chunk(19);  // a row
  model.loss(tokens, tokens);
  CHECK(log == expected);
}

TEST_CASE("with bf16 parameters a model computes in bf16 and its loss stays close", "[nn]") {
  Draw draw;
  INFO("seed " << draw.seed);
  nn::Llama llama(small_llama(), draw.device);
  nn::Gpt2 gpt2(small_gpt2(), draw.device);
  const Tensor tokens = draw.tokens({2, 9}, 19), targets = draw.tokens({2, 9}, 19);
  for (nn::LanguageModel* model : std::initializer_list<nn::LanguageModel*>{&llama, &gpt2}) {
    nn::init(*model, {draw.seed});
    const Tensor loss = model->loss(tokens, targets);
    loss.backward();
    const auto exact = all_gradients(*model);
    model->zero_grad();
    for (const Parameter& p : model->parameters()) {  // as a unit of bf16 parameters has them
      state_of(p)->window = raw::cast(p.shard(), bf16).storage();
      state_of(p)->window_offset_bytes = 0;
      state_of(p)->compute_dtype = bf16;
    }
    CHECK((*model)(tokens).dtype() == bf16);
    const Tensor rough = model->loss(tokens, targets);
    CHECK(rough.dtype() == f32);
    // Logits are at most 0.5 and the result of some 15 roundings in bf16, of 2^-8 each: off by
    // 0.03. A loss, about 2.9, moves by twice that at most: 2 %.
    CHECK(std::abs(rough.item() / loss.item() - 1) < 0.02);
    rough.backward();
    for (const auto& [name, gradient] : all_gradients(*model)) {
      INFO(name);
      double difference = 0, size = 0;
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        difference += std::pow(static_cast<double>(gradient[i]) - exact.at(name)[i], 2);
        size += std::pow(static_cast<double>(exact.at(name)[i]), 2);
      }
      // A term has seen some 20 roundings of 2^-8: 8 % where all have one sign. Those of other
      // tokens have other signs, and so have the terms, so that their sum is off by 8 % in the L2
      // norm too. Twice that is allowed.
      CHECK(difference <= 0.16 * 0.16 * size);
      CHECK(difference > 0);
    }
  }
}

TEST_CASE("models refuse what does not fit, and say what", "[nn]") {
  Draw draw;
  const auto bad = [](auto change) {
    nn::LlamaConfig config = small_llama();
    change(config);
    nn::Llama model(config);
  };
  CHECK_THROWS_AS(bad([](auto& c) { c.n_heads = 3; }), ContractError);
  CHECK_THROWS_AS(bad([](auto& c) { c.n_kv_heads = 3; }), ContractError);
  CHECK_THROWS_AS(bad([](auto& c) { c.n_heads = 16; }), ContractError);  // heads of 1
  CHECK_THROWS_AS(bad([](auto& c) { c.vocab_size = 0; }), ContractError);
  CHECK_THROWS_AS(bad([](auto& c) { c.max_seq_len = -1; }), ContractError);
  nn::Llama model(small_llama(), draw.device);
  const Tensor tokens = draw.tokens({2, 4}, 19);
  CHECK_THROWS_AS(model(draw.tokens({4}, 19)), ContractError);
  CHECK_THROWS_AS(model(draw.tensor({2, 4})), ContractError);
  CHECK_THROWS_AS(model(draw.tokens({1, 13}, 19)), ContractError);
  CHECK_THROWS_AS(model.loss(tokens, draw.tokens({2, 3}, 19)), ContractError);
  nn::Gpt2Config gpt2 = small_gpt2();
  gpt2.n_heads = 5;
  CHECK_THROWS_AS(nn::Gpt2(gpt2), ContractError);
}

TEST_CASE("a loss's gradient that is no number or 0 is refused, however many logits there are") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  nn::Llama model(small_llama());
  nn::init(model, {1}, device);
  const Tensor tokens = Tensor::from(std::vector<std::int32_t>{1, 2, 3}, {1, 3}, device);
  for (const std::int64_t chunk : {std::int64_t{1}, nn::kLossChunk}) {
    model.set_loss_chunk(chunk);
    for (const double gradient : {0., std::nan(""), HUGE_VAL})
      CHECK_THROWS_WITH(model.loss(tokens, tokens, {.gradient = gradient}),
                        Catch::Matchers::Contains("expected a finite number other than 0"));
    CHECK(std::isfinite(model.loss(tokens, tokens, {.gradient = 0.5}).item()));
  }
}
