// A run of tessera-train that takes no time: its options, its data, and what it has written.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"

namespace tessera::testing {

inline const std::string kTiny =
    "tessera-train --model.dim=16 --model.n_layers=1 --model.n_heads=2 --training.seq_len=16 "
    "--training.global_batch_size=4 --data.path=book.txt --metrics.jsonl=out.jsonl ";

// What Open MPI's mpirun needs to start ranks as root, and more than there are cores.
inline const std::map<std::string, std::string> kMpirun = {
    {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
    {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
    {"OMPI_MCA_rmaps_base_oversubscribe", "1"}};

// A folder with 6,000 bytes of text that a tiny model can learn.
class BookFolder : public TemporaryFolder {
 public:
  BookFolder() {
    std::string text;
    while (text.size() < 6000) text += "and there was light. ";
    write("book.txt", text);
  }
};

// Checks that out.jsonl is whole: lines 1, 2, 3 ..., the last one ended. Returns how many there
// are.
inline std::int64_t whole_lines(const TemporaryFolder& folder) {
  const std::string text = folder.read("out.jsonl");
  std::int64_t step = 0;
  std::size_t begin = 0;
  for (std::size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string line = text.substr(begin, end - begin);
    INFO(line);
    CHECK(line.starts_with("{\"step\": " + std::to_string(++step) + ", \"loss\": "));
    CHECK(line.ends_with("}"));
  }
  CHECK(begin == text.size());
  return step;
}

}  // namespace tessera::testing
