// What a parameter is, for the layers that make it so: its module names it, a unit gives it its
// rows and its window, flat groups its memory. Users read it through Parameter, and write it by no
// other door than edit, assign and set_trainable.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/param/gradient_sinks.hpp"
#include "tessera/param/parameter.hpp"

namespace tessera {

struct ParameterState final : autograd::Leaf {
  struct Streaming {
    const nn::Module* module;
    std::string name;  // full, dotted; empty of a root, and until its tree has been asked for names
  };

  // First, side by side, what every opening of its unit touches.
  std::shared_ptr<FlatGroup> group;  // null before it is materialized
  std::shared_ptr<Storage> window;   // of the full tensor; see Note [Windows]
  const Event* ready = nullptr;      // compute waits for it before value(); null where it has
  const Tensor* full = nullptr;      // what value() gives while it is trainable; null: made anew
  std::shared_ptr<GradientSinks> sinks;
  int entry = -1;                         // in the group
  DType dtype = DType::f32;               // of the values, in the group
  DType compute_dtype = DType::f32;       // of the full tensor
  std::optional<DType> override_dtype{};  // that instead of its unit's, where it is stored in f32
  bool trainable = true;
  bool is_set = false;  // by nn::init, a load or an edit: not the zeros of its memory
  bool is_streamed = false, is_ignored = false;  // by its unit; by units below, and those around
  std::int64_t window_offset_bytes = 0;
  std::string name;  // full, dotted; set by the module tree
  Shape shape;
  Initializer initializer;
  ShardSpec spec;                                    // the whole parameter until a unit claims it
  std::shared_ptr<const DeviceMesh> mesh;            // of its unit; null without one
  std::shared_ptr<const GatherTransform> transform;  // how it is gathered; null: as it is
  std::int64_t block_rows = 0;                       // of a ragged shard; 0: even
  std::vector<RowPart> row_parts;                    // that it stacks; none: it is one
  const std::string* unit = nullptr;                 // the name of the unit that claimed it
  int names = 0;                                     // under which modules have registered it
  int modules = 0;                                   // that have registered it
  std::vector<Streaming> streaming;                  // of these modules, in order of what they said
  std::shared_ptr<ParameterSlices> slices;           // null: it is there as a whole
  std::int64_t first_row = 0;                        // of a slice: in its chunk

  const FlatEntry& flat_entry() const { return group->entries[static_cast<std::size_t>(entry)]; }
  // Frozen and thawed parameters have one until, and from when, their unit follows.
  bool has_gradient() const { return trainable && flat_entry().trainable >= 0; }
  // Of the values.
  std::int64_t element_bytes() const { return static_cast<std::int64_t>(size_bytes(dtype)); }
  // How errors name it: by its shape, until its module has named it.
  std::string called() const;
  std::string described() const;  // with its shape
  // What an error says where it is not materialized.
  std::string without_memory() const;
  // Behind what an error says of these; empty where none of them is alive.
  std::string streaming_modules() const;
  // This rank's, of the values. Throws: ContractError where it is not materialized.
  Tensor rows() const;
  // What a unit decides that claims it now.
  bool may_be_streamed() const {
    return !streaming.empty() && streaming.size() == static_cast<std::size_t>(modules) &&
           shape[0] > 0 && spec.dim == 0;
  }

  autograd::GradientSink sink() override;
  const Shape& gradient_shape() const override { return shape; }
  Tensor gradient() const override;
  // From here on it has none, reduced or kept to be reduced, whether it is trainable now or not.
  void drop_gradient() const;
  void drop_unreduced() const;
  void clear() override;
  void on_last_contribution() override;
  std::uint64_t version() const override;
  void expect_version(std::uint64_t forward) const override;
};

// What a parameter stands for. Throws: ContractError for an undefined one.
const std::shared_ptr<ParameterState>& state_of(const Parameter& parameter);

// What Parameter::value gives, of what is there as a whole.
Tensor value_of(const std::shared_ptr<ParameterState>& state);
// The full tensor of a trainable parameter, whether its window is open or not.
Tensor with_history(const std::shared_ptr<ParameterState>& state);
// The same bytes for operations that only read them: others are told whose they are.
inline Tensor read_only(Tensor bytes, const std::shared_ptr<ParameterState>& state) {
  return std::move(bytes).read_only({state, &state->name});
}

}  // namespace tessera
