// Sharded checkpoints: any number of ranks resumes what any other saved, to the bit, and nothing is
// taken from files that are not as they were written.
#include "tessera/checkpoint/checkpoint.hpp"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>

#include "tessera/checkpoint/model.hpp"
#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tessera/nn/llama.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/dice.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::testing;
using checkpoint::Checkpoint;

namespace {

// A model on its ranks, with an optimizer whose moments are unlike each other.
struct Resumable {
  std::unique_ptr<nn::LanguageModel> model;
  std::unique_ptr<optim::AdamW> optimizer;
};

struct ResumedLayout {
  bool gpt2 = false, tied = false;
  nn::Projections projections = nn::Projections::separate;
  int replicas = 1;  // where they divide the ranks
  int dim = 0;       // of matrices that the ranks divide
  std::int64_t slice_bytes = 0;
};

Resumable made(const ResumedLayout& way, const World& world, std::uint64_t seed) {
  Resumable saved;
  if (way.gpt2)
    saved.model = std::make_unique<nn::Gpt2>(
        nn::Gpt2Config{.dim = 6, .n_layers = 1, .n_heads = 3, .vocab_size = 7, .max_seq_len = 3});
  else
    saved.model = std::make_unique<nn::Llama>(nn::LlamaConfig{.dim = 6,
                                                              .n_layers = 1,
                                                              .n_heads = 1,
                                                              .ffn_dim = 5,
                                                              .vocab_size = 7,
                                                              .tie_embeddings = way.tied,
                                                              .projections = way.projections});
  const bool is_hybrid = world.size() % way.replicas == 0;
  const ShardOptions options{
      .mesh = is_hybrid ? DeviceMesh::hybrid(world, {way.replicas, world.size() / way.replicas})
                        : DeviceMesh::flat(world),
      .slice_bytes = way.slice_bytes,
      .shard_placement_fn = [&](const Parameter& p) {
        const bool fits = p.shape().ndim() == 2 && p.shape()[1] % world.size() == 0;
        return Shard{fits && !p.is_streamed() ? way.dim : 0};
      }};
  for (nn::Module* part : saved.model->parts()) fully_shard(*part, options);
  fully_shard(*saved.model, options);
  saved.model->materialize(world.device());
  nn::init(*saved.model, {seed});
  saved.optimizer = std::make_unique<optim::AdamW>(saved.model->parameters());
  saved.optimizer->prepare();
  for (const auto& [name, p] : saved.model->named_parameters()) {
    raw::copy_into(saved.optimizer->moments(p)[0], raw::neg(p.shard()));
    raw::copy_into(saved.optimizer->moments(p)[1], raw::mul(p.shard(), p.shard()));
  }
  saved.optimizer->set_steps(7);
  return saved;
}

// Weights and moments, whole.
Values everything(const Resumable& saved) {
  Values all = full_values(*saved.model);
  for (const auto& [name, p] : saved.model->named_parameters())
    for (const int k : {0, 1})
      all[concat(name, '.', k)] =
          saved.optimizer->distributed_moments(p)[static_cast<std::size_t>(k)]
              .full()
              .to_vector<float>();
  all["steps"] = {static_cast<float>(saved.optimizer->steps())};
  return all;
}

void save_at(const std::string& folder, std::int64_t step, Resumable& saved, const World& world) {
  checkpoint::save(folder, step,
                   {checkpoint::part(*saved.model, world),
                    checkpoint::part(*saved.optimizer, *saved.model, world)},
                   {{"samples", std::int64_t{6400}}, {"loss", 2.0}, {"data", "book \"1\""}}, world);
}

void load_from(const Checkpoint& from, Resumable& into, const World& world) {
  into.model->load(*from.part("model"));
  into.optimizer->load(*into.model, *from.part("optimizer"));
  world.barrier();
}

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

std::string bytes_of_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void write_file_at(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// What a load of everything by one rank says; empty where it takes it.
std::string complaint(const std::string& folder, std::int64_t step) {
  const World world = World::single({.threads = 1});
  Resumable resumed = made({}, world, 1);
  const Values before = everything(resumed);
  try {
    const Checkpoint from(folder, step);
    const auto model = from.part("model"), optimizer = from.part("optimizer");
    resumed.model->load(*model);
    resumed.optimizer->load(*resumed.model, *optimizer);
  } catch (const DataError& error) {
    return error.what();
  }
  return "";
}

std::vector<std::filesystem::path> files_below(const std::string& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& at : std::filesystem::recursive_directory_iterator(folder))
    if (at.is_regular_file()) files.push_back(at.path());
  std::ranges::sort(files);
  return files;
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

TEST_CASE("a folder is one program's as long as it holds the lock", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  for (int again = 0; again < 2; ++again) {
    const auto heard = on_ranks(2, [&](World& world) {
      const checkpoint::FolderLock lock(at, world);
      std::string text;
      try {
        const checkpoint::FolderLock second(at + "/.", world);
      } catch (const DataError& error) {
        text = error.what();
      }
      world.barrier();
      return text;
    });
    for (const std::string& text : heard) CHECK(has(text, "is in use by another run"));
  }
  CHECK(folder.entries() == 0);
}

TEST_CASE("a step that is there stays, and every rank hears of it", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = (folder.path() / "runs" / "a").string();
  const auto heard = on_ranks(3, [&](World& world) {
    Resumable saved = made({}, world, 5);
    save_at(at, 1, saved, world);
    return thrown_by<Error>([&] { save_at(at, 1, saved, world); });
  });
  CHECK(has(heard[0], "step-1' exists already and is kept; name another folder"));
  CHECK(heard[1] == heard[0]);
  CHECK(heard[2] == heard[0]);
  CHECK(files_below(at).size() == 7);
  CHECK(std::distance(std::filesystem::directory_iterator(at), {}) == 1);

  // What a killed program has left goes with the next save.
  std::filesystem::create_directories(at + "/.unfinished-step-2-00/model");
  on_ranks(2, [&](World& world) {
    Resumable saved = made({}, world, 5);
    save_at(at, 2, saved, world);
    return 0;
  });
  CHECK(std::distance(std::filesystem::directory_iterator(at), {}) == 2);
}

TEST_CASE("a save that fails on one rank is the same error on all, and leaves nothing",
          "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto heard = on_ranks(3, [&](World& world) {
    Resumable saved = made({}, world, 5);
    auto parts = std::vector{checkpoint::part(*saved.model, world)};
    if (world.rank() == 1) parts[0].tensors.push_back(parts[0].tensors[0]);
    const std::string doubled =
        thrown_by<Error>([&] { checkpoint::save(at, 1, parts, {}, world); });
    parts = {checkpoint::part(*saved.model, world)};
    saved.model->parameters()[0].edit([&](const Tensor& rows) {
      if (world.rank() == 2) raw::fill(rows, std::nan(""));
    });
    return doubled + '\n' + thrown_by<Error>([&] {
             checkpoint::save(at, 1, parts, {}, world, {.must_be_finite = true});
           }) +
           '\n' +
           thrown_by<Error>([&] { checkpoint::save(at, 1, {}, {{"loss", std::nan("")}}, world); });
  });
  for (const std::string& said : heard) {
    CHECK(has(said,
              "checkpoint::save: two tensors of a part are called 'model.embed_tokens.weight'"));
    CHECK(has(said, "checkpoint::save: 'model.embed_tokens.weight' is not finite"));
    CHECK(has(said, "scalar 'loss' is nan"));
  }
  CHECK(files_below(at).empty());
  CHECK(std::filesystem::is_empty(at));
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

// Whether the byte is of a count of steps that only PyTorch takes. A load of ours does not read it;
// `tessera-checkpoint verify` looks at every byte.
static bool is_of_pytorch_alone(const std::string& file, std::size_t byte) {
  std::uint64_t size = 0;
  std::memcpy(&size, file.data(), sizeof size);
  const std::string header = file.substr(sizeof size, size);
  const std::regex counts(
      R"re(\.step":\{"dtype":"F32","shape":\[\],"data_offsets":\[(\d+),(\d+))re");
  const std::size_t data = sizeof size + size;
  for (std::sregex_iterator at(header.begin(), header.end(), counts), end; at != end; ++at)
    if (byte >= data + std::stoull((*at)[1]) && byte < data + std::stoull((*at)[2])) return true;
  return false;
}

TEST_CASE("files that are not as they were written are refused", "[checkpoint]") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  Dice dice(seed);
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  on_ranks(3, [&](World& world) {
    Resumable saved = made({}, world, 5);
    for (const int step : {1, 2}) save_at(at, step, saved, world);
    return 0;
  });
  CHECK(complaint(at, 1).empty());
  const auto files = files_below(checkpoint::step_folder(at, 1));
  REQUIRE(files.size() == 7);
  for (const auto& file : files) {
    const std::string good = bytes_of_file(file);
    for (int trial = 0; trial < 12; ++trial) {
      std::string bad = good;
      const auto byte = static_cast<std::size_t>(dice.below(static_cast<int>(good.size())));
      bad[byte] = static_cast<char>(bad[byte] ^ (1 << dice.below(8)));
      write_file_at(file, bad);
      INFO(file << ", byte " << byte);
      if (is_of_pytorch_alone(good, byte)) continue;
      CHECK_THAT(complaint(at, 1), Catch::Contains(file.filename().string()));
      write_file_at(file, good.substr(0, byte));
      CHECK_THAT(complaint(at, 1), Catch::Contains(file.filename().string()));
    }
    std::filesystem::remove(file);
    CHECK(has(complaint(at, 1), "step-1"));
    // Of another save of the same values, and a link.
    const auto other = checkpoint::step_folder(at, 2) /
                       std::filesystem::relative(file, checkpoint::step_folder(at, 1));
    std::filesystem::create_symlink(other, file);
    CHECK_FALSE(complaint(at, 1).empty());
    std::filesystem::remove(file);
    if (file.filename() != "manifest.json") {
      std::filesystem::copy_file(other, file);
      CHECK(has(complaint(at, 1), "take another checkpoint"));
    }
    write_file_at(file, good);
  }
  CHECK(complaint(at, 1).empty());
  // What no manifest names.
  write_file_at(checkpoint::step_folder(at, 1) + "/model/zz.safetensors", "no");
  CHECK(has(complaint(at, 1),
            "has file 'zz.safetensors' in part 'model', which its manifest does not name"));
}

TEST_CASE("scalars come back to the bit, and what no file can hold is refused", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const checkpoint::Scalars scalars = {
      {"least", INT64_MIN},
      {"most", INT64_MAX},
      {"zero", std::int64_t{0}},
      {"negative zero", -0.0},
      {"tiny", 4.9e-324},
      {"huge", 1.7976931348623157e308},
      {"third", 1.0 / 3},
      {"whole", 3.0},
      {"yes", true},
      {"no", false},
      {"", "an empty name"},
      {"empty", ""},
      {std::string("a\0\n\x1b\"\\\xc3\xa9", 8), std::string("\0\r\x7f\"\\\xf0\x9f\x98\x80", 9)}};
  const auto heard = on_ranks(2, [&](World& world) {
    StateDict state;
    state["a"] = Tensor::from(std::vector<float>{1, 2, 3}, {3}, world.device());
    const auto own = checkpoint::part("own", state, world);
    checkpoint::save(at, 1, {own}, scalars, world);
    std::string said;
    for (const checkpoint::Scalars& bad :
         {checkpoint::Scalars{{"text", "\xff"}}, checkpoint::Scalars{{"\xff", 1.0}}})
      said += thrown_by<ContractError>([&] { checkpoint::save(at, 2, {own}, bad, world); }) + '\n';
    for (const char* const name : {"\xff", "a/b", "..", ".a", ""})
      said += thrown_by<ContractError>([&] {
                checkpoint::save(at, 2, {checkpoint::part(name, state, world)}, {}, world);
              }) +
              '\n';
    said += thrown_by<DataError>([&] { checkpoint::save("", 2, {own}, {}, world); });
    return said;
  });
  const checkpoint::Scalars found = Checkpoint(at, 1).scalars();
  CHECK(found == scalars);
  CHECK(std::signbit(std::get<double>(found.at("negative zero"))));
  CHECK(Checkpoint(at, 1).number("zero") == 0);
  CHECK(Checkpoint(at, 1).number("whole") == 3);
  CHECK_THROWS_WITH(Checkpoint(at, 1).number("yes"), Catch::Contains("'yes' is no number"));
  CHECK(heard[0] == heard[1]);
  CHECK(has(heard[0], "checkpoint: scalar 'text' is "));
  CHECK(has(heard[0], "checkpoint: the name of scalar "));
  CHECK(has(heard[0], "part 'a/b' is no plain file name"));
  CHECK(std::ranges::count(heard[0], '\n') == 7);
  CHECK(heard[0].ends_with("\na folder of checkpoints has no name; give it one"));
  CHECK(std::distance(std::filesystem::directory_iterator(at), {}) == 1);
}

TEST_CASE("a folder of checkpoints may be a symbolic link", "[checkpoint]") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "real");
  std::filesystem::create_directory_symlink("real", folder / "link");
  on_ranks(2, [&](World& world) {
    Resumable saved = made({}, world, 5);
    save_at(folder / "link", 1, saved, world);
    save_at(folder / "link/", 2, saved, world);
    if (world.rank() == 0) checkpoint::keep_newest(folder / "link", 1);
    return 0;
  });
  CHECK(checkpoint::steps_in(folder / "real") == std::vector<std::int64_t>{2});
  CHECK(complaint(folder / "link", 2).empty());
}
