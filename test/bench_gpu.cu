// bench_gpu.cu: where a training step's time goes on a GPU, against what the GPU can do. First how fast it copies and how
// fast cuBLAS multiplies large matrices; then each layer as a share of the one that limits it; then whole steps.
//
//     nvcc -O3 -DTRAIN_CU='"../train_harmonic.cu"' -DMODEL_FILE='"models/harmonic.h"' test/bench_gpu.cu -lcublas
//     bench_gpu [--preset NAME] [--batch 16] [--model ...] [--tiny]
//
// It takes train_X's flags for the model and the batch (without any: X's first preset), and --tiny: small sizes, to see on
// the emulator that it runs.
//
// GB/s counts what a layer must read and write once, whatever its kernels read twice: 50% may be a kernel at full speed
// that reads everything twice. GFLOP/s counts a multiply-add as two.
#ifdef __NVCC__
#pragma nv_diag_suppress 177            // a test leaves some of the program's functions unused
#endif
#define TESTING
#include TRAIN_CU
#include MODEL_FILE                      // HAS_...

static int tiny = 0;
static double copy_rate = 1, matmul_rate = 1;           // bytes, FLOPs a second

// Seconds that one call takes: the median of up to 30, for at most half a second.
template <typename F> static double seconds_of(F call) {
    double times[30], total = 0;
    int n = 0;
    cudaEvent_t start, stop;
    cudaCheck(cudaEventCreate(&start));
    cudaCheck(cudaEventCreate(&stop));
    call();                                             // warm up: cuBLAS chooses its kernels
    while (n < (tiny ? 1 : 30) && (n < 3 || total < 0.5)) {
        float ms = 0;
        cudaCheck(cudaEventRecord(start));
        call();
        cudaCheck(cudaEventRecord(stop));
        cudaCheck(cudaEventSynchronize(stop));
        cudaCheck(cudaEventElapsedTime(&ms, start, stop));
        total += ms / 1e3;
        int k = n++;
        for (; k > 0 && times[k - 1] > ms / 1e3; k--) times[k] = times[k - 1];
        times[k] = ms / 1e3;
    }
    cudaCheck(cudaEventDestroy(start));
    cudaCheck(cudaEventDestroy(stop));
    return times[n / 2];
}
// A layer that is bound by memory, and one that is bound by its matrix products (or by memory, where that takes longer).
static void report(const char* name, double seconds, double bytes, double flops) {
    double least = bytes / copy_rate > flops / matmul_rate ? bytes / copy_rate : flops / matmul_rate;
    printf("%-34s %9.3f ms %9.0f GB/s %9.1f TFLOP/s   %4.0f%% of %s\n", name, seconds * 1e3, bytes / seconds / 1e9, flops / seconds / 1e12,
           100 * least / seconds, least > flops / matmul_rate ? "copy" : "matmul");
    fflush(stdout);
}
template <typename F> static F* array(size_t n) {       // of small numbers: a silent input would flatter the kernels
    F* d = (F*)device_allocate(n * sizeof(F), "the benchmark");
    size_t some = smin(n, 1 << 20);
    F* h = (F*)allocate(some * sizeof(F), "the benchmark");
    uint64_t rng = 1;
    for (size_t i = 0; i < some; i++) h[i] = (F)(float)(rng_uniform(&rng) - 0.5);
    for (size_t i = 0; i < n; i += some) device_write(d + i, h, smin(some, n - i) * sizeof(F));
    free(h);
    return d;
}

