/* Decode attention over pages of codes (eval.cache.storage.quantised): products on codes as they lie.

A code is an operand of the tensor cores without a conversion: in bfloat16, the bits of a byte b are the number
b 2^-133, exactly, since numbers below 2^-126 are 2^-133 apart and the next ones, too. In float16 they are b 2^-24. So
nothing is unpacked but by a mask. Scales go to the other operand, which is smaller: with K = scale code + zero and V alike,

    q . K_t = sum_c (q_c scale_c) code_tc + sum_c q_c zero_c        CELL tokens have one scale for each channel of K
    p . V_c = sum_t (p_t scale_t) code_tc + sum_t p_t zero_t        a token has one for each CELL channels of V

Both sums of zero points are products of their own; that of K is the same for all tokens of a page, or of a half. A code that lies at
a higher bit of its byte is 2^bit times as large, so the other operand is as much smaller.

A packed word (`quantise_packed`) is a scale and an integer z, of which zero = z u scale, u a power of two for every
width. So the sums are those of q_c scale_c z_c and p_t scale_t z_t, times u: z is an operand as codes are, a sign and six
bits as they lie, and the other operand is there already.

Every warp has pages of its own, brought to shared memory ahead: the next page's K while it multiplies V, and the next V
while it multiplies K. Its loops are short and do not depend on the layout, so that one kernel is compiled for all
layouts of a model's heads. Sink and window are read in tiles of 16 tokens. The schedule and the merge of partial
results are those of `decode.py`, whose names are used here.

Fragments of mma.m16n8k16 (lane = 4 g + i): A has rows g and g + 8, columns 2i, 2i + 1 and those 8 later; B has column
g, rows as A's columns; C has rows g and g + 8, columns 2i and 2i + 1.
    K, A: [16 tokens, 16 channels]   q, B: [16 channels, 8 rows]   logits, C: [16 tokens, 8 rows]
    V, A: [16 channels, 16 tokens]   p, B: [16 tokens, 8 rows]     sums, C: [16 channels, 8 rows]
Which token or channel is which row or column is free. A word of codes holds four channels of K, or four tokens of V:
its bytes 0 and 2 are a pair of columns, its bytes 1 and 3 the pair 8 later. Tile w of a page's four has

    token 32 (w / 2) + 4 (w % 2) + 8 (g / 2) + 2 (g % 2)  in row g,  and the token after it in row g + 8

One source reads a cache whose parts lie in one piece, and a server's pool (eval.serving.coded), whose pages are found
by block tables, a page ahead. In a pool the sink and the window are one part of the kind SINK, whose tokens are counted
through; the part PROMPT begins behind the sink.

Compiled for D channels of a head (64 or 128), GROUP query heads for each KV head, ROWS query rows of a program, at
most 8, WARPS warps, and HALF, 1 for float16, 0 for bfloat16; for a pool with BLOCK tokens of a block of codes, 0 =
there is none, and REST_BLOCK whole tokens of a block; PACKED, 1 where scales are words, which have groups of 64. Declared before this file, by `codes.constants`: the columns of the schedule, FIELDS, the kinds of parts,
PAGE, CELL, the numbers that share a scale, ENDS, the tokens of sink and window that a warp reads at a time, BANDS, of a page of K at most, and OF_16 to OF_THIRD, the bytes that a channel of K takes of a page by its bits. */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

constexpr int THREADS = 32 * WARPS;
static_assert(PAGE == 64 && (CELL == 64 || CELL == 32), "lines of a page are two halves of 32 tokens");
static_assert(!PACKED || CELL == 64, "packed scales are of a layout's groups");
constexpr int TILES = D / 16, GROUPS = D / CELL;
constexpr int HALVES = PAGE / CELL;  // of a page's tokens, each with scales of K of its own
constexpr int EACH_SCALE = PACKED ? 2 : 4;  // bytes of a scale and a zero point

constexpr bool PAGED = BLOCK > 0;
constexpr int EACH = PAGED ? BLOCK / PAGE : 1;  // pages of codes of a block

// Units. CODE is the number that a byte of 1 is. Queries are multiplied by HIGH before they meet codes, so that logits
// come LOGIT times as large, and by LOW before they meet numbers; weights by 2^HIGH_BITS and 2^LOW_BITS, so that sums of
// values come SUM times as large. Sums over numbers have another unit, which STEP leads to LOGIT and SUM. Products of 2^37 and
// more of a query or weight with a scale or a zero point would become infinite, in float16 those of a query with a scale
// from 2^16 on, and of a weight from 2^8 on.
#if HALF
constexpr float CODE = 0x1p-24f, HIGH = 1, LOW = 1, HIGH_BITS = 8, LOW_BITS = 8, LOGIT = 0x1p-24f, SUM = 0x1p-16f;
constexpr u32 QUARTER = 0x34003400, SIXTEENTH = 0x2C002C00, SIXTYFOURTH = 0x24002400;  // pairs of numbers
#define TYPE "f16"
#else
constexpr float CODE = 0x1p-133f, HIGH = PACKED ? 0x1p106f : 0x1p90f, LOW = 0x1p-43f;  // see `scale_of`
constexpr float HIGH_BITS = PACKED ? 106 : 90, LOW_BITS = -43;
constexpr float LOGIT = 0x1p-43f, SUM = 0x1p-43f;
constexpr u32 QUARTER = 0x3E803E80, SIXTEENTH = 0x3D803D80, SIXTYFOURTH = 0x3C803C80;
#define TYPE "bf16"
#endif
constexpr float STEP = HALF ? 0x1p-24f : 1;
#define NONE __int_as_float(0xff800000)  // no logit: minus infinity

struct Pool {  // where a server has the tokens of its requests, as `codes.Pool` has them
  const int *kept, *rest, *lengths;  // kept, rest: block tables, [rows, kept_b] and [rows, rest_b]; lengths: [rows]
  i64 stride, page;                  // bytes of a block, and of 64 tokens of codes in it
  int kept_b, rest_b, sink, window;
};
struct Args {  // as the tuples of `parts` have them
  const u16 *base; const i64 *table; const int *index; const i64 *seen, *start, *tail;
  const u16 *q; const i64 *position; u16 *out; float *partial, *stat; int *done;
  int index_b, q_b, q_h, q_t, queries, slots, heads;
  Pool pool;
};

