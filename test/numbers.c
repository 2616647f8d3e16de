// numbers.c: the arithmetic below the model, its sizes, its first weights and its optimizer. Built in float, with the
// flags that the program is built with: some of what is checked here is what a careless flag would break.
#include "model.h"

static uint64_t rng = 1;

// ----------------------------------------------------------------------------------------------------------------
// exp, sigmoid, tanh: in loops, so that it is the vector code that is measured

enum { POINTS = 1 << 20 };
static real points[POINTS], values[POINTS];

static double worst_error(double (*truth)(double), double low, double high, int relative, int which) {
    double worst = 0;
    for (int i = 0; i < POINTS; i++) points[i] = low + (high - low) * i / (POINTS - 1);
    for (int i = 0; i < POINTS; i++) values[i] = which == 0 ? fast_exp(points[i]) : which == 1 ? sigmoid(points[i]) : fast_tanh(points[i]);
    for (int i = 0; i < POINTS; i++) {
        double want = truth(points[i]), error = fabs(values[i] - want) / (relative ? want : 1);
        worst = worse(worst, error);
    }
    return worst;
}
static double true_sigmoid(double x) { return 1 / (1 + exp(-x)); }

static void check_functions(void) {
    check_error("exp on [-87, 87], relative", worst_error(exp, -87, 87, 1, 0), 2e-7);
    check_error("exp on [-1, 1], relative", worst_error(exp, -1, 1, 1, 0), 2e-7);
    check_error("sigmoid on [-85, 87], relative", worst_error(true_sigmoid, -85, 87, 1, 1), 3e-7);
    check_error("tanh on [-20, 20]", worst_error(tanh, -20, 20, 0, 2), 3e-7);
    check_error("tanh on [-0.01, 0.01]", worst_error(tanh, -0.01, 0.01, 0, 2), 3e-7);
    real extreme[16] = {NAN, INFINITY, -INFINITY, 1e30, -1e30, 1000, -1000, 88, -88, 0, -0.0f, 1e-30, -1e-30, NAN, NAN, NAN}, e[16], s[16], t[16];
    for (int i = 0; i < 16; i++) e[i] = fast_exp(extreme[i]), s[i] = sigmoid(extreme[i]), t[i] = fast_tanh(extreme[i]);
    check(isnan(e[0]) && isnan(s[0]) && isnan(t[0]) && isnan(e[15]) && isnan(s[15]) && isnan(t[15]), "exp, sigmoid, tanh of NaN are NaN");
    int ok = 1;
    for (int i = 1; i < 9; i += 2) ok &= e[i] > 1e37 && isfinite(e[i]) && s[i] == 1 && t[i] == 1;
    for (int i = 2; i < 9; i += 2) ok &= e[i] >= 0 && e[i] < 1e-37 && s[i] >= 0 && s[i] < 1e-37 && t[i] == -1;
    check(ok, "exp, sigmoid, tanh of ±88, ±1000, ±1e30, ±inf: held where a float ends");
    check(e[9] == 1 && e[10] == 1 && s[9] == 0.5f && t[9] == 0 && fabs(t[11]) < 1e-6, "exp, sigmoid, tanh of 0 and next to it");
}

// Denormals must be gone in every thread, not just the first.
static void check_denormals(void) {
    int bad = 0, threads = 0;
    set_threads(3);
    flush_denormals();
    #pragma omp parallel reduction(+ : bad, threads)
    {
        volatile float small = FLT_MIN, tenth = 0.1f;
        volatile float product = small * tenth;
        bad += product != 0;
        threads++;
    }
    check(bad == 0, "denormals are zero in %d of %d threads", threads - bad, threads);
}

// ----------------------------------------------------------------------------------------------------------------
// the model with numbers that are not sound, or too large

enum { B = 2, T = 9 };
static int tokens[B * T], targets[B * T];

