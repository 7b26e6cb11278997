// Sharded checkpoints: every rank writes what it has, and any number of ranks may load it.
//
//   checkpoint::save("runs/a", step,                                     every rank calls
//                    {checkpoint::part(model, world), checkpoint::part(optimizer, model, world)},
//                    {{"samples", 6400}}, world);
//
//   if (const auto step = checkpoint::newest("runs/a", world)) {         any number of ranks
//     const checkpoint::Checkpoint from("runs/a", *step);
//     model.load(*from.part("model"));
//     optimizer.load(model, *from.part("optimizer"));
//     samples = from.integer("samples");
//   }
//
//   runs/a/step-100/                 is there as a whole or not at all
//     manifest.json                  which files, of which size and checksum; and what is no tensor
//     model/                         PyTorch's HuggingFaceStorageReader reads such a folder
//       shard-00001-model-00001-of-00001.safetensors       rank 0's rows
//       shard-00002-model-00001-of-00001.safetensors       rank 1's
//     optimizer/
//       shard-00001-model-00001-of-00001.safetensors
//       ...
//
// Tensors stand in the files as save_weights names and shapes them. So runs with separate and fused
// projections, with other units and with other meshes resume each other. Ranks that have the same
// rows share the work of writing them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/comm/world.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/optim/optimizer.hpp"

namespace tessera::checkpoint {

// Values that are no tensors, by name: finite numbers, and texts in UTF-8. Cast other integer
// types, as static_cast<std::int64_t>(rows.size()).
using Scalar = std::variant<bool, std::int64_t, double, std::string>;
using Scalars = std::map<std::string, Scalar, std::less<>>;

// A tensor of a part: this rank's rows, and its names in the files.
struct PartTensor {
  std::vector<RowPart> names{};  // one, or its row parts, which are tensors of their own in files
  bool is_transposed = false;    // in the files; for a matrix
  StateTensor state{};           // this rank's rows
  int copies = 1, copy = 0;      // ranks that have these rows, and this one's place among them
};

// A state dict of a checkpoint. `save` reads its tensors, not before.
struct Part {
  std::string name;                   // a plain file name
  std::vector<PartTensor> tensors{};  // this rank's; may lack those that it does not write
  // The same on every rank, but for rates of parameters (NAME.lr_factor, NAME.weight_decay), which
  // are rank 0's.
  Scalars scalars{};
  std::string prefix{};  // of its tensors' names in files
  // What `save` calls with a copy, to bring tensors and scalars that have kept their names up to
  // date. A part without it is saved as it is.
  std::function<void(Part&)> refresh{};
};

// The parts of a model and of its optimizer may be made once and saved after any step: each save
// takes weights, buffers, moments, counts and rates as they are then. So model, optimizer and world
// outlive them. A save throws a ContractError for a part that has other tensors by then, as
// optimizers have after freeze or thaw; make it anew.
// The part "model": a model's parameters, and its persistent buffers as rank 0 has them.
Part part(const nn::Module& model, const World& world);
// The part "optimizer": what an optimizer keeps for the parameters of `model`. Moments are tensors,
// by the names that PyTorch gives them; the rest are scalars.
Part part(optim::Optimizer& optimizer, const nn::Module& model, const World& world);
// A part for a state dict of the program's own; its tensors keep their names. A tensor without a
// mesh is whole, and every rank has it with the same values. Its values come back by
//   values = from.part("ema")->rows(std::vector{name}, spec, false, values.dtype(), device);
// Throws: ContractError for rows without their mesh.
Part part(std::string name, const StateDict& state, const World& world);

struct CheckpointOptions {
  // Whether a value that is not finite stops the save: nothing is saved, and every rank throws
  // NotFinite.
  bool must_be_finite = false;
  // After the save, all but so many of FOLDER's newest checkpoints are removed, but never `loaded`.
  // 0: none is removed.
  std::int64_t keep_latest = 0;
  std::optional<std::int64_t> loaded{};
};

// Saves these parts as FOLDER/step-N. FOLDER is made if it does not exist. On return the checkpoint
// is whole, and survives a loss of power. Until then nothing has its name: a process that is killed
// leaves a hidden folder, which the next save removes. Collective; every rank gives the same parts,
// step and scalars. A disk may be slow, so while a rank's bytes grow, others wait for it. After 10
// s, and each 10 s more, a line of the log names the slowest rank. saver.hpp has saves that
// training does not wait for. Memory: four pieces of 4 MiB.
//   Throws: on every rank the same, and nothing is saved:
//   - DataError where FOLDER cannot be written or is not the same folder on every rank, and for a
//     step that is there already, also when another program has just saved it;
//   - DeviceError where the system refuses; if it refuses the last fsync, of FOLDER, step-N is
//     there and may not outlive a loss of power;
//   - NotFinite;
//   - ContractError for a parameter without memory; for a negative step or `keep_latest`; for part
//     names that are no file names or come twice; for scalars that are not finite; for an emulated
//     world; for a parameter in no unit (ShardOptions::ignored), or another tensor that every rank
//     has whole, whose values differ between ranks;
//   - ContractError for ranks that give other steps, parts, scalars or options; and for tensors of
//     which the ranks do not have each row once, with one dtype and shape. Its message names the
//     first that differs.
void save(const std::string& folder, std::int64_t step, const std::vector<Part>& parts,
          const Scalars& scalars, const World& world, const CheckpointOptions& options = {});

// Tries whether FOLDER takes a checkpoint of so many bytes, as a check before hours of training. It
// leaves nothing but the folder. Collective. Throws: DataError, on every rank the same.
void check_folder(const std::string& folder, std::int64_t bytes, const World& world);

// Keeps FOLDER for one run: two that save into it would each remove what the other keeps. Rank 0
// holds the lock for all ranks, and the system frees it when the process ends, however it does.
// Loads and single saves ask for no lock. Owns: a descriptor, on rank 0.
class FolderLock {
 public:
  // FOLDER exists. Collective. A file system without locks keeps nobody out. Throws: DataError, on
  // every rank the same, if another run has it.
  FolderLock(const std::string& folder, const World& world);
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

