// Attention through cuDNN, behind the contracts of kernels/attention.hpp: forward, and backward
// where its sums may have any order. What cuDNN does not take, our own kernels do, and one line for
// the log says so: for the library, and for each shape.
//
// The heuristic is asked once for each shape, layout and device; the first plan within the
// workspace is kept, so that equal calls give equal bits, but for backward's dq, which cuDNN adds
// up by atomics. The plans' kernels are compiled when they are made: about a second each, on the
// first step.
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <exception>
#include <limits>
#include <mutex>
#include <string>
#include <unordered_map>

#include "kernels/cuda/cudnn_attention.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/kernels.hpp"

namespace tessera::kernels::cuda {
namespace cudnn {
namespace {

constexpr int kDevices = 64;

static_assert(std::has_unique_object_representations_v<Problem>, "it is hashed as bytes");

struct Key {
  Problem problem;
  std::int32_t device;
  std::int64_t workspace_bytes;
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  std::size_t operator()(const Key& key) const noexcept {
    const std::string_view bytes(reinterpret_cast<const char*>(&key.problem), sizeof key.problem);
    return std::hash<std::string_view>()(bytes) + 31 * static_cast<std::size_t>(key.device) +
           static_cast<std::size_t>(key.workspace_bytes);
  }
};

// Shared by all threads; an entry stays where it is. Executions take turns: the stream is the
// handle's.
struct Cache {
  std::mutex mutex;
  bool opened = false;
  Library library;
  std::array<cudnnHandle_t, kDevices> handles{};
  std::unordered_map<Key, std::optional<Plan>, KeyHash> plans;  // none where our own kernel runs
};
Cache& cache() {
  static Cache* const kept = new Cache;  // outlives threads that still submit when the process ends
  return *kept;
}

thread_local char g_line[512];

// A lasting line for the log or for an error.
const char* line(const std::string& text) {
  std::snprintf(g_line, sizeof g_line, "%.511s", text.c_str());
  return g_line;
}

const Library& opened(Cache& known, Exec& exec) {
  if (known.opened) return known.library;
  known.opened = true;
  Dl_info info{};
  const bool found = dladdr(reinterpret_cast<const void*>(&cublasLtCreate), &info) != 0;
  known.library = open_library(candidates(found && info.dli_fname ? info.dli_fname : ""));
  if (!known.library) exec.note = line(known.library.absence());
  return known.library;
}

// "[8, 1024, 12, 64], 12 heads of keys, of bf16"
std::string described(const Problem& p) {
  const auto text = [](std::int32_t x) { return std::to_string(x); };
  return "[" + text(p.batch) + ", " + text(p.length) + ", " + text(p.heads) + ", " +
         text(p.head_dim) + "], " + text(p.kv_heads) + " heads of keys, of " +
         std::string(name(p.dtype));
}

// Of the calling thread's device; null, with a note, where our own kernel is to run.
const Plan* plan_for(Cache& known, const Problem& problem, std::int64_t workspace_bytes, Exec& exec,
                     int device) {
  const auto [at, is_new] = known.plans.try_emplace({problem, device, workspace_bytes});
  if (is_new) try {
      if (problem.backward && problem.length % 128 != 0 && known.library.version < 91600)
        throw std::runtime_error(
            "before version 9.16 its backward is right only for lengths that 128 divides");
      cudnnHandle_t& handle = known.handles[static_cast<std::size_t>(device)];
      if (!handle) known.library.check(known.library.create(&handle), "no handle");
      Proposal chosen = choose(known.library, problem, workspace_bytes, handle);
      if (!chosen.plan) throw std::runtime_error(chosen.reason);
      at->second = std::move(chosen.plan);
    } catch (const std::exception& e) {
      exec.note =
          line("runs by our own kernels for " + described(problem) + ": cuDNN: " + e.what());
    }
  return at->second ? &*at->second : nullptr;
}

// The operands of one execution, by their numbers.
struct Bindings {
  std::array<std::int64_t, 16> numbers{};
  std::array<void*, 16> data{};
  std::size_t count = 0;