static void check_not_finite(const Case* c) {
    Model m;
    int seen = 0, named = 0;
    model_build(&m, &c->config, B, T, 1);
    model_init(&m, 1);
    draw_tokens(tokens, B * T, c->config.vocab, &rng);
    draw_tokens(targets, B * T, c->config.vocab, &rng);
    check(isfinite(model_forward(&m, tokens, targets, 0)) && !not_finite(&m.table, m.param_memory), "%s: sound to begin with", c->name);
    for (int i = 0; i < m.table.count; i++) {
        const Tensor* t = &m.table.tensors[i];
        real* p = m.param_memory + t->offset;
        real* kept = copy_of(p, t->size);
        for (size_t k = 0; k < t->size; k++) p[k] = NAN;
        model_reset(&m.acts, NULL);
        seen += isnan(model_forward(&m, tokens, targets, 0));
        memcpy(p, kept, t->size * sizeof(real));
        p[t->size - 1] = i % 2 ? INFINITY : NAN;
        const char* name = not_finite(&m.table, m.param_memory);
        named += name && !strcmp(name, t->name);
        memcpy(p, kept, t->size * sizeof(real));
        free(kept);
    }
    check(seen == m.table.count, "%s: a NaN in any of %d tensors reaches the loss: %d", c->name, m.table.count, seen);
    check(named == m.table.count, "%s: the tensor with the NaN or infinity is named: %d of %d", c->name, named, m.table.count);

    model_reset(&m.acts, NULL);
    model_zero_grad(&m);
    real* before = copy_of(m.param_memory, m.table.total);
    model_forward(&m, tokens, targets, 1);
    model_backward(&m);
    m.grad_memory[m.table.tensors[m.table.count - 1].offset] = NAN;
    double norm = model_update(&m, 1, 1, 1);
    check(isnan(norm) && same_bits(before, m.param_memory, m.table.total) && m.updates == 0, "%s: an update with a NaN in a gradient changes nothing", c->name);

    int none[B * T];
    memset(none, -1, sizeof none);
    model_zero_grad(&m);
    double loss = model_forward(&m, tokens, none, 1);
    model_backward(&m);
    check(loss == 0 && norm_of(m.grad_memory, m.table.total) == 0 && m.counted == 0, "%s: no target at all: loss 0, every gradient exactly 0", c->name);
    free(before);

    draw_parameters(&m, EXTREME_PARAMETERS, &rng);                      // pre-activations of 1e4 and more, gates wide open or shut
    model_reset(&m.acts, NULL);
    model_zero_grad(&m);
    loss = model_forward(&m, tokens, targets, 1);
    model_backward(&m);
    check(isfinite(loss) && isfinite(norm_of(m.grad_memory, m.table.total)), "%s: parameters of size %d: loss %.0f and its gradients are finite", c->name, EXTREME_PARAMETERS, loss);
    model_free(&m);
}

#ifdef HAS_SCAN
static void check_extreme_gates(void) {
    enum { N = 12 };
    const real gates[4] = {1e4, -1e4, 88, -88};
    real ga[N * 4], gb[N * 4], s[N * 4], s0[4] = {1, -1, 1e-30, 0}, ds[N * 4], dga[N * 4], dgb[N * 4];
    for (int i = 0; i < N * 4; i++) ga[i] = gates[rng_next(&rng) % 4], gb[i] = gates[rng_next(&rng) % 4], ds[i] = 1;
    scan_forward(s, ga, gb, s0, 0, 1, 1, N, 4);
    scan_backward(dga, dgb, ds, s, ga, gb, s0, 0, 1, 1, N, 4);
    int ok = 1;
    for (int i = 0; i < N * 4; i++) ok &= fabs(s[i]) <= 1 && isfinite(dga[i]) && isfinite(dgb[i]);
    check(ok, "scan: gates of ±88 and ±1e4 in the band (0,1): states stay in [-1, 1], gradients finite");
    // a silent input: the state decays below the smallest float, and must be 0 then
    for (int i = 0; i < N * 4; i++) ga[i] = -5, gb[i] = 0;
    for (int c = 0; c < 4; c++) s0[c] = 1e-30;
    scan_forward(s, ga, gb, s0, 0, 1, 1, N, 4);
    check(s[0] > 0 && s[N * 4 - 1] == 0, "scan: a state that decays past the smallest float is 0: %g, ... %g", (double)s[0], (double)s[N * 4 - 1]);
    // in the slowest band 1 - A is about 0.001: taken from a rounded A, it would be wrong by 6e-5
    double worst = 0;
    for (int i = 0; i < N; i++) {
        real gate = i - 4, input = 0.5f, state, zero = 0;
        scan_forward(&state, &gate, &input, &zero, 0.992, 0.999, 1, 1, 1);
        double A = 0.992 + 0.007 / (1 + exp(-(double)gate));
        worst = worse(worst, fabs(state / ((1 - A) * tanh(0.5)) - 1));
    }
    check_error("scan: the first state in the band (0.992, 0.999), relative", worst, 2e-6);
}
#endif

// ----------------------------------------------------------------------------------------------------------------
// sizes, first weights, first loss

