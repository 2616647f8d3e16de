// models/baselines_reference.h: the four baselines once more, from the equations of their papers alone: in double, one number
// after another, every pair of tokens looked at, every state carried from token to token, sharing no line with the train file.
//
//     x_t = wte[token_t] (+ wpe[t])                  logits_t = head n(x_t), or wte n(x_t)
//     x += mixer(n(x)),  x += mlp(n(x))              with --post-norm: x = n(x + mixer(x)),  x = n(x + mlp(x))
//
// A mixer gets u (T,C) of one sequence and makes out (T,C). OF("d") is the parameter d of block n.
enum { WIDE = 96 };                                     // the longest row, of any vector of any token
typedef double Row[WIDE];
#define OF(name) named(m, "block%d." name, n)

static void reference_linear(double* out, const double* x, int in, int outs, const real* w, const real* b) {
    if (in > WIDE || outs > WIDE) die("the reference is for rows of at most %d numbers, not of %d", WIDE, in > outs ? in : outs);
    for (int o = 0; o < outs; o++) {
        out[o] = b ? b[o] : 0;
        for (int i = 0; i < in; i++) out[o] += w[o * in + i] * x[i];
    }
}
// LayerNorm, or RMSNorm where there is no bias: that subtracts no mean
static void reference_norm(double* out, const double* x, int C, const real* w, const real* b) {
    double mean = 0, square = 0;
    for (int i = 0; i < C && b; i++) mean += x[i] / C;
    for (int i = 0; i < C; i++) square += (x[i] - mean) * (x[i] - mean) / C;
    for (int i = 0; i < C; i++) out[i] = (x[i] - mean) / sqrt(square + 1e-5) * w[i] + (b ? b[i] : 0);
}
static double reference_silu(double x) { return x / (1 + exp(-x)); }
static double reference_gelu(double x) { return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
static double reference_softplus(double x) { return log1p(exp(x)); }

// Each channel by itself: the last tap of w (C,K) meets the token itself, the one before it the token before, and so on.
static void reference_conv(Row* out, const Row* x, int T, int C, int K, const real* w, const real* b) {
    for (int t = 0; t < T; t++)
        for (int i = 0; i < C; i++) {
            out[t][i] = b[i];
            for (int back = 0; back < K && back <= t; back++) out[t][i] += w[i * K + K - 1 - back] * x[t - back][i];
        }
}

// H heads of queries, G of keys and values, D numbers each; H/G neighbouring query heads share keys and values. Rotary
// positions turn the pair (i, i + D/2), taken as a complex number, by the angle t 10000^(-2i/D). A query weighs what it sees by
// exp(q·k / sqrt(D)), or by φ(q)·φ(k), divided by the sum of these (φ: held above 1e-6).
static double reference_phi(double x) { return x < 0 ? exp(x) : 1 + x; }
static void reference_attention(Row* out, const Row* u, int T, const Model* m, int n) {
    const Config* c = &m->config;
    int C = c->channels, H = c->heads, G = c->kv_heads, D = C / H;
    Row q[T], k[T], v[T], o;
    for (int t = 0; t < T; t++) {
        const real *w = OF("wqkv"), *b = c->bias ? OF("bqkv") : NULL;
        reference_linear(q[t], u[t], C, H * D, w, b);
        reference_linear(k[t], u[t], C, G * D, w + H * D * C, b ? b + H * D : NULL);
        reference_linear(v[t], u[t], C, G * D, w + (H + G) * D * C, b ? b + (H + G) * D : NULL);
        for (int j = 0; c->pos == ROPE && j < H + G; j++) {
            double* head = j < H ? q[t] + j * D : k[t] + (j - H) * D;
            for (int i = 0; i < D / 2; i++) {
                double complex pair = (head[i] + I * head[i + D / 2]) * cexp(I * t * pow(10000, -2.0 * i / D));
                head[i] = creal(pair);
                head[i + D / 2] = cimag(pair);
            }
        }
    }
    for (int t = 0; t < T; t++) {
        for (int h = 0; h < H; h++) {
            int g = h / (H / G);
            double weight[T], sum = 0;
            for (int s = 0; s < T; s++) {
                int sees = s <= t && (!c->window || t - s < c->window) && (!c->block || s / c->block == t / c->block);
                double dot = 0;
                for (int i = 0; i < D; i++) {
                    double a = q[t][h * D + i], b = k[s][g * D + i];
                    dot += c->attention == LINEAR ? reference_phi(a) * reference_phi(b) : a * b / sqrt(D);
                }
                weight[s] = !sees ? 0 : c->attention == LINEAR ? dot : exp(dot);
                sum += weight[s];
            }
            if (c->attention == LINEAR) sum = fmax(sum, 1e-6);
            for (int i = 0; i < D; i++) {
                o[h * D + i] = 0;
                for (int s = 0; s < T; s++) o[h * D + i] += weight[s] / sum * v[s][g * D + i];
            }
        }
        reference_linear(out[t], o, C, C, OF("wo"), c->bias ? OF("bo") : NULL);
    }
}

// h_t = e^(Δ_t A) h_{t-1} + Δ_t B_t x_t and y_t = C_t·h_t + D x_t, N numbers h for each of E channels; A = -e^(a_log).
//     mamba   [x | z] = W_in u               x = silu(conv(x))   [δ | B | C] = W_x x   Δ = softplus(W_dt δ + b)
//             out = W_out (y silu(z))        all of Δ, D and A are a channel's own, A also one for each of the N
//     mamba2  [z | x | B | C | dt] = W_in u  [x | B | C] = silu(conv([x | B | C]))     Δ = softplus(dt + b)
//             out = W_out RMSNorm(y silu(z)) Δ, D and A are one number a head, which is head_dim channels
static void reference_mamba(Row* out, const Row* u, int T, const Model* m, int n) {
    const Config* c = &m->config;
    int C = c->channels, E = c->expand * C, N = c->d_state, two = c->model == MAMBA2, rank = (C + 15) / 16, W = two ? E + 2 * N : E;
    const real *w_z = OF("w_in") + (two ? 0 : E * C), *w_conv = OF("w_in") + (two ? E * C : 0), *w_dt = OF("w_in") + (E + W) * C;
    Row in[T], x[T], z, xp, dt, y;
    double h[E][N];
    memset(h, 0, sizeof h);
    for (int t = 0; t < T; t++) reference_linear(in[t], u[t], C, W, w_conv, NULL);
    reference_conv(x, in, T, W, c->conv, OF("conv_w"), OF("conv_b"));
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < W; i++) x[t][i] = reference_silu(x[t][i]);
        reference_linear(z, u[t], C, E, w_z, NULL);
        if (!two) reference_linear(xp, x[t], E, rank + 2 * N, OF("w_x"), NULL);
        if (!two) reference_linear(dt, xp, rank, E, OF("w_dt"), OF("b_dt"));
        else reference_linear(dt, u[t], C, E / c->head_dim, w_dt, OF("b_dt"));
        const double *Bt = two ? x[t] + E : xp + rank, *Ct = Bt + N;
        for (int e = 0; e < E; e++) {
            int k = two ? e / c->head_dim : e;
            double delta = reference_softplus(dt[k]);
            y[e] = OF("d")[k] * x[t][e];
            for (int j = 0; j < N; j++) {
                double A = -exp(OF("a_log")[two ? k : e * N + j]);
                h[e][j] = exp(delta * A) * h[e][j] + delta * Bt[j] * x[t][e];
                y[e] += Ct[j] * h[e][j];
            }
            y[e] *= reference_silu(z[e]);
        }
        if (two) reference_norm(y, y, E, OF("gate_norm_w"), NULL);
        reference_linear(out[t], y, E, C, OF("w_out"), NULL);
    }
}

