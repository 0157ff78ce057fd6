// Runs bakeoff.cu's kernels, compiled by count_sass.py, on a GPU: a check against the same sums in double precision, then GB/s.
//
//     ARCH=90 ./count_sass.py bakeoff.cubin && gcc -O2 gpu.c -o gpu -ldl -lm && ./gpu bakeoff.cubin
//
// The driver is opened at run time, so that this compiles on a machine without one.
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 32, TILE = 16, SUPER = 8, COLS = 2048, GROUPS = COLS / GROUP, CHECKED = 64 };
typedef unsigned long long Ptr;
typedef struct { Ptr codes, sc, mn, d, m; int rows, groups; } Mat;
typedef struct { int8_t high[GROUP], low[GROUP]; float d; int off; float sd, pad; } Act;
static const char *names[] = {"q4_0", "q8_0", "q4_k"};

static void *driver;
#define CALL(name, ...) do { int (*call)() = (int (*)())dlsym(driver, name); int r = call ? call(__VA_ARGS__) : -1;              \
    if (r) { fprintf(stderr, "%s: error %d\n", name, r); exit(1); } } while (0)
static uint32_t state = 12345;
static uint32_t next(void) { return state = state * 1664525u + 1013904223u; }
static uint8_t *host[5]; // codes, sc, mn, d, m
static Ptr upload(int i, size_t bytes, int is_half) {
  host[i] = malloc(bytes + 8);
  for (size_t k = 0; k < bytes / 4; k++) {
    uint32_t v = next() ^ next() >> 16;
    ((uint32_t *)host[i])[k] = is_half ? (v & 0x03ff03ff) | 0x20002000 : v;
  }
  Ptr p;
  CALL("cuMemAlloc_v2", &p, bytes);
  CALL("cuMemcpyHtoD_v2", p, host[i], bytes);
  return p;
}
static float half(int plane, size_t i) {
  uint16_t v = ((uint16_t *)host[plane])[i];
  return ldexpf((v & 1023) + 1024, (v >> 10 & 31) - 25);
}
static double expected(int c, const Act *x, int r, int interleaved, double *size) {
  double y = *size = 0;
  for (int g = 0; g < GROUPS; g++) {
    size_t at = (size_t)r * GROUPS + g, sup = (size_t)r * (GROUPS / SUPER) + g / SUPER, tg = (size_t)(r / TILE) * GROUPS + g;
    if (interleaved) at = tg * TILE + r % TILE, sup = ((size_t)(r / TILE) * (GROUPS / SUPER) + g / SUPER) * TILE + r % TILE;
    int bytes = c == 1 ? 32 : 16, offset = c == 0 ? 8 : c == 1 ? 128 : 0;
    double dot = 0;
    for (int k = 0; k < GROUP; k++) {
      size_t byte = c == 1 ? k : k % 16;
      uint8_t v = host[0][interleaved ? tg * 16 * bytes + 64 * (byte / 4) + 4 * (r % TILE) + byte % 4 : at * bytes + byte];
      dot += (double)((c == 1 ? v : v >> (k < 16 ? 0 : 4) & 15) - offset) * (64 * x[g].high[k] + x[g].low[k]);
    }
    double s = c == 2 ? half(3, sup) * host[1][at] : half(3, at), m = c == 2 ? half(4, sup) * host[2][at] : 0;
    y += s * x[g].d * dot - m * x[g].sd;
    *size += fabs(s * x[g].d * dot) + fabs(m * x[g].sd);
  }
  return y;
}

static void measure(int c, int layout, void *module, const Act *x, Ptr dx, Mat w, size_t bytes) {
  void *f, *start, *stop;
  char name[32];
  snprintf(name, sizeof name, "%s_%s", names[c], layout ? "interleaved" : "planar");
  CALL("cuModuleGetFunction", &f, module, name);
  CALL("cuEventCreate", &start, 0);
  CALL("cuEventCreate", &stop, 0);
  Ptr y;
  CALL("cuMemAlloc_v2", &y, (size_t)w.rows * 4);
  void *arguments[] = {&w, &dx, &y};
  const unsigned warps = 4, blocks = (layout ? w.rows / TILE : w.rows) / warps;
  float best = 1e9, ms;
  for (int run = 0; run < 20; run++) {
    CALL("cuEventRecord", start, (void *)0);
    CALL("cuLaunchKernel", f, blocks, 1u, 1u, 32 * warps, 1u, 1u, 0u, (void *)0, arguments, (void *)0);
    CALL("cuEventRecord", stop, (void *)0);
    CALL("cuEventSynchronize", stop);
    CALL("cuEventElapsedTime", &ms, start, stop);
    best = run && ms < best ? ms : best;
  }
  float got[CHECKED];
  CALL("cuMemcpyDtoH_v2", got, y, sizeof got);
  for (int r = 0; r < CHECKED; r++) {
    double size, e = expected(c, x, r, layout, &size);
    if (!(fabs(got[r] - e) <= 1e-5 * size)) fprintf(stderr, "%s row %d: %g, expected %g\n", name, r, got[r], e), exit(1);
  }
  printf("%-17s %6d rows: %7.1f GB/s\n", name, w.rows, bytes / best / 1e6);
  CALL("cuMemFree_v2", y);
}

int main(int argc, char **argv) {
  driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (argc != 2 || !driver) return fprintf(stderr, "usage: gpu CUBIN, on a machine with a GPU\n"), 1;
  int device;
  void *context, *module;
  CALL("cuInit", 0u);
  CALL("cuDeviceGet", &device, 0);
  CALL("cuDevicePrimaryCtxRetain", &context, device);
  CALL("cuCtxSetCurrent", context);
  CALL("cuModuleLoad", &module, argv[1]);
  for (int c = 0; c < 3; c++)
    for (int big = 0; big < 2; big++) {
      // 16 thousand rows stay in a large GPU's second-level cache; half a million do not.
      const int rows = big ? 1 << 19 : 1 << 14;
      const size_t groups = (size_t)rows * GROUPS, scales = c == 2 ? groups / SUPER : groups, codes = groups * (c == 1 ? 32 : 16);
      Mat w = {upload(0, codes, 0), upload(1, groups, 0), upload(2, groups, 0), upload(3, scales * 2, 1), upload(4, scales * 2, 1), rows, GROUPS};
      Act x[GROUPS];
      for (int g = 0; g < GROUPS; g++) {
        int sum = 0;
        for (int k = 0; k < GROUP; k++) {
          x[g].high[k] = (int)(next() >> 25) * 2 - 127, x[g].low[k] = (int)(next() >> 26) - 32;
          sum += 64 * x[g].high[k] + x[g].low[k];
        }
        x[g].d = 1e-3f * (1 + (next() & 7)), x[g].off = c == 0 ? -sum * 8 : 0, x[g].sd = x[g].d * sum; // bytes are signed by a flip
      }
      Ptr dx;
      CALL("cuMemAlloc_v2", &dx, sizeof x);
      CALL("cuMemcpyHtoD_v2", dx, x, sizeof x);
      for (int layout = 0; layout < 2; layout++) measure(c, layout, module, x, dx, w, codes + scales * (c == 2 ? 4 : 2) + (c == 2 ? groups * 2 : 0));
      Ptr all[] = {w.codes, w.sc, w.mn, w.d, w.m, dx};
      for (int i = 0; i < 6; i++) CALL("cuMemFree_v2", all[i]);
      for (int i = 0; i < 5; i++) free(host[i]);
    }
  return 0;
}
