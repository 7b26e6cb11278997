#include "runtime/checkpoint/rank_file.hpp"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "runtime/checkpoint/finite.hpp"
#include "runtime/checkpoint/new_folder.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::checkpoint {
namespace {

// h(begin) - h(end) of Note [Why sums tell a cover], for a tensor of a file.
class Ends {
 public:
  Ends(const std::string& name, DType dtype, const Sizes& shape, std::size_t dim)
      : of_(fnv1a(concat(name, ' ', dtype, ' ', text_of(shape), ' ', dim))) {}
  std::uint64_t of(std::int64_t begin, std::int64_t end) const { return at(begin) - at(end); }

 private:
  std::uint64_t at(std::int64_t row) const {
    const std::uint64_t key[] = {of_, static_cast<std::uint64_t>(row)};
    return checksum_of(key, sizeof key);
  }
  std::uint64_t of_;
};

// This rank's boxes of a tensor: its rows, of which copies take equal shares.
void add_boxes(RankFile& file, const PartTensor& tensor) {
  const ShardSpec& spec = tensor.state.spec;
  const Tensor& values = tensor.state.values;
  const bool is_first = tensor.copy == 0 && spec.rank == 0;
  const bool is_own = tensor.copies == 1 && spec.world == 1;
  // Lists a tensor of a file, of which this rank writes the rows from `begin` to `end`.
  const auto list = [&](const std::string& name, const Sizes& shape, std::size_t dim,
                        std::int64_t rows, std::int64_t begin, std::int64_t end) {
    const Ends ends(name, values.dtype(), shape, dim);
    file.wanted += ends.of(0, rows);
    if (is_own) file.own += ends.of(0, rows);
    file.written += ends.of(begin, end);
  };
  const auto add = [&](const std::string& name, Sizes shape, Box box,
                       const std::function<Tensor()>& make) {
    std::function<Tensor()> made = make;
    if (tensor.is_transposed) {
      for (Sizes* const sizes : {&shape, &box.begin, &box.sizes})
        std::swap(sizes->at(0), sizes->at(1));
      made = [make] { return raw::transpose(make(), 0, 1); };
    }
    file.boxes.push_back({.entry = {.name = name, .dtype = values.dtype(), .shape = box.sizes},
                          .info = {.begin = box.begin, .shape = shape},
                          .values = std::move(made)});
  };
  if (spec.shape.ndim() == 0) {
    list(tensor.names[0].name, {}, 0, 1, 0, is_first ? 1 : 0);
    if (is_first) add(tensor.names[0].name, {}, {}, [values] { return values; });
    return;
  }
  const RowRange owned = spec.owned();
  const RowRange own{owned.begin + owned.size() * tensor.copy / tensor.copies,
                     owned.begin + owned.size() * (tensor.copy + 1) / tensor.copies};
  std::int64_t begin = 0;
  for (const auto& [name, rows] : tensor.names) {
    const RowRange part{begin, begin + rows};
    begin = part.end;
    Box box{Sizes(spec.shape.ndim(), 0), {spec.shape.begin(), spec.shape.end()}};
    box.sizes[0] = rows;
    const Sizes shape = box.sizes;
    const auto dim = static_cast<std::size_t>(spec.dim);
    const RowRange here = dim == 0 ? within(part, own) : own;
    box.begin[dim] = here.begin;
    box.sizes[dim] = here.size();
    const bool is_empty = std::ranges::find(shape, 0) != shape.end();
    if (is_empty)
      list(name, shape, dim, 1, 0, is_first ? 1 : 0);
    else
      list(name, shape, dim, shape[dim], here.begin, here.end);
    if (is_empty) box = {Sizes(shape.size(), 0), shape};
    if (is_empty ? !is_first : numel_of(box.sizes) == 0) continue;
    const std::int64_t first = (dim == 0 ? part.begin + here.begin : own.begin) - owned.begin;
    add(name, shape, box, [=, d = spec.dim] {
      if (is_empty) return values;
      const Tensor slice = raw::slice(values, d, first, first + here.size());
      return d == 0 ? slice : raw::slice(slice, 0, part.begin, part.end);
    });
  }
}

}  // namespace

