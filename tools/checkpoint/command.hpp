// What tessera-checkpoint is asked for, and its answers. None of them changes a checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/dtype.hpp"

namespace tessera::checkpoint_tool {

struct Command {
  std::vector<std::string> paths;
  bool json = false;  // the answer is one JSON object on one line
  // Of export alone.
  std::optional<DType> dtype{};  // of floats of 32 and 16 bits
  std::int64_t max_shard_bytes = 5'000'000'000;
};

// What stdout gets, and what the program ends with: 0, or 1 where something was found.
struct Answer {
  std::string text;
  int exit_code = 0;
};

// Each throws DataError for a path that is none of its kind, DeviceError where the system refuses.
//
// What a checkpoint has: step, ranks, scalars, and the tensors of its parts. Reads headers.
Answer inspect(const Command& command);
// Reads all bytes of a checkpoint on all cores, and says which are not as they were saved, and what
// else lies in its folders.
Answer verify(const Command& command);
// Which tensors and scalars of two checkpoints have other bits. Where one side is weights, as
// WeightFiles takes them, their parts "model" are compared, without scalars. On all cores, tensor
// by tensor.
Answer diff(const Command& command);
// Writes weights, as WeightFiles takes them, whole into a new folder: files and their index, as
// Hugging Face's programs read them. The folder is there as a whole or not at all. On all cores,
// file by file.
Answer export_weights(const Command& command);

}  // namespace tessera::checkpoint_tool
