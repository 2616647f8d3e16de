// ----------------------------------------------------------------------------------------------------------------
// what the other mixers are made of: batched products, a short convolution, two scans, a long convolution

// `count` products like matmul's, of matrices that lie sc, sa, sb numbers apart: one launch for all chunks of all sequences.
template <typename Out>
static void matmul_batched(Out* C, const floatX* A, const floatX* B, size_t M, size_t N, size_t K, size_t ldc, size_t lda, size_t ldb,
                           int ta, int tb, float beta, size_t sc, size_t sa, size_t sb, size_t count) {
    float alpha = 1;
    cublasCheck(cublasGemmStridedBatchedEx(cublas, tb ? CUBLAS_OP_T : CUBLAS_OP_N, ta ? CUBLAS_OP_T : CUBLAS_OP_N, (int)N, (int)M, (int)K,
                                           &alpha, B, type_of(B), (int)ldb, (long long)sb, A, type_of(A), (int)lda, (long long)sa, &beta,
                                           C, type_of(C), (int)ldc, (long long)sc, (int)count, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

// log(1 + e^x), written so that no e^x overflows: for x > 0 it is x + log(1 + e^-x). Its derivative is sigmoid(x).
__device__ float softplus(float x) { return (x > 0 ? x : 0) + log1pf(fast_exp(x > 0 ? -x : x)); }

// e^x of an x <= 0, and 0 where e^x is: fast_exp ends at e^-87, which times a decay rate of e^87 would look like one.
__device__ float decay_exp(float x) { return x < -87 ? 0 : fast_exp(x); }

// Number of chunks of L tokens in T; the last may be shorter.
__host__ __device__ static size_t num_chunks(size_t T, size_t L) { return (T + L - 1) / L; }

// partial(splits,C): sums of a(rows,C) b(rows,C) over `piece` rows each, as in sum_rows_kernel
template <typename F>
__global__ void sum_products_kernel(float* partial, const F* a, const F* b, size_t rows, size_t piece, int C) {
    __shared__ float part[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    size_t begin = blockIdx.y * piece, end = begin + piece < rows ? begin + piece : rows;
    float sum = 0;
    if (c < C) for (size_t r = begin + warp; r < end; r += 8) sum += (float)a[r * C + c] * (float)b[r * C + c];
    part[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int w = 1; w < 8; w++) sum += part[w][lane];
    partial[(size_t)blockIdx.y * C + c] = sum;
}
// out(C) += sum over r of a(rows,C) b(rows,C): the gradient of every weight per channel (D)
template <typename F>
static void sum_products(float* out, const F* a, const F* b, size_t rows, size_t C) {
    size_t splits = split_count(rows), piece = (rows + splits - 1) / splits;
    sum_products_kernel<F><<<dim3(blocks(C, 32), (unsigned)splits), 256>>>(workspace, a, b, rows, piece, (int)C);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(C, 64), 64>>>(out, workspace, (int)splits, (int)C);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------------------------------------------
// short causal convolution: every channel on its own, over the last K tokens

enum { MAX_CONV = 8 };          // the largest K

// out[t] = bias + sum_k w[k] x[t-(K-1)+k].  out, x (B,T,C), w (C,K); bias (C), or NULL where the next kernel adds it. What came
// before the first token is zero, or stands in window (B,K-1,C), oldest first. A thread computes N channels of one token; the K
// tokens it reads are its neighbours' too, and come from cache.
template <int N>
__global__ void short_conv_forward_kernel(floatX* out, const floatX* x, const float* w, const float* bias, const float* window,
                                          size_t B, size_t T, size_t C, int K) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= B * T * C) return;
    size_t c = i % C, t = i / C % T, b = i / C / T;
    float sum[N];
    for (int q = 0; q < N; q++) sum[q] = bias ? bias[c + q] : 0;
    for (int k = 0; k < K; k++) {
        if (t + k >= K - 1) {
            Pack<floatX, N> row = load<N>(x + i - (K - 1 - k) * C);
            for (int q = 0; q < N; q++) sum[q] += w[(c + q) * K + k] * (float)row.v[q];
        } else if (window) {
            for (int q = 0; q < N; q++) sum[q] += w[(c + q) * K + k] * window[(b * (K - 1) + t + k) * C + c + q];
        }
    }
    Pack<floatX, N> o;
    for (int q = 0; q < N; q++) o.v[q] = (floatX)sum[q];
    store<N>(out + i, o);
}
// window becomes the last K-1 inputs. Row k is time T-(K-1)+k: oldest first, so nothing is lost.
__global__ void short_conv_window_kernel(float* window, const floatX* x, size_t B, size_t T, size_t C, int K) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * C) return;
    size_t c = i % C, b = i / C;
    float* before = window + b * (K - 1) * C + c;
    for (int k = 0; k < K - 1; k++)
        before[k * C] = T + k >= K - 1 ? (float)x[(b * T + T + k - (K - 1)) * C + c] : before[(T + k) * C];
}
// window NULL: nothing is carried.
static void short_conv_forward(floatX* out, const floatX* x, const float* w, const float* bias, float* window, size_t B, size_t T, size_t C, size_t K) {
    size_t n = B * T * C;
    if (C % 8 == 0) short_conv_forward_kernel<8><<<blocks(n / 8, 256), 256>>>(out, x, w, bias, window, B, T, C, (int)K);
    else            short_conv_forward_kernel<1><<<blocks(n, 256), 256>>>(out, x, w, bias, window, B, T, C, (int)K);
    cudaCheck(cudaGetLastError());
    if (!window) return;
    short_conv_window_kernel<<<blocks(B * C, 64), 64>>>(window, x, B, T, C, (int)K);
    cudaCheck(cudaGetLastError());
}

// x[s] was used by out[s], ..., out[s+K-1], the last with w[0]:  dx[s] = sum_k w[k] dout[s+(K-1)-k]  as far as T reaches.
template <int N>
__global__ void short_conv_backward_kernel(floatX* dx, const floatX* dout, const float* w, size_t B, size_t T, size_t C, int K) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (i >= B * T * C) return;
    size_t c = i % C, s = i / C % T;
    float sum[N] = {};
    for (int k = K - 1; k >= 0 && s + (K - 1 - k) < T; k--) {
        Pack<floatX, N> row = load<N>(dout + i + (K - 1 - k) * C);
        for (int q = 0; q < N; q++) sum[q] += w[(c + q) * K + k] * (float)row.v[q];
    }
    Pack<floatX, N> o;
    for (int q = 0; q < N; q++) o.v[q] = (floatX)sum[q];
    store<N>(dx + i, o);
}
// dw[k] = sum over b, t of dout[t] x[t-(K-1)+k]: pieces of rows as in sum_rows_kernel, K sums a thread. partial (splits,C,K)
__global__ void short_conv_backward_sums_kernel(float* partial, const floatX* dout, const floatX* x, size_t rows, size_t piece, size_t T, int C, int K) {
    __shared__ float part[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    size_t begin = blockIdx.y * piece, end = begin + piece < rows ? begin + piece : rows;
    float sum[MAX_CONV] = {};
    if (c < C) for (size_t r = begin + warp; r < end; r += 8) {
        float d = (float)dout[r * C + c];
        size_t t = r % T;
        #pragma unroll
        for (int k = 0; k < MAX_CONV; k++)              // unrolled, so that the sums are registers
            if (k < K && t + k >= K - 1) sum[k] += d * (float)x[(r - (K - 1 - k)) * C + c];
    }
    #pragma unroll
    for (int k = 0; k < MAX_CONV; k++) {
        if (k >= K) break;
        __syncthreads();
        part[warp][lane] = sum[k];
        __syncthreads();
        if (warp > 0 || c >= C) continue;
        for (int w = 1; w < 8; w++) sum[k] += part[w][lane];
        partial[((size_t)blockIdx.y * C + c) * K + k] = sum[k];
    }
}
// dx is written, dw and dbias are added to. No window: training only.
static void short_conv_backward(floatX* dx, float* dw, float* dbias, const floatX* dout, const floatX* x, const float* w,
                                size_t B, size_t T, size_t C, size_t K) {
    size_t n = B * T * C, splits = split_count(B * T), piece = (B * T + splits - 1) / splits;
    sum_rows(dbias, dout, B * T, C);
    if (C % 8 == 0) short_conv_backward_kernel<8><<<blocks(n / 8, 256), 256>>>(dx, dout, w, B, T, C, (int)K);
    else            short_conv_backward_kernel<1><<<blocks(n, 256), 256>>>(dx, dout, w, B, T, C, (int)K);
    cudaCheck(cudaGetLastError());
    short_conv_backward_sums_kernel<<<dim3(blocks(C, 32), (unsigned)splits), 256>>>(workspace, dout, x, B * T, piece, T, (int)C, (int)K);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(C * K, 64), 64>>>(dw, workspace, (int)splits, (int)(C * K));
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba's selective scan: a state of N numbers for every channel, whose step size, input and output weights depend on
// the token. For every sequence, channel d and n < N, along t:
//     Δ_t = softplus(dt_t + b_dt)         h_t = e^{Δ_t A} h_{t-1} + Δ_t B_t[n] x_t        y_t = sum_n C_t[n] h_t[n] + D x_t
// with A = -e^a_log. y, x, dt (B,T,E), bc (B,T,2N): B and C of each token, shared by all channels; a_log (E,N), b_dt, d (E).
//
// Time is cut into chunks of L tokens that are scanned in parallel: local, carry, apply. A chunk is the map
// h -> e^{A sum Δ} h + (what it reaches from 0), so of the decays only the sum of the steps is kept. A state is N times as
// large as a token; only those at the chunks' starts ever are in memory: starts (B,chunks,N,E).

enum { MAX_STATE = 256 };               // the largest N
enum { OWN = 4 };                       // numbers of the state that a thread takes in the local pass
enum { STATES = 16, CHANNELS = 16, STEPS = 16, PARTS = 8 };     // in the other: a block has 16 x 16 threads, see below

typedef struct { size_t B, T, E, N, L, chunks; } ScanSizes;

// Kernel 1. A thread takes one chunk of one channel and OWN of its N numbers, and walks from 0 to what it reaches. Threads run
// along channels, so loads are coalesced. reached (B,chunks,N,E), total (B,chunks,E): the sum of the steps.
__global__ void selective_scan_forward_local_kernel(float* reached, float* total, const floatX* x, const floatX* dt, const floatX* bc,
                                                    const float* a_log, const float* b_dt, ScanSizes q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, groups = (q.N + OWN - 1) / OWN;
    if (i >= q.B * q.chunks * groups * q.E) return;
    size_t e = i % q.E, n = i / q.E % groups * OWN, chunk = i / q.E / groups % q.chunks, b = i / q.E / groups / q.chunks;
    size_t begin = chunk * q.L, end = begin + q.L < q.T ? begin + q.L : q.T;
    float A[OWN], h[OWN] = {}, all = 0;
    #pragma unroll
    for (int j = 0; j < OWN; j++) A[j] = n + j < q.N ? -fast_exp(a_log[e * q.N + n + j]) : 0;
    for (size_t t = begin; t < end; t++) {
        size_t row = b * q.T + t, at = row * q.E + e;
        float delta = softplus((float)dt[at] + b_dt[e]), in = delta * (float)x[at];
        #pragma unroll
        for (int j = 0; j < OWN; j++)
            if (n + j < q.N) h[j] = decay_exp(delta * A[j]) * h[j] + (float)bc[row * 2 * q.N + n + j] * in;
        all += delta;
    }
    size_t k = b * q.chunks + chunk;
    #pragma unroll
    for (int j = 0; j < OWN; j++) if (n + j < q.N) reached[(k * q.N + n + j) * q.E + e] = h[j];
    if (n == 0) total[k * q.E + e] = all;
}
// Kernel 2. reached (B,chunks,N,E) becomes the state at the start of each chunk. state (B,N,E): what the last call left, replaced
// by what this one leaves; NULL: from zero.
__global__ void selective_scan_forward_carry_kernel(float* reached, float* state, const float* total, const float* a_log, ScanSizes q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.N * q.E) return;
    size_t e = i % q.E, n = i / q.E % q.N, b = i / q.E / q.N;
    float A = -fast_exp(a_log[e * q.N + n]), h = state ? state[i] : 0;
    for (size_t k = b * q.chunks; k < (b + 1) * q.chunks; k++) {
        size_t at = (k * q.N + n) * q.E + e;
        float end = decay_exp(A * total[k * q.E + e]) * h + reached[at];
        reached[at] = h;
        h = end;
    }
    if (state) state[i] = h;
}

// The tile that a block of kernel 3 works on: STEPS tokens x CHANNELS channels. As a loader and storer, thread i is at token
// i / CHANNELS and channel i % CHANNELS; as part of the scan it owns number i % STATES of channel i / STATES, so the 16
// threads of a channel are neighbours in a warp, and add up over n with shuffles.
__device__ float sum_states(float x) {
    for (int d = STATES / 2; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

// Kernel 3. A block takes one chunk of CHANNELS channels and walks it from its start, tile by tile. N > STATES: 16 numbers at a
// time; where one tile ends, h (CHANNELS,N) remembers the state for the next.
__global__ void selective_scan_forward_apply_kernel(floatX* y, const float* starts, const floatX* x, const floatX* dt, const floatX* bc,
                                                    const float* a_log, const float* b_dt, const float* d, ScanSizes q) {
    extern __shared__ float h[];
    __shared__ float delta[STEPS][CHANNELS];
    __shared__ float in[STEPS][CHANNELS];
    __shared__ float sum[STEPS][CHANNELS];
    int n = threadIdx.x % STATES, c = threadIdx.x / STATES, row = threadIdx.x / CHANNELS, column = threadIdx.x % CHANNELS, N = q.N;
    size_t groups = (q.E + CHANNELS - 1) / CHANNELS, first = blockIdx.x % groups * CHANNELS, k = blockIdx.x / groups, b = k / q.chunks;
    size_t begin = k % q.chunks * q.L, end = begin + q.L < q.T ? begin + q.L : q.T, e = first + c, mine = first + column;
    for (int s = n; s < N; s += STATES) h[c * N + s] = e < q.E ? starts[(k * N + s) * q.E + e] : 0;
    for (size_t t0 = begin; t0 < end; t0 += STEPS) {
        int len = end - t0 < STEPS ? (int)(end - t0) : STEPS, there = row < len && mine < q.E;
        size_t at = (b * q.T + t0 + row) * q.E + mine;
        float step = there ? softplus((float)dt[at] + b_dt[mine]) : 0, input = there ? (float)x[at] : 0;
        __syncthreads();                        // the last tile is done with
        delta[row][column] = step;
        in[row][column] = step * input;
        sum[row][column] = there ? d[mine] * input : 0;
        __syncthreads();
        for (int s = n; s - n < N; s += STATES) {
            int live = s < N && e < q.E;
            const floatX* bct = bc + (b * q.T + t0) * 2 * N + s;
            float A = live ? -fast_exp(a_log[e * N + s]) : 0, now = live ? h[c * N + s] : 0;
            for (int t = 0; t < len; t++, bct += 2 * N) {
                now = decay_exp(delta[t][c] * A) * now + (live ? (float)bct[0] * in[t][c] : 0);
                float out = sum_states(live ? (float)bct[N] * now : 0);
                if (n == 0) sum[t][c] += out;
            }
            if (live) h[c * N + s] = now;
        }
        __syncthreads();
        if (there) y[at] = (floatX)sum[row][column];
    }
}

static ScanSizes selective_scan_sizes(size_t L, size_t B, size_t T, size_t E, size_t N) {
    ScanSizes q = {B, T, E, N, L, num_chunks(T, L)};
    return q;
}
static void selective_scan_forward(floatX* y, float* starts, const floatX* x, const floatX* dt, const floatX* bc, const float* a_log,
                                   const float* b_dt, const float* d, float* state, size_t L, size_t B, size_t T, size_t E, size_t N) {
    ScanSizes q = selective_scan_sizes(L, B, T, E, N);
    size_t local = B * q.chunks * ((N + OWN - 1) / OWN) * E;
    selective_scan_forward_local_kernel<<<blocks(local, 128), 128>>>(starts, workspace, x, dt, bc, a_log, b_dt, q);
    cudaCheck(cudaGetLastError());
    selective_scan_forward_carry_kernel<<<blocks(B * N * E, 64), 64>>>(starts, state, workspace, a_log, q);
    cudaCheck(cudaGetLastError());
    unsigned grid = (unsigned)(B * q.chunks * blocks(E, CHANNELS));
    selective_scan_forward_apply_kernel<<<grid, STATES * CHANNELS, N * CHANNELS * sizeof(float)>>>(y, starts, x, dt, bc, a_log, b_dt, d, q);
    cudaCheck(cudaGetLastError());
}

// Backward. With a_t = e^{Δ_t A}, the whole gradient g_t of h_t runs the recurrence in reverse, and q_t = a_t h_{t-1}:
//     g_t = C_t dy_t + a_{t+1} g_{t+1}
//     dC_t = sum_d dy_t h_t            dB_t = sum_d g_t Δ_t x_t             dx_t = D dy_t + Δ_t sum_n g_t B_t
//     dΔ_t = sum_n g_t (B_t x_t + A q_t)         ddt = dΔ sigmoid(dt + b_dt)
//     dA = sum_t g_t Δ_t q_t           dA_log = A dA                        dD = sum_t x_t dy_t
// What a step hands on to its left is r_t = a_t g_t = a_t (C_t dy_t + r_{t+1}), a map again: the same three kernels, from the last
// chunk to the first. reached (B,chunks,N,E) is r at each chunk's left end.
__global__ void selective_scan_backward_local_kernel(float* reached, float* total, const floatX* dy, const floatX* dt, const floatX* bc,
                                                     const float* a_log, const float* b_dt, ScanSizes q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, groups = (q.N + OWN - 1) / OWN;
    if (i >= q.B * q.chunks * groups * q.E) return;
    size_t e = i % q.E, n = i / q.E % groups * OWN, chunk = i / q.E / groups % q.chunks, b = i / q.E / groups / q.chunks;
    size_t begin = chunk * q.L, end = begin + q.L < q.T ? begin + q.L : q.T;
    float A[OWN], r[OWN] = {}, all = 0;
    #pragma unroll
    for (int j = 0; j < OWN; j++) A[j] = n + j < q.N ? -fast_exp(a_log[e * q.N + n + j]) : 0;
    for (size_t t = end; t-- > begin;) {
        size_t row = b * q.T + t, at = row * q.E + e;
        float delta = softplus((float)dt[at] + b_dt[e]), d = (float)dy[at];
        #pragma unroll
        for (int j = 0; j < OWN; j++)
            if (n + j < q.N) r[j] = decay_exp(delta * A[j]) * ((float)bc[row * 2 * q.N + q.N + n + j] * d + r[j]);
        all += delta;
    }
    size_t k = b * q.chunks + chunk;
    #pragma unroll
    for (int j = 0; j < OWN; j++) if (n + j < q.N) reached[(k * q.N + n + j) * q.E + e] = r[j];
    if (n == 0) total[k * q.E + e] = all;
}
// reached (B,chunks,N,E) becomes the r that enters each chunk from its right
__global__ void selective_scan_backward_carry_kernel(float* reached, const float* total, const float* a_log, ScanSizes q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.N * q.E) return;
    size_t e = i % q.E, n = i / q.E % q.N, b = i / q.E / q.N;
    float A = -fast_exp(a_log[e * q.N + n]), r = 0;
    for (size_t k = (b + 1) * q.chunks; k-- > b * q.chunks;) {
        size_t at = (k * q.N + n) * q.E + e;
        float end = decay_exp(A * total[k * q.E + e]) * r + reached[at];
        reached[at] = r;
        r = end;
    }
}

// Kernel 3. A block takes one chunk and one of `parts` parts of the channels, CHANNELS of them at a time, threads as in the
// forward. It walks the chunk twice: forward, to keep the state before each tile in shared memory, and then back, tile by tile;
// the states inside a tile are computed once more, into registers. Nothing of size T N leaves the chip. q is a product of
// what is there, never h_t less something or divided by a decay, which may be 0.
// B and C get a share from every channel: a part adds up its own in shares (parts,B*T,2N), and kernel 4 the parts, in order.
// carries holds the r that enter; in their place the block leaves its dA.
__global__ void selective_scan_backward_apply_kernel(float* dx, floatX* ddt, float* shares, float* carries, const floatX* dy, const floatX* x,
                                                     const floatX* dt, const floatX* bc, const float* starts, const float* a_log,
                                                     const float* b_dt, const float* d, ScanSizes q, int parts) {
    extern __shared__ float kept[];             // (tiles,CHANNELS,N) states, (CHANNELS,N) r, (CHANNELS,N) dA
    __shared__ float delta[STEPS][CHANNELS];
    __shared__ float xs[STEPS][CHANNELS];
    __shared__ float dys[STEPS][CHANNELS];
    __shared__ float gB[STEPS][CHANNELS];
    __shared__ float ddelta[STEPS][CHANNELS];
    __shared__ float dB[STEPS][CHANNELS / 2][STATES];           // of each warp, which has two channels
    __shared__ float dC[STEPS][CHANNELS / 2][STATES];
    int n = threadIdx.x % STATES, c = threadIdx.x / STATES, row = threadIdx.x / CHANNELS, column = threadIdx.x % CHANNELS, N = q.N;
    size_t k = blockIdx.x / parts, b = k / q.chunks, begin = k % q.chunks * q.L, end = begin + q.L < q.T ? begin + q.L : q.T;
    int tiles = (int)((end - begin + STEPS - 1) / STEPS), part = blockIdx.x % parts;
    float *carry = kept + (q.L + STEPS - 1) / STEPS * CHANNELS * N, *dA = carry + CHANNELS * N;
    float* share = shares + ((size_t)part * q.B * q.T + b * q.T) * 2 * N;
    for (size_t first = (size_t)part * CHANNELS; first < q.E; first += (size_t)parts * CHANNELS) {
        size_t e = first + c, mine = first + column;
        for (int s = n; s < N; s += STATES) {
            size_t at = (k * N + s) * q.E + e;
            kept[c * N + s] = e < q.E ? starts[at] : 0;
            carry[c * N + s] = e < q.E ? carries[at] : 0;
            dA[c * N + s] = 0;
        }
        for (int pass = 1; pass < 2 * tiles; pass++) {          // tiles 0 .. tiles-2 forward, then tiles-1 .. 0 back
            int back = pass >= tiles, tile = back ? 2 * tiles - 1 - pass : pass - 1;
            size_t t0 = begin + (size_t)tile * STEPS, at = (b * q.T + t0 + row) * q.E + mine;
            int len = end - t0 < STEPS ? (int)(end - t0) : STEPS, there = row < len && mine < q.E;
            float pre = there ? (float)dt[at] + b_dt[mine] : 0;
            __syncthreads();                                    // the last tile is done with
            delta[row][column] = there ? softplus(pre) : 0;
            xs[row][column] = there ? (float)x[at] : 0;
            dys[row][column] = there ? (float)dy[at] : 0;
            gB[row][column] = ddelta[row][column] = 0;
            __syncthreads();
            for (int s0 = 0; s0 < N; s0 += STATES) {
                int s = s0 + n, live = s < N && e < q.E;
                const floatX* bct = bc + (b * q.T + t0) * 2 * N + s;
                float A = live ? -fast_exp(a_log[e * N + s]) : 0, h = live ? kept[(tile * CHANNELS + c) * N + s] : 0;
                float decay[STEPS], before[STEPS];
                #pragma unroll
                for (int t = 0; t < STEPS; t++) {
                    if (t >= len) break;
                    decay[t] = decay_exp(delta[t][c] * A);
                    before[t] = h;
                    h = decay[t] * h + (live ? (float)bct[2 * N * t] * delta[t][c] * xs[t][c] : 0);
                }
                if (!back) {
                    if (live) kept[((tile + 1) * CHANNELS + c) * N + s] = h;
                    continue;
                }
                float r = live ? carry[c * N + s] : 0, sum_dA = 0;
                #pragma unroll
                for (int t = STEPS - 1; t >= 0; t--) {
                    if (t >= len) continue;
                    float Bt = live ? (float)bct[2 * N * t] : 0, Ct = live ? (float)bct[2 * N * t + N] : 0, in = delta[t][c] * xs[t][c];
                    float past = decay[t] * before[t], g = Ct * dys[t][c] + r;
                    float share_B = g * in, share_C = dys[t][c] * (past + Bt * in);
                    share_B += __shfl_xor_sync(0xffffffffu, share_B, STATES);           // the warp's other channel
                    share_C += __shfl_xor_sync(0xffffffffu, share_C, STATES);
                    if (c % 2 == 0) { dB[t][c / 2][n] = share_B; dC[t][c / 2][n] = share_C; }
                    float sum_gB = sum_states(g * Bt), sum_delta = sum_states(g * (Bt * xs[t][c] + A * past));
                    if (n == 0) { gB[t][c] += sum_gB; ddelta[t][c] += sum_delta; }
                    sum_dA += g * delta[t][c] * past;
                    r = decay[t] * g;
                }
                if (live) { carry[c * N + s] = r; dA[c * N + s] += sum_dA; }
                __syncthreads();
                int number = s0 + column;                       // thread i adds up dB, dC of token i / 16, number i % 16
                if (row < len && number < N) {
                    float sum_B = 0, sum_C = 0, *to = share + (t0 + row) * 2 * N + number;
                    for (int w = 0; w < CHANNELS / 2; w++) { sum_B += dB[row][w][column]; sum_C += dC[row][w][column]; }
                    to[0] = first < (size_t)parts * CHANNELS ? sum_B : to[0] + sum_B;
                    to[N] = first < (size_t)parts * CHANNELS ? sum_C : to[N] + sum_C;
                }
                __syncthreads();
            }
            if (!back || !there) continue;
            dx[at] = d[mine] * dys[row][column] + delta[row][column] * gB[row][column];
            ddt[at] = (floatX)(ddelta[row][column] * sigmoid(pre));
        }
        for (int s = n; s < N; s += STATES) if (e < q.E) carries[(k * N + s) * q.E + e] = dA[c * N + s];
    }
}
// Kernel 4, sums in a fixed order: dbc (B*T,2N) of the parts; da_log (E,N) += A sum over chunks of dA.
__global__ void selective_scan_backward_shares_kernel(floatX* dbc, const float* shares, size_t n, int parts) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0;
    for (int part = 0; part < parts; part++) sum += shares[part * n + i];
    dbc[i] = (floatX)sum;
}
__global__ void selective_scan_backward_decays_kernel(float* da_log, const float* dA, const float* a_log, ScanSizes q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.N * q.E) return;
    size_t e = i % q.E, n = i / q.E;
    float sum = 0;
    for (size_t k = 0; k < q.B * q.chunks; k++) sum += dA[k * q.N * q.E + i];
    da_log[e * q.N + n] -= fast_exp(a_log[e * q.N + n]) * sum;
}

