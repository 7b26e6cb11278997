// Reading, checking and printing the configuration, in process; what is refused stands in
// bad_input.txt.
#include "tools/train/config.hpp"

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tools/train/schema.hpp"

using namespace tessera;
using namespace tessera::train;
using tessera::testing::TemporaryFolder;

namespace {

Config parse(const std::vector<std::string>& arguments) { return parse_arguments(arguments); }

bool same(const Config& a, const Config& b) {
  for (const Key& key : schema()) {
    if (!key.section.empty() && key.get(a) != key.get(b)) return false;
  }
  return true;
}

// A value of a key, at random over its range; reals with all their digits.
std::string random_text(const Key& key, std::mt19937_64& random) {
  switch (key.type) {
    case ValueType::boolean:
      return random() % 2 ? "true" : "false";
    case ValueType::choice:
      return std::string(key.choices[random() % key.choices.size()]);
    case ValueType::text: {
      const char* const pieces[] = {"a", "\"", "\\", "\n", "\t",   "é",
                                    "#", "=",  " ",  "'",  "\x7f", "\x01"};
      std::string text;
      for (int i = 0; i < 8; ++i) text += pieces[random() % 12];
      return text;
    }
    case ValueType::integer: {
      const auto low = static_cast<std::uint64_t>(key.range.low),
                 high = static_cast<std::uint64_t>(key.range.high);
      return std::to_string(low + random() % (high - low + 1));
    }
    case ValueType::real:
      break;
  }
  const double unit = (static_cast<double>(random() >> 11) + 1) * 0x1p-54;  // in (0, 0.5]
  char text[40];
  std::snprintf(text, sizeof text, "%.17g", key.range.high <= 1 ? unit : unit * 1e6);
  return text;
}

}  // namespace

TEST_CASE("the defaults are the documented ones") {
  const Config c = parse({});
  CHECK(c.model.name == ModelName::llama);
  CHECK(c.model.rope_theta == 10000);
  CHECK(c.model.norm_eps == 1e-5);
  CHECK(c.model.vocab_size == 256);
  CHECK_FALSE(c.model.tied());
  CHECK(c.training.mixed_precision_param == f32);
  CHECK(c.training.max_norm == 1);
  CHECK(c.optimizer.name == OptimizerName::adamw);
  CHECK(c.optimizer.beta1 == 0.9);
  CHECK(c.optimizer.beta2 == 0.95);
  CHECK(c.optimizer.eps == 1e-8);
  CHECK(c.optimizer.weight_decay == 0.1);
  CHECK(!c.optimizer.momentum);  // SGD has none, Muon its own
  CHECK(c.optimizer.muon().momentum == 0.95);
  CHECK(c.optimizer.muon().ns_steps == 5);
  CHECK(!c.optimizer.nesterov);  // Muon has it, SGD only when it is asked for
  CHECK(c.optimizer.dampening == 0);
  CHECK(c.lr_scheduler.warmup_steps == 0);
  CHECK(c.lr_scheduler.decay_type == optim::DecayType::constant);
  CHECK(c.data.order == data::SampleOrder::shuffled);
  CHECK(c.data.heldout == 0);
  CHECK(c.metrics.log_freq == 1);
  CHECK(c.comm.heartbeat_timeout_seconds == 5);
  CHECK(c.comm.init_timeout_seconds == 300);
  CHECK(c.debug.executor == ExecutorKind::threaded);
}

TEST_CASE("derived sizes follow their rules") {
  for (const std::int64_t dim : {1, 12, 13, 96, 128, 256, 288, 768, 4096}) {
    const std::int64_t ffn = nn::LlamaConfig::default_ffn_dim(dim);  // as --help says
    INFO("dim " << dim << " ffn " << ffn);
    CHECK(ffn % 32 == 0);
    CHECK(3 * ffn >= 8 * dim);
    CHECK(3 * (ffn - 32) < 8 * dim);
  }
  CHECK(parse({"--model.name=gpt2"}).model.tied());
  CHECK(parse({"--model.n_heads=4"}).model.kv_heads() == 4);
  CHECK(parse({"--model.n_kv_heads=2"}).model.kv_heads() == 2);
  CHECK(parse({"--model.tie_embeddings"}).model.tied());
}

