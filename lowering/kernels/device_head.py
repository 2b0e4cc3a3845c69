"""What the source of each kernel of our own in C++ begins with: types, and names for instructions.

Note [Sources of two worlds]
A kernel is written with the names below alone, so that a compiler for another machine takes it too,
with other definitions in their place: tests run the kernels without a GPU.

Note [Addresses of copies]
NVIDIA's assembler of CUDA 12.9 and 13.0 sees that the places of all threads in shared memory begin
at the same address, and puts that part of them into a uniform register. For ``cp.async`` with a
cache policy it then writes an instruction that does not exist (``LDGSTS`` with a shared address
``[R2+UR0]`` and a policy ``desc[UR1]``), on which the GPU ends with CUDA_ERROR_ILLEGAL_INSTRUCTION;
13.2 and later do not. Whether it does depends on what stands around the copy. So a thread gets its
address from a shuffle: what comes from there has no uniform part that the assembler knows of.

Note [Rounding for tensor cores]
Tensor cores cut float32 to a sign, an exponent and ten bits. So a value is rounded to the nearest
one of that kind first: half a unit of its last bit, found by its sign and exponent alone, is added
as a number. The conversion that does the same (``cvt.rna.tf32``) has an eighth of the places. Two
shorter ways are wrong somewhere. An integer that is added to the bits turns NaN into a number
(0x7FFFFFFF, as GPUs write it). A factor of 1 + ln 2 / 2^11 is right on average over values of many
magnitudes, 2 % faster in a step of small layers, and off in one direction where all mantissas are
alike: a matrix of values between 1.8 and 2 had 8 times the error of rounding both operands.
"""

from __future__ import annotations

# By XLA's names of types.
TYPES = {
    "F32": "float",
    "S32": "int",
    "S8": "signed char",
    "PRED": "bool",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8E4M3FN": "float8e4m3",
    "F8E5M2": "float8e5m2",
}

