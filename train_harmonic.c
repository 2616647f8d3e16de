// train_harmonic.c: Harmonic, a hierarchical state space model on three timescales (arXiv 2606.24650), trained on
// the CPU in plain C. Forward and backward are written out by hand; test/gradcheck.c holds every line of them.
// train_harmonic.cu beside this file is the same program in CUDA, function for function.
//
// The model. B batch, T time, C channels, M = 2C, V vocabulary. No positional embedding anywhere: time is carried by
// the recurrence alone.
//
//     logits (B,T,V) = y headᵀ                         y = h_1 + h_2 + h_3   (B,T,C)
//            ▲
//            ├── h_3 ◄── level 3 ◄── [x ; n(e_2)]      e_2 = h_1 - h_2 P_2ᵀ    A in (0.992,0.999): 125 to 1000 tokens
//            ├── h_2 ◄── level 2 ◄── [x ; n(e_1)]      e_1 = x   - h_1 P_1ᵀ    A in (0.90, 0.975):  10 to 40 tokens
//            └── h_1 ◄── level 1 ◄──  x                x   = wte[token]        A in (0.55, 0.88):  2.2 to 8.3 tokens
//
// Level l predicts the level below it (h_0 = x), and what it failed to predict is what the next level gets to see. n is
// LayerNorm without parameters. Each level, with its own weights (inp is x, or x beside the normalised error):
//
//     ga  = Wa2 silu(Wa1 inp + ba1) + ba2          (C <- 2C <- C or 2C)
//     gb  = Wb2 silu(Wb1 inp + bb1) + bb2
//     A_t = lo + (hi - lo) sigmoid(ga_t)           the decay, inside the level's band: 1/(1-A) tokens of memory
//     s_t = A_t s_{t-1} + (1 - A_t) tanh(gb_t)     the recurrence, elementwise: a moving average with a learned pace
//     h_t = LayerNorm(s_t)
//
// Parameters: 2VC + 34C² + 24C; 27,965,952 at V = 50257, C = 256, the published count.
//
// Flags that change the computation:
//   --bands caged      the bands above
//   --bands flat       all three levels use the middle band: the paper's ablation (it removes the slow band *and* the
//                      hierarchy of timescales at once; the next two tell them apart)
//   --bands flat-wide  all three use (0.55, 0.999)
//   --bands free       (0, 1) for all; the biases ba2 start A at the centres of the caged bands
//   --error off        levels see [x ; n(h of the level below)] and there is no P: does prediction error matter?
//   --stateful         B contiguous streams; s is carried from batch to batch (no gradient flows back through it)
//   --layers N         N > 1 stacks blocks, x <- x + block(LayerNorm(x)), with a LayerNorm before the head
//   --tie              the head is wte. Then wte starts with standard deviation (3C)^-½ and x = (3C)^½ wte[token],
//                      so that x and the logits both start at the size they have untied
//
// Reading order: the scan (the heart), level_forward, block_forward, model_forward; then their backwards; head_loss
// for how the vocabulary is kept out of memory; main last. Choices where the paper is silent are marked [fill].
//
// Measured (2 cores of a Xeon with AVX-512, gcc 12; `make bench` prints it): a step of harmonic-28m on 16,384 tokens
// takes 7.7 s, 56% of the machine's multiply-add peak; 86% of it is the head. Matrix products run at 61% to 90% of that
// peak, the scans at 49% and 65% of the bandwidth of copying. 490 us a token at 1 x 65,536 tokens, 492 at 64 x 1,024.
//
// Build and run:   make run        Everything it can do:   ./build/cpu/train_harmonic --help

#include <ctype.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <tgmath.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#define MODEL_NAME "harmonic"

#ifndef REAL
#define REAL float              // -DREAL=double builds the same program in double, for gradient checks
#endif
typedef REAL real;

// Ends the program: one line on stderr, exit code 2. Every complaint about input goes through here.
__attribute__((noreturn, format(printf, 1, 2)))
static void die(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "error: ");
    vfprintf(stderr, fmt, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(2);
}

#include "dev/dataloader.h"     // token files -> batches
#include "dev/tokenizer.h"      // text <-> tokens
#include "dev/safetensors.h"    // checkpoints
#include "dev/options.h"        // the command line

// ----------------------------------------------------------------------------------------------------------------
// small utilities

static size_t smin(size_t a, size_t b) { return a < b ? a : b; }

// Wall clock in seconds.
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Zeroed memory, aligned to a cache line; dies where there is not enough.
static void* allocate(size_t bytes, const char* what) {
    size_t rounded = (bytes + 63) / 64 * 64;
    void* p = aligned_alloc(64, rounded ? rounded : 64);
    if (!p) die("not enough memory: %.1f MB for %s (see --plan)", bytes / 1e6, what);
    return memset(p, 0, rounded);
}

// splitmix64 (Steele, Lea & Flood 2014): 64 random bits from a 64-bit state.
static uint64_t rng_next(uint64_t* state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

// Uniform in [0,1), 53 bits.
static double rng_uniform(uint64_t* state) { return (rng_next(state) >> 11) * 0x1p-53; }

// Normal with mean 0 and deviation 1 (Box-Muller). In double, so that C and CUDA draw the same weights to the bit.
static double rng_normal(uint64_t* state) {
    double u = 1 - rng_uniform(state), v = rng_uniform(state);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

// A state decays into numbers too small for a float's exponent ("denormals") when its input is silent, and a CPU then
// computes 100 times slower. This thread rounds them to zero from now on.
static void flush_denormals_here(void) {
#if defined(__SSE__)
    _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    __asm__ volatile("msr fpcr, %0" : : "r"(fpcr | 1 << 24));
#endif
}

// All threads do. gcc's OpenMP lets every thread keep its own setting; clang's sets all to the caller's at each
// parallel region, and undoes what the region changed.
static void flush_denormals(void) {
    flush_denormals_here();
    #pragma omp parallel
    flush_denormals_here();
}

// e^x to 8e-8 relative, as arithmetic that the compiler turns into vector instructions (libm's expf stays scalar and is
// ten times slower). x = n ln 2 + r with |r| <= ln(2)/2; e^r is its Taylor series, 2^n goes straight into the exponent
// bits. x is held inside [-87, 87], where neither e^x nor e^-x leaves a float's range; NaN stays NaN.
// Gradient checks, in double, use libm's.
static inline real fast_exp(real x) {
    x = x < -87 ? -87 : x > 87 ? 87 : x;
    if (sizeof(real) == 8) return exp(x);
    float n = floorf((float)x * 1.442695041f + 0.5f);
    float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));      // ln 2 in two parts: the first product is exact
    float p = 1 + r * (1 + r * (1/2.f + r * (1/6.f + r * (1/24.f + r * (1/120.f + r * (1/720.f + r * (1/5040.f)))))));
    union { uint32_t bits; float value; } power = { (uint32_t)((int32_t)n + 127) << 23 };
    return p * power.value;
}

static inline real sigmoid(real x) { return 1 / (1 + fast_exp(-x)); }
static inline real fast_tanh(real x) { return 1 - 2 / (1 + fast_exp(2 * x)); }

// ----------------------------------------------------------------------------------------------------------------
// matrix product: the one routine that 9 of 10 operations of a training step run through

// C(i,j) = sum_k A(i,k) B(k,j), or += where add is set. i < M, j < N, k < K. Every matrix is given by its strides:
// A(i,k) = A[i*ai + k*ak], B(k,j) = B[k*bk + j*bj], C(i,j) = C[i*ci + j]. So the same loops serve X Wᵀ (forward),
// dY W (dX) and dYᵀ X (dW), and a part of a matrix is a pointer and the whole matrix's stride.
//
// A CPU core can do two 16-wide multiply-adds a cycle but load only two vectors, so numbers must be used many times
// once loaded. A block of B (KC x NC) is copied ("packed") into panels of NR columns, in the order in which they are
// read and zero-padded at the edge, and `matmul_tile` keeps an MR x NR corner of C in registers for all k of the block:
// MR + 2 loads serve 2 MR multiply-adds. A is read where it stands if its rows are contiguous; else MR rows at a time
// are packed. An element of C is summed by one thread in the order of k, whatever the number of threads. Threads that
// already share out work among themselves may call it too: each then has a block of its own, and computes alone.
#ifdef __AVX512F__
enum { VECTOR_BYTES = 64, MR = 8 };     // 2 x 8 of 32 registers hold C
#else
enum { VECTOR_BYTES = 32, MR = 6 };     // 2 x 6 of 16
#endif
enum { NR = 2 * VECTOR_BYTES / sizeof(real), KC = 256, NC = 1024 };
typedef real vector __attribute__((vector_size(VECTOR_BYTES)));

// out(h,NR) = sum_k a(i,k) b(k,NR), or += with add; a(i,k) = a[i*ai + k*ak], h <= MR, out and b aligned.
static inline void matmul_tile(real* out, const real* a, size_t ai, size_t ak, size_t h,
                               const real* b, size_t K, int add) {
    vector sum[MR][2] = {{{0}}};
    const real* row[MR];
    for (size_t i = 0; i < MR; i++) row[i] = a + smin(i, h - 1) * ai;      // past the end: the last row again
    for (size_t k = 0; k < K; k++) {
        const vector* line = (const vector*)(b + k * NR);
        for (int i = 0; i < MR; i++) {
            sum[i][0] += row[i][k * ak] * line[0];
            sum[i][1] += row[i][k * ak] * line[1];
        }
    }
    for (size_t i = 0; i < h; i++) {
        vector* o = (vector*)(out + i * NR);
        o[0] = add ? o[0] + sum[i][0] : sum[i][0];
        o[1] = add ? o[1] + sum[i][1] : sum[i][1];
    }
}