 private:
  int descriptor_ = -1;  // where it is open
};

// FOLDER/step-N.
std::string step_folder(const std::string& folder, std::int64_t step);
// The steps of a folder's checkpoints, rising; none if the folder does not exist. It looks into no
// files but the manifest's name. Throws: DataError if `folder` is no folder or may not be read;
// DeviceError if the system refuses.
std::vector<std::int64_t> steps_in(const std::string& folder);
// What becomes of an entry step-N that is newer than all checkpoints and is none itself: a program
// that goes on from an older one would lose steps without a word, and later find the name taken.
enum class Broken : std::uint8_t { refused, passed_over };
// The newest step, which rank 0 looks up for all ranks. Collective. Throws, on every rank the same:
// as steps_in; DataError for what is Broken.
std::optional<std::int64_t> newest(const std::string& folder, const World& world,
                                   Broken broken = Broken::refused);
// Removes all checkpoints but the `count` newest, and never `loaded`. One rank calls it, after a
// save. Throws: ContractError for a `count` below 1; as steps_in.
void keep_newest(const std::string& folder, std::int64_t count,
                 std::optional<std::int64_t> loaded = {});

// A checkpoint to be loaded. Its manifest is read at once, headers with a part, and data when it is
// asked for. All of it is checked.
class Checkpoint {
 public:
  // Throws: DataError for a folder that is no checkpoint, and for a manifest that has changed.
  explicit Checkpoint(const std::string& path);
  // FOLDER/step-N. Throws: likewise; DataError, too, if it holds another step.
  Checkpoint(const std::string& folder, std::int64_t step);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::string& path() const noexcept { return path_; }
  const std::string& id() const noexcept;  // of the save
  std::int64_t step() const noexcept;
  int ranks() const noexcept;  // that saved it
  std::vector<std::string> parts() const;
  // The scalars of the save, and of a part.
  const Scalars& scalars() const noexcept;
  const Scalars& scalars(std::string_view part) const;
  // A scalar of the save, by name. `number` takes an integer, too. Throws: DataError for a name
  // that is not there, or has another kind.
  std::int64_t integer(std::string_view name) const;
  double number(std::string_view name) const;
  const std::string& text(std::string_view name) const;

  // A part, for Module::load and Optimizer::load. It may outlive this. Throws: DataError for a part
  // that is not there, for files that are missing, cut off, changed or of another save, and for
  // tensors that are not whole in them.
  std::shared_ptr<const StateSource> part(std::string_view name) const;

 private:
  struct State;
  std::string path_;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::checkpoint
