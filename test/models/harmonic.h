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

// The layers that layers.c should check.
#define HAS_SILU
#define HAS_LAYERNORM
#define HAS_SCAN

// What learn.c demands: about 3 standard deviations from what 3 seeds reached.
static const Config LEARN_TEXT = {256, 48, 1, CAGED, 1, 0, 0};
static const Config LEARN_TASK = {8, 48, 1, CAGED, 1, 0, 0};
