// bench.c: where a training step's time goes, against what this machine can do. First two peaks are measured, in the same
// run: multiply-adds in registers, and copying memory, both on all cores. A layer that does F floating point operations and
// moves at least M bytes cannot be faster than max(F / peak, M / bandwidth); its row says how near it comes to that.
// M counts every array once, as if the caches were perfect between calls and useless across them. F counts what the
// equations ask for, a polynomial e^x as 24, and not what a backward pass computes again to save memory.
//
//     bench [--preset NAME] [--model ...] [--batch 16] [--quick] [--check]
//
// It takes train_X's flags for the model and the batch; without --preset or --model, X's first preset. --quick: an eighth of the tokens.
// --check: exit code 1 where a target is missed; otherwise the lines only say so.
#include "model.h"

static double peak = 0, bandwidth = 0;          // FLOP/s, bytes/s
static int repeats = 3, missed = 0;

// ----------------------------------------------------------------------------------------------------------------
// what the machine can do

static volatile real one = 1, tiny = 1e-9;

// Multiply-adds on 16 vectors that never leave the registers, on every core: the rate in FLOP/s.
static double measure_peak(void) {
    enum { CHAINS = 16, ROUNDS = 1 << 22 };
    double best = 0;
    for (int repeat = 0; repeat < 5; repeat++) {
        int threads = 0;
        double start = now();
        #pragma omp parallel reduction(+ : threads)
        {
            vector x[CHAINS], a = one + (vector){0}, b = tiny + (vector){0};
            for (int i = 0; i < CHAINS; i++) x[i] = b * (real)i;
            for (int k = 0; k < ROUNDS; k++)
                for (int i = 0; i < CHAINS; i++) x[i] = x[i] * a + b;
            real sum = 0;
            for (int i = 0; i < CHAINS; i++) sum += x[i][0];
            if (sum == 12345) one = sum;        // so that the loop is not removed
            threads++;
        }
        double flops = 2.0 * threads * CHAINS * ROUNDS * (VECTOR_BYTES / sizeof(real));
        best = fmax(best, flops / (now() - start));
    }
    return best;
}

// A plain copy of 64 MB on every core: bytes read and written a second.
static double measure_bandwidth(void) {
    const size_t n = 16 << 20;
    real *a = (real*)allocate(n * sizeof(real), "the copy"), *b = (real*)allocate(n * sizeof(real), "the copy");
    double best = 0;
    for (int repeat = 0; repeat < 8; repeat++) {
        double start = now();
        #pragma omp parallel for
        for (size_t i = 0; i < n; i++) b[i] = a[i];
        best = fmax(best, 2.0 * n * sizeof(real) / (now() - start));
    }
    free(a);
    free(b);
    return best;
}

// ----------------------------------------------------------------------------------------------------------------
// one row per layer

static double step_sum = 0;                     // seconds of a step that the rows so far account for
static double bound_sum[2] = {0, 0};            // and what their bounds add up to: by FMA peak, by bandwidth
static struct { char name[64]; double seconds; } rows_seen[64];
static int row_count = 0;

// Prints a row: seconds per call, FLOP and bytes per call, calls in one training step. Returns the share of the bound.
static double row(double seconds, double flops, double bytes, int calls, const char* name) {
    double bound = fmax(flops / peak, bytes / bandwidth), share = bound / seconds;
    printf("  %-38s %9.3f ms %8.1f GFLOP/s %7.1f GB/s  %4.0f%% of %s\n", name, 1e3 * seconds, flops / seconds / 1e9, bytes / seconds / 1e9,
           100 * share, flops / peak > bytes / bandwidth ? "FMA peak" : "bandwidth");
    fflush(stdout);
    if (calls > 0) {
        step_sum += calls * seconds;
        bound_sum[flops / peak <= bytes / bandwidth] += calls * bound;
        snprintf(rows_seen[row_count].name, sizeof rows_seen[0].name, "%s x %d", name, calls);
        rows_seen[row_count++].seconds = calls * seconds;
    }
    return share;
}

// The fastest of a few runs of `code`, in seconds.
#define TIME(code) ({ double best_ = INFINITY; for (int k_ = 0; k_ <= repeats; k_++) { double start_ = now(); code; if (k_) best_ = fmin(best_, now() - start_); } best_; })

