// Whole models in files: the same file from any number of ranks, the same values on any other, and
// nothing taken from a file that does not fit.
#include "tessera/checkpoint/model.hpp"

#include <bit>
#include <cstring>
#include <optional>
#include <tuple>

#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tessera/nn/llama.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::testing;
using checkpoint::SafetensorsEntry;
using checkpoint::SafetensorsReader;
using checkpoint::SafetensorsWriter;
using testing::TemporaryFolder;

namespace {

using MakeModel = std::function<std::unique_ptr<nn::LanguageModel>()>;

// Sizes that no number of ranks divides.
MakeModel llama(bool tied, nn::Projections projections = nn::Projections::separate) {
  return [tied, projections] {
    return std::make_unique<nn::Llama>(nn::LlamaConfig{.dim = 6,
                                                       .n_layers = 1,
                                                       .n_heads = 1,
                                                       .ffn_dim = 5,
                                                       .vocab_size = 7,
                                                       .tie_embeddings = tied,
                                                       .projections = projections});
  };
}
std::unique_ptr<nn::LanguageModel> gpt2() {
  return std::make_unique<nn::Gpt2>(
      nn::Gpt2Config{.dim = 6, .n_layers = 1, .n_heads = 3, .vocab_size = 7, .max_seq_len = 3});
}

// The model on `world`, with values that belong to `seed`. `dim`: of matrices that are cut.
std::unique_ptr<nn::LanguageModel> built(const MakeModel& make, const World& world,
                                         std::uint64_t seed, std::int64_t slice_bytes = 0,
                                         int dim = 0) {
  auto model = make();
  const ShardOptions options{.mesh = DeviceMesh::flat(world),
                             .slice_bytes = slice_bytes,
                             .shard_placement_fn = [&](const Parameter& p) {
                               const bool fits =
                                   p.shape().ndim() == 2 && p.shape()[1] % world.size() == 0;
                               return Shard{fits && !p.is_streamed() ? dim : 0};
                             }};
  for (nn::Module* part : model->parts()) fully_shard(*part, options);
  fully_shard(*model, options);
  model->materialize(world.device());
  nn::init(*model, {seed});
  return model;
}

// Saves the values of `seed` from `ranks` ranks, and returns them.
Values save(const std::string& path, const MakeModel& make, int ranks, std::uint64_t seed) {
  return on_ranks(ranks, [&](World& world) {
    const auto model = built(make, world, seed);
    checkpoint::save_weights(path, *model, world);
    return full_values(*model);
  })[0];
}

// What a model of one rank says about a file; empty where it takes it.
std::string refusal(const std::string& path, const MakeModel& make) {
  const World world = World::single({.threads = 1});
  const auto model = built(make, world, 1);
  try {
    checkpoint::load_weights(path, *model);
  } catch (const DataError& error) {
    CHECK(std::string(error.what()).find(path) != std::string::npos);
    return error.what();
  }
  return "";
}

// Writes the entries of `file` to another one as `change` leaves them, and returns its path.
using Change = std::function<void(std::vector<SafetensorsEntry>&)>;
std::string rewritten(const TemporaryFolder& folder, const SafetensorsReader& file,
                      const Change& change) {
  auto entries = file.entries();
  change(entries);
  const std::string path = folder / "changed.safetensors";
  SafetensorsWriter writer(path, entries);
  const SafetensorsReader& source = file;
  for (const SafetensorsEntry& entry : entries) {
    std::size_t bytes = size_bytes(entry.dtype);
    for (const std::int64_t extent : entry.shape) bytes *= static_cast<std::size_t>(extent);
    std::vector<std::byte> data(bytes);
    if (const SafetensorsEntry* own = source.find(entry.name)) {
      const auto values = source.bytes(*own);
      std::memcpy(data.data(), values.data(), std::min(values.size(), bytes));
    }
    writer.write(entry.name, data);
  }
  writer.commit();
  return path;
}

SafetensorsEntry& entry_of(std::vector<SafetensorsEntry>& entries, std::string_view name) {
  return *std::ranges::find(entries, name, &SafetensorsEntry::name);
}

}  // namespace

