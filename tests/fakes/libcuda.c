// A driver without a GPU: what a program does around its kernels (memory, copies, recording, errors) can be run and
// counted where there is none. Device memory is host memory, so copies are real; a kernel's launch is counted and does
// nothing. It is stricter than the driver where a slip would show only on a device: every copy must lie inside one live
// allocation, what is recorded must be allowed there, side branches must be joined, and all must be given back.
//
// Settings from the environment (numbers in C's notation):
//   FAKE_CUDA_VERSION 12060   FAKE_CUDA_SM 87   FAKE_CUDA_DEVICES 1
//   FAKE_CUDA_TOTAL bytes of the device, FAKE_CUDA_TAKEN bytes that "another program" holds
//   FAKE_CUDA_HIDDEN bytes that another program takes between the question how much is free and the allocations
//   FAKE_CUDA_FAIL  "function@n=code,…": the n-th call (from 1; 0: every one) of a function answers with that error
//   FAKE_CUDA_LOG   a file that gets one line "name count" for everything counted, at the end
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef uint64_t Ptr;
enum {
  OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700,
  LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNJOINED = 904,
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t setting(const char* name, uint64_t otherwise) {
  const char* v = getenv(name);
  return v && *v ? strtoull(v, 0, 0) : otherwise;
}

// ---- what is counted

#define COUNTERS 256
static struct { char name[64]; uint64_t n; } counters[COUNTERS];

static uint64_t add(const char* name, uint64_t n) {
  for (int i = 0; i < COUNTERS; i++) {
    if (!counters[i].name[0]) snprintf(counters[i].name, sizeof counters[i].name, "%s", name);
    if (!strcmp(counters[i].name, name)) return counters[i].n += n;
  }
  abort();
}

__attribute__((destructor)) static void write_log(void) {
  const char* path = getenv("FAKE_CUDA_LOG");
  FILE* f = path && *path ? fopen(path, "w") : 0;
  if (!f) return;
  for (int i = 0; i < COUNTERS && counters[i].name[0]; i++)
    fprintf(f, "%s %llu\n", counters[i].name, (unsigned long long)counters[i].n);
  fclose(f);
}

// After some errors a context is lost: the driver answers everything with them from then on.
static Result lost;

// An error that is due for this call, or 0: then the call is counted under its name, and in any case under #name.
static Result enter(const char* name) {
  char calls[64];
  snprintf(calls, sizeof calls, "#%s", name);
  uint64_t n = add(calls, 1);
  const char* spec = getenv("FAKE_CUDA_FAIL");
  size_t len = strlen(name);
  for (const char* s = spec; s && *s; s = strchr(s, ',') ? strchr(s, ',') + 1 : 0) {
    if (strncmp(s, name, len) || s[len] != '@') continue;
    char* end;
    uint64_t at = strtoull(s + len + 1, &end, 10);
    if (*end != '=' || (at && at != n)) continue;
    Result code = atoi(end + 1);
    add("failed", 1);
    if (code >= ILLEGAL_ADDRESS && code <= LAUNCH_FAILED) lost = code;
    return code;
  }
  if (!lost) add(name, 1);
  return lost;
}

#define ENTER                          \
  pthread_mutex_lock(&lock);           \
  Result r = enter(__func__);          \
  if (r) return leave(r)
static Result leave(Result r) {
  pthread_mutex_unlock(&lock);
  return r;
}

// ---- memory

struct Block { char* at; size_t len; int host; struct Block* next; };
static struct Block* blocks;
static uint64_t used;

// The live allocation that holds all of [at, at + len).
static struct Block* holding(const void* at, size_t len, int host) {
  for (struct Block* b = blocks; b; b = b->next) {
    size_t off = (const char*)at - b->at;
    if (b->host == host && (const char*)at >= b->at && off <= b->len && len <= b->len - off) return b;
  }
  return 0;
}

static void* take(size_t len, int host) {
  // 256 bytes apart as the driver's are, and so that a step past the end is in no block.
  char* p = 0;
  if (posix_memalign((void**)&p, 256, len + 256)) return 0;
  struct Block* b = malloc(sizeof *b);
  *b = (struct Block){p, len, host, blocks};
  blocks = b;
  return p;
}

static Result give(void* p, int host) {
  for (struct Block** b = &blocks; *b; b = &(*b)->next) {
    if ((*b)->at != p || (*b)->host != host) continue;
    struct Block* gone = *b;
    if (!host) used -= gone->len;
    *b = gone->next;
    free(gone->at);
    free(gone);
    return OK;
  }
  return INVALID_VALUE;
}

// ---- streams, events, graphs

enum Kind { KERNEL, COPY, SET };
struct Node { enum Kind kind; char *to, *from; size_t len; int value; };
struct Graph { struct Node* nodes; size_t n; };
struct Stream { int recording; uint64_t puts, joined; struct Stream* next; };
struct Event { struct Stream* of; uint64_t puts; int recording; };
static struct Stream* streams;
static struct Stream* origin; // the stream whose recording was asked for
static struct Graph* made;
static int spoiled;

// A call that would wait or allocate spoils a recording.
static Result not_recording(void) {
  if (!origin) return OK;
  spoiled = 1;
  return CAPTURE_UNSUPPORTED;
}

static void play(const struct Node* n) {
  if (n->kind == COPY) memmove(n->to, n->from, n->len);
  if (n->kind == SET) memset(n->to, n->value, n->len);
  add(n->kind == KERNEL ? "kernels" : "copies", 1);
}

// Does it, or notes it down.
static Result put(struct Stream* s, struct Node n) {
  if (!s) return INVALID_VALUE;
  if (!s->recording) {
    play(&n);
    return OK;
  }
  made->nodes = realloc(made->nodes, (made->n + 1) * sizeof n);
  made->nodes[made->n++] = n;
  s->puts++;
  return OK;
}

// ---- the interface: the device

static int context, device_of;
static int initialized;

Result cuInit(unsigned flags) {
  ENTER;
  initialized = 1;
  return leave(flags ? INVALID_VALUE : OK);
}
Result cuDriverGetVersion(int* v) {
  ENTER;
  *v = (int)setting("FAKE_CUDA_VERSION", 12060);
  return leave(OK);
}
Result cuGetErrorName(Result e, const char** s) {
  *s = e == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : e == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
     : e == 100 ? "CUDA_ERROR_NO_DEVICE" : e == 999 ? "CUDA_ERROR_UNKNOWN" : "CUDA_ERROR_OTHER";
  return OK;
}
Result cuGetErrorString(Result e, const char** s) {
  *s = e == OUT_OF_MEMORY ? "out of memory" : e == LAUNCH_FAILED ? "unspecified launch failure"
     : e == 100 ? "no CUDA-capable device is detected" : e == 999 ? "unknown error" : "another error";
  return OK;
}
Result cuDeviceGetCount(int* n) {
  ENTER;
  *n = (int)setting("FAKE_CUDA_DEVICES", 1);
  return leave(initialized ? OK : 3);
}
Result cuDeviceGet(int* d, int i) {
  ENTER;
  *d = i;
  return leave(i < (int)setting("FAKE_CUDA_DEVICES", 1) ? OK : 101);
}
Result cuDeviceGetName(char* name, int len, int d) {
  ENTER;
  (void)d;
  snprintf(name, len, "Fake Orin");
  return leave(OK);
}
Result cuDeviceTotalMem_v2(size_t* n, int d) {
  ENTER;
  (void)d;
  *n = setting("FAKE_CUDA_TOTAL", 8ull << 30);
  return leave(OK);
}
Result cuDeviceGetAttribute(int* v, int which, int d) {
  ENTER;
  (void)d;
  int sm = (int)setting("FAKE_CUDA_SM", 87);
  switch (which) {
    case 13: *v = 1300000; break;      // clock, kHz
    case 16: *v = 16; break;           // multiprocessors
    case 18: *v = sm == 87; break;     // integrated
    case 38: *v = 4 << 20; break;      // second-level cache
    case 75: *v = sm / 10; break;
    case 76: *v = sm % 10; break;
    case 97: *v = 166912; break;       // shared memory a block may ask for
    default: *v = 0;
  }
  return leave(OK);
}
Result cuDevicePrimaryCtxRetain(void** c, int d) {
  ENTER;
  *c = &context, device_of = d;
  return leave(OK);
}
// What is still held when the context goes was forgotten.
Result cuDevicePrimaryCtxRelease_v2(int d) {
  ENTER;
  (void)d;
  for (struct Block* b = blocks; b; b = b->next) add(b->host ? "forgotten_host_bytes" : "forgotten_bytes", b->len);
  return leave(OK);
}
Result cuDevicePrimaryCtxSetFlags_v2(int d, unsigned flags) {
  ENTER;
  (void)d;
  add(flags & 4 ? "blocking" : "spinning", 1);
  return leave(OK);
}
Result cuCtxSetCurrent(void* c) {
  ENTER;
  return leave(c == &context || !c ? OK : 201);
}

// ---- the interface: memory

Result cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  ENTER;
  *total = setting("FAKE_CUDA_TOTAL", 8ull << 30);
  uint64_t gone = used + setting("FAKE_CUDA_TAKEN", 0);
  *free_bytes = gone > *total ? 0 : *total - gone;
  return leave(OK);
}
Result cuMemAlloc_v2(Ptr* p, size_t len) {
  ENTER;
  if ((r = not_recording())) return leave(r);
  uint64_t gone = used + setting("FAKE_CUDA_TAKEN", 0) + setting("FAKE_CUDA_HIDDEN", 0);
  if (!len) return leave(INVALID_VALUE);
  if (gone + len > setting("FAKE_CUDA_TOTAL", 8ull << 30)) return leave(OUT_OF_MEMORY);
  void* at = take(len, 0);
  if (!at) return leave(OUT_OF_MEMORY);
  // Fresh device memory is not zero.
  memset(at, 0xa5, len < 4096 ? len : 4096);
  used += len;
  add("allocated_bytes", len);
  if (len > 256u << 20) add("allocations_over_256_mib", 1);
  if (add("kernels", 0)) add("allocations_after_a_kernel", 1);
  *p = (Ptr)(uintptr_t)at;
  return leave(OK);
}
Result cuMemFree_v2(Ptr p) {
  ENTER;
  return leave(give((void*)(uintptr_t)p, 0));
}
Result cuMemHostAlloc(void** p, size_t len, unsigned flags) {
  ENTER;
  (void)flags;
  if ((r = not_recording())) return leave(r);
  *p = len ? take(len, 1) : 0;
  return leave(*p ? OK : OUT_OF_MEMORY);
}
Result cuMemFreeHost(void* p) {
  ENTER;
  return leave(give(p, 1));
}
Result cuMemHostGetDevicePointer_v2(Ptr* p, void* host, unsigned flags) {
  ENTER;
  *p = (Ptr)(uintptr_t)host;
  return leave(!flags && holding(host, 1, 1) ? OK : INVALID_VALUE);
}