static void matmul(real* C, const real* A, const real* B, size_t M, size_t N, size_t K,
                   size_t ci, size_t ai, size_t ak, size_t bk, size_t bj, int add) {
    if (M == 1 && ak == 1 && bk == 1) {         // a vector times a transposed matrix (one token): dot products
        #pragma omp parallel for if (N * K > 50000)
        for (size_t j = 0; j < N; j++) {
            real sum = 0;
            for (size_t k = 0; k < K; k++) sum += A[k] * B[j * bj + k];
            C[j] = add ? C[j] + sum : sum;
        }
        return;
    }
    static _Thread_local real* own = NULL;      // (NC/NR panels, KC, NR)
    if (!own) own = (real*)allocate(sizeof(real) * KC * NC, "the packed block of a matmul");
    real* packed = own;                         // of the thread that called
    for (size_t j0 = 0; j0 < N; j0 += NC)
    for (size_t k0 = 0; k0 < K; k0 += KC) {
        size_t n = smin(NC, N - j0), kc = smin(KC, K - k0);
        #pragma omp parallel if (M * N * K > 500000)     // less is done before the other threads are awake
        {
            #pragma omp for
            for (size_t j = 0; j < n; j += NR) {
                const real* b = B + k0 * bk + (j0 + j) * bj;
                real* p = packed + j * kc;
                size_t w = smin(NR, n - j);
                if (bj == 1)
                    for (size_t k = 0; k < kc; k++)
                        for (size_t q = 0; q < NR; q++) p[k * NR + q] = q < w ? b[k * bk + q] : 0;
                else
                    for (size_t q = 0; q < NR; q++)
                        for (size_t k = 0; k < kc; k++) p[k * NR + q] = q < w ? b[k * bk + q * bj] : 0;
            }
            real a[KC * MR] __attribute__((aligned(64))), out[MR * NR] __attribute__((aligned(64)));
            #pragma omp for
            for (size_t i = 0; i < M; i += MR) {
                const real* s = A + i * ai + k0 * ak;
                size_t h = smin(MR, M - i);
                if (ak != 1)
                    for (size_t k = 0; k < kc; k++)
                        for (size_t q = 0; q < MR; q++) a[k * MR + q] = q < h ? s[q * ai + k * ak] : 0;
                for (size_t j = 0; j < n; j += NR) {
                    if (ak == 1) matmul_tile(out, s, ai, 1, h, packed + j * kc, kc, 0);
                    else         matmul_tile(out, a, 1, MR, h, packed + j * kc, kc, 0);
                    size_t w = smin(NR, n - j);
                    for (size_t q = 0; q < h; q++) {
                        real* c = C + (i + q) * ci + j0 + j;
                        if (add || k0 > 0) for (size_t p = 0; p < w; p++) c[p] += out[q * NR + p];
                        else               for (size_t p = 0; p < w; p++) c[p]  = out[q * NR + p];
                    }
                }
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------
// layers. `rows` is B*T. Loops are split over rows or over fixed blocks of channels, never by the number of threads,
// so that results do not depend on it.

enum { BLOCK = 128 };       // channels that one thread takes at a time: 512 bytes in a row keep the prefetcher going

// x(rows,C) = scale * wte(V,C)[tokens(rows)]
static void embedding_forward(real* x, const int* tokens, const real* wte, real scale, size_t rows, size_t C) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < C; c++) x[r * C + c] = scale * wte[tokens[r] * C + c];
}

// dwte[tokens[r]] += scale * dx[r]. A token may stand in several rows: a thread takes a block of channels and walks
// all rows, so no two threads add to the same number and the order of the sum is fixed.
static void embedding_backward(real* dwte, const int* tokens, const real* dx, real scale, size_t rows, size_t C) {
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += BLOCK)
        for (size_t r = 0; r < rows; r++)
            for (size_t c = c0; c < smin(C, c0 + BLOCK); c++) dwte[tokens[r] * C + c] += scale * dx[r * C + c];
}

// out(C) += sum over r of x(rows,C): the gradient of every bias
static void sum_rows(real* out, const real* x, size_t rows, size_t C) {
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += BLOCK) {
        size_t w = smin(BLOCK, C - c0);
        real sum[BLOCK] = {0};
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < w; c++) sum[c] += x[r * C + c0 + c];
        for (size_t c = 0; c < w; c++) out[c0 + c] += sum[c];
    }
}

// out(rows,OC) = inp(rows,IC) wᵀ + bias, w (OC,IC) with row stride ldw >= IC, so that w may be some columns of a wider
// matrix: W [x ; e] is computed as W_left x + W_right e (add = 1 for the second), and nothing is concatenated.
static void linear_forward(real* out, const real* inp, const real* w, const real* bias,
                           size_t rows, size_t IC, size_t OC, size_t ldw, int add) {
    matmul(out, inp, w, rows, OC, IC, OC, IC, 1, 1, ldw, add);
    if (!bias) return;
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t o = 0; o < OC; o++) out[r * OC + o] += bias[o];
}

// out = inp wᵀ + bias  =>  dinp = dout w,  dw = doutᵀ inp,  dbias = sum of dout's rows. Added to; NULL: not wanted.
static void linear_backward(real* dinp, real* dw, real* dbias, const real* dout, const real* inp, const real* w,
                            size_t rows, size_t IC, size_t OC, size_t ldw) {
    if (dinp) matmul(dinp, dout, w, rows, IC, OC, IC, OC, 1, ldw, 1, 1);
    if (dw) matmul(dw, dout, inp, OC, IC, rows, ldw, 1, OC, IC, 1, 1);
    if (dbias) sum_rows(dbias, dout, rows, OC);
}

// out = z sigmoid(z), all (rows,C)
static void silu_forward(real* out, const real* z, size_t rows, size_t C) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t i = r * C; i < (r + 1) * C; i++) out[i] = z[i] * sigmoid(z[i]);
}

// d/dz z σ(z) = σ + z σ (1 - σ) = σ (1 + z (1 - σ)).  d is dout on entry and dz on return.
static void silu_backward(real* d, const real* z, size_t rows, size_t C) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t i = r * C; i < (r + 1) * C; i++) {
            real sg = sigmoid(z[i]);
            d[i] *= sg * (1 + z[i] * (1 - sg));
        }
}

// out = (x - mean) rstd w + b over each row of x (rows,C); mean, rstd (rows) are kept for the backward. With
// w = b = NULL it is n(.), the norm without parameters. eps 1e-5 keeps a constant row finite.
static void layernorm_forward(real* out, real* mean, real* rstd, const real* x, const real* w,
                              const real* b, size_t rows, size_t C) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        const real* xr = x + r * C;
        real m = 0, v = 0;
        for (size_t c = 0; c < C; c++) m += xr[c];
        m /= C;
        for (size_t c = 0; c < C; c++) v += (xr[c] - m) * (xr[c] - m);
        real s = 1 / sqrt(v / C + (real)1e-5);
        for (size_t c = 0; c < C; c++) {
            real n = (xr[c] - m) * s;
            out[r * C + c] = w ? n * w[c] + b[c] : n;
        }
        mean[r] = m;
        rstd[r] = s;
    }
}

// With n = (x - mean) rstd, g = dout w:  dx = rstd (g - mean(g) - n mean(g n)), since moving x along the constant row
// or along n itself changes nothing in n.  dw = sum over rows of dout n,  db = sum of dout.  All are added to.
static void layernorm_backward(real* dx, real* dw, real* db, const real* dout, const real* x, const real* mean,
                               const real* rstd, const real* w, size_t rows, size_t C) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        const real *xr = x + r * C, *d = dout + r * C;
        real m = mean[r], s = rstd[r], g_mean = 0, gn_mean = 0;
        for (size_t c = 0; c < C; c++) {
            real g = w ? d[c] * w[c] : d[c];
            g_mean += g;
            gn_mean += g * (xr[c] - m) * s;
        }
        g_mean /= C;
        gn_mean /= C;
        for (size_t c = 0; c < C; c++) {
            real g = w ? d[c] * w[c] : d[c];
            dx[r * C + c] += s * (g - g_mean - (xr[c] - m) * s * gn_mean);
        }
    }
    if (!w) return;
    sum_rows(db, dout, rows, C);
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += BLOCK) {
        size_t width = smin(BLOCK, C - c0);
        real sum[BLOCK] = {0};
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < width; c++) sum[c] += dout[r * C + c0 + c] * (x[r * C + c0 + c] - mean[r]) * rstd[r];
        for (size_t c = 0; c < width; c++) dw[c0 + c] += sum[c];
    }
}

// The recurrence. For every sequence b and channel c, along t:
//     A_t = lo + (hi - lo) σ(ga_t)        s_t = A_t s_{t-1} + (1 - A_t) tanh(gb_t)
// s, ga, gb (B,T,C); s_{-1} is s0 (B,C). 1 - A_t is computed as (1 - hi) + (hi - lo) σ(-ga_t): in the slow band, where
// A is 0.999, the difference 1 - A would lose three of float's seven digits.
// Sequences and channels are independent, so threads share them out; time itself is walked in order.
static void scan_forward(real* s, const real* ga, const real* gb, const real* s0,
                         double lo, double hi, size_t B, size_t T, size_t C) {
    real low = lo, width = hi - lo, rest = 1 - hi;
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
    for (size_t c0 = 0; c0 < C; c0 += BLOCK) {
        size_t n = smin(BLOCK, C - c0);
        real carry[BLOCK];
        memcpy(carry, s0 + b * C + c0, n * sizeof(real));
        for (size_t t = 0; t < T; t++) {
            size_t at = (b * T + t) * C + c0;
            for (size_t c = 0; c < n; c++) {
                real e = fast_exp(-ga[at + c]), sg = 1 / (1 + e);               // σ(ga); σ(-ga) = e σ(ga)
                real A = low + width * sg, one_minus_A = rest + width * e * sg;
                carry[c] = A * carry[c] + one_minus_A * fast_tanh(gb[at + c]);
                s[at + c] = carry[c];
            }
        }
    }
}

// s_t acts on the loss directly (ds_t, from the layers above) and through s_{t+1} = A_{t+1} s_t + ..., so the whole
// gradient G_t of s_t runs the recurrence in reverse:
//     G_t  = ds_t + A_{t+1} G_{t+1}
//     dA_t = G_t s_{t-1} - G_t tanh(gb_t)                     the second term through 1 - A_t
//     dgb_t = G_t (1 - A_t) (1 - tanh²(gb_t))
//     dga_t = dA_t (hi - lo) σ (1 - σ)
// dga, dgb (B,T,C) are written. s0 gets no gradient: a carried state is cut off from the past that made it.
static void scan_backward(real* dga, real* dgb, const real* ds, const real* s, const real* ga, const real* gb,
                          const real* s0, double lo, double hi, size_t B, size_t T, size_t C) {
    real low = lo, width = hi - lo, rest = 1 - hi;
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
    for (size_t c0 = 0; c0 < C; c0 += BLOCK) {
        size_t n = smin(BLOCK, C - c0);
        real carry[BLOCK] = {0};                // A_{t+1} G_{t+1}
        for (size_t t = T; t-- > 0;) {
            size_t at = (b * T + t) * C + c0;
            const real* before = t > 0 ? s + at - C : s0 + b * C + c0;
            for (size_t c = 0; c < n; c++) {
                real e = fast_exp(-ga[at + c]), sg = 1 / (1 + e), th = fast_tanh(gb[at + c]);
                real A = low + width * sg, one_minus_A = rest + width * e * sg;
                real G = ds[at + c] + carry[c];
                dga[at + c] = G * (before[c] - th) * width * sg * e * sg;
                dgb[at + c] = G * one_minus_A * (1 - th * th);
                carry[c] = A * G;
            }
        }
    }
}

