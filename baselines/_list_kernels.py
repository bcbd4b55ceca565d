"""Compiled loops of the list schedulers. Import through ``_list.kernels()``: this module loads Numba."""

from __future__ import annotations

import numpy as np
from numba import njit

from simdev.sim.kernels.heap import pop, push

NEVER = np.int64(1) << 62


@njit(cache=True)
def arrival(table, state, channel, op, device):
    """The time when the last input of ``op`` can be on ``device``; NEVER if a lazy source may not be placed there.

    ``channel`` int64 (D,) is the time when each device's only channel, for sending and receiving, becomes free; if it
    is empty, transfers do not contend.
    """
    latest = np.int64(0)
    contended = len(channel) > 0
    line = channel[device] if contended else np.int64(0)
    for at in range(table.input_ptr[op], table.input_ptr[op + 1]):
        tensor = table.inputs[at]
        source = table.producer[tensor]
        home = state.unit_device[table.unit[source]]
        if home < 0:
            if not table.allowed[device, table.unit[source]]:
                return NEVER
            continue
        if home == device:
            there = state.finish[source]
        elif state.arrived[device, tensor] >= 0:
            there = state.arrived[device, tensor]
        else:
            begin = state.finish[source]
            if contended:
                begin = max(begin, line, channel[home])
            there = begin + table.transfer_ns[table.pair_class[home, device], tensor]
            line = there
        latest = max(latest, there)
    return latest


@njit(cache=True)
def need_bytes(table, state, op, device):
    """The bytes that placing ``op`` on ``device`` would take on it."""
    total = table.workspace[op]
    if state.unit_device[table.unit[op]] < 0:
        total += table.unit_bytes[table.unit[op]]
    for tensor in range(table.output_ptr[op], table.output_ptr[op + 1]):
        total += table.home_size[tensor]
    last = table.unit[op]
    for at in range(table.input_ptr[op], table.input_ptr[op + 1]):
        tensor = table.inputs[at]
        unit = table.unit[table.producer[tensor]]
        home = state.unit_device[unit]
        if home < 0:
            total += table.home_size[tensor]
            if unit != last:
                total += table.unit_bytes[unit]
                last = unit
        elif home != device and state.arrived[device, tensor] < 0:
            total += table.size[tensor]
    return total


@njit(cache=True)
def settle(table, state, op, device):
    """Assign the unit of ``op`` to ``device`` and take its persistent bytes."""
    unit = table.unit[op]
    if state.unit_device[unit] < 0:
        state.unit_device[unit] = device
        state.used[device] += table.unit_bytes[unit]


@njit(cache=True)
def commit(table, state, channel, op, device, start):
    """Place ``op`` on ``device`` with start time ``start``: make transfers, copies and outputs, and free dead
    tensors."""
    contended = len(channel) > 0
    settle(table, state, op, device)
    state.start[op] = start
    state.finish[op] = start + table.op_ns[device, op]
    for tensor in range(table.output_ptr[op], table.output_ptr[op + 1]):
        if state.unread[tensor] > 0 or table.keep[tensor]:
            state.used[device] += table.home_size[tensor]
    for at in range(table.input_ptr[op], table.input_ptr[op + 1]):
        tensor = table.inputs[at]
        source = table.producer[tensor]
        if state.finish[source] < 0:  # lazy, and this is its first reader
            settle(table, state, np.int64(source), device)
            home = state.unit_device[table.unit[source]]
            state.start[source], state.finish[source] = 0, table.op_ns[home, source]
            for output in range(table.output_ptr[source], table.output_ptr[source + 1]):
                state.used[home] += table.home_size[output]
        home = state.unit_device[table.unit[source]]
        if home != device and state.arrived[device, tensor] < 0:
            begin = state.finish[source]
            if contended:
                begin = max(begin, channel[home], channel[device])
            end = begin + table.transfer_ns[table.pair_class[home, device], tensor]
            if contended:
                channel[home] = end
                channel[device] = end
            state.arrived[device, tensor] = end
            state.used[device] += table.size[tensor]
        state.unread[tensor] -= 1
        if state.unread[tensor] == 0 and not table.keep[tensor]:
            state.used[home] -= table.home_size[tensor]
            for other in range(len(state.used)):
                if state.arrived[other, tensor] >= 0:
                    state.used[other] -= table.size[tensor]


