"""Figures from what programs print: of a training run, of its timeline, of a dry run's prediction, and of kernels beside the share
that they are to reach."""
import json
import re


def json_lines(text):
    """The objects of a program's lines; the last one is cut short where the program was ended."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]


def step_figures(lines, skipped=10):
    """Medians over the steps after the first ones."""
    def median(field):
        values = sorted(line[field] for line in lines[skipped:] if line[field] is not None)
        return values[len(values) // 2] if values else None
    return dict(tokens_per_second=median("tokens_per_second"), mfu=median("mfu"), host_ms=median("host_ms"),
                exposed_comm_ms=median("exposed_comm_ms"), peak_gib=median("memory_peak_bytes") / 2**30,
                reserved_gib=median("memory_reserved_bytes") / 2**30)


def predicted_figures(text):
    """What `tessera-train --dry-run --machine` predicts for a step of the first rank."""
    found = re.search(r"^  step ([\d,.]+) ms, .*, MFU ([\d.]+) % .*\n  exposed communication ([\d,.]+) ms,", text, re.M)
    step, mfu, exposed = found.groups()
    return dict(predicted_step_ms=float(step.replace(",", "")), predicted_mfu=float(mfu) / 100,
                predicted_exposed_comm_ms=float(exposed.replace(",", "")))


def chosen_loss(text):
    """The order of head and loss that a run says it takes: what is predicted takes the same."""
    found = re.search(r"^chosen training\.loss=(\w+)", text, re.M)
    return found.group(1) if found else "lean"


def beside_prediction(line):
    """How a line of the bench shows what the device table predicts for it; nothing where the table has no such GPU."""
    predicted = line.get("predicted_seconds")
    return f"  {100 * line['seconds'] / predicted:4.0f} % of the time predicted" if predicted else ""


def compute_lane(events):
    """Process and thread of the first rank's compute stream in a timeline."""
    return next((e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == "compute")


def idle_figures(events):
    """Where the first rank's compute stream did nothing from step 3 on, as a share of the time, and the longest such gap. Its
    lane also shows waits, which are no work. An upper bound: a timer lies on either side of each operation."""
    rank, lane = compute_lane(events)
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
    begin = next(e["ts"] for e in slices if e["name"] == "step 3")
    work = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices
                  if e["tid"] == lane and e["ts"] >= begin and not e["name"].startswith("wait for "))
    gaps, reached = [], work[0][0]
    for start, end in work:
        gaps.append(max(0.0, start - reached))
        reached = max(reached, end)
    return dict(idle_share=sum(gaps) / (reached - work[0][0]), longest_gap_us=max(gaps))


def operation_times(events):
    """{operation: milliseconds a step on the first rank's compute stream}, from step 3 on, the most expensive first."""
    rank, lane = compute_lane(events)
    begins = [e["ts"] for e in events if e["ph"] == "X" and e["pid"] == rank and re.fullmatch(r"step \d+", e["name"])][2:]
    totals = {}
    for e in events:
        if e["ph"] == "X" and e["pid"] == rank and e["tid"] == lane and e["ts"] >= begins[0]:
            totals[e["name"]] = totals.get(e["name"], 0) + e["dur"] / 1e3 / len(begins)
    return dict(sorted(totals.items(), key=lambda row: -row[1]))


def expected_shares(table):
    """{kernel of the bench: (share of the copy bandwidth, why)} of kernels/cuda/shares.txt."""
    rows = (line.split("|") for line in table.read_text().splitlines() if line.strip() and not line.startswith("#"))
    return {row[0].strip(): (float(row[5]) / 100, row[6].strip()) for row in rows}


def below_expected(lines, shares, mark):
    """Sorts kernels below the mark: (failures, misses by construction). Only who is below its own expectation fails."""
    failures, misses = [], []
    for line in lines:
        share = line.get("share_of_copy", 1)
        expected, why = shares.get(line.get("kernel"), (mark, ""))
        if share < min(expected, mark):
            failures.append(f"{line['kernel']} {100 * share:.0f} %, {100 * min(expected, mark):.0f} % expected")
        elif share < mark:
            misses.append(f"{line['kernel']} {100 * share:.0f} %, {100 * expected:.0f} % expected: {why}")
    return failures, misses
