"""What the kernel of a matmul in float32 is made of, in C++."""

from __future__ import annotations

# What a thread holds of a warpgroup's 64 by 128 sums.
_SUMS = 64


def _write_multiply() -> str:
    """Returns the instruction that multiplies, with its operands named."""
    sums = ", ".join(f"%{number}" for number in range(_SUMS))
    listed = ", ".join(f'"+f"(sums[{number}])' for number in range(_SUMS))
    names = [f"%{_SUMS + place}" for place in range(7)]
    return f"""\
// By a warpgroup, to 64 by 128 sums: 64 by 16 times 16 by 128 values, the left ones in registers.
// Where the right ones are turned, memory has their columns beside each other.
template <int turned>
DEVICE void multiply_async(float (&sums)[{_SUMS}], const unsigned (&left)[4], Place right,
                           int adds) {{
    asm volatile("{{ .reg .pred adds; setp.ne.b32 adds, {names[5]}, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{sums}}}, "
                 "{{{", ".join(names[:4])}}}, {names[4]}, adds, 1, 1, {names[6]}; }}"
                 : {listed}
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right.bits),
                   "r"(adds), "n"(turned));
}}
"""


FUNCTIONS = (
    """\
#ifdef __CUDACC__
// Where a part of a tile is: eight vectors beside each other are eight columns of eight depths, or
// turned. The next eight columns are COLUMN_BYTES further on, the next eight depths DEPTH_BYTES
// (PTX ISA, "Matrix descriptor").
struct Place { unsigned long long bits; };
DEVICE Place find_place(const char *shared) {
    const unsigned long long address = (unsigned)__cvta_generic_to_shared(shared);
    return {(address & 0x3FFFF) >> 4 | (unsigned long long)(DEPTH_BYTES >> 4) << 16
            | (unsigned long long)(COLUMN_BYTES >> 4) << 32};
}
DEVICE Place move_place(Place place, int bytes) { return {place.bits + (bytes >> 4)}; }
"""
    + _write_multiply()
    + """\
DEVICE void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int count> DEVICE void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(count) : "memory");
}
typedef unsigned long long Barrier;
DEVICE unsigned find_barrier(Barrier *barrier) {
    return (unsigned)__cvta_generic_to_shared(barrier);
}
DEVICE void open_barrier(Barrier *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :: "r"(find_barrier(barrier)), "r"(count) : "memory");
}
DEVICE void arrive_at(Barrier *barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }"
                 :: "r"(find_barrier(barrier)) : "memory");
}
DEVICE void await_phase(Barrier *barrier, int phase) {
    asm volatile("{ .reg .pred done;\\n"
                 "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
                 "@!done bra AGAIN; }" :: "r"(find_barrier(barrier)), "r"(phase) : "memory");
}
// What a thread has stored is seen by tensor cores, which read shared memory another way.
DEVICE void show_stored() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int count> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(count));
}
template <int count> DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(count));
}
DEVICE unsigned narrow_pair(float low, float high) {
    unsigned pair; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
DEVICE Halves load_pair(const void *global) {
    Halves v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.words[0]), "=r"(v.words[1]) : "l"(global) : "memory");
    return v;
}
#endif
struct alignas(8) Pair { float values[2]; };
DEVICE bool is_finite(float value) { return value - value == 0; }
DEVICE void split_pair(float low, float high, unsigned (&parts)[3]) {
    #pragma unroll
    for (int part = 0; part < 3; ++part) {
        const unsigned rounded = narrow_pair(low, high);
        parts[part] = rounded;
        low -= literal(rounded << 16);
        high -= literal(rounded & 0xFFFF0000u);
    }
}
template <bool BY_DEPTH, int LINES> DEVICE constexpr long long find(int line, int depth) {
    return BY_DEPTH ? (long long)line * DEPTH + depth : (long long)depth * LINES + line;
}
template <bool BY_DEPTH, int LINES>
DEVICE bool holds_nan(const float *array, int line, int depth, int end, int step) {
    bool found = false;
    if (line < LINES) {
        #pragma unroll 16
        for (; depth < end; depth += step) {
            const float value = array[find<BY_DEPTH, LINES>(line, depth)];
            found |= value != value;
        }
    }
    return found;
}
// The bits that lanes have set whose numbers differ in a mask.
DEVICE unsigned join_bits(unsigned bits, int from, int to) {
    for (int mask = from; mask < to; mask *= 2) bits |= read_bits(shuffle_xor(literal(bits), mask));
    return bits;
}
// Where an instruction has depths 2t, 2t + 1, 2t + 8 and 2t + 9 are 4t to 4t + 3, of one thread.
//
// Of 16 depths two rows with four values each.
typedef unsigned Rows[STEP / 16][2][4];
// Rows of a warp, which its threads load, split and multiply. Where memory has rows beside each
// other, a thread has two neighbours, otherwise two that are eight apart.
struct Left {
    static constexpr bool IS_EVEN = ROWS % TILE == 0 && DEPTH % STEP == 0;
    DEVICE int find_row() {
        const int thread = threadIdx.x % 32;
        return threadIdx.x / 32 * 16 + (LEFT_BY_DEPTH ? thread / 4 : thread / 4 * 2);
    }
    DEVICE void load(const float *array, int row, int depth, Rows &values) {
        row += find_row();
        depth += threadIdx.x % 4 * 4;
        #pragma unroll
        for (int deep = 0; deep < STEP / 16; ++deep) {
            if (LEFT_BY_DEPTH) {
                #pragma unroll
                for (int upper = 0; upper < 2; ++upper) {
                    const int line = row + upper * 8, at = depth + deep * 16;
                    Vector four{};
                    if (IS_EVEN || (line < ROWS && at < DEPTH))
                        four = load_vector(array + find<true, ROWS>(line, at));
                    #pragma unroll
                    for (int each = 0; each < 4; ++each)
                        values[deep][upper][each] = four.words[each];
                }
            } else {
                #pragma unroll
                for (int each = 0; each < 4; ++each) {
                    const int at = depth + deep * 16 + each;
                    Halves pair{};
                    if (IS_EVEN || (row < ROWS && at < DEPTH))
                        pair = load_pair(array + find<false, ROWS>(row, at));
                    values[deep][0][each] = pair.words[0];
                    values[deep][1][each] = pair.words[1];
                }
            }
        }
    }
    DEVICE void split(const Rows &values, unsigned (&parts)[STEP / 16][3][4]) {
        #pragma unroll
        for (int each = 0; each < STEP / 16 * 4; ++each) {
            const int deep = each / 4, upper = each % 2, pair = each / 2 % 2;
            unsigned split[3];
            split_pair(literal(values[deep][upper][pair * 2]),
                       literal(values[deep][upper][pair * 2 + 1]), split);
            #pragma unroll
            for (int part = 0; part < 3; ++part) parts[deep][part][pair * 2 + upper] = split[part];
        }
    }
};
// Columns, which other warps load, split and store where tensor cores find them.
struct Right {
    static constexpr bool IS_EVEN = COLUMNS % TILE == 0 && DEPTH % STEP == 0;
    DEVICE constexpr int step_column(int each) {
        return RIGHT_BY_DEPTH ? each % 4 * 32 : each % 2 * 64;
    }
    DEVICE constexpr int step_depth(int each) {
        return RIGHT_BY_DEPTH ? each / 4 * 16 : each / 4 * 16 + each / 2 % 2 * 2;
    }
    DEVICE int find_column() {
        const int thread = threadIdx.x % 32, warp = (threadIdx.x - MULTIPLIERS) / 32;
        return RIGHT_BY_DEPTH ? warp * 8 + thread / 4
                              : warp * 16 + thread / 16 * 8 + thread % 2 * 4;
    }
    DEVICE int find_depth() {
        const int thread = threadIdx.x % 32;
        return RIGHT_BY_DEPTH ? thread % 4 * 4 : thread / 4 % 4 * 4 + thread / 2 % 2;
    }
    DEVICE void load(const float *array, int column, int depth, Vector (&values)[EACH]) {
        column += find_column();
        depth += find_depth();
        const float *from = array + find<RIGHT_BY_DEPTH, COLUMNS>(column, depth);
        #pragma unroll
        for (int each = 0; each < EACH; ++each) {
            const int columns = step_column(each), depths = step_depth(each);
            values[each] = Vector{};
            if (IS_EVEN || (column + columns < COLUMNS && depth + depths < DEPTH))
                values[each] = load_vector(from + find<RIGHT_BY_DEPTH, COLUMNS>(columns, depths));
        }
    }
    DEVICE void store(char *tile, const Vector (&values)[EACH]) {
        const int thread = threadIdx.x % 32;
        tile += find_column() / 8 * COLUMN_BYTES + (RIGHT_BY_DEPTH ? thread * 4 : thread % 16 * 8);
        #pragma unroll
        for (int each = 0; each < EACH; ++each) {
            unsigned parts[2][3];
            #pragma unroll
            for (int pair = 0; pair < 2; ++pair)
                split_pair(literal(values[each].words[pair * 2]),
                           literal(values[each].words[pair * 2 + 1]), parts[pair]);
            const int eight = RIGHT_BY_DEPTH ? each / 4 * 2 : each / 2;
            char *to = tile + step_column(each) / 8 * COLUMN_BYTES + eight * DEPTH_BYTES;
            #pragma unroll
            for (int part = 0; part < 3; ++part, to += PART_BYTES) {
                if (RIGHT_BY_DEPTH) {
                    *(unsigned *)to = parts[0][part];
                    *(unsigned *)(to + DEPTH_BYTES) = parts[1][part];
                } else *(Halves *)to = {parts[0][part], parts[1][part]};
            }
        }
    }
};
// Where a block is in its work: tiles of the result, and of each a part of the depths.
struct Cursor {
    int item, row, column, part, step, end;
};
DEVICE void open_item(Cursor &cursor, int item) {
    cursor.item = item;
    cursor.part = item / TILES;
    cursor.row = item % TILES % ROW_TILES * TILE;
    cursor.column = item % TILES / ROW_TILES * TILE;
    cursor.step = cursor.part * STEPS / SPLIT;
    cursor.end = (cursor.part + 1) * STEPS / SPLIT;
}
DEVICE bool is_open(const Cursor &cursor) { return cursor.item < ITEMS; }
DEVICE void open_next(Cursor &cursor) { open_item(cursor, cursor.item + gridDim.x); }
DEVICE void advance(Cursor &cursor) { if (++cursor.step == cursor.end) open_next(cursor); }
"""
)

