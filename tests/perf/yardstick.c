/* The kernel of the default rules for devices of one slot, as simdev/sim/_fifo.py has it, with the timeline that it
   leaves for the sweep over memory: what a C compiler makes of the same design. Compiled by the benchmark where there is
   a compiler; not part of the package. */
#include <stdint.h>

#define SHIFT 20
#define MASK ((1 << SHIFT) - 1)
#define NEVER INT64_MAX
#define NEAR 32
#define MAX(a, b) ((a) > (b) ? (a) : (b))

static void push(int64_t *heap, uint64_t size, int64_t key)
{
    while (size > 0) {
        uint64_t parent = (size - 1) >> 1;
        if (heap[parent] <= key)
            break;
        heap[size] = heap[parent];
        size = parent;
    }
    heap[size] = key;
}

static void pop(int64_t *heap, uint64_t size)
{
    int64_t last = heap[size];
    uint64_t hole = 0;
    for (;;) {
        uint64_t child = 2 * hole + 1;
        if (child >= size)
            break;
        if (child + 1 < size && heap[child + 1] < heap[child])
            child++;
        if (last <= heap[child])
            break;
        heap[hole] = heap[child];
        hole = child;
    }
    heap[hole] = last;
}

/* scratch: 5 * n + 8 * d + channels + 1, log: 3 * n + 2 * m, x_time: 2 * e words of 64 bits. At most 64 devices. Returns the
   step time. */
int64_t run(uint64_t n, uint64_t d, uint64_t n_channels, const uint32_t *devices, const int64_t *op_ns,
            const uint32_t *device_row, const int64_t *transfer_ns, uint64_t m, const int32_t *pair_class,
            const uint32_t *input_ptr, const uint32_t *output_ptr, const uint32_t *consumer_ptr,
            const uint32_t *consumers, const uint32_t *route_ptr, const uint32_t *route, const uint8_t *alone,
            int64_t *scratch, int64_t *log, int64_t *x_time, uint32_t *x_what)
{
    int64_t *queue = scratch, *heap = queue + n, *line = heap + n, *sends = line + n, *state = sends + n;
    int64_t *started = state + n, *head = started + d, *end = head + d, *first_send = end + d, *free_at = first_send + d;
    int64_t *arrival = free_at + d, *base = arrival + d, *channel_end = base + d + 1;
    int64_t *op_start = log, *op_finish = log + n, *sequence = log + 2 * n, *sent_until = log + 3 * n;
    int64_t *sent_last = sent_until + m;
    uint64_t n_transfers = 0, first = 0, last = 0, n_heap = 0;
    int64_t step = 0, next_send = NEVER;

    for (uint64_t i = 0; i <= d; i++)
        base[i] = 0;
    for (uint64_t op = 0; op < n; op++)
        base[devices[op] + 1]++;
    for (uint64_t i = 0; i < d; i++) {
        base[i + 1] += base[i];
        started[i] = head[i] = end[i] = base[i];
        first_send[i] = NEVER;
        free_at[i] = 0;
    }
    for (uint64_t i = 0; i < n_channels; i++)
        channel_end[i] = 0;
    for (uint64_t op = 0; op < n; op++) {
        state[op] = input_ptr[op + 1] - input_ptr[op];
        if (state[op] == 0)
            queue[last++] = op;
    }
    for (;;) {
        int64_t ready = first < last ? queue[first] : NEVER, now;
        int from_heap = 0;
        uint32_t op, source, away = 1;
        if (n_heap > 0 && heap[0] < ready) {
            ready = heap[0];
            from_heap = 1;
        }
        if ((ready >> SHIFT) < (next_send >> SHIFT)) {
            if (from_heap)
                pop(heap, --n_heap);
            else
                first++;
            op = ready & MASK;
            source = devices[op];
            int64_t start = MAX(ready >> SHIFT, free_at[source]);
            now = start + op_ns[device_row[source] * n + op];
            free_at[source] = now;
            op_start[op] = start;
            op_finish[op] = now;
            step = MAX(step, now);
            int64_t key = (now << SHIFT) | op;
            sequence[started[source]] = op;
            line[started[source]++] = key;
            away = 0;
            for (uint64_t where = consumer_ptr[output_ptr[op]]; where < consumer_ptr[output_ptr[op + 1]]; where++)
                away |= devices[consumers[where]] ^ source;
            if (away && !alone[source]) {
                sends[end[source]] = key;
                if (end[source]++ == head[source]) {
                    first_send[source] = key;
                    next_send = next_send < key ? next_send : key;
                }
                continue;
            }
        } else if (next_send == NEVER) {
            return step;
        } else {
            op = next_send & MASK;
            now = next_send >> SHIFT;
            source = devices[op];
            head[source]++;
            first_send[source] = head[source] < end[source] ? sends[head[source]] : NEVER;
            next_send = NEVER;
            for (uint64_t i = 0; i < d; i++)
                next_send = next_send < first_send[i] ? next_send : first_send[i];
        }
        arrival[source] = now << SHIFT;
        for (uint64_t tensor = output_ptr[op]; tensor < output_ptr[op + 1]; tensor++) {
            uint64_t edge = consumer_ptr[tensor], stop = consumer_ptr[tensor + 1], targets = 0;
            sent_until[tensor] = -1;
            if (away) {
                for (uint64_t where = edge; where < stop; where++)
                    targets |= UINT64_C(1) << devices[consumers[where]];
                targets &= ~(UINT64_C(1) << source);
            }
            for (; targets; targets &= targets - 1) {
                uint64_t target = __builtin_ctzll(targets), pair = source * d + target;
                int64_t start = now;
                for (uint64_t hop = route_ptr[pair]; hop < route_ptr[pair + 1]; hop++)
                    start = MAX(start, channel_end[route[hop]]);
                int64_t finish = start + transfer_ns[(uint64_t)pair_class[pair] * m + tensor];
                for (uint64_t hop = route_ptr[pair]; hop < route_ptr[pair + 1]; hop++)
                    channel_end[route[hop]] = finish;
                arrival[target] = finish << SHIFT;
                x_what[2 * n_transfers] = tensor;
                x_what[2 * n_transfers + 1] = target;
                x_time[2 * n_transfers] = start;
                x_time[2 * n_transfers + 1] = finish;
                if (finish > sent_until[tensor]) {
                    sent_until[tensor] = finish;
                    sent_last[tensor] = n_transfers;
                }
                n_transfers++;
                step = MAX(step, finish);
            }
            for (uint64_t where = edge; where < stop; where++) {
                uint32_t consumer = consumers[where];
                int64_t key = state[consumer], there = arrival[devices[consumer]] | (key & MASK);
                key = MAX(key, there) - 1;
                state[consumer] = key;
                if (key & MASK)
                    continue;
                key |= consumer;
                uint64_t nearest = last - first > NEAR ? last - NEAR : first;
                if (nearest > first && queue[nearest - 1] > key) {
                    push(heap, n_heap++, key);
                    continue;
                }
                uint64_t spot = last++;
                while (spot > nearest && queue[spot - 1] > key) {
                    queue[spot] = queue[spot - 1];
                    spot--;
                }
                queue[spot] = key;
            }
        }
    }
}
