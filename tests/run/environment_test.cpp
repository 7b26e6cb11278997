// Launch environments: which set wins, and what every broken one says.
#include "tessera/run/environment.hpp"

#include <cstdlib>
#include <map>
#include <random>
#include <tuple>

#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;

namespace {

using Variables = std::map<std::string, std::string>;

LaunchEnvironment detect_in(const Variables& variables) {
  return detect([&](const char* variable) -> const char* {
    const auto found = variables.find(variable);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string error_in(const Variables& variables) {
  try {
    detect_in(variables);
  } catch (const DataError& error) {
    return error.what();
  }
  return "no error";
}

Variables operator+(Variables a, const Variables& b) {
  a.insert(b.begin(), b.end());
  return a;
}

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "node1"},
                             {"MASTER_PORT", "29500"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kPmi = {{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}};
const Variables kSlurm = {{"SLURM_JOB_ID", "77"},
                          {"SLURM_NTASKS", "16"},
                          {"SLURM_PROCID", "6"},
                          {"SLURM_STEP_NUM_TASKS", "8"},
                          {"SLURM_LOCALID", "2"}};
const Variables kPmix = {{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "prterun-3"}};
const Variables kTessera = {
    {"TESSERA_RANK", "3"}, {"TESSERA_WORLD_SIZE", "4"}, {"TESSERA_STORE", "node7:4000"}};
const Variables kKubernetes = {
    {"JOB_COMPLETION_INDEX", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "train-0.train"}};

// What launchers set, as they set it: `env` in a process of each.
const Variables kTorchrun113 = {{"LOCAL_RANK", "1"},
                                {"RANK", "1"},
                                {"GROUP_RANK", "0"},
                                {"ROLE_RANK", "1"},
                                {"ROLE_NAME", "default"},
                                {"LOCAL_WORLD_SIZE", "2"},
                                {"WORLD_SIZE", "2"},
                                {"GROUP_WORLD_SIZE", "1"},
                                {"ROLE_WORLD_SIZE", "2"},
                                {"MASTER_ADDR", "127.0.0.1"},
                                {"MASTER_PORT", "29511"},
                                {"TORCHELASTIC_RESTART_COUNT", "0"},
                                {"TORCHELASTIC_MAX_RESTARTS", "0"},
                                {"TORCHELASTIC_RUN_ID", "none"},
                                {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                {"NCCL_ASYNC_ERROR_HANDLING", "1"},
                                {"OMP_NUM_THREADS", "1"},
                                {"TORCHELASTIC_ERROR_FILE", "/tmp/t/attempt_0/1/error.json"}};
const Variables kTorchrun2 = {{"LOCAL_RANK", "0"},
                              {"RANK", "4"},
                              {"GROUP_RANK", "1"},
                              {"LOCAL_WORLD_SIZE", "4"},
                              {"WORLD_SIZE", "8"},
                              {"GROUP_WORLD_SIZE", "2"},
                              {"MASTER_ADDR", "gpu3.cluster"},
                              {"MASTER_PORT", "43177"},
                              {"TORCHELASTIC_RESTART_COUNT", "2"},
                              {"TORCHELASTIC_MAX_RESTARTS", "3"},
                              {"TORCHELASTIC_RUN_ID", "7c1c6d0e-6f1b-4b8a-9c53-2f1f0a1e4f11"},
                              {"TORCHELASTIC_USE_AGENT_STORE", "False"},
                              {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"}};
const Variables kHydra = {{"PMI_RANK", "1"},
                          {"PMI_SIZE", "2"},
                          {"PMI_FD", "9"},
                          {"MPI_LOCALRANKID", "1"},
                          {"MPI_LOCALNRANKS", "2"}};
const Variables kSrun = {{"SLURM_JOB_ID", "4711"},
                         {"SLURM_JOBID", "4711"},
                         {"SLURM_STEP_ID", "3"},
                         {"SLURM_PROCID", "4"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_NODEID", "2"},
                         {"SLURM_NTASKS", "16"},
                         {"SLURM_NPROCS", "16"},
                         {"SLURM_NODELIST", "n[01-08]"},
                         {"SLURM_JOB_NODELIST", "n[01-08]"},
                         {"SLURM_TASKS_PER_NODE", "2(x8)"},
                         {"SLURM_STEP_NODELIST", "n[03,05-06]"},
                         {"SLURM_STEP_NUM_NODES", "3"},
                         {"SLURM_STEP_NUM_TASKS", "5"},
                         {"SLURM_STEP_TASKS_PER_NODE", "1,2(x2)"},
                         {"SLURM_LAUNCH_NODE_IPADDR", "10.9.9.9"}};

}  // namespace

TEST_CASE("an empty environment is one process that says nothing") {
  const LaunchEnvironment found = detect_in({});
  CHECK(found.launcher == Launcher::none);
  CHECK(found.rank == 0);
  CHECK(found.world_size == 1);
  CHECK(found.local_rank == 0);
  CHECK(found.local_size == 1);
  CHECK(found.notice.empty());
}

TEST_CASE("each launcher's set is read from its own variables") {
  const LaunchEnvironment torchrun = detect_in(kTorchrun);
  CHECK(torchrun.launcher == Launcher::torchrun);
  CHECK(torchrun.rank == 5);
  CHECK(torchrun.world_size == 8);
  CHECK(torchrun.local_rank == 1);
  CHECK(torchrun.local_size == 4);

  const LaunchEnvironment mpi = detect_in(kOpenMpi);
  CHECK(mpi.launcher == Launcher::open_mpi);
  CHECK(mpi.rank == 1);
  CHECK(mpi.world_size == 4);
  CHECK(mpi.local_size == 2);

  const LaunchEnvironment pmi = detect_in(kPmi);
  CHECK(pmi.launcher == Launcher::pmi);
  CHECK(pmi.rank == 2);
  CHECK(pmi.world_size == 3);
  CHECK(pmi.local_size == 0);  // plain PMI does not say how many share the host

  const LaunchEnvironment slurm = detect_in(kSlurm);
  CHECK(slurm.launcher == Launcher::slurm);
  CHECK(slurm.rank == 6);
  CHECK(slurm.world_size == 8);  // the step's, not the allocation's 16
  CHECK(slurm.local_rank == 2);
  CHECK(slurm.notice.empty());

  const LaunchEnvironment pmix = detect_in(kPmix);
  CHECK(pmix.launcher == Launcher::pmix);
  CHECK(pmix.rank == 1);
  CHECK(pmix.world_size == 0);
  CHECK(pmix.several_processes());
}

TEST_CASE("the first complete set wins, whichever subset of launchers is there") {
  const std::pair<Launcher, Variables> in_order[] = {
      {Launcher::tessera, kTessera},      {Launcher::torchrun, kTorchrun},
      {Launcher::open_mpi, kOpenMpi},     {Launcher::pmi, kPmi},
      {Launcher::slurm, kSlurm},          {Launcher::pmix, kPmix},
      {Launcher::kubernetes, kKubernetes}};
  for (unsigned subset = 1; subset < 128; ++subset) {
    INFO("subset " << subset);
    Variables together;
    Launcher expected = Launcher::none;
    for (unsigned i = 0; i < 7; ++i) {
      if (!(subset >> i & 1u)) continue;
      together = together + in_order[i].second;
      if (expected == Launcher::none) expected = in_order[i].first;
    }
    CHECK(detect_in(together).launcher == expected);
  }
}

TEST_CASE(
    "an incomplete set is passed over where another one is complete, and never mixed into it") {
  const LaunchEnvironment found =
      detect_in(kOpenMpi + Variables{{"RANK", "3"}, {"WORLD_SIZE", "9"}});
  CHECK(found.launcher == Launcher::open_mpi);
  CHECK(found.rank == 1);
  CHECK(found.world_size == 4);
}

TEST_CASE(
    "every proper part of torchrun's set that holds a marker is refused, naming what is missing") {
  const std::string required[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"};
  for (unsigned subset = 0; subset < 31; ++subset) {
    INFO("subset " << subset);
    Variables some;
    for (unsigned i = 0; i < 5; ++i) {
      if (subset >> i & 1u) some[required[i]] = kTorchrun.at(required[i]);
    }
    const std::string error = error_in(some);
    if ((subset & 7u) == 0) {
      CHECK(error == "no error");  // MASTER_ADDR and MASTER_PORT alone mean nothing
      continue;
    }
    const std::string missing = error.substr(0, error.find_first_of(":;"));
    for (unsigned i = 0; i < 5; ++i) {
      const bool named = (missing + ",").find(" " + required[i] + ",") != std::string::npos;
      CHECK(named == !(subset >> i & 1u));
    }
  }
  CHECK(error_in({{"OMPI_COMM_WORLD_RANK", "0"}}).find("OMPI_COMM_WORLD_SIZE") !=
        std::string::npos);
  CHECK(error_in({{"PMI_RANK", "0"}}).find("PMI_SIZE") != std::string::npos);
}

TEST_CASE("a variable that is set to nothing counts as absent") {
  CHECK(detect_in({{"RANK", ""}, {"WORLD_SIZE", ""}}).launcher == Launcher::none);
  Variables emptied = kTorchrun;
  emptied["MASTER_PORT"] = "";
  CHECK(error_in(emptied).find("MASTER_PORT") != std::string::npos);
}

TEST_CASE("a value that is no integer is refused by name") {
  for (const std::string bad : {"one", "1.5", "-1", "0x1", " 1", "1 ", "99999999999", "1e3"}) {
    INFO(bad);
    for (const char* variable : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
      Variables broken = kTorchrun;
      broken[variable] = bad;
      CHECK(error_in(broken).find(concat(variable, "='", bad, "'")) == 0);
    }
    Variables broken = kSlurm;
    broken["SLURM_PROCID"] = bad;
    CHECK(error_in(broken).find("SLURM_PROCID=") == 0);
  }
}

TEST_CASE("a rank that is not below its size is refused") {
  const unsigned seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (int trial = 0; trial < 200; ++trial) {
    const int size = static_cast<int>(random() % 16), rank = static_cast<int>(random() % 16);
    INFO("rank " << rank << " of " << size);
    Variables variables = kTorchrun;
    variables["RANK"] = std::to_string(rank);
    variables["WORLD_SIZE"] = std::to_string(size);
    variables["LOCAL_RANK"] = "0";
    variables["LOCAL_WORLD_SIZE"] = "1";
    const std::string error = error_in(variables);
    if (rank < size) {
      CHECK(detect_in(variables).rank == rank);
    } else {
      CHECK(error ==
            concat("RANK=", rank, " is not below WORLD_SIZE=", size, "; ranks count from 0"));
    }
  }
  Variables local = kOpenMpi;
  local["OMPI_COMM_WORLD_LOCAL_RANK"] = "2";
  CHECK(error_in(local).find("OMPI_COMM_WORLD_LOCAL_RANK=2 is not below") == 0);
}

TEST_CASE("where rank 0 can be met is read from what each launcher says") {
  const LaunchEnvironment old = detect_in(kTorchrun113);
  CHECK(old.launcher == Launcher::torchrun);
  CHECK(old.store_host == "127.0.0.1");
  CHECK(old.store_port == 29511);
  CHECK(old.run_id == "none");
  CHECK(old.restart_count == 0);

  const LaunchEnvironment current = detect_in(kTorchrun2);
  CHECK(current.rank == 4);
  CHECK(current.local_size == 4);
  CHECK(current.store_host == "gpu3.cluster");
  CHECK(current.store_port == 43177);
  CHECK(current.run_id == "7c1c6d0e-6f1b-4b8a-9c53-2f1f0a1e4f11");
  CHECK(current.restart_count == 2);

  const LaunchEnvironment own = detect_in(kTessera);
  CHECK(own.launcher == Launcher::tessera);
  CHECK(own.rank == 3);
  CHECK(own.store_host == "node7");
  CHECK(own.store_port == 4000);

  const LaunchEnvironment pod = detect_in(kKubernetes);
  CHECK(pod.launcher == Launcher::kubernetes);
  CHECK(pod.rank == 2);
  CHECK(pod.world_size == 3);
  CHECK(pod.local_size == 1);
  CHECK(pod.store_host == "train-0.train");
  CHECK(pod.store_port == 29500);
  CHECK(detect_in(kKubernetes + Variables{{"MASTER_PORT", "23456"}}).store_port == 23456);

  const LaunchEnvironment hydra = detect_in(kHydra);
  CHECK(hydra.launcher == Launcher::pmi);
  CHECK(hydra.local_size == 2);
  CHECK(hydra.store_host.empty());
  CHECK(detect_in(kOpenMpi).store_host.empty());
}

TEST_CASE("of a Slurm step the hosts and tasks are read, not those of its job") {
  const LaunchEnvironment step = detect_in(kSrun);
  CHECK(step.launcher == Launcher::slurm);
  CHECK(step.rank == 4);
  CHECK(step.world_size == 5);
  CHECK(step.local_rank == 1);
  CHECK(step.local_size == 2);
  CHECK(step.hosts == std::vector<std::string>{"n03", "n05", "n06"});
  CHECK(step.store_host == "n03");
  CHECK(step.store_port == 61440 + 711);  // job 4711, of 4000 ports
  CHECK(step.run_id == "4711.3");

  const std::tuple<const char*, const char*, const char*> wrong[] = {
      {"SLURM_STEP_TASKS_PER_NODE", "2(x3)", "against 6 tasks in"},
      {"SLURM_STEP_TASKS_PER_NODE", "5", "SLURM_NODEID=2 counts from 0, against 1 node in"},
      {"SLURM_STEP_NODELIST", "n[03,05]", "has 2 hosts, against 3 nodes in"},
      {"SLURM_STEP_TASKS_PER_NODE", "5,x", "2(x3),1"},
      {"SLURM_STEP_NODELIST", "n[03", "n[01-08,12]"},
      {"SLURM_STEP_NODELIST", "n[0-999999999]", "more than 65536"},
      {"SLURM_NODEID", "3", "SLURM_STEP_TASKS_PER_NODE='1,2(x2)'"},
      {"SLURM_LOCALID", "2",
       "against 2 tasks of SLURM_NODEID=2 in SLURM_STEP_TASKS_PER_NODE='1,2(x2)'"},
      {"SLURM_JOB_ID", "x", "no"}};
  for (const auto& [variable, value, said] : wrong) {
    Variables broken = kSrun;
    broken[variable] = value;
    INFO(variable << "=" << value);
    const std::string error = error_in(broken);
    CHECK(error.find(variable) != std::string::npos);
    CHECK(error.find(said) != std::string::npos);
    CHECK(error.find('\n') == std::string::npos);
  }
}

TEST_CASE("what gave the address of rank 0 is named as it was given") {
  const std::tuple<Variables, const char*, const char*, const char*> given[] = {
      {kTorchrun, "MASTER_ADDR=node1", "MASTER_PORT=29500", "LOCAL_RANK=1"},
      {kTessera, "TESSERA_STORE=node7:4000", "TESSERA_STORE=node7:4000", ""},
      {kKubernetes, "MASTER_ADDR=train-0.train", "port 29500 without MASTER_PORT", ""},
      {kSrun, "host n03 of SLURM_STEP_NODELIST", "port 62151 by SLURM_JOB_ID=4711",
       "SLURM_LOCALID=1"},
      {kOpenMpi, "", "", "OMPI_COMM_WORLD_LOCAL_RANK=1"}};
  for (const auto& [variables, host, port, local] : given) {
    const LaunchEnvironment found = detect_in(variables);
    CHECK(found.store_host_from == host);
    CHECK(found.store_port_from == port);
    CHECK(found.local_rank_from == local);
  }
}

TEST_CASE("an address of IPv6 may be in brackets") {
  for (Variables variables : {kTorchrun, kKubernetes}) {
    variables["MASTER_ADDR"] = "[::1]";
    CHECK(detect_in(variables).store_host == "::1");
    CHECK(detect_in(variables).store_host_from == "MASTER_ADDR=[::1]");
  }
}

TEST_CASE("variables that contradict each other are refused, and both are named") {
  const auto refuses = [](Variables variables, const Variables& other, const char* says) {
    for (const auto& [name, value] : other) variables[name] = value;
    INFO(says);
    CHECK(error_in(variables).find(says) == 0);
  };
  Variables unsized = kTorchrun;
  unsized.erase("LOCAL_WORLD_SIZE");
  refuses(unsized, {{"LOCAL_RANK", "7"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}},
          "LOCAL_RANK=7 is not below WORLD_SIZE=2; ");
  refuses(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}}, "LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8; ");
  refuses(kKubernetes, {{"RANK", "1"}}, "RANK=1 and JOB_COMPLETION_INDEX=2 both say ");
  refuses(kKubernetes, {{"MASTER_ADDR", "10.0.0.1:29500"}},
          "MASTER_ADDR='10.0.0.1:29500' has a port; write it into MASTER_PORT");
  refuses(kKubernetes, {{"MASTER_ADDR", "node 1"}},
          "MASTER_ADDR='node 1' is no host: it has a space or a control character");
  refuses(kKubernetes, {{"MASTER_ADDR", ""}},
          "JOB_COMPLETION_INDEX=2 and WORLD_SIZE=3 are set but not MASTER_ADDR: ");
  refuses(kTorchrun, {{"TESSERA_RANK", "1"}},
          "TESSERA_RANK=1 is set but not TESSERA_WORLD_SIZE, TESSERA_STORE, beside RANK=5 of "
          "torchrun; ");
  refuses(kOpenMpi, {{"TESSERA_STORE", "n:1"}},
          "TESSERA_STORE=n:1 is set but not TESSERA_RANK, TESSERA_WORLD_SIZE, beside "
          "OMPI_COMM_WORLD_RANK=1 of Open MPI; ");
  refuses({}, {{"PMIX_RANK", "1"}}, "PMIX_RANK=1 is set but not PMIX_NAMESPACE: ");
}

TEST_CASE("torchrun in each pod of a Kubernetes job counts its own ranks") {
  const LaunchEnvironment found = detect_in(kTorchrun + kKubernetes);
  CHECK(found.launcher == Launcher::torchrun);
  CHECK(found.rank == 5);
  CHECK(detect_in(kKubernetes + Variables{{"RANK", "2"}}).launcher == Launcher::kubernetes);
}

TEST_CASE("a store that is no host and port is refused by name") {
  for (const std::string good : {"node1:1", "10.0.0.1:65535", "[fe80::1]:29500"}) {
    Variables variables = kTessera;
    variables["TESSERA_STORE"] = good;
    CHECK(error_in(variables) == "no error");
  }
  CHECK(
      detect_in({{"TESSERA_RANK", "0"}, {"TESSERA_WORLD_SIZE", "2"}, {"TESSERA_STORE", "[::1]:9"}})
          .store_host == "::1");
  for (const std::string bad : {"node1", "node1:", ":29500", "node1:0", "node1:65536", "node1:x",
                                "fe80::1:29500", "[]:1", "[a]b:1", "a]:1"}) {
    INFO(bad);
    Variables variables = kTessera;
    variables["TESSERA_STORE"] = bad;
    CHECK(error_in(variables).find(concat("TESSERA_STORE='", bad, "' ")) == 0);
  }
  Variables variables = kTorchrun;
  variables["MASTER_PORT"] = "70000";
  CHECK(error_in(variables).find("MASTER_PORT='70000'") == 0);
}

TEST_CASE("RANK without LOCAL_RANK is refused, and both of its readings are named") {
  Variables kubeflow = kTorchrun;
  kubeflow.erase("LOCAL_RANK");
  kubeflow.erase("LOCAL_WORLD_SIZE");
  const std::string error = error_in(kubeflow);
  CHECK(error.find("RANK=5 is set but not LOCAL_RANK") == 0);
  CHECK(error.find("processes") != std::string::npos);
  CHECK(error.find("--nnodes=8 --node_rank=5") != std::string::npos);
}

TEST_CASE("a rank of thousands of digits is refused in one short line") {
  for (Variables variables : {Variables{{"WORLD_SIZE", "1"}}, kKubernetes, kOpenMpi + kTessera}) {
    variables["RANK"] = variables["OMPI_COMM_WORLD_RANK"] = std::string(5000, '9');
    variables.erase("TESSERA_WORLD_SIZE");
    CHECK(error_in(variables).size() < 500);
    CHECK(error_in(variables).find("999") != std::string::npos);
  }
}

TEST_CASE("a pod of a Kubernetes job whose size nobody says runs alone, with one notice") {
  const LaunchEnvironment pod = detect_in({{"JOB_COMPLETION_INDEX", "3"}});
  CHECK(pod.launcher == Launcher::none);
  CHECK(pod.notice.find("JOB_COMPLETION_INDEX=3") == 0);
}

TEST_CASE("a Slurm allocation without a step runs alone with one notice") {
  for (const char* variable : {"SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID"}) {
    const LaunchEnvironment found = detect_in({{variable, "4"}});
    CHECK(found.launcher == Launcher::none);
    CHECK(found.world_size == 1);
    CHECK(found.notice.find(concat(variable, "=4")) == 0);
    CHECK(found.notice.find('\n') == std::string::npos);
  }
}

TEST_CASE("the size of a job is the launcher's or --ranks, never both") {
  CHECK(job_size(detect_in({}), std::nullopt) == 1);
  CHECK(job_size(detect_in({}), 4) == 4);
  CHECK(job_size(detect_in(kOpenMpi), std::nullopt) == 4);
  CHECK_THROWS_AS(job_size(detect_in(kOpenMpi), 4), DataError);
  CHECK_THROWS_AS(job_size(detect_in(kOpenMpi), 1), DataError);
  CHECK_THROWS_AS(job_size(detect_in(kPmix), 2), DataError);

  Variables one = kOpenMpi;
  one["OMPI_COMM_WORLD_RANK"] = one["OMPI_COMM_WORLD_LOCAL_RANK"] = "0";
  one["OMPI_COMM_WORLD_SIZE"] = one["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";
  CHECK(job_size(detect_in(one), 3) == 3);
}

TEST_CASE("torchrun's job is as large as it says") {
  CHECK(job_size(detect_in(kTorchrun), std::nullopt) == 8);
  CHECK_THROWS_AS(job_size(detect_in(kTorchrun), 8), DataError);
  Variables one = kTorchrun;
  one["RANK"] = one["LOCAL_RANK"] = "0";
  one["WORLD_SIZE"] = one["LOCAL_WORLD_SIZE"] = "1";
  CHECK(job_size(detect_in(one), std::nullopt) == 1);
}