  void add(Bound number, const void* at) {
    numbers[count] = number;
    data[count++] = const_cast<void*>(at);
  }
};

void run(const Library& library, cudnnHandle_t handle, const Plan& plan, const Bindings& bound,
         void* workspace) {
  Descriptor pack(library, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, bound.numbers.data(), bound.count)
      .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, bound.data.data(),
           bound.count)
      .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &workspace)
      .finalize("operands");
  library.check(library.execute(handle, plan.plan.native(), pack.native()), "execution");
}

template <class... Pointers>
bool are_aligned(const Pointers*... data) {
  return ((reinterpret_cast<std::uintptr_t>(data) % 16 == 0) && ...);
}

// Calls `body` with the cache locked and its library, where there is one to serve heads of this
// width. False where our own kernel is to run. What is thrown once work is queued is an error.
template <class F>
bool with_library(std::int64_t head_dim, DType dtype, Exec& exec, const F& body) {
  if (!attention_suits_library(head_dim, dtype)) return false;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  try {
    Cache& known = cache();
    const std::lock_guard lock(known.mutex);
    return opened(known, exec) && body(known, device);
  } catch (const std::exception& e) {
    exec.error = line(std::string("cuDNN: ") + e.what());
    return true;
  }
}

void use_stream(Cache& known, int device, const Exec& exec) {
  known.library.check(known.library.set_stream(known.handles[static_cast<std::size_t>(device)],
                                               static_cast<cudaStream_t>(exec.native_stream)),
                      "stream");
}

constexpr float kOfMasked = -std::numeric_limits<float>::infinity(), kOneFactor = 1;

// What both passes read and, of o and lse, forward writes.
template <class Args>
Bindings bindings_of(const Args& a) {
  Bindings bound;
  bound.add(kQ, a.q);
  bound.add(kK, a.k);
  bound.add(kV, a.v);
  bound.add(kO, a.o);
  bound.add(kLse, a.lse);
  bound.add(kScale, &a.scale);
  if (a.causal) bound.add(kMasked, &kOfMasked);
  return bound;
}

bool forward(const AttentionArgs& a, Exec& exec) {
  if (!are_aligned(a.q, a.k, a.v, a.o)) return false;
  return with_library(a.head_dim, a.dtype, exec, [&](Cache& known, int device) {
    const auto most = static_cast<std::int64_t>(exec.workspace_bytes);
    const Plan* const plan = plan_for(known, problem_of(a), most, exec, device);
    if (!plan) return false;
    use_stream(known, device, exec);
    run(known.library, known.handles[static_cast<std::size_t>(device)], *plan, bindings_of(a),
        exec.workspace);
    return true;
  });
}

bool backward(const AttentionBackwardArgs& a, Exec& exec) {
  const std::int64_t bytes =
      attention_workspace_bytes(a.batch, a.length, a.heads, a.kv_heads, a.head_dim, a.dtype, false);
  // Below, ours is the faster one where warpgroups multiply.
  constexpr std::int32_t kLibraryLength = 4096;
  if (has_warpgroup_products() && a.length < kLibraryLength) return false;
  if (a.deterministic || bytes == 0 || !a.workspace ||
      !are_aligned(a.q, a.k, a.v, a.o, a.d_o, a.dq, a.dk, a.dv, a.workspace))
    return false;
  return with_library(a.head_dim, a.dtype, exec, [&](Cache& known, int device) {
    const Problem problem = problem_of(a);
    const std::int64_t delta = delta_bytes(problem), before = delta + sums_bytes(problem);
    const Plan* const plan = plan_for(known, problem, bytes - before, exec, device);
    if (!plan) return false;
    auto* const workspace = static_cast<std::byte*>(a.workspace);
    if (cudaMemsetAsync(workspace + delta, 0, static_cast<std::size_t>(before - delta),
                        static_cast<cudaStream_t>(exec.native_stream)) != cudaSuccess)
      throw std::runtime_error("the sums of dq could not be cleared");
    Bindings bound = bindings_of(a);
    bound.add(kDo, a.d_o);
    bound.add(kDq, a.dq);
    bound.add(kDk, a.dk);
    bound.add(kDv, a.dv);
    bound.add(kDelta, workspace);
    bound.add(kSums, workspace + delta);
    bound.add(kOne, &kOneFactor);
    use_stream(known, device, exec);
    run(known.library, known.handles[static_cast<std::size_t>(device)], *plan, bound,
        workspace + before);
    return true;
  });
}

}  // namespace
}  // namespace cudnn

void attention(const AttentionArgs& args, Exec& exec) {
  if (args.batch == 0 || args.length == 0 || exec.error) return;
  if (!cudnn::forward(args, exec)) attention_in_tiles(args, exec);
}

void attention_backward(const AttentionBackwardArgs& args, Exec& exec) {
  if (args.batch == 0 || args.length == 0 || exec.error) return;
  if (!cudnn::backward(args, exec) && !attention_backward_on_tensor_cores(args, exec))
    attention_backward_in_tiles(args, exec);
}

}  // namespace tessera::kernels::cuda
