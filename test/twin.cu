// twin.cu: every kernel of train_X.cu, and the whole model, against train_X.c. Both get the same numbers (rounded to what
// the CUDA build stores), so what differs is the arithmetic alone. The same source runs on the emulator and on a GPU:
//
//     gcc -c -DTRAIN_FILE='"../train_harmonic.c"' -DMODEL_FILE='"models/harmonic.h"' test/twin_ref.c
//     nvcc -DTRAIN_CU='"../train_harmonic.cu"' -DMODEL_FILE='"models/harmonic.h"' test/twin.cu twin_ref.o -lcublas
//
// (test/test_twin.sh has the full command lines.) twin --quick leaves out the longer half of the shapes. It prints a hash of
// all bits that came out: a kernel that lacks a barrier gives another one in another order of its threads.
//
// Errors are ‖cuda - c‖ / ‖c‖, per tensor; a gradient that is tiny against all others is held against 1e-3 ‖all gradients‖.
// In fp32 both sides round differently only in the order of sums. In bf16 each number that is stored has a relative
// error of up to 2^-9 (0.002), and a chain of a dozen of them lies between tokens and gradients.
#ifdef __NVCC__
#pragma nv_diag_suppress 177            // a test leaves some of the program's functions unused
#endif
#define TESTING
#include TRAIN_CU
#include MODEL_FILE
#include "check.h"
#include "twin.h"

static const int BF16 = sizeof(floatX) == 2;
static const double LAYER_BOUND  = BF16 ? 5e-3 : 1e-5;      // one layer, from the same inputs           measured in bf16: 2e-3
static const double HEAD_BOUND   = BF16 ? 2e-2 : 1e-5;      // the head: logits of size 15 are rounded by 0.03      7e-3
static const double LOSS_BOUND   = BF16 ? 4e-3 : 1e-5;      // the whole model                                      2e-3
static const double LOGIT_BOUND  = BF16 ? 4e-2 : 1e-4;      //                                                      2e-2
static const double ALL_BOUND    = BF16 ? 2e-2 : 3e-5;      // all gradients together                               7e-3
static const double GRAD_BOUND   = BF16 ? 2e-1 : 1e-4;      // each tensor's gradient                               7e-2
static const double PARAM_BOUND  = BF16 ? 6e-3 : 1e-4;      // after 5 AdamW steps, relative to the parameters      2e-3
static const double UPDATE_BOUND = BF16 ? 8e-1 : 3e-3;      // the same, relative to how far those steps moved them 6e-1
                                                            // (where a gradient is near 0, its sign makes a full step)
static uint64_t rng = 1, hash = 0xcbf29ce484222325;

// ----------------------------------------------------------------------------------------------------------------
// numbers

static void add_to_hash(const void* x, size_t bytes) {      // FNV-1a
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((const unsigned char*)x)[i]) * 0x100000001b3;
}
static double norm_of(const float* x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sqrt(sum);
}
static double distance_of(const float* a, const float* b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    return sqrt(sum);
}
static float* host_array(size_t n) { return (float*)allocate(n * sizeof(float), "a test"); }

// n numbers from N(0, deviation) that floatX can hold
static float* random_array(size_t n, double deviation) {
    float* x = host_array(n);
    for (size_t i = 0; i < n; i++) x[i] = (float)(floatX)(float)(deviation * rng_normal(&rng));
    return x;
}
static int* random_tokens(size_t n, int V, int ignored) {   // with `ignored`, every 5th is -1
    int* t = (int*)allocate(n * sizeof(int), "a test");
    for (size_t i = 0; i < n; i++) t[i] = ignored && rng_next(&rng) % 5 == 0 ? -1 : (int)(rng_next(&rng) % V);
    return t;
}

// Device arrays of exactly n numbers: as given, or NaN (all bits set) for what a kernel must write.
template <typename F> static F* to_device(const float* x, size_t n) {
    F *d, *h = (F*)allocate(n * sizeof(F), "a test");
    for (size_t i = 0; i < n; i++) h[i] = (F)x[i];
    cudaCheck(cudaMalloc(&d, n * sizeof(F)));
    device_write(d, h, n * sizeof(F));
    free(h);
    return d;
}
static int* to_device_int(const int* x, size_t n) {
    int* d;
    cudaCheck(cudaMalloc(&d, n * sizeof(int)));
    device_write(d, x, n * sizeof(int));
    return d;
}
template <typename F> static F* unwritten(size_t n) {
    F* d;
    cudaCheck(cudaMalloc(&d, n * sizeof(F)));
    cudaCheck(cudaMemset(d, 255, n * sizeof(F)));
    return d;
}

// An error against a norm; against a zero, only zero is right.
static double ratio(double error, double norm) { return norm != 0 ? error / norm : error == 0 ? 0 : INFINITY; }

// The error of a device array against b; its bits go into the hash, and it is freed.
template <typename F> static double error_of(F* device, const float* b, size_t n) {
    float* a = host_array(n);
    device_read(a, device, n);
    cudaCheck(cudaFree(device));
    add_to_hash(a, n * sizeof(float));
    double error = ratio(distance_of(a, b, n), norm_of(b, n));
    free(a);
    return error;
}

// ----------------------------------------------------------------------------------------------------------------
// layers

static void check_embedding(size_t rows, int V, size_t C, float scale) {
    int *tokens = random_tokens(rows, V, 0), *sorted = (int*)allocate((2 * rows + 1) * sizeof(int), "a test");
    float *wte = random_array(V * C, 1), *dx = random_array(rows * C, 1), *x = host_array(rows * C), *dwte = random_array(V * C, 1);
    int distinct = sort_rows(sorted, sorted + rows, tokens, rows, V);
    int *t = to_device_int(tokens, rows), *order = to_device_int(sorted, rows), *first = to_device_int(sorted + rows, distinct + 1);
    floatX *w = to_device<floatX>(wte, V * C), *out = unwritten<floatX>(rows * C);
    float *stream = unwritten<float>(rows * C), *d = to_device<float>(dx, rows * C), *dw = to_device<float>(dwte, V * C);
    embedding_forward(out, t, w, scale, rows, C);
    embedding_forward(stream, t, w, scale, rows, C);
    embedding_backward(dw, t, order, first, distinct, d, scale, C);
    ref_embedding_forward(x, tokens, wte, scale, rows, C);
    ref_embedding_backward(dwte, tokens, dx, scale, rows, C);
    double e1 = error_of(out, x, rows * C), e2 = error_of(stream, x, rows * C), e3 = error_of(dw, dwte, V * C);
    check(e1 <= LAYER_BOUND && e2 <= LAYER_BOUND && e3 <= 1e-5, "embedding, rows %zu, V %d, C %zu: x %.1e, float x %.1e, dwte %.1e", rows, V, C, e1, e2, e3);
    cudaCheck(cudaFree(t)); cudaCheck(cudaFree(order)); cudaCheck(cudaFree(first)); cudaCheck(cudaFree(w)); cudaCheck(cudaFree(d));
    free(tokens); free(sorted); free(wte); free(dx); free(x); free(dwte);
}

// out is the `add`ed half of a wider matrix: w starts `skip` columns into rows of ldw.
static void check_linear(size_t rows, size_t IC, size_t OC, size_t ldw, size_t skip, int add, int bias) {
    float *x = random_array(rows * IC, 1), *w = random_array(OC * ldw, 1), *b = random_array(OC, 1), *out = random_array(rows * OC, 1);
    float *dout = random_array(rows * OC, 1), *dx = random_array(rows * IC, 1), *dw = random_array(OC * ldw, 1), *db = random_array(OC, 1);
    float* dx_new = host_array(rows * IC);
    floatX *X = to_device<floatX>(x, rows * IC), *W = to_device<floatX>(w, OC * ldw), *Out = to_device<floatX>(out, rows * OC), *DOut = to_device<floatX>(dout, rows * OC);
    float *Bias = to_device<float>(b, OC), *DX = to_device<float>(dx, rows * IC), *DW = to_device<float>(dw, OC * ldw), *DB = to_device<float>(db, OC);
    floatX* DXnew = unwritten<floatX>(rows * IC);
    float* DWnew = to_device<float>(dw, OC * ldw);
    workspace_reserve(2 * OC * split_count(rows));
    linear_forward(Out, X, W + skip, bias ? Bias : NULL, rows, IC, OC, ldw, add);
    linear_backward(DX, DW + skip, bias ? DB : NULL, DOut, X, W + skip, rows, IC, OC, ldw, 1);
    linear_backward(DXnew, DWnew + skip, NULL, DOut, X, W + skip, rows, IC, OC, ldw, 0);
    ref_linear_forward(out, x, w + skip, bias ? b : NULL, rows, IC, OC, ldw, add);
    ref_linear_backward(dx_new, dw + skip, NULL, dout, x, w + skip, rows, IC, OC, ldw);
    double e = error_of(DWnew, dw, OC * ldw);
    for (size_t i = 0; i < rows * IC; i++) dx[i] += dx_new[i];
    ref_linear_backward(NULL, NULL, bias ? db : NULL, dout, x, w + skip, rows, IC, OC, ldw);
    double ey = error_of(Out, out, rows * OC), ex = error_of(DX, dx, rows * IC), ew = worse(e, error_of(DW, dw, OC * ldw)), eb = error_of(DB, db, OC);
    double en = error_of(DXnew, dx_new, rows * IC);
    check(ey <= LAYER_BOUND && ex <= 1e-5 && ew <= 1e-5 && eb <= 1e-5 && en <= LAYER_BOUND, "linear %zu x %zu -> %zu, ldw %zu%s%s: out %.1e, dx %.1e, written dx %.1e, dw %.1e, db %.1e",
          rows, IC, OC, ldw, add ? ", added" : "", bias ? ", bias" : "", ey, ex, en, ew, eb);
    cudaCheck(cudaFree(X)); cudaCheck(cudaFree(W)); cudaCheck(cudaFree(DOut)); cudaCheck(cudaFree(Bias));
    free(x); free(w); free(b); free(out); free(dout); free(dx); free(dw); free(db); free(dx_new);
}

