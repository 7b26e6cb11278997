// Ids are sorted by digits from the lowest on, nine bits a pass, each in two launches: blocks count
// their digits, then place their ids behind those of smaller digits and of earlier blocks. A
// vocabulary of 2^18 takes two passes. Rows are added up by one launch over the pieces and one over
// the ids that several pieces share; no sum has an order of chance.
// Source: Satish, Harris and Garland, "Designing efficient sorting algorithms for manycore GPUs",
// 2009.
#include "kernels/rows_by_id.hpp"

#include <algorithm>
#include <bit>

#include "kernels/cuda/indexed.hpp"
#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {
namespace {

// ---- the order of the ids

constexpr int kDigits = 1 << kDigitBits, kSorters = kDigits;  // a thread for each digit
constexpr int kSorterWarps = kSorters / kWarp;
constexpr int kTurns = static_cast<int>(kIdsOfBlock) / kSorters;

struct Placed {
  std::uint32_t key, position;
};

// The first pass reads the ids, the last one writes the order.
template <bool kPlaces>
struct OrderPass {
  indexed::Ids ids;
  const Placed* from;
  Placed* to;
  std::int32_t* order;
  std::uint32_t* counts;  // [blocks, digits]
  std::int64_t count, n;
  int shift;

  // The ids of all turns, and beyond the end the last one: their loads start together.
  TESSERA_DEVICE void get(std::int64_t first, Placed (&some)[kTurns]) const {
    std::uint32_t position[kTurns];
    for (int k = 0; k < kTurns; ++k)
      position[k] =
          static_cast<std::uint32_t>(first + k * kWarp < count ? first + k * kWarp : count - 1);
    if (from != nullptr) {
      for (int k = 0; k < kTurns; ++k) some[k] = from[position[k]];
    } else {
      std::int64_t id[kTurns];
      if (ids.wide)
        for (int k = 0; k < kTurns; ++k)
          id[k] = static_cast<const std::int64_t*>(ids.data)[position[k]];
      else
        for (int k = 0; k < kTurns; ++k)
          id[k] = static_cast<const std::int32_t*>(ids.data)[position[k]];
      for (int k = 0; k < kTurns; ++k)
        some[k] = {static_cast<std::uint32_t>(id[k] >= 0 && id[k] < n ? id[k] : n), position[k]};
    }
  }
  TESSERA_DEVICE void put(std::uint32_t at, const Placed& x) const {
    if (order != nullptr)
      order[at] = static_cast<std::int32_t>(x.position);
    else
      to[at] = x;
  }

  TESSERA_DEVICE void operator()(Thread& t) const {
    auto* seen = t.shared<std::uint32_t>();  // [warps, digits]
    for (int i = t.index(); i < kSorterWarps * kDigits; i += kSorters) seen[i] = 0;
    t.sync();
    std::uint32_t* mine = seen + t.warp() * kDigits;
    const std::int64_t first = (t.block() * kSorterWarps + t.warp()) * kTurns * kWarp + t.lane();
    Placed some[kTurns];
    std::uint32_t rank[kTurns];  // among this digit's of the warp
    get(first, some);
    unrolled<kTurns>([&](int turn) {
      const bool live = first + turn * kWarp < count;
      const std::uint32_t digit = digit_of(some[turn]);
      unsigned alike = t.ballot(live);
      for (int bit = 0; bit < kDigitBits; ++bit) {
        const bool is_set = (digit >> bit & 1u) != 0;
        const unsigned set = t.ballot(is_set);
        alike &= is_set ? set : ~set;
      }
      const auto before = static_cast<std::uint32_t>(std::popcount(alike & ((1u << t.lane()) - 1)));
      rank[turn] = mine[digit] + before;
      t.sync_warp();
      if (live && before == 0) mine[digit] += static_cast<std::uint32_t>(std::popcount(alike));
      t.sync_warp();
    });
    t.sync();
    if constexpr (kPlaces) {
      begin_digits(t, seen);
      unrolled<kTurns>([&](int turn) {
        if (first + turn * kWarp < count) put(mine[digit_of(some[turn])] + rank[turn], some[turn]);
      });
    } else {
      std::uint32_t all = 0;
      for (int w = 0; w < kSorterWarps; ++w) all += seen[w * kDigits + t.index()];
      counts[t.block() * kDigits + t.index()] = all;
    }
  }
  TESSERA_DEVICE std::uint32_t digit_of(const Placed& x) const {
    return x.key >> shift & (kDigits - 1);
  }

