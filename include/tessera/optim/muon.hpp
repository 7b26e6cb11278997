// Muon for the hidden matrices of a model: momentum, orthogonalised. AdamW updates all other
// parameters. Both are one object with one step, one zero_grad, one rate and one state dict.
//
//   const auto [matrices, others] = optim::split_for_muon(model.parameters());
//   optim::Muon optimizer(matrices, others, {.lr = 2e-2, .others = {.lr_factor = 0.15}});
//
//   of a matrix  m = momentum m + (1 - momentum) g
//                d = momentum m + (1 - momentum) g, or m without nesterov
//                p = p (1 - lr weight_decay) - lr ratio O(d)
//   O(d)         X = d / max(|d|, ns_eps), then ns_steps times, with A = X X^T:
//                X = a X + (b A + c A A) X, which takes all singular values to about 1
//   ratio        original: sqrt(max(1, rows / columns)); match_rms_adamw: 0.2 sqrt(max(rows,
//                columns)), for which a rate and a weight decay of AdamW's fit
//
// Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024
// (kellerjordan.github.io/posts/muon); match_rms_adamw from Liu et al., "Muon is scalable for LLM
// training", 2025. Formulas and defaults are those of torch.optim.Muon of PyTorch 2.9, which
// iterates in bf16 and has no AdamW beside it.
//
// A parameter with row parts (Parameter::set_row_parts) is several matrices. Each part is
// orthogonalised alone and has its own ratio, as if it were a parameter.
//
// When sharded, each matrix has an owner rank among those that shard it, dealt by work over all
// units. Momentum is updated where the shards are. Its rows travel to the owner, which
// orthogonalises the whole matrix, and the rows of the result travel back. So any number of ranks
// does the arithmetic of one. Replicas of a hybrid mesh each do the whole work.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/optim/optimizer.hpp"

namespace tessera::optim {

class MatrixRing;

// The factor by which the shape of a matrix changes its rate (PyTorch: adjust_lr_fn).
enum class MuonRate : std::uint8_t { original, match_rms_adamw };

struct MuonOptions {
  double lr = 1e-3;
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0.1;  // of matrices; set_weight_decay changes it for some
  std::array<double, 3> ns_coefficients{3.4445, -4.7750, 2.0315};
  double ns_eps = 1e-7;
  int ns_steps = 5;
  DType ns_dtype = DType::f32;  // of the iteration: f32 or bf16
  MuonRate adjust_lr = MuonRate::original;
  // For all other parameters, which AdamW updates at the rate lr * lr_factor.
  struct Others {
    double lr_factor = 1;
    double beta1 = 0.9, beta2 = 0.95;
    double eps = 1e-8;
    double weight_decay = 0.1;
  } others{};
  // Bytes that a rank sends in one turn. Peers read from 4 times as much memory, and up to 4 times
  // as much is received. A turn has at least one matrix of each owner rank.
  std::int64_t turn_bytes = 32 << 20;
};

// A model's parameters in two lists: matrices that no module streams, and all others. Modules
// stream tables of a vocabulary, which are embeddings and heads; see nn::Module::stream_parameter.
struct MuonSplit {
  std::vector<Parameter> matrices, others;
};
MuonSplit split_for_muon(const std::vector<Parameter>& parameters);

// A step is collective over the ranks that shard a matrix. These ranks have given the same matrices
// in the same order. If they have not, the first step throws ContractError on every rank, and so
// does the first step after a change. A change by one rank alone is a CommError. A step makes
// symmetric memory of the device. So step and prepare() throw ContractError for matrices whose
// shards lie on the host (Offload::cpu).
class Muon final : public Optimizer {
 public:
  // The caller says which parameters are hidden matrices, since shapes do not tell. `others` may be
  // empty, and add_parameters adds to them. Throws: ContractError for no matrix, for one that does
  // not have two dimensions, for a parameter in both lists, and for a value out of range.
  Muon(const std::vector<Parameter>& matrices, const std::vector<Parameter>& others,
       const MuonOptions& options = {});
  ~Muon() override;

  // Adds hidden matrices, as add_parameters adds others. Throws: ContractError, too, for a
  // parameter that is no matrix, or is AdamW's already.
  void add_matrices(const std::vector<Parameter>& matrices);
  // The rank that orthogonalises a matrix, counted within the group that shards it. -1: the matrix
  // is empty, or was frozen at the last step or prepare(). Throws: ContractError for a parameter
  // that is none of its matrices.
  int owner_rank(const Parameter& matrix) const;

 private:
  void write_scalars(const Tensor& scalars, std::int64_t step) const override;
  void update(const GroupState& state, const Tensor& scalars) const override;
  void update_together(const Tensor& scalars) override;
  void has_laid_out() override;

  MuonOptions options_;                             // without lr, which changes
  std::vector<std::unique_ptr<MatrixRing>> rings_;  // one for each group of ranks
};

}  // namespace tessera::optim