static void check_head(size_t rows, size_t C, size_t V, int ignored, int train) {
    size_t Vp = padded_vocab(V), counted, correct, hits;
    float *y = random_array(rows * C, 1), *head = random_array(V * C, 1), *dy = host_array(rows * C), *dhead = random_array(V * C, 1);
    int* targets = random_tokens(rows, V, ignored);
    if (ignored > 1) for (size_t r = 0; r < rows; r++) targets[r] = -1;         // all of them
    float* padded = host_array(Vp * C);
    memcpy(padded, head, V * C * sizeof(float));
    floatX *Y = to_device<floatX>(y, rows * C), *Head = to_device<floatX>(padded, Vp * C), *Logits = unwritten<floatX>(head_rows(rows, V) * Vp);
    memcpy(padded, dhead, V * C * sizeof(float));
    float *DHead = to_device<float>(padded, Vp * C), *DY = unwritten<float>(rows * C), *Losses = unwritten<float>(rows), *Hits = unwritten<float>(rows);
    int* Targets = to_device_int(targets, rows);
    workspace_reserve(4);
    double want = ref_head_loss(train ? dy : NULL, train ? dhead : NULL, y, head, targets, 0.5, rows, C, V, &counted, &correct);
    double loss = head_loss(train ? DY : NULL, train ? DHead : NULL, Y, Head, Targets, counted, Logits, Losses, Hits, 0.5, rows, C, V, &hits);
    add_to_hash(&loss, sizeof loss);
    float* got = host_array(Vp * C);
    device_read(got, DHead, Vp * C);
    double padding = norm_of(got + V * C, (Vp - V) * C), e_dhead = ratio(distance_of(got, dhead, V * C), norm_of(dhead, V * C));
    float* got_dy = host_array(rows * C);
    device_read(got_dy, DY, rows * C);
    int written = !isnan(got_dy[0]);
    double e_dy = train ? ratio(distance_of(got_dy, dy, rows * C), norm_of(dy, rows * C)) : 0;
    double e_loss = ratio(fabs(loss - want), want);
    check(e_loss <= LOSS_BOUND && e_dy <= HEAD_BOUND && e_dhead <= HEAD_BOUND && padding == 0 && (BF16 || hits == correct) && written == train,
          "head, rows %zu, C %zu, V %zu%s%s: loss %.1e, dy %.1e, dhead %.1e, hits %zu of %zu", rows, C, V, ignored > 1 ? ", all ignored" : ignored ? ", some ignored" : "",
          train ? "" : ", loss only", e_loss, e_dy, e_dhead, hits, correct);
    cudaCheck(cudaFree(Y)); cudaCheck(cudaFree(Head)); cudaCheck(cudaFree(Logits)); cudaCheck(cudaFree(DHead)); cudaCheck(cudaFree(DY));
    cudaCheck(cudaFree(Losses)); cudaCheck(cudaFree(Hits)); cudaCheck(cudaFree(Targets));
    free(y); free(head); free(dy); free(dhead); free(targets); free(padded); free(got); free(got_dy);
}

#ifdef HAS_SILU
static void check_silu(size_t rows, size_t C) {
    float *z = random_array(rows * C, 3), *bias = random_array(C, 1), *sum = host_array(rows * C), *out = host_array(rows * C), *d = random_array(rows * C, 1);
    for (size_t i = 0; i < rows * C; i++) sum[i] = z[i] + bias[i % C];
    z[0] = -1e4f; sum[0] = z[0] + bias[0];          // silu(-1e4) is 0, not NaN
    floatX *Z = to_device<floatX>(z, rows * C), *Out = unwritten<floatX>(rows * C), *D = to_device<floatX>(d, rows * C);
    z[0] = (float)(floatX)z[0]; sum[0] = z[0] + bias[0];
    float* Bias = to_device<float>(bias, C);
    silu_forward(Out, Z, Bias, rows, C);
    silu_backward(D, Z, Bias, rows, C);
    ref_silu_forward(out, sum, rows, C);
    ref_silu_backward(d, sum, rows, C);
    double e1 = error_of(Out, out, rows * C), e2 = error_of(D, d, rows * C);
    check(e1 <= LAYER_BOUND && e2 <= LAYER_BOUND, "silu, rows %zu, C %zu: out %.1e, d %.1e", rows, C, e1, e2);
    cudaCheck(cudaFree(Z)); cudaCheck(cudaFree(Bias));
    free(z); free(bias); free(sum); free(out); free(d);
}
#endif

#ifdef HAS_LAYERNORM
// x of type X, dx of type D; dx is added to where it is float.
template <typename D, typename X>
static void check_layernorm(size_t rows, size_t C, int weights, int add) {
    float *x = random_array(rows * C, 2), *w = random_array(C, 1), *b = random_array(C, 1), *dout = random_array(rows * C, 1);
    for (size_t i = 0; i < rows * C; i++) x[i] = (float)(floatX)(x[i] + 3);
    float *out = host_array(rows * C), *mean = host_array(rows), *rstd = host_array(rows);
    float *dx = random_array(rows * C, 1), *dw = random_array(C, 1), *db = random_array(C, 1);
    X* Xs = to_device<X>(x, rows * C);
    floatX* Out = unwritten<floatX>(rows * C);
    float *W = to_device<float>(w, C), *Bias = to_device<float>(b, C), *Mean = unwritten<float>(rows), *Rstd = unwritten<float>(rows);
    float *DOut = to_device<float>(dout, rows * C), *DW = to_device<float>(dw, C), *DB = to_device<float>(db, C);
    D* DX = add ? to_device<D>(dx, rows * C) : unwritten<D>(rows * C);
    workspace_reserve(2 * C * split_count(rows));
    layernorm_forward(Out, Mean, Rstd, Xs, weights ? W : NULL, weights ? Bias : NULL, rows, C);
    layernorm_backward(DX, weights ? DW : NULL, weights ? DB : NULL, DOut, Xs, Mean, Rstd, weights ? W : NULL, rows, C, add);
    if (!add) memset(dx, 0, rows * C * sizeof(float));
    ref_layernorm_forward(out, mean, rstd, x, weights ? w : NULL, weights ? b : NULL, rows, C);
    ref_layernorm_backward(dx, weights ? dw : NULL, weights ? db : NULL, dout, x, mean, rstd, weights ? w : NULL, rows, C);
    double e_out = error_of(Out, out, rows * C), e_stat = worse(error_of(Mean, mean, rows), error_of(Rstd, rstd, rows));
    double e_dx = error_of(DX, dx, rows * C), e_dw = worse(error_of(DW, dw, C), error_of(DB, db, C)), bound = sizeof(D) == 2 ? LAYER_BOUND : 1e-5;
    check(e_out <= LAYER_BOUND && e_stat <= 1e-5 && e_dx <= bound && e_dw <= 1e-5,
          "layernorm, rows %zu, C %zu%s%s, x %s, dx %s: out %.1e, statistics %.1e, dx %.1e, dw and db %.1e", rows, C, weights ? ", weights" : "", add ? ", added" : "",
          sizeof(X) == 2 ? "bf16" : "float", sizeof(D) == 2 ? "bf16" : "float", e_out, e_stat, e_dx, e_dw);
    cudaCheck(cudaFree(Xs)); cudaCheck(cudaFree(W)); cudaCheck(cudaFree(Bias)); cudaCheck(cudaFree(DOut));
    free(x); free(w); free(b); free(dout); free(out); free(mean); free(rstd); free(dx); free(dw); free(db);
}
#endif

