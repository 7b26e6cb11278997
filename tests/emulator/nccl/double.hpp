// What tests ask of the double of NCCL beside NCCL's functions: faults, answers, and counts. The
// library exports these as C functions, to be found by dlsym; TESSERA_NCCL_DOUBLE in the
// environment sets them before the first call, as "version=22703,polls=3,break=1:5:0".
#pragma once

extern "C" {

// Sets one of these, for the whole process; false where there is no such name.
//   version       what ncclGetVersion reports, at first 22809
//   polls         how often a communicator that does not block answers ncclInProgress to one call's
//                 ncclCommGetAsyncError before that call's work is done; at first 1
//   null_windows  1: ncclCommWindowRegister succeeds with a null window
//   one_gpu       1: ranks of one process may share a GPU
//   any_order     1: ranks may launch on different communicators in different orders
//   lone_aborts   1: an abort does not wait for peers
//   spoil         where not 0, what brings a rank at least so many bytes ends with a wrong one
//   stuck_aborts  1: an abort never ends
//   stuck_ends    1: a finalize never ends
//   host_ms       how long a blocking call waits for its peers before it fails; 0: for ever
bool tessera_nccl_double_set(const char* name, long long value);

// From its `after`-th next kernel on, all kernels of that rank stall until they are aborted, and
// send nothing. A rank is one of the communicator that was made from an id, and of its splits.
// `result` other than 0 is from then on what ncclCommGetAsyncError says. `after` < 0: heals it.
void tessera_nccl_double_break(int rank, long long after, int result);

// The next call of `function`, in any thread, does nothing and returns `result`.
void tessera_nccl_double_refuse(const char* function, int result);

// Since the process began: "kernels" that were queued and "calls" in them, bytes "moved", that is
// received from peers, where reductions go around in rings, "zero_ctas" (ncclCommSplit's
// communicators with that policy), "sums" (all-reduces and reduce-scatters) and "windowed_sums"
// (those whose both sides lie in windows of their communicator); of now: "communicators",
// "windows", "graphs" (kernels that graphs hold), "bytes" of ncclMemAlloc, and "held", which
// communicators have on GPUs. -1: no such name.
long long tessera_nccl_double_count(const char* name);

}  // extern "C"