static void bench_layers(const Config* c, size_t B, size_t T) {
    size_t C = c->channels, V = c->vocab, R = B * T, Vp = padded_vocab(V), H = head_rows(R, V), x2 = sizeof(floatX);
    floatX *x = array<floatX>(R * 2 * C), *y = array<floatX>(R * 2 * C), *z = array<floatX>(R * 2 * C), *w = array<floatX>(4 * C * C);
    float *f = array<float>(R * C), *g = array<float>(R * C), *dw = array<float>(4 * C * C), *v = array<float>(2 * C), *row1 = array<float>(R), *row2 = array<float>(R);
    workspace_reserve(2 * C * SPLITS);
#ifdef HAS_SCAN
    workspace_reserve(2 * B * C * scan_sizes(0, 1, B, T, C).chunks);
#endif
    double n = (double)R * C;
    report("linear C -> 2C", seconds_of([&] { linear_forward(y, x, w, NULL, R, C, 2 * C, C, 0); }), 3 * n * x2, 4 * n * C);
    report("linear 2C -> C, bias", seconds_of([&] { linear_forward(y, x, w, v, R, 2 * C, C, 2 * C, 0); }), 3 * n * x2, 4 * n * C);
    report("its dX and dW", seconds_of([&] { linear_backward(z, dw, NULL, y, x, w, R, 2 * C, C, 2 * C, 0); }), 5 * n * x2, 8 * n * C);
    report("a bias's gradient, 2C", seconds_of([&] { sum_rows(v, x, R, 2 * C); }), 2 * n * x2, 0);
#ifdef HAS_SILU
    report("silu, 2C", seconds_of([&] { silu_forward(y, x, v, R, 2 * C); }), 4 * n * x2, 0);
    report("silu backward, 2C", seconds_of([&] { silu_backward(y, x, v, R, 2 * C); }), 6 * n * x2, 0);
#endif
#ifdef HAS_LAYERNORM
    report("layernorm", seconds_of([&] { layernorm_forward(y, row1, row2, x, v, v, R, C); }), 2 * n * x2, 0);
    report("layernorm backward, dw, db", seconds_of([&] { layernorm_backward(y, v, v, f, x, row1, row2, v, R, C, 0); }), n * (4 + 2 * x2), 0);
#endif
#ifdef HAS_RMSNORM
    report("rmsnorm", seconds_of([&] { rmsnorm_forward(y, row1, x, v, R, C); }), 2 * n * x2, 0);
    report("rmsnorm backward, dw", seconds_of([&] { rmsnorm_backward(y, v, f, x, row1, v, R, C, 0); }), n * (4 + 2 * x2), 0);
#endif
#ifdef HAS_SWIGLU
    report("swiglu", seconds_of([&] { swiglu_forward(y, x, z, R, C); }), 3 * n * x2, 0);
    report("swiglu backward", seconds_of([&] { swiglu_backward(y, y + R * C, x, z, R, C); }), 5 * n * x2, 0);
#endif
#ifdef HAS_ATTENTION
    if (c->model == TRANSFORMER) {
        size_t heads = c->heads, G = c->kv_heads, D = C / heads, W = C + 2 * G * D;
        floatX *qkv = array<floatX>(R * W), *dqkv = array<floatX>(R * W);
        float *lse = array<float>(R * heads), *delta = array<float>(R * heads);
        double pairs = 0, moved = (double)R * (W + C) * x2;     // (query, key) pairs that are seen
        for (size_t t = 0; t < T; t++) pairs += (double)B * (t + 1 - first_key(t, c->window, c->block));
        workspace_reserve(linear_attention_workspace(B, T, G, D));
        report("attention", seconds_of([&] { attention_forward(y, lse, qkv, c->window, c->block, B, T, heads, G, D); }), moved, 4 * pairs * C);
        report("attention backward", seconds_of([&] { attention_backward(dqkv, delta, x, y, lse, qkv, c->window, c->block, B, T, heads, G, D); }), 2 * moved + n * x2, 10 * pairs * C);
        report("linear attention", seconds_of([&] { linear_attention_forward(y, lse, NULL, qkv, B, T, heads, G, D); }), moved, 4.0 * n * D);
        report("linear attention backward", seconds_of([&] { linear_attention_backward(dqkv, delta, x, y, lse, qkv, B, T, heads, G, D); }), 2 * moved + n * x2, 12.0 * n * D);
        cudaCheck(cudaFree(qkv)); cudaCheck(cudaFree(dqkv)); cudaCheck(cudaFree(lse)); cudaCheck(cudaFree(delta));
    }
#endif
#ifdef HAS_SCAN
    report("scan", seconds_of([&] { scan_forward(z, v, x, y, row1, 0.9, 0.975, B, T, C); }), 3 * n * x2, 0);
    report("scan backward", seconds_of([&] { scan_backward(y + R * C, z + R * C, x + R * C, z, x, y, row1, 0.9, 0.975, B, T, C); }), 6 * n * x2, 0);
#endif
    int *tokens = (int*)allocate(R * sizeof(int), "tokens"), *sorted = (int*)allocate((2 * R + 1) * sizeof(int), "tokens");
    uint64_t rng = 1;
    for (size_t r = 0; r < R; r++) tokens[r] = (int)(V * pow(rng_uniform(&rng), 4));       // few tokens are frequent
    int distinct = sort_rows(sorted, sorted + R, tokens, R, V);
    int* index = (int*)device_allocate((3 * R + 1) * sizeof(int), "tokens");
    device_write(index, tokens, R * sizeof(int));
    device_write(index + R, sorted, (2 * R + 1) * sizeof(int));
    floatX *head = array<floatX>(Vp * C), *logits = array<floatX>(H * Vp);
    float* dhead = array<float>(Vp * C);
    report("embedding", seconds_of([&] { embedding_forward(y, index, head, 1, R, C); }), 2 * n * x2, 0);
    report("embedding backward", seconds_of([&] { embedding_backward(dhead, index, index + R, index + 2 * R, distinct, f, 1, C); }), n * 4 + 8.0 * distinct * C, 0);
    char name[64];
    snprintf(name, sizeof name, "head: logits of %zu rows", H);
    double l = (double)H * Vp;
    report(name, seconds_of([&] { linear_forward(logits, x, head, NULL, H, C, Vp, C, 0); }), l * x2, 2 * l * C);
    report("head: dy and dhead", seconds_of([&] { linear_backward(g, dhead, NULL, logits, x, head, H, C, Vp, C, 0); }), 2 * l * x2, 4 * l * C);
    report("softmax, loss and dlogits", seconds_of([&] { softmax_kernel<<<(unsigned)H, 512>>>(logits, row1, row2, index, 1.0f, (int)V, (int)Vp, 1); }), 2 * l * x2, 0);
    cudaCheck(cudaDeviceSynchronize());
    void* all[] = { x, y, z, w, f, g, dw, v, row1, row2, index, head, logits, dhead };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) cudaCheck(cudaFree(all[i]));
    free(tokens);
    free(sorted);
}

