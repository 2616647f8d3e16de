// train_baselines.cu: Transformer, Mamba, Mamba-2 and Hyena in CUDA, forward and backward written out by hand. It is
// train_baselines.c function for function: lay the two side by side. The models, their equations and what each flag changes
// stand at the top of the .c, and so do the derivations of the backward passes; here stands what a GPU makes different. Both
// start from the same weights to the bit, read and write the same files, and test/twin.cu holds every kernel against its C twin.
//
// Numbers. floatX is bf16, or float with -DPRECISION_FP32 (make PRECISION=fp32).
//   floatX  what is written once and read by matmuls or kernels: activations, gradients of activations, and a copy of the
//           parameters for the matmuls, renewed after every update. bf16 has float's range and 8 bits of precision.
//   float   what many terms are added to: the parameters and their gradients, AdamW's moments, the residual stream and its
//           gradient; scores, softmax sums, states carried across chunks and tokens, Fourier transforms; all statistics.
//           Step sizes and decays are computed in float where they are used, from what floatX keeps of their inputs.
// Kernels load floatX, compute in float and round once, on the way out.
//
// What a GPU makes different:
//   - attention. A block of threads takes 32 queries and meets 32 keys at a time in shared memory: 32 x 32 scores are made,
//     used and forgotten, and no (T,T) tensor exists. Backward it makes them again, twice: once for the gradient of 32
//     queries, once for that of 32 keys, so that a block owns what it writes and nothing is added atomically.
//   - linear attention and the scans run in chunks of time: each chunk's sum on its own, the sums in order, each chunk again.
//   - Hyena's long convolution is cuFFT's, in float.
//   - the rest is train_harmonic.cu's to the letter; what its top says of coalescing and of where the time goes holds here.
//
// The same seed gives the same bits in every run on one kind of GPU: no atomic additions anywhere. Sums over rows are made in
// two stages, fixed pieces first and then the pieces in order; the embedding's gradient walks rows sorted by token.
//
// Reading order: attention_forward, attention_backward; the mixer of the model in question; layer_forward. The rest is the .c.
//
// Build and run:   make cuda        Everything it can do:   ./build/cuda/train_baselines --help
// Without a GPU:   make emu         the same source, its threads run one by one on the CPU (test/cuda_on_cpu.h)

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cufft.h>
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

#define MODEL_NAME "baselines"

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
        die("%s:%d: CUDA: %s (run with CUDA_LAUNCH_BLOCKING=1 to see where it arose)", file, line, cudaGetErrorString(error));
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
        die("%s has no bf16 (compute capability %d.%d, 8.0 needed): build with PRECISION=fp32", prop.name, prop.major, prop.minor);
    int mode = use_tf32 ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
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

// Host <- device, n numbers converted to float, and the ways between. They wait until the GPU has done all earlier work.
template <typename F>
static void device_read(float* host, const F* device, size_t n) {
    F* raw = sizeof(F) == sizeof(float) ? (F*)host : (F*)allocate(n * sizeof(F), "numbers of the GPU");
    cudaCheck(cudaMemcpy(raw, device, n * sizeof(F), cudaMemcpyDeviceToHost));
    if ((void*)raw == (void*)host) return;
    for (size_t i = 0; i < n; i++) host[i] = (float)raw[i];
    free(raw);
}
static void device_write(void* device, const void* host, size_t bytes) { cudaCheck(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice)); }
static void device_copy(void* to, const void* from, size_t bytes) { cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice)); }
static void device_zero(void* p, size_t bytes) { cudaCheck(cudaMemsetAsync(p, 0, bytes)); }

// Memory that holds partial sums and chunk states between two launches. One for all models, as large as the largest asks.
static float* workspace = NULL;
static size_t workspace_floats = 0;
static void workspace_reserve(size_t floats) {
    if (floats <= workspace_floats) return;
    cudaCheck(cudaFree(workspace));
    workspace = (float*)device_allocate(floats * sizeof(float), "partial sums");
    workspace_floats = floats;
}

// Number of blocks of `size` threads for n threads. Grids are one-dimensional in the long direction (2^31 blocks allowed).
static unsigned blocks(size_t n, size_t size) { return (unsigned)((n + size - 1) / size); }

// N numbers that are loaded and stored at once: 8 of bf16 are 16 bytes, the widest access there is. Their address must be a multiple
// of their size, so kernels are compiled twice: N = 8 for rows of a multiple of 8 channels, and N = 1 for any other.
template <typename F, int N> struct alignas(sizeof(F) * N) Pack { F v[N]; };
template <int N, typename F> __device__ Pack<F, N> load(const F* p) { return *(const Pack<F, N>*)p; }
template <int N, typename F> __device__ void store(F* p, const Pack<F, N>& x) { *(Pack<F, N>*)p = x; }

// Sum, maximum over the 32 lanes of a warp, the same bits on all of them: in a butterfly both partners add the same two.
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

// e^x with x held inside [-87, 87], where neither e^x nor e^-x leaves a float's range; NaN stays NaN (as fmaxf would not let it).
__device__ float fast_exp(float x) { return expf(x < -87 ? -87 : x > 87 ? 87 : x); }
__device__ float sigmoid(float x) { return __fdividef(1.0f, 1 + fast_exp(-x)); }
__device__ float fast_tanh(float x) { return 1 - 2 * __fdividef(1.0f, 1 + fast_exp(2 * x)); }

// ----------------------------------------------------------------------------------------------------------------
// matrix product

template <typename F> static cudaDataType_t type_of(const F*) { return sizeof(F) == 2 ? CUDA_R_16BF : CUDA_R_32F; }

// C(M,N) = alpha op(A)(M,K) op(B)(K,N) + beta C, with sums over k in float. op is the transpose where ta or tb is set.
// All matrices are row by row, with lda, ldb, ldc numbers from one row to the next. cuBLAS thinks in columns: to it each
// of them is its own transpose, so it is asked for Cᵀ = op(B)ᵀ op(A)ᵀ. C is floatX, or float where it is added to.
template <typename Out>
static void matmul(Out* C, const floatX* A, const floatX* B, size_t M, size_t N, size_t K, size_t ldc, size_t lda, size_t ldb,
                   int ta, int tb, float alpha, float beta) {
    cublasCheck(cublasGemmEx(cublas, tb ? CUBLAS_OP_T : CUBLAS_OP_N, ta ? CUBLAS_OP_T : CUBLAS_OP_N, (int)N, (int)M, (int)K,
                             &alpha, B, type_of(B), (int)ldb, A, type_of(A), (int)lda, &beta, C, type_of(C), (int)ldc,
                             CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

// ----------------------------------------------------------------------------------------------------------------
// layers. `rows` is B*T.

// x(rows,C) = scale * wte(V,C)[tokens(rows)]. A thread writes N channels of one row; x is float where it begins a residual
// stream, floatX where a matmul reads it.
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
    if (C % 8 == 0) embedding_forward_kernel<8, X><<<blocks(rows * C / 8, 256), 256>>>(x, tokens, wte, scale, rows, (int)C);
    else            embedding_forward_kernel<1, X><<<blocks(rows * C, 256), 256>>>(x, tokens, wte, scale, rows, (int)C);
    cudaCheck(cudaGetLastError());
}

// A token may stand in many rows. Atomic additions would make the order of its sum a matter of chance, so the host sorts:
// order(rows) lists the rows by token, those of one token in order of time; those of the k-th distinct token begin at
// first(distinct + 1)[k]. Returns the number of distinct tokens. O(rows + V).
static int sort_rows(int* order, int* first, const int* tokens, size_t rows, size_t V) {
    int* at = (int*)calloc(V + 1, sizeof(int));         // of each token: its count, one place up; then where its next row goes
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
__global__ void embedding_backward_kernel(float* dwte, const int* tokens, const int* order, const int* first, const float* dx, float scale, int C) {
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
static void embedding_backward(float* dwte, const int* tokens, const int* order, const int* first, int distinct, const float* dx,
                               float scale, size_t C) {
    embedding_backward_kernel<<<dim3(distinct, blocks(C, 32)), 256>>>(dwte, tokens, order, first, dx, scale, (int)C);
    cudaCheck(cudaGetLastError());
}

// Sums over all rows, in two stages. A block takes 32 columns and one of `splits` equal pieces of the rows, and sums them as
// above; then one thread per column adds the pieces in order.
enum { SPLITS = 128 };
static size_t split_count(size_t rows) { return smin(SPLITS, (rows + 63) / 64); }

// partial(splits,C): sums of x(rows,C) over `piece` rows each
__global__ void sum_rows_kernel(float* partial, const floatX* x, size_t rows, size_t piece, int C) {
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
static void sum_rows(float* out, const floatX* x, size_t rows, size_t C) {
    size_t splits = split_count(rows), piece = (rows + splits - 1) / splits;
    sum_rows_kernel<<<dim3(blocks(C, 32), (unsigned)splits), 256>>>(workspace, x, rows, piece, (int)C);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(C, 64), 64>>>(out, workspace, (int)splits, (int)C);
    cudaCheck(cudaGetLastError());
}

// out(rows,C) += bias(C)
template <int N>
__global__ void add_bias_kernel(floatX* out, const float* bias, size_t rows, int C) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= rows * C) return;
    int c = i % C;
    Pack<floatX, N> x = load<N>(out + i);
    for (int k = 0; k < N; k++) x.v[k] = (floatX)((float)x.v[k] + bias[c + k]);
    store<N>(out + i, x);
}

// out(rows,OC) = inp(rows,IC) wᵀ + bias, w (OC,IC) with row stride ldw >= IC, so that w may be some columns of a wider
// matrix: W [x ; e] is computed as W_left x + W_right e (add = 1 for the second), and nothing is concatenated.
static void linear_forward(floatX* out, const floatX* inp, const floatX* w, const float* bias,
                           size_t rows, size_t IC, size_t OC, size_t ldw, int add) {
    matmul(out, inp, w, rows, OC, IC, OC, IC, ldw, 0, 1, 1, add);
    if (!bias) return;
    if (OC % 8 == 0) add_bias_kernel<8><<<blocks(rows * OC / 8, 256), 256>>>(out, bias, rows, (int)OC);
    else             add_bias_kernel<1><<<blocks(rows * OC, 256), 256>>>(out, bias, rows, (int)OC);
    cudaCheck(cudaGetLastError());
}

// out = inp wᵀ + bias  =>  dinp = dout w,  dw = doutᵀ inp,  dbias = sum of dout's rows (NULL: not wanted). dw and dbias are
// added to; dinp is with add = 1 and must be float then: one rounding to bf16 per term would be too many.
template <typename D>
static void linear_backward(D* dinp, float* dw, float* dbias, const floatX* dout, const floatX* inp, const floatX* w,
                            size_t rows, size_t IC, size_t OC, size_t ldw, int add) {
    matmul(dinp, dout, w, rows, IC, OC, IC, OC, ldw, 0, 0, 1, add);
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

// out = (x - mean) rstd w + b over each row of x (rows,C); mean, rstd (rows) are kept for the backward. w = b = NULL: n(.).
// A warp takes a row, 8 rows a block, and walks it three times; only the first time comes from memory, the others from cache.
template <int N, typename X>
__global__ void layernorm_forward_kernel(floatX* out, float* mean, float* rstd, const X* x, const float* w, const float* b, size_t rows, int C) {
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
static void layernorm_forward(floatX* out, float* mean, float* rstd, const X* x, const float* w, const float* b, size_t rows, size_t C) {
    if (C % 8 == 0) layernorm_forward_kernel<8, X><<<blocks(rows, 8), 256>>>(out, mean, rstd, x, w, b, rows, (int)C);
    else            layernorm_forward_kernel<1, X><<<blocks(rows, 8), 256>>>(out, mean, rstd, x, w, b, rows, (int)C);
    cudaCheck(cudaGetLastError());
}

// With n = (x - mean) rstd, g = dout w:  dx = rstd (g - mean(g) - n mean(g n)), written, or added with add = 1. A warp a row.
template <int N, typename D, typename X>
__global__ void layernorm_backward_kernel(D* dx, const float* dout, const X* x, const float* mean, const float* rstd, const float* w,
                                          size_t rows, int C, int add) {
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
// dw = sum over rows of dout n,  db = sum of dout: pieces of rows as in sum_rows_kernel. partial is (splits,C) for dw, then for db.
template <typename X>
__global__ void layernorm_backward_sums_kernel(float* partial, const float* dout, const X* x, const float* mean, const float* rstd,
                                               size_t rows, size_t piece, int C) {
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
static void layernorm_backward(D* dx, float* dw, float* db, const float* dout, const X* x, const float* mean, const float* rstd,
                               const float* w, size_t rows, size_t C, int add) {
    if (C % 8 == 0) layernorm_backward_kernel<8, D, X><<<blocks(rows, 8), 256>>>(dx, dout, x, mean, rstd, w, rows, (int)C, add);
    else            layernorm_backward_kernel<1, D, X><<<blocks(rows, 8), 256>>>(dx, dout, x, mean, rstd, w, rows, (int)C, add);
    cudaCheck(cudaGetLastError());
    if (!w) return;
    size_t splits = split_count(rows), piece = (rows + splits - 1) / splits;
    layernorm_backward_sums_kernel<X><<<dim3(blocks(C, 32), (unsigned)splits), 256>>>(workspace, dout, x, mean, rstd, rows, piece, (int)C);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(C, 64), 64>>>(dw, workspace, (int)splits, (int)C);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(C, 64), 64>>>(db, workspace + splits * C, (int)splits, (int)C);
    cudaCheck(cudaGetLastError());
}

// RMSNorm: out = x rstd w with rstd = (mean of x² + 1e-5)^-½, over each row of x (rows,C); rstd (rows) is kept. A warp a row.
template <int N, typename X>
__global__ void rmsnorm_forward_kernel(floatX* out, float* rstd, const X* x, const float* w, size_t rows, int C) {
    size_t r = (size_t)blockIdx.x * 8 + threadIdx.x / 32;
    int first = threadIdx.x % 32 * N;
    if (r >= rows) return;              // a whole warp leaves
    x += r * C;
    out += r * C;
    float v = 0;
    for (int c = first; c < C; c += 32 * N) {
        Pack<X, N> p = load<N>(x + c);
        for (int k = 0; k < N; k++) v += (float)p.v[k] * (float)p.v[k];
    }
    float s = 1 / sqrtf(warp_sum(v) / C + 1e-5f);
    for (int c = first; c < C; c += 32 * N) {
        Pack<X, N> p = load<N>(x + c);
        Pack<floatX, N> o;
        for (int k = 0; k < N; k++) o.v[k] = (floatX)((float)p.v[k] * s * w[c + k]);
        store<N>(out + c, o);
    }
    if (first == 0) rstd[r] = s;
}
template <typename X>
static void rmsnorm_forward(floatX* out, float* rstd, const X* x, const float* w, size_t rows, size_t C) {
    if (C % 8 == 0) rmsnorm_forward_kernel<8, X><<<blocks(rows, 8), 256>>>(out, rstd, x, w, rows, (int)C);
    else            rmsnorm_forward_kernel<1, X><<<blocks(rows, 8), 256>>>(out, rstd, x, w, rows, (int)C);
    cudaCheck(cudaGetLastError());
}

// With n = x rstd, g = dout w:  dx = rstd (g - n mean(g n)), written, or added with add = 1. A warp a row.
template <int N, typename D, typename X>
__global__ void rmsnorm_backward_kernel(D* dx, const float* dout, const X* x, const float* rstd, const float* w, size_t rows, int C, int add) {
    size_t r = (size_t)blockIdx.x * 8 + threadIdx.x / 32;
    int first = threadIdx.x % 32 * N;
    if (r >= rows) return;
    x += r * C;
    dx += r * C;
    dout += r * C;
    float s = rstd[r], gn_mean = 0;
    for (int c = first; c < C; c += 32 * N) {
        Pack<X, N> p = load<N>(x + c);
        Pack<float, N> d = load<N>(dout + c);
        for (int k = 0; k < N; k++) gn_mean += d.v[k] * w[c + k] * (float)p.v[k] * s;
    }
    gn_mean = warp_sum(gn_mean) / C;
    for (int c = first; c < C; c += 32 * N) {
        Pack<X, N> p = load<N>(x + c);
        Pack<float, N> d = load<N>(dout + c);
        Pack<D, N> o;
        if (add) o = load<N>(dx + c);
        for (int k = 0; k < N; k++) {
            float g = s * (d.v[k] * w[c + k] - (float)p.v[k] * s * gn_mean);
            o.v[k] = (D)(add ? (float)o.v[k] + g : g);
        }
        store<N>(dx + c, o);
    }
}
// dw = sum over rows of dout n: pieces of rows as in sum_rows_kernel
template <typename X>
__global__ void rmsnorm_backward_sums_kernel(float* partial, const float* dout, const X* x, const float* rstd, size_t rows, size_t piece, int C) {
    __shared__ float part[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    size_t begin = blockIdx.y * piece, end = begin + piece < rows ? begin + piece : rows;
    float sum = 0;
    if (c < C) for (size_t r = begin + warp; r < end; r += 8) sum += dout[r * C + c] * (float)x[r * C + c] * rstd[r];
    part[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int w = 1; w < 8; w++) sum += part[w][lane];
    partial[(size_t)blockIdx.y * C + c] = sum;
}
// dw is added to.
template <typename D, typename X>
static void rmsnorm_backward(D* dx, float* dw, const float* dout, const X* x, const float* rstd, const float* w, size_t rows, size_t C, int add) {
    if (C % 8 == 0) rmsnorm_backward_kernel<8, D, X><<<blocks(rows, 8), 256>>>(dx, dout, x, rstd, w, rows, (int)C, add);
    else            rmsnorm_backward_kernel<1, D, X><<<blocks(rows, 8), 256>>>(dx, dout, x, rstd, w, rows, (int)C, add);
    cudaCheck(cudaGetLastError());
    size_t splits = split_count(rows), piece = (rows + splits - 1) / splits;
    rmsnorm_backward_sums_kernel<X><<<dim3(blocks(C, 32), (unsigned)splits), 256>>>(workspace, dout, x, rstd, rows, piece, (int)C);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(C, 64), 64>>>(dw, workspace, (int)splits, (int)C);
    cudaCheck(cudaGetLastError());
}

// GELU as GPT-2 computes it:  out = z/2 (1 + tanh(k (z + 0.044715 z³))),  k = (2/π)^½,  z = za + bias(C) as for silu.
template <int N>
__global__ void gelu_forward_kernel(floatX* out, const floatX* za, const float* bias, size_t rows, int C) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= rows * C) return;
    int c = i % C;
    Pack<floatX, N> x = load<N>(za + i);
    for (int k = 0; k < N; k++) {
        float z = (float)x.v[k] + bias[c + k];
        x.v[k] = (floatX)(z / 2 * (1 + fast_tanh(0.7978845608f * (z + 0.044715f * z * z * z))));
    }
    store<N>(out + i, x);
}
static void gelu_forward(floatX* out, const floatX* za, const float* bias, size_t rows, size_t C) {
    if (C % 8 == 0) gelu_forward_kernel<8><<<blocks(rows * C / 8, 256), 256>>>(out, za, bias, rows, (int)C);
    else            gelu_forward_kernel<1><<<blocks(rows * C, 256), 256>>>(out, za, bias, rows, (int)C);
    cudaCheck(cudaGetLastError());
}

// d/dz = (1 + th)/2 + z/2 (1 - th²) k (1 + 3 · 0.044715 z²).  d is dout on entry and dz on return.
template <int N>
__global__ void gelu_backward_kernel(floatX* d, const floatX* za, const float* bias, size_t rows, int C) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= rows * C) return;
    int c = i % C;
    Pack<floatX, N> x = load<N>(za + i), g = load<N>(d + i);
    for (int k = 0; k < N; k++) {
        float z = (float)x.v[k] + bias[c + k], th = fast_tanh(0.7978845608f * (z + 0.044715f * z * z * z));
        float slope = (1 + th) / 2 + z / 2 * (1 - th * th) * 0.7978845608f * (1 + 0.134145f * z * z);
        g.v[k] = (floatX)((float)g.v[k] * slope);
    }
    store<N>(d + i, g);
}
static void gelu_backward(floatX* d, const floatX* za, const float* bias, size_t rows, size_t C) {
    if (C % 8 == 0) gelu_backward_kernel<8><<<blocks(rows * C / 8, 256), 256>>>(d, za, bias, rows, (int)C);
    else            gelu_backward_kernel<1><<<blocks(rows * C, 256), 256>>>(d, za, bias, rows, (int)C);
    cudaCheck(cudaGetLastError());
}

// SwiGLU's product:  out = silu(z) ⊙ up, all of n numbers
template <int N>
__global__ void swiglu_forward_kernel(floatX* out, const floatX* z, const floatX* up, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= n) return;
    Pack<floatX, N> a = load<N>(z + i), b = load<N>(up + i);
    for (int k = 0; k < N; k++) a.v[k] = (floatX)((float)a.v[k] * sigmoid((float)a.v[k]) * (float)b.v[k]);
    store<N>(out + i, a);
}
static void swiglu_forward(floatX* out, const floatX* z, const floatX* up, size_t rows, size_t C) {
    size_t n = rows * C;
    if (n % 8 == 0) swiglu_forward_kernel<8><<<blocks(n / 8, 256), 256>>>(out, z, up, n);
    else            swiglu_forward_kernel<1><<<blocks(n, 256), 256>>>(out, z, up, n);
    cudaCheck(cudaGetLastError());
}

// dup = dout silu(z),  dz = dout up silu'(z), with silu' = σ (1 + z (1 - σ)).  d is dout on entry and dz on return; dup is
// written.
template <int N>
__global__ void swiglu_backward_kernel(floatX* d, floatX* dup, const floatX* z, const floatX* up, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= n) return;
    Pack<floatX, N> a = load<N>(z + i), b = load<N>(up + i), g = load<N>(d + i);
    for (int k = 0; k < N; k++) {
        float x = (float)a.v[k], y = (float)b.v[k], dout = (float)g.v[k], sg = sigmoid(x);
        b.v[k] = (floatX)(dout * x * sg);
        g.v[k] = (floatX)(dout * y * sg * (1 + x * (1 - sg)));
    }
    store<N>(dup + i, b);
    store<N>(d + i, g);
}
static void swiglu_backward(floatX* d, floatX* dup, const floatX* z, const floatX* up, size_t rows, size_t C) {
    size_t n = rows * C;
    if (n % 8 == 0) swiglu_backward_kernel<8><<<blocks(n / 8, 256), 256>>>(d, dup, z, up, n);
    else            swiglu_backward_kernel<1><<<blocks(n, 256), 256>>>(d, dup, z, up, n);
    cudaCheck(cudaGetLastError());
}

// out = x + branch, all (rows,C): the residual stream goes on, in float, from a float or, after a norm, a floatX.
template <int N, typename X>
__global__ void add_kernel(float* out, const X* x, const floatX* branch, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= n) return;
    Pack<X, N> a = load<N>(x + i);
    Pack<floatX, N> b = load<N>(branch + i);
    Pack<float, N> o;
    for (int k = 0; k < N; k++) o.v[k] = (float)a.v[k] + (float)b.v[k];
    store<N>(out + i, o);
}
template <typename X>
static void add(float* out, const X* x, const floatX* branch, size_t rows, size_t C) {
    size_t n = rows * C;
    if (n % 8 == 0) add_kernel<8, X><<<blocks(n / 8, 256), 256>>>(out, x, branch, n);
    else            add_kernel<1, X><<<blocks(n, 256), 256>>>(out, x, branch, n);
    cudaCheck(cudaGetLastError());
}

// out = x, rounded
__global__ void round_kernel(floatX* out, const float* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = (floatX)x[i];
}
static void round_to(floatX* out, const float* x, size_t n) {
    round_kernel<<<blocks(n, 256), 256>>>(out, x, n);
    cudaCheck(cudaGetLastError());
}

// x (B,T,C) += wpe[past + t], a learned vector per position
template <typename X>
__global__ void positions_forward_kernel(X* x, const float* wpe, size_t past, size_t rows, size_t T, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * C) return;
    x[i] = (X)((float)x[i] + wpe[(past + i / C % T) * C + i % C]);
}
template <typename X>
static void positions_forward(X* x, const float* wpe, size_t past, size_t B, size_t T, size_t C) {
    positions_forward_kernel<X><<<blocks(B * T * C, 256), 256>>>(x, wpe, past, B * T, T, (int)C);
    cudaCheck(cudaGetLastError());
}

