#include "runtime/memory/poison.hpp"

#include "runtime/device/queue.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {

void poison(DeviceContext& context, StreamId stream, LastUse& use, std::byte* data,
            std::int64_t bytes) {
  const Access access{&use, data, data + bytes, AccessMode::write};
  const Op op{.name = "poison",
              .cost = {.flops = 0, .bytes = static_cast<double>(bytes), .wire_bytes = 0},
              .accesses = {&access, 1}};
  Stream(context, stream).launch(op, [data, bytes](Exec& exec) {
    queue_fill(exec, data, kPoisonByte, bytes);
  });
}

bool follows(const DeviceContext& context, StreamId stream, const LastUse& use) {
  return context.clock(stream).covers(use.touched);
}

}  // namespace tessera
