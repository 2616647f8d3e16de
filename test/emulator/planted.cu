// One planted fault per name: `planted NAME`. test_emulator.sh runs each and demands that it is caught, with the message that fits.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cublas_v2.h>
#include <cufft.h>

// ---- races and what nobody wrote: the result says it, and in a race build the emulator does
__global__ void no_barrier(float* out) {
    __shared__ float x[64];
    x[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = x[63 - threadIdx.x];
}
__global__ void no_second_barrier(float* out) {
    __shared__ float x[64];
    x[threadIdx.x] = 1.0f;
    __syncthreads();
    for (int d = 1; d < 64; d *= 2) {
        float v = threadIdx.x >= d ? x[threadIdx.x - d] : 0.0f;
        x[threadIdx.x] += v;                        // others still read it
        __syncthreads();
    }
    out[threadIdx.x] = x[threadIdx.x];
}
__global__ void no_syncwarp(float* out) {
    __shared__ float x[32];
    x[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = x[threadIdx.x ^ 1];
}
__global__ void two_blocks_write(float* out) { out[0] = blockIdx.x; }
__global__ void two_blocks_write_same(float* out) { out[0] = 1.0f; }
__global__ void block_reads_block(float* out) {
    out[blockIdx.x] = 1.0f;
    if (blockIdx.x > 0) out[8 + blockIdx.x] = out[blockIdx.x - 1];
}
__global__ void read_before_write(float* out) { if (blockIdx.x == 0) out[8] = out[1]; else out[blockIdx.x] = 1.0f; }
__global__ void float_atomics(float* out) { atomicAdd(out, blockIdx.x ? 0.7f * blockIdx.x : 1e8f); }
__global__ void atomic_and_plain(int* out) { if (blockIdx.x) atomicAdd(out, 1); else *out = 7; }
__global__ void unwritten_shared(float* out) { __shared__ float x[64]; x[threadIdx.x / 2] = 1.0f; __syncthreads(); out[threadIdx.x] = x[threadIdx.x]; }
__global__ void copy(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x]; }

// ---- addresses
__global__ void write_at(float* out, int i) { out[i] = 1.0f; }
__global__ void read_at(float* out, int i) { out[0] = out[i]; }
struct Pointers { float* p; };
__global__ void write_struct(Pointers s) { *s.p = 1.0f; }
__global__ void write_dynamic(float* out, int i) { extern __shared__ float x[]; x[i] = 1.0f; *out = x[0]; }
__global__ void write_static(float* out, int i) { __shared__ float x[8]; x[i] = 1.0f; *out = x[0]; }
__global__ void load4(float* out, int shift) { float4 v = *(const float4*)(out + shift); out[9] = v.x + v.w; }
__global__ void much_static(float* out) { __shared__ float x[8192]; extern __shared__ float y[]; x[0] = y[0] = 1.0f; *out = x[0]; }
__device__ float deep(float* p, int n) { float x[1024]; for (int i = 0; i < 1024; i++) x[i] = p[0] + i; return n ? deep(p, n - 1) + x[n] : x[7]; }
__global__ void stack_overflow(float* out) { out[0] = deep(out, 100); }

// ---- rendezvous
__global__ void lane_outside(float* out) { float v = 1; v = __shfl_xor_sync(0x0000ffffu, v, 1); out[threadIdx.x] = v; }
__global__ void lane_exited(float* out) { if (threadIdx.x >= 40) return; out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1); }
__global__ void diverged(float* out) {
    if (threadIdx.x < 64) __syncthreads();
    else { out[1] = 2.0f; __syncthreads(); }
    out[0] = 1.0f; }
__global__ void half_barrier(float* out) { if (threadIdx.x < 16) __syncthreads(); else __syncwarp(0xffffffffu); out[threadIdx.x] = 1; }
__global__ void mask_differs(float* out) { out[threadIdx.x] = __shfl_xor_sync(threadIdx.x < 16 ? 0xffffffffu : 0xfffffffeu, 1.0f, 1); }