// Into how many parts the channels of a chunk go: enough blocks for a GPU, few enough shares of dB and dC.
static int scan_parts(size_t E) { return (int)smin(PARTS, blocks(E, CHANNELS)); }

// How many numbers the workspace must hold: carries, totals, shares.
static size_t selective_scan_workspace(size_t L, size_t B, size_t T, size_t E, size_t N) {
    return B * num_chunks(T, L) * (N + 1) * E + scan_parts(E) * B * T * 2 * N;
}

// dx (float: two products with weights will be added), ddt (B,T,E), dbc (B,T,2N) are written; da_log, db_dt, dd are added to.
static void selective_scan_backward(float* dx, floatX* ddt, floatX* dbc, float* da_log, float* db_dt, float* dd, const floatX* dy, const floatX* x,
                                    const floatX* dt, const floatX* bc, const float* starts, const float* a_log, const float* b_dt, const float* d,
                                    size_t L, size_t B, size_t T, size_t E, size_t N) {
    ScanSizes q = selective_scan_sizes(L, B, T, E, N);
    size_t local = B * q.chunks * ((N + OWN - 1) / OWN) * E, shared = (num_chunks(L, STEPS) + 2) * CHANNELS * N * sizeof(float);
    float *carries = workspace, *total = carries + B * q.chunks * N * E, *shares = total + B * q.chunks * E;
    int parts = scan_parts(E);
    selective_scan_backward_local_kernel<<<blocks(local, 128), 128>>>(carries, total, dy, dt, bc, a_log, b_dt, q);
    cudaCheck(cudaGetLastError());
    selective_scan_backward_carry_kernel<<<blocks(B * N * E, 64), 64>>>(carries, total, a_log, q);
    cudaCheck(cudaGetLastError());
    cudaCheck(cudaFuncSetAttribute(selective_scan_backward_apply_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    unsigned grid = (unsigned)(B * q.chunks * parts);
    selective_scan_backward_apply_kernel<<<grid, STATES * CHANNELS, shared>>>(dx, ddt, shares, carries, dy, x, dt, bc, starts, a_log, b_dt, d, q, parts);
    cudaCheck(cudaGetLastError());
    selective_scan_backward_shares_kernel<<<blocks(B * T * 2 * N, 256), 256>>>(dbc, shares, B * T * 2 * N, parts);
    cudaCheck(cudaGetLastError());
    selective_scan_backward_decays_kernel<<<blocks(N * E, 64), 64>>>(da_log, carries, a_log, q);
    cudaCheck(cudaGetLastError());
    sum_rows(db_dt, ddt, B * T, E);
    sum_products(dd, x, dy, B * T, E);
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba-2's scan, "state space duality" (SSD). One decay for all P channels and N state numbers of a head: then L tokens
// at a time can be written as matrix products. Heads h < H, channels p < P, E = H P:
//     Δ_t = softplus(dt_t + b_dt)     a_t = Δ_t A (<= 0)     S_t = e^{a_t} S_{t-1} + B_t (Δ_t x_t)ᵀ  (N,P)     y_t = C_t S_t + D x_t
// In a chunk that starts from state S, with u_t = Δ_t x_t:
//     y_t = sum_{j <= t} e^{a_{j+1} + ... + a_t} (C_t·B_j) u_j  +  e^{a_0 + ... + a_t} C_t S  +  D x_t
//     S'  = e^{a_0 + ... + a_last} S + sum_j e^{a_{j+1} + ... + a_last} B_j u_jᵀ
// Every exponent is summed up as it stands here, from numbers of one sign (why: see the .c).
//
// Here every product is one batched call for all chunks of all sequences. All heads share B and C, so those with a state are
// done for all heads at once, with E columns; those inside a chunk have one (L,L) matrix a head. Kernels only prepare operands and
// apply decays. For one stride to lead from chunk to chunk, T is padded to Tp = chunks L; in the padding all operands are zero
// and so are the steps, which changes nothing. Two layouts: time first (B,Tp,E), and head first (B,H,Tp,P).
// act (B,T,W) with W = E + 2N holds x, B and C of each token beside each other; dt (B,T,H); a_log, b_dt, d (H).

typedef struct { size_t B, T, H, P, N, L, chunks, Tp, E, W; } SSD;
static SSD ssd_sizes(size_t L, size_t B, size_t T, size_t H, size_t P, size_t N) {
    SSD q = {B, T, H, P, N, L, num_chunks(T, L), num_chunks(T, L) * L, H * P, H * P + 2 * N};
    return q;
}

// What both passes compute on the way. Q = B*Tp rows, G = B*chunks chunks.
typedef struct {
    float *delta, *from_start, *to_end;     // (Q,H): Δ; e^{a_0 + ... + a_t}; e^{a_{t+1} + ... + a_last}, of a chunk
    floatX *b, *c;                          // (Q,N): B, C
    floatX *u, *uw;                         // (B,H,Tp,P): Δ x;  (Q,E): to_end Δ x
    floatX *scores, *M;                     // (G,L,L): C_t·B_j, for all heads;  (B,H,chunks,L,L): times the decay from j to t
    floatX *inside, *past;                  // (B,H,Tp,P): M u;  (Q,E): C_t S. Backward: Mᵀ dy
    float *sums;                            // (G,N,E): what a chunk adds to the state
    floatX *dyh, *dyw, *dstates, *future;   // only for training: (B,H,Tp,P), (Q,E), (G,N,E), (Q,E): dy; from_start dy; dS'; B_j dS'
    floatX *dM, *dscores;                   // as M, scores
    float *db, *dc;                         // (Q,N)
    float *from_past, *to_future, *du_x, *dy_x;     // (Q,H): see ssd_backward_rows_kernel
} SSDScratch;
static void ssd_scratch(SSDScratch* s, const Layout* l, SSD q, int train) {
    size_t Q = q.B * q.Tp, G = q.B * q.chunks;
    s->delta      = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_delta");
    s->from_start = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_from_start");
    s->to_end     = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_to_end");
    s->b      = take(l->table, l->base, Q, q.N, NONE, 0, "ssd_b");
    s->c      = take(l->table, l->base, Q, q.N, NONE, 0, "ssd_c");
    s->u      = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_u");
    s->uw     = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_uw");
    s->scores = take(l->table, l->base, Q, q.L, NONE, 0, "ssd_scores");
    s->M      = take(l->table, l->base, Q * q.H, q.L, NONE, 0, "ssd_M");
    s->inside = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_inside");
    s->past   = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_past");
    s->sums   = take(l->exact, l->exact_base, G * q.N, q.E, NONE, 0, "ssd_sums");
    if (!train) return;
    s->dyh     = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_dyh");
    s->dyw     = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_dyw");
    s->dstates = take(l->table, l->base, G * q.N, q.E, NONE, 0, "ssd_dstates");
    s->future  = take(l->table, l->base, Q, q.E, NONE, 0, "ssd_future");
    s->dM      = take(l->table, l->base, Q * q.H, q.L, NONE, 0, "ssd_dM");
    s->dscores = take(l->table, l->base, Q, q.L, NONE, 0, "ssd_dscores");
    s->db = take(l->exact, l->exact_base, Q, q.N, NONE, 0, "ssd_db");
    s->dc = take(l->exact, l->exact_base, Q, q.N, NONE, 0, "ssd_dc");
    s->from_past = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_from_past");
    s->to_future = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_to_future");
    s->du_x      = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_du_x");
    s->dy_x      = take(l->exact, l->exact_base, Q, q.H, NONE, 0, "ssd_dy_x");
}

// Where number i of (B,Tp,E) lies head first.
__device__ size_t head_first(size_t i, SSD q) {
    size_t e = i % q.E, t = i / q.E % q.Tp, b = i / q.E / q.Tp;
    return ((b * q.H + e / q.P) * q.Tp + t) * q.P + e % q.P;
}

// The steps and decays of one chunk of one head, a thread each.
__global__ void ssd_steps_kernel(float* delta, float* from_start, float* to_end, const floatX* dt, const float* a_log, const float* b_dt, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.chunks * q.H) return;
    size_t h = i % q.H, k = i / q.H % q.chunks, b = i / q.H / q.chunks, at = (b * q.Tp + k * q.L) * q.H + h;
    float A = -fast_exp(a_log[h]), sum = 0;
    for (size_t j = 0; j < q.L; j++) {
        size_t t = k * q.L + j;
        float step = t < q.T ? softplus((float)dt[(b * q.T + t) * q.H + h] + b_dt[h]) : 0;
        delta[at + j * q.H] = step;
        from_start[at + j * q.H] = fast_exp(sum += step * A);
    }
    sum = 0;
    for (size_t j = q.L; j-- > 0; sum += delta[at + j * q.H] * A) to_end[at + j * q.H] = fast_exp(sum);
}
// act -> b, c, u, uw, with zeros in the padding. A thread writes one number of one padded row.
__global__ void ssd_operands_kernel(floatX* bm, floatX* cm, floatX* u, floatX* uw, const floatX* act, const float* delta, const float* to_end, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.Tp * q.W) return;
    size_t w = i % q.W, row = i / q.W, t = row % q.Tp, b = row / q.Tp;
    float v = t < q.T ? (float)act[(b * q.T + t) * q.W + w] : 0;
    if (w < q.E) {
        size_t at = row * q.H + w / q.P;
        u[head_first(row * q.E + w, q)] = (floatX)(delta[at] * v);
        uw[row * q.E + w] = (floatX)(to_end[at] * delta[at] * v);
    } else if (w < q.E + q.N) {
        bm[row * q.N + w - q.E] = (floatX)v;
    } else {
        cm[row * q.N + w - q.E - q.N] = (floatX)v;
    }
}
// M[t][j] = e^{a_{j+1} + ... + a_t} scores[t][j] for j <= t, else 0. A block takes one chunk of one head, a thread its column j, down
// which the exponent grows by one term a row; neighbours write neighbours.
__global__ void ssd_mask_kernel(floatX* M, const floatX* scores, const float* delta, const float* a_log, SSD q) {
    size_t k = blockIdx.x % q.chunks, h = blockIdx.x / q.chunks % q.H, b = blockIdx.x / q.chunks / q.H, L = q.L;
    const float* step = delta + (b * q.Tp + k * L) * q.H + h;
    float A = -fast_exp(a_log[h]);
    M += (size_t)blockIdx.x * L * L;
    scores += (b * q.chunks + k) * L * L;
    for (size_t j = threadIdx.x; j < L; j += blockDim.x) {
        float sum = 0;
        for (size_t t = 0; t < L; t++) {
            if (t > j) sum += step[t * q.H] * A;
            M[t * L + j] = (floatX)(t < j ? 0 : fast_exp(sum) * (float)scores[t * L + j]);
        }
    }
}
// What a chunk's products need, and M.
static void ssd_prepare(const SSDScratch* s, const floatX* act, const floatX* dt, const float* a_log, const float* b_dt, SSD q) {
    size_t Q = q.B * q.Tp, G = q.B * q.chunks, L = q.L;
    ssd_steps_kernel<<<blocks(G * q.H, 64), 64>>>(s->delta, s->from_start, s->to_end, dt, a_log, b_dt, q);
    cudaCheck(cudaGetLastError());
    ssd_operands_kernel<<<blocks(Q * q.W, 256), 256>>>(s->b, s->c, s->u, s->uw, act, s->delta, s->to_end, q);
    cudaCheck(cudaGetLastError());
    matmul_batched(s->scores, s->c, s->b, L, L, q.N, L, q.N, q.N, 0, 1, 0, L * L, L * q.N, L * q.N, G);
    ssd_mask_kernel<<<(unsigned)(G * q.H), 64>>>(s->M, s->scores, s->delta, a_log, q);
    cudaCheck(cudaGetLastError());
}

// states (G,N,E): S before each chunk, rounded for the products; the running state itself is float. state (B,H,N,P): what the last
// call left, replaced by what this one leaves; NULL: from zero.
__global__ void ssd_carry_kernel(floatX* states, float* state, const float* sums, const float* from_start, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.N * q.E) return;
    size_t e = i % q.E, n = i / q.E % q.N, b = i / q.E / q.N, h = e / q.P, mine = ((b * q.H + h) * q.N + n) * q.P + e % q.P;
    float S = state ? state[mine] : 0;
    for (size_t k = 0; k < q.chunks; k++) {
        size_t at = ((b * q.chunks + k) * q.N + n) * q.E + e;
        states[at] = (floatX)S;
        S = from_start[(b * q.Tp + k * q.L + q.L - 1) * q.H + h] * S + sums[at];
    }
    if (state) state[mine] = S;
}
// y (B,T,E) = inside + from_start past + D x
__global__ void ssd_output_kernel(floatX* y, const floatX* inside, const floatX* past, const floatX* act, const float* from_start, const float* d, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.T * q.E) return;
    size_t e = i % q.E, row = i / q.E, padded = row / q.T * q.Tp + row % q.T, at = padded * q.E + e, h = e / q.P;
    y[i] = (floatX)((float)inside[head_first(at, q)] + from_start[padded * q.H + h] * (float)past[at] + d[h] * (float)act[row * q.W + e]);
}
// states are kept for the backward.
static void ssd_forward(floatX* y, floatX* states, const SSDScratch* s, const floatX* act, const floatX* dt, const float* a_log, const float* b_dt,
                        const float* d, float* state, SSD q) {
    size_t G = q.B * q.chunks, L = q.L, N = q.N, E = q.E, P = q.P;
    ssd_prepare(s, act, dt, a_log, b_dt, q);
    matmul_batched(s->inside, s->M, s->u, L, P, L, P, L, P, 0, 0, 0, L * P, L * L, L * P, G * q.H);
    matmul_batched(s->sums, s->b, s->uw, N, E, L, E, N, E, 1, 0, 0, N * E, L * N, L * E, G);
    ssd_carry_kernel<<<blocks(q.B * N * E, 64), 64>>>(states, state, s->sums, s->from_start, q);
    cudaCheck(cudaGetLastError());
    matmul_batched(s->past, s->c, states, L, E, N, E, N, E, 0, 0, 0, L * E, L * N, N * E, G);
    ssd_output_kernel<<<blocks(q.B * q.T * E, 256), 256>>>(y, s->inside, s->past, act, s->from_start, d, q);
    cudaCheck(cudaGetLastError());
}