// The head and the loss, forward and backward in one pass over HEAD_ROWS rows at a time, so that the logits, the
// largest thing in the model, exist only for those rows: memory does not grow with T V.
//     logits = y headᵀ      loss = mean over rows with target >= 0 of  log sum_v e^logit_v - logit_target
//     dlogits = (softmax - onehot(target)) / count         dy = dlogits head      dhead += dlogitsᵀ y
// y, dy (rows,C), head, dhead (V,C), targets (rows), logits (HEAD_ROWS,V) scratch. dy == NULL: loss only. dy is
// written, dhead is added to; `scale` multiplies both (1/accum). Returns the mean loss in nats (0 where no row has a
// target); *counted and *correct receive the number of targets, and of those that had the largest logit.
enum { HEAD_ROWS = 512 };
static double head_loss(real* dy, real* dhead, const real* y, const real* head, const int* targets, real* logits,
                        double scale, size_t rows, size_t C, size_t V, size_t* counted, size_t* correct) {
    size_t count = 0, hits = 0;
    double total = 0;
    for (size_t r = 0; r < rows; r++) count += targets[r] >= 0;
    real dloss = count ? scale / count : 0;
    for (size_t r0 = 0; r0 < rows; r0 += HEAD_ROWS) {
        size_t n = smin(HEAD_ROWS, rows - r0);
        double losses[HEAD_ROWS];
        int hit[HEAD_ROWS];
        linear_forward(logits, y + r0 * C, head, NULL, n, C, V, C, 0);
        #pragma omp parallel for
        for (size_t r = 0; r < n; r++) {
            real* z = logits + r * V;
            int target = targets[r0 + r];
            losses[r] = hit[r] = 0;
            if (target < 0) { memset(z, 0, V * sizeof(real)); continue; }
            real top = z[0], sum = 0, z_target = z[target];
            for (size_t v = 0; v < V; v++) top = z[v] > top ? z[v] : top;
            for (size_t v = 0; v < V; v++) { z[v] = fast_exp(z[v] - top); sum += z[v]; }
            losses[r] = log((double)sum) + top - z_target;
            hit[r] = z_target == top;
            if (!dy) continue;
            real factor = dloss / sum;
            for (size_t v = 0; v < V; v++) z[v] *= factor;
            z[target] -= dloss;
        }
        for (size_t r = 0; r < n; r++) { total += losses[r]; hits += hit[r]; }
        if (!dy) continue;
        memset(dy + r0 * C, 0, n * C * sizeof(real));
        linear_backward(dy + r0 * C, dhead, NULL, logits, y + r0 * C, head, n, C, V, C);
    }
    *counted = count;
    *correct = hits;
    return count ? total / count : 0;
}

// ----------------------------------------------------------------------------------------------------------------
// the model: sizes, parameters, activations

enum { CAGED, FLAT, FLAT_WIDE, FREE };

typedef struct {
    int vocab, channels, layers;        // V, C, N
    int bands;                          // CAGED, FLAT, FLAT_WIDE, FREE
    int error;                          // 1: levels 2 and 3 see prediction errors; 0: the level below itself
    int tie;                            // 1: the head is wte
    int stateful;                       // 1: s is carried from batch to batch
} Config;

static const double BANDS[3][2] = {{0.55, 0.88}, {0.90, 0.975}, {0.992, 0.999}};     // (lo, hi) of levels 1, 2, 3

// The band (lo, hi) in which level l (0, 1, 2) may choose its decay.
static void band(const Config* c, int l, double* lo, double* hi) {
    *lo = c->bands == FREE ? 0 : c->bands == FLAT_WIDE ? BANDS[0][0] : c->bands == FLAT ? BANDS[1][0] : BANDS[l][0];
    *hi = c->bands == FREE ? 1 : c->bands == FLAT_WIDE ? BANDS[2][1] : c->bands == FLAT ? BANDS[1][1] : BANDS[l][1];
}

// A table of named tensors inside one allocation. The table of parameters drives initialisation, AdamW, checkpoints,
// gradient checks and --plan; the activations have one too, so that a NaN can be traced to where it first stands.
enum { NONE, NORMAL, UNIFORM, CONSTANT };
static const char* const init_names[] = {"", "N(0, s)", "U(+-a)", "constant"};
typedef struct {
    char name[40];
    int ndim, init, decay;              // decay: 1 if weight decay applies (tensors of two dimensions)
    double scale;                       // of the initial values: NORMAL's deviation, UNIFORM's bound, CONSTANT's value
    size_t shape[2], size, offset;
} Tensor;
typedef struct { Tensor* tensors; int count; size_t total; } Table;

// Appends a tensor of `rows` x `cols` (cols 0: one dimension), named as printf would, and returns where it will lie:
// base + offset, or NULL while base is NULL (a walk that only measures).
__attribute__((format(printf, 7, 8)))
static real* take(Table* t, real* base, size_t rows, size_t cols, int init, double scale, const char* name, ...) {
    if ((t->count & (t->count - 1)) == 0)       // 0, 1, 2, 4, 8 ...: full, so double it
        t->tensors = (Tensor*)realloc(t->tensors, (t->count ? 2 * t->count : 1) * sizeof(Tensor));
    if (!t->tensors) die("not enough memory for the table of tensors");
    Tensor* x = &t->tensors[t->count++];
    memset(x, 0, sizeof *x);
    va_list args;
    va_start(args, name);
    vsnprintf(x->name, sizeof x->name, name, args);
    va_end(args);
    x->ndim = cols ? 2 : 1;
    x->decay = cols > 0;
    x->init = init;
    x->scale = scale;
    x->shape[0] = rows;
    x->shape[1] = cols;
    x->size = rows * (cols ? cols : 1);
    if ((double)t->total + (double)x->size > 1e18)
        die("%s would have more than 10^18 numbers: no machine can hold this model", x->name);
    x->offset = t->total;
    t->total += (x->size + 15) / 16 * 16;       // every tensor starts on a cache line
    return base ? base + x->offset : NULL;
}

typedef struct { real *wa1, *ba1, *wa2, *ba2, *wb1, *bb1, *wb2, *bb2, *ln_w, *ln_b; } LevelParams;
typedef struct { LevelParams level[3]; real *p1, *p2, *norm_w, *norm_b; } BlockParams;    // norms: only with layers > 1
typedef struct { real *wte, *head, *lnf_w, *lnf_b; BlockParams* block; } Params;          // tied: head == wte

// Lays the parameters (or their gradients: the same shapes) out at base. Initial values [fill, measured]: embedding
// N(0,1), linear weights and biases U(±fan_in^-½), norms 1 and 0. With smaller weights the states of level 1 start so
// small that LayerNorm's eps swallows them, and the model trains far worse.
static void params_layout(Params* p, Table* t, real* base, const Config* c) {
    size_t V = c->vocab, C = c->channels;
    double bound_c = 1 / sqrt((double)C), bound_2c = 1 / sqrt(2.0 * C);
    p->wte = take(t, base, V, C, NORMAL, c->tie ? 1 / sqrt(3.0 * C) : 1, "wte");
    for (int n = 0; n < c->layers; n++) {
        BlockParams* b = &p->block[n];
        if (c->layers > 1) {
            b->norm_w = take(t, base, C, 0, CONSTANT, 1, "block%d.norm_w", n);
            b->norm_b = take(t, base, C, 0, CONSTANT, 0, "block%d.norm_b", n);
        }
        for (int l = 0; l < 3; l++) {
            LevelParams* q = &b->level[l];
            size_t in = l == 0 ? C : 2 * C;
            double bound_in = l == 0 ? bound_c : bound_2c, centre = (BANDS[l][0] + BANDS[l][1]) / 2;
            int free = c->bands == FREE;        // then A starts at the centre of the caged band: σ(ba2) = centre
            q->wa1  = take(t, base, 2 * C, in,  UNIFORM, bound_in, "block%d.level%d.wa1", n, l + 1);
            q->ba1  = take(t, base, 2 * C, 0,   UNIFORM, bound_in, "block%d.level%d.ba1", n, l + 1);
            q->wa2  = take(t, base, C, 2 * C,   UNIFORM, bound_2c, "block%d.level%d.wa2", n, l + 1);
            q->ba2  = take(t, base, C, 0, free ? CONSTANT : UNIFORM, free ? log(centre / (1 - centre)) : bound_2c,
                           "block%d.level%d.ba2", n, l + 1);
            q->wb1  = take(t, base, 2 * C, in,  UNIFORM, bound_in, "block%d.level%d.wb1", n, l + 1);
            q->bb1  = take(t, base, 2 * C, 0,   UNIFORM, bound_in, "block%d.level%d.bb1", n, l + 1);
            q->wb2  = take(t, base, C, 2 * C,   UNIFORM, bound_2c, "block%d.level%d.wb2", n, l + 1);
            q->bb2  = take(t, base, C, 0,       UNIFORM, bound_2c, "block%d.level%d.bb2", n, l + 1);
            q->ln_w = take(t, base, C, 0,       CONSTANT, 1,       "block%d.level%d.ln_w", n, l + 1);
            q->ln_b = take(t, base, C, 0,       CONSTANT, 0,       "block%d.level%d.ln_b", n, l + 1);
        }
        if (c->error) {
            b->p1 = take(t, base, C, C, UNIFORM, bound_c, "block%d.p1", n);
            b->p2 = take(t, base, C, C, UNIFORM, bound_c, "block%d.p2", n);
        }
    }
    if (c->layers > 1) {
        p->lnf_w = take(t, base, C, 0, CONSTANT, 1, "lnf_w");
        p->lnf_b = take(t, base, C, 0, CONSTANT, 0, "lnf_b");
    }
    p->head = c->tie ? p->wte : take(t, base, V, C, UNIFORM, bound_c, "head");
}

// What a forward pass leaves behind for the backward pass; R = B*T rows.
typedef struct {
    real *e, *e_mean, *e_rstd;          // (R,C), (R): prediction error, before its norm (levels 2 and 3)
    real *ne;                           // (R,C): n(e)
    real *za, *zb;                      // (R,2C): the gate MLPs before silu
    real *ga, *gb;                      // (R,C): their outputs
    real *s0, *state;                   // (B,C): the state before the first token; the carried state, in Acts.states
    real *s, *s_mean, *s_rstd, *h;      // (R,C), (R), (R), (R,C)
} LevelActs;
typedef struct {
    real *x;                            // (R,C): what enters the model (block 0) or has left the block before
    real *nx, *nx_mean, *nx_rstd;       // LayerNorm(x), what the block sees; with one layer nx is x itself
    LevelActs level[3];
} BlockActs;
typedef struct {
    int B, T;
    Table table, states;                // states: what --stateful and model_step carry on, (B,C) each
    real *memory, *state_memory;
    BlockActs* block;
    real *out, *y, *y_mean, *y_rstd;    // (R,C): what leaves the last block; LayerNorm of it (one layer: y is out)
    real *u;                            // (R,2C) scratch: silu(z)
    real *logits;                       // (min(R, HEAD_ROWS), V) scratch
    real *dy, *dout, *dx, *dh[3];       // (R,C) gradients, only for training; du (R,2C)
    real *ds, *dga, *dgb, *dne, *du;
} Acts;