TEST_CASE("a choice is the enumerator of the library that bears its name") {
  const auto decay = [](const std::string& name) {
    return parse({"--lr_scheduler.decay_type=" + name}).lr_scheduler.decay_type;
  };
  CHECK(decay("constant") == optim::DecayType::constant);
  CHECK(decay("linear") == optim::DecayType::linear);
  CHECK(decay("sqrt") == optim::DecayType::sqrt);
  CHECK(decay("cosine") == optim::DecayType::cosine);
  const auto exported = [](const std::string& name) {
    return parse({"--checkpoint.export_dtype=" + name}).checkpoint.export_dtype;
  };
  CHECK(exported("float32") == f32);
  CHECK(exported("bfloat16") == bf16);
  CHECK(exported("float16") == f16);
  const auto reshard = [](const std::string& name) {
    return parse({"--parallelism.fsdp_reshard_after_forward=" + name})
        .parallelism.fsdp_reshard_after_forward;
  };
  CHECK(reshard("default") == Reshard::automatic);
  CHECK(reshard("always") == Reshard::always);
  CHECK(reshard("never") == Reshard::never);
  CHECK(reshard("8") == Reshard::to(8));
  const auto sync = [](const std::string& name) {
    return parse({"--parallelism.fsdp_gradient_sync=" + name}).parallelism.fsdp_gradient_sync;
  };
  CHECK(sync("always") == GradientSync::always);
  CHECK(sync("last") == GradientSync::last);
  CHECK(sync("all_reduce_last") == GradientSync::all_reduce_last);
  const auto strategy = [](const std::string& name) {
    return parse({"--parallelism.strategy=" + name}).parallelism.strategy;
  };
  CHECK(strategy("none") == Strategy::none);
  CHECK(strategy("ddp") == Strategy::ddp);
  CHECK(strategy("zero1") == Strategy::zero1);
  CHECK(strategy("zero2") == Strategy::zero2);
  CHECK(strategy("zero3") == Strategy::zero3);
  CHECK(strategy("hybrid") == Strategy::hybrid);
  const auto float8 = [](const std::string& name) {
    return parse({"--quantize.linear.float8.recipe_name=" + name}).float8.recipe_name;
  };
  CHECK(float8("none") == Float8Recipe::none);
  CHECK(float8("tensorwise") == Float8Recipe::tensorwise);
  CHECK(float8("blockwise") == Float8Recipe::blockwise);
  const auto recompute = [](const std::string& name) {
    return parse({"--activation_checkpoint.mode=" + name}).activation_checkpoint.mode;
  };
  CHECK(recompute("none") == RecomputeMode::none);
  CHECK(recompute("selective") == RecomputeMode::selective);
  CHECK(recompute("full") == RecomputeMode::full);
}

TEST_CASE("activation_checkpoint says which blocks run again, and what of them is kept") {
  const auto recompute = [](const std::vector<std::string>& arguments) {
    return parse(arguments).activation_checkpoint.recompute();
  };
  const std::string selective = "--activation_checkpoint.mode=selective",
                    option = "--activation_checkpoint.selective_ac_option=";
  CHECK(recompute({}) == nn::Recompute::none);
  CHECK(recompute({"--activation_checkpoint.mode=full"}) == nn::Recompute::blocks);
  CHECK(recompute({selective}) == nn::Recompute{.every = 2});  // as torchtitan's
  CHECK(recompute({selective, option + "3"}) == nn::Recompute{.every = 3});
  CHECK(recompute({selective, option + "op"}) ==
        nn::Recompute{.every = 1, .keep = {.products = 2, .attention = true}});  // torchtitan's
  CHECK(recompute({selective, option + "every_op"}) ==
        nn::Recompute{.every = 1, .keep = {.products = 1, .attention = true}});
}

TEST_CASE("values come with an equals sign or behind a space, and the later one wins") {
  const Config c =
      parse({"--model.dim=1", "--model.dim", "2", "--optimizer.lr", "1e-3", "--sample", "--odd",
             "--dry-run", "--training.steps=+7", "--model.tie_embeddings", "false", "--ranks=3"});
  CHECK(c.model.dim == 2);
  CHECK(c.optimizer.lr == 1e-3);
  CHECK(c.flags.sample == "--odd");
  CHECK(c.flags.dry_run);
  CHECK(c.training.steps == 7);
  CHECK(c.model.tie_embeddings == false);
  CHECK(c.flags.ranks == 3);
  CHECK(c.given.contains("model.dim"));
  CHECK_FALSE(c.given.contains("model.n_layers"));
}

TEST_CASE("a file and the command line are read in the order in which they stand") {
  const TemporaryFolder folder;
  const std::string file =
      folder.write("run.toml",
                   "# a comment\ntraining.steps = 5\n[model]\ndim = 64\nname = 'gpt2'\n"
                   "[optimizer]\nlr = 1\nweight_decay = 0.25\n[data]\n");
  const Config after = parse({file, "--model.dim=32"});
  CHECK(after.model.dim == 32);
  CHECK(after.model.name == ModelName::gpt2);
  CHECK(after.training.steps == 5);
  CHECK(after.optimizer.lr == 1.0);
  CHECK(after.optimizer.weight_decay == 0.25);
  CHECK(parse({"--model.dim=32", file}).model.dim == 64);
}

