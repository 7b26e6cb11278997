#include "runtime/comm/store/search.hpp"

#include <algorithm>
#include <asio/read.hpp>
#include <asio/steady_timer.hpp>
#include <asio/write.hpp>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/comm/store/lookup.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/join_error.hpp"

namespace tessera::detail {
namespace {

using asio::ip::tcp;
using namespace std::chrono_literals;

// How long a wave waits for what does not answer: torchrun's own store, which speaks when spoken
// to, or a firewall.
constexpr auto kWave = 2s, kAnswer = 5s;
// Ports behind the first are tried a little later, since mostly the first is it.
constexpr auto kOthersLater = 100ms;
constexpr std::string_view kStore = "tessera store ";  // as `identity` begins

std::string describe_error(const asio::error_code& error) {
  if (error == asio::error::connection_refused) return "nobody listens";
  if (error == asio::error::eof || error == asio::error::connection_reset)
    return "who listens has hung up";
  return error.message();
}

}  // namespace

// One port of one address.
class StoreSearch::Probe : public std::enable_shared_from_this<Probe> {
 public:
  Probe(asio::io_context& context, const tcp::endpoint& at)
      : socket(context), endpoint(at), delay_(context) {}

  void start(std::chrono::milliseconds later) {
    delay_.expires_after(later);
    delay_.async_wait([self = shared_from_this()](asio::error_code error) {
      if (error) return;
      self->is_asked_ = true;
      self->connect();
    });
  }
  void stop() {
    asio::error_code ignored;
    delay_.cancel(ignored);
    socket.close(ignored);
  }
  void say(const Message& message) {
    out_ = encode(message);
    has_spoken_ = is_writing_ = true;
    asio::async_write(socket, asio::buffer(out_),
                      [self = shared_from_this()](asio::error_code error, std::size_t) {
                        self->is_writing_ = false;
                        if (error) self->fail(describe_error(error));
                      });
  }
  bool is_store() const {
    return heard && heard->kind == MessageKind::greeting && heard->key.starts_with(kStore);
  }
  bool has_spoken() const { return has_spoken_; }
  bool is_asked() const { return is_asked_; }  // else time was over before
  bool is_over() const { return !failure.empty() || (heard && !is_writing_); }
  void hear() {
    heard.reset();
    read(kLengthBytes, [this] {
      const auto length = length_of(in_, kMostStrangerBytes);
      if (!length) return fail("no store of Tessera");
      read(*length, [this] {
        heard = decode(in_);
        if (!heard) fail("no store of Tessera");
      });
    });
  }
  std::string describe() const {
    if (heard)
      return is_store() ? concat(heard->number == 1 ? "a" : "an ending", " store of the job ",
                                 describe_job(heard->key))
                        : "no store of Tessera";
    return !failure.empty() ? failure : is_connected_ ? "it says nothing" : "no answer";
  }

  tcp::socket socket;
  const tcp::endpoint endpoint;
  std::optional<Message> heard;  // the last
  std::string failure;           // why nothing more comes

 private:
  void fail(const std::string& why) {
    if (failure.empty()) failure = why;
    asio::error_code ignored;
    socket.close(ignored);
  }
  void connect() {
    asio::error_code error;
    socket.open(endpoint.protocol(), error);
    if (error) return fail(describe_error(error));
    keep_from_children(socket.native_handle());
    socket.async_connect(endpoint, [self = shared_from_this()](asio::error_code failed) {
      if (failed) return self->fail(describe_error(failed));
      self->is_connected_ = true;
      self->hear();
    });
  }
  template <class F>
  void read(std::size_t bytes, F then) {
    in_.resize(bytes);
    asio::async_read(socket, asio::buffer(in_),
                     [self = shared_from_this(), then](asio::error_code error, std::size_t) {
                       if (error) return self->fail(describe_error(error));
                       then();
                     });
  }

