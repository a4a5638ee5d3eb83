/* A libnvidia-ml.so.1 for tests: its answers come from the text file $FAKE_NVML, read anew when it is another, so that a
 * test injects a fault by replacing the file. nvidia-ml-py loads it unmodified. Lines of the file, the last of a kind wins:
 *
 *   gpus N                    how many GPUs there are
 *   order G G ...             which of them the driver lists, under the indices 0, 1, ... (as after a renumbering, or
 *                             a boot that found fewer); without it all, in their order
 *   model H100 | A100 | L4    what kind: memory, NVLinks, fabric
 *   KEY VALUE                 of the driver ("driver 550.90.07")
 *   G.KEY VALUE               of GPU number G ("0.temperature 54", "1.lost 1"); *.KEY VALUE: of all
 *   error FUNCTION CODE       this function fails with this NVML code
 *   hang FUNCTION             this function does not return while the line is there
 *   cold MS                   a GPU is brought up, which takes so long, when a process first asks for it
 *   lost_wakes 1              a wait for events fails with GPU_IS_LOST while a GPU of its set is lost
 *   no_events 1               no event sets on this machine (a virtual GPU)
 *   xid SEQ G CODE            an event; each SEQ is delivered once to every set that the GPU is registered with
 *
 * OLD_DRIVER leaves out what drivers before 550 do not export. Build:
 *   cc -shared -fPIC -O1 -Wall -Wextra -Werror -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fakenvml.c
 *
 * Layouts of the structures: nvml.h of CUDA 12 and 13, as nvidia-ml-py declares them. */
#define _GNU_SOURCE
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef struct { int number; } *device_t;
typedef unsigned long long u64;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory2_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { device_t device; u64 type, data; unsigned gpu_instance, compute_instance; } event_t;
typedef struct { unsigned field, scope; long long timestamp, latency; unsigned type; int result; u64 value; } field_t;
typedef struct {
  unsigned version; u64 counters[11]; unsigned exceeded;
} sram_t;
typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } fabric_t;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned version; int margin; } margin_t;
typedef struct { unsigned version; unsigned sensor; int value; } temperature_t;

enum {
  SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_LOST = 15,
};
enum { XID = 8, RECOVERY_ACTION = 230, MOST = 16, LINE = 256, MOST_LINES = 512 };

static struct { int number; } devices[MOST];
static int initialized;

/* The file's lines as key and rest, read again when it is another file (it is replaced, never written into): reading it
 * on each of the hundreds of calls of a look would be most of what the probe seems to cost. Not for two threads at once. */
static struct { char key[LINE], rest[LINE]; } lines[MOST_LINES];
static int count_of_lines;

static void refresh(void) {
  static struct stat known;
  struct stat now;
  char line[2 * LINE];
  const char *path = getenv("FAKE_NVML");
  FILE *file;
  if (!path || stat(path, &now)) {
    count_of_lines = 0;
    memset(&known, 0, sizeof known);
    return;
  }
  if (now.st_ino == known.st_ino && now.st_size == known.st_size && now.st_mtim.tv_sec == known.st_mtim.tv_sec &&
      now.st_mtim.tv_nsec == known.st_mtim.tv_nsec)
    return;
  known = now;
  count_of_lines = 0;
  if (!(file = fopen(path, "re"))) return;
  while (count_of_lines < MOST_LINES && fgets(line, sizeof line, file))
    if (sscanf(line, "%255s %255[^\n]", lines[count_of_lines].key, lines[count_of_lines].rest) == 2) count_of_lines++;
  fclose(file);
}

/* The value of the last line "KEY VALUE"; NULL if there is none. */
static const char *look(const char *key) {
  for (int i = count_of_lines - 1; i >= 0; i--)
    if (!strcmp(lines[i].key, key)) return lines[i].rest;
  return NULL;
}

/* A line "KIND FUNCTION ..." is there; its third word as a number, or 1. */
static int ordered(const char *kind, const char *function) {
  char second[LINE];
  for (int i = count_of_lines - 1; i >= 0; i--) {
    int code = 1;
    if (!strcmp(lines[i].key, kind) && sscanf(lines[i].rest, "%255s %d", second, &code) >= 1 && !strcmp(second, function))
      return code;
  }
  return 0;
}

static int is_model(const char *name) {
  const char *model = look("model");
  return !strcmp(model ? model : "H100", name);
}

