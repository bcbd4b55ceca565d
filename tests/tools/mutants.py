"""Do the tests notice a fault? A fixed list of small faults, each put into a copy of the tree and run against the tests
nearest to it: ``python tests/tools/mutants.py [--only N ...]``. Exit 1 if fewer than 90 of 100 faults are noticed, if
one survives that is not expected to, or if a replaced text is no longer found exactly once. Outcomes are kept in
``build/mutants.jsonl``: a fault is tried again only if its file or its tests have changed. ``reliability.py mutants``
makes the table of the page.

A fault is a text of a file and its replacement; with a third text, it is expected to survive for that reason. Kernels
are not compiled (``NUMBA_DISABLE_JIT``): the tests are small, and compiling would take longer. A run of all takes about
ten minutes of processor time.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from simdev.files import markdown_table

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "mutants.jsonl"
SHELVES = ("baselines", "workloads")
NEEDED = 90  # per cent that must be noticed
PATIENCE = 300  # seconds; a fault may make a loop endless
ENGINE = "tests/sim/test_rules.py tests/sim/test_plain_engines.py"
PIPELINE = "tests/sim/test_pipeline.py tests/sim/test_plain_engines.py"
VALIDATOR = "tests/sim/test_validate.py"
LEVELS = "tests/analysis/test_levels.py"
STEADY = "tests/analysis/test_levels.py"
COLLECTIVES = "tests/parallel/test_collectives.py"


def some(file, *tests):
    """Some tests of a file, for the command line of pytest."""
    return " ".join(f"{file}::test_{test}" for test in tests)


MOVES = some(
    "tests/sim/test_simulator.py",
    "a_reader_waits_for_a_parameter_that_moves_to_its_device",
    "walks_on_random_problems",
    "walks_that_need_late_channels_and_early_sends",
)
LATE = some(
    "tests/baselines/test_late_acceptance.py",
    "a_move_is_kept_if_it_is_no_worse_than_now_or_than_some_moves_ago",
    "no_cost_of_the_history_is_less_than_the_best",
    "placements_that_do_not_fit_are_left_by_the_bytes_that_they_lack",
    "the_compiled_loop_finds_what_evaluations_one_by_one_find[2-priority]",
    "the_compiled_loop_finds_what_evaluations_one_by_one_find[7-fifo]",
    "what_is_tried_is_what_is_accepted_between_two_moves",
)
SCHEDULES = "tests/parallel/test_schedules.py"
ORDERS = some(
    SCHEDULES,
    "1f1b_by_hand",
    "gpipe_does_all_forward_work_first",
    "schedules_with_several_stages_run_to_the_end",
    "split_schedules_compute_both_halves_of_each_backward_pass_once",
    "a_v_shaped_schedule_turns_at_the_last_rank",
    "ranks_that_wait_for_each_other_are_named",
    "bad_schedules_are_refused",
)
MESH = some(
    SCHEDULES,
    "a_mesh_is_parsed_and_counted",
    "bad_meshes_are_refused",
    "the_lines_of_an_axis_are_its_communicators",
    "a_communicator_names_its_axes",
    "ranks_of_expert_parallelism_hold_different_tokens",
)
COSTS = "tests/parallel/test_program_costs.py"
OVERLAP = some(
    COSTS,
    "a_kernel_beside_a_collective_loses_time_until_the_collective_ends",
    "a_kernel_all_of_which_is_beside_a_collective_takes_the_factor",
    "times_beside_collectives_are_counted_once_and_pauses_between_them_not_at_all",
    "without_a_slowdown_nothing_changes_and_bad_factors_are_refused",
)
ADAPTERS = "tests/parallel/test_collectives.py"
ALLOCATOR = some(
    COSTS,
    "a_segment_has_the_size_that_the_request_asks_for",
    "small_requests_share_a_segment_and_a_released_block_serves_again",
    "the_rest_of_a_block_serves_if_it_is_larger_than_one_mib",
    "released_neighbours_are_merged",
    "a_block_serves_its_own_stream_alone",
    "the_smallest_block_that_fits_is_taken",
    "totals_return_to_nothing_and_reserved_memory_stays",
    "a_rest_of_one_mebibyte_stays_with_its_block",
    "segments_are_given_back_only_if_the_limit_would_be_exceeded",
    "a_segment_of_which_a_part_is_held_is_not_given_back",
)

MUTANTS = {
    ("simdev/sim/kernels/fifo.py", ENGINE): [
        ("if slot_free[other] < slot_free[slot]:", "if slot_free[other] > slot_free[slot]:"),
        ("start = max(ready_ns, slot_free[slot])", "start = ready_ns"),
        ("if (ready >> shift) < (next_send >> shift):", "if (ready >> shift) <= (next_send >> shift):"),
        ("start = max(ready >> shift, free[source])", "start = free[source]"),
        ("if away != 0 and not inputs.alone[source]:", "if away != 0 and inputs.alone[source]:"),
        ("step = max(step, now)  # R6", "step = now"),
    ],
    ("simdev/sim/kernels/queue.py", ENGINE): [
        ("was = max(was, arrival[devices[consumer]]", "was = min(was, arrival[devices[consumer]]"),
        ("if (was & inputs.mask) == 0:", "if (was & inputs.mask) <= 1:"),
        ("while place > front and keys[place - ONE] > key:", "while place > front and keys[place - ONE] < key:"),
    ],
    ("simdev/sim/kernels/send.py", ENGINE): [
        ("start = max(start, channel_end[inputs.route[hop]])", "start = channel_end[inputs.route[hop]]"),
        ("if finish > workspace.sent_until[tensor]:", "if finish < workspace.sent_until[tensor]:"),
        ("targets &= ~(ONE << (source & IN_WORD))", "targets &= ~NONE"),
        (
            "elsewhere |= devices[inputs.consumers[edge]] ^ source",
            "elsewhere = devices[inputs.consumers[edge]] ^ source",
        ),
        ("channel_end[inputs.route[hop]] = finish", "channel_end[inputs.route[hop]] = finish + 1"),
        (
            "if insert(workspace.sends, front, stop, key) == front:",
            "if insert(workspace.sends, front, stop, key) != front:",
        ),
    ],
    ("simdev/sim/kernels/memory.py", ENGINE): [
        ("if op_finish[op] > until:", "if op_finish[op] < until:"),
        ("if op_finish[op] > now:", "if op_finish[op] >= now:"),
        ("x_finish[freeing[free]] <= now:", "x_finish[freeing[free]] < now:"),
        ("if now != previous:", "if True:"),
        ("= -2 if used > capacity else -1, 0", "= -2 if used >= capacity else -1, 0"),
        ("if over_time[device] == -1 and used > capacity:", "if over_time[device] == -1 and used >= capacity:"),
        ("freed_late[tensor] = sent_until[tensor] > until", "freed_late[tensor] = sent_until[tensor] >= until"),
        (
            "workspace.level[devices[op]] += inputs.persistent_size[grain, op]",
            "workspace.level[devices[op]] = inputs.persistent_size[grain, op]",
        ),
    ],
    ("simdev/sim/kernels/priority.py", ENGINE): [
        ("if n_ready[source] > 0 else NEVER", "if n_ready[source] > 1 else NEVER"),
        ("(max(ready >> shift, free[device]) << shift) | device", "((ready >> shift) << shift) | device"),
    ],
    ("simdev/sim/fast.py", ENGINE): [('side="right")])', 'side="left")])')],
    ("simdev/sim/inputs.py", ENGINE): [
        ("shared[source[(first != last)[route]]] = True", "shared[source[(first == last)[route]]] = True"),
        ("return -(-size[None, :] // granularities[:, None])", "return (size[None, :] // granularities[:, None])"),
    ],
    ("simdev/sim/validate.py", VALIDATOR): [
        ("s.transfer_start[after] < s.transfer_finish[before]", "s.transfer_start[after] < s.transfer_start[before]"),
        (
            "held_up[after] |= s.transfer_start[after] == s.transfer_finish[before]",
            "held_up[after] |= s.transfer_start[after] >= s.transfer_finish[before]",
        ),
        ('self.fail_where("R1", s.op_start < 0,', 'self.fail_where("R1", s.op_start < -1,'),
        ("if np.any(np.diff(made) <= 0):", "if np.any(np.diff(made) < 0):"),
        ("s.transfer_source != self.device[owner], owner", "s.transfer_source < 0, owner"),
        ("wrong = empty & (s.transfer_finish != np", "wrong = empty & (s.transfer_finish < np"),
        ("if left[flow] - rate * (then - now - 1) <= 0:", "if False:"),
        ("if (left[flow] <= 0) != (s.transfer_finish[flow] == then):", "if False:"),
        ("s.op_start < earliest, ops", "s.op_start < self.ready, ops"),
        ("s.op_start > earliest, ops", "s.op_start > earliest + 9, ops"),
        ("instants[busy > self.topology.slots[device]]", "instants[busy > self.topology.slots[device] + 1]"),
        ("> idle_before(since)", "> idle_before(since) + 5"),
        ("if s.step_ns != last:", "if s.step_ns < last:"),
        ("if s.comm_bytes != sent:", "if s.comm_bytes < sent:"),
        ("if found[0] != peak:", "if found[0] < peak:"),
        ("if found[1] != max(0, peak - capacity):", "if found[1] > max(0, peak - capacity):"),
        ("if self.schedule.overflow_op[device] != culprit:", "if self.schedule.overflow_op[device] < culprit:"),
    ],
    ("simdev/sim/unroll.py", PIPELINE): [
        ("3 * np.asarray(microbatch) + 1 + after", "3 * np.asarray(microbatch) + 1"),
        ('(ops["microbatch"] < self.width[real])', '(ops["microbatch"] <= 0)'),
        (
            'size = -(-graph.tensor_bytes[data] // tensors["parts"])',
            'size = (graph.tensor_bytes[data] // tensors["parts"])',
        ),
        ("lag = -(-int(devices) // width) * width", "lag = int(devices) // width * width"),
        ("np.minimum(least, whole) + -(-np.maximum", "least + -(-np.maximum"),
        ("np.where(self.copies[op], self.member", "np.where(self.width[op] > 1, self.member"),
        ("(self.stage == device)", "(self.home == device)"),
        ('"1f1b": (2, 1, 3)}', '"1f1b": (1, 2, 3)}'),
        ("np.lexsort((op, microbatch, turn))", "np.lexsort((microbatch, op, turn))"),
        ("every % self.width[made[given]]", "0 * every"),
        ("m = np.arange(width, self.count)", "m = np.arange(width + 1, self.count)"),
        ("last = max(self.graph.n_tensors, self.member.shape[1])", "last = self.graph.n_tensors"),
        ("(added, split[index]), (split, total)]", "(added, split[index])]"),
        (
            "np.flatnonzero(placement.replica_of == device)[:microbatches]",
            "np.flatnonzero(placement.replica_of == device)",
        ),
    ],
    ("simdev/problem/graph.py", PIPELINE): [
        ("(held & changed & ~updated)[self.unit_of_op]", "(held & changed)[self.unit_of_op]"),
        ("(held & changed & ~updated)[self.unit_of_op]", "(changed & ~updated)[self.unit_of_op]"),
        ("(held & changed & ~updated)[self.unit_of_op]", "(held & ~updated)[self.unit_of_op]"),
    ],
    ("simdev/sim/pipeline.py", PIPELINE): [
        ("half = count - 1 - count // 2", "half = count // 2"),
        ("length = half // period * period or half", "length = half"),
        ("steady_ns=max(apart, load) + exchange_ns", "steady_ns=apart + exchange_ns"),
        ('per.sum() if order == "gpipe"', 'per.max() if order == "gpipe"'),
        ("if len(backward) else np.ones", "if len(backward) < 0 else np.ones"),
        ("].sum(axis=1) / len(team)", "].sum(axis=1)"),
        ("load[first] += durations[first, mine & ~shared].sum()", "pass"),
        ("if count < 3:", "if count < 2:"),
    ],
    ("simdev/sim/kernels/window.py", MOVES): [
        ("there.ready >= at_base and max(here.ready, now) == there.ready + window.shift", "there.ready >= at_base"),
        ("here.finish == there.finish + window.shift", "here.finish >= 0"),
        ("move.total += shift", "move.total = shift"),
        ("if max(at.ready - shift, at_base) != max(ready, at_base):", "if False:"),
        ("if bound >= below:", "if bound >= 0:"),
    ],
    ("simdev/sim/kernels/incremental.py", MOVES): [
        ("first = min(first, next_reader(base, work))", "first = min(first, len(before))"),
        ("if base_ends[channel] != ends[channel]:", "if False:"),
    ],
    ("baselines/_late_kernels.py", LATE): [
        ("(cost <= state[COST] or cost <= history[place])", "cost <= state[COST]"),
        ("most = max(late.state[COST]", "most = min(late.state[COST]"),
        ("return ALWAYS if most >= UNFIT else most + 1", "return ALWAYS if most >= UNFIT else most"),
        ("cost = UNFIT + overflow if overflow > 0 else step_ns", "cost = step_ns"),
        ("history[place] = min(history[place], state[COST])", "history[place] = state[COST]"),
        ("if cost < state[BEST]:", "if cost <= state[COST]:"),
        ("order[new], rank[op] = op, new", "order[new] = op"),
        (
            "if home == away or not moves.allowed[away, pivot]:",
            "if home == away:",
            "is_valid() refuses a device without a kernel, too; the draw only ends sooner",
        ),
        ("late.tried_devices[windows.ops[index]] = windows.targets[index]", "pass"),
        (
            "if judge(inputs, moves, late, run):\n            rebase(late, run, windows)",
            "judge(inputs, moves, late, run)",
        ),
    ],
    ("simdev/sim/kernels/base_run.py", MOVES): [
        ("channel_end, row * EVERY, number)", "channel_end, number, number)"),
        ("if latest < inputs.rest_ns[number + 1]:", "if True:"),
    ],
    ("simdev/sim/kernels/prologue.py", MOVES): [
        (
            "far = max(far, early_arrival(base, work, inputs.edge[slot]))",
            "far = early_arrival(base, work, inputs.edge[slot])",
        ),
    ],
    ("simdev/analysis/levels.py", LEVELS): [
        ("if level[consumer] + delay[tensor] > longest:", "if level[consumer] > longest:"),
        ("// np.maximum(supported.sum(axis=0), 1)", "// len(durations)"),
        ("level[source] + length[source] + delay[tensor])", "level[source] + length[source])"),
        ("(op_next < 0 or consumer < op_next)", "(op_next < 0 or consumer > op_next)"),
        ("np.where(durations > 0, durations, np.iinfo(np.int64).max).min(axis=0)", "durations.max(axis=0)"),
        ("counts[classes >= 0], classes[classes >= 0]", "counts[classes > 0], classes[classes > 0]"),
    ],
    ("simdev/analysis/steady.py", STEADY): [("free.dual_value(*prices, whole=False)", "free.dual_value(*prices)")],
    ("simdev/analysis/load.py", STEADY): [("if whole else total // scale)", "if whole else -(-total // scale))")],
    ("simdev/parallel/orders.py", ORDERS): [
        ("min(microbatches, ranks - rank)", "min(microbatches, ranks)"),
        ("if early + m < microbatches:", "if early + m <= microbatches:"),
        ("return ranks - 1 - place if", "return ranks - place if"),
    ],
    ("simdev/parallel/costs/collectives.py", COLLECTIVES): [
        ("rings = int(in_node.min())", "rings = int(in_node.max())"),
        ("PASSES[kind] * (len(node) - 1)", "PASSES[kind] * len(node)"),
        ("hops = 2 * math.log2(len(node))", "hops = math.log2(len(node))"),
        ("2 * (in_node.max() - 1) * STEP_NS", "2 * (in_node.min() - 1) * STEP_NS"),
        ("rate = min(adapter * rings, near)", "rate = adapter * rings"),
        ("return max(1, round(min(ring, tree)))", "return max(1, round(ring))"),
    ],
    ("simdev/parallel/mesh.py", MESH): [
        ('return self.ranks // self["pp"]', "return self.ranks"),
        ('self["dp_replicate"] * self["dp_shard"] * self["ep"]', 'self["dp_replicate"] * self["dp_shard"]'),
        ("range(-len(along), 0)", "range(len(along))"),
    ],
    ("simdev/parallel/costs/_kernel.py", ALLOCATOR): [
        ("GRANULE if small else SMALL + 1", "GRANULE if small else SMALL"),
        ("LARGE_SEGMENT if size < MEDIUM", "LARGE_SEGMENT if size <= MEDIUM"),
        ("state.totals[RESERVED] + whole > limit", "state.totals[RESERVED] + whole >= limit"),
        ("if state.before[block] < 0 and state.after[block] < 0:", "if state.before[block] < 0:"),
    ],
    ("simdev/planners/_kernel.py", "tests/planners/test_parts.py"): [
        ("if stream[n] == 0 or start else 0", "if stream[n] == 0 else 0"),
        ("start = max(start, finish[wait_for[p]])", "start = finish[wait_for[p]]"),
        ("live[rank[n]] + most[name[n], stage[n]]", "live[rank[n]]"),
        ("live[rank[n]] += left[name[n], stage[n]]", "live[rank[n]] = left[name[n], stage[n]]"),
    ],
    ("simdev/parallel/costs/overlap.py", OVERLAP): [
        ("overlap * (1 - 1 / factor)", "overlap * (1 / factor)"),
        ("begin[1:] > end[:-1]", "begin[1:] < end[:-1]"),
    ],
    ("simdev/parallel/costs/overlap.py", ADAPTERS): [
        ("(rank == first) & (receiver < 0)", "rank == first"),
        ("np.maximum(longer[ops], np.rint(ns)", "np.minimum(longer[ops], np.rint(ns)"),
        ("np.isin(unrolled.rank[used], unrolled.first)", "np.isin(unrolled.rank[used], unrolled.first + 1)"),
    ],
    ("simdev/parallel/costs/_adapter_kernel.py", ADAPTERS): [
        ("wanted = max(1.0, wanted)", "wanted = 1.0"),
        ("(upcoming - now) / wanted", "upcoming - now"),
        ("begun[q], left[q] = upcoming,", "begun[q], left[q] = float(start[running[q]]),"),
        ("waiting[q] = following[running[q]]", "waiting[q] = -1"),
    ],
    ("simdev/bench/score.py", "tests/bench/test_score.py"): [
        ("- 1) // 2]", "- 1) // 1]"),
        (".fillna(CAP).clip(upper=CAP)", ".fillna(CAP)"),
        ('.rank(method="min")', '.rank(method="max")'),
        ('np.exp(found["log_ratio"])', 'found["log_ratio"]'),
    ],
}


def scratch_copy(folder):
    """A copy of the tree in which the shelves lie where they are installed."""
    leave = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("simdev", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=leave)
    for name in SHELVES:
        shutil.copytree(ROOT / name, folder / "simdev" / name, ignore=leave)
    shutil.copy(ROOT / "pyproject.toml", folder)


def passes(folder, tests):
    """Whether the tests pass in the copy of the tree."""
    environment = os.environ | {"PYTHONPATH": str(folder), "NUMBA_DISABLE_JIT": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    try:
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return False
    if run.returncode not in (0, 1, 2):  # 2: an import of the mutant fails
        raise SystemExit(f"{tests}: pytest ended with {run.returncode}\n{run.stdout.decode()[-2000:]}")
    return run.returncode == 0


def listed():
    """``(file, tests, old, new, reason)`` of each mutant; the reason is empty if it must be noticed."""
    for (file, tests), mutants in MUTANTS.items():
        for old, new, *reason in mutants:
            yield file, tests, old, new, "".join(reason)


def digest(file, tests, old, new):
    """Of a mutant, its file and its tests: while it stays, so does the outcome."""
    names = [file, *sorted({test.partition("::")[0] for test in tests.split()})]
    content = b"".join((ROOT / name).read_bytes() for name in names)
    return hashlib.sha256(content + "\n".join([file, tests, old, new]).encode()).hexdigest()[:16]


def outcomes(chosen=None, kept=KEPT):
    """``(number, file, old, new, reason, outcome)`` of each mutant; the outcome is ``noticed``, ``SURVIVES`` or
    ``not found``. What is known from an earlier run is not tried again."""
    known = {}
    if kept.is_file():
        known = {line["digest"]: line["outcome"] for line in map(json.loads, kept.read_text().splitlines())}
    kept.parent.mkdir(exist_ok=True)
    healthy = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        scratch_copy(folder)
        for n, (file, tests, old, new, reason) in enumerate(listed(), 1):
            if chosen and n not in chosen:
                continue
            name, shelf = digest(file, tests, old, new), "simdev" if file.startswith(SHELVES) else ""
            path = folder / shelf / file
            whole = path.read_text(encoding="utf-8")
            if whole.count(old) != 1:
                yield n, file, old, new, reason, "not found"
                continue
            if name not in known:
                if tests not in healthy:
                    healthy[tests] = passes(folder, tests)
                if not healthy[tests]:
                    raise SystemExit(f"{tests}: fails without a mutant")
                path.write_text(whole.replace(old, new), encoding="utf-8")
                known[name] = "SURVIVES" if passes(folder, tests) else "noticed"
                path.write_text(whole, encoding="utf-8")
                with kept.open("a", encoding="utf-8") as out:
                    print(json.dumps({"digest": name, "outcome": known[name]}), file=out)
            yield n, file, old, new, reason, known[name]


def table():
    """Markdown: how many faults of each folder were noticed, and those that were not, with the reason."""
    found = list(outcomes())
    rooms = {}
    for _, file, _, _, _, outcome in found:
        rooms.setdefault(file.rpartition("/")[0], []).append(outcome == "noticed")
    rows = [[f"`{room}`", str(len(noticed)), str(sum(noticed))] for room, noticed in rooms.items()]
    rows.append(["all", str(len(found)), str(sum(outcome == "noticed" for *_, outcome in found))])
    lost = [
        [str(n), f"`{file}`", f"`{old}`", f"`{new}`".replace("|", "\\|"), reason]
        for n, file, old, new, reason, outcome in found
        if outcome != "noticed"
    ]
    head = ["fault", "file", "text", "replaced by", "why no test notices it"]
    return [*markdown_table(["code", "faults", "noticed"], rows), *(["", *markdown_table(head, lost)] if lost else [])]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of mutants, from 1 on")
    chosen = parser.parse_args().only
    bad = noticed = count = 0
    for n, file, old, new, reason, outcome in outcomes(chosen):
        count += 1
        noticed += outcome == "noticed"
        bad += outcome == "not found" or (outcome == "SURVIVES" and not reason)
        print(f"{n:4}  {outcome}  {file}: {old} -> {new}  {reason}", flush=True)
    print(f"{noticed} of {count} noticed")
    return 1 if bad or noticed * 100 < NEEDED * count else 0


if __name__ == "__main__":
    sys.exit(main())
