// ssm_layers.c: Mamba, Mamba-2 and Hyena from the inside: every forward against the equations written out as plain loops, every
// backward against differences, chunk lengths, extreme steps, the FFT at every kind of length, one token at a time against
// all at once, and the statistics of the first weights. Built in double (-DREAL=double); built in float it holds the same
// forwards and the extreme cases to float's precision, and leaves the differences out.
#define TESTING
#ifdef TRAIN_FILE
#include TRAIN_FILE
#else                           // on its own: the shared parts from train_harmonic.c
#define Config HarmonicConfig
#include "../train_harmonic.c"
#undef Config
typedef struct { int channels, layers, seq, d_state, expand, conv, head_dim, chunk, emb; } Config;
static void rmsnorm_forward(real* out, real* rstd, const real* x, const real* w, size_t rows, size_t C) {
    for (size_t r = 0; r < rows; r++) {
        real sum = 0;
        for (size_t c = 0; c < C; c++) sum += x[r * C + c] * x[r * C + c];
        rstd[r] = 1 / sqrt(sum / C + (real)1e-5);
        for (size_t c = 0; c < C; c++) out[r * C + c] = x[r * C + c] * rstd[r] * w[c];
    }
}
static void rmsnorm_backward(real* dx, real* dw, const real* dout, const real* x, const real* rstd, const real* w, size_t rows, size_t C) {
    for (size_t r = 0; r < rows; r++) {
        real s = rstd[r], mean = 0;
        for (size_t c = 0; c < C; c++) mean += dout[r * C + c] * w[c] * x[r * C + c] * s / C;
        for (size_t c = 0; c < C; c++) {
            dx[r * C + c] += s * (dout[r * C + c] * w[c] - x[r * C + c] * s * mean);
            dw[c] += dout[r * C + c] * x[r * C + c] * s;
        }
    }
}
static void swiglu_forward(real* out, const real* z, const real* up, size_t rows, size_t C) {
    for (size_t i = 0; i < rows * C; i++) out[i] = z[i] * sigmoid(z[i]) * up[i];
}
static void swiglu_backward(real* d, real* dup, const real* z, const real* up, size_t rows, size_t C) {
    for (size_t i = 0; i < rows * C; i++) {
        real sg = sigmoid(z[i]);
        dup[i] = d[i] * z[i] * sg;
        d[i] *= up[i] * sg * (1 + z[i] * (1 - sg));
    }
}
#include "../train_baselines_ssm.part.c"
#endif
#include "check.h"
#include "gradient.h"

enum { DOUBLE = sizeof(real) == 8 };
static const double BOUND = 1e-6;                       // of a gradient
static const double EXACT = DOUBLE ? 1e-12 : 2e-5;      // of a forward pass against plain loops, relative to its norm
static uint64_t rng = 1;

static real* array(size_t n, double deviation) {
    real* x = (real*)allocate(n * sizeof(real), "a test");
    for (size_t i = 0; i < n; i++) x[i] = deviation > 0 ? deviation * rng_normal(&rng) : deviation;
    return x;
}

static real* copy_of(const real* x, size_t n) { return (real*)memcpy(allocate(n * sizeof(real), "a copy"), x, n * sizeof(real)); }
static int same_bits(const real* a, const real* b, size_t n) { return memcmp(a, b, n * sizeof(real)) == 0; }

static double norm_of(const real* x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sqrt(sum);
}

// ‖a - b‖ / ‖b‖; NaN, which fails, where b is zero
static double difference(const real* a, const real* b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    return sqrt(sum) / norm_of(b, n);
}

static int all_finite(const real* x, size_t n) {
    for (size_t i = 0; i < n; i++) if (!isfinite(x[i])) return 0;
    return 1;
}

// Inputs of the layer under test, in which it is differentiated, beside what its backward says. `before` is what an
// added-to gradient held (NULL: it was to be written, and held NaN).
typedef struct { const char* name; real *x, *grad; size_t n; int added; } Input;

// All inputs at once: the largest error, checked. The loss is sum out * weight, and backward has been run on weight.
static double step = 1e-3;       // of the differences
static void check_gradients(const char* what, double (*loss)(void), Input* in, int count) {
    if (!DOUBLE) return;
    double* numeric[32];
    double all = 0, worst = 0;
    const char* where = "";
    for (int i = 0; i < count; i++) {
        numeric[i] = (double*)allocate(in[i].n * sizeof(double), "a test");
        numeric_gradient(numeric[i], in[i].x, in[i].n, loss, step);
        all = hypot(all, numeric_norm(numeric[i], in[i].n));
    }
    for (int i = 0; i < count; i++) {
        double e = gradient_error(in[i].grad, numeric[i], in[i].n, all);
        if (!(e <= worst) && !isnan(worst)) { worst = e; where = in[i].name; }
        free(numeric[i]);
    }
    check(worst <= BOUND && all > 0, "%s: gradients of %d inputs, worst %.0e (%s)", what, count, worst, where);
}

static double weighted(const real* out, const real* weight, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)out[i] * weight[i];
    return sum;
}

// A gradient that is added to starts from this; it must come out with this much more.
static const double START = 0.125;
static real* started(size_t n) {
    real* x = array(n, 0);
    for (size_t i = 0; i < n; i++) x[i] = START;
    return x;
}
static real* without_start(real* x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] -= START;
    return x;
}
static real* unset(size_t n) { return array(n, NAN); }

static char text[256];
__attribute__((format(printf, 1, 2)))
static const char* say(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return text;
}

// ----------------------------------------------------------------------------------------------------------------
// small pieces

static void check_pieces(void) {
    double worst = 0, slope = 0;
    for (double at = -80; at <= 200; at += 0.0137) {
        real x = at;
        double want = x > 0 ? x + log1p(exp(-(double)x)) : log1p(exp((double)x)), e = fabs(softplus(x) / want - 1);
        worst = worse(worst, e);
        double d = ((double)softplus(x + 1e-2) - softplus(x - 1e-2)) / 2e-2;
        if (x > -3 && x < 80) slope = worse(slope, fabs(d - sigmoid(x)));
    }
    check(worst <= (DOUBLE ? 1e-13 : 5e-7), "softplus from -80 to 200: relative error %.0e", worst);
    check(slope <= (DOUBLE ? 1e-4 : 1e-3), "its slope is sigmoid: %.0e", slope);
    volatile real nan = NAN;            // a compiler that knew it could assume anything of its conversion to an integer
    check(softplus(1e4) == (real)1e4 && isfinite(softplus(3e38)) && softplus(-1e4) >= 0 && isfinite(softplus(-3e38)) && isnan(softplus(nan)),
          "softplus far out: neither overflow nor NaN, and NaN stays");
}

// ----------------------------------------------------------------------------------------------------------------
// short convolution

static struct { size_t B, T, C, K; real *x, *w, *bias, *out, *weight; } V;

static double conv_loss(void) {
    short_conv_forward(V.out, V.x, V.w, V.bias, NULL, V.B, V.T, V.C, V.K);
    return weighted(V.out, V.weight, V.B * V.T * V.C);
}