HEAD = """\
struct bfloat16 { unsigned short bits; };
struct float16 { unsigned short bits; };
struct float8e4m3 { unsigned char bits; };
struct float8e5m2 { unsigned char bits; };
struct alignas(16) Vector { unsigned words[4]; };
// Four values of 16 bits.
struct alignas(8) Halves { unsigned words[2]; };
#ifdef __CUDACC__
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)
#define CLUSTERED(blocks) __cluster_dims__(blocks, 1, 1)
#define DEVICE __device__ __forceinline__
// With registers of its own: what several such functions have in common is computed in each.
#define FUNCTION static __device__ __noinline__
#define TABLE static __constant__ const
DEVICE void wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void start_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE char *shared_memory() { extern __shared__ __align__(128) char bytes[]; return bytes; }
DEVICE void sync_block() { __syncthreads(); }
// True if it is for any thread of the block.
DEVICE bool sync_any(bool is_true) { return __syncthreads_or(is_true); }
// Not the aligned ones: lanes of a warp may come here one after the other.
DEVICE void arrive_cluster() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
DEVICE void await_cluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
DEVICE void sync_cluster() { arrive_cluster(); await_cluster(); }
DEVICE int find_cluster_rank() {
    int rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)); return rank;
}
DEVICE float read_peer(const float *own, int rank) {
    unsigned address = (unsigned)__cvta_generic_to_shared(own), there; float value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    return value;
}
DEVICE void write_peer(float *own, int rank, float value) {
    unsigned address = (unsigned)__cvta_generic_to_shared(own), there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(there), "f"(value) : "memory");
}
DEVICE Vector load_vector(const void *global) {
    Vector v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "l"(global) : "memory");
    return v;
}
// A place in shared memory that is copied to, see Note [Addresses of copies].
struct Slot { unsigned address; };
DEVICE Slot hold_slot(const void *shared) {
    unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    return {__shfl_sync(~0u, address, threadIdx.x % 32)};
}
DEVICE void copy_async(Slot slot, int vectors, const void *global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                 :: "r"(slot.address + vectors * 16), "l"(global) : "memory");
}
// Of what is read once: it goes first from the L2 cache.
DEVICE unsigned long long find_stream_policy() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE void copy_streamed(Slot slot, int vectors, const void *global, unsigned long long policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(slot.address + vectors * 16), "l"(global), "l"(policy) : "memory");
}
DEVICE void sync_lanes() { __syncwarp(); }
// By all threads of a warp: four times eight rows of eight values of 16 bits, each found by another
// thread; a thread has two rows' values of a column of each.
DEVICE Vector load_turned(const Vector *own) {
    unsigned address = (unsigned)__cvta_generic_to_shared(own); Vector v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "r"(address) : "memory");
    return v;
}
// The same, of which a thread has two neighbours of a row of each.
DEVICE Vector load_rows(const Vector *own) {
    unsigned address = (unsigned)__cvta_generic_to_shared(own); Vector v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "r"(address) : "memory");
    return v;
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int count> DEVICE void await_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(count) : "memory");
}
// By all threads of a warp: to 16 by 8 sums, 16 by 16 times 16 by 8 values.
#define MULTIPLY_TILE(type, name)                                                       \\
    DEVICE void multiply_tile(float (&sums)[4], const unsigned (&a)[4],                 \\
                              const unsigned (&b)[2], type) {                           \\
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 "     \\
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"  \\
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])       \\
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])); \\
    }
MULTIPLY_TILE(bfloat16, "bf16")
MULTIPLY_TILE(float16, "f16")
// The same of 16 by 8 times 8 by 8 values, of which tensor cores take what `cut_bits` leaves.
DEVICE void multiply_tile(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], float) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE float exp_fast(float a) {
    float c; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(c) : "f"(a * 1.44269504f)); return c;
}
// Off by one in the last bit at most, without a branch for the few values that need one.
DEVICE float invert(float a) {
    float c; asm("rcp.approx.f32 %0, %1;" : "=f"(c) : "f"(a)); return c;
}
DEVICE unsigned read_bits(float a) { return __float_as_uint(a); }
DEVICE unsigned pack_pair(float low, float high, bfloat16) {
    unsigned c; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(high), "f"(low)); return c;
}
DEVICE unsigned pack_pair(float low, float high, float16) {
    unsigned c; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(high), "f"(low)); return c;
}
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE float maximum(float a, float b) {
    float c; asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c;
}
DEVICE float minimum(float a, float b) {
    float c; asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c;
}
DEVICE float widen(float a) { return a; }
DEVICE float widen(bfloat16 a) { return __uint_as_float(a.bits << 16); }
DEVICE float widen(float16 a) {
    float c; asm("cvt.f32.f16 %0, %1;" : "=f"(c) : "h"(a.bits)); return c;
}
// One of two that lie side by side.
DEVICE float widen_of_pair(unsigned short pair, int which, float8e4m3) {
    unsigned c; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(c) : "h"(pair));
    return widen(float16{(unsigned short)(c >> which * 16)});
}
DEVICE float widen_of_pair(unsigned short pair, int which, float8e5m2) {
    unsigned c; asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(c) : "h"(pair));
    return widen(float16{(unsigned short)(c >> which * 16)});
}
DEVICE float narrow(float a, float) { return a; }
DEVICE bfloat16 narrow(float a, bfloat16) {
    bfloat16 c; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(c.bits) : "f"(a)); return c;
}
DEVICE float16 narrow(float a, float16) {
    float16 c; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(c.bits) : "f"(a)); return c;
}
DEVICE float literal(unsigned bits) { return __uint_as_float(bits); }
#endif
// Off by a few bits behind the point, as far as 16 bits are concerned.
DEVICE float tanh_fast(float a) { return 1 - 2 * invert(exp_fast(2 * a) + 1); }
DEVICE float logistic_fast(float a) { return invert(exp_fast(-a) + 1); }
// Not rounded: for the instruction that does it a multiprocessor has an eighth of the places.
DEVICE unsigned cut_bits(float a) { return read_bits(a) & 0xFFFFE000u; }
// See Note [Rounding for tensor cores].
DEVICE unsigned round_bits(float a) {
    return cut_bits(a + literal(read_bits(a) & 0xFF800000u) * 0x1p-11f);
}
// Cuts a value to the bits that tensor cores take, and returns those behind them.
DEVICE unsigned split_bits(unsigned &word) {
    const float whole = literal(word);
    word = cut_bits(whole);
    return cut_bits(whole - literal(word));
}
"""
