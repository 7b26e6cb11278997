// Models whose linear layers are stored in 8 bits with a scale a row, and adapters beside them:
// loaded from values in f32 in every way, sharded, kept in files; losses and the adapters' steps
// are those of a model in f32 with the same values.
//
// Llamas have the same bits. GPT-2 fuses a product with its GELU where the weight is f32, and so
// rounds at another place: within 1e-5, in f32.
#include <cmath>
#include <memory>
#include <set>

#include "tessera/autograd/rows_in_8_bits.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/distributed/state.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/nn/fp8.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// U D x beside what a layer gives. Hu and others, "LoRA", 2021.
struct BesideLinear : nn::Module {
  explicit BesideLinear(nn::Linear& layer)
      : down({2, layer.weight.shape()[1]}, Initializer::normal(0, 0.5)),
        up({layer.weight.shape()[0], 2}, Initializer::normal(0, 0.5)) {
    register_parameter("down", down);
    register_parameter("up", up);
    layer.register_module("adapter", *this);
    layer.register_forward_hook(
        [this](nn::Module&, const nn::CallTensors& in, const nn::CallTensors& out) {
          out[0] = out[0] + linear(linear(in[0], down, {}), up, {});
        });
  }
  Parameter down, up;
};

enum class Of : std::uint8_t { llama, fused_llama, gpt2 };

std::unique_ptr<nn::LanguageModel> base_model(Of of) {
  if (of == Of::gpt2)
    return std::make_unique<nn::Gpt2>(nn::Gpt2Config{.dim = 8,
                                                     .n_layers = 2,
                                                     .n_heads = 2,
                                                     .vocab_size = kSmallWords,
                                                     .max_seq_len = kSmallLength});
  nn::LlamaConfig config = small_llama(2);
  if (of == Of::fused_llama) config.projections = nn::Projections::fused;
  return std::make_unique<nn::Llama>(config);
}

// The base's values in f32, drawn, whole, by the names of its kind.
StateDict base_values(Of of) {
  const auto model = base_model(of);
  nn::init(*model, {7}, Device::cpu({.executor = ExecutorKind::inlined}));
  return model->state_dict({.memory = StateMemory::host});
}

std::vector<nn::Linear*> linears_of(nn::Module& model) {
  std::vector<nn::Linear*> layers;
  for (const auto& [name, module] : model.named_modules())
    if (auto* const layer = dynamic_cast<nn::Linear*>(module);
        layer && layer->weight.defined() && !layer->weight.is_shared())
      layers.push_back(layer);
  return layers;
}

std::vector<nn::Embedding*> tables_of(nn::Module& model) {
  std::vector<nn::Embedding*> tables;
  for (const auto& [name, module] : model.named_modules())
    if (auto* const table = dynamic_cast<nn::Embedding*>(module);
        table && !table->weight.is_shared())
      tables.push_back(table);
  return tables;
}

// What is stored in 8 bits, as the values of its codes. By one thread, whose tensors these are.
StateDict rounded(StateDict values, Of of, bool with_tables) {
  const auto model = base_model(of);
  std::set<const nn::Module*> layers;
  for (nn::Linear* const layer : linears_of(*model)) layers.insert(layer);
  if (with_tables)
    for (nn::Embedding* const table : tables_of(*model)) layers.insert(table);
  for (const auto& [name, module] : model->named_modules())
    if (layers.contains(module)) {
      StateTensor& weight = values.at(name + ".weight");
      const auto [codes, scales] = encode_rows(weight.values);
      weight = decode_rows(codes, scales, f32);
    }
  return values;
}

struct EightBits {
  bool is_encoded = true;  // else f32, with the values of codes
  DType param = f32;
  Offload offload = Offload::none;
  bool with_tables = false;  // embeddings, too
  bool is_sliced = false;    // heads and tables in slices of two rows of each rank
};