// A copy between host and device: the device's side must be one allocation's, and what is recorded must be pinned.
static Result copy(struct Stream* s, char* to, const char* from, size_t len, const void* device, const void* host) {
  if (!holding(device, len, 0)) return add("copies_outside_memory", 1), INVALID_VALUE;
  if (s && s->recording && host && !holding(host, len, 1)) return spoiled = 1, CAPTURE_UNSUPPORTED;
  return put(s, (struct Node){COPY, to, (char*)from, len, 0});
}
Result cuMemcpyHtoDAsync_v2(Ptr to, const void* from, size_t len, struct Stream* s) {
  ENTER;
  char* at = (char*)(uintptr_t)to;
  add("bytes_in", len);
  return leave(copy(s, at, from, len, at, from));
}
Result cuMemcpyDtoHAsync_v2(void* to, Ptr from, size_t len, struct Stream* s) {
  ENTER;
  char* at = (char*)(uintptr_t)from;
  return leave(copy(s, to, at, len, at, to));
}
Result cuMemcpyDtoDAsync_v2(Ptr to, Ptr from, size_t len, struct Stream* s) {
  ENTER;
  char *a = (char*)(uintptr_t)to, *b = (char*)(uintptr_t)from;
  if (!holding(b, len, 0)) return leave(INVALID_VALUE);
  return leave(copy(s, a, b, len, a, 0));
}
Result cuMemsetD8Async(Ptr to, unsigned char value, size_t len, struct Stream* s) {
  ENTER;
  char* at = (char*)(uintptr_t)to;
  if (!holding(at, len, 0)) return leave(INVALID_VALUE);
  return leave(put(s, (struct Node){SET, at, 0, len, value}));
}