static void check_conv(size_t B, size_t T, size_t C, size_t K) {
    size_t n = B * T * C;
    V.B = B, V.T = T, V.C = C, V.K = K;
    V.x = array(n, 1), V.w = array(C * K, 1), V.bias = array(C, 1), V.out = unset(n), V.weight = array(n, 1);
    conv_loss();
    real* want = unset(n);
    for (size_t b = 0; b < B; b++) for (size_t t = 0; t < T; t++) for (size_t c = 0; c < C; c++) {
        double sum = V.bias[c];
        for (size_t k = 0; k < K; k++) if (t + k >= K - 1) sum += (double)V.w[c * K + k] * V.x[(b * T + t + k - (K - 1)) * C + c];
        want[(b * T + t) * C + c] = sum;
    }
    check_error(say("short convolution B %zu T %zu C %zu K %zu", B, T, C, K), difference(V.out, want, n), EXACT);
    real *dx = unset(n), *dw = started(C * K), *db = started(C);
    short_conv_backward(dx, dw, db, V.weight, V.x, V.w, B, T, C, K);
    Input in[] = {{"x", V.x, dx, n, 0}, {"w", V.w, without_start(dw, C * K), C * K, 1}, {"bias", V.bias, without_start(db, C), C, 1}};
    check_gradients(say("short convolution B %zu T %zu C %zu K %zu", B, T, C, K), conv_loss, in, 3);

    // in pieces of 1, 2, 3, ... tokens with the window carried, for the first sequence alone
    real *window = array((K - 1) * C + 1, 0), *pieces = unset(T * C);
    for (size_t t = 0, len = 1; t < T; t += len, len++)
        short_conv_forward(pieces + t * C, V.x + t * C, V.w, V.bias, window, 1, smin(len, T - t), C, K);
    check_error("in pieces, with the window carried", difference(pieces, want, T * C), EXACT);
    free(V.x); free(V.w); free(V.bias); free(V.out); free(V.weight); free(want); free(dx); free(dw); free(db); free(window); free(pieces);
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba's scan

static struct { size_t B, T, E, N, L; real *x, *dt, *bc, *a_log, *b_dt, *d, *y, *starts, *weight; } S;

static double scan_loss(void) {
    selective_scan_forward(S.y, S.starts, S.x, S.dt, S.bc, S.a_log, S.b_dt, S.d, NULL, S.L, S.B, S.T, S.E, S.N);
    return weighted(S.y, S.weight, S.B * S.T * S.E);
}

static void scan_make(size_t B, size_t T, size_t E, size_t N) {
    S.B = B, S.T = T, S.E = E, S.N = N;
    S.x = array(B * T * E, 1), S.dt = array(B * T * E, 1), S.bc = array(B * T * 2 * N, 1), S.a_log = array(E * N, 0.5);
    S.b_dt = array(E, 1), S.d = array(E, 1), S.y = unset(B * T * E), S.starts = unset(B * T * N * E), S.weight = array(B * T * E, 1);
}
static void scan_free(void) {
    free(S.x); free(S.dt); free(S.bc); free(S.a_log); free(S.b_dt); free(S.d); free(S.y); free(S.starts); free(S.weight);
}

// The equations, in double, one number at a time.
static void scan_plain(real* y) {
    size_t T = S.T, E = S.E, N = S.N;
    double* h = (double*)allocate(N * sizeof(double), "a test");
    for (size_t b = 0; b < S.B; b++) for (size_t e = 0; e < E; e++) {
        memset(h, 0, N * sizeof(double));
        for (size_t t = 0; t < T; t++) {
            double x = S.x[(b * T + t) * E + e], pre = (double)S.dt[(b * T + t) * E + e] + S.b_dt[e], sum = S.d[e] * x;
            double delta = pre > 30 ? pre : log1p(exp(pre));
            for (size_t n = 0; n < N; n++) {
                h[n] = exp(-delta * exp((double)S.a_log[e * N + n])) * h[n] + delta * S.bc[(b * T + t) * 2 * N + n] * x;
                sum += S.bc[(b * T + t) * 2 * N + N + n] * h[n];
            }
            y[(b * T + t) * E + e] = sum;
        }
    }
    free(h);
}

typedef struct { real *dx, *ddt, *dbc, *da, *db, *dd; } ScanGrads;
static ScanGrads scan_gradients(void) {
    size_t R = S.B * S.T;
    ScanGrads g = {unset(R * S.E), unset(R * S.E), unset(R * 2 * S.N), started(S.E * S.N), started(S.E), started(S.E)};
    real* work = unset(scan_work(S.L, S.B, S.E, S.N));
    scan_loss();
    selective_scan_backward(g.dx, g.ddt, g.dbc, g.da, g.db, g.dd, S.weight, S.x, S.dt, S.bc, S.starts, S.a_log, S.b_dt, S.d, work,
                            S.L, S.B, S.T, S.E, S.N);
    without_start(g.da, S.E * S.N); without_start(g.db, S.E); without_start(g.dd, S.E);
    free(work);
    return g;
}
static void scan_grads_free(ScanGrads g) { free(g.dx); free(g.ddt); free(g.dbc); free(g.da); free(g.db); free(g.dd); }

static void check_scan_gradients(size_t B, size_t T, size_t E, size_t N, size_t L) {
    scan_make(B, T, E, N);
    S.L = L;
    ScanGrads g = scan_gradients();
    size_t R = B * T;
    Input in[] = {{"x", S.x, g.dx, R * E, 0}, {"dt", S.dt, g.ddt, R * E, 0}, {"B, C", S.bc, g.dbc, R * 2 * N, 0},
                  {"a_log", S.a_log, g.da, E * N, 1}, {"b_dt", S.b_dt, g.db, E, 1}, {"D", S.d, g.dd, E, 1}};
    check_gradients(say("scan B %zu T %zu E %zu N %zu L %zu", B, T, E, N, L), scan_loss, in, 6);
    scan_grads_free(g);
    scan_free();
}

// The same for every chunk length, and equal to the plain recurrence; in pieces with the state carried as well.
static void check_scan_chunks(size_t B, size_t T, size_t E, size_t N) {
    static const size_t lengths[] = {0, 1, 40, 50, 64};
    scan_make(B, T, E, N);
    size_t R = B * T;
    real *want = unset(R * E), *first = NULL;
    ScanGrads g0 = {0};
    scan_plain(want);
    for (int i = 0; i < 5; i++) {
        S.L = lengths[i] ? smin(lengths[i], T) : T;
        ScanGrads g = scan_gradients();
        check_error(say("scan B %zu T %zu E %zu N %zu in chunks of %zu, plain recurrence", B, T, E, N, S.L), difference(S.y, want, R * E), EXACT);
        if (i == 0) { first = copy_of(S.y, R * E); g0 = g; continue; }
        double e = worse(worse(difference(g.dx, g0.dx, R * E), difference(g.ddt, g0.ddt, R * E)),
                        worse(worse(difference(g.dbc, g0.dbc, R * 2 * N), T > 1 ? difference(g.da, g0.da, E * N) : 0), difference(g.dd, g0.dd, E)));
        check(same_bits(S.y, first, R * E), "the same bits as in one chunk");
        check_error("gradients as in one chunk", e, DOUBLE ? 1e-13 : 1e-5);
        scan_grads_free(g);
    }
    scan_grads_free(g0);
    real *state = array(N * E, 0), *pieces = unset(T * E);
    for (size_t t = 0, len = 1; t < T; t += len, len++)
        selective_scan_forward(pieces + t * E, S.starts, S.x + t * E, S.dt + t * E, S.bc + t * 2 * N, S.a_log, S.b_dt, S.d, state,
                               3, 1, smin(len, T - t), E, N);
    check(same_bits(pieces, first, T * E), "in pieces with the state carried: the same bits");
    free(state); free(pieces); free(want); free(first);
    scan_free();
}

// Steps of 1e-30 and 1e4 beside each other, decays of 0 and 1: all finite, and right.
static void check_scan_extremes(void) {
    size_t B = 1, T = 131, E = 35, N = 16, R = B * T;
    scan_make(B, T, E, N);
    for (size_t i = 0; i < R * E; i++) S.dt[i] = i % 3 == 0 ? -70 : i % 3 == 1 ? 1e4 : i % 7;
    for (size_t i = 0; i < E * N; i++) S.a_log[i] = i % 5 == 0 ? -60 : i % 5 == 1 ? 20 : 0;
    real* want = unset(R * E);
    scan_plain(want);
    for (S.L = 1; S.L <= T; S.L = S.L == 1 ? 50 : S.L == 50 ? T : T + 1) {
        ScanGrads g = scan_gradients();
        check(all_finite(S.y, R * E) && all_finite(g.dx, R * E) && all_finite(g.ddt, R * E) && all_finite(g.dbc, R * 2 * N) && all_finite(g.da, E * N) && all_finite(g.dd, E)
              && difference(S.y, want, R * E) <= EXACT, "scan: extreme steps, chunks of %zu: finite, error %.0e", S.L, difference(S.y, want, R * E));
        scan_grads_free(g);
    }
    // decays so fast that nothing is left of the past: then their rate cannot matter
    for (size_t i = 0; i < R * E; i++) S.dt[i] = 1;
    for (size_t i = 0; i < E * N; i++) S.a_log[i] = 86;
    S.L = 50;
    ScanGrads g = scan_gradients();
    scan_plain(want);
    double none = norm_of(g.da, E * N), dx = norm_of(g.dx, R * E);
    check(none == 0 && dx > 0 && difference(S.y, want, R * E) <= EXACT, "scan: rates of e^86: the past is gone, |dA_log| %.0e", none);
    scan_grads_free(g);
    free(want);
    scan_free();
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba-2's scan

static struct { size_t B, T, H, P, N, L; real *xbc, *dt, *a_log, *b_dt, *d, *y, *states, *weight; } D;

static double ssd_loss(void) {
    ssd_forward(D.y, D.states, D.xbc, D.dt, D.a_log, D.b_dt, D.d, NULL, D.L, D.B, D.T, D.H, D.P, D.N);
    return weighted(D.y, D.weight, D.B * D.T * D.H * D.P);
}
static void ssd_make(size_t B, size_t T, size_t H, size_t P, size_t N) {
    size_t E = H * P, R = B * T;
    D.B = B, D.T = T, D.H = H, D.P = P, D.N = N;
    D.xbc = array(R * (E + 2 * N), 1), D.dt = array(R * H, 1), D.a_log = array(H, 0.5), D.b_dt = array(H, 1), D.d = array(H, 1);
    D.y = unset(R * E), D.states = unset((R + B) * E * N), D.weight = array(R * E, 1);
}
static void ssd_free(void) {
    free(D.xbc); free(D.dt); free(D.a_log); free(D.b_dt); free(D.d); free(D.y); free(D.states); free(D.weight);
}

static void ssd_plain(real* y) {
    size_t E = D.H * D.P, N = D.N, W = E + 2 * N;
    double* state = (double*)allocate(N * sizeof(double), "a test");
    for (size_t b = 0; b < D.B; b++) for (size_t e = 0; e < E; e++) {
        size_t h = e / D.P;
        memset(state, 0, N * sizeof(double));
        for (size_t t = 0; t < D.T; t++) {
            const real* row = D.xbc + (b * D.T + t) * W;
            double pre = (double)D.dt[(b * D.T + t) * D.H + h] + D.b_dt[h], delta = pre > 30 ? pre : log1p(exp(pre));
            double a = exp(-delta * exp((double)D.a_log[h])), sum = D.d[h] * row[e];
            for (size_t n = 0; n < N; n++) {
                state[n] = a * state[n] + delta * row[e] * row[E + n];
                sum += row[E + N + n] * state[n];
            }
            y[(b * D.T + t) * E + e] = sum;
        }
    }
    free(state);
}

typedef struct { real *dxbc, *ddt, *da, *db, *dd; } SsdGrads;
static SsdGrads ssd_gradients(void) {
    size_t R = D.B * D.T, E = D.H * D.P, H = D.H;
    SsdGrads g = {unset(R * (E + 2 * D.N)), unset(R * H), started(H), started(H), started(H)};
    real* work = unset(ssd_work(D.L, D.B, D.T, H, D.P, D.N));
    ssd_loss();
    ssd_backward(g.dxbc, g.ddt, g.da, g.db, g.dd, D.weight, D.states, D.xbc, D.dt, D.a_log, D.b_dt, D.d, work, D.L, D.B, D.T, H, D.P, D.N);
    without_start(g.da, H); without_start(g.db, H); without_start(g.dd, H);
    free(work);
    return g;
}
static void ssd_grads_free(SsdGrads g) { free(g.dxbc); free(g.ddt); free(g.da); free(g.db); free(g.dd); }

static void check_ssd_gradients(size_t B, size_t T, size_t H, size_t P, size_t N, size_t L) {
    ssd_make(B, T, H, P, N);
    D.L = L;
    SsdGrads g = ssd_gradients();
    size_t R = B * T, W = H * P + 2 * N;
    Input in[] = {{"x, B, C", D.xbc, g.dxbc, R * W, 0}, {"dt", D.dt, g.ddt, R * H, 0}, {"a_log", D.a_log, g.da, H, 1},
                  {"b_dt", D.b_dt, g.db, H, 1}, {"D", D.d, g.dd, H, 1}};
    check_gradients(say("ssd B %zu T %zu H %zu P %zu N %zu L %zu", B, T, H, P, N, L), ssd_loss, in, 5);
    ssd_grads_free(g);
    ssd_free();
}

static void check_ssd_chunks(size_t B, size_t T, size_t H, size_t P, size_t N) {
    static const size_t lengths[] = {0, 1, 40, 50, 64};
    size_t R = B * T, E = H * P, W = E + 2 * N;
    ssd_make(B, T, H, P, N);
    real* want = unset(R * E);
    SsdGrads g0 = {0};
    ssd_plain(want);
    for (int i = 0; i < 5; i++) {
        D.L = lengths[i] ? smin(lengths[i], T) : T;
        SsdGrads g = ssd_gradients();
        check_error(say("ssd B %zu T %zu H %zu P %zu N %zu in chunks of %zu, plain recurrence", B, T, H, P, N, D.L), difference(D.y, want, R * E), EXACT);
        if (i == 0) { g0 = g; continue; }
        double e = worse(worse(difference(g.dxbc, g0.dxbc, R * W), difference(g.ddt, g0.ddt, R * H)),
                        worse(T > 1 ? difference(g.da, g0.da, H) : 0, difference(g.dd, g0.dd, H)));
        check_error("gradients as in one chunk", e, DOUBLE ? 1e-11 : 1e-4);
        ssd_grads_free(g);
    }
    ssd_grads_free(g0);
    real *state = array(N * E, 0), *pieces = unset(T * E);
    for (size_t t = 0, len = 1; t < T; t += len, len++)
        ssd_forward(pieces + t * E, D.states, D.xbc + t * W, D.dt + t * H, D.a_log, D.b_dt, D.d, state, 3, 1, smin(len, T - t), H, P, N);
    check_error("in pieces with the state carried", difference(pieces, want, T * E), EXACT);
    free(state); free(pieces); free(want);
    ssd_free();
}

// With one decay and one step size per head, Mamba's equations are Mamba-2's: the two programs against each other, backwards too.
static void check_ssd_is_mamba(void) {
    size_t B = 2, T = 71, H = 3, P = 5, N = 7, E = H * P, W = E + 2 * N, R = B * T;
    ssd_make(B, T, H, P, N);
    scan_make(B, T, E, N);
    D.L = 16, S.L = 10;
    memcpy(S.weight, D.weight, R * E * sizeof(real));
    for (size_t r = 0; r < R; r++) {
        memcpy(S.x + r * E, D.xbc + r * W, E * sizeof(real));
        memcpy(S.bc + r * 2 * N, D.xbc + r * W + E, 2 * N * sizeof(real));
        for (size_t e = 0; e < E; e++) S.dt[r * E + e] = D.dt[r * H + e / P];
    }
    for (size_t e = 0; e < E; e++) {
        S.b_dt[e] = D.b_dt[e / P], S.d[e] = D.d[e / P];
        for (size_t n = 0; n < N; n++) S.a_log[e * N + n] = D.a_log[e / P];
    }
    ScanGrads m = scan_gradients();
    SsdGrads g = ssd_gradients();
    check_error("ssd = Mamba's scan with one decay per head: y", difference(D.y, S.y, R * E), EXACT);
    real *xbc = unset(R * W), *da = array(H, 0), *dd = array(H, 0), *ddt = array(R * H, 0);
    for (size_t r = 0; r < R; r++) {
        memcpy(xbc + r * W, m.dx + r * E, E * sizeof(real));
        memcpy(xbc + r * W + E, m.dbc + r * 2 * N, 2 * N * sizeof(real));
        for (size_t e = 0; e < E; e++) ddt[r * H + e / P] += m.ddt[r * E + e];
    }
    for (size_t e = 0; e < E; e++) { dd[e / P] += m.dd[e]; for (size_t n = 0; n < N; n++) da[e / P] += m.da[e * N + n]; }
    double bound = DOUBLE ? 1e-12 : 1e-4;
    check_error("its dx, dB, dC", difference(g.dxbc, xbc, R * W), bound);
    check_error("its ddt", difference(g.ddt, ddt, R * H), bound);
    check_error("its dA_log", difference(g.da, da, H), bound);
    check_error("its dD", difference(g.dd, dd, H), bound);
    free(xbc); free(da); free(dd); free(ddt);
    scan_grads_free(m); ssd_grads_free(g);
    scan_free(); ssd_free();
}

// A step of 1e4 in mid-chunk, beside steps whose decay is 1: differences of running sums would lose the small steps after
// it, so the values are held to the same bound as all others; gradients finite, and right in double.
static void check_ssd_extremes(void) {
    size_t B = 1, T = 131, H = 3, P = 4, N = 5, R = B * T, E = H * P, W = E + 2 * N;
    ssd_make(B, T, H, P, N);
    for (size_t i = 0; i < R * H; i++) D.dt[i] = i % 31 == 7 ? 1e4 : i % 5 == 0 ? -70 : (double)(i % 7) - 5;
    D.a_log[0] = -60; D.a_log[1] = 0; D.a_log[2] = 12;
    real* want = unset(R * E);
    ssd_plain(want);
    for (D.L = 1; D.L <= T; D.L = D.L == 1 ? 50 : D.L == 50 ? T : T + 1) {
        SsdGrads g = ssd_gradients();
        check(all_finite(D.y, R * E) && all_finite(g.dxbc, R * W) && all_finite(g.ddt, R * H) && all_finite(g.da, H) && all_finite(g.dd, H)
              && difference(D.y, want, R * E) <= EXACT, "ssd: extreme steps, chunks of %zu: finite, error %.0e", D.L, difference(D.y, want, R * E));
        ssd_grads_free(g);
    }
    // for each token alone, since the large ones would hide the small: heads with decays of 0.1 behind a step of 1e4
    for (size_t i = 0; i < R * H; i++) D.dt[i] = i / H == 20 ? 1e4 : -2;
    D.a_log[0] = D.a_log[1] = D.a_log[2] = 0;
    ssd_plain(want);
    D.L = T;
    ssd_loss();
    double worst = 0;
    for (size_t t = 21; t < T; t++) worst = worse(worst, difference(D.y + t * E, want + t * E, E));
    check_error("ssd: tokens after a step of 1e4, each", worst, DOUBLE ? 1e-12 : 1e-5);
    for (size_t i = 0; i < R * H; i++) D.dt[i] = 1;
    D.a_log[0] = D.a_log[1] = D.a_log[2] = 86;
    for (D.L = 1; D.L <= 50; D.L += 49) {
        SsdGrads g = ssd_gradients();
        ssd_plain(want);
        double none = norm_of(g.da, H), dx = norm_of(g.dxbc, R * W);
        check(none == 0 && dx > 0 && difference(D.y, want, R * E) <= EXACT, "ssd: rates of e^86, chunks of %zu: the past is gone, |dA_log| %.0e", D.L, none);
        ssd_grads_free(g);
    }
    free(want);
    ssd_free();
}

// ----------------------------------------------------------------------------------------------------------------
// Hyena's long convolution

static struct { size_t B, T, C, N; real *p, *k, *d, *tw, *out, *weight; } F;

static double long_conv_loss(void) {
    long_conv_forward(F.out, F.p, F.k, F.d, F.tw, F.N, F.B, F.T, F.C);
    return weighted(F.out, F.weight, F.B * F.T * F.C);
}
static void long_conv_make(size_t B, size_t T, size_t C, size_t N) {
    F.B = B, F.T = T, F.C = C, F.N = N;
    F.p = array(B * T * C, 1), F.k = array(T * C, 1), F.d = array(C, 1), F.out = unset(B * T * C), F.weight = array(B * T * C, 1);
    F.tw = unset(2 * N);
    fft_twiddles(F.tw, N);
}
static void long_conv_free(void) { free(F.p); free(F.k); free(F.d); free(F.tw); free(F.out); free(F.weight); }

static void long_conv_plain(real* out) {
    size_t T = F.T, C = F.C;
    for (size_t b = 0; b < F.B; b++) for (size_t t = 0; t < T; t++) for (size_t c = 0; c < C; c++) {
        double sum = F.d[c] * F.p[(b * T + t) * C + c];
        for (size_t s = 0; s <= t; s++) sum += (double)F.k[(t - s) * C + c] * F.p[(b * T + s) * C + c];
        out[(b * T + t) * C + c] = sum;
    }
}

static void check_long_conv(size_t B, size_t T, size_t C) {
    long_conv_make(B, T, C, fft_length(T));
    size_t n = B * T * C;
    real *want = unset(n), *dp = unset(n), *dk = unset(T * C), *dd = started(C);
    long_conv_plain(want);
    long_conv_loss();
    double e = difference(F.out, want, n);
    long_conv_backward(dp, dk, dd, F.weight, F.p, F.k, F.d, F.tw, F.N, B, T, C);
    without_start(dd, C);
    // both correlations directly
    real *want_p = array(n, 0), *want_k = array(T * C, 0), *want_d = array(C, 0);
    for (size_t b = 0; b < B; b++) for (size_t t = 0; t < T; t++) for (size_t c = 0; c < C; c++) {
        real g = F.weight[(b * T + t) * C + c];
        want_p[(b * T + t) * C + c] += F.d[c] * g;
        want_d[c] += F.p[(b * T + t) * C + c] * g;
        for (size_t s = 0; s <= t; s++) {
            want_p[(b * T + s) * C + c] += F.k[(t - s) * C + c] * g;
            want_k[(t - s) * C + c] += F.p[(b * T + s) * C + c] * g;
        }
    }
    double ep = difference(dp, want_p, n), ek = difference(dk, want_k, T * C), ed = difference(dd, want_d, C), bound = DOUBLE ? 1e-12 : 1e-5;
    check(e <= bound && ep <= bound && ek <= bound && ed <= bound, "long convolution B %zu T %zu C %zu by FFT and directly: %.0e, dp %.0e, dk %.0e, dD %.0e",
          B, T, C, e, ep, ek, ed);
    free(want); free(dp); free(dk); free(dd); free(want_p); free(want_k); free(want_d);
    long_conv_free();
}

// The last third changes a lot: nothing may be seen of it before. Relative to the output's rms. N: 0 takes the right length.
static double leak(size_t T, size_t C, size_t N) {
    long_conv_make(1, T, C, N ? N : fft_length(T));
    size_t cut = T - T / 3 - 1;
    long_conv_loss();
    real* before = copy_of(F.out, T * C);
    for (size_t i = cut * C; i < T * C; i++) F.p[i] = 10 * rng_normal(&rng);
    long_conv_loss();
    double worst = 0;
    for (size_t i = 0; i < cut * C; i++) worst = worse(worst, fabs((double)F.out[i] - before[i]));
    worst /= norm_of(before, T * C) / sqrt((double)T * C);
    if (!(difference(F.out, before, T * C) > 0.1)) worst = NAN;         // the end itself must have changed
    free(before);
    long_conv_free();
    return worst;
}

static void check_long_convs(void) {
    static const size_t lengths[] = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 61, 127, 128, 129, 251, 255, 256, 257, 500};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) check_long_conv(i % 3 + 1, lengths[i], i % 2 ? 5 : 2 * WIDTH + 3);
    check_long_conv(1, 2049, 3);
    check_long_conv(2, 20, 4 * WIDTH);
    check_long_conv(2, 20, 1);
    for (size_t T = 1; T <= 70; T++)
        if (!(fft_length(T) >= 2 * T && fft_length(T) < 4 * T + 1 && (fft_length(T) & (fft_length(T) - 1)) == 0)) check(0, "fft_length(%zu) = %zu", T, fft_length(T));
    double bound = DOUBLE ? 1e-12 : 1e-5;
    check_error("causal at T = 3", leak(3, 3, 0), bound);
    check_error("causal at T = 64", leak(64, 37, 0), bound);
    check_error("causal at T = 101", leak(101, 5, 0), bound);
    check_error("causal at T = 1000", leak(1000, 3, 0), bound);
    check(leak(64, 5, 64) > 1e-2, "planted: a transform of length T wraps the future around, and is seen");
    static const size_t small[][3] = {{1, 1, 3}, {2, 2, 5}, {2, 7, 3}, {1, 9, 2 * WIDTH + 1}};
    for (int i = 0; i < 4; i++) {
        size_t B = small[i][0], T = small[i][1], C = small[i][2], n = B * T * C;
        long_conv_make(B, T, C, fft_length(T));
        real *dp = unset(n), *dk = unset(T * C), *dd = started(C);
        long_conv_backward(dp, dk, dd, F.weight, F.p, F.k, F.d, F.tw, F.N, B, T, C);
        Input in[] = {{"p", F.p, dp, n, 0}, {"k", F.k, dk, T * C, 0}, {"D", F.d, without_start(dd, C), C, 1}};
        check_gradients(say("long convolution B %zu T %zu C %zu", B, T, C), long_conv_loss, in, 3);
        free(dp); free(dk); free(dd);
        long_conv_free();
    }
}