// Lays a's tensors out at base and its carried states at state_base (NULL, NULL: only measures).
static void acts_layout(Acts* a, real* base, real* state_base, const Config* c, int train) {
    size_t V = c->vocab, C = c->channels, B = a->B, R = B * a->T;
    Table* t = &a->table;
    t->count = a->states.count = 0;
    t->total = a->states.total = 0;
    for (int n = 0; n < c->layers; n++)
        for (int l = 0; l < 3; l++)
            a->block[n].level[l].state = take(&a->states, state_base, B, C, NONE, 0, "block%d.level%d.s", n, l + 1);
    for (int n = 0; n < c->layers; n++) {
        BlockActs* b = &a->block[n];
        b->nx = b->x = take(t, base, R, C, NONE, 0, "block%d.x", n);
        if (c->layers > 1) {
            b->nx      = take(t, base, R, C, NONE, 0, "block%d.nx", n);
            b->nx_mean = take(t, base, R, 0, NONE, 0, "block%d.nx_mean", n);
            b->nx_rstd = take(t, base, R, 0, NONE, 0, "block%d.nx_rstd", n);
        }
        for (int l = 0; l < 3; l++) {
            LevelActs* q = &b->level[l];
            if (l > 0) {
                q->e      = c->error ? take(t, base, R, C, NONE, 0, "block%d.level%d.e", n, l + 1) : b->level[l - 1].h;
                q->e_mean = take(t, base, R, 0, NONE, 0, "block%d.level%d.e_mean", n, l + 1);
                q->e_rstd = take(t, base, R, 0, NONE, 0, "block%d.level%d.e_rstd", n, l + 1);
                q->ne     = take(t, base, R, C, NONE, 0, "block%d.level%d.ne", n, l + 1);
            }
            q->za     = take(t, base, R, 2 * C, NONE, 0, "block%d.level%d.za", n, l + 1);
            q->zb     = take(t, base, R, 2 * C, NONE, 0, "block%d.level%d.zb", n, l + 1);
            q->ga     = take(t, base, R, C, NONE, 0, "block%d.level%d.ga", n, l + 1);
            q->gb     = take(t, base, R, C, NONE, 0, "block%d.level%d.gb", n, l + 1);
            q->s0     = take(t, base, B, C, NONE, 0, "block%d.level%d.s0", n, l + 1);
            q->s      = take(t, base, R, C, NONE, 0, "block%d.level%d.s", n, l + 1);
            q->s_mean = take(t, base, R, 0, NONE, 0, "block%d.level%d.s_mean", n, l + 1);
            q->s_rstd = take(t, base, R, 0, NONE, 0, "block%d.level%d.s_rstd", n, l + 1);
            q->h      = take(t, base, R, C, NONE, 0, "block%d.level%d.h", n, l + 1);
        }
    }
    a->y = a->out = take(t, base, R, C, NONE, 0, "out");
    if (c->layers > 1) {
        a->y      = take(t, base, R, C, NONE, 0, "y");
        a->y_mean = take(t, base, R, 0, NONE, 0, "y_mean");
        a->y_rstd = take(t, base, R, 0, NONE, 0, "y_rstd");
    }
    a->u      = take(t, base, R, 2 * C, NONE, 0, "u");
    a->logits = take(t, base, smin(R, HEAD_ROWS), V, NONE, 0, "logits");
    if (!train) return;
    a->dy   = take(t, base, R, C, NONE, 0, "dy");
    a->dout = c->layers > 1 ? take(t, base, R, C, NONE, 0, "dout") : a->dy;
    a->dx   = take(t, base, R, C, NONE, 0, "dx");
    for (int l = 0; l < 3; l++) a->dh[l] = take(t, base, R, C, NONE, 0, "dh%d", l + 1);
    a->ds   = take(t, base, R, C, NONE, 0, "ds");
    a->dga  = take(t, base, R, C, NONE, 0, "dga");
    a->dgb  = take(t, base, R, C, NONE, 0, "dgb");
    a->dne  = take(t, base, R, C, NONE, 0, "dne");
    a->du   = take(t, base, R, 2 * C, NONE, 0, "du");
}

typedef struct {
    Config config;
    int B, T, train;                    // the size of a batch; 1 if gradients and optimizer state are allocated
    Table table;                        // of the parameters
    real *param_memory, *grad_memory, *adam_m, *adam_v;     // table.total numbers each
    Params p, g;
    Acts acts, step;                    // of a batch; of one token (generation)
    const int *tokens;                  // (B,T) of the last forward
    double grad_scale;                  // gradients are of grad_scale * loss (1/accum)
    size_t counted, correct;            // targets in the last batch, and how many had the largest logit
    int updates;                        // AdamW steps done
} Model;

// Computes every size and offset, allocates nothing (for --plan).
static void model_layout(Model* m, const Config* c, int B, int T, int train) {
    memset(m, 0, sizeof *m);
    m->config = *c;
    m->B = B;
    m->T = T;
    m->train = train;
    m->grad_scale = 1;
    m->p.block = (BlockParams*)calloc(c->layers, sizeof(BlockParams));
    m->g.block = (BlockParams*)calloc(c->layers, sizeof(BlockParams));
    m->acts.block = (BlockActs*)calloc(c->layers, sizeof(BlockActs));
    m->step.block = (BlockActs*)calloc(c->layers, sizeof(BlockActs));
    if (!m->p.block || !m->g.block || !m->acts.block || !m->step.block)
        die("not enough memory for %d layers", c->layers);
    m->acts.B = B;
    m->acts.T = T;
    m->step.B = m->step.T = 1;
    params_layout(&m->p, &m->table, NULL, c);
    acts_layout(&m->acts, NULL, NULL, c, train);
    acts_layout(&m->step, NULL, NULL, c, 0);
}

// Allocates a model for batches of B x T tokens, all zero; train = 0 leaves out what only training needs.
static void model_build(Model* m, const Config* c, int B, int T, int train) {
    model_layout(m, c, B, T, train);
    size_t bytes = m->table.total * sizeof(real);
    Table again = {0};
    m->param_memory = (real*)allocate(bytes, "parameters");
    params_layout(&m->p, &again, m->param_memory, c);
    if (train) {
        m->grad_memory = (real*)allocate(bytes, "gradients");
        m->adam_m = (real*)allocate(bytes, "AdamW's first moments");
        m->adam_v = (real*)allocate(bytes, "AdamW's second moments");
        again.count = 0;
        again.total = 0;
        params_layout(&m->g, &again, m->grad_memory, c);
    }
    free(again.tensors);
    m->acts.memory = (real*)allocate(m->acts.table.total * sizeof(real), "activations");
    m->acts.state_memory = (real*)allocate(m->acts.states.total * sizeof(real), "carried states");
    acts_layout(&m->acts, m->acts.memory, m->acts.state_memory, c, train);
    m->step.memory = (real*)allocate(m->step.table.total * sizeof(real), "the activations of one token");
    m->step.state_memory = (real*)allocate(m->step.states.total * sizeof(real), "the state of one sequence");
    acts_layout(&m->step, m->step.memory, m->step.state_memory, c, 0);
}

static void model_free(Model* m) {
    Acts* both[2] = { &m->acts, &m->step };
    for (int i = 0; i < 2; i++) {
        free(both[i]->table.tensors); free(both[i]->states.tensors);
        free(both[i]->memory); free(both[i]->state_memory);
    }
    free(m->table.tensors);
    free(m->param_memory); free(m->grad_memory); free(m->adam_m); free(m->adam_v);
    free(m->p.block); free(m->g.block); free(m->acts.block); free(m->step.block);
    memset(m, 0, sizeof *m);
}

// Bytes that each thread takes for itself while it works, beyond what model_build allocates: nothing here.
static size_t thread_bytes(const Model* m) { (void)m; return 0; }

// Bytes that every token of a generated text leaves behind: nothing, the state has one size.
static size_t token_bytes(const Model* m) { (void)m; return 0; }

// Number of parameters, and multiply-adds x 2 x 3 (forward, and two products backward) of all matrix products a token.
static size_t model_parameters(const Model* m) {
    size_t n = 0;
    for (int i = 0; i < m->table.count; i++) n += m->table.tensors[i].size;
    return n;
}
static double model_flops_per_token(const Model* m) {
    double n = m->config.tie ? 0 : -(double)m->config.vocab * m->config.channels;     // looking wte up costs nothing
    for (int i = 0; i < m->table.count; i++) n += m->table.tensors[i].ndim == 2 ? m->table.tensors[i].size : 0;
    return 6 * n;
}

// Draws the initial weights, tensor after tensor in the table's order, in double and rounded once.
static void model_init(Model* m, uint64_t seed) {
    for (int i = 0; i < m->table.count; i++) {
        const Tensor* t = &m->table.tensors[i];
        real* p = m->param_memory + t->offset;
        for (size_t k = 0; k < t->size; k++)
            p[k] = t->init == NORMAL ? t->scale * rng_normal(&seed)
                   : t->init == UNIFORM ? t->scale * (2 * rng_uniform(&seed) - 1) : t->scale;
    }
}

// ----------------------------------------------------------------------------------------------------------------
// the model: forward and backward. R = B*T rows throughout.

// One gate:  g = W2 silu(W1 [x ; ne] + b1) + b2.  g, x, ne (R,C), z, u (R,2C). Level 1 has no ne (NULL), and W1 is
// (2C,C) instead of (2C,2C).
static void gate_forward(real* g, real* z, real* u, const real* x, const real* ne, const real* w1, const real* b1,
                         const real* w2, const real* b2, size_t R, size_t C) {
    size_t in = ne ? 2 * C : C;
    linear_forward(z, x, w1, b1, R, C, 2 * C, in, 0);
    if (ne) linear_forward(z, ne, w1 + C, NULL, R, C, 2 * C, in, 1);
    silu_forward(u, z, R, 2 * C);
    linear_forward(g, u, w2, b2, R, 2 * C, C, 2 * C, 0);
}

// The lines of gate_forward, last one first. dx, dne and the d-parameters are added to.
static void gate_backward(real* dx, real* dne, real* dw1, real* db1, real* dw2, real* db2, real* du, real* u,
                          const real* dg, const real* z, const real* x, const real* ne, const real* w1,
                          const real* w2, size_t R, size_t C) {
    size_t in = ne ? 2 * C : C;
    silu_forward(u, z, R, 2 * C);                               // u again, instead of keeping it
    memset(du, 0, R * 2 * C * sizeof(real));
    linear_backward(du, dw2, db2, dg, u, w2, R, 2 * C, C, 2 * C);
    silu_backward(du, z, R, 2 * C);                             // du is dz from here on
    linear_backward(dx, dw1, db1, du, x, w1, R, C, 2 * C, in);
    if (ne) linear_backward(dne, dw1 + C, NULL, du, ne, w1 + C, R, C, 2 * C, in);
}

// One level:  A and b from the two gates, s from the scan, h = LayerNorm(s).
static void level_forward(LevelActs* a, const LevelParams* p, const real* x, real* u,
                          double lo, double hi, size_t B, size_t T, size_t C) {
    size_t R = B * T;
    gate_forward(a->ga, a->za, u, x, a->ne, p->wa1, p->ba1, p->wa2, p->ba2, R, C);
    gate_forward(a->gb, a->zb, u, x, a->ne, p->wb1, p->bb1, p->wb2, p->bb2, R, C);
    scan_forward(a->s, a->ga, a->gb, a->s0, lo, hi, B, T, C);
    layernorm_forward(a->h, a->s_mean, a->s_rstd, a->s, p->ln_w, p->ln_b, R, C);
}

// dh comes in; dx and dne (NULL at level 1) are added to.
static void level_backward(real* dx, real* dne, LevelParams* g, const real* dh, const LevelActs* a,
                           const LevelParams* p, const real* x, Acts* scratch,
                           double lo, double hi, size_t B, size_t T, size_t C) {
    size_t R = B * T;
    real *ds = scratch->ds, *dga = scratch->dga, *dgb = scratch->dgb, *du = scratch->du, *u = scratch->u;
    memset(ds, 0, R * C * sizeof(real));
    layernorm_backward(ds, g->ln_w, g->ln_b, dh, a->s, a->s_mean, a->s_rstd, p->ln_w, R, C);
    scan_backward(dga, dgb, ds, a->s, a->ga, a->gb, a->s0, lo, hi, B, T, C);
    gate_backward(dx, dne, g->wb1, g->bb1, g->wb2, g->bb2, du, u, dgb, a->zb, x, a->ne, p->wb1, p->wb2, R, C);
    gate_backward(dx, dne, g->wa1, g->ba1, g->wa2, g->ba2, du, u, dga, a->za, x, a->ne, p->wa1, p->wa2, R, C);
}