#ifdef HAS_RMSNORM
// x of type X, dx of type D, as for layernorm
template <typename D, typename X>
static void check_rmsnorm(size_t rows, size_t C, int add) {
    float *x = random_array(rows * C, 2), *w = random_array(C, 1), *dout = random_array(rows * C, 1), *out = host_array(rows * C), *rstd = host_array(rows);
    float *dx = random_array(rows * C, 1), *dw = random_array(C, 1);
    X* Xs = to_device<X>(x, rows * C);
    floatX* Out = unwritten<floatX>(rows * C);
    float *W = to_device<float>(w, C), *Rstd = unwritten<float>(rows), *DOut = to_device<float>(dout, rows * C), *DW = to_device<float>(dw, C);
    D* DX = add ? to_device<D>(dx, rows * C) : unwritten<D>(rows * C);
    workspace_reserve(2 * C * split_count(rows));
    rmsnorm_forward(Out, Rstd, Xs, W, rows, C);
    rmsnorm_backward(DX, DW, DOut, Xs, Rstd, W, rows, C, add);
    if (!add) memset(dx, 0, rows * C * sizeof(float));
    ref_rmsnorm_forward(out, rstd, x, w, rows, C);
    ref_rmsnorm_backward(dx, dw, dout, x, rstd, w, rows, C);
    double e_out = error_of(Out, out, rows * C), e_stat = error_of(Rstd, rstd, rows), e_dx = error_of(DX, dx, rows * C), e_dw = error_of(DW, dw, C);
    check(e_out <= LAYER_BOUND && e_stat <= 1e-5 && (C == 1 || e_dx <= (sizeof(D) == 2 ? LAYER_BOUND : 1e-5)) && e_dw <= 1e-5,
          "rmsnorm, rows %zu, C %zu%s, x %s, dx %s: out %.1e, rstd %.1e, dx %.1e, dw %.1e", rows, C, add ? ", added" : "",
          sizeof(X) == 2 ? "bf16" : "float", sizeof(D) == 2 ? "bf16" : "float", e_out, e_stat, e_dx, e_dw);
    cudaCheck(cudaFree(Xs)); cudaCheck(cudaFree(W)); cudaCheck(cudaFree(DOut));
    free(x); free(w); free(dout); free(out); free(rstd); free(dx); free(dw);
}
#endif

#ifdef HAS_GELU
static void check_gelu(size_t rows, size_t C) {
    float *z = random_array(rows * C, 3), *bias = random_array(C, 1), *sum = host_array(rows * C), *out = host_array(rows * C), *d = random_array(rows * C, 1);
    z[0] = (float)(floatX)-1e4f;                    // gelu(-1e4) is 0, not NaN
    for (size_t i = 0; i < rows * C; i++) sum[i] = z[i] + bias[i % C];
    floatX *Z = to_device<floatX>(z, rows * C), *Out = unwritten<floatX>(rows * C), *D = to_device<floatX>(d, rows * C);
    float* Bias = to_device<float>(bias, C);
    gelu_forward(Out, Z, Bias, rows, C);
    gelu_backward(D, Z, Bias, rows, C);
    ref_gelu_forward(out, sum, rows, C);
    ref_gelu_backward(d, sum, rows, C);
    double e1 = error_of(Out, out, rows * C), e2 = error_of(D, d, rows * C);
    check(e1 <= LAYER_BOUND && e2 <= LAYER_BOUND, "gelu, rows %zu, C %zu: out %.1e, d %.1e", rows, C, e1, e2);
    cudaCheck(cudaFree(Z)); cudaCheck(cudaFree(Bias));
    free(z); free(bias); free(sum); free(out); free(d);
}
#endif

#ifdef HAS_SWIGLU
static void check_swiglu(size_t rows, size_t C) {
    size_t n = rows * C;
    float *z = random_array(n, 3), *up = random_array(n, 1), *out = host_array(n), *d = random_array(n, 1), *dup = host_array(n);
    floatX *Z = to_device<floatX>(z, n), *Up = to_device<floatX>(up, n), *Out = unwritten<floatX>(n), *D = to_device<floatX>(d, n), *DUp = unwritten<floatX>(n);
    swiglu_forward(Out, Z, Up, rows, C);
    swiglu_backward(D, DUp, Z, Up, rows, C);
    ref_swiglu_forward(out, z, up, rows, C);
    ref_swiglu_backward(d, dup, z, up, rows, C);
    double e1 = error_of(Out, out, n), e2 = error_of(D, d, n), e3 = error_of(DUp, dup, n);
    check(e1 <= LAYER_BOUND && e2 <= LAYER_BOUND && e3 <= LAYER_BOUND, "swiglu, rows %zu, C %zu: out %.1e, dz %.1e, dup %.1e", rows, C, e1, e2, e3);
    cudaCheck(cudaFree(Z)); cudaCheck(cudaFree(Up));
    free(z); free(up); free(out); free(d); free(dup);
}
#endif

#ifdef HAS_POSITIONS
static void check_positions(size_t past, size_t B, size_t T, size_t C) {
    float *x = random_array(B * T * C, 1), *wpe = random_array((past + T) * C, 1), *dx = random_array(B * T * C, 1), *dwpe = random_array(T * C, 1);
    floatX* Rounded = to_device<floatX>(x, B * T * C);
    float *X = to_device<float>(x, B * T * C), *Wpe = to_device<float>(wpe, (past + T) * C), *DX = to_device<float>(dx, B * T * C), *DWpe = to_device<float>(dwpe, T * C);
    positions_forward(Rounded, Wpe, past, B, T, C);
    positions_forward(X, Wpe, past, B, T, C);
    positions_backward(DWpe, DX, B, T, C);
    ref_positions_forward(x, wpe, past, B, T, C);
    ref_positions_backward(dwpe, dx, B, T, C);
    double e1 = error_of(Rounded, x, B * T * C), e2 = error_of(X, x, B * T * C), e3 = error_of(DWpe, dwpe, T * C);
    check(e1 <= LAYER_BOUND && e2 <= 1e-5 && e3 <= 1e-5, "positions, B %zu, T %zu, C %zu: x %.1e, float x %.1e, dwpe %.1e", B, T, C, e1, e2, e3);
    cudaCheck(cudaFree(Wpe)); cudaCheck(cudaFree(DX));
    free(x); free(wpe); free(dx); free(dwpe);
}
#endif

#ifdef HAS_ATTENTION
static void check_rope(size_t past, size_t B, size_t T, size_t H, size_t G, size_t D) {
    size_t W = (H + 2 * G) * D, n = B * T * W;
    float *x = random_array(n, 1), *table = host_array(T * D), *back = host_array(n);
    float* Table = unwritten<float>(T * D);
    floatX *X = to_device<floatX>(x, n), *Back = to_device<floatX>(x, n);
    memcpy(back, x, n * sizeof(float));
    rope_table(Table, past, T, D);
    rope(X, Table, 1, B, T, W, H + G, D);
    rope(Back, Table, -1, B, T, W, H + G, D);
    ref_rope_table(table, past, T, D);
    ref_rope(x, table, 1, B, T, W, H + G, D);
    ref_rope(back, table, -1, B, T, W, H + G, D);
    double e1 = error_of(X, x, n), e2 = error_of(Back, back, n), e3 = error_of(Table, table, T * D);
    check(e1 <= LAYER_BOUND && e2 <= LAYER_BOUND && e3 <= 1e-6, "rope from %zu on, B %zu, T %zu, heads %zu + %zu of %zu: x %.1e, back %.1e, table %.1e", past, B, T, H, G, D, e1, e2, e3);
    free(x); free(table); free(back);
}

// Columns c0 .. c1-1 of a against those of b, both (rows, width)
static double error_of_columns(const float* a, const float* b, size_t rows, size_t width, size_t c0, size_t c1) {
    double error = 0, norm = 0;
    for (size_t r = 0; r < rows; r++)
        for (size_t c = c0; c < c1; c++) {
            error += pow((double)a[r * width + c] - b[r * width + c], 2);
            norm += pow(b[r * width + c], 2);
        }
    return ratio(sqrt(error), sqrt(norm));
}