TEST_CASE("a model is saved as one file from any number of ranks, and loaded on any other",
          "[checkpoint]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const TemporaryFolder folder;
  for (const MakeModel& make : {llama(false), llama(true), MakeModel(gpt2)}) {
    std::optional<std::string> file;
    for (const int ranks : {1, 2, 3}) {
      const Values saved = save(folder / "model", make, ranks, seed);
      CHECK(file.value_or(folder.read("model")) == folder.read("model"));
      file = folder.read("model");
      for (const int readers : {1, 2, 4}) {
        INFO(ranks << " ranks write, " << readers << " read");
        const auto loaded = on_ranks(readers, [&](World& world) {
          const auto model = built(make, world, seed + 1);
          checkpoint::load_weights(folder / "model", *model);
          world.barrier();
          return full_values(*model);
        });
        CHECK(same_bits(loaded[0], saved));
      }
    }
  }
}

// 18 rows of q, k and v, and 10 of gate and up: on 2 and 4 ranks there are chunks with rows of two
// parts. Initial values are the same, too, for either form and any number of ranks.
TEST_CASE("fused projections are the same file as separate ones, and take each other's",
          "[checkpoint]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const TemporaryFolder folder;
  const MakeModel forms[] = {llama(false), llama(false, nn::Projections::fused)};
  save(folder / "model", forms[0], 1, seed);
  const std::string expected = folder.read("model");
  for (const MakeModel& make : forms)
    for (const int ranks : {1, 2, 4})
      for (const int dim : {0, 1}) {
        if (dim == 1 && ranks == 4) continue;  // does not divide the width
        INFO(ranks << " ranks, cut along " << dim << ", fused " << (&make == &forms[1]));
        on_ranks(ranks, [&](World& world) {
          const auto model = built(make, world, seed, 0, dim);
          checkpoint::save_weights(folder / "drawn", *model, world);
          nn::init(*model, {seed + 1});
          checkpoint::save_weights(folder / "other", *model, world);
          checkpoint::load_weights(folder / "model", *model);
          checkpoint::save_weights(folder / "loaded", *model, world);
          nn::init(*model, {seed + 1});
          const std::string none = folder / "none";
          model->load(world.rank() == 0 ? folder / "model" : none, {.from_rank_0 = &world});
          checkpoint::save_weights(folder / "sent", *model, world);
          return 0;
        });
        for (const char* const file : {"drawn", "loaded", "sent"}) {
          INFO(file);
          CHECK((folder.read(file) == expected));
        }
        CHECK((folder.read("other") != expected));
      }
}

TEST_CASE("a file with some parts of a parameter is refused, and so is another form's optimizer",
          "[checkpoint]") {
  const TemporaryFolder folder;
  const MakeModel fused = llama(false, nn::Projections::fused);
  save(folder / "model", fused, 1, 5);
  const SafetensorsReader file(folder / "model");
  const std::string attention = "model.layers.0.self_attn.";
  const auto verdict = [&](const Change& change) {
    return refusal(rewritten(folder, file, change), fused);
  };
  const auto without = [&](std::initializer_list<const char*> parts) {
    return [&, parts](auto& entries) {
      for (const char* const part : parts)
        std::erase_if(entries, [&](const SafetensorsEntry& e) {
          return e.name == attention + part + ".weight";
        });
    };
  };
  CHECK(refusal(folder / "model", fused).empty());
  CHECK(has(verdict(without({"k_proj"})),
            "holds '" + attention + "q_proj.weight' but not '" + attention +
                "k_proj.weight', and the model joins both in '" + attention + "qkv_proj.weight'"));
  CHECK(has(verdict(without({"q_proj", "k_proj", "v_proj"})),
            "has no tensor '" + attention + "qkv_proj.weight'"));
  CHECK(has(verdict([&](auto& e) { entry_of(e, attention + "v_proj.weight").shape = {6, 5}; }),
            "is [6, 5] of f32, the model has [6, 6]"));
  CHECK(verdict([](auto& entries) {  // as public files, without the prefix
          for (SafetensorsEntry& e : entries)
            if (e.name.starts_with("model.")) e.name = e.name.substr(6);
        })
            .empty());
  CHECK(has(verdict([&](auto& e) { e.push_back({.name = attention + "qkv_proj.weight"}); }),
            "is [] of f32, the model has [18, 6]"));

  const World world = World::single({.threads = 1});
  const auto model = built(fused, world, 5), other = built(llama(false), world, 5);
  optim::AdamW own(model->parameters()), others(other->parameters());
  checkpoint::save_state(folder / "adamw", own.state_dict(*model), world);
  CHECK_THROWS_WITH(others.load(*other, checkpoint::WeightFiles(folder / "adamw")),
                    Catch::Contains("has no tensor '" + attention + "q_proj.weight.lr_factor'"));
  own.load(*model, checkpoint::WeightFiles(folder / "adamw"));
}

