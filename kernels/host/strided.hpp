// Strided operands as a stream of contiguous blocks. A block that already lies contiguous in the
// wanted dtype is used where it is; otherwise it passes through a small buffer of the thread's
// scratch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/host/convert.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/scratch.hpp"

namespace tessera::kernels::host {

// Elements staged at once: three operands stay in the L1 cache.
inline constexpr std::int64_t kBlock = 512;

// The common shape of an operation; ndim 0 is contiguous.
struct Extent {
  const std::int32_t* shape;
  int ndim;
  std::int64_t count;

  // Long rows are cut into blocks of their own, so that a unit stride is seen; short ones are
  // gathered together.
  bool by_rows() const { return ndim > 0 && shape[ndim - 1] >= 64; }
  std::int64_t row() const { return shape[ndim - 1]; }
};

// Calls f(offset, done, length) for the stretches along the last dimension that make up elements
// [position, position + n).
template <class F>
inline void for_stretches(const Extent& extent, const std::int32_t* strides, std::int64_t position,
                          std::int64_t n, F f) {
  std::int64_t index[8];
  std::int64_t offset = 0, rest = position;
  for (int d = extent.ndim - 1; d >= 0; --d) {
    index[d] = rest % extent.shape[d];
    rest /= extent.shape[d];
    offset += index[d] * strides[d];
  }
  const int last = extent.ndim - 1;
  for (std::int64_t done = 0; done < n;) {
    const std::int64_t length = std::min(n - done, extent.shape[last] - index[last]);
    f(offset, done, length);
    done += length;
    offset += length * strides[last];
    index[last] += length;
    for (int d = last; d > 0 && index[d] == extent.shape[d]; --d) {
      offset += strides[d - 1] - index[d] * std::int64_t{strides[d]};
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

struct Buffer {
  alignas(64) std::byte raw[kBlock * 8];
  alignas(64) std::byte converted[kBlock * 8];
};

struct Staging {
  Buffer out, inputs[3];
};

// One operand of an operation, seen as elements of `compute`.
struct Operand {
  std::byte* base;
  const std::int32_t* strides;
  std::size_t size;  // of a stored element
  Converter
      conversion;  // to the computing type (inputs) or from it (outputs); null where they agree

  static Operand input(const void* base, const std::int32_t* strides, DType stored, DType compute) {
    return {static_cast<std::byte*>(const_cast<void*>(base)), strides, size_bytes(stored),
            stored == compute ? nullptr : converter(compute, stored)};
  }
  static Operand output(void* base, const std::int32_t* strides, DType stored, DType compute) {
    return {static_cast<std::byte*>(base), strides, size_bytes(stored),
            stored == compute ? nullptr : converter(stored, compute)};
  }

  // Where elements [position, position + n) lie contiguous in memory, or null where they do not.
  std::byte* locate(const Extent& extent, std::int64_t position, std::int64_t n) const {
    if (extent.ndim == 0) return base + position * static_cast<std::int64_t>(size);
    if (!extent.by_rows() || strides[extent.ndim - 1] != 1) return nullptr;
    std::byte* at = nullptr;
    for_stretches(extent, strides, position, n,
                  [&](std::int64_t offset, std::int64_t, std::int64_t) {
                    at = base + offset * static_cast<std::int64_t>(size);
                  });
    return at;
  }

  const void* read(const Extent& extent, std::int64_t position, std::int64_t n,
                   Buffer& buffer) const {
    const void* from = locate(extent, position, n);
    if (from == nullptr) {
      for_stretches(extent, strides, position, n,
                    [&](std::int64_t offset, std::int64_t done, std::int64_t run) {
                      gather_strided(buffer.raw + done * static_cast<std::int64_t>(size),
                                     base + offset * static_cast<std::int64_t>(size),
                                     strides[extent.ndim - 1], run, size);
                    });
      from = buffer.raw;
    }
    if (conversion == nullptr) return from;
    conversion(buffer.converted, from, n);
    return buffer.converted;
  }

  // Where to compute the block: in place if it can be stored as it is. `finish` brings it home.
  void* target(std::byte* at, Buffer& buffer) const {
    return at != nullptr && conversion == nullptr ? at : buffer.converted;
  }
  void finish(const Extent& extent, std::int64_t position, std::int64_t n, std::byte* at,
              Buffer& buffer) const {
    const void* from = buffer.converted;
    if (conversion != nullptr) {
      conversion(at != nullptr ? at : buffer.raw, from, n);
      from = buffer.raw;
    }
    if (at != nullptr) return;
    for_stretches(extent, strides, position, n,
                  [&](std::int64_t offset, std::int64_t done, std::int64_t run) {
                    scatter_strided(base + offset * static_cast<std::int64_t>(size),
                                    strides[extent.ndim - 1],
                                    static_cast<const std::byte*>(from) +
                                        done * static_cast<std::int64_t>(size),
                                    run, size);
                  });
  }
};

// Calls f(out block, position, n, three buffers) so that every element of `out` is computed once; f
// reads the inputs itself, through the buffers. `staged` says that an operand is converted or
// gathered, so that blocks must fit their buffers.
template <class F>
inline void for_blocks(Exec& exec, const Extent& extent, const Operand& out, bool staged, F f) {
  for_ranges(exec, extent.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    auto& [buffer, inputs] = in_scratch<Staging>();
    const std::int64_t limit = staged || extent.ndim > 0 ? kBlock : kGrain;
    for (std::int64_t p = begin; p < end;) {
      std::int64_t n = std::min(limit, end - p);
      if (extent.by_rows()) n = std::min(n, extent.row() - p % extent.row());
      std::byte* at = out.locate(extent, p, n);
      void* to = out.target(at, buffer);
      f(to, p, n, inputs);
      if (to != at) out.finish(extent, p, n, at, buffer);
      p += n;
    }
  });
}

}  // namespace tessera::kernels::host