// size: of the scores; linear attention starts from a state.
static void check_attention(int linear, size_t window, size_t block, size_t B, size_t T, size_t H, size_t G, size_t D, double size) {
    size_t W = (H + 2 * G) * D, R = B * T, C = H * D, states = B * G * (D + 1) * D;
    float *qkv = random_array(R * W, sqrt(size)), *dout = random_array(R * C, 1), *out = host_array(R * C), *lse = host_array(R * H);
    float *dqkv = host_array(R * W), *delta = host_array(R * H), *state = host_array(states), *start = random_array(states, 0.3);
    floatX *QKV = to_device<floatX>(qkv, R * W), *DOut = to_device<floatX>(dout, R * C), *Out = unwritten<floatX>(R * C), *DQKV = unwritten<floatX>(R * W);
    float *Lse = unwritten<float>(R * H), *Delta = unwritten<float>(R * H);
    workspace_reserve(linear_attention_workspace(B, T, G, D));
    double e_state = 0;
    if (linear) {                                   // z stays positive
        for (size_t i = 0; i < states; i++) start[i] = (float)fabs(start[i]);
        memcpy(state, start, states * sizeof(float));
        float* State = to_device<float>(start, states);
        linear_attention_forward(Out, Lse, State, QKV, B, T, H, G, D);
        ref_linear_attention_forward(out, lse, state, qkv, B, T, H, G, D);
        e_state = error_of(State, state, states);
        e_state = worse(e_state, error_of(Out, out, R * C));
        Out = unwritten<floatX>(R * C);
        memset(state, 0, states * sizeof(float));
        linear_attention_forward(Out, Lse, NULL, QKV, B, T, H, G, D);
        ref_linear_attention_forward(out, lse, state, qkv, B, T, H, G, D);
    } else {
        attention_forward(Out, Lse, QKV, window, block, B, T, H, G, D);
        ref_attention_forward(out, lse, qkv, window, block, B, T, H, G, D);
    }
    float *stored = host_array(R * C), *lse_stored = host_array(R * H), *got = host_array(R * W);       // both backwards get what CUDA stored
    device_read(stored, Out, R * C);
    device_read(lse_stored, Lse, R * H);
    double e_out = error_of(Out, out, R * C), e_lse = ratio(distance_of(lse_stored, lse, R * H), norm_of(lse, R * H) + sqrt((double)R * H));
    Out = to_device<floatX>(stored, R * C);
    if (linear) {
        linear_attention_backward(DQKV, Delta, DOut, Out, Lse, QKV, B, T, H, G, D);
        ref_linear_attention_backward(dqkv, state, dout, stored, lse_stored, qkv, B, T, H, G, D);
    } else {
        attention_backward(DQKV, Delta, DOut, Out, Lse, QKV, window, block, B, T, H, G, D);
        ref_attention_backward(dqkv, delta, dout, stored, lse_stored, qkv, window, block, B, T, H, G, D);
    }
    device_read(got, DQKV, R * W);
    double e_q = error_of_columns(got, dqkv, R, W, 0, C), e_k = error_of_columns(got, dqkv, R, W, C, C + G * D);
    double e_v = error_of_columns(got, dqkv, R, W, C + G * D, W), e_all = error_of(DQKV, dqkv, R * W);
    if (T == 1 || window == 1 || block == 1) e_q = e_k = e_all;         // one key: o is v whatever q and k are, and dq and dk are noise
    check(e_out <= LAYER_BOUND && e_lse <= 1e-5 && e_state <= LAYER_BOUND && e_q <= 2 * LAYER_BOUND && e_k <= 2 * LAYER_BOUND && e_v <= LAYER_BOUND && e_all <= LAYER_BOUND,
          "%sattention, window %zu, block %zu, B %zu, T %zu, %zu heads on %zu, of %zu, scores of size %g: out %.1e, log sums %.1e, state %.1e, dq %.1e, dk %.1e, dv %.1e",
          linear ? "linear " : "", window, block, B, T, H, G, D, size, e_out, e_lse, e_state, e_q, e_k, e_v);
    cudaCheck(cudaFree(QKV)); cudaCheck(cudaFree(DOut)); cudaCheck(cudaFree(Out)); cudaCheck(cudaFree(Lse)); cudaCheck(cudaFree(Delta));
    free(qkv); free(dout); free(out); free(lse); free(dqkv); free(delta); free(state); free(start); free(stored); free(lse_stored); free(got);
}
static void check_attention_step(size_t room, size_t t, size_t first, size_t H, size_t G, size_t D) {
    float *q = random_array(H * D, 1), *cache = random_array(room * 2 * G * D, 1), *out = host_array(H * D);
    floatX *Q = to_device<floatX>(q, H * D), *Cache = to_device<floatX>(cache, room * 2 * G * D), *Out = unwritten<floatX>(H * D);
    attention_step(Out, Q, Cache, room, t, first, H, G, D);
    ref_attention_step(out, q, cache, room, t, first, H, G, D);
    double e = error_of(Out, out, H * D);
    check(e <= LAYER_BOUND, "attention of one token, %zu .. %zu, room %zu, %zu heads on %zu, of %zu: %.1e", first, t, room, H, G, D, e);
    cudaCheck(cudaFree(Q)); cudaCheck(cudaFree(Cache));
    free(q); free(cache); free(out);
}
#endif

#ifdef HAS_SCAN
static void check_scan(size_t B, size_t T, size_t C, double lo, double hi, double size) {
    size_t n = B * T * C;
    float *ga = random_array(n, size), *gb = random_array(n, size), *s0 = random_array(B * C, 1), *ds = random_array(n, 1);
    float *s = host_array(n), *dga = host_array(n), *dgb = host_array(n), *last = host_array(B * C);
    floatX *GA = to_device<floatX>(ga, n), *GB = to_device<floatX>(gb, n), *DS = to_device<floatX>(ds, n);
    floatX *S = unwritten<floatX>(n), *DGA = unwritten<floatX>(n), *DGB = unwritten<floatX>(n);
    float *S0 = to_device<float>(s0, B * C), *State = unwritten<float>(B * C);
    workspace_reserve(2 * B * C * scan_sizes(lo, hi, B, T, C).chunks);
    ref_scan_forward(s, ga, gb, s0, lo, hi, B, T, C);
    scan_forward(S, State, GA, GB, S0, lo, hi, B, T, C);
    for (size_t b = 0; b < B; b++) memcpy(last + b * C, s + ((b + 1) * T - 1) * C, C * sizeof(float));
    float* stored = host_array(n);                  // the backward of both gets what the CUDA forward stored
    device_read(stored, S, n);
    ref_scan_backward(dga, dgb, ds, stored, ga, gb, s0, lo, hi, B, T, C);
    scan_backward(DGA, DGB, DS, S, GA, GB, S0, lo, hi, B, T, C);
    double e_s = error_of(S, s, n), e_last = error_of(State, last, B * C), e_a = error_of(DGA, dga, n), e_b = error_of(DGB, dgb, n);
    check(e_s <= LAYER_BOUND && e_last <= 1e-5 && e_a <= LAYER_BOUND && e_b <= LAYER_BOUND,
          "scan, B %zu, T %zu, C %zu, band (%g, %g), gates of size %g: s %.1e, last state %.1e, dga %.1e, dgb %.1e", B, T, C, lo, hi, size, e_s, e_last, e_a, e_b);
    cudaCheck(cudaFree(GA)); cudaCheck(cudaFree(GB)); cudaCheck(cudaFree(DS)); cudaCheck(cudaFree(S0));
    free(ga); free(gb); free(s0); free(ds); free(s); free(dga); free(dgb); free(last); free(stored);
}
#endif

#ifdef HAS_SHORT_CONV
static void check_short_conv(size_t B, size_t T, size_t C, size_t K, int bias, int carry) {
    size_t n = B * T * C, states = B * (K - 1) * C;
    float *x = random_array(n, 1), *w = random_array(C * K, 1), *b = random_array(C, 1), *window = random_array(states, 1), *dout = random_array(n, 1);
    float *out = host_array(n), *dx = host_array(n), *dw = random_array(C * K, 1), *db = random_array(C, 1);
    if (!bias) memset(b, 0, C * sizeof(float));
    floatX *X = to_device<floatX>(x, n), *DOut = to_device<floatX>(dout, n), *Out = unwritten<floatX>(n), *DX = unwritten<floatX>(n);
    float *W = to_device<float>(w, C * K), *Bias = to_device<float>(b, C), *Window = to_device<float>(window, states);
    float *DW = to_device<float>(dw, C * K), *DB = to_device<float>(db, C);
    workspace_reserve(MAX_CONV * C * split_count(B * T));
    short_conv_forward(Out, X, W, bias ? Bias : NULL, carry ? Window : NULL, B, T, C, K);
    short_conv_backward(DX, DW, DB, DOut, X, W, B, T, C, K);
    ref_short_conv_forward(out, x, w, b, carry ? window : NULL, B, T, C, K);
    ref_short_conv_backward(dx, dw, db, dout, x, w, B, T, C, K);
    double e_out = error_of(Out, out, n), e_window = error_of(Window, window, states), e_dx = error_of(DX, dx, n), e_dw = error_of(DW, dw, C * K), e_db = error_of(DB, db, C);
    check(e_out <= LAYER_BOUND && e_window == 0 && e_dx <= LAYER_BOUND && e_dw <= 1e-5 && e_db <= 1e-5, "short convolution, B %zu, T %zu, C %zu, K %zu%s%s: out %.1e, dx %.1e, dw %.1e, db %.1e",
          B, T, C, K, bias ? ", bias" : "", carry ? ", carried" : "", e_out, e_dx, e_dw, e_db);
    cudaCheck(cudaFree(X)); cudaCheck(cudaFree(DOut)); cudaCheck(cudaFree(W)); cudaCheck(cudaFree(Bias));
    free(x); free(w); free(b); free(window); free(dout); free(out); free(dx); free(dw); free(db);
}
#endif