TEST_CASE("a model whose tables are cut into slices is saved whole, and loaded into them",
          "[checkpoint]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const TemporaryFolder folder;
  const auto loss_of = [](nn::LanguageModel& model, const Device& device) {
    const NoGradGuard no_gradient;
    const Tensor tokens = raw::reshape(Tensor::arange(6, i32, device), {2, 3});
    return model.loss(tokens, tokens).item();
  };
  for (const MakeModel& make : {llama(false), llama(true), MakeModel(gpt2)}) {
    save(folder / "whole", make, 1, seed);
    for (const int ranks : {2, 3})
      for (const auto& [slices, saved, before, loaded] : on_ranks(ranks, [&](World& world) {
             // Slices are there from the first call on.
             const auto model = built(make, world, seed, 1),
                        other = built(make, world, seed + 1, 1);
             const double loss = loss_of(*model, world.device()),
                          unlike = loss_of(*other, world.device());
             checkpoint::save_weights(folder / "slices", *model, world);
             checkpoint::load_weights(folder / "slices", *other);
             world.barrier();
             int most = 0;
             for (const Parameter& p : other->parameters()) most = std::max(most, p.slices());
             return std::tuple(most, loss, unlike, loss_of(*other, world.device()));
           })) {
        INFO(ranks << " ranks");
        CHECK(slices == (7 + ranks - 1) / ranks);  // a row of each rank's chunk
        CHECK(saved != before);
        CHECK(saved == loaded);
      }
    CHECK(folder.read("slices") == folder.read("whole"));
  }
}

// A scalar lies on every rank, and is rank 0's.
TEST_CASE("a scalar is loaded from its own bytes on every rank", "[checkpoint]") {
  const TemporaryFolder folder;
  for (const bool saves : {true, false}) {
    const auto offsets = on_ranks(saves ? 1 : 3, [&](World& world) {
      Stack stack({2, 3});
      stack.shard({.mesh = DeviceMesh::flat(world)});
      stack.materialize(world.device());
      nn::init(stack, {saves ? 1u : 2u});
      if (saves) {
        stack.offset.assign(Tensor::full({}, 0.25, f32, world.device()));
        checkpoint::save_weights(folder / "stack", stack, world);
      } else {
        checkpoint::load_weights(folder / "stack", stack);
      }
      return stack.offset.shard().to_vector<float>()[0];
    });
    for (const float offset : offsets) CHECK(offset == 0.25f);
  }
}

TEST_CASE("the file has every parameter once, and GPT-2's layers as [in, out]", "[checkpoint]") {
  const TemporaryFolder folder;
  const Values saved = save(folder / "model", gpt2, 2, 5);
  const SafetensorsReader file(folder / "model");
  CHECK(file.entries().size() == saved.size());
  CHECK(file.metadata().at("format") == "pt");
  CHECK(file.find("lm_head.weight") == nullptr);  // tied
  const std::string name = "transformer.h.0.attn.c_attn.weight";
  const SafetensorsEntry* const entry = file.find(name);
  REQUIRE(entry != nullptr);
  CHECK(entry->shape == std::vector<std::int64_t>{6, 18});
  const auto bytes = file.bytes(*entry);
  for (std::size_t i = 0; i < 6; ++i)
    for (std::size_t j = 0; j < 18; ++j) {
      float value;
      std::memcpy(&value, bytes.data() + (i * 18 + j) * sizeof value, sizeof value);
      CHECK(value == saved.at(name)[j * 6 + i]);
    }
}