// Queries times scales are a product and what its rounding left, so that they lose nothing. With at most four rows,
// both are in one operand, the rest in rows 4 to 7, and the logits of the two are added at the end.
constexpr bool PAIRED = ROWS <= 4;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE u32 load1(u32 at) { u32 x; asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at)); return x; }
DEVICE u32 load_half(u32 at) { u16 x; asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(at)); return x; }
DEVICE uint2 load2(u32 at) {
  uint2 x; asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at)); return x;
}
DEVICE uint4 load4(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at));
  return x;
}
DEVICE void store1(u32 at, u32 x) { asm volatile("st.shared.b32 [%0], %1;" :: "r"(at), "r"(x) : "memory"); }
DEVICE void copy16(u32 to, const void *from, bool there = true) {  // zeros where nothing is there
  int size = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(size) : "memory");
}
DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void wait_for_older() { asm volatile("cp.async.wait_group 1;" ::: "memory"); __syncwarp(); }
DEVICE u32 times(u32 a, u32 b) {
  u32 x; asm("fma.rn." TYPE "x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(0x80008000u)); return x;
}
DEVICE u32 rest_of(u32 a, u32 b, u32 product) {  // a b - product, exactly
  u32 x; asm("fma.rn." TYPE "x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(product ^ 0x80008000u)); return x;
}
DEVICE u32 pair(float low, float high) {
  u32 x; asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low)); return x;
}
DEVICE float number(u32 x) {  // of the lower half
  if (!HALF) return __uint_as_float(x << 16);
  float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((u16)x)); return y;
}
DEVICE u32 evens(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }  // the lower halves of two words
DEVICE u32 odds(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }
DEVICE u32 transposed(u32 x) {
  u32 y; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x)); return y;
}
DEVICE float exp2_of(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void matrices(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at));
}
DEVICE void transposed_matrices(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at));
}

// What a warp has asked for: pages by the copy engine, which an mbarrier counts in, or tiles of sink and window.
#if __CUDA_ARCH__ >= 900
DEVICE void open_barrier(u32 bar) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void fetch(u32 to, const u8 *from, int size, u32 bar, int lane) {
  if (lane == 0 && size > 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(size) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(size), "r"(bar) : "memory");
  }
}
DEVICE void wait_for(u32 bar, u32 phase) {
  asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }"
               :: "r"(bar), "r"(phase) : "memory");
}
// The previous kernel has ended, and the next one's blocks may start, where that is for programs to say.
DEVICE void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
}
// Before the copy engine writes where ordinary instructions wrote.
DEVICE void hand_over() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
DEVICE void open_barrier(u32 bar) {}
DEVICE void fetch(u32 to, const u8 *from, int size, u32 bar, int lane) {
  for (int at = 16 * lane; at < size; at += 512) copy16(to + at, from + at);
  commit();
}
DEVICE void wait_for(u32 bar, u32 phase) { wait_for_older(); }
DEVICE void hand_over() {}
DEVICE void wait_for_previous_kernel() {}
#endif

struct Bands {  // a head's channels in 16, 8 and 4 bits, narrow ones, those of them with 3, and the bits of V
  int whole, eight, four, narrow, third, values;
  DEVICE static int room(int n) { return (n + 15) & ~15; }
  DEVICE int channels() const { return room(whole) + room(eight) + room(four) + room(narrow); }
  DEVICE int k_page() const {
    return room(whole) * OF_16 + room(eight) * OF_8 + room(four) * OF_4 + room(narrow) * OF_2 + room(third) * OF_THIRD;
  }
  DEVICE int v_page() const { return values == 16 ? PAGE * D * 2 : PAGE * D * values / 8 + PAGE * GROUPS * EACH_SCALE; }
};

struct Warp {  // a warp's number, and addresses in shared memory: of its K and V, of all warps' queries, of barriers
  int number, lane;
  u32 k, v, q, raw, bars, phase;
  float scale;  // of the logits, divided by LOGIT
};

struct Rows {  // the query rows 2i and 2i + 1 that a lane has: softmax so far, base 2
  float most[2], sum[2];  // sum: of this lane's tokens
  float acc[TILES][4];    // channels 16 tile + g and + 8, times SUM
  float zeros[4];         // of group g of channels: the sum of p zero, times SUM / CODE; packed: times SUM, while pages
                          // are read times SUM / u
};

// Queries of one (row, head), and the numbers of its kept channels, as they lie in memory: asked for, then brought to
// `raw`.
constexpr int RAW = ROWS * D / 2;  // words of queries; then the channels' numbers
struct Staged {
  static constexpr int EACH = (RAW + D + THREADS - 1) / THREADS;
  u32 found[EACH];
  DEVICE Staged(const Args &x, const u16 *q, const int *kept) {
    for (int j = 0; j < EACH; j++) {
      int at = threadIdx.x + j * THREADS, r = at / (D / 2), d = at % (D / 2) * 2;
      found[j] = 0;
      if (at >= RAW && at < RAW + D) found[j] = kept[at - RAW];
      if (at < RAW && r < GROUP * x.queries) {
        const u16 *of = q + (r % GROUP) * x.q_h + (r / GROUP) * x.q_t + d;  // whose address may be odd
        found[j] = of[0] | (u32)of[1] << 16;
      }
    }
  }
  DEVICE void put(u32 raw) const {
    __syncthreads();  // no warp needs the queries of before
    for (int j = 0; j < EACH; j++) {
      int at = threadIdx.x + j * THREADS;
      if (at < RAW + D) store1(raw + 4 * at, found[j]);
    }
    __syncthreads();
  }
};
// The queries of row g for channels a and b of n, for codes or for numbers
// index: address of the numbers of the band's channels
DEVICE u32 query_pair(u32 raw, u32 index, int g, int a, int b, int n, bool coded) {
  u32 row = raw + g % ROWS * D * 2;
  bool ok = g < ROWS || (PAIRED && coded && g >= 4 && g < 4 + ROWS);
  float unit = coded ? HIGH : LOW;
  float low = ok && a < n ? number(load_half(row + 2 * load1(index + 4 * a))) : 0;
  float high = ok && b < n ? number(load_half(row + 2 * load1(index + 4 * b))) : 0;
  return pair(low * unit, high * unit);
}
// B operands [step][lane][2], a step for 16 channels of a band. In the narrow band it has the four channels of four
// lines, of which lane i has channels 0, 2, 1, 3: the bits of a third bit.
DEVICE void put_queries(u32 to, u32 raw, const Bands &n) {
  int eight = Bands::room(n.whole), four = eight + Bands::room(n.eight), narrow = four + Bands::room(n.four);
  for (int at = threadIdx.x; at < n.channels() * 4; at += THREADS) {
    int first = at >> 6 << 4, g = at >> 3 & 7, i = at >> 1 & 3, later = at & 1, a = first + 4 * i + later, b, own;
    u32 index = raw + 4 * RAW;
    if (first < eight) {
      a += later, b = a + 1, own = n.whole;
    } else if (first < four) {
      a -= eight, b = a + 2, own = n.eight, index += 4 * n.whole;
    } else if (first < narrow) {
      a -= four, b = a + 2, own = n.four, index += 4 * (n.whole + n.eight);
    } else {
      a = first - narrow + 4 * later + i / 2 + i % 2 * 2, b = a + 8, own = n.narrow;
      index += 4 * (n.whole + n.eight + n.four);
    }
    store1(to + 4 * at, query_pair(raw, index, g, a, b, own, first >= eight));
  }
  __syncthreads();
}
DEVICE void put_plain_queries(u32 to, u32 raw) {  // for sink and window, channels in their order
  for (int at = threadIdx.x; at < TILES * 64; at += THREADS) {
    int a = 16 * (at >> 6) + 2 * (at >> 1 & 3) + 8 * (at & 1), g = at >> 3 & 7;
    u32 x = g < ROWS ? load1(raw + g % ROWS * D * 2 + 2 * a) : 0;
    store1(to + 4 * at, pair(number(x) * LOW, number(x >> 16) * LOW));
  }
  __syncthreads();
}

