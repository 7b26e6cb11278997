// Modules of NCCL and of the emulated GPU, in one, that make a mistake on purpose: what lies above
// calls them right, so each passes its calls on in another order, or not at all. The mistake is
// TESSERA_NCCL_MISTAKE.
//
//   keeps_graphs              graphs are there when communicators are aborted, or a world ends
//   aborts_one_by_one         instead of all communicators of a rank at once
//   uses_an_old_id            that of the attempt before
//   makes_in_other_order      rank 1 makes another communicator first
//   registers_in_other_order  rank 1 its memory
//   asks_captured_events      whether they are reached
//   rounds_at_each_hop        a sum of 16-bit values, as ncclSum does
//
// TESSERA_NCCL_VERSION is that of NCCL, and TESSERA_NCCL_DRIVER that of CUDA which the machine's
// driver knows. Where TESSERA_NCCL_SLOW is set, time passes by what is called alone, and ways that
// are named are slow:
//
//   standard, zero    gathers, by whether they have the policy of no CTAs
//   most, few         reductions, by whether their CTAs are capped
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <map>
#include <string_view>

#include "kernels/kernel_table.hpp"
#include "kernels/nccl/nccl_driver.hpp"
#include "tessera/detail/device/driver.hpp"

namespace tessera {
namespace {

using kernels::NcclDriver;
using kernels::NcclError;
using kernels::NcclId;
using kernels::NcclShape;

bool makes(std::string_view mistake) {
  const char* const made = std::getenv("TESSERA_NCCL_MISTAKE");
  return made && mistake == made;
}

template <class Entry>
const auto* table_of(const char* module, const char* symbol, std::uint32_t version) {
  void* const handle = dlopen(module, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  return reinterpret_cast<Entry>(dlsym(handle, symbol))(version);
}

const NcclDriver* g_nccl = nullptr;
const Driver* g_gpu = nullptr;
int g_rank = 0;

const kernels::Kernels& kernels_of_gpu() {
  return *static_cast<const kernels::Kernels*>(g_gpu->kernels);
}

// ---- time

double g_seconds = 0;
std::map<void*, double> g_reached;     // by event
std::map<void**, NcclShape> g_shapes;  // by where the communicator is written

// Any call takes a millisecond, a slow one two.
void pass_time(void* comm, bool gathers) {
  g_seconds += 1e-3;
  const char* const named = std::getenv("TESSERA_NCCL_SLOW");
  if (!named) return;
  for (const auto& [out, shape] : g_shapes) {
    if (*out != comm) continue;
    const std::string_view way = gathers ? (shape.has_zero_ctas ? "zero" : "standard")
                                         : (shape.most_blocks > 0 ? "few" : "most");
    if (std::string_view(named).find(way) != std::string_view::npos) g_seconds += 1e-3;
  }
}
NcclError open(const char* file, kernels::NcclLibrary* out) {
  const NcclError error = g_nccl->open(file, out);
  if (const char* const said = std::getenv("TESSERA_NCCL_VERSION")) out->version = std::atoi(said);
  return error;
}
NcclError all_gather(const void* send, void* recv, std::int64_t bytes, void* comm, void* stream) {
  pass_time(comm, true);
  return g_nccl->all_gather(send, recv, bytes, comm, stream);
}
NcclError reduce_scatter(const void* send, void* recv, std::int64_t count, kernels::NcclSum as,
                         void* comm, void* stream) {
  pass_time(comm, false);
  return g_nccl->reduce_scatter(send, recv, count, as, comm, stream);
}
DriverError elapsed(void* from, void* to, double* seconds) {
  *seconds = g_reached[to] - g_reached[from];
  return nullptr;
}
DriverError describe(std::int32_t device, DriverDevice* out) {
  const DriverError error = g_gpu->describe(device, out);
  if (const char* const known = std::getenv("TESSERA_NCCL_DRIVER"))
    out->cuda_version = std::atoi(known);
  return error;
}
// Of bf16, which nobody else computes in here.
void product(const kernels::GemmArgs& args, Exec& exec) {
  const bool is_timed = std::getenv("TESSERA_NCCL_SLOW") && args.dtype == DType::bf16;
  if (!is_timed) return kernels_of_gpu().gemm(args, exec);
  g_seconds += 1e-3;
}

// ---- mistakes

// In rank order; a ring begins elsewhere, and rounds as often.
void reduce_peers(const kernels::PeersArgs& args, Exec& exec) {
  const auto sum = kernels_of_gpu().reduce_peers;
  if (!makes("rounds_at_each_hop") || size_bytes(args.dtype) != 2 || args.n_inputs < 3)
    return sum(args, exec);
  kernels::PeersArgs hop = args;
  std::array<const void*, 2> pair{args.inputs[0], args.inputs[1]};
  hop.inputs = pair.data();
  hop.n_inputs = 2;
  for (std::int32_t i = 1; i < args.n_inputs; ++i) {
    pair[1] = args.inputs[i];
    sum(hop, exec);
    pair[0] = args.out;
  }
}

NcclError make_id(NcclId* out) {
  static NcclId first;
  static bool is_there = false;
  const NcclError error = g_nccl->make_id(out);
  if (error || !makes("uses_an_old_id")) return error;
  if (is_there) *out = first;
  first = *out;
  is_there = true;
  return nullptr;
}

NcclError join(const NcclId* id, std::int32_t size, std::int32_t rank, void** comm) {
  g_rank = rank;
  return g_nccl->join(id, size, rank, comm);
}

NcclError settle(void* comm) {
  for (bool is_busy = true; is_busy;)
    if (const NcclError error = g_nccl->poll(comm, &is_busy)) return error;
  return nullptr;
}

NcclError split(void* comm, std::int32_t color, std::int32_t key, const NcclShape* shape,
                void** out) {
  static bool is_first = true;
  if (makes("makes_in_other_order") && g_rank == 1 && is_first) {
    is_first = false;
    static void* other = nullptr;
    const NcclShape one{.most_blocks = 1, .has_zero_ctas = 0};
    if (const NcclError error = g_nccl->split(comm, color + 1, key, &one, &other)) return error;
    if (const NcclError error = settle(comm)) return error;
  }
  g_shapes[out] = *shape;
  return g_nccl->split(comm, color, key, shape, out);
}

NcclError make_window(void* comm, void* data, std::int64_t bytes, void** window) {
  static void* kept = nullptr;
  static std::int64_t kept_bytes = 0;
  static void* of_kept = nullptr;
  if (!makes("registers_in_other_order") || g_rank != 1)
    return g_nccl->make_window(comm, data, bytes, window);
  if (!kept) {  // behind the next one
    kept = data;
    kept_bytes = bytes;
    return nullptr;
  }
  if (const NcclError error = g_nccl->make_window(comm, data, bytes, window)) return error;
  if (const NcclError error = settle(comm)) return error;
  return g_nccl->make_window(comm, kept, kept_bytes, &of_kept);
}

NcclError abort(void* const* comms, std::int32_t count) {
  if (!makes("aborts_one_by_one")) return g_nccl->abort(comms, count);
  for (std::int32_t i = 0; i < count; ++i)
    if (const NcclError error = g_nccl->abort(comms + i, 1)) return error;
  return nullptr;
}

bool g_captures = false;

DriverError begin_capture(void* stream) {
  g_captures = true;
  return g_gpu->begin_capture(stream);
}
DriverError end_capture(void* stream, void** graph) {
  g_captures = false;
  return g_gpu->end_capture(stream, graph);
}
DriverError end_graph(void* graph) {
  return makes("keeps_graphs") ? nullptr : g_gpu->end_graph(graph);
}
DriverError record(void* event, void* stream) {
  g_reached[event] = g_seconds;
  const DriverError error = g_gpu->record(event, stream);
  if (error || !g_captures || !makes("asks_captured_events")) return error;
  bool is_reached = false;
  return g_gpu->query(event, &is_reached);
}

}  // namespace
}  // namespace tessera

#define SHOWN extern "C" [[gnu::visibility("default")]]

SHOWN const tessera::kernels::NcclDriver* tessera_nccl(std::uint32_t version) {
  using namespace tessera;
  static const kernels::NcclDriver mistaken = [&] {
    g_nccl = table_of<kernels::NcclEntry>(TESSERA_NCCL_MODULE, kernels::kNcclSymbol, version);
    kernels::NcclDriver table = *g_nccl;
    table.make_id = make_id;
    table.join = join;
    table.split = split;
    table.make_window = make_window;
    table.abort = tessera::abort;
    table.open = tessera::open;
    table.all_gather = all_gather;
    table.reduce_scatter = reduce_scatter;
    return table;
  }();
  return &mistaken;
}

SHOWN const tessera::Driver* tessera_driver(std::uint32_t version) {
  using namespace tessera;
  static const Driver mistaken = [&] {
    g_gpu = table_of<DriverEntry>(TESSERA_QUEUED_MODULE, kDriverSymbol, version);
    Driver table = *g_gpu;
    table.begin_capture = begin_capture;
    table.end_capture = end_capture;
    table.end_graph = end_graph;
    table.record = record;
    table.describe = describe;
    if (std::getenv("TESSERA_NCCL_SLOW")) table.elapsed = elapsed;
    static kernels::Kernels with = kernels_of_gpu();
    with.reduce_peers = reduce_peers;
    with.gemm = product;
    table.kernels = &with;
    return table;
  }();
  return &mistaken;
}
