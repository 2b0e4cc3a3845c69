"""The kernels of `tiled` in C++: what is the same for all problems.

What a problem adds takes the place of names in braces: where lines are (``BASES``), what depends on
the group alone (``HEADS``), and the functions of one element.
"""

from __future__ import annotations

FUNCTIONS = """\
struct alignas(8) Pair { float values[2]; };
struct alignas(16) Four { float values[4]; };
// In vectors: of a line there is in memory, and where the next one is in shared memory.
constexpr int VECTORS = WIDTH / VECTOR, LINE = VECTORS + 1, STEPS = VECTORS / 2;
// Where the next line of partial results is: two of each of four lines lie in different banks.
constexpr int PART_LINE = WIDTH + 8;
typedef float Tile[4];
typedef Tile Mixed[WIDTH / 8];
DEVICE int own_lane() { return threadIdx.x % 32; }
DEVICE int own_warp() { return threadIdx.x / 32; }
// Divides vectors over all threads of the block; how often a thread goes around is known.
template <int COUNT, class Use> DEVICE void go_through(Use use) {
    #pragma unroll 8
    for (int turn = 0; turn < (COUNT + THREADS - 1) / THREADS; ++turn) {
        const int index = turn * THREADS + threadIdx.x;
        if (COUNT % THREADS == 0 || index < COUNT) use(turn, index);
    }
}
// The same, of lines; a turn of whole lines is further on by a number that the compiler knows.
template <int COUNT, class Use> DEVICE void go_through_lines(Use use) {
    constexpr bool IS_WHOLE = THREADS % VECTORS == 0;
    go_through<COUNT * VECTORS>([&](int turn, int index) {
        const int own = threadIdx.x;
        use(IS_WHOLE ? own / VECTORS + turn * (THREADS / VECTORS) : index / VECTORS,
            (IS_WHOLE ? own : index) % VECTORS);
    });
}
// Asks for lines, each one where another function finds it.
template <int COUNT, class Find>
DEVICE void ask_lines(Slot slot, int to, const Element *from, int stride, Find find) {
    go_through_lines<COUNT>([&](int line, int vector) {
        copy_async(slot, to + line * LINE + vector,
                   from + (long long)find(line) * stride + vector * VECTOR);
    });
}
template <int COUNT>
DEVICE void ask_lines(Slot slot, int to, const Element *from, int stride) {
    ask_lines<COUNT>(slot, to, from, stride, [](int line) { return line; });
}
template <class Half>
DEVICE void multiply(Tile &sums, const unsigned (&a)[4], const unsigned (&b)[2], Half) {
    multiply_tile(sums, a, b, Half());
}
// See Note [Floats in two parts]; the small products come first.
DEVICE void multiply(Tile &sums, const unsigned (&a)[4], const unsigned (&b)[2], float) {
    unsigned large[4], rest[4], other_large[2], other_rest[2];
    #pragma unroll
    for (int each = 0; each < 4; ++each) {
        large[each] = a[each];
        rest[each] = split_bits(large[each]);
    }
    #pragma unroll
    for (int each = 0; each < 2; ++each) {
        other_large[each] = b[each];
        other_rest[each] = split_bits(other_large[each]);
    }
    multiply_tile(sums, rest, other_large, float());
    multiply_tile(sums, large, other_rest, float());
    multiply_tile(sums, large, other_large, float());
}
// Adds the products of a warp's 16 lines with others, 16 for each pair of tiles that it has.
template <int TILES, class Holds>
DEVICE void multiply_lines(Tile (&sums)[TILES], const Vector *own, const Vector *others,
                           Holds holds) {
    const int lane = own_lane(), line = lane % 8, low = lane / 8 % 2, high = lane / 16;
    own += (low * 8 + line) * LINE + high;
    others += (high * 8 + line) * LINE + low;
    #pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const Vector a = load_rows(own + step * 2);
        #pragma unroll
        for (int pair = 0; pair < TILES / 2; ++pair) {
            if (!holds(pair * 2)) continue;
            const Vector b = load_rows(others + pair * SHARERS * 16 * LINE + step * 2);
            const unsigned first[2] = {b.words[0], b.words[1]};
            const unsigned second[2] = {b.words[2], b.words[3]};
            multiply(sums[pair * 2], a.words, first, Element());
            multiply(sums[pair * 2 + 1], a.words, second, Element());
        }
    }
}
// What rounding has left of two weights.
template <class Half> DEVICE unsigned pack_rest(float low, float high, unsigned packed, Half) {
    return pack_pair(low - widen(Half{(unsigned short)packed}),
                     high - widen(Half{(unsigned short)(packed >> 16)}), Half());
}
// Adds 16 lines, each multiplied by what two tiles have for it: see Note [Weights in two parts].
template <class Half>
DEVICE void mix_lines(Mixed &mixed, const Tile &first, const Tile &second, const Vector *lines,
                      Half) {
    const int lane = own_lane();
    unsigned a[4], rest[4];
    #pragma unroll
    for (int each = 0; each < 4; ++each) {
        const Tile &weights = each / 2 ? second : first;
        const float low = weights[each % 2 * 2], high = weights[each % 2 * 2 + 1];
        a[each] = pack_pair(low, high, Half());
        rest[each] = pack_rest(low, high, a[each], Half());
    }
    lines += (lane / 8 % 2 * 8 + lane % 8) * LINE + lane / 16;
    #pragma unroll
    for (int two = 0; two < WIDTH / 16; ++two) {
        const Vector b = load_turned(lines + two * 2);
        const unsigned low[2] = {b.words[0], b.words[1]}, high[2] = {b.words[2], b.words[3]};
        multiply(mixed[two * 2], rest, low, Half());
        multiply(mixed[two * 2 + 1], rest, high, Half());
        multiply(mixed[two * 2], a, low, Half());
        multiply(mixed[two * 2 + 1], a, high, Half());
    }
}
// Where an instruction has lines q and q + 4 are 2q and 2q + 1, whose weights a thread has.
DEVICE void mix_lines(Mixed &mixed, const Tile &first, const Tile &second, const Vector *lines,
                      float) {
    const int lane = own_lane();
    const float *from = (const float *)(lines + lane % 4 * 2 * LINE) + lane / 4;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Tile &weights = half ? second : first;
        const unsigned a[4] = {read_bits(weights[0]), read_bits(weights[2]),
                               read_bits(weights[1]), read_bits(weights[3])};
        #pragma unroll
        for (int eight = 0; eight < WIDTH / 8; ++eight) {
            const float *place = from + half * 8 * LINE * VECTOR + eight * 8;
            const unsigned b[2] = {read_bits(place[0]), read_bits(place[LINE * VECTOR])};
            multiply(mixed[eight], a, b, float());
        }
    }
}
template <int COUNT> DEVICE void store_vector(float *to, const float (&values)[COUNT]) {
    #pragma unroll
    for (int e = 0; e < COUNT; e += 4)
        *(Four *)(to + e) = {values[e], values[e + 1], values[e + 2], values[e + 3]};
}
template <class Half> DEVICE Vector pack_eight(const float (&values)[8]) {
    return {pack_pair(values[0], values[1], Half()), pack_pair(values[2], values[3], Half()),
            pack_pair(values[4], values[5], Half()), pack_pair(values[6], values[7], Half())};
}
DEVICE void store_vector(bfloat16 *to, const float (&values)[8]) {
    *(Vector *)to = pack_eight<bfloat16>(values);
}
DEVICE void store_vector(float16 *to, const float (&values)[8]) {
    *(Vector *)to = pack_eight<float16>(values);
}
// Adds what the warps of a strip have, and stores the lines of all strips.
template <class Result>
DEVICE void store_lines(Result *to, int stride, float *parts, const Mixed &mixed) {
    const int lane = own_lane();
    float *own = parts + (own_warp() * 16 + lane / 4) * PART_LINE + lane % 4 * 2;
    // All have read what was there.
    sync_block();
    #pragma unroll
    for (int eight = 0; eight < WIDTH / 8; ++eight) {
        *(Pair *)(own + eight * 8) = {mixed[eight][0], mixed[eight][1]};
        *(Pair *)(own + 8 * PART_LINE + eight * 8) = {mixed[eight][2], mixed[eight][3]};
    }
    sync_block();
    go_through_lines<STRIPS * 16>([&](int line, int vector) {
        const int at = vector * VECTOR;
        const float *from = parts + (line / 16 * SHARERS * 16 + line % 16) * PART_LINE + at;
        float totals[VECTOR] = {};
        auto add = [&](const float *part) {
            #pragma unroll
            for (int e = 0; e < VECTOR; e += 4) {
                const Four four = *(const Four *)(part + e);
                #pragma unroll
                for (int each = 0; each < 4; ++each) totals[e + each] += four.values[each];
            }
        };
        #pragma unroll
        for (int sharer = 0; sharer < SHARERS; ++sharer) add(from + sharer * 16 * PART_LINE);
        store_vector(to + (long long)line * stride + at, totals);
    });
}
"""

