// The graphs are cuDNN's patterns, operation by operation: it recognises the whole and answers with
// one fused kernel. s is the scores, p the softmax's weights, d* a derivative.
//
//   forward    s = scale q k^T, masked; lse = max s + log sum exp(s - max s); o = p v
//   backward   delta = rows of do o; p = exp(s - lse); dv = p^T do; ds = scale p (do v^T - delta);
//              dk = ds^T q; dq = ds k, added up in f32 by atomics, in any order
//
// With fewer heads of k and v, dk and dv are summed over the heads that read them.
#include "kernels/cuda/cudnn_attention.hpp"

#include <algorithm>

namespace tessera::kernels::cuda::cudnn {
namespace {

using Value = Graph::Value;

cudnnDataType_t type_of(DType dtype) {
  return dtype == DType::bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
}

// What both passes share. Heads lie side by side in a row, rows of consecutive t and b follow.
struct Shapes {
  const Problem& p;
  std::int64_t B = p.batch, T = p.length, H = p.heads, K = p.kv_heads, D = p.head_dim;
  cudnnDataType_t type = type_of(p.dtype);
  Four scores{B, H, T, T}, rows{B, H, T, 1}, queries{B, H, T, D}, keys{B, K, T, D};
  Four strides(std::int64_t row) const { return {T * row * D, D, row * D, 1}; }
  Value query_like(Graph& g, Bound number, std::int64_t row) const {
    return g.bound(number, queries, strides(row), type);
  }
  Value key_like(Graph& g, Bound number, std::int64_t row) const {
    return g.bound(number, keys, strides(row), type);
  }
  // Stored as [T, D], read as [D, T].
  Value key_transposed(Graph& g, Bound number, std::int64_t row) const {
    return g.bound(number, transposed(keys), transposed(strides(row)), type);
  }
};

// -inf where the key comes after the query.
Value masked(Graph& g, const Shapes& x, Value s) {
  if (!x.p.causal) return s;
  const Value row = g.inner(x.scores, CUDNN_DATA_INT32),
              column = g.inner(x.scores, CUDNN_DATA_INT32);
  const Value seen = g.inner(x.scores, CUDNN_DATA_BOOLEAN), to = g.inner(x.scores);
  g.index(s, 2, row);
  g.index(s, 3, column);
  g.pointwise(CUDNN_POINTWISE_CMP_GE, row, column, seen, CUDNN_DATA_BOOLEAN);
  g.select(seen, s, g.number(kMasked), to);
  return to;
}

void build_forward(Graph& g, const Shapes& x) {
  const Value q = x.query_like(g, kQ, x.p.q_row), k = x.key_transposed(g, kK, x.p.k_row);
  const Value v = x.key_like(g, kV, x.p.v_row), o = x.query_like(g, kO, x.p.heads);
  const Value lse = g.bound(kLse, x.rows, packed(x.rows), CUDNN_DATA_FLOAT);
  const Value product = g.inner(x.scores), scaled = g.inner(x.scores);
  g.product(q, k, product);
  g.pointwise(CUDNN_POINTWISE_MUL, product, g.number(kScale), scaled);
  const Value s = masked(g, x, scaled);
  const Value top = g.inner(x.rows), shifted = g.inner(x.scores), weights = g.inner(x.scores);
  const Value total = g.inner(x.rows), log = g.inner(x.rows), p = g.inner(x.scores, x.type);
  g.reduce(CUDNN_REDUCE_TENSOR_MAX, s, top);
  g.pointwise(CUDNN_POINTWISE_SUB, s, top, shifted);
  g.pointwise(CUDNN_POINTWISE_EXP, shifted, weights);
  g.reduce(CUDNN_REDUCE_TENSOR_ADD, weights, total);
  g.pointwise(CUDNN_POINTWISE_LOG, total, log);
  g.pointwise(CUDNN_POINTWISE_ADD, top, log, lse);
  g.pointwise(CUDNN_POINTWISE_DIV, weights, total, p);
  g.product(p, v, o);
}

void build_backward(Graph& g, const Shapes& x) {
  const Value q = x.query_like(g, kQ, x.p.q_row), o = x.query_like(g, kO, x.p.heads);
  const Value k = x.key_transposed(g, kK, x.p.k_row), v = x.key_transposed(g, kV, x.p.v_row);
  const Value d_o = x.query_like(g, kDo, x.p.heads), dq = x.query_like(g, kDq, x.p.dq_row);
  const Value dk = x.key_like(g, kDk, x.p.dk_row), dv = x.key_like(g, kDv, x.p.dv_row);
  const Value lse = g.bound(kLse, x.rows, packed(x.rows), CUDNN_DATA_FLOAT);
  const Value delta = g.bound(kDelta, x.rows, packed(x.rows), CUDNN_DATA_FLOAT);
  const Value scale = g.number(kScale);

  const Value products = g.inner(x.queries), sums = g.inner(x.rows);
  g.pointwise(CUDNN_POINTWISE_MUL, d_o, o, products);
  g.reduce(CUDNN_REDUCE_TENSOR_ADD, products, sums);
  g.pointwise(CUDNN_POINTWISE_MUL, sums, g.number(kOne), delta);

  const Value product = g.inner(x.scores), scaled = g.inner(x.scores), shifted = g.inner(x.scores);
  const Value p = g.inner(x.scores);
  g.product(q, k, product);
  g.pointwise(CUDNN_POINTWISE_MUL, product, scale, scaled);
  g.pointwise(CUDNN_POINTWISE_SUB, scaled, lse, shifted);
  g.pointwise(CUDNN_POINTWISE_EXP, masked(g, x, shifted), p);

  // to = a^T b, over the heads that read one head of k and v.
  const auto add_to_keys = [&](Value a, Value b, Value to) {
    const Value turned = g.inner(x.scores, transposed(packed(x.scores)), x.type);
    g.reshape(a, turned);
    if (x.H == x.K) return g.product(turned, b, to);
    const Value each = g.inner(x.queries, x.type);
    g.product(turned, b, each);
    g.reduce(CUDNN_REDUCE_TENSOR_ADD, each, to);
  };
  add_to_keys(p, d_o, dv);

  const Value dp = g.inner(x.scores), centered = g.inner(x.scores), weighted = g.inner(x.scores);
  const Value ds = g.inner(x.scores, x.type);
  g.product(d_o, v, dp);
  g.pointwise(CUDNN_POINTWISE_SUB, dp, delta, centered);
  g.pointwise(CUDNN_POINTWISE_MUL, centered, p, weighted);
  g.pointwise(CUDNN_POINTWISE_MUL, weighted, scale, ds);
  add_to_keys(ds, q, dk);
  const Value rows_of_k = g.inner(x.keys, x.strides(x.p.k_row), x.type);
  g.reshape(k, rows_of_k);
  const Value sums_of_dq = g.bound(kSums, x.queries, x.strides(x.H), CUDNN_DATA_FLOAT);
  g.product(ds, rows_of_k, sums_of_dq);
  g.pointwise(CUDNN_POINTWISE_IDENTITY, sums_of_dq, dq);
}

std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

Problem problem_of(const AttentionArgs& a) {
  return {.batch = a.batch,
          .length = a.length,
          .heads = a.heads,
          .kv_heads = a.kv_heads,
          .head_dim = a.head_dim,
          .q_row = a.q_row,
          .k_row = a.k_row,
          .v_row = a.v_row,
          .dq_row = 0,
          .dk_row = 0,
          .dv_row = 0,
          .dtype = a.dtype,
          .causal = a.causal,
          .backward = false};
}

Problem problem_of(const AttentionBackwardArgs& a) {
  return {.batch = a.batch,
          .length = a.length,
          .heads = a.heads,
          .kv_heads = a.kv_heads,
          .head_dim = a.head_dim,
          .q_row = a.q_row,
          .k_row = a.k_row,
          .v_row = a.v_row,
          .dq_row = a.dq_row,
          .dk_row = a.dk_row,
          .dv_row = a.dv_row,
          .dtype = a.dtype,
          .causal = a.causal,
          .backward = true};
}

std::int64_t delta_bytes(const Problem& p) {
  return aligned(std::int64_t{p.batch} * p.heads * p.length * 4);
}

std::int64_t sums_bytes(const Problem& p) {
  return aligned(std::int64_t{p.batch} * p.heads * p.length * p.head_dim * 4);
}

std::vector<Proposal> proposals(const Library& library, const Problem& problem,
                                std::int64_t enough_bytes, cudnnHandle_t handle,
                                std::string_view device_description) {
  Graph graph(library);
  const Shapes shapes{problem};
  problem.backward ? build_backward(graph, shapes) : build_forward(graph, shapes);
  const Descriptor operations = graph.finished(handle);

  Descriptor heuristic(library, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, operations)
      .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, &mode);
  std::optional<Descriptor> device;
  if (!handle) {
    device.emplace(library, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    device
        ->set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, device_description.data(),
              device_description.size())
        .finalize("device record");
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, *device);
  }
  heuristic.finalize("heuristic");