// Of two packed words, the scales, in bfloat16 2^-16 times as large, and the integers z, times CODE. A word that is NaN, whose
// exponent is all ones, is a scale that is NaN: adding one to the exponent carries into the sign alone there.
DEVICE u32 scale_of(u32 x) {
  if (HALF) return x & 0x7FC07FC0;
  u32 is_nan = (x & 0x7C007C00) + 0x04000400 >> 15 & 0x00010001;
  return (x >> 3 & 0x0FF80FF8) | 0x30003000 | is_nan * 0x7FC0;
}
DEVICE u32 zero_of(u32 x) { return x & 0x803F803F; }
// The factor u of zero points of so many bits
DEVICE constexpr float zero_unit(int bits) { return bits == 8 ? 8 : bits == 4 ? 0.5f : 0.25f; }

struct Scaled { uint2 high, rest; };
struct BothHalves { Scaled first, later; };
// scales: address of those of the lane's four channels; bias: the sum of q zero, of which every token has as much, of
// packed scales of q scale z
DEVICE Scaled scaled(u32 scales, uint2 q, float (&bias)[4], int g) {
  if (PACKED) {
    uint2 x = load2(scales);
    u32 first = evens(x.x, x.y), later = odds(x.x, x.y), of_first = scale_of(first), of_later = scale_of(later);
    uint2 high = {times(q.x, of_first), times(q.y, of_later)};
    uint2 rest = {rest_of(q.x, of_first, high.x), rest_of(q.y, of_later, high.y)};
    if (PAIRED && g >= 4) high = rest;
    first = zero_of(first), later = zero_of(later);
    mma(bias, first, 0, later, 0, high.x, high.y);
    if (!PAIRED) mma(bias, first, 0, later, 0, rest.x, rest.y);
    return {high, rest};
  }
  uint4 x = load4(scales);  // scales of 0 and 1, zeros of 0 and 1, then of 2 and 3
  u32 first = evens(x.x, x.z), later = odds(x.x, x.z);
  mma(bias, evens(x.y, x.w), 0, odds(x.y, x.w), 0, q.x, q.y);
  uint2 high = {times(q.x, first), times(q.y, later)};
  uint2 rest = {rest_of(q.x, first, high.x), rest_of(q.y, later, high.y)};
  if (PAIRED && g >= 4) high = rest;
  return {high, rest};
}
// The same for both halves of a page; stride: bytes from the scales of the first one to those of the later
DEVICE BothHalves scaled(u32 scales, int stride, uint2 q, float (&bias)[HALVES][4], int g) {
  Scaled first = scaled(scales, q, bias[0], g), later = first;
  if (HALVES == 2) later = scaled(scales + stride, q, bias[HALVES - 1], g);
  return {first, later};
}
DEVICE Scaled times(Scaled q, u32 by) {
  return {{times(q.high.x, by), times(q.high.y, by)}, {times(q.rest.x, by), times(q.rest.y, by)}};
}

// One tile's product with codes in the bits `mask` of the words x (rows g) and y (rows g + 8).
DEVICE void product(float (&c)[4], u32 x, u32 y, u32 mask, uint2 b) {
  mma(c, x & mask, y & mask, x >> 8 & mask, y >> 8 & mask, b.x, b.y);
}
DEVICE void product(float (&c)[4], u32 x, u32 y, u32 mask, const Scaled &b) {
  product(c, x, y, mask, b.high);
  if (!PAIRED) product(c, x, y, mask, b.rest);
}

// Between sums of z in units of one width and of another
DEVICE void change_zero_unit(float (&zeros)[4], float by) {
  if (PACKED)
    for (int c = 0; c < 4; c++) zeros[c] *= by;
}