static void check_sizes(void) {
    for (size_t i = 0; i < sizeof SIZES / sizeof SIZES[0]; i++) {
        Model m;
        model_layout(&m, &SIZES[i].config, 1, 1, 1);
        size_t n = model_parameters(&m);
        double flops = model_flops_per_token(&m), by_hand = 6 * forward_products(&SIZES[i].config);
        check(n == SIZES[i].parameters && n == parameter_formula(&SIZES[i].config), "%s: %zu parameters", SIZES[i].name, n);
        check(flops == by_hand, "%s: %.0f FLOPs per token, by hand %.0f", SIZES[i].name, flops, by_hand);
        model_free(&m);
    }
    for (int i = 0; i < NUM_CASES; i++) {
        Model m;
        model_layout(&m, &CASES[i].config, 1, 1, 1);
        size_t n = model_parameters(&m), formula = parameter_formula(&CASES[i].config);
        check(n == formula && model_flops_per_token(&m) == 6 * forward_products(&CASES[i].config), "%s: %zu parameters, the formula says %zu", CASES[i].name, n, formula);
        model_free(&m);
    }
}

// Every tensor's first values against what the table promises: mean and deviation within 5 standard errors, bounds.
static void check_first_weights(const Case* c) {
    Model m;
    Config config = config_at(c->config, 257, 64);
    model_build(&m, &config, 1, 1, 0);
    model_init(&m, 1);
    for (int i = 0; i < m.table.count; i++) {
        const Tensor* t = &m.table.tensors[i];
        if (t->init > CONSTANT) continue;           // kinds of the model's own, for a test of its own
        const real* p = m.param_memory + t->offset;
        double sum = 0, squares = 0, most = 0, n = t->size;
        for (size_t k = 0; k < t->size; k++) sum += p[k], most = fmax(most, fabs(p[k]));
        for (size_t k = 0; k < t->size; k++) squares += (p[k] - sum / n) * (p[k] - sum / n);
        double mean = sum / n, deviation = sqrt(squares / n);
        double wanted = t->init == NORMAL ? t->scale : t->init == UNIFORM ? t->scale / sqrt(3.0) : 0;
        int ok = t->init == CONSTANT ? deviation == 0 && p[0] == (real)t->scale
               : fabs(mean) <= 5 * wanted / sqrt(n) && fabs(deviation / wanted - 1) <= 5 / sqrt(2 * n)
                 && (t->init == UNIFORM ? most <= t->scale && most > t->scale * (1 - 12 / n) : most > 2 * wanted && most < 6 * wanted);
        if (!ok || i == 0) check(ok, "%s: %s starts with mean %.2e, deviation %.4f (%.4f wanted), at most %.4f", c->name, t->name, mean, deviation, wanted, most);
    }
    Model again, other;
    model_build(&again, &config, 1, 1, 0);
    model_build(&other, &config, 1, 1, 0);
    model_init(&again, 1);
    model_init(&other, 2);
    check(same_bits(m.param_memory, again.param_memory, m.table.total) && !same_bits(m.param_memory, other.param_memory, m.table.total),
          "%s: %d tensors start as the table says; a seed decides their bits", c->name, m.table.count);
    model_free(&m);
    model_free(&again);
    model_free(&other);
}

static void check_first_loss(const char* name, const Config* c) {
    enum { ROWS = 2, LONG = 64 };
    Model m;
    int in[ROWS * LONG], out[ROWS * LONG];
    uint64_t seed = 9;
    model_build(&m, c, ROWS, LONG, 0);
    model_init(&m, 1337);
    draw_tokens(in, ROWS * LONG, c->vocab, &seed);
    draw_tokens(out, ROWS * LONG, c->vocab, &seed);
    double bits = model_forward(&m, in, out, 0) / log(2);
    check(bits >= FIRST_LOSS_BITS[0] && bits <= FIRST_LOSS_BITS[1], "%s: %.2f bits per token before training; published %.1f to %.1f", name, bits, FIRST_LOSS_BITS[0], FIRST_LOSS_BITS[1]);
    model_free(&m);
}

// ----------------------------------------------------------------------------------------------------------------
// the optimizer and sampling

