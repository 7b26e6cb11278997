// Batches of any data set, made ahead by threads (PyTorch: DataLoader with a DistributedSampler).
//
//   struct Images { std::int64_t size() const; Image get(std::int64_t index) const; } images;
//   const data::DataLoader loader(images, stack, {.batch_size = 32, .workers = 4});
//   for (auto& batch : loader.run(step, 1000)) ...        // resumes at any step
//
//   workers   ── get, get, collate 7 ──┐ ── 9 ──┐
//             ─── get, get, collate 8 ─│┐ ─ 10 ─│┐       `prefetch` batches ahead, given in order
//   caller    ──────────── 5 ── 6 ──── 7 8 ──── 9 10 ──
//
// A loader has no position: the samples of a batch are a pure function of (options, step, rank,
// world), so one number is the state of a run, and a run resumed at it, with any number of workers,
// gives the same batches.
#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/data/token_file.hpp"

namespace tessera::data {

// What becomes of the samples at the end of an epoch that fill no global batch.
enum class LastBatch : std::uint8_t {
  run_on,  // they share a batch with the first of the next epoch, as tokens do (see TokenLoader)
  drop,    // an epoch leaves them out (PyTorch: drop_last)
  keep,    // they are a smaller batch, split as evenly as its ranks allow
};

struct DataLoaderOptions {
  std::int64_t batch_size = 1;  // samples of one rank's batch; a step takes world times as many
  SampleOrder order = SampleOrder::shuffled;
  std::uint64_t seed = 0;
  LastBatch last_batch = LastBatch::run_on;
  int rank = 0, world = 1;
  int workers = 0;   // threads of a run; 0: the caller makes each batch when it is asked for
  int prefetch = 0;  // batches that the workers are ahead at most; 0: two for each
};

// Which samples a step takes.
class SamplePlan {
 public:
  // Throws: ContractError for options out of range, a set without samples, `drop` of a set that
  // fills no batch, and `keep` where the last batch has not one sample for each rank.
  SamplePlan(std::int64_t size, const DataLoaderOptions& options);

  std::int64_t size() const noexcept { return size_; }
  const DataLoaderOptions& options() const noexcept { return options_; }
  // Those that begin in an epoch; of `run_on` in the first one.
  std::int64_t steps_per_epoch() const noexcept { return steps_; }
  // The indices of this rank's batch: the rank-th contiguous part of the step's global batch, whose
  // samples `sample_at` orders as it does those of tokens.  Requires: step >= 0.
  std::vector<std::int64_t> indices(std::int64_t step) const;

 private:
  std::int64_t size_;
  DataLoaderOptions options_;
  std::int64_t steps_ = 0;
};

namespace detail {

// Threads that make the results of steps ahead of the one who takes them. Ends them at its end,
// when the steps that they are at are made.
class Prefetcher {
 public:
  using Make = std::function<std::shared_ptr<void>(std::int64_t step)>;
  Prefetcher(Make make, std::int64_t first_step, std::int64_t steps, int workers, int depth);
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;
  ~Prefetcher();

  // The step that `take` gives next.
  std::int64_t next_step() const noexcept { return next_; }
  bool is_done() const noexcept { return next_ == end_; }
  // Blocks until it is made.  Requires: !is_done().  Throws: what making it threw; the next call
  // gives the step behind it.
  std::shared_ptr<void> take();