// Backward, as derived in the .c. The gradient dS' of the state after a chunk goes from the last chunk to the first:
//     dS = e^{a_0 + ... + a_last} dS' + sum_t e^{a_0 + ... + a_t} C_t dy_tᵀ
// Inside a chunk, with M_tj = decay_tj (C_t·B_j):
//     du_j = sum_{t >= j} M_tj dy_t + to_end_j B_j dS'        dx = Δ du + D dy      dΔ = du·x + A da       dD = sum dy·x
//     dM_tj = dy_t·u_j          dC_t = sum_j decay_tj dM_tj B_j + from_start_t S dy_t
//                               dB_j = sum_t decay_tj dM_tj C_t + to_end_j dS' u_j                   (both summed over heads)
//     da_t = sum_{j < t <= i} M_ij dM_ij  +  sum_{i >= t} from_start_i (C_i S)·dy_i  +  sum_{j < t} to_end_j (B_j dS')·u_j  +  e^{all} S·dS'
//     dA_log = A dA = sum_t a_t da_t
// The sums over heads in dC and dB are those over E that a product makes anyway, but for decay dM, which a kernel adds up.

// dy (B,T,E) -> dyh, dyw, with zeros in the padding
__global__ void ssd_backward_operands_kernel(floatX* dyh, floatX* dyw, const floatX* dy, const float* from_start, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.Tp * q.E) return;
    size_t e = i % q.E, row = i / q.E, t = row % q.Tp, b = row / q.Tp;
    float v = t < q.T ? (float)dy[(b * q.T + t) * q.E + e] : 0;
    dyh[head_first(i, q)] = (floatX)v;
    dyw[i] = (floatX)(from_start[row * q.H + e / q.P] * v);
}
// dstates (G,N,E): dS' of each chunk, from the right. sums: from_start C dy of each.
__global__ void ssd_backward_carry_kernel(floatX* dstates, const float* sums, const float* from_start, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.N * q.E) return;
    size_t e = i % q.E, n = i / q.E % q.N, b = i / q.E / q.N, h = e / q.P;
    float dS = 0;
    for (size_t k = q.chunks; k-- > 0;) {
        size_t at = ((b * q.chunks + k) * q.N + n) * q.E + e;
        dstates[at] = (floatX)dS;
        dS = from_start[(b * q.Tp + k * q.L + q.L - 1) * q.H + h] * dS + sums[at];
    }
}
// dM becomes decay dM, 0 for j > t: threads as in ssd_mask_kernel
__global__ void ssd_backward_mask_kernel(floatX* dM, const float* delta, const float* a_log, SSD q) {
    size_t k = blockIdx.x % q.chunks, h = blockIdx.x / q.chunks % q.H, b = blockIdx.x / q.chunks / q.H, L = q.L;
    const float* step = delta + (b * q.Tp + k * L) * q.H + h;
    float A = -fast_exp(a_log[h]);
    dM += (size_t)blockIdx.x * L * L;
    for (size_t j = threadIdx.x; j < L; j += blockDim.x) {
        float sum = 0;
        for (size_t t = 0; t < L; t++) {
            if (t > j) sum += step[t * q.H] * A;
            dM[t * L + j] = (floatX)(t < j ? 0 : fast_exp(sum) * (float)dM[t * L + j]);
        }
    }
}
// dscores (G,L,L) = sum over heads, in order, of decay dM
__global__ void ssd_backward_scores_kernel(floatX* dscores, const floatX* dM, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, size = q.L * q.L;
    if (i >= q.B * q.chunks * size) return;
    size_t k = i / size % q.chunks, b = i / size / q.chunks;
    float sum = 0;
    for (size_t h = 0; h < q.H; h++) sum += (float)dM[((b * q.H + h) * q.chunks + k) * size + i % size];
    dscores[i] = (floatX)sum;
}
// A warp takes one token of one head, its lanes the P channels: du and dx, and four sums over p, of which da and dΔ are made:
//     from_past = from_start (C S)·dy      to_future = to_end (B dS')·u      du_x = du·x      dy_x = dy·x
__global__ void ssd_backward_rows_kernel(floatX* dact, float* from_past, float* to_future, float* du_x, float* dy_x, const floatX* inside,
                                         const floatX* past, const floatX* future, const floatX* act, const floatX* dy, const float* delta,
                                         const float* from_start, const float* to_end, const float* d, SSD q) {
    size_t i = (size_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (i >= q.B * q.T * q.H) return;           // a whole warp leaves
    size_t h = i % q.H, row = i / q.H, padded = row / q.T * q.Tp + row % q.T, at = padded * q.H + h;
    float step = delta[at], start = from_start[at], end = to_end[at], sum[4] = {};
    for (size_t p = threadIdx.x % 32; p < q.P; p += 32) {
        size_t e = h * q.P + p, wide = padded * q.E + e;
        float x = (float)act[row * q.W + e], g = (float)dy[row * q.E + e], f = end * (float)future[wide];
        float du = (float)inside[head_first(wide, q)] + f;
        sum[0] += start * (float)past[wide] * g;
        sum[1] += f * step * x;
        sum[2] += du * x;
        sum[3] += g * x;
        dact[row * q.W + e] = (floatX)(step * du + d[h] * g);
    }
    #pragma unroll
    for (int k = 0; k < 4; k++) sum[k] = warp_sum(sum[k]);
    if (threadIdx.x % 32 > 0) return;
    from_past[at] = sum[0];
    to_future[at] = sum[1];
    du_x[at] = sum[2];
    dy_x[at] = sum[3];
}
// A block takes one chunk of one head: da, and from it ddt and the chunk's share of dA_log and dD, partial (2,G,H). All threads
// add up e^{all} S·dS'; then one warp walks the tokens twice. Backward, columns[j] is the sum of M_ij dM_ij over i >= t, and their
// sum over j < t the first term of da_t; M dM is scores times what ssd_backward_mask_kernel left in dM.
__global__ void ssd_backward_steps_kernel(floatX* ddt, float* partial, const floatX* scores, const floatX* dM, const floatX* states, const floatX* dstates,
                                          const float* from_past, const float* to_future, const float* du_x, const float* dy_x, const float* delta,
                                          const float* from_start, const floatX* dt, const float* a_log, const float* b_dt, SSD q) {
    extern __shared__ float columns[];          // (L) columns, (L) da
    size_t k = blockIdx.x % q.chunks, h = blockIdx.x / q.chunks % q.H, b = blockIdx.x / q.chunks / q.H, L = q.L, chunk = b * q.chunks + k;
    size_t first = (b * q.Tp + k * L) * q.H + h, len = q.T - k * L < L ? q.T - k * L : L;
    float *da = columns + L, A = -fast_exp(a_log[h]), across = 0;
    for (size_t i = threadIdx.x; i < q.N * q.P; i += blockDim.x) {
        size_t at = (chunk * q.N + i / q.P) * q.E + h * q.P + i % q.P;
        across += (float)states[at] * (float)dstates[at];
    }
    across = block_sum(across) * from_start[first + (L - 1) * q.H];
    if (threadIdx.x >= 32) return;              // the first warp goes on; what a lane writes to columns, no other reads
    scores += chunk * L * L;
    dM += (size_t)blockIdx.x * L * L;
    for (size_t j = threadIdx.x; j < L; j += 32) columns[j] = 0;
    float past = 0, future = 0, sum_a = 0, sum_d = 0;
    for (size_t t = len; t-- > 0;) {
        float inside = 0;
        for (size_t j = threadIdx.x; j < t; j += 32) inside += columns[j] += (float)scores[t * L + j] * (float)dM[t * L + j];
        inside = warp_sum(inside);
        past += from_past[first + t * q.H];
        if (threadIdx.x == 0) da[t] = inside + past + across;
    }
    if (threadIdx.x > 0) return;
    for (size_t t = 0; t < len; t++) {
        size_t at = first + t * q.H, row = (b * q.T + k * L + t) * q.H + h;
        float g = da[t] + future;
        ddt[row] = (floatX)((du_x[at] + A * g) * sigmoid((float)dt[row] + b_dt[h]));
        sum_a += delta[at] * A * g;
        sum_d += dy_x[at];
        future += to_future[at];
    }
    partial[chunk * q.H + h] = sum_a;
    partial[(q.B * q.chunks + chunk) * q.H + h] = sum_d;
}
// db, dc (Q,N) -> their columns of dact (B,T,W)
__global__ void ssd_backward_bc_kernel(floatX* dact, const float* db, const float* dc, SSD q) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= q.B * q.T * q.N) return;
    size_t n = i % q.N, row = i / q.N, at = (row / q.T * q.Tp + row % q.T) * q.N + n;
    dact[row * q.W + q.E + n] = (floatX)db[at];
    dact[row * q.W + q.E + q.N + n] = (floatX)dc[at];
}

