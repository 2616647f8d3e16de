// models/baselines.h: what the checkers must be told about train_baselines.c; see models/harmonic.h.

// The layers that layers.c and twin.cu should check.
#define HAS_LAYERNORM
#define HAS_RMSNORM
#define HAS_SILU
#define HAS_GELU
#define HAS_SWIGLU
#define HAS_POSITIONS
#define HAS_ATTENTION
#define HAS_SHORT_CONV
#define HAS_SELECTIVE_SCAN
#define HAS_SSD
#define HAS_LONG_CONV

// By how much a whole model in bf16 may be farther from the .c than twin.cu's bounds. Mamba-2 divides products of five
// activations by their norm: rounding its parameters alone to bf16 moves these small models' gradients by 1 to 5%. A Hyena of
// 8 channels came to 2.2% with other random numbers, where 2% is the bound.
static double bf16_slack(const Config* c) { return c->model == MAMBA2 ? 3 : c->model == HYENA ? 1.5 : 1; }

#ifndef __cplusplus     // twin.cu asks twin_ref.c for the rest: C++ has no such lists

// Every flag that changes the computation, and every combination that a preset or a published table uses. Small and odd.
#define SMALL .vocab = 11, .layers = 2, .seq = 64
#define HEADS(C, H, G) SMALL, .model = TRANSFORMER, .channels = C, .heads = H, .kv_heads = G, .ff = 7
#define LLAMA(H, G) HEADS(12, H, G), .pos = ROPE, .norm = RMS, .mlp = SWIGLU
#define GPT HEADS(12, 2, 2), .pos = LEARNED, .norm = LAYER, .mlp = GELU
#define POST(H, G) HEADS(12, H, G), .pos = NO_POSITIONS, .norm = LAYER, .post_norm = 1, .mlp = GELU, .weights = SPREAD
#define SSM(M, C) SMALL, .weights = SPREAD, .model = M, .channels = C, .heads = 1, .kv_heads = 1, .norm = RMS, .mlp = NO_MLP, .expand = 2, .conv = 4
#define HYENA_OF(EMB) .vocab = 11, .layers = 1, .seq = 64, .weights = SPREAD, .model = HYENA, .channels = 5, .heads = 1, .kv_heads = 1, .norm = LAYER, .mlp = GELU, .ff = 20, .emb = EMB
typedef struct { const char* name; Config config; } Case;
static const Case CASES[] = {
    {"llama",                   {LLAMA(2, 2)}},
    {"gpt2",                    {GPT, .bias = 1, .tie = 1}},
    {"bcmt-dense",              {GPT, .tie = 1}},
    {"harmonic-tf",             {POST(2, 2)}},
    {"post-norm, rope, swiglu", {HEADS(12, 2, 2), .pos = ROPE, .norm = RMS, .post_norm = 1, .mlp = SWIGLU}},
    {"layer norm, swiglu",      {HEADS(12, 2, 2), .pos = ROPE, .norm = LAYER, .mlp = SWIGLU, .bias = 1}},
    {"rms norm, gelu, learned", {HEADS(12, 2, 2), .pos = LEARNED, .norm = RMS, .mlp = GELU}},
    {"no mlp",                  {HEADS(12, 2, 2), .pos = ROPE, .norm = RMS, .mlp = NO_MLP}},
    {"6 heads on 1",            {LLAMA(6, 1)}},
    {"6 heads on 2",            {LLAMA(6, 2)}},
    {"1 head of 5, tie",        {HEADS(5, 1, 1), .pos = NO_POSITIONS, .norm = RMS, .mlp = SWIGLU, .tie = 1}},
    {"window 3, 6 heads on 2",  {LLAMA(6, 2), .window = 3}},
    {"block 3 (BCMT's HOnly)",  {GPT, .tie = 1, .block = 3}},
    {"block 7, window 3",       {LLAMA(2, 2), .block = 7, .window = 3}},
    {"linear",                  {LLAMA(2, 2), .attention = LINEAR}},
    {"linear, 6 heads on 2",    {POST(6, 2), .attention = LINEAR, .bias = 1}},
    {"mamba",                   {SSM(MAMBA, 5), .d_state = 3, .chunk = 2}},
    {"mamba, tie, one chunk",   {SSM(MAMBA, 17), .d_state = 2, .tie = 1}},
    {"mamba2",                  {SSM(MAMBA2, 6), .d_state = 5, .head_dim = 4, .chunk = 3}},
    {"mamba2, tie, one head",   {SSM(MAMBA2, 5), .d_state = 3, .head_dim = 10, .tie = 1}},
    {"hyena",                   {HYENA_OF(3)}},
    {"hyena, emb 33, tie",      {HYENA_OF(33), .tie = 1}},
};

