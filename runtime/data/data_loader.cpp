#include "tessera/data/data_loader.hpp"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>

#include "runtime/base/thread.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"

namespace tessera::data {

SamplePlan::SamplePlan(std::int64_t size, const DataLoaderOptions& options)
    : size_(size), options_(options) {
  TESSERA_EXPECT(size > 0, "DataLoader: the data set has ", size, " samples; give it at least one");
  TESSERA_EXPECT(options.batch_size > 0 && options.workers >= 0 && options.prefetch >= 0,
                 "DataLoader: batch_size=", options.batch_size, ", workers=", options.workers,
                 ", prefetch=", options.prefetch, "; expected at least 1, 0 and 0");
  TESSERA_EXPECT(options.world > 0 && options.rank >= 0 && options.rank < options.world,
                 "DataLoader: rank is ", options.rank, ", expected 0 to ", options.world - 1);
  const std::int64_t global = checked_mul(options.batch_size, options.world);
  const std::int64_t rest = size % global;
  steps_ = options.last_batch == LastBatch::drop ? size / global : ceil_div(size, global);
  TESSERA_EXPECT(steps_ > 0, "DataLoader: ", size, " samples fill no batch of ", options.world,
                 " x ", options.batch_size, "; take smaller batches, or keep the last one");
  TESSERA_EXPECT(options.last_batch != LastBatch::keep || rest == 0 || rest >= options.world,
                 "DataLoader: the last batch of an epoch has ", rest, " samples for ",
                 options.world, " ranks; drop that batch, or let it run on");
}

std::vector<std::int64_t> SamplePlan::indices(std::int64_t step) const {
  TESSERA_EXPECT(step >= 0, "DataLoader: step ", step, " must not be negative");
  const std::int64_t global = options_.batch_size * options_.world;
  std::int64_t begin = 0, count = options_.batch_size;
  if (options_.last_batch == LastBatch::run_on) {
    begin = checked_add(checked_mul(step, global), options_.rank * count);
  } else {
    const std::int64_t first = step % steps_ * global;  // within the epoch
    const std::int64_t rows = std::min(global, size_ - first);
    const std::int64_t even = rows / options_.world, odd = rows % options_.world;
    count = even + (options_.rank < odd);
    begin = checked_add(checked_mul(step / steps_, size_),
                        first + options_.rank * even + std::min<std::int64_t>(options_.rank, odd));
  }
  std::vector<std::int64_t> out(static_cast<std::size_t>(count));
  for (std::int64_t& index : out) index = sample_at(begin++, size_, options_.order, options_.seed);
  return out;
}

namespace detail {

struct Prefetcher::Shared {
  struct Result {
    std::shared_ptr<void> value;
    std::exception_ptr error;
  };
  std::mutex mutex;
  std::condition_variable made, taken;
  std::map<std::int64_t, Result> results;  // by step
  std::int64_t to_make, limit;             // steps from `limit` on are too far ahead
  bool ends = false;
  std::vector<Thread> threads;  // last: joined first
};

Prefetcher::Prefetcher(Make make, std::int64_t first_step, std::int64_t steps, int workers,
                       int depth)
    : make_(std::move(make)), next_(first_step), end_(checked_add(first_step, steps)) {
  if (workers == 0) return;
  shared_ = std::make_unique<Shared>();
  Shared& s = *shared_;
  s.to_make = first_step;
  s.limit = first_step + (depth > 0 ? depth : 2 * workers);
  const auto work = [this, &s] {
    std::unique_lock lock(s.mutex);
    for (;;) {
      s.taken.wait(lock, [&] { return s.ends || s.to_make == end_ || s.to_make < s.limit; });
      if (s.ends || s.to_make == end_) return;
      const std::int64_t step = s.to_make++;
      lock.unlock();
      Shared::Result result;
      try {
        result.value = make_(step);
      } catch (...) {
        result.error = std::current_exception();
      }
      lock.lock();
      s.results.emplace(step, std::move(result));
      s.made.notify_one();
    }
  };
  try {
    for (int i = 0; i < workers; ++i) s.threads.emplace_back(work);
  } catch (...) {
    end();
    throw;
  }
}

Prefetcher::~Prefetcher() { end(); }

void Prefetcher::end() noexcept {
  if (!shared_) return;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->ends = true;
  }
  shared_->taken.notify_all();
  shared_.reset();
}

std::shared_ptr<void> Prefetcher::take() {
  TESSERA_EXPECT(!is_done(), "DataLoader: the run has ended at step ", end_);
  const std::int64_t step = next_++;
  if (!shared_) return make_(step);
  std::unique_lock lock(shared_->mutex);
  shared_->made.wait(lock, [&] { return shared_->results.contains(step); });
  const auto result = std::move(shared_->results.extract(step).mapped());
  ++shared_->limit;
  lock.unlock();
  shared_->taken.notify_all();
  if (result.error) std::rethrow_exception(result.error);
  return result.value;
}

}  // namespace detail
}  // namespace tessera::data