// ---- the interface: streams and events

Result cuStreamCreate(struct Stream** s, unsigned flags) {
  ENTER;
  (void)flags;
  *s = calloc(1, sizeof **s);
  (*s)->next = streams;
  streams = *s;
  return leave(OK);
}
Result cuStreamDestroy_v2(struct Stream* s) {
  ENTER;
  for (struct Stream** at = &streams; *at; at = &(*at)->next)
    if (*at == s) {
      *at = s->next;
      free(s);
      break;
    }
  return leave(OK);
}
Result cuStreamSynchronize(struct Stream* s) {
  ENTER;
  return leave(s && s->recording ? not_recording() : OK);
}
Result cuStreamQuery(struct Stream* s) {
  ENTER;
  return leave(s && s->recording ? not_recording() : OK);
}
Result cuEventCreate(struct Event** e, unsigned flags) {
  ENTER;
  (void)flags;
  *e = calloc(1, sizeof **e);
  return leave(OK);
}
Result cuEventDestroy_v2(struct Event* e) {
  ENTER;
  free(e);
  return leave(OK);
}
Result cuEventRecord(struct Event* e, struct Stream* s) {
  ENTER;
  *e = (struct Event){s, s->puts, s->recording};
  return leave(OK);
}
Result cuEventSynchronize(struct Event* e) {
  ENTER;
  return leave(e->recording && origin ? not_recording() : OK);
}
Result cuEventQuery(struct Event* e) {
  ENTER;
  return leave(e->recording && origin ? not_recording() : OK);
}
// Waiting for a recorded event joins the recording, or joins a branch back into it.
Result cuStreamWaitEvent(struct Stream* s, struct Event* e, unsigned flags) {
  ENTER;
  (void)flags;
  if (!e->recording || !origin) return leave(OK);
  if (e->of->joined < e->puts) e->of->joined = e->puts;
  s->recording = 1;
  return leave(OK);
}

