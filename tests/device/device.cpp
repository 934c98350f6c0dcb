// A CUDA runtime, driver, cuBLAS and NCCL for torch's CUDA build on a machine without a GPU.
//
// Device memory is host memory that takes no space until it is written; a device address cannot be read by the host.
// Kernels compute nothing (values.py may compute on the host in their place, at the launch). Streams, events,
// allocations, launches and waits are calls that are counted, and reported to a hook with what waits, allocates or frees.
// All work is complete when it is issued, except what NCCL receives: it is written at the first wait for it, or before
// the next work of that stream. So ranks depend on each other as on GPUs, and no host waits for a message any earlier.
//
// WORLD_FOLDER  where the ranks exchange messages, one file each, and where each process writes its log of NCCL's calls
// DEVICE_GPUS, DEVICE_GIB  number of devices and the memory of each
// DEVICE_MOST  bytes up to which copies and messages move data (by default all)

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
#define NOTHING(name) API int name() { return 0; }

// --- the host's side ---

static double number(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text ? atof(text) : otherwise;
}

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static size_t most() {
  static size_t bytes = number("DEVICE_MOST", 1e18);
  return bytes;
}

static std::atomic<long> launches{0}, waits{0};
static std::atomic<void (*)(const char*, long)> hook{nullptr};

static void say(const char* what, long n = 0) {
  waits += !!strstr(what, "Synchronize");
  static thread_local bool inside = false;
  auto call = hook.load();
  if (!call || inside) return;
  inside = true;
  call(what, n);
  inside = false;
}

// What is issued, a line each: thread, its label, kind, stream, value, group. Kinds are a kernel or copy (K), an event that
// a stream (R, W) or the host (E) records or waits for, a wait for a stream or, with -1, for the device (S), and NCCL's
// calls by their names with the peer. Python sets threads, labels and groups, and adds lines; a call of it from here
// would need its lock.
static std::atomic<bool> recording{false};
static thread_local std::string thread_name = "train", group_name;
static auto& labels = *new std::map<std::string, std::string>;
static auto& lines = *new std::string;
static std::mutex& lines_lock = *new std::mutex;

static void record(const char* kind, long stream, long value = 0, const char* text = nullptr) {
  if (!recording) return;
  std::lock_guard guard(lines_lock);
  lines += thread_name + '\t' + labels[thread_name] + '\t' + kind + '\t' + std::to_string(stream) + '\t' +
           std::to_string(value) + '\t' + (text ? text : group_name) + '\n';
}

// Waits for another rank without Python's lock, which another thread of this rank may need to let that rank go on.
static void wait_until(const std::function<bool()>& done) {
  if (done()) return;
  static auto holds = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
  static auto let_go = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  static auto take = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
  void* state = holds && holds() ? let_go() : nullptr;
  while (!done()) usleep(100);
  if (state) take(state);
}

// --- memory ---

struct Block { size_t size; char* host; };
static std::mutex& lock = *new std::mutex;
static auto& on_device = *new std::map<uintptr_t, Block>;
static auto& pinned = *new std::map<uintptr_t, Block>;
static size_t used = 0;
static const size_t PAGE = 2 << 20;

static size_t total() { return number("DEVICE_GIB", 79) * (1ul << 30); }
static size_t whole(size_t n) { return (n + PAGE - 1) / PAGE * PAGE; }

static Block* block_of(std::map<uintptr_t, Block>& blocks, const void* p) {
  auto after = blocks.upper_bound((uintptr_t)p);
  if (after == blocks.begin()) return nullptr;
  auto& [start, block] = *--after;
  return (uintptr_t)p < start + block.size ? &block : nullptr;
}

// 2: of the device, 1: pinned, 0: of the host
static int kind(const void* p) {
  std::lock_guard guard(lock);
  return block_of(on_device, p) ? 2 : block_of(pinned, p) ? 1 : 0;
}

// Where the host may read and write what lies at this address.
API void* device_host(const void* p) {
  std::lock_guard guard(lock);
  auto after = on_device.upper_bound((uintptr_t)p);
  if (after == on_device.begin()) return (void*)p;
  auto& [start, block] = *--after;
  return (uintptr_t)p < start + block.size ? block.host + ((uintptr_t)p - start) : (void*)p;
}

