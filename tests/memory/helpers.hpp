// What the tests of this folder share: touching memory on a stream, and an upstream that remembers
// its segments.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "tessera/memory/memory.hpp"

namespace tessera::testing {

inline constexpr StreamId kCompute = StreamId::compute, kGather = StreamId::gather,
                          kReduce = StreamId::reduce;

// An operation of `stream` that writes all of `use`'s allocation and does nothing.
inline void touch(const Device& device, StreamId stream, LastUse& use) {
  const Access accesses[] = {{&use, nullptr, nullptr, AccessMode::write}};
  device.stream(stream).launch({.name = "touch", .accesses = accesses}, [](Exec&) {});
}

// Hands on to another upstream and keeps a list of what is out, in the order in which it was taken.
class ListedMemory final : public Upstream {
 public:
  using Segments = std::vector<std::pair<std::byte*, std::int64_t>>;

  ListedMemory(std::unique_ptr<Upstream> inner, Segments& segments)
      : inner_(std::move(inner)), segments_(segments) {}

  std::byte* allocate(std::int64_t bytes) noexcept override {
    std::byte* const data = inner_->allocate(bytes);
    if (data) segments_.emplace_back(data, bytes);
    return data;
  }
  void release(std::byte* data, std::int64_t bytes) noexcept override {
    std::erase(segments_, std::pair(data, bytes));
    inner_->release(data, bytes);
  }
  bool resize(std::byte* data, std::int64_t bytes, std::int64_t new_bytes) noexcept override {
    if (!inner_->resize(data, bytes, new_bytes)) return false;
    for (auto& segment : segments_)
      if (segment.first == data) segment.second = new_bytes;
    return true;
  }

 private:
  std::unique_ptr<Upstream> inner_;
  Segments& segments_;
};

}  // namespace tessera::testing