// [x0 | x1 | v] = conv(W_in u + b), p = x1 v, c_t = D p_t + sum over s <= t of k_{t-s} p_s, out = W_out (x0 c) + b.
// k_t = MLP(z_t) e^(-time δ), z = [time, cosines, -sines], time from 0 to 1 in S tokens; sines between the MLP's layers.
static void reference_hyena(Row* out, const Row* u, int T, const Model* m, int n) {
    const Config* c = &m->config;
    int C = c->channels, S = c->seq, F = 64, bands = (c->emb - 1) / 2;
    Row in[T], x[T], k[T], z, f, g;             // x: x0, x1 and v side by side
    for (int t = 0; t < T; t++) {
        double time = S > 1 ? t / (S - 1.0) : 0;
        z[0] = time;
        for (int j = 0; j < bands; j++) {       // frequencies: `bands` numbers evenly from 1e-4 to bands - 1
            double wave = (bands > 1 ? 1e-4 + j * (bands - 1 - 1e-4) / (bands - 1) : 1e-4) * 2 * M_PI * t / S;
            z[1 + j] = cos(wave);
            z[1 + bands + j] = -sin(wave);
        }
        for (int l = 1; l <= 3; l++) {
            const real *w = named(m, "block%d.filter_w%d", n, l), *b = named(m, "block%d.filter_b%d", n, l);
            reference_linear(g, l == 1 ? z : f, l == 1 ? c->emb : F, F, w, b);
            for (int i = 0; i < F; i++) f[i] = sin(OF("filter_freq")[i] * g[i]);
        }
        reference_linear(k[t], f, F, C, OF("filter_w4"), NULL);
        for (int i = 0; i < C; i++) {           // down to a hundredth after 1.5 S tokens (channel 0) ... 0.3 S (the last)
            double slow = log(100) / 1.5, fast = log(100) / 0.3;
            k[t][i] *= exp(-time * (slow + (C > 1 ? (fast - slow) * i / (C - 1) : 0)));
        }
        reference_linear(in[t], u[t], C, 3 * C, OF("w_in"), OF("b_in"));
    }
    reference_conv(x, in, T, 3 * C, 3, OF("conv_w"), OF("conv_b"));
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < C; i++) {
            double sum = OF("d")[i] * x[t][C + i] * x[t][2 * C + i];
            for (int s = 0; s <= t; s++) sum += k[t - s][i] * x[s][C + i] * x[s][2 * C + i];
            g[i] = x[t][i] * sum;
        }
        reference_linear(out[t], g, C, C, OF("w_out"), OF("b_out"));
    }
}

