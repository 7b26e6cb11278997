// What the ranks of a save agree on: which error is everybody's, the save's name, what each wrote.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/world.hpp"

namespace tessera::checkpoint {

// All are collective.

// Runs f on this rank. Where it throws on some, all throw what it was on the first of them, whose
// rank the error has.
void on_all(const World& world, const std::function<void()>& f);

// Runs f on a thread of rank 0, for what it does in `folder`, of which f counts the `moves`. The
// ranks ask for it by a sum now and then, so that a slow disk is no timeout. After 10 s, and each
// 10 s more, a line of the log names the folder; after 10 s without a move rank 0 asks no more, and
// is late like any other. Throws: as on_all.
void on_rank_0(const World& world, const std::string& folder,
               const std::function<void(std::atomic<std::int64_t>& moves)>& f);

// That all ranks have rank 0's numbers, at most kAgreed. Throws: ContractError with what
// `complaint` says of the first that differs, on the first rank that has another.
void expect_as_rank_0(const World& world, const std::vector<double>& own,
                      const std::function<std::string(std::size_t)>& complaint);

// What every rank of a save gives alike, and the text that tells this rank's.
struct Given {
  const char* what;
  std::string text;
};
// That all ranks have the texts of rank 0, of at most kAgreed things. Throws: ContractError that
// names the first that differs, and a rank that has another.
void expect_same(const World& world, const std::vector<Given>& given);

// A name of 32 digits that rank 0 draws, the same on every rank: its host's 16, then random ones.
std::string common_id(const World& world);

// What a rank says of a file that it has written.
struct WrittenFile {
  std::int64_t size_bytes = 0;
  std::uint64_t head_checksum = 0;
  std::uint64_t cover = 0;  // RankFile::cover
};
// What every rank's files are, rank after rank: by sums of a few numbers, which need no memory of a
// device, since each rank has a place of its own in them.
std::vector<WrittenFile> gathered(const World& world, const std::vector<WrittenFile>& own);

}  // namespace tessera::checkpoint
