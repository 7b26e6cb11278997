// Without ThreadSanitizer a stream of the shuffled executor is no fiber: bodies run where they are.
#include "tests/schedules/fiber.hpp"

namespace tessera::schedules {

struct StreamFiber::State {};

StreamFiber::StreamFiber() = default;
StreamFiber::~StreamFiber() = default;
void StreamFiber::submitted(Tick) {}
void StreamFiber::run(Tick, const Body& body, Exec& exec) { body.invoke(body.bytes, exec); }
void StreamFiber::finished(Tick) {}
void StreamFiber::learn(StreamFiber&, Tick) {}
void StreamFiber::teach_caller(Tick) {}
void StreamFiber::arrive(const void*) {}
void StreamFiber::leave(const void*) {}

}  // namespace tessera::schedules
