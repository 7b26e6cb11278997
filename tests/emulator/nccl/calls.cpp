// The collectives: what is wrong with one call, before a group takes it.
#include "tests/emulator/nccl/kernel.hpp"
#include "tests/emulator/nccl/reduce.hpp"
#include "tests/emulator/nccl/state.hpp"

namespace tessera::nccl_double {
namespace {

// Empty: nothing is.
std::string wrong_with(const Call& call, const Comm& comm, cudaStream_t stream) {
  const Control& gpu = *emulator();
  if (!stream) return "the stream is null, and the double has no default stream";
  if (gpu.device_of(stream) != comm.device)
    return "the stream is on GPU " + std::to_string(gpu.device_of(stream)) +
           ", and the communicator on GPU " + std::to_string(comm.device);
  if (call.dtype < 0 || call.dtype >= ncclNumTypes)
    return "invalid type " + std::to_string(static_cast<int>(call.dtype));
  const bool reduces = call.kind == Kind::all_reduce || call.kind == Kind::reduce_scatter;
  if (call.op < 0 || call.op >= ncclNumOps)
    return "invalid reduction operation " + std::to_string(static_cast<int>(call.op));
  if (reduces && !is_reduced(call.dtype))
    return std::string("the double reduces no ") + name_of(call.dtype);
  const bool has_peer = !is_collective(call.kind) || call.kind == Kind::broadcast;
  if (has_peer && (call.peer < 0 || call.peer >= comm.ranks))
    return "invalid rank " + std::to_string(call.peer) + "; there are " +
           std::to_string(comm.ranks);
  if (call.count > kWireBytes / size_of(call.dtype) / static_cast<std::size_t>(comm.ranks))
    return "the double has no room for " + std::to_string(call.count) + " elements a rank";
  const bool reads =
      call.kind != Kind::receive && (call.kind != Kind::broadcast || call.peer == comm.rank);
  const bool writes = call.kind != Kind::send;
  const auto wrong_memory = [&](const char* name, const void* memory) -> std::string {
    if (call.count > 0 && !memory) return std::string(name) + " is null";
    const int device = gpu.holder_of(memory);
    if (device >= 0 && device != comm.device)
      return std::string(name) + " lies on GPU " + std::to_string(device) +
             ", and the communicator's is GPU " + std::to_string(comm.device);
    return {};
  };
  std::string wrong;
  if (reads) wrong = wrong_memory("sendbuff", call.send);
  if (writes && wrong.empty()) wrong = wrong_memory("recvbuff", call.recv);
  return wrong;
}

ncclResult_t call(ncclComm_t handle, Call call, cudaStream_t stream) {
  const char* const function = name_of(call.kind);
  ncclResult_t why = ncclSuccess;
  const std::shared_ptr<Comm> comm = ready(handle, function, &why);
  if (!comm) return in_group(why);
  const std::string wrong = wrong_with(call, *comm, stream);
  if (!wrong.empty())
    return in_group(fail(ncclInvalidArgument, std::string(function) + ": " + wrong));
  if (call.kind == Kind::all_to_all && settings().version < 22800)
    return in_group(fail(ncclInvalidUsage, "ncclAlltoAll: NCCL has it from 2.28 on"));
  if (call.count == 0 && is_collective(call.kind)) return ncclSuccess;
  call.place = place_of(call, *comm, size_of(call.dtype));
  const bool sums = call.kind == Kind::all_reduce || call.kind == Kind::reduce_scatter;
  if (sums) ++totals().sums;
  if (sums && call.place != 0) ++totals().windowed_sums;
  return submit(comm, call, stream);
}

}  // namespace
}  // namespace tessera::nccl_double

using tessera::nccl_double::call;
using tessera::nccl_double::Kind;

extern "C" {

ncclResult_t ncclAllReduce(const void* send, void* recv, std::size_t count, ncclDataType_t dtype,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, {Kind::all_reduce, send, recv, count, dtype, op, -1}, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, std::size_t count,
                               ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return call(comm, {Kind::reduce_scatter, send, recv, count, dtype, op, -1}, stream);
}

ncclResult_t ncclAllGather(const void* send, void* recv, std::size_t count, ncclDataType_t dtype,
                           ncclComm_t comm, cudaStream_t stream) {
  return call(comm, {Kind::all_gather, send, recv, count, dtype, ncclSum, -1}, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* recv, std::size_t count, ncclDataType_t dtype,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, {Kind::broadcast, send, recv, count, dtype, ncclSum, root}, stream);
}

ncclResult_t ncclAlltoAll(const void* send, void* recv, std::size_t count, ncclDataType_t dtype,
                          ncclComm_t comm, cudaStream_t stream) {
  return call(comm, {Kind::all_to_all, send, recv, count, dtype, ncclSum, -1}, stream);
}

ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t dtype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return call(comm, {Kind::send, send, nullptr, count, dtype, ncclSum, peer}, stream);
}

ncclResult_t ncclRecv(void* recv, std::size_t count, ncclDataType_t dtype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return call(comm, {Kind::receive, nullptr, recv, count, dtype, ncclSum, peer}, stream);
}

}  // extern "C"
