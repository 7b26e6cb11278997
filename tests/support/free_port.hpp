// A port for a store of a test: nobody has it at this moment.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tessera/base/error.hpp"

namespace tessera::testing {

inline int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  const bool is_bound = bind(fd, any, sizeof address) == 0 && getsockname(fd, any, &length) == 0;
  close(fd);
  if (!is_bound) throw CommError("no port is free");
  return ntohs(address.sin_port);
}

}  // namespace tessera::testing
