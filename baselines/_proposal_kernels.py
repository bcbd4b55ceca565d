"""The compiled loops of :mod:`simdev.baselines._proposals`: a look at a schedule, drawn moves with their features, and
the network that scores them. This module loads Numba.

Only ``+ - * /``, comparisons and square roots touch floating point, each sum in a fixed order, so that every processor
computes the same features and scores.
"""

from __future__ import annotations

import numpy as np
from numba import njit

BINS = 64  # of the profile of busy devices over the step
# Kinds of moves
ON_PATH, ALONG_SEND, ACROSS_CUT, SWAP, PLAIN = range(5)
URGENT = 0.02  # share of the step: an op of so much slack counts half
STRICT = 0.001  # share of the step: an op of less slack is on a critical path


@njit(cache=True)
def look(g, devices, start, finish, step, x_tensor, x_target, x_finish, slack, wait, busy, load):
    """Fill in, for a schedule of ``devices`` (ops): ``slack`` and ``wait`` (ops, ns), ``busy`` ``(D, BINS)`` (shares of
    time) and ``load`` ``(D,)`` (ns).

    The slack of an op is the time by which it may end later without a longer step, if every device keeps its order and
    transfers do not wait for one another. Its wait is the time between the arrival of its last input and its start.
    """
    n = len(devices)
    busy[:], load[:] = 0.0, 0
    latest = np.full(n, step, np.int64)  # latest end of each op
    following = np.full(len(load), step, np.int64)  # latest start of the next op of each device
    width = max(1.0, step / BINS)
    for op in np.argsort(start)[::-1]:
        here, end = devices[op], min(step, following[devices[op]])
        for tensor in range(g.output_ptr[op], g.output_ptr[op + 1]):
            for edge in range(g.consumer_ptr[tensor], g.consumer_ptr[tensor + 1]):
                reader = g.consumers[edge]
                begin = latest[reader] - (finish[reader] - start[reader])
                there = devices[reader]
                if there != here:
                    begin -= g.transfer_ns[g.pair_class[here, there], tensor]
                end = min(end, begin)
        latest[op] = end
        slack[op] = max(np.int64(0), end - finish[op])
        duration = finish[op] - start[op]
        following[here] = min(following[here], end - duration)
        load[here] += duration
        first, last = int(start[op] / width), int((finish[op] - 1) / width)
        for number in range(min(first, BINS - 1), min(last, BINS - 1) + 1):
            low, high = max(float(start[op]), number * width), min(float(finish[op]), (number + 1) * width)
            busy[here, number] += max(0.0, high - low) / width
    for op in range(n):
        ready = np.int64(0)
        for slot in range(g.input_ptr[op], g.input_ptr[op + 1]):
            read = np.int64(g.inputs[slot])
            maker = g.producer[read]
            if devices[maker] == devices[op]:
                ready = max(ready, finish[maker])
            else:
                low, high = 0, len(x_tensor)
                while low < high:
                    middle = (low + high) >> 1
                    if x_tensor[middle] < read or (x_tensor[middle] == read and x_target[middle] < devices[op]):
                        low = middle + 1
                    else:
                        high = middle
                ready = max(ready, x_finish[low])
        wait[op] = max(np.int64(0), start[op] - ready)


@njit(cache=True)
def gather(g, pivot, draw_scale, draw_length, draw_low, devices, stamps, mark, units, count):
    """Append to ``units`` the units that move with ``pivot`` at a drawn scale; return the new count and the scale.

    The scales are the depths of the module tree, a run in topological order, and one unit. Units that always move
    together do so; units that are not on the pivot's device stay.
    """
    home, depths = devices[pivot], len(g.group_of)
    scale = min(int(draw_scale * (depths + 2)), depths + 1)
    if scale < depths:
        group = g.group_of[scale, pivot]
        first, last = g.group_ptr[scale, group], g.group_ptr[scale, group + 1]
    elif scale == depths:
        bits = 1
        while (1 << bits) <= len(devices):
            bits += 1
        length = 1 << (1 + int(draw_length * max(1, bits - 1)))
        first = max(0, g.rank[pivot] - int(draw_low * length))
        last = min(len(devices), first + length)
    else:
        first, last = 0, 1
    for position in range(first, last):
        if scale < depths:
            unit = g.group_units[scale, position]
        elif scale == depths:
            unit = g.order[position]
        else:
            unit = pivot
        atom = g.atom_of[unit]
        for place in range(g.atom_ptr[atom], g.atom_ptr[atom + 1]):
            member = g.atom_units[place]
            if stamps[member] != mark and devices[member] == home:
                stamps[member] = mark
                units[count] = member
                count += 1
    return count, scale


