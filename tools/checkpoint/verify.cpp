#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/checkpoint/shard_info.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/file.hpp"
#include "tessera/detail/base/json.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tools/checkpoint/all_cores.hpp"
#include "tools/checkpoint/command.hpp"
#include "tools/checkpoint/parts.hpp"
#include "tools/checkpoint/progress.hpp"

namespace tessera::checkpoint_tool {
namespace {

using namespace checkpoint;

// 4 MiB of a tensor's data in a file, or less at its end.
struct Piece {
  const SafetensorsReader* file;
  const SafetensorsEntry* entry;
  std::int64_t index;
  std::uint64_t checksum;

  std::int64_t size_bytes() const {
    return std::min(kPieceBytes, entry->size_bytes - index * kPieceBytes);
  }
};

class Verification {
 public:
  explicit Verification(std::string path) : path_(std::move(path)) {}

  // One line for each fault; empty for a checkpoint that is as it was saved.
  const std::vector<std::string>& run() {
    try {
      const Manifest manifest = Manifest::read(path_);
      if (std::string fault = manifest.fault_of_name(path_); !fault.empty())
        faults_.push_back(std::move(fault));
      std::set<std::string> named{Manifest::kName};
      for (const auto& [name, part] : manifest.parts) {
        named.insert(name);
        open(manifest, name);
      }
      find_strays(path_, named);
    } catch (const TooManyFiles&) {
      throw;
    } catch (const Error& error) {
      faults_.emplace_back(error.what());
    }
    std::ranges::sort(strays_);
    faults_.insert(faults_.end(), strays_.begin(), strays_.end());
    const std::size_t known = faults_.size();
    read_all();
    std::sort(faults_.begin() + static_cast<std::ptrdiff_t>(known), faults_.end());
    return faults_;
  }
  std::int64_t files() const { return files_; }
  std::int64_t bytes() const { return bytes_; }  // of files that could be opened

 private:
  // Notes what is wrong with the headers of a part, and the pieces of its data.
  void open(const Manifest& manifest, const std::string& part) {
    const std::size_t before = faults_.size();
    std::set<std::string> named;
    for (const WeightFile& meant : manifest.files(path_, part)) {
      ++files_;
      named.insert(std::filesystem::path(meant.path).filename().string());
      attempt([&] { open(meant, manifest.id); });
    }
    // Whether boxes are whole tensors shows where all files are there.
    if (faults_.size() == before) attempt([&] { (void)open_part(path_, manifest, part); });
    attempt([&] { find_strays(std::filesystem::path(path_) / part, named); });
  }

  // Notes what lies in a folder under none of these names, whatever it is.
  void find_strays(const std::filesystem::path& folder, const std::set<std::string>& named) {
    std::error_code error;
    for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end;
         at.increment(error))
      if (!named.contains(at->path().filename().string()))
        strays_.push_back(concat('\'', at->path().string(), "' is in no manifest; move it away"));
    // The files of a folder that is not there have been named.
    if (!error || error == std::errc::no_such_file_or_directory ||
        error == std::errc::not_a_directory)
      return;
    const std::string fault = concat('\'', folder.string(), "' cannot be read: ", error.message());
    if (error == std::errc::too_many_files_open)
      throw TooManyFiles(concat(fault, "; raise the limit (ulimit -n)"));
    throw DeviceError(fault);
  }

  void open(const WeightFile& meant, const std::string& id) {
    const SafetensorsReader& file =
        *readers_.emplace_back(std::make_unique<SafetensorsReader>(meant.path, meant.links));
    const ShardInfo info = shard_info_of(file, meant, id);
    bytes_ += file.size_bytes();
    for (const SafetensorsEntry& entry : file.entries()) {
      const auto box = info.boxes.find(entry.name);  // which a file of a manifest has
      for (std::int64_t i = 0; i < pieces_of(entry.size_bytes); ++i)
        pieces_.push_back({&file, &entry, i, box->second.checksums[static_cast<std::size_t>(i)]});
    }
  }

  void read_all() {
    std::int64_t total = 0;
    for (const Piece& piece : pieces_) total += piece.size_bytes();
    Progress progress("verify", total);
    on_all_cores(pieces_.size(), [&] {
      return [this, &progress,
              buffer = std::vector<std::byte>(kPieceBytes)](std::size_t i) mutable {
        const Piece& piece = pieces_[i];
        const auto bytes = std::span(buffer).first(static_cast<std::size_t>(piece.size_bytes()));
        attempt([&] {
          piece.file->read(*piece.entry, piece.index * kPieceBytes, bytes);
          check_piece(*piece.file, *piece.entry, piece.index, bytes, piece.checksum);
        });
        progress.add(piece.size_bytes());
      };
    });
  }

  // A fault is the checkpoint's: where a file could not be opened for want of descriptors, nothing
  // is known.
  template <class F>
  void attempt(const F& f) {
    try {
      f();
    } catch (const TooManyFiles&) {
      throw;
    } catch (const Error& error) {
      const std::scoped_lock lock(mutex_);
      faults_.emplace_back(error.what());
    }
  }

  std::string path_;
  std::vector<std::unique_ptr<SafetensorsReader>> readers_;
  std::vector<Piece> pieces_;
  std::mutex mutex_;  // of the faults, while threads read
  std::vector<std::string> faults_, strays_;
  std::int64_t files_ = 0, bytes_ = 0;
};

}  // namespace

Answer verify(const Command& command) {
  const std::string& path = command.paths[0];
  expect_checkpoint(path);
  Verification verification(path);
  const std::vector<std::string>& faults = verification.run();
  const int exit_code = faults.empty() ? 0 : 1;
  if (command.json) {
    std::string all;
    for (const std::string& fault : faults)
      all += concat(all.empty() ? "" : ", ", json::quote(fault));
    return {concat("{\"path\": ", json::quote(path), ", \"whole\": ",
                   faults.empty() ? "true" : "false", ", \"files\": ", verification.files(),
                   ", \"bytes\": ", verification.bytes(), ", \"faults\": [", all, "]}\n"),
            exit_code};
  }
  std::string text;
  for (const std::string& fault : faults) text += printable(fault) + '\n';
  text += concat('\'', printable(path), "': ", counted(verification.files(), "file"), ", ",
                 counted(verification.bytes(), "byte"), ", ",
                 faults.empty() ? "all as saved" : counted(std::ssize(faults), "fault"), '\n');
  return {text, exit_code};
}

}  // namespace tessera::checkpoint_tool
