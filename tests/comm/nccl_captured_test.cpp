// Captured steps over World::nccl: their graphs hold NCCL's communicators, so a failure and the end
// of a world drop them first; and what a replay submits is watched and compared as an eager step's.
#include <chrono>
#include <stdexcept>
#include <thread>

#include "tessera/device/device_context.hpp"
#include "tests/comm/nccl_worlds.hpp"
#include "tests/cuda/captured_job.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/thrown.hpp"

using namespace tessera;
using namespace tessera::testing;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;

namespace {

constexpr int kUntilReplays = 6;  // calls, of which the last ones launch a graph

// A job whose step is captured, and losses of its calls. Batches are numbered by the optimizer.
struct CapturedJob {
  explicit CapturedJob(World& world)
      : job(world, {.ranks = world.size()}, 1),
        step(job.device, [this](const std::vector<Tensor>& batch) { return job.step(batch); }) {}

  float call() {
    const auto number = static_cast<std::uint64_t>(job.optimizer->steps());
    return step(job.batch(number))[0].to_vector<float>()[0];
  }
  std::vector<float> calls(int n) {
    std::vector<float> losses;
    for (int i = 0; i < n; ++i) losses.push_back(call());
    return losses;
  }

  Job job;
  CapturedStep step;
};

}  // namespace

TEST_CASE("nccl: a world ends while its captured steps live, and they say so", "[comm]") {
  const std::vector<std::string> all = nccl_threads(2, [](World& world) {
    CapturedJob captured(world);
    captured.calls(kUntilReplays);
    if (captured.step.replays() == 0) return std::string("no replay");
    if (double_count("graphs") == 0) return std::string("no graph holds calls of NCCL");
    world.end();
    return thrown_by<ContractError>([&] { captured.call(); });
  });
  for (const std::string& said : all) CHECK_THAT(said, Contains("World has ended"));
  CHECK(double_count("communicators") == 0);
  CHECK(double_count("graphs") == 0);
}

TEST_CASE("nccl: a failure drops the graphs of captured steps, which are captured anew", "[comm]") {
  for (int odd = 0; odd < 2; ++odd) {
    const NcclBody body = [odd](World& world) {
      CapturedJob captured(world);
      const StateDict model = captured.job.model.state_dict(),
                      optimizer = captured.job.optimizer->state_dict(captured.job.model);
      const autograd::RandomState begin = autograd::random_state();
      const std::vector<float> before = captured.calls(kUntilReplays);
      const std::int64_t replays = captured.step.replays();
      std::string cause;
      try {
        if (world.rank() == odd) throw std::runtime_error("no luck");
        captured.calls(3);
      } catch (const std::exception&) {
        cause = reset(captured.job.model).cause;
      }
      captured.job.model.load(model);
      captured.job.optimizer->load(captured.job.model, optimizer);
      autograd::random_state() = begin;
      const std::vector<float> after = captured.calls(kUntilReplays);
      captured.calls(2);
      return concat(cause, before == after ? "; same losses" : "; other losses",
                    replays > 0 && captured.step.replays() > replays ? "" : "; no replays");
    };
    WorldOptions windows;
    windows.nccl.windows = true;  // gradients lie at one place, and outlive graphs
    for (const auto& all :
         {nccl_threads(2, body), nccl_processes(2, body), nccl_threads(2, body, windows)})
      for (const std::string& said : all)
        CHECK_THAT(said, Contains(concat("rank ", odd, " failed: no luck; same losses")) &&
                             !Contains("no replays"));
  }
  CHECK(double_count("communicators") == 0);
}

TEST_CASE("nccl: a failure within a capture drops what has begun", "[comm]") {
  for (const std::string& said : nccl_threads(2, [](World& world) {
         int runs = 0;
         CapturedJob captured(world);
         CapturedStep step(captured.job.device, [&](const std::vector<Tensor>& batch) {
           const bool captures = captured.job.device.context().is_capturing();
           auto out = captured.job.step(batch);
           if (captures && ++runs == 1) {
             if (world.rank() == 1) throw std::runtime_error("no luck");
             // Peers fail meanwhile, and the next call of the world says so.
             for (;; std::this_thread::sleep_for(10ms)) out = captured.job.step(batch);
           }
           return out;
         });
         const StateDict begun = captured.job.optimizer->state_dict(captured.job.model);
         std::string heard;
         for (int i = 0; i < 10; ++i) try {
             step(captured.job.batch(1));
           } catch (const std::exception&) {
             heard += reset(captured.job.model).cause;
             nn::init(captured.job.model, nn::Seed{1});
             // Some ranks had seen the end of a step that others had not, and have counted it.
             captured.job.optimizer->load(captured.job.model, begun);
           }
         return concat(heard, step.replays() > 0 ? "" : "; no replays");
       }))
    CHECK_THAT(said, Contains("no luck") && !Contains("no replays") && !Contains("threw"));
  CHECK(double_count("communicators") == 0);
}

