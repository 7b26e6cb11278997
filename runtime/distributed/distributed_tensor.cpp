#include "tessera/distributed/distributed_tensor.hpp"

#include <algorithm>
#include <ostream>
#include <utility>

#include "runtime/distributed/gatherer.hpp"
#include "tessera/base/error.hpp"
#include "tessera/param/parameter.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

bool is_shard(const Placement& p) {
  return std::holds_alternative<Shard>(p) || std::holds_alternative<RaggedShard>(p);
}
bool is_partial(const Placement& p) { return std::holds_alternative<Partial>(p); }

const RankGroup& group_of(const DeviceMesh& mesh, std::size_t dim) {
  return mesh.group(mesh.dims()[dim].name);
}

std::string text_of(const Placements& placements) {
  std::string text = "(";
  for (const Placement& p : placements) text += concat(text.size() > 1 ? ", " : "", to_string(p));
  return text + ')';
}

// Along which dimension of the mesh it is sharded; -1 for none.
int sharded_dim(const Placements& placements) {
  const auto found = std::ranges::find_if(placements, is_shard);
  return found == placements.end() ? -1 : static_cast<int>(found - placements.begin());
}

// What this rank has of a tensor of that shape.
ShardSpec spec_of(const Shape& shape, const DeviceMesh& mesh, const Placements& placements) {
  TESSERA_EXPECT(static_cast<int>(placements.size()) == mesh.ndim(),
                 "DistributedTensor: ", placements.size(), " placements ", text_of(placements),
                 " for a mesh of ", mesh.ndim(), " dimensions; give one for each");
  const std::int64_t rows = shape.ndim() > 0 ? shape[0] : 0;
  for (const Placement& p : placements) {
    if (const auto* const shard = std::get_if<Shard>(&p))
      TESSERA_EXPECT(shard->dim == 0 || (shard->dim > 0 && shard->dim < shape.ndim()),
                     "DistributedTensor: ", to_string(p), " of a tensor ", shape,
                     "; give one of its dimensions");
    if (const auto* const ragged = std::get_if<RaggedShard>(&p))
      TESSERA_EXPECT(
          ragged->block_rows > 0 && ragged->block_rows <= rows && ragged->extra_from >= 0,
          "DistributedTensor: ", to_string(p), " of a tensor ", shape,
          "; a block has between 1 row and all");
  }
  TESSERA_EXPECT(std::ranges::count_if(placements, is_shard) <= 1,
                 "DistributedTensor: ", text_of(placements),
                 " is sharded twice; shard along one dimension of the mesh");
  const int dim = sharded_dim(placements);
  if (dim < 0) return {shape, 1, 0};
  const RankGroup& group = group_of(mesh, static_cast<std::size_t>(dim));
  ShardSpec spec{shape, group.size(), group.rank()};
  const Placement& cut = placements[static_cast<std::size_t>(dim)];
  if (const auto* const shard = std::get_if<Shard>(&cut)) {
    spec.dim = shard->dim;
    TESSERA_EXPECT(spec.dim == 0 || spec.rows() % spec.world == 0,
                   "DistributedTensor: ", to_string(cut), " of a tensor ", shape, " over ",
                   spec.world, " ranks; other dimensions than 0 are cut evenly");
  }
  if (const auto* const ragged = std::get_if<RaggedShard>(&cut)) {
    spec.block_rows = ragged->block_rows;
    TESSERA_EXPECT(ragged->extra_from >= 0 && ragged->extra_from < spec.world,
                   "DistributedTensor: blocks that are left over go to rank ", ragged->extra_from,
                   " and on; give one of 0 to ", spec.world - 1);
    spec.extra_from = ragged->extra_from;
  }
  return spec;
}

// The sum, or the largest, of all ranks' tensors along one dimension of the mesh.
Tensor reduced(const Tensor& term, const RankGroup& group, ReduceOp reduce) {
  if (group.size() == 1 || term.numel() == 0) return term;
  Gatherer memory(group, gathered_bytes({term.shape(), 1, 0}, term.dtype()), "redistribute");
  return memory.all_reduce("all_reduce_partial", term, reduce);
}

}  // namespace

std::string to_string(const Placement& placement) {
  if (const auto* const shard = std::get_if<Shard>(&placement))
    return concat("Shard(", shard->dim, ')');
  if (const auto* const ragged = std::get_if<RaggedShard>(&placement))
    return concat("RaggedShard(0, blocks of ", ragged->block_rows,
                  ragged->extra_from > 0 ? concat(", extra from ", ragged->extra_from) : "", ')');
  if (const auto* const partial = std::get_if<Partial>(&placement))
    return concat("Partial(", name(partial->reduce), ')');
  return "Replicate";
}

DistributedTensor::DistributedTensor(const Tensor& local, const Shape& shape,
                                     const DeviceMesh& mesh, Placements placements)
    : local_(local),
      spec_(spec_of(shape, mesh, placements)),
      mesh_(std::make_shared<const DeviceMesh>(mesh)),
      placements_(std::move(placements)) {
  TESSERA_EXPECT(local.shape() == spec_.local_shape(), "DistributedTensor: the local part is ",
                 local.shape(), ", but ", text_of(placements_), " of ", shape, " gives this rank ",
                 spec_.local_shape());
}

