// Files as others write them: several with an index, names without a prefix, tensors that nobody
// wants, 16 bits; and indexes that are wrong.
#include <cstring>

#include "runtime/checkpoint/shard_info.hpp"
#include "tessera/checkpoint/model.hpp"
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
using checkpoint::WeightFiles;

namespace {

using Model = std::unique_ptr<nn::LanguageModel>;

Model small_gpt2() {
  return std::make_unique<nn::Gpt2>(
      nn::Gpt2Config{.dim = 6, .n_layers = 2, .n_heads = 3, .vocab_size = 7, .max_seq_len = 3});
}
Model small_llama() {
  return std::make_unique<nn::Llama>(
      nn::LlamaConfig{.dim = 6, .n_layers = 1, .n_heads = 1, .ffn_dim = 5, .vocab_size = 7});
}

Model on(const World& world, Model model, std::uint64_t seed) {
  for (nn::Module* part : model->parts()) fully_shard(*part, {.mesh = DeviceMesh::flat(world)});
  fully_shard(*model, {.mesh = DeviceMesh::flat(world)});
  model->materialize(world.device());
  nn::init(*model, {seed});
  return model;
}

// Tensors with their bytes, to be written in any form.
struct Held {
  SafetensorsEntry entry;
  std::vector<std::byte> bytes;
};
std::vector<Held> held_by(const std::string& path) {
  const SafetensorsReader file(path);
  std::vector<Held> all;
  for (const SafetensorsEntry& entry : file.entries()) {
    const auto bytes = file.bytes(entry);
    all.push_back({entry, {bytes.begin(), bytes.end()}});
  }
  return all;
}
void write(const std::string& path, const std::vector<Held>& all) {
  std::vector<SafetensorsEntry> entries;
  for (const Held& held : all) entries.push_back(held.entry);
  SafetensorsWriter writer(path, entries);
  for (const Held& held : all) writer.write(held.entry.name, held.bytes);
  writer.commit();
}

// A safetensors file of one tensor of any dtype, by hand.
std::string file_of_one(const std::string& name, const std::string& dtype, std::size_t bytes) {
  std::string json = "{\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" +
                     std::to_string(bytes) + "],\"data_offsets\":[0," + std::to_string(bytes) +
                     "]}}";
  std::string length(8, '\0');
  length[0] = static_cast<char>(json.size());
  return length + json + std::string(bytes, '\1');
}

// A folder with a saved model, and what it has.
struct SavedModel {
  TemporaryFolder folder;
  Values values;
  explicit SavedModel(Model (*make)(), const checkpoint::SaveOptions& options = {}) {
    const World world = World::single({.threads = 1});
    const Model model = on(world, make(), 3);
    checkpoint::save_weights(folder / "model.safetensors", *model, world, options);
    values = full_values(*model);
  }
};

// The values after a load on each of `ranks`, all alike; or what it said.
struct Loaded {
  Values values;
  std::string said;
  nn::LoadReport report;
};
Loaded load(const std::string& path, Model (*make)(), int ranks = 1,
            const nn::LoadOptions& options = {}) {
  return on_ranks(ranks, [&](World& world) {
    const Model model = on(world, make(), 8);
    Loaded loaded;
    try {
      loaded.report = model->load(path, options);
    } catch (const DataError& error) {
      loaded.said = error.what();
    }
    world.barrier();
    loaded.values = full_values(*model);
    return loaded;
  })[0];
}

void split(const TemporaryFolder& folder, std::string_view index) {
  std::vector<Held> all = held_by(folder / "model.safetensors"),
                    first(all.begin(), all.begin() + 5);
  write(folder / "a.safetensors", first);
  write(folder / "b.safetensors", {all.begin() + 5, all.end()});
  std::string map;
  for (std::size_t i = 0; i < all.size(); ++i)
    map += concat(i > 0 ? ", " : "", '"', all[i].entry.name, "\": \"",
                  i < 5 ? "a.safetensors" : "b.safetensors", '"');
  folder.write(index,
               "{\"metadata\": {\"total_size\": 12, \"x\": [1, {\"y\": \"}\"}]}, "
               "\"weight_map\": {" +
                   map + "}}\n");
}

}  // namespace

