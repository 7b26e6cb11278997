#include "tools/train/where.hpp"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

#include "runtime/comm/store/store.hpp"
#include "tessera/base/error.hpp"

namespace tessera::train {
namespace {

std::string line(const char* what, const std::string& value) {
  constexpr std::size_t kColumn = 11;
  std::string text = what;
  text.resize(kColumn, ' ');
  return text + value + "\n";
}

std::string host_name() {
  char name[256] = "?";
  ::gethostname(name, sizeof name - 1);
  return name;
}

// Of a socket's address, "10.0.0.1".
std::string address_text(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET)
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text,
                sizeof text);
  if (address->sa_family == AF_INET6)
    ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text,
                sizeof text);
  return text;
}

// The interface that has this address.
std::string interface_of(const std::string& address) {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return "?";
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> all(first, ::freeifaddrs);
  for (const ifaddrs* at = first; at != nullptr; at = at->ifa_next)
    if (at->ifa_addr != nullptr && address_text(at->ifa_addr) == address) return at->ifa_name;
  return "?";
}

// Which interface leads to `host`: the system chooses one when a datagram socket is given its
// address, and sends nothing.
std::string route_to(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) return concat(host, " is not found: ", ::gai_strerror(error));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> all(found, ::freeaddrinfo);
  const int socket = ::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  auto* const address = reinterpret_cast<sockaddr*>(&own);
  const bool is_known = socket >= 0 && ::connect(socket, found->ai_addr, found->ai_addrlen) == 0 &&
                        ::getsockname(socket, address, &size) == 0;
  const std::string why = std::strerror(errno);
  if (socket >= 0) ::close(socket);
  const std::string to = address_text(found->ai_addr);
  if (!is_known) return concat("none leads to ", to, ": ", why);
  const std::string from = address_text(address);
  return concat(interface_of(from), ", ", from,
                from == to ? ": rank 0 is to be here" : concat(", to ", to));
}

// As the driver lists them; CUDA_VISIBLE_DEVICES among the variables hides some from CUDA.
std::string gpus() {
  std::error_code none;
  std::vector<std::filesystem::path> folders;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", none))
    folders.push_back(entry.path());
  std::ranges::sort(folders);
  std::string text;
  for (const auto& folder : folders) {
    std::ifstream file(folder / "information");
    std::string model = "?", uuid = "?";
    for (std::string row; std::getline(file, row);) {
      const std::size_t colon = row.find(':');
      if (colon == std::string::npos) continue;
      const std::size_t begin = std::min(row.find_first_not_of(" \t", colon + 1), row.size());
      if (row.starts_with("Model")) model = row.substr(begin);
      if (row.starts_with("GPU UUID")) uuid = row.substr(begin);
    }
    text += line("gpu", concat(model, ", ", uuid, ", bus ", folder.filename().string()));
  }
  return text.empty() ? line("gpu", "no GPU that a driver of NVIDIA lists") : text;
}

std::string nccl() {
  void* const library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!library) return "no libnccl.so.2 where the loader looks; set LD_LIBRARY_PATH to its folder";
  void* const function = ::dlsym(library, "ncclGetVersion");
  Dl_info info{};
  int version = 0;
  std::string text = "libnccl.so.2 without ncclGetVersion";
  if (function && ::dladdr(function, &info) != 0 &&
      reinterpret_cast<int (*)(int*)>(function)(&version) == 0)  // 22809: 2.28.9
    text = concat(info.dli_fname, ", version ", version / 10000, '.', version / 100 % 100, '.',
                  version % 100);
  ::dlclose(library);
  return text;
}

std::string size_text(int size) { return size > 0 ? concat(" of ", size) : std::string(); }

// What others read as the address of rank 0, where it comes from elsewhere.
std::string ignored(const LaunchEnvironment& environment) {
  const std::string from = environment.store_host_from.empty()
                               ? "this launcher's ranks meet without it"
                               : "rank 0 is at " + environment.store_host_from;
  std::string text;
  for (const char* variable : {"MASTER_ADDR", "MASTER_PORT"})
    if (const char* value = std::getenv(variable);
        value && environment.store_host_from.find("MASTER_ADDR") == std::string::npos)
      text += line("ignored", concat(variable, "=", value, ": ", from));
  return text;
}

std::string lines_of(const LaunchEnvironment& environment) {
  std::string text = line("launcher", std::string(name(environment.launcher)));
  text +=
      line("rank", concat(environment.rank, size_text(environment.world_size), ", on this host ",
                          environment.local_rank, size_text(environment.local_size)));
  std::string hosts = concat("this is ", host_name());
  for (const std::string& host : environment.hosts) hosts += concat(", ", host);
  text += line("hosts", hosts);
  if (!environment.notice.empty()) text += line("notice", environment.notice);
  text += ignored(environment);
  if (environment.store_host.empty() || environment.store_port == 0)
    return text + line("store", "this launcher names no address");
  const int others = detail::last_port(environment.store_port) - environment.store_port;
  text +=
      line("store", concat(environment.store_host, " port ", environment.store_port,
                           others > 0 ? concat(" or one of the next ", others) : "", ", run id ",
                           environment.run_id, ", restart ", environment.restart_count));
  return text + line("interface", route_to(environment.store_host, environment.store_port));
}

}  // namespace

std::string where_text(std::exception_ptr& broken) {
  std::vector<std::string> variables;
  const EnvironmentLookup look = [&](const char* variable) {
    const char* const value = std::getenv(variable);
    std::string text = concat(variable, "=", value ? value : "");
    if (value && std::ranges::find(variables, text) == variables.end())
      variables.push_back(std::move(text));
    return value;
  };
  std::string about_rank;
  try {
    about_rank = lines_of(detect(look));
  } catch (const DataError&) {
    broken = std::current_exception();
  }
  for (const char* variable :
       {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG",
        "OMP_NUM_THREADS"})
    look(variable);
  std::string text;
  for (const std::string& variable : variables) text += line("variable", variable);
  text += about_rank + gpus() + line("nccl", nccl());
  if (const char* connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
      connections && std::string_view(connections) == "1")
    text += line("warning",
                 "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams of a GPU into one queue, so "
                 "gathers no longer run beside compute; unset it");
  return text;
}

}  // namespace tessera::train