int main(int argc, char** argv) {
    const char* name = argc > 1 ? argv[1] : "";
    auto is = [&](const char* s) { return strcmp(name, s) == 0; };
    float *d = nullptr, *e = nullptr, host[64];
    cudaMalloc(&d, 64 * sizeof(float));
    cudaMalloc(&e, 61 * sizeof(float));             // 12 bytes less than a multiple of 16
    int show = 64;
    cublasHandle_t blas;
    cublasCreate(&blas);
    cufftHandle plan;
    float one = 1.0f, zero = 0.0f;
    if (!is("unwritten_global") && !is("read_strip")) cudaMemset(d, 0, 64 * sizeof(float));

    if (is("no_barrier")) no_barrier<<<1, 64>>>(d);
    else if (is("no_second_barrier")) no_second_barrier<<<1, 64>>>(d);
    else if (is("no_syncwarp")) no_syncwarp<<<1, 32>>>(d);
    else if (is("two_blocks_write")) two_blocks_write<<<9, 1>>>(d);
    else if (is("two_blocks_write_same")) two_blocks_write_same<<<9, 1>>>(d);
    else if (is("block_reads_block")) block_reads_block<<<8, 1>>>(d);
    else if (is("read_before_write")) read_before_write<<<8, 1>>>(d);
    else if (is("float_atomics")) float_atomics<<<64, 1>>>(d);
    else if (is("atomic_and_plain")) atomic_and_plain<<<2, 1>>>((int*)d);
    else if (is("unwritten_shared")) unwritten_shared<<<1, 64>>>(d);
    else if (is("unwritten_global")) { cudaMemset(e, 0, 60 * sizeof(float)); copy<<<1, 61>>>(d, e); show = 61; }

    else if (is("past_end")) write_at<<<1, 1>>>(d, 64);
    else if (is("past_end_strip")) write_at<<<1, 1>>>(e, 61);
    else if (is("read_strip")) read_at<<<1, 1>>>(e, 61);
    else if (is("before_start")) write_at<<<1, 1>>>(d, -1);
    else if (is("host_touches")) d[0] = 1.0f;
    else if (is("host_argument")) write_at<<<1, 1>>>(host, 0);
    else if (is("freed_argument")) { cudaFree(e); write_at<<<1, 1>>>(e, 0); }
    else if (is("freed_in_struct")) { cudaFree(e); Pointers s = {e}; write_struct<<<1, 1>>>(s); }
    else if (is("free_twice")) { cudaFree(e); cudaFree(e); }
    else if (is("free_inside")) cudaFree(e + 1);
    else if (is("copy_too_long")) cudaMemcpy(host, e, 62 * sizeof(float), cudaMemcpyDeviceToHost);
    else if (is("copy_wrong_way")) cudaMemcpy(host, e, 4, cudaMemcpyHostToDevice);
    else if (is("copy_from_device")) cudaMemcpy(d, e, 4, cudaMemcpyHostToDevice);
    else if (is("set_host")) cudaMemset(host, 0, 4);
    else if (is("past_dynamic")) write_dynamic<<<1, 1, 16>>>(d, 4);
    else if (is("past_dynamic_strip")) write_dynamic<<<1, 1, 4>>>(d, 1);
    else if (is("no_dynamic")) write_dynamic<<<1, 1>>>(d, 1);
    else if (is("past_static")) write_static<<<1, 1>>>(d, 8 + (argc > 2));
    else if (is("misaligned")) load4<<<1, 1>>>(d, 1);
    else if (is("stack_overflow")) stack_overflow<<<1, 1>>>(d);

    else if (is("too_many_threads")) write_at<<<1, 1025>>>(d, 0);
    else if (is("empty_grid")) write_at<<<0, 32>>>(d, 0);
    else if (is("grid_y")) write_at<<<dim3(1, 65536), 1>>>(d, 0);
    else if (is("block_z")) write_at<<<1, dim3(1, 1, 65)>>>(d, 0);
    else if (is("no_opt_in")) write_dynamic<<<1, 1, 50000>>>(d, 0);
    else if (is("opt_in_too_much")) printf("%s\n", cudaGetErrorName(cudaFuncSetAttribute(write_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, 200000)));
    else if (is("static_and_dynamic")) much_static<<<1, 1, 20000>>>(d);

    else if (is("lane_outside")) lane_outside<<<1, 32>>>(d);
    else if (is("lane_exited")) lane_exited<<<1, 64>>>(d);
    else if (is("diverged")) diverged<<<1, 128>>>(d);
    else if (is("half_barrier")) half_barrier<<<1, 32>>>(d);
    else if (is("mask_differs")) mask_differs<<<1, 32>>>(d);

    else if (is("gemm_host")) cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, host, 4, d, 4, &zero, e, 4);
    else if (is("gemm_short")) cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, 8, 8, 8, &one, d, 8, d, 8, &zero, e, 8);
    else if (is("gemm_ld")) cublasSgemm(blas, CUBLAS_OP_T, CUBLAS_OP_N, 4, 4, 5, &one, d, 4, d, 5, &zero, e, 4);
    else if (is("gemm_size")) cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, 4, 0, 4, &one, d, 4, d, 4, &zero, e, 4);
    else if (is("gemm_overlap")) cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, d, 4, d + 16, 4, &zero, d + 8, 4);
    else if (is("gemm_types")) cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, d, CUDA_R_32F, 4, d, CUDA_R_32F, 4, &zero, e, CUDA_R_16BF, 4, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    else if (is("gemm_alpha")) cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, d, d, 4, d, 4, &zero, e, 4);
    else if (is("fft_short")) { cufftPlan1d(&plan, 60, CUFFT_R2C, 1); cufftExecR2C(plan, d, (cufftComplex*)e); }
    else if (is("fft_type")) { cufftPlan1d(&plan, 16, CUFFT_R2C, 1); cufftExecC2R(plan, (cufftComplex*)d, e); }
    else if (is("fft_no_plan")) { cufftPlan1d(&plan, 16, CUFFT_R2C, 1); cufftDestroy(plan); cufftExecR2C(plan, d, (cufftComplex*)e); }

    else if (is("no_memory")) { void* p; printf("%s, ", cudaGetErrorName(cudaMalloc(&p, 100000))); printf("%s, ", cudaGetErrorString(cudaGetLastError())); printf("%s\n", cudaGetErrorString(cudaGetLastError())); }
    else { fprintf(stderr, "planted: no fault named '%s'\n", name); return 3; }

    cudaMemcpy(host, d, show * sizeof(float), cudaMemcpyDeviceToHost);
    for (int i = 0; i < show; i++) printf("%.9g ", host[i]);
    printf("\n");
    return 0;
}