// Positions, bands and window against the formulas written out.
static void check_filter_shape(void) {
    enum { S = 37, EMB = 33, C = 6 };
    real *z = unset(S * EMB), *k = unset(S * C), *part = unset(EMB);
    filter_positions(z, 0, S, S, EMB);
    filter_positions(part, 20, 1, S, EMB);
    double worst = 0;
    for (int i = 0; i < S; i++) for (int j = 0; j < 16; j++) {
        double f = 1e-4 + (15 - 1e-4) * j / 15, angle = 2 * acos(-1.0) * f * i / S;
        worst = worse(worst, worse(fabs(z[i * EMB + 1 + j] - cos(angle)), fabs(z[i * EMB + 17 + j] + sin(angle))));
        worst = worse(worst, fabs(z[i * EMB] - i / 36.0));
    }
    check_error("33 numbers of each position", worst, DOUBLE ? 1e-12 : 1e-6);
    check(same_bits(part, z + 20 * EMB, EMB), "one position alone is the same bits");
    for (int i = 0; i < S * C; i++) k[i] = 1;
    filter_window(k, 0, S, S, C);
    check(fabs(k[36 * C] - exp(-3.0701134573253944)) <= 1e-6 && fabs(k[36 * C + 5] - exp(-15.350567286626973)) <= 1e-6 && k[0] == 1 && k[5] == 1,
          "the window falls to e^-3.07 in the slowest channel and e^-15.35 in the fastest");
    filter_positions(z, 0, 1, 1, 3);
    k[0] = 1;
    filter_window(k, 0, 1, 1, 1);
    check(z[0] == 0 && z[1] == 1 && z[2] == 0 && k[0] == 1, "S = 1, C = 1, 3 numbers: finite");
    free(z); free(k); free(part);
}