  // From how many of each digit a warp has to where its first one goes.
  TESSERA_DEVICE void begin_digits(Thread& t, std::uint32_t* seen) const {
    std::uint32_t earlier = 0, all = 0;  // of this thread's digit: of earlier blocks, of all
    for (std::int64_t block = 0; block < t.blocks(); ++block) {
      const std::uint32_t of_block = counts[block * kDigits + t.index()];
      if (block < t.block()) earlier += of_block;
      all += of_block;
    }
    std::uint32_t sum =
        all;  // of the digits up to this one: of a warp's first, then of the block's
    for (int apart = 1; apart < kWarp; apart *= 2) {
      const std::uint32_t below = t.shuffle(sum, (t.lane() - apart) & (kWarp - 1));
      if (t.lane() >= apart) sum += below;
    }
    std::uint32_t* sums = seen + kSorterWarps * kDigits;
    if (t.lane() == kWarp - 1) sums[t.warp()] = sum;
    t.sync();
    for (int w = 0; w < t.warp(); ++w) sum += sums[w];
    std::uint32_t begin = sum - all + earlier;
    for (int w = 0; w < kSorterWarps; ++w) {
      std::uint32_t& of_warp = seen[w * kDigits + t.index()];
      const std::uint32_t count_of_warp = of_warp;
      of_warp = begin;
      begin += count_of_warp;
    }
    t.sync();
  }
};

// ---- sums of rows

constexpr int kAdders = 128;
constexpr int kPart = 8;                // columns of a thread: whole packs of every type
constexpr int kCols = kAdders * kPart;  // of a block
constexpr int kRows = static_cast<int>(kRowsOfPiece);

// Calls f with a value of the element type, which is computed in C: float, double, or int64.
template <class C, class F>
TESSERA_DEVICE void with_type(DType dtype, F f) {
  if constexpr (std::is_integral_v<C>) {
    if (dtype == DType::i32) f(std::int32_t{});
    if (dtype == DType::i64) f(std::int64_t{});
  } else {
    if (dtype == DType::f32) f(float{});
    if (dtype == DType::bf16) f(BFloat16{});
    if (dtype == DType::f16) f(Float16{});
    if constexpr (sizeof(C) == 8)
      if (dtype == DType::f64) f(double{});
  }
}

// Sums of kPart neighbouring columns.
template <class C>
struct Part {
  C at[kPart] = {};

  TESSERA_DEVICE void add(const Part& x) {
    for (int i = 0; i < kPart; ++i)
      if constexpr (std::is_integral_v<C>)
        at[i] =
            static_cast<C>(static_cast<std::uint64_t>(at[i]) + static_cast<std::uint64_t>(x.at[i]));
      else
        at[i] += x.at[i];
  }
};

// The same as they lie in memory, in elements up to the size of C.
template <class C>
struct PackedPart {
  static constexpr int kPacks = kPart * static_cast<int>(sizeof(C)) / 16;
  Pack<std::uint32_t, 4> packs[kPacks];
};

// kWhole: parts can be read and written in packs.
template <class C, bool kWhole>
struct Sums {
  indexed::Rows r;
  const std::int32_t* order;
  C* of_pieces;  // [outer, pieces, cols]: of the id that began before the piece
  std::int64_t pieces;
  C scale;
  DType from, to;
  static constexpr DType kSumType = dtype_of<C>();

