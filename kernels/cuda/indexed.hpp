// Rows by id, copied, and added in order: what embedding and index share. A table is
// [outer, n, cols], ids are [count], rows [outer, count, cols].
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

// table[o, ids[j], :] += scale * rows[o, j, :], as rows_by_id.hpp says; `order` is order_by_id's of
// the ids. Integers take no scale.
void add_rows(const Rows& rows, const std::int32_t* order, void* workspace, DType from, DType to,
              double scale, Exec& exec);

}  // namespace tessera::kernels::cuda::indexed