// ----------------------------------------------------------------------------------------------------------------
// whole mixers. A Kind is what train_baselines.c dispatches on.

typedef struct {
    const char* name;
    size_t p_size, a_size;
    void (*params)(void* p, Table* t, real* base, const Config* c, int n);
    void (*acts)(void* a, const void* first, Table* t, real* base, Table* states, real* state_base, const Config* c, int n, size_t B, size_t T, int train);
    void (*forward)(real* out, const real* x, void* a, const void* p, const Config* c, size_t B, size_t T, int carry);
    void (*backward)(real* dx, void* g, const real* dout, const real* x, void* a, const void* p, const Config* c, size_t B, size_t T);
} Kind;
static size_t past;             // tokens that a text has so far

#define KIND(k, K, set_past) \
    static void k##_p(void* p, Table* t, real* b, const Config* c, int n) { k##_params((K##Params*)p, t, b, c, n); } \
    static void k##_a(void* a, const void* f, Table* t, real* b, Table* s, real* sb, const Config* c, int n, size_t B, size_t T, int train) { \
        K##Acts* acts = (K##Acts*)a; k##_acts(acts, (const K##Acts*)f, t, b, s, sb, c, n, B, T, train); set_past; } \
    static void k##_f(real* o, const real* x, void* a, const void* p, const Config* c, size_t B, size_t T, int carry) { \
        k##_forward(o, x, (K##Acts*)a, (const K##Params*)p, c, B, T, carry); } \
    static void k##_b(real* dx, void* g, const real* d, const real* x, void* a, const void* p, const Config* c, size_t B, size_t T) { \
        k##_backward(dx, (K##Params*)g, d, x, (K##Acts*)a, (const K##Params*)p, c, B, T); } \
    static const Kind kind_##k = {#k, sizeof(K##Params), sizeof(K##Acts), k##_p, k##_a, k##_f, k##_b};