@njit(cache=True)
def target_of(g, units, first, last, home, wanted, draw):
    """The device ``wanted`` if all units may go there, or a drawn one but ``home`` if ``wanted`` is -1; -1: none."""
    common = np.uint64(0xFFFFFFFFFFFFFFFF)
    for place in range(first, last):
        common &= g.allowed[units[place]]
    if wanted >= 0:
        return wanted if wanted != home and (common >> np.uint64(wanted)) & np.uint64(1) else -1
    options = 0
    for device in range(g.n_devices):
        if device != home and (common >> np.uint64(device)) & np.uint64(1):
            options += 1
    skip = min(int(draw * options), options - 1)
    for device in range(g.n_devices):
        if device != home and (common >> np.uint64(device)) & np.uint64(1):
            if skip == 0:
                return device
            skip -= 1
    return -1


@njit(cache=True)
def drawn(g, s, draws, shares, stamps, mark, units, targets):
    """Draw one move: fill in ``units`` and ``targets``; return their count (0: nothing moves), the count of the first
    group, the kind and the scale."""
    kind = PLAIN
    for number in range(4):
        if draws[0] < shares[number]:
            kind = number
            break
    pivot = min(np.searchsorted(g.cumulative, draws[1] * g.cumulative[-1], side="right"), len(g.cumulative) - 1)
    wanted = -1
    if kind == ON_PATH and len(s.path_units):
        pivot = s.path_units[min(int(draws[1] * len(s.path_units)), len(s.path_units) - 1)]
    elif kind == ALONG_SEND and len(s.sends):
        row = min(int(draws[1] * len(s.sends)), len(s.sends) - 1)
        maker, there = s.sends[row, 0], s.sends[row, 1]
        tensor, reader = maker, np.int64(-1)
        seen = 0
        for edge in range(g.consumer_ptr[tensor], g.consumer_ptr[tensor + 1]):
            unit = g.unit_of_op[g.consumers[edge]]
            if s.devices[unit] == there:
                seen += 1
                if reader < 0 or draws[8] * seen < 1.0:
                    reader = np.int64(unit)
        maker = g.unit_of_op[g.producer[tensor]]
        if reader < 0:
            return 0, 0, kind, 0
        pivot, other = (maker, reader) if draws[2] < 0.5 else (reader, maker)
        wanted = s.devices[other]
    elif kind == ACROSS_CUT and len(g.edge_source):
        edge = -1
        for attempt in range(20):
            drawn_edge = int((draws[1] * (attempt + 1) * 7919.0) % 1.0 * len(g.edge_source))
            if s.devices[g.edge_source[drawn_edge]] != s.devices[g.edge_target[drawn_edge]]:
                edge = drawn_edge
                break
        if edge < 0:
            return 0, 0, kind, 0
        pivot, other = g.edge_source[edge], g.edge_target[edge]
        if draws[2] < 0.5:
            pivot, other = other, pivot
        wanted = s.devices[other]
    count, scale = gather(g, pivot, draws[3], draws[4], draws[5], s.devices, stamps, mark, units, 0)
    home = s.devices[pivot]
    second = -1
    if kind == SWAP:
        second = min(np.searchsorted(g.cumulative, draws[2] * g.cumulative[-1], side="right"), len(g.cumulative) - 1)
        wanted = s.devices[second]
        if wanted == home:
            return 0, 0, kind, scale
    target = target_of(g, units, 0, count, home, wanted, draws[6])
    if target < 0:
        return 0, 0, kind, scale
    targets[:count] = target
    first = count
    if kind == SWAP:
        count, _ = gather(g, second, draws[7], draws[8], draws[9], s.devices, stamps, mark, units, count)
        back = target_of(g, units, first, count, target, home, 0.0)
        if back < 0:
            return 0, 0, kind, scale
        targets[first:count] = back
    return count, first, kind, scale