TEST_CASE("nccl: a replay that a rank does not come to is late, and says who is where", "[comm]") {
  const std::vector<std::string> all =
      nccl_threads(2,
                   [](World& world) {
                     CapturedJob captured(world);
                     captured.calls(kUntilReplays);
                     world.barrier();
                     std::string heard;
                     try {
                       if (world.rank() == 1) std::this_thread::sleep_for(3s);
                       captured.calls(3);
                     } catch (const CommError& error) {
                       heard = error.what();
                     }
                     const ShardReset done = reset(captured.job.model);
                     return concat(heard, done.parameters_are_consistent ? "; consistent" : "");
                   },
                   {.timeout_seconds = 1});
  for (const std::string& said : all)
    CHECK_THAT(said, Contains("the replay of a captured step, calls ") &&
                         Contains("has taken 1 s; rank 0 has submitted ") &&
                         Contains("rank 1 has submitted ") && Contains("'barrier'") &&
                         !Contains("; consistent"));
}

// Timeouts are 100 s: what is told here is told by comparing.
TEST_CASE("nccl: a rank that replays and one that submits something else are told apart",
          "[comm]") {
  for (const std::string& said : nccl_threads(2, [](World& world) {
         CapturedJob captured(world);
         captured.calls(kUntilReplays);
         std::string heard;
         try {
           if (world.rank() == 1)
             for (;;) world.sum(1);
           captured.calls(3);
         } catch (const CommError& error) {
           heard = error.what();
         }
         reset(captured.job.model);
         return heard;
       }))
    CHECK_THAT(said, Contains(": rank 0 submitted '") && Contains("rank 1 submitted 'sum'") &&
                         Contains("the same collectives"));
}

TEST_CASE("nccl: a replay has the fingerprint of the same step without one", "[comm]") {
  const std::vector<std::string> all = nccl_threads(2, [](World& world) {
    CapturedJob captured(world);
    captured.calls(kUntilReplays);
    std::string replays;
    for (int i = 0; i < 4; ++i) {
      if (i % 2 == world.rank()) captured.step.forget();
      const std::int64_t before = captured.step.replays();
      captured.calls(2);
      replays += std::to_string(captured.step.replays() - before);
    }
    const FlightRecorder& recorder = world.flight_recorder();
    return concat(replays, ' ', recorder.last_submitted(), ' ', recorder.fingerprint(), ' ',
                  captured.job.optimizer->steps());
  });
  CAPTURE(all);
  CHECK(all[0].substr(0, 4) == "0202");
  CHECK(all[1].substr(0, 4) == "2020");
  CHECK(all[0].substr(4) == all[1].substr(4));
}

TEST_CASE("nccl: a replay that is lost on all ranks counts as no step that was made", "[comm]") {
  const auto break_rank = double_call<void(int, long long, int)>("tessera_nccl_double_break");
  const std::vector<std::string> all =
      nccl_threads(2,
                   [&](World& world) {
                     CapturedJob captured(world);
                     captured.calls(kUntilReplays);
                     world.barrier();
                     std::string heard;
                     if (world.rank() == 1) break_rank(1, 0, 0);
                     try {
                       captured.calls(2);
                     } catch (const CommError& error) {
                       heard = error.what();
                     }
                     if (world.rank() == 1) break_rank(1, -1, 0);
                     const bool is_consistent = reset(captured.job.model).parameters_are_consistent;
                     return concat(is_consistent ? "consistent; " : "", heard);
                   },
                   {.timeout_seconds = 1});
  for (const std::string& said : all)
    CHECK_THAT(said, Contains("the replay of a captured step") && !Contains("consistent"));
}
