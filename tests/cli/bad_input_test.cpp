// The table of bad input, bad_input.txt, run line by line against the real binary.
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/cli/program.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/share.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera::testing;

namespace {

const std::string kName = "tessera-train: ";

struct Case {
  std::string command, expected;
};
struct Table {
  std::vector<std::pair<std::string, std::string>> files;
  std::vector<Case> cases;
};

// \n, \0, \\ and \xHH.
std::string unescaped(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\' || i + 1 == text.size()) {
      out += text[i];
      continue;
    }
    const char kind = text[++i];
    if (kind == 'x') {
      unsigned byte = 0;
      std::from_chars(text.data() + i + 1, text.data() + i + 3, byte, 16);
      out += static_cast<char>(byte);
      i += 2;
    } else {
      out += kind == 'n' ? '\n' : kind == '0' ? '\0' : kind;
    }
  }
  return out;
}

Table read_table() {
  std::ifstream file(TESSERA_BAD_INPUT);
  Table table;
  for (std::string line; std::getline(file, line);) {
    const std::string rest = line.size() > 2 ? line.substr(2) : "";
    if (line.starts_with("@ ")) {
      const std::size_t space = std::min(rest.find(' '), rest.size());
      table.files.emplace_back(rest.substr(0, space),
                               unescaped(rest.substr(std::min(space + 1, rest.size()))));
    }
    if (line.starts_with("$ ")) table.cases.push_back({rest, ""});
    if (line.starts_with("! ")) table.cases.at(table.cases.size() - 1).expected = rest;
  }
  return table;
}

// What is in the folder, to the byte.
std::vector<std::string> snapshot(const TemporaryFolder& folder) {
  std::vector<std::string> all;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
    const std::string name = entry.path().lexically_relative(folder.path()).string();
    all.push_back(entry.is_regular_file() ? name + ": " + folder.read(name) : name);
  }
  std::sort(all.begin(), all.end());
  return all;
}

// The lines of stderr that are ours; a launcher adds its own.
std::vector<std::string> own_lines(const std::string& err) {
  std::vector<std::string> lines;
  std::size_t begin = 0;
  for (std::size_t end; (end = err.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string line = err.substr(begin, end - begin);
    if (line.starts_with(kName)) lines.push_back(line.substr(kName.size()));
  }
  return lines;
}

}  // namespace

TEST_CASE("every bad input ends with exit code 2, its one line and nothing written") {
  const Table table = read_table();
  REQUIRE(table.cases.size() >= 60);
  const TemporaryFolder folder;
  for (const auto& [name, contents] : table.files) folder.write(name, contents);
  std::filesystem::create_directory(folder / "folder");
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  const std::vector<std::string> before = snapshot(folder);

  GridShare share;
  for (const Case& bad : table.cases) {
    if (!share.takes()) continue;
    const bool launched = bad.command.starts_with("mpirun");
    if (launched && !std::filesystem::exists(TESSERA_MPIRUN)) continue;
    const std::map<std::string, std::string> variables =
        launched ? std::map<std::string, std::string>{{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                                      {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                                      {"OMPI_MCA_rmaps_base_oversubscribe", "1"}}
                 : std::map<std::string, std::string>{};
    const Outcome outcome = run_command(bad.command, folder.path().string(), variables);
    INFO(bad.command);
    INFO("stderr: " << outcome.err);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    // Refused before any work: starting takes some 0.02 s. Ranks of MPI spin for each other.
    if (!launched) CHECK(outcome.computed_seconds <= 1);
    if (launched)
      CHECK(own_lines(outcome.err) == std::vector<std::string>{bad.expected});
    else
      CHECK(outcome.err == kName + bad.expected + "\n");
    CHECK(snapshot(folder) == before);
  }
}

TEST_CASE("a path or a value of any length is shortened where an error quotes it") {
  const TemporaryFolder folder;
  folder.write("book.txt", std::string(100, 'b'));
  const std::string run = "tessera-train --data.path=book.txt --training.seq_len=8 ";
  const std::string word(5000, 'x'), spaced = "$(printf 'x %.0s' $(seq 2500))y";
  const auto of = [&](const std::string& value, const std::string& with) {
    return std::vector<std::pair<std::string, std::string>>{
        {run + "--data.path=" + value, "File name too long"},
        {run + "--load=" + value, "File name too long"},
        {run + "--save=" + value, "File name too long"},
        {run + "--save=folder/" + value + "/w", "(File name too long)"},
        {run + "--trace=" + value, "File name too long"},
        {run + "--metrics.jsonl=" + value, "check the path"},
        {run + "--comm.flight_record=" + value, "File name too long"},
        {"tessera-train " + value, with},
        {"tessera-train --" + value + "=1", "(--help=all lists all)"},
        {"tessera-train --model.dim=" + value, "expected a whole number from 1 to 1048576"},
        {"tessera-train --data.order=" + value, "the nearest is shuffled"},
        {"tessera-train --device=" + value, "write for example --device=cuda:1"},
        {"tessera-train --dry-run --sample=" + value, "leave one of them out"},
    };
  };
  for (const auto& cases : {of(word, "File name too long"), of('"' + spaced + '"', "")})
    for (const auto& [command, reason] : cases) {
      const Outcome outcome = run_command(command, folder.path().string());
      INFO(command.substr(0, 70) << ": " << outcome.err);
      CHECK(outcome.exit_code == 2);
      REQUIRE(outcome.err.size() < 600);
      CHECK(outcome.err.ends_with(reason + '\n'));
      CHECK(outcome.err.find("...") != std::string::npos);
      CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
    }
}
