// A parameter that is there one slice at a time: each slice is a unit of its own, gathered, opened,
// reduced and planned as all units are. Rows [begin, begin + rows) of every rank's chunk make a
// slice, so that shards, flat gradient and files are those of the whole parameter.
//
//   rank 0's chunk │ slice 0 │ slice 1 │ slice 2 │      a slice, gathered
//   rank 1's chunk │ slice 0 │ slice 1 │ slice 2 │ ──▶  │ of rank 0 │ of rank 1 │
#pragma once

#include <memory>
#include <vector>

#include "runtime/param/parameter_state.hpp"

namespace tessera::shard {

class Unit;

// Whether any module that streams it says so.
bool backward_reads_slices(const ParameterState& parameter);

class StreamedParameter final : public ParameterSlices {
 public:
  // Of `parameter`, claimed and materialized by `unit`: slices of `bytes` at most, of the full
  // tensor, but at least a row of each chunk.
  StreamedParameter(const Unit& unit, const std::shared_ptr<ParameterState>& parameter,
                    std::int64_t bytes);

  int count() const noexcept override { return static_cast<int>(slices_.size()); }
  SliceRows rows(int slice) const override { return at(slice).rows; }
  Tensor open(int slice, bool is_read) override;
  void close(int slice) override;
  void abandon(int slice) noexcept override;
  void drop_unreduced() noexcept override;

  const std::shared_ptr<Unit>& unit(int slice) const { return at(slice).unit; }

 private:
  struct Slice {
    SliceRows rows;
    std::shared_ptr<ParameterState> state;
    std::shared_ptr<Unit> unit;
  };
  const Slice& at(int slice) const { return slices_[static_cast<std::size_t>(slice)]; }

  std::vector<Slice> slices_;
};

// Those of a parameter that a root's units stream; null until they are cut.
std::shared_ptr<StreamedParameter> slices_of(const ParameterState& parameter);

}  // namespace tessera::shard
