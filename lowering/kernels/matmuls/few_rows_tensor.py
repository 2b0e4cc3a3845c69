"""What takes the place of a thread's products and sums where tensor cores do them.

Note [Rows on tensor cores]
An instruction of a tensor core multiplies 16 columns of a matrix by 8 rows, 16 elements deep. A
warp copies 64 columns of 16 depths, eight threads beside each other a line of the memory: if each
copied what it multiplies, all lines would be asked for four times, which takes twice as long. So
threads exchange what they have copied: ``ldmatrix`` reads eight vectors of 16 bytes, one of a depth
each, and gives two depths of a column to a thread.

* In a line the vectors change places, by a number that is another one for each of eight depths that
  are read at once: then these lie in different banks.
* Which depth is where in an instruction is free, as long as matrix and rows agree. A thread is to
  find its part of a row, four elements, in eight bytes: so depths 4t and 4t + 1 are where the
  instruction has 2t and 2t + 1, and the next two where it has 2t + 8 and 2t + 9.
* Rows that there are not, of 8, are the last one again: their sums go nowhere.

(Layout of operands: PTX ISA, "Matrix fragments for mma.m16n8k16", and "ldmatrix".)

Rows are rounded to the type of the matrix, as the program says; sums are float32.
"""

from __future__ import annotations

from tracegraph.lowering.kernels.matmuls.few_rows_source import FETCH_COLUMNS

KEEP_HALVES = """\
    Weight *x = (Weight *)behind;
    auto keep = [&](int row, int d, float value) {
        x[row * STRIDE + d] = narrow(value, Weight());
    };
    auto keep_eight = [&](int row, int d, const Row<8> &values) {
        Vector packed;
        #pragma unroll
        for (int e = 0; e < 4; ++e)
            packed.words[e] = narrow(values.each[2 * e], Weight()).bits
                              | (unsigned)narrow(values.each[2 * e + 1], Weight()).bits << 16;
        *(Vector *)(x + row * STRIDE + d) = packed;
    };
"""
TENSOR_STEPS = f"""\
    constexpr int ACROSS = WIDTH / 64, LANES = WARPS / ACROSS, QUAD = 4, TILES = (ROWS + 7) / 8;
    constexpr int UNIT = LANES * 16, UNITS = (PART + UNIT - 1) / UNIT, APART = 4, FILLS = 1;
    const int thread = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = thread % 4;
    const int line = thread / 8, eighth = thread % 8, deep = warp / ACROSS * 16;
    const int lane = deep + line, own = warp % ACROSS * 64 + eighth * 8;
    Vector *copies = ring - thread;
    int turned[QUAD];
    #pragma unroll
    for (int i = 0; i < QUAD; ++i) turned[i] = (eighth ^ (i * 2 + line % 2)) - eighth;
    auto find_place = [&](int place, int each) {{
        return (place * GROUP + each) * THREADS + turned[each % QUAD];
    }};
    float sums[COUNT][TILES][4][4] = {{}};
{FETCH_COLUMNS}\
    auto consume = [&](int unit, int place) {{
        if (unit >= UNITS) return;
        sync_lanes();
        Halves values[TILES];
        #pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {{
            const int row = tile * 8 + thread / 4 < ROWS ? tile * 8 + thread / 4 : ROWS - 1;
            values[tile] = *(const Halves *)(x + row * STRIDE + unit * UNIT + deep + quarter * 4);
        }}
        #pragma unroll
        for (int m = 0; m < COUNT; ++m) {{
            const Vector *from = copies + (place * GROUP + m * QUAD + eighth / 2) * THREADS
                                 + (line / 2 * 2 + eighth % 2) * 8;
            #pragma unroll
            for (int j = 0; j < 4; ++j) {{
                const Vector pairs = load_turned(from + ((2 * j + line % 2) ^ eighth));
                #pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
                    multiply_tile(sums[m][tile][j], pairs.words, values[tile].words, Weight());
            }}
        }}
        // All threads have read what is overwritten next.
        sync_lanes();
    }};
    // What the copies of a last unit are multiplied by; they are zeros there.
    if (!FITS)
        for (int d = depth + threadIdx.x; d < UNITS * UNIT; d += THREADS)
            for (int row = 0; row < ROWS; ++row) keep(row, d, 0);
"""
TENSOR_TOTALS = """\
    sync_block();
    #pragma unroll
    for (int index = 0; index < COUNT * TILES * 16; ++index) {
        const int m = index / (TILES * 16), tile = index / 16 % TILES, j = index / 4 % 4;
        const int row = tile * 8 + quarter * 2 + index % 2, upper = index / 2 % 2;
        const int column = warp % ACROSS * 64 + j * 16 + upper * 8 + thread / 4;
        if (row < ROWS)
            partial[((warp / ACROSS * COUNT + m) * ROWS + row) * LINE + column]
                = sums[m][tile][j][index % 4];
    }
    sync_block();
    add_partial<LANES>(partial, put);
"""

