// Machines that need not be here: what an operation takes on a GPU, from its shape, and a
// collective, from where its ranks are. The device table of `tessera-train --dry-run --machine`,
// whose times are predictions. What of an H100 was measured here:
// bench/results/2026-11-26-h100.txt.
//
//   kernel       │ launch │ the longer of its products and its bytes │
//   collective   │ start  │ hops              │ bytes over the slowest of the links on their way
//   offload      │ launch │ bytes over the link to the host, or through the host's memory
//
// All collectives of a rank share its links: one begins when the one before is through. While one
// is on its way, compute gets less done: it takes multiprocessors and bandwidth of memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "tessera/detail/base/checked.hpp"
#include "tessera/device/op.hpp"

namespace tessera {

// How a collective goes over several machines. ring: along all ranks, one after another, as NCCL
// does. two_level: every GPU exchanges with those of its number in the other machines, by doubling,
// while each machine exchanges within, piece by piece.
enum class WireAlgorithm : std::uint8_t { two_level, ring };

// What an operation waits for most.
enum class Bound : std::uint8_t { compute, memory, launch, wire, host, host_link, host_memory };
constexpr std::string_view name(Bound bound) {
  constexpr std::string_view kNames[] = {"compute", "memory",    "launch",     "wire",
                                         "host",    "host link", "host memory"};
  return kNames[static_cast<std::size_t>(bound)];
}

// Rates are those of one GPU.
struct Machine {
  // A rate that grows with the length of the sequences: half of it at `half_length`.
  struct LengthRate {
    double flops_per_second = 0, half_length = 0;
  };
  // Of heads of up to 64 elements, and of wider ones.
  struct Attention {
    LengthRate narrow, wide;
  };

