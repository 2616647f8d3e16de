// train_baselines.cu: Transformer, Mamba, Mamba-2 and Hyena in CUDA, forward and backward written out by hand. It is
// train_baselines.c function for function: lay the two side by side. The models, their equations and what each flag
// changes stand at the top of the .c, and so do the derivations of the backward passes; here stands what a GPU makes
// different. Both start from the same weights to the bit, read and write the same files, and test/twin.cu holds every
// kernel against its C twin.
//
// Numbers. floatX is bf16, or float with -DPRECISION_FP32 (make PRECISION=fp32).
//   floatX  what is written once and read by matmuls or kernels: activations, gradients of activations, and a copy of
//           the parameters for the matmuls, renewed after every update. bf16 has float's range and 8 bits of precision.
//   float   what many terms are added to: the parameters and their gradients, AdamW's moments, the residual stream and
//           its gradient; scores, softmax sums, states carried across chunks and tokens, Fourier transforms; all
//           statistics. Step sizes and decays are computed in float where they are used,
//           from what floatX keeps of their inputs.
// Kernels load floatX, compute in float and round once, on the way out.
//
// What a GPU makes different:
//   - attention. A block of threads takes 32 queries and meets 32 keys at a time in shared memory: 32 x 32 scores are
//     made, used and forgotten, and no (T,T) tensor exists. Backward it makes them again, twice: once for the gradient
//     of 32 queries, once for that of 32 keys, so that a block owns what it writes and nothing is added atomically. The
//     products run on the float units, not on tensor cores: plain to read, and in a long text most of the step.
//   - linear attention and the scans run in chunks of time:
//     each chunk's sum on its own, the sums in order, each chunk again.
//   - Hyena's long convolution is cuFFT's, in float.
//   - the rest is train_harmonic.cu's to the letter;
//     what its top says of coalescing and of where the time goes holds here.
//
// The same seed gives the same bits in every run on one kind of GPU: no atomic additions anywhere. Sums over rows are
// made in two stages, fixed pieces first and then the pieces in order;
// the embedding's gradient walks rows sorted by token.
//
// Reading order: attention_forward, attention_backward; the mixer of the model in question; layer_forward.
// The rest is the .c.
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