@njit(cache=True)
def most_headroom(table, state, op):
    """The allowed device with the most free memory, for an op that fits nowhere; an op stays with its unit."""
    unit = table.unit[op]
    if state.unit_device[unit] >= 0:
        return np.int64(state.unit_device[unit])
    best, most = np.int64(-1), np.int64(0)
    for device in range(len(state.used)):
        if not table.allowed[device, unit] or arrival(table, state, state.used[:0], op, device) == NEVER:
            continue
        left = state.headroom[device] - state.used[device]
        if best < 0 or left > most:
            best, most = np.int64(device), left
    if best < 0:  # no allowed device may take this op's lazy sources too: they stay apart
        for device in range(len(state.used)):
            if table.allowed[device, unit]:
                return np.int64(device)
    return best


@njit(cache=True)
def earliest_start_first(table, state, rank_order, favourite):
    """m-ETF: repeatedly place the pair of ready op and device with the earliest start that fits in memory.

    ``rank_order`` int64 (n,): position of each op in the order that breaks ties (lowest first). Each device has one
    channel. ``favourite`` int64 (n,): each op's favourite child, or -1 throughout for m-ETF. While the favourite child
    of a device's last op is ready and could not start earlier elsewhere, the device waits for it; before the child
    starts, the device runs only urgent ops, whose inputs would be on every device by then (Baechi's rule, after Hanen
    and Munier 1995).
    """
    n, devices = len(table.unit), len(state.used)
    op_of_rank = np.empty(n, np.int64)
    for op in range(n):
        op_of_rank[rank_order[op]] = op
    channel, free = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    # Per device two heaps: ready ops whose inputs are still on their way (by arrival), and those that could start now.
    wait_key, wait_rank = np.empty(devices * n, np.int64), np.empty(devices * n, np.int64)
    now_key, now_rank = np.empty(devices * n, np.int64), np.empty(devices * n, np.int64)
    waits, nows = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    options = np.zeros(n, np.int64)  # number of devices that a ready op may still go to
    missing = np.zeros(n, np.int64)
    child = np.full(devices, -1, np.int64)
    homeless = np.empty(n, np.int64)  # ready ops that fit nowhere
    n_homeless = 0
    placed, goal = 0, 0
    fresh = np.empty(n, np.int64)  # ready ops not yet in the heaps
    n_fresh = 0
    for op in range(n):
        if not table.scope[op]:
            continue
        goal += 1
        for at in range(table.input_ptr[op], table.input_ptr[op + 1]):
            if not table.lazy[table.producer[table.inputs[at]]]:
                missing[op] += 1
        if missing[op] == 0:
            fresh[n_fresh] = op
            n_fresh += 1
    while placed < goal:
        for position in range(n_fresh):
            op = fresh[position]
            fixed = state.unit_device[table.unit[op]]
            for device in range(devices):
                if table.allowed[device, table.unit[op]] and (fixed < 0 or fixed == device):
                    when = arrival(table, state, channel, op, device)
                    if when < NEVER:
                        options[op] += 1
                        waits[device] = push(wait_key, wait_rank, device * n, waits[device], when, rank_order[op])
            if options[op] == 0:
                homeless[n_homeless] = op
                n_homeless += 1
        n_fresh = 0
        best_device, best_start, best_rank, best_op = -1, NEVER, np.int64(0), np.int64(-1)
        for device in range(devices):
            base = device * n
            start, rank = NEVER, np.int64(0)
            while True:
                # Drop ops that are placed or refused, move ops whose inputs arrived, update ops that contention delays.
                while waits[device] > 0 and wait_key[base] <= free[device]:
                    moved = wait_rank[base]
                    waits[device] = pop(wait_key, wait_rank, base, waits[device])
                    if state.finish[op_of_rank[moved]] < 0:
                        nows[device] = push(now_key, now_rank, base, nows[device], moved, moved)
                now = nows[device] > 0
                if not now and waits[device] == 0:
                    break
                rank = now_rank[base] if now else wait_rank[base]
                op, known = op_of_rank[rank], free[device] if now else wait_key[base]
                fixed = state.unit_device[table.unit[op]]
                gone = state.finish[op] >= 0 or (fixed >= 0 and fixed != device)
                when = NEVER if gone else arrival(table, state, channel, op, device)
                if not gone and when <= known:
                    start = max(free[device], known)
                    break
                if now:
                    nows[device] = pop(now_key, now_rank, base, nows[device])
                else:
                    waits[device] = pop(wait_key, wait_rank, base, waits[device])
                if when < NEVER:
                    waits[device] = push(wait_key, wait_rank, base, waits[device], when, rank)
                elif state.finish[op] < 0:
                    options[op] -= 1
            if child[device] >= 0 and state.finish[child[device]] >= 0:
                child[device] = -1
            if child[device] >= 0 and options[child[device]] > 0:
                wanted = child[device]
                when = _earliest_here(table, state, channel, free, wanted, device)
                if when < NEVER and (start >= when or not _urgent(table, state, channel, op_of_rank[rank], start)):
                    start, rank = when, rank_order[wanted]
            if start < best_start or (start == best_start and start < NEVER and rank < best_rank):
                best_device, best_start, best_rank, best_op = device, start, rank, op_of_rank[rank]
        if (
            best_device >= 0
            and state.used[best_device] + need_bytes(table, state, best_op, np.int64(best_device))
            > state.headroom[best_device]
        ):
            _refuse(np.int64(best_device), best_rank, n, now_key, now_rank, nows, wait_key, wait_rank, waits)
            if child[best_device] == best_op:
                child[best_device] = -1
            options[best_op] -= 1
            if options[best_op] > 0:
                continue
            homeless[n_homeless] = best_op
            n_homeless += 1
        if n_homeless > 0:
            n_homeless -= 1
            best_op = homeless[n_homeless]
            best_device = most_headroom(table, state, best_op)
            best_start = max(free[best_device], _or_zero(arrival(table, state, channel, best_op, best_device)))
        elif best_device < 0:  # every option of some ready op went to a colocated op placed elsewhere
            for op in range(n):
                if table.scope[op] and state.finish[op] < 0 and missing[op] == 0:
                    best_op = np.int64(op)
                    break
            best_device = most_headroom(table, state, best_op)
            best_start = max(free[best_device], _or_zero(arrival(table, state, channel, best_op, best_device)))
        commit(table, state, channel, best_op, best_device, best_start)
        free[best_device] = state.finish[best_op]
        child[best_device] = favourite[best_op]
        placed += 1
        for tensor in range(table.output_ptr[best_op], table.output_ptr[best_op + 1]):
            for at in range(table.consumer_ptr[tensor], table.consumer_ptr[tensor + 1]):
                reader = table.consumers[at]
                missing[reader] -= 1
                if missing[reader] == 0 and table.scope[reader]:
                    fresh[n_fresh] = reader
                    n_fresh += 1
    return free.max()


