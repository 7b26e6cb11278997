#include "tessera/distributed/collectives.hpp"

#include <algorithm>
#include <string>

#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::dist {
namespace {

// One collective seen as rows: x is `sent` rows and the result `received` rows, all of n elements.
// A piece is the same columns of every row.
struct Rows {
  std::int64_t sent, received;
};

// Of what this rank does not read only shape and dtype count.
enum class Reads : std::uint8_t { shape, values };

void check(const char* name, const Tensor& x, const RankGroup& group, Reads reads = Reads::values) {
  const bool is_meta = x.device().is_meta();
  TESSERA_EXPECT(x.device() == group.device() || (is_meta && reads == Reads::shape), name,
                 ": the tensor is on ", is_meta ? "meta" : "another device",
                 ", not on that of group '", group.name(), "'; make it on the group's device()");
  TESSERA_EXPECT(
      !x.requires_grad(), name,
      ": the tensor requires a gradient, but the collective has no derivative; detach the tensor");
}

void check_parts(const char* name, const Tensor& x, const RankGroup& group) {
  TESSERA_EXPECT(x.ndim() > 0 && x.size(0) % group.size() == 0, name, ": ", group.size(),
                 " ranks do not divide dimension 0 of ", x.shape(), "; pad it");
}

void check_rank(const char* name, const char* which, int rank, const RankGroup& group) {
  TESSERA_EXPECT(rank >= 0 && rank < group.size(), name, ": ", which, " is ", rank,
                 ", expected 0 to ", group.size() - 1, ", the ranks of group '", group.name(), "'");
}

// A rank that does not send may have its tensor on meta; one that does not receive has no result.
Tensor exchange(const Tensor& x, const Shape& shape, Rows rows, Collective item,
                const RankGroup& group) {
  const Device& device = group.device();
  const bool sends = !has_root(item.kind) || item.root == group.rank();
  const bool receives = item.kind != CollectiveKind::send_recv || item.target == group.rank();
  const Tensor out = receives ? Tensor::empty(shape, x.dtype(), device) : Tensor();
  const auto width = static_cast<std::int64_t>(size_bytes(x.dtype()));
  const std::int64_t n = x.numel() / rows.sent;
  const std::int64_t most = RankGroup::kWorkspaceBytes / (rows.sent * width);
  TESSERA_EXPECT(most > 0, name(item.kind), ": ", rows.sent,
                 " ranks are more than the workspace of ", RankGroup::kWorkspaceBytes,
                 " bytes has room for");
  // The shape is part of what ranks must agree on.
  const char* const what =
      device.context().intern(concat(name(item.kind), ' ', x.dtype(), ' ', x.shape()));
  RankGroup::Workspace& workspace = group.workspace();
  const Tensor all = Tensor::wrap(
      Storage::borrowed(device, workspace.memory->data(), workspace.memory->bytes(), workspace.use),
      {RankGroup::kWorkspaceBytes / width}, x.dtype());
  const Tensor from = sends ? raw::reshape(x, {rows.sent, n}) : Tensor();
  const Tensor to = receives ? out.view({rows.received, n}, {n, 1}, 0) : Tensor();
  const Stream compute = device.compute(), control = device.stream(group.control().stream());
  item.dtype = x.dtype();
  for (std::int64_t at = 0; at < std::max<std::int64_t>(n, 1); at += most) {
    item.count = std::min(most, n - at);
    const Tensor send = all.view({rows.sent, item.count}, {item.count, 1}, 0);
    // Rows of a piece lie apart in the result, but together in what a collective receives.
    const Tensor piece = receives ? raw::slice(to, 1, at, at + item.count) : Tensor();
    const bool is_apart = receives && !piece.is_contiguous();
    const Tensor recv =
        is_apart ? Tensor::empty({rows.received, item.count}, x.dtype(), device) : piece;
    if (sends) raw::copy_into(send, raw::slice(from, 1, at, at + item.count));
    Access accesses[] = {send.access(AccessMode::read), {}};
    item.send = send.data();
    if (receives) {
      item.recv = recv.data();
      accesses[1] = recv.access(AccessMode::write);
    }
    const std::size_t touched = item.count == 0 ? 0 : receives ? 2 : 1;
    control.wait(compute.record());
    group.control().submit(item, what, std::span(accesses).first(touched));
    compute.wait(control.record());
    if (is_apart) raw::copy_into(piece, recv);
  }
  return out;
}

}  // namespace

Tensor all_reduce(const Tensor& x, const RankGroup& group, ReduceOp op, Caller at) {
  const CallSite site("all_reduce", at);
  check("all_reduce", x, group);
  return exchange(x, x.shape(), {1, 1}, {.kind = CollectiveKind::all_reduce, .reduce = op}, group);
}

TargetCount count_targets(const Tensor& targets, const RankGroup& group, Caller at) {
  const CallSite site("count_targets", at);
  TESSERA_EXPECT(targets.dtype() == i32 || targets.dtype() == i64, "count_targets: targets are ",
                 targets.dtype(), ", expected i32 or i64");
  const Tensor own = detail::count_targets(raw::contiguous(targets), 0, f32);
  return {all_reduce(own, group), group.size()};
}

Tensor all_gather(const Tensor& x, const RankGroup& group, Caller at) {
  const CallSite site("all_gather", at);
  check("all_gather", x, group);
  const Shape shape =
      x.ndim() == 0 ? Shape{group.size()} : x.shape().with(0, checked_mul(x.size(0), group.size()));
  return exchange(x, shape, {1, group.size()}, {.kind = CollectiveKind::all_gather}, group);
}

Tensor reduce_scatter(const Tensor& x, const RankGroup& group, ReduceOp op, Caller at) {
  const CallSite site("reduce_scatter", at);
  check("reduce_scatter", x, group);
  check_parts("reduce_scatter", x, group);
  return exchange(x, x.shape().with(0, x.size(0) / group.size()), {group.size(), 1},
                  {.kind = CollectiveKind::reduce_scatter, .reduce = op}, group);
}

Tensor broadcast(const Tensor& x, int root, const RankGroup& group, Caller at) {
  const CallSite site("broadcast", at);
  check_rank("broadcast", "root", root, group);
  check("broadcast", x, group, root == group.rank() ? Reads::values : Reads::shape);
  return exchange(x, x.shape(), {1, 1}, {.kind = CollectiveKind::broadcast, .root = root}, group);
}

Tensor all_to_all(const Tensor& x, const RankGroup& group, Caller at) {
  const CallSite site("all_to_all", at);
  check("all_to_all", x, group);
  check_parts("all_to_all", x, group);
  return exchange(x, x.shape(), {group.size(), group.size()}, {.kind = CollectiveKind::all_to_all},
                  group);
}

Tensor send_recv(const Tensor& x, int root, int target, const RankGroup& group, Caller at) {
  const CallSite site("send_recv", at);
  check_rank("send_recv", "root", root, group);
  check_rank("send_recv", "target", target, group);
  check("send_recv", x, group, root == group.rank() ? Reads::values : Reads::shape);
  return exchange(x, x.shape(), {1, 1},
                  {.kind = CollectiveKind::send_recv, .root = root, .target = target}, group);
}

}  // namespace tessera::dist