static void target(double value, double wanted, const char* what) {
    printf("  %s  %s: %.0f%%, target %.0f%%\n", value >= wanted ? "PASS" : "FAIL", what, 100 * value, 100 * wanted);
    missed += !(value >= wanted);
}

static real* filled(size_t n) {
    uint64_t rng = n;
    real* x = (real*)allocate(n * sizeof(real), "the benchmark");
    for (size_t i = 0; i < n; i++) x[i] = rng_uniform(&rng) - 0.5;
    return x;
}

static double worst_matmul = INFINITY, worst_small = INFINITY;
enum { EXP = 24 };                              // multiply-adds and the like of one fast_exp, as FLOPs

// The three products of a linear layer. calls: how often a training step runs it; -1 where it is inside another row;
// 0 for a size that no step needs. Layers with less than 128 inputs or outputs count as small ones.
static void bench_linear(size_t R, size_t IC, size_t OC, int calls) {
    real *x = filled(R * IC), *y = filled(R * OC), *w = filled(IC * OC);
    double flops = 2.0 * R * IC * OC, bytes = sizeof(real) * (double)(R * IC + R * OC + IC * OC), share[3];
    char name[64];
    snprintf(name, sizeof name, "linear %zu x %zu -> %zu, y = x wT", R, IC, OC);
    share[0] = row(TIME(linear_forward(y, x, w, NULL, R, IC, OC, IC, 0)), flops, bytes, calls, name);
    snprintf(name, sizeof name, "linear %zu x %zu -> %zu, dx = dy w", R, IC, OC);
    share[1] = row(TIME(linear_backward(x, NULL, NULL, y, x, w, R, IC, OC, IC)), flops, bytes + sizeof(real) * R * IC, calls, name);
    snprintf(name, sizeof name, "linear %zu x %zu -> %zu, dw = dyT x", R, IC, OC);
    share[2] = row(TIME(linear_backward(NULL, w, NULL, y, x, w, R, IC, OC, IC)), flops, bytes + sizeof(real) * IC * OC, calls, name);
    for (int k = 0; k < 3; k++) {
        if (calls && IC >= 128 && OC >= 128) worst_matmul = fmin(worst_matmul, share[k]);
        else worst_small = fmin(worst_small, share[k]);
    }
    free(x); free(y); free(w);
}

static void bench_sum_rows(size_t R, size_t C, int calls) {
    real *x = filled(R * C), *b = filled(C);
    char name[64];
    snprintf(name, sizeof name, "bias gradient %zu x %zu", R, C);
    row(TIME(sum_rows(b, x, R, C)), (double)R * C, sizeof(real) * (double)R * C, calls, name);
    free(x); free(b);
}

// An activation function: `forward` and `backward` are silu_forward and silu_backward, or their like; FLOPs a number.
typedef void pointwise(real* out, const real* x, size_t rows, size_t C);
static void bench_pointwise(const char* what, pointwise* forward, pointwise* backward, double forward_flops, double backward_flops,
                            size_t R, size_t C, int forwards, int backwards) {
    real *x = filled(R * C), *y = filled(R * C);
    char name[64];
    double n = (double)R * C;
    snprintf(name, sizeof name, "%s forward %zu x %zu", what, R, C);
    row(TIME(forward(y, x, R, C)), forward_flops * n, 2 * sizeof(real) * n, forwards, name);
    snprintf(name, sizeof name, "%s backward %zu x %zu", what, R, C);
    row(TIME(backward(y, x, R, C)), backward_flops * n, 3 * sizeof(real) * n, backwards, name);
    free(x); free(y);
}

#ifdef HAS_LAYERNORM
static void bench_layernorm(size_t R, size_t C, int weights, int calls) {
    real *x = filled(R * C), *y = filled(R * C), *dx = filled(R * C), *w = weights ? filled(C) : NULL, *b = weights ? filled(C) : NULL, *mean = filled(R), *rstd = filled(R);
    char name[64];
    double n = (double)R * C;
    snprintf(name, sizeof name, "layernorm forward %zu x %zu%s", R, C, weights ? ", weights" : "");
    row(TIME(layernorm_forward(y, mean, rstd, x, w, b, R, C)), 8 * n, 2 * sizeof(real) * n, calls, name);
    snprintf(name, sizeof name, "layernorm backward %zu x %zu%s", R, C, weights ? ", weights" : "");
    row(TIME(layernorm_backward(dx, w, b, y, x, mean, rstd, w, R, C)), (weights ? 18 : 11) * n, 4 * sizeof(real) * n, calls, name);
    free(x); free(y); free(dx); free(w); free(b); free(mean); free(rstd);
}
#endif

