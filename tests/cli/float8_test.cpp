// tessera-train with products of 8-bit floats: it learns as in bf16, keeps to its plan, and the
// plan says what these products save.
#include <cmath>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include "tests/cli/program.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera::testing;

namespace {

// Sentences of words of which some are frequent, the next one by the last: there is something to
// learn, and it is not learned in 50 steps.
std::string text_of(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::string> words;
  for (int i = 0; i < 60; ++i) {
    std::string word;
    for (unsigned k = 0; k < 2 + random() % 5; ++k) word += static_cast<char>('a' + random() % 26);
    words.push_back(word);
  }
  std::string text;
  for (std::size_t last = 0; text.size() < 60000;) {
    last = (last * 7 + random() % (1 + random() % 6)) % words.size();
    text += words[last] + (random() % 9 == 0 ? ". " : " ");
  }
  return text;
}

const std::string kLine =
    "tessera-train --ranks 2 --model.dim=64 --model.n_layers=2 --model.n_heads=4 "
    "--model.n_kv_heads=2 --data.path=book.txt --data.order=sequential --training.seq_len=64 "
    "--training.global_batch_size=8 --training.steps=50 --optimizer.lr=1e-3 --debug.seed=1 "
    "--training.mixed_precision_param=bfloat16 --metrics.jsonl=out.jsonl ";

double last_loss(const std::string& options, const TemporaryFolder& folder) {
  const Outcome run = run_command(kLine + options, folder.path().string());
  INFO(run.err);
  REQUIRE(run.exit_code == 0);
  CHECK(run.out.find("2 of 2 ranks as in their plans") != std::string::npos);
  const std::string lines = folder.read("out.jsonl");
  const std::size_t at = lines.rfind("\"loss\": ");
  REQUIRE(at != std::string::npos);
  return std::stod(lines.substr(at + 8));
}

}  // namespace

TEST_CASE("50 steps with products of 8-bit floats end within 2 % of the loss of bf16") {
  const TemporaryFolder folder;
  folder.write("book.txt", text_of(1));
  const double bf16 = last_loss("", folder);
  CHECK(bf16 < 3.2);  // of 5.5 before the first step: something was learned
  for (const std::string recipe : {"tensorwise", "blockwise"}) {
    const double loss =
        last_loss("--quantize.linear.float8.recipe_name=" + recipe +
                      (recipe == "blockwise" ? " --activation_checkpoint.mode=full" : ""),
                  folder);
    CAPTURE(recipe, loss, bf16);
    CHECK(loss != bf16);
    CHECK(std::abs(loss / bf16 - 1) < 0.02);
  }
}

TEST_CASE("a plan knows the time of products of 8-bit floats") {
  const TemporaryFolder folder;
  const auto matmul_seconds = [&](const std::string& name, const std::string& options) {
    const Outcome plan = run_command(
        "tessera-train --dry-run --device=cuda --machine=h100 --model.dim=4096 --model.n_layers=2 "
        "--model.n_heads=32 --model.n_kv_heads=8 --training.seq_len=4096 "
        "--training.global_batch_size=2 --training.mixed_precision_param=bfloat16 " +
            options,
        folder.path().string());
    INFO(plan.err);
    REQUIRE(plan.exit_code == 0);
    std::smatch found;
    CAPTURE(plan.out);
    REQUIRE(
        std::regex_search(plan.out, found, std::regex(R"(\n +)" + name + R"( +\d+ +([\d.]+) ms)")));
    return std::stod(found[1]);
  };
  // Of 1402.6 and 794.5 TFLOP/s.
  CHECK(matmul_seconds("matmul_fp8", "--quantize.linear.float8.recipe_name=tensorwise") <
        0.6 * matmul_seconds("matmul", ""));
}
