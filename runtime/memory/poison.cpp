#include "runtime/memory/poison.hpp"

#include "runtime/device/queue.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/arena.hpp"

namespace tessera {
namespace {

// Whether what `stream` launches next is ordered after every use in `use`.
bool follows(const DeviceContext& context, StreamId stream, const LastUse& use) {
  return context.clock(stream).covers(use.touched);
}

}  // namespace

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

// Only where the home stream is ordered after every use; else the next taker does it.
void Pool::poison_free(Block* block) noexcept {
  try {
    if (follows(context_, block->stream, block->use))
      poison(context_, block->stream, block->use, block->data, block->bytes);
  } catch (const std::exception& error) {
    log(LogLevel::error, concat("Pool: could not poison what is freed: ", error.what()));
  }
}

// On a stream of its users that is ordered after all of them, if there is one: compute for gathered
// parameters, reduce for gradients.
void Arena::poison_returned(Holder& user) {
  for (const StreamId id : kStreams) {
    if (user.use.touched[id] == 0 || !follows(context_, id, user.use)) continue;
    return poison(context_, id, user.use, data_ + user.begin, user.end - user.begin);
  }
}

}  // namespace tessera
