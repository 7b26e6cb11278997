// tessera-checkpoint on checkpoints that tessera-train has made.
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <string>
#include <utility>

#include "tests/cli/program.hpp"
#include "tests/cli/tiny_run.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera::testing;

namespace {

// A folder with a run of some ranks, which has saved STEP and its weights.
class Run : public BookFolder {
 public:
  static constexpr const char* kStep = "checkpoint/step-2";

  explicit Run(int ranks, const std::string& options = "") {
    const Outcome run = command(
        kTiny +
        "--checkpoint.enable=true --training.steps=2 --training.global_batch_size=6 --ranks " +
        std::to_string(ranks) + " --save=saved.safetensors " + options);
    INFO(run.out << run.err);
    REQUIRE(run.exit_code == 0);
  }

  Outcome command(const std::string& text) const { return run_command(text, path().string()); }
  Outcome tool(const std::string& arguments) const {
    return command("tessera-checkpoint " + arguments);
  }
  std::string shard(int rank) const {
    return std::string(kStep) + "/model/shard-0000" + std::to_string(rank + 1) +
           "-model-00001-of-00001.safetensors";
  }
};

}  // namespace

TEST_CASE("inspect says what a checkpoint has", "[checkpoint_tool]") {
  for (const int ranks : {1, 3}) {
    const Run run(ranks);
    const Outcome text = run.tool("inspect checkpoint/step-2");
    INFO(text.out << text.err);
    CHECK(text.exit_code == 0);
    CHECK(text.out.starts_with("'checkpoint/step-2': step 2, saved by " + std::to_string(ranks) +
                               (ranks == 1 ? " rank as " : " ranks as ")));
    CHECK(has(text.out, "\n  samples = 12\n"));
    CHECK(has(text.out, "\n  config.model.dim = \"16\"\n"));
    CHECK(has(text.out,
              " tensors in " + std::to_string(ranks) + (ranks == 1 ? " file, " : " files, ")));
    CHECK(has(text.out, "  model.norm.weight "));
    CHECK(has(text.out, " f32 [16]\n"));
    CHECK(has(text.out, "  state.model.norm.weight.exp_avg_sq "));

    const Outcome json = run.tool("inspect --json checkpoint/step-2");
    INFO(json.out << json.err);
    CHECK(json.exit_code == 0);
    CHECK(json.out.starts_with("{\"path\": \"checkpoint/step-2\", \"id\": \""));
    CHECK(json.out.ends_with("}}}\n"));
    CHECK(has(json.out, "\"step\": 2, \"ranks\": " + std::to_string(ranks) + ", \"bytes\": "));
    CHECK(has(json.out, "\"samples\": 12"));
    CHECK(has(json.out, "\"model.norm.weight\": {\"dtype\": \"f32\", \"shape\": [16]}"));
  }
}

TEST_CASE("verify finds a flipped byte, a missing file and one too many", "[checkpoint_tool]") {
  for (const int ranks : {1, 3}) {
    const Run run(ranks);
    const Outcome good = run.tool("verify checkpoint/step-2");
    INFO(good.out << good.err);
    CHECK(good.exit_code == 0);
    CHECK(good.out.starts_with("'checkpoint/step-2': " + std::to_string(2 * ranks) + " files, "));
    CHECK(good.out.ends_with(" bytes, all as saved\n"));
    CHECK(good.err.empty());
    CHECK(has(run.tool("verify --json checkpoint/step-2").out, "\"whole\": true, \"files\": "));

    const std::string file = run.shard(ranks - 1), whole = run.read(file);
    std::string flipped = whole;
    flipped.back() ^= 4;
    run.write(file, flipped);
    const Outcome bad = run.tool("verify checkpoint/step-2");
    INFO(bad.out << bad.err);
    CHECK(bad.exit_code == 1);
    CHECK(has(bad.out, " in '" + file + "' has other bytes than were saved"));
    CHECK(bad.out.ends_with(" bytes, 1 fault\n"));
    CHECK(run.tool("verify checkpoint/step-2 --json").exit_code == 1);
    CHECK(has(run.tool("verify checkpoint/step-2 --json").out, "\"whole\": false"));

    flipped = whole;
    flipped[whole.find("\"dtype\"") + 1] ^= 4;
    run.write(file, flipped);
    CHECK(run.tool("verify checkpoint/step-2").exit_code == 1);
    run.write(file, whole);
    run.write("checkpoint/step-2/model/stray.safetensors", whole);
    CHECK(has(run.tool("verify checkpoint/step-2").out, "stray.safetensors' is in no man"));
    std::filesystem::remove(run / "checkpoint/step-2/model/stray.safetensors");
    CHECK(run.tool("verify checkpoint/step-2").exit_code == 0);
    std::filesystem::remove(run / file);
    const Outcome missing = run.tool("verify checkpoint/step-2");
    CHECK(missing.exit_code == 1);
    CHECK(has(missing.out, file + "'"));
    std::string manifest = run.read("checkpoint/step-2/manifest.json");
    manifest[40] ^= 1;
    run.write("checkpoint/step-2/manifest.json", manifest);
    CHECK(run.tool("verify checkpoint/step-2").exit_code == 1);
    CHECK(run.tool("inspect checkpoint/step-2").exit_code == 2);
  }
}

