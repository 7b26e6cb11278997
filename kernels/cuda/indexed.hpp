// Rows by id, copied, and added in order: what embedding and index share. A table is
// [outer, n, cols], ids are [count], rows [outer, count, cols].
//
// The sum of a table's row is one block's, so that no order is left to chance: the block of the
// first occurrence of an id owns the row, adds that and all later ones as they come, and the blocks
// of the later ones end at once. Each block reads the ids around its own: at 64 Ki ids 2^32 reads
// of 4 bytes in all, from the caches, 256 a time: 2^27 turns of a warp at some ten instructions,
// 2 ms on 132 multiprocessors, where the rows themselves are 0.5 GB at 4,096 columns of bf16.
#pragma once

#include <algorithm>

#include "kernels/cuda/vector.hpp"

namespace tessera::kernels::cuda::indexed {

inline constexpr int kThreads = 256;

// Ids as i32 or i64.
struct Ids {
  const void* data;
  bool wide;

  TESSERA_DEVICE std::int64_t operator[](std::int64_t i) const {
    return wide ? static_cast<const std::int64_t*>(data)[i]
                : static_cast<const std::int32_t*>(data)[i];
  }
};
inline Ids ids_of(const void* data, DType dtype) { return {data, dtype == DType::i64}; }

struct Rows {
  void* rows;
  void* table;
  Ids ids;
  std::int64_t outer, n, count, cols;
};

// What an id outside the table reads: NaN, 0 for integers; eight bytes of it.
inline std::uint64_t missing_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 0x7ff8000000000000;
    case DType::f32:
      return 0x7fc000007fc00000;
    case DType::bf16:
      return 0x7fc07fc07fc07fc0;
    case DType::f16:
      return 0x7e007e007e007e00;
    default:
      return 0;
  }
}
template <class U>
TESSERA_DEVICE U unit_of(std::uint64_t bits) {
  if constexpr (sizeof(U) == 16)
    return {bits, bits};
  else
    return static_cast<U>(bits);
}
using Unit16 = Pack<std::uint64_t, 2>;

// rows[o, j, :] = table[o, ids[j], :], `units` of U a row. Where `leaves_elsewhere`, an id of -1
// leaves its row as it is.
template <class U>
struct CopyRows {
  Rows r;
  std::uint64_t missing;
  unsigned units, rows_at_once;  // of a block
  bool leaves_elsewhere;

  TESSERA_DEVICE void operator()(Thread& t) const {
    constexpr int kAtOnce = 4;  // loads in flight
    const std::int64_t first = t.block() * rows_at_once, all = r.outer * r.count;
    const auto mine =
        static_cast<unsigned>(first + rows_at_once <= all ? rows_at_once : all - first);
    for (unsigned base = static_cast<unsigned>(t.index()); base < mine * units;
         base += kAtOnce * kThreads) {
      U values[kAtOnce];
      for (int k = 0; k < kAtOnce; ++k) {
        const unsigned e = base + static_cast<unsigned>(k) * kThreads;
        if (e >= mine * units) continue;
        const std::int64_t row = first + e / units, o = r.outer == 1 ? 0 : row / r.count;
        const std::int64_t id = r.ids[row - o * r.count];
        values[k] = id >= 0 && id < r.n
                        ? static_cast<const U*>(r.table)[(o * r.n + id) * units + e % units]
                        : unit_of<U>(missing);
      }
      for (int k = 0; k < kAtOnce; ++k) {
        const unsigned e = base + static_cast<unsigned>(k) * kThreads;
        if (e < mine * units && !is_left(first + e / units))
          static_cast<U*>(r.rows)[first * units + e] = values[k];
      }
    }
  }

  // The id is read again: to remember which it was takes registers that loads in flight need.
  TESSERA_DEVICE bool is_left(std::int64_t row) const {
    return leaves_elsewhere && r.ids[r.outer == 1 ? row : row % r.count] == -1;
  }
};

template <class U>
void copy_units(const Rows& rows, std::uint64_t missing, std::int64_t units, bool leaves_elsewhere,
                Exec& exec) {
  const auto per_row = static_cast<unsigned>(units);
  const unsigned at_once = std::max(1u, 4 * kThreads / per_row);
  launch<kThreads>(exec, {blocks_for(rows.outer * rows.count, at_once)}, 0,
                   CopyRows<U>{rows, missing, per_row, at_once, leaves_elsewhere});
}

// Calls f(unit, units of a row) with the widest access that fits rows of `cols` elements.
template <class F>
void with_unit(DType dtype, std::int64_t cols, bool aligned, F f) {
  const auto size = static_cast<std::int64_t>(size_bytes(dtype));
  if (aligned && cols * size % 16 == 0) return f(Unit16{}, cols * size / 16);
  if (size == 8) return f(std::uint64_t{}, cols);
  if (size == 4) return f(std::uint32_t{}, cols);
  if (size == 2) return f(std::uint16_t{}, cols);
  f(std::uint8_t{}, cols);
}

inline void copy_rows(const Rows& rows, DType dtype, Exec& exec, bool leaves_elsewhere = false) {
  if (rows.cols == 0) return;
  with_unit(dtype, rows.cols,
            are_aligned(static_cast<char*>(rows.rows), static_cast<char*>(rows.table)),
            [&](auto unit, std::int64_t units) {
              copy_units<decltype(unit)>(rows, missing_of(dtype), units, leaves_elsewhere, exec);
            });
}

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

