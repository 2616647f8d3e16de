// train_baselines_ssm.part.c: Mamba, Mamba-2 and Hyena for train_baselines.c. Part 1 belongs into its section "layers",
// part 2 into its section "the model". Needs from the file around it: the utilities, matmul, layers and tables that
// train_harmonic.c has, rmsnorm and swiglu, and a Config with channels, layers, d_state, expand, conv, head_dim, chunk, emb, seq.

// ================================================================================================================
// PART 1: layers
// ================================================================================================================

// The same product by the thread that calls it, for the many small ones inside chunks and heads, where the threads
// already share out the chunks. Same packing, same tile, blocks small enough for the stack.
static void small_matmul(real* C, const real* A, const real* B, size_t M, size_t N, size_t K,
                         size_t ci, size_t ai, size_t ak, size_t bk, size_t bj, int add) {
    enum { SIDE = 128 };
    real a[SIDE * MR] __attribute__((aligned(64))), out[MR * NR] __attribute__((aligned(64)));
    real packed[SIDE * SIDE] __attribute__((aligned(64)));
    for (size_t j0 = 0; j0 < N; j0 += SIDE)
    for (size_t k0 = 0; k0 < K; k0 += SIDE) {
        size_t n = smin(SIDE, N - j0), kc = smin(SIDE, K - k0);
        for (size_t j = 0; j < n; j += NR) {
            const real* b = B + k0 * bk + (j0 + j) * bj;
            real* p = packed + j * kc;
            size_t w = smin(NR, n - j);
            if (w < NR) memset(p, 0, kc * NR * sizeof(real));
            if (bj == 1) for (size_t k = 0; k < kc; k++) for (size_t q = 0; q < w; q++) p[k * NR + q] = b[k * bk + q];
            else         for (size_t q = 0; q < w; q++) for (size_t k = 0; k < kc; k++) p[k * NR + q] = b[k * bk + q * bj];
        }
        for (size_t i = 0; i < M; i += MR) {
            const real* s = A + i * ai + k0 * ak;
            size_t h = smin(MR, M - i);
            if (h < MR) memset(a, 0, kc * MR * sizeof(real));
            if (ai == 1) for (size_t k = 0; k < kc; k++) for (size_t q = 0; q < h; q++) a[k * MR + q] = s[q + k * ak];
            else         for (size_t q = 0; q < h; q++) for (size_t k = 0; k < kc; k++) a[k * MR + q] = s[q * ai + k * ak];
            for (size_t j = 0; j < n; j += NR) {
                matmul_tile(out, a, packed + j * kc, kc);
                size_t w = smin(NR, n - j);
                for (size_t q = 0; q < h; q++) {
                    real* c = C + (i + q) * ci + j0 + j;
                    if (add || k0 > 0) for (size_t p = 0; p < w; p++) c[p] += out[q * NR + p];
                    else               for (size_t p = 0; p < w; p++) c[p]  = out[q * NR + p];
                }
            }
        }
    }
}

// log(1 + u) for 0 <= u <= 1, as arithmetic that vectorises: 2 artanh(s) with s = u / (2 + u) <= 1/3, whose series
// s + s³/3 + s⁵/5 + ... is good to 2e-9 relative after eight terms, for the smallest u as well.
static inline real fast_log1p(real u) {
    if (sizeof(real) == 8) return log1p(u);
    float s = (float)u / (2 + (float)u), q = s * s;
    return 2 * s * (1 + q * (1/3.f + q * (1/5.f + q * (1/7.f + q * (1/9.f + q * (1/11.f + q * (1/13.f + q * (1/15.f))))))));
}

// log(1 + e^x), written so that no e^x overflows: for x > 0 it is x + log(1 + e^-x). Its derivative is sigmoid(x).
static inline real softplus(real x) { return (x > 0 ? x : 0) + fast_log1p(fast_exp(x > 0 ? -x : x)); }

// e^x of an x <= 0, and 0 where e^x is: fast_exp ends at e^-87, which times a decay rate of e^87 would look like one.
static inline real decay_exp(real x) { return x < -87 ? 0 : fast_exp(x); }

// ----------------------------------------------------------------------------------------------------------------
// short causal convolution: every channel on its own, over the last K tokens

enum { MAX_CONV = 8 };          // the largest K

// out[t] = bias + sum_k w[k] x[t-(K-1)+k].  out, x (B,T,C), w (C,K), bias (C). What came before the first token is zero,
// or with window (B,K-1,C) the last K-1 inputs of the call before; they are then replaced by this call's last.
static void short_conv_forward(real* out, const real* x, const real* w, const real* bias, real* window, size_t B, size_t T, size_t C, size_t K) {
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
    for (size_t c0 = 0; c0 < C; c0 += BLOCK) {
        size_t n = smin(BLOCK, C - c0);
        const real* xb = x + b * T * C + c0;
        real* before = window ? window + b * (K - 1) * C + c0 : NULL;
        real tap[MAX_CONV][BLOCK];
        for (size_t k = 0; k < K; k++) for (size_t c = 0; c < n; c++) tap[k][c] = w[(c0 + c) * K + k];
        for (size_t t = 0; t < T; t++) {
            real sum[BLOCK];
            memcpy(sum, bias + c0, n * sizeof(real));
            for (size_t k = 0; k < K; k++) {
                const real* row = t + k >= K - 1 ? xb + (t + k - (K - 1)) * C : before ? before + (t + k) * C : NULL;
                if (row) for (size_t c = 0; c < n; c++) sum[c] += tap[k][c] * row[c];
            }
            memcpy(out + (b * T + t) * C + c0, sum, n * sizeof(real));
        }
        if (before) for (size_t k = 0; k < K - 1; k++)      // row k is time T-(K-1)+k: oldest first, so nothing is lost
            memmove(before + k * C, T + k >= K - 1 ? xb + (T + k - (K - 1)) * C : before + (T + k) * C, n * sizeof(real));
    }
}