TEST_CASE("verify names whatever no manifest names, in every folder of a step",
          "[checkpoint_tool]") {
  const Run run(2);
  for (const char* const stray : {"notes.txt", ".hidden", "optimizer/shard", "model/.hidden"}) {
    const std::string path = std::string("checkpoint/step-2/") + stray;
    run.write(path, "some");
    const Outcome found = run.tool("verify checkpoint/step-2/");
    INFO(found.out << found.err);
    CHECK(found.exit_code == 1);
    CHECK(found.out.starts_with("'" + path + "' is in no manifest; move it away\n"));
    CHECK(found.out.ends_with(" bytes, 1 fault\n"));
    std::filesystem::remove(run / path);
  }
  for (const char* const stray : {"old", "model/old"}) {
    const std::string path = std::string("checkpoint/step-2/") + stray;
    std::filesystem::create_directory(run / path);
    CHECK(has(run.tool("verify checkpoint/step-2").out, "'" + path + "' is in no manifest"));
    std::filesystem::remove(run / path);
  }
  CHECK(run.tool("verify checkpoint/step-2").exit_code == 0);
}

TEST_CASE("verify and inspect say that a folder has another step's name", "[checkpoint_tool]") {
  const Run run(1);
  std::filesystem::rename(run / "checkpoint/step-2", run / "checkpoint/step-7");
  const std::string fault =
      "checkpoint 'checkpoint/step-7/' is of step 2 by its manifest; name its folder step-2";
  const Outcome verified = run.tool("verify checkpoint/step-7/");
  INFO(verified.out << verified.err);
  CHECK(verified.exit_code == 1);
  CHECK(verified.out.starts_with(fault + '\n'));
  CHECK(verified.out.ends_with(" bytes, 1 fault\n"));
  CHECK(run.command("cd checkpoint/step-7; tessera-checkpoint verify .").exit_code == 1);
  const Outcome inspected = run.tool("inspect checkpoint/step-7/");
  CHECK(inspected.exit_code == 0);
  CHECK(inspected.out.starts_with("'checkpoint/step-7/': step 2, saved by "));
  CHECK(has(inspected.out, '\n' + fault + '\n'));
  CHECK(has(run.tool("inspect --json checkpoint/step-7/").out,
            "{\"path\": \"checkpoint/step-7/\", \"fault\": \"" + fault + "\", \"id\": "));
  // Any other name is as good as the first.
  std::filesystem::rename(run / "checkpoint/step-7", run / "checkpoint/best");
  CHECK(run.tool("verify checkpoint/best").exit_code == 0);
}

TEST_CASE("a checkpoint has more files than may be open", "[checkpoint_tool]") {
  const BookFolder folder;
  const std::string train =
      kTiny + "--checkpoint.enable=true --training.global_batch_size=60 --training.steps=";
  const auto command = [&](const std::string& text) {
    return run_command(text, folder.path().string());
  };
  REQUIRE(command(train + "1 --ranks 60").exit_code == 0);  // 120 files
  const std::string few = "ulimit -n 56; ";
  const Outcome verified = command(few + "tessera-checkpoint verify checkpoint/step-1");
  INFO(verified.out << verified.err);
  CHECK(verified.exit_code == 0);
  CHECK(has(verified.out, "120 files, "));
  CHECK(command(few + "tessera-checkpoint diff checkpoint/step-1 checkpoint/step-1").exit_code ==
        0);
  const Outcome resumed = command(few + train + "2 --ranks 3");
  INFO(resumed.out << resumed.err);
  CHECK(resumed.exit_code == 0);

  // A limit is no fault of the checkpoint's.
  const Outcome none = command(
      "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; ulimit -n 4; tessera-checkpoint verify "
      "checkpoint/step-1");
  INFO(none.out << none.err);
  CHECK(none.exit_code == 1);
  CHECK(none.out.empty());
  CHECK(has(none.err, "cannot be opened: Too many open files; raise the limit (ulimit -n)"));
}

