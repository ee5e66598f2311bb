/* What `codes.cu` asks of a GPU, for one block on a CPU: `emulated.py` puts it in place of the file's PTX.

Every thread is a fiber. Those of a warp meet in `exchange`, where each sees what all have brought; those of a block
meet in __syncthreads. Copies to shared memory are there at once. Sums of products are in double precision. */

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

using std::max, std::min;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Number { int x; };
#define DEVICE inline

struct Fiber { ucontext_t context; std::vector<char> stack; bool ended; int number; long exchanges, barriers; };
struct Brought { u32 x[6]; };
constexpr int MOST_WARPS = 32;
alignas(128) static u8 shared_memory[1 << 19];
static int memory_size;  // of a program, in bytes
static bool outside;     // whether an address lay beyond it
static std::vector<Fiber> fibers;
static Fiber *self;
static ucontext_t scheduler;
static Number blockIdx;
// By parity: a thread brings something to the exchange after next when all have seen what was brought to this one.
static Brought brought[MOST_WARPS][2][32];
static int at_exchange[MOST_WARPS][4], at_barrier[4];
#define threadIdx (Number{self->number})

static void wait() { swapcontext(&self->context, &scheduler); }
static const Brought *exchange(const Brought &own) {
  int warp = self->number / 32;
  long turn = self->exchanges++;
  brought[warp][turn & 1][self->number % 32] = own;
  if (++at_exchange[warp][turn & 3] == 32) at_exchange[warp][turn + 2 & 3] = 0;
  while (at_exchange[warp][turn & 3] < 32) wait();
  return brought[warp][turn & 1];
}
static void __syncwarp() { exchange(Brought{}); }
static void __syncthreads() {
  long turn = self->barriers++;
  if (++at_barrier[turn & 3] == (int)fibers.size()) at_barrier[turn + 2 & 3] = 0;
  while (at_barrier[turn & 3] < (int)fibers.size()) wait();
}
static int lane_of() { return self->number % 32; }

