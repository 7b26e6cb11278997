// --trace: a run and its plan leave the same operations on the same lanes, with arrows and memory.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "tests/cli/program.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera::testing;
using nlohmann::json;

namespace {

const std::string kTraced =
    "tessera-train --model.dim=16 --model.n_layers=2 --model.n_heads=2 --training.seq_len=16 "
    "--training.global_batch_size=6 --training.steps=2 ";

class Traces : public TemporaryFolder {
 public:
  Traces() {
    std::string text;
    while (text.size() < 3000) text += "and there was light. ";
    write("book.txt", text);
  }
  // What `command` writes to trace.json.
  json trace(const std::string& command) {
    const Outcome outcome = run_command(command + " --trace=trace.json", path().string());
    INFO(outcome.err);
    REQUIRE(outcome.exit_code == 0);
    out = outcome.out;
    CHECK(entries() == 2);  // the book and the trace, and nothing temporary
    return json::parse(read("trace.json"))["traceEvents"];
  }
  std::string out;  // of the last command
};

// The events of the process that `name` names.
std::vector<json> of(const json& events, const std::string& name) {
  int pid = -1;
  for (const json& e : events)
    if (e["name"] == "process_name" && e["args"]["name"] == name) pid = e["pid"];
  std::vector<json> out;
  std::copy_if(events.begin(), events.end(), std::back_inserter(out),
               [&](const json& e) { return e["pid"] == pid; });
  return out;
}

// lane -> its operations, each with its name and its arguments.
std::map<std::string, std::vector<json>> operations(const std::vector<json>& events) {
  std::map<int, std::string> lanes;
  for (const json& e : events)
    if (e["name"] == "thread_name") lanes[e["tid"]] = e["args"]["name"];
  std::map<std::string, std::vector<json>> out;
  for (const json& e : events)
    if (e["ph"] == "X" && e["args"].contains("flops"))
      out[lanes[e["tid"]]].push_back(
          {e["name"], e["args"]["flops"], e["args"]["bytes"], e["args"]["wire_bytes"]});
  return out;
}

std::vector<double> memory(const std::vector<json>& events) {
  std::vector<double> out;
  for (const json& e : events)
    if (e["ph"] == "C" && e["name"] == "memory live, bytes") out.push_back(e["args"]["value"]);
  return out;
}

// Every arrow starts in an operation and ends at the beginning of another one.
void check_arrows(const std::vector<json>& events) {
  std::map<std::string, std::vector<json>> arrows;
  for (const json& e : events)
    if (e["ph"] == "s" || e["ph"] == "f") arrows[e["id"]].push_back(e);
  CHECK(arrows.size() > 20);  // of 5 units, each gathered, opened and reduced
  const auto begins_here = [&](const json& arrow) {
    return std::any_of(events.begin(), events.end(), [&](const json& e) {
      return e["ph"] == "X" && e["args"].contains("flops") && e["tid"] == arrow["tid"] &&
             e["ts"] == arrow["ts"];
    });
  };
  for (const auto& [id, ends] : arrows) {
    INFO("arrow " << id);
    REQUIRE(ends.size() == 2);
    CHECK(ends[0]["ph"] == "s");
    CHECK(ends[1]["ph"] == "f");
    CHECK(ends[0]["tid"] != ends[1]["tid"]);
    CHECK(begins_here(ends[0]));
    CHECK(begins_here(ends[1]));
  }
}

}  // namespace

TEST_CASE("a run and its plan leave the same timeline, and its peak is the planned one") {
  Traces folder;
  const std::string ranks = kTraced + "--ranks 2 --activation_checkpoint.mode=full ";
  const json run_file = folder.trace(ranks + "--data.path=book.txt");
  const json plan_file = folder.trace(ranks + "--dry-run");
  const auto run = of(run_file, "rank 0"), plan = of(plan_file, "rank 0, planned");
  const auto ran = operations(run), planned = operations(plan);
  CHECK(ran.size() == 3);  // compute, gather, reduce
  for (const auto& [lane, list] : planned) {
    INFO(lane);
    CHECK(list.size() >= 10);  // 5 units in 2 steps
    CHECK(ran.at(lane) == list);
  }
  CHECK(operations(of(run_file, "rank 1")).at("gather") == planned.at("gather"));
  CHECK(memory(run) == memory(plan));
  REQUIRE_FALSE(memory(plan).empty());
  const std::string line = "planned peak ";  // of the first step, the larger one
  const double peak = std::stod(folder.out.substr(folder.out.find(line) + line.size()));
  const auto values = memory(plan);
  CHECK(*std::max_element(values.begin(), values.end()) == peak);
  check_arrows(run);
  check_arrows(plan);
}

TEST_CASE("a plan says who owns Muon's matrices, what they send, and which micro-batches reduce") {
  Traces folder;
  const json file = folder.trace(kTraced +
                                 "--dry-run --ranks 3 --optimizer.name=Muon "
                                 "--training.local_batch_size=1 "
                                 "--parallelism.fsdp_gradient_sync=last");
  CHECK(folder.out.find("2 micro-batches a step, gradients reduced after the last, of tables in "
                        "slices after each\n") != std::string::npos);
  // Of two blocks: four matrices of attention, three of the feed-forward layer.
  std::smatch found;
  REQUIRE(std::regex_search(folder.out, found,
                            std::regex("Muon: 14 matrices in 1 turn, owned by ranks of a shard "
                                       "group: (\\d), (\\d), (\\d); by all-to-all a rank sends "
                                       "(\\d+) bytes a step")));
  CHECK(std::stoi(found[1]) + std::stoi(found[2]) + std::stoi(found[3]) == 14);
  double travelled = 0;  // in two steps, to this rank and from it
  const auto ops = operations(of(file, "rank 0, planned"));
  for (const json& op : ops.at("reduce"))
    if (op[0].get<std::string>().starts_with("muon_")) travelled += op[3].get<double>();
  CHECK(travelled > 0);
  CHECK(2 * 2 * std::stod(found[4]) == travelled);
}

TEST_CASE("a timeline holds the first ten steps, and replaces a file whole") {
  Traces folder;
  folder.write("trace.json", "old");
  const json events = folder.trace(kTraced + "--training.steps=12 --data.path=book.txt");
  std::vector<std::string> steps;
  for (const json& e : events)
    if (e["ph"] == "X" && e["name"].get<std::string>().starts_with("step "))
      steps.push_back(e["name"]);
  REQUIRE(steps.size() == 10);
  CHECK(steps.back() == "step 10");
}
