#include "runtime/checkpoint/staging.hpp"

#include <utility>

#include "runtime/tensor/transfer.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::checkpoint {

void Staging::copy(std::vector<RankFile>& files) {
  std::int64_t bytes = 0;
  for (const RankFile& file : files)
    for (const OwnBox& box : file.boxes)
      bytes = checked_add(bytes, round_up(box.entry.size_bytes, kAlignmentBytes));
  if (bytes == 0) return;
  if (!memory_ || memory_->bytes < bytes) {
    memory_.reset();
    const OwnerGuard owner(host_, "checkpoint staging");
    memory_ = Storage::owned(host_, bytes);
  }
  // All that may be wrong with the values comes before the first copy, and so do no edges.
  std::vector<std::pair<Tensor, Tensor>> flat, others;  // to, from
  std::int64_t at = 0;
  for (RankFile& file : files)
    for (OwnBox& box : file.boxes) {
      const std::function<Tensor()> values = std::exchange(box.values, nullptr);
      if (box.entry.size_bytes == 0) continue;
      const Tensor from = values();
      TESSERA_EXPECT(!from.device().is_meta(), "checkpoint::save: ", shown(box.entry.name),
                     " has no memory; materialize the model first");
      (void)from.access(AccessMode::read);
      const Tensor to = Tensor::wrap(memory_, from.shape(), from.dtype(), at);
      box.staged = memory_->data + at;
      at += round_up(box.entry.size_bytes, kAlignmentBytes);
      (from.is_contiguous() ? flat : others).emplace_back(to, from);
    }
  const Stream transfer = host_.stream(StreamId::transfer);
  const Stream streams[] = {host_.main().compute(), host_.compute()};
  for (const Stream& stream : streams) transfer.wait(stream.record());
  for (const auto& [to, from] : flat) detail::launch_transfer("checkpoint staging", to, from);
  for (const Stream& stream : streams) stream.wait(transfer.record());
  // Each through memory of the device that the next one takes again.
  for (const auto& [to, from] : others) raw::copy_into(to, from);
}

void Staging::block() const {
  if (memory_) (void)Tensor::wrap(memory_, {memory_->bytes}, boolean).host_data(AccessMode::read);
}

}  // namespace tessera::checkpoint