@njit(cache=True)
def clipped(value, low, high):
    return min(max(value, low), high)


@njit(cache=True)
def describe(g, s, units, targets, count, first, kind, scale, moved_to, seen, mark, out):
    """Fill in the features of one move, ``out`` float64 ``(F,)``, in the order of
    :data:`simdev.baselines._proposals.FEATURES`. ``moved_to`` (ops) is -1 everywhere, before and after."""
    for place in range(count):
        for slot in range(g.unit_ptr[units[place]], g.unit_ptr[units[place] + 1]):
            moved_to[g.unit_ops[slot]] = targets[place]
    out[:] = 0.0
    out[1] = np.sqrt(count / len(g.unit_bytes))
    before_ns, after_ns = describe_ops(g, s, units[:count], first, moved_to, targets[0], out)
    describe_tensors(g, s, units[:count], targets[0], moved_to, seen, mark, out)
    describe_devices(g, s, s.devices[units[0]], targets[0], before_ns, after_ns, out)
    out[35 + kind] = 1.0
    out[40] = 1.0 if scale < len(g.group_of) else 0.0
    out[41] = 1.0 if scale == len(g.group_of) else 0.0
    out[42] = min(scale, len(g.group_of)) / len(g.group_of)
    for unit in units[:count]:
        for slot in range(g.unit_ptr[unit], g.unit_ptr[unit + 1]):
            moved_to[g.unit_ops[slot]] = -1


@njit(cache=True)
def describe_ops(g, s, units, first, moved_to, there, out):
    """The features of the ops that move: their times, and whether they come in time. Returns the time of the ``first``
    units before and after the move (ns)."""
    step = float(max(s.step, 1))
    urgent, strict = URGENT * step, STRICT * step
    here = s.devices[units[0]]
    n_ops, late_in, gain_in, kept = 0, -1.0, 0.0, 0.0
    before_ns, after_ns, path_ns, strict_ns, wait_ns = 0.0, 0.0, 0.0, 0.0, 0.0
    clash_there, clash_here, stuck = 0.0, 0.0, 0.0
    begin, end = step, 0.0
    for place in range(len(units)):
        kept += g.unit_bytes[units[place]] if place < first else 0.0
        for slot in range(g.unit_ptr[units[place]], g.unit_ptr[units[place] + 1]):
            op = g.unit_ops[slot]
            old, new = s.op_devices[op], moved_to[op]
            time, other = float(g.device_op_ns[old, op]), float(g.device_op_ns[new, op])
            weight = urgent / (urgent + s.slack[op])
            bin_ = min(int(s.start[op] / step * BINS), BINS - 1)
            n_ops += 1
            if place < first:
                before_ns += time
                after_ns += other
                begin, end = min(begin, float(s.start[op])), max(end, float(s.finish[op]))
                clash_there += other * s.busy[new, bin_]
                clash_here += time * s.busy[old, bin_]
            path_ns += time * weight
            if s.slack[op] <= strict:
                strict_ns += time
            wait_ns += min(float(s.wait[op]), time + urgent) * weight
            stuck = max(stuck, s.wait[op] * weight)
            ready = 0.0
            for read in range(g.input_ptr[op], g.input_ptr[op + 1]):
                tensor = np.int64(g.inputs[read])
                maker = g.producer[tensor]
                if moved_to[maker] >= 0 and moved_to[maker] == new:
                    arrival = 0.0
                else:
                    at = moved_to[maker] if moved_to[maker] >= 0 else s.op_devices[maker]
                    arrival = float(s.finish[maker])
                    if at != new:
                        arrival += g.transfer_ns[g.pair_class[at, new], tensor]
                ready = max(ready, arrival)
            late_in = max(late_in, (ready - s.start[op] - s.slack[op]) / step)
            gain_in = max(gain_in, (s.start[op] - ready) / step * weight)
    idle, low, high = 0.0, min(int(begin / step * BINS), BINS - 1), min(int(end / step * BINS), BINS - 1)
    for number in range(low, high + 1):
        idle += max(0.0, 1.0 - s.busy[there, number]) / BINS
    out[0] = np.sqrt(n_ops / len(moved_to))
    out[2] = np.sqrt(before_ns / step)
    out[3] = (after_ns - before_ns) / step
    out[4] = np.sqrt(path_ns / step)
    out[5] = np.sqrt(strict_ns / step)
    out[6] = np.sqrt(wait_ns / step)
    out[13] = clipped(late_in, -0.5, 0.5)
    out[14] = np.sqrt(clipped(gain_in, 0.0, 1.0))
    out[16] = np.sqrt(clash_there / step)
    out[17] = np.sqrt(clash_here / step)
    out[18] = idle
    out[19] = (end - begin) / step if end > begin else 0.0
    out[26] = clipped((s.peak[there] + kept) / g.capacity[there], 0.0, 2.0)
    out[27] = clipped(s.peak[here] / g.capacity[here], 0.0, 2.0)
    out[28] = 1.0 if s.overflows else 0.0
    out[29] = clipped(kept / g.capacity[there], 0.0, 1.0)
    out[34] = np.sqrt(stuck / step)
    out[43] = begin / step
    return before_ns, after_ns