@njit(cache=True)
def _or_zero(when):
    return np.int64(0) if when == NEVER else when


@njit(cache=True)
def _earliest_here(table, state, channel, free, op, device):
    """The start of ``op`` on ``device``, if it can start nowhere earlier; else NEVER."""
    unit, here = table.unit[op], NEVER
    fixed = state.unit_device[unit]
    if not table.allowed[device, unit] or (fixed >= 0 and fixed != device):
        return NEVER
    here = max(free[device], arrival(table, state, channel, op, device))
    for other in range(len(free)):
        if fixed < 0 and other != device and table.allowed[other, unit]:
            if max(free[other], arrival(table, state, channel, op, other)) < here:
                return NEVER
    return here


@njit(cache=True)
def _urgent(table, state, channel, op, start):
    """Whether the inputs of ``op`` can be on each of its allowed devices by ``start``."""
    for device in range(len(state.used)):
        if table.allowed[device, table.unit[op]] and arrival(table, state, channel, op, device) > start:
            return False
    return True


@njit(cache=True)
def _refuse(device, rank, n, now_key, now_rank, nows, wait_key, wait_rank, waits):
    """Remove the op with this rank from the device's heaps; unless it is a favourite child, it is first on one."""
    base = device * n
    if nows[device] > 0 and now_rank[base] == rank:
        nows[device] = pop(now_key, now_rank, base, nows[device])
    elif waits[device] > 0 and wait_rank[base] == rank:
        waits[device] = pop(wait_key, wait_rank, base, waits[device])
    else:
        _delete(device, rank, base, now_key, now_rank, nows)
        _delete(device, rank, base, wait_key, wait_rank, waits)


@njit(cache=True)
def _delete(device, rank, base, key, item, sizes):
    kept, size = 0, sizes[device]
    keys, items = key[base : base + size].copy(), item[base : base + size].copy()
    for position in range(size):
        if items[position] != rank:
            kept = push(key, item, base, kept, keys[position], items[position])
    sizes[device] = kept


