#include "runtime/optim/matrix_ring.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "runtime/comm/least_and_most.hpp"
#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::optim {
namespace {

// A matrix as it lies in what ranks send to its owner rank, or get from it: each rank's chunk of
// rows in that rank's part, `width` elements further on. Calls f(shape, whole, parts) for the full
// chunks and for what is left, with strides and offset of a view of each.
struct Strided {
  Shape strides;
  std::int64_t offset;
};
template <class F>
void for_chunks(const ShardSpec& spec, std::int64_t width, std::int64_t offset, const F& f) {
  if (spec.is_ragged()) {
    for (int r = 0; r < spec.world; ++r)
      if (const RowRange rows = spec.owned(r); rows.size() > 0)
        f(Shape{rows.size() * spec.row_numel()}, Strided{{1}, rows.begin * spec.row_numel()},
          Strided{{1}, r * width + offset});
    return;
  }
  const std::int64_t chunk = spec.chunk_numel(), full = spec.rows() / spec.chunk_rows(),
                     left = spec.rows() % spec.chunk_rows() * spec.row_numel();
  if (full > 0) f(Shape{full, chunk}, Strided{{chunk, 1}, 0}, Strided{{width, 1}, offset});
  if (left > 0) f(Shape{left}, Strided{{1}, full * chunk}, Strided{{1}, full * width + offset});
}

}  // namespace

void MatrixRing::plan(std::size_t states, const MuonOptions& options) {
  std::vector<MatrixSize> sizes;
  for (const Matrix& m : matrices_)
    sizes.push_back({m.spec.rows(), m.spec.row_numel(), m.spec.is_ragged() ? m.spec.most_rows() : 0,
                     m.parameter.row_parts()});
  const MatrixPlan plan = plan_matrices(sizes, ranks(), options.turn_bytes);
  turns_.resize(plan.widths.size());
  for (std::size_t t = 0; t < turns_.size(); ++t) {
    turns_[t].width = plan.widths[t];
    most_width_ = std::max(most_width_, plan.widths[t]);
  }
  for (const std::size_t i : plan.order) {
    matrices_[i].position = plan.positions[i];
    turns_[plan.positions[i].turn].matrices.push_back(i);
  }
  std::vector<FlatSegment> table;
  for (Turn& turn : turns_)
    for (std::size_t s = 0; s < states; ++s) {
      const std::size_t first = table.size();
      for (const std::size_t i : turn.matrices) {
        const Matrix& m = matrices_[i];
        const FlatEntry& entry = state_of(m.parameter)->flat_entry();
        if (m.state != s || entry.numel == 0) continue;
        const std::int64_t received = m.position.owner_rank * turn.width + m.position.offset;
        for (const Block& block : m.blocks) {
          const RowRange own = within(m.spec.owned(), block.rows);
          if (own.size() == 0) continue;
          table.push_back({.begin = entry.offset + own.begin * m.spec.row_numel(),
                           .end = entry.offset + own.end * m.spec.row_numel(),
                           .gradient_shift = received - entry.offset,
                           .moment_shift = 0,
                           .count_index = entry.trainable,
                           .lr_factor = block.rate,
                           .weight_decay = 0,
                           .unused = 0});
        }
      }
      if (table.size() == first) continue;
      std::sort(table.begin() + static_cast<std::ptrdiff_t>(first), table.end(),
                [](const FlatSegment& a, const FlatSegment& b) { return a.begin < b.begin; });
      turn.updates.push_back({s, first, table.size() - first});
    }
  if (table.empty()) return;
  const OwnerGuard owner(device_, "tables");
  const auto bytes = std::as_bytes(std::span(table));
  segments_ =
      Tensor::from_bytes(bytes, {static_cast<std::int64_t>(bytes.size()) / 8}, i64, device_);
}

// Once for each plan.
void MatrixRing::agree(const MuonOptions& options) {
  if (ranks() == 1 || is_agreed_) return;
  std::string all = concat(options.turn_bytes), shown;
  for (const Matrix& m : matrices_) {
    all += concat(' ', m.parameter.name(), m.spec.shape);
    if (shown.size() < 200) shown += concat(shown.empty() ? "'" : ", '", m.parameter.name(), "'");
  }
  const auto [least, most] =
      comm::least_and_most({group()}, comm::number_of(all), "compare matrices of Muon");
  TESSERA_EXPECT(least == most, "Muon: the ranks have different matrices; this one has ",
                 matrices_.size(), ", in turns of ", options.turn_bytes, " bytes, and begins with ",
                 shown, ": give every rank the same, in the same order");
  is_agreed_ = true;
}

// Collective where the memory is too small, which it is on all ranks or on none. A failure may have
// met some ranks with new memory and some without, so after a reset all make it anew.
void MatrixRing::allocate() {
  const std::int64_t bytes = checked_mul(checked_mul(most_width_, ranks()), 16);
  if (ranks() == 1) return;
  if (std::exchange(recoveries_, device_.context().recoveries()) != recoveries_) release();
  if (memory_ && memory_->bytes() >= bytes) return;
  release();
  memory_ = group()->allocate_symmetric(bytes, "a step of Muon");
  uses_ = std::make_shared<std::array<LastUse, 4>>();
}

void MatrixRing::release() {
  if (memory_) device_.context().keep(std::exchange(memory_, {}));
  if (uses_) device_.context().keep(std::exchange(uses_, {}));
}

void MatrixRing::take_memory(MatrixRing& from) {
  if (!from.memory_) return;
  memory_ = std::exchange(from.memory_, {});
  uses_ = std::exchange(from.uses_, {});
  recoveries_ = from.recoveries_;
}

