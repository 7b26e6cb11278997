// What the tests of the store use: ranks as threads and as processes, and sockets that speak to it.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "runtime/comm/store/message.hpp"
#include "runtime/comm/store/store.hpp"
#include "tessera/base/error.hpp"

namespace tessera::testing {

using namespace tessera::detail;
using namespace std::chrono_literals;

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// A socket of its own, closed with it.
class Socket {
 public:
  Socket() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}
  ~Socket() { ::close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // Returns the port: a free one for 0, or -1 where it is taken.
  int listen(int port) {
    const sockaddr_in at = loopback(port);
    if (::bind(fd_, reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0) return -1;
    ::listen(fd_, 64);
    sockaddr_in own{};
    socklen_t size = sizeof own;
    ::getsockname(fd_, reinterpret_cast<sockaddr*>(&own), &size);
    return ntohs(own.sin_port);
  }
  bool connect(int port) {
    const sockaddr_in to = loopback(port);
    const linger at_once{.l_onoff = 1, .l_linger = 0};  // no port stays taken for a minute
    ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    const timeval patience{.tv_sec = 5, .tv_usec = 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    return ::connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0;
  }
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    return true;
  }
  // The next message, or nothing when the connection has ended, or nothing has come for 5 s.
  std::optional<Message> hear() {
    std::string begin, body;
    if (!receive(begin, kLengthBytes)) return std::nullopt;
    const auto length = length_of(begin, kMostMessageBytes);
    if (!length || !receive(body, *length)) return std::nullopt;
    return decode(body);
  }

 private:
  static sockaddr_in loopback(int port) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(static_cast<std::uint16_t>(port));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return at;
  }
  bool receive(std::string& into, std::size_t bytes) {
    into.resize(bytes);
    for (std::size_t at = 0; at < bytes;) {
      const ssize_t n = ::recv(fd_, into.data() + at, bytes - at, 0);
      if (n <= 0) return false;
      at += static_cast<std::size_t>(n);
    }
    return true;
  }

  int fd_;
};

// A job of a port that is free now.
inline StoreAddress new_job(int ranks) {
  Socket socket;
  const int port = socket.listen(0);
  return {.host = "127.0.0.1",
          .port = std::min(port, 65535 - kStorePorts),
          .run_id = concat("test ", ::getpid()),
          .world_size = ranks};
}

// Where the store of a job listens, once it does.
inline int port_of(const StoreAddress& job) {
  for (;;) {
    for (int port = job.port; port < job.port + kStorePorts; ++port) {
      Socket socket;
      if (!socket.connect(port)) continue;
      const auto greeting = socket.hear();
      if (greeting && greeting->key == identity(job)) return port;
    }
    std::this_thread::sleep_for(5ms);
  }
}

// What a rank's thread threw, "" for nothing.
template <class F>
inline std::string error_of(const F& f) {
  try {
    f();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// `body(store, rank)` on a thread for each rank.
template <class F>
inline std::vector<std::string> on_ranks(const StoreAddress& job, const std::vector<int>& ranks,
                                         std::chrono::seconds timeout, const F& body) {
  std::vector<std::string> errors(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    threads.emplace_back([&, i] {
      errors[i] = error_of([&] { body(*Store::join(job, ranks[i], timeout), ranks[i]); });
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline std::vector<int> ranks_below(int n) {
  std::vector<int> all;
  for (int r = 0; r < n; ++r) all.push_back(r);
  return all;
}

inline std::size_t entries(const char* folder) {
  std::size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++n;
  return n;
}

// A rank in a process of its own, which holds on once all are here.
class RankProcess {
 public:
  RankProcess(const StoreAddress& job, int rank) : pid_(::fork()) {
    if (pid_ != 0) return;
    try {
      const auto store = Store::join(job, rank, 60s);
      for (;;) ::pause();
    } catch (...) {
      std::raise(SIGKILL);  // the test sees that it is gone
    }
  }
  ~RankProcess() {
    send(SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  void send(int signal) const { ::kill(pid_, signal); }
  // Returns once it stands still.
  void stop() const {
    send(SIGSTOP);
    ::waitpid(pid_, nullptr, WUNTRACED);
  }
  pid_t id() const { return pid_; }

 private:
  pid_t pid_;
};

// What a rank has heard.
class Heard {
 public:
  Store::Hear listener() {
    return [this](int rank, Departure how, const std::string& why) {
      const std::lock_guard lock(mutex_);
      all_.push_back({rank, how, why});
    };
  }
  struct News {
    int rank;
    Departure how;
    std::string why;
  };
  std::vector<News> wait_for(std::size_t count, std::chrono::milliseconds at_most) {
    const auto begin = Clock::now();
    for (;;) {
      {
        const std::lock_guard lock(mutex_);
        if (all_.size() >= count || Clock::now() - begin > at_most) return all_;
      }
      std::this_thread::sleep_for(5ms);
    }
  }

 private:
  std::mutex mutex_;
  std::vector<News> all_;
};

}  // namespace tessera::testing
