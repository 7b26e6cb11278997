// What a store knows and says, with the test in the place of the sockets.
#include "runtime/comm/store/store_state.hpp"

#include <map>
#include <random>
#include <set>

#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::detail;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;

namespace {

const StoreAddress kJob{.host = "node1", .port = 29500, .run_id = "none", .world_size = 3};

// A store with all that it said to each connection.
class Play {
 public:
  explicit Play(const StoreAddress& job = kJob)
      : job_(job),
        state_(job, "host of rank 0",
               {[this](auto session, const Message& m) { said_[session].push_back(m); },
                [this](auto session) { closed_.insert(session); }}) {}

  StoreState& state() { return state_; }
  std::vector<Message>& said(StoreState::Session session) { return said_[session]; }
  bool is_closed(StoreState::Session session) const { return closed_.contains(session); }
  Message last(StoreState::Session session) { return said_[session].back(); }

  StoreState::Session come(int rank, const std::string& who, const std::string& job = "") {
    const StoreState::Session session = ++sessions_;
    state_.opened(session);
    state_.received(session, {.kind = MessageKind::hello,
                              .number = rank,
                              .key = job.empty() ? identity(job_) : job,
                              .value = who});
    return session;
  }
  // All ranks: sessions 1 to N.
  void fill() {
    for (int r = 0; r < job_.world_size; ++r)
      come(r, r == 0 ? "host of rank 0" : concat("host of rank ", r));
  }
  Message ask(StoreState::Session session, Message question) {
    question.id = ++id_;
    state_.received(session, question);
    return last(session);
  }

 private:
  const StoreAddress job_;
  std::map<StoreState::Session, std::vector<Message>> said_;
  std::set<StoreState::Session> closed_;
  StoreState state_;
  StoreState::Session sessions_ = 0;
  std::uint32_t id_ = 0;
};

}  // namespace

TEST_CASE("a store greets, seats every rank, and says when all are here") {
  Play play;
  for (int r = 2; r >= 0; --r) {
    const auto session = play.come(r, "host of rank 0");
    CHECK(play.said(session).at(0).kind == MessageKind::greeting);
    CHECK(play.said(session).at(0).key == identity(kJob));
    CHECK(play.said(session).at(1).kind == MessageKind::seated);
    CHECK(play.state().is_full() == (r == 0));
  }
  for (const StoreState::Session session : {1, 2, 3})
    CHECK(play.last(session).kind == MessageKind::full);
}

TEST_CASE("a seat is taken once, and a second claim names both") {
  Play play;
  play.come(1, "host a, process 4");
  const auto second = play.come(1, "host b, process 5");
  CHECK(play.last(second).kind == MessageKind::refused);
  CHECK_THAT(play.last(second).value,
             Contains("rank 1") && Contains("host a, process 4") && Contains("host b, process 5"));
  CHECK(play.is_closed(second));
  const auto first_rank = play.come(0, "host b, process 6");
  CHECK(play.last(first_rank).kind == MessageKind::refused);  // it serves no store, this one does
  CHECK_THAT(play.last(first_rank).value, Contains("host of rank 0"));
  play.come(0, "host of rank 0");
  play.come(2, "host c");
  CHECK(play.state().is_full());  // the first claims hold
}

TEST_CASE("who is of another job, or of no rank, is refused and told which this is") {
  Play play;
  StoreAddress other = kJob;
  other.run_id = "second";
  const auto stranger = play.come(1, "host a", identity(other));
  CHECK(play.last(stranger).kind == MessageKind::refused);
  CHECK_THAT(play.last(stranger).value, Contains("run id none"));
  CHECK_THAT(play.state().describe_missing(),
             Contains("never came") &&
                 Contains("; rank 1 of another job came (host a): host node1, port 29500, run id "
                          "second, 3 ranks"));
  for (const int rank : {-1, 3, 1 << 30}) {
    const auto none = play.come(rank, "host a");
    CHECK(play.last(none).kind == MessageKind::refused);
    CHECK(play.is_closed(none));
  }
}

TEST_CASE("before all are here a rank may go and come again, and is listed until it does") {
  Play play;
  play.come(0, "host of rank 0");
  const auto gone = play.come(1, "host a, process 4");
  play.state().closed(gone);
  CHECK_THAT(play.state().describe_missing(),
             Contains("rank 2 of 3 never came") &&
                 Contains("rank 1 of 3 came and went again, the first host a, process 4"));
  play.come(1, "host a, process 5");
  play.come(2, "host c");
  CHECK(play.state().is_full());
  CHECK(play.state().describe_missing().empty());
}

TEST_CASE("before all are here a seat lets nobody change anything") {
  for (int kind = 0; kind <= static_cast<int>(kLastKind); ++kind) {
    const auto message = static_cast<MessageKind>(kind);
    if (message == MessageKind::beat || message == MessageKind::missing) continue;
    INFO("kind " << kind);
    Play play;
    const auto session = play.come(1, "a stranger");
    play.state().received(session, {.kind = message, .number = 1, .key = "k", .value = "v"});
    CHECK(play.is_closed(session));
    play.state().tick(1s);
    play.fill();
    CHECK(play.state().is_full());
    CHECK(play.said(2).back().kind == MessageKind::full);  // nobody has gone
  }
}