#ifdef HAS_SCAN
static double worst_scan = INFINITY;
static void bench_scan(size_t B, size_t T, size_t C, int calls) {
    size_t n = B * T * C;
    real *ga = filled(n), *gb = filled(n), *s = filled(n), *dga = filled(n), *dgb = filled(n), *s0 = filled(B * C);
    char name[64];
    snprintf(name, sizeof name, "scan forward (%zu,%zu,%zu)", B, T, C);
    double seconds = TIME(scan_forward(s, ga, gb, s0, 0.9, 0.975, B, T, C));
    row(seconds, 55.0 * n, 3 * sizeof(real) * (double)n, calls, name);
    worst_scan = fmin(worst_scan, 3 * sizeof(real) * n / seconds / bandwidth);
    snprintf(name, sizeof name, "scan backward (%zu,%zu,%zu)", B, T, C);
    seconds = TIME(scan_backward(dga, dgb, s, s, ga, gb, s0, 0.9, 0.975, B, T, C));
    row(seconds, 65.0 * n, 6 * sizeof(real) * (double)n, calls, name);
    worst_scan = fmin(worst_scan, 6 * sizeof(real) * n / seconds / bandwidth);
    free(ga); free(gb); free(s); free(dga); free(dgb); free(s0);
}
#endif

#ifdef HAS_RMSNORM
static void bench_rmsnorm(size_t R, size_t C, int calls) {
    real *x = filled(R * C), *y = filled(R * C), *dx = filled(R * C), *w = filled(C), *dw = filled(C), *rstd = filled(R);
    char name[64];
    double n = (double)R * C;
    snprintf(name, sizeof name, "rmsnorm forward %zu x %zu", R, C);
    row(TIME(rmsnorm_forward(y, rstd, x, w, R, C)), 4 * n, 2 * sizeof(real) * n, calls, name);
    snprintf(name, sizeof name, "rmsnorm backward %zu x %zu", R, C);
    row(TIME(rmsnorm_backward(dx, dw, y, x, rstd, w, R, C)), 12 * n, 4 * sizeof(real) * n, calls, name);
    free(x); free(y); free(dx); free(w); free(dw); free(rstd);
}
#endif

#ifdef HAS_SWIGLU
static void bench_swiglu(size_t R, size_t C, int forwards, int backwards) {
    real *z = filled(R * C), *up = filled(R * C), *y = filled(R * C), *dup = filled(R * C);
    char name[64];
    double n = (double)R * C;
    snprintf(name, sizeof name, "swiglu forward %zu x %zu", R, C);
    row(TIME(swiglu_forward(y, z, up, R, C)), (EXP + 4) * n, 3 * sizeof(real) * n, forwards, name);
    snprintf(name, sizeof name, "swiglu backward %zu x %zu", R, C);
    row(TIME(swiglu_backward(y, dup, z, up, R, C)), (EXP + 10) * n, 5 * sizeof(real) * n, backwards, name);
    free(z); free(up); free(y); free(dup);
}
#endif

#ifdef HAS_ATTENTION
// Attention on heads of D numbers, with RoPE's turning around it.
static void bench_attention(const Config* c, size_t B, size_t T, int calls) {
    size_t C = c->channels, H = c->heads, G = c->kv_heads, D = C / H, W = C + 2 * G * D, R = B * T;
    real *qkv = filled(R * W), *dqkv = filled(R * W), *out = filled(R * C), *dout = filled(R * C), *lse = filled(R * H), *delta = filled(R * H), *table = filled(T * D);
    double pairs = 0, moved = sizeof(real) * (double)R * (W + C);       // (query, key) pairs that are seen, over all rows and heads
    for (size_t t = 0; t < T; t++) pairs += (double)B * H * (t + 1 - first_key(t, c->window, c->block));
    row(TIME(rope(qkv, table, 1, B, T, W, H + G, D)), 3.0 * R * (C + G * D), 2 * sizeof(real) * (double)R * (C + G * D), c->pos == ROPE ? 2 * calls : 0, "rope");
    if (c->attention == LINEAR) {
        real* state = filled(B * G * (D + 1) * D);
        row(TIME(linear_attention_forward(out, lse, state, qkv, B, T, H, G, D)), 2.0 * R * D * D * (G + H), moved, calls, "linear attention forward");
        row(TIME(linear_attention_backward(dqkv, state, dout, out, lse, qkv, B, T, H, G, D)), 2.0 * R * D * D * (3 * G + 2 * H), 2 * moved, calls, "linear attention backward");
        free(state);
    } else {
        row(TIME(attention_forward(out, lse, qkv, c->window, c->block, B, T, H, G, D)), pairs * (4 * D + EXP + 2), moved, calls, "attention forward");
        row(TIME(attention_backward(dqkv, delta, dout, out, lse, qkv, c->window, c->block, B, T, H, G, D)), pairs * (10 * D + EXP + 4), 2 * moved, calls, "attention backward");
    }
    free(qkv); free(dqkv); free(out); free(dout); free(lse); free(delta); free(table);
}
#endif

