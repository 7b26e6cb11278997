#include "tests/emulator/nccl/state.hpp"

#include <dlfcn.h>
#include <link.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <set>

#include "tests/emulator/nccl/double.hpp"

namespace tessera::nccl_double {
namespace {

struct Break {
  std::atomic<long long> kernels{0}, from{-1};
  std::atomic<int> result{ncclSuccess};
};

// Every member is shared by all host threads of the process.
struct State {
  Settings settings;
  Totals totals{};
  std::array<Break, kMostRanks> breaks;
  std::atomic<int> refusing{0};  // how many there are: calls look here first
  std::mutex mutex;              // of what follows
  std::map<std::string, ncclResult_t> refusals;
  std::set<std::string> lines;
  std::map<ncclComm_t, std::shared_ptr<Comm>> comms;
  std::uintptr_t handles = 0;
  void* module = nullptr;
};
void set_by(State& state, const char* text);
State& state() {
  static State& all = *[] {
    State* const made = new State;  // kernels may end after the process's statics
    if (const char* text = std::getenv("TESSERA_NCCL_DOUBLE")) set_by(*made, text);
    return made;
  }();
  return all;
}

thread_local const char* thread_error = "";

std::atomic<long long>* setting(Settings& s, const std::string& name) {
  const std::map<std::string, std::atomic<long long>*> all = {
      {"version", &s.version},           {"polls", &s.polls},
      {"null_windows", &s.null_windows}, {"one_gpu", &s.one_gpu},
      {"any_order", &s.any_order},       {"lone_aborts", &s.lone_aborts},
      {"stuck_aborts", &s.stuck_aborts}, {"stuck_ends", &s.stuck_ends},
      {"host_ms", &s.host_ms},           {"spoil", &s.spoil}};
  const auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}

void break_from(State& s, int rank, long long after, int result) {
  if (rank < 0 || rank >= kMostRanks) return;
  Break& one = s.breaks[static_cast<std::size_t>(rank)];
  one.result = result;
  one.from = after < 0 ? -1 : one.kernels + after;
}

// "name=value,break=rank:after:result"
void set_by(State& s, const char* text) {
  std::string rest = text;
  while (!rest.empty()) {
    const std::string one = rest.substr(0, rest.find(','));
    rest.erase(0, one.size() + 1);
    const std::string name = one.substr(0, one.find('='));
    const char* const value = one.c_str() + std::min(one.size(), name.size() + 1);
    int rank = 0, after = 0, result = 0;
    if (auto* number = setting(s.settings, name))
      *number = std::atoll(value);
    else if (name == "break" && std::sscanf(value, "%d:%d:%d", &rank, &after, &result) == 3)
      break_from(s, rank, after, result);
    else
      std::fprintf(stderr, "TESSERA_NCCL_DOUBLE: '%s' is no setting\n", one.c_str());
  }
}

// The loaded object that shows an emulated GPU.
void* loaded_emulator() {
  std::vector<std::string> names;  // within the walk nothing may be opened
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        static_cast<std::vector<std::string>*>(out)->emplace_back(info->dlpi_name);
        return 0;
      },
      &names);
  for (const std::string& name : names) {
    void* const object = name.empty() ? nullptr : dlopen(name.c_str(), RTLD_NOLOAD | RTLD_LAZY);
    if (object && dlsym(object, kernels::cuda::emulator::kControlSymbol)) return object;
    if (object) dlclose(object);
  }
  return nullptr;
}

}  // namespace

Settings& settings() { return state().settings; }
Totals& totals() { return state().totals; }

void* emulated_module() {
  const std::lock_guard lock(state().mutex);
  if (!state().module) state().module = loaded_emulator();
  return state().module;
}

const Control* emulator() {
  void* const module = emulated_module();
  if (!module) return nullptr;
  static const Control* const control = reinterpret_cast<kernels::cuda::emulator::ControlEntry>(
      dlsym(module, kernels::cuda::emulator::kControlSymbol))();
  return control;
}

Fault next_fault(int rank) {
  if (rank < 0 || rank >= kMostRanks) return {false, ncclSuccess};
  Break& one = state().breaks[static_cast<std::size_t>(rank)];
  const long long now = one.kernels.fetch_add(1), from = one.from;
  return {from >= 0 && now >= from, static_cast<ncclResult_t>(one.result.load())};
}

ncclResult_t refused(const char* function) {
  if (state().refusing == 0) return ncclSuccess;
  const std::lock_guard lock(state().mutex);
  const auto found = state().refusals.find(function);
  if (found == state().refusals.end()) return ncclSuccess;
  const ncclResult_t result = found->second;
  state().refusals.erase(found);
  --state().refusing;
  thread_error =
      state().lines.insert(std::string(function) + ": refused by the test").first->c_str();
  return result;
}