// Three levels. Before levels 2 and 3 comes the prediction error
// (l counts from 0, so h_l is level[l-1].h and h_0 is x):
//     e_l = h_{l-1} - h_l P_lᵀ,   ne = n(e_l)          or with --error off    ne = n(h_l)
// out (R,C) = h_1 + h_2 + h_3 (+ residual, where there is one).
static void block_forward(real* out, const real* residual, BlockActs* a, const BlockParams* p, real* u,
                          const Config* c, size_t B, size_t T) {
    size_t C = c->channels, R = B * T;
    const real* x = a->nx;
    for (int l = 0; l < 3; l++) {
        LevelActs* q = &a->level[l];
        if (l > 0 && c->error) {
            const real* target = l == 1 ? x : a->level[0].h;
            linear_forward(q->e, a->level[l - 1].h, l == 1 ? p->p1 : p->p2, NULL, R, C, C, C, 0);
            #pragma omp parallel for
            for (size_t r = 0; r < R; r++)
                for (size_t i = r * C; i < (r + 1) * C; i++) q->e[i] = target[i] - q->e[i];
        }
        if (l > 0) layernorm_forward(q->ne, q->e_mean, q->e_rstd, q->e, NULL, NULL, R, C);
        double lo, hi;
        band(c, l, &lo, &hi);
        level_forward(q, &p->level[l], x, u, lo, hi, B, T, C);
    }
    const real *h1 = a->level[0].h, *h2 = a->level[1].h, *h3 = a->level[2].h;
    #pragma omp parallel for
    for (size_t r = 0; r < R; r++)
        for (size_t i = r * C; i < (r + 1) * C; i++) out[i] = h1[i] + h2[i] + h3[i] + (residual ? residual[i] : 0);
}

// Levels 3, 2, 1. dh_l collects dout, what e_{l+1} asks of h_l as its target, and what e_l asks of it as the predictor:
//     dh_{l-1} += de_l        dh_l += -de_l P_l        dP_l += -de_lᵀ h_l        (h_0 = x)
// dx (R,C) is added to.
static void block_backward(real* dx, BlockParams* g, const real* dout, BlockActs* a, const BlockParams* p,
                           Acts* scratch, const Config* c, size_t B, size_t T) {
    size_t C = c->channels, R = B * T, bytes = R * C * sizeof(real);
    real **dh = scratch->dh, *dne = scratch->dne, *de = scratch->ds;       // ds is free again once a level is done
    for (int l = 0; l < 3; l++) memcpy(dh[l], dout, bytes);
    for (int l = 2; l >= 0; l--) {
        LevelActs* q = &a->level[l];
        double lo, hi;
        band(c, l, &lo, &hi);
        memset(dne, 0, bytes);
        level_backward(dx, l > 0 ? dne : NULL, &g->level[l], dh[l], q, &p->level[l], a->nx, scratch, lo, hi, B, T, C);
        if (l > 0 && c->error) {
            real* dtarget = l == 1 ? dx : dh[0];
            memset(de, 0, bytes);
            layernorm_backward(de, NULL, NULL, dne, q->e, q->e_mean, q->e_rstd, NULL, R, C);
            #pragma omp parallel for
            for (size_t r = 0; r < R; r++)
                for (size_t i = r * C; i < (r + 1) * C; i++) { dtarget[i] += de[i]; de[i] = -de[i]; }
            linear_backward(dh[l - 1], l == 1 ? g->p1 : g->p2, NULL, de, a->level[l - 1].h,
                            l == 1 ? p->p1 : p->p2, R, C, C, C);
        } else if (l > 0) {
            layernorm_backward(dh[l - 1], NULL, NULL, dne, q->e, q->e_mean, q->e_rstd, NULL, R, C);
        }
    }
}

// x = wte[token]; tied, times (3C)^½ (see the top of the file).
static real embedding_scale(const Config* c) { return c->tie ? sqrt(3.0 * c->channels) : 1; }

// tokens (B,T) -> a->y (B,T,C). With carry, the scan starts from the state that the last call left, and leaves its own.
static void acts_forward(Acts* a, const Params* p, const Config* c, const int* tokens, int carry) {
    size_t B = a->B, T = a->T, C = c->channels, R = B * T;
    embedding_forward(a->block[0].x, tokens, p->wte, embedding_scale(c), R, C);
    for (int n = 0; n < c->layers; n++) {
        BlockActs* b = &a->block[n];
        if (c->layers > 1)
            layernorm_forward(b->nx, b->nx_mean, b->nx_rstd, b->x, p->block[n].norm_w, p->block[n].norm_b, R, C);
        if (carry) for (int l = 0; l < 3; l++) memcpy(b->level[l].s0, b->level[l].state, B * C * sizeof(real));
        real* out = n + 1 < c->layers ? a->block[n + 1].x : a->out;
        block_forward(out, c->layers > 1 ? b->x : NULL, b, &p->block[n], a->u, c, B, T);
        if (carry) for (int l = 0; l < 3; l++) for (size_t i = 0; i < B; i++)
            memcpy(b->level[l].state + i * C, b->level[l].s + ((i + 1) * T - 1) * C, C * sizeof(real));
    }
    if (c->layers > 1) layernorm_forward(a->y, a->y_mean, a->y_rstd, a->out, p->lnf_w, p->lnf_b, R, C);
}

// Mean loss in nats of tokens (B,T) against targets (B,T); targets of -1 do not count. train = 1 also runs the head's
// backward (head_loss does both at once); train = 0 touches no gradient. Tokens must lie in [0, V).
static double model_forward(Model* m, const int* tokens, const int* targets, int train) {
    Acts* a = &m->acts;
    acts_forward(a, &m->p, &m->config, tokens, m->config.stateful);
    m->tokens = tokens;
    return head_loss(train ? a->dy : NULL, train ? m->g.head : NULL, a->y, m->p.head, targets, a->logits, m->grad_scale,
                     (size_t)m->B * m->T, m->config.channels, m->config.vocab, &m->counted, &m->correct);
}

// The rest of the backward pass, after model_forward(..., 1). Adds to the gradients.
static void model_backward(Model* m) {
    Acts* a = &m->acts;
    const Config* c = &m->config;
    size_t C = c->channels, R = (size_t)m->B * m->T, bytes = R * C * sizeof(real);
    if (c->layers > 1) {
        memset(a->dout, 0, bytes);
        layernorm_backward(a->dout, m->g.lnf_w, m->g.lnf_b, a->dy, a->out, a->y_mean, a->y_rstd, m->p.lnf_w, R, C);
    }
    for (int n = c->layers - 1; n >= 0; n--) {
        BlockActs* b = &a->block[n];
        memset(a->dx, 0, bytes);
        block_backward(a->dx, &m->g.block[n], a->dout, b, &m->p.block[n], a, c, a->B, a->T);
        if (c->layers > 1)              // x + block(LayerNorm(x)): dout stays for the x, and the norm's share is added
            layernorm_backward(a->dout, m->g.block[n].norm_w, m->g.block[n].norm_b, a->dx, b->x, b->nx_mean, b->nx_rstd,
                               m->p.block[n].norm_w, R, C);
    }
    embedding_backward(m->g.wte, m->tokens, c->layers > 1 ? a->dout : a->dx, embedding_scale(c), R, C);
}

static void model_zero_grad(Model* m) { memset(m->grad_memory, 0, m->table.total * sizeof(real)); }

// out (n,V) = logits of rows row .. row+n-1 of the last model_forward.
static void model_logits(Model* m, size_t row, size_t n, real* out) {
    linear_forward(out, m->acts.y + row * m->config.channels, m->p.head, NULL, n, m->config.channels, m->config.vocab,
                   m->config.channels, 0);
}

// Zeroes carried states: all of them, or those of the streams b with reset[b] (NULL: all).
static void model_reset(Acts* a, const int* reset) {
    for (int i = 0; i < a->states.count; i++) {
        const Tensor* t = &a->states.tensors[i];
        size_t width = t->size / t->shape[0];
        for (int b = 0; b < a->B; b++)
            if (!reset || reset[b]) memset(a->state_memory + t->offset + b * width, 0, width * sizeof(real));
    }
}

// One token, for generation: the same forward with B = T = 1 and a carried state of 3 C numbers a layer, however long
// the text. Returns the logits (V) of what comes next. model_reset(&m->step, NULL) starts a new text.
static const real* model_step(Model* m, int token) {
    acts_forward(&m->step, &m->p, &m->config, &token, 1);
    linear_forward(m->step.logits, m->step.y, m->p.head, NULL, 1, m->config.channels, m->config.vocab,
                   m->config.channels, 0);
    return m->step.logits;
}

// ----------------------------------------------------------------------------------------------------------------
// optimizer

// Euclidean norm of all gradients, summed in double over fixed pieces.
static double grad_norm(const Model* m) {
    enum { PIECE = 1 << 16 };
    size_t pieces = (m->table.total + PIECE - 1) / PIECE;
    double total = 0, *sums = (double*)allocate(pieces * sizeof(double), "the gradient's norm");
    #pragma omp parallel for
    for (size_t k = 0; k < pieces; k++) {
        double sum = 0;
        for (size_t i = k * PIECE; i < smin(m->table.total, (k + 1) * PIECE); i++)
            sum += (double)m->grad_memory[i] * m->grad_memory[i];
        sums[k] = sum;
    }
    for (size_t k = 0; k < pieces; k++) total += sums[k];
    free(sums);
    return sqrt(total);
}

// AdamW (Loshchilov & Hutter 2019), beta (0.9, 0.95), eps 1e-8, with the gradient scaled down to norm `clip` first
// (0: never). Weight decay goes to the tensors whose table entry says so. Returns the norm before clipping; if it is
// not finite, nothing is changed.
static double model_update(Model* m, double lr, double weight_decay, double clip) {
    double norm = grad_norm(m);
    if (!isfinite(norm)) return norm;
    const double beta1 = 0.9, beta2 = 0.95;
    m->updates++;
    real scale = clip > 0 && norm > clip ? clip / norm : 1, b1 = beta1, b2 = beta2, eps = 1e-8;
    real correct1 = 1 / (1 - pow(beta1, m->updates)), correct2 = 1 / (1 - pow(beta2, m->updates));
    for (int k = 0; k < m->table.count; k++) {
        const Tensor* t = &m->table.tensors[k];
        real *p = m->param_memory + t->offset, *g = m->grad_memory + t->offset, *am = m->adam_m + t->offset,
             *av = m->adam_v + t->offset;
        real rate = lr, shrink = 1 - (t->decay ? lr * weight_decay : 0);
        #pragma omp parallel for schedule(static, 4096)
        for (size_t i = 0; i < t->size; i += 16)
            for (size_t j = i; j < smin(t->size, i + 16); j++) {
                real gi = g[j] * scale;
                am[j] = b1 * am[j] + (1 - b1) * gi;
                av[j] = b2 * av[j] + (1 - b2) * gi * gi;
                p[j] = shrink * p[j] - rate * (am[j] * correct1) / (sqrt(av[j] * correct2) + eps);
            }
    }
    return norm;
}

// The first tensor of a table that holds a NaN or an infinity, or NULL.
static const char* not_finite(const Table* t, const real* memory) {
    for (int k = 0; k < t->count; k++)
        for (size_t i = 0; i < t->tensors[k].size; i++)
            if (!isfinite(memory[t->tensors[k].offset + i])) return t->tensors[k].name;
    return NULL;
}

