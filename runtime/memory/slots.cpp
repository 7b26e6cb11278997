#include "tessera/memory/slots.hpp"

#include <algorithm>

#include "runtime/memory/poison.hpp"
#include "tessera/base/checked.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera {

SlotRing::SlotRing(DeviceContext& context, std::byte* data, std::int64_t capacity_bytes, int count,
                   std::string_view owner)
    : context_(&context),
      data_(data),
      capacity_(capacity_bytes),
      owner_(Memory::of(context).ledger().owner(owner)),
      entries_(static_cast<std::size_t>(count)) {}

Slot SlotRing::take(std::int64_t bytes, StreamId stream) {
  TESSERA_EXPECT(bytes > 0 && bytes <= capacity_, "SlotRing::take: ", bytes,
                 " bytes do not fit a slot of ", capacity_);
  int oldest = -1;
  for (int i = 0; i < count(); ++i)
    if (entries_[i].booked == 0 && (oldest < 0 || entries_[i].returned < entries_[oldest].returned))
      oldest = i;
  TESSERA_EXPECT(oldest >= 0, "SlotRing::take: all ", count(),
                 " slots are taken; close a unit before "
                 "opening another, or raise the prefetch depth");
  Entry& entry = entries_[oldest];
  tell(MemoryEvent::Kind::claimed, oldest, stream);
  for (const Event& event : entry.last_use) context_->wait(stream, event);
  entry.use = {};
  entry.booked = round_up(bytes, kAlignmentBytes);
  Memory& memory = Memory::of(*context_);
  memory.ledger().add(owner_, entry.booked);
  ++taken_;
  tell(MemoryEvent::Kind::handed_out, oldest, stream);
  if (memory.poisons())
    poison(*context_, stream, entry.use, data_ + oldest * capacity_, entry.booked);
  return {data_ + oldest * capacity_, bytes, &entry.use, oldest};
}

// On a stream of its users that is ordered after all of them, if there is one: compute for gathered
// parameters, reduce for gradients. See Note [Poison adds no edge].
void SlotRing::poison_returned(int number) {
  Entry& entry = entries_[static_cast<std::size_t>(number)];
  for (std::size_t s = 0; s < kMaxStreams; ++s) {
    const auto id = static_cast<StreamId>(s);
    if (entry.use.touched[id] == 0 || !follows(*context_, id, entry.use)) continue;
    return poison(*context_, id, entry.use, data_ + number * capacity_, entry.booked);
  }
}

// The whole slot: whoever takes it may use all of it.
void SlotRing::tell(MemoryEvent::Kind kind, int number, StreamId stream) const {
  if (!context_->is_observed()) return;
  const std::byte* const begin = data_ + number * capacity_;
  context_->tell({.kind = kind,
                  .begin = begin,
                  .end = begin + capacity_,
                  .owner = Memory::of(*context_).ledger().name(owner_),
                  .stream = stream});
}

const Event* SlotRing::Entry::noted_at(StreamId stream, Tick used) const {
  const auto found = std::find_if(noted.begin(), noted.end(), [&](const Event& event) {
    return event.stream == stream && event.tick >= used;
  });
  return found == noted.end() ? nullptr : &*found;
}

void SlotRing::restart() {
  TESSERA_EXPECT(taken_ == 0, "SlotRing::restart: ", taken_, " slots are taken");
  for (Entry& entry : entries_) {
    entry.last_use.clear();
    entry.returned = 0;
  }
  returns_ = 0;
}

void SlotRing::note_uses(const Slot& slot) {
  Entry& entry = entries_.at(static_cast<std::size_t>(slot.number));
  for (std::size_t s = 0; s < kMaxStreams; ++s) {
    const auto id = static_cast<StreamId>(s);
    const Tick used = entry.use.touched[id];
    if (used <= context_->host_clock()[id] || entry.noted_at(id, used)) continue;
    std::erase_if(entry.noted, [&](const Event& event) { return event.stream == id; });
    entry.noted.push_back(context_->event_of_free(id, used));
  }
}

void SlotRing::give_back(const Slot& slot) {
  Entry& entry = entries_.at(static_cast<std::size_t>(slot.number));
  TESSERA_EXPECT(entry.booked != 0, "SlotRing::give_back: slot ", slot.number, " is not taken");
  Memory& memory = Memory::of(*context_);
  memory.ledger().remove(owner_, entry.booked);
  if (memory.poisons()) poison_returned(slot.number);
  // The events are recorded here, not at the next take: recorded later they would stand behind
  // work that was queued in between, and the taker would wait for that too.
  // A stream that did not touch the slot this time keeps its event of an earlier life.
  std::erase_if(entry.last_use, [&](const Event& event) {
    return entry.use.touched[event.stream] != 0 || context_->host_clock().covers(event.clock);
  });
  // A stream that no other user has waited for since gets its event first: it mostly comes last,
  // and its event's clock covers the others' uses, which then need no event of their own.
  const Clock& used = entry.use.touched;
  const auto needs_event = [&](StreamId id) {
    return used[id] > context_->host_clock()[id] &&
           std::none_of(entry.last_use.begin(), entry.last_use.end(),
                        [&](const Event& e) { return e.clock[id] >= used[id]; });
  };
  const auto is_followed = [&](StreamId id) {
    for (std::size_t s = 0; s < kMaxStreams; ++s)
      if (const auto user = static_cast<StreamId>(s);
          user != id && used[user] != 0 && context_->clock(user)[id] >= used[id])
        return true;
    return false;
  };
  for (const bool followed : {false, true})
    for (std::size_t s = 0; s < kMaxStreams; ++s)
      if (const auto id = static_cast<StreamId>(s); needs_event(id) && is_followed(id) == followed)
        entry.last_use.push_back(entry.noted_at(id, used[id])
                                     ? *entry.noted_at(id, used[id])
                                     : context_->event_of_free(id, used[id]));
  entry.noted.clear();
  tell(MemoryEvent::Kind::given_back, slot.number, StreamId::compute);
  entry.booked = 0;
  entry.returned = ++returns_;
  --taken_;
}

}  // namespace tessera