// x[s] was used by out[s], ..., out[s+K-1], the last with w[0]:  dx[s] = sum_k w[k] dout[s+(K-1)-k]  as far as T reaches;
// dw[k] = sum over b, t of dout[t] x[t-(K-1)+k].  dx is written, dw and dbias are added to. No window: training only.
static void short_conv_backward(real* dx, real* dw, real* dbias, const real* dout, const real* x, const real* w, size_t B, size_t T, size_t C, size_t K) {
    sum_rows(dbias, dout, B * T, C);
    #pragma omp parallel for
    for (size_t c0 = 0; c0 < C; c0 += BLOCK) {
        size_t n = smin(BLOCK, C - c0);
        real tap[MAX_CONV][BLOCK], dtap[MAX_CONV][BLOCK] = {{0}};
        for (size_t k = 0; k < K; k++) for (size_t c = 0; c < n; c++) tap[k][c] = w[(c0 + c) * K + k];
        for (size_t b = 0; b < B; b++)
            for (size_t s = 0; s < T; s++) {
                const real *xs = x + (b * T + s) * C + c0, *d = dout + (b * T + s) * C + c0;
                real sum[BLOCK] = {0};
                for (size_t k = K; k-- > 0 && s + (K - 1) - k < T;) {
                    const real* row = d + (K - 1 - k) * C;
                    for (size_t c = 0; c < n; c++) { sum[c] += tap[k][c] * row[c]; dtap[k][c] += row[c] * xs[c]; }
                }
                memcpy(dx + (b * T + s) * C + c0, sum, n * sizeof(real));
            }
        for (size_t k = 0; k < K; k++) for (size_t c = 0; c < n; c++) dw[(c0 + c) * K + k] += dtap[k][c];
    }
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba's selective scan: a state of N numbers for every channel, whose step size, input and output weights depend on
// the token

enum { LANES = 32, MAX_STATE = 256 };       // channels that a thread takes at a time; the largest N

// Number of chunks of L tokens in T; the last may be shorter.
static size_t num_chunks(size_t T, size_t L) { return (T + L - 1) / L; }

// A = -e^a_log of channels c0 .. c0+n-1, a_log (E,N), as (N,LANES). Lanes without a channel get 0.
static void scan_decays(real* A, const real* a_log, size_t c0, size_t n, size_t N) {
    for (size_t k = 0; k < N; k++)
        for (size_t c = 0; c < LANES; c++) A[k * LANES + c] = c < n ? -fast_exp(a_log[(c0 + c) * N + k]) : 0;
}

// For every sequence, channel d and n < N, along t:
//     Δ_t = softplus(dt_t + b_dt)         h_t = e^{Δ_t A} h_{t-1} + Δ_t B_t[n] x_t        y_t = sum_n C_t[n] h_t[n] + D x_t
// y, x, dt (B,T,E), bc (B,T,2N): B and C of each token, shared by all channels; a_log (E,N), b_dt, d (E). state (B,N,E):
// the h that the last call left, replaced by this one's; NULL: from zero. A state is N times as large as a token, so
// only those before each chunk of L tokens are kept: starts (B,chunks,N,E). Any L gives the same bits.
static void selective_scan_forward(real* y, real* starts, const real* x, const real* dt, const real* bc, const real* a_log, const real* b_dt,
                                   const real* d, real* state, size_t L, size_t B, size_t T, size_t E, size_t N) {
    size_t chunks = num_chunks(T, L);
    #pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++)
    for (size_t c0 = 0; c0 < E; c0 += LANES) {
        size_t n = smin(LANES, E - c0);
        real A[MAX_STATE * LANES], h[MAX_STATE * LANES];
        memset(h, 0, N * LANES * sizeof(real));
        scan_decays(A, a_log, c0, n, N);
        if (state) for (size_t k = 0; k < N; k++) memcpy(h + k * LANES, state + (b * N + k) * E + c0, n * sizeof(real));
        for (size_t t = 0; t < T; t++) {
            if (t % L == 0)
                for (size_t k = 0; k < N; k++) memcpy(starts + ((b * chunks + t / L) * N + k) * E + c0, h + k * LANES, n * sizeof(real));
            size_t at = (b * T + t) * E + c0;
            const real* bct = bc + (b * T + t) * 2 * N;
            real delta[LANES] = {0}, dx[LANES] = {0}, sum[LANES] = {0};
            for (size_t c = 0; c < n; c++) {
                delta[c] = softplus(dt[at + c] + b_dt[c0 + c]);
                dx[c] = delta[c] * x[at + c];
                sum[c] = d[c0 + c] * x[at + c];
            }
            for (size_t k = 0; k < N; k++) {
                real Bk = bct[k], Ck = bct[N + k];
                for (size_t c = 0; c < LANES; c++) {
                    real now = decay_exp(delta[c] * A[k * LANES + c]) * h[k * LANES + c] + Bk * dx[c];
                    h[k * LANES + c] = now;
                    sum[c] += Ck * now;
                }
            }
            memcpy(y + at, sum, n * sizeof(real));
        }
        if (state) for (size_t k = 0; k < N; k++) memcpy(state + (b * N + k) * E + c0, h + k * LANES, n * sizeof(real));
    }
}

// How many numbers selective_scan_backward needs to work with: nothing of size T.
static size_t scan_work(size_t L, size_t B, size_t E, size_t N) {
    return B * (2 * N + 1) * E + B * num_chunks(E, LANES) * L * 2 * N;
}

// With a_t = e^{Δ_t A}, the whole gradient g_t of h_t runs the recurrence in reverse, and q_t = a_t h_{t-1}:
//     g_t = C_t dy_t + a_{t+1} g_{t+1}
//     dC_t = sum_d dy_t h_t            dB_t = sum_d g_t Δ_t x_t             dx_t = D dy_t + Δ_t sum_n g_t B_t
//     dΔ_t = sum_n g_t (B_t x_t + A q_t)         ddt = dΔ sigmoid(dt + b_dt)
//     dA = sum_t g_t Δ_t q_t           dA_log = A dA                        dD = sum_t x_t dy_t
// Chunks are taken last to first; the states inside one are computed again from its start. q is a product of what is
// there, never h_t less something or divided by a decay, which may be 0.
// Of B and C every channel has a share: each thread writes its channels' sum of a chunk, then these are added up in order.
// dx, ddt (B,T,E), dbc (B,T,2N) are written; da_log, db_dt, dd are added to. work: scan_work numbers.
static void selective_scan_backward(real* dx, real* ddt, real* dbc, real* da_log, real* db_dt, real* dd, const real* dy, const real* x,
                                    const real* dt, const real* bc, const real* starts, const real* a_log, const real* b_dt, const real* d,
                                    real* work, size_t L, size_t B, size_t T, size_t E, size_t N) {
    size_t chunks = num_chunks(T, L), blocks = num_chunks(E, LANES), wide = N * LANES;
    real *carries = work, *dA = carries + B * N * E, *dD = dA + B * N * E, *shares = dD + B * E;
    memset(work, 0, B * (2 * N + 1) * E * sizeof(real));    // a_{t+1} g_{t+1}, dA (B,N,E), dD (B,E); shares (B,blocks,L,2N)
    #pragma omp parallel
    {
        real* h = (real*)allocate((2 * L + 1) * wide * sizeof(real), "the states of a chunk");      // h_{-1}, h_0, ..., h_{L-1}
        real* a = h + (L + 1) * wide;                                                              // a_0, ..., a_{L-1}
        for (size_t chunk = chunks; chunk-- > 0;) {
            size_t t0 = chunk * L, len = smin(L, T - t0);
            #pragma omp for collapse(2)
            for (size_t b = 0; b < B; b++)
            for (size_t block = 0; block < blocks; block++) {
                size_t c0 = block * LANES, n = smin(LANES, E - c0);
                real A[MAX_STATE * LANES], carry[MAX_STATE * LANES], dAs[MAX_STATE * LANES], dDs[LANES] = {0};
                scan_decays(A, a_log, c0, n, N);
                memset(h, 0, wide * sizeof(real));
                memset(carry, 0, wide * sizeof(real));
                memset(dAs, 0, wide * sizeof(real));
                for (size_t k = 0; k < N; k++) {
                    memcpy(h + k * LANES, starts + ((b * chunks + chunk) * N + k) * E + c0, n * sizeof(real));
                    memcpy(carry + k * LANES, carries + (b * N + k) * E + c0, n * sizeof(real));
                }
                for (size_t t = 0; t < len; t++) {          // the states again
                    size_t row = b * T + t0 + t, at = row * E + c0;
                    real delta[LANES] = {0}, in[LANES] = {0};
                    for (size_t c = 0; c < n; c++) {
                        delta[c] = softplus(dt[at + c] + b_dt[c0 + c]);
                        in[c] = delta[c] * x[at + c];
                    }
                    for (size_t k = 0; k < N; k++) {
                        const real* before = h + t * wide + k * LANES;
                        real *now = h + (t + 1) * wide + k * LANES, *decay = a + t * wide + k * LANES, Bk = bc[row * 2 * N + k];
                        #pragma omp simd
                        for (size_t c = 0; c < LANES; c++) {
                            decay[c] = decay_exp(delta[c] * A[k * LANES + c]);
                            now[c] = decay[c] * before[c] + Bk * in[c];
                        }
                    }
                }
                for (size_t t = len; t-- > 0;) {
                    size_t row = b * T + t0 + t, at = row * E + c0;
                    real* share = shares + ((b * blocks + block) * L + t) * 2 * N;
                    real delta[LANES] = {0}, xt[LANES] = {0}, dyt[LANES] = {0}, gB[LANES] = {0}, ddelta[LANES] = {0};
                    for (size_t c = 0; c < n; c++) {
                        delta[c] = softplus(dt[at + c] + b_dt[c0 + c]);
                        xt[c] = x[at + c];
                        dyt[c] = dy[at + c];
                    }
                    for (size_t k = 0; k < N; k++) {
                        const real *before = h + t * wide + k * LANES, *now = before + wide, *decay = a + t * wide + k * LANES;
                        real Bk = bc[row * 2 * N + k], Ck = bc[row * 2 * N + N + k], dB = 0, dC = 0;
                        for (size_t c = 0; c < LANES; c++) {
                            real g = Ck * dyt[c] + carry[k * LANES + c], q = decay[c] * before[c];
                            dC += dyt[c] * now[c];
                            dB += g * delta[c] * xt[c];
                            gB[c] += g * Bk;
                            ddelta[c] += g * (Bk * xt[c] + A[k * LANES + c] * q);
                            dAs[k * LANES + c] += g * delta[c] * q;
                            carry[k * LANES + c] = decay[c] * g;
                        }
                        share[k] = dB;
                        share[N + k] = dC;
                    }
                    for (size_t c = 0; c < n; c++) {
                        dx[at + c] = d[c0 + c] * dyt[c] + delta[c] * gB[c];
                        ddt[at + c] = ddelta[c] * sigmoid(dt[at + c] + b_dt[c0 + c]);
                        dDs[c] += xt[c] * dyt[c];
                    }
                }
                for (size_t k = 0; k < N; k++) {
                    memcpy(carries + (b * N + k) * E + c0, carry + k * LANES, n * sizeof(real));
                    for (size_t c = 0; c < n; c++) dA[(b * N + k) * E + c0 + c] += dAs[k * LANES + c];
                }
                for (size_t c = 0; c < n; c++) dD[b * E + c0 + c] += dDs[c];
            }
            #pragma omp for collapse(2)
            for (size_t b = 0; b < B; b++)
            for (size_t t = 0; t < len; t++) {
                real* sum = dbc + (b * T + t0 + t) * 2 * N;
                memset(sum, 0, 2 * N * sizeof(real));
                for (size_t block = 0; block < blocks; block++)
                    for (size_t k = 0; k < 2 * N; k++) sum[k] += shares[((b * blocks + block) * L + t) * 2 * N + k];
            }
        }
        free(h);
    }
    for (size_t b = 0; b < B; b++)
        for (size_t c = 0; c < E; c++) {
            dd[c] += dD[b * E + c];
            for (size_t k = 0; k < N; k++) da_log[c * N + k] -= fast_exp(a_log[c * N + k]) * dA[(b * N + k) * E + c];
        }
    sum_rows(db_dt, ddt, B * T, E);
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba-2's scan, "state space duality" (SSD). One decay for all P channels and N state numbers of a head: then L tokens
// at a time can be written as matrix products. Heads h < H, channels p < P, E = H P:
//     Δ_t = softplus(dt_t + b_dt)     a_t = Δ_t A (<= 0)     S_t = e^{a_t} S_{t-1} + B_t (Δ_t x_t)ᵀ  (N,P)     y_t = C_t S_t + D x_t
// In a chunk that starts from state S:
//     y_t = sum_{j <= t} e^{a_{j+1} + ... + a_t} (C_t·B_j) Δ_j x_j  +  e^{a_0 + ... + a_t} C_t S  +  D x_t
//     S'  = e^{a_0 + ... + a_last} S + sum_j e^{a_{j+1} + ... + a_last} B_j (Δ_j x_j)ᵀ
// Every exponent is summed up as it stands here, from numbers of one sign. The difference of two running sums would be
// the same on paper, but its rounding error grows with everything that came before, and where it is masked its e^ can be
// infinite.
// xbc (B,T,W) with W = E + 2N holds x, B and C of each token beside each other; dt (B,T,H); a_log, b_dt, d (H).

// The steps and decays of one head in a chunk: delta (len), from_start[t] = e^{a_0 + ... + a_t}, to_end[j] = e^{a_{j+1} + ...
// + a_last}. dt points to the head's first step in the chunk. Returns A.
static real ssd_steps(real* delta, real* from_start, real* to_end, const real* dt, real a_log, real b_dt, size_t len, size_t H) {
    real A = -fast_exp(a_log), sum = 0;
    for (size_t t = 0; t < len; t++) delta[t] = softplus(dt[t * H] + b_dt);
    for (size_t t = 0; t < len; t++) from_start[t] = decay_exp(sum += delta[t] * A);
    sum = 0;
    for (size_t t = len; t-- > 0; sum += delta[t] * A) to_end[t] = decay_exp(sum);
    return A;
}

// decay[t][j] = e^{a_{j+1} + ... + a_t} for j <= t, else 0; (len,len) with row stride L. between (len) is scratch.
static void ssd_decays(real* decay, real* between, const real* delta, real A, size_t len, size_t L) {
    memset(decay, 0, len * L * sizeof(real));
    for (size_t t = 0; t < len; t++) {
        for (size_t j = 0; j < t; j++) between[j] += delta[t] * A;
        between[t] = 0;
        for (size_t j = 0; j <= t; j++) decay[t * L + j] = decay_exp(between[j]);
    }
}

// The state before each chunk, and after the last: states (B,chunks+1,H,N,P), of which the first must be set.
static void ssd_states(real* states, const real* xbc, const real* dt, const real* a_log, const real* b_dt,
                       size_t L, size_t B, size_t T, size_t H, size_t P, size_t N) {
    size_t chunks = num_chunks(T, L), E = H * P, W = E + 2 * N, size = N * P;
    #pragma omp parallel
    {
        real* delta = (real*)allocate((3 * L + L * P) * sizeof(real), "a chunk of the scan");
        real *from_start = delta + L, *to_end = from_start + L, *xw = to_end + L;
        #pragma omp for collapse(3)
        for (size_t b = 0; b < B; b++)
        for (size_t k = 0; k < chunks; k++)
        for (size_t h = 0; h < H; h++) {                    // what the chunk's own tokens leave in the state
            size_t row = b * T + k * L, len = smin(L, T - k * L);
            const real *x = xbc + row * W + h * P, *Bm = xbc + row * W + E;
            ssd_steps(delta, from_start, to_end, dt + row * H + h, a_log[h], b_dt[h], len, H);
            for (size_t j = 0; j < len; j++)
                for (size_t p = 0; p < P; p++) xw[j * P + p] = to_end[j] * delta[j] * x[j * W + p];
            small_matmul(states + ((b * (chunks + 1) + k + 1) * H + h) * size, Bm, xw, N, P, len, P, 1, W, P, 1, 0);
        }
        #pragma omp for collapse(2)
        for (size_t b = 0; b < B; b++)
        for (size_t h = 0; h < H; h++)
            for (size_t k = 0; k < chunks; k++) {           // and what of the past is still there
                size_t row = b * T + k * L, len = smin(L, T - k * L);
                ssd_steps(delta, from_start, to_end, dt + row * H + h, a_log[h], b_dt[h], len, H);
                const real* before = states + ((b * (chunks + 1) + k) * H + h) * size;
                real *after = states + ((b * (chunks + 1) + k + 1) * H + h) * size, decay = from_start[len - 1];
                for (size_t i = 0; i < size; i++) after[i] += decay * before[i];
            }
        free(delta);
    }
}

// y (B,T,E) as above; states (B,chunks+1,H,N,P) are kept for the backward. state (B,H,N,P): what the last call left,
// replaced by what this one leaves; NULL: from zero.
static void ssd_forward(real* y, real* states, const real* xbc, const real* dt, const real* a_log, const real* b_dt, const real* d,
                        real* state, size_t L, size_t B, size_t T, size_t H, size_t P, size_t N) {
    size_t chunks = num_chunks(T, L), E = H * P, W = E + 2 * N, size = H * N * P;
    for (size_t b = 0; b < B; b++) {
        real* first = states + b * (chunks + 1) * size;
        if (state) memcpy(first, state + b * size, size * sizeof(real)); else memset(first, 0, size * sizeof(real));
    }
    ssd_states(states, xbc, dt, a_log, b_dt, L, B, T, H, P, N);
    if (state) for (size_t b = 0; b < B; b++) memcpy(state + b * size, states + (b * (chunks + 1) + chunks) * size, size * sizeof(real));
    #pragma omp parallel
    {
        real* delta = (real*)allocate((4 * L + 2 * L * P + 2 * L * L) * sizeof(real), "a chunk of the scan");
        real *from_start = delta + L, *to_end = from_start + L, *between = to_end + L;
        real *xd = between + L, *past = xd + L * P, *scores = past + L * P, *M = scores + L * L;
        #pragma omp for collapse(2)
        for (size_t b = 0; b < B; b++)
        for (size_t k = 0; k < chunks; k++) {
            size_t row = b * T + k * L, len = smin(L, T - k * L);
            const real *Bm = xbc + row * W + E, *Cm = Bm + N;
            small_matmul(scores, Cm, Bm, len, len, N, L, W, 1, 1, W, 0);                    // C_t·B_j, for all heads
            for (size_t h = 0; h < H; h++) {
                const real *x = xbc + row * W + h * P, *S = states + (b * (chunks + 1) + k) * size + h * N * P;
                real* out = y + row * E + h * P;
                real A = ssd_steps(delta, from_start, to_end, dt + row * H + h, a_log[h], b_dt[h], len, H);
                ssd_decays(M, between, delta, A, len, L);
                for (size_t t = 0; t < len; t++) {
                    for (size_t j = 0; j <= t; j++) M[t * L + j] *= scores[t * L + j];
                    for (size_t p = 0; p < P; p++) xd[t * P + p] = delta[t] * x[t * W + p];
                }
                small_matmul(out, M, xd, len, P, len, E, L, 1, P, 1, 0);
                small_matmul(past, Cm, S, len, P, N, P, W, 1, P, 1, 0);
                for (size_t t = 0; t < len; t++)
                    for (size_t p = 0; p < P; p++) out[t * E + p] += from_start[t] * past[t * P + p] + d[h] * x[t * W + p];
            }
        }
        free(delta);
    }
}

// How many numbers ssd_backward needs to work with: dstates (B,chunks+1,H,N,P) and two of (B,T,H).
static size_t ssd_work(size_t L, size_t B, size_t T, size_t H, size_t P, size_t N) {
    return B * (num_chunks(T, L) + 1) * H * N * P + 2 * B * T * H;
}

// The gradient dS' of the state after a chunk goes from the last chunk to the first:
//     dS = e^{a_0 + ... + a_last} dS' + sum_t e^{a_0 + ... + a_t} C_t dy_tᵀ
// Inside a chunk, with M_tj = decay_tj (C_t·B_j) and u = Δ x:
//     du_j = sum_{t >= j} M_tj dy_t + to_end_j B_j dS'        dx = Δ du + D dy      dΔ = du·x + A da       dD = sum dy·x
//     dM_tj = dy_t·u_j          dC_t = sum_j decay_tj dM_tj B_j + from_start_t S dy_t
//                               dB_j = sum_t decay_tj dM_tj C_t + to_end_j dS' u_j                   (both summed over heads)
// a_t stands in every exponent that spans token t, so da_t is a sum over those, of the exponential times what it multiplies:
//     da_t = sum_{j < t <= i} M_ij dM_ij  +  sum_{i >= t} from_start_i (C_i S)·dy_i  +  sum_{j < t} to_end_j (B_j dS')·u_j  +  e^{all} S·dS'
// each summed as it stands (column sums from the last row up): no large terms that ought to cancel.
// dA_log = A dA = sum_t a_t da_t.  dxbc (B,T,W), ddt (B,T,H) are written; da_log, db_dt, dd are added to.
static void ssd_backward(real* dxbc, real* ddt, real* da_log, real* db_dt, real* dd, const real* dy, const real* states, const real* xbc,
                         const real* dt, const real* a_log, const real* b_dt, const real* d, real* work,
                         size_t L, size_t B, size_t T, size_t H, size_t P, size_t N) {
    size_t chunks = num_chunks(T, L), E = H * P, W = E + 2 * N, size = N * P;
    real *dstates = work, *row_a = dstates + B * (chunks + 1) * H * size, *row_d = row_a + B * T * H;
    #pragma omp parallel
    {
        real* delta = (real*)allocate((8 * L + 4 * L * P + L * N + 5 * L * L) * sizeof(real), "a chunk of the scan");
        real *from_start = delta + L, *to_end = from_start + L, *between = to_end + L, *columns = between + L;
        real *from_past = columns + L, *to_future = from_past + L, *da = to_future + L;
        real *u = da + L, *dyw = u + L * P, *du = dyw + L * P, *tmp = du + L * P, *wide = tmp + L * P;
        real *scores = wide + L * N, *dscores = scores + L * L, *decay = dscores + L * L, *M = decay + L * L, *dM = M + L * L;
        #pragma omp for collapse(3)
        for (size_t b = 0; b < B; b++)
        for (size_t k = 0; k < chunks; k++)
        for (size_t h = 0; h < H; h++) {                    // what the chunk's outputs ask of its first state
            size_t row = b * T + k * L, len = smin(L, T - k * L);
            ssd_steps(delta, from_start, to_end, dt + row * H + h, a_log[h], b_dt[h], len, H);
            for (size_t t = 0; t < len; t++)
                for (size_t p = 0; p < P; p++) dyw[t * P + p] = from_start[t] * dy[(row + t) * E + h * P + p];
            small_matmul(dstates + ((b * (chunks + 1) + k) * H + h) * size, xbc + row * W + E + N, dyw, N, P, len, P, 1, W, P, 1, 0);
        }
        #pragma omp for collapse(2)
        for (size_t b = 0; b < B; b++)
        for (size_t h = 0; h < H; h++) {                    // and what later chunks ask of it
            memset(dstates + ((b * (chunks + 1) + chunks) * H + h) * size, 0, size * sizeof(real));
            for (size_t k = chunks; k-- > 0;) {
                size_t row = b * T + k * L, len = smin(L, T - k * L);
                ssd_steps(delta, from_start, to_end, dt + row * H + h, a_log[h], b_dt[h], len, H);
                real* dS = dstates + ((b * (chunks + 1) + k) * H + h) * size;
                const real* later = dS + H * size;
                for (size_t i = 0; i < size; i++) dS[i] += from_start[len - 1] * later[i];
            }
        }
        #pragma omp for collapse(2)
        for (size_t b = 0; b < B; b++)
        for (size_t k = 0; k < chunks; k++) {
            size_t row = b * T + k * L, len = smin(L, T - k * L);
            const real *Bm = xbc + row * W + E, *Cm = Bm + N;
            real *dB = dxbc + row * W + E, *dC = dB + N;
            for (size_t t = 0; t < len; t++) memset(dB + t * W, 0, 2 * N * sizeof(real));
            memset(dscores, 0, L * L * sizeof(real));
            small_matmul(scores, Cm, Bm, len, len, N, L, W, 1, 1, W, 0);
            for (size_t h = 0; h < H; h++) {
                const real *x = xbc + row * W + h * P, *dyh = dy + row * E + h * P;
                const real *S = states + ((b * (chunks + 1) + k) * H + h) * size, *dS = dstates + ((b * (chunks + 1) + k + 1) * H + h) * size;
                real A = ssd_steps(delta, from_start, to_end, dt + row * H + h, a_log[h], b_dt[h], len, H);
                ssd_decays(decay, between, delta, A, len, L);
                for (size_t t = 0; t < len; t++) {
                    for (size_t j = 0; j < len; j++) M[t * L + j] = decay[t * L + j] * scores[t * L + j];
                    for (size_t p = 0; p < P; p++) {
                        u[t * P + p] = delta[t] * x[t * W + p];
                        dyw[t * P + p] = from_start[t] * dyh[t * E + p];
                    }
                }
                small_matmul(wide, dyw, S, len, N, P, N, P, 1, 1, P, 0);                    // from_start_t S dy_t
                for (size_t t = 0; t < len; t++) {
                    real sum = 0;
                    for (size_t n = 0; n < N; n++) {
                        sum += wide[t * N + n] * Cm[t * W + n];
                        dC[t * W + n] += wide[t * N + n];
                    }
                    from_past[t] = sum;
                }
                small_matmul(du, M, dyh, len, P, len, P, 1, L, E, 1, 0);
                small_matmul(tmp, Bm, dS, len, P, N, P, W, 1, P, 1, 0);                     // B_j dS'
                for (size_t j = 0; j < len; j++) {
                    real sum = 0;
                    for (size_t p = 0; p < P; p++) {
                        du[j * P + p] += to_end[j] * tmp[j * P + p];
                        sum += to_end[j] * tmp[j * P + p] * u[j * P + p];
                        tmp[j * P + p] = to_end[j] * u[j * P + p];
                    }
                    to_future[j] = sum;
                }
                small_matmul(dB, tmp, dS, len, N, P, W, P, 1, 1, P, 1);                     // to_end_j dS' u_j
                small_matmul(dM, dyh, u, len, len, P, L, E, 1, 1, P, 0);
                for (size_t t = 0; t < len; t++)
                    for (size_t j = 0; j <= t; j++) {
                        dscores[t * L + j] += decay[t * L + j] * dM[t * L + j];
                        M[t * L + j] *= dM[t * L + j];
                    }
                real across = 0, past = 0, future = 0;
                for (size_t i = 0; i < size; i++) across += S[i] * dS[i];
                across *= from_start[len - 1];
                memset(columns, 0, len * sizeof(real));
                for (size_t t = len; t-- > 0;) {
                    real inside = 0;
                    for (size_t j = 0; j < t; j++) { columns[j] += M[t * L + j]; inside += columns[j]; }
                    past += from_past[t];
                    da[t] = inside + past + across;
                }
                for (size_t t = 0; t < len; future += to_future[t++]) {
                    real du_x = 0, dy_x = 0, pre = dt[(row + t) * H + h] + b_dt[h];
                    da[t] += future;
                    for (size_t p = 0; p < P; p++) {
                        du_x += du[t * P + p] * x[t * W + p];
                        dy_x += dyh[t * E + p] * x[t * W + p];
                        dxbc[(row + t) * W + h * P + p] = delta[t] * du[t * P + p] + d[h] * dyh[t * E + p];
                    }
                    ddt[(row + t) * H + h] = (du_x + A * da[t]) * sigmoid(pre);
                    row_a[(row + t) * H + h] = delta[t] * A * da[t];
                    row_d[(row + t) * H + h] = dy_x;
                }
            }
            small_matmul(dC, dscores, Bm, len, N, len, W, L, 1, W, 1, 1);
            small_matmul(dB, dscores, Cm, len, N, len, W, 1, L, W, 1, 1);
        }
        free(delta);
    }
    sum_rows(da_log, row_a, B * T, H);
    sum_rows(dd, row_d, B * T, H);
    sum_rows(db_dt, ddt, B * T, H);
}

// ----------------------------------------------------------------------------------------------------------------
// fast Fourier transform, and the long convolution made of it. Channels lie beside each other in memory, so one transform
// runs for a vector of them at once: every "number" below is a vector. Two real channels make one complex one, so that
// a block is 2 WIDTH channels.

enum { WIDTH = VECTOR_BYTES / sizeof(real) };
typedef struct { vector re, im; } complex_vector;

// The length for sequences of T: a power of two of at least 2T, so that what a circular convolution wraps around falls
// on zeros, not on the future.
static size_t fft_length(size_t T) {
    size_t N = 2;
    while (N < 2 * T) N *= 2;
    return N;
}

// tw (2N): cos and sin of -2π i/N.
static void fft_twiddles(real* tw, size_t N) {
    #pragma omp parallel for
    for (size_t i = 0; i < N; i++) {
        double angle = -6.283185307179586 * i / N;
        tw[2 * i] = cos(angle);
        tw[2 * i + 1] = sin(angle);
    }
}

// x *= re + i im
static inline void rotate(complex_vector* x, real re, real im) {
    vector old = x->re;
    x->re = old * re - x->im * im;
    x->im = old * im + x->im * re;
}

// X_f = sum_t x_t w^{ft} with w = e^{-2πi/n}, in place. Four sums over quarters of x, with the twiddles w^j, w^2j, w^3j put
// on, are four transforms of a quarter of the length (two steps of the usual halving in one). Frequencies are left in
// bit-reversed order, which products don't mind. tw: of the whole transform, of which this is one `stride`-th.
static void fft_forward(complex_vector* x, size_t n, const real* tw, size_t stride) {
    if (n == 2) {
        complex_vector a = x[0], b = x[1];
        x[0].re = a.re + b.re; x[0].im = a.im + b.im;
        x[1].re = a.re - b.re; x[1].im = a.im - b.im;
    }
    if (n < 4) return;
    size_t q = n / 4;
    for (size_t j = 0; j < q; j++) {
        complex_vector *a = x + j, *b = a + q, *c = b + q, *d = c + q;
        const real *w1 = tw + 2 * j * stride, *w2 = w1 + 2 * j * stride, *w3 = w2 + 2 * j * stride;
        vector sr = a->re + c->re, si = a->im + c->im, tr = b->re + d->re, ti = b->im + d->im;     // a + c, b + d
        vector ur = a->re - c->re, ui = a->im - c->im, vr = b->re - d->re, vi = b->im - d->im;     // a - c, b - d
        a->re = sr + tr; a->im = si + ti;
        b->re = sr - tr; b->im = si - ti;
        c->re = ur + vi; c->im = ui - vr;           // (a - c) - i (b - d)
        d->re = ur - vi; d->im = ui + vr;
        rotate(b, w2[0], w2[1]);
        rotate(c, w1[0], w1[1]);
        rotate(d, w3[0], w3[1]);
    }
    if (q > 1) for (size_t k = 0; k < 4; k++) fft_forward(x + k * q, q, tw, stride * 4);
}

// The way back, step by step, from bit-reversed frequencies: n times the inverse.
static void fft_inverse(complex_vector* x, size_t n, const real* tw, size_t stride) {
    if (n == 2) { fft_forward(x, 2, tw, stride); return; }
    if (n < 4) return;
    size_t q = n / 4;
    if (q > 1) for (size_t k = 0; k < 4; k++) fft_inverse(x + k * q, q, tw, stride * 4);
    for (size_t j = 0; j < q; j++) {
        complex_vector *a = x + j, *b = a + q, *c = b + q, *d = c + q;
        const real *w1 = tw + 2 * j * stride, *w2 = w1 + 2 * j * stride, *w3 = w2 + 2 * j * stride;
        rotate(b, w2[0], -w2[1]);
        rotate(c, w1[0], -w1[1]);
        rotate(d, w3[0], -w3[1]);
        vector sr = a->re + b->re, si = a->im + b->im, tr = a->re - b->re, ti = a->im - b->im;
        vector ur = c->re + d->re, ui = c->im + d->im, vr = c->re - d->re, vi = c->im - d->im;
        a->re = sr + ur; a->im = si + ui;
        c->re = sr - ur; c->im = si - ui;
        b->re = tr - vi; b->im = ti + vr;           // t + i (c - d)
        d->re = tr + vi; d->im = ti - vr;
    }
}

// One pair of frequencies f and -f of the product below, which lie at i and j.
static inline void spectrum_pair(complex_vector* y, const complex_vector* k, const complex_vector* x, size_t i, size_t j,
                                 real scale, real conjugate, int add) {
    vector kar = k[i].re + k[j].re, kai = (k[i].im - k[j].im) * conjugate, kbr = k[i].im + k[j].im, kbi = (k[j].re - k[i].re) * conjugate;
    vector xar = x[i].re + x[j].re, xai = x[i].im - x[j].im, xbr = x[i].im + x[j].im, xbi = x[j].re - x[i].re;
    vector ar = (kar * xar - kai * xai) * scale, ai = (kar * xai + kai * xar) * scale;
    vector br = (kbr * xbr - kbi * xbi) * scale, bi = (kbr * xbi + kbi * xbr) * scale;
    y[i].re = add ? y[i].re + ar - bi : ar - bi;
    y[i].im = add ? y[i].im + ai + br : ai + br;
    if (i == j) return;
    y[j].re = add ? y[j].re + ar + bi : ar + bi;
    y[j].im = add ? y[j].im + br - ai : br - ai;
}

// The spectrum of k ∗ x / N (correlate = 0) or of k correlated with x (1: conj K), or += with add, N numbers each. y may
// be x. z = a + i b holds two real channels; since theirs are symmetric, A_f = (Z_f + conj Z_-f) / 2 and
// B_f = (Z_f - conj Z_-f) / 2i; each is multiplied on its own, and Y = A_k A_x + i B_k B_x. In bit-reversed order f and -f
// lie mirrored in each stretch from 2^m to 2^{m+1}: negating a number flips all bits above its lowest 1.
static void spectrum_product(complex_vector* y, const complex_vector* k, const complex_vector* x, size_t N, int correlate, int add) {
    real scale = 0.25 / N, conjugate = correlate ? -1 : 1;
    spectrum_pair(y, k, x, 0, 0, scale, conjugate, add);
    spectrum_pair(y, k, x, 1, 1, scale, conjugate, add);
    for (size_t m = 2; m < N; m *= 2)
        for (size_t r = 0; r < m / 2; r++) spectrum_pair(y, k, x, m + r, 2 * m - 1 - r, scale, conjugate, add);
}

// out (N) = the spectrum of channels c0 .. c0 + 2 WIDTH - 1 of x (T,C), followed by N - T zeros. Channels past C are zero.
static void spectrum_of(complex_vector* out, const real* x, const real* tw, size_t N, size_t T, size_t C, size_t c0) {
    size_t n = smin(2 * WIDTH, C - c0);
    memset(out, 0, N * sizeof *out);
    for (size_t t = 0; t < smin(T, N); t++) memcpy(out + t, x + t * C + c0, n * sizeof(real));     // re, then im
    fft_forward(out, N, tw, 1);
}

// c[t] = sum_{s <= t} k[t-s] p[s] + d p[t] for every sequence and channel: c, p (B,T,C), k (T,C), d (C). N >= 2T and its
// twiddles tw (2N). Cost T log T, and N numbers of memory a channel.
static void long_conv_forward(real* c, const real* p, const real* k, const real* d, const real* tw, size_t N, size_t B, size_t T, size_t C) {
    #pragma omp parallel
    {
        complex_vector* K = (complex_vector*)allocate(2 * N * sizeof *K, "a long convolution");
        complex_vector* X = K + N;
        #pragma omp for
        for (size_t c0 = 0; c0 < C; c0 += 2 * WIDTH) {
            size_t n = smin(2 * WIDTH, C - c0);
            spectrum_of(K, k, tw, N, T, C, c0);
            for (size_t b = 0; b < B; b++) {
                const real* from = p + b * T * C + c0;
                real* to = c + b * T * C + c0;
                spectrum_of(X, p + b * T * C, tw, N, T, C, c0);
                spectrum_product(X, K, X, N, 0, 0);
                fft_inverse(X, N, tw, 1);
                for (size_t t = 0; t < T; t++) {
                    const real* x = (const real*)(X + t);
                    for (size_t q = 0; q < n; q++) to[t * C + q] = x[q] + d[c0 + q] * from[t * C + q];
                }
            }
        }
        free(K);
    }
}

// dp[s] = sum_{t >= s} k[t-s] dc[t] + d dc[s],   dk[r] = sum over b, t of p[t-r] dc[t]: both are correlations.
// dd = sum p dc.  dp (B,T,C), dk (T,C) are written, dd is added to.
static void long_conv_backward(real* dp, real* dk, real* dd, const real* dc, const real* p, const real* k, const real* d,
                               const real* tw, size_t N, size_t B, size_t T, size_t C) {
    #pragma omp parallel
    {
        complex_vector* K = (complex_vector*)allocate(4 * N * sizeof *K, "a long convolution");
        complex_vector *P = K + N, *G = P + N, *dK = G + N;
        #pragma omp for
        for (size_t c0 = 0; c0 < C; c0 += 2 * WIDTH) {
            size_t n = smin(2 * WIDTH, C - c0);
            real sum[2 * WIDTH] = {0};
            spectrum_of(K, k, tw, N, T, C, c0);
            for (size_t b = 0; b < B; b++) {
                const real *pb = p + b * T * C, *dcb = dc + b * T * C;
                real* to = dp + b * T * C + c0;
                spectrum_of(P, pb, tw, N, T, C, c0);
                spectrum_of(G, dcb, tw, N, T, C, c0);
                spectrum_product(dK, P, G, N, 1, b > 0);
                spectrum_product(G, K, G, N, 1, 0);
                fft_inverse(G, N, tw, 1);
                for (size_t t = 0; t < T; t++) {
                    const real* g = (const real*)(G + t);
                    for (size_t q = 0; q < n; q++) {
                        to[t * C + q] = g[q] + d[c0 + q] * dcb[t * C + c0 + q];
                        sum[q] += pb[t * C + c0 + q] * dcb[t * C + c0 + q];
                    }
                }
            }
            fft_inverse(dK, N, tw, 1);
            for (size_t t = 0; t < T; t++) memcpy(dk + t * C + c0, dK + t, n * sizeof(real));
            for (size_t q = 0; q < n; q++) dd[c0 + q] += sum[q];
        }
        free(K);
    }
}

// out = sin(freq x) over rows of x (rows,F), freq (F)
static void sine_forward(real* out, const real* x, const real* freq, size_t rows, size_t F) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t f = 0; f < F; f++) out[r * F + f] = sin(freq[f] * x[r * F + f]);
}

