#include "runtime/comm/store/server.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/post.hpp>
#include <asio/steady_timer.hpp>
#include <asio/write.hpp>
#include <cerrno>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "runtime/base/held_signals.hpp"
#include "runtime/base/thread.hpp"
#include "runtime/comm/store/lookup.hpp"
#include "runtime/comm/store/store_state.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/comm/join_error.hpp"
#include "tessera/detail/base/text.hpp"

namespace tessera::detail {
namespace {

using asio::ip::tcp;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTick{100};
// A rank that reads nothing while so much waits for it is lost.
constexpr std::size_t kMostUnsentBytes = std::size_t{16} << 20;

// A descriptor for each rank, and some for what else the process does.
void allow_descriptors(int ranks) {
  rlimit limit{};
  const rlim_t needed = static_cast<rlim_t>(ranks) + 512;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  if (limit.rlim_max < needed)
    throw JoinError(concat("the store: rank 0 needs ", needed, " file descriptors for ", ranks,
                           " ranks, the limit is ", limit.rlim_max,
                           "; raise the limit (ulimit -Hn)"));
  limit.rlim_cur = needed;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

// Addresses that only this machine reaches last: a machine's own name is often one of these to it.
std::vector<asio::ip::address> by_reach(std::vector<asio::ip::address> all) {
  std::ranges::stable_sort(all, {}, [](const auto& address) { return address.is_loopback(); });
  return all;
}

// An acceptor on the first free port, none where the address is not this machine's.
std::optional<tcp::acceptor> listen(asio::io_context& context, const asio::ip::address& address,
                                    const StoreAddress& job) {
  const int last = last_port(job.port);
  for (int port = job.port; port <= last; ++port) {
    const tcp::endpoint endpoint(address, static_cast<asio::ip::port_type>(port));
    tcp::acceptor acceptor(context);
    asio::error_code error;
    acceptor.open(endpoint.protocol(), error);
    if (error) return std::nullopt;  // no IPv6 here
    keep_from_children(acceptor.native_handle());
    acceptor.set_option(tcp::acceptor::reuse_address(true), error);
    acceptor.bind(endpoint, error);
    if (error.value() == EADDRNOTAVAIL) return std::nullopt;
    constexpr int kBacklog = 4096;
    if (!error) acceptor.listen(kBacklog, error);
    if (!error) return acceptor;
  }
  throw JoinError(concat("the store: rank 0 has no port: ", job.port, " to ", last, " on ",
                         address.to_string(), " are taken or not allowed (", given_port(job),
                         "); choose others"));
}

tcp::acceptor listen_for(asio::io_context& context, const StoreAddress& job,
                         Clock::time_point deadline) {
  for (;;) {
    const HostAddresses addresses = look_up(job.host, deadline);
    for (const auto& address : by_reach(addresses.found))
      if (auto acceptor = listen(context, address, job)) return std::move(*acceptor);
    constexpr std::chrono::milliseconds kAgain{500};  // a name may be known a little later
    if (Clock::now() + kAgain >= deadline)
      throw JoinError(
          addresses.found.empty()
              ? concat("the store: rank 0 has not found ", given_host(job), ": ", addresses.failure)
              : concat("the store: rank 0 is not at ", given_host(job), ": ",
                       addresses.found.front().to_string(),
                       " is no address of its machine; name one that is"));
    std::this_thread::sleep_for(kAgain);
  }
}

}  // namespace

class StoreServer::Sockets {
 public:
  Sockets(const StoreAddress& job, Clock::time_point deadline)
      : acceptor_(listen_for(context_, job, deadline)),
        again_(context_),
        tick_(context_),
        state_(job, describe_process(job),
               {[this](auto session, const Message& m) { send(session, m); },
                [this](auto session) { close(session); }}) {
    asio::error_code error;
    const tcp::endpoint endpoint = acceptor_.local_endpoint(error);
    host_ = endpoint.address().to_string();
    port_ = endpoint.port();
    place_ = describe(endpoint);
    if (endpoint.address().is_loopback()) place_ += ", which only this machine reaches";
    accept();
    tick();
    const HeldSignals others_take_them;
    thread_ = Thread([this] { run(); });
  }
  ~Sockets() {
    context_.stop();
    thread_.join();
  }
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  std::string host_, place_;
  int port_ = 0;

  std::vector<int> end(const std::string& why, std::chrono::milliseconds at_most) {
    asio::post(context_, [this, why] {
      is_ending_ = true;
      state_.end(why);
      note_present();
    });
    std::unique_lock lock(mutex_);
    left_.wait_for(lock, at_most, [this] { return all_left_; });
    return all_left_ ? std::vector<int>{} : present_;
  }

 private:
  using SessionId = StoreState::Session;

  struct Session {
    explicit Session(tcp::socket s) : socket(std::move(s)) {}
    tcp::socket socket;
    std::array<char, 8192> chunk{};
    std::string in, out, sending;
    bool is_closing = false;
  };

  void run() noexcept {
    try {
      context_.run();
    } catch (...) {
      log(LogLevel::error, concat("the store has failed: ", describe_exception()));
    }
    const std::lock_guard lock(mutex_);
    all_left_ = true;  // nobody can be heard any more
    left_.notify_all();
  }

