// layers.c: every x_forward against its x_backward, one at a time, in double: the sum of the outputs, each times a random
// number, is a loss whose gradient the backward must give. Gradients that are added to start from random values, and those
// that are written start from NaN. A model's header says which of these layers it has. Built like gradcheck.c.
#include "model.h"
#include "gradient.h"

static const double BOUND = 1e-6;
static uint64_t rng = 1;
static double step = 1e-3;            // of the differences

static real* random_array(size_t n, double deviation) {
    real* x = (real*)allocate(n * sizeof(real), "a test");
    draw(x, n, deviation, &rng);
    return x;
}

// What the layer under test reads and writes; each check sets what it needs.
static struct {
    size_t rows, B, T, C, IC, OC, ldw, V;
    int add, *tokens, *targets;
    double lo, hi, scale;
    real *x, *w, *b, *s0, *gb;          // inputs, which are differentiated
    real *start, *out, *weight;         // what out holds before; the output; the loss is sum out * weight
    real *mean, *rstd, *scratch;
} L;

static double weighted(size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += L.out[i] * L.weight[i];
    return sum;
}

// An input's gradient: `got` less what it held before (NULL: nothing), against differences. Returns the relative error.
static double compare(const real* got, const real* before, real* x, size_t n, double (*loss)(void)) {
    double* numeric = (double*)allocate(n * sizeof(double), "a test");
    real* analytic = copy_of(got, n);
    if (before) for (size_t i = 0; i < n; i++) analytic[i] -= before[i];
    numeric_gradient(numeric, x, n, loss, step);
    double error = gradient_error(analytic, numeric, n, 0);
    free(numeric);
    free(analytic);
    return error;
}

// ----------------------------------------------------------------------------------------------------------------

static double linear_loss(void) {
    memcpy(L.out, L.start, L.rows * L.OC * sizeof(real));
    linear_forward(L.out, L.x, L.w, L.b, L.rows, L.IC, L.OC, L.ldw, L.add);
    return weighted(L.rows * L.OC);
}

static void check_linear(size_t rows, size_t IC, size_t OC, size_t ldw, int add, int bias) {
    size_t nx = rows * IC, nw = (OC - 1) * ldw + IC, ny = rows * OC;
    L.rows = rows, L.IC = IC, L.OC = OC, L.ldw = ldw, L.add = add;
    L.x = random_array(nx, 1), L.w = random_array(nw, 1), L.b = bias ? random_array(OC, 1) : NULL;
    L.start = random_array(ny, 1), L.out = random_array(ny, 1), L.weight = random_array(ny, 1);
    real *dx = random_array(nx, 1), *dw = random_array(nw, 1), *db = random_array(OC, 1);
    real *dx0 = copy_of(dx, nx), *dw0 = copy_of(dw, nw), *db0 = copy_of(db, OC);
    linear_backward(dx, dw, bias ? db : NULL, L.weight, L.x, L.w, rows, IC, OC, ldw);
    double ex = compare(dx, dx0, L.x, nx, linear_loss), ew = compare(dw, dw0, L.w, nw, linear_loss);
    double eb = bias ? compare(db, db0, L.b, OC, linear_loss) : 0;
    int untouched = 1;          // the columns beside w, in a wider matrix, belong to someone else
    for (size_t o = 0; o < OC - 1; o++) untouched &= same_bits(dw + o * ldw + IC, dw0 + o * ldw + IC, ldw - IC);
    check(ex <= BOUND && ew <= BOUND && eb <= BOUND && untouched, "linear %zu x %zu -> %zu, ldw %zu%s%s: dx %.0e, dw %.0e, db %.0e", rows, IC, OC, ldw,
          add ? ", added" : "", bias ? "" : ", no bias", ex, ew, eb);
    // not wanted: only one of the three
    real* dx2 = copy_of(dx0, nx);
    linear_backward(dx2, NULL, NULL, L.weight, L.x, L.w, rows, IC, OC, ldw);
    if (!same_bits(dx2, dx, nx)) check(0, "linear: dx alone differs from dx with dw");
    free(L.x); free(L.w); free(L.b); free(L.start); free(L.out); free(L.weight);
    free(dx); free(dw); free(db); free(dx0); free(dw0); free(db0); free(dx2);
}