TEST_CASE("any floating dtype becomes f32", "[checkpoint]") {
  const TemporaryFolder folder;
  save(folder / "model", llama(false), 1, 5);
  const SafetensorsReader file(folder / "model");
  for (const DType dtype : {bf16, f16, f64}) {
    const std::string path =
        rewritten(folder, file, [&](auto& e) { entry_of(e, "model.norm.weight").dtype = dtype; });
    const SafetensorsReader changed(path);
    const World world = World::single({.threads = 1});
    const auto model = built(llama(false), world, 1);
    checkpoint::load_weights(path, *model);
    const auto bytes = changed.bytes(*changed.find("model.norm.weight"));
    const std::vector<float> got = full_values(*model).at("model.norm.weight");
    visit(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (std::size_t i = 0; i < got.size(); ++i) {
        T value;
        std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
        const auto expected = static_cast<float>(value);
        CHECK(std::bit_cast<std::uint32_t>(got[i]) == std::bit_cast<std::uint32_t>(expected));
      }
    });
  }
}

TEST_CASE("a file that does not fit is named, with the parameter", "[checkpoint]") {
  const TemporaryFolder folder;
  save(folder / "model", llama(false), 1, 5);
  const SafetensorsReader file(folder / "model");
  const auto verdict = [&](const Change& change) {
    return refusal(rewritten(folder, file, change), llama(false));
  };
  CHECK(refusal(folder / "model", llama(false)).empty());
  CHECK(has(refusal(folder / "model", gpt2), "has no tensor 'transformer.wpe.weight' and 14 more"));
  CHECK(has(refusal(folder / "model", llama(true)), "holds 'lm_head.weight', which the model"));
  CHECK(has(verdict([](auto& e) { e.erase(e.begin()); }), "has no tensor '"));
  CHECK(has(verdict([](auto& e) { e.push_back({.name = "more"}); }), "holds 'more', which"));
  CHECK(has(verdict([](auto& e) { entry_of(e, "model.norm.weight").shape = {2, 3}; }),
            "is [2, 3] of f32, the model has [6]"));
  CHECK(has(verdict([](auto& e) { entry_of(e, "model.norm.weight").dtype = i32; }),
            "is of i32, but weights are floating; convert it"));
}

TEST_CASE("a tied parameter may stand under each of its names, with the same bytes",
          "[checkpoint]") {
  const TemporaryFolder folder;
  save(folder / "model", llama(true), 1, 5);
  const SafetensorsReader file(folder / "model");
  const SafetensorsEntry& embedding = *file.find("model.embed_tokens.weight");
  for (const bool same : {true, false}) {
    auto entries = file.entries();
    entries.push_back(embedding);
    entries.back().name = "lm_head.weight";
    SafetensorsWriter writer(folder / "both", entries);
    for (const SafetensorsEntry& entry : file.entries())
      writer.write(entry.name, file.bytes(entry));
    const auto head = file.bytes(embedding);
    std::vector<std::byte> copy(head.begin(), head.end());
    if (!same) copy.back() ^= std::byte{1};
    writer.write("lm_head.weight", copy);
    writer.commit();
    const std::string said = refusal(folder / "both", llama(true));
    CHECK(said.empty() == same);
    if (!same) CHECK(has(said, "'lm_head.weight'"));
  }
}

