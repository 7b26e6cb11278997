// Lesson 30: memory that goes back to its stream.
//
// A buffer belongs to the stream that it was allocated on. Freed, it is reused by that stream at
// once, though the work that uses it may not even have begun: the stream's own order keeps old and
// new use apart. Only where another stream has touched the buffer does its next user wait, and it
// waits on the device, for exactly that touch. That wait is called a gate.
//
//   compute   allocate A ── write A ─┬─ free A ── allocate B, where A lay ── wait ── write B
//   gather                           └── read A (slow) ────────────────────────┘
//
// So which bytes are reused depends on the program alone, never on how fast it runs, and the peak
// of memory is one number that can be planned.
//
// PyTorch: a program that uses a tensor on a second stream must call `record_stream`, and the freed
// block then lies idle until the host finds, at some later allocation, that the second stream is
// done, so the peak depends on timing. A gate needs no call, because every launch declares its
// accesses, and the block is handed out at once, because the wait is on the device.
#include <atomic>
#include <chrono>
#include <iostream>
#include <thread>

#include "tessera/base/error.hpp"
#include "tessera/memory/memory.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

constexpr auto kCompute = ts::StreamId::compute, kGather = ts::StreamId::gather;
constexpr std::int64_t kMiB = 1 << 20;

// An operation that says what it touches, as every operation of the library does. An Access is a
// range of bytes, read or written, and the LastUse of their allocation: for each stream, the last
// tick at which it touched them. The launch writes its tick there, and a free reads it: streams
// other than the buffer's own that are found there, and that it has not waited for, make the gate:
// an event of each of them.
template <class Body>
static void use(const ts::Stream& stream, const ts::Buffer& buffer, const Body& body) {
  const ts::Access accesses[] = {
      {&buffer.use(), buffer.data(), buffer.data() + buffer.bytes(), ts::AccessMode::write}};
  stream.launch({.name = "use", .accesses = accesses}, body);
}

static void one_stream_reuses_at_once() {
  const ts::Device device = ts::Device::cpu();
  ts::Memory& memory = ts::Memory::of(device);
  const std::byte* first = nullptr;
  for (int i = 0; i < 1000; ++i) {
    const ts::Buffer buffer = memory.allocate(kMiB, kCompute);  // freed at the end of its scope
    use(device.compute(), buffer, [p = buffer.data(), i](ts::Exec&) { *p = std::byte(i); });
    if (i == 0) first = buffer.data();
    CHECK(buffer.data() == first);
  }
  std::cout << "1. 1000 buffers of 1 MiB in turn: " << memory.reserved_bytes() / kMiB
            << " MiB reserved, " << memory.pool().gates_fired() << " gates\n";
  CHECK(memory.pool().segments_taken() == 1);
  CHECK(memory.pool().gates_fired() == 0);
}

static void another_stream_makes_a_gate(bool known) {
  const ts::Device device = ts::Device::cpu();
  ts::Memory& memory = ts::Memory::of(device);
  std::atomic<int> seen = 0;
  ts::Buffer a = memory.allocate(2 * kMiB, kCompute);
  std::byte* const p = a.data();
  use(device.compute(), a, [p](ts::Exec&) { *p = std::byte{1}; });
  device.gather().wait(device.compute().record());
  use(device.gather(), a, [p, s = &seen](ts::Exec&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    *s = std::to_integer<int>(*p);
  });
  if (known) device.compute().wait(device.gather().record());  // the program orders them itself
  a = {};  // freed while gather has hardly begun to read

  const ts::Buffer b = memory.allocate(2 * kMiB, kCompute);
  use(device.compute(), b, [p](ts::Exec&) { *p = std::byte{2}; });
  device.synchronize();
  const auto gates = memory.pool().gates_fired();
  std::cout << (known ? "3. With a wait of the program's own before the free"
                      : "2. Freed while another stream reads")
            << ": same address " << (b.data() == p ? "yes" : "no") << ", gather read " << seen
            << ", gates " << gates << '\n';
  CHECK(b.data() == p);
  CHECK(seen == 1);  // not 2: the new write came after the old read
  CHECK(gates == (known ? 0 : 1));
}

// Every byte is booked under an owner, so a peak can be explained.
static void the_ledger_knows_who() {
  const ts::Device device = ts::Device::cpu({.executor = ts::ExecutorKind::virtual_});
  ts::Memory& memory = ts::Memory::of(device);
  ts::Buffer weights;
  {
    const ts::OwnerGuard owner(device, "weights");
    weights = memory.allocate(3'000'000, kCompute);
  }
  {
    const ts::Buffer activations = memory.allocate(1'000'000, kCompute);
    const ts::OwnerGuard owner(device, "slots");
    const ts::Buffer slot = memory.allocate(500'000, kGather);
  }
  std::cout << "4. The ledger, sizes rounded to 256 bytes:\n" << memory.ledger().table() << '\n';
  CHECK(memory.ledger().live_bytes("weights") == 3'000'064);
  CHECK(memory.ledger().live_bytes("activations") == 0);
  CHECK(memory.ledger().peak_bytes() == 3'000'064 + 1'000'192 + 500'224);

  memory.pool().set_limit_bytes(memory.reserved_bytes());
  try {
    const ts::Buffer more = memory.allocate(100 * kMiB, kCompute);
    CHECK(false);
  } catch (const ts::OutOfMemory& error) {
    std::cout << "5. Beyond a limit: " << error.what() << '\n';
  }
}

int main() {
  one_stream_reuses_at_once();
  another_stream_makes_a_gate(false);
  another_stream_makes_a_gate(true);
  the_ledger_knows_who();
}