// ----------------------------------------------------------------------------------------------------------------
// sampling

// Draws a token from softmax(logits / temperature) over the top_k largest logits (0: all; ties with the k-th stay in).
// temperature 0: the largest logit. logits, scratch (V).
static int sample_token(const real* logits, real* scratch, int V, double temperature, int top_k, uint64_t* rng) {
    int best = 0;
    for (int v = 1; v < V; v++) if (logits[v] > logits[best]) best = v;
    if (temperature == 0) return best;
    real floor = -INFINITY;
    if (top_k > 0 && top_k < V) {               // the k-th largest, by quickselect
        memcpy(scratch, logits, V * sizeof(real));
        for (int lo = 0, hi = V - 1; lo < hi;) {
            real pivot = scratch[(lo + hi) / 2];
            int i = lo, j = hi;
            while (i <= j) {
                while (scratch[i] > pivot) i++;
                while (scratch[j] < pivot) j--;
                if (i <= j) { real x = scratch[i]; scratch[i++] = scratch[j]; scratch[j--] = x; }
            }
            if (top_k - 1 <= j) hi = j; else if (top_k - 1 >= i) lo = i; else break;
        }
        floor = scratch[top_k - 1];
    }
    double sum = 0;
    for (int v = 0; v < V; v++)
        sum += scratch[v] = logits[v] >= floor ? exp((double)(logits[v] - logits[best]) / temperature) : 0;
    double u = rng_uniform(rng) * sum;
    for (int v = 0; v < V; v++) if ((u -= scratch[v]) < 0) return v;
    return best;
}

// Prints `length` tokens after `prompt`, as text where there is a tokenizer. The memory it needs is what model_step
// carries on. Without a prompt the text begins after the end-of-text token, or after a newline.
static void generate(Model* m, const Tokenizer* tok, const char* prompt,
                     int length, double temperature, int top_k, uint64_t seed) {
    int V = m->config.vocab, *ids = NULL;
    size_t count = 0;
    real* scratch = (real*)allocate(V * sizeof(real), "sampling");
    if (tok) count = tokenizer_encode(tok, prompt, strlen(prompt), &ids);
    if (tok) fputs(prompt, stdout);
    model_reset(&m->step, NULL);
    int start = tok && tokenizer_eot(tok) >= 0 ? tokenizer_eot(tok) : '\n' < V ? '\n' : 0;
    const real* logits = count ? NULL : model_step(m, start < V ? start : 0);
    for (size_t i = 0; i < count && (i == 0 || logits); i++) logits = model_step(m, ids[i]);
    for (int i = 0; i < length && logits; i++) {
        int token = sample_token(logits, scratch, V, temperature, top_k, &seed);
        size_t bytes = 0;
        const char* text = tok && token < tok->vocab ? tokenizer_decode(tok, token, &bytes) : NULL;
        if (text) fwrite(text, 1, bytes, stdout); else printf("%d ", token);
        fflush(stdout);
        if (i + 1 < length) logits = model_step(m, token);
    }
    printf(logits ? "\n" : "\n[here the positions end that this model was trained for]\n");
    free(ids);
    free(scratch);
}

// ----------------------------------------------------------------------------------------------------------------
// options

static struct {
    Config config;
    const char *preset, *train, *val, *tokenizer, *out, *prompt, *resume, *init, *dump;
    int plan, eval, generate, task, batches, batch, seq, steps, accum, warmup, schedule, seed, threads;
    int val_every, val_batches, sample_every, sample_len, top_k, save_every;
    double lr, min_lr, weight_decay, clip, temperature;
} opt;

// Every flag of the command line: where its value goes, how --resume treats it, its range,
// default and meaning (dev/options.h).
static Option option_table[] = {
    {"preset",       's', ' ', &opt.preset, 0, 0, "NAME", "", "sizes of a published model; see the list below", 0},
    {"plan",         'b', ' ', &opt.plan, 0, 0, "", "", "print parameters, bytes and FLOPs, and stop", 0},
    {"train",        's', 'R', &opt.train, 0, 0, "FILES", "", "token file, or a glob of shards ('data/x/train*.bin')", 0},
    {"val",          's', 'R', &opt.val, 0, 0, "FILES", "", "the same, for validation", 0},
    {"tokenizer",    's', 'R', &opt.tokenizer, 0, 0, "FILE", "", "'bytes', a saved tokenizer, or GPT-2's vocab.bpe", 0},
    {"task",         'e', 'D', &opt.task, 0, 0, "none|copy|recall", "none", "train on generated sequences instead of files", 0},
    {"out",          's', ' ', &opt.out, 0, 0, "FOLDER", "out", "for log.tsv and model.safetensors", 0},
    {"batch",        'i', 'D', &opt.batch, 1, 1 << 24, "N", "16", "sequences in a batch", 0},
    {"seq",          'i', 'D', &opt.seq, 1, 1 << 30, "N", "1024", "tokens in a sequence", 0},
    {"batches",      'e', 'D', &opt.batches, 0, 0, "random|contiguous", "random", "where training sequences start", 0},
    {"steps",        'i', 'R', &opt.steps, 0, 1e9, "N", "4000", "AdamW steps in all", 0},
    {"accum",        'i', 'D', &opt.accum, 1, 1e6, "N", "1", "batches whose gradients make one step", 0},
    {"lr",           'f', 'R', &opt.lr, 0, 1e3, "X", "1e-3", "highest learning rate", 0},
    {"min-lr",       'f', 'R', &opt.min_lr, -1, 1e3, "X", "-1", "learning rate at the end; -1: a tenth of --lr", 0},
    {"warmup",       'i', 'R', &opt.warmup, -1, 1e9, "N", "-1", "steps of linear warm-up; -1: 100, or a tenth of --steps", 0},
    {"schedule",     'e', 'R', &opt.schedule, 0, 0, "cosine|linear|constant", "cosine", "from --lr to --min-lr", 0},
    {"weight-decay", 'f', 'R', &opt.weight_decay, 0, 10, "X", "0.1", "AdamW's, on tensors of two dimensions", 0},
    {"clip",         'f', 'R', &opt.clip, 0, 1e9, "X", "1", "largest norm of the gradient; 0: any", 0},
    {"seed",         'i', 'D', &opt.seed, 0, INT32_MAX, "N", "1337", "of weights, batches and samples", 0},
    {"val-every",    'i', 'R', &opt.val_every, 0, 1e9, "N", "250", "steps between validations; 0: at the end only", 0},
    {"val-batches",  'i', 'R', &opt.val_batches, 0, 1e9, "N", "20", "batches a validation reads from the start; 0: all", 0},
    {"sample-every", 'i', 'R', &opt.sample_every, 0, 1e9, "N", "0", "steps between printed samples; 0: none", 0},
    {"sample-len",   'i', 'R', &opt.sample_len, 1, 1e9, "N", "256", "tokens in a sample", 0},
    {"prompt",       's', 'R', &opt.prompt, 0, 0, "TEXT", "", "what a sample begins with", 0},
    {"temperature",  'f', 'R', &opt.temperature, 0, 100, "X", "0.8", "of sampling; 0: the likeliest token", 0},
    {"top-k",        'i', 'R', &opt.top_k, 0, 1e9, "N", "0", "sample among the k likeliest; 0: all", 0},
    {"generate",     'b', ' ', &opt.generate, 0, 0, "", "", "print a sample of --init FILE, and stop", 0},
    {"eval",         'b', ' ', &opt.eval, 0, 0, "", "", "print the loss of --init FILE on --val, and stop", 0},
    {"save-every",   'i', 'R', &opt.save_every, -1, 1e9, "N", "0", "steps between checkpoints; 0: at the end, -1: never", 0},
    {"resume",       's', ' ', &opt.resume, 0, 0, "FILE", "", "continue the run that wrote this checkpoint", 0},
    {"init",         's', ' ', &opt.init, 0, 0, "FILE", "", "start from a checkpoint's weights", 0},
    {"dump",         's', ' ', &opt.dump, 0, 0, "FILE", "", "after --steps: a batch, its logits, loss and gradients", 0},
    {"threads",      'i', ' ', &opt.threads, 0, 4096, "N", "0", "CPU threads; 0: all", 0},
    {"vocab",        'i', 'M', &opt.config.vocab, 1, 65536, "N", "50257", "V; else the tokenizer's, the preset's, the data's", 0},
    {"channels",     'i', 'M', &opt.config.channels, 1, 1 << 16, "N", "256", "C", 0},
    {"layers",       'i', 'M', &opt.config.layers, 1, 1000, "N", "1", "blocks; 1 is the paper's", 0},
    {"tie",          'b', 'M', &opt.config.tie, 0, 0, "", "", "use the embedding as the head", 0},
    {"bands",        'e', 'M', &opt.config.bands, 0, 0, "caged|flat|flat-wide|free", "caged", "where the decays may lie", 0},
    {"error",        'e', 'M', &opt.config.error, 0, 0, "off|on", "on", "levels see prediction errors, or the level below", 0},
    {"stateful",     'b', 'D', &opt.config.stateful, 0, 0, "", "", "carry the state from batch to batch", 0},
};

// Sizes of the paper [its batch x seq is 16,384 tokens a step; learning rates are our choice], and one for a laptop.
static const Preset presets[] = {
    {"harmonic-28m",  "--vocab 50257 --channels 256 --layers 1 --batch 16 --seq 1024 --steps 4000",
                      "the paper's model: 27,965,952 parameters"},
    {"harmonic-13m",  "--vocab 50257 --channels 128 --layers 1 --batch 16 --seq 1024 --steps 4000",
                      "C = 128: 13,425,920 parameters"},
    {"harmonic-60m",  "--vocab 50257 --channels 512 --layers 1 --batch 16 --seq 1024 --steps 4000",
                      "C = 512: 60,388,352 parameters"},
    {"harmonic-tiny", "--vocab 256 --channels 128 --layers 1 --batch 8 --seq 256 --steps 1200 --lr 6e-3",
                      "bytes, a minute on a laptop"},
};

// Refuses what contradicts itself.
static void config_check(Config* c) {
    if (opt.task && c->stateful) die("--stateful needs a text that goes on; the sequences of --task stand alone");
    if (c->stateful && opt.batches == 0 && option_given("batches"))
        die("--stateful reads contiguous streams: --batches random contradicts it");
}

// The model in a few words, without an end of line.
static void config_describe(const Config* c) {
    static const char* bands[] = {"caged", "flat", "flat-wide", "free"};
    printf("harmonic | V %d, C %d, layers %d, %s bands, error %s%s%s", c->vocab, c->channels, c->layers,
           bands[c->bands], c->error ? "on" : "off", c->tie ? ", tied" : "", c->stateful ? ", stateful" : "");
}

// ----------------------------------------------------------------------------------------------------------------
// checkpoints: weights under the table's names, adam_m.NAME, adam_v.NAME, carried states, and in the metadata every
// option, the step, and where the data stands. Enough to go on to the same bits as without the interruption.