// phi of linear attention has a kink in its slope at 0: differences that reach across it are wrong by about their step.
#define GRADIENT_STEP 1e-5

// How far one-token steps in float may be off, of the logits' rms: with parameters of 0.5 the logits before a softmax are large.
#define DECODE_TOLERANCE 5e-5

// How large parameters may be with everything still finite. (Mamba multiplies three of them with no norm between.)
#define EXTREME_PARAMETERS 10

// The model at another size: for checks that need enough work for several threads, or a real vocabulary.
static Config config_at(Config c, int vocab, int channels) {
    c.vocab = vocab;
    if (c.model == TRANSFORMER) {       // whole heads, of an even size
        int heads = c.heads * 2;
        channels = (channels + heads - 1) / heads * heads;
    }
    if (c.model == MAMBA2) c.head_dim = c.expand;
    c.channels = channels;
    c.seq = 128;
    return c;
}

// The published sizes, and the formula they come from.
#define HARMONIC_TF(C) {.vocab = 50257, .layers = 4, .seq = 64, .channels = C, .heads = 4, .kv_heads = 4, .ff = 4 * C, .pos = NO_POSITIONS, \
                        .norm = LAYER, .post_norm = 1, .mlp = GELU, .weights = SPREAD}
static const struct { const char* name; Config config; size_t parameters; } SIZES[] = {
    {"harmonic-tf",        HARMONIC_TF(256), 28886528},
    {"harmonic-tf, C=128", HARMONIC_TF(128), 13656832},
    {"harmonic-tf, C=512", HARMONIC_TF(512), 64064512},
    {"harmonic-tf, C=768", HARMONIC_TF(768), 105533952},
    {"harmonic-mamba",     {.vocab = 50257, .layers = 5, .seq = 64, .weights = SPREAD, .model = MAMBA, .channels = 256, .heads = 1, .kv_heads = 1, .norm = RMS, .mlp = NO_MLP,
                            .d_state = 16, .expand = 2, .conv = 4}, 27921920},
    {"gpt2",               {.vocab = 50257, .layers = 12, .seq = 1024, .channels = 768, .heads = 12, .kv_heads = 12, .ff = 3072, .pos = LEARNED,
                            .norm = LAYER, .mlp = GELU, .bias = 1, .tie = 1}, 124439808},
};
static size_t parameter_formula(const Config* c) {
    size_t V = c->vocab, C = c->channels, F = c->ff, W = C + 2 * C / c->heads * c->kv_heads, norm = c->norm == LAYER ? 2 * C : C;
    size_t E = c->expand * C, N = c->d_state, K = c->conv, rank = (C + 15) / 16, H = c->model == MAMBA2 ? E / c->head_dim : 0, f = 64, block = norm;
    if (c->model == TRANSFORMER) block += W * C + C * C + (c->bias ? W + C : 0);
    if (c->model == MAMBA) block += 2 * E * C + E * K + E + (rank + 2 * N) * E + E * rank + E + E * N + E + C * E;
    if (c->model == MAMBA2) block += (2 * E + 2 * N + H) * C + (E + 2 * N) * (K + 1) + 3 * H + E + C * E;
    if (c->model == HYENA) block += 3 * C * C + 3 * C + 3 * C * 4 + f * c->emb + f + 2 * (f * f + f) + C * f + f + C + C * C + C;
    if (c->mlp == SWIGLU) block += norm + 3 * C * F;
    if (c->mlp == GELU) block += norm + 2 * C * F + F + C;
    int learned = c->model == TRANSFORMER && c->pos == LEARNED;
    return (c->tie ? 1 : 2) * V * C + (learned ? c->seq * C : 0) + c->layers * block + (c->post_norm ? 0 : norm);
}
// Multiply-adds of every matrix product of one token's forward pass at B = T = 1, counted by hand from the equations.
static double forward_products(const Config* c) {
    double V = c->vocab, C = c->channels, F = c->ff, D = C / c->heads, E = c->expand * C, N = c->d_state, rank = (c->channels + 15) / 16, f = 64, mixer = 0;
    double mlp = c->mlp == SWIGLU ? 3 * C * F : c->mlp == GELU ? 2 * C * F : 0;
    if (c->model == TRANSFORMER)                // the state's update and reading; or one key, one value
        mixer = C * (C + 2 * c->kv_heads * D) + C * C + (c->attention == LINEAR ? 2 * C * D : 2 * C);
    if (c->model == MAMBA) mixer = C * 2 * E + E * (rank + 2 * N) + rank * E + E * C;
    if (c->model == MAMBA2) mixer = C * (2 * E + 2 * N + E / c->head_dim) + E * C + N + E + 2 * E * N;
    if (c->model == HYENA) mixer = C * 3 * C + C * C + f * c->emb + 2 * f * f + f * C;
    return c->layers * (mixer + mlp) + V * C;
}
static const double FIRST_LOSS_BITS[2] = {15.6, 16.2};      // published: about 15.9, of 50257 tokens

