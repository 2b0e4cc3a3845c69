"""The kernel of `attention` in C++: what is the same for all problems.

What a problem adds takes the place of names in braces: where a block's keys and values are
(``BASES``), the queries, what is written into the caches, and the score of one dot product.
"""

from __future__ import annotations

ATTENTION_FUNCTIONS = """\
DEVICE float take(const Vector &copied, int index, float) { return literal(copied.words[index]); }
template <class Half> DEVICE float take(const Vector &copied, int index, Half) {
    return widen(Half{(unsigned short)(copied.words[index / 2] >> index % 2 * 16)});
}
// The share of a score before all are divided by their sum. What is masked out has none, also
// where all that is known so far is masked out.
DEVICE float weigh(float score, float best) {
    return score == MASKED ? 0.0f : expf(score - best);
}
"""
ATTENTION_BODY = """\
    if (blockIdx.x >= BLOCKS) {
        start_dependents();
        wait();
        return;
    }
    constexpr int LANES = WIDTH / VECTOR, SLICES = THREADS / LANES, WARPS = THREADS / 32;
    constexpr int STEPS = (PART + SLICES - 1) / SLICES, UNITS = (STEPS + GROUP - 1) / GROUP;
    constexpr int ELEMENTS = CHUNK * WIDTH, SHARE = ELEMENTS / SPLIT, LINE = WIDTH + 2;
    constexpr int TURNS = (ELEMENTS + THREADS - 1) / THREADS;
    char *shared = shared_memory();
    Vector *ring = (Vector *)shared + threadIdx.x;
    float *queries = (float *)(shared + RING_BYTES), *fresh = queries + ELEMENTS;
    float *parts = fresh + 2 * WIDTH, *totals = parts + WARPS * CHUNK * LINE;
    float *tops = totals + ELEMENTS, *weights = tops + SPLIT * CHUNK;
    const int rank = SPLIT > 1 ? find_cluster_rank() : 0;
    const int group = blockIdx.x / SPLIT / CHUNKS, first = blockIdx.x / SPLIT % CHUNKS * CHUNK;
    const int begin = rank * PART, end = begin + PART < LENGTH ? begin + PART : LENGTH;
    const int lane = threadIdx.x % LANES * VECTOR, slice = threadIdx.x / LANES;
{BASES}
    if (SPLIT > 1) arrive_cluster();
    const Slot slot = hold_slot(ring);
    auto fetch = [&](int unit, int place) {
        if (unit >= UNITS) return;
        #pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const int t = begin + (unit * GROUP + i) * SLICES + slice;
            if (t >= end) continue;
            const int to = (place * GROUP + i) * 2 * THREADS;
            copy_async(slot, to, keys + t * KEY_STRIDE + lane);
            copy_async(slot, to + THREADS, values + t * VALUE_STRIDE + lane);
        }
    };
    auto fetch_first = [&]() {
        #pragma unroll
        for (int place = 0; place < PLACES; ++place) {
            fetch(place, place);
            commit_copies();
        }
    };
    if (IS_EARLY) fetch_first();
    start_dependents();
    wait();
    if (!IS_EARLY) fetch_first();
    // All that is loaded comes before all that is stored: it is asked for at once.
    float own[TURNS];
    #pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int index = turn * THREADS + threadIdx.x;
        const int row = first + index / WIDTH, d = index % WIDTH;
        float query = 0;
        if (index < ELEMENTS && row < ROWS) {
{QUERY}
        }
        own[turn] = query;
    }
    const int d = threadIdx.x % WIDTH;
{UPDATES}
{SCORE_HEAD}
    #pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
        if (turn * THREADS + threadIdx.x < ELEMENTS)
            queries[turn * THREADS + threadIdx.x] = own[turn];
    if (threadIdx.x < WIDTH) {
{STORES}
    }
    sync_block();
    float mine[CHUNK][VECTOR], best[CHUNK], weight[CHUNK] = {}, mixed[CHUNK][VECTOR] = {};
    #pragma unroll
    for (int row = 0; row < CHUNK; ++row) {
        best[row] = MASKED;
        #pragma unroll
        for (int e = 0; e < VECTOR; ++e) mine[row][e] = queries[row * WIDTH + lane + e];
    }
    auto consume = [&](int unit, int place) {
        if (unit >= UNITS) return;
        float scores[GROUP][CHUNK];
        #pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const int t = begin + (unit * GROUP + i) * SLICES + slice;
            const Vector copied = ring[(place * GROUP + i) * 2 * THREADS];
            float key[VECTOR];
            #pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                key[e] = t == new_key ? fresh[lane + e] : take(copied, e, Kept());
            #pragma unroll
            for (int row = 0; row < CHUNK; ++row) {
                float sum = 0;
                #pragma unroll
                for (int e = 0; e < VECTOR; ++e) sum += mine[row][e] * key[e];
                scores[i][row] = sum;
            }
        }
        #pragma unroll
        for (int mask = 1; mask < LANES; mask *= 2)
            #pragma unroll
            for (int i = 0; i < GROUP; ++i)
                #pragma unroll
                for (int row = 0; row < CHUNK; ++row)
                    scores[i][row] += shuffle_xor(scores[i][row], mask);
        #pragma unroll
        for (int own = 0; own < CHUNK; ++own) {
            const int row = first + own;
            float top = best[own];
            #pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const int t = begin + (unit * GROUP + i) * SLICES + slice;
                const float sum = scores[i][own];
                float score = MASKED;
                if (t < end && row < ROWS) {
{SCORE}
                }
                scores[i][own] = score;
                top = maximum(top, score);
            }
            // Slices of a warp have one largest score, so that their values can be added up.
            #pragma unroll
            for (int mask = LANES; mask < 32; mask *= 2) top = maximum(top, shuffle_xor(top, mask));
            const float scale = weigh(best[own], top);
            best[own] = top;
            weight[own] *= scale;
            #pragma unroll
            for (int e = 0; e < VECTOR; ++e) mixed[own][e] *= scale;
        }
        #pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const int t = begin + (unit * GROUP + i) * SLICES + slice;
            if (t >= end) continue;
            const Vector copied = ring[((place * GROUP + i) * 2 + 1) * THREADS];
            float value[VECTOR];
            #pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                value[e] = t == new_value ? fresh[WIDTH + lane + e] : take(copied, e, Kept());
            #pragma unroll
            for (int row = 0; row < CHUNK; ++row) {
                const float share = weigh(scores[i][row], best[row]);
                weight[row] += share;
                #pragma unroll
                for (int e = 0; e < VECTOR; ++e) mixed[row][e] += share * value[e];
            }
        }
    };
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
    // Slices of a warp, then warps of a block, then blocks of a cluster. Of two slices each keeps
    // half of its values and adds the other's, as long as they can be halved.
    int kept = CHUNK * VECTOR, at = 0;
    #pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) {
        const bool is_upper = threadIdx.x & mask, halves = kept % 2 == 0;
        if (halves) kept /= 2;
        if (halves && is_upper) at += kept;
        #pragma unroll
        for (int i = 0; i < CHUNK * VECTOR; ++i) {
            if (i >= kept) continue;
            const float low = mixed[i / VECTOR][i % VECTOR];
            const int upper = halves ? i + kept : i;
            const float high = mixed[upper / VECTOR][upper % VECTOR];
            const float other = shuffle_xor(is_upper ? low : high, mask);
            mixed[i / VECTOR][i % VECTOR] = (is_upper ? high : low) + other;
        }
        #pragma unroll
        for (int row = 0; row < CHUNK; ++row) weight[row] += shuffle_xor(weight[row], mask);
    }
    float *lines = parts + threadIdx.x / 32 * CHUNK * LINE;
    #pragma unroll
    for (int i = 0; i < CHUNK * VECTOR; ++i) {
        float *line = lines + (at + i) / VECTOR * LINE + lane;
        if (i < kept) line[(at + i) % VECTOR] = mixed[i / VECTOR][i % VECTOR];
    }
    #pragma unroll
    for (int row = 0; row < CHUNK; ++row)
        if (threadIdx.x % 32 == 0) {
            lines[row * LINE + WIDTH] = best[row];
            lines[row * LINE + WIDTH + 1] = weight[row];
        }
    // The others have begun: their shared memory can be written.
    if (SPLIT > 1) await_cluster();
    sync_block();
    #pragma unroll
    for (int index = threadIdx.x; index < ELEMENTS; index += THREADS) {
        const int row = index / WIDTH, owner = index / SHARE;
        const float *of_row = parts + row * LINE;
        float top = MASKED, total = 0, value = 0;
        #pragma unroll
        for (int warp = 0; warp < WARPS; ++warp)
            top = maximum(top, of_row[warp * CHUNK * LINE + WIDTH]);
        #pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const float *line = of_row + warp * CHUNK * LINE;
            const float scale = weigh(line[WIDTH], top);
            total += scale * line[WIDTH + 1];
            value += scale * line[index % WIDTH];
        }
        auto put = [&](float *place, float given) {
            if (SPLIT > 1) write_peer(place, owner, given);
            else *place = given;
        };
        put(totals + rank * SHARE + index % SHARE, value);
        if (index % WIDTH && index % SHARE) continue;
        put(tops + rank * CHUNK + row, top);
        put(weights + rank * CHUNK + row, total);
    }
    if (SPLIT > 1) sync_cluster();
    else sync_block();
    #pragma unroll
    for (int index = threadIdx.x; index < SHARE; index += THREADS) {
        const int element = rank * SHARE + index, row = element / WIDTH;
        if (first + row >= ROWS) continue;
        float top = MASKED, total = 0, value = 0;
        #pragma unroll
        for (int part = 0; part < SPLIT; ++part) top = maximum(top, tops[part * CHUNK + row]);
        #pragma unroll
        for (int part = 0; part < SPLIT; ++part) {
            const float scale = weigh(tops[part * CHUNK + row], top);
            total += scale * weights[part * CHUNK + row];
            value += scale * totals[part * SHARE + index];
        }
        const long long place = (long long)(group * ROWS + first) * WIDTH + element;
        result[place] = narrow(value / total, Result());
    }
"""
