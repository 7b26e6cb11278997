// A model with an optimizer, which one program saves as a checkpoint and another resumes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/distributed/distributed_tensor.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tessera/nn/llama.hpp"
#include "tests/shard/support.hpp"

namespace tessera::testing {

// A model on its ranks, with an optimizer whose moments are unlike each other.
struct Resumable {
  std::unique_ptr<nn::LanguageModel> model;
  std::unique_ptr<optim::AdamW> optimizer;
};

struct ResumedLayout {
  bool gpt2 = false, tied = false;
  nn::Projections projections = nn::Projections::separate;
  int replicas = 1;  // where they divide the ranks
  int dim = 0;       // of matrices that the ranks divide
  std::int64_t slice_bytes = 0;
};

inline Resumable made(const ResumedLayout& way, const World& world, std::uint64_t seed) {
  Resumable saved;
  if (way.gpt2)
    saved.model = std::make_unique<nn::Gpt2>(
        nn::Gpt2Config{.dim = 6, .n_layers = 1, .n_heads = 3, .vocab_size = 7, .max_seq_len = 3});
  else
    saved.model = std::make_unique<nn::Llama>(nn::LlamaConfig{.dim = 6,
                                                              .n_layers = 1,
                                                              .n_heads = 1,
                                                              .ffn_dim = 5,
                                                              .vocab_size = 7,
                                                              .tie_embeddings = way.tied,
                                                              .projections = way.projections});
  const bool is_hybrid = world.size() % way.replicas == 0;
  const ShardOptions options{
      .mesh = is_hybrid ? DeviceMesh::hybrid(world, {way.replicas, world.size() / way.replicas})
                        : DeviceMesh::flat(world),
      .slice_bytes = way.slice_bytes,
      .shard_placement_fn = [&](const Parameter& p) {
        const bool fits = p.shape().ndim() == 2 && p.shape()[1] % world.size() == 0;
        return Shard{fits && !p.is_streamed() ? way.dim : 0};
      }};
  for (nn::Module* part : saved.model->parts()) fully_shard(*part, options);
  fully_shard(*saved.model, options);
  saved.model->materialize(world.device());
  nn::init(*saved.model, {seed});
  saved.optimizer = std::make_unique<optim::AdamW>(saved.model->parameters());
  saved.optimizer->prepare();
  for (const auto& [name, p] : saved.model->named_parameters()) {
    raw::copy_into(saved.optimizer->moments(p)[0], raw::neg(p.shard()));
    raw::copy_into(saved.optimizer->moments(p)[1], raw::mul(p.shard(), p.shard()));
  }
  saved.optimizer->set_steps(7);
  return saved;
}

// Weights and moments, whole.
inline Values everything(const Resumable& saved) {
  Values all = full_values(*saved.model);
  for (const auto& [name, p] : saved.model->named_parameters())
    for (const int k : {0, 1})
      all[concat(name, '.', k)] =
          saved.optimizer->distributed_moments(p)[static_cast<std::size_t>(k)]
              .full()
              .to_vector<float>();
  all["steps"] = {static_cast<float>(saved.optimizer->steps())};
  return all;
}

inline void save_at(const std::string& folder, std::int64_t step, Resumable& saved,
                    const World& world) {
  checkpoint::save(folder, step,
                   {checkpoint::part(*saved.model, world),
                    checkpoint::part(*saved.optimizer, *saved.model, world)},
                   {{"samples", std::int64_t{6400}}, {"loss", 2.0}, {"data", "book \"1\""}}, world);
}

inline void load_from(const checkpoint::Checkpoint& from, Resumable& into, const World& world) {
  into.model->load(*from.part("model"));
  into.optimizer->load(*into.model, *from.part("optimizer"));
  world.barrier();
}

// What a load of everything by one rank says; empty where it takes it.
inline std::string load_complaint(const std::string& folder, std::int64_t step) {
  const World world = World::single({.threads = 1});
  Resumable resumed = made({}, world, 1);
  try {
    const checkpoint::Checkpoint from(folder, step);
    const auto model = from.part("model"), optimizer = from.part("optimizer");
    resumed.model->load(*model);
    resumed.optimizer->load(*resumed.model, *optimizer);
  } catch (const DataError& error) {
    return error.what();
  }
  return "";
}

inline std::vector<std::filesystem::path> files_below(const std::string& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& at : std::filesystem::recursive_directory_iterator(folder))
    if (at.is_regular_file()) files.push_back(at.path());
  std::ranges::sort(files);
  return files;
}

}  // namespace tessera::testing
