// train_harmonic.cu: Harmonic (arXiv 2606.24650) in CUDA, forward and backward written out by hand. It is
// train_harmonic.c function for function: lay the two side by side. The model, its equations and what each flag changes
// stand at the top of the .c, and so do the derivations of the backward passes; here stands what a GPU makes different.
// Both start from the same weights to the bit, read and write the same files,
// and test/twin.cu holds every kernel against its C twin.
//
// Numbers. floatX is bf16, or float with -DPRECISION_FP32 (make PRECISION=fp32).
//   floatX  what is written once and read by matmuls or kernels: activations, gradients of activations, and a copy of
//           the parameters for the matmuls, renewed after every update. bf16 has float's range and 8 bits of precision.
//   float   what many terms are added to: the parameters and their gradients, AdamW's moments, the residual stream and
//           its gradient, dx, dh and dne (up to seven terms each); states carried across chunks and batches; all sums
//           and statistics. Decays A and 1-A are never stored:
//           0.992 .. 0.999 has three values in bf16, and one of them is 1.
// Kernels load floatX, compute in float and round once, on the way out.
//
// Where the time goes. Matmuls are cuBLAS's, on tensor cores; most of them are the head's. All other kernels do a few
// operations a number and are bound by memory: in the time in which a GPU loads one float it could do dozens of
// multiply-adds, hundreds on tensor cores. So
//   - neighbouring threads read neighbouring addresses ("coalesced": a warp's 32 loads become a few wide ones), and
//     where the number of channels is a multiple of 8, a thread loads 8 numbers at once (Pack);
//   - time is cut into chunks that are scanned in parallel:
//     with one thread a channel, a thousandth of the GPU would work.
//
// The same seed gives the same bits in every run on one kind of GPU: no atomic additions anywhere. Sums over rows are
// made in two stages, fixed pieces first and then the pieces in order;
// the embedding's gradient walks rows sorted by token.
//
// Reading order: scan_forward (the heart), layernorm, head_loss, embedding_backward; the rest is the .c again.
//
// Build and run:   make cuda        Everything it can do:   ./build/cuda/train_harmonic --help
// Without a GPU:   make emu         the same source, its threads run one by one on the CPU (test/cuda_on_cpu.h)

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define MODEL_NAME "harmonic"

#ifdef PRECISION_FP32
typedef float floatX;
#else
typedef __nv_bfloat16 floatX;
#endif
typedef float real;             // what the .c calls real: here the numbers of files and of the host

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

// Zeroed host memory; dies where there is not enough.
static void* allocate(size_t bytes, const char* what) {
    void* p = calloc(bytes ? bytes : 1, 1);
    if (!p) die("not enough memory: %.1f MB for %s (see --plan)", bytes / 1e6, what);
    return p;
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

// ----------------------------------------------------------------------------------------------------------------
// the GPU: errors, memory, and what every kernel uses

// Kernels run after the host has gone on, so a fault inside one shows up at a later check: CUDA_LAUNCH_BLOCKING=1 makes
// the host wait for each, and then the line is the right one.
static void cuda_check(cudaError_t error, const char* file, int line) {
    if (error != cudaSuccess)
        die("%s:%d: CUDA: %s (run with CUDA_LAUNCH_BLOCKING=1 to see where it arose)",
            file, line, cudaGetErrorString(error));
}
static void cublas_check(cublasStatus_t status, const char* file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS) die("%s:%d: cuBLAS: %s", file, line, cublasGetStatusString(status));
}
#define cudaCheck(call) cuda_check(call, __FILE__, __LINE__)
#define cublasCheck(call) cublas_check(call, __FILE__, __LINE__)

static cublasHandle_t cublas = NULL;
static char device_name[256];
static int use_tf32 = 0;        // --tf32: float matmuls on tensor cores, with 10 bits of precision instead of 23

// Takes the first GPU. cuBLAS gives the same bits in every run as long as its atomics stay off (the default) and one
// stream is used; partial sums of long products must not be rounded to bf16.
static void device_start(void) {
    int count = 0;
    cudaDeviceProp prop;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0)
        die("no CUDA GPU found (nvidia-smi lists them); the CPU program is build/cpu/train_" MODEL_NAME);
    cudaCheck(cudaSetDevice(0));
    cudaCheck(cudaGetDeviceProperties(&prop, 0));
    snprintf(device_name, sizeof device_name, "%s", prop.name);
    if (sizeof(floatX) == 2 && prop.major < 8)
        die("%s has no bf16 (compute capability %d.%d, 8.0 needed): build with PRECISION=fp32",
            prop.name, prop.major, prop.minor);
    int mode = use_tf32 ? CUBLAS_TF32_TENSOR_OP_MATH
               : CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    cublasCheck(cublasCreate(&cublas));
    cublasCheck(cublasSetMathMode(cublas, (cublasMath_t)mode));
}

// Zeroed device memory; dies where there is not enough.
static void* device_allocate(size_t bytes, const char* what) {
    void* p = NULL;
    if (bytes == 0) bytes = 64;
    if (cudaMalloc(&p, bytes) != cudaSuccess) {
        size_t free_bytes = 0, total = 0;
        cudaMemGetInfo(&free_bytes, &total);
        die("not enough GPU memory: %.1f MB for %s, %.1f of %.1f MB are free (see --plan; a smaller --batch or --seq needs less)",
            bytes / 1e6, what, free_bytes / 1e6, total / 1e6);
    }
    cudaCheck(cudaMemset(p, 0, bytes));
    return p;
}

// Host <- device, n numbers converted to float, and the ways between.
// They wait until the GPU has done all earlier work.
template <typename F>
static void device_read(float* host, const F* device, size_t n) {
    F* raw = sizeof(F) == sizeof(float) ? (F*)host : (F*)allocate(n * sizeof(F), "numbers of the GPU");
    cudaCheck(cudaMemcpy(raw, device, n * sizeof(F), cudaMemcpyDeviceToHost));
    if ((void*)raw == (void*)host) return;
    for (size_t i = 0; i < n; i++) host[i] = (float)raw[i];
    free(raw);
}
static void device_write(void* device, const void* host, size_t bytes) {
    cudaCheck(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
}
static void device_copy(void* to, const void* from, size_t bytes) {
    cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice));
}
static void device_zero(void* p, size_t bytes) { cudaCheck(cudaMemsetAsync(p, 0, bytes)); }

// Memory that holds partial sums and chunk states between two launches.
// One for all models, as large as the largest asks.
static float* workspace = NULL;
static size_t workspace_floats = 0;
static void workspace_reserve(size_t floats) {
    if (floats <= workspace_floats) return;
    cudaCheck(cudaFree(workspace));
    workspace = (float*)device_allocate(floats * sizeof(float), "partial sums");
    workspace_floats = floats;
}

// Number of blocks of `size` threads for n threads.
// Grids are one-dimensional in the long direction (2^31 blocks allowed).
static unsigned blocks(size_t n, size_t size) { return (unsigned)((n + size - 1) / size); }

// N numbers that are loaded and stored at once: 8 of bf16 are 16 bytes, the widest access there is. Their address must
// be a multiple of their size, so kernels are compiled twice:
// N = 8 for rows of a multiple of 8 channels, and N = 1 for any other.
template <typename F, int N> struct alignas(sizeof(F) * N) Pack { F v[N]; };
template <int N, typename F> __device__ Pack<F, N> load(const F* p) { return *(const Pack<F, N>*)p; }
template <int N, typename F> __device__ void store(F* p, const Pack<F, N>& x) { *(Pack<F, N>*)p = x; }