// ---- the interface: recording

Result cuStreamBeginCapture_v2(struct Stream* s, int mode) {
  ENTER;
  (void)mode;
  if (origin) return leave(INVALID_VALUE);
  for (struct Stream* t = streams; t; t = t->next) t->puts = t->joined = 0;
  origin = s, s->recording = 1, spoiled = 0;
  made = calloc(1, sizeof *made);
  return leave(OK);
}
Result cuStreamEndCapture(struct Stream* s, struct Graph** g) {
  ENTER;
  if (origin != s) return leave(INVALID_VALUE);
  Result end = spoiled ? CAPTURE_INVALIDATED : OK;
  for (struct Stream* t = streams; t; t = t->next) {
    if (t != s && t->recording && t->joined < t->puts) end = CAPTURE_UNJOINED;
    t->recording = 0;
  }
  origin = 0;
  *g = end ? 0 : made;
  return leave(end);
}
Result cuGraphInstantiateWithFlags(struct Graph** exec, struct Graph* g, unsigned long long flags) {
  ENTER;
  (void)flags;
  *exec = malloc(sizeof **exec);
  **exec = (struct Graph){malloc(g->n * sizeof *g->nodes), g->n};
  memcpy((*exec)->nodes, g->nodes, g->n * sizeof *g->nodes);
  add("recorded", g->n);
  return leave(OK);
}
Result cuGraphLaunch(struct Graph* exec, struct Stream* s) {
  ENTER;
  if (!s || s->recording) return leave(INVALID_VALUE);
  // Memory that a recording names must still be there.
  for (size_t i = 0; i < exec->n; i++) {
    struct Node* n = exec->nodes + i;
    int gone = n->kind != KERNEL && !holding(n->to, n->len, 0) && !holding(n->to, n->len, 1);
    if (gone) return leave(lost = ILLEGAL_ADDRESS);
    play(n);
  }
  return leave(OK);
}
static Result destroy(struct Graph* g) {
  free(g->nodes);
  free(g);
  return OK;
}
Result cuGraphExecDestroy(struct Graph* exec) {
  ENTER;
  return leave(destroy(exec));
}
Result cuGraphDestroy(struct Graph* g) {
  ENTER;
  return leave(destroy(g));
}

// ---- the interface: kernels

struct Function { int shared_bytes; char name[64]; struct Function* next; };
struct Module { struct Function* functions; };

// Machine code is taken by its first bytes, assembly by its first word; anything else is no image.
Result cuModuleLoadData(struct Module** m, const void* image) {
  ENTER;
  if ((r = not_recording())) return leave(r);
  int code = !memcmp(image, "\177ELF", 4), text = !memcmp(image, "//", 2) || !memcmp(image, ".version", 8);
  if (!code && !text) return leave(INVALID_IMAGE);
  add(code ? "cubins" : "ptx", 1);
  *m = calloc(1, sizeof **m);
  return leave(OK);
}
Result cuModuleUnload(struct Module* m) {
  ENTER;
  for (struct Function *f = m->functions, *next; f; f = next) next = f->next, free(f);
  free(m);
  return leave(OK);
}
Result cuModuleGetFunction(struct Function** f, struct Module* m, const char* name) {
  ENTER;
  *f = calloc(1, sizeof **f);
  snprintf((*f)->name, sizeof (*f)->name, "%s", name);
  (*f)->shared_bytes = 48 << 10;
  (*f)->next = m->functions;
  m->functions = *f;
  return leave(OK);
}
Result cuFuncSetAttribute(struct Function* f, int which, int value) {
  ENTER;
  if (which != 8 || value > 166912) return leave(INVALID_VALUE);
  f->shared_bytes = value;
  return leave(OK);
}
// Shared memory past what our kernels may use anywhere (101,376 bytes) is refused too.
Result cuLaunchKernel(struct Function* f, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                      unsigned shared_bytes, struct Stream* s, void** params, void** extra) {
  ENTER;
  int grid = x && y && z && y < 65536 && z < 65536, block = tx && ty && tz && tx * ty * tz <= 1024;
  if (!grid || !block || !params || extra || shared_bytes > (unsigned)f->shared_bytes || shared_bytes > 101376)
    return add("bad_launches", 1), leave(INVALID_VALUE);
  return leave(put(s, (struct Node){KERNEL, 0, 0, 0, 0}));
}
