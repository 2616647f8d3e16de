// cuda_on_cpu.h: run CUDA kernels on the CPU, to verify what they compute where there is no GPU.
//
//     sed -E -e '1i #line 1 "x.cu"' -f test/cuda_on_cpu.sed x.cu > x.cpp
//     g++ -std=c++17 -O2 -fopenmp -fno-strict-aliasing -fsanitize=alignment,bounds -fno-sanitize-recover=all
//         -include test/cuda_on_cpu.h x.cpp
//
// The sed script rewrites launches and __shared__ (C++ cannot say those) and drops CUDA's includes; the rest of the .cu
// stays as nvcc sees it. This is a model of what a GPU does, not of how long it takes:
//   - every thread of a block is a fiber; __syncthreads and warp collectives really rendezvous, and a rendezvous that
//     cannot happen is reported with kernel, thread and line instead of hanging;
//   - CUDA_ON_CPU_ORDER=forward|reverse|SEED chooses the order of blocks, and of threads between two rendezvous. A
//     missing barrier shows as a result that depends on it: run each test in forward, reverse and two seeds, and demand
//     the same bits;
//   - memory nobody wrote (global and shared) holds NaNs;
//   - device memory is closed to host code, each allocation ends at closed pages, and what the rounding to 16 bytes
//     leaves between the two is checked after each launch; a freed address is never used again;
//   - vector accesses that fault on a GPU when misaligned are caught by g++'s -fsanitize=alignment (clang's does not
//     look at structs), an index beyond a static shared array by -fsanitize=bounds;
//   - CUDA_ON_CPU_MEMORY=BYTES caps device memory, so that a failed cudaMalloc can be tested.
// Data races: compile with `-c -fsanitize=thread`, link *without* it. The compiler then calls a hook at every access,
// and the hooks here (not libtsan's) know threads, blocks and barriers. Two threads or blocks that touch one byte, at
// least one writing, with nothing between them that orders the two, are reported, also where every order happens to
// give the right result. These builds also check each access against the allocation's exact size. Ten times slower.
// A plain access beside another block's atomic is a race here: counters that hand over work between blocks are refused.
//
// What it cannot show: speed, coalescing, registers, the rounding of the real cuBLAS and cuFFT, and what blocks do that
// really run at once. The subset of CUDA: launches on one line, `kernel<T><<<...>>>(...)` with the template's arguments
// written out; `extern __shared__ T x[];`; no cooperative groups, PTX, textures, dynamic parallelism, __activemask.
// One GPU, of sm_80's limits. Linux.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdarg.h>
#include <errno.h>
#include <signal.h>
#include <unistd.h>
#include <sys/mman.h>
#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>
#if defined(CUDA_ON_CPU_UCONTEXT) || !(defined(__x86_64__) || defined(__aarch64__))
#define CU_UCONTEXT 1
#include <ucontext.h>
#endif
#ifdef __has_feature
#if __has_feature(thread_sanitizer)
#define CU_RACES 1
#endif
#endif
#ifdef __SANITIZE_THREAD__
#define CU_RACES 1
#endif

#define CUDA_ON_CPU 1
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#ifdef __clang__                                    // CU_QUIET: no race hooks in this function
#define CU_QUIET __attribute__((disable_sanitizer_instrumentation))
#else
#define CU_QUIET __attribute__((no_sanitize("thread")))
#endif

// ------------------------------------------------------------------------------------------------
// vector types and indices

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
#define CU_VECTORS(T, NAME, A2, A4)                                              \
    struct alignas(A2) NAME##2 { T x, y; };                                      \
    struct NAME##3 { T x, y, z; };                                               \
    struct alignas(A4) NAME##4 { T x, y, z, w; };                                \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                   \
    inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }           \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CU_VECTORS(float, float, 8, 16)
CU_VECTORS(int, int, 8, 16)
CU_VECTORS(unsigned, uint, 8, 16)
CU_VECTORS(unsigned short, ushort, 4, 8)
CU_VECTORS(short, short, 4, 8)
CU_VECTORS(unsigned char, uchar, 2, 4)
struct alignas(16) double2 { double x, y; };
inline double2 make_double2(double x, double y) { return {x, y}; }
static const int warpSize = 32;

