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
// Build and run:   make run        Everything it can do:   ./build/cpu/train_harmonic --help


#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
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
// computes 100 times slower. Every thread rounds them to zero instead.
static void flush_denormals(void) {
    #pragma omp parallel
    {
#if defined(__SSE__)
        _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
        uint64_t fpcr;
        __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
        __asm__ volatile("msr fpcr, %0" : : "r"(fpcr | 1 << 24));
#endif
    }
}

// e^x to 8e-8 relative, as arithmetic that the compiler turns into vector instructions (libm's expf stays scalar and is
// ten times slower). x = n ln 2 + r with |r| <= ln(2)/2; e^r is its Taylor series, 2^n goes straight into the exponent
// bits. x is held inside [-87, 87], where neither e^x nor e^-x
// leaves a float's range; NaN stays NaN. Gradient checks, in double, use libm's.
static inline real fast_exp(real x) {
    x = x < -87 ? -87 : x > 87 ? 87 : x;
    if (sizeof(real) == 8) return exp(x);
    float n = floorf((float)x * 1.442695041f + 0.5f);
    float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));      // ln 2 in two parts: the first product is exact
    float p = 1 + r * (1 + r * (1/2.f + r * (1/6.f + r * (1/24.f + r * (1/120.f + r * (1/720.f + r * (1/5040.f)))))));
    union { int32_t bits; float value; } power = { ((int32_t)n + 127) * (1 << 23) };
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
// once loaded. Blocks of B (KC x NC) and of A (MR x KC) are copied ("packed") into the order in which they are read,
// zero-padded at the edges, and `tile` keeps an MR x NR corner of C in registers for all k of the block: MR + 2 loads
// serve 2 MR multiply-adds. An element of C is summed by one thread in the order of k, whatever the number of threads.
#ifdef __AVX512F__
enum { VECTOR_BYTES = 64, MR = 8 };     // 2 x 8 of 32 registers hold C
#else
enum { VECTOR_BYTES = 32, MR = 6 };     // 2 x 6 of 16
#endif
enum { NR = 2 * VECTOR_BYTES / sizeof(real), KC = 256, NC = 1024 };
typedef real vector __attribute__((vector_size(VECTOR_BYTES)));

