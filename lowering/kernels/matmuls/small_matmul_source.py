"""The kernel of `small_matmul` in C++: what is the same for all problems.

What a problem adds takes the place of names in braces, as in `few_rows_source`.
"""

from __future__ import annotations

FUNCTIONS = """\
struct alignas(8) Pair { float values[2]; };
typedef float Tile[4];
// An infinite value has no smaller part: what is left of it is not a number.
DEVICE float join_parts(float sum, float rest) { return sum - sum == 0 ? sum + rest : sum; }
"""

# Depths of an instruction of a tensor core; a thread has two that lie side by side in memory where
# the instruction has q and q + 4.
BODY = """\
    float *scratch = (float *)shared_memory();
    const int first_row = blockIdx.x % ROW_TILES * ROWS;
    float *norms = scratch + 32 - first_row;
    float *x = scratch + 32 + NORM_FLOATS, *weights = x + ROWS * STRIDE;
    // Partial sums take the place of rows and weights.
    float *partial = x;
    const int rank = 0, begin = 0, depth = DEPTH;
    int segment = 0, first = blockIdx.x / ROW_TILES, columns = 0;
    const float *matrices[COUNT];
{CHOOSE}
    first *= WIDTH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = lane / 4, quarter = lane % 4;
    // Threads lie across a line so that each one's address grows by a number the compiler knows.
    constexpr int ACROSS = THREADS % VECTORS ? 32 : VECTORS, APART = THREADS / ACROSS;
    const int own_line = threadIdx.x / ACROSS, own_vector = threadIdx.x % ACROSS;
    const int stride = IS_TRANSPOSED ? DEPTH : columns;
    const Slot slot = hold_slot((Vector *)weights + own_line * (LINE / 4) + own_vector);
    #pragma unroll
    for (int m = 0; m < COUNT; ++m) {
        const float *from = matrices[m] + (IS_TRANSPOSED ? (long long)first * DEPTH : first)
                            + (long long)own_line * stride + own_vector * 4;
        #pragma unroll 4
        for (int turn = 0; turn < (LINES + APART - 1) / APART; ++turn, from += APART * stride)
            #pragma unroll
            for (int part = 0; part < VECTORS; part += ACROSS) {
                const int line = turn * APART + own_line, vector = part + own_vector;
                if (LINES % APART && line >= LINES) continue;
                if (VECTORS % ACROSS && vector >= VECTORS) continue;
                const int column = first + (IS_TRANSPOSED ? line : vector * 4);
                const int to = (m * LINES + turn * APART) * (LINE / 4) + part;
                if (IS_EVEN || column < columns) copy_async(slot, to, from + part * 4);
                else ((Vector *)weights)[(m * LINES + line) * (LINE / 4) + vector] = Vector{};
            }
    }
    commit_copies();
    start_dependents();
    const int reader = threadIdx.x % READERS;
    auto find_row = [&](int turn) {
        const int row = first_row + turn * (THREADS / READERS) + threadIdx.x / READERS;
        return row < ALL_ROWS ? row : ALL_ROWS - 1;
    };
    auto keep = [&](int row, int d, float value) { x[(row - first_row) * STRIDE + d] = value; };
    auto keep_eight = [&](int row, int d, const Row<8> &values) {
        *(Row<8> *)(x + (row - first_row) * STRIDE + d) = values;
    };
{EARLY}
    wait();
{HOIST}
{START}
    await_copies<0>();
    sync_block();
    // Of the larger parts, and of the smaller ones.
    Tile sums[COUNT][WIDTH / 8] = {}, rests[COUNT][WIDTH / 8] = {};
    const int strip = warp % STRIPS, sharer = warp / STRIPS;
    const float *own = x + (strip * 16 + group) * STRIDE + quarter * 2;
    #pragma unroll 4
    for (int step = 0; step < (DEPTH / 8 + SHARERS - 1) / SHARERS; ++step) {
        const int d = (step * SHARERS + sharer) * 8;
        if (DEPTH % (SHARERS * 8) && d >= DEPTH) break;
        const Pair low = *(const Pair *)(own + d), high = *(const Pair *)(own + 8 * STRIDE + d);
        unsigned a[4] = {read_bits(low.values[0]), read_bits(high.values[0]),
                         read_bits(low.values[1]), read_bits(high.values[1])}, rest[4];
        #pragma unroll
        for (int each = 0; each < 4; ++each) rest[each] = split_bits(a[each]);
        #pragma unroll
        for (int m = 0; m < COUNT; ++m)
            #pragma unroll
            for (int eight = 0; eight < WIDTH / 8; ++eight) {
                const int column = eight * 8 + group, deep = d + quarter * 2;
                const float *from = weights + m * LINES * LINE
                                    + (IS_TRANSPOSED ? column * LINE + deep : deep * LINE + column);
                const unsigned b[2] = {round_bits(from[0]),
                                       round_bits(from[IS_TRANSPOSED ? 1 : LINE])};
                multiply_tile(rests[m][eight], rest, b, float());
                multiply_tile(sums[m][eight], a, b, float());
            }
    }
    // All have read what is overwritten next.
    sync_block();
    #pragma unroll
    for (int m = 0; m < COUNT; ++m)
        #pragma unroll
        for (int eight = 0; eight < WIDTH / 8; ++eight)
            #pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                const int row = strip * 16 + upper * 8 + group, column = eight * 8 + quarter * 2;
                const Tile &sum = sums[m][eight], &more = rests[m][eight];
                *(Pair *)(partial + ((sharer * COUNT + m) * ROWS + row) * PART_LINE + column)
                    = {join_parts(sum[upper * 2], more[upper * 2]),
                       join_parts(sum[upper * 2 + 1], more[upper * 2 + 1])};
            }
    sync_block();
    #pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int index = turn * THREADS + threadIdx.x;
        const int row = first_row + index / WIDTH, column = first + index % WIDTH;
        if (index >= ROWS * WIDTH || row >= ALL_ROWS || column >= columns) continue;
        float sum[COUNT];
        #pragma unroll
        for (int m = 0; m < COUNT; ++m) {
            sum[m] = 0;
            #pragma unroll
            for (int part = 0; part < SHARERS; ++part)
                sum[m] += partial[((part * COUNT + m) * ROWS + index / WIDTH) * PART_LINE
                                  + index % WIDTH];
        }
{FACTOR}
{FINISH}
    }
"""