#ifdef HAS_SSD
// The scans and convolutions of a model's mixer, on what a step of one layer leaves in its activations.
static void bench_mixer(const Config* whole, size_t B, size_t T) {
    if (whole->model == TRANSFORMER) return;
    Config one = *whole, *c = &one;
    c->layers = 1;
    Model m;
    model_build(&m, c, (int)B, (int)T, 1);
    model_init(&m, 1);
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, x2 = sizeof(floatX);
    int* tokens = (int*)allocate((R + 1) * sizeof(int), "tokens");
    uint64_t rng = 1;
    for (size_t r = 0; r <= R; r++) tokens[r] = (int)(c->vocab * pow(rng_uniform(&rng), 4));
    model_forward(&m, tokens, tokens + 1, 1);
    model_backward(&m);
    BlockActs* acts = &m.acts.block[0];
    auto *p = &m.p.block[0];
    auto *g = &m.g.block[0];
    double n = (double)R * E;
    if (c->model == MAMBA) {
        MambaActs* a = &acts->mamba;
        MambaScratch* s = &a->s;
        size_t L = mamba_chunk(c, T);
        report("conv", seconds_of([&] { short_conv_forward(a->pre, a->x, p->mamba.conv_w, NULL, NULL, B, T, E, c->conv); }), 2 * n * x2, 0);
        report("conv backward", seconds_of([&] { short_conv_backward(s->dy, g->mamba.conv_w, g->mamba.conv_b, s->dpre, a->x, p->mamba.conv_w, B, T, E, c->conv); }), 3 * n * x2, 0);
        report("selective scan", seconds_of([&] { selective_scan_forward(a->y, a->starts, s->xs, a->dt, a->bc, p->mamba.a_log, p->mamba.b_dt, p->mamba.d, NULL, L, B, T, E, N); }),
               3 * n * x2 + 2.0 * R * N * x2, 0);
        report("selective scan backward", seconds_of([&] { selective_scan_backward(s->dxs, s->ddt, s->dbc, g->mamba.a_log, g->mamba.b_dt, g->mamba.d, s->dy, s->xs, a->dt, a->bc,
               a->starts, p->mamba.a_log, p->mamba.b_dt, p->mamba.d, L, B, T, E, N); }), n * (4 * x2 + 4) + 4.0 * R * N * x2, 0);
    }
    if (c->model == MAMBA2) {
        Mamba2Acts* a = &acts->mamba2;
        Mamba2Scratch* s = &a->s;
        SSD q = mamba2_sizes(c, B, T);
        double w = (double)R * q.W * x2, inside = (double)R * q.L, state = 2.0 * R * N * E;
        report("conv", seconds_of([&] { short_conv_forward(a->pre, a->xbc, p->mamba2.conv_w, NULL, NULL, B, T, q.W, c->conv); }), 2 * w, 0);
        report("conv backward", seconds_of([&] { short_conv_backward(s->dxbc, g->mamba2.conv_w, g->mamba2.conv_b, s->dact, a->xbc, p->mamba2.conv_w, B, T, q.W, c->conv); }), 3 * w, 0);
        report("ssd", seconds_of([&] { ssd_forward(a->y, a->states, &s->ssd, s->act, a->dt, p->mamba2.a_log, p->mamba2.b_dt, p->mamba2.d, NULL, q); }), w + n * x2, inside * (N + E) + 2 * state);
        report("ssd backward", seconds_of([&] { ssd_backward(s->dact, s->ddt, g->mamba2.a_log, g->mamba2.b_dt, g->mamba2.d, &s->ssd, s->dy, a->states, s->act, a->dt, p->mamba2.a_log,
               p->mamba2.b_dt, p->mamba2.d, q); }), 2 * w + 2 * n * x2, inside * (3 * N + 2 * E) + 4 * state);
    }
    if (c->model == HYENA) {
        HyenaActs* a = &acts->hyena;
        HyenaScratch* s = &a->s;
        double x = (double)R * C;
        report("conv", seconds_of([&] { short_conv_forward(a->v, a->u, p->hyena.conv_w, p->hyena.conv_b, NULL, B, T, 3 * C, HYENA_CONV); }), 6 * x * x2, 0);
        report("conv backward", seconds_of([&] { short_conv_backward(s->du, g->hyena.conv_w, g->hyena.conv_b, s->dv, a->u, p->hyena.conv_w, B, T, 3 * C, HYENA_CONV); }), 9 * x * x2, 0);
        report("the filter", seconds_of([&] { hyena_filter_forward(a, &p->hyena, c, 0, T); }), 4.0 * T * C, 2.0 * T * FILTER * (c->emb + 2 * FILTER + C));
        report("long convolution", seconds_of([&] { long_conv_forward(a->c, s->p, a->k, p->hyena.d, B, T, C); }), 2 * x * x2 + 4.0 * T * C, 0);
        report("long convolution backward", seconds_of([&] { long_conv_backward(s->dp, s->dk, g->hyena.d, s->dc, s->p, a->k, p->hyena.d, B, T, C); }), 3 * x * x2 + 8.0 * T * C, 0);
    }
    free(tokens);
    model_free(&m);
}
#endif