// dwpe[t] += sum over b of dx[b,t]: a thread a number, in the order of b
__global__ void positions_backward_kernel(float* dwpe, const float* dx, size_t B, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0;
    for (size_t b = 0; b < B; b++) sum += dx[b * n + i];
    dwpe[i] += sum;
}
static void positions_backward(float* dwpe, const float* dx, size_t B, size_t T, size_t C) {
    positions_backward_kernel<<<blocks(T * C, 256), 256>>>(dwpe, dx, B, T * C);
    cudaCheck(cudaGetLastError());
}

// The head and the loss, forward and backward in one pass over some rows at a time, so that the logits exist only
// for those rows: memory does not grow with T V.
//     logits = y headᵀ      loss = mean over rows with target >= 0 of  log sum_v e^logit_v - logit_target
//     dlogits = (softmax - onehot(target)) / count         dy = dlogits head      dhead += dlogitsᵀ y
// Rows of V numbers are kept padded to Vp, the next multiple of 64: with an odd V (GPT-2's 50257) no row but the first would
// start at an address from which 16 bytes can be loaded, and matmuls would lose several times their speed. head has
// Vp rows as well (params_layout leaves room), zeros, and dlogits are zero there.
enum { HEAD_ROWS = 4096, HEAD_BYTES = 1 << 29 };        // at most so many rows, and logits of at most half a gigabyte
static size_t padded_vocab(size_t V) { return (V + 63) / 64 * 64; }
static size_t head_rows(size_t rows, size_t V) {
    size_t fit = HEAD_BYTES / (padded_vocab(V) * sizeof(floatX)) / 64 * 64;
    return smin(rows, smin(HEAD_ROWS, fit ? fit : 64));
}

// One block per row. Logits (rows,Vp) become dlogits in place with train = 1; losses, hits (rows). Each thread keeps the maximum
// it has seen and the sum of e^(x - maximum), corrected whenever the maximum rises, so that the row is read once for
// both; a second reading writes the gradient.
__global__ void softmax_kernel(floatX* logits, float* losses, float* hits, const int* targets, float dloss, int V, int Vp, int train) {
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
// y (rows,C), dy (rows,C), head, dhead (Vp,C), targets (rows), `count` of them >= 0. Scratch: logits (head_rows,Vp), losses, hits
// (rows). dy == NULL: loss only. dy is written, dhead is added to; `scale` multiplies both (1/accum). Returns the mean
// loss in nats (0 where no row has a target); *correct receives how many targets had the largest logit.
static double head_loss(float* dy, float* dhead, const floatX* y, const floatX* head, const int* targets, size_t count, floatX* logits,
                        float* losses, float* hits, double scale, size_t rows, size_t C, size_t V, size_t* correct) {
    size_t Vp = padded_vocab(V), step = head_rows(rows, V);
    float dloss = count ? scale / count : 0;
    for (size_t r0 = 0; r0 < rows; r0 += step) {
        size_t n = smin(step, rows - r0);
        linear_forward(logits, y + r0 * C, head, NULL, n, C, Vp, C, 0);
        softmax_kernel<<<(unsigned)n, 512>>>(logits, losses + r0, hits + r0, targets + r0, dloss, (int)V, (int)Vp, dy != NULL);
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
// attention. Each row of qkv (B*T, W), W = (H + 2G) D, holds H query heads, G key heads and G value heads of D numbers:
// [q | k | v]. With G < H ("grouped queries") H/G neighbouring query heads share one key and value head.

enum { MAX_HEAD = 128 };        // the largest D: a thread keeps up to 2 x 64 numbers of it in registers

// Rotary positions (Su et al. 2021). The pair (x[i], x[i + D/2]) of every query and key is turned by the angle
// t 10000^(-2i/D): the product q_t·k_s then depends on t - s alone. table (T,D) holds the cosines, then the sines. Angles grow to
// T, and a float near 10^6 knows only steps of 0.06: they are made in double.
__global__ void rope_table_kernel(float* table, size_t past, size_t T, int D) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, t = i / (D / 2), pair = i % (D / 2);
    if (i >= T * (D / 2)) return;
    double angle = (double)(past + t) * pow(10000.0, -2.0 * pair / D);
    table[t * D + pair] = cos(angle);
    table[t * D + D / 2 + pair] = sin(angle);
}
static void rope_table(float* table, size_t past, size_t T, size_t D) {
    rope_table_kernel<<<blocks(T * (D / 2), 128), 128>>>(table, past, T, (int)D);
    cudaCheck(cudaGetLastError());
}

// Turns the first `heads` heads of every row of x (B*T, W) in place; with sign -1 it turns them back, which is also the
// backward pass, a rotation's transpose being its inverse. A thread a pair.
__global__ void rope_kernel(floatX* x, const float* table, float sign, size_t rows, size_t T, size_t W, int heads, int D) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, half = D / 2, r = i / (heads * half), pair = i % half;
    if (r >= rows) return;
    floatX *a = x + r * W + i / half % heads * D + pair, *b = a + half;
    float a_i = (float)*a, b_i = (float)*b, cosine = table[r % T * D + pair], sine = sign * table[r % T * D + half + pair];
    *a = (floatX)(a_i * cosine - b_i * sine);
    *b = (floatX)(b_i * cosine + a_i * sine);
}
static void rope(floatX* x, const float* table, int sign, size_t B, size_t T, size_t W, size_t heads, size_t D) {
    rope_kernel<<<blocks(B * T * heads * (D / 2), 256), 256>>>(x, table, sign, B * T, T, W, (int)heads, (int)D);
    cudaCheck(cudaGetLastError());
}

// Which keys a query sees: s <= t, with `window` the last `window` of them, with `block` those of t's own block (0: no such
// limit). For every query it is an interval [first_key(t), t], and for every key an interval of queries
// [s, last_query(s)], so no tile is looked at that does not count, and a window costs T · window.
__host__ __device__ static size_t first_key(size_t t, size_t window, size_t block) {
    size_t first = window && t + 1 > window ? t + 1 - window : 0, start = block ? t / block * block : 0;
    return first > start ? first : start;
}
__device__ static size_t last_query(size_t s, size_t T, size_t window, size_t block) {
    size_t last = T - 1;
    if (window && s + window - 1 < last) last = s + window - 1;
    if (block && s / block * block + block - 1 < last) last = s / block * block + block - 1;
    return last;
}

// The tools of all attention kernels. A block of 64 threads works with tiles of TILE rows (queries or keys) of one head in
// shared memory: TILE x 8N numbers, D <= 8N of them used, the rest 0, N = 4, 8 or 16. The threads stand 8 x 8 (ty, tx), and
// thread (ty, tx) has rows ty, ty+8, ty+16, ty+24 and columns tx, tx+8, ... of every result, in registers: once it has
// loaded 4 numbers of one factor and N of the other from shared memory it can do 4N multiply-adds. Rows are 8N + 1 numbers
// apart, so that the 8 different rows that a warp reads at once lie in different banks.
enum { TILE = 32, SQUARE = TILE + 1 };      // SQUARE: numbers from row to row of TILE x TILE scores

// What all of them must know of the shape
struct Heads { size_t B, T, H, G, D, W, window, block; };

// Bytes of shared memory for so many tiles and squares. More than 48 KB a block must be asked for.
template <typename Kernel>
static size_t shared_bytes(Kernel* kernel, int N, int tiles, int squares) {
    size_t bytes = (tiles * TILE * (8 * N + 1) + squares * TILE * SQUARE) * sizeof(float);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    return bytes;
}

// The map of linear attention, elu + 1: positive, so that sums of products can be divided by. And its derivative.
__device__ float phi(float x) { return x > 0 ? x + 1 : fast_exp(x); }
__device__ float phi_slope(float x) { return x > 0 ? 1 : fast_exp(x); }

// tile = scale * x, or phi(x) with `map`: n <= TILE rows of D numbers that lie `stride` apart. A warp loads a row at a time.
template <int N, typename F>
__device__ void tile_load(float* tile, const F* x, float scale, int map, int n, size_t stride, int D) {
    for (int i = threadIdx.x / 32; i < TILE; i += 2)
        for (int d = threadIdx.x % 32; d < 8 * N; d += 32) {
            float v = i < n && d < D ? (float)x[i * stride + d] : 0;
            tile[i * (8 * N + 1) + d] = i >= n || d >= D ? 0 : map ? phi(v) : scale * v;
        }
}

// z(row,column) += sum over d of a(row,d) b(column,d): TILE rows and TILE columns, two tiles
template <int N>
__device__ void tile_scores(float z[4][4], const float* a, const float* b, int D) {
    const float *x = a + threadIdx.x / 8 * (8 * N + 1), *y = b + threadIdx.x % 8 * (8 * N + 1);
    #pragma unroll 4
    for (int d = 0; d < D; d++)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) z[i][j] += x[8 * i * (8 * N + 1) + d] * y[8 * j * (8 * N + 1) + d];
}