TEST_CASE("a configuration nests as deep as its options, and what nests deeper is bad input") {
  const TemporaryFolder folder;
  std::string deep = "a";
  for (int i = 0; i < 100000; ++i) deep += ".a";
  // Behind strings that end where a hasty reader would not look.
  for (const char* const before :
       {"", R"("\"".)", "x = [\"\"\"\n'\"\"\", {", R"(x = ["""a"""", {)", "x = ['''a''''', {"})
    CHECK_THROWS_WITH(parse({folder.write("deep.toml", before + deep + " = 1")}),
                      Catch::Matchers::Contains(": more than 32 dots in a line"));
  CHECK_THROWS_WITH(parse({folder.write("deep.toml", "\n[" + deep + "]")}),
                    Catch::Matchers::Contains(":2: more than 32 dots in a line"));
  const std::string dots(100, '.');
  for (const std::string& path :
       {'"' + dots + "\"  # \" " + dots, "'" + dots + "'", R"("a\")" + dots + '"',
        "\"\"\"\n'" + dots + "\\\n" + dots + "\"\"\"", "'''" + dots + "'" + dots + "'''"})
    CHECK(parse({folder.write("dots.toml", "# " + dots + "\n[data]\npath = " + path + "\n")})
              .data.path.find(dots) != std::string::npos);
}

TEST_CASE("names are an array in a file, as torchtitan writes them, or one text with commas") {
  const TemporaryFolder folder;
  const std::pair<const char*, const char*> written[] = {
      {R"(["q_proj", "down_proj"])", "q_proj,down_proj"},
      {R"("q_proj,down_proj")", "q_proj,down_proj"},
      {R"(["", "q_proj"])", ",q_proj"},
      {"[]", ""}};
  for (const auto& [value, names] : written) {
    const std::string file = folder.write(
        "names.toml",
        concat("[quantize.linear.float8]\nrecipe_name = 'tensorwise'\nfilter_fqns = ", value));
    CHECK(parse({file}).float8.filter_fqns == names);
  }
  const auto refuses = [&](const std::string& text) {
    CHECK_THROWS_WITH(parse({folder.write("bad.toml", text)}),
                      Catch::Matchers::Contains("an array: of the wrong type"));
  };
  refuses("[quantize.linear.float8]\nrecipe_name = 'tensorwise'\nfilter_fqns = ['q_proj', 1]");
  refuses("[data]\npath = ['a', 'b']");
}

TEST_CASE("any configuration is printed as TOML that reads back to it") {
  const unsigned seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  const TemporaryFolder folder;
  for (int trial = 0; trial < 100; ++trial) {
    Config drawn = parse({});
    // Which keys have a meaning depends on choices: those first.
    for (const bool choices : {true, false}) {
      for (const Key& key : schema()) {
        if (key.section.empty() || (key.type == ValueType::choice) != choices ||
            !applies(key, drawn))
          continue;
        if (random() % 3 == 0) continue;
        const Config one = parse({concat("--", key.full_name(), "=", random_text(key, random))});
        key.set(drawn, key.get(one));
      }
    }
    const std::string toml = print_config(drawn);
    INFO(toml);
    const Config read = parse({folder.write("drawn.toml", toml)});
    CHECK(same(read, drawn));
    CHECK(print_config(read) == toml);
  }
  CHECK(same(parse({folder.write("default.toml", print_config(Config{}))}), Config{}));
  Config latin = Config{};
  latin.data.path = "caf\xe9";
  CHECK_THROWS_AS(print_config(latin), DataError);
}

TEST_CASE("help fits a screen, and names where the rest is") {
  const std::string help = help_text();
  INFO(help);
  std::size_t lines = 0, begin = 0;
  for (std::size_t end; (end = help.find('\n', begin)) != std::string::npos; begin = end + 1) {
    ++lines;
    CHECK(end - begin <= 80);
  }
  CHECK(begin == help.size());
  CHECK(lines <= 24);
  std::size_t options = 0;
  for (const Key& key : schema())
    options += help.find(concat("\n  --", key.full_name(), key.section.empty() ? ' ' : '=')) !=
               std::string::npos;
  CHECK(options == 10);
  for (const char* part : {"--dry-run", "--help=all", "--help=SECTION", "Exit codes: 0 done; 2 bad",
                           "[8e-04]", "128 + signal"})
    CHECK(help.find(part) != std::string::npos);
  for (const std::string_view section : sections())
    CHECK((help.find(concat(", ", section)) != std::string::npos ||
           help.find(concat(",\n", section)) != std::string::npos));
}

TEST_CASE("help of a section has its options alone") {
  for (std::string_view section : sections()) {
    const std::string help = help_text(parse({concat("--help=", section)}).flags.help_of);
    INFO(help);
    for (const Key& key : schema())
      CHECK((help.find(concat("  --", key.full_name(), "=")) != std::string::npos) ==
            (key.section == section));
  }
  CHECK(help_text("flags").find("\n  --dry-run ") != std::string::npos);
  CHECK(parse({"--ranks", "2", "--help=all", "--nonsense"}).flags.help_of == "all");
  try {
    parse({"--help=modle"});
    FAIL("taken");
  } catch (const DataError& error) {
    CHECK(error.what() == std::string("--help=modle: no section is called so; the nearest is "
                                      "--help=model (--help=all lists all)"));
  }
}

TEST_CASE("help names every option with its default") {
  const std::string help = help_text("all");
  for (const Key& key : schema()) {
    INFO(key.full_name());
    CHECK(help.find(concat("  --", key.full_name())) != std::string::npos);
    CHECK_FALSE(key.help.empty());
  }
  for (const char* part :
       {"[8e-04]", "[n_heads]", "tessera-train --dry-run", "128 + signal", "llama|gpt2"}) {
    CHECK(help.find(part) != std::string::npos);
  }
}

TEST_CASE("each section stands once, as TOML demands") {
  std::vector<std::string_view> names = sections();
  std::sort(names.begin(), names.end());
  CHECK(std::adjacent_find(names.begin(), names.end()) == names.end());
}

TEST_CASE("every doubled letter leads back to its key") {
  for (const Key& key : schema()) {
    const std::string name = key.full_name();
    for (std::size_t at = 0; at < name.size(); ++at) {
      std::string wrong = name;
      wrong.insert(at, 1, wrong[at] == '.' ? 's' : wrong[at]);
      INFO(wrong);
      CHECK(nearest_key(wrong) == name);
    }
  }
  CHECK(nearest_key("lr") == "optimizer.lr");
  CHECK(nearest_key("training.lr") == "optimizer.lr");
  CHECK(nearest_key("model.nlayers") == "model.n_layers");
  CHECK(nearest_key(std::string(100000, 'x')).size() > 0);
}

TEST_CASE("a global batch is shared out, or the line says what divides") {
  const auto split = [](std::vector<std::string> arguments, int world) {
    return split_batch(parse(arguments), world);
  };
  CHECK(split({}, 1).global == 24);
  CHECK(split({}, 5).global == 25);
  CHECK(split({}, 512).global == 512);
  CHECK(split({"--training.local_batch_size=3"}, 4).global == 12);

  const BatchSplit plain = split({"--training.global_batch_size=12"}, 4);
  CHECK(plain.local == 3);
  CHECK(plain.micro_batches == 1);
  const BatchSplit accumulated =
      split({"--training.global_batch_size=12", "--training.local_batch_size=2"}, 2);
  CHECK(accumulated.local == 2);
  CHECK(accumulated.micro_batches == 3);

  for (std::int64_t global = 1; global <= 24; ++global) {
    for (std::int64_t local = 1; local <= 8; ++local) {
      for (int world = 1; world <= 6; ++world) {
        Config c;
        c.training.global_batch_size = global;
        c.training.local_batch_size = local;
        INFO("global " << global << " local " << local << " world " << world);
        if (global % (local * world) != 0) {
          CHECK_THROWS_AS(split_batch(c, world), DataError);
          continue;
        }
        const BatchSplit s = split_batch(c, world);
        CHECK(s.global == world * s.local * s.micro_batches);
        CHECK(s.local == local);
      }
    }
  }
}

TEST_CASE("what fits together is accepted") {
  const std::string book = "--data.path=book.txt";
  CHECK_NOTHROW(validate(parse({book}), 1));
  CHECK_NOTHROW(validate(parse({book, "--debug.executor=inline", "--ranks=2"}), 2));
  CHECK_NOTHROW(validate(parse({book, "--data.heldout=0.1", "--validation.freq=5"}), 1));
  CHECK_NOTHROW(validate(parse({"--training.steps=0", "--load=a", "--sample=In the"}), 1));
  CHECK_NOTHROW(validate(parse({"--dry-run", "--ranks=65536"}), 65536));
  CHECK_NOTHROW(
      validate(parse({book, "--model.name=gpt2", "--model.dropout=0.1", "--model.n_heads=2"}), 3));
  CHECK_NOTHROW(validate(
      parse({book, "--lr_scheduler.decay_type=cosine", "--lr_scheduler.min_lr_factor=0.1"}), 1));
  CHECK_NOTHROW(validate(parse({"--print-config"}), 1));
  // Under a launcher that does not tell its size, what depends on it waits for the second check.
  CHECK_NOTHROW(validate(parse({book, "--training.global_batch_size=7"}), 0));
  CHECK_THROWS_AS(validate(parse({book, "--training.global_batch_size=7"}), 2), DataError);
  CHECK_THROWS_AS(validate(parse({"--dry-run"}), 0), DataError);
}
