// One save, stage by stage, as a Saver goes through them.
//
//   rank 0   hidden folder │ own files, fsync │             │ manifest, fsync, rename, fsync │
//   rank 1                 │ own files, fsync │ sizes and   │                                │
//   rank 2                 │ own files, fsync │ checksums   │                                │
//            all see it?                     all have?      all know that it is there
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/checkpoint/manifest.hpp"
#include "runtime/checkpoint/new_folder.hpp"
#include "runtime/checkpoint/rank_file.hpp"
#include "tessera/checkpoint/checkpoint.hpp"

namespace tessera::checkpoint {

// Throws: ContractError for a number of checkpoints below 0.
void expect_keeps(const CheckpointOptions& options);

class Saving {
 public:
  // Makes the hidden folder, once all that can be wrong with these parts is known not to be.
  // Collective.  Throws: as checkpoint::save.
  Saving(const std::string& folder, std::int64_t step, std::vector<Part> parts,
         const Scalars& scalars, const World& world, const CheckpointOptions& options);

  // What this rank writes.
  std::vector<RankFile>& files() noexcept { return files_; }
  // Writes this rank's files to the disk. Alone, and by any thread.
  void write(const ReadPiece& read, WriteProgress& progress);
  // Collective, when all have written.
  void exchange();
  // On rank 0, which may be any thread of it: gives the checkpoint its name. Throws: ContractError
  // for ranks that do not have each row of each tensor once; as checkpoint::save.
  void commit(WriteProgress& progress);

  std::int64_t step() const noexcept { return manifest_.step; }
  // Of this rank's files, that are not written yet.
  std::int64_t left_bytes(const WriteProgress& progress) const;

 private:
  void in_step(const WriteProgress& progress, const std::function<void()>& f) const;
  // By the headers of all ranks' files.
  void expect_whole(const std::string& part) const;

  std::string folder_, hidden_;
  const World& world_;
  CheckpointOptions options_;
  Manifest manifest_;
  std::optional<NewFolder> made_;  // on rank 0
  std::vector<RankFile> files_;
  std::vector<Manifest::File> written_;  // of these, by this rank
  std::vector<std::string> doubtful_{};  // parts of which sums do not say that they are whole
};

}  // namespace tessera::checkpoint