// o(row,c) += sum over k < TILE of p(row,k) b(k,c): b a tile, p(row,k) = p[row * pi + k * pk]
template <int N>
__device__ void tile_add(float o[4][N], const float* p, int pi, int pk, const float* b) {
    const float *x = p + threadIdx.x / 8 * pi, *y = b + threadIdx.x % 8;
    #pragma unroll 4
    for (int k = 0; k < TILE; k++)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < N; j++) o[i][j] += x[8 * i * pi + k * pk] * y[k * (8 * N + 1) + 8 * j];
}

// o(row,c) += z(row,c - 32 piece) for the 32 columns of a piece. (Registers have no numbers at run time: every j asks if it is meant.)
template <int N>
__device__ void tile_columns(float o[4][N], const float z[4][4], int piece) {
    #pragma unroll
    for (int j = 0; j < N; j++)
        if (j / 4 == piece) for (int i = 0; i < 4; i++) o[i][j] += z[i][j % 4];
}

// o *= phi'(x), x as for tile_load
template <int N>
__device__ void tile_slope(float o[4][N], const floatX* x, int n, size_t stride, int D) {
    #pragma unroll
    for (int i = 0; i < 4; i++)
        #pragma unroll
        for (int j = 0; j < N; j++) {
            int row = threadIdx.x / 8 + 8 * i, c = threadIdx.x % 8 + 8 * j;
            if (row < n && c < D) o[i][j] *= phi_slope((float)x[row * stride + c]);
        }
}

// The thread's share of a result goes to x: n rows of D numbers, `stride` apart.
template <int N>
__device__ void tile_store(floatX* x, const float o[4][N], float scale, int n, size_t stride, int D) {
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < N; j++) {
            int row = threadIdx.x / 8 + 8 * i, c = threadIdx.x % 8 + 8 * j;
            if (row < n && c < D) x[row * stride + c] = (floatX)(scale * o[i][j]);
        }
}

// Sum, maximum over the 8 threads that share rows
__device__ float row_sum(float x) {
    for (int d = 4; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
__device__ float row_max(float x) {
    for (int d = 4; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

// Where a block works: sequence b, head h of `heads`, rows t .. t+n-1. Late rows have most keys before them, so they come first.
struct Spot { size_t b, h, t; int n; };
__device__ Spot spot(Heads a, size_t heads) {
    Spot s;
    size_t tiles = (a.T + TILE - 1) / TILE, i = blockIdx.x;
    s.h = i % heads;
    s.b = i / heads % a.B;
    s.t = (tiles - 1 - i / heads / a.B) * TILE;
    s.n = a.T - s.t < TILE ? (int)(a.T - s.t) : (int)TILE;
    return s;
}
static unsigned spots(Heads a, size_t heads) { return (unsigned)((a.T + TILE - 1) / TILE * a.B * heads); }

// Softmax attention. For every head, with k and v of its group:
//     o_t = sum_s p_ts v_s      p_ts = e^(z_ts - lse_t)      z_ts = q_t·k_s D^-½      lse_t = log sum_s e^z_ts
// A block takes 32 queries of a head and walks their keys, 32 at a time. Where a larger z turns up than any before ("top"),
// what has been summed so far is scaled down to it (Milakov & Gimelshein 2018; FlashAttention).
template <int N>
__global__ void __launch_bounds__(64, 4) attention_forward_kernel(floatX* out, float* lse, const floatX* qkv, Heads a) {
    extern __shared__ float shared[];
    float *q = shared, *kv = q + TILE * (8 * N + 1), *p = kv + TILE * (8 * N + 1);
    Spot at = spot(a, a.H);
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    const floatX *rows = qkv + at.b * a.T * a.W, *keys = rows + (a.H + at.h / (a.H / a.G)) * a.D, *values = keys + a.G * a.D;
    tile_load<N>(q, rows + at.t * a.W + at.h * a.D, rsqrtf(a.D), 0, at.n, a.W, a.D);
    float o[4][N] = {}, top[4], sum[4] = {};
    for (int i = 0; i < 4; i++) top[i] = -1e30f;                // not -inf: inf - inf is no number
    for (size_t k0 = first_key(at.t, a.window, a.block); k0 < at.t + at.n; k0 += TILE) {
        int w = at.t + at.n - k0 < TILE ? (int)(at.t + at.n - k0) : (int)TILE;
        float z[4][4] = {};
        __syncthreads();                                        // the values of the last step are used up
        tile_load<N>(kv, keys + k0 * a.W, 1, 0, w, a.W, a.D);
        __syncthreads();
        tile_scores<N>(z, q, kv, a.D);
        __syncthreads();                                        // and so are the keys
        tile_load<N>(kv, values + k0 * a.W, 1, 0, w, a.W, a.D);
        for (int i = 0; i < 4; i++) {
            size_t t = at.t + ty + 8 * i, first = first_key(t, a.window, a.block);
            float larger = top[i], part = 0;
            for (int j = 0; j < 4; j++) {
                size_t s = k0 + tx + 8 * j;
                if (s > t || s < first) z[i][j] = -INFINITY;
                larger = fmaxf(larger, z[i][j]);
            }
            larger = row_max(larger);
            for (int j = 0; j < 4; j++) {
                float e = expf(z[i][j] - larger);
                p[(ty + 8 * i) * SQUARE + tx + 8 * j] = e;
                part += e;
            }
            float shrink = expf(top[i] - larger);
            sum[i] = sum[i] * shrink + row_sum(part);
            top[i] = larger;
            for (int j = 0; j < N; j++) o[i][j] *= shrink;
        }
        __syncthreads();
        tile_add<N>(o, p, SQUARE, 1, kv);
    }
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < N; j++) o[i][j] /= sum[i];
        int row = ty + 8 * i;
        if (row < at.n && tx == 0) lse[(at.b * a.T + at.t + row) * a.H + at.h] = top[i] + logf(sum[i]);
    }
    tile_store<N>(out + ((at.b * a.T + at.t) * a.H + at.h) * a.D, o, 1, at.n, a.H * a.D, a.D);
}
static void attention_forward(floatX* out, float* lse, const floatX* qkv, size_t window, size_t block, size_t B, size_t T, size_t H, size_t G, size_t D) {
    Heads a = {B, T, H, G, D, (H + 2 * G) * D, window, block};
    unsigned n = spots(a, H);
    if (D <= 32)      attention_forward_kernel<4><<<n, 64, shared_bytes(attention_forward_kernel<4>, 4, 2, 1)>>>(out, lse, qkv, a);
    else if (D <= 64) attention_forward_kernel<8><<<n, 64, shared_bytes(attention_forward_kernel<8>, 8, 2, 1)>>>(out, lse, qkv, a);
    else              attention_forward_kernel<16><<<n, 64, shared_bytes(attention_forward_kernel<16>, 16, 2, 1)>>>(out, lse, qkv, a);
    cudaCheck(cudaGetLastError());
}

// With do_t given, and p recomputed from lse (derived in the .c):
//     dv_s = sum_t p_ts do_t        dp_ts = do_t·v_s        dz_ts = p_ts (dp_ts - delta_t),   delta_t = do_t·o_t
//     dq_t = D^-½ sum_s dz_ts k_s   dk_s = D^-½ sum_t dz_ts q_t
// First kernel: dq and delta of 32 queries, whose keys it walks.
template <int N>
__global__ void __launch_bounds__(64, 4) attention_backward_q_kernel(floatX* dqkv, float* delta, const floatX* dout, const floatX* out,
                                                                  const float* lse, const floatX* qkv, Heads a) {
    extern __shared__ float shared[];
    float *q = shared, *d_o = q + TILE * (8 * N + 1), *k = d_o + TILE * (8 * N + 1), *v = k + TILE * (8 * N + 1), *dz = v + TILE * (8 * N + 1);
    Spot at = spot(a, a.H);
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    size_t r0 = at.b * a.T + at.t, C = a.H * a.D;
    const floatX *rows = qkv + at.b * a.T * a.W, *keys = rows + (a.H + at.h / (a.H / a.G)) * a.D, *values = keys + a.G * a.D;
    float scale = rsqrtf(a.D), dq[4][N] = {}, l[4] = {}, dl[4] = {};
    tile_load<N>(q, rows + at.t * a.W + at.h * a.D, scale, 0, at.n, a.W, a.D);
    tile_load<N>(d_o, dout + r0 * C + at.h * a.D, 1, 0, at.n, C, a.D);
    __syncthreads();
    for (int i = 0; i < 4; i++) {
        int row = ty + 8 * i;
        if (row < at.n) {
            for (int d = tx; d < (int)a.D; d += 8) dl[i] += d_o[row * (8 * N + 1) + d] * (float)out[(r0 + row) * C + at.h * a.D + d];
            l[i] = lse[(r0 + row) * a.H + at.h];
        }
        dl[i] = row_sum(dl[i]);
        if (row < at.n && tx == 0) delta[(r0 + row) * a.H + at.h] = dl[i];
    }
    for (size_t k0 = first_key(at.t, a.window, a.block); k0 < at.t + at.n; k0 += TILE) {
        int w = at.t + at.n - k0 < TILE ? (int)(at.t + at.n - k0) : (int)TILE;
        float z[4][4] = {}, dp[4][4] = {};
        __syncthreads();                                        // the tiles of the last step are used up
        tile_load<N>(k, keys + k0 * a.W, 1, 0, w, a.W, a.D);
        tile_load<N>(v, values + k0 * a.W, 1, 0, w, a.W, a.D);
        __syncthreads();
        tile_scores<N>(z, q, k, a.D);
        tile_scores<N>(dp, d_o, v, a.D);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                size_t t = at.t + ty + 8 * i, s = k0 + tx + 8 * j;
                int seen = s <= t && s >= first_key(t, a.window, a.block);
                dz[(ty + 8 * i) * SQUARE + tx + 8 * j] = seen ? expf(z[i][j] - l[i]) * (dp[i][j] - dl[i]) : 0;
            }
        __syncthreads();
        tile_add<N>(dq, dz, SQUARE, 1, k);
    }
    tile_store<N>(dqkv + r0 * a.W + at.h * a.D, dq, scale, at.n, a.W, a.D);
}
// Second kernel: dk and dv of 32 keys, which walk the queries that see them, of every head of their group.
template <int N>
__global__ void __launch_bounds__(64, 4) attention_backward_kv_kernel(floatX* dqkv, const float* delta, const floatX* dout, const float* lse,
                                                                   const floatX* qkv, Heads a) {
    extern __shared__ float shared[];
    float *k = shared, *v = k + TILE * (8 * N + 1), *q = v + TILE * (8 * N + 1), *d_o = q + TILE * (8 * N + 1);
    float *p = d_o + TILE * (8 * N + 1), *dz = p + TILE * SQUARE;
    Spot at = spot(a, a.G);
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    size_t C = a.H * a.D, end = last_query(at.t + at.n - 1, a.T, a.window, a.block) + 1;
    const floatX *rows = qkv + at.b * a.T * a.W, *keys = rows + (a.H + at.h) * a.D;
    float scale = rsqrtf(a.D), dk[4][N] = {}, dv[4][N] = {};
    tile_load<N>(k, keys + at.t * a.W, scale, 0, at.n, a.W, a.D);
    tile_load<N>(v, keys + a.G * a.D + at.t * a.W, 1, 0, at.n, a.W, a.D);
    for (size_t h = at.h * (a.H / a.G); h < (at.h + 1) * (a.H / a.G); h++)
        for (size_t q0 = at.t; q0 < end; q0 += TILE) {
            int w = end - q0 < TILE ? (int)(end - q0) : (int)TILE;
            size_t r0 = at.b * a.T + q0;
            float z[4][4] = {}, dp[4][4] = {};
            __syncthreads();
            tile_load<N>(q, rows + q0 * a.W + h * a.D, 1, 0, w, a.W, a.D);
            tile_load<N>(d_o, dout + r0 * C + h * a.D, 1, 0, w, C, a.D);
            __syncthreads();
            tile_scores<N>(z, k, q, a.D);                       // rows are keys here, columns queries
            tile_scores<N>(dp, v, d_o, a.D);
            for (int j = 0; j < 4; j++) {
                int column = tx + 8 * j;
                size_t t = q0 + column, first = first_key(t, a.window, a.block);
                float l = column < w ? lse[(r0 + column) * a.H + h] : 0, dl = column < w ? delta[(r0 + column) * a.H + h] : 0;
                for (int i = 0; i < 4; i++) {
                    size_t s = at.t + ty + 8 * i;
                    float e = column < w && s <= t && s >= first ? expf(z[i][j] - l) : 0;
                    p[(ty + 8 * i) * SQUARE + column] = e;
                    dz[(ty + 8 * i) * SQUARE + column] = e * (dp[i][j] - dl);
                }
            }
            __syncthreads();
            tile_add<N>(dv, p, SQUARE, 1, d_o);
            tile_add<N>(dk, dz, SQUARE, 1, q);
        }
    floatX* dkeys = dqkv + (at.b * a.T + at.t) * a.W + (a.H + at.h) * a.D;
    tile_store<N>(dkeys, dk, scale, at.n, a.W, a.D);
    tile_store<N>(dkeys + a.G * a.D, dv, 1, at.n, a.W, a.D);
}
// dqkv (B*T, W) is written; delta (B*T, H) is scratch.
static void attention_backward(floatX* dqkv, float* delta, const floatX* dout, const floatX* out, const float* lse, const floatX* qkv,
                               size_t window, size_t block, size_t B, size_t T, size_t H, size_t G, size_t D) {
    Heads a = {B, T, H, G, D, (H + 2 * G) * D, window, block};
    unsigned n = spots(a, H), m = spots(a, G);
    if (D <= 32)      attention_backward_q_kernel<4><<<n, 64, shared_bytes(attention_backward_q_kernel<4>, 4, 4, 1)>>>(dqkv, delta, dout, out, lse, qkv, a);
    else if (D <= 64) attention_backward_q_kernel<8><<<n, 64, shared_bytes(attention_backward_q_kernel<8>, 8, 4, 1)>>>(dqkv, delta, dout, out, lse, qkv, a);
    else              attention_backward_q_kernel<16><<<n, 64, shared_bytes(attention_backward_q_kernel<16>, 16, 4, 1)>>>(dqkv, delta, dout, out, lse, qkv, a);
    cudaCheck(cudaGetLastError());
    if (D <= 32)      attention_backward_kv_kernel<4><<<m, 64, shared_bytes(attention_backward_kv_kernel<4>, 4, 4, 2)>>>(dqkv, delta, dout, lse, qkv, a);
    else if (D <= 64) attention_backward_kv_kernel<8><<<m, 64, shared_bytes(attention_backward_kv_kernel<8>, 8, 4, 2)>>>(dqkv, delta, dout, lse, qkv, a);
    else              attention_backward_kv_kernel<16><<<m, 64, shared_bytes(attention_backward_kv_kernel<16>, 16, 4, 2)>>>(dqkv, delta, dout, lse, qkv, a);
    cudaCheck(cudaGetLastError());
}

// One token's attention, for generation: its own q, and the keys and values [k | v] (2 G D) of all tokens so far, of which
// token s lies in cache[s % room]. t: the token's place. A block takes a head; its 8 warps take every 8th token each, a lane
// every 32nd number of the head, with a softmax of their own; the first threads put the 8 together.
__global__ void attention_step_kernel(floatX* out, const floatX* q, const floatX* cache, size_t room, size_t t, size_t first, Heads a) {
    __shared__ float part[8][MAX_HEAD];
    __shared__ float tops[8];
    __shared__ float sums[8];
    size_t h = blockIdx.x;
    int D = a.D, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const floatX *qh = q + h * D, *kv = cache + h / (a.H / a.G) * D;
    float o[MAX_HEAD / 32] = {}, top = -1e30f, sum = 0;
    for (size_t s = first + warp; s <= t; s += 8) {
        const floatX *k = kv + s % room * 2 * a.G * D, *v = k + a.G * D;
        float z = 0;
        for (int d = lane; d < D; d += 32) z += (float)qh[d] * (float)k[d];
        z = warp_sum(z) * rsqrtf(D);
        float larger = fmaxf(top, z), shrink = expf(top - larger), e = expf(z - larger);
        top = larger;
        sum = sum * shrink + e;
        for (int i = 0; i < MAX_HEAD / 32; i++) if (lane + 32 * i < D) o[i] = o[i] * shrink + e * (float)v[lane + 32 * i];
    }
    for (int i = 0; i < MAX_HEAD / 32; i++) part[warp][lane + 32 * i] = o[i];
    if (lane == 0) { tops[warp] = top; sums[warp] = sum; }
    __syncthreads();
    if ((int)threadIdx.x >= D) return;
    for (int w = 0; w < 8; w++) top = fmaxf(top, tops[w]);
    float total = 0, value = 0;
    for (int w = 0; w < 8; w++) {
        float shrink = expf(tops[w] - top);
        total += shrink * sums[w];
        value += shrink * part[w][threadIdx.x];
    }
    out[h * D + threadIdx.x] = (floatX)(value / total);
}
static void attention_step(floatX* out, const floatX* q, const floatX* cache, size_t room, size_t t, size_t first, size_t H, size_t G, size_t D) {
    Heads a = {1, 1, H, G, D, (H + 2 * G) * D, 0, 0};
    attention_step_kernel<<<(unsigned)H, 256>>>(out, q, cache, room, t, first, a);
    cudaCheck(cudaGetLastError());
}

// Linear attention (Katharopoulos et al. 2020): with φ(q)·φ(k) in the place of e^(q·k) the sum over the past is a state
//     S_t = S_{t-1} + φ(k_t) v_tᵀ  (D,D)       z_t = z_{t-1} + φ(k_t)  (D)       den_t = φ(q_t)·z_t
//     o_t = S_tᵀ φ(q_t) / max(den_t, LEAST)
// and time costs O(T). The .c walks it token by token; here time is cut into chunks of 64 tokens:
//   1. sums:   every chunk's own sum of φ(k) vᵀ and φ(k), a block for 32 rows of it;
//   2. carry:  what stands before each chunk, added up chunk by chunk, a thread a number;
//   3. apply:  a block takes 32 queries. o_t is S before the chunk, times φ(q_t), and the keys of the chunk itself up to t, by
//              scores φ(q_t)·φ(k_s) as in softmax attention.
enum { LINEAR_CHUNK = 64 };
static const float LEAST = 1e-6f;       // what the sum is held above before a division

// Floats of all chunks' sums, and of one
static size_t linear_attention_workspace(size_t B, size_t T, size_t G, size_t D) {
    return B * G * ((T + LINEAR_CHUNK - 1) / LINEAR_CHUNK) * (D + 1) * D;
}

// sums(B,G,chunks,D+1,D), S and then z: over the chunk's tokens and the `heads` heads of group g, φ(left) rightᵀ and
// weight φ(left) (weight NULL: 1). left, right: rows of head g * heads + k begin D (g * heads + k) into rows of ldl, ldr.
template <int N>
__global__ void __launch_bounds__(64, 4) linear_sums_kernel(float* sums, const floatX* left, size_t ldl, const floatX* right, size_t ldr,
                                                         const float* weight, int heads, Heads a) {
    extern __shared__ float shared[];
    float *l = shared, *r = l + TILE * (8 * N + 1);
    size_t pieces = (a.D + TILE - 1) / TILE, chunks = (a.T + LINEAR_CHUNK - 1) / LINEAR_CHUNK, i = blockIdx.x;
    size_t d0 = i % pieces * TILE, chunk = i / pieces % chunks, g = i / pieces / chunks % a.G, b = i / pieces / chunks / a.G;
    size_t begin = chunk * LINEAR_CHUNK, end = begin + LINEAR_CHUNK < a.T ? begin + LINEAR_CHUNK : a.T;
    float o[4][N] = {}, z = 0;
    for (size_t h = g * heads; h < (g + 1) * heads; h++)
        for (size_t t = begin; t < end; t += TILE) {
            int n = end - t < TILE ? (int)(end - t) : (int)TILE;
            size_t row = b * a.T + t;
            __syncthreads();
            tile_load<N>(l, left + row * ldl + h * a.D, 1, 1, n, ldl, a.D);
            tile_load<N>(r, right + row * ldr + h * a.D, 1, 0, n, ldr, a.D);
            __syncthreads();
            tile_add<N>(o, l + d0, 1, 8 * N + 1, r);            // the transpose of l
            if (threadIdx.x < TILE)
                for (int k = 0; k < n; k++) z += l[k * (8 * N + 1) + d0 + threadIdx.x] * (weight ? weight[(row + k) * a.H + h] : 1);
        }
    float* to = sums + ((b * a.G + g) * chunks + chunk) * (a.D + 1) * a.D;
    for (int k = 0; k < 4; k++)
        for (int j = 0; j < N; j++) {
            size_t d = d0 + threadIdx.x / 8 + 8 * k, c = threadIdx.x % 8 + 8 * j;
            if (d < a.D && c < a.D) to[d * a.D + c] = o[k][j];
        }
    if (threadIdx.x < TILE && d0 + threadIdx.x < a.D) to[a.D * a.D + d0 + threadIdx.x] = z;
}
// Each chunk's sum becomes what stands before it: from state (M for each of n), which receives the end; or from 0 where it is
// NULL. With `reverse` time runs backward.
__global__ void linear_carry_kernel(float* sums, float* state, size_t n, size_t chunks, size_t M, int reverse) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n * M) return;
    float s = state ? state[i] : 0;
    for (size_t k = 0; k < chunks; k++) {
        float* at = sums + (i / M * chunks + (reverse ? chunks - 1 - k : k)) * M + i % M;
        float own = *at;
        *at = s;
        s += own;
    }
    if (state) state[i] = s;
}
static void linear_sums(float* sums, const floatX* left, size_t ldl, const floatX* right, size_t ldr, const float* weight, int heads, float* state,
                        int reverse, Heads a) {
    size_t chunks = (a.T + LINEAR_CHUNK - 1) / LINEAR_CHUNK, M = (a.D + 1) * a.D;
    unsigned n = (unsigned)((a.D + TILE - 1) / TILE * chunks * a.G * a.B);
    if (a.D <= 32)      linear_sums_kernel<4><<<n, 64, shared_bytes(linear_sums_kernel<4>, 4, 2, 0)>>>(sums, left, ldl, right, ldr, weight, heads, a);
    else if (a.D <= 64) linear_sums_kernel<8><<<n, 64, shared_bytes(linear_sums_kernel<8>, 8, 2, 0)>>>(sums, left, ldl, right, ldr, weight, heads, a);
    else                linear_sums_kernel<16><<<n, 64, shared_bytes(linear_sums_kernel<16>, 16, 2, 0)>>>(sums, left, ldl, right, ldr, weight, heads, a);
    cudaCheck(cudaGetLastError());
    linear_carry_kernel<<<blocks(a.B * a.G * M, 64), 64>>>(sums, state, a.B * a.G, chunks, M, reverse);
    cudaCheck(cudaGetLastError());
}

