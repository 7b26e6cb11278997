// The poison of freed memory: a launched fill with a pattern that no computation survives unseen.
// The pool and the slots call it, on a device whose Memory was told to.
//
// Note [Poison adds no edge]
// A fill that had to wait for something would order its stream after that for good, and hide the
// races that the poison is there to show. So memory is filled where the order is there already: at
// its next taking, behind the gate that the taker passes anyway; and at the free as well, on a
// stream that is ordered after every use so far, when there is one.
//
//   compute  ... last use of A ── free A: poison ............ take the same bytes: poison ── use
//   gather   ......... a use of A that compute waits for ─┘
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/device/device.hpp"

namespace tessera {

// Every byte is this one: a NaN in every floating dtype, -1 in every integer.
inline constexpr std::uint8_t kPoisonByte = 0xFF;

// Fills `bytes` at `data`, which `use` stands for, on `stream`.
void poison(DeviceContext& context, StreamId stream, LastUse& use, std::byte* data,
            std::int64_t bytes);

}  // namespace tessera
