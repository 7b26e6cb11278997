// How the body of a collective moves bytes: by the kernels of its device, on its stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernel_table.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/detail/device/driver.hpp"

namespace tessera::comm {

// What a communicator on a GPU keeps from call to call. Threads: its rank's host thread.
struct PeerLink {
  std::vector<DriverCopy> copies;  // of a call, until they are queued in one submission
  std::vector<std::uint8_t> far;   // by peer: kernels here can't read its memory; empty: all can
  std::shared_ptr<std::byte> landing;  // kLandingBytes here, where any is far
  std::vector<const void*> near;       // what a sum reads: peers' own memory, or copies of it
};
inline constexpr std::int64_t kLandingBytes = std::int64_t{4} << 20;

class ItemMover {
 public:
  // `link` is null on the CPU and where no peer's memory is read.
  explicit ItemMover(Exec& exec, PeerLink* link = nullptr)
      : exec_(exec),
        kernels_(kernels::kernels_of(exec.driver)),
        link_(exec.driver ? link : nullptr) {
    if (link_) link_->copies.clear();  // what a call that threw has left
  }

  // The ranges do not overlap unless they are equal; then nothing moves. With a link it is `finish`
  // that queues it.
  void copy(void* out, const void* in, std::size_t bytes) const {
    if (out == in || bytes == 0) return;
    const auto size = static_cast<std::int64_t>(bytes);
    if (link_)
      link_->copies.push_back({out, in, size});
    else
      kernels_.copy({out, in, size}, exec_);
  }
  // `count` elements of all ranks, by the operation and in the dtype of `c`.
  void reduce(void* out, const void* const* inputs, int size, std::int64_t count,
              const Collective& c) const {
    if (link_ && !link_->far.empty()) return reduce_far(out, inputs, size, count, c);
    kernels_.reduce_peers({out, inputs, count, size, c.dtype, operation(c)}, exec_);
  }
  // After the last copy of a call.
  void finish() const;

 private:
  static kernels::PeersOp operation(const Collective& c) {
    return c.reduce == ReduceOp::max ? kernels::PeersOp::max : kernels::PeersOp::sum;
  }
  void reduce_far(void* out, const void* const* inputs, int size, std::int64_t count,
                  const Collective& c) const;

  Exec& exec_;
  const kernels::Kernels& kernels_;
  PeerLink* link_;
};

}  // namespace tessera::comm
