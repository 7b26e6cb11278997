// Copies between a device's memory and the host's beside it, in the order of the program:
//
//   x's compute     ── makes x ┐                ┌ wait ── may write x again
//   transfer                   └ wait │ copy    ┘ record
//   out's compute   ─── frees out's past ┘      └ wait ── reads out
#include "runtime/tensor/transfer.hpp"
#include "runtime/device/queue.hpp"
#include "runtime/tensor/expect_operand.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

void detail::launch_transfer(const char* name, const Tensor& out, const Tensor& x) {
  expect_values(name, x);
  const auto bytes = x.numel() * static_cast<std::int64_t>(size_bytes(x.dtype()));
  const Access accesses[] = {x.access(AccessMode::read), out.access(AccessMode::write)};
  x.device()
      .stream(StreamId::transfer)
      .launch(
          {.name = name, .cost = {.bytes = 2.0 * static_cast<double>(bytes)}, .accesses = accesses},
          [to = out.data(), from = x.data(), bytes](Exec& exec) {
            queue_copy(exec, to, from, bytes);
          });
  x.storage()->last_op = out.storage()->last_writer = name;
}

namespace raw {

void transfer_into(const Tensor& out, const Tensor& x) {
  if (out.numel() == 0) return;
  const Tensor from = contiguous(cast(x, out.dtype()));
  const Tensor to =
      out.is_contiguous() ? out : Tensor::empty(out.shape(), out.dtype(), out.device());
  const Stream transfer = x.device().stream(StreamId::transfer);
  transfer.wait(x.device().compute().record());
  transfer.wait(out.device().compute().record());
  detail::launch_transfer("transfer", to, from);
  const Event done = transfer.record();
  x.device().compute().wait(done);
  out.device().compute().wait(done);
  if (!out.is_contiguous()) copy_into(out, to);
}

Tensor moved(const Tensor& x, const Device& device) {
  if (x.device() == device) return x;
  TESSERA_EXPECT(x.device().is_beside(device), "moved: the tensor lies on another rank's device; ",
                 "read its values, and make one of them there");
  Tensor out = Tensor::empty(x.shape(), x.dtype(), device);
  copy_into(out, x);
  return out;
}

}  // namespace raw
}  // namespace tessera
