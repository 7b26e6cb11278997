// Whole models in safetensors files, with the names of their parameters and buffers. For Llama and
// GPT-2 these are the names in Hugging Face's files. Sharded checkpoints are another format.
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
  // The dtype in the file of parameters that are stored in f32: f32, or rounded to bf16 or f16.
  // Other parameters, and buffers, keep their own.
  DType dtype = f32;
  // Whether a value that would not be finite in the file stops the save. Then no file is written,
  // and an older one stays.
  bool must_be_finite = false;
};

// The values to be saved are not finite.
class NotFinite : public DataError {
  using DataError::DataError;
};

// Writes every parameter below `model`, in its own shape [d0, ...], or [d1, d0] if
// Module::saves_transposed says so. A tied parameter goes under its first name. One with row parts
// goes as these (Parameter::set_row_parts). Persistent buffers are written, too, as rank 0 has
// them. Rank 0 writes, and the others send their shards. On return the file is whole, and has
// replaced an older one in one step (see WholeFile). Collective. Memory on each rank: the largest
// parameter in f32, twice that if it is transposed, and half of it more for 16 bits.
//   Throws: on rank 0 DataError if `path` cannot be written (see check_writable) and DeviceError if
// the system refuses. ContractError for another `dtype`. On every rank: ContractError for a
// parameter that on some rank has no memory, or lies on a part of the world's ranks, and for one in
// no unit (ShardOptions::ignored) whose values differ between ranks; NotFinite, which names the
// first such tensor (SaveOptions::must_be_finite).
void save_weights(const std::string& path, nn::Module& model, const World& world,
                  const SaveOptions& options = {});

// Writes the tensors of a state dict whole, by their names. For example what an optimizer keeps,
// for `optimizer.load(model, WeightFiles(path))`. Views are enough, and take no memory:
//
//   checkpoint::save_state("adamw.safetensors", optimizer.state_dict(model, {StateForm::view}),
//                          world);
//
// Otherwise it does as save_weights. Throws: as save_weights; ContractError as for_each_full.
void save_state(const std::string& path, const StateDict& state, const World& world);

// Does what save_weights does, without the file, so that it can be planned. It calls f(name, full
// tensor as the file has it) on rank 0 for everything, in the file's order. The tensor is valid
// during the call. Collective.
void for_each_saved_tensor(
    nn::Module& model, const World& world,
    const std::function<void(const std::string& name, const Tensor& full)>& f,
    const SaveOptions& options = {});

// A file of a model, and what it must be, if that is known.
struct WeightFile {
  std::string path;
  Links links = Links::followed;
  std::int64_t size_bytes = -1;     // -1: not known
  std::uint64_t head_checksum = 0;  // of SafetensorsReader::head, if the size is known
};

// One model's tensors. Each is whole in one file, or in boxes that together are all of it. Headers
// are read at once, and data when it is asked for. A box is read in pieces of 4 MiB, only those
// that are wanted. Each is checked if the file has its checksum. Owns: descriptors. Threads: all
// calls are const and free for all.
class WeightFiles final : public nn::StateSource {
 public:
  // `path` is one of these. A safetensors file. An index of several, whose name ends with ".json",
  // as Hugging Face's model.safetensors.index.json. A folder with model.safetensors or such an
  // index, or with the files of PyTorch's sharded form (HuggingFaceStorageWriter). A checkpoint of
  // checkpoint/checkpoint.hpp, of which it takes the part "model".
  //   Throws: DataError as SafetensorsReader; for an index that is none, or that names a file
  // outside of its folder or a tensor that its file lacks; for a tensor that stands in two files;
  // for boxes that leave something out, overlap or contradict each other.
  explicit WeightFiles(const std::string& path);
  // Several files, together one model. Throws: likewise; ContractError for no file.
  explicit WeightFiles(const std::vector<std::string>& paths);
  // The files of one save, which `id` names; each must be as `files` says. Throws: DataError for
  // another file, too.
  WeightFiles(const std::string& what, const std::vector<WeightFile>& files, std::string_view id);
  ~WeightFiles() override;
  WeightFiles(WeightFiles&&) noexcept;
  WeightFiles& operator=(WeightFiles&&) noexcept;

  // The paths of the files, in the order in which they were given or the index names them.
  std::vector<std::string> paths() const;
  // The path of the index; empty without one.
  const std::string& index() const noexcept { return index_; }

  // The interface; see nn::StateSource.
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

// Does what Module::load does with a path. Each rank reads the rows that it has. Floating dtypes
// become those of the model. A tied parameter may stand under any of its names; under several, its
// bytes must be the same. Tensors that the model computes itself stay in the file
// (Module::is_left_in_files), and a prefix of all names may be missing (Module::optional_prefix).
// Not collective: ranks use the values in collectives only after all have returned
// (World::barrier). Memory: two pieces of 4 MiB.
//   Throws: DataError that names the file and the tensor if one is missing, unexpected, of another
// shape or of a dtype that cannot be loaded; then nothing has changed. DataError for bytes that are
// not as they were saved, and DeviceError if they cannot be read; what was read before them has
// changed. ContractError for a parameter without memory.
nn::LoadReport load_weights(const std::string& path, nn::Module& model,
                            const nn::LoadOptions& options = {});

}  // namespace tessera::checkpoint