TEST_CASE("diff tells equal from unlike, to the bit", "[checkpoint_tool]") {
  const Run run(3);
  const Run other(1, "--debug.seed=1"), alike(3);
  const std::string there = (alike.path() / Run::kStep).string();
  const Outcome equal = run.tool("diff checkpoint/step-2 " + there);
  INFO(equal.out << equal.err);
  CHECK(equal.exit_code == 0);
  CHECK(equal.out == "0 of 48 tensors and 0 of 85 scalars differ: equal bits\n");
  CHECK(run.tool("diff checkpoint/step-2 saved.safetensors").exit_code == 0);

  // One bit of one element: the last one's lowest.
  std::string weights = run.read("saved.safetensors");
  weights[weights.size() - 4] ^= 1;
  run.write("bit.safetensors", weights);
  const Outcome bit = run.tool("diff bit.safetensors checkpoint/step-2");
  INFO(bit.out << bit.err);
  CHECK(bit.exit_code == 1);
  CHECK(std::count(bit.out.begin(), bit.out.end(), '\n') == 2);
  CHECK(has(bit.out, "  1 of "));
  CHECK(has(bit.out, " unlike, largest difference "));
  CHECK(has(bit.out, "1 of 12 tensors and 0 of 0 scalars differ\n"));
  const Outcome json = run.tool("diff --json bit.safetensors checkpoint/step-2");
  CHECK(json.exit_code == 1);
  CHECK(has(json.out, "\"equal\": false, \"tensors\": 12, "));
  CHECK(has(json.out, "\"unlike\": 1, \"largest\": "));

  const Outcome unlike = run.tool("diff checkpoint/step-2 " + (other.path() / Run::kStep).string());
  INFO(unlike.out << unlike.err);
  CHECK(unlike.exit_code == 1);
  CHECK(has(unlike.out, "config.debug.seed = \"0\" -> \"1\"\n"));
  CHECK(has(unlike.out, "\nmodel: lm_head.weight  f32 [256, 16]  "));

  // Bytes that were not saved are bad input, and no difference.
  std::string shard = run.read(run.shard(1));
  shard.back() ^= 1;
  run.write(run.shard(1), shard);
  CHECK(run.tool("diff checkpoint/step-2 " + there).exit_code == 2);
}

TEST_CASE("an export has the bits of --save, and loads", "[checkpoint_tool]") {
  for (const int ranks : {1, 3}) {
    const Run run(ranks);
    const Outcome whole = run.tool("export checkpoint/step-2 whole --max-shard-size=20KB");
    INFO(whole.out << whole.err);
    CHECK(whole.exit_code == 0);
    CHECK(whole.out == "'whole': 12 tensors, 49,344 bytes in 3 files\n");
    CHECK(std::filesystem::exists(run / "whole/model-00003-of-00003.safetensors"));
    CHECK(has(run.read("whole/model.safetensors.index.json"),
              "\"lm_head.weight\": \"model-00003-of-00003.safetensors\""));
    CHECK(run.tool("diff whole saved.safetensors").exit_code == 0);
    const Outcome loaded =
        run.command(kTiny + "--training.steps=0 --load=whole --save=again.safetensors");
    INFO(loaded.out << loaded.err);
    CHECK(loaded.exit_code == 0);
    CHECK(run.read("again.safetensors") == run.read("saved.safetensors"));

    // In 16 bits as --save writes these.
    CHECK(run.command(kTiny + "--training.steps=0 --load=whole --save=half.safetensors "
                              "--checkpoint.export_dtype=bfloat16")
              .exit_code == 0);
    const Outcome half = run.tool("export --json checkpoint/step-2 half/ --dtype bfloat16");
    CHECK(half.out == "{\"path\": \"half\", \"files\": 1, \"tensors\": 12, \"bytes\": 24672}\n");
    CHECK(run.tool("diff half half.safetensors").exit_code == 0);
    CHECK(run.tool("diff half whole").exit_code == 1);

    // Nothing is written over or into a checkpoint, and nothing is left of what failed.
    for (const char* const inside :
         {"checkpoint/step-2/x", "checkpoint/step-2/model/x", "link/x"}) {
      if (*inside == 'l')
        std::filesystem::create_directory_symlink(run / "checkpoint/step-2", run / "link");
      const Outcome in = run.tool(std::string("export checkpoint/step-2 ") + inside);
      CHECK(in.exit_code == 2);
      CHECK(has(in.err, std::string("'") + inside + "' lies in checkpoint '"));
      std::filesystem::remove(run / "link");
    }
    CHECK(run.tool("verify checkpoint/step-2").exit_code == 0);
    const Outcome again = run.tool("export checkpoint/step-2 whole");
    CHECK(again.exit_code == 2);
    CHECK(has(again.err, "'whole' exists already"));
    std::string shard = run.read(run.shard(0));
    shard.back() ^= 1;
    run.write(run.shard(0), shard);
    const std::size_t entries = run.entries();
    CHECK(run.tool("export checkpoint/step-2 bad").exit_code == 2);
    CHECK(run.entries() == entries);
  }
}

