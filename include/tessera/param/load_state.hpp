// What a load of state by name is made of: what takes values, where they come from, and the match
// of the two. Module::load and Optimizer::load stand on it.
//
// It looks at everything first, and nothing has changed when it refuses.
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
  // Of a name that it has, as all that follow.
  virtual Entry entry(std::string_view name) const = 0;
  // Whether names and layouts are those of files: see Module::saves_transposed and the like.
  virtual bool is_file() const noexcept = 0;
  // Whether two entries hold the same bytes.
  virtual bool is_same(std::string_view a, std::string_view b) const = 0;
  // What is wrong with `name` as a source of the rows of `spec`; empty for nothing.
  virtual std::string fault(std::string_view name, const ShardSpec& spec) const = 0;
  // Gives `to` the values of the rows of `spec`, of what these names hold one below the other; of a
  // dict's one name. Of matrices that are held transposed where `transposed` says so.
  // Throws: DataError for bytes that are not as they were saved; `to` then has some of them.
  virtual void read(const Tensor& to, std::span<const std::string> names, const ShardSpec& spec,
                    bool transposed) const = 0;
  // The same in memory of its own.  Throws: likewise.
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

// Gives a tensor of this rank's rows their values.
using FillRows = std::function<void(const Tensor& rows)>;

// What takes values: a parameter, a buffer, a moment, a number.
struct StateTarget {
  std::vector<std::string> names;  // of what is tied, each
  std::string_view kind = "parameter";
  ShardSpec spec;
  DType dtype = f32;
  bool is_transposed_in_files = false;
  std::vector<RowPart> parts_in_files{};          // which may hold these, by their names, instead
  std::function<Tensor()> held;                   // this rank's rows; throws without memory
  std::function<void(const FillRows& f)> change;  // has them filled where they lie
};
// A target whose value is read on the host, of tensors that lie where `beside` does.
StateTarget number_target(std::vector<std::string> names, DType dtype, const Tensor& beside,
                          const std::function<void(const Tensor& value)>& f);

// Whose targets they are.
struct StateHolder {
  std::string_view what = "model";
  std::string_view article = "a";
  // Of files: what all names may begin with or not, and which of a file's nobody wants.
  std::string_view optional_prefix{};
  std::function<bool(std::string_view)> is_left_in_files{};
  // Gives memory to what is on meta, once rank 0 has not refused; empty for what has some.
  std::function<void(const Device&)> materialize{};
};

// The targets that a source has, under which names, and the report of a load.
class StateMatching {
 public:
  struct Match {
    const StateTarget* target;
    std::vector<std::string> names;  // the source's: one, or those of all parts
  };
  // All outlive this. `is_whole`: whether the source has to have whole tensors.
  // Throws: what the source refuses with, naming what is missing, unexpected, of another shape, or
  // of a dtype that cannot be loaded.
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
  std::vector<std::string> differs_;  // of them, those with other bytes than their tied ones
};

// Each rank loads what it gives. Throws: as StateMatching, and what a target has no memory with.
LoadReport load_own_state(const std::vector<StateTarget>& targets, const StateSource& source,
                          const StateHolder& holder, const LoadOptions& options);

}  // namespace tessera