TEST_CASE("GPT-2 loads with its prefix and without, with masks and a head that is tied",
          "[checkpoint]") {
  const SavedModel saved(small_gpt2);
  for (const bool has_prefix : {true, false})
    for (const bool has_more : {true, false}) {
      std::vector<Held> all = held_by(saved.folder / "model.safetensors");
      const std::string prefix = "transformer.";
      if (has_more) {
        const auto table = std::find_if(all.begin(), all.end(), [](const Held& held) {
          return held.entry.name == "transformer.wte.weight";
        });
        all.push_back(*table);
        all.back().entry.name = "lm_head.weight";
        for (const char* const mask : {"h.0.attn.bias", "h.1.attn.bias", "h.1.attn.masked_bias"})
          all.push_back({{.name = prefix + mask, .dtype = boolean, .shape = {1, 1, 3, 3}},
                         std::vector<std::byte>(9)});
      }
      if (!has_prefix)
        for (Held& held : all)
          if (held.entry.name.starts_with(prefix)) held.entry.name.erase(0, prefix.size());
      write(saved.folder / "other", all);
      for (const int ranks : {1, 2, 4}) {
        const Loaded loaded = load(saved.folder / "other", small_gpt2, ranks);
        INFO(loaded.said);
        CHECK(same_bits(loaded.values, saved.values));
        CHECK(loaded.report.unexpected.empty());
      }
    }
}

TEST_CASE("a file with other names is loaded by rules, with its transposed matrices",
          "[checkpoint]") {
  const SavedModel saved(small_gpt2);
  std::vector<Held> all = held_by(saved.folder / "model.safetensors");
  const std::string prefix = "transformer.", blocks = "transformer.h.";
  for (Held& held : all) {
    std::string& name = held.entry.name;
    const bool is_block = name.starts_with(blocks);
    name.replace(0, (is_block ? blocks : prefix).size(), is_block ? "net.blocks." : "net.");
  }
  write(saved.folder / "other", all);
  const nn::LoadOptions options{
      .rename = {{"net.blocks.*", "net.h.*"}, {"net.*", "transformer.*"}}};
  CHECK(load(saved.folder / "other", small_gpt2).said.find("has no tensor") != std::string::npos);
  for (const int ranks : {1, 2, 4}) {
    const Loaded loaded = load(saved.folder / "other", small_gpt2, ranks, options);
    INFO(loaded.said);
    CHECK(same_bits(loaded.values, saved.values));
  }
}

TEST_CASE("without a prefix, what is missing has the model's name, and masks are no excuse",
          "[checkpoint]") {
  const SavedModel saved(small_gpt2);
  std::vector<Held> all = held_by(saved.folder / "model.safetensors");
  std::erase_if(all, [](const Held& held) { return held.entry.name == "transformer.ln_f.bias"; });
  for (Held& held : all) held.entry.name.erase(0, std::string("transformer.").size());
  all.push_back(
      {{.name = "h.0.attn.c_attn.scale", .dtype = f32, .shape = {1}}, std::vector<std::byte>(4)});
  write(saved.folder / "other", all);
  const Loaded strict = load(saved.folder / "other", small_gpt2);
  CHECK(has(strict.said, "has no tensor 'transformer.ln_f.bias'; is it"));
  const Loaded loose = load(saved.folder / "other", small_gpt2, 2, {.strict = false});
  CHECK(loose.said.empty());
  CHECK(loose.report.missing == std::vector<std::string>{"transformer.ln_f.bias"});
  CHECK(loose.report.unexpected == std::vector<std::string>{"h.0.attn.c_attn.scale"});
  CHECK(same_bits(loose.values.at("transformer.wte.weight"),
                  saved.values.at("transformer.wte.weight")));
}

TEST_CASE("a dtype that none of ours is may stand in a file, but not be loaded", "[checkpoint]") {
  const TemporaryFolder folder;
  struct Bytes : nn::Module {
    Bytes() { register_parameter("w", w); }
    bool is_left_in_files(std::string_view name) const override { return name == "mask"; }
    Parameter w{Shape{4}, Initializer::constant(2)};
  } module;
  module.materialize(Device::cpu());
  for (const char* const dtype : {"U8", "I8", "F8_E8M0"}) {
    const std::string mask = folder.write("mask", file_of_one("mask", dtype, 4)),
                      weight = folder.write("weight", file_of_one("w", dtype, 4));
    const nn::LoadReport report = module.load(mask, {.strict = false});
    CHECK(report.unexpected.empty());
    CHECK(report.missing == std::vector<std::string>{"w"});
    CHECK_THROWS_WITH(module.load(weight),
                      Catch::Contains(std::string("is of ") + (dtype[0] == 'U' ? "u8" : dtype) +
                                      ", but weights are floating"));
  }
}

