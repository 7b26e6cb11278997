#include "runtime/checkpoint/saving.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <utility>
#include <vector>

#include "runtime/checkpoint/together.hpp"
#include "runtime/distributed/gatherer.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/file.hpp"
#include "tessera/base/log.hpp"
#include "tessera/detail/base/utf8.hpp"

namespace tessera::checkpoint {
namespace {

// With all folders on the way to it. A name is on the disk before anything is made below it: so is
// that of the last one that is there, which a program that was killed may have made.
void make_folder(const std::string& folder, std::atomic<std::int64_t>& moves) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (folder.empty()) throw DataError("a folder of checkpoints has no name; give it one");
  fs::path path = fs::absolute(folder);
  if (!path.has_filename()) path = path.parent_path();  // "runs/"
  std::vector<fs::path> missing;
  for (; !fs::exists(path, error) && path.has_relative_path(); path = path.parent_path())
    missing.push_back(path);
  const auto fail = [&](const std::string& reason) {
    throw DataError(concat('\'', folder, "' cannot be made a folder of checkpoints: ", reason));
  };
  const auto sync = [&](const fs::path& names) {
    sync_folder(names.string());
    ++moves;
  };
  if (!fs::is_directory(path, error)) fail("Not a directory");
  // Others' folders need not be readable, and a mount point has its name elsewhere.
  const fs::path around = path.parent_path();
  struct stat own{}, parent{};
  if (::stat(path.c_str(), &own) == 0 && ::stat(around.c_str(), &parent) == 0 &&
      own.st_dev == parent.st_dev && ::access(around.c_str(), R_OK) == 0)
    sync(around);
  for (; !missing.empty(); missing.pop_back()) {
    if (!fs::create_directory(missing.back(), error) && error) fail(error.message());
    sync(missing.back().parent_path());
  }
}

// What rank 0 made is there on this one.
void expect_seen(const std::string& folder, const std::string& made) {
  struct stat there{};
  if (::stat(made.c_str(), &there) != 0)
    throw DataError(concat('\'', folder,
                           "' is another folder here than on rank 0: what rank 0 has just "
                           "made in it is not there; name a folder that all ranks share"));
}

// What ranks compare before anything is made.
std::vector<Given> given(std::int64_t step, const std::vector<Part>& parts, const Scalars& scalars,
                         const CheckpointOptions& options) {
  std::string names, values = json_of(scalars);
  for (const Part& part : parts) {
    names += concat(names.empty() ? "" : ", ", part.name);
    if (!part.prefix.empty()) names += concat(" (", part.prefix, "NAME)");
    Scalars common = part.scalars;
    // Where ranks have other parameters, as the stages of a pipeline, they have other rates.
    std::erase_if(common, [](const auto& scalar) {
      return scalar.first.ends_with(".lr_factor") || scalar.first.ends_with(".weight_decay");
    });
    if (!common.empty()) values += concat(", '", part.name, "' ", json_of(common));
  }
  std::string keeps = concat("keep_latest ", options.keep_latest);
  if (options.loaded) keeps += concat(", loaded ", *options.loaded);
  return {{"steps", concat(step)}, {"parts", names}, {"scalars", values}, {"options", keeps}};
}

// Of what each rank has whole, all write a share, which makes one tensor of equal values only.
void expect_same_wholes(const World& world, const std::vector<Part>& parts) {
  std::vector<std::pair<std::string, Tensor>> shared;
  std::vector<const Part*> of;
  for (const Part& part : parts)
    for (const PartTensor& tensor : part.tensors)
      if (tensor.copies > 1 && !tensor.state.mesh) {
        shared.emplace_back(tensor.names[0].name, tensor.state.values);
        of.push_back(&part);
      }
  const auto unlike = first_unlike({&world}, shared);
  if (!unlike) return;
  const auto& [name, tensor] = shared[*unlike];
  const Part& part = *of[*unlike];
  expect_as_rank_0(world, {number_of_bits(tensor)}, [&](std::size_t) {
    return concat("checkpoint::save: ", shown(name), " of part '", part.name,
                  "' is whole on every rank, in no unit and without a mesh, but has other values "
                  "on rank ",
                  world.rank(), " than on rank 0; make the values alike, or ",
                  part.refresh ? "leave the parameter out of the module"
                               : "give a tensor of which ranks have other rows its mesh");
  });
}

}  // namespace

void expect_keeps(const CheckpointOptions& options) {
  TESSERA_EXPECT(options.keep_latest >= 0, "checkpoint::save: keep_latest is ", options.keep_latest,
                 "; give a number of checkpoints, or 0 to keep all");
}

void check_folder(const std::string& folder, std::int64_t bytes, const World& world) {
  const std::string id = common_id(world), name = "trial";
  std::optional<NewFolder> made;
  on_rank_0(world, folder, [&](std::atomic<std::int64_t>& moves) {
    make_folder(folder, moves);
    NewFolder::sweep(folder);
    ++moves;
    const std::string trial = (std::filesystem::path(folder) / name).string();
    try {
      check_space(trial, bytes);
    } catch (const DataError& error) {
      throw DataError(with_path(error.what(), trial, folder), error.where());
    }
    made.emplace(folder, name, id);
  });
  on_all(world, [&] { expect_seen(folder, NewFolder::hidden(folder, name, id)); });
  world.barrier();
}