struct EightBitsJob {
  EightBitsJob(World& world, Of of, const EightBits& how) : world(world), model(base_model(of)) {
    if (how.is_encoded)
      stored = nn::store_in_8_bits(*model);
    else
      for (nn::Linear* const layer : linears_of(*model)) layer->weight.freeze();
    for (nn::Embedding* const table : tables_of(*model))
      if (!how.with_tables)
        continue;
      else if (how.is_encoded)
        table->store_in_8_bits();
      else
        table->weight.freeze();
    // A loss in slices hides what heads give, and GPT-2's others pass GELU on beside x.
    for (nn::Linear* const layer : linears_of(*model))
      if (!layer->weight.is_streamed() &&
          (of != Of::gpt2 || layer->weight.name().find("attn") != std::string::npos))
        adapters.push_back(std::make_unique<BesideLinear>(*layer));
    shard_parts(*model, {.mesh = DeviceMesh::flat(world),
                         .precision = {.param = how.param},
                         .slice_bytes = slice_bytes(how),
                         .offload = how.offload});
    nn::init(*model, {11}, world.device());  // the adapters
  }
  // The same rows in both dtypes, so that sums have one order.
  std::int64_t slice_bytes(const EightBits& how) const {
    const std::int64_t element =
        how.is_encoded ? 1 : static_cast<std::int64_t>(size_bytes(how.param));
    return how.is_sliced ? 2 * 8 * world.size() * element : 0;
  }
  void load(const StateDict& values) { loaded = model->load(values, {.strict = false}); }
  Tensor loss() {
    std::vector<std::int32_t> ids;
    for (std::int32_t i = 0; i < 5; ++i)
      ids.push_back((3 * i + world.rank()) % static_cast<std::int32_t>(kSmallWords));
    const Tensor all = Tensor::from(ids, {1, 5}, world.device());
    return model->loss(raw::slice(all, 1, 0, 4), raw::slice(all, 1, 1, 5));
  }
  std::vector<double> train(int steps) {
    optim::AdamW optimizer(model->parameters(), {.lr = 0.01});
    std::vector<double> losses;
    for (int k = 0; k < steps; ++k) {
      const Tensor l = loss();
      l.backward();
      losses.push_back(l.item());
      optimizer.step();
      optimizer.zero_grad();
    }
    return losses;
  }

  const World& world;
  std::unique_ptr<nn::LanguageModel> model;
  std::vector<std::unique_ptr<BesideLinear>> adapters;
  std::vector<std::string> stored;
  LoadReport loaded;
};

}  // namespace

TEST_CASE("adapters train over a base in 8 bits as over its values in f32", "[threads]") {
  for (const Of of : {Of::llama, Of::fused_llama, Of::gpt2}) {
    const StateDict values = base_values(of);
    for (const DType param : {f32, bf16}) {
      if (of == Of::gpt2 && param == bf16) continue;
      for (const int ranks : {1, 2, 3})
        for (const int cell : {0, 1, 2, 3}) {
          const Offload offload = cell == 1 ? Offload::cpu : Offload::none;
          CAPTURE(static_cast<int>(of), param, ranks, cell);
          struct Found {
            std::vector<double> losses;
            std::int64_t weights = 0, expected = 0;
          };
          const auto run = [&](bool is_encoded) {
            const EightBits how{is_encoded, param, offload, cell > 0, cell == 3};
            const StateDict given = is_encoded ? values : rounded(values, of, how.with_tables);
            return on_ranks(ranks, [&](World& world) {
              EightBitsJob job(world, of, how);
              job.load(given);
              Found found{.losses = job.train(4)};
              for (const Parameter& p : job.model->parameters())
                found.expected +=
                    (p.spec().chunk_numel() * static_cast<std::int64_t>(size_bytes(p.dtype())) +
                     255) /
                    256 * 256;
              const Device& device = world.device();
              found.weights = Memory::of(offload == Offload::cpu ? device.host() : device)
                                  .ledger()
                                  .live_bytes("weights");
              for (nn::Linear* const layer : linears_of(*job.model))
                TESSERA_EXPECT(layer->weight.dtype() == (is_encoded ? e4m3 : f32) &&
                                   layer->weight_scale.defined() == is_encoded,
                               "stored otherwise");
              for (nn::Embedding* const table : tables_of(*job.model))
                TESSERA_EXPECT(table->weight_scale.defined() == (is_encoded && how.with_tables),
                               "stored otherwise");
              return found;
            });
          };
          const auto own = run(true), wide = run(false);
          for (std::size_t rank = 0; rank < own.size(); ++rank) {
            for (std::size_t k = 0; k < own[rank].losses.size(); ++k)
              CHECK(std::abs(own[rank].losses[k] - wide[rank].losses[k]) <=
                    (of == Of::gpt2 ? 1e-5 : 0));
            CHECK(own[rank].losses.back() != own[rank].losses.front());  // adapters have moved
            CHECK(own[rank].weights == own[rank].expected);
          }
        }
    }
  }
}

