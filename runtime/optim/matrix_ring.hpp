// The matrices that one group of ranks shards, and their way to who orthogonalises them and back.
//
//   compute   momenta │ pack 0 │ pack 1 │ O(turn 0) │ pack 2 │ O(turn 1) │ p -= turn 0 │ ...
//   reduce                     │ in 0   │ in 1      │ out 0  │ in 2      │ out 1       │
//
// What ranks send lies in symmetric memory: four areas, of two turns each way. An area is written
// again two turns later, when compute has waited for the exchange that read it. What they receive
// is the pool's. A group of one rank exchanges nothing, and does the same work.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/optim/matrix_owners.hpp"
#include "runtime/optim/newton_schulz.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/optim/muon.hpp"

namespace tessera::optim {

// Collective in `step`, over the ranks of its group, which have planned the same matrices.
class MatrixRing {
 public:
  // Rows that are orthogonalised together, and their factor on the learning rate.
  struct Block {
    RowRange rows;
    float rate;
  };
  // One that has a gradient's position.
  struct Matrix {
    Parameter parameter;
    std::size_t state;           // of the optimizer's
    std::int64_t moment_offset;  // there
    ShardSpec spec;
    std::vector<Block> blocks;  // one, or its row parts
    MatrixPlan::Position position{};
  };

  // `mesh`: null where nobody shards them.
  MatrixRing(std::shared_ptr<const DeviceMesh> mesh, Device device)
      : mesh_(std::move(mesh)), device_(std::move(device)) {}
  // Queued collectives may still use its memory, so the device keeps it.
  ~MatrixRing() { release(); }
  MatrixRing(const MatrixRing&) = delete;
  MatrixRing& operator=(const MatrixRing&) = delete;

  const RankGroup* group() const { return mesh_ ? &mesh_->shard_group() : nullptr; }
  std::vector<Matrix>& matrices() noexcept { return matrices_; }

  // Deals the matrices, and makes the tables of the updates. `states`: how many the optimizer has.
  void plan(std::size_t states, const MuonOptions& options);
  // The symmetric memory of another ring of the group, if it has some.
  void take_memory(MatrixRing& from);
  // All turns: the momenta of `states` are those of this step.
  void step(const std::vector<Optimizer::GroupState>& states, const MuonOptions& options,
            const Tensor& scalars);

 private:
  using States = std::vector<Optimizer::GroupState>;
  // The update of this rank's rows of a turn in one group: segments [first, first + count).
  struct Update {
    std::size_t state, first, count;
  };
  struct Turn {
    std::vector<std::size_t> matrices;
    std::vector<Update> updates;
    std::int64_t width = 0;  // elements from each rank to each
  };
  // What the ranks have sent to this one, [ranks, width], to be read after the event.
  struct Received {
    Tensor parts;
    Event arrived;
  };

  int ranks() const { return mesh_ ? mesh_->shard_size() : 1; }
  int rank() const { return mesh_ ? mesh_->shard_rank() : 0; }
  void agree(const MuonOptions& options);
  void allocate();
  void release();
  Tensor area(std::size_t which, std::int64_t width) const;  // [ranks, width]
  Received exchange(const char* name, const Tensor& parts) const;
  bool is_due(const Turn& turn, const States& states) const;
  Received send_momenta(const Turn& turn, std::size_t lane, const States& states,
                        const MuonOptions& options) const;
  Received orthogonalise(const Turn& turn, std::size_t lane, const Received& momenta,
                         const States& states, const NewtonSchulz& how) const;
  void apply(const Turn& turn, const Received& rows, const States& states,
             const Tensor& scalars) const;

  std::shared_ptr<const DeviceMesh> mesh_;
  Device device_;
  std::vector<Matrix> matrices_;
  std::vector<Turn> turns_;
  Tensor segments_;              // table of FlatSegment
  std::int64_t most_width_ = 0;  // of a turn
  std::shared_ptr<SymmetricMemory> memory_{};
  std::shared_ptr<std::array<LastUse, 4>> uses_{};  // of its areas
  std::uint64_t recoveries_ = 0;                    // of the device, before it was made
  bool is_agreed_ = false;                          // the ranks have planned the same matrices
};

}  // namespace tessera::optim
