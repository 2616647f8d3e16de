// gradcheck.c: the gradient of every parameter of the whole model, under every flag, against differences of the loss.
// Built in double (-DREAL=double) and without OpenMP: the models are far too small for threads, which threads.c covers.
// One row per tensor, one column per batch size; layers.c does the same for each layer.
#include "model.h"
#include "gradient.h"

enum { NUM_SHAPES = 4 };
static const int SHAPES[NUM_SHAPES][2] = {{1, 1}, {1, 2}, {2, 7}, {3, 5}};      // (B,T)
static const double BOUND = 1e-6, ZERO_BOUND = 1e-12;

static Model m;
static int tokens[64], targets[64];

// The loss from the same carried states each time: a forward pass moves them on.
static double loss(void) {
    draw_states(&m.acts, 99);
    return model_forward(&m, tokens, targets, 0);
}

// A model with parameters from N(0, 0.5), and a batch in which tokens repeat and every fifth target is ignored.
static void prepare(const Config* c, int B, int T, uint64_t seed) {
    model_build(&m, c, B, T, 1);
    draw_parameters(&m, 0.5, &seed);
    draw_tokens(tokens, B * T, c->vocab, &seed);
    draw_tokens(targets, B * T, c->vocab, &seed);
    for (int i = 3; i < B * T; i += 5) targets[i] = -1;
    if (B * T > 2) tokens[2] = tokens[0];
}

static void backward(void) {
    draw_states(&m.acts, 99);
    model_zero_grad(&m);
    model_forward(&m, tokens, targets, 1);
    model_backward(&m);
}

// All tensors of one configuration.
static void check_case(const Case* c) {
    double (*errors)[NUM_SHAPES] = NULL, *norms = NULL;
    int count = 0;
    printf("%s: relative error at (B,T) =", c->name);
    for (int s = 0; s < NUM_SHAPES; s++) {
        int B = SHAPES[s][0], T = SHAPES[s][1];
        printf("  (%d,%d)", B, T);
        prepare(&c->config, B, T, 7 + s);
        backward();
        count = m.table.count;
        errors = realloc(errors, count * sizeof *errors);
        norms = realloc(norms, count * sizeof *norms);
        double* numeric = calloc(m.table.total, sizeof(double));
        for (int i = 0; i < count; i++) {
            Tensor* t = &m.table.tensors[i];
            numeric_gradient(numeric + t->offset, m.param_memory + t->offset, t->size, loss, GRADIENT_STEP);
        }
        double all = numeric_norm(numeric, m.table.total);
        for (int i = 0; i < count; i++) {
            Tensor* t = &m.table.tensors[i];
            if (zero_by_structure(&c->config, t->name, T))      // both sides, as a share of all gradients
                errors[i][s] = norm_of(m.grad_memory + t->offset, t->size) / all <= ZERO_BOUND ? 0 : NAN;
            else
                errors[i][s] = gradient_error(m.grad_memory + t->offset, numeric + t->offset, t->size, all);
            norms[i] = numeric_norm(numeric + t->offset, t->size);
        }
        free(numeric);
        if (s < NUM_SHAPES - 1) model_free(&m);
    }
    printf("\n");
    for (int i = 0; i < count; i++) {
        int ok = 1;
        char row[128];
        size_t n = 0;
        for (int s = 0; s < NUM_SHAPES; s++) {
            ok &= errors[i][s] <= BOUND;
            n += snprintf(row + n, sizeof row - n, "  %.0e", errors[i][s]);
        }
        check(ok, "%-24s |gradient| %.2e %s", m.table.tensors[i].name, norms[i], row);
    }
    model_free(&m);
    free(errors);
    free(norms);
}

// Two half batches, each with grad_scale 1/2, must give the full batch's gradient. (Both halves have the same number of
// targets; each half's mean weighs the same.)
static void check_accumulation(const Case* c) {
    const int B = 4, T = 7, R = B * T;
    prepare(&c->config, B, T, 21);
    draw_tokens(targets, R, c->config.vocab, &(uint64_t){5});
    model_reset(&m.acts, NULL);
    model_zero_grad(&m);
    double full = model_forward(&m, tokens, targets, 1), halves = 0;
    model_backward(&m);
    Model half;
    model_build(&half, &c->config, B / 2, T, 1);
    memcpy(half.param_memory, m.param_memory, m.table.total * sizeof(real));
    half.grad_scale = 0.5;
    for (int k = 0; k < 2; k++) {
        model_reset(&half.acts, NULL);
        halves += model_forward(&half, tokens + k * R / 2, targets + k * R / 2, 1) / 2;
        model_backward(&half);
    }
    double error = relative_error(half.grad_memory, m.grad_memory, m.table.total) + fabs(halves / full - 1);
    check(error <= BOUND, "%s: two half batches against the full one: error %.0e", c->name, error);
    model_free(&half);
    model_free(&m);
}

// Evaluation must not disturb a training step: no gradient changes by a bit, and it needs no gradient memory at all.
static void check_evaluation(const Case* c) {
    prepare(&c->config, 2, 5, 3);
    backward();
    real* before = copy_of(m.grad_memory, m.table.total);
    double with = loss();
    int same = same_bits(before, m.grad_memory, m.table.total);
    Model eval;
    model_build(&eval, &c->config, 2, 5, 0);
    memcpy(eval.param_memory, m.param_memory, m.table.total * sizeof(real));
    draw_states(&eval.acts, 99);
    double without = model_forward(&eval, tokens, targets, 0);
    check(same && norm_of(before, m.table.total) > 0, "%s: a forward pass with train = 0 touches no gradient", c->name);
    check(with == without && eval.grad_memory == NULL, "%s: a model built without training gives the same loss, %.4f", c->name, without);
    free(before);
    model_free(&eval);
    model_free(&m);
}

// A gradient check that lets mistakes pass is worse than none: plant some.
static void check_the_check(void) {
    prepare(&CASES[0].config, 2, 7, 1);
    backward();
    Tensor* t = &m.table.tensors[m.table.count / 2];
    real* g = m.grad_memory + t->offset;
    double* numeric = calloc(t->size, sizeof(double));
    numeric_gradient(numeric, m.param_memory + t->offset, t->size, loss, GRADIENT_STEP);
    double all = norm_of(m.grad_memory, m.table.total), size = norm_of(g, t->size);
    real kept = g[0];
    check(gradient_error(g, numeric, t->size, all) <= 1e-9, "the numeric side is good to 1e-9: %.0e", gradient_error(g, numeric, t->size, all));
    g[0] = kept + 3e-6 * fmax(size, 1e-3 * all);
    check(!(gradient_error(g, numeric, t->size, all) <= BOUND), "planted: one number wrong by 3e-6 of its tensor is seen");
    g[0] = NAN;
    check(!(gradient_error(g, numeric, t->size, all) <= BOUND), "planted: a NaN is seen");
    memset(g, 0, t->size * sizeof(real));
    check(!(gradient_error(g, numeric, t->size, all) <= BOUND), "planted: zeros are seen");
    memset(numeric, 0, t->size * sizeof(double));
    check(!(gradient_error(g, numeric, t->size, 0) <= BOUND), "planted: zeros against zeros are no proof");
    free(numeric);
    model_free(&m);
}

int main(void) {
    for (int i = 0; i < NUM_CASES; i++) check_case(&CASES[i]);
    for (int i = 0; i < NUM_CASES; i++) check_accumulation(&CASES[i]);
    for (int i = 0; i < NUM_CASES; i++) check_evaluation(&CASES[i]);
    check_the_check();
    return check_report();
}