// Three AdamW steps against its equations in double: clipped at first (norm 100), not clipped later.
static void check_adamw(const Case* c) {
    Model m;
    model_build(&m, &c->config, 1, 1, 1);
    model_init(&m, 1);
    size_t n = m.table.total;
    double *p = (double*)allocate(3 * n * sizeof(double), "a test"), *am = p + n, *av = am + n, worst = 0, moved = 0;
    for (size_t i = 0; i < n; i++) p[i] = m.param_memory[i];
    const double lr = 0.01, decay = 0.1, clip = 1;
    for (int step = 1; step <= 3; step++) {
        for (size_t i = 0; i < n; i++) m.param_memory[i] = p[i];        // each step from the truth
        double size = step == 1 ? 100 : 0.5, norm = 0;
        for (int k = 0; k < m.table.count; k++) draw(m.grad_memory + m.table.tensors[k].offset, m.table.tensors[k].size, 1, &rng);
        norm = norm_of(m.grad_memory, n);
        for (size_t i = 0; i < n; i++) m.grad_memory[i] *= size / norm;
        double got = model_update(&m, lr, decay, clip);
        if (!(fabs(got / size - 1) <= 1e-5)) worst = NAN;
        for (int k = 0; k < m.table.count; k++) {
            const Tensor* t = &m.table.tensors[k];
            for (size_t i = t->offset; i < t->offset + t->size; i++) {
                double g = m.grad_memory[i] * (size > clip ? clip / size : 1), before = p[i];
                am[i] = 0.9 * am[i] + 0.1 * g;
                av[i] = 0.95 * av[i] + 0.05 * g * g;
                p[i] -= lr * (am[i] / (1 - pow(0.9, step)) / (sqrt(av[i] / (1 - pow(0.95, step))) + 1e-8) + (t->decay ? decay * before : 0));
                double error = fabs(m.param_memory[i] - p[i]) / lr;
                worst = worse(worst, error);
                moved = fmax(moved, fabs(p[i] - before));
            }
        }
    }
    check(worst <= 1e-4 && moved > lr / 2, "%s: three AdamW steps against the equations: error %.1e of a step", c->name, worst);
    model_free(&m);
    free(p);
}

static void check_sampling(void) {
    enum { V = 7, DRAWS = 200000 };
    const real logits[V] = {0.3f, -1, 2, 1.5f, 2, -30, 0};
    const struct { double temperature; int top_k; } settings[] = {{1, 0}, {0.7, 0}, {1, 3}, {2, 4}, {1, 1}, {0, 0}, {1, 99}};
    real scratch[V];
    for (size_t k = 0; k < sizeof settings / sizeof *settings; k++) {
        double temperature = settings[k].temperature, p[V], sum = 0, off = 0;
        int top_k = settings[k].top_k, counts[V] = {0};
        for (int v = 0; v < V; v++) {
            int larger = 0;
            for (int u = 0; u < V; u++) larger += logits[u] > logits[v];
            p[v] = temperature == 0 ? v == 2 : (top_k == 0 || larger < top_k) * exp(logits[v] / temperature);
            sum += p[v];
        }
        for (int i = 0; i < DRAWS; i++) counts[sample_token(logits, scratch, V, temperature, top_k, &rng)]++;
        for (int v = 0; v < V; v++) {
            double q = p[v] / sum, sigma = sqrt(DRAWS * q * (1 - q)) + 1e-9;
            off = fmax(off, fabs(counts[v] - DRAWS * q) / sigma);
        }
        check(off <= 5, "sampling at temperature %g, top-k %d: %.1f standard errors from softmax", temperature, top_k, off);
    }
}

// A NaN in the middle of what is compared must reach the check.
static void check_comparison(void) {
    const real right[3] = {1, 2, 3}, wrong[3] = {1, NAN, 3};
    check(largest_error(right, right, 3) == 0 && isnan(largest_error(wrong, right, 3)) && isnan(worse(worse(0, NAN), 1)), "a NaN among right numbers is an error");
}

int main(void) {
    flush_denormals();
    check_comparison();
    check_functions();
    check_denormals();
    set_threads(1);             // models this small only lose by a second one
    for (int i = 0; i < NUM_CASES; i++) check_not_finite(&CASES[i]);
#ifdef HAS_SCAN
    check_extreme_gates();
#endif
    check_sizes();
    for (int i = 0; i < NUM_CASES; i++) check_first_weights(&CASES[i]);
    for (size_t i = 0; i < sizeof SIZES / sizeof SIZES[0]; i++)
        if (SIZES[i].config.channels == 256) check_first_loss(SIZES[i].name, &SIZES[i].config);
    for (int i = 0; i < NUM_CASES; i++) check_adamw(&CASES[i]);
    check_sampling();
    return check_report();
}