template <int N>
__global__ void __launch_bounds__(64, 4) linear_attention_forward_kernel(floatX* out, float* den, const floatX* qkv, const float* sums, Heads a) {
    extern __shared__ float shared[];
    float *q = shared, *k = q + TILE * (8 * N + 1), *v = k + TILE * (8 * N + 1), *p = v + TILE * (8 * N + 1);
    Spot at = spot(a, a.H);
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    size_t g = at.h / (a.H / a.G), chunks = (a.T + LINEAR_CHUNK - 1) / LINEAR_CHUNK, chunk = at.t / LINEAR_CHUNK;
    const floatX *rows = qkv + at.b * a.T * a.W, *keys = rows + (a.H + g) * a.D, *values = keys + a.G * a.D;
    const float *S = sums + ((at.b * a.G + g) * chunks + chunk) * (a.D + 1) * a.D, *z = S + a.D * a.D;
    tile_load<N>(q, rows + at.t * a.W + at.h * a.D, 1, 1, at.n, a.W, a.D);
    float o[4][N] = {}, sum[4] = {};
    for (size_t d0 = 0; d0 < a.D; d0 += TILE) {                 // the chunks before, 32 rows of S at a time
        __syncthreads();
        tile_load<N>(v, S + d0 * a.D, 1, 0, a.D - d0 < TILE ? (int)(a.D - d0) : (int)TILE, a.D, a.D);
        __syncthreads();
        tile_add<N>(o, q + d0, 8 * N + 1, 1, v);
    }
    for (int i = 0; i < 4; i++)
        for (int d = tx; d < (int)a.D; d += 8) sum[i] += q[(ty + 8 * i) * (8 * N + 1) + d] * z[d];
    for (size_t k0 = chunk * LINEAR_CHUNK; k0 <= at.t; k0 += TILE) {
        int w = at.t + at.n - k0 < TILE ? (int)(at.t + at.n - k0) : (int)TILE;
        float scores[4][4] = {};
        __syncthreads();
        tile_load<N>(k, keys + k0 * a.W, 1, 1, w, a.W, a.D);
        tile_load<N>(v, values + k0 * a.W, 1, 0, w, a.W, a.D);
        __syncthreads();
        tile_scores<N>(scores, q, k, a.D);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                float x = k0 + tx + 8 * j <= at.t + ty + 8 * i ? scores[i][j] : 0;
                p[(ty + 8 * i) * SQUARE + tx + 8 * j] = x;
                sum[i] += x;
            }
        __syncthreads();
        tile_add<N>(o, p, SQUARE, 1, v);
    }
    for (int i = 0; i < 4; i++) {
        sum[i] = row_sum(sum[i]);
        for (int j = 0; j < N; j++) o[i][j] /= sum[i] > LEAST ? sum[i] : LEAST;
        int row = ty + 8 * i;
        if (row < at.n && tx == 0) den[(at.b * a.T + at.t + row) * a.H + at.h] = sum[i];
    }
    tile_store<N>(out + ((at.b * a.T + at.t) * a.H + at.h) * a.D, o, 1, at.n, a.H * a.D, a.D);
}
// out (B*T, H D), den (B*T, H). state (B,G,D+1,D), S and then z, is where the sums start and where they end; NULL: from 0.
static void linear_attention_forward(floatX* out, float* den, float* state, const floatX* qkv, size_t B, size_t T, size_t H, size_t G, size_t D) {
    Heads a = {B, T, H, G, D, (H + 2 * G) * D, 0, 0};
    unsigned n = spots(a, H);
    linear_sums(workspace, qkv + H * D, a.W, qkv + (H + G) * D, a.W, NULL, 1, state, 0, a);
    if (D <= 32)      linear_attention_forward_kernel<4><<<n, 64, shared_bytes(linear_attention_forward_kernel<4>, 4, 3, 1)>>>(out, den, qkv, workspace, a);
    else if (D <= 64) linear_attention_forward_kernel<8><<<n, 64, shared_bytes(linear_attention_forward_kernel<8>, 8, 3, 1)>>>(out, den, qkv, workspace, a);
    else              linear_attention_forward_kernel<16><<<n, 64, shared_bytes(linear_attention_forward_kernel<16>, 16, 3, 1)>>>(out, den, qkv, workspace, a);
    cudaCheck(cudaGetLastError());
}