  void accept() {
    acceptor_.async_accept([this](asio::error_code error, tcp::socket socket) {
      if (error) return accept_later();
      keep_from_children(socket.native_handle());
      asio::error_code unset;
      socket.set_option(tcp::no_delay(true), unset);
      const SessionId id = ++last_;
      sessions_.emplace(id, std::make_shared<Session>(std::move(socket)));
      state_.opened(id);
      read(id);
      accept();
    });
  }
  // No descriptor is left, say.
  void accept_later() {
    again_.expires_after(kTick);
    again_.async_wait([this](asio::error_code) { accept(); });
  }

  void tick() {
    tick_.expires_after(kTick);
    tick_.async_wait([this](asio::error_code) {
      // Only time in which this process ran counts: after a stop of it nobody else is to blame.
      const auto now = Clock::now();
      const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(now - ticked_);
      ticked_ = now;
      state_.tick(std::min(passed, 2 * kTick));
      note_present();
      tick();
    });
  }

  void read(SessionId id) {
    const auto found = sessions_.find(id);
    if (found == sessions_.end() || found->second->is_closing) return;
    const std::shared_ptr<Session> session = found->second;
    session->socket.async_read_some(asio::buffer(session->chunk),
                                    [this, id, session](asio::error_code error, std::size_t n) {
                                      if (session->is_closing) return;
                                      if (error) return drop(id);
                                      session->in.append(session->chunk.data(), n);
                                      if (!take_messages(id, *session)) return drop(id);
                                      read(id);
                                    });
  }

  // False for what is no message.
  bool take_messages(SessionId id, Session& session) {
    std::size_t at = 0;
    while (!session.is_closing && session.in.size() - at >= kLengthBytes) {
      const std::string_view rest = std::string_view(session.in).substr(at);
      const auto length =
          length_of(rest, state_.has_seat(id) ? kMostMessageBytes : kMostStrangerBytes);
      if (!length) return false;
      if (rest.size() - kLengthBytes < *length) break;
      const auto message = decode(rest.substr(kLengthBytes, *length));
      if (!message) return false;
      at += kLengthBytes + *length;
      state_.received(id, *message);
    }
    session.in.erase(0, at);
    return true;
  }

  void send(SessionId id, const Message& message) {
    const auto found = sessions_.find(id);
    if (found == sessions_.end() || found->second->is_closing) return;
    Session& session = *found->second;
    if (session.out.size() > kMostUnsentBytes) return;  // it is being dropped
    session.out += encode(message);
    if (session.sending.empty()) write(id, found->second);
    if (session.out.size() <= kMostUnsentBytes) return;
    asio::post(context_, [this, id] { drop(id); });  // the state is in the midst of a message
  }

  void write(SessionId id, const std::shared_ptr<Session>& session) {
    session->sending = std::exchange(session->out, {});
    asio::async_write(session->socket, asio::buffer(session->sending),
                      [this, id, session](asio::error_code error, std::size_t) {
                        session->sending.clear();
                        if (error) return drop(id);
                        if (!session->out.empty()) return write(id, session);
                        if (session->is_closing) remove(id);
                      });
  }

  // Once all that was sent is out.
  void close(SessionId id) {
    const auto found = sessions_.find(id);
    if (found == sessions_.end()) return;
    found->second->is_closing = true;
    if (found->second->sending.empty()) remove(id);
    note_present();
  }

  void drop(SessionId id) {
    state_.closed(id);
    remove(id);
    note_present();
  }

  void remove(SessionId id) {
    const auto found = sessions_.find(id);
    if (found == sessions_.end()) return;
    asio::error_code ignored;
    found->second->is_closing = true;
    found->second->socket.shutdown(tcp::socket::shutdown_both, ignored);
    found->second->socket.close(ignored);
    sessions_.erase(found);
  }

  void note_present() {
    if (!is_ending_) return;
    const std::lock_guard lock(mutex_);
    present_ = state_.present();
    all_left_ = present_.empty();
    if (all_left_) left_.notify_all();
  }

  asio::io_context context_{1};
  tcp::acceptor acceptor_;
  asio::steady_timer again_, tick_;
  StoreState state_;
  std::map<SessionId, std::shared_ptr<Session>> sessions_;
  SessionId last_ = 0;
  Clock::time_point ticked_ = Clock::now();
  bool is_ending_ = false;
  std::mutex mutex_;
  std::condition_variable left_;
  std::vector<int> present_;
  bool all_left_ = false;
  Thread thread_;  // last: it uses the rest
};

StoreServer::StoreServer(const StoreAddress& job, Clock::time_point deadline) {
  allow_descriptors(job.world_size);
  sockets_ = std::make_unique<Sockets>(job, deadline);
}

StoreServer::~StoreServer() = default;

const std::string& StoreServer::host() const noexcept { return sockets_->host_; }
int StoreServer::port() const noexcept { return sockets_->port_; }
std::string StoreServer::place() const { return sockets_->place_; }

std::vector<int> StoreServer::end(const std::string& why, std::chrono::milliseconds at_most) {
  return sockets_->end(why, at_most);
}

}  // namespace tessera::detail
