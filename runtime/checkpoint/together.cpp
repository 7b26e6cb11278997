#include "runtime/checkpoint/together.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <new>
#include <random>
#include <utility>

#include "runtime/checkpoint/new_folder.hpp"
#include "runtime/checkpoint/shard_info.hpp"
#include "runtime/checkpoint/writer.hpp"
#include "runtime/comm/least_and_most.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/detail/base/utf8.hpp"

namespace tessera::checkpoint {

void on_all(const World& world, const std::function<void()>& f) {
  enum Kind { contract, data, device, not_finite };
  bool has_failed = false;
  Kind kind = contract;
  std::string text;
  const auto keep = [&](Kind of, const char* what) {
    has_failed = true;
    kind = of;
    text = what;
  };
  try {
    f();
  } catch (const CommError&) {
    throw;  // there is no "together" any more
  } catch (const NotFinite& error) {
    keep(not_finite, error.what());
  } catch (const DataError& error) {
    keep(data, error.what());
  } catch (const ContractError& error) {
    keep(contract, error.what());
  } catch (const std::bad_alloc&) {
    keep(device, "checkpoint: this rank has no memory of the host left");
  } catch (const std::exception& error) {
    keep(device, error.what());
  }
  const int first = static_cast<int>(-world.max(has_failed ? -world.rank() : -world.size()));
  if (first == world.size()) return;
  if (first != world.rank()) text.clear();
  constexpr std::size_t kEach = 6;  // bytes in a double, exactly
  double heard[2] = {static_cast<double>(text.size()),
                     first == world.rank() ? static_cast<double>(kind) : 0};
  world.sum(heard);
  text.resize(static_cast<std::size_t>(heard[0]), '\0');
  for (std::size_t at = 0; at < text.size();) {
    double some[RankGroup::kAgreed] = {};
    for (std::size_t i = 0; i < kEach * std::size(some) && at + i < text.size(); ++i)
      some[i / kEach] += std::ldexp(static_cast<unsigned char>(text[at + i]), 8 * (i % kEach));
    world.sum(some);
    for (std::size_t i = 0; i < kEach * std::size(some) && at < text.size(); ++i, ++at)
      text[at] = static_cast<char>(static_cast<std::uint64_t>(some[i / kEach]) >> 8 * (i % kEach));
  }
  switch (static_cast<Kind>(static_cast<int>(heard[1]))) {
    case contract:
      throw detail::with_rank(ContractError(text), first);
    case data:
      throw detail::with_rank(DataError(text), first);
    case device:
      throw detail::with_rank(DeviceError(text), first);
    case not_finite:
      throw detail::with_rank(NotFinite(text), first);
  }
}

void on_rank_0(const World& world, const std::string& folder,
               const std::function<void(std::atomic<std::int64_t>& moves)>& f) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds kPatience{10};
  constexpr Clock::duration kBeat = std::chrono::milliseconds(200);
  std::atomic<std::int64_t> moves{0};
  Writer writer;  // last: ended first
  if (world.rank() == 0) writer.begin([&] { f(moves); });
  const Clock::time_point begin = Clock::now();
  Clock::time_point moved = begin;
  std::int64_t seen = 0;
  int told = 0;
  const auto stands_still = [&] {
    const Clock::time_point now = Clock::now();
    if (std::exchange(seen, moves.load()) != moves) moved = now;
    if (now - begin >= (told + 1) * kPatience)
      log(LogLevel::warning, concat("checkpoint: rank 0 has waited for the disk of '", folder,
                                    "' for ", ++told * kPatience.count(), " s"));
    return now - moved >= kPatience;
  };
  Clock::duration pause = std::chrono::milliseconds(1);
  for (double is_busy[] = {1}; is_busy[0] > 0;) {
    writer.wait_for(pause);
    pause = std::min(2 * pause, kBeat);
    while (!writer.is_done() && stands_still()) writer.wait_for(kBeat);
    is_busy[0] = writer.is_done() ? 0 : 1;
    world.sum(is_busy, "checkpoint_wait");
  }
  on_all(world, [&] {
    if (const std::exception_ptr failure = writer.end()) std::rethrow_exception(failure);
  });
}

void expect_as_rank_0(const World& world, const std::vector<double>& own,
                      const std::function<std::string(std::size_t)>& complaint) {
  std::vector<double> first = world.rank() == 0 ? own : std::vector<double>(own.size());
  world.sum(first);
  on_all(world, [&] {
    for (std::size_t i = 0; i < own.size(); ++i)
      if (own[i] != first[i]) throw ContractError(complaint(i));
  });
}

void expect_same(const World& world, const std::vector<Given>& given) {
  std::vector<double> own;
  for (const Given& one : given) own.push_back(comm::number_of(one.text));
  expect_as_rank_0(world, own, [&](std::size_t i) {
    return concat("checkpoint::save: rank ", world.rank(), " gives other ", given[i].what,
                  " than rank 0: ", printable(given[i].text), "; give the same on every rank");
  });
}

std::string common_id(const World& world) {
  double halves[4] = {};
  if (world.rank() == 0) {
    std::random_device random;
    const std::uint64_t host = NewFolder::own_host();
    const std::uint64_t drawn[] = {host >> 32, host & 0xffffffff, random(), random()};
    std::ranges::copy(drawn, halves);
  }
  world.sum(halves);
  const auto half = [&](int i) { return static_cast<std::uint64_t>(halves[i]); };
  return hex(half(0) << 32 | half(1)) + hex(half(2) << 32 | half(3));
}

std::vector<WrittenFile> gathered(const World& world, const std::vector<WrittenFile>& own) {
  constexpr std::size_t kNumbers = 5;  // a size, and two halves each of a checksum and a cover
  const std::size_t each = own.size() * kNumbers;
  std::vector<double> all(each * static_cast<std::size_t>(world.size()));
  double* number = all.data() + each * static_cast<std::size_t>(world.rank());
  for (const WrittenFile& file : own) {
    *number++ = static_cast<double>(file.size_bytes);
    for (const std::uint64_t word : {file.head_checksum, file.cover}) {
      *number++ = static_cast<double>(word >> 32);
      *number++ = static_cast<double>(word & 0xffffffff);
    }
  }
  for (std::size_t at = 0; at < all.size(); at += RankGroup::kAgreed)
    world.sum(std::span(all).subspan(at, std::min(RankGroup::kAgreed, all.size() - at)));
  std::vector<WrittenFile> files;
  for (std::size_t at = 0; at < all.size(); at += kNumbers) {
    const auto word = [&](std::size_t i) {
      return static_cast<std::uint64_t>(all[at + i]) << 32 |
             static_cast<std::uint64_t>(all[at + i + 1]);
    };
    files.push_back({static_cast<std::int64_t>(all[at]), word(1), word(3)});
  }
  return files;
}

}  // namespace tessera::checkpoint
