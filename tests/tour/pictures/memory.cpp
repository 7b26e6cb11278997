// Memory over one training step of rank 0 of 2, on the virtual clock: which slot lies where in the
// arena and when, and who holds how much.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tests/tour/pictures/pictures.hpp"

namespace tessera::pictures {
namespace {

constexpr std::size_t kColumns = 80;

struct Range {
  std::uintptr_t begin = 0, end = 0;
  bool contains(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

struct Operation {
  StreamId stream{};
  std::string name;
  double begin = 0, end = 0;
  std::vector<Range> reads, writes;
  bool is(std::string_view kind) const { return name.starts_with(kind); }
};

struct Recorder final : Observer {
  explicit Recorder(const Device& d) : device(d) { device.context().add_observer(*this); }
  ~Recorder() override { device.context().remove_observer(*this); }
  void launched(StreamId stream, Tick, const Op& op) override {
    Operation& o = operations.emplace_back();
    o.stream = stream;
    o.name = op.name;
    for (const Access& a : op.accesses)
      (a.mode == AccessMode::read ? o.reads : o.writes)
          .push_back(
              {reinterpret_cast<std::uintptr_t>(a.begin), reinterpret_cast<std::uintptr_t>(a.end)});
  }
  void memory(const MemoryEvent&) override {
    if (on_memory) on_memory();
  }
  void started(StreamId s, Tick, const char*) override {
    operations.back().begin = device.context().executor().seconds(s);
  }
  void finished(StreamId s, Tick, const char*) override {
    operations.back().end = device.context().executor().seconds(s);
  }
  Device device;
  std::vector<Operation> operations;
  std::function<void()> on_memory;
};

// --- slots ---

struct Block final : nn::Module {
  Block() : up(32, 64, {.bias = false}), down(64, 32, {.bias = false}) {
    register_module("up", up);
    register_module("down", down);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] { return down(tanh(up(x))); });
  }
  nn::Linear up, down;
};

struct Model final : nn::Module {
  Model() {
    for (int i = 0; i < 3; ++i) blocks.emplace_back();
    register_module("blocks", blocks);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      Tensor h = x;
      for (Block& block : blocks) h = block(h);
      return mean(h * h);
    });
  }
  nn::ModuleList<Block> blocks;
};

// What lies in a part of the arena for some time: full parameters, or a piece of gradients.
struct Holder {
  char sign = ' ';
  Range bytes;
  double begin = 0, end = 0;
};

// 'A' for the parameters of block 0, 'a' for its gradients.
char sign_of(const Operation& op, char first) {
  const std::size_t at = op.name.find("blocks.");
  return at == std::string::npos ? '?' : static_cast<char>(first + op.name.at(at + 7) - '0');
}

std::vector<Holder> holders_of(const std::vector<Operation>& operations) {
  std::vector<Holder> parameters, gradients;
  std::vector<std::pair<Range, double>> written;  // gradients that are not yet reduced
  double packed = 0;
  for (const Operation& op : operations) {
    if (op.is("pack_shard")) packed = op.begin;
    if (op.is("all_gather"))
      parameters.push_back({sign_of(op, 'A'), op.writes.at(0), packed, op.end});
    if (op.is("reduce_scatter")) {
      Holder piece{sign_of(op, 'a'), op.reads.at(0), op.begin, op.end};
      for (const auto& [range, begin] : written)
        if (piece.bytes.contains(range)) piece.begin = std::min(piece.begin, begin);
      std::erase_if(written, [&](const auto& w) { return piece.bytes.contains(w.first); });
      gradients.push_back(piece);
    }
    if (op.stream != StreamId::compute) continue;
    for (const Range& range : op.writes) written.emplace_back(range, op.begin);
    for (const Range& range : op.reads) {
      const auto last = std::find_if(parameters.rbegin(), parameters.rend(),
                                     [&](const Holder& h) { return h.bytes.contains(range); });
      if (last != parameters.rend()) last->end = std::max(last->end, op.end);
    }
  }
  parameters.insert(parameters.end(), gradients.begin(), gradients.end());
  return parameters;
}

// Each column is a stretch of time; `sign_at(time)` says what is drawn there.
std::string row(const std::string& title, double begin, double end,
                const std::function<std::string(double)>& sign_at) {
  std::string text = padded(title, 10) + "│";
  for (std::size_t column = 0; column < kColumns; ++column)
    text += sign_at(begin + (end - begin) * (static_cast<double>(column) + 0.5) / kColumns);
  return text + "│\n";
}

}  // namespace