  template <class T>
  TESSERA_DEVICE static C widened(const T& x) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<C>(x);
    else
      return load_as_compute(x);
  }
  template <class T>
  TESSERA_DEVICE static T narrowed(C x) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(x);
    else
      return rounded<T>(static_cast<Compute<T>>(x));
  }

  // The columns from `column` on of a row of `base`, 0 beyond the last. Packs are looked into
  // later, so that others are on their way with them.
  using Columns = std::conditional_t<kWhole, PackedPart<C>, Part<C>>;
  TESSERA_DEVICE Columns read(const void* base, DType dtype, std::int64_t row,
                              std::int64_t column) const {
    Columns out;
    const std::int64_t first = row * r.cols + column;
    if constexpr (kWhole) {
      int size = 0;  // of an element
      with_type<C>(dtype, [&](auto tag) { size = static_cast<int>(sizeof tag); });
      const auto* at = static_cast<const std::byte*>(base) + first * size;
      for (int k = 0; k < Columns::kPacks; ++k)
        if (k == 0 || 16 * k < kPart * size)
          out.packs[k] = load_held<4>(reinterpret_cast<const std::uint32_t*>(at + 16 * k));
    } else {
      with_type<C>(dtype, [&](auto tag) {
        const auto* at = static_cast<const decltype(tag)*>(base) + first;
        for (int i = 0; i < kPart; ++i)
          if (column + i < r.cols) out.at[i] = widened(at[i]);
      });
    }
    return out;
  }
  TESSERA_DEVICE static const Part<C>& widened(const Part<C>& x, DType) { return x; }
  TESSERA_DEVICE static Part<C> widened(const PackedPart<C>& x, DType dtype) {
    Part<C> out;
    with_type<C>(dtype, [&](auto tag) {
      using T = decltype(tag);
      for (int i = 0; i < kPart; ++i)
        out.at[i] = widened(element_of<T>(x.packs[i / kPack<T>].at, i % kPack<T>));
    });
    return out;
  }
  TESSERA_DEVICE void write(void* base, DType dtype, std::int64_t row, std::int64_t column,
                            const Part<C>& x) const {
    with_type<C>(dtype, [&](auto tag) {
      using T = decltype(tag);
      T* at = static_cast<T*>(base) + row * r.cols + column;
      if constexpr (kWhole) {
        constexpr int n = kPack<T>;
        for (int k = 0; k < kPart; k += n) {
          Pack<T, n> pack;
          for (int i = 0; i < n; ++i) pack.at[i] = narrowed<T>(x.at[k + i]);
          store_whole(at + k, &pack);
        }
      } else {
        for (int i = 0; i < kPart && column + i < r.cols; ++i) at[i] = narrowed<T>(x.at[i]);
      }
    });
  }

  TESSERA_DEVICE std::int64_t id_at(std::int64_t position) const { return r.ids[order[position]]; }
  TESSERA_DEVICE bool exists(std::int64_t id) const { return id >= 0 && id < r.n; }

  TESSERA_DEVICE Columns read_table(std::int64_t row, std::int64_t column) const {
    return read(r.table, to, row, column);
  }
  // The table's row, which has `held`, gets scale * x more.
  TESSERA_DEVICE void add_to_table(std::int64_t row, std::int64_t column, Part<C> x,
                                   const Columns& held) const {
    if constexpr (!std::is_integral_v<C>)
      for (int i = 0; i < kPart; ++i) x.at[i] *= scale;
    x.add(widened(held, to));
    write(r.table, to, row, column, x);
  }
};

template <class C, bool kWhole>
struct AddPieces {
  static constexpr int kAtOnce = 16 / sizeof(C);  // rows on their way
  Sums<C, kWhole> s;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const indexed::Rows& r = s.r;
    const std::int64_t o = t.block() / s.pieces, piece = t.block() - o * s.pieces;
    const std::int64_t begin = piece * kRows;
    const int rows = static_cast<int>(r.count - begin < kRows ? r.count - begin : kRows);
    auto* ids = t.shared<std::int64_t>();
    auto* positions = t.shared<std::int32_t>(kRows * sizeof(std::int64_t));
    for (int i = t.index(); i < rows; i += kAdders) {
      positions[i] = s.order[begin + i];
      ids[i] = r.ids[positions[i]];
    }
    t.sync();
    const std::int64_t column = t.block_y() * std::int64_t{kCols} + t.index() * kPart;
    if (column >= r.cols) return;
    const std::int64_t before = begin > 0 ? s.id_at(begin - 1) : -1;
    // Rows of a few positions, and those of the table that they are added to, are on their way
    // together: within a piece an id is added once.
    Part<C> sum;
    for (int i = 0; i < rows; i += kAtOnce) {
      typename Sums<C, kWhole>::Columns x[kAtOnce], held[kAtOnce];
      const auto exists = [&](int k) { return i + k < rows && s.exists(ids[i + k]); };
      const auto ends = [&](int k) { return i + k + 1 == rows || ids[i + k + 1] != ids[i + k]; };
      unrolled<kAtOnce>([&](int k) {
        if (!exists(k)) return;
        x[k] = s.read(r.rows, s.from, o * r.count + positions[i + k], column);
        if (ends(k) && ids[i + k] != before) held[k] = s.read_table(o * r.n + ids[i + k], column);
      });
      unrolled<kAtOnce>([&](int k) {
        if (!exists(k)) return;
        sum.add(s.widened(x[k], s.from));
        if (!ends(k)) return;
        if (ids[i + k] == before)
          s.write(s.of_pieces, s.kSumType, t.block(), column, sum);
        else
          s.add_to_table(o * r.n + ids[i + k], column, sum, held[k]);
        sum = {};
      });
    }
  }
};

