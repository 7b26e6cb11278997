// One unit on two ranks, from the flat group to the flat gradient: a step of it is run and watched,
// and every offset and every value below is read off the memory of that run.
#include <array>
#include <cstring>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/param/parameter_state.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/tour/pictures/pictures.hpp"

namespace tessera::pictures {
namespace {

constexpr int kRanks = 2;

// A copy of memory: what lay there when it was looked at, as numbers.
struct Copied {
  const std::byte* begin = nullptr;
  std::vector<float> values;
  std::int64_t bytes = 0;
};

Copied copy_of(const void* begin, std::int64_t bytes, DType dtype) {
  Copied copy{static_cast<const std::byte*>(begin), {}, bytes};
  for (std::int64_t at = 0; at < bytes; at += static_cast<std::int64_t>(size_bytes(dtype))) {
    std::uint32_t word = 0;
    std::memcpy(&word, copy.begin + at, size_bytes(dtype));
    if (dtype == bf16) word <<= 16;  // the upper half of an f32
    float value = 0;
    std::memcpy(&value, &word, sizeof value);
    copy.values.push_back(value);
  }
  return copy;
}

// Writes down the operations and what they write, and copies what a reduction is about to read.
class Watcher final : public Observer {
 public:
  void executor_launched(StreamId stream, Tick, const Op& op,
                         const CollectiveBarrier*) noexcept override {
    operations.emplace_back(stream, op.name);
    for (const Access& access : op.accesses)
      if (access.mode == AccessMode::write)
        written.push_back(static_cast<const std::byte*>(access.begin));
    const bool reduces = std::string_view(op.name).starts_with("reduce_scatter");
    if (!reduces || op.accesses.empty() || !buffer.values.empty()) return;
    const Access& send = op.accesses[0];
    buffer = copy_of(
        send.begin,
        static_cast<const std::byte*>(send.end) - static_cast<const std::byte*>(send.begin), f32);
  }
  // Where in the buffer something was written: its parts begin there.
  std::vector<std::int64_t> parts() const {
    std::set<std::int64_t> offsets;
    for (const std::byte* begin : written)
      if (begin >= buffer.begin && begin < buffer.begin + buffer.bytes)
        offsets.insert(begin - buffer.begin);
    return {offsets.begin(), offsets.end()};
  }

  std::vector<std::pair<StreamId, std::string>> operations;
  std::vector<const std::byte*> written;
  Copied buffer;
};

// y = x W^T + b, and a look at the full parameters on the way.
class Layer : public nn::Module {
 public:
  Layer() {
    register_parameter("W", W);
    register_parameter("b", b);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] {
      const Tensor whole = W.value(), bias = b.value();
      bias_in_slot = bias.data() - whole.data();
      slot = copy_of(whole.data(), bias_in_slot + 256, whole.dtype());
      return linear(x, whole) + bias;
    });
  }
  Parameter W{Shape{5, 2}, Initializer::constant(0)}, b{Shape{5}, Initializer::constant(0)};
  Copied slot;
  std::int64_t bias_in_slot = 0;  // its offset
};

// What one rank saw.
struct Seen {
  std::vector<float> flat, gradient;
  std::vector<FlatEntry> entries;
  Copied slot, buffer;
  std::int64_t bias_in_slot = 0;
  std::vector<std::int64_t> parts;  // offsets in the buffer
  std::vector<std::pair<StreamId, std::string>> operations;
};

// Values that tell where they come from: W[i][j] = 10 i + j, b[i] = i.
void write_values(const Layer& layer) {
  for (const Parameter& p : {layer.W, layer.b}) {
    const ShardSpec& spec = p.spec();
    std::vector<float> values;
    for (std::int64_t i = spec.owned().begin; i < spec.owned().end; ++i)
      for (std::int64_t j = 0; j < spec.row_numel(); ++j)
        values.push_back(static_cast<float>(p == layer.W ? 10 * i + j : i));
    const Tensor shard = p.shard();
    p.assign(Tensor::from(values, shard.shape(), shard.device()));
  }
}

Seen run_a_step(World& world) {
  Layer layer;
  // In place, as a matrix of a real size travels: packed is what is small.
  fully_shard(layer,
              {.mesh = DeviceMesh::flat(world), .precision = {.param = bf16}, .packed_bytes = 0});
  const Device device = world.device();
  layer.materialize(device);
  write_values(layer);
  const FlatGroup& group = *state_of(layer.W)->group;
  Seen seen{group.values.to_vector<float>(), {}, group.entries, {}, {}, 0, {}, {}};

  Watcher watcher;
  device.synchronize();
  device.context().add_observer(watcher);
  const Tensor x = Tensor::full({1, 2}, world.rank() + 1, bf16, device);
  const Tensor rows = cast(Tensor::arange(5, f32, device), bf16);
  sum(layer(x) * rows).backward();  // dW[i] = i x, db[i] = i
  device.synchronize();
  device.context().remove_observer(watcher);
  seen.gradient = group.gradient.to_vector<float>();
  seen.slot = layer.slot;
  seen.bias_in_slot = layer.bias_in_slot;
  seen.buffer = watcher.buffer;
  seen.parts = watcher.parts();
  seen.operations = watcher.operations;
  return seen;
}

// Numbers of a part, a row of the parameter in a cell.
std::string numbers(const std::vector<float>& values, std::size_t begin, std::size_t count,
                    std::size_t row) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i)
    text += concat(i == 0 ? "" : i % row == 0 ? " | " : " ", values.at(begin + i));
  return text;
}

