// Groups: what a thread's calls add up to between ncclGroupStart and ncclGroupEnd, and who waits.
#include <chrono>
#include <functional>
#include <thread>

#include "tests/emulator/nccl/kernel.hpp"
#include "tests/emulator/nccl/state.hpp"

namespace tessera::nccl_double {
namespace {

struct Part {  // the kernel of one communicator
  std::shared_ptr<Comm> comm;
  cudaStream_t stream;
  std::vector<Call> calls;
};
struct Work {
  std::shared_ptr<Comm> comm;
  Job job;
  bool blocks;
};
struct Group {
  int depth = 0;
  ncclResult_t failed = ncclSuccess;
  std::vector<Part> parts;
  std::vector<Work> works;
};
thread_local Group group;

ncclResult_t refuse(ncclResult_t result, const std::string& line) {
  if (group.depth > 0) group.failed = result;
  return fail(result, line);
}

// What each rank must have launched, and on which communicators, when its kernel comes.
std::vector<Launches> count(const std::vector<Part>& parts, Lineage& lineage) {
  const std::lock_guard lock(lineage.mutex);
  for (const Part& part : parts)
    if (part.comm->lineage.get() == &lineage && is_collective(part.calls.front().kind))
      ++lineage.launches[part.comm->hash];
  std::vector<Launches> all;
  if (lineage.is_captured) return all;
  for (const auto& [hash, launches] : lineage.launches) all.push_back({hash, launches});
  return all;
}

ncclResult_t end(Group now) {
  if (now.failed != ncclSuccess) return now.failed;
  if (!now.parts.empty() && !now.works.empty())
    return fail(ncclInvalidUsage,
                "ncclGroupEnd: a group has collectives, or makes and ends communicators, not both");
  bool has_blocking = false, has_polled = false;
  const auto look = [&](const Comm& comm) { (comm.blocks ? has_blocking : has_polled) = true; };
  for (const Part& part : now.parts) look(*part.comm);
  for (const Work& work : now.works)
    if (!work.blocks) look(*work.comm);
  if (has_blocking && has_polled)
    return fail(ncclInvalidArgument,
                "ncclGroupEnd: blocking and non-blocking communicators in one group");
  for (const Part& part : now.parts) {
    const std::string broken = overlap_in(part.calls, part.comm->rank, part.comm->ranks);
    if (!broken.empty()) return fail(ncclInvalidArgument, "ncclGroupEnd: " + broken);
  }
  std::map<Lineage*, std::vector<Launches>> counts;
  for (const Part& part : now.parts)
    if (Lineage* const lineage = part.comm->lineage.get(); !counts.contains(lineage))
      counts[lineage] = count(now.parts, *lineage);
  for (Part& part : now.parts)
    now.works.push_back({part.comm,
                         [part, launches = counts[part.comm->lineage.get()]] {
                           launch(part.comm, part.calls, launches, part.stream);
                           return ncclSuccess;
                         },
                         false});
  std::vector<Job> jobs;
  bool is_in_progress = false;
  for (Work& work : now.works)
    if (work.blocks || work.comm->blocks) {
      jobs.push_back(std::move(work.job));
    } else {
      const std::lock_guard lock(work.comm->host);
      work.comm->jobs.push_back(std::move(work.job));
      work.comm->polls = settings().polls;
      is_in_progress = true;
    }
  const ncclResult_t result = finish(std::move(jobs));
  return result == ncclSuccess && is_in_progress ? ncclInProgress : result;
}

}  // namespace

ncclResult_t finish(std::vector<Job> jobs) {
  ncclResult_t first = ncclSuccess;
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    std::erase_if(jobs, [&](const Job& job) {
      const ncclResult_t result = job();
      if (result != ncclInProgress && first == ncclSuccess) first = result;
      return result != ncclInProgress;
    });
    if (jobs.empty()) return first;
    const long long most = settings().host_ms;
    if (most > 0 && std::chrono::steady_clock::now() - start > std::chrono::milliseconds(most))
      return fail(ncclSystemError,
                  "not all ranks have come to this call, or not all kernels and "
                  "graphs have ended, within " +
                      std::to_string(most) + " ms");
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

ncclResult_t submit(const std::shared_ptr<Comm>& comm, Job job, bool blocks) {
  Job whole = blocks ? std::move(job) : Job([comm, job = std::move(job)] {
    if (!comm->is_aborted) return job();
    return fail(ncclInvalidUsage, "this communicator has been aborted meanwhile");
  });
  group.works.push_back({comm, std::move(whole), blocks});
  return group.depth > 0 ? ncclSuccess : end(std::exchange(group, {}));
}

ncclResult_t submit(const std::shared_ptr<Comm>& comm, const Call& call, cudaStream_t stream) {
  Part* part = nullptr;
  for (Part& one : group.parts)
    if (one.comm == comm) part = &one;
  if (!part) part = &group.parts.emplace_back(Part{comm, stream, {}});
  if (part->stream != stream)
    return refuse(ncclInvalidUsage, std::string(name_of(call.kind)) +
                                        ": one group uses one communicator on two streams");
  part->calls.push_back(call);
  return group.depth > 0 ? ncclSuccess : end(std::exchange(group, {}));
}

ncclResult_t in_group(ncclResult_t result) {
  if (result != ncclSuccess && result != ncclInProgress && group.depth > 0) group.failed = result;
  return result;
}

}  // namespace tessera::nccl_double

using namespace tessera::nccl_double;

extern "C" {

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd: no group has been started");
  if (--group.depth > 0) return ncclSuccess;
  Group now = std::exchange(group, {});
  const ncclResult_t asked = refused("ncclGroupEnd");
  return asked != ncclSuccess ? asked : end(std::move(now));
}

}  // extern "C"
