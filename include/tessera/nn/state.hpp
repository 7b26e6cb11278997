// The state of a model by name, parameters and persistent buffers, taken out and put back.
//
//   const StateDict best = model.state_dict();               this rank's rows, copied
//   model.load(best);                                        on a world of the same size
//   model.load({{"up.weight", whole}}, {.strict = false});   whole tensors, any number of ranks
//   model.load("model.safetensors");                         files: see checkpoint/model.hpp
//
// None of it is collective. A load looks at everything first and changes nothing when it refuses.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/param/state_dict.hpp"

namespace tessera::nn {

class Module;

struct LoadOptions {
  // Whether names that are missing or unexpected are an error. A tensor of another shape or kind
  // always is.
  bool strict = true;
};
struct LoadReport {
  std::vector<std::string> missing;     // names of the model that were not there, and are unchanged
  std::vector<std::string> unexpected;  // names that were there and the model does not have
};

// Where a load takes values from: a state dict, or files.
class StateSource {
 public:
  struct Entry {
    std::vector<std::int64_t> shape;
    DType dtype = f32;
    std::string foreign{};  // the name of a dtype that is none of ours
  };
  virtual ~StateSource() = default;
  virtual const std::string& what() const noexcept = 0;  // "the state dict", "'model.safetensors'"
  virtual std::vector<std::string> names() const = 0;
  virtual bool has(std::string_view name) const = 0;
  // Of a name that it has, as all that follow.
  virtual Entry entry(std::string_view name) const = 0;
  // Whether names and layouts are those of files: see Module::saves_transposed and the like.
  virtual bool is_file() const noexcept = 0;
  // Whether two entries hold the same bytes.
  virtual bool is_same(std::string_view a, std::string_view b) const = 0;
  // What is wrong with `name` as a source of the rows of `spec`; empty for nothing.
  virtual std::string fault(std::string_view name, const ShardSpec& spec) const = 0;
  // The rows of `spec`, of a matrix that is held transposed where `transposed` says so.
  virtual Tensor rows(std::string_view name, const ShardSpec& spec, bool transposed, DType dtype,
                      const Device& device) const = 0;
  // Throws the error of a load that this source is at fault for.
  [[noreturn]] virtual void refuse(const std::string& message) const = 0;
};

// Loads what `source` has. Throws: what `source` refuses with, naming what is missing, unexpected,
// of another shape or of a dtype that cannot be loaded; ContractError for a model without memory.
LoadReport load(Module& model, const StateSource& source, const LoadOptions& options = {});
// What `load` would report or refuse; the model needs no memory yet.
LoadReport check_load(const Module& model, const StateSource& source,
                      const LoadOptions& options = {});

}  // namespace tessera::nn
