// What a kernel for GPUs is written against, so that one source runs on a GPU and, thread by
// thread, on the host.
//
//   struct Scale {                                     a body: plain values, copied to the device
//     float* y; const float* x; float factor; std::int64_t count;
//     TESSERA_DEVICE void operator()(Thread& t) const {
//       const std::int64_t i = t.global_index();
//       if (i < count) y[i] = factor * x[i];
//     }
//   };
//   launch<256>(exec, Grid{(count + 255) / 256}, 0, Scale{y, x, 2, count});     queues it
//
// `Thread` is one thread of a block: its number in block and grid, barriers, shared memory,
// shuffles within its warp. Every thread of a block, or of a warp, that has not returned takes part
// in the block's barriers, or the warp's shuffles. What a thread is follows from the include path:
// hardware/ for nvcc, another folder for who runs the same bodies elsewhere.
#pragma once

#include <gpu_thread.hpp>
