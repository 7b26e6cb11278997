#include "tessera/comm/mesh.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

std::string sizes_of(std::span<const MeshDim> dims) {
  std::string text;
  for (const MeshDim& dim : dims)
    text += concat(text.empty() ? "" : " x ", dim.name, ' ', dim.size);
  return text;
}

std::string names_of(std::span<const MeshDim> dims) {
  std::string text;
  for (const MeshDim& dim : dims) text += concat(text.empty() ? "'" : ", '", dim.name, "'");
  return text;
}

void check_dims(std::span<const MeshDim> dims, std::size_t ranks) {
  TESSERA_EXPECT(!dims.empty() && dims.size() <= DeviceMesh::kMaxDims, "DeviceMesh: ", dims.size(),
                 " dimensions; give 1 to ", DeviceMesh::kMaxDims);
  std::int64_t product = 1;
  for (const MeshDim& dim : dims) {
    TESSERA_EXPECT(!dim.name.empty() && dim.name != kWorldGroup &&
                       std::ranges::count(dims, dim.name, &MeshDim::name) == 1,
                   "DeviceMesh: a dimension is called '", dim.name, "' in ", sizes_of(dims),
                   "; give each a name of its own");
    TESSERA_EXPECT(dim.size >= 1, "DeviceMesh: dimension '", dim.name, "' has ", dim.size,
                   " ranks; give at least 1");
    product *= dim.size;
    if (product > static_cast<std::int64_t>(ranks)) break;  // it only grows
  }
  TESSERA_EXPECT(product == static_cast<std::int64_t>(ranks), "DeviceMesh: ", sizes_of(dims),
                 " is not ", ranks, ", the number of ranks; give sizes whose product it is");
}

std::vector<int> all_ranks(const World& world) {
  return {world.ranks().begin(), world.ranks().end()};
}

// From one rank to the next along a dimension, in the order of a mesh.
std::size_t stride_of(std::span<const MeshDim> dims, std::size_t dim) {
  std::size_t stride = 1;
  for (std::size_t d = dim + 1; d < dims.size(); ++d)
    stride *= static_cast<std::size_t>(dims[d].size);
  return stride;
}

std::size_t coordinate(std::span<const MeshDim> dims, std::size_t dim, std::size_t position) {
  return position / stride_of(dims, dim) % static_cast<std::size_t>(dims[dim].size);
}

// The line of ranks along `dim` through a position of the mesh.
std::vector<int> line(std::span<const MeshDim> dims, std::span<const int> ranks, std::size_t dim,
                      std::size_t position) {
  const std::size_t stride = stride_of(dims, dim);
  const std::size_t first = position - coordinate(dims, dim, position) * stride;
  std::vector<int> line;
  for (int i = 0; i < dims[dim].size; ++i)
    line.push_back(ranks[first + static_cast<std::size_t>(i) * stride]);
  return line;
}

// "0 1 2 3", "0 1 2 3 .. 511"
std::string shortened(std::span<const int> ranks) {
  constexpr std::size_t kShown = 16;
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks.size() > kShown && i > 3 && i + 1 < ranks.size()) continue;
    text += concat(ranks.size() > kShown && i + 1 == ranks.size() ? " .." : "", ' ', ranks[i]);
  }
  return text;
}

}  // namespace

DeviceMesh DeviceMesh::flat(const World& world) {
  return grid(world, {{.name = "dp_shard", .size = world.size()}});
}

DeviceMesh DeviceMesh::hybrid(const World& world, HybridSizes sizes) {
  return grid(world, {{.name = "dp_replicate",
                       .size = sizes.replicate,
                       .streams = {.reduce = StreamId::replicate}},
                      {.name = "dp_shard", .size = sizes.shard}});
}

DeviceMesh DeviceMesh::grid(const World& world, std::vector<MeshDim> dims) {
  return make(world, {std::move(dims), all_ranks(world), {}});
}

DeviceMesh DeviceMesh::grid(const World& world, std::vector<MeshDim> dims,
                            std::span<const int> ranks) {
  std::vector<int> sorted(ranks.begin(), ranks.end());
  std::ranges::sort(sorted);
  TESSERA_EXPECT(!sorted.empty() && sorted.front() >= 0 && sorted.back() < world.size() &&
                     std::ranges::adjacent_find(sorted) == sorted.end(),
                 "DeviceMesh: the ranks are", shortened(ranks), "; give each once, from 0 to ",
                 world.size() - 1);
  return make(world, {std::move(dims), {ranks.begin(), ranks.end()}, {}});
}

// Each rank makes the groups of its own lines, one dimension after another.
DeviceMesh DeviceMesh::make(const World& world, Layout layout) {
  check_dims(layout.dims, layout.ranks.size());
  for (std::size_t d = 0; d < layout.dims.size(); ++d)
    if (const RankGroup* const group = make_group(world, layout, d)) layout.groups.push_back(group);
  return {world.share(), std::move(layout)};
}

