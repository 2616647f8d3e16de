// gradient.h: gradients measured by differences, against those that a backward pass computes. In double.
#ifndef GRADIENT_H
#define GRADIENT_H

// out[i] = d loss / d x[i], from losses at x[i] ± h and ± 2h: f' = (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h + O(h^4).
// With x of size 1 and h = 1e-3 both that remainder and rounding (1e-16 / h) stay near 1e-12.
static void numeric_gradient(double* out, real* x, size_t n, double (*loss)(void), double h) {
    for (size_t i = 0; i < n; i++) {
        real at = x[i];
        double f[4];
        for (int k = 0; k < 4; k++) {
            static const int steps[4] = {-2, -1, 1, 2};
            x[i] = at + steps[k] * h;
            f[k] = loss();
        }
        x[i] = at;
        out[i] = (8 * (f[2] - f[1]) - (f[3] - f[0])) / (12 * h);
    }
}

static double numeric_norm(const double* x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

// ‖analytic - numeric‖ / max(‖numeric‖, 1e-3 all), `all` being the norm of every tensor's gradient together: a tensor that
// hardly matters is judged on the scale of those that do. NaN where both are zero: nothing was tested.
static double gradient_error(const real* analytic, const double* numeric, size_t n, double all) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (analytic[i] - numeric[i]) * (analytic[i] - numeric[i]);
    return sqrt(sum) / fmax(numeric_norm(numeric, n), 1e-3 * all);
}
#endif