// With n_t = do_t / max(den_t, LEAST) the gradient of S_tᵀ φ(q_t), and m_t = -n_t·o_t that of den_t (0 where it was held):
//     dφ(q_t) = S_t n_t + m_t z_t                                 S, z once more forward in time
//     U_s = U_{s+1} + φ(q_s) n_sᵀ      u_s = u_{s+1} + m_s φ(q_s)  the gradients of S and z, backward in time
//     dφ(k_s) = U_s v_s + u_s          dv_s = U_sᵀ φ(k_s)
// Within a chunk both dφ come from the scores n_t·v_s + m_t. First n, in the place of do, and m (B*T, H): a warp a head.
__global__ void linear_attention_divide_kernel(floatX* dout, float* m, const floatX* out, const float* den, size_t n, int D) {
    size_t i = (size_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (i >= n) return;
    float sum = den[i], divide = 1 / (sum > LEAST ? sum : LEAST), dot = 0;
    for (int d = threadIdx.x % 32; d < D; d += 32) {
        float x = (float)dout[i * D + d] * divide;
        dot += x * (float)out[i * D + d];
        dout[i * D + d] = (floatX)x;
    }
    dot = warp_sum(dot);
    if (threadIdx.x % 32 == 0) m[i] = sum > LEAST ? -dot : 0;
}
// dq of 32 queries, from S before the chunk and the chunk's own keys.
template <int N>
__global__ void __launch_bounds__(64, 4) linear_attention_backward_q_kernel(floatX* dqkv, const floatX* dout, const float* m, const floatX* qkv,
                                                                         const float* sums, Heads a) {
    extern __shared__ float shared[];
    float *n = shared, *k = n + TILE * (8 * N + 1), *v = k + TILE * (8 * N + 1), *p = v + TILE * (8 * N + 1);
    Spot at = spot(a, a.H);
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    size_t r0 = at.b * a.T + at.t, g = at.h / (a.H / a.G), chunks = (a.T + LINEAR_CHUNK - 1) / LINEAR_CHUNK, chunk = at.t / LINEAR_CHUNK;
    const floatX *rows = qkv + at.b * a.T * a.W, *keys = rows + (a.H + g) * a.D, *values = keys + a.G * a.D;
    const float *S = sums + ((at.b * a.G + g) * chunks + chunk) * (a.D + 1) * a.D, *z = S + a.D * a.D;
    float dq[4][N] = {}, m_t[4];
    tile_load<N>(n, dout + (r0 * a.H + at.h) * a.D, 1, 0, at.n, a.H * a.D, a.D);
    for (int i = 0; i < 4; i++) {
        m_t[i] = ty + 8 * i < at.n ? m[(r0 + ty + 8 * i) * a.H + at.h] : 0;
        for (int j = 0; j < N; j++) dq[i][j] = tx + 8 * j < (int)a.D ? m_t[i] * z[tx + 8 * j] : 0;
    }
    for (int piece = 0; piece < N / 4; piece++) {               // S n: 32 rows of S, and so 32 columns of dq, at a time
        int d0 = piece * TILE, left = (int)a.D - d0;
        float x[4][4] = {};
        __syncthreads();
        tile_load<N>(v, S + d0 * a.D, 1, 0, left < TILE ? left : (int)TILE, a.D, a.D);
        __syncthreads();
        tile_scores<N>(x, n, v, a.D);
        tile_columns<N>(dq, x, piece);
    }
    for (size_t k0 = chunk * LINEAR_CHUNK; k0 <= at.t; k0 += TILE) {
        int w = at.t + at.n - k0 < TILE ? (int)(at.t + at.n - k0) : (int)TILE;
        float x[4][4] = {};
        __syncthreads();
        tile_load<N>(k, keys + k0 * a.W, 1, 1, w, a.W, a.D);
        tile_load<N>(v, values + k0 * a.W, 1, 0, w, a.W, a.D);
        __syncthreads();
        tile_scores<N>(x, n, v, a.D);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++)
                p[(ty + 8 * i) * SQUARE + tx + 8 * j] = k0 + tx + 8 * j <= at.t + ty + 8 * i ? x[i][j] + m_t[i] : 0;
        __syncthreads();
        tile_add<N>(dq, p, SQUARE, 1, k);
    }
    tile_slope<N>(dq, rows + at.t * a.W + at.h * a.D, at.n, a.W, a.D);
    tile_store<N>(dqkv + r0 * a.W + at.h * a.D, dq, 1, at.n, a.W, a.D);
}
// dk and dv of 32 keys, from U behind the chunk and the chunk's own queries, of every head of the group.
template <int N>
__global__ void __launch_bounds__(64, 4) linear_attention_backward_kv_kernel(floatX* dqkv, const floatX* dout, const float* m, const floatX* qkv,
                                                                          const float* sums, Heads a) {
    extern __shared__ float shared[];
    float *k = shared, *v = k + TILE * (8 * N + 1), *q = v + TILE * (8 * N + 1), *n = q + TILE * (8 * N + 1);
    float *p = n + TILE * (8 * N + 1), *dp = p + TILE * SQUARE;
    Spot at = spot(a, a.G);
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    size_t chunks = (a.T + LINEAR_CHUNK - 1) / LINEAR_CHUNK, chunk = at.t / LINEAR_CHUNK, end = (chunk + 1) * LINEAR_CHUNK;
    if (end > a.T) end = a.T;
    const floatX *rows = qkv + at.b * a.T * a.W, *keys = rows + (a.H + at.h) * a.D;
    const float *U = sums + ((at.b * a.G + at.h) * chunks + chunk) * (a.D + 1) * a.D, *u = U + a.D * a.D;
    float dk[4][N], dv[4][N] = {};
    tile_load<N>(k, keys + at.t * a.W, 1, 1, at.n, a.W, a.D);
    tile_load<N>(v, keys + a.G * a.D + at.t * a.W, 1, 0, at.n, a.W, a.D);
    for (int i = 0; i < 4; i++) for (int j = 0; j < N; j++) dk[i][j] = tx + 8 * j < (int)a.D ? u[tx + 8 * j] : 0;
    for (int piece = 0; piece < N / 4; piece++) {
        int d0 = piece * TILE, left = (int)a.D - d0;
        float x[4][4] = {};
        __syncthreads();
        tile_load<N>(q, U + d0 * a.D, 1, 0, left < TILE ? left : (int)TILE, a.D, a.D);
        __syncthreads();
        tile_scores<N>(x, v, q, a.D);
        tile_columns<N>(dk, x, piece);
        tile_add<N>(dv, k + d0, 8 * N + 1, 1, q);
    }
    for (size_t h = at.h * (a.H / a.G); h < (at.h + 1) * (a.H / a.G); h++)
        for (size_t q0 = at.t; q0 < end; q0 += TILE) {
            int w = end - q0 < TILE ? (int)(end - q0) : (int)TILE;
            size_t r0 = at.b * a.T + q0;
            float x[4][4] = {}, e[4][4] = {};
            __syncthreads();
            tile_load<N>(q, rows + q0 * a.W + h * a.D, 1, 1, w, a.W, a.D);
            tile_load<N>(n, dout + (r0 * a.H + h) * a.D, 1, 0, w, a.H * a.D, a.D);
            __syncthreads();
            tile_scores<N>(x, v, n, a.D);
            tile_scores<N>(e, k, q, a.D);
            for (int j = 0; j < 4; j++) {
                int column = tx + 8 * j;
                float m_t = column < w ? m[(r0 + column) * a.H + h] : 0;
                for (int i = 0; i < 4; i++) {
                    int seen = column < w && at.t + ty + 8 * i <= q0 + column;
                    p[(ty + 8 * i) * SQUARE + column] = seen ? e[i][j] : 0;
                    dp[(ty + 8 * i) * SQUARE + column] = seen ? x[i][j] + m_t : 0;
                }
            }
            __syncthreads();
            tile_add<N>(dv, p, SQUARE, 1, n);
            tile_add<N>(dk, dp, SQUARE, 1, q);
        }
    tile_slope<N>(dk, keys + at.t * a.W, at.n, a.W, a.D);
    floatX* dkeys = dqkv + (at.b * a.T + at.t) * a.W + (a.H + at.h) * a.D;
    tile_store<N>(dkeys, dk, 1, at.n, a.W, a.D);
    tile_store<N>(dkeys + a.G * a.D, dv, 1, at.n, a.W, a.D);
}
// dqkv (B*T, W) is written; dout is used up, m (B*T, H) is scratch. The forward pass must have started from 0.
static void linear_attention_backward(floatX* dqkv, float* m, floatX* dout, const floatX* out, const float* den, const floatX* qkv,
                                      size_t B, size_t T, size_t H, size_t G, size_t D) {
    Heads a = {B, T, H, G, D, (H + 2 * G) * D, 0, 0};
    unsigned nq = spots(a, H), nk = spots(a, G);
    linear_attention_divide_kernel<<<blocks(B * T * H, 8), 256>>>(dout, m, out, den, B * T * H, (int)D);
    cudaCheck(cudaGetLastError());
    linear_sums(workspace, qkv + H * D, a.W, qkv + (H + G) * D, a.W, NULL, 1, NULL, 0, a);
    if (D <= 32)      linear_attention_backward_q_kernel<4><<<nq, 64, shared_bytes(linear_attention_backward_q_kernel<4>, 4, 3, 1)>>>(dqkv, dout, m, qkv, workspace, a);
    else if (D <= 64) linear_attention_backward_q_kernel<8><<<nq, 64, shared_bytes(linear_attention_backward_q_kernel<8>, 8, 3, 1)>>>(dqkv, dout, m, qkv, workspace, a);
    else              linear_attention_backward_q_kernel<16><<<nq, 64, shared_bytes(linear_attention_backward_q_kernel<16>, 16, 3, 1)>>>(dqkv, dout, m, qkv, workspace, a);
    cudaCheck(cudaGetLastError());
    linear_sums(workspace, qkv, a.W, dout, H * D, m, (int)(H / G), NULL, 1, a);
    if (D <= 32)      linear_attention_backward_kv_kernel<4><<<nk, 64, shared_bytes(linear_attention_backward_kv_kernel<4>, 4, 4, 2)>>>(dqkv, dout, m, qkv, workspace, a);
    else if (D <= 64) linear_attention_backward_kv_kernel<8><<<nk, 64, shared_bytes(linear_attention_backward_kv_kernel<8>, 8, 4, 2)>>>(dqkv, dout, m, qkv, workspace, a);
    else              linear_attention_backward_kv_kernel<16><<<nk, 64, shared_bytes(linear_attention_backward_kv_kernel<16>, 16, 4, 2)>>>(dqkv, dout, m, qkv, workspace, a);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------------------------------------------
// the mixers: what lets a token see those before it. Each is written as if it were the only one: its parameters, what its
// forward pass keeps, forward, backward. x, out (B*T, C); x has been normalised and rounded; the residual stream, in float, is
// the block's.

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
    int stateful;                       // always 0: here every row starts anew (train_harmonic.c can go on with a state)
} Config;

