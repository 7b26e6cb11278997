#!/usr/bin/env python3
"""Runs the tests of a configured build folder, one line for each suite, and counts test cases.

Called by tools/test and .ci/run after the build, and by tools/soak. Counts come from the report that each suite writes in this
very run: the folder of reports is emptied first, a suite that crashes or hangs counts as at least one failure.

Patience is counted in the seconds that a suite computes, on all processors together, and in those that it sleeps: a hang does one
or the other. The time for which it only waits for a processor that others use is not counted, so that a busy machine fails nothing.

SUITES_UNTIL=SECONDS in the environment, of the epoch: suites that have not begun by then are skipped, with that reason.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml

SKIPPED = re.compile(r"skipped:\s*(.*)", re.IGNORECASE | re.DOTALL)

FAILING = ("Expression", "Failure", "FatalErrorCondition", "Exception")


class Outcome:
    """What one suite did: numbers, failures as text, skips as (case, reason)."""

    def __init__(self, name):
        self.name, self.passed, self.failed = name, 0, 0
        self.seconds, self.computed = 0.0, 0.0  # on the wall, and of all processors together
        self.failures, self.skips, self.pardoned = [], [], False


def text(node, tag):
    return (node.findtext(tag) or "").strip()


FIRST, LAST = 5, 15  # lines that are shown of a long message: the last ones say how it ended


def shortened(message):
    lines = message.strip().splitlines()
    left_out = len(lines) - FIRST - LAST
    if left_out > 1:
        lines[FIRST:-LAST] = [f"... {left_out} lines are left out ..."]
    return "\n".join(lines)


def describe(case):
    """The failing assertions of a Catch2 test case, as a person wants to read them."""
    lines = [f'"{case.get("name")}"  {case.get("filename")}:{case.get("line")}']
    notes = []
    for node in case.iter():
        if node.tag == "Section":
            notes.append(f'    in section "{node.get("name")}"')
        elif node.tag in ("Info", "Warning"):
            notes.append("    " + shortened(node.text or ""))
        elif node.tag in ("Failure", "FatalErrorCondition", "Exception"):
            lines += notes + [f'  {node.get("filename")}:{node.get("line")}: {shortened(node.text or node.tag)}']
            notes = []
        elif node.tag == "Expression" and node.get("success") == "false" and node.find("FatalErrorCondition") is None:
            lines.append(f'  {node.get("filename")}:{node.get("line")}: {node.get("type")}( {text(node, "Original")} )')
            lines.append(f'    is  {shortened(text(node, "Expanded"))}')
            lines += notes
            notes = []
    if len(lines) == 1:
        lines.append("  asserts nothing")
    return "\n".join(lines)


def read_report(path, cases, outcome):
    """Adds the test cases of a Catch2 XML report, and returns the one in which the report breaks off, if it does."""
    unfinished = ""
    try:
        for event, node in xml.iterparse(path, events=("start", "end")):
            if node.tag != "TestCase":
                continue
            if event == "start":
                unfinished = node.get("name")
                continue
            unfinished = ""
            result = node.find("OverallResult")
            reasons = [SKIPPED.match((w.text or "").strip()) for w in node.iter("Warning")]
            reasons += [SKIPPED.match("skipped: " + (s.text or "").strip()) for s in node.iter("Skip")]
            reasons = [r.group(1).strip() for r in reasons if r]
            name = node.get("name")
            failed = result is None or result.get("success") != "true"
            pardoned = failed and (reasons or node.find("Section") is not None) and not any(
                n.tag in FAILING and n.get("success") != "true" for n in node.iter())
            if pardoned:  # fails only for asserting nothing: being skipped, or in sections that are followed by assertions
                failed = False
                outcome.pardoned = True
            if failed:
                outcome.failures.append(describe(node))
                cases[name] = "failed"
            elif reasons:
                outcome.skips.append((name, reasons[0]))
                cases.setdefault(name, "skipped")
            else:
                cases.setdefault(name, "passed")
    except (xml.ParseError, OSError):
        pass
    return f' in "{unfinished}"' if unfinished else ""


TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
STATE, PARENT, SESSION, TIMES = 0, 1, 3, slice(11, 15)  # in /proc/PID/stat behind the name; times are of waited-for children, too


def stat(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def family(leader):
    """{process: its fields} of the session that `leader` leads and of all that descends from it, in sessions of their own too."""
    every = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            every[int(name)] = stat(f"/proc/{name}/stat")
        except OSError:
            pass  # it has just ended
    found = {pid for pid, fields in every.items() if pid == leader or int(fields[SESSION]) == leader}
    more = found
    while more:
        more = {pid for pid, fields in every.items() if int(fields[PARENT]) in found} - found
        found |= more
    return {pid: every[pid] for pid in found}


def wants_processor(pid):
    """Whether a thread runs, could run, or waits for a disk; else all of them sleep."""
    try:
        return any(stat(f"/proc/{pid}/task/{thread}/stat")[STATE] in "RD" for thread in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return True  # it has just ended


class Spent:
    """The seconds that a suite has computed and slept so far, from looks at it now and then."""

    def __init__(self, leader):
        self.leader, self.computed, self.slept = leader, 0.0, 0.0
        self.ticks, self.looked = 0, time.monotonic()

    def look(self):
        processes, now = family(self.leader), time.monotonic()
        ticks = sum(int(ticks) for fields in processes.values() for ticks in fields[TIMES])
        self.computed += max(0, ticks - self.ticks) / TICKS_A_SECOND  # less when an orphan has ended
        self.ticks = ticks
        if not any(wants_processor(pid) for pid in processes):
            self.slept += now - self.looked
        self.looked = now


SHARES = pathlib.Path(__file__).resolve().parents[1] / "tests" / "shares.txt"
SEED = SHARES.with_name("seed.txt")
WHOLE = (1, 1)
PATIENCE = {"asan": 5, "tsan": 10}
UNTIL = float(os.environ.get("SUITES_UNTIL") or "inf")
FILTER = {"tsan": "[threads]"}  # of Catch2; suites of other kinds are left out


class Shares:
    """tests/shares.txt: what a run takes of each suite, and in which order suites begin."""

    def __init__(self, run):
        lines = [line.split() for line in SHARES.read_text().splitlines() if line and not line.startswith("#")]
        self.runs, self.order = lines[0][1:], [line[0] for line in lines[1:]]
        rows = {line[0]: line[1:] for line in lines[1:]}
        column = self.runs.index("soak" if run == "whole" else run)
        self.run, self.cells = run, {name: cells[column] for name, cells in rows.items()}

    def cell(self, test):
        kind = "(lessons)" if kind_of(test) == "lesson" else "(others)"
        return self.cells.get(name_of(test), self.cells[kind])

    def takes(self, test):
        """Whether the run has this suite; of an MPI suite, on this number of ranks."""
        ranks = re.search(r" -n (\d+)$", test["name"])
        return self.cell(test) != "-" and (not ranks or ranks[1] in self.cells["(ranks)"].split(","))

    def of(self, test):
        """(N, M): of the places of a step one in N is tried, of the cells of a grid one in M. What the run leaves out is as others are."""
        cell = self.cell(test)
        if self.run == "whole":
            return WHOLE
        return tuple(map(int, (cell if "/" in cell else self.cells["(others)"]).split("/")))

    def place(self, test):
        """Where the suite stands in the order of beginning."""
        name = name_of(test)
        return self.order.index(name if name in self.order else "(others)")


def base_seed():
    """The number from which all seeds of a run come: SEED_BASE in the environment, else that of tests/seed.txt."""
    return os.environ.get("SEED_BASE") or SEED.read_text().split()[-1]


def launch(test, command, log, options):
    """(exit status, negative for a signal; why it was ended, or ""; seconds of processors). Ends whatever the test started."""
    places, cells = options.shares.of(test)
    env = dict(os.environ, PATIENCE=str(options.patience), TRY_ONE_IN=str(places), TRY_ONE_CELL_IN=str(cells),  # read by the tests
               SEED_BASE=options.seed, **test["env"])
    limit = test["timeout"] * options.patience
    # Two mpirun that make Open MPI's folder of sessions at the same time fail, so each suite has a place of its own for it.
    with open(log, "wb") as out, tempfile.TemporaryDirectory(prefix="mpi-", ignore_cleanup_errors=True) as sessions:
        env["OMPI_MCA_orte_tmpdir_base"] = sessions
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env,
                                   cwd=test["workdir"], start_new_session=True)
        spent, why, pause = Spent(process.pid), "", 0.001
        try:
            while not why:
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
                if ended:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    return process.returncode, "", usage.ru_utime + usage.ru_stime
                if time.monotonic() - spent.looked > 0.5:
                    spent.look()
                    if spent.computed > limit:
                        why = f"computed for {spent.computed:.0f} s without an end, of the {limit:.0f} that it may"
                    if spent.slept > limit:
                        why = f"slept for {spent.slept:.0f} s without an end, of the {limit:.0f} that it may"
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            return None, why, spent.computed
        finally:
            for pid in set(family(process.pid)) | {process.pid}:
                try:
                    if process.returncode is None or pid != process.pid:
                        os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()


def run(test, options, reports):
    outcome = Outcome(test["name"])
    if time.time() >= UNTIL:
        outcome.skips.append(("all of it", f"{time.strftime('%H:%M', time.localtime(UNTIL))} was past, when the last suites begin"))
        return outcome
    stem = reports / re.sub(r"\W+", "-", test["name"])
    log, report = f"{stem}.log", f"{stem}.xml"
    command = list(test["cmd"])
    kind = kind_of(test)
    flags = ["-r", "xml", "-w", "NoAssertions"]  # a case that asserts nothing fails
    if kind == "catch":
        command += flags + ["-o", report] + ([options.filter] if options.filter else [])
    elif kind == "mpi":  # each rank writes a report of its own
        command[3:] = ["sh", "-c", 'exec "$@".$OMPI_COMM_WORLD_RANK', "sh", *command[3:], *flags, "-o", report]  # mpirun -n N
    start = time.monotonic()
    status, why, outcome.computed = launch(test, command, log, options)
    outcome.seconds = time.monotonic() - start

    where = ""
    output = pathlib.Path(log).read_text(errors="replace").strip()
    last_lines = "\n".join("  " + line for line in output.splitlines()[-40:])
    if kind in ("catch", "mpi"):
        cases = {}
        for path in sorted(reports.glob(pathlib.Path(report).name + "*")):
            where = read_report(path, cases, outcome) or where
        outcome.passed = sum(state == "passed" for state in cases.values())
        outcome.failed = sum(state == "failed" for state in cases.values())
        clean = status == 0 or (outcome.pardoned and status is not None and status > 0 and not where)
        if clean and not cases and not outcome.skips and not options.filter:
            clean, why = False, "ran no case"
    elif status == 77:
        outcome.skips.append((test["name"], output.splitlines()[-1] if output else "no reason given"))
        clean = True
    else:
        clean = status == 0
        outcome.passed = int(clean)
    if not clean and outcome.failed == 0:
        outcome.failed = 1
        outcome.failures.append(f"{why or ending(status)}{where}\n{last_lines}")
    elif status is None or status < 0:
        outcome.failures.append(f"{why or ending(status)}{where}\n{last_lines}")
    return outcome


def ending(status):
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"


def labels(test):
    return [label.split(":")[-1] for label in test["suite"]]


def kind_of(test):
    return labels(test)[0]


def show(outcome):
    counts = f"{outcome.passed} passed"
    if outcome.failed:
        counts += f", {outcome.failed} FAILED"
    if outcome.skips:
        counts += f", {len(outcome.skips)} skipped"
    lines = [f"  {outcome.name:<24} {counts:<36} {outcome.seconds:6.1f} s, computed {outcome.computed:6.1f} s\n"]
    lines += ["    " + failure.replace("\n", "\n    ") + "\n" for failure in outcome.failures]
    print("".join(lines), end="", flush=True)  # at once: others show theirs


def introspect(what, folder):
    found = subprocess.run(["meson", "introspect", what, folder], capture_output=True, text=True)
    if found.returncode != 0:
        sys.exit(f"suites: {folder} is not a configured build folder")
    return json.loads(found.stdout)


def run_all(tests, jobs, once):
    """What `once` returns for each: `jobs` of them at a time, those under mpirun in turn beside the others, and what measures time alone,
    behind them."""
    mpi = [test for test in tests if kind_of(test) == "mpi"]
    lanes = ([mpi] if mpi else []) + [[test] for test in tests if test["is_parallel"]]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        together = [result for lane in pool.map(lambda lane: list(map(once, lane)), lanes) for result in lane]
    return together + [once(test) for test in tests if not test["is_parallel"] and test not in mpi]


def name_of(test):
    return test["name"].split()[0]  # "comm_mpi -n 2" and "comm_mpi -n 4" are one name


def without_shares(tests):
    """The tests without what long suites among them do more of: a program's cases that are long suites of their own, and `some_` of them."""
    names = {test["name"] for test in tests}
    tests = [test for test in tests if test["name"].removeprefix("some_") not in names or not test["name"].startswith("some_")]
    parts = {}
    for test in tests:
        if test["cmd"][-1].startswith("["):
            parts.setdefault(tuple(test["cmd"][:-1]), []).append("~" + test["cmd"][-1])
    return [test | {"cmd": test["cmd"] + ["".join(parts[tuple(test["cmd"])])]} if tuple(test["cmd"]) in parts else test for test in tests]