static char* reserve(size_t n) {
  char* p = (char*)mmap(nullptr, whole(n) + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : (char*)whole((size_t)p);
}

static bool back(void* p, size_t n) {
  char* host = (char*)mmap(nullptr, whole(n), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  on_device[(uintptr_t)p] = {n, host};
  used += n;
  return host != MAP_FAILED;
}

static void release(void* p) {
  std::lock_guard guard(lock);
  auto found = on_device.find((uintptr_t)p);
  if (found == on_device.end()) return;
  used -= found->second.size;
  munmap(found->second.host, whole(found->second.size));
  on_device.erase(found);
}

API long device_used() { return used; }
API long device_launches() { return launches; }
API long device_waits() { return waits; }
API void device_hook(void (*call)(const char*, long)) { hook = call; }
API void device_record() { recording = true; }
API void device_note(const char* kind, long value, const char* text) { record(kind, 0, value, text); }
API void device_group(const char* name) { group_name = name; }
API void device_label(const char* thread, const char* label) {
  std::lock_guard guard(lines_lock);
  labels[thread_name = thread] = label;
}
API void device_records(const char* path) {
  recording = false;
  FILE* file = fopen(path, "w");
  fwrite(lines.data(), 1, lines.size(), file);
  fclose(file);
}

API cudaError_t cudaMalloc(void** p, size_t n) {
  say("cudaMalloc", n);
  std::lock_guard guard(lock);
  *p = used + n + (1ul << 29) > total() ? nullptr : reserve(n);
  return *p && back(*p, n) ? cudaSuccess : cudaErrorMemoryAllocation;
}

API cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;  // how torch makes a context
  say("cudaFree");
  release(p);
  return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
  *all = total();
  *free = *all - used;
  return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  say("cudaHostAlloc", n);
  *p = aligned_alloc(4096, (n + 4096) / 4096 * 4096);
  std::lock_guard guard(lock);
  pinned[(uintptr_t)*p] = {n, nullptr};
  return cudaSuccess;
}

API cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  std::lock_guard guard(lock);
  pinned[(uintptr_t)p] = {n, nullptr};
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* p) {
  std::lock_guard guard(lock);
  pinned.erase((uintptr_t)p);
  return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* p) {
  cudaHostUnregister(p);
  free(p);
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  int where = kind(p);
  a->type = where == 2 ? cudaMemoryTypeDevice : where == 1 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  if (where) a->devicePointer = (void*)p;
  if (where == 1) a->hostPointer = (void*)p;
  return cudaSuccess;
}

// --- streams and events ---

// What a stream will have received, and where; `arrived` writes it.
struct Message { std::function<bool()> arrived; char* to; size_t size; bool done = false; std::mutex lock; };
using Messages = std::vector<std::shared_ptr<Message>>;
struct Stream { int id = 0, priority = 0; std::mutex lock; Messages expected; };
struct Event { double at = 0; bool recorded = false, timed = true; int stream = 0; long number = 0; Messages expected; };

static Stream default_stream;
static Stream& of(cudaStream_t s) { return (uintptr_t)s < 4096 ? default_stream : *(Stream*)s; }

static bool ready(const Messages& messages) {
  bool all = true;
  for (auto& each : messages) {
    std::unique_lock guard(each->lock, std::try_to_lock);
    if (guard.owns_lock() && !each->done) each->done = each->arrived();
    all = all && guard.owns_lock() && each->done;
  }
  return all;
}

// Write what this stream expects, or only what it expects in these bytes.
static void complete(Stream& s, const void* bytes = nullptr, size_t n = 0) {
  Messages expected;
  {
    std::lock_guard guard(s.lock);
    for (auto& each : s.expected)
      if (!bytes || (each->to < (char*)bytes + n && (char*)bytes < each->to + each->size)) expected.push_back(each);
  }
  if (expected.empty()) return;
  wait_until([&] { return ready(expected); });
  std::lock_guard guard(s.lock);
  std::erase_if(s.expected, [](auto& each) { return each->done; });
}