// d' = d cos(freq x);  dfreq += sum d' x,  dx = d' freq.  d is dout on entry and dx on return.
static void sine_backward(real* d, real* dfreq, const real* x, const real* freq, size_t rows, size_t F) {
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++)
        for (size_t f = 0; f < F; f++) d[r * F + f] *= cos(freq[f] * x[r * F + f]);
    #pragma omp parallel for
    for (size_t f0 = 0; f0 < F; f0 += BLOCK)
        for (size_t r = 0; r < rows; r++)
            for (size_t f = f0; f < smin(F, f0 + BLOCK); f++) {
                dfreq[f] += d[r * F + f] * x[r * F + f];
                d[r * F + f] *= freq[f];
            }
}

// k = m e^{-time |δ|} in place: m (rows,C), the filter of tokens first, first+1, ... Time runs from 0 to 1 over the S
// tokens of training; |δ| goes linearly over the channels from ln(100)/1.5 to ln(100)/0.3, so that the
// fastest channel is down to a hundredth after 0.3 S tokens and the slowest would be after 1.5 S. Its own backward.
static void filter_window(real* k, size_t first, size_t rows, size_t S, size_t C) {
    const double slow = 4.605170185988092 / 1.5, fast = 4.605170185988092 / 0.3;
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        double time = (double)(first + r) / (S > 1 ? S - 1 : 1);
        for (size_t c = 0; c < C; c++) k[r * C + c] *= fast_exp(-time * (C > 1 ? slow + (fast - slow) * c / (C - 1) : slow));
    }
}