const char* kept(const std::string& line) {
  const std::lock_guard lock(state().mutex);
  return state().lines.insert(line).first->c_str();
}

ncclResult_t fail(ncclResult_t result, const std::string& line) {
  thread_error = kept(line);
  return result;
}
const char* last_error() { return thread_error; }

// ---- communicators

void Comm::break_by(ncclResult_t why, const std::string& line) {
  const char* no_line = nullptr;  // the first is the cause
  error.compare_exchange_strong(no_line, kept(line));
  ncclResult_t none = ncclSuccess;
  result.compare_exchange_strong(none, why);
}

std::string Comm::name() const {
  return "rank " + std::to_string(rank) + " of " + std::to_string(ranks);
}

ncclComm_t add(std::shared_ptr<Comm> comm) {
  const std::lock_guard lock(state().mutex);
  ++totals().communicators;
  comm->handle = reinterpret_cast<ncclComm_t>(++state().handles << 12);
  state().comms[comm->handle] = comm;
  return comm->handle;
}

void remove(ncclComm_t handle) {
  std::shared_ptr<Comm> last;  // ends after the lock
  const std::lock_guard lock(state().mutex);
  const auto found = state().comms.find(handle);
  if (found == state().comms.end()) return;
  last = found->second;
  state().comms.erase(found);
  --totals().communicators;
}

std::shared_ptr<Comm> find(ncclComm_t handle, const char* function) {
  {
    const std::lock_guard lock(state().mutex);
    const auto found = state().comms.find(handle);
    if (found != state().comms.end()) return found->second;
  }
  fail(ncclInvalidArgument,
       std::string(function) + (handle ? ": this communicator has been destroyed, or never was one"
                                       : ": the communicator is null"));
  return nullptr;
}

std::shared_ptr<Comm> ready(ncclComm_t handle, const char* function, ncclResult_t* why) {
  if ((*why = refused(function)) != ncclSuccess) return nullptr;
  std::shared_ptr<Comm> comm = find(handle, function);
  *why = ncclInvalidArgument;
  if (!comm) return nullptr;
  const std::lock_guard lock(comm->host);
  const char* const broken = comm->error;
  if (comm->is_aborted)
    fail(*why, std::string(function) + ": this communicator has been aborted");
  else if (!comm->jobs.empty())
    fail(*why, std::string(function) +
                   ": the previous call on this communicator is in progress; "
                   "poll ncclCommGetAsyncError until it says ncclSuccess");
  else if (comm->is_finalized)
    fail(*why, std::string(function) + ": this communicator has been finalized");
  else if ((*why = comm->result) != ncclSuccess)
    fail(*why, std::string(function) + ": this communicator has failed: " + (broken ? broken : ""));
  else
    return comm;
  return nullptr;
}

}  // namespace tessera::nccl_double

using namespace tessera::nccl_double;

extern "C" {

bool tessera_nccl_double_set(const char* name, long long value) {
  std::atomic<long long>* const number = setting(settings(), name);
  if (number) *number = value;
  return number != nullptr;
}

void tessera_nccl_double_break(int rank, long long after, int result) {
  break_from(state(), rank, after, result);
}

void tessera_nccl_double_refuse(const char* function, int result) {
  const std::lock_guard lock(state().mutex);
  if (state().refusals.insert_or_assign(function, static_cast<ncclResult_t>(result)).second)
    ++state().refusing;
}

long long tessera_nccl_double_count(const char* name) {
  const Totals& t = totals();
  const std::map<std::string, const std::atomic<long long>*> all = {
      {"kernels", &t.kernels},
      {"calls", &t.calls},
      {"communicators", &t.communicators},
      {"windows", &t.windows},
      {"graphs", &t.graphs},
      {"bytes", &t.bytes},
      {"moved", &t.moved},
      {"held", &t.held},
      {"zero_ctas", &t.zero_ctas},
      {"sums", &t.sums},
      {"windowed_sums", &t.windowed_sums}};
  const auto found = all.find(name);
  return found == all.end() ? -1 : found->second->load();
}

const char* ncclGetErrorString(ncclResult_t result) {
  static constexpr const char* kStrings[] = {
      "no error",
      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error",
      "NCCL operation in progress"};
  return result >= 0 && result < ncclNumResults ? kStrings[result] : "unknown result code";
}

const char* ncclGetLastError(ncclComm_t handle) {
  const std::shared_ptr<Comm> comm = handle ? find(handle, "ncclGetLastError") : nullptr;
  const char* const error = comm ? comm->error.load() : nullptr;
  return error ? error : last_error();
}

ncclResult_t ncclGetVersion(int* version) {
  if (!version) return fail(ncclInvalidArgument, "ncclGetVersion: version is null");
  *version = static_cast<int>(settings().version);
  return ncclSuccess;
}

}  // extern "C"
