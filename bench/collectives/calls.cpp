#include "bench/collectives/calls.hpp"

#include <algorithm>

namespace tessera::collectives {
namespace {

// What rank `rank` of `ranks` sends at element `i`. Of very many ranks only some send more than 0.
int value(int rank, int ranks, std::int64_t i) {
  constexpr int kMostSenders = 64;
  const int stride = (ranks + kMostSenders - 1) / kMostSenders;
  if ((rank + i) % stride != 0) return 0;
  const int below = 128 / std::min(ranks, kMostSenders);
  const std::uint64_t mixed = ((static_cast<std::uint64_t>(i) + 1) * 0x9E3779B97F4A7C15u) ^
                              ((static_cast<std::uint64_t>(rank) + 1) * 0xC2B2AE3D27D4EB4Fu);
  return static_cast<int>(((mixed * 0x165667B19E3779F9u) >> 40) % static_cast<unsigned>(below));
}

int reduced(ReduceOp op, int ranks, std::int64_t i) {
  int result = 0;  // values are at least 0
  for (int r = 0; r < ranks; ++r) {
    const int one = value(r, ranks, i);
    result = op == ReduceOp::sum ? result + one : std::max(result, one);
  }
  return result;
}

}  // namespace

Row::Row(const Operation& of, DType type, std::int64_t most_bytes, int own_rank, int size)
    : operation(of), dtype(type), rank(own_rank), ranks(size) {
  const std::int64_t all = most_bytes / width(), lane = 16 / width();
  const std::int64_t part = all / size / lane * lane;  // chunks of 16 bytes
  const double others = static_cast<double>(size - 1) / size;
  count = send_count = recv_count = all;
  switch (of.kind) {
    case CollectiveKind::all_gather:
    case CollectiveKind::reduce_scatter:
    case CollectiveKind::all_to_all:
      count = part;
      send_count = of.kind == CollectiveKind::all_gather ? part : part * size;
      recv_count = of.kind == CollectiveKind::reduce_scatter ? part : part * size;
      bus_factor = others;
      break;
    case CollectiveKind::all_reduce:
      bus_factor = 2 * others;
      break;
    default:
      break;
  }
}

bool Row::reduces() const {
  return operation.kind == CollectiveKind::reduce_scatter ||
         operation.kind == CollectiveKind::all_reduce || operation.kind == CollectiveKind::reduce;
}

bool Row::has_root() const {
  return operation.kind == CollectiveKind::broadcast || operation.kind == CollectiveKind::reduce;
}

bool Row::can_be_in_place() const {
  if (ranks == 1) return true;
  if (operation.kind == CollectiveKind::send_recv) return false;
  const bool needs_room =
      operation.kind == CollectiveKind::all_reduce || operation.kind == CollectiveKind::all_to_all;
  return !needs_room || send_count * width() <= kStagedBytes;
}

std::int64_t Row::own_values_at(bool in_place) const {
  return in_place && operation.kind == CollectiveKind::all_gather ? count * width() * rank : 0;
}

std::int64_t Row::results_at(bool in_place) const {
  return in_place && operation.kind == CollectiveKind::reduce_scatter ? count * width() * rank : 0;
}

std::vector<std::vector<Collective>> Row::calls(std::byte* send, std::byte* recv,
                                                bool in_place) const {
  const Collective call{.send = in_place ? recv + own_values_at(true) : send,
                        .recv = recv + results_at(in_place),
                        .count = count,
                        .kind = operation.kind,
                        .dtype = dtype,
                        .reduce = reduction,
                        .root = std::max(root, 0)};
  if (operation.kind != CollectiveKind::send_recv) return {{call}};
  std::vector<Collective> ring;
  for (int from = 0; from < ranks; ++from) {
    Collective& item = ring.emplace_back(call);
    item.root = from;
    item.target = (from + 1) % ranks;
    if (item.root != rank) item.send = nullptr;
    if (item.target != rank) item.recv = nullptr;
  }
  constexpr std::int64_t kLine = 64;
  const std::int64_t room = kStagedBytes / kLine, lines = (bytes() + kLine - 1) / kLine;
  const std::int64_t staged = lines == 0 ? ranks : std::min<std::int64_t>(ranks, room / lines);
  if (ranks - staged <= room - staged * lines) return {ring};
  std::vector<std::vector<Collective>> one_by_one;
  for (const Collective& item : ring) one_by_one.push_back({item});
  return one_by_one;
}

std::vector<float> Row::sent() const {
  std::vector<float> values(static_cast<std::size_t>(send_count));
  for (std::int64_t i = 0; i < send_count; ++i)
    values[static_cast<std::size_t>(i)] = static_cast<float>(value(rank, ranks, i));
  return values;
}

std::vector<float> Row::expected() const {
  if (operation.kind == CollectiveKind::reduce && rank != root) return {};
  const auto one = [&](std::int64_t i) {
    switch (operation.kind) {
      case CollectiveKind::all_gather:
        return value(static_cast<int>(i / count), ranks, i % count);
      case CollectiveKind::reduce_scatter:
        return reduced(reduction, ranks, rank * count + i);
      case CollectiveKind::all_to_all:
        return value(static_cast<int>(i / count), ranks, rank * count + i % count);
      case CollectiveKind::broadcast:
        return value(root, ranks, i);
      case CollectiveKind::send_recv:
        return value((rank + ranks - 1) % ranks, ranks, i);
      default:
        return reduced(reduction, ranks, i);
    }
  };
  std::vector<float> values(static_cast<std::size_t>(recv_count));
  for (std::int64_t i = 0; i < recv_count; ++i)
    values[static_cast<std::size_t>(i)] = static_cast<float>(one(i));
  return values;
}

}  // namespace tessera::collectives