namespace cu {

// ------------------------------------------------------------------------------------------------
// fibers: a stack each, and a switch between them that saves what a function call must preserve. The switch ends in a
// jump: `ret` would be predicted to go back where it was called from, wrong each time, and cost three times as much.

const size_t STACK = 64 * 1024;                     // a thread's local memory
static const size_t PAGE = (size_t)sysconf(_SC_PAGESIZE);
const size_t GAP = 64 * 1024;                       // closed, behind each allocation of device memory

struct Fiber {
    void* sp = nullptr;
    char* stack = nullptr;                          // its lowest page is closed
#ifdef CU_UCONTEXT
    ucontext_t uc;
#endif
};

#ifndef CU_UCONTEXT
extern "C" void cu_switch(void** from_sp, void* to_sp);
#ifdef __x86_64__
asm(R"(
    .text
    .weak cu_switch
    .type cu_switch,@function
cu_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    popq %rcx
    jmp *%rcx
    .size cu_switch,.-cu_switch
)");
#else
asm(R"(
    .text
    .weak cu_switch
    .type cu_switch,%function
cu_switch:
    stp x29, x30, [sp, #-160]!
    stp x19, x20, [sp, #16]
    stp x21, x22, [sp, #32]
    stp x23, x24, [sp, #48]
    stp x25, x26, [sp, #64]
    stp x27, x28, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #16]
    ldp x21, x22, [sp, #32]
    ldp x23, x24, [sp, #48]
    ldp x25, x26, [sp, #64]
    ldp x27, x28, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x29, x30, [sp], #160
    mov x16, x30
    br x16
    .size cu_switch,.-cu_switch
)");
#endif
#endif

inline void switch_fiber(Fiber* from, Fiber* to) {
#ifdef CU_UCONTEXT
    swapcontext(&from->uc, &to->uc);
#else
    cu_switch(&from->sp, to->sp);
#endif
}

inline Fiber* new_fiber(void (*entry)()) {
    static thread_local int count = 0;
    Fiber* f = new Fiber;
    f->stack =
        (char*)mmap(nullptr, PAGE + STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (f->stack == MAP_FAILED) { perror("cuda_on_cpu: no memory for a thread's stack"); _exit(134); }
    mprotect(f->stack, PAGE, PROT_NONE);
    // tops at different offsets in their pages: at equal ones a block's stacks would compete for a few cache lines
    char* top = f->stack + PAGE + STACK - (count++ * 192) % 4096;
    top -= (uintptr_t)top % 16;
#ifdef CU_UCONTEXT
    getcontext(&f->uc);
    f->uc.uc_stack.ss_sp = f->stack;
    f->uc.uc_stack.ss_size = top - f->stack;
    f->uc.uc_link = nullptr;
    makecontext(&f->uc, entry, 0);
#elif defined(__x86_64__)
    void** sp = (void**)(top - 16);                 // cu_switch jumps to entry, with the stack as after a call
    *sp = (void*)entry;
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    f->sp = sp;
#else
    void** sp = (void**)(top - 160);                // cu_switch's frame: x30, where it jumps, is the second word
    memset(sp, 0, 160);
    sp[1] = (void*)entry;
    f->sp = sp;
#endif
    return f;
}

// ------------------------------------------------------------------------------------------------
// launches, blocks, threads; how a fault is reported

struct Launch {
    const char *name, *file;
    int line;
    dim3 grid, dim;
    size_t smem, smem_limit;
    void (*body)(void*);
    void* arg;                                      // body(arg) runs one thread
    uint64_t number;
};

enum State { FRESH, READY, AT_BLOCK, AT_WARP, DONE };
struct Thread {
    Fiber* fiber;
    State state;
    uint3 idx;
    int index;                                      // position in the block
    const char* file;                               // where it waits
    int line, vote, source;                         // what it brings to a rendezvous,
    unsigned mask, ballot, phase;                   // and takes away; phase counts its warp collectives
    alignas(16) char value[16], result[16];
};

// Who accessed a byte, in a race build
struct Stamp {
    uint64_t block : 25, thread : 10, epoch : 12, phase : 12, atomic : 1, lanes : 1, warps : 1, blocks : 1;
};
struct Cell { Stamp writer, reader; };
struct Shared { char* p; size_t bytes; Cell* cells; };           // cells: in a race build

struct Block {                                      // one per OS thread, used for block after block
    const Launch* launch = nullptr;
    uint3 idx;
    std::vector<Thread> threads;
    std::vector<int> order;
    std::vector<Fiber*> idle;                       // fibers whose thread has ended
    Fiber scheduler;
    Thread* me = nullptr;                           // null outside device code
    int live = 0, votes = 0;
    unsigned epoch = 0, id = 0;                     // barriers passed; number over all launches, in a race build
    char *dynamic = nullptr, *dynamic_end = nullptr;
    size_t static_bytes = 0;
    std::vector<Shared> shared;
};
CU_QUIET inline Block*& block() { static thread_local Block* b = nullptr; return b; }
CU_QUIET inline const Launch*& launching() { static thread_local const Launch* l = nullptr; return l; }

// Prints the fault and where it happened, and ends the program the way abort does.
[[noreturn]] inline void fail(const char* format, ...) {
    static std::recursive_mutex first;              // of several OS threads only one gets to speak
    first.lock();
    Block* b = block();
    const Thread* t = b ? b->me : nullptr;
    if (b) b->me = nullptr;                         // nothing from here on is device code
    fflush(stdout);
    fprintf(stderr, "cuda_on_cpu: ");
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    if (const Launch* l = launching()) fprintf(stderr, "\n  kernel %s launched at %s:%d", l->name, l->file, l->line);
    if (t)
        fprintf(stderr, ", block (%u,%u,%u), thread (%u,%u,%u)", b->idx.x, b->idx.y, b->idx.z, t->idx.x, t->idx.y,
                t->idx.z);
    fprintf(stderr, "\n");
    _exit(134);
}

// CUDA_ON_CPU_ORDER
struct Order { bool reverse = false, shuffle = false; uint64_t seed = 0; };
inline const Order& order() {
    static const Order o = [] {
        Order r;
        const char* s = getenv("CUDA_ON_CPU_ORDER");
        if (!s || !*s || !strcmp(s, "forward")) return r;
        char* end;
        if (!strcmp(s, "reverse")) r.reverse = true;
        else if (r.seed = strtoull(s, &end, 10), r.shuffle = true, *end)
            fail("CUDA_ON_CPU_ORDER=%s: forward, reverse or a number", s);
        return r;
    }();
    return o;
}
inline uint64_t random_u64(uint64_t& s) {           // splitmix64
    uint64_t z = s += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
template <class T> void shuffle(std::vector<T>& v, uint64_t& rng) {
    for (size_t i = v.size(); i > 1; i--) std::swap(v[i - 1], v[random_u64(rng) % i]);
}

// ------------------------------------------------------------------------------------------------
// one block: run every thread until it waits or ends, then let go whoever is complete, and again

inline void fiber_main() {                          // a fiber serves one thread after another
    for (;;) {
        Block* b = block();
        b->launch->body(b->launch->arg);
        Thread* t = b->me;
        t->state = DONE;
        switch_fiber(t->fiber, &b->scheduler);
    }
}
inline void wait(State s, int line, const char* file) {
    Block* b = block();
    Thread* t = b->me;
    t->state = s;
    t->line = line;
    t->file = file;
    switch_fiber(t->fiber, &b->scheduler);
}

[[noreturn]] inline void deadlock(Block* b, const char* what) {
    // who waits where: by file, line, mask (0: a barrier)
    std::map<std::tuple<std::string, int, unsigned>, std::vector<const Thread*>> places;
    for (const Thread& t : b->threads)
        if (t.state == AT_BLOCK || t.state == AT_WARP)
            places[{t.file, t.line, t.state == AT_WARP ? t.mask : 0}].push_back(&t);
    std::string text = what;
    for (auto& [place, threads] : places) {
        auto& [file, line, mask] = place;
        const uint3& first = threads[0]->idx;
        char s[300], at[60] = "__syncthreads";
        if (mask) snprintf(at, sizeof at, "warp collective with mask %08x", mask);
        snprintf(s, sizeof s, "\n  %zu threads from (%u,%u,%u) on at %s:%d, %s", threads.size(), first.x, first.y,
                 first.z, file.c_str(), line, at);
        text += s;
    }
    int ended = (int)b->threads.size() - b->live;
    if (ended) text += "\n  " + std::to_string(ended) + " threads have ended";
    fail("%s", text.c_str());
}

// Lets those lanes of warp w go whose collective is complete: every lane that the mask names waits at the same place
// with the same mask. A named lane that has ended never comes: hardware forgives that today, and promises nothing.
inline bool release_warp(Block* b, int w) {
    int n = (int)b->threads.size(), lo = w * 32, lanes = std::min(32, n - lo);
    Thread* warp = &b->threads[lo];
    bool released = false;
    for (int i = 0; i < lanes; i++) {
        Thread& t = warp[i];
        if (t.state != AT_WARP) continue;
        bool complete = true;
        unsigned ballot = 0;
        for (int j = 0; j < lanes && complete; j++) {
            if (!(t.mask >> j & 1)) continue;
            Thread& u = warp[j];
            if (u.state == DONE) {
                b->me = &t;
                fail("lane %d has exited, but the mask %08x of the warp collective at %s:%d names it", j, t.mask,
                     t.file, t.line);
            }
            complete = u.state == AT_WARP && u.mask == t.mask && u.line == t.line && u.file == t.file;
            ballot |= (unsigned)(u.vote != 0) << j;
        }
        if (!complete) continue;
        for (int j = 0; j < lanes; j++) {
            if (!(t.mask >> j & 1)) continue;
            Thread& u = warp[j];
            bool named = u.source == j || (u.source >= 0 && u.source < lanes && t.mask >> u.source & 1);
            if (named) memcpy(u.result, warp[u.source].value, 16); else memset(u.result, 0xff, 16);
            u.ballot = ballot;
        }
        unsigned mask = t.mask;
        for (int j = 0; j < lanes; j++) if (mask >> j & 1) warp[j].state = READY, warp[j].phase++;
        released = true;
    }
    return released;
}

// Lets the block go when every thread that has not ended waits at one and the same __syncthreads.
inline bool release_block(Block* b) {
    int waiting = 0, votes = 0;
    const Thread* first = nullptr;
    bool same = true;
    for (const Thread& t : b->threads) {
        if (t.state != AT_BLOCK) continue;
        if (!first) first = &t;
        same &= t.line == first->line && t.file == first->file;
        waiting++;
        votes += t.vote != 0;
    }
    if (waiting < b->live) return false;
    if (!same) deadlock(b, "threads of one block wait at different __syncthreads");
    b->votes = votes;
    b->epoch++;
    for (Thread& t : b->threads) if (t.state == AT_BLOCK) t.state = READY;
    return true;
}

inline Cell* new_cells(size_t bytes) {              // null but in a race build
#ifdef CU_RACES
    Cell* cells = (Cell*)calloc(bytes, sizeof(Cell));
    if (!cells) fail("out of memory");
    return cells;
#else
    (void)bytes;
    return nullptr;
#endif
}
inline void run_block(Block* b, uint64_t index) {
    const Launch& l = *b->launch;
    int n = (int)b->threads.size(), warps = (n + 31) / 32;
    b->idx = {(unsigned)(index % l.grid.x), (unsigned)(index / l.grid.x % l.grid.y),
              (unsigned)(index / ((uint64_t)l.grid.x * l.grid.y))};
    b->live = n;
    b->epoch = 0;
    b->static_bytes = 0;
    for (Shared& s : b->shared) free(s.cells);
    b->shared.clear();
    if (l.smem) {
        memset(b->dynamic, 0xff, (l.smem + 15) & ~(size_t)15);
        b->shared.push_back({b->dynamic, l.smem, new_cells(l.smem)});
    }
    for (int i = 0; i < n; i++) {
        Thread& t = b->threads[i];
        t.idx = {i % l.dim.x, i / l.dim.x % l.dim.y, i / (l.dim.x * l.dim.y)};
        t.index = i;
        t.state = FRESH;
        t.phase = 0;
        b->order[i] = order().reverse ? n - 1 - i : i;
    }
    uint64_t rng = order().seed ^ l.number << 40 ^ index << 8;
    while (b->live > 0) {
        if (order().shuffle) shuffle(b->order, rng);
        for (int i : b->order) {
            Thread& t = b->threads[i];
            if (t.state != FRESH && t.state != READY) continue;
            if (t.state == FRESH) {
                if (b->idle.empty()) b->idle.push_back(new_fiber(fiber_main));
                t.fiber = b->idle.back();
                b->idle.pop_back();
            }
            b->me = &t;
            switch_fiber(&b->scheduler, t.fiber);
            if (t.state == DONE) b->idle.push_back(t.fiber), b->live--;
        }
        b->me = nullptr;
        if (b->live == 0) break;
        bool released = false;
        for (int w = 0; w < warps; w++) released |= release_warp(b, w);
        if (!released && !release_block(b)) deadlock(b, "threads wait for others that never come");
    }
    for (size_t i = l.smem; i % 16; i++)
        if ((unsigned char)b->dynamic[i] != 0xff)
            fail("write past the end of %zu bytes of dynamic shared memory", l.smem);
}

// ------------------------------------------------------------------------------------------------
// Device memory: one range of addresses, of which nothing is accessible but, during a launch, a copy or a library call,
// the allocations it uses: those that its arguments point into, and those that device code touches through other
// pointers (the first touch faults, and on_fault opens the allocation). Pages between allocations stay closed.

struct Allocation { char* p; size_t bytes; char* map; size_t map_bytes; bool open; };
struct Memory {
    char* base = nullptr;
    size_t range = (size_t)256 << 30, top = 0, allocated = 0, cap = 0;
    int users = 0;                                  // launches, copies ... under way
    std::map<char*, Allocation> live, freed;        // by address
    std::recursive_mutex mutex;
    std::map<const void*, int> smem_opt_in;         // cudaFuncSetAttribute, by kernel
    long launches = 0;
    int last_error = 0;
};
CU_QUIET inline Memory& memory() { static Memory* m = new Memory; return *m; }
inline long launch_count() { return memory().launches; }

inline bool in_range(const void* p) {
    Memory& m = memory();
    return m.base && (char*)p >= m.base && (char*)p < m.base + m.range;
}
inline Allocation* find(std::map<char*, Allocation>& a, const void* p) {   // the last one that starts at or before p
    auto it = a.upper_bound((char*)p);
    return it == a.begin() ? nullptr : &(--it)->second;
}
// The allocation that holds bytes [p, p + n), or null.
inline Allocation* find_allocation(const void* p, size_t n = 0) {
    if (!in_range(p)) return nullptr;
    Allocation* a = find(memory().live, p);
    return a && (size_t)((char*)p - a->p) <= a->bytes && n <= a->bytes - (size_t)((char*)p - a->p) ? a : nullptr;
}
// Says where an address of the range lies.
inline const char* describe(const void* p, char* text, size_t size) {
    const Allocation *a = find(memory().live, p), *f = find(memory().freed, p);
    if (f && (char*)p < f->p + f->bytes)
        snprintf(text, size, "inside %zu bytes of device memory that were freed", f->bytes);
    else if (a && (char*)p < a->map + a->map_bytes + GAP)
        snprintf(text, size, "%zu bytes past the end of a device allocation of %zu bytes", (char*)p - a->p - a->bytes,
                 a->bytes);
    else snprintf(text, size, "in device memory that nobody allocated");
    return text;
}

// An allocation's size is rounded up to 16 bytes, and it starts inside a page: both strips must hold their 0xff still.
inline void check_strips(const Allocation& a) {
    for (size_t i = a.bytes; i % 16; i++)
        if ((unsigned char)a.p[i] != 0xff)
            fail("something wrote past the end of a device allocation of %zu bytes", a.bytes);
    for (const char* p = a.p - std::min((size_t)64, (size_t)(a.p - a.map)); p < a.p; p++)
        if ((unsigned char)*p != 0xff)
            fail("something wrote before the start of a device allocation of %zu bytes", a.bytes);
}
inline void open_allocation(Allocation* a) {
    if (!a->open) mprotect(a->map, a->map_bytes, PROT_READ | PROT_WRITE);
    a->open = true;
}
struct DeviceAccess {                               // lives as long as a launch, copy or call: closes what it opened
    DeviceAccess() { memory().mutex.lock(); memory().users++; }
    ~DeviceAccess() {
        Memory& m = memory();
        if (--m.users == 0) {
            for (auto& entry : m.live) {
                Allocation& a = entry.second;
                if (!a.open) continue;
                check_strips(a);
                mprotect(a.map, a.map_bytes, PROT_NONE);
                a.open = false;
            }
        }
        m.mutex.unlock();
    }
};

inline void on_fault(int signal_number, siginfo_t* info, void*) {
    char* p = (char*)info->si_addr;
    Block* b = block();
    char text[200];
    if (in_range(p)) {
        Allocation* a = find_allocation(p, 1);
        if (b && b->me && a) return open_allocation(a);
        if (b && b->me) fail("access %s (%p)", describe(p, text, sizeof text), (void*)p);
        if (a) fail("host code touched device memory (%p)", (void*)p);
        fail("host code touched memory %s (%p)", describe(p, text, sizeof text), (void*)p);
    }
    if (b && b->me) {
        char* stack = b->me->fiber->stack;
        if (p >= stack && p < stack + PAGE) fail("a thread used more than %zu KB of stack", STACK / 1024);
        if (p >= b->dynamic_end && p < b->dynamic_end + PAGE)
            fail("access past the end of %zu bytes of dynamic shared memory", b->launch->smem);
        fail("access to invalid address %p", (void*)p);
    }
    signal(signal_number, SIG_DFL);                 // host code's own fault: it happens again, and ends the program
}
inline void install_handler() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction sa = {};
        sa.sa_sigaction = on_fault;
        sa.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &sa, nullptr);
        sigaction(SIGBUS, &sa, nullptr);
    });
    static thread_local char* stack = nullptr;      // the handler's, of this OS thread: the thread's own may be full
    if (stack) return;
    stack = (char*)malloc(65536);
    stack_t ss = {};
    ss.ss_sp = stack;
    ss.ss_size = 65536;
    sigaltstack(&ss, nullptr);
}

inline void open_range() {                          // on the first cudaMalloc
    Memory& m = memory();
    install_handler();
    for (; m.range > (size_t)1 << 30; m.range /= 2) {
        m.base = (char*)mmap(nullptr, m.range, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (m.base != MAP_FAILED) break;
    }
    if (m.base == MAP_FAILED) fail("no address range for device memory: %s", strerror(errno));
    const char* cap = getenv("CUDA_ON_CPU_MEMORY");
    m.cap = cap ? strtoull(cap, nullptr, 10) : (size_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    m.top = GAP;
}
inline void* allocate(size_t bytes) {               // null when there is no room
    Memory& m = memory();
    DeviceAccess access;
    if (!m.base) open_range();
    if (bytes > m.cap - m.allocated) return nullptr;
    size_t used = (bytes + 15) & ~(size_t)15, map_bytes = (used + PAGE - 1) / PAGE * PAGE;
    if (map_bytes + GAP > m.range - m.top) return nullptr;
    char* map = m.base + m.top;
    if (mmap(map, map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        return nullptr;
    memset(map, 0xff, map_bytes);
    m.top += map_bytes + GAP;
    m.allocated += bytes;
    char* p = map + map_bytes - used;               // the end meets the gap
    m.live[p] = {p, bytes, map, map_bytes, true};
    return p;
}
inline void release(void* p) {
    Memory& m = memory();
    DeviceAccess access;
    auto it = m.live.find((char*)p);
    if (it == m.live.end())
        fail("cudaFree of %s",
             m.freed.count((char*)p) ? "memory that was freed before" : "a pointer that cudaMalloc did not return");
    Allocation a = it->second;
    if (mmap(a.map, a.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
        fail("cudaFree: %s", strerror(errno));
    m.allocated -= a.bytes;
    m.freed[a.p] = a;
    m.live.erase(it);
}
// Opens the allocation that holds [p, p + n); refuses a range not wholly inside one, with `call` and `what` as names.
inline void need_device(const char* call, const char* what, const void* p, size_t n) {
    Allocation* a = find_allocation(p, n);
    if (a) return open_allocation(a);
    char text[200];
    a = find_allocation(p);
    if (!in_range(p)) fail("%s: %s is not device memory (%p)", call, what, p);
    if (!a) fail("%s: %s lies %s", call, what, describe(p, text, sizeof text));
    fail("%s: %s takes %zu bytes, but the device allocation of %zu bytes ends %zu bytes after its start", call, what, n,
         a->bytes, a->p + a->bytes - (char*)p);
}

// ------------------------------------------------------------------------------------------------
// data races: the hooks of -fsanitize=thread. For each byte of global and shared memory a Cell keeps who wrote and who
// read it last. Nothing orders two blocks of a launch; __syncthreads orders two warps; any warp collective two lanes.

#ifdef CU_RACES
const bool RACES = true;
CU_QUIET inline Cell* global_cells() {              // of the whole range of addresses; pages appear as they are touched
    static Cell* c = (Cell*)mmap(nullptr, memory().range * sizeof(Cell), PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (c == MAP_FAILED) fail("no address range for the race shadow");
    return c;
}
CU_QUIET inline unsigned& first_block_id() {        // of this launch: older stamps do not count
    static unsigned id = 1;
    return id;
}

CU_QUIET inline bool concurrent(Stamp a, Stamp me) {
    if (a.block < first_block_id()) return false;
    if (a.block != me.block) return true;
    return a.thread != me.thread && a.epoch == me.epoch && (a.thread / 32 != me.thread / 32 || a.phase == me.phase);
}
// A reader's flags: several lanes of its warp read in that phase, several warps in that epoch, several blocks.
CU_QUIET inline void touch(Cell& c, Stamp me, bool write, const char* kind, const void* p) {
    Stamp w = c.writer, r = c.reader;
    bool launch = r.block >= first_block_id(), epoch = launch && r.block == me.block && r.epoch == me.epoch;
    bool warp = epoch && r.thread / 32 == me.thread / 32, phase = warp && r.phase == me.phase;
    bool with_writer = concurrent(w, me) && !(w.atomic && me.atomic);
    bool with_reader = write && (concurrent(r, me) || (launch && r.blocks) || (epoch && r.warps) || (phase && r.lanes));
    if (with_writer || with_reader) {
        const char* what = with_writer ? write ? "both write" : "one writes, one reads" : "one reads, one writes";
        Stamp other = with_writer ? w : r;
        if (other.block != me.block || (!with_writer && r.blocks))
            fail("race: two blocks of one launch touch %s address %p, %s", kind, p, what);
        fail("race: threads %d and %d of a block touch %s address %p with no barrier between, %s",
             (int)other.thread, (int)me.thread, kind, p, what);
    }
    if (write) { c.writer = me; return; }
    me.blocks = launch && (r.blocks || r.block != me.block);
    me.warps = epoch && (r.warps || !warp);
    me.lanes = phase && (r.lanes || r.thread != me.thread);
    c.reader = me;
}
CU_QUIET inline void on_access(const void* address, size_t n, bool write, bool atomic = false) {
    Block* b = block();
    if (!b || !b->me) return;
    char* p = (char*)address;
    Thread* t = b->me;
    Memory& m = memory();
    Stamp me;
    me.block = b->id, me.thread = t->index, me.epoch = b->epoch, me.phase = t->phase, me.atomic = atomic,
    me.lanes = me.warps = me.blocks = 0;
    if (m.base && p >= m.base && p < m.base + m.range) {
        struct Known { uint64_t launch; char *lo, *hi; };
        static thread_local Known known[64];        // allocations found in this launch, by the address's page
        Known& a = known[(uintptr_t)p / PAGE % 64];
        if (a.launch != b->launch->number + 1 || p < a.lo || p + n > a.hi) {
            b->me = nullptr;                        // find() has hooks of its own: they must not come back here
            const Allocation* q = find_allocation(p, n);
            b->me = t;
            char text[200];
            if (!q)
                fail("%s of %zu bytes %s", write ? "write" : "read", n,
                     describe(p + (find_allocation(p) ? n - 1 : 0), text, sizeof text));
            a.launch = b->launch->number + 1, a.lo = q->p, a.hi = q->p + q->bytes;
        }
        Cell* c = global_cells() + (p - m.base);
        for (size_t i = 0; i < n; i++) touch(c[i], me, write, "global", p + i);
        return;
    }
    b->me = nullptr;
    Shared* s = b->shared.data();
    size_t count = b->shared.size();
    b->me = t;
    for (; count > 0; count--, s++) {
        if (p < s->p || p >= s->p + s->bytes) continue;
        Cell* c = s->cells + (p - s->p);
        for (size_t i = 0; i < n && p + i < s->p + s->bytes; i++) touch(c[i], me, write, "shared", p + i);
        return;
    }
}
#else
const bool RACES = false;
inline void on_access(const void*, size_t, bool, bool = false) {}
#endif
} // namespace cu

#ifdef CU_RACES
// What the compiler calls. Host code calls them too, and on_access leaves at once.
#define CU_HOOK extern "C" __attribute__((used, weak)) CU_QUIET
#define CU_SIZE(N)                                                                    \
    CU_HOOK void __tsan_read##N(void* p) { cu::on_access(p, N, false); }              \
    CU_HOOK void __tsan_write##N(void* p) { cu::on_access(p, N, true); }              \
    CU_HOOK void __tsan_unaligned_read##N(void* p) { cu::on_access(p, N, false); }    \
    CU_HOOK void __tsan_unaligned_write##N(void* p) { cu::on_access(p, N, true); }
CU_SIZE(1) CU_SIZE(2) CU_SIZE(4) CU_SIZE(8) CU_SIZE(16)
CU_HOOK void __tsan_read_range(void* p, unsigned long n) { cu::on_access(p, n, false); }
CU_HOOK void __tsan_write_range(void* p, unsigned long n) { cu::on_access(p, n, true); }
CU_HOOK void __tsan_vptr_update(void*, void*) {}
CU_HOOK void __tsan_vptr_read(void*) {}
CU_HOOK void __tsan_func_entry(void*) {}
CU_HOOK void __tsan_func_exit() {}
CU_HOOK void __tsan_init() {}
CU_HOOK void __tsan_atomic_thread_fence(int) {}
// Atomics of host code (device code's are in cu::atomic, which calls no hook)
#define CU_ATOMIC(BITS, T)                                                                                        \
    CU_HOOK T __tsan_atomic##BITS##_load(const volatile T* p, int) { return __atomic_load_n(p, 5); }             \
    CU_HOOK void __tsan_atomic##BITS##_store(volatile T* p, T v, int) { __atomic_store_n(p, v, 5); }             \
    CU_HOOK T __tsan_atomic##BITS##_exchange(volatile T* p, T v, int) { return __atomic_exchange_n(p, v, 5); }   \
    CU_HOOK T __tsan_atomic##BITS##_fetch_add(volatile T* p, T v, int) { return __atomic_fetch_add(p, v, 5); }   \
    CU_HOOK T __tsan_atomic##BITS##_compare_exchange_val(volatile T* p, T c, T v, int, int) {                    \
        __atomic_compare_exchange_n(p, &c, v, false, 5, 5);                                                       \
        return c;                                                                                                 \
    }
CU_ATOMIC(8, unsigned char) CU_ATOMIC(32, unsigned) CU_ATOMIC(64, unsigned long)
#endif

namespace cu {
// ------------------------------------------------------------------------------------------------
// launches

// Shared memory per block on the oldest GPU we aim at (sm_80), and what is mapped for it
const size_t SMEM = 48 * 1024, SMEM_OPT_IN = 163 * 1024, SMEM_MAP = 256 * 1024;

struct Launching {                                  // while one lives, a fault on this OS thread names this launch
    const Launch* before;
    Launching(const Launch* l) : before(launching()) { launching() = l; }
    ~Launching() { launching() = before; }
};
inline void run(Launch& l) {
    Memory& m = memory();
    l.number = m.launches++;
    uint64_t blocks = (uint64_t)l.grid.x * l.grid.y * l.grid.z;
    size_t n = (size_t)l.dim.x * l.dim.y * l.dim.z;
    if (n == 0 || n > 1024 || l.dim.x > 1024 || l.dim.y > 1024 || l.dim.z > 64 || blocks == 0 ||
        l.grid.x > 0x7fffffff || l.grid.y > 65535 || l.grid.z > 65535)
        fail("invalid launch: grid (%u,%u,%u), block (%u,%u,%u)", l.grid.x, l.grid.y, l.grid.z, l.dim.x, l.dim.y,
             l.dim.z);
    if (l.smem > l.smem_limit)
        fail("%zu bytes of dynamic shared memory, the limit is %zu (cudaFuncSetAttribute raises it up to %zu)", l.smem,
             l.smem_limit, SMEM_OPT_IN);
    std::vector<uint32_t> sequence;
    uint64_t rng = order().seed ^ l.number << 32;
    if (order().shuffle) {
        sequence.resize(blocks);
        for (uint64_t k = 0; k < blocks; k++) sequence[k] = (uint32_t)k;
        shuffle(sequence, rng);
    }
#ifdef CU_RACES
    static unsigned next_id = 1;
    if (next_id + blocks >= 1u << 25) {             // ids start over: forget the old stamps
        madvise(global_cells(), m.top * sizeof(Cell), MADV_DONTNEED);
        next_id = 1;
    }
    first_block_id() = next_id;
    next_id += blocks;
#endif
    #pragma omp parallel if (blocks > 1 && blocks * n >= 2048 && !RACES)    // a small launch is not worth a team
    {
        if (!block()) block() = new Block;
        Block* b = block();
        install_handler();
        Launching scope(&l);
        b->launch = &l;
        b->threads.resize(n);
        b->order.resize(n);
        if (!b->dynamic_end) {                      // dynamic shared memory ends at a closed page
            char* map = (char*)mmap(nullptr, SMEM_MAP, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (map == MAP_FAILED) fail("no shared memory: %s", strerror(errno));
            b->dynamic_end = map + SMEM_MAP - PAGE;
            mprotect(b->dynamic_end, PAGE, PROT_NONE);
        }
        b->dynamic = b->dynamic_end - ((l.smem + 15) & ~(size_t)15);
        #pragma omp for schedule(dynamic)
        for (uint64_t k = 0; k < blocks; k++) {
            uint64_t index = order().shuffle ? sequence[k] : order().reverse ? blocks - 1 - k : k;
#ifdef CU_RACES
            b->id = first_block_id() + (unsigned)index;
#endif
            run_block(b, index);
        }
        b->launch = nullptr;
    }
}

template <class T> void check_argument(int i, T v) {
    if constexpr (std::is_pointer<T>::value) {
        char text[200];
        if (!v) return;
        if (Allocation* a = find_allocation((const void*)v)) return open_allocation(a);
        if (!in_range((const void*)v)) fail("argument %d is a pointer to host memory", i);
        fail("argument %d points %s", i, describe((const void*)v, text, sizeof text));
    }
}
template <class... P> struct Kernel {               // what kernel<<<...>>> becomes; calling it launches
    void (*f)(P...);
    Launch l;
    void operator()(std::common_type_t<P>... args) {
        install_handler();
        Launching scope(&l);
        DeviceAccess access;
        int i = 0;
        (check_argument(++i, args), ...);
        (void)i;
        auto call = [&, this] { f(args...); };
        l.body = [](void* c) { (*(decltype(call)*)c)(); };
        l.arg = &call;
        run(l);
    }
};
template <class... P>
Kernel<P...> bind(void (*f)(P...), const char* name, const char* file, int line, dim3 grid, dim3 dim, size_t smem = 0,
                  const void* = nullptr) {
    auto& opt_in = memory().smem_opt_in;
    auto it = opt_in.find((const void*)f);
    size_t limit = it == opt_in.end() ? SMEM : (size_t)it->second;
    return {f, {name, file, line, grid, dim, smem, limit, nullptr, nullptr, 0}};
}

inline void* dynamic_shared() { return block()->dynamic; }
// A static __shared__ variable: the first thread of a block that gets here poisons it.
inline void declare_shared(void* p, size_t bytes) {
    Block* b = block();
    for (const Shared& s : b->shared) if (s.p == p) return;
    Thread* me = b->me;
    b->me = nullptr;                                // the poison is no access
    memset(p, 0xff, bytes);
    b->shared.push_back({(char*)p, bytes, new_cells(bytes)});
    b->me = me;
    b->static_bytes += bytes;
    if (b->static_bytes > SMEM || b->static_bytes + b->launch->smem > std::max(SMEM, b->launch->smem_limit))
        fail("%zu bytes of static and %zu of dynamic shared memory are more than a block may have", b->static_bytes,
             b->launch->smem);
}

// Warp collectives: leave value, vote and whose value is wanted; take result and ballot once all the mask's lanes came.
inline Thread* collective(unsigned mask, int source, int vote, int line, const char* file) {
    Thread* t = block()->me;
    if (!(mask >> (t->index % 32) & 1))
        fail("%s:%d: lane %d calls a warp collective whose mask %08x does not name it", file, line, t->index % 32,
             mask);
    t->mask = mask;
    t->source = source;
    t->vote = vote;
    wait(AT_WARP, line, file);
    return t;
}
template <class T> T exchange(unsigned mask, T v, int source, int line, const char* file) {
    static_assert(sizeof(T) <= 16, "a shuffle moves up to 16 bytes");
    memcpy(block()->me->value, &v, sizeof(T));
    Thread* t = collective(mask, source, 0, line, file);
    memcpy(&v, t->result, sizeof(T));
    return v;
}
inline int lane() { return block()->me->index % 32; }
inline int barrier(int vote, int line, const char* file) {      // returns how many voted yes
    block()->me->vote = vote;
    wait(AT_BLOCK, line, file);
    return block()->votes;
}
} // namespace cu

// ------------------------------------------------------------------------------------------------
// what device code calls

#define threadIdx (cu::block()->me->idx)
#define blockIdx (cu::block()->idx)
#define blockDim (cu::block()->launch->dim)
#define gridDim (cu::block()->launch->grid)
#define CU_AT int line = __builtin_LINE(), const char* file = __builtin_FILE()

inline void __syncthreads(CU_AT) { cu::barrier(0, line, file); }
inline int __syncthreads_count(int p, CU_AT) { return cu::barrier(p, line, file); }
inline int __syncthreads_or(int p, CU_AT) { return cu::barrier(p, line, file) != 0; }
inline int __syncthreads_and(int p, CU_AT) { return cu::barrier(!p, line, file) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu, CU_AT) { cu::collective(mask, cu::lane(), 0, line, file); }
inline unsigned __ballot_sync(unsigned m, int p, CU_AT) { return cu::collective(m, cu::lane(), p, line, file)->ballot; }
inline int __any_sync(unsigned m, int p, CU_AT) { return __ballot_sync(m, p, line, file) != 0; }
inline int __all_sync(unsigned m, int p, CU_AT) { return __ballot_sync(m, !p, line, file) == 0; }
// A lane that the shuffle would take from outside its segment of `width` lanes keeps its own value.
template <class T> T __shfl_sync(unsigned m, T v, int source, int width = 32, CU_AT) {
    return cu::exchange(m, v, (cu::lane() & ~(width - 1)) + (source & (width - 1)), line, file);
}
template <class T> T __shfl_xor_sync(unsigned m, T v, int x, int width = 32, CU_AT) {
    int l = cu::lane(), s = l ^ x;
    return cu::exchange(m, v, s / width > l / width ? l : s, line, file);
}
template <class T> T __shfl_down_sync(unsigned m, T v, int d, int width = 32, CU_AT) {
    int l = cu::lane();
    return cu::exchange(m, v, (l & (width - 1)) + d >= width ? l : l + d, line, file);
}
template <class T> T __shfl_up_sync(unsigned m, T v, int d, int width = 32, CU_AT) {
    int l = cu::lane();
    return cu::exchange(m, v, (l & (width - 1)) < d ? l : l - d, line, file);
}
inline void __threadfence() { __sync_synchronize(); }
inline void __threadfence_block() { __sync_synchronize(); }

namespace cu {
// *p = f(*p) in one step; returns the old value
template <class T, class F> CU_QUIET T atomic(T* p, F f) {
    on_access(p, sizeof(T), true, true);
    T old, want;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do want = f(old); while (!__atomic_compare_exchange(p, &old, &want, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    return old;
}
} // namespace cu
template <class T, class U> T atomicAdd(T* p, U v) { return cu::atomic(p, [=](T x) -> T { return x + (T)v; }); }
template <class T, class U> T atomicSub(T* p, U v) { return cu::atomic(p, [=](T x) -> T { return x - (T)v; }); }
template <class T, class U> T atomicMin(T* p, U v) {
    return cu::atomic(p, [=](T x) -> T { return (T)v < x ? (T)v : x; });
}
template <class T, class U> T atomicMax(T* p, U v) {
    return cu::atomic(p, [=](T x) -> T { return x < (T)v ? (T)v : x; });
}
template <class T, class U> T atomicAnd(T* p, U v) { return cu::atomic(p, [=](T x) -> T { return x & (T)v; }); }
template <class T, class U> T atomicOr(T* p, U v) { return cu::atomic(p, [=](T x) -> T { return x | (T)v; }); }
template <class T, class U> T atomicXor(T* p, U v) { return cu::atomic(p, [=](T x) -> T { return x ^ (T)v; }); }
template <class T, class U> T atomicExch(T* p, U v) { return cu::atomic(p, [=](T) -> T { return (T)v; }); }
template <class T, class U, class V> T atomicCAS(T* p, U compare, V v) {
    return cu::atomic(p, [=](T x) -> T { return x == (T)compare ? (T)v : x; });
}

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcs(T* p, T v) { *p = v; }
template <class T> void __stcg(T* p, T v) { *p = v; }

// min and max of two integers or of two floating-point numbers (nvcc refuses one of each); of floats the one not NaN
template <class A, class B>
using cu_common = std::enable_if_t<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value &&
                                   std::is_integral<A>::value == std::is_integral<B>::value, std::common_type_t<A, B>>;
template <class A, class B> cu_common<A, B> min(A a, B b) {
    cu_common<A, B> x = a, y = b;
    return x != x ? y : y < x ? y : x;
}
template <class A, class B> cu_common<A, B> max(A a, B b) {
    cu_common<A, B> x = a, y = b;
    return x != x ? y : x < y ? y : x;
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x); *c = cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; }
inline float sinpif(float x) { return (float)sin(3.14159265358979323846 * x); }
inline float cospif(float x) { return (float)cos(3.14159265358979323846 * x); }
inline void sincospif(float x, float* s, float* c) { *s = sinpif(x); *c = cospif(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }       // never part of an FMA
inline float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
inline float __fsub_rn(float a, float b) { volatile float r = a - b; return r; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
namespace cu {
template <class T, class F> T bits(F f) {
    static_assert(sizeof(T) == sizeof(F), "");
    T t;
    memcpy(&t, &f, sizeof t);
    return t;
}
}  // namespace cu
inline int __float_as_int(float f) { return cu::bits<int>(f); }
inline unsigned __float_as_uint(float f) { return cu::bits<unsigned>(f); }
inline float __int_as_float(int i) { return cu::bits<float>(i); }
inline float __uint_as_float(unsigned i) { return cu::bits<float>(i); }
inline long long __double_as_longlong(double d) { return cu::bits<long long>(d); }
inline double __longlong_as_double(long long i) { return cu::bits<double>(i); }
inline int __float2int_rn(float f) { return (int)nearbyintf(f); }
inline int __float2int_rz(float f) { return (int)f; }
inline int __float2int_rd(float f) { return (int)floorf(f); }
inline int __float2int_ru(float f) { return (int)ceilf(f); }
inline float __int2float_rn(int i) { return (float)i; }
inline float __uint2float_rn(unsigned i) { return (float)i; }
[[noreturn]] inline void __trap() { cu::fail("__trap()"); }
#define CUDART_INF_F (cu::bits<float>(0x7f800000))
#define CUDART_NAN_F (cu::bits<float>(0x7fffffff))

// ------------------------------------------------------------------------------------------------
// bf16: stored in 16 bits, rounded to nearest even; arithmetic goes through float and rounds each result

struct alignas(2) __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) {
        uint32_t u = cu::bits<uint32_t>(f);
        bits = (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    __nv_bfloat16(double d) : __nv_bfloat16((float)d) {}
    __nv_bfloat16(int i) : __nv_bfloat16((float)i) {}
    operator float() const { return cu::bits<float>((uint32_t)bits << 16); }
};
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
#define CU_BF16(OP, NAME)                                                                                            \
    inline __nv_bfloat16 operator OP(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a OP (float)b; }              \
    inline __nv_bfloat162 operator OP(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x OP b.x, a.y OP b.y}; }       \
    inline __nv_bfloat16& operator OP##=(__nv_bfloat16& a, __nv_bfloat16 b) { return a = a OP b; }                   \
    inline __nv_bfloat16 NAME(__nv_bfloat16 a, __nv_bfloat16 b) { return a OP b; }                                   \
    inline __nv_bfloat162 NAME##2(__nv_bfloat162 a, __nv_bfloat162 b) { return a OP b; }
CU_BF16(+, __hadd) CU_BF16(-, __hsub) CU_BF16(*, __hmul) CU_BF16(/, __hdiv)
#define CU_BF16_COMPARE(OP) inline bool operator OP(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a OP (float)b; }
CU_BF16_COMPARE(==) CU_BF16_COMPARE(!=) CU_BF16_COMPARE(<) CU_BF16_COMPARE(>) CU_BF16_COMPARE(<=) CU_BF16_COMPARE(>=)
inline __nv_bfloat16 operator-(__nv_bfloat16 a) { return -(float)a; }
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) { return fmaf(a, b, c); }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __nv_bfloat16 __float2bfloat16(float f) { return f; }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
inline __nv_bfloat16 __double2bfloat16(double d) { return d; }
inline float __bfloat162float(__nv_bfloat16 b) { return b; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { __nv_bfloat16 b; b.bits = u; return b; }
inline float2 __bfloat1622float2(__nv_bfloat162 b) { return {b.x, b.y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 f) { return {f.x, f.y}; }
inline __nv_bfloat162 __float2bfloat162_rn(float f) { return {f, f}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 b) { return b.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 b) { return b.y; }
inline float __low2float(__nv_bfloat162 b) { return b.x; }
inline float __high2float(__nv_bfloat162 b) { return b.y; }

// ------------------------------------------------------------------------------------------------
// runtime API: everything happens at once, streams and events are names

enum cudaError_t {
    cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorInvalidConfiguration = 9,
    cudaErrorNoDevice = 100, cudaErrorInvalidDevice = 101, cudaErrorNotReady = 600, cudaErrorUnknown = 999
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMaxSharedMemoryPerBlock = 8, cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
struct cudaDeviceProp {                             // fields that CUDA 13 still has
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor, regsPerBlock;
    int l2CacheSize, memoryBusWidth, integrated, managedMemory, concurrentManagedAccess;
};
typedef struct CUstream_st { int unused; }* cudaStream_t;
typedef struct CUevent_st { std::chrono::steady_clock::time_point time; bool recorded; }* cudaEvent_t;
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventDisableTiming = 2, cudaHostAllocDefault = 0 };

namespace cu {
inline cudaError_t result(cudaError_t e) { if (e != cudaSuccess) memory().last_error = e; return e; }
inline cudaError_t copy(const char* call, void* to, const void* from, size_t n, cudaMemcpyKind kind) {
    if (n == 0) return cudaSuccess;
    DeviceAccess access;
    bool to_device = in_range(to), from_device = in_range(from);
    if (kind == cudaMemcpyDefault) kind = (cudaMemcpyKind)(to_device + 2 * from_device);
    if (kind & 1) need_device(call, "the destination", to, n);
    else if (to_device) fail("%s: the destination is device memory, the direction says host", call);
    if (kind & 2) need_device(call, "the source", from, n);
    else if (from_device) fail("%s: the source is device memory, the direction says host", call);
    memmove(to, from, n);
    return cudaSuccess;
}
inline cudaError_t set(const char* call, void* p, int value, size_t n) {
    if (n == 0) return cudaSuccess;
    DeviceAccess access;
    need_device(call, "the destination", p, n);
    memset(p, value, n);
    return cudaSuccess;
}
} // namespace cu

inline const char* cudaGetErrorName(cudaError_t e) {
    switch (e) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorNotReady: return "cudaErrorNotReady";
        default: return "cudaErrorUnknown";
    }
}
inline const char* cudaGetErrorString(cudaError_t e) {
    switch (e) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNotReady: return "device not ready";
        default: return "unknown error";
    }
}
inline cudaError_t cudaPeekAtLastError() { return (cudaError_t)cu::memory().last_error; }
inline cudaError_t cudaGetLastError() { cudaError_t e = cudaPeekAtLastError(); cu::memory().last_error = 0; return e; }

template <class T> cudaError_t cudaMalloc(T** out, size_t bytes) {
    *out = nullptr;
    if (bytes == 0) return cudaSuccess;
    *out = (T*)cu::allocate(bytes);
    return cu::result(*out ? cudaSuccess : cudaErrorMemoryAllocation);
}
inline cudaError_t cudaFree(void* p) { if (p) cu::release(p); return cudaSuccess; }
template <class T> cudaError_t cudaMallocHost(T** out, size_t bytes, unsigned = 0) {
    *out = (T*)malloc(bytes ? bytes : 1);
    if (*out) memset((void*)*out, 0xff, bytes);
    return cu::result(*out ? cudaSuccess : cudaErrorMemoryAllocation);
}
template <class T> cudaError_t cudaHostAlloc(T** out, size_t bytes, unsigned) { return cudaMallocHost(out, bytes); }
inline cudaError_t cudaFreeHost(void* p) { free(p); return cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind k) {
    return cu::copy("cudaMemcpy", to, from, n, k);
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind k, cudaStream_t = 0) {
    return cu::copy("cudaMemcpyAsync", to, from, n, k);
}
inline cudaError_t cudaMemset(void* p, int value, size_t n) { return cu::set("cudaMemset", p, value, n); }
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t = 0) {
    return cu::set("cudaMemsetAsync", p, value, n);
}
template <class T>
cudaError_t cudaMemcpyToSymbol(T& symbol, const void* from, size_t n, size_t offset = 0,
                               cudaMemcpyKind = cudaMemcpyHostToDevice) {
    if (offset > sizeof(T) || n > sizeof(T) - offset)
        cu::fail("cudaMemcpyToSymbol: %zu bytes at %zu into a symbol of %zu", n, offset, sizeof(T));
    memcpy((char*)&symbol + offset, from, n);
    return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    cu::Memory& m = cu::memory();
    cu::DeviceAccess access;
    if (!m.base) cu::open_range();
    *total = m.cap;
    *free_bytes = m.cap - m.allocated;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr a, int device) {
    if (device != 0) return cu::result(cudaErrorInvalidDevice);
    switch (a) {
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)cu::SMEM; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMultiProcessorCount: *value = 4; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)cu::SMEM_OPT_IN; break;
        default: return cu::result(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    if (device != 0) return cu::result(cudaErrorInvalidDevice);
    size_t unused;
    *p = cudaDeviceProp();
    snprintf(p->name, sizeof p->name, "CPU (cuda_on_cpu)");
    cudaMemGetInfo(&unused, &p->totalGlobalMem);
    p->sharedMemPerBlock = cu::SMEM;
    p->sharedMemPerBlockOptin = cu::SMEM_OPT_IN;
    p->sharedMemPerMultiprocessor = cu::SMEM_OPT_IN + 1024;
    p->major = 8;
    p->multiProcessorCount = 4;                     // few, so that small tests already wrap a grid sized by it
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->regsPerBlock = 65536;
    p->l2CacheSize = 4 << 20;
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* n) { *n = 1; return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return cu::result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
inline cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaDeviceReset() { return cudaSuccess; }

inline cudaError_t cudaFuncSetAttribute(const void* f, cudaFuncAttribute a, int value) {
    if (a != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || value > (int)cu::SMEM_OPT_IN) return cu::result(cudaErrorInvalidValue);
    cu::memory().smem_opt_in[f] = value;
    return cudaSuccess;
}
template <class... P> cudaError_t cudaFuncSetAttribute(void (*f)(P...), cudaFuncAttribute a, int value) {
    return cudaFuncSetAttribute((const void*)f, a, value);
}
template <class F> cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}

inline cudaError_t cudaStreamCreate(cudaStream_t* s) { *s = new CUstream_st(); return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreate(s); }
inline cudaError_t cudaStreamDestroy(cudaStream_t s) { delete s; return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) { return cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t* e) { *e = new CUevent_st(); return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
inline cudaError_t cudaEventDestroy(cudaEvent_t e) { delete e; return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t = 0) {
    e->time = std::chrono::steady_clock::now();
    e->recorded = true;
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
    if (!a->recorded || !b->recorded) return cu::result(cudaErrorInvalidValue);
    *ms = std::chrono::duration<float, std::milli>(b->time - a->time).count();
    return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------
// cuBLAS: C = alpha op(A) op(B) + beta C, column-major, fp32 or bf16, always accumulated in fp32 in one fixed order

enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_INITIALIZED = 1, CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7, CUBLAS_STATUS_EXECUTION_FAILED = 13, CUBLAS_STATUS_NOT_SUPPORTED = 15
};
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 };
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
typedef cudaDataType_t cudaDataType;
enum cublasComputeType_t {
    CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_PEDANTIC = 69, CUBLAS_COMPUTE_32F_FAST_16F = 74,
    CUBLAS_COMPUTE_32F_FAST_16BF = 75, CUBLAS_COMPUTE_32F_FAST_TF32 = 77
};
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };
enum cublasMath_t {
    CUBLAS_DEFAULT_MATH = 0, CUBLAS_TENSOR_OP_MATH = 1, CUBLAS_PEDANTIC_MATH = 2, CUBLAS_TF32_TENSOR_OP_MATH = 3,
    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
};
typedef struct cublasContext { cublasMath_t math; }* cublasHandle_t;

namespace cu {
typedef float float4v __attribute__((vector_size(16)));

// Panels of W rows of op(X): out[panel][k][row], rows past the end zero. Element (row, k) is x[row rs + k ks].
template <int W, class T>
CU_QUIET void pack(float* out, const T* x, size_t rows, size_t depth, size_t rs, size_t ks, bool tf32) {
    #pragma omp parallel for if (rows * depth > 1 << 16)
    for (size_t panel = 0; panel < (rows + W - 1) / W; panel++) {
        for (size_t k = 0; k < depth; k++) {
            for (size_t w = 0; w < W; w++) {
                size_t r = panel * W + w;
                float v = r < rows ? (float)x[r * rs + k * ks] : 0.0f;
                if (tf32 && isfinite(v)) v = bits<float>((bits<uint32_t>(v) + 0x1000) & 0xffffe000);  // 10-bit mantissa
                out[(panel * depth + k) * W + w] = v;
            }
        }
    }
}
// An 8 x 4 tile of the product, summed in chunks of 256 along k.
CU_QUIET inline void tile(float* out, const float* a, const float* b, size_t depth) {
    float4v sum[8] = {};
    for (size_t k0 = 0; k0 < depth; k0 += 256) {
        float4v c0 = {}, c1 = {}, c2 = {}, c3 = {}, c4 = {}, c5 = {}, c6 = {}, c7 = {};
        for (size_t k = k0; k < std::min(depth, k0 + 256); k++) {
            float4v lo = *(const float4v*)(a + k * 8), hi = *(const float4v*)(a + k * 8 + 4);
            const float* q = b + k * 4;
            c0 += lo * q[0]; c1 += hi * q[0]; c2 += lo * q[1]; c3 += hi * q[1];
            c4 += lo * q[2]; c5 += hi * q[2]; c6 += lo * q[3]; c7 += hi * q[3];
        }
        sum[0] += c0; sum[1] += c1; sum[2] += c2; sum[3] += c3; sum[4] += c4; sum[5] += c5; sum[6] += c6; sum[7] += c7;
    }
    memcpy(out, sum, sizeof sum);
}
template <class TA, class TC>
CU_QUIET void gemm(size_t m, size_t n, size_t depth, float alpha, const TA* A, size_t lda, bool ta,
                   const TA* B, size_t ldb, bool tb, float beta, TC* C, size_t ldc, bool tf32) {
    size_t rows = (m + 7) / 8, columns = (n + 3) / 4;
    float* a = (float*)aligned_alloc(64, (rows * 8 * depth * 4 + 63) & ~(size_t)63);
    float* b = (float*)aligned_alloc(64, (columns * 4 * depth * 4 + 63) & ~(size_t)63);
    if (!a || !b) fail("cuBLAS: out of memory");
    pack<8>(a, A, m, depth, ta ? lda : 1, ta ? 1 : lda, tf32);
    pack<4>(b, B, n, depth, tb ? 1 : ldb, tb ? ldb : 1, tf32);
    #pragma omp parallel for collapse(2) if (m * n * depth > 1 << 18)
    for (size_t j = 0; j < columns; j++) {
        for (size_t i = 0; i < rows; i++) {
            float acc[32];
            tile(acc, a + i * 8 * depth, b + j * 4 * depth, depth);
            for (size_t jj = 0; jj < std::min((size_t)4, n - j * 4); jj++) {
                for (size_t ii = 0; ii < std::min((size_t)8, m - i * 8); ii++) {
                    TC* c = &C[(j * 4 + jj) * ldc + i * 8 + ii];
                    float old = beta != 0.0f ? beta * (float)*c : 0.0f;         // with beta = 0, C is not read
                    *c = (TC)(alpha * acc[jj * 8 + ii] + old);
                }
            }
        }
    }
    free(a);
    free(b);
}

struct Operand { const void* p; cudaDataType type; int ld; long long stride; cublasOperation_t op; };
inline size_t check_operand(const char* call, const char* name, const Operand& x, size_t rows, size_t cols, int batch) {
    if (x.ld < (long long)rows)
        fail("%s: the leading dimension of %s, %d, is less than its %zu rows", call, name, x.ld, rows);
    if (batch > 1 && x.stride < 0) fail("%s: the stride of %s is negative", call, name);
    size_t elements = (size_t)(batch - 1) * (size_t)x.stride + (cols - 1) * (size_t)x.ld + rows;
    size_t bytes = elements * (x.type == CUDA_R_16BF ? 2 : 4);
    need_device(call, name, x.p, bytes);
    return bytes;
}
inline cublasStatus_t gemm_any(const char* call, cublasHandle_t h, int m, int n, int k, const void* alpha_p, Operand A,
                               Operand B, const void* beta_p, Operand C, int batch, cublasComputeType_t compute) {
    if (!h) fail("%s: no handle", call);
    if (m <= 0 || n <= 0 || k <= 0 || batch <= 0)
        fail("%s: m = %d, n = %d, k = %d, batch = %d: sizes must be positive", call, m, n, k, batch);
    if (in_range(alpha_p) || in_range(beta_p)) fail("%s: alpha and beta must be host pointers", call);
    bool bf16 = A.type == CUDA_R_16BF, c_bf16 = C.type == CUDA_R_16BF, fp32 = A.type == CUDA_R_32F,
         c_fp32 = C.type == CUDA_R_32F;
    if (A.type != B.type || !((fp32 && c_fp32) || (bf16 && (c_bf16 || c_fp32))))
        fail("%s: types must be fp32 for all, or bf16 for A and B with bf16 or fp32 for C", call);
    if (compute < CUBLAS_COMPUTE_32F || compute > CUBLAS_COMPUTE_32F_FAST_TF32)
        fail("%s: the compute type must be one of CUBLAS_COMPUTE_32F", call);
    DeviceAccess access;
    bool ta = A.op != CUBLAS_OP_N, tb = B.op != CUBLAS_OP_N;
    size_t bytes_a = check_operand(call, "A", A, ta ? k : m, ta ? m : k, batch);
    size_t bytes_b = check_operand(call, "B", B, tb ? n : k, tb ? k : n, batch);
    size_t bytes_c = check_operand(call, "C", C, m, n, batch);
    // Columns may lie in each other's gaps (parts of one wide matrix): only without gaps is this surely an overlap
    auto meets_c = [&](const Operand& x, size_t bytes) {
        return (char*)x.p < (char*)C.p + bytes_c && (char*)C.p < (char*)x.p + bytes;
    };
    bool gaps = batch > 1 || C.ld != m || A.ld != (ta ? k : m) || B.ld != (tb ? n : k);
    if (!gaps && (meets_c(A, bytes_a) || meets_c(B, bytes_b))) fail("%s: C overlaps A or B", call);
    if (batch > 1 && C.stride == 0) fail("%s: every batch writes the same C", call);
    float alpha = *(const float*)alpha_p, beta = *(const float*)beta_p;
    bool tf32 = fp32 && (compute == CUBLAS_COMPUTE_32F_FAST_TF32 ||
                         (compute == CUBLAS_COMPUTE_32F && h->math == CUBLAS_TF32_TENSOR_OP_MATH));
    for (int i = 0; i < batch; i++) {
        size_t a = (size_t)i * A.stride, b = (size_t)i * B.stride, c = (size_t)i * C.stride;
        auto call_gemm = [&](auto* pa, auto* pb, auto* pc) {
            gemm(m, n, k, alpha, pa + a, A.ld, ta, pb + b, B.ld, tb, beta, pc + c, C.ld, tf32);
        };
        typedef __nv_bfloat16 half;
        if (fp32) call_gemm((const float*)A.p, (const float*)B.p, (float*)C.p);
        else if (c_fp32) call_gemm((const half*)A.p, (const half*)B.p, (float*)C.p);
        else call_gemm((const half*)A.p, (const half*)B.p, (half*)C.p);
    }
    return CUBLAS_STATUS_SUCCESS;
}
} // namespace cu

inline const char* cublasGetStatusString(cublasStatus_t s) { return s ? "a cuBLAS error" : "CUBLAS_STATUS_SUCCESS"; }
inline cublasStatus_t cublasCreate(cublasHandle_t* h) {
    *h = new cublasContext{CUBLAS_DEFAULT_MATH};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t h) { delete h; return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t m) { h->math = m; return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSgemm(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                                  const float* alpha, const float* A, int lda, const float* B, int ldb,
                                  const float* beta, float* C, int ldc) {
    return cu::gemm_any("cublasSgemm", h, m, n, k, alpha, {A, CUDA_R_32F, lda, 0, ta}, {B, CUDA_R_32F, ldb, 0, tb},
                        beta, {C, CUDA_R_32F, ldc, 0, CUBLAS_OP_N}, 1, CUBLAS_COMPUTE_32F);
}
inline cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m,
                                                int n, int k, const float* alpha, const float* A, int lda,
                                                long long stride_a, const float* B, int ldb, long long stride_b,
                                                const float* beta, float* C, int ldc, long long stride_c, int batch) {
    return cu::gemm_any("cublasSgemmStridedBatched", h, m, n, k, alpha, {A, CUDA_R_32F, lda, stride_a, ta},
                        {B, CUDA_R_32F, ldb, stride_b, tb}, beta, {C, CUDA_R_32F, ldc, stride_c, CUBLAS_OP_N}, batch,
                        CUBLAS_COMPUTE_32F);
}
inline cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                                   const void* alpha, const void* A, cudaDataType type_a, int lda, const void* B,
                                   cudaDataType type_b, int ldb, const void* beta, void* C, cudaDataType type_c,
                                   int ldc, cublasComputeType_t compute, cublasGemmAlgo_t) {
    return cu::gemm_any("cublasGemmEx", h, m, n, k, alpha, {A, type_a, lda, 0, ta}, {B, type_b, ldb, 0, tb},
                        beta, {C, type_c, ldc, 0, CUBLAS_OP_N}, 1, compute);
}
inline cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m,
                                                 int n, int k, const void* alpha, const void* A, cudaDataType type_a,
                                                 int lda, long long stride_a, const void* B, cudaDataType type_b,
                                                 int ldb, long long stride_b, const void* beta, void* C,
                                                 cudaDataType type_c, int ldc, long long stride_c, int batch,
                                                 cublasComputeType_t compute, cublasGemmAlgo_t) {
    return cu::gemm_any("cublasGemmStridedBatchedEx", h, m, n, k, alpha, {A, type_a, lda, stride_a, ta},
                        {B, type_b, ldb, stride_b, tb}, beta, {C, type_c, ldc, stride_c, CUBLAS_OP_N}, batch, compute);
}

// ------------------------------------------------------------------------------------------------
// cuFFT: one-dimensional transforms of any length, batched and strided, computed in double and rounded once. No
// direction is normalised, and C2R destroys its input: cuFFT may, so that here it always does.

enum cufftResult_t {
    CUFFT_SUCCESS = 0, CUFFT_INVALID_PLAN = 1, CUFFT_ALLOC_FAILED = 2, CUFFT_INVALID_VALUE = 4, CUFFT_EXEC_FAILED = 6,
    CUFFT_INVALID_SIZE = 8
};
typedef cufftResult_t cufftResult;
enum cufftType_t { CUFFT_R2C = 0x2a, CUFFT_C2R = 0x2c, CUFFT_C2C = 0x29 };
typedef cufftType_t cufftType;
enum { CUFFT_FORWARD = -1, CUFFT_INVERSE = 1 };
typedef int cufftHandle;
typedef float cufftReal;
typedef float2 cuComplex;
typedef float2 cufftComplex;
inline float cuCrealf(cuComplex z) { return z.x; }
inline float cuCimagf(cuComplex z) { return z.y; }
inline cuComplex make_cuComplex(float x, float y) { return {x, y}; }
inline cuComplex cuCmulf(cuComplex a, cuComplex b) { return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; }
inline cuComplex cuCaddf(cuComplex a, cuComplex b) { return {a.x + b.x, a.y + b.y}; }
inline cuComplex cuConjf(cuComplex z) { return {z.x, -z.y}; }

namespace cu {
struct Complex { double x, y; };
CU_QUIET inline Complex operator+(Complex a, Complex b) { return {a.x + b.x, a.y + b.y}; }
CU_QUIET inline Complex operator-(Complex a, Complex b) { return {a.x - b.x, a.y - b.y}; }
CU_QUIET inline Complex operator*(Complex a, Complex b) { return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; }
CU_QUIET inline Complex conj(Complex a) { return {a.x, -a.y}; }
inline Complex root(size_t k, size_t n) {           // exp(-2 pi i k / n)
    double angle = -2.0 * 3.14159265358979323846 * (double)k / (double)n;
    return {cos(angle), sin(angle)};
}

// Forward transforms of length n. A length that is not a power of two is a convolution of length m (Bluestein): with
// jk = (j^2 + k^2 - (k - j)^2) / 2, X_k = w_k sum_j (x_j w_j) conj(w_{k-j}), where w_j = exp(-pi i j^2 / n).
struct Transform {
    size_t n, m;                                    // m: the power of two that is worked in
    std::vector<Complex> roots, chirp, filter;      // of m; w; the transform of conj(w)
    Transform(size_t n) : n(n), m(1) {
        bool power = (n & (n - 1)) == 0;
        while (m < (power ? n : 2 * n - 1)) m *= 2;
        roots.resize(m / 2 + 1);
        for (size_t k = 0; k <= m / 2; k++) roots[k] = root(k, m);
        if (power) return;
        chirp.resize(n);
        filter.assign(m, {0, 0});
        for (size_t j = 0; j < n; j++) {
            chirp[j] = root((size_t)((unsigned __int128)j * j % (2 * n)), 2 * n);
            filter[j] = filter[(m - j) % m] = conj(chirp[j]);
        }
        radix2(filter.data());
    }
    CU_QUIET void radix2(Complex* x) const {
        for (size_t i = 1, j = 0; i < m; i++) {     // bit reversal
            size_t bit = m >> 1;
            for (; j & bit; bit >>= 1) j ^= bit;
            j ^= bit;
            if (i < j) std::swap(x[i], x[j]);
        }
        for (size_t half = 1; half < m; half *= 2) {
            for (size_t i = 0; i < m; i += 2 * half) {
                for (size_t k = 0; k < half; k++) {
                    Complex a = x[i + k], b = x[i + k + half] * roots[k * (m / 2 / half)];
                    x[i + k] = a + b;
                    x[i + k + half] = a - b;
                }
            }
        }
    }
    CU_QUIET void forward(Complex* x) const {       // x has room for m
        if (chirp.empty()) return radix2(x);
        for (size_t j = 0; j < n; j++) x[j] = x[j] * chirp[j];
        for (size_t j = n; j < m; j++) x[j] = {0, 0};
        radix2(x);
        for (size_t j = 0; j < m; j++) x[j] = conj(x[j] * filter[j]);
        radix2(x);                                  // conj before and after: the inverse
        for (size_t j = 0; j < n; j++) x[j] = conj(x[j]) * chirp[j] * Complex{1.0 / (double)m, 0};
    }
};

struct Plan {
    cufftType type;
    long long n, batch, istride, idist, ostride, odist;
    bool packed;                                    // no strides given
    Transform transform;
};
inline std::map<int, Plan*>& plans() { static auto* p = new std::map<int, Plan*>; return *p; }

inline cufftResult execute(const char* call, cufftHandle handle, cufftType type, void* in, void* out, int direction) {
    if (!plans().count(handle)) fail("%s: plan %d does not exist", call, handle);
    const Plan& p = *plans()[handle];
    if (p.type != type) fail("%s: the plan is for another type of transform", call);
    bool real_in = type == CUFFT_R2C, real_out = type == CUFFT_C2R;
    size_t n = p.n, bins = n / 2 + 1, count_in = real_out ? bins : n, count_out = real_in ? bins : n;
    size_t element_in = real_in ? 4 : 8, element_out = real_out ? 4 : 8;
    DeviceAccess access;
    need_device(call, "the input", in, ((p.batch - 1) * p.idist + (count_in - 1) * p.istride + 1) * element_in);
    need_device(call, "the output", out, ((p.batch - 1) * p.odist + (count_out - 1) * p.ostride + 1) * element_out);
    if ((uintptr_t)in % 8 || (uintptr_t)out % 8) fail("%s: input and output must be aligned to 8 bytes", call);
    if (in == out && type != CUFFT_C2C && p.batch > 1 && p.packed)
        fail("%s: in place and batched needs a plan that says the padded distances", call);
    #pragma omp parallel if (p.batch * p.transform.m > 1 << 14)
    {
        std::vector<Complex> x(p.transform.m);
        #pragma omp for
        for (long long b = 0; b < p.batch; b++) {
            float *re = (float*)in + b * p.idist, *out_re = (float*)out + b * p.odist;
            float2 *z = (float2*)in + b * p.idist, *out_z = (float2*)out + b * p.odist;
            for (size_t i = 0; i < count_in; i++) {
                float2 v = real_in ? float2{re[i * p.istride], 0.0f} : z[i * p.istride];
                x[i] = {v.x, v.y};
            }
            if (real_out) {                         // what the other half of a real signal's spectrum must be
                x[0].y = 0;
                if (n % 2 == 0) x[n / 2].y = 0;
                for (size_t i = bins; i < n; i++) x[i] = conj(x[n - i]);
            }
            bool inverse = real_out || direction == CUFFT_INVERSE;
            if (inverse) for (size_t i = 0; i < n; i++) x[i] = conj(x[i]);
            p.transform.forward(x.data());
            if (inverse) for (size_t i = 0; i < n; i++) x[i] = conj(x[i]);
            if (real_out && in != out) for (size_t i = 0; i < count_in; i++) memset(&z[i * p.istride], 0xff, 8);
            for (size_t i = 0; i < count_out; i++) {
                if (real_out) out_re[i * p.ostride] = (float)x[i].x;
                else out_z[i * p.ostride] = {(float)x[i].x, (float)x[i].y};
            }
        }
    }
    return CUFFT_SUCCESS;
}
} // namespace cu

// inembed and onembed of a one-dimensional plan only say whether the strides count: null means packed.
inline cufftResult cufftPlanMany(cufftHandle* plan, int rank, int* n, int* inembed, int istride, int idist,
                                 int* onembed, int ostride, int odist, cufftType type, int batch) {
    if (rank != 1) cu::fail("cufftPlanMany: only one dimension here, not %d", rank);
    if (n[0] < 1 || batch < 1) return CUFFT_INVALID_SIZE;
    if (!inembed != !onembed) cu::fail("cufftPlanMany: inembed and onembed must both be null or both be set");
    bool packed = !inembed;
    int bins = n[0] / 2 + 1;
    if (packed) istride = ostride = 1, idist = type == CUFFT_C2R ? bins : n[0], odist = type == CUFFT_R2C ? bins : n[0];
    if (istride < 1 || ostride < 1 || (batch > 1 && (idist < 1 || odist < 1))) return CUFFT_INVALID_VALUE;
    static int next = 1;
    cu::plans()[next] = new cu::Plan{type, n[0], batch, istride, idist, ostride, odist, packed, cu::Transform(n[0])};
    *plan = next++;
    return CUFFT_SUCCESS;
}
inline cufftResult cufftPlan1d(cufftHandle* plan, int n, cufftType type, int batch) {
    return cufftPlanMany(plan, 1, &n, nullptr, 1, 0, nullptr, 1, 0, type, batch);
}
inline cufftResult cufftDestroy(cufftHandle plan) {
    if (!cu::plans().count(plan)) return CUFFT_INVALID_PLAN;
    delete cu::plans()[plan];
    cu::plans().erase(plan);
    return CUFFT_SUCCESS;
}
inline cufftResult cufftSetStream(cufftHandle, cudaStream_t) { return CUFFT_SUCCESS; }
inline cufftResult cufftGetSize(cufftHandle, size_t* bytes) { *bytes = 0; return CUFFT_SUCCESS; }
inline cufftResult cufftExecR2C(cufftHandle p, cufftReal* in, cufftComplex* out) {
    return cu::execute("cufftExecR2C", p, CUFFT_R2C, in, out, CUFFT_FORWARD);
}
inline cufftResult cufftExecC2R(cufftHandle p, cufftComplex* in, cufftReal* out) {
    return cu::execute("cufftExecC2R", p, CUFFT_C2R, in, out, CUFFT_INVERSE);
}
inline cufftResult cufftExecC2C(cufftHandle p, cufftComplex* in, cufftComplex* out, int direction) {
    return cu::execute("cufftExecC2C", p, CUFFT_C2C, in, out, direction);
}
