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
// world). So one number is the state of a run. A run resumed at it gives the same batches, with any
// number of workers.
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

// What happens to samples at the end of an epoch that do not fill a global batch.
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
  int prefetch = 0;  // the most batches that the workers are ahead; 0: two for each worker
};

// Which samples a step takes.
class SamplePlan {
 public:
  // Throws: ContractError for options out of range; for a set without samples; for `drop` with a
  // set that fills no batch; and for `keep` if the last batch has fewer samples than ranks.
  SamplePlan(std::int64_t size, const DataLoaderOptions& options);

  std::int64_t size() const noexcept { return size_; }
  const DataLoaderOptions& options() const noexcept { return options_; }
  // The steps that begin in an epoch; with `run_on`, in the first epoch.
  std::int64_t steps_per_epoch() const noexcept { return steps_; }
  // The indices of this rank's batch: the rank-th contiguous part of the step's global batch.
  // `sample_at` orders its samples, as it does those of tokens. Requires: step >= 0.
  std::vector<std::int64_t> indices(std::int64_t step) const;

 private:
  std::int64_t size_;
  DataLoaderOptions options_;
  std::int64_t steps_ = 0;
};

namespace detail {

// Threads that make the results of steps, ahead of the one that takes them. Its end ends them, once
// the steps that they are making are made.
class Prefetcher {
 public:
  using Make = std::function<std::shared_ptr<void>(std::int64_t step)>;
  Prefetcher(Make make, std::int64_t first_step, std::int64_t steps, int workers, int depth);
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;
  ~Prefetcher();

  // The step that `take` returns next.
  std::int64_t next_step() const noexcept { return next_; }
  bool is_done() const noexcept { return next_ == end_; }
  // The next step's result; blocks until it is made. Requires: !is_done(). Throws: what making it
  // threw; the next call then gives the step behind it.
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

// Batch is what `collate` makes of a std::vector of samples. `collate` and `get` are called on
// threads of the workers, several at once, on const objects. They return host values, because one
// thread alone submits to a device: the caller makes tensors of these. An open file or a decoder of
// a worker's own is a thread_local in `get`, since a worker is one thread of a run.
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
  // The batch of one step, made on this thread.
  Batch at(std::int64_t step) const { return make_(plan_.indices(step)); }

  // Steps first_step .. first_step + steps - 1, in this order, with threads of its own while it
  // lives. If the user's code throws for a step, the call that asks for that step throws it.
  class Run {
   public:
    Run(const DataLoader& loader, std::int64_t first_step, std::int64_t steps)
        : prefetcher_(
              [&loader](std::int64_t step) { return std::make_shared<Batch>(loader.at(step)); },
              first_step, steps, loader.plan_.options().workers, loader.plan_.options().prefetch) {}

    // The state of the run: the step whose batch comes next. A step that threw counts as given.
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