// z (rows,emb) = [time, cos(2π f i/S) of each band f, -sin of each] of tokens i = first, first+1, ..., for (emb-1)/2 bands
// f spread evenly from 1e-4 to their number less 1.
static void filter_positions(real* z, size_t first, size_t rows, size_t S, size_t emb) {
    size_t bands = (emb - 1) / 2;
    #pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        z[r * emb] = (double)(first + r) / (S > 1 ? S - 1 : 1);
        for (size_t k = 0; k < bands; k++) {
            double f = bands > 1 ? 1e-4 + (bands - 1 - 1e-4) * k / (bands - 1) : 1e-4;
            double angle = 6.283185307179586 * f * (first + r) / S;
            z[r * emb + 1 + k] = cos(angle);
            z[r * emb + 1 + bands + k] = -sin(angle);
        }
    }
}

// ================================================================================================================
// PART 2: the model. R = B*T rows. For each kind K: K_params and K_acts lay out one layer, and with the first what all layers
// share; K_forward and K_backward are the mixer between the norm before it and the residual stream.
// ================================================================================================================

// More kinds of initial values than NONE, NORMAL, UNIFORM, CONSTANT:
//     LOG_INDEX    log(n + 1) along each row: decays e^{-Δ}, e^{-2Δ}, ... (Mamba's A_log)
//     LOG_UNIFORM  the logarithm of a number from U(1, scale) (Mamba-2's A_log)
//     STEP_BIAS    b with softplus(b) log-uniform in [0.001, 0.1]: steps that remember 10 to 1000 tokens (Mamba, Mamba-2)
enum { LOG_INDEX = CONSTANT + 1, LOG_UNIFORM, STEP_BIAS };