TEST_CASE("a value is had by who asks before and behind its setting, and counters add up") {
  Play play;
  play.fill();
  play.state().received(2, {.kind = MessageKind::get, .id = 9, .key = "k"});
  CHECK(play.last(2).kind == MessageKind::full);  // it waits
  CHECK(play.ask(1, {.kind = MessageKind::set, .key = "k", .value = "v"}).kind ==
        MessageKind::answer);
  CHECK(play.last(2).id == 9);
  CHECK(play.last(2).value == "v");
  CHECK(play.ask(3, {.kind = MessageKind::get, .key = "k"}).value == "v");
  play.ask(1, {.kind = MessageKind::set, .key = "k", .value = "w"});
  CHECK(play.ask(3, {.kind = MessageKind::get, .key = "k"}).value == "w");
  CHECK(play.ask(1, {.kind = MessageKind::add, .number = 5, .key = "n"}).number == 5);
  CHECK(play.ask(2, {.kind = MessageKind::add, .number = -7, .key = "n"}).number == -2);
  CHECK(play.ask(3, {.kind = MessageKind::get, .key = "n"}).value == "-2");
  CHECK(play.ask(3, {.kind = MessageKind::add, .number = 1, .key = "k"}).kind ==
        MessageKind::denied);
  play.ask(1, {.kind = MessageKind::set, .key = "n", .value = "9223372036854775807"});
  CHECK(play.ask(3, {.kind = MessageKind::add, .number = 1, .key = "n"}).kind ==
        MessageKind::denied);
}

TEST_CASE("a get whose time is over is forgotten, and gets no answer any more") {
  Play play;
  play.fill();
  play.state().received(2, {.kind = MessageKind::get, .id = 9, .key = "k"});
  play.state().received(2, {.kind = MessageKind::get, .id = 10, .key = "k"});
  play.state().received(2, {.kind = MessageKind::forget, .id = 9});
  play.ask(1, {.kind = MessageKind::set, .key = "k", .value = "v"});
  std::vector<std::uint32_t> answered;
  for (const Message& m : play.said(2))
    if (m.kind == MessageKind::answer) answered.push_back(m.id);
  CHECK(answered == std::vector<std::uint32_t>{10});
}

TEST_CASE("a store holds no more than it may, and asks of a rank wait in bounded number") {
  Play play;
  play.fill();
  const std::string value(kMostValueBytes, 'x');
  int held = 0;
  while (play.ask(1, {.kind = MessageKind::set, .key = concat("k", held), .value = value}).kind ==
         MessageKind::answer)
    ++held;
  CHECK(held == static_cast<int>(StoreState::kMostHeldBytes / kMostValueBytes) - 1);
  // What is replaced counts no more.
  CHECK(play.ask(1, {.kind = MessageKind::set, .key = "k0", .value = "v"}).kind ==
        MessageKind::answer);
  CHECK(play.ask(1, {.kind = MessageKind::set, .key = "k0", .value = value}).kind ==
        MessageKind::answer);
  for (std::size_t i = 0; i < StoreState::kMostWaiting; ++i)
    play.state().received(2, {.kind = MessageKind::get, .key = "never"});
  CHECK(play.last(2).kind != MessageKind::denied);
  CHECK(play.ask(2, {.kind = MessageKind::get, .key = "never"}).kind == MessageKind::denied);
}

TEST_CASE("who waits hears that a rank is lost, has failed or has left, each once, by name") {
  Play play;
  play.fill();
  play.state().received(1, {.kind = MessageKind::get, .id = 9, .key = "k"});

  SECTION("left") {
    play.state().received(3, {.kind = MessageKind::leave});
    CHECK(play.last(1).kind == MessageKind::departed);
    CHECK(play.last(1).id == static_cast<std::uint32_t>(Departure::left));
    play.state().closed(3);
    CHECK(play.said(1).size() == 4);  // greeting, seated, full, departed: its get still waits
    CHECK(play.state().present() == std::vector<int>{0, 1});
    return;
  }
  Departure how = Departure::lost;
  std::string why = "its connection has ended without a word";
  SECTION("lost") { play.state().closed(3); }
  SECTION("failed") {
    how = Departure::failed;
    why = "rank 2 (host of rank 2): out of memory";
    play.state().received(3, {.kind = MessageKind::last_words, .value = "out of memory"});
    play.state().closed(3);
  }
  for (const StoreState::Session session : {1, 2}) {
    int told = 0;
    for (const Message& m : play.said(session)) {
      if (m.kind != MessageKind::departed) continue;
      ++told;
      CHECK(m.number == 2);
      CHECK(m.id == static_cast<std::uint32_t>(how));
      CHECK_THAT(m.value, Contains("rank 2 (host of rank 2)") && Contains(why));
    }
    CHECK(told == 1);
  }
  CHECK(play.last(1).kind == MessageKind::denied);
  CHECK(play.last(1).id == 9);
  CHECK_THAT(play.last(1).value, Contains(why));
  CHECK(play.ask(2, {.kind = MessageKind::get, .key = "k"}).kind == MessageKind::denied);
  play.ask(2, {.kind = MessageKind::set, .key = "k", .value = "v"});
  CHECK(play.ask(2, {.kind = MessageKind::get, .key = "k"}).value == "v");  // what is there is
}

