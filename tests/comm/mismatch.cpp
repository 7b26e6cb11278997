#include "tests/comm/mismatch.hpp"

#include <algorithm>
#include <cstring>

#include "tessera/base/error.hpp"

using namespace tessera;
using K = CollectiveKind;

namespace mismatch {
namespace {

constexpr std::int64_t kArenaBytes = 16384, kGoodBytes = 4096;
constexpr std::byte kPattern{0x5a};

// `place` counts pieces of 512 bytes: room for 16 floats of each of 4 ranks, and for as many again.
Collective item(std::byte* arena, int place, K kind, std::int64_t count = 4, DType dtype = f32,
                ReduceOp reduce = ReduceOp::sum, int root = 0) {
  std::byte* const at = arena + kGoodBytes + place * 1024;
  return {.send = at,
          .recv = at + 512,
          .count = count,
          .kind = kind,
          .dtype = dtype,
          .reduce = reduce,
          .root = root};
}

void op(World& w, std::byte* a, bool odd) {
  w.gather().submit(item(a, 0, odd ? K::all_gather : K::reduce_scatter), "unit", {});
}
void order(World& w, std::byte* a, bool odd) {
  w.gather().submit(item(a, 0, K::all_gather, odd ? 3 : 2), odd ? "b" : "a", {});
  w.gather().submit(item(a, 1, K::all_gather, odd ? 2 : 3), odd ? "a" : "b", {});
}
void count(World& w, std::byte* a, bool odd) {
  w.reduce().submit(item(a, 0, K::reduce_scatter, odd ? 7 : 8), "unit", {});
}
void dtype(World& w, std::byte* a, bool odd) {
  w.gather().submit(item(a, 0, K::all_gather, 4, odd ? i32 : f32), "unit", {});
}
void reduce_op(World& w, std::byte* a, bool odd) {
  w.reduce().submit(item(a, 0, K::reduce_scatter, 4, f32, odd ? ReduceOp::max : ReduceOp::sum),
                    "unit", {});
}
void root(World& w, std::byte* a, bool odd) {
  w.control().submit(item(a, 0, K::broadcast, 4, f32, ReduceOp::sum, odd ? 1 : 0), "unit", {});
}
void target(World& w, std::byte* a, bool odd) {
  Collective pass = item(a, 0, K::send_recv);
  pass.target = odd ? 1 : 0;
  w.control().submit(pass, "unit", {});
}
void chunk(World& w, std::byte* a, bool odd) {
  w.control().submit(item(a, 0, K::all_to_all, odd ? 3 : 4), "unit", {});
}
void group(World& w, std::byte* a, bool odd) {
  (odd ? w.reduce() : w.gather()).submit(item(a, 0, K::all_gather), "unit", {});
}
void across(World& w, std::byte* a, bool odd) {
  if (odd) w.reduce().submit(item(a, 1, K::reduce_scatter), "reduce", {});
  w.gather().submit(item(a, 0, K::all_gather), "gather", {});
  if (!odd) w.reduce().submit(item(a, 1, K::reduce_scatter), "reduce", {});
}
void extra(World& w, std::byte* a, bool odd) {
  if (odd) w.gather().submit(item(a, 1, K::all_gather), "extra", {});
  w.reduce().submit(item(a, 0, K::reduce_scatter), "unit", {});
}
void missing(World& w, std::byte* a, bool odd) {
  if (!odd) w.gather().submit(item(a, 0, K::all_gather), "first", {});
  w.gather().submit(item(a, 1, K::all_gather), "second", {});
}
void twice(World& w, std::byte* a, bool odd) {
  w.control().submit(item(a, 0, K::barrier, 0), "tick", {});
  if (odd) w.control().submit(item(a, 0, K::barrier, 0), "tick", {});
  w.control().submit(item(a, 1, K::all_reduce), "unit", {});
}
// The input is made on the compute stream, and the odd rank forgets the edge.
void stream(World& w, std::byte* a, bool odd) {
  LastUse use;
  const Access access{&use, a, a + kArenaBytes, AccessMode::write};
  w.device().compute().launch({.name = "make", .accesses = {&access, 1}}, [](Exec&) {});
  if (!odd) w.device().gather().wait(w.device().compute().record());
  w.gather().submit(item(a, 0, K::all_gather), "unit", {&access, 1});
}
void alias(World& w, std::byte* a, bool odd) {
  CollectiveGroup group("unit");
  group.edit().push_back(item(a, 0, K::all_gather));
  group.edit().push_back(item(a, 1, K::all_gather));
  if (odd) group.edit()[1].recv = static_cast<std::byte*>(group.edit()[0].recv) + 16;
  w.gather().submit(group, {});
  w.device().synchronize();  // the group goes
}

bool is_pattern(const std::byte* arena) {
  return std::all_of(arena + kGoodBytes, arena + kArenaBytes,
                     [](std::byte b) { return b == kPattern; });
}

}  // namespace

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"operation", op, {"call 3", "all_gather of 4 x f32", "reduce_scatter of 4 x f32"}},
      {"order", order, {"call 3", "'a'", "'b'"}},
      {"count", count, {"call 3", "of 7 x f32", "of 8 x f32"}},
      {"dtype", dtype, {"call 3", "of 4 x i32", "of 4 x f32"}},
      {"reduce operation", reduce_op, {"call 3", "of 4 x f32, max", "of 4 x f32)"}},
      {"root", root, {"call 3", "from rank 0", "from rank 1"}},
      {"target", target, {"call 3", "from rank 0 to rank 0", "from rank 0 to rank 1"}},
      {"chunk", chunk, {"call 3", "all_to_all of 3 x f32", "all_to_all of 4 x f32"}},
      {"group", group, {"call 3", "'unit' on 'gather'", "'unit' on 'reduce'"}},
      {"order across groups", across, {"call 3", "on 'gather'", "on 'reduce'"}},
      {"extra", extra, {"call 3", "'extra'", "'unit'"}},
      {"missing", missing, {"call 3", "'first'", "'second'"}},
      {"double", twice, {"call 4", "'tick'", "'unit'"}},
      {"stream", stream, {"stream gather writes memory", "of stream compute"}, true},
      {"alias", alias, {"items 0 and 1 overlap"}, true},
  };
  return all;
}

