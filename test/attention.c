// attention.c: attention in panels against its definition, the (T,T) way: outputs, log sums, and gradients by differences,
// at lengths below, at and past one panel (NR) and one block of keys (KEYS), for every limit on what a query sees. And that a
// limit as long as the text is no limit, to the bit. Built in double, like gradcheck.c.
#include "model.h"
#include "gradient.h"

static uint64_t rng = 1;

static struct {
    size_t window, block, B, T, H, G, D;
    int linear;
    real *qkv, *out, *lse, *state, *weight;
} A;

static void forward(void) {
    if (A.linear) {
        memset(A.state, 0, A.B * A.G * (A.D + 1) * A.D * sizeof(real));
        linear_attention_forward(A.out, A.lse, A.state, A.qkv, A.B, A.T, A.H, A.G, A.D);
    } else attention_forward(A.out, A.lse, A.qkv, A.window, A.block, A.B, A.T, A.H, A.G, A.D);
}
static double loss(void) {
    double sum = 0;
    forward();
    for (size_t i = 0; i < A.B * A.T * A.H * A.D; i++) sum += A.out[i] * A.weight[i];
    return sum;
}

// out by the definition, with every pair of tokens looked at.
static void naive(real* out) {
    size_t W = (A.H + 2 * A.G) * A.D, D = A.D;
    for (size_t b = 0; b < A.B; b++) for (size_t h = 0; h < A.H; h++) for (size_t t = 0; t < A.T; t++) {
        const real* q = A.qkv + (b * A.T + t) * W + h * D;
        real* o = out + (b * A.T + t) * A.H * D + h * D;
        double total = 0;
        for (size_t d = 0; d < D; d++) o[d] = 0;
        for (size_t s = 0; s <= t; s++) {
            if ((A.window && t - s >= A.window) || (A.block && t / A.block != s / A.block)) continue;
            const real *k = A.qkv + (b * A.T + s) * W + (A.H + h / (A.H / A.G)) * D, *v = k + A.G * D;
            double z = 0, p;
            for (size_t d = 0; d < D; d++) {
                double fq = q[d] > 0 ? q[d] + 1 : exp(q[d]), fk = k[d] > 0 ? k[d] + 1 : exp(k[d]);
                z += A.linear ? fq * fk : q[d] * k[d];
            }
            p = A.linear ? z : exp(z / sqrt((double)D));
            total += p;
            for (size_t d = 0; d < D; d++) o[d] += p * v[d];
        }
        for (size_t d = 0; d < D; d++) o[d] /= total;
    }
}

static void check_attention(int linear, size_t window, size_t block, size_t T, size_t H, size_t G, size_t D, int gradient) {
    A.linear = linear, A.window = window, A.block = block, A.B = T < 40 ? 2 : 1, A.T = T, A.H = H, A.G = G, A.D = D;
    size_t R = A.B * T, n = R * (H + 2 * G) * D, C = H * D, states = A.B * G * (D + 1) * D;
    A.qkv = (real*)allocate(n * sizeof(real), "a test"), A.out = (real*)allocate(R * C * sizeof(real), "a test");
    A.lse = (real*)allocate(R * H * sizeof(real), "a test"), A.weight = (real*)allocate(R * C * sizeof(real), "a test");
    A.state = (real*)allocate(states * sizeof(real), "a test");
    real *want = (real*)allocate(R * C * sizeof(real), "a test"), *dqkv = (real*)allocate(n * sizeof(real), "a test");
    real* delta = (real*)allocate(R * H * sizeof(real), "a test");
    draw(A.qkv, n, 1, &rng);
    draw(A.weight, R * C, 1, &rng);
    draw(A.out, R * C, NAN, &rng);
    draw(dqkv, n, NAN, &rng);
    forward();
    naive(want);
    double value = largest_error(A.out, want, R * C), error = 0;
    if (linear) linear_attention_backward(dqkv, A.state, A.weight, A.out, A.lse, A.qkv, A.B, T, H, G, D);
    else attention_backward(dqkv, delta, A.weight, A.out, A.lse, A.qkv, window, block, A.B, T, H, G, D);
    if (gradient && sizeof(real) == 8) {
        double* numeric = (double*)allocate(n * sizeof(double), "a test");
        numeric_gradient(numeric, A.qkv, n, loss, linear ? 1e-6 : 1e-3);
        error = gradient_error(dqkv, numeric, n, 0);
        free(numeric);
    }
    char limits[64] = "";
    if (window) snprintf(limits, sizeof limits, ", window %zu", window);
    if (block) snprintf(limits + strlen(limits), sizeof limits - strlen(limits), ", block %zu", block);
    check(value <= (sizeof(real) == 8 ? 1e-12 : 1e-5) && error <= 1e-6 && isfinite(norm_of(dqkv, n)), "%s attention, T %zu%s, %zu heads of %zu on %zu: error %.0e, gradient %.0e", linear ? "linear" : "softmax",
          T, limits, H, D, G, value, error);
    free(A.qkv); free(A.out); free(A.lse); free(A.weight); free(A.state); free(want); free(dqkv); free(delta);
}

