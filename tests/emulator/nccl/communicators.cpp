// Communicators: made from an id or by a split, polled, finalized, destroyed and aborted.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "tests/emulator/nccl/state.hpp"
#include "tests/emulator/nccl/steps.hpp"

namespace tessera::nccl_double {
namespace {

std::string wrong_with(const ncclConfig_t& c) {
  const auto is_set = [](int value) { return value != NCCL_CONFIG_UNDEF_INT; };
  if (c.magic != 0xcafebeef) return "the configuration does not begin as NCCL_CONFIG_INITIALIZER";
  if (is_set(c.blocking) && c.blocking != 0 && c.blocking != 1) return "blocking is 0 or 1";
  if (is_set(c.splitShare) && c.splitShare != 0 && c.splitShare != 1) return "splitShare is 0 or 1";
  if ((is_set(c.minCTAs) && c.minCTAs <= 0) || (is_set(c.maxCTAs) && c.maxCTAs <= 0) ||
      (is_set(c.minCTAs) && is_set(c.maxCTAs) && c.minCTAs > c.maxCTAs))
    return "minCTAs and maxCTAs are positive, and in this order";
  if (is_set(c.CTAPolicy) && (c.CTAPolicy < 0 || c.CTAPolicy > NCCL_CTA_POLICY_ZERO))
    return "CTAPolicy is one of three";
  if (c.CTAPolicy == NCCL_CTA_POLICY_ZERO && settings().version < 22800)
    return "NCCL_CTA_POLICY_ZERO: NCCL has it from 2.28 on";
  return {};
}

// What stands against the ranks that have come; empty: nothing.
std::string wrong_with_peers(const Comm& comm) {
  for (int peer = 0; peer < comm.ranks; ++peer) {
    const Slot& one = comm.board->slot(peer);
    if (peer == comm.rank || one.presence == Presence::absent) continue;
    if (one.ranks != comm.ranks)
      return comm.name() + " meets rank " + std::to_string(peer) + " of " +
             std::to_string(one.ranks) + ": all ranks give the same number of them";
    if (one.process == process_number() && one.device == comm.device && !settings().one_gpu)
      return "Duplicate GPU detected : rank " + std::to_string(comm.rank) + " and rank " +
             std::to_string(peer) + " both on CUDA device " + std::to_string(comm.device);
  }
  return {};
}

// Takes the seat on `comm`'s board, null where that can't be; `lineage` null: the first of its own.
std::shared_ptr<Comm> sit_down(const std::string& name, int rank, int ranks, int device,
                               bool blocks, int ctas, std::shared_ptr<Lineage> lineage) try {
  const auto comm = std::make_shared<Comm>();
  comm->board = Board::open(name);
  comm->rank = rank;
  comm->ranks = ranks;
  comm->device = device;
  comm->blocks = blocks;
  comm->ctas = ctas;
  comm->hash = std::hash<std::string>()(name);
  comm->lineage = std::move(lineage);
  if (!comm->lineage) {
    comm->lineage = std::make_shared<Lineage>();
    comm->lineage->rank = rank;
  }
  if (comm->board->take_seat(rank, device, ranks)) {
    const std::lock_guard lock(comm->lineage->mutex);
    comm->lineage->launches[comm->hash] = 0;
    return comm;
  }
  fail(ncclInvalidUsage, "rank " + std::to_string(rank) + " of this id has been taken before");
  return nullptr;
} catch (const std::runtime_error& error) {
  fail(ncclInvalidUsage, error.what());
  return nullptr;
}

ncclResult_t wait_for_peers(Comm& comm) {
  const std::string wrong = wrong_with_peers(comm);
  if (!wrong.empty()) return fail(ncclInvalidUsage, wrong);
  return comm.board->is_full(comm.ranks) ? take_memory(comm) : ncclInProgress;
}

int ctas_of(const ncclConfig_t* config) {
  return config && config->maxCTAs != NCCL_CONFIG_UNDEF_INT ? std::min(config->maxCTAs, kMostCtas)
                                                            : kMostCtas;
}

ncclResult_t init(ncclComm_t* out, int ranks, const ncclUniqueId& id, int rank,
                  const ncclConfig_t* config) {
  const char* const function = config ? "ncclCommInitRankConfig" : "ncclCommInitRank";
  const auto wrong = [&](const std::string& line) {
    return in_group(fail(ncclInvalidArgument, std::string(function) + ": " + line));
  };
  if (const ncclResult_t asked = refused(function); asked != ncclSuccess) return in_group(asked);
  if (!out) return wrong("comm is null");
  *out = nullptr;
  if (ranks < 1 || ranks > kMostRanks || rank < 0 || rank >= ranks)
    return wrong("rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                 "; the double has up to " + std::to_string(kMostRanks));
  if (std::strncmp(id.internal, "tessera-nccl-", 13) != 0)
    return wrong("the id is not one of ncclGetUniqueId");
  const std::string of_config = config ? wrong_with(*config) : "";
  if (!of_config.empty()) return wrong(of_config);
  if (!emulator())
    return in_group(fail(ncclUnhandledCudaError, "no emulated GPU's module is loaded"));
  const auto comm = sit_down(id.internal, rank, ranks, emulator()->device_of(nullptr),
                             !config || config->blocking != 0, ctas_of(config), nullptr);
  if (!comm) return in_group(ncclInvalidUsage);
  *out = add(comm);
  return submit(comm, [comm, out] {
    const ncclResult_t result = wait_for_peers(*comm);
    if (!comm->blocks || result == ncclSuccess || result == ncclInProgress) return result;
    remove(comm->handle);
    *out = nullptr;
    return result;
  });
}

struct Split {
  std::shared_ptr<Comm> parent;
  Meeting meeting;
  int color, key;
  ncclComm_t* out;
  bool blocks;
  int ctas;
  std::shared_ptr<Comm> child;

  ncclResult_t poll() {
    if (!child) {
      const ncclResult_t met = meeting.poll();
      if (met != ncclSuccess) return met;
      if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
      std::vector<std::pair<int, int>> members;  // (key, rank)
      for (int peer = 0; peer < parent->ranks; ++peer) {
        const Step theirs = meeting.step_of(peer);
        if (theirs.color == color) members.emplace_back(theirs.key, peer);
      }
      std::sort(members.begin(), members.end());
      const auto me = std::find(members.begin(), members.end(), std::pair(key, parent->rank));
      const std::string name = parent->board->name().substr(1) + "." +
                               std::to_string(meeting.number()) + "." + std::to_string(color);
      child =
          sit_down(name, static_cast<int>(me - members.begin()), static_cast<int>(members.size()),
                   parent->device, blocks, ctas, parent->lineage);
      if (!child) return ncclInvalidUsage;
    }
    const ncclResult_t result = wait_for_peers(*child);
    if (result == ncclSuccess) *out = add(child);
    return result;
  }
};

ncclResult_t split(ncclComm_t handle, int color, int key, ncclComm_t* out,
                   const ncclConfig_t* config) {
  ncclResult_t why = ncclSuccess;
  const std::shared_ptr<Comm> comm = ready(handle, "ncclCommSplit", &why);
  if (!comm) return in_group(why);
  if (!out) return in_group(fail(ncclInvalidArgument, "ncclCommSplit: newcomm is null"));
  *out = nullptr;
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
    return in_group(fail(ncclInvalidArgument, "ncclCommSplit: a negative color"));
  const std::string wrong = config ? wrong_with(*config) : "";
  if (!wrong.empty()) return in_group(fail(ncclInvalidArgument, "ncclCommSplit: " + wrong));
  const bool blocks = config ? config->blocking != 0 : comm->blocks;
  const auto state =
      std::make_shared<Split>(Split{comm, Meeting(*comm, {kSplit, color, key, 0, 0}), color, key,
                                    out, blocks, ctas_of(config), nullptr});
  if (config && config->CTAPolicy == NCCL_CTA_POLICY_ZERO) ++totals().zero_ctas;
  return submit(comm, [state] { return state->poll(); });
}

// Whether no kernel of a peer runs that could still touch this rank's memory.
bool peers_have_ended(Comm& comm) {
  for (int peer = 0; peer < comm.ranks; ++peer)
    if (comm.board->slot(peer).running > 0 && !comm.board->is_dead(peer)) return false;
  return true;
}

void leave(Comm& comm, Presence as) {
  comm.slot().presence = as;
  {
    const std::lock_guard lock(comm.lineage->mutex);
    comm.lineage->launches.erase(comm.hash);
  }
  end_windows(comm);
  give_memory(comm);
  remove(comm.handle);
  comm.board->ring();
}

}  // namespace

ncclResult_t Meeting::poll() {
  if (!is_counted_) number_ = comm_.steps_planned++;
  is_counted_ = true;
  if (comm_.steps_done != number_) return ncclInProgress;  // an earlier one of the same group
  Slot& slot = comm_.slot();
  if (slot.steps == number_) {
    slot.last_steps[number_ % 2] = mine_;
    ++slot.steps;
    comm_.board->ring();
  }
  for (int peer = 0; peer < comm_.ranks; ++peer)
    if (comm_.board->slot(peer).steps <= number_) return ncclInProgress;
  ++comm_.steps_done;
  static constexpr const char* kNames[] = {"ncclCommSplit", "ncclCommWindowRegister"};
  for (int peer = 0; peer < comm_.ranks; ++peer) {
    const Step theirs = step_of(peer);
    if (theirs.kind == mine_.kind && theirs.bytes == mine_.bytes && theirs.flags == mine_.flags) {
      if (mine_.kind != kRegister || theirs.color == mine_.color) continue;
      return fail(ncclInvalidUsage, comm_.name() + " and rank " + std::to_string(peer) +
                                        " register a window after they have ended different ones: "
                                        "all ranks end them in one order");
    }
    return fail(ncclInvalidUsage,
                comm_.name() + " calls " + kNames[mine_.kind] + " (" + std::to_string(mine_.bytes) +
                    " bytes, flags " + std::to_string(mine_.flags) + "), and rank " +
                    std::to_string(peer) + " " + kNames[theirs.kind] + " (" +
                    std::to_string(theirs.bytes) + " bytes, flags " + std::to_string(theirs.flags) +
                    "): all ranks make such calls in one order");
  }
  return ncclSuccess;
}

}  // namespace tessera::nccl_double

using namespace tessera::nccl_double;

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> made{0};
  if (const ncclResult_t asked = refused("ncclGetUniqueId"); asked != ncclSuccess) return asked;
  if (!id) return fail(ncclInvalidArgument, "ncclGetUniqueId: uniqueId is null");
  std::memset(id->internal, 0, sizeof id->internal);
  std::snprintf(id->internal, sizeof id->internal, "tessera-nccl-%llx-%d",
                static_cast<unsigned long long>(process_number()), made.fetch_add(1));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  return init(comm, nranks, id, rank, nullptr);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return init(comm, nranks, id, rank, config);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                           ncclConfig_t* config) {
  return split(comm, color, key, newcomm, config);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* result) {
  if (const ncclResult_t asked = refused("ncclCommGetAsyncError"); asked != ncclSuccess)
    return asked;
  if (!result) return fail(ncclInvalidArgument, "ncclCommGetAsyncError: asyncError is null");
  const std::shared_ptr<Comm> comm = find(handle, "ncclCommGetAsyncError");
  if (!comm) return ncclInvalidArgument;
  const std::lock_guard lock(comm->host);
  if (comm->result == ncclSuccess && !comm->jobs.empty() && comm->polls-- <= 0) {
    std::erase_if(comm->jobs, [&](const Job& job) {
      const ncclResult_t one = job();
      if (one != ncclSuccess && one != ncclInProgress) comm->break_by(one, last_error());
      return one != ncclInProgress;
    });
  }
  *result = comm->result;
  if (*result == ncclSuccess && !comm->jobs.empty()) *result = ncclInProgress;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  ncclResult_t why = ncclSuccess;
  const std::shared_ptr<Comm> comm = ready(handle, "ncclCommFinalize", &why);
  if (!comm) return in_group(why);
  comm->is_finalized = true;
  return submit(comm, [comm] {
    const bool is_done = comm->queued == 0 && comm->graphs == 0 && !settings().stuck_ends;
    return is_done ? ncclSuccess : ncclInProgress;
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  if (const ncclResult_t asked = refused("ncclCommDestroy"); asked != ncclSuccess)
    return in_group(asked);
  const std::shared_ptr<Comm> comm = find(handle, "ncclCommDestroy");
  if (!comm) return in_group(ncclInvalidArgument);
  const auto wrong = [&](ncclResult_t result, const std::string& line) {
    return in_group(fail(result, "ncclCommDestroy: " + line));
  };
  {
    const std::lock_guard lock(comm->host);
    if (!comm->jobs.empty()) return wrong(ncclInvalidArgument, "the previous call is in progress");
  }
  if (comm->is_aborted) return wrong(ncclInvalidArgument, "this communicator has been aborted");
  if (comm->graphs > 0)
    return wrong(ncclInvalidUsage, "graphs hold " + std::to_string(comm->graphs) +
                                       " kernels of this communicator; end them first");
  if (comm->result != ncclSuccess)
    return wrong(comm->result, "this communicator has failed; abort it");
  return submit(
      comm,
      [comm] {
        if (comm->queued > 0) return ncclInProgress;
        leave(*comm, Presence::left);
        return ncclSuccess;
      },
      true);
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  if (const ncclResult_t asked = refused("ncclCommAbort"); asked != ncclSuccess)
    return in_group(asked);
  const std::shared_ptr<Comm> comm = find(handle, "ncclCommAbort");
  if (!comm) return in_group(ncclInvalidArgument);
  {
    const std::scoped_lock lock(comm->host, comm->turns);
    comm->is_aborted = true;
    comm->jobs.clear();
  }
  comm->turned.notify_all();
  comm->slot().presence = Presence::aborted;
  comm->board->drop_name();
  comm->board->ring();
  // Its memory goes back to the GPU, which waits for all that is queued there.
  return submit(
      comm,
      [comm] {
        if (settings().stuck_aborts || comm->graphs > 0 || totals().queued[comm->device] > 0)
          return ncclInProgress;
        if (!settings().lone_aborts && !peers_have_ended(*comm)) return ncclInProgress;
        leave(*comm, Presence::aborted);
        return ncclSuccess;
      },
      true);
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  const std::shared_ptr<Comm> comm = find(handle, "ncclCommCount");
  if (!comm || !count) return fail(ncclInvalidArgument, "ncclCommCount: an argument is null");
  *count = comm->ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  const std::shared_ptr<Comm> comm = find(handle, "ncclCommUserRank");
  if (!comm || !rank) return fail(ncclInvalidArgument, "ncclCommUserRank: an argument is null");
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  const std::shared_ptr<Comm> comm = find(handle, "ncclCommCuDevice");
  if (!comm || !device) return fail(ncclInvalidArgument, "ncclCommCuDevice: an argument is null");
  *device = comm->device;
  return ncclSuccess;
}

}  // extern "C"