// How many numbers the workspace must hold: the chunks' shares of dA_log and dD.
static size_t ssd_workspace(SSD q) { return 2 * q.B * q.chunks * q.H; }

// dact (B,T,W), ddt (B,T,H) are written; da_log, db_dt, dd are added to.
static void ssd_backward(floatX* dact, floatX* ddt, float* da_log, float* db_dt, float* dd, const SSDScratch* s, const floatX* dy, const floatX* states,
                         const floatX* act, const floatX* dt, const float* a_log, const float* b_dt, const float* d, SSD q) {
    size_t Q = q.B * q.Tp, G = q.B * q.chunks, L = q.L, N = q.N, E = q.E, P = q.P;
    ssd_prepare(s, act, dt, a_log, b_dt, q);                            // again, instead of keeping it
    matmul_batched(s->past, s->c, states, L, E, N, E, N, E, 0, 0, 0, L * E, L * N, N * E, G);
    ssd_backward_operands_kernel<<<blocks(Q * E, 256), 256>>>(s->dyh, s->dyw, dy, s->from_start, q);
    cudaCheck(cudaGetLastError());
    matmul_batched(s->sums, s->c, s->dyw, N, E, L, E, N, E, 1, 0, 0, N * E, L * N, L * E, G);
    ssd_backward_carry_kernel<<<blocks(q.B * N * E, 64), 64>>>(s->dstates, s->sums, s->from_start, q);
    cudaCheck(cudaGetLastError());
    matmul_batched(s->future, s->b, s->dstates, L, E, N, E, N, E, 0, 0, 0, L * E, L * N, N * E, G);
    matmul_batched(s->inside, s->M, s->dyh, L, P, L, P, L, P, 1, 0, 0, L * P, L * L, L * P, G * q.H);
    ssd_backward_rows_kernel<<<blocks(q.B * q.T * q.H, 4), 128>>>(dact, s->from_past, s->to_future, s->du_x, s->dy_x, s->inside, s->past, s->future, act, dy, s->delta, s->from_start, s->to_end, d, q);
    cudaCheck(cudaGetLastError());
    matmul_batched(s->dM, s->dyh, s->u, L, L, P, L, P, P, 0, 1, 0, L * L, L * P, L * P, G * q.H);
    ssd_backward_mask_kernel<<<(unsigned)(G * q.H), 64>>>(s->dM, s->delta, a_log, q);
    cudaCheck(cudaGetLastError());
    ssd_backward_scores_kernel<<<blocks(G * L * L, 256), 256>>>(s->dscores, s->dM, q);
    cudaCheck(cudaGetLastError());
    ssd_backward_steps_kernel<<<(unsigned)(G * q.H), 128, 2 * L * sizeof(float)>>>(ddt, workspace, s->scores, s->dM, states, s->dstates, s->from_past, s->to_future, s->du_x, s->dy_x, s->delta, s->from_start, dt, a_log, b_dt, q);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(q.H, 64), 64>>>(da_log, workspace, (int)G, (int)q.H);
    cudaCheck(cudaGetLastError());
    sum_partials_kernel<<<blocks(q.H, 64), 64>>>(dd, workspace + G * q.H, (int)G, (int)q.H);
    cudaCheck(cudaGetLastError());
    sum_rows(db_dt, ddt, q.B * q.T, q.H);
    matmul_batched(s->dc, s->dyw, states, L, N, E, N, E, E, 0, 1, 0, L * N, L * E, N * E, G);
    matmul_batched(s->db, s->uw, s->dstates, L, N, E, N, E, E, 0, 1, 0, L * N, L * E, N * E, G);
    matmul_batched(s->dc, s->dscores, s->b, L, N, L, N, L, N, 0, 0, 1, L * N, L * L, L * N, G);
    matmul_batched(s->db, s->dscores, s->c, L, N, L, N, L, N, 1, 0, 1, L * N, L * L, L * N, G);
    ssd_backward_bc_kernel<<<blocks(q.B * q.T * N, 256), 256>>>(dact, s->db, s->dc, q);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------------------------------------------
// the long convolution, by cuFFT, in float: a number of its output is a sum over all frequencies, few of which bf16 could tell apart

enum { FFT_NUMBERS = 1 << 24 };         // so many numbers are transformed at a time, unless one sequence is longer

static void cufft_check(cufftResult result, const char* file, int line) {
    if (result != CUFFT_SUCCESS) die("%s:%d: cuFFT: error %d (its plans need GPU memory of their own)", file, line, (int)result);
}
#define cufftCheck(call) cufft_check(call, __FILE__, __LINE__)

// The length for sequences of T: a power of two of at least 2T, so that what a circular convolution wraps around falls
// on zeros, not on the future.
static size_t fft_length(size_t T) {
    size_t N = 2;
    while (N < 2 * T) N *= 2;
    return N;
}
// Channels that are transformed together.
static size_t fft_channels(size_t N, size_t C) { return smin(C, N < FFT_NUMBERS ? FFT_NUMBERS / N : 1); }

// Plans for `channels` sequences of N numbers, real to complex and back. Making one takes longer than using it, so they are kept.
static cufftHandle fft_forward_plan, fft_inverse_plan;
static void fft_plan(size_t N, size_t channels) {
    static size_t planned_N = 0, planned_channels = 0;
    if (N == planned_N && channels == planned_channels) return;
    if (planned_N) { cufftCheck(cufftDestroy(fft_forward_plan)); cufftCheck(cufftDestroy(fft_inverse_plan)); }
    cufftCheck(cufftPlan1d(&fft_forward_plan, (int)N, CUFFT_R2C, (int)channels));
    cufftCheck(cufftPlan1d(&fft_inverse_plan, (int)N, CUFFT_C2R, (int)channels));
    planned_N = N;
    planned_channels = channels;
}

// rows (channels,N) <- channels c0, c0+1, ... of x (T,C), followed by N - T zeros; channels past C are zero. And the way back:
// out (T,C) = rows (+ d x, with d (C) and x (T,C)). A block turns a tile of 32 x 32 over in shared memory, so that it reads and
// writes neighbours; 33 columns keep the threads of a warp in different banks.
template <typename F>
__global__ void fft_load_kernel(float* rows, const F* x, size_t N, size_t T, size_t C, size_t c0, size_t channels) {
    __shared__ float tile[32][33];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    size_t t0 = (size_t)blockIdx.x * 32, first = blockIdx.y * 32;
    for (int i = warp; i < 32; i += 8) {
        size_t t = t0 + i, c = c0 + first + lane;
        tile[i][lane] = t < T && c < C ? (float)x[t * C + c] : 0;
    }
    __syncthreads();
    for (int i = warp; i < 32; i += 8) if (first + i < channels && t0 + lane < N) rows[(first + i) * N + t0 + lane] = tile[lane][i];
}
template <typename F>
__global__ void fft_store_kernel(F* out, const float* rows, const float* d, const floatX* x, size_t N, size_t T, size_t C, size_t c0, size_t channels) {
    __shared__ float tile[32][33];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    size_t t0 = (size_t)blockIdx.x * 32, first = blockIdx.y * 32;
    for (int i = warp; i < 32; i += 8) if (first + i < channels && t0 + lane < T) tile[i][lane] = rows[(first + i) * N + t0 + lane];
    __syncthreads();
    for (int i = warp; i < 32; i += 8) {
        size_t t = t0 + i, c = c0 + first + lane;
        if (t >= T || c >= C || first + lane >= channels) continue;
        out[t * C + c] = (F)(tile[lane][i] + (d ? d[c] * (float)x[t * C + c] : 0));
    }
}
// The spectrum of channels c0, c0+1, ... of x (T,C). rows is scratch.
template <typename F>
static void fft_of(cufftComplex* spectrum, float* rows, const F* x, size_t N, size_t T, size_t C, size_t c0, size_t channels) {
    fft_load_kernel<F><<<dim3(blocks(N, 32), blocks(channels, 32)), 256>>>(rows, x, N, T, C, c0, channels);
    cudaCheck(cudaGetLastError());
    cufftCheck(cufftExecR2C(fft_forward_plan, rows, spectrum));
}
// And the way back, of a spectrum that is used up.
template <typename F>
static void fft_back(F* out, cufftComplex* spectrum, float* rows, const float* d, const floatX* x, size_t N, size_t T, size_t C, size_t c0, size_t channels) {
    cufftCheck(cufftExecC2R(fft_inverse_plan, spectrum, rows));
    fft_store_kernel<F><<<dim3(blocks(T, 32), blocks(channels, 32)), 256>>>(out, rows, d, x, N, T, C, c0, channels);
    cudaCheck(cudaGetLastError());
}

// y = k x / N (or += with add), with conj(k) where correlate: n frequencies. cuFFT's way back multiplies by N.
__global__ void spectrum_kernel(cufftComplex* y, const cufftComplex* k, const cufftComplex* x, float scale, int correlate, int add, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    cufftComplex a = k[i], b = x[i], sum = {};
    if (add) sum = y[i];
    if (correlate) a.y = -a.y;
    sum.x += scale * (a.x * b.x - a.y * b.y);
    sum.y += scale * (a.x * b.y + a.y * b.x);
    y[i] = sum;
}
static void spectrum_product(cufftComplex* y, const cufftComplex* k, const cufftComplex* x, size_t N, size_t channels, int correlate, int add) {
    size_t n = channels * (N / 2 + 1);
    spectrum_kernel<<<blocks(n, 256), 256>>>(y, k, x, 1.0f / N, correlate, add, n);
    cudaCheck(cudaGetLastError());
}

// How many numbers the workspace must hold: some channels' worth of numbers, and four spectra.
static size_t long_conv_workspace(size_t T, size_t C) {
    size_t N = fft_length(T), channels = fft_channels(N, C);
    return channels * (N + 4 * (N + 2));
}

// c[t] = sum_{s <= t} k[t-s] p[s] + d p[t] for every sequence and channel: c, p (B,T,C), k (T,C), d (C).
static void long_conv_forward(floatX* c, const floatX* p, const float* k, const float* d, size_t B, size_t T, size_t C) {
    size_t N = fft_length(T), channels = fft_channels(N, C);
    float* rows = workspace;
    cufftComplex *K = (cufftComplex*)(rows + channels * N), *X = K + channels * (N / 2 + 1);
    fft_plan(N, channels);
    for (size_t c0 = 0; c0 < C; c0 += channels) {
        fft_of(K, rows, k, N, T, C, c0, channels);
        for (size_t b = 0; b < B; b++) {
            const floatX* pb = p + b * T * C;
            fft_of(X, rows, pb, N, T, C, c0, channels);
            spectrum_product(X, K, X, N, channels, 0, 0);
            fft_back(c + b * T * C, X, rows, d, pb, N, T, C, c0, channels);
        }
    }
}

// dp[s] = sum_{t >= s} k[t-s] dc[t] + d dc[s],   dk[r] = sum over b, t of p[t-r] dc[t]: both are correlations.
// dd = sum p dc.  dp (B,T,C), dk (T,C) are written, dd is added to.
static void long_conv_backward(floatX* dp, float* dk, float* dd, const floatX* dc, const floatX* p, const float* k, const float* d,
                               size_t B, size_t T, size_t C) {
    size_t N = fft_length(T), channels = fft_channels(N, C), size = channels * (N / 2 + 1);
    float* rows = workspace;
    cufftComplex *K = (cufftComplex*)(rows + channels * N), *P = K + size, *G = P + size, *dK = G + size;
    fft_plan(N, channels);
    for (size_t c0 = 0; c0 < C; c0 += channels) {
        fft_of(K, rows, k, N, T, C, c0, channels);
        for (size_t b = 0; b < B; b++) {
            const floatX* dcb = dc + b * T * C;
            fft_of(P, rows, p + b * T * C, N, T, C, c0, channels);
            fft_of(G, rows, dcb, N, T, C, c0, channels);
            spectrum_product(dK, P, G, N, channels, 1, b > 0);
            spectrum_product(G, K, G, N, channels, 1, 0);
            fft_back(dp + b * T * C, G, rows, d, dcb, N, T, C, c0, channels);
        }
        fft_back(dk, dK, rows, NULL, NULL, N, T, C, c0, channels);
    }
    sum_products(dd, p, dc, B * T, C);
}

// out = sin(freq x) over rows of x (rows,F), freq (F). The filter that these make is float throughout: a position among 16,384 needs
// more than bf16's 8 bits.
__global__ void sine_forward_kernel(float* out, const float* x, const float* freq, size_t n, int F) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = sinf(freq[i % F] * x[i]);
}
static void sine_forward(float* out, const float* x, const float* freq, size_t rows, size_t F) {
    sine_forward_kernel<<<blocks(rows * F, 256), 256>>>(out, x, freq, rows * F, (int)F);
    cudaCheck(cudaGetLastError());
}