@njit(cache=True)
def earliest_finish_first(table, state, order, lookahead):
    """HEFT and PEFT: place each op of ``order`` on the device where it fits and finishes earliest, gaps included.

    ``lookahead`` int64 (D, n) is added to the finish time when devices are compared (PEFT's optimistic cost table); if
    it has no rows, nothing is added. Transfers do not contend. Returns the makespan.
    """
    devices, count = len(state.used), len(order)
    no_channel = state.used[:0]
    # Idle intervals of each device, in order, from gap_start to gap_end; the last one has no end.
    gap_start, gap_end = np.zeros((devices, count + 2), np.int64), np.zeros((devices, count + 2), np.int64)
    gap_end[:, 0] = NEVER
    gaps = np.ones(devices, np.int64)
    makespan = np.int64(0)
    for op in order:
        unit = table.unit[op]
        fixed = state.unit_device[unit]
        best, best_start, best_gap, best_score = -1, np.int64(0), 0, NEVER
        for device in range(devices):
            if not table.allowed[device, unit] or (fixed >= 0 and fixed != device):
                continue
            if fixed < 0 and state.used[device] + need_bytes(table, state, op, device) > state.headroom[device]:
                continue
            when = arrival(table, state, no_channel, op, device)
            if when == NEVER:
                continue
            gap = _first_gap(gap_end[device], gaps[device], when, table.op_ns[device, op], gap_start[device])
            start = max(when, gap_start[device, gap])
            score = start + table.op_ns[device, op]
            if len(lookahead) > 0:
                score += lookahead[device, op]
            if score < best_score:
                best, best_start, best_gap, best_score = device, start, gap, score
        if best < 0:
            best = most_headroom(table, state, op)
            when = _or_zero(arrival(table, state, no_channel, op, best))
            best_gap = _first_gap(gap_end[best], gaps[best], when, table.op_ns[best, op], gap_start[best])
            best_start = max(when, gap_start[best, best_gap])
        commit(table, state, no_channel, op, best, best_start)
        makespan = max(makespan, state.finish[op])
        gaps[best] = _fill(gap_start[best], gap_end[best], gaps[best], best_gap, best_start, state.finish[op])
    return makespan


@njit(cache=True)
def cheapest_runs(ptr, source, cost, held, most, limit):
    """Kernighan's dynamic program: where to cut a sequence of ops so that the cost of edges between parts is least.

    The edges into the op at position ``j`` are ``ptr[j]`` to ``ptr[j + 1]``: ``source`` int64 (e,) positions and
    ``cost`` int64 (e,). A part has at most ``most`` ops and, unless it is one op, at most ``limit`` of ``held`` int64
    (k,). Of equally good cuts, the one with the longer last part is taken. Returns where the parts begin, and k.
    """
    count = len(held)
    best, cut = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    inward, outward = np.zeros(count, np.int64), np.zeros(count, np.int64)  # outward: to ops before the end so far
    for end in range(1, count + 1):
        for at in range(ptr[end - 1], ptr[end]):
            inward[end - 1] += cost[at]
            outward[source[at]] += cost[at]
        best[end] = NEVER
        crossing, total = np.int64(0), np.int64(0)
        for begin in range(end - 1, max(-1, end - 1 - most), -1):
            crossing += inward[begin] - outward[begin]
            total += held[begin]
            if total > limit and begin < end - 1:
                break
            if best[begin] + crossing <= best[end]:
                best[end], cut[end] = best[begin] + crossing, begin
    parts = np.empty(count + 1, np.int64)
    at, end = count, count
    parts[at] = count
    while end > 0:
        end = cut[end]
        at -= 1
        parts[at] = end
    return parts[at:]


@njit(cache=True)
def runs_earliest_start_first(table, state, order, runs):
    """Place each run of ``order`` where it starts earliest among the devices with enough memory.

    Run ``r`` is ``order[runs[r]:runs[r + 1]]``. Ops whose unit has a device already go there. A device runs one op at a
    time, in this order; transfers do not contend. Returns the makespan.
    """
    devices, no_channel = len(state.used), state.used[:0]
    free = np.zeros(devices, np.int64)
    seen_unit, seen_tensor = np.full(len(table.unit_bytes), -1, np.int64), np.full(len(table.size), -1, np.int64)
    for run in range(len(runs) - 1):
        best, best_start = np.int64(-1), NEVER
        for device in range(devices):
            start = free[device]
            for at in range(runs[run], runs[run + 1]):
                op = order[at]
                if state.unit_device[table.unit[op]] >= 0:
                    continue
                if not table.allowed[device, table.unit[op]]:
                    start = NEVER
                    break
                start = max(start, arrival(table, state, no_channel, op, device))
            if start < best_start:
                stamp = np.int64(run * devices + device)
                need = _run_bytes(table, state, order[runs[run] : runs[run + 1]], device, seen_unit, seen_tensor, stamp)
                if state.used[device] + need <= state.headroom[device]:
                    best, best_start = np.int64(device), start
        for at in range(runs[run], runs[run + 1]):
            op = order[at]
            unit = table.unit[op]
            chosen = best if state.unit_device[unit] < 0 else np.int64(state.unit_device[unit])
            if chosen < 0:
                chosen = most_headroom(table, state, op)
            start = max(free[chosen], _or_zero(arrival(table, state, no_channel, op, chosen)))
            commit(table, state, no_channel, op, chosen, start)
            free[chosen] = state.finish[op]
    return free.max()


