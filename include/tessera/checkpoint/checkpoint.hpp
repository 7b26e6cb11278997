// Sharded checkpoints: every rank writes what it has, and any number of ranks goes on with it.
//
//   checkpoint::save("runs/a", step, {checkpoint::part(model), checkpoint::part(optimizer, model)},
//                    {{"samples", 6400}}, world);                        every rank calls
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
// Tensors stand in the files as save_weights names and shapes them, so that separate and fused
// projections, other units and other meshes resume each other. Ranks that have the same rows share
// the writing of them.
#pragma once

#include <cstdint>
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

// What is no tensor, by name: numbers, that are finite, and texts of UTF-8. Integers of other types
// than these are cast: static_cast<std::int64_t>(rows.size()).
using Scalar = std::variant<bool, std::int64_t, double, std::string>;
using Scalars = std::map<std::string, Scalar, std::less<>>;

// A tensor of a part, as this rank has it and as the files name it.
struct PartTensor {
  std::vector<RowPart> names{};  // one, or its row parts, which files hold apart
  bool is_transposed = false;    // in the files; a matrix
  StateTensor state{};           // this rank's rows
  int copies = 1, copy = 0;      // how many ranks have these rows, and the how-manieth this one is
};

// A state dict of a checkpoint. Its tensors are read by `save`, not before.
struct Part {
  std::string name;                   // a plain file name
  std::vector<PartTensor> tensors{};  // of this rank; those that it does not write may be missing
  Scalars scalars{};                  // the same on every rank
  std::string prefix{};               // of the names in files
};

// A model's parameters and persistent buffers, of which rank 0's are saved; "model".
Part part(const nn::Module& model, const World& world);
// What an optimizer keeps of the parameters of `model`: its moments as tensors, in the names that
// PyTorch gives them, the rest as values; "optimizer".
Part part(optim::Optimizer& optimizer, const nn::Module& model, const World& world);
// A state dict of the program's own, whose tensors are named as they are. Its values come back by
//   values = from.part("ema")->rows(std::vector{name}, spec, false, values.dtype(), device);
Part part(std::string name, const StateDict& state, const World& world);

struct CheckpointOptions {
  // Where a value is not finite, nothing is saved: a NotFinite on every rank.
  bool must_be_finite = false;
  // Once it is saved, all but so many of FOLDER's newest are removed, but never `loaded`; 0: none.
  std::int64_t keep_latest = 0;
  std::optional<std::int64_t> loaded{};
};

// Saves these parts as FOLDER/step-N; FOLDER is made where it is not there. On return the
// checkpoint is whole, also after a loss of power. Until then nothing has its name: a process that
// is killed leaves a hidden folder, which the next save takes away. Collective; every rank gives
// the same parts, step and scalars. A disk may be slow: while a rank's bytes grow, others wait for
// it, and after 10 s, and each 10 s more, a line of the log names the slowest rank. saver.hpp has
// saves that training does not wait for. Memory: four pieces of 4 MiB.
//   Throws: on every rank the same, and nothing is saved:
//   - DataError where FOLDER cannot be written or is not the same folder on every rank, and for a
//     step that is there already, also when another program has just saved it;
//   - DeviceError where the system refuses; if it refuses the last fsync, of FOLDER, step-N is
//     there and may not outlive a loss of power;
//   - NotFinite;
//   - ContractError for a parameter without memory, names that are no file names, scalars that are
//     not finite, and values of what lies in no unit (ShardOptions::ignored) that differ between
//     ranks.
void save(const std::string& folder, std::int64_t step, const std::vector<Part>& parts,
          const Scalars& scalars, const World& world, const CheckpointOptions& options = {});

// Whether FOLDER takes a checkpoint of so many bytes, which is tried, as save would: for a check
// before hours of training. Leaves nothing but the folder. Collective.
// Throws: DataError, on every rank the same.
void check_folder(const std::string& folder, std::int64_t bytes, const World& world);

// FOLDER/step-N.
std::string step_folder(const std::string& folder, std::int64_t step);
// The checkpoints of a folder, rising; none where it is not there. Without a look into files.
// Throws: DataError where it is no folder; DeviceError where the system refuses.
std::vector<std::int64_t> steps_in(const std::string& folder);
// The newest of them, which rank 0 looks up for all. Collective.  Throws: as steps_in on rank 0,
// and DataError on the others.
std::optional<std::int64_t> newest(const std::string& folder, const World& world);
// Removes all but the `count` newest ones, and never `loaded`. By one rank, behind a save.
// Throws: DeviceError where the system refuses.
void keep_newest(const std::string& folder, std::int64_t count,
                 std::optional<std::int64_t> loaded = {});

// A checkpoint that is to be loaded. Its manifest is read at first, headers with a part, and data
// as it is asked for; all of it is checked.
class Checkpoint {
 public:
  // Throws: DataError for a folder that is none, and for a manifest that has changed.
  explicit Checkpoint(const std::string& path);
  // FOLDER/step-N.  Throws: also where it holds another step.
  Checkpoint(const std::string& folder, std::int64_t step);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::string& path() const noexcept { return path_; }
  const std::string& id() const noexcept;  // of the save
  std::int64_t step() const noexcept;
  int ranks() const noexcept;  // that have saved it
  std::vector<std::string> parts() const;
  // What is no tensor, of the save and of a part.
  const Scalars& scalars() const noexcept;
  const Scalars& scalars(std::string_view part) const;
  // A number may be an integer.
  // Throws: DataError for a name that is not there, or of another kind.
  std::int64_t integer(std::string_view name) const;
  double number(std::string_view name) const;
  const std::string& text(std::string_view name) const;

  // What Module::load and Optimizer::load take. It may outlive this.
  // Throws: DataError for a part that is not there, for files that are missing, cut off, changed or
  // of another save, and for tensors that are not whole in them.
  std::shared_ptr<const StateSource> part(std::string_view name) const;

 private:
  struct State;
  std::string path_;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::checkpoint
