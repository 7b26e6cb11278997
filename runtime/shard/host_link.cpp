#include "runtime/shard/host_link.hpp"

#include <algorithm>

#include "runtime/device/queue.hpp"
#include "runtime/shard/encoded_parameters.hpp"
#include "runtime/shard/host_shards.hpp"
#include "runtime/shard/unit_shards.hpp"
#include "runtime/tensor/launch.hpp"
#include "runtime/tensor/transfer.hpp"
#include "tessera/detail/base/checked.hpp"

namespace tessera::shard {
namespace {

// y = x, or y += x, on a stream of the host.
void axpby(const char* name, const Tensor& y, const Tensor& x, bool is_fresh) {
  kernels::AxpbyArgs args{};
  args.y = y.data();
  args.x = x.data();
  args.alpha = 1;
  args.beta = is_fresh ? 0 : 1;
  args.count = x.numel();
  args.y_dtype = y.dtype();
  args.x_dtype = x.dtype();
  detail::launch(name, y.device(), detail::table(y.device()).axpby, args,
                 {detail::reads(x), detail::updates(y, !is_fresh)});
}

std::int64_t bytes_of(const Tensor& t) {
  return t.numel() * static_cast<std::int64_t>(size_bytes(t.dtype()));
}

}  // namespace

void HostLink::Sizes::add(const UnitShards& shards, std::int64_t reduced_bytes) {
  for (const auto& group : shards.groups()) {
    for (const auto& [range, sent] : values_from_host(shards, *group)) {
      const std::int64_t bytes = range.numel() * static_cast<std::int64_t>(size_bytes(sent));
      gathered = std::max(gathered, bytes);
      if (sent != group->values.dtype()) cast = std::max(cast, bytes);
    }
  }
  const std::int64_t encoded = encoded_chunk_bytes(shards);
  gathered = std::max(gathered, encoded);
  cast = std::max(cast, encoded);
  reduced = std::max(reduced, reduced_bytes);
}

HostLink::Halves::Halves(const Device& on, std::int64_t bytes)
    : bytes_(round_up(bytes, kAlignmentBytes)) {
  const OwnerGuard owner(on, "offload staging");
  for (Part& part : parts_) {
    part.memory = Storage::owned(on, bytes_);
    part.free = on.compute().record();  // until here it was somebody else's
  }
}

Tensor HostLink::Halves::next(Stream stream, std::int64_t numel, DType dtype) {
  half_ = 1 - half_;
  stream.wait(parts_[half_].free);
  return Tensor::wrap(parts_[half_].memory, {numel}, dtype);
}

HostLink::HostLink(const Device& device, const Sizes& sizes)
    : device_(device),
      host_(device.host()),
      cast_(host_, sizes.cast),
      gathered_(device, sizes.gathered),
      sums_(device, sizes.reduced),
      landed_(host_, sizes.reduced) {}

Tensor HostLink::begin_gather(const Tensor& shards, DType dtype, const Event& updated) {
  if (dtype == shards.dtype()) return to_device(shards, updated);
  host_.compute().wait(updated);
  const Tensor cast = cast_.next(host_.compute(), shards.numel(), dtype);
  axpby("cast_shard", cast, shards, true);
  return begin_gather(cast);
}

Tensor HostLink::begin_encode(std::int64_t bytes) {
  return cast_.next(host_.compute(), bytes, e4m3);
}

Tensor HostLink::begin_gather(const Tensor& encoded) {
  const Tensor to = to_device(encoded, host_.compute().record());
  cast_.free_after(device_.stream(StreamId::transfer).record());
  return to;
}

Tensor HostLink::to_device(const Tensor& from, const Event& made) {
  const Stream transfer = device_.stream(StreamId::transfer);
  transfer.wait(made);
  const Tensor to = gathered_.next(transfer, from.numel(), from.dtype());
  detail::launch_transfer("copy_to_device", to, from);
  const Event copied = transfer.record();
  gathered_.free_after(copied);  // unless something comes to read it
  device_.gather().wait(copied);
  return to;
}

void HostLink::end_gather() { gathered_.free_after(device_.gather().record()); }

Tensor HostLink::take_sums(Stream stream, std::int64_t numel, DType dtype) {
  return sums_.next(stream, numel, dtype);
}

Event HostLink::add_to(const Tensor& values, const Tensor& counts, const Tensor& sums,
                       Stream stream, bool is_fresh) {
  const Stream host = host_.compute(), transfer = device_.stream(StreamId::transfer);
  transfer.wait(stream.record());
  if (is_fresh && sums.dtype() == values.dtype()) {
    transfer.wait(host.record());  // which has made the gradient
    const Access accesses[] = {sums.access(AccessMode::read), values.access(AccessMode::write),
                               counts.access(AccessMode::write)};
    transfer.launch({.name = "copy_to_host",
                     .cost = {.bytes = 2.0 * static_cast<double>(bytes_of(sums))},
                     .accesses = accesses},
                    [to = values.data(), to_counts = counts.data(), from = sums.data(),
                     bytes = bytes_of(values), of_counts = bytes_of(counts)](Exec& exec) {
                      const bool is_one = to + bytes == to_counts;
                      queue_copy(exec, to, from, is_one ? bytes + of_counts : bytes);
                      if (!is_one && !exec.error)
                        queue_copy(exec, to_counts, from + bytes, of_counts);
                    });
    const Event copied = transfer.record();
    sums_.free_after(copied);
    return copied;
  }
  const Tensor landed = landed_.next(transfer, sums.numel(), sums.dtype());
  detail::launch_transfer("copy_to_host", landed, sums);
  const Event copied = transfer.record();
  sums_.free_after(copied);
  host.wait(copied);
  axpby("accumulate_shard", values, landed.view({values.numel()}, {1}, 0), is_fresh);
  axpby("accumulate_shard", counts, landed.view({counts.numel()}, {1}, values.numel()), is_fresh);
  const Event added = host.record();
  landed_.free_after(added);
  return added;
}

}  // namespace tessera::shard
