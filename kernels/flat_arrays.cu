// The flat arrays of sharding: casting all shards of a unit in one launch, and completing
// gradients.
#include "kernels/cuda/chunks.hpp"
#include "kernels/cuda/elements.hpp"
#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {

namespace {

constexpr int kFours = 4;  // groups of four elements that a thread has in flight
constexpr std::int64_t kPackChunk = 4 * kFours * kChunkThreads;

template <class S, class T>
struct PackBody {
  std::byte* dst;
  const S* src;
  const PackEntry* entries;
  std::int32_t entry_count;

  TESSERA_DEVICE void operator()(Thread& t) const {
    for_chunks(
        t, entry_count, [this](int e) { return blocks_for(entries[e].count, kPackChunk); },
        [&](int e, std::int64_t chunk) {
          const PackEntry entry = entries[e];
          move(src + entry.src, reinterpret_cast<T*>(dst + entry.dst_bytes),
               chunk * kPackChunk + 4 * t.index(), entry.count);
        });
  }

 private:
  // This thread's elements first, first + 1, .. of every group of four of the chunk.
  TESSERA_DEVICE static void move(const S* from, T* to, std::int64_t first, std::int64_t count) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(from) % alignof(Pack<S, 4>) == 0 &&
                         reinterpret_cast<std::uintptr_t>(to) % alignof(Pack<T, 4>) == 0;
    Pack<S, 4> x[kFours];
    unrolled<kFours>([&](int u) {
      const std::int64_t i = first + u * 4 * kChunkThreads;
      x[u] =
          aligned ? load_most<4>(from + i, left(count, i)) : load_few<4>(from + i, left(count, i));
    });
    unrolled<kFours>([&](int u) {
      const std::int64_t i = first + u * 4 * kChunkThreads;
      Pack<T, 4> y;
      for (int j = 0; j < 4; ++j) y.at[j] = converted(x[u].at[j]);
      aligned ? store_most(to + i, y, left(count, i)) : store_few(to + i, y, left(count, i));
    });
  }
  TESSERA_DEVICE static T converted(S x) {
    if constexpr (std::is_same_v<S, T>)
      return x;
    else
      return rounded<T>(x);
  }
  // Of the four elements from i.
  TESSERA_DEVICE static int left(std::int64_t count, std::int64_t i) {
    return count - i >= 4 ? 4 : count > i ? static_cast<int>(count - i) : 0;
  }
};

// Block (x, y): its share of the zeros of entry first + y.
struct Complete {
  CompleteArgs a;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const int i = a.first + t.block_y();
    const FlatSpan e = a.entries[i];
    const bool arrived = (a.arrived >> t.block_y() & 1u) != 0;
    std::byte* const span = a.base + e.offset_bytes;
    zero(t, span + (arrived || !a.zero_missing ? e.used_bytes : 0), span + e.padded_bytes);
    if (t.block() != 0 || (!arrived && !a.zero_missing)) return;
    for (int copy = t.index(); copy < a.copies; copy += t.threads())
      store_number(a.dtype, a.counts + copy * a.counts_stride_bytes, i, {arrived ? 1.0 : 0.0});
  }

 private:
  // 16 bytes at a time between the first and the last multiple of 16; the ends by block 0.
  TESSERA_DEVICE static void zero(Thread& t, std::byte* begin, std::byte* end) {
    const std::int64_t bytes = end - begin;
    std::int64_t head = static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(begin) % 16);
    head = head < bytes ? head : bytes;
    const std::int64_t packs = (bytes - head) / 16;
    for (std::int64_t p = t.global_index(); p < packs; p += t.global_threads())
      store(reinterpret_cast<std::uint64_t*>(begin + head + 16 * p), Pack<std::uint64_t, 2>{});
    if (t.block() != 0 || t.index() >= 16) return;
    if (t.index() < head) begin[t.index()] = std::byte{0};
    if (head + 16 * packs + t.index() < bytes) begin[head + 16 * packs + t.index()] = std::byte{0};
  }
};

}  // namespace

void pack(const PackArgs& a, Exec& exec) {
  const auto queue_from = [&](auto from, auto to) {
    using S = typename decltype(from)::type;
    using T = typename decltype(to)::type;
    launch<kChunkThreads>(
        exec, chunk_grid(a.entry_count), kChunkShared,
        PackBody<S, T>{a.dst, reinterpret_cast<const S*>(a.src), a.entries, a.entry_count});
  };
  const auto queue_words = [&](auto word) { queue_from(word, word); };
  if (a.src_dtype != a.dst_dtype)
    return a.dst_dtype == DType::bf16 ? queue_from(TypeTag<float>{}, TypeTag<BFloat16>{})
                                      : queue_from(TypeTag<float>{}, TypeTag<Float16>{});
  if (size_bytes(a.dst_dtype) == 4) return queue_words(TypeTag<std::uint32_t>{});
  if (size_bytes(a.dst_dtype) == 2) return queue_words(TypeTag<std::uint16_t>{});
  queue_words(TypeTag<std::uint8_t>{});
}

void complete(const CompleteArgs& a, Exec& exec) {
  const std::int32_t entries = std::min(64, a.entry_count - a.first);
  launch<kElementThreads>(exec, Grid{32, entries}, 0, Complete{a});
}

}  // namespace tessera::kernels::cuda
