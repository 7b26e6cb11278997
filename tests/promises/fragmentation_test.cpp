// What the pool reserves beyond what is live, on the allocations of real shapes. The program runs
// on `virtual`: every allocation and free of the engine is made, by one rank of many, over memory
// that is counted and never touched.
#include <algorithm>

#include "tessera/device/device_context.hpp"
#include "tessera/nn/gpt2.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/optim/clip.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// The bytes of the pool that are handed out, slots and host staging apart.
class Live final : public Observer {
 public:
  explicit Live(DeviceContext& context) : context_(context) { context_.add_observer(*this); }
  ~Live() override { context_.remove_observer(*this); }

  void memory(const MemoryEvent& e) override {
    if (e.to_host || e.owner.ends_with("slots")) return;
    const auto bytes =
        static_cast<const std::byte*>(e.end) - static_cast<const std::byte*>(e.begin);
    if (e.kind == MemoryEvent::Kind::handed_out) peak_ = std::max(peak_, live_ += bytes);
    if (e.kind == MemoryEvent::Kind::given_back) live_ -= bytes;
  }
  std::int64_t peak() const { return peak_; }

 private:
  DeviceContext& context_;
  std::int64_t live_ = 0, peak_ = 0;
};

struct Job {
  bool is_llama;
  std::int64_t dim, layers, heads, kv_heads, ffn, vocab, batch, length;
  int ranks;
  bool recomputes;
  int micro_batches;
  DType param;
};
std::ostream& operator<<(std::ostream& out, const Job& s) {
  return out << (s.is_llama ? "Llama" : "GPT-2") << " of " << s.layers << " x " << s.dim << ", "
             << s.batch << " x " << s.length << " tokens, " << s.micro_batches
             << " micro-batches, 1 of " << s.ranks << " ranks, " << s.param << ", recompute "
             << s.recomputes;
}

std::unique_ptr<nn::LanguageModel> make(const Job& s) {
  const auto recompute = s.recomputes ? nn::Recompute::blocks : nn::Recompute::none;
  if (s.is_llama)
    return std::make_unique<nn::Llama>(nn::LlamaConfig{.dim = s.dim,
                                                       .n_layers = s.layers,
                                                       .n_heads = s.heads,
                                                       .n_kv_heads = s.kv_heads,
                                                       .ffn_dim = s.ffn,
                                                       .vocab_size = s.vocab,
                                                       .max_seq_len = s.length,
                                                       .recompute = recompute});
  return std::make_unique<nn::Gpt2>(nn::Gpt2Config{.dim = s.dim,
                                                   .n_layers = s.layers,
                                                   .n_heads = s.heads,
                                                   .ffn_dim = s.ffn,
                                                   .vocab_size = s.vocab,
                                                   .max_seq_len = s.length,
                                                   .recompute = recompute});
}

void step(nn::LanguageModel& model, optim::AdamW& optimizer, const World& world, const Job& s) {
  const std::vector<std::int32_t> tokens(static_cast<std::size_t>(s.batch * s.length));
  const auto upload = [&] { return Tensor::from(tokens, {s.batch, s.length}, world.device()); };
  for (int m = 0; m < s.micro_batches; ++m) model.loss(upload(), upload()).backward();
  optim::clip_grad_norm(model.parameters(), 1.0);
  optimizer.step();
  optimizer.zero_grad();
  world.device().synchronize();
}

}  // namespace

TEST_CASE("the pool reserves little more than what is live at the peak", "[promises]") {
  // clang-format off
  const Job s = GENERATE(
      //    dim layers heads kv  ffn   vocab  batch length ranks recompute micro param
      Job{true,  2048, 16, 32,  8,  8192, 128256,  1, 4096,  8, false, 1, bf16},
      Job{true,  2048, 16, 32,  8,  8192, 128256,  1, 4096,  8, true,  1, bf16},
      Job{true,  2048, 16, 32,  8,  8192, 128256,  1, 4096,  8, true,  3, bf16},
      Job{true,  4096, 32, 32,  8, 14336, 128256,  1, 8192, 64, true,  1, bf16},
      Job{true,  4096, 32, 32,  8, 14336, 128256,  1, 2048, 64, false, 1, bf16},
      Job{true,   384,  6,  6,  6,  1056,   1000, 16,  512,  3, false, 2, f32},
      Job{false,  768, 12, 12, 12,  3072,  50257,  4, 1024,  2, false, 1, f32},
      Job{false,  768, 12, 12, 12,  3072,  50257, 16, 1024,  8, true,  1, bf16},
      Job{false, 1024, 24, 16, 16,  4096,  50257,  2, 1024,  4, false, 2, f32},
      Job{false, 1600, 48, 25, 25,  6400,  50257,  1, 1024, 16, false, 1, bf16},
      // Gradients of the first micro-batch come to lie where recomputed activations were.
      Job{true,  4096, 32, 32,  8, 14336, 128256,  1, 4096, 64, true,  3, bf16},
      Job{false, 1024, 24, 16, 16,  4096,  50257,  2, 1024,  4, true,  3, f32},
      Job{true,   384,  6,  6,  6,  1056,   1000, 16,  512,  3, true,  5, f32},
      Job{true,  1024, 12, 16,  4,  4096,  32000,  3,  777,  5, true,  3, bf16},
      Job{true,  8192, 20, 64,  8, 28672, 128256,  1, 8192, 512, true, 2, bf16});
  // clang-format on
  const RaceCheck check;
  const World world = World::emulated(0, s.ranks, check({.executor = ExecutorKind::virtual_}));
  const Live live(world.device().context());
  const auto model = make(s);
  ShardOptions options{.mesh = DeviceMesh::flat(world)};
  if (s.param != f32) options.precision.param = s.param;
  for (nn::Module* part : model->parts()) fully_shard(*part, options);
  fully_shard(*model, options);
  model->materialize(world.device());
  nn::init(*model, {1});
  optim::AdamW optimizer(model->parameters(), {.lr = 1e-3});
  optimizer.prepare();
  for (int k = 0; k < 3; ++k) step(*model, optimizer, world, s);

  const Pool& pool = Memory::of(world.device()).pool();
  const double ratio =
      static_cast<double>(pool.reserved_bytes()) / static_cast<double>(live.peak());
  INFO(s << ": " << pool.reserved_bytes() << " of " << live.peak() << " bytes, " << ratio);
  CHECK(live.peak() >= 256ll << 20);
  CHECK(ratio >= 1);
  CHECK(ratio <= 1.05);
}