// Logits of a page's four tiles, times LOGIT, and of each half the sum of q zero, times HIGH, of packed scales times
// LOGIT. k, q: addresses in shared memory
DEVICE void logits(float (&s)[4][4], float (&bias)[HALVES][4], u32 k, u32 q, const Bands &n, int lane) {
  int g = lane >> 2, i = lane & 3, room = Bands::room(n.whole);
  q += 8 * lane;
  u32 at = k + 2 * (g * room + 4 * i);
#pragma unroll 1
  for (int step = 0; step < room; step += 16, at += 32, q += 256) {
    uint2 b = load2(q);
    for (int w = 0; w < 4; w++) {
      uint2 x = load2(at + 32 * w * room), y = load2(at + (32 * w + 16) * room);
      mma(s[w], x.x, y.x, x.y, y.y, b.x, b.y);
    }
  }
  if (STEP != 1 && room > 0)
    for (int w = 0; w < 4; w++)
      for (int c = 0; c < 4; c++) s[w][c] *= STEP;
  k += room * OF_16, room = Bands::room(n.eight), at = k + g * room + 4 * i;
  u32 scales = k + 64 * room + 4 * EACH_SCALE * i;
#pragma unroll 1
  for (int step = 0; step < room; step += 16, at += 16, scales += 16 * EACH_SCALE, q += 256) {
    u32 x[4], y[4];
    for (int w = 0; w < 4; w++) x[w] = load1(at + 16 * w * room), y[w] = load1(at + (16 * w + 8) * room);
    BothHalves b = scaled(scales, 4 * room, load2(q), bias, g);
    for (int w = 0; w < 4; w++) product(s[w], x[w], y[w], 0x00FF00FF, w < 2 ? b.first : b.later);
  }
  change_zero_unit(bias[0], zero_unit(8) / zero_unit(4));
  k += room * OF_8, room = Bands::room(n.four), at = k + g * room + 4 * i;
  scales = k + 32 * room + 4 * EACH_SCALE * i;
#pragma unroll 1
  for (int step = 0; step < room; step += 16, at += 16, scales += 16 * EACH_SCALE, q += 256) {
    u32 x[2], y[2];
    for (int w = 0; w < 2; w++) x[w] = load1(at + 16 * w * room), y[w] = load1(at + (16 * w + 8) * room);
    BothHalves b = scaled(scales, 4 * room, load2(q), bias, g);
    Scaled of_upper = times(b.later, SIXTEENTH);
    for (int w = 0; w < 2; w++) {
      product(s[w], x[w], y[w], 0x000F000F, b.first);
      product(s[w + 2], x[w], y[w], 0x00F000F0, of_upper);
    }
  }
  change_zero_unit(bias[0], zero_unit(4) / zero_unit(2));
  k += room * OF_4;
  int lines = Bands::room(n.narrow) / 4, of_third = Bands::room(n.third) / 4;
  u32 third = k + 64 * lines;
  at = k + (2 * g + (i & 1)) * lines, scales = third + 32 * of_third + EACH_SCALE * i * lines;
  third += g * of_third;
#pragma unroll 1
  for (int line = 0; line < lines; line += 4, at += 4, third += 4, scales += 4 * EACH_SCALE, q += 256) {
    u32 x[2], y[2];
    for (int w = 0; w < 2; w++) {
      x[w] = load1(at + 32 * w * lines) >> (i & 2) & 0x33333333;
      y[w] = load1(at + (32 * w + 16) * lines) >> (i & 2) & 0x33333333;
    }
    if (line < of_third)
      for (int w = 0; w < 2; w++) {
        u32 a = load1(third + 16 * w * of_third), b = load1(third + (16 * w + 8) * of_third);
        x[w] |= __funnelshift_l(a, a, 2 - i) & 0x44444444, y[w] |= __funnelshift_l(b, b, 2 - i) & 0x44444444;
      }
    BothHalves b = scaled(scales, 16 * lines, load2(q), bias, g);
    Scaled of_upper = times(b.later, SIXTEENTH);
    for (int w = 0; w < 2; w++) {
      product(s[w], x[w], y[w], 0x00070007, b.first);
      product(s[w + 2], x[w], y[w], 0x00700070, of_upper);
    }
  }
  change_zero_unit(bias[0], zero_unit(2));
  if (PAIRED)
    for (int w = 0; w < 4; w++)
      for (int c = 0; c < 4; c++) s[w][c] += __shfl_xor_sync(~0u, s[w][c], 2);
  if (PAIRED && PACKED)
    for (int c = 0; c < 4; c++) bias[0][c] += __shfl_xor_sync(~0u, bias[0][c], 2);
}