// Sum, maximum over the 32 lanes of a warp, the same bits on all of them:
// in a butterfly both partners add the same two.
template <typename F> __device__ F warp_sum(F x) {
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
__device__ float warp_max(float x) {
    for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

// The same over all threads of a block, whose warps are added in order.
template <typename F> __device__ F block_sum(F x) {
    __shared__ F part[32];
    x = warp_sum(x);
    __syncthreads();                    // whoever still reads the last call's parts is done
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    F sum = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++) sum += part[w];
    return sum;
}
__device__ float block_max(float x) {
    __shared__ float part[32];
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    float top = part[0];
    for (int w = 1; w < (int)blockDim.x / 32; w++) top = fmaxf(top, part[w]);
    return top;
}

// e^x with x held inside [-87, 87], where neither e^x nor e^-x leaves a float's range;
// NaN stays NaN (as fmaxf would not let it).
__device__ float fast_exp(float x) { return expf(x < -87 ? -87 : x > 87 ? 87 : x); }
__device__ float sigmoid(float x) { return __fdividef(1.0f, 1 + fast_exp(-x)); }
__device__ float fast_tanh(float x) { return 1 - 2 * __fdividef(1.0f, 1 + fast_exp(2 * x)); }

// ----------------------------------------------------------------------------------------------------------------
// matrix product

template <typename F> static cudaDataType_t type_of(const F*) { return sizeof(F) == 2 ? CUDA_R_16BF : CUDA_R_32F; }

// C(M,N) = alpha op(A)(M,K) op(B)(K,N) + beta C, with sums over k in float. op is the transpose where ta or tb is set.
// All matrices are row by row, with lda, ldb, ldc numbers from one row to the next. cuBLAS thinks in columns: to it
// each of them is its own transpose, so it is asked for Cᵀ = op(B)ᵀ op(A)ᵀ. C is floatX, or float where it is added to.
template <typename Out, typename F>
static void matmul(Out* C, const F* A, const F* B, size_t M, size_t N, size_t K, size_t ldc, size_t lda, size_t ldb,
                   int ta, int tb, float alpha, float beta) {
    cublasCheck(cublasGemmEx(cublas, tb ? CUBLAS_OP_T : CUBLAS_OP_N, ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                             (int)N, (int)M, (int)K, &alpha, B, type_of(B), (int)ldb,
                             A, type_of(A), (int)lda, &beta, C, type_of(C), (int)ldc,
                             CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

// ----------------------------------------------------------------------------------------------------------------
// layers. `rows` is B*T.

// x(rows,C) = scale * wte(V,C)[tokens(rows)]. A thread writes N channels of one row; x is float where it begins a
// residual stream, floatX where a matmul reads it.
template <int N, typename X>
__global__ void embedding_forward_kernel(X* x, const int* tokens, const floatX* wte, float scale, size_t rows, int C) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= rows * C) return;
    Pack<floatX, N> w = load<N>(wte + (size_t)tokens[i / C] * C + i % C);
    Pack<X, N> out;
    for (int k = 0; k < N; k++) out.v[k] = (X)(scale * (float)w.v[k]);
    store<N>(x + i, out);
}
template <typename X>
static void embedding_forward(X* x, const int* tokens, const floatX* wte, float scale, size_t rows, size_t C) {
    if (C % 8 == 0)
        embedding_forward_kernel<8, X><<<blocks(rows * C / 8, 256), 256>>>(x, tokens, wte, scale, rows, (int)C);
    else            embedding_forward_kernel<1, X><<<blocks(rows * C, 256), 256>>>(x, tokens, wte, scale, rows, (int)C);
    cudaCheck(cudaGetLastError());
}

// A token may stand in many rows. Atomic additions would make the order of its sum a matter of chance, so the host
// sorts: order(rows) lists the rows by token, those of one token in order of time; those of the k-th distinct token
// begin at first(distinct + 1)[k]. Returns the number of distinct tokens. O(rows + V).
static int sort_rows(int* order, int* first, const int* tokens, size_t rows, size_t V) {
    // at, of each token: its count, one place up; then where its next row goes
    int* at = (int*)calloc(V + 1, sizeof(int));
    if (!at) die("not enough memory to sort %zu tokens", rows);
    for (size_t r = 0; r < rows; r++) at[tokens[r] + 1]++;
    int distinct = 0;
    for (size_t v = 0; v < V; v++) {
        if (at[v + 1] > 0) first[distinct++] = at[v];
        at[v + 1] += at[v];
    }
    first[distinct] = (int)rows;
    for (size_t r = 0; r < rows; r++) order[at[tokens[r]]++] = (int)r;
    free(at);
    return distinct;
}

// dwte[token] += scale * sum of dx over its rows. A block takes one token and 32 channels, and sums its rows: a lane a
// channel, so that a warp reads 32 neighbours; 8 warps take every 8th row each, and warp 0 adds the 8.
__global__ void embedding_backward_kernel(float* dwte, const int* tokens, const int* order, const int* first,
                                          const float* dx, float scale, int C) {
    __shared__ float part[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.y * 32 + lane;
    int begin = first[blockIdx.x], end = first[blockIdx.x + 1];
    float sum = 0;
    if (c < C) for (int k = begin + warp; k < end; k += 8) sum += dx[(size_t)order[k] * C + c];
    part[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int w = 1; w < 8; w++) sum += part[w][lane];
    dwte[(size_t)tokens[order[begin]] * C + c] += scale * sum;
}
static void embedding_backward(float* dwte, const int* tokens, const int* order, const int* first, int distinct,
                               const float* dx, float scale, size_t C) {
    embedding_backward_kernel<<<dim3(distinct, blocks(C, 32)), 256>>>(dwte, tokens, order, first, dx, scale, (int)C);
    cudaCheck(cudaGetLastError());
}

// Sums over all rows, in two stages. A block takes 32 columns and one of `splits` equal pieces of the rows, and sums
// them as above; then one thread per column adds the pieces in order.
enum { SPLITS = 128 };
static size_t split_count(size_t rows) { return smin(SPLITS, (rows + 63) / 64); }

// partial(splits,C): sums of x(rows,C) over `piece` rows each
template <typename F>
__global__ void sum_rows_kernel(float* partial, const F* x, size_t rows, size_t piece, int C) {
    __shared__ float part[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    size_t begin = blockIdx.y * piece, end = begin + piece < rows ? begin + piece : rows;
    float sum = 0;
    if (c < C) for (size_t r = begin + warp; r < end; r += 8) sum += (float)x[r * C + c];
    part[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int w = 1; w < 8; w++) sum += part[w][lane];
    partial[(size_t)blockIdx.y * C + c] = sum;
}
__global__ void sum_partials_kernel(float* out, const float* partial, int splits, int C) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    float sum = 0;
    for (int k = 0; k < splits; k++) sum += partial[(size_t)k * C + c];
    out[c] += sum;
}
// out(C) += sum over r of x(rows,C): the gradient of every bias
template <typename F>
static void sum_rows(float* out, const F* x, size_t rows, size_t C) {
    size_t splits = split_count(rows), piece = (rows + splits - 1) / splits;
    sum_rows_kernel<F><<<dim3(blocks(C, 32), (unsigned)splits), 256>>>(workspace, x, rows, piece, (int)C);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(C, 64), 64>>>(out, workspace, (int)splits, (int)C);
    cudaCheck(cudaGetLastError());
}

// out(rows,C) += bias(C)
template <int N, typename F>
__global__ void add_bias_kernel(F* out, const float* bias, size_t rows, int C) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= rows * C) return;
    int c = i % C;
    Pack<F, N> x = load<N>(out + i);
    for (int k = 0; k < N; k++) x.v[k] = (F)((float)x.v[k] + bias[c + k]);
    store<N>(out + i, x);
}

// out(rows,OC) = inp(rows,IC) wᵀ + bias, w (OC,IC) with row stride ldw >= IC, so that w may be some columns of a wider
// matrix: W [x ; e] is computed as W_left x + W_right e (add = 1 for the second), and nothing is concatenated.
template <typename F>
static void linear_forward(F* out, const F* inp, const F* w, const float* bias,
                           size_t rows, size_t IC, size_t OC, size_t ldw, int add) {
    matmul(out, inp, w, rows, OC, IC, OC, IC, ldw, 0, 1, 1, add);
    if (!bias) return;
    if (OC % 8 == 0) add_bias_kernel<8, F><<<blocks(rows * OC / 8, 256), 256>>>(out, bias, rows, (int)OC);
    else             add_bias_kernel<1, F><<<blocks(rows * OC, 256), 256>>>(out, bias, rows, (int)OC);
    cudaCheck(cudaGetLastError());
}

// out = inp wᵀ + bias  =>  dinp = dout w,  dw = doutᵀ inp,  dbias = sum of dout's rows (NULL: not wanted). dw and dbias
// are added to; dinp is with add = 1 and must be float then: one rounding to bf16 per term would be too many.
template <typename D, typename F>
static void linear_backward(D* dinp, float* dw, float* dbias, const F* dout, const F* inp, const F* w,
                            size_t rows, size_t IC, size_t OC, size_t ldw, int add) {
    if (dinp) matmul(dinp, dout, w, rows, IC, OC, IC, OC, ldw, 0, 0, 1, add);
    matmul(dw, dout, inp, OC, IC, rows, ldw, OC, IC, 1, 0, 1, 1);
    if (dbias) sum_rows(dbias, dout, rows, OC);
}

// out = z sigmoid(z) with z = za + bias(C): za is stored as the matmul left it, and its bias is added here, in float.
template <int N>
__global__ void silu_forward_kernel(floatX* out, const floatX* za, const float* bias, size_t rows, int C) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= rows * C) return;
    int c = i % C;
    Pack<floatX, N> x = load<N>(za + i);
    for (int k = 0; k < N; k++) {
        float z = (float)x.v[k] + bias[c + k];
        x.v[k] = (floatX)(z * sigmoid(z));
    }
    store<N>(out + i, x);
}
static void silu_forward(floatX* out, const floatX* za, const float* bias, size_t rows, size_t C) {
    if (C % 8 == 0) silu_forward_kernel<8><<<blocks(rows * C / 8, 256), 256>>>(out, za, bias, rows, (int)C);
    else            silu_forward_kernel<1><<<blocks(rows * C, 256), 256>>>(out, za, bias, rows, (int)C);
    cudaCheck(cudaGetLastError());
}

// d/dz z σ(z) = σ (1 + z (1 - σ)).  d is dout on entry and dz on return.
template <int N>
__global__ void silu_backward_kernel(floatX* d, const floatX* za, const float* bias, size_t rows, int C) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= rows * C) return;
    int c = i % C;
    Pack<floatX, N> x = load<N>(za + i), g = load<N>(d + i);
    for (int k = 0; k < N; k++) {
        float z = (float)x.v[k] + bias[c + k], sg = sigmoid(z);
        g.v[k] = (floatX)((float)g.v[k] * sg * (1 + z * (1 - sg)));
    }
    store<N>(d + i, g);
}
static void silu_backward(floatX* d, const floatX* za, const float* bias, size_t rows, size_t C) {
    if (C % 8 == 0) silu_backward_kernel<8><<<blocks(rows * C / 8, 256), 256>>>(d, za, bias, rows, (int)C);
    else            silu_backward_kernel<1><<<blocks(rows * C, 256), 256>>>(d, za, bias, rows, (int)C);
    cudaCheck(cudaGetLastError());
}

// out = (x - mean) rstd w + b over each row of x (rows,C); mean, rstd (rows) are kept for the backward.
// w = b = NULL: n(.). A warp takes a row, 8 rows a block, and walks it three times; only the first time comes from
// memory, the others from cache.
template <int N, typename X>
__global__ void layernorm_forward_kernel(floatX* out, float* mean, float* rstd, const X* x, const float* w,
                                         const float* b, size_t rows, int C) {
    size_t r = (size_t)blockIdx.x * 8 + threadIdx.x / 32;
    int first = threadIdx.x % 32 * N;
    if (r >= rows) return;              // a whole warp leaves
    x += r * C;
    out += r * C;
    float m = 0, v = 0;
    for (int c = first; c < C; c += 32 * N) {
        Pack<X, N> p = load<N>(x + c);
        for (int k = 0; k < N; k++) m += (float)p.v[k];
    }
    m = warp_sum(m) / C;
    for (int c = first; c < C; c += 32 * N) {
        Pack<X, N> p = load<N>(x + c);
        for (int k = 0; k < N; k++) v += ((float)p.v[k] - m) * ((float)p.v[k] - m);
    }
    float s = 1 / sqrtf(warp_sum(v) / C + 1e-5f);
    for (int c = first; c < C; c += 32 * N) {
        Pack<X, N> p = load<N>(x + c);
        Pack<floatX, N> o;
        for (int k = 0; k < N; k++) {
            float n = ((float)p.v[k] - m) * s;
            o.v[k] = (floatX)(w ? n * w[c + k] + b[c + k] : n);
        }
        store<N>(out + c, o);
    }
    if (first == 0) { mean[r] = m; rstd[r] = s; }
}
template <typename X>
static void layernorm_forward(floatX* out, float* mean, float* rstd, const X* x, const float* w,
                              const float* b, size_t rows, size_t C) {
    if (C % 8 == 0) layernorm_forward_kernel<8, X><<<blocks(rows, 8), 256>>>(out, mean, rstd, x, w, b, rows, (int)C);
    else            layernorm_forward_kernel<1, X><<<blocks(rows, 8), 256>>>(out, mean, rstd, x, w, b, rows, (int)C);
    cudaCheck(cudaGetLastError());
}

