// The store over real sockets: ranks as threads, and as processes where one is to die.
#include "runtime/comm/store/store.hpp"

#include "tessera/comm/join_error.hpp"
#include "tessera/comm/lost_rank.hpp"
#include "tests/comm/store_ranks.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::detail;
using namespace tessera::testing;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;

TEST_CASE("ranks meet, exchange and leave, and nothing is left behind", "[threads]") {
  const StoreAddress job = new_job(6);
  on_ranks(job, ranks_below(6), 60s, [](Store&, int) {});  // what the process keeps, once
  const std::size_t files = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  std::atomic<int> right{0};
  const auto errors = on_ranks(job, ranks_below(6), 60s, [&](Store& store, int rank) {
    store.set(concat("of ", rank), std::string(static_cast<std::size_t>(rank) * 1000, 'x'));
    for (int r = 0; r < 6; ++r)
      right += store.get(concat("of ", r), 60s).size() == static_cast<std::size_t>(r) * 1000;
    for (int i = 0; i < 50; ++i) store.add("count", 2);
    store.add("done", 1);
    while (store.add("done", 0) < 6) std::this_thread::sleep_for(1ms);
    right += store.get("count", 60s) == "600";
  });
  for (const std::string& error : errors) CHECK(error.empty());
  CHECK(right == 6 * 7);
  CHECK(entries("/proc/self/fd") == files);
  CHECK(entries("/proc/self/task") == threads);
}