TEST_CASE("a base in 8 bits is encoded by every load, and kept as it is", "[threads]") {
  for (const Of of : {Of::llama, Of::fused_llama, Of::gpt2}) {
    CAPTURE(static_cast<int>(of));
    const TemporaryFolder folder;
    const std::string file = folder / "base.safetensors", steps = folder / "steps";
    const StateDict values = base_values(of);
    on_ranks(1, [&](World& world) {
      const auto model = base_model(of);
      nn::init(*model, {7}, world.device());
      checkpoint::save_weights(file, *model, world);
      return 0;
    });
    struct Found {
      Values from_dict, from_file, from_rank_0, from_own;
      std::vector<std::string> missing;
    };
    const auto found = on_ranks(2, [&](World& world) {
      Found f;
      EightBitsJob dict(world, of, {});
      dict.load(values);
      f.missing = dict.loaded.missing;
      f.from_dict = full_values(*dict.model);
      EightBitsJob files(world, of, {});
      files.model->load(file, {.strict = false});
      f.from_file = full_values(*files.model);
      EightBitsJob sent(world, of, {});
      sent.model->load(world.rank() == 0 ? values : StateDict{},
                       {.strict = false, .from_rank_0 = &world});
      f.from_rank_0 = full_values(*sent.model);
      EightBitsJob own(world, of, {});
      own.model->load(dict.model->state_dict());
      f.from_own = full_values(*own.model);
      checkpoint::save(steps, 1, {checkpoint::part(*dict.model, world)}, {}, world);
      return f;
    });
    const Values& expected = found[0].from_dict;
    std::size_t compared = 0;
    for (const auto& [name, value] : values) {  // against one that is encoded here
      if (!expected.contains(name + "_scale")) continue;
      const auto [codes, scales] = encode_rows(value.values);
      CHECK(same_bits(expected.at(name), raw::cast(codes, f32).to_vector<float>()));
      CHECK(same_bits(expected.at(name + "_scale"), scales.to_vector<float>()));
      ++compared;
    }
    CHECK(compared == (of == Of::llama ? 15 : of == Of::fused_llama ? 9 : 8));  // with the head
    for (const Found& f : found) {
      CHECK(same_bits(f.from_dict, expected));
      CHECK(same_bits(f.from_file, expected));
      CHECK(same_bits(f.from_rank_0, expected));
      CHECK(same_bits(f.from_own, expected));
      for (const std::string& name : f.missing) CHECK_THAT(name, Contains(".adapter."));
    }
    for (const int ranks : {1, 3})
      for (const Values& loaded : on_ranks(ranks, [&](World& world) {
             EightBitsJob job(world, of, {});
             job.model->load(*checkpoint::Checkpoint(steps, 1).part("model"));
             return full_values(*job.model);
           }))
        CHECK(same_bits(loaded, expected));
  }
}

TEST_CASE("which layers are stored in 8 bits, and what can't be") {
  nn::Llama model(small_llama(2));
  CHECK(nn::store_in_8_bits(model, {.skip = {"layers.1", "down_proj"}}).size() == 7);
  CHECK(model.blocks[0].mlp.up_proj.weight.dtype() == e4m3);
  CHECK_FALSE(model.blocks[0].mlp.up_proj.weight.trainable());
  CHECK(model.blocks[0].mlp.up_proj.weight_scale.shape() == Shape{12, 1});
  CHECK_FALSE(model.blocks[1].mlp.up_proj.weight_scale.defined());
  CHECK(model.head.weight_scale.shape() == Shape{kSmallWords, 1});
  CHECK_FALSE(model.embedding.weight_scale.defined());
  model.embedding.store_in_8_bits();
  CHECK(model.embedding.weight_scale.shape() == Shape{kSmallWords, 1});
  CHECK_THROWS_WITH(nn::store_in_8_bits(model, {.skip = {"w1"}}),
                    Contains("store_in_8_bits: no linear layer has 'w1'"));
  nn::Llama tied(small_llama(2, nn::Recompute::none, true));
  CHECK(nn::store_in_8_bits(tied).size() == 14);
  const auto is_refused =
      Contains("belongs to several modules, as a tied head's does; make a model");
  CHECK_THROWS_WITH(tied.head.store_in_8_bits(), is_refused);
  CHECK_THROWS_WITH(tied.embedding.store_in_8_bits(), is_refused);
  CHECK(tied.embedding.weight.trainable());
  CHECK_THROWS_WITH(nn::Linear().store_in_8_bits(), Contains("the layer has no weight"));
  nn::Linear wide(32, 32, {}, Device::meta());
  wide.store_in_8_bits();
  CHECK_THROWS_WITH(wide.product.set_fp8(Fp8Recipe::tensorwise), Contains("stored in 8 bits"));
  nn::Linear made(4, 4, Device::cpu());
  CHECK_THROWS_WITH(made.store_in_8_bits(), Contains("has memory; call it before materialize"));
  CHECK(made.weight.trainable());
}

