#include "tests/checkpoint/system_calls.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace tessera::testing {
namespace {

std::mutex mutex;
CallWatch* watch = nullptr;
int rank_of_process = -1;
thread_local int rank = rank_of_process;

std::string path_of(int descriptor) {
  char link[64], path[4096];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t size = ::readlink(link, path, sizeof path);
  return {path, size < 0 ? 0 : static_cast<std::size_t>(size)};
}

std::string path_at(int folder, const char* name) {
  return name[0] == '/' || folder == AT_FDCWD ? std::string(name) : path_of(folder) + '/' + name;
}

}  // namespace

struct WatchedCall {
  // Makes the call `f`, or what the watch has planned in its place.
  template <class F>
  static long make(SystemCall call, const F& f) {
    if (rank < 0) return f();
    const std::lock_guard lock(mutex);
    if (!watch || !call.path.starts_with(watch->folder_)) return f();
    call.rank = rank;
    auto& counts = watch->counts_;
    counts.resize(std::max(counts.size(), static_cast<std::size_t>(rank) + 1));
    const CallFault& fault = watch->fault_;
    const bool is_hit = ++counts[static_cast<std::size_t>(rank)] == fault.at && rank == fault.rank;
    if (is_hit && fault.signal != 0) ::kill(::getpid(), fault.signal);
    if (is_hit && fault.error != 0) {
      if (call.kind == CallKind::close) f();
      errno = fault.error;
      return -1;
    }
    const long result = call.kind == CallKind::sync ? 0 : f();
    if (result >= 0) watch->calls_.push_back(std::move(call));
    return result;
  }
  static int thread_error() {
    const std::lock_guard lock(mutex);
    return watch && rank >= 0 && rank == watch->fault_.rank ? watch->fault_.thread_error : 0;
  }
  static std::chrono::milliseconds delay(int CallFault::* slow_ms) {
    const std::lock_guard lock(mutex);
    const bool is_slow = watch && rank >= 0 && rank == watch->fault_.rank;
    return std::chrono::milliseconds(is_slow ? watch->fault_.*slow_ms : 0);
  }
  // Of the bytes that are to be written, those that the next call writes.
  static std::size_t part_of(std::size_t size) {
    const std::lock_guard lock(mutex);
    if (rank < 0 || !watch || rank != watch->fault_.rank) return size;
    const auto at = static_cast<std::size_t>(rank);
    if ((watch->counts_.size() > at ? watch->counts_[at] : 0) + 1 != watch->fault_.at) return size;
    return watch->fault_.is_empty ? 0 : watch->fault_.is_short ? size / 2 : size;
  }
};

CallWatch::CallWatch(std::string folder, const CallFault& fault)
    : folder_(std::move(folder)), fault_(fault) {
  const std::lock_guard lock(mutex);
  watch = this;
}
CallWatch::~CallWatch() {
  const std::lock_guard lock(mutex);
  watch = nullptr;
}
void CallWatch::set_rank(int own) { rank = own; }
void CallWatch::set_rank_of_process(int own) { rank = rank_of_process = own; }
std::vector<SystemCall> CallWatch::calls_of(int own) const {
  std::vector<SystemCall> some;
  for (const SystemCall& call : calls_)
    if (call.rank == own) some.push_back(call);
  return some;
}

namespace {

long open_at(int folder, const char* path, int flags, unsigned mode) {
  const bool creates = (flags & O_CREAT) != 0;
  return WatchedCall::make(
      {.kind = creates ? CallKind::create : CallKind::open, .path = path_at(folder, path)},
      [&] { return ::syscall(SYS_openat, folder, path, flags, mode); });
}

long write_at(int file, const void* bytes, std::size_t size, long offset) {
  size = WatchedCall::part_of(size);
  std::this_thread::sleep_for(WatchedCall::delay(&CallFault::slow_ms));
  return WatchedCall::make({.kind = CallKind::write,
                            .path = path_of(file),
                            .offset = offset,
                            .bytes = {static_cast<const char*>(bytes), size}},
                           [&] { return ::syscall(SYS_pwrite64, file, bytes, size, offset); });
}

long remove_at(int folder, const char* path, int flags) {
  return WatchedCall::make({.kind = CallKind::remove, .path = path_at(folder, path)},
                           [&] { return ::syscall(SYS_unlinkat, folder, path, flags); });
}

long rename_at(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  return WatchedCall::make(
      {.kind = CallKind::rename, .path = path_at(from_folder, from), .to = path_at(to_folder, to)},
      [&] { return ::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags); });
}

// What a thread runs, and whose it is.
struct StartedThread {
  void* (*run)(void*);
  void* given;
  int rank;
  static void* begin(void* started) {
    const std::unique_ptr<StartedThread> own(static_cast<StartedThread*>(started));
    CallWatch::set_rank(own->rank);
    return own->run(own->given);
  }
};

unsigned mode_of(int flags, va_list arguments) {
  return (flags & O_CREAT) != 0 ? va_arg(arguments, unsigned) : 0;
}

}  // namespace
}  // namespace tessera::testing