TEST_CASE("an export that a signal or a full disk ends leaves nothing", "[checkpoint_tool]") {
  const BookFolder folder;
  const auto command = [&](const std::string& text) {
    return run_command(text, folder.path().string());
  };
  REQUIRE(command(kTiny + "--model.dim=256 --model.vocab_size=65536 --training.steps=0 "
                          "--save=big.safetensors")
              .exit_code == 0);
  const std::size_t entries = folder.entries();
  for (const auto& [name, number] : {std::pair("TERM", SIGTERM), std::pair("HUP", SIGHUP)}) {
    const Outcome stopped =
        command(std::string("env --default-signal tessera-checkpoint export big.safetensors out & "
                            "run=$!; "
                            "until ls -A | grep -q unfinished-out; do :; done; kill -") +
                name + " $run; wait $run");
    INFO(name << stopped.out << stopped.err);
    CHECK(stopped.exit_code == 128 + number);
    CHECK(stopped.out.empty());
    CHECK(folder.entries() == entries);
  }
  const Outcome full =
      command("ulimit -f 1000; trap '' XFSZ; tessera-checkpoint export big.safetensors out");
  INFO(full.err);
  CHECK(full.exit_code == 1);
  CHECK(full.err ==
        "tessera-checkpoint: 'out/model-00001-of-00001.safetensors' could not be "
        "written: File too large\n");
  CHECK(folder.entries() == entries);
}

TEST_CASE("a difference from infinity is inf", "[checkpoint_tool]") {
  const Run run(1);
  std::string weights = run.read("saved.safetensors");
  weights.replace(weights.size() - 4, 4, std::string("\0\0\x80\x7f", 4));  // the last element
  run.write("inf.safetensors", weights);
  CHECK(has(run.tool("diff inf.safetensors saved.safetensors").out,
            " unlike, largest difference inf\n"));
}

TEST_CASE("tessera-checkpoint refuses what it does not know in one line", "[checkpoint_tool]") {
  const BookFolder folder;
  const auto refused = [&](const std::string& arguments, const std::string& message) {
    const Outcome run = run_command("tessera-checkpoint " + arguments, folder.path().string());
    INFO(arguments << '\n' << run.out << run.err);
    CHECK(run.exit_code == 2);
    CHECK(run.out.empty());
    CHECK(run.err.starts_with("tessera-checkpoint: "));
    CHECK(std::count(run.err.begin(), run.err.end(), '\n') == 1);
    CHECK(has(run.err, message));
  };
  refused("", "no command is given");
  refused("--json", "no command is given");
  refused("reshard a", "'reshard' is not a command; expected one of inspect, verify, diff, export");
  refused("inspect", "inspect takes 1 path, but got 0");
  refused("verify a b", "verify takes 1 path, but got 2");
  refused("inspect --josn .", "unknown option '--josn'");
  refused("inspect nowhere", "checkpoint 'nowhere' does not exist");
  refused("verify .", "has no manifest.json");
  refused("diff a", "diff takes 2 paths, but got 1");
  refused("diff nowhere nowhere", "'nowhere' does not exist");
  refused("inspect a --dtype=float32", "inspect takes no --dtype; only export does");
  refused("export a b --dtype int8", "--dtype=int8: expected float32, bfloat16 or float16");
  refused("export a b --max-shard-size=0", "--max-shard-size=0: expected bytes");
  refused("export a b --max-shard-size=5XB", "--max-shard-size=5XB: expected bytes");
  refused("export a b --max-shard-size=9223372036854775807GB", "expected bytes");
  refused("export a b --max-shard-size", "--max-shard-size=: expected bytes");
  refused("export nowhere b", "'nowhere' does not exist");
  refused("export nowhere \"\"", "export: the new folder has no name");
  const Outcome help = run_command("tessera-checkpoint --help", folder.path().string());
  CHECK(help.exit_code == 0);
  CHECK(has(help.out, "usage\n"));
  CHECK(run_command("tessera-checkpoint --help >/dev/full", folder.path().string()).exit_code == 1);
}