@njit(cache=True)
def _run_bytes(table, state, ops, device, seen_unit, seen_tensor, stamp):
    """The bytes that the ops without a device would take on ``device``: what their units keep, copies of tensors from
    other devices, their outputs, and the largest workspace. ``seen`` arrays hold the stamps of what was counted."""
    total, workspace = np.int64(0), np.int64(0)
    for op in ops:
        if state.unit_device[table.unit[op]] >= 0:
            continue
        workspace = max(workspace, table.workspace[op])
        if seen_unit[table.unit[op]] != stamp:
            seen_unit[table.unit[op]] = stamp
            total += table.unit_bytes[table.unit[op]]
        for at in range(table.input_ptr[op], table.input_ptr[op + 1]):
            tensor = table.inputs[at]
            if seen_tensor[tensor] == stamp:
                continue
            seen_tensor[tensor] = stamp
            source = table.producer[tensor]
            home = state.unit_device[table.unit[source]]
            if home >= 0 and home != device and state.arrived[device, tensor] < 0:
                total += table.size[tensor]
            elif home < 0 and table.lazy[source]:
                total += table.home_size[tensor]
                if seen_unit[table.unit[source]] != stamp:
                    seen_unit[table.unit[source]] = stamp
                    total += table.unit_bytes[table.unit[source]]
        for tensor in range(table.output_ptr[op], table.output_ptr[op + 1]):
            total += table.home_size[tensor]
    return total + workspace


@njit(cache=True)
def optimistic_costs(table, transfer):
    """PEFT's optimistic cost table, int64 (D, n).

    An entry is the longest path from the end of an op on a device to the end of the graph, if each later op runs where
    its path is shortest. The transfer time ``transfer`` int64 (m,) is added where devices differ.
    """
    devices, n = len(table.op_ns), len(table.unit)
    cost = np.zeros((devices, n), np.int64)
    for op in range(n - 1, -1, -1):
        for tensor in range(table.output_ptr[op], table.output_ptr[op + 1]):
            for at in range(table.consumer_ptr[tensor], table.consumer_ptr[tensor + 1]):
                reader = table.consumers[at]
                anywhere = NEVER
                for device in range(devices):
                    if table.allowed[device, table.unit[reader]]:
                        anywhere = min(anywhere, cost[device, reader] + table.op_ns[device, reader])
                for device in range(devices):
                    least = anywhere + transfer[tensor]
                    if table.allowed[device, table.unit[reader]]:
                        least = min(least, cost[device, reader] + table.op_ns[device, reader])
                    cost[device, op] = max(cost[device, op], least)
    return cost


@njit(cache=True)
def _first_gap(gap_end, count, when, duration, gap_start):
    """The first gap that holds ``duration`` at ``when`` or later."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if gap_end[middle] < when + duration:
            low = middle + 1
        else:
            high = middle
    while max(gap_start[low], when) + duration > gap_end[low]:
        low += 1
    return low


@njit(cache=True)
def _fill(gap_start, gap_end, count, gap, start, finish):
    """Remove the interval from ``start`` to ``finish`` from a gap; return the new number of gaps."""
    before, after = start > gap_start[gap], finish < gap_end[gap]
    if before and after:
        for at in range(count, gap + 1, -1):
            gap_start[at], gap_end[at] = gap_start[at - 1], gap_end[at - 1]
        gap_start[gap + 1], gap_end[gap + 1] = finish, gap_end[gap]
        gap_end[gap] = start
        return count + 1
    if before:
        gap_end[gap] = start
    elif after:
        gap_start[gap] = finish
    else:
        for at in range(gap, count - 1):
            gap_start[at], gap_end[at] = gap_start[at + 1], gap_end[at + 1]
        return count - 1
    return count