// Lets a kernel have so many bytes of shared memory a block, and returns them: more than 48 KB must be asked for. GPUs of
// compute capability 8.0 and 9.0 give 160 KB and more, 8.6 and 8.9 give 99.
template <typename Kernel>
static size_t shared_ask(Kernel* kernel, size_t bytes, const char* what) {
    int most = 0;
    cudaCheck(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    if (bytes > (size_t)most)
        die("%s of this size need %zu KB of shared memory a block, and %s has %d: choose smaller ones",
            what, bytes >> 10, device_name, most >> 10);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    return bytes;
}

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

// RMSNorm: out = x rstd w with rstd = (mean of x² + 1e-5)^-½, over each row of x (rows,C); rstd (rows) is kept.
// A warp a row.
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
__global__ void rmsnorm_backward_kernel(D* dx, const float* dout, const X* x, const float* rstd, const float* w,
                                        size_t rows, int C, int add) {
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
__global__ void rmsnorm_backward_sums_kernel(float* partial, const float* dout, const X* x, const float* rstd,
                                             size_t rows, size_t piece, int C) {
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
static void rmsnorm_backward(D* dx, float* dw, const float* dout, const X* x, const float* rstd, const float* w,
                             size_t rows, size_t C, int add) {
    if (C % 8 == 0) rmsnorm_backward_kernel<8, D, X><<<blocks(rows, 8), 256>>>(dx, dout, x, rstd, w, rows, (int)C, add);
    else            rmsnorm_backward_kernel<1, D, X><<<blocks(rows, 8), 256>>>(dx, dout, x, rstd, w, rows, (int)C, add);
    cudaCheck(cudaGetLastError());
    size_t splits = split_count(rows), piece = (rows + splits - 1) / splits;
    rmsnorm_backward_sums_kernel<X><<<dim3(blocks(C, 32), (unsigned)splits), 256>>>(
        workspace, dout, x, rstd, rows, piece, (int)C);
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

// dup = dout silu(z),  dz = dout up silu'(z), with silu' = σ (1 + z (1 - σ)).  d is dout on entry and dz on return;
// dup is written.
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
// attention. Each row of qkv (B*T, W), W = (H + 2G) D, holds H query heads, G key heads and G value heads of D numbers:
// [q | k | v]. With G < H ("grouped queries") H/G neighbouring query heads share one key and value head.

enum { MAX_HEAD = 128 };        // the largest D: a thread keeps up to 2 x 64 numbers of it in registers

// Rotary positions (Su et al. 2021). The pair (x[i], x[i + D/2]) of every query and key is turned by the angle
// t 10000^(-2i/D): the product q_t·k_s then depends on t - s alone. table (T,D) holds the cosines, then the sines.
// Angles grow to T, and a float near 10^6 knows only steps of 0.06: they are made in double.
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
__global__ void rope_kernel(floatX* x, const float* table,
                            float sign, size_t rows, size_t T, size_t W, int heads, int D) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, half = D / 2, r = i / (heads * half), pair = i % half;
    if (r >= rows) return;
    floatX *a = x + r * W + i / half % heads * D + pair, *b = a + half;
    float a_i = (float)*a, b_i = (float)*b, cosine = table[r % T * D + pair],
          sine = sign * table[r % T * D + half + pair];
    *a = (floatX)(a_i * cosine - b_i * sine);
    *b = (floatX)(b_i * cosine + a_i * sine);
}
static void rope(floatX* x, const float* table, int sign, size_t B, size_t T, size_t W, size_t heads, size_t D) {
    rope_kernel<<<blocks(B * T * heads * (D / 2), 256), 256>>>(x, table, sign, B * T, T, W, (int)heads, (int)D);
    cudaCheck(cudaGetLastError());
}

// Which keys a query sees: s <= t, with `window` the last `window` of them, with `block` those of t's own block (0: no
// such limit). For every query it is an interval [first_key(t), t], and for every key an interval of queries
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

// The tools of all attention kernels. A block of 64 threads works with tiles of TILE rows (queries or keys) of one head
// in shared memory: TILE x 8N numbers, D <= 8N of them used, the rest 0, N = 4, 8 or 16. The threads stand 8 x 8
// (ty, tx), and thread (ty, tx) has rows ty, ty+8, ty+16, ty+24 and columns tx, tx+8, ... of every result, in
// registers: once it has loaded 4 numbers of one factor and N of the other from shared memory it can do 4N
// multiply-adds. Rows are 8N + 1 numbers apart,
// so that the 8 different rows that a warp reads at once lie in different banks.
enum { TILE = 32, SQUARE = TILE + 1 };      // SQUARE: numbers from row to row of TILE x TILE scores

// What all of them must know of the shape
struct Heads { size_t B, T, H, G, D, W, window, block; };

// Shared memory for so many tiles of D numbers a row, and squares.
template <typename Kernel>
static size_t shared_bytes(Kernel* kernel, size_t D, int tiles, int squares) {
    size_t width = D <= 32 ? 32 : D <= 64 ? 64 : 128;
    return shared_ask(kernel, (tiles * TILE * (width + 1) + squares * TILE * SQUARE) * sizeof(float), "attention heads");
}

// The map of linear attention, elu + 1: positive, so that sums of products can be divided by. And its derivative.
__device__ float phi(float x) { return x > 0 ? x + 1 : fast_exp(x); }
__device__ float phi_slope(float x) { return x > 0 ? 1 : fast_exp(x); }

// tile = scale * x, or phi(x) with `map`: n <= TILE rows of D numbers that lie `stride` apart.
// A warp loads a row at a time.
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

// o(row,c) += z(row,c - 32 piece) for the 32 columns of a piece.
// (Registers have no numbers at run time: every j asks if it is meant.)
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

// Where a block works: sequence b, head h of `heads`, rows t .. t+n-1.
// Late rows have most keys before them, so they come first.
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
// A block takes 32 queries of a head and walks their keys, 32 at a time. Where a larger z turns up than any before
// ("top"), what has been summed so far is scaled down to it (Milakov & Gimelshein 2018; FlashAttention).
template <int N>
__global__ void __launch_bounds__(64, 4) attention_forward_kernel(floatX* out, float* lse, const floatX* qkv, Heads a) {
    extern __shared__ float shared[];
    const int ROW = 8 * N + 1, SIZE = TILE * ROW;
    float *q = shared, *kv = q + SIZE, *p = kv + SIZE;
    Spot at = spot(a, a.H);
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    const floatX *rows = qkv + at.b * a.T * a.W, *keys = rows + (a.H + at.h / (a.H / a.G)) * a.D,
                 *values = keys + a.G * a.D;
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
static void attention_forward(floatX* out, float* lse, const floatX* qkv,
                              size_t window, size_t block, size_t B, size_t T, size_t H, size_t G, size_t D) {
    Heads a = {B, T, H, G, D, (H + 2 * G) * D, window, block};
    unsigned n = spots(a, H);
    auto kernel = D <= 32 ? attention_forward_kernel<4>
                  : D <= 64 ? attention_forward_kernel<8> : attention_forward_kernel<16>;
    kernel<<<n, 64, shared_bytes(kernel, D, 2, 1)>>>(out, lse, qkv, a);
    cudaCheck(cudaGetLastError());
}

// With do_t given, and p recomputed from lse (derived in the .c):
//     dv_s = sum_t p_ts do_t        dp_ts = do_t·v_s        dz_ts = p_ts (dp_ts - delta_t),   delta_t = do_t·o_t
//     dq_t = D^-½ sum_s dz_ts k_s   dk_s = D^-½ sum_t dz_ts q_t
// First kernel: dq and delta of 32 queries, whose keys it walks.
template <int N>
__global__ void __launch_bounds__(64, 4) attention_backward_q_kernel(floatX* dqkv, float* delta, const floatX* dout,
                                                                     const floatX* out, const float* lse,
                                                                     const floatX* qkv, Heads a) {
    extern __shared__ float shared[];
    const int ROW = 8 * N + 1, SIZE = TILE * ROW;
    float *q = shared, *d_o = q + SIZE, *k = d_o + SIZE, *v = k + SIZE, *dz = v + SIZE;
    Spot at = spot(a, a.H);
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    size_t r0 = at.b * a.T + at.t, C = a.H * a.D;
    const floatX *rows = qkv + at.b * a.T * a.W, *keys = rows + (a.H + at.h / (a.H / a.G)) * a.D,
                 *values = keys + a.G * a.D;
    float scale = rsqrtf(a.D), dq[4][N] = {}, l[4] = {}, dl[4] = {};
    tile_load<N>(q, rows + at.t * a.W + at.h * a.D, scale, 0, at.n, a.W, a.D);
    tile_load<N>(d_o, dout + r0 * C + at.h * a.D, 1, 0, at.n, C, a.D);
    __syncthreads();
    for (int i = 0; i < 4; i++) {
        int row = ty + 8 * i;
        if (row < at.n) {
            for (int d = tx; d < (int)a.D; d += 8)
                dl[i] += d_o[row * ROW + d] * (float)out[(r0 + row) * C + at.h * a.D + d];
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
__global__ void __launch_bounds__(64, 4) attention_backward_kv_kernel(floatX* dqkv, const float* delta,
                                                                      const floatX* dout, const float* lse,
                                                                      const floatX* qkv, Heads a) {
    extern __shared__ float shared[];
    const int ROW = 8 * N + 1, SIZE = TILE * ROW;
    float *k = shared, *v = k + SIZE, *q = v + SIZE, *d_o = q + SIZE;
    float *p = d_o + SIZE, *dz = p + TILE * SQUARE;
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
                float l = column < w ? lse[(r0 + column) * a.H + h] : 0,
                      dl = column < w ? delta[(r0 + column) * a.H + h] : 0;
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
static void attention_backward(floatX* dqkv, float* delta, const floatX* dout, const floatX* out,
                               const float* lse, const floatX* qkv,
                               size_t window, size_t block, size_t B, size_t T, size_t H, size_t G, size_t D) {
    Heads a = {B, T, H, G, D, (H + 2 * G) * D, window, block};
    unsigned n = spots(a, H), m = spots(a, G);
    auto q_kernel = D <= 32 ? attention_backward_q_kernel<4>
                    : D <= 64 ? attention_backward_q_kernel<8> : attention_backward_q_kernel<16>;
    q_kernel<<<n, 64, shared_bytes(q_kernel, D, 4, 1)>>>(dqkv, delta, dout, out, lse, qkv, a);
    cudaCheck(cudaGetLastError());
    auto kv_kernel = D <= 32 ? attention_backward_kv_kernel<4>
                     : D <= 64 ? attention_backward_kv_kernel<8> : attention_backward_kv_kernel<16>;
    kv_kernel<<<m, 64, shared_bytes(kv_kernel, D, 4, 2)>>>(dqkv, delta, dout, lse, qkv, a);
    cudaCheck(cudaGetLastError());
}

// One token's attention, for generation: its own q, and the keys and values [k | v] (2 G D) of all tokens so far, of
// which token s lies in cache[s % room]. t: the token's place. A block takes a head; its 8 warps take every 8th token
// each, a lane every 32nd number of the head, with a softmax of their own; the first threads put the 8 together.
__global__ void attention_step_kernel(floatX* out, const floatX* q, const floatX* cache, size_t room, size_t t,
                                      size_t first, Heads a) {
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
        for (int i = 0; i < MAX_HEAD / 32; i++)
            if (lane + 32 * i < D) o[i] = o[i] * shrink + e * (float)v[lane + 32 * i];
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
static void attention_step(floatX* out, const floatX* q, const floatX* cache, size_t room, size_t t, size_t first,
                           size_t H, size_t G, size_t D) {
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
//   3. apply:  a block takes 32 queries. o_t is S before the chunk, times φ(q_t), and the keys of the chunk itself up
//              to t, by scores φ(q_t)·φ(k_s) as in softmax attention.
enum { LINEAR_CHUNK = 64 };
static const float LEAST = 1e-6f;       // what the sum is held above before a division

// Floats of all chunks' sums, and of one
static size_t linear_attention_workspace(size_t B, size_t T, size_t G, size_t D) {
    return B * G * ((T + LINEAR_CHUNK - 1) / LINEAR_CHUNK) * (D + 1) * D;
}

// sums(B,G,chunks,D+1,D), S and then z: over the chunk's tokens and the `heads` heads of group g, φ(left) rightᵀ and
// weight φ(left) (weight NULL: 1).
// left, right: rows of head g * heads + k begin D (g * heads + k) into rows of ldl, ldr.
template <int N>
__global__ void __launch_bounds__(64, 4) linear_sums_kernel(float* sums, const floatX* left, size_t ldl,
                                                            const floatX* right, size_t ldr,
                                                            const float* weight, int heads, Heads a) {
    extern __shared__ float shared[];
    const int ROW = 8 * N + 1, SIZE = TILE * ROW;
    float *l = shared, *r = l + SIZE;
    size_t pieces = (a.D + TILE - 1) / TILE, chunks = (a.T + LINEAR_CHUNK - 1) / LINEAR_CHUNK, i = blockIdx.x;
    size_t d0 = i % pieces * TILE, chunk = i / pieces % chunks, g = i / pieces / chunks % a.G,
           b = i / pieces / chunks / a.G;
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
            tile_add<N>(o, l + d0, 1, ROW, r);            // the transpose of l
            if (threadIdx.x < TILE)
                for (int k = 0; k < n; k++)
                    z += l[k * ROW + d0 + threadIdx.x] * (weight ? weight[(row + k) * a.H + h] : 1);
        }
    float* to = sums + ((b * a.G + g) * chunks + chunk) * (a.D + 1) * a.D;
    for (int k = 0; k < 4; k++)
        for (int j = 0; j < N; j++) {
            size_t d = d0 + threadIdx.x / 8 + 8 * k, c = threadIdx.x % 8 + 8 * j;
            if (d < a.D && c < a.D) to[d * a.D + c] = o[k][j];
        }
    if (threadIdx.x < TILE && d0 + threadIdx.x < a.D) to[a.D * a.D + d0 + threadIdx.x] = z;
}
// Each chunk's sum becomes what stands before it: from state (M for each of n), which receives the end; or from 0 where
// it is NULL. With `reverse` time runs backward.
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
static void linear_sums(float* sums, const floatX* left, size_t ldl, const floatX* right, size_t ldr,
                        const float* weight, int heads, float* state, int reverse, Heads a) {
    size_t chunks = (a.T + LINEAR_CHUNK - 1) / LINEAR_CHUNK, M = (a.D + 1) * a.D;
    unsigned n = (unsigned)((a.D + TILE - 1) / TILE * chunks * a.G * a.B);
    auto kernel = a.D <= 32 ? linear_sums_kernel<4> : a.D <= 64 ? linear_sums_kernel<8> : linear_sums_kernel<16>;
    kernel<<<n, 64, shared_bytes(kernel, a.D, 2, 0)>>>(sums, left, ldl, right, ldr, weight, heads, a);
    cudaCheck(cudaGetLastError());
    linear_carry_kernel<<<blocks(a.B * a.G * M, 64), 64>>>(sums, state, a.B * a.G, chunks, M, reverse);
    cudaCheck(cudaGetLastError());
}

template <int N>
__global__ void __launch_bounds__(64, 4) linear_attention_forward_kernel(floatX* out, float* den, const floatX* qkv,
                                const float* sums, Heads a) {
    extern __shared__ float shared[];
    const int ROW = 8 * N + 1, SIZE = TILE * ROW;
    float *q = shared, *k = q + SIZE, *v = k + SIZE, *p = v + SIZE;
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
        tile_add<N>(o, q + d0, ROW, 1, v);
    }
    for (int i = 0; i < 4; i++)
        for (int d = tx; d < (int)a.D; d += 8) sum[i] += q[(ty + 8 * i) * ROW + d] * z[d];
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
// out (B*T, H D), den (B*T, H). state (B,G,D+1,D), S and then z, is where the sums start and where they end;
// NULL: from 0.
static void linear_attention_forward(floatX* out, float* den, float* state, const floatX* qkv, size_t B, size_t T,
                                     size_t H, size_t G, size_t D) {
    Heads a = {B, T, H, G, D, (H + 2 * G) * D, 0, 0};
    unsigned n = spots(a, H);
    linear_sums(workspace, qkv + H * D, a.W, qkv + (H + G) * D, a.W, NULL, 1, state, 0, a);
    auto kernel = D <= 32 ? linear_attention_forward_kernel<4>
                  : D <= 64 ? linear_attention_forward_kernel<8> : linear_attention_forward_kernel<16>;
    kernel<<<n, 64, shared_bytes(kernel, D, 3, 1)>>>(out, den, qkv, workspace, a);
    cudaCheck(cudaGetLastError());
}

// With n_t = do_t / max(den_t, LEAST) the gradient of S_tᵀ φ(q_t), and m_t = -n_t·o_t that of den_t
// (0 where it was held):
//     dφ(q_t) = S_t n_t + m_t z_t                                 S, z once more forward in time
//     U_s = U_{s+1} + φ(q_s) n_sᵀ      u_s = u_{s+1} + m_s φ(q_s)  the gradients of S and z, backward in time
//     dφ(k_s) = U_s v_s + u_s          dv_s = U_sᵀ φ(k_s)
// Within a chunk both dφ come from the scores n_t·v_s + m_t.
// First n, in the place of do, and m (B*T, H): a warp a head.
__global__ void linear_attention_divide_kernel(floatX* dout, float* m, const floatX* out,
                                               const float* den, size_t n, int D) {
    size_t i = (size_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (i >= n) return;
    float sum = den[i], divide = 1 / (sum > LEAST ? sum : LEAST), dot = 0;
    for (int d = threadIdx.x % 32; d < D; d += 32) {
        floatX x = (floatX)((float)dout[i * D + d] * divide);
        dot += (float)x * (float)out[i * D + d];                // of the rounded n: n·v + m is a small difference
        dout[i * D + d] = x;
    }
    dot = warp_sum(dot);
    if (threadIdx.x % 32 == 0) m[i] = sum > LEAST ? -dot : 0;
}
// dq of 32 queries, from S before the chunk and the chunk's own keys.
template <int N>
__global__ void __launch_bounds__(64, 4) linear_attention_backward_q_kernel(floatX* dqkv, const floatX* dout,
                                                                            const float* m, const floatX* qkv,
                                                                            const float* sums, Heads a) {
    extern __shared__ float shared[];
    const int ROW = 8 * N + 1, SIZE = TILE * ROW;
    float *n = shared, *k = n + SIZE, *v = k + SIZE, *p = v + SIZE;
    Spot at = spot(a, a.H);
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    size_t r0 = at.b * a.T + at.t, g = at.h / (a.H / a.G), chunks = (a.T + LINEAR_CHUNK - 1) / LINEAR_CHUNK,
           chunk = at.t / LINEAR_CHUNK;
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
__global__ void __launch_bounds__(64, 4) linear_attention_backward_kv_kernel(floatX* dqkv, const floatX* dout,
                                                                             const float* m, const floatX* qkv,
                                                                             const float* sums, Heads a) {
    extern __shared__ float shared[];
    const int ROW = 8 * N + 1, SIZE = TILE * ROW;
    float *k = shared, *v = k + SIZE, *q = v + SIZE, *n = q + SIZE;
    float *p = n + SIZE, *dp = p + TILE * SQUARE;
    Spot at = spot(a, a.G);
    int ty = threadIdx.x / 8, tx = threadIdx.x % 8;
    size_t chunks = (a.T + LINEAR_CHUNK - 1) / LINEAR_CHUNK, chunk = at.t / LINEAR_CHUNK,
           end = (chunk + 1) * LINEAR_CHUNK;
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
        tile_add<N>(dv, k + d0, ROW, 1, q);
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
static void linear_attention_backward(floatX* dqkv, float* m, floatX* dout, const floatX* out, const float* den,
                                      const floatX* qkv, size_t B, size_t T, size_t H, size_t G, size_t D) {
    Heads a = {B, T, H, G, D, (H + 2 * G) * D, 0, 0};
    unsigned nq = spots(a, H), nk = spots(a, G);
    linear_attention_divide_kernel<<<blocks(B * T * H, 8), 256>>>(dout, m, out, den, B * T * H, (int)D);
    cudaCheck(cudaGetLastError());
    linear_sums(workspace, qkv + H * D, a.W, qkv + (H + G) * D, a.W, NULL, 1, NULL, 0, a);
    auto q_kernel = D <= 32 ? linear_attention_backward_q_kernel<4>
                    : D <= 64 ? linear_attention_backward_q_kernel<8> : linear_attention_backward_q_kernel<16>;
    q_kernel<<<nq, 64, shared_bytes(q_kernel, D, 3, 1)>>>(dqkv, dout, m, qkv, workspace, a);
    cudaCheck(cudaGetLastError());
    linear_sums(workspace, qkv, a.W, dout, H * D, m, (int)(H / G), NULL, 1, a);
    auto kv_kernel = D <= 32 ? linear_attention_backward_kv_kernel<4>
                     : D <= 64 ? linear_attention_backward_kv_kernel<8> : linear_attention_backward_kv_kernel<16>;
    kv_kernel<<<nk, 64, shared_bytes(kv_kernel, D, 4, 2)>>>(dqkv, dout, m, qkv, workspace, a);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------------------------------------------
// what the other mixers are made of: batched products, a short convolution, two scans, a long convolution

// `count` products like matmul's, of matrices that lie sc, sa, sb numbers apart:
// one launch for all chunks of all sequences.
template <typename Out>
static void matmul_batched(Out* C, const floatX* A, const floatX* B, size_t M, size_t N, size_t K,
                           size_t ldc, size_t lda, size_t ldb, int ta, int tb, float beta,
                           size_t sc, size_t sa, size_t sb, size_t count) {
    float alpha = 1;
    cublasCheck(cublasGemmStridedBatchedEx(cublas, tb ? CUBLAS_OP_T : CUBLAS_OP_N, ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                                           (int)N, (int)M, (int)K, &alpha, B, type_of(B), (int)ldb, (long long)sb,
                                           A, type_of(A), (int)lda, (long long)sa, &beta,
                                           C, type_of(C), (int)ldc, (long long)sc, (int)count,
                                           CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

// log(1 + e^x), written so that no e^x overflows: for x > 0 it is x + log(1 + e^-x). Its derivative is sigmoid(x).
__device__ float softplus(float x) { return (x > 0 ? x : 0) + log1pf(fast_exp(x > 0 ? -x : x)); }

// e^x of an x <= 0, and 0 where e^x is: fast_exp ends at e^-87, which times a decay rate of e^87 would look like one.
__device__ float decay_exp(float x) { return x < -87 ? 0 : fast_exp(x); }

// Number of chunks of L tokens in T; the last may be shorter.
__host__ __device__ static size_t num_chunks(size_t T, size_t L) { return (T + L - 1) / L; }

// partial(splits,C): sums of a(rows,C) b(rows,C) over `piece` rows each, as in sum_rows_kernel
template <typename F>
__global__ void sum_products_kernel(float* partial, const F* a, const F* b, size_t rows, size_t piece, int C) {
    __shared__ float part[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    size_t begin = blockIdx.y * piece, end = begin + piece < rows ? begin + piece : rows;
    float sum = 0;
    if (c < C) for (size_t r = begin + warp; r < end; r += 8) sum += (float)a[r * C + c] * (float)b[r * C + c];
    part[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int w = 1; w < 8; w++) sum += part[w][lane];
    partial[(size_t)blockIdx.y * C + c] = sum;
}
// out(C) += sum over r of a(rows,C) b(rows,C): the gradient of every weight per channel (D)
template <typename F>
static void sum_products(float* out, const F* a, const F* b, size_t rows, size_t C) {
    size_t splits = split_count(rows), piece = (rows + splits - 1) / splits;
    sum_products_kernel<F><<<dim3(blocks(C, 32), (unsigned)splits), 256>>>(workspace, a, b, rows, piece, (int)C);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(C, 64), 64>>>(out, workspace, (int)splits, (int)C);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------------------------------------------
// short causal convolution: every channel on its own, over the last K tokens

enum { MAX_CONV = 8 };          // the largest K

// out[t] = bias + sum_k w[k] x[t-(K-1)+k].  out, x (B,T,C), w (C,K); bias (C), or NULL where the next kernel adds it.
// What came before the first token is zero, or stands in window (B,K-1,C), oldest first. A thread computes N channels
// of one token; the K tokens it reads are its neighbours' too, and come from cache.
template <int N>
__global__ void short_conv_forward_kernel(floatX* out, const floatX* x, const float* w, const float* bias,
                                          const float* window, size_t B, size_t T, size_t C, int K) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= B * T * C) return;
    size_t c = i % C, t = i / C % T, b = i / C / T;
    float sum[N];
    for (int q = 0; q < N; q++) sum[q] = bias ? bias[c + q] : 0;
    for (int k = 0; k < K; k++) {
        if (t + k >= (size_t)K - 1) {
            Pack<floatX, N> row = load<N>(x + i - (K - 1 - k) * C);
            for (int q = 0; q < N; q++) sum[q] += w[(c + q) * K + k] * (float)row.v[q];
        } else if (window) {
            for (int q = 0; q < N; q++) sum[q] += w[(c + q) * K + k] * window[(b * (K - 1) + t + k) * C + c + q];
        }
    }
    Pack<floatX, N> o;
    for (int q = 0; q < N; q++) o.v[q] = (floatX)sum[q];
    store<N>(out + i, o);
}
// window becomes the last K-1 inputs. Row k is time T-(K-1)+k: oldest first, so nothing is lost.
__global__ void short_conv_window_kernel(float* window, const floatX* x, size_t B, size_t T, size_t C, int K) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * C) return;
    size_t c = i % C, b = i / C;
    float* before = window + b * (K - 1) * C + c;
    for (int k = 0; k < K - 1; k++)
        before[k * C] = T + k >= (size_t)K - 1 ? (float)x[(b * T + T + k - (K - 1)) * C + c] : before[(T + k) * C];
}
// window NULL: nothing is carried.
static void short_conv_forward(floatX* out, const floatX* x, const float* w, const float* bias, float* window,
                               size_t B, size_t T, size_t C, size_t K) {
    size_t n = B * T * C;
    if (C % 8 == 0) short_conv_forward_kernel<8><<<blocks(n / 8, 256), 256>>>(out, x, w, bias, window, B, T, C, (int)K);
    else            short_conv_forward_kernel<1><<<blocks(n, 256), 256>>>(out, x, w, bias, window, B, T, C, (int)K);
    cudaCheck(cudaGetLastError());
    if (!window) return;
    short_conv_window_kernel<<<blocks(B * C, 64), 64>>>(window, x, B, T, C, (int)K);
    cudaCheck(cudaGetLastError());
}

// x[s] was used by out[s], ..., out[s+K-1], the last with w[0]:
// dx[s] = sum_k w[k] dout[s+(K-1)-k]  as far as T reaches.
template <int N>
__global__ void short_conv_backward_kernel(floatX* dx, const floatX* dout, const float* w,
                                           size_t B, size_t T, size_t C, int K) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= B * T * C) return;
    size_t c = i % C, s = i / C % T;
    float sum[N] = {};
    for (int k = K - 1; k >= 0 && s + (K - 1 - k) < T; k--) {
        Pack<floatX, N> row = load<N>(dout + i + (K - 1 - k) * C);
        for (int q = 0; q < N; q++) sum[q] += w[(c + q) * K + k] * (float)row.v[q];
    }
    Pack<floatX, N> o;
    for (int q = 0; q < N; q++) o.v[q] = (floatX)sum[q];
    store<N>(dx + i, o);
}
// dw[k] = sum over b, t of dout[t] x[t-(K-1)+k]: pieces of rows as in sum_rows_kernel, K sums a thread.
// partial (splits,C,K)
__global__ void short_conv_backward_sums_kernel(float* partial, const floatX* dout, const floatX* x,
                                                size_t rows, size_t piece, size_t T, int C, int K) {
    __shared__ float part[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    size_t begin = blockIdx.y * piece, end = begin + piece < rows ? begin + piece : rows;
    float sum[MAX_CONV] = {};
    if (c < C) for (size_t r = begin + warp; r < end; r += 8) {
        float d = (float)dout[r * C + c];
        size_t t = r % T;
        #pragma unroll
        for (int k = 0; k < MAX_CONV; k++)              // unrolled, so that the sums are registers
            if (k < K && t + k >= (size_t)K - 1) sum[k] += d * (float)x[(r - (K - 1 - k)) * C + c];
    }
    #pragma unroll
    for (int k = 0; k < MAX_CONV; k++) {
        if (k >= K) break;
        __syncthreads();
        part[warp][lane] = sum[k];
        __syncthreads();
        if (warp > 0 || c >= C) continue;
        for (int w = 1; w < 8; w++) sum[k] += part[w][lane];
        partial[((size_t)blockIdx.y * C + c) * K + k] = sum[k];
    }
}
// dx is written, dw and dbias are added to. No window: training only.
static void short_conv_backward(floatX* dx, float* dw, float* dbias, const floatX* dout, const floatX* x,
                                const float* w, size_t B, size_t T, size_t C, size_t K) {
    size_t n = B * T * C, splits = split_count(B * T), piece = (B * T + splits - 1) / splits;
    sum_rows(dbias, dout, B * T, C);
    if (C % 8 == 0) short_conv_backward_kernel<8><<<blocks(n / 8, 256), 256>>>(dx, dout, w, B, T, C, (int)K);
    else            short_conv_backward_kernel<1><<<blocks(n, 256), 256>>>(dx, dout, w, B, T, C, (int)K);
    cudaCheck(cudaGetLastError());
    short_conv_backward_sums_kernel<<<dim3(blocks(C, 32), (unsigned)splits), 256>>>(
        workspace, dout, x, B * T, piece, T, (int)C, (int)K);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(C * K, 64), 64>>>(dw, workspace, (int)splits, (int)(C * K));
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba's selective scan: a state of N numbers for every channel, whose step size, input and output weights depend on
// the token. For every sequence, channel d and n < N, along t:
//     Δ_t = softplus(dt_t + b_dt)       h_t = e^{Δ_t A} h_{t-1} + Δ_t B_t[n] x_t      y_t = sum_n C_t[n] h_t[n] + D x_t
// with A = -e^a_log. y, x, dt (B,T,E), bc (B,T,2N): B and C of each token, shared by all channels;
// a_log (E,N), b_dt, d (E).
//
// Time is cut into chunks of L tokens that are scanned in parallel: local, carry, apply. A chunk is the map
// h -> e^{A sum Δ} h + (what it reaches from 0), so of the decays only the sum of the steps is kept. A state is N times
// as large as a token; only those at the chunks' starts ever are in memory: starts (B,chunks,N,E).

enum { MAX_STATE = 256 };               // the largest N
enum { OWN = 4 };                       // numbers of the state that a thread takes in the local pass
enum { STATES = 16, CHANNELS = 16, STEPS = 16, PARTS = 8 };     // in the other: a block has 16 x 16 threads, see below

typedef struct { size_t B, T, E, N, L, chunks; } ScanSizes;

// Kernel 1. A thread takes one chunk of one channel and OWN of its N numbers, and walks from 0 to what it reaches.
// Threads run along channels, so loads are coalesced. reached (B,chunks,N,E), total (B,chunks,E): the sum of the steps.
__global__ void selective_scan_forward_local_kernel(float* reached, float* total, const floatX* x, const floatX* dt,
                                                    const floatX* bc, const float* a_log,
                                                    const float* b_dt, ScanSizes q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, groups = (q.N + OWN - 1) / OWN;
    if (i >= q.B * q.chunks * groups * q.E) return;
    size_t e = i % q.E, n = i / q.E % groups * OWN, chunk = i / q.E / groups % q.chunks,
           b = i / q.E / groups / q.chunks;
    size_t begin = chunk * q.L, end = begin + q.L < q.T ? begin + q.L : q.T;
    float A[OWN], h[OWN] = {}, all = 0;
    #pragma unroll
    for (int j = 0; j < OWN; j++) A[j] = n + j < q.N ? -fast_exp(a_log[e * q.N + n + j]) : 0;
    for (size_t t = begin; t < end; t++) {
        size_t row = b * q.T + t, at = row * q.E + e;
        float delta = softplus((float)dt[at] + b_dt[e]), in = delta * (float)x[at];
        #pragma unroll
        for (int j = 0; j < OWN; j++)
            if (n + j < q.N) h[j] = decay_exp(delta * A[j]) * h[j] + (float)bc[row * 2 * q.N + n + j] * in;
        all += delta;
    }
    size_t k = b * q.chunks + chunk;
    #pragma unroll
    for (int j = 0; j < OWN; j++) if (n + j < q.N) reached[(k * q.N + n + j) * q.E + e] = h[j];
    if (n == 0) total[k * q.E + e] = all;
}
// Kernel 2. reached (B,chunks,N,E) becomes the state at the start of each chunk. state (B,N,E): what the last call
// left, replaced by what this one leaves; NULL: from zero.
__global__ void selective_scan_forward_carry_kernel(float* reached, float* state, const float* total,
                                                    const float* a_log, ScanSizes q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.N * q.E) return;
    size_t e = i % q.E, n = i / q.E % q.N, b = i / q.E / q.N;
    float A = -fast_exp(a_log[e * q.N + n]), h = state ? state[i] : 0;
    for (size_t k = b * q.chunks; k < (b + 1) * q.chunks; k++) {
        size_t at = (k * q.N + n) * q.E + e;
        float end = decay_exp(A * total[k * q.E + e]) * h + reached[at];
        reached[at] = h;
        h = end;
    }
    if (state) state[i] = h;
}

// The tile that a block of kernel 3 works on: STEPS tokens x CHANNELS channels. As a loader and storer, thread i is at
// token i / CHANNELS and channel i % CHANNELS; as part of the scan it owns number i % STATES of channel i / STATES, so
// the 16 threads of a channel are neighbours in a warp, and add up over n with shuffles.
__device__ float sum_states(float x) {
    for (int d = STATES / 2; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

// Kernel 3. A block takes one chunk of CHANNELS channels and walks it from its start, tile by tile. N > STATES: 16
// numbers at a time; where one tile ends, h (CHANNELS,N) remembers the state for the next.
__global__ void selective_scan_forward_apply_kernel(floatX* y, const float* starts, const floatX* x, const floatX* dt,
                                                    const floatX* bc, const float* a_log, const float* b_dt,
                                                    const float* d, ScanSizes q) {
    extern __shared__ float h[];
    __shared__ float delta[STEPS][CHANNELS];
    __shared__ float in[STEPS][CHANNELS];
    __shared__ float sum[STEPS][CHANNELS];
    int n = threadIdx.x % STATES, c = threadIdx.x / STATES, row = threadIdx.x / CHANNELS,
        column = threadIdx.x % CHANNELS, N = q.N;
    size_t groups = (q.E + CHANNELS - 1) / CHANNELS, first = blockIdx.x % groups * CHANNELS,
           k = blockIdx.x / groups, b = k / q.chunks;
    size_t begin = k % q.chunks * q.L, end = begin + q.L < q.T ? begin + q.L : q.T, e = first + c,
           mine = first + column;
    for (int s = n; s < N; s += STATES) h[c * N + s] = e < q.E ? starts[(k * N + s) * q.E + e] : 0;
    for (size_t t0 = begin; t0 < end; t0 += STEPS) {
        int len = end - t0 < STEPS ? (int)(end - t0) : STEPS, there = row < len && mine < q.E;
        size_t at = (b * q.T + t0 + row) * q.E + mine;
        float step = there ? softplus((float)dt[at] + b_dt[mine]) : 0, input = there ? (float)x[at] : 0;
        delta[row][column] = step;
        in[row][column] = step * input;
        sum[row][column] = there ? d[mine] * input : 0;
        __syncthreads();
        for (int s = n; s - n < N; s += STATES) {
            int live = s < N && e < q.E;
            const floatX* bct = bc + (b * q.T + t0) * 2 * N + s;
            float A = live ? -fast_exp(a_log[e * N + s]) : 0, now = live ? h[c * N + s] : 0;
            for (int t = 0; t < len; t++, bct += 2 * N) {
                now = decay_exp(delta[t][c] * A) * now + (live ? (float)bct[0] * in[t][c] : 0);
                float out = sum_states(live ? (float)bct[N] * now : 0);
                if (n == 0) sum[t][c] += out;
            }
            if (live) h[c * N + s] = now;
        }
        __syncthreads();
        if (there) y[at] = (floatX)sum[row][column];
    }
}

static ScanSizes selective_scan_sizes(size_t L, size_t B, size_t T, size_t E, size_t N) {
    ScanSizes q = {B, T, E, N, L, num_chunks(T, L)};
    return q;
}
static void selective_scan_forward(floatX* y, float* starts, const floatX* x, const floatX* dt, const floatX* bc,
                                   const float* a_log, const float* b_dt, const float* d, float* state,
                                   size_t L, size_t B, size_t T, size_t E, size_t N) {
    ScanSizes q = selective_scan_sizes(L, B, T, E, N);
    size_t local = B * q.chunks * ((N + OWN - 1) / OWN) * E;
    selective_scan_forward_local_kernel<<<blocks(local, 128), 128>>>(starts, workspace, x, dt, bc, a_log, b_dt, q);
    cudaCheck(cudaGetLastError());
    selective_scan_forward_carry_kernel<<<blocks(B * N * E, 64), 64>>>(starts, state, workspace, a_log, q);
    cudaCheck(cudaGetLastError());
    unsigned grid = (unsigned)(B * q.chunks * blocks(E, CHANNELS));
    selective_scan_forward_apply_kernel<<<grid, STATES * CHANNELS, N * CHANNELS * sizeof(float)>>>(
        y, starts, x, dt, bc, a_log, b_dt, d, q);
    cudaCheck(cudaGetLastError());
}

// Backward. With a_t = e^{Δ_t A}, the whole gradient g_t of h_t runs the recurrence in reverse, and q_t = a_t h_{t-1}:
//     g_t = C_t dy_t + a_{t+1} g_{t+1}
//     dC_t = sum_d dy_t h_t            dB_t = sum_d g_t Δ_t x_t             dx_t = D dy_t + Δ_t sum_n g_t B_t
//     dΔ_t = sum_n g_t (B_t x_t + A q_t)         ddt = dΔ sigmoid(dt + b_dt)
//     dA = sum_t g_t Δ_t q_t           dA_log = A dA                        dD = sum_t x_t dy_t
// What a step hands on to its left is r_t = a_t g_t = a_t (C_t dy_t + r_{t+1}), a map again: the same three kernels,
// from the last chunk to the first. reached (B,chunks,N,E) is r at each chunk's left end.
__global__ void selective_scan_backward_local_kernel(float* reached, float* total, const floatX* dy, const floatX* dt,
                                                     const floatX* bc, const float* a_log,
                                                     const float* b_dt, ScanSizes q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, groups = (q.N + OWN - 1) / OWN;
    if (i >= q.B * q.chunks * groups * q.E) return;
    size_t e = i % q.E, n = i / q.E % groups * OWN, chunk = i / q.E / groups % q.chunks,
           b = i / q.E / groups / q.chunks;
    size_t begin = chunk * q.L, end = begin + q.L < q.T ? begin + q.L : q.T;
    float A[OWN], r[OWN] = {}, all = 0;
    #pragma unroll
    for (int j = 0; j < OWN; j++) A[j] = n + j < q.N ? -fast_exp(a_log[e * q.N + n + j]) : 0;
    for (size_t t = end; t-- > begin;) {
        size_t row = b * q.T + t, at = row * q.E + e;
        float delta = softplus((float)dt[at] + b_dt[e]), d = (float)dy[at];
        #pragma unroll
        for (int j = 0; j < OWN; j++)
            if (n + j < q.N) r[j] = decay_exp(delta * A[j]) * ((float)bc[row * 2 * q.N + q.N + n + j] * d + r[j]);
        all += delta;
    }
    size_t k = b * q.chunks + chunk;
    #pragma unroll
    for (int j = 0; j < OWN; j++) if (n + j < q.N) reached[(k * q.N + n + j) * q.E + e] = r[j];
    if (n == 0) total[k * q.E + e] = all;
}
// reached (B,chunks,N,E) becomes the r that enters each chunk from its right
__global__ void selective_scan_backward_carry_kernel(float* reached, const float* total,
                                                     const float* a_log, ScanSizes q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.N * q.E) return;
    size_t e = i % q.E, n = i / q.E % q.N, b = i / q.E / q.N;
    float A = -fast_exp(a_log[e * q.N + n]), r = 0;
    for (size_t k = (b + 1) * q.chunks; k-- > b * q.chunks;) {
        size_t at = (k * q.N + n) * q.E + e;
        float end = decay_exp(A * total[k * q.E + e]) * r + reached[at];
        reached[at] = r;
        r = end;
    }
}

// Kernel 3. A block takes one chunk and one of `parts` parts of the channels, CHANNELS of them at a time, threads as in
// the forward. It walks the chunk twice: forward, to keep the state before each tile in shared memory, and then back,
// tile by tile; the states inside a tile are computed once more, into registers. Nothing of size T N leaves the chip. q
// is a product of what is there, never h_t less something or divided by a decay, which may be 0.
// B and C get a share from every channel: a part adds up its own in shares (parts,B*T,2N), and kernel 4 the parts, in
// order. carries holds the r that enter; in their place the block leaves its dA.
__global__ void selective_scan_backward_apply_kernel(float* dx, floatX* ddt, float* shares, float* carries,
                                                     const floatX* dy, const floatX* x, const floatX* dt,
                                                     const floatX* bc, const float* starts, const float* a_log,
                                                     const float* b_dt, const float* d, ScanSizes q, int parts) {
    extern __shared__ float kept[];             // (tiles,CHANNELS,N) states, (CHANNELS,N) r, (CHANNELS,N) dA
    __shared__ float delta[STEPS][CHANNELS];
    __shared__ float xs[STEPS][CHANNELS];
    __shared__ float dys[STEPS][CHANNELS];
    __shared__ float gB[STEPS][CHANNELS];
    __shared__ float ddelta[STEPS][CHANNELS];
    __shared__ float dB[STEPS][CHANNELS / 2][STATES];           // of each warp, which has two channels
    __shared__ float dC[STEPS][CHANNELS / 2][STATES];
    int n = threadIdx.x % STATES, c = threadIdx.x / STATES, row = threadIdx.x / CHANNELS,
        column = threadIdx.x % CHANNELS, N = q.N;
    size_t k = blockIdx.x / parts, b = k / q.chunks, begin = k % q.chunks * q.L,
           end = begin + q.L < q.T ? begin + q.L : q.T;
    int tiles = (int)((end - begin + STEPS - 1) / STEPS), part = blockIdx.x % parts;
    float *carry = kept + (q.L + STEPS - 1) / STEPS * CHANNELS * N, *dA = carry + CHANNELS * N;
    float* share = shares + ((size_t)part * q.B * q.T + b * q.T) * 2 * N;
    for (size_t first = (size_t)part * CHANNELS; first < q.E; first += (size_t)parts * CHANNELS) {
        size_t e = first + c, mine = first + column;
        for (int s = n; s < N; s += STATES) {
            size_t at = (k * N + s) * q.E + e;
            kept[c * N + s] = e < q.E ? starts[at] : 0;
            carry[c * N + s] = e < q.E ? carries[at] : 0;
            dA[c * N + s] = 0;
        }
        for (int pass = 1; pass < 2 * tiles; pass++) {          // tiles 0 .. tiles-2 forward, then tiles-1 .. 0 back
            int back = pass >= tiles, tile = back ? 2 * tiles - 1 - pass : pass - 1;
            size_t t0 = begin + (size_t)tile * STEPS, at = (b * q.T + t0 + row) * q.E + mine;
            int len = end - t0 < STEPS ? (int)(end - t0) : STEPS, there = row < len && mine < q.E;
            float pre = there ? (float)dt[at] + b_dt[mine] : 0;
            __syncthreads();                                    // the last tile is done with
            delta[row][column] = there ? softplus(pre) : 0;
            xs[row][column] = there ? (float)x[at] : 0;
            dys[row][column] = there ? (float)dy[at] : 0;
            gB[row][column] = ddelta[row][column] = 0;
            __syncthreads();
            for (int s0 = 0; s0 < N; s0 += STATES) {
                int s = s0 + n, live = s < N && e < q.E;
                const floatX* bct = bc + (b * q.T + t0) * 2 * N + s;
                float A = live ? -fast_exp(a_log[e * N + s]) : 0, h = live ? kept[(tile * CHANNELS + c) * N + s] : 0;
                float decay[STEPS], before[STEPS];
                #pragma unroll
                for (int t = 0; t < STEPS; t++) {
                    if (t >= len) break;
                    decay[t] = decay_exp(delta[t][c] * A);
                    before[t] = h;
                    h = decay[t] * h + (live ? (float)bct[2 * N * t] * delta[t][c] * xs[t][c] : 0);
                }
                if (!back) {
                    if (live) kept[((tile + 1) * CHANNELS + c) * N + s] = h;
                    continue;
                }
                float r = live ? carry[c * N + s] : 0, sum_dA = 0;
                #pragma unroll
                for (int t = STEPS - 1; t >= 0; t--) {
                    if (t >= len) continue;
                    float Bt = live ? (float)bct[2 * N * t] : 0, Ct = live ? (float)bct[2 * N * t + N] : 0,
                          in = delta[t][c] * xs[t][c];
                    float past = decay[t] * before[t], g = Ct * dys[t][c] + r;
                    float share_B = g * in, share_C = dys[t][c] * (past + Bt * in);
                    share_B += __shfl_xor_sync(0xffffffffu, share_B, STATES);           // the warp's other channel
                    share_C += __shfl_xor_sync(0xffffffffu, share_C, STATES);
                    if (c % 2 == 0) { dB[t][c / 2][n] = share_B; dC[t][c / 2][n] = share_C; }
                    float sum_gB = sum_states(g * Bt), sum_delta = sum_states(g * (Bt * xs[t][c] + A * past));
                    if (n == 0) { gB[t][c] += sum_gB; ddelta[t][c] += sum_delta; }
                    sum_dA += g * delta[t][c] * past;
                    r = decay[t] * g;
                }
                if (live) { carry[c * N + s] = r; dA[c * N + s] += sum_dA; }
                __syncthreads();
                // thread i adds up dB, dC of token i / 16, number i % 16
                int number = s0 + column;
                if (row < len && number < N) {
                    float sum_B = 0, sum_C = 0, *to = share + (t0 + row) * 2 * N + number;
                    for (int w = 0; w < CHANNELS / 2; w++) { sum_B += dB[row][w][column]; sum_C += dC[row][w][column]; }
                    to[0] = first < (size_t)parts * CHANNELS ? sum_B : to[0] + sum_B;
                    to[N] = first < (size_t)parts * CHANNELS ? sum_C : to[N] + sum_C;
                }
                __syncthreads();
            }
            if (!back || !there) continue;
            dx[at] = d[mine] * dys[row][column] + delta[row][column] * gB[row][column];
            ddt[at] = (floatX)(ddelta[row][column] * sigmoid(pre));
        }
        for (int s = n; s < N; s += STATES) if (e < q.E) carries[(k * N + s) * q.E + e] = dA[c * N + s];
    }
}
// Kernel 4, sums in a fixed order: dbc (B*T,2N) of the parts; da_log (E,N) += A sum over chunks of dA.
__global__ void selective_scan_backward_shares_kernel(floatX* dbc, const float* shares, size_t n, int parts) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0;
    for (int part = 0; part < parts; part++) sum += shares[part * n + i];
    dbc[i] = (floatX)sum;
}
__global__ void selective_scan_backward_decays_kernel(float* da_log, const float* dA, const float* a_log, ScanSizes q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.N * q.E) return;
    size_t e = i % q.E, n = i / q.E;
    float sum = 0;
    for (size_t k = 0; k < q.B * q.chunks; k++) sum += dA[k * q.N * q.E + i];
    da_log[e * q.N + n] -= fast_exp(a_log[e * q.N + n]) * sum;
}

// Into how many parts the channels of a chunk go: enough blocks for a GPU, few enough shares of dB and dC.
static int scan_parts(size_t E) { return (int)smin(PARTS, blocks(E, CHANNELS)); }

// How many numbers the workspace must hold: carries, totals, shares.
static size_t selective_scan_workspace(size_t L, size_t B, size_t T, size_t E, size_t N) {
    return B * num_chunks(T, L) * (N + 1) * E + scan_parts(E) * B * T * 2 * N;
}

// dx (float: two products with weights will be added), ddt (B,T,E), dbc (B,T,2N) are written;
// da_log, db_dt, dd are added to.
static void selective_scan_backward(float* dx, floatX* ddt, floatX* dbc, float* da_log, float* db_dt, float* dd,
                                    const floatX* dy, const floatX* x, const floatX* dt, const floatX* bc,
                                    const float* starts, const float* a_log, const float* b_dt, const float* d,
                                    size_t L, size_t B, size_t T, size_t E, size_t N) {
    ScanSizes q = selective_scan_sizes(L, B, T, E, N);
    size_t local = B * q.chunks * ((N + OWN - 1) / OWN) * E,
           shared = (num_chunks(L, STEPS) + 2) * CHANNELS * N * sizeof(float);
    float *carries = workspace, *total = carries + B * q.chunks * N * E, *shares = total + B * q.chunks * E;
    int parts = scan_parts(E);
    selective_scan_backward_local_kernel<<<blocks(local, 128), 128>>>(carries, total, dy, dt, bc, a_log, b_dt, q);
    cudaCheck(cudaGetLastError());
    selective_scan_backward_carry_kernel<<<blocks(B * N * E, 64), 64>>>(carries, total, a_log, q);
    cudaCheck(cudaGetLastError());
    shared_ask(selective_scan_backward_apply_kernel, shared, "mamba's states (--d-state)");
    unsigned grid = (unsigned)(B * q.chunks * parts);
    selective_scan_backward_apply_kernel<<<grid, STATES * CHANNELS, shared>>>(
        dx, ddt, shares, carries, dy, x, dt, bc, starts, a_log, b_dt, d, q, parts);
    cudaCheck(cudaGetLastError());
    selective_scan_backward_shares_kernel<<<blocks(B * T * 2 * N, 256), 256>>>(dbc, shares, B * T * 2 * N, parts);
    cudaCheck(cudaGetLastError());
    selective_scan_backward_decays_kernel<<<blocks(N * E, 64), 64>>>(da_log, carries, a_log, q);
    cudaCheck(cudaGetLastError());
    sum_rows(db_dt, ddt, B * T, E);
    sum_products(dd, x, dy, B * T, E);
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba-2's scan, "state space duality" (SSD). One decay for all P channels and N state numbers of a head: then L
// tokens at a time can be written as matrix products. Heads h < H, channels p < P, E = H P:
//     Δ_t = softplus(dt_t + b_dt)                           a_t = Δ_t A (<= 0)
//     S_t = e^{a_t} S_{t-1} + B_t (Δ_t x_t)ᵀ  (N,P)         y_t = C_t S_t + D x_t
// In a chunk that starts from state S, with u_t = Δ_t x_t:
//     y_t = sum_{j <= t} e^{a_{j+1} + ... + a_t} (C_t·B_j) u_j  +  e^{a_0 + ... + a_t} C_t S  +  D x_t
//     S'  = e^{a_0 + ... + a_last} S + sum_j e^{a_{j+1} + ... + a_last} B_j u_jᵀ
// Every exponent is summed up as it stands here, from numbers of one sign (why: see the .c).
//
// Here every product is one batched call for all chunks of all sequences. All heads share B and C, so those with a
// state are done for all heads at once, with E columns; those inside a chunk have one (L,L) matrix a head. Kernels only
// prepare operands and apply decays. For one stride to lead from chunk to chunk, T is padded to Tp = chunks L; in the
// padding all operands are zero and so are the steps, which changes nothing. Two layouts: time first (B,Tp,E), and head
// first (B,H,Tp,P). act (B,T,W) with W = E + 2N holds x, B and C of each token beside each other; dt (B,T,H);
// a_log, b_dt, d (H).

typedef struct { size_t B, T, H, P, N, L, chunks, Tp, E, W; } SSD;
static SSD ssd_sizes(size_t L, size_t B, size_t T, size_t H, size_t P, size_t N) {
    SSD q = {B, T, H, P, N, L, num_chunks(T, L), num_chunks(T, L) * L, H * P, H * P + 2 * N};
    return q;
}

// What both passes compute on the way. Q = B*Tp rows, G = B*chunks chunks.
typedef struct {
    float *delta, *from_start, *to_end;     // (Q,H): Δ; e^{a_0 + ... + a_t}; e^{a_{t+1} + ... + a_last}, of a chunk
    floatX *b, *c;                          // (Q,N): B, C
    floatX *u, *uw;                         // (B,H,Tp,P): Δ x;  (Q,E): to_end Δ x
    floatX *scores, *M;                     // (G,L,L): C_t·B_j, for all heads;  (B,H,chunks,L,L): times the decay
                                            //      from j to t
    floatX *inside, *past;                  // (B,H,Tp,P): M u;  (Q,E): C_t S. Backward: Mᵀ dy
    float *sums;                            // (G,N,E): what a chunk adds to the state
    floatX *dyh, *dyw, *dstates, *future;   // only for training: (B,H,Tp,P), (Q,E), (G,N,E), (Q,E): dy; from_start dy;
                                            //      dS'; B_j dS'
    floatX *dM, *dscores;                   // as M, scores
    float *db, *dc;                         // (Q,N)
    float *from_past, *to_future, *du_x, *dy_x;     // (Q,H): see ssd_backward_rows_kernel
} SSDScratch;

// Where number i of (B,Tp,E) lies head first.
__device__ size_t head_first(size_t i, SSD q) {
    size_t e = i % q.E, t = i / q.E % q.Tp, b = i / q.E / q.Tp;
    return ((b * q.H + e / q.P) * q.Tp + t) * q.P + e % q.P;
}

// The steps and decays of one chunk of one head, a thread each.
__global__ void ssd_steps_kernel(float* delta, float* from_start, float* to_end, const floatX* dt, const float* a_log,
                                 const float* b_dt, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.chunks * q.H) return;
    size_t h = i % q.H, k = i / q.H % q.chunks, b = i / q.H / q.chunks, at = (b * q.Tp + k * q.L) * q.H + h;
    float A = -fast_exp(a_log[h]), sum = 0;
    for (size_t j = 0; j < q.L; j++) {
        size_t t = k * q.L + j;
        float step = t < q.T ? softplus((float)dt[(b * q.T + t) * q.H + h] + b_dt[h]) : 0;
        delta[at + j * q.H] = step;
        from_start[at + j * q.H] = decay_exp(sum += step * A);
    }
    sum = 0;
    for (size_t j = q.L; j-- > 0; sum += delta[at + j * q.H] * A) to_end[at + j * q.H] = decay_exp(sum);
}
// act -> b, c, u, uw, with zeros in the padding. A thread writes one number of one padded row.
__global__ void ssd_operands_kernel(floatX* bm, floatX* cm, floatX* u, floatX* uw, const floatX* act,
                                    const float* delta, const float* to_end, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.Tp * q.W) return;
    size_t w = i % q.W, row = i / q.W, t = row % q.Tp, b = row / q.Tp;
    float v = t < q.T ? (float)act[(b * q.T + t) * q.W + w] : 0;
    if (w < q.E) {
        size_t at = row * q.H + w / q.P;
        u[head_first(row * q.E + w, q)] = (floatX)(delta[at] * v);
        uw[row * q.E + w] = (floatX)(to_end[at] * delta[at] * v);
    } else if (w < q.E + q.N) {
        bm[row * q.N + w - q.E] = (floatX)v;
    } else {
        cm[row * q.N + w - q.E - q.N] = (floatX)v;
    }
}
// M[t][j] = e^{a_{j+1} + ... + a_t} scores[t][j] for j <= t, else 0. A block takes one chunk of one head, a thread its
// column j, down which the exponent grows by one term a row; neighbours write neighbours.
__global__ void ssd_mask_kernel(floatX* M, const floatX* scores, const float* delta, const float* a_log, SSD q) {
    size_t k = blockIdx.x % q.chunks, h = blockIdx.x / q.chunks % q.H, b = blockIdx.x / q.chunks / q.H, L = q.L;
    const float* step = delta + (b * q.Tp + k * L) * q.H + h;
    float A = -fast_exp(a_log[h]);
    M += (size_t)blockIdx.x * L * L;
    scores += (b * q.chunks + k) * L * L;
    for (size_t j = threadIdx.x; j < L; j += blockDim.x) {
        float sum = 0;
        for (size_t t = 0; t < L; t++) {
            if (t > j) sum += step[t * q.H] * A;
            M[t * L + j] = (floatX)(t < j ? 0 : decay_exp(sum) * (float)scores[t * L + j]);
        }
    }
}
// What a chunk's products need, and M.
static void ssd_prepare(const SSDScratch* s, const floatX* act, const floatX* dt, const float* a_log,
                        const float* b_dt, SSD q) {
    size_t Q = q.B * q.Tp, G = q.B * q.chunks, L = q.L;
    ssd_steps_kernel<<<blocks(G * q.H, 64), 64>>>(s->delta, s->from_start, s->to_end, dt, a_log, b_dt, q);
    cudaCheck(cudaGetLastError());
    ssd_operands_kernel<<<blocks(Q * q.W, 256), 256>>>(s->b, s->c, s->u, s->uw, act, s->delta, s->to_end, q);
    cudaCheck(cudaGetLastError());
    matmul_batched(s->scores, s->c, s->b, L, L, q.N, L, q.N, q.N, 0, 1, 0, L * L, L * q.N, L * q.N, G);
    ssd_mask_kernel<<<(unsigned)(G * q.H), 64>>>(s->M, s->scores, s->delta, a_log, q);
    cudaCheck(cudaGetLastError());
}

// states (G,N,E): S before each chunk, rounded for the products; the running state itself is float. state (B,H,N,P):
// what the last call left, replaced by what this one leaves; NULL: from zero.
__global__ void ssd_carry_kernel(floatX* states, float* state, const float* sums, const float* from_start, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.N * q.E) return;
    size_t e = i % q.E, n = i / q.E % q.N, b = i / q.E / q.N, h = e / q.P,
           mine = ((b * q.H + h) * q.N + n) * q.P + e % q.P;
    float S = state ? state[mine] : 0;
    for (size_t k = 0; k < q.chunks; k++) {
        size_t at = ((b * q.chunks + k) * q.N + n) * q.E + e;
        states[at] = (floatX)S;
        S = from_start[(b * q.Tp + k * q.L + q.L - 1) * q.H + h] * S + sums[at];
    }
    if (state) state[mine] = S;
}
// y (B,T,E) = inside + from_start past + D x
__global__ void ssd_output_kernel(floatX* y, const floatX* inside, const floatX* past, const floatX* act,
                                  const float* from_start, const float* d, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.T * q.E) return;
    size_t e = i % q.E, row = i / q.E, padded = row / q.T * q.Tp + row % q.T, at = padded * q.E + e, h = e / q.P;
    y[i] = (floatX)((float)inside[head_first(at, q)] + from_start[padded * q.H + h] * (float)past[at]
                    + d[h] * (float)act[row * q.W + e]);
}
// states are kept for the backward.
static void ssd_forward(floatX* y, floatX* states, const SSDScratch* s, const floatX* act, const floatX* dt,
                        const float* a_log, const float* b_dt, const float* d, float* state, SSD q) {
    size_t G = q.B * q.chunks, L = q.L, N = q.N, E = q.E, P = q.P;
    ssd_prepare(s, act, dt, a_log, b_dt, q);
    matmul_batched(s->inside, s->M, s->u, L, P, L, P, L, P, 0, 0, 0, L * P, L * L, L * P, G * q.H);
    matmul_batched(s->sums, s->b, s->uw, N, E, L, E, N, E, 1, 0, 0, N * E, L * N, L * E, G);
    ssd_carry_kernel<<<blocks(q.B * N * E, 64), 64>>>(states, state, s->sums, s->from_start, q);
    cudaCheck(cudaGetLastError());
    matmul_batched(s->past, s->c, states, L, E, N, E, N, E, 0, 0, 0, L * E, L * N, N * E, G);
    ssd_output_kernel<<<blocks(q.B * q.T * E, 256), 256>>>(y, s->inside, s->past, act, s->from_start, d, q);
    cudaCheck(cudaGetLastError());
}

// Backward, as derived in the .c. The gradient dS' of the state after a chunk goes from the last chunk to the first:
//     dS = e^{a_0 + ... + a_last} dS' + sum_t e^{a_0 + ... + a_t} C_t dy_tᵀ
// Inside a chunk, with M_tj = decay_tj (C_t·B_j):
//     du_j = sum_{t >= j} M_tj dy_t + to_end_j B_j dS'      dx = Δ du + D dy      dΔ = du·x + A da      dD = sum dy·x
//     dM_tj = dy_t·u_j          dC_t = sum_j decay_tj dM_tj B_j + from_start_t S dy_t
//                               dB_j = sum_t decay_tj dM_tj C_t + to_end_j dS' u_j           (both summed over heads)
//     da_t = sum_{j < t <= i} M_ij dM_ij  +  sum_{i >= t} from_start_i (C_i S)·dy_i
//            +  sum_{j < t} to_end_j (B_j dS')·u_j  +  e^{all} S·dS'
//     dA_log = A dA = sum_t a_t da_t
// The sums over heads in dC and dB are those over E that a product makes anyway, but for decay dM,
// which a kernel adds up.

// dy (B,T,E) -> dyh, dyw, with zeros in the padding
__global__ void ssd_backward_operands_kernel(floatX* dyh, floatX* dyw, const floatX* dy,
                                             const float* from_start, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.Tp * q.E) return;
    size_t e = i % q.E, row = i / q.E, t = row % q.Tp, b = row / q.Tp;
    float v = t < q.T ? (float)dy[(b * q.T + t) * q.E + e] : 0;
    dyh[head_first(i, q)] = (floatX)v;
    dyw[i] = (floatX)(from_start[row * q.H + e / q.P] * v);
}
// dstates (G,N,E): dS' of each chunk, from the right. sums: from_start C dy of each.
__global__ void ssd_backward_carry_kernel(floatX* dstates, const float* sums, const float* from_start, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.N * q.E) return;
    size_t e = i % q.E, n = i / q.E % q.N, b = i / q.E / q.N, h = e / q.P;
    float dS = 0;
    for (size_t k = q.chunks; k-- > 0;) {
        size_t at = ((b * q.chunks + k) * q.N + n) * q.E + e;
        dstates[at] = (floatX)dS;
        dS = from_start[(b * q.Tp + k * q.L + q.L - 1) * q.H + h] * dS + sums[at];
    }
}
// dM becomes decay dM, 0 for j > t: threads as in ssd_mask_kernel
__global__ void ssd_backward_mask_kernel(floatX* dM, const float* delta, const float* a_log, SSD q) {
    size_t k = blockIdx.x % q.chunks, h = blockIdx.x / q.chunks % q.H, b = blockIdx.x / q.chunks / q.H, L = q.L;
    const float* step = delta + (b * q.Tp + k * L) * q.H + h;
    float A = -fast_exp(a_log[h]);
    dM += (size_t)blockIdx.x * L * L;
    for (size_t j = threadIdx.x; j < L; j += blockDim.x) {
        float sum = 0;
        for (size_t t = 0; t < L; t++) {
            if (t > j) sum += step[t * q.H] * A;
            dM[t * L + j] = (floatX)(t < j ? 0 : decay_exp(sum) * (float)dM[t * L + j]);
        }
    }
}
// dscores (G,L,L) = sum over heads, in order, of decay dM
__global__ void ssd_backward_scores_kernel(floatX* dscores, const floatX* dM, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, size = q.L * q.L;
    if (i >= q.B * q.chunks * size) return;
    size_t k = i / size % q.chunks, b = i / size / q.chunks;
    float sum = 0;
    for (size_t h = 0; h < q.H; h++) sum += (float)dM[((b * q.H + h) * q.chunks + k) * size + i % size];
    dscores[i] = (floatX)sum;
}
// A warp takes one token of one head, its lanes the P channels:
// du and dx, and four sums over p, of which da and dΔ are made:
//     from_past = from_start (C S)·dy      to_future = to_end (B dS')·u      du_x = du·x      dy_x = dy·x
__global__ void ssd_backward_rows_kernel(floatX* dact, float* from_past, float* to_future, float* du_x, float* dy_x,
                                         const floatX* inside, const floatX* past, const floatX* future,
                                         const floatX* act, const floatX* dy, const float* delta,
                                         const float* from_start, const float* to_end, const float* d, SSD q) {
    size_t i = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (i >= q.B * q.T * q.H) return;           // a whole warp leaves
    size_t h = i % q.H, row = i / q.H, padded = row / q.T * q.Tp + row % q.T, at = padded * q.H + h;
    float step = delta[at], start = from_start[at], end = to_end[at], sum[4] = {};
    for (size_t p = threadIdx.x % 32; p < q.P; p += 32) {
        size_t e = h * q.P + p, wide = padded * q.E + e;
        float x = (float)act[row * q.W + e], g = (float)dy[row * q.E + e], f = end * (float)future[wide];
        float du = (float)inside[head_first(wide, q)] + f;
        sum[0] += start * (float)past[wide] * g;
        sum[1] += f * step * x;
        sum[2] += du * x;
        sum[3] += g * x;
        dact[row * q.W + e] = (floatX)(step * du + d[h] * g);
    }
    #pragma unroll
    for (int k = 0; k < 4; k++) sum[k] = warp_sum(sum[k]);
    if (threadIdx.x % 32 > 0) return;
    from_past[at] = sum[0];
    to_future[at] = sum[1];
    du_x[at] = sum[2];
    dy_x[at] = sum[3];
}
// A block takes one chunk of one head: da, and from it ddt and the chunk's share of dA_log, dD and db_dt,
// partial (3,G,H). All threads add up e^{all} S·dS'; then one warp walks the tokens twice. Backward, columns[j] is the
// sum of M_ij dM_ij over i >= t, and their sum over j < t the first term of da_t; M dM is scores times what
// ssd_backward_mask_kernel left in dM.
__global__ void ssd_backward_steps_kernel(floatX* ddt, float* partial, const floatX* scores, const floatX* dM,
                                          const floatX* states, const floatX* dstates, const float* from_past,
                                          const float* to_future, const float* du_x, const float* dy_x,
                                          const float* delta, const float* from_start, const floatX* dt,
                                          const float* a_log, const float* b_dt, SSD q) {
    extern __shared__ float columns[];          // (L) columns, (L) da
    size_t k = blockIdx.x % q.chunks, h = blockIdx.x / q.chunks % q.H, b = blockIdx.x / q.chunks / q.H, L = q.L,
           chunk = b * q.chunks + k;
    size_t first = (b * q.Tp + k * L) * q.H + h, len = q.T - k * L < L ? q.T - k * L : L;
    float *da = columns + L, A = -fast_exp(a_log[h]), across = 0;
    for (size_t i = threadIdx.x; i < q.N * q.P; i += blockDim.x) {
        size_t at = (chunk * q.N + i / q.P) * q.E + h * q.P + i % q.P;
        across += (float)states[at] * (float)dstates[at];
    }
    across = block_sum(across) * from_start[first + (L - 1) * q.H];
    if (threadIdx.x >= 32) return;              // the first warp goes on; what a lane writes to columns, no other reads
    scores += chunk * L * L;
    dM += (size_t)blockIdx.x * L * L;
    for (size_t j = threadIdx.x; j < L; j += 32) columns[j] = 0;
    float past = 0, future = 0, sum_a = 0, sum_d = 0, sum_b = 0;
    for (size_t t = len; t-- > 0;) {
        float inside = 0;
        for (size_t j = threadIdx.x; j < t; j += 32)
            inside += columns[j] += (float)scores[t * L + j] * (float)dM[t * L + j];
        inside = warp_sum(inside);
        past += from_past[first + t * q.H];
        if (threadIdx.x == 0) da[t] = inside + past + across;
    }
    if (threadIdx.x > 0) return;
    for (size_t t = 0; t < len; t++) {
        size_t at = first + t * q.H, row = (b * q.T + k * L + t) * q.H + h;
        float g = da[t] + future, d = (du_x[at] + A * g) * sigmoid((float)dt[row] + b_dt[h]);
        ddt[row] = (floatX)d;
        sum_a += delta[at] * A * g;
        sum_d += dy_x[at];
        sum_b += d;
        future += to_future[at];
    }
    partial[chunk * q.H + h] = sum_a;
    partial[(q.B * q.chunks + chunk) * q.H + h] = sum_d;
    partial[(2 * q.B * q.chunks + chunk) * q.H + h] = sum_b;
}
// db, dc (Q,N) -> their columns of dact (B,T,W)
__global__ void ssd_backward_bc_kernel(floatX* dact, const float* db, const float* dc, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.T * q.N) return;
    size_t n = i % q.N, row = i / q.N, at = (row / q.T * q.Tp + row % q.T) * q.N + n;
    dact[row * q.W + q.E + n] = (floatX)db[at];
    dact[row * q.W + q.E + q.N + n] = (floatX)dc[at];
}

// How many numbers the workspace must hold: the chunks' shares of dA_log, dD and db_dt.
static size_t ssd_workspace(SSD q) { return 3 * q.B * q.chunks * q.H; }

// dact (B,T,W), ddt (B,T,H) are written; da_log, db_dt, dd are added to.
static void ssd_backward(floatX* dact, floatX* ddt, float* da_log, float* db_dt, float* dd, const SSDScratch* s,
                         const floatX* dy, const floatX* states, const floatX* act, const floatX* dt,
                         const float* a_log, const float* b_dt, const float* d, SSD q) {
    size_t Q = q.B * q.Tp, G = q.B * q.chunks, L = q.L, N = q.N, E = q.E, P = q.P;
    ssd_prepare(s, act, dt, a_log, b_dt, q);                            // again, instead of keeping it
    matmul_batched(s->past, s->c, states, L, E, N, E, N, E, 0, 0, 0, L * E, L * N, N * E, G);
    ssd_backward_operands_kernel<<<blocks(Q * E, 256), 256>>>(s->dyh, s->dyw, dy, s->from_start, q);
    cudaCheck(cudaGetLastError());
    matmul_batched(s->sums, s->c, s->dyw, N, E, L, E, N, E, 1, 0, 0, N * E, L * N, L * E, G);
    ssd_backward_carry_kernel<<<blocks(q.B * N * E, 64), 64>>>(s->dstates, s->sums, s->from_start, q);
    cudaCheck(cudaGetLastError());
    matmul_batched(s->future, s->b, s->dstates, L, E, N, E, N, E, 0, 0, 0, L * E, L * N, N * E, G);
    matmul_batched(s->inside, s->M, s->dyh, L, P, L, P, L, P, 1, 0, 0, L * P, L * L, L * P, G * q.H);
    ssd_backward_rows_kernel<<<blocks(q.B * q.T * q.H, 4), 128>>>(
        dact, s->from_past, s->to_future, s->du_x, s->dy_x, s->inside, s->past, s->future, act, dy, s->delta,
        s->from_start, s->to_end, d, q);
    cudaCheck(cudaGetLastError());
    matmul_batched(s->dM, s->dyh, s->u, L, L, P, L, P, P, 0, 1, 0, L * L, L * P, L * P, G * q.H);
    ssd_backward_mask_kernel<<<(unsigned)(G * q.H), 64>>>(s->dM, s->delta, a_log, q);
    cudaCheck(cudaGetLastError());
    ssd_backward_scores_kernel<<<blocks(G * L * L, 256), 256>>>(s->dscores, s->dM, q);
    cudaCheck(cudaGetLastError());
    ssd_backward_steps_kernel<<<(unsigned)(G * q.H), 128, 2 * L * sizeof(float)>>>(
        ddt, workspace, s->scores, s->dM, states, s->dstates, s->from_past, s->to_future, s->du_x, s->dy_x, s->delta,
        s->from_start, dt, a_log, b_dt, q);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(q.H, 64), 64>>>(da_log, workspace, (int)G, (int)q.H);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(q.H, 64), 64>>>(dd, workspace + G * q.H, (int)G, (int)q.H);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(q.H, 64), 64>>>(db_dt, workspace + 2 * G * q.H, (int)G, (int)q.H);
    cudaCheck(cudaGetLastError());
    matmul_batched(s->dc, s->dyw, states, L, N, E, N, E, E, 0, 1, 0, L * N, L * E, N * E, G);
    matmul_batched(s->db, s->uw, s->dstates, L, N, E, N, E, E, 0, 1, 0, L * N, L * E, N * E, G);
    matmul_batched(s->dc, s->dscores, s->b, L, N, L, N, L, N, 0, 0, 1, L * N, L * L, L * N, G);
    matmul_batched(s->db, s->dscores, s->c, L, N, L, N, L, N, 1, 0, 1, L * N, L * L, L * N, G);
    ssd_backward_bc_kernel<<<blocks(q.B * q.T * N, 256), 256>>>(dact, s->db, s->dc, q);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------------------------------------------
// the long convolution, by cuFFT, in float:
// a number of its output is a sum over all frequencies, few of which bf16 could tell apart

enum { FFT_NUMBERS = 1 << 24 };         // so many numbers are transformed at a time, unless one sequence is longer

static void cufft_check(cufftResult result, const char* file, int line) {
    if (result != CUFFT_SUCCESS)
        die("%s:%d: cuFFT: error %d (its plans need GPU memory of their own)", file, line, (int)result);
}
#define cufftCheck(call) cufft_check(call, __FILE__, __LINE__)

// The length for sequences of T: a power of two of at least 2T, so that what a circular convolution wraps around falls
// on zeros, not on the future.
static size_t fft_length(size_t T) {
    size_t N = 2;
    while (N < 2 * T) N *= 2;
    return N;
}
// Channels that are transformed together.
static size_t fft_channels(size_t N, size_t C) { return smin(C, N < FFT_NUMBERS ? FFT_NUMBERS / N : 1); }

// Plans for `channels` sequences of N numbers, real to complex and back.
// Making one takes longer than using it, so they are kept.
static cufftHandle fft_forward_plan, fft_inverse_plan;
static void fft_plan(size_t N, size_t channels) {
    static size_t planned_N = 0, planned_channels = 0;
    if (N == planned_N && channels == planned_channels) return;
    if (planned_N) { cufftCheck(cufftDestroy(fft_forward_plan)); cufftCheck(cufftDestroy(fft_inverse_plan)); }
    cufftCheck(cufftPlan1d(&fft_forward_plan, (int)N, CUFFT_R2C, (int)channels));
    cufftCheck(cufftPlan1d(&fft_inverse_plan, (int)N, CUFFT_C2R, (int)channels));
    planned_N = N;
    planned_channels = channels;
}

// rows (channels,N) <- channels c0, c0+1, ... of x (T,C), followed by N - T zeros; channels past C are zero. And the
// way back: out (T,C) = rows (+ d x, with d (C) and x (T,C)). A block turns a tile of 32 x 32 over in shared memory, so
// that it reads and writes neighbours; 33 columns keep the threads of a warp in different banks.
template <typename F>
__global__ void fft_load_kernel(float* rows, const F* x, size_t N, size_t T, size_t C, size_t c0, size_t channels) {
    __shared__ float tile[32][33];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    size_t t0 = (size_t)blockIdx.x * 32, first = blockIdx.y * 32;
    for (int i = warp; i < 32; i += 8) {
        size_t t = t0 + i, c = c0 + first + lane;
        tile[i][lane] = t < T && c < C ? (float)x[t * C + c] : 0;
    }
    __syncthreads();
    for (int i = warp; i < 32; i += 8)
        if (first + i < channels && t0 + lane < N) rows[(first + i) * N + t0 + lane] = tile[lane][i];
}
template <typename F>
__global__ void fft_store_kernel(F* out, const float* rows, const float* d, const floatX* x,
                                 size_t N, size_t T, size_t C, size_t c0, size_t channels) {
    __shared__ float tile[32][33];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    size_t t0 = (size_t)blockIdx.x * 32, first = blockIdx.y * 32;
    for (int i = warp; i < 32; i += 8)
        if (first + i < channels && t0 + lane < T) tile[i][lane] = rows[(first + i) * N + t0 + lane];
    __syncthreads();
    for (int i = warp; i < 32; i += 8) {
        size_t t = t0 + i, c = c0 + first + lane;
        if (t >= T || c >= C || first + lane >= channels) continue;
        out[t * C + c] = (F)(tile[lane][i] + (d ? d[c] * (float)x[t * C + c] : 0));
    }
}
// The spectrum of channels c0, c0+1, ... of x (T,C). rows is scratch.
template <typename F>
static void fft_of(cufftComplex* spectrum, float* rows, const F* x,
                   size_t N, size_t T, size_t C, size_t c0, size_t channels) {
    fft_load_kernel<F><<<dim3(blocks(N, 32), blocks(channels, 32)), 256>>>(rows, x, N, T, C, c0, channels);
    cudaCheck(cudaGetLastError());
    cufftCheck(cufftExecR2C(fft_forward_plan, rows, spectrum));
}
// And the way back, of a spectrum that is used up.
template <typename F>
static void fft_back(F* out, cufftComplex* spectrum, float* rows, const float* d, const floatX* x,
                     size_t N, size_t T, size_t C, size_t c0, size_t channels) {
    cufftCheck(cufftExecC2R(fft_inverse_plan, spectrum, rows));
    fft_store_kernel<F><<<dim3(blocks(T, 32), blocks(channels, 32)), 256>>>(out, rows, d, x, N, T, C, c0, channels);
    cudaCheck(cudaGetLastError());
}

// y = k x / N (or += with add), with conj(k) where correlate: n frequencies. cuFFT's way back multiplies by N.
__global__ void spectrum_kernel(cufftComplex* y, const cufftComplex* k, const cufftComplex* x,
                                float scale, int correlate, int add, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    cufftComplex a = k[i], b = x[i], sum = {};
    if (add) sum = y[i];
    if (correlate) a.y = -a.y;
    sum.x += scale * (a.x * b.x - a.y * b.y);
    sum.y += scale * (a.x * b.y + a.y * b.x);
    y[i] = sum;
}
static void spectrum_product(cufftComplex* y, const cufftComplex* k, const cufftComplex* x,
                             size_t N, size_t channels, int correlate, int add) {
    size_t n = channels * (N / 2 + 1);
    spectrum_kernel<<<blocks(n, 256), 256>>>(y, k, x, 1.0f / N, correlate, add, n);
    cudaCheck(cudaGetLastError());
}

// How many numbers the workspace must hold: some channels' worth of numbers, and four spectra.
static size_t long_conv_workspace(size_t T, size_t C) {
    size_t N = fft_length(T), channels = fft_channels(N, C);
    return channels * (N + 4 * (N + 2));
}

// c[t] = sum_{s <= t} k[t-s] p[s] + d p[t] for every sequence and channel: c, p (B,T,C), k (T,C), d (C).
static void long_conv_forward(floatX* c, const floatX* p, const float* k, const float* d,
                              size_t B, size_t T, size_t C) {
    size_t N = fft_length(T), channels = fft_channels(N, C);
    float* rows = workspace;
    cufftComplex *K = (cufftComplex*)(rows + channels * N), *X = K + channels * (N / 2 + 1);
    fft_plan(N, channels);
    for (size_t c0 = 0; c0 < C; c0 += channels) {
        fft_of(K, rows, k, N, T, C, c0, channels);
        for (size_t b = 0; b < B; b++) {
            const floatX* pb = p + b * T * C;
            fft_of(X, rows, pb, N, T, C, c0, channels);
            spectrum_product(X, K, X, N, channels, 0, 0);
            fft_back(c + b * T * C, X, rows, d, pb, N, T, C, c0, channels);
        }
    }
}

// dp[s] = sum_{t >= s} k[t-s] dc[t] + d dc[s],   dk[r] = sum over b, t of p[t-r] dc[t]: both are correlations.
// dd = sum p dc.  dp (B,T,C), dk (T,C) are written, dd is added to.
static void long_conv_backward(floatX* dp, float* dk, float* dd, const floatX* dc, const floatX* p, const float* k,
                               const float* d, size_t B, size_t T, size_t C) {
    size_t N = fft_length(T), channels = fft_channels(N, C), size = channels * (N / 2 + 1);
    float* rows = workspace;
    cufftComplex *K = (cufftComplex*)(rows + channels * N), *P = K + size, *G = P + size, *dK = G + size;
    fft_plan(N, channels);
    for (size_t c0 = 0; c0 < C; c0 += channels) {
        fft_of(K, rows, k, N, T, C, c0, channels);
        for (size_t b = 0; b < B; b++) {
            const floatX* dcb = dc + b * T * C;
            fft_of(P, rows, p + b * T * C, N, T, C, c0, channels);
            fft_of(G, rows, dcb, N, T, C, c0, channels);
            spectrum_product(dK, P, G, N, channels, 1, b > 0);
            spectrum_product(G, K, G, N, channels, 1, 0);
            fft_back(dp + b * T * C, G, rows, d, dcb, N, T, C, c0, channels);
        }
        fft_back(dk, dK, rows, NULL, NULL, N, T, C, c0, channels);
    }
    sum_products(dd, p, dc, B * T, C);
}

// out = sin(freq x) over rows of x (rows,F), freq (F). The filter that these make is float throughout: a position among
// 16,384 needs more than bf16's 8 bits.
__global__ void sine_forward_kernel(float* out, const float* x, const float* freq, size_t n, int F) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = sinf(freq[i % F] * x[i]);
}
static void sine_forward(float* out, const float* x, const float* freq, size_t rows, size_t F) {
    sine_forward_kernel<<<blocks(rows * F, 256), 256>>>(out, x, freq, rows * F, (int)F);
    cudaCheck(cudaGetLastError());
}

// d' = d cos(freq x);  dfreq += sum d' x,  dx = d' freq.  d is dout on entry and dx on return.
__global__ void sine_backward_kernel(float* d, const float* x, const float* freq, size_t n, int F) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) d[i] *= cosf(freq[i % F] * x[i]);
}
__global__ void scale_columns_kernel(float* d, const float* freq, size_t n, int F) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) d[i] *= freq[i % F];
}
static void sine_backward(float* d, float* dfreq, const float* x, const float* freq, size_t rows, size_t F) {
    size_t n = rows * F;
    sine_backward_kernel<<<blocks(n, 256), 256>>>(d, x, freq, n, (int)F);
    cudaCheck(cudaGetLastError());
    sum_products(dfreq, d, x, rows, F);
    scale_columns_kernel<<<blocks(n, 256), 256>>>(d, freq, n, (int)F);
    cudaCheck(cudaGetLastError());
}

// k = m e^{-time |δ|} in place: m (rows,C), the filter of tokens first, first+1, ... Time runs from 0 to 1 over the S
// tokens of training; |δ| goes linearly over the channels from ln(100)/1.5 to ln(100)/0.3, so that the
// fastest channel is down to a hundredth after 0.3 S tokens and the slowest would be after 1.5 S. Its own backward.
__global__ void filter_window_kernel(float* k, size_t first, size_t n, size_t S, size_t C) {
    const float slow = 4.605170185988092f / 1.5f, fast = 4.605170185988092f / 0.3f;
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float time = (float)(first + i / C) / (S > 1 ? S - 1 : 1);
    k[i] *= fast_exp(-time * (C > 1 ? slow + (fast - slow) * (i % C) / (C - 1) : slow));
}
static void filter_window(float* k, size_t first, size_t rows, size_t S, size_t C) {
    filter_window_kernel<<<blocks(rows * C, 256), 256>>>(k, first, rows * C, S, C);
    cudaCheck(cudaGetLastError());
}

// z (rows,emb) = [time, cos(2π f i/S) of each band f, -sin of each] of tokens i = first, first+1, ..., for (emb-1)/2
// bands f spread evenly from 1e-4 to their number less 1. Angles in double, since they pass many turns.
__global__ void filter_positions_kernel(float* z, size_t first, size_t n, size_t S, int emb) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    size_t token = first + i / emb;
    int bands = (emb - 1) / 2, k = i % emb - 1, band = k < bands ? k : k - bands;
    double f = bands > 1 ? 1e-4 + (bands - 1 - 1e-4) * band / (bands - 1) : 1e-4;
    double turns = f * token / S, angle = 6.283185307179586 * (turns - floor(turns));
    z[i] = k < 0 ? (float)token / (S > 1 ? S - 1 : 1) : k < bands ? cosf((float)angle) : -sinf((float)angle);
}
static void filter_positions(float* z, size_t first, size_t rows, size_t S, size_t emb) {
    filter_positions_kernel<<<blocks(rows * emb, 256), 256>>>(z, first, rows * emb, S, (int)emb);
    cudaCheck(cudaGetLastError());
}

// out = a b over (rows,C), each with a row stride of its own: they may be a third of (rows,3C)
__global__ void product_kernel(floatX* out, size_t ldo, const floatX* a, size_t lda, const floatX* b,
                               size_t ldb, size_t rows, size_t C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * C) return;
    size_t r = i / C, c = i % C;
    out[r * ldo + c] = (floatX)((float)a[r * lda + c] * (float)b[r * ldb + c]);
}
static void product(floatX* out, size_t ldo, const floatX* a, size_t lda, const floatX* b,
                    size_t ldb, size_t rows, size_t C) {
    product_kernel<<<blocks(rows * C, 256), 256>>>(out, ldo, a, lda, b, ldb, rows, C);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------------------------------------------
// the mixers: what lets a token see those before it. Each is written as if it were the only one: its parameters, what
// its forward pass keeps, forward, backward. x, out (B*T, C); x has been normalised and rounded;
// the residual stream, in float, is the block's.

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

// A table of named tensors inside one device allocation of one type.
// Beyond train_harmonic.cu's four kinds of first weights:
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

// The first weights of a linear layer. GPT2: N(0, .02), and `shrink` times that where the layer ends a residual branch,
// biases 0. SPREAD: U(±fan_in^-½), biases too (PyTorch's own).
template <typename W>
static W* take_linear(Table* t, W* base, const Config* c, size_t out, size_t in,
                      double shrink, const char* name, int n) {
    return c->weights == GPT2 ? take(t, base, out, in, NORMAL, 0.02 * shrink, name, n)
           : take(t, base, out, in, UNIFORM, 1 / sqrt((double)in), name, n);
}
static float* take_bias(Table* t, float* base, const Config* c, size_t out, size_t in, const char* name, int n) {
    return c->weights == GPT2 ? take(t, base, out, 0, CONSTANT, 0, name, n)
           : take(t, base, out, 0, UNIFORM, 1 / sqrt((double)in), name, n);
}

// Where activations are laid out:
// floatX numbers, float numbers, and what one-token steps carry on (states NULL: nothing is).
typedef struct { Table *table, *exact, *states; floatX* base; float *exact_base, *state_base; } Layout;

// ---- attention

// (W,C), (C,C), (W), (C); the biases only with --bias. Here and below, matrices are of type W: floatX for the
// parameters, as matmuls read them, and float for the gradients. What kernels read is float always.
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

static void attn_acts(AttnActs* a, const AttnActs* first, const Layout* l,
                      const Config* c, int n, size_t B, size_t T, int train) {
    size_t C = c->channels, H = c->heads, G = c->kv_heads, D = C / H, R = B * T, W = C + 2 * G * D;
    a->qkv = take(l->table, l->base, R, W, NONE, 0, "block%d.qkv", n);
    a->out = take(l->table, l->base, R, C, NONE, 0, "block%d.heads", n);
    a->lse = take(l->exact, l->exact_base, R, H, NONE, 0, "block%d.lse", n);
    if (c->attention == LINEAR && l->states)
        a->state = take(l->states, l->state_base, B, G * (D + 1) * D, NONE, 0, "block%d.sums", n);
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

// How many numbers the keys and values [k | v] of one token are, in one block.
static size_t cache_width(const Config* c) { return 2 * (size_t)(c->channels / c->heads) * c->kv_heads; }

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

static void attn_forward(floatX* out, const floatX* x, AttnActs* a, const AttnParams<floatX>* p,
                         const Config* c, size_t B, size_t T, int carry) {
    size_t C = c->channels, H = c->heads, G = c->kv_heads, D = C / H, R = B * T, W = C + 2 * G * D, past = *a->past;
    linear_forward(a->qkv, x, p->wqkv, p->bqkv, R, C, W, C, 0);
    if (c->pos == ROPE) rope(a->qkv, a->rope, 1, B, T, W, H + G, D);
    if (c->attention == LINEAR) {
        linear_attention_forward(a->out, a->lse, carry ? a->state : NULL, a->qkv, B, T, H, G, D);
    } else if (carry) {
        device_copy(attn_cache(a, c, past, cache_width(c)), a->qkv + C, cache_width(c) * sizeof(floatX));
        attention_step(a->out, a->qkv, a->cache, a->room, past, first_key(past, c->window, c->block), H, G, D);
    } else {
        attention_forward(a->out, a->lse, a->qkv, c->window, c->block, B, T, H, G, D);
    }
    linear_forward(out, a->out, p->wo, p->bo, R, C, C, C, 0);
}

static void attn_backward(float* dx, AttnParams<float>* g, const floatX* dout, const floatX* x, AttnActs* a,
                          const AttnParams<floatX>* p, const Config* c, size_t B, size_t T) {
    size_t C = c->channels, H = c->heads, G = c->kv_heads, D = C / H, R = B * T, W = C + 2 * G * D;
    linear_backward(a->dout, g->wo, g->bo, dout, a->out, p->wo, R, C, C, C, 0);
    if (c->attention == LINEAR)
        linear_attention_backward(a->dqkv, a->delta, a->dout, a->out, a->lse, a->qkv, B, T, H, G, D);
    else attention_backward(a->dqkv, a->delta, a->dout, a->out, a->lse, a->qkv, c->window, c->block, B, T, H, G, D);
    if (c->pos == ROPE) rope(a->dqkv, a->rope, -1, B, T, W, H + G, D);
    linear_backward(dx, g->wqkv, g->bqkv, a->dqkv, x, p->wqkv, R, C, W, C, 1);
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba (arXiv 2312.00752). E = expand C channels inside, N = d_state, K = conv:
//     [x | z] = W_in u            xs = silu(conv(x))             [δ | B | C] = W_x xs           dt = W_dt δ
//     y = scan(xs, dt, B, C)      out = W_out (y silu(z))
// One-token steps carry h (N numbers a channel) and the last K-1 inputs of the convolution.

template <typename W> struct MambaParams { W *w_in, *w_x, *w_dt, *w_out; float *conv_w, *conv_b, *b_dt, *a_log, *d; };
typedef struct {
    floatX *xs, *u;                     // (R,E): silu(pre); y silu(z)
    floatX *dy, *dz, *dpre, *ddt;       // (R,E), only for training, like the rest
    floatX *ddelta, *dbc;               // (R,rank), (R,2N)
    float *dxs;                         // (R,E): the scan and two products add to it
} MambaScratch;                         // what one layer at a time needs: shared by all
typedef struct {
    floatX *x, *z;                      // (R,E): what W_in makes
    floatX *pre;                        // (R,E): conv(x), before bias and silu
    floatX *delta, *bc;                 // (R,rank), (R,2N): what W_x makes: δ, and B and C
    floatX *dt;                         // (R,E): steps before bias and softplus
    floatX *y;                          // (R,E)
    float *starts;                      // (B,chunks,N,E): states before each chunk
    float *state, *window;              // carried: (B,N,E), (B,K-1,E)
    MambaScratch s;
} MambaActs;

static size_t mamba_rank(const Config* c) { return (c->channels + 15) / 16; }

// Tokens in a chunk. 0, the default, takes sqrt(T) or 64: then all the states kept are N sqrt(T) numbers a channel,
// less than the tokens' own activations whatever T. A block of the backward pass keeps a state for every STEPS tokens
// in shared memory, which limits it.
static size_t mamba_chunk(const Config* c, size_t T) {
    size_t L = c->chunk, most = 4096 / c->d_state > 64 ? 4096 / c->d_state : 64;
    if (!L) for (L = 64; L * L < T; L++) ;
    return smin(L, smin(T, most));
}

// Initial values: linear and convolution weights U(±fan_in^-½), the output's divided by sqrt(layers), since every layer
// adds to the residual stream; steps and decays as listed above; D = 1.
template <typename W>
static void mamba_params(MambaParams<W>* p, Table* t, W* copy, float* base, const Config* c, int n) {
    size_t C = c->channels, E = c->expand * C, N = c->d_state, K = c->conv, rank = mamba_rank(c);
    double bound_e = 1 / sqrt((double)E), bound_k = 1 / sqrt((double)K);
    p->w_in   = take(t, copy, 2 * E, C,        UNIFORM, 1 / sqrt((double)C), "block%d.w_in", n);
    p->conv_w = no_decay(t, take(t, base, E, K, UNIFORM, bound_k, "block%d.conv_w", n));
    p->conv_b = take(t, base, E, 0,            UNIFORM, bound_k, "block%d.conv_b", n);
    p->w_x    = take(t, copy, rank + 2 * N, E, UNIFORM, bound_e, "block%d.w_x", n);
    p->w_dt   = take(t, copy, E, rank,         UNIFORM, 1 / sqrt((double)rank), "block%d.w_dt", n);
    p->b_dt   = take(t, base, E, 0,            STEP_BIAS, 0, "block%d.b_dt", n);
    p->a_log  = no_decay(t, take(t, base, E, N, LOG_INDEX, 0, "block%d.a_log", n));
    p->d      = take(t, base, E, 0,            CONSTANT, 1, "block%d.d", n);
    p->w_out  = take(t, copy, C, E,            UNIFORM, bound_e / sqrt((double)c->layers), "block%d.w_out", n);
}

static void mamba_scratch(MambaScratch* s, const Layout* l, const Config* c, size_t B, size_t T, int train) {
    size_t R = B * T, E = c->expand * c->channels;
    s->xs = take(l->table, l->base, R, E, NONE, 0, "xs");
    s->u  = take(l->table, l->base, R, E, NONE, 0, "u");
    if (!train) return;
    s->dy     = take(l->table, l->base, R, E, NONE, 0, "dy_scan");
    s->dz     = take(l->table, l->base, R, E, NONE, 0, "dz");
    s->dxs    = take(l->exact, l->exact_base, R, E, NONE, 0, "dxs");
    s->dpre   = take(l->table, l->base, R, E, NONE, 0, "dpre");
    s->ddt    = take(l->table, l->base, R, E, NONE, 0, "ddt");
    s->ddelta = take(l->table, l->base, R, mamba_rank(c), NONE, 0, "ddelta");
    s->dbc    = take(l->table, l->base, R, 2 * c->d_state, NONE, 0, "dbc");
}

// first is layer 0. states == NULL: nothing is carried.
static void mamba_acts(MambaActs* a, const MambaActs* first, const Layout* l,
                       const Config* c, int n, size_t B, size_t T, int train) {
    size_t R = B * T, E = c->expand * c->channels, N = c->d_state;
    a->x      = take(l->table, l->base, R, E, NONE, 0, "block%d.x", n);
    a->z      = take(l->table, l->base, R, E, NONE, 0, "block%d.z", n);
    a->pre    = take(l->table, l->base, R, E, NONE, 0, "block%d.pre", n);
    a->delta  = take(l->table, l->base, R, mamba_rank(c), NONE, 0, "block%d.delta", n);
    a->bc     = take(l->table, l->base, R, 2 * N, NONE, 0, "block%d.bc", n);
    a->dt     = take(l->table, l->base, R, E, NONE, 0, "block%d.dt", n);
    a->y      = take(l->table, l->base, R, E, NONE, 0, "block%d.y", n);
    a->starts = take(l->exact, l->exact_base, B * num_chunks(T, mamba_chunk(c, T)), N * E, NONE, 0,
                     "block%d.starts", n);
    if (a == first) mamba_scratch(&a->s, l, c, B, T, train); else a->s = first->s;
    if (!l->states) return;
    a->state  = take(l->states, l->state_base, B, N * E, NONE, 0, "block%d.state", n);
    a->window = take(l->states, l->state_base, B, (c->conv - 1) * E, NONE, 0, "block%d.window", n);
}

// Numbers that the workspace must hold: of the scan and of the convolution's sums.
static size_t mamba_workspace(const Config* c, size_t B, size_t T) {
    size_t E = c->expand * c->channels, scan = selective_scan_workspace(mamba_chunk(c, T), B, T, E, c->d_state),
           sums = MAX_CONV * E * split_count(B * T);
    return scan > sums ? scan : sums;
}

// out (R,C) from x (R,C). With carry, it starts from what the last call left, and leaves its own.
static void mamba_forward(floatX* out, const floatX* x, MambaActs* a, const MambaParams<floatX>* p,
                          const Config* c, size_t B, size_t T, int carry) {
    const MambaScratch* s = &a->s;
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, rank = mamba_rank(c);
    linear_forward(a->x, x, p->w_in, NULL, R, C, E, C, 0);
    linear_forward(a->z, x, p->w_in + E * C, NULL, R, C, E, C, 0);
    short_conv_forward(a->pre, a->x, p->conv_w, NULL, carry ? a->window : NULL, B, T, E, c->conv);
    silu_forward(s->xs, a->pre, p->conv_b, R, E);
    linear_forward(a->delta, s->xs, p->w_x, NULL, R, E, rank, E, 0);
    linear_forward(a->bc, s->xs, p->w_x + rank * E, NULL, R, E, 2 * N, E, 0);
    linear_forward(a->dt, a->delta, p->w_dt, NULL, R, rank, E, rank, 0);
    selective_scan_forward(a->y, a->starts, s->xs, a->dt, a->bc, p->a_log, p->b_dt, p->d, carry ? a->state : NULL,
                           mamba_chunk(c, T), B, T, E, N);
    swiglu_forward(s->u, a->z, a->y, R, E);
    linear_forward(out, s->u, p->w_out, NULL, R, E, C, E, 0);
}

// The lines of mamba_forward, last one first. x is what went in. dx (R,C) and g are added to.
static void mamba_backward(float* dx, MambaParams<float>* g, const floatX* dout, const floatX* x, MambaActs* a,
                           const MambaParams<floatX>* p, const Config* c, size_t B, size_t T) {
    const MambaScratch* s = &a->s;
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, rank = mamba_rank(c);
    silu_forward(s->xs, a->pre, p->conv_b, R, E);                       // again, instead of keeping them
    swiglu_forward(s->u, a->z, a->y, R, E);
    linear_backward(s->dz, g->w_out, NULL, dout, s->u, p->w_out, R, E, C, E, 0);
    swiglu_backward(s->dz, s->dy, a->z, a->y, R, E);                    // dz was du so far
    selective_scan_backward(s->dxs, s->ddt, s->dbc, g->a_log, g->b_dt, g->d, s->dy, s->xs, a->dt, a->bc, a->starts,
                            p->a_log, p->b_dt, p->d, mamba_chunk(c, T), B, T, E, N);
    linear_backward(s->ddelta, g->w_dt, NULL, s->ddt, a->delta, p->w_dt, R, rank, E, rank, 0);
    linear_backward(s->dxs, g->w_x, NULL, s->ddelta, s->xs, p->w_x, R, E, rank, E, 1);
    linear_backward(s->dxs, g->w_x + rank * E, NULL, s->dbc, s->xs, p->w_x + rank * E, R, E, 2 * N, E, 1);
    round_to(s->dpre, s->dxs, R * E);
    silu_backward(s->dpre, a->pre, p->conv_b, R, E);
    // dy is dx of W_in's x
    short_conv_backward(s->dy, g->conv_w, g->conv_b, s->dpre, a->x, p->conv_w, B, T, E, c->conv);
    linear_backward(dx, g->w_in, NULL, s->dy, x, p->w_in, R, C, E, C, 1);
    linear_backward(dx, g->w_in + E * C, NULL, s->dz, x, p->w_in + E * C, R, C, E, C, 1);
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba-2 (arXiv 2405.21060). E = expand C, H = E / P heads of P = head_dim channels, N = d_state, K = conv:
//     [z | x B C | dt] = W_in u         [x | B | C] = silu(conv([x | B | C]))         y = ssd(x, dt, B, C)
//     out = W_out RMSNorm(y silu(z))
// One-token steps carry S (N P numbers a head) and the last K-1 inputs of the convolution.

template <typename W> struct Mamba2Params { W *w_in, *w_out; float *conv_w, *conv_b, *b_dt, *a_log, *d, *norm_w; };
typedef struct {
    floatX *act;                        // (R,E+2N): silu(pre)
    floatX *v, *nv;                     // (R,E): y silu(z); RMSNorm of it
    floatX *dz, *dy;                    // (R,E), only for training, like the rest
    floatX *dact, *dxbc, *ddt;          // (R,E+2N), (R,E+2N), (R,H)
    float *dnv;                         // (R,E)
    SSDScratch ssd;
} Mamba2Scratch;                        // what one layer at a time needs: shared by all
typedef struct {
    floatX *z;                          // (R,E)
    floatX *xbc, *pre;                  // (R,E+2N): x, B, C beside each other; conv of them, before bias and silu
    floatX *dt;                         // (R,H): steps before bias and softplus
    floatX *y;                          // (R,E)
    float *rstd;                        // (R)
    floatX *states;                     // (B,chunks,N,E): before each chunk
    float *state, *window;              // carried: (B,H,N,P), (B,K-1,E+2N)
    Mamba2Scratch s;
} Mamba2Acts;

static size_t mamba2_heads(const Config* c) { return (size_t)c->expand * c->channels / c->head_dim; }

// Tokens in a chunk: 0 takes 64, where the products inside a chunk and those with its state cost about the same. M has
// L numbers for every token and head, so there is a limit.
static size_t mamba2_chunk(const Config* c, size_t T) { return smin(c->chunk ? c->chunk : 64, smin(T, 1024)); }

static SSD mamba2_sizes(const Config* c, size_t B, size_t T) {
    return ssd_sizes(mamba2_chunk(c, T), B, T, mamba2_heads(c), c->head_dim, c->d_state);
}

// Initial values as Mamba's, but -A from U(1,16) for each head.
template <typename W>
static void mamba2_params(Mamba2Params<W>* p, Table* t, W* copy, float* base, const Config* c, int n) {
    size_t C = c->channels, E = c->expand * C, N = c->d_state, K = c->conv, H = mamba2_heads(c), width = E + 2 * N;
    double bound_k = 1 / sqrt((double)K);
    p->w_in   = take(t, copy, E + width + H, C, UNIFORM, 1 / sqrt((double)C), "block%d.w_in", n);
    p->conv_w = no_decay(t, take(t, base, width, K, UNIFORM, bound_k, "block%d.conv_w", n));
    p->conv_b = take(t, base, width, 0, UNIFORM, bound_k, "block%d.conv_b", n);
    p->b_dt   = take(t, base, H, 0, STEP_BIAS, 0, "block%d.b_dt", n);
    p->a_log  = take(t, base, H, 0, LOG_UNIFORM, 16, "block%d.a_log", n);
    p->d      = take(t, base, H, 0, CONSTANT, 1, "block%d.d", n);
    p->norm_w = take(t, base, E, 0, CONSTANT, 1, "block%d.gate_norm_w", n);
    p->w_out  = take(t, copy, C, E, UNIFORM, 1 / sqrt((double)E * c->layers), "block%d.w_out", n);
}

static void ssd_scratch(SSDScratch* s, const Layout* l, SSD q, int train) {
    size_t Q = q.B * q.Tp, G = q.B * q.chunks;
    s->delta      = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_delta");
    s->from_start = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_from_start");
    s->to_end     = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_to_end");
    s->b      = take(l->table, l->base, Q, q.N, NONE, 0, "ssd_b");
    s->c      = take(l->table, l->base, Q, q.N, NONE, 0, "ssd_c");
    s->u      = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_u");
    s->uw     = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_uw");
    s->scores = take(l->table, l->base, Q, q.L, NONE, 0, "ssd_scores");
    s->M      = take(l->table, l->base, Q * q.H, q.L, NONE, 0, "ssd_M");
    s->inside = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_inside");
    s->past   = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_past");
    s->sums   = take(l->exact, l->exact_base, G * q.N, q.E, NONE, 0, "ssd_sums");
    if (!train) return;
    s->dyh     = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_dyh");
    s->dyw     = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_dyw");
    s->dstates = take(l->table, l->base, G * q.N, q.E, NONE, 0, "ssd_dstates");
    s->future  = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_future");
    s->dM      = take(l->table, l->base, Q * q.H, q.L, NONE, 0, "ssd_dM");
    s->dscores = take(l->table, l->base, Q, q.L, NONE, 0, "ssd_dscores");
    s->db = take(l->exact, l->exact_base, Q, q.N, NONE, 0, "ssd_db");
    s->dc = take(l->exact, l->exact_base, Q, q.N, NONE, 0, "ssd_dc");
    s->from_past = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_from_past");
    s->to_future = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_to_future");
    s->du_x      = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_du_x");
    s->dy_x      = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_dy_x");
}
static void mamba2_scratch(Mamba2Scratch* s, const Layout* l, const Config* c, size_t B, size_t T, int train) {
    SSD q = mamba2_sizes(c, B, T);
    size_t R = B * T, E = q.E, W = q.W;
    s->act = take(l->table, l->base, R, W, NONE, 0, "act");
    s->v   = take(l->table, l->base, R, E, NONE, 0, "v");
    s->nv  = take(l->table, l->base, R, E, NONE, 0, "nv");
    ssd_scratch(&s->ssd, l, q, train);
    if (!train) return;
    s->dy   = take(l->table, l->base, R, E, NONE, 0, "dy_scan");
    s->dnv  = take(l->exact, l->exact_base, R, E, NONE, 0, "dnv");
    s->dz   = take(l->table, l->base, R, E, NONE, 0, "dz");
    s->dact = take(l->table, l->base, R, W, NONE, 0, "dact");
    s->dxbc = take(l->table, l->base, R, W, NONE, 0, "dxbc");
    s->ddt  = take(l->table, l->base, R, q.H, NONE, 0, "ddt");
}

// first is layer 0. states == NULL: nothing is carried.
static void mamba2_acts(Mamba2Acts* a, const Mamba2Acts* first, const Layout* l,
                        const Config* c, int n, size_t B, size_t T, int train) {
    SSD q = mamba2_sizes(c, B, T);
    size_t R = B * T, E = q.E, W = q.W;
    a->z      = take(l->table, l->base, R, E, NONE, 0, "block%d.z", n);
    a->xbc    = take(l->table, l->base, R, W, NONE, 0, "block%d.xbc", n);
    a->pre    = take(l->table, l->base, R, W, NONE, 0, "block%d.pre", n);
    a->dt     = take(l->table, l->base, R, q.H, NONE, 0, "block%d.dt", n);
    a->y      = take(l->table, l->base, R, E, NONE, 0, "block%d.y", n);
    a->rstd   = take(l->exact, l->exact_base, R, 0, NONE, 0, "block%d.rstd", n);
    a->states = take(l->table, l->base, B * q.chunks, q.N * E, NONE, 0, "block%d.states", n);
    if (a == first) mamba2_scratch(&a->s, l, c, B, T, train); else a->s = first->s;
    if (!l->states) return;
    a->state  = take(l->states, l->state_base, B, q.N * E, NONE, 0, "block%d.state", n);
    a->window = take(l->states, l->state_base, B, (c->conv - 1) * W, NONE, 0, "block%d.window", n);
}

// Numbers that the workspace must hold.
static size_t mamba2_workspace(const Config* c, size_t B, size_t T) {
    SSD q = mamba2_sizes(c, B, T);
    size_t sums = MAX_CONV * q.W * split_count(B * T);
    return ssd_workspace(q) > sums ? ssd_workspace(q) : sums;
}

// out (R,C) from x (R,C). With carry, it starts from what the last call left, and leaves its own.
static void mamba2_forward(floatX* out, const floatX* x, Mamba2Acts* a, const Mamba2Params<floatX>* p,
                           const Config* c, size_t B, size_t T, int carry) {
    const Mamba2Scratch* s = &a->s;
    SSD q = mamba2_sizes(c, B, T);
    size_t R = B * T, C = c->channels, E = q.E, W = q.W;
    linear_forward(a->z, x, p->w_in, NULL, R, C, E, C, 0);
    linear_forward(a->xbc, x, p->w_in + E * C, NULL, R, C, W, C, 0);
    linear_forward(a->dt, x, p->w_in + (E + W) * C, NULL, R, C, q.H, C, 0);
    short_conv_forward(a->pre, a->xbc, p->conv_w, NULL, carry ? a->window : NULL, B, T, W, c->conv);
    silu_forward(s->act, a->pre, p->conv_b, R, W);
    ssd_forward(a->y, a->states, &s->ssd, s->act, a->dt, p->a_log, p->b_dt, p->d, carry ? a->state : NULL, q);
    swiglu_forward(s->v, a->z, a->y, R, E);
    rmsnorm_forward(s->nv, a->rstd, s->v, p->norm_w, R, E);
    linear_forward(out, s->nv, p->w_out, NULL, R, E, C, E, 0);
}

// The lines of mamba2_forward, last one first. x is what went in. dx (R,C) and g are added to.
static void mamba2_backward(float* dx, Mamba2Params<float>* g, const floatX* dout, const floatX* x, Mamba2Acts* a,
                            const Mamba2Params<floatX>* p, const Config* c, size_t B, size_t T) {
    const Mamba2Scratch* s = &a->s;
    SSD q = mamba2_sizes(c, B, T);
    size_t R = B * T, C = c->channels, E = q.E, W = q.W;
    silu_forward(s->act, a->pre, p->conv_b, R, W);                      // again, instead of keeping them
    swiglu_forward(s->v, a->z, a->y, R, E);
    rmsnorm_forward(s->nv, a->rstd, s->v, p->norm_w, R, E);
    linear_backward(s->dnv, g->w_out, NULL, dout, s->nv, p->w_out, R, E, C, E, 0);
    rmsnorm_backward(s->dz, g->norm_w, s->dnv, s->v, a->rstd, p->norm_w, R, E, 0);
    swiglu_backward(s->dz, s->dy, a->z, a->y, R, E);                    // dz was dv so far
    ssd_backward(s->dact, s->ddt, g->a_log, g->b_dt, g->d, &s->ssd, s->dy, a->states, s->act, a->dt, p->a_log,
                 p->b_dt, p->d, q);
    silu_backward(s->dact, a->pre, p->conv_b, R, W);
    short_conv_backward(s->dxbc, g->conv_w, g->conv_b, s->dact, a->xbc, p->conv_w, B, T, W, c->conv);
    linear_backward(dx, g->w_in, NULL, s->dz, x, p->w_in, R, C, E, C, 1);
    linear_backward(dx, g->w_in + E * C, NULL, s->dxbc, x, p->w_in + E * C, R, C, W, C, 1);
    linear_backward(dx, g->w_in + (E + W) * C, NULL, s->ddt, x, p->w_in + (E + W) * C, R, C, q.H, C, 1);
}

// ----------------------------------------------------------------------------------------------------------------
// Hyena of order 2 (arXiv 2302.10866). A convolution as long as the text, whose kernel k (S,C) is computed by a small
// network from the position; S = seq, the trained length. F = 64:
//     [x0 | x1 | v] = conv3(W_in u + b_in)       p = x1 v       c = k ∗ p + D p       out = W_out (x0 c) + b_out
//     k = window(W4 sin(f (W3 sin(f (W2 sin(f (W1 z + b1)) + b2)) + b3))),    z from the position (filter_positions)
// One-token steps carry every p so far and the kernel's rows, one more each step: O(t C) a token. There is no kernel
// beyond S, so that is where a text has to end.

enum { HYENA_CONV = 3, FILTER = 64 };
template <typename W> struct HyenaParams {
    W *w_in, *w_out;
    float *b_in, *conv_w, *conv_b, *w1, *b1, *w2, *b2, *w3, *b3, *w4, *freq, *d, *b_out;
};
typedef struct {
    floatX *p, *g;                      // (R,C): x1 v; x0 c
    float *s;                           // (T,F): a sine
    floatX *dg, *dc, *dp;               // (R,C), only for training, like the rest
    floatX *dv, *du;                    // (R,3C)
    float *dk, *ds, *dh;                // (T,C), (T,F), (T,F)
} HyenaScratch;                         // what one layer at a time needs: shared by all
typedef struct {
    floatX *u, *v;                      // (R,3C): W_in's output; the short convolution's: x0, x1, v beside each other
    floatX *c;                          // (R,C): the long convolution's
    float *z, *h1, *h2, *h3, *k;        // (T,emb), (T,F) before each sine, (T,C)
    float *window, *inputs, *kernel;    // carried: (1,2,3C), (1,S,C), (1,S,C): every p and every row of k so far
    const size_t* past;                 // how many those are
    HyenaScratch s;
} HyenaActs;

// Initial values: linear and convolution weights and biases U(±fan_in^-½), frequencies 1, D from N(0,1).
template <typename W>
static void hyena_params(HyenaParams<W>* p, Table* t, W* copy, float* base, const Config* c, int n) {
    size_t C = c->channels, emb = c->emb, F = FILTER;
    double bound_c = 1 / sqrt((double)C), bound_k = 1 / sqrt((double)HYENA_CONV), bound_e = 1 / sqrt((double)emb),
           bound_f = 1 / sqrt((double)F);
    p->w_in   = take(t, copy, 3 * C, C, UNIFORM, bound_c, "block%d.w_in", n);
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
    p->w_out  = take(t, copy, C, C,     UNIFORM, bound_c, "block%d.w_out", n);
    p->b_out  = take(t, base, C, 0,     UNIFORM, bound_c, "block%d.b_out", n);
}

static void hyena_scratch(HyenaScratch* s, const Layout* l, const Config* c, size_t B, size_t T, int train) {
    size_t R = B * T, C = c->channels;
    s->p  = take(l->table, l->base, R, C, NONE, 0, "p");
    s->g  = take(l->table, l->base, R, C, NONE, 0, "g");
    s->s  = take(l->exact, l->exact_base, T, FILTER, NONE, 0, "filter_s");
    if (!train) return;
    s->dg = take(l->table, l->base, R, C, NONE, 0, "dg");
    s->dc = take(l->table, l->base, R, C, NONE, 0, "dc");
    s->dp = take(l->table, l->base, R, C, NONE, 0, "dp");
    s->dv = take(l->table, l->base, R, 3 * C, NONE, 0, "dv");
    s->du = take(l->table, l->base, R, 3 * C, NONE, 0, "du");
    s->dk = take(l->exact, l->exact_base, T, C, NONE, 0, "dk");
    s->ds = take(l->exact, l->exact_base, T, FILTER, NONE, 0, "filter_ds");
    s->dh = take(l->exact, l->exact_base, T, FILTER, NONE, 0, "filter_dh");
}

// first is layer 0. states == NULL: nothing is carried.
static void hyena_acts(HyenaActs* a, const HyenaActs* first, const Layout* l,
                       const Config* c, int n, size_t B, size_t T, int train) {
    size_t R = B * T, C = c->channels, S = c->seq;
    a->u  = take(l->table, l->base, R, 3 * C, NONE, 0, "block%d.u", n);
    a->v  = take(l->table, l->base, R, 3 * C, NONE, 0, "block%d.v", n);
    a->c  = take(l->table, l->base, R, C, NONE, 0, "block%d.c", n);
    a->z  = take(l->exact, l->exact_base, T, c->emb, NONE, 0, "block%d.filter_z", n);
    a->h1 = take(l->exact, l->exact_base, T, FILTER, NONE, 0, "block%d.filter_h1", n);
    a->h2 = take(l->exact, l->exact_base, T, FILTER, NONE, 0, "block%d.filter_h2", n);
    a->h3 = take(l->exact, l->exact_base, T, FILTER, NONE, 0, "block%d.filter_h3", n);
    a->k  = take(l->exact, l->exact_base, T, C, NONE, 0, "block%d.k", n);
    if (a == first) hyena_scratch(&a->s, l, c, B, T, train); else a->s = first->s;
    if (!l->states) return;
    a->window = take(l->states, l->state_base, B, (HYENA_CONV - 1) * 3 * C, NONE, 0, "block%d.window", n);
    a->inputs = take(l->states, l->state_base, B, S * C, NONE, 0, "block%d.inputs", n);
    a->kernel = take(l->states, l->state_base, B, S * C, NONE, 0, "block%d.kernel", n);
}

// Numbers that the workspace must hold.
static size_t hyena_workspace(const Config* c, size_t B, size_t T) {
    size_t sums = MAX_CONV * (3 * c->channels + FILTER) * split_count(B * T),
           conv = long_conv_workspace(T, c->channels);
    return conv > sums ? conv : sums;
}

// a->k (rows,C): the kernel for distances first, first+1, ...
static void hyena_filter_forward(HyenaActs* a, const HyenaParams<floatX>* p,
                                 const Config* c, size_t first, size_t rows) {
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
static void hyena_filter_backward(HyenaParams<float>* g, HyenaActs* a, const HyenaParams<floatX>* p,
                                  const Config* c, size_t T) {
    const HyenaScratch* s = &a->s;
    size_t F = FILTER;
    filter_window(s->dk, 0, T, c->seq, c->channels);
    sine_forward(s->s, a->h3, p->freq, T, F);
    linear_backward(s->ds, g->w4, NULL, s->dk, s->s, p->w4, T, F, c->channels, F, 0);
    sine_backward(s->ds, g->freq, a->h3, p->freq, T, F);
    sine_forward(s->s, a->h2, p->freq, T, F);
    linear_backward(s->dh, g->w3, g->b3, s->ds, s->s, p->w3, T, F, F, F, 0);
    sine_backward(s->dh, g->freq, a->h2, p->freq, T, F);
    sine_forward(s->s, a->h1, p->freq, T, F);
    linear_backward(s->ds, g->w2, g->b2, s->dh, s->s, p->w2, T, F, F, F, 0);
    sine_backward(s->ds, g->freq, a->h1, p->freq, T, F);
    linear_backward((float*)NULL, g->w1, g->b1, s->ds, a->z, p->w1, T, c->emb, F, c->emb, 0);
}

// c (1,C) = k ∗ p + D p of one more token, by the sum itself: of all p so far and the kernel, which grows by a row a
// token. A block takes 32 channels, a lane each; 8 warps take every 8th token, and warp 0 adds the 8, and this token.
__global__ void hyena_step_kernel(floatX* c, float* inputs, const floatX* p, const float* kernel,
                                  const float* d, size_t now, int C) {
    __shared__ float part[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = blockIdx.x * 32 + lane;
    float sum = 0;
    if (i < C) for (size_t t = warp; t < now; t += 8) sum += kernel[(now - t) * C + i] * inputs[t * C + i];
    part[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || i >= C) return;
    for (int w = 1; w < 8; w++) sum += part[w][lane];
    float x = (float)p[i];
    inputs[now * C + i] = x;
    c[i] = (floatX)(sum + (kernel[i] + d[i]) * x);
}
static void hyena_step(HyenaActs* a, const HyenaParams<floatX>* p, const Config* c) {
    size_t C = c->channels, now = *a->past;
    if (now >= (size_t)c->seq)
        die("hyena has no kernel beyond the %d tokens it was made for: end the text there", c->seq);
    hyena_filter_forward(a, p, c, now, 1);
    device_copy(a->kernel + now * C, a->k, C * sizeof(float));
    hyena_step_kernel<<<blocks(C, 32), 256>>>(a->c, a->inputs, a->s.p, a->kernel, p->d, now, (int)C);
    cudaCheck(cudaGetLastError());
}

// out (R,C) from x (R,C). T <= seq. With carry (B = T = 1), it goes on from the tokens before.
static void hyena_forward(floatX* out, const floatX* x, HyenaActs* a, const HyenaParams<floatX>* p,
                          const Config* c, size_t B, size_t T, int carry) {
    const HyenaScratch* s = &a->s;
    size_t R = B * T, C = c->channels;
    linear_forward(a->u, x, p->w_in, p->b_in, R, C, 3 * C, C, 0);
    short_conv_forward(a->v, a->u, p->conv_w, p->conv_b, carry ? a->window : NULL, B, T, 3 * C, HYENA_CONV);
    product(s->p, C, a->v + C, 3 * C, a->v + 2 * C, 3 * C, R, C);
    if (carry) {
        hyena_step(a, p, c);
    } else {
        hyena_filter_forward(a, p, c, 0, T);
        long_conv_forward(a->c, s->p, a->k, p->d, B, T, C);
    }
    product(s->g, C, a->v, 3 * C, a->c, C, R, C);
    linear_forward(out, s->g, p->w_out, p->b_out, R, C, C, C, 0);
}

// The lines of hyena_forward, last one first:  dx0 = c dg,  dc = x0 dg,  dx1 = v dp,  dv = x1 dp. x is what went in.
// dx (R,C) and g are added to.
static void hyena_backward(float* dx, HyenaParams<float>* g, const floatX* dout, const floatX* x, HyenaActs* a,
                           const HyenaParams<floatX>* p, const Config* c, size_t B, size_t T) {
    const HyenaScratch* s = &a->s;
    size_t R = B * T, C = c->channels;
    product(s->p, C, a->v + C, 3 * C, a->v + 2 * C, 3 * C, R, C);       // again, instead of keeping them
    product(s->g, C, a->v, 3 * C, a->c, C, R, C);
    linear_backward(s->dg, g->w_out, g->b_out, dout, s->g, p->w_out, R, C, C, C, 0);
    product(s->dv, 3 * C, a->c, C, s->dg, C, R, C);
    product(s->dc, C, a->v, 3 * C, s->dg, C, R, C);
    long_conv_backward(s->dp, s->dk, g->d, s->dc, s->p, a->k, p->d, B, T, C);
    hyena_filter_backward(g, a, p, c, T);
    product(s->dv + C, 3 * C, a->v + 2 * C, 3 * C, s->dp, C, R, C);
    product(s->dv + 2 * C, 3 * C, a->v + C, 3 * C, s->dp, C, R, C);
    short_conv_backward(s->du, g->conv_w, g->conv_b, s->dv, a->u, p->conv_w, B, T, 3 * C, HYENA_CONV);
    linear_backward(dx, g->w_in, g->b_in, s->du, x, p->w_in, R, C, 3 * C, C, 1);
}

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
// tied: head == wte
template <typename W> struct Params { W *wte, *head; float *wpe, *normf_w, *normf_b; BlockParams<W>* block; };

// Lays the parameters out: what kernels read at base, matrices at copy, at the same offsets (their gradients:
// copy = base). First weights as in the .c. wte and head keep room for the rows that the vocabulary is padded with;
// they stay zero, and no one else sees them.
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

// What a forward pass leaves behind for the backward pass; R = B*T rows. Sums of the residual stream are float; what a
// norm makes of them, for a mixer or an MLP to read, is floatX.
typedef struct {
    float *sum1, *mean1, *rstd1;        // (R,C), (R), (R): what the first norm reads (mean: LayerNorm only): the stream
    //      before the block, post-norm after the mixer. (R,C): what the mixer reads:
    floatX *in1;
    //      norm 1 of it, post-norm the block's input. The same for the second norm: the
    float *sum2, *mean2, *rstd2;
    floatX *in2;                        //      stream after the mixer, post-norm after the MLP; and what the MLP reads
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
static void acts_layout(Acts* a, floatX* base, float* exact, float* state_base, int* index,
                        const Config* c, int train) {
    size_t V = c->vocab, C = c->channels, F = c->ff, B = a->B, T = a->T, R = B * T;
    int layer = c->norm == LAYER;
    // generation takes one token at a time
    Table *t = &a->table, *f = &a->exact, *states = R == 1 && !train ? &a->states : NULL;
    Layout l = { t, f, states, base, exact, state_base };
    t->count = f->count = a->states.count = 0;
    t->total = f->total = a->states.total = 0;
    if (index) { a->tokens = index; a->targets = index + R; a->order = index + 2 * R; a->first = index + 3 * R; }
    if (((c->model == TRANSFORMER && c->pos == LEARNED) || c->model == HYENA) && T > (size_t)c->seq)
        die("a model with %d positions cannot read %zu tokens at a time: give --seq %d, or train one with --context %zu",
            c->seq, T, c->seq, T);
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
    size_t C = c->channels, B = m->B, T = m->T, pieces = 2 * ((m->table.total + NORM_PIECE - 1) / NORM_PIECE),
           width = 2 * C, mixer = 0;
    if ((size_t)c->ff > width) width = c->ff;
    if (c->model == TRANSFORMER && C + 2 * C / c->heads * c->kv_heads > width)
        width = C + 2 * C / c->heads * c->kv_heads;
    if (c->model == TRANSFORMER && c->attention == LINEAR)
        mixer = linear_attention_workspace(B, T, c->kv_heads, C / c->heads);
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
    for (int n = 0; n < m->config.layers; n++) cudaCheck(cudaFree(m->step.block[n].attn.cache));
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

// Bytes that every token of a generated text leaves behind: its keys and values in all blocks.
static size_t token_bytes(const Model* m) {
    const Config* c = &m->config;
    return c->model == TRANSFORMER && c->attention == SOFTMAX ? c->layers * cache_width(c) * sizeof(floatX) : 0;
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

static void norm_forward(floatX* out, float* mean, float* rstd, const float* x, const float* w, const float* b,
                         const Config* c, size_t R) {
    if (c->norm == LAYER) layernorm_forward(out, mean, rstd, x, w, b, R, c->channels);
    else rmsnorm_forward(out, rstd, x, w, R, c->channels);
}

// dx is written, or added to with add = 1; dw and db are added to.
static void norm_backward(float* dx, float* dw, float* db, const float* dout, const float* x, const float* mean,
                          const float* rstd, const float* w, const Config* c, size_t R, int add) {
    if (c->norm == LAYER) layernorm_backward(dx, dw, db, dout, x, mean, rstd, w, R, c->channels, add);
    else rmsnorm_backward(dx, dw, dout, x, rstd, w, R, c->channels, add);
}

// SwiGLU:  out = Wdown (silu(Wgate x) ⊙ Wup x)        GELU:  out = Wdown gelu(Wup x + bup) + bdown        u (R,ff)
static void mlp_forward(floatX* out, floatX* u, BlockActs* a, const floatX* x, const BlockParams<floatX>* p,
                        const Config* c, size_t R) {
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
static void mlp_backward(float* dx, BlockParams<float>* g, const floatX* dout, BlockActs* a, const floatX* x,
                         const BlockParams<floatX>* p, Acts* scratch, const Config* c, size_t R) {
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

static void mixer_forward(floatX* out, const floatX* x, BlockActs* a, const BlockParams<floatX>* p,
                          const Config* c, size_t B, size_t T, int carry) {
    if (c->model == TRANSFORMER) attn_forward(out, x, &a->attn, &p->attn, c, B, T, carry);
    if (c->model == MAMBA) mamba_forward(out, x, &a->mamba, &p->mamba, c, B, T, carry);
    if (c->model == MAMBA2) mamba2_forward(out, x, &a->mamba2, &p->mamba2, c, B, T, carry);
    if (c->model == HYENA) hyena_forward(out, x, &a->hyena, &p->hyena, c, B, T, carry);
}

static void mixer_backward(float* dx, BlockParams<float>* g, const floatX* dout, const floatX* x, BlockActs* a,
                           const BlockParams<floatX>* p, const Config* c, size_t B, size_t T) {
    if (c->model == TRANSFORMER) attn_backward(dx, &g->attn, dout, x, &a->attn, &p->attn, c, B, T);
    if (c->model == MAMBA) mamba_backward(dx, &g->mamba, dout, x, &a->mamba, &p->mamba, c, B, T);
    if (c->model == MAMBA2) mamba2_backward(dx, &g->mamba2, dout, x, &a->mamba2, &p->mamba2, c, B, T);
    if (c->model == HYENA) hyena_backward(dx, &g->hyena, dout, x, &a->hyena, &p->hyena, c, B, T);
}

// One block.
//     pre-norm     sum2 = sum1 + mixer(norm1(sum1))       out = sum2 + mlp(norm2(sum2))         no MLP: out = sum2
//     post-norm    sum1 = in1 + mixer(in1)    in2 = norm1(sum1)    sum2 = in2 + mlp(in2)    y = norm2(sum2)
// Pre-norm writes out, the residual stream in float, and post-norm y: there the stream is normed twice a block, and
// what follows reads it rounded.
static void layer_forward(float* out, floatX* y, BlockActs* a, const BlockParams<floatX>* p, Acts* scratch,
                          const Config* c, size_t B, size_t T, int carry) {
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

// The lines of layer_forward, last one first. d (R,C) is dout on entry and dx on return: it stands for the residual
// stream, to which every branch adds its share. It is float; what goes into a branch is rounded to dbranch first.
static void layer_backward(float* d, BlockParams<float>* g, BlockActs* a, const BlockParams<floatX>* p, Acts* scratch,
                           const Config* c, size_t B, size_t T) {
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
        layer_forward(last ? a->out : b[n + 1].sum1, last ? a->y : b[n + 1].in1, &b[n], &p->block[n],
                      a, c, B, T, carry);
    }
    if (!c->post_norm) norm_forward(a->y, a->y_mean, a->y_rstd, a->out, p->normf_w, p->normf_b, c, R);
    if (carry) a->past++;
}

// Mean loss in nats of tokens (B,T) against targets (B,T), both on the host; targets of -1 do not count. train = 1 also
// runs the head's backward (head_loss does both at once); train = 0 touches no gradient. Tokens must lie in [0, V).
static double model_forward(Model* m, const int* tokens, const int* targets, int train) {
    Acts* a = &m->acts;
    size_t R = (size_t)m->B * m->T;
    acts_forward(a, &m->p, &m->config, tokens, 0);
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
    if (!c->post_norm)                  // post-norm: dx is dy
        norm_backward(a->dx, m->g.normf_w, m->g.normf_b, a->dy, a->out, a->y_mean, a->y_rstd, m->p.normf_w, c, R, 0);
    for (int n = c->layers - 1; n >= 0; n--)
        layer_backward(a->dx, &m->g.block[n], &a->block[n], &m->p.block[n], a, c, m->B, m->T);
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

// Zeroes carried states: all of them, or those of the streams b with reset[b] (NULL: all). What a cache of keys holds
// is passed over from then on.
static void model_reset(Acts* a, const int* reset) {
    for (int i = 0; i < a->states.count; i++) {
        const Tensor* t = &a->states.tensors[i];
        size_t width = t->size / t->shape[0];
        for (int b = 0; b < a->B; b++)
            if (!reset || reset[b]) device_zero(a->state_memory + t->offset + b * width, width * sizeof(float));
    }
    a->past = 0;
}

// One token, for generation: the same forward with B = T = 1, from what is carried on: keys and values of all tokens
// that can still be seen (attention), a state of fixed size (linear attention, Mamba), all inputs (Hyena). Returns the
// logits (V) of what comes next, on the host, or NULL where the model has no more positions.
// model_reset(&m->step, NULL) starts a new text.
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
