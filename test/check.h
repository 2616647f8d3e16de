// check.h: what every test program reports with. A check prints one line; the program's last line is
// `N passed, N failed`, and its exit code is 1 when a check failed or when none ran.
#ifndef CHECK_H
#define CHECK_H
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

static int checks_passed = 0, checks_failed = 0;

// One check: `ok` decides, the rest is printf's. Returns ok.
__attribute__((format(printf, 2, 3), unused))
static int check(int ok, const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    printf("%s", ok ? "  ok    " : "  FAIL  ");
    vprintf(fmt, args);
    printf("\n");
    va_end(args);
    fflush(stdout);
    if (ok) checks_passed++; else checks_failed++;
    return ok;
}

// The larger of two errors, and NaN where one of them is: fmax would drop it, and so would a comparison at the next number.
__attribute__((unused))
static double worse(double a, double b) { return isnan(a) || isnan(b) ? NAN : a > b ? a : b; }

// An error against its bound. Written so that NaN fails.
__attribute__((unused))
static int check_error(const char* name, double error, double bound) {
    return check(error <= bound, "%s: error %.2e, bound %.0e", name, error, bound);
}

// Prints the closing line; what main returns.
__attribute__((unused))
static int check_report(void) {
    printf("%d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed > 0 || checks_passed == 0;
}
#endif
