#include "runtime/shard/encoded_parameters.hpp"

#include <utility>

#include "runtime/autograd/kept_results.hpp"
#include "runtime/shard/host_link.hpp"
#include "tessera/param/gather_transform.hpp"

namespace tessera::shard {
namespace {

std::int64_t bytes_of(const GatherTransform::Part& part, int world) {
  const auto size = static_cast<std::int64_t>(size_bytes(part.dtype));
  return round_up(checked_mul(checked_mul(part.numel, world), size), kAlignmentBytes);
}

// A parameter's rows: of a chunk, or of all chunks.
Shape rows_of(const ShardSpec& spec, std::int64_t rows) {
  return spec.shape.ndim() == 0 ? Shape{rows} : spec.shape.with(0, rows);
}

}  // namespace

std::int64_t encoded_bytes(const ParameterState& p) {
  std::int64_t bytes = 0;
  if (p.transform && p.spec.chunk_numel() > 0)
    for (const GatherTransform::Part& part : p.transform->parts(p.spec))
      bytes = checked_add(bytes, bytes_of(part, p.spec.world));
  return bytes;
}

std::int64_t encoded_chunk_bytes(const UnitShards& shards) {
  std::int64_t bytes = 0;
  for (const auto& p : shards.parameters())
    if (p->transform && p->spec.chunk_numel() > 0)
      for (const GatherTransform::Part& part : p->transform->parts(p->spec))
        bytes += bytes_of(part, 1);
  return bytes;
}

EncodedParameters::EncodedParameters(const UnitShards& shards, std::vector<GatheredPart>& parts)
    : GatherStage(Place::encoded), shards_(shards) {
  const Device gather = shards.device().on(StreamId::gather);
  storage_ = Storage::window(gather, shards.layout().gather_bytes, shards.name());
  storage_->remedy = "use it inside of the gather transform's call";
  std::vector<std::int64_t> rows;
  for (std::size_t i = 0; i < shards.parameters().size(); ++i) {
    const std::shared_ptr<ParameterState>& p = shards.parameters()[i];
    const ShardSpec& spec = p->spec;
    if (!p->transform || spec.chunk_numel() == 0) continue;
    const Tensor& values = p->group->values;
    const std::shared_ptr<Storage> held(
        new Storage{.device = shards.is_offloaded() ? values.device() : gather,
                    .data = values.data() + shards.offset_of(i) * p->element_bytes(),
                    .bytes = spec.chunk_numel() * p->element_bytes(),
                    .use = values.storage()->use,
                    .is_read_only = true},
        [values](Storage* gone) { delete gone; });
    std::int64_t at = shards.layout().gather_offset_bytes[i];
    One one{.parameter = p,
            .chunk = Tensor::wrap(held, rows_of(spec, spec.chunk_rows()), p->dtype),
            .full = Tensor::wrap(storage_, rows_of(spec, spec.chunk_rows() * spec.world),
                                 p->compute_dtype, at),
            .own = {},
            .all = {}};
    at += UnitLayout::bytes_of(spec, p->compute_dtype);
    for (const GatherTransform::Part& part : p->transform->parts(spec)) {
      parts.push_back({at, part.numel, part.dtype});
      one.all.push_back(Tensor::wrap(storage_, {spec.world, part.numel}, part.dtype, at));
      one.own.push_back(one.all.back().view({part.numel}, {1}, spec.rank * part.numel));
      const std::int64_t bytes = part.numel * static_cast<std::int64_t>(size_bytes(part.dtype));
      rows.insert(rows.end(), {bytes_on_host_, at + spec.rank * bytes, bytes});
      bytes_on_host_ += bytes_of(part, 1);
      at += bytes_of(part, spec.world);
    }
    encoded_.push_back(std::move(one));
  }
  if (shards.is_offloaded() && !rows.empty()) table_ = kernel_table(rows, shards.device());
}

// A function that is recomputed may gather in one of its runs only, so that products of a transform
// are none that it keeps.
void EncodedParameters::pack(const Slot& slot) {
  const autograd::KeptScope apart(nullptr);
  storage_->data = slot.data;
  storage_->use = slot.use;
  if (shards_.host()) return encode_on_host(slot);
  for (const One& one : encoded_) one.parameter->transform->encode(one.own, one.chunk);
}

// In memory of HostLink's, which one copy brings to the device, and one kernel into the slot.
void EncodedParameters::encode_on_host(const Slot& slot) {
  if (encoded_.empty()) return;
  const Tensor staged = shards_.host()->begin_encode(bytes_on_host_);
  std::int64_t at = 0;
  for (const One& one : encoded_) {
    std::vector<Tensor> own;
    for (const Tensor& part : one.own) {
      own.push_back(Tensor::wrap(staged.storage(), part.shape(), part.dtype(), at));
      at += bytes_of({part.dtype(), part.numel()}, 1);
    }
    staged.device().compute().wait(one.parameter->group->updated);
    one.parameter->transform->encode(own, one.chunk);
  }
  shard::pack("pack_encoded", shards_.device().gather(), table_, staged.numel(),
              shards_.host()->begin_gather(staged), slot, e4m3);
  shards_.host()->end_gather();
}

void EncodedParameters::unpack(const Slot&) {
  const autograd::KeptScope apart(nullptr);
  for (const One& one : encoded_) one.parameter->transform->decode(one.full, one.all);
  storage_->data = nullptr;
}

}  // namespace tessera::shard
