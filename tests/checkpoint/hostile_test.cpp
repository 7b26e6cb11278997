// Checkpoints that were changed, on purpose or by a disk: each is refused with the file, and the
// tensor where it is one's, in one line, or gives what was saved.
#include <algorithm>
#include <functional>

#include "runtime/checkpoint/safetensors_header.hpp"
#include "tests/checkpoint/mutations.hpp"
#include "tests/checkpoint/saved_files.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("a flipped bit or a cut is refused with the file, and the tensor whose data it is") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  Dice dice(seed);
  Saved saved;
  REQUIRE(complaint(saved.folder(), 1) == "");
  const auto stride = GridShare::stride();
  for (std::uint64_t trial = 0; trial < 22000 / stride; ++trial) {
    const fs::path& file = dice.of(saved.files);
    const std::string good = bytes_of(file);
    const auto at = static_cast<std::size_t>(dice.below(static_cast<int>(good.size())));
    const bool is_cut = trial % 11 == 0;
    std::string bad = good;
    if (is_cut)
      bad.resize(at);
    else
      bad[at] = static_cast<char>(bad[at] ^ (1 << dice.below(8)));
    write_to(file, bad);
    const std::string said = complaint(saved.folder(), 1);
    INFO("byte " << at << ", cut " << is_cut);
    check_line(said, file.string());
    if (!is_cut && file.extension() == ".safetensors" && at >= data_begin(good))
      CHECK(
          (has(said, "tensor 'a'") || has(said, "tensor 'b'") || has(said, "tensor 'a.exp_avg'")));
    write_to(file, good);
  }
  CHECK(complaint(saved.folder(), 1) == "");
}

TEST_CASE("files of another save, swapped or foreign are refused by name") {
  Saved saved(2);
  const std::string folder = saved.folder();
  for (const fs::path& file : saved.files) {
    const std::string good = bytes_of(file);
    const fs::path inner = fs::relative(file, saved.step(1));
    // Of the other step: the controls' file of another save.
    write_to(file, bytes_of(saved.step(2) / inner));
    if (file.filename() == "manifest.json")
      CHECK(has(complaint(folder, 1), "is of step 2"));
    else
      check_line(complaint(folder, 1), file.string());
    write_to(file, good);
    if (file.filename() == "manifest.json") continue;
    // Of every other rank and part.
    for (const fs::path& other : saved.files) {
      if (other == file) continue;
      write_to(file, bytes_of(other));
      INFO(file << " is " << other);
      // The first that is read is named, which of two equal headers may be the other.
      check_line(complaint(folder, 1), "step-1/");
      write_to(file, good);
    }
    // Of other programs: without our metadata, in the size of ours where they can have it.
    for (const char* const metadata : {"", R"("__metadata__":{"format":"pt"})"}) {
      std::string json = concat('{', metadata, '}');
      json.resize(data_begin(good) - 8, ' ');
      std::string foreign = good;
      foreign.replace(8, json.size(), json);
      write_to(file, foreign);
      check_line(complaint(folder, 1), file.string());
      write_to(file, good);
    }
  }
  // A whole checkpoint under another step's name.
  fs::remove_all(saved.step(1));
  fs::copy(saved.step(2), saved.step(1), fs::copy_options::recursive);
  check_line(complaint(folder, 1), "step-1' is of step 2");
  CHECK(complaint(folder, 2) == "");
}

