// What saves and loads hold beside the shards: pieces of 4 MiB, four a rank that saves, two a rank
// that loads, whatever the size of a tensor, the order and the dtype that files have it in. Counted
// where it lies: by the ledger of the device, and by operator new, which sanitizers do not count.
#pragma once

#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/memory/memory.hpp"
#include "tests/promises/allocations.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/temporary_folder.hpp"

namespace tessera::testing {

inline constexpr std::int64_t kPiece = 4 << 20;
// A load's lists of names and boxes, and operations in flight: a few KiB.
inline constexpr std::int64_t kSmall = 256 << 10;
inline constexpr std::int64_t kRows = 3 * 512, kColumns = 3 * 1024;  // 18 MiB in f32

// How a matrix lies in files and on ranks.
struct MatrixWay {
  DType dtype = f32;
  bool is_transposed = false;  // in files
  bool has_parts = false;      // there
  int dim = 0;                 // that its ranks cut
  int ranks = 1;
};

class Matrix final : public nn::Module {
 public:
  explicit Matrix(const MatrixWay& way) : is_transposed_(way.is_transposed) {
    if (way.dtype != f32) {
      weight.set_trainable(false);
      weight.set_dtype(way.dtype);
    }
    if (way.has_parts) weight.set_row_parts({{"q", kRows / 3}, {"k", kRows - kRows / 3}});
    register_parameter("weight", weight);
  }
  bool saves_transposed(std::string_view) const override { return is_transposed_; }

  Parameter weight{{kRows, kColumns}, Initializer::normal(0, 1)};

 private:
  bool is_transposed_;
};

// What f takes on top at the most: of the device, and of the heap, which all ranks share.
struct Taken {
  std::int64_t ledger_bytes = 0, heap_bytes = 0;
};
template <class F>
Taken taken_by(World& world, const F& f) {
  world.device().synchronize();
  Ledger& ledger = Memory::of(world.device()).ledger();
  const std::int64_t ledger_before = ledger.live_bytes();
  ledger.reset_peak();
  world.barrier();
  const std::int64_t heap_before = allocations().held_bytes;
  if (world.rank() == 0) reset_peak_of_allocations();
  world.barrier();
  f();
  world.device().synchronize();
  world.barrier();
  const std::int64_t heap_peak = allocations().peak_bytes;
  world.barrier();
  return {ledger.peak_bytes() - ledger_before, heap_peak - heap_before};
}

struct SavedMatrix {
  Taken taken;
  std::vector<float> weight;
};

inline std::unique_ptr<Matrix> sharded(const MatrixWay& way, World& world, std::uint64_t seed) {
  auto model = std::make_unique<Matrix>(way);
  fully_shard(*model, {.mesh = DeviceMesh::flat(world),
                       .shard_placement_fn = [&](const Parameter&) { return Shard{way.dim}; }});
  model->materialize(world.device());
  nn::init(*model, {seed});
  return model;
}

// Saves a matrix one way, and loads it the other, on ranks with these options.
inline void check_load_memory(const MatrixWay& from, const MatrixWay& into,
                              const WorldOptions& options) {
  const TemporaryFolder folder;
  const std::string path = folder.path().string();
  // Without the race checker, whose books are on the heap.
  std::vector<SavedMatrix> saved(static_cast<std::size_t>(from.ranks)),
      loaded(static_cast<std::size_t>(into.ranks));
  run_local(from.ranks, options, [&](World& world) {
    const auto model = sharded(from, world, 1);
    const Taken taken = taken_by(
        world, [&] { checkpoint::save(path, 1, {checkpoint::part(*model, world)}, {}, world); });
    saved[static_cast<std::size_t>(world.rank())] = {taken, full_values(*model).begin()->second};
  });
  run_local(into.ranks, options, [&](World& world) {
    const auto model = sharded(into, world, 2);
    const auto source = checkpoint::Checkpoint(path, 1).part("model");
    const Taken taken = taken_by(world, [&] { model->load(*source); });
    loaded[static_cast<std::size_t>(world.rank())] = {taken, full_values(*model).begin()->second};
  });
  std::vector<float> expected = saved[0].weight;
  if (into.dtype == bf16)
    for (float& value : expected) value = static_cast<float>(BFloat16(value));
  const auto check = [](const std::vector<SavedMatrix>& ranks, std::int64_t pieces) {
    for (const auto& [taken, weight] : ranks) {
      INFO(taken.ledger_bytes << " bytes of the device and " << taken.heap_bytes
                              << " of the heap for " << ranks.size() << " ranks, " << pieces
                              << " pieces each");
      CHECK(std::ssize(ranks) * taken.ledger_bytes + taken.heap_bytes <=
            std::ssize(ranks) * (pieces * kPiece + kSmall));
    }
  };
  check(saved, 4);
  check(loaded, 2);
  for (const SavedMatrix& rank : loaded) CHECK(same_bits(rank.weight, expected));
}

// All of them, each a section.
inline void check_load_memory(const WorldOptions& options) {
  const auto check = [&](const MatrixWay& from, const MatrixWay& into) {
    check_load_memory(from, into, options);
  };
  SECTION("as files have them") { check({}, {}); }
  SECTION("of several ranks' files, on several") { check({.ranks = 2}, {.ranks = 3}); }
  SECTION("in 16 bits, of 32") { check({}, {.dtype = bf16}); }
  SECTION("in 32 bits, of 16") { check({.dtype = bf16}, {}); }
  SECTION("transposed") { check({.is_transposed = true}, {.is_transposed = true}); }
  SECTION("transposed and in 16 bits") {
    check({.is_transposed = true, .ranks = 2}, {.dtype = bf16, .is_transposed = true, .ranks = 3});
  }
  SECTION("in row parts") { check({.has_parts = true}, {.has_parts = true, .ranks = 2}); }
  SECTION("of columns") { check({.dim = 1, .ranks = 3}, {}); }
  SECTION("into columns") { check({}, {.dim = 1, .ranks = 2}); }
  SECTION("of columns into others, in 16 bits") {
    check({.dim = 1, .ranks = 3}, {.dtype = bf16, .dim = 1, .ranks = 2});
  }
}

}  // namespace tessera::testing
