// Whole models in safetensors files, with the names of their parameters and buffers: for Llama and
// GPT-2 those that Hugging Face's files have. Sharded checkpoints are another format.
//
//   checkpoint::save_weights("model.safetensors", model, world);      every rank calls
//   checkpoint::save_weights(path, model, world, {.dtype = bf16});    half as large
//   model.load("model.safetensors");                                  any number of ranks
//   model.load("gpt2/");                                              what was downloaded, as it is
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/safetensors.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::checkpoint {

struct SaveOptions {
  // Of parameters that are stored in f32: this, or bf16 or f16, rounded. Others keep theirs, as
  // buffers do.
  DType dtype = f32;
  // Where a value would not be finite in the file, none is written, and an older one stays.
  bool must_be_finite = false;
};

// What was to be saved has diverged.
class NotFinite : public DataError {
  using DataError::DataError;
};

// Writes every parameter below `model`, a tied one under its first name, one with row parts as
// these (Parameter::set_row_parts), in its own shape [d0, ...], or [d1, d0] where
// Module::saves_transposed says so, and every persistent buffer, as rank 0 has it. Rank 0 writes,
// the others send their shards; on return the file is whole, and has replaced an older one in one
// step (see WholeFile). Collective. Memory: the largest parameter in f32 on each rank, twice where
// it is transposed, and half of it more in 16 bits. Throws: on rank 0 DataError if `path` cannot be
// written (see check_writable) and DeviceError if the system refuses; ContractError for a parameter
// without memory, for other dtypes, and on every rank for one in no unit (ShardOptions::ignored)
// whose values differ between ranks; on every rank NotFinite, which names the first parameter;
// see SaveOptions.
void save_weights(const std::string& path, nn::Module& model, const World& world,
                  const SaveOptions& options = {});

// Writes the tensors of a state dict whole, by their names: what an optimizer keeps, for
// `optimizer.load(model, WeightFiles(path))`. Views are enough, and take no memory:
//
//   checkpoint::save_state("adamw.safetensors", optimizer.state_dict(model, {StateForm::view}),
//                          world);
//
// Otherwise as save_weights.  Throws: likewise; ContractError as for_each_full.
void save_state(const std::string& path, const StateDict& state, const World& world);

// What save_weights does but for the file, so that it can be planned: calls f(name, full tensor as
// the file has it) on rank 0 for everything, in the file's order. The tensor is valid during the
// call. Collective.
void for_each_saved_tensor(
    nn::Module& model, const World& world,
    const std::function<void(const std::string& name, const Tensor& full)>& f,
    const SaveOptions& options = {});

// A file of a model, and what it has to be where that is known.
struct WeightFile {
  std::string path;
  Links links = Links::followed;
  std::int64_t size_bytes = -1;     // -1: not known
  std::uint64_t head_checksum = 0;  // of SafetensorsReader::head, where the size is known
};

// One model's tensors, whole in one file each, or in boxes that together are all of it. Headers are
// read at first, and data where it is asked for: of a box the pieces of 4 MiB that are wanted, each
// checked where the file has its checksum.
// Owns: descriptors.  Threads: all calls are const and free for all.
class WeightFiles final : public nn::StateSource {
 public:
  // A safetensors file; an index of several, whose name ends with ".json", as Hugging Face's
  // model.safetensors.index.json; a folder with model.safetensors or such an index in it, or with
  // the files of PyTorch's sharded form (HuggingFaceStorageWriter); or a checkpoint of
  // checkpoint/checkpoint.hpp, of which it takes the part "model".
  // Throws: DataError as SafetensorsReader, for an index that is none or names a file outside of
  // its folder or a tensor that its file lacks, for a tensor that stands in two files, and for
  // boxes that leave something out, overlap or contradict each other.
  explicit WeightFiles(const std::string& path);
  // These files together.  Throws: likewise; ContractError for none.
  explicit WeightFiles(const std::vector<std::string>& paths);
  // The same of a save that is known by `id`, whose files are as said.  Throws: DataError for
  // another file, too.
  WeightFiles(const std::string& what, const std::vector<WeightFile>& files, std::string_view id);
  ~WeightFiles() override;
  WeightFiles(WeightFiles&&) noexcept;
  WeightFiles& operator=(WeightFiles&&) noexcept;

  // Of the files, in the order in which they were given or the index names them.
  std::vector<std::string> paths() const;
  // Of the index; empty without one.
  const std::string& index() const noexcept { return index_; }

  // Of the interface; see nn::StateSource.
  const std::string& what() const noexcept override { return what_; }
  std::vector<std::string> names() const override;
  bool has(std::string_view name) const override;
  Entry entry(std::string_view name) const override;
  bool is_file() const noexcept override { return true; }
  bool is_same(std::string_view a, std::string_view b) const override;
  std::string fault(std::string_view name, const ShardSpec& spec) const override;
  void read(const Tensor& to, std::span<const std::string> names, const ShardSpec& spec,
            bool transposed) const override;
  [[noreturn]] void refuse(const std::string& message) const override;

 private:
  struct State;
  void open(const std::vector<WeightFile>& files, std::string_view id = {});
  void open_index(const std::string& path);

  std::string what_, index_;
  std::unique_ptr<State> state_;
};

// What Module::load does with a path. Each rank reads the rows that it has; floating dtypes become
// those of the model. A tied parameter may stand under any of its names, and under several as long
// as its bytes are the same. What the model computes itself is left (Module::is_left_in_files), and
// a prefix of all names may be missing (Module::optional_prefix). Not collective; ranks use the
// values in collectives only after all have returned (World::barrier). Memory: two pieces of 4 MiB.
// Throws: DataError naming the file and the tensor when one is missing, unexpected, of another
// shape or of a dtype that cannot be loaded; nothing has changed then. DataError for bytes that are
// not as they were saved, and DeviceError where they cannot be read; what was read before them has
// changed. ContractError for a parameter without memory.
nn::LoadReport load_weights(const std::string& path, nn::Module& model,
                            const nn::LoadOptions& options = {});

}  // namespace tessera::checkpoint
