// Whole models in one safetensors file, with Hugging Face's names and orientation, f32. Sharded
// checkpoints are another format.
#pragma once

#include <functional>
#include <string>

#include "tessera/comm/world.hpp"
#include "tessera/nn/language_model.hpp"

namespace tessera::train {

// Calls f(name, full tensor f32 as the file has it) on rank 0 for every parameter. The tensor is
// valid during the call. Collective.
void for_each_saved_tensor(
    nn::LanguageModel& model, const World& world,
    const std::function<void(const std::string& name, const Tensor& full)>& f);

// Rank 0 writes; the others send their shards. Collective.
// Throws: DataError if the file cannot be written.
void save_weights(nn::LanguageModel& model, const World& world, const std::string& path);

// Each rank reads the rows that it owns. Floating dtypes are converted to f32.
// Throws: DataError naming the file and the parameter when one is missing, left over or of another
// shape.
void load_weights(nn::LanguageModel& model, const std::string& path);

}  // namespace tessera::train
