#include "runtime/checkpoint/held_box.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "runtime/checkpoint/shard_info.hpp"
#include "runtime/device/queue.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::checkpoint {
namespace {

template <class To, class From>
To converted(From value) {
  if constexpr (std::is_same_v<To, From>)
    return value;
  else if constexpr (std::is_class_v<From> || std::is_class_v<To>)  // floats of 16 or 8 bits
    return To(static_cast<float>(value));
  else
    return static_cast<To>(value);
}

// Elements of one type behind each other, as another type `stride` elements apart; neither side is
// aligned to anything.
template <class To, class From>
void convert(std::byte* to, const std::byte* from, std::int64_t count, std::int64_t stride) {
  if constexpr (std::is_same_v<To, From>)
    if (stride == 1) {
      std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(To));
      return;
    }
  for (std::int64_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * static_cast<std::int64_t>(sizeof value), sizeof value);
    const To own = converted<To>(value);
    std::memcpy(to + i * stride * static_cast<std::int64_t>(sizeof own), &own, sizeof own);
  }
}

// Calls f(target, source, count, stride) for each run of elements that follow each other at the
// source; both in elements.
template <class F>
void for_each_run(const std::vector<Stretch>& all, const F& f) {
  const Stretch& run = all.back();
  std::vector<std::int64_t> index(all.size() - 1, 0);
  std::int64_t source = 0, target = 0;
  while (true) {
    f(target, source, run.count, run.to);
    std::size_t d = index.size();
    for (; d-- > 0;) {
      source += all[d].from;
      target += all[d].to;
      if (++index[d] < all[d].count) break;
      source -= all[d].from * all[d].count;
      target -= all[d].to * all[d].count;
      index[d] = 0;
    }
    if (d == static_cast<std::size_t>(-1)) return;
  }
}

std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(size_bytes(dtype)); }

}  // namespace

std::span<const std::byte> HeldBox::read(std::int64_t index, std::span<std::byte> room) const {
  const std::int64_t begin = index * kPieceBytes;
  const std::span<std::byte> bytes =
      room.first(static_cast<std::size_t>(std::min(kPieceBytes, entry->size_bytes - begin)));
  file->read(*entry, begin, bytes);
  if (!checksums.empty())
    check_piece(*file, *entry, index, bytes, checksums[static_cast<std::size_t>(index)]);
  return bytes;
}

struct BoxReader::Piece {
  const HeldBox& from;
  std::int64_t index, begin, count;  // of its elements, in the box
  std::vector<Box> wanted;           // of them, as indices in the box
  const Sizes& sizes;                // of the box
  const Sizes& to_strides;
  std::int64_t origin;  // of the tensor: where the box's first element would be

  DType dtype() const { return from.entry->dtype; }
  std::int64_t source(const Box& of) const {
    return element_of(of.begin, strides_of(sizes)) - begin;
  }
  std::int64_t target(const Box& of) const { return origin + element_of(of.begin, to_strides); }
  // Whether its elements follow each other in the tensor, too.
  bool is_run() const { return sizes.size() == 1 && to_strides[0] == 1; }
};

BoxReader::BoxReader(const Tensor& to) : to_(to) {
  if (to.device().kind() != DeviceKind::cpu || !to.device().runs_bodies()) return;
  // What was queued before may still use memory that is new to this tensor.
  to.device().context().block(to.device().compute().record());
  host_ = to.host_data(AccessMode::write);
}

BoxReader::~BoxReader() {
  if (pinned_) Memory::of(to_.device()).staging().give_back(*pinned_);
}