static void reference_mlp(Row* out, const Row* u, int T, const Model* m, int n) {
    const Config* c = &m->config;
    int gelu = c->mlp == GELU;
    Row up, gate;
    for (int t = 0; t < T; t++) {
        reference_linear(up, u[t], c->channels, c->ff, OF("wup"), gelu ? OF("bup") : NULL);
        if (!gelu) reference_linear(gate, u[t], c->channels, c->ff, OF("wgate"), NULL);
        for (int i = 0; i < c->ff; i++) up[i] = gelu ? reference_gelu(up[i]) : reference_silu(gate[i]) * up[i];
        reference_linear(out[t], up, c->ff, c->channels, OF("wdown"), gelu ? OF("bdown") : NULL);
    }
}

// logits (T,V) of one sequence; `half` is the mixer, then the MLP
static void reference_logits(const Model* m, const int* tokens, int T, double* logits) {
    static void (*const mixers[])(Row*, const Row*, int, const Model*, int) = {
        [TRANSFORMER] = reference_attention, [MAMBA] = reference_mamba, [MAMBA2] = reference_mamba, [HYENA] = reference_hyena
    };
    const Config* c = &m->config;
    int C = c->channels, layer = c->norm == LAYER, learned = c->model == TRANSFORMER && c->pos == LEARNED;
    if (C > WIDE) die("the reference is for at most %d channels", WIDE);
    Row x[T], u[T], out[T];
    for (int t = 0; t < T; t++)
        for (int i = 0; i < C; i++) x[t][i] = named(m, "wte")[tokens[t] * C + i] + (learned ? named(m, "wpe")[t * C + i] : 0);
    for (int n = 0; n < c->layers; n++)
        for (int half = 1; half <= (c->mlp == NO_MLP ? 1 : 2); half++) {
            const real *w = named(m, "block%d.norm%d_w", n, half), *b = layer ? named(m, "block%d.norm%d_b", n, half) : NULL;
            for (int t = 0; t < T; t++) {
                if (c->post_norm) memcpy(u[t], x[t], C * sizeof(double));
                else reference_norm(u[t], x[t], C, w, b);
            }
            (half == 1 ? mixers[c->model] : reference_mlp)(out, u, T, m, n);
            for (int t = 0; t < T; t++) {
                for (int i = 0; i < C; i++) x[t][i] += out[t][i];
                if (c->post_norm) reference_norm(x[t], x[t], C, w, b);
            }
        }
    for (int t = 0; t < T; t++) {
        if (!c->post_norm) reference_norm(x[t], x[t], C, named(m, "normf_w"), layer ? named(m, "normf_b") : NULL);
        reference_linear(logits + t * c->vocab, x[t], C, c->vocab, named(m, c->tie ? "wte" : "head"), NULL);
    }
}
#undef OF