TEST_CASE("a file with scales of some parts of a fused layer alone is refused as a whole") {
  const TemporaryFolder folder;
  const std::string file = folder / "base.safetensors";
  struct Found {
    std::string said;
    bool is_untouched = false;
  };
  const Found found = on_ranks(1, [&](World& world) {
    const auto separate = base_model(Of::llama), fused = base_model(Of::fused_llama);
    nn::store_in_8_bits(*separate, {.skip = {"k_proj"}});
    nn::init(*separate, {7}, world.device());
    checkpoint::save_weights(file, *separate, world);
    nn::store_in_8_bits(*fused);
    nn::init(*fused, {8}, world.device());
    const Values before = full_values(*fused);
    Found f;
    try {
      fused->load(file, {.strict = false});
    } catch (const DataError& error) {
      f.said = error.what();
    }
    f.is_untouched = same_bits(before, full_values(*fused));
    return f;
  })[0];
  CHECK_THAT(found.said, Contains("has scales of some parts of '") && Contains("or of none"));
  CHECK(found.is_untouched);
}

TEST_CASE("codes that come without their scales are not taken for values") {
  struct One : nn::Module {
    One() { register_module("up", up), up.store_in_8_bits(); }
    nn::Linear up{4, 3, {.bias = false}};
  } model, other;
  model.materialize(Device::cpu());
  other.materialize(Device::cpu());
  nn::init(other, {7});
  StateDict codes = other.state_dict();
  codes.erase("up.weight_scale");
  CHECK_THROWS_WITH(model.load(codes), Contains("up.weight_scale"));
}

TEST_CASE("a model without scales does not take codes for values, also where a load is not strict",
          "[nn]") {
  struct One : nn::Module {
    explicit One(bool stores) {
      register_module("up", up);
      if (stores) up.store_in_8_bits();
    }
    nn::Linear up{4, 3, {.bias = false}};
  } codes(true), plain(false);
  codes.materialize(Device::cpu());
  plain.materialize(Device::cpu());
  nn::init(codes, {7});
  CHECK_THROWS_WITH(plain.load(codes.state_dict(), {.strict = false}),
                    Contains("has 'up.weight' in 8 bits") && Contains("store_in_8_bits"));
}

TEST_CASE("a dict without the values of a layer in 8 bits misses both", "[nn]") {
  struct One : nn::Module {
    One() { register_module("up", up), up.store_in_8_bits(); }
    nn::Linear up{4, 3, {.bias = false}};
  } model;
  model.materialize(Device::cpu());
  CHECK_THROWS_WITH(model.load(StateDict()), Contains("no tensor 'up.weight' and 1 more"));
  const Tensor scales = Tensor::full({3, 1}, 2, f32, Device::cpu());
  CHECK(model.load({{"up.weight_scale", scales}}, {.strict = false}).missing ==
        std::vector<std::string>{"up.weight"});
  CHECK(model.up.weight_scale.shard().to_vector<float>() == std::vector<float>(3, 2));
}

TEST_CASE("nn::init encodes what it draws for a base in 8 bits", "[threads]") {
  for (const Of of : {Of::llama, Of::fused_llama, Of::gpt2}) {
    const StateDict values = base_values(of);
    for (const int ranks : {1, 2, 3})
      for (const bool by_columns : {false, true}) {
        if (by_columns && ranks != 2) continue;
        CAPTURE(static_cast<int>(of), ranks, by_columns);
        const auto found = on_ranks(ranks, [&](World& world) {
          const auto model = base_model(of);
          nn::store_in_8_bits(*model);
          for (nn::Embedding* const table : tables_of(*model)) table->store_in_8_bits();
          ShardOptions options{.mesh = DeviceMesh::flat(world)};
          if (by_columns)
            options.shard_placement_fn = [](const Parameter& p) {
              const bool cuts_rows = !p.is_streamed() && p.dtype() == e4m3 && p.shape()[1] % 2 == 0;
              return Shard{cuts_rows ? 1 : 0};
            };
          shard_parts(*model, options);
          nn::init(*model, {7}, world.device());
          return full_values(*model);
        });
        int compared = 0;
        for (const Values& own : found)
          for (const auto& [name, value] : values) {
            if (!own.contains(name + "_scale")) {
              CHECK(same_bits(own.at(name), raw::cast(value.values, f32).to_vector<float>()));
              continue;
            }
            const auto [codes, scales] = encode_rows(value.values);
            CHECK(same_bits(own.at(name), raw::cast(codes, f32).to_vector<float>()));
            CHECK(same_bits(own.at(name + "_scale"), scales.to_vector<float>()));
            ++compared;
          }
        CHECK(compared == ranks * (of == Of::llama ? 16 : of == Of::fused_llama ? 10 : 9));
      }
  }
}