DEVICE float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
DEVICE float __int_as_float(int x) { return __uint_as_float((u32)x); }
DEVICE u32 bits_of(float x) { u32 y; memcpy(&y, &x, 4); return y; }
DEVICE int __shfl_sync(u32, int x, int from) { return (int)exchange({{(u32)x}})[from & 31].x[0]; }
DEVICE float __shfl_sync(u32, float x, int from) { return __uint_as_float(exchange({{bits_of(x)}})[from & 31].x[0]); }
DEVICE float __shfl_xor_sync(u32 all, float x, int by) { return __shfl_sync(all, x, lane_of() ^ by); }
DEVICE bool __any_sync(u32, bool x) {
  const Brought *found = exchange({{x}});
  return std::any_of(found, found + 32, [](const Brought &one) { return one.x[0]; });
}
DEVICE void __threadfence() {}
DEVICE int atomicAdd(int *to, int more) { int before = *to; *to += more; return before; }
template <typename T> DEVICE T __ldcg(const T *from) { return *from; }
DEVICE u32 __byte_perm(u32 a, u32 b, u32 which) {
  unsigned long long both = (unsigned long long)b << 32 | a;
  u32 found = 0;
  for (int i = 0; i < 4; i++) found |= (u32)(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
DEVICE u32 __funnelshift_l(u32 low, u32 high, int by) {
  by &= 31;
  return by ? high << by | low >> (32 - by) : high;
}

// Shared memory: an address is an offset, and vectors are where their size divides it.
DEVICE u32 shared_address(const void *p) { return (u32)(int32_t)((const u8 *)p - shared_memory); }
DEVICE u8 *at_address(u32 at, int size) {
  if (at % size) abort();
  outside |= at + size > (u32)memory_size;
  return shared_memory + (int32_t)at;
}
template <typename T> DEVICE T loaded(u32 at) { T x; memcpy(&x, at_address(at, sizeof x), sizeof x); return x; }
DEVICE u32 load1(u32 at) { return loaded<u32>(at); }
DEVICE u32 load_half(u32 at) { return loaded<u16>(at); }
DEVICE uint2 load2(u32 at) { return loaded<uint2>(at); }
DEVICE uint4 load4(u32 at) { return loaded<uint4>(at); }
DEVICE void store1(u32 at, u32 x) { memcpy(at_address(at, 4), &x, 4); }
DEVICE void store_half(u32 at, u16 x) { memcpy(at_address(at, 2), &x, 2); }
DEVICE void copy16(u32 to, const void *from, bool there = true) {
  if (there) memcpy(at_address(to, 16), from, 16);
  else memset(at_address(to, 16), 0, 16);
}
DEVICE void commit() {}
DEVICE void wait_for_older() { __syncwarp(); }

#if HALF  // float16
DEVICE float number(u32 x) {
  u16 half = (u16)x;
  _Float16 y;
  memcpy(&y, &half, 2);
  return (float)y;
}
DEVICE u32 rounded(double x) {
  _Float16 y = (_Float16)x;
  u16 half;
  memcpy(&half, &y, 2);
  return half;
}
#else  // bfloat16
DEVICE float number(u32 x) { return __uint_as_float(x << 16); }
DEVICE u32 rounded(double x) {  // to the nearest, of two that are as near the even one
  if (x != x) return 0x7FC0;
  if (std::isinf(x) || x == 0) return bits_of((float)x) >> 16;
  int exponent;
  std::frexp(x, &exponent);
  double step = std::ldexp(1.0, std::max(exponent - 8, -133));
  return bits_of((float)(std::nearbyint(x / step) * step)) >> 16;
}
#endif
DEVICE u32 half_of(u32 x, int upper) { return upper ? x >> 16 : x & 0xFFFF; }
DEVICE u32 joined(u32 low, u32 high) { return low | high << 16; }
DEVICE double product_of(u32 a, u32 b, int upper) {
  return (double)number(half_of(a, upper)) * number(half_of(b, upper));
}
DEVICE u32 times(u32 a, u32 b) { return joined(rounded(product_of(a, b, 0)), rounded(product_of(a, b, 1))); }
DEVICE u32 rest_of(u32 a, u32 b, u32 product) {
  u32 found[2];
  for (int i = 0; i < 2; i++) found[i] = rounded(product_of(a, b, i) - number(half_of(product, i)));
  return joined(found[0], found[1]);
}
DEVICE u32 pair(float low, float high) { return joined(rounded(low), rounded(high)); }
DEVICE u32 evens(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
DEVICE u32 odds(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }
DEVICE float exp2_of(float x) { return std::exp2(x); }

// Matrices, lane = 4 g + i
DEVICE u32 transposed(u32 x) {
  const Brought *found = exchange({{x}});
  int g = lane_of() >> 2, i = lane_of() & 3;
  auto of = [&](int row) { return half_of(found[4 * row + g / 2].x[0], g & 1); };
  return joined(of(2 * i), of(2 * i + 1));
}
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const Brought *found = exchange({{a0, a1, a2, a3, b0, b1}});
  int g = lane_of() >> 2, i = lane_of() & 3;
  for (int at = 0; at < 4; at++) {
    int lower = at >> 1, column = 2 * i + (at & 1);
    double sum = c[at];
    for (int k = 0; k < 16; k++) {
      int of = k % 8 / 2, later = k / 8;
      double a = number(half_of(found[4 * g + of].x[2 * later + lower], k & 1));
      sum += a * number(half_of(found[4 * column + of].x[4 + later], k & 1));
    }
    c[at] = (float)sum;
  }
}
template <bool TRANSPOSED> DEVICE void matrices_of(u32 (&a)[4], u32 at) {
  const Brought *found = exchange({{at}});
  int g = lane_of() >> 2, i = lane_of() & 3;
  for (int matrix = 0; matrix < 4; matrix++) {
    auto of = [&](int row, int column) { return load_half(found[8 * matrix + row].x[0] + 2 * column); };
    a[matrix] = TRANSPOSED ? joined(of(2 * i, g), of(2 * i + 1, g)) : joined(of(g, 2 * i), of(g, 2 * i + 1));
  }
  __syncwarp();
}
DEVICE void matrices(u32 (&a)[4], u32 at) { matrices_of<false>(a, at); }
DEVICE void transposed_matrices(u32 (&a)[4], u32 at) { matrices_of<true>(a, at); }

// Run `threads` of every block, which end together.
static void run_blocks(int blocks, int threads, void (*kernel)()) {
  static void (*entered)();
  entered = kernel;
  fibers.resize(threads);
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    memset(at_exchange, 0, sizeof at_exchange);
    memset(at_barrier, 0, sizeof at_barrier);
    memset(shared_memory, 0xFF, sizeof shared_memory);  // not numbers
    for (int i = 0; i < threads; i++) {
      Fiber &one = fibers[i];
      one.stack.resize(1 << 18);
      one.ended = false, one.number = i, one.exchanges = one.barriers = 0;
      getcontext(&one.context);
      one.context.uc_stack.ss_sp = one.stack.data(), one.context.uc_stack.ss_size = one.stack.size();
      makecontext(&one.context, +[]() { entered(); self->ended = true; while (true) wait(); }, 0);
    }
    for (int running = threads; running > 0;) {
      running = 0;
      for (Fiber &one : fibers) {
        if (one.ended) continue;
        self = &one;
        swapcontext(&scheduler, &one.context);
        running += !one.ended;
      }
    }
  }
}
