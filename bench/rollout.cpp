// What sharding costs a rollout: 64 tokens of nn::generate under fully_shard on 2 ranks, whose
// units stay open (Reshard::never), beside one rank's unsharded model with the same cache, and
// beside two ranks that have an unsharded model each, which share the machine as those two do.
//
//   bench-rollout [PAIRS [DIM [LAYERS]]]     7 256 8
//
// Each rank has one thread, and seeds of its own for the same prompts. Before each rollout all
// parameters count as updated, as after a step of training, so that the sharded model gathers them
// once. Pairs of samples alternate; what is printed are medians, and the least and the largest
// ratio of a pair.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tessera/tessera.hpp"

namespace ts = tessera;

namespace {

struct Sizes {
  std::int64_t pairs = 7, dim = 256, layers = 8;
};
constexpr std::int64_t kTokens = 64, kPrompts = 4, kPromptTokens = 16, kVocab = 512;

enum class Form { whole, sharded };

// Seconds of each rollout of rank 0, from a barrier to the next; the first warms up and is left
// out.
std::vector<double> rollouts(const Sizes& sizes, int ranks, Form form, std::int64_t count) {
  std::vector<double> seconds;
  ts::run_local(ranks, {.threads = 1}, [&](ts::World& world) {
    ts::nn::Llama model({.dim = sizes.dim,
                         .n_layers = static_cast<int>(sizes.layers),
                         .n_heads = 4,
                         .vocab_size = kVocab,
                         .max_seq_len = kPromptTokens + kTokens});
    if (form == Form::sharded) {
      const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world),
                                     .reshard_after_forward = ts::Reshard::never};
      for (ts::nn::Module* const part : model.parts()) ts::fully_shard(*part, options);
      ts::fully_shard(model, options);
    }
    ts::nn::init(model, {1}, world.device());
    std::vector<ts::nn::Prompt> prompts;
    for (std::int64_t i = 0; i < kPrompts; ++i) {
      ts::nn::Prompt& prompt = prompts.emplace_back();
      prompt.seed = static_cast<std::uint64_t>(i + kPrompts * world.rank());
      for (std::int64_t t = 0; t < kPromptTokens; ++t)
        prompt.tokens.push_back(static_cast<std::int32_t>((7 * t + 31 * i) % kVocab));
    }
    for (std::int64_t i = 0; i <= count; ++i) {
      for (const ts::Parameter& p : model.parameters()) p.edit([](const ts::Tensor&) {});
      world.device().synchronize();
      world.barrier();
      const auto begin = std::chrono::steady_clock::now();
      ts::nn::generate(model, prompts, kTokens, {.seed = static_cast<std::uint64_t>(i)});
      world.barrier();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      if (world.rank() == 0 && i > 0) seconds.push_back(taken.count());
    }
  });
  return seconds;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void report(const char* of, const std::vector<double>& these, const std::vector<double>& those) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < these.size(); ++i) ratios.push_back(these[i] / those[i]);
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  std::printf("%-44s %.3f of its time (%.3f to %.3f)\n", of, median(ratios), *least, *most);
}

}  // namespace

int main(int argc, char** argv) {
  Sizes sizes;
  std::int64_t* const given[] = {&sizes.pairs, &sizes.dim, &sizes.layers};
  for (int i = 1; i < argc && i <= 3; ++i) *given[i - 1] = std::max(1l, std::atol(argv[i]));
  std::vector<double> one, two, sharded;
  for (std::int64_t i = 0; i < sizes.pairs; ++i) {
    one.push_back(rollouts(sizes, 1, Form::whole, 1)[0]);
    sharded.push_back(rollouts(sizes, 2, Form::sharded, 1)[0]);
    two.push_back(rollouts(sizes, 2, Form::whole, 1)[0]);
  }
  std::printf("%lld prompts of %lld tokens a rank, %lld new tokens, Llama of %lld layers of %lld\n",
              static_cast<long long>(kPrompts), static_cast<long long>(kPromptTokens),
              static_cast<long long>(kTokens), static_cast<long long>(sizes.layers),
              static_cast<long long>(sizes.dim));
  std::printf("unsharded, one rank %.3f s; two ranks, each whole %.3f s; sharded over two %.3f s\n",
              median(one), median(two), median(sharded));
  report("sharded over two ranks, beside one rank:", sharded, one);
  report("sharded over two ranks, beside two whole ones:", sharded, two);
}