TEST_CASE("a rank that shows no life for as long as was agreed is lost, and beats are life") {
  Play play;
  play.fill();
  play.state().tick(1h);  // nobody watches yet
  CHECK(play.last(1).kind == MessageKind::full);
  play.state().received(1, {.kind = MessageKind::watch, .number = 1000});
  for (int i = 0; i < 20; ++i) {
    play.state().received(1, {.kind = MessageKind::beat});
    play.state().received(2, {.kind = MessageKind::beat});
    if (i < 9) play.state().received(3, {.kind = MessageKind::beat});
    play.state().tick(100ms);
    const bool is_lost = play.last(1).kind == MessageKind::departed;
    CHECK(is_lost == (i == 17));
    CHECK(play.state().present().size() == (i < 17 ? 3 : 2));
  }
  const Message told = play.said(2).at(play.said(2).size() - 3);  // two pulses came behind it
  CHECK(told.number == 2);
  CHECK_THAT(told.value, Contains("shows no life for 1 s"));
}

TEST_CASE("a store of which one has gone takes nobody any more, and says that another may come") {
  Play play;
  play.fill();
  play.state().closed(2);
  const auto next = play.come(1, "host b");
  CHECK(play.said(next).at(0).number == 0);
  CHECK(play.last(next).kind == MessageKind::later);
  CHECK(play.is_closed(next));
}

TEST_CASE("who waits for others hears why when the store gives up, and nobody is taken any more") {
  Play play;
  play.come(1, "host a");
  play.state().end("rank 2 never came");
  CHECK(play.last(1).kind == MessageKind::refused);
  CHECK(play.last(1).value == "rank 2 never came");
  CHECK(play.last(1).number == 1);  // for all
  const auto late = play.come(2, "host b");
  CHECK(play.last(late).kind == MessageKind::later);
}

TEST_CASE("a stranger that says nothing, or anything but hello, is sent away") {
  Play play;
  play.state().opened(7);
  play.state().tick(StoreState::kStrangerMay);
  CHECK_FALSE(play.is_closed(7));
  play.state().tick(1ms);
  CHECK(play.is_closed(7));
  for (int kind = 0; kind <= static_cast<int>(kLastKind); ++kind) {
    if (static_cast<MessageKind>(kind) == MessageKind::hello) continue;
    const auto session = static_cast<StoreState::Session>(100 + kind);
    play.state().opened(session);
    play.state().received(session, {.kind = static_cast<MessageKind>(kind), .number = 1});
    CHECK(play.is_closed(session));
  }
}

TEST_CASE("strangers in large number are sent away at once, and ranks are not") {
  Play play;
  play.come(0, "host of rank 0");
  StoreState::Session session = 1000;
  for (std::size_t i = 0; i < StoreState::kMostStrangers; ++i) play.state().opened(++session);
  CHECK_FALSE(play.is_closed(session));
  play.state().opened(++session);
  CHECK(play.is_closed(session));
  play.state().tick(StoreState::kStrangerMay + 1ms);  // the others go as well
  const auto rank = play.come(1, "host a");
  CHECK(play.last(rank).kind == MessageKind::seated);
}

TEST_CASE("messages in any order, of ranks and strangers, leave a store in order") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (int game = 0; game < 50; ++game) {
    Play play;
    std::vector<StoreState::Session> open;
    for (int i = 0; i < 400; ++i) {
      if (open.empty() || random() % 8 == 0) {
        const int rank = static_cast<int>(random() % 4);
        open.push_back(play.come(rank, rank == 0 ? "host of rank 0" : concat("host ", i)));
        continue;
      }
      const std::size_t at = random() % open.size();
      const auto session = open[at];
      if (play.is_closed(session) || random() % 40 == 0) {
        play.state().closed(session);
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
      } else if (random() % 10 == 0) {
        play.state().tick(std::chrono::milliseconds(random() % 3000));
      } else {
        const auto kind = random() % (static_cast<std::uint64_t>(kLastKind) + 1);
        play.state().received(session, {.kind = static_cast<MessageKind>(kind),
                                        .id = static_cast<std::uint32_t>(random() % 5),
                                        .number = static_cast<std::int64_t>(random() % 2000),
                                        .key = concat("k", random() % 3),
                                        .value = concat(random() % 9)});
      }
    }
    // No rank is present twice, and who is present gets an answer.
    const std::vector<int> present = play.state().present();
    CHECK(std::set<int>(present.begin(), present.end()).size() == present.size());
    for (const auto session : open) play.state().closed(session);
    CHECK(play.state().present().empty());
  }
}