ROW_FUNCTIONS = """\
// Of the columns.
constexpr int EVERY = COLUMNS / 16;
// Joins what the threads of a row have of a value, then what its warps have.
template <class Join> DEVICE void join_row(float (&values)[2], float *scratch, Join join) {
    #pragma unroll
    for (int upper = 0; upper < 2; ++upper)
        #pragma unroll
        for (int mask = 1; mask < 4; mask *= 2)
            values[upper] = join(values[upper], shuffle_xor(values[upper], mask));
    if (SHARERS == 1) return;
    const int lane = own_lane(), warp = own_warp();
    #pragma unroll
    for (int upper = 0; upper < 2; ++upper)
        if (lane % 4 == 0) scratch[warp * 16 + upper * 8 + lane / 4] = values[upper];
    sync_block();
    #pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
        const float *from = scratch + warp / SHARERS * SHARERS * 16 + upper * 8 + lane / 4;
        values[upper] = from[0];
        #pragma unroll
        for (int sharer = 1; sharer < SHARERS; ++sharer)
            values[upper] = join(values[upper], from[sharer * 16]);
    }
}
"""
# Works on so many strips of columns for each warp; true where all have to be worked on.
ROW_BODY = """\
    constexpr int TILES = PAIRS * 2;
    constexpr int LINES = (PAIRS * SHARERS < EVERY ? PAIRS * SHARERS : EVERY) * 16;
    const int first = block * STRIPS * 16;
{BASES}
    Vector *shared = (Vector *)shared_memory();
    float *scratch = (float *)((char *)shared + LINES_BYTES);
    const Slot slot = hold_slot(shared);
    const int lane = own_lane(), strip = own_warp() / SHARERS, sharer = own_warp() % SHARERS;
    const int own = strip * 16;
    // Warps of a strip take turns: each has as many strips of columns, or one less.
    auto place = [&](int tile) { return tile / 2 * SHARERS + sharer; };
    auto holds = [&](int tile) { return PAIRS * SHARERS <= EVERY || place(tile) < EVERY; };
    auto find = [&](int line) { return {FIND}; };
    auto column = [&](int tile) { return find(place(tile) * 16) + tile % 2 * 8; };
{COPIES}
{HEADS}
    float sums[MATMULS][TILES][4] = {};
    float rows[ROW_VALUES + 1][2];
    await_copies<1>();
    sync_block();
{STEPS}
    Mixed mixed = {};
    #pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair)
        if (holds(pair * 2))
            mix_lines(mixed, sums[0][pair * 2], sums[0][pair * 2 + 1],
                      shared + MATRIX + place(pair * 2) * 16 * LINE, Element());
    store_lines({RESULT}, (float *)shared, mixed);
    return false;
"""
ROW_KERNEL = """\
    if (STARTS_EARLY) start_dependents();
    wait();
    constexpr int BLOCKS = ROWS / 16 / STRIPS;
    attend<SHARE / 16>(blockIdx.x / BLOCKS, blockIdx.x % BLOCKS, {GIVEN});
"""
# Blocks that see most begin first, so that the last ones end at about the same time. Where hidden
# weights are not zero all begins again, with all columns.
HIDDEN_ROW_KERNEL = """\
    if (STARTS_EARLY) start_dependents();
    wait();
    const int group = blockIdx.x % GROUPS, block = ORDER[blockIdx.x / GROUPS];
    bool again = false;
    for (int pairs = COUNTS[block]; pairs > 0; pairs = again ? SHARE / 16 : 0) {
{CHOICES}
    }
"""
TEST = """\
    bool adds = false;
    #pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
        const int r = first + own + upper * 8 + lane / 4;
{ROW}
        adds |= {TEST} != 0;
    }
    if (PAIRS * SHARERS < EVERY && sync_any(adds)) {
        await_copies<0>();
        return true;
    }
"""
# Whatever a step computes of each element.
ELEMENTS = """\
    #pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
        const int r = first + own + upper * 8 + lane / 4;
{ROW}
        #pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (!holds(tile)) continue;
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int t = column(tile) + lane % 4 * 2 + e;
{VALUE}
            }
        }
{END}
    }
"""
JOIN = """\
    join_row(rows[{NUMBER}], scratch + {NUMBER} * STRIPS * SHARERS * 16,
             [](float a, float b) { return {JOINED}; });
"""
KEPT = """\
    if (lane % 4 == 0 && sharer == 0)
        #pragma unroll
        for (int row_value = 0; row_value < ROW_VALUES; ++row_value)
            #pragma unroll
            for (int upper = 0; upper < 2; ++upper)
                kept[((long long)group * ROW_VALUES + row_value) * ROWS + first + own + upper * 8
                     + lane / 4] = rows[row_value][upper];
"""

