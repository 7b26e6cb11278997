// Memory of the host through which bytes go between the program and a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/device/device.hpp"
#include "tessera/memory/ledger.hpp"

namespace tessera {

// Memory that no ledger books, for as long as the device lives: of the host, which the device reads
// and writes too (pinned on CUDA), or of the device itself. Requires: queued work that uses it ends
// before the last handle goes.  Throws: OutOfMemory.
std::shared_ptr<std::byte> host_memory(const DeviceContext& context, std::int64_t bytes);
std::shared_ptr<std::byte> plain_memory(const DeviceContext& context, std::int64_t bytes);

// Memory that the host writes and a stream then reads, or the other way round. Reused only when the
// host knows that all readers are done, so the host never overwrites what a queued copy still
// needs.
class HostStaging {
 public:
  HostStaging(DeviceContext& context, Ledger& ledger);
  ~HostStaging();
  HostStaging(const HostStaging&) = delete;
  HostStaging& operator=(const HostStaging&) = delete;

  struct Piece {
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
    LastUse use;
    bool taken = false;
  };
  // At least `bytes` to use at once. Pass `use` of the piece as an access of the copy, then
  // give it back.
  Piece& take(std::int64_t bytes);
  void give_back(Piece& piece) noexcept;

 private:
  void tell(MemoryEvent::Kind kind, const Piece& piece) const;

  DeviceContext& context_;
  Ledger& ledger_;
  OwnerId owner_;
  std::vector<std::unique_ptr<Piece>> pieces_;
  std::vector<std::shared_ptr<std::byte>> storage_;
};

}  // namespace tessera