// ----------------------------------------------------------------------------------------------------------------

static double embedding_loss(void) {
    embedding_forward(L.out, L.tokens, L.w, L.scale, L.rows, L.C);
    return weighted(L.rows * L.C);
}

static void check_embedding(size_t rows, size_t V, size_t C, double scale) {
    L.rows = rows, L.C = C, L.scale = scale;
    L.tokens = (int*)allocate(rows * sizeof(int), "a test");
    for (size_t r = 0; r < rows; r++) L.tokens[r] = r % 3 ? (int)(rng_next(&rng) % V) : (int)V - 1;    // V-1 again and again
    L.w = random_array(V * C, 1), L.out = random_array(rows * C, NAN), L.weight = random_array(rows * C, 1);
    real *dw = random_array(V * C, 1), *dw0 = copy_of(dw, V * C);
    embedding_backward(dw, L.tokens, L.weight, scale, rows, C);
    double error = compare(dw, dw0, L.w, V * C, embedding_loss);
    check(error <= BOUND, "embedding of %zu tokens, V %zu, C %zu, scale %g: dwte %.0e", rows, V, C, scale, error);
    free(L.tokens); free(L.w); free(L.out); free(L.weight); free(dw); free(dw0);
}

// ----------------------------------------------------------------------------------------------------------------

#ifdef HAS_SILU
static double silu_loss(void) {
    silu_forward(L.out, L.x, L.rows, L.C);
    return weighted(L.rows * L.C);
}

static void check_silu(size_t rows, size_t C) {
    size_t n = rows * C;
    L.rows = rows, L.C = C;
    L.x = random_array(n, 3), L.out = random_array(n, NAN), L.weight = random_array(n, 1);
    real* d = copy_of(L.weight, n);
    silu_backward(d, L.x, rows, C);
    double error = compare(d, NULL, L.x, n, silu_loss), value = silu_loss(), naive = 0;
    for (size_t i = 0; i < n; i++) naive += L.weight[i] * L.x[i] / (1 + exp(-L.x[i]));
    check(error <= BOUND && fabs(value - naive) <= 1e-12 * fabs(naive), "silu %zu x %zu: dz %.0e", rows, C, error);
    free(L.x); free(L.out); free(L.weight); free(d);
}
#endif

// ----------------------------------------------------------------------------------------------------------------

#ifdef HAS_LAYERNORM
static double layernorm_loss(void) {
    layernorm_forward(L.out, L.mean, L.rstd, L.x, L.w, L.b, L.rows, L.C);
    return weighted(L.rows * L.C);
}

static void check_layernorm(size_t rows, size_t C, int weights, double size) {
    size_t n = rows * C;
    L.rows = rows, L.C = C;
    L.x = random_array(n, size), L.w = weights ? random_array(C, 1) : NULL, L.b = weights ? random_array(C, 1) : NULL;
    L.out = random_array(n, NAN), L.weight = random_array(n, 1), L.mean = random_array(rows, NAN), L.rstd = random_array(rows, NAN);
    layernorm_loss();
    double mean = 0, square = 0;        // of the last row, before w and b
    for (size_t c = 0; c < C; c++) {
        double y = weights ? (L.out[n - C + c] - L.b[c]) / L.w[c] : L.out[n - C + c];
        mean += y / C, square += y * y / C;
    }
    real *dx = random_array(n, 1), *dw = random_array(C, 1), *db = random_array(C, 1);
    real *dx0 = copy_of(dx, n), *dw0 = copy_of(dw, C), *db0 = copy_of(db, C);
    layernorm_backward(dx, weights ? dw : NULL, weights ? db : NULL, L.weight, L.x, L.mean, L.rstd, L.w, rows, C);
    step = 1e-3 * size;
    double ex = compare(dx, dx0, L.x, n, layernorm_loss);
    step = 1e-3;
    double ew = weights ? compare(dw, dw0, L.w, C, layernorm_loss) : 0, eb = weights ? compare(db, db0, L.b, C, layernorm_loss) : 0;
    check(ex <= BOUND && ew <= BOUND && eb <= BOUND, "layernorm %zu x %zu%s, x of size %g: dx %.0e, dw %.0e, db %.0e", rows, C,
          weights ? " with weights" : "", size, ex, ew, eb);
    if (size == 1) check(fabs(mean) <= 1e-9 && fabs(square - 1) <= 1e-3, "layernorm %zu x %zu: a row has mean %.0e and mean square %.5f", rows, C, mean, square);
    free(L.x); free(L.w); free(L.b); free(L.out); free(L.weight); free(L.mean); free(L.rstd);
    free(dx); free(dw); free(db); free(dx0); free(dw0); free(db0);
}