// One step of the online softmax: logits s [TILE][rows], over `scale`, become weights as B operands p, times 2^lift.
template <int N>
DEVICE void weigh(u32 (&p)[N][2], Rows &rows, const float (&s)[N][4], const float (&bias)[2], float scale, float lift) {
  float safe[2], alpha[2];
  for (int r = 0; r < 2; r++) {
    float most = NONE;
    for (int w = 0; w < N; w++) most = fmaxf(most, fmaxf(s[w][r], s[w][r + 2]));
    for (int by = 4; by < 32; by *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
    most = fmaxf(rows.most[r], fmaf(most, scale, bias[r]));  // the scale is positive, so the maximum may come before it
    safe[r] = most == NONE ? 0 : most;
    alpha[r] = exp2_of(rows.most[r] - safe[r]);
    rows.most[r] = most;
  }
  if (__any_sync(~0u, alpha[0] != 1 || alpha[1] != 1)) {
    for (int tile = 0; tile < TILES; tile++)
      for (int c = 0; c < 4; c++) rows.acc[tile][c] *= alpha[c & 1];
    for (int r = 0; r < 2; r++) rows.zeros[r] *= alpha[r], rows.sum[r] *= alpha[r];
  }
  float more[2] = {0, 0};
  for (int w = 0; w < N; w++) {
    float x[4];
    for (int c = 0; c < 4; c++) {
      x[c] = exp2_of(fmaf(s[w][c], scale, bias[c & 1] - safe[c & 1] + lift));
      more[c & 1] += x[c];
    }
    p[w][0] = transposed(pair(x[0], x[1])), p[w][1] = transposed(pair(x[2], x[3]));
  }
  rows.sum[0] += more[0] * exp2_of(-lift), rows.sum[1] += more[1] * exp2_of(-lift);
}

// Add a page's values in BITS times weights p. v: address in shared memory
template <int BITS> DEVICE void add_values(Rows &rows, u32 v, u32 (&p)[4][2], int lane) {
  constexpr int PLACES = BITS == 8 ? 1 : BITS == 4 ? 2 : 4, LINES = D / PLACES / 16;  // LINES: tiles of lines
  constexpr int FACTORS = GROUPS > PLACES ? GROUPS : PLACES;  // pairs of a group and a place
  constexpr u32 UPPER = D / 4 * PAGE, SCALES = D * PAGE * BITS / 8;
  int g = lane >> 2, i = lane & 3;
#pragma unroll 1  // a launch has to fetch its instructions: fewer of them are faster than what unrolling saves
  for (int half = 0; half < 2; half++) {
    u32 factor[FACTORS][2][2];
    for (int w = 0; w < 2; w++) {
      const u32(&own)[2] = p[w];
      u32 z0 = 0, z1 = 0;
      for (int group = 0; group < GROUPS; group++) {
        u32 scales = v + SCALES + EACH_SCALE * (64 * group + 32 * half + 8 * i + 4 * w);
        uint2 y;
        if (PACKED) {
          uint2 x = load2(scales);
          u32 first = evens(x.x, x.y), later = odds(x.x, x.y);
          y = {times(own[0], scale_of(first)), times(own[1], scale_of(later))};
          mma(rows.zeros, g == group ? zero_of(first) : 0, 0, g == group ? zero_of(later) : 0, 0, y.x, y.y);
        } else {
          uint4 x = load4(scales);
          if (g == group) z0 = evens(x.y, x.w), z1 = odds(x.y, x.w);
          y = {times(own[0], evens(x.x, x.z)), times(own[1], odds(x.x, x.z))};
        }
        for (int at = group * (FACTORS / GROUPS); at < (group + 1) * (FACTORS / GROUPS); at++) {
          int place = at * PLACES / FACTORS;  // codes of place s begin at bit s BITS, those of 3 bits at 0, 0, 4 and 4
          bool sixteenth = BITS == 4 ? place : BITS == 3 ? place / 2 : place == 2;
          u32 unit = sixteenth ? SIXTEENTH : place == 1 ? QUARTER : SIXTYFOURTH;
          bool as_is = place == 0 || (BITS == 3 && place == 1);
          factor[at][w][0] = as_is ? y.x : times(y.x, unit), factor[at][w][1] = as_is ? y.y : times(y.y, unit);
        }
      }
      if (!PACKED) mma(rows.zeros, z0, 0, z1, 0, own[0], own[1]);
    }
    for (int tile = 0; tile < LINES; tile++) {
      u32 at = v + g * PAGE + 32 * half + 8 * i + 16 * tile * PAGE;
      uint2 x = load2(at), y = load2(at + 8 * PAGE), x3 = {}, y3 = {};
      if (BITS == 3) {
        u32 of3 = v + UPPER + (16 * tile + g) * 32 + 8 * i;
        x3 = load2(of3), y3 = load2(of3 + 8 * 32);
        if (half) x3.x >>= 4, x3.y >>= 4, y3.x >>= 4, y3.y >>= 4;
      }
      for (int w = 0; w < 2; w++) {
        u32 a = w ? x.y : x.x, b = w ? y.y : y.x, a3 = w ? x3.y : x3.x, b3 = w ? y3.y : y3.x;
        for (int place = 0; place < PLACES; place++) {
          int to = place * LINES + tile, pick = to * FACTORS / TILES;
          uint2 f = {factor[pick][w][0], factor[pick][w][1]};
          if (BITS == 3) {  // the third bit of place s is bit s
            int odd = place & 1;
            u32 c = (a >> 2 * odd & 0x33333333) | (a3 << 2 - odd & 0x04040404) | (a3 << 4 - odd & 0x40404040);
            u32 d = (b >> 2 * odd & 0x33333333) | (b3 << 2 - odd & 0x04040404) | (b3 << 4 - odd & 0x40404040);
            product(rows.acc[to], c, d, place < 2 ? 0x00070007 : 0x00700070, f);
          } else {
            product(rows.acc[to], a, b, ((1 << BITS) - 1) * 0x00010001 << place * BITS, f);
          }
        }
      }
    }
    for (int w = 0; w < 2; w++) p[w][0] = p[w + 2][0], p[w][1] = p[w + 2][1];
  }
}
// Between values in codes and values in numbers
DEVICE void change_unit(Rows &rows, float by) {
  if (STEP != 1)
    for (int tile = 0; tile < TILES; tile++)
      for (int c = 0; c < 4; c++) rows.acc[tile][c] *= by;
}
template <> DEVICE void add_values<16>(Rows &rows, u32 v, u32 (&p)[4][2], int lane) {
  int g = lane >> 2, i = lane & 3;
  for (int tile = 0; tile < TILES; tile++)
    for (int w = 0; w < 4; w++) {
      u32 at = v + g * PAGE * 2 + 64 * (w >> 1) + 16 * i + 8 * (w & 1) + 16 * tile * PAGE * 2;
      uint2 x = load2(at), y = load2(at + 8 * PAGE * 2);
      mma(rows.acc[tile], evens(x.x, x.y), evens(y.x, y.y), odds(x.x, x.y), odds(y.x, y.y), p[w][0], p[w][1]);
    }
}

// Behind a part's last token, values have weight zero; so that nothing infinite is there, zeros are written.
DEVICE void clear_behind(u32 v, int left, int bits, int lane) {
  if (bits == 16) {
    for (int at = lane; at < D * PAGE; at += 32)
      if (at % PAGE >= left) asm volatile("st.shared.b16 [%0], %1;" :: "r"(v + 2 * at), "h"((u16)0) : "memory");
  } else {
    for (int at = lane; at < GROUPS * PAGE * EACH_SCALE / 2; at += 32) {  // scales of two tokens, then zeros of two
      int token = PACKED ? at & 63 : (at >> 2 & 31) * 2 + (at & 1);
      if (token >= left)
        asm volatile("st.shared.b16 [%0], %1;" :: "r"(v + D * PAGE * bits / 8 + 2 * at), "h"((u16)0) : "memory");
    }
  }
  hand_over();
  __syncwarp();
}

// The block that holds a page, which comes before `end`, of the request with the block table `blocks`; without a pool, a
// part's pages follow each other
DEVICE int block_of(const int *blocks, int page, int end) { return PAGED && page < end ? blocks[page / EACH] : 0; }
// Bytes from where pages of K, or of V, begin to a page; size: of it
DEVICE i64 to_page(const Pool &pool, int block, int page, int size) {
  return PAGED ? block * pool.stride + page % EACH * pool.page : (i64)page * size;
}

// Tokens [first, last) of a part of pages; of a pool, positions. of_row, kept: the (row, head)'s queries and channels
DEVICE void read_pages(const Args &x, Rows &rows, Warp &warp, const u8 *k, const u8 *v, const int *blocks, int first,
                       int last, const Bands &n, const u16 *of_row, const int *kept) {
  int lane = warp.lane;
  int k_page = n.k_page(), v_page = n.v_page(), page = first / PAGE + warp.number, end = (last + PAGE - 1) / PAGE;
  int block = block_of(blocks, page, end), ahead = block_of(blocks, page + WARPS, end);
  Staged staged(x, of_row, kept);
  fetch(warp.k, k + to_page(x.pool, block, page, k_page), page < end ? k_page : 0, warp.bars, lane);
  fetch(warp.v, v + to_page(x.pool, block, page, v_page), page < end ? v_page : 0, warp.bars + 8, lane);
  if (n.values == 16) change_unit(rows, 1 / STEP);
  change_zero_unit(rows.zeros, 1 / zero_unit(n.values));
  staged.put(warp.raw);
  put_queries(warp.q, warp.raw, n);
#pragma unroll 1
  for (; page < end; page += WARPS) {
    float s[4][4] = {}, of_zeros[HALVES][4] = {};
    wait_for(warp.bars, warp.phase);
    logits(s, of_zeros, warp.k, warp.q, n, lane);
    __syncwarp();
    int next = page + WARPS, left = last - page * PAGE;
    block = ahead, ahead = block_of(blocks, next + WARPS, end);
    if (HALVES == 2)  // `weigh` adds what the first half has
      for (int w = 2; w < 4; w++)
        for (int c = 0; c < 4; c++) s[w][c] += (of_zeros[HALVES - 1][c & 1] - of_zeros[0][c & 1]) * CODE;
    fetch(warp.k, k + to_page(x.pool, block, next, k_page), next < end ? k_page : 0, warp.bars, lane);
    if (left < PAGE) {
      int g = lane >> 2, token = 8 * (g >> 1) + 2 * (g & 1);
      for (int w = 0; w < 4; w++)
        for (int c = 0; c < 4; c++)
          if (32 * (w >> 1) + 4 * (w & 1) + token + (c >> 1) >= left) s[w][c] = NONE;
    }
    float by = (PACKED ? 1 : CODE) * warp.scale, bias[2] = {of_zeros[0][0] * by, of_zeros[0][1] * by};
    u32 p[4][2];
    weigh<4>(p, rows, s, bias, warp.scale, n.values == 16 ? LOW_BITS : HIGH_BITS);
    wait_for(warp.bars + 8, warp.phase);
    if (left < PAGE) clear_behind(warp.v, left, n.values, lane);
    switch (n.values) {
      case 2: add_values<2>(rows, warp.v, p, lane); break;
      case 3: add_values<3>(rows, warp.v, p, lane); break;
      case 4: add_values<4>(rows, warp.v, p, lane); break;
      case 8: add_values<8>(rows, warp.v, p, lane); break;
      default: add_values<16>(rows, warp.v, p, lane);
    }
    __syncwarp();
    fetch(warp.v, v + to_page(x.pool, block, next, v_page), next < end ? v_page : 0, warp.bars + 8, lane);
    warp.phase ^= 1;
  }
  if (n.values == 16) change_unit(rows, STEP);
  change_zero_unit(rows.zeros, zero_unit(n.values));
}

// Slots [first, last) of a sink (slot = token) or of the window's ring (slot = token mod slots), all channels. In a pool
// `slots` are the sink's, the window has those behind, `turn` is what lies between them, and `blocks` the block table.
struct Ends {
  int first, last, slots, start, turn, ahead;
  const int *blocks;
  DEVICE int token(int slot) const {
    return PAGED ? slot + (slot < slots ? 0 : turn) : turn + slot - (slot > ahead ? slots : 0);
  }
  // The block of the token that is the lane's, of a tile
  DEVICE int block(int at, int lane) const {
    return PAGED && there(at + lane % ENDS) ? blocks[token(at + lane % ENDS) / REST_BLOCK] : 0;
  }
  DEVICE bool there(int slot) const { return slot < last && token(slot) >= start; }
  DEVICE bool whole(int at) const {  // whether a tile holds neighbours
    return there(at) && there(at + ENDS - 1) && token(at + ENDS - 1) - token(at) == ENDS - 1;
  }
};
DEVICE u32 of_ends(int row, int piece) { return row * D * 2 + ((piece ^ (row & 7)) << 4); }
// block: `Ends::block` of the tile
DEVICE void fetch_tile(u32 to, const u16 *from, const Pool &pool, const Ends &ends, int at, bool whole, int block,
                       int lane) {
  constexpr int PIECES = D / 8, COPIES = ENDS * PIECES / 32;
  if (PAGED) {
    for (int j = 0; j < COPIES; j++) {
      int row = (lane + 32 * j) / PIECES, piece = (lane + 32 * j) % PIECES;
      i64 page = __shfl_sync(~0u, block, row) * (pool.stride / 2);
      bool there = ends.there(at + row);
      int line = there ? ends.token(at + row) % REST_BLOCK * D + 8 * piece : 0;
      copy16(to + of_ends(row, piece), from + page + line, there);
    }
  } else if (whole) {
    from += at * D + 8 * lane;
    for (int j = 0; j < COPIES; j++)
      copy16(to + of_ends((lane + 32 * j) / PIECES, (lane + 32 * j) % PIECES), from + 256 * j);
  } else {
#pragma unroll 1
    for (int j = 0; j < COPIES; j++) {
      int row = (lane + 32 * j) / PIECES, piece = (lane + 32 * j) % PIECES;
      bool there = ends.there(at + row);
      copy16(to + of_ends(row, piece), from + (there ? (at + row) * D + 8 * piece : 0), there);
    }
  }
}
DEVICE void read_ends(const Args &x, Rows &rows, const Warp &warp, const u16 *k, const u16 *v, const Ends &ends,
                      const int (&position)[2], const u16 *of_row, const int *kept) {
  int lane = warp.lane, g = lane >> 2, at = ends.first + warp.number * ENDS;
  bool whole = ends.whole(at);
  int block = ends.block(at, lane), ahead = ends.block(at + WARPS * ENDS, lane);
  Staged staged(x, of_row, kept);
  if (at < ends.last) fetch_tile(warp.k, k, x.pool, ends, at, whole, block, lane);
  commit();
  if (at < ends.last) fetch_tile(warp.v, v, x.pool, ends, at, whole, block, lane);
  commit();
  change_unit(rows, 1 / STEP);
  staged.put(warp.raw);
  put_plain_queries(warp.q, warp.raw);
#pragma unroll 1
  for (; at < ends.last; at += WARPS * ENDS) {
    float s[1][4] = {}, bias[2] = {0, 0};
    int next = at + WARPS * ENDS;
    bool more = next < ends.last, of_next = ends.whole(next);
    block = ahead, ahead = ends.block(next + WARPS * ENDS, lane);
    wait_for_older();
    for (int step = 0; step < TILES; step++) {
      u32 a[4];
      uint2 b = load2(warp.q + 256 * step + 8 * lane);
      matrices(a, warp.k + of_ends(lane & 15, 2 * step + (lane >> 4)));
      mma(s[0], a[0], a[1], a[2], a[3], b.x, b.y);
    }
    __syncwarp();
    if (more) fetch_tile(warp.k, k, x.pool, ends, next, of_next, block, lane);
    commit();
    if (!whole || ends.token(at + ENDS - 1) > min(position[0], position[1]))
      for (int c = 0; c < 4; c++) {
        int slot = at + g + 8 * (c >> 1);
        if (!ends.there(slot) || ends.token(slot) > position[c & 1]) s[0][c] = NONE;
      }
    u32 p[1][2];
    weigh<1>(p, rows, s, bias, warp.scale * STEP, LOW_BITS);
    wait_for_older();
    for (int tile = 0; tile < TILES; tile++) {
      u32 a[4];
      transposed_matrices(a, warp.v + of_ends((lane & 7) + (lane >> 4) * 8, 2 * tile + (lane >> 3 & 1)));
      mma(rows.acc[tile], a[0], a[1], a[2], a[3], p[0][0], p[0][1]);
    }
    __syncwarp();
    if (more) fetch_tile(warp.v, v, x.pool, ends, next, of_next, block, lane);
    commit();
    whole = of_next;
  }
  change_unit(rows, STEP);
  hand_over();
}

DEVICE void write(const Args &x, i64 row, i64 head, int r, int d, float4 sum) {
  i64 token = r / GROUP;
  if (r >= GROUP * x.queries) return;
  bool real = PAGED || x.position[row * x.queries + token] >= 0;
  uint2 found = {real ? pair(sum.x, sum.y) : 0, real ? pair(sum.z, sum.w) : 0};
  i64 to = ((row * x.queries + token) * (x.heads * GROUP) + head * GROUP + r % GROUP) * D + d;
  *(uint2 *)(x.out + to) = found;
}

// Merge partial results first_number .. + partials - 1 by log-sum-exp. Every thread adds four columns of some of them.
// shared: room for a weight of every row of every one, for a sum of every row, and for four columns of every thread
DEVICE void merge(const Args &x, float *shared, i64 row, i64 head, int partials, i64 first_number, int warp, int lane) {
  constexpr int ITEMS = ROWS * D / 4, SHARES = THREADS > ITEMS ? THREADS / ITEMS : 1;
  float *weights = shared, *sums = shared + partials * ROWS;
  float4 *columns = (float4 *)(shared + (partials + 4) / 4 * 4 * ROWS);
  const float2 *stat = (const float2 *)x.stat + first_number * ROWS;
#pragma unroll 1
  for (int r = warp; r < ROWS; r += WARPS) {
    float most = NONE, sum = 0;
#pragma unroll 1
    for (int part = lane; part < partials; part += 32) most = fmaxf(most, __ldcg(stat + part * ROWS + r).x);
    for (int by = 1; by < 32; by *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
#pragma unroll 1
    for (int part = lane; part < partials; part += 32) {
      float2 own = __ldcg(stat + part * ROWS + r);
      float by = exp2_of(own.x - (most == NONE ? 0 : most));
      weights[part * ROWS + r] = by, sum += own.y * by;
    }
    for (int by = 1; by < 32; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (lane == 0) sums[r] = sum == 0 ? 1 : 1 / sum;
  }
  __syncthreads();
#pragma unroll 1
  for (int at = threadIdx.x; at < ITEMS * SHARES; at += THREADS) {
    int item = at % ITEMS, share = at / ITEMS, r = item / (D / 4), d = item % (D / 4) * 4;
    const float4 *of = (const float4 *)(x.partial + (first_number * ROWS + r) * D + d);
    float4 acc = {0, 0, 0, 0};
#pragma unroll 8
    for (int part = share; part < partials; part += SHARES) {
      float4 more = __ldcg(of + part * (ROWS * D / 4));
      float by = weights[part * ROWS + r];
      acc.x += more.x * by, acc.y += more.y * by, acc.z += more.z * by, acc.w += more.w * by;
    }
    if (SHARES > 1) {
      columns[at] = acc;
      __syncthreads();
      for (int other = 1; share == 0 && other < SHARES; other++) {
        float4 more = columns[other * ITEMS + item];
        acc.x += more.x, acc.y += more.y, acc.z += more.z, acc.w += more.w;
      }
    }
    float by = sums[r];
    if (share == 0) write(x, row, head, r, d, {acc.x * by, acc.y * by, acc.z * by, acc.w * by});
  }
}

// The softmax of all warps becomes partial result `number` of its (row, head), or its result if it is the only one; the
// last program to leave one merges all. `own`: this warp's memory, of which nothing is needed any more
DEVICE void finish(const Args &x, Rows &rows, float *own, float *first, int stride, float2 *stats, i64 row, i64 head,
                   int partials, i64 number, i64 first_number, int warp, int lane) {
  __shared__ int ticket;
  int g = lane >> 2, i = lane & 3;
  for (int r = 0; r < 2; r++)
    for (int by = 4; by < 32; by *= 2) rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], by);
  if (g == 0)
    for (int r = 0; r < 2; r++) stats[warp * 8 + 2 * i + r] = {rows.most[r], rows.sum[r]};
  for (int group = 0; group < GROUPS; group++)
    for (int r = 0; r < 2; r++) {
      float zeros = __shfl_sync(~0u, rows.zeros[r], 4 * group + i) * (PACKED ? 1 : CODE);
      for (int tile = CELL / 16 * group; tile < CELL / 16 * (group + 1); tile++)
        for (int c = r; c < 4; c += 2) {
          float *to = own + (2 * i + r) * D + 16 * tile + g + 8 * (c >> 1);
          if (2 * i + r < ROWS) *to = (rows.acc[tile][c] + zeros) * (1 / SUM);
        }
    }
  __syncthreads();
#pragma unroll 1
  for (int at = threadIdx.x; at < ROWS * D / 4; at += THREADS) {
    int r = at / (D / 4), d = at % (D / 4) * 4;
    float most = NONE, sum = 0;
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, stats[w * 8 + r].x);
    float safe = most == NONE ? 0 : most;
    float4 acc = {0, 0, 0, 0};
    for (int w = 0; w < WARPS; w++) {
      float by = exp2_of(stats[w * 8 + r].x - safe);
      float4 more = *(float4 *)(first + w * stride + r * D + d);
      acc.x += more.x * by, acc.y += more.y * by, acc.z += more.z * by, acc.w += more.w * by;
      sum += stats[w * 8 + r].y * by;
    }
    if (partials == 1) {
      float by = sum == 0 ? 1 : 1 / sum;
      write(x, row, head, r, d, {acc.x * by, acc.y * by, acc.z * by, acc.w * by});
    } else {
      *(float4 *)(x.partial + (number * ROWS + r) * D + d) = acc;
      if (d == 0) *(float2 *)(x.stat + 2 * (number * ROWS + r)) = {most, sum};
    }
  }
  if (partials > 1) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ticket = atomicAdd(x.done + row * x.heads + head, 1);
    __syncthreads();
    if (ticket == partials - 1) {
      __threadfence();
      merge(x, first, row, head, partials, first_number, warp, lane);
      if (threadIdx.x == 0) x.done[row * x.heads + head] = 0;
    }
  }
  hand_over();
  __syncthreads();  // memory is free again
}

