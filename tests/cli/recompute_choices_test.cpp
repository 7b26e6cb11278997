// The table of --dry-run that compares what recomputation holds and makes again: its peaks are
// those of plans with these modes, its operations the products that a block's second run needs.
#include <cstdint>
#include <regex>
#include <string>
#include <vector>

#include "tests/cli/program.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera::testing;

namespace {

std::string without_commas(std::string number) {
  std::erase(number, ',');
  return number;
}

struct Row {
  std::string name;
  std::int64_t peak_bytes;
  double megaflops, percent, moved_megabytes;
  bool is_this_run;
};
std::vector<Row> rows_of(const std::string& out) {
  const std::regex regex(
      R"(\n  (none|full|selective, \w+) +([\d,]+) +([\d,.]+) +([\d.]+) % +([\d,.]+)( +\(this run\))?)");
  std::vector<Row> rows;
  for (std::sregex_iterator i(out.begin(), out.end(), regex), end; i != end; ++i)
    rows.push_back({(*i)[1], std::stoll(without_commas((*i)[2])),
                    std::stod(without_commas((*i)[3])), std::stod((*i)[4]),
                    std::stod(without_commas((*i)[5])), (*i)[6].matched});
  return rows;
}

}  // namespace

TEST_CASE("a dry run compares what recomputation holds and makes again") {
  const TemporaryFolder folder;
  const std::string command =
      "tessera-train --dry-run --ranks 2 --model.dim=256 --model.n_layers=4 --model.n_heads=4 "
      "--model.n_kv_heads=2 --model.ffn_dim=512 --training.seq_len=128 "
      "--training.global_batch_size=4 --activation_checkpoint.mode=";
  const auto plan = [&](const std::string& mode) {
    const Outcome outcome = run_command(command + mode, folder.path().string());
    INFO(outcome.err);
    REQUIRE(outcome.exit_code == 0);
    return outcome.out;
  };
  const std::string option = " --activation_checkpoint.selective_ac_option=";
  const std::vector<std::string> modes{"none", "selective" + option + "op", "selective", "full"};
  const std::vector<Row> rows = rows_of(plan("none"));
  REQUIRE(rows.size() == 4);
  CHECK(rows[0].name == "none");
  CHECK(rows[1].name == "selective, op");
  CHECK(rows[2].name == "selective, 2");
  CHECK(rows[3].name == "full");
  for (std::size_t i = 0; i < modes.size(); ++i) {
    const std::string out = plan(modes[i]);
    INFO(modes[i] << '\n' << out);
    const std::vector<Row> same = rows_of(out);
    REQUIRE(same.size() == 4);
    for (std::size_t k = 0; k < 4; ++k) {
      CHECK(same[k].is_this_run == (k == i));
      CHECK(same[k].peak_bytes == rows[k].peak_bytes);
    }
    std::smatch found;
    REQUIRE(std::regex_search(out, found, std::regex(R"(in step 1, (\d+) bytes)")));
    CHECK(std::stoll(found[1]) == rows[i].peak_bytes);
  }

  // Of a block: q, k, v, output, gate and up, and attention's causal half; down's result is not
  // needed. Of 2 samples a rank.
  const double rows_a_rank = 2 * 128, dim = 256, kv = 128, ffn = 512;
  const double block =
      2 * rows_a_rank * dim * (2 * dim + 2 * kv + 2 * ffn) + 2 * rows_a_rank * dim * 128;
  const double printed = 0.05;  // one decimal
  CHECK(std::abs(rows[3].megaflops - 4e-6 * block) <= printed);
  CHECK(std::abs(rows[2].megaflops - 2e-6 * block) <= printed);
  CHECK(rows[1].megaflops == 0);
  CHECK(rows[0].megaflops == 0);
  CHECK(rows[0].moved_megabytes == 0);
  CHECK(rows[1].moved_megabytes > 0);  // norms and activations are made again
  CHECK(rows[1].moved_megabytes < rows[3].moved_megabytes);
  CHECK(rows[3].peak_bytes < rows[1].peak_bytes);
  CHECK(rows[1].peak_bytes < rows[0].peak_bytes);
  CHECK(rows[3].peak_bytes < rows[2].peak_bytes);
  CHECK(rows[2].peak_bytes < rows[0].peak_bytes);

  CHECK(rows_of(plan("selective" + option + "3"))[2].name == "selective, 3");
}
