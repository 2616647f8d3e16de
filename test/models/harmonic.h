// models/harmonic.h: what the checkers must be told about train_harmonic.c. Every architecture has such a file, with the
// same names in it; nothing else in test/ knows one model from another.

// Every flag that changes the computation, alone and where two of them meet. Small and odd on purpose.
typedef struct { const char* name; Config config; } Case;
static const Case CASES[] = {
    //                           V   C  layers bands     error tie stateful
    {"caged",                   {11, 5, 1,     CAGED,     1,    0,  0}},
    {"flat",                    {11, 5, 1,     FLAT,      1,    0,  0}},
    {"flat-wide",               {11, 5, 1,     FLAT_WIDE, 1,    0,  0}},
    {"free",                    {11, 5, 1,     FREE,      1,    0,  0}},
    {"error off",               {11, 5, 1,     CAGED,     0,    0,  0}},
    {"tie",                     {11, 5, 1,     CAGED,     1,    1,  0}},
    {"stateful",                {11, 5, 1,     CAGED,     1,    0,  1}},
    {"stateful, error off",     {11, 3, 1,     FREE,      0,    0,  1}},
    {"2 layers",                {11, 5, 2,     CAGED,     1,    0,  0}},
    {"2 layers, error off",     {11, 5, 2,     FLAT_WIDE, 0,    0,  0}},
    {"3 layers, tie, stateful", {11, 5, 3,     CAGED,     1,    1,  1}},
};

// The model at another size: for checks that need enough work for several threads, or a real vocabulary.
static Config config_at(Config c, int vocab, int channels) {
    c.vocab = vocab;
    c.channels = channels;
    return c;
}

// The published sizes, and the formula they come from.
static const struct { const char* name; Config config; size_t parameters; } SIZES[] = {
    {"harmonic-28m",            {50257, 256, 1, CAGED, 1, 0, 0}, 27965952},
    {"harmonic-28m, error off", {50257, 256, 1, CAGED, 0, 0, 0}, 27834880},
    {"C=128",                   {50257, 128, 1, CAGED, 1, 0, 0}, 13425920},
    {"C=512",                   {50257, 512, 1, CAGED, 1, 0, 0}, 60388352},
    {"C=128, tie",              {50257, 128, 1, CAGED, 1, 1, 0},  6993024},
    {"C=256, tie",              {50257, 256, 1, CAGED, 1, 1, 0}, 15100160},
    {"C=512, tie",              {50257, 512, 1, CAGED, 1, 1, 0}, 34656768},
};
static size_t parameter_formula(const Config* c) {
    size_t V = c->vocab, C = c->channels;
    return (c->tie ? 1 : 2) * V * C + c->layers * (34 * C * C + 24 * C - (c->error ? 0 : 2 * C * C)) + (c->layers > 1 ? (c->layers + 1) * 2 * C : 0);
}
// Multiply-adds of every matrix product of one token's forward pass, counted by hand from the equations.
static double forward_products(const Config* c) {
    double V = c->vocab, C = c->channels;
    double level1 = 2 * (C * 2 * C + 2 * C * C), level23 = 2 * (2 * C * 2 * C + 2 * C * C), errors = c->error ? 2 * C * C : 0;
    return c->layers * (level1 + 2 * level23 + errors) + V * C;
}
static const double FIRST_LOSS_BITS[2] = {16.0, 16.6};      // published: what a model of 50257 tokens starts from

// Gradients that are zero by structure, whatever the data. Harmonic has none, even at T = 1 without a past: A_0 then
// multiplies s_{-1} = 0, but the loss still reaches it through b_0 = (1 - A_0) tanh(gb_0).
static int zero_by_structure(const Config* c, const char* tensor, int T) {
    (void)c; (void)tensor; (void)T;
    return 0;
}

// Whether this configuration carries a state from batch to batch.
static int carries(const Config* c) { return c->stateful; }

// How far logits before a changed token may move, relative to their rms. 0: not by one bit. (An FFT mixes all times.)
#define CAUSAL_TOLERANCE 0.0

// The step of the differences in gradcheck.c; how far one-token steps in float may be off, of the logits' rms; how large
// parameters may be with everything still finite.
#define GRADIENT_STEP 1e-3
#define DECODE_TOLERANCE 1e-5
#define EXTREME_PARAMETERS 30

// The layers that layers.c should check.
#define HAS_SILU
#define HAS_LAYERNORM
#define HAS_SCAN

// What learn.c demands. The first row is a text, bound in bits per byte; the others are tasks, bound on the accuracy,
// where chance is 1/4. Four seeds reached 1.60 to 1.72 bits; 1.00; .97 to .98; .87 to .91; .63 to .83: a state of averages
// copies three tokens to perfection, six not quite, and has to struggle for a lookup.
static const struct { const char* task; int seq, steps; double lr, bound; Config config; } LEARN[] = {
    {"text",   64, 300, 1e-2, 2.0,  {256, 48, 1, CAGED, 1, 0, 0}},
    {"copy",    6, 800, 1e-2, 0.98, {4, 64, 1, CAGED, 1, 0, 0}},
    {"copy",    8, 800, 1e-2, 0.94, {4, 64, 1, CAGED, 1, 0, 0}},
    {"copy",   12, 800, 1e-2, 0.8,  {4, 64, 1, CAGED, 1, 0, 0}},
    {"recall",  8, 800, 1e-2, 0.45, {8, 64, 1, CAGED, 1, 0, 0}},
};

// The layers that one training step runs, and how often, for bench.c. Biases' gradients come with the linear layers.
#define BENCH_PARTS(B, T, C, V) do { \
        bench_linear(B * T, C, 2 * C, 10);      /* wa1, wb1: level 1 once, levels 2 and 3 in two halves */ \
        bench_linear(B * T, 2 * C, C, 6);       /* wa2, wb2 */ \
        bench_linear(B * T, C, C, 2);           /* p1, p2 */ \
        bench_linear(HEAD_ROWS, C, V, -1);      /* inside the head */ \
        bench_sum_rows(B * T, 2 * C, 6); \
        bench_sum_rows(B * T, C, 6); \
        bench_silu(B * T, 2 * C, 12, 6);        /* forwards: once more in the backward */ \
        bench_layernorm(B * T, C, 1, 3); \
        bench_layernorm(B * T, C, 0, 2); \
        bench_scan(B, T, C, 3); \
        bench_embedding(B * T, V, C, 1); \
        bench_head(B * T, C, V, 1); \
    } while (0)