// d' = d cos(freq x);  dfreq += sum d' x,  dx = d' freq.  d is dout on entry and dx on return.
__global__ void sine_backward_kernel(float* d, const float* x, const float* freq, size_t n, int F) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) d[i] *= cosf(freq[i % F] * x[i]);
}
__global__ void scale_columns_kernel(float* d, const float* freq, size_t n, int F) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) d[i] *= freq[i % F];
}
static void sine_backward(float* d, float* dfreq, const float* x, const float* freq, size_t rows, size_t F) {
    size_t n = rows * F;
    sine_backward_kernel<<<blocks(n, 256), 256>>>(d, x, freq, n, (int)F);
    cudaCheck(cudaGetLastError());
    sum_products(dfreq, d, x, rows, F);
    scale_columns_kernel<<<blocks(n, 256), 256>>>(d, freq, n, (int)F);
    cudaCheck(cudaGetLastError());
}

// k = m e^{-time |δ|} in place: m (rows,C), the filter of tokens first, first+1, ... Time runs from 0 to 1 over the S
// tokens of training; |δ| goes linearly over the channels from ln(100)/1.5 to ln(100)/0.3, so that the
// fastest channel is down to a hundredth after 0.3 S tokens and the slowest would be after 1.5 S. Its own backward.
__global__ void filter_window_kernel(float* k, size_t first, size_t n, size_t S, size_t C) {
    const float slow = 4.605170185988092f / 1.5f, fast = 4.605170185988092f / 0.3f;
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float time = (float)(first + i / C) / (S > 1 ? S - 1 : 1);
    k[i] *= fast_exp(-time * (C > 1 ? slow + (fast - slow) * (i % C) / (C - 1) : slow));
}
static void filter_window(float* k, size_t first, size_t rows, size_t S, size_t C) {
    filter_window_kernel<<<blocks(rows * C, 256), 256>>>(k, first, rows * C, S, C);
    cudaCheck(cudaGetLastError());
}