KIND(mamba, Mamba, (void)0)
KIND(mamba2, Mamba2, (void)0)
KIND(hyena, Hyena, acts->past = &past)

enum { LAYERS = 2 };            // two, one behind the other without norm or residual: scratch that they share must not mix them up
static struct {
    const Kind* kind;
    Config c;
    size_t B, T;
    Table table, acts_table, states;
    real *params, *grads, *memory, *state_memory, *x, *mid, *out, *weight;
    char p[LAYERS][512], g[LAYERS][512], a[LAYERS][512];
} M;

static void mixer_layout(real* params, real* grads, real* memory, real* state_memory, int carry) {
    Table again = {0};
    M.table.count = M.acts_table.count = M.states.count = 0;
    M.table.total = M.acts_table.total = M.states.total = 0;
    for (int n = 0; n < LAYERS; n++) {
        M.kind->params(M.p[n], &M.table, params, &M.c, n);
        M.kind->params(M.g[n], &again, grads, &M.c, n);
        M.kind->acts(M.a[n], M.a[0], &M.acts_table, memory, carry ? &M.states : NULL, state_memory, &M.c, n, M.B, M.T, !carry);
    }
    free(again.tensors);
}

// Parameters from N(0, 0.5), so that nothing is 0 or 1, or with `first` as a model starts: then long texts keep their size.
static void mixer_make(const Kind* kind, Config c, size_t B, size_t T, int carry, int first) {
    memset(&M, 0, sizeof M);
    M.kind = kind, M.c = c, M.B = B, M.T = T;
    if (kind->p_size > 512 || kind->a_size > 512) die("a test: make room for %s", kind->name);
    mixer_layout(NULL, NULL, NULL, NULL, carry);
    size_t n = B * T * c.channels;
    M.params = array(M.table.total, 0.5), M.grads = array(M.table.total, 0);
    M.memory = unset(M.acts_table.total), M.state_memory = array(M.states.total, 0);
    M.x = array(n, 1), M.mid = unset(n), M.out = unset(n), M.weight = array(n, 1);
    mixer_layout(M.params, M.grads, M.memory, M.state_memory, carry);
    for (int i = 0; first && i < M.table.count; i++)
        for (size_t k = 0; k < M.table.tensors[i].size; k++)
            M.params[M.table.tensors[i].offset + k] = initial_value(&M.table.tensors[i], k, &rng);
}
static void mixer_free(void) {
    free(M.table.tensors); free(M.acts_table.tensors); free(M.states.tensors);
    free(M.params); free(M.grads); free(M.memory); free(M.state_memory); free(M.x); free(M.mid); free(M.out); free(M.weight);
}