TEST_CASE("a box of a tensor's size that begins elsewhere is not all of it", "[checkpoint]") {
  const TemporaryFolder folder;
  struct One : nn::Module {
    One() { register_parameter("w", w); }
    Parameter w{Shape{4}, Initializer::constant(2)};
  } module;
  module.materialize(Device::cpu());
  const std::vector<float> values(4, 1);
  for (const std::int64_t begin : {0, 2}) {
    checkpoint::ShardInfo info{.id = "0123456789abcdef"};
    info.boxes["w"] = {
        .begin = {begin}, .shape = {4}, .checksums = {checkpoint::checksum_of(values.data(), 16)}};
    const std::string path = folder / "model.safetensors";
    checkpoint::SafetensorsWriter writer(path, {{.name = "w", .dtype = f32, .shape = {4}}},
                                         checkpoint::format_shard_info(info));
    writer.write("w", std::as_bytes(std::span(values)));
    writer.commit();
    if (begin == 0)
      CHECK_NOTHROW(module.load(path));
    else
      CHECK_THROWS_WITH(module.load(path), Catch::Contains("'w'"));
  }
}

TEST_CASE("an index, its folder, or all files by name are one model", "[checkpoint]") {
  const SavedModel saved(small_llama);
  split(saved.folder, "model.safetensors.index.json");
  for (const int ranks : {1, 2, 4}) {
    const Loaded index = load(saved.folder / "model.safetensors.index.json", small_llama, ranks);
    INFO(index.said);
    CHECK(same_bits(index.values, saved.values));
  }
  // Of both in a folder the index is read: the other file is no model now.
  write(saved.folder / "model.safetensors", {});
  CHECK(same_bits(load(saved.folder.path().string(), small_llama).values, saved.values));
  const World world = World::single({.threads = 1});
  const Model model = on(world, small_llama(), 8);
  model->load(
      std::vector<std::string>{saved.folder / "b.safetensors", saved.folder / "a.safetensors"});
  CHECK(same_bits(full_values(*model), saved.values));
}

TEST_CASE("a folder with one file is that file", "[checkpoint]") {
  const SavedModel saved(small_llama);
  CHECK(same_bits(load(saved.folder.path().string(), small_llama).values, saved.values));
}

TEST_CASE("an index of more bytes than a model's may have is refused unread", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string path = folder.write("model.safetensors.index.json", "{}");
  std::filesystem::resize_file(path, 1ll << 40);
  CHECK_THROWS_WITH(checkpoint::WeightFiles(path),
                    Catch::Contains("has 1099511627776 bytes, the most is 100000000; is it"));
}

TEST_CASE("a wrong index is named in one line, and nothing is loaded", "[checkpoint]") {
  const SavedModel saved(small_llama);
  split(saved.folder, "good.json");
  const std::string good = saved.folder.read("good.json");
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const std::size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    return text.replace(at, from.size(), to);
  };
  const std::vector<std::pair<const char*, std::string>> table = {
      {"does not begin with", "[]"},
      {"lacks '{'", ""},
      {"lacks \"weight_map\"", "{}"},
      {"lacks '{'", R"({"weight_map": 3})"},
      {"goes on after its end", good + "{}"},
      {"has a string without an end", good.substr(0, good.size() - 6)},
      {"names 'metadata' twice", changed("\"weight_map\"", "\"metadata\": 1, \"weight_map\"")},
      {"expected the name of a file beside it", changed("\"a.safe", "\"../a.safe")},
      {"expected the name of a file beside it", changed("\"a.safetensors\"", "\"/etc/passwd\"")},
      {"expected the name of a file beside it", changed("\"a.safetensors\"", "\"\"")},
      {"does not exist", changed("\"a.safetensors\"", "\"none\"")},
      {"which does not have it; fetch the files again",
       changed("model.norm.weight", "model.norm.wait")},
      {"which does not have it; fetch the files again",
       changed("\"a.safetensors\"", "\"b.safetensors\"")},
  };
  const World world = World::single({.threads = 1});
  const Model model = on(world, small_llama(), 8);
  const Values before = full_values(*model);
  for (const auto& [said, text] : table) {
    const std::string path = saved.folder.write("bad.json", text);
    std::string got;
    try {
      model->load(path);
    } catch (const DataError& error) {
      got = error.what();
    }
    INFO(said << " | " << got);
    if (std::string(said) != "does not begin with") CHECK(has(got, said));
    CHECK(!got.empty());
    CHECK(got.find('\n') == std::string::npos);
    CHECK(same_bits(full_values(*model), before));
  }
}

