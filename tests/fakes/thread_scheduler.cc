// Threads of a cluster are contexts of one thread of the machine. A block runs as far as it can, and
// a warp in it, then another one, drawn at random, so that a missing barrier shows. A barrier that
// some threads never reach aborts.
#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>
namespace {
constexpr unsigned long STACK = 1 << 17;
struct Barrier { int expected, arrived = 0, phase = 0; };
struct Block {
    Barrier barrier; std::vector<char> shared; std::vector<float> lanes;
    std::vector<Barrier> warps;
    Block(int threads, int bytes) : barrier{threads}, shared(bytes + 128, -1), lanes(threads * 6) {
        for (int first = 0; first < threads; first += 32)
            warps.push_back({std::min(32, threads - first)});
    }
};
struct Copy { void *to; const void *from; };
// A stack and where it was left; `swapcontext` would ask Linux for the mask of signals each time.
struct Place { ucontext_t first; jmp_buf last; bool begun = false; };
struct Thread {
    Place place; int index, rank; bool done = false, looks = false;
    std::vector<std::vector<Copy>> groups{1}; std::vector<int> tokens;
    const Barrier *awaited = nullptr; int phase = 0;
};
using Warps = std::vector<std::vector<Thread *>>;
thread_local Barrier whole; thread_local std::vector<std::unique_ptr<Block>> blocks;
thread_local Thread *self; thread_local Place scheduler; thread_local void (*body)();
thread_local std::minstd_rand order(1);
int arrive(Barrier &barrier) {
    int phase = barrier.phase;
    if (++barrier.arrived == barrier.expected) { barrier.arrived = 0; ++barrier.phase; }
    return phase;
}
__attribute__((noinline)) void change(Place &from, Place &to) {
    if (_setjmp(from.last)) return;
    if (to.begun) _longjmp(to.last, 1);
    to.begun = true; setcontext(&to.first);
}
void await(const Barrier &barrier, int phase) {
    if (barrier.phase != phase) return;
    self->awaited = &barrier; self->phase = phase; change(self->place, scheduler);
}
void begin() { body(); self->done = true; _longjmp(scheduler.last, 1); }
bool run_warp(std::vector<Thread *> &threads, void (*enter)(int, int)) {
    std::shuffle(threads.begin(), threads.end(), order);
    bool moved = false;
    for (Thread *each : threads) {
        if (each->done || each->awaited && each->awaited->phase == each->phase) continue;
        self = each; each->awaited = nullptr; each->looks = false;
        enter(each->rank, each->index);
        change(scheduler, each->place);
        moved |= !each->looks;
    }
    return moved;
}
bool run_block(Warps &warps, void (*enter)(int, int)) {
    std::shuffle(warps.begin(), warps.end(), order);
    bool moved = false;
    for (auto &warp : warps) while (run_warp(warp, enter)) moved = true;
    return moved;
}
}
extern "C" {
// A thread that waits in a loop of its own lets all others run before it looks again.
void look_later() { self->looks = true; change(self->place, scheduler); }
int find_cluster_rank() { return self->rank; }
char *find_shared(int peer) {
    char *start = blocks[peer]->shared.data();
    return start + (128 - (unsigned long)start % 128) % 128;
}
float *find_lane(int lane) { return &blocks[self->rank]->lanes[lane * 6]; }
void sync_block() { auto &barrier = blocks[self->rank]->barrier; await(barrier, arrive(barrier)); }
void sync_warp(int lane) {
    auto &barrier = blocks[self->rank]->warps[lane / 32]; await(barrier, arrive(barrier));
}
void arrive_cluster() { self->tokens.push_back(arrive(whole)); }
void await_cluster() {
    int phase = self->tokens.back(); self->tokens.pop_back(); await(whole, phase);
}
void copy_late(void *shared, const void *global) {
    self->groups.back().push_back({shared, global});
}
void commit_copies() { self->groups.push_back({}); }
void end_copies(int count) {
    auto &groups = self->groups;
    while ((int)groups.size() - 1 > count) {
        for (auto &copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
        groups.erase(groups.begin());
    }
}
void run_cluster(int threads, int size, int bytes, void (*enter)(int, int), void (*run)()) {
    int all = threads * size;
    whole = {all}; body = run; scheduler.begun = true; blocks.clear();
    for (int each = 0; each < size; ++each)
        blocks.push_back(std::make_unique<Block>(threads, bytes));
    auto *stacks = (char *)mmap(0, all * STACK, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    std::vector<Thread> pool(all); std::vector<Warps> each_block(size);
    for (int index = 0; index < all; ++index) {
        Thread &each = pool[index];
        auto &block = each_block[index / threads];
        if (index % threads % 32 == 0) block.emplace_back();
        block.back().push_back(&each);
        each.rank = index / threads; each.index = index % threads;
        ucontext_t &first = each.place.first;
        getcontext(&first);
        first.uc_stack.ss_sp = stacks + index * STACK;
        first.uc_stack.ss_size = STACK; first.uc_link = nullptr;
        makecontext(&first, begin, 0);
    }
    // Who looks may go on at the next look.
    for (int idle = 0; idle < 1000; ++idle) {
        std::shuffle(each_block.begin(), each_block.end(), order);
        bool moved = false;
        for (auto &block : each_block) while (run_block(block, enter)) moved = true;
        if (moved) idle = 0;
    }
    for (auto &each : pool) if (!each.done) {
        std::fputs("some threads never reach a barrier\n", stderr); std::abort();
    }
    munmap(stacks, all * STACK);
}
}