// Logits and gradients of one model and of another with a limit, on the same tokens: the same bits, or not.
static void check_limit(const char* name, Config dense, Config limited, int same) {
    enum { B = 2, T = 83 };
    const Config* configs[2] = {&dense, &limited};
    int tokens[B * T], targets[B * T];
    uint64_t hashes[2], seed = 3;
    draw_tokens(tokens, B * T, dense.vocab, &seed);
    draw_tokens(targets, B * T, dense.vocab, &seed);
    for (int k = 0; k < 2; k++) {
        Model m;
        model_build(&m, configs[k], B, T, 1);
        model_init(&m, 1);
        model_forward(&m, tokens, targets, 1);
        model_backward(&m);
        hashes[k] = hash_bits(m.grad_memory, m.table.total * sizeof(real));
        model_free(&m);
    }
    check((hashes[0] == hashes[1]) == same, "%s at T = %d: %s bits as the dense model's", name, T, same ? "the same" : "other");
}

// More tokens than the cache has room for at first, one at a time; and where learned positions end.
static void check_long(const char* name, Config c) {
    enum { T = 200 };
    int tokens[T], targets[T] = {0};
    uint64_t seed = 5;
    Model m;
    c.seq = T;
    model_build(&m, &c, 1, T, 0);
    draw_parameters(&m, 0.5, &seed);
    draw_tokens(tokens, T, c.vocab, &seed);
    real* logits = (real*)allocate(T * c.vocab * sizeof(real), "a test");
    model_forward(&m, tokens, targets, 0);
    model_logits(&m, 0, T, logits);
    for (int round = 0; round < 2; round++) {
        double worst = 0;
        model_reset(&m.step, NULL);
        for (int t = 0; t < T; t++) {
            double error = largest_error(model_step(&m, tokens[t]), logits + (size_t)t * c.vocab, c.vocab);
            worst = worse(worst, error);
        }
        check(worst <= (sizeof(real) == 8 ? 1e-12 : 1e-4), "%s: %d steps%s: error %.0e", name, T, round ? ", once more" : "", worst);
    }
    const real* past = model_step(&m, 0);
    check((past == NULL) == (c.pos == LEARNED), "%s: step %d %s", name, T + 1, past ? "goes on" : "has no position and says so");
    free(logits);
    model_free(&m);
}

int main(void) {
    const size_t lengths[] = {1, 2, 7, NR - 1, NR, NR + 1, KEYS - 1, KEYS, KEYS + 1, 2 * KEYS + 3};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int linear = 0; linear < 2; linear++) check_attention(linear, 0, 0, lengths[i], 2, 1, 3, 1);
    const size_t heads[][3] = {{1, 1, 1}, {4, 4, 5}, {4, 2, 5}, {6, 1, 7}, {2, 2, 64}, {1, 1, 76}, {2, 1, MAX_HEAD}};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        for (int linear = 0; linear < 2; linear++) check_attention(linear, 0, 0, 37, heads[i][0], heads[i][1], heads[i][2], i < 4);
    const size_t limits[][2] = {{1, 0}, {2, 0}, {NR, 0}, {50, 0}, {KEYS + 1, 0}, {0, 1}, {0, 3}, {0, NR}, {0, 50}, {0, KEYS}, {0, 100}, {5, 50}, {70, 100}, {1000, 1000}};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        check_attention(0, limits[i][0], limits[i][1], KEYS + NR + 3, 2, 1, 2, 1);
        check_attention(0, limits[i][0], limits[i][1], 5 * KEYS + 3, 2, 2, 8, 0);
    }
    for (int i = 0; i < NUM_CASES; i++) {
        Config dense = CASES[i].config, limited = dense;
        if (dense.model != TRANSFORMER || dense.attention == LINEAR || dense.window || dense.block) continue;
        dense.seq = limited.seq = 128;
        limited.window = 83;
        check_limit("window T", dense, limited, 1);
        limited.block = 83;
        check_limit("window T, block T", dense, limited, 1);
        limited.window = 0;
        check_limit("block T", dense, limited, 1);
        if (i) continue;
        limited.block = 82;
        check_limit("block T - 1", dense, limited, 0);
        limited.block = 0, limited.window = 82;
        check_limit("window T - 1", dense, limited, 0);
    }
    for (int i = 0; i < NUM_CASES; i++) if (CASES[i].config.model == TRANSFORMER) {
        Config c = CASES[i].config;
        check_long(CASES[i].name, c);
        if (c.window) c.window = 100, check_long("window 100", c);
        if (c.block) c.block = 70, check_long("block 70", c);
    }
    return check_report();
}