// With n = (x - mean) rstd, g = dout w:  dx = rstd (g - mean(g) - n mean(g n)), written, or added with add = 1.
// A warp a row.
template <int N, typename D, typename X>
__global__ void layernorm_backward_kernel(D* dx, const float* dout, const X* x, const float* mean, const float* rstd,
                                          const float* w, size_t rows, int C, int add) {
    size_t r = (size_t)blockIdx.x * 8 + threadIdx.x / 32;
    int first = threadIdx.x % 32 * N;
    if (r >= rows) return;
    x += r * C;
    dx += r * C;
    dout += r * C;
    float m = mean[r], s = rstd[r], g_mean = 0, gn_mean = 0;
    for (int c = first; c < C; c += 32 * N) {
        Pack<X, N> p = load<N>(x + c);
        Pack<float, N> d = load<N>(dout + c);
        for (int k = 0; k < N; k++) {
            float g = w ? d.v[k] * w[c + k] : d.v[k];
            g_mean += g;
            gn_mean += g * ((float)p.v[k] - m) * s;
        }
    }
    g_mean = warp_sum(g_mean) / C;
    gn_mean = warp_sum(gn_mean) / C;
    for (int c = first; c < C; c += 32 * N) {
        Pack<X, N> p = load<N>(x + c);
        Pack<float, N> d = load<N>(dout + c);
        Pack<D, N> o;
        if (add) o = load<N>(dx + c);
        for (int k = 0; k < N; k++) {
            float g = w ? d.v[k] * w[c + k] : d.v[k];
            g = s * (g - g_mean - ((float)p.v[k] - m) * s * gn_mean);
            o.v[k] = (D)(add ? (float)o.v[k] + g : g);
        }
        store<N>(dx + c, o);
    }
}
// dw = sum over rows of dout n,  db = sum of dout:
// pieces of rows as in sum_rows_kernel. partial is (splits,C) for dw, then for db.
template <typename X>
__global__ void layernorm_backward_sums_kernel(float* partial, const float* dout, const X* x, const float* mean,
                                               const float* rstd, size_t rows, size_t piece, int C) {
    __shared__ float part_w[8][32];
    __shared__ float part_b[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    size_t begin = blockIdx.y * piece, end = begin + piece < rows ? begin + piece : rows;
    float sum_w = 0, sum_b = 0;
    if (c < C) for (size_t r = begin + warp; r < end; r += 8) {
        float d = dout[r * C + c];
        sum_w += d * ((float)x[r * C + c] - mean[r]) * rstd[r];
        sum_b += d;
    }
    part_w[warp][lane] = sum_w;
    part_b[warp][lane] = sum_b;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int w = 1; w < 8; w++) { sum_w += part_w[w][lane]; sum_b += part_b[w][lane]; }
    partial[(size_t)blockIdx.y * C + c] = sum_w;
    partial[((size_t)gridDim.y + blockIdx.y) * C + c] = sum_b;
}
// dw and db are added to.
template <typename D, typename X>
static void layernorm_backward(D* dx, float* dw, float* db, const float* dout, const X* x, const float* mean,
                               const float* rstd, const float* w, size_t rows, size_t C, int add) {
    if (C % 8 == 0)
        layernorm_backward_kernel<8, D, X><<<blocks(rows, 8), 256>>>(dx, dout, x, mean, rstd, w, rows, (int)C, add);
    else
        layernorm_backward_kernel<1, D, X><<<blocks(rows, 8), 256>>>(dx, dout, x, mean, rstd, w, rows, (int)C, add);
    cudaCheck(cudaGetLastError());
    if (!w) return;
    size_t splits = split_count(rows), piece = (rows + splits - 1) / splits;
    layernorm_backward_sums_kernel<X><<<dim3(blocks(C, 32), (unsigned)splits), 256>>>(
        workspace, dout, x, mean, rstd, rows, piece, (int)C);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(C, 64), 64>>>(dw, workspace, (int)splits, (int)C);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(C, 64), 64>>>(db, workspace + splits * C, (int)splits, (int)C);
    cudaCheck(cudaGetLastError());
}

// The recurrence, in parallel over time.
//     A_t = lo + (hi - lo) σ(ga_t)        s_t = A_t s_{t-1} + (1 - A_t) tanh(gb_t)
// A step is the map  s -> A s + b, and two steps one after the other are such a map again:
//     (A, b) then (A', b')   =   (A A', A' b + b')
// so a whole chunk of time is one pair (product of its A's, the state it reaches from 0). Three launches:
//   1. local:  a thread per (sequence, chunk, channel) walks its chunk from 0 and keeps the pair;
//   2. carry:  a thread per (sequence, channel) walks the pairs in order: the state at each chunk's start;
//   3. apply:  a thread per (sequence, chunk, channel) walks its chunk again from there and writes s.
// ga and gb are read twice instead of once (10 bytes moved a number in bf16, not 6), and `chunks` times as many threads
// work. Products are only composed, never divided by: they underflow to 0, which is right. Threads run along channels,
// so that a warp reads 32 neighbours. The cut depends on T alone, and so do the bits of the result.
static const size_t SCAN_CHUNKS = 512, SCAN_LENGTH = 32;         // at most so many chunks, at least so long
static size_t scan_length(size_t T) {
    size_t n = (T + SCAN_CHUNKS - 1) / SCAN_CHUNKS;
    return n < SCAN_LENGTH ? SCAN_LENGTH : n;
}

typedef struct { size_t B, T, C, length, chunks; float low, width, rest; } Scan;        // rest is 1 - hi
static Scan scan_sizes(double lo, double hi, size_t B, size_t T, size_t C) {
    Scan q = {B, T, C, scan_length(T), 0, (float)lo, (float)(hi - lo), (float)(1 - hi)};
    q.chunks = (T + q.length - 1) / q.length;
    return q;
}

// Where thread i of kernels 1 and 3 works: sequence b, channel c, time begin .. end-1.
struct Place { size_t b, c, chunk, begin, end; };
__device__ Place scan_place(Scan q, size_t i) {
    Place p;
    p.c = i % q.C;
    p.chunk = i / q.C % q.chunks;
    p.b = i / q.C / q.chunks;
    p.begin = p.chunk * q.length;
    p.end = p.begin + q.length < q.T ? p.begin + q.length : q.T;
    return p;
}

// product, reached (B,chunks,C)
__global__ void scan_forward_local_kernel(float* product, float* reached, const floatX* ga, const floatX* gb, Scan q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.chunks * q.C) return;
    Place p = scan_place(q, i);
    float all = 1, s = 0;
    #pragma unroll 4
    for (size_t t = p.begin; t < p.end; t++) {
        size_t at = (p.b * q.T + t) * q.C + p.c;
        float e = fast_exp(-(float)ga[at]), sg = __fdividef(1.0f, 1 + e);       // σ(ga); σ(-ga) = e σ(ga)
        float A = q.low + q.width * sg, one_minus_A = q.rest + q.width * e * sg;
        s = A * s + one_minus_A * fast_tanh((float)gb[at]);
        all *= A;
    }
    product[i] = all;
    reached[i] = s;
}
// reached(B,chunks,C) becomes the state at the start of each chunk
__global__ void scan_forward_carry_kernel(float* reached, const float* product, const float* s0, Scan q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.C) return;
    float s = s0[i];
    for (size_t k = 0; k < q.chunks; k++) {
        size_t at = (i / q.C * q.chunks + k) * q.C + i % q.C;
        float end = product[at] * s + reached[at];
        reached[at] = s;
        s = end;
    }
}
__global__ void scan_forward_apply_kernel(floatX* __restrict__ s, float* state, const float* start,
                                          const floatX* __restrict__ ga, const floatX* __restrict__ gb, Scan q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.chunks * q.C) return;
    Place p = scan_place(q, i);
    float carry = start[i];
    #pragma unroll 4
    for (size_t t = p.begin; t < p.end; t++) {
        size_t at = (p.b * q.T + t) * q.C + p.c;
        float e = fast_exp(-(float)ga[at]), sg = __fdividef(1.0f, 1 + e);
        float A = q.low + q.width * sg, one_minus_A = q.rest + q.width * e * sg;
        carry = A * carry + one_minus_A * fast_tanh((float)gb[at]);
        s[at] = (floatX)carry;
    }
    if (p.end == q.T) state[p.b * q.C + p.c] = carry;
}
// s, ga, gb (B,T,C); s_{-1} is s0 (B,C), and state (B,C) receives s_{T-1}, unrounded.
static void scan_forward(floatX* s, float* state, const floatX* ga, const floatX* gb, const float* s0,
                         double lo, double hi, size_t B, size_t T, size_t C) {
    Scan q = scan_sizes(lo, hi, B, T, C);
    size_t n = B * q.chunks * C;
    float *product = workspace, *reached = workspace + n;
    scan_forward_local_kernel<<<blocks(n, 128), 128>>>(product, reached, ga, gb, q);
    cudaCheck(cudaGetLastError());
    scan_forward_carry_kernel<<<blocks(B * C, 64), 64>>>(reached, product, s0, q);
    cudaCheck(cudaGetLastError());
    scan_forward_apply_kernel<<<blocks(n, 128), 128>>>(s, state, reached, ga, gb, q);
    cudaCheck(cudaGetLastError());
}

