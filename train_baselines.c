// train_baselines.c: what the new architectures are measured against, Transformer, Mamba, Mamba-2 and Hyena, trained on
// the CPU in plain C by the same loop on the same batches. Forward and backward are written out by hand;
// test/gradcheck.c holds every line of them.
// train_baselines.cu beside this file is the same program in CUDA, function for function.
//
// All four are a stack of N blocks on a residual stream, and differ in the mixer, which alone lets a token see others:
//
//     logits (B,T,V) = norm(x) headᵀ
//            ▲
//            │          ┌───────────────────┐     ┌───────────────────┐
//     x ─────┴── N x ── + mixer(norm(x)) ─────── + mlp(norm(x)) ───────── x (B,T,C) = wte[token] (+ wpe[t])
//
//     --model      mixer                                              what generation carries on     norm, mlp
//     transformer  o_t = sum over s <= t of softmax(q_t·k_s) v_s      all keys and values            as you like
//     mamba        h_t = e^(Δ_t A) h_{t-1} + Δ_t B_t x_t              (2C,16)                        RMSNorm, none
//     mamba2       the same with one decay a head, by matrix products (2C,128)                       RMSNorm, none
//     hyena        k * (x1 v), a filter as long as the text, by FFT   all inputs                     LayerNorm, GELU
//
// The Transformer's flags, each of which a published table needs:
//   --pos rope|learned|none            rotary, a learned vector per position, or none
//   --norm rms|layer  --post-norm      which norm; after the residual sum (Vaswani et al. 2017), not before the mixer
//   --mlp swiglu|gelu|none  --ff N     silu(Wgate x) ⊙ Wup x without biases, gelu(Wup x + b) with, or no MLP; its width
//   --heads N --kv-heads N --bias      grouped queries: heads share keys and values; attention with biases
//   --window W  --block L              see the last W tokens; see only within blocks of L tokens
//   --attention softmax|linear         e^(q·k), or φ(q)·φ(k) with φ = elu + 1, which makes attention a recurrence
//   --weights gpt2|spread              first weights: N(0,.02), or embedding N(0,1) and linear layers U(±fan_in^-½)
//   --tie                              the head is wte
//
// Presets reproduce published baselines: harmonic-tf is the Harmonic paper's Transformer (post-norm, no positions:
// 2VC + 48C² + 36C = 28,886,528 parameters) and llama, of the same size, the fair one beside it.
//
// Memory is O(T) in every model, also where time is O(T²): no (T,T) tensor exists, and the backward pass of attention
// computes its probabilities again from one number a row, the log of their sum.
//
// Reading order: the mixer of the model in question, layer_forward, acts_forward; then their backwards. What is not
// about mixers is train_harmonic.c's to the letter.
//
// Measured (2 cores of a Xeon with AVX-512, gcc 12; `make bench MODEL=baselines` prints it): of what its layers' multiply-
// adds and bytes must take, a step of 16 x 1,024 tokens with V 50257 reaches 53% (llama), 52% (mamba, mamba2), 55% (hyena).
// One step of llama on 1 x 65,536 tokens takes 273 s and 5.3 GB.
//
// Build and run:   make cpu        Everything it can do:   ./build/cpu/train_baselines --help

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

#define MODEL_NAME "baselines"

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

// RMSNorm: out = x rstd w with rstd = (mean of x² + 1e-5)^-½, over each row of x (rows,C); rstd (rows) is kept.
static void rmsnorm_forward(real* out, real* rstd, const real* x, const real* w, size_t rows, size_t C) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        const real* xr = x + r * C;
        real v = 0;
        for (size_t c = 0; c < C; c++) v += xr[c] * xr[c];
        real s = 1 / sqrt(v / C + (real)1e-5);
        for (size_t c = 0; c < C; c++) out[r * C + c] = xr[c] * s * w[c];
        rstd[r] = s;
    }
}

// With n = x rstd, g = dout w:  dx = rstd (g - n mean(g n)), since moving x along n itself changes nothing in n (but
// for eps).  dw = sum over rows of dout n.  Both are added to.
static void rmsnorm_backward(real* dx, real* dw, const real* dout, const real* x, const real* rstd,
                             const real* w, size_t rows, size_t C) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        const real *xr = x + r * C, *d = dout + r * C;
        real s = rstd[r], gn_mean = 0;
        for (size_t c = 0; c < C; c++) gn_mean += d[c] * w[c] * xr[c] * s;
        gn_mean /= C;
        for (size_t c = 0; c < C; c++) dx[r * C + c] += s * (d[c] * w[c] - xr[c] * s * gn_mean);
    }
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += BLOCK) {
        size_t width = smin(BLOCK, C - c0);
        real sum[BLOCK] = {0};
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < width; c++) sum[c] += dout[r * C + c0 + c] * x[r * C + c0 + c] * rstd[r];
        for (size_t c = 0; c < width; c++) dw[c0 + c] += sum[c];
    }
}

// GELU as GPT-2 computes it:  out = z/2 (1 + tanh(k (z + 0.044715 z³))),  k = (2/π)^½.  All (rows,C).
static void gelu_forward(real* out, const real* z, size_t rows, size_t C) {
    const real k = 0.7978845608028654;
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t i = r * C; i < (r + 1) * C; i++)
            out[i] = z[i] / 2 * (1 + fast_tanh(k * (z[i] + (real)0.044715 * z[i] * z[i] * z[i])));
}

// d/dz = (1 + th)/2 + z/2 (1 - th²) k (1 + 3 · 0.044715 z²).  d is dout on entry and dz on return.
static void gelu_backward(real* d, const real* z, size_t rows, size_t C) {
    const real k = 0.7978845608028654;
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t i = r * C; i < (r + 1) * C; i++) {
            real th = fast_tanh(k * (z[i] + (real)0.044715 * z[i] * z[i] * z[i]));
            d[i] *= (1 + th) / 2 + z[i] / 2 * (1 - th * th) * k * (1 + (real)0.134145 * z[i] * z[i]);
        }
}

// SwiGLU's product:  out = silu(z) ⊙ up, all (rows,C).
static void swiglu_forward(real* out, const real* z, const real* up, size_t rows, size_t C) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t i = r * C; i < (r + 1) * C; i++) out[i] = z[i] * sigmoid(z[i]) * up[i];
}

// dup = dout silu(z),  dz = dout up silu'(z), with silu' = σ (1 + z (1 - σ)).  d is dout on entry and dz on return;
// dup is written.
static void swiglu_backward(real* d, real* dup, const real* z, const real* up, size_t rows, size_t C) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t i = r * C; i < (r + 1) * C; i++) {
            real sg = sigmoid(z[i]);
            dup[i] = d[i] * z[i] * sg;
            d[i] *= up[i] * sg * (1 + z[i] * (1 - sg));
        }
}

// out = a + b, all (rows,C); out may be one of them
static void add(real* out, const real* a, const real* b, size_t rows, size_t C) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t i = r * C; i < (r + 1) * C; i++) out[i] = a[i] + b[i];
}

// x (B,T,C) += wpe[past + t], a learned vector per position
static void positions_forward(real* x, const real* wpe, size_t past, size_t B, size_t T, size_t C) {
    #pragma omp parallel for
    for (size_t r = 0; r < B * T; r++)
        for (size_t c = 0; c < C; c++) x[r * C + c] += wpe[(past + r % T) * C + c];
}

