// bench.c: where a training step's time goes, against what this machine can do. First two peaks are measured, in the same
// run: multiply-adds in registers, and copying memory, both on all cores. A layer that does F floating point operations and
// moves at least M bytes cannot be faster than max(F / peak, M / bandwidth); its row says how near it comes to that.
// M counts every array once, as if the caches were perfect between calls and useless across them.
//
//     bench [--channels C] [--vocab V] [--batch B] [--seq T] [--quick] [--check]
//
// --quick: an eighth of the tokens. --check: exit code 1 where a target is missed; otherwise the lines only say so.
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
        snprintf(rows_seen[row_count].name, sizeof rows_seen[0].name, "%s x %d", name, calls);
        rows_seen[row_count++].seconds = calls * seconds;
    }
    return share;
}

// The fastest of a few runs of `code`, in seconds.
#define TIME(code) ({ double best = INFINITY; for (int k = 0; k <= repeats; k++) { double start = now(); code; if (k) best = fmin(best, now() - start); } best; })

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

static double worst_matmul = INFINITY, worst_small = INFINITY, worst_scan = INFINITY;

// The three products of a linear layer. calls: how often a training step runs it; -1 where it is inside another row;
// 0 for a size that no step needs.
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
        if (calls) worst_matmul = fmin(worst_matmul, share[k]);
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

#ifdef HAS_SILU
static void bench_silu(size_t R, size_t C, int forwards, int backwards) {
    real *x = filled(R * C), *y = filled(R * C);
    char name[64];
    double n = (double)R * C;
    snprintf(name, sizeof name, "silu forward %zu x %zu", R, C);
    row(TIME(silu_forward(y, x, R, C)), 25 * n, 2 * sizeof(real) * n, forwards, name);
    snprintf(name, sizeof name, "silu backward %zu x %zu", R, C);
    row(TIME(silu_backward(y, x, R, C)), 29 * n, 3 * sizeof(real) * n, backwards, name);
    free(x); free(y);
}
#endif

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
    int B = 16, T = 1024, V = 50257, C = 256, check_targets = 0, quick = 0;
    const struct { const char* name; int* value; } flags[] = {{"--channels", &C}, {"--vocab", &V}, {"--batch", &B}, {"--seq", &T}};
    for (int i = 1; i < argc; i++) {
        int known = !strcmp(argv[i], "--quick") ? (quick = 1) : !strcmp(argv[i], "--check") ? (check_targets = 1) : 0;
        for (int k = 0; k < 4 && !known; k++)
            if (!strcmp(argv[i], flags[k].name) && i + 1 < argc && (*flags[k].value = atoi(argv[++i])) > 0) known = 1;
        if (!known) die("usage: %s [--channels C] [--vocab V] [--batch B] [--seq T] [--quick] [--check]", argv[0]);
    }
    if (quick) B = B >= 8 ? B / 8 : 1;
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

    printf("layers of %s at %d x %d tokens, C %d, V %d\n", MODEL_NAME, B, T, C, V);
    BENCH_PARTS((size_t)B, (size_t)T, (size_t)C, (size_t)V);
    printf("the same product at small sizes\n");
    bench_linear(1024, 32, 32, 0);
    bench_linear(1024, 64, 64, 0);
    bench_linear(64, 128, 128, 0);
    bench_linear(37, 129, 131, 0);
    bench_linear(8, 256, 256, 0);

    printf("a whole step\n");
    Model m;
    Config c = config_at(CASES[0].config, V, C);
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
    row(per_token, flops / R / 3, sizeof(real) * (n - (c.tie ? 0 : (double)V * C)), 0, "generating one token");
    printf("  %.0f tokens/s\n", 1 / per_token);

    printf("targets\n");
    target(worst_matmul, 0.55, "the slowest of the model's matrix products, of FMA peak");
    target(worst_small, 0.50, "the slowest small one, of the lower bound");
#ifdef HAS_SCAN
    target(worst_scan, 0.50, "scans, of copy bandwidth");
#endif
    target(flops / total / peak, 0.45, "the step, of FMA peak");
    model_free(&m);
    free(tokens);
    free(targets);
    return check_targets && missed;
}