  std::int64_t count = 0;
  library.check(library.get(heuristic.native(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                            CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr),
                "heuristic");
  std::vector<Descriptor> found;
  std::vector<cudnnBackendDescriptor_t> native;
  for (std::int64_t i = 0; i < count; ++i)
    native.push_back(found.emplace_back(library, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).native());
  const std::int64_t room = count;
  if (room > 0)
    library.check(
        library.get(heuristic.native(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                    CUDNN_TYPE_BACKEND_DESCRIPTOR, room, &count, static_cast<void*>(native.data())),
        "heuristic");
  std::vector<Proposal> out;
  for (std::int64_t i = 0; i < count; ++i) {
    Proposal& proposal = out.emplace_back();
    try {
      Descriptor plan(library, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      if (handle) plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, &handle);
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, found[static_cast<std::size_t>(i)])
          .finalize("plan");
      const std::int64_t bytes = plan.integer(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
      proposal.plan.emplace(std::move(plan), bytes);
      if (bytes <= enough_bytes) break;
    } catch (const std::runtime_error& e) {
      proposal.reason = e.what();
    }
  }
  return out;
}

Proposal choose(const Library& library, const Problem& problem, std::int64_t workspace_bytes,
                cudnnHandle_t handle, std::string_view device_description) {
  Proposal none{.plan = std::nullopt, .reason = "no configuration is proposed"};
  for (Proposal& proposal :
       proposals(library, problem, workspace_bytes, handle, device_description)) {
    if (proposal.plan && proposal.plan->workspace_bytes <= workspace_bytes)
      return std::move(proposal);
    none.reason = proposal.plan
                      ? "it wants " + std::to_string(proposal.plan->workspace_bytes) +
                            " bytes of workspace, the most is " + std::to_string(workspace_bytes)
                      : proposal.reason;
  }
  return none;
}

}  // namespace tessera::kernels::cuda::cudnn
