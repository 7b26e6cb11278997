#include "tessera/optim/muon.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/optim/matrix_ring.hpp"
#include "runtime/param/parameter_state.hpp"
#include "tessera/optim/adamw.hpp"

namespace tessera::optim {
namespace {

// Kinds of parameters. What add_parameters takes is of the first.
constexpr std::size_t kOthers = 0, kMatrices = 1;

AdamWOptions adamw_of(const MuonOptions& options) {
  const MuonOptions::Others& o = options.others;
  return {.lr = options.lr,
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .eps = o.eps,
          .weight_decay = o.weight_decay};
}

// What the shape of a matrix makes of its rate.
double ratio_of(std::int64_t of_rows, std::int64_t of_columns, MuonRate how) {
  const auto rows = static_cast<double>(of_rows), columns = static_cast<double>(of_columns);
  return how == MuonRate::original ? std::sqrt(std::max(1.0, rows / columns))
                                   : 0.2 * std::sqrt(std::max(rows, columns));
}

// What is orthogonalised together: all rows in memory, or each of the row parts.
std::vector<MatrixRing::Block> blocks_of(const Parameter& matrix, const ShardSpec& spec,
                                         double lr_factor, MuonRate how) {
  const auto rate = [&](std::int64_t rows) {
    return static_cast<float>(lr_factor * ratio_of(rows, matrix.shape()[1], how));
  };
  const std::vector<RowPart>& parts = matrix.row_parts();
  if (parts.empty()) return {{{0, spec.rows()}, rate(matrix.shape()[0])}};
  TESSERA_EXPECT(spec.dim == 0, "Muon: parameter '", matrix.name(), "' stacks ", parts.size(),
                 " matrices and is cut along dimension ", spec.dim,
                 "; shard it along 0, or keep them separate");
  std::vector<MatrixRing::Block> blocks;
  RowRange rows;
  for (const RowPart& part : parts) {
    rows = {rows.end, rows.end + part.rows};
    blocks.push_back({rows, rate(part.rows)});
  }
  return blocks;
}

void expect_matrices(const std::vector<Parameter>& matrices) {
  for (const Parameter& p : matrices)
    TESSERA_EXPECT(p.defined() && p.shape().ndim() == 2, "Muon: parameter '",
                   p.defined() ? p.name() : "", "' of ", p.defined() ? p.shape() : Shape{},
                   " is no matrix; give it among the others, which AdamW updates");
}

}  // namespace

MuonSplit split_for_muon(const std::vector<Parameter>& parameters) {
  MuonSplit split;
  for (const Parameter& p : parameters)
    (p.shape().ndim() == 2 && !p.is_streamed() ? split.matrices : split.others).push_back(p);
  return split;
}

Muon::Muon(const std::vector<Parameter>& matrices, const std::vector<Parameter>& others,
           const MuonOptions& options)
    : Optimizer(options.lr, {{.needs = {.moments = 2, .names = {"exp_avg", "exp_avg_sq"}},
                              .weight_decay = options.others.weight_decay,
                              .lr_factor = options.others.lr_factor},
                             {.needs = {.moments = 1, .names = {"momentum_buffer"}},
                              .weight_decay = options.weight_decay}}),
      options_(options) {
  expect_valid("Muon: others", adamw_of(options));
  TESSERA_EXPECT(options.momentum >= 0 && options.momentum < 1, "Muon: momentum is ",
                 options.momentum, ", expected 0 to below 1");
  TESSERA_EXPECT(options.ns_steps >= 1 && options.ns_steps < 100, "Muon: ns_steps is ",
                 options.ns_steps, ", expected 1 to 99");
  TESSERA_EXPECT(
      options.ns_eps > 0 && std::isfinite(options.ns_eps) &&
          std::ranges::all_of(options.ns_coefficients, [](double c) { return std::isfinite(c); }),
      "Muon: ns_eps is ", options.ns_eps, ", ns_coefficients are ", options.ns_coefficients[0],
      ", ", options.ns_coefficients[1], " and ", options.ns_coefficients[2],
      "; all are finite, ns_eps is above 0");
  TESSERA_EXPECT(options.ns_dtype == f32 || options.ns_dtype == bf16, "Muon: ns_dtype is ",
                 options.ns_dtype, ", expected f32 or bf16");
  TESSERA_EXPECT(options.turn_bytes > 0, "Muon: turn_bytes is ", options.turn_bytes,
                 ", expected 1 or more");
  TESSERA_EXPECT(!matrices.empty(),
                 "Muon: no matrices are given; use AdamW for a model without them");
  add_parameters(others);
  add_matrices(matrices);
}

Muon::~Muon() = default;

void Muon::add_matrices(const std::vector<Parameter>& matrices) {
  expect_matrices(matrices);
  for (const Parameter& p : matrices)
    for (const Own& one : own())
      TESSERA_EXPECT(one.kind == kMatrices || !(one.parameter == p), "Muon: parameter '", p.name(),
                     "' is given as a hidden matrix and among the others; choose one");
  add(matrices, kMatrices);
}

void Muon::write_scalars(const Tensor& scalars, std::int64_t step) const {
  kernels::UpdateScalars s = adamw_scalars(adamw_of(options_), lr(), step);
  s.momentum = static_cast<float>(options_.momentum);
  put_scalars(scalars, s);
}

void Muon::update(const GroupState& state, const Tensor& scalars) const {
  const bool is_others = state.kind == kOthers;
  launch_update(is_others ? kernels::UpdateOp::adamw : kernels::UpdateOp::muon, state, scalars);
}

void Muon::has_laid_out() {
  std::vector<std::unique_ptr<MatrixRing>> rings;
  for (const Own& one : own()) {
    if (one.kind != kMatrices || one.offset < 0 || one.parameter.shape().numel() == 0) continue;
    const std::shared_ptr<ParameterState>& parameter = state_of(one.parameter);
    if (!parameter->has_gradient()) continue;  // thawed: it has no gradient yet
    TESSERA_EXPECT(!parameter->group->device.is_host(), "Muon: the shards of parameter '",
                   parameter->name, "' lie on the host; use AdamW, or Offload::none");
    std::shared_ptr<const DeviceMesh> mesh = parameter->mesh;
    if (mesh && mesh->shard_size() == 1) mesh = nullptr;
    const RankGroup* const group = mesh ? &mesh->shard_group() : nullptr;
    auto ring = std::ranges::find_if(rings, [&](const auto& r) { return r->group() == group; });
    if (ring == rings.end()) {
      rings.push_back(std::make_unique<MatrixRing>(std::move(mesh), parameter->group->device));
      ring = rings.end() - 1;
    }
    (*ring)->matrices().push_back(
        {.parameter = one.parameter,
         .state = one.state,
         .moment_offset = one.offset,
         .spec = one.spec,
         .blocks = blocks_of(one.parameter, one.spec, one.lr_factor, options_.adjust_lr)});
  }
  for (const auto& ring : rings) ring->plan(states().size(), options_);
  for (const auto& ring : rings)
    for (const auto& before : rings_)
      if (before->group() == ring->group()) ring->take_memory(*before);
  rings_ = std::move(rings);
}

void Muon::update_together(const Tensor& scalars) {
  for (const auto& ring : rings_) ring->step(states(), options_, scalars);
  for (const GroupState& state : states())
    if (state.kind == kMatrices && state.group->gradient.defined()) state.group->mark_updated();
}

int Muon::owner_rank(const Parameter& matrix) const {
  const auto is_it = [&](const auto& one) { return one.parameter == matrix; };
  const auto found = std::ranges::find_if(own(), is_it);
  TESSERA_EXPECT(found != own().end() && found->kind == kMatrices, "Muon::owner_rank: parameter '",
                 matrix.defined() ? matrix.name() : "",
                 "' is not one of its matrices; ask for one that it was given");
  for (const auto& ring : rings_)
    if (const auto m = std::ranges::find_if(ring->matrices(), is_it); m != ring->matrices().end())
      return m->position.owner_rank;
  return -1;
}

}  // namespace tessera::optim