// z (rows,emb) = [time, cos(2π f i/S) of each band f, -sin of each] of tokens i = first, first+1, ..., for (emb-1)/2 bands
// f spread evenly from 1e-4 to their number less 1. Angles in double, since they pass many turns.
__global__ void filter_positions_kernel(float* z, size_t first, size_t n, size_t S, int emb) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    size_t token = first + i / emb;
    int bands = (emb - 1) / 2, k = i % emb - 1, band = k < bands ? k : k - bands;
    double f = bands > 1 ? 1e-4 + (bands - 1 - 1e-4) * band / (bands - 1) : 1e-4;
    double turns = f * token / S, angle = 6.283185307179586 * (turns - floor(turns));
    z[i] = k < 0 ? (float)token / (S > 1 ? S - 1 : 1) : k < bands ? cosf((float)angle) : -sinf((float)angle);
}
static void filter_positions(float* z, size_t first, size_t rows, size_t S, size_t emb) {
    filter_positions_kernel<<<blocks(rows * emb, 256), 256>>>(z, first, rows * emb, S, (int)emb);
    cudaCheck(cudaGetLastError());
}

// out = a b over (rows,C), each with a row stride of its own: they may be a third of (rows,3C)
__global__ void product_kernel(floatX* out, size_t ldo, const floatX* a, size_t lda, const floatX* b, size_t ldb, size_t rows, size_t C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * C) return;
    size_t r = i / C, c = i % C;
    out[r * ldo + c] = (floatX)((float)a[r * lda + c] * (float)b[r * ldb + c]);
}
static void product(floatX* out, size_t ldo, const floatX* a, size_t lda, const floatX* b, size_t ldb, size_t rows, size_t C) {
    product_kernel<<<blocks(rows * C, 256), 256>>>(out, ldo, a, lda, b, ldb, rows, C);
    cudaCheck(cudaGetLastError());
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba (arXiv 2312.00752). E = expand C channels inside, N = d_state, K = conv:
//     [x | z] = W_in u            xs = silu(conv(x))             [δ | B | C] = W_x xs           dt = W_dt δ
//     y = scan(xs, dt, B, C)      out = W_out (y silu(z))
// One-token steps carry h (N numbers a channel) and the last K-1 inputs of the convolution.

template <typename W> struct MambaParams { W *w_in, *w_x, *w_dt, *w_out; float *conv_w, *conv_b, *b_dt, *a_log, *d; };
typedef struct {
    floatX *xs, *u;                     // (R,E): silu(pre); y silu(z)
    floatX *dy, *dz, *dpre, *ddt;       // (R,E), only for training, like the rest
    floatX *ddelta, *dbc;               // (R,rank), (R,2N)
    float *dxs;                         // (R,E): the scan and two products add to it
} MambaScratch;                         // what one layer at a time needs: shared by all
typedef struct {
    floatX *x, *z;                      // (R,E): what W_in makes
    floatX *pre;                        // (R,E): conv(x), before bias and silu
    floatX *delta, *bc;                 // (R,rank), (R,2N): what W_x makes: δ, and B and C
    floatX *dt;                         // (R,E): steps before bias and softplus
    floatX *y;                          // (R,E)
    float *starts;                      // (B,chunks,N,E): states before each chunk
    float *state, *window;              // carried: (B,N,E), (B,K-1,E)
    MambaScratch s;
} MambaActs;

static size_t mamba_rank(const Config* c) { return (c->channels + 15) / 16; }

// Tokens in a chunk. 0, the default, takes sqrt(T) or 64: then all the states kept are N sqrt(T) numbers a channel, less
// than a token's own activations whatever T. A block of the backward pass keeps a state for every STEPS tokens in shared
// memory, which limits it.
static size_t mamba_chunk(const Config* c, size_t T) {
    size_t L = c->chunk, most = 4096 / c->d_state > 64 ? 4096 / c->d_state : 64;
    if (!L) for (L = 64; L * L < T; L++) ;
    return smin(L, smin(T, most));
}

// Initial values: linear and convolution weights U(±fan_in^-½), the output's divided by sqrt(layers), since every layer
// adds to the residual stream; steps and decays as listed above; D = 1.
template <typename W>
static void mamba_params(MambaParams<W>* p, Table* t, W* copy, float* base, const Config* c, int n) {
    size_t C = c->channels, E = c->expand * C, N = c->d_state, K = c->conv, rank = mamba_rank(c);
    double bound_e = 1 / sqrt((double)E), bound_k = 1 / sqrt((double)K);
    p->w_in   = take(t, copy, 2 * E, C,        UNIFORM, 1 / sqrt((double)C), "block%d.w_in", n);
    p->conv_w = no_decay(t, take(t, base, E, K, UNIFORM, bound_k, "block%d.conv_w", n));
    p->conv_b = take(t, base, E, 0,            UNIFORM, bound_k, "block%d.conv_b", n);
    p->w_x    = take(t, copy, rank + 2 * N, E, UNIFORM, bound_e, "block%d.w_x", n);
    p->w_dt   = take(t, copy, E, rank,         UNIFORM, 1 / sqrt((double)rank), "block%d.w_dt", n);
    p->b_dt   = take(t, base, E, 0,            STEP_BIAS, 0, "block%d.b_dt", n);
    p->a_log  = no_decay(t, take(t, base, E, N, LOG_INDEX, 0, "block%d.a_log", n));
    p->d      = take(t, base, E, 0,            CONSTANT, 1, "block%d.d", n);
    p->w_out  = take(t, copy, C, E,            UNIFORM, bound_e / sqrt((double)c->layers), "block%d.w_out", n);
}

static void mamba_scratch(MambaScratch* s, const Layout* l, const Config* c, size_t B, size_t T, int train) {
    size_t R = B * T, E = c->expand * c->channels;
    s->xs = take(l->table, l->base, R, E, NONE, 0, "xs");
    s->u  = take(l->table, l->base, R, E, NONE, 0, "u");
    if (!train) return;
    s->dy     = take(l->table, l->base, R, E, NONE, 0, "dy_scan");
    s->dz     = take(l->table, l->base, R, E, NONE, 0, "dz");
    s->dxs    = take(l->exact, l->exact_base, R, E, NONE, 0, "dxs");
    s->dpre   = take(l->table, l->base, R, E, NONE, 0, "dpre");
    s->ddt    = take(l->table, l->base, R, E, NONE, 0, "ddt");
    s->ddelta = take(l->table, l->base, R, mamba_rank(c), NONE, 0, "ddelta");
    s->dbc    = take(l->table, l->base, R, 2 * c->d_state, NONE, 0, "dbc");
}

// first is layer 0. states == NULL: nothing is carried.
static void mamba_acts(MambaActs* a, const MambaActs* first, const Layout* l, const Config* c, int n, size_t B, size_t T, int train) {
    size_t R = B * T, E = c->expand * c->channels, N = c->d_state;
    a->x      = take(l->table, l->base, R, E, NONE, 0, "block%d.x", n);
    a->z      = take(l->table, l->base, R, E, NONE, 0, "block%d.z", n);
    a->pre    = take(l->table, l->base, R, E, NONE, 0, "block%d.pre", n);
    a->delta  = take(l->table, l->base, R, mamba_rank(c), NONE, 0, "block%d.delta", n);
    a->bc     = take(l->table, l->base, R, 2 * N, NONE, 0, "block%d.bc", n);
    a->dt     = take(l->table, l->base, R, E, NONE, 0, "block%d.dt", n);
    a->y      = take(l->table, l->base, R, E, NONE, 0, "block%d.y", n);
    a->starts = take(l->exact, l->exact_base, B * num_chunks(T, mamba_chunk(c, T)), N * E, NONE, 0, "block%d.starts", n);
    if (a == first) mamba_scratch(&a->s, l, c, B, T, train); else a->s = first->s;
    if (!l->states) return;
    a->state  = take(l->states, l->state_base, B, N * E, NONE, 0, "block%d.state", n);
    a->window = take(l->states, l->state_base, B, (c->conv - 1) * E, NONE, 0, "block%d.window", n);
}

// Numbers that the workspace must hold: of the scan and of the convolution's sums.
static size_t mamba_workspace(const Config* c, size_t B, size_t T) {
    size_t E = c->expand * c->channels, scan = selective_scan_workspace(mamba_chunk(c, T), B, T, E, c->d_state), sums = MAX_CONV * E * split_count(B * T);
    return scan > sums ? scan : sums;
}

// out (R,C) from x (R,C). With carry, it starts from what the last call left, and leaves its own.
static void mamba_forward(floatX* out, const floatX* x, MambaActs* a, const MambaParams<floatX>* p, const Config* c, size_t B, size_t T, int carry) {
    const MambaScratch* s = &a->s;
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, rank = mamba_rank(c);
    linear_forward(a->x, x, p->w_in, NULL, R, C, E, C, 0);
    linear_forward(a->z, x, p->w_in + E * C, NULL, R, C, E, C, 0);
    short_conv_forward(a->pre, a->x, p->conv_w, NULL, carry ? a->window : NULL, B, T, E, c->conv);
    silu_forward(s->xs, a->pre, p->conv_b, R, E);
    linear_forward(a->delta, s->xs, p->w_x, NULL, R, E, rank, E, 0);
    linear_forward(a->bc, s->xs, p->w_x + rank * E, NULL, R, E, 2 * N, E, 0);
    linear_forward(a->dt, a->delta, p->w_dt, NULL, R, rank, E, rank, 0);
    selective_scan_forward(a->y, a->starts, s->xs, a->dt, a->bc, p->a_log, p->b_dt, p->d, carry ? a->state : NULL, mamba_chunk(c, T), B, T, E, N);
    swiglu_forward(s->u, a->z, a->y, R, E);
    linear_forward(out, s->u, p->w_out, NULL, R, E, C, E, 0);
}

// The lines of mamba_forward, last one first. x is what went in. dx (R,C) and g are added to.
static void mamba_backward(float* dx, MambaParams<float>* g, const floatX* dout, const floatX* x, MambaActs* a, const MambaParams<floatX>* p,
                           const Config* c, size_t B, size_t T) {
    const MambaScratch* s = &a->s;
    size_t R = B * T, C = c->channels, E = c->expand * C, N = c->d_state, rank = mamba_rank(c);
    silu_forward(s->xs, a->pre, p->conv_b, R, E);                       // again, instead of keeping them
    swiglu_forward(s->u, a->z, a->y, R, E);
    linear_backward(s->dz, g->w_out, NULL, dout, s->u, p->w_out, R, E, C, E, 0);
    swiglu_backward(s->dz, s->dy, a->z, a->y, R, E);                    // dz was du so far
    selective_scan_backward(s->dxs, s->ddt, s->dbc, g->a_log, g->b_dt, g->d, s->dy, s->xs, a->dt, a->bc, a->starts, p->a_log, p->b_dt, p->d,
                            mamba_chunk(c, T), B, T, E, N);
    linear_backward(s->ddelta, g->w_dt, NULL, s->ddt, a->delta, p->w_dt, R, rank, E, rank, 0);
    linear_backward(s->dxs, g->w_x, NULL, s->ddelta, s->xs, p->w_x, R, E, rank, E, 1);
    linear_backward(s->dxs, g->w_x + rank * E, NULL, s->dbc, s->xs, p->w_x + rank * E, R, E, 2 * N, E, 1);
    round_kernel<<<blocks(R * E, 256), 256>>>(s->dpre, s->dxs, R * E);
    cudaCheck(cudaGetLastError());
    silu_backward(s->dpre, a->pre, p->conv_b, R, E);
    short_conv_backward(s->dy, g->conv_w, g->conv_b, s->dpre, a->x, p->conv_w, B, T, E, c->conv);   // dy is dx of W_in's x
    linear_backward(dx, g->w_in, NULL, s->dy, x, p->w_in, R, C, E, C, 1);
    linear_backward(dx, g->w_in + E * C, NULL, s->dz, x, p->w_in + E * C, R, C, E, C, 1);
}

// ----------------------------------------------------------------------------------------------------------------
// Mamba-2 (arXiv 2405.21060). E = expand C, H = E / P heads of P = head_dim channels, N = d_state, K = conv:
//     [z | x B C | dt] = W_in u         [x | B | C] = silu(conv([x | B | C]))         y = ssd(x, dt, B, C)
//     out = W_out RMSNorm(y silu(z))
// One-token steps carry S (N P numbers a head) and the last K-1 inputs of the convolution.

template <typename W> struct Mamba2Params { W *w_in, *w_out; float *conv_w, *conv_b, *b_dt, *a_log, *d, *norm_w; };
typedef struct {
    floatX *act;                        // (R,E+2N): silu(pre)
    floatX *v, *nv;                     // (R,E): y silu(z); RMSNorm of it
    floatX *dz, *dy;                    // (R,E), only for training, like the rest
    floatX *dact, *dxbc, *ddt;          // (R,E+2N), (R,E+2N), (R,H)
    float *dnv;                         // (R,E)
    SSDScratch ssd;
} Mamba2Scratch;                        // what one layer at a time needs: shared by all
typedef struct {
    floatX *z;                          // (R,E)
    floatX *xbc, *pre;                  // (R,E+2N): x, B, C beside each other; conv of them, before bias and silu
    floatX *dt;                         // (R,H): steps before bias and softplus
    floatX *y;                          // (R,E)
    float *rstd;                        // (R)
    floatX *states;                     // (B,chunks,N,E): before each chunk
    float *state, *window;              // carried: (B,H,N,P), (B,K-1,E+2N)
    Mamba2Scratch s;
} Mamba2Acts;

static size_t mamba2_heads(const Config* c) { return (size_t)c->expand * c->channels / c->head_dim; }

// Tokens in a chunk: 0 takes 64, where the products inside a chunk and those with its state cost about the same. M has L numbers for
// every token and head, so there is a limit.
static size_t mamba2_chunk(const Config* c, size_t T) { return smin(c->chunk ? c->chunk : 64, smin(T, 1024)); }
static SSD mamba2_sizes(const Config* c, size_t B, size_t T) { return ssd_sizes(mamba2_chunk(c, T), B, T, mamba2_heads(c), c->head_dim, c->d_state); }

// Initial values as Mamba's, but -A from U(1,16) for each head.
template <typename W>
static void mamba2_params(Mamba2Params<W>* p, Table* t, W* copy, float* base, const Config* c, int n) {
    size_t C = c->channels, E = c->expand * C, N = c->d_state, K = c->conv, H = mamba2_heads(c), width = E + 2 * N;
    double bound_k = 1 / sqrt((double)K);
    p->w_in   = take(t, copy, E + width + H, C, UNIFORM, 1 / sqrt((double)C), "block%d.w_in", n);
    p->conv_w = no_decay(t, take(t, base, width, K, UNIFORM, bound_k, "block%d.conv_w", n));
    p->conv_b = take(t, base, width, 0, UNIFORM, bound_k, "block%d.conv_b", n);
    p->b_dt   = take(t, base, H, 0, STEP_BIAS, 0, "block%d.b_dt", n);
    p->a_log  = take(t, base, H, 0, LOG_UNIFORM, 16, "block%d.a_log", n);
    p->d      = take(t, base, H, 0, CONSTANT, 1, "block%d.d", n);
    p->norm_w = take(t, base, E, 0, CONSTANT, 1, "block%d.gate_norm_w", n);
    p->w_out  = take(t, copy, C, E, UNIFORM, 1 / sqrt((double)E * c->layers), "block%d.w_out", n);
}

static void mamba2_scratch(Mamba2Scratch* s, const Layout* l, const Config* c, size_t B, size_t T, int train) {
    SSD q = mamba2_sizes(c, B, T);
    size_t R = B * T, E = q.E, W = q.W;
    s->act = take(l->table, l->base, R, W, NONE, 0, "act");
    s->v   = take(l->table, l->base, R, E, NONE, 0, "v");
    s->nv  = take(l->table, l->base, R, E, NONE, 0, "nv");
    ssd_scratch(&s->ssd, l, q, train);
    if (!train) return;
    s->dy   = take(l->table, l->base, R, E, NONE, 0, "dy_scan");
    s->dnv  = take(l->exact, l->exact_base, R, E, NONE, 0, "dnv");
    s->dz   = take(l->table, l->base, R, E, NONE, 0, "dz");
    s->dact = take(l->table, l->base, R, W, NONE, 0, "dact");
    s->dxbc = take(l->table, l->base, R, W, NONE, 0, "dxbc");
    s->ddt  = take(l->table, l->base, R, q.H, NONE, 0, "ddt");
}

// first is layer 0. states == NULL: nothing is carried.
static void mamba2_acts(Mamba2Acts* a, const Mamba2Acts* first, const Layout* l, const Config* c, int n, size_t B, size_t T, int train) {
    SSD q = mamba2_sizes(c, B, T);
    size_t R = B * T, E = q.E, W = q.W;
    a->z      = take(l->table, l->base, R, E, NONE, 0, "block%d.z", n);
    a->xbc    = take(l->table, l->base, R, W, NONE, 0, "block%d.xbc", n);
    a->pre    = take(l->table, l->base, R, W, NONE, 0, "block%d.pre", n);
    a->dt     = take(l->table, l->base, R, q.H, NONE, 0, "block%d.dt", n);
    a->y      = take(l->table, l->base, R, E, NONE, 0, "block%d.y", n);
    a->rstd   = take(l->exact, l->exact_base, R, 0, NONE, 0, "block%d.rstd", n);
    a->states = take(l->table, l->base, B * q.chunks, q.N * E, NONE, 0, "block%d.states", n);
    if (a == first) mamba2_scratch(&a->s, l, c, B, T, train); else a->s = first->s;
    if (!l->states) return;
    a->state  = take(l->states, l->state_base, B, q.N * E, NONE, 0, "block%d.state", n);
    a->window = take(l->states, l->state_base, B, (c->conv - 1) * W, NONE, 0, "block%d.window", n);
}

// Numbers that the workspace must hold.
static size_t mamba2_workspace(const Config* c, size_t B, size_t T) {
    SSD q = mamba2_sizes(c, B, T);
    size_t sums = MAX_CONV * q.W * split_count(B * T);
    return ssd_workspace(q) > sums ? ssd_workspace(q) : sums;
}

// out (R,C) from x (R,C). With carry, it starts from what the last call left, and leaves its own.
static void mamba2_forward(floatX* out, const floatX* x, Mamba2Acts* a, const Mamba2Params<floatX>* p, const Config* c, size_t B, size_t T, int carry) {
    const Mamba2Scratch* s = &a->s;
    SSD q = mamba2_sizes(c, B, T);
    size_t R = B * T, C = c->channels, E = q.E, W = q.W;
    linear_forward(a->z, x, p->w_in, NULL, R, C, E, C, 0);
    linear_forward(a->xbc, x, p->w_in + E * C, NULL, R, C, W, C, 0);
    linear_forward(a->dt, x, p->w_in + (E + W) * C, NULL, R, C, q.H, C, 0);
    short_conv_forward(a->pre, a->xbc, p->conv_w, NULL, carry ? a->window : NULL, B, T, W, c->conv);
    silu_forward(s->act, a->pre, p->conv_b, R, W);
    ssd_forward(a->y, a->states, &s->ssd, s->act, a->dt, p->a_log, p->b_dt, p->d, carry ? a->state : NULL, q);
    swiglu_forward(s->v, a->z, a->y, R, E);
    rmsnorm_forward(s->nv, a->rstd, s->v, p->norm_w, R, E);
    linear_forward(out, s->nv, p->w_out, NULL, R, E, C, E, 0);
}

// The lines of mamba2_forward, last one first. x is what went in. dx (R,C) and g are added to.
static void mamba2_backward(float* dx, Mamba2Params<float>* g, const floatX* dout, const floatX* x, Mamba2Acts* a, const Mamba2Params<floatX>* p,
                            const Config* c, size_t B, size_t T) {
    const Mamba2Scratch* s = &a->s;
    SSD q = mamba2_sizes(c, B, T);
    size_t R = B * T, C = c->channels, E = q.E, W = q.W;
    silu_forward(s->act, a->pre, p->conv_b, R, W);                      // again, instead of keeping them
    swiglu_forward(s->v, a->z, a->y, R, E);
    rmsnorm_forward(s->nv, a->rstd, s->v, p->norm_w, R, E);
    linear_backward(s->dnv, g->w_out, NULL, dout, s->nv, p->w_out, R, E, C, E, 0);
    rmsnorm_backward(s->dz, g->norm_w, s->dnv, s->v, a->rstd, p->norm_w, R, E, 0);
    swiglu_backward(s->dz, s->dy, a->z, a->y, R, E);                    // dz was dv so far
    ssd_backward(s->dact, s->ddt, g->a_log, g->b_dt, g->d, &s->ssd, s->dy, a->states, s->act, a->dt, p->a_log, p->b_dt, p->d, q);
    silu_backward(s->dact, a->pre, p->conv_b, R, W);
    short_conv_backward(s->dxbc, g->conv_w, g->conv_b, s->dact, a->xbc, p->conv_w, B, T, W, c->conv);
    linear_backward(dx, g->w_in, NULL, s->dz, x, p->w_in, R, C, E, C, 1);
    linear_backward(dx, g->w_in + E * C, NULL, s->dxbc, x, p->w_in + E * C, R, C, W, C, 1);
    linear_backward(dx, g->w_in + (E + W) * C, NULL, s->ddt, x, p->w_in + (E + W) * C, R, C, q.H, C, 1);
}

// ----------------------------------------------------------------------------------------------------------------
// Hyena of order 2 (arXiv 2302.10866). A convolution as long as the text, whose kernel k (S,C) is computed by a small
// network from the position; S = seq, the trained length. F = 64:
//     [x0 | x1 | v] = conv3(W_in u + b_in)       p = x1 v       c = k ∗ p + D p       out = W_out (x0 c) + b_out
//     k = window(W4 sin(f (W3 sin(f (W2 sin(f (W1 z + b1)) + b2)) + b3))),    z from the position (filter_positions)
// One-token steps carry every p so far and the kernel's rows, one more each step: O(t C) a token. There is no kernel
// beyond S, so that is where a text has to end.

enum { HYENA_CONV = 3, FILTER = 64 };
template <typename W> struct HyenaParams {
    W *w_in, *w_out;
    float *b_in, *conv_w, *conv_b, *w1, *b1, *w2, *b2, *w3, *b3, *w4, *freq, *d, *b_out;
};
typedef struct {
    floatX *p, *g;                      // (R,C): x1 v; x0 c
    float *s;                           // (T,F): a sine
    floatX *dg, *dc, *dp;               // (R,C), only for training, like the rest
    floatX *dv, *du;                    // (R,3C)
    float *dk, *ds, *dh;                // (T,C), (T,F), (T,F)
} HyenaScratch;                         // what one layer at a time needs: shared by all
typedef struct {
    floatX *u, *v;                      // (R,3C): W_in's output; the short convolution's: x0, x1, v beside each other
    floatX *c;                          // (R,C): the long convolution's
    float *z, *h1, *h2, *h3, *k;        // (T,emb), (T,F) before each sine, (T,C)
    float *window, *inputs, *kernel;    // carried: (1,2,3C), (1,S,C), (1,S,C): every p and every row of k so far
    const size_t* past;                 // how many those are
    HyenaScratch s;
} HyenaActs;

// Initial values: linear and convolution weights and biases U(±fan_in^-½), frequencies 1, D from N(0,1).
template <typename W>
static void hyena_params(HyenaParams<W>* p, Table* t, W* copy, float* base, const Config* c, int n) {
    size_t C = c->channels, emb = c->emb, F = FILTER;
    double bound_c = 1 / sqrt((double)C), bound_k = 1 / sqrt((double)HYENA_CONV), bound_e = 1 / sqrt((double)emb), bound_f = 1 / sqrt((double)F);
    p->w_in   = take(t, copy, 3 * C, C, UNIFORM, bound_c, "block%d.w_in", n);
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
    p->w_out  = take(t, copy, C, C,     UNIFORM, bound_c, "block%d.w_out", n);
    p->b_out  = take(t, base, C, 0,     UNIFORM, bound_c, "block%d.b_out", n);
}

static void hyena_scratch(HyenaScratch* s, const Layout* l, const Config* c, size_t B, size_t T, int train) {
    size_t R = B * T, C = c->channels;
    s->p  = take(l->table, l->base, R, C, NONE, 0, "p");
    s->g  = take(l->table, l->base, R, C, NONE, 0, "g");
    s->s  = take(l->exact, l->exact_base, T, FILTER, NONE, 0, "filter_s");
    if (!train) return;
    s->dg = take(l->table, l->base, R, C, NONE, 0, "dg");
    s->dc = take(l->table, l->base, R, C, NONE, 0, "dc");
    s->dp = take(l->table, l->base, R, C, NONE, 0, "dp");
    s->dv = take(l->table, l->base, R, 3 * C, NONE, 0, "dv");
    s->du = take(l->table, l->base, R, 3 * C, NONE, 0, "du");
    s->dk = take(l->exact, l->exact_base, T, C, NONE, 0, "dk");
    s->ds = take(l->exact, l->exact_base, T, FILTER, NONE, 0, "filter_ds");
    s->dh = take(l->exact, l->exact_base, T, FILTER, NONE, 0, "filter_dh");
}

// first is layer 0. states == NULL: nothing is carried.
static void hyena_acts(HyenaActs* a, const HyenaActs* first, const Layout* l, const Config* c, int n, size_t B, size_t T, int train) {
    size_t R = B * T, C = c->channels, S = c->seq;
    a->u  = take(l->table, l->base, R, 3 * C, NONE, 0, "block%d.u", n);
    a->v  = take(l->table, l->base, R, 3 * C, NONE, 0, "block%d.v", n);
    a->c  = take(l->table, l->base, R, C, NONE, 0, "block%d.c", n);
    a->z  = take(l->exact, l->exact_base, T, c->emb, NONE, 0, "block%d.filter_z", n);
    a->h1 = take(l->exact, l->exact_base, T, FILTER, NONE, 0, "block%d.filter_h1", n);
    a->h2 = take(l->exact, l->exact_base, T, FILTER, NONE, 0, "block%d.filter_h2", n);
    a->h3 = take(l->exact, l->exact_base, T, FILTER, NONE, 0, "block%d.filter_h3", n);
    a->k  = take(l->exact, l->exact_base, T, C, NONE, 0, "block%d.k", n);
    if (a == first) hyena_scratch(&a->s, l, c, B, T, train); else a->s = first->s;
    if (!l->states) return;
    a->window = take(l->states, l->state_base, B, (HYENA_CONV - 1) * 3 * C, NONE, 0, "block%d.window", n);
    a->inputs = take(l->states, l->state_base, B, S * C, NONE, 0, "block%d.inputs", n);
    a->kernel = take(l->states, l->state_base, B, S * C, NONE, 0, "block%d.kernel", n);
}

// Numbers that the workspace must hold.
static size_t hyena_workspace(const Config* c, size_t B, size_t T) {
    size_t sums = MAX_CONV * (3 * c->channels + FILTER) * split_count(B * T), conv = long_conv_workspace(T, c->channels);
    return conv > sums ? conv : sums;
}

// a->k (rows,C): the kernel for distances first, first+1, ...
static void hyena_filter_forward(HyenaActs* a, const HyenaParams<floatX>* p, const Config* c, size_t first, size_t rows) {
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
static void hyena_filter_backward(HyenaParams<float>* g, HyenaActs* a, const HyenaParams<floatX>* p, const Config* c, size_t T) {
    const HyenaScratch* s = &a->s;
    size_t F = FILTER;
    filter_window(s->dk, 0, T, c->seq, c->channels);
    sine_forward(s->s, a->h3, p->freq, T, F);
    linear_backward(s->ds, g->w4, NULL, s->dk, s->s, p->w4, T, F, c->channels, F, 0);
    sine_backward(s->ds, g->freq, a->h3, p->freq, T, F);
    sine_forward(s->s, a->h2, p->freq, T, F);
    linear_backward(s->dh, g->w3, g->b3, s->ds, s->s, p->w3, T, F, F, F, 0);
    sine_backward(s->dh, g->freq, a->h2, p->freq, T, F);
    sine_forward(s->s, a->h1, p->freq, T, F);
    linear_backward(s->ds, g->w2, g->b2, s->dh, s->s, p->w2, T, F, F, F, 0);
    sine_backward(s->ds, g->freq, a->h1, p->freq, T, F);
    linear_backward((float*)NULL, g->w1, g->b1, s->ds, a->z, p->w1, T, c->emb, F, c->emb, 0);
}

// c (1,C) = k ∗ p + D p of one more token, by the sum itself: of all p so far and the kernel, which grows by a row a token. A block
// takes 32 channels, a lane each; 8 warps take every 8th token, and warp 0 adds the 8, and this token.
__global__ void hyena_step_kernel(floatX* c, float* inputs, const floatX* p, const float* kernel, const float* d, size_t now, int C) {
    __shared__ float part[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = blockIdx.x * 32 + lane;
    float sum = 0;
    if (i < C) for (size_t t = warp; t < now; t += 8) sum += kernel[(now - t) * C + i] * inputs[t * C + i];
    part[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || i >= C) return;
    for (int w = 1; w < 8; w++) sum += part[w][lane];
    float x = (float)p[i];
    inputs[now * C + i] = x;
    c[i] = (floatX)(sum + (kernel[i] + d[i]) * x);
}
static void hyena_step(HyenaActs* a, const HyenaParams<floatX>* p, const Config* c) {
    size_t C = c->channels, now = *a->past;
    if (now >= (size_t)c->seq) die("hyena has no kernel beyond the %d tokens it was made for: end the text there", c->seq);
    hyena_filter_forward(a, p, c, now, 1);
    device_copy(a->kernel + now * C, a->k, C * sizeof(float));
    hyena_step_kernel<<<blocks(C, 32), 256>>>(a->c, a->inputs, a->s.p, a->kernel, p->d, now, (int)C);
    cudaCheck(cudaGetLastError());
}

// out (R,C) from x (R,C). T <= seq. With carry (B = T = 1), it goes on from the tokens before.
static void hyena_forward(floatX* out, const floatX* x, HyenaActs* a, const HyenaParams<floatX>* p, const Config* c, size_t B, size_t T, int carry) {
    const HyenaScratch* s = &a->s;
    size_t R = B * T, C = c->channels;
    linear_forward(a->u, x, p->w_in, p->b_in, R, C, 3 * C, C, 0);
    short_conv_forward(a->v, a->u, p->conv_w, p->conv_b, carry ? a->window : NULL, B, T, 3 * C, HYENA_CONV);
    product(s->p, C, a->v + C, 3 * C, a->v + 2 * C, 3 * C, R, C);
    if (carry) {
        hyena_step(a, p, c);
    } else {
        hyena_filter_forward(a, p, c, 0, T);
        long_conv_forward(a->c, s->p, a->k, p->d, B, T, C);
    }
    product(s->g, C, a->v, 3 * C, a->c, C, R, C);
    linear_forward(out, s->g, p->w_out, p->b_out, R, C, C, C, 0);
}

// The lines of hyena_forward, last one first:  dx0 = c dg,  dc = x0 dg,  dx1 = v dp,  dv = x1 dp. x is what went in. dx (R,C)
// and g are added to.
static void hyena_backward(float* dx, HyenaParams<float>* g, const floatX* dout, const floatX* x, HyenaActs* a, const HyenaParams<floatX>* p,
                           const Config* c, size_t B, size_t T) {
    const HyenaScratch* s = &a->s;
    size_t R = B * T, C = c->channels;
    product(s->p, C, a->v + C, 3 * C, a->v + 2 * C, 3 * C, R, C);       // again, instead of keeping them
    product(s->g, C, a->v, 3 * C, a->c, C, R, C);
    linear_backward(s->dg, g->w_out, g->b_out, dout, s->g, p->w_out, R, C, C, C, 0);
    product(s->dv, 3 * C, a->c, C, s->dg, C, R, C);
    product(s->dc, C, a->v, 3 * C, s->dg, C, R, C);
    long_conv_backward(s->dp, s->dk, g->d, s->dc, s->p, a->k, p->d, B, T, C);
    hyena_filter_backward(g, a, p, c, T);
    product(s->dv + C, 3 * C, a->v + 2 * C, 3 * C, s->dp, C, R, C);
    product(s->dv + 2 * C, 3 * C, a->v + C, 3 * C, s->dp, C, R, C);
    short_conv_backward(s->du, g->conv_w, g->conv_b, s->dv, a->u, p->conv_w, B, T, 3 * C, HYENA_CONV);
    linear_backward(dx, g->w_in, g->b_in, s->du, x, p->w_in, R, C, 3 * C, C, 1);
}
