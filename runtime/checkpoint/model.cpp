#include "tessera/checkpoint/model.hpp"

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/distributed/state.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::checkpoint {
namespace {

SafetensorsEntry whole_entry(const std::string& name, const Shape& shape, DType dtype) {
  return {.name = name, .dtype = dtype, .shape = {shape.begin(), shape.end()}};
}

SafetensorsEntry entry_of(const nn::Module& model, const std::string& name, const Shape& shape,
                          DType dtype) {
  SafetensorsEntry entry = whole_entry(name, shape, dtype);
  if (model.saves_transposed(name)) std::swap(entry.shape.at(0), entry.shape.at(1));
  return entry;
}

}  // namespace

void for_each_saved_tensor(nn::Module& model, const World& world,
                           const std::function<void(const std::string&, const Tensor&)>& f,
                           const SaveOptions& options) {
  TESSERA_EXPECT(options.dtype == f32 || options.dtype == bf16 || options.dtype == f16,
                 "save_weights: dtype is ", options.dtype, "; expected f32, bf16 or f16");
  for_each_full_parameter(model, world, [&](const std::string& name, const Tensor& full) {
    if (world.rank() != 0) return;
    const Tensor own =
        model.saves_transposed(name) ? raw::contiguous(raw::transpose(full, 0, 1)) : full;
    f(name, options.dtype == f32 ? own : raw::cast(own, options.dtype));
  });
  if (world.rank() != 0) return;
  for (const auto& [name, buffer] : model.named_buffers(nn::Persistent::yes))
    f(name, buffer.value());
}

namespace {

using Entries = std::vector<SafetensorsEntry>;
using Write = std::function<void(const std::string& name, const Tensor& full)>;

// Rank 0's file of these entries, which all ranks make by `each`.
void save(const std::string& path, const World& world, const std::function<Entries()>& entries,
          const std::function<void(const Write&)>& each) {
  std::unique_ptr<SafetensorsWriter> writer;
  if (world.rank() == 0)
    writer = std::make_unique<SafetensorsWriter>(
        path, entries(), std::map<std::string, std::string>{{"format", "pt"}});
  each([&](const std::string& name, const Tensor& full) {
    if (!writer) return;
    std::vector<std::byte> values(static_cast<std::size_t>(full.numel()) *
                                  size_bytes(full.dtype()));
    full.to_bytes(values);
    writer->write(name, values);
  });
  if (writer) writer->commit();
  world.barrier();
}

}  // namespace

void save_weights(const std::string& path, nn::Module& model, const World& world,
                  const SaveOptions& options) {
  const auto entries = [&] {
    Entries all;
    for (const auto& [name, parameter] : model.named_parameters())
      all.push_back(entry_of(model, name, parameter.shape(), options.dtype));
    for (const auto& [name, b] : model.named_buffers(nn::Persistent::yes))
      all.push_back(whole_entry(name, b.shape(), b.dtype()));
    return all;
  };
  save(path, world, entries,
       [&](const Write& write) { for_each_saved_tensor(model, world, write, options); });
}

void save_state(const std::string& path, const StateDict& state, const World& world) {
  const auto entries = [&] {
    Entries all;
    for (const auto& [name, entry] : state)
      all.push_back(whole_entry(name, entry.spec.shape, entry.values.dtype()));
    return all;
  };
  save(path, world, entries, [&](const Write& write) { for_each_full(state, write); });
}

}  // namespace tessera::checkpoint