#ifdef HAS_SELECTIVE_SCAN
// Steps of N(0, step) before softplus, decay rates e^N(rate, 1): with step 1e4, steps and decays are 0 or huge.
static void check_selective_scan(size_t B, size_t T, size_t E, size_t N, size_t L, double step, double rate, int carry) {
    size_t n = B * T * E, m = B * T * 2 * N, states = B * N * E;
    float *x = random_array(n, 1), *dt = random_array(n, step), *bc = random_array(m, 1), *a_log = random_array(E * N, 1), *b_dt = random_array(E, 1), *d = random_array(E, 1);
    float *dy = random_array(n, 1), *state = random_array(states, 1), *y = host_array(n), *dx = host_array(n), *ddt = host_array(n), *dbc = host_array(m);
    float *da_log = random_array(E * N, 1), *db_dt = random_array(E, 1), *dd = random_array(E, 1);
    for (size_t i = 0; i < E * N; i++) a_log[i] += rate;
    floatX *X = to_device<floatX>(x, n), *DT = to_device<floatX>(dt, n), *BC = to_device<floatX>(bc, m), *DY = to_device<floatX>(dy, n);
    floatX *Y = unwritten<floatX>(n), *DDT = unwritten<floatX>(n), *DBC = unwritten<floatX>(m);
    float *A = to_device<float>(a_log, E * N), *Bdt = to_device<float>(b_dt, E), *D = to_device<float>(d, E), *State = to_device<float>(state, states), *DX = unwritten<float>(n);
    float *DA = to_device<float>(da_log, E * N), *DBdt = to_device<float>(db_dt, E), *DD = to_device<float>(dd, E), *Starts = unwritten<float>(B * num_chunks(T, L) * N * E);
    workspace_reserve(selective_scan_workspace(L, B, T, E, N) + E * split_count(B * T));
    selective_scan_forward(Y, Starts, X, DT, BC, A, Bdt, D, carry ? State : NULL, L, B, T, E, N);
    selective_scan_backward(DX, DDT, DBC, DA, DBdt, DD, DY, X, DT, BC, Starts, A, Bdt, D, L, B, T, E, N);
    ref_selective_scan(y, carry ? state : NULL, dx, ddt, dbc, da_log, db_dt, dd, dy, x, dt, bc, a_log, b_dt, d, L, B, T, E, N);
    double e_y = error_of(Y, y, n), e_state = error_of(State, state, states), e_dx = error_of(DX, dx, n), e_ddt = error_of(DDT, ddt, n), e_dbc = error_of(DBC, dbc, m);
    double e_a = error_of(DA, da_log, E * N), e_b = error_of(DBdt, db_dt, E), e_d = error_of(DD, dd, E);
    check(e_y <= LAYER_BOUND && e_state <= 1e-5 && e_dx <= 1e-5 && e_ddt <= LAYER_BOUND && e_dbc <= LAYER_BOUND && e_a <= 1e-5 && e_b <= LAYER_BOUND && e_d <= 1e-5,
          "selective scan, B %zu, T %zu, E %zu, N %zu, L %zu, steps of %g, rates of e^%g%s: y %.1e, state %.1e, dx %.1e, ddt %.1e, dbc %.1e, da_log %.1e, db_dt %.1e, dd %.1e",
          B, T, E, N, L, step, rate, carry ? ", carried" : "", e_y, e_state, e_dx, e_ddt, e_dbc, e_a, e_b, e_d);
    cudaCheck(cudaFree(X)); cudaCheck(cudaFree(DT)); cudaCheck(cudaFree(BC)); cudaCheck(cudaFree(DY)); cudaCheck(cudaFree(A)); cudaCheck(cudaFree(Bdt)); cudaCheck(cudaFree(D)); cudaCheck(cudaFree(Starts));
    free(x); free(dt); free(bc); free(a_log); free(b_dt); free(d); free(dy); free(state); free(y); free(dx); free(ddt); free(dbc); free(da_log); free(db_dt); free(dd);
}
#endif

#ifdef HAS_SSD
static void check_ssd(size_t B, size_t T, size_t H, size_t P, size_t N, size_t L, double step, double rate, int carry) {
    SSD q = ssd_sizes(L, B, T, H, P, N);
    size_t R = B * T, n = R * q.E, m = R * q.W, states = B * H * N * P;
    float *act = random_array(m, 1), *dt = random_array(R * H, step), *a_log = random_array(H, 1), *b_dt = random_array(H, 1), *d = random_array(H, 1), *dy = random_array(n, 1);
    float *state = random_array(states, 1), *y = host_array(n), *dact = host_array(m), *ddt = host_array(R * H);
    float *da_log = random_array(H, 1), *db_dt = random_array(H, 1), *dd = random_array(H, 1);
    for (size_t h = 0; h < H; h++) a_log[h] += rate;
    floatX *Act = to_device<floatX>(act, m), *DT = to_device<floatX>(dt, R * H), *DY = to_device<floatX>(dy, n);
    floatX *Y = unwritten<floatX>(n), *DAct = unwritten<floatX>(m), *DDT = unwritten<floatX>(R * H), *States = unwritten<floatX>(B * q.chunks * N * q.E);
    float *A = to_device<float>(a_log, H), *Bdt = to_device<float>(b_dt, H), *D = to_device<float>(d, H), *State = to_device<float>(state, states);
    float *DA = to_device<float>(da_log, H), *DBdt = to_device<float>(db_dt, H), *DD = to_device<float>(dd, H);
    Table table = {}, exact = {};
    Layout layout = {&table, &exact, NULL, NULL, NULL, NULL};
    SSDScratch s;
    ssd_scratch(&s, &layout, q, 1);
    layout.base = unwritten<floatX>(table.total);
    layout.exact_base = unwritten<float>(exact.total);
    table.total = exact.total = table.count = exact.count = 0;
    ssd_scratch(&s, &layout, q, 1);
    workspace_reserve(ssd_workspace(q));
    ssd_forward(Y, States, &s, Act, DT, A, Bdt, D, carry ? State : NULL, q);
    ssd_backward(DAct, DDT, DA, DBdt, DD, &s, DY, States, Act, DT, A, Bdt, D, q);
    ref_ssd(y, carry ? state : NULL, dact, ddt, da_log, db_dt, dd, dy, act, dt, a_log, b_dt, d, L, B, T, H, P, N);
    double e_y = error_of(Y, y, n), e_state = error_of(State, state, states), e_dact = error_of(DAct, dact, m), e_ddt = error_of(DDT, ddt, R * H);
    // a sum over all tokens may come out small: of its terms' error, a part of their norm stays
    double terms = norm_of(ddt, R * H), e_a = error_of(DA, da_log, H) / (1 + terms / norm_of(da_log, H)), e_b = error_of(DBdt, db_dt, H) / (1 + terms / norm_of(db_dt, H));
    double e_d = error_of(DD, dd, H), bound = BF16 ? 1e-2 : 1e-5;
    check(e_y <= bound && e_state <= bound && e_dact <= bound && e_ddt <= bound && e_a <= bound && e_b <= bound && e_d <= 1e-5,
          "ssd, B %zu, T %zu, H %zu, P %zu, N %zu, L %zu, steps of %g, rates of e^%g%s: y %.1e, state %.1e, dact %.1e, ddt %.1e, da_log %.1e, db_dt %.1e, dd %.1e",
          B, T, H, P, N, L, step, rate, carry ? ", carried" : "", e_y, e_state, e_dact, e_ddt, e_a, e_b, e_d);
    cudaCheck(cudaFree(Act)); cudaCheck(cudaFree(DT)); cudaCheck(cudaFree(DY)); cudaCheck(cudaFree(States)); cudaCheck(cudaFree(A)); cudaCheck(cudaFree(Bdt)); cudaCheck(cudaFree(D));
    cudaCheck(cudaFree(layout.base)); cudaCheck(cudaFree(layout.exact_base));
    free(table.tensors); free(exact.tensors);
    free(act); free(dt); free(a_log); free(b_dt); free(d); free(dy); free(state); free(y); free(dact); free(ddt); free(da_log); free(db_dt); free(dd);
}
#endif