BODY = """\
    char *tiles = shared_memory();
    Barrier *full = (Barrier *)(tiles + STAGES * STAGE_BYTES), *empty = full + STAGES;
    if (threadIdx.x == 0)
        for (int stage = 0; stage < STAGES; ++stage) {
            open_barrier(full + stage, SPLITTERS / 32);
            open_barrier(empty + stage, MULTIPLIERS / 32);
        }
    sync_block();
    wait();
    const int thread = threadIdx.x % 32;
    int stage = 0, phase = 0;
    auto go_on = [&] { if (++stage == STAGES) { stage = 0; phase ^= 1; } };
    Left rows;
    Right columns;
    Cursor cursor;
    open_item(cursor, blockIdx.x);
    if (threadIdx.x >= MULTIPLIERS) {
        give_registers<104>();
        Vector values[2][EACH];
        columns.load(right, cursor.column, cursor.step * STEP, values[0]);
        while (true) {
            #pragma unroll
            for (int turn = 0; turn < 2; ++turn) {
                advance(cursor);
                const bool goes_on = is_open(cursor);
                if (goes_on)
                    columns.load(right, cursor.column, cursor.step * STEP, values[1 - turn]);
                await_phase(empty + stage, phase ^ 1);
                columns.store(tiles + stage * STAGE_BYTES, values[turn]);
                show_stored();
                sync_lanes();
                if (thread == 0) arrive_at(full + stage);
                if (!goes_on) return;
                go_on();
            }
        }
    }
    take_registers<200>();
    Rows values;
    rows.load(left, cursor.row, cursor.step * STEP, values);
    while (is_open(cursor)) {
        float totals[64] = {};
        const Cursor first = cursor;
        while (cursor.item == first.item) {
            float sums[64];
            unsigned x[STEP / 16][3][4];
            rows.split(values, x);
            advance(cursor);
            if (is_open(cursor)) rows.load(left, cursor.row, cursor.step * STEP, values);
            await_phase(full + stage, phase);
            const Place y = find_place(tiles + stage * STAGE_BYTES);
            open_products();
{PRODUCTS}
            commit_products();
            await_products<0>();
            if (thread == 0) arrive_at(empty + stage);
            go_on();
            #pragma unroll
            for (int each = 0; each < 64; ++each) totals[each] += sums[each];
        }
        float *to = result + (long long)first.part * ROWS * COLUMNS;
        const int first_row = first.row + rows.find_row();
        const int first_column = first.column + thread % 4 * 2;
        bool is_plain = true;
        #pragma unroll
        for (int each = 0; each < 64; each += 2) {
            const int row = first_row + each / 2 % 2 * ROW_STEP;
            const int column = first_column + each / 4 * 8;
            if (row >= ROWS || column >= COLUMNS) continue;
            *(Pair *)(to + (long long)row * COLUMNS + column) = {totals[each], totals[each + 1]};
            is_plain &= is_finite(totals[each]) && is_finite(totals[each + 1]);
        }
        if (!join_bits(!is_plain, 1, 32)) continue;
        // A bit for each of a thread's two rows, and one for each of its 32 columns. Four lanes
        // have the same rows, eight the same columns: each looks through a part.
        const int start = first.step * STEP;
        const int end = first.end * STEP < DEPTH ? first.end * STEP : DEPTH;
        unsigned row_nans = 0, column_nans = 0;
        for (int upper = 0; upper < 2; ++upper)
            row_nans |= (unsigned)holds_nan<LEFT_BY_DEPTH, ROWS>(
                left, first_row + upper * ROW_STEP, start + thread % 4, end, 4) << upper;
        row_nans = join_bits(row_nans, 1, 4);
        if (join_bits(row_nans != 3, 4, 32))
            // The two columns of a pair, then those of the pair eight pairs on.
            for (int each = thread / 4 * 2; each < 32; each += each % 2 ? 15 : 1)
                column_nans |= (unsigned)holds_nan<RIGHT_BY_DEPTH, COLUMNS>(
                    right, first_column + each / 2 * 8 + each % 2, start, end, 1) << each;
        column_nans = join_bits(column_nans, 4, 32);
        #pragma unroll 1
        for (int each = 0; each < 64; ++each) {
            const int row = first_row + each / 2 % 2 * ROW_STEP;
            const int column = first_column + each / 4 * 8 + each % 2;
            const bool is_nan = row_nans >> each / 2 % 2 & 1
                                || column_nans >> (each / 4 * 2 + each % 2) & 1;
            if (row >= ROWS || column >= COLUMNS || is_nan) continue;
            float *place = to + (long long)row * COLUMNS + column;
            if (is_finite(*place)) continue;
            float sum = 0;
            for (int depth = start; depth < end; ++depth)
                sum += left[find<LEFT_BY_DEPTH, ROWS>(row, depth)]
                       * right[find<RIGHT_BY_DEPTH, COLUMNS>(column, depth)];
            *place = sum;
        }
    }
"""