// The gradient of s_t runs the recurrence in reverse (derived in the .c):
//     G_t  = ds_t + A_{t+1} G_{t+1}
//     dA_t = G_t s_{t-1} - G_t tanh(gb_t)   dgb_t = G_t (1 - A_t) (1 - tanh²(gb_t))   dga_t = dA_t (hi - lo) σ (1 - σ)
// What a step hands on is  r_t = A_t G_t = A_t r_{t+1} + A_t ds_t: again a map  r -> A r + b, so chunks compose as
// above, from the last one to the first. r_T = 0.
__global__ void scan_backward_local_kernel(float* product, float* reached, const floatX* ds, const floatX* ga, Scan q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.chunks * q.C) return;
    Place p = scan_place(q, i);
    float all = 1, r = 0;
    #pragma unroll 4
    for (size_t t = p.end; t-- > p.begin;) {
        size_t at = (p.b * q.T + t) * q.C + p.c;
        float A = q.low + q.width * sigmoid((float)ga[at]);
        r = A * (r + (float)ds[at]);
        all *= A;
    }
    product[i] = all;
    reached[i] = r;
}
// reached(B,chunks,C) becomes what enters each chunk from its right
__global__ void scan_backward_carry_kernel(float* reached, const float* product, Scan q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.C) return;
    float r = 0;
    for (size_t k = q.chunks; k-- > 0;) {
        size_t at = (i / q.C * q.chunks + k) * q.C + i % q.C;
        float end = product[at] * r + reached[at];
        reached[at] = r;
        r = end;
    }
}
__global__ void scan_backward_apply_kernel(floatX* __restrict__ dga, floatX* __restrict__ dgb, const float* start,
                                           const floatX* __restrict__ ds, const floatX* __restrict__ s,
                                           const floatX* __restrict__ ga,
                                           const floatX* __restrict__ gb, const float* s0, Scan q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.chunks * q.C) return;
    Place p = scan_place(q, i);
    float r = start[i];
    #pragma unroll 4
    for (size_t t = p.end; t-- > p.begin;) {
        size_t at = (p.b * q.T + t) * q.C + p.c;
        float before = t > 0 ? (float)s[at - q.C] : s0[p.b * q.C + p.c];
        float e = fast_exp(-(float)ga[at]), sg = __fdividef(1.0f, 1 + e), th = fast_tanh((float)gb[at]);
        float A = q.low + q.width * sg, one_minus_A = q.rest + q.width * e * sg;
        float G = (float)ds[at] + r;
        dga[at] = (floatX)(G * (before - th) * q.width * sg * e * sg);
        dgb[at] = (floatX)(G * one_minus_A * (1 - th * th));
        r = A * G;
    }
}
// dga, dgb (B,T,C) are written. s0 gets no gradient: a carried state is cut off from the past that made it.
static void scan_backward(floatX* dga, floatX* dgb, const floatX* ds, const floatX* s, const floatX* ga,
                          const floatX* gb, const float* s0, double lo, double hi, size_t B, size_t T, size_t C) {
    Scan q = scan_sizes(lo, hi, B, T, C);
    size_t n = B * q.chunks * C;
    float *product = workspace, *reached = workspace + n;
    scan_backward_local_kernel<<<blocks(n, 128), 128>>>(product, reached, ds, ga, q);
    cudaCheck(cudaGetLastError());
    scan_backward_carry_kernel<<<blocks(B * C, 64), 64>>>(reached, product, q);
    cudaCheck(cudaGetLastError());
    scan_backward_apply_kernel<<<blocks(n, 128), 128>>>(dga, dgb, reached, ds, s, ga, gb, s0, q);
    cudaCheck(cudaGetLastError());
}

// The head and the loss, forward and backward in one pass over some rows at a time, so that the logits exist only
// for those rows: memory does not grow with T V.
//     logits = y headᵀ      loss = mean over rows with target >= 0 of  log sum_v e^logit_v - logit_target
//     dlogits = (softmax - onehot(target)) / count         dy = dlogits head      dhead += dlogitsᵀ y
// Rows of V numbers are kept padded to Vp, the next multiple of 64: with an odd V (GPT-2's 50257) no row but the first
// would start at an address from which 16 bytes can be loaded, and matmuls would lose several times their speed. head
// has Vp rows as well (params_layout leaves room), zeros, and dlogits are zero there.
enum { HEAD_ROWS = 4096, HEAD_BYTES = 1 << 29 };        // at most so many rows, and logits of at most half a gigabyte
static size_t padded_vocab(size_t V) { return (V + 63) / 64 * 64; }
static size_t head_rows(size_t rows, size_t V) {
    size_t fit = HEAD_BYTES / (padded_vocab(V) * sizeof(floatX)) / 64 * 64;
    return smin(rows, smin(HEAD_ROWS, fit ? fit : 64));
}