  asio::steady_timer delay_;
  std::string in_, out_;
  bool is_asked_ = false, is_connected_ = false, has_spoken_ = false, is_writing_ = false;
};

StoreSearch::StoreSearch(asio::io_context& context, const StoreAddress& job, int rank,
                         Clock::time_point deadline, std::optional<tcp::endpoint> known)
    : context_(context), job_(job), rank_(rank), deadline_(deadline), known_(known) {}

tcp::socket StoreSearch::next() {
  constexpr std::chrono::milliseconds kFirstPause = 20ms, kLongestPause = 500ms;
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    const std::shared_ptr<Probe> found = wave(places(), std::min(deadline_, Clock::now() + kWave));
    if (found && claim(*found)) return std::move(found->socket);
    if (Clock::now() + pause >= deadline_)
      throw JoinError(concat("the store: rank ", rank_, " has not found rank 0 of its job (",
                             describe_own(job_), "). It has seen ", notes_));
    std::this_thread::sleep_for(pause);
  }
}

bool StoreSearch::is_open_store(const Probe& probe) const {
  return probe.heard && probe.heard->kind == MessageKind::greeting &&
         probe.heard->key == identity(job_) && probe.heard->number == 1;
}

void StoreSearch::refuse_another(const StoreAddress& job, const tcp::endpoint& own,
                                 Clock::time_point deadline) {
  asio::io_context context(1);
  StoreSearch search(context, job, 0, std::min(deadline, Clock::now() + kAnswer));
  auto places = search.places();
  std::erase(places, own);
  if (const auto found = search.wave(places, Clock::now() + kOthersLater + 200ms))
    static_cast<void>(search.claim(*found));
}

// The first port of each address first.
std::vector<tcp::endpoint> StoreSearch::places() {
  if (known_) return {*known_};
  const HostAddresses addresses = look_up(job_.host, deadline_);
  notes_ = concat("no address of ", given_host(job_), ": ", addresses.failure);
  std::vector<tcp::endpoint> all;
  for (int port = job_.port; port <= last_port(job_.port); ++port)
    for (const auto& address : addresses.found)
      all.emplace_back(address, static_cast<asio::ip::port_type>(port));
  return all;
}

std::shared_ptr<StoreSearch::Probe> StoreSearch::wave(const std::vector<tcp::endpoint>& places,
                                                      Clock::time_point latest) {
  if (places.empty()) return nullptr;
  std::vector<std::shared_ptr<Probe>> probes;
  for (const tcp::endpoint& place : places) {
    probes.push_back(std::make_shared<Probe>(context_, place));
    probes.back()->start(place.port() == places.front().port() ? 0ms : kOthersLater);
  }
  std::shared_ptr<Probe> found;
  run_until(latest, [&] {
    bool is_over = true;
    for (const auto& probe : probes) {
      if (is_open_store(*probe)) found = probe;
      // Another job's: rank 0 of that one can say then who looked for it here.
      if (probe->is_store() && probe->heard->key != identity(job_) && !probe->has_spoken())
        probe->say(hello());
      is_over = is_over && probe->is_over();
    }
    return found || is_over;
  });
  note(probes);
  for (const auto& probe : probes)
    if (probe != found) probe->stop();
  return found;
}

// The first of each kind: mostly one port says something of interest, and the others nothing.
void StoreSearch::note(const std::vector<std::shared_ptr<Probe>>& probes) {
  std::vector<std::string> kinds;
  notes_.clear();
  for (const auto& probe : probes) {
    if (!probe->is_asked()) continue;
    const std::string kind = probe->describe();
    if (std::ranges::find(kinds, kind) != kinds.end()) continue;
    kinds.push_back(kind);
    notes_ += concat(notes_.empty() ? "" : "; ", describe(probe->endpoint), ": ", kind);
  }
}

Message StoreSearch::hello() const {
  return {.kind = MessageKind::hello,
          .number = rank_,
          .key = identity(job_),
          .value = describe_process(job_)};
}

bool StoreSearch::claim(Probe& probe) {
  probe.say(hello());
  probe.hear();
  run_until(std::min(deadline_, Clock::now() + kAnswer),
            [&] { return probe.heard || !probe.failure.empty(); });
  if (probe.heard && probe.heard->kind == MessageKind::seated) return true;
  if (probe.heard && probe.heard->kind == MessageKind::refused)
    throw JoinError(concat("the store at ", describe(probe.endpoint), ": ", probe.heard->value));
  probe.stop();
  return false;
}

// Closed sockets' ends run in a later call.
void StoreSearch::run_until(Clock::time_point latest, const std::function<bool()>& done) {
  context_.restart();
  while (!done() && context_.run_one_until(latest) != 0) continue;
}

}  // namespace tessera::detail