const DeviceMesh& DistributedTensor::mesh() const {
  TESSERA_EXPECT(mesh_ != nullptr, "an undefined DistributedTensor was used");
  return *mesh_;
}

// Sums first, then gathers, then cuts: each on what the one before has left.
DistributedTensor DistributedTensor::redistribute(const Placements& placements) const {
  const DeviceMesh& mesh = this->mesh();
  const ShardSpec to = spec_of(shape(), mesh, placements);
  for (std::size_t d = 0; d < placements.size(); ++d)
    TESSERA_EXPECT(!is_partial(placements[d]) || placements[d] == placements_[d],
                   "redistribute: a tensor of ", text_of(placements_),
                   " can't become partial as in ", text_of(placements),
                   "; give Shard or Replicate");
  Tensor part = local_;
  for (std::size_t d = 0; d < placements.size(); ++d)
    if (const auto* const partial = std::get_if<Partial>(&placements_[d]);
        partial && placements[d] != placements_[d])
      part = reduced(part, group_of(mesh, d), partial->reduce);
  const int from = sharded_dim(placements_);
  if (from == sharded_dim(placements) && to == spec_) return {part, shape(), mesh, placements};
  if (from >= 0) {
    Gatherer gatherer(group_of(mesh, static_cast<std::size_t>(from)),
                      gathered_bytes(spec_, dtype()), "redistribute");
    const Tensor whole = gatherer.gather("all_gather_tensor", part, spec_);
    part = Tensor::empty(shape(), dtype(), part.device());
    raw::copy_into(part, whole);
  }
  if (to.world > 1) part = raw::contiguous(rows_of(part, to));
  return {part, shape(), mesh, placements};
}

Tensor DistributedTensor::full() const {
  return redistribute(Placements(placements_.size(), Replicate{})).local();
}

std::string DistributedTensor::to_string() const {
  if (!defined()) return "undefined";
  std::string text = concat(dtype(), ' ', shape(), ", ");
  for (std::size_t d = 0; d < placements_.size(); ++d) {
    const MeshDim& dim = mesh_->dims()[d];
    text += concat(d > 0 ? ", " : "", tessera::to_string(placements_[d]), " over ", dim.name, ' ',
                   dim.size);
  }
  if (sharded_dim(placements_) < 0) return text;
  const RowRange own = rows();
  const std::string of = spec_.dim > 0 ? concat(" of dimension ", spec_.dim) : "";
  if (own.size() == 0) return text + "; no row here";
  if (own.size() == 1) return concat(text, "; row ", own.begin, of, " here");
  return concat(text, "; rows ", own.begin, " to ", own.end - 1, of, " here");
}

std::ostream& operator<<(std::ostream& out, const DistributedTensor& tensor) {
  return out << tensor.to_string();
}

DistributedTensor distribute(const Tensor& tensor, const DeviceMesh& mesh,
                             const Placements& placements) {
  TESSERA_EXPECT(std::ranges::none_of(placements, is_partial),
                 "distribute: a tensor can't become partial as in ", text_of(placements),
                 "; give Shard or Replicate");
  spec_of(tensor.shape(), mesh, placements);  // before anything is sent
  Tensor whole = tensor;
  for (std::size_t d = 0; d < placements.size(); ++d) {
    const RankGroup& group = group_of(mesh, d);
    if (group.size() == 1) continue;
    Gatherer sender(group, gathered_bytes({tensor.shape(), 1, 0}, tensor.dtype()), "distribute");
    const Tensor sent = sender.broadcast("broadcast_tensor", whole, tensor.shape(), tensor.dtype());
    whole = Tensor::empty(tensor.shape(), tensor.dtype(), tensor.device());
    raw::copy_into(whole, sent);
  }
  return DistributedTensor(whole, tensor.shape(), mesh, Placements(placements.size(), Replicate{}))
      .redistribute(placements);
}

// --- handles of parameters ---

namespace {

DistributedTensor handle_of(const Parameter& parameter, const Tensor& rows) {
  TESSERA_EXPECT(parameter.mesh() != nullptr, "parameter '", parameter.name(),
                 "' belongs to no unit and is whole; `distribute` spreads a tensor over a mesh");
  if (!rows.defined()) return {};
  const DeviceMesh& mesh = *parameter.mesh();
  const ShardSpec& spec = parameter.spec();
  Placement cut = Shard{spec.dim};
  if (spec.is_ragged()) cut = RaggedShard{spec.block_rows, spec.extra_from};
  if (mesh.ndim() == 1) return {rows, parameter.shape(), mesh, {cut}};
  return {rows, parameter.shape(), mesh, {Replicate{}, cut}};
}

}  // namespace

DistributedTensor Parameter::distributed() const { return handle_of(*this, shard()); }
DistributedTensor Parameter::distributed_grad() const { return handle_of(*this, grad()); }

}  // namespace tessera
