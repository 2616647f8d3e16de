// models/baselines.h: what the checkers must be told about train_baselines.c; see models/harmonic.h.

// Every flag that changes the computation, and every combination that a preset or a published table uses. Small and odd.
#define SMALL .vocab = 11, .layers = 2, .seq = 64
#define HEADS(C, H, G) SMALL, .model = TRANSFORMER, .channels = C, .heads = H, .kv_heads = G, .ff = 7
#define LLAMA(H, G) HEADS(12, H, G), .pos = ROPE, .norm = RMS, .mlp = SWIGLU
#define GPT HEADS(12, 2, 2), .pos = LEARNED, .norm = LAYER, .mlp = GELU
#define POST(H, G) HEADS(12, H, G), .pos = NO_POSITIONS, .norm = LAYER, .post_norm = 1, .mlp = GELU, .weights = SPREAD
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
    {"window 1",                {LLAMA(2, 2), .window = 1}},
    {"window 3, 6 heads on 2",  {LLAMA(6, 2), .window = 3}},
    {"block 3 (BCMT's HOnly)",  {GPT, .tie = 1, .block = 3}},
    {"block 4, window 2",       {LLAMA(2, 2), .block = 4, .window = 2}},
    {"linear",                  {LLAMA(2, 2), .attention = LINEAR}},
    {"linear, 6 heads on 2",    {POST(6, 2), .attention = LINEAR, .bias = 1}},
};

// phi of linear attention has a kink in its slope at 0: differences that reach across it are wrong by about their step.
#define GRADIENT_STEP 1e-5

// The model at another size: for checks that need enough work for several threads, or a real vocabulary.
static Config config_at(Config c, int vocab, int channels) {
    c.vocab = vocab;
    if (c.model == TRANSFORMER) {       // whole heads, of an even size
        int heads = c.heads * 2;
        channels = (channels + heads - 1) / heads * heads;
    }
    c.channels = channels;
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
    {"gpt2",               {.vocab = 50257, .layers = 12, .seq = 1024, .channels = 768, .heads = 12, .kv_heads = 12, .ff = 3072, .pos = LEARNED,
                            .norm = LAYER, .mlp = GELU, .bias = 1, .tie = 1}, 124439808},
};
static size_t parameter_formula(const Config* c) {
    size_t V = c->vocab, C = c->channels, F = c->ff, W = C + 2 * C / c->heads * c->kv_heads, norm = c->norm == LAYER ? 2 * C : C;
    size_t block = W * C + C * C + (c->bias ? W + C : 0) + norm;
    if (c->mlp == SWIGLU) block += norm + 3 * C * F;
    if (c->mlp == GELU) block += norm + 2 * C * F + F + C;
    return (c->tie ? 1 : 2) * V * C + (c->pos == LEARNED ? c->seq * C : 0) + c->layers * block + (c->post_norm ? 0 : norm);
}
// Multiply-adds of every matrix product of one token's forward pass at T = 1, counted by hand from the equations.
static double forward_products(const Config* c) {
    double V = c->vocab, C = c->channels, F = c->ff, D = C / c->heads;
    double mlp = c->mlp == SWIGLU ? 3 * C * F : c->mlp == GELU ? 2 * C * F : 0;
    double attention = c->attention == LINEAR ? 2 * C * D : 2 * C;      // the state's update and reading; one key, one value
    return c->layers * (C * (C + 2 * c->kv_heads * D) + C * C + attention + mlp) + V * C;
}
static const double FIRST_LOSS_BITS[2] = {15.6, 16.2};      // published: about 15.9, of 50257 tokens

// Gradients that are zero by structure, whatever the data.
static int zero_by_structure(const Config* c, const char* tensor, int T) {
    (void)c; (void)tensor; (void)T;
    return 0;
}

// Whether this configuration carries a state from batch to batch.
static int carries(const Config* c) { return c->stateful; }

// How far logits before a changed token may move, relative to their rms. 0: not by one bit. (An FFT mixes all times.)
#define CAUSAL_TOLERANCE 0.0

// The layers that layers.c should check.
#define HAS_LAYERNORM