static cudaError_t launch(cudaStream_t s) {
  launches++;
  record("K", of(s).id);
  complete(of(s));
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int priority) {
  static std::atomic<int> count{1};
  auto* made = new Stream;
  made->id = count++;
  made->priority = priority;
  *s = (cudaStream_t)made;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) { return *p = of(s).priority, cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t s) { return ready(of(s).expected) ? cudaSuccess : cudaErrorNotReady; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  return *s = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long* id, cudaGraph_t*,
                                         const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id) *id = 0;
  return *s = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  say("cudaStreamSynchronize", of(s).id);
  record("S", of(s).id);
  complete(of(s));
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) {
  auto* made = new Event;
  made->timed = !(flags & cudaEventDisableTiming);
  *e = (cudaEvent_t)made;
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { return delete (Event*)e, cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  static std::atomic<long> count{1};
  auto& event = *(Event*)e;
  record("R", of(s).id, event.number = count++);
  std::lock_guard guard(of(s).lock);
  event.at = now(), event.recorded = true, event.stream = of(s).id, event.expected = of(s).expected;
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaError_t cudaEventQuery(cudaEvent_t e) { return ready(((Event*)e)->expected) ? cudaSuccess : cudaErrorNotReady; }
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  say("cudaEventSynchronize", ((Event*)e)->stream);
  record("E", 0, ((Event*)e)->number);
  auto expected = ((Event*)e)->expected;
  wait_until([&] { return ready(expected); });
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  auto& event = *(Event*)e;
  if (!event.recorded) say("a stream waits for an event that was never recorded", of(s).id);
  record("W", of(s).id, event.number);
  auto expected = event.expected;
  wait_until([&] { return ready(expected); });
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  auto &a = *(Event*)from, &b = *(Event*)to;
  if (!a.timed || !b.timed || !a.recorded || !b.recorded) return cudaErrorInvalidResourceHandle;
  return *ms = 1e3 * (b.at - a.at), cudaSuccess;
}

// --- launches, copies ---

static thread_local struct { dim3 grid, block; size_t shared; void* stream; } configuration;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  return configuration = {grid, block, shared, stream}, 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) { return *k = (cudaKernel_t)f, cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(s); }
API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(s); }
API cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(s); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void*, void**) { return launch(c->stream); }
API int cuLaunchKernel(void*, int, int, int, int, int, int, int, cudaStream_t s, void**, void**) { return launch(s); }
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void* data) {
  return complete(of(s)), call(data), cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = a->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  return *n = 2, cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  return *n = 2, cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t s) {
  int a = kind(to), b = kind(from);
  record("K", of(s).id);
  complete(of(s));
  if (a == 0 && b == 2) say("copy to unpinned memory", n);
  if (a == 2 && b == 0) say("copy from unpinned memory", n);
  if (n <= most()) memmove(device_host(to), device_host(from), n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind k) {
  say("cudaMemcpy", n);
  return cudaMemcpyAsync(to, from, n, k, nullptr);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) {
  return cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, s);
}
API cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t s) {
  record("K", of(s).id);
  complete(of(s));
  if (n <= most()) memset(device_host(p), value, n);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* p, int value, size_t n) { return cudaMemsetAsync(p, value, n, nullptr); }
API cudaError_t cudaGetSymbolAddress(void** p, const void*) {
  static char memory[1 << 16];
  return *p = memory, cudaSuccess;
}

// --- device and driver ---

static thread_local int device = 0;

API cudaError_t cudaGetDeviceCount(int* n) { return *n = number("DEVICE_GPUS", 1), cudaSuccess; }
API cudaError_t cudaGetDevice(int* d) { return *d = device, cudaSuccess; }
API cudaError_t cudaSetDevice(int d) { return device = d, cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "stand-in");
  p->totalGlobalMem = total(), p->major = 9, p->multiProcessorCount = 132, p->warpSize = 32;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->totalConstMem = 65536, p->textureAlignment = 512;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->pciBusID = 4 + d, p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = 1, p->l2CacheSize = 50 << 20;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  switch (a) {
    case cudaDevAttrMultiProcessorCount: *v = p.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = p.maxThreadsPerBlock; break;
    case cudaDevAttrWarpSize: *v = p.warpSize; break;
    default: *v = 1;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) { return snprintf(s, n, "0000:%02X:00.0", 4 + d), cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* v, int, int) { return *v = 1, cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() { return say("cudaDeviceSynchronize"), record("S", -1), cudaSuccess; }
API const char* cudaGetErrorString(cudaError_t) { return "an error of the stand-in"; }
API const char* cudaGetErrorName(cudaError_t) { return "an error of the stand-in"; }
API cudaError_t cudaDriverGetVersion(int* v) { return *v = 13000, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* v) { return *v = 13000, cudaSuccess; }
API int cuDriverGetVersion(int* v) { return *v = 13000, 0; }
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  return *active = 1, 0;
}
API int cuCtxGetCurrent(void** c) { return *c = (void*)16, 0; }
API int cuDeviceGet(int* d, int n) { return *d = n, 0; }
API int cuGetErrorString(int, const char** s) { return *s = "an error of the stand-in", 0; }
API int cuModuleLoadData(void** m, const void*) { return say("cuModuleLoadData"), *m = (void*)16, 0; }
API int cuModuleGetFunction(void** f, void*, const char*) { return *f = (void*)16, 0; }

