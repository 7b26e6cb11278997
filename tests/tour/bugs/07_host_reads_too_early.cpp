// The host reads a gradient for its log. Reading without to_vector, which blocks, is as a copy to
// pinned memory that does not block: the values are there when an event says so.
#include "tessera/device/device_context.hpp"
#include "tests/tour/bugs/bugs.hpp"

void tessera::tour::host_reads_too_early(Run& run) {
  run.by_hand([&](Weight& weight) {
    weight.backward(1);
    weight.reduces.wait(weight.compute.record());
    weight.reduce();
    if (run.is_mended()) weight.world.device().block(weight.reduces.record());
    weight.world.device().context().host_reads(weight.gradient.data(), 16);
  });
}