// A table of named tensors inside one device allocation of one type. Beyond train_harmonic.cu's four kinds of first weights:
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
template <typename F>
__attribute__((format(printf, 7, 8)))
static F* take(Table* t, F* base, size_t rows, size_t cols, int init, double scale, const char* name, ...) {
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
    t->total += (x->size + 15) / 16 * 16;       // every tensor starts where 8 numbers can be loaded at once
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
template <typename F>
static F* no_decay(Table* t, F* x) {
    t->tensors[t->count - 1].decay = 0;
    return x;
}

// The first weights of a linear layer. GPT2: N(0, .02), and `shrink` times that where the layer ends a residual branch, biases 0.
// SPREAD: U(±fan_in^-½), biases too (PyTorch's own).
template <typename W>
static W* take_linear(Table* t, W* base, const Config* c, size_t out, size_t in, double shrink, const char* name, int n) {
    return c->weights == GPT2 ? take(t, base, out, in, NORMAL, 0.02 * shrink, name, n) : take(t, base, out, in, UNIFORM, 1 / sqrt((double)in), name, n);
}
static float* take_bias(Table* t, float* base, const Config* c, size_t out, size_t in, const char* name, int n) {
    return c->weights == GPT2 ? take(t, base, out, 0, CONSTANT, 0, name, n) : take(t, base, out, 0, UNIFORM, 1 / sqrt((double)in), name, n);
}

// Where activations are laid out: floatX numbers, float numbers, and what one-token steps carry on (states NULL: nothing is).
typedef struct { Table *table, *exact, *states; floatX* base; float *exact_base, *state_base; } Layout;

// ---- attention

// (W,C), (C,C), (W), (C); the biases only with --bias. Here and below, matrices are of type W: floatX for the parameters, as
// matmuls read them, and float for the gradients. What kernels read is float always.
template <typename W> struct AttnParams { W *wqkv, *wo; float *bqkv, *bo; };

template <typename W>
static void attn_params(AttnParams<W>* p, Table* t, W* copy, float* base, const Config* c, int n) {
    size_t C = c->channels, width = C + 2 * C / c->heads * c->kv_heads;
    p->wqkv = take_linear(t, copy, c, width, C, 1, "block%d.wqkv", n);
    if (c->bias) p->bqkv = take_bias(t, base, c, width, C, "block%d.bqkv", n);
    p->wo = take_linear(t, copy, c, C, C, 1 / sqrt(2.0 * c->layers), "block%d.wo", n);
    if (c->bias) p->bo = take_bias(t, base, c, C, C, "block%d.bo", n);
}

typedef struct {
    floatX *qkv;                        // (R,W), rotated where there is RoPE
    floatX *out;                        // (R,C): the heads' outputs
    float *lse;                         // (R,H): log sums (linear: the sums)
    float *state;                       // (1,G,D+1,D): linear attention's sums; only in a model of one token
    floatX *cache;                      // (room, 2GD): keys and values of a text so far. Only in a model of one token,
    size_t room;                        //              and grown with it, but never past the window or block
    floatX *dqkv, *dout;                // scratch for the backward pass, one for all layers, like
    float *delta, *rope;                // (R,H), (T,D)
    const size_t* past;                 // tokens before the first of this batch
} AttnActs;

static void attn_acts(AttnActs* a, const AttnActs* first, const Layout* l, const Config* c, int n, size_t B, size_t T, int train) {
    size_t C = c->channels, H = c->heads, G = c->kv_heads, D = C / H, R = B * T, W = C + 2 * G * D;
    a->qkv = take(l->table, l->base, R, W, NONE, 0, "block%d.qkv", n);
    a->out = take(l->table, l->base, R, C, NONE, 0, "block%d.heads", n);
    a->lse = take(l->exact, l->exact_base, R, H, NONE, 0, "block%d.lse", n);
    if (c->attention == LINEAR && l->states) a->state = take(l->states, l->state_base, B, G * (D + 1) * D, NONE, 0, "block%d.sums", n);
    if (a != first) {
        a->rope = first->rope; a->dqkv = first->dqkv; a->dout = first->dout; a->delta = first->delta;
        return;
    }
    if (c->pos == ROPE) a->rope = take(l->exact, l->exact_base, T, D, NONE, 0, "rope");
    if (!train) return;
    a->dqkv = take(l->table, l->base, R, W, NONE, 0, "dqkv");
    a->dout = take(l->table, l->base, R, C, NONE, 0, "dheads");
    a->delta = take(l->exact, l->exact_base, R, H, NONE, 0, "delta");
}

// Room for one more token's keys and values. A dense model must keep all of them: that is what generation costs it.
static floatX* attn_cache(AttnActs* a, const Config* c, size_t t, size_t width) {
    size_t limit = c->window, block = c->block;
    if (block && (!limit || block < limit)) limit = block;
    if (t >= a->room && (!limit || a->room < limit)) {
        size_t room = a->room ? 2 * a->room : 64;
        if (limit && room > limit) room = limit;
        floatX* larger = (floatX*)device_allocate(room * width * sizeof(floatX), "the keys and values of a text");
        if (a->room) device_copy(larger, a->cache, a->room * width * sizeof(floatX));
        cudaCheck(cudaFree(a->cache));
        a->cache = larger;
        a->room = room;
    }
    return a->cache + t % a->room * width;
}

static void attn_forward(floatX* out, const floatX* x, AttnActs* a, const AttnParams<floatX>* p, const Config* c, size_t B, size_t T, int carry) {
    size_t C = c->channels, H = c->heads, G = c->kv_heads, D = C / H, R = B * T, W = C + 2 * G * D, past = *a->past;
    linear_forward(a->qkv, x, p->wqkv, p->bqkv, R, C, W, C, 0);
    if (c->pos == ROPE) rope(a->qkv, a->rope, 1, B, T, W, H + G, D);
    if (c->attention == LINEAR) {
        linear_attention_forward(a->out, a->lse, carry ? a->state : NULL, a->qkv, B, T, H, G, D);
    } else if (carry) {
        device_copy(attn_cache(a, c, past, 2 * G * D), a->qkv + C, 2 * G * D * sizeof(floatX));
        attention_step(a->out, a->qkv, a->cache, a->room, past, first_key(past, c->window, c->block), H, G, D);
    } else {
        attention_forward(a->out, a->lse, a->qkv, c->window, c->block, B, T, H, G, D);
    }
    linear_forward(out, a->out, p->wo, p->bo, R, C, C, C, 0);
}

static void attn_backward(float* dx, AttnParams<float>* g, const floatX* dout, const floatX* x, AttnActs* a, const AttnParams<floatX>* p,
                          const Config* c, size_t B, size_t T) {
    size_t C = c->channels, H = c->heads, G = c->kv_heads, D = C / H, R = B * T, W = C + 2 * G * D;
    linear_backward(a->dout, g->wo, g->bo, dout, a->out, p->wo, R, C, C, C, 0);
    if (c->attention == LINEAR) linear_attention_backward(a->dqkv, a->delta, a->dout, a->out, a->lse, a->qkv, B, T, H, G, D);
    else attention_backward(a->dqkv, a->delta, a->dout, a->out, a->lse, a->qkv, c->window, c->block, B, T, H, G, D);
    if (c->pos == ROPE) rope(a->dqkv, a->rope, -1, B, T, W, H + G, D);
    linear_backward(dx, g->wqkv, g->bqkv, a->dqkv, x, p->wqkv, R, C, W, C, 1);
}

// @@@ stubs until the other half is here
enum { MAX_CONV = 8, MAX_STATE = 256, FILTER = 64 };
static size_t mamba2_chunk(const Config* c, size_t T) { return smin(c->chunk ? c->chunk : 64, T); }
#define STUB(K, k) template <typename W> struct K##Params { W* x; }; struct K##Acts { const size_t* past; }; \
template <typename W> static void k##_params(K##Params<W>*, Table*, W*, float*, const Config*, int) { die("stub"); } \
static void k##_acts(K##Acts*, const K##Acts*, const Layout*, const Config*, int, size_t, size_t, int) {} \
static void k##_forward(floatX*, const floatX*, K##Acts*, const K##Params<floatX>*, const Config*, size_t, size_t, int) {} \
static void k##_backward(float*, K##Params<float>*, const floatX*, const floatX*, K##Acts*, const K##Params<floatX>*, const Config*, size_t, size_t) {} \
static size_t k##_workspace(const Config*, size_t, size_t) { return 0; }
STUB(Mamba, mamba)
STUB(Mamba2, mamba2)
STUB(Hyena, hyena)
// ----------------------------------------------------------------------------------------------------------------
// the model: parameters, activations

template <typename W> struct BlockParams {
    float *norm1_w, *norm1_b, *norm2_w, *norm2_b;       // (C); biases only of LayerNorm, norm2 only with an MLP
    W *wgate, *wup, *wdown;                             // (ff,C), (ff,C), (C,ff): SwiGLU has the gate,
    float *bup, *bdown;                                 // (ff), (C): GELU the biases
    AttnParams<W> attn;                                 // one of these
    MambaParams<W> mamba;
    Mamba2Params<W> mamba2;
    HyenaParams<W> hyena;
};
template <typename W> struct Params { W *wte, *head; float *wpe, *normf_w, *normf_b; BlockParams<W>* block; };      // tied: head == wte

// Lays the parameters out: what kernels read at base, matrices at copy, at the same offsets (their gradients: copy = base). First
// weights as in the .c. wte and head keep room for the rows that the vocabulary is padded with; they stay zero, and no one
// else sees them.
template <typename W>
static void params_layout(Params<W>* p, Table* t, W* copy, float* base, const Config* c) {
    size_t V = c->vocab, C = c->channels, F = c->ff, padding = ((padded_vocab(V) - V) * C + 15) / 16 * 16;
    int spread = c->model == TRANSFORMER && c->weights == SPREAD, layer = c->norm == LAYER;
    double shrink = 1 / sqrt(2.0 * c->layers);
    p->wte = take(t, copy, V, C, NORMAL, spread && !c->tie ? 1 : 0.02, "wte");
    t->total += padding;
    if (c->model == TRANSFORMER && c->pos == LEARNED) p->wpe = take(t, base, c->seq, C, NORMAL, 0.02, "wpe");
    for (int n = 0; n < c->layers; n++) {
        BlockParams<W>* b = &p->block[n];
        b->norm1_w = take(t, base, C, 0, CONSTANT, 1, "block%d.norm1_w", n);
        if (layer) b->norm1_b = take(t, base, C, 0, CONSTANT, 0, "block%d.norm1_b", n);
        if (c->model == TRANSFORMER) attn_params(&b->attn, t, copy, base, c, n);
        if (c->model == MAMBA) mamba_params(&b->mamba, t, copy, base, c, n);
        if (c->model == MAMBA2) mamba2_params(&b->mamba2, t, copy, base, c, n);
        if (c->model == HYENA) hyena_params(&b->hyena, t, copy, base, c, n);
        if (c->mlp == NO_MLP) continue;
        b->norm2_w = take(t, base, C, 0, CONSTANT, 1, "block%d.norm2_w", n);
        if (layer) b->norm2_b = take(t, base, C, 0, CONSTANT, 0, "block%d.norm2_b", n);
        if (c->mlp == SWIGLU) b->wgate = take_linear(t, copy, c, F, C, 1, "block%d.wgate", n);
        b->wup = take_linear(t, copy, c, F, C, 1, "block%d.wup", n);
        if (c->mlp == GELU) b->bup = take_bias(t, base, c, F, C, "block%d.bup", n);
        b->wdown = take_linear(t, copy, c, C, F, shrink, "block%d.wdown", n);
        if (c->mlp == GELU) b->bdown = take_bias(t, base, c, C, F, "block%d.bdown", n);
    }
    if (!c->post_norm) p->normf_w = take(t, base, C, 0, CONSTANT, 1, "normf_w");
    if (!c->post_norm && layer) p->normf_b = take(t, base, C, 0, CONSTANT, 0, "normf_b");
    p->head = p->wte;
    if (c->tie) return;
    p->head = take_linear(t, copy, c, V, C, 1, "head", 0);
    t->total += padding;
}

// What a forward pass leaves behind for the backward pass; R = B*T rows. Sums of the residual stream are float; what a norm makes
// of them, for a mixer or an MLP to read, is floatX.
typedef struct {
    float *sum1, *mean1, *rstd1;        // (R,C), (R), (R): what the first norm reads (mean: LayerNorm only): the stream before the
    floatX *in1;                        //      block, post-norm after the mixer. (R,C): what the mixer reads: norm 1 of it,
    float *sum2, *mean2, *rstd2;        //      post-norm the block's input. The same for the second norm: the stream after
    floatX *in2;                        //      the mixer, post-norm after the MLP; and what the MLP reads
    floatX *gate, *up;                  // (R,ff): the MLP before its nonlinearity (GELU: without its bias)
    AttnActs attn;
    MambaActs mamba;
    Mamba2Acts mamba2;
    HyenaActs hyena;
} BlockActs;
typedef struct {
    int B, T;
    size_t past;                        // tokens before the first: 0, or in generation the length of the text so far
    Table table, exact, states;         // floatX; float; what model_step carries on, (1,...) each
    floatX *memory;
    float *exact_memory, *state_memory;
    int *index_memory;                  // 4R + 1: the four arrays below
    int *tokens, *targets, *order, *first;
    BlockActs* block;
    float *out;                         // (R,C): the stream after the last block; not with post-norm
    floatX *y;                          // (R,C): its norm; post-norm: what the last block returns
    float *y_mean, *y_rstd, *losses, *hits;     // (R)
    floatX *branch;                     // (R,C) scratch: what a mixer or an MLP adds to the stream
    floatX *u;                          // (R,ff) scratch: the MLP's hidden layer
    floatX *logits;                     // (head_rows, Vp) scratch
    float *dy, *dx, *dn;                // (R,C): gradients that several terms are added to, only for training
    floatX *dbranch, *du, *dup;         // (R,C), (R,ff), (R,ff): those that are written once
} Acts;

// Lays a's tensors out at base, exact and state_base, and its four arrays of indices at `index` (NULL: only measures).
static void acts_layout(Acts* a, floatX* base, float* exact, float* state_base, int* index, const Config* c, int train) {
    size_t V = c->vocab, C = c->channels, F = c->ff, B = a->B, T = a->T, R = B * T;
    int layer = c->norm == LAYER;
    Table *t = &a->table, *f = &a->exact, *states = R == 1 && !train ? &a->states : NULL;       // generation takes one token at a time
    Layout l = { t, f, states, base, exact, state_base };
    t->count = f->count = a->states.count = 0;
    t->total = f->total = a->states.total = 0;
    if (index) { a->tokens = index; a->targets = index + R; a->order = index + 2 * R; a->first = index + 3 * R; }
    if (((c->model == TRANSFORMER && c->pos == LEARNED) || c->model == HYENA) && T > (size_t)c->seq)
        die("a model with %d positions cannot read %zu tokens at a time: train it with --context %zu", c->seq, T, T);
    for (int n = 0; n < c->layers; n++) {
        BlockActs *b = &a->block[n], *first = &a->block[0];
        b->sum1 = take(f, exact, R, C, NONE, 0, "block%d.sum1", n);
        if (layer) b->mean1 = take(f, exact, R, 0, NONE, 0, "block%d.mean1", n);
        b->rstd1 = take(f, exact, R, 0, NONE, 0, "block%d.rstd1", n);
        b->in1 = take(t, base, R, C, NONE, 0, "block%d.in1", n);
        if (c->model == TRANSFORMER) attn_acts(&b->attn, &first->attn, &l, c, n, B, T, train);
        if (c->model == MAMBA) mamba_acts(&b->mamba, &first->mamba, &l, c, n, B, T, train);
        if (c->model == MAMBA2) mamba2_acts(&b->mamba2, &first->mamba2, &l, c, n, B, T, train);
        if (c->model == HYENA) hyena_acts(&b->hyena, &first->hyena, &l, c, n, B, T, train);
        b->attn.past = b->hyena.past = &a->past;
        if (c->mlp == NO_MLP) continue;
        b->sum2 = take(f, exact, R, C, NONE, 0, "block%d.sum2", n);
        if (layer) b->mean2 = take(f, exact, R, 0, NONE, 0, "block%d.mean2", n);
        b->rstd2 = take(f, exact, R, 0, NONE, 0, "block%d.rstd2", n);
        b->in2 = take(t, base, R, C, NONE, 0, "block%d.in2", n);
        if (c->mlp == SWIGLU) b->gate = take(t, base, R, F, NONE, 0, "block%d.gate", n);
        b->up = take(t, base, R, F, NONE, 0, "block%d.up", n);
    }
    if (!c->post_norm) {
        a->out = take(f, exact, R, C, NONE, 0, "out");
        if (layer) a->y_mean = take(f, exact, R, 0, NONE, 0, "y_mean");
        a->y_rstd = take(f, exact, R, 0, NONE, 0, "y_rstd");
    }
    a->y = take(t, base, R, C, NONE, 0, "y");
    a->losses = take(f, exact, R, 0, NONE, 0, "losses");
    a->hits = take(f, exact, R, 0, NONE, 0, "hits");
    a->branch = take(t, base, R, C, NONE, 0, "branch");
    if (c->mlp != NO_MLP) a->u = take(t, base, R, F, NONE, 0, "u");
    a->logits = take(t, base, head_rows(R, V), padded_vocab(V), NONE, 0, "logits");
    if (!train) return;
    a->dy = take(f, exact, R, C, NONE, 0, "dy");
    a->dx = c->post_norm ? a->dy : take(f, exact, R, C, NONE, 0, "dx");
    a->dn = take(f, exact, R, C, NONE, 0, "dn");
    a->dbranch = take(t, base, R, C, NONE, 0, "dbranch");
    if (c->mlp != NO_MLP) a->du = take(t, base, R, F, NONE, 0, "du");
    if (c->mlp == SWIGLU) a->dup = take(t, base, R, F, NONE, 0, "dup");
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
    const Config* c = &m->config;
    size_t C = c->channels, B = m->B, T = m->T, pieces = 2 * ((m->table.total + NORM_PIECE - 1) / NORM_PIECE), width = 2 * C, mixer = 0;
    if ((size_t)c->ff > width) width = c->ff;
    if (c->model == TRANSFORMER && C + 2 * C / c->heads * c->kv_heads > width) width = C + 2 * C / c->heads * c->kv_heads;
    if (c->model == TRANSFORMER && c->attention == LINEAR) mixer = linear_attention_workspace(B, T, c->kv_heads, C / c->heads);
    if (c->model == MAMBA) mixer = mamba_workspace(c, B, T);
    if (c->model == MAMBA2) mixer = mamba2_workspace(c, B, T);
    if (c->model == HYENA) mixer = hyena_workspace(c, B, T);
    size_t sums = width * split_count(B * T);
    return (sums > mixer ? sums : mixer) + pieces;
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
    if (!m->p.block || !m->g.block || !m->acts.block || !m->step.block) die("not enough memory for %d layers", c->layers);
    m->acts.B = B;
    m->acts.T = T;
    m->step.B = m->step.T = 1;
    params_layout(&m->p, &m->table, (floatX*)NULL, NULL, c);
    acts_layout(&m->acts, NULL, NULL, NULL, NULL, c, train);
    acts_layout(&m->step, NULL, NULL, NULL, NULL, c, 0);
}

// Bytes of the parts of a: floatX, float, states, indices.
static size_t acts_bytes(const Acts* a) {
    size_t states = a->states.total ? a->states.total * sizeof(float) : 64;       // none: what device_allocate takes for it
    return a->table.total * sizeof(floatX) + a->exact.total * sizeof(float) + states + (4 * (size_t)a->B * a->T + 1) * sizeof(int);
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
    if (sizeof(floatX) != sizeof(float)) m->copy_memory = (floatX*)device_allocate(n * sizeof(floatX), "the parameters in bf16");
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
    for (int n = 0; n < m->config.layers; n++) cudaCheck(cudaFree(m->step.block[n].attn.cache));
    Acts* both[2] = { &m->acts, &m->step };
    for (int i = 0; i < 2; i++) {
        free(both[i]->table.tensors); free(both[i]->exact.tensors); free(both[i]->states.tensors);
        cudaCheck(cudaFree(both[i]->memory)); cudaCheck(cudaFree(both[i]->exact_memory));
        cudaCheck(cudaFree(both[i]->state_memory)); cudaCheck(cudaFree(both[i]->index_memory));
    }
    free(m->table.tensors);
    if ((void*)m->copy_memory != (void*)m->param_memory) cudaCheck(cudaFree(m->copy_memory));
    cudaCheck(cudaFree(m->param_memory)); cudaCheck(cudaFree(m->grad_memory)); cudaCheck(cudaFree(m->adam_m)); cudaCheck(cudaFree(m->adam_v));
    free(m->p.block); free(m->g.block); free(m->acts.block); free(m->step.block);
    free(m->sorted); free(m->step_logits);
    memset(m, 0, sizeof *m);
}

// Number of parameters.
static size_t model_parameters(const Model* m) {
    size_t n = 0;
    for (int i = 0; i < m->table.count; i++) n += m->table.tensors[i].size;
    return n;
}
// Multiply-adds x 2 x 3 (forward, and two products backward) of all matrix products per token: those with weights, and those
// of the mixers at this model's T. (Attention's backward pass computes q·k and do·v twice more; that is not counted.)
static double model_flops_per_token(const Model* m) {
    const Config* c = &m->config;
    double C = c->channels, n = c->tie ? 0 : -(double)c->vocab * C;          // looking wte up costs nothing
    if (m->p.wpe || (c->model == TRANSFORMER && c->pos == LEARNED)) n -= (double)c->seq * C;
    for (int i = 0; i < m->table.count; i++) {
        const Tensor* t = &m->table.tensors[i];
        if (t->ndim == 2 && t->decay) n += t->size;                          // what does not decay is no matrix: A_log, filters
    }
    double seen = 0;                    // keys that a query sees, on average
    for (int t = 0; t < m->T; t++) seen += (double)(t + 1 - first_key(t, c->window, c->block)) / m->T;
    if (c->model == TRANSFORMER) n += c->layers * 2 * C * (c->attention == LINEAR ? C / c->heads : seen);
    if (c->model == MAMBA2) {           // inside a chunk: C·B once, and for each head; with its state: reading and adding up
        double E = (double)c->expand * C, N = c->d_state, L = mamba2_chunk(c, m->T);
        n += c->layers * (L * N + L * E + 2 * E * N);
    }
    if (c->model == HYENA) {            // a row of the filter serves all sequences of the batch
        double F = FILTER;
        n -= c->layers * (F * c->emb + 2 * F * F + F * C) * (1 - 1.0 / m->B);
    }
    return 6 * n;
}

// Renews the floatX copy after the parameters have been set from outside.
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
        for (size_t k = 0; k < t->size; k++) p[k] = initial_value(t, k, &seed);
    }
    device_write(m->param_memory, host, m->table.total * sizeof(float));
    free(host);
    model_refresh(m);
}