Tensor MatrixRing::area(std::size_t which, std::int64_t width) const {
  const Shape shape{ranks(), width};
  if (ranks() == 1) return Tensor::empty(shape, f32, device_);
  const std::int64_t bytes = memory_->bytes() / 4;
  return Tensor::wrap(
      Storage::borrowed(device_, memory_->data() + static_cast<std::int64_t>(which) * bytes, bytes,
                        (*uses_)[which]),
      shape, f32);
}

MatrixRing::Received MatrixRing::exchange(const char* name, const Tensor& parts) const {
  if (ranks() == 1) return {parts, {}};
  const Tensor received = Tensor::empty(parts.shape(), f32, device_);
  Communicator& comm = group()->reduce();
  const Stream wire = device_.stream(comm.stream());
  wire.wait(device_.compute().record());
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
bool MatrixRing::is_due(const Turn& turn, const States& states) const {
  return std::ranges::any_of(
      turn.matrices, [&](std::size_t i) { return has_gradient(states[matrices_[i].state]); });
}

// This rank's rows of what each owner rank orthogonalises.
MatrixRing::Received MatrixRing::send_momenta(const Turn& turn, std::size_t lane,
                                              const States& states,
                                              const MuonOptions& options) const {
  const float momentum = static_cast<float>(options.momentum);  // as the update has it
  const Tensor parts = area(lane, turn.width);
  for (const std::size_t i : turn.matrices) {
    const Matrix& m = matrices_[i];
    const Optimizer::GroupState& state = states[m.state];
    const FlatEntry& entry = state_of(m.parameter)->flat_entry();
    if (!has_gradient(state) || entry.numel == 0) continue;
    const auto flat = [&](const Tensor& of, std::int64_t at) {
      return of.view({entry.numel}, {1}, at);
    };
    const Tensor rows = flat(parts, m.position.owner_rank * turn.width + m.position.offset);
    raw::copy_into(rows, flat(state.moments[0], m.moment_offset));
    if (options.nesterov)
      raw::axpby(rows, flat(state.group->await_gradient(), entry.gradient_offset), 1 - momentum,
                 momentum);
  }
  return exchange("muon_momenta", parts);
}

// The matrices of this rank, and their rows back to the others.
MatrixRing::Received MatrixRing::orthogonalise(const Turn& turn, std::size_t lane,
                                               const Received& momenta, const States& states,
                                               const NewtonSchulz& how) const {
  await(device_, momenta.arrived);
  const Tensor parts = area(2 + lane, turn.width);
  for (const std::size_t i : turn.matrices) {
    const Matrix& m = matrices_[i];
    if (m.position.owner_rank != rank() || !has_gradient(states[m.state])) continue;
    const Tensor whole = Tensor::empty({m.spec.rows(), m.spec.row_numel()}, f32, device_);
    for_chunks(m.spec, turn.width, m.position.offset,
               [&](const Shape& shape, const Strided& in_whole, const Strided& in_parts) {
                 raw::copy_into(whole.view(shape, in_whole.strides, in_whole.offset),
                                momenta.parts.view(shape, in_parts.strides, in_parts.offset));
               });
    const bool is_turned = m.spec.dim == 1;  // as memory has columns; sums add up as those of rows
    const auto turned = [&](const Tensor& x) {
      return is_turned ? raw::contiguous(raw::transpose(x, 0, 1)) : x;
    };
    std::vector<Tensor> blocks;
    for (const Block& block : m.blocks) {
      const Tensor rows = raw::slice(whole, 0, block.rows.begin, block.rows.end);
      blocks.push_back(turned(orthogonalised(turned(rows), how)));
    }
    const Tensor done = blocks.size() == 1 ? blocks[0] : raw::cat(blocks, 0);
    for_chunks(m.spec, turn.width, m.position.offset,
               [&](const Shape& shape, const Strided& in_whole, const Strided& in_parts) {
                 raw::copy_into(parts.view(shape, in_parts.strides, in_parts.offset),
                                done.view(shape, in_whole.strides, in_whole.offset));
               });
  }
  return exchange("muon_directions", parts);
}

// p -= rate O, where any rank had a gradient.
void MatrixRing::apply(const Turn& turn, const Received& rows, const States& states,
                       const Tensor& scalars) const {
  await(device_, rows.arrived);
  for (const Update& update : turn.updates) {
    if (!has_gradient(states[update.state])) continue;
    const FlatGroup& group = *states[update.state].group;
    const Tensor counts = group.counts();
    kernels::UpdateArgs args{};
    args.values = reinterpret_cast<float*>(group.values.data());
    args.gradient = reinterpret_cast<const float*>(rows.parts.data());
    args.segments = reinterpret_cast<const FlatSegment*>(segments_.data()) + update.first;
    args.counts = reinterpret_cast<const float*>(counts.data());
    args.scalars = reinterpret_cast<const kernels::UpdateScalars*>(scalars.data());
    args.segment_count = static_cast<std::int32_t>(update.count);
    args.op = kernels::UpdateOp::muon;
    detail::launch("muon_apply", device_, detail::table(device_).update, args,
                   {detail::reads(rows.parts), detail::reads(counts), detail::reads(segments_),
                    detail::reads(scalars), detail::updates_some(group.values, rows.parts)});
  }
}

// A turn's momenta travel while the one before is orthogonalised, and its result while the one
// behind is.
void MatrixRing::step(const States& states, const MuonOptions& options, const Tensor& scalars) {
  std::vector<const Turn*> due;
  for (const Turn& turn : turns_)
    if (is_due(turn, states)) due.push_back(&turn);
  if (due.empty()) return;
  agree(options);
  allocate();
  const OwnerGuard owner(device_, "muon");
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

}  // namespace tessera::optim
