#include "tools/train/weights.hpp"

#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "tessera/checkpoint/safetensors.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::train {
namespace {

std::vector<std::int64_t> file_shape(const nn::LanguageModel& model, const std::string& name,
                                     const Shape& shape) {
  std::vector<std::int64_t> out(shape.begin(), shape.end());
  if (model.saves_transposed(name)) std::swap(out.at(0), out.at(1));
  return out;
}

// All values of an entry as f32, row-major.
std::vector<float> read_floats(const checkpoint::SafetensorsReader& reader,
                               const checkpoint::SafetensorsEntry& entry) {
  const std::span<const std::byte> bytes = reader.bytes(entry);
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

// Some files keep a tied head beside the embedding. It is spare only if it is the same.
bool is_tied_head(const checkpoint::SafetensorsReader& reader,
                  const checkpoint::SafetensorsEntry& entry) {
  if (entry.name != "lm_head.weight") return false;
  for (const char* name : {"model.embed_tokens.weight", "transformer.wte.weight"})
    if (const auto* embedding = reader.find(name))
      return embedding->dtype == entry.dtype && embedding->shape == entry.shape &&
             std::ranges::equal(reader.bytes(*embedding), reader.bytes(entry));
  return false;
}

std::string text_of(const std::vector<std::int64_t>& shape) {
  return concat(Shape(std::span<const std::int64_t>(shape)));
}

}  // namespace

void for_each_saved_tensor(nn::LanguageModel& model, const World& world,
                           const std::function<void(const std::string&, const Tensor&)>& f) {
  for_each_full_parameter(model, world, [&](const std::string& name, const Tensor& full) {
    if (world.rank() != 0) return;
    f(name, model.saves_transposed(name) ? raw::contiguous(raw::transpose(full, 0, 1)) : full);
  });
}

void save_weights(nn::LanguageModel& model, const World& world, const std::string& path) {
  std::unique_ptr<checkpoint::SafetensorsWriter> writer;
  if (world.rank() == 0) {
    std::vector<checkpoint::SafetensorsEntry> entries;
    for (const auto& [name, parameter] : model.named_parameters())
      entries.push_back(
          {.name = name, .dtype = f32, .shape = file_shape(model, name, parameter.shape())});
    writer = std::make_unique<checkpoint::SafetensorsWriter>(
        path, std::move(entries), std::map<std::string, std::string>{{"format", "pt"}});
  }
  for_each_saved_tensor(model, world, [&](const std::string& name, const Tensor& full) {
    const std::vector<float> values = full.to_vector<float>();
    writer->write(name, std::as_bytes(std::span(values)));
  });
  if (writer) writer->commit();
  world.barrier();
}

void load_weights(nn::LanguageModel& model, const std::string& path) {
  const checkpoint::SafetensorsReader reader(path);
  std::set<std::string> used;
  for (const auto& [name, parameter] : model.named_parameters()) {
    const checkpoint::SafetensorsEntry* const entry = reader.find(name);
    if (!entry)
      throw DataError(concat("--load: '", path, "' has no tensor '", name,
                             "'; is it a model of this kind and size?"));
    used.insert(name);
    const std::vector<std::int64_t> expected = file_shape(model, name, parameter.shape());
    if (entry->shape != expected || !is_floating(entry->dtype))
      throw DataError(concat("--load: tensor '", name, "' in '", path, "' is ",
                             text_of(entry->shape), " of ", entry->dtype, ", the model has ",
                             text_of(expected), "; give the sizes that the file was saved with"));
    std::vector<float> values = read_floats(reader, *entry);
    if (model.saves_transposed(name)) {
      const auto rows = static_cast<std::size_t>(expected[0]),
                 cols = static_cast<std::size_t>(expected[1]);
      std::vector<float> turned(values.size());
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < cols; ++j) turned[j * rows + i] = values[i * cols + j];
      values = std::move(turned);
    }
    const ShardSpec& spec = parameter.state()->spec;
    const Tensor shard = parameter.shard();
    if (shard.numel() == 0) continue;
    const std::span<const float> own(values.data() + spec.owned().begin * spec.row_numel(),
                                     static_cast<std::size_t>(shard.numel()));
    raw::copy_into(shard, Tensor::from(own, shard.shape(), shard.device()));
  }
  for (const auto& entry : reader.entries())
    if (!used.contains(entry.name) && !is_tied_head(reader, entry))
      throw DataError(
          concat("--load: '", path, "' holds '", entry.name,
                 "', which the model does not have; is it a model of this kind and size?"));
  for (const auto& group : groups_of(model.parameters())) group->mark_updated();
}

}  // namespace tessera::train
