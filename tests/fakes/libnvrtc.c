// A run-time compiler that compiles nothing: what it makes names what it was made from. Beside the fake driver it lets
// the way from a kernel's text to a loaded module be run without NVIDIA's compiler.
//
//   FAKE_NVRTC_LOG   a file that gets a line for each compilation, from every process that has this library
//   FAKE_NVRTC_MS    how long a compilation takes
//   FAKE_NVRTC_FAIL  a file name whose compilation fails with two lines of log
//   FAKE_NVRTC_MAJOR 12
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct Program { char name[64]; char* made; char log[256]; };

int nvrtcVersion(int* major, int* minor) {
  const char* v = getenv("FAKE_NVRTC_MAJOR");
  *major = v ? atoi(v) : 12, *minor = 6;
  return 0;
}
int nvrtcCreateProgram(struct Program** p, const char* source, const char* name, int n, const char* const* texts,
                       const char* const* names) {
  if (!source || (n && (!texts || !names))) return 3;
  *p = calloc(1, sizeof **p);
  snprintf((*p)->name, sizeof (*p)->name, "%s", name);
  return 0;
}
int nvrtcCompileProgram(struct Program* p, int n, const char* const* options) {
  const char *path = getenv("FAKE_NVRTC_LOG"), *ms = getenv("FAKE_NVRTC_MS"), *fail = getenv("FAKE_NVRTC_FAIL");
  size_t len = strlen(p->name) + 16;
  for (int i = 0; i < n; i++) len += strlen(options[i]) + 1;
  char* all = calloc(1, len);
  snprintf(all, len, "\177ELF %s", p->name);
  for (int i = 0; i < n; i++) strcat(strcat(all, " "), options[i]);
  p->made = all;
  if (path) {
    // One write to a file that is appended to: lines of several processes do not mix.
    int f = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
    char* line = malloc(len + 1);
    int bytes = snprintf(line, len + 1, "%s\n", all + 5);
    if (f < 0 || write(f, line, bytes) != bytes) abort();
    close(f);
    free(line);
  }
  if (ms) usleep(1000 * atoi(ms));
  if (!fail || strcmp(fail, p->name)) return 0;
  snprintf(p->log, sizeof p->log, "note: line 1\n%s(7): error: identifier \"warp\" is undefined\n", p->name);
  return 6;
}
int nvrtcGetCUBINSize(struct Program* p, size_t* n) { return *n = strlen(p->made) + 1, 0; }
int nvrtcGetCUBIN(struct Program* p, char* to) { return strcpy(to, p->made), 0; }
int nvrtcGetPTXSize(struct Program* p, size_t* n) { return *n = strlen(p->made) + 1, 0; }
int nvrtcGetPTX(struct Program* p, char* to) { return memcpy(strcpy(to, p->made), "//  ", 4), 0; }
int nvrtcGetProgramLogSize(struct Program* p, size_t* n) { return *n = strlen(p->log) + 1, 0; }
int nvrtcGetProgramLog(struct Program* p, char* to) { return strcpy(to, p->log), 0; }
const char* nvrtcGetErrorString(int e) { return e == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_OTHER"; }
int nvrtcDestroyProgram(struct Program** p) {
  free((*p)->made);
  free(*p);
  *p = 0;
  return 0;
}
