#include "runtime/comm/nccl/nccl_role.hpp"

#include "tessera/device/device_context.hpp"

namespace tessera::comm {
namespace {

void expect(DriverError error) {
  if (error) throw DeviceError(concat("World::nccl: an event could not be used: ", error));
}

}  // namespace

NcclRole::~NcclRole() {
  forget();
  for (void* event : events_) driver_.end_event(event);
}

void* NcclRole::take() {
  void* event = nullptr;
  if (events_.empty()) {
    expect(driver_.make_event(&event));
  } else {
    event = events_.back();
    events_.pop_back();
  }
  return event;
}

void NcclRole::give_back(Call& call) {
  events_.push_back(call.started);
  if (call.done) events_.push_back(call.done);
}

void NcclRole::begin(std::uint64_t seq, void* native_stream) {
  const std::lock_guard lock(mutex_);
  Call call{seq, take(), nullptr};
  expect(driver_.record(call.started, native_stream));
  calls_.push_back(call);
}

void NcclRole::end(void* native_stream) {
  const std::lock_guard lock(mutex_);
  Call& call = calls_.back();
  call.done = take();
  expect(driver_.record(call.done, native_stream));
}

const char* NcclRole::look() {
  const std::lock_guard lock(mutex_);
  for (; !calls_.empty(); calls_.pop_front()) {
    Call& call = calls_.front();
    bool is_reached = false;
    if (!call.has_started) {
      const DriverError error = driver_.query(call.started, &is_reached);
      if (error || !is_reached) return error;
      recorder_.started(call.seq, stream_);
      call.has_started = true;
    }
    if (!call.done) return nullptr;
    const DriverError error = driver_.query(call.done, &is_reached);
    if (error || !is_reached) return error;
    recorder_.done(call.seq, stream_);
    give_back(call);
  }
  return nullptr;
}

void NcclRole::forget() {
  const std::lock_guard lock(mutex_);
  for (Call& call : calls_) give_back(call);
  calls_.clear();
  openings = 0;
  comm.native = nullptr;
}

}  // namespace tessera::comm