// Writes path; returns 0, or an errno with the file as it was before.
static int checkpoint_save(const Model* m, const DataLoader* data, int step, const char* path) {
    const Table* tables[4] = { &m->table, &m->table, &m->table, &m->acts.states };
    const real* memories[4] = { m->param_memory, m->adam_m, m->adam_v, m->acts.state_memory };
    const char* prefixes[4] = { "", "adam_m.", "adam_v.", "state." };
    Entry* e = (Entry*)allocate((3 * m->table.count + m->acts.states.count) * sizeof(Entry), "a checkpoint's header");
    int n = 0;
    for (int k = 0; k < (m->config.stateful ? 4 : 3); k++)
        for (int i = 0; i < tables[k]->count; i++) {
            const Tensor* t = &tables[k]->tensors[i];
            e[n++] = entry(prefixes[k], t->name, t->shape[0], t->shape[1], memories[k] + t->offset);
        }
    Text meta = {0};
    text_add(&meta, "\"program\":\"" MODEL_NAME "\",\"step\":\"%d\",\"rng\":\"%llu\",\"position\":\"%llu\"", step,
             (unsigned long long)data->rng, (unsigned long long)data->position);
    options_remember(&meta);
    int error = safetensors_write(path, meta.chars, e, n);
    free(meta.chars);
    free(e);
    return error;
}

// Weights only, or with `resume` all of it: then *step and the data's place are set too (NULL otherwise).
static void checkpoint_load(Model* m, const SafeTensors* s, int resume, int* step, DataLoader* data) {
    const Table* tables[4] = { &m->table, &m->table, &m->table, &m->acts.states };
    real* memories[4] = { m->param_memory, m->adam_m, m->adam_v, m->acts.state_memory };
    const char* prefixes[4] = { "", "adam_m.", "adam_v.", "state." };
    for (int k = 0; k < (!resume ? 1 : m->config.stateful ? 4 : 3); k++)
        for (int i = 0; i < tables[k]->count; i++) {
            const Tensor* t = &tables[k]->tensors[i];
            char name[64];
            snprintf(name, sizeof name, "%s%s", prefixes[k], t->name);
            safetensors_copy(s, name, memories[k] + t->offset, t->shape[0], t->shape[1]);
        }
    if (!resume) return;
    const char *at = safetensors_metadata(s, "step"), *rng = safetensors_metadata(s, "rng"),
               *position = safetensors_metadata(s, "position");
    if (!at || !rng || !position || atoi(at) < 0) die("%s does not say its step, rng and position", s->path);
    *step = m->updates = atoi(at);
    data->rng = strtoull(rng, NULL, 10);
    data->position = strtoull(position, NULL, 10);
}

// --dump: one batch and everything the model makes of it, so that anyone can hold these numbers against their own code.
static void dump(Model* m, DataLoader* data, const char* path) {
    const Table* t = &m->table;
    size_t V = m->config.vocab, B = m->B, T = m->T, R = B * T;
    if (m->config.stateful) model_reset(&m->acts, NULL);
    loader_next(data);
    model_zero_grad(m);
    m->grad_scale = 1;
    real loss = model_forward(m, data->tokens, data->targets, 1);
    model_backward(m);
    real* logits = (real*)allocate(R * V * sizeof(real), "the dumped logits");
    model_logits(m, 0, R, logits);
    Entry* e = (Entry*)allocate((2 * t->count + 4) * sizeof(Entry), "a dump's header");
    int n = 0;
    e[n++] = entry("", "tokens", B, T, NULL);
    e[n++] = entry("", "targets", B, T, NULL);
    for (int i = 0; i < 2; i++) {
        strcpy(e[i].dtype, "I32");
        e[i].bytes = R * sizeof(int);
        e[i].data = i ? data->targets : data->tokens;
    }
    e[n] = entry("", "logits", R, V, logits);
    e[n].ndim = 3; e[n].shape[0] = B; e[n].shape[1] = T; e[n].shape[2] = V;
    n++;
    e[n++] = entry("", "loss", 1, 0, &loss);
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < t->count; i++)
            e[n++] = entry(k ? "grad." : "param.", t->tensors[i].name, t->tensors[i].shape[0], t->tensors[i].shape[1],
                           (k ? m->grad_memory : m->param_memory) + t->tensors[i].offset);
    int error = safetensors_write(path, "\"program\":\"" MODEL_NAME "\"", e, n);
    if (error) die("cannot write %s: %s", path, strerror(error));
    printf("dumped a batch, its logits, loss %.6f, parameters and gradients to %s\n", (double)loss, path);
    free(e);
    free(logits);
}

// ----------------------------------------------------------------------------------------------------------------
// training

// Mean loss in nats over `batches` batches of val from its start (0: all it has). A stateful model reads them with a
// state of its own, zero at the start, and finds its training state as it was.
static double evaluate(Model* m, DataLoader* val, size_t batches, double* accuracy) {
    size_t bytes = m->acts.states.total * sizeof(real), counted = 0, correct = 0;
    double total = 0;
    real* kept = (real*)allocate(bytes, "the carried state");
    if (val->num_batches && (batches == 0 || batches > val->num_batches)) batches = val->num_batches;
    memcpy(kept, m->acts.state_memory, bytes);
    loader_restart(val);
    for (size_t k = 0; k < batches; k++) {
        loader_next(val);
        model_reset(&m->acts, val->reset);
        double loss = model_forward(m, val->tokens, val->targets, 0);
        total += loss * m->counted;
        counted += m->counted;
        correct += m->correct;
    }
    memcpy(m->acts.state_memory, kept, bytes);
    free(kept);
    *accuracy = counted ? (double)correct / counted : 0;
    return counted ? total / counted : 0;
}

// "2.345 nats  3.383 bits/token  1.234 bits/byte" into out (128); bytes_per_token 0: unknown.
static const char* loss_text(char* out, double nats, double bytes_per_token) {
    int n = snprintf(out, 128, "%.4f nats  %.4f bits/token", nats, nats / log(2));
    if (bytes_per_token > 0) snprintf(out + n, 128 - n, "  %.4f bits/byte", nats / log(2) / bytes_per_token);
    return out;
}

// Learning rate of step (1 .. steps): linear warm-up from 0, then down to min_lr by the schedule.
static double learning_rate(int step) {
    if (step <= opt.warmup) return opt.lr * step / opt.warmup;
    double done = opt.steps > opt.warmup ? (double)(step - opt.warmup) / (opt.steps - opt.warmup) : 1;
    double part = opt.schedule == 0 ? 0.5 + 0.5 * cos(3.141592653589793 * done) : opt.schedule == 1 ? 1 - done : 1;
    return opt.min_lr + (opt.lr - opt.min_lr) * part;
}

// --plan: what model_build would allocate, to the byte, and `threads` threads while they work, without allocating it.
static void print_plan(const Model* m, int threads) {
    printf("%-24s %18s %12s  init                decay\n", "tensor", "shape", "numbers");
    for (int i = 0; i < m->table.count; i++) {
        const Tensor* t = &m->table.tensors[i];
        char shape[32];
        snprintf(shape, sizeof shape, t->ndim == 2 ? "(%zu, %zu)" : "(%zu)", t->shape[0], t->shape[1]);
        printf("%-24s %18s %12zu  %s %-12.4g %s\n", t->name, shape, t->size,
               init_names[t->init], t->scale, t->decay ? "yes" : "no");
    }
    size_t p = m->table.total * sizeof(real);
    size_t a = (m->acts.table.total + m->acts.states.total) * sizeof(real),
           s = (m->step.table.total + m->step.states.total) * sizeof(real);
    size_t work = thread_bytes(m), token = token_bytes(m), all = (m->train ? 4 * p : p) + a + s + threads * work;
    printf("parameters: %zu\n", model_parameters(m));
    printf("bytes: parameters %zu, gradients %zu, AdamW %zu, activations of %d x %d tokens %zu, of one token %zu\n",
           p, m->train ? p : 0, m->train ? 2 * p : 0, m->B, m->T, a, s);
    if (work) printf("work space per thread: %zu bytes, threads: %d\n", work, threads);
    printf("bytes in all: %zu (%.2f GB)\n", all, all / 1e9);
    if (token) printf("keys and values of a generated text: %zu bytes a token\n", token);
    printf("bytes per token of the batch: %.0f\n", (double)a / m->B / m->T);
    printf("matmul FLOPs per token: %.1f M forward and backward\n", model_flops_per_token(m) / 1e6);
}

static volatile sig_atomic_t stop_signal = 0;
static void on_signal(int number) {
    stop_signal = number;
    signal(number, SIG_DFL);            // a second one ends the program at once
}

// Opens out/log.tsv: anew, or for a resumed run with the rows up to `step` kept.
static FILE* log_open(const char* path, int resumed, int step) {
    Text kept = {0};
    text_add(&kept, "step\ttrain_loss\tval_loss\tbits_per_token\tlr\tgrad_norm\tms\ttok_per_s\taccuracy\n");
    FILE* old = resumed ? fopen(path, "r") : NULL;
    char line[512];
    while (old && fgets(line, sizeof line, old))
        if (isdigit((unsigned char)line[0]) && atoi(line) <= step) text_add(&kept, "%s", line);
    if (old) fclose(old);
    FILE* f = fopen(path, "w");
    if (!f || fwrite(kept.chars, 1, kept.length, f) != kept.length || fflush(f) != 0)
        die("cannot write %s: %s", path, strerror(errno));
    free(kept.chars);
    return f;
}

static void make_folder(const char* path) {
    Text t = {0};
    for (const char* p = path; *p; p++) {
        if (*p == '/' && t.length) mkdir(t.chars, 0777);
        text_add(&t, "%c", *p);
    }
    if (mkdir(path, 0777) != 0 && errno != EEXIST) die("cannot make the folder %s: %s", path, strerror(errno));
    if (access(path, W_OK | X_OK) != 0) die("cannot write in %s: %s", path, strerror(errno));
    free(t.chars);
}