def chosen(options):
    """The tests that are named, else those of the run, in the order in which they begin. Ends with 2 where there is none of a name."""
    tests = introspect("--tests", options.folder)
    known = list(dict.fromkeys(name_of(test) for test in tests))
    for name in options.names:
        if name not in known:
            print(f"suites: there is no suite '{name}'; there are: {', '.join(known)}", file=sys.stderr)
            sys.exit(2)
    if options.names:
        tests = [test for test in tests if name_of(test) in options.names]
    else:
        tests = [test for test in tests if options.shares.takes(test)]
    if options.filter:
        tests = [test for test in tests if kind_of(test) == "catch"]
    if not options.names:
        tests = without_shares(tests)
    tests.sort(key=options.shares.place)
    for test in tests:
        test["workdir"] = test["workdir"] or str(pathlib.Path(options.folder).absolute())
    return tests


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a configured build folder")
    parser.add_argument("names", nargs="*", help="only these suites")
    parser.add_argument("--run", choices=["quick", "gate", "asan", "tsan", "soak", "whole"], default="quick",
                        help="a column of tests/shares.txt, or all trials of all suites [quick]")
    parser.add_argument("--list", action="store_true", help="print the names of the suites")
    parser.add_argument("--targets", action="store_true", help="print the ninja targets that the suites need")
    parser.add_argument("--patience", type=float, help="multiplies every timeout [1; 5 of asan, 10 of tsan]")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)) + 2,
                        help="suites at a time [two more than there are processors: some sleep]")
    options = parser.parse_intermixed_args()
    options.shares, options.seed = Shares(options.run), base_seed()
    options.patience, options.filter = options.patience or PATIENCE.get(options.run, 1), FILTER.get(options.run)

    if options.list:
        tests, quick = introspect("--tests", options.folder), Shares("quick")
        print("\n".join(dict.fromkeys(name_of(test) + ("" if quick.cell(test) != "-" else " (long)") for test in tests)))
        return 0
    tests = chosen(options)
    folder = pathlib.Path(options.folder).absolute()
    if options.targets:
        needed = {target for test in tests for target in test["depends"]}
        files = [file for target in introspect("--targets", options.folder) if target["id"] in needed
                 for file in target["filename"]]
        print(" ".join(os.path.relpath(file, folder) for file in files))
        return 0

    print(f"Seeds from {options.seed} (SEED_BASE={options.seed} has them again)", flush=True)
    reports = folder / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)

    def once(test):
        outcome = run(test, options, reports)
        show(outcome)
        return outcome

    outcomes = run_all(tests, options.jobs, once)
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(outcome.failed for outcome in outcomes)
    skips = [(outcome.name, case, reason) for outcome in outcomes for case, reason in outcome.skips]
    print(f"{passed} passed, {failed} failed")
    if skips:
        print(f"{len(skips)} skipped:")
        for suite, case, reason in skips:
            print(f"  {suite}: {case}: {reason}")
    return 0 if failed == 0 and (passed > 0 or time.time() > UNTIL) else 1


if __name__ == "__main__":
    sys.exit(main())