// ----------------------------------------------------------------------------------------------------------------
// the model: forward and backward. R = B*T rows throughout.

static void norm_forward(floatX* out, float* mean, float* rstd, const float* x, const float* w, const float* b, const Config* c, size_t R) {
    if (c->norm == LAYER) layernorm_forward(out, mean, rstd, x, w, b, R, c->channels);
    else rmsnorm_forward(out, rstd, x, w, R, c->channels);
}

// dx is written, or added to with add = 1; dw and db are added to.
static void norm_backward(float* dx, float* dw, float* db, const float* dout, const float* x, const float* mean, const float* rstd, const float* w,
                          const Config* c, size_t R, int add) {
    if (c->norm == LAYER) layernorm_backward(dx, dw, db, dout, x, mean, rstd, w, R, c->channels, add);
    else rmsnorm_backward(dx, dw, dout, x, rstd, w, R, c->channels, add);
}

// SwiGLU:  out = Wdown (silu(Wgate x) ⊙ Wup x)        GELU:  out = Wdown gelu(Wup x + bup) + bdown        u (R,ff)
static void mlp_forward(floatX* out, floatX* u, BlockActs* a, const floatX* x, const BlockParams<floatX>* p, const Config* c, size_t R) {
    size_t C = c->channels, F = c->ff;
    linear_forward(a->up, x, p->wup, NULL, R, C, F, C, 0);
    if (c->mlp == SWIGLU) {
        linear_forward(a->gate, x, p->wgate, NULL, R, C, F, C, 0);
        swiglu_forward(u, a->gate, a->up, R, F);
    } else {
        gelu_forward(u, a->up, p->bup, R, F);
    }
    linear_forward(out, u, p->wdown, p->bdown, R, F, C, F, 0);
}

// dx and the gradients g are added to. u is computed again instead of being kept.
static void mlp_backward(float* dx, BlockParams<float>* g, const floatX* dout, BlockActs* a, const floatX* x, const BlockParams<floatX>* p,
                         Acts* scratch, const Config* c, size_t R) {
    size_t C = c->channels, F = c->ff;
    floatX *u = scratch->u, *du = scratch->du, *dup = scratch->dup;
    if (c->mlp == SWIGLU) swiglu_forward(u, a->gate, a->up, R, F);
    else gelu_forward(u, a->up, p->bup, R, F);
    linear_backward(du, g->wdown, g->bdown, dout, u, p->wdown, R, F, C, F, 0);
    if (c->mlp == SWIGLU) {
        swiglu_backward(du, dup, a->gate, a->up, R, F);         // du is dgate from here on
        linear_backward(dx, g->wgate, NULL, du, x, p->wgate, R, C, F, C, 1);
        linear_backward(dx, g->wup, NULL, dup, x, p->wup, R, C, F, C, 1);
    } else {
        gelu_backward(du, a->up, p->bup, R, F);                 // du is dup
        linear_backward(dx, g->wup, g->bup, du, x, p->wup, R, C, F, C, 1);
    }
}

static void mixer_forward(floatX* out, const floatX* x, BlockActs* a, const BlockParams<floatX>* p, const Config* c, size_t B, size_t T, int carry) {
    if (c->model == TRANSFORMER) attn_forward(out, x, &a->attn, &p->attn, c, B, T, carry);
    if (c->model == MAMBA) mamba_forward(out, x, &a->mamba, &p->mamba, c, B, T, carry);
    if (c->model == MAMBA2) mamba2_forward(out, x, &a->mamba2, &p->mamba2, c, B, T, carry);
    if (c->model == HYENA) hyena_forward(out, x, &a->hyena, &p->hyena, c, B, T, carry);
}

static void mixer_backward(float* dx, BlockParams<float>* g, const floatX* dout, const floatX* x, BlockActs* a, const BlockParams<floatX>* p,
                           const Config* c, size_t B, size_t T) {
    if (c->model == TRANSFORMER) attn_backward(dx, &g->attn, dout, x, &a->attn, &p->attn, c, B, T);
    if (c->model == MAMBA) mamba_backward(dx, &g->mamba, dout, x, &a->mamba, &p->mamba, c, B, T);
    if (c->model == MAMBA2) mamba2_backward(dx, &g->mamba2, dout, x, &a->mamba2, &p->mamba2, c, B, T);
    if (c->model == HYENA) hyena_backward(dx, &g->hyena, dout, x, &a->hyena, &p->hyena, c, B, T);
}

// One block.
//     pre-norm     sum2 = sum1 + mixer(norm1(sum1))       out = sum2 + mlp(norm2(sum2))         no MLP: out = sum2
//     post-norm    sum1 = in1 + mixer(in1)    in2 = norm1(sum1)    sum2 = in2 + mlp(in2)    y = norm2(sum2)
// Pre-norm writes out, the residual stream in float, and post-norm y: there the stream is normed twice a block, and what
// follows reads it rounded.
static void layer_forward(float* out, floatX* y, BlockActs* a, const BlockParams<floatX>* p, Acts* scratch, const Config* c, size_t B, size_t T, int carry) {
    size_t C = c->channels, R = B * T;
    floatX *branch = scratch->branch, *u = scratch->u;
    if (c->post_norm) {
        mixer_forward(branch, a->in1, a, p, c, B, T, carry);
        add(a->sum1, a->in1, branch, R, C);
        norm_forward(a->in2, a->mean1, a->rstd1, a->sum1, p->norm1_w, p->norm1_b, c, R);
        mlp_forward(branch, u, a, a->in2, p, c, R);
        add(a->sum2, a->in2, branch, R, C);
        norm_forward(y, a->mean2, a->rstd2, a->sum2, p->norm2_w, p->norm2_b, c, R);
        return;
    }
    norm_forward(a->in1, a->mean1, a->rstd1, a->sum1, p->norm1_w, p->norm1_b, c, R);
    mixer_forward(branch, a->in1, a, p, c, B, T, carry);
    add(c->mlp == NO_MLP ? out : a->sum2, a->sum1, branch, R, C);
    if (c->mlp == NO_MLP) return;
    norm_forward(a->in2, a->mean2, a->rstd2, a->sum2, p->norm2_w, p->norm2_b, c, R);
    mlp_forward(branch, u, a, a->in2, p, c, R);
    add(out, a->sum2, branch, R, C);
}

// The lines of layer_forward, last one first. d (R,C) is dout on entry and dx on return: it stands for the residual stream,
// to which every branch adds its share. It is float; what goes into a branch is rounded to dbranch first.
static void layer_backward(float* d, BlockParams<float>* g, BlockActs* a, const BlockParams<floatX>* p, Acts* scratch, const Config* c, size_t B, size_t T) {
    size_t C = c->channels, R = B * T, bytes = R * C * sizeof(float);
    float* dn = scratch->dn;
    floatX* dbranch = scratch->dbranch;
    if (c->post_norm) {
        norm_backward(dn, g->norm2_w, g->norm2_b, d, a->sum2, a->mean2, a->rstd2, p->norm2_w, c, R, 0);
        device_copy(d, dn, bytes);
        round_to(dbranch, dn, R * C);
        mlp_backward(d, g, dbranch, a, a->in2, p, scratch, c, R);
        norm_backward(dn, g->norm1_w, g->norm1_b, d, a->sum1, a->mean1, a->rstd1, p->norm1_w, c, R, 0);
        device_copy(d, dn, bytes);
        round_to(dbranch, dn, R * C);
        mixer_backward(d, g, dbranch, a->in1, a, p, c, B, T);
        return;
    }
    if (c->mlp != NO_MLP) {
        device_zero(dn, bytes);
        round_to(dbranch, d, R * C);
        mlp_backward(dn, g, dbranch, a, a->in2, p, scratch, c, R);
        norm_backward(d, g->norm2_w, g->norm2_b, dn, a->sum2, a->mean2, a->rstd2, p->norm2_w, c, R, 1);
    }
    device_zero(dn, bytes);
    round_to(dbranch, d, R * C);
    mixer_backward(dn, g, dbranch, a->in1, a, p, c, B, T);
    norm_backward(d, g->norm1_w, g->norm1_b, dn, a->sum1, a->mean1, a->rstd1, p->norm1_w, c, R, 1);
}

// tokens (B,T) on the host -> a->y (B,T,C). With carry, one token (T = 1) goes on from what the last call left.
static void acts_forward(Acts* a, const Params<floatX>* p, const Config* c, const int* tokens, int carry) {
    size_t B = a->B, T = a->T, C = c->channels, R = B * T;
    BlockActs* b = a->block;
    device_write(a->tokens, tokens, R * sizeof(int));
    if (c->post_norm) embedding_forward(b->in1, a->tokens, p->wte, 1, R, C);
    else              embedding_forward(b->sum1, a->tokens, p->wte, 1, R, C);
    if (p->wpe && c->post_norm) positions_forward(b->in1, p->wpe, a->past, B, T, C);
    else if (p->wpe)            positions_forward(b->sum1, p->wpe, a->past, B, T, C);
    if (c->model == TRANSFORMER && c->pos == ROPE) rope_table(b->attn.rope, a->past, T, C / c->heads);
    for (int n = 0; n < c->layers; n++) {
        int last = n + 1 == c->layers;
        layer_forward(last ? a->out : b[n + 1].sum1, last ? a->y : b[n + 1].in1, &b[n], &p->block[n], a, c, B, T, carry);
    }
    if (!c->post_norm) norm_forward(a->y, a->y_mean, a->y_rstd, a->out, p->normf_w, p->normf_b, c, R);
    if (carry) a->past++;
}

// Mean loss in nats of tokens (B,T) against targets (B,T), both on the host; targets of -1 do not count. train = 1 also runs the
// head's backward (head_loss does both at once); train = 0 touches no gradient. Tokens must lie in [0, V).
static double model_forward(Model* m, const int* tokens, const int* targets, int train) {
    Acts* a = &m->acts;
    size_t R = (size_t)m->B * m->T;
    acts_forward(a, &m->p, &m->config, tokens, 0);
    device_write(a->targets, targets, R * sizeof(int));
    m->tokens = tokens;
    m->counted = 0;
    for (size_t r = 0; r < R; r++) m->counted += targets[r] >= 0;
    return head_loss(train ? a->dy : NULL, train ? m->g.head : NULL, a->y, m->p.head, a->targets, m->counted, a->logits, a->losses, a->hits,
                     m->grad_scale, R, m->config.channels, m->config.vocab, &m->correct);
}