static const char *text(device_t d, const char *key) {
  char name[LINE];
  const char *found;
  snprintf(name, sizeof name, "%d.%s", d->number, key);
  if ((found = look(name))) return found;
  snprintf(name, sizeof name, "*.%s", key);
  return look(name);
}

static long long number(device_t d, const char *key, long long otherwise) {
  const char *found = text(d, key);
  return found ? strtoll(found, NULL, 0) : otherwise;
}

/* The numbers of the GPUs that are listed, in order; how many there are. */
static int listed(int *out) {
  const char *found = look("gpus"), *order = look("order");
  int n = 0, number, length;
  if (order) {
    for (; n < MOST && sscanf(order, " %d%n", &number, &length) == 1; order += length)
      if (number >= 0 && number < MOST) out[n++] = number;
    return n;
  }
  for (n = 0; found && n < atoi(found) && n < MOST; n++) out[n] = n;
  return n;
}
static int count(void) {
  int numbers[MOST];
  return listed(numbers);
}

/* What every function does first: hang, fail as ordered, look whether the GPU is there. */
static int enter(const char *function, device_t d, int of_device) {
  struct timespec moment = {0, 10000000};
  int code;
  for (refresh(); ordered("hang", function); refresh()) nanosleep(&moment, NULL);
  if ((code = ordered("error", function))) return code;
  if (!initialized) return UNINITIALIZED;
  if (!of_device) return SUCCESS;
  if (!d || (void *)d < (void *)devices || (void *)d >= (void *)(devices + MOST)) return INVALID;
  return number(d, "lost", 0) ? GPU_LOST : SUCCESS;
}

#define ENTER(device, of_device) \
  do { int code_ = enter(__func__, device, of_device); if (code_) return code_; } while (0)

