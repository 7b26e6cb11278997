#include "tessera/checkpoint/model.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "runtime/checkpoint/finite.hpp"
#include "runtime/checkpoint/together.hpp"
#include "runtime/distributed/gatherer.hpp"
#include "tessera/base/error.hpp"
#include "tessera/distributed/state.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::checkpoint {
namespace {

SafetensorsEntry whole_entry(const std::string& name, const Shape& shape, DType dtype) {
  return {.name = name, .dtype = dtype, .shape = {shape.begin(), shape.end()}};
}

// What a file holds of a parameter: one entry, or one for each of its row parts.
std::vector<SafetensorsEntry> entries_of(const nn::Module& model, const std::string& name,
                                         const Parameter& parameter, DType dtype) {
  std::vector<SafetensorsEntry> entries;
  const Shape& shape = parameter.shape();
  for (const auto& [part, rows] : named_row_parts(name, parameter)) {
    entries.push_back(whole_entry(part, shape.ndim() > 0 ? shape.with(0, rows) : shape,
                                  parameter.dtype() == f32 ? dtype : parameter.dtype()));
    std::vector<std::int64_t>& sizes = entries.back().shape;
    if (model.saves_transposed(name)) std::swap(sizes.at(0), sizes.at(1));
  }
  return entries;
}

}  // namespace

void for_each_saved_tensor(nn::Module& model, const World& world,
                           const std::function<void(const std::string&, const Tensor&)>& f,
                           const SaveOptions& options) {
  TESSERA_EXPECT(options.dtype == f32 || options.dtype == bf16 || options.dtype == f16,
                 "save_weights: dtype is ", options.dtype, "; expected f32, bf16 or f16");
  const auto named = model.named_parameters();
  std::vector<std::pair<std::string, Tensor>> unsharded;
  on_all(world, [&] {
    for (const auto& [name, p] : named) {
      (void)updates_of(p);  // it has memory
      TESSERA_EXPECT(!p.mesh() || p.mesh()->size() == world.size(), "save_weights: '", name,
                     "' lies on ", p.mesh()->size(), " of the world's ", world.size(),
                     " ranks, and the others may have trained their own; use checkpoint::save, ",
                     "where each rank writes what it has");
      if (!p.mesh()) unsharded.emplace_back(name, p.shard());
    }
  });
  expect_same_values("save_weights", {&world}, unsharded);
  const std::map<std::string, Parameter> parameters(named.begin(), named.end());
  for_each_full_parameter(model, [&](const std::string& name, const Tensor& full) {
    if (world.rank() != 0) return;
    RowRange part;
    for (const auto& [part_name, rows] : named_row_parts(name, parameters.at(name))) {
      part = {part.end, part.end + rows};
      Tensor own = full.ndim() > 0 ? raw::slice(full, 0, part.begin, part.end) : full;
      if (model.saves_transposed(name)) own = raw::contiguous(raw::transpose(own, 0, 1));
      f(part_name, own.dtype() == f32 ? raw::cast(own, options.dtype) : own);
    }
  });
  if (world.rank() != 0) return;
  for (const auto& [name, buffer] : model.named_buffers(nn::Persistent::yes))
    f(name, buffer.value());
}

namespace {

using Entries = std::vector<SafetensorsEntry>;
using Write = std::function<void(const std::string& name, const Tensor& full)>;

// Rank 0's file of these entries, which all ranks make by `each`.
void save(const std::string& path, const World& world, const Entries& all,
          const std::function<void(const Write&)>& each, bool must_be_finite = false) {
  std::size_t written = 0, diverged = all.size();  // the first such entry
  std::unique_ptr<SafetensorsWriter> writer;
  if (world.rank() == 0)
    writer = std::make_unique<SafetensorsWriter>(
        path, all, std::map<std::string, std::string>{{"format", "pt"}});
  each([&](const std::string& name, const Tensor& full) {
    if (!writer) return;
    std::vector<std::byte> values(static_cast<std::size_t>(full.numel()) *
                                  size_bytes(full.dtype()));
    full.to_bytes(values);
    if (must_be_finite && !are_finite(values, full.dtype())) diverged = std::min(diverged, written);
    if (diverged == all.size()) writer->write(name, values);
    ++written;
  });
  if (must_be_finite)
    diverged = static_cast<std::size_t>(-world.max(-static_cast<double>(diverged)));
  if (diverged < all.size())
    throw NotFinite(concat("save_weights: '", all[diverged].name, "' is not finite as ",
                           all[diverged].dtype, ", and nothing is written"));
  if (writer) writer->commit();
  world.barrier();
}

}  // namespace

void save_weights(const std::string& path, nn::Module& model, const World& world,
                  const SaveOptions& options) {
  Entries all;
  for (const auto& [name, parameter] : model.named_parameters())
    for (const SafetensorsEntry& entry : entries_of(model, name, parameter, options.dtype))
      all.push_back(entry);
  for (const auto& [name, b] : model.named_buffers(nn::Persistent::yes))
    all.push_back(whole_entry(name, b.shape(), b.dtype()));
  save(
      path, world, all,
      [&](const Write& write) { for_each_saved_tensor(model, world, write, options); },
      options.must_be_finite);
}

void save_state(const std::string& path, const StateDict& state, const World& world) {
  Entries all;
  for (const auto& [name, entry] : state)
    all.push_back(whole_entry(name, entry.spec.shape, entry.values.dtype()));
  save(path, world, all, [&](const Write& write) { for_each_full(state, write); });
}

}  // namespace tessera::checkpoint
