// decode.c: generation takes one token at a time with a carried state, training takes whole sequences. The two are
// different code and must be the same model: logits of model_step against those of model_forward, at every position.
#include "model.h"

static const double BOUND = sizeof(real) == 8 ? 1e-12 : DECODE_TOLERANCE;       // of the logits' rms
enum { LONG = 41, SHORT = 5 };

// Steps through tokens (T); returns the largest error against logits (T,V).
static double step_through(Model* m, const int* tokens, int T, const real* logits) {
    double worst = 0;
    int V = m->config.vocab;
    for (int t = 0; t < T; t++) {
        double error = largest_error(model_step(m, tokens[t]), logits + (size_t)t * V, V);
        worst = worse(worst, error);
    }
    return worst;
}

static void check_steps(const char* name, Config config, uint64_t seed) {
    Model m, small;
    int tokens[2 * LONG], targets[2 * LONG], V = config.vocab;
    model_build(&m, &config, 2, LONG, 0);
    draw_parameters(&m, 0.5, &seed);
    draw_tokens(tokens, 2 * LONG, V, &seed);
    memset(targets, 0, sizeof targets);
    model_forward(&m, tokens, targets, 0);
    real* logits = (real*)allocate(2 * LONG * V * sizeof(real), "a test");
    model_logits(&m, 0, 2 * LONG, logits);

    // two sequences after one another, in a model that was built for shorter ones: generation may run past T
    model_build(&small, &config, 1, SHORT, 0);
    memcpy(small.param_memory, m.param_memory, m.table.total * sizeof(real));
    model_reset(&small.step, NULL);
    double first = step_through(&small, tokens, LONG, logits);
    model_reset(&small.step, NULL);
    double second = step_through(&small, tokens + LONG, LONG, logits + LONG * V);
    check(first <= BOUND && second <= BOUND, "%s: %d steps, reset, %d more: errors %.0e %.0e", name, LONG, LONG, first, second);

    // without the reset the second sequence must come out differently, or resetting was never needed
    model_reset(&small.step, NULL);
    step_through(&small, tokens, LONG, logits);
    double carried = step_through(&small, tokens + LONG, 1, logits + LONG * V);
    check(carried > 100 * BOUND, "%s: without a reset the past shows: %.0e", name, carried);
    // nor may one wrong token pass
    model_reset(&small.step, NULL);
    tokens[LONG / 2] = (tokens[LONG / 2] + 1) % V;
    double wrong = step_through(&small, tokens, LONG, logits);
    check(wrong > 100 * BOUND, "%s: planted: another token half-way is seen: %.0e", name, wrong);

    // T = 1
    Model one;
    model_build(&one, &config, 1, 1, 0);
    memcpy(one.param_memory, m.param_memory, m.table.total * sizeof(real));
    model_forward(&one, tokens + LONG, targets, 0);
    model_logits(&one, 0, 1, logits);
    model_reset(&one.step, NULL);
    double single = step_through(&one, tokens + LONG, 1, logits);
    check(single <= BOUND, "%s: a sequence of one token: error %.0e", name, single);
    model_free(&m);
    model_free(&small);
    model_free(&one);
    free(logits);
}

// A forward pass over two halves, the state carried from one to the other, against one over the whole; and a reset of
// the second stream alone, after which it must not remember, while the first still does.
static void check_carried(const Case* c, uint64_t seed) {
    enum { B = 2, T = 14, H = T / 2 };
    Model whole, half;
    int tokens[B * T], part[2][B * H], targets[B * T] = {0}, V = c->config.vocab;
    model_build(&whole, &c->config, B, T, 0);
    model_build(&half, &c->config, B, H, 0);
    draw_parameters(&whole, 0.5, &seed);
    memcpy(half.param_memory, whole.param_memory, whole.table.total * sizeof(real));
    draw_tokens(tokens, B * T, V, &seed);
    for (int b = 0; b < B; b++) for (int t = 0; t < T; t++) part[t / H][b * H + t % H] = tokens[b * T + t];
    size_t n = (size_t)H * V;                           // logits of half a row
    real* want = (real*)allocate(2 * B * n * sizeof(real), "a test");
    real* got = (real*)allocate(B * n * sizeof(real), "a test");
    model_forward(&whole, tokens, targets, 0);
    model_logits(&whole, 0, B * T, want);
    double worst = 0;
    for (int k = 0; k < 2; k++) {
        model_forward(&half, part[k], targets, 0);
        model_logits(&half, 0, B * H, got);
        for (int b = 0; b < B; b++) worst = worse(worst, largest_error(got + b * n, want + (2 * b + k) * n, n));
    }
    check(worst <= BOUND && isfinite(norm_of(got, B * n)), "%s: two halves with the state carried against the whole: error %.0e", c->name, worst);

    real* fresh = (real*)allocate(B * n * sizeof(real), "a test");
    model_reset(&half.acts, NULL);
    model_forward(&half, part[1], targets, 0);          // the second half without a past
    model_logits(&half, 0, B * H, fresh);
    model_reset(&half.acts, NULL);
    model_forward(&half, part[0], targets, 0);
    model_reset(&half.acts, (int[B]){0, 1});
    model_forward(&half, part[1], targets, 0);
    model_logits(&half, 0, B * H, got);
    check(same_bits(got + n, fresh + n, n), "%s: a stream that was reset does not remember", c->name);
    check(largest_error(got, want + n, n) <= BOUND && largest_error(got, fresh, n) > 100 * BOUND, "%s: its neighbour, not reset, does", c->name);
    model_free(&whole);
    model_free(&half);
    free(want); free(got); free(fresh);
}

int main(void) {
    flush_denormals();
    set_threads(1);
    for (int i = 0; i < NUM_CASES; i++) {
        check_steps(CASES[i].name, CASES[i].config, 11 + i);
        if (carries(&CASES[i].config)) check_carried(&CASES[i], 31 + i);
    }
    check_steps("wider", config_at(CASES[0].config, 301, 72), 5);
    return check_report();
}