// out(MR,NR) = sum_k a(k,MR)ᵀ b(k,NR)
static inline void matmul_tile(real* out, const real* a, const real* b, int K) {
    vector sum[MR][2] = {{{0}}};
    for (int k = 0; k < K; k++) {
        const vector* row = (const vector*)(b + k * NR);
        for (int i = 0; i < MR; i++) {
            sum[i][0] += a[k * MR + i] * row[0];
            sum[i][1] += a[k * MR + i] * row[1];
        }
    }
    memcpy(out, sum, sizeof sum);
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
    static real* packed = NULL;                 // (NC/NR panels, KC, NR)
    if (!packed) packed = (real*)allocate(sizeof(real) * KC * NC, "the packed block of a matmul");
    for (size_t j0 = 0; j0 < N; j0 += NC)
    for (size_t k0 = 0; k0 < K; k0 += KC) {
        size_t n = smin(NC, N - j0), kc = smin(KC, K - k0);
        #pragma omp parallel
        {
            #pragma omp for
            for (size_t j = 0; j < n; j += NR) {
                const real* b = B + k0 * bk + (j0 + j) * bj;
                real* p = packed + j * kc;
                size_t w = smin(NR, n - j);
                if (bj == 1) for (size_t k = 0; k < kc; k++) for (size_t q = 0; q < NR; q++) p[k * NR + q] = q < w ? b[k * bk + q] : 0;
                else         for (size_t q = 0; q < NR; q++) for (size_t k = 0; k < kc; k++) p[k * NR + q] = q < w ? b[k * bk + q * bj] : 0;
            }
            real a[KC * MR] __attribute__((aligned(64))), out[MR * NR] __attribute__((aligned(64)));
            #pragma omp for
            for (size_t i = 0; i < M; i += MR) {
                const real* s = A + i * ai + k0 * ak;
                size_t h = smin(MR, M - i);
                if (ai == 1) for (size_t k = 0; k < kc; k++) for (size_t q = 0; q < MR; q++) a[k * MR + q] = q < h ? s[q + k * ak] : 0;
                else         for (size_t q = 0; q < MR; q++) for (size_t k = 0; k < kc; k++) a[k * MR + q] = q < h ? s[q * ai + k * ak] : 0;
                for (size_t j = 0; j < n; j += NR) {
                    matmul_tile(out, a, packed + j * kc, kc);
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

enum { BLOCK = 64 };            // channels that one thread takes at a time

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
static void linear_forward(real* out, const real* inp, const real* w, const real* bias, size_t rows, size_t IC, size_t OC, size_t ldw, int add) {
    matmul(out, inp, w, rows, OC, IC, OC, IC, 1, 1, ldw, add);
    if (!bias) return;
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t o = 0; o < OC; o++) out[r * OC + o] += bias[o];
}

// out = inp wᵀ + bias  =>  dinp = dout w,  dw = doutᵀ inp,  dbias = sum of dout's rows. All are added to; NULL: not wanted.
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

// out = (x - mean) rstd w + b over each row of x (rows,C); mean, rstd (rows) are kept for the backward. With w = b = NULL
// it is n(.), the norm without parameters. eps 1e-5 keeps a constant row finite.
static void layernorm_forward(real* out, real* mean, real* rstd, const real* x, const real* w, const real* b, size_t rows, size_t C) {
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

// With n = (x - mean) rstd, g = dout w:  dx = rstd (g - mean(g) - n mean(g n)), since moving x along the constant row or
// along n itself changes nothing in n.  dw = sum over rows of dout n,  db = sum of dout.  All are added to.
static void layernorm_backward(real* dx, real* dw, real* db, const real* dout, const real* x, const real* mean, const real* rstd,
                               const real* w, size_t rows, size_t C) {
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
static void scan_forward(real* s, const real* ga, const real* gb, const real* s0, double lo, double hi, size_t B, size_t T, size_t C) {
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
static void scan_backward(real* dga, real* dgb, const real* ds, const real* s, const real* ga, const real* gb, const real* s0,
                          double lo, double hi, size_t B, size_t T, size_t C) {
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

// The head and the loss, forward and backward in one pass over HEAD_ROWS rows at a time, so that the logits, the largest
// thing in the model, exist only for those rows: memory does not grow with T V.
//     logits = y headᵀ      loss = mean over rows with target >= 0 of  log sum_v e^logit_v - logit_target
//     dlogits = (softmax - onehot(target)) / count         dy = dlogits head      dhead += dlogitsᵀ y
// y, dy (rows,C), head, dhead (V,C), targets (rows), logits (HEAD_ROWS,V) scratch. dy == NULL: loss only. dy is written,
// dhead is added to; `scale` multiplies both (1/accum). Returns the mean loss in nats (0 where no row has a target);
// *counted and *correct receive the number of targets, and of those that had the largest logit.
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
    t->tensors = (Tensor*)realloc(t->tensors, (t->count + 1) * sizeof(Tensor));
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
    x->offset = t->total;
    t->total += (x->size + 15) / 16 * 16;       // every tensor starts on a cache line
    return base ? base + x->offset : NULL;
}

typedef struct { real *wa1, *ba1, *wa2, *ba2, *wb1, *bb1, *wb2, *bb2, *ln_w, *ln_b; } LevelParams;
typedef struct { LevelParams level[3]; real *p1, *p2, *norm_w, *norm_b; } BlockParams;     // norms: only with layers > 1
typedef struct { real *wte, *head, *lnf_w, *lnf_b; BlockParams* block; } Params;           // tied: head == wte

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
    real *s0, *state;                   // (B,C): the state before the first token, and after the last
    real *s, *s_mean, *s_rstd, *h;      // (R,C), (R), (R), (R,C)
} LevelActs;
typedef struct {
    real *x;                            // (R,C): what enters the model (block 0) or has left the block before
    real *nx, *nx_mean, *nx_rstd;       // LayerNorm(x), what the block sees; with one layer nx is x itself
    LevelActs level[3];
} BlockActs;
typedef struct {
    int B, T;
    Table table;
    real* memory;
    BlockActs* block;
    real *out, *y, *y_mean, *y_rstd;    // (R,C): what leaves the last block; LayerNorm of it (one layer: y is out itself)
    real *u;                            // (R,2C) scratch: silu(z)
    real *logits;                       // (min(R, HEAD_ROWS), V) scratch
    real *dy, *dout, *dx, *dh[3];       // (R,C) gradients, only for training; du (R,2C)
    real *ds, *dga, *dgb, *dne, *du;
} Acts;

static void acts_layout(Acts* a, real* base, const Config* c, int train) {
    size_t V = c->vocab, C = c->channels, B = a->B, R = B * a->T;
    Table* t = &a->table;
    t->count = 0;
    t->total = 0;
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
            q->state  = take(t, base, B, C, NONE, 0, "block%d.level%d.state", n, l + 1);
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
    if (!m->p.block || !m->g.block || !m->acts.block || !m->step.block) die("not enough memory for %d layers", c->layers);
    m->acts.B = B;
    m->acts.T = T;
    m->step.B = m->step.T = 1;
    params_layout(&m->p, &m->table, NULL, c);
    acts_layout(&m->acts, NULL, c, train);
    acts_layout(&m->step, NULL, c, 0);
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
    acts_layout(&m->acts, m->acts.memory, c, train);
    m->step.memory = (real*)allocate(m->step.table.total * sizeof(real), "the activations of one token");
    acts_layout(&m->step, m->step.memory, c, 0);
}

static void model_free(Model* m) {
    free(m->table.tensors); free(m->acts.table.tensors); free(m->step.table.tensors);
    free(m->param_memory); free(m->grad_memory); free(m->adam_m); free(m->adam_v);
    free(m->acts.memory); free(m->step.memory);
    free(m->p.block); free(m->g.block); free(m->acts.block); free(m->step.block);
    memset(m, 0, sizeof *m);
}

// Number of parameters, and multiply-adds x 2 x 3 (forward, and two products backward) of all matrix products per token.
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
            p[k] = t->init == NORMAL ? t->scale * rng_normal(&seed) : t->init == UNIFORM ? t->scale * (2 * rng_uniform(&seed) - 1) : t->scale;
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
static void gate_backward(real* dx, real* dne, real* dw1, real* db1, real* dw2, real* db2, real* du, real* u, const real* dg,
                          const real* z, const real* x, const real* ne, const real* w1, const real* w2, size_t R, size_t C) {
    size_t in = ne ? 2 * C : C;
    silu_forward(u, z, R, 2 * C);                               // u again, instead of keeping it
    memset(du, 0, R * 2 * C * sizeof(real));
    linear_backward(du, dw2, db2, dg, u, w2, R, 2 * C, C, 2 * C);
    silu_backward(du, z, R, 2 * C);                             // du is dz from here on
    linear_backward(dx, dw1, db1, du, x, w1, R, C, 2 * C, in);
    if (ne) linear_backward(dne, dw1 + C, NULL, du, ne, w1 + C, R, C, 2 * C, in);
}

// One level:  A and b from the two gates, s from the scan, h = LayerNorm(s).
static void level_forward(LevelActs* a, const LevelParams* p, const real* x, real* u, double lo, double hi, size_t B, size_t T, size_t C) {
    size_t R = B * T;
    gate_forward(a->ga, a->za, u, x, a->ne, p->wa1, p->ba1, p->wa2, p->ba2, R, C);
    gate_forward(a->gb, a->zb, u, x, a->ne, p->wb1, p->bb1, p->wb2, p->bb2, R, C);
    scan_forward(a->s, a->ga, a->gb, a->s0, lo, hi, B, T, C);
    layernorm_forward(a->h, a->s_mean, a->s_rstd, a->s, p->ln_w, p->ln_b, R, C);
}

// dh comes in; dx and dne (NULL at level 1) are added to.
static void level_backward(real* dx, real* dne, LevelParams* g, const real* dh, const LevelActs* a, const LevelParams* p, const real* x,
                           Acts* scratch, double lo, double hi, size_t B, size_t T, size_t C) {
    size_t R = B * T;
    real *ds = scratch->ds, *dga = scratch->dga, *dgb = scratch->dgb, *du = scratch->du, *u = scratch->u;
    memset(ds, 0, R * C * sizeof(real));
    layernorm_backward(ds, g->ln_w, g->ln_b, dh, a->s, a->s_mean, a->s_rstd, p->ln_w, R, C);
    scan_backward(dga, dgb, ds, a->s, a->ga, a->gb, a->s0, lo, hi, B, T, C);
    gate_backward(dx, dne, g->wb1, g->bb1, g->wb2, g->bb2, du, u, dgb, a->zb, x, a->ne, p->wb1, p->wb2, R, C);
    gate_backward(dx, dne, g->wa1, g->ba1, g->wa2, g->ba2, du, u, dga, a->za, x, a->ne, p->wa1, p->wa2, R, C);
}

// Three levels. Before levels 2 and 3 comes the prediction error (l counts from 0, so h_l is level[l-1].h and h_0 is x):
//     e_l = h_{l-1} - h_l P_lᵀ,   ne = n(e_l)          or with --error off    ne = n(h_l)
// out (R,C) = h_1 + h_2 + h_3 (+ residual, where there is one).
static void block_forward(real* out, const real* residual, BlockActs* a, const BlockParams* p, real* u, const Config* c, size_t B, size_t T) {
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
static void block_backward(real* dx, BlockParams* g, const real* dout, BlockActs* a, const BlockParams* p, Acts* scratch, const Config* c, size_t B, size_t T) {
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
            linear_backward(dh[l - 1], l == 1 ? g->p1 : g->p2, NULL, de, a->level[l - 1].h, l == 1 ? p->p1 : p->p2, R, C, C, C);
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
        if (c->layers > 1) layernorm_forward(b->nx, b->nx_mean, b->nx_rstd, b->x, p->block[n].norm_w, p->block[n].norm_b, R, C);
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
            layernorm_backward(a->dout, m->g.block[n].norm_w, m->g.block[n].norm_b, a->dx, b->x, b->nx_mean, b->nx_rstd, m->p.block[n].norm_w, R, C);
    }
    embedding_backward(m->g.wte, m->tokens, c->layers > 1 ? a->dout : a->dx, embedding_scale(c), R, C);
}

static void model_zero_grad(Model* m) { memset(m->grad_memory, 0, m->table.total * sizeof(real)); }

// out (n,V) = logits of rows row .. row+n-1 of the last model_forward.
static void model_logits(Model* m, size_t row, size_t n, real* out) {
    linear_forward(out, m->acts.y + row * m->config.channels, m->p.head, NULL, n, m->config.channels, m->config.vocab, m->config.channels, 0);
}

// Zeroes carried states: all of them, or those of the streams b with reset[b] (NULL: all).
static void model_reset(Model* m, Acts* a, const int* reset) {
    for (int n = 0; n < m->config.layers; n++)
        for (int l = 0; l < 3; l++)
            for (int b = 0; b < a->B; b++)
                if (!reset || reset[b]) memset(a->block[n].level[l].state + (size_t)b * m->config.channels, 0, m->config.channels * sizeof(real));
}

// One token, for generation: the same forward with B = T = 1 and a carried state of 3 C numbers a layer, however long
// the text. Returns the logits (V) of what comes next. model_reset(m, &m->step, NULL) starts a new text.
static const real* model_step(Model* m, int token) {
    acts_forward(&m->step, &m->p, &m->config, &token, 1);
    linear_forward(m->step.logits, m->step.y, m->p.head, NULL, 1, m->config.channels, m->config.vocab, m->config.channels, 0);
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
        for (size_t i = k * PIECE; i < smin(m->table.total, (k + 1) * PIECE); i++) sum += (double)m->grad_memory[i] * m->grad_memory[i];
        sums[k] = sum;
    }
    for (size_t k = 0; k < pieces; k++) total += sums[k];
    free(sums);
    return sqrt(total);
}

// AdamW (Loshchilov & Hutter 2019), beta (0.9, 0.95), eps 1e-8, with the gradient scaled down to norm `clip` first (0: never).
// Weight decay goes to the tensors whose table entry says so. Returns the norm before clipping; if it is not finite,
// nothing is changed.
static double model_update(Model* m, double lr, double weight_decay, double clip) {
    double norm = grad_norm(m);
    if (!isfinite(norm)) return norm;
    const double beta1 = 0.9, beta2 = 0.95;
    m->updates++;
    real scale = clip > 0 && norm > clip ? clip / norm : 1, b1 = beta1, b2 = beta2, eps = 1e-8;
    real correct1 = 1 / (1 - pow(beta1, m->updates)), correct2 = 1 / (1 - pow(beta2, m->updates));
    for (int k = 0; k < m->table.count; k++) {
        const Tensor* t = &m->table.tensors[k];
        real *p = m->param_memory + t->offset, *g = m->grad_memory + t->offset, *am = m->adam_m + t->offset, *av = m->adam_v + t->offset;
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
