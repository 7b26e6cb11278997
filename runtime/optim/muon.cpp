#include "tessera/optim/muon.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "runtime/optim/matrix_owners.hpp"
#include "runtime/optim/newton_schulz.hpp"
#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/comm/mesh.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/tensor/ops.hpp"

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
double ratio_of(const Shape& shape, MuonRate how) {
  const auto rows = static_cast<double>(shape[0]), columns = static_cast<double>(shape[1]);
  return how == MuonRate::original ? std::sqrt(std::max(1.0, rows / columns))
                                   : 0.2 * std::sqrt(std::max(rows, columns));
}

void expect_matrices(const std::vector<Parameter>& matrices) {
  for (const Parameter& p : matrices)
    TESSERA_EXPECT(p.defined() && p.shape().ndim() == 2, "Muon: parameter '",
                   p.defined() ? p.name() : "", "' of ", p.defined() ? p.shape() : Shape{},
                   " is no matrix; give it among the others, which AdamW updates");
}

// A matrix as it lies in what ranks send to its owner, or get from it: each rank's chunk of rows in
// that rank's part, `width` elements further on. Calls f(shape, whole, parts) for the full chunks
// and for what is left, with strides and offset of a view of each.
struct Strided {
  Shape strides;
  std::int64_t offset;
};
template <class F>
void for_chunks(const ShardSpec& spec, std::int64_t width, std::int64_t offset, const F& f) {
  const std::int64_t chunk = spec.chunk_numel(), full = spec.rows() / spec.chunk_rows(),
                     left = spec.rows() % spec.chunk_rows() * spec.row_numel();
  if (full > 0) f(Shape{full, chunk}, Strided{{chunk, 1}, 0}, Strided{{width, 1}, offset});
  if (left > 0) f(Shape{left}, Strided{{1}, full * chunk}, Strided{{1}, full * width + offset});
}

}  // namespace

MuonSplit split_for_muon(const std::vector<Parameter>& parameters) {
  MuonSplit split;
  for (const Parameter& p : parameters)
    (p.shape().ndim() == 2 && !p.is_streamed() ? split.matrices : split.others).push_back(p);
  return split;
}

// --- what travels ---

// The matrices that one group of ranks shards. What they send lies in symmetric memory: four areas,
// of two turns each way.
struct Muon::Ring {
  // One that has a gradient's place.
  struct Matrix {
    Parameter parameter;
    std::size_t state;           // of the optimizer's
    std::int64_t moment_offset;  // there
    ShardSpec spec;
    MatrixPlan::Place place;
    float rate;  // its factor on the learning rate
  };
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

