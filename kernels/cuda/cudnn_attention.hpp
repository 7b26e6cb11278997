// Attention as graphs of cuDNN's: what is asked, in slices that keep to a workspace, and the plan
// that answers. Knows no device and no stream; called by cudnn.cpp, and by tests where no device
// is.
//
// Source: NVIDIA cuDNN, "Graph API: supported graph patterns, fused flash attention".
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/cuda/cudnn_graph.hpp"

namespace tessera::kernels::cuda::cudnn {

// The heads of one execution: all that a plan depends on, and its key.
struct Problem {
  std::int32_t batch, length;
  std::int32_t heads, kv_heads, head_dim;
  std::int32_t q_row, k_row, v_row, dq_row, dk_row, dv_row;
  DType dtype;
  bool causal, backward;
  std::uint8_t zero = 0;
  bool operator==(const Problem&) const = default;
};

// The numbers of what an execution binds.
enum Bound : std::int64_t {
  kQ = 1,
  kK,
  kV,
  kO,
  kLse,
  kScale,
  kMasked,
  kOne,
  kDo,
  kDq,
  kDk,
  kDv,
  kDelta,
  kSums
};

Problem problem_of(const AttentionArgs& args);
Problem problem_of(const AttentionBackwardArgs& args);

// f32 [B, H, T] of `problem`, rounded up to 256 bytes: the sums over o do, which backward keeps in
// the workspace in front of the plan's own.
std::int64_t delta_bytes(const Problem& problem);
// f32 [B, T, H, D] behind them, 0 before backward adds dq up in it.
std::int64_t sums_bytes(const Problem& problem);

struct Plan {
  Descriptor plan;
  std::int64_t workspace_bytes;
};
// One configuration that the heuristic proposed: what its plan wants, or why there is none.
struct Proposal {
  std::optional<Plan> plan;
  std::string reason;
};

// What cuDNN's heuristic proposes, its best guess first. `device_description` describes a device
// that is not there, as JSON (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR); it is read where `handle` is
// null. Each plan takes about a second: the last is the first that wants at most `enough_bytes`.
// Throws: std::runtime_error where cuDNN refuses the graph.
std::vector<Proposal> proposals(const Library& library, const Problem& problem,
                                std::int64_t enough_bytes, cudnnHandle_t handle,
                                std::string_view device_description = {});

// The first that wants at most `workspace_bytes`; `reason` says why there is none.
Proposal choose(const Library& library, const Problem& problem, std::int64_t workspace_bytes,
                cudnnHandle_t handle, std::string_view device_description = {});

}  // namespace tessera::kernels::cuda::cudnn