static void mixer_run(int carry) {
    M.kind->forward(M.mid, M.x, M.a[0], M.p[0], &M.c, M.B, M.T, carry);
    M.kind->forward(M.out, M.mid, M.a[1], M.p[1], &M.c, M.B, M.T, carry);
}
static double mixer_loss(void) {
    mixer_run(0);
    return weighted(M.out, M.weight, M.B * M.T * M.c.channels);
}

static void check_mixer_gradients(const Kind* kind, Config c, size_t B, size_t T) {
    mixer_make(kind, c, B, T, 0, 0);
    size_t n = B * T * c.channels;
    real *dmid = started(n), *dx = started(n);
    for (size_t i = 0; i < M.table.total; i++) M.grads[i] = START;
    mixer_loss();
    memset(dmid, 0, n * sizeof(real));
    M.kind->backward(dmid, M.g[1], M.weight, M.mid, M.a[1], M.p[1], &c, B, T);
    M.kind->backward(dx, M.g[0], dmid, M.x, M.a[0], M.p[0], &c, B, T);
    Input in[32];
    int count = 0;
    in[count++] = (Input){"x", M.x, without_start(dx, n), n, 1};
    for (int i = 0; i < M.table.count && count < 32; i++) {
        Tensor* t = &M.table.tensors[i];
        if (t->size > 1000 && T != 2) continue;         // a filter's inner matrices: at T = 2 only, for the time it takes
        in[count++] = (Input){t->name, M.params + t->offset, without_start(M.grads + t->offset, t->size), t->size, 1};
    }
    step = 3e-4;                // two layers in a row bend more than one
    check_gradients(say("%s, two layers, B %zu T %zu C %d chunk %d", kind->name, B, T, c.channels, c.chunk), mixer_loss, in, count);
    step = 1e-3;
    free(dmid); free(dx);
    mixer_free();
}

// T steps of one token, from a carried state, against all tokens at once; twice, with a reset between.
static void check_mixer_steps(const Kind* kind, Config c, size_t T, int first) {
    size_t C = c.channels;
    mixer_make(kind, c, 2, T, 0, first);
    mixer_run(0);
    real *params = copy_of(M.params, M.table.total), *x = copy_of(M.x, 2 * T * C), *want = copy_of(M.out, 2 * T * C);
    mixer_free();
    mixer_make(kind, c, 1, 1, 1, first);
    memcpy(M.params, params, M.table.total * sizeof(real));
    double worst = 0;
    for (size_t i = 0; i < 2 * T; i++) {
        if (i == T) {                                   // the state of the first text goes, also what lies behind `past`
            past = 0;
            memset(M.state_memory, 0, M.states.total * sizeof(real));
        }
        memcpy(M.x, x + i * C, C * sizeof(real));
        mixer_run(1);
        past++;
        double e = difference(M.out, want + i * C, C);
        worst = worse(worst, e);
    }
    past = 0;
    memcpy(M.x, x, C * sizeof(real));                   // no reset: the first token of a text must come out differently
    mixer_run(1);
    double unreset = difference(M.out, want, C);
    past = 0;
    check_error(say("%s: %zu steps of one token, reset, %zu more", kind->name, T, T), worst, DOUBLE ? 1e-11 : 5e-5);
    check(unreset > 1e-3, "%s: without a reset the past shows: %.0e", kind->name, unreset);
    free(params); free(x); free(want);
    mixer_free();
}

// A change at token t moves nothing before t, and something at t.
static void check_mixer_causal(const Kind* kind, Config c, size_t T, double tolerance) {
    size_t C = c.channels;
    double before = 0;
    int moves = 1;
    mixer_make(kind, c, 1, T, 0, 1);
    mixer_run(0);
    real* want = copy_of(M.out, T * C);
    double rms = norm_of(want, T * C) / sqrt((double)T * C);
    for (size_t t = 0; t < T; t += 1 + t / 4) {
        real kept = M.x[t * C];
        M.x[t * C] += 3;
        mixer_run(0);
        for (size_t i = 0; i < t * C; i++) { double e = fabs((double)M.out[i] - want[i]) / rms; before = worse(before, e); }
        moves &= difference(M.out + t * C, want + t * C, C) > 1e-4;
        M.x[t * C] = kept;
    }
    check(before <= tolerance && moves, "%s: T %zu, nothing before a changed token moves: %.0e of the rms", kind->name, T, before);
    free(want);
    mixer_free();
}

