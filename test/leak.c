// leak.c: does the model see the future? Two questions, which no loss curve answers.
//   1. Change one token: the logits before it must not change by a bit, nor may those of the other rows of the batch;
//      the logits from it on must.
//   2. On tokens that are drawn at random nobody can lose less than log2 V bits each, who has not seen them.
//
//     leak FILE.safetensors      a verdict on a trained model, in words; exit code 1 if it leaks
//     leak                       the test: this architecture, under every flag, and planted leaks, which must be found
#include "model.h"

// What stands between the tokens and the model: nothing, or a planted leak. out, tokens (B,T).
typedef void View(int* out, const int* tokens, int B, int T, int V);
static void honest(int* out, const int* tokens, int B, int T, int V) {
    (void)V;
    memcpy(out, tokens, (size_t)B * T * sizeof(int));
}
static void sees_next(int* out, const int* tokens, int B, int T, int V) {   // position t is given token t+1
    (void)V;
    for (int i = 0; i < B * T; i++) out[i] = tokens[i % T < T - 1 ? i + 1 : i];
}
static void adds_next(int* out, const int* tokens, int B, int T, int V) {   // ... or both, mixed
    for (int i = 0; i < B * T; i++) out[i] = (tokens[i] + (i % T < T - 1 ? 2 * tokens[i + 1] : 0)) % V;
}
static void adds_last(int* out, const int* tokens, int B, int T, int V) {   // only the first position sees only the last token
    for (int i = 0; i < B * T; i++) out[i] = (tokens[i] + (i % T ? 0 : tokens[i + T - 1])) % V;
}
static void adds_row(int* out, const int* tokens, int B, int T, int V) {    // the last row's end sees the first row's
    honest(out, tokens, B, T, V);
    out[B * T - 1] = (out[B * T - 1] + tokens[T - 1]) % V;
}
static void sees_nothing(int* out, const int* tokens, int B, int T, int V) {  // a model without input leaks nothing either
    (void)tokens; (void)V;
    memset(out, 0, (size_t)B * T * sizeof(int));
}

// A forward pass from an empty state, over what `view` shows of the tokens. Returns the loss in nats.
static double forward(Model* m, View* view, const int* tokens, const int* targets, int train) {
    int* seen = (int*)allocate((size_t)m->B * m->T * sizeof(int), "tokens");
    view(seen, tokens, m->B, m->T, m->config.vocab);
    model_reset(&m->acts, NULL);
    double loss = model_forward(m, seen, targets, train);
    if (train) model_backward(m);
    free(seen);
    return loss;
}

// Question 1, with the token at t of row 0 changed, for t the first, a middle, and the last. Returns what is wrong, or NULL.
static const char* perturb(Model* m, View* view, uint64_t seed) {
    int B = m->B, T = m->T, V = m->config.vocab;
    size_t rows = (size_t)B * T;
    int *tokens = (int*)allocate(rows * sizeof(int), "tokens"), *targets = (int*)allocate(rows * sizeof(int), "targets");
    real *before = (real*)allocate(rows * V * sizeof(real), "logits"), *after = (real*)allocate(rows * V * sizeof(real), "logits");
    draw_tokens(tokens, rows, V, &seed);
    forward(m, view, tokens, targets, 0);
    model_logits(m, 0, rows, before);
    const int places[] = {0, 1, T / 2 - 1, T / 2, T / 2 + 1, T - 2, T - 1};
    const char* wrong = norm_of(before, rows * V) > 0 && isfinite(norm_of(before, rows * V)) ? NULL : "the logits are zero or not finite";
    for (size_t k = 0; k < sizeof places / sizeof *places && !wrong; k++) {
        int t = places[k];
        if (t < 0 || t >= T) continue;
        int kept = tokens[t];
        tokens[t] = (kept + 1 + (int)(rng_next(&seed) % (V - 1))) % V;
        forward(m, view, tokens, targets, 0);
        model_logits(m, 0, rows, after);
        tokens[t] = kept;
        for (int r = 0; r < (int)rows && !wrong; r++) {
            const real *a = after + (size_t)r * V, *b = before + (size_t)r * V;
            int may_change = r >= t && r < T;           // row 0, from t on
            if (!may_change && !(same_bits(a, b, V) || largest_error(a, b, V) <= CAUSAL_TOLERANCE))
                wrong = r < T ? "a token changes the logits before it" : "a token changes the logits of another row";
            if (r == t && !(largest_error(a, b, V) > CAUSAL_TOLERANCE)) wrong = "a token does not change its own logits";
        }
    }
    free(tokens); free(targets); free(before); free(after);
    return wrong;
}