  std::string_view name;
  std::int64_t memory_bytes = 0;            // of the data sheet
  double peak_flops_per_second = 0;         // of the data sheet, bf16 without sparsity: MFU's
  double product_flops_per_second = 0;      // of large products in bf16, random values
  double fp8_product_flops_per_second = 0;  // of large products of 8-bit floats; 0: it has none
  bool has_fp8_blocks = false;              // products with a scale for 128 of them: sm_90
  double f32_product_flops_per_second = 0;  // without tensor cores
  Attention attention{}, attention_backward{}, ordered_attention_backward{};
  double copy_bytes_per_second = 0;  // read and written
  int multiprocessors = 0;
  double launch_seconds = 0;            // from the end of a kernel to the beginning of the next one
  double host_seconds = 0;              // for which the host is busy with one launch
  int gpus = 8;                         // that NVLink joins: of one machine
  double link_bytes_per_second = 0;     // NVLink, each direction, as collectives get it
  double network_bytes_per_second = 0;  // each direction, as collectives get it
  double start_seconds = 0;             // of a collective
  double link_hop_seconds = 0, network_hop_seconds = 0;  // of a ring's step
  double contention = 0;  // by so much longer compute takes while a collective is on its way
  double host_link_bytes_per_second = 0;    // between a GPU and its host, each direction
  double host_memory_bytes_per_second = 0;  // of the host, read and written: one GPU's share
  // What a program reaches of the GPU's rates of compute and memory: fitted to a run of it.
  double efficiency = 1;
  WireAlgorithm wire = WireAlgorithm::two_level;
};

// Hops and start: NCCL, src/graph/tuning.cc, ring and protocol Simple over NVLink and a network
// (older releases have 9.6e-6 for a hop of the network).
// Contention: NCCL's kernels slow the products beside them by 30 to 40 %, pytorch/pytorch#179937.
// Host link and memory: estimates, 87 % of PCIe 5.0 x16 (PCIe 4.0: the A100's) and four fifths of
// the memory that a DGX's two processors have beside 8 GPUs, by the data sheets.
// Attention, copies and host of the H100: measured by tools/gpu-check, with cuDNN 9 and, in order,
// our own kernels; the host is a virtual machine's, for all. Launches: an estimate.
inline constexpr Machine kH100{
    .name = "h100",
    .memory_bytes = std::int64_t{80} * 1000 * 1000 * 1000,
    .peak_flops_per_second = 989.4e12,          // NVIDIA H100 SXM5 data sheet
    .product_flops_per_second = 794.5e12,       // stas00/ml-engineering, compute/accelerator: MAMF
    .fp8_product_flops_per_second = 1402.6e12,  // there, too
    .has_fp8_blocks = true,
    .f32_product_flops_per_second = 66.9e12,  // data sheet
    .attention = {{557e12, 1240}, {659e12, 614}},
    .attention_backward = {{470e12, 1538}, {601e12, 1773}},
    .ordered_attention_backward = {{381e12, 760}, {392e12, 390}},
    .copy_bytes_per_second = 2.99e12,
    .multiprocessors = 132,
    .launch_seconds = 2e-6,
    .host_seconds = 7e-6,
    .link_bytes_per_second = 361e9,    // all-gather of 8 GPUs: stas00/ml-engineering, network/
    .network_bytes_per_second = 45e9,  // benchmarks; there, too: 365e9 over 4 machines of 8
    .start_seconds = 8.4e-6,
    .link_hop_seconds = 3.4e-6,
    .network_hop_seconds = 14e-6,
    .contention = 0.35,
    .host_link_bytes_per_second = 55e9,
    .host_memory_bytes_per_second = 61e9};

constexpr Machine make_h200() {
  Machine m = kH100;
  m.name = "h200";
  m.memory_bytes = std::int64_t{141} * 1000 * 1000 * 1000;
  m.fp8_product_flops_per_second = 1453.4e12;  // as the H100's
  m.copy_bytes_per_second = 4.3e12;            // measured on one H200 by PyTorch's copy
  return m;
}
inline constexpr Machine kH200 = make_h200();

inline constexpr Machine kB200{
    .name = "b200",
    .memory_bytes = std::int64_t{180} * 1000 * 1000 * 1000,
    .peak_flops_per_second = 2250e12,           // NVIDIA HGX B200 data sheet
    .product_flops_per_second = 1745e12,        // stas00/ml-engineering, compute/accelerator: MAMF
    .fp8_product_flops_per_second = 3432.5e12,  // there, too
    .f32_product_flops_per_second = 75e12,      // data sheet
    // Estimates: somewhat less than the H100's share of the peak, with longer sequences; ours, by
    // warps, is the H100's by the multiprocessors.
    .attention = {{1190e12, 2500}, {1400e12, 1250}},
    .attention_backward = {{1000e12, 3100}, {1280e12, 3500}},
    .ordered_attention_backward = {{259e12, 550}, {259e12, 335}},
    .copy_bytes_per_second = 6.9e12,  // 87 % of the data sheet's 8e12
    .multiprocessors = 148,
    .launch_seconds = 2e-6,
    .host_seconds = 7e-6,
    .link_bytes_per_second = 722e9,  // NVLink 5 has twice the H100's
    .network_bytes_per_second = 45e9,
    .start_seconds = 8.4e-6,
    .link_hop_seconds = 3.4e-6,
    .network_hop_seconds = 14e-6,
    .contention = 0.35,
    .host_link_bytes_per_second = 55e9,
    .host_memory_bytes_per_second = 72e9};

inline constexpr Machine kA100{
    .name = "a100",
    .memory_bytes = std::int64_t{80} * 1000 * 1000 * 1000,
    .peak_flops_per_second = 312e12,          // NVIDIA A100 80GB SXM data sheet
    .product_flops_per_second = 268e12,       // an estimate: 86 % of the peak
    .f32_product_flops_per_second = 19.5e12,  // data sheet
    // FlashAttention-2, Dao 2023: up to 73 and 63 % of the peak; half lengths are estimates, and so
    // is that of ours, which multiplies seven times where five would do.
    .attention = {{228e12, 500}, {228e12, 500}},
    .attention_backward = {{196e12, 700}, {196e12, 700}},
    .ordered_attention_backward = {{140e12, 550}, {140e12, 335}},
    .copy_bytes_per_second = 1.77e12,  // 87 % of the data sheet's 2.04e12
    .multiprocessors = 108,
    .launch_seconds = 2e-6,
    .host_seconds = 7e-6,
    .link_bytes_per_second = 240e9,    // NVLink 3: the H100's share of the data sheet's 300e9
    .network_bytes_per_second = 22e9,  // 200 Gb/s a GPU
    .start_seconds = 8.4e-6,
    .link_hop_seconds = 3.4e-6,
    .network_hop_seconds = 14e-6,
    .contention = 0.35,
    .host_link_bytes_per_second = 27e9,
    .host_memory_bytes_per_second = 41e9};

inline constexpr std::array<Machine, 4> kMachines = {kH100, kH200, kB200, kA100};

// The share of its best rate that a product of this shape has. Tiles of 128 by 128 go over the
// multiprocessors in waves, of which the last one may be short, and a tile of depth k begins and
// ends in the time of 128 more.
constexpr double shape_share(const Machine& machine, const Products& p) {
  constexpr std::int64_t kTile = 128;
  const std::int64_t tiles = ceil_div(p.m, kTile) * ceil_div(p.n, kTile) * p.batch;
  if (tiles == 0) return 1;
  const double whole = static_cast<double>(p.batch) * p.m * p.n;
  const double done = static_cast<double>(round_up(tiles, machine.multiprocessors) * kTile * kTile);
  return whole / done * p.k / static_cast<double>(p.k + kTile);
}

// Floating-point operations a second.
constexpr double product_rate(const Machine& machine, const Products& p) {
  const auto of_length = [&](const Machine::Attention& a) {
    const Machine::LengthRate& rate = p.k <= 64 ? a.narrow : a.wide;
    return rate.flops_per_second * p.n / (p.n + rate.half_length);
  };
  if (p.dtype == DType::f32 && p.kind != Products::Kind::none)
    return machine.f32_product_flops_per_second * shape_share(machine, p);
  if (is_float8(p.dtype)) return machine.fp8_product_flops_per_second * shape_share(machine, p);
  switch (p.kind) {
    case Products::Kind::attention:
      return of_length(machine.attention);
    case Products::Kind::attention_backward:  // short sequences are ours in any order
      return std::max(of_length(machine.attention_backward),
                      of_length(machine.ordered_attention_backward));
    case Products::Kind::ordered_attention_backward:
      return of_length(machine.ordered_attention_backward);
    case Products::Kind::matrix:
      return machine.product_flops_per_second * shape_share(machine, p);
    case Products::Kind::none:
      break;
  }
  return machine.f32_product_flops_per_second;
}

// Of `ranks` ranks, numbered in the world by steps of `rank_step`: how many share a machine.
constexpr int ranks_a_machine(const Machine& machine, int ranks, int rank_step) {
  return std::clamp(machine.gpus / std::max(rank_step, 1), 1, ranks);
}

// An all-gather, reduce-scatter or all-reduce in which each rank sends and receives `wire_bytes` in
// all. alpha-beta: Hockney, Parallel Computing 1994; two levels: Thakur, Rabenseifner, Gropp,
// "Optimization of collective communication operations in MPICH", 2005. The last machine may have
// fewer ranks than the others: all that it gets comes over as few links.
constexpr double collective_seconds(const Machine& machine, int ranks, int rank_step,
                                    double wire_bytes) {
  if (ranks <= 1) return 0;
  const int here = ranks_a_machine(machine, ranks, rank_step);
  const auto machines = static_cast<int>(ceil_div(ranks, here));
  const int last = ranks - (machines - 1) * here;
  const double received = wire_bytes / 2;
  if (machines == 1)
    return machine.start_seconds + (ranks - 1) * machine.link_hop_seconds +
           received / machine.link_bytes_per_second;
  if (machine.wire == WireAlgorithm::ring)
    return machine.start_seconds + (ranks - machines) * machine.link_hop_seconds +
           (machines - 1) * machine.network_hop_seconds +
           received / (here == 1 ? machine.network_bytes_per_second
                                 : std::min(machine.link_bytes_per_second,
                                            last * machine.network_bytes_per_second));
  int doublings = 0;
  while ((1 << doublings) < machines) ++doublings;
  const double chunk = received / (ranks - 1);
  const double across = (ranks - last) * chunk / last / machine.network_bytes_per_second,
               within = (ranks - static_cast<double>(ranks) / here) * chunk /
                        machine.link_bytes_per_second;
  return machine.start_seconds + doublings * machine.network_hop_seconds +
         (here - 1) * machine.link_hop_seconds + std::max(across, within);
}

struct Price {
  double seconds = 0;
  Bound bound = Bound::launch;
};

// How long a stream is busy with an operation that has the machine to itself. What `transfer` does
// is a copy, whose bytes are read on one side and written on the other; `offload` is the host's.
constexpr Price price(const Machine& machine, const Cost& cost,
                      StreamId stream = StreamId::compute) {
  if (cost.wire_bytes > 0)
    return {collective_seconds(machine, cost.ranks, cost.rank_step, cost.wire_bytes), Bound::wire};
  if (stream == StreamId::transfer)
    return {machine.launch_seconds + cost.bytes / 2 / machine.host_link_bytes_per_second,
            Bound::host_link};
  if (stream == StreamId::offload)
    return {machine.launch_seconds + cost.bytes / machine.host_memory_bytes_per_second,
            Bound::host_memory};
  const double compute = cost.flops > 0 ? cost.flops / product_rate(machine, cost.products) /
                                              machine.efficiency
                                        : 0,
               memory = cost.bytes / machine.copy_bytes_per_second / machine.efficiency,
               longer = std::max(compute, memory), launches = machine.launch_seconds * cost.kernels;
  return {launches + longer, launches > longer   ? Bound::launch
                             : compute >= memory ? Bound::compute
                                                 : Bound::memory};
}

static_assert(collective_seconds(kH100, 1, 1, 1e9) == 0);
static_assert(collective_seconds(kH100, 64, 1, 1e9) > collective_seconds(kH100, 64, 1, 1e8));
// A ninth rank, alone in its machine, gets all that it receives over its own network.
static_assert(collective_seconds(kH100, 9, 1, 2e9) > 1e9 / kH100.network_bytes_per_second);
static_assert(ranks_a_machine(kH100, 64, 1) == 8 && ranks_a_machine(kH100, 8, 8) == 1);
// 132 tiles are one wave; one more is another.
static_assert(shape_share(kH100, {.batch = 132, .m = 128, .n = 128, .k = 128}) == 0.5);
static_assert(shape_share(kH100, {.batch = 133, .m = 128, .n = 128, .k = 128}) < 0.26);
static_assert(price(kH100, {.bytes = 2.99e12}).bound == Bound::memory);
static_assert(price(kH100, {}).seconds == kH100.launch_seconds);
static_assert(price(kH100, {.kernels = 2}).seconds == 2 * kH100.launch_seconds);
static_assert(price(kH100, {.bytes = 110e9}, StreamId::transfer).seconds > 1);
static_assert(price(kH100, {.bytes = 61e9}, StreamId::offload).seconds > 1);

}  // namespace tessera
