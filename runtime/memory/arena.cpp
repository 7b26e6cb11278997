#include "tessera/memory/arena.hpp"

#include <algorithm>

#include "runtime/memory/poison.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/offset_plan.hpp"

namespace tessera {
namespace {

std::int64_t rounded(std::int64_t bytes) { return round_up(bytes, kAlignmentBytes); }

bool is_covered(std::span<const Event> by, const Event& event) {
  return std::ranges::any_of(by, [&](const Event& e) { return e.clock.covers(event.clock); });
}

const Event* noted_at(const std::vector<Event>& noted, StreamId stream, Tick used) {
  const auto found = std::ranges::find_if(
      noted, [&](const Event& event) { return event.stream == stream && event.tick >= used; });
  return found == noted.end() ? nullptr : &*found;
}

}  // namespace

bool Arena::is_free(std::int64_t offset, std::int64_t bytes) const {
  const std::int64_t end = checked_add(offset, rounded(bytes));
  return end <= bytes_ && std::none_of(holders_.begin(), holders_.end(), [&](const auto& h) {
           return h->begin < end && offset < h->end;
         });
}

std::int64_t Arena::best_gap(std::int64_t bytes) const {
  std::vector<AddressRange> taken;
  for (const auto& h : holders_)
    if (h->end > 0) taken.push_back({h->begin, h->end});
  return smallest_gap(taken, rounded(bytes), bytes_);
}

Slot Arena::take(std::int64_t offset, std::int64_t bytes, OwnerId owner) {
  TESSERA_EXPECT(bytes > 0 && offset >= 0 && offset % kAlignmentBytes == 0, "Arena::take: ", bytes,
                 " bytes at ", offset, "; offsets are multiples of ", kAlignmentBytes);
  if (!is_free(offset, bytes)) return {};
  const std::int64_t end = offset + rounded(bytes);
  const auto unused = std::ranges::find_if(holders_, [](const auto& h) { return h->end == 0; });
  const auto number = static_cast<int>(unused - holders_.begin());
  if (unused == holders_.end()) holders_.push_back(std::make_unique<Holder>());
  Holder& user = *holders_[static_cast<std::size_t>(number)];
  cut_out(offset, end, user.events);
  // What give_back adds: slots go back where memory has run out, too.
  user.events.reserve(user.events.size() + kMaxStreams);
  past_.reserve(past_.size() + static_cast<std::size_t>(taken_) + 1);
  user.begin = offset;
  user.end = end;
  user.owner = owner;
  user.use = {};
  user.is_used = false;
  ++taken_;
  Memory::of(context_).ledger().add(owner, end - offset);
  return {data_ + offset, bytes, &user.use, this, number};
}

// Takes [begin, end) out of the past, and adds what was last done to any of its bytes.
void Arena::cut_out(std::int64_t begin, std::int64_t end, std::vector<Event>& last_use) {
  for (std::size_t i = 0; i < past_.size();) {
    Past& past = past_[i];
    if (past.end <= begin || end <= past.begin) {
      ++i;
      continue;
    }
    const bool lasts_before = past.begin < begin, lasts_behind = end < past.end;
    if (!lasts_before && !lasts_behind && last_use.empty()) {
      last_use.swap(past.last_use);
    } else {
      for (const Event& event : past.last_use) {
        if (is_covered(last_use, event)) continue;
        std::erase_if(last_use, [&](const Event& e) { return event.clock.covers(e.clock); });
        last_use.push_back(event);
      }
    }
    if (lasts_before && lasts_behind) {
      Past behind{end, past.end, past.last_use};
      past.end = begin;
      past_.push_back(std::move(behind));
      return;  // no other meets it
    } else if (lasts_before) {
      past_[i++].end = begin;
    } else if (lasts_behind) {
      past_[i++].begin = end;
    } else {
      if (i + 1 < past_.size()) past = std::move(past_.back());
      past_.pop_back();
    }
  }
}

void Arena::begin_use(const Slot& slot, StreamId stream) {
  Holder& user = holder(slot);
  tell(MemoryEvent::Kind::claimed, user, stream);
  for (const Event& event : user.events) context_.wait(stream, event);
  tell(MemoryEvent::Kind::handed_out, user, stream);
  user.is_used = true;
  if (Memory::of(context_).poisons())
    poison(context_, stream, user.use, data_ + user.begin, user.end - user.begin);
}

void Arena::note_uses(const Slot& slot) {
  Holder& user = holder(slot);
  for (const StreamId id : kStreams) {
    const Tick used = user.use.touched[id];
    if (used <= context_.host_clock()[id] || noted_at(user.noted, id, used)) continue;
    std::erase_if(user.noted, [&](const Event& event) { return event.stream == id; });
    user.noted.push_back(context_.event_of_free(id, used));
  }
}

void Arena::give_back(const Slot& slot) {
  Holder& user = holder(slot);
  TESSERA_EXPECT(user.end > 0, "Arena::give_back: slot ", slot.number, " is not taken");
  Memory& memory = Memory::of(context_);
  memory.ledger().remove(user.owner, user.end - user.begin);
  if (memory.poisons()) poison_returned(user);
  record_last_use(user);
  if (!user.events.empty()) past_.push_back({user.begin, user.end, std::move(user.events)});
  if (user.is_used) tell(MemoryEvent::Kind::given_back, user, StreamId::compute);
  user.noted.clear();
  user.events.clear();
  user.begin = user.end = 0;
  --taken_;
}

// Recorded here, not when the bytes are taken again: later the events would stand behind work that
// was queued in between, and the taker would wait for that too.
void Arena::record_last_use(Holder& user) {
  std::vector<Event>& events = user.events;
  const std::size_t earlier = events.size();
  const Clock& used = user.use.touched;
  // A stream that no other user has waited for since gets its event first: it mostly comes last,
  // and its event's clock covers the others' uses, which then need no event of their own.
  const auto needs_event = [&](StreamId id) {
    return used[id] > context_.host_clock()[id] &&
           std::ranges::none_of(events, [&](const Event& e) { return e.clock[id] >= used[id]; });
  };
  const auto is_followed = [&](StreamId id) {
    return std::ranges::any_of(kStreams, [&](StreamId other) {
      return other != id && used[other] != 0 && context_.clock(other)[id] >= used[id];
    });
  };
  for (const bool followed : {false, true})
    for (const StreamId id : kStreams)
      if (needs_event(id) && is_followed(id) == followed) {
        const Event* const noted = noted_at(user.noted, id, used[id]);
        events.push_back(noted ? *noted : context_.event_of_free(id, used[id]));
      }
  // Of holders before it only what nobody who used the slot has waited for.
  const auto is_over = [&](const Event& event) {
    return context_.host_clock().covers(event.clock) ||
           is_covered(std::span(events).subspan(earlier), event);
  };
  for (std::size_t i = earlier; i-- > 0;)
    if (is_over(events[i])) events.erase(events.begin() + static_cast<std::ptrdiff_t>(i));
}

void Arena::restart() {
  TESSERA_EXPECT(taken_ == 0, "Arena::restart: ", taken_, " slots are taken");
  past_.clear();
}

void Arena::tell(MemoryEvent::Kind kind, const Holder& user, StreamId stream) const {
  if (!context_.is_observed()) return;
  context_.tell({.kind = kind,
                 .begin = data_ + user.begin,
                 .end = data_ + user.end,
                 .owner = Memory::of(context_).ledger().name(user.owner),
                 .stream = stream});
}

}  // namespace tessera