 private:
  struct Shared;
  void end() noexcept;
  Make make_;
  std::int64_t next_, end_;
  std::unique_ptr<Shared> shared_;  // null without workers
};

template <class Dataset>
decltype(auto) sample(const Dataset& dataset, std::int64_t index) {
  if constexpr (requires { dataset.get(index); })
    return dataset.get(index);
  else if constexpr (requires { dataset(index); })
    return dataset(index);
  else
    return dataset[static_cast<std::size_t>(index)];
}
template <class Dataset>
using SampleIn = std::remove_cvref_t<decltype(sample(std::declval<const Dataset&>(), 0))>;
template <class Get>
using SampleOf = std::remove_cvref_t<std::invoke_result_t<const Get&, std::int64_t>>;
template <class Sample, class Collate>
using BatchOf = std::invoke_result_t<const Collate&, std::vector<Sample>>;

}  // namespace detail

// Batch: what `collate` makes of a std::vector of samples. It and `get` are called on threads of
// the workers, several at once, on const objects: they return host values, and tensors are made of
// these by who takes the batch, since one thread alone submits to a device. What a worker has for
// itself, an open file or a decoder, is a thread_local in `get`: a worker is one thread of a run.
template <class Batch>
class DataLoader {
 public:
  // A data set has size(), and get(index), (index) or [index]. It outlives the loader.
  template <class Dataset, class Collate>
    requires requires(const Dataset& d) { d.size(); }
  DataLoader(const Dataset& dataset, Collate collate, const DataLoaderOptions& options)
      : DataLoader(
            static_cast<std::int64_t>(dataset.size()),
            [&dataset](std::int64_t index) -> detail::SampleIn<Dataset> {
              return detail::sample(dataset, index);
            },
            std::move(collate), options) {}
  template <class Dataset, class Collate>
    requires requires(const Dataset& d) { d.size(); }
  DataLoader(const Dataset&& dataset, Collate collate, const DataLoaderOptions& options) = delete;
  // The samples are get(0) .. get(size - 1).
  template <class Get, class Collate>
  DataLoader(std::int64_t size, Get get, Collate collate, const DataLoaderOptions& options)
      : plan_(size, options),
        make_([get = std::move(get),
               collate = std::move(collate)](std::span<const std::int64_t> indices) -> Batch {
          std::vector<detail::SampleOf<Get>> samples;
          samples.reserve(indices.size());
          for (const std::int64_t index : indices) samples.push_back(get(index));
          return collate(std::move(samples));
        }) {}

  const SamplePlan& plan() const noexcept { return plan_; }
  std::int64_t steps_per_epoch() const noexcept { return plan_.steps_per_epoch(); }
  // One batch, made on this thread.
  Batch at(std::int64_t step) const { return make_(plan_.indices(step)); }

  // Steps first_step .. first_step + steps - 1, in this order, with threads of its own while it
  // lives. What the user's code throws for a step reaches who asks for that step.
  class Run {
   public:
    Run(const DataLoader& loader, std::int64_t first_step, std::int64_t steps)
        : prefetcher_(
              [&loader](std::int64_t step) { return std::make_shared<Batch>(loader.at(step)); },
              first_step, steps, loader.plan_.options().workers, loader.plan_.options().prefetch) {}

    // The state: the step whose batch comes next. One that threw counts as given.
    std::int64_t next_step() const noexcept { return prefetcher_.next_step(); }
    // The next batch; none behind the last.
    std::optional<Batch> next() {
      if (prefetcher_.is_done()) return std::nullopt;
      return std::move(*static_cast<Batch*>(prefetcher_.take().get()));
    }

    class iterator {
     public:
      using value_type = Batch;
      using difference_type = std::ptrdiff_t;
      explicit iterator(Run& run) : run_(&run), batch_(run.next()) {}
      Batch& operator*() { return *batch_; }
      iterator& operator++() {
        batch_ = run_->next();
        return *this;
      }
      bool operator==(std::default_sentinel_t) const { return !batch_.has_value(); }

     private:
      Run* run_;
      std::optional<Batch> batch_;
    };
    iterator begin() { return iterator(*this); }
    std::default_sentinel_t end() const { return {}; }

   private:
    detail::Prefetcher prefetcher_;
  };
  // The loader outlives it.
  Run run(std::int64_t first_step, std::int64_t steps) const {
    return Run(*this, first_step, steps);
  }

 private:
  SamplePlan plan_;
  std::function<Batch(std::span<const std::int64_t>)> make_;
};

template <class Dataset, class Collate>
  requires requires(const Dataset& d) { d.size(); }
DataLoader(const Dataset&, Collate, DataLoaderOptions)
    -> DataLoader<detail::BatchOf<detail::SampleIn<Dataset>, Collate>>;
template <class Get, class Collate>
DataLoader(std::int64_t, Get, Collate, DataLoaderOptions)
    -> DataLoader<detail::BatchOf<detail::SampleOf<Get>, Collate>>;

}  // namespace tessera::data