// Gradients that are zero by structure, whatever the data.
static int zero_by_structure(const Config* c, const char* tensor, int T) {
    size_t n = strlen(tensor);
    return (c->model == MAMBA || c->model == MAMBA2) && T == 1 && !strcmp(tensor + n - 5, "a_log");     // no past to decay
}

// Whether this configuration carries a state from batch to batch.
static int carries(const Config* c) { return c->stateful; }

// How far logits before a changed token may move, relative to their rms. 0: not by one bit. (An FFT mixes all times.)
#define CAUSAL_TOLERANCE (m->config.model == HYENA ? 1e-5 : 0.0)

// What learn.c demands. The first row is a text, bound in bits per byte; the others are tasks, bound on the accuracy.
#define LEARN_SIZE(V, C) .vocab = V, .weights = SPREAD, .layers = 2, .seq = 64, .channels = C, .heads = 2, .kv_heads = 2, .ff = 2 * C, .expand = 2, .conv = 4
#define LEARN_TF(V, C) {LEARN_SIZE(V, C), .model = TRANSFORMER, .pos = ROPE, .norm = RMS, .mlp = SWIGLU}
#define LEARN_LINEAR(V, C) {LEARN_SIZE(V, C), .model = TRANSFORMER, .pos = ROPE, .norm = RMS, .mlp = SWIGLU, .attention = LINEAR}
#define LEARN_SSM(M, V, C) {LEARN_SIZE(V, C), .model = M, .norm = RMS, .mlp = NO_MLP, .d_state = 16, .head_dim = 32}
#define LEARN_HYENA(V, C) {LEARN_SIZE(V, C), .model = HYENA, .norm = LAYER, .mlp = GELU, .emb = 33}
static const struct { const char* task; int seq, steps; double lr, bound; Config config; } LEARN[] = {
    // (first weights N(0,.02) are too small for 32 channels: the transformer's recall then stays at 0.55)
    {"text",   64, 300, 3e-3, 2.7, LEARN_TF(256, 48)},
    {"copy",   12, 500, 3e-3, 0.9, LEARN_TF(8, 32)},
    {"recall", 12, 500, 3e-3, 0.9, LEARN_TF(8, 32)},
    {"copy",   12, 500, 3e-3, 0.8, LEARN_LINEAR(8, 32)},
    {"recall", 12, 500, 3e-3, 0.5, LEARN_LINEAR(8, 32)},
    {"copy",   12, 500, 3e-3, 0.9, LEARN_SSM(MAMBA, 8, 32)},
    {"recall", 12, 500, 3e-3, 0.9, LEARN_SSM(MAMBA, 8, 32)},
    {"copy",   12, 500, 3e-3, 0.9, LEARN_SSM(MAMBA2, 8, 32)},
    {"recall", 12, 500, 3e-3, 0.9, LEARN_SSM(MAMBA2, 8, 32)},
    {"copy",   12, 500, 3e-3, 0.9, LEARN_HYENA(8, 32)},
    {"recall", 12, 500, 3e-3, 0.9, LEARN_HYENA(8, 32)},
};

