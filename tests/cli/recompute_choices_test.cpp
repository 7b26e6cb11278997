// The table of --dry-run that compares what recomputation holds and makes again: its peaks are
// those of plans with these modes, its operations the products that a block's second run needs.
#include <cmath>
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
  const std::vector<std::string> modes{"none", "selective" + option + "every_op",
                                       "selective" + option + "op", "selective", "full"};
  const std::vector<Row> rows = rows_of(plan("none"));
  REQUIRE(rows.size() == modes.size());
  const Row &none = rows[0], &every_op = rows[1], &op = rows[2], &by_block = rows[3],
            &full = rows[4];
  CHECK(none.name == "none");
  CHECK(every_op.name == "selective, every_op");
  CHECK(op.name == "selective, op");
  CHECK(by_block.name == "selective, 2");
  CHECK(full.name == "full");
  for (std::size_t i = 0; i < modes.size(); ++i) {
    const std::string out = plan(modes[i]);
    INFO(modes[i] << '\n' << out);
    const std::vector<Row> same = rows_of(out);
    REQUIRE(same.size() == modes.size());
    for (std::size_t k = 0; k < same.size(); ++k) {
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
  const double every_second = 2 * rows_a_rank * dim * (kv + dim + ffn);  // k, output, up
  const double printed = 0.05;                                           // one decimal
  CHECK(std::abs(full.megaflops - 4e-6 * block) <= printed);
  CHECK(std::abs(by_block.megaflops - 2e-6 * block) <= printed);
  CHECK(std::abs(op.megaflops - 4e-6 * every_second) <= printed);
  CHECK(every_op.megaflops == 0);
  CHECK(none.megaflops == 0);
  CHECK(none.moved_megabytes == 0);
  CHECK(every_op.moved_megabytes > 0);  // norms and activations are made again
  CHECK(every_op.moved_megabytes < op.moved_megabytes);
  CHECK(op.moved_megabytes < full.moved_megabytes);
  CHECK(full.peak_bytes < op.peak_bytes);
  CHECK(op.peak_bytes < every_op.peak_bytes);
  CHECK(every_op.peak_bytes < none.peak_bytes);
  CHECK(full.peak_bytes < by_block.peak_bytes);
  CHECK(by_block.peak_bytes < none.peak_bytes);

  CHECK(rows_of(plan("selective" + option + "3"))[3].name == "selective, 3");
}
