// What the tests of broken saves save: two parts of a few tensors, whose values tell the step.
#pragma once

#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/checkpoint/saver.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::testing {

// Name, shape and values of a part's tensors.
struct SavedTensor {
  std::string name;
  Shape shape;
  std::vector<float> values(std::int64_t step) const {
    std::vector<float> all(static_cast<std::size_t>(numel_of({shape.begin(), shape.end()})));
    std::iota(all.begin(), all.end(), static_cast<float>(step * 1000));
    return all;
  }
  static std::int64_t numel_of(const std::vector<std::int64_t>& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
  }
};
inline const std::vector<std::pair<std::string, std::vector<SavedTensor>>> kSaved{
    {"model", {{"a", {5, 3}}, {"b", {4}}}}, {"optimizer", {{"a.exp_avg", {5, 3}}}}};

// `later`: by a Saver, whose threads write.
enum class SaveWay : std::uint8_t { now, later };

inline constexpr int kSavers = 4, kLoaders = 3;

// Collective.
inline void save_step(const std::string& folder, std::int64_t step, const World& world,
                      SaveWay way = SaveWay::now) {
  std::vector<checkpoint::Part> parts;
  for (const auto& [name, tensors] : kSaved) {
    StateDict state;
    for (const SavedTensor& tensor : tensors)
      state.emplace(tensor.name, Tensor::from(tensor.values(step), tensor.shape, world.device()));
    parts.push_back(checkpoint::part(name, state, world));
  }
  if (way == SaveWay::now) return checkpoint::save(folder, step, parts, {{"samples", step}}, world);
  checkpoint::Saver saver(folder, world);
  saver.save(step, parts, {{"samples", step}});
  for (const checkpoint::Part& part : parts)
    for (const checkpoint::PartTensor& tensor : part.tensors) raw::fill(tensor.state.values, 0);
  saver.wait();
}

// Why FOLDER/step-N does not give what was saved as it to other ranks; empty where it does.
inline std::string complaint(const std::string& folder, std::int64_t step) {
  static const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  try {
    const checkpoint::Checkpoint from(folder, step);
    if (from.integer("samples") != step) return "it is of another step";
    for (const auto& [name, tensors] : kSaved) {
      const auto part = from.part(name);
      for (const SavedTensor& tensor : tensors) {
        std::vector<float> found;
        for (int rank = 0; rank < kLoaders; ++rank)
          for (const float value :
               part->rows(std::vector{tensor.name}, ShardSpec{tensor.shape, kLoaders, rank}, false,
                          f32, device)
                   .to_vector<float>())
            found.push_back(value);
        if (found != tensor.values(step)) return concat(tensor.name, " has other values");
      }
    }
  } catch (const DataError& error) {
    return error.what();
  }
  return "";
}

// What loads is of `folder` all that it shows as checkpoints; else why not.
inline std::string complaint(const std::string& folder) {
  for (const std::int64_t step : checkpoint::steps_in(folder))
    if (const std::string text = complaint(folder, step); !text.empty())
      return concat("step ", step, ": ", text);
  return "";
}

// The names in a folder, of those that a user does not see.
inline std::vector<std::string> hidden_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (const std::string name = entry.path().filename().string(); name.starts_with('.'))
      names.push_back(name);
  return names;
}

}  // namespace tessera::testing
