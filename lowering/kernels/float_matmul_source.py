"""What the kernel of a matmul in float32 is made of, in C++."""

from __future__ import annotations

# What a thread holds of a warpgroup's 64 by 128 sums.
_SUMS = 64


def _write_multiply() -> str:
    """Returns the instruction that multiplies, with its operands named."""
    sums = ", ".join(f"%{number}" for number in range(_SUMS))
    listed = ", ".join(f'"+f"(sums[{number}])' for number in range(_SUMS))
    left, right, adds, left_turned, right_turned = (f"%{_SUMS + place}" for place in range(5))
    return f"""\
// By a warpgroup, to 64 by 128 sums: 64 by 16 times 16 by 128 values. A turned side has its lines
// beside each other.
template <int left_turned, int right_turned>
DEVICE void multiply_async(float (&sums)[{_SUMS}], Place left, Place right, int adds) {{
    asm volatile("{{ .reg .pred adds; setp.ne.b32 adds, {adds}, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{sums}}}, "
                 "{left}, {right}, adds, 1, 1, {left_turned}, {right_turned}; }}"
                 : {listed}
                 : "l"(left.bits), "l"(right.bits), "r"(adds), "n"(left_turned),
                   "n"(right_turned));
}}
"""


FUNCTIONS = (
    """\
#ifdef __CUDACC__
// Where a part of a tile is: eight vectors beside each other are eight lines of eight depths, or
// turned. The next eight lines are LINE_BYTES further on, the next eight depths DEPTH_BYTES
// (PTX ISA, "Matrix descriptor").
struct Place { unsigned long long bits; };
DEVICE Place find_place(const char *shared) {
    const unsigned long long address = (unsigned)__cvta_generic_to_shared(shared);
    return {(address & 0x3FFFF) >> 4 | (unsigned long long)(DEPTH_BYTES >> 4) << 16
            | (unsigned long long)(LINE_BYTES >> 4) << 32};
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
#endif
struct alignas(8) Pair { float values[2]; };
DEVICE bool is_finite(float value) { return value - value == 0; }
// A side of the product: its lines are rows of the left one, columns of the right one. Memory has
// its depths beside each other, or its lines. A warp loads eight rows of 16 elements of that.
template <bool BY_DEPTH, int LINES> struct Side {
    static constexpr bool IS_EVEN = LINES % TILE == 0 && DEPTH % STEP == 0;
    static constexpr int LINES_AT_ONCE = SPLITTERS / 32 * 8, TIMES = TILE / LINES_AT_ONCE;
    DEVICE constexpr long long find(int line, int depth) {
        return BY_DEPTH ? (long long)line * DEPTH + depth : (long long)depth * LINES + line;
    }
    DEVICE int find_line() {
        const int thread = threadIdx.x % 32, warp = (threadIdx.x - MULTIPLIERS) / 32;
        return BY_DEPTH ? warp * 8 + thread / 2 % 8
                        : warp * 16 + thread / 16 * 8 + thread % 2 * 4;
    }
    DEVICE int find_depth() {
        const int thread = threadIdx.x % 32;
        return BY_DEPTH ? thread / 16 * 8 + thread % 2 * 4 : thread / 2 % 8;
    }
    DEVICE constexpr int step_line(int each) {
        return BY_DEPTH ? each % TIMES * LINES_AT_ONCE : 0;
    }
    DEVICE constexpr int step_depth(int each) {
        return BY_DEPTH ? each / TIMES * 16 : each * 8;
    }
    DEVICE void load(const float *array, int line, int depth, Vector (&values)[EACH]) {
        line += find_line();
        depth += find_depth();
        const float *from = array + find(line, depth);
        #pragma unroll
        for (int each = 0; each < EACH; ++each) {
            const int lines = step_line(each), depths = step_depth(each);
            if (IS_EVEN || (line + lines < LINES && depth + depths < DEPTH))
                values[each] = load_vector(from + find(lines, depths));
            else values[each] = Vector{};
        }
    }
    DEVICE void store(char *tile, const Vector (&values)[EACH]) {
        char *to = tile + find_depth() / 8 * DEPTH_BYTES + find_line() / 8 * LINE_BYTES
                   + threadIdx.x % 16 * 8;
        #pragma unroll
        for (int each = 0; each < EACH; ++each) {
            Halves parts[3];
            #pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                float low = literal(values[each].words[pair * 2]);
                float high = literal(values[each].words[pair * 2 + 1]);
                #pragma unroll
                for (int part = 0; part < 3; ++part) {
                    const unsigned rounded = narrow_pair(low, high);
                    parts[part].words[pair] = rounded;
                    low -= literal(rounded << 16);
                    high -= literal(rounded & 0xFFFF0000u);
                }
            }
            char *there = to + step_depth(each) / 8 * DEPTH_BYTES
                          + step_line(each) / 8 * LINE_BYTES;
            #pragma unroll
            for (int part = 0; part < 3; ++part)
                *(Halves *)(there + part * PART_BYTES) = parts[part];
        }
    }
};
typedef Side<LEFT_BY_DEPTH, ROWS> Left;
typedef Side<RIGHT_BY_DEPTH, COLUMNS> Right;
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
    const int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int stage = 0, phase = 0;
    auto go_on = [&] { if (++stage == STAGES) { stage = 0; phase ^= 1; } };
    Left rows;
    Right columns;
    Cursor cursor;
    open_item(cursor, blockIdx.x);
    if (threadIdx.x >= MULTIPLIERS) {
        give_registers<88>();
        Vector lefts[EACH], rights[EACH], next_lefts[EACH], next_rights[EACH];
        rows.load(left, cursor.row, cursor.step * STEP, lefts);
        columns.load(right, cursor.column, cursor.step * STEP, rights);
        for (bool goes_on = true; goes_on; go_on()) {
            advance(cursor);
            goes_on = is_open(cursor);
            if (goes_on) {
                rows.load(left, cursor.row, cursor.step * STEP, next_lefts);
                columns.load(right, cursor.column, cursor.step * STEP, next_rights);
            }
            await_phase(empty + stage, phase ^ 1);
            char *tile = tiles + stage * STAGE_BYTES;
            rows.store(tile, lefts);
            columns.store(tile + 3 * PART_BYTES, rights);
            show_stored();
            sync_lanes();
            if (thread == 0) arrive_at(full + stage);
            #pragma unroll
            for (int each = 0; each < EACH; ++each) {
                lefts[each] = next_lefts[each];
                rights[each] = next_rights[each];
            }
        }
        return;
    }
    take_registers<168>();
    for (; is_open(cursor); open_next(cursor)) {
        float totals[64] = {};
        const int begin = cursor.step;
        for (int step = begin; step < cursor.end; ++step, go_on()) {
            float sums[64];
            await_phase(full + stage, phase);
            const char *tile = tiles + stage * STAGE_BYTES;
            const Place x = find_place(tile + warp / 4 * 8 * LINE_BYTES);
            const Place y = find_place(tile + 3 * PART_BYTES);
            open_products();
{PRODUCTS}
            commit_products();
            await_products<0>();
            if (thread == 0) arrive_at(empty + stage);
            #pragma unroll
            for (int each = 0; each < 64; ++each) totals[each] += sums[each];
        }
        float *to = result + (long long)cursor.part * ROWS * COLUMNS;
        const int first_row = cursor.row + warp * 16 + thread / 4;
        const int first_column = cursor.column + thread % 4 * 2;
        bool is_plain = true;
        #pragma unroll
        for (int each = 0; each < 64; each += 2) {
            const int row = first_row + each / 2 % 2 * 8, column = first_column + each / 4 * 8;
            if (row >= ROWS || column >= COLUMNS) continue;
            *(Pair *)(to + (long long)row * COLUMNS + column) = {totals[each], totals[each + 1]};
            is_plain &= is_finite(totals[each]) && is_finite(totals[each + 1]);
        }
        if (is_plain) continue;
        #pragma unroll 1
        for (int each = 0; each < 64; ++each) {
            const int row = first_row + each / 2 % 2 * 8;
            const int column = first_column + each / 4 * 8 + each % 2;
            if (row >= ROWS || column >= COLUMNS) continue;
            float *place = to + (long long)row * COLUMNS + column;
            if (is_finite(*place)) continue;
            float sum = 0;
            for (int depth = begin * STEP; depth < cursor.end * STEP && depth < DEPTH; ++depth)
                sum += left[rows.find(row, depth)] * right[columns.find(column, depth)];
            *place = sum;
        }
    }
"""