@njit(cache=True)
def describe_tensors(g, s, units, there, moved_to, seen, mark, out):
    """The features of the tensors that the moved ops read and write: transfers that are saved and added, readers that
    get them late, and where the neighbours are."""
    step = float(max(s.step, 1))
    urgent, here = URGENT * step, s.devices[units[0]]
    late_out = -1.0
    saved, added, saved_urgent, added_urgent, n_saved, n_added, n_touched = 0.0, 0.0, 0.0, 0.0, 0, 0, 0
    near_here, near_there, near_else = 0.0, 0.0, 0.0
    for unit in units:
        for slot in range(g.unit_ptr[unit], g.unit_ptr[unit + 1]):
            op = g.unit_ops[slot]
            for read in range(g.input_ptr[op], g.input_ptr[op + 1] + g.output_ptr[op + 1] - g.output_ptr[op]):
                if read < g.input_ptr[op + 1]:
                    tensor = np.int64(g.inputs[read])
                else:
                    tensor = np.int64(g.output_ptr[op] + read - g.input_ptr[op + 1])
                if seen[tensor] == mark:
                    continue
                seen[tensor] = mark
                n_touched += 1
                maker = g.producer[tensor]
                was = s.op_devices[maker]
                now = moved_to[maker] if moved_to[maker] >= 0 else was
                sent, sends = np.uint64(0), np.uint64(0)
                outside = moved_to[maker] < 0
                size = float(g.tensor_bytes[tensor])
                if outside:
                    near_here += size if was == here else 0.0
                    near_there += size if was == there else 0.0
                    near_else += size if was != here and was != there else 0.0
                least_slack = step
                for edge in range(g.consumer_ptr[tensor], g.consumer_ptr[tensor + 1]):
                    reader = g.consumers[edge]
                    reads = s.op_devices[reader]
                    will = moved_to[reader] if moved_to[reader] >= 0 else reads
                    if reads != was:
                        sent |= np.uint64(1) << np.uint64(reads)
                    if will != now:
                        sends |= np.uint64(1) << np.uint64(will)
                    least_slack = min(least_slack, float(s.slack[reader]))
                    if not outside and moved_to[reader] < 0:
                        near_here += size if reads == here else 0.0
                        near_there += size if reads == there else 0.0
                        near_else += size if reads != here and reads != there else 0.0
                        arrival = float(s.finish[maker])
                        if will != now:
                            arrival += g.transfer_ns[g.pair_class[now, will], tensor]
                        late_out = max(late_out, (arrival - s.start[reader] - s.slack[reader]) / step)
                hurry = urgent / (urgent + least_slack)
                for device in range(g.n_devices):
                    bit = np.uint64(1) << np.uint64(device)
                    if sent & bit and not (sends & bit and was == now):
                        cost = float(g.transfer_ns[g.pair_class[was, device], tensor])
                        saved += cost
                        saved_urgent += cost * hurry
                        n_saved += 1
                    if sends & bit and not (sent & bit and was == now):
                        cost = float(g.transfer_ns[g.pair_class[now, device], tensor])
                        added += cost
                        added_urgent += cost * hurry
                        n_added += 1
    near = max(1.0, near_here + near_there + near_else)
    out[7] = np.sqrt(saved / step)
    out[8] = np.sqrt(added / step)
    out[9] = np.sqrt(saved_urgent / step)
    out[10] = np.sqrt(added_urgent / step)
    out[11] = n_saved / (n_touched + 1.0)
    out[12] = n_added / (n_touched + 1.0)
    out[15] = clipped(late_out, -0.5, 0.5)
    out[30] = near_here / near
    out[31] = near_there / near
    out[32] = (saved - added) / step
    out[33] = (saved_urgent - added_urgent) / step