TEST_CASE("rank 0 may be late, and any other") {
  const StoreAddress job = new_job(3);
  const auto errors = on_ranks(job, {0, 1, 2}, 60s, [](Store&, int) {});
  for (const std::string& error : errors) CHECK(error.empty());
  for (const int late : {0, 2}) {
    const StoreAddress next = new_job(3);
    std::vector<std::thread> threads;
    std::atomic<int> joined{0};
    for (int r = 0; r < 3; ++r)
      threads.emplace_back([&, r] {
        if (r == late) std::this_thread::sleep_for(400ms);
        const auto store = Store::join(next, r, 60s);
        ++joined;
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(joined == 3);
  }
}

TEST_CASE("who never came is listed by all that did") {
  const StoreAddress job = new_job(6);
  const auto begin = Clock::now();
  const auto errors = on_ranks(job, {0, 2, 5}, 2s, [](Store&, int) {});
  CHECK(seconds_since(begin) < 30);
  CHECK_THAT(errors[0], Contains("ranks 1, 3-4 of 6 never came") && Contains("127.0.0.1") &&
                            Contains("which only this machine reaches"));
  for (const std::string& error : errors)
    CHECK_THAT(error, Contains("1, 3-4 of 6 never came") && !Contains("\n"));
}

TEST_CASE("where nobody serves, the message says what was seen at which address") {
  const StoreAddress job = new_job(2);
  CHECK_THAT(error_of([&] { Store::join(job, 1, 1s); }), Contains("has not found rank 0") &&
                                                             Contains("127.0.0.1") &&
                                                             Contains("nobody listens"));
  StoreAddress nowhere = job;
  nowhere.host = "no-such-host.invalid";
  for (const int rank : {0, 1})
    CHECK_THAT(error_of([&] { Store::join(nowhere, rank, 1s); }), Contains("no-such-host.invalid"));
  StoreAddress elsewhere = job;
  elsewhere.host = "192.0.2.1";  // for documents: nobody has it (RFC 5737)
  CHECK_THAT(error_of([&] { Store::join(elsewhere, 0, 1s); }),
             Contains("rank 0 is not at host 192.0.2.1") &&
                 Contains("192.0.2.1 is no address of its machine"));
  elsewhere.host_from = "TESSERA_STORE=doc:1";
  CHECK_THAT(error_of([&] { Store::join(elsewhere, 0, 1s); }),
             Contains("rank 0 is not at TESSERA_STORE=doc:1: ") && !Contains("MASTER"));
}

TEST_CASE("no call of who comes together outlasts the time for that, not even its end") {
  const StoreAddress job = new_job(3);
  const auto begin = Clock::now();
  std::string error;
  SECTION("rank 0 is stopped once all are here") {
    const RankProcess zero(job, 0);
    const RankProcess two(job, 2);
    error = error_of([&] {
      const auto store = Store::join(job, 1, 5s);
      zero.stop();
      store->set("k", "v");  // else an answer may take a minute
    });
  }
  SECTION("a rank is stopped once all are here") {
    const RankProcess one(job, 1);
    const RankProcess two(job, 2);
    error = error_of([&] {
      const auto store = Store::join(job, 0, 5s);
      one.stop();
      store->get("nobody's", 60s);
    });
  }
  CHECK_THAT(error, Contains("waited in vain"));
  CHECK(seconds_since(begin) < 40);
}

TEST_CASE("what rank 0 says for all has its rank, and what others say has not") {
  const StoreAddress job = new_job(3);
  const auto rank_of = [&](int rank, std::chrono::milliseconds timeout) {
    try {
      Store::join(job, rank, timeout);
    } catch (const JoinError& error) {
      return error.rank();
    }
    return -2;
  };
  int zero = -2, one = -2;
  std::thread other([&] { one = rank_of(1, 60s); });
  zero = rank_of(0, 2s);
  other.join();
  CHECK(zero == 0);
  CHECK(one == 0);
  CHECK(rank_of(1, 1s) == -1);  // nobody serves
}

TEST_CASE("two jobs at one port each hear of the other") {
  StoreAddress job = new_job(2), other = job;
  other.world_size = 3;
  job.host_from = "MASTER_ADDR=127.0.0.1";
  std::string first, second;
  std::thread rank_0([&] { first = error_of([&] { Store::join(job, 0, 3s); }); });
  second = error_of([&] { Store::join(other, 1, 2s); });
  rank_0.join();
  CHECK_THAT(first, Contains("rank 1 of 2 never came") &&
                        Contains("rank 1 of another job came (host ") && Contains(", 3 ranks"));
  CHECK_THAT(second, Contains("has not found rank 0 of its job (host 127.0.0.1, port ") &&
                         Contains(", 3 ranks)") && Contains("a store of the job host 127.0.0.1") &&
                         Contains(", 2 ranks"));
}

TEST_CASE("a rank, port or host that can't be is refused at once") {
  const StoreAddress job = new_job(2);
  StoreAddress bad = job;
  bad.port = 0;
  CHECK_THROWS_AS(Store::join(bad, 0, 1s), DataError);
  bad = job;
  bad.host = "";
  CHECK_THROWS_AS(Store::join(bad, 0, 1s), DataError);
  CHECK_THROWS_AS(Store::join(job, 2, 1s), DataError);
  CHECK_THROWS_AS(Store::join(job, -1, 1s), DataError);
}

TEST_CASE("a port that another program holds is passed over, whether it speaks or not") {
  const StoreAddress job = new_job(2);
  Socket silent;  // as torchrun's own store
  REQUIRE(silent.listen(job.port) == job.port);
  const auto errors = on_ranks(job, {0, 1}, 60s, [](Store&, int) {});
  for (const std::string& error : errors) CHECK(error.empty());
}

TEST_CASE("jobs that share their ports find each their own store") {
  const StoreAddress job = new_job(2);
  StoreAddress other = job;
  other.run_id = "another";
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (const StoreAddress& of : {job, other})
    for (int r = 0; r < 2; ++r)
      threads.emplace_back([&right, of, r] {
        const auto store = Store::join(of, r, 60s);
        if (r == 0) store->set("who", of.run_id);
        right += store->get("who", 60s) == of.run_id;
      });
  for (std::thread& thread : threads) thread.join();
  CHECK(right == 4);
  StoreAddress third = job;
  third.run_id = "third";
  std::string seen;
  on_ranks(job, {0, 1}, 60s, [&](Store& store, int rank) {
    if (rank == 0) seen = error_of([&] { Store::join(third, 1, 1s); });
    if (rank == 0) store.set("over", "");
    store.get("over", 60s);
  });
  CHECK_THAT(seen, Contains("a store of the job") && Contains(job.run_id));
}

TEST_CASE("a second claim of a rank names both processes, rank 0's too") {
  const StoreAddress job = new_job(3);
  for (const int twice : {1, 0}) {
    std::string error;
    std::thread first([&] {
      on_ranks(job, {0, 1, 2}, 60s, [&](Store& store, int rank) {
        if (rank != 2) return static_cast<void>(store.get("over", 60s));
        StoreAddress again = job;
        again.restart_count = 7;
        error = error_of([&] { Store::join(again, twice, 30s); });
        store.set("over", "");
      });
    });
    first.join();
    INFO(error);
    CHECK_THAT(error, Contains(concat("rank ", twice, " is claimed twice")) &&
                          Contains(concat("process ", ::getpid(), " and by")) &&
                          Contains("restart 7"));
  }
}

TEST_CASE("a get that nobody answers ends with its time, and sizes are bounded") {
  const StoreAddress job = new_job(1);
  const auto store = Store::join(job, 0, 60s);
  CHECK_THAT(error_of([&] { store->get("nobody's", 50ms); }),
             Contains("get") && Contains("'nobody's'"));
  CHECK_THROWS_AS(store->set("k", std::string(kMostValueBytes + 1, 'x')), DataError);
  CHECK_THROWS_AS(store->set(std::string(kMostKeyBytes + 1, 'k'), ""), DataError);
  store->set(std::string(kMostKeyBytes, 'k'), std::string(kMostValueBytes, 'x'));
  CHECK(store->get(std::string(kMostKeyBytes, 'k'), 10s).size() == kMostValueBytes);
  store->set("text", "no number");
  CHECK_THROWS_AS(store->add("text", 1), DataError);
}

TEST_CASE("a process that dies is named to all within a second, and ends what waits") {
  const StoreAddress job = new_job(3);
  const RankProcess dying(job, 2);
  std::vector<Heard> heard(2);
  std::vector<double> took(2);
  std::vector<std::string> got(2);
  std::atomic<int> waiting{0};
  std::atomic<Clock::rep> killed{0};
  const auto errors = on_ranks(job, {0, 1}, 60s, [&](Store& store, int rank) {
    const auto i = static_cast<std::size_t>(rank);
    store.watch(60s, heard[i].listener());
    if (++waiting == 2) {
      killed = Clock::now().time_since_epoch().count();
      dying.send(SIGKILL);
    }
    got[i] = error_of([&] {
      try {
        store.get("never", 60s);
      } catch (const LostRank&) {
        throw;
      } catch (const std::exception& error) {
        throw ContractError(concat("no LostRank: ", error.what()));
      }
    });
    heard[i].wait_for(1, 30s);
    took[i] = seconds_since(Clock::time_point(Clock::duration(killed.load())));
    store.add("done", 1);
    while (store.add("done", 0) < 2) std::this_thread::sleep_for(1ms);
  });
  for (const std::size_t i : {0u, 1u}) {
    CHECK(errors[i].empty());
    const auto news = heard[i].wait_for(1, 0ms);
    REQUIRE(!news.empty());
    CHECK(news[0].rank == 2);
    CHECK(news[0].how == Departure::lost);
    CHECK_THAT(news[0].why, Contains(concat("process ", dying.id())));
    CHECK_THAT(got[i], Contains("rank 2") && !Contains("no LostRank"));
    CHECK(took[i] < 1);
  }
}

TEST_CASE("a process that is stopped is lost once it has been silent for as long as was agreed") {
  const StoreAddress job = new_job(2);
  SECTION("a rank, as rank 0 sees it") {
    const RankProcess stopped(job, 1);
    Heard heard;
    const auto store = Store::join(job, 0, 60s);
    store->watch(1s, heard.listener());
    CHECK(heard.wait_for(1, 2s).empty());  // it beats
    stopped.send(SIGSTOP);
    const auto news = heard.wait_for(1, 30s);
    REQUIRE(news.size() == 1);
    CHECK(news[0].rank == 1);
    CHECK(news[0].how == Departure::lost);
    CHECK_THAT(news[0].why, Contains("shows no life for 1 s"));
  }
  SECTION("rank 0, as a rank sees it") {
    const RankProcess stopped(job, 0);
    Heard heard;
    const auto store = Store::join(job, 1, 60s);
    store->watch(1s, heard.listener());
    CHECK(heard.wait_for(1, 2s).empty());
    stopped.send(SIGSTOP);
    const auto news = heard.wait_for(1, 30s);
    REQUIRE(news.size() == 1);
    CHECK(news[0].rank == 0);
    CHECK_THAT(news[0].why, Contains("rank 0") && Contains("shows no life"));
    CHECK_THROWS_AS(store->add("a question", 1), LostRank);
  }
}

TEST_CASE("last words are heard by all, and an orderly end is told as one") {
  const StoreAddress job = new_job(3);
  std::vector<Heard> heard(3);
  const auto errors = on_ranks(job, {0, 1, 2}, 60s, [&](Store& store, int rank) {
    const auto i = static_cast<std::size_t>(rank);
    if (rank == 0) std::this_thread::sleep_for(100ms);  // who watches late hears of it as well
    store.watch(0ms, heard[i].listener());
    if (rank == 1) return store.last_words("out of memory");
    if (rank == 2) {
      heard[i].wait_for(1, 30s);
      return;
    }
    heard[i].wait_for(2, 30s);
  });
  for (const std::string& error : errors) CHECK(error.empty());
  const auto news = heard[0].wait_for(2, 0ms);
  REQUIRE(news.size() >= 2);
  CHECK(news[0].how == Departure::failed);
  CHECK_THAT(news[0].why, Contains("rank 1") && Contains("out of memory"));
  CHECK(news[1].rank == 2);
  CHECK(news[1].how == Departure::left);
}

TEST_CASE("a rank whose store dies before all are here meets the next one") {
  const StoreAddress job = new_job(3);
  std::string error = "none yet";
  std::thread waiting;
  {
    const RankProcess first(job, 0);
    waiting = std::thread([&] { error = error_of([&] { Store::join(job, 1, 60s); }); });
    std::this_thread::sleep_for(500ms);  // mostly it has its seat now
  }
  const auto errors = on_ranks(job, {0, 2}, 60s, [](Store&, int) {});
  waiting.join();
  CHECK(error.empty());
  for (const std::string& of : errors) CHECK(of.empty());
}

TEST_CASE("the next attempt of a job meets while the last one ends") {
  const StoreAddress job = new_job(2);
  const auto first = on_ranks(job, {0, 1}, 60s, [&](Store& store, int rank) {
    store.set(concat("of ", rank), "");
    store.get(concat("of ", 1 - rank), 60s);
    if (rank == 0) return;
    // Rank 0 is leaving and waits for this rank, which starts the job anew beside it.
    std::this_thread::sleep_for(200ms);
    StoreAddress again = job;
    again.restart_count = 1;
    const auto second = on_ranks(again, {0, 1}, 60s, [](Store&, int) {});
    for (const std::string& error : second)
      if (!error.empty()) throw CommError(error);
  });
  for (const std::string& error : first) CHECK(error.empty());
}

TEST_CASE("hostile bytes neither crash nor hang a store, nor does anything leak") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  const StoreAddress job = new_job(4);
  const std::size_t files = entries("/proc/self/fd");
  std::thread rank_1([&] {
    CHECK(error_of([&] {
            const auto store = Store::join(job, 1, 500s);
            store->get("over", 60s);
          }).empty());
  });
  std::thread rank_0([&] {
    CHECK(error_of([&] {
            const auto store = Store::join(job, 0, 500s);
            store->get("over", 60s);
          }).empty());
  });
  const int port = port_of(job);

  const std::uint64_t messages = 100'000 / testing::stride();
  std::uint64_t sent = 0, closed = 0;
  while (sent < messages) {
    Socket socket;
    REQUIRE(socket.connect(port));
    const auto greeting = socket.hear();
    REQUIRE(greeting);
    REQUIRE(greeting->kind == MessageKind::greeting);
    if (random() % 2 == 0) {  // in the seat of rank 2, until it is found out
      const std::string hello = encode(
          {.kind = MessageKind::hello, .number = 2, .key = identity(job), .value = "a stranger"});
      if (!socket.send(hello)) continue;
    }
    for (int i = 0; i < 20 && sent < messages; ++i, ++sent) {
      std::string bytes = encode({.kind = static_cast<MessageKind>(random() % 25),
                                  .id = static_cast<std::uint32_t>(random()),
                                  .number = static_cast<std::int64_t>(random()),
                                  .key = std::string(random() % 50, 'k'),
                                  .value = std::string(random() % 200, 'v')});
      if (random() % 2 == 0)  // wrong in one place
        bytes[random() % bytes.size()] = static_cast<char>(random());
      if (random() % 4 == 0) bytes.resize(random() % bytes.size());  // or cut short
      if (!socket.send(bytes)) break;
    }
    closed += !socket.send("x");
  }
  INFO("closed " << closed);
  CHECK(port_of(job) == port);
  // The last stranger's seat is free again in a moment.
  for (bool is_free = false; !is_free; std::this_thread::sleep_for(5ms)) {
    Socket socket;
    REQUIRE(socket.connect(port));
    REQUIRE(socket.hear());
    socket.send(encode(
        {.kind = MessageKind::hello, .number = 2, .key = identity(job), .value = "a stranger"}));
    const auto answer = socket.hear();
    is_free = answer && answer->kind == MessageKind::seated;
    if (!is_free) continue;
    socket.send(encode({.kind = MessageKind::leave}));
    while (socket.hear()) continue;
  }
  std::thread rank_3([&] {
    CHECK(error_of([&] {
            const auto store = Store::join(job, 3, 60s);
            store->get("over", 60s);
          }).empty());
  });
  const std::string error = error_of([&] { Store::join(job, 2, 60s)->set("over", ""); });
  CHECK(error.empty());
  rank_3.join();
  rank_0.join();
  rank_1.join();
  CHECK(entries("/proc/self/fd") == files);
}

TEST_CASE("many ranks meet in seconds") {
  const bool is_whole = testing::stride() == 1;
  const int ranks = is_whole ? 1000 : 100;
  const StoreAddress job = new_job(ranks);
  std::atomic<int> joined{0};
  std::atomic<double> took{0};
  const auto begin = Clock::now();
  const auto errors = on_ranks(job, ranks_below(ranks), 120s, [&](Store& store, int) {
    if (++joined == ranks) {
      took = seconds_since(begin);
      store.set("over", "");
    }
    store.get("over", 120s);
  });
  for (const std::string& error : errors) REQUIRE(error.empty());
  CHECK(joined == ranks);
  WARN(ranks << " ranks met in " << took << " s");
  if (is_whole) CHECK(took < 60);  // 5 on two processors that do nothing else
}