// A row of equal numbers has no deviation to divide by: eps must keep both passes finite.
static void check_layernorm_constant(void) {
    enum { C = 5 };
    real x[C] = {3, 3, 3, 3, 3}, d[C] = {1, 2, 3, 4, 5}, out[C], mean[1], rstd[1], dx[C] = {0};
    layernorm_forward(out, mean, rstd, x, NULL, NULL, 1, C);
    layernorm_backward(dx, NULL, NULL, d, x, mean, rstd, NULL, 1, C);
    check(norm_of(out, C) == 0 && norm_of(dx, C) > 0 && isfinite(norm_of(dx, C)), "layernorm of a constant row: 0, with a finite gradient");
}
#endif

// ----------------------------------------------------------------------------------------------------------------

#ifdef HAS_SCAN
static double scan_loss(void) {
    scan_forward(L.out, L.x, L.gb, L.s0, L.lo, L.hi, L.B, L.T, L.C);
    return weighted(L.B * L.T * L.C);
}

static void check_scan(size_t B, size_t T, size_t C, double lo, double hi) {
    size_t n = B * T * C;
    L.B = B, L.T = T, L.C = C, L.lo = lo, L.hi = hi;
    L.x = random_array(n, 1), L.gb = random_array(n, 1), L.s0 = random_array(B * C, 0.5);
    L.out = random_array(n, NAN), L.weight = random_array(n, 1);
    double loss = scan_loss(), naive = 0;
    for (size_t b = 0; b < B; b++)      // the equations once more, as they are printed in the paper
        for (size_t c = 0; c < C; c++)
            for (size_t t = 0, at = b * T * C + c; t < T; t++, at += C) {
                double A = lo + (hi - lo) / (1 + exp(-L.x[at])), before = t ? L.out[at - C] : L.s0[b * C + c];
                naive += L.weight[at] * (A * before + (1 - A) * tanh(L.gb[at]));
            }
    real *da = random_array(n, NAN), *db = random_array(n, NAN);
    scan_backward(da, db, L.weight, L.out, L.x, L.gb, L.s0, lo, hi, B, T, C);
    double ea = compare(da, NULL, L.x, n, scan_loss), eb = compare(db, NULL, L.gb, n, scan_loss);
    check(ea <= BOUND && eb <= BOUND && fabs(loss - naive) <= 1e-10 * fabs(naive), "scan (%zu,%zu,%zu), A in (%g,%g): dga %.0e, dgb %.0e", B, T, C, lo, hi, ea, eb);
    free(L.x); free(L.gb); free(L.s0); free(L.out); free(L.weight); free(da); free(db);
}
#endif

// ----------------------------------------------------------------------------------------------------------------

static size_t counted, correct;
static double head_value(void) {
    return L.scale * head_loss(NULL, NULL, L.x, L.w, L.targets, L.scratch, 1, L.rows, L.C, L.V, &counted, &correct);
}

