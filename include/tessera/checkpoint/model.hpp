// Whole models in one safetensors file, f32, with the names of their parameters: for Llama and
// GPT-2 those that Hugging Face's files have. Sharded checkpoints are another format.
//
//   checkpoint::save_weights("model.safetensors", model, world);      every rank calls
//   checkpoint::load_weights("model.safetensors", model);             any number of ranks
#pragma once

#include <functional>
#include <string>

#include "tessera/checkpoint/safetensors.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::checkpoint {

// Writes every parameter below `model`, a tied one under its first name, in its own shape [d0,
// ...], or [d1, d0] where Module::saves_transposed says so. Rank 0 writes, the others send their
// shards; on return the file is whole, and has replaced an older one in one step (see WholeFile).
// Collective. Memory: the largest parameter in f32 on each rank, twice where it is transposed.
// Throws: on rank 0 DataError if `path` cannot be written (see check_writable) and DeviceError if
// the system refuses; ContractError for a parameter without memory.
void save_weights(const std::string& path, nn::Module& model, const World& world);

// Reads the rows that this rank owns of every parameter below `model`; floating dtypes become f32.
// A tied parameter may stand under its other names too, as long as its bytes are the same. Not
// collective; ranks use the values in collectives only after all have returned (World::barrier).
// Throws: DataError naming the file and the parameter when one is missing, left over, of another
// shape or of no floating dtype; no parameter has changed then. ContractError for a parameter
// without memory.
void load_weights(const std::string& path, nn::Module& model);
void load_weights(const SafetensorsReader& file, nn::Module& model);

// Whether the file's parameters are the model's, which needs no memory yet.  Throws: DataError as
// load_weights.
void check_weights(const SafetensorsReader& file, const nn::Module& model);

// What save_weights does but for the file, so that it can be planned: calls f(name, full tensor f32
// as the file has it) on rank 0 for every parameter, in the file's order. The tensor is valid
// during the call. Collective.
void for_each_saved_tensor(
    nn::Module& model, const World& world,
    const std::function<void(const std::string& name, const Tensor& full)>& f);

}  // namespace tessera::checkpoint
