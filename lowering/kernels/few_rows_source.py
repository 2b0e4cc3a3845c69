"""The kernel of `few_rows` in C++: what is the same for all problems.

What a problem adds takes the place of names in braces: sizes in front of it, which matrices a block
has (``CHOOSE``), what computes the rows (``EARLY``, ``START``), and what is done with sums (``HOIST``,
``FINISH``).
"""

from __future__ import annotations

# How a thread finds its elements of the matrices, and what it does with them. `fetch` and `consume`
# are given the step and, known to the compiler, the slot of the ring that it uses.
COLUMN_STEPS = """\
    constexpr int ACROSS = WIDTH / VECTOR, LANES = THREADS / ACROSS;
    constexpr int STEPS = (PART + LANES - 1) / LANES * COUNT;
    const int lane = threadIdx.x / ACROSS, own = threadIdx.x % ACROSS * VECTOR;
    const bool is_inside = first + own < columns;
    float sums[COUNT][ROWS][VECTOR] = {};
    auto fetch = [&](int step, int slot) {
        int d = lane + step / COUNT * LANES;
        if (is_inside && step < STEPS && d < depth)
            copy_async(ring + slot * THREADS,
                       matrices[slot % COUNT] + (long long)(begin + d) * columns + first + own);
    };
    auto consume = [&](int step, int slot) {
        int d = lane + step / COUNT * LANES;
        if (!is_inside || step >= STEPS || d >= depth) return;
        const Vector copied = ring[slot * THREADS];
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            #pragma unroll
            for (int row = 0; row < ROWS; ++row)
                sums[slot % COUNT][row][i] += take(copied, i, Weight()) * x[d * ROWS + row];
    };
"""
# A warp has columns of its own, and adds up each when it comes to its end.
ROW_STEPS = """\
    constexpr int CHUNK = 32 * VECTOR, CHUNKS = (PART + CHUNK - 1) / CHUNK;
    constexpr int OWN = WIDTH / WARPS, STEPS = OWN * CHUNKS * COUNT;
    const int lane = threadIdx.x % 32 * VECTOR, own = threadIdx.x / 32 * OWN;
    float sums[COUNT][ROWS] = {};
    auto fetch = [&](int step, int slot) {
        int column = first + own + step / (CHUNKS * COUNT);
        int d = lane + step / COUNT % CHUNKS * CHUNK;
        if (column < columns && step < STEPS && d < depth)
            copy_async(ring + slot * THREADS,
                       matrices[slot % COUNT] + (long long)column * DEPTH + begin + d);
    };
    auto consume = [&](int step, int slot) {
        int column = own + step / (CHUNKS * COUNT), chunk = step / COUNT % CHUNKS;
        int d = lane + chunk * CHUNK, m = slot % COUNT;
        if (first + column < columns && step < STEPS && d < depth) {
            const Vector copied = ring[slot * THREADS];
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                #pragma unroll
                for (int row = 0; row < ROWS; ++row)
                    sums[m][row] += take(copied, i, Weight()) * x[(d + i) * ROWS + row];
        }
        if (step >= STEPS || chunk < CHUNKS - 1) return;
        #pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            float value = sums[m][row];
            #pragma unroll
            for (int mask = 16; mask; mask >>= 1) value += shuffle_xor(value, mask);
            if (lane == 0) totals[(m * ROWS + row) * WIDTH + column] = value;
            sums[m][row] = 0;
        }
    };
"""
COLUMN_TOTALS = """\
    sync_block();
    #pragma unroll
    for (int index = 0; index < COUNT * ROWS * VECTOR; ++index) {
        const int m = index / (ROWS * VECTOR), row = index / VECTOR % ROWS, i = index % VECTOR;
        float value = sums[m][row][i];
        #pragma unroll
        for (int mask = ACROSS; mask < 32; mask *= 2) value += shuffle_xor(value, mask);
        if (threadIdx.x % 32 < ACROSS)
            partial[((threadIdx.x / 32 * COUNT + m) * ROWS + row) * WIDTH + own + i] = value;
    }
    sync_block();
    for (int index = threadIdx.x; index < COUNT * ROWS * WIDTH; index += THREADS) {
        float value = 0;
        #pragma unroll
        for (int warp = 0; warp < WARPS; ++warp)
            value += partial[warp * COUNT * ROWS * WIDTH + index];
        totals[index] = value;
    }
"""
FUNCTIONS = """\
DEVICE float take(const Vector &copied, int index, float) { return literal(copied.words[index]); }
template <class Half> DEVICE float take(const Vector &copied, int index, Half) {
    return widen(Half{(unsigned short)(copied.words[index / 2] >> index % 2 * 16)});
}
template <class T> DEVICE void load_eight(float *to, const T *from) {
    constexpr int each = 16 / sizeof(T);
    Vector vectors[8 / each];
    #pragma unroll
    for (int i = 0; i < 8 / each; ++i) vectors[i] = load_vector(from + i * each);
    #pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = take(vectors[i / each], i % each, T());
}
template <class Row, class Combine>
DEVICE void reduce_block(Row &values, float *scratch, Combine combine) {
    #pragma unroll
    for (int row = 0; row < ROWS; ++row)
        #pragma unroll
        for (int mask = 16; mask; mask >>= 1)
            values[row] = combine(values[row], shuffle_xor(values[row], mask));
    sync_block();
    if (threadIdx.x % 32 == 0)
        #pragma unroll
        for (int row = 0; row < ROWS; ++row) scratch[threadIdx.x / 32 * ROWS + row] = values[row];
    sync_block();
    #pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        values[row] = scratch[row];
        #pragma unroll
        for (int warp = 1; warp < WARPS; ++warp)
            values[row] = combine(values[row], scratch[warp * ROWS + row]);
    }
}
"""
BODY = """\
    char *shared = shared_memory();
    Vector *ring = (Vector *)shared + threadIdx.x;
    float *partial = (float *)shared, *totals = (float *)(shared + RING_BYTES);
    float *scratch = totals + COUNT * ROWS * WIDTH, *x = scratch + WARPS * ROWS;
    const int rank = SPLIT > 1 ? find_cluster_rank() : 0, begin = rank * PART;
    const int depth = DEPTH - begin < PART ? DEPTH - begin : PART;
    int segment = 0, first = blockIdx.x / SPLIT, columns = 0;
    const Weight *matrices[COUNT];
{CHOOSE}
    first *= WIDTH;
{STEPS}
    #pragma unroll
    for (int slot = 0; slot < STAGES; ++slot) {
        fetch(slot, slot);
        if (slot % GROUP == GROUP - 1) commit_copies();
    }
    start_dependents();
{EARLY}
    wait();
{HOIST}
{START}
    sync_block();
    for (int base = 0; base < STEPS; base += STAGES) {
        #pragma unroll
        for (int slot = 0; slot < STAGES; slot += GROUP) {
            await_copies<STAGES / GROUP - 1>();
            #pragma unroll
            for (int each = slot; each < slot + GROUP; ++each) consume(base + each, each);
            #pragma unroll
            for (int each = slot; each < slot + GROUP; ++each) fetch(base + each + STAGES, each);
            commit_copies();
        }
    }
    await_copies<0>();
{TOTALS}
    sync();
    #pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int index = turn * THREADS + threadIdx.x;
        const int row = index / SHARE, own_column = rank * SHARE + index % SHARE;
        const int column = first + own_column;
        if (index >= ROWS * SHARE || column >= columns) continue;
        float sum[COUNT];
        #pragma unroll
        for (int m = 0; m < COUNT; ++m) {
            const float *place = totals + (m * ROWS + row) * WIDTH + own_column;
            sum[m] = SPLIT > 1 ? 0 : *place;
            #pragma unroll
            for (int peer = 0; SPLIT > 1 && peer < SPLIT; ++peer) sum[m] += read_peer(place, peer);
        }
{FINISH}
    }
    // What is in a block's shared memory may be read until its peers have what they need.
    if (SPLIT > 1) sync();
"""