TEST_CASE("what an optimizer keeps is one file from any number of ranks, loaded on any other",
          "[checkpoint]") {
  const TemporaryFolder folder;
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  std::optional<Values> first;
  for (const int ranks : {2, 1, 3}) {
    INFO(ranks << " ranks");
    const std::string path = folder / "adamw.safetensors";
    const auto found = on_ranks(ranks, [&](World& world) {
      const auto model = built(llama(true), world, seed);
      optim::AdamW optimizer(model->parameters());
      optimizer.prepare();
      if (first)
        optimizer.load(*model, checkpoint::WeightFiles(path));
      else
        for (const auto& [name, p] : model->named_parameters())
          raw::copy_into(optimizer.moments(p)[1], p.shard());
      optimizer.set_steps(first ? optimizer.steps() : 7);
      world.barrier();
      checkpoint::save_state(path, optimizer.state_dict(*model, {.form = StateForm::view}), world);
      Values moments{{"steps", {static_cast<float>(optimizer.steps())}}};
      for (const auto& [name, p] : model->named_parameters())
        moments[name] = optimizer.distributed_moments(p)[1].full().to_vector<float>();
      return moments;
    });
    if (!first) first = found[0];
    CHECK(first->at("steps")[0] == 7);
    for (const Values& moments : found) CHECK(same_bits(moments, *first));
    const SafetensorsReader file(path);
    CHECK(file.entries().size() == 4 * (first->size() - 1) + 2);
    REQUIRE(file.find("steps"));
    CHECK(file.find("steps")->dtype == i64);
  }
}

TEST_CASE("a file that rank 0 alone has is sent to models on meta", "[checkpoint][fsdp2-018]") {
  const TemporaryFolder folder;
  const std::string path = folder / "model.safetensors", none = folder / "none.safetensors";
  const Values saved = save(path, gpt2, 1, 5);
  for (const int ranks : {1, 2, 3}) {
    INFO(ranks << " ranks");
    const auto found = on_ranks(ranks, [&](World& world) {
      const auto model = gpt2();
      for (nn::Module* part : model->parts()) fully_shard(*part, {.mesh = DeviceMesh::flat(world)});
      fully_shard(*model, {.mesh = DeviceMesh::flat(world)});
      std::string said;
      try {
        model->load(none, {.from_rank_0 = &world});
      } catch (const Error& error) {
        said = error.what();
      }
      model->load(world.rank() == 0 ? path : none, {.from_rank_0 = &world});
      return std::pair(said, full_values(*model));
    });
    for (const auto& [said, values] : found) {
      CHECK(same_bits(values, saved));
      CHECK(said.find(none) != std::string::npos);
      CHECK(said.starts_with("rank 0 refuses: ") == (&said != &found[0].first));
    }
  }
}

TEST_CASE("a model without memory is neither saved nor loaded", "[checkpoint]") {
  const TemporaryFolder folder;
  save(folder / "model", gpt2, 1, 5);
  const World world = World::single({.threads = 1});
  const auto model = gpt2();
  CHECK(has(thrown_by([&] { checkpoint::load_weights(folder / "model", *model); }),
            "call materialize on the model first"));
  CHECK(has(thrown_by([&] { checkpoint::save_weights(folder / "other", *model, world); }),
            "call materialize on the model first"));
  CHECK(folder.entries() == 1);
}

TEST_CASE("a parameter of no unit that differs by rank is told where rank 0's alone would be kept",
          "[threads]") {
  const bool differs = GENERATE(false, true);
  const TemporaryFolder folder;
  for (const auto& said : on_ranks(2, [&](World& world) {
         Stack model({4, 4, 4});
         const nn::Linear& own = model.layers[1];
         fully_shard(model, {.mesh = DeviceMesh::flat(world), .ignored = own.parameters()});
         model.materialize(world.device());
         nn::init(model, {1});
         const float value = differs ? 10.f + static_cast<float>(world.rank()) : 10.f;
         own.weight.assign(Tensor::full({4, 4}, value, f32, world.device()));
         const StateDict all = model.state_dict({StateForm::full});
         std::vector said = {
             thrown_by([&] { model.state_dict({StateForm::full, StateRanks::rank_0}); }),
             thrown_by([&] { model.load(all, {.from_rank_0 = &world}); }),
             thrown_by([&] { checkpoint::save_weights(folder / "m.safetensors", model, world); })};
         CHECK(own.weight.shard().to_vector<float>()[0] == value);
         model.load(all);  // each rank's own
         CHECK(own.weight.shard().to_vector<float>()[0] == value);
         return said;
       }))
    for (const std::string& message : said)
      CHECK(message.find("parameter 'layers.1.weight' lies in no unit and has other values") ==
            (differs ? message.find(": ") + 2 : std::string::npos));
}
