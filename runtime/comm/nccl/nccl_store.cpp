#include "runtime/comm/nccl/nccl_store.hpp"

#include <algorithm>
#include <charconv>
#include <numeric>

#include "runtime/comm/store/message.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/lost_rank.hpp"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

constexpr std::string_view kMissing = "not all have come: ";
constexpr auto kExplainWithin = 1s;  // what NCCL only sees the consequence of

}  // namespace

std::string NcclStore::pack(std::span<const std::string> texts) {
  std::string all;
  for (const std::string& text : texts) all += concat(text.size(), ':', text);
  return all;
}

std::vector<std::string> NcclStore::unpack(std::string_view all) {
  std::vector<std::string> texts;
  while (!all.empty()) {
    std::size_t size = 0;
    const char* const end = std::from_chars(all.data(), all.data() + all.size(), size).ptr;
    const auto begin = static_cast<std::size_t>(end - all.data()) + 1;
    texts.emplace_back(all.substr(begin, size));
    all.remove_prefix(begin + size);
  }
  return texts;
}

NcclStore::NcclStore(const ProcessSeat& seat, std::chrono::milliseconds timeout)
    : seat_(seat), store_(detail::Store::join(detail::address_of(seat), seat.rank, timeout)) {}

void NcclStore::watch(double heartbeat_timeout_seconds) {
  store_->watch(
      std::chrono::milliseconds(static_cast<std::int64_t>(heartbeat_timeout_seconds * 1e3)),
      [this](int, detail::Departure how, const std::string& why) {
        if (how == detail::Departure::left && is_leaving_) return;
        const std::lock_guard lock(mutex_);
        if (!departed_.empty()) return;
        departed_ = why;
        is_lost_ = how == detail::Departure::lost;
      });
}

// ---- Telling

std::vector<int> NcclStore::all_ranks() const {
  std::vector<int> all(static_cast<std::size_t>(seat_.size));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// The first of them collects and hands out, so that n ranks ask for 2 n values and not for n * n.
std::vector<std::string> NcclStore::tell_all(const std::string& what, std::span<const int> ranks,
                                             const std::string& own,
                                             std::chrono::milliseconds timeout) const {
  const std::string all_key = concat(key(what), " of ", ranks[0]);
  const auto key_of = [&](int rank) { return concat(all_key, " from ", rank); };
  constexpr std::chrono::seconds kGrace{2};  // in which the first says who has not come
  if (seat_.rank != ranks[0]) {
    store_->set(key_of(seat_.rank), own);
    const std::string said = store_->get(all_key, timeout + kGrace);
    if (said.starts_with(kMissing)) throw CommError(said.substr(kMissing.size()));
    return unpack(said);
  }
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::vector<std::string> all{own};
  std::vector<int> missing;
  for (const int r : ranks.subspan(1)) try {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      all.push_back(store_->get(key_of(r), std::max(left, std::chrono::milliseconds(1))));
    } catch (const LostRank&) {
      throw;
    } catch (const CommError&) {
      if (std::chrono::steady_clock::now() < deadline) throw;
      missing.push_back(r);
    }
  if (!missing.empty()) {
    const std::string error =
        concat("World::nccl: for ", std::chrono::duration<double>(timeout).count(),
               " s (init_timeout_seconds) these ranks have not come to ", what, ": ",
               detail::describe_ranks(missing),
               "; all ranks make groups and symmetric memory in the same order");
    store_->set(all_key, concat(kMissing, error));
    throw CommError(error);
  }
  store_->set(all_key, pack(all));
  return all;
}

std::int64_t NcclStore::add(const std::string& counter, std::int64_t n) const {
  return store_->add(key(counter), n);
}

std::string NcclStore::ask(const std::string& what) const try {
  store_->add(key("asked"), 1);
  return store_->get(key(what), kExplainWithin);
} catch (const CommError&) {
  return "";
}

void NcclStore::answer(const std::string& what, const std::string& answer) const {
  store_->set(key(what), answer);
}

std::string NcclStore::from_first(std::string_view what, std::string_view own,
                                  std::chrono::milliseconds timeout) const {
  if (seat_.rank != 0) return store_->get(key(what), timeout);
  store_->set(key(what), own);
  return std::string(own);
}

// ---- Failure

std::string NcclStore::departed() const {
  const std::lock_guard lock(mutex_);
  return departed_;
}

bool NcclStore::is_lost() const {
  const std::lock_guard lock(mutex_);
  return is_lost_;
}

void NcclStore::expect_nobody_lost() const {
  const std::lock_guard lock(mutex_);
  if (!departed_.empty()) throw CommError(departed_);
}

// The first rank that fails says why for all; of a call that is late, also where they are.
std::string NcclStore::first_reason(std::string own, bool asks_positions, int attempt) try {
  if (store_->add(key("failures", attempt), 1) != 1)
    return store_->get(key("reason", attempt), kReasonWithin);
  const auto until = std::chrono::steady_clock::now() + kExplainWithin;
  for (int r = 0; r < seat_.size && asks_positions; ++r) {
    if (r == seat_.rank) continue;
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    try {
      own +=
          concat("; ", store_->get(concat(key("position", attempt), ' ', r), std::max(left, 1ms)));
    } catch (const CommError&) {
      own += concat("; rank ", r, " says nothing");
    }
  }
  store_->set(key("reason", attempt), own);
  return own;
} catch (const std::exception&) {  // rank 0, which serves it, may be who is gone
  return own;
}

bool NcclStore::failure(int attempt, const std::function<std::string()>& position,
                        std::string& why) try {
  if (store_->add(key("failures", attempt), 0) == 0) return false;
  store_->set(concat(key("position", attempt), ' ', seat_.rank), position());
  why = store_->get(key("reason", attempt), kReasonWithin);
  return true;
} catch (const std::exception& error) {
  why = error.what();
  return true;
}

}  // namespace tessera::comm