// k_room, v_room: bytes of a warp's memory for K and for V, multiples of 128; scaling: a float's bits, of base 2
extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) decode(
    const u16 *base, const i64 *table, const int *index, const i64 *seen, const i64 *start, const i64 *tail,
    const u16 *queries, const i64 *position, u16 *out, float *partial, float *stat, int *done, int index_b, int q_b,
    int q_h, int q_t, int tokens, int slots, int heads, int k_room, int v_room, int scaling, const Pool pool) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ float2 stats[WARPS * 8];
  __shared__ i64 barriers[WARPS * 2];  // of K and of V of each warp
  const Args x = {base, table, index, seen, start, tail, queries, position, out, partial, stat, done,
                  index_b, q_b, q_h, q_t, tokens, slots, heads, pool};
  int number_of_warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u8 *own = memory + number_of_warp * (k_room + v_room);
  u32 q = shared_address(memory + WARPS * (k_room + v_room)), k = shared_address(own);
  Warp warp = {number_of_warp, lane, k, k + k_room, q, q + (D / 16 + BANDS - 1) * 256,
               shared_address(barriers + 2 * number_of_warp), 0, __int_as_float(scaling) * (1 / LOGIT)};
  if (lane == 0) open_barrier(warp.bars), open_barrier(warp.bars + 8);
  __syncwarp();
  Rows rows;
  i64 line = blockIdx.x;
  while (line >= 0) {
    const i64 *entry = x.table + line * FIELDS;
    i64 kind = entry[KIND], row = entry[ROW], head = entry[HEAD];
    i64 number = entry[NUMBER], first_number = entry[FIRST_NUMBER], next = entry[NEXT];
    int first = (int)entry[FIRST], last = (int)entry[LAST], partials = (int)entry[PARTIALS];
    if (entry[FRESH]) {
      for (int r = 0; r < 2; r++) rows.most[r] = NONE, rows.sum[r] = 0;
      for (int c = 0; c < 4; c++) {
        rows.zeros[c] = 0;
        for (int tile = 0; tile < TILES; tile++) rows.acc[tile][c] = 0;
      }
    }
    const u16 *of_row = x.q + row * x.q_b + head * GROUP * x.q_h;
    i64 k_at = entry[K_START], v_at = entry[V_START];
    const Bands n = {(int)entry[WHOLE], (int)entry[EIGHT], (int)entry[FOUR], (int)entry[NARROW], (int)entry[THIRD],
                     (int)entry[VALUES]};
    const int *kept = x.index + row * x.index_b + head * D;
    if (line == blockIdx.x) wait_for_previous_kernel();  // which does not write the schedule
    if (kind <= WINDOW) {
      int seen = PAGED ? x.pool.lengths[row] : (int)x.seen[row], newest = seen - 1, slots = x.slots;
      Ends ends = {first, min(last, seen), slots, 0, 0, min(last, seen)};
      int position[2] = {0x7FFFFFFF, 0x7FFFFFFF};
      if (PAGED) {
        int window = newest - x.pool.window;
        ends.slots = min(x.pool.sink, seen), ends.blocks = x.pool.rest + row * x.pool.rest_b;
        ends.turn = max(0, (window > 0 ? window / PAGE * PAGE : 0) - ends.slots);
      } else if (kind == WINDOW) {
        ends.start = (int)x.start[row], ends.ahead = newest % slots, ends.turn = newest - ends.ahead;
      }
      for (int r = 0; r < 2 && !PAGED; r++) {
        int at = 2 * (lane & 3) + r;
        position[r] = at < GROUP * x.queries ? (int)x.position[row * x.queries + at / GROUP] : 0x7FFFFFFF;
      }
      read_ends(x, rows, warp, x.base + k_at, x.base + v_at, ends, position, of_row, kept);
    } else {
      if (kind == TAIL) last = min(last, (int)x.tail[row * x.heads + head]);
      if (PAGED) first += x.pool.sink, last += x.pool.sink;
      const u8 *codes = (const u8 *)x.base;
      const int *blocks = PAGED ? x.pool.kept + row * x.pool.kept_b : nullptr;
      read_pages(x, rows, warp, codes + k_at, codes + v_at, blocks, first, last, n, of_row, kept);
    }
    if (partials > 0)
      finish(x, rows, (float *)own, (float *)memory, (k_room + v_room) / 4, stats, row, head, partials,
             number, first_number, warp.number, lane);
    line = next;
  }
}