// The block of the piece in which an id begins adds what later ones have of it.
template <class C, bool kWhole>
struct AddRest {
  static constexpr int kAtOnce = 16 / sizeof(C);  // rows on their way
  static constexpr int kBlocks = 4;               // without, sums of integers spill
  Sums<C, kWhole> s;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const indexed::Rows& r = s.r;
    const std::int64_t o = t.block() / s.pieces, piece = t.block() - o * s.pieces;
    const std::int64_t begin = piece * kRows, end = begin + kRows;
    if (end >= r.count) return;
    const std::int64_t id = s.id_at(end);
    const auto has = [&](std::int64_t position) { return s.id_at(position) == id; };
    if (!s.exists(id) || !has(end - 1) || (begin > 0 && has(begin - 1))) return;
    std::int64_t last = piece + 1;  // the first piece that begins with another id
    for (unsigned more = ~0u; more == ~0u; last += std::popcount(more))
      more = t.ballot(last + t.lane() < s.pieces && has((last + t.lane()) * kRows));
    const std::int64_t column = t.block_y() * std::int64_t{kCols} + t.index() * kPart;
    if (column >= r.cols) return;
    Part<C> sum;
    for (std::int64_t p = piece + 1; p < last; p += kAtOnce) {
      typename Sums<C, kWhole>::Columns x[kAtOnce];
      unrolled<kAtOnce>([&](int k) {
        if (p + k < last) x[k] = s.read(s.of_pieces, s.kSumType, o * s.pieces + p + k, column);
      });
      unrolled<kAtOnce>([&](int k) {
        if (p + k < last) sum.add(s.widened(x[k], s.kSumType));
      });
    }
    s.add_to_table(o * r.n + id, column, sum, s.read_table(o * r.n + id, column));
  }
};

template <class C, bool kWhole>
void launch_sums(const Sums<C, kWhole>& sums, Exec& exec) {
  const Grid grid{sums.r.outer * sums.pieces, blocks_for(sums.r.cols, kCols)};
  launch<kAdders>(exec, grid, kRows * (sizeof(std::int64_t) + sizeof(std::int32_t)),
                  AddPieces<C, kWhole>{sums});
  if (sums.pieces > 1) launch<kAdders>(exec, grid, 0, AddRest<C, kWhole>{sums});
}

template <class C>
void add_rows_in(const indexed::Rows& rows, const std::int32_t* order, void* workspace, DType from,
                 DType to, double scale, Exec& exec) {
  auto* of_pieces = static_cast<C*>(workspace);
  const std::int64_t pieces = pieces_of(rows.count);
  const C factor = static_cast<C>(scale);
  if (rows.cols % kPart == 0 &&
      are_aligned(static_cast<char*>(rows.rows), static_cast<char*>(rows.table)))
    launch_sums(Sums<C, true>{rows, order, of_pieces, pieces, factor, from, to}, exec);
  else
    launch_sums(Sums<C, false>{rows, order, of_pieces, pieces, factor, from, to}, exec);
}

}  // namespace

void order_by_id(const OrderByIdArgs& a, Exec& exec) {
  if (a.count == 0) return;
  if (std::max(a.count, a.n) > 0x7fffffff) {
    exec.error = "2^31 ids or rows, or more, have no CUDA kernel; add them in parts or on the CPU";
    return;
  }
  auto* to = static_cast<Placed*>(a.workspace);
  Placed* other = to + a.count;
  OrderPass<false> pass{indexed::ids_of(a.ids, a.id_dtype),
                        nullptr,
                        nullptr,
                        nullptr,
                        reinterpret_cast<std::uint32_t*>(other + a.count),
                        a.count,
                        a.n,
                        0};
  const Grid blocks{blocks_of_ids(a.count)};
  constexpr std::size_t seen = sizeof(std::uint32_t) * kSorterWarps * kDigits,
                        sums = sizeof(std::uint32_t) * kSorterWarps;
  const int bits = std::bit_width(static_cast<std::uint64_t>(a.n));  // of n, for ids outside, too
  do {
    const bool is_last = pass.shift + kDigitBits >= bits;
    launch<kSorters>(exec, blocks, seen, pass);
    launch<kSorters>(exec, blocks, seen + sums,
                     OrderPass<true>{pass.ids, pass.from, to, is_last ? a.order : nullptr,
                                     pass.counts, pass.count, pass.n, pass.shift});
    pass.from = to;
    std::swap(to, other);
    pass.shift += static_cast<int>(kDigitBits);
  } while (pass.shift < bits);
}

void indexed::add_rows(const Rows& rows, const std::int32_t* order, void* workspace, DType from,
                       DType to, double scale, Exec& exec) {
  if (!is_floating(to))
    add_rows_in<std::int64_t>(rows, order, workspace, from, to, scale, exec);
  else if (from == DType::f64 || to == DType::f64)
    add_rows_in<double>(rows, order, workspace, from, to, scale, exec);
  else
    add_rows_in<float>(rows, order, workspace, from, to, scale, exec);
}

}  // namespace tessera::kernels::cuda
