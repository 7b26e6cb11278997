// Loads of state by name: what takes values (StateTarget), where they come from (StateSource), and
// the match of the two (StateMatching). Module::load and Optimizer::load stand on it.
//
// A load looks at everything first. When it refuses, nothing has changed.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/param/row_parts.hpp"
#include "tessera/param/state_dict.hpp"

namespace tessera {

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
  // Here and below the source has `name`.
  virtual Entry entry(std::string_view name) const = 0;
  // Whether names and layouts are those of files: see Module::saves_transposed and the like.
  virtual bool is_file() const noexcept = 0;
  // Whether two entries hold the same bytes.
  virtual bool is_same(std::string_view a, std::string_view b) const = 0;
  // What is wrong with `name` as a source of the rows of `spec`; empty if nothing is.
  virtual std::string fault(std::string_view name, const ShardSpec& spec) const = 0;
  // Writes the rows of `spec` into `to`, [rows, ...]. They are taken from what `names` hold, one
  // below the other; a dict has one name. `transposed`: the source holds matrices transposed.
  //   Throws: DataError for bytes that are not as they were saved; `to` then has some of them.
  virtual void read(const Tensor& to, std::span<const std::string> names, const ShardSpec& spec,
                    bool transposed) const = 0;
  // The same rows in new memory, of `dtype` on `device`. Throws: as read.
  Tensor rows(std::span<const std::string> names, const ShardSpec& spec, bool transposed,
              DType dtype, const Device& device) const;
  // Throws the error of a load that this source is at fault for.
  [[noreturn]] virtual void refuse(const std::string& message) const = 0;
};

// A state dict as a source; it outlives this.
class DictSource final : public StateSource {
 public:
  // Throws: ContractError for an entry without a tensor.
  explicit DictSource(const StateDict& state);
  const std::string& what() const noexcept override;
  std::vector<std::string> names() const override;
  bool has(std::string_view name) const override { return state_.find(name) != state_.end(); }
  Entry entry(std::string_view name) const override;
  bool is_file() const noexcept override { return false; }
  bool is_same(std::string_view a, std::string_view b) const override;
  std::string fault(std::string_view name, const ShardSpec& spec) const override;
  void read(const Tensor& to, std::span<const std::string> names, const ShardSpec& spec,
            bool transposed) const override;
  [[noreturn]] void refuse(const std::string& message) const override;

 private:
  const StateTensor& at(std::string_view name) const { return state_.find(name)->second; }

  const StateDict& state_;
};

// Writes values into a tensor of this rank's rows, [rows, ...].
using FillRows = std::function<void(const Tensor& rows)>;

inline constexpr std::string_view kRowScales = "_scale";

// Something that takes values: a parameter, a buffer, a moment, a number.
struct StateTarget {
  std::vector<std::string> names;  // one, or all names of a tied parameter
  std::string_view kind = "parameter";
  ShardSpec spec;
  DType dtype = f32;
  bool is_transposed_in_files = false;
  std::vector<RowPart> parts_in_files{};  // that files may hold in its place, by their names
  // Of what is stored in 8 bits under this name without kRowScales, a scale a row: where a source
  // has other floating values and no scales, both are made of these. See
  // autograd/rows_in_8_bits.hpp.
  bool are_row_scales = false;
  std::function<Tensor()> held;                   // this rank's rows; throws without memory
  std::function<void(const FillRows& f)> change;  // calls f with these rows, to fill them in place
};
// A target for one number, [] of `dtype`, beside tensors on the device of `beside`. A load calls f
// with the value, for the host to read.
StateTarget number_target(std::vector<std::string> names, DType dtype, const Tensor& beside,
                          const std::function<void(const Tensor& value)>& f);

// Who owns the targets of a load.
struct StateHolder {
  std::string_view what = "model";
  std::string_view article = "a";
  // For files: a prefix that all names may have or lack, and names in a file that nobody wants.
  std::string_view optional_prefix{};
  std::function<bool(std::string_view)> is_left_in_files{};
  // Gives memory to what is on meta, after rank 0 has accepted the load; empty if all has memory.
  std::function<void(const Device&)> materialize{};
};

// Which names of a source each target takes, and the report of the load.
class StateMatching {
 public:
  struct Match {
    const StateTarget* target;
    std::vector<std::string> names;  // the source's: one, or those of all parts
  };
  // All arguments outlive this. `is_whole`: whether the source must have whole tensors.
  //   Throws: what the source refuses with. It names what is missing, unexpected, of another shape,
  // or of a dtype that cannot be loaded.
  StateMatching(const std::vector<StateTarget>& targets, const StateSource& source,
                const StateHolder& holder, const LoadOptions& options, bool is_whole = false);

  std::vector<Match> matches;
  LoadReport report;

 private:
  void find_prefix();
  std::string name_in_source(const std::string& name) const;
  void match(const StateTarget& target);
  std::vector<std::string> find(const StateTarget& target);
  std::vector<std::string> find_parts(const StateTarget& target);
  void check(const StateTarget& target, const std::string& name, const Shape& shape) const;
  void find_unexpected();

  const StateSource& source_;
  const StateHolder& holder_;
  const bool is_whole_;
  std::string prefix_;                // of the holder's names, which the file lacks
  std::vector<std::string> known_;    // to the holder, of the source's
  std::vector<std::string> differs_;  // known_ names whose bytes differ from their tied names'
};

// Loads on each rank what that rank's source has. Throws: as StateMatching, and what a target
// without memory throws.
LoadReport load_own_state(const std::vector<StateTarget>& targets, const StateSource& source,
                          const StateHolder& holder, const LoadOptions& options);

}  // namespace tessera