Heard provoke(World& world, const Kind& kind, int odd) {
  const auto arena = world.allocate_symmetric(kArenaBytes);
  std::memset(arena->data(), 0, kGoodBytes);
  std::memset(arena->data() + kGoodBytes, static_cast<int>(kPattern), kArenaBytes - kGoodBytes);
  Heard heard;
  try {
    world.barrier();
    world.gather().submit(
        {.send = arena->data(), .recv = arena->data() + 2048, .count = 4, .kind = K::all_gather},
        "good", {});
    world.device().synchronize();
    kind.submit(world, arena->data(), world.rank() == odd);
    world.device().synchronize();
  } catch (const CommError& error) {
    heard = {"CommError", error.what()};
  } catch (const ContractError& error) {
    heard = {"ContractError", error.what()};
  } catch (const std::exception& error) {
    heard = {"another", error.what()};
  }
  heard.untouched = is_pattern(arena->data());
  return heard;
}

std::string verdict(const Heard& heard, const Kind& kind, int rank, int odd) {
  const auto wrong = [&](const std::string& what) {
    return concat(kind.name, " on rank ", odd, ", heard by rank ", rank, ": ", what, ": ",
                  heard.type, ": ", heard.message);
  };
  if (!heard.untouched) return wrong("an output was touched");
  const bool is_refused = kind.refused && rank == odd;
  if (heard.type != (is_refused ? "ContractError" : "CommError")) return wrong("another type");
  const auto says = [&](const std::string& text) {
    return heard.message.find(text) != std::string::npos;
  };
  if (!is_refused && !says(concat("rank ", odd))) return wrong("the rank is not named");
  if (kind.refused && !is_refused) return "";
  bool peer = is_refused;
  for (int r = 0; r < 4; ++r) peer |= r != odd && says(concat("rank ", r));
  if (!peer) return wrong("no peer is named");
  for (const char* part : kind.says)
    if (!says(part)) return wrong(concat("says nothing of \"", part, "\""));
  return "";
}

}  // namespace mismatch
