// The table of libtessera-nccl.so over NCCL's own library, which it finds and opens.
//
// NCCL's header is all that the build needs of it. Nothing here throws, prints or reads the
// environment.
#include <dlfcn.h>
#include <glob.h>
#include <nccl.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <type_traits>

#include "kernels/nccl/nccl_driver.hpp"

namespace tessera::kernels {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr int kOldest = NCCL_VERSION(2, 27, 0), kHasAllToAll = NCCL_VERSION(2, 28, 0);
constexpr const char* kRemedy =
    "install NCCL 2.27 or newer (pip install nvidia-nccl-cu13, or apt-get install libnccl2), or "
    "name its file in TESSERA_NCCL";
// Where a toolkit or a Python wheel has it.
constexpr const char* kPlaces[] = {
    "/usr/local/cuda/lib64/libnccl.so.2", "/usr/local/cuda/lib/libnccl.so.2",
    "/usr/local/lib/python3*/dist-packages/nvidia/nccl/lib/libnccl.so.2",
    "/usr/local/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2",
    "/usr/lib/python3/dist-packages/nvidia/nccl/lib/libnccl.so.2"};

// NCCL's functions; the process has one set.
struct Calls {
  decltype(&::ncclGetVersion) GetVersion;
  decltype(&::ncclGetUniqueId) GetUniqueId;
  decltype(&::ncclCommInitRankConfig) CommInitRankConfig;
  decltype(&::ncclCommSplit) CommSplit;
  decltype(&::ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&::ncclCommFinalize) CommFinalize;
  decltype(&::ncclCommDestroy) CommDestroy;
  decltype(&::ncclCommAbort) CommAbort;
  decltype(&::ncclMemAlloc) MemAlloc;
  decltype(&::ncclMemFree) MemFree;
  decltype(&::ncclCommWindowRegister) CommWindowRegister;
  decltype(&::ncclCommWindowDeregister) CommWindowDeregister;
  decltype(&::ncclGroupStart) GroupStart;
  decltype(&::ncclGroupEnd) GroupEnd;
  decltype(&::ncclAllGather) AllGather;
  decltype(&::ncclBroadcast) Broadcast;
  decltype(&::ncclSend) Send;
  decltype(&::ncclRecv) Recv;
  decltype(&::ncclReduceScatter) ReduceScatter;
  decltype(&::ncclAllReduce) AllReduce;
  decltype(&::ncclAllGather) AlltoAll;  // null before 2.28; its header may not have it either
  decltype(&::ncclGetErrorString) GetErrorString;
  decltype(&::ncclGetLastError) GetLastError;
};
Calls g_nccl;
NcclLibrary g_library;  // its file is empty until it is open
void* g_handle = nullptr;

thread_local char g_line[2048];

template <class... Parts>
NcclError line(const char* format, Parts... parts) {
  std::snprintf(g_line, sizeof g_line, format, parts...);
  return g_line;
}

NcclError said(const char* call, ncclResult_t result, ncclComm_t comm = nullptr) {
  if (result == ncclSuccess || result == ncclInProgress) return nullptr;
  const char* const more = g_nccl.GetLastError(comm);
  return line("%s: %s%s%.700s", call, g_nccl.GetErrorString(result), more && *more ? ": " : "",
              more ? more : "");
}

ncclComm_t comm_of(void* comm) { return static_cast<ncclComm_t>(comm); }
cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
std::size_t size_of(std::int64_t size) { return static_cast<std::size_t>(size); }

// --- the library

void* open_place(const char* pattern) {
  glob_t found{};
  void* handle = nullptr;
  if (glob(pattern, 0, nullptr, &found) == 0)
    for (std::size_t i = found.gl_pathc; i-- > 0 && !handle;)  // the newest Python's first
      handle = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  globfree(&found);
  return handle;
}

void* open_any() {
  void* handle = dlopen(kName, RTLD_NOW | RTLD_NOLOAD);
  if (!handle) handle = dlopen(kName, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  for (const char* const place : kPlaces)
    if (!handle) handle = open_place(place);
  return handle;
}

// "2.28.9"
void write_version(int version, char (&out)[24]) {
  std::snprintf(out, sizeof out, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

NcclError find_calls(void* handle, const char* file) {
  NcclError error = nullptr;
  const auto find = [&](auto& call, const char* name) {
    call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(dlsym(handle, name));
    if (!call && !error) error = line("%s has no function %s; %s", file, name, kRemedy);
  };
  find(g_nccl.GetVersion, "ncclGetVersion");
  find(g_nccl.GetUniqueId, "ncclGetUniqueId");
  find(g_nccl.CommInitRankConfig, "ncclCommInitRankConfig");
  find(g_nccl.CommSplit, "ncclCommSplit");
  find(g_nccl.CommGetAsyncError, "ncclCommGetAsyncError");
  find(g_nccl.CommFinalize, "ncclCommFinalize");
  find(g_nccl.CommDestroy, "ncclCommDestroy");
  find(g_nccl.CommAbort, "ncclCommAbort");
  find(g_nccl.MemAlloc, "ncclMemAlloc");
  find(g_nccl.MemFree, "ncclMemFree");
  find(g_nccl.CommWindowRegister, "ncclCommWindowRegister");
  find(g_nccl.CommWindowDeregister, "ncclCommWindowDeregister");
  find(g_nccl.GroupStart, "ncclGroupStart");
  find(g_nccl.GroupEnd, "ncclGroupEnd");
  find(g_nccl.AllGather, "ncclAllGather");
  find(g_nccl.Broadcast, "ncclBroadcast");
  find(g_nccl.Send, "ncclSend");
  find(g_nccl.Recv, "ncclRecv");
  find(g_nccl.ReduceScatter, "ncclReduceScatter");
  find(g_nccl.AllReduce, "ncclAllReduce");
  g_nccl.AlltoAll = reinterpret_cast<decltype(g_nccl.AlltoAll)>(dlsym(handle, "ncclAlltoAll"));
  find(g_nccl.GetErrorString, "ncclGetErrorString");
  find(g_nccl.GetLastError, "ncclGetLastError");
  return error;
}

NcclError load(const char* file) {
  g_handle = *file ? dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) : open_any();
  if (!g_handle) {
    const char* const why = dlerror();
    return line("NCCL can't be loaded (%.400s); %s", why ? why : "no reason given", kRemedy);
  }
  return find_calls(g_handle, *file ? file : kName);
}

// Whatever it is called by: a name without a path, or a link.
bool is_open(const char* file) {
  void* const same = dlopen(file, RTLD_NOW | RTLD_NOLOAD);
  if (same) dlclose(same);
  return same && same == g_handle;
}

NcclError open(const char* file, NcclLibrary* out) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (!*g_library.file) {
    if (const NcclError error = load(file)) return error;
    NcclLibrary found{};
    if (const NcclError error = said("ncclGetVersion", g_nccl.GetVersion(&found.version)))
      return error;
    Dl_info info{};
    dladdr(reinterpret_cast<const void*>(g_nccl.GetVersion), &info);
    std::snprintf(found.file, sizeof found.file, "%s", info.dli_fname ? info.dli_fname : kName);
    char version[24];
    write_version(found.version, version);
    if (found.version < kOldest)
      return line("%s is NCCL %s, which is too old; %s", found.file, version, kRemedy);
    if (found.version < kHasAllToAll) g_nccl.AlltoAll = nullptr;
    g_library = found;
  }
  if (*file && !is_open(file))
    return line("this process has NCCL from %s already, and can't take that of %.500s",
                g_library.file, file);
  *out = g_library;
  return nullptr;
}

// --- communicators

ncclConfig_t config() {
  ncclConfig_t made = NCCL_CONFIG_INITIALIZER;
  made.blocking = 0;
  return made;
}

NcclError make_id(NcclId* out) {
  ncclUniqueId id{};
  const NcclError error = said("ncclGetUniqueId", g_nccl.GetUniqueId(&id));
  static_assert(sizeof id.internal == sizeof out->bytes);
  std::memcpy(out->bytes, id.internal, sizeof out->bytes);
  return error;
}

NcclError join(const NcclId* id, std::int32_t size, std::int32_t rank, void** comm) {
  ncclUniqueId unique{};
  std::memcpy(unique.internal, id->bytes, sizeof unique.internal);
  ncclConfig_t with = config();
  ncclComm_t made = nullptr;
  const NcclError error =
      said("ncclCommInitRankConfig", g_nccl.CommInitRankConfig(&made, size, unique, rank, &with));
  *comm = made;
  return error;
}

NcclError split(void* comm, std::int32_t color, std::int32_t key, const NcclShape* shape,
                void** out) {
  constexpr int kZeroCtas = 2;  // NCCL_CTA_POLICY_ZERO, which the header of 2.27 does not have
  ncclConfig_t with = config();
  with.splitShare = 0;
  if (shape->most_blocks > 0) with.maxCTAs = shape->most_blocks;
  if (shape->has_zero_ctas) with.CTAPolicy = kZeroCtas;
  static_assert(sizeof(ncclComm_t) == sizeof(void*));
  return said("ncclCommSplit",
              g_nccl.CommSplit(comm_of(comm), color < 0 ? NCCL_SPLIT_NOCOLOR : color, key,
                               reinterpret_cast<ncclComm_t*>(out), &with),
              comm_of(comm));
}

NcclError poll(void* comm, bool* is_busy) {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = g_nccl.CommGetAsyncError(comm_of(comm), &state);
  *is_busy = asked == ncclSuccess && state == ncclInProgress;
  if (const NcclError error = said("ncclCommGetAsyncError", asked, comm_of(comm))) return error;
  return said("NCCL", state, comm_of(comm));
}

NcclError finalize(void* comm) {
  return said("ncclCommFinalize", g_nccl.CommFinalize(comm_of(comm)), comm_of(comm));
}
NcclError destroy(void* comm) { return said("ncclCommDestroy", g_nccl.CommDestroy(comm_of(comm))); }

// In one group: one after another they may wait for each other. One that is refused keeps none of
// the others from being told; the first error is returned.
NcclError abort(void* const* comms, std::int32_t count) {
  NcclError error = said("ncclGroupStart", g_nccl.GroupStart());
  for (std::int32_t i = 0; i < count; ++i) {
    const ncclResult_t one = g_nccl.CommAbort(comm_of(comms[i]));
    if (!error) error = said("ncclCommAbort", one);
  }
  const ncclResult_t ended = g_nccl.GroupEnd();
  return error ? error : said("ncclGroupEnd", ended);
}

// --- memory

NcclError allocate(std::int64_t bytes, void** data) {
  return said("ncclMemAlloc", g_nccl.MemAlloc(data, size_of(bytes)));
}
NcclError release(void* data) { return said("ncclMemFree", g_nccl.MemFree(data)); }
NcclError make_window(void* comm, void* data, std::int64_t bytes, void** window) {
  static_assert(sizeof(ncclWindow_t) == sizeof(void*));
  return said(
      "ncclCommWindowRegister",
      g_nccl.CommWindowRegister(comm_of(comm), data, size_of(bytes),
                                reinterpret_cast<ncclWindow_t*>(window), NCCL_WIN_COLL_SYMMETRIC),
      comm_of(comm));
}
NcclError end_window(void* comm, void* window) {
  return said("ncclCommWindowDeregister",
              g_nccl.CommWindowDeregister(comm_of(comm), static_cast<ncclWindow_t>(window)),
              comm_of(comm));
}

// --- queued

NcclError begin() { return said("ncclGroupStart", g_nccl.GroupStart()); }
NcclError end() { return said("ncclGroupEnd", g_nccl.GroupEnd()); }

NcclError all_gather(const void* send, void* recv, std::int64_t bytes, void* comm, void* stream) {
  return said(
      "ncclAllGather",
      g_nccl.AllGather(send, recv, size_of(bytes), ncclUint8, comm_of(comm), stream_of(stream)),
      comm_of(comm));
}
NcclError broadcast(const void* send, void* recv, std::int64_t bytes, std::int32_t root, void* comm,
                    void* stream) {
  return said("ncclBroadcast",
              g_nccl.Broadcast(send, recv, size_of(bytes), ncclUint8, root, comm_of(comm),
                               stream_of(stream)),
              comm_of(comm));
}
NcclError send(const void* data, std::int64_t bytes, std::int32_t to, void* comm, void* stream) {
  return said("ncclSend",
              g_nccl.Send(data, size_of(bytes), ncclUint8, to, comm_of(comm), stream_of(stream)),
              comm_of(comm));
}
NcclError recv(void* data, std::int64_t bytes, std::int32_t from, void* comm, void* stream) {
  return said("ncclRecv",
              g_nccl.Recv(data, size_of(bytes), ncclUint8, from, comm_of(comm), stream_of(stream)),
              comm_of(comm));
}

NcclError all_to_all(const void* send_from, void* recv_to, std::int64_t bytes, std::int32_t ranks,
                     void* comm, void* stream) {
  if (g_nccl.AlltoAll)
    return said("ncclAlltoAll",
                g_nccl.AlltoAll(send_from, recv_to, size_of(bytes), ncclUint8, comm_of(comm),
                                stream_of(stream)),
                comm_of(comm));
  for (std::int32_t peer = 0; peer < ranks; ++peer) {
    if (const NcclError error =
            send(static_cast<const char*>(send_from) + peer * bytes, bytes, peer, comm, stream))
      return error;
    if (const NcclError error =
            recv(static_cast<char*>(recv_to) + peer * bytes, bytes, peer, comm, stream))
      return error;
  }
  return nullptr;
}

ncclDataType_t type_of(NcclSum as) {
  constexpr ncclDataType_t kTypes[] = {ncclInt32, ncclInt64, ncclFloat32, ncclFloat64};
  return kTypes[static_cast<int>(as)];
}
NcclError reduce_scatter(const void* send, void* recv, std::int64_t count, NcclSum as, void* comm,
                         void* stream) {
  return said("ncclReduceScatter",
              g_nccl.ReduceScatter(send, recv, size_of(count), type_of(as), ncclSum, comm_of(comm),
                                   stream_of(stream)),
              comm_of(comm));
}
NcclError all_reduce(const void* send, void* recv, std::int64_t count, NcclSum as, void* comm,
                     void* stream) {
  return said("ncclAllReduce",
              g_nccl.AllReduce(send, recv, size_of(count), type_of(as), ncclSum, comm_of(comm),
                               stream_of(stream)),
              comm_of(comm));
}

constinit const NcclDriver kDriver = {.version = kNcclDriverVersion,
                                      .driver_bytes = sizeof(NcclDriver),
                                      .open = open,
                                      .make_id = make_id,
                                      .join = join,
                                      .split = split,
                                      .poll = poll,
                                      .finalize = finalize,
                                      .destroy = destroy,
                                      .abort = abort,
                                      .allocate = allocate,
                                      .release = release,
                                      .make_window = make_window,
                                      .end_window = end_window,
                                      .begin = begin,
                                      .end = end,
                                      .all_gather = all_gather,
                                      .broadcast = broadcast,
                                      .send = send,
                                      .recv = recv,
                                      .all_to_all = all_to_all,
                                      .reduce_scatter = reduce_scatter,
                                      .all_reduce = all_reduce};

}  // namespace
}  // namespace tessera::kernels

extern "C" [[gnu::visibility("default")]] const tessera::kernels::NcclDriver* tessera_nccl(
    std::uint32_t version) {
  using namespace tessera::kernels;
  return version == kNcclDriverVersion ? &kDriver : nullptr;
}
