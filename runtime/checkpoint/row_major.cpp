#include "runtime/checkpoint/row_major.hpp"

#include "runtime/checkpoint/box.hpp"

namespace tessera::checkpoint {

void copy_row_major(std::span<std::byte> out, const Tensor& of, std::int64_t first) {
  const auto bytes = static_cast<std::int64_t>(size_bytes(of.dtype()));
  const std::int64_t count = std::ssize(out) / bytes;
  if (of.is_contiguous()) return of.view({count}, {1}, first).to_bytes(out);
  const Sizes sizes(of.shape().begin(), of.shape().end()),
      strides(of.strides().begin(), of.strides().end());
  for (const Box& box : boxes_of_run(sizes, first, first + count)) {
    const std::span<std::byte> own =
        out.first(static_cast<std::size_t>(numel_of(box.sizes) * bytes));
    of.view(Shape(std::span(box.sizes)), of.strides(), element_of(box.begin, strides))
        .to_bytes(own);
    out = out.subspan(own.size());
  }
}

}  // namespace tessera::checkpoint
