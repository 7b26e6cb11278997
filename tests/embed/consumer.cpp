// The smallest program of a user: one operation on a stream, then the host waits for it.
#include <cstdio>

#include "tessera/device/device.hpp"
#include "tessera/version.hpp"

int main() {
  tessera::Device device = tessera::Device::cpu();
  int answer = 0;
  device.compute().launch({.name = "answer"}, [p = &answer](auto&) { *p = 42; });
  device.block(device.compute().record());
  std::printf("tessera %s: %d\n", TESSERA_VERSION, answer);
  return answer == 42 ? 0 : 1;
}