// Question 2: the mean loss in bits over batches of random tokens, and its standard error.
static double random_loss(Model* m, View* view, int batches, uint64_t seed, double* deviation) {
    size_t B = m->B, T = m->T;
    int *tokens = (int*)allocate(B * T * sizeof(int), "tokens"), *targets = (int*)allocate(B * T * sizeof(int), "targets");
    double sum = 0, squares = 0;
    for (int k = 0; k < batches; k++) {
        draw_tokens(tokens, B * T, m->config.vocab, &seed);
        for (size_t i = 0; i < B * T; i++) targets[i] = i % T < T - 1 ? tokens[i + 1] : -1;
        double bits = forward(m, view, tokens, targets, 0) / log(2);
        sum += bits;
        squares += bits * bits;
    }
    free(tokens); free(targets);
    double mean = sum / batches;
    *deviation = sqrt(fmax(0, squares / batches - mean * mean) / (batches - 1));
    return mean;
}
static int too_good(const Model* m, double mean, double deviation) { return !(mean + 3 * deviation >= log2(m->config.vocab)); }

// Teaches the model to use a leak, if it has one: steps of AdamW on random tokens.
static void train_on_random(Model* m, View* view, int steps, uint64_t seed) {
    size_t B = m->B, T = m->T;
    int *tokens = (int*)allocate(B * T * sizeof(int), "tokens"), *targets = (int*)allocate(B * T * sizeof(int), "targets");
    for (int k = 0; k < steps; k++) {
        draw_tokens(tokens, B * T, m->config.vocab, &seed);
        for (size_t i = 0; i < B * T; i++) targets[i] = i % T < T - 1 ? tokens[i + 1] : -1;
        model_zero_grad(m);
        forward(m, view, tokens, targets, 1);
        model_update(m, 1e-2, 0, 1);
    }
    free(tokens); free(targets);
}

// The test.
static int test(void) {
    set_threads(1);             // models this small only lose by a second one
    for (int i = 0; i < NUM_CASES; i++) {
        Model m;
        uint64_t seed = 3 + i;
        model_build(&m, &CASES[i].config, 2, 19, 0);
        draw_parameters(&m, 0.5, &seed);
        const char* wrong = perturb(&m, honest, seed);
        check(!wrong, "%s: %s", CASES[i].name, wrong ? wrong : "no token is seen before its time, nor by another row");
        if (i == 0) {
            const struct { View* view; const char* must_find; } planted[] = {
                {adds_next, "a token changes the logits before it"}, {adds_last, "a token changes the logits before it"},
                {adds_row, "a token changes the logits of another row"}, {sees_nothing, "a token does not change its own logits"},
            };
            for (int k = 0; k < 4; k++) {
                wrong = perturb(&m, planted[k].view, seed);
                check(wrong && !strcmp(wrong, planted[k].must_find), "planted: found that %s", wrong ? wrong : "nothing is wrong");
            }
            m.param_memory[m.table.tensors[1].offset] = NAN;
            wrong = perturb(&m, honest, seed);
            check(wrong != NULL, "planted: found that %s", wrong ? wrong : "nothing is wrong");
        }
        model_free(&m);
    }
    View* views[] = {honest, sees_next};
    for (int k = 0; k < 2; k++) {           // the same model, trained the same way, without a leak and with one
        Model m;
        Config c = config_at(CASES[0].config, 16, 24);
        model_build(&m, &c, 4, 32, 1);
        model_init(&m, 1);
        train_on_random(&m, views[k], 100, 2);
        double deviation, mean = random_loss(&m, views[k], 24, 3, &deviation);
        check(too_good(&m, mean, deviation) == k, "%s: %.3f ± %.3f bits on random tokens, log2 V = %.3f", k ? "planted: trained with the next token in sight" : "trained on random tokens",
              mean, deviation, log2(c.vocab));
        model_free(&m);
    }
    return check_report();
}

// The verdict on a checkpoint.
static int judge(const char* path) {
    SafeTensors file;
    Model m;
    no_options();
    safetensors_read(&file, path);
    options_adopt(&file, MODEL_NAME, 0);
    model_build(&m, &opt.config, 2, 257, 0);
    checkpoint_load(&m, &file, 0, NULL, NULL);
    safetensors_free(&file);
    double bound = log2(m.config.vocab), deviation, mean = random_loss(&m, honest, 24, 1, &deviation);
    const char* wrong = perturb(&m, honest, 2);
    int better = too_good(&m, mean, deviation);
    printf("1. one token changed, in 2 rows of %d:  %s\n", m.T, wrong ? wrong : "no logits before it move by a bit, nor do the other row's");
    printf("2. %d random tokens:  %.3f ± %.3f bits each, where log2 V = %.3f is the least without seeing them:  %s\n", 24 * 2 * (m.T - 1),
           mean, deviation, bound, better ? "better than can be" : "as it must be");
    printf("%s: %s\n", path, wrong || better ? "THIS MODEL LEAKS" : "no leak found");
    model_free(&m);
    return wrong || better;
}

int main(int argc, char** argv) {
    flush_denormals();
    if (argc > 2) die("usage: %s [FILE.safetensors]", argv[0]);
    return argc == 2 ? judge(argv[1]) : test();
}