static void check_mixer_chunks(const Kind* kind, Config c, size_t T) {
    static const int lengths[] = {1, 40, 50, 64, 0};
    size_t n = 2 * T * c.channels;
    real *params = NULL, *x = NULL, *want = NULL;
    uint64_t seed = rng;
    c.chunk = (int)T;
    for (int i = -1; i < 5; i++) {
        if (i >= 0) c.chunk = lengths[i];
        rng = seed;                                     // the same weights and inputs
        mixer_make(kind, c, 2, T, 0, 1);
        if (!params) params = copy_of(M.params, M.table.total), x = copy_of(M.x, n);
        memcpy(M.params, params, M.table.total * sizeof(real));
        memcpy(M.x, x, n * sizeof(real));
        mixer_run(0);
        if (i < 0) want = copy_of(M.out, n);
        else check_error(say("%s: --chunk %d as in one chunk of %zu", kind->name, c.chunk, T), difference(M.out, want, n), EXACT);
        mixer_free();
    }
    free(params); free(x); free(want);
}

// A training step's every number, to the bit, on 1, 2 and 3 threads.
static void check_mixer_threads(const Kind* kind, Config c) {
#ifdef _OPENMP
    size_t B = 2, T = 97, n = B * T * c.channels;
    real *out = NULL, *grads = NULL, *dx = NULL;
    uint64_t seed = rng;
    int same = 1, before = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        rng = seed;
        mixer_make(kind, c, B, T, 0, 1);
        real *dmid = array(n, 0), *d = array(n, 0);
        mixer_run(0);
        M.kind->backward(dmid, M.g[1], M.weight, M.mid, M.a[1], M.p[1], &c, B, T);
        M.kind->backward(d, M.g[0], dmid, M.x, M.a[0], M.p[0], &c, B, T);
        if (threads == 1) out = copy_of(M.out, n), grads = copy_of(M.grads, M.table.total), dx = copy_of(d, n);
        same &= same_bits(M.out, out, n) && same_bits(M.grads, grads, M.table.total) && same_bits(d, dx, n);
        free(dmid); free(d);
        if (threads < 3) mixer_free();
    }
    check(same && norm_of(grads, M.table.total) > 0, "%s: the same bits on 1, 2 and 3 threads", kind->name);
    mixer_free();
    free(out); free(grads); free(dx);
    omp_set_num_threads(before);
#else
    (void)kind; (void)c;
#endif
}

// ----------------------------------------------------------------------------------------------------------------
// first weights

static const real* drawn(const char* name, size_t* n, const Tensor** tensor) {
    uint64_t seed = 42;
    real* found = NULL;
    for (int i = 0; i < M.table.count; i++) {
        const Tensor* t = &M.table.tensors[i];
        for (size_t k = 0; k < t->size; k++) M.params[t->offset + k] = initial_value(t, k, &seed);
        if (strcmp(t->name, name) == 0) { found = M.params + t->offset; *n = t->size; *tensor = t; }
    }
    if (!found) die("a test: no tensor %s", name);
    return found;
}

// U(±bound): all inside, the largest near it, the deviation bound / sqrt(3), the mean 0.
static void check_uniform(const char* name, double bound) {
    size_t n = 0;
    const Tensor* t = NULL;
    const real* x = drawn(name, &n, &t);
    double mean = 0, square = 0, top = 0;
    for (size_t i = 0; i < n; i++) { mean += x[i] / n; square += (double)x[i] * x[i] / n; top = fmax(top, fabs((double)x[i])); }
    double sigma = bound / sqrt(3);
    check(top <= bound * (1 + 1e-6) && top > bound * (1 - 20.0 / n) && fabs(mean) < 5 * sigma / sqrt((double)n) && fabs(sqrt(square) / sigma - 1) < 5 / sqrt((double)n),
          "%s %s: %zu numbers in U(±%.4f), mean %.5f, deviation %.4f for %.4f", M.kind->name, name, n, bound, mean, sqrt(square), sigma);
}

static void check_steps_bias(size_t want) {
    size_t n = 0;
    const Tensor* t = NULL;
    const real* x = drawn("block1.b_dt", &n, &t);
    double low = 1e9, high = 0, mean = 0;
    for (size_t i = 0; i < n; i++) {
        double step = softplus(x[i]);
        low = fmin(low, step), high = fmax(high, step), mean += log(step) / n;
    }
    double centre = (log(0.001) + log(0.1)) / 2, sigma = (log(0.1) - log(0.001)) / sqrt(12);
    check(n == want && low >= 0.000999 && low < 0.002 + 0.05 / n && high <= 0.1001 && fabs(mean - centre) < 4 * sigma / sqrt((double)n),
          "%s b_dt: %zu first steps from %.5f to %.4f, log-uniform about %.4f", M.kind->name, n, low, high, exp(mean));
}

static void check_constant(const char* name, size_t want, double value) {
    size_t n = 0, right = 0;
    const Tensor* t = NULL;
    const real* x = drawn(name, &n, &t);
    for (size_t i = 0; i < n; i++) right += x[i] == (real)value;
    check(n == want && right == n, "%s %s: %zu numbers, all %g", M.kind->name, name, n, value);
}

static size_t parameters(void) {
    size_t n = 0;
    for (int i = 0; i < M.table.count; i++) n += M.table.tensors[i].size;
    return n / LAYERS;
}

static int decays(const char* name) {
    for (int i = 0; i < M.table.count; i++) if (strcmp(M.table.tensors[i].name, name) == 0) return M.table.tensors[i].decay;
    return -1;
}

static void check_first_weights(void) {
    size_t n = 0;
    const Tensor* t = NULL;
    Config c = {.channels = 256, .layers = 5, .seq = 1024, .d_state = 16, .expand = 2, .conv = 4, .head_dim = 64, .emb = 33};
    mixer_make(&kind_mamba, c, 1, 1, 0, 0);
    check(parameters() == 437760, "mamba, C 256: %zu parameters a layer, 437760 (5 of them, norms, 2 VC: 27,921,920)", parameters());
    check_uniform("block1.w_in", 1 / 16.0);
    check_uniform("block1.conv_w", 0.5);
    check_uniform("block1.conv_b", 0.5);
    check_uniform("block1.w_x", 1 / sqrt(512));
    check_uniform("block1.w_dt", 0.25);
    check_uniform("block1.w_out", 1 / sqrt(512 * 5.0));
    check_steps_bias(512);
    check_constant("block1.d", 512, 1);
    const real* a = drawn("block1.a_log", &n, &t);
    int ramp = n == 512 * 16;
    for (size_t i = 0; i < n; i++) ramp &= a[i] == (real)log(i % 16 + 1.0);
    check(ramp, "mamba A_log: log 1, log 2, ..., log 16 in each of %zu channels", n / 16);
    check(decays("block1.a_log") == 0 && decays("block1.conv_w") == 0 && decays("block1.d") == 0 && decays("block1.b_dt") == 0
          && decays("block1.w_in") == 1 && decays("block1.w_x") == 1 && decays("block1.w_dt") == 1 && decays("block1.w_out") == 1,
          "mamba: weight decay for the four matrices alone");
    mixer_free();

    c.d_state = 128;
    c.layers = 4;
    mixer_make(&kind_mamba2, c, 1, 1, 0, 0);
    check(parameters() == 1288 * 256 + 768 * 5 + 3 * 8 + 512 + 256 * 512, "mamba2, C 256: %zu parameters a layer", parameters());
    check_uniform("block1.w_in", 1 / 16.0);
    check_uniform("block1.conv_w", 0.5);
    check_uniform("block1.w_out", 1 / sqrt(512 * 4.0));
    check_constant("block1.d", 8, 1);
    check_constant("block1.gate_norm_w", 512, 1);
    check_steps_bias(8);
    c.channels = 1024, c.head_dim = 1, c.d_state = 1;   // 2048 heads, for the statistics
    mixer_free();
    mixer_make(&kind_mamba2, c, 1, 1, 0, 0);
    a = drawn("block1.a_log", &n, &t);
    double low = 1e9, high = 0, mean = 0;
    for (size_t i = 0; i < n; i++) { low = fmin(low, exp(a[i])), high = fmax(high, exp(a[i])), mean += exp(a[i]) / n; }
    check(n == 2048 && low >= 1 && low < 1.1 && high <= 16.0001 && high > 15.9 && fabs(mean - 8.5) < 0.4, "mamba2 -A: from %.3f to %.3f, mean %.3f for 8.5", low, high, mean);
    check_steps_bias(2048);
    check(decays("block1.a_log") == 0 && decays("block1.conv_w") == 0 && decays("block1.gate_norm_w") == 0 && decays("block1.w_in") == 1 && decays("block1.w_out") == 1,
          "mamba2: weight decay for the two matrices alone");
    mixer_free();

    c.channels = 512;
    mixer_make(&kind_hyena, c, 1, 1, 0, 0);
    check(parameters() == 4 * 512 * 512 + 3 * 512 + 4 * 1536 + 64 * 34 + 2 * 64 * 65 + 512 * 64 + 64 + 512 + 512, "hyena, C 512, emb 33: %zu parameters a layer", parameters());
    check_uniform("block1.w_in", 1 / sqrt(512));
    check_uniform("block1.b_in", 1 / sqrt(512));
    check_uniform("block1.conv_w", 1 / sqrt(3));
    check_uniform("block1.filter_w1", 1 / sqrt(33));
    check_uniform("block1.filter_w3", 0.125);
    check_uniform("block1.filter_w4", 0.125);
    check_uniform("block1.w_out", 1 / sqrt(512));
    check_constant("block1.filter_freq", 64, 1);
    a = drawn("block1.d", &n, &t);
    double square = 0;
    for (size_t i = 0; i < n; i++) square += (double)a[i] * a[i] / n;
    check(n == 512 && fabs(square - 1) < 0.3, "hyena D: %zu numbers, variance %.2f for 1", n, square);
    check(decays("block1.conv_w") == 0 && decays("block1.w_in") == 1, "hyena: no weight decay on the convolution");
    mixer_free();
}

