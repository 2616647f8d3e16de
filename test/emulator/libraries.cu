// The emulator's cuBLAS, cuFFT and runtime calls against naive sums in double. nvcc compiles the same file.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <time.h>
#include <vector>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cublas_v2.h>
#include <cufft.h>
#include "check.h"

typedef __nv_bfloat16 bf16;
static float value(unsigned i) { return (float)((i * 2654435761u >> 8) % 2001) / 1000.0f - 1.0f; }
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
template <class T> static T* upload(const std::vector<T>& v) {
    T* d;
    cudaMalloc(&d, v.size() * sizeof(T));
    cudaMemcpy(d, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice);
    return d;
}
template <class T> static std::vector<T> fetch(const T* d, size_t n) {
    std::vector<T> v(n);
    cudaMemcpy(v.data(), d, n * sizeof(T), cudaMemcpyDeviceToHost);
    return v;
}
template <class T> static cudaDataType type_of(void) { return sizeof(T) == 2 ? CUDA_R_16BF : CUDA_R_32F; }

// One product in `batch` copies, strided with gaps that must keep what they held. Returns the largest error relative to the
// largest value, or NaN when a gap was written.
template <class T, class TC>
static double gemm_error(cublasHandle_t h, bool ta, bool tb, int m, int n, int k, float alpha, float beta, int batch, bool ex) {
    int ra = ta ? k : m, ca = ta ? m : k, rb = tb ? n : k, cb = tb ? k : n, lda = ra + 3, ldb = rb + 1, ldc = m + 2;
    long long sa = (long long)lda * ca + 5, sb = batch > 1 && k % 2 ? 0 : (long long)ldb * cb, sc = (long long)ldc * n + 4;
    std::vector<T> A((size_t)((batch - 1) * sa + (long long)(ca - 1) * lda + ra)), B((size_t)((batch - 1) * sb + (long long)(cb - 1) * ldb + rb));
    std::vector<TC> C((size_t)((batch - 1) * sc + (long long)(n - 1) * ldc + m));
    for (size_t i = 0; i < A.size(); i++) A[i] = (T)value((unsigned)i);
    for (size_t i = 0; i < B.size(); i++) B[i] = (T)value((unsigned)i * 3 + 7);
    for (size_t i = 0; i < C.size(); i++) C[i] = (TC)(beta == 0.0f ? NAN : value((unsigned)i * 5 + 1));    // beta = 0 must not read C
    T *dA = upload(A), *dB = upload(B);
    TC* dC = upload(C);
    cublasOperation_t oa = ta ? CUBLAS_OP_T : CUBLAS_OP_N, ob = tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t s;
    if (ex && batch == 1) s = cublasGemmEx(h, oa, ob, m, n, k, &alpha, dA, type_of<T>(), lda, dB, type_of<T>(), ldb, &beta, dC, type_of<TC>(), ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    else if (ex) s = cublasGemmStridedBatchedEx(h, oa, ob, m, n, k, &alpha, dA, type_of<T>(), lda, sa, dB, type_of<T>(), ldb, sb, &beta, dC, type_of<TC>(), ldc, sc, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    else if (batch == 1) s = cublasSgemm(h, oa, ob, m, n, k, &alpha, (float*)dA, lda, (float*)dB, ldb, &beta, (float*)dC, ldc);
    else s = cublasSgemmStridedBatched(h, oa, ob, m, n, k, &alpha, (float*)dA, lda, sa, (float*)dB, ldb, sb, &beta, (float*)dC, ldc, sc, batch);
    std::vector<TC> R = fetch(dC, C.size());
    cudaFree(dA), cudaFree(dB), cudaFree(dC);
    double error = 0.0, largest = 0.0;
    bool bad = s != CUBLAS_STATUS_SUCCESS;
    std::vector<char> seen(C.size());
    for (int b = 0; b < batch; b++) {
        for (int j = 0; j < n; j++) {
            for (int i = 0; i < m; i++) {
                double sum = 0.0;
                for (int q = 0; q < k; q++)
                    sum += (double)(float)A[(size_t)(b * sa + (ta ? (long long)i * lda + q : (long long)q * lda + i))]
                         * (double)(float)B[(size_t)(b * sb + (tb ? (long long)q * ldb + j : (long long)j * ldb + q))];
                size_t at = (size_t)(b * sc + (long long)j * ldc + i);
                double want = alpha * sum + (beta == 0.0f ? 0.0 : beta * (double)(float)C[at]), e = fabs(want - (double)(float)R[at]);
                if (!(e <= error)) error = e;
                if (fabs(want) > largest) largest = fabs(want);
                seen[at] = 1;
            }
        }
    }
    for (size_t i = 0; i < C.size(); i++) bad |= !seen[i] && memcmp(&C[i], &R[i], sizeof(TC)) != 0;
    return bad ? NAN : error / largest;
}

static void test_gemm(void) {
    cublasHandle_t h;
    cublasCreate(&h);
    cublasSetStream(h, 0);
    const int shapes[][3] = {{1, 1, 1}, {3, 1, 7}, {8, 4, 32}, {9, 5, 33}, {17, 66, 1}, {64, 31, 300}, {7, 129, 257}};
    double worst[4] = {0};
    for (auto& s : shapes) {
        for (int c = 0; c < 32; c++) {
            bool ta = c & 1, tb = c & 2;
            float alpha = c & 4 ? 1.0f : -0.5f, beta = c & 8 ? 0.0f : 0.25f;
            int batch = c & 16 ? 3 : 1;
            double e[4] = {gemm_error<float, float>(h, ta, tb, s[0], s[1], s[2], alpha, beta, batch, false),
                           gemm_error<float, float>(h, ta, tb, s[0], s[1], s[2], alpha, beta, batch, true),
                           gemm_error<bf16, float>(h, ta, tb, s[0], s[1], s[2], alpha, beta, batch, true),
                           gemm_error<bf16, bf16>(h, ta, tb, s[0], s[1], s[2], alpha, beta, batch, true)};
            for (int i = 0; i < 4; i++) if (!(e[i] <= worst[i])) worst[i] = e[i];
        }
    }
    check_error("cublasSgemm and its batched form, all transposes", worst[0], 2e-6);
    check_error("cublasGemmEx, fp32", worst[1], 2e-6);
    check_error("cublasGemmEx, bf16 to fp32", worst[2], 2e-6);
    check_error("cublasGemmEx, bf16 to bf16", worst[3], 4e-3);
    cublasSetMathMode(h, CUBLAS_TF32_TENSOR_OP_MATH);
    double tf32 = gemm_error<float, float>(h, false, false, 33, 34, 35, 1.0f, 0.0f, 1, false);
    check(tf32 > 1e-5 && tf32 < 1e-3, "TF32 rounds its operands: error %.2e", tf32);
    cublasSetMathMode(h, CUBLAS_DEFAULT_MATH);

    int n = 512;
    float *A = upload(std::vector<float>((size_t)n * n, 0.5f)), *C = upload(std::vector<float>((size_t)n * n)), one = 1.0f, zero = 0.0f;
    double best = 1e9;
    for (int i = 0; i < 3; i++) {
        double t = now();
        cublasSgemm(h, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, A, n, A, n, &zero, C, n);
        cudaDeviceSynchronize();
        best = fmin(best, now() - t);
    }
    check(fetch(C, (size_t)n * n)[12345] == 0.25f * (float)n, "512 x 512 x 512 at %.1f GFLOP/s", 2e-9 * n * n * n / best);
    cudaFree(A), cudaFree(C);
    cublasDestroy(h);
}

// sum_j x_j exp(sign 2 pi i jk / n)
static void dft(std::vector<double>& re, std::vector<double>& im, int sign) {
    size_t n = re.size();
    std::vector<double> r(n), m(n);
    for (size_t k = 0; k < n; k++) {
        for (size_t j = 0; j < n; j++) {
            double angle = sign * 2.0 * 3.14159265358979323846 * (double)(j * k % n) / (double)n;
            r[k] += re[j] * cos(angle) - im[j] * sin(angle);
            m[k] += re[j] * sin(angle) + im[j] * cos(angle);
        }
    }
    re = r, im = m;
}
// One length in three batches, packed or with strides. The largest error relative to the
// largest value, or NaN when a gap was written.
static double fft_error(int n, cufftType type, int direction, bool strided) {
    int batch = 3, bins = n / 2 + 1, count_in = type == CUFFT_C2R ? bins : n, count_out = type == CUFFT_R2C ? bins : n;
    int is = strided ? 2 : 1, os = strided ? 3 : 1, id = count_in * is + (strided ? 2 : 0), od = count_out * os + (strided ? 1 : 0);
    bool real_in = type == CUFFT_R2C, real_out = type == CUFFT_C2R;
    size_t total_in = (size_t)id * batch, total_out = (size_t)od * batch;
    std::vector<float2> in(total_in), out(total_out, make_float2(7.0f, 7.0f));
    std::vector<float> rin(total_in), rout(total_out, 7.0f);
    for (size_t i = 0; i < total_in; i++) rin[i] = value((unsigned)i), in[i] = make_float2(value((unsigned)i * 2 + 1), value((unsigned)i * 3 + 2));
    float2 *di = upload(in), *dout = upload(out);
    float *dri = upload(rin), *dro = upload(rout);
    cufftHandle plan;
    cufftResult made, ran;
    if (strided) { int embed = id; made = cufftPlanMany(&plan, 1, &n, &embed, is, id, &embed, os, od, type, batch); }
    else made = cufftPlan1d(&plan, n, type, batch);
    cufftSetStream(plan, 0);
    if (real_in) ran = cufftExecR2C(plan, dri, dout);
    else if (real_out) ran = cufftExecC2R(plan, di, dro);
    else ran = cufftExecC2C(plan, di, dout, direction);
    cufftDestroy(plan);
    std::vector<float2> o = fetch(dout, total_out), used = fetch(di, total_in);
    std::vector<float> ro = fetch(dro, total_out);
    cudaFree(di), cudaFree(dout), cudaFree(dri), cudaFree(dro);
    double error = 0.0, largest = 0.0;
    bool bad = made != CUFFT_SUCCESS || ran != CUFFT_SUCCESS;
    for (int b = 0; b < batch; b++) {
        std::vector<double> re(n), im(n);
        for (int i = 0; i < count_in; i++) {
            size_t at = (size_t)(b * id + i * is);
            re[i] = real_in ? rin[at] : in[at].x;
            im[i] = real_in ? 0.0 : in[at].y;
#ifdef CUDA_ON_CPU
            bad |= real_out && used[at].x == in[at].x;      // cuFFT may destroy C2R's input, the emulator always does
#endif
        }
        if (real_out) {
            im[0] = 0.0;
            if (n % 2 == 0) im[n / 2] = 0.0;
            for (int i = bins; i < n; i++) re[i] = re[n - i], im[i] = -im[n - i];
        }
        dft(re, im, real_out ? 1 : real_in ? -1 : direction);
        for (int i = 0; i < count_out; i++) {
            size_t at = (size_t)(b * od + i * os);
            double e = real_out ? fabs(ro[at] - re[i]) : fmax(fabs(o[at].x - re[i]), fabs(o[at].y - im[i]));
            if (!(e <= error)) error = e;
            largest = fmax(largest, fmax(fabs(re[i]), fabs(im[i])));
            for (int g = 1; g < os; g++) bad |= at + g < total_out && (real_out ? ro[at + g] : o[at + g].x) != 7.0f;   // gaps kept
        }
    }
    return bad ? NAN : error / largest;
}
static void test_fft(void) {
    double r2c = 0.0, c2r = 0.0, c2c = 0.0;
    for (int n : {1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 64, 97, 128, 254, 510}) {
        for (bool strided : {false, true}) {
            double e[4] = {fft_error(n, CUFFT_R2C, CUFFT_FORWARD, strided), fft_error(n, CUFFT_C2R, CUFFT_INVERSE, strided),
                           fft_error(n, CUFFT_C2C, CUFFT_FORWARD, strided), fft_error(n, CUFFT_C2C, CUFFT_INVERSE, strided)};
            if (!(e[0] <= r2c)) r2c = e[0];
            if (!(e[1] <= c2r)) c2r = e[1];
            if (!(fmax(e[2], e[3]) <= c2c) || e[2] != e[2] || e[3] != e[3]) c2c = e[2] + e[3];
        }
    }
    check_error("cufftExecR2C, 16 lengths, packed and strided", r2c, 2e-7);
    check_error("cufftExecC2R, unnormalised, input destroyed", c2r, 2e-7);
    check_error("cufftExecC2C, both directions", c2c, 4e-7);
    // in place: rows of 2 (n/2 + 1) floats, there and back, n times the start
    int n = 10, batch = 2, real_row = 12, row = 6, bad = 0;
    std::vector<float> x(real_row * batch);
    for (int i = 0; i < real_row * batch; i++) x[i] = value(i);
    float* d = upload(x);
    cufftHandle there, back;
    cufftPlanMany(&there, 1, &n, &real_row, 1, real_row, &row, 1, row, CUFFT_R2C, batch);
    cufftPlanMany(&back, 1, &n, &row, 1, row, &real_row, 1, real_row, CUFFT_C2R, batch);
    cufftExecR2C(there, d, (cufftComplex*)d);
    cufftExecC2R(back, (cufftComplex*)d, d);
    std::vector<float> y = fetch(d, x.size());
    for (int b = 0; b < batch; b++) for (int i = 0; i < n; i++) bad += !(fabs(y[b * real_row + i] - n * x[b * real_row + i]) < 1e-5);
    check(bad == 0, "R2C and C2R in place");
    cufftDestroy(there), cufftDestroy(back), cudaFree(d);
}

static void test_runtime(void) {
    int count = -1, device = -1, driver = 0, runtime = 0, sms = 0;
    cudaDeviceProp p;
    check(cudaGetDeviceCount(&count) == cudaSuccess && count >= 1, "cudaGetDeviceCount");
    check(cudaSetDevice(0) == cudaSuccess && cudaGetDevice(&device) == cudaSuccess && device == 0, "cudaSetDevice");
    check(cudaSetDevice(count) == cudaErrorInvalidDevice, "cudaSetDevice refuses a device that is not there");
    check(cudaPeekAtLastError() == cudaErrorInvalidDevice && cudaGetLastError() == cudaErrorInvalidDevice && cudaGetLastError() == cudaSuccess, "the last error is kept until it is read");
    check(!strcmp(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation") && !strcmp(cudaGetErrorString(cudaSuccess), "no error"), "error names");
    check(cudaGetDeviceProperties(&p, 0) == cudaSuccess && p.major >= 8 && p.multiProcessorCount > 0 && p.totalGlobalMem > 0 && p.warpSize == 32, "device: %s", p.name);
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess && sms == p.multiProcessorCount, "cudaDeviceGetAttribute");
    check(cudaDriverGetVersion(&driver) == cudaSuccess && cudaRuntimeGetVersion(&runtime) == cudaSuccess && runtime >= 11000, "versions");

    size_t before, after, total;
    float *d = nullptr, *h = nullptr;
    cudaMemGetInfo(&before, &total);
    check(cudaMalloc(&d, 1 << 20) == cudaSuccess && cudaMallocHost(&h, 1 << 20) == cudaSuccess, "cudaMalloc, cudaMallocHost");
    cudaMemGetInfo(&after, &total);
    check(before - after >= 1 << 20 && before <= total, "cudaMemGetInfo");
    void* huge = h;
    check(cudaMalloc(&huge, (size_t)1 << 60) == cudaErrorMemoryAllocation && cudaGetLastError() == cudaErrorMemoryAllocation, "cudaMalloc of 2^60 bytes fails");
    for (int i = 0; i < 1 << 18; i++) h[i] = value(i);
    cudaStream_t s;
    cudaEvent_t a, b;
    cudaStreamCreate(&s), cudaEventCreate(&a), cudaEventCreate(&b);
    cudaEventRecord(a, s);
    cudaMemcpyAsync(d, h, 1 << 20, cudaMemcpyHostToDevice, s);
    cudaMemsetAsync(d + 100, 0, 400, s);
    memset(h, 1, 1 << 20);
    cudaMemcpyAsync(h, d, 1 << 20, cudaMemcpyDefault, s);
    cudaEventRecord(b, s);
    cudaEventSynchronize(b);
    cudaStreamSynchronize(s);
    float ms = -1.0f;
    cudaError_t timed = cudaEventElapsedTime(&ms, a, b);
    check(timed == cudaSuccess && ms >= 0.0f && ms < 10000.0f, "events, %.3f ms", ms);
    check(h[99] == value(99) && h[100] == 0.0f && h[199] == 0.0f && h[200] == value(200), "asynchronous copies and sets");
    cudaEventDestroy(a), cudaEventDestroy(b), cudaStreamDestroy(s), cudaFree(d), cudaFreeHost(h);
    cudaHostAlloc(&h, 64, cudaHostAllocDefault);
    cudaFreeHost(h);
    check(cudaFree(0) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess && cudaGetLastError() == cudaSuccess, "no error is left");
}

int main(void) {
    test_gemm();
    test_fft();
    test_runtime();
    return check_report();
}
