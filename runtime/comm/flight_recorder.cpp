#include "tessera/comm/flight_recorder.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/json.hpp"

namespace tessera {
namespace {

using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;

using Word = std::atomic_ref<std::uint64_t>;

constexpr std::size_t kSeqWord = offsetof(FlightEntry, seq) / 8;
static_assert(kSeqWord == 0, "the words behind it are written between its two writes");
constexpr std::size_t kFingerprintWord = offsetof(FlightEntry, fingerprint) / 8;
constexpr std::size_t kStartedWord = offsetof(FlightEntry, started_ns) / 8;
constexpr std::size_t kDoneWord = offsetof(FlightEntry, done_ns) / 8;

const char* state_of(const FlightEntry& c) {
  return c.done_ns != 0 ? "done" : c.started_ns != 0 ? "started" : "submitted";
}

std::string json_object(const FlightEntry& c) {
  char fingerprint[24];
  std::snprintf(fingerprint, sizeof fingerprint, "\"%016llx\"",
                static_cast<unsigned long long>(c.fingerprint));
  return concat("{\"seq\": ", c.seq, ", \"process_group\": ", json::quote(c.role),
                ", \"name\": ", json::quote(c.name), ", \"operation\": \"", name(c.kind),
                "\", \"items\": ", c.n_items, ", \"count\": ", c.count, ", \"dtype\": \"", c.dtype,
                "\", \"reduce\": \"", name(c.reduce), "\", \"root\": ", c.root,
                ", \"target\": ", c.target, ", \"bytes\": ", c.bytes,
                ", \"backward_of\": ", c.progress.backward_of,
                ", \"divided_by\": ", c.progress.divided_by, ", \"steps\": ", c.progress.steps,
                ", \"stream\": \"", name(c.stream), "\", \"state\": \"", state_of(c),
                "\", \"submitted_ns\": ", c.submitted_ns, ", \"started_ns\": ", c.started_ns,
                ", \"done_ns\": ", c.done_ns, ", \"fingerprint\": ", fingerprint, "}");
}

}  // namespace

std::int64_t monotonic_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string to_string(const Progress& p) {
  std::string text;
  if (p.divided_by != 0) text += concat("; divided by ", p.divided_by);
  if (p.steps > 0) text += concat("; steps: ", p.steps);
  if (p.backward_of > 0) text += concat("; in the backward of forward ", p.backward_of);
  return text;
}

std::string FlightEntry::to_string() const {
  std::string text = concat("'", name, "' on '", role, "' (", tessera::name(kind));
  if (kind != CollectiveKind::barrier) text += concat(" of ", count, " x ", dtype);
  if (has_root(kind)) text += concat(" from rank ", root);
  if (kind == CollectiveKind::send_recv) text += concat(" to rank ", target);
  if (reduce != ReduceOp::sum) text += concat(", ", tessera::name(reduce));
  if (n_items > 1) text += concat(", the first of ", n_items, " items");
  return text + tessera::to_string(progress) + ")";
}

// ---- Recording

FlightRecorder::FlightRecorder() noexcept = default;

// The seq leaves the entry before its words change and comes back after them.
const FlightEntry& FlightRecorder::submit(FlightEntry& call, std::uint64_t content) noexcept {
  const std::uint64_t seq = last_.load(memory_order_relaxed) + 1;
  fingerprint_ = mix(mix(fingerprint_, seq), content);
  call.seq = seq;
  call.fingerprint = fingerprint_;
  call.submitted_ns = monotonic_ns();
  Words& out = entry(seq);
  Word(out[kSeqWord]).store(0, memory_order_relaxed);
  std::atomic_thread_fence(memory_order_release);
  const auto* const bytes = reinterpret_cast<const std::byte*>(&call);
  for (std::size_t i = kSeqWord + 1; i < kWords; ++i) {
    std::uint64_t word;
    std::memcpy(&word, bytes + i * sizeof word, sizeof word);
    Word(out[i]).store(word, memory_order_relaxed);
  }
  Word(out[kSeqWord]).store(seq, memory_order_release);
  last_.store(seq, memory_order_release);
  return call;
}

void FlightRecorder::restart() noexcept {
  steps_.store(0, memory_order_relaxed);
  last_.store(0, memory_order_release);
  started_.store(0, memory_order_release);
  done_.store(0, memory_order_release);
  for (auto& running : running_) running.store(0, memory_order_release);
  for (std::uint64_t n = 0; n < kCapacity; ++n) Word(entry(n)[kSeqWord]).store(0);
  fingerprint_ = kStart;
}

void FlightRecorder::started(std::uint64_t seq, StreamId stream) noexcept {
  Words& at = entry(seq);
  if (Word(at[kSeqWord]).load(memory_order_acquire) == seq)
    Word(at[kStartedWord]).store(static_cast<std::uint64_t>(monotonic_ns()), memory_order_relaxed);
  running_[index(stream)].store(seq, memory_order_release);
  started_.store(seq, memory_order_release);
}

void FlightRecorder::done(std::uint64_t seq, StreamId stream) noexcept {
  Words& at = entry(seq);
  if (Word(at[kSeqWord]).load(memory_order_acquire) == seq)
    Word(at[kDoneWord]).store(static_cast<std::uint64_t>(monotonic_ns()), memory_order_relaxed);
  running_[index(stream)].store(0, memory_order_release);
  done_.store(seq, memory_order_release);
}

// ---- Reading

bool FlightRecorder::find(std::uint64_t seq, FlightEntry& out) const noexcept {
  const std::uint64_t last = last_submitted();
  if (seq == 0 || seq > last || seq + kCapacity <= last) return false;
  Words& at = entry(seq);
  if (Word(at[kSeqWord]).load(memory_order_acquire) != seq) return false;
  Words words;
  for (std::size_t i = 0; i < kWords; ++i) words[i] = Word(at[i]).load(memory_order_relaxed);
  std::atomic_thread_fence(memory_order_acquire);
  if (Word(at[kSeqWord]).load(memory_order_relaxed) != seq) return false;
  out = std::bit_cast<FlightEntry>(words);
  return true;
}

std::uint64_t FlightRecorder::fingerprint_after(std::uint64_t seq) const noexcept {
  const std::uint64_t last = last_submitted();
  if (seq == 0 || seq > last || seq + kCapacity <= last) return 0;
  Words& at = entry(seq);
  if (Word(at[kSeqWord]).load(memory_order_acquire) != seq) return 0;
  const std::uint64_t fingerprint = Word(at[kFingerprintWord]).load(memory_order_relaxed);
  std::atomic_thread_fence(memory_order_acquire);
  return Word(at[kSeqWord]).load(memory_order_relaxed) == seq ? fingerprint : 0;
}

bool FlightRecorder::has_parted_from(const FlightRecorder& other) const noexcept {
  const std::uint64_t seq = std::min(last_submitted(), other.last_submitted());
  const std::uint64_t ours = fingerprint_after(seq), theirs = other.fingerprint_after(seq);
  return ours != 0 && theirs != 0 && ours != theirs;
}

std::string FlightRecorder::position(int rank) const {
  const std::uint64_t last = last_submitted();
  std::string text = concat("rank ", rank, " has submitted ", last, last == 1 ? " call" : " calls");
  FlightEntry call;
  if (find(last, call)) text += concat(", last ", call.to_string());
  if (last > 0) text += concat(", started ", last_started(), ", done ", last_done());
  return text;
}

std::string FlightRecorder::to_json(int rank, int size, const std::string& failure) const {
  const std::uint64_t last = last_submitted();
  std::string text = concat(
      "{\"rank\": ", rank, ", \"size\": ", size, ", \"failure\": ", json::quote(failure),
      ", \"now_ns\": ", monotonic_ns(), ", \"last_submitted\": ", last,
      ", \"last_started\": ", last_started(), ", \"last_done\": ", last_done(), ", \"entries\": [");
  // The rank may go on, and overwrites the oldest first: from the newest on back none is missing.
  std::vector<FlightEntry> calls;
  for (FlightEntry call; find(last - calls.size(), call);) calls.push_back(call);
  for (std::size_t i = calls.size(); i-- > 0;)
    text += concat(i + 1 == calls.size() ? "\n" : ",\n", json_object(calls[i]));
  return text + "\n]}\n";
}

bool first_difference(const FlightRecorder& a, const FlightRecorder& b, FlightEntry& in_a,
                      FlightEntry& in_b) {
  const std::uint64_t last = std::min(a.last_submitted(), b.last_submitted());
  const std::uint64_t first =
      last >= FlightRecorder::kCapacity ? last - FlightRecorder::kCapacity + 1 : 1;
  for (std::uint64_t n = first; n <= last; ++n)
    if (a.find(n, in_a) && b.find(n, in_b) && in_a.fingerprint != in_b.fingerprint) return true;
  return false;
}

}  // namespace tessera
