// Ranks over the double of NCCL: threads or processes, each with a GPU and a stream of its own.
#pragma once

#include <dlfcn.h>
#include <nccl.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/detail/device/driver.hpp"
#include "tests/cuda/support.hpp"
#include "tests/emulator/nccl/double.hpp"
#include "tests/support/catch.hpp"

namespace tessera::testing {

inline const Driver& driver() {
  static const Driver& table = [&]() -> const Driver& {
    emulator();
    void* const module = dlopen(TESSERA_QUEUED_MODULE, RTLD_NOW | RTLD_NOLOAD);
    return *reinterpret_cast<DriverEntry>(dlsym(module, kDriverSymbol))(kDriverVersion);
  }();
  return table;
}

// In its scope a setting of the double has another value.
struct Setting {
  Setting(const char* name, long long value, long long before) : name(name), before(before) {
    REQUIRE(tessera_nccl_double_set(name, value));
  }
  ~Setting() { tessera_nccl_double_set(name, before); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
  const char* const name;
  const long long before;
};

// Catch's macros are not for several threads.
inline void expect(bool holds, const std::string& what) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  INFO(what);
  CHECK(holds);
}

// That of a communicator that does not block.
inline ncclConfig_t polled() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

inline ncclUniqueId fresh_id() {
  ncclUniqueId id;
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
  return id;
}

struct Rank {
  int rank, ranks;
  ncclComm_t comm = nullptr;
  void* native = nullptr;

  Rank(int rank, int ranks, const ncclUniqueId& id, ncclConfig_t config = NCCL_CONFIG_INITIALIZER,
       int gpu = -1)
      : rank(rank), ranks(ranks) {
    driver().use(gpu < 0 ? rank : gpu);
    driver().make_stream(0, &native);
    made = ncclCommInitRankConfig(&comm, ranks, id, rank, &config);
  }
  ~Rank() {
    if (comm) ncclCommDestroy(comm);
    driver().end_stream(native);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  ncclResult_t made;
  cudaStream_t stream() const { return static_cast<cudaStream_t>(native); }
  void block() const {
    void* event = nullptr;
    driver().make_event(&event);
    driver().record(event, native);
    driver().block(event);
    driver().end_event(event);
  }
  ncclResult_t async() const {
    ncclResult_t result = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
    return asked == ncclSuccess ? result : asked;
  }
  // What the communicator comes to.
  ncclResult_t settled() const {
    ncclResult_t result;
    while ((result = async()) == ncclInProgress) std::this_thread::yield();
    return result;
  }
  // Its error, once it has one.
  std::string failure() const {
    while (async() == ncclSuccess) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return ncclGetLastError(comm);
  }
  void abort() {
    expect(ncclCommAbort(comm) == ncclSuccess, "abort");
    comm = nullptr;
  }
};

// `body` on so many threads, each a rank with a GPU of its own.
inline void on_threads(int ranks, const std::function<void(Rank&)>& body,
                       const ncclConfig_t& config = NCCL_CONFIG_INITIALIZER) {
  const Gpus gpus(ranks);
  const ncclUniqueId id = fresh_id();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      Rank one(rank, ranks, id, config);
      body(one);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tessera::testing
