// What the ranks of a row exchange: sizes as nccl-tests has them, the calls, and the values that
// have to come. Pure functions, so that nothing here depends on who carries the bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/collectives/options.hpp"

namespace tessera::collectives {

// A line of the table, for one of `ranks`.
struct Row {
  Operation operation;
  DType dtype = f32;
  ReduceOp reduction = ReduceOp::sum;
  int root = -1;  // none
  int rank = 0, ranks = 1;
  std::int64_t count = 0;  // as Collective counts
  std::int64_t send_count = 0, recv_count = 0;
  double bus_factor = 1;  // busbw is algbw times this

  // Sizes of at most `bytes`.
  Row(const Operation& operation, DType dtype, std::int64_t bytes, int rank, int ranks);

  std::int64_t width() const { return static_cast<std::int64_t>(size_bytes(dtype)); }
  std::int64_t elements() const { return std::max(send_count, recv_count); }
  std::int64_t bytes() const { return elements() * width(); }  // the column `size`
  bool reduces() const;
  bool has_root() const;
  // As Collective asks for it. Of a sendrecv each rank is in two items, which may not overlap.
  bool can_be_in_place() const;

  // The groups that are submitted one behind the other, mostly one of one item. In place all lies
  // in recv. A sendrecv is an item for each rank, which sends to the next, all in one group where
  // what it stages leaves room (kStagedBytes).
  std::vector<std::vector<Collective>> calls(std::byte* send, std::byte* recv, bool in_place) const;
  // Where in `recv` this rank's own values lie before a call in place, and its results after any.
  std::int64_t own_values_at(bool in_place) const;
  std::int64_t results_at(bool in_place) const;

  // What this rank sends, and what it must receive, nothing where nothing comes. Whole numbers of
  // which no sum is above 127: all types hold it, and any order of additions gives it.
  std::vector<float> sent() const;
  std::vector<float> expected() const;
};

}  // namespace tessera::collectives