// The columns of a stage: each a part that begins at a byte, and what each rank has there.
class Stage {
 public:
  explicit Stage(std::string title) : text_(std::move(title) + '\n') {}
  void part(std::int64_t offset_bytes, const std::string& what,
            const std::array<std::string, kRanks>& held) {
    heads_.push_back(concat(offset_bytes, ": ", what));
    for (std::size_t r = 0; r < kRanks; ++r) cells_[r].push_back(held[r]);
  }
  std::string draw() const {
    std::string text = text_;
    for (int r = -1; r < kRanks; ++r) {
      text += padded(r < 0 ? "" : concat("   rank ", r), 10);
      for (std::size_t c = 0; c < heads_.size(); ++c) {
        std::size_t width = heads_[c].size();
        for (const auto& cells : cells_) width = std::max(width, cells[c].size());
        text +=
            "│ " + padded(r < 0 ? heads_[c] : cells_[static_cast<std::size_t>(r)][c], width + 1);
      }
      text += "│\n";
    }
    return text;
  }

 private:
  std::string text_;
  std::vector<std::string> heads_;
  std::array<std::vector<std::string>, kRanks> cells_;
};

// "'pack', 'gather' on gather" for the operations on that stream.
std::string operations_on(const Seen& seen, StreamId stream) {
  std::string text;
  for (const auto& [on, operation] : seen.operations)
    if (on == stream && text.find(operation) == std::string::npos)
      text += concat(text.empty() ? "'" : ", '", operation, "'");
  return concat(text, " on ", name(stream));
}

template <class F>
std::array<std::string, kRanks> of_ranks(const std::array<Seen, kRanks>& seen, const F& f) {
  return {f(seen[0]), f(seen[1])};
}

constexpr std::array<const char*, 2> kNames = {"W", "b"};
constexpr std::array<std::size_t, 2> kRow = {2, 1};

// Of the arrays that a rank has to itself: its chunks, and what lies behind them.
std::string flat_stage(const std::string& title, const std::array<Seen, kRanks>& seen,
                       std::vector<float> Seen::* values, const char* tail) {
  Stage stage(title);
  std::size_t end = 0;
  for (std::size_t p = 0; p < kNames.size(); ++p) {
    const auto begin = static_cast<std::size_t>(seen[0].entries[p].offset),
               chunk = static_cast<std::size_t>(seen[0].entries[p].chunk);
    stage.part(
        static_cast<std::int64_t>(begin * 4), concat(kNames[p], ", own chunk"),
        of_ranks(seen, [&](const Seen& s) { return numbers(s.*values, begin, chunk, kRow[p]); }));
    end = begin + 64;
  }
  if (tail)
    stage.part(static_cast<std::int64_t>(end * 4), tail,
               of_ranks(seen, [&](const Seen& s) { return numbers(s.*values, end, 2, 8); }));
  return stage.draw();
}

// Of memory that holds all chunks: rank 0's, then rank 1's.
std::string whole_stage(const std::string& title, const std::array<Seen, kRanks>& seen,
                        Copied Seen::* copy, const std::vector<std::int64_t>& parts,
                        std::int64_t width) {
  Stage stage(title);
  for (std::size_t p = 0; p < kNames.size(); ++p) {
    const auto chunk = static_cast<std::size_t>(seen[0].entries[p].chunk);
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      const std::int64_t offset = parts.at(p) + static_cast<std::int64_t>(rank * chunk) * width;
      stage.part(offset, concat(kNames[p], ", chunk ", rank), of_ranks(seen, [&](const Seen& s) {
                   return numbers((s.*copy).values, static_cast<std::size_t>(offset / width), chunk,
                                  kRow[p]);
                 }));
    }
  }
  return stage.draw();
}

}  // namespace

std::string unit_on_two_ranks() {
  std::array<Seen, kRanks> seen;
  run_local(kRanks, {.executor = ExecutorKind::inlined, .threads = 1}, [&](World& world) {
    seen[static_cast<std::size_t>(world.rank())] = run_a_step(world);
  });
  const Seen& first = seen[0];
  const std::vector<std::int64_t> in_slot = {0, first.bias_in_slot};
  const std::int64_t counts_at = first.buffer.bytes - kAlignmentBytes;  // they fill the end
  std::string text =
      "A unit of W [5, 2] and b [5] on 2 ranks: a chunk is 3 rows, and rank 1's last row is "
      "padding.\n"
      "W[i][j] is 10 i + j, b[i] is i. Compute in bf16, gradients in f32. n: is an offset in "
      "bytes.\n\n";
  text += flat_stage("1. Flat group, f32: all that a rank keeps", seen, &Seen::flat, nullptr);
  text += concat("      ▼ ", operations_on(first, StreamId::gather), "\n\n");
  text += whole_stage(
      "2. Gather slot, bf16: a rank casts its chunk to where it belongs, the peers' come around it",
      seen, &Seen::slot, in_slot, 2);
  text += concat(
      "      ▼ W and b are read where they lie; backward of rank r has x = [r + 1, r + 1]\n\n");
  text += whole_stage(concat("3. Gradient buffer, f32, ", first.buffer.bytes,
                             " bytes: this rank's gradients of all rows, already times 1/2"),
                      seen, &Seen::buffer, first.parts, 4);
  text += concat(
      "   ", counts_at, ": arrival counts, a copy for each rank: ",
      numbers(first.buffer.values, static_cast<std::size_t>(counts_at / 4), 2 * kRanks, 2), "\n");
  text += concat("      ▼ ", operations_on(first, StreamId::reduce), "\n\n");
  text += flat_stage(
      "4. Flat gradient, f32: the own chunk, summed over ranks; counts say how many ranks had one",
      seen, &Seen::gradient, "arrival counts");
  return text;
}

}  // namespace tessera::pictures