// One block per row. Logits (rows,Vp) become dlogits in place with train = 1; losses, hits (rows). Each thread keeps
// the maximum it has seen and the sum of e^(x - maximum), corrected whenever the maximum rises, so that the row is read
// once for both; a second reading writes the gradient.
__global__ void softmax_kernel(floatX* logits, float* losses, float* hits, const int* targets,
                               float dloss, int V, int Vp, int train) {
    floatX* z = logits + (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    if (target < 0) {
        Pack<floatX, 8> zero;
        for (int k = 0; k < 8; k++) zero.v[k] = (floatX)0.0f;
        if (train) for (int v = threadIdx.x * 8; v < Vp; v += blockDim.x * 8) store<8>(z + v, zero);
        if (threadIdx.x == 0) losses[blockIdx.x] = hits[blockIdx.x] = 0;
        return;                         // the whole block leaves
    }
    float my_top = -INFINITY, my_sum = 0, z_target = (float)z[target];
    for (int v = threadIdx.x * 8; v < V; v += blockDim.x * 8) {
        Pack<floatX, 8> p = load<8>(z + v);
        float top = my_top;
        for (int k = 0; k < 8; k++) if (v + k < V) top = fmaxf(top, (float)p.v[k]);
        my_sum *= expf(my_top - top);
        my_top = top;
        for (int k = 0; k < 8; k++) if (v + k < V) my_sum += expf((float)p.v[k] - top);
    }
    float top = block_max(my_top);
    float sum = block_sum(my_sum * expf(my_top - top));         // a thread without work adds 0 * e^-inf = 0
    if (threadIdx.x == 0) {
        losses[blockIdx.x] = logf(sum) + top - z_target;
        hits[blockIdx.x] = z_target == top;
    }
    if (!train) return;
    float factor = dloss / sum;
    for (int v = threadIdx.x * 8; v < Vp; v += blockDim.x * 8) {
        Pack<floatX, 8> p = load<8>(z + v);
        for (int k = 0; k < 8; k++)
            p.v[k] = (floatX)(v + k < V ? expf((float)p.v[k] - top) * factor - (v + k == target ? dloss : 0) : 0);
        store<8>(z + v, p);
    }
}
// totals[0] = sum of losses(rows), totals[1] = sum of hits(rows): a block each
__global__ void sum_losses_kernel(double* totals, const float* losses, const float* hits, size_t rows) {
    const float* x = blockIdx.x == 0 ? losses : hits;
    double sum = 0;
    for (size_t r = threadIdx.x; r < rows; r += blockDim.x) sum += x[r];
    sum = block_sum(sum);
    if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}
// y (rows,C), dy (rows,C), head, dhead (Vp,C), targets (rows), `count` of them >= 0. Scratch: logits (head_rows,Vp),
// losses, hits (rows). dy == NULL: loss only. dy is written, dhead is added to; `scale` multiplies both (1/accum).
// Returns the mean loss in nats (0 where no row has a target);
// *correct receives how many targets had the largest logit.
static double head_loss(float* dy, float* dhead, const floatX* y, const floatX* head, const int* targets, size_t count,
                        floatX* logits, float* losses, float* hits, double scale, size_t rows, size_t C,
                        size_t V, size_t* correct) {
    size_t Vp = padded_vocab(V), step = head_rows(rows, V);
    float dloss = count ? scale / count : 0;
    for (size_t r0 = 0; r0 < rows; r0 += step) {
        size_t n = smin(step, rows - r0);
        linear_forward(logits, y + r0 * C, head, NULL, n, C, Vp, C, 0);
        softmax_kernel<<<(unsigned)n, 512>>>(logits, losses + r0, hits + r0, targets + r0, dloss,
                                             (int)V, (int)Vp, dy != NULL);
        cudaCheck(cudaGetLastError());
        if (dy) linear_backward(dy + r0 * C, dhead, NULL, logits, y + r0 * C, head, n, C, Vp, C, 0);
    }
    double sums[2];
    sum_losses_kernel<<<2, 1024>>>((double*)workspace, losses, hits, rows);
    cudaCheck(cudaGetLastError());
    cudaCheck(cudaMemcpy(sums, workspace, sizeof sums, cudaMemcpyDeviceToHost));
    *correct = (size_t)sums[1];
    return count ? sums[0] / count : 0;
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

// A table of named tensors inside one device allocation of one type.
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
template <typename F>
__attribute__((format(printf, 7, 8)))
static F* take(Table* t, F* base, size_t rows, size_t cols, int init, double scale, const char* name, ...) {
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
    t->total += (x->size + 15) / 16 * 16;       // every tensor starts where 8 numbers can be loaded at once
    return base ? base + x->offset : NULL;
}

// Matrices are of type W: floatX for the parameters, as matmuls read them, and float for the gradients.
// Vectors are always float.
template <typename W> struct LevelParams { W *wa1, *wa2, *wb1, *wb2; float *ba1, *ba2, *bb1, *bb2, *ln_w, *ln_b; };
// norms: only with layers > 1
template <typename W> struct BlockParams { LevelParams<W> level[3]; W *p1, *p2; float *norm_w, *norm_b; };
// tied: head == wte
template <typename W> struct Params { W *wte, *head; float *lnf_w, *lnf_b; BlockParams<W>* block; };

// Lays the parameters out: vectors at base, matrices at copy, at the same offsets (their gradients: copy = base).
// Initial values as in the .c. wte and head keep room for the rows that the vocabulary is padded with; they stay zero,
// and no one else sees them.
template <typename W>
static void params_layout(Params<W>* p, Table* t, W* copy, float* base, const Config* c) {
    size_t V = c->vocab, C = c->channels, padding = ((padded_vocab(V) - V) * C + 15) / 16 * 16;
    double bound_c = 1 / sqrt((double)C), bound_2c = 1 / sqrt(2.0 * C);
    p->wte = take(t, copy, V, C, NORMAL, c->tie ? 1 / sqrt(3.0 * C) : 1, "wte");
    t->total += padding;
    for (int n = 0; n < c->layers; n++) {
        BlockParams<W>* b = &p->block[n];
        if (c->layers > 1) {
            b->norm_w = take(t, base, C, 0, CONSTANT, 1, "block%d.norm_w", n);
            b->norm_b = take(t, base, C, 0, CONSTANT, 0, "block%d.norm_b", n);
        }
        for (int l = 0; l < 3; l++) {
            LevelParams<W>* q = &b->level[l];
            size_t in = l == 0 ? C : 2 * C;
            double bound_in = l == 0 ? bound_c : bound_2c, centre = (BANDS[l][0] + BANDS[l][1]) / 2;
            int free = c->bands == FREE;        // then A starts at the centre of the caged band: σ(ba2) = centre
            q->wa1  = take(t, copy, 2 * C, in,  UNIFORM, bound_in, "block%d.level%d.wa1", n, l + 1);
            q->ba1  = take(t, base, 2 * C, 0,   UNIFORM, bound_in, "block%d.level%d.ba1", n, l + 1);
            q->wa2  = take(t, copy, C, 2 * C,   UNIFORM, bound_2c, "block%d.level%d.wa2", n, l + 1);
            q->ba2  = take(t, base, C, 0, free ? CONSTANT : UNIFORM, free ? log(centre / (1 - centre)) : bound_2c,
                           "block%d.level%d.ba2", n, l + 1);
            q->wb1  = take(t, copy, 2 * C, in,  UNIFORM, bound_in, "block%d.level%d.wb1", n, l + 1);
            q->bb1  = take(t, base, 2 * C, 0,   UNIFORM, bound_in, "block%d.level%d.bb1", n, l + 1);
            q->wb2  = take(t, copy, C, 2 * C,   UNIFORM, bound_2c, "block%d.level%d.wb2", n, l + 1);
            q->bb2  = take(t, base, C, 0,       UNIFORM, bound_2c, "block%d.level%d.bb2", n, l + 1);
            q->ln_w = take(t, base, C, 0,       CONSTANT, 1,       "block%d.level%d.ln_w", n, l + 1);
            q->ln_b = take(t, base, C, 0,       CONSTANT, 0,       "block%d.level%d.ln_b", n, l + 1);
        }
        if (c->error) {
            b->p1 = take(t, copy, C, C, UNIFORM, bound_c, "block%d.p1", n);
            b->p2 = take(t, copy, C, C, UNIFORM, bound_c, "block%d.p2", n);
        }
    }
    if (c->layers > 1) {
        p->lnf_w = take(t, base, C, 0, CONSTANT, 1, "lnf_w");
        p->lnf_b = take(t, base, C, 0, CONSTANT, 0, "lnf_b");
    }
    p->head = p->wte;
    if (c->tie) return;
    p->head = take(t, copy, V, C, UNIFORM, bound_c, "head");
    t->total += padding;
}

// What a forward pass leaves behind for the backward pass; R = B*T rows.
typedef struct {
    floatX *e, *ne;                     // (R,C): prediction error, before its norm and after (levels 2 and 3)
    floatX *za, *zb;                    // (R,2C): the gate MLPs before silu, without their bias
    floatX *ga, *gb;                    // (R,C): their outputs
    floatX *s, *h;                      // (R,C)
    float *e_mean, *e_rstd, *s_mean, *s_rstd;   // (R)
    float *s0, *state;                  // (B,C): the state before the first token; the carried state, in Acts.states
} LevelActs;
typedef struct {
    float *x;                           // (R,C): the residual stream before the block; only with layers > 1
    float *nx_mean, *nx_rstd;
    floatX *nx;                         // (R,C): LayerNorm(x), what the block sees; with one layer the embeddings
    LevelActs level[3];
} BlockActs;
typedef struct {
    int B, T;
    Table table, exact, states;         // floatX; float; what --stateful and model_step carry on, (B,C) each
    floatX *memory;
    float *exact_memory, *state_memory;
    int *index_memory;                  // 4R + 1: the four arrays below
    int *tokens, *targets, *order, *first;
    BlockActs* block;
    float *out;                         // (R,C): the residual stream after the last block; only with layers > 1
    floatX *y;                          // (R,C): LayerNorm(out); with one layer what the block returns
    float *y_mean, *y_rstd, *losses, *hits;     // (R)
    floatX *u;                          // (R,2C) scratch: silu(z)
    floatX *logits;                     // (head_rows, Vp) scratch
    float *dy, *dout, *dx, *dh[3], *dne;        // (R,C) gradients that several terms are added to, only for training
    floatX *ds, *dga, *dgb, *du;        // (R,C), du (R,2C): those that are written once
} Acts;

// Lays a's tensors out at base, exact and state_base, and its four arrays of indices at `index` (NULL: only measures).
static void acts_layout(Acts* a, floatX* base, float* exact, float* state_base, int* index,
                        const Config* c, int train) {
    size_t V = c->vocab, C = c->channels, B = a->B, R = B * a->T;
    Table *t = &a->table, *f = &a->exact;
    t->count = f->count = a->states.count = 0;
    t->total = f->total = a->states.total = 0;
    if (index) { a->tokens = index; a->targets = index + R; a->order = index + 2 * R; a->first = index + 3 * R; }
    for (int n = 0; n < c->layers; n++)
        for (int l = 0; l < 3; l++)
            a->block[n].level[l].state = take(&a->states, state_base, B, C, NONE, 0, "block%d.level%d.s", n, l + 1);
    for (int n = 0; n < c->layers; n++) {
        BlockActs* b = &a->block[n];
        b->nx = take(t, base, R, C, NONE, 0, c->layers > 1 ? "block%d.nx" : "block%d.x", n);
        if (c->layers > 1) {
            b->x       = take(f, exact, R, C, NONE, 0, "block%d.x", n);
            b->nx_mean = take(f, exact, R, 0, NONE, 0, "block%d.nx_mean", n);
            b->nx_rstd = take(f, exact, R, 0, NONE, 0, "block%d.nx_rstd", n);
        }
        for (int l = 0; l < 3; l++) {
            LevelActs* q = &b->level[l];
            if (l > 0) {
                q->e      = c->error ? take(t, base, R, C, NONE, 0, "block%d.level%d.e", n, l + 1) : b->level[l - 1].h;
                q->e_mean = take(f, exact, R, 0, NONE, 0, "block%d.level%d.e_mean", n, l + 1);
                q->e_rstd = take(f, exact, R, 0, NONE, 0, "block%d.level%d.e_rstd", n, l + 1);
                q->ne     = take(t, base, R, C, NONE, 0, "block%d.level%d.ne", n, l + 1);
            }
            q->za     = take(t, base, R, 2 * C, NONE, 0, "block%d.level%d.za", n, l + 1);
            q->zb     = take(t, base, R, 2 * C, NONE, 0, "block%d.level%d.zb", n, l + 1);
            q->ga     = take(t, base, R, C, NONE, 0, "block%d.level%d.ga", n, l + 1);
            q->gb     = take(t, base, R, C, NONE, 0, "block%d.level%d.gb", n, l + 1);
            q->s0     = take(f, exact, B, C, NONE, 0, "block%d.level%d.s0", n, l + 1);
            q->s      = take(t, base, R, C, NONE, 0, "block%d.level%d.s", n, l + 1);
            q->s_mean = take(f, exact, R, 0, NONE, 0, "block%d.level%d.s_mean", n, l + 1);
            q->s_rstd = take(f, exact, R, 0, NONE, 0, "block%d.level%d.s_rstd", n, l + 1);
            q->h      = take(t, base, R, C, NONE, 0, "block%d.level%d.h", n, l + 1);
        }
    }
    if (c->layers > 1) {
        a->out    = take(f, exact, R, C, NONE, 0, "out");
        a->y_mean = take(f, exact, R, 0, NONE, 0, "y_mean");
        a->y_rstd = take(f, exact, R, 0, NONE, 0, "y_rstd");
    }
    a->y      = take(t, base, R, C, NONE, 0, "y");
    a->losses = take(f, exact, R, 0, NONE, 0, "losses");
    a->hits   = take(f, exact, R, 0, NONE, 0, "hits");
    a->u      = take(t, base, R, 2 * C, NONE, 0, "u");
    a->logits = take(t, base, head_rows(R, V), padded_vocab(V), NONE, 0, "logits");
    if (!train) return;
    a->dy   = take(f, exact, R, C, NONE, 0, "dy");
    a->dout = c->layers > 1 ? take(f, exact, R, C, NONE, 0, "dout") : a->dy;
    a->dx   = take(f, exact, R, C, NONE, 0, "dx");
    for (int l = 0; l < 3; l++) a->dh[l] = take(f, exact, R, C, NONE, 0, "dh%d", l + 1);
    a->ds   = take(t, base, R, C, NONE, 0, "ds");
    a->dga  = take(t, base, R, C, NONE, 0, "dga");
    a->dgb  = take(t, base, R, C, NONE, 0, "dgb");
    a->dne  = take(f, exact, R, C, NONE, 0, "dne");
    a->du   = take(t, base, R, 2 * C, NONE, 0, "du");
}

typedef struct {
    Config config;
    int B, T, train;                    // the size of a batch; 1 if gradients and optimizer state are allocated
    Table table;                        // of the parameters
    float *param_memory, *grad_memory, *adam_m, *adam_v;    // table.total numbers each
    floatX *copy_memory;                // the parameters as floatX; with PRECISION=fp32 param_memory itself
    Params<floatX> p;
    Params<float> g;
    Acts acts, step;                    // of a batch; of one token (generation)
    const int *tokens;                  // (B,T) of the last forward, on the host
    int *sorted;                        // (2R + 1) on the host: rows by token, and where each token's begin
    int distinct;                       // tokens among them
    float *step_logits;                 // (V) on the host
    double grad_scale;                  // gradients are of grad_scale * loss (1/accum)
    size_t counted, correct;            // targets in the last batch, and how many had the largest logit
    int updates;                        // AdamW steps done
} Model;

// Partial sums, chunk states and pieces of the gradient's norm: what `workspace` must hold for this model.
enum { NORM_PIECE = 1 << 16 };
static size_t workspace_size(const Model* m) {
    size_t C = m->config.channels, sums = 2 * C * split_count((size_t)m->B * m->T);
    size_t states = 2 * C * m->B * scan_sizes(0, 1, m->B, m->T, C).chunks,
           pieces = 2 * ((m->table.total + NORM_PIECE - 1) / NORM_PIECE);
    return (sums > states ? sums : states) + pieces;
}

// Computes every size and offset, allocates nothing on the GPU (for --plan).
static void model_layout(Model* m, const Config* c, int B, int T, int train) {
    memset(m, 0, sizeof *m);
    m->config = *c;
    m->B = B;
    m->T = T;
    m->train = train;
    m->grad_scale = 1;
    m->p.block = (BlockParams<floatX>*)calloc(c->layers, sizeof(BlockParams<floatX>));
    m->g.block = (BlockParams<float>*)calloc(c->layers, sizeof(BlockParams<float>));
    m->acts.block = (BlockActs*)calloc(c->layers, sizeof(BlockActs));
    m->step.block = (BlockActs*)calloc(c->layers, sizeof(BlockActs));
    if (!m->p.block || !m->g.block || !m->acts.block || !m->step.block)
        die("not enough memory for %d layers", c->layers);
    m->acts.B = B;
    m->acts.T = T;
    m->step.B = m->step.T = 1;
    params_layout(&m->p, &m->table, (floatX*)NULL, NULL, c);
    acts_layout(&m->acts, NULL, NULL, NULL, NULL, c, train);
    acts_layout(&m->step, NULL, NULL, NULL, NULL, c, 0);
}

// Bytes of the parts of a: floatX, float, states, indices.
static size_t acts_bytes(const Acts* a) {
    // 64: what device_allocate takes where there are none
    size_t states = a->states.total ? a->states.total * sizeof(float) : 64;
    return a->table.total * sizeof(floatX) + a->exact.total * sizeof(float) + states
           + (4 * (size_t)a->B * a->T + 1) * sizeof(int);
}

static void acts_build(Acts* a, const Config* c, int train, const char* what) {
    a->memory = (floatX*)device_allocate(a->table.total * sizeof(floatX), what);
    a->exact_memory = (float*)device_allocate(a->exact.total * sizeof(float), what);
    a->state_memory = (float*)device_allocate(a->states.total * sizeof(float), "carried states");
    a->index_memory = (int*)device_allocate((4 * (size_t)a->B * a->T + 1) * sizeof(int), "tokens");
    acts_layout(a, a->memory, a->exact_memory, a->state_memory, a->index_memory, c, train);
}

// Allocates a model for batches of B x T tokens, all zero; train = 0 leaves out what only training needs.
static void model_build(Model* m, const Config* c, int B, int T, int train) {
    if (!cublas) device_start();
    model_layout(m, c, B, T, train);
    size_t n = m->table.total;
    Table again = {};
    m->param_memory = (float*)device_allocate(n * sizeof(float), "parameters");
    m->copy_memory = (floatX*)m->param_memory;
    if (sizeof(floatX) != sizeof(float))
        m->copy_memory = (floatX*)device_allocate(n * sizeof(floatX), "the parameters in bf16");
    params_layout(&m->p, &again, m->copy_memory, m->param_memory, c);
    if (train) {
        m->grad_memory = (float*)device_allocate(n * sizeof(float), "gradients");
        m->adam_m = (float*)device_allocate(n * sizeof(float), "AdamW's first moments");
        m->adam_v = (float*)device_allocate(n * sizeof(float), "AdamW's second moments");
        again.count = 0;
        again.total = 0;
        params_layout(&m->g, &again, m->grad_memory, m->grad_memory, c);
    }
    free(again.tensors);
    acts_build(&m->acts, c, train, "activations");
    acts_build(&m->step, c, 0, "the activations of one token");
    workspace_reserve(workspace_size(m));
    m->sorted = (int*)allocate((2 * (size_t)B * T + 1) * sizeof(int), "sorted tokens");
    m->step_logits = (float*)allocate(c->vocab * sizeof(float), "the logits of one token");
}

static void model_free(Model* m) {
    Acts* both[2] = { &m->acts, &m->step };
    for (int i = 0; i < 2; i++) {
        free(both[i]->table.tensors); free(both[i]->exact.tensors); free(both[i]->states.tensors);
        cudaCheck(cudaFree(both[i]->memory)); cudaCheck(cudaFree(both[i]->exact_memory));
        cudaCheck(cudaFree(both[i]->state_memory)); cudaCheck(cudaFree(both[i]->index_memory));
    }
    free(m->table.tensors);
    if ((void*)m->copy_memory != (void*)m->param_memory) cudaCheck(cudaFree(m->copy_memory));
    cudaCheck(cudaFree(m->param_memory));
    cudaCheck(cudaFree(m->grad_memory));
    cudaCheck(cudaFree(m->adam_m));
    cudaCheck(cudaFree(m->adam_v));
    free(m->p.block); free(m->g.block); free(m->acts.block); free(m->step.block);
    free(m->sorted); free(m->step_logits);
    memset(m, 0, sizeof *m);
}

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

// Renews the floatX copy after the parameters have been set from outside.
__global__ void round_kernel(floatX* out, const float* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = (floatX)x[i];
}
static void model_refresh(Model* m) {
    if ((void*)m->copy_memory == (void*)m->param_memory) return;
    round_kernel<<<blocks(m->table.total, 256), 256>>>(m->copy_memory, m->param_memory, m->table.total);
    cudaCheck(cudaGetLastError());
}

// Draws the initial weights on the host, tensor after tensor in the table's order, in double and rounded once.
static void model_init(Model* m, uint64_t seed) {
    float* host = (float*)allocate(m->table.total * sizeof(float), "initial weights");
    for (int i = 0; i < m->table.count; i++) {
        const Tensor* t = &m->table.tensors[i];
        float* p = host + t->offset;
        for (size_t k = 0; k < t->size; k++)
            p[k] = t->init == NORMAL ? t->scale * rng_normal(&seed)
                   : t->init == UNIFORM ? t->scale * (2 * rng_uniform(&seed) - 1) : t->scale;
    }
    device_write(m->param_memory, host, m->table.total * sizeof(float));
    free(host);
    model_refresh(m);
}

// ----------------------------------------------------------------------------------------------------------------
// the model: forward and backward. R = B*T rows throughout.

// One gate:  g = W2 silu(W1 [x ; ne] + b1) + b2.  g, x, ne (R,C), z, u (R,2C). Level 1 has no ne (NULL), and W1 is
// (2C,C) instead of (2C,2C). z stays without b1: silu adds it.
static void gate_forward(floatX* g, floatX* z, floatX* u, const floatX* x, const floatX* ne, const floatX* w1,
                         const float* b1, const floatX* w2, const float* b2, size_t R, size_t C) {
    size_t in = ne ? 2 * C : C;
    linear_forward(z, x, w1, NULL, R, C, 2 * C, in, 0);
    if (ne) linear_forward(z, ne, w1 + C, NULL, R, C, 2 * C, in, 1);
    silu_forward(u, z, b1, R, 2 * C);
    linear_forward(g, u, w2, b2, R, 2 * C, C, 2 * C, 0);
}

// The lines of gate_forward, last one first. dx, dne and the d-parameters are added to.
static void gate_backward(float* dx, float* dne, float* dw1, float* db1, float* dw2, float* db2, floatX* du, floatX* u,
                          const floatX* dg, const floatX* z, const floatX* x, const floatX* ne,
                          const floatX* w1, const float* b1, const floatX* w2, size_t R, size_t C) {
    size_t in = ne ? 2 * C : C;
    silu_forward(u, z, b1, R, 2 * C);                           // u again, instead of keeping it
    linear_backward(du, dw2, db2, dg, u, w2, R, 2 * C, C, 2 * C, 0);
    silu_backward(du, z, b1, R, 2 * C);                         // du is dz from here on
    linear_backward(dx, dw1, db1, du, x, w1, R, C, 2 * C, in, 1);
    if (ne) linear_backward(dne, dw1 + C, NULL, du, ne, w1 + C, R, C, 2 * C, in, 1);
}

// One level:  A and b from the two gates, s from the scan, h = LayerNorm(s).
static void level_forward(LevelActs* a, const LevelParams<floatX>* p, const floatX* x, floatX* u, double lo, double hi,
                          size_t B, size_t T, size_t C) {
    size_t R = B * T;
    gate_forward(a->ga, a->za, u, x, a->ne, p->wa1, p->ba1, p->wa2, p->ba2, R, C);
    gate_forward(a->gb, a->zb, u, x, a->ne, p->wb1, p->bb1, p->wb2, p->bb2, R, C);
    scan_forward(a->s, a->state, a->ga, a->gb, a->s0, lo, hi, B, T, C);
    layernorm_forward(a->h, a->s_mean, a->s_rstd, a->s, p->ln_w, p->ln_b, R, C);
}

// dh comes in; dx and dne (NULL at level 1) are added to.
static void level_backward(float* dx, float* dne, LevelParams<float>* g, const float* dh, const LevelActs* a,
                           const LevelParams<floatX>* p, const floatX* x, Acts* scratch,
                           double lo, double hi, size_t B, size_t T, size_t C) {
    size_t R = B * T;
    floatX *ds = scratch->ds, *dga = scratch->dga, *dgb = scratch->dgb, *du = scratch->du, *u = scratch->u;
    layernorm_backward(ds, g->ln_w, g->ln_b, dh, a->s, a->s_mean, a->s_rstd, p->ln_w, R, C, 0);
    scan_backward(dga, dgb, ds, a->s, a->ga, a->gb, a->s0, lo, hi, B, T, C);
    gate_backward(dx, dne, g->wb1, g->bb1, g->wb2, g->bb2, du, u, dgb, a->zb, x, a->ne, p->wb1, p->bb1, p->wb2, R, C);
    gate_backward(dx, dne, g->wa1, g->ba1, g->wa2, g->ba2, du, u, dga, a->za, x, a->ne, p->wa1, p->ba1, p->wa2, R, C);
}

// out (R,C) = h_1 + h_2 + h_3 (+ residual): float as a residual stream, floatX where there is none
template <int N, typename Out>
__global__ void sum_levels_kernel(Out* out, const float* residual, const floatX* h1, const floatX* h2,
                                  const floatX* h3, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= n) return;
    Pack<floatX, N> a = load<N>(h1 + i), b = load<N>(h2 + i), c = load<N>(h3 + i);
    Pack<float, N> r = {};
    Pack<Out, N> o;
    if (residual) r = load<N>(residual + i);
    for (int k = 0; k < N; k++) o.v[k] = (Out)((float)a.v[k] + (float)b.v[k] + (float)c.v[k] + r.v[k]);
    store<N>(out + i, o);
}

// Three levels. Before levels 2 and 3 comes the prediction error
// (l counts from 0, so h_l is level[l-1].h and h_0 is x):
//     e_l = h_{l-1} - h_l P_lᵀ,   ne = n(e_l)          or with --error off    ne = n(h_l)
// The difference is made inside the matmul (alpha = -1, added to a copy of the target): a good prediction leaves a
// small error, and rounding the prediction to bf16 before subtracting would bury it.
template <typename Out>
static void block_forward(Out* out, const float* residual, BlockActs* a, const BlockParams<floatX>* p, floatX* u,
                          const Config* c, size_t B, size_t T) {
    size_t C = c->channels, R = B * T;
    const floatX* x = a->nx;
    for (int l = 0; l < 3; l++) {
        LevelActs* q = &a->level[l];
        if (l > 0 && c->error) {
            device_copy(q->e, l == 1 ? x : a->level[0].h, R * C * sizeof(floatX));
            matmul(q->e, a->level[l - 1].h, l == 1 ? p->p1 : p->p2, R, C, C, C, C, C, 0, 1, -1, 1);
        }
        if (l > 0) layernorm_forward(q->ne, q->e_mean, q->e_rstd, q->e, NULL, NULL, R, C);
        double lo, hi;
        band(c, l, &lo, &hi);
        level_forward(q, &p->level[l], x, u, lo, hi, B, T, C);
    }
    const floatX *h1 = a->level[0].h, *h2 = a->level[1].h, *h3 = a->level[2].h;
    if (C % 8 == 0) sum_levels_kernel<8, Out><<<blocks(R * C / 8, 256), 256>>>(out, residual, h1, h2, h3, R * C);
    else            sum_levels_kernel<1, Out><<<blocks(R * C, 256), 256>>>(out, residual, h1, h2, h3, R * C);
    cudaCheck(cudaGetLastError());
}

// dtarget (n) += de (n), and de turns round: it is -de that goes into the predictor
__global__ void error_backward_kernel(float* dtarget, floatX* de, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float d = (float)de[i];
    dtarget[i] += d;
    de[i] = (floatX)-d;
}

// Levels 3, 2, 1. dh_l collects dout, what e_{l+1} asks of h_l as its target, and what e_l asks of it as the predictor:
//     dh_{l-1} += de_l        dh_l += -de_l P_l        dP_l += -de_lᵀ h_l        (h_0 = x)
// dx (R,C) is added to.
static void block_backward(float* dx, BlockParams<float>* g, const float* dout, BlockActs* a,
                           const BlockParams<floatX>* p, Acts* scratch, const Config* c, size_t B, size_t T) {
    size_t C = c->channels, R = B * T, bytes = R * C * sizeof(float);
    float **dh = scratch->dh, *dne = scratch->dne;
    floatX* de = scratch->ds;              // ds is free again once a level is done
    for (int l = 0; l < 3; l++) device_copy(dh[l], dout, bytes);
    for (int l = 2; l >= 0; l--) {
        LevelActs* q = &a->level[l];
        double lo, hi;
        band(c, l, &lo, &hi);
        device_zero(dne, bytes);
        level_backward(dx, l > 0 ? dne : NULL, &g->level[l], dh[l], q, &p->level[l], a->nx, scratch, lo, hi, B, T, C);
        if (l > 0 && c->error) {
            layernorm_backward(de, NULL, NULL, dne, q->e, q->e_mean, q->e_rstd, NULL, R, C, 0);
            error_backward_kernel<<<blocks(R * C, 256), 256>>>(l == 1 ? dx : dh[0], de, R * C);
            cudaCheck(cudaGetLastError());
            linear_backward(dh[l - 1], l == 1 ? g->p1 : g->p2, NULL, de, a->level[l - 1].h,
                            l == 1 ? p->p1 : p->p2, R, C, C, C, 1);
        } else if (l > 0) {
            layernorm_backward(dh[l - 1], NULL, NULL, dne, q->e, q->e_mean, q->e_rstd, NULL, R, C, 1);
        }
    }
}

// x = wte[token]; tied, times (3C)^½ (see the top of the .c).
static float embedding_scale(const Config* c) { return c->tie ? sqrt(3.0 * c->channels) : 1; }

// tokens (B,T) on the host -> a->y (B,T,C). With carry, the scan starts from the state that the last call left;
// it always leaves its own.
static void acts_forward(Acts* a, const Params<floatX>* p, const Config* c, const int* tokens, int carry) {
    size_t B = a->B, T = a->T, C = c->channels, R = B * T;
    int deep = c->layers > 1;           // then a residual stream runs through the blocks
    device_write(a->tokens, tokens, R * sizeof(int));
    if (deep) embedding_forward(a->block[0].x, a->tokens, p->wte, embedding_scale(c), R, C);
    else      embedding_forward(a->block[0].nx, a->tokens, p->wte, embedding_scale(c), R, C);
    for (int n = 0; n < c->layers; n++) {
        BlockActs* b = &a->block[n];
        if (deep) layernorm_forward(b->nx, b->nx_mean, b->nx_rstd, b->x, p->block[n].norm_w, p->block[n].norm_b, R, C);
        if (carry) for (int l = 0; l < 3; l++) device_copy(b->level[l].s0, b->level[l].state, B * C * sizeof(float));
        if (deep) block_forward(n + 1 < c->layers ? a->block[n + 1].x : a->out, b->x, b, &p->block[n], a->u, c, B, T);
        else      block_forward(a->y, NULL, b, &p->block[n], a->u, c, B, T);
    }
    if (deep) layernorm_forward(a->y, a->y_mean, a->y_rstd, a->out, p->lnf_w, p->lnf_b, R, C);
}

// Mean loss in nats of tokens (B,T) against targets (B,T), both on the host; targets of -1 do not count. train = 1 also
// runs the head's backward (head_loss does both at once); train = 0 touches no gradient. Tokens must lie in [0, V).
static double model_forward(Model* m, const int* tokens, const int* targets, int train) {
    Acts* a = &m->acts;
    size_t R = (size_t)m->B * m->T;
    acts_forward(a, &m->p, &m->config, tokens, m->config.stateful);
    device_write(a->targets, targets, R * sizeof(int));
    m->tokens = tokens;
    m->counted = 0;
    for (size_t r = 0; r < R; r++) m->counted += targets[r] >= 0;
    return head_loss(train ? a->dy : NULL, train ? m->g.head : NULL, a->y, m->p.head, a->targets, m->counted, a->logits,
                     a->losses, a->hits, m->grad_scale, R, m->config.channels, m->config.vocab, &m->correct);
}

// The rest of the backward pass, after model_forward(..., 1). Adds to the gradients.
static void model_backward(Model* m) {
    Acts* a = &m->acts;
    const Config* c = &m->config;
    size_t C = c->channels, R = (size_t)m->B * m->T;
    int deep = c->layers > 1;
    if (deep)
        layernorm_backward(a->dout, m->g.lnf_w, m->g.lnf_b, a->dy, a->out, a->y_mean, a->y_rstd, m->p.lnf_w, R, C, 0);
    for (int n = c->layers - 1; n >= 0; n--) {
        BlockActs* b = &a->block[n];
        device_zero(a->dx, R * C * sizeof(float));
        block_backward(a->dx, &m->g.block[n], a->dout, b, &m->p.block[n], a, c, a->B, a->T);
        if (deep)                       // x + block(LayerNorm(x)): dout stays for the x, and the norm's share is added
            layernorm_backward(a->dout, m->g.block[n].norm_w, m->g.block[n].norm_b, a->dx, b->x, b->nx_mean, b->nx_rstd,
                               m->p.block[n].norm_w, R, C, 1);
    }
    m->distinct = sort_rows(m->sorted, m->sorted + R, m->tokens, R, c->vocab);      // while the GPU works on the blocks
    device_write(a->order, m->sorted, R * sizeof(int));
    device_write(a->first, m->sorted + R, (m->distinct + 1) * sizeof(int));
    embedding_backward(m->g.wte, a->tokens, a->order, a->first, m->distinct, deep ? a->dout : a->dx,
                       embedding_scale(c), C);
}

static void model_zero_grad(Model* m) { device_zero(m->grad_memory, m->table.total * sizeof(float)); }

// out (n,V), on the host, = logits of rows row .. row+n-1 of the last model_forward.
static void model_logits(Model* m, size_t row, size_t n, float* out) {
    Acts* a = &m->acts;
    size_t C = m->config.channels, V = m->config.vocab, Vp = padded_vocab(V), step = head_rows((size_t)m->B * m->T, V);
    float* host = (float*)allocate(smin(step, n) * Vp * sizeof(float), "logits");
    for (size_t r0 = 0; r0 < n; r0 += step) {
        size_t k = smin(step, n - r0);
        linear_forward(a->logits, a->y + (row + r0) * C, m->p.head, NULL, k, C, Vp, C, 0);
        device_read(host, a->logits, k * Vp);
        for (size_t r = 0; r < k; r++) memcpy(out + (r0 + r) * V, host + r * Vp, V * sizeof(float));
    }
    free(host);
}

// Zeroes carried states: all of them, or those of the streams b with reset[b] (NULL: all).
static void model_reset(Acts* a, const int* reset) {
    for (int i = 0; i < a->states.count; i++) {
        const Tensor* t = &a->states.tensors[i];
        size_t width = t->size / t->shape[0];
        for (int b = 0; b < a->B; b++)
            if (!reset || reset[b]) device_zero(a->state_memory + t->offset + b * width, width * sizeof(float));
    }
}

// One token, for generation: the same forward with B = T = 1 and a carried state of 3 C numbers a layer, however long
// the text. Returns the logits (V) of what comes next, on the host. model_reset(&m->step, NULL) starts a new text.
static const float* model_step(Model* m, int token) {
    acts_forward(&m->step, &m->p, &m->config, &token, 1);
    linear_forward(m->step.logits, m->step.y, m->p.head, NULL, 1, m->config.channels, padded_vocab(m->config.vocab),
                   m->config.channels, 0);
    device_read(m->step_logits, m->step.logits, m->config.vocab);
    return m->step_logits;
}

// ----------------------------------------------------------------------------------------------------------------
// optimizer

// sums[block] = sum of x² over the block's NORM_PIECE numbers of n
__global__ void square_sum_kernel(double* sums, const float* x, size_t n) {
    size_t begin = (size_t)blockIdx.x * NORM_PIECE, end = begin + NORM_PIECE < n ? begin + NORM_PIECE : n;
    double sum = 0;
    for (size_t i = begin + threadIdx.x; i < end; i += blockDim.x) sum += (double)x[i] * x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Euclidean norm of all gradients, summed in double over fixed pieces.
static double grad_norm(const Model* m) {
    size_t pieces = (m->table.total + NORM_PIECE - 1) / NORM_PIECE;
    double total = 0, *sums = (double*)allocate(pieces * sizeof(double), "the gradient's norm");
    square_sum_kernel<<<(unsigned)pieces, 512>>>((double*)workspace, m->grad_memory, m->table.total);
    cudaCheck(cudaGetLastError());
    cudaCheck(cudaMemcpy(sums, workspace, pieces * sizeof(double), cudaMemcpyDeviceToHost));
    for (size_t k = 0; k < pieces; k++) total += sums[k];
    free(sums);
    return sqrt(total);
}

// One tensor of n numbers; copy is its floatX copy (or p itself).
struct AdamW { float scale, b1, b2, eps, correct1, correct2, rate, shrink; };
__global__ void adamw_kernel(float* p, floatX* copy, const float* g, float* am, float* av, size_t n, AdamW a) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float gi = g[i] * a.scale;
    float m = a.b1 * am[i] + (1 - a.b1) * gi;
    float v = a.b2 * av[i] + (1 - a.b2) * gi * gi;
    float x = a.shrink * p[i] - a.rate * (m * a.correct1) / (sqrtf(v * a.correct2) + a.eps);
    am[i] = m;
    av[i] = v;
    p[i] = x;
    copy[i] = (floatX)x;
}

// AdamW (Loshchilov & Hutter 2019), beta (0.9, 0.95), eps 1e-8, with the gradient scaled down to norm `clip` first
// (0: never). Weight decay goes to the tensors whose table entry says so. Returns the norm before clipping; if it is
// not finite, nothing is changed.
static double model_update(Model* m, double lr, double weight_decay, double clip) {
    double norm = grad_norm(m);
    if (!isfinite(norm)) return norm;
    const double beta1 = 0.9, beta2 = 0.95;
    m->updates++;
    AdamW a = {};
    a.scale = clip > 0 && norm > clip ? clip / norm : 1;
    a.b1 = beta1;
    a.b2 = beta2;
    a.eps = 1e-8;
    a.correct1 = 1 / (1 - pow(beta1, m->updates));
    a.correct2 = 1 / (1 - pow(beta2, m->updates));
    a.rate = lr;
    for (int k = 0; k < m->table.count; k++) {
        const Tensor* t = &m->table.tensors[k];
        float *p = m->param_memory + t->offset, *g = m->grad_memory + t->offset, *am = m->adam_m + t->offset,
              *av = m->adam_v + t->offset;
        a.shrink = 1 - (t->decay ? lr * weight_decay : 0);
        adamw_kernel<<<blocks(t->size, 256), 256>>>(p, m->copy_memory + t->offset, g, am, av, t->size, a);
        cudaCheck(cudaGetLastError());
    }
    return norm;
}

// The first tensor of a table that holds a NaN or an infinity, or NULL.
template <typename F>
static const char* not_finite(const Table* t, const F* memory) {
    const char* name = NULL;
    for (int k = 0; k < t->count && !name; k++) {
        float* host = (float*)allocate(t->tensors[k].size * sizeof(float), "a tensor");
        device_read(host, memory + t->tensors[k].offset, t->tensors[k].size);
        for (size_t i = 0; i < t->tensors[k].size; i++) if (!isfinite(host[i])) name = t->tensors[k].name;
        free(host);
    }
    return name;
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
    {"threads",      'i', ' ', &opt.threads, 0, 4096, "N", "0", "CPU threads; without effect here", 0},
    {"tf32",         'b', ' ', &use_tf32, 0, 0, "", "", "float matmuls on tensor cores, with 10 bits of mantissa", 0},
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

// A copy of n device numbers in host memory, to be freed.
static real* host_copy(const real* device, size_t n, const char* what) {
    real* host = (real*)allocate(n * sizeof(real), what);
    device_read(host, device, n);
    return host;
}

// Writes path; returns 0, or an errno with the file as it was before.
static int checkpoint_save(const Model* m, const DataLoader* data, int step, const char* path) {
    const Table* tables[4] = { &m->table, &m->table, &m->table, &m->acts.states };
    const real* memories[4] = { m->param_memory, m->adam_m, m->adam_v, m->acts.state_memory };
    const char* prefixes[4] = { "", "adam_m.", "adam_v.", "state." };
    real* host[4] = {};
    Entry* e = (Entry*)allocate((3 * m->table.count + m->acts.states.count) * sizeof(Entry), "a checkpoint's header");
    int n = 0;
    for (int k = 0; k < (m->config.stateful ? 4 : 3); k++) {
        host[k] = host_copy(memories[k], tables[k]->total, "a checkpoint");
        for (int i = 0; i < tables[k]->count; i++) {
            const Tensor* t = &tables[k]->tensors[i];
            e[n++] = entry(prefixes[k], t->name, t->shape[0], t->shape[1], host[k] + t->offset);
        }
    }
    Text meta = {};
    text_add(&meta, "\"program\":\"" MODEL_NAME "\",\"step\":\"%d\",\"rng\":\"%llu\",\"position\":\"%llu\"", step,
             (unsigned long long)data->rng, (unsigned long long)data->position);
    options_remember(&meta);
    int error = safetensors_write(path, meta.chars, e, n);
    for (int k = 0; k < 4; k++) free(host[k]);
    free(meta.chars);
    free(e);
    return error;
}

// Weights only, or with `resume` all of it: then *step and the data's place are set too (NULL otherwise).
static void checkpoint_load(Model* m, const SafeTensors* s, int resume, int* step, DataLoader* data) {
    const Table* tables[4] = { &m->table, &m->table, &m->table, &m->acts.states };
    real* memories[4] = { m->param_memory, m->adam_m, m->adam_v, m->acts.state_memory };
    const char* prefixes[4] = { "", "adam_m.", "adam_v.", "state." };
    for (int k = 0; k < (!resume ? 1 : m->config.stateful ? 4 : 3); k++) {
        real* host = (real*)allocate(tables[k]->total * sizeof(real), "a checkpoint");
        for (int i = 0; i < tables[k]->count; i++) {
            const Tensor* t = &tables[k]->tensors[i];
            char name[64];
            snprintf(name, sizeof name, "%s%s", prefixes[k], t->name);
            safetensors_copy(s, name, host + t->offset, t->shape[0], t->shape[1]);
        }
        device_write(memories[k], host, tables[k]->total * sizeof(real));
        free(host);
    }
    model_refresh(m);
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
    real* host[2] = { host_copy(m->param_memory, t->total, "the dumped parameters"),
                     host_copy(m->grad_memory, t->total, "the dumped gradients") };
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < t->count; i++)
            e[n++] = entry(k ? "grad." : "param.", t->tensors[i].name, t->tensors[i].shape[0], t->tensors[i].shape[1],
                           host[k] + t->tensors[i].offset);
    int error = safetensors_write(path, "\"program\":\"" MODEL_NAME "\"", e, n);
    if (error) die("cannot write %s: %s", path, strerror(error));
    printf("dumped a batch, its logits, loss %.6f, parameters and gradients to %s\n", (double)loss, path);
    free(host[0]);
    free(host[1]);
    free(e);
    free(logits);
}

// ----------------------------------------------------------------------------------------------------------------
// training

// Mean loss in nats over `batches` batches of val from its start (0: all it has). A stateful model reads them with a
// state of its own, zero at the start, and finds its training state as it was.
static double evaluate(Model* m, DataLoader* val, size_t batches, double* accuracy) {
    size_t counted = 0, correct = 0;
    double total = 0;
    real* kept = host_copy(m->acts.state_memory, m->acts.states.total, "the carried state");
    if (val->num_batches && (batches == 0 || batches > val->num_batches)) batches = val->num_batches;
    loader_restart(val);
    for (size_t k = 0; k < batches; k++) {
        loader_next(val);
        model_reset(&m->acts, val->reset);
        double loss = model_forward(m, val->tokens, val->targets, 0);
        total += loss * m->counted;
        counted += m->counted;
        correct += m->correct;
    }
    device_write(m->acts.state_memory, kept, m->acts.states.total * sizeof(real));
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

// --plan: what model_build would allocate, to the byte, without allocating it.
static void print_plan(const Model* m) {
    printf("%-24s %18s %12s  init                decay\n", "tensor", "shape", "numbers");
    for (int i = 0; i < m->table.count; i++) {
        const Tensor* t = &m->table.tensors[i];
        char shape[32];
        snprintf(shape, sizeof shape, t->ndim == 2 ? "(%zu, %zu)" : "(%zu)", t->shape[0], t->shape[1]);
        printf("%-24s %18s %12zu  %s %-12.4g %s\n", t->name, shape, t->size,
               init_names[t->init], t->scale, t->decay ? "yes" : "no");
    }
    size_t p = m->table.total * sizeof(float),
           copy = sizeof(floatX) == sizeof(float) ? 0 : m->table.total * sizeof(floatX);
    size_t a = acts_bytes(&m->acts), s = acts_bytes(&m->step), w = workspace_size(m) * sizeof(float);
    size_t all = (m->train ? 4 * p : p) + copy + a + s + w, token = token_bytes(m);
    printf("parameters: %zu\n", model_parameters(m));
    printf("GPU bytes: parameters %zu, their bf16 copy %zu, gradients %zu, AdamW %zu, activations of %d x %d tokens %zu, "
           "of one token %zu, partial sums %zu\n",
           p, copy, m->train ? p : 0, m->train ? 2 * p : 0, m->B, m->T, a, s, w);
    printf("GPU bytes in all: %zu (%.2f GB), and about 0.5 GB that CUDA and its libraries take for themselves\n",
           all, all / 1e9);
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
    Text kept = {};
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
    Text t = {};
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
    Text log_path = {}, model_path = {};
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
                if (!where) where = not_finite(&m->acts.exact, m->acts.exact_memory);
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
    // what to do, from what is given
    Config* c = &opt.config;
    const char* source = opt.resume[0] ? opt.resume : opt.init;
    SafeTensors file = {};
    if (opt.resume[0] && opt.init[0]) die("--resume continues a run, --init starts a new one: give one of them");
    if ((opt.eval || opt.generate) && !source[0])
        die("--%s needs a trained model: --init out/model.safetensors", opt.eval ? "eval" : "generate");
    if (source[0]) {
        safetensors_read(&file, source);
        options_adopt(&file, MODEL_NAME, opt.resume[0] ? ADOPT_RUN : opt.eval ? ADOPT_SHAPE : ADOPT_MODEL);
        Option* out = option_find("out");
        const char* slash = strrchr(opt.resume, '/');
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
    Tokenizer tokenizer = {};
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
        print_plan(&m);
        return 0;
    }
    DataLoader data = {}, val = {};
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
    printf(" | %zu parameters | %s on %s\n",
           model_parameters(&m), sizeof(floatX) == 2 ? "bf16" : use_tf32 ? "tf32" : "fp32", device_name);
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