@njit(cache=True)
def describe_devices(g, s, here, there, before_ns, after_ns, out):
    """The features of the devices: their loads (ns) now, and once ``before_ns`` has left ``here`` and ``after_ns`` has
    come to ``there``."""
    step = float(max(s.step, 1))
    most, total, used, most_after = 0.0, 0.0, 0, 0.0
    for device in range(g.n_devices):
        load = float(s.load[device])
        most = max(most, load)
        total += load
        used += 1 if load > 0 else 0
        if device == here:
            load -= before_ns
        elif device == there:
            load += after_ns
        most_after = max(most_after, load)
    out[20] = s.load[here] / step
    out[21] = s.load[there] / step
    out[22] = (s.load[there] + after_ns - s.load[here]) / step
    out[23] = most / step
    out[24] = total / step / max(1, used)
    out[25] = (most_after - most) / step
    out[44] = s.comm / step
    out[45] = used / max(1.0, 1.0 * g.n_usable)


@njit(cache=True)
def score(features, mean, scale, first, first_bias, second, second_bias, last, hidden):
    """The network: two layers of rectified units over the standardised features."""
    for unit in range(len(first_bias)):
        total = first_bias[unit]
        for number in range(len(features)):
            total += clipped((features[number] - mean[number]) * scale[number], -5.0, 5.0) * first[number, unit]
        hidden[unit] = max(total, 0.0)
    answer = 0.0
    for unit in range(len(second_bias)):
        total = second_bias[unit]
        for number in range(len(first_bias)):
            total += hidden[number] * second[number, unit]
        answer += max(total, 0.0) * last[unit]
    return answer


@njit(cache=True)
def moves_and_features(g, s, draws, shares, w, ptr, units, targets, features, zobrist, hashes):
    """Draw a move for each row of ``draws`` and describe it; return the number of the moves.

    ``ptr`` ``(k + 1,)``: where the units and targets of each move lie; ``hashes`` ``(k,)``: a hash of the change.
    Draws that move nothing are left out.
    """
    found = 0
    ptr[0] = 0
    for row in range(len(draws)):
        w.mark[0] += 1
        room = ptr[found]
        count, first, kind, scale = drawn(
            g, s, draws[row], shares, w.unit_stamps, w.mark[0], units[room:], targets[room:]
        )
        if count == 0:
            continue
        here, to = units[room : room + count], targets[room : room + count]
        change = np.uint64(0)
        for place in range(count):
            change ^= zobrist[s.devices[here[place]], here[place]] ^ zobrist[to[place], here[place]]
        hashes[found] = change
        describe(g, s, here, to, count, first, kind, scale, w.moved_to, w.tensor_stamps, w.mark[0], features[found])
        found += 1
        ptr[found] = room + count
    return found


@njit(cache=True)
def scores(features, count, mean, scale, first, first_bias, second, second_bias, last, out):
    hidden = np.empty(len(first_bias))
    for row in range(count):
        out[row] = score(features[row], mean, scale, first, first_bias, second, second_bias, last, hidden)