const RankGroup* DeviceMesh::make_group(const World& world, const Layout& layout, std::size_t d) {
  const auto& [dims, ranks, groups] = layout;
  if (dims.size() == 1 && dims[d].streams == GroupStreams{} &&
      std::ranges::equal(ranks, world.ranks()))
    return world.share().get();
  const auto position =
      static_cast<std::size_t>(std::ranges::find(ranks, world.rank()) - ranks.begin());
  const std::vector<int> own =
      position < ranks.size() ? line(dims, ranks, d, position) : std::vector<int>{};
  return world.split(dims[d].name, own, dims[d].streams);
}

std::size_t DeviceMesh::index_of(std::string_view name) const {
  const auto& dims = layout_->dims;
  const auto at = std::ranges::find(dims, name, &MeshDim::name);
  TESSERA_EXPECT(at != dims.end(), "DeviceMesh: no dimension is called '", name,
                 "'; this mesh has ", names_of(dims));
  return static_cast<std::size_t>(at - dims.begin());
}

std::size_t DeviceMesh::find(std::string_view name) const {
  const std::size_t at = index_of(name);
  TESSERA_EXPECT(is_member(), "DeviceMesh: rank ", world_->rank(), " is not in the mesh of ranks",
                 shortened(ranks()), "; ask is_member() first");
  return at;
}

const RankGroup& DeviceMesh::group(std::string_view name) const {
  return *layout_->groups[find(name)];
}

const RankGroup& DeviceMesh::refuse_group() const {
  TESSERA_EXPECT(ndim() == 1, "DeviceMesh: a mesh of ", sizes_of(dims()),
                 " has a group for each dimension; choose one, as mesh[\"", dims().back().name,
                 "\"]");
  return group(dims()[0].name);
}

const RankGroup& DeviceMesh::refuse_shards() const {
  TESSERA_EXPECT(ndim() <= 2, "DeviceMesh: ", sizes_of(dims()), " are ", ndim(),
                 " dimensions; parameters are sharded over one, and replicated over the one before "
                 "it: choose these, as mesh.select({\"",
                 dims()[dims().size() - 2].name, "\", \"", dims().back().name, "\"})");
  return group(dims().back().name);
}

DeviceMesh DeviceMesh::select(std::initializer_list<std::string_view> names) const {
  Layout part;
  for (const std::string_view name : names) {
    const std::size_t d = find(name);
    TESSERA_EXPECT(std::ranges::count(names, name) == 1, "DeviceMesh: dimension '", name,
                   "' is chosen twice; name each once");
    part.dims.push_back(layout_->dims[d]);
    part.groups.push_back(layout_->groups[d]);
  }
  TESSERA_EXPECT(!part.dims.empty(), "DeviceMesh::select: no name; this mesh has ",
                 names_of(dims()));
  // This rank's position without its steps along the chosen dimensions, and all steps along these.
  std::vector<std::size_t> positions{
      static_cast<std::size_t>(std::ranges::find(ranks(), world_->rank()) - ranks().begin())};
  for (const MeshDim& dim : part.dims) {
    const std::size_t d = find(dim.name), stride = stride_of(dims(), d);
    std::vector<std::size_t> more;
    for (const std::size_t position : positions)
      for (std::size_t i = 0; i < static_cast<std::size_t>(dim.size); ++i)
        more.push_back(position - coordinate(dims(), d, position) * stride + i * stride);
    positions = std::move(more);
  }
  for (const std::size_t position : positions) part.ranks.push_back(ranks()[position]);
  return {world_, std::move(part)};
}

// Neighbours lie row by row as one dimension does, so ranks keep their places.
DeviceMesh DeviceMesh::flatten(std::initializer_list<std::string_view> names, std::string name,
                               const GroupStreams& streams) const {
  TESSERA_EXPECT(names.size() > 0, "DeviceMesh::flatten: no name; this mesh has ",
                 names_of(dims()));
  const std::size_t first = index_of(*names.begin()), end = first + names.size();
  std::int64_t size = 1;
  for (std::size_t d = first; const std::string_view each : names) {
    TESSERA_EXPECT(index_of(each) == d, "DeviceMesh::flatten: '", each,
                   "' does not follow the one before it; this mesh has ", names_of(dims()),
                   ": give neighbours in this order");
    size *= dims()[d++].size;
  }
  Layout flat{layout_->dims, layout_->ranks, layout_->groups};
  const auto replace = [&](auto& of, const auto& with) {
    const auto begin = of.begin() + static_cast<std::ptrdiff_t>(first);
    *begin = with;
    of.erase(begin + 1, of.begin() + static_cast<std::ptrdiff_t>(end));
  };
  replace(flat.dims, MeshDim{std::move(name), static_cast<int>(size), streams});
  check_dims(flat.dims, flat.ranks.size());
  const RankGroup* const group = make_group(*world_, flat, first);
  if (is_member()) replace(flat.groups, group);
  return {world_, std::move(flat)};
}

std::string DeviceMesh::to_string() const {
  constexpr std::size_t kRows = 16;
  std::string text = sizes_of(dims()) + "\n";
  const auto row = static_cast<std::size_t>(dims().back().size), rows = ranks().size() / row;
  for (std::size_t r = 0; r < rows; ++r) {
    if (rows > kRows && r > 3 && r + 1 < rows) continue;
    if (rows > kRows && r + 1 == rows) text += " ..\n";
    text += shortened(ranks().subspan(r * row, row)) + "\n";
  }
  return text;
}

}  // namespace tessera
