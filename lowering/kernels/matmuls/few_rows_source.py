"""The kernel of `few_rows` in C++: what is the same for all problems.

What a problem adds takes the place of names in braces: sizes in front of it, which matrices a block
has (``CHOOSE``), what computes the rows (``EARLY``, ``START``), and what is done with sums
(``HOIST``, ``FINISH``, ``CANDIDATES``).
"""

from __future__ import annotations

# How a thread finds its elements of the matrices, and what it does with them. Copies come in
# units of GROUP; `fetch` and `consume` are called for one after the other. The place of a unit in
# the ring is known to the compiler.
# Columns of a matrix that lie side by side are one copy of a thread. `lane` is its first depth of a
# unit, the others are APART from each other; `own` is its first column.
FETCH_COLUMNS = """\
    constexpr bool FITS = IS_EVEN && PART % UNIT == 0;
    const bool is_inside = first + own < columns;
    const Slot slot = hold_slot(ring);
    const Weight *next[COUNT];
    #pragma unroll
    for (int m = 0; m < COUNT; ++m)
        next[m] = matrices[m] + (long long)(begin + lane) * columns + first + own;
    auto fetch = [&](int unit, int place) {
        if (unit >= UNITS) return;
        #pragma unroll
        for (int each = 0; each < GROUP; ++each) {
            const int m = each / QUAD, i = each % QUAD;
            const int to = find_place(place, each);
            if (FITS || (is_inside && unit * UNIT + lane + i * APART < depth))
                copy_streamed(slot, to, next[m] + i * APART * columns, policy);
            else if (FILLS) ring[to] = Vector{};
        }
        #pragma unroll
        for (int m = 0; m < COUNT; ++m) next[m] += (long long)UNIT * columns;
    };
"""
COLUMN_STEPS = f"""\
    constexpr int ACROSS = WIDTH / VECTOR, LANES = THREADS / ACROSS, QUAD = GROUP / COUNT;
    constexpr int UNIT = LANES * QUAD, UNITS = (PART + UNIT - 1) / UNIT, APART = 1, FILLS = 0;
    const int lane = threadIdx.x / ACROSS * QUAD, own = threadIdx.x % ACROSS * VECTOR;
    auto find_place = [&](int place, int each) {{ return (place * GROUP + each) * THREADS; }};
    float sums[COUNT][ROWS][VECTOR] = {{}};
{FETCH_COLUMNS}\
    auto consume = [&](int unit, int place) {{
        if (unit >= UNITS) return;
        const int d = unit * UNIT + lane;
        Row<QUAD> values[ROWS];
        #pragma unroll
        for (int row = 0; row < ROWS; ++row)
            values[row] = *(const Row<QUAD> *)(x + row * STRIDE + d);
        #pragma unroll
        for (int each = 0; each < GROUP; ++each) {{
            const int m = each / QUAD, i = each % QUAD;
            if (!FITS && (!is_inside || d + i >= depth)) continue;
            const Vector copied = ring[(place * GROUP + each) * THREADS];
            #pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                #pragma unroll
                for (int row = 0; row < ROWS; ++row)
                    sums[m][row][e] += take(copied, e, Weight()) * values[row].each[i];
        }}
    }};
"""
# A warp has columns of its own, and adds up each when it comes to its end.
ROW_STEPS = """\
    constexpr int CHUNK = 32 * VECTOR, CHUNKS = (PART + CHUNK - 1) / CHUNK;
    constexpr int OWN = WIDTH / WARPS, STEPS = OWN * CHUNKS * COUNT;
    constexpr int UNITS = (STEPS + GROUP - 1) / GROUP;
    const int lane = threadIdx.x % 32 * VECTOR, own = threadIdx.x / 32 * OWN;
    float sums[COUNT][ROWS] = {};
    const Slot slot = hold_slot(ring);
    auto fetch = [&](int unit, int place) {
        #pragma unroll
        for (int each = 0; each < GROUP; ++each) {
            const int step = unit * GROUP + each;
            const int column = first + own + step / (CHUNKS * COUNT);
            const int d = lane + step / COUNT % CHUNKS * CHUNK;
            if (column < columns && step < STEPS && d < depth)
                copy_streamed(slot, (place * GROUP + each) * THREADS,
                              matrices[each % COUNT] + (long long)column * DEPTH + begin + d,
                              policy);
        }
    };
    auto consume = [&](int unit, int place) {
        #pragma unroll
        for (int each = 0; each < GROUP; ++each) {
            const int step = unit * GROUP + each, m = each % COUNT;
            const int column = own + step / (CHUNKS * COUNT), chunk = step / COUNT % CHUNKS;
            const int d = lane + chunk * CHUNK;
            if (first + column < columns && step < STEPS && d < depth) {
                const Vector copied = ring[(place * GROUP + each) * THREADS];
                #pragma unroll
                for (int row = 0; row < ROWS; ++row) {
                    const Row<VECTOR> values = *(const Row<VECTOR> *)(x + row * STRIDE + d);
                    #pragma unroll
                    for (int i = 0; i < VECTOR; ++i)
                        sums[m][row] += take(copied, i, Weight()) * values.each[i];
                }
            }
            if (step >= STEPS || chunk < CHUNKS - 1) continue;
            #pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                float value = sums[m][row];
                #pragma unroll
                for (int mask = 16; mask; mask >>= 1) value += shuffle_xor(value, mask);
                if (lane == 0) put(m * ROWS + row, column, value);
                sums[m][row] = 0;
            }
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
            partial[((threadIdx.x / 32 * COUNT + m) * ROWS + row) * LINE + own + i] = value;
    }
    sync_block();
    add_partial<WARPS>(partial, put);
"""
FUNCTIONS = """\
// Values that are loaded at once, as far as they lie at a multiple of so many.
template <int count> struct alignas(count % 4 ? count % 2 ? 4 : 8 : 16) Row { float each[count]; };
DEVICE float take(const Vector &copied, int index, float) { return literal(copied.words[index]); }
DEVICE float take(const Vector &copied, int index, signed char) {
    // Moved up by 128, as the last bits of 2^23: a conversion takes four times as long.
    unsigned word = copied.words[index / 4] ^ 0x80808080u;
    return literal(0x4B000000u | (word >> index % 4 * 8 & 0xFFu)) - 8388736.0f;
}
DEVICE unsigned short take_pair(const Vector &copied, int index) {
    return (unsigned short)(copied.words[index / 4] >> index / 2 % 2 * 16);
}
DEVICE float take(const Vector &copied, int index, float8e4m3) {
    return widen_of_pair(take_pair(copied, index), index % 2, float8e4m3());
}
DEVICE float take(const Vector &copied, int index, float8e5m2) {
    return widen_of_pair(take_pair(copied, index), index % 2, float8e5m2());
}
template <class Half> DEVICE float take(const Vector &copied, int index, Half) {
    return widen(Half{(unsigned short)(copied.words[index / 2] >> index % 2 * 16)});
}
template <class T> DEVICE void load_eight(Vector *to, const T *from) {
    constexpr int each = 16 / sizeof(T);
    #pragma unroll
    for (int i = 0; i < 8 / each; ++i) to[i] = load_vector(from + i * each);
}
// Of a row, over the threads that read it.
template <class Combine> DEVICE float reduce_row(float value, float *scratch, Combine combine) {
    #pragma unroll
    for (int mask = READERS < 32 ? READERS / 2 : 16; mask; mask >>= 1)
        value = combine(value, shuffle_xor(value, mask));
    if (SPAN == 1) return value;
    sync_block();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    sync_block();
    const float *own = scratch + threadIdx.x / 32 / SPAN * SPAN;
    value = own[0];
    #pragma unroll
    for (int warp = 1; warp < SPAN; ++warp) value = combine(value, own[warp]);
    return value;
}
"""
ADD_PARTIAL = """\
// Adds up what several threads have of each sum.
template <int parts, class Put> DEVICE void add_partial(const float *partial, Put put) {
    for (int index = threadIdx.x; index < COUNT * ROWS * WIDTH; index += THREADS) {
        const int sum = index / WIDTH, column = index % WIDTH;
        float value = 0;
        #pragma unroll
        for (int part = 0; part < parts; ++part)
            value += partial[(part * COUNT * ROWS + sum) * LINE + column];
        put(sum, column, value);
    }
}
"""
KEEP_FLOATS = """\
    float *x = (float *)behind;
    auto keep = [&](int row, int d, float value) { x[row * STRIDE + d] = value; };
    auto keep_eight = [&](int row, int d, const Row<8> &values) {
        *(Row<8> *)(x + row * STRIDE + d) = values;
    };
"""
BODY = """\
    if (blockIdx.x >= BLOCKS) {
        start_dependents();
        wait();
        return;
    }
    const int first_row = 0;
    float *totals = (float *)shared_memory(), *scratch = totals + COUNT * ROWS * WIDTH;
    // Partial sums take the place of copies and rows.
    float *norms = scratch + 32, *partial = scratch + SMALL_BYTES / 4;
    Vector *ring = (Vector *)partial + threadIdx.x;
    char *behind = (char *)partial + STAGES * THREADS * sizeof(Vector);
{KEEP}
    const int rank = SPLIT > 1 ? find_cluster_rank() : 0, begin = rank * PART;
    const int depth = DEPTH - begin < PART ? DEPTH - begin : PART;
    int segment = 0, first = blockIdx.x / SPLIT, columns = 0;
    const Weight *matrices[COUNT];
{CHOOSE}
    first *= WIDTH;
    if (SPLIT > 1) arrive_cluster();
    const unsigned long long policy = find_stream_policy();
    // A sum of this block's part of the depth, to the block that adds up its column.
    auto put = [&](int sum, int column, float value) {
        float *place = totals + (rank * COUNT * ROWS + sum) * SHARE + column % SHARE;
        if (SPLIT > 1) write_peer(place, column / SHARE, value);
        else *place = value;
    };
    // Half a warp or more reads a row, each thread eight elements at a time.
    const int reader = threadIdx.x % READERS;
    auto find_row = [&](int turn) {
        const int row = turn * (THREADS / READERS) + threadIdx.x / READERS;
        return row < ROWS ? row : ROWS - 1;
    };
{STEPS}
    #pragma unroll
    for (int place = 0; place < PLACES; ++place) {
        fetch(place, place);
        commit_copies();
    }
    start_dependents();
{EARLY}
    wait();
{HOIST}
{START}
    sync_block();
    // The others have begun: their shared memory can be written.
    if (SPLIT > 1) await_cluster();
    // Theirs are needed at the end.
    if (SPLIT > 1)
        for (int index = threadIdx.x; index < NORMS * ROWS; index += THREADS)
            for (int peer = 0; peer < SPLIT; ++peer) {
                float *own = norms + rank * NORMS * ROWS + index;
                if (peer != rank) write_peer(own, peer, *own);
            }
    for (int base = 0; base < UNITS; base += PLACES) {
        #pragma unroll
        for (int place = 0; place < PLACES; ++place) {
            await_copies<PLACES - 1>();
            consume(base + place, place);
            fetch(base + place + PLACES, place);
            commit_copies();
        }
    }
    await_copies<0>();
{TOTALS}
    sync();
    // Copies and rows are no longer needed, nor are partial sums.
    float *chosen = partial;
    #pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int index = turn * THREADS + threadIdx.x;
        const int row = index / SHARE, column = first + rank * SHARE + index % SHARE;
        if (index >= ROWS * SHARE || column >= columns) continue;
        float sum[COUNT];
        #pragma unroll
        for (int m = 0; m < COUNT; ++m) {
            sum[m] = 0;
            #pragma unroll
            for (int part = 0; part < SPLIT; ++part)
                sum[m] += totals[((part * COUNT + m) * ROWS + row) * SHARE + index % SHARE];
        }
{FACTOR}
{FINISH}
    }
{CANDIDATES}
"""