// Trains from step `done` + 1 to opt.steps: prints a line a step (on a terminal, one that is written over), logs the
// same to out/log.tsv, validates, samples, saves. Ctrl-C ends it after the step in hand. Returns the signal, or 0.
static int train(Model* m, DataLoader* data, DataLoader* val, const Tokenizer* tok, int done) {
    int resumed = opt.resume[0] != 0;
    Text log_path = {0}, model_path = {0};
    text_add(&log_path, "%s/log.tsv", opt.out);
    text_add(&model_path, "%s/model.safetensors", opt.out);
    make_folder(opt.out);
    if (!resumed && (access(log_path.chars, F_OK) == 0 || access(model_path.chars, F_OK) == 0))
        die("%s already holds a run: choose another --out, or delete it%s%s", opt.out,
            access(model_path.chars, F_OK) == 0 ? ", or go on with --resume " : "",
            access(model_path.chars, F_OK) == 0 ? model_path.chars : "");
    struct statvfs disk;
    size_t needed = 3 * m->table.total * sizeof(real);
    if (opt.save_every >= 0 && statvfs(opt.out, &disk) == 0 && (double)disk.f_bavail * disk.f_frsize < needed)
        die("%s has no room for a checkpoint of %.0f MB (--save-every -1 trains without)", opt.out, needed / 1e6);
    FILE* log_file = log_open(log_path.chars, resumed, done);
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    signal(SIGXFSZ, SIG_IGN);           // a file past the shell's limit is then a write error like any other
    int generated = opt.task != 0, tty = isatty(1), step = done, error = 0;
    double tokens = (double)m->B * m->T * opt.accum, started = now(), accuracy = 0, val_loss = -1;
    char text[128];
    if (val && !resumed) {
        val_loss = evaluate(m, val, opt.val_batches, &accuracy);
        printf("val 0/%d | %s\n", opt.steps, loss_text(text, val_loss, val->bytes_per_token));
        fprintf(log_file, "0\t\t%.6f\t%.6f\t\t\t\t\t\n", val_loss, val_loss / log(2));
    }
    while (step < opt.steps && !stop_signal) {
        step++;
        double start = now(), loss = 0, correct = 0, counted = 0, lr = learning_rate(step);
        model_zero_grad(m);
        for (int k = 0; k < opt.accum; k++) {
            loader_next(data);
            model_reset(&m->acts, data->reset);
            double l = model_forward(m, data->tokens, data->targets, 1);
            if (!isfinite(l)) {
                const char* where = not_finite(&m->table, m->param_memory);
                if (!where) where = not_finite(&m->acts.table, m->acts.memory);
                die("step %d: the loss is %f; the first tensor that is not finite: %s",
                    step, l, where ? where : "none but the loss");
            }
            model_backward(m);
            loss += l / opt.accum;
            correct += m->correct;
            counted += m->counted;
        }
        double norm = model_update(m, lr, opt.weight_decay, opt.clip);
        if (!isfinite(norm)) {
            const char* where = not_finite(&m->table, m->grad_memory);
            die("step %d: the gradient's norm is %f; the first gradient that is not finite: %s",
                step, norm, where ? where : "none alone");
        }
        double ms = 1e3 * (now() - start);
        long left = (long)((now() - started) / (step - done) * (opt.steps - step));
        int validate = val && (step == opt.steps || (opt.val_every && step % opt.val_every == 0));
        int sample = opt.sample_every && step % opt.sample_every == 0,
            line_ends = !tty || validate || sample || step == opt.steps || stop_signal;
        printf(
            "%sstep %d/%d | loss %.4f | %.4f bits/token | lr %.2e | norm %.3f | %.0f ms | %.0f tok/s | ETA %ld:%02ld:%02ld",
            tty ? "\r\033[K" : "", step, opt.steps, loss, loss / log(2), lr, norm, ms, tokens / ms * 1e3,
            left / 3600, left / 60 % 60, left % 60);
        if (generated) printf(" | accuracy %.4f", counted ? correct / counted : 0);
        printf(line_ends ? "\n" : "");
        fflush(stdout);
        fprintf(log_file, "%d\t%.6f\t", step, loss);
        if (validate) {
            val_loss = evaluate(m, val, opt.val_batches, &accuracy);
            printf("val %d/%d | %s", step, opt.steps, loss_text(text, val_loss, val->bytes_per_token));
            printf(generated ? " | accuracy %.4f\n" : "\n", accuracy);
            fprintf(log_file, "%.6f", val_loss);
        }
        fprintf(log_file, "\t%.6f\t%.6e\t%.6f\t%.1f\t%.0f\t", loss / log(2), lr, norm, ms, tokens / ms * 1e3);
        if (generated) fprintf(log_file, "%.4f", counted ? correct / counted : 0);
        fprintf(log_file, "\n");
        if (fflush(log_file) != 0)
            fprintf(stderr, "warning: cannot write %s: %s; training goes on\n", log_path.chars, strerror(errno)),
            clearerr(log_file);
        if (sample) generate(m, tok, opt.prompt, opt.sample_len, opt.temperature, opt.top_k, opt.seed + (uint64_t)step);
        if (opt.save_every > 0 && step % opt.save_every == 0 && step < opt.steps) {
            error = checkpoint_save(m, data, step, model_path.chars);
            if (error)
                fprintf(stderr, "warning: cannot write %s: %s; what it held is untouched, training goes on\n",
                        model_path.chars, strerror(error));
        }
    }
    fclose(log_file);
    if (stop_signal) printf("stopped by %s after step %d\n", stop_signal == SIGINT ? "Ctrl-C" : "a signal", step);
    if (opt.save_every >= 0) {
        error = checkpoint_save(m, data, step, model_path.chars);
        if (error) die("cannot write %s: %s; what it held is untouched", model_path.chars, strerror(error));
        printf("saved %s%s\n", model_path.chars, step < opt.steps ? "; go on with --resume" : "");
    }
    if (stop_signal) return stop_signal;
    if (val && step == done) val_loss = evaluate(m, val, opt.val_batches, &accuracy);
    if (val) printf("final val loss %s\n", loss_text(text, val_loss, val->bytes_per_token));
    free(log_path.chars);
    free(model_path.chars);
    return 0;
}

// Opens --train, or --val with its own seed, or the generated task.
static void open_data(DataLoader* d, const char* files, int mode, uint64_t seed) {
    if (opt.task) loader_task(d, opt.task == 1 ? "copy" : "recall", opt.batch, opt.seq, opt.config.vocab, seed);
    else loader_open(d, files, opt.batch, opt.seq, opt.config.vocab, mode, seed);
    if (d->vocab > opt.config.vocab)
        die("%s was made with a vocabulary of %d tokens, the model has --vocab %d", files, d->vocab, opt.config.vocab);
}

#ifndef TESTING
int main(int argc, char** argv) {
    options_parse(option_table, sizeof option_table / sizeof *option_table, presets,
                  sizeof presets / sizeof *presets, argc, argv);
#ifdef _OPENMP
    if (opt.threads > 0) omp_set_num_threads(opt.threads);
    int threads = omp_get_max_threads();
#else
    if (opt.threads > 1)
        die("--threads %d: this program was built without OpenMP and knows one thread only", opt.threads);
    int threads = 1;
#endif
    flush_denormals();

    // what to do, from what is given
    Config* c = &opt.config;
    const char* source = opt.resume[0] ? opt.resume : opt.init;
    SafeTensors file = {0};
    if (opt.resume[0] && opt.init[0]) die("--resume continues a run, --init starts a new one: give one of them");
    if ((opt.eval || opt.generate) && !source[0])
        die("--%s needs a trained model: --init out/model.safetensors", opt.eval ? "eval" : "generate");
    if (source[0]) {
        safetensors_read(&file, source);
        options_adopt(&file, MODEL_NAME, opt.resume[0] ? ADOPT_RUN : opt.eval ? ADOPT_SHAPE : ADOPT_MODEL);
        Option* out = option_find("out");
        char* slash = strrchr(opt.resume, '/');
        if (opt.resume[0] && out->set == 0) {
            opt.out = strdup(slash ? opt.resume : ".");
            if (slash) ((char*)opt.out)[slash - opt.resume] = '\0';
        }
    }
    int training = !opt.eval && !opt.generate;
    if (opt.min_lr < 0) opt.min_lr = opt.lr / 10;
    if (opt.warmup < 0) opt.warmup = opt.steps / 10 < 100 ? opt.steps / 10 : 100;
    if (opt.min_lr > opt.lr) die("--min-lr %g is above --lr %g", opt.min_lr, opt.lr);
    if (opt.warmup > opt.steps) die("--warmup %d is longer than --steps %d", opt.warmup, opt.steps);
    if ((double)opt.batch * opt.seq > INT32_MAX)
        die("--batch %d x --seq %d is more than 2^31 tokens; --accum makes a step of several batches",
            opt.batch, opt.seq);
    if (opt.task && (opt.train[0] || opt.val[0]))
        die("--task generates its sequences: leave --train and --val out, or --task");
    config_check(c);
    if (opt.prompt[0] && !opt.tokenizer[0]) die("--prompt needs a --tokenizer to turn it into tokens");
    if (training && !opt.plan && !opt.train[0] && !opt.task)
        die("nothing to train on: give --train FILES or --task copy ('make run' shows how)");
    if (opt.eval && !opt.val[0] && !opt.task) die("--eval needs --val FILES");
    if (opt.dump[0] && !training) die("--dump writes a batch of training: leave --%s out", opt.eval ? "eval" : "generate");

    // the vocabulary: --vocab, else the tokenizer's, else the preset's, else the data's, else GPT-2's
    Tokenizer tokenizer = {0};
    Option* vocab = option_find("vocab");
    if (opt.tokenizer[0]) {
        tokenizer_load(&tokenizer, opt.tokenizer);
        if (vocab->set < 2) c->vocab = tokenizer.vocab;
        if (tokenizer.vocab > c->vocab)
            die("%s has %d tokens, the model --vocab %d", opt.tokenizer, tokenizer.vocab, c->vocab);
    } else if (vocab->set == 0 && opt.task) c->vocab = 64;
    else if (vocab->set == 0 && (opt.train[0] || opt.val[0])) {
        DataLoader look;
        loader_open(&look, opt.train[0] ? opt.train : opt.val, 1, 1, 65536, LOADER_CONTIGUOUS, 0);
        if (look.vocab) c->vocab = look.vocab;
        loader_free(&look);
    }
    const Tokenizer* tok = opt.tokenizer[0] ? &tokenizer : NULL;

    Model m;
    int B = opt.generate ? 1 : opt.batch, T = opt.generate ? 1 : opt.seq;         // a text is made token by token
    if (opt.plan) {
        model_layout(&m, c, B, T, training);
        print_plan(&m, threads);
        return 0;
    }
    DataLoader data = {0}, val = {0};
    int has_val = !opt.generate && (opt.val[0] || opt.task);
    int mode = c->stateful ? LOADER_STREAMS : opt.batches ? LOADER_CONTIGUOUS : LOADER_RANDOM;
    if (training) open_data(&data, opt.train, mode, opt.seed);
    if (has_val) open_data(&val, opt.val, c->stateful ? LOADER_STREAMS : LOADER_CONTIGUOUS, opt.seed + 0x5eedULL);
    if (opt.task && opt.val_batches == 0) die("--task never ends: --val-batches 0 (all) does not");

    model_build(&m, c, B, T, training);
    m.grad_scale = 1.0 / opt.accum;
    model_init(&m, opt.seed);
    int done = 0;
    if (source[0]) checkpoint_load(&m, &file, opt.resume[0] != 0, &done, &data);
    if (done > opt.steps) die("%s is at step %d, past --steps %d", source, done, opt.steps);

    if (opt.generate) {
        generate(&m, tok, opt.prompt, opt.sample_len, opt.temperature, opt.top_k, opt.seed);
        return 0;
    }
    char text[128];
    config_describe(c);
    printf(" | %zu parameters | %d threads\n", model_parameters(&m), threads);
    if (training) {
        if (!opt.task) printf("train %zu tokens | ", data.num_tokens);
        if (has_val && !opt.task) printf("val %zu tokens, %zu batches | ", val.num_tokens, val.num_batches);
        printf("a step is %d x %d x %d = %.0f tokens\n",
               opt.accum, opt.batch, opt.seq, (double)opt.accum * opt.batch * opt.seq);
        int stopped = opt.steps > 0 ? train(&m, &data, has_val ? &val : NULL, tok, done) : 0;
        if (stopped) return 128 + stopped;
    }
    if (opt.eval || (opt.steps == 0 && has_val)) {
        double accuracy, loss = evaluate(&m, &val, opt.val_batches, &accuracy);
        if (opt.task) printf("accuracy %.4f\n", accuracy);
        printf("final val loss %s\n", loss_text(text, loss, val.bytes_per_token));
    }
    if (training && opt.dump[0]) dump(&m, &data, opt.dump);
    loader_free(&data);
    loader_free(&val);
    if (tok) tokenizer_free(&tokenizer);
    if (source[0]) safetensors_free(&file);
    model_free(&m);
    return 0;
}
#endif