// The layers that one training step runs, and how often, for bench.c.
#define BENCH_PARTS(c, B, T) do { \
        size_t C = (c)->channels, V = (c)->vocab, F = (c)->ff, R = (B) * (T), N = (c)->d_state, E = (c)->expand * C, rank = (C + 15) / 16, W; \
        int layers = (c)->layers, norms = layers * ((c)->mlp == NO_MLP ? 1 : 2) + !(c)->post_norm; \
        if ((c)->model == TRANSFORMER) { \
            W = C + 2 * C / (c)->heads * (c)->kv_heads; \
            bench_linear(R, C, W, layers); \
            bench_linear(R, C, C, layers); \
            bench_attention(c, B, T, layers); \
        } \
        if ((c)->model == MAMBA) { \
            bench_linear(R, C, E, 2 * layers); \
            bench_linear(R, E, C, layers); \
            bench_linear(R, E, rank, layers); \
            bench_linear(R, E, 2 * N, layers); \
            bench_linear(R, rank, E, layers); \
            bench_short_conv(B, T, E, (c)->conv, layers); \
            bench_pointwise("silu", silu_forward, silu_backward, EXP + 1, EXP + 5, R, E, 2 * layers, layers);      /* forwards: once more in the backward, like swiglu's */ \
            bench_selective_scan(mamba_chunk(c, T), B, T, E, N, layers); \
            bench_swiglu(R, E, 2 * layers, layers); \
        } \
        if ((c)->model == MAMBA2) { \
            W = E + 2 * N; \
            bench_linear(R, C, E, layers); \
            bench_linear(R, C, W, layers); \
            bench_linear(R, C, mamba2_heads(c), layers); \
            bench_linear(R, E, C, layers); \
            bench_short_conv(B, T, W, (c)->conv, layers); \
            bench_pointwise("silu", silu_forward, silu_backward, EXP + 1, EXP + 5, R, W, 2 * layers, layers); \
            bench_ssd(mamba2_chunk(c, T), B, T, mamba2_heads(c), (c)->head_dim, N, layers); \
            bench_swiglu(R, E, 2 * layers, layers); \
            bench_rmsnorm(R, E, layers); \
        } \
        if ((c)->model == HYENA) { \
            bench_linear(R, C, 3 * C, layers); \
            bench_linear(R, C, C, layers); \
            bench_sum_rows(R, 3 * C, layers); \
            bench_sum_rows(R, C, layers); \
            bench_short_conv(B, T, 3 * C, HYENA_CONV, layers); \
            bench_long_conv(B, T, C, layers); \
        } \
        if ((c)->mlp != NO_MLP) { \
            bench_linear(R, C, F, (c)->mlp == SWIGLU ? 2 * layers : layers); \
            bench_linear(R, F, C, layers); \
        } \
        if ((c)->mlp == SWIGLU) bench_swiglu(R, F, 2 * layers, layers); \
        if ((c)->mlp == GELU) { \
            bench_pointwise("gelu", gelu_forward, gelu_backward, EXP + 10, EXP + 19, R, F, 2 * layers, layers); \
            bench_sum_rows(R, F, layers); \
            bench_sum_rows(R, C, layers); \
        } \
        if ((c)->norm == RMS) bench_rmsnorm(R, C, norms); \
        else bench_layernorm(R, C, 1, norms); \
        bench_linear(HEAD_ROWS, C, V, -1);                  /* inside the head */ \
        bench_embedding(R, V, C, 1); \
        bench_head(R, C, V, 1); \
    } while (0)

// A step's time may be what its layers' bounds allow at 40% of FMA peak where that binds, 50% of copying where copying does.
#define BENCH_TARGETS(seconds, of_peak) do { \
        (void)(of_peak); \
        target((bound_sum[0] / 0.4 + bound_sum[1] / 0.5) / (seconds), 1, "the step, of what 40% of FMA peak or 50% of copy bandwidth, whichever binds a layer, would take"); \
    } while (0)
#endif

#ifdef MODEL_H        // for C only
#include "baselines_reference.h"
#endif