// table[o, ids[j], :] += scale * rows[o, j, :] in the order of j, rounded to the table's dtype at
// each addition.
template <class C>
struct AddRows {
  static constexpr int kPart = 4, kParts = 4;                       // of a thread: parts of columns
  static constexpr std::int64_t kCols = kThreads * kPart * kParts;  // of a block
  static constexpr int kTurns = 8;  // ids of a thread between barriers
  static constexpr int kWarps = kThreads / kWarp;

  Rows r;
  C scale;
  DType from, to;
  bool by_parts;  // four elements can be read and written at once

  TESSERA_DEVICE static C widened(std::int64_t x) { return static_cast<C>(x); }
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
  template <class T>
  TESSERA_DEVICE C sum_of(C held, C x) const {
    C sum;
    if constexpr (std::is_integral_v<C>)
      sum = static_cast<C>(static_cast<std::uint64_t>(held) + static_cast<std::uint64_t>(x));
    else if constexpr (sizeof(C) == 4)
      sum = fmaf(scale, x, held);
    else
      sum = fma(scale, x, held);
    return widened(narrowed<T>(sum));
  }

  // The four elements from `column` on, 0 beyond the last.
  template <class T>
  TESSERA_DEVICE void read(C (&out)[kPart], const void* base, std::int64_t row,
                           std::int64_t column) const {
    const T* at = static_cast<const T*>(base) + row * r.cols + column;
    constexpr int n = kPack<T> < kPart ? kPack<T> : kPart;
    if (by_parts) {
      for (int k = 0; k < kPart; k += n) {
        const auto pack = load<n>(at + k);
        for (int i = 0; i < n; ++i) out[k + i] = widened(pack.at[i]);
      }
    } else {
      for (int i = 0; i < kPart; ++i) out[i] = column + i < r.cols ? widened(at[i]) : C(0);
    }
  }
  template <class T>
  TESSERA_DEVICE void write(const C (&in)[kPart], std::int64_t row, std::int64_t column) const {
    T* at = static_cast<T*>(r.table) + row * r.cols + column;
    constexpr int n = kPack<T> < kPart ? kPack<T> : kPart;
    if (by_parts) {
      for (int k = 0; k < kPart; k += n) {
        Pack<T, n> pack;
        for (int i = 0; i < n; ++i) pack.at[i] = narrowed<T>(in[k + i]);
        store(at + k, pack);
      }
    } else {
      for (int i = 0; i < kPart && column + i < r.cols; ++i) at[i] = narrowed<T>(in[i]);
    }
  }

  // masks[turn kWarps + warp]: which of the ids from `base` on are `id`.
  TESSERA_DEVICE void find(Thread& t, unsigned* masks, std::int64_t id, std::int64_t base,
                           std::int64_t end) const {
    t.sync();
    for (int turn = 0; turn < kTurns; ++turn) {
      const std::int64_t j = base + turn * kThreads + t.index();
      const unsigned found = t.ballot(j < end && r.ids[j] == id);
      if (t.lane() == 0) masks[turn * kWarps + t.warp()] = found;
    }
    t.sync();
  }

  TESSERA_DEVICE void operator()(Thread& t) const {
    constexpr std::int64_t kIds = kTurns * kThreads;
    unsigned* masks = t.shared<unsigned>();
    const std::int64_t o = t.block() / r.count, i = t.block() - o * r.count, id = r.ids[i];
    if (id < 0 || id >= r.n) return;
    for (std::int64_t base = 0; base < i; base += kIds) {
      find(t, masks, id, base, i);
      unsigned any = 0;
      for (int m = 0; m < kTurns * kWarps; ++m) any |= masks[m];
      if (any) return;  // an earlier one owns the row
    }
    const std::int64_t column = t.block_y() * kCols + t.index() * kPart, row = o * r.n + id;
    C sums[kParts][kPart];
    with_type<C>(to, [&](auto tag) {
      using T = decltype(tag);
      for (int p = 0; p < kParts; ++p)
        if (column + p * kThreads * kPart < r.cols)
          read<T>(sums[p], r.table, row, column + p * kThreads * kPart);
      for (std::int64_t base = i; base < r.count; base += kIds) {
        find(t, masks, id, base, r.count);
        for (int m = 0; m < kTurns * kWarps; ++m)
          for (unsigned mask = masks[m], bit = 0; mask != 0; mask >>= 1, ++bit)
            if (mask & 1u) add<T>(sums, o * r.count + base + m * kWarp + bit, column);
      }
      for (int p = 0; p < kParts; ++p)
        if (column + p * kThreads * kPart < r.cols)
          write<T>(sums[p], row, column + p * kThreads * kPart);
    });
  }

  template <class T>
  TESSERA_DEVICE void add(C (&sums)[kParts][kPart], std::int64_t row, std::int64_t column) const {
    with_type<C>(from, [&](auto tag) {
      for (int p = 0; p < kParts; ++p) {
        if (column + p * kThreads * kPart >= r.cols) continue;
        C x[kPart];
        read<decltype(tag)>(x, r.rows, row, column + p * kThreads * kPart);
        for (int k = 0; k < kPart; ++k) sums[p][k] = sum_of<T>(sums[p][k], x[k]);
      }
    });
  }
};

template <class C>
void add_rows(const Rows& rows, DType from, DType to, C scale, Exec& exec) {
  using Add = AddRows<C>;
  const bool by_parts = rows.cols % Add::kPart == 0 &&
                        are_aligned(static_cast<char*>(rows.rows), static_cast<char*>(rows.table));
  launch<kThreads>(exec, {rows.outer * rows.count, blocks_for(rows.cols, Add::kCols)},
                   sizeof(unsigned) * Add::kTurns * Add::kWarps,
                   Add{rows, scale, from, to, by_parts});
}

}  // namespace tessera::kernels::cuda::indexed