#ifdef HAS_LONG_CONV
static void check_long_conv(size_t B, size_t T, size_t C) {
    size_t n = B * T * C;
    float *p = random_array(n, 1), *k = random_array(T * C, 1), *d = random_array(C, 1), *dc = random_array(n, 1);
    float *c = host_array(n), *dp = host_array(n), *dk = host_array(T * C), *dd = random_array(C, 1);
    floatX *Pd = to_device<floatX>(p, n), *DC = to_device<floatX>(dc, n), *Cd = unwritten<floatX>(n), *DP = unwritten<floatX>(n);
    float *K = to_device<float>(k, T * C), *D = to_device<float>(d, C), *DK = unwritten<float>(T * C), *DD = to_device<float>(dd, C);
    workspace_reserve(long_conv_workspace(T, C) + C * split_count(B * T));
    long_conv_forward(Cd, Pd, K, D, B, T, C);
    long_conv_backward(DP, DK, DD, DC, Pd, K, D, B, T, C);
    ref_long_conv(c, dp, dk, dd, dc, p, k, d, B, T, C);
    double e_c = error_of(Cd, c, n), e_dp = error_of(DP, dp, n), e_dk = error_of(DK, dk, T * C), e_dd = error_of(DD, dd, C);
    check(e_c <= LAYER_BOUND && e_dp <= LAYER_BOUND && e_dk <= 1e-5 && e_dd <= 1e-5, "long convolution, B %zu, T %zu, C %zu: c %.1e, dp %.1e, dk %.1e, dd %.1e", B, T, C, e_c, e_dp, e_dk, e_dd);
    cudaCheck(cudaFree(Pd)); cudaCheck(cudaFree(DC)); cudaCheck(cudaFree(K)); cudaCheck(cudaFree(D));
    free(p); free(k); free(d); free(dc); free(c); free(dp); free(dk); free(dd);
}
// What the filter is made of, all float: positions, sines, the window. F is the width of the filter's layers.
static void check_filter(size_t first, size_t rows, size_t S, size_t emb, size_t F) {
    float *z = host_array(rows * emb), *x = random_array(rows * F, 3), *freq = random_array(F, 1), *d = random_array(rows * F, 1), *dfreq = random_array(F, 1);
    float *out = host_array(rows * F), *k = random_array(rows * F, 1);
    float *Z = unwritten<float>(rows * emb), *X = to_device<float>(x, rows * F), *Freq = to_device<float>(freq, F), *Out = unwritten<float>(rows * F);
    float *D = to_device<float>(d, rows * F), *DFreq = to_device<float>(dfreq, F), *K = to_device<float>(k, rows * F);
    workspace_reserve(F * split_count(rows));
    filter_positions(Z, first, rows, S, emb);
    sine_forward(Out, X, Freq, rows, F);
    sine_backward(D, DFreq, X, Freq, rows, F);
    filter_window(K, first, rows, S, F);
    ref_filter_positions(z, first, rows, S, emb);
    ref_sine_forward(out, x, freq, rows, F);
    ref_sine_backward(d, dfreq, x, freq, rows, F);
    ref_filter_window(k, first, rows, S, F);
    double e_z = error_of(Z, z, rows * emb), e_out = error_of(Out, out, rows * F), e_d = error_of(D, d, rows * F), e_f = error_of(DFreq, dfreq, F), e_k = error_of(K, k, rows * F);
    check(e_z <= 1e-5 && e_out <= 1e-5 && e_d <= 1e-5 && e_f <= 1e-5 && e_k <= 1e-5, "filter, tokens %zu.. of %zu, rows %zu, emb %zu, F %zu: positions %.1e, sine %.1e, d %.1e, dfreq %.1e, window %.1e",
          first, S, rows, emb, F, e_z, e_out, e_d, e_f, e_k);
    cudaCheck(cudaFree(X)); cudaCheck(cudaFree(Freq));
    free(z); free(x); free(freq); free(d); free(dfreq); free(out); free(k);
}
#endif

// ----------------------------------------------------------------------------------------------------------------
// the whole model

// Where the table of the CUDA program has the tensor that the .c calls `name`.
static const Tensor* find_tensor(const Model* m, const char* name) {
    for (int i = 0; i < m->table.count; i++) if (!strcmp(m->table.tensors[i].name, name)) return &m->table.tensors[i];
    return NULL;
}

// Compares all tensors of a kind with `got` (m->table.total numbers). Returns the worst error, and whose it is; against
// the distance from `before` with before != NULL. floor: no norm counts as smaller than this part of all tensors' norm.
// *together: the error of all tensors as one.
static double compare_tensors(Ref* r, const Model* m, int kind, const float* got, const float* before, double floor, int T, const char** which, double* together) {
    double all = 0, top = -1, apart = 0;
    size_t n;
    for (int i = 0; i < ref_tensors(r); i++) {
        const float* want = ref_tensor(r, kind, ref_tensor_name(r, i), &n);
        all += pow(norm_of(want, n), 2);
    }
    *which = "";
    for (int i = 0; i < ref_tensors(r); i++) {
        const char* name = ref_tensor_name(r, i);
        const float* want = ref_tensor(r, kind, name, &n);
        const Tensor* t = find_tensor(m, name);
        double norm = before ? distance_of(want, before + t->offset, n) : norm_of(want, n), least = floor * sqrt(all);
        double error = ratio(distance_of(got + t->offset, want, n), norm > least ? norm : least);
        apart += pow(distance_of(got + t->offset, want, n), 2);
        if (ref_zero_by_structure(&m->config, name, T)) {       // noise on both sides: held only against all
            if (kind == REF_PARAM) continue;
            error = distance_of(got + t->offset, want, n) <= (BF16 ? 1e-3 : 1e-6) * sqrt(all) ? 0 : NAN;
        }
        if (!(error <= top)) { top = error; *which = name; if (isnan(error)) break; }
    }
    *together = ratio(sqrt(apart), sqrt(all));
    return top;
}
// AdamW makes a full step of a gradient that is zero but for rounding. So of numbers whose largest gradient of all steps (peak)
// is that small against their tensor's (where a query sees one key only), and of tensors that small against all gradients (a
// bias of one number, whose gradient is a sum that cancels), `got` and `before` are set to what the .c has.
static void forget_noise(Ref* r, const Model* m, const float* peak, float* got, float* before) {
    double all = norm_of(peak, m->table.total);
    for (int i = 0; i < ref_tensors(r); i++) {
        size_t n;
        const float* want = ref_tensor(r, REF_PARAM, ref_tensor_name(r, i), &n);
        const Tensor* t = find_tensor(m, ref_tensor_name(r, i));
        int small = norm_of(peak + t->offset, n) < (BF16 ? 2e-3 : 1e-6) * all;
        double top = 0;
        for (size_t k = 0; k < n; k++) top = fmax(top, peak[t->offset + k]);
        for (size_t k = 0; k < n; k++) {
            double g = peak[t->offset + k];
            if (g > 0 && (small || g < (BF16 ? 1e-2 : 1e-4) * top)) got[t->offset + k] = before[t->offset + k] = want[k];
        }
    }
}
static float* read_all(const float* device, size_t n) {
    float* host = host_array(n);
    device_read(host, device, n);
    return host;
}

// No parameter is 0 or 1, and matrices leave the size of what they are multiplied with as it is: gates are not saturated.
static void set_parameters(Ref* r, Model* m) {
    float* host = host_array(m->table.total);
    for (int i = 0; i < ref_tensors(r); i++) {
        size_t n;
        const Tensor* t = find_tensor(m, ref_tensor_name(r, i));
        float *p = ref_tensor(r, REF_PARAM, t->name, &n), *x = random_array(n, t->ndim == 2 ? 1 / sqrt((double)t->shape[1]) : 0.5);
        memcpy(p, x, n * sizeof(float));
        memcpy(host + t->offset, x, n * sizeof(float));
        free(x);
    }
    device_write(m->param_memory, host, m->table.total * sizeof(float));
    model_refresh(m);
    free(host);
}
static void set_states(Ref* r, Model* m) {
    float* p;
    size_t n;
    for (int i = 0; (p = ref_state(r, 0, i, &n)) != NULL; i++) {
        float* x = random_array(n, 0.3);
        memcpy(p, x, n * sizeof(float));
        device_write(m->acts.state_memory + m->acts.states.tensors[i].offset, x, n * sizeof(float));
        free(x);
    }
}
static double compare_states(Ref* r, Model* m, int step) {
    const Acts* a = step ? &m->step : &m->acts;
    double top = 0;
    float* p;
    size_t n;
    for (int i = 0; (p = ref_state(r, step, i, &n)) != NULL; i++) {
        float* x = read_all(a->state_memory + a->states.tensors[i].offset, n);
        top = worse(distance_of(x, p, n) / norm_of(p, n), top);
        free(x);
    }
    return top;
}

