// Values on their way between the program and a device: what the program gives, and what it reads.
#include <algorithm>
#include <cstring>

#include "runtime/device/queue.hpp"
#include "runtime/tensor/expect_operand.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

struct GiveBack {
  HostStaging& staging;
  HostStaging::Piece& piece;
  ~GiveBack() { staging.give_back(piece); }
};

std::size_t bytes_of(const Tensor& t) {
  return static_cast<std::size_t>(
      checked_mul(t.numel(), static_cast<std::int64_t>(size_bytes(t.dtype()))));
}

// A GPU writes to pinned memory: piece by piece, each as large as the others but the last.
void copy_through_staging(std::span<std::byte> out, const Tensor& source) {
  constexpr std::size_t kPiece = 16 << 20;
  DeviceContext& context = source.device().context();
  Memory& memory = Memory::of(context);
  for (std::size_t at = 0; at < out.size(); at += kPiece) {
    const std::size_t n = std::min(kPiece, out.size() - at);
    HostStaging::Piece& piece = memory.staging().take(static_cast<std::int64_t>(n));
    const GiveBack give_back{memory.staging(), piece};
    const Access accesses[] = {source.access(AccessMode::read),
                               {&piece.use, piece.data, piece.data + n, AccessMode::write}};
    source.device().compute().launch(
        {.name = "copy_to_host",
         .cost = {.bytes = 2.0 * static_cast<double>(n)},
         .accesses = accesses},
        [to = piece.data, from = source.data() + at, n = static_cast<std::int64_t>(n)](Exec& exec) {
          queue_copy(exec, to, from, n);
        });
    context.block(context.record(StreamId::compute));
    context.host_reads(piece.data, n);
    if (context.executor().runs_bodies()) std::memcpy(out.data() + at, piece.data, n);
  }
}

}  // namespace

Tensor Tensor::from_bytes(std::span<const std::byte> bytes, const Shape& shape, DType dtype,
                          const Device& device, Caller at) {
  const CallSite site("Tensor::from", at);
  Tensor out = empty(shape, dtype, device);
  TESSERA_EXPECT(static_cast<std::int64_t>(bytes.size()) == out.storage()->bytes,
                 "Tensor::from: ", bytes.size(), " bytes do not fill ", shape, " of ", dtype);
  if (bytes.empty() || device.is_meta()) return out;
  Memory& memory = Memory::of(device);
  HostStaging::Piece& piece = memory.staging().take(static_cast<std::int64_t>(bytes.size()));
  const GiveBack give_back{memory.staging(), piece};
  device.context().host_writes(piece.data, bytes.size());
  std::memcpy(piece.data, bytes.data(), bytes.size());
  const Access accesses[] = {{&piece.use, piece.data, piece.data + bytes.size(), AccessMode::read},
                             out.access(AccessMode::write)};
  device.compute().launch(
      {.name = "copy_from_host",
       .cost = {.bytes = 2.0 * static_cast<double>(bytes.size())},
       .accesses = accesses},
      [to = out.data(), from = piece.data,
       n = static_cast<std::int64_t>(bytes.size())](Exec& exec) { queue_copy(exec, to, from, n); });
  return out;
}

void Tensor::to_bytes(std::span<std::byte> out, Caller at) const {
  const CallSite site("to_bytes", at);
  TESSERA_EXPECT(!device().is_meta(),
                 "a tensor on meta has no values; materialize the model first");
  TESSERA_EXPECT(out.size() == bytes_of(*this), "there is room for ", out.size(), " bytes, but ",
                 shape(), " of ", dtype(), " has ", bytes_of(*this));
  TESSERA_EXPECT(device().runs_bodies(),
                 "a value was read while planning, which has none; pass a stand-in");
  copy_to_host(out);
}

void Tensor::plan_to_bytes() const {
  TESSERA_EXPECT(!device().is_meta() && !device().runs_bodies(),
                 "plan_to_bytes: values exist here; read them by to_bytes");
  // Counted, never written: some addresses that have no bytes behind them.
  copy_to_host({reinterpret_cast<std::byte*>(std::uintptr_t{64}), bytes_of(*this)});
}

std::byte* Tensor::host_data(AccessMode mode) const {
  TESSERA_EXPECT(!device().is_meta(),
                 "a tensor on meta has no values; materialize the model first");
  TESSERA_EXPECT(device().kind() == DeviceKind::cpu && device().runs_bodies(),
                 "the host does not see the memory of this tensor; copy it by to_vector");
  detail::expect_values("host_data", *this);
  DeviceContext& context = device().context();
  context.submit_held();
  if (numel() == 0) return nullptr;
  const Access bytes = access(mode);
  if (mode == AccessMode::write) impl().storage->last_writer = "the host";
  context.block_on(bytes.use->touched);
  const auto size = static_cast<std::size_t>(static_cast<const std::byte*>(bytes.end) -
                                             static_cast<const std::byte*>(bytes.begin));
  mode == AccessMode::read ? context.host_reads(bytes.begin, size)
                           : context.host_writes(bytes.begin, size);
  return data();
}

void Tensor::copy_to_host(std::span<std::byte> out) const {
  if (out.empty()) return;
  detail::expect_values("to_bytes", *this);
  const Tensor source = raw::contiguous(*this);
  if (device().kind() == DeviceKind::cuda) return copy_through_staging(out, source);
  DeviceContext& context = device().context();
  context.submit_held();
  // What the host has waited for already is read where it lies, by several threads if they like.
  const Access read = source.access(AccessMode::read);  // an error if it was only lent
  if (device().runs_bodies() && context.host_clock().covers(read.use->touched)) {
    context.host_reads(source.data(), out.size());
    std::memcpy(out.data(), source.data(), out.size());
    return;
  }
  // The copy is queued: where blocking throws, because a peer has failed, it may run after the
  // caller's memory is gone. So it goes to memory of its own, which the device then keeps. What is
  // only planned is never written.
  const auto landing =
      std::make_shared<std::vector<std::byte>>(device().runs_bodies() ? out.size() : 0);
  std::byte* const to = device().runs_bodies() ? landing->data() : out.data();
  LastUse use;  // of these bytes, until the host has blocked
  const Access accesses[] = {read, {&use, to, to + out.size(), AccessMode::write}};
  try {
    device().compute().launch(
        {.name = "copy_to_host",
         .cost = {.bytes = 2.0 * static_cast<double>(out.size())},
         .accesses = accesses},
        [to, from = source.data(), n = out.size()](Exec&) { std::memcpy(to, from, n); });
    context.block(device().compute().record());
  } catch (...) {
    context.keep(landing);
    throw;
  }
  context.host_reads(to, out.size());
  if (device().runs_bodies()) std::memcpy(out.data(), to, out.size());
  // From here on the bytes are nobody's.
  context.tell({.kind = MemoryEvent::Kind::released, .begin = to, .end = to + out.size()});
}

double Tensor::item(std::optional<double> stand_in, Caller at) const {
  const CallSite site("item", at);
  TESSERA_EXPECT(numel() == 1, "item: the tensor has ", numel(), " elements, expected one");
  const bool plans = stand_in && !device().is_meta() && !device().runs_bodies();
  return visit(dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::byte bytes[sizeof(T)];
    plans ? copy_to_host(bytes) : to_bytes(bytes);
    if (plans) return *stand_in;
    T value;
    std::memcpy(&value, bytes, sizeof(T));
    return static_cast<double>(value);
  });
}

}  // namespace tessera