Saving::Saving(const std::string& folder, std::int64_t step, std::vector<Part> parts,
               const Scalars& scalars, const World& world, const CheckpointOptions& options)
    : folder_(folder), world_(world), options_(options) {
  TESSERA_EXPECT(world.kind() != WorldKind::emulated,
                 "checkpoint::save: an emulated world has no peers to write their parts");
  const std::string name = concat("step-", step);
  manifest_ = {.id = common_id(world), .step = step, .ranks = world.size(), .scalars = scalars};
  hidden_ = NewFolder::hidden(folder, name, manifest_.id);
  on_all(world, [&] {
    TESSERA_EXPECT(step >= 0, "checkpoint::save: step is ", step, "; give one of at least 0");
    expect_keeps(options);
    for (Part& part : parts) {
      if (part.refresh) part.refresh(part);
      TESSERA_EXPECT(is_plain_name(part.name), "checkpoint::save: part ", shown(part.name),
                     " is no plain file name; give another name");
      TESSERA_EXPECT(part.name != Manifest::kName, "checkpoint::save: part '", part.name,
                     "' has the manifest's name; give another name");
      TESSERA_EXPECT(manifest_.parts.try_emplace(part.name, part.prefix, part.scalars).second,
                     "checkpoint::save: part '", part.name, "' is given twice");
      files_.push_back(RankFile::of(part));
    }
    (void)manifest_.to_string();  // values that no file can hold
  });
  expect_same(world, given(step, parts, scalars, options));
  on_rank_0(world, folder, [&](std::atomic<std::int64_t>& moves) {
    make_folder(folder, moves);
    NewFolder::sweep(folder);
    ++moves;
    std::error_code ignored;
    if (std::filesystem::exists(
            std::filesystem::symlink_status(step_folder(folder, step), ignored)))
      throw DataError(concat('\'', step_folder(folder, step),
                             "' exists already and is kept; name another folder"));
    made_.emplace(folder, name, manifest_.id);
    for (const Part& part : parts)
      if (!std::filesystem::create_directory(hidden_ + '/' + part.name, ignored))
        throw DataError(concat('\'', folder, "' cannot take a new folder: ", ignored.message()));
  });
  expect_same_wholes(world, parts);
  on_all(world, [&] { expect_seen(folder, hidden_); });
}

std::int64_t Saving::left_bytes(const WriteProgress& progress) const {
  std::int64_t bytes = -progress.bytes;
  for (const RankFile& file : files_) bytes += file.size_bytes;
  return bytes;
}

// Runs f, whose errors name the hidden folder: users know the step's. What is left to write may be
// more than the disk has room for.
void Saving::in_step(const WriteProgress& progress, const std::function<void()>& f) const {
  try {
    f();
  } catch (const DeviceError& error) {
    const std::string path = step_folder(folder_, step());
    std::string text = concat("checkpoint::save: saving step ", step(),
                              " has failed: ", with_path(error.what(), hidden_, path));
    try {
      check_space(path, left_bytes(progress));
    } catch (const DataError& lack) {
      text += concat("; ", lack.what());
    }
    throw DeviceError(text, error.where());
  }
}

void Saving::write(const ReadPiece& read, WriteProgress& progress) {
  in_step(progress, [&] {
    for (const RankFile& file : files_)
      written_.push_back(file.write(hidden_, world_.rank(), manifest_.id, options_.must_be_finite,
                                    read, progress));
  });
}

void Saving::exchange() {
  std::vector<WrittenFile> own;
  for (std::size_t i = 0; i < files_.size(); ++i)
    own.push_back({written_[i].size_bytes, written_[i].head_checksum,
                   files_[i].cover(world_.rank(), world_.size())});
  const std::vector<WrittenFile> all = gathered(world_, own);
  std::vector<std::uint64_t> covers(files_.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    covers[i % files_.size()] += all[i].cover;
    manifest_.parts.find(files_[i % files_.size()].part)
        ->second.files.push_back({RankFile::name(static_cast<int>(i / files_.size())),
                                  all[i].size_bytes, all[i].head_checksum});
  }
  for (std::size_t i = 0; i < covers.size(); ++i)
    if (covers[i] != 0) doubtful_.push_back(files_[i].part);
}

void Saving::expect_whole(const std::string& part) const {
  try {
    (void)WeightFiles(concat("part '", part, '\''), manifest_.files(hidden_, part), manifest_.id);
  } catch (const DataError& error) {
    // What is named in it is gone when it is read.
    const std::string text = with_path(error.what(), hidden_ + '/', "");
    throw ContractError(
        concat("checkpoint::save: what the ranks gave as part '", part,
               "' is not each row of each tensor once, with one dtype and shape: ", text,
               "; give a tensor on every rank of its mesh, or without a mesh whole on every rank"));
  }
}

void Saving::commit(WriteProgress& progress) {
  if (!made_) return;
  for (const std::string& part : doubtful_) expect_whole(part);
  in_step(progress, [&] {
    for (const RankFile& file : files_) {
      sync_folder(hidden_ + '/' + file.part);
      ++progress.syncs;
    }
    NewFile file(hidden_ + '/' + Manifest::kName);
    file.write(0, manifest_.to_string());
    file.finish();
    ++progress.syncs;
    made_->commit();
    ++progress.syncs;
  });
  if (options_.keep_latest == 0) return;
  try {
    keep_newest(folder_, options_.keep_latest, options_.loaded);
    if (!Manifest::is_in(step_folder(folder_, step())))
      log(LogLevel::warning,
          concat("checkpoint: step ", step(), " was saved, and removed again, since keep_latest ",
                 options_.keep_latest, " keeps newer steps of '", folder_, '\''));
  } catch (const Error& error) {  // this one is saved
    log(LogLevel::warning, concat("checkpoint: an older one could not be removed: ", error.what()));
  }
}

}  // namespace tessera::checkpoint