#ifdef HAS_SHORT_CONV
static void bench_short_conv(size_t B, size_t T, size_t C, size_t K, int calls) {
    size_t R = B * T;
    real *x = filled(R * C), *y = filled(R * C), *dx = filled(R * C), *w = filled(C * K), *dw = filled(C * K), *b = filled(C);
    char name[64];
    snprintf(name, sizeof name, "conv of %zu forward %zu x %zu", K, R, C);
    row(TIME(short_conv_forward(y, x, w, b, NULL, B, T, C, K)), 2.0 * R * C * K, 2 * sizeof(real) * (double)R * C, calls, name);
    snprintf(name, sizeof name, "conv of %zu backward %zu x %zu", K, R, C);
    row(TIME(short_conv_backward(dx, dw, b, y, x, w, B, T, C, K)), 4.0 * R * C * K, 3 * sizeof(real) * (double)R * C, calls, name);
    free(x); free(y); free(dx); free(w); free(dw); free(b);
}
#endif

#ifdef HAS_SELECTIVE_SCAN
static void bench_selective_scan(size_t L, size_t B, size_t T, size_t E, size_t N, int calls) {
    size_t R = B * T;
    real *x = filled(R * E), *y = filled(R * E), *dt = filled(R * E), *dx = filled(R * E), *ddt = filled(R * E), *bc = filled(R * 2 * N), *dbc = filled(R * 2 * N);
    real *a_log = filled(E * N), *da_log = filled(E * N), *b_dt = filled(E), *d = filled(E), *starts = filled(B * num_chunks(T, L) * N * E), *work = filled(scan_work(L, B, E, N));
    double n = (double)R * E, token = sizeof(real) * (3 * n + 2.0 * R * N);
    row(TIME(selective_scan_forward(y, starts, x, dt, bc, a_log, b_dt, d, NULL, L, B, T, E, N)), n * (N * (EXP + 6.0) + 2 * EXP), token, calls, "selective scan forward");
    row(TIME(selective_scan_backward(dx, ddt, dbc, da_log, b_dt, d, y, x, dt, bc, starts, a_log, b_dt, d, work, L, B, T, E, N)),
        n * (N * (EXP + 20.0) + 3 * EXP), token + sizeof(real) * (2 * n + 2.0 * R * N), calls, "selective scan backward");
    free(x); free(y); free(dt); free(dx); free(ddt); free(bc); free(dbc); free(a_log); free(da_log); free(b_dt); free(d); free(starts); free(work);
}
#endif

#ifdef HAS_SSD
static void bench_ssd(size_t L, size_t B, size_t T, size_t H, size_t P, size_t N, int calls) {
    size_t R = B * T, E = H * P, W = E + 2 * N;
    real *xbc = filled(R * W), *dxbc = filled(R * W), *y = filled(R * E), *dt = filled(R * H), *ddt = filled(R * H), *a_log = filled(H), *b_dt = filled(H), *d = filled(H);
    real *states = filled(B * (num_chunks(T, L) + 1) * N * E), *work = filled(ssd_work(L, B, T, H, P, N));
    // products inside a chunk see half of the L tokens, on average
    double inside = (double)R * L, state = 2.0 * R * N * E, token = sizeof(real) * (double)R * (W + E), kept = sizeof(real) * (double)R / L * N * E;
    row(TIME(ssd_forward(y, states, xbc, dt, a_log, b_dt, d, NULL, L, B, T, H, P, N)), inside * (N + E) + 2 * state, token + kept, calls, "ssd forward");
    row(TIME(ssd_backward(dxbc, ddt, a_log, b_dt, d, y, states, xbc, dt, a_log, b_dt, d, work, L, B, T, H, P, N)), inside * (3 * N + 2 * E) + 4 * state,
        2 * token + 2 * kept, calls, "ssd backward");
    free(xbc); free(dxbc); free(y); free(dt); free(ddt); free(a_log); free(b_dt); free(d); free(states); free(work);
}
#endif