std::string slots_of_a_step() {
  constexpr std::int64_t kMatrix = 32 * 64 * 4;
  const World world = World::emulated(
      0, 2,
      {.executor = ExecutorKind::virtual_,
       .cost = {.flops_per_second = 1e9, .bytes_per_second = 1e12, .wire_bytes_per_second = 5e7}});
  Model model;
  const ShardOptions options{.mesh = DeviceMesh::flat(world), .piece_bytes = kMatrix};
  for (Block& block : model.blocks) fully_shard(block, options);
  fully_shard(model, options);
  model.materialize(world.device());
  Recorder recorder(world.device());
  model(Tensor::zeros({64, 32}, f32, world.device())).backward();
  world.device().synchronize();

  const std::vector<Holder> holders = holders_of(recorder.operations);
  double begin = recorder.operations.back().end, end = 0;
  std::uintptr_t base = holders.at(0).bytes.begin;
  for (const Holder& holder : holders) {
    begin = std::min(begin, holder.begin);
    end = std::max(end, holder.end);
    base = std::min(base, holder.bytes.begin);
  }
  const ShardPlan plan = shard_plan(model);
  std::string text = concat("Three blocks of two matrices of ", kMatrix,
                            " bytes each, on 2 ranks, prefetch depth 1. Time goes right.\n"
                            "A is where the full parameters of block 0 lie, a where a piece of its "
                            "gradients does, until it is\nreduced. ·: free.\n\n");
  for (std::int64_t offset = 0; offset < plan.arena_bytes; offset += kMatrix) {
    const std::uintptr_t at = base + static_cast<std::uintptr_t>(offset);
    text += row(concat(offset, ':'), begin, end, [&](double time) {
      for (const Holder& h : holders)
        if (h.bytes.contains({at, at + 1}) && h.begin <= time && time < h.end)
          return std::string(1, h.sign);
      return std::string("·");
    });
  }
  text += '\n';
  for (const StreamId stream : {StreamId::gather, StreamId::compute, StreamId::reduce})
    text += row(std::string(name(stream)), begin, end, [&](double time) {
      for (const Operation& op : recorder.operations)
        if (op.stream == stream && op.begin <= time && time < op.end && !op.is("complete_"))
          return stream == StreamId::gather   ? std::string(1, sign_of(op, 'A'))
                 : stream == StreamId::reduce ? std::string(1, sign_of(op, 'a'))
                                              : std::string("▒");
      return std::string(" ");
    });
  text += concat("\nThe arena has ", plan.arena_bytes, " bytes, ", plan.most_alive_bytes,
                 " of them taken at one time; all slots together would have ", 12 * kMatrix, ".\n");
  return text;
}

// --- who holds how much ---

std::string peak_of_a_step() {
  const World world = World::emulated(0, 2, {.executor = ExecutorKind::virtual_});
  nn::Llama model({.dim = 64,
                   .n_layers = 3,
                   .n_heads = 4,
                   .ffn_dim = 192,
                   .vocab_size = 512,
                   .max_seq_len = 128,
                   .recompute = nn::Recompute::blocks},
                  Device::meta());
  const ShardOptions options{.mesh = DeviceMesh::flat(world), .piece_bytes = 1 << 15};
  for (nn::Module* const part : model.parts()) fully_shard(*part, options);
  fully_shard(model, options);
  model.materialize(world.device());
  optim::AdamW optimizer(model.parameters());
  optimizer.prepare();
  shard_plan(model);
  Ledger& ledger = Memory::of(world.device()).ledger();
  ledger.reset_peak();
  std::vector<std::vector<Ledger::Line>> samples;
  Recorder recorder(world.device());
  recorder.on_memory = [&] { samples.push_back(ledger.lines()); };
  const std::vector<std::int32_t> tokens(512);
  const auto batch = [&] { return Tensor::from(tokens, {4, 128}, world.device()); };
  model.loss(batch(), batch()).backward();
  optimizer.step();
  optimizer.zero_grad();

  std::string text = concat(
      "A Llama of 3 recomputed blocks on 2 ranks, over one step, in the order in which memory is "
      "taken\nand given back. Bytes at the peak of ",
      ledger.peak_bytes(), ", the most of each owner, and how much of that it holds.\n\n");
  const char* const levels[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const auto line = [&](const std::string& title, std::int64_t at_peak, const auto& bytes_of) {
    constexpr std::size_t kWide = 62;
    std::vector<std::int64_t> columns;  // the most of the operations in each
    for (std::size_t column = 0; column < kWide; ++column) {
      const std::size_t first = column * samples.size() / kWide,
                        last = (column + 1) * samples.size() / kWide;
      columns.push_back(bytes_of(samples[first]));
      for (std::size_t i = first; i < last; ++i)
        columns.back() = std::max(columns.back(), bytes_of(samples[i]));
    }
    const std::int64_t most = *std::max_element(columns.begin(), columns.end());
    text += padded(title, 15) + padded(concat(at_peak), 9) + padded(concat(most), 9) + "│";
    for (const std::int64_t bytes : columns) text += levels[(bytes * 8 + most - 1) / most];
    text += "│\n";
  };
  const auto bytes_of = [](const std::vector<Ledger::Line>& lines, const std::string* owner) {
    std::int64_t sum = 0;
    for (const Ledger::Line& l : lines)
      if (!owner || l.owner == *owner) sum += l.live_bytes;
    return sum;
  };
  std::vector<Ledger::Line> owners = ledger.lines();
  std::stable_sort(owners.begin(), owners.end(),
                   [](const auto& a, const auto& b) { return a.at_peak_bytes > b.at_peak_bytes; });
  for (const Ledger::Line& owner : owners)
    if (owner.at_peak_bytes > 0)
      line(owner.owner, owner.at_peak_bytes,
           [&](const auto& lines) { return bytes_of(lines, &owner.owner); });
  line("all", ledger.peak_bytes(), [&](const auto& lines) { return bytes_of(lines, nullptr); });
  return text;
}

}  // namespace tessera::pictures