static int copy(char *out, unsigned size, const char *value) {
  if (strlen(value) >= size) return INSUFFICIENT_SIZE;
  strcpy(out, value);
  return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
  int code;
  (void)flags;
  initialized = 1;
  if ((code = enter(__func__, NULL, 0))) initialized = 0;
  for (int i = 0; i < MOST; i++) devices[i].number = i;
  return code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { ENTER(NULL, 0); initialized = 0; return SUCCESS; }
const char *nvmlErrorString(int code) {
  static char words[32];
  snprintf(words, sizeof words, "fake error %d", code);
  return words;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
  ENTER(NULL, 0);
  const char *found = look("driver");
  return copy(out, size, found ? found : "570.00.00");
}
int nvmlDeviceGetCount_v2(unsigned *out) { ENTER(NULL, 0); *out = count(); return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *out) {
  ENTER(NULL, 0);
  int numbers[MOST];
  static int warm[MOST];
  if ((int)index >= listed(numbers)) return INVALID;
  if (look("cold") && !warm[numbers[index]]) usleep(1000 * atoi(look("cold")));
  warm[numbers[index]] = 1;
  *out = (device_t)&devices[numbers[index]];
  return SUCCESS;
}
int nvmlDeviceGetUUID(device_t d, char *out, unsigned size) {
  ENTER(d, 1);
  char made[LINE];
  const char *found = text(d, "uuid");
  snprintf(made, sizeof made, "GPU-fa4e0000-0000-0000-0000-%012d", d->number);
  return copy(out, size, found ? found : made);
}
int nvmlDeviceGetName(device_t d, char *out, unsigned size) {
  ENTER(d, 1);
  return copy(out, size, is_model("L4") ? "NVIDIA L4" : is_model("A100") ? "NVIDIA A100-SXM4-80GB" : "NVIDIA H100 80GB HBM3");
}
int nvmlDeviceGetPciInfo_v3(device_t d, pci_t *out) {
  ENTER(d, 1);
  memset(out, 0, sizeof *out);
  out->bus = 0x10 + d->number;
  snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
  snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", out->bus);
  return SUCCESS;
}
int nvmlDeviceGetTemperature(device_t d, int sensor, unsigned *out) {
  ENTER(d, 1);
  (void)sensor;
  *out = number(d, "temperature", 40);
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(device_t d, memory_t *out) {
  ENTER(d, 1);
  out->total = (is_model("L4") ? 24ULL : 80ULL) << 30;
  out->used = number(d, "memory_used", 0) + number(d, "reserved", 0); /* this version does not tell them apart */
  out->free = out->total - out->used;
  return SUCCESS;
}
int nvmlDeviceGetMigMode(device_t d, unsigned *now, unsigned *pending) {
  ENTER(d, 1);
  if (is_model("L4")) return NOT_SUPPORTED;
  *now = *pending = number(d, "mig", 0);
  return SUCCESS;
}
int nvmlDeviceGetEccMode(device_t d, unsigned *now, unsigned *pending) {
  ENTER(d, 1);
  *now = *pending = number(d, "ecc", 1);
  return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(device_t d, int uncorrected, int aggregate, u64 *out) {
  ENTER(d, 1);
  *out = uncorrected && !aggregate ? number(d, "ecc_uncorrected", 0) : 0;
  return SUCCESS;
}
int nvmlDeviceGetRemappedRows(device_t d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  ENTER(d, 1);
  if (is_model("L4")) return NOT_SUPPORTED;
  *corrected = 0;
  *uncorrected = number(d, "remapped", 0);
  *pending = number(d, "remap_pending", 0);
  *failed = number(d, "remap_failed", 0);
  return SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device_t d, u64 *out) { ENTER(d, 1); *out = number(d, "clock_reasons", 0); return SUCCESS; }
int nvmlDeviceGetCurrPcieLinkGeneration(device_t d, unsigned *out) { ENTER(d, 1); *out = number(d, "pcie_generation", 5); return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkGeneration(device_t d, unsigned *out) { ENTER(d, 1); *out = 5; return SUCCESS; }
int nvmlDeviceGetCurrPcieLinkWidth(device_t d, unsigned *out) { ENTER(d, 1); *out = number(d, "pcie_width", 16); return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkWidth(device_t d, unsigned *out) { ENTER(d, 1); *out = 16; return SUCCESS; }
int nvmlDeviceGetPcieReplayCounter(device_t d, unsigned *out) { ENTER(d, 1); *out = number(d, "pcie_replays", 0); return SUCCESS; }
int nvmlDeviceGetNvLinkState(device_t d, unsigned link, unsigned *out) {
  ENTER(d, 1);
  unsigned links = is_model("L4") ? 0 : is_model("A100") ? 12 : 18;
  if (!links) return NOT_SUPPORTED;
  if (link >= links) return INVALID;
  *out = link < links - number(d, "links_down", 0);
  return SUCCESS;
}
/* "0.processes PID:BYTES PID:BYTES" */
int nvmlDeviceGetComputeRunningProcesses_v3(device_t d, unsigned *size, process_t *out) {
  ENTER(d, 1);
  const char *found = text(d, "processes");
  char words[LINE];
  unsigned n = 0, room = *size;
  strcpy(words, found ? found : "");
  for (char *word = strtok(words, " "); word; word = strtok(NULL, " "), n++) {
    if (!out || n >= room) continue;
    out[n] = (process_t){.gpu_instance = ~0u, .compute_instance = ~0u};
    sscanf(word, "%u:%llu", &out[n].pid, &out[n].used);
  }
  *size = n;
  return n > (out ? room : 0) ? INSUFFICIENT_SIZE : SUCCESS;
}
/* "0.graphics N": so many, without names */
int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t d, unsigned *size, process_t *out) {
  ENTER(d, 1);
  unsigned n = number(d, "graphics", 0), room = *size;
  for (unsigned i = 0; out && i < n && i < room; i++) out[i] = (process_t){.pid = 900000 + i};
  *size = n;
  return n > (out ? room : 0) ? INSUFFICIENT_SIZE : SUCCESS;
}
int nvmlDeviceGetFieldValues(device_t d, int n, field_t *fields) {
  ENTER(d, 1);
  for (int i = 0; i < n; i++) {
    fields[i].result = NOT_SUPPORTED;
#ifndef OLD_DRIVER
    if (fields[i].field == RECOVERY_ACTION) {
      fields[i].type = 1; /* unsigned int */
      fields[i].value = number(d, "recovery", 0);
      fields[i].result = SUCCESS;
    }
#endif
  }
  return SUCCESS;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(device_t d, memory2_t *out) {
  ENTER(d, 1);
  if (out->version != (sizeof *out | 2u << 24)) return 25;
  out->total = (is_model("L4") ? 24ULL : 80ULL) << 30;
  out->reserved = number(d, "reserved", 0);
  out->used = number(d, "memory_used", 0);
  out->free = out->total - out->used - out->reserved;
  return SUCCESS;
}
int nvmlDeviceGetNumaNodeId(device_t d, unsigned *node) {
  ENTER(d, 1);
  *node = number(d, "numa_node", 0);
  return *node ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetCurrentClocksEventReasons(device_t d, u64 *out) { ENTER(d, 1); *out = number(d, "clock_reasons", 0); return SUCCESS; }
int nvmlDeviceGetTemperatureV(device_t d, temperature_t *out) {
  ENTER(d, 1);
  if (out->version != (sizeof *out | 1u << 24)) return 25;
  out->value = number(d, "temperature", 40);
  return SUCCESS;
}
int nvmlDeviceGetMarginTemperature(device_t d, margin_t *out) {
  ENTER(d, 1);
  if (out->version != (sizeof *out | 1u << 24)) return 25;
  out->margin = number(d, "margin", 45);
  return SUCCESS;
}
int nvmlDeviceGetSramEccErrorStatus(device_t d, sram_t *out) {
  ENTER(d, 1);
  if (out->version != (sizeof *out | 1u << 24)) return 25;
  if (is_model("L4")) return NOT_SUPPORTED;
  memset(out->counters, 0, sizeof out->counters);
  out->exceeded = number(d, "sram_exceeded", 0);
  return SUCCESS;
}
int nvmlDeviceGetGpuFabricInfo(device_t d, fabric_t *out) {
  ENTER(d, 1);
  memset(out, 0, sizeof *out);
  if (!is_model("H100")) return NOT_SUPPORTED;
  out->state = number(d, "fabric", 3);
  out->status = number(d, "fabric_status", 0);
  return SUCCESS;
}
#endif

struct set { u64 seen; unsigned registered; };

static int next_event(struct set *set, int *gpu, u64 *code) {
  u64 sequence, best = ~0ULL, value;
  int of;
  for (int i = 0; i < count_of_lines; i++)
    if (!strcmp(lines[i].key, "xid") && sscanf(lines[i].rest, "%llu %d %llu", &sequence, &of, &value) == 3 &&
        sequence > set->seen && sequence < best && of >= 0 && of < MOST && (set->registered >> of & 1)) {
      best = sequence;
      *gpu = of;
      *code = value;
    }
  if (best == ~0ULL) return 0;
  set->seen = best;
  return 1;
}

/* As on hardware, only what happens after the set was made is delivered. */
int nvmlEventSetCreate(struct set **out) {
  ENTER(NULL, 0);
  int gpu;
  u64 code;
  if (look("no_events")) return NOT_SUPPORTED;
  if (!(*out = calloc(1, sizeof **out))) return INVALID;
  (*out)->registered = ~0u;
  while (next_event(*out, &gpu, &code)) continue;
  (*out)->registered = 0;
  return SUCCESS;
}
int nvmlDeviceRegisterEvents(device_t d, u64 types, struct set *set) {
  ENTER(d, 1);
  if (types & XID) set->registered |= 1u << d->number;
  return SUCCESS;
}
int nvmlEventSetFree(struct set *set) { free(set); return SUCCESS; }
/* Sleeps, as a real driver does, until the file is replaced or the time is over. */
static void until_replaced(int milliseconds) {
  static int watch = -1;
  char folder[LINE], told[4096];
  struct pollfd one;
  if (watch < 0) {
    const char *path = getenv("FAKE_NVML");
    snprintf(folder, sizeof folder, "%s", path ? path : "/");
    if (strrchr(folder, '/')) *strrchr(folder, '/') = 0;
    watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    inotify_add_watch(watch, *folder ? folder : "/", IN_MOVED_TO);
  }
  one = (struct pollfd){.fd = watch, .events = POLLIN};
  poll(&one, 1, milliseconds);
  while (read(watch, told, sizeof told) > 0) continue;
}
int nvmlEventSetWait_v2(struct set *set, event_t *out, unsigned milliseconds) {
  struct timespec now, began;
  int gpu, left;
  u64 code;
  memset(out, 0, sizeof *out);
  clock_gettime(CLOCK_MONOTONIC, &began);
  for (;;) {
    ENTER(NULL, 0);
    if (next_event(set, &gpu, &code)) {
      *out = (event_t){(device_t)&devices[gpu], XID, code, ~0u, ~0u};
      return SUCCESS;
    }
    for (int i = 0; i < MOST && look("lost_wakes"); i++)
      if (set->registered >> i & 1 && number((device_t)&devices[i], "lost", 0)) return GPU_LOST;
    clock_gettime(CLOCK_MONOTONIC, &now);
    left = (int)milliseconds - (int)((now.tv_sec - began.tv_sec) * 1000 + (now.tv_nsec - began.tv_nsec) / 1000000);
    if (left <= 0) return TIMEOUT;
    until_replaced(left);
  }
}