static void bench_step(const Config* c, int B, int T) {
    Model m;
    model_layout(&m, c, B, T, 1);
    size_t n = m.table.total, bytes = n * (4 * sizeof(float) + (sizeof(floatX) == 2 ? 2 : 0)) + acts_bytes(&m.acts), free_bytes = 0, total = 0;
    cudaCheck(cudaMemGetInfo(&free_bytes, &total));
    double work = (double)B * T * model_flops_per_token(&m);
    model_free(&m);
    if (work > 1e15) { printf("%d x %d tokens: %.0f TFLOP a step, left out\n", B, T, work / 1e12); return; }
    if (bytes + (bytes >> 4) > free_bytes) { printf("%d x %d tokens: needs %.1f GB, the GPU has %.1f free\n", B, T, bytes / 1e9, free_bytes / 1e9); return; }
    model_build(&m, c, B, T, 1);
    model_init(&m, 1);
    size_t R = (size_t)B * T;
    int* tokens = (int*)allocate((R + 1) * sizeof(int), "tokens");
    uint64_t rng = 1;
    for (size_t r = 0; r <= R; r++) tokens[r] = (int)(c->vocab * pow(rng_uniform(&rng), 4));
    double forward = seconds_of([&] { model_forward(&m, tokens, tokens + 1, 0); });
    double both = seconds_of([&] { model_forward(&m, tokens, tokens + 1, 1); model_backward(&m); });
    double update = seconds_of([&] { model_update(&m, 1e-3, 0.1, 1); model_zero_grad(&m); }), step = both + update;
    printf("%d x %d tokens: forward %.2f ms, forward and backward %.2f ms, update %.2f ms (%.0f GB/s), %.0f tokens/s, %.1f TFLOP/s (%.0f%% of matmul), %.2f GB (%.0f bytes a token)\n",
           B, T, forward * 1e3, both * 1e3, update * 1e3, n * (36.0 + sizeof(floatX)) / update / 1e9, R / step, R * model_flops_per_token(&m) / step / 1e12,
           100 * R * model_flops_per_token(&m) / step / matmul_rate, bytes / 1e9, (double)acts_bytes(&m.acts) / R);
    if (T <= 1024) {
        double one = seconds_of([&] { model_step(&m, 1); });
        printf("sampling: %.3f ms a token\n", one * 1e3);
    }
    fflush(stdout);
    free(tokens);
    model_free(&m);
}

