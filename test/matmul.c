// matmul.c: the matrix product against three plain loops, in every way the layers call it: the three products of a linear
// layer, written over or added to, at every size where a block ends or begins. Built in float and in double.
#include "model.h"

static const double BOUND = sizeof(real) == 8 ? 1e-14 : 4e-6;
static uint64_t rng = 1;
static double worst = 0;            // of the sizes since the last check
static int sizes = 0;

// One product. The matrices lie in wider ones (rows of `pad` more numbers), whose rest must stay as it was.
enum { FORWARD, DX, DW };           // A Bᵀ, A B, Aᵀ B
static void try_size(size_t M, size_t N, size_t K, int kind, int add, size_t pad) {
    size_t ai, ak, bk, bj, ci = N + pad, na, nb, nc = M * ci;
    if (kind == DW) ai = 1, ak = M + pad, na = K * ak;
    else            ai = K + pad, ak = 1, na = M * ai;
    if (kind == FORWARD) bk = 1, bj = K + pad, nb = N * bj;
    else                 bk = N + pad, bj = 1, nb = K * bk;
    real* A = (real*)allocate(na * sizeof(real), "a test");
    real* B = (real*)allocate(nb * sizeof(real), "a test");
    real* C = (real*)allocate(nc * sizeof(real), "a test");
    for (size_t i = 0; i < na; i++) A[i] = 2 * rng_uniform(&rng) - 1;
    for (size_t i = 0; i < nb; i++) B[i] = 2 * rng_uniform(&rng) - 1;
    for (size_t i = 0; i < nc; i++) C[i] = i % ci < N && !add ? NAN : 2 * rng_uniform(&rng) - 1;
    real* before = copy_of(C, nc);
    matmul(C, A, B, M, N, K, ci, ai, ak, bk, bj, add);
    for (size_t i = 0; i < M; i++)
        for (size_t j = 0; j < ci; j++) {
            double sum = j < N && !add ? 0 : before[i * ci + j];
            if (j < N) for (size_t k = 0; k < K; k++) sum += (double)A[i * ai + k * ak] * B[k * bk + j * bj];
            double error = fabs(C[i * ci + j] - sum) / sqrt((double)K);       // the sum's own size
            worst = worse(worst, error);
            if (j >= N && C[i * ci + j] != before[i * ci + j]) worst = NAN;
        }
    sizes++;
    free(A); free(B); free(C); free(before);
}

static void report(const char* what) {
    check(worst <= BOUND, "%s: %d products, worst error %.1e (bound %.0e)", what, sizes, worst, BOUND);
    worst = sizes = 0;
}

// Threads that work on pieces of their own call it at the same time: the bits must be those of one call after the other.
static void check_inside(void) {
    enum { CALLS = 48, SIDE = 90 };     // SIDE³ is enough for a call to ask for threads
    real* A = (real*)allocate(CALLS * SIDE * SIDE * sizeof(real), "a test");
    real* C = (real*)allocate(2 * CALLS * SIDE * SIDE * sizeof(real), "a test");
    for (size_t i = 0; i < CALLS * SIDE * SIDE; i++) A[i] = 2 * rng_uniform(&rng) - 1;
    set_threads(3);
    for (int n = 0; n < CALLS; n++) {
        const real *a = A + n * SIDE * SIDE, *b = A + (CALLS - 1 - n) * SIDE * SIDE;
        matmul(C + n * SIDE * SIDE, a, b, SIDE, SIDE, SIDE, SIDE, SIDE, 1, n % 2 ? 1 : SIDE, n % 2 ? SIDE : 1, 0);
    }
    #pragma omp parallel for schedule(dynamic)
    for (int n = 0; n < CALLS; n++) {
        const real *a = A + n * SIDE * SIDE, *b = A + (CALLS - 1 - n) * SIDE * SIDE;
        matmul(C + (CALLS + n) * SIDE * SIDE, a, b, SIDE, SIDE, SIDE, SIDE, SIDE, 1, n % 2 ? 1 : SIDE, n % 2 ? SIDE : 1, 0);
    }
    check(same_bits(C, C + CALLS * SIDE * SIDE, CALLS * SIDE * SIDE) && norm_of(C, CALLS * SIDE * SIDE) > 1, "%d products by threads at once", CALLS);
    free(A); free(C);
}

int main(void) {
    static const char* kinds[3] = {"x wT", "dout w", "doutT x"};
    flush_denormals();
    for (int kind = FORWARD; kind <= DW; kind++)
        for (int add = 0; add < 2; add++) {
            char label[64];
            set_threads(1);         // all small sizes across a register tile's edge, in both directions
            for (size_t M = 1; M <= 2 * MR + 1; M++)
                for (size_t N = 1; N <= 2 * NR + 1; N += N < 4 || N % NR > NR - 3 || N % NR < 2 ? 1 : 3)
                    for (size_t K = 1; K <= 7; K += 3) try_size(M, N, K, kind, add, (M + N) % 3);
            snprintf(label, sizeof label, "%s%s, small sizes", kinds[kind], add ? " added" : "");
            report(label);
            set_threads(3);         // the edges of the packed blocks: K around KC and 2 KC, N around NC
            static const size_t Ms[] = {1, MR - 1, MR, MR + 1, 67}, Ns[] = {1, NR - 1, NR, NR + 1, NC - 1, NC, NC + 1},
                                Ks[] = {1, KC - 1, KC, KC + 1, 2 * KC, 2 * KC + 1};
            for (size_t m = 0; m < sizeof Ms / sizeof *Ms; m++)
                for (size_t n = 0; n < sizeof Ns / sizeof *Ns; n++)
                    for (size_t k = 0; k < sizeof Ks / sizeof *Ks; k++)
                        if (Ns[n] < NC - 1 || (Ms[m] < 67 && Ks[k] <= KC + 1)) try_size(Ms[m], Ns[n], Ks[k], kind, add, k % 2);
            snprintf(label, sizeof label, "%s%s, block edges", kinds[kind], add ? " added" : "");
            report(label);
        }
    check_inside();
    real a[2] = {1, 2}, b[2] = {3, 4}, c[1];        // and one by hand, in case the plain loops are wrong too
    matmul(c, a, b, 1, 1, 2, 1, 2, 1, 1, 2, 0);
    check(c[0] == 11, "1*3 + 2*4 = %g", (double)c[0]);
    return check_report();
}