static void check_model(const char* name, Config c, int B, int T) {
    char title[128];
    snprintf(title, sizeof title, "%s, B %d, T %d, C %d, V %d", name, B, T, c.channels, c.vocab);
    size_t R = (size_t)B * T, V = c.vocab, n;
    double slack = BF16 ? bf16_slack(&c) : 1;
    Model m;
    model_build(&m, &c, B, T, 1);
    Ref* r = ref_build(&c, B, T);

    // the same weights to the bit, in the same tensors
    model_init(&m, 42);
    ref_init(r, 42);
    float* params = read_all(m.param_memory, m.table.total);
    int same = ref_tensors(r) == m.table.count;
    for (int i = 0; i < m.table.count && same; i++) {
        const float* p = ref_tensor(r, REF_PARAM, m.table.tensors[i].name, &n);
        same = p && n == m.table.tensors[i].size && !memcmp(p, params + m.table.tensors[i].offset, n * sizeof(float));
    }
    check(same, "%s: initial weights are the same to the bit", title);
    if (!same) return;

    // one forward and backward, from parameters among which none is 0 or 1
    set_parameters(r, &m);
    if (ref_carries(&c)) set_states(r, &m);
    int *tokens = random_tokens(R, c.vocab, 0), *targets = random_tokens(R, c.vocab, R > 4);
    double want = ref_forward(r, tokens, targets, 1), loss = model_forward(&m, tokens, targets, 1);
    float *logits = host_array(R * V), *ref = host_array(R * V);
    model_logits(&m, 0, R, logits);
    ref_logits(r, 0, R, ref);
    double e_loss = ratio(fabs(loss - want), want), e_logits = distance_of(logits, ref, R * V) / norm_of(ref, R * V);
    double e_state = ref_carries(&c) ? compare_states(r, &m, 0) : 0;
    size_t counted, correct;
    ref_counts(r, &counted, &correct);
    check(e_loss <= LOSS_BOUND * slack && e_logits <= LOGIT_BOUND * slack && e_state <= LOGIT_BOUND * slack && m.counted == counted && (BF16 || m.correct == correct),
          "%s: loss %.1e, logits %.1e, carried state %.1e, %zu of %zu right", title, e_loss, e_logits, e_state, m.correct, correct);
    model_backward(&m);
    ref_backward(r);
    const char* which;
    float* grads = read_all(m.grad_memory, m.table.total);
    double together, e_grad = compare_tensors(r, &m, REF_GRAD, grads, NULL, 1e-3, T, &which, &together);
    check(e_grad <= GRAD_BOUND * slack && together <= ALL_BOUND * slack, "%s: gradients %.1e, worst %.1e (%s)", title, together, e_grad, which);
    add_to_hash(&loss, sizeof loss);
    add_to_hash(logits, R * V * sizeof(float));
    add_to_hash(grads, m.table.total * sizeof(float));

    // loss only: no gradient changes by a bit
    model_forward(&m, tokens, targets, 0);
    ref_forward(r, tokens, targets, 0);
    float* after = read_all(m.grad_memory, m.table.total);
    if (memcmp(after, grads, m.table.total * sizeof(float))) check(0, "%s: a forward pass without training changed a gradient", title);
    free(after);

    // five AdamW steps, the first with the gradient that is there
    float *before = read_all(m.param_memory, m.table.total), *peak = host_array(m.table.total);
    for (int k = 0; k < 5; k++) {
        if (k > 0) {
            model_zero_grad(&m);
            ref_zero_grad(r);
            for (size_t i = 0; i < R; i++) tokens[i] = (tokens[i] + k) % c.vocab;
            model_forward(&m, tokens, targets, 1);
            ref_forward(r, tokens, targets, 1);
            model_backward(&m);
            ref_backward(r);
        }
        float* g = k > 0 ? read_all(m.grad_memory, m.table.total) : grads;
        for (int i = 0; i < ref_tensors(r); i++) {
            const float* want = ref_tensor(r, REF_GRAD, ref_tensor_name(r, i), &n);
            size_t at = find_tensor(&m, ref_tensor_name(r, i))->offset;
            for (size_t j = 0; j < n; j++) peak[at + j] = fmaxf(peak[at + j], fmaxf(fabsf(g[at + j]), fabsf(want[j])));
        }
        if (k > 0) free(g);
        double norm = model_update(&m, 0.001, 0.1, 1), ref_norm = ref_update(r, 0.001, 0.1, 1);
        if (!(fabs(norm - ref_norm) <= GRAD_BOUND * slack * ref_norm)) check(0, "%s: step %d, gradient norm %g instead of %g", title, k + 1, norm, ref_norm);
    }
    free(params);
    params = read_all(m.param_memory, m.table.total);
    const char* which_update;
    forget_noise(r, &m, peak, params, before);
    double e_param = compare_tensors(r, &m, REF_PARAM, params, NULL, 1e-3, T, &which, &together), e_update = compare_tensors(r, &m, REF_PARAM, params, before, 0, T, &which_update, &together);
    check(e_param <= PARAM_BOUND && e_update <= UPDATE_BOUND, "%s: after 5 AdamW steps %.1e (%s), of the way moved %.1e (%s)", title, e_param, which, e_update, which_update);
    add_to_hash(params, m.table.total * sizeof(float));

    // token by token, from the parameters where the steps ended: the .c's, so that the two do not drift apart
    for (int i = 0; i < ref_tensors(r); i++) {
        const float* p = ref_tensor(r, REF_PARAM, ref_tensor_name(r, i), &n);
        memcpy(params + find_tensor(&m, ref_tensor_name(r, i))->offset, p, n * sizeof(float));
    }
    device_write(m.param_memory, params, m.table.total * sizeof(float));
    model_refresh(&m);
    model_reset(&m.step, NULL);
    double apart = 0, size = 0;
    for (int t = 0; t < T && t < 5; t++) {
        const float *a = model_step(&m, tokens[t]), *b = ref_step(r, tokens[t]);
        apart += pow(distance_of(a, b, V), 2);
        size += pow(norm_of(b, V), 2);
        add_to_hash(a, V * sizeof(float));
    }
    double e_step = ratio(sqrt(apart), sqrt(size));
    double e_step_state = compare_states(r, &m, 1);
    check(e_step <= LOGIT_BOUND * slack && e_step_state <= LOGIT_BOUND * slack, "%s: one-token steps %.1e, their state %.1e", title, e_step, e_step_state);
    free(tokens); free(targets); free(logits); free(ref); free(params); free(grads); free(before); free(peak);
    model_free(&m);
    ref_free(r);
}