int main(int argc, char** argv) {
    const char* flags[64];
    int count = 1, chosen = 0;
    flags[0] = argv[0];
    for (int i = 1; i < argc && count < 50; i++) {
        chosen |= !strcmp(argv[i], "--preset") || !strcmp(argv[i], "--model");      // a preset is of one model
        if (!strcmp(argv[i], "--tiny")) tiny = 1; else flags[count++] = argv[i];
    }
    if (!chosen) { flags[count++] = "--preset"; flags[count++] = presets[0].name; }
    static const char* const small[] = { "--vocab", "67", "--channels", "32", "--layers", "2", "--batch", "2", "--seq", "40" };
    for (int i = 0; i < 10 && tiny; i++) flags[count++] = small[i];
    options_parse(option_table, sizeof option_table / sizeof *option_table, presets, sizeof presets / sizeof *presets, count, (char**)flags);
    config_check(&opt.config);
    Config c = opt.config;
    int B = opt.batch, T = opt.seq;
    device_start();
    size_t big = tiny ? 64 : 4096, bytes = tiny ? 1 << 16 : 1 << 29;
    floatX *a = array<floatX>(big * big), *b = array<floatX>(big * big), *d = array<floatX>(big * big);
    char *from = (char*)device_allocate(bytes, "the benchmark"), *to = (char*)device_allocate(bytes, "the benchmark");
    copy_rate = 2.0 * bytes / seconds_of([&] { device_copy(to, from, bytes); });
    matmul_rate = 2.0 * big * big * big / seconds_of([&] { matmul(d, a, b, big, big, big, big, big, big, 0, 1, 1, 0); });
    printf("%s on %s: copy %.0f GB/s, matmul of %zu^3 %.1f TFLOP/s\n\n", sizeof(floatX) == 2 ? "bf16" : "fp32", device_name, copy_rate / 1e9, big, matmul_rate / 1e12);
    cudaCheck(cudaFree(a)); cudaCheck(cudaFree(b)); cudaCheck(cudaFree(d)); cudaCheck(cudaFree(from)); cudaCheck(cudaFree(to));
    config_describe(&c);
    printf(" | %d x %d tokens\n", B, T);
    bench_layers(&c, B, T);
#ifdef HAS_SSD
    bench_mixer(&c, B, T);
#endif
    printf("\n");
    bench_step(&c, B, T);
    if (tiny) return 0;
    static const int longer[] = { 1 << 14, 1 << 16, 1 << 20 };
    for (int i = 0; i < 3; i++) {
#ifdef HAS_POSITIONS
        c.seq = longer[i];
#endif
        bench_step(&c, 1, longer[i]);
    }
    return 0;
}
