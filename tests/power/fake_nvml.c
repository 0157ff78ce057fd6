/* A stand-in for NVIDIA's management library: answers what the file named by CONTROL says ("key number" a line) and
   writes down what it is asked to change in CONTROL.log. */
#include <stdio.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, INSUFFICIENT_SIZE = 7 };
static int up, device;

static unsigned long long get(const char *key, unsigned long long other) {
    char name[64];
    unsigned long long value;
    FILE *f = fopen(CONTROL, "r");
    while (f && fscanf(f, "%63s %llu", name, &value) == 2)
        if (!strcmp(name, key)) { fclose(f); return value; }
    if (f) fclose(f);
    return other;
}
static int note(const char *what, unsigned a, unsigned b) {
    FILE *f = fopen(CONTROL ".log", "a");
    if (f) { fprintf(f, "%s %u %u\n", what, a, b); fclose(f); }
    return OK;
}
static int text(char *to, unsigned n, const char *s) {
    if (strlen(s) + 1 > n) return INSUFFICIENT_SIZE;
    strcpy(to, s);
    return OK;
}
/* On Orin every question but the name is refused, unless "lies" is set: then it succeeds with zeros, as some boards do. */
static int orin(void) { return get("orin", 0); }
static int answer(unsigned *to, const char *key, unsigned other) {
    if (orin() && !get("lies", 0)) return NOT_SUPPORTED;
    *to = orin() ? 0 : get(key, other);
    return OK;
}

int nvmlInit_v2(void) { int e = get("init", OK); if (!e) up++; return e; }
int nvmlShutdown(void) { return up ? (up--, OK) : UNINITIALIZED; }
const char *nvmlErrorString(int e) { return e ? "fake error" : "success"; }
int nvmlSystemGetDriverVersion(char *to, unsigned n) { return text(to, n, "540.4.0"); }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = get("count", 1); return up ? OK : UNINITIALIZED; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) {
    if (i >= get("count", 1)) return INVALID_ARGUMENT;
    *d = &device;
    return OK;
}
int nvmlDeviceGetName(void *d, char *to, unsigned n) { return text(to, n, orin() ? "Orin (nvgpu)" : "NVIDIA Fake 100"); }
int nvmlDeviceGetMemoryInfo_v2(void *d, unsigned long long *m) {
    if (orin()) return NOT_SUPPORTED;
    m[1] = 16ull << 30; m[2] = 0; m[4] = 1ull << 30; m[3] = m[1] - m[4];
    return OK;
}
int nvmlDeviceGetUtilizationRates(void *d, unsigned *u) { u[1] = 0; return answer(u, "util", 37); }
int nvmlDeviceGetTemperature(void *d, int s, unsigned *t) { return answer(t, "temp", 51); }
int nvmlDeviceGetPowerUsage(void *d, unsigned *mw) { return answer(mw, "power", 123456); }
int nvmlDeviceGetTotalEnergyConsumption(void *d, unsigned long long *mj) {
    if (orin()) return NOT_SUPPORTED;
    *mj = get("energy", 5000);
    return OK;
}
int nvmlDeviceGetClockInfo(void *d, int kind, unsigned *mhz) {
    return answer(mhz, kind == 2 ? "memory_mhz" : "sm_mhz", kind == 2 ? 2619 : 1410);
}
int nvmlDeviceGetMaxClockInfo(void *d, int kind, unsigned *mhz) {
    return answer(mhz, "none", kind == 2 ? 2619 : 1980);
}
int nvmlDeviceGetClock(void *d, int kind, int id, unsigned *mhz) { return NOT_SUPPORTED; }
int nvmlDeviceGetSupportedGraphicsClocks(void *d, unsigned memory, unsigned *n, unsigned *mhz) {
    if (orin()) return NOT_SUPPORTED;
    unsigned had = *n;
    *n = 3;
    if (had < 3) return INSUFFICIENT_SIZE;
    mhz[0] = 1980; mhz[1] = 1410; mhz[2] = 345;
    return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *r) {
    if (orin()) return NOT_SUPPORTED;
    *r = get("reasons", 0);
    return OK;
}
struct process { unsigned pid; unsigned long long bytes; unsigned instance, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, struct process *p) {
    if (orin() && !get("lies", 0)) return NOT_SUPPORTED;
    unsigned had = *n;
    *n = 1;
    if (!p || had < 1) return INSUFFICIENT_SIZE;
    p[0] = (struct process){ 4242, 512ull << 20, ~0u, ~0u };
    return OK;
}
int nvmlDeviceSetGpuLockedClocks(void *d, unsigned low, unsigned high) {
    if (orin()) return NOT_SUPPORTED;
    return get("root", 1) ? note("gpu", low, high) : NO_PERMISSION;
}
int nvmlDeviceResetGpuLockedClocks(void *d) { return orin() ? NOT_SUPPORTED : note("gpu-reset", 0, 0); }
int nvmlDeviceSetMemoryLockedClocks(void *d, unsigned low, unsigned high) {
    return get("memory_locks", 1) && !orin() ? note("memory", low, high) : NOT_SUPPORTED;
}
int nvmlDeviceResetMemoryLockedClocks(void *d) { return orin() ? NOT_SUPPORTED : note("memory-reset", 0, 0); }
