#include "tessera/checkpoint/model.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::checkpoint {
namespace {

std::vector<std::int64_t> file_shape(const nn::Module& model, const std::string& name,
                                     const Shape& shape) {
  std::vector<std::int64_t> out(shape.begin(), shape.end());
  if (model.saves_transposed(name)) std::swap(out.at(0), out.at(1));
  return out;
}

std::string text_of(const std::vector<std::int64_t>& shape) {
  return concat(Shape(std::span<const std::int64_t>(shape)));
}

const SafetensorsEntry& entry_of(const SafetensorsReader& file, const std::string& name,
                                 const std::vector<std::int64_t>& expected) {
  const SafetensorsEntry* const entry = file.find(name);
  if (!entry)
    throw DataError(concat("'", file.path(), "' has no tensor '", name,
                           "'; is it a model of this kind and size?"));
  if (!is_floating(entry->dtype))
    throw DataError(concat("tensor '", name, "' in '", file.path(), "' is of ", entry->dtype,
                           ", and weights are floating; convert it when the file is written"));
  if (entry->shape != expected)
    throw DataError(concat("tensor '", name, "' in '", file.path(), "' is ", text_of(entry->shape),
                           " of ", entry->dtype, ", the model has ", text_of(expected),
                           "; give the sizes that the file was saved with"));
  return *entry;
}

// All values of an entry as f32, row-major.
std::vector<float> read_floats(const SafetensorsReader& file, const SafetensorsEntry& entry) {
  const std::span<const std::byte> bytes = file.bytes(entry);
  return visit(entry.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<float> out(bytes.size() / sizeof(T));
    for (std::size_t i = 0; i < out.size(); ++i) {
      T value;
      std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
      out[i] = static_cast<float>(value);
    }
    return out;
  });
}

std::vector<float> transposed(const std::vector<float>& values, std::size_t rows) {
  const std::size_t cols = values.size() / rows;
  std::vector<float> out(values.size());
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < cols; ++j) out[j * rows + i] = values[i * cols + j];
  return out;
}

// A tied parameter may stand in the file under each of its names, with the same bytes.
void check_left_over(const SafetensorsReader& file, const nn::Module& model) {
  std::map<const ParameterState*, std::string> first;
  std::map<std::string, std::string> names;  // each name -> the first of its parameter
  for (const auto& [name, parameter] : model.named_parameters(nn::Tied::every_name))
    names[name] = first.try_emplace(parameter.state().get(), name).first->second;
  for (const SafetensorsEntry& entry : file.entries()) {
    const auto known = names.find(entry.name);
    if (known != names.end()) {
      if (known->second == entry.name) continue;
      const SafetensorsEntry& kept = *file.find(known->second);
      if (kept.dtype == entry.dtype && kept.shape == entry.shape &&
          std::ranges::equal(file.bytes(kept), file.bytes(entry)))
        continue;
    }
    throw DataError(
        concat("'", file.path(), "' holds '", entry.name,
               "', which the model does not have; is it a model of this kind and size?"));
  }
}

}  // namespace

void for_each_saved_tensor(nn::Module& model, const World& world,
                           const std::function<void(const std::string&, const Tensor&)>& f) {
  for_each_full_parameter(model, world, [&](const std::string& name, const Tensor& full) {
    if (world.rank() != 0) return;
    f(name, model.saves_transposed(name) ? raw::contiguous(raw::transpose(full, 0, 1)) : full);
  });
}

void save_weights(const std::string& path, nn::Module& model, const World& world) {
  std::unique_ptr<SafetensorsWriter> writer;
  if (world.rank() == 0) {
    std::vector<SafetensorsEntry> entries;
    for (const auto& [name, parameter] : model.named_parameters())
      entries.push_back(
          {.name = name, .dtype = f32, .shape = file_shape(model, name, parameter.shape())});
    writer = std::make_unique<SafetensorsWriter>(
        path, std::move(entries), std::map<std::string, std::string>{{"format", "pt"}});
  }
  for_each_saved_tensor(model, world, [&](const std::string& name, const Tensor& full) {
    const std::vector<float> values = full.to_vector<float>();
    writer->write(name, std::as_bytes(std::span(values)));
  });
  if (writer) writer->commit();
  world.barrier();
}

void load_weights(const std::string& path, nn::Module& model) {
  load_weights(SafetensorsReader(path), model);
}

void check_weights(const SafetensorsReader& file, const nn::Module& model) {
  for (const auto& [name, parameter] : model.named_parameters())
    entry_of(file, name, file_shape(model, name, parameter.shape()));
  check_left_over(file, model);
}

void load_weights(const SafetensorsReader& file, nn::Module& model) {
  check_weights(file, model);
  for (const auto& [name, parameter] : model.named_parameters()) {
    const Tensor shard = parameter.shard();
    const std::vector<std::int64_t> shape = file_shape(model, name, parameter.shape());
    std::vector<float> values = read_floats(file, entry_of(file, name, shape));
    if (model.saves_transposed(name))
      values = transposed(values, static_cast<std::size_t>(shape[0]));
    const ShardSpec& spec = parameter.state()->spec;
    const std::int64_t begin = spec.shape.ndim() == 0 ? 0 : spec.owned().begin * spec.row_numel();
    const std::span<const float> own(values.data() + begin,
                                     static_cast<std::size_t>(shard.numel()));
    parameter.assign(Tensor::from(own, shard.shape(), shard.device()));
  }
}

}  // namespace tessera::checkpoint