// The rest of the backward pass, after model_forward(..., 1). Adds to the gradients.
static void model_backward(Model* m) {
    Acts* a = &m->acts;
    const Config* c = &m->config;
    size_t C = c->channels, R = (size_t)m->B * m->T;
    if (!c->post_norm)                  // post-norm: dx is dy
        norm_backward(a->dx, m->g.normf_w, m->g.normf_b, a->dy, a->out, a->y_mean, a->y_rstd, m->p.normf_w, c, R, 0);
    for (int n = c->layers - 1; n >= 0; n--) layer_backward(a->dx, &m->g.block[n], &a->block[n], &m->p.block[n], a, c, m->B, m->T);
    if (m->p.wpe) positions_backward(m->g.wpe, a->dx, m->B, m->T, C);
    m->distinct = sort_rows(m->sorted, m->sorted + R, m->tokens, R, c->vocab);      // while the GPU works on the blocks
    device_write(a->order, m->sorted, R * sizeof(int));
    device_write(a->first, m->sorted + R, (m->distinct + 1) * sizeof(int));
    embedding_backward(m->g.wte, a->tokens, a->order, a->first, m->distinct, a->dx, 1, C);
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

// Zeroes carried states: all of them, or those of the streams b with reset[b] (NULL: all). What a cache of keys holds is
// passed over from then on.
static void model_reset(Acts* a, const int* reset) {
    for (int i = 0; i < a->states.count; i++) {
        const Tensor* t = &a->states.tensors[i];
        size_t width = t->size / t->shape[0];
        for (int b = 0; b < a->B; b++) if (!reset || reset[b]) device_zero(a->state_memory + t->offset + b * width, width * sizeof(float));
    }
    a->past = 0;
}

// One token, for generation: the same forward with B = T = 1, from what is carried on: keys and values of all tokens that can
// still be seen (attention), a state of fixed size (linear attention, Mamba), all inputs (Hyena). Returns the logits (V) of what
// comes next, on the host, or NULL where the model has no more positions. model_reset(&m->step, NULL) starts a new text.
static const float* model_step(Model* m, int token) {
    const Config* c = &m->config;
    if ((m->p.wpe || c->model == HYENA) && m->step.past == (size_t)c->seq) return NULL;
    acts_forward(&m->step, &m->p, c, &token, 1);
    linear_forward(m->step.logits, m->step.y, m->p.head, NULL, 1, c->channels, padded_vocab(c->vocab), c->channels, 0);
    device_read(m->step_logits, m->step.logits, c->vocab);
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

// AdamW (Loshchilov & Hutter 2019), beta (0.9, 0.95), eps 1e-8, with the gradient scaled down to norm `clip` first (0: never).
// Weight decay goes to the tensors whose table entry says so. Returns the norm before clipping; if it is not finite,
// nothing is changed.
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
        float *p = m->param_memory + t->offset, *g = m->grad_memory + t->offset, *am = m->adam_m + t->offset, *av = m->adam_v + t->offset;
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
    for (int v = 0; v < V; v++) sum += scratch[v] = logits[v] >= floor ? exp((double)(logits[v] - logits[best]) / temperature) : 0;
    double u = rng_uniform(rng) * sum;
    for (int v = 0; v < V; v++) if ((u -= scratch[v]) < 0) return v;
    return best;
}

// Prints `length` tokens after `prompt`, as text where there is a tokenizer. The memory it needs is one state, whatever
// the length. Without a prompt the text begins after the end-of-text token, or after a newline.
static void generate(Model* m, const Tokenizer* tok, const char* prompt, int length, double temperature, int top_k, uint64_t seed) {
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

// Every flag of the command line: where its value goes, how --resume treats it, its range, default and meaning (dev/options.h).
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
    {"chunk",        'i', 'M', &opt.config.chunk, 0, 1 << 20, "N", "0", "mamba, mamba2: tokens between kept states; 0: sqrt(T), 64", 0},
    {"emb",          'i', 'M', &opt.config.emb, 3, 1023, "N", "3", "hyena: numbers that describe a position (odd)", 0},
};

// Sizes of published models [their batch x seq; learning rates are our choice], and small ones for a laptop.
static const Preset presets[] = {
    {"harmonic-tf",    "--model transformer --vocab 50257 --channels 256 --layers 4 --heads 4 --pos none --norm layer --post-norm --mlp gelu --weights spread --batch 16 --seq 1024 --steps 4000",
                       "the Harmonic paper's Transformer: 28,886,528 parameters"},
    {"harmonic-mamba", "--model mamba --vocab 50257 --channels 256 --layers 5 --batch 16 --seq 1024 --steps 4000",
                       "its Mamba, as near as depth allows: 27,921,920 parameters (published: 28,100,608)"},
    {"llama",          "--model transformer --vocab 50257 --channels 256 --layers 4 --heads 4 --batch 16 --seq 1024 --steps 4000",
                       "the fair Transformer at that size: RoPE, RMSNorm, SwiGLU"},
    {"gpt2",           "--model transformer --vocab 50257 --channels 768 --layers 12 --heads 12 --pos learned --norm layer --mlp gelu --bias --tie --batch 4 --seq 1024",
                       "GPT-2 small: 124,439,808 parameters"},
    {"bcmt-dense",     "--model transformer --vocab 50257 --channels 128 --layers 6 --heads 4 --pos learned --norm layer --mlp gelu --tie --batch 16 --seq 1024 --lr 3e-4",
                       "the dense Transformer beside BCMT"},
    {"tmm-llama",      "--model transformer --vocab 8192 --channels 256 --layers 16 --heads 4 --ff 1024 --batch 128 --seq 512 --lr 5e-4",
                       "the Llama beside TMM"},
    {"tmm-hyena",      "--model hyena --vocab 8192 --channels 512 --layers 16 --batch 128 --seq 512 --lr 5e-4",
                       "the Hyena beside TMM"},
    {"transformer-tiny", "--model transformer --vocab 256 --channels 128 --layers 4 --batch 8 --seq 256 --steps 600 --lr 3e-3", "bytes, a minute on a laptop"},
    {"mamba-tiny",     "--model mamba --vocab 256 --channels 128 --layers 4 --batch 8 --seq 256 --steps 600 --lr 3e-3", "the same"},
    {"mamba2-tiny",    "--model mamba2 --vocab 256 --channels 128 --layers 4 --batch 8 --seq 256 --steps 600 --lr 3e-3", "the same"},
    {"hyena-tiny",     "--model hyena --vocab 256 --channels 128 --layers 4 --batch 8 --seq 256 --steps 600 --lr 3e-3", "the same"},
};

// Fills in what was left to be chosen (0), and refuses what contradicts itself.
static void config_check(Config* c) {
    static const char* const owners[][2] = {        // flag, the models that know it
        {"heads", "transformer"}, {"kv-heads", "transformer"}, {"bias", "transformer"}, {"pos", "transformer"}, {"attention", "transformer"},
        {"window", "transformer"}, {"block", "transformer"}, {"norm", "transformer"}, {"post-norm", "transformer"}, {"mlp", "transformer"},
        {"weights", "transformer"}, {"ff", "transformer hyena"}, {"d-state", "mamba mamba2"}, {"expand", "mamba mamba2"}, {"conv", "mamba mamba2"},
        {"chunk", "mamba mamba2"}, {"head-dim", "mamba2"}, {"emb", "hyena"},
    };
    static const char* const names[] = {"transformer", "mamba", "mamba2", "hyena"};
    for (size_t i = 0; i < sizeof owners / sizeof *owners; i++) {
        const char* p = owners[i][1];
        size_t length = strlen(names[c->model]);
        int known = 0;
        for (; *p; p += strcspn(p, " ") + (p[strcspn(p, " ")] == ' ')) known |= strcspn(p, " ") == length && !strncmp(p, names[c->model], length);
        if (!known && option_given(owners[i][0])) die("--%s is a flag of --model %s, not of %s", owners[i][0], owners[i][1], names[c->model]);
    }
    if (c->model == MAMBA || c->model == MAMBA2) { c->norm = RMS; c->mlp = NO_MLP; }
    if (c->model == HYENA) { c->norm = LAYER; c->mlp = GELU; }
    if (c->model != TRANSFORMER) c->weights = SPREAD;
    if (!c->kv_heads) c->kv_heads = c->heads;
    if (!c->ff) c->ff = c->mlp == SWIGLU ? (8 * c->channels / 3 + 15) / 16 * 16 : 4 * c->channels;
    if (!c->d_state) c->d_state = c->model == MAMBA2 ? 128 : 16;
    if (!c->seq) c->seq = opt.seq;
    if (c->model == TRANSFORMER) {
        if (c->channels % c->heads) die("--channels %d do not divide into --heads %d", c->channels, c->heads);
        if (c->heads % c->kv_heads) die("--heads %d do not divide into --kv-heads %d groups", c->heads, c->kv_heads);
        int size = c->channels / c->heads;
        if (size > MAX_HEAD) die("--channels %d in --heads %d makes heads of %d numbers; %d is the most: give more heads", c->channels, c->heads, size, MAX_HEAD);
        if (c->pos == ROPE && size % 2) die("--pos rope turns pairs of numbers, and a head of --channels %d / --heads %d = %d is odd", c->channels, c->heads, size);
        if (c->attention == LINEAR && (c->window || c->block)) die("--attention linear sums over the whole past: it has no --window or --block");
        if (c->post_norm && c->mlp == NO_MLP) die("--post-norm needs an --mlp");
    }
    if (c->model == MAMBA2 && c->expand * c->channels % c->head_dim)
        die("mamba2: --expand %d x --channels %d do not divide into heads of --head-dim %d", c->expand, c->channels, c->head_dim);
    if (c->model == HYENA && c->emb % 2 == 0) die("--emb %d: a position is described by its time and pairs of waves, an odd count", c->emb);
}

// The model in a few words, without an end of line.
static void config_describe(const Config* c) {
    static const char *names[] = {"transformer", "mamba", "mamba2", "hyena"}, *pos[] = {"RoPE", "learned positions", "no positions"};
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
    const char *at = safetensors_metadata(s, "step"), *rng = safetensors_metadata(s, "rng"), *position = safetensors_metadata(s, "position");
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
    for (int i = 0; i < 2; i++) { strcpy(e[i].dtype, "I32"); e[i].bytes = R * sizeof(int); e[i].data = i ? data->targets : data->tokens; }
    e[n] = entry("", "logits", R, V, logits);
    e[n].ndim = 3; e[n].shape[0] = B; e[n].shape[1] = T; e[n].shape[2] = V;
    n++;
    e[n++] = entry("", "loss", 1, 0, &loss);
    real* host[2] = { host_copy(m->param_memory, t->total, "the dumped parameters"), host_copy(m->grad_memory, t->total, "the dumped gradients") };
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < t->count; i++)
            e[n++] = entry(k ? "grad." : "param.", t->tensors[i].name, t->tensors[i].shape[0], t->tensors[i].shape[1], host[k] + t->tensors[i].offset);
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
    size_t p = m->table.total * sizeof(float), copy = sizeof(floatX) == sizeof(float) ? 0 : m->table.total * sizeof(floatX);
    size_t a = acts_bytes(&m->acts), s = acts_bytes(&m->step), w = workspace_size(m) * sizeof(float);
    size_t all = (m->train ? 4 * p : p) + copy + a + s + w;
    printf("parameters: %zu\n", model_parameters(m));
    printf("GPU bytes: parameters %zu, their bf16 copy %zu, gradients %zu, AdamW %zu, activations of %d x %d tokens %zu, "
           "of one token %zu, partial sums %zu\n", p, copy, m->train ? p : 0, m->train ? 2 * p : 0, m->B, m->T, a, s, w);
    printf("GPU bytes in all: %zu (%.2f GB), and about 0.5 GB that CUDA and cuBLAS take for themselves\n", all, all / 1e9);
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
    while (old && fgets(line, sizeof line, old)) if (isdigit((unsigned char)line[0]) && atoi(line) <= step) text_add(&kept, "%s", line);
    if (old) fclose(old);
    FILE* f = fopen(path, "w");
    if (!f || fwrite(kept.chars, 1, kept.length, f) != kept.length || fflush(f) != 0) die("cannot write %s: %s", path, strerror(errno));
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

// Trains from step `done` + 1 to opt.steps: prints a line a step (on a terminal, one that is written over), logs the same
// to out/log.tsv, validates, samples, saves. Ctrl-C ends it after the step in hand. Returns the signal, or 0.
static int train(Model* m, DataLoader* data, DataLoader* val, const Tokenizer* tok, int done) {
    int resumed = opt.resume[0] != 0;
    Text log_path = {}, model_path = {};
    text_add(&log_path, "%s/log.tsv", opt.out);
    text_add(&model_path, "%s/model.safetensors", opt.out);
    make_folder(opt.out);
    if (!resumed && (access(log_path.chars, F_OK) == 0 || access(model_path.chars, F_OK) == 0))
        die("%s already holds a run: choose another --out, go on with --resume %s, or delete it", opt.out, model_path.chars);
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
                die("step %d: the loss is %f; the first tensor that is not finite: %s", step, l, where ? where : "none but the loss");
            }
            model_backward(m);
            loss += l / opt.accum;
            correct += m->correct;
            counted += m->counted;
        }
        double norm = model_update(m, lr, opt.weight_decay, opt.clip);
        if (!isfinite(norm)) {
            const char* where = not_finite(&m->table, m->grad_memory);
            die("step %d: the gradient's norm is %f; the first gradient that is not finite: %s", step, norm, where ? where : "none alone");
        }
        double ms = 1e3 * (now() - start);
        int left = (int)((now() - started) / (step - done) * (opt.steps - step));
        int validate = val && (step == opt.steps || (opt.val_every && step % opt.val_every == 0));
        int sample = opt.sample_every && step % opt.sample_every == 0, line_ends = !tty || validate || sample || step == opt.steps || stop_signal;
        printf("%sstep %d/%d | loss %.4f | %.4f bits/token | lr %.2e | norm %.3f | %.0f ms | %.0f tok/s | ETA %d:%02d:%02d", tty ? "\r\033[K" : "",
               step, opt.steps, loss, loss / log(2), lr, norm, ms, tokens / ms * 1e3, left / 3600, left / 60 % 60, left % 60);
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
        if (fflush(log_file) != 0) fprintf(stderr, "warning: cannot write %s: %s; training goes on\n", log_path.chars, strerror(errno)), clearerr(log_file);
        if (sample) generate(m, tok, opt.prompt, opt.sample_len, opt.temperature, opt.top_k, opt.seed + (uint64_t)step);
        if (opt.save_every > 0 && step % opt.save_every == 0 && step < opt.steps) {
            error = checkpoint_save(m, data, step, model_path.chars);
            if (error) fprintf(stderr, "warning: cannot write %s: %s; what it held is untouched, training goes on\n", model_path.chars, strerror(error));
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
    if (d->vocab > opt.config.vocab) die("%s was made with a vocabulary of %d tokens, the model has --vocab %d", files, d->vocab, opt.config.vocab);
}

#ifndef TESTING
int main(int argc, char** argv) {
    options_parse(option_table, sizeof option_table / sizeof *option_table, presets, sizeof presets / sizeof *presets, argc, argv);
    // what to do, from what is given
    Config* c = &opt.config;
    const char* source = opt.resume[0] ? opt.resume : opt.init;
    SafeTensors file = {};
    if (opt.resume[0] && opt.init[0]) die("--resume continues a run, --init starts a new one: give one of them");
    if ((opt.eval || opt.generate) && !source[0]) die("--%s needs a trained model: --init out/model.safetensors", opt.eval ? "eval" : "generate");
    if (source[0]) {
        safetensors_read(&file, source);
        options_adopt(&file, MODEL_NAME, opt.resume[0] != 0);
        Option* out = option_find("out");
        const char* slash = strrchr(opt.resume, '/');
        if (opt.resume[0] && out->set == 0) { opt.out = strdup(slash ? opt.resume : "."); if (slash) ((char*)opt.out)[slash - opt.resume] = '\0'; }
    }
    int training = !opt.eval && !opt.generate;
    if (opt.min_lr < 0) opt.min_lr = opt.lr / 10;
    if (opt.warmup < 0) opt.warmup = opt.steps / 10 < 100 ? opt.steps / 10 : 100;
    if (opt.min_lr > opt.lr) die("--min-lr %g is above --lr %g", opt.min_lr, opt.lr);
    if (opt.warmup > opt.steps) die("--warmup %d is longer than --steps %d", opt.warmup, opt.steps);
    if ((double)opt.batch * opt.seq > INT32_MAX) die("--batch %d x --seq %d is more than 2^31 tokens; --accum makes a step of several batches", opt.batch, opt.seq);
    if (opt.task && (opt.train[0] || opt.val[0])) die("--task generates its sequences: leave --train and --val out, or --task");
    config_check(c);
    if (opt.prompt[0] && !opt.tokenizer[0]) die("--prompt needs a --tokenizer to turn it into tokens");
    if (training && !opt.plan && !opt.train[0] && !opt.task) die("nothing to train on: give --train FILES or --task copy ('make run' shows how)");
    if (opt.eval && !opt.val[0] && !opt.task) die("--eval needs --val FILES");

    // the vocabulary: --vocab, else the tokenizer's, else the preset's, else the data's, else GPT-2's
    Tokenizer tokenizer = {};
    Option* vocab = option_find("vocab");
    if (opt.tokenizer[0]) {
        tokenizer_load(&tokenizer, opt.tokenizer);
        if (vocab->set < 2) c->vocab = tokenizer.vocab;
        if (tokenizer.vocab > c->vocab) die("%s has %d tokens, the model --vocab %d", opt.tokenizer, tokenizer.vocab, c->vocab);
    } else if (vocab->set == 0 && opt.task) c->vocab = 64;
    else if (vocab->set == 0 && (opt.train[0] || opt.val[0])) {
        DataLoader look;
        loader_open(&look, opt.train[0] ? opt.train : opt.val, 1, 1, 65536, LOADER_CONTIGUOUS, 0);
        if (look.vocab) c->vocab = look.vocab;
        loader_free(&look);
    }
    const Tokenizer* tok = opt.tokenizer[0] ? &tokenizer : NULL;

    Model m;
    if (opt.plan) {
        model_layout(&m, c, opt.batch, opt.seq, training);
        print_plan(&m);
        return 0;
    }
    DataLoader data = {}, val = {};
    int has_val = !opt.generate && (opt.val[0] || opt.task);
    int mode = c->stateful ? LOADER_STREAMS : opt.batches ? LOADER_CONTIGUOUS : LOADER_RANDOM;
    if (training) open_data(&data, opt.train, mode, opt.seed);
    if (has_val) open_data(&val, opt.val, c->stateful ? LOADER_STREAMS : LOADER_CONTIGUOUS, opt.seed + 0x5eedULL);
    if (opt.task && opt.val_batches == 0) die("--task never ends: --val-batches 0 (all) does not");

    model_build(&m, c, opt.generate ? 1 : opt.batch, opt.generate ? 1 : opt.seq, training);
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
    printf(" | %zu parameters | %s on %s\n", model_parameters(&m), sizeof(floatX) == 2 ? "bf16" : use_tf32 ? "tf32" : "fp32", device_name);
    if (training) {
        if (!opt.task) printf("train %zu tokens", data.num_tokens);
        if (has_val && !opt.task) printf(" | val %zu tokens, %zu batches | ", val.num_tokens, val.num_batches);
        printf("a step is %d x %d x %d = %.0f tokens\n", opt.accum, opt.batch, opt.seq, (double)opt.accum * opt.batch * opt.seq);
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