API int nvmlInit() { return 0; }  // torch counts devices with NVML where CUDA must not start
API int nvmlDeviceGetCount_v2(int* n) { return cudaGetDeviceCount(n); }

// expandable segments
static int granularity(size_t* n, const void*, int) { return *n = PAGE, 0; }
static int address_reserve(void** p, size_t n, size_t, uintptr_t, unsigned long long) { return *p = reserve(n), *p ? 0 : 2; }
static int memory_create(unsigned long long* h, size_t n, const void*, unsigned long long) {
  return *h = n, used + n > total() ? 2 : 0;
}
static int memory_map(void* p, size_t n, size_t, unsigned long long, unsigned long long) {
  std::lock_guard guard(lock);
  return back(p, n) ? 0 : 2;
}
static int memory_unmap(void* p, size_t) { return release(p), 0; }
static int nothing() { return 0; }

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known = {
      {"cuMemGetAllocationGranularity", (void*)granularity}, {"cuMemAddressReserve", (void*)address_reserve},
      {"cuMemCreate", (void*)memory_create}, {"cuMemMap", (void*)memory_map}, {"cuMemUnmap", (void*)memory_unmap},
      {"cuDevicePrimaryCtxGetState", (void*)cuDevicePrimaryCtxGetState}, {"cuCtxGetCurrent", (void*)cuCtxGetCurrent},
      {"cuDeviceGet", (void*)cuDeviceGet}, {"cuDeviceGetAttribute", (void*)cudaDeviceGetAttribute},
      {"cuGetErrorString", (void*)cuGetErrorString}};
  auto found = known.find(name);
  *f = found == known.end() ? (void*)nothing : found->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- cuBLAS: handles; its products are launches without a count ---

template <class T> static cublasStatus_t handle(T* made) { return *made = (T)calloc(1, 64), CUBLAS_STATUS_SUCCESS; }

API cublasStatus_t cublasCreate_v2(cublasHandle_t* h) { return say("cublasCreate"), handle(h); }
API cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* m) { return *m = CUBLAS_DEFAULT_MATH, CUBLAS_STATUS_SUCCESS; }
API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* m) {
  return *m = CUBLAS_POINTER_MODE_HOST, CUBLAS_STATUS_SUCCESS;
}
API size_t cublasLtGetVersion() { return 130101; }
API cublasStatus_t cublasLtCreate(cublasLtHandle_t* h) { return handle(h); }
API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t, cudaDataType_t) { return handle(d); }
API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* d, cudaDataType, uint64_t, uint64_t, int64_t) {
  return handle(d);
}
API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* d) { return handle(d); }
API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t* r,
                                                  int* n) {
  memset(r, 0, sizeof *r);
  return *n = 1, CUBLAS_STATUS_SUCCESS;
}

// --- NCCL: messages are files, of a communicator and by its number among that rank's calls ---

static const cudaStream_t HOST = (cudaStream_t)-1;  // in place of a stream: the host waits

struct Communicator { std::string id; int rank, size; std::atomic<long> calls{0}; std::map<int, long> sent, received; int splits = 0; };
using Bytes = std::vector<char>;

static std::string folder() {
  const char* path = getenv("WORLD_FOLDER");
  if (!path) fprintf(stderr, "stand-in: NCCL needs WORLD_FOLDER\n"), abort();
  return path;
}

static void note(const char* what, Communicator& c, size_t n, int type, int peer, cudaStream_t s) {
  if (s != HOST) record(what, of(s).id, peer);
  static FILE* log = nullptr;
  static int owner = 0;  // a forked rank has a log of its own
  static std::mutex& guarded = *new std::mutex;
  std::lock_guard guard(guarded);
  if (owner != getpid()) {
    log = fopen((folder() + "/nccl." + std::to_string(owner = getpid())).c_str(), "w");
    setvbuf(log, nullptr, _IOLBF, 0);
  }
  char name[16];
  prctl(PR_GET_NAME, name);
  int thread = gettid() == getpid() || !strncmp(name, "pt_autograd", 11) ? 0 : gettid();  // 0: the training thread
  fprintf(log, "%s %s %d %d %zu %d %d %d %d\n", what, c.id.c_str(), c.rank, c.size, n, type, peer, s == HOST ? -1 : of(s).id, thread);
}