// The C library's names, under others here, whose declarations they would meet.
#define TAKES_THE_PLACE_OF(name) __asm__(name) __attribute__((visibility("default")))

using namespace tessera::testing;

extern "C" {
int own_open(const char* path, int flags, ...) TAKES_THE_PLACE_OF("open");
int own_open64(const char* path, int flags, ...) TAKES_THE_PLACE_OF("open64");
int own_openat(int folder, const char* path, int flags, ...) TAKES_THE_PLACE_OF("openat");
int own_openat64(int folder, const char* path, int flags, ...) TAKES_THE_PLACE_OF("openat64");
int own_mkdir(const char* path, unsigned mode) TAKES_THE_PLACE_OF("mkdir");
long own_pwrite(int file, const void* bytes, std::size_t size, long at)
    TAKES_THE_PLACE_OF("pwrite");
long own_pwrite64(int file, const void* bytes, std::size_t size, long at)
    TAKES_THE_PLACE_OF("pwrite64");
int own_fsync(int file) TAKES_THE_PLACE_OF("fsync");
int own_renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags)
    TAKES_THE_PLACE_OF("renameat2");
int own_rename(const char* from, const char* to) TAKES_THE_PLACE_OF("rename");
int own_close(int file) TAKES_THE_PLACE_OF("close");
int own_flock(int file, int operation) TAKES_THE_PLACE_OF("flock");
int own_unlinkat(int folder, const char* path, int flags) TAKES_THE_PLACE_OF("unlinkat");
int own_unlink(const char* path) TAKES_THE_PLACE_OF("unlink");
int own_rmdir(const char* path) TAKES_THE_PLACE_OF("rmdir");
int own_remove(const char* path) TAKES_THE_PLACE_OF("remove");
int own_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                       void* given) TAKES_THE_PLACE_OF("pthread_create");

#define TAKES_MODE(name, folder, ...)                            \
  int name(__VA_ARGS__, int flags, ...) {                        \
    va_list arguments;                                           \
    va_start(arguments, flags);                                  \
    const unsigned mode = mode_of(flags, arguments);             \
    va_end(arguments);                                           \
    return static_cast<int>(open_at(folder, path, flags, mode)); \
  }
TAKES_MODE(own_open, AT_FDCWD, const char* path)
TAKES_MODE(own_open64, AT_FDCWD, const char* path)
TAKES_MODE(own_openat, folder, int folder, const char* path)
TAKES_MODE(own_openat64, folder, int folder, const char* path)

int own_mkdir(const char* path, unsigned mode) {
  return static_cast<int>(WatchedCall::make({.kind = CallKind::mkdir, .path = path}, [&] {
    return ::syscall(SYS_mkdirat, AT_FDCWD, path, mode);
  }));
}
long own_pwrite(int file, const void* bytes, std::size_t size, long at) {
  return write_at(file, bytes, size, at);
}
long own_pwrite64(int file, const void* bytes, std::size_t size, long at) {
  return write_at(file, bytes, size, at);
}
int own_fsync(int file) {
  std::this_thread::sleep_for(WatchedCall::delay(&CallFault::slow_sync_ms));
  return static_cast<int>(WatchedCall::make({.kind = CallKind::sync, .path = path_of(file)},
                                            [&] { return ::syscall(SYS_fsync, file); }));
}
int own_renameat2(int from_folder, const char* from, int to_folder, const char* to,
                  unsigned flags) {
  return static_cast<int>(rename_at(from_folder, from, to_folder, to, flags));
}
int own_rename(const char* from, const char* to) {
  return static_cast<int>(rename_at(AT_FDCWD, from, AT_FDCWD, to, 0));
}
int own_close(int file) {
  if (rank < 0) return static_cast<int>(::syscall(SYS_close, file));
  return static_cast<int>(WatchedCall::make({.kind = CallKind::close, .path = path_of(file)},
                                            [&] { return ::syscall(SYS_close, file); }));
}
int own_flock(int file, int operation) {
  return static_cast<int>(WatchedCall::make({.kind = CallKind::lock, .path = path_of(file)},
                                            [&] { return ::syscall(SYS_flock, file, operation); }));
}
int own_unlinkat(int folder, const char* path, int flags) {
  return static_cast<int>(remove_at(folder, path, flags));
}
int own_unlink(const char* path) { return static_cast<int>(remove_at(AT_FDCWD, path, 0)); }
int own_rmdir(const char* path) {
  return static_cast<int>(remove_at(AT_FDCWD, path, AT_REMOVEDIR));
}
int own_remove(const char* path) {
  const long removed = remove_at(AT_FDCWD, path, 0);
  return static_cast<int>(removed != 0 && errno == EISDIR ? remove_at(AT_FDCWD, path, AT_REMOVEDIR)
                                                          : removed);
}
int own_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                       void* given) {
  if (const int error = WatchedCall::thread_error(); error != 0) return error;
  static const auto create =
      reinterpret_cast<decltype(&own_pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  auto started = std::make_unique<StartedThread>(StartedThread{run, given, rank});
  const int error = create(thread, attributes, StartedThread::begin, started.get());
  if (error == 0) static_cast<void>(started.release());  // the thread's
  return error;
}
}