// dwpe[t] += sum over b of dx[b,t]
static void positions_backward(real* dwpe, const real* dx, size_t B, size_t T, size_t C) {
    #pragma omp parallel for
    for (size_t t = 0; t < T; t++)
        for (size_t b = 0; b < B; b++)
            for (size_t c = 0; c < C; c++) dwpe[t * C + c] += dx[(b * T + t) * C + c];
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
// attention. Each row of qkv (B*T, W), W = (H + 2G) D, holds H query heads, G key heads and G value heads of D numbers:
// [q | k | v]. With G < H ("grouped queries") H/G neighbouring query heads share one key and value head.

enum { MAX_HEAD = 256 };        // the largest D; buffers of one head lie on the stack
enum { KEYS = 64 };             // keys, or queries, that are taken together

// Rotary positions (Su et al. 2021). The pair (x[i], x[i + D/2]) of every query and key is turned by the angle
// t 10000^(-2i/D): the product q_t·k_s then depends on t - s alone. table (T,D) holds the cosines, then the sines.
static void rope_table(real* table, size_t past, size_t T, size_t D) {
    #pragma omp parallel for
    for (size_t t = 0; t < T; t++)
        for (size_t i = 0; i < D / 2; i++) {
            double angle = (double)(past + t) * pow(10000.0, -2.0 * i / D);
            table[t * D + i] = cos(angle);
            table[t * D + D / 2 + i] = sin(angle);
        }
}

// Turns the first `heads` heads of every row of x (B*T, W) in place; with sign -1 it turns them back, which is also the
// backward pass, a rotation's transpose being its inverse.
static void rope(real* x, const real* table, int sign, size_t B, size_t T, size_t W, size_t heads, size_t D) {
    #pragma omp parallel for
    for (size_t r = 0; r < B * T; r++)
        for (size_t h = 0; h < heads; h++) {
            real *a = x + r * W + h * D, *b = a + D / 2;
            const real *cosine = table + r % T * D, *sine = cosine + D / 2;
            for (size_t i = 0; i < D / 2; i++) {
                real a_i = a[i], b_i = b[i], s = sign * sine[i];
                a[i] = a_i * cosine[i] - b_i * s;
                b[i] = b_i * cosine[i] + a_i * s;
            }
        }
}

// Which keys a query sees: s <= t, with `window` the last `window` of them, with `block` those of t's own block (0: no
// such limit). For every query it is an interval [first_key(t), t], and for every key an interval of queries
// [s, last_query(s)], so no pair is looked at that does not count, and a window costs T · window.
static size_t first_key(size_t t, size_t window, size_t block) {
    size_t first = window && t + 1 > window ? t + 1 - window : 0, start = block ? t / block * block : 0;
    return first > start ? first : start;
}
static size_t last_query(size_t s, size_t T, size_t window, size_t block) {
    size_t last = T - 1;
    if (window) last = smin(last, s + window - 1);
    if (block) last = smin(last, s / block * block + block - 1);
    return last;
}

// out(M,NR) = sum_k a(i,k) b(k,NR), or += with `more`; a(i,k) = a[i*ai + k*ak]. The products of attention: NR queries
// (or keys) are the columns, as wide as matmul_tile's registers, and everything about them lies in such narrow panels.
// a is read where it stands in qkv.
static void panel_product(real* out, const real* a, size_t ai, size_t ak, const real* b, size_t M, size_t K, int more) {
    for (size_t i = 0; i < M; i += MR) matmul_tile(out + i * NR, a + i * ai, ai, ak, smin(MR, M - i), b, K, more);
}

// panel (D,NR) = scale * xᵀ, x (n,D) with row stride W; columns past n are 0. And back: x = scale * panelᵀ.
static void panel_load(real* panel, const real* x, real scale, size_t n, size_t W, size_t D) {
    for (size_t d = 0; d < D; d++)
        for (size_t i = 0; i < NR; i++) panel[d * NR + i] = i < n ? scale * x[i * W + d] : 0;
}
static void panel_store(real* x, const real* panel, real scale, size_t n, size_t W, size_t D) {
    for (size_t i = 0; i < n; i++)
        for (size_t d = 0; d < D; d++) x[i * W + d] = scale * panel[d * NR + i];
}

// Softmax attention. For every head, with k and v of its group:
//     o_t = sum_s p_ts v_s      p_ts = e^(z_ts - lse_t)      z_ts = q_t·k_s D^-½      lse_t = log sum_s e^z_ts
// out (B*T, H D), lse (B*T, H). No (T,T) tensor: NR queries meet KEYS keys at a time, and where a larger z turns up
// than any before ("top"), what has been summed so far is scaled down to it
// (Milakov & Gimelshein 2018; FlashAttention).
static void attention_forward(real* out, real* lse, const real* qkv,
                              size_t window, size_t block, size_t B, size_t T, size_t H, size_t G, size_t D) {
    size_t W = (H + 2 * G) * D;
    real scale = 1 / sqrt((real)D);
    #pragma omp parallel for collapse(3) schedule(dynamic)
    for (size_t b = 0; b < B; b++)
    for (size_t h = 0; h < H; h++)
    for (size_t q0 = 0; q0 < T; q0 += NR) {
        const real *base = qkv + b * T * W, *keys = base + (H + h / (H / G)) * D, *values = keys + G * D;
        real q[MAX_HEAD * NR] __attribute__((aligned(64))), o[MAX_HEAD * NR] __attribute__((aligned(64)));
        real p[KEYS * NR] __attribute__((aligned(64))), top[NR], sum[NR] = {0};
        size_t n = smin(NR, T - q0);
        panel_load(q, base + q0 * W + h * D, scale, n, W, D);
        memset(o, 0, D * NR * sizeof(real));
        for (size_t i = 0; i < NR; i++) top[i] = -1e30;         // not -inf: inf - inf is no number
        for (size_t k0 = first_key(q0, window, block); k0 < q0 + n; k0 += KEYS) {
            size_t w = smin(KEYS, q0 + n - k0);
            panel_product(p, keys + k0 * W, W, 1, q, w, D, 0);
            for (size_t j = 0; j < w; j++) {                    // key k0+j is seen by columns lo .. hi
                int lo = (int)(k0 + j) - (int)q0, hi = (int)last_query(k0 + j, T, window, block) - (int)q0;
                if (lo > 0 || hi < NR - 1)
                    for (int i = 0; i < NR; i++) p[j * NR + i] = i >= lo && i <= hi ? p[j * NR + i] : -INFINITY;
            }
            real larger[NR];
            for (size_t i = 0; i < NR; i++) larger[i] = top[i];
            for (size_t j = 0; j < w; j++)
                for (size_t i = 0; i < NR; i++) larger[i] = p[j * NR + i] > larger[i] ? p[j * NR + i] : larger[i];
            for (size_t i = 0; i < NR; i++) {
                top[i] = fast_exp(top[i] - larger[i]);          // for now, the factor by which all before shrinks
                sum[i] *= top[i];
            }
            for (size_t d = 0; d < D; d++)
                for (size_t i = 0; i < NR; i++) o[d * NR + i] *= top[i];
            for (size_t j = 0; j < w; j++)
                for (size_t i = 0; i < NR; i++) {
                    real z = p[j * NR + i], e = z == -INFINITY ? 0 : fast_exp(z - larger[i]);
                    p[j * NR + i] = e;
                    sum[i] += e;
                }
            for (size_t i = 0; i < NR; i++) top[i] = larger[i];
            panel_product(o, values + k0 * W, 1, W, p, D, w, 1);
        }
        for (size_t d = 0; d < D; d++)
            for (size_t i = 0; i < NR; i++) o[d * NR + i] /= i < n ? sum[i] : 1;
        panel_store(out + (b * T + q0) * H * D + h * D, o, 1, n, H * D, D);
        for (size_t i = 0; i < n; i++) lse[(b * T + q0 + i) * H + h] = top[i] + log(sum[i]);
    }
}

// With do_t given, and p recomputed from lse:
//     dv_s = sum_t p_ts do_t        dp_ts = do_t·v_s
//     dz_ts = p_ts (dp_ts - delta_t),   delta_t = sum_s p_ts dp_ts = do_t·o_t
//     dq_t = D^-½ sum_s dz_ts k_s   dk_s = D^-½ sum_t dz_ts q_t
// dq sums over keys, dk and dv over queries (and over the heads of a group): two passes, each of which owns what it
// writes. dqkv (B*T, W) is written; delta (B*T, H) is scratch.
static void attention_backward(real* dqkv, real* delta, const real* dout, const real* out,
                               const real* lse, const real* qkv,
                               size_t window, size_t block, size_t B, size_t T, size_t H, size_t G, size_t D) {
    size_t W = (H + 2 * G) * D, C = H * D;
    real scale = 1 / sqrt((real)D);
    #pragma omp parallel for collapse(3) schedule(dynamic)
    for (size_t b = 0; b < B; b++)
    for (size_t h = 0; h < H; h++)
    for (size_t q0 = 0; q0 < T; q0 += NR) {                     // first pass: dq and delta of NR queries
        const real *base = qkv + b * T * W, *keys = base + (H + h / (H / G)) * D, *values = keys + G * D;
        real q[MAX_HEAD * NR] __attribute__((aligned(64))), dq[MAX_HEAD * NR] __attribute__((aligned(64))),
             d_o[MAX_HEAD * NR] __attribute__((aligned(64)));
        real p[KEYS * NR] __attribute__((aligned(64))), dp[KEYS * NR] __attribute__((aligned(64))),
             l[NR] = {0}, dl[NR] = {0};
        size_t n = smin(NR, T - q0), r0 = b * T + q0;
        panel_load(q, base + q0 * W + h * D, scale, n, W, D);
        panel_load(d_o, dout + r0 * C + h * D, 1, n, C, D);
        memset(dq, 0, D * NR * sizeof(real));
        for (size_t i = 0; i < n; i++) {
            l[i] = lse[(r0 + i) * H + h];
            for (size_t d = 0; d < D; d++) dl[i] += dout[(r0 + i) * C + h * D + d] * out[(r0 + i) * C + h * D + d];
            delta[(r0 + i) * H + h] = dl[i];
        }
        for (size_t k0 = first_key(q0, window, block); k0 < q0 + n; k0 += KEYS) {
            size_t w = smin(KEYS, q0 + n - k0);
            panel_product(p, keys + k0 * W, W, 1, q, w, D, 0);
            panel_product(dp, values + k0 * W, W, 1, d_o, w, D, 0);
            for (size_t j = 0; j < w; j++) {
                int lo = (int)(k0 + j) - (int)q0, hi = (int)last_query(k0 + j, T, window, block) - (int)q0;
                for (int i = 0; i < NR; i++) {
                    real dz = fast_exp(p[j * NR + i] - l[i]) * (dp[j * NR + i] - dl[i]);
                    dp[j * NR + i] = i >= lo && i <= hi ? dz : 0;
                }
            }
            panel_product(dq, keys + k0 * W, 1, W, dp, D, w, 1);
        }
        panel_store(dqkv + r0 * W + h * D, dq, scale, n, W, D);
    }
    #pragma omp parallel for collapse(3) schedule(dynamic)
    for (size_t b = 0; b < B; b++)
    for (size_t g = 0; g < G; g++)
    for (size_t k0 = 0; k0 < T; k0 += NR) {                     // second pass: dk and dv of NR keys
        const real* base = qkv + b * T * W;
        real k[MAX_HEAD * NR] __attribute__((aligned(64))), v[MAX_HEAD * NR] __attribute__((aligned(64)));
        real dk[MAX_HEAD * NR] __attribute__((aligned(64))), dv[MAX_HEAD * NR] __attribute__((aligned(64)));
        real p[KEYS * NR] __attribute__((aligned(64))), dp[KEYS * NR] __attribute__((aligned(64)));
        size_t n = smin(NR, T - k0), end = last_query(k0 + n - 1, T, window, block) + 1;
        panel_load(k, base + k0 * W + (H + g) * D, scale, n, W, D);
        panel_load(v, base + k0 * W + (H + G + g) * D, 1, n, W, D);
        memset(dk, 0, D * NR * sizeof(real));
        memset(dv, 0, D * NR * sizeof(real));
        for (size_t h = g * (H / G); h < (g + 1) * (H / G); h++)
            for (size_t q0 = k0; q0 < end; q0 += KEYS) {
                size_t w = smin(KEYS, end - q0), r0 = b * T + q0;
                const real *q = base + q0 * W + h * D, *d_o = dout + r0 * C + h * D;
                panel_product(p, q, W, 1, k, w, D, 0);
                panel_product(dp, d_o, C, 1, v, w, D, 0);
                for (size_t j = 0; j < w; j++) {                // query q0+j sees columns lo .. hi
                    int lo = (int)first_key(q0 + j, window, block) - (int)k0, hi = (int)(q0 + j) - (int)k0;
                    real l = lse[(r0 + j) * H + h], dl = delta[(r0 + j) * H + h];
                    for (int i = 0; i < NR; i++) {
                        real e = i >= lo && i <= hi ? fast_exp(p[j * NR + i] - l) : 0;
                        p[j * NR + i] = e;
                        dp[j * NR + i] = e * (dp[j * NR + i] - dl);
                    }
                }
                panel_product(dv, d_o, 1, C, p, D, w, 1);
                panel_product(dk, q, 1, W, dp, D, w, 1);
            }
        panel_store(dqkv + (b * T + k0) * W + (H + g) * D, dk, scale, n, W, D);
        panel_store(dqkv + (b * T + k0) * W + (H + G + g) * D, dv, 1, n, W, D);
    }
}

// One token's attention, for generation: its own q, and the keys and values [k | v] (2 G D) of all tokens so far, of
// which token s lies in cache[s % room]. Plain softmax. t: the token's place.
static void attention_step(real* out, const real* q, const real* cache,
                           size_t room, size_t t, size_t first, size_t H, size_t G, size_t D) {
    #pragma omp parallel for if (H * (t - first) * D > 50000)
    for (size_t h = 0; h < H; h++) {
        const real *qh = q + h * D, *kv = cache + h / (H / G) * D;
        real o[MAX_HEAD] = {0}, top = -INFINITY, sum = 0, scale = 1 / sqrt((real)D);
        for (size_t s = first; s <= t; s++) {
            const real *k = kv + s % room * 2 * G * D, *v = k + G * D;
            real z = 0;
            for (size_t d = 0; d < D; d++) z += qh[d] * k[d];
            z *= scale;
            real larger = z > top ? z : top, shrink = s > first ? fast_exp(top - larger) : 0, e = fast_exp(z - larger);
            top = larger;
            sum = sum * shrink + e;
            for (size_t d = 0; d < D; d++) o[d] = o[d] * shrink + e * v[d];
        }
        for (size_t d = 0; d < D; d++) out[h * D + d] = o[d] / sum;
    }
}

// The map of linear attention, elu + 1: positive, so that sums of products can be divided by. And its derivative.
static inline real phi(real x) { return x > 0 ? x + 1 : fast_exp(x); }
static inline real phi_slope(real x) { return x > 0 ? 1 : fast_exp(x); }
static const real LEAST = 1e-6;         // what the sum is held above before a division

// Linear attention (Katharopoulos et al. 2020):
// with φ(q)·φ(k) in the place of e^(q·k) the sum over the past becomes a state
//     S_t = S_{t-1} + φ(k_t) v_tᵀ  (D,D)       z_t = z_{t-1} + φ(k_t)  (D)       den_t = φ(q_t)·z_t
//     o_t = S_tᵀ φ(q_t) / max(den_t, LEAST)
// and time costs O(T). out (B*T, H D), den (B*T, H). state (B,G,D+1,D), S and then z, is where the sums start and where
// they end. It is the plain recurrence:
// S fits into a core's first cache, and a step costs far less than its projections.
static void linear_attention_forward(real* out, real* den, real* state, const real* qkv,
                                     size_t B, size_t T, size_t H, size_t G, size_t D) {
    size_t W = (H + 2 * G) * D;
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
    for (size_t g = 0; g < G; g++) {
        real *S = state + (b * G + g) * (D + 1) * D, *z = S + D * D;
        for (size_t t = 0; t < T; t++) {
            const real *row = qkv + (b * T + t) * W, *k = row + (H + g) * D, *v = k + G * D;
            for (size_t d = 0; d < D; d++) {
                real f = phi(k[d]);
                z[d] += f;
                for (size_t e = 0; e < D; e++) S[d * D + e] += f * v[e];
            }
            for (size_t h = g * (H / G); h < (g + 1) * (H / G); h++) {
                real o[MAX_HEAD] = {0}, sum = 0;
                for (size_t d = 0; d < D; d++) {
                    real f = phi(row[h * D + d]);
                    sum += f * z[d];
                    for (size_t e = 0; e < D; e++) o[e] += f * S[d * D + e];
                }
                den[(b * T + t) * H + h] = sum;
                real divide = 1 / (sum > LEAST ? sum : LEAST);
                for (size_t e = 0; e < D; e++) out[(b * T + t) * H * D + h * D + e] = o[e] * divide;
            }
        }
    }
}

// With n_t = do_t / max(den_t, LEAST) the gradient of S_tᵀ φ(q_t), and m_t = -n_t·o_t that of den_t
// (0 where it was held):
//     dφ(q_t) = S_t n_t + m_t z_t                                 S, z once more forward in time
//     U_s = U_{s+1} + φ(q_s) n_sᵀ      u_s = u_{s+1} + m_s φ(q_s)  the gradients of S and z, backward in time
//     dφ(k_s) = U_s v_s + u_s          dv_s = U_sᵀ φ(k_s)
// dqkv (B*T, W) is written; state (B,G,D+1,D) is scratch, the sums having started from 0.
static void linear_attention_backward(real* dqkv, real* state, const real* dout, const real* out, const real* den,
                                      const real* qkv, size_t B, size_t T, size_t H, size_t G, size_t D) {
    size_t W = (H + 2 * G) * D;
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
    for (size_t g = 0; g < G; g++) {
        real *S = state + (b * G + g) * (D + 1) * D, *z = S + D * D, n[MAX_HEAD];
        memset(S, 0, (D + 1) * D * sizeof(real));
        for (size_t i = 0; i < 2 * T; i++) {                    // forward for dq, then backward for dk and dv
            size_t t = i < T ? i : 2 * T - 1 - i, r = b * T + t;
            const real *row = qkv + r * W, *k = row + (H + g) * D, *v = k + G * D;
            real *drow = dqkv + r * W, *dk = drow + (H + g) * D, *dv = dk + G * D;
            if (i == T) memset(S, 0, (D + 1) * D * sizeof(real));       // S and z are U and u from here on
            if (i < T)
                for (size_t d = 0; d < D; d++) {
                    real f = phi(k[d]);
                    z[d] += f;
                    for (size_t e = 0; e < D; e++) S[d * D + e] += f * v[e];
                }
            for (size_t h = g * (H / G); h < (g + 1) * (H / G); h++) {
                const real *q = row + h * D, *d_o = dout + r * H * D + h * D, *o = out + r * H * D + h * D;
                real sum = den[r * H + h], divide = 1 / (sum > LEAST ? sum : LEAST), m = 0;
                for (size_t e = 0; e < D; e++) { n[e] = d_o[e] * divide; m -= n[e] * o[e]; }
                if (!(sum > LEAST)) m = 0;
                for (size_t d = 0; d < D; d++) {
                    real f = phi(q[d]), df = m * z[d];
                    if (i < T) {
                        for (size_t e = 0; e < D; e++) df += S[d * D + e] * n[e];
                        drow[h * D + d] = df * phi_slope(q[d]);
                    } else {
                        z[d] += m * f;
                        for (size_t e = 0; e < D; e++) S[d * D + e] += f * n[e];
                    }
                }
            }
            if (i < T) continue;
            memset(dv, 0, D * sizeof(real));
            for (size_t d = 0; d < D; d++) {
                real f = phi(k[d]), df = z[d];
                for (size_t e = 0; e < D; e++) { df += S[d * D + e] * v[e]; dv[e] += f * S[d * D + e]; }
                dk[d] = df * phi_slope(k[d]);
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------
// what the other mixers are made of: a short convolution, two scans, the Fourier transform

// log(1 + u) for 0 <= u <= 1, as arithmetic that vectorises: 2 artanh(s) with s = u / (2 + u) <= 1/3, whose series
// s + s³/3 + s⁵/5 + ... is good to 2e-9 relative after eight terms, for the smallest u as well.
static inline real fast_log1p(real u) {
    if (sizeof(real) == 8) return log1p(u);
    float s = (float)u / (2 + (float)u), q = s * s;
    return 2 * s * (1 + q * (1/3.f + q * (1/5.f + q * (1/7.f
                    + q * (1/9.f + q * (1/11.f + q * (1/13.f + q * (1/15.f))))))));
}

// log(1 + e^x), written so that no e^x overflows: for x > 0 it is x + log(1 + e^-x). Its derivative is sigmoid(x).
static inline real softplus(real x) { return (x > 0 ? x : 0) + fast_log1p(fast_exp(x > 0 ? -x : x)); }

// e^x of an x <= 0, and 0 where e^x is: fast_exp ends at e^-87, which times a decay rate of e^87 would look like one.
static inline real decay_exp(real x) { return x < -87 ? 0 : fast_exp(x); }

// ----------------------------------------------------------------------------------------------------------------
// short causal convolution: every channel on its own, over the last K tokens

enum { MAX_CONV = 8 };          // the largest K

// out[t] = bias + sum_k w[k] x[t-(K-1)+k].  out, x (B,T,C), w (C,K), bias (C). What came before the first token is
// zero, or with window (B,K-1,C) the last K-1 inputs of the call before; they are then replaced by this call's last.
static void short_conv_forward(real* out, const real* x, const real* w, const real* bias, real* window,
                               size_t B, size_t T, size_t C, size_t K) {
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
    for (size_t c0 = 0; c0 < C; c0 += BLOCK) {
        size_t n = smin(BLOCK, C - c0);
        const real* xb = x + b * T * C + c0;
        real* before = window ? window + b * (K - 1) * C + c0 : NULL;
        real tap[MAX_CONV][BLOCK];
        for (size_t k = 0; k < K; k++) for (size_t c = 0; c < n; c++) tap[k][c] = w[(c0 + c) * K + k];
        for (size_t t = 0; t < T; t++) {
            real* to = out + (b * T + t) * C + c0;
            for (size_t c = 0; c < n; c++) to[c] = bias[c0 + c] + tap[K - 1][c] * xb[t * C + c];
            for (size_t k = K - 1; k-- > 0;) {
                const real* row = t + k >= K - 1 ? xb + (t + k - (K - 1)) * C : before ? before + (t + k) * C : NULL;
                if (row) for (size_t c = 0; c < n; c++) to[c] += tap[k][c] * row[c];
            }
        }
        if (before) for (size_t k = 0; k < K - 1; k++)      // row k is time T-(K-1)+k: oldest first, so nothing is lost
            memmove(before + k * C, T + k >= K - 1 ? xb + (T + k - (K - 1)) * C : before + (T + k) * C,
                    n * sizeof(real));
    }
}

// x[s] was used by out[s], ..., out[s+K-1], the last with w[0]:  dx[s] = sum_k w[k] dout[s+(K-1)-k]  as far as T
// reaches; dw[k] = sum over b, t of dout[t] x[t-(K-1)+k].  dx is written, dw and dbias are added to.
// No window: training only.
static void short_conv_backward(real* dx, real* dw, real* dbias, const real* dout, const real* x, const real* w,
                                size_t B, size_t T, size_t C, size_t K) {
    sum_rows(dbias, dout, B * T, C);
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += BLOCK) {
        size_t n = smin(BLOCK, C - c0);
        real tap[MAX_CONV][BLOCK], dtap[MAX_CONV][BLOCK] = {{0}};
        for (size_t k = 0; k < K; k++) for (size_t c = 0; c < n; c++) tap[k][c] = w[(c0 + c) * K + k];
        for (size_t b = 0; b < B; b++)
            for (size_t s = 0; s < T; s++) {
                const real *xs = x + (b * T + s) * C + c0, *d = dout + (b * T + s) * C + c0;
                real* to = dx + (b * T + s) * C + c0;
                for (size_t c = 0; c < n; c++) { to[c] = tap[K - 1][c] * d[c]; dtap[K - 1][c] += d[c] * xs[c]; }
                for (size_t k = K - 1; k-- > 0 && s + (K - 1) - k < T;) {
                    const real* row = d + (K - 1 - k) * C;
                    for (size_t c = 0; c < n; c++) { to[c] += tap[k][c] * row[c]; dtap[k][c] += row[c] * xs[c]; }
                }
            }
        for (size_t k = 0; k < K; k++) for (size_t c = 0; c < n; c++) dw[(c0 + c) * K + k] += dtap[k][c];
    }
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba's selective scan: a state of N numbers for every channel, whose step size, input and output weights depend on
// the token

enum { LANES = 32, MAX_STATE = 256 };       // channels that a thread takes at a time; the largest N
typedef real lanes[LANES];

// Number of chunks of L tokens in T; the last may be shorter.
static size_t num_chunks(size_t T, size_t L) { return (T + L - 1) / L; }

// A = -e^a_log of channels c0 .. c0+n-1, a_log (E,N), as (N,LANES). Lanes without a channel get 0.
static void scan_decays(real* A, const real* a_log, size_t c0, size_t n, size_t N) {
    for (size_t k = 0; k < N; k++)
        for (size_t c = 0; c < LANES; c++) A[k * LANES + c] = c < n ? -fast_exp(a_log[(c0 + c) * N + k]) : 0;
}

// For every sequence, channel d and n < N, along t:
//     Δ_t = softplus(dt_t + b_dt)       h_t = e^{Δ_t A} h_{t-1} + Δ_t B_t[n] x_t      y_t = sum_n C_t[n] h_t[n] + D x_t
// y, x, dt (B,T,E), bc (B,T,2N): B and C of each token, shared by all channels; a_log (E,N), b_dt, d (E).
// state (B,N,E): the h that the last call left, replaced by this one's; NULL: from zero. A state is N times as large as
// a token, so only those before each chunk of L tokens are kept: starts (B,chunks,N,E). Any L gives the same bits.
static void selective_scan_forward(real* y, real* starts, const real* x, const real* dt, const real* bc,
                                   const real* a_log, const real* b_dt, const real* d, real* state,
                                   size_t L, size_t B, size_t T, size_t E, size_t N) {
    size_t chunks = num_chunks(T, L);
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
    for (size_t c0 = 0; c0 < E; c0 += LANES) {
        size_t n = smin(LANES, E - c0);
        real A[MAX_STATE * LANES], h[MAX_STATE * LANES];
        memset(h, 0, N * LANES * sizeof(real));
        scan_decays(A, a_log, c0, n, N);
        if (state) for (size_t k = 0; k < N; k++) memcpy(h + k * LANES, state + (b * N + k) * E + c0, n * sizeof(real));
        for (size_t t = 0; t < T; t++) {
            if (t % L == 0)
                for (size_t k = 0; k < N; k++)
                    memcpy(starts + ((b * chunks + t / L) * N + k) * E + c0, h + k * LANES, n * sizeof(real));
            size_t at = (b * T + t) * E + c0;
            const real* bct = bc + (b * T + t) * 2 * N;
            real delta[LANES] = {0}, dx[LANES] = {0}, sum[LANES] = {0};
            for (size_t c = 0; c < n; c++) {
                delta[c] = softplus(dt[at + c] + b_dt[c0 + c]);
                dx[c] = delta[c] * x[at + c];
                sum[c] = d[c0 + c] * x[at + c];
            }
            for (size_t k = 0; k < N; k++) {
                real Bk = bct[k], Ck = bct[N + k];
                for (size_t c = 0; c < LANES; c++) {
                    real now = decay_exp(delta[c] * A[k * LANES + c]) * h[k * LANES + c] + Bk * dx[c];
                    h[k * LANES + c] = now;
                    sum[c] += Ck * now;
                }
            }
            for (size_t c = 0; c < n; c++) y[at + c] = sum[c];
        }
        if (state) for (size_t k = 0; k < N; k++) memcpy(state + (b * N + k) * E + c0, h + k * LANES, n * sizeof(real));
    }
}

// How many numbers selective_scan_backward needs to work with: nothing of size T.
static size_t scan_work(size_t L, size_t B, size_t E, size_t N) {
    return B * (2 * N + 1) * E + B * num_chunks(E, LANES) * L * 2 * N;
}

// And how many each of its threads allocates: seven arrays of a chunk, one of which begins a token early.
static size_t scan_thread_work(size_t L) { return (7 * L + 1) * LANES; }

// With a_t = e^{Δ_t A}, the whole gradient g_t of h_t runs the recurrence in reverse, and q_t = a_t h_{t-1}:
//     g_t = C_t dy_t + a_{t+1} g_{t+1}
//     dC_t = sum_d dy_t h_t            dB_t = sum_d g_t Δ_t x_t             dx_t = D dy_t + Δ_t sum_n g_t B_t
//     dΔ_t = sum_n g_t (B_t x_t + A q_t)         ddt = dΔ sigmoid(dt + b_dt)
//     dA = sum_t g_t Δ_t q_t           dA_log = A dA                        dD = sum_t x_t dy_t
// Chunks are taken last to first; the states inside one are computed again from its start. q is a product of what is
// there, never h_t less something or divided by a decay, which may be 0.
// Of B and C every channel has a share: each thread writes its channels' sum of a chunk, then these are added up in
// order. dx, ddt (B,T,E), dbc (B,T,2N) are written; da_log, db_dt, dd are added to. work: scan_work numbers.
static void selective_scan_backward(real* dx, real* ddt, real* dbc, real* da_log, real* db_dt, real* dd, const real* dy,
                                    const real* x, const real* dt, const real* bc, const real* starts,
                                    const real* a_log, const real* b_dt, const real* d, real* work,
                                    size_t L, size_t B, size_t T, size_t E, size_t N) {
    size_t chunks = num_chunks(T, L), blocks = num_chunks(E, LANES);
    real *carries = work, *dA = carries + B * N * E, *dD = dA + B * N * E, *shares = dD + B * E;
    // carries: a_{t+1} g_{t+1}, and dA, (B,N,E) each; dD (B,E); shares (B,blocks,L,2N)
    memset(work, 0, B * (2 * N + 1) * E * sizeof(real));
    #pragma omp parallel
    {
        // h_{-1}, h_0, ..., h_{L-1}; the others (L) each
        lanes* h = (lanes*)allocate(scan_thread_work(L) * sizeof(real), "a chunk of the scan");
        lanes *a = h + L + 1, *delta = a + L, *xs = delta + L, *dys = xs + L, *gB = dys + L, *ddelta = gB + L;
        for (size_t chunk = chunks; chunk-- > 0;) {
            size_t t0 = chunk * L, len = smin(L, T - t0);
            #pragma omp for collapse(2)
            for (size_t b = 0; b < B; b++)
            for (size_t block = 0; block < blocks; block++) {
                size_t c0 = block * LANES, n = smin(LANES, E - c0), row = b * T + t0;
                real* share = shares + (b * blocks + block) * L * 2 * N;
                real A[MAX_STATE * LANES];
                scan_decays(A, a_log, c0, n, N);
                memset(h, 0, scan_thread_work(L) * sizeof(real));
                for (size_t t = 0; t < len; t++) {
                    #pragma omp simd
                    for (size_t c = 0; c < n; c++) {
                        size_t at = (row + t) * E + c0 + c;
                        delta[t][c] = softplus(dt[at] + b_dt[c0 + c]);
                        xs[t][c] = x[at];
                        dys[t][c] = dy[at];
                    }
                }
                for (size_t k = 0; k < N; k++) {            // one state number of these channels after the other
                    const real *Ak = A + k * LANES, *Bs = bc + row * 2 * N + k, *Cs = Bs + N;   // of token t: Bs[2 N t]
                    real *start = carries + (b * N + k) * E + c0, carry[LANES] = {0}, dAk[LANES] = {0};
                    memcpy(h[0], starts + ((b * chunks + chunk) * N + k) * E + c0, n * sizeof(real));
                    memcpy(carry, start, n * sizeof(real));
                    for (size_t t = 0; t < len; t++) {      // the states again
                        real Bk = Bs[2 * N * t];
                        #pragma omp simd
                        for (size_t c = 0; c < LANES; c++) {
                            a[t][c] = decay_exp(delta[t][c] * Ak[c]);
                            h[t + 1][c] = a[t][c] * h[t][c] + Bk * (delta[t][c] * xs[t][c]);
                        }
                    }
                    for (size_t t = len; t-- > 0;) {
                        real Bk = Bs[2 * N * t], Ck = Cs[2 * N * t], dB = 0, dC = 0;
                        #pragma omp simd reduction(+ : dB, dC)
                        for (size_t c = 0; c < LANES; c++) {
                            real g = Ck * dys[t][c] + carry[c], q = a[t][c] * h[t][c];
                            dC += dys[t][c] * h[t + 1][c];
                            dB += g * delta[t][c] * xs[t][c];
                            gB[t][c] += g * Bk;
                            ddelta[t][c] += g * (Bk * xs[t][c] + Ak[c] * q);
                            dAk[c] += g * delta[t][c] * q;
                            carry[c] = a[t][c] * g;
                        }
                        share[t * 2 * N + k] = dB;
                        share[t * 2 * N + N + k] = dC;
                    }
                    memcpy(start, carry, n * sizeof(real));
                    for (size_t c = 0; c < n; c++) dA[(b * N + k) * E + c0 + c] += dAk[c];
                }
                for (size_t t = 0; t < len; t++) {
                    #pragma omp simd
                    for (size_t c = 0; c < n; c++) {
                        size_t at = (row + t) * E + c0 + c;
                        dx[at] = d[c0 + c] * dys[t][c] + delta[t][c] * gB[t][c];
                        ddt[at] = ddelta[t][c] * sigmoid(dt[at] + b_dt[c0 + c]);
                        dD[b * E + c0 + c] += xs[t][c] * dys[t][c];
                    }
                }
            }
            #pragma omp for collapse(2)
            for (size_t b = 0; b < B; b++)
            for (size_t t = 0; t < len; t++) {
                real* sum = dbc + (b * T + t0 + t) * 2 * N;
                memset(sum, 0, 2 * N * sizeof(real));
                for (size_t block = 0; block < blocks; block++)
                    for (size_t k = 0; k < 2 * N; k++) sum[k] += shares[((b * blocks + block) * L + t) * 2 * N + k];
            }
        }
        free(h);
    }
    for (size_t b = 0; b < B; b++)
        for (size_t c = 0; c < E; c++) {
            dd[c] += dD[b * E + c];
            for (size_t k = 0; k < N; k++) da_log[c * N + k] -= fast_exp(a_log[c * N + k]) * dA[(b * N + k) * E + c];
        }
    sum_rows(db_dt, ddt, B * T, E);
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba-2's scan, "state space duality" (SSD). One decay for all P channels and N state numbers of a head: then L
// tokens at a time can be written as matrix products. Heads h < H, channels p < P, E = H P:
//     Δ_t = softplus(dt_t + b_dt)                           a_t = Δ_t A (<= 0)
//     S_t = e^{a_t} S_{t-1} + B_t (Δ_t x_t)ᵀ  (N,P)         y_t = C_t S_t + D x_t
// In a chunk that starts from state S:
//     y_t = sum_{j <= t} e^{a_{j+1} + ... + a_t} (C_t·B_j) Δ_j x_j  +  e^{a_0 + ... + a_t} C_t S  +  D x_t
//     S'  = e^{a_0 + ... + a_last} S + sum_j e^{a_{j+1} + ... + a_last} B_j (Δ_j x_j)ᵀ
// Every exponent is summed up as it stands here, from numbers of one sign. The difference of two running sums would be
// the same on paper, but its rounding error grows with everything that came before, and where it is masked its e^ can
// be infinite.
// xbc (B,T,W) with W = E + 2N holds x, B and C of each token beside each other; dt (B,T,H); a_log, b_dt, d (H).

// The steps and decays of one head in a chunk: delta (len), from_start[t] = e^{a_0 + ... + a_t},
// to_end[j] = e^{a_{j+1} + ... + a_last}. dt points to the head's first step in the chunk. Returns A.
static real ssd_steps(real* delta, real* from_start, real* to_end, const real* dt,
                      real a_log, real b_dt, size_t len, size_t H) {
    real A = -fast_exp(a_log), sum = 0;
    for (size_t t = 0; t < len; t++) delta[t] = softplus(dt[t * H] + b_dt);
    for (size_t t = 0; t < len; t++) from_start[t] = decay_exp(sum += delta[t] * A);
    sum = 0;
    for (size_t t = len; t-- > 0; sum += delta[t] * A) to_end[t] = decay_exp(sum);
    return A;
}

// decay[t][j] = e^{a_{j+1} + ... + a_t} for j <= t, else 0; (len,len) with row stride L. between (len) is scratch.
static void ssd_decays(real* decay, real* between, const real* delta, real A, size_t len, size_t L) {
    memset(decay, 0, len * L * sizeof(real));
    for (size_t t = 0; t < len; t++) {
        for (size_t j = 0; j < t; j++) between[j] += delta[t] * A;
        between[t] = 0;
        for (size_t j = 0; j <= t; j++) decay[t * L + j] = decay_exp(between[j]);
    }
}

// The state before each chunk, and after the last: states (B,chunks+1,H,N,P), of which the first must be set.
static void ssd_states(real* states, const real* xbc, const real* dt, const real* a_log, const real* b_dt,
                       size_t L, size_t B, size_t T, size_t H, size_t P, size_t N) {
    size_t chunks = num_chunks(T, L), E = H * P, W = E + 2 * N, size = N * P;
    #pragma omp parallel
    {
        real* delta = (real*)allocate((3 * L + L * P) * sizeof(real), "a chunk of the scan");
        real *from_start = delta + L, *to_end = from_start + L, *xw = to_end + L;
        #pragma omp for collapse(3)
        for (size_t b = 0; b < B; b++)
        for (size_t k = 0; k < chunks; k++)
        for (size_t h = 0; h < H; h++) {                    // what the chunk's own tokens leave in the state
            size_t row = b * T + k * L, len = smin(L, T - k * L);
            const real *x = xbc + row * W + h * P, *Bm = xbc + row * W + E;
            ssd_steps(delta, from_start, to_end, dt + row * H + h, a_log[h], b_dt[h], len, H);
            for (size_t j = 0; j < len; j++)
                for (size_t p = 0; p < P; p++) xw[j * P + p] = to_end[j] * delta[j] * x[j * W + p];
            matmul(states + ((b * (chunks + 1) + k + 1) * H + h) * size, Bm, xw, N, P, len, P, 1, W, P, 1, 0);
        }
        #pragma omp for collapse(2)
        for (size_t b = 0; b < B; b++)
        for (size_t h = 0; h < H; h++)
            for (size_t k = 0; k < chunks; k++) {           // and what of the past is still there
                size_t row = b * T + k * L, len = smin(L, T - k * L);
                ssd_steps(delta, from_start, to_end, dt + row * H + h, a_log[h], b_dt[h], len, H);
                const real* before = states + ((b * (chunks + 1) + k) * H + h) * size;
                real *after = states + ((b * (chunks + 1) + k + 1) * H + h) * size, decay = from_start[len - 1];
                for (size_t i = 0; i < size; i++) after[i] += decay * before[i];
            }
        free(delta);
    }
}

// How many numbers each thread allocates for its chunk in ssd_forward, or with train = 1 in ssd_backward.
static size_t ssd_thread_work(size_t L, size_t P, size_t N, int train) {
    return train ? 8 * L + 4 * L * P + L * N + 5 * L * L : 4 * L + 2 * L * P + 2 * L * L;
}

// y (B,T,E) as above; states (B,chunks+1,H,N,P) are kept for the backward. state (B,H,N,P): what the last call left,
// replaced by what this one leaves; NULL: from zero.
static void ssd_forward(real* y, real* states, const real* xbc, const real* dt, const real* a_log, const real* b_dt,
                        const real* d, real* state, size_t L, size_t B, size_t T, size_t H, size_t P, size_t N) {
    size_t chunks = num_chunks(T, L), E = H * P, W = E + 2 * N, size = H * N * P;
    for (size_t b = 0; b < B; b++) {
        real* first = states + b * (chunks + 1) * size;
        if (state) memcpy(first, state + b * size, size * sizeof(real)); else memset(first, 0, size * sizeof(real));
    }
    ssd_states(states, xbc, dt, a_log, b_dt, L, B, T, H, P, N);
    if (state) for (size_t b = 0; b < B; b++)
        memcpy(state + b * size, states + (b * (chunks + 1) + chunks) * size, size * sizeof(real));
    #pragma omp parallel
    {
        real* delta = (real*)allocate(ssd_thread_work(L, P, N, 0) * sizeof(real), "a chunk of the scan");
        real *from_start = delta + L, *to_end = from_start + L, *between = to_end + L;
        real *xd = between + L, *past = xd + L * P, *scores = past + L * P, *M = scores + L * L;
        #pragma omp for collapse(2)
        for (size_t b = 0; b < B; b++)
        for (size_t k = 0; k < chunks; k++) {
            size_t row = b * T + k * L, len = smin(L, T - k * L);
            const real *Bm = xbc + row * W + E, *Cm = Bm + N;
            matmul(scores, Cm, Bm, len, len, N, L, W, 1, 1, W, 0);                    // C_t·B_j, for all heads
            for (size_t h = 0; h < H; h++) {
                const real *x = xbc + row * W + h * P, *S = states + (b * (chunks + 1) + k) * size + h * N * P;
                real* out = y + row * E + h * P;
                real A = ssd_steps(delta, from_start, to_end, dt + row * H + h, a_log[h], b_dt[h], len, H);
                ssd_decays(M, between, delta, A, len, L);
                for (size_t t = 0; t < len; t++) {
                    for (size_t j = 0; j <= t; j++) M[t * L + j] *= scores[t * L + j];
                    for (size_t p = 0; p < P; p++) xd[t * P + p] = delta[t] * x[t * W + p];
                }
                matmul(out, M, xd, len, P, len, E, L, 1, P, 1, 0);
                matmul(past, Cm, S, len, P, N, P, W, 1, P, 1, 0);
                for (size_t t = 0; t < len; t++)
                    for (size_t p = 0; p < P; p++)
                        out[t * E + p] += from_start[t] * past[t * P + p] + d[h] * x[t * W + p];
            }
        }
        free(delta);
    }
}

// How many numbers ssd_backward needs to work with: dstates (B,chunks+1,H,N,P) and two of (B,T,H).
static size_t ssd_work(size_t L, size_t B, size_t T, size_t H, size_t P, size_t N) {
    return B * (num_chunks(T, L) + 1) * H * N * P + 2 * B * T * H;
}

// The gradient dS' of the state after a chunk goes from the last chunk to the first:
//     dS = e^{a_0 + ... + a_last} dS' + sum_t e^{a_0 + ... + a_t} C_t dy_tᵀ
// Inside a chunk, with M_tj = decay_tj (C_t·B_j) and u = Δ x:
//     du_j = sum_{t >= j} M_tj dy_t + to_end_j B_j dS'      dx = Δ du + D dy      dΔ = du·x + A da      dD = sum dy·x
//     dM_tj = dy_t·u_j          dC_t = sum_j decay_tj dM_tj B_j + from_start_t S dy_t
//                               dB_j = sum_t decay_tj dM_tj C_t + to_end_j dS' u_j           (both summed over heads)
// a_t stands in every exponent that spans token t, so da_t is a sum over those,
// of the exponential times what it multiplies:
//     da_t = sum_{j < t <= i} M_ij dM_ij  +  sum_{i >= t} from_start_i (C_i S)·dy_i
//            +  sum_{j < t} to_end_j (B_j dS')·u_j  +  e^{all} S·dS'
// each summed as it stands (column sums from the last row up): no large terms that ought to cancel.
// dA_log = A dA = sum_t a_t da_t.  dxbc (B,T,W), ddt (B,T,H) are written; da_log, db_dt, dd are added to.
static void ssd_backward(real* dxbc, real* ddt, real* da_log, real* db_dt, real* dd, const real* dy, const real* states,
                         const real* xbc, const real* dt, const real* a_log, const real* b_dt, const real* d,
                         real* work, size_t L, size_t B, size_t T, size_t H, size_t P, size_t N) {
    size_t chunks = num_chunks(T, L), E = H * P, W = E + 2 * N, size = N * P;
    real *dstates = work, *row_a = dstates + B * (chunks + 1) * H * size, *row_d = row_a + B * T * H;
    #pragma omp parallel
    {
        real* delta = (real*)allocate(ssd_thread_work(L, P, N, 1) * sizeof(real), "a chunk of the scan");
        real *from_start = delta + L, *to_end = from_start + L, *between = to_end + L, *columns = between + L;
        real *from_past = columns + L, *to_future = from_past + L, *da = to_future + L;
        real *u = da + L, *dyw = u + L * P, *du = dyw + L * P, *tmp = du + L * P, *wide = tmp + L * P;
        real *scores = wide + L * N, *dscores = scores + L * L, *decay = dscores + L * L,
             *M = decay + L * L, *dM = M + L * L;
        #pragma omp for collapse(3)
        for (size_t b = 0; b < B; b++)
        for (size_t k = 0; k < chunks; k++)
        for (size_t h = 0; h < H; h++) {                    // what the chunk's outputs ask of its first state
            size_t row = b * T + k * L, len = smin(L, T - k * L);
            ssd_steps(delta, from_start, to_end, dt + row * H + h, a_log[h], b_dt[h], len, H);
            for (size_t t = 0; t < len; t++)
                for (size_t p = 0; p < P; p++) dyw[t * P + p] = from_start[t] * dy[(row + t) * E + h * P + p];
            matmul(dstates + ((b * (chunks + 1) + k) * H + h) * size, xbc + row * W + E + N, dyw, N, P, len,
                   P, 1, W, P, 1, 0);
        }
        #pragma omp for collapse(2)
        for (size_t b = 0; b < B; b++)
        for (size_t h = 0; h < H; h++) {                    // and what later chunks ask of it
            memset(dstates + ((b * (chunks + 1) + chunks) * H + h) * size, 0, size * sizeof(real));
            for (size_t k = chunks; k-- > 0;) {
                size_t row = b * T + k * L, len = smin(L, T - k * L);
                ssd_steps(delta, from_start, to_end, dt + row * H + h, a_log[h], b_dt[h], len, H);
                real* dS = dstates + ((b * (chunks + 1) + k) * H + h) * size;
                const real* later = dS + H * size;
                for (size_t i = 0; i < size; i++) dS[i] += from_start[len - 1] * later[i];
            }
        }
        #pragma omp for collapse(2)
        for (size_t b = 0; b < B; b++)
        for (size_t k = 0; k < chunks; k++) {
            size_t row = b * T + k * L, len = smin(L, T - k * L);
            const real *Bm = xbc + row * W + E, *Cm = Bm + N;
            real *dB = dxbc + row * W + E, *dC = dB + N;
            for (size_t t = 0; t < len; t++) memset(dB + t * W, 0, 2 * N * sizeof(real));
            memset(dscores, 0, L * L * sizeof(real));
            matmul(scores, Cm, Bm, len, len, N, L, W, 1, 1, W, 0);
            for (size_t h = 0; h < H; h++) {
                const real *x = xbc + row * W + h * P, *dyh = dy + row * E + h * P;
                const real *S = states + ((b * (chunks + 1) + k) * H + h) * size,
                           *dS = dstates + ((b * (chunks + 1) + k + 1) * H + h) * size;
                real A = ssd_steps(delta, from_start, to_end, dt + row * H + h, a_log[h], b_dt[h], len, H);
                ssd_decays(decay, between, delta, A, len, L);
                for (size_t t = 0; t < len; t++) {
                    for (size_t j = 0; j < len; j++) M[t * L + j] = decay[t * L + j] * scores[t * L + j];
                    for (size_t p = 0; p < P; p++) {
                        u[t * P + p] = delta[t] * x[t * W + p];
                        dyw[t * P + p] = from_start[t] * dyh[t * E + p];
                    }
                }
                matmul(wide, dyw, S, len, N, P, N, P, 1, 1, P, 0);                    // from_start_t S dy_t
                for (size_t t = 0; t < len; t++) {
                    real sum = 0;
                    for (size_t n = 0; n < N; n++) {
                        sum += wide[t * N + n] * Cm[t * W + n];
                        dC[t * W + n] += wide[t * N + n];
                    }
                    from_past[t] = sum;
                }
                matmul(du, M, dyh, len, P, len, P, 1, L, E, 1, 0);
                matmul(tmp, Bm, dS, len, P, N, P, W, 1, P, 1, 0);                     // B_j dS'
                for (size_t j = 0; j < len; j++) {
                    real sum = 0;
                    for (size_t p = 0; p < P; p++) {
                        du[j * P + p] += to_end[j] * tmp[j * P + p];
                        sum += to_end[j] * tmp[j * P + p] * u[j * P + p];
                        tmp[j * P + p] = to_end[j] * u[j * P + p];
                    }
                    to_future[j] = sum;
                }
                matmul(dB, tmp, dS, len, N, P, W, P, 1, 1, P, 1);                     // to_end_j dS' u_j
                matmul(dM, dyh, u, len, len, P, L, E, 1, 1, P, 0);
                for (size_t t = 0; t < len; t++)
                    for (size_t j = 0; j <= t; j++) {
                        dscores[t * L + j] += decay[t * L + j] * dM[t * L + j];
                        M[t * L + j] *= dM[t * L + j];
                    }
                real across = 0, past = 0, future = 0;
                for (size_t i = 0; i < size; i++) across += S[i] * dS[i];
                across *= from_start[len - 1];
                memset(columns, 0, len * sizeof(real));
                for (size_t t = len; t-- > 0;) {
                    real inside = 0;
                    for (size_t j = 0; j < t; j++) { columns[j] += M[t * L + j]; inside += columns[j]; }
                    past += from_past[t];
                    da[t] = inside + past + across;
                }
                for (size_t t = 0; t < len; future += to_future[t++]) {
                    real du_x = 0, dy_x = 0, pre = dt[(row + t) * H + h] + b_dt[h];
                    da[t] += future;
                    for (size_t p = 0; p < P; p++) {
                        du_x += du[t * P + p] * x[t * W + p];
                        dy_x += dyh[t * E + p] * x[t * W + p];
                        dxbc[(row + t) * W + h * P + p] = delta[t] * du[t * P + p] + d[h] * dyh[t * E + p];
                    }
                    ddt[(row + t) * H + h] = (du_x + A * da[t]) * sigmoid(pre);
                    row_a[(row + t) * H + h] = delta[t] * A * da[t];
                    row_d[(row + t) * H + h] = dy_x;
                }
            }
            matmul(dC, dscores, Bm, len, N, len, W, L, 1, W, 1, 1);
            matmul(dB, dscores, Cm, len, N, len, W, 1, L, W, 1, 1);
        }
        free(delta);
    }
    sum_rows(da_log, row_a, B * T, H);
    sum_rows(dd, row_d, B * T, H);
    sum_rows(db_dt, ddt, B * T, H);
}

// ----------------------------------------------------------------------------------------------------------------
// fast Fourier transform, and the long convolution made of it. Channels lie beside each other in memory, so one
// transform runs for a vector of them at once: every "number" below is a vector. Two real channels make one complex
// one, so that a block is 2 WIDTH channels.

enum { WIDTH = VECTOR_BYTES / sizeof(real) };
typedef struct { vector re, im; } complex_vector;

// The length for sequences of T: a power of two of at least 2T, so that what a circular convolution wraps around falls
// on zeros, not on the future.
static size_t fft_length(size_t T) {
    size_t N = 2;
    while (N < 2 * T) N *= 2;
    return N;
}

// tw (2N): cos and sin of -2π i/N.
static void fft_twiddles(real* tw, size_t N) {
    #pragma omp parallel for
    for (size_t i = 0; i < N; i++) {
        double angle = -6.283185307179586 * i / N;
        tw[2 * i] = cos(angle);
        tw[2 * i + 1] = sin(angle);
    }
}

// x *= re + i im
static inline void rotate(complex_vector* x, real re, real im) {
    vector old = x->re;
    x->re = old * re - x->im * im;
    x->im = old * im + x->im * re;
}

// X_f = sum_t x_t w^{ft} with w = e^{-2πi/n}, in place. Four sums over quarters of x, with the twiddles w^j, w^2j, w^3j
// put on, are four transforms of a quarter of the length (two steps of the usual halving in one). Frequencies are left
// in bit-reversed order, which products don't mind. tw: of the whole transform, of which this is one `stride`-th.
static void fft_forward(complex_vector* x, size_t n, const real* tw, size_t stride) {
    if (n == 2) {
        complex_vector a = x[0], b = x[1];
        x[0].re = a.re + b.re; x[0].im = a.im + b.im;
        x[1].re = a.re - b.re; x[1].im = a.im - b.im;
    }
    if (n < 4) return;
    size_t q = n / 4;
    for (size_t j = 0; j < q; j++) {
        complex_vector *a = x + j, *b = a + q, *c = b + q, *d = c + q;
        const real *w1 = tw + 2 * j * stride, *w2 = w1 + 2 * j * stride, *w3 = w2 + 2 * j * stride;
        vector sr = a->re + c->re, si = a->im + c->im, tr = b->re + d->re, ti = b->im + d->im;     // a + c, b + d
        vector ur = a->re - c->re, ui = a->im - c->im, vr = b->re - d->re, vi = b->im - d->im;     // a - c, b - d
        a->re = sr + tr; a->im = si + ti;
        b->re = sr - tr; b->im = si - ti;
        c->re = ur + vi; c->im = ui - vr;           // (a - c) - i (b - d)
        d->re = ur - vi; d->im = ui + vr;
        rotate(b, w2[0], w2[1]);
        rotate(c, w1[0], w1[1]);
        rotate(d, w3[0], w3[1]);
    }
    if (q > 1) for (size_t k = 0; k < 4; k++) fft_forward(x + k * q, q, tw, stride * 4);
}

// The way back, step by step, from bit-reversed frequencies: n times the inverse.
static void fft_inverse(complex_vector* x, size_t n, const real* tw, size_t stride) {
    if (n == 2) { fft_forward(x, 2, tw, stride); return; }
    if (n < 4) return;
    size_t q = n / 4;
    if (q > 1) for (size_t k = 0; k < 4; k++) fft_inverse(x + k * q, q, tw, stride * 4);
    for (size_t j = 0; j < q; j++) {
        complex_vector *a = x + j, *b = a + q, *c = b + q, *d = c + q;
        const real *w1 = tw + 2 * j * stride, *w2 = w1 + 2 * j * stride, *w3 = w2 + 2 * j * stride;
        rotate(b, w2[0], -w2[1]);
        rotate(c, w1[0], -w1[1]);
        rotate(d, w3[0], -w3[1]);
        vector sr = a->re + b->re, si = a->im + b->im, tr = a->re - b->re, ti = a->im - b->im;
        vector ur = c->re + d->re, ui = c->im + d->im, vr = c->re - d->re, vi = c->im - d->im;
        a->re = sr + ur; a->im = si + ui;
        c->re = sr - ur; c->im = si - ui;
        b->re = tr - vi; b->im = ti + vr;           // t + i (c - d)
        d->re = tr + vi; d->im = ti - vr;
    }
}

// One pair of frequencies f and -f of the product below, which lie at i and j.
static inline void spectrum_pair(complex_vector* y, const complex_vector* k, const complex_vector* x,
                                 size_t i, size_t j, real scale, real conjugate, int add) {
    vector kar = k[i].re + k[j].re, kai = (k[i].im - k[j].im) * conjugate, kbr = k[i].im + k[j].im,
           kbi = (k[j].re - k[i].re) * conjugate;
    vector xar = x[i].re + x[j].re, xai = x[i].im - x[j].im, xbr = x[i].im + x[j].im, xbi = x[j].re - x[i].re;
    vector ar = (kar * xar - kai * xai) * scale, ai = (kar * xai + kai * xar) * scale;
    vector br = (kbr * xbr - kbi * xbi) * scale, bi = (kbr * xbi + kbi * xbr) * scale;
    y[i].re = add ? y[i].re + ar - bi : ar - bi;
    y[i].im = add ? y[i].im + ai + br : ai + br;
    if (i == j) return;
    y[j].re = add ? y[j].re + ar + bi : ar + bi;
    y[j].im = add ? y[j].im + br - ai : br - ai;
}

// The spectrum of k ∗ x / N (correlate = 0) or of k correlated with x (1: conj K), or += with add, N numbers each. y
// may be x. z = a + i b holds two real channels; since theirs are symmetric, A_f = (Z_f + conj Z_-f) / 2 and
// B_f = (Z_f - conj Z_-f) / 2i; each is multiplied on its own, and Y = A_k A_x + i B_k B_x. In bit-reversed order f and
// -f lie mirrored in each stretch from 2^m to 2^{m+1}: negating a number flips all bits above its lowest 1.
static void spectrum_product(complex_vector* y, const complex_vector* k, const complex_vector* x,
                             size_t N, int correlate, int add) {
    real scale = 0.25 / N, conjugate = correlate ? -1 : 1;
    spectrum_pair(y, k, x, 0, 0, scale, conjugate, add);
    spectrum_pair(y, k, x, 1, 1, scale, conjugate, add);
    for (size_t m = 2; m < N; m *= 2)
        for (size_t r = 0; r < m / 2; r++) spectrum_pair(y, k, x, m + r, 2 * m - 1 - r, scale, conjugate, add);
}

// out (N) = the spectrum of channels c0 .. c0 + 2 WIDTH - 1 of x (T,C), followed by N - T zeros.
// Channels past C are zero.
static void spectrum_of(complex_vector* out, const real* x, const real* tw, size_t N, size_t T, size_t C, size_t c0) {
    size_t n = smin(2 * WIDTH, C - c0);
    memset(out, 0, N * sizeof *out);
    for (size_t t = 0; t < smin(T, N); t++) memcpy(out + t, x + t * C + c0, n * sizeof(real));     // re, then im
    fft_forward(out, N, tw, 1);
}

// How many numbers each thread allocates for spectra of N in long_conv_forward,
// or with train = 1 in long_conv_backward.
static size_t long_conv_thread_work(size_t N, int train) { return (train ? 4 : 2) * N * 2 * WIDTH; }

// c[t] = sum_{s <= t} k[t-s] p[s] + d p[t] for every sequence and channel: c, p (B,T,C), k (T,C), d (C). N >= 2T and
// its twiddles tw (2N). Cost T log T, and N numbers of memory a channel.
static void long_conv_forward(real* c, const real* p, const real* k, const real* d, const real* tw,
                              size_t N, size_t B, size_t T, size_t C) {
    #pragma omp parallel
    {
        complex_vector* K = (complex_vector*)allocate(long_conv_thread_work(N, 0) * sizeof(real), "a long convolution");
        complex_vector* X = K + N;
        #pragma omp for
        for (size_t c0 = 0; c0 < C; c0 += 2 * WIDTH) {
            size_t n = smin(2 * WIDTH, C - c0);
            spectrum_of(K, k, tw, N, T, C, c0);
            for (size_t b = 0; b < B; b++) {
                const real* from = p + b * T * C + c0;
                real* to = c + b * T * C + c0;
                spectrum_of(X, p + b * T * C, tw, N, T, C, c0);
                spectrum_product(X, K, X, N, 0, 0);
                fft_inverse(X, N, tw, 1);
                for (size_t t = 0; t < T; t++) {
                    const real* x = (const real*)(X + t);
                    for (size_t q = 0; q < n; q++) to[t * C + q] = x[q] + d[c0 + q] * from[t * C + q];
                }
            }
        }
        free(K);
    }
}

// dp[s] = sum_{t >= s} k[t-s] dc[t] + d dc[s],   dk[r] = sum over b, t of p[t-r] dc[t]: both are correlations.
// dd = sum p dc.  dp (B,T,C), dk (T,C) are written, dd is added to.
static void long_conv_backward(real* dp, real* dk, real* dd, const real* dc, const real* p, const real* k,
                               const real* d, const real* tw, size_t N, size_t B, size_t T, size_t C) {
    #pragma omp parallel
    {
        complex_vector* K = (complex_vector*)allocate(long_conv_thread_work(N, 1) * sizeof(real), "a long convolution");
        complex_vector *P = K + N, *G = P + N, *dK = G + N;
        #pragma omp for
        for (size_t c0 = 0; c0 < C; c0 += 2 * WIDTH) {
            size_t n = smin(2 * WIDTH, C - c0);
            real sum[2 * WIDTH] = {0};
            spectrum_of(K, k, tw, N, T, C, c0);
            for (size_t b = 0; b < B; b++) {
                const real *pb = p + b * T * C, *dcb = dc + b * T * C;
                real* to = dp + b * T * C + c0;
                spectrum_of(P, pb, tw, N, T, C, c0);
                spectrum_of(G, dcb, tw, N, T, C, c0);
                spectrum_product(dK, P, G, N, 1, b > 0);
                spectrum_product(G, K, G, N, 1, 0);
                fft_inverse(G, N, tw, 1);
                for (size_t t = 0; t < T; t++) {
                    const real* g = (const real*)(G + t);
                    for (size_t q = 0; q < n; q++) {
                        to[t * C + q] = g[q] + d[c0 + q] * dcb[t * C + c0 + q];
                        sum[q] += pb[t * C + c0 + q] * dcb[t * C + c0 + q];
                    }
                }
            }
            fft_inverse(dK, N, tw, 1);
            for (size_t t = 0; t < T; t++) memcpy(dk + t * C + c0, dK + t, n * sizeof(real));
            for (size_t q = 0; q < n; q++) dd[c0 + q] += sum[q];
        }
        free(K);
    }
}

// out = sin(freq x) over rows of x (rows,F), freq (F)
static void sine_forward(real* out, const real* x, const real* freq, size_t rows, size_t F) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t f = 0; f < F; f++) out[r * F + f] = sin(freq[f] * x[r * F + f]);
}

// d' = d cos(freq x);  dfreq += sum d' x,  dx = d' freq.  d is dout on entry and dx on return.
static void sine_backward(real* d, real* dfreq, const real* x, const real* freq, size_t rows, size_t F) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t f = 0; f < F; f++) d[r * F + f] *= cos(freq[f] * x[r * F + f]);
    #pragma omp parallel for
    for (size_t f0 = 0; f0 < F; f0 += BLOCK)
        for (size_t r = 0; r < rows; r++)
            for (size_t f = f0; f < smin(F, f0 + BLOCK); f++) {
                dfreq[f] += d[r * F + f] * x[r * F + f];
                d[r * F + f] *= freq[f];
            }
}

// k = m e^{-time |δ|} in place: m (rows,C), the filter of tokens first, first+1, ... Time runs from 0 to 1 over the S
// tokens of training; |δ| goes linearly over the channels from ln(100)/1.5 to ln(100)/0.3, so that the
// fastest channel is down to a hundredth after 0.3 S tokens and the slowest would be after 1.5 S. Its own backward.
static void filter_window(real* k, size_t first, size_t rows, size_t S, size_t C) {
    const double slow = 4.605170185988092 / 1.5, fast = 4.605170185988092 / 0.3;
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        double time = (double)(first + r) / (S > 1 ? S - 1 : 1);
        for (size_t c = 0; c < C; c++)
            k[r * C + c] *= fast_exp(-time * (C > 1 ? slow + (fast - slow) * c / (C - 1) : slow));
    }
}

// z (rows,emb) = [time, cos(2π f i/S) of each band f, -sin of each] of tokens i = first, first+1, ..., for (emb-1)/2
// bands f spread evenly from 1e-4 to their number less 1.
static void filter_positions(real* z, size_t first, size_t rows, size_t S, size_t emb) {
    size_t bands = (emb - 1) / 2;
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        z[r * emb] = (double)(first + r) / (S > 1 ? S - 1 : 1);
        for (size_t k = 0; k < bands; k++) {
            double f = bands > 1 ? 1e-4 + (bands - 1 - 1e-4) * k / (bands - 1) : 1e-4;
            double angle = 6.283185307179586 * f * (first + r) / S;
            z[r * emb + 1 + k] = cos(angle);
            z[r * emb + 1 + bands + k] = -sin(angle);
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------
// the mixers: what lets a token see those before it. Each is written as if it were the only one: its parameters, what
// its forward pass keeps, forward, backward. x, out (B*T, C); x has been normalised;
// the residual stream is the block's.

enum { TRANSFORMER, MAMBA, MAMBA2, HYENA };
enum { ROPE, LEARNED, NO_POSITIONS };
enum { RMS, LAYER };
enum { SWIGLU, GELU, NO_MLP };
enum { SOFTMAX, LINEAR };
enum { GPT2, SPREAD };

typedef struct {
    int vocab, channels, layers;        // V, C, N
    int model;                          // TRANSFORMER, MAMBA, MAMBA2, HYENA
    int seq;                            // S: how many learned positions there are, how long Hyena's filter is
    int tie;                            // 1: the head is wte
    int weights;                        // first weights: GPT2 or SPREAD (see params_layout)
    int norm, post_norm;                // RMS or LAYER; 1: after the residual sum instead of before the mixer
    int mlp, ff;                        // SWIGLU, GELU or NO_MLP, and its width
    int heads, kv_heads, bias;          // H, G <= H; 1: attention has biases
    int pos, attention;                 // ROPE, LEARNED or NO_POSITIONS; SOFTMAX or LINEAR
    int window, block;                  // see first_key; 0: no such limit
    int d_state, expand, conv;          // mamba, mamba2: N, d_in / C, width of the convolution
    int head_dim, chunk;                // mamba2: channels of a head; both: tokens between two kept states
    int emb;                            // hyena: numbers that the filter's MLP gets to know of a position
    int stateful;                       // always 0: here each row starts anew (train_harmonic.c can go on with a state)
} Config;

// A table of named tensors inside one allocation. The table of parameters drives initialisation, AdamW, checkpoints,
// gradient checks and --plan; the activations have one too, so that a NaN can be traced to where it first stands.
// Beyond train_harmonic.c's four kinds of first weights:
//     LOG_INDEX    log(n + 1) along each row: decays e^-Δ, e^-2Δ, ... (Mamba's A_log)
//     LOG_UNIFORM  the logarithm of a number from U(1, scale) (Mamba-2's A_log)
//     STEP_BIAS    b with softplus(b) log-uniform in [0.001, 0.1]: steps that remember 10 to 1000 tokens
enum { NONE, NORMAL, UNIFORM, CONSTANT, LOG_INDEX, LOG_UNIFORM, STEP_BIAS };
static const char* const init_names[] = {"", "N(0, s)", "U(+-a)", "constant", "log(n+1)", "log U(1,a)", "steps"};
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

// The initial value of number k of a tensor: what model_init calls.
static double initial_value(const Tensor* t, size_t k, uint64_t* rng) {
    switch (t->init) {
    case NORMAL: return t->scale * rng_normal(rng);
    case UNIFORM: return t->scale * (2 * rng_uniform(rng) - 1);
    case LOG_INDEX: return log((double)(k % t->shape[1] + 1));
    case LOG_UNIFORM: return log(1 + (t->scale - 1) * rng_uniform(rng));
    case STEP_BIAS: {
        double step = exp(log(0.001) + rng_uniform(rng) * (log(0.1) - log(0.001)));
        return step + log(-expm1(-step));               // softplus backwards
    }
    default: return t->scale;
    }
}

// A tensor of two dimensions that is not a matrix: no weight decay.
static real* no_decay(Table* t, real* x) {
    t->tensors[t->count - 1].decay = 0;
    return x;
}

// The first weights of a linear layer. GPT2: N(0, .02), and `shrink` times that where the layer ends a residual branch,
// biases 0. SPREAD: U(±fan_in^-½), biases too (PyTorch's own).
static real* take_linear(Table* t, real* base, const Config* c, size_t out, size_t in,
                         double shrink, const char* name, int n) {
    return c->weights == GPT2 ? take(t, base, out, in, NORMAL, 0.02 * shrink, name, n)
           : take(t, base, out, in, UNIFORM, 1 / sqrt((double)in), name, n);
}
static real* take_bias(Table* t, real* base, const Config* c, size_t out, size_t in, const char* name, int n) {
    return c->weights == GPT2 ? take(t, base, out, 0, CONSTANT, 0, name, n)
           : take(t, base, out, 0, UNIFORM, 1 / sqrt((double)in), name, n);
}

// ----------------------------------------------------------------------------------------------------------------
// attention, as linear layers around it

typedef struct { real *wqkv, *bqkv, *wo, *bo; } AttnParams;     // (W,C), (W), (C,C), (C); the biases only with --bias

static void attn_params(AttnParams* p, Table* t, real* base, const Config* c, int n) {
    size_t C = c->channels, W = C + 2 * C / c->heads * c->kv_heads;
    p->wqkv = take_linear(t, base, c, W, C, 1, "block%d.wqkv", n);
    if (c->bias) p->bqkv = take_bias(t, base, c, W, C, "block%d.bqkv", n);
    p->wo = take_linear(t, base, c, C, C, 1 / sqrt(2.0 * c->layers), "block%d.wo", n);
    if (c->bias) p->bo = take_bias(t, base, c, C, C, "block%d.bo", n);
}

typedef struct {
    real *qkv;                          // (R,W), rotated where there is RoPE
    real *out, *lse;                    // (R,C), (R,H): the heads' outputs; log sums (linear: the sums)
    real *state;                        // (B,G,D+1,D): linear attention's sums; carried in a model of one token,
                                        //      else scratch
    real *cache;                        // (room, 2GD): keys and values of a text so far. Only in a model of one token,
    size_t room;                        //              and grown with it, but never past the window or block
    real *dqkv, *dout, *delta;          // scratch for the backward pass, one for all layers, like rope
    real *rope;                         // (T,D)
    const size_t* past;                 // tokens before the first of this batch
} AttnActs;

static void attn_acts(AttnActs* a, const AttnActs* first, Table* t, real* base, Table* states, real* state_base,
                      const Config* c, int n, size_t B, size_t T, int train) {
    size_t C = c->channels, H = c->heads, G = c->kv_heads, D = C / H, R = B * T, W = C + 2 * G * D;
    a->qkv = take(t, base, R, W, NONE, 0, "block%d.qkv", n);
    a->out = take(t, base, R, C, NONE, 0, "block%d.heads", n);
    a->lse = take(t, base, R, H, NONE, 0, "block%d.lse", n);
    if (a != first) {
        a->rope = first->rope;
        a->dqkv = first->dqkv;
        a->dout = first->dout;
        a->delta = first->delta;
        a->state = first->state;
    } else {
        if (c->pos == ROPE) a->rope = take(t, base, T, D, NONE, 0, "rope");
        if (train) {
            a->dqkv = take(t, base, R, W, NONE, 0, "dqkv");
            a->dout = take(t, base, R, C, NONE, 0, "dheads");
            a->delta = take(t, base, R, H, NONE, 0, "delta");
        }
        if (c->attention == LINEAR && !states) a->state = take(t, base, B, G * (D + 1) * D, NONE, 0, "sums");
    }
    if (c->attention == LINEAR && states)
        a->state = take(states, state_base, B, G * (D + 1) * D, NONE, 0, "block%d.sums", n);
}

// How many numbers the keys and values [k | v] of one token are, in one block.
static size_t cache_width(const Config* c) { return 2 * (size_t)(c->channels / c->heads) * c->kv_heads; }

// Room for one more token's keys and values. A dense model must keep all of them: that is what generation costs it.
static real* attn_cache(AttnActs* a, const Config* c, size_t t, size_t width) {
    size_t limit = c->window, block = c->block;
    if (block && (!limit || block < limit)) limit = block;
    if (t >= a->room && (!limit || a->room < limit)) {
        size_t room = a->room ? 2 * a->room : 64;
        if (limit && room > limit) room = limit;
        a->cache = (real*)realloc(a->cache, room * width * sizeof(real));
        if (!a->cache) die("not enough memory for the keys and values of %zu tokens", room);
        a->room = room;
    }
    return a->cache + t % a->room * width;
}

static void attn_forward(real* out, const real* x, AttnActs* a, const AttnParams* p,
                         const Config* c, size_t B, size_t T, int carry) {
    size_t C = c->channels, H = c->heads, G = c->kv_heads, D = C / H, R = B * T, W = C + 2 * G * D, past = *a->past;
    linear_forward(a->qkv, x, p->wqkv, p->bqkv, R, C, W, C, 0);
    if (c->pos == ROPE) rope(a->qkv, a->rope, 1, B, T, W, H + G, D);
    if (c->attention == LINEAR) {
        if (!carry) memset(a->state, 0, B * G * (D + 1) * D * sizeof(real));
        linear_attention_forward(a->out, a->lse, a->state, a->qkv, B, T, H, G, D);
    } else if (carry) {
        memcpy(attn_cache(a, c, past, cache_width(c)), a->qkv + C, cache_width(c) * sizeof(real));
        attention_step(a->out, a->qkv, a->cache, a->room, past, first_key(past, c->window, c->block), H, G, D);
    } else {
        attention_forward(a->out, a->lse, a->qkv, c->window, c->block, B, T, H, G, D);
    }
    linear_forward(out, a->out, p->wo, p->bo, R, C, C, C, 0);
}

static void attn_backward(real* dx, AttnParams* g, const real* dout, const real* x, AttnActs* a, const AttnParams* p,
                          const Config* c, size_t B, size_t T) {
    size_t C = c->channels, H = c->heads, G = c->kv_heads, D = C / H, R = B * T, W = C + 2 * G * D;
    memset(a->dout, 0, R * C * sizeof(real));
    linear_backward(a->dout, g->wo, g->bo, dout, a->out, p->wo, R, C, C, C);
    if (c->attention == LINEAR)
        linear_attention_backward(a->dqkv, a->state, a->dout, a->out, a->lse, a->qkv, B, T, H, G, D);
    else attention_backward(a->dqkv, a->delta, a->dout, a->out, a->lse, a->qkv, c->window, c->block, B, T, H, G, D);
    if (c->pos == ROPE) rope(a->dqkv, a->rope, -1, B, T, W, H + G, D);
    linear_backward(dx, g->wqkv, g->bqkv, a->dqkv, x, p->wqkv, R, C, W, C);
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba (arXiv 2312.00752). E = expand C channels inside, N = d_state, K = conv:
//     [x | z] = W_in u            xs = silu(conv(x))             [δ | B | C] = W_x xs           dt = W_dt δ
//     y = scan(xs, dt, B, C)      out = W_out (y silu(z))
// One-token steps carry h (N numbers a channel) and the last K-1 inputs of the convolution.

typedef struct { real *w_in, *conv_w, *conv_b, *w_x, *w_dt, *b_dt, *a_log, *d, *w_out; } MambaParams;
typedef struct {
    real *xs, *u;                       // (R,E): silu(pre); y silu(z)
    real *dy, *dz, *dxs, *ddt;          // (R,E), only for training, like the rest
    real *ddelta, *dbc, *work;          // (R,rank), (R,2N), scan_work
} MambaScratch;                         // what one layer at a time needs: shared by all
typedef struct {
    real *x, *z;                        // (R,E): what W_in makes
    real *pre;                          // (R,E): conv(x), before silu
    real *delta, *bc;                   // (R,rank), (R,2N): what W_x makes: δ, and B and C
    real *dt;                           // (R,E): steps before bias and softplus
    real *y;                            // (R,E)
    real *starts;                       // (B,chunks,N,E): states before each chunk
    real *state, *window;               // carried: (B,N,E), (B,K-1,E)
    MambaScratch s;
} MambaActs;

static size_t mamba_rank(const Config* c) { return (c->channels + 15) / 16; }

// Tokens in a chunk. 0, the default, takes sqrt(T) or 64: then all the states kept are N sqrt(T) numbers a channel,
// less than the tokens' own activations whatever T.
static size_t mamba_chunk(const Config* c, size_t T) {
    size_t L = c->chunk;
    if (!L) for (L = 64; L * L < T; L++) ;
    return smin(L, T);
}

// Initial values: linear and convolution weights U(±fan_in^-½), the output's divided by sqrt(layers), since every layer
// adds to the residual stream; steps and decays as listed above; D = 1.
static void mamba_params(MambaParams* p, Table* t, real* base, const Config* c, int n) {
    size_t C = c->channels, E = c->expand * C, N = c->d_state, K = c->conv, rank = mamba_rank(c);
    double bound_e = 1 / sqrt((double)E), bound_k = 1 / sqrt((double)K);
    p->w_in   = take(t, base, 2 * E, C,        UNIFORM, 1 / sqrt((double)C), "block%d.w_in", n);
    p->conv_w = no_decay(t, take(t, base, E, K, UNIFORM, bound_k, "block%d.conv_w", n));
    p->conv_b = take(t, base, E, 0,            UNIFORM, bound_k, "block%d.conv_b", n);
    p->w_x    = take(t, base, rank + 2 * N, E, UNIFORM, bound_e, "block%d.w_x", n);
    p->w_dt   = take(t, base, E, rank,         UNIFORM, 1 / sqrt((double)rank), "block%d.w_dt", n);
    p->b_dt   = take(t, base, E, 0,            STEP_BIAS, 0, "block%d.b_dt", n);
    p->a_log  = no_decay(t, take(t, base, E, N, LOG_INDEX, 0, "block%d.a_log", n));
    p->d      = take(t, base, E, 0,            CONSTANT, 1, "block%d.d", n);
    p->w_out  = take(t, base, C, E,            UNIFORM, bound_e / sqrt((double)c->layers), "block%d.w_out", n);
}

static void mamba_scratch(MambaScratch* s, Table* t, real* base, const Config* c, size_t B, size_t T, int train) {
    size_t R = B * T, E = c->expand * c->channels, N = c->d_state;
    s->xs = take(t, base, R, E, NONE, 0, "xs");
    s->u  = take(t, base, R, E, NONE, 0, "u");
    if (!train) return;
    s->dy     = take(t, base, R, E, NONE, 0, "dy_scan");
    s->dz     = take(t, base, R, E, NONE, 0, "dz");
    s->dxs    = take(t, base, R, E, NONE, 0, "dxs");
    s->ddt    = take(t, base, R, E, NONE, 0, "ddt");
    s->ddelta = take(t, base, R, mamba_rank(c), NONE, 0, "ddelta");
    s->dbc    = take(t, base, R, 2 * N, NONE, 0, "dbc");
    s->work   = take(t, base, scan_work(mamba_chunk(c, T), B, E, N), 0, NONE, 0, "scan_work");
}

// first is layer 0. states == NULL: nothing is carried.
static void mamba_acts(MambaActs* a, const MambaActs* first, Table* t, real* base, Table* states, real* state_base,
                       const Config* c, int n, size_t B, size_t T, int train) {
    size_t R = B * T, E = c->expand * c->channels, N = c->d_state;
    a->x      = take(t, base, R, E, NONE, 0, "block%d.x", n);
    a->z      = take(t, base, R, E, NONE, 0, "block%d.z", n);
    a->pre    = take(t, base, R, E, NONE, 0, "block%d.pre", n);
    a->delta  = take(t, base, R, mamba_rank(c), NONE, 0, "block%d.delta", n);
    a->bc     = take(t, base, R, 2 * N, NONE, 0, "block%d.bc", n);
    a->dt     = take(t, base, R, E, NONE, 0, "block%d.dt", n);
    a->y      = take(t, base, R, E, NONE, 0, "block%d.y", n);
    a->starts = take(t, base, B * num_chunks(T, mamba_chunk(c, T)), N * E, NONE, 0, "block%d.starts", n);
    if (a == first) mamba_scratch(&a->s, t, base, c, B, T, train); else a->s = first->s;
    if (!states) return;
    a->state  = take(states, state_base, B, N * E, NONE, 0, "block%d.state", n);
    a->window = take(states, state_base, B, (c->conv - 1) * E, NONE, 0, "block%d.window", n);
}

// out (R,C) from x (R,C). With carry, it starts from what the last call left, and leaves its own.
static void mamba_forward(real* out, const real* x, MambaActs* a, const MambaParams* p,
                          const Config* c, size_t B, size_t T, int carry) {
    const MambaScratch* s = &a->s;
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, rank = mamba_rank(c);
    linear_forward(a->x, x, p->w_in, NULL, R, C, E, C, 0);
    linear_forward(a->z, x, p->w_in + E * C, NULL, R, C, E, C, 0);
    short_conv_forward(a->pre, a->x, p->conv_w, p->conv_b, carry ? a->window : NULL, B, T, E, c->conv);
    silu_forward(s->xs, a->pre, R, E);
    linear_forward(a->delta, s->xs, p->w_x, NULL, R, E, rank, E, 0);
    linear_forward(a->bc, s->xs, p->w_x + rank * E, NULL, R, E, 2 * N, E, 0);
    linear_forward(a->dt, a->delta, p->w_dt, NULL, R, rank, E, rank, 0);
    selective_scan_forward(a->y, a->starts, s->xs, a->dt, a->bc, p->a_log, p->b_dt, p->d, carry ? a->state : NULL,
                           mamba_chunk(c, T), B, T, E, N);
    swiglu_forward(s->u, a->z, a->y, R, E);
    linear_forward(out, s->u, p->w_out, NULL, R, E, C, E, 0);
}

// The lines of mamba_forward, last one first. x is what went in. dx (R,C) and g are added to.
static void mamba_backward(real* dx, MambaParams* g, const real* dout, const real* x, MambaActs* a,
                           const MambaParams* p, const Config* c, size_t B, size_t T) {
    const MambaScratch* s = &a->s;
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, rank = mamba_rank(c);
    silu_forward(s->xs, a->pre, R, E);                                  // again, instead of keeping them
    swiglu_forward(s->u, a->z, a->y, R, E);
    memset(s->dz, 0, R * E * sizeof(real));
    linear_backward(s->dz, g->w_out, NULL, dout, s->u, p->w_out, R, E, C, E);
    swiglu_backward(s->dz, s->dy, a->z, a->y, R, E);                    // dz was du so far
    selective_scan_backward(s->dxs, s->ddt, s->dbc, g->a_log, g->b_dt, g->d, s->dy, s->xs, a->dt, a->bc, a->starts,
                            p->a_log, p->b_dt, p->d, s->work, mamba_chunk(c, T), B, T, E, N);
    memset(s->ddelta, 0, R * rank * sizeof(real));
    linear_backward(s->ddelta, g->w_dt, NULL, s->ddt, a->delta, p->w_dt, R, rank, E, rank);
    linear_backward(s->dxs, g->w_x, NULL, s->ddelta, s->xs, p->w_x, R, E, rank, E);
    linear_backward(s->dxs, g->w_x + rank * E, NULL, s->dbc, s->xs, p->w_x + rank * E, R, E, 2 * N, E);
    silu_backward(s->dxs, a->pre, R, E);
    // dy is dx of W_in's x
    short_conv_backward(s->dy, g->conv_w, g->conv_b, s->dxs, a->x, p->conv_w, B, T, E, c->conv);
    linear_backward(dx, g->w_in, NULL, s->dy, x, p->w_in, R, C, E, C);
    linear_backward(dx, g->w_in + E * C, NULL, s->dz, x, p->w_in + E * C, R, C, E, C);
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba-2 (arXiv 2405.21060). E = expand C, H = E / P heads of P = head_dim channels, N = d_state, K = conv:
//     [z | x B C | dt] = W_in u         [x | B | C] = silu(conv([x | B | C]))         y = ssd(x, dt, B, C)
//     out = W_out RMSNorm(y silu(z))
// One-token steps carry S (N P numbers a head) and the last K-1 inputs of the convolution.

typedef struct { real *w_in, *conv_w, *conv_b, *b_dt, *a_log, *d, *norm_w, *w_out; } Mamba2Params;
typedef struct {
    real *act;                          // (R,E+2N): silu(pre)
    real *v, *nv;                       // (R,E): y silu(z); RMSNorm of it
    real *dnv, *dz, *dy;                // (R,E), only for training, like the rest
    real *dact, *dxbc, *ddt, *work;     // (R,E+2N), (R,E+2N), (R,H), ssd_work
} Mamba2Scratch;                        // what one layer at a time needs: shared by all
typedef struct {
    real *z;                            // (R,E)
    real *xbc, *pre;                    // (R,E+2N): x, B, C beside each other; conv of them, before silu
    real *dt;                           // (R,H): steps before bias and softplus
    real *y, *rstd;                     // (R,E), (R)
    real *states;                       // (B,chunks+1,H,N,P): before each chunk, and at the end
    real *state, *window;               // carried: (B,H,N,P), (B,K-1,E+2N)
    Mamba2Scratch s;
} Mamba2Acts;

// Tokens in a chunk: 0 takes 64, where the products inside a chunk and those with its state cost about the same. A
// thread needs five times (L,L) numbers, so there is a limit.
static size_t mamba2_chunk(const Config* c, size_t T) { return smin(c->chunk ? c->chunk : 64, smin(T, 1024)); }

static size_t mamba2_heads(const Config* c) { return (size_t)c->expand * c->channels / c->head_dim; }

// Initial values as Mamba's, but -A from U(1,16) for each head.
static void mamba2_params(Mamba2Params* p, Table* t, real* base, const Config* c, int n) {
    size_t C = c->channels, E = c->expand * C, N = c->d_state, K = c->conv, H = mamba2_heads(c), W = E + 2 * N;
    double bound_k = 1 / sqrt((double)K);
    p->w_in   = take(t, base, E + W + H, C, UNIFORM, 1 / sqrt((double)C), "block%d.w_in", n);
    p->conv_w = no_decay(t, take(t, base, W, K, UNIFORM, bound_k, "block%d.conv_w", n));
    p->conv_b = take(t, base, W, 0, UNIFORM, bound_k, "block%d.conv_b", n);
    p->b_dt   = take(t, base, H, 0, STEP_BIAS, 0, "block%d.b_dt", n);
    p->a_log  = take(t, base, H, 0, LOG_UNIFORM, 16, "block%d.a_log", n);
    p->d      = take(t, base, H, 0, CONSTANT, 1, "block%d.d", n);
    p->norm_w = take(t, base, E, 0, CONSTANT, 1, "block%d.gate_norm_w", n);
    p->w_out  = take(t, base, C, E, UNIFORM, 1 / sqrt((double)E * c->layers), "block%d.w_out", n);
}

static void mamba2_scratch(Mamba2Scratch* s, Table* t, real* base, const Config* c, size_t B, size_t T, int train) {
    size_t R = B * T, E = c->expand * c->channels, N = c->d_state, W = E + 2 * N, H = mamba2_heads(c);
    s->act = take(t, base, R, W, NONE, 0, "act");
    s->v   = take(t, base, R, E, NONE, 0, "v");
    s->nv  = take(t, base, R, E, NONE, 0, "nv");
    if (!train) return;
    s->dy   = take(t, base, R, E, NONE, 0, "dy_scan");
    s->dnv  = take(t, base, R, E, NONE, 0, "dnv");
    s->dz   = take(t, base, R, E, NONE, 0, "dz");
    s->dact = take(t, base, R, W, NONE, 0, "dact");
    s->dxbc = take(t, base, R, W, NONE, 0, "dxbc");
    s->ddt  = take(t, base, R, H, NONE, 0, "ddt");
    s->work = take(t, base, ssd_work(mamba2_chunk(c, T), B, T, H, c->head_dim, N), 0, NONE, 0, "ssd_work");
}

// first is layer 0. states == NULL: nothing is carried.
static void mamba2_acts(Mamba2Acts* a, const Mamba2Acts* first, Table* t, real* base, Table* states, real* state_base,
                        const Config* c, int n, size_t B, size_t T, int train) {
    size_t R = B * T, E = c->expand * c->channels, N = c->d_state, W = E + 2 * N, H = mamba2_heads(c);
    a->z      = take(t, base, R, E, NONE, 0, "block%d.z", n);
    a->xbc    = take(t, base, R, W, NONE, 0, "block%d.xbc", n);
    a->pre    = take(t, base, R, W, NONE, 0, "block%d.pre", n);
    a->dt     = take(t, base, R, H, NONE, 0, "block%d.dt", n);
    a->y      = take(t, base, R, E, NONE, 0, "block%d.y", n);
    a->rstd   = take(t, base, R, 0, NONE, 0, "block%d.rstd", n);
    a->states = take(t, base, B * (num_chunks(T, mamba2_chunk(c, T)) + 1), N * E, NONE, 0, "block%d.states", n);
    if (a == first) mamba2_scratch(&a->s, t, base, c, B, T, train); else a->s = first->s;
    if (!states) return;
    a->state  = take(states, state_base, B, N * E, NONE, 0, "block%d.state", n);
    a->window = take(states, state_base, B, (c->conv - 1) * W, NONE, 0, "block%d.window", n);
}

// out (R,C) from x (R,C). With carry, it starts from what the last call left, and leaves its own.
static void mamba2_forward(real* out, const real* x, Mamba2Acts* a, const Mamba2Params* p,
                           const Config* c, size_t B, size_t T, int carry) {
    const Mamba2Scratch* s = &a->s;
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, W = E + 2 * N, H = mamba2_heads(c);
    linear_forward(a->z, x, p->w_in, NULL, R, C, E, C, 0);
    linear_forward(a->xbc, x, p->w_in + E * C, NULL, R, C, W, C, 0);
    linear_forward(a->dt, x, p->w_in + (E + W) * C, NULL, R, C, H, C, 0);
    short_conv_forward(a->pre, a->xbc, p->conv_w, p->conv_b, carry ? a->window : NULL, B, T, W, c->conv);
    silu_forward(s->act, a->pre, R, W);
    ssd_forward(a->y, a->states, s->act, a->dt, p->a_log, p->b_dt, p->d, carry ? a->state : NULL, mamba2_chunk(c, T), B,
                T, H, c->head_dim, N);
    swiglu_forward(s->v, a->z, a->y, R, E);
    rmsnorm_forward(s->nv, a->rstd, s->v, p->norm_w, R, E);
    linear_forward(out, s->nv, p->w_out, NULL, R, E, C, E, 0);
}

// The lines of mamba2_forward, last one first. x is what went in. dx (R,C) and g are added to.
static void mamba2_backward(real* dx, Mamba2Params* g, const real* dout, const real* x, Mamba2Acts* a,
                            const Mamba2Params* p, const Config* c, size_t B, size_t T) {
    const Mamba2Scratch* s = &a->s;
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, W = E + 2 * N, H = mamba2_heads(c);
    silu_forward(s->act, a->pre, R, W);                                 // again, instead of keeping them
    swiglu_forward(s->v, a->z, a->y, R, E);
    rmsnorm_forward(s->nv, a->rstd, s->v, p->norm_w, R, E);
    memset(s->dnv, 0, R * E * sizeof(real));
    linear_backward(s->dnv, g->w_out, NULL, dout, s->nv, p->w_out, R, E, C, E);
    memset(s->dz, 0, R * E * sizeof(real));
    rmsnorm_backward(s->dz, g->norm_w, s->dnv, s->v, a->rstd, p->norm_w, R, E);
    swiglu_backward(s->dz, s->dy, a->z, a->y, R, E);                    // dz was dv so far
    ssd_backward(s->dact, s->ddt, g->a_log, g->b_dt, g->d, s->dy, a->states, s->act, a->dt, p->a_log,
                 p->b_dt, p->d, s->work, mamba2_chunk(c, T), B, T, H, c->head_dim, N);
    silu_backward(s->dact, a->pre, R, W);
    short_conv_backward(s->dxbc, g->conv_w, g->conv_b, s->dact, a->xbc, p->conv_w, B, T, W, c->conv);
    linear_backward(dx, g->w_in, NULL, s->dz, x, p->w_in, R, C, E, C);
    linear_backward(dx, g->w_in + E * C, NULL, s->dxbc, x, p->w_in + E * C, R, C, W, C);
    linear_backward(dx, g->w_in + (E + W) * C, NULL, s->ddt, x, p->w_in + (E + W) * C, R, C, H, C);
}

// ----------------------------------------------------------------------------------------------------------------
// Hyena of order 2 (arXiv 2302.10866). A convolution as long as the text, whose kernel k (S,C) is computed by a small
// network from the position; S = seq, the trained length. F = 64:
//     [x0 | x1 | v] = conv3(W_in u + b_in)       p = x1 v       c = k ∗ p + D p       out = W_out (x0 c) + b_out
//     k = window(W4 sin(f (W3 sin(f (W2 sin(f (W1 z + b1)) + b2)) + b3))),    z from the position (filter_positions)
// One-token steps carry every p so far and the kernel's rows, one more each step: O(t C) a token. There is no kernel
// beyond S, so that is where a text has to end.

enum { HYENA_CONV = 3, FILTER = 64 };
typedef struct {
    real *w_in, *b_in, *conv_w, *conv_b, *w1, *b1, *w2, *b2, *w3, *b3, *w4, *freq, *d, *w_out, *b_out;
} HyenaParams;
typedef struct {
    real *p, *g;                        // (R,C): x1 v; x0 c
    real *s, *tw;                       // (T,F): a sine; twiddles (2 fft_length(T))
    real *dg, *dc, *dp;                 // (R,C), only for training, like the rest
    real *dv, *du;                      // (R,3C)
    real *dk, *ds, *dh;                 // (T,C), (T,F), (T,F)
} HyenaScratch;                         // what one layer at a time needs: shared by all
typedef struct {
    real *u, *v;                        // (R,3C): W_in's output; the short convolution's: x0, x1, v beside each other
    real *c;                            // (R,C): the long convolution's
    real *z, *h1, *h2, *h3, *k;         // (T,emb), (T,F) before each sine, (T,C)
    real *window, *inputs, *kernel;     // carried: (1,2,3C), (1,S,C), (1,S,C): every p and every row of k so far
    const size_t* past;                 // how many those are
    HyenaScratch s;
} HyenaActs;

// Initial values: linear and convolution weights and biases U(±fan_in^-½), frequencies 1, D from N(0,1).
static void hyena_params(HyenaParams* p, Table* t, real* base, const Config* c, int n) {
    size_t C = c->channels, emb = c->emb, F = FILTER;
    double bound_c = 1 / sqrt((double)C), bound_k = 1 / sqrt((double)HYENA_CONV), bound_e = 1 / sqrt((double)emb),
           bound_f = 1 / sqrt((double)F);
    p->w_in   = take(t, base, 3 * C, C, UNIFORM, bound_c, "block%d.w_in", n);
    p->b_in   = take(t, base, 3 * C, 0, UNIFORM, bound_c, "block%d.b_in", n);
    p->conv_w = no_decay(t, take(t, base, 3 * C, HYENA_CONV, UNIFORM, bound_k, "block%d.conv_w", n));
    p->conv_b = take(t, base, 3 * C, 0, UNIFORM, bound_k, "block%d.conv_b", n);
    p->w1     = take(t, base, F, emb,   UNIFORM, bound_e, "block%d.filter_w1", n);
    p->b1     = take(t, base, F, 0,     UNIFORM, bound_e, "block%d.filter_b1", n);
    p->w2     = take(t, base, F, F,     UNIFORM, bound_f, "block%d.filter_w2", n);
    p->b2     = take(t, base, F, 0,     UNIFORM, bound_f, "block%d.filter_b2", n);
    p->w3     = take(t, base, F, F,     UNIFORM, bound_f, "block%d.filter_w3", n);
    p->b3     = take(t, base, F, 0,     UNIFORM, bound_f, "block%d.filter_b3", n);
    p->w4     = take(t, base, C, F,     UNIFORM, bound_f, "block%d.filter_w4", n);
    p->freq   = take(t, base, F, 0,     CONSTANT, 1, "block%d.filter_freq", n);
    p->d      = take(t, base, C, 0,     NORMAL, 1, "block%d.d", n);
    p->w_out  = take(t, base, C, C,     UNIFORM, bound_c, "block%d.w_out", n);
    p->b_out  = take(t, base, C, 0,     UNIFORM, bound_c, "block%d.b_out", n);
}

static void hyena_scratch(HyenaScratch* s, Table* t, real* base, const Config* c, size_t B, size_t T, int train) {
    size_t R = B * T, C = c->channels;
    s->p  = take(t, base, R, C, NONE, 0, "p");
    s->g  = take(t, base, R, C, NONE, 0, "g");
    s->s  = take(t, base, T, FILTER, NONE, 0, "filter_s");
    s->tw = take(t, base, 2 * fft_length(T), 0, NONE, 0, "twiddles");
    if (!train) return;
    s->dg = take(t, base, R, C, NONE, 0, "dg");
    s->dc = take(t, base, R, C, NONE, 0, "dc");
    s->dp = take(t, base, R, C, NONE, 0, "dp");
    s->dv = take(t, base, R, 3 * C, NONE, 0, "dv");
    s->du = take(t, base, R, 3 * C, NONE, 0, "du");
    s->dk = take(t, base, T, C, NONE, 0, "dk");
    s->ds = take(t, base, T, FILTER, NONE, 0, "filter_ds");
    s->dh = take(t, base, T, FILTER, NONE, 0, "filter_dh");
}

// first is layer 0. states == NULL: nothing is carried.
static void hyena_acts(HyenaActs* a, const HyenaActs* first, Table* t, real* base, Table* states, real* state_base,
                       const Config* c, int n, size_t B, size_t T, int train) {
    size_t R = B * T, C = c->channels, S = c->seq;
    a->u  = take(t, base, R, 3 * C, NONE, 0, "block%d.u", n);
    a->v  = take(t, base, R, 3 * C, NONE, 0, "block%d.v", n);
    a->c  = take(t, base, R, C, NONE, 0, "block%d.c", n);
    a->z  = take(t, base, T, c->emb, NONE, 0, "block%d.filter_z", n);
    a->h1 = take(t, base, T, FILTER, NONE, 0, "block%d.filter_h1", n);
    a->h2 = take(t, base, T, FILTER, NONE, 0, "block%d.filter_h2", n);
    a->h3 = take(t, base, T, FILTER, NONE, 0, "block%d.filter_h3", n);
    a->k  = take(t, base, T, C, NONE, 0, "block%d.k", n);
    if (a == first) hyena_scratch(&a->s, t, base, c, B, T, train); else a->s = first->s;
    if (!states) return;
    a->window = take(states, state_base, B, (HYENA_CONV - 1) * 3 * C, NONE, 0, "block%d.window", n);
    a->inputs = take(states, state_base, B, S * C, NONE, 0, "block%d.inputs", n);
    a->kernel = take(states, state_base, B, S * C, NONE, 0, "block%d.kernel", n);
}

// a->k (rows,C): the kernel for distances first, first+1, ...
static void hyena_filter_forward(HyenaActs* a, const HyenaParams* p, const Config* c, size_t first, size_t rows) {
    const HyenaScratch* s = &a->s;
    size_t C = c->channels, emb = c->emb, F = FILTER;
    filter_positions(a->z, first, rows, c->seq, emb);
    linear_forward(a->h1, a->z, p->w1, p->b1, rows, emb, F, emb, 0);
    sine_forward(s->s, a->h1, p->freq, rows, F);
    linear_forward(a->h2, s->s, p->w2, p->b2, rows, F, F, F, 0);
    sine_forward(s->s, a->h2, p->freq, rows, F);
    linear_forward(a->h3, s->s, p->w3, p->b3, rows, F, F, F, 0);
    sine_forward(s->s, a->h3, p->freq, rows, F);
    linear_forward(a->k, s->s, p->w4, NULL, rows, F, C, F, 0);
    filter_window(a->k, first, rows, c->seq, C);
}

// The lines of hyena_filter_forward for all T distances, last one first. s->dk comes in and is used up; g is added to.
static void hyena_filter_backward(HyenaParams* g, HyenaActs* a, const HyenaParams* p, const Config* c, size_t T) {
    const HyenaScratch* s = &a->s;
    size_t F = FILTER, bytes = T * F * sizeof(real);
    filter_window(s->dk, 0, T, c->seq, c->channels);
    sine_forward(s->s, a->h3, p->freq, T, F);
    memset(s->ds, 0, bytes);
    linear_backward(s->ds, g->w4, NULL, s->dk, s->s, p->w4, T, F, c->channels, F);
    sine_backward(s->ds, g->freq, a->h3, p->freq, T, F);
    sine_forward(s->s, a->h2, p->freq, T, F);
    memset(s->dh, 0, bytes);
    linear_backward(s->dh, g->w3, g->b3, s->ds, s->s, p->w3, T, F, F, F);
    sine_backward(s->dh, g->freq, a->h2, p->freq, T, F);
    sine_forward(s->s, a->h1, p->freq, T, F);
    memset(s->ds, 0, bytes);
    linear_backward(s->ds, g->w2, g->b2, s->dh, s->s, p->w2, T, F, F, F);
    sine_backward(s->ds, g->freq, a->h1, p->freq, T, F);
    linear_backward(NULL, g->w1, g->b1, s->ds, a->z, p->w1, T, c->emb, F, c->emb);
}

// c (1,C) = k ∗ p + D p of one more token, by the sum itself:
// of all p so far and the kernel, which grows by a row a token.
static void hyena_step(HyenaActs* a, const HyenaParams* p, const Config* c) {
    size_t C = c->channels, now = *a->past;
    if (now >= (size_t)c->seq)
        die("hyena has no kernel beyond the %d tokens it was made for: end the text there", c->seq);
    hyena_filter_forward(a, p, c, now, 1);
    memcpy(a->kernel + now * C, a->k, C * sizeof(real));
    memcpy(a->inputs + now * C, a->s.p, C * sizeof(real));
    #pragma omp parallel for if (now * C > 50000)
    for (size_t c0 = 0; c0 < C; c0 += BLOCK) {
        size_t n = smin(BLOCK, C - c0);
        real sum[BLOCK];
        for (size_t i = 0; i < n; i++) sum[i] = p->d[c0 + i] * a->s.p[c0 + i];
        for (size_t t = 0; t <= now; t++)
            for (size_t i = 0; i < n; i++) sum[i] += a->kernel[(now - t) * C + c0 + i] * a->inputs[t * C + c0 + i];
        memcpy(a->c + c0, sum, n * sizeof(real));
    }
}

// out (R,C) from x (R,C). T <= seq. With carry (B = T = 1), it goes on from the tokens before.
static void hyena_forward(real* out, const real* x, HyenaActs* a, const HyenaParams* p,
                          const Config* c, size_t B, size_t T, int carry) {
    const HyenaScratch* s = &a->s;
    size_t R = B * T, C = c->channels;
    linear_forward(a->u, x, p->w_in, p->b_in, R, C, 3 * C, C, 0);
    short_conv_forward(a->v, a->u, p->conv_w, p->conv_b, carry ? a->window : NULL, B, T, 3 * C, HYENA_CONV);
    #pragma omp parallel for
    for (size_t r = 0; r < R; r++)
        for (size_t i = 0; i < C; i++) s->p[r * C + i] = a->v[r * 3 * C + C + i] * a->v[r * 3 * C + 2 * C + i];
    if (carry) {
        hyena_step(a, p, c);
    } else {
        hyena_filter_forward(a, p, c, 0, T);
        fft_twiddles(s->tw, fft_length(T));
        long_conv_forward(a->c, s->p, a->k, p->d, s->tw, fft_length(T), B, T, C);
    }
    #pragma omp parallel for
    for (size_t r = 0; r < R; r++)
        for (size_t i = 0; i < C; i++) s->g[r * C + i] = a->v[r * 3 * C + i] * a->c[r * C + i];
    linear_forward(out, s->g, p->w_out, p->b_out, R, C, C, C, 0);
}

// The lines of hyena_forward, last one first:  dx0 = c dg,  dc = x0 dg,  dx1 = v dp,  dv = x1 dp. x is what went in.
// dx (R,C) and g are added to.
static void hyena_backward(real* dx, HyenaParams* g, const real* dout, const real* x, HyenaActs* a,
                           const HyenaParams* p, const Config* c, size_t B, size_t T) {
    const HyenaScratch* s = &a->s;
    size_t R = B * T, C = c->channels;
    #pragma omp parallel for
    for (size_t r = 0; r < R; r++)
        for (size_t i = 0; i < C; i++) {
            const real* v = a->v + r * 3 * C + i;
            s->p[r * C + i] = v[C] * v[2 * C];
            s->g[r * C + i] = v[0] * a->c[r * C + i];
        }
    memset(s->dg, 0, R * C * sizeof(real));
    linear_backward(s->dg, g->w_out, g->b_out, dout, s->g, p->w_out, R, C, C, C);
    #pragma omp parallel for
    for (size_t r = 0; r < R; r++)
        for (size_t i = 0; i < C; i++) {
            s->dv[r * 3 * C + i] = a->c[r * C + i] * s->dg[r * C + i];
            s->dc[r * C + i] = a->v[r * 3 * C + i] * s->dg[r * C + i];
        }
    fft_twiddles(s->tw, fft_length(T));
    long_conv_backward(s->dp, s->dk, g->d, s->dc, s->p, a->k, p->d, s->tw, fft_length(T), B, T, C);
    hyena_filter_backward(g, a, p, c, T);
    #pragma omp parallel for
    for (size_t r = 0; r < R; r++)
        for (size_t i = 0; i < C; i++) {
            const real* v = a->v + r * 3 * C + i;
            s->dv[r * 3 * C + C + i] = v[2 * C] * s->dp[r * C + i];
            s->dv[r * 3 * C + 2 * C + i] = v[C] * s->dp[r * C + i];
        }
    short_conv_backward(s->du, g->conv_w, g->conv_b, s->dv, a->u, p->conv_w, B, T, 3 * C, HYENA_CONV);
    linear_backward(dx, g->w_in, g->b_in, s->du, x, p->w_in, R, C, 3 * C, C);
}

// ----------------------------------------------------------------------------------------------------------------
// the model: parameters, activations

typedef struct {
    real *norm1_w, *norm1_b, *norm2_w, *norm2_b;        // (C); biases only of LayerNorm, norm2 only with an MLP
    real *wgate, *wup, *bup, *wdown, *bdown;            // (ff,C), (ff,C), (ff), (C,ff), (C): SwiGLU has the gate,
                                                        //      GELU the biases
    AttnParams attn;                                    // one of these
    MambaParams mamba;
    Mamba2Params mamba2;
    HyenaParams hyena;
} BlockParams;
typedef struct { real *wte, *wpe, *head, *normf_w, *normf_b; BlockParams* block; } Params;      // tied: head == wte

// Lays the parameters (or their gradients: the same shapes) out at base. First weights: SPREAD draws the embedding from
// N(0,1) and linear layers from U(±fan_in^-½), as the Harmonic paper's Transformer did; GPT2 draws all from N(0, .02),
// the ends of residual branches shrunk by (2N)^-½.
// Mamba and Hyena are SPREAD but for the embedding, N(0, .02), which a tied head needs too.
static void params_layout(Params* p, Table* t, real* base, const Config* c) {
    size_t V = c->vocab, C = c->channels, F = c->ff;
    int spread = c->model == TRANSFORMER && c->weights == SPREAD, layer = c->norm == LAYER;
    double shrink = 1 / sqrt(2.0 * c->layers);
    p->wte = take(t, base, V, C, NORMAL, spread && !c->tie ? 1 : 0.02, "wte");
    if (c->model == TRANSFORMER && c->pos == LEARNED) p->wpe = take(t, base, c->seq, C, NORMAL, 0.02, "wpe");
    for (int n = 0; n < c->layers; n++) {
        BlockParams* b = &p->block[n];
        b->norm1_w = take(t, base, C, 0, CONSTANT, 1, "block%d.norm1_w", n);
        if (layer) b->norm1_b = take(t, base, C, 0, CONSTANT, 0, "block%d.norm1_b", n);
        if (c->model == TRANSFORMER) attn_params(&b->attn, t, base, c, n);
        if (c->model == MAMBA) mamba_params(&b->mamba, t, base, c, n);
        if (c->model == MAMBA2) mamba2_params(&b->mamba2, t, base, c, n);
        if (c->model == HYENA) hyena_params(&b->hyena, t, base, c, n);
        if (c->mlp == NO_MLP) continue;
        b->norm2_w = take(t, base, C, 0, CONSTANT, 1, "block%d.norm2_w", n);
        if (layer) b->norm2_b = take(t, base, C, 0, CONSTANT, 0, "block%d.norm2_b", n);
        if (c->mlp == SWIGLU) b->wgate = take_linear(t, base, c, F, C, 1, "block%d.wgate", n);
        b->wup = take_linear(t, base, c, F, C, 1, "block%d.wup", n);
        if (c->mlp == GELU) b->bup = take_bias(t, base, c, F, C, "block%d.bup", n);
        b->wdown = take_linear(t, base, c, C, F, shrink, "block%d.wdown", n);
        if (c->mlp == GELU) b->bdown = take_bias(t, base, c, C, F, "block%d.bdown", n);
    }
    if (!c->post_norm) p->normf_w = take(t, base, C, 0, CONSTANT, 1, "normf_w");
    if (!c->post_norm && layer) p->normf_b = take(t, base, C, 0, CONSTANT, 0, "normf_b");
    p->head = c->tie ? p->wte : take_linear(t, base, c, V, C, 1, "head", 0);
}

// What a forward pass leaves behind for the backward pass; R = B*T rows.
typedef struct {
    real *x;                            // (R,C): what enters the block
    real *n1, *n1_mean, *n1_rstd;       // (R,C), (R), (R): the first norm's output (mean: LayerNorm only)
    real *mid;                          // (R,C): x + mixer
    real *n2, *n2_mean, *n2_rstd;       // the second norm's output; post-norm: its input, n1 + mlp
    real *gate, *up;                    // (R,ff): the MLP before its nonlinearity
    AttnActs attn;
    MambaActs mamba;
    Mamba2Acts mamba2;
    HyenaActs hyena;
} BlockActs;
typedef struct {
    int B, T;
    size_t past;                        // tokens before the first: 0, or in generation the length of the text so far
    Table table, states;                // states: what model_step carries on, (1,...) each
    real *memory, *state_memory;
    BlockActs* block;
    real *out, *y, *y_mean, *y_rstd;    // (R,C): what leaves the last block; its norm (post-norm: y is out itself)
    real *u;                            // (R,ff) scratch: the MLP's hidden layer
    real *logits;                       // (min(R, HEAD_ROWS), V) scratch
    real *dy, *dx, *dn, *du, *dup;      // (R,C), (R,C), (R,C), (R,ff), (R,ff) gradients, only for training
} Acts;

// Lays a's tensors out at base and its carried states at state_base (NULL, NULL: only measures).
static void acts_layout(Acts* a, real* base, real* state_base, const Config* c, int train) {
    size_t V = c->vocab, C = c->channels, F = c->ff, B = a->B, T = a->T, R = B * T;
    int layer = c->norm == LAYER;
    Table *t = &a->table, *states = R == 1 && !train ? &a->states : NULL;       // generation takes one token at a time
    t->count = a->states.count = 0;
    t->total = a->states.total = 0;
    if (((c->model == TRANSFORMER && c->pos == LEARNED) || c->model == HYENA) && T > (size_t)c->seq)
        die("a model with %d positions cannot read %zu tokens at a time: give --seq %d, or train one with --context %zu",
            c->seq, T, c->seq, T);
    for (int n = 0; n < c->layers; n++) {
        BlockActs *b = &a->block[n], *first = &a->block[0];
        b->x = take(t, base, R, C, NONE, 0, "block%d.in", n);
        b->n1 = take(t, base, R, C, NONE, 0, "block%d.n1", n);
        if (layer) b->n1_mean = take(t, base, R, 0, NONE, 0, "block%d.n1_mean", n);
        b->n1_rstd = take(t, base, R, 0, NONE, 0, "block%d.n1_rstd", n);
        if (c->model == TRANSFORMER) attn_acts(&b->attn, &first->attn, t, base, states, state_base, c, n, B, T, train);
        if (c->model == MAMBA) mamba_acts(&b->mamba, &first->mamba, t, base, states, state_base, c, n, B, T, train);
        if (c->model == MAMBA2) mamba2_acts(&b->mamba2, &first->mamba2, t, base, states, state_base, c, n, B, T, train);
        if (c->model == HYENA) hyena_acts(&b->hyena, &first->hyena, t, base, states, state_base, c, n, B, T, train);
        b->attn.past = b->hyena.past = &a->past;
        if (c->mlp == NO_MLP) continue;
        b->mid = take(t, base, R, C, NONE, 0, "block%d.mid", n);
        b->n2 = take(t, base, R, C, NONE, 0, "block%d.n2", n);
        if (layer) b->n2_mean = take(t, base, R, 0, NONE, 0, "block%d.n2_mean", n);
        b->n2_rstd = take(t, base, R, 0, NONE, 0, "block%d.n2_rstd", n);
        if (c->mlp == SWIGLU) b->gate = take(t, base, R, F, NONE, 0, "block%d.gate", n);
        b->up = take(t, base, R, F, NONE, 0, "block%d.up", n);
    }
    a->y = a->out = take(t, base, R, C, NONE, 0, "out");
    if (!c->post_norm) {
        a->y = take(t, base, R, C, NONE, 0, "y");
        if (layer) a->y_mean = take(t, base, R, 0, NONE, 0, "y_mean");
        a->y_rstd = take(t, base, R, 0, NONE, 0, "y_rstd");
    }
    if (c->mlp != NO_MLP) a->u = take(t, base, R, F, NONE, 0, "u");
    a->logits = take(t, base, smin(R, HEAD_ROWS), V, NONE, 0, "logits");
    if (!train) return;
    a->dy = take(t, base, R, C, NONE, 0, "dy");
    a->dx = c->post_norm ? a->dy : take(t, base, R, C, NONE, 0, "dx");
    a->dn = take(t, base, R, C, NONE, 0, "dn");
    if (c->mlp != NO_MLP) a->du = take(t, base, R, F, NONE, 0, "du");
    if (c->mlp == SWIGLU) a->dup = take(t, base, R, F, NONE, 0, "dup");
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
    for (int n = 0; n < m->config.layers; n++) free(m->step.block[n].attn.cache);
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

// Bytes that each thread takes for itself while it works, beyond what model_build allocates.
static size_t thread_bytes(const Model* m) {
    const Config* c = &m->config;
    size_t work = 0, T = m->T;
    if (c->model == MAMBA && m->train) work = scan_thread_work(mamba_chunk(c, T));
    if (c->model == MAMBA2) work = ssd_thread_work(mamba2_chunk(c, T), c->head_dim, c->d_state, m->train);
    if (c->model == HYENA) work = long_conv_thread_work(fft_length(T), m->train);
    return work * sizeof(real);
}

// Bytes that every token of a generated text leaves behind: its keys and values in all blocks.
static size_t token_bytes(const Model* m) {
    const Config* c = &m->config;
    return c->model == TRANSFORMER && c->attention == SOFTMAX ? c->layers * cache_width(c) * sizeof(real) : 0;
}

// Number of parameters.
static size_t model_parameters(const Model* m) {
    size_t n = 0;
    for (int i = 0; i < m->table.count; i++) n += m->table.tensors[i].size;
    return n;
}

// Multiply-adds x 2 x 3 (forward, and two products backward) of all matrix products per token: those with weights, and
// those of the mixers at this model's T. (Attention's backward pass computes q·k and do·v twice more;
// that is not counted.)
static double model_flops_per_token(const Model* m) {
    const Config* c = &m->config;
    double C = c->channels, n = c->tie ? 0 : -(double)c->vocab * C;          // looking wte up costs nothing
    if (c->model == TRANSFORMER && c->pos == LEARNED) n -= (double)c->seq * C;
    for (int i = 0; i < m->table.count; i++) {
        const Tensor* t = &m->table.tensors[i];
        // what does not decay is no matrix: A_log, filters
        if (t->ndim == 2 && t->decay) n += t->size;
    }
    double seen = 0;                    // keys that a query sees, on average
    for (int t = 0; t < m->T; t++) seen += (double)(t + 1 - first_key(t, c->window, c->block)) / m->T;
    if (c->model == TRANSFORMER) n += c->layers * 2 * C * (c->attention == LINEAR ? C / c->heads : seen);
    // inside a chunk: C·B once, and for each head; with its state: reading and adding up
    if (c->model == MAMBA2) {
        double E = (double)c->expand * C, N = c->d_state, L = mamba2_chunk(c, m->T);
        n += c->layers * (L * N + L * E + 2 * E * N);
    }
    if (c->model == HYENA) {            // a row of the filter serves all sequences of the batch
        double F = FILTER;
        n -= c->layers * (F * c->emb + 2 * F * F + F * C) * (1 - 1.0 / m->B);
    }
    return 6 * n;
}

// Draws the initial weights, tensor after tensor in the table's order, in double and rounded once.
static void model_init(Model* m, uint64_t seed) {
    for (int i = 0; i < m->table.count; i++) {
        const Tensor* t = &m->table.tensors[i];
        real* p = m->param_memory + t->offset;
        for (size_t k = 0; k < t->size; k++) p[k] = initial_value(t, k, &seed);
    }
}

// ----------------------------------------------------------------------------------------------------------------
// the model: forward and backward. R = B*T rows throughout.

static void norm_forward(real* out, real* mean, real* rstd, const real* x, const real* w, const real* b,
                         const Config* c, size_t R) {
    if (c->norm == LAYER) layernorm_forward(out, mean, rstd, x, w, b, R, c->channels);
    else rmsnorm_forward(out, rstd, x, w, R, c->channels);
}

// dx, dw, db are added to.
static void norm_backward(real* dx, real* dw, real* db, const real* dout, const real* x, const real* mean,
                          const real* rstd, const real* w, const Config* c, size_t R) {
    if (c->norm == LAYER) layernorm_backward(dx, dw, db, dout, x, mean, rstd, w, R, c->channels);
    else rmsnorm_backward(dx, dw, dout, x, rstd, w, R, c->channels);
}

// SwiGLU:  out = Wdown (silu(Wgate x) ⊙ Wup x)        GELU:  out = Wdown gelu(Wup x + bup) + bdown        u (R,ff)
static void mlp_forward(real* out, real* u, BlockActs* a, const real* x, const BlockParams* p,
                        const Config* c, size_t R) {
    size_t C = c->channels, F = c->ff;
    linear_forward(a->up, x, p->wup, p->bup, R, C, F, C, 0);
    if (c->mlp == SWIGLU) {
        linear_forward(a->gate, x, p->wgate, NULL, R, C, F, C, 0);
        swiglu_forward(u, a->gate, a->up, R, F);
    } else {
        gelu_forward(u, a->up, R, F);
    }
    linear_forward(out, u, p->wdown, p->bdown, R, F, C, F, 0);
}

// dx and the gradients g are added to. u is computed again instead of being kept.
static void mlp_backward(real* dx, BlockParams* g, const real* dout, BlockActs* a, const real* x, const BlockParams* p,
                         Acts* scratch, const Config* c, size_t R) {
    size_t C = c->channels, F = c->ff;
    real *u = scratch->u, *du = scratch->du, *dup = scratch->dup;
    if (c->mlp == SWIGLU) swiglu_forward(u, a->gate, a->up, R, F);
    else gelu_forward(u, a->up, R, F);
    memset(du, 0, R * F * sizeof(real));
    linear_backward(du, g->wdown, g->bdown, dout, u, p->wdown, R, F, C, F);
    if (c->mlp == SWIGLU) {
        swiglu_backward(du, dup, a->gate, a->up, R, F);         // du is dgate from here on
        linear_backward(dx, g->wgate, NULL, du, x, p->wgate, R, C, F, C);
        linear_backward(dx, g->wup, NULL, dup, x, p->wup, R, C, F, C);
    } else {
        gelu_backward(du, a->up, R, F);                         // du is dup
        linear_backward(dx, g->wup, g->bup, du, x, p->wup, R, C, F, C);
    }
}

static void mixer_forward(real* out, const real* x, BlockActs* a, const BlockParams* p,
                          const Config* c, size_t B, size_t T, int carry) {
    if (c->model == TRANSFORMER) attn_forward(out, x, &a->attn, &p->attn, c, B, T, carry);
    if (c->model == MAMBA) mamba_forward(out, x, &a->mamba, &p->mamba, c, B, T, carry);
    if (c->model == MAMBA2) mamba2_forward(out, x, &a->mamba2, &p->mamba2, c, B, T, carry);
    if (c->model == HYENA) hyena_forward(out, x, &a->hyena, &p->hyena, c, B, T, carry);
}

static void mixer_backward(real* dx, BlockParams* g, const real* dout, const real* x, BlockActs* a,
                           const BlockParams* p, const Config* c, size_t B, size_t T) {
    if (c->model == TRANSFORMER) attn_backward(dx, &g->attn, dout, x, &a->attn, &p->attn, c, B, T);
    if (c->model == MAMBA) mamba_backward(dx, &g->mamba, dout, x, &a->mamba, &p->mamba, c, B, T);
    if (c->model == MAMBA2) mamba2_backward(dx, &g->mamba2, dout, x, &a->mamba2, &p->mamba2, c, B, T);
    if (c->model == HYENA) hyena_backward(dx, &g->hyena, dout, x, &a->hyena, &p->hyena, c, B, T);
}

// One block; out (R,C).
//     pre-norm     mid = x + mixer(norm1(x))       out = mid + mlp(norm2(mid))         no MLP: out = mid
//     post-norm    n1 = norm1(x + mixer(x))        out = norm2(n1 + mlp(n1))
static void layer_forward(real* out, BlockActs* a, const BlockParams* p, real* u,
                          const Config* c, size_t B, size_t T, int carry) {
    size_t C = c->channels, R = B * T;
    real* mid = c->mlp == NO_MLP ? out : a->mid;
    if (c->post_norm) {
        mixer_forward(mid, a->x, a, p, c, B, T, carry);
        add(mid, mid, a->x, R, C);
        norm_forward(a->n1, a->n1_mean, a->n1_rstd, mid, p->norm1_w, p->norm1_b, c, R);
        mlp_forward(a->n2, u, a, a->n1, p, c, R);
        add(a->n2, a->n2, a->n1, R, C);
        norm_forward(out, a->n2_mean, a->n2_rstd, a->n2, p->norm2_w, p->norm2_b, c, R);
        return;
    }
    norm_forward(a->n1, a->n1_mean, a->n1_rstd, a->x, p->norm1_w, p->norm1_b, c, R);
    mixer_forward(mid, a->n1, a, p, c, B, T, carry);
    add(mid, mid, a->x, R, C);
    if (c->mlp == NO_MLP) return;
    norm_forward(a->n2, a->n2_mean, a->n2_rstd, mid, p->norm2_w, p->norm2_b, c, R);
    mlp_forward(out, u, a, a->n2, p, c, R);
    add(out, out, mid, R, C);
}

// The lines of layer_forward, last one first. d (R,C) is dout on entry and dx on return: it stands for the residual
// stream, to which every branch adds its share. dn (R,C) is scratch.
static void layer_backward(real* d, BlockParams* g, BlockActs* a, const BlockParams* p, Acts* scratch,
                           const Config* c, size_t B, size_t T) {
    size_t C = c->channels, R = B * T, bytes = R * C * sizeof(real);
    real* dn = scratch->dn;
    memset(dn, 0, bytes);
    if (c->post_norm) {
        norm_backward(dn, g->norm2_w, g->norm2_b, d, a->n2, a->n2_mean, a->n2_rstd, p->norm2_w, c, R);
        memcpy(d, dn, bytes);
        mlp_backward(d, g, dn, a, a->n1, p, scratch, c, R);
        memset(dn, 0, bytes);
        norm_backward(dn, g->norm1_w, g->norm1_b, d, a->mid, a->n1_mean, a->n1_rstd, p->norm1_w, c, R);
        memcpy(d, dn, bytes);
        mixer_backward(d, g, dn, a->x, a, p, c, B, T);
        return;
    }
    if (c->mlp != NO_MLP) {
        mlp_backward(dn, g, d, a, a->n2, p, scratch, c, R);
        norm_backward(d, g->norm2_w, g->norm2_b, dn, a->mid, a->n2_mean, a->n2_rstd, p->norm2_w, c, R);
        memset(dn, 0, bytes);
    }
    mixer_backward(dn, g, d, a->n1, a, p, c, B, T);
    norm_backward(d, g->norm1_w, g->norm1_b, dn, a->x, a->n1_mean, a->n1_rstd, p->norm1_w, c, R);
}

// tokens (B,T) -> a->y (B,T,C). With carry, one token (T = 1) goes on from what the last call left.
static void acts_forward(Acts* a, const Params* p, const Config* c, const int* tokens, int carry) {
    size_t B = a->B, T = a->T, C = c->channels, R = B * T;
    embedding_forward(a->block[0].x, tokens, p->wte, 1, R, C);
    if (p->wpe) positions_forward(a->block[0].x, p->wpe, a->past, B, T, C);
    if (c->model == TRANSFORMER && c->pos == ROPE) rope_table(a->block[0].attn.rope, a->past, T, C / c->heads);
    for (int n = 0; n < c->layers; n++)
        layer_forward(n + 1 < c->layers ? a->block[n + 1].x : a->out, &a->block[n], &p->block[n], a->u, c, B, T, carry);
    if (!c->post_norm) norm_forward(a->y, a->y_mean, a->y_rstd, a->out, p->normf_w, p->normf_b, c, R);
    if (carry) a->past++;
}

// Mean loss in nats of tokens (B,T) against targets (B,T); targets of -1 do not count. train = 1 also runs the head's
// backward (head_loss does both at once); train = 0 touches no gradient. Tokens must lie in [0, V).
static double model_forward(Model* m, const int* tokens, const int* targets, int train) {
    Acts* a = &m->acts;
    acts_forward(a, &m->p, &m->config, tokens, 0);
    m->tokens = tokens;
    return head_loss(train ? a->dy : NULL, train ? m->g.head : NULL, a->y, m->p.head, targets, a->logits, m->grad_scale,
                     (size_t)m->B * m->T, m->config.channels, m->config.vocab, &m->counted, &m->correct);
}

// The rest of the backward pass, after model_forward(..., 1). Adds to the gradients.
static void model_backward(Model* m) {
    Acts* a = &m->acts;
    const Config* c = &m->config;
    size_t C = c->channels, R = (size_t)m->B * m->T;
    if (!c->post_norm) {                // post-norm: dx is dy
        memset(a->dx, 0, R * C * sizeof(real));
        norm_backward(a->dx, m->g.normf_w, m->g.normf_b, a->dy, a->out, a->y_mean, a->y_rstd, m->p.normf_w, c, R);
    }
    for (int n = c->layers - 1; n >= 0; n--)
        layer_backward(a->dx, &m->g.block[n], &a->block[n], &m->p.block[n], a, c, m->B, m->T);
    if (m->p.wpe) positions_backward(m->g.wpe, a->dx, m->B, m->T, C);
    embedding_backward(m->g.wte, m->tokens, a->dx, 1, R, C);
}

static void model_zero_grad(Model* m) { memset(m->grad_memory, 0, m->table.total * sizeof(real)); }

// out (n,V) = logits of rows row .. row+n-1 of the last model_forward.
static void model_logits(Model* m, size_t row, size_t n, real* out) {
    linear_forward(out, m->acts.y + row * m->config.channels, m->p.head, NULL, n, m->config.channels, m->config.vocab,
                   m->config.channels, 0);
}

// Zeroes carried states: all of them, or those of the streams b with reset[b] (NULL: all). What a cache of keys holds
// is passed over from then on.
static void model_reset(Acts* a, const int* reset) {
    for (int i = 0; i < a->states.count; i++) {
        const Tensor* t = &a->states.tensors[i];
        size_t width = t->size / t->shape[0];
        for (int b = 0; b < a->B; b++)
            if (!reset || reset[b]) memset(a->state_memory + t->offset + b * width, 0, width * sizeof(real));
    }
    a->past = 0;
}

// One token, for generation: the same forward with B = T = 1, from what is carried on: keys and values of all tokens
// that can still be seen (attention), a state of fixed size (linear attention, Mamba), all inputs (Hyena). Returns the
// logits (V) of what comes next, or NULL where the model has no more positions.
// model_reset(&m->step, NULL) starts a new text.
static const real* model_step(Model* m, int token) {
    const Config* c = &m->config;
    if ((m->p.wpe || c->model == HYENA) && m->step.past == (size_t)c->seq) return NULL;
    acts_forward(&m->step, &m->p, c, &token, 1);
    linear_forward(m->step.logits, m->step.y, m->p.head, NULL, 1, c->channels, c->vocab, c->channels, 0);
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
    {"layers",       'i', 'M', &opt.config.layers, 1, 1000, "N", "4", "blocks", 0},
    {"tie",          'b', 'M', &opt.config.tie, 0, 0, "", "", "use the embedding as the head", 0},
    {"model",        'e', 'M', &opt.config.model, 0, 0, "transformer|mamba|mamba2|hyena", "transformer", "the mixer", 0},
    {"context",      'i', 'M', &opt.config.seq, 0, 1 << 30, "N", "0", "learned positions, Hyena's filter length; 0: --seq", 0},
    {"heads",        'i', 'M', &opt.config.heads, 1, 1 << 16, "N", "4", "query heads", 0},
    {"kv-heads",     'i', 'M', &opt.config.kv_heads, 0, 1 << 16, "N", "0", "heads of keys and values; 0: as many", 0},
    {"bias",         'b', 'M', &opt.config.bias, 0, 0, "", "", "attention with biases", 0},
    {"pos",          'e', 'M', &opt.config.pos, 0, 0, "rope|learned|none", "rope", "positions", 0},
    {"attention",    'e', 'M', &opt.config.attention, 0, 0, "softmax|linear", "softmax", "e^(q·k), or phi(q)·phi(k)", 0},
    {"window",       'i', 'M', &opt.config.window, 0, 1 << 30, "N", "0", "see the last N tokens; 0: all", 0},
    {"block",        'i', 'M', &opt.config.block, 0, 1 << 30, "N", "0", "see within blocks of N tokens; 0: all", 0},
    {"norm",         'e', 'M', &opt.config.norm, 0, 0, "rms|layer", "rms", "RMSNorm or LayerNorm", 0},
    {"post-norm",    'b', 'M', &opt.config.post_norm, 0, 0, "", "", "normalise after the residual sum", 0},
    {"mlp",          'e', 'M', &opt.config.mlp, 0, 0, "swiglu|gelu|none", "swiglu", "the layer after the mixer", 0},
    {"ff",           'i', 'M', &opt.config.ff, 0, 1 << 18, "N", "0", "its width; 0: 4C, SwiGLU 8C/3 up to a multiple of 16", 0},
    {"weights",      'e', 'M', &opt.config.weights, 0, 0, "gpt2|spread", "gpt2", "first weights: N(0,.02), or N(0,1) and U(±in^-½)", 0},
    {"d-state",      'i', 'M', &opt.config.d_state, 0, MAX_STATE, "N", "0", "mamba, mamba2: state; 0: 16, 128", 0},
    {"expand",       'i', 'M', &opt.config.expand, 1, 16, "N", "2", "mamba, mamba2: inner channels, in C", 0},
    {"conv",         'i', 'M', &opt.config.conv, 2, MAX_CONV, "N", "4", "mamba, mamba2: width of the convolution", 0},
    {"head-dim",     'i', 'M', &opt.config.head_dim, 1, 1024, "N", "64", "mamba2: channels of a head", 0},
    {"chunk",        'i', 'M', &opt.config.chunk, 0, 1 << 16, "N", "0", "mamba, mamba2: tokens between kept states; 0: sqrt(T), 64", 0},
    {"emb",          'i', 'M', &opt.config.emb, 3, 1023, "N", "3", "hyena: numbers that describe a position (odd)", 0},
};

// Sizes of published models [their batch x seq; learning rates are our choice], and small ones for a laptop.
static const Preset presets[] = {
    {"harmonic-tf",    "--model transformer --vocab 50257 --channels 256 --layers 4 --heads 4 --pos none "
                       "--norm layer --post-norm --mlp gelu --weights spread --batch 16 --seq 1024 --steps 4000",
                       "the Harmonic paper's Transformer: 28,886,528 parameters"},
    {"harmonic-mamba", "--model mamba --vocab 50257 --channels 256 --layers 5 --batch 16 --seq 1024 --steps 4000",
                       "its Mamba, as near as depth allows: 27,921,920 parameters (published: 28,100,608)"},
    {"llama",          "--model transformer --vocab 50257 --channels 256 --layers 4 --heads 4 --batch 16 --seq 1024 "
                       "--steps 4000",
                       "the fair Transformer at that size: RoPE, RMSNorm, SwiGLU"},
    {"gpt2",           "--model transformer --vocab 50257 --channels 768 --layers 12 --heads 12 --pos learned "
                       "--norm layer --mlp gelu --bias --tie --batch 4 --seq 1024",
                       "GPT-2 small: 124,439,808 parameters"},
    {"bcmt-dense",     "--model transformer --vocab 50257 --channels 128 --layers 6 --heads 4 --pos learned "
                       "--norm layer --mlp gelu --tie --batch 16 --seq 1024 --lr 3e-4",
                       "the dense Transformer beside BCMT"},
    {"tmm-llama",      "--model transformer --vocab 8192 --channels 256 --layers 16 --heads 4 --ff 1024 --batch 128 "
                       "--seq 512 --lr 5e-4",
                       "the Llama beside TMM"},
    {"tmm-hyena",      "--model hyena --vocab 8192 --channels 512 --layers 16 --batch 128 --seq 512 --lr 5e-4",
                       "the Hyena beside TMM"},
    {"transformer-tiny", "--model transformer --vocab 256 --channels 128 --layers 4 --batch 8 --seq 256 --steps 600 "
                       "--lr 3e-3", "bytes, a minute on a laptop"},
    {"mamba-tiny",     "--model mamba --vocab 256 --channels 128 --layers 4 --batch 8 --seq 256 --steps 600 "
                       "--lr 3e-3", "the same"},
    {"mamba2-tiny",    "--model mamba2 --vocab 256 --channels 128 --layers 4 --batch 8 --seq 256 --steps 600 "
                       "--lr 3e-3", "the same"},
    {"hyena-tiny",     "--model hyena --vocab 256 --channels 128 --layers 4 --batch 8 --seq 256 --steps 600 "
                       "--lr 3e-3", "the same"},
};

// The largest divisor of n that is at most `most`.
static int largest_divisor(int n, int most) {
    int d = most < n ? most : n;
    while (n % d) d--;
    return d;
}

// Fills in what was left to be chosen (0), and refuses what contradicts itself.
static void config_check(Config* c) {
    static const char* const owners[][2] = {        // flag, the models that know it
        {"heads", "transformer"}, {"kv-heads", "transformer"}, {"bias", "transformer"}, {"pos", "transformer"},
        {"attention", "transformer"}, {"window", "transformer"}, {"block", "transformer"}, {"norm", "transformer"},
        {"post-norm", "transformer"}, {"mlp", "transformer"}, {"weights", "transformer"}, {"ff", "transformer hyena"},
        {"d-state", "mamba mamba2"}, {"expand", "mamba mamba2"}, {"conv", "mamba mamba2"}, {"chunk", "mamba mamba2"},
        {"head-dim", "mamba2"}, {"emb", "hyena"},
    };
    static const char* const names[] = {"transformer", "mamba", "mamba2", "hyena"};
    // each begins with its --model; the rest is made for that
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
        const char* model = presets[i].flags + strlen("--model ");
        int length = (int)strcspn(model, " ");
        if (!strcmp(opt.preset, presets[i].name)
            && (strncmp(model, names[c->model], length) || names[c->model][length]))
            die("--preset %s is of --model %.*s: leave --model %s out, or the preset",
                opt.preset, length, model, names[c->model]);
    }
    for (size_t i = 0; i < sizeof owners / sizeof *owners; i++) {
        const char* p = owners[i][1];
        size_t length = strlen(names[c->model]);
        int known = 0;
        for (; *p; p += strcspn(p, " ") + (p[strcspn(p, " ")] == ' '))
            known |= strcspn(p, " ") == length && !strncmp(p, names[c->model], length);
        if (!known && option_given(owners[i][0]))
            die("--%s is a flag of --model %s, not of %s", owners[i][0], owners[i][1], names[c->model]);
    }
    if (c->model == MAMBA || c->model == MAMBA2) { c->norm = RMS; c->mlp = NO_MLP; }
    if (c->model == HYENA) { c->norm = LAYER; c->mlp = GELU; }
    if (c->model != TRANSFORMER) { c->weights = SPREAD; c->post_norm = 0; }
    if (c->mlp == NO_MLP && option_given("ff")) die("--ff %d is the width of an MLP, and --mlp none has none", c->ff);
    if (option_given("context") && c->model != HYENA && (c->model != TRANSFORMER || c->pos != LEARNED))
        die("--context %d counts learned positions or Hyena's filter: it needs --pos learned or --model hyena", c->seq);
    if (!c->kv_heads) c->kv_heads = c->heads;
    if (!c->ff) c->ff = c->mlp == SWIGLU ? (8 * c->channels / 3 + 15) / 16 * 16 : 4 * c->channels;
    if (!c->d_state) c->d_state = c->model == MAMBA2 ? 128 : 16;
    if (!c->seq) c->seq = opt.seq;
    if (c->model == TRANSFORMER) {
        if (c->channels % c->heads)
            die("--channels %d do not divide into --heads %d: %d would do",
                c->channels, c->heads, largest_divisor(c->channels, c->heads));
        if (c->heads % c->kv_heads)
            die("--heads %d do not divide into --kv-heads %d groups: %d would do",
                c->heads, c->kv_heads, largest_divisor(c->heads, c->kv_heads));
        int size = c->channels / c->heads;
        if (size > MAX_HEAD)
            die("--channels %d in --heads %d makes heads of %d numbers; %d is the most: give more heads",
                c->channels, c->heads, size, MAX_HEAD);
        if (c->pos == ROPE && size % 2)
            die("--pos rope turns pairs of numbers, and a head of --channels %d / --heads %d = %d is odd",
                c->channels, c->heads, size);
        if (c->attention == LINEAR && (c->window || c->block))
            die("--attention linear sums over the whole past: it has no --window or --block");
        if (c->post_norm && c->mlp == NO_MLP) die("--post-norm needs an --mlp");
    }
    if (c->model == MAMBA2 && c->expand * c->channels % c->head_dim)
        die("mamba2: --expand %d x --channels %d do not divide into heads of --head-dim %d: %d would do", c->expand,
            c->channels, c->head_dim, largest_divisor(c->expand * c->channels, c->head_dim));
    if (c->model == HYENA && c->emb % 2 == 0)
        die("--emb %d: a position is described by its time and pairs of waves, an odd count: %d or %d",
            c->emb, c->emb - 1, c->emb + 1);
}

// The model in a few words, without an end of line.
static void config_describe(const Config* c) {
    static const char *names[] = {"transformer", "mamba", "mamba2", "hyena"},
                      *pos[] = {"RoPE", "learned positions", "no positions"};
    static const char *norm[] = {"RMSNorm", "LayerNorm"}, *mlp[] = {"SwiGLU", "GELU", "no MLP"};
    printf("%s | V %d, C %d, layers %d", names[c->model], c->vocab, c->channels, c->layers);
    if (c->model == TRANSFORMER) {
        printf(", %d heads of %d", c->heads, c->channels / c->heads);
        if (c->kv_heads < c->heads) printf(" on %d", c->kv_heads);
        printf(", %s, %s%s, %s", pos[c->pos], c->post_norm ? "post-" : "", norm[c->norm], mlp[c->mlp]);
        if (c->mlp != NO_MLP) printf(" %d", c->ff);
        if (c->attention == LINEAR) printf(", linear attention");
        if (c->window) printf(", window %d", c->window);
        if (c->block) printf(", blocks of %d", c->block);
    }
    if (c->model == MAMBA || c->model == MAMBA2) printf(", state %d", c->d_state);
    if (c->model == HYENA) printf(", filter of %d", c->seq);
    if (c->tie) printf(", tied");
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