TEST_CASE("a manifest or a header that says too much is refused, though its checksum is right") {
  Saved saved;
  const std::string good = bytes_of(saved.manifest()), head = good.substr(0, good.find('\n'));
  const std::string file = "\"name\": \"shard-00001-model-00001-of-00001.safetensors\"";
  struct Lie {
    std::string old, with, said;
  };
  const std::string many(100000, '['), objects = [] {
    std::string text;
    for (int i = 0; i < 100000; ++i) text += "{\"a\":";
    return text;
  }();
  std::vector<Lie> lies = {
      {"\"tessera_checkpoint\": 1", "\"tessera_checkpoint\": 2", "has version 2"},
      {"\"tessera_checkpoint\": 1", "\"tessera_checkpoint\": \"1\"", "an integer is expected"},
      {"\"tessera_checkpoint\": 1", "\"tessera_checkpoint\": 1.0", "an integer is expected"},
      {"\"tessera_checkpoint\": 1", "\"tessera_checkpoint\": 1e0", "an integer is expected"},
      {"\"tessera_checkpoint\": 1, ", "", "lacks \"tessera_checkpoint\""},
      {"\"tessera_checkpoint\": 1", "\"tessera_checkpoint\": 1, \"tessera_checkpoint\": 1",
       "twice"},
      {"\"id\"", "\"ID\"", "lacks \"id\""},
      {"\"id\": \"", "\"id\": 5, \"x\": \"", "a text is expected"},
      {"\"step\": 1", "\"step\": -1", "is of step -1"},
      {"\"step\": 1", "\"step\": 2", "is of step 2"},
      {"\"step\": 1", "\"step\": 9223372036854775808", "beyond 64 bits"},
      {"\"step\": 1", "\"step\": null", "has a value that is none"},
      {"\"step\": 1", "\"step\": [1]", "an integer is expected"},
      {"\"ranks\": 3", "\"ranks\": 0", "saved by 0"},
      {"\"ranks\": 3", "\"ranks\": -3", "saved by -3"},
      {"\"ranks\": 3", "\"ranks\": 4294967299", "saved by 4294967299"},
      {"\"samples\": 1", "\"samples\": {}", "is neither a number nor a text"},
      {"\"samples\": 1", "\"samples\": [1]", "is neither a number nor a text"},
      {"\"samples\": 1", "\"samples\": nan", ""},
      {"\"samples\": 1", "\"samples\": 1e999", ""},
      {"\"samples\": 1", "\"samples\": 1.5", "no integer"},
      {"\"samples\": 1", "\"samples\": true", "no integer"},
      {"\"samples\": 1", "\"samples\": \"1\"", "no integer"},
      {"\"samples\"", "\"other\"", "no scalar 'samples'"},
      {"\"samples\": 1", "\"samples\": " + many, ""},
      {"\"samples\": 1", "\"samples\": " + objects, ""},
      {"\"scalars\": {", "\"scalars\": {\"\\u0000\\u001b[2J\": {}, ",
       "is neither a number nor a text"},
      {"\"scalars\": {", "\"scalars\": {\"\xff\": 1, ", "UTF-8"},
      {"\"parts\": {", "\"parts\": [{", ""},
      {"\"parts\"", "\"other\"", "lacks \"parts\""},
      {"\"model\": {", "\"../model\": {", "no plain file name"},
      {"\"model\": {", "\"/etc\": {", "no plain file name"},
      {"\"model\": {", "\"\": {", "no plain file name"},
      {"\"model\": {", "\".\": {", "no plain file name"},
      {"\"model\": {", "\"..\": {", "no plain file name"},
      {"\"model\": {", "\".model\": {", "no plain file name"},
      {"\"model\": {", "\"model\\u0000\": {", "no plain file name"},
      {"\"model\": {", "\"optimizer\": {", "twice"},
      {"\"model\": {", "\"other\": {", "no part 'model'"},
      {"\"model\": {", "\"" + std::string(5000, 'm') + "\": {", "no plain file name"},
      {"\"prefix\": \"\"", "\"prefix\": \"x\"", ""},
      {"\"prefix\": \"\"", "\"prefix\": 0", "a text is expected"},
      {"\"prefix\": \"\", ", "", "lacks \"prefix\""},
      {"\"files\": [", "\"files\": {\"a\": [", ""},
      {"\"files\": [", "\"files\": [1, ", "an object is expected"},
      {"\"files\": [", "\"files\": [[], ", "an object is expected"},
      {"\"files\": [", "\"files\": [{}, ", "lacks \"name\""},
      {file, "\"name\": \"../model/shard\"", "no plain file name"},
      {file, "\"name\": \"/dev/zero\"", "no plain file name"},
      {file, "\"name\": \".\"", "no plain file name"},
      {file, "\"name\": \"..\"", "no plain file name"},
      {"\"id\": \"", "\"id\": \"../", "no plain file name"},
      {file, "\"name\": \"\"", "no plain file name"},
      {file, "\"name\": \"a/b\"", "no plain file name"},
      {file, "\"name\": \"a\\u0000b\"", "no plain file name"},
      {file, "\"name\": \"a\\nb\"", ""},
      {file, "\"name\": \"none.safetensors\"", "does not"},
      {file, "\"name\": \"" + std::string(5000, 'x') + "\"", ""},
      {file, "\"name\": \"shard-00002-model-00001-of-00001.safetensors\"", ""},
      {file, "\"name\": 1", "a text is expected"},
      {"\"bytes\": ", "\"bytes\": -", ""},
      {"\"bytes\": ", "\"bytes\": 1", "take another checkpoint"},
      {"\"bytes\": ", "\"bytes\": 1.5, \"x\": ", "an integer is expected"},
      {"\"bytes\": ", "\"bytes\": 9223372036854775807, \"x\": ", "take another checkpoint"},
      {"\"bytes\": ", "\"size\": ", "lacks \"bytes\""},
      {"\"head\": \"", "\"head\": \"0", "has changed since it was written"},
      {"\"head\": \"", "\"head\": \"0000000000000000\", \"x\": \"", "another header"},
      {"\"head\": \"", "\"head\": \"000000000000000G\", \"x\": \"",
       "has changed since it was written"},
      {"\"head\": \"", "\"head\": 5, \"x\": \"", "a text is expected"},
      {"{", "{{", ""},
      {"{", "", ""},
      {"{", "[", ""},
      {"{", "\xef\xbb\xbf{", ""},
  };
  // What a file's own header says of its boxes, with its checksum put right in the manifest.
  const std::string shard = bytes_of(saved.shard(1));
  const auto entry_at = good.find("\"name\": \"shard-00002", good.find("\"model\""));
  REQUIRE(entry_at != good.npos);
  const std::vector<Lie> box_lies = {
      {R"(\"saved_offsets\": [1)", R"(\"saved_offsets\": [0)", ""},
      {R"(\"saved_offsets\": [1)", R"(\"saved_offsets\": [2)", ""},
      {R"(\"saved_offsets\": [1)", R"(\"saved_offsets\": [-1)", "below 0"},
      {R"(\"saved_offsets\": [1)", R"(\"saved_offsets\": [9223372036854775807)", "beyond 64 bits"},
      {R"(\"saved_offsets\": [1)", R"(\"saved_offsets\": [9223372036854775806)", ""},
      {R"(\"saved_offsets\": [1)", R"(\"saved_offsets\": [1, 1)", "number of dimensions"},
      {R"(\"saved_offsets\": [1)", R"(\"saved_offsets\": [\"1\")", "an integer is expected"},
      {R"(\"saved_offsets\": [1)", R"(\"saved_offsets\": [1.5)", "an integer is expected"},
      {R"(\"saved_offsets\")", R"(\"offsets\")", "lacks \"saved_offsets\""},
      {R"(\"shape\": [5)", R"(\"shape\": [6)", ""},
      {R"(\"shape\": [5)", R"(\"shape\": [4)", ""},
      {R"(\"shape\": [5)", R"(\"shape\": [4611686018427387904)", ""},
      {R"(\"shape\": [5)", R"(\"shape\": [-5)", "below 0"},
      {R"(\"shape\": [5)", R"(\"shape\": [5, 1)", "number of dimensions"},
      {R"(\"shape\": [5, 3])", R"(\"shape\": [])", "number of dimensions"},
      {R"(\"shape\")", R"(\"Shape\")", "lacks \"shape\""},
      {R"(\"checksums\": \")", R"(\"checksums\": \"0)", "that is not 16 hexadecimal digits"},
      {R"(\"checksums\": \")", R"(\"checksums\": \"0000000000000000)", "checksums for 1 pieces"},
      {R"(\"checksums\": \")", R"(\"checksums\": \"0000000000000000\", \"x\": \")",
       "other bytes than were saved"},
      {R"(\"checksums\": \")", R"(\"checksums\": \"\", \"x\": \")", "0 checksums for 1 pieces"},
      {R"(\"id\": \")", R"(\"id\": \"0)", "is of save"},
      {R"(\"id\": \")", R"(\"id\": 0, \"x\": \")", "a text is expected"},
      {R"(\"tensors\": {)", R"(\"tensors\": {\"\\u001b[31m\": {}, )", "does not"},
      {R"(\"tensors\": {)", R"(\"tensors\": {\"zz\": {}, )", "does not"},
      {R"(\"tensors\")", R"(\"boxes\")", "lacks \"tensors\""},
      {R"("DCP_SHARDING_INFO":"{)", R"("DCP_SHARDING_INFO":"[)", ""},
      {R"("DCP_SHARDING_INFO":"{)", R"("DCP_SHARDING_INFO":"{\"zz\": {\"saved_offsets\": [0]}, )",
       "no such tensor"},
      {R"("DCP_SHARDING_INFO")", R"("DCP_SHARDING_info")", ""},
      {R"("tessera")", R"("Tessera")", "is of save ''"},
      {R"("dtype":"F32")", R"("dtype":"I32")", "dtype"},
      {R"("dtype":"F32")", R"("dtype":"F16")", "bytes, but its shape and dtype need"},
      {R"("shape":[)", R"("shape":[1,)", "number of dimensions"},
  };
  CHECK(lies.size() + box_lies.size() >= 100);
  for (const Lie& lie : lies) {
    INFO(lie.old << " -> " << lie.with.substr(0, 60));
    write_to(saved.manifest(), sealed(replaced(good, lie.old, lie.with)));
    const std::string said = complaint(saved.folder(), 1);
    check_line(said, "step-1");
    CHECK(has(said, lie.said));
  }
  write_to(saved.manifest(), good);
  // What is said of a shard with another header.
  const auto said_of = [&](const std::function<std::string(std::string json)>& change) {
    const std::string bad = resealed(shard, change);
    write_to(saved.shard(1), bad);
    std::string entry = good.substr(entry_at);
    const std::size_t head_at = entry.find("\"head\": \"") + 9;
    entry.replace(head_at, 16,
                  checkpoint::hex(checkpoint::checksum_of(bad.data(), data_begin(bad))));
    const std::size_t bytes_at = entry.find("\"bytes\": ") + 9;
    entry.replace(bytes_at, entry.find_first_not_of("0123456789", bytes_at) - bytes_at,
                  concat(bad.size()));
    write_to(saved.manifest(), sealed(good.substr(0, entry_at) + entry));
    const std::string said = complaint(saved.folder(), 1);
    check_line(said, "step-1");
    return said;
  };
  for (const Lie& lie : box_lies) {
    INFO(lie.old << " -> " << lie.with.substr(0, 60));
    CHECK(
        has(said_of([&](std::string json) { return replaced(std::move(json), lie.old, lie.with); }),
            lie.said));
  }
  // Without a box or a checksum the data would not be looked at.
  CHECK(has(said_of([](std::string json) {
              json = replaced(std::move(json), R"("DCP_SHARDING_INFO":"{)",
                              R"("DCP_SHARDING_INFO":"{}","x":"{)");
              return replaced(std::move(json), R"(\"tensors\": {)", R"(\"tensors\": {}, \"x\": {)");
            }),
            "has 0 checksums for 1 pieces of 4 MiB"));
  write_to(saved.shard(1), shard);
  write_to(saved.manifest(), good);
  CHECK(complaint(saved.folder(), 1) == "");
}

TEST_CASE("readers take or refuse every mutation of what they read") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const Saved saved;
  std::vector<std::string> shards;
  for (const fs::path& file : saved.files)
    if (file.extension() == ".safetensors") shards.push_back(bytes_of(file));
  const ReaderFuzz fuzz(bytes_of(saved.manifest()), shards);
  const auto stride = GridShare::stride();
  const FuzzCounts counts = fuzz.run(400000 / stride, seed);
  INFO(counts.fault);
  CHECK(counts.fault == "");
  CHECK(counts.taken > 0);
  CHECK(counts.refused > counts.taken);

  // Files, read to their last byte.
  Dice dice(seed + 1);
  int taken = 0, refused = 0;
  const std::string path = saved.root() / "mutated.safetensors";
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  for (std::uint64_t trial = 0; trial < 20000 / stride; ++trial) {
    const std::string bytes = mutated_shard(dice.of(shards), dice);
    write_to(path, bytes);
    std::string said;
    try {
      const checkpoint::WeightFiles files(
          "mutation",
          {{.path = path,
            .size_bytes = trial % 2 == 0 ? std::ssize(bytes) : -1,  // in a manifest, or in none
            .head_checksum =
                checkpoint::checksum_of(bytes.data(), std::min(bytes.size(), data_begin(bytes)))}},
          "");
      for (const std::string& name : files.names()) {
        const auto entry = files.entry(name);
        if (!entry.foreign.empty() || entry.shape.size() > kMaxDims) continue;
        const Shape shape{std::span<const std::int64_t>(entry.shape)};
        (void)files.rows(std::vector{name}, ShardSpec{shape, 2, 1}, false, f32, device);
      }
      ++taken;
    } catch (const DataError& error) {
      said = error.what();
      ++refused;
    }
    if (!said.empty() && !is_one_line(said)) FAIL_CHECK(said);
  }
  CHECK(taken > 0);
  CHECK(refused > 0);
}
