// What --load takes and --save writes, from the outside.
#include <regex>
#include <string>

#include "tests/cli/program.hpp"
#include "tests/cli/tiny_run.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

const std::string kPublic =
    "tessera-train --model.name=gpt2 --model.dim=8 --model.n_layers=2 --model.n_heads=2 "
    "--model.vocab_size=11 --model.max_seq_len=6 --training.seq_len=4 "
    "--training.global_batch_size=2 ";

}  // namespace

TEST_CASE("weights are saved in 16 bits, within the plan, and train on", "[cli]") {
  const BookFolder folder;
  const std::string where = folder.path().string();
  const Outcome whole =
      run_command(kTiny + "--training.steps=2 --ranks 2 --save=whole.safetensors", where);
  const Outcome half =
      run_command(kTiny +
                      "--training.steps=2 --ranks 2 --checkpoint.export_dtype=bfloat16 "
                      "--save=half.safetensors",
                  where);
  INFO(half.out << half.err);
  REQUIRE((whole.exit_code == 0 && half.exit_code == 0));
  const double ratio = static_cast<double>(folder.read("half.safetensors").size()) /
                       static_cast<double>(folder.read("whole.safetensors").size());
  CHECK((ratio > 0.5 && ratio < 0.6));  // the head of the file stays
  CHECK(has(half.out, "memory a rank in the save"));
  CHECK(std::regex_search(half.out,
                          std::regex(R"(in the save: planned peak (\d+) bytes, used \1 )")));
  CHECK(run_command(kTiny + "--training.steps=1 --load=half.safetensors", where).exit_code == 0);
}

TEST_CASE("a file like the public GPT-2, and its folder, are loaded as they are", "[cli]") {
  const TemporaryFolder folder;
  const std::string where = folder.path().string();
  std::filesystem::copy_file(GOLDEN_FOLDER "/gpt2.safetensors", folder / "model.safetensors");
  for (const std::string load : {"model.safetensors", "."}) {
    const Outcome run = run_command(
        kPublic + "--training.steps=0 --ranks 2 --save=saved.safetensors --load=" + load, where);
    INFO(run.out << run.err);
    CHECK(run.exit_code == 0);
    CHECK(has(folder.read("saved.safetensors"), "\"transformer.h.1.attn.c_attn.bias\""));
    CHECK_FALSE(has(folder.read("saved.safetensors"), "\"transformer.h.1.attn.bias\""));
  }
  const Outcome other = run_command(
      kPublic + "--training.steps=0 --model.n_layers=3 --load=model.safetensors", where);
  CHECK(other.exit_code == 2);
  CHECK(has(other.err,
            "'model.safetensors' has no tensor 'transformer.h.2.ln_1.weight' and 11 more"));
}