#ifdef HAS_LONG_CONV
// A complex transform of N numbers is counted as the usual 5 N log2 N; it serves two channels.
static void bench_long_conv(size_t B, size_t T, size_t C, int calls) {
    size_t R = B * T, N = fft_length(T);
    real *p = filled(R * C), *y = filled(R * C), *dp = filled(R * C), *k = filled(T * C), *dk = filled(T * C), *d = filled(C), *tw = filled(2 * N);
    double transform = 5.0 * N * log2(N) * C / 2, product = 8.0 * N * C / 2, n = sizeof(real) * (double)R * C, filter = sizeof(real) * (double)T * C;
    fft_twiddles(tw, N);
    row(TIME(long_conv_forward(y, p, k, d, tw, N, B, T, C)), (2 * B + 1) * transform + B * product, 2 * n + filter, calls, "long convolution forward");
    row(TIME(long_conv_backward(dp, dk, d, y, p, k, d, tw, N, B, T, C)), (3 * B + 2) * transform + 2 * B * product, 3 * n + 2 * filter, calls, "long convolution backward");
    free(p); free(y); free(dp); free(k); free(dk); free(d); free(tw);
}
#endif

static void bench_embedding(size_t R, size_t V, size_t C, int calls) {
    real *x = filled(R * C), *w = filled(V * C);
    int* ids = (int*)allocate(R * sizeof(int), "the benchmark");
    uint64_t rng = 1;
    draw_tokens(ids, R, V, &rng);
    double n = (double)R * C;
    row(TIME(embedding_forward(x, ids, w, 1, R, C)), n, 2 * sizeof(real) * n, calls, "embedding forward");
    row(TIME(embedding_backward(w, ids, x, 1, R, C)), 2 * n, 3 * sizeof(real) * n, calls, "embedding backward");
    free(x); free(w); free(ids);
}

static void bench_head(size_t R, size_t C, size_t V, int calls) {
    real *y = filled(R * C), *dy = filled(R * C), *w = filled(V * C), *dw = filled(V * C), *logits = filled(smin(R, HEAD_ROWS) * V);
    int* ids = (int*)allocate(R * sizeof(int), "the benchmark");
    size_t counted, correct;
    uint64_t rng = 1;
    draw_tokens(ids, R, V, &rng);
    char name[64];
    snprintf(name, sizeof name, "head and loss %zu x %zu -> %zu", R, C, V);
    int kept = repeats;
    repeats = 1;
    row(TIME(head_loss(dy, dw, y, w, ids, logits, 1, R, C, V, &counted, &correct)), 6.0 * R * C * V, sizeof(real) * (2.0 * R * C + 3.0 * V * C), calls, name);
    repeats = kept;
    free(y); free(dy); free(w); free(dw); free(logits); free(ids);
}

