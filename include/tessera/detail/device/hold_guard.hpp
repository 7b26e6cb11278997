// Operations that are held back until something depends on them.
#pragma once

#include <utility>

#include "tessera/device/device_context.hpp"

namespace tessera {

// In its scope operations of the compute stream are held until something may depend on them: a
// tensor is saved for backward, memory of a unit goes back, or anything else is asked of the
// device. What is still held at the end is never submitted. So a function that is run again for
// what it saves does not compute beyond that. PyTorch stops such a run by an exception (early stop
// of non-reentrant checkpoints).
class HoldGuard {
 public:
  explicit HoldGuard(const Device& device)  // meta holds nothing
      : context_(device.is_meta() ? nullptr : &device.context()),
        before_(context_ && std::exchange(context_->holds_, true)) {
    if (context_) context_->submit_held();
  }
  // The function has ended: what is held is submitted if it writes what the program has kept, which
  // is any storage that somebody owns but `result`, the caller's own.
  void end(const void* result) {
    if (context_) context_->submit_kept(result);
  }
  ~HoldGuard() {
    if (!context_) return;
    context_->holds_ = before_;
    context_->drop_held();
  }
  HoldGuard(const HoldGuard&) = delete;
  HoldGuard& operator=(const HoldGuard&) = delete;

 private:
  DeviceContext* context_;
  bool before_;
};

}  // namespace tessera
