/* The kernel of the default rules for devices of one slot, as simdev/sim/_fifo.py has it, with the timeline that it
   leaves for the sweep over memory: what a C compiler makes of the same design. Compiled by the benchmark where there is a compiler; not part of the package. */
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

/* scratch: 6 * n + 10 * d + channels + 1, log: 3 * n + 2 * m, x_time: 2 * e words of 64 bits. Returns the step time. */
int64_t run(uint64_t n, uint64_t d, uint64_t n_channels, const uint32_t *devices, const int64_t *op_ns,
            const uint32_t *device_row, const int64_t *transfer_ns, uint64_t m, const int32_t *pair_class,
            const uint32_t *input_ptr, const uint32_t *output_ptr, const uint32_t *consumer_ptr,
            const uint32_t *consumers, const uint32_t *route_ptr, const uint32_t *route, int64_t *scratch,
            int64_t *log, int64_t *x_time, uint32_t *x_what)
{
    int64_t *queue = scratch, *heap = queue + n, *line = heap + n, *ready_time = line + n, *missing = ready_time + n;
    int64_t *head = missing + n, *end = head + d, *first_finish = end + d, *free_at = first_finish + d;
    int64_t *stamp = free_at + d, *arrival = stamp + d, *request = arrival + d, *base = request + d;
    int64_t *received = base + d + 1, *sent = received + d, *channel_end = sent + d;
    int64_t *op_start = log, *op_finish = log + n, *sequence = log + 2 * n, *sent_until = log + 3 * n;
    int64_t *sent_last = sent_until + m;
    uint64_t n_transfers = 0;
    uint64_t first = 0, last = 0, n_heap = 0, next_device = 0;
    int64_t mark = 0, step = 0, next_finish = NEVER;

    for (uint64_t i = 0; i <= d; i++)
        base[i] = 0;
    for (uint64_t op = 0; op < n; op++)
        base[devices[op] + 1]++;
    for (uint64_t i = 0; i < d; i++) {
        base[i + 1] += base[i];
        head[i] = end[i] = base[i];
        first_finish[i] = NEVER;
        free_at[i] = 0;
        stamp[i] = -1;
        received[i] = sent[i] = 0;
    }
    for (uint64_t i = 0; i < n_channels; i++)
        channel_end[i] = 0;
    for (uint64_t op = 0; op < n; op++) {
        missing[op] = input_ptr[op + 1] - input_ptr[op];
        ready_time[op] = 0;
        if (missing[op] == 0)
            queue[last++] = op;
    }
    for (;;) {
        int64_t ready = NEVER;
        int from_heap = 0;
        if (first < last)
            ready = queue[first];
        if (n_heap > 0 && heap[0] < ready) {
            ready = heap[0];
            from_heap = 1;
        }
        if (ready != NEVER && (ready >> SHIFT) < (next_finish >> SHIFT)) {
            if (from_heap)
                pop(heap, --n_heap);
            else
                first++;
            uint32_t op = ready & MASK, device = devices[op];
            int64_t start = MAX(ready >> SHIFT, free_at[device]);
            int64_t finish = start + op_ns[device_row[device] * n + op];
            free_at[device] = finish;
            op_start[op] = start;
            op_finish[op] = finish;
            sequence[end[device]] = op;
            int64_t key = (finish << SHIFT) | op;
            line[end[device]] = key;
            if (end[device]++ == head[device]) {
                first_finish[device] = key;
                if (key < next_finish) {
                    next_finish = key;
                    next_device = device;
                }
            }
            continue;
        }
        if (next_finish == NEVER)
            return step;
        uint32_t op = next_finish & MASK;
        int64_t now = next_finish >> SHIFT;
        uint64_t source = next_device;
        head[source]++;
        first_finish[source] = head[source] < end[source] ? line[head[source]] : NEVER;
        next_finish = NEVER;
        for (uint64_t i = 0; i < d; i++)
            if (first_finish[i] < next_finish) {
                next_finish = first_finish[i];
                next_device = i;
            }
        step = MAX(step, now);
        for (uint64_t tensor = output_ptr[op]; tensor < output_ptr[op + 1]; tensor++) {
            uint64_t edge = consumer_ptr[tensor], stop = consumer_ptr[tensor + 1], n_requests = 0;
            mark++;
            for (uint64_t where = edge; where < stop; where++) {
                uint32_t target = devices[consumers[where]];
                if (target != source && stamp[target] != mark) {
                    stamp[target] = mark;
                    uint64_t hole = n_requests++;
                    while (hole > 0 && request[hole - 1] > target) {
                        request[hole] = request[hole - 1];
                        hole--;
                    }
                    request[hole] = target;
                }
            }
            arrival[source] = now;
            sent_until[tensor] = -1;
            for (uint64_t i = 0; i < n_requests; i++) {
                uint64_t target = request[i], pair = source * d + target;
                int64_t start = now;
                for (uint64_t hop = route_ptr[pair]; hop < route_ptr[pair + 1]; hop++)
                    start = MAX(start, channel_end[route[hop]]);
                int64_t finish = start + transfer_ns[(uint64_t)pair_class[pair] * m + tensor];
                for (uint64_t hop = route_ptr[pair]; hop < route_ptr[pair + 1]; hop++)
                    channel_end[route[hop]] = finish;
                arrival[target] = finish;
                received[target]++;
                sent[source]++;
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
                int64_t there = MAX(ready_time[consumer], arrival[devices[consumer]]);
                ready_time[consumer] = there;
                if (--missing[consumer] > 0)
                    continue;
                int64_t key = (there << SHIFT) | consumer;
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