// The initial value of number k of a tensor: what model_init calls.
static double initial_value(const Tensor* t, size_t k, uint64_t* rng) {
    switch (t->init) {
    case NORMAL: return t->scale * rng_normal(rng);
    case UNIFORM: return t->scale * (2 * rng_uniform(rng) - 1);
    case LOG_INDEX: return log((double)(k % t->shape[1] + 1));
    case LOG_UNIFORM: return log(1 + (t->scale - 1) * rng_uniform(rng));
    case STEP_BIAS: {
        double step = exp(log(0.001) + rng_uniform(rng) * (log(0.1) - log(0.001)));
        return step + log(-expm1(-step));               // softplus backwards
    }
    default: return t->scale;
    }
}

// A tensor of two dimensions that is not a matrix: no weight decay.
static real* no_decay(Table* t, real* x) {
    t->tensors[t->count - 1].decay = 0;
    return x;
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba (arXiv 2312.00752). E = expand C channels inside, N = d_state, K = conv:
//     [x | z] = W_in u            xs = silu(conv(x))             [δ | B | C] = W_x xs           dt = W_dt δ
//     y = scan(xs, dt, B, C)      out = W_out (y silu(z))
// One-token steps carry h (N numbers a channel) and the last K-1 inputs of the convolution.

typedef struct { real *w_in, *conv_w, *conv_b, *w_x, *w_dt, *b_dt, *a_log, *d, *w_out; } MambaParams;
typedef struct {
    real *xs, *u;                       // (R,E): silu(pre); y silu(z)
    real *dy, *dz, *dxs, *ddt;          // (R,E), only for training, like the rest
    real *ddelta, *dbc, *work;          // (R,rank), (R,2N), scan_work
} MambaScratch;                         // what one layer at a time needs: shared by all
typedef struct {
    real *x, *z;                        // (R,E): what W_in makes
    real *pre;                          // (R,E): conv(x), before silu
    real *delta, *bc;                   // (R,rank), (R,2N): what W_x makes: δ, and B and C
    real *dt;                           // (R,E): steps before bias and softplus
    real *y;                            // (R,E)
    real *starts;                       // (B,chunks,N,E): states before each chunk
    real *state, *window;               // carried: (B,N,E), (B,K-1,E)
    MambaScratch s;
} MambaActs;

static size_t mamba_rank(const Config* c) { return (c->channels + 15) / 16; }

// Tokens in a chunk. 0, the default, takes sqrt(T) or 64: then all the states kept are N sqrt(T) numbers a channel, less
// than a token's own activations whatever T.
static size_t mamba_chunk(const Config* c, size_t T) {
    size_t L = c->chunk;
    if (!L) for (L = 64; L * L < T; L++) ;
    return smin(L, T);
}

// Initial values: linear and convolution weights U(±fan_in^-½), the output's divided by sqrt(layers), since every layer
// adds to the residual stream; steps and decays as listed above; D = 1.
static void mamba_params(MambaParams* p, Table* t, real* base, const Config* c, int n) {
    size_t C = c->channels, E = c->expand * C, N = c->d_state, K = c->conv, rank = mamba_rank(c);
    double bound_e = 1 / sqrt((double)E), bound_k = 1 / sqrt((double)K);
    p->w_in   = take(t, base, 2 * E, C,        UNIFORM, 1 / sqrt((double)C), "block%d.w_in", n);
    p->conv_w = no_decay(t, take(t, base, E, K, UNIFORM, bound_k, "block%d.conv_w", n));
    p->conv_b = take(t, base, E, 0,            UNIFORM, bound_k, "block%d.conv_b", n);
    p->w_x    = take(t, base, rank + 2 * N, E, UNIFORM, bound_e, "block%d.w_x", n);
    p->w_dt   = take(t, base, E, rank,         UNIFORM, 1 / sqrt((double)rank), "block%d.w_dt", n);
    p->b_dt   = take(t, base, E, 0,            STEP_BIAS, 0, "block%d.b_dt", n);
    p->a_log  = no_decay(t, take(t, base, E, N, LOG_INDEX, 0, "block%d.a_log", n));
    p->d      = take(t, base, E, 0,            CONSTANT, 1, "block%d.d", n);
    p->w_out  = take(t, base, C, E,            UNIFORM, bound_e / sqrt((double)c->layers), "block%d.w_out", n);
}

static void mamba_scratch(MambaScratch* s, Table* t, real* base, const Config* c, size_t B, size_t T, int train) {
    size_t R = B * T, E = c->expand * c->channels, N = c->d_state;
    s->xs = take(t, base, R, E, NONE, 0, "xs");
    s->u  = take(t, base, R, E, NONE, 0, "u");
    if (!train) return;
    s->dy     = take(t, base, R, E, NONE, 0, "dy_scan");
    s->dz     = take(t, base, R, E, NONE, 0, "dz");
    s->dxs    = take(t, base, R, E, NONE, 0, "dxs");
    s->ddt    = take(t, base, R, E, NONE, 0, "ddt");
    s->ddelta = take(t, base, R, mamba_rank(c), NONE, 0, "ddelta");
    s->dbc    = take(t, base, R, 2 * N, NONE, 0, "dbc");
    s->work   = take(t, base, scan_work(mamba_chunk(c, T), B, E, N), 0, NONE, 0, "scan_work");
}

// first is layer 0. states == NULL: nothing is carried.
static void mamba_acts(MambaActs* a, const MambaActs* first, Table* t, real* base, Table* states, real* state_base, const Config* c, int n,
                       size_t B, size_t T, int train) {
    size_t R = B * T, E = c->expand * c->channels, N = c->d_state;
    a->x      = take(t, base, R, E, NONE, 0, "block%d.x", n);
    a->z      = take(t, base, R, E, NONE, 0, "block%d.z", n);
    a->pre    = take(t, base, R, E, NONE, 0, "block%d.pre", n);
    a->delta  = take(t, base, R, mamba_rank(c), NONE, 0, "block%d.delta", n);
    a->bc     = take(t, base, R, 2 * N, NONE, 0, "block%d.bc", n);
    a->dt     = take(t, base, R, E, NONE, 0, "block%d.dt", n);
    a->y      = take(t, base, R, E, NONE, 0, "block%d.y", n);
    a->starts = take(t, base, B * num_chunks(T, mamba_chunk(c, T)), N * E, NONE, 0, "block%d.starts", n);
    if (a == first) mamba_scratch(&a->s, t, base, c, B, T, train); else a->s = first->s;
    if (!states) return;
    a->state  = take(states, state_base, B, N * E, NONE, 0, "block%d.state", n);
    a->window = take(states, state_base, B, (c->conv - 1) * E, NONE, 0, "block%d.window", n);
}

// out (R,C) from x (R,C). With carry, it starts from what the last call left, and leaves its own.
static void mamba_forward(real* out, const real* x, MambaActs* a, const MambaParams* p, const Config* c, size_t B, size_t T, int carry) {
    const MambaScratch* s = &a->s;
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, rank = mamba_rank(c);
    linear_forward(a->x, x, p->w_in, NULL, R, C, E, C, 0);
    linear_forward(a->z, x, p->w_in + E * C, NULL, R, C, E, C, 0);
    short_conv_forward(a->pre, a->x, p->conv_w, p->conv_b, carry ? a->window : NULL, B, T, E, c->conv);
    silu_forward(s->xs, a->pre, R, E);
    linear_forward(a->delta, s->xs, p->w_x, NULL, R, E, rank, E, 0);
    linear_forward(a->bc, s->xs, p->w_x + rank * E, NULL, R, E, 2 * N, E, 0);
    linear_forward(a->dt, a->delta, p->w_dt, NULL, R, rank, E, rank, 0);
    selective_scan_forward(a->y, a->starts, s->xs, a->dt, a->bc, p->a_log, p->b_dt, p->d, carry ? a->state : NULL, mamba_chunk(c, T), B, T, E, N);
    swiglu_forward(s->u, a->z, a->y, R, E);
    linear_forward(out, s->u, p->w_out, NULL, R, E, C, E, 0);
}

// The lines of mamba_forward, last one first. x is what went in. dx (R,C) and g are added to.
static void mamba_backward(real* dx, MambaParams* g, const real* dout, const real* x, MambaActs* a, const MambaParams* p, const Config* c, size_t B, size_t T) {
    const MambaScratch* s = &a->s;
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, rank = mamba_rank(c);
    silu_forward(s->xs, a->pre, R, E);                                  // again, instead of keeping them
    swiglu_forward(s->u, a->z, a->y, R, E);
    memset(s->dz, 0, R * E * sizeof(real));
    linear_backward(s->dz, g->w_out, NULL, dout, s->u, p->w_out, R, E, C, E);
    swiglu_backward(s->dz, s->dy, a->z, a->y, R, E);                    // dz was du so far
    selective_scan_backward(s->dxs, s->ddt, s->dbc, g->a_log, g->b_dt, g->d, s->dy, s->xs, a->dt, a->bc, a->starts, p->a_log, p->b_dt, p->d,
                            s->work, mamba_chunk(c, T), B, T, E, N);
    memset(s->ddelta, 0, R * rank * sizeof(real));
    linear_backward(s->ddelta, g->w_dt, NULL, s->ddt, a->delta, p->w_dt, R, rank, E, rank);
    linear_backward(s->dxs, g->w_x, NULL, s->ddelta, s->xs, p->w_x, R, E, rank, E);
    linear_backward(s->dxs, g->w_x + rank * E, NULL, s->dbc, s->xs, p->w_x + rank * E, R, E, 2 * N, E);
    silu_backward(s->dxs, a->pre, R, E);
    short_conv_backward(s->dy, g->conv_w, g->conv_b, s->dxs, a->x, p->conv_w, B, T, E, c->conv);     // dy is dx of W_in's x
    linear_backward(dx, g->w_in, NULL, s->dy, x, p->w_in, R, C, E, C);
    linear_backward(dx, g->w_in + E * C, NULL, s->dz, x, p->w_in + E * C, R, C, E, C);
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba-2 (arXiv 2405.21060). E = expand C, H = E / P heads of P = head_dim channels, N = d_state, K = conv:
//     [z | x B C | dt] = W_in u         [x | B | C] = silu(conv([x | B | C]))         y = ssd(x, dt, B, C)
//     out = W_out RMSNorm(y silu(z))
// One-token steps carry S (N P numbers a head) and the last K-1 inputs of the convolution.

typedef struct { real *w_in, *conv_w, *conv_b, *b_dt, *a_log, *d, *norm_w, *w_out; } Mamba2Params;
typedef struct {
    real *act;                          // (R,E+2N): silu(pre)
    real *v, *nv;                       // (R,E): y silu(z); RMSNorm of it
    real *dnv, *dz, *dy;                // (R,E), only for training, like the rest
    real *dact, *dxbc, *ddt, *work;     // (R,E+2N), (R,E+2N), (R,H), ssd_work
} Mamba2Scratch;                        // what one layer at a time needs: shared by all
typedef struct {
    real *z;                            // (R,E)
    real *xbc, *pre;                    // (R,E+2N): x, B, C beside each other; conv of them, before silu
    real *dt;                           // (R,H): steps before bias and softplus
    real *y, *rstd;                     // (R,E), (R)
    real *states;                       // (B,chunks+1,H,N,P): before each chunk, and at the end
    real *state, *window;               // carried: (B,H,N,P), (B,K-1,E+2N)
    Mamba2Scratch s;
} Mamba2Acts;

// Tokens in a chunk: 0 takes 64, where the products inside a chunk and those with its state cost about the same.
static size_t mamba2_chunk(const Config* c, size_t T) { return smin(c->chunk ? c->chunk : 64, T); }

static size_t mamba2_heads(const Config* c) { return (size_t)c->expand * c->channels / c->head_dim; }

// Initial values as Mamba's, but -A from U(1,16) for each head.
static void mamba2_params(Mamba2Params* p, Table* t, real* base, const Config* c, int n) {
    size_t C = c->channels, E = c->expand * C, N = c->d_state, K = c->conv, H = mamba2_heads(c), W = E + 2 * N;
    double bound_k = 1 / sqrt((double)K);
    p->w_in   = take(t, base, E + W + H, C, UNIFORM, 1 / sqrt((double)C), "block%d.w_in", n);
    p->conv_w = no_decay(t, take(t, base, W, K, UNIFORM, bound_k, "block%d.conv_w", n));
    p->conv_b = take(t, base, W, 0, UNIFORM, bound_k, "block%d.conv_b", n);
    p->b_dt   = take(t, base, H, 0, STEP_BIAS, 0, "block%d.b_dt", n);
    p->a_log  = take(t, base, H, 0, LOG_UNIFORM, 16, "block%d.a_log", n);
    p->d      = take(t, base, H, 0, CONSTANT, 1, "block%d.d", n);
    p->norm_w = take(t, base, E, 0, CONSTANT, 1, "block%d.gate_norm_w", n);
    p->w_out  = take(t, base, C, E, UNIFORM, 1 / sqrt((double)E * c->layers), "block%d.w_out", n);
}

static void mamba2_scratch(Mamba2Scratch* s, Table* t, real* base, const Config* c, size_t B, size_t T, int train) {
    size_t R = B * T, E = c->expand * c->channels, N = c->d_state, W = E + 2 * N, H = mamba2_heads(c);
    s->act = take(t, base, R, W, NONE, 0, "act");
    s->v   = take(t, base, R, E, NONE, 0, "v");
    s->nv  = take(t, base, R, E, NONE, 0, "nv");
    if (!train) return;
    s->dy   = take(t, base, R, E, NONE, 0, "dy_scan");
    s->dnv  = take(t, base, R, E, NONE, 0, "dnv");
    s->dz   = take(t, base, R, E, NONE, 0, "dz");
    s->dact = take(t, base, R, W, NONE, 0, "dact");
    s->dxbc = take(t, base, R, W, NONE, 0, "dxbc");
    s->ddt  = take(t, base, R, H, NONE, 0, "ddt");
    s->work = take(t, base, ssd_work(mamba2_chunk(c, T), B, T, H, c->head_dim, N), 0, NONE, 0, "ssd_work");
}

// first is layer 0. states == NULL: nothing is carried.
static void mamba2_acts(Mamba2Acts* a, const Mamba2Acts* first, Table* t, real* base, Table* states, real* state_base, const Config* c, int n,
                        size_t B, size_t T, int train) {
    size_t R = B * T, E = c->expand * c->channels, N = c->d_state, W = E + 2 * N, H = mamba2_heads(c);
    a->z      = take(t, base, R, E, NONE, 0, "block%d.z", n);
    a->xbc    = take(t, base, R, W, NONE, 0, "block%d.xbc", n);
    a->pre    = take(t, base, R, W, NONE, 0, "block%d.pre", n);
    a->dt     = take(t, base, R, H, NONE, 0, "block%d.dt", n);
    a->y      = take(t, base, R, E, NONE, 0, "block%d.y", n);
    a->rstd   = take(t, base, R, 0, NONE, 0, "block%d.rstd", n);
    a->states = take(t, base, B * (num_chunks(T, mamba2_chunk(c, T)) + 1), N * E, NONE, 0, "block%d.states", n);
    if (a == first) mamba2_scratch(&a->s, t, base, c, B, T, train); else a->s = first->s;
    if (!states) return;
    a->state  = take(states, state_base, B, N * E, NONE, 0, "block%d.state", n);
    a->window = take(states, state_base, B, (c->conv - 1) * W, NONE, 0, "block%d.window", n);
}

// out (R,C) from x (R,C). With carry, it starts from what the last call left, and leaves its own.
static void mamba2_forward(real* out, const real* x, Mamba2Acts* a, const Mamba2Params* p, const Config* c, size_t B, size_t T, int carry) {
    const Mamba2Scratch* s = &a->s;
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, W = E + 2 * N, H = mamba2_heads(c);
    linear_forward(a->z, x, p->w_in, NULL, R, C, E, C, 0);
    linear_forward(a->xbc, x, p->w_in + E * C, NULL, R, C, W, C, 0);
    linear_forward(a->dt, x, p->w_in + (E + W) * C, NULL, R, C, H, C, 0);
    short_conv_forward(a->pre, a->xbc, p->conv_w, p->conv_b, carry ? a->window : NULL, B, T, W, c->conv);
    silu_forward(s->act, a->pre, R, W);
    ssd_forward(a->y, a->states, s->act, a->dt, p->a_log, p->b_dt, p->d, carry ? a->state : NULL, mamba2_chunk(c, T), B, T, H, c->head_dim, N);
    swiglu_forward(s->v, a->z, a->y, R, E);
    rmsnorm_forward(s->nv, a->rstd, s->v, p->norm_w, R, E);
    linear_forward(out, s->nv, p->w_out, NULL, R, E, C, E, 0);
}

// The lines of mamba2_forward, last one first. x is what went in. dx (R,C) and g are added to.
static void mamba2_backward(real* dx, Mamba2Params* g, const real* dout, const real* x, Mamba2Acts* a, const Mamba2Params* p, const Config* c, size_t B, size_t T) {
    const Mamba2Scratch* s = &a->s;
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, W = E + 2 * N, H = mamba2_heads(c);
    silu_forward(s->act, a->pre, R, W);                                 // again, instead of keeping them
    swiglu_forward(s->v, a->z, a->y, R, E);
    rmsnorm_forward(s->nv, a->rstd, s->v, p->norm_w, R, E);
    memset(s->dnv, 0, R * E * sizeof(real));
    linear_backward(s->dnv, g->w_out, NULL, dout, s->nv, p->w_out, R, E, C, E);
    memset(s->dz, 0, R * E * sizeof(real));
    rmsnorm_backward(s->dz, g->norm_w, s->dnv, s->v, a->rstd, p->norm_w, R, E);
    swiglu_backward(s->dz, s->dy, a->z, a->y, R, E);                    // dz was dv so far
    ssd_backward(s->dact, s->ddt, g->a_log, g->b_dt, g->d, s->dy, a->states, s->act, a->dt, p->a_log, p->b_dt, p->d, s->work,
                 mamba2_chunk(c, T), B, T, H, c->head_dim, N);
    silu_backward(s->dact, a->pre, R, W);
    short_conv_backward(s->dxbc, g->conv_w, g->conv_b, s->dact, a->xbc, p->conv_w, B, T, W, c->conv);
    linear_backward(dx, g->w_in, NULL, s->dz, x, p->w_in, R, C, E, C);
    linear_backward(dx, g->w_in + E * C, NULL, s->dxbc, x, p->w_in + E * C, R, C, W, C);
    linear_backward(dx, g->w_in + (E + W) * C, NULL, s->ddt, x, p->w_in + (E + W) * C, R, C, H, C);
}

// ----------------------------------------------------------------------------------------------------------------
// Hyena of order 2 (arXiv 2302.10866). A convolution as long as the text, whose kernel k (S,C) is computed by a small
// network from the position; S = seq, the trained length. F = 64:
//     [x0 | x1 | v] = conv3(W_in u + b_in)       p = x1 v       c = k ∗ p + D p       out = W_out (x0 c) + b_out
//     k = window(W4 sin(f (W3 sin(f (W2 sin(f (W1 z + b1)) + b2)) + b3))),    z from the position (filter_positions)
// One-token steps carry every p so far and the kernel's rows, one more each step: O(t C) a token. There is no kernel
// beyond S, so that is where a text has to end.

enum { HYENA_CONV = 3, FILTER = 64 };
typedef struct { real *w_in, *b_in, *conv_w, *conv_b, *w1, *b1, *w2, *b2, *w3, *b3, *w4, *freq, *d, *w_out, *b_out; } HyenaParams;
typedef struct {
    real *p, *g;                        // (R,C): x1 v; x0 c
    real *s, *tw;                       // (T,F): a sine; twiddles (2 fft_length(T))
    real *dg, *dc, *dp;                 // (R,C), only for training, like the rest
    real *dv, *du;                      // (R,3C)
    real *dk, *ds, *dh;                 // (T,C), (T,F), (T,F)
} HyenaScratch;                         // what one layer at a time needs: shared by all
typedef struct {
    real *u, *v;                        // (R,3C): W_in's output; the short convolution's: x0, x1, v beside each other
    real *c;                            // (R,C): the long convolution's
    real *z, *h1, *h2, *h3, *k;         // (T,emb), (T,F) before each sine, (T,C)
    real *window, *inputs, *kernel;     // carried: (1,2,3C), (1,S,C), (1,S,C): every p and every row of k so far
    const size_t* past;                 // how many those are
    HyenaScratch s;
} HyenaActs;

// Initial values: linear and convolution weights and biases U(±fan_in^-½), frequencies 1, D from N(0,1).
static void hyena_params(HyenaParams* p, Table* t, real* base, const Config* c, int n) {
    size_t C = c->channels, emb = c->emb, F = FILTER;
    double bound_c = 1 / sqrt((double)C), bound_k = 1 / sqrt((double)HYENA_CONV), bound_e = 1 / sqrt((double)emb), bound_f = 1 / sqrt((double)F);
    p->w_in   = take(t, base, 3 * C, C, UNIFORM, bound_c, "block%d.w_in", n);
    p->b_in   = take(t, base, 3 * C, 0, UNIFORM, bound_c, "block%d.b_in", n);
    p->conv_w = no_decay(t, take(t, base, 3 * C, HYENA_CONV, UNIFORM, bound_k, "block%d.conv_w", n));
    p->conv_b = take(t, base, 3 * C, 0, UNIFORM, bound_k, "block%d.conv_b", n);
    p->w1     = take(t, base, F, emb,   UNIFORM, bound_e, "block%d.filter_w1", n);
    p->b1     = take(t, base, F, 0,     UNIFORM, bound_e, "block%d.filter_b1", n);
    p->w2     = take(t, base, F, F,     UNIFORM, bound_f, "block%d.filter_w2", n);
    p->b2     = take(t, base, F, 0,     UNIFORM, bound_f, "block%d.filter_b2", n);
    p->w3     = take(t, base, F, F,     UNIFORM, bound_f, "block%d.filter_w3", n);
    p->b3     = take(t, base, F, 0,     UNIFORM, bound_f, "block%d.filter_b3", n);
    p->w4     = take(t, base, C, F,     UNIFORM, bound_f, "block%d.filter_w4", n);
    p->freq   = take(t, base, F, 0,     CONSTANT, 1, "block%d.filter_freq", n);
    p->d      = take(t, base, C, 0,     NORMAL, 1, "block%d.d", n);
    p->w_out  = take(t, base, C, C,     UNIFORM, bound_c, "block%d.w_out", n);
    p->b_out  = take(t, base, C, 0,     UNIFORM, bound_c, "block%d.b_out", n);
}

static void hyena_scratch(HyenaScratch* s, Table* t, real* base, const Config* c, size_t B, size_t T, int train) {
    size_t R = B * T, C = c->channels;
    s->p  = take(t, base, R, C, NONE, 0, "p");
    s->g  = take(t, base, R, C, NONE, 0, "g");
    s->s  = take(t, base, T, FILTER, NONE, 0, "filter_s");
    s->tw = take(t, base, 2 * fft_length(T), 0, NONE, 0, "twiddles");
    if (!train) return;
    s->dg = take(t, base, R, C, NONE, 0, "dg");
    s->dc = take(t, base, R, C, NONE, 0, "dc");
    s->dp = take(t, base, R, C, NONE, 0, "dp");
    s->dv = take(t, base, R, 3 * C, NONE, 0, "dv");
    s->du = take(t, base, R, 3 * C, NONE, 0, "du");
    s->dk = take(t, base, T, C, NONE, 0, "dk");
    s->ds = take(t, base, T, FILTER, NONE, 0, "filter_ds");
    s->dh = take(t, base, T, FILTER, NONE, 0, "filter_dh");
}

// first is layer 0. states == NULL: nothing is carried.
static void hyena_acts(HyenaActs* a, const HyenaActs* first, Table* t, real* base, Table* states, real* state_base, const Config* c, int n,
                       size_t B, size_t T, int train) {
    size_t R = B * T, C = c->channels, S = c->seq;
    a->u  = take(t, base, R, 3 * C, NONE, 0, "block%d.u", n);
    a->v  = take(t, base, R, 3 * C, NONE, 0, "block%d.v", n);
    a->c  = take(t, base, R, C, NONE, 0, "block%d.c", n);
    a->z  = take(t, base, T, c->emb, NONE, 0, "block%d.filter_z", n);
    a->h1 = take(t, base, T, FILTER, NONE, 0, "block%d.filter_h1", n);
    a->h2 = take(t, base, T, FILTER, NONE, 0, "block%d.filter_h2", n);
    a->h3 = take(t, base, T, FILTER, NONE, 0, "block%d.filter_h3", n);
    a->k  = take(t, base, T, C, NONE, 0, "block%d.k", n);
    if (a == first) hyena_scratch(&a->s, t, base, c, B, T, train); else a->s = first->s;
    if (!states) return;
    a->window = take(states, state_base, B, (HYENA_CONV - 1) * 3 * C, NONE, 0, "block%d.window", n);
    a->inputs = take(states, state_base, B, S * C, NONE, 0, "block%d.inputs", n);
    a->kernel = take(states, state_base, B, S * C, NONE, 0, "block%d.kernel", n);
}

// a->k (rows,C): the kernel for distances first, first+1, ...
static void hyena_filter_forward(HyenaActs* a, const HyenaParams* p, const Config* c, size_t first, size_t rows) {
    const HyenaScratch* s = &a->s;
    size_t C = c->channels, emb = c->emb, F = FILTER;
    filter_positions(a->z, first, rows, c->seq, emb);
    linear_forward(a->h1, a->z, p->w1, p->b1, rows, emb, F, emb, 0);
    sine_forward(s->s, a->h1, p->freq, rows, F);
    linear_forward(a->h2, s->s, p->w2, p->b2, rows, F, F, F, 0);
    sine_forward(s->s, a->h2, p->freq, rows, F);
    linear_forward(a->h3, s->s, p->w3, p->b3, rows, F, F, F, 0);
    sine_forward(s->s, a->h3, p->freq, rows, F);
    linear_forward(a->k, s->s, p->w4, NULL, rows, F, C, F, 0);
    filter_window(a->k, first, rows, c->seq, C);
}

// The lines of hyena_filter_forward for all T distances, last one first. s->dk comes in and is used up; g is added to.
static void hyena_filter_backward(HyenaParams* g, HyenaActs* a, const HyenaParams* p, const Config* c, size_t T) {
    const HyenaScratch* s = &a->s;
    size_t F = FILTER, bytes = T * F * sizeof(real);
    filter_window(s->dk, 0, T, c->seq, c->channels);
    sine_forward(s->s, a->h3, p->freq, T, F);
    memset(s->ds, 0, bytes);
    linear_backward(s->ds, g->w4, NULL, s->dk, s->s, p->w4, T, F, c->channels, F);
    sine_backward(s->ds, g->freq, a->h3, p->freq, T, F);
    sine_forward(s->s, a->h2, p->freq, T, F);
    memset(s->dh, 0, bytes);
    linear_backward(s->dh, g->w3, g->b3, s->ds, s->s, p->w3, T, F, F, F);
    sine_backward(s->dh, g->freq, a->h2, p->freq, T, F);
    sine_forward(s->s, a->h1, p->freq, T, F);
    memset(s->ds, 0, bytes);
    linear_backward(s->ds, g->w2, g->b2, s->dh, s->s, p->w2, T, F, F, F);
    sine_backward(s->ds, g->freq, a->h1, p->freq, T, F);
    linear_backward(NULL, g->w1, g->b1, s->ds, a->z, p->w1, T, c->emb, F, c->emb);
}

// c (1,C) = k ∗ p + D p of one more token, by the sum itself: of all p so far and the kernel, which grows by a row a token.
static void hyena_step(HyenaActs* a, const HyenaParams* p, const Config* c) {
    size_t C = c->channels, now = *a->past;
    if (now >= (size_t)c->seq) die("hyena has no kernel beyond the %d tokens it was made for: end the text there", c->seq);
    hyena_filter_forward(a, p, c, now, 1);
    memcpy(a->kernel + now * C, a->k, C * sizeof(real));
    memcpy(a->inputs + now * C, a->s.p, C * sizeof(real));
    #pragma omp parallel for if (now * C > 50000)
    for (size_t c0 = 0; c0 < C; c0 += BLOCK) {
        size_t n = smin(BLOCK, C - c0);
        real sum[BLOCK];
        for (size_t i = 0; i < n; i++) sum[i] = p->d[c0 + i] * a->s.p[c0 + i];
        for (size_t t = 0; t <= now; t++)
            for (size_t i = 0; i < n; i++) sum[i] += a->kernel[(now - t) * C + c0 + i] * a->inputs[t * C + c0 + i];
        memcpy(a->c + c0, sum, n * sizeof(real));
    }
}

// out (R,C) from x (R,C). T <= seq. With carry (B = T = 1), it goes on from the tokens before.
static void hyena_forward(real* out, const real* x, HyenaActs* a, const HyenaParams* p, const Config* c, size_t B, size_t T, int carry) {
    const HyenaScratch* s = &a->s;
    size_t R = B * T, C = c->channels;
    linear_forward(a->u, x, p->w_in, p->b_in, R, C, 3 * C, C, 0);
    short_conv_forward(a->v, a->u, p->conv_w, p->conv_b, carry ? a->window : NULL, B, T, 3 * C, HYENA_CONV);
    #pragma omp parallel for
    for (size_t r = 0; r < R; r++)
        for (size_t i = 0; i < C; i++) s->p[r * C + i] = a->v[r * 3 * C + C + i] * a->v[r * 3 * C + 2 * C + i];
    if (carry) {
        hyena_step(a, p, c);
    } else {
        hyena_filter_forward(a, p, c, 0, T);
        fft_twiddles(s->tw, fft_length(T));
        long_conv_forward(a->c, s->p, a->k, p->d, s->tw, fft_length(T), B, T, C);
    }
    #pragma omp parallel for
    for (size_t r = 0; r < R; r++)
        for (size_t i = 0; i < C; i++) s->g[r * C + i] = a->v[r * 3 * C + i] * a->c[r * C + i];
    linear_forward(out, s->g, p->w_out, p->b_out, R, C, C, C, 0);
}

// The lines of hyena_forward, last one first:  dx0 = c dg,  dc = x0 dg,  dx1 = v dp,  dv = x1 dp. x is what went in. dx (R,C)
// and g are added to.
static void hyena_backward(real* dx, HyenaParams* g, const real* dout, const real* x, HyenaActs* a, const HyenaParams* p, const Config* c, size_t B, size_t T) {
    const HyenaScratch* s = &a->s;
    size_t R = B * T, C = c->channels;
    #pragma omp parallel for
    for (size_t r = 0; r < R; r++)
        for (size_t i = 0; i < C; i++) {
            const real* v = a->v + r * 3 * C + i;
            s->p[r * C + i] = v[C] * v[2 * C];
            s->g[r * C + i] = v[0] * a->c[r * C + i];
        }
    memset(s->dg, 0, R * C * sizeof(real));
    linear_backward(s->dg, g->w_out, g->b_out, dout, s->g, p->w_out, R, C, C, C);
    #pragma omp parallel for
    for (size_t r = 0; r < R; r++)
        for (size_t i = 0; i < C; i++) {
            s->dv[r * 3 * C + i] = a->c[r * C + i] * s->dg[r * C + i];
            s->dc[r * C + i] = a->v[r * 3 * C + i] * s->dg[r * C + i];
        }
    fft_twiddles(s->tw, fft_length(T));
    long_conv_backward(s->dp, s->dk, g->d, s->dc, s->p, a->k, p->d, s->tw, fft_length(T), B, T, C);
    hyena_filter_backward(g, a, p, c, T);
    #pragma omp parallel for
    for (size_t r = 0; r < R; r++)
        for (size_t i = 0; i < C; i++) {
            const real* v = a->v + r * 3 * C + i;
            s->dv[r * 3 * C + C + i] = v[2 * C] * s->dp[r * C + i];
            s->dv[r * 3 * C + 2 * C + i] = v[C] * s->dp[r * C + i];
        }
    short_conv_backward(s->du, g->conv_w, g->conv_b, s->dv, a->u, p->conv_w, B, T, 3 * C, HYENA_CONV);
    linear_backward(dx, g->w_in, g->b_in, s->du, x, p->w_in, R, C, 3 * C, C);
}