TEST_CASE("a tensor that stands in two files is refused", "[checkpoint]") {
  const SavedModel saved(small_llama);
  const std::string path = saved.folder / "model.safetensors";
  CHECK_THROWS_WITH(WeightFiles({path, path}), Catch::Contains("give the files of one model"));
  CHECK_THROWS_AS(WeightFiles(std::vector<std::string>{}), ContractError);
}

TEST_CASE("weights are saved in 16 bits, rounded once, and loaded again", "[checkpoint]") {
  for (const DType dtype : {bf16, f16}) {
    const SavedModel saved(small_gpt2, {.dtype = dtype});
    for (const Held& held : held_by(saved.folder / "model.safetensors"))
      CHECK(held.entry.dtype == dtype);
    for (const int ranks : {1, 2}) {
      const Values got = load(saved.folder / "model.safetensors", small_gpt2, ranks).values;
      for (const auto& [name, values] : saved.values) {
        std::vector<float> rounded;
        for (const float v : values)
          rounded.push_back(dtype == bf16 ? static_cast<float>(BFloat16(v))
                                          : static_cast<float>(Float16(v)));
        CHECK(same_bits(got.at(name), rounded));
      }
    }
  }
  const World world = World::single({.threads = 1});
  const Model model = on(world, small_gpt2(), 1);
  const TemporaryFolder folder;
  CHECK_THROWS_WITH(checkpoint::save_weights(folder / "x", *model, world, {.dtype = f64}),
                    Catch::Contains("dtype is f64; expected f32, bf16 or f16"));
  CHECK(folder.entries() == 0);
}

TEST_CASE("buffers are saved as rank 0 has them, with their dtypes, and loaded on all",
          "[checkpoint]") {
  struct Counted : nn::Module {
    Counted() {
      register_module("up", up);
      register_buffer("mean", mean);
      register_buffer("count", count);
      register_buffer("mask", mask);
      register_buffer("table", table, nn::Persistent::no);
    }
    nn::Linear up{2, 3};
    nn::Buffer mean{{2}, Initializer::constant(0)}, count{{}, Initializer::constant(0), i64},
        mask{{2}, Initializer::by_index([](std::int64_t i) { return double(i); }), boolean},
        table{{2}, Initializer::constant(1)};
  };
  const TemporaryFolder folder;
  run_checked(2, {.threads = 1}, [&](World& world) {
    Counted module;
    fully_shard(module, {.mesh = DeviceMesh::flat(world)});
    module.materialize(world.device());
    module.mean.assign(Tensor::full({2}, 0.1 + world.rank(), f32, world.device()));
    module.count.assign(Tensor::full({}, (1ll << 40) + world.rank(), i64, world.device()));
    checkpoint::save_weights(folder / "model", module, world, {.dtype = bf16});
  });
  const SafetensorsReader file(folder / "model");
  CHECK(file.find("mean")->dtype == f32);
  CHECK(file.find("count")->dtype == i64);
  CHECK(file.find("mask")->dtype == boolean);
  CHECK(file.find("table") == nullptr);
  const auto loaded = on_ranks(3, [&](World& world) {
    Counted module;
    fully_shard(module, {.mesh = DeviceMesh::flat(world)});
    module.materialize(world.device());
    module.mask.assign(Tensor::full({2}, 0, boolean, world.device()));
    module.load(folder / "model");
    return std::tuple(module.mean.value().to_vector<float>(),
                      module.count.value().to_vector<std::int64_t>()[0],
                      raw::cast(module.mask.value(), f32).to_vector<float>());
  });
  for (const auto& [mean, count, mask] : loaded) {
    CHECK(mean == std::vector<float>(2, 0.1f));
    CHECK(count == 1ll << 40);
    CHECK(mask == std::vector<float>{0, 1});
  }
}