  Ring(std::shared_ptr<const DeviceMesh> of, Device on) : mesh(std::move(of)), device(on) {}
  // Queued collectives may still use its memory, so the device keeps it.
  ~Ring() { release(); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  const RankGroup* group() const { return mesh ? &mesh->shard_group() : nullptr; }
  int ranks() const { return mesh ? mesh->shard_size() : 1; }
  int rank() const { return mesh ? mesh->shard_rank() : 0; }

  void release() {
    if (memory) device.context().keep(std::exchange(memory, {}));
    if (uses) device.context().keep(std::exchange(uses, {}));
  }
  void plan(std::size_t states, const MuonOptions& options);
  void allocate();
  Tensor area(std::size_t which, std::int64_t width) const;
  Received exchange(const char* name, const Tensor& parts) const;
  bool is_due(const Turn& turn, const std::vector<GroupState>& states) const;
  Received send_momenta(const Turn& turn, std::size_t lane, const std::vector<GroupState>& states,
                        const MuonOptions& options) const;
  Received orthogonalise(const Turn& turn, std::size_t lane, const Received& momenta,
                         const std::vector<GroupState>& states, const NewtonSchulz& how) const;
  void apply(const Turn& turn, const Received& rows, const std::vector<GroupState>& states,
             const Tensor& scalars) const;
  void step(const std::vector<GroupState>& states, const MuonOptions& options,
            const Tensor& scalars);

  std::shared_ptr<const DeviceMesh> mesh;  // null: nobody shards them
  Device device;
  std::vector<Matrix> matrices;
  std::vector<Turn> turns;
  Tensor segments;              // table of FlatSegment
  std::int64_t most_width = 0;  // of a turn
  std::shared_ptr<SymmetricMemory> memory{};
  std::shared_ptr<std::array<LastUse, 4>> uses{};  // of its areas
};

// Deals the matrices, and makes the tables of the updates.
void Muon::Ring::plan(std::size_t states, const MuonOptions& options) {
  std::vector<MatrixSize> sizes;
  for (const Matrix& m : matrices)
    sizes.push_back({m.parameter.shape()[0], m.parameter.shape()[1]});
  const MatrixPlan plan = plan_matrices(sizes, ranks(), options.turn_bytes);
  turns.resize(plan.widths.size());
  for (std::size_t t = 0; t < turns.size(); ++t) {
    turns[t].width = plan.widths[t];
    most_width = std::max(most_width, plan.widths[t]);
  }
  for (const std::size_t i : plan.order) {
    matrices[i].place = plan.places[i];
    turns[plan.places[i].turn].matrices.push_back(i);
  }
  std::vector<FlatSegment> table;
  for (Turn& turn : turns)
    for (std::size_t s = 0; s < states; ++s) {
      const std::size_t first = table.size();
      for (const std::size_t i : turn.matrices) {
        const Matrix& m = matrices[i];
        const FlatEntry& entry = state_of(m.parameter)->flat_entry();
        if (m.state != s || entry.numel == 0) continue;
        const std::int64_t received = m.place.owner * turn.width + m.place.offset;
        table.push_back({.begin = entry.offset,
                         .end = entry.offset + entry.numel,
                         .gradient_shift = received - entry.offset,
                         .moment_shift = 0,
                         .count_index = entry.trainable,
                         .lr_factor = m.rate,
                         .weight_decay = 0,
                         .unused = 0});
      }
      if (table.size() == first) continue;
      std::sort(table.begin() + static_cast<std::ptrdiff_t>(first), table.end(),
                [](const FlatSegment& a, const FlatSegment& b) { return a.begin < b.begin; });
      turn.updates.push_back({s, first, table.size() - first});
    }
  if (table.empty()) return;
  const OwnerGuard owner(device, "tables");
  const auto bytes = std::as_bytes(std::span(table));
  segments = Tensor::from_bytes(bytes, {static_cast<std::int64_t>(bytes.size()) / 8}, i64, device);
}

// Collective where the memory is too small, which it is on all ranks or on none.
void Muon::Ring::allocate() {
  const std::int64_t bytes = checked_mul(checked_mul(most_width, ranks()), 16);
  if (ranks() == 1 || (memory && memory->bytes() >= bytes)) return;
  release();
  memory = group()->allocate_symmetric(bytes);
  uses = std::make_shared<std::array<LastUse, 4>>();
}

// [ranks, width]
Tensor Muon::Ring::area(std::size_t which, std::int64_t width) const {
  const Shape shape{ranks(), width};
  if (ranks() == 1) return Tensor::empty(shape, f32, device);
  const std::int64_t bytes = memory->bytes() / 4;
  return Tensor::wrap(
      Storage::borrowed(device, memory->data() + static_cast<std::int64_t>(which) * bytes, bytes,
                        (*uses)[which]),
      shape, f32);
}

Muon::Ring::Received Muon::Ring::exchange(const char* name, const Tensor& parts) const {
  if (ranks() == 1) return {parts, {}};
  const Tensor received = Tensor::empty(parts.shape(), f32, device);
  Communicator& comm = group()->reduce();
  const Stream wire = device.stream(comm.stream());
  wire.wait(device.compute().record());
  const Access accesses[] = {parts.access(AccessMode::read), received.access(AccessMode::write)};
  comm.submit(Collective{.send = parts.data(),
                         .recv = received.data(),
                         .count = parts.size(1),
                         .kind = CollectiveKind::all_to_all,
                         .dtype = f32},
              name, accesses);
  return {received, wire.record()};
}

// --- a step ---

namespace {

bool has_gradient(const Optimizer::GroupState& state) { return state.group->gradient.defined(); }

void await(const Device& device, const Event& arrived) {
  if (arrived.tick > 0) device.compute().wait(arrived);
}

}  // namespace

// Whether a unit was opened is the same on all ranks, and so is this.
bool Muon::Ring::is_due(const Turn& turn, const std::vector<GroupState>& states) const {
  return std::ranges::any_of(
      turn.matrices, [&](std::size_t i) { return has_gradient(states[matrices[i].state]); });
}

// This rank's rows of what each owner orthogonalises.
Muon::Ring::Received Muon::Ring::send_momenta(const Turn& turn, std::size_t lane,
                                              const std::vector<GroupState>& states,
                                              const MuonOptions& options) const {
  const float momentum = static_cast<float>(options.momentum);  // as the update has it
  const Tensor parts = area(lane, turn.width);
  for (const std::size_t i : turn.matrices) {
    const Matrix& m = matrices[i];
    const GroupState& state = states[m.state];
    const FlatEntry& entry = state_of(m.parameter)->flat_entry();
    if (!has_gradient(state) || entry.numel == 0) continue;
    const auto flat = [&](const Tensor& of, std::int64_t at) {
      return of.view({entry.numel}, {1}, at);
    };
    const Tensor rows = flat(parts, m.place.owner * turn.width + m.place.offset);
    raw::copy_into(rows, flat(state.moments[0], m.moment_offset));
    if (options.nesterov)
      raw::axpby(rows, flat(state.group->gradient, entry.gradient_offset), 1 - momentum, momentum);
  }
  return exchange("muon_momenta", parts);
}

// The matrices of this rank, and their rows back to the others.
Muon::Ring::Received Muon::Ring::orthogonalise(const Turn& turn, std::size_t lane,
                                               const Received& momenta,
                                               const std::vector<GroupState>& states,
                                               const NewtonSchulz& how) const {
  await(device, momenta.arrived);
  const Tensor parts = area(2 + lane, turn.width);
  for (const std::size_t i : turn.matrices) {
    const Matrix& m = matrices[i];
    if (m.place.owner != rank() || !has_gradient(states[m.state])) continue;
    const Tensor whole = Tensor::empty(m.spec.shape, f32, device);
    for_chunks(m.spec, turn.width, m.place.offset,
               [&](const Shape& shape, const Strided& in_whole, const Strided& in_parts) {
                 raw::copy_into(whole.view(shape, in_whole.strides, in_whole.offset),
                                momenta.parts.view(shape, in_parts.strides, in_parts.offset));
               });
    const Tensor done = orthogonalised(whole, how);
    for_chunks(m.spec, turn.width, m.place.offset,
               [&](const Shape& shape, const Strided& in_whole, const Strided& in_parts) {
                 raw::copy_into(parts.view(shape, in_parts.strides, in_parts.offset),
                                done.view(shape, in_whole.strides, in_whole.offset));
               });
  }
  return exchange("muon_directions", parts);
}

// p -= rate O, where any rank had a gradient.
void Muon::Ring::apply(const Turn& turn, const Received& rows,
                       const std::vector<GroupState>& states, const Tensor& scalars) const {
  await(device, rows.arrived);
  for (const Update& update : turn.updates) {
    if (!has_gradient(states[update.state])) continue;
    const FlatGroup& group = *states[update.state].group;
    const Tensor counts = group.counts();
    kernels::UpdateArgs args{};
    args.values = reinterpret_cast<float*>(group.values.data());
    args.gradient = reinterpret_cast<const float*>(rows.parts.data());
    args.segments = reinterpret_cast<const FlatSegment*>(segments.data()) + update.first;
    args.counts = reinterpret_cast<const float*>(counts.data());
    args.scalars = reinterpret_cast<const kernels::UpdateScalars*>(scalars.data());
    args.segment_count = static_cast<std::int32_t>(update.count);
    args.op = kernels::UpdateOp::muon;
    detail::launch("muon_apply", device, detail::table(device).update, args,
                   {detail::reads(rows.parts), detail::reads(counts), detail::reads(segments),
                    detail::reads(scalars), detail::updates_some(group.values, rows.parts)});
  }
}

// A turn's momenta travel while the one before is orthogonalised, and its result while the one
// behind is.
void Muon::Ring::step(const std::vector<GroupState>& states, const MuonOptions& options,
                      const Tensor& scalars) {
  std::vector<const Turn*> due;
  for (const Turn& turn : turns)
    if (is_due(turn, states)) due.push_back(&turn);
  if (due.empty()) return;
  allocate();
  const OwnerGuard owner(device, "muon");
  const NewtonSchulz how{.coefficients = options.ns_coefficients,
                         .steps = options.ns_steps,
                         .eps = options.ns_eps,
                         .dtype = options.ns_dtype};
  Received next = send_momenta(*due[0], 0, states, options), last;
  for (std::size_t k = 0; k < due.size(); ++k) {
    const Received momenta = std::exchange(next, {});
    if (k + 1 < due.size()) next = send_momenta(*due[k + 1], (k + 1) % 2, states, options);
    Received directions = orthogonalise(*due[k], k % 2, momenta, states, how);
    if (k > 0) apply(*due[k - 1], last, states, scalars);
    last = std::move(directions);
  }
  apply(*due.back(), last, states, scalars);
}

// --- the optimizer ---

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
  TESSERA_EXPECT(!matrices.empty(), "Muon: no matrices given; AdamW alone updates the rest");
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
  const bool is_matrices = state.kind == kMatrices;
  launch_update(is_matrices ? kernels::UpdateOp::muon : kernels::UpdateOp::adamw, state, scalars);
}