static std::string name_of(Communicator& c, const std::string& which, int from) {
  return folder() + "/" + c.id + "." + which + "." + std::to_string(from);
}

static void post(const std::string& name, const void* data, size_t n) {
  FILE* file = fopen((name + ".part").c_str(), "w");
  if (n <= most()) fwrite(device_host(data), 1, n, file);
  fclose(file);
  rename((name + ".part").c_str(), name.c_str());
}

static bool read(const std::string& name, Bytes& data, size_t n) {
  FILE* file = fopen(name.c_str(), "r");
  if (!file) return false;
  data.resize(n <= most() ? n : 0);
  if (fread(data.data(), 1, data.size(), file) != data.size() || fgetc(file) != EOF)
    fprintf(stderr, "stand-in: another size of message: %s\n", name.c_str()), abort();
  fclose(file);
  return true;
}

static void expect(cudaStream_t s, void* to, size_t n, std::function<bool()> arrived) {
  auto message = std::make_shared<Message>();
  message->arrived = std::move(arrived), message->to = (char*)to, message->size = n;
  std::lock_guard guard(of(s).lock);
  of(s).expected.push_back(message);
}

// All ranks post `n` bytes; `use` gets those of all, by rank, and writes `written` bytes at `to`.
static void exchange(Communicator& c, const void* data, size_t n, cudaStream_t s, void* to, size_t written,
                     std::function<void(std::vector<Bytes>&)> use) {
  if (s != HOST) complete(of(s), data, n);
  std::string which = "c" + std::to_string(c.calls++);
  post(name_of(c, which, c.rank), data, n);
  auto all = std::make_shared<std::vector<Bytes>>();
  auto arrived = [&c, which, n, all, use] {
    while ((int)all->size() < c.size) {
      Bytes bytes;
      if (!read(name_of(c, which, all->size()), bytes, n)) return false;
      all->push_back(std::move(bytes));
    }
    if (n <= most()) use(*all);
    all->clear();
    return true;
  };
  if (s != HOST) expect(s, to, written, arrived);
  else wait_until(arrived);
}

static size_t width(ncclDataType_t t) {
  switch (t) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}

struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = bits << 16;
    float f;
    return memcpy(&f, &wide, 4), f;
  }
  Bfloat16(float f) {
    uint32_t wide;
    memcpy(&wide, &f, 4);
    bits = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
};

template <class T, class Wide = T> static void reduce(char* out, std::vector<Bytes>& all, size_t first, size_t n, ncclRedOp_t op) {
  for (size_t i = 0; i < n; i++) {
    Wide sum = ((T*)all[0].data())[first + i];
    for (size_t r = 1; r < all.size(); r++) {
      Wide next = ((T*)all[r].data())[first + i];
      sum = op == ncclMax ? (next > sum ? next : sum) : op == ncclMin ? (next < sum ? next : sum)
            : op == ncclProd ? sum * next : Wide(T(sum + next));
    }
    ((T*)out)[i] = op == ncclAvg ? sum / Wide(all.size()) : sum;
  }
}

// out: n values from the first on
static void reduce(void* to, std::vector<Bytes>& all, size_t first, size_t n, ncclDataType_t t, ncclRedOp_t op) {
  char* out = (char*)device_host(to);
  switch (t) {
    case ncclInt8: return reduce<int8_t>(out, all, first, n, op);
    case ncclUint8: return reduce<uint8_t>(out, all, first, n, op);
    case ncclInt32: return reduce<int32_t>(out, all, first, n, op);
    case ncclInt64: return reduce<int64_t>(out, all, first, n, op);
    case ncclFloat32: return reduce<float>(out, all, first, n, op);
    case ncclFloat64: return reduce<double>(out, all, first, n, op);
    case ncclFloat16: return reduce<_Float16, float>(out, all, first, n, op);
    case ncclBfloat16: return reduce<Bfloat16, float>(out, all, first, n, op);
    default: fprintf(stderr, "stand-in: no sum of NCCL's type %d\n", t), abort();
  }
}

#define OF(c) Communicator& own = *(Communicator*)c
#define DONE return ncclSuccess