COLUMN_BODY = """\
    if (STARTS_EARLY) start_dependents();
    wait();
    constexpr int UNIT = SHARERS * SHARE, UNITS = ROWS / UNIT, TILES = SHARE / 8;
    // In vectors: rows that are copied at once, and the columns behind two of them.
    constexpr int VALUES = UNIT / 4, PLACE = ARRAYS * UNIT * LINE + ROW_VALUES * VALUES;
    constexpr int OWN = (UNITS > 1 ? 2 : 1) * PLACE;
{PLACE}
    const int first = block * STRIPS * 16;
{BASES}
    Vector *shared = (Vector *)shared_memory();
    const Slot slot = hold_slot(shared);
    const float *given = rows + (long long)group * ROW_VALUES * ROWS;
    auto find = [&](int turn) { return {FIND}; };
    auto ask = [&](int turn) {
        const int place = turn % 2 * PLACE, row = find(turn) * UNIT;
{COPIES}
        go_through<ROW_VALUES * VALUES>([&](int, int index) {
            copy_async(slot, place + ARRAYS * UNIT * LINE + index,
                       given + index / VALUES * ROWS + row + index % VALUES * 4);
        });
    };
{OWN}
    ask(0);
    commit_copies();
{HEADS}
    const int lane = own_lane(), own = own_warp() / SHARERS * 16;
    const int begin = own_warp() % SHARERS * SHARE;
{TURNS}
    Mixed mixed[OUTPUTS] = {};
    #pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        await_copies<0>();
        // All have read what is overwritten next.
        sync_block();
        if (turn + 1 < turns) ask(turn + 1);
        commit_copies();
        const int unit = find(turn);
        const Vector *place = shared + turn % 2 * PLACE;
        const float *kept = (const float *)(place + ARRAYS * UNIT * LINE) + begin;
        place += begin * LINE;
        auto holds = [](int) { return true; };
        float sums[MATMULS][TILES][4] = {};
{MATMULS}
        float weights[OUTPUTS][TILES][4];
        #pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int line = tile * 8 + lane % 4 * 2 + e;
                const int r = unit * UNIT + begin + line;
{ROW}
                #pragma unroll
                for (int upper = 0; upper < 2; ++upper) {
                    const int t = first + own + upper * 8 + lane / 4;
{WEIGHTS}
                }
            }
        #pragma unroll
        for (int pair = 0; pair < TILES / 2; ++pair) {
{MIXED}
        }
    }
    await_copies<0>();
"""
PLACE = """\
    constexpr int BLOCKS = COLUMNS / 16 / STRIPS;
    const int group = blockIdx.x / BLOCKS, block = blockIdx.x % BLOCKS;
"""
# Blocks that see most begin first.
HIDDEN_PLACE = """\
    const int group = blockIdx.x % GROUPS, block = ORDER[blockIdx.x / GROUPS];
"""
TURNS = """\
    // The number of turns is hidden from the compiler: unrolled, the loop needs too many registers.
    const int turns = UNITS * (int)(blockDim.x / THREADS);
"""
HIDDEN_TURNS = """\
    int turns = COUNTS[block];
"""
# Where hidden weights are not zero no unit of rows is left out.
UNIT_TEST = """\
    bool adds = false;
    for (int row = turns * UNIT + threadIdx.x; row < ROWS; row += THREADS) {
        const int r = find(row / UNIT) * UNIT + row % UNIT;
{ROW}
        adds |= {TEST} != 0;
    }
    if (sync_any(adds)) turns = UNITS;
"""