# Of a matrix that has its rows as columns. Of 64 depths a thread finds its two of each eight beside
# each other: 16 for four instructions.
KEEP_TURNED = """\
    Weight *x = (Weight *)behind;
    auto find_two = [&](int row, int d) {
        return x + row * STRIDE + d / 64 * 64 + d % 8 / 2 * 16 + d % 64 / 8 * 2;
    };
    auto keep = [&](int row, int d, float value) {
        find_two(row, d)[d % 2] = narrow(value, Weight());
    };
    auto keep_eight = [&](int row, int d, const Row<8> &values) {
        #pragma unroll
        for (int e = 0; e < 8; e += 2)
            *(unsigned *)find_two(row, d + e)
                = narrow(values.each[e], Weight()).bits
                  | (unsigned)narrow(values.each[e + 1], Weight()).bits << 16;
    };
"""
# A warp copies 64 depths of 16 columns, eight threads beside each other a line of the memory.
TENSOR_ROW_STEPS = """\
    constexpr int ACROSS = WIDTH / 16, LANES = WARPS / ACROSS, QUAD = 4, TILES = (ROWS + 7) / 8;
    constexpr int UNIT = LANES * 64, UNITS = (PART + UNIT - 1) / UNIT;
    constexpr bool FITS = IS_EVEN && PART % UNIT == 0;
    const int thread = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = thread % 4;
    const int line = thread / 8, eighth = thread % 8, deep = warp / ACROSS * 64;
    const int own = warp % ACROSS * 16;
    Vector *copies = ring - thread;
    int turned[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i) turned[i] = (eighth ^ (i * 4 + line)) - eighth;
    float sums[COUNT][TILES][4] = {};
    const Slot slot = hold_slot(ring);
    const Weight *next[COUNT];
    #pragma unroll
    for (int m = 0; m < COUNT; ++m)
        next[m] = matrices[m] + (long long)(first + own + line) * DEPTH + begin + deep + eighth * 8;
    auto fetch = [&](int unit, int place) {
        if (unit >= UNITS) return;
        #pragma unroll
        for (int each = 0; each < GROUP; ++each) {
            const int m = each / QUAD, i = each % QUAD;
            const int to = (place * GROUP + each) * THREADS + turned[i % 2];
            const bool is_inside = first + own + line + i * 4 < columns;
            if (FITS || (is_inside && unit * UNIT + deep + eighth * 8 < depth))
                copy_streamed(slot, to, next[m] + (long long)i * 4 * DEPTH, policy);
            else ring[to] = Vector{};
        }
        #pragma unroll
        for (int m = 0; m < COUNT; ++m) next[m] += UNIT;
    };
    auto consume = [&](int unit, int place) {
        if (unit >= UNITS) return;
        sync_lanes();
        Vector values[TILES][2];
        #pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int row = tile * 8 + thread / 4 < ROWS ? tile * 8 + thread / 4 : ROWS - 1;
            const Weight *from = x + row * STRIDE + unit * UNIT + deep + quarter * 16;
            values[tile][0] = *(const Vector *)from;
            values[tile][1] = *(const Vector *)(from + 8);
        }
        #pragma unroll
        for (int m = 0; m < COUNT; ++m) {
            const Vector *from
                = copies + (place * GROUP + m * QUAD + line % 2 * 2 + eighth / 4) * THREADS
                  + eighth % 4 * 8;
            #pragma unroll
            for (int step = 0; step < 4; ++step) {
                const Vector pairs = load_rows(from + ((2 * step + line / 2) ^ eighth));
                #pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const unsigned (&words)[4] = values[tile][step / 2].words;
                    const unsigned own_two[2] = {words[step % 2 * 2], words[step % 2 * 2 + 1]};
                    multiply_tile(sums[m][tile], pairs.words, own_two, Weight());
                }
            }
        }
        // All threads have read what is overwritten next.
        sync_lanes();
    };
    // What the copies of a last unit are multiplied by; they are zeros there.
    if (!FITS)
        for (int d = depth + threadIdx.x; d < UNITS * UNIT; d += THREADS)
            for (int row = 0; row < ROWS; ++row) keep(row, d, 0);
"""
TENSOR_ROW_TOTALS = """\
    sync_block();
    #pragma unroll
    for (int index = 0; index < COUNT * TILES * 4; ++index) {
        const int m = index / (TILES * 4), tile = index / 4 % TILES;
        const int row = tile * 8 + quarter * 2 + index % 2;
        const int column = own + index / 2 % 2 * 8 + thread / 4;
        if (row < ROWS)
            partial[((warp / ACROSS * COUNT + m) * ROWS + row) * LINE + column]
                = sums[m][tile][index % 4];
    }
    sync_block();
    add_partial<LANES>(partial, put);
"""