void BoxReader::read(const HeldBox& from, const Box& region, std::int64_t first,
                     const Sizes& to_strides) {
  if (!host_ && to_.device().kind() == DeviceKind::cpu) return;  // a plan, or meta
  Box wanted = region, box{Sizes(region.begin.size(), 0), from.box.sizes};
  for (std::size_t d = 0; d < wanted.begin.size(); ++d) wanted.begin[d] -= from.box.begin[d];
  Sizes strides = to_strides;
  if (const auto all = stretches(wanted, box, strides); all.size() == 1 && all[0].to == 1) {
    wanted = {{element_of(wanted.begin, strides_of(box.sizes))}, {all[0].count}};
    box = {{0}, {numel_of(box.sizes)}};
    strides = {1};
  }
  const std::int64_t each = kPieceBytes / bytes_of(from.entry->dtype);
  const std::int64_t numel = numel_of(box.sizes),
                     begin = element_of(wanted.begin, strides_of(box.sizes));
  Sizes last = wanted.begin;
  for (std::size_t d = 0; d < last.size(); ++d) last[d] = wanted.end(d) - 1;
  const std::int64_t end = element_of(last, strides_of(box.sizes)) + 1;
  for (std::int64_t index = begin / each; index * each < end; ++index) {
    Piece piece{.from = from,
                .index = index,
                .begin = index * each,
                .count = std::min(each, numel - index * each),
                .wanted = {},
                .sizes = box.sizes,
                .to_strides = strides,
                .origin = first - element_of(wanted.begin, strides)};
    for (const Box& part : boxes_of_run(box.sizes, piece.begin, piece.begin + piece.count))
      if (const Box own = common(part, wanted); std::ranges::find(own.sizes, 0) == own.sizes.end())
        piece.wanted.push_back(own);
    if (piece.wanted.empty()) continue;
    host_ ? read_on_host(piece) : read_on_device(piece);
  }
}

void BoxReader::read_on_host(const Piece& piece) {
  const DType to = to_.dtype(), dtype = piece.dtype();
  const auto target = [&](const Box& of) { return host_ + piece.target(of) * bytes_of(to); };
  if (piece.is_run() && to == dtype && piece.wanted[0].sizes[0] == piece.count) {
    piece.from.read(piece.index, {target(piece.wanted[0]),
                                  static_cast<std::size_t>(piece.count * bytes_of(to))});
    return;
  }
  held_.resize(kPieceBytes);
  const std::span<const std::byte> bytes = piece.from.read(piece.index, held_);
  for (const Box& own : piece.wanted) {
    const std::byte* const source = bytes.data() + piece.source(own) * bytes_of(dtype);
    visit(to, [&](auto to_type) {
      visit(dtype, [&](auto from_type) {
        for_each_run(stretches(own, {Sizes(own.sizes.size(), 0), piece.sizes}, piece.to_strides),
                     [&, rows = target(own)](std::int64_t into, std::int64_t at, std::int64_t count,
                                             std::int64_t stride) {
                       using To = typename decltype(to_type)::type;
                       using From = typename decltype(from_type)::type;
                       convert<To, From>(rows + into * static_cast<std::int64_t>(sizeof(To)),
                                         source + at * static_cast<std::int64_t>(sizeof(From)),
                                         count, stride);
                     });
      });
    });
  }
}

void BoxReader::read_on_device(const Piece& piece) {
  const Device& device = to_.device();
  DeviceContext& context = device.context();
  if (!pinned_) pinned_ = &Memory::of(device).staging().take(kPieceBytes);
  context.block_on(pinned_->use.touched);  // what was read before has left
  context.host_writes(pinned_->data, kPieceBytes);
  if (device.runs_bodies()) piece.from.read(piece.index, {pinned_->data, kPieceBytes});
  const auto upload = [&](const Tensor& to, std::int64_t first) {
    const std::byte* const from = pinned_->data + first * bytes_of(to.dtype());
    const std::int64_t bytes = to.numel() * bytes_of(to.dtype());
    const Access accesses[] = {{&pinned_->use, from, from + bytes, AccessMode::read},
                               to.access(AccessMode::write)};
    device.compute().launch(
        {.name = "copy_from_host",
         .cost = {.bytes = 2.0 * static_cast<double>(bytes)},
         .accesses = accesses},
        [to = to.data(), from, bytes](Exec& exec) { queue_copy(exec, to, from, bytes); });
  };
  if (piece.is_run() && piece.dtype() == to_.dtype()) {
    const Box& own = piece.wanted[0];
    return upload(to_.view({own.sizes[0]}, {1}, piece.target(own)), piece.source(own));
  }
  if (!uploaded_.defined() || uploaded_.dtype() != piece.dtype())
    uploaded_ = Tensor::empty({kPieceBytes / bytes_of(piece.dtype())}, piece.dtype(), device);
  upload(uploaded_.view({piece.count}, {1}, 0), 0);
  const auto shape = [](const Sizes& sizes) { return Shape(std::span(sizes)); };
  for (const Box& own : piece.wanted)
    raw::copy_into(
        to_.view(shape(own.sizes), shape(piece.to_strides), piece.target(own)),
        uploaded_.view(shape(own.sizes), shape(strides_of(piece.sizes)), piece.source(own)));
}

}  // namespace tessera::checkpoint
