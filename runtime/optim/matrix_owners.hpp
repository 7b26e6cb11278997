// Which rank orthogonalises which matrix, and in which turns the matrices travel to it: pure
// arithmetic, the same on every rank.
//
//   rank 0    │ mlp.up ──────│ attn.k ─│        A turn takes the next matrices of each rank, as
//   rank 1    │ mlp.down ────│ attn.q ─│        many as its share of the bytes has room for, but
//   rank 2    │ mlp.gate ────│         │        at least one.
//               turn 0         turn 1
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/param/row_parts.hpp"

namespace tessera::optim {

struct MatrixSize {
  std::int64_t rows = 0, columns = 0;
  std::int64_t most_rows = 0;       // of a rank, where they are dealt by blocks
  std::vector<RowPart> parts = {};  // that are orthogonalised each alone; none: the whole is

  bool operator==(const MatrixSize&) const = default;
};

// What a step of Newton and Schulz costs, up to a factor: min^2 max.
double orthogonalisation_work(const MatrixSize& size);

struct MatrixPlan {
  // Of each matrix: its rank, its turn, and where its rows begin in what one rank sends to that
  // rank, in elements: a multiple of 64.
  struct Position {
    int owner_rank = 0;
    std::size_t turn = 0;
    std::int64_t offset = 0;
  };
  std::vector<Position> positions;
  std::vector<std::size_t> order;    // the matrices as they were dealt, largest first
  std::vector<std::int64_t> widths;  // of each turn: elements that a rank sends to each
};

// Deals matrices to ranks: the one with most work to the rank that has least, the first of equal
// ones. `most_bytes`: of f32 that a rank sends in a turn, padding included.
// Requires: at least one rank, no size of 0.
MatrixPlan plan_matrices(std::span<const MatrixSize> sizes, int ranks, std::int64_t most_bytes);

// What each rank sends in a step: the rows of momenta to the owner ranks, and rows of the result
// back.
std::int64_t sent_bytes(const MatrixPlan& plan, int ranks);

// The sizes of the matrices of `rank`, in the order of their turns: ranks whose lists are equal do
// the same work in the same memory.
std::vector<MatrixSize> matrices_of(const MatrixPlan& plan, std::span<const MatrixSize> sizes,
                                    int rank);

}  // namespace tessera::optim
