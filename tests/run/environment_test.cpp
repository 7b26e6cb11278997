// Launch environments: which set wins, and what every broken one says.
#include "tessera/run/environment.hpp"

#include <cstdlib>
#include <map>
#include <random>

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
  const std::pair<Launcher, Variables> in_order[] = {{Launcher::torchrun, kTorchrun},
                                                     {Launcher::open_mpi, kOpenMpi},
                                                     {Launcher::pmi, kPmi},
                                                     {Launcher::slurm, kSlurm},
                                                     {Launcher::pmix, kPmix}};
  for (unsigned subset = 1; subset < 32; ++subset) {
    INFO("subset " << subset);
    Variables together;
    Launcher expected = Launcher::none;
    for (unsigned i = 0; i < 5; ++i) {
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
    const std::string missing = error.substr(0, error.find(':'));
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

TEST_CASE("torchrun with more than one process points at mpirun and --ranks") {
  std::string message;
  try {
    job_size(detect_in(kTorchrun), std::nullopt);
  } catch (const DataError& error) {
    message = error.what();
  }
  CHECK(message.find("WORLD_SIZE=8") != std::string::npos);
  CHECK(message.find("mpirun -n 8") != std::string::npos);
  CHECK(message.find("--ranks 8") != std::string::npos);

  Variables one = kTorchrun;
  one["RANK"] = one["LOCAL_RANK"] = "0";
  one["WORLD_SIZE"] = one["LOCAL_WORLD_SIZE"] = "1";
  CHECK(job_size(detect_in(one), std::nullopt) == 1);
}