// Memory: nothing grows with N T in Mamba, and nothing with T² anywhere.
static void check_memory(void) {
    Config c = {.channels = 256, .layers = 5, .seq = 1 << 20, .d_state = 16, .expand = 2, .conv = 4, .head_dim = 64, .emb = 33};
    const Kind* kinds[] = {&kind_mamba, &kind_mamba2, &kind_hyena};
    for (int k = 0; k < 3; k++) {
        double per_token[2];
        for (int i = 0; i < 2; i++) {
            memset(&M, 0, sizeof M);
            M.kind = kinds[k], M.c = c, M.B = 1, M.T = i ? 1 << 20 : 1 << 12;
            mixer_layout(NULL, NULL, NULL, NULL, 0);
            per_token[i] = (double)M.acts_table.total / M.T;
            free(M.table.tensors); free(M.acts_table.tensors);
        }
        check(per_token[1] <= per_token[0] * 1.01, "%s: %.0f numbers a token at T = 4096, %.0f at 2^20", kinds[k]->name, per_token[0], per_token[1]);
    }
    double total[2];
    for (int i = 0; i < 2; i++) {
        memset(&M, 0, sizeof M);
        M.kind = &kind_mamba, M.c = c, M.B = 1, M.T = 1 << 20;
        M.c.d_state = i ? 64 : 16;
        mixer_layout(NULL, NULL, NULL, NULL, 0);
        total[i] = (double)M.acts_table.total / M.T;
        free(M.table.tensors); free(M.acts_table.tensors);
    }
    check(total[1] < total[0] * 1.12, "mamba at T = 2^20: %.0f numbers a token with N = 16, %.0f with N = 64 (the states alone: %d and %d)", total[0], total[1], 512 * 16, 512 * 64);
}

int main(void) {
#ifdef TRAIN_FILE
    (void)option_table;
#endif
    flush_denormals();
    check_pieces();
    static const size_t convs[][4] = {{1, 1, 5, 4}, {2, 2, 3, 4}, {2, 7, 70, 4}, {2, 3, 5, 8}, {1, 13, 3, 1}, {3, 5, 65, 3}, {1, 29, 64, 4}};
    for (int i = 0; i < 7; i++) check_conv(convs[i][0], convs[i][1], convs[i][2], convs[i][3]);

    static const size_t scans[][5] = {{1, 1, 1, 1, 1}, {1, 1, 5, 3, 1}, {2, 2, 3, 4, 1}, {2, 7, 5, 3, 7}, {2, 7, 5, 3, 3}, {1, 13, 37, 2, 4}, {3, 11, 3, 16, 5}};
    for (int i = 0; i < 7; i++) check_scan_gradients(scans[i][0], scans[i][1], scans[i][2], scans[i][3], scans[i][4]);
    check_scan_chunks(2, 67, 37, 5);
    check_scan_chunks(1, 128, 64, 16);
    check_scan_chunks(2, 1, 3, 16);
    check_scan_chunks(1, 200, 33, 3);
    check_scan_extremes();

    static const size_t ssds[][6] = {{1, 1, 1, 1, 1, 1}, {1, 1, 2, 3, 5, 1}, {2, 2, 2, 3, 4, 1}, {2, 7, 2, 3, 4, 7}, {2, 7, 3, 2, 5, 3}, {1, 13, 1, 5, 3, 4}, {2, 11, 2, 1, 2, 5}};
    for (int i = 0; i < 7; i++) check_ssd_gradients(ssds[i][0], ssds[i][1], ssds[i][2], ssds[i][3], ssds[i][4], ssds[i][5]);
    check_ssd_chunks(2, 67, 3, 5, 7);
    check_ssd_chunks(1, 128, 2, 64, 128);
    check_ssd_chunks(2, 1, 3, 4, 5);
    check_ssd_chunks(1, 200, 2, 3, 16);
    check_ssd_is_mamba();
    check_ssd_extremes();

    check_long_convs();
    check_filter_shape();

    Config c = {.channels = 5, .layers = 2, .seq = 23, .d_state = 3, .expand = 2, .conv = 4, .head_dim = 5, .chunk = 4, .emb = 3};
    static const size_t shapes[][2] = {{1, 1}, {1, 2}, {2, 7}, {3, 5}};
    const Kind* kinds[] = {&kind_mamba, &kind_mamba2, &kind_hyena};
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < 4; i++) check_mixer_gradients(kinds[k], c, shapes[i][0], shapes[i][1]);
        check_mixer_steps(kinds[k], c, 23, 0);
        Config wide = c;
        wide.channels = 40, wide.head_dim = 16, wide.chunk = 0, wide.seq = 150, wide.emb = 33;
        check_mixer_steps(kinds[k], wide, 150, 1);
        check_mixer_causal(kinds[k], wide, 101, kinds[k] == &kind_hyena ? (DOUBLE ? 1e-12 : 1e-5) : 0);
        if (kinds[k] != &kind_hyena) check_mixer_chunks(kinds[k], wide, 97);
        check_mixer_threads(kinds[k], wide);
    }
    c.emb = 33;
    check_mixer_gradients(&kind_hyena, c, 2, 5);
    check_first_weights();
    check_memory();
    return check_report();
}
