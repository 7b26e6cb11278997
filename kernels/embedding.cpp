#include "kernels/embedding.hpp"

#include <cmath>
#include <cstring>

#include "kernels/host/convert.hpp"
#include "kernels/host/cpu.hpp"
#include "kernels/host/math.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/rows.hpp"

#include "kernels/formulas.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

// Columns of a task of the gradient: tasks never share an element.
constexpr std::int64_t kColumnsAtOnce = 128;

std::int64_t id_at(const void* ids, DType dtype, std::int64_t i) {
  return dtype == DType::i32 ? static_cast<const std::int32_t*>(ids)[i]
                             : static_cast<const std::int64_t*>(ids)[i];
}

template <class T, class G>
void add_columns(const EmbeddingBackwardArgs& a, std::int64_t first, std::int64_t cols) {
  using C =
      std::conditional_t<std::is_same_v<T, double> || std::is_same_v<G, double>, double, float>;
  const std::int64_t vocab = a.vocab;
  const T* dy = static_cast<const T*>(a.dy) + first;
  G* out = static_cast<G*>(a.d_table) + first;
  for (std::int64_t i = 0; i < a.count; ++i, dy += a.cols) {
    const std::int64_t id = id_at(a.ids, a.id_dtype, i);
    if (id < 0 || id >= vocab) continue;
    G* row = out + id * a.cols;
    if constexpr (std::is_same_v<Compute<T>, C> && std::is_same_v<Compute<G>, C>) {
      const Vec<C> scale(static_cast<C>(a.scale));
      map(row, cols, [scale](Vec<C> old, Vec<C> g) { return fma(scale, g, old); }, row, dy);
    } else {
      for (std::int64_t c = 0; c < cols; ++c)
        row[c] =
            G(static_cast<Compute<G>>(static_cast<C>(row[c]) + a.scale * static_cast<C>(dy[c])));
    }
  }
}

}  // namespace

void embedding(const EmbeddingArgs& a, Exec& exec) {
  if (a.cols == 0) return;
  const std::size_t size = size_bytes(a.dtype), row_bytes = static_cast<std::size_t>(a.cols) * size;
  alignas(8) std::byte missing[8] = {};
  const double nan = NAN;
  if (is_floating(a.dtype)) converter(a.dtype, DType::f64)(missing, &nan, 1);
  for_ranges(exec, a.count, row_grain(a.cols), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t id = id_at(a.ids, a.id_dtype, i);
      if (a.is_part && id == -1) continue;
      std::byte* out = static_cast<std::byte*>(a.out) + static_cast<std::size_t>(i) * row_bytes;
      if (id < 0 || id >= a.vocab)
        gather_strided(out, missing, 0, a.cols, size);
      else
        std::memcpy(
            out, static_cast<const std::byte*>(a.table) + static_cast<std::size_t>(id) * row_bytes,
            row_bytes);
    }
  });
}

void locate(const LocateArgs& a, Exec& exec) {
  const std::int64_t parts = std::int64_t{a.slices} * a.parts;
  for_ranges(exec, a.count, row_grain(parts), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) locate_one(a, i, id_at(a.ids, a.id_dtype, i));
  });
}

void embedding_backward(const EmbeddingBackwardArgs& a, Exec& exec) {
  if (a.cols == 0) return;
  if (!a.accumulate) {
    const std::size_t row_bytes = static_cast<std::size_t>(a.cols) * size_bytes(a.grad_dtype);
    for_ranges(exec, a.vocab, row_grain(a.cols), [&](std::int64_t begin, std::int64_t end) {
      std::memset(static_cast<std::byte*>(a.d_table) + static_cast<std::size_t>(begin) * row_bytes,
                  0, static_cast<std::size_t>(end - begin) * row_bytes);
    });
  }
  visit_floating(a.dtype, [&](auto dy_tag) {
    visit_floating(a.grad_dtype, [&](auto grad_tag) {
      for_ranges(exec, a.cols, kColumnsAtOnce, [&](std::int64_t begin, std::int64_t end) {
        add_columns<typename decltype(dy_tag)::type, typename decltype(grad_tag)::type>(
            a, begin, end - begin);
      });
    });
  });
}

}  // namespace tessera::kernels::cpu