API ncclResult_t ncclAllReduce(const void* from, void* to, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  OF(c);
  note("allreduce", own, n, t, op, s);
  exchange(own, from, n * width(t), s, to, n * width(t), [=](auto& all) { reduce(to, all, 0, n, t, op); });
  DONE;
}
API ncclResult_t ncclReduce(const void* from, void* to, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t s) {
  OF(c);
  note("reduce", own, n, t, root, s);
  exchange(own, from, n * width(t), s, to, n * width(t), [=, &own](auto& all) { if (own.rank == root) reduce(to, all, 0, n, t, op); });
  DONE;
}
API ncclResult_t ncclReduceScatter(const void* from, void* to, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  OF(c);
  note("reducescatter", own, n, t, op, s);
  exchange(own, from, n * width(t) * own.size, s, to, n * width(t), [=, &own](auto& all) { reduce(to, all, own.rank * n, n, t, op); });
  DONE;
}
API ncclResult_t ncclBroadcast(const void* from, void* to, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
  OF(c);
  note("broadcast", own, n, t, root, s);
  exchange(own, from, n * width(t), s, to, n * width(t), [=](auto& all) { memcpy(device_host(to), all[root].data(), all[root].size()); });
  DONE;
}
API ncclResult_t ncclBcast(void* p, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
  return ncclBroadcast(p, p, n, t, root, c, s);
}
API ncclResult_t ncclAllGather(const void* from, void* to, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
  OF(c);
  note("allgather", own, n, t, 0, s);
  exchange(own, from, n * width(t), s, to, n * width(t) * own.size, [=](auto& all) {
    for (size_t r = 0; r < all.size(); r++) memcpy(device_host((char*)to + r * all[r].size()), all[r].data(), all[r].size());
  });
  DONE;
}
API ncclResult_t ncclSend(const void* from, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  OF(c);
  note("send", own, n, t, peer, s);
  post(name_of(own, "to" + std::to_string(peer) + "." + std::to_string(own.sent[peer]++), own.rank), from, n * width(t));
  DONE;
}
API ncclResult_t ncclRecv(void* to, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  OF(c);
  note("recv", own, n, t, peer, s);
  auto name = name_of(own, "to" + std::to_string(own.rank) + "." + std::to_string(own.received[peer]++), peer);
  expect(s, to, n * width(t), [=] {
    Bytes data;
    if (!read(name, data, n * width(t))) return false;
    memcpy(device_host(to), data.data(), data.size());
    unlink(name.c_str());
    return true;
  });
  DONE;
}

static ncclResult_t made(ncclComm_t* c, const std::string& id, int rank, int size) {
  say("a communicator", size);
  auto* own = new Communicator{id, rank, size};
  *c = (ncclComm_t)own;
  note("init", *own, 0, 0, 0, HOST);
  exchange(*own, "", 0, HOST, nullptr, 0, [](auto&) {});
  DONE;
}
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> count{0};
  memset(id, 0, sizeof *id);
  snprintf(id->internal, 64, "%d-%d", getpid(), count++);
  DONE;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return made(c, id.internal, rank, size);
}
API ncclResult_t ncclCommInitRank(ncclComm_t* c, int size, ncclUniqueId id, int rank) { return made(c, id.internal, rank, size); }
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int size, int rank, int, ncclUniqueId* id, ncclConfig_t*) {
  return made(c, id->internal, rank, size);
}
API ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* part, ncclConfig_t*) {
  OF(c);
  int mine[2] = {color, key}, size = 0, rank = 0;
  exchange(own, mine, sizeof mine, HOST, nullptr, 0, [&](auto& all) {
    for (int r = 0; r < own.size; r++) {
      int* other = (int*)all[r].data();
      size += other[0] == color;
      rank += other[0] == color && (other[1] < key || (other[1] == key && r < own.rank));
    }
  });
  int number = own.splits++;
  if (color == NCCL_SPLIT_NOCOLOR) return *part = nullptr, ncclSuccess;
  return made(part, own.id + "s" + std::to_string(number) + "c" + std::to_string(color), rank, size);
}
API ncclResult_t ncclGetVersion(int* v) { return *v = 23007, ncclSuccess; }
API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* r) { return *r = ncclSuccess, ncclSuccess; }
API ncclResult_t ncclCommCount(const ncclComm_t c, int* n) { return *n = ((Communicator*)c)->size, ncclSuccess; }
API ncclResult_t ncclCommUserRank(const ncclComm_t c, int* n) { return *n = ((Communicator*)c)->rank, ncclSuccess; }
API const char* ncclGetErrorString(ncclResult_t) { return "an error of the stand-in"; }
API const char* ncclGetLastError(ncclComm_t) { return ""; }