RankFile RankFile::of(const Part& part) {
  RankFile file{.part = part.name};
  constexpr std::string_view kReserved = "__metadata__";
  std::set<std::string_view> names;
  for (const PartTensor& tensor : part.tensors) {
    for (const RowPart& of : tensor.names) {
      TESSERA_EXPECT(names.insert(of.name).second, "checkpoint::save: two tensors of a part are ",
                     "called ", shown(of.name), "; give each a name of its own");
      TESSERA_EXPECT(of.name != kReserved, "checkpoint::save: a tensor of part '", part.name,
                     "' is called '", kReserved,
                     "', which safetensors files have for themselves; give it another name");
    }
    TESSERA_EXPECT(tensor.state.values.defined(), "checkpoint::save: tensor ",
                   shown(tensor.names[0].name), " of part '", part.name,
                   "' is undefined; give it values");
    const Shape rows = tensor.state.spec.local_shape();
    TESSERA_EXPECT(tensor.state.values.shape() == rows, "checkpoint::save: tensor ",
                   shown(tensor.names[0].name), " of part '", part.name, "' is ",
                   tensor.state.values.shape(), ", but its spec says ", rows,
                   "; give the rows of its spec");
    add_boxes(file, tensor);
  }
  for (OwnBox& box : file.boxes) {
    box.entry.begin_bytes = file.size_bytes;
    box.entry.size_bytes = checked_mul(
        static_cast<std::int64_t>(tessera::size_bytes(box.entry.dtype)), numel_of(box.entry.shape));
    file.size_bytes = checked_add(file.size_bytes, box.entry.size_bytes);
    box.info.checksums.resize(static_cast<std::size_t>(pieces_of(box.entry.size_bytes)));
  }
  return file;
}

Manifest::File RankFile::write(const std::string& folder, int rank, const std::string& id,
                               bool must_be_finite, const ReadPiece& read,
                               WriteProgress& progress) const {
  ShardInfo info{.id = id};
  std::vector<SafetensorsEntry> entries;
  for (const OwnBox& box : boxes) {
    entries.push_back(box.entry);
    info.boxes.emplace(box.entry.name, box.info);
  }
  // Checksums have their digits when the data is written; the header is as long without.
  const auto head = [&] {
    const std::string json = format_safetensors_header(entries, format_shard_info(info));
    std::string text(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(json.size() >> (8 * i) & 255);
    return text + json;
  };
  const auto data_begin = static_cast<std::int64_t>(head().size());
  NewFile file((std::filesystem::path(folder) / part / name(rank)).string());
  for (const OwnBox& box : boxes) {
    std::vector<std::uint64_t>& checksums = info.boxes.at(box.entry.name).checksums;
    for (std::size_t i = 0; i < checksums.size(); ++i) {
      const std::int64_t begin = static_cast<std::int64_t>(i) * kPieceBytes,
                         size = std::min(kPieceBytes, box.entry.size_bytes - begin);
      const std::span<const std::byte> piece = read(box, begin, size);
      if (progress.is_cancelled) return {};
      if (must_be_finite && !are_finite(piece, box.entry.dtype))
        throw NotFinite(concat("checkpoint::save: ", shown(box.entry.name),
                               " is not finite, and nothing is saved"));
      checksums[i] = checksum_of(piece.data(), piece.size());
      const std::int64_t at = data_begin + box.entry.begin_bytes + begin;
      file.write(at, piece);
      if (size == kPieceBytes) file.flush(at, size);
      progress.bytes += size;
    }
  }
  const std::string text = head();
  file.write(0, text);
  file.finish();
  ++progress.syncs;
  return {name(rank), data_begin + size_bytes, checksum_of(text.data(), text.size())};
}

std::string RankFile::name(int rank) {
  return concat("shard-", five_digits(rank + 1), "-model-00001-of-00001.safetensors");
}

}  // namespace tessera::checkpoint