int main(int argc, char** argv) {
    const char* flags[64];
    int check_targets = 0, quick = 0, count = 1, chosen = 0;
    flags[0] = argv[0];
    for (int i = 1; i < argc && count < 60; i++) {
        if (!strcmp(argv[i], "--quick")) quick = 1;
        else if (!strcmp(argv[i], "--check")) check_targets = 1;
        else { chosen |= !strcmp(argv[i], "--preset") || !strcmp(argv[i], "--model"); flags[count++] = argv[i]; }
    }
    if (!chosen) { flags[count++] = "--preset"; flags[count++] = presets[0].name; }
    options_parse(option_table, sizeof option_table / sizeof *option_table, presets, sizeof presets / sizeof *presets, count, (char**)flags);
    config_check(&opt.config);
    Config c = opt.config;
    int B = quick && opt.batch >= 8 ? opt.batch / 8 : quick ? 1 : opt.batch, T = opt.seq, V = c.vocab;
    size_t R = (size_t)B * T;
    flush_denormals();
    int threads = 1;
#ifdef _OPENMP
    threads = omp_get_max_threads();
#endif
    double load = 0;
    if (getloadavg(&load, 1) == 1 && load > 0.3)
        printf("*** other programs were running in the last minute (load %.1f): unless they stop, these figures say little ***\n", load);
    peak = measure_peak();
    bandwidth = measure_bandwidth();
    printf("%d threads, vectors of %d bytes | FMA peak %.1f GFLOP/s | copy %.1f GB/s\n", threads, VECTOR_BYTES, peak / 1e9, bandwidth / 1e9);

    config_describe(&c);
    printf(" | %d x %d tokens\n", B, T);
    BENCH_PARTS(&c, (size_t)B, (size_t)T);
    printf("the same product at small sizes\n");
    bench_linear(1024, 32, 32, 0);
    bench_linear(1024, 64, 64, 0);
    bench_linear(64, 128, 128, 0);
    bench_linear(37, 129, 131, 0);
    bench_linear(8, 256, 256, 0);

    printf("a whole step\n");
    Model m;
    uint64_t rng = 1;
    model_build(&m, &c, B, T, 1);
    model_init(&m, 1);
    int *tokens = (int*)allocate(R * sizeof(int), "tokens"), *targets = (int*)allocate(R * sizeof(int), "targets");
    draw_tokens(tokens, R, V, &rng);
    draw_tokens(targets, R, V, &rng);
    double forward = INFINITY, backward = INFINITY, update = INFINITY, total = INFINITY;
    for (int k = 0; k < 3; k++) {               // the first touches the memory; the faster of the others counts
        double t0 = now();
        model_zero_grad(&m);
        double loss = model_forward(&m, tokens, targets, 1), t1 = now();
        model_backward(&m);
        double t2 = now(), norm = model_update(&m, 1e-3, 0.1, 1), t3 = now();
        if (!isfinite(loss) || !isfinite(norm)) die("the step came out as loss %f, norm %f", loss, norm);
        if (k && t3 - t0 < total) forward = t1 - t0, backward = t2 - t1, update = t3 - t2, total = t3 - t0;
    }
    double flops = model_flops_per_token(&m) * R, n = model_parameters(&m);
    printf("  zero, forward and head %.1f ms, backward %.1f ms, update %.1f ms\n", 1e3 * forward, 1e3 * backward, 1e3 * update);
    row(update, 14 * n, 8 * sizeof(real) * n, 1, "gradient norm and AdamW");
    row(total, flops, 0, 0, "the step, counting matrix products");
    double bound = bound_sum[0] + bound_sum[1];
    printf("  the rows' bounds add up to %.1f ms, %.0f%% of them by FMA peak: the step is at %.0f%% of its bound\n", 1e3 * bound, 100 * bound_sum[0] / bound, 100 * bound / total);
    printf("  %.0f tokens/s; of the step's %.1f ms:\n", R / total, 1e3 * total);
    for (int k = 0; k < row_count; k++) if (rows_seen[k].seconds > 0.005 * total) printf("    %5.1f%%  %s\n", 100 * rows_seen[k].seconds / total, rows_seen[k].name);
    printf("    %5.1f%%  everything else: sums, copies, zeroing\n", 100 * (1 - step_sum / total));

    enum { SAMPLED = 100 };
    double start = now();
    model_reset(&m.step, NULL);
    for (int k = 0, token = 0; k < SAMPLED; k++) {
        const real* logits = model_step(&m, token);
        token = logits[0] > logits[1];
    }
    double per_token = (now() - start) / SAMPLED;
    row(per_token, flops / R / 3, sizeof(real) * (n - (c.tie ? 0 : (double)V * c.channels)), 0, "generating one token");
    printf("  %.0f tokens/s\n", 1 / per_token);

    printf("targets\n");
    target(worst_matmul, 0.55, "the slowest of the model's matrix products, of FMA peak");
    target(worst_small, 0.50, "the slowest small one, of the lower bound");
#ifdef HAS_SCAN
    target(worst_scan, 0.50, "scans, of copy bandwidth");
#endif
    BENCH_TARGETS(total, flops / total / peak);
    model_free(&m);
    free(tokens);
    free(targets);
    return check_targets && missed;
}