int main(int argc, char** argv) {
    int quick = argc > 1 && !strcmp(argv[1], "--quick");
    setvbuf(stdout, NULL, _IOLBF, 0);
    device_start();
    printf("%s, %s\n", MODEL_NAME, BF16 ? "bf16" : "fp32");
    if (!check(ref_config_size() == sizeof(Config), "Config has one layout in both files")) return check_report();

    check_embedding(1, 1, 1, 1);
    check_embedding(37, 5, 5, 2.5f);
    check_embedding(70, 300, 24, 1);
    check_embedding(1000, 3, 8, 1);
    check_linear(1, 1, 1, 1, 0, 0, 1);
    check_linear(3, 5, 7, 5, 0, 0, 0);
    check_linear(130, 16, 40, 32, 16, 1, 0);
    check_linear(67, 33, 9, 66, 33, 1, 1);
    check_linear(700, 8, 64, 8, 0, 0, 1);
    check_head(1, 1, 1, 0, 1);
    check_head(5, 7, 11, 1, 1);
    check_head(70, 16, 64, 1, 1);
    check_head(9, 24, 1037, 0, 0);
    check_head(9, 24, 5003, 1, 1);
    check_head(6, 5, 65, 2, 1);
    if (!quick) check_head(HEAD_ROWS + 5, 8, 3, 1, 1);
#ifdef HAS_SILU
    check_silu(3, 5);
    check_silu(67, 24);
    check_silu(1, 1);
#endif
#ifdef HAS_LAYERNORM
    check_layernorm<floatX, floatX>(1, 5, 1, 0);
    check_layernorm<floatX, floatX>(67, 33, 0, 0);
    check_layernorm<floatX, floatX>(130, 264, 1, 0);
    check_layernorm<float, floatX>(9, 40, 0, 1);
    check_layernorm<float, float>(70, 65, 1, 1);
    check_layernorm<float, float>(3, 8, 1, 0);
    check_layernorm<float, float>(5, 1, 1, 1);
#endif
#ifdef HAS_RMSNORM
    check_rmsnorm<floatX, floatX>(1, 5, 0);
    check_rmsnorm<floatX, floatX>(130, 264, 0);
    check_rmsnorm<float, floatX>(9, 40, 1);
    check_rmsnorm<float, float>(70, 65, 1);
    check_rmsnorm<float, float>(3, 8, 0);
    check_rmsnorm<float, float>(5, 1, 1);
#endif
#ifdef HAS_GELU
    check_gelu(3, 5);
    check_gelu(67, 24);
#endif
#ifdef HAS_SWIGLU
    check_swiglu(3, 5);
    check_swiglu(67, 24);
#endif
#ifdef HAS_POSITIONS
    check_positions(0, 3, 7, 5);
    check_positions(4, 1, 1, 24);
#endif
#ifdef HAS_ATTENTION
    check_rope(0, 1, 1, 1, 1, 2);
    check_rope(0, 2, 17, 4, 2, 6);
    check_rope(65536, 1, 33, 2, 1, 64);
    static const int ATTENTIONS[][7] = {                // linear, B, T, H, G, D; quick
        {0, 1, 1, 1, 1, 1, 1}, {0, 2, 2, 2, 2, 5, 0}, {0, 1, 31, 3, 1, 33, 1}, {0, 2, 32, 4, 2, 8, 0}, {0, 1, 33, 2, 2, 64, 1}, {0, 1, 65, 6, 2, 7, 1},
        {0, 1, 97, 2, 1, 60, 0}, {0, 1, 67, 2, 2, 65, 0}, {0, 2, 40, 1, 1, 128, 1}, {0, 1, 37, 2, 1, 97, 0},
        {1, 1, 1, 1, 1, 1, 1}, {1, 2, 2, 2, 2, 5, 0}, {1, 1, 31, 3, 1, 33, 1}, {1, 2, 63, 4, 2, 8, 0}, {1, 1, 64, 2, 2, 64, 1}, {1, 1, 65, 6, 2, 7, 1},
        {1, 1, 131, 2, 1, 60, 0}, {1, 1, 97, 2, 2, 65, 0}, {1, 2, 70, 1, 1, 128, 1}, {1, 1, 257, 2, 1, 16, 0},
    };
    for (size_t i = 0; i < sizeof ATTENTIONS / sizeof ATTENTIONS[0]; i++) {
        const int* a = ATTENTIONS[i];
        if (!quick || a[6]) check_attention(a[0], 0, 0, a[1], a[2], a[3], a[4], a[5], 1);
    }
    check_attention(0, 1, 0, 2, 40, 2, 1, 6, 1);        // a query sees itself
    check_attention(0, 0, 1, 2, 40, 2, 1, 6, 1);
    check_attention(0, 33, 0, 1, 130, 2, 1, 12, 1);
    check_attention(0, 0, 50, 1, 130, 2, 2, 12, 1);
    check_attention(0, 1000, 1000, 1, 70, 2, 2, 12, 1); // a limit longer than the text is none
    check_attention(0, 70, 41, 1, 130, 4, 2, 9, 1);
    check_attention(0, 0, 0, 1, 70, 2, 2, 12, 60);      // one key takes all
    check_attention_step(1, 0, 0, 1, 1, 1);
    check_attention_step(64, 37, 0, 3, 1, 33);
    check_attention_step(8, 13, 6, 4, 2, 60);           // a ring
    check_attention_step(512, 300, 0, 2, 2, 128);
#endif
#ifdef HAS_SCAN
    size_t lengths[] = {1, 2, 31, 32, 33, 64, 65, 97};
    for (int i = 0; i < 8; i++) check_scan(1 + i % 3, lengths[i], 1 + 5 * i, 0.9, 0.975, 1);
    check_scan(1, 7, 130, 0.55, 0.88, 1);
    check_scan(2, 1000, 3, 0.992, 0.999, 1);
    check_scan(1, 300, 5, 0, 1, 3);
    check_scan(1, 100, 5, 0, 1, 1e4);               // A is 0 or 1: products underflow
    if (!quick) check_scan(1, 16384 + 77, 2, 0.992, 0.999, 1);         // chunks longer than the least
#endif
#ifdef HAS_SHORT_CONV
    check_short_conv(1, 1, 1, 4, 1, 0);
    check_short_conv(2, 1, 8, 4, 1, 1);
    check_short_conv(3, 2, 5, 4, 0, 1);
    check_short_conv(2, 37, 40, 3, 1, 0);
    check_short_conv(1, 131, 33, 4, 0, 0);
    check_short_conv(2, 70, 16, MAX_CONV, 1, 1);
#endif
#ifdef HAS_SELECTIVE_SCAN
    check_selective_scan(1, 1, 1, 1, 1, 1, 0, 0);
    check_selective_scan(2, 1, 5, 16, 1, 1, 0, 1);
    check_selective_scan(1, 2, 17, 3, 2, 1, 0, 0);
    check_selective_scan(2, 37, 10, 16, 8, 1, 0, 1);            // chunks that end inside a tile, a last one of 5
    check_selective_scan(1, 33, 34, 17, 32, 1, 0, 0);           // more than STATES numbers
    check_selective_scan(1, 100, 6, 5, 40, 1, 0, 0);
    check_selective_scan(1, 50, 4, 2, 50, 1, 3, 1);
    check_selective_scan(1, 65, 16 * PARTS + 3, 2, 64, 1, 0, 0);        // parts with more than CHANNELS
    check_selective_scan(1, 50, 5, 3, 16, 1e4, 0, 1);           // steps of 0 and of 1e4
    check_selective_scan(1, 50, 5, 3, 16, 1, 20, 1);            // decays of 0
    check_selective_scan(1, 50, 5, 3, 16, 1, -20, 1);           // decays of 1
    if (!quick) check_selective_scan(1, 300, 3, 40, 64, 1, 0, 0);
#endif
#ifdef HAS_SSD
    check_ssd(1, 1, 1, 1, 1, 1, 1, 0, 0);
    check_ssd(2, 1, 2, 3, 5, 1, 1, 0, 1);
    check_ssd(2, 37, 3, 4, 5, 8, 1, 0, 1);
    check_ssd(1, 65, 1, 10, 3, 64, 1, 0, 0);
    check_ssd(1, 63, 2, 33, 7, 64, 1, -1, 1);
    check_ssd(1, 100, 2, 8, 16, 40, 1, 0, 0);
    check_ssd(1, 50, 2, 3, 4, 16, 1e4, 0, 1);                   // steps of 0 and of 1e4
    check_ssd(1, 50, 2, 3, 4, 16, 1, 20, 1);                    // decays of 0
    check_ssd(1, 50, 2, 3, 4, 16, 1, -20, 1);                   // decays of 1
    if (!quick) check_ssd(2, 130, 2, 64, 128, 64, 1, 0, 0);
#endif
#ifdef HAS_LONG_CONV
    size_t times[] = {1, 2, 3, 31, 32, 33, 64, 127};
    for (int i = 0; i < 8; i++) check_long_conv(1 + i % 3, times[i], 1 + 9 * i);
    check_filter(0, 1, 1, 3, 1);
    check_filter(0, 37, 64, 33, 5);
    check_filter(1000, 3, 1024, 5, 64);
    check_filter(0, 70, 70, 33, 64);
#endif

    // every flag at a small odd size; then many sizes, each with some of the flags, and all flags in turn
    Config c;
    const char* name;
    int cases = 0;
    for (; (name = ref_case(cases, &c)) != NULL; cases++)
        if (!quick || cases % 3 == 0) check_model(name, c, 1 + cases % 3, quick ? 5 : 7 + 13 * (cases % 4));
    static const int SIZES_TRIED[][4] = {               // B, T, C, V
        {1, 1, 5, 11}, {3, 2, 8, 64}, {1, 31, 16, 65}, {2, 32, 7, 13}, {1, 33, 24, 50}, {1, 64, 8, 3}, {2, 65, 40, 129}, {5, 13, 3, 2}, {1, 1, 64, 1000},
    };
    int sizes = sizeof SIZES_TRIED / sizeof SIZES_TRIED[0];
    for (int i = 0; i < sizes; i++) {
        const int* s = SIZES_TRIED[i];
        if (quick && i % 4 != 0) continue;
        for (int k = i % 5; k < cases; k += 5) {
            name = ref_case(k, &c);
            ref_config_at(&c, BF16 && s[3] < 8 ? 8 : s[3], s[2]);       // (over two logits, roundings do not average)
            check_model(name, c, s[0], s[1]);
        }
    }
#ifdef HAS_SSD
    check_ssd(1, 50, 2, 3, 4, 16, 1, 85, 1);                    // rates by which e^-87, where fast_exp ends, would be multiplied
#endif
    printf("bits: %016llx\n", (unsigned long long)hash);
    return check_report();
}