void Muon::has_laid_out() {
  std::vector<std::unique_ptr<Ring>> rings;
  for (const Own& one : own()) {
    if (one.kind != kMatrices || one.offset < 0 || one.parameter.shape().numel() == 0) continue;
    const std::shared_ptr<ParameterState>& parameter = state_of(one.parameter);
    if (!parameter->has_gradient()) continue;  // thawed: no gradient has a place yet
    std::shared_ptr<const DeviceMesh> mesh = parameter->mesh;
    if (mesh && mesh->shard_size() == 1) mesh = nullptr;
    const RankGroup* const group = mesh ? &mesh->shard_group() : nullptr;
    const auto same = [&](const std::unique_ptr<Ring>& ring) { return ring->group() == group; };
    auto ring = std::ranges::find_if(rings, same);
    if (ring == rings.end()) {
      rings.push_back(std::make_unique<Ring>(std::move(mesh), parameter->group->device));
      ring = rings.end() - 1;
    }
    const double rate = one.lr_factor * ratio_of(one.parameter.shape(), options_.adjust_lr);
    (*ring)->matrices.push_back({.parameter = one.parameter,
                                 .state = one.state,
                                 .moment_offset = one.offset,
                                 .spec = one.spec,
                                 .place = {},
                                 .rate = static_cast<float>(rate)});
  }
  for (const auto& ring : rings) {
    ring->plan(states().size(), options_);
    for (const auto& before : rings_)  // what is large enough goes on
      if (before->group() == ring->group() && before->memory) {
        ring->memory = std::exchange(before->memory, {});
        ring->uses = std::exchange(before->uses, {});
      }
  }
  rings_ = std::move(rings);
}

void Muon::update_together(const Tensor& scalars) {
  for (const auto& ring : rings_) ring->step(states(), options_, scalars);
  for (const GroupState& state : states())
    if (state.kind == kMatrices && has_gradient(state)) state.group->mark_updated();
}

int Muon::owner(const Parameter& matrix) const {
  const auto is_it = [&](const auto& one) { return one.parameter == matrix; };
  const auto found = std::ranges::find_if(own(), is_it);
  TESSERA_EXPECT(found != own().end() && found->kind == kMatrices, "Muon::owner: parameter '",
                 matrix.defined() ? matrix.name() : "", "' is none of its matrices");
  for (const auto& ring : rings_)
    if (const auto m = std::ranges::find_if(ring->matrices, is_it); m != ring->matrices.end())
      return m->place.owner;
  return -1;
}

}  // namespace tessera::optim