enum { SOME_IGNORED, ONE_COUNTS, NONE_COUNT };
static void check_head_loss(size_t rows, size_t C, size_t V, double scale, int ignored) {
    size_t nx = rows * C, nw = V * C;
    L.rows = rows, L.C = C, L.V = V, L.scale = scale;
    L.x = random_array(nx, 1), L.w = random_array(nw, 1), L.scratch = random_array(smin(rows, HEAD_ROWS) * V, NAN);
    L.targets = (int*)allocate(rows * sizeof(int), "a test");
    for (size_t r = 0; r < rows; r++) {
        int counts = ignored == SOME_IGNORED ? r % 5 != 3 : ignored == ONE_COUNTS ? r == rows / 2 : 0;
        L.targets[r] = counts ? (int)(rng_next(&rng) % V) : -1;
    }
    real *dx = random_array(nx, NAN), *dw = random_array(nw, 1), *dw0 = copy_of(dw, nw);
    double loss = head_loss(dx, dw, L.x, L.w, L.targets, L.scratch, scale, rows, C, V, &counted, &correct);
    double naive = 0;
    size_t count = 0, hits = 0;
    for (size_t r = 0; r < rows; r++) {
        if (L.targets[r] < 0) continue;
        double sum = 0, z_target = 0, top = -INFINITY;
        size_t best = 0;
        for (size_t v = 0; v < V; v++) {
            double z = 0;
            for (size_t c = 0; c < C; c++) z += L.x[r * C + c] * L.w[v * C + c];
            sum += exp(z);
            if (z > top) top = z, best = v;
            if ((int)v == L.targets[r]) z_target = z;
        }
        naive += log(sum) - z_target;
        count++;
        hits += (int)best == L.targets[r];
    }
    char label[80];
    snprintf(label, sizeof label, "head_loss %zu x %zu -> %zu, %zu of %zu targets", rows, C, V, count, rows);
    check(counted == count && correct == hits, "%s: %zu counted, %zu correct", label, counted, correct);
    if (ignored == NONE_COUNT) {
        check(loss == 0 && norm_of(dx, nx) == 0 && same_bits(dw, dw0, nw), "%s: loss 0, gradients exactly 0", label);
    } else {
        double ex = compare(dx, NULL, L.x, nx, head_value), ew = compare(dw, dw0, L.w, nw, head_value);
        check(ex <= BOUND && ew <= BOUND && fabs(loss - naive / count) <= 1e-12 * loss, "%s: loss %.6f, dy %.0e, dhead %.0e", label, loss, ex, ew);
    }
    free(L.x); free(L.w); free(L.scratch); free(L.targets); free(dx); free(dw); free(dw0);
}

int main(void) {
    for (int bias = 0; bias < 2; bias++)
        for (int add = 0; add < 2; add++) {
            check_linear(1, 1, 1, 1, add, bias);
            check_linear(1, 5, 3, 9, add, bias);
            check_linear(2, 3, 7, 3, add, bias);
            check_linear(13, 17, 5, 19, add, bias);
            check_linear(9, 6, 65, 7, add, bias);
        }
    check_embedding(1, 1, 1, 1);
    check_embedding(19, 4, 5, 1);
    check_embedding(7, 5, BLOCK + 3, 2.5);
    for (size_t C = BLOCK - 1; C <= BLOCK + 1; C++) check_embedding(3, 2, C, 1);
#ifdef HAS_SILU
    check_silu(1, 1);
    check_silu(3, 17);
#endif
#ifdef HAS_LAYERNORM
    for (int weights = 0; weights < 2; weights++) {
        check_layernorm(1, 3, weights, 1);
        check_layernorm(5, 7, weights, 1);
        check_layernorm(2, BLOCK + 1, weights, 1);
        check_layernorm(3, 5, weights, 0.01);       // eps is a good part of the variance
    }
    check_layernorm_constant();
#endif
#ifdef HAS_SCAN
    static const double bands[5][2] = {{0.55, 0.88}, {0.90, 0.975}, {0.992, 0.999}, {0.55, 0.999}, {0, 1}};
    for (int k = 0; k < 5; k++) {
        check_scan(1, 1, 1, bands[k][0], bands[k][1]);
        check_scan(1, 2, 3, bands[k][0], bands[k][1]);
        check_scan(2, 13, 5, bands[k][0], bands[k][1]);
        check_scan(1, 3, BLOCK + 1, bands[k][0], bands[k][1]);
    }
#endif
    check_head_loss(1, 1, 2, 1, SOME_IGNORED);
    check_head_loss(13, 5, 7, 1, SOME_IGNORED);
    check_head_loss(13, 5, 7, 0.25, ONE_COUNTS);
    check_head_loss(13, 5, 7, 1, NONE_COUNT);
    check_head_loss(HEAD_ROWS, 3, 5, 1, SOME_IGNORED);
    check_head_loss(HEAD_ROWS + 1, 3, 5, 1, SOME_IGNORED);
    check_head_loss(2 * HEAD_ROWS + 7, 3, 5, 0.5, SOME_IGNORED);
    return check_report();
}
